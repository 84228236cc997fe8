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


def check_errors(groups: Sequence[Group], limits: LimitsSettings, what: str,
                 stored: Path | None = None) -> tuple[float, float]:
    """Shares of the rollouts (over all processes) whose scoring failed, and for which a service did not respond.

    TrainingError if one exceeds its limit, or the share of episodes ended by an error of their environment does. `what`
    and where the rollouts are `stored` enter the message.
    """
    failed = check_score_errors(groups, limits.score_errors, what, stored)
    _share(groups, what, lambda r: r.completion.error is not None, limits.environment_errors,
           ": {} of {} episodes ended with an error of their environment, more than "
           "limits.environment_errors={} allows.", stored)
    unanswered = _share(groups, what, _service_failed, limits.service_errors,
                        ": a service did not answer for {} of {} rollouts, more than limits.service_errors={} allows.",
                        stored, " Check that it runs (services.*); the same command resumes from the last checkpoint.")
    return failed, unanswered


def check_score_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> float:
    """Share of the rollouts whose scoring failed; TrainingError above `limit`."""
    return _share(groups, what, lambda r: r.error and r.completion.error is None and not _service_failed(r), limit,
                  ": {} of {} rollouts failed to score, more than limits.score_errors={} allows.", stored)


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


def _service_failed(rollout: Rollout) -> bool:
    return bool(rollout.error and rollout.error.startswith(FAILED))


def _share(groups: Sequence[Group], what: str, among: Callable[[Rollout], Any], limit: float, problem: str,
           stored: Path | None, way: str = "") -> float:
    """Share of the rollouts of all processes that fail `among`; TrainingError with the first error above `limit`."""
    errors = [f"sample {g.sample.id!r}: {r.error}, at the answer {ascii(r.completion.text)[:80]}"
              for g in groups for r in g.rollouts if among(r)]
    failed, rollouts = map(int, comm.total(len(errors), sum(len(g.rollouts) for g in groups)))
    first = next((e for part in comm.gather(errors[:1]) for e in part), "") if failed else ""
    if failed > limit * max(rollouts, 1):
        where = f" The rollouts are in {stored}." if stored else ""
        raise TrainingError(f"{what}{problem.format(failed, rollouts, limit)} First error: {first}.{where}{way}")
    return failed / max(rollouts, 1)
