"""`vlrl sweep`: tries settings with several seeds. The best settings are selected on some seeds and tested on others
("Hyperparameters in Reinforcement Learning and How To Tune Them", 2306.01324)."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlrl import config
from vlrl.errors import ConfigError, did_you_mean
from vlrl.evaluation.stats import Interval, gain_of_runs
from vlrl.progress import Progress, no_progress
from vlrl.store import plain
from vlrl.store.files import replacing, write_text
from vlrl.tools.experiments.many_runs import Job, check_plan, deciding_split, final_score, run_jobs
from vlrl.tools.experiments.profiles import (
    Sensitivity,
    iqm,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
    sensitivities,
    stratified,
)
from vlrl.tools.experiments.request import SweepRequest

_BASE = "base"
_MOST = 10_000  # maximum number of combinations in a grid
_TAUS = np.linspace(0, 1, 101)


@dataclass(frozen=True)
class SweptSetting:
    """A setting that a sweep varies, with its listed values or its range."""

    name: str
    values: tuple[Any, ...] = ()  # the values of a list; () for a range
    low: float = 0.0
    high: float = 0.0
    """Upper end of a range. Values are sampled uniformly between `low` and `high`, on a log scale if both are positive
    and differ by a factor of 10 or more."""
    integers: bool = False

    def draw(self, rng: np.random.Generator) -> Any:
        if self.values:
            return self.values[int(rng.integers(len(self.values)))]
        if self.low > 0 and self.high >= 10 * self.low:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high + self.integers)))
        else:
            value = rng.uniform(self.low, self.high + self.integers)
        return min(int(value), int(self.high)) if self.integers else float(f"{value:.4g}")


@dataclass(frozen=True)
class Trial:
    """One combination of values of the swept settings, and its score for each seed."""

    number: int
    settings: Mapping[str, Any]
    scores: Mapping[int, float]

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.scores.values())))


@dataclass(frozen=True)
class SweepResult:
    """The result of a sweep: its trials on the tuning seeds, and the scores of the best trial on the test seeds."""

    metric: str
    split: str
    trials: tuple[Trial, ...]
    """The trials, the best first: sorted by number of tuning seeds, then by mean score, both descending."""
    tuning: Interval
    """Mean score of the best trial over its tuning seeds. It is biased upwards, as these seeds selected the trial."""
    tests: Mapping[str, Mapping[int, float]]  # "best" and "base" (the unchanged config) -> test seed -> score
    statistics: Mapping[str, Mapping[str, Interval]]
    """"best" and "base" -> mean, iqm and optimality_gap over the test seeds, with 95 % intervals."""
    improvement: Interval | None
    """Probability that a run with the best settings scores higher than a run of the unchanged config, over the test
    seeds. None if the unchanged config was not run."""
    gain: Interval | None
    """Mean difference best - base over the test seeds, paired by seed; the bounds are NaN with one seed. None if the
    unchanged config was not run."""
    sensitivities: tuple[Sensitivity, ...]
    runs: int  # number of runs, on tuning and test seeds together
    folder: Path
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Trial:
        return self.trials[0]

    @property
    def verdict(self) -> str:
        """One sentence that says whether the test seeds show a difference between the best settings and the unchanged
        config."""
        if self.gain is None:
            return "the best settings were not compared with the unchanged config (base runs were left out)"
        seeds = len(self.tests["best"])
        words = f"best minus base {self.gain}, 95 % interval over {seeds} test seeds"
        if self.gain.low > 0 or self.gain.high < 0:
            return f"difference shown: the best settings are {'better' if self.gain.low > 0 else 'worse'} ({words})"
        return f"no difference shown ({words})" if seeds > 1 else (
            f"one test seed cannot show a difference (best minus base {self.gain}): use more with --test-seeds")

    def profile(self) -> dict[str, list[float]]:
        """For "best" and "base": the share of test scores above each of the thresholds 0, 0.01, ..., 1."""
        return {name: performance_profile(_column(own), _TAUS).tolist() for name, own in self.tests.items()}

    def plain(self) -> dict[str, Any]:
        """The result as the JSON value that `vlrl sweep --json` prints."""
        statistics = {name: {k: v._asdict() for k, v in own.items()} for name, own in self.statistics.items()}
        return {"metric": self.metric, "split": self.split, "runs": self.runs, "folder": str(self.folder),
                "best": {"settings": self.best.settings, "tuning": self.tuning._asdict(), "test": statistics["best"]},
                "base": statistics.get(_BASE),
                "probability_of_improvement": self.improvement and self.improvement._asdict(),
                "gain": self.gain and self.gain._asdict(), "verdict": self.verdict,
                "sensitivity": [{"setting": s.name, "spread": s.spread, "share": s.share,
                                 "means": {k: {"n": n, "mean": m} for k, (n, m) in s.means.items()}}
                                for s in self.sensitivities],
                "profile": {"tau": _TAUS.tolist(), **self.profile()},
                "trials": [{"number": t.number, "settings": t.settings, "mean": t.mean, "scores": t.scores}
                           for t in self.trials],
                "tests": self.tests, "notes": self.notes}


def swept_settings(words: Sequence[str]) -> tuple[list[SweptSetting], list[str]]:
    """Splits the settings `words` of the command line. Returns the swept settings (`key=v1,v2` and `key=lo..hi`), and
    the words that apply to every run.

    Raises ConfigError for a malformed range, and for a value that is listed twice."""
    swept, fixed = [], []
    for word in words:
        name, _, text = word.partition("=")
        if ".." in text and not text.startswith(("[", "{", "'", '"', "..")) and "/" not in text:
            swept.append(_range(name, text))
        elif "," in text and not text.startswith(("[", "{", "'", '"')):
            values = tuple(map(_value, text.split(",")))
            if len({str(v) for v in values}) < len(values) or "" in values:
                raise ConfigError(f"{word}: the values of a sweep must be different and not empty, e.g. {name}=1,2. "
                                  f"To set a list as one value, write {name}=[{text}]")
            swept.append(SweptSetting(name, values))
        else:
            fixed.append(word)
    names = [space.name for space in swept]
    if len(set(names)) < len(names):
        raise ConfigError(f"{', '.join(names)}: each setting can be swept only once. List all its values in one "
                          "argument")
    return swept, fixed


def trials(swept: Sequence[SweptSetting], method: str, n: int, seed: int) -> list[dict[str, Any]]:
    """The combinations of settings to try, each as a mapping from setting to value. With method `grid` these are all
    combinations of the listed values, else up to `n` different random combinations."""
    if not swept:
        raise ConfigError("no setting is swept: give a setting with several values, e.g. train.lr=1e-5,3e-5, or a "
                          "range, e.g. train.lr=1e-6..1e-4")
    if method == "grid":
        ranges = [space.name for space in swept if not space.values]
        if ranges:
            raise ConfigError(f"--method grid needs a list of values, but {', '.join(ranges)} has a range: list "
                              "values, or use --method random")
        count = math.prod(len(space.values) for space in swept)
        if count > _MOST:
            raise ConfigError(f"{count:,} combinations are more than {_MOST:,}: list fewer values, or use --method "
                              "random")
        names = [space.name for space in swept]
        return [dict(zip(names, one, strict=True)) for one in itertools.product(*(space.values for space in swept))]
    rng, drawn = np.random.default_rng(seed), dict[str, dict[str, Any]]()
    for _ in range(100 * n):
        one = {space.name: space.draw(rng) for space in swept}
        drawn.setdefault(json.dumps(one), one)
        if len(drawn) == n:
            break
    return list(drawn.values())


METHODS = ("grid", "random", "halving")


def run_sweep(path: str, words: Sequence[str], folder: Path, request: SweepRequest | None = None,
              progress: Progress = no_progress) -> SweepResult:
    """Tries settings on the tuning seeds 0, 1, ..., selects the combination of settings with the best mean, and
    evaluates this combination on further test seeds.

    path, words: config file and overrides; an override with several values or a range is swept. request: the options.
    With the methods `grid` and `random`, every combination runs on every tuning seed. With `halving`, all combinations
    run on the first seed, and on each further seed only the best 1/eta of the remaining combinations (successive
    halving over seeds, so that a short run is never compared with a long one). With `base`, the unchanged config also
    runs on the test seeds. The runs are in `folder`; a finished run is not repeated. sweep.json and profile.png are
    written to `folder`. Raises ConfigError for settings that cannot be swept, and for options that have no effect with
    the method."""
    request = request or SweepRequest()
    swept, fixed = swept_settings(words)
    listed = all(space.values for space in swept)
    method = request.method or ("grid" if listed else "random")
    if method not in METHODS:
        raise ConfigError(f"--method {method!r} is not known.{did_you_mean(method, METHODS)} Known: "
                          f"{', '.join(METHODS)}")
    for option, given, methods in (("--trials", request.n, METHODS[1:]), ("--seed", request.seed, METHODS[1:]),
                                   ("--eta", request.eta, METHODS[2:])):
        if given is not None and method not in methods:
            raise ConfigError(f"{option} {given} has no effect with --method {method}: leave out {option}, or use "
                              f"--method {' or '.join(methods)}")
    n, eta, seeds, test_seeds = request.n or 16, request.eta or 2, request.seeds, request.test_seeds
    if seeds < 1 or test_seeds < 1 or eta < 2:
        raise ConfigError(f"--seeds {seeds}, --test-seeds {test_seeds}, --eta {eta}: --seeds and --test-seeds "
                          "must be at least 1, and --eta at least 2")
    few = listed and math.prod(len(space.values) for space in swept) <= n
    chosen = trials(swept, "grid" if method == "grid" or (method == "halving" and few) else "random", n,
                    request.seed or 0)
    split, metric = _deciding_split(path, fixed, chosen, request.split), request.metric
    command = "sft" if request.sft else "train"
    check_plan(folder / "plan.json", {
        "config": config.load(path, fixed).model_dump(mode="json", exclude={"seed", "run"}), "trials": chosen,
        "method": method, "seeds": seeds, "test_seeds": test_seeds, "metric": metric, "split": split, "eta": eta,
        "command": command})
    total = _tuning_runs(len(chosen), method, seeds, eta) + test_seeds * (1 + request.base)
    counted = _counted(progress, total)

    def scores(choices: Mapping[str, Mapping[str, Any]], own: Sequence[int]) -> dict[str, dict[int, float]]:
        jobs = {name: [Job(folder / f"{name}-{s}", (command, path, *fixed, *_words(settings), f"seed={s}"))
                       for s in own] for name, settings in choices.items()}
        work = [job for jobs_of in jobs.values() for job in jobs_of]
        run_jobs(work, request.jobs, counted(work))
        return {name: {s: final_score(job.folder, split, metric) for s, job in zip(own, jobs_of, strict=True)}
                for name, jobs_of in jobs.items()}

    tried = _tune(chosen, method, seeds, eta, scores)
    sides: dict[str, Mapping[str, Any]] = {"best": tried[0].settings, **({_BASE: {}} if request.base else {})}
    tests = scores({f"tests/{name}": settings for name, settings in sides.items()},
                   range(seeds, seeds + test_seeds))
    summary = _summary(tried, {name.removeprefix("tests/"): own for name, own in tests.items()}, metric, split, folder)
    write_text(folder / "sweep.json", json.dumps(plain(summary.plain()), indent=1) + "\n")
    plot(summary, folder / "profile.png")
    return summary


def _words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{name}={json.dumps(value)}" for name, value in settings.items()]


def _tuning_runs(choices: int, method: str, seeds: int, eta: int) -> int:
    if method != "halving":
        return choices * seeds
    return sum(itertools.accumulate(range(seeds - 1), lambda n, _: max(1, math.ceil(n / eta)), initial=choices))


def _counted(progress: Progress, total: int) -> Callable[[Sequence[Job]], Progress]:
    """Returns a function that makes the `progress` argument of run_jobs for a list of jobs. The reported count
    continues over successive calls of run_jobs; `total` is the number of runs in all calls."""
    before = 0

    def of(jobs: Sequence[Job]) -> Progress:
        nonlocal before
        first, before = before, before + len(jobs)
        return lambda what, done, _: progress(what, first + done, total)

    return of


def _tune(chosen: Sequence[Mapping[str, Any]], method: str, seeds: int, eta: int,
          scores: Callable[[Mapping[str, Mapping[str, Any]], Sequence[int]], dict[str, dict[int, float]]]
          ) -> list[Trial]:
    """Runs the search `method` with `eta` (see run_sweep) over the combinations of settings `chosen`. Returns the
    trials, sorted by number of seeds, then by mean score, both descending. `scores` trains named combinations and
    returns name -> seed -> score."""
    results: dict[int, dict[int, float]] = {number: {} for number in range(len(chosen))}
    left = list(results)
    for own in [[s] for s in range(seeds)] if method == "halving" else [list(range(seeds))]:
        new = scores({f"tuning/{number:04d}": chosen[number] for number in left}, own)
        for number, by_seed in zip(left, new.values(), strict=True):
            results[number] |= by_seed
        if method == "halving":
            left = sorted(left, key=lambda k: -float(np.mean(list(results[k].values()))))
            left = sorted(left[:max(1, math.ceil(len(left) / eta))])
    tried = [Trial(number, chosen[number], by_seed) for number, by_seed in results.items()]
    return sorted(tried, key=lambda t: (-len(t.scores), -t.mean, t.number))


def _summary(tried: Sequence[Trial], tests: Mapping[str, Mapping[int, float]], metric: str, split: str,
             folder: Path) -> SweepResult:
    columns = {name: _column(own) for name, own in tests.items()}
    measures: dict[str, Callable[[np.ndarray], float]] = {
        "mean": lambda x: float(x.mean()), "iqm": iqm, "optimality_gap": optimality_gap}
    statistics = {name: {what: stratified(of, column) for what, of in measures.items()}
                  for name, column in columns.items()}
    improvement = stratified(probability_of_improvement, columns["best"], columns[_BASE]) if _BASE in columns else None
    gain = gain_of_runs(*(list(tests[name].values()) for name in (_BASE, "best"))) if _BASE in tests else None
    everything = [v for t in tried for v in t.scores.values()] + [v for own in tests.values() for v in own.values()]
    notes = [] if all(0 <= v <= 1 for v in everything) else [
        f"{metric} is not within [0, 1], the range that the optimality gap and the performance profile assume, so "
        "these two mean little"]
    runs = len(everything)
    return SweepResult(metric, split, tuple(tried), stratified(measures["mean"], _column(tried[0].scores)), tests,
                       statistics, improvement, gain,
                       tuple(sensitivities([t.settings for t in tried], [t.mean for t in tried])), runs, folder,
                       tuple(notes))


def plot(swept: SweepResult, path: Path) -> None:
    """Plots the performance profile of the test runs, the share of runs above each score, to a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    for name, share in swept.profile().items():
        axes.step(_TAUS, share, where="post", label=f"{name}, {len(swept.tests[name])} test seeds")
    axes.set(xlabel=swept.metric.replace("$", r"\$"), ylabel="share of runs above it", ylim=(-0.02, 1.02))
    axes.legend(frameon=False)
    with replacing(path, sync=False) as temporary:
        figure.savefig(temporary, format="png")


# --- what is swept ----------------------------------------------------------------------------------------------------


def _value(text: str) -> Any:
    """The value that a text stands for: a number (YAML reads 1e-5 as a text), true, false, or the text itself."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return {"true": True, "false": False}.get(text, text)


def _range(name: str, text: str) -> SweptSetting:
    ends = text.split("..")
    try:
        low, high = (float(end) for end in ends)
    except ValueError:
        low, high = 1.0, 0.0
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ConfigError(f"{name}={text}: a range must be two numbers lo..hi with lo below hi, e.g. "
                          f"{name}=1e-6..1e-4")
    return SweptSetting(name, low=low, high=high, integers=all(end.strip().lstrip("+-").isdecimal() for end in ends))


def _deciding_split(path: str, fixed: Sequence[str], chosen: Sequence[Mapping[str, Any]], split: str | None) -> str:
    """The name of the split on which trials are compared. Also loads the config with every combination in `chosen`, so
    that an invalid combination is reported before the first run."""
    loaded = {path: config.load(path, fixed)}
    loaded |= {" ".join(words): config.load(path, [*fixed, *words]) for one in chosen for words in [_words(one)]}
    swept = [f"{name}=..." for one in chosen[:1] for name in one]
    return deciding_split(loaded, split, [*fixed, *swept], "--seeds, --test-seeds, -o")


def _column(scores: Mapping[int, float]) -> np.ndarray:
    return np.array([list(scores.values())], np.float64).T
