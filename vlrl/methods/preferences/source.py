"""Group source of a reward model's run."""

from __future__ import annotations

from vlrl.methods.preferences.pairs import pair_groups
from vlrl.rollout.draws import DrawBatch
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.partial import PartialGroup
from vlrl.types import Group


class PairSource(GroupSource):
    """Groups of two given answers each, one of them better."""

    generates = False

    def _answer(self, drawn: DrawBatch, tokens: int | None) -> dict[int, Group | PartialGroup]:
        groups = pair_groups(self.task, self.encode, drawn.accepted, self.step)
        return {a.number: group for a, group in zip(drawn.accepted, groups, strict=True)}
