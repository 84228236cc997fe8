"""`vlrl compare`: which of two models scores higher on the samples that both answered. `vlrl sweep`: which settings
score highest."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, ConfigPath, emit, examples, takes_requests
from vlrl.cli.terminal import printable, progress_bars, show, show_table
from vlrl.tools.experiments.request import JOBS, SweepRequest

if TYPE_CHECKING:
    from vlrl.tools.experiments.compare import Comparison, Outcome
    from vlrl.tools.experiments.sequential import InterimAnalysis
    from vlrl.tools.experiments.sequential_runs import SequentialResult
    from vlrl.tools.experiments.sweep import SweepResult

_SETTING = re.compile(r"[A-Za-z_][\w.]*=.*", re.DOTALL)
_ANSWER = 60  # characters of an answer in a list


@examples(
    "vlrl compare runs/a runs/b                              the last evaluation of each",
    "vlrl compare runs/a@0 runs/a@best --metric iou          before and after, in one run",
    "vlrl compare runs/a-0 runs/a-1 runs/a-2 vs runs/b-0 runs/b-1 runs/b-2       three seeds per model",
    "vlrl compare runs/a runs/b --json | jq '.samples[] | select(.b < .a) | .id'  what got worse",
    "vlrl compare --weights runs/a                           share of weights that differ from the base model",
    "vlrl compare --forms runs/a                             the forms of the answers at each evaluation",
    "vlrl compare --sequential a.yaml b.yaml --jobs 2        trains both with further seeds until a test decides",
    "vlrl compare --sequential a.yaml b.yaml c.yaml steps=100 --seeds 3 --blocks 6 -o runs/three")
def compare(
    sides: Annotated[list[str], typer.Argument(metavar="A [vs] B", show_default=False, help=(
        "Run folders, or RUN@STEP, where STEP is a number of completed steps, first, last or best. For several runs "
        "per model put vs between the two groups. With --sequential: configs, and settings for all of them. With "
        "--weights: models or runs. With --forms: runs."))],
    split: Annotated[str | None, typer.Option(show_default=False, help=(
        "The split, e.g. heldout. Default: heldout, or the first split that all runs have."))] = None,
    metric: Annotated[str | None, typer.Option(metavar="NAME", show_default=False, help=(
        "The metric that decides, e.g. iou or correct_frac. Default: reward/mean."))] = None,
    listed: Annotated[int | None, typer.Option("--show", metavar="N", min=0, show_default=False, help=(
        "How many of the largest wins and losses to list, e.g. 20; 0 = none. --json contains every sample. "
        "Default: 5."))] = None,
    weights: Annotated[bool, typer.Option("--weights", help=(
        "Compare the weights: the share of weights that changed from A to B, or, for a single run A, from its base "
        "model. A and B are model folders, checkpoints, runs or Hub names."))] = False,
    forms: Annotated[bool, typer.Option(
        "--forms", help="Show how the form of the answers (their text with words and numbers replaced by "
                        "placeholders) changed over the evaluations of a run.")] = False,
    sequential: Annotated[bool, typer.Option("--sequential", help="Train the configs with further seeds until a "
                                                                  "group-sequential permutation test decides between "
                                                                  "them.")] = False,
    seeds: Annotated[int | None, typer.Option(metavar="N", min=2, show_default=False, help=(
        "With --sequential: seeds per config and block. Default: 5."))] = None,
    blocks: Annotated[int | None, typer.Option(metavar="N", min=1, show_default=False, help=(
        "With --sequential: maximum number of blocks. Default: 5."))] = None,
    alpha: Annotated[float | None, typer.Option(
        metavar="P", show_default=False, help="With --sequential: maximum probability of reporting a difference where "
                                              "there is none. Default: 0.05.")] = None,
    jobs: Annotated[int | None, typer.Option(
        metavar="N", min=1, show_default=False, help=f"With --sequential: {JOBS} Default: 1.")] = None,
    out: Annotated[Path | None, typer.Option("-o", "--output", show_default=False, help=(
        "With --sequential: folder for the runs. Default: runs/compare-A-B."))] = None,
    as_json: AsJson = False,
) -> None:
    """Compare two models on the samples that both answered, paired by content: is one better, and where?

    Reads the stored answers of evaluations; no model is loaded. Two samples are the same if their images, prompt and
    target are equal, whatever their ids. If each model was trained with several seeds, the confidence interval includes
    the variation between seeds. The exit code is 0 whatever the result.

    With --sequential the command trains the runs itself, in blocks of seeds, and stops as soon as the seeds so far show
    a difference. Run the same command again to continue after an interruption."""
    own = {"--seeds": seeds, "--blocks": blocks, "--alpha": alpha, "--jobs": jobs, "-o": out}
    if weights or forms:
        given = {**own, "--metric": metric, "--split": split if weights else None, "--show": listed,
                 "--sequential": sequential or None, "--forms": (forms and weights) or None}
        if unused := next((name for name, value in given.items() if value is not None), None):
            raise typer.BadParameter(f"has no effect with --{'weights' if weights else 'forms'}; remove one of the "
                                     "two", param_hint=unused)
        _weights(sides, as_json) if weights else _forms(sides, split, as_json)
        return
    if sequential:
        if listed is not None:
            raise typer.BadParameter("lists samples of two evaluations, so it cannot be combined with --sequential",
                                     param_hint="--show")
        _sequential(sides, split, metric or "reward/mean", seeds or 5, blocks or 5, 0.05 if alpha is None else alpha,
                    jobs or 1, out, as_json)
        return
    for name, value in own.items():
        if value is not None:
            raise typer.BadParameter("needs --sequential, because otherwise nothing is trained", param_hint=name)
    from vlrl.tools.experiments.compare import compare as run
    from vlrl.tools.experiments.compare import parse_side

    first, second = _sides(sides)
    comparison = run([parse_side(text) for text in first], [parse_side(text) for text in second], split,
                     metric or "reward/mean")
    if as_json:
        emit(comparison.plain())
    else:
        _print(comparison, 5 if listed is None else listed)


def _sides(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits the arguments into (runs of model A, runs of model B). The arguments are ["a", "b"] or, with several runs
    per model, ["a1", "a2", "vs", "b1"]."""
    if words.count("vs") == 1:
        first, second = words[:words.index("vs")], words[words.index("vs") + 1:]
    elif len(words) == 2 and "vs" not in words:
        first, second = words[:1], words[1:]
    else:
        first, second = [], []
    if not first or not second:
        raise typer.BadParameter(f"{' '.join(words)}: name two runs (A B), or several runs of each of two models "
                                 "(A1 A2 vs B1 B2)")
    return first, second


def _print(comparison: Comparison, most: int) -> None:
    from rich.text import Text
    show(f"a: {', '.join(map(str, comparison.a))}")
    show(f"b: {', '.join(map(str, comparison.b))}")
    rows = []
    for name, m in comparison.metrics.items():
        change = m.difference
        style = "bold" if change.low > 0 or change.high < 0 else ""
        cells = (name, f"{m.n:,}", f"{m.a.mean:.3f}", f"{m.b.mean:.3f}",
                 f"{change.mean:+.3f} [{change.low:+.3f}, {change.high:+.3f}]", f"{m.effect:+.2f}")
        rows.append([Text(printable(cell), style) for cell in cells])
    show_table(("metric", "n", "a", "b", "b - a, 95 % interval", "effect"), rows, min_width=50)
    show(f"by {comparison.metric}: b wins {comparison.wins:,}, loses {comparison.losses:,}, ties {comparison.ties:,}")
    for sample in comparison.samples[:min(most, comparison.wins)]:
        show(_outcome("win ", sample))
    for sample in comparison.samples[::-1][:min(most, comparison.losses)]:
        show(_outcome("loss", sample))
    for line in (*comparison.notes, comparison.verdict):
        show(line)


def _outcome(word: str, sample: Outcome) -> str:
    id = sample.id if sample.id == sample.other else f"{sample.id} = {sample.other}"
    short = [" ".join(text.split()) for text in sample.answers]
    first, second = (f"{text[:_ANSWER]}..." if len(text) > _ANSWER else text for text in short)
    return f"  {word} {id}: {sample.a:.3f} -> {sample.b:.3f}   {first!r} -> {second!r}"


def _weights(words: Sequence[str], as_json: bool) -> None:
    from vlrl.tools.experiments.weight_changes import plain as counts
    from vlrl.tools.experiments.weight_changes import weight_changes
    if len(words) > 2:
        raise typer.BadParameter(f"{' '.join(words)}: with --weights name a run, or two models", param_hint="A [vs] B")
    changes = weight_changes(*words)
    if as_json:
        emit(counts(changes))
        return
    show(f"a: {changes.a}\nb: {changes.b}", most=400)
    show_table(("weights", "tensors", "n", "changed", "lost to rounding", "distance / norm"), (
        (name, f"{c.tensors:,}", f"{c.weights:,}", f"{c.share:.2%}", f"{c.lost / max(1, c.weights):.2%}",
         f"{c.distance / c.norm if c.norm else float('nan'):.2e}")
        for name, c in (*changes.kinds.items(), ("all", changes.total))), min_width=50)
    if changes.unmatched:
        names = ", ".join(changes.unmatched[:5]) + (", ..." if len(changes.unmatched) > 5 else "")
        show(f"not counted, because only one of the two models has them: {names}", most=400)
    show("changed: by more than 1e-5 in the dtype of a; lost to rounding: by less than that dtype can represent",
         "dim")


def _forms(words: Sequence[str], split: str | None, as_json: bool) -> None:
    from vlrl.store import RunFolder
    from vlrl.tools.experiments.forms import forms_over_steps, most_frequent
    if "vs" in words:
        raise typer.BadParameter("vs separates the runs of two models, but --forms shows each run by itself: remove vs",
                                 param_hint="A [vs] B")
    forms_by_run = {word: forms_over_steps(RunFolder(word), split) for word in words}
    if as_json:
        emit({word: [{"step": p.step, "answers": p.answers, "entropy": p.entropy, "forms": dict(p.forms.most_common())}
                     for p in points] for word, points in forms_by_run.items()})
        return
    for word, points in forms_by_run.items():
        show(word)
        show_table(("form of the answers", *(f"step {point.step}" for point in points)), (
            *((name, *(f"{point.share(name):.1%}" for point in points)) for name in most_frequent(points)),
            ("different forms", *(f"{len(point.forms):,}" for point in points)),
            ("their entropy, nats", *(f"{point.entropy:.3f}" for point in points))), min_width=50)
    show("0 stands for a number, a for words; tags and signs are as they were written", "dim")


def _sequential(words: Sequence[str], split: str | None, metric: str, seeds: int, blocks: int, alpha: float, jobs: int,
                out: Path | None, as_json: bool) -> None:
    from vlrl.tools.experiments.sequential_runs import run_sequential
    if "vs" in words:
        raise typer.BadParameter("vs separates the runs of two models, but --sequential compares configs: name only "
                                 "configs, e.g. a.yaml b.yaml", param_hint="A [vs] B")
    configs = [word for word in words if not _SETTING.fullmatch(word)]
    settings = [word for word in words if _SETTING.fullmatch(word)]
    folder = out or Path("runs") / "-".join(["compare", *(Path(path).stem for path in configs)])

    def report(look: InterimAnalysis) -> None:
        limits = {pair: "no decision possible yet" if value == float("inf") else f"threshold {value:.3f}"
                  for pair, value in look.thresholds.items()}
        pairs = ", ".join(f"{a} - {b} {value:.3f} ({limits[a, b]})" for (a, b), value in look.statistics.items())
        if not as_json:
            show(f"block {look.block} of at most {blocks}: summed differences {pairs}")

    with _interruptible(folder), progress_bars(lines=True) as progress:
        decided = run_sequential(configs, settings, folder, metric=metric, split=split, n=seeds, blocks=blocks,
                                 alpha=alpha, jobs=jobs, progress=progress, after_block=report)
    if as_json:
        emit(decided.plain())
    else:
        _print_decided(decided)


def _print_decided(decided: SequentialResult) -> None:
    import numpy as np
    for name, scores in decided.scores.items():
        show(f"{name}: {decided.metric} {np.mean(scores):.3f} (standard deviation {np.std(scores, ddof=1):.3f} over "
             f"{len(scores)} seeds)")
    for (a, b), higher in decided.test.decisions.items():
        show(f"{higher} is higher than {b if higher == a else a} (alpha {decided.test.alpha:g})" if higher else
             f"no difference shown between {a} and {b} after {len(decided.test.looks)} blocks")
    show(f"{decided.runs} runs in {decided.folder}")


@contextmanager
def _interruptible(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(printable(f"stopped. The same command continues with the runs in {folder}."), err=True)
        raise typer.Exit(130) from None


@examples(
    "vlrl sweep configs/quickstart.yaml train.lr=1e-4,3e-4,1e-3 --seeds 3 --test-seeds 5",
    "vlrl sweep configs/quickstart.yaml train.lr=1e-5..1e-3 algo.clip_high=0.2,0.28 --trials 12 --jobs 2",
    "vlrl sweep configs/quickstart.yaml train.lr=1e-5..1e-3 --method halving --trials 16 --metric iou steps=50")
@takes_requests
def sweep(
    config: ConfigPath,
    words: Annotated[list[str], typer.Argument(metavar="key=v1,v2 | key=lo..hi | key=value", show_default=False, help=(
        "Settings with several values or a range are swept, e.g. train.lr=1e-5..1e-3. All other settings apply to "
        "every run."))],
    request: SweepRequest,
    out: Annotated[Path | None, typer.Option("-o", "--output", show_default=False, help=(
        "Folder for the runs. Default: runs/sweep-CONFIG."))] = None,
    as_json: AsJson = False,
) -> None:
    """Try settings on some seeds, and measure the best settings on other seeds.

    The score that selects the best settings is biased upwards, because it was the highest of many. The unbiased result
    is the score of these settings on test seeds that were not used for the selection. The command also reports how much
    each setting matters and how many runs were needed. To continue after an interruption, run the command again."""
    from vlrl.tools.experiments.sweep import run_sweep
    folder = out or Path("runs") / f"sweep-{Path(config).stem}"
    with _interruptible(folder), progress_bars(lines=True) as progress:
        swept = run_sweep(config, words, folder, request, progress)
    if as_json:
        emit(swept.plain())
    else:
        _print_swept(swept)


def _print_swept(swept: SweepResult) -> None:
    show_table(("settings", "seeds", swept.metric), ((_settings(t.settings), len(t.scores), f"{t.mean:.3f}")
                                                     for t in swept.trials[:20]),
               min_width=50, title=f"tuning seeds, {swept.split}")
    for s in swept.sensitivities:
        means = ", ".join(f"{value} {mean:.3f} ({n})" for value, (n, mean) in s.means.items())
        show(f"{s.name}: spread {s.spread:.3f}, {s.share:.0%} of the variance; mean by value {means}")
    show(f"best on the tuning seeds: {_settings(swept.best.settings)}: {swept.tuning} (biased upwards, because these "
         "seeds selected it)")
    for name, own in swept.statistics.items():
        show(f"{name} on {len(swept.tests[name])} test seeds: mean {own['mean']}, IQM {own['iqm']}, optimality gap "
             f"{own['optimality_gap']}")
    if swept.improvement:
        show(f"probability that a run with these settings scores higher than a run without them: {swept.improvement}")
    for line in (*swept.notes, f"{swept.runs} runs in {swept.folder}; sweep.json and profile.png are there",
                 swept.verdict):
        show(line)


def _settings(settings: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in settings.items())
