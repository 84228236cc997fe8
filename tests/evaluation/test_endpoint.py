"""tools/clients/endpoint.py and chat_prompts.py against a real HTTP server that answers well and badly."""

import base64
import contextlib
import io
import json
import threading

import numpy as np
import pytest
from PIL import Image

from tests.evaluation.http_stand_in import reply, served
from vlrl.config import validate
from vlrl.engine.base import Request, Sampling
from vlrl.errors import ConfigError, DataError, TrainingError
from vlrl.services import chat as module
from vlrl.services.chat import address_of, data_urls
from vlrl.task import Task
from vlrl.tools.clients.chat_prompts import ChatEncoder
from vlrl.tools.clients.endpoint import Endpoint
from vlrl.types import LoadedMedia, Media, Prompt, Sample


def request(text="hi", n=1, key=(1, 2), **sampling):
    none = np.zeros(0, np.int64)
    prompt = Prompt(sample_id="a", text=text, ids=none, raw_ids=none, positions=none[None],
                    mm={"messages": [{"role": "user", "content": text}]})
    return Request(prompt=prompt, n=n, key=key, sampling=Sampling(**{"max_new_tokens": 5, **sampling}))


def answers(script, requests=None, **options):
    with served(script) as server:
        made = Endpoint(server.url, options.pop("model", "m"), **{"wait_s": 0.0, "retries": 2, "timeout_s": 20.0,
                                                                  **options})
        with contextlib.closing(made) as engine:
            return engine.generate([request()] if requests is None else requests), server


def texts(found):
    return [[c.text for c in row] for row in found]


def test_requests_and_answers(monkeypatch):
    found, server = answers(lambda body, _: f"{body['messages'][0]['content']}!",
                            [request("a", 2, temperature=0.5, top_p=0.9, stop=("x",)), request("b", key=(1, 3))],
                            key="k")
    assert texts(found) == [["a!", "a!"], ["b!"]] and len(found[0][0].tokens) == 3
    assert not found[0][0].truncated and found[0][0].error is None
    bodies = sorted((body for _, _, body in server.asked), key=lambda body: body["messages"][0]["content"])
    path, headers, _ = server.asked[0]
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer k"
    assert {k: bodies[0][k] for k in ("model", "temperature", "top_p", "max_tokens", "stop")} == {
        "model": "m", "temperature": 0.5, "top_p": 0.9, "max_tokens": 5, "stop": ["x"]}
    assert len({body["seed"] for body in bodies}) == 3 and "top_p" not in bodies[2] and "stop" not in bodies[2]
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    _, server = answers(lambda *_: "x")
    assert "Authorization" not in server.asked[0][1] and "secret" not in json.dumps(server.asked)
    with served(lambda *_: "elsewhere") as other:
        found, _ = answers(lambda *_: lambda h: h.send(307, b"", Location=f"{other.url}/chat/completions"))
        assert found[0][0].error and not other.asked


def test_what_another_try_may_mend():
    for bad in (500, 503, 429, 408, b"<html>", b'{"choices": []}', b"[]", b"null", b'{"choices": [{"message": 3}]}',
                b"\xff\xfe", b"[" * 100_000):
        found, server = answers(lambda _, number, bad=bad: bad if number < 2 else "good")
        assert texts(found) == [["good"]] and len(server.asked) == 3, bad
        found, server = answers(lambda *_, bad=bad: bad)
        assert found[0][0].error.startswith("not answered") and len(server.asked) == 3, bad


def test_what_no_try_will_mend():
    filtered = reply("x") | {"choices": [{"message": {"content": "x"}, "finish_reason": "content_filter"}]}
    for bad in (400, 413, 422, 301, filtered):
        found, server = answers(lambda *_, bad=bad: bad)
        assert found[0][0].error and not found[0][0].text and len(server.asked) == 1, bad
    for status, said in ((401, "refuses the key"), (403, "refuses the key"), (404, "path or the model")):
        with pytest.raises(ConfigError, match=said) as error:  # the user must mend it
            answers(lambda *_, status=status: status, key="very-secret")
        assert "very-secret" not in str(error.value) and "--endpoint" in str(error.value)


def test_slow_and_endless_answers(monkeypatch):
    found, server = answers(lambda _, n: (lambda h: h.send(200, b'{"choi', length=500)) if n == 0 else "good")
    assert texts(found) == [["good"]] and len(server.asked) == 2
    held = threading.Event()

    def slow(handler):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        while not held.wait(0.02):  # a byte now and then: no read ever waits long
            with contextlib.suppress(OSError):
                handler.wfile.write(b" ")

    found, _ = answers(lambda *_: slow, timeout_s=0.2, retries=0)
    held.set()
    assert "0.2 s" in found[0][0].error
    monkeypatch.setattr(module, "MOST_BYTES", 1000)
    found, server = answers(lambda *_: "x" * 5000)
    assert "more than 1,000 bytes" in found[0][0].error and len(server.asked) == 1
    with pytest.raises(TrainingError, match="none of 16 requests"):
        answers(lambda *_: 400, [request(n=20)])
    found, _ = answers(lambda _, n: 400 if n else "one", [request(n=6)], concurrency=1)
    assert sum(c.error is not None for c in found[0]) == 5


def test_the_server_says_how_long_to_wait(monkeypatch):
    waits = []
    monkeypatch.setattr(module.threading.Event, "wait",
                        lambda self, seconds=None, real=module.threading.Event.wait: waits.append(seconds) or
                        real(self, 0 if seconds and seconds >= 7 else seconds))
    answers(lambda _, n: (lambda h: h.send(429, b"{}", Retry_After="7")) if n == 0 else "good", wait_s=0.25)
    assert 7.0 in waits
    answers(lambda _, n: (lambda h: h.send(429, b"{}", Retry_After="99999")) if n == 0 else "good")
    assert 60.0 in waits and 99999.0 not in waits


def test_what_answers_may_look_like():
    bodies = [reply([{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]), reply(None),
              {"choices": [{"message": {"content": "4", "reasoning_content": "2+2"}, "finish_reason": "length"}],
               "usage": {"completion_tokens": True}},
              {"choices": [{"message": {"content": "<think>x</think>4", "reasoning": "x"}}], "usage": None}]
    found, _ = answers(lambda _, n: bodies[n], [request(key=(i,)) for i in range(4)], concurrency=1)
    assert texts(found) == [["ab"], [""], ["<think>2+2</think>4"], ["<think>x</think>4"]]
    assert found[2][0].truncated and len(found[2][0].tokens) == len(found[3][0].tokens) == 0
    def script(body, _):
        if "max_tokens" in body:
            return lambda h: h.send(400, b'{"error": "use max_completion_tokens instead"}')
        return str(body["max_completion_tokens"])

    found, server = answers(script, [request(), request()], concurrency=1, retries=0)
    assert texts(found) == [["5"], ["5"]] and len(server.asked) == 3


def test_addresses_and_the_one_model_of_a_server():
    with served(lambda body, _: body["model"]) as server, contextlib.closing(Endpoint(server.url, None)) as engine:
        assert texts(engine.generate([request()])) == [["only"]]
    with served(lambda *_: "", models=("a", "b")) as server, pytest.raises(ConfigError, match=r"\(a, b\).*--model"):
        Endpoint(server.url, None)
    with pytest.raises(ConfigError, match="does not list"):
        Endpoint("http://127.0.0.1:1/v1", None)
    for url in ("127.0.0.1:8000", "file:///etc/passwd", "http://", "ftp://a/v1", "http://[::1", "http://h:99999/"):
        with pytest.raises(ConfigError, match="is not the address"):
            address_of(url)
    assert address_of("https://h:1/v1/chat/completions") == address_of("https://h:1/v1/") == "https://h:1/v1"
    said = r"--endpoint http://h/v1: the address must not have .*--key-env"
    for url in ("http://me:s3cret@h/v1", "http://:s3cret@h/v1", "http://h/v1?key=s3cret", "http://h/v1#s3cret"):
        with pytest.raises(ConfigError, match=said) as error:
            address_of(url)
        assert "s3cret" not in str(error.value), url


class Look(Task):
    prompt = "What is {id}?"
    rewards = {"right": 1.0}


def pixels(url):
    head, _, data = url.partition(",")
    return head, np.asarray(Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def test_prompts_show_the_pixels_of_images_and_frames(monkeypatch):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (20, 30, 3), np.uint8))
    frames = [Image.new("RGB", (32, 32), (i * 40, 0, 0)) for i in range(4)]
    sample = Sample(id="s", row={"id": "it"}, media=(Media(source=image), Media(kind="video", source=frames, fps=2.0)))
    encode = ChatEncoder(validate({"task": "x", "model": {"name": "x"}}))
    prompt = encode(Look(), sample)
    (message,) = prompt.mm["messages"]
    kinds = [part["type"] for part in message["content"]]
    assert kinds == ["image_url"] * 5 + ["text"] and message["content"][-1]["text"] == "What is it?"
    urls = [part["image_url"]["url"] for part in message["content"][:-1]]
    assert pixels(urls[0])[0] == "data:image/png;base64"
    assert (pixels(urls[0])[1] == np.asarray(image)).all() and pixels(urls[3])[1][0, 0].tolist() == [80, 0, 0]
    assert [m.size for m in prompt.media] == [(30, 20), (32, 32)] and "base64" not in prompt.text
    with pytest.raises(DataError, match="has tools"):
        encode.prompt(sample, [], [{"name": "zoom"}])
    with pytest.raises(DataError, match="fewer images"):
        encode.prompt(sample, [{"role": "user", "content": "no place"}])
    monkeypatch.setattr("vlrl.services.chat.MOST_PNG", 100)
    loaded = LoadedMedia(kind="image", frames=(Image.new("RGB", (64, 64), (10, 200, 30)),), sha256="x")
    head, shown = pixels(data_urls(loaded)[0])
    assert head == "data:image/jpeg;base64" and abs(shown[5, 5].astype(int) - [10, 200, 30]).max() < 6


KEY = "sk-0123456789abcdef"


def repeating(status, before=""):
    """Answers with the request's own key, as some gateways do, at the end of `before`."""
    return lambda *_: lambda h: h.send(status, json.dumps({"error": before + h.headers["Authorization"]}).encode())


def test_a_key_that_a_server_repeats_is_neither_printed_nor_stored():
    for before in ("", "x" * 275):
        with pytest.raises(ConfigError, match="refuses the key") as error:
            answers(repeating(401, before), key=KEY)
        assert KEY[:8] not in str(error.value), before
        for status in (400, 500, 200):  # 200: no chat completion
            found, _ = answers(repeating(status, before), key=KEY, retries=0)
            assert found[0][0].error and KEY[:8] not in found[0][0].error, before
        found, _ = answers(lambda *_, page=f"<p>{before[:60]}{KEY}</p>": page.encode(), key=KEY, retries=0)
        assert "not JSON" in found[0][0].error and KEY[:8] not in found[0][0].error, before
        with pytest.raises(TrainingError, match="none of 16") as ended:
            answers(repeating(400, before), [request(n=20)], key=KEY)
        assert KEY[:8] not in str(ended.value), before
        with served(lambda *_: "", models=("a", f"b {KEY}")) as server, pytest.raises(ConfigError) as several:
            Endpoint(server.url, None, key=KEY)
        assert KEY not in str(several.value), before
