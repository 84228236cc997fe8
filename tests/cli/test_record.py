"""`vlrl serve --record` in a process of its own, asked over HTTP as an agent loop would."""

import http.client
import json
import os

import pytest

from tests.cli.conftest import serving
from tests.e2e import forked
from tests.e2e.runs import ROOT
from tests.tables import each
from tests.tools.test_recording import answered, url, user
from vlrl.cli.main import main
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def served(tiny_models, tmp_path_factory):
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


@each("words said", [
    (["--replicas", "2"], "remove --replicas"), (["engine=vllm_server"], "the model must run in this process"),
    (["--folder", "."], "folder of a training run")])
def test_what_does_not_go_with_recording_is_refused(tmp_path, monkeypatch, capsys, words, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "run.yaml").write_text(json.dumps({"task": "x", "model": {"name": "none"}}))
    assert main(["serve", "run.yaml", "--record", *words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_agent_loop(served):
    client, folder, _ = served
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


def test_vlrl_score_and_the_app_read_it(served):
    client, folder, _ = served
    client.post("/v1/chat/completions", json={"messages": [user("x")], "metadata": {"episode_id": "two"}})
    assert client.post("/v1/episodes/two/reward", json={"reward": 0}).status_code == 200
    words = ["score", str(folder.path / "config.yaml"), "--run", str(folder.path), "--json"]
    done = forked.run(["-m", "vlrl", *words], os.environ, ROOT, 600)
    assert done.returncode == 0 and json.loads(done.stdout)["rollouts"] >= 1, done.stderr
    from vlrl.app.library import Library
    (run,) = [run for run in Library(folder.path.parent).runs() if run.path == folder.path]
    assert run.task.endswith("acting.py:Acting")


def test_strangers_are_refused(served):
    client, _, port = served
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
