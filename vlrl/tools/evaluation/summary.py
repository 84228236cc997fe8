"""Computes metrics from the rows of an evaluation: means with 95 % intervals over samples, and standard deviations over
seeds. Does not import torch.

At one seed, the value of a metric is the mean over samples, where the value of a sample is the mean over its answers.
`mean` is the mean over seeds. The interval comes from resampling the samples, with all samples of one image or clip
kept together, while the seeds are fixed. `sd` is the standard deviation of the values at the seeds; None with one seed.
A gain of less than one sd is not evidence of a difference (2504.07086)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from vlrl.evaluation.stats import clustered_ci, statistic_ci
from vlrl.rewards.boxes import iou
from vlrl.rewards.points import inside
from vlrl.task import Task
from vlrl.tools.evaluation import probes, votes
from vlrl.tools.evaluation.settings import EvalSetting
from vlrl.types import Row, Sample


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric with its uncertainty. `low` and `high` bound the 95 % interval (None if there is none); `sd` is None
    with a single seed."""

    mean: float
    low: float | None = None
    high: float | None = None
    sd: float | None = None  # standard deviation of the values at the seeds (divided by n - 1)
    by_seed: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Result:
    """The metrics of one split at one setting."""

    split: str
    setting: EvalSetting
    n: int  # number of samples that have an answer
    left_out: int  # number of samples that could not be asked, such as prompts that are too long
    unanswered: int  # number of answers that the server failed to return; no metric includes them
    unscorable: int  # number of answers without a reward; the metrics of rewards do not include them
    metrics: Mapping[str, Metric] = field(default_factory=dict)


Vote = Literal["majority", "region", ""]


@dataclass
class _Sample:
    """The answers to one sample at one seed."""

    number: int
    task: str
    cluster: str
    rows: list[Row]
    vote: Vote = ""
    """The kind of vote over the sample's answers, "" = none (see _assign_votes). An answer that could not be parsed
    counts as wrong."""
    confident: bool = False
    """Whether any answer of the sample's task states a confidence. If so, answers without a confidence have weight 0 in
    the vote."""


Values = dict[str, dict[int, float]]  # metric -> number of the sample -> value at one seed


def summarise(task: Task, rows: Sequence[Row], setting: EvalSetting, split: str, samples: Sequence[Sample]) -> Result:
    """Computes the metrics of one split at one setting from the rows; rows of other splits or settings are ignored.

    `samples` are the samples of the split, for metrics that a task computes over a whole split."""
    own = [r for r in rows if (r["split"], r["setting"]) == (split, setting.name) and r["seed"] in setting.seeds
           and r.get("index", -1) < setting.answers]
    answered = [r for r in own if "answer" in r]
    plain_rows = {(r["seed"], r["number"], r["index"]): r for r in rows if setting.plain and "answer" in r
                  and (r["split"], r["setting"]) == (split, setting.plain)}  # the same answers without the probe
    answered = [{**r, "cluster": plain_rows.get((r["seed"], r["number"], r["index"]), r)["cluster"]} for r in answered]
    seeds = [_by_sample([r for r in answered if r["seed"] == seed]) for seed in setting.seeds]
    seeds = [seed for seed in seeds if seed]
    _assign_votes(seeds)
    metrics = _means(seeds, lambda group: _sample_values(task, group, setting.answers))
    for label in task.labels:
        mine = [[s for s in seed if s.task == label] for seed in seeds]
        metrics |= {f"{label}/{name}": m for name, m in _means(
            mine, lambda group: _sample_values(task, group, setting.answers)).items()}
    if plain_rows:
        metrics |= _means(seeds, lambda group: _probe_values(group, plain_rows))
    metrics |= _calibrations(seeds, setting.answers)
    metrics |= _split_metrics(task, seeds, setting.answers, samples)
    return Result(split=split, setting=setting, n=len({r["number"] for r in answered}),
                  left_out=len({r["number"] for r in own if r.get("left_out")}),
                  unanswered=sum(bool(r.get("unanswered")) for r in own),
                  unscorable=sum(r["reward"] is None for r in answered), metrics=metrics)


def _by_sample(rows: Sequence[Row]) -> list[_Sample]:
    samples: dict[int, _Sample] = {}
    for row in rows:
        samples.setdefault(row["number"], _Sample(row["number"], row["task"], row["cluster"], [])).rows.append(row)
    return [samples[number] for number in sorted(samples)]


def _assign_votes(seeds: Sequence[Sequence[_Sample]]) -> None:
    """Sets `vote`, the kind of vote, of each sample, from its target and the parsed answers in the split.

    - region: the target is a box, unless the task's answers parse as something other than boxes and points.
    - none: the task's answers parse as boxes, points or spans, and the target is neither a text nor a number.
    - majority: everything else."""
    read: dict[str, set[bool]] = {}
    confident = {s.task for seed in seeds for s in seed for r in s.rows if r.get("confidence") is not None}
    for seed in seeds:
        for sample in seed:
            read.setdefault(sample.task, set()).update(votes.location_of(r["parsed"]) is not None for r in sample.rows
                                                       if votes.ballot(r["parsed"]) is not None)
    for seed in seeds:
        for sample in seed:
            sample.confident = sample.task in confident
            target, places = sample.rows[0]["target"], True in read[sample.task]
            box = len(votes.location_of(target) or ()) == 4
            if box and (places or not read[sample.task]):
                sample.vote = "region"
            elif not places or isinstance(target, (str, int, float)):
                sample.vote = "majority"


# --- means over samples -----------------------------------------------------------------------------------------------


def _means(seeds: Sequence[Sequence[_Sample]], values_of: Callable[[_Sample], dict[str, float]]) -> dict[str, Metric]:
    """Returns name -> Metric for the values that `values_of` returns for each sample. A Metric holds the mean over
    samples and then over seeds."""
    columns: dict[str, list[dict[int, float]]] = {}
    clusters = {s.number: s.cluster for seed in seeds for s in seed}
    for place, seed in enumerate(seeds):
        for sample in seed:
            for name, value in values_of(sample).items():
                columns.setdefault(name, [{} for _ in seeds])[place][sample.number] = value
    return {name: _metric(by_seed, clusters) for name, by_seed in columns.items()}


def _metric(by_seed: Sequence[Mapping[int, float]], clusters: Mapping[int, str]) -> Metric:
    numbers = sorted(set().union(*by_seed))
    whole = [float(np.mean([seed[n] for seed in by_seed if n in seed])) for n in numbers]
    interval = clustered_ci(whole, [clusters[n] for n in numbers])
    seeds = tuple(float(np.mean(list(seed.values()))) for seed in by_seed if seed)
    return Metric(mean=float(np.mean(seeds)) if len(seeds) > 1 else interval.mean, low=interval.low,
                  high=interval.high, sd=_sd(seeds), by_seed=seeds)


def _sd(values: Sequence[float]) -> float | None:
    return float(np.std(values, ddof=1)) if len(values) > 1 else None


def _sample_values(task: Task, sample: _Sample, n: int) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for row in sample.rows:
        own = {"reward/mean": row["reward"], "correct_frac": row["correct"], "completion/length_mean": row["tokens"],
               "completion/truncated_frac": row["truncated"], "episode/turns_mean": row.get("turns")}
        for name, value in {**own, **row["parts"], **row["metrics"]}.items():
            if value is not None and math.isfinite(value):
                columns.setdefault(name, []).append(float(value))
    out = {name: float(np.mean(values)) for name, values in columns.items()}
    return {**out, **(_vote_metrics(task, sample, n) if n > 1 else {}), **_reasoning_metrics(sample, n)}


def _vote_metrics(task: Task, sample: _Sample, n: int) -> dict[str, float]:
    """pass@k and maj@k of one sample, for each reported k up to the number of scored answers, and region metrics."""
    scored = [r for r in sample.rows if r["correct"] is not None]
    right, ballots = [float(r["correct"]) for r in scored], [votes.ballot(r["parsed"]) for r in scored]
    ks = [k for k in votes.reported_ks(n) if k <= len(scored)]
    out = {f"pass@{k}": votes.pass_at(len(scored), int(sum(right)), k) for k in ks}
    if sample.vote == "majority":
        out |= {f"maj@{k}": votes.majority(ballots, right, k) for k in ks if k > 1}
        sure = [r["confidence"] for r in scored]
        if sample.confident and len(scored) == n:
            out[f"maj@{n}/by_confidence"] = votes.majority(ballots, right, n, [q or 0.0 for q in sure])
    return {**out, **(_region_metrics(task, sample, n) if sample.vote == "region" else {})}


def _reasoning_metrics(sample: _Sample, n: int) -> dict[str, float]:
    """CoT-pass@k (2506.14245) of one sample, for each reported k: pass@k where an answer only counts as correct if a
    majority of the judge's verdicts accept its reasoning.

    For the keys ending in `/any`, at least one verdict must accept the reasoning; for those ending in `/all`, all must.
    A correct answer without a verdict is left out. {} without a judge."""
    judged = [r for r in sample.rows if r["correct"] is not None and "verdicts" in r
              and (r["verdicts"] or not r["correct"])]
    rules: dict[str, Callable[[Sequence[bool]], bool]] = {
        "": lambda given: 2 * sum(given) > len(given), "/any": any, "/all": lambda given: bool(given) and all(given)}
    out = {f"cot_pass@{k}{name}": votes.pass_at(len(judged), sum(map(rule, (r["verdicts"] for r in judged))), k)
           for name, rule in rules.items() for k in votes.reported_ks(n) if k <= len(judged)}
    right = [r["verdicts"] for r in judged if r["correct"]]
    return {**out, **({"judge/sound_frac": float(np.mean([rules[""](given) for given in right]))} if right else {})}


def _region_metrics(task: Task, sample: _Sample, n: int) -> dict[str, float]:
    """Metrics of the box on which the `n` answers (boxes or points) agree: `region@n/hit` (1 if the centre of the box
    lies in the target), `region@n/iou` and `region@n/acc@.5`.

    All are 0 if no answer has a location."""
    target = votes.location_of(sample.rows[0]["target"])
    places = [votes.location_of(r["parsed"]) for r in sample.rows]
    assert target
    owner = next((t for t in task.members if t.name == sample.task), task.members[0])
    box = votes.region(places, sample.rows[0].get("size"), getattr(owner, "point_reach", 50.0))
    hit = box is not None and inside([(box[0] + box[2]) / 2, (box[1] + box[3]) / 2], target)
    overlap = iou(box, target) if box else 0.0
    return {f"region@{n}/hit": float(hit), f"region@{n}/iou": overlap, f"region@{n}/acc@.5": float(overlap >= 0.5)}


def _probe_values(sample: _Sample, plain_rows: Mapping[tuple[int, int, int], Row]) -> dict[str, float]:
    """Metrics that compare the answers to a sample under a probe with the answers to the unchanged sample, which are in
    `plain_rows`. {} if there are no answers to compare with."""
    pairs = [(r, plain) for r in sample.rows if (plain := plain_rows.get((r["seed"], r["number"], r["index"])))]
    if not pairs:
        return {}
    out = {"probe/same_frac": [float(probes.same_answer(r["parsed"], p["parsed"], p.get("size"))) for r, p in pairs],
           "probe/abstained_frac": [float(probes.abstains(r["answer"], r["parsed"])) for r, _ in pairs],
           "probe/length_ratio": [r["tokens"] / p["tokens"] for r, p in pairs if r["tokens"] and p["tokens"]],
           "probe/correct_change": [float(r["correct"]) - float(p["correct"]) for r, p in pairs
                                    if r["correct"] is not None and p["correct"] is not None]}
    return {name: float(np.mean(values)) for name, values in out.items() if values}


# --- what is no mean --------------------------------------------------------------------------------------------------


def _calibrations(seeds: Sequence[Sequence[_Sample]], n: int) -> dict[str, Metric]:
    """Calibration metrics of the stated confidences: `confidence/ece|brier|auroc` over the answers that state a
    confidence.

    With several answers per sample, also `vote/ece|brier|auroc`. For these, the most frequent answer to a sample counts
    as its answer, and the share of votes for this answer as the confidence."""
    stated = [[(s.cluster, r["confidence"], float(r["correct"])) for s in seed for r in s.rows
               if r.get("confidence") is not None and r["correct"] is not None] for seed in seeds]
    shares = [[(s.cluster, *elected) for s in seed if n > 1 and s.vote == "majority" and (elected := _winner_share(s))]
              for seed in seeds]
    return {**_calibration_metrics("confidence", stated), **_calibration_metrics("vote", shares)}


def _winner_share(sample: _Sample) -> tuple[float, float] | None:
    """Returns (the share of votes for the most frequent answer; 1 if this answer is correct, else 0).

    Returns (0, 0) if no answer could be parsed, and None if no answer could be scored."""
    scored = [r for r in sample.rows if r["correct"] is not None]
    ballots = [votes.ballot(r["parsed"]) for r in scored]
    first, share = votes.winner(ballots)
    if first is None:
        return (0.0, 0.0) if scored else None
    return share, float(next(r["correct"] for r, b in zip(scored, ballots, strict=True) if b == first))


def _calibration_metrics(prefix: str, seeds: Sequence[Sequence[tuple[str, float, float]]]) -> dict[str, Metric]:
    seeds = [seed for seed in seeds if seed]
    if not seeds:
        return {}
    each = [calibration([q for _, q, _ in seed], [right for *_, right in seed]) for seed in seeds]
    pooled = [entry for seed in seeds for entry in seed]
    clusters = [cluster for cluster, *_ in pooled]
    sure, right = np.array([q for _, q, _ in pooled]), np.array([r for *_, r in pooled])
    out = {}
    for name in each[0]:
        values = tuple(v[name] for v in each if math.isfinite(v[name]))
        if values:
            low, high = statistic_ci(lambda at, name=name: calibration(sure[at], right[at])[name], clusters)
            out[f"{prefix}/{name}"] = Metric(mean=float(np.mean(values)), low=low, high=high, sd=_sd(values),
                                             by_seed=values)
    return out


def _split_metrics(task: Task, seeds: Sequence[Sequence[_Sample]], n: int, samples: Sequence[Sample]
                   ) -> dict[str, Metric]:
    """The metrics that a task computes over a whole split (Task.summarize). `summarize` is called with the first
    answers to all samples, then with the second answers, and so on; the results are averaged."""
    tables = []
    for seed in seeds:
        each = [task.summarize([_record(task, s, r, samples) for s in seed for r in s.rows if r["index"] == i])
                for i in range(n)]
        tables.append({name: float(np.mean([t[name] for t in each if name in t]))
                       for name in dict.fromkeys(name for t in each for name in t)})
    out = {}
    for name in dict.fromkeys(name for table in tables for name in table):
        values = tuple(t[name] for t in tables if name in t and math.isfinite(t[name]))
        if values:
            out[name] = Metric(mean=float(np.mean(values)), sd=_sd(values), by_seed=values)
    return out


def _record(task: Task, sample: _Sample, row: Row, samples: Sequence[Sample]) -> dict[str, Any]:
    return {"task": sample.task or task.name, "sample": samples[sample.number].row, "id": row["sample"],
            **{name: row[name] for name in ("answer", "parsed", "target", "parts", "reward", "correct", "metrics",
                                            "truncated", "error")}, "length": row["tokens"]}


def ece(confidences: np.ndarray, right: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error of `confidences` [N], given the correctness `right` [N] of the answers. The value is
    that of rewards.confidence.calibration_error, but is computed fast enough for resampling."""
    at = np.minimum((confidences * bins).astype(int), bins - 1)
    return float(np.abs(np.bincount(at, confidences - right, bins)).sum() / max(1, len(at)))


def auroc(confidences: Sequence[float] | np.ndarray, right: Sequence[float] | np.ndarray) -> float:
    """Area under the ROC curve (Mann-Whitney U): the probability that a correct answer has a higher confidence than a
    wrong answer, with ties counted as one half.

    NaN if all answers are correct or all are wrong."""
    from scipy.stats import rankdata

    good = np.asarray(right, float) > 0.5
    wins = int(good.sum())
    if wins in (0, len(good)):
        return float("nan")
    ranks = rankdata(np.asarray(confidences, float))
    return float((ranks[good].sum() - wins * (wins + 1) / 2) / (wins * (len(good) - wins)))


def calibration(confidences: Sequence[float] | np.ndarray,
                right: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Calibration metrics of `confidences` in [0, 1] that were stated with answers; `right` is 1 for a correct and 0
    for a wrong answer. {} if there are no answers.

    Keys: `ece` (ten bins of equal width, 1706.04599), `brier` (mean squared error) and `auroc`."""
    if not len(confidences):
        return {}
    sure, good = np.asarray(confidences, float), np.asarray(right, float)
    return {"ece": ece(sure, good), "brier": float(((sure - good) ** 2).mean()),
            "auroc": auroc(sure, good)}
