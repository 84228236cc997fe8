"""Limits that stop a run: too many rollouts with errors (limits.*), or completions sampled with weights that are too
old.

Each function is a collective call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config, LimitsSettings
from vlrl.distributed import comm
from vlrl.errors import TrainingError
from vlrl.task.services import FAILED
from vlrl.types import Group, Rollout


def _service_failed(rollout: Rollout) -> bool:
    return bool(rollout.error and rollout.error.startswith(FAILED))


_KINDS: dict[str, tuple[Callable[[Rollout], Any], str, str]] = {
    "score_errors": (lambda r: r.error and r.completion.error is None and not _service_failed(r),
                     "{} of {} rollouts failed to score", ""),
    "environment_errors": (lambda r: r.completion.error is not None,
                           "{} of {} episodes ended with an error of their environment", ""),
    "service_errors": (_service_failed, "a service did not respond for {} of {} rollouts",
                       " Check that the service runs (services.*); the same command resumes from the last checkpoint."),
}
"""Setting in limits.* -> (function: whether a rollout has the error that the setting limits, text of the problem, text
of the remedy)."""


def check_errors(groups: Sequence[Group], limits: LimitsSettings, what: str, stored: Path | None = None,
                 names: Sequence[str] = tuple(_KINDS)) -> dict[str, float]:
    """Returns {setting: share of rollouts, over all processes, with the error that the setting limits}. names: the
    settings of limits.* to check. Raises TrainingError, which quotes the first error, if a share is above its limit.
    For this message, `what` names the scored rollouts, and `stored` is the file that contains the rollouts."""
    shares = {}
    for name in names:
        counts, problem, way = _KINDS[name]
        errors = [f"sample {g.sample.id!r}: {r.error}, for the answer {ascii(r.completion.text)[:80]}"
                  for g in groups for r in g.rollouts if counts(r)]
        failed, rollouts = map(int, comm.total(len(errors), sum(len(g.rollouts) for g in groups)))
        first = next((e for part in comm.gather(errors[:1]) for e in part), "") if failed else ""
        limit = getattr(limits, name)
        if failed > limit * max(rollouts, 1):
            where = f" The rollouts are in {stored}." if stored else ""
            raise TrainingError(f"{what}: {problem.format(failed, rollouts)}, more than limits.{name}={limit} allows. "
                                f"First error: {first}.{where}{way}")
        shares[name] = failed / max(rollouts, 1)
    return shares


def refuse_stale(groups: Sequence[Group], step: int, config: Config) -> None:
    """Raises TrainingError for a completion sampled with older weights than async.max_staleness allows.

    Two kinds of completions are exempt: partial rollouts, as only the part generated in the last step is trained on,
    and completions kept from an earlier draw of the prompt, which are trained on as if sampled with the current
    weights."""
    most = config.asynchronous.max_staleness
    oldest = min(comm.gather(min((r.policy_step for g in groups for r in g.rollouts
                                  if r.completion.policy_step is None), default=step)))
    if config.rollout.step_tokens is None and oldest < step - most:
        raise TrainingError(f"step {step} got completions sampled with the weights after {oldest} completed steps, but "
                            f"async.max_staleness={most} requires at least {step - most} completed steps. This is an "
                            "error of the group source, or of vlrl: please report it.")
