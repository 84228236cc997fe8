"""Starts train.py as a user does, and reads what it left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.e2e import forked
from vlrl.store import RunFolder

ROOT = Path(__file__).resolve().parents[2]
TRAIN = [sys.executable, str(ROOT / "train.py")]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
FEW = ("steps=5", "save.every=2", "eval.every=2", "eval.samples=2", "rollout.prompts_per_step=2",
       "rollout.group_size=2")
"""Words of the shortest run that is resumed in its middle."""

TASK = '''
from PIL import Image
from vlrl import Environment, Observation, Step
from vlrl.task import Task
from vlrl.types import Media, Sample

class Shades(Task):
    """Random answers of a random model: the share of vowels is a reward that varies."""
    prompt = "How bright is {id}?"
    rewards = {"vowels": 1.0, "short": 0.1}

    def samples(self, split):
        start = 0 if split == "train" else 1000
        return [Sample(id=f"{split}-{i}", row={"id": f"picture {i}"},
                       media=(Media(source=Image.new("RGB", (64, 64), (7 * i % 256, 80, 120))),))
                for i in range(start, start + 40)]

    def score(self, sample, answer):
        vowels = sum(c in "aeiou" for c in answer.text)
        return {"vowels": vowels / max(len(answer.text), 1), "short": float(len(answer.text) < 20)}

    def oracle(self, sample):
        return "a"
'''


def write_config(folder: Path, model: Path, extra: str = "") -> Path:
    """A small run of the Shades task on a tiny model: a config file and its task file in `folder`."""
    (folder / "shades.py").write_text(TASK)
    config = folder / "shades.yaml"
    config.write_text(f"""
steps: 20
task: {folder}/shades.py:Shades
model: {{name: {model}, train: [language, merger, vision]}}
rollout: {{prompts_per_step: 4, group_size: 4, max_new_tokens: 8}}
train: {{lr: 1.0e-3, tokens_per_batch: 400, schedule: cosine, warmup: 0.1}}
eval: {{every: 10, samples: 8}}
save: {{every: 5}}
{extra}
""")
    return config


def run(config: Path, folder: Path, *words: str, processes: int = 1, timeout: int = 300,
        **env: str) -> subprocess.CompletedProcess:
    """Runs train.py to its end, as so many ranks without a launcher; its output is in the result."""
    words = (str(ROOT / "train.py"), str(config), f"run.dir={folder}", *words)
    return forked.run(words, {**ENV, **env}, folder.parent, timeout, processes)


def finished(config: Path, folder: Path, *words: str, **more: Any) -> subprocess.CompletedProcess:
    """As `run`, of a run that has to end well."""
    done = run(config, folder, *words, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def kill_after(config: Path, folder: Path, lines: int, *words: str, how: int = signal.SIGKILL,
               timeout: int = 300) -> int:
    """Starts train.py and sends it a signal once metrics.jsonl has `lines` lines; returns the exit code."""
    with open(os.devnull, "w") as nowhere:
        process = forked.Process([str(ROOT / "train.py"), str(config), f"run.dir={folder}", *words], ENV,
                                 folder.parent, nowhere, nowhere)
    wait_for(folder, lines, [process], timeout=timeout)
    process.send_signal(how)
    return process.wait(timeout)


def wait_for(folder: Path, lines: int, processes: Sequence[subprocess.Popen | forked.Process],
             said: Callable[[], object] = str, timeout: float = 600) -> None:
    """Returns once metrics.jsonl has so many lines; the processes must run till then, else it fails with what they
    `said`."""
    end = time.monotonic() + timeout
    while len(metrics(folder)) < lines:
        assert all(p.poll() is None for p in processes), f"ended before it could be struck {said()}"
        assert time.monotonic() < end
        time.sleep(0.02)


def metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict]:
    """Complete lines without times and memory."""
    path = folder / name
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    varying = ("time/", "tokens_per_s", "memory/")
    return [{k: v for k, v in json.loads(line).items() if not k.startswith(varying)} for line in lines]


def assert_same_run(found: Path, whole: Path, steps: int = 5) -> None:
    """Bit for bit, times and memory aside."""
    assert weights(found, steps) == weights(whole, steps)
    assert metrics(found) == metrics(whole) and len(metrics(found)) == steps
    assert metrics(found, "eval.jsonl") == metrics(whole, "eval.jsonl")
    assert RunFolder(found).rollouts().equals(RunFolder(whole).rollouts())


def goes_on_exactly(go: Callable[[Path, int], object], folder: Path, at: int, steps: int = 5) -> Path:
    """`go(folder, steps)` is a run that ends the same from its checkpoint of step `at`; returns its folder."""
    go(folder / "whole", steps)
    broken_at(at, folder)
    go(folder / "broken", steps)
    assert_same_run(folder / "broken", folder / "whole", steps)
    return folder / "whole"


def broken_at(step: int, folder: Path) -> None:
    """Makes `folder`/broken of `folder`/whole: without the checkpoints after that step, it goes on from there."""
    shutil.copytree(folder / "whole", folder / "broken")
    for path in (folder / "broken" / "checkpoints").glob("step-*"):
        if path.name > f"step-{step:06d}":
            shutil.rmtree(path)


def weights(folder: Path, step: int) -> str:
    """sha256 of the saved weights."""
    (file,) = (folder / "checkpoints" / f"step-{step:06d}").glob("*model.safetensors")
    return sha256(file.read_bytes()).hexdigest()
