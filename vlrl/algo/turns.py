"""Turns of episodes, for several advantages: their rewards, and the tokens of their plans."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from vlrl.algo.inputs import ActionCredit


def turn_rewards(turns: Sequence[ActionCredit], reward: float) -> list[float]:
    """The rewards of turns; they add up to the reward of the episode."""
    paid = [turn.reward for turn in turns]
    if paid:
        paid[-1] += reward - sum(paid)
    return paid


def plan_span(texts: Sequence[str]) -> tuple[int, int]:
    """Start and end of the tokens of the first <plan>...</plan>, tags included, given the text of each token of an
    action; (0, 0) where none is closed."""
    whole = "".join(texts)
    begin = whole.find("<plan>")
    end = whole.find("</plan>", begin)
    if min(begin, end) < 0:
        return 0, 0
    ends = [*accumulate(map(len, texts))]
    return bisect_right(ends, begin), bisect_left(ends, end + len("</plan>")) + 1
