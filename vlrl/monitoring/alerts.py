"""Alerts about problems of a run, which are printed, written to alerts.jsonl, and sent to trackers and a webhook.

A rule inspects the metrics of the last steps. It alerts when its condition becomes true, and again only after the
condition has been false. A resumed run replays the metrics of earlier steps without alerting, so alerts.jsonl has each
alert once. `heldout_drop` inspects the lines of eval.jsonl instead."""

from __future__ import annotations

import json
import math
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from vlrl.config.alerts import AlertSettings
from vlrl.config.algo import SUPERVISED
from vlrl.config.registry import Table
from vlrl.config.schema import Config
from vlrl.monitoring.mismatch import expected_mismatch
from vlrl.store import plain
from vlrl.store.files import append_line

_WEBHOOK = Table({"open": "vlrl.monitoring.webhook:open_webhook"})


@dataclass(frozen=True)
class Alert:
    """What a rule reports when its condition becomes true: the value, the limit and a message."""

    alert: str  # name of the rule's setting in `alerts`
    step: int
    value: float
    limit: float
    text: str


Columns = Mapping[str, Sequence[float]]
"""Values of each metric in the last alerts.window steps, NaN for a step without a value. For reward/mean and
reward/std, these are the last steps with rewards. Two metrics have a single value: BEST, the highest mean reward
over a window so far, and HIGHEST, the largest entropy so far."""
BEST, HIGHEST = "reward/best", "entropy/highest"
_RECENT = 5  # number of last steps that the rule zero_variance_above inspects
Breach = tuple[float, float, str]  # (value, limit, message) of a rule whose condition is true
Rule = Callable[[Columns, AlertSettings], Breach | None]


class Alerts:
    """Checks the metrics of a run against the alert rules; on the main process only. before: metrics of earlier steps,
    for a resumed run. paid: reward parts that can add to the reward."""

    def __init__(self, settings: AlertSettings, folder: Path, say: Callable[[str], None],
                 before: Iterable[Mapping[str, Any]] = (), paid: Sequence[str] = ()):
        self.settings, self.folder, self._say = settings, folder, say
        self._read = (*_READ, *(f"reward/{part}" for part in paid))
        self._columns = {name: deque[float](maxlen=settings.window) for name in self._read}
        self._columns |= {name: deque[float](maxlen=1) for name in (BEST, HIGHEST)}
        self._holding: set[str] = set()
        self._hook = _WEBHOOK["open"](settings, say) if settings.webhook else None
        for line in before:
            self._take(line)
        self._holding = set(self._breaches()) if self._columns["kl"] else set()

    def check(self, line: Mapping[str, Any]) -> dict[str, float]:
        """Adds `line`, the metrics of a step, and sends an alert for each rule whose condition has become true. Returns
        {"alerts/<rule>": value} of these alerts, for trackers."""
        return self._tell(self._begun(line))

    def evaluated(self, evals: Sequence[Mapping[str, Any]], metric: str) -> dict[str, float]:
        """Sends an alert if the last line of eval.jsonl shows a drop of `metric`, unless the previous line of the same
        split showed a drop too. Returns {"alerts/heldout_drop": value} for trackers; {} without an alert."""
        last, share = evals[-1], self.settings.heldout_drop
        lines = [line for line in evals if line["split"] == last["split"] and _number(line.get(metric))]
        if share is None or lines[-1:] != [last] or heldout_drop(lines[:-1], metric, share):
            return {}
        breach = heldout_drop(lines, metric, share)
        return self._tell([_alert("heldout_drop", last["step"], breach)] if breach else [])

    def _tell(self, alerts: Sequence[Alert]) -> dict[str, float]:
        for alert in alerts:
            record = {**asdict(alert), "run": str(self.folder), "host": socket.gethostname(), "time": time.time()}
            self._say(f"ALERT {alert.text}")
            append_line(self.folder / "alerts.jsonl", json.dumps(plain(record)))
            if self._hook:
                self._hook.send(record)
        return {f"alerts/{alert.alert}": alert.value for alert in alerts}

    def close(self) -> None:
        """Gives the webhook a moment to send pending alerts."""
        if self._hook:
            self._hook.close()

    def _begun(self, line: Mapping[str, Any]) -> list[Alert]:
        self._take(line)
        step, breaches = int(line.get("step", 0)), self._breaches()
        fresh = {name: breach for name, breach in breaches.items() if name not in self._holding}
        self._holding = set(breaches)
        return [_alert(name, step, breach) for name, breach in fresh.items()]

    def _take(self, line: Mapping[str, Any]) -> None:
        values = {name: line.get(name) for name in self._read}
        values = {name: float(v) if isinstance(v, (int, float)) else math.nan for name, v in values.items()}
        if math.isnan(values["reward/mean"]):
            del values["reward/mean"], values["reward/std"]
        for name, value in values.items():
            self._columns[name].append(value)
        entropy, highest = values["entropy"], self._columns[HIGHEST]
        if math.isfinite(entropy):
            highest.append(max([entropy, *highest]))
        rewards = self._columns["reward/mean"]
        if len(rewards) == self.settings.window:
            self._columns[BEST].append(max([fmean(rewards), *self._columns[BEST]]))

    def _breaches(self) -> dict[str, Breach]:
        checked = {name: rule(self._columns, self.settings) for name, rule in RULES.items()
                   if getattr(self.settings, name) is not None}
        return {name: breach for name, breach in checked.items() if breach}


def resolved_alerts(config: Config) -> AlertSettings:
    """The settings `alerts.*` with each "auto" replaced by its value. For supervised training the rules on rewards,
    entropy and mismatch are off, because no completions are sampled."""
    settings = config.alerts
    kinds = {"mismatch_above": "kl", "mismatch_gap_above": "gap"}
    limits = {name: expected_mismatch(config, kind) for name, kind in kinds.items()
              if getattr(settings, name) == "auto"}
    if config.algo.loss.name in SUPERVISED:
        limits |= dict.fromkeys(("reward_drop", "constant_rewards", "zero_variance_above", "entropy_below",
                                 "entropy_drop", "unreadable_above", "unpaid_part", "mismatch_above",
                                 "mismatch_gap_above"))
    return settings.model_copy(update=limits)


# --- rules ------------------------------------------------------------------------------------------------------------


def _alert(name: str, step: int, breach: Breach) -> Alert:
    value, limit, message = breach
    return Alert(name, step, value, limit, f"at step {step}: {message} (alerts.{name})")


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def heldout_drop(lines: Sequence[Mapping[str, Any]], metric: str, share: float) -> Breach | None:
    """Returns a Breach (value, limit, message) if `metric` has dropped: its value in the last line is below its best
    earlier value by more than the fraction `share` of that value. None if it has not dropped.

    `lines` are lines of eval.jsonl of one split. If the last and the best line have 95 % intervals of the metric, only
    a drop without overlap of the intervals counts."""
    if len(lines) < 2:
        return None
    best, last = max(lines[:-1], key=lambda line: line[metric]), lines[-1]
    value, limit = float(last[metric]), best[metric] - share * abs(best[metric])
    high, low = last.get(f"{metric}/ci95_high"), best.get(f"{metric}/ci95_low")
    if value >= limit or (high is not None and low is not None and high >= low):
        return None
    return value, limit, (f"{metric} of {last['split']} is {value:.3g}, after {best[metric]:.3g} at step "
                          f"{best['step']}: it does not generalize beyond the training samples")


def _constant_rewards(columns: Columns, settings: AlertSettings) -> Breach | None:
    count = min(settings.constant_rewards or 1, settings.window)
    means, spreads = [[*columns[name]][-count:] for name in ("reward/mean", "reward/std")]
    if len(means) < count or any(spreads) or len({*means}) > 1:
        return None
    return means[0], means[0], (f"all rewards of {count} steps are {means[0]:g}, so nothing is learned from them; "
                                "check in rollouts/ whether the task parses answers in the format of the prompt")


def _zero_variance_above(columns: Columns, settings: AlertSettings) -> Breach | None:
    count, limit = min(_RECENT, settings.window), settings.zero_variance_above or 0.0
    recent = [*columns["groups/zero_variance_frac"]][-count:]
    value = fmean(recent) if len(recent) == count else math.nan
    return (value, limit, f"{value:.0%} of the groups of the last {count} steps have equal rewards, more than "
            f"{limit:.0%}: they have no advantage to learn from") if value > limit else None


def _entropy_drop(columns: Columns, settings: AlertSettings) -> Breach | None:
    highest, value = _last(columns, HIGHEST), _last(columns, "entropy")
    limit = highest * (1 - (settings.entropy_drop or 0.0))
    return (value, limit, f"the entropy is {value:.3g} per token, after {highest:.3g} at its highest: completions are "
            "becoming identical") if value < limit else None


def _reward_drop(columns: Columns, settings: AlertSettings) -> Breach | None:
    if not columns[BEST]:
        return None
    best, last = columns[BEST][0], fmean(columns["reward/mean"])
    spread = fmean(np.nan_to_num([*columns["reward/std"]]))
    limit = best - (settings.reward_drop or 0.0) * max(abs(best), spread)
    message = f"the mean reward of the last {settings.window} steps is {last:.3g}, and the best was {best:.3g}"
    return (last, limit, message) if last < limit else None


def _last(columns: Columns, name: str) -> float:
    return columns[name][-1] if columns[name] else math.nan


def _above(metric: str, name: str, text: str) -> Rule:
    """Returns a rule that alerts if the last value of `metric` is above the setting alerts.<name>, or below it if
    `name` ends in "_below". text: the message, to be formatted with the value and the limit."""
    def rule(columns: Columns, settings: AlertSettings) -> Breach | None:
        value, limit = _last(columns, metric), getattr(settings, name)
        exceeded = isinstance(limit, (int, float)) and (value < limit if name.endswith("_below") else value > limit)
        return (value, limit, text.format(value, limit)) if exceeded else None

    return rule


_MISMATCH = (" {:.3g}, above {:g}: sampler and trainer do not compute the same log-probabilities, so the update learns "
             "from rollouts of another policy")
_LAST_VALUE = {
    "kl_above": ("kl", "the KL to the reference is {:.3g} per token, above {:g}"),
    "entropy_below": ("entropy", "the entropy is {:.3g} per token, below {:g}: completions are nearly identical"),
    "truncated_above": ("completion/truncated_frac", "{:.0%} of the completions are truncated, more than {:.0%}"),
    "service_errors_above": ("service_errors", "a service, such as a judge, failed for {:.0%} of the rollouts, more "
                             "than {:.0%}: they cannot be scored"),
    "mismatch_above": ("mismatch/kl", "mismatch/kl per token is" + _MISMATCH),
    "mismatch_gap_above": ("mismatch/gap_max", "the largest gap of a token is" + _MISMATCH),
    "unreadable_above": ("unreadable_frac", "the task gives {:.0%} of the rollouts no score (None), more than {:.0%}: "
                         "nothing is learned from them"),
}
"""For each setting in `alerts` that limits a metric's last value: (metric, message to format with value and limit)."""


def _skipped_above(columns: Columns, settings: AlertSettings) -> Breach | None:
    recent = columns["skipped"]
    value, limit = float(sum(v > 0 for v in recent)), float(settings.skipped_above or 0)
    return (value, limit, f"an optimizer step was skipped in {value:.0f} of the last {len(recent)} steps, for NaN, "
            "infinity or an overflow") if value > limit else None


def _unpaid_part(columns: Columns, settings: AlertSettings) -> Breach | None:
    count = min(settings.unpaid_part or 1, settings.window)
    recent = {name: [*values][-count:] for name, values in columns.items() if name.startswith("reward/")}
    unpaid = [name.removeprefix("reward/") for name, values in recent.items()
              if name not in (*_READ, BEST) and len(values) == count and not any(values)]
    return (0.0, 0.0, f"the reward part {' and '.join(unpaid)} is 0 in all answers of {count} steps: check in "
            "rollouts/ whether the task parses answers in the format that the prompt asks for") if unpaid else None


RULES: Mapping[str, Rule] = {
    "reward_drop": _reward_drop, "constant_rewards": _constant_rewards, "zero_variance_above": _zero_variance_above,
    "entropy_drop": _entropy_drop, "skipped_above": _skipped_above, "unpaid_part": _unpaid_part,
    **{name: _above(metric, name, text) for name, (metric, text) in _LAST_VALUE.items()}}
"""The rule of each setting in `alerts`. The rule is off if the setting is null."""
_READ = ("reward/mean", "reward/std", "groups/zero_variance_frac", "kl", "entropy", "completion/truncated_frac",
         "skipped", "service_errors", "mismatch/kl", "mismatch/gap_max", "unreadable_frac")
