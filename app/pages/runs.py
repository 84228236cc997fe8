"""The Runs page: diagnosis, state, curves, and the settings in which two runs differ."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gradio as gr

from vlrl.monitoring.progress import duration

from .. import AppError, flagging, plots
from ..controls import field
from ..diagnosis import Finding, diagnose
from ..evidence import Reader
from ..html import Html, as_json, chip, el, empty, join, link, note, number, table
from ..library import RunInfo
from ..marks import color
from ..notes import Label
from ..site import Site, chart_value, charts, packed, same, unpacked

MOST_RUNS = 300
MOST_CHOSEN = 8
MOST_JUDGED = 3
_SMOOTH = 0.6
_KINDS = {"running": "good", "failed": "bad", "stale": "warn", "interrupted": "warn"}
_NUMBERS = ("step", "reward", "duration")
_HEAD = ("", "run", "state", "task", "model", "step", "reward", "duration", "started")
_SORTS: Mapping[str, Callable[[RunInfo], Any]] = {
    "run": lambda r: r.id.lower(), "state": lambda r: r.state, "task": lambda r: r.task, "model": lambda r: r.model,
    "step": lambda r: r.step, "reward": lambda r: r.reward, "duration": lambda r: r.duration_s,
    "started": lambda r: r.started}
_DOWN_FIRST = ("step", "reward", "duration", "started")
_MOST_DIFFERENCES = 6


def build(site: Site) -> None:
    """Adds the page to the app."""
    wrong = gr.HTML(elem_id="v-wrong", apply_default_css=False)
    gr.HTML(_form(), elem_id="v-runs-form", apply_default_css=False, js_on_load="vlrl.form(watch)")
    listed = gr.HTML(elem_id="v-runs", apply_default_css=False)
    plots = charts("v-curves")
    below = gr.HTML(elem_id="v-diff", apply_default_css=False)
    mark = gr.HTML("", elem_classes="v-hidden", js_on_load="vlrl.marks(props, 'run')")
    said = gr.HTML(apply_default_css=False)
    marked = gr.HTML("", elem_classes="v-hidden", js_on_load="vlrl.marked(props, watch)")
    digests, reader = site.digests(4), Reader(site.library)

    def show(where: dict[str, str], *before: str) -> tuple[Any, ...]:
        return same(before, shown(site, reader, where))

    site.on_location(show, [wrong, listed, plots, below, *digests], digests)
    site.on_tick(show, [wrong, listed, plots, below, *digests], digests)
    site.on(mark.change, lambda text: flagging.save_label(site, text), [mark], [said, marked], queue=False,
            show_progress="hidden", trigger_mode="multiple")


def shown(site: Site, reader: Reader, where: Mapping[str, str]) -> tuple[str, str, str, str]:
    """The parts of the page for these URL parameters: diagnosis, list of runs, plots, and the HTML below the plots."""
    runs = site.library.runs()
    if not runs:
        return "", _nothing(site), "", ""
    labels, known = site.labels(), [run.id for run in runs]
    begins = [run for run in known if not labels.get(run, Label()).archived]
    requested = unpacked(where.get("runs")) or ((where["run"],) if where.get("run") else ())
    chosen = [run for run in dict.fromkeys(requested) if run in known][:MOST_CHOSEN] if requested else begins[:1]
    try:
        smooth = min(0.99, max(0.0, float(where.get("smooth", _SMOOTH))))
    except ValueError:
        smooth = _SMOOTH
    figures = plots.over_steps(site.library, chosen, smooth, where.get("others") == "yes")
    return _wrong(site, reader, runs, chosen, labels), _list(runs, chosen, where, labels), chart_value(figures), join([
        *_missing(site, requested, known), _below(site, chosen, bool(figures))])


def _missing(site: Site, requested: Sequence[str], known: Sequence[str]) -> list[Html]:
    lines = []
    for run in dict.fromkeys(requested):
        if run not in (*known, "-"):
            try:
                site.library.path(run)
            except AppError as error:
                lines.append(note(str(error), kind="bad"))
    return lines[:MOST_CHOSEN]


def _nothing(site: Site) -> Html:
    return empty(join([f"There is no run in {site.library.root} yet. Make one in a minute, on a CPU:",
                       el("pre", "vlrl train configs/quickstart.yaml")]),
                 "It appears here by itself once it has started.")


def _wrong(site: Site, reader: Reader, runs: Sequence[RunInfo], chosen: Sequence[str],
           labels: Mapping[str, Label]) -> Html:
    left = chosen[MOST_JUDGED:]
    more = el("p", f"Not diagnosed: {', '.join(left)}. Select at most {MOST_JUDGED} runs.", class_="v v-dim")
    infos = {run.id: run for run in runs}
    said = {run: [*remaining_time(infos[run]), *diagnose(reader.of(run)), *changed_settings(site, runs, infos[run])]
            for run in chosen[:MOST_JUDGED]}
    return join([*(_findings(run, findings, flagging.label_form(run, labels.get(run, Label())))
                   for run, findings in said.items()), more if left else ""])


def remaining_time(run: RunInfo) -> list[Finding]:
    """Returns a list with a finding on the remaining time of a run, from the speed of its last steps; [] if unknown."""
    if run.state != "running" or run.eta_s is None or run.steps is None:
        return []
    return [Finding("", f"About {duration(run.eta_s)} remain: {run.step or 0:,} of {run.steps:,} steps are done.")]


def changed_settings(site: Site, runs: Sequence[RunInfo], run: RunInfo) -> list[Finding]:
    """Returns a list with a finding on the settings changed since the task's previous run; [] for the first run."""
    earlier = [r for r in runs if r.task == run.task and r.id != run.id and not r.part_of and not run.part_of
               and (r.started or 0.0) <= (run.started or 0.0)]
    if not earlier or not run.task:
        return []
    before = max(earlier, key=lambda r: r.started or 0.0)
    changed = [f"{name} {as_json(old)[:60]} → {as_json(new)[:60]}" for name, old, new in
               site.library.diff(before.id, run.id)]
    more = len(changed) - _MOST_DIFFERENCES
    said = "; ".join(changed[:_MOST_DIFFERENCES]) + (f"; and {more} more" if more > 0 else "")
    return [Finding("", f"Settings that differ from {before.id}, the previous run of this task: {said}." if changed else
                    f"All settings equal those of {before.id}, the previous run of this task.", "",
                    {"page": "compare", "a": before.id, "b": run.id})]


def _findings(run: str, findings: Sequence[Finding], label: Html) -> Html:
    lines = []
    for finding in findings:
        to = link(finding.where, "compare them" if finding.where["page"] == "compare" else "its groups"
                  ) if finding.where else ""
        lines.append(el("li", join([finding.words, el("span", finding.do, class_="v-dim") if finding.do else "", to],
                                   " "), class_=f"v-finding {finding.kind}".strip()))
    said = el("ul", *lines, class_="v-findings") if lines else el(
        "p", "Nothing unusual in the records of this run so far.", class_="v-dim")
    return el("section", el("h3", "What is wrong here? ", el("span", run, class_="v-dim")), said, label, class_="v",
              aria_label=f"What is wrong with {run}")


def _list(runs: Sequence[RunInfo], chosen: Sequence[str], where: Mapping[str, str],
          labels: Mapping[str, Label]) -> Html:
    words = where.get("find", "").lower().split()
    offered = [r for r in runs if where.get("archived") == "yes" or r.id in chosen
               or not labels.get(r.id, Label()).archived]
    matching = [r for r in offered if r.id in chosen or all(w in _search_text(r, labels) for w in words)]
    by, down = where.get("by", ""), where.get("way") != "up"
    if by in _SORTS:  # stages stand by their own numbers then
        known = [run for run in matching if _SORTS[by](run) is not None]
        matching = [*sorted(known, key=_SORTS[by], reverse=down), *(r for r in matching if _SORTS[by](r) is None)]
    lines = [_line(run, chosen, where, labels.get(run.id, Label())) for run in matching[:MOST_RUNS]]
    head = el("tr", *(_heading(name, by, down, where) for name in _HEAD))
    grid = el("table", el("thead", head), el("tbody", *lines), class_="v-table v-runs")
    left = [f"{len(matching) - MOST_RUNS} more; find them by name."] if len(matching) > MOST_RUNS else []
    left += ["No run fits what you look for."] if not matching else []
    hidden = len(runs) - len(offered)
    left += [f"{hidden} archived, not listed: tick “archived” above."] if hidden else []
    return el("div", el("div", grid, class_="v-scroll"), *(el("p", w, class_="v-dim") for w in left), class_="v")


def _search_text(run: RunInfo, labels: Mapping[str, Label]) -> str:
    return " ".join([run.id, run.task, run.model, run.state, *labels.get(run.id, Label()).tags]).lower()


def _heading(name: str, by: str, down: bool, where: Mapping[str, str]) -> Html:
    if name not in _SORTS:
        return el("th", el("span", "curves", class_="v-unseen"), scope="col")
    way = ("up" if down else "down") if name == by else "down" if name in _DOWN_FIRST else "up"
    arrow = (" ↓" if down else " ↑") if name == by else ""
    return el("th", link({**where, "page": "runs", "by": name, "way": way}, name, arrow, data_replace=True),
              class_="v-num" if name in _NUMBERS else None, scope="col",
              aria_sort=("descending" if down else "ascending") if name == by else None)


def _line(run: RunInfo, chosen: Sequence[str], where: Mapping[str, str], label: Label) -> Html:
    on = run.id in chosen
    named = chosen if where.get("runs") or where.get("run") else []  # by default the newest run is shown
    others = [r for r in named if r != run.id] if on else [*named, run.id][-MOST_CHOSEN:]
    paint = f"background:{color(chosen.index(run.id))}" if on else None
    toggle = link({**where, "page": "runs", "runs": packed(others) or "-"}, el("i", class_="v-swatch", style=paint),
                  class_="v-choose", data_replace=True, role="checkbox", aria_checked="true" if on else "false",
                  aria_label=f"curves of {run.id}", title="show or hide its curves")
    name = f"↳ {run.path.name}" if run.part_of else run.id if run.id != "." else run.path.name
    opens = link({"page": "rollouts", "run": run.id}, name, title=f"rollouts of {run.id}")
    begun = datetime.datetime.fromtimestamp(run.started).strftime("%Y-%m-%d %H:%M") if run.started else "–"
    left = f"{duration(run.eta_s)} left" if run.eta_s is not None else ""
    state = join([chip(run.state, _KINDS.get(run.state, "")), el("span", left, class_="v-dim") if left else ""], " ")
    warned = chip("!", "warn", "\n".join(run.notes[:20])) if run.notes else ""
    steps = f"{'–' if run.step is None else run.step}/{'–' if run.steps is None else run.steps}"
    tags = [link({**where, "page": "runs", "find": tag}, tag, class_="v-chip", data_replace=True,
                 title="runs with this tag") for tag in label.tags]
    tags += [chip("archived", "warn")] if label.archived else []
    cells = [toggle, join([opens, *tags], " "), join([state, warned], " "), run.task, run.model, steps,
             number(run.reward), duration(run.duration_s) if run.duration_s is not None else "–", begun]
    styles = ["", "v-name", "", "", "v-model", "v-num", "v-num", "v-num", "v-began"]
    return el("tr", *(el("td", cell, class_=style or None) for cell, style in zip(cells, styles, strict=True)),
              class_="v-on" if on else None)


def _form() -> Html:
    slider = el("label", el("span", "Smoothing"), el("input", type="range", name="smooth", min="0", max="0.98",
                                                     step="0.02", data_default=str(_SMOOTH), value=str(_SMOOTH)),
                class_="v-field")
    more = el("label", el("input", type="checkbox", name="others", value="yes"), " every metric", class_="v-check")
    old = el("label", el("input", type="checkbox", name="archived", value="yes"), " archived", class_="v-check")
    return el("form", field("find", "Find a run or a tag", "", "search"), old, slider, more, class_="go v v-form",
              data_drop="", aria_label="What is shown")


def _below(site: Site, chosen: Sequence[str], curves: bool) -> Html:
    pieces: list[Any] = []
    if not chosen:
        pieces.append(empty("No run is selected.", "Select one or several in the list to see their curves."))
    elif not curves:
        pieces.append(empty("No step is finished yet.", "Curves appear here with the first one."))
    for run in chosen:
        pieces += [note(f"{run}: {words}", kind="warn") for words in site.library.notes(run)[:10]]
    if len(chosen) >= 2:
        pieces += _diff(site, chosen[0], chosen[1])
    return el("div", *pieces, class_="v") if pieces else Html("")


def _diff(site: Site, a: str, b: str) -> list[Any]:
    rows = [(name, as_json("–" if x is None else x), as_json("–" if y is None else y)) for name, x, y in
            site.library.diff(a, b)]
    title = el("h3", "Settings that differ")
    answers = el("p", link({"page": "compare", "a": a, "b": b}, "Compare their answers on the same samples"))
    if not rows:
        return [title, el("p", f"{a} and {b} have the same settings.", class_="v-dim"), answers]
    return [title, table(("setting", a, b), rows), answers]
