"""Makes GUI data from real HTML pages: screenshots taken with headless Chromium, and the box, text and role of elements
from the DOM.

    make_gui(Path("gui"), seed=0, samples=200)      # gui/train.jsonl, gui/heldout.jsonl, gui/images/*.png

The pages come from MiniWoB++ (Farama Foundation, MIT): about 125 small forms, tables, menus and mail boxes with random
content. The same seed gives the same rows and, with the same browser and fonts, the same pixels. Downloads nothing."""

from __future__ import annotations

import importlib.util
import random
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from vlrl.data.values import tidy
from vlrl.environments.chromium import FLAGS, STEADY, browser_start_error, chromium_program
from vlrl.errors import ConfigError, DataError
from vlrl.progress import Progress, no_progress
from vlrl.tools.makers.making import check_output, make_rows
from vlrl.types import Row

SCALES = (2, 3, 4)  # numbers of screen pixels per CSS pixel; one of them is chosen at random for each screenshot
PER_PAGE = 3  # maximum number of elements per screenshot that become rows
_HELDOUT = 5  # one group of pages in so many is held out
_VIEW = (480, 480)  # size of the browser window in CSS pixels
_SMALLEST = 6 / 160  # minimum shorter side of an element, as a fraction of the shorter side of the screenshot
_LARGEST = 0.5  # share of the screenshot that an element covers, at most
_MOVING = {"chase-circle", "moving-items", "simon-says", "stock-market", "terminal"}  # animated pages
_VARIANT = re.compile(r"-(easy|medium|hard|nodelay|large|soft|transfer|noscroll|nl|turk|all|some|\d+)$")

ELEMENTS = """
() => {
  const wrap = document.querySelector('#wrap'), query = document.querySelector('#query');
  const view = wrap ? wrap.getBoundingClientRect() : {left: 0, top: 0, right: innerWidth, bottom: innerHeight};
  const top = query ? query.getBoundingClientRect().bottom : Math.max(0, view.top);
  const frame = {x: Math.max(0, view.left), y: top, right: Math.min(view.right, innerWidth),
                 bottom: Math.min(view.bottom, innerHeight)};
  const words = text => (text || '').replace(/\\s+/g, ' ').trim();
  const labelled = e => e.labels && e.labels.length ? words(e.labels[0].textContent) : '';
  const role = e => {
    const tag = e.tagName.toLowerCase(), type = (e.getAttribute('type') || 'text').toLowerCase();
    if (e.getAttribute('role')) return e.getAttribute('role');
    if (tag === 'button' || (tag === 'input' && ['button', 'submit', 'reset'].includes(type))) return 'button';
    if (tag === 'input') return ({checkbox: 'checkbox', radio: 'radio', range: 'slider'})[type] || 'textbox';
    if (tag === 'a' || e.classList.contains('alink')) return 'link';
    return ({textarea: 'textbox', select: 'combobox', img: 'img', th: 'columnheader', td: 'cell', li: 'listitem',
             h1: 'heading', h2: 'heading', h3: 'heading'})[tag] || 'text';
  };
  const drawn = e => words(e.getAttribute('alt') || e.getAttribute('title')) ||
    words((e.getAttribute('src') || '').split('/').pop().replace(/\\.\\w+$/, '').replace(/[-_]/g, ' '));
  const mark = e => words([...e.classList].pop()).replace(/^ui-icon-/, '').replace(/[-_]/g, ' ');
  const inked = (e, box) => {  // the part of its box that its text fills; null when text-indent or overflow hides it
    const range = document.createRange();
    range.selectNodeContents(e);
    const at = range.getBoundingClientRect();
    const part = {left: Math.max(at.left, box.left), top: Math.max(at.top, box.top),
                  right: Math.min(at.right, box.right), bottom: Math.min(at.bottom, box.bottom)};
    return part.right > part.left && part.bottom > part.top ? part : null;
  };
  const found = [];
  for (const e of document.querySelectorAll('body *')) {
    const box = e.getBoundingClientRect(), style = getComputedStyle(e);
    if (box.width < 1 || box.height < 1 || style.visibility !== 'visible' || style.opacity < 0.5) continue;
    if (box.left < frame.x || box.top < frame.y || box.right > frame.right || box.bottom > frame.bottom) continue;
    const hit = document.elementFromPoint((box.left + box.right) / 2, (box.top + box.bottom) / 2);
    if (!hit || !(e === hit || e.contains(hit))) continue;
    if (e.parentElement && e.parentElement.closest('button, a, [role=button], [role=tab]')) continue;  // part of it
    if (e.classList.contains('ui-resizable-handle')) continue;  // can hardly be seen
    if (e.tagName === 'LABEL' && e.control) continue;  // names its control
    const kind = role(e), own = words([...e.childNodes].filter(n => n.nodeType === 3).map(n => n.data).join(' '));
    const control = ['checkbox', 'radio', 'textbox', 'combobox', 'slider'].includes(kind);
    const inside = kind === 'button' ? words(e.value || e.innerText) : '';
    const ink = own ? inked(e, box) : null, hidden = parseFloat(style.textIndent) < -99;
    const text = control || hidden ? '' : (ink ? own : '') || inside;
    const said = text || inside || labelled(e) || words(e.getAttribute('aria-label') || e.getAttribute('placeholder'));
    const icon = !said && !control && !e.children.length && (e.tagName === 'IMG' || style.backgroundImage !== 'none');
    if (!said && !control && !icon) continue;
    const at = ink && ['text', 'heading', 'listitem'].includes(kind) ? ink : box;
    found.push({role: icon ? 'icon' : kind, name: said || (icon ? drawn(e) || mark(e) : ''), text: !!text,
                box: [at.left, at.top, at.right, at.bottom]});
  }
  return {frame: [frame.x, frame.y, frame.right, frame.bottom], elements: found};
}
"""
"""JavaScript that returns the visible elements that are not covered by another element. Each has a role, a name, a flag
that says whether the element displays its name as text, and a box in CSS pixels."""

PHRASES: dict[str, Sequence[str]] = {
    "button": ("Click the button '{}'.", "Press '{}'.", "Press the button that says '{}'."),
    "link": ("Follow the link '{}'.", "Click the link '{}'.", "Open '{}'."),
    "checkbox": ("Tick the box '{}'.", "Click the checkbox for '{}'."),
    "radio": ("Choose the option '{}'.", "Click the radio button '{}'."),
    "textbox": ("Click into the field '{}'.", "Put the cursor into the text field '{}'."),
    "combobox": ("Open the list '{}'.", "Click the drop-down list '{}'."),
    "tab": ("Open the tab '{}'.", "Click the tab '{}'."),
    "icon": ("Click the icon '{}'.", "Click the '{}' symbol."),
    "cell": ("Click the table cell '{}'.", "Find '{}' in the table."),
}
"""Role -> templates of instructions that refer to an element by its name."""
ICONS = {"closethick": "close", "triangle 1 n": "arrow up", "triangle 1 s": "arrow down",
         "circle triangle w": "previous", "circle triangle e": "next"}
"""Name of a jQuery UI icon -> its common name."""
NAMELESS = {"checkbox": "Click the checkbox.", "radio": "Click the radio button.", "textbox": "Click into the text "
            "field.", "combobox": "Open the drop-down list.", "slider": "Click the slider."}
"""Role -> instruction that refers to an element without a name, if it is the only element with this role."""
OTHERS = ("Click the text '{}'.", "Click on '{}'.", "Find '{}'.")


@dataclass(frozen=True)
class Screenshot:
    """A screenshot and its elements, with boxes in screen pixels."""

    png: bytes
    width: int
    height: int
    elements: tuple[Mapping[str, Any], ...]


def make_gui(out: Path, seed: int = 0, samples: int = 200, *, pages: Path | None = None, browser: str | None = None,
             force: bool = False, progress: Progress = no_progress) -> dict[str, int]:
    """Writes train.jsonl, heldout.jsonl and images/ to a folder. Returns the number of rows per split.

    `pages` is a folder of .html files to use instead of MiniWoB++, `browser` the path of the Chromium executable. Every
    fifth group of pages is held out, so no page occurs in both splits. Rows are in the canonical format of the gui
    task, with box, element_type, platform and group_key.

    Raises ConfigError if the browser, playwright or the pages are missing, DataError if the folder is not empty or the
    pages have too few elements."""
    check_output(out, samples, force)
    groups = _groups(_html(pages))
    with _chromium(browser) as shoot:
        def make(split: str, count: int) -> Iterator[tuple[Row, Mapping[str, bytes]]]:
            pages = [page for n, name in enumerate(sorted(groups)) if (n % _HELDOUT == 0) == (split == "heldout")
                     for page in groups[name]]
            return ((row, {row["image"]: png}) for row, png in _rows(pages, split, seed, count, shoot))

        return make_rows(out, make, samples, samples // _HELDOUT, {}, what="taking screenshots", force=force,
                         progress=progress)


def rows_of(shot: Screenshot, page: str, rng: random.Random, uses: Counter[str], often: int = 2) -> list[Row]:
    """Makes canonical rows for some elements of a screenshot. The instruction in a row fits only one element of the
    screenshot.

    `uses` counts how often each element name has been used in earlier rows. Names with few uses are preferred, and
    names with `often` uses are skipped."""
    named: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for element in shot.elements:
        key = ("", element["name"].lower()) if element["name"] else (element["role"], "")
        named.setdefault(key, []).append(element)
    kinds = [e["role"] for e in shot.elements]
    single = [group[0] for (role, name), group in named.items()
              if len(group) == 1 and (name or (role in NAMELESS and kinds.count(role) == 1))]
    fitting = [e for e in single if _fits(e, shot) and uses[e["name"].lower()] < often]
    rng.shuffle(fitting)
    chosen = sorted(fitting, key=lambda e: uses[e["name"].lower()])[:PER_PAGE]
    uses.update(e["name"].lower() for e in chosen)
    return [_row(e, shot, page, rng) for e in chosen]


def _row(element: Mapping[str, Any], shot: Screenshot, page: str, rng: random.Random) -> dict[str, Any]:
    role, name = element["role"], element["name"]
    instruction = rng.choice(PHRASES.get(role, OTHERS)).format(name) if name else NAMELESS[role]
    return {"image": "", "width": shot.width, "height": shot.height, "instruction": instruction, "box": element["box"],
            "platform": "web", "element_type": "text" if element["text"] else "icon", "category": role,
            "group_key": group_of(page), "source": "miniwob"}


def _fits(element: Mapping[str, Any], shot: Screenshot) -> bool:
    x1, y1, x2, y2 = element["box"]
    area = (x2 - x1) * (y2 - y1) / (shot.width * shot.height)
    short = min(x2 - x1, y2 - y1) / min(shot.width, shot.height)
    says = not element["name"] or any(c.isalnum() for c in element["name"])
    return area <= _LARGEST and short >= _SMALLEST and says and len(element["name"]) <= 60


# --- pages ------------------------------------------------------------------------------------------------------------


def group_of(page: str) -> str:
    """The group of a page: its name without the suffixes of variants ("click-tab-2-hard" -> "click-tab")."""
    while (shorter := _VARIANT.sub("", page)) != page:
        page = shorter
    return page


def _html(folder: Path | None) -> list[Path]:
    if folder is None:
        spec = importlib.util.find_spec("miniwob")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError("the default pages come from the package miniwob, which is not installed: pip install "
                              "'vlrl[gui]', or give a folder of .html files with --pages")
        folder = Path(spec.submodule_search_locations[0]) / "html" / "miniwob"
    files = sorted(path for path in folder.glob("*.html") if path.stem not in _MOVING)
    if not files:
        raise ConfigError(f"{folder} contains no .html file. Give another folder with --pages")
    return files


def _groups(pages: Sequence[Path]) -> dict[str, list[Path]]:
    groups: dict[str, list[Path]] = {}
    for page in pages:
        groups.setdefault(group_of(page.stem), []).append(page)
    if len(groups) < 2:
        raise ConfigError(f"{pages[0].parent} contains pages of one group only, but at least two groups are "
                          "needed, because one is held out. Give another folder with --pages")
    return groups


def _rows(pages: Sequence[Path], split: str, seed: int, wanted: int, shoot: Callable[[Path, int, int], Screenshot]
           ) -> Iterator[tuple[dict[str, Any], bytes]]:
    """Yields `wanted` pairs (row, its screenshot as PNG). Screenshot n is generated from (seed, split, n), which
    determines the page, the scale and the content."""
    count = empty = 0
    uses: Counter[str] = Counter()
    for visit in range(wanted * 4 + 50):
        if count >= wanted:
            return
        often = 2 + count // 10 + empty // 3  # at most a tenth of the rows per name, unless the pages have no others
        rng = random.Random(f"{seed}/{split}/{visit}")
        page, scale = rng.choice(pages), rng.choice(SCALES)
        shot = shoot(page, zlib.crc32(f"{seed}/{split}/{visit}".encode()), scale)
        rows = rows_of(shot, page.stem, rng, uses, often)[:wanted - count]
        empty += not rows
        for number, row in enumerate(rows):
            name = f"{page.stem}-{split}-{seed}-{visit:05d}"
            count += 1
            yield {"id": f"{name}-{number}", **row, "image": f"images/{name}.png", "split": split}, shot.png
    if count < wanted:
        raise DataError(f"the pages have too few elements: only {count} of {wanted} rows for {split} could be made, "
                        f"and {empty} screenshots had no usable element. Give a folder of other pages with --pages.")


# --- the browser ------------------------------------------------------------------------------------------------------


@contextmanager
def _chromium(program: str | None) -> Iterator[Callable[[Path, int, int], Screenshot]]:
    """Context manager that starts Chromium and yields a function (page, seed, scale) -> Screenshot."""
    program = chromium_program(program or "")
    from playwright.sync_api import Error, sync_playwright

    with sync_playwright() as driver:
        try:
            browser = driver.chromium.launch(executable_path=program, args=[*FLAGS, *STEADY])
        except Error as error:
            raise browser_start_error(program, error, "--browser") from None
        try:
            context = cache(lambda scale: _context(browser, scale))
            yield lambda page, seed, scale: _shoot(context(scale), page, seed, scale)
        except Error as error:
            raise DataError(f"the browser failed: {str(error).splitlines()[0][:200]}") from None
        finally:
            browser.close()


def _context(browser: Any, scale: int) -> Any:
    context = browser.new_context(viewport={"width": _VIEW[0], "height": _VIEW[1]}, device_scale_factor=scale,
                                  locale="en-US", timezone_id="UTC", offline=True)
    context.route("**/*", lambda route: route.continue_() if urlsplit(route.request.url).scheme in ("file", "data")
                  else route.abort())
    return context


def _shoot(context: Any, page: Path, seed: int, scale: int) -> Screenshot:
    """Opens a page, generates its random content from the seed, and takes a screenshot. The page's clock is paused."""
    tab = context.new_page()
    try:
        tab.clock.install(time=0)
        tab.clock.pause_at(1_000)
        tab.goto(page.resolve().as_uri())
        tab.evaluate("seed => { if (Math.seedrandom) Math.seedrandom(seed); "
                     "if (window.core && core.startEpisodeReal) core.startEpisodeReal(); }", str(seed))
        tab.clock.run_for(500)  # delayed page scripts
        result = tab.evaluate(ELEMENTS)
        x1, y1, x2, y2 = (int(v) for v in result["frame"])
        png = tab.screenshot(clip={"x": x1, "y": y1, "width": x2 - x1, "height": y2 - y1}, caret="hide",
                             animations="disabled")
    finally:
        tab.close()
    elements = tuple({**e, "name": ICONS.get(e["name"], e["name"]),
                      "box": [tidy((v - (x1, y1)[i % 2]) * scale) for i, v in enumerate(e["box"])]}
                     for e in result["elements"])
    return Screenshot(png, (x2 - x1) * scale, (y2 - y1) * scale, elements)
