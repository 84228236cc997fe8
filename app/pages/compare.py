"""The Compare page: two runs, checkpoints or ranges of training steps, compared on their common samples."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.evaluation.stats import Interval

from .. import AppError, controls
from ..analysis import Comparison, Side, compare
from ..html import Html, el, empty, link, note, number, table
from ..index import Index
from ..marks import color
from ..rows import Span, compare_spans, part_gains
from ..site import Site, chart_value, query
from . import charted, sides
from .charted import figure, remarks_on

MOST_LISTED = 20
"""Largest number of samples listed as gains, and of samples listed as losses."""
MOST_DRAWN = 5_000


@dataclass(frozen=True)
class Request:
    """The comparison that the URL parameters ask for. Ranges of steps are pairs (first, last), inclusive; for an
    evaluation, first and last are the same step."""

    source: str
    """"eval" or "train"."""
    runs: tuple[str, str]
    steps: tuple[tuple[int | None, int | None], tuple[int | None, int | None]]
    split: str | None


def build(site: Site) -> None:
    """Adds the page to the app."""
    charted.build(site, show)


def show(site: Site, where: Mapping[str, str]) -> charted.PlotPage:
    """The content of the page for these URL parameters."""
    runs = [info.id for info in site.library.runs()]
    if not runs:
        return charted.no_runs()
    form = _form(site, where, runs)
    try:
        request = request_of(site, where, runs)
        result = _compared(site.index, request)
    except AppError as error:
        return el("div", form, empty(str(error), _way_out(where)), class_="v"), chart_value([]), Html("")
    above = el("div", form, *remarks_on(site, request.runs, result.notes), _facts(result, request), class_="v")
    below = el("div", _extremes(result, where), _pair(site, result, where), _parts(site.index, result, request),
               _categories(result), class_="v")
    return above, chart_value([_scatter(result, request)]), below


def request_of(site: Site, where: Mapping[str, str], runs: Sequence[str]) -> Request:
    """Converts URL parameters to a Request. Without steps, it compares the first and the last evaluation of a run, or
    the last evaluations of two runs. Without a run, it takes the newest run with two evaluations. Raises AppError
    for invalid steps."""
    source = "train" if where.get("source") == "train" else "eval"
    a = where.get("a") or where.get("run") or next((run for run in runs if len(_evaluated(site, run)) > 1), runs[0])
    b = where.get("b") or a
    if source == "train":
        first, second = ((controls.integer(where, f"{name}_step"), controls.integer(where, f"{name}_last"))
                         for name in "ab")
    else:
        steps = [controls.integer(where, f"{name}_step") for name in "ab"]
        if steps[0] is None and a == b:
            steps[0] = min(_evaluated(site, a), default=None)
        first, second = ((step, step) for step in steps)
    return Request(source, (a, b), (first, second), where.get("split") or where.get("set"))


def _evaluated(site: Site, run: str) -> list[int]:
    try:
        return sorted({record["step"] for record in site.library.evals(run)})
    except AppError:
        return []


def _compared(index: Index, request: Request) -> Comparison:
    if request.source == "train":
        first, second = (Span(run, "train", *steps) for run, steps in zip(request.runs, request.steps, strict=True))
        return compare_spans(index, first, second)
    a, b = (Side(run, span[0]) for run, span in zip(request.runs, request.steps, strict=True))
    result = compare(index, a, b, request.split)
    if result.a == result.b:
        raise AppError(f"Both sides are the same evaluation, of {result.a.run} after step {result.a.step}: "
                       "choose another run or step for B.")
    return result


def _way_out(where: Mapping[str, str]) -> str:
    if where.get("source") == "train":
        return ("Training draws every sample once an epoch, so single steps rarely share one. Widen both spans until "
                "each covers an epoch (see curriculum/epoch on the Runs page), leave the last step empty for all that "
                "follow, or compare evaluations, which ask the same samples every time.")
    return ("Choose another run or step. Evaluations share their samples when both runs have the same task, "
            "data.heldout, data.seed and eval.samples; `vlrl eval` adds one for a checkpoint. Training steps can be "
            "compared as well.")


def _form(site: Site, where: Mapping[str, str], runs: Sequence[str]) -> Html:
    request = request_of(site, {k: v for k, v in where.items() if k in ("source", "a", "b", "run")}, runs)
    sources = [("", "evaluations"), ("train", "training steps")]
    fields = [controls.pick("source", "Compare", where.get("source"), sources)]
    usual = f"the run above: {request.runs[0]}" if where.get("run") else f"newest with two: {request.runs[0]}"
    named = {"a": usual, "b": f"as A: {request.runs[0]}"}
    for name, run in zip("ab", request.runs, strict=True):
        fields.append(controls.pick(name, f"{name.upper()}: run", where.get(name), [("", named[name]), *((
            r, r) for r in runs)]))
        if request.source == "train":
            fields += [controls.field(f"{name}_step", "from step", where.get(f"{name}_step"), "number", min=0),
                       controls.field(f"{name}_last", "to step", where.get(f"{name}_last"), "number", min=0)]
        else:
            usual = "first" if name == "a" and request.runs[0] == request.runs[1] else "last"
            fields.append(controls.pick(f"{name}_step", "after step", where.get(f"{name}_step"), [
                ("", usual), *((step, step) for step in _evaluated(site, run))]))
    if request.source == "eval":
        splits = sorted({split for run in set(request.runs) for split in _splits(site, run)})
        usual = "the split above" if where.get("set") else "first of both"
        fields.append(controls.pick("split", "Split", where.get("split"), [("", usual),
                                                                        *((split, split) for split in splits)]))
    return controls.form({"page": "compare", **controls.selection(where)}, *fields, label="What is compared")


def _splits(site: Site, run: str) -> set[str]:
    try:
        return {record["split"] for record in site.library.evals(run)}
    except AppError:
        return set()


def _facts(result: Comparison, request: Request) -> Html:
    a, b = (_side(result, request, place) for place in (0, 1))
    tiles = [("samples on both sides", f"{result.n:,}"), ("B wins", f"{result.wins:,}"),
             ("B loses", f"{result.losses:,}"), ("ties", f"{result.ties:,}"), ("mean of A", _interval(result.mean_a)),
             ("mean of B", _interval(result.mean_b)), ("paired gain, 95 %", _interval(result.gain, sign=True))]
    shares = [(result.wins, "win"), (result.ties, "tie"), (result.losses, "loss")]
    bar = el("div", *(el("i", class_=f"v-{name}", style=f"width:{100 * count / max(result.n, 1):.2f}%")
                      for count, name in shares), class_="v-wlt", role="img",
             aria_label=f"{result.wins} wins, {result.ties} ties, {result.losses} losses of B")
    return el("section", el("p", "A: ", el("b", a), ". B: ", el("b", b), "."), el("div", *(
        el("div", el("span", name), el("b", value), class_="v-tile") for name, value in tiles), class_="v-tiles"),
        bar, el("p", el("b", verdict(result.gain))))


def verdict(gain: Interval) -> str:
    """A sentence that interprets the confidence interval of the gain."""
    if gain.low > 0:
        return "B is better: the interval of the gain leaves out 0."
    if gain.high < 0:
        return "B is worse: the interval of the gain leaves out 0."
    return "No clear difference: the interval of the gain holds 0."


def _side(result: Comparison, request: Request, place: int) -> str:
    side, (first, last) = (result.a, result.b)[place], request.steps[place]
    if request.source == "eval":
        return f"{side.run}, {result.split} after step {side.step}"
    return f"{side.run}, training steps {0 if first is None else first} to {'the last' if last is None else last}"


def _interval(value: Interval, sign: bool = False) -> str:
    return f"{number(value.mean, '.3f', sign)} [{number(value.low, '.3f', sign)}, {number(value.high, '.3f', sign)}]"


def _scatter(result: Comparison, request: Request) -> dict[str, Any]:
    pairs = result.pairs[:MOST_DRAWN // 2] + result.pairs[MOST_DRAWN // 2:][-MOST_DRAWN // 2:]
    low, high = (least([v for pair in pairs for v in (pair.a, pair.b)]) for least in (min, max))
    points = {"mode": "markers", "name": "sample", "x": [pair.a for pair in pairs],
              "y": [pair.b for pair in pairs], "customdata": [query(controls.target(pair.key_b)) for pair in pairs],
              "marker": {"color": color(0), "size": 6, "opacity": 0.6}}
    even = {"mode": "lines", "name": "equal", "x": [low, high], "y": [low, high],
            "hoverinfo": "skip", "showlegend": False, "line": {"dash": "dot", "color": "#888", "width": 1}}
    return figure("compare-pairs", "Reward of each sample: above the line B is better", [points, even], "reward of B",
                  x="reward of A")


def _pair(site: Site, result: Comparison, where: Mapping[str, str]) -> Html:
    if not result.pairs:
        return Html("")
    widest = max(result.pairs, key=lambda p: abs(p.gain))
    pair = next((p for p in result.pairs if p.sample_id == where.get("pair")), widest)
    title = el("h3", "Before and after: ", link({"page": "history", "sample": pair.sample_id}, pair.sample_id,
                                                title="this prompt over the steps"))
    try:
        shown = sides.two_answers(site, sides.best(site, pair.key_a), sides.best(site, pair.key_b), ("A", "B"))
    except AppError as error:  # the run may have replaced its files meanwhile
        shown = note(str(error), kind="warn")
    return el("section", title, shown, id="v-before-after")


def _extremes(result: Comparison, where: Mapping[str, str]) -> Html:
    gains = [pair for pair in result.pairs if pair.gain > 0][:MOST_LISTED]
    losses = [pair for pair in reversed(result.pairs) if pair.gain < 0][:MOST_LISTED]
    head = ("sample", "category", "A", "B", "gain")

    def rows(pairs: Iterable[Any]) -> list[tuple]:
        return [(link({**where, "page": "compare", "pair": p.sample_id}, p.sample_id, title="both answers side by side",
                      data_replace=True), p.category or "–",
                 link(controls.target(p.key_a), number(p.a)), link(controls.target(p.key_b), number(p.b)),
                 number(p.gain, ".3f", sign=True)) for p in pairs]

    parts = [el("section", el("h3", title), table(head, rows(pairs), numeric=(2, 3, 4)) if pairs else
                el("p", "None.", class_="v-dim")) for title, pairs in (("Biggest gains", gains),
                                                                       ("Biggest losses", losses))]
    return el("div", *parts, class_="v-halves")


def _categories(result: Comparison) -> Html:
    if len(result.categories) < 2:
        return Html("")
    rows = [(name or "–", n, wins, losses, ties, number(gain, ".3f", sign=True))
            for name, n, wins, losses, ties, gain in result.categories]
    head = ("category", "samples", "B wins", "B loses", "ties", "mean gain")
    return el("section", el("h3", "Categories"), table(head, rows, numeric=range(1, 6)))


def _parts(index: Index, result: Comparison, request: Request) -> Html:
    a, b = (Span(side.run, request.source, *(steps if request.source == "train" else (side.step, side.step)),
                 split=result.split if request.source == "eval" else None)
            for side, steps in zip((result.a, result.b), request.steps, strict=True))
    rows = [(gain.part, f"{gain.n:,}", number(gain.mean_a, ".3f"), number(gain.mean_b, ".3f"),
             _interval(gain.gain, sign=True)) for gain in part_gains(index, a, b)]
    if not rows:
        return Html("")
    head = ("part", "samples", "A", "B", "paired gain, 95 %")
    return el("section", el("h3", "Parts of the reward"), table(head, rows, numeric=range(1, 5)))
