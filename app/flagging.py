"""Flags and comments where the answers are: what stands on a card and in the list, and what a key writes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from . import AppError, controls, details
from .details import GroupView, RolloutView
from .html import Html, chip, el, note
from .notes import FLAGS, MOST_TEXT, Note
from .queries import GroupKey, RolloutKey
from .site import Site, query

KINDS = {"good": "good", "bad": "bad", "unsure": "warn"}
"""Flag -> kind of its chip."""
_LETTERS = {"good": "g", "bad": "b", "unsure": "s"}


def noted(site: Site, run: str | None = None) -> dict[RolloutKey, Note]:
    """Returns the notes of one run or of all; none where the file of notes cannot be read, which the Notes page says.
    """
    try:
        return {one.key: one for one in site.notes.all(run=run)}
    except AppError:
        return {}


def chips(notes: Sequence[Note]) -> list[Html]:
    """Returns what a row of the list says of the notes on its answers."""
    counts = Counter(one.flag or "comment" for one in notes)
    return [chip(words if count == 1 and len(notes) == 1 else f"{count} {words}", KINDS.get(words, ""), "notes")
            for words, count in counts.items()]


def of_groups(notes: Mapping[RolloutKey, Note]) -> dict[GroupKey, list[Note]]:
    """Returns the notes by the group of their answer."""
    groups: dict[GroupKey, list[Note]] = {}
    for key, one in notes.items():
        groups.setdefault(GroupKey(*key[:5]), []).append(one)
    return groups


def on_cards(site: Site, view: GroupView, chosen: int | None, after: Mapping[str, Any] | None) -> dict[int, Html]:
    """Returns what stands at the top of the cards: on the chosen one (else the first) buttons and a comment, on others
    their notes. `after` is the location that a flag leads to.
    """
    notes = noted(site, view.key.run)
    current = next((r for r in view.rollouts if r.index == chosen), view.rollouts[0] if view.rollouts else None)
    return {r.index: _form(r, notes.get(r.key), after) if r is current else
            el("div", *chips([notes[r.key]]), class_="v-chips") if r.key in notes else Html("") for r in view.rollouts}


def _form(rollout: RolloutView, known: Note | None, after: Mapping[str, Any] | None) -> Html:
    flag, comment = (known.flag, known.comment) if known else ("", "")
    buttons = [el("button", name, " ", el("kbd", _LETTERS[name]), type="button", data_flag=name,
                  data_key=_LETTERS[name], class_=f"v-flag {KINDS[name]}",
                  aria_pressed="true" if name == flag else "false")
               for name in FLAGS]
    field = el("input", name="comment", value=comment, placeholder="comment (c)", maxlength=str(MOST_TEXT),
               autocomplete="off", aria_label=f"Comment on answer {rollout.index}", data_note=comment)
    return el("form", *buttons, field, class_="v-flags", data_mark=controls.packed(rollout.key),
              data_next=query(after) if after else None, aria_label=f"Note on answer {rollout.index}")


def written(site: Site, text: str) -> tuple[Html, str]:
    """Writes what app.js asks for, JSON of "key" (controls.packed), "n", and "flag" or "comment". Returns what went
    wrong, and n, behind it "failed" if so.
    """
    try:
        asked = json.loads(text or "")
        number, key, new = int(asked["n"]), controls.unpacked(asked["key"]), (asked.get("flag"), asked.get("comment"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        number, key, new = 0, None, (None, None)
    try:
        if key is None or not all(value is None or isinstance(value, str) for value in new):
            raise AppError("A note could not be read: load the page again.")
        view, rollout = answer(site, key)
        site.notes.put(key, flag=new[0], comment=new[1], sample=view.sample_id, reward=rollout.reward)
    except AppError as error:
        return note(str(error), kind="bad"), f"{number} failed"
    return Html(""), str(number)


def answer(site: Site, key: RolloutKey) -> tuple[GroupView, RolloutView]:
    """Returns one answer and its group. Raises AppError when it is not there."""
    view = details.group(site.library, key.run, key.source, key.step, key.group, key.split)
    for rollout in view.rollouts:
        if rollout.index == key.index:
            return view, rollout
    raise AppError(f"group {key.group!r} of run {key.run!r}, step {key.step}, has no answer {key.index}")
