"""Assembles the pages of the inspector into one Gradio app."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import gradio as gr
from gradio.utils import get_upload_folder
from gradio_client.utils import is_file_obj_with_meta, traverse

from . import AppError
from .html import Html, el, join, link
from .site import PAGES, Site

KEYS = (("j ↓", "next row of the list; j in a group: the next group"), ("k ↑", "the row or group before"),
        ("Enter", "open the row"), ("h ←", "the answer before"), ("l →", "the next answer"),
        ("u Esc", "back to the list"), ("g b s", "flag the answer: good, bad, unsure; then comes the next"),
        ("c", "comment on the answer"),
        ("a", "what the open answer says at its end"),
        ("r", "read: one answer as written and as Markdown; once more: all of them"),
        ("o", "order of the answers: as drawn, best first, worst first"), ("y", "while reading: copy the answer"),
        ("t", "the turns of an episode: ← → move"),
        ("n p", "next page of the list, the one before"), ("/", "search"),
        ("← → ↑ ↓", "in a plot: from point to point and curve to curve; Enter opens"),
        ("+ - 0", "in a plot: nearer, farther, all"), ("?", "these keys"))


class Pages(gr.Blocks):
    """Gradio blocks that reject file arguments which are not uploads.

    Gradio only checks file arguments in an app that it launches itself. Otherwise a request could make it copy any file
    of this machine, or of a web address, into its cache and serve that copy."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **options: Any) -> Any:
        traverse(inputs, _uploaded, is_file_obj_with_meta)
        return await super().preprocess_data(block_fn, inputs, *args, **options)


def _uploaded(file: dict[str, Any]) -> dict[str, Any]:
    """Returns the file argument unchanged. Raises AppError if the file is not in the upload folder."""
    try:
        inside = Path(file["path"]).resolve().is_relative_to(Path(get_upload_folder()).resolve())
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise AppError("A request named a file that was not uploaded.")
    return file


def blocks(site: Site) -> gr.Blocks:
    """Builds the whole Gradio app. static/app.js selects the page that is visible."""
    with Pages(title="vlrl", analytics_enabled=False, fill_width=True) as app:
        links = [el("li", link({"page": name}, name.title(), class_=f"v-tab v-tab-{name}")) for name in PAGES]
        title = el("div", el("h1", "vlrl"), el("h2", "", id="v-title"), class_="v-unseen")  # app.js names the page
        gr.HTML(join([title, el("nav", el("ul", *links), class_="v v-nav", aria_label="Pages")]), elem_id="v-top",
                apply_default_css=False)
        gr.HTML(_keys(), apply_default_css=False)
        site.begin_all()
        for name in PAGES:
            with gr.Column(elem_id=f"v-page-{name}", elem_classes="v-screen") as column:
                site.begin(name)
                importlib.import_module(f"{__package__}.pages.{name}").build(site)
            site.end(name, column)
    return app


def _keys() -> Html:
    lines = [el("tr", el("td", join([el("kbd", key) for key in keys.split()], " ")), el("td", words))
             for keys, words in KEYS]
    close = el("form", el("button", "Close"), method="dialog")
    return el("dialog", el("h3", "Keys"), el("table", *lines), close, id="v-keys", class_="v", aria_label="Keys")
