"""Shows a run in a notebook cell: a progress bar, the last metrics and the reward curve, redrawn in place. No torch.

    cell = Cell()
    cell.show(page(done=12, total=80, line="reward 0.41", points=[(1, 0.3), (2, 0.41)]))"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from html import escape
from typing import Any

_WIDTH, _HEIGHT, _EDGE = 640, 140, 40
_MOST = 600  # Maximum number of points that are drawn. A longer curve shows every k-th point and the last.
_LARGEST = 1e100  # numbers above this are not valid steps or rewards
_PAUSE_S = 0.5  # minimum number of seconds between two redraws


class Cell:
    """The output of a notebook cell, redrawn in place."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = -math.inf

    def show(self, html: str, now: bool = False) -> None:
        """Draws HTML. Skipped if the last drawing was less than _PAUSE_S ago, unless `now` is true."""
        if not now and time.monotonic() - self._last < _PAUSE_S:
            return
        from IPython.display import HTML, display

        self._last = time.monotonic()
        if self._handle is None:
            self._handle = display(HTML(html), display_id=True)
        else:
            self._handle.update(HTML(html))


def page(done: int, total: int | None, line: str, points: Sequence[tuple[float, float]]) -> str:
    """The HTML for a run with `done` of `total` steps: a progress bar, the text `line`, and a curve through `points`,
    each (step, reward). All strings are escaped."""
    bar = f'<progress value="{done}" max="{max(total or done, 1)}" style="width:{_WIDTH // 2}px"></progress>'
    steps = f"{done}" if total is None else f"{done}/{total}"
    return f"<div>{bar} {steps} {escape(line)}</div>{curve(points)}"


def curve(points: Sequence[tuple[float, float]]) -> str:
    """An SVG line through points (x, y), with labels of its range; "" for fewer than two points."""
    points = [(x, y) for x, y in points if abs(x) < _LARGEST and abs(y) < _LARGEST]  # false for NaN too
    if len(points) < 2:
        return ""
    every = max(1, len(points) // _MOST)
    points = [*points[:-1:every], points[-1]]
    (left, right), (low, high) = ((min(v), max(v)) for v in zip(*points, strict=True))
    wide, tall = (right - left) or 1.0, (high - low) or 1.0
    places = " ".join(f"{_EDGE + (x - left) / wide * (_WIDTH - 2 * _EDGE):.1f},"
                      f"{_HEIGHT - 20 - (y - low) / tall * (_HEIGHT - 40):.1f}" for x, y in points)
    style = 'font-size="10" fill="currentColor"'
    return (f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="reward over the steps">'
            f'<polyline points="{places}" fill="none" stroke="#1f5fa8" stroke-width="1.5"/>'
            f'<text x="2" y="24" {style}>{high:.3g}</text><text x="2" y="{_HEIGHT - 18}" {style}>{low:.3g}</text>'
            f'<text x="{_EDGE}" y="{_HEIGHT - 4}" {style}>step {left:g}</text>'
            f'<text x="{_WIDTH - _EDGE}" y="{_HEIGHT - 4}" text-anchor="end" {style}>{right:g}</text></svg>')
