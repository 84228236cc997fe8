"""Word-level diff of two answers as HTML. Pure functions."""

import re
from itertools import groupby

from rapidfuzz.distance import Indel

from .html import MOST, Html, el, esc, join, note

_WORDS = re.compile(r"\w+|\s+|[^\w\s]")
_MOST_WORDS = 20_000
"""Largest number of words compared, in both texts together; the rest is cut off."""


def words(before: str, after: str) -> Html:
    """The text `after` as HTML, with added words marked and the words removed from `before` struck out."""
    if before == after:
        return el("div", el("p", "The same text.", class_="v-dim"), el("div", after[:MOST], class_="v-text"),
                  class_="v v-diff")
    old, new = _WORDS.findall(before[:MOST]), _WORDS.findall(after[:MOST])
    cut = len(old) + len(new) > _MOST_WORDS
    if cut:
        old, new = old[:_MOST_WORDS // 2], new[:_MOST_WORDS // 2]
    pieces: list[Html] = []
    for same, codes in groupby(Indel.opcodes(old, new), key=lambda code: code.tag == "equal"):
        gone, came = "", ""  # at each change: first all removed words, then all added ones
        for code in codes:
            gone += "".join(old[code.src_start:code.src_end])
            came += "".join(new[code.dest_start:code.dest_end])
        pieces += [esc(came)] if same else [el(tag, text) for tag, text in (("del", gone), ("ins", came)) if text]
    warning = note(f"Long texts: the first {_MOST_WORDS // 2:,} words of each are compared.") if cut else ""
    return el("div", warning, el("div", join(pieces), class_="v-text"), class_="v v-diff")
