"""Functions that several tasks use: lists of generated samples, means of metrics, and perfect answers with thinking."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from vlrl.data import SPLITS, Drawn
from vlrl.errors import ConfigError
from vlrl.types import Sample


def drawn(task: Any, split: str, make: Callable[[str, int], Sample]) -> Sequence[Sample]:
    """A list of `task.count` samples, each made by `make(split, index)` when it is accessed. Raises ConfigError for an
    unknown split."""
    if split not in SPLITS:
        raise ConfigError(f"task '{type(task).name}' has no split {split!r}. The splits of the task are "
                          f"{' and '.join(SPLITS)}")
    return Drawn(task.count, lambda index: make(split, index))


def means(values: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Name -> mean of its values, from (name, value) pairs; sorted by name."""
    columns: dict[str, list[float]] = {}
    for name, value in values:
        columns.setdefault(name, []).append(value)
    return {name: sum(column) / len(column) for name, column in sorted(columns.items())}


def accuracy_by(records: Iterable[Mapping[str, Any]], fields: Sequence[str]) -> dict[str, float]:
    """`accuracy/<value>` -> mean of the reward part `accuracy` over the rows that have this value in one of the
    `fields`, e.g. `accuracy/math`."""
    paid = ((record["sample"], value) for record in records
            if (value := record["parts"].get("accuracy")) is not None)
    return means((f"accuracy/{name}", value) for row, value in paid
                 for name in {str(row[field]) for field in fields if row.get(field)})


def think_answer(answer: str, thought: str = "I look at the picture.") -> str:
    """A perfect answer with thinking: `<think>...</think><answer>...</answer>`."""
    return f"<think>{thought}</think><answer>{answer}</answer>"
