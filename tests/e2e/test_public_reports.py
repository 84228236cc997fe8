"""Faults that users of other trainers have reported, tried here."""

import base64
import http.server
import io
import json
import logging
import shutil
import threading
from functools import cache

import numpy as np
import pytest
from PIL import Image

from tests.e2e.runs import ROOT, run
from vlrl import config
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.store import RunFolder
from vlrl.training.loop import train

pytestmark = pytest.mark.slow
SMALL = ("steps=10", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.samples=0",
         "save.every=4", "save.keep=9", "log.samples_every=0", "train.schedule=constant")
KINDS = {"stream": ("data.stream=true", "data.index=lazy", "data.shuffle_buffer=8"),
         "curriculum": ("curriculum.name=sec",), "mixture": ()}


def write(folder, kind):
    """A config with 40 rows of three categories; of a mixture two tasks with 20 each."""
    rows = []
    for i in range(40):
        Image.new("RGB", (64, 48), (5 * i, 90, 200)).save(folder / f"{i}.png")
        rows.append({"id": f"row-{i}", "image": f"{i}.png", "width": 64, "height": 48, "expression": "the circle",
                     "category": "abc"[i % 3], "boxes": [{"box": [1, 2, 30, 40]}]})
    parts = {"a": rows[:20], "b": rows[20:]} if kind == "mixture" else {"a": rows}
    for name, own in parts.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, own)))
    task = (f"task: {{name: grounding, drawn: false}}\ndata: {{train: {folder}/a.jsonl}}" if kind != "mixture" else
            "task: null\ntasks:\n" + "\n".join(f"- {{name: grounding, label: {name}, drawn: false, data: {{train: "
                                                f"{folder}/{name}.jsonl}}}}" for name in parts))
    (folder / "own.yaml").write_text(f"extends: {ROOT}/configs/quickstart.yaml\n{task}\n")
    return folder / "own.yaml"


def drawn(folder):
    """The prompts of each step, in any order."""
    rows = RunFolder(folder).rollouts(columns=["step", "sample_id"]).to_pylist()
    return [sorted({row["sample_id"] for row in rows if row["step"] == step}) for step in range(10)]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Returns what gives the folder of a kind, with a whole run and one that lacks what came after step 4."""
    @cache
    def runs(kind):
        folder = tmp_path_factory.mktemp(kind)
        config, words = write(folder, kind), (*SMALL, *KINDS[kind])
        assert run(config, folder / "whole", *words).returncode == 0
        assert run(config, folder / "broken", *words, "steps=5").returncode == 0
        shutil.rmtree(folder / "broken/checkpoints/step-000005")  # as kill -9 in its sixth step leaves it
        return folder
    return runs


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_after_a_resume_the_prompts_are_those_that_would_have_come(undisturbed, tmp_path, kind, processes):
    """EasyR1#319, rllm#39, open-instruct#1523: the data loader began anew, so the same prompts came again."""
    whole = undisturbed(kind) / "whole"
    broken = shutil.copytree(whole.parent / "broken", tmp_path / "broken")
    done = run(whole.parent / "own.yaml", broken, *SMALL, *KINDS[kind], processes=processes)
    assert done.returncode == 0 and "resuming from" in done.stdout, done.stderr
    assert drawn(broken) == drawn(whole)
    assert all(len(step) == 2 for step in drawn(whole))
    if kind == "stream":  # within one pass over the rows none comes twice
        assert len({id for step in drawn(whole) for id in step}) == 20


# --- pictures in logs (agent-lightning#441) ---------------------------------------------------------------------------


@pytest.fixture
def logged(tmp_path):
    """Everything that is logged, at the level of debugging."""
    handler = logging.FileHandler(tmp_path / "debug.log")
    root, before = logging.getLogger(), logging.getLogger().level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    yield tmp_path / "debug.log"
    root.setLevel(before)
    root.removeHandler(handler)
    handler.close()


def picture(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (160, 160, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, format="PNG")
    return out.getvalue()


def test_a_picture_inside_a_row_is_stored_once_and_not_logged(tmp_path, logged):
    """Gigabytes of base64 per run, as each log line and each stored rollout held whole pictures."""
    held = [picture(i) for i in range(4)]
    rows = [{"id": str(i), "image": base64.b64encode(data).decode(), "width": 160, "height": 160,
             "expression": "the circle", "boxes": [{"box": [1, 2, 30, 40]}]} for i, data in enumerate(held)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    words = [*SMALL[1:], "steps=6", "rollout.group_size=4", "task.drawn=false", f"data.train={tmp_path}/rows.jsonl",
             f"run.dir={tmp_path}/run"]
    train(config.load("quickstart.yaml", words))
    pieces = [base64.b64encode(data)[200:260] for data in held]
    files = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert not [path for path, content in files.items() if any(piece in content for piece in pieces)]
    assert not any(piece in logged.read_bytes() for piece in pieces) and logged.stat().st_size < 1 << 20
    size = sum(len(content) for path, content in files.items() if "checkpoints" not in path.parts)
    assert size < sum(map(len, held)) + (1 << 20)  # 48 answers to 4 pictures


def test_a_request_with_pictures_is_not_logged(logged):
    class Refusing(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(500, "cannot")

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    body = vllm_wire.pack({"input": {"image": Image.open(io.BytesIO(picture(7)))}})
    client = ServerClient("key", 5)
    with pytest.raises(Unavailable) as refused:
        client.post(f"http://127.0.0.1:{server.server_port}", "/vlrl/generate", body)
    client.close()
    server.shutdown()
    server.server_close()
    assert len(body) > 50_000 > len(str(refused.value)) and body[2000:2060].decode() not in logged.read_text()
    assert 0 < logged.stat().st_size < 20_000
