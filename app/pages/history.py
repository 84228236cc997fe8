"""The History page of a prompt: its rewards over steps and runs, how often it is drawn, and how its answers change."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from .. import AppError, controls
from ..analysis import History, Visit, history
from ..html import Html, el, empty, link, note, number, table
from ..index import RolloutRow
from ..marks import color
from ..queries import GroupKey, Query, RolloutKey
from ..rows import every_rollout
from ..site import Site, chart_value, query
from . import charted, sides
from .charted import figure, label, remarks_on

MOST_ANSWERS = 5_000
"""Largest number of answers plotted."""
_SUGGESTED = 40
_OFFERED = 200
"""Largest number of answers offered for comparison. If there are more, only the best of each group is offered."""


def build(site: Site) -> None:
    """Adds the page to the app."""
    charted.build(site, show)


def show(site: Site, where: Mapping[str, str]) -> charted.PlotPage:
    """The content of the page for these URL parameters."""
    sample, run = where.get("sample", ""), where.get("run")
    if not site.library.runs():
        return charted.no_runs()
    searched = tuple([run] if run else [])
    form = controls.form(
        {"page": "history", **controls.selection(where)}, controls.field("sample", "Sample id", sample, "search"),
        label="Whose history")
    try:
        if not sample:
            return el("div", form, _begin(site, searched), class_="v"), chart_value([]), Html("")
        return _shown(site, where, form, history(site.index, sample, searched))
    except AppError as error:
        return el("div", form, empty(str(error), "Choose another run or sample."), class_="v"), chart_value(
            []), Html("")


def _shown(site: Site, where: Mapping[str, str], form: Html, visited: History) -> tuple[Html, str, Html]:
    searched = tuple([where["run"]] if where.get("run") else [])
    remarks = remarks_on(site, searched, visited.notes)
    if not visited.visits:
        there = f" of run {where['run']}" if searched else ""
        nothing = empty(f"No answer to the sample {visited.sample_id!r} in the rollouts{there}.", "An id is written as "
                        "in the data, upper and lower case matter. Below are some that are there.")
        return el("div", form, *remarks, nothing, _begin(site, searched), class_="v"), chart_value([]), Html("")
    same = {visit.key for visit in visited.visits}  # other runs may use the id for another sample
    every = answers_of(site, visited.sample_id, searched)
    rows = [row for row in every if row.key[:-1] in same]
    cut = note(f"The first {MOST_ANSWERS:,} of its answers are drawn.") if len(every) >= MOST_ANSWERS else ""
    above = el("div", form, _summary(visited), cut, *remarks, class_="v")
    below = el("div", _two_answers(site, where, rows), _visits(visited), class_="v")
    return above, chart_value(figures(visited, rows)), below


def samples_of(site: Site, runs: tuple[str, ...]) -> list[str]:
    """Ids of samples to suggest: those whose groups have the largest spread of rewards."""
    page = site.index.groups(Query(runs=runs, order="mixed"), size=4 * _SUGGESTED)
    return list(dict.fromkeys(row.sample_id for row in page.rows))[:_SUGGESTED]


def answers_of(site: Site, sample: str, runs: tuple[str, ...]) -> list[RolloutRow]:
    """The answers to a sample, sorted by run, then by step."""
    rows = every_rollout(site.index, Query(runs=runs, sample_id=sample, descending=False), MOST_ANSWERS)
    return sorted(rows, key=lambda row: (row.key.run, row.key.step, row.key.source, row.key.group, row.key.index))


def _begin(site: Site, runs: tuple[str, ...]) -> Html:
    known = samples_of(site, runs)
    if not known:
        return empty("No rollouts are stored yet.", "They appear here with the first finished step "
                     "(store.rollouts must not be off).")
    links = (el("li", link({"page": "history", "sample": sample}, sample)) for sample in known)
    return el("section", el("h3", "Prompts whose answers differ most"), el("ul", *links, class_="v-list"))


def _summary(visited: History) -> Html:
    by_run: dict[str, list[Visit]] = {}
    for visit in visited.visits:
        if visit.key.source == "train":
            by_run.setdefault(visit.key.run, []).append(visit)
    words = [el("li", el("b", run), f": {len(visits)} visit{'s' if len(visits) > 1 else ''} in training, mean reward ",
                number(visits[0].mean), " → ", number(visits[-1].mean), ", pass rate ", number(visits[-1].pass_rate),
                f", drawn {weight:.2g} times as often as the mean sample" if (weight := visits[-1].weight) is not None
                else "") for run, visits in by_run.items()]
    words = words or [el("li", "Only evaluations asked it; training has not drawn it.")]
    return el("section", el("h3", "Sample ", visited.sample_id), el("ul", *words, class_="v-list"))


def figures(visited: History, rows: Sequence[RolloutRow]) -> list[dict[str, Any]]:
    """Plots of a sample's History and its answers `rows` over the steps, one colour per run: the reward of every
    answer, the pass rate of each group of answers, and how often the sample is drawn."""
    runs = list(dict.fromkeys(visit.key.run for visit in visited.visits))
    rewards: list[dict[str, Any]] = []
    passes: list[dict[str, Any]] = []
    weights: list[dict[str, Any]] = []
    for i, run in enumerate(runs):
        tone = color(i)
        for source, words in (("train", ""), ("eval", " (evaluation)")):
            mine = [row for row in rows if row.key.run == run and row.key.source == source and row.reward is not None]
            visits = [visit for visit in visited.visits if visit.key.run == run and visit.key.source == source]
            symbol, dash = ("circle", "solid") if source == "train" else ("diamond", "dot")
            name = f"{run}{words}"
            if mine:
                rewards.append(_trace(name, [(row.key, row.reward) for row in mine], tone, mode="markers",
                                      showlegend=False, marker={"color": tone, "size": 6, "opacity": 0.55,
                                                                "symbol": symbol}))
            if visits:
                line = {"line": {"color": tone, "dash": dash, "width": 2}, "mode": "lines+markers",
                        "marker": {"size": 5, "symbol": symbol}}
                rewards.append(_trace(f"{name}, mean", [(v.key, v.mean) for v in visits], tone, **line))
                passes.append(_trace(name, [(v.key, v.pass_rate) for v in visits], tone, **line))
            if any(v.weight is not None for v in visits):
                weights.append(_trace(name, [(v.key, v.weight) for v in visits], tone, mode="lines+markers",
                                      line={"color": tone, "shape": "hv"}))
    plots = [figure("history-reward", "Reward of every answer", rewards, "reward"),
             figure("history-pass", "Pass rate of each visit", passes, "share of answers", range=[-0.04, 1.04])]
    if weights:
        plots.append(figure("history-weight", "Curriculum weight: visits, against the mean sample", weights, "times"))
    return plots


def _trace(name: str, points: Sequence[tuple[Any, float | None]], tone: str, **more: Any) -> dict[str, Any]:
    return {"name": label(name), "x": [key.step for key, _ in points],
            "y": [value for _, value in points], "customdata": [query(controls.target(key)) for key, _ in points],
            "marker": {"color": tone}, **more}


def _two_answers(site: Site, where: Mapping[str, str], rows: Sequence[RolloutRow]) -> Html:
    """Two answers on the image and as a word diff: those in the URL parameters, else those that `_usual` chooses."""
    if not rows:  # the run replaced its files meanwhile
        return Html("")
    a, b = _usual(rows, *(controls.unpacked(where.get(name)) for name in "ab"))
    if b is None:
        return note("This sample has only one answer: there is no second one to compare it with.")
    shown = {row.key for row in _best(rows)} | {a, b} if len(rows) > _OFFERED else {row.key for row in rows}
    offered = {row.key: row for row in rows if row.key in shown}
    keep = {"page": "history", "sample": where.get("sample"), **controls.selection(where)}
    options = [(controls.packed(key), f"{key.run}, {_when(key)}, #{key.index}: {number(row.reward)}")
               for key, row in offered.items()]
    form = controls.form(keep, controls.pick("a", "First answer", controls.packed(a), options),
                         controls.pick("b", "Second answer", controls.packed(b), options), label="Which two answers")
    if a == b:
        difference = note("Both are the same answer: choose another one to see what changed.")
    else:
        difference = sides.two_answers(site, a, b)
    return el("section", el("h3", "Two answers side by side"), form, difference)


def _usual(rows: Sequence[RolloutRow], a: RolloutKey | None, b: RolloutKey | None
           ) -> tuple[RolloutKey, RolloutKey | None]:
    """Returns the keys of two different answers to compare; the second key is None if there is only one answer. An `a`
    or `b` that is not None is kept. By default, the answers are the best ones of the first and of the last group, in
    the run with the most groups. For a single group, they are the best and the worst answer of this group."""
    best = _best(rows)
    run = Counter(row.key.run for row in best).most_common(1)[0][0]
    keys = [row.key for row in best if row.key.run == run]
    last = [row for row in rows if row.group == keys[-1][:-1]]
    worst = sorted(last, key=lambda row: (row.reward is None, row.reward))
    order = [keys[0], keys[-1], *(row.key for row in worst), *(row.key for row in rows)]
    a = a or next((key for key in order if key != b), order[0])
    return a, b or next((key for key in order[1:] if key != a), None)


def _best(rows: Sequence[RolloutRow]) -> list[RolloutRow]:
    best: dict[GroupKey, RolloutRow] = {}
    for row in rows:
        previous = best.get(row.group)
        if previous is None or (row.reward is not None and (previous.reward is None or row.reward > previous.reward)):
            best[row.group] = row
    return list(best.values())


def _when(key: RolloutKey) -> str:
    return f"step {key.step}" if key.source == "train" else f"{key.split} at {key.step}"


def _visits(visited: History) -> Html:
    rows = [(visit.key.run, link(controls.target(visit.key), f"{visit.key.step}"),
             "training" if visit.key.source == "train" else f"evaluation of {visit.key.split}", visit.n,
             number(visit.mean), number(visit.std), number(visit.best), number(visit.worst), number(visit.pass_rate))
            for visit in visited.visits]
    head = ("run", "step", "asked in", "answers", "mean", "std", "best", "worst", "pass rate")
    return el("section", el("h3", "Visits"), table(head, rows, numeric=range(3, 9)))
