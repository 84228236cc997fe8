"""The index.html of a bundle (bundle.py), and the README.md for its static Space."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlrl.store.files import read_json

from . import curves, filters
from .controls import key_dialog, pick, step_range
from .diagnosis import Finding, diagnose
from .evidence import Reader
from .html import Html, el, join, link, note, table
from .index import Facets
from .library import Library
from .redaction import Redactor
from .report import RUN, before_after, header, section, unreadable_section

OURS = "<!-- written by `vlrl report --bundle` -->"
"""Line that marks a README.md as written by this module, so that a later bundle may replace it."""
POLICY = ("default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
          "base-uri 'none'; form-action 'none'")
"""Content-Security-Policy that allows only the bundle's own scripts and images, so text from a model can neither run as
a script nor contact another server."""
_PAGES = {"runs": "Overview", "rollouts": "Rollouts"}  # the names that app.js knows
_KEYS = (("j ↓", "next row of the list; j in a group: the next group"), ("k ↑", "the row or group before"),
         ("Enter", "open the row"), ("h ←", "the answer before"), ("l →", "the next answer"),
         ("u Esc", "back to the list"), ("a", "what the open answer says at its end"),
         ("t", "the turns of an episode: ← → move"), ("n p", "next page of the list, the one before"),
         ("/", "search"), ("?", "these keys"))
_MOST_REMARKS = 20


def page(name: str, library: Library, hide: Redactor, facets: Facets, remarks: Sequence[str], left_out: Sequence[str]
         ) -> str:
    """The HTML of index.html: an overview of the run `name`, redacted by `hide`, and empty elements that bundle.js
    fills. `facets` are the values that the filters offer, `remarks` are sentences on unreadable files, and
    `left_out` are sentences on what the bundle omits."""
    styles = [el("link", rel="stylesheet", href=f"{file}.css") for file in ("style", "app", "bundle")]
    scripts = [el("script", src="app.js", data_pages=" ".join(_PAGES)),
               *(el("script", src=src, defer=True) for src in ("bundle.js", "data/index.js"))]
    head = el("head", el("meta", charset="utf-8"),
              el("meta", http_equiv="Content-Security-Policy", content=POLICY),
              el("meta", name="viewport", content="width=device-width, initial-scale=1"),
              el("meta", name="referrer", content="no-referrer"), el("title", f"{name} · vlrl"),
              el("link", rel="icon", href="data:,"), *styles, *scripts)
    tabs = [el("li", link({"page": key}, words, class_=f"v-tab v-tab-{key}")) for key, words in _PAGES.items()]
    top = el("div", el("nav", el("ul", *tabs), class_="v v-nav", aria_label="Pages"), id="v-top")
    notes_filter = r'<label class="v-field"><span>Notes</span>.*?</label>'  # a bundle contains no notes
    rollouts = [el("div", Html(re.sub(notes_filter, "", filters.form(facets), flags=re.S)), id="v-filters"),
                el("div", el("div", id="v-list"), el("div", id="v-group"), id="v-split")]
    splits = pick("set", "Split", "", [("", "any"), *((s, s) for s in facets.splits)])
    context = el("form", splits, step_range(), class_="go v v-form v-context",
                 data_drop="at source split step group rollout", aria_label="On both pages")
    body = el("body", top, key_dialog(_KEYS), el("div", context, id="v-context"),
              el("noscript", note("Lists and groups need scripts, which are off. `vlrl report` without --bundle writes "
                                  "one page that needs none.", kind="warn")),
              el("main", el("div", *_overview(name, library, hide, remarks, left_out), class_="v v-page"),
                 id="v-page-runs", class_="v-screen"),
              el("main", *rollouts, id="v-page-rollouts", class_="v-screen"))
    return f"<!doctype html>\n{el('html', head, body, lang='en', class_='v-report')}\n".encode(
        "utf-8", "replace").decode()


def _overview(name: str, library: Library, hide: Redactor, remarks: Sequence[str], left_out: Sequence[str]
              ) -> list[Html]:
    info, notes = library.run(RUN), list(remarks)
    shown_info = replace(info, task=hide.words(info.task), model=hide.words(info.model))
    gains = before_after(library.folder(RUN), notes)
    return [header(name, shown_info, hide.settings(library.settings(RUN))),
            section("What is wrong here?", _findings(name, library, hide), "",
                    "No findings: the run is too short for a diagnosis, or all is well."),
            gains,
            section("Curves over the steps", curves.of_run(library.metrics(RUN), library.evals(RUN)), "v-curves",
                    "No step has been finished yet."),
            section("How it was made", _versions(library), "", "The run has no records of its versions."),
            section("What is left out here", [el("ul", *(el("li", words) for words in left_out), class_="v-list")], "",
                    ""),
            unreadable_section([hide.words(words) for words in dict.fromkeys(notes)][:_MOST_REMARKS])]


def _findings(name: str, library: Library, hide: Redactor) -> list[Html]:
    findings: list[Finding] = diagnose(Reader(library).of(RUN))
    lines = [el("li", join([hide.words(one.words), el("span", one.do, class_="v-dim") if one.do else "",
                            link({**one.where, "run": name}, "its groups") if one.where else ""], " "),
                class_=f"v-finding {one.kind}".strip()) for one in findings]
    return [el("ul", *lines, class_="v-findings")] if lines else []


def _versions(library: Library) -> list[Html]:
    """Returns HTML with the run's package versions, or [] if unknown. All else in env.json is private and left out."""
    env: Mapping[str, Any] = read_json(library.path(RUN) / "env.json") or {}
    packages = env.get("packages")
    rows = [("python", env.get("python")), *(packages.items() if isinstance(packages, dict) else ())]
    rows = [(key, value) for key, value in rows if isinstance(value, str) and re.fullmatch(r"[\w.+ -]{1,60}", value)]
    return [el("details", el("summary", "Versions"), table(("package", "version"), rows))] if rows else []


def readme(name: str) -> str:
    """The README.md of the bundle, with the front matter that a static Hugging Face Space needs."""
    title = " ".join(re.sub(r"[^\w.-]", " ", name).split())[:60] or "run"
    return f"""---
title: "{title}"
sdk: static
app_file: index.html
pinned: false
---
{OURS}
# {title}

A training run of vlrl: curves, results before and after, and groups of answers with filters. It is a folder of files:
open `index.html` from disk, or serve the folder with any web server, under any path:

    python -m http.server --bind 127.0.0.1

As a static Space of Hugging Face (the lines above are its settings), once you are logged in:

    hf repos create NAME --type space --space-sdk static
    hf upload NAME . --repo-type space

What is in it is public wherever the folder is: prompts, answers, data rows and pictures of the groups shown. Paths,
addresses and names of the machine, and settings that hold keys, are left out.
"""
