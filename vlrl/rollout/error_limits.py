"""Limits at which a run stops because of its rollouts: too many errors (limits.*), or completions of too old weights.

Each function is a collective call.
"""

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
    "service_errors": (_service_failed, "a service did not answer for {} of {} rollouts",
                       " Check that it runs (services.*); the same command resumes from the last checkpoint."),
}
"""Limit of limits.* -> which rollouts count, what the message says of them, and the way out."""


def check_errors(groups: Sequence[Group], limits: LimitsSettings, what: str, stored: Path | None = None,
                 names: Sequence[str] = tuple(_KINDS)) -> dict[str, float]:
    """The share of the rollouts of all processes that have an error, by the name of its limit in limits.*.

    Raises TrainingError with the first such error where a share is above its limit; `what` was scored, and the file
    where the rollouts are `stored`, enter the message. `names` are the limits that are checked.
    """
    shares = {}
    for name in names:
        counts, problem, way = _KINDS[name]
        errors = [f"sample {g.sample.id!r}: {r.error}, at the answer {ascii(r.completion.text)[:80]}"
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

    Partial rollouts are old by design: only the part written in the last step is trained. So are completions kept from
    earlier visits, which are trained as if sampled with the current weights.
    """
    most = config.asynchronous.max_staleness
    oldest = min(comm.gather(min((r.policy_step for g in groups for r in g.rollouts
                                  if r.completion.policy_step is None), default=step)))
    if config.rollout.step_tokens is None and oldest < step - most:
        raise TrainingError(f"step {step} got completions sampled with the weights of {oldest} completed steps, but "
                            f"async.max_staleness={most} requires at least {step - most}. This is an error of the "
                            "group source, or of vlrl: please report it.")
