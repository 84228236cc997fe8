"""Runs on tables whose rows hold their pictures: the same run as with files, whatever reads them, and after a kill."""

import hashlib
import io
import json
import signal
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.hub_server import hub as serving
from tests.e2e.runs import ENV, ROOT, assert_same_run, finished, kill_after, metrics, weights
from vlrl.app.details import group
from vlrl.app.library import Library
from vlrl.store import RunFolder
from vlrl.tools.datasets.convert import convert

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
