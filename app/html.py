"""Builds HTML from untrusted values: everything that is not `Html` is escaped.

    el("p", "Answer: ", el("b", answer), class_="v-note")      # `answer` cannot become a tag

Characters that could hide or reorder text are made visible: control, bidirectional and zero-width characters."""

import html
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from vlrl.store import plain

STYLE = Path(__file__).with_name("style.css")
"""The style sheet for all HTML of this package. It applies within elements of the class `v`."""
LONG = 4_000
"""Texts longer than this number of characters are collapsed."""
MOST = 200_000
"""Largest number of characters shown of one text."""
_VOID = {"br", "hr", "img", "input", "link", "source", "meta", "circle", "rect", "line", "polyline", "path"}
_ODD = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f"
                  r"\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0\ufff9-\ufffb\ufffe\uffff"
                  r"\ud800-\udfff\U000e0000-\U000e007f]")
_BAD_NAME = re.compile(r"[^\w:.-]")


class Html(str):
    """Text that is already HTML and is inserted unescaped."""

    __slots__ = ()


def visible(text: str) -> str:
    """Replaces invisible characters by visible symbols or codes (␀, ␍, ⟨U+202E⟩). Line feeds and tabs are kept."""
    return _ODD.sub(lambda match: _shown(ord(match[0])), text)


def _shown(code: int) -> str:
    return chr(0x2400 + code) if code < 32 else "␡" if code == 127 else f"⟨U+{code:04X}⟩"


def esc(value: Any) -> Html:
    """Escapes any value as HTML text; the result is also safe in attributes."""
    if isinstance(value, Html):
        return value
    try:
        words = value if isinstance(value, str) else str(value)
    except Exception:  # ValueError of an int with thousands of digits, anything of a __str__
        words = f"a {type(value).__name__}"
    return Html(html.escape(visible(words)))


def join(pieces: Iterable[Any], between: str = "") -> Html:
    """Concatenates pieces as HTML. Pieces that are not Html are escaped; None and "" are skipped."""
    return Html(between.join(esc(piece) for piece in pieces if piece is not None and piece != ""))


def el(tag: str, *children: Any, **attributes: Any) -> Html:
    """Builds one HTML element. A trailing underscore of an attribute name is dropped (`class_`), and other underscores
    become dashes (data_at -> data-at). An attribute of None or False is omitted; True is written without a value."""
    words = [tag]
    for key, value in attributes.items():
        name = _BAD_NAME.sub("", key.rstrip("_").replace("_", "-"))
        if value is not None and value is not False:
            words.append(name if value is True else f'{name}="{html.escape(visible(_plain(value)))}"')
    start = " ".join(words)
    return Html(f"<{start}/>") if tag in _VOID else Html(f"<{start}>{join(children)}</{tag}>")


def _plain(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def link(query: Mapping[str, Any], *children: Any, **attributes: Any) -> Html:
    """A link to the page of the app with the URL parameters `query`. app.js handles clicks on the link."""
    values = {k: str(v).encode("utf-8", "replace").decode() for k, v in query.items() if v not in (None, "")}
    href = "?" + urlencode(values, quote_via=quote)
    classes = f"go {attributes.pop('class_', '')}".strip()
    return el("a", *children, class_=classes, href=href, **attributes)


def number(value: Any, form: str = "", sign: bool = False) -> str:
    """Formats a number as a short text with a true minus sign (with `sign` also a plus sign); "–" for None, NaN and
    values that are not numbers. `form` is a Python format specification. By default numbers have three significant
    digits, and are rounded to integers from 1,000 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return "–"
    try:
        if not math.isfinite(value):
            return "–" if value != value else ("∞" if value > 0 else "−∞")
        form = form or (",.0f" if 1e3 <= abs(value) < 1e7 else ".3g")
        shown = format(float(value), ("+" if sign else "") + form)
    except (OverflowError, ValueError):
        return "∞" if value > 0 else "−∞"
    return "0" if shown in ("-0", "+0") else shown.replace("-", "−")


def finite(value: Any) -> float | None:
    """The value as a float if it is a finite number, else None."""
    try:
        return float(value) if not isinstance(value, (bool, str)) and math.isfinite(value) else None
    except (TypeError, OverflowError, ValueError):
        return None


def as_json(value: Any, width: int = 100) -> str:
    """Formats a value as text: a string as it is, others as JSON (one entry per line beyond `width` characters)."""
    if isinstance(value, str):
        return value
    try:
        value = plain(value)
        short = json.dumps(value, ensure_ascii=False)
        if len(short) <= width or not value or not isinstance(value, (list, dict)):
            return short
        if isinstance(value, list):
            return "[" + ",\n ".join(json.dumps(entry, ensure_ascii=False) for entry in value) + "]"
        lines = (f"{json.dumps(k, ensure_ascii=False)}: {json.dumps(v, ensure_ascii=False)}" for k, v in value.items())
        return "{" + ",\n ".join(lines) + "}"
    except (ValueError, RecursionError, TypeError):
        return str(esc(value))


def folded(text: Any, limit: int = LONG, tag: str = "div", class_: str = "v-text", most: int = MOST) -> Html:
    """A text with its line breaks, collapsed if longer than `limit` characters. At most `most` characters are shown."""
    words = text if isinstance(text, str) else as_json(text)
    if len(words) <= limit:
        return el(tag, words, class_=class_)
    more = f" … {len(words):,} characters" + (f", the first {most:,} here" if len(words) > most else "")
    head = words[:min(limit, 600)]
    summary = el("summary", el("span", head, class_="v-head"), el("span", more, class_="v-dim"))
    return el("details", summary, el(tag, words[:most], class_=class_), class_="v-fold")


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]], numeric: Iterable[int] = (), class_: str = "") -> Html:
    """A horizontally scrollable table; the columns with the indices `numeric` are right-aligned."""
    right = set(numeric)

    def line(cells: Sequence[Any], tag: str) -> Html:
        return el("tr", *(el(tag, cell, class_="v-num" if i in right else None) for i, cell in enumerate(cells)))

    body = el("tbody", *(line(row, "td") for row in rows))
    inner = el("table", el("thead", line(head, "th")), body, class_=f"v-table {class_}".strip())
    return el("div", inner, class_="v-scroll", tabindex="0")


def note(*words: Any, kind: str = "") -> Html:
    """A remark in a box; `kind` "bad" or "warn" gives it a colour."""
    return el("p", *words, class_=f"v-note {kind}".strip(), role="alert" if kind == "bad" else None)


def empty(what: Any, do: Any = "") -> Html:
    """A placeholder for missing content; `do` says what the user can do about it."""
    return el("div", el("p", what), el("p", do, class_="v-dim") if do else "", class_="v v-empty")


def chip(words: Any, kind: str = "", title: Any = None) -> Html:
    """A small label; `kind` "bad", "warn" or "good" gives it a colour."""
    return el("span", words, class_=f"v-chip {kind}".strip(), title=title)
