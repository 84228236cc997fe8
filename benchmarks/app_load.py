"""What a browser fetches for the first look at each page of the inspector, beyond an empty page of Gradio.

    vlrl train configs/quickstart.yaml steps=10 eval.every=5 run.dir=runs/quickstart
    python benchmarks/app_load.py runs/quickstart [--checkout FOLDER]

Bytes are those on the wire, headers and compression included, and requests all that were answered, as Chromium's
debugging protocol tells them with the cache off, until the page is in view and nothing more came for some seconds. That
pages ask again every few seconds whether anything changed is switched off here. The empty page is `gr.Blocks()` with
system fonts, as the inspector has them. The other checkout is one to compare with.
"""

from __future__ import annotations

import argparse
import shutil
import time
from pathlib import Path

import gradio as gr
from inspector_jobs import HERE, WAIT_MS, served
from playwright.sync_api import Browser, sync_playwright

from vlrl.environments.chromium import BROWSERS, FLAGS

QUIET_S = 5.0
PAGES = {"runs": ("page=runs&runs={run}", "#v-curves .v-chart svg"), "rollouts": ("page=rollouts&run={run}", ".v-row"),
         "a group": ("{group}", ".v-card"), "history": ("page=history&run={run}", "#v-page-history .v-list"),
         "compare": ("page=compare&a={run}", "#v-compare-charts svg"),
         "curriculum": ("page=curriculum&run={run}", "#v-curriculum-charts svg"),
         "playground": ("page=playground", "#v-play-ask"), "notes": ("page=notes", "#v-export")}
"""Name -> its address, and what is in view when it is there."""
Load = tuple[float, int, int]
"""MB, requests, of them pictures of the run."""


def load(browser: Browser, url: str, shown: str) -> Load:
    """Returns what one visit fetches."""
    page, sizes, asked = browser.new_page(viewport={"width": 1280, "height": 900}), dict[str, int](), dict[str, str]()
    page.set_default_timeout(WAIT_MS)
    page.add_init_script("window.setInterval = () => 0")
    wire = page.context.new_cdp_session(page)
    wire.send("Network.enable")
    wire.send("Network.setCacheDisabled", {"cacheDisabled": True})
    wire.on("Network.requestWillBeSent", lambda e: asked.__setitem__(e["requestId"], e["request"]["url"]))
    wire.on("Network.loadingFinished", lambda e: sizes.__setitem__(e["requestId"], e["encodedDataLength"]))
    page.goto(url)
    page.locator(shown).first.wait_for()
    last, since = -1, time.monotonic()
    while time.monotonic() - since < QUIET_S:
        if len(asked) != last:
            last, since = len(asked), time.monotonic()
        page.wait_for_timeout(200)
    page.close()
    fetched = [key for key, address in asked.items() if address.startswith("http") and key in sizes]
    return sum(sizes[key] for key in fetched) / 1e6, len(fetched), sum("/vlrl/media" in asked[key] for key in fetched)


def first_group(browser: Browser, address: str, run: str) -> str:
    """Returns the query of the first group in the list."""
    page = browser.new_page()
    page.set_default_timeout(WAIT_MS)
    page.goto(f"{address}?page=rollouts&run={run}")
    query = page.locator("a.v-row").first.get_attribute("href") or ""
    page.close()
    return query.lstrip("?")


def measure(browser: Browser, checkout: Path, run: Path) -> dict[str, Load]:
    """Returns what each page of a checkout fetches."""
    found = {}
    with served(checkout, run) as address:
        group = first_group(browser, address, run.name)
        for name, (query, shown) in PAGES.items():
            found[name] = load(browser, f"{address}?{query.format(run=run.name, group=group)}", shown)
    return found


def empty(browser: Browser) -> Load:
    """Returns what an empty page of Gradio fetches."""
    with gr.Blocks() as nothing:
        pass
    _, address, _ = nothing.launch(prevent_thread_lock=True, quiet=True, server_name="127.0.0.1",
                                   theme=gr.themes.Base(font=["system-ui"], font_mono=["monospace"]))
    found = load(browser, address, ".gradio-container")
    nothing.close()
    return found


def main() -> None:
    """Prints a line a page, beyond the empty one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkout", type=Path, default=HERE)
    asked = parser.parse_args()
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        size, count, _ = empty(browser)
        print(f"An empty page fetches {size:.3f} MB in {count} requests. Beyond it:\n")
        print("| page | MB | requests | of them the run's pictures |\n|---|---|---|---|")
        for name, one in measure(browser, asked.checkout.resolve(), asked.run.resolve()).items():
            print(f"| {name} | {one[0] - size:.3f} | {one[1] - count} | {one[2]} |")
        browser.close()


if __name__ == "__main__":
    main()
