"""Runs on tables whose rows hold their pictures: the same run as with files, whatever reads them, and after a kill; and
faults of pictures that users of other trainers have reported."""

import base64
import hashlib
import http.server
import io
import json
import logging
import signal
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.hub_server import hub as serving
from tests.e2e.runs import ENV, ROOT, assert_same_run, finished, kill_after, metrics, weights
from vlrl import config
from vlrl.app.details import group
from vlrl.app.library import Library
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.store import RunFolder
from vlrl.tools.datasets.convert import convert
from vlrl.training.loop import train

pytestmark = pytest.mark.slow
RUNS = ("import json, sys; from vlrl.cli.main import train_script as train; "
        "sys.exit(any([train(r) for r in json.loads(sys.argv[1])]))")


def table(shade=80):
    """An EasyR1 table, whose rows hold their pictures."""
    rows, target = [], io.BytesIO()
    for i in range(24):
        file = io.BytesIO()
        Image.new("RGB", (64, 64), (10 * i, shade, 120)).save(file, "PNG")
        rows.append({"images": [{"bytes": file.getvalue(), "path": None}],
                     "problem": f"<image>How bright is picture {i}?", "answer": str(i)})
    pq.write_table(pa.Table.from_pylist(rows), target)
    return target.getvalue()


@pytest.fixture
def easy(tmp_path, tiny_models):
    """A config that trains on such a table."""
    (tmp_path / "rows.parquet").write_bytes(table())
    config = tmp_path / "easy.yaml"
    config.write_text(f"""
steps: 5
task: qa
data: {{train: {tmp_path}/rows.parquet, cache: {tmp_path}/cache, index: lazy}}
model: {{name: {tiny_models["qwen3_vl"]}}}
rollout: {{prompts_per_step: 2, group_size: 2, max_new_tokens: 4}}
train: {{lr: 1.0e-3}}
eval: {{samples: 0}}
save: {{every: 2}}
""")
    return config


def test_pictures_in_rows_are_those_of_files(easy, tmp_path):
    finished(easy, tmp_path / "rows", timeout=900)
    convert(tmp_path / "rows.parquet", tmp_path / "rows.jsonl")
    finished(easy, tmp_path / "files", f"data.train={tmp_path}/rows.jsonl", "data.index=memory", timeout=900)
    assert metrics(tmp_path / "rows") == metrics(tmp_path / "files")
    assert weights(tmp_path / "rows", 5) == weights(tmp_path / "files", 5)
    shown = RunFolder(tmp_path / "rows").rollouts().to_pylist()
    stored = {media["path"]: media["hash"] for row in shown for media in row["media"]}
    assert stored and all(hashlib.sha256((tmp_path / "rows" / path).read_bytes()).hexdigest() == sha256
                          for path, sha256 in stored.items())
    assert all("sha256:" in row["sample"] and len(row["sample"]) < 1000 for row in shown)
    seen = group(Library(tmp_path), "rows", "train", 0, shown[0]["group_id"])
    assert seen.media and all(media.name and media.name.endswith(".png") for media in seen.media)
    assert kill_after(easy, tmp_path / "killed", 3, timeout=900) == -signal.SIGKILL
    finished(easy, tmp_path / "killed", timeout=900)
    assert_same_run(tmp_path / "killed", tmp_path / "rows")


@pytest.mark.long
def test_a_data_set_of_the_hub_keeps_its_commit(easy, tmp_path):
    with serving() as hub:
        first = hub.put("org/easy", {"data/train-00000-of-00001.parquet": table(), "easy.py": b"raise SystemExit(9)"})
        def start(*runs):
            """In a new interpreter, as the Hub's address is read when its library is imported."""
            words = [[str(easy), f"run.dir={tmp_path / folder}", f"data.train={data}", steps]
                     for folder, data, steps in runs]
            done = subprocess.run([sys.executable, "-c", RUNS, json.dumps(words)], timeout=300, text=True,
                                  capture_output=True, cwd=ROOT,
                                  env={**ENV, "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"})
            assert done.returncode == 0, done.stderr
        start(("begun", "org/easy@train", "steps=2"))
        second = hub.put("org/easy", {"data/train-00000-of-00001.parquet": table(200)})
        start(("begun", "org/easy@train", "steps=4"), ("whole", f"org/easy@train#{first}", "steps=4"))
        others = [asked for asked in hub.asked if "/org/easy/" not in asked or asked.endswith(".py")]
        assert {*others} <= {"GET /api/agent-harnesses"}  # what the library asks its Hub about itself
    assert metrics(tmp_path / "begun") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "begun", 4) == weights(tmp_path / "whole", 4)
    assert json.loads((tmp_path / "begun/data_sources.json").read_text()) == {"org/easy@train": first} != second


SMALL = ("steps=10", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.samples=0",
         "save.every=4", "save.keep=9", "log.samples_every=0", "train.schedule=constant")
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
