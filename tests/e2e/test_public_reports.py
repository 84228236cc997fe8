"""Faults that users of other trainers have reported, tried here."""

import base64
import http.server
import io
import json
import logging
import threading

import numpy as np
import pytest
from PIL import Image

from vlrl import config
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.training.loop import train

pytestmark = pytest.mark.slow
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
