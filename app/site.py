"""Shared state of the inspector's pages: the runs, the URL parameters (location), and error messages.

A page is a module with `build(site)`, which is called once inside the page's own part of the layout:

    def build(site: Site) -> None:
        shown = gr.HTML()
        site.on_location(lambda where: render(where.get("run")), [shown])

The location is the query of the URL as a flat dictionary of strings, including `page`.

- A link `<a class="go" href="?page=history&sample=7">` (`vlrl.app.html.link`) changes the location without a page load.
The listeners of the page that it names are called once.
- With `data-replace` a link replaces the browser's history entry. `data-key="j"` binds a link to a key.
- When a field of a `<form class="go">` changes, its fields are added to the query in the form's `data-keep`; without
`data-keep`, to the current query without the parameters listed in `data-drop`.
- A gr.HTML keeps its scroll position when its value changes, since Gradio updates only the differences."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import gradio as gr

from vlrl.errors import VlrlError

from . import AppError, controls
from .html import note

if TYPE_CHECKING:
    from .index import Index
    from .library import Library
    from .media import MediaStore
    from .notes import Label

PAGES = ("runs", "rollouts", "history", "compare", "curriculum", "playground", "notes")
_LONGEST = 8000  # characters of a query
_PRIVATE: dict[str, Any] = {"api_visibility": "private"}
_IN_PLACE: dict[str, Any] = {**_PRIVATE, "show_progress": "hidden", "queue": False, "trigger_mode": "always_last"}
_log = logging.getLogger("vlrl.app")


@dataclass
class Site:
    """One inspector for one folder of runs, shared by all pages. `trust_tasks` permits loading tasks that a run's
    config names by path or module. `page` is the name of the page that is being built."""

    library: Library
    index: Index
    media: MediaStore
    notes: Any = None
    trust_tasks: bool = False
    page: str = PAGES[0]
    _locations: dict[str, gr.HTML] = field(default_factory=dict)
    _messages: dict[str, gr.Column] = field(default_factory=dict)
    _answers: dict[str, gr.HTML] = field(default_factory=dict)
    _context: tuple[gr.HTML, gr.HTML] | None = None
    """The bar above all pages, and the hidden component that holds the digest of the bar's HTML (see `same`)."""

    def labels(self) -> dict[str, Label]:
        """The labels of runs; empty if the notes file is unreadable, which the Notes page reports."""
        try:
            return self.notes.labels() if self.notes else {}
        except AppError:
            return {}

    def archived(self) -> set[str]:
        """The ids of archived runs."""
        return {run for run, label in self.labels().items() if label.archived}

    def begin_all(self) -> None:
        """Builds the header shared by all pages; must be called before the first page is built."""
        bar = gr.HTML(elem_id="v-context", apply_default_css=False, js_on_load="vlrl.form(watch)")
        self._context = bar, self.digests(1)[0]

    def begin(self, page: str) -> None:
        """Begins a page inside its column: adds the components for its URL parameters and error messages."""
        self.page = page
        name = json.dumps(page)
        self._locations[page] = gr.HTML("", elem_id=f"v-location-{page}", elem_classes="v-hidden",
                                        js_on_load=f"vlrl.page({name}, props, trigger, 'tick')")
        self._answers[page] = gr.HTML("", elem_classes="v-hidden", js_on_load="vlrl.answered(props, watch)")
        self._messages[page] = gr.Column(elem_id=f"v-messages-{page}", elem_classes="v-messages")

    def end(self, page: str, column: gr.Column) -> None:
        """Ends a page. The browser fetches the Gradio files of the components in `column` only when the page is first
        visited. Until then the visible components inside the column are set invisible, because Gradio does not fetch
        the files of invisible components."""
        later = [b for b in _within(column) if b.visible is True and not isinstance(b, gr.HTML | gr.Column | gr.State)]
        for block in later:
            block.visible = False
        if later:
            self._locations[page].change(None, None, later, js=f"() => vlrl.first({json.dumps(page)}, {len(later)})",
                                         **_PRIVATE)

    def on_location(self, fn: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any] = ()) -> None:
        """Registers `fn(URL parameters, *inputs)`, which is called when the URL changes and names this page. The
        results of `fn` are sent to `outputs`."""
        def with_context(query: str, before: str, *values: Any) -> tuple[Any, ...]:
            results = fn(location(query), *values)
            bar = same([before], [controls.bar(self.library, self.archived())])
            return *bar, *(results if len(outputs) > 1 else (results,))

        shown = _shown(with_context, len(outputs) + 2)

        def answered(query: str, *values: Any) -> tuple[Any, ...]:
            return *shown(query, *values), str(query or "").rpartition("#")[2]  # app.js counts them

        assert self._context, "begin_all comes first"
        place, (_, before) = self._locations[self.page], self._context
        place.change(answered, [place, before, *inputs],
                     [*self._context, *outputs, self._message(), self._answers[self.page]], **_IN_PLACE)

    def on_tick(self, fn: Callable[..., Any], outputs: Sequence[Any], inputs: Sequence[Any] = ()) -> None:
        """Registers `fn(URL parameters, *inputs)`, called every few seconds (see app.js) while this page is visible."""
        place = self._locations[self.page]
        self.on(place.tick, lambda query, *values: fn(location(query), *values), [place, *inputs], outputs,
                **_IN_PLACE)

    def digests(self, number: int) -> list[gr.HTML]:
        """Adds hidden components for digests of shown values (see `same`). Must be called inside the page's column."""
        return [gr.HTML("", elem_classes="v-hidden", apply_default_css=False) for _ in range(number)]

    def on(self, event: Callable[..., Any], fn: Callable[..., Any], inputs: Sequence[Any], outputs: Sequence[Any],
           **options: Any) -> Any:
        """Registers `fn(inputs) -> outputs` for an event of a component, such as `button.click`; errors are shown on
        the page. `fn` may be a generator. `options` are passed to Gradio. Returns Gradio's event object, which has
        `.then`."""
        message = self._message()
        return event(_shown(fn, len(outputs)), [*inputs], [*outputs, message],
                     **{**_PRIVATE, **options})

    def _message(self) -> gr.HTML:
        with self._messages[self.page]:
            return gr.HTML("", elem_classes="v-message")


def _within(block: Any) -> Iterator[Any]:
    for child in getattr(block, "children", ()):
        yield child
        yield from _within(child)


def charts(elem_id: str) -> gr.HTML:
    """A component that draws plots with static/plots.js; its value comes from `chart_value`."""
    return gr.HTML("", elem_id=elem_id, html_template='<div class="v-charts"></div>', apply_default_css=False,
                   js_on_load="vlrl.charts(element, props, watch)")


def chart_value(figures: Sequence[Mapping[str, Any]]) -> str:
    """Encodes figures as JSON for a component of `charts`.

    A figure is {"id", "title", "data": traces, "layout"}, in a format like Plotly's; it keeps its zoom while its id
    stays the same. A trace has these keys:

    - "name"; "x" and "y" of equal length, in which null is a gap; "tip", a word to show before its values
    - "mode": "lines", "markers" or "lines+markers"
    - "line": {"color", "width", "dash": "dot", "shape": "hv"}
    - "marker": {"color", "size", "opacity", "symbol": "circle", "diamond" or "square"}
    - "error_y": {"array", "arrayminus"}, the lengths of error bars
    - "stackgroup": stacks the trace as a filled area on the traces before it
    - "z" [y][x] in [0, 1]: draws a heat map, whose "text" holds counts
    - "yaxis": "y2" selects the right axis
    - "customdata": the URL query that a click on each point opens; or "meta": {"go": query with {x} for the point's x}

    The layout has "height" in pixels, "showlegend", and the axes "xaxis", "yaxis" and "yaxis2": {"title": {"text"},
    "range", "rangemode": "tozero", "type": "category"}."""
    from vlrl.store import plain
    return json.dumps(plain(list(figures)), allow_nan=False).replace("<", "\\u003c")  # Gradio warns of a tag in it


def location(query: str | None) -> dict[str, str]:
    """Parses a query string to a dictionary of URL parameters (of repeated ones the last value). Never raises."""
    text = (query or "").partition("#")[0].lstrip("?")[:_LONGEST]
    where = dict(parse_qsl(text, keep_blank_values=False, errors="replace"))
    if "page" not in where:
        where["page"] = "rollouts" if "step" in where or "group" in where else PAGES[0]
    return where


def query(where: Mapping[str, Any], **changes: Any) -> str:
    """Formats `where` with `changes` applied as a query string "?page=..&run=.."; None or "" removes a parameter."""
    merged = {**where, **changes}
    return "?" + urlencode({k: v for k, v in merged.items() if v is not None and v != ""})


def packed(names: Sequence[str]) -> str:
    """Encodes several names as one URL parameter."""
    return ",".join(quote(name, safe="/") for name in names)


def unpacked(value: str | None) -> tuple[str, ...]:
    """Decodes the result of `packed`."""
    return tuple(unquote(name) for name in (value or "").split(",") if name)


def _shown(fn: Callable[..., Any], outputs: int) -> Callable[..., Any]:
    """Wraps `fn`, which returns `outputs` values, so that it also returns the message for the page: the error raised by
    `fn`, else an empty text."""
    if inspect.isgeneratorfunction(fn):
        @wraps(fn)
        def generator(*args: Any) -> Any:
            try:
                for result in fn(*args):
                    yield _results(result, outputs)
            except Exception as error:
                yield _failed(error, outputs)

        return generator

    @wraps(fn)
    def function(*args: Any) -> Any:
        try:
            return _results(fn(*args), outputs)
        except Exception as error:
            return _failed(error, outputs)

    return function


def _results(result: Any, outputs: int) -> tuple[Any, ...]:
    values = (() if outputs == 0 else (result,) if outputs == 1 and not isinstance(result, tuple) else tuple(result))
    if len(values) != outputs:
        raise ValueError(f"a handler of a page returned {len(values)} results for {outputs} outputs")
    return (*values, "")


def _failed(error: Exception, outputs: int) -> tuple[Any, ...]:
    if isinstance(error, VlrlError):
        text = str(error)
    else:
        _log.error("a handler of a page failed", exc_info=error)
        text = f"This cannot be shown: {type(error).__name__}. The terminal that runs `vlrl app` has the details."
    return (*(gr.skip() for _ in range(outputs)), note(text[:2000], kind="bad"))


def same(digests: Sequence[str], values: Sequence[str]) -> tuple[Any, ...]:
    """Returns new values of components, followed by their digests. `digests` are those of the values that the browser
    already has; if one is unchanged, gr.skip() replaces the value and its digest. A digest of "" always differs. The
    browser keeps the digests, since a tick and a change of the URL may be answered concurrently."""
    new = [hashlib.sha256(value.encode("utf-8", "replace")).hexdigest() for value in values]
    changed = [old != digest for old, digest in zip(digests, new, strict=True)]
    return tuple(value if change else gr.skip()
                 for change, value in zip([*changed, *changed], [*values, *new], strict=True))
