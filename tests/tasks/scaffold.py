"""Shared by the tests of tasks: answers in tags, scores, episodes, metrics of a split, the contract."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vlrl import testing
from vlrl.config.schema import DataSettings
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, load
from vlrl.task.scoring import score_group
from vlrl.testing import texts
from vlrl.types import Observation, PastAction, Step

SHORTER = tuple(t if len(t) <= 20_000 else t[:10_000] + t[-10_000:] for t in texts._LONG_TEXTS)


def think(answer: Any, why: str = "so") -> str:
    return f"<think>{why}</think><answer>{answer}</answer>"


@cache
def built(name: str, recipe: str = "", **options: Any) -> Any:
    """A task that no test changes."""
    return load(name, {**({"recipe": recipe} if recipe else {}), **options})


def scores(task: Task, row: dict[str, Any], *texts: str, services: Any = None) -> list[Any]:
    """The scores of answers to a row, none with an error."""
    found = score_group(task, task.sample_from_row(row), [parse_answer(text) for text in texts], 0, services)
    assert all(s.error is None for s in found), [s.error for s in found]
    return found


def played(task: Task, sample: Any, actions: Sequence[str], seed: int = 7) -> tuple[list[Observation], list[Step]]:
    """Observations and steps of an episode, up to its end."""
    world: Any = task.environment(sample)
    first, steps = world.reset(seed), []
    for action in actions:
        steps.append(world.step(action))
        if steps[-1].done:
            break
    return [first, *(s.observation for s in steps)], steps


def scored_episode(task: Task, sample: Any, actions: Sequence[str], services: Any = None) -> Any:
    """The scores of the episode in which these actions are done."""
    _, steps = played(task, sample, actions)
    turns = tuple(PastAction(action=a, media=tuple(s.observation.media), parts=s.parts, done=s.done)
                  for a, s in zip(actions, steps, strict=False))
    return score_group(task, sample, [replace(parse_answer(turns[-1].action), turns=turns)], 0, services)[0]


def measured(task: Any, rows: Any, texts: Any, services: Any = None) -> tuple[list[dict[str, float]], dict[str, float]]:
    """The metrics of an answer to each row, and those of the split."""
    records = []
    for row, text in zip(rows, texts, strict=True):
        sample, answer = task.sample_from_row(row), parse_answer(text)
        (found,) = scores(task, row, text, services=services)
        records.append({"sample": sample.row, "answer": answer.text, "parsed": found.parsed, "parts": found.parts,
                        "target": task.target(sample), "metrics": task.metrics(sample, answer, found.parts)})
    return [r["metrics"] for r in records], task.summarize(json.loads(json.dumps(records)))


def assert_ok(task: Task, samples: int) -> None:
    """Checks the contract with `SHORTER` answers, which still take seconds where the time grows with the square."""
    with patch.object(texts, "_LONG_TEXTS", SHORTER):
        testing.assert_ok(task, samples=samples, processes=0)


def assert_contract(name: str, options: dict[str, Any], rows: Any, folder: Path, samples: int = 12) -> None:
    """Checks the contract of a task on rows, whose ids are their numbers."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({**row, "id": str(i)}) + "\n" for i, row in enumerate(rows)), encoding="utf-8")
    task = load(name, options)
    task.data = DataSettings(train=str(path))
    assert_ok(task, samples)
