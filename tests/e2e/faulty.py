"""Runs of a task that does what the environment variable FAULT says, on rows with pictures, and a real small disk."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image

from tests.e2e.runs import metrics, weights
from vlrl.store import RunFolder

STEPS = 4
TASK = '''
import os, shutil, signal, time
from pathlib import Path
from vlrl.task import Task

class Faulty(Task):
    """The share of vowels; from step 2 on what FAULT says."""
    prompt = "How bright is {q}?"
    rewards = {"vowels": 1.0}

    def score(self, sample, answer):
        fault, _, where = os.environ.get("FAULT", "").partition(":")
        late = answer.step >= 2
        vowels = sum(c in "aeiou" for c in answer.text) / max(len(answer.text), 1)
        if fault == "huge always":
            return {"vowels": 1e11 * (vowels + 0.1)}
        if fault == "collapse":
            return {"vowels": vowels * 0.01 + (not late)}
        if fault == "huge" and late and where in ("", sample.id) or fault == "huge once" and answer.step == 2:
            return {"vowels": 1e11 * (vowels + 0.1)}
        if fault == "hang" and answer.step == 2 and sample.id == Path(where).read_text():
            while True:
                pass
        if not late:
            return {"vowels": vowels}
        if fault == "raises":
            raise ValueError("no way to score this")
        if fault == "part":
            return {"consonants": 1.0}
        if fault == "sleeps":
            time.sleep(10_000)
        if fault == "wait":
            Path(where, "waiting").touch()
            while not Path(where, "go").exists():
                time.sleep(0.05)
        if fault == "vanish":
            shutil.rmtree(where, ignore_errors=True)
        if fault == "media":
            for path in Path(where).glob("*.png"):
                path.rename(path.with_suffix(".gone"))
        if fault == "some media":
            for path in Path(where).glob("*.png"):
                if int(path.stem) % 3 == 0:
                    path.unlink(missing_ok=True)
                elif int(path.stem) % 3 == 1:
                    path.write_bytes(b"no picture")
        if fault == "kill" and os.environ.get("RANK") == "1":
            while not Path(where, "rollouts/step-000001-rank-00001.parquet").exists():
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        return {"vowels": vowels}

    def summarize(self, records):
        fault, _, lines = os.environ.get("FAULT", "").partition(":")
        if fault == "summary" and len(Path(lines).read_text().splitlines() if Path(lines).exists() else ()) == 2:
            raise MemoryError("no room for a summary")
        return {}

    def oracle(self, sample):
        return "a"
'''
FEW = "prompts_per_step: 2, group_size: 3, max_new_tokens: 6"
QUIET = "save: {every: 0, keep: 9}\nstore: {media: none}\nlog: {samples_every: 0}\nlimits: {score_errors: 0.5}"


def write(folder: Path, model: Path, rows: int = 12, rollout: str = FEW, data: str = "workers: 0",
          more: str = QUIET) -> Path:
    """Config, task and rows with pictures."""
    (folder / "pictures").mkdir(parents=True)
    for i in range(rows):
        Image.new("RGB", (56, 56), (10 * i, 80, 120)).save(folder / "pictures" / f"{i:02d}.png")
    (folder / "rows.jsonl").write_text("".join(
        json.dumps({"id": f"row-{i}", "q": f"picture {i}", "image": f"pictures/{i:02d}.png"}) + "\n"
        for i in range(rows)))
    (folder / "faulty.py").write_text(TASK)
    (folder / "faulty.yaml").write_text(f"""
steps: {STEPS}
task: {folder}/faulty.py:Faulty
data: {{train: {folder}/rows.jsonl, heldout: {folder}/rows.jsonl, {data}}}
model: {{name: {model}}}
rollout: {{{rollout}}}
train: {{lr: 1.0e-3}}
eval: {{samples: 0}}
{more}
""")
    return folder / "faulty.yaml"


def assert_same(folder: Path, whole: Path) -> None:
    """A run that went on ended as one that nothing disturbed."""
    assert weights(folder, STEPS) == weights(whole, STEPS)
    assert metrics(folder) == metrics(whole)
    assert RunFolder(folder).rollouts().equals(RunFolder(whole).rollouts())


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    """A real disk of that size."""
    path.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=False,
                          capture_output=True) if shutil.which("mount") else None
    if made is None or made.returncode:
        pytest.skip("needs the right to mount a small disk")
    yield path
    subprocess.run(["umount", str(path)], check=True)
