"""The Notes page: flag and comment on a rollout, the list of all notes, and exports of selected rollouts."""

import datetime
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder

from .. import AppError, controls, exports, filters, flagging, notes
from ..html import Html, chip, el, empty, folded, join, link, note, number, table
from ..notes import FLAGS, MOST_TEXT, Note
from ..queries import RolloutKey
from ..rows import every_rollout
from ..site import Site, same

MOST_LISTED = 500
_FORMS = [("JSON lines: texts, rewards, parts", "jsonl"), ("Parquet: every column, tokens too", "parquet"),
          ("A set for vlrl sft: rows with these answers, and their media", "sft")]
_WHICH = [("the notes listed above", "notes"), ("what the filters of the Rollouts page keep", "filter")]


def build(site: Site) -> None:
    """Adds the page to the app."""
    fixed = gr.HTML(apply_default_css=False)
    with gr.Column(visible=False, elem_id="v-note-editor") as editor:
        what = gr.HTML(apply_default_css=False)
        flag = gr.Radio([("no flag", ""), *((name, name) for name in FLAGS)], value="", label="Flag")
        comment = gr.Textbox(label="Comment", lines=3, max_length=MOST_TEXT)
        save = gr.Button("Save the note", variant="primary", elem_id="v-note-save")
        saved = gr.HTML(apply_default_css=False)
    form_html = gr.HTML(apply_default_css=False)
    listed = gr.HTML(elem_id="v-notes", apply_default_css=False)
    with gr.Accordion("Export", open=False, elem_id="v-export") as export:
        which = gr.Radio(_WHICH, value="notes", label="Which rollouts")
        form = gr.Radio(_FORMS, value="jsonl", label="As what")
        make = gr.Button("Make the file", elem_id="v-export-make")
        file = gr.DownloadButton("Download", interactive=False, elem_id="v-export-file")
        remark_html = gr.HTML(apply_default_css=False)
    place, loaded, digests = gr.State({}), gr.State(("", "")), site.digests(2)

    def show(where: dict[str, str], last: dict[str, str]) -> tuple[Any, ...]:
        editing = opened_note(site, where)
        words, remark = editing or (Html(""), None)
        problem = site.notes.problem()
        loaded_values = (remark.flag, remark.comment) if remark else ("", "")
        head, rows, *new = same([""] * 2, form_and_list(site, where))
        return (gr.update(visible=editing is not None), words, *loaded_values, "",
                note(problem, kind="bad") if problem else Html(""), head, rows,
                *_opened(where.get("pick"), last.get("pick")), where, loaded_values, *new)

    def tick(where: dict[str, str], *before: str) -> tuple[Any, ...]:
        return same(before, form_and_list(site, where))

    def keep(where: dict[str, str], flag: str, comment: str, loaded_values: tuple[str, str]) -> tuple[Any, ...]:
        words, loaded_values = saved_note(site, where, flag or "", comment or "", loaded_values)
        head, rows, *new = same([""] * 2, form_and_list(site, where))
        return words, loaded_values, head, rows, *new

    def write(where: dict[str, str], which: str, form: str) -> tuple[Any, str]:
        path, words = exported(site, where, which, form)
        return gr.update(value=str(path), label=f"Download {path.name}", interactive=True), words

    site.on_location(show, [editor, what, flag, comment, saved, fixed, form_html, listed, export, which, place, loaded,
                            *digests], [place])
    site.on_tick(tick, [form_html, listed, *digests], digests)
    site.on(save.click, keep, [place, flag, comment, loaded], [saved, loaded, form_html, listed, *digests], queue=False)
    site.on(make.click, write, [place, which, form], [file, remark_html], queue=False)


def _opened(pick: str | None, last: str | None) -> tuple[Any, Any]:
    if pick == last:
        return gr.skip(), gr.skip()
    filtered = pick == "filter"
    return gr.update(open=filtered), gr.update(value="filter" if filtered else "notes")


def opened_note(site: Site, where: Mapping[str, str]) -> tuple[Html, Note | None] | None:
    """Returns a heading for the rollout that the URL parameters name, and the note on this rollout (None if it has no
    note). Returns None if the parameters name no rollout. Raises AppError if the rollout does not exist."""
    key = controls.rollout_of(where)
    if key is None:
        return None
    view, rollout = flagging.answer(site, key)
    words = el("section", el("h3", "Answer ", link(controls.target(key), f"#{key.index} of group {key.group}"),
                             f", {key.run}, step {key.step}"),
               el("p", el("span", "sample ", link({"page": "history", "sample": view.sample_id}, view.sample_id)),
                  el("span", "reward ", el("b", number(rollout.reward))), class_="v-facts"),
               folded(rollout.completion, 600), class_="v")
    return words, _readable(site, key)


def _readable(site: Site, key: RolloutKey) -> Note | None:
    try:
        return site.notes.get(key)
    except AppError:  # reported at the top of the page
        return None


def saved_note(site: Site, where: Mapping[str, str], flag: str, comment: str,
               loaded: tuple[str, str]) -> tuple[Html, tuple[str, str]]:
    """Saves the flag and the comment if they differ from `loaded`; returns a message and the new (flag, comment).
    `loaded` holds the (flag, comment) that the page showed first. A field that was not edited is not saved, so that a
    change made in another browser tab survives."""
    key = controls.rollout_of(where)
    if key is None:
        raise AppError("Open a rollout first, through its card on the Rollouts page.")
    view, rollout = flagging.answer(site, key)
    stored = site.notes.put(key, flag=flag if flag != loaded[0] else None,
                            comment=comment if comment != loaded[1] else None,
                            sample=view.sample_id, reward=rollout.reward, by=where.get("by", ""))
    back = link(controls.target(key), "Back to the group")
    return el("p", "Saved. " if stored else "The note is empty and gone. ", back, class_="v v-dim", role="status"), (
        flag, comment)


def form_and_list(site: Site, where: Mapping[str, str]) -> tuple[Html, Html]:
    """The filter form and the list of notes. Both are empty if the notes file is unreadable, which is reported at the
    top of the page."""
    try:
        every, rows = site.notes.all(), listed_notes(site, where)
    except AppError:
        return Html(""), Html("")
    form = controls.form(
        {"page": "notes", **controls.selection(where)}, controls.field("find", "Find in comments or samples",
                                                                  where.get("find"), "search"),
        controls.pick("mark", "Flag", where.get("mark"), [("", "any"), *((name, name) for name in FLAGS)]),
        label="Which notes")
    if not every:
        return Html(""), empty("There are no notes yet.", "Open an answer on the Rollouts page and follow “note” above "
                               "it: flag it as good, bad or unsure (g, b, s), and say why.")
    if not rows:
        return form, empty("No note fits these filters.", "Widen them above.")
    more = len(rows) - MOST_LISTED
    left = note(f"{more:,} older notes are not listed; exports have them.") if more > 0 else ""
    head = ("flag", "comment", "sample", "run", "step", "answer", "reward", "changed")
    lines = [_line(remark) for remark in rows[:MOST_LISTED]]
    return form, el("div", table(head, lines, numeric=(4, 6)), left, _agreement(site), class_="v")


def _agreement(site: Site) -> Html:
    pairs = notes.pairs(site.notes.verdicts().values())
    if not pairs:
        return Html("")
    rows = [(pair.a or "no name", pair.b or "no name", pair.n, f"{pair.same / pair.n:.0%}",
             "–" if pair.kappa is None else number(pair.kappa)) for pair in pairs]
    why = note("Kappa is the agreement beyond chance: 1 means full agreement, 0 as much as by chance. It is – if both "
               "annotators used only one flag.")
    head = ("annotator", "and", "answers both flagged", "the same flag", "Cohen's kappa")
    return el("section", el("h3", "Agreement"), table(head, rows, numeric=(2, 3, 4)), why)


def listed_notes(site: Site, where: Mapping[str, str]) -> list[Note]:
    """The notes that pass the filters in the URL parameters."""
    return site.notes.all(run=None if "group" in where else where.get("run"), flag=where.get("mark"),
                          text=where.get("find", ""), by=where.get("by", ""))


def _line(remark: Note) -> tuple[Any, ...]:
    key = remark.key
    return (chip(remark.flag, flagging.KINDS.get(remark.flag, "")) if remark.flag else "",
            folded(remark.comment, 300) if remark.comment else "",
            link({"page": "history", "sample": remark.sample}, remark.sample), key.run, key.step,
            join([link(controls.target(key), f"open #{key.index}"), link(controls.target(key, "notes"), "edit")], " "),
            number(remark.reward), _date(remark.changed))


def _date(seconds: float) -> str:
    try:
        return datetime.datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M")
    except (OverflowError, OSError, ValueError):
        return "–"


def exported(site: Site, where: Mapping[str, str], which: str, form: str) -> tuple[Path, Html]:
    """Writes rollouts to a file of this `form` (see exports.FORMS): the rollouts of the listed notes, or with
    `which`="filter" those that pass the filters of the Rollouts page. Returns the file and a summary. Raises
    AppError if no rollout is selected."""
    chosen = _filtered_notes(site, where) if which == "filter" else listed_notes(site, where)
    if not chosen:
        raise AppError("No rollout is selected: flag rollouts first, or relax the filters.")
    unsure = []
    if form == "sft" and which == "notes" and not where.get("mark"):
        unsure = [remark for remark in chosen if remark.flag != "good"]
        chosen = [remark for remark in chosen if remark.flag == "good"]
        if not chosen:
            raise AppError("No answer is flagged good, which a data set for vlrl sft needs: flag answers "
                           "good, or select another flag above.")
    folder = Path(get_upload_folder())
    folder.mkdir(parents=True, exist_ok=True)
    archive = exports.export(form, site.library, site.media, chosen, Path(tempfile.mkdtemp(dir=folder)),
                             bad=where.get("mark") == "bad")
    size = archive.path.stat().st_size / 2**20
    lines = [note(words, kind="warn") for words in archive.left_out[:20]]
    lines += [note(f"{len(unsure):,} answers that are not flagged good are left out; select a flag above to export "
                   "others.")] if unsure else []
    more = len(archive.left_out) - len(lines)
    lines += [note(f"and {more:,} more")] if more > 0 else []
    summary = el("p", f"{archive.rows:,} of {len(chosen):,} rollouts, {size:.1f} MiB.", role="status")
    return archive.path, el("div", summary, *lines, class_="v")


def _filtered_notes(site: Site, where: Mapping[str, str]) -> list[Note]:
    remarks = {remark.key: remark for remark in site.notes.all(by=where.get("by", ""))}
    rows = every_rollout(site.index, filters.site_query(site, where), exports.MOST_ROWS + 1)
    return [remarks.get(row.key) or Note(row.key, sample=row.sample_id, reward=row.reward) for row in rows]
