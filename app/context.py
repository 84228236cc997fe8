"""The bar above all pages that selects run, split and steps for all of them. HTML only, without Gradio.

The selection consists of the URL parameters `run`, `set` (split), `from` and `to` (steps), and `by` (annotator). app.js
copies them into links to other pages, except links that name a run themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from .controls import field, pick
from .html import Html, el
from .library import Library
from .notes import MOST_NAME

NAMES = ("run", "set", "from", "to", "by")
_OF_OTHERS = "at in source split step group rollout runs a b of a_step a_last b_step b_last"
"""URL parameters of the pages that become invalid when the selection changes."""
_MOST_LOOKED_AT = 8  # runs whose splits are offered if no run is selected


def selection(where: Mapping[str, str]) -> dict[str, str]:
    """The URL parameters in `where` that belong to the bar's selection."""
    run_is_of_group = "group" in where and where.get("in") == "all"
    return {name: where[name] for name in NAMES if where.get(name) and not (name == "run" and run_is_of_group)}


def bar(library: Library, archived: Collection[str] = ()) -> Html:
    """The bar as an HTML form, whose fields app.js fills from the URL. Archived runs are listed last."""
    runs = sorted((run.id for run in library.runs()), key=lambda run: run in archived)
    if not runs:
        return Html("")
    splits = dict.fromkeys(record["split"] for run in runs[:_MOST_LOOKED_AT] for record in library.evals(run))
    shared = {"type": "number", "step": 1, "min": 0, "autocomplete": "off"}
    steps = el("fieldset", el("legend", "Steps"),
               el("input", name="from", placeholder="from", aria_label="Steps from", **shared),
               el("input", name="to", placeholder="to", aria_label="Steps to", **shared), class_="v-range")
    return el("form", pick("run", "Run", "", [("", "every run"), *(
        (run, f"{run} (archived)" if run in archived else run) for run in runs)]),
              pick("set", "Split", "", [("", "any"), *((s, s) for s in ("train", *splits) if s != "")]), steps,
              field("by", "Who flags", title="a name of yours: flags are kept by it, and you see your own alone",
                    placeholder="no name", maxlength=str(MOST_NAME)),
              class_="go v v-form v-context", data_drop=_OF_OTHERS, aria_label="On every page")
