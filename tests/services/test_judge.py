"""services.judge: a real HTTP server that answers well and badly, what is kept and what is asked twice, what is shown
of episodes, and what `vlrl serve --judge` would start."""

import base64
import io
import itertools
import json
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest
from PIL import Image

from tests.cli.test_serve import free_port
from tests.services.stub import PLACE, count_of, judging, text_of
from tests.tables import refused
from vlrl import Observation, Sample, Task
from vlrl.config import validate
from vlrl.config.schema import LimitsSettings
from vlrl.config.services import JudgeSettings
from vlrl.data.media import load
from vlrl.errors import ConfigError, TrainingError
from vlrl.rewards.verdicts import MOST_SHOWN, quoted
from vlrl.services.chat import data_urls
from vlrl.services.judge import Judge
from vlrl.services.judge_prompts import MOST_PICTURES, MOST_PIXELS, judge_view
from vlrl.services.judge_server import prepare
from vlrl.task.services import Question, ServiceContext
from vlrl.types import Answer, Media, PastAction

FIELDS = {"verdict": ("yes", "no")}
YES = '{"verdict": "yes"}'


def echo(body, number):
    return f"re: {text_of(body)}"


def ask(judge, *questions, place=PLACE):
    return judge.ask(questions, place)


def test_replies_come_in_order_and_each_question_is_asked_once(tmp_path):
    with judging(echo, tmp_path) as (server, judge):
        assert ask(judge, "a", "b", "a") == (["re: a", "re: b", "re: a"], [])
        assert ask(judge, "b")[0] == ["re: b"] and count_of(server) == 2
        body = server.asked[0][2]
        assert body["model"] == "critic" and body["temperature"] == 0 and body["max_tokens"] == 1024
        tally = judge.take("train", 3)
        assert (tally.counts["calls"], tally.counts["cached"], tally.counts["failed"],
                tally.counts["tokens_out"]) == (2, 2, 0, 6)
        assert judge.take("train", 3).counts["calls"] == 0
    lines = [json.loads(line) for line in (tmp_path / "services/judge-rank-00000.jsonl").read_text().splitlines()]
    assert [(x["text"], x["step"], x["policy_step"]) for x in lines] == [("re: a", 3, 2), ("re: b", 3, 2)] or (
        [x["text"] for x in lines] == ["re: b", "re: a"])


def test_a_killed_run_asks_nothing_twice_and_counts_the_same(tmp_path):
    with judging(echo, tmp_path) as (_, judge):
        found = ask(judge, "a", "b")
    (tmp_path / "services/judge-rank-00001.jsonl").write_text(
        json.dumps({"key": "other", "text": "of another process", "split": "train", "step": 1}) + '\n{"key": "half')
    with judging(echo, tmp_path) as (server, again):
        assert ask(again, "a", "b") == found and count_of(server) == 0
        assert again.take("train", 3).counts["calls"] == 2  # of the step that is repeated
        assert ask(again, "a", place=ServiceContext("train", 4, 4)) == (["re: a"], []) and count_of(server) == 0
        assert again.take("train", 4).counts["cached"] == 1
        assert again.replies.get("other", PLACE).text == "of another process"
    half = tmp_path / "half"  # a line that broke off is no reply, and the next stands alone
    for calls in (1, 1, 0):
        with judging(echo, half) as (server, judge):
            assert ask(judge, "a")[0] == ["re: a"] and count_of(server) == calls
        path = half / "services/judge-rank-00000.jsonl"
        path.write_bytes(path.read_bytes()[:-20] if path.read_bytes().count(b"\n") == 1 else path.read_bytes())


def test_settings_and_folders_decide_what_is_asked_again(tmp_path):
    with judging(echo, tmp_path) as (_, judge):
        ask(judge, "a")
    for more in ({"max_tokens": 5}, {"temperature": 0.5}):
        with judging(echo, tmp_path, **more) as (server, judge):
            assert ask(judge, "a")[0] == ["re: a"] and count_of(server) == 1
    for run, calls in (("one", 1), ("two", 0)):
        with judging(echo, tmp_path / run, cache=str(tmp_path / "shared")) as (server, judge):
            assert ask(judge, "a")[0] == ["re: a"] and count_of(server) == calls
            tally = judge.take("train", 3)
            assert (tally.counts["calls"], tally.counts["cached"]) == (calls, 1 - calls)


def drop(handler):
    handler.send(200, b'{"choices": [', length=500)


def hang(handler):
    time.sleep(0.4)
    handler.close_connection = True


@pytest.mark.parametrize(("bad", "reason"), [
    (500, "500"), (503, "503"), (429, "429"), (b"<html>garbage", "not JSON"), ({"choices": []}, "not a chat"),
    (drop, "RemoteProtocolError"), (hang, "ReadTimeout"), ("maybe", "does not say verdict"),
    ('{"verdict": "perhaps"}', "does not say verdict"), ('{"verdict": "yes"', "does not say verdict")])
def test_a_bad_reply_is_asked_for_again_and_never_a_verdict(tmp_path, bad, reason):
    def script(body, number):
        return bad if number < 2 else YES
    with judging(script, tmp_path, timeout_s=0.2) as (server, judge):
        assert ask(judge, Question("?", fields=FIELDS)) == ([YES], []) and count_of(server) == 3
        assert judge.take("train", 3).counts["retries"] == 2
        if reason.startswith("does"):
            assert len({body["seed"] for *_, body in server.asked}) == 3
    with judging(lambda body, number: bad, tmp_path, timeout_s=0.2) as (server, judge):
        (reply,), (failure,) = ask(judge, Question("!", fields=FIELDS))
        assert reply is None and reason in failure and count_of(server) == 3
        assert judge.take("train", 3).counts["failed"] == 1


def test_a_failure_counts_in_its_own_step_and_is_kept_once_that_is_completed(tmp_path):
    with judging(lambda body, number: 500, tmp_path) as (server, judge):
        assert ask(judge, "a")[0] == ask(judge, "a")[0] == [None]
        assert count_of(server) == 3  # not asked again in the step
        assert ask(judge, "a", place=ServiceContext("train", 4, 4))[0] == [None] and count_of(server) == 6
        judge.take("train", 3)
    with judging(echo, tmp_path) as (server, judge):  # killed in step 4
        assert ask(judge, "a")[0] == [None] and count_of(server) == 0
        assert (tally := judge.take("train", 3)).counts["calls"] == tally.counts["failed"] == 1
        assert ask(judge, "a", place=ServiceContext("train", 4, 4))[0] == ["re: a"]


@contextmanager
def a_server(port=0):
    command = [sys.executable, "-m", "tests.services.serve", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
def test_a_server_that_dies_and_returns(tmp_path):
    """Killed for a step and started again: what was known is, the rest of that step is lost, the next one is not."""
    with a_server() as url:
        judge = Judge(JudgeSettings(url=url, model="critic", retries=1), tmp_path, wait_s=0.0)
        assert ask(judge, "a") == (["re: a"], [])
    replies, failures = ask(judge, "a", "b", place=ServiceContext("train", 4, 4))
    assert replies == ["re: a", None] and len(failures) == 1
    with a_server(int(url.split(":")[2].partition("/")[0])):
        assert ask(judge, "a", "b", place=ServiceContext("train", 5, 5)) == (["re: a", "re: b"], [])
    judge.close()


def test_calls_are_made_at_once(tmp_path):
    """64 questions meet at a barrier on the server, which only lets all of them pass together."""
    barrier = threading.Barrier(64)

    def script(body, number):
        barrier.wait(60)
        return "met"
    with judging(script, tmp_path, concurrency=64) as (_, judge):
        assert ask(judge, *map(str, range(64)))[0] == ["met"] * 64


def test_several_groups_share_one_call_for_the_same_question(tmp_path):
    started, go = threading.Event(), threading.Event()

    def script(body, number):
        started.set()
        go.wait(30)
        return YES
    with judging(script, tmp_path) as (server, judge):
        found = []
        threads = [threading.Thread(target=lambda: found.append(ask(judge, "a"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        started.wait(30)
        while judge._tallies[PLACE.split, PLACE.step].counts["cached"] < 3:
            time.sleep(0.01)
        go.set()
        for thread in threads:
            thread.join()
        assert found == [([YES], [])] * 4 and count_of(server) == 1
        assert judge.take("train", 3).counts["calls"] == 1


def test_rate_limit(tmp_path, monkeypatch):
    """The third request of 60 a minute waits two seconds."""
    waits = []
    with judging(echo, tmp_path, per_minute=60, concurrency=1) as (_, judge):
        monkeypatch.setattr(judge._client.closed, "wait", lambda seconds: waits.append(seconds))
        ask(judge, "a", "b", "c")
    assert waits[0] == 0 and waits[1] == pytest.approx(1, abs=0.5) and waits[2] == pytest.approx(2, abs=0.5)


def test_pictures_and_fields_are_part_of_the_question(tmp_path):
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    other = picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT)

    def script(body, number):
        (shown, text) = body["messages"][0]["content"]
        data = base64.b64decode(shown["image_url"]["url"].partition(",")[2])
        assert text == {"type": "text", "text": "what?"}
        return str(np.asarray(Image.open(io.BytesIO(data)))[0, 0, 0])
    with judging(script, tmp_path) as (server, judge):
        found, _ = ask(judge, *(Question("what?", [Media(source=p)]) for p in (picture, other, picture)))
        assert found == ["0", "9", "0"] and count_of(server) == 2
        lost = ask(judge, Question("what?", [Media(source=tmp_path / "none.png")]), Question("what?", ()))
        assert lost[0][0] is None and "none.png" in lost[1][0]
    for on in (True, False):
        with judging(lambda body, number: YES, tmp_path / str(on), json_schema=on) as (server, judge):
            ask(judge, Question("?", fields=FIELDS))
            sent = server.asked[0][2].get("response_format")
            assert (sent is not None) == on
            if on:
                assert sent["json_schema"]["schema"]["properties"]["verdict"]["enum"] == ["yes", "no"]


@pytest.mark.parametrize(("votes", "reply"), [
    (("yes", "no", "yes"), "yes"), (("no", "no", "yes"), "no"), (("yes", None, None), "yes"),
    (("yes", None, "no"), None), ((None, None, None), None)])
def test_votes(tmp_path, votes, reply):
    by_seed = {}

    def script(body, number):
        vote = votes[by_seed.setdefault(body["seed"], len(by_seed)) % 3]
        return 400 if vote is None else json.dumps({"verdict": vote})
    with judging(script, tmp_path, votes=3, temperature=0.7, concurrency=1) as (server, judge):
        (found,), failures = ask(judge, Question("?", fields=FIELDS))
        assert (found and json.loads(found)["verdict"]) == reply and bool(failures) == (reply is None)
        assert count_of(server) == 3


def test_a_wrong_key_or_another_model_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with judging(lambda body, number: 401, tmp_path, key_env="JUDGE_KEY") as (server, judge):
        with pytest.raises(TrainingError, match=r"refuses the key.*services\.judge\.url.*services\.judge\.key_env"):
            ask(judge, "a")
        assert server.asked[0][1]["Authorization"] == "Bearer s3cret"
    with judging(lambda body, number: b"s3cret is what you sent", tmp_path, key_env="JUDGE_KEY") as (_, judge):
        failures = ask(judge, "b")[1]
        judge.take("train", 9)
    assert "s3cret" not in str(failures)
    assert not any("s3cret" in path.read_text() for path in (tmp_path / "services").iterdir())
    with judging(echo, tmp_path) as (_, judge):
        assert judge.problem() == ""
    with judging(echo, tmp_path, model="other") as (_, judge):
        assert "'other' among its models: critic" in judge.problem()
    away = Judge(JudgeSettings(url="http://127.0.0.1:1/v1", model="critic"), tmp_path)
    assert "cannot be reached" in away.problem()
    away.close()


test_settings = refused(
    ConfigError, lambda given: validate({"task": "digits", "model": {"name": "x"}, "services": {"judge": given}}), [
    ({"url": "http://a.example/v1"}, "needs services.judge.model"), ({"votes": 2}, "odd number"),
    ({"votes": 3}, "services.judge.temperature"), ({"retries": -1}, "greater than or equal to 0")])
test_addresses_and_keys = refused(
    ConfigError, lambda given, tmp_path: Judge(JudgeSettings(**{"model": "m", **given}), tmp_path), [
    ({"url": "nowhere"}, r"services\.judge\.url 'nowhere' is not the address"),
    ({"url": "http://me:pw@a.example/v1"}, r"services\.judge\.key_env"),
    ({"url": "http://a.example/v1", "key_env": "NOT_SET_HERE"}, r"services\.judge\.key_env NOT_SET_HERE")])


def made(folder, further=(), host="127.0.0.1", port=None, **settings):
    return prepare(JudgeSettings(**{"model": "org/judge", **settings}), folder / "judge", host=host, port=port,
                   further=further)


def test_the_server_has_the_judge_s_model_address_and_key(tmp_path, monkeypatch):
    """The key is in its environment alone, where no list of processes shows it; one of others' does not get there."""
    monkeypatch.setenv("MINE", "secret-key")
    monkeypatch.setenv("VLLM_API_KEY", "another")
    port = free_port()
    servers = made(tmp_path, ["max_model_len=4096", "structured-outputs-config.disable_any_whitespace=true"],
                   url=f"http://127.0.0.1:{port}/v1", key_env="MINE")
    (server,) = servers.servers
    pairs = {*itertools.pairwise(server.command)}
    assert {("--model", "org/judge"), ("--served-model-name", "org/judge"), ("--port", str(port)),
            ("--host", "127.0.0.1"), ("--max-model-len", "4096"),
            ("--structured-outputs-config.disable_any_whitespace", "true")} <= pairs
    assert server.environment["VLLM_API_KEY"] == "secret-key" and "secret-key" not in " ".join(server.command)
    assert servers.addresses == [f"http://127.0.0.1:{port}"] and servers.key_file is None
    (server,) = made(tmp_path, port=port).servers
    assert "VLLM_API_KEY" not in server.environment and server.log.name == f"judge-{port}.log"
    assert ("--port", str(port)) in {*itertools.pairwise(server.command)}


def test_a_checkpoint_and_a_port_that_cannot_be_served(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is an adapter, .*by a run with model\.name=.*model\.lora\.rank=0"):
        made(tmp_path, port=free_port(), model=str(tmp_path / "best"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{taken.getsockname()[1]}"):
            made(tmp_path, port=taken.getsockname()[1])


@pytest.mark.parametrize(("more", "says"), [
    ({"model": ""}, r"--judge needs services\.judge\.model"),
    ({"url": "http://elsewhere:9000/v1"}, r"names another host than 127\.0\.0\.1.*--host 0\.0\.0\.0"),
    ({"url": "http://127.0.0.1:9000/v1", "port": 9001}, r"--port 9001 differs from the port in services\.judge\.url"),
    ({"url": "https://127.0.0.1:9000/v1"}, r"vLLM answers only at http://HOST:PORT/v1"),
    ({"url": "http://127.0.0.1:9000/judge"}, r"vLLM answers only at http://HOST:PORT/v1"),
    ({"host": "0.0.0.0"}, r"--host 0\.0\.0\.0 without a key .*services\.judge\.key_env"),
    ({"key_env": "NOT_SET"}, r"services\.judge\.key_env NOT_SET: .*not set"),
    ({"further": ["model=x"]}, r"--vllm model=x: vlrl sets --model itself, by services\.judge\.model"),
    ({"further": ["api_key=x"]}, r"set services\.judge\.key_env")])
def test_what_is_refused(tmp_path, monkeypatch, more, says):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError, match=says):
        made(tmp_path, **more)
    assert not (tmp_path / "judge").exists()


class Doors(Task):
    prompt, rewards = "Open the door.", {"judge": 1.0}


def picture(grey, side=4):
    return Media(source=Image.new("L", (side, side), grey))


def episode(count, text="It is stuck.", side=4):
    turns = [PastAction(action=f"push {i}", observation=f"{text} {i}", media=(picture(i, side),)) for i in range(count)]
    return Answer(text="pull", final="pull", turns=tuple(turns))


def test_what_is_shown_stands_in_order():
    sample = Sample(id="a", media=(picture(1),))
    assert judge_view(Doors(), sample, [Answer(text="x")]) == ("Open the door.", sample.media)
    assert judge_view(Doors(), sample, [Answer(text="x")], media=False) == ("Open the door.", ())
    sample = Sample(id="a", media=(picture(1),), opening=Observation("A door.", [picture(2)]))
    question, shown = judge_view(Doors(), sample, [episode(2)])
    assert question == ("Open the door.A door.\n\nShown at the beginning: [picture 2]\n\nAction 1: push 0\n\n"
                        "Observation: It is stuck. 0 [picture 3]\n\nAction 2: push 1\n\n"
                        "Observation: It is stuck. 1 [picture 4]")
    assert [m.source.getpixel((0, 0)) for m in shown] == [1, 2, 0, 1]
    question, shown = judge_view(Doors(), sample, [episode(1), episode(1)], media=False)
    assert shown == () and "Action 1 of answer 2: push 0" in question and "[picture" not in question


def test_what_is_sent_is_bounded():
    sample = Sample(id="a", media=(picture(1),))
    question, shown = judge_view(Doors(), sample, [episode(40, "x" * 50_000, side=1400)])
    assert len(question) < 1.2 * MOST_SHOWN and len(quoted("question", question)) < MOST_SHOWN + 200
    assert len(shown) == MOST_PICTURES and question.count("that is not shown") == 40 - MOST_PICTURES + 1
    assert [int(n) for n in re.findall(r"\[picture (\d+)\]", question)] == [*range(2, MOST_PICTURES + 1)]
    loaded = load(shown[-1], LimitsSettings())
    assert 0.9 * MOST_PIXELS < loaded.size[0] * loaded.size[1] <= MOST_PIXELS and data_urls(loaded)
    assert shown[-1].source.getpixel((0, 0)) == 39  # the last ones
