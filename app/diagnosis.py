"""Diagnoses a run from its own records: findings, most severe first. Pure functions; no Gradio, no torch.

    findings = diagnose(Evidence("quickstart", metrics, evals, alerts, answers))

Each finding states an observation, a remedy, and links to the groups concerned. Checks that need more steps than the
run has are skipped. Records are untrusted: values that are not numbers are ignored."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from .html import finite, number

RECENT = 10
"""Number of last steps over which the checks average a metric, such as the share of truncated answers."""
MOST_ALERTS = 20
_Record = Mapping[str, Any]


class Answer(NamedTuple):
    """One scored answer from the last steps of a run."""

    group: Any
    """A value that identifies the group: it is equal for answers of the same group, and differs for other answers."""
    reward: float
    length: int
    """Number of tokens."""
    parts: Mapping[str, float | None] = {}


@dataclass(frozen=True)
class Finding:
    """A problem or observation in the diagnosis of a run: its description `words`, and the remedy `do` or ""."""

    kind: str
    """"bad", "warn", "good", or "" for a neutral finding."""
    words: str
    do: str = ""
    where: Mapping[str, Any] = field(default_factory=dict)
    """URL parameters of the page that lists the groups concerned."""


@dataclass(frozen=True)
class Evidence:
    """Everything that a diagnosis uses: the records of a run, oldest first, and the answers of its last steps."""

    run: str
    metrics: Sequence[_Record] = ()
    evals: Sequence[_Record] = ()
    alerts: Sequence[_Record] = ()
    answers: Sequence[Answer] = ()

    def last(self, name: str, count: int = RECENT) -> list[tuple[int, float]]:
        """(step, value) pairs of a metric for the last `count` steps in which the metric is a number."""
        values = [(line["step"], value) for line in self.metrics if (value := finite(line.get(name))) is not None]
        return values[-count:]

    def groups(self, first: int | None = None, last: int | None = None, **filters: Any) -> dict[str, Any]:
        """URL parameters of the list of this run's training groups in a range of steps. `filters` are added to them."""
        return {"page": "rollouts", "run": self.run, "kind": "train", "from": first, "to": last, **filters}


def diagnose(evidence: Evidence) -> list[Finding]:
    """Returns all findings on a run: those on alerts, then those of CHECKS in the order bad, warn, neutral, good."""
    findings = [finding for look in CHECKS for finding in look(evidence)]
    return [*alerts(evidence), *sorted(findings, key=lambda finding: _KINDS.index(finding.kind))]


_KINDS = ("bad", "warn", "", "good")


ADVICE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "reward_drop": ("Read the best answers before the drop: the model may have exploited the reward. Otherwise "
                    "lower train.lr, or keep the model near its start with algo.kl_coef=0.01.", {"order": "worst"}),
    "constant_rewards": ("Read some answers: does the task parse the format that the prompt asks for? If all are "
                         "wrong, use easier samples, begin with `vlrl sft`, or give partial rewards.", {}),
    "zero_variance_above": ("curriculum.keep=mixed draws until the rewards in each group differ. A larger group "
                            "(rollout.group_size=16), easier or harder samples, and partial rewards help, too.",
                            {"alike": "yes"}),
    "heldout_drop": ("Stop at checkpoints/best, lower train.lr, or use more samples: the model memorizes these.",
                     {"kind": "eval", "order": "worst"}),
    "kl_above": ("Raise algo.kl_coef, or lower train.lr.", {"order": "best"}),
    "entropy_below": ("Read whether answers are alike. Lower train.lr, raise rollout.temperature, or keep the entropy "
                      "up with algo.entropy=bonus.", {"order": "best"}),
    "entropy_drop": ("Read whether answers are alike. Lower train.lr, raise rollout.temperature, or keep the entropy "
                     "up with algo.entropy=bonus.", {"order": "best"}),
    "truncated_above": ("Raise rollout.max_new_tokens (for episodes episode.max_turns or episode.max_tokens), or ask "
                        "for shorter answers in the prompt. algo.mask_truncated=true excludes truncated answers from "
                        "the loss.", {"cut": "yes"}),
    "skipped_above": ("Lower train.lr; with a 16-bit model.dtype, try float32 for some steps.", {}),
    "service_errors_above": ("Read in the run's folder services/ what failed, and check that the server of "
                             "services.judge.url runs. If it is too slow, send fewer requests at a time, or raise the "
                             "time limit.", {"err": "yes"}),
    "mismatch_above": ("Compare engine.dtype with model.dtype and the versions of engine and transformers; "
                       "some steps with engine.name=hf show whether the engine is the cause. limits.mismatch stops "
                       "such a run, and algo.correction=token_truncate corrects for the rest.", {}),
    "mismatch_gap_above": ("View the rollouts of that step by token: tokens that the engine treats differently (of an "
                           "image, or control tokens) stand out.", {}),
    "unpaid_part": ("Read the best answers: does the task parse the format that the prompt asks for (tags, units, "
                    "LaTeX)? `vlrl score` shows what is parsed.", {"order": "best"}),
    "unreadable_above": ("Read some of these answers: does the prompt ask for the format that `score` parses? "
                         "`vlrl tasks check` lists answers without a score.", {"err": "yes"}),
}
"""Rule name from vlrl.monitoring.alerts -> (remedy, filters that select the groups concerned)."""


def alerts(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding for each alert raised during the run, latest first. Only the last MOST_ALERTS alerts have their
    own findings; one finding gives the number of the others."""
    lines = [line for line in evidence.alerts if isinstance(line.get("alert"), str)]
    for line in reversed(lines[-MOST_ALERTS:]):
        do, filters = ADVICE.get(line["alert"], ("See docs/troubleshooting.md for remedies.", {}))
        text = line.get("text")
        words = text if isinstance(text, str) else f"at step {line['step']}: {line['alert']}"
        yield Finding("bad", f"Alert {words[:500]}", do, evidence.groups(line["step"], line["step"], **filters))
    if len(lines) > MOST_ALERTS:
        yield Finding("bad", f"{len(lines) - MOST_ALERTS:,} earlier alerts are in alerts.jsonl.")


def zero_variance(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if many groups have equal rewards for all answers, and so give no gradient."""
    recent = evidence.last("groups/zero_variance_frac")
    share = _mean(recent)
    if share is None or share <= 0.5:
        return
    if evidence.answers and all(len(rewards) == 1 for rewards in _by_group(evidence.answers)):
        return  # one answer per group: there is nothing to compare it with
    equal = [rewards[0] for rewards in _by_group(evidence.answers) if len(set(rewards)) == 1]
    rewards = [answer.reward for answer in evidence.answers]
    differ = len(set(rewards)) > 1  # a single value is neither low nor high
    lowest = sum(reward == min(rewards) for reward in equal) / len(equal) if equal and differ else None
    which = ("" if lowest is None else
             f"; {lowest:.0%} of them got the lowest reward: the task is too hard for the model" if lowest > 0.7 else
             f"; {1 - lowest:.0%} of them got more than the lowest: the task is too easy" if lowest < 0.3 else "")
    yield Finding("bad" if share > 0.8 else "warn", f"{share:.0%} of the groups {_over(recent)} have equal rewards "
                  f"and so give no gradient{which}.", ADVICE["zero_variance_above"][0],
                  _where(evidence, recent, alike="yes"))


def truncation(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if many answers are truncated."""
    recent = evidence.last("completion/truncated_frac")
    share = _mean(recent)
    if share is not None and share > 0.05:
        yield Finding("bad" if share > 0.2 else "warn", f"{share:.0%} of the answers {_over(recent)} were truncated.",
                      ADVICE["truncated_above"][0], _where(evidence, recent, cut="yes"))


def entropy(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if the policy entropy has changed much since the first steps."""
    spans = _ends(evidence, "entropy")
    if spans is None or spans[0][1] <= 0:
        return
    (_, before), (recent, after) = spans
    words = f"The entropy went from {number(before)} to {number(after)} nats per token"
    if after < 0.5 * before:
        yield Finding("bad" if after < 0.1 * before else "warn", f"{words}: answers become similar to each other.",
                      ADVICE["entropy_drop"][0], _where(evidence, recent, order="best"))
    elif after > 3 * before:
        yield Finding("warn", f"{words}: answers become random.", "Lower train.lr, and the entropy "
                      "bonus if algo.entropy sets one.",
                      _where(evidence, recent, order="worst"))


def kl(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if the KL divergence to the reference policy is large or growing."""
    spans = _ends(evidence, "kl")
    if spans is None:
        return
    (_, before), (recent, after) = spans
    if after > 1.0 or (after > 0.1 and after > 2 * before):
        yield Finding("bad" if after > 1.0 else "warn", f"The KL to the reference policy went from {number(before)} to "
                      f"{number(after)} nats per token.", ADVICE["kl_above"][0], _where(evidence, recent, order="best"))


def saturated_parts(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding for each reward part that has the same value in nearly all answers."""
    for name in _parts(evidence.answers):
        values = [value for answer in evidence.answers if (value := answer.parts.get(name)) is not None]
        usual, many = Counter(values).most_common(1)[0]
        share = many / len(values)
        if len(values) < _FEW or share < 0.98:
            continue
        fully = usual > 0 and usual == max(values)
        words = "has its largest value" if fully else "is never earned" if usual == 0 else f"is {number(usual)}"
        do = ("It no longer distinguishes answers: lower its weight, or remove it." if fully else
              "It does not distinguish answers: check whether the task can give other values, or remove it.")
        yield Finding("warn" if not fully else "", f"The reward part {name} {words} in {share:.0%} of the last "
                      f"{len(values):,} answers.", do,
                      {**evidence.groups(), "view": "rollouts", "sort": "part", "part": name})


def conflicting_parts(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding for each pair of reward parts that are negatively correlated within groups."""
    names = _parts(evidence.answers)
    for place, one in enumerate(names):
        for other in names[place + 1:]:
            along = within_groups([(answer.group, x, y) for answer in evidence.answers if
                                   (x := answer.parts.get(one)) is not None
                                   and (y := answer.parts.get(other)) is not None])
            if along is not None and along < -0.3:
                yield Finding("warn", f"The reward parts {one} and {other} work against each other: their correlation "
                              f"within groups is {number(along, '.2f')}.", "Read answers that get one part without the "
                              "other. Raise the weight of the more important part, or reward it only if the other is "
                              "earned.",
                              {**evidence.groups(), "view": "rollouts", "sort": "part", "part": one})


def length_against_reward(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding if the lengths and rewards of the answers are correlated within groups."""
    along = within_groups([(answer.group, float(answer.length), answer.reward) for answer in evidence.answers])
    if along is None or abs(along) < 0.4:
        return
    lengths = _ends(evidence, "completion/length_mean")
    grown = f"; the mean length went from {number(lengths[0][1])} to {number(lengths[1][1])}" if lengths else ""
    yield Finding("warn", f"{'Longer' if along > 0 else 'Shorter'} answers of a group get a higher reward: the "
                  f"correlation of length and reward is {number(along, '.2f')}{grown}.", "Read the longest and the "
                  "shortest: the reward should not depend on length itself.",
                  {**evidence.groups(), "view": "rollouts", "sort": "length"})


def held_out(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding for each held-out split: it compares the rewards of the first and the last evaluation of the
    split with their 95 % intervals. A split with a single evaluation is skipped."""
    for split in dict.fromkeys(str(line.get("split")) for line in evidence.evals):
        lines = [line for line in evidence.evals if str(line.get("split")) == split
                 and finite(line.get("reward/mean")) is not None]
        if len(lines) < 2 or lines[0]["step"] == lines[-1]["step"]:
            continue
        (before, low0, high0), (after, low1, high1) = (
            tuple(finite(line.get(f"reward/mean{end}")) for end in ("", "/ci95_low", "/ci95_high"))
            for line in (lines[0], lines[-1]))
        kind, verdict = "", "the intervals overlap; a comparison sample by sample may be clearer"
        if low1 is not None and high0 is not None and low1 > high0:
            kind, verdict = "good", "better"
        elif high1 is not None and low0 is not None and high1 < low0:
            kind, verdict = "bad", "worse"
        steps = lines[0]["step"], lines[-1]["step"]
        yield Finding(kind, f"Held-out reward ({split}): {_interval(before, low0, high0)} after {steps[0]:,} steps → "
                      f"{_interval(after, low1, high1)} after {steps[1]:,}: {verdict}.",
                      ADVICE["heldout_drop"][0] if kind == "bad" else "",
                      {"page": "compare", "a": evidence.run, "a_step": steps[0], "b": evidence.run, "b_step": steps[1],
                       "split": split})


def reward_without_accuracy(evidence: Evidence) -> Iterator[Finding]:
    """Yields a finding for each held-out split whose accuracy fell while the training reward rose, a sign of reward
    hacking or memorization."""
    spans = _ends(evidence, "reward/mean")
    if spans is None:
        return
    (early, before), (late, after) = spans
    if after - before <= 2 * math.hypot(_error(early, before), _error(late, after)):
        return
    for split in dict.fromkeys(str(line.get("split")) for line in evidence.evals):
        lines = [line for line in evidence.evals if str(line.get("split")) == split
                 and finite(line.get("correct_frac")) is not None]
        if len(lines) < 2 or lines[0]["step"] == lines[-1]["step"]:
            continue
        (first, low, _), (last, _, high) = (
            tuple(finite(line.get(f"correct_frac{end}")) for end in ("", "/ci95_low", "/ci95_high"))
            for line in (lines[0], lines[-1]))
        if first is None or last is None or last >= first:
            continue
        apart = low is not None and high is not None and high < low
        yield Finding("bad" if apart else "warn", f"The training reward went from {number(before, '.3f')} to "
                      f"{number(after, '.3f')}, and the share of correct answers in {split} from "
                      f"{number(first, '.3f')} to {number(last, '.3f')}.", "Read the answers with the highest "
                      "reward: are they what you want? If so, the model memorizes its samples: use more of them, or "
                      "stop at checkpoints/best.",
                      _where(evidence, late, order="best"))


CHECKS: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    zero_variance, truncation, entropy, kl, saturated_parts, conflicting_parts, length_against_reward, held_out,
    reward_without_accuracy)
"""The functions that check a run, except `alerts`. Each takes the Evidence and yields findings."""


_FEW = 20
"""Least number of answers for a finding on their reward parts or correlations."""
_MOST_PARTS = 12


def within_groups(values: Sequence[tuple[Any, float, float]]) -> float | None:
    """The correlation in [-1, 1] between x and y of (group, x, y) triples, after subtracting the mean of each group.
    None if fewer than 20 triples belong to groups in which both x and y vary."""
    by_group: dict[Any, list[tuple[float, float]]] = {}
    for group, x, y in values:
        by_group.setdefault(group, []).append((x, y))
    count, xx, yy, xy = 0, 0.0, 0.0, 0.0
    for pairs in by_group.values():
        if any(len({pair[side] for pair in pairs}) < 2 for side in (0, 1)):
            continue
        means = [sum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1)]
        for x, y in pairs:
            x, y = x - means[0], y - means[1]
            count, xx, yy, xy = count + 1, xx + x * x, yy + y * y, xy + x * y
    return xy / (xx * yy) ** 0.5 if count >= _FEW and 0 < xx * yy < float("inf") else None


def _by_group(answers: Sequence[Answer]) -> list[list[float]]:
    groups: dict[Any, list[float]] = {}
    for answer in answers:
        groups.setdefault(answer.group, []).append(answer.reward)
    return list(groups.values())


def _parts(answers: Sequence[Answer]) -> list[str]:
    return list(dict.fromkeys(name for answer in answers for name, value in answer.parts.items()
                              if value is not None))[:_MOST_PARTS]


def _mean(points: Sequence[tuple[int, float]]) -> float | None:
    return sum(value for _, value in points) / len(points) if points else None


def _ends(evidence: Evidence, name: str) -> tuple[tuple[list[tuple[int, float]], float], ...] | None:
    every = evidence.last(name, len(evidence.metrics))
    count = min(RECENT, len(every) // 3)
    if count < 2:
        return None
    return tuple((part, sum(value for _, value in part) / count) for part in (every[:count], every[-count:]))


def _error(points: Sequence[tuple[int, float]], mean: float) -> float:
    count = len(points)
    return math.hypot(*(value - mean for _, value in points)) / math.sqrt((count - 1) * count)


def _over(recent: Sequence[tuple[int, float]]) -> str:
    return "of the last step" if len(recent) == 1 else f"of the last {len(recent)} steps"


def _where(evidence: Evidence, recent: Sequence[tuple[int, float]], **filters: Any) -> dict[str, Any]:
    return evidence.groups(recent[0][0], recent[-1][0], **filters)


def _interval(mean: float | None, low: float | None, high: float | None) -> str:
    bounds = f" [{number(low, '.3f')}, {number(high, '.3f')}]" if low is not None and high is not None else ""
    return f"{number(mean, '.3f')}{bounds}"
