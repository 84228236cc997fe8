"""HTML forms that change the URL, whose query holds all parameters of a page. Without Gradio.

    form({"page": "history", "sample": "7"}, pick("run", "Run", "", [("", "every run"), ("a", "a")]))

When a field of a form of the class `go` changes, app.js adds the values of all fields to the query in the form's
`data-keep` and navigates to the result."""

import json
import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any
from urllib.parse import urlencode

from . import AppError
from .html import Html, el, join
from .library import Library
from .notes import MOST_NAME
from .queries import GroupKey, RolloutKey


def form(keep: Mapping[str, Any], *fields: Any, label: str = "What is shown") -> Html:
    """An HTML form with its `fields` in a row, which wraps on narrow screens. `keep` holds the URL parameters that stay
    in the URL when a field changes. `label` names the form for screen readers."""
    query = "?" + urlencode({k: v for k, v in keep.items() if v not in (None, "")})
    return el("form", *fields, class_="go v-form", data_keep=query, aria_label=label)


def pick(name: str, label: str, value: Any, options: Iterable[tuple[Any, Any]], **attributes: Any) -> Html:
    """A drop-down list of (value, label) options, in which `value` is selected. A `value` that is not among the options
    is added, so that the user can deselect it."""
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
    """The URL parameters that open a group or a rollout on a page, by default on the Rollouts page."""
    where = {"page": page, "run": key.run, "source": key.source, "split": key.split, "step": key.step,
             "group": key.group}
    return where | ({"rollout": key.index} if isinstance(key, RolloutKey) else {})


def rollout_of(where: Mapping[str, str]) -> RolloutKey | None:
    """The key of the rollout in the URL parameters; None if they name no rollout. Raises AppError for an invalid
    number."""
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
    """The URL parameter `name` as an integer of at least 0; None if it is missing. Raises AppError for other texts."""
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


NAMES = ("run", "set", "from", "to", "by")
_OF_OTHERS = "at in source split step group rollout runs a b of a_step a_last b_step b_last"
"""URL parameters of single pages, which become invalid when the run, split, steps or annotator in the bar change."""
_MOST_LOOKED_AT = 8  # runs whose splits are offered if no run is selected


def selection(where: Mapping[str, str]) -> dict[str, str]:
    """Returns the parameters in `where` that the bar above all pages sets: run, split, first and last step, annotator.
    The run is omitted if it is only the run of the open group while the list covers every run."""
    run_is_of_group = "group" in where and where.get("in") == "all"
    return {name: where[name] for name in NAMES if where.get(name) and not (name == "run" and run_is_of_group)}


def step_range() -> Html:
    """The two input fields for the first and the last step."""
    shared = {"type": "number", "step": 1, "min": 0, "autocomplete": "off"}
    return el("fieldset", el("legend", "Steps"),
              el("input", name="from", placeholder="from", aria_label="Steps from", **shared),
              el("input", name="to", placeholder="to", aria_label="Steps to", **shared), class_="v-range")


def key_dialog(keys: Iterable[tuple[str, str]]) -> Html:
    """A dialog of keyboard shortcuts. `keys` has (keys separated by spaces, what these keys do) for each line."""
    lines = [el("tr", el("td", join([el("kbd", key) for key in names.split()], " ")), el("td", words))
             for names, words in keys]
    return el("dialog", el("h3", "Keys"), el("table", *lines), el("form", el("button", "Close"), method="dialog"),
              id="v-keys", class_="v", aria_label="Keys")


def bar(library: Library, archived: Collection[str] = ()) -> Html:
    """The bar above all pages as an HTML form, whose fields app.js fills from the URL. Archived runs come last."""
    runs = sorted((run.id for run in library.runs()), key=lambda run: run in archived)
    if not runs:
        return Html("")
    splits = dict.fromkeys(record["split"] for run in runs[:_MOST_LOOKED_AT] for record in library.evals(run))
    return el("form", pick("run", "Run", "", [("", "every run"), *(
        (run, f"{run} (archived)" if run in archived else run) for run in runs)]),
              pick("set", "Split", "", [("", "any"), *((s, s) for s in ("train", *splits) if s != "")]), step_range(),
              field("by", "Who flags", title="a name of yours: flags are kept by it, and you see your own alone",
                    placeholder="no name", maxlength=str(MOST_NAME)),
              class_="go v v-form v-context", data_drop=_OF_OTHERS, aria_label="On every page")
