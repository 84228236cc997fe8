"""Where a run stops because of its rollouts: too many errors (limits.*), or answers of weights that are too old.

Each function is called on every process.
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
    """Returns the shares of the rollouts (over all processes) that failed to score, and for which a service did not
    answer; TrainingError where one is above its limit, or that of episodes ended by an error of their environment.

    `what` and where they are `stored` enter the message.
    """
    failed = check_score_errors(groups, limits.score_errors, what, stored)
    check_environment_errors(groups, limits.environment_errors, what, stored)
    return failed, check_service_errors(groups, limits.service_errors, what, stored)


def check_score_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> float:
    """Returns the share of the rollouts that failed to score; TrainingError above `limit`."""
    return _share(groups, what, lambda r: r.error and r.completion.error is None and not _lost(r), limit,
                  ": {} of {} rollouts failed to score, more than limits.score_errors={} allows.", stored)


def check_environment_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> float:
    """Returns the share of episodes ended by an error of their environment; TrainingError above `limit`."""
    return _share(groups, what, lambda r: r.completion.error is not None, limit,
                  ": {} of {} episodes ended with an error of their environment, more than "
                  "limits.environment_errors={} allows.", stored)


def check_service_errors(groups: Sequence[Group], limit: float, what: str, stored: Path | None = None) -> float:
    """Returns the share of the rollouts for which a service did not answer; TrainingError above `limit`."""
    return _share(groups, what, _lost, limit,
                  ": a service did not answer for {} of {} rollouts, more than limits.service_errors={} allows.",
                  stored, " See whether it runs (services.*); the same command goes on from the last checkpoint.")


def refuse_stale(groups: Sequence[Group], step: int, config: Config) -> None:
    """Raises TrainingError when a group holds an answer of weights older than async.max_staleness allows.

    Partial rollouts are old by design: of each answer only what its last step wrote is trained. So are answers that
    were kept from earlier visits, which are learned from as if the weights of now had written them.
    """
    most = config.asynchronous.max_staleness
    oldest = min(comm.gather(min((r.policy_step for g in groups for r in g.rollouts
                                  if r.completion.policy_step is None), default=step)))
    if config.rollout.step_tokens is None and oldest < step - most:
        raise TrainingError(f"step {step} was given answers of weights of {oldest} completed steps, and "
                            f"async.max_staleness={most} allows no less than {step - most}. That is an error of the "
                            "group source, or of vlrl: please report it.")


def _lost(rollout: Rollout) -> bool:
    return bool(rollout.error and rollout.error.startswith(FAILED))


def _share(groups: Sequence[Group], what: str, among: Callable[[Rollout], Any], limit: float, problem: str,
           stored: Path | None, way: str = "") -> float:
    """The share of the rollouts of all processes that have an error; TrainingError with the first one above `limit`."""
    errors = [f"sample {g.sample.id!r}: {r.error}, at the answer {ascii(r.completion.text)[:80]}"
              for g in groups for r in g.rollouts if among(r)]
    failed, rollouts = map(int, comm.total(len(errors), sum(len(g.rollouts) for g in groups)))
    first = next((e for part in comm.gather(errors[:1]) for e in part), "") if failed else ""
    if failed > limit * max(rollouts, 1):
        where = f" They are in {stored}." if stored else ""
        raise TrainingError(f"{what}{problem.format(failed, rollouts, limit)} First error: {first}.{where}{way}")
    return failed / max(rollouts, 1)
