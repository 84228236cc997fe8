"""Puts a run of vlrl into the pages of others, to do the same jobs there: benchmarks/results/inspector_peers.md.

    .venv/bin/python benchmarks/inspector_peers.py story /tmp/stalls                 # the run that the page is about
    .venv/bin/python benchmarks/inspector_peers.py dump /tmp/stalls /tmp/run         # rows as JSON lines, pictures
    PEERS/bin/python benchmarks/inspector_peers.py trackio /tmp/run                  # TRACKIO_DIR says where
    .venv/bin/python benchmarks/inspector_peers.py tensorboard /tmp/run              # /tmp/run/tensorboard
    PEERS/bin/python benchmarks/inspector_peers.py inspect /tmp/run                  # /tmp/run/inspect

PEERS is a virtual environment of its own with trackio, inspect-ai and tensorboard. Each gets what it has a form for:
metrics, every answer with its numbers, texts and picture, and the evaluations.
"""

from __future__ import annotations

import argparse
import base64
import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

_COLUMNS = ("step", "group_id", "sample_id", "index", "split", "prompt", "completion", "parts", "reward", "advantage",
            "truncated", "error", "target", "parsed", "finish_reason", "media")


def story(to: Path) -> None:
    """Writes a run of 12 steps of 8 groups of 4 answers: from step 6 on all answers of six groups of a step are right,
    and from step 8 on one answer a step is paid in full for two boxes around everything.
    """
    import numpy as np

    from tests.app import made_runs as made

    run = made.write(to, steps=0, evaluate=False, planned=12)
    made._evaluate(run, "boxes", 0, 0.3, 0)
    for step in range(12):
        groups = [made.made_group("boxes", (8 * step + i) % 24, step, skill=0.3 + 0.05 * step) for i in range(8)]
        if step >= 6:
            groups[:6] = [replace(g, rollouts=tuple(replace(r, reward=1.1, advantage=0.0, error=None, parts={
                "iou": 1.0, "format": 1.0}) for r in g.rollouts)) for g in groups[:6]]
        if step >= 8:
            *first, third, last = groups[7].rollouts
            cheat = made.completion("<answer>[0, 0, 160, 120]</answer>" * 2, np.random.default_rng(step))
            third = replace(third, completion=cheat, reward=1.1, parts={"iou": 1.0, "format": 1.0}, error=None,
                            parsed=[0, 0, 160, 120])
            groups[7] = replace(groups[7], rollouts=(*first, third, last))
        run.write_rollouts(step, 0, groups, made._per_token(groups, step))
        run.append_metrics(made._metrics(step, groups))
    made._evaluate(run, "boxes", 12, 0.9, 0)
    run.heartbeat({"steps": 12, "step": 12, "state": "finished", "reward": 1.0, "eta_s": 0.0})


def dump(run: Path, to: Path) -> None:
    """Writes metrics.jsonl, eval.jsonl, answers.jsonl (one answer a line, oldest first) and media/ into a folder."""
    from vlrl.store import RunFolder

    to.mkdir(parents=True)
    for name in ("metrics.jsonl", "eval.jsonl"):
        shutil.copyfile(run / name, to / name)
    shutil.copytree(run / "media", to / "media")
    folder = RunFolder(run)
    splits = {record["split"] for record in _lines(to / "eval.jsonl")}
    rows = folder.rollouts(columns=list(_COLUMNS)).to_pylist()
    for split in sorted(splits):
        rows += folder.rollouts(split=split, columns=list(_COLUMNS)).to_pylist()
    with open(to / "answers.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            media = next((m["path"] for m in row["media"] or () if m["path"]), None)
            parts = dict(row["parts"] or ())
            file.write(json.dumps({**row, "parts": parts, "media": media and media.removeprefix("media/")}) + "\n")


def to_trackio(folder: Path) -> None:
    """Metrics by step, and of each step a table of its answers with their pictures, and a trace of each answer."""
    trackio: Any = importlib.import_module("trackio")
    trackio.init(project="vlrl", name=folder.name, embed=False)
    tables = {(source, step): rows for source, step, rows in _tables(folder)}
    for record in _lines(folder / "metrics.jsonl"):
        step = record["step"]
        rows = [[row["sample_id"], row["index"], row["reward"], row["advantage"], len(row["completion"]),
                 row["truncated"], _image(trackio, folder, row), row["completion"]] for row in tables["train", step]]
        names = ["sample", "answer", "reward", "advantage", "characters", "cut off", "picture", "text"]
        numbers = {k: v for k, v in record.items() if k != "step" and isinstance(v, (int, float))}
        trackio.log({**numbers, "answers": trackio.Table(columns=names, data=rows)}, step=step)
        for row in tables["train", step]:
            trackio.log({"answer": _trace(trackio, row)}, step=step)
    for record in _lines(folder / "eval.jsonl"):
        rows = [[row["sample_id"], row["reward"], _image(trackio, folder, row), row["completion"]]
                for row in tables[record["split"], record["step"]]]
        trackio.log({f"eval/{record['split']}/reward": record["reward/mean"], f"eval/{record['split']}/answers":
                     trackio.Table(columns=["sample", "reward", "picture", "text"], data=rows)}, step=record["step"])
    trackio.finish()


def _trace(trackio: Any, row: dict[str, Any]) -> Any:
    numbers = {k: row[k] for k in ("sample_id", "group_id", "index", "reward", "advantage", "truncated")}
    said = [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["completion"]}]
    return trackio.Trace(messages=said, metadata={**numbers, **row["parts"]})


def _image(trackio: Any, folder: Path, row: dict[str, Any]) -> Any:
    return trackio.Image(folder / "media" / row["media"], caption=row["sample_id"]) if row["media"] else ""


def to_tensorboard(folder: Path) -> None:
    """Scalars; of each step the answers as one text table, and the pictures of its samples, one series a sample."""
    import numpy as np
    from PIL import Image
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard" / folder.name)) as writer:
        for record in _lines(folder / "metrics.jsonl"):
            for name, value in record.items():
                if name != "step" and isinstance(value, (int, float)):
                    writer.add_scalar(name, value, record["step"])
        for source, step, rows in _tables(folder):
            cells = [f"{r['sample_id']} | {r['index']} | {r['reward']} | {r['advantage']} | {r['truncated']} | "
                     f"{_cell(r['completion'])}" for r in rows]
            head = "sample | answer | reward | advantage | cut off | text\n--- | --- | --- | --- | --- | ---\n"
            writer.add_text(f"answers/{source}", head + "\n".join(cells), step)
            for row in {r["sample_id"]: r for r in rows}.values():
                if row["media"]:
                    picture = np.asarray(Image.open(folder / "media" / row["media"]).convert("RGB"))
                    writer.add_image(f"{source}/{row['sample_id']}", picture, step, dataformats="HWC")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def to_inspect(folder: Path) -> None:
    """A log for the training answers and one for each evaluation; a sample a group, its answers the epochs."""
    log: Any = importlib.import_module("inspect_ai.log")
    for source, step, rows in [("train", None, _of(folder, "train")), *(t for t in _tables(folder) if t[0] != "train")]:
        name = "train" if step is None else f"{source}-after-{step}"
        samples = [_sample(folder, row) for row in rows]
        spec = log.EvalSpec(created="2026-01-01T00:00:00+00:00", task=name, model="vlrl/run",
                            dataset=_dataset(name, rows), config=log.EvalConfig(epochs=max(s.epoch for s in samples)))
        results = log.EvalResults(total_samples=len(samples), completed_samples=len(samples), scores=[log.EvalScore(
            name=part, scorer=part, metrics={"mean": log.EvalMetric(name="mean", value=_mean(samples, part))})
            for part in samples[0].scores])
        (folder / "inspect").mkdir(exist_ok=True)
        log.write_eval_log(log.EvalLog(status="success", eval=spec, samples=samples, results=results),
                           str(folder / "inspect" / f"{name}.eval"))


def _dataset(name: str, rows: list[dict[str, Any]]) -> Any:
    log: Any = importlib.import_module("inspect_ai.log")
    return log.EvalDataset(name=name, samples=len({(r["step"], r["group_id"]) for r in rows}))


def _sample(folder: Path, row: dict[str, Any]) -> Any:
    log: Any = importlib.import_module("inspect_ai.log")
    model: Any = importlib.import_module("inspect_ai.model")
    scorer: Any = importlib.import_module("inspect_ai.scorer")
    content: list[Any] = [model.ContentText(text=row["prompt"])]
    if row["media"]:
        picture = base64.b64encode((folder / "media" / row["media"]).read_bytes()).decode()
        content.append(model.ContentImage(image=f"data:image/png;base64,{picture}"))
    asked = [model.ChatMessageUser(content=content)]
    said = model.ModelOutput.from_content("vlrl/run", row["completion"],
                                          stop_reason="max_tokens" if row["truncated"] else "stop")
    scores = {"reward": scorer.Score(value=row["reward"] if row["reward"] is not None else float("nan"),
                                     answer=json.dumps(row["parsed"]), explanation=row["error"])}
    scores |= {k: scorer.Score(value=v if v is not None else float("nan")) for k, v in row["parts"].items()}
    return log.EvalSample(id=f"{row['sample_id']} step {row['step']}", epoch=row["index"] + 1, input=asked,
                          target=str(row["target"]), messages=[*asked, said.choices[0].message], output=said,
                          scores=scores, metadata={
                              **{k: row[k] for k in ("step", "group_id", "advantage", "truncated")},
                              "characters": len(row["completion"])})


def _mean(samples: list[Any], part: str) -> float:
    values = [s.scores[part].value for s in samples if s.scores[part].value == s.scores[part].value]
    return sum(values) / max(1, len(values))


# --- rows -------------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _of(folder: Path, source: str) -> list[dict[str, Any]]:
    return [row for row in _lines(folder / "answers.jsonl") if (row["split"] or "train") == source]


def _tables(folder: Path) -> Iterator[tuple[str, int, list[dict[str, Any]]]]:
    """Yields the answers of every source and step."""
    def place(row: dict[str, Any]) -> tuple[str, int]:
        return row["split"] or "train", row["step"]

    for (source, step), rows in groupby(sorted(_lines(folder / "answers.jsonl"), key=place), key=place):
        yield source, step, list(rows)


PEERS: dict[str, Callable[[Path], None]] = {"trackio": to_trackio, "tensorboard": to_tensorboard, "inspect": to_inspect}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=["story", "dump", *PEERS])
    parser.add_argument("folder", type=Path)
    parser.add_argument("to", type=Path, nargs="?")
    given = parser.parse_args()
    if given.what == "story":
        story(given.folder)
    elif given.what == "dump":
        dump(given.folder, given.to or parser.error("dump needs a folder to write into"))
    else:
        PEERS[given.what](given.folder)


if __name__ == "__main__":
    main()
