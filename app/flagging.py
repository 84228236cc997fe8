"""Flags and comments as shown on answer cards and in the list, and the requests of app.js that save them."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import AppError, controls, details
from .details import GroupView, RolloutView
from .html import Html, chip, el, note
from .notes import FLAGS, MOST_TEXT, Label, Note
from .queries import GroupKey, RolloutKey
from .site import Site, query

KINDS = {"good": "good", "bad": "bad", "unsure": "warn"}
"""Flag -> kind (colour) of the label that shows it; see html.chip."""
_LETTERS = {"good": "g", "bad": "b", "unsure": "s"}


def noted(site: Site, run: str | None = None, by: str = "") -> dict[RolloutKey, Note]:
    """Rollout key -> note, for one run or all runs; with `by` only the notes of this annotator. Empty if the notes file
    is unreadable, which the Notes page reports."""
    try:
        return {one.key: one for one in site.notes.all(run=run, by=by)}
    except AppError:
        return {}


def chips(notes: Sequence[Note]) -> list[Html]:
    """Small labels for the notes on one row of the list: how many notes have each flag, and how many only a comment."""
    counts = Counter(one.flag or "comment" for one in notes)
    return [chip(words if count == 1 and len(notes) == 1 else f"{count} {words}", KINDS.get(words, ""), "notes")
            for words, count in counts.items()]


def of_groups(notes: Mapping[RolloutKey, Note]) -> dict[GroupKey, list[Note]]:
    """Group key -> the notes on the rollouts of this group."""
    groups: dict[GroupKey, list[Note]] = {}
    for key, one in notes.items():
        groups.setdefault(GroupKey(*key[:5]), []).append(one)
    return groups


def on_cards(site: Site, view: GroupView, chosen: int | None, after: Mapping[str, Any] | None,
             by: str = "") -> dict[int, Html]:
    """Returns {answer index: HTML of the notes on its card}. The card of the answer `chosen` (else of the first answer)
    has buttons for flags and a comment field. `after` holds the URL parameters of the page to open after flagging.
    With `by`, only the flags of this annotator are shown."""
    notes, own = noted(site, view.key.run, by), own_flags(site, view.key.run, by)
    current = next((r for r in view.rollouts if r.index == chosen), view.rollouts[0] if view.rollouts else None)
    return {r.index: _form(r, own.get(r.key, ""), _comment(site, r.key), after) if r is current else
            el("div", *chips([notes[r.key]]), class_="v-chips") if r.key in notes else Html("") for r in view.rollouts}


def own_flags(site: Site, run: str, by: str) -> dict[RolloutKey, str]:
    """The flags that the annotator `by` has set in a run; empty if the notes file is unreadable."""
    try:
        return {key: flags[by] for key, flags in site.notes.verdicts(run).items() if by in flags}
    except AppError:
        return {}


def _comment(site: Site, key: RolloutKey) -> str:
    try:
        known = site.notes.get(key)
    except AppError:
        return ""
    return known.comment if known else ""


def _form(rollout: RolloutView, flag: str, comment: str, after: Mapping[str, Any] | None) -> Html:
    buttons = [el("button", name, " ", el("kbd", _LETTERS[name]), type="button", data_flag=name,
                  data_key=_LETTERS[name], class_=f"v-flag {KINDS[name]}",
                  aria_pressed="true" if name == flag else "false")
               for name in FLAGS]
    field = el("input", name="comment", value=comment, placeholder="comment (c)", maxlength=str(MOST_TEXT),
               autocomplete="off", aria_label=f"Comment on answer {rollout.index}", data_note=comment)
    return el("form", *buttons, field, class_="v-flags", data_mark=controls.packed(rollout.key),
              data_next=query(after) if after else None, aria_label=f"Note on answer {rollout.index}")


def save_note(site: Site, text: str) -> tuple[Html, str]:
    """Saves a flag or comment from a JSON request of app.js. The request has the keys "key" (of the rollout, see
    controls.packed), "n" (its number), "by" (the annotator), and "flag" or "comment". Returns the error message as
    HTML, empty on success, and the reply to app.js: the number, followed by "failed" on error."""
    try:
        request = json.loads(text or "")
        number, key = int(request["n"]), controls.unpacked(request["key"])
        new = request.get("flag"), request.get("comment")
        by = str(request.get("by") or "").strip()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        number, key, new, by = 0, None, (None, None), ""
    try:
        if key is None or not all(value is None or isinstance(value, str) for value in new):
            raise AppError("The request could not be read: reload the page.")
        view, rollout = answer(site, key)
        site.notes.put(key, flag=new[0], comment=new[1], sample=view.sample_id, reward=rollout.reward, by=by)
    except AppError as error:
        return note(str(error), kind="bad"), f"{number} failed"
    return Html(""), str(number)


def save_label(site: Site, text: str) -> tuple[Html, str]:
    """Saves the tags or the archived state of a run from a JSON request of app.js. The request has the keys "key" (the
    run id), "n" (its number), and "tags" (separated by commas) or "archived". Returns the error message as HTML,
    empty on success, and the reply to app.js: the number, followed by "failed" on error."""
    number = 0
    try:
        request = json.loads(text or "")
        number, run, tags = int(request["n"]), request["key"], request.get("tags")
        archived = {"yes": True, "": False}.get(request.get("archived"))
        site.library.run(run)
        site.notes.label(run, tags=None if tags is None else str(tags).split(","), archived=archived)
    except AppError as error:
        return note(str(error), kind="bad"), f"{number} failed"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return note("The request could not be read: reload the page.", kind="bad"), f"{number} failed"
    return Html(""), str(number)


def label_form(run: str, label: Label) -> Html:
    """The form that edits a run's tags and archived state."""
    tags = ", ".join(label.tags)
    field = el("input", name="tags", value=tags, placeholder="with commas", autocomplete="off", data_note=tags,
               maxlength="2000")
    return el("form", el("label", "tags ", field),
              el("button", "archived" if label.archived else "archive", type="button", data_archived="yes",
                 class_="v-flag warn", aria_pressed="true" if label.archived else "false",
                 title="archived runs are hidden from lists unless asked for"),
              class_="v-flags v-labels", data_mark=run, data_kind="run", aria_label=f"Label of {run}")


def answer(site: Site, key: RolloutKey) -> tuple[GroupView, RolloutView]:
    """Reads one answer; returns its group and the answer. Raises AppError if the group or the answer does not exist."""
    view = details.group(site.library, key.run, key.source, key.step, key.group, key.split)
    for rollout in view.rollouts:
        if rollout.index == key.index:
            return view, rollout
    raise AppError(f"group {key.group!r} of run {key.run!r}, step {key.step}, has no answer {key.index}")
