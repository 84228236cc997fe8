"""`vlrl serve --chat` in a process of its own: what it answers and refuses; another harness gets the same score."""

import contextlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from benchmarks.external_harness import compare, items
from tests.cli.conftest import serving
from tests.cli.test_training import call
from tests.e2e.runs import ENV, ROOT
from vlrl.cli.main import main
from vlrl.tools.evaluation.rows import read_rows
from vlrl.tools.servers.record import Server

pytestmark = pytest.mark.slow
CONFIG = "configs/quickstart.yaml"


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    root = tmp_path_factory.mktemp("chat")
    with serving(root, root / "own", [CONFIG, "--chat", f"run.dir={root}/run"], ENV) as (client, port):
        yield client, f"http://127.0.0.1:{port}/v1", root / "own" / "key"


def asked(client, **body):
    return client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Where is it?"}], **body})


def test_what_it_answers_and_refuses(served):
    client, _, _ = served
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


def test_vlrl_eval_of_the_endpoint_is_that_of_the_model(served, tmp_path, capsys, monkeypatch):
    _, url, key = served
    monkeypatch.setenv("CHAT_KEY", key.read_text().strip())
    words = ["eval", CONFIG, "--samples", 8, f"run.dir={tmp_path}/run"]
    own = json.loads(call(capsys, *words, "-o", tmp_path / "own", "--json")[0])
    other = json.loads(call(capsys, *words, "--endpoint", url, "--key-env", "CHAT_KEY", "-o", tmp_path / "other",
                            "--json")[0])
    answers = [[row["answer"] for row in read_rows(tmp_path / name / "answers.jsonl")] for name in ("own", "other")]
    assert answers[0] == answers[1] and len(answers[0]) == 8
    means = [found["splits"]["heldout"]["metrics"]["iou"]["mean"] for found in (own, other)]
    assert means[0] == means[1] > 0


def test_another_harness_gives_the_same_score(served, tmp_path, capsys):
    """inspect-ai, in this environment or in that of VLRL_HARNESS_PYTHON."""
    python = os.environ.get("VLRL_HARNESS_PYTHON") or (sys.executable if importlib.util.find_spec("inspect_ai") else "")
    if not python:
        pytest.skip("inspect-ai is not installed: pip install inspect-ai openai, or set VLRL_HARNESS_PYTHON")
    _, url, key = served
    items(CONFIG, 16, tmp_path / "items.jsonl", [])
    words = ["ask", tmp_path / "items.jsonl", tmp_path / "inspect.json", "--url", url, "--key-file", key]
    done = subprocess.run([python, ROOT / "benchmarks" / "external_harness.py", *map(str, words)], cwd=tmp_path,
                          capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    call(capsys, "eval", CONFIG, "--samples", 16, f"run.dir={tmp_path}/run", "-o", tmp_path / "own")
    found = compare(tmp_path / "own" / "answers.jsonl", tmp_path / "inspect.json")
    assert found["n"] == found["equal_answers"] == 16 and found["largest_difference"] < 1e-6 < found["vlrl"]
    assert found["inspect"] == pytest.approx(found["vlrl"], abs=1e-6)


def test_what_does_not_go_with_it_and_calls_that_come_together_wait(capsys):
    for words, said in ((["--record"], "and --chat"), (["--replicas", "2"], "remove --replicas"),
                        (["engine=vllm_server"], "the model answers in this process")):
        assert main(["serve", CONFIG, "--chat", *words]) == 1
        assert said in " ".join(capsys.readouterr().err.split())
    # 64 connections while the server takes none: each is held by the kernel, and none is dropped
    made: Any = None
    with Server(0, "key", made) as server, contextlib.ExitStack() as opened:
        for _ in range(64):
            opened.enter_context(socket.create_connection(server.server_address[:2], timeout=0.9))
