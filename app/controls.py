"""HTML forms that change the URL, whose query holds all parameters of a page. Without Gradio.

    form({"page": "history", "sample": "7"}, pick("run", "Run", "", [("", "every run"), ("a", "a")]))

When a field of a `form.go` changes, app.js adds the values of the fields to the query in `data-keep` and navigates to
the result."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

from . import AppError
from .html import Html, el
from .queries import GroupKey, RolloutKey


def form(keep: Mapping[str, Any], *fields: Any, label: str = "What is shown") -> Html:
    """A form whose fields form a row, which wraps on narrow screens; `keep` holds the URL parameters to preserve."""
    query = "?" + urlencode({k: v for k, v in keep.items() if v not in (None, "")})
    return el("form", *fields, class_="go v-form", data_keep=query, aria_label=label)


def pick(name: str, label: str, value: Any, options: Iterable[tuple[Any, Any]], **attributes: Any) -> Html:
    """A drop-down list of (value, label) options. A `value` that is not among the options is added, so that the user
    can deselect it."""
    offered = [(str(v), words) for v, words in options]
    chosen = "" if value is None else str(value)
    if chosen not in dict(offered):
        offered.append((chosen, f"{chosen} (not there)"))
    choices = [el("option", words, value=v, selected=v == chosen) for v, words in offered]
    return _labelled(label, el("select", *choices, name=name, aria_label=label, **attributes))


def field(name: str, label: str, value: Any = "", kind: str = "text", **attributes: Any) -> Html:
    """An input for one line; `kind` is an HTML input type: text, search or number."""
    text = "" if value is None else str(value)
    shown = text if kind != "number" or finite_text(text) else ""  # browsers warn about other values
    return _labelled(label, el("input", type=kind, name=name, value=shown, aria_label=label,
                               **{"autocomplete": "off", "spellcheck": "false", **attributes}))


def finite_text(text: str) -> bool:
    """Whether the text can be parsed as a finite number."""
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _labelled(label: str, *inner: Any) -> Html:
    return el("label", el("span", label), *inner, class_="v-field")


def target(key: GroupKey | RolloutKey, page: str = "rollouts") -> dict[str, Any]:
    """The URL parameters that open a group or a rollout."""
    where = {"page": page, "run": key.run, "source": key.source, "split": key.split, "step": key.step,
             "group": key.group}
    return where | ({"rollout": key.index} if isinstance(key, RolloutKey) else {})


def rollout_of(where: Mapping[str, str]) -> RolloutKey | None:
    """The key of the rollout in the URL parameters; None if they name none. Raises AppError for an invalid number."""
    if not all(where.get(name) for name in ("run", "step", "group", "rollout")):
        return None
    step, index, split = integer(where, "step"), integer(where, "rollout"), where.get("split") or "train"
    source = where.get("source") or ("train" if split == "train" else "eval")
    return RolloutKey(where["run"], source, split, step or 0, where["group"], index or 0)


def packed(key: RolloutKey) -> str:
    """Encodes a rollout key as a single URL parameter."""
    return json.dumps(key, separators=(",", ":"))


def unpacked(text: str | None) -> RolloutKey | None:
    """Decodes the result of `packed`; None for any other text."""
    try:
        run, source, split, step, group, index = json.loads(text or "")
    except (ValueError, TypeError, RecursionError):
        return None
    right = all(isinstance(v, str) for v in (run, source, split, group)) and type(step) is type(index) is int
    return RolloutKey(run, source, split, step, group, index) if right else None


def integer(where: Mapping[str, str], name: str) -> int | None:
    """The URL parameter `name` as an integer of at least 0; None if it is missing. Raises AppError for any other text.
    """
    text = where.get(name)
    if not text:
        return None
    if not (text.isdecimal() and len(text) < 16):
        raise AppError(f"{name}={text!r} in the address must be a whole number of at least 0")
    return int(text)


def decimal(where: Mapping[str, str], name: str) -> float | None:
    """The URL parameter `name` as a finite number; None if it is missing. Raises AppError for any other text."""
    text = where.get(name)
    if not text:
        return None
    if not finite_text(text):
        raise AppError(f"{name}={text!r} in the address must be a number")
    return float(text)
