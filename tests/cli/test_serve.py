"""What `vlrl serve` starts, without vLLM; `--chat` and `--record` in a process of their own, asked over HTTP."""

import contextlib
import http.client
import importlib.util
import itertools
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.external_harness import compare, items
from tests.cli.test_training import call
from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from tests.helpers import settings
from tests.tools.test_recording import answered, url, user
from vlrl.cli.main import main
from vlrl.cli.serve import _episodes
from vlrl.engine.vllm.launch import further_arguments, prepare, write_key
from vlrl.errors import ConfigError
from vlrl.store import RunFolder
from vlrl.tools.evaluation.rows import read_rows
from vlrl.tools.servers.record import Server
from vlrl.training.build_engine import check_engine


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_servers_take_further_arguments_but_not_what_vlrl_sets_itself(tiny_models, tmp_path):
    config = settings(tiny_models["qwen3_vl"], engine={"name": "vllm_server", "tensor_parallel": 4},
                      run={"dir": str(tmp_path / "run")})
    further = ["distributed-executor-backend=ray", "--pipeline_parallel_size=2", "disable-log-stats"]
    (server,) = prepare(config, tmp_path / "servers", port=free_port(), further=further).servers
    pairs = {*itertools.pairwise(server.command)}
    assert {("--distributed-executor-backend", "ray"), ("--pipeline-parallel-size", "2"),
            ("--tensor-parallel-size", "4")} <= pairs
    assert "--disable-log-stats" in server.command and "" not in server.command
    assert {"--enable-prefix-caching", "--no-enable-chunked-prefill"} <= {*server.command}  # on a CPU
    for given, way_out in (("tensor-parallel-size=2", r"set engine\.tensor_parallel"), ("host=0.0.0.0", "set --host"),
                           ("--max_model_len=9", r"set engine\.max_model_len"),
                           ("logprobs-mode=raw_logprobs", "the value that trainers need. Remove the argument")):
        with pytest.raises(ConfigError, match=f"--vllm {given}: vlrl sets .*{way_out}"):
            further_arguments([given], ["--logprobs-mode", "processed_logprobs"])


def test_servers_of_several_hosts_take_one_key(tmp_path):
    """Who comes later takes the key that is there, also when it was not there a moment ago."""
    shared = tmp_path / "shared" / "key"
    first = write_key(tmp_path / "a" / "key", str(shared))
    key = first.read_text()
    assert write_key(tmp_path / "b" / "key", str(shared)) == first == shared and shared.read_text() == key
    assert stat.S_IMODE(shared.stat().st_mode) == 0o600 and len(key.strip()) > 30
    assert [*shared.parent.iterdir()] == [shared]
    own = tmp_path / "own" / "key"
    assert write_key(own).read_text() == write_key(own).read_text() != key  # stays: a run goes on after a restart


def test_engines_fit_the_processes_and_what_the_task_needs(tiny_models, capsys):
    config = settings(tiny_models["qwen3_vl"], engine={"name": "vllm", "tensor_parallel": 2})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with pytest.raises(ConfigError, match=r"engine\.tensor_parallel=2 with 2 training processes: .*vllm_server"):
            check_engine(config)
    finally:
        dist.destroy_process_group()
    # also on a host that has neither the task nor its data: it says what it counts with
    def of(task, **engine):
        return _episodes(settings(tiny_models["qwen3_vl"], task=task, engine={"name": "vllm_server", **engine}))

    assert of({"name": "recall"}) and not of({"name": "digits"})
    assert capsys.readouterr().out == ""
    assert not of({"name": "elsewhere.py:Task"})
    said = capsys.readouterr().out
    assert "elsewhere.py" in said and "engine.max_model_len" in said
    assert not of({"name": "elsewhere.py:Task"}, max_model_len=256) and capsys.readouterr().out == ""


@contextlib.contextmanager
def serving(root, folder, words, env):
    """Starts `vlrl serve` on a free port; gives a client with its key, and the port. Ended as by a user at the end."""
    port = free_port()
    with (root / "log").open("w") as log:
        process = forked.Process(["-m", "vlrl", "serve", *map(str, words), "--port", str(port), "--folder",
                                  str(folder)], env, ROOT, log, log)
    said, end = lambda: (root / "log").read_text(), time.monotonic() + 600
    try:
        while "ready" not in said():
            assert process.poll() is None and time.monotonic() < end, said()
            time.sleep(0.2)
        key = (folder / "key").read_text().strip()
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", headers={"Authorization": f"Bearer {key}"},
                          timeout=300, trust_env=False) as client:
            yield client, port
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 130, said()
    finally:
        process.kill()
        process.wait(60)


CONFIG = "configs/quickstart.yaml"


@pytest.fixture(scope="module")
def chatting(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    with serving(root, root / "own", [CONFIG, "--chat", f"run.dir={root}/run"], ENV) as (client, port):
        yield client, f"http://127.0.0.1:{port}/v1", root / "own" / "key"


def asked(client, **body):
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Where is it?"}], **body})


@pytest.mark.slow
def test_what_it_answers_and_refuses(chatting):
    client, _, _ = chatting
    assert [m["id"] for m in client.get("/v1/models").json()["data"]] == ["embedded/tiny-qwen3-vl"]
    first, again = (asked(client, temperature=0, max_tokens=6, n=1, seed=1).json() for _ in range(2))
    text = first["choices"][0]["message"]["content"]
    assert text == again["choices"][0]["message"]["content"] and 0 < first["usage"]["completion_tokens"] <= 6
    drawn = {asked(client, temperature=1.5, seed=seed).json()["choices"][0]["message"]["content"] for seed in range(6)}
    assert len(drawn) > 1
    same = {asked(client, temperature=1.5, seed=3).json()["choices"][0]["message"]["content"] for _ in range(2)}
    assert len(same) == 1
    for body, said in (({"n": 2}, "'n' is not supported"), ({"temperature": -1}, "temperature=-1"),
                       ({"top_p": 0}, "top_p=0"), ({"max_tokens": 10_000}, "rollout.max_new_tokens"),
                       ({"seed": 1.5}, "seed=1.5"), ({"tools": [{"type": "function"}]}, "'tools' is not supported"),
                       ({"stop": [1]}, "stop: give a string"), ({"messages": []}, "messages must be a list")):
        refused = asked(client, **body)
        assert refused.status_code == 400 and said in refused.json()["error"]["message"]
    assert client.get("/v1/episodes/x").status_code == client.post("/v1/episodes/x/reward", json={}).status_code == 404
    assert client.get("/v1/models", headers={"Authorization": "Bearer x"}).status_code == 401


@pytest.mark.slow
def test_vlrl_eval_of_the_endpoint_is_that_of_the_model(chatting, tmp_path, capsys, monkeypatch):
    _, url, key = chatting
    monkeypatch.setenv("CHAT_KEY", key.read_text().strip())
    words = ["eval", CONFIG, "--samples", 8, f"run.dir={tmp_path}/run"]
    own = json.loads(call(capsys, *words, "-o", tmp_path / "own", "--json")[0])
    other = json.loads(call(capsys, *words, "--endpoint", url, "--key-env", "CHAT_KEY", "-o", tmp_path / "other",
                            "--json")[0])
    answers = [[row["answer"] for row in read_rows(tmp_path / name / "answers.jsonl")] for name in ("own", "other")]
    assert answers[0] == answers[1] and len(answers[0]) == 8
    means = [found["splits"]["heldout"]["metrics"]["iou"]["mean"] for found in (own, other)]
    assert means[0] == means[1] > 0


@pytest.mark.slow
def test_another_harness_gives_the_same_score(chatting, tmp_path, capsys):
    """inspect-ai, in this environment or in that of VLRL_HARNESS_PYTHON."""
    python = os.environ.get("VLRL_HARNESS_PYTHON") or (sys.executable if importlib.util.find_spec("inspect_ai") else "")
    if not python:
        pytest.skip("inspect-ai is not installed: pip install inspect-ai openai, or set VLRL_HARNESS_PYTHON")
    _, url, key = chatting
    items(CONFIG, 16, tmp_path / "items.jsonl", [])
    words = ["ask", tmp_path / "items.jsonl", tmp_path / "inspect.json", "--url", url, "--key-file", key]
    done = subprocess.run([python, ROOT / "benchmarks" / "external_harness.py", *map(str, words)], cwd=tmp_path,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    call(capsys, "eval", CONFIG, "--samples", 16, f"run.dir={tmp_path}/run", "-o", tmp_path / "own")
    found = compare(tmp_path / "own" / "answers.jsonl", tmp_path / "inspect.json")
    assert found["n"] == found["equal_answers"] == 16 and found["largest_difference"] < 1e-6 < found["vlrl"]
    assert found["inspect"] == pytest.approx(found["vlrl"], abs=1e-6)


@pytest.mark.slow
def test_what_does_not_go_together_and_calls_that_come_together_wait(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "run.yaml").write_text(json.dumps({"task": "x", "model": {"name": "none"}}))
    for words, said in (("--chat --record", "and --chat"), ("--chat --replicas 2", "remove --replicas"),
                        ("--chat engine=vllm_server", "the model answers in this process"),
                        ("--record --replicas 2", "remove --replicas"), ("--record --folder .", "of a training run"),
                        ("--record engine=vllm_server", "the model must run in this process")):
        assert main(["serve", "run.yaml", *words.split()]) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    # 64 connections while the server takes none: each is held by the kernel, and none is dropped
    made: Any = None
    with Server(0, "key", made) as server, contextlib.ExitStack() as opened:
        for _ in range(64):
            opened.enter_context(socket.create_connection(server.server_address[:2], timeout=0.9))


@pytest.fixture(scope="module")
def recording(tiny_models, tmp_path_factory):
    root = tmp_path_factory.mktemp("record")
    config, folder = root / "run.yaml", root / "episodes"
    config.write_text(json.dumps({"task": "tests/environments/acting.py:Acting", "seed": 3,
                                  "rollout": {"max_new_tokens": 6},
                                  "model": {"name": str(tiny_models["qwen3_vl"])}, "run": {"dir": str(root / "run")}}))
    with serving(root, folder, [config, "--record"], os.environ) as (client, port):
        body = {"messages": [user("x")], "user": "left"}
        assert client.post("/v1/chat/completions", json=body).status_code == 200
        yield client, RunFolder(folder), port
    rows = {r["episode_id"]: r for r in RunFolder(folder).rollouts().to_pylist()}
    assert "the server was stopped" in rows["left"]["error"] and rows["left"]["reward"] is None


@pytest.mark.slow
def test_an_agent_loop(recording):
    client, folder, _ = recording
    messages = [user("Where?", url(1))]
    for turn in range(3):
        reply = client.post("/v1/chat/completions", headers={"X-Episode-Id": "one"},
                            json={"model": "x", "messages": messages})
        assert reply.status_code == 200, reply.text
        messages += [answered(reply.json()), user(f"{turn}", url(turn + 2))]
    before = client.get("/v1/episodes/one").json()
    assert not before["closed"] and sum(t["role"] == "assistant" for t in before["turns"]) == 3
    wrong = [*messages]
    wrong[1] = {"role": "assistant", "content": "never said"}
    refused = client.post("/v1/chat/completions", json={"messages": wrong, "user": "one"})
    assert refused.status_code == 409 and "messages[1].content[0]" in refused.json()["error"]["message"]
    closed = client.post("/v1/episodes/one/reward", json={"reward": 1.5, "parts": {"vowels": 1.5}}).json()
    assert closed["reward"] == 1.5 and closed["token_ids"] == before["token_ids"]
    (row,) = folder.rollouts().to_pylist()
    assert row["token_ids"] == before["token_ids"] and row["reward"] == 1.5 and len(row["media"]) == 3


@pytest.mark.slow
def test_vlrl_score_and_the_app_read_it(recording):
    client, folder, _ = recording
    client.post("/v1/chat/completions", json={"messages": [user("x")], "metadata": {"episode_id": "two"}})
    assert client.post("/v1/episodes/two/reward", json={"reward": 0}).status_code == 200
    words = ["score", str(folder.path / "config.yaml"), "--run", str(folder.path), "--json"]
    done = forked.run(["-m", "vlrl", *words], os.environ, ROOT, 600)
    assert done.returncode == 0 and json.loads(done.stdout)["rollouts"] >= 1, done.stderr
    from vlrl.app.library import Library
    (run,) = [run for run in Library(folder.path.parent).runs() if run.path == folder.path]
    assert run.task.endswith("acting.py:Acting")


@pytest.mark.slow
def test_strangers_are_refused(recording):
    client, _, port = recording
    body = {"messages": [user("x")], "user": "none"}
    for headers, status in (({"Authorization": "Bearer no"}, 401), ({"Origin": "http://evil"}, 403),
                            ({"Host": "evil:80"}, 403)):
        assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == status
    assert client.post("/v1/chat/completions", json={"messages": [user("x")]}).status_code == 400  # no id
    assert client.get("/v1/episodes/none").status_code == client.get("/v1/models").status_code == 404
    assert client.post("/v1/chat/completions", content=b"[" * 10**5, headers={"X-Episode-Id": "a"}).status_code == 400
    raw = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    raw.putrequest("POST", "/v1/chat/completions")
    for name, value in (("Authorization", client.headers["Authorization"]), ("Content-Length", str(10**10))):
        raw.putheader(name, value)
    raw.endheaders()
    assert raw.getresponse().status == 413
    assert client.get("/health").json() == {"status": "ok"}
