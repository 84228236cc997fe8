"""Answers to train on, read from a separate file: `data.solutions`.

    {"number": 7, "id": "train-7", "solution": "<answer>...</answer>", "weight": 1.0, "reward": 0.9, "step": 50}

Each line makes one training row. It is the sample at index `number` of the training split, whose id must equal `id`,
with this `solution` and its weight multiplied by `weight`. `rejected` is optional: an answer to which the solution is
preferred. Other fields document the answer and are ignored."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from vlrl.config.paths import searched_in
from vlrl.data.samples import SampleSequence, where
from vlrl.errors import ConfigError, DataError
from vlrl.types import Sample


@dataclass(frozen=True)
class Solution:
    """An answer to train on: one line of a data.solutions file."""

    number: int
    id: str
    text: str
    weight: float = 1.0
    rejected: str = ""
    """A worse answer, to which the solution is preferred; "" for none."""


def read_solutions(name: str) -> list[Solution]:
    """Reads the lines of a data.solutions file. Raises ConfigError for a missing or empty file, and DataError naming a
    line that is not a solution."""
    path = Path(name)
    if not os.path.isfile(path):
        raise ConfigError(f"data.solutions={name!r}: this file does not exist{searched_in(name)}. A stage of kind "
                          "rounds writes such a file (rows.jsonl)")
    out = []
    for place, line in enumerate(path.read_bytes().splitlines(), 1):  # str.splitlines would also split at U+2028
        try:
            out.append(_solution(json.loads(line)))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise DataError(f"{path}, line {place}: {line[:80].decode(errors='replace')!r} is not a line of "
                            "data.solutions. A line needs number (index in the training split), id and solution (a "
                            "string); a weight, if there is one, must be above 0") from None
    if not out:
        raise ConfigError(f"data.solutions={name!r} contains no solution: choose another file, or remove the setting")
    return out


def _solution(line: Mapping[str, Any]) -> Solution:
    number, id, text, weight = line["number"], line["id"], line["solution"], line.get("weight", 1.0)
    rejected = line.get("rejected", "")
    numbers = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    if not (numbers and isinstance(id, str) and isinstance(text, str) and text and 0 < float(weight) < float("inf")
            and isinstance(rejected, str)):
        raise ValueError
    return Solution(number, id, text, float(weight), rejected)


class SolvedSamples(SampleSequence):
    """The training samples with their solutions: one sample per line of the data.solutions file. If a sample has
    several solutions, a number is appended to its id from the second solution on."""

    def __init__(self, samples: Sequence[Sample], solutions: Sequence[Solution], name: str):
        self.samples, self.solutions, self.name = samples, solutions, name
        self.files = (Path(name), *getattr(samples, "files", ()))
        counts, self._turns = Counter[int](), list[int]()
        for one in solutions:
            counts[one.number] += 1
            self._turns.append(counts[one.number])

    def __len__(self) -> int:
        return len(self.solutions)

    def where(self, index: int) -> str | None:
        number = self.solutions[index].number
        return where(self.samples, number) if number < len(self.samples) else ""

    def fingerprint_rows(self) -> Sequence[int]:
        return range(len(self))

    def raw_record(self, index: int) -> tuple[str, Any]:
        return self.solutions[index].id, asdict(self.solutions[index])

    def _at(self, index: int) -> Sample:
        one = self.solutions[index]
        sample = self.samples[one.number] if one.number < len(self.samples) else None
        if sample is None or sample.id != one.id:
            reason = f"there are {len(self.samples):,} rows" if sample is None else f"row {one.number} is {sample.id!r}"
            raise DataError(f"data.solutions={self.name!r}: its answer to row {one.number}, {one.id!r}, matches no "
                            f"training row ({reason}): the file was written for other data, or with another "
                            "data.seed. Use the data and the seed of the run that wrote the file")
        turn = self._turns[index]
        return replace(sample, id=sample.id if turn == 1 else f"{sample.id}#{turn}", row={
            **sample.row, "solution": one.text, "weight": sample.weight * one.weight,
            **({"rejected": one.rejected} if one.rejected else {})})


def with_solutions(samples: Sequence[Sample], name: str) -> Sequence[Sample]:
    """Returns the training rows that the file `name` (data.solutions) selects; all samples if `name` is empty."""
    return SolvedSamples(samples, read_solutions(name), name) if name else samples
