"""How long 10,000 completions of every recipe take to score, on one thread.

    python benchmarks/scoring.py [--completions 10000] [--group 16]

Of each group a quarter are perfect answers, the others miss by a little, are cut off, or are junk. CPU seconds of this
process, from the completions' texts to parts, reward and parsed answer. No model, no file. Parts that ask a model (a
judge, the reference policy) are left out.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from vlrl import config
from vlrl.rewards.text import parse_answer
from vlrl.task import Task
from vlrl.task.scoring import score_group
from vlrl.training import build_task
from vlrl.types import Sample

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
SIZE = {"width": 1280, "height": 720, "processed_size": [1288, 728]}
ROWS: dict[str, dict[str, Any]] = {
    "grounding": {**SIZE, "expression": "mug", "labels": ["mug", "cat"], "boxes": [
        {"box": [100, 100, 220, 300], "label": "mug"}, {"box": [400, 80, 640, 360], "label": "cat"},
        {"box": [700, 400, 900, 690], "label": "mug"}]},
    "gui": {**SIZE, "instruction": "open the settings", "box": [1100, 20, 1180, 60]},
    "classification": {"label": "sea lion", "labels": [f"class {i} of the sea" for i in range(99)] + ["sea lion"]},
    "preference": {"question": "What is it?", "responses": ["a cat", "a dog"], "answer": 2},
    "driving": {"plan": {"speed": "DECELERATE", "path": "LEFT_TURN"}, "speed_mps": 8.5, "navigation": "Turn left"},
    "qa": {"question": "What is the sum of the bars?", "answer": 120, "answer_type": "number"},
    "video": {**SIZE, "question": "Where does the cyclist go?", "answer_type": "choice", "answer": "B", "duration": 60,
              "options": ["to the left", "to the right", "nowhere"], "spans": [[10.5, 20]],
              "tracks": [{"label": "cyclist", "boxes": [[100 + 40 * i, 100, 220 + 40 * i, 300] for i in range(8)]}]},
}
TYPES = {"time_r1": "span", "videochat_r1_gqa": "span+choice", "videochat_r1_track": "track"}
NO_RECIPES = ("tiny", "digits")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--completions", type=int, default=10_000)
    parser.add_argument("--group", type=int, default=16)
    given = parser.parse_args()
    print(f"| recipe | CPU s for {given.completions:,} completions | microseconds each |\n|---|---|---|")
    for path in sorted(path for task in ROWS for path in CONFIGS.glob(f"{task}/*") if path.stem not in NO_RECIPES):
        seconds = measure(path, given.completions, given.group)
        print(f"| {path.stem} | {seconds:.2f} | {seconds / given.completions * 1e6:.0f} |", flush=True)


def measure(path: Path, completions: int, group: int) -> float:
    """CPU seconds to score so many completions in groups."""
    task = build_task.make_task(config.load(path))
    kind = {"answer_type": TYPES[path.stem]} if path.stem in TYPES else {}
    sample = task.sample_from_row({"id": "1", **ROWS[task.name], **kind})
    texts = (answers(task, sample) * (group // 4 + 1))[:group]
    score_group(task, sample, [parse_answer(text) for text in texts], step=0)  # libraries are imported here
    began = time.process_time()
    for start in range(0, completions, group):
        score_group(task, sample, [parse_answer(t) for t in texts[:completions - start]], step=0)
    return time.process_time() - began


def answers(task: Task, sample: Sample) -> list[str]:
    """A perfect answer, one that misses by a little, one that is cut off, and junk."""
    right = task.oracle(sample) or "[1100, 20, 1180, 60]"
    return [right, right.replace("0", "3"), right[:-20], "I see several things here. " * 4]


if __name__ == "__main__":
    main()
