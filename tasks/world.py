"""World: any external environment (`environment.name`), one seed per sample.

    vlrl train tiny.yaml task=world environment.name=gym:FrozenLake-v1 environment.options.is_slippery=false

The splits have disjoint seeds, so held-out worlds are never used for training. With files of rows (data.train,
data.heldout) each row has an `instruction`, and optionally a `seed` and an `answer`. If a row has an `answer`, an
episode is successful if its last action is that answer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from vlrl.config.base import Positive
from vlrl.errors import DataError
from vlrl.task import Task
from vlrl.types import Answer, Parts, Sample

from ._shared import drawn

_APART = 2**30  # the first seed of the held-out split; those of training are below


class World(Task):
    """Act in an external environment. Reward parts: `return`, the total reward of the environment; `success` and
    `progress`, in [0, 1]; `illegal`, the number of invalid actions; `tool_success`, the number of turns in which all
    calls of a server's tools succeeded."""

    prompt = "{instruction}"
    rewards = {"return": 1.0, "success": 0.0, "progress": 0.0, "illegal": 0.0, "tool_success": 0.0}
    outcome = {"success": 1.0}
    lives_outside: ClassVar[bool] = True
    instruction: str = "Act in this world, one action a turn. Answer with the action only."
    """Instruction for the model, for rows that have no `instruction`."""
    count: Positive = 4096
    """Number of seeds per split."""

    def samples(self, split: str) -> Sequence[Sample]:
        if self.data is not None and getattr(self.data, split, None):
            return super().samples(split)
        start = _APART if split.endswith("heldout") else 0
        return drawn(self, split, lambda split, i: Sample(id=f"{split}-{i:06d}", row={
            "instruction": self.instruction, "seed": start + (self.seed * self.count + i) % _APART}))

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        sample = super().sample_from_row({"instruction": self.instruction, **row}, root)
        seed = sample.get("seed", 0)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**31:
            raise DataError(f"row '{sample.id}': seed={str(seed)[:60]!r} must be a whole number from 0 to 2147483647")
        return sample

    def score(self, sample: Sample, answer: Answer) -> Parts:
        """The part `success` if the row has an `answer`. All other parts were rewarded in the turns of the episode."""
        parts: Parts = {} if answer.turns else dict.fromkeys(self.weights, 0.0)
        if "answer" in sample.row:
            parts["success"] = float(answer.final.strip() == str(sample["answer"]).strip())
        return parts
