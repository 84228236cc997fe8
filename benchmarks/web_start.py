"""A cold start for the task `web`: the embedded model learns to click, carelessly, from first screenshots of pages.

    python benchmarks/web_start.py --out runs/web-start
    vlrl train configs/web.yaml model.name=runs/web-start

Each page of configs/web.yaml, but for the held-out ones, is opened with its own seeds. A row shows the first screenshot
of an episode; its target is the right click moved by up to `jitter` CSS pixels. The second of two runs (LEGS) has a
larger jitter, so that a reward can still improve the model."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from vlrl.config import load, validate
from vlrl.data import Drawn
from vlrl.store.checkpoint import model_folder
from vlrl.task import Task, load_class
from vlrl.training import sft
from vlrl.training.build_task import make_task
from vlrl.types import Answer, Media, Parts, Sample

CONFIG = "configs/web.yaml"
LEGS = ((1500, 14.0, 1e-3), (200, 24.0, 5e-4))
"""Steps, `jitter` and learning rate of each leg."""
_Web: Any = load_class("web")


class Clicks(Task):
    """The first turn of episodes of `web`, and a click near the right place."""

    prompt = "{question}"
    rewards = {"format": 1.0}
    outcome = {"format": 1.0}
    folder: str = ""
    """What `collect` wrote."""
    jitter: float = 10.0
    """CSS pixels that a click lies beside the right one at most, in each direction."""
    count: int = 1 << 20

    def samples(self, split: str) -> Sequence[Sample]:
        rows = json.loads((Path(self.folder) / "rows.json").read_text())
        return Drawn(self.count, lambda i: self._sample(rows, split, i))

    def _sample(self, rows: list[dict[str, Any]], split: str, index: int) -> Sample:
        rng = random.Random(f"{self.seed}/{split}/{index}")
        row = rng.choice(rows)
        point = [v + rng.uniform(-self.jitter, self.jitter) for v in row["point"]]
        return Sample(id=f"{split}-{index:07d}", media=(Media(source=str(Path(self.folder) / row["image"])),),
                      row={**row["row"], "question": row["question"], "aimed": point})

    def oracle(self, sample: Sample) -> str:
        from vlrl.tasks._web_actions import FORMS  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
        from vlrl.tasks._web_page import Action  # pyright: ignore[reportMissingImports]  # likewise

        return FORMS["call"].write(self, sample, Action("click", tuple(sample["aimed"])))

    def score(self, sample: Sample, answer: Answer) -> Parts:
        return {"format": float(answer.text.startswith("click("))}


def collect(folder: Path, count: int, part: int, parts: int) -> list[dict[str, Any]]:
    """Returns the rows of every `parts`-th of `count` first screenshots, whose pictures it writes."""
    from vlrl.tasks._web_oracle import ORACLES, PageDriver  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
    from vlrl.tasks._web_page import Page  # pyright: ignore[reportMissingImports]  # likewise

    task: Any = make_task(load(CONFIG))
    task.heldout_pages = ()
    found = []
    for index in range(part, count, parts):
        sample = task._sample("start", index)  # a split of its own: its seeds are in neither of the others
        page = Page(task._pages(), sample["path"], sample["seed"], task.settle_ms)
        try:
            hands = PageDriver(page)
            picture = hands.look.picture
            ORACLES[sample["page"]](hands)
        finally:
            page.close()
        picture.save(folder / f"{index:06d}.png")
        found.append({"image": f"{index:06d}.png", "point": hands.actions[0].point, "row": dict(sample.row),
                      "question": f"{task.prompt}<image>Task: {page.instruction}"})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="run folder of the supervised run")
    parser.add_argument("--screenshots", type=int, default=1200)
    parser.add_argument("--processes", type=int, default=2, help="browsers that take screenshots")
    parser.add_argument("--steps", type=int, nargs=2, default=[steps for steps, *_ in LEGS], help="of each leg")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    folder = args.out.with_name(args.out.name + "-screenshots").resolve()
    if not (folder / "rows.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(args.processes, get_context("spawn")) as pool:
            parts = [pool.submit(collect, folder, args.screenshots, i, args.processes) for i in range(args.processes)]
            rows = [row for part in parts for row in part.result()]
        (folder / "rows.json").write_text(json.dumps(rows))
    first = args.out.with_name(args.out.name + "-first")
    sft.train(validate(settings(args, folder, first, 0)))
    sft.train(validate(settings(args, folder, args.out, 1, model_folder(str(first)))))


def settings(args: argparse.Namespace, folder: Path, out: Path, leg: int, start: str = "") -> dict[str, Any]:
    """Returns the settings of the supervised run of a leg, with model and pictures as in CONFIG."""
    config, (_, jitter, lr) = load(CONFIG), LEGS[leg]
    model = {"name": start or config.model.name, "train": list(config.model.train),
             "max_pixels": config.model.max_pixels}
    return {"steps": args.steps[leg], "seed": args.seed, "data": {"seed": args.seed}, "run": {"dir": str(out)},
            "model": model, "rollout": {"prompts_per_step": 32},
            "task": {"name": f"{Path(__file__).resolve()}:Clicks", "folder": str(folder), "jitter": jitter},
            "train": {"lr": lr, "schedule": "linear", "warmup": 0.05, "min_lr_ratio": 0.1, "betas": [0.9, 0.98],
                      "weight_decay": 0.01, "max_grad_norm": 1.0, "tokens_per_batch": 8192},
            "eval": {"samples": 0}, "store": {"media": "none"}}


if __name__ == "__main__":
    main()
