"""Metrics of a step over all ranks, and the clock that measures the phases of a step."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from vlrl.distributed import comm
from vlrl.types import Group, Rollout

_watch: Callable[[str], Any] | None = None
"""While a step is profiled, a function that takes the name of a phase and returns a context manager around the phase.
Otherwise None."""
_life = (0, "start")


def sign_of_life(name: str = "start") -> None:
    """Tells the watchdog (watchdog.py) that the process is still working. name: what the process begins now."""
    global _life
    _life = (_life[0] + 1, name)


def last_sign_of_life() -> tuple[int, str]:
    """Returns (number of signs of life so far, name of the last sign of life)."""
    return _life


def phase(name: str) -> Any:
    """Context manager that marks a phase of a step for the profiler (tools/machine/profiler.py) and the watchdog: `with
    phase("decode"): ...`. Costs almost nothing if neither is active."""
    sign_of_life(name)
    return contextlib.nullcontext() if _watch is None else _watch(name)


@contextlib.contextmanager
def watching(watch: Callable[[str], Any]) -> Iterator[None]:
    """Context manager: in the block, every phase (also of a Clock) runs inside the context manager `watch(name)`."""
    global _watch
    before, _watch = _watch, watch
    try:
        yield
    finally:
        _watch = before


class Clock:
    """Measures the seconds of each phase of a step: `with clock("rollout"): ...`. The time of a nested phase does not
    count for the outer phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        """(phase, start, end) of each phase since the last `take_spans`, in seconds since 1970. The span of an outer
        phase includes the spans of its nested phases."""
        self._epoch = time.time() - time.perf_counter()
        self._inner = [0.0]
        self._started = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        self._inner.append(0.0)
        try:
            with phase(name), comm.within(name):
                yield
        finally:
            sign_of_life(f"after {name}")
            spent, inner = time.perf_counter() - start, self._inner.pop()
            self._inner[-1] += spent
            self.seconds[name] = self.seconds.get(name, 0.0) + spent - inner
            self.span(name, start, start + spent)

    def span(self, name: str, start: float, end: float) -> None:
        """Records the time span of a phase; `start` and `end` are values of time.perf_counter."""
        self.spans.append((name, self._epoch + start, self._epoch + end))

    def take_spans(self) -> list[tuple[str, float, float]]:
        """Returns and clears the recorded time spans of phases."""
        out, self.spans = self.spans, []
        return out

    def add_parallel(self, name: str, seconds: float) -> None:
        """Adds `seconds` of work in another thread to the phase `name`, and subtracts them from the phase that is
        running in this thread."""
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._inner[-1] += seconds

    def take(self) -> dict[str, float]:
        """Returns the metrics `time/<phase>_s` and `time/total_s` since the last call, and restarts the clock."""
        now = time.perf_counter()
        names = dict.fromkeys(("rollout", "score", "train", "sync", *self.seconds))
        phases = {k: self.seconds.get(k, 0.0) for k in names}
        out = {**{f"time/{k}_s": v for k, v in phases.items()}, "time/total_s": now - self._started}
        self.seconds, self._started = {}, now
        return out


def group_metrics(groups: Sequence[Group], labels: Sequence[str] = ()) -> dict[str, float]:
    """Metrics of all groups on all ranks: rewards, reward parts, lengths and shares. For a mixture of tasks, `labels`
    are the tasks' labels. Each task with groups in this step then also gets `<label>/reward/...` and
    `<label>/groups/zero_variance_frac`; every task gets `<label>/share`, its share of the groups."""
    rows = [row for part in comm.gather([_group_values(g) for g in groups]) for row in part]
    if not rows:
        return {}
    lengths = np.array([n for row in rows for n in row["lengths"]])
    begun = [row for row in rows if row["begun"]]
    out = _rewards(rows)
    for label in labels:
        own = [row for row in rows if row["task"] == label]
        rewards = _rewards(own) if own else {}
        rewards.pop("reward/std", None)
        out |= {f"{label}/{name}": value for name, value in rewards.items()}
        if own:
            out[f"{label}/groups/zero_variance_frac"] = _mean([row["zero_variance"] for row in own if row["begun"]])
        out[f"{label}/share"] = len({row["id"] for row in own}) / len({row["id"] for row in rows})
    return out | {
        "completion/length_mean": _mean(lengths), "completion/length_max": float(lengths.max(initial=0)),
        "completion/truncated_frac": _mean([t for row in rows for t in row["truncated"]]),
        **_episodes([e for row in rows for e in row["episodes"]]),
        **_unreadable([u for row in rows for u in row["unreadable"]]),
        "groups/zero_variance_frac": _mean([row["zero_variance"] for row in begun]),
        "groups/count": float(len({row["id"] for row in rows})),
        "tokens/prompt": float(sum(row["prompt"] for row in rows)), "tokens/completion": float(lengths.sum())}


def _rewards(rows: Sequence[dict]) -> dict[str, float]:
    rewards = np.array([r for row in rows for r in row["rewards"] if r is not None])
    with np.errstate(over="ignore"):  # a huge reward has an infinite deviation
        out = {"reward/mean": _mean(rewards), "reward/std": float(rewards.std()) if len(rewards) else float("nan")}
    for part in sorted({p for row in rows for p in row["parts"]}):
        out[f"reward/{part}"] = _mean([v for row in rows for v in row["parts"].get(part, ()) if v is not None])
    return out


def _group_values(group: Group) -> dict:
    rollouts = group.plain
    names = dict.fromkeys(name for r in rollouts for name in r.parts)
    begun = [r for r in rollouts if r.completion.begun]
    return {"id": group.id, "task": group.task, "rewards": [r.reward for r in rollouts], "begun": bool(begun),
            "lengths": [len(r.completion.tokens) for r in begun],
            "truncated": [r.completion.truncated for r in begun], "prompt": len(group.prompt) if begun else 0,
            "zero_variance": group.zero_variance,
            "unreadable": [r.reward is None and r.error is None and r.completion.error is None for r in rollouts],
            "episodes": [_episode(r) for r in rollouts if r.completion.episode_id],
            "parts": {name: [r.parts.get(name) for r in rollouts] for name in names}}


def _unreadable(rollouts: Sequence[bool]) -> dict[str, float]:
    return {"unreadable": float(sum(rollouts)), "unreadable_frac": _mean(rollouts)}


def _episode(rollout: Rollout) -> dict[str, Any]:
    done = rollout.completion
    calls = [t.calls for t in done.turns if t.calls is not None]
    return {"calls": sum(map(len, calls)) if calls else None,
            "call_errors": sum(bool(call.get("error")) for own in calls for call in own),
            "turns": len(done.actions) if done.begun else None, "success": rollout.correct,
            "limit": done.finish_reason in ("turns", "tokens", "media"), "error": done.error is not None}


def _episodes(episodes: Sequence[dict[str, Any]]) -> dict[str, float]:
    if not episodes:
        return {}
    calls, errors = [e["calls"] for e in episodes if e["calls"] is not None], sum(e["call_errors"] for e in episodes)
    tools = {"episode/tool_calls_mean": _mean(calls), "episode/tool_errors_frac": errors / max(sum(calls), 1)}
    turns = [e["turns"] for e in episodes if e["turns"] is not None]
    return {**(tools if calls else {}), "episode/turns_mean": _mean(turns),
            "episode/success": _mean([e["success"] for e in episodes if e["success"] is not None]),
            "episode/limit_frac": _mean([e["limit"] for e in episodes]),
            "environment/errors": float(sum(e["error"] for e in episodes))}


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values)) if len(values) else float("nan")


def peak_gib() -> float:
    """Peak memory use so far in GiB: of the CUDA device if there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
