"""Episodes recorded from chat completions: ids that only grow, and rows that the trainer reads alike."""

import base64
import io
import socket
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import hypothesis
import pytest
from hypothesis import strategies as st

from tests.conftest import noise
from tests.helpers import Vowels, load, settings
from vlrl.data.media import ROOT_ONLY, MediaAccess
from vlrl.engine.hf import HFEngine
from vlrl.engine.vllm.episode_check import first_difference
from vlrl.store import RunFolder
from vlrl.tools.servers import record
from vlrl.tools.servers.chat_messages import RequestError, contradiction, read, same
from vlrl.tools.servers.recording import Recorder


def url(seed, size=(56, 84)):
    out = io.BytesIO()
    noise(seed, *size).save(out, format="PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def user(text, *urls):
    return {"role": "user", "content": [*({"type": "image_url", "image_url": {"url": u}} for u in urls),
                                        {"type": "text", "text": text}]}


def answered(reply):
    return {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}


@pytest.fixture(scope="module")
def parts(tiny_models):
    config = settings(tiny_models["qwen2_5_vl"], seed=3, episode={"max_turns": 4, "max_media": 3})
    return config, *load(config)


@pytest.fixture
def made(parts, tmp_path):
    config, policy, encode = parts
    folder = RunFolder(tmp_path / "run")
    folder.create("task: x\n", 3)
    return Recorder(HFEngine(policy, 3), encode, config, Vowels(), folder, most_open=2, idle_s=1e-3)


def played(made, name="a", turns=3):
    messages = [{"role": "system", "content": "Be short."}, user("What is this?", url(1))]
    for turn in range(turns):
        reply = made.chat(name, {"messages": messages})
        messages.append(answered(reply))
        if turn < turns - 1:
            messages.append(user(f"And this, {turn}?", url(2 + turn, (84, 84 + 28 * turn))))
    return messages


def test_an_episode_is_recorded_as_the_trainer_reads_it(parts, made):
    _, policy, encode = parts
    played(made)
    episode = made._open["a"]
    done = episode.completion(encode.end)
    assert [t.role for t in done.turns] == ["assistant", "observation", "assistant", "observation", "assistant"]
    assert first_difference(policy, encode, episode.prompt, done, 1e-5) is None and len(done.observed_media) == 2
    told = made.reward("a", {"reward": 0.5, "parts": {"found": 1}})
    (row,) = made.folder.rollouts().to_pylist()
    assert row["token_ids"] == told["token_ids"] == done.tokens.tolist() and row["loss_mask"] == told["loss_mask"]
    assert row["reward"] == 0.5 and dict(row["parts"]) == {"found": 1.0} and row["episode_id"] == "a"
    assert len(row["media"]) == 3 and all((made.folder.path / m["path"]).is_file() for m in row["media"])
    assert made.get("a") == told and told["closed"] and told["prompt_ids"] == episode.prompt.ids.tolist()


def test_a_repeated_call_gets_the_recorded_reply(made):
    messages = played(made, turns=2)
    again = made.chat("a", {"messages": messages[:-1]})
    assert answered(again) == messages[-1] and len(made.get("a")["turns"]) == 3


def test_what_contradicts_the_record_is_refused_with_its_place(made):
    messages = [*played(made, turns=1), user("Next?")]
    before, image_last = made.get("a"), [*user("a")["content"], *user("b", url(1))["content"]]
    for change, place in (
            (lambda m: m.__setitem__(0, {"role": "system", "content": "Be shy."}),
             r"messages\[0\]\.content\[0\] from character 5"),
            (lambda m: m.__setitem__(1, user("What is this?", url(9))), r"messages\[1\]\.content\[0\]"),
            (lambda m: m.__setitem__(2, {"role": "assistant", "content": "other"}),
             r"messages\[2\]\.content\[0\] from char"),
            (lambda m: m.__delitem__(0), r"messages\[0\]\.role"),
            (lambda m: m.append(user("twice")), "add one user message"),
            (lambda m: m.__setitem__(-1, {"role": "system", "content": "No."}), r"messages\[3\] has the role 'system'"),
            (lambda m: m.__setitem__(-1, {"role": "user", "content": image_last}),
             r"messages\[3\] has an image after a text")):
        changed = [*messages]
        change(changed)
        with pytest.raises(RequestError, match=place):
            made.chat("a", {"messages": changed})
        assert made.get("a") == before, place
    made.chat("a", {"messages": messages})


def test_what_is_not_followed_is_refused(made):
    text = base64.b64encode(b"no image").decode()
    for body, said in (
            ({"tools": []}, "'tools' is not supported"), ({"temperature": 0.3}, "rollout.temperature=1"),
            ({"stop": [3]}, "stop"),
            ({"max_tokens": 10**6}, "rollout.max_new_tokens"), ({"messages": []}, "messages must be a list"),
            ({"messages": [{"role": "tool", "content": "x"}]}, "the role is 'tool'"), ({"n": 2}, "'n'"),
            ({"messages": [user("x", "http://127.0.0.1/a.png")]}, "only data: URLs are accepted"),
            ({"messages": [user("x", "data:image/png;base64,%%")]}, r"messages\[0\]\.content\[0\]"),
            ({"messages": [user("x", f"data:image/png;base64,{text}")]}, "not an image of a known"),
            ({"messages": [{"role": "user", "content": [{"type": "video"}]}]}, r"content\[0\]: expected")):
        with pytest.raises(RequestError, match=said):
            made.chat("a", {"messages": [user("x")], **body})
        assert not made._open, said


def test_files_are_never_read(parts, tmp_path):
    (tmp_path / "a.png").write_bytes(b"x")
    access = MediaAccess.of(parts[0].data.model_copy(update={"urls": ("example.com",)}))
    for path in ("a.png", str(tmp_path / "a.png"), f"file://{tmp_path}/a.png"):
        with pytest.raises(RequestError, match="must be a data: URL"):
            read([user("x", path)], access, tmp_path)


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(
    ["user", "text", "image_url", "data:image/png;base64,aGk=", "data:image/png;base64,!", "http://a/b.png", "\ud800"])
KEYS = st.sampled_from(["role", "content", "type", "text", "image_url", "url", "x"])
VALUES = st.recursive(LEAVES, lambda v: st.lists(v, max_size=3) | st.dictionaries(KEYS, v, max_size=4), max_leaves=20)


@hypothesis.given(st.lists(st.fixed_dictionaries({"role": LEAVES, "content": VALUES}), max_size=3) | VALUES)
def test_any_messages_are_read_or_refused(given):
    try:
        messages = read(given, ROOT_ONLY, Path())
    except RequestError:
        return
    assert same(messages, messages) and all(contradiction(m, replace(m, parts=(*m.parts, ("text", "x"))))
                                            for m in messages if m.role != "assistant")


def test_limits(made, parts):
    for name in ("a", "b"):
        made.chat(name, {"messages": [user("x")]})
    with pytest.raises(RequestError, match="2 episodes are open"):
        made.chat("c", {"messages": [user("x")]})
    messages = [user("x"), answered(made._open["a"].reply), user("more", *(url(i) for i in range(4)))]
    with pytest.raises(RequestError, match=r"episode\.max_media=3"):
        made.chat("a", {"messages": messages})
    with pytest.raises(RequestError, match=r"ended at the limit episode\.max_media"):
        made.chat("a", {"messages": messages})
    for body, said in (({}, "send"), ({"reward": float("nan")}, "not a finite number"),
                       ({"reward": 1, "x": 2}, "unknown"), ({"reward": 1, "parts": {"a": "b"}}, r"parts\['a'\]")):
        with pytest.raises(RequestError, match=said):
            made.reward("a", body)
    assert made.reward("a", {"reward": None})["finish_reason"] == "media"
    with pytest.raises(RequestError, match="is closed"):
        made.chat("a", {"messages": [user("x")]})
    made._open["b"].used -= 1
    made.expire()
    rows = {r["episode_id"]: r for r in made.folder.rollouts().to_pylist()}
    assert rows["b"]["reward"] is None and "no call for" in rows["b"]["error"] and not rows["a"]["error"]
    again = Recorder(made.engine, made.encode, parts[0], Vowels(), made.folder)
    with pytest.raises(RequestError, match="is closed"):
        again.chat("b", {"messages": [user("x")]})
    again.chat("c", {"messages": [user("x")]})
    again.close()
    assert {r["group_id"] for r in made.folder.rollouts().to_pylist()} == {"00000000", "00000001", "00000002"}


def test_an_answer_over_http_is_sent_at_once():
    """Its head and its body are two writes: the kernel holds the second one back for 40 ms unless told not to."""
    class Server(record.Server):
        def get_request(self):
            self.taken = super().get_request()
            return self.taken

    with Server(0, "key", None) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        with httpx.Client(trust_env=False) as client:
            assert client.get(f"http://127.0.0.1:{server.server_address[1]}/health").json() == {"status": "ok"}
            told = server.taken[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        server.shutdown()
    assert told
