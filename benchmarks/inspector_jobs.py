"""Five jobs done in the inspector by a script in Chromium: how many actions each takes, and how many seconds.

    vlrl train configs/quickstart.yaml steps=10 eval.every=5 task.rewards.iou=0 task.rewards.format=1 run.dir=runs/form
    python benchmarks/inspector_jobs.py runs/form [--before CHECKOUT] [--only WORD] [--json OUT]

An action is a click, a key, or a field that is set or chosen from. A job begins on the page that the inspector opens
with and ends when what it asks for is in view; its seconds are those of the script, which does not think. `--before`
serves a checkout of commit 194ac16, the last one before the pages had a bar of run, split and steps, in which the same
jobs go by the ways that there were. Each job gets a browser and a copy of the run of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, sync_playwright

from vlrl.environments.chromium import BROWSERS, FLAGS

HERE = Path(__file__).parents[1]
WAIT_MS = 120_000


class Hands:
    """A page, and how often something was done to it."""

    def __init__(self, page: Page):
        self.page, self.actions = page, 0

    def click(self, where: str | Locator) -> None:
        """Clicks the first that fits."""
        self.actions += 1
        (self.page.locator(where) if isinstance(where, str) else where).first.click()

    def key(self, name: str) -> None:
        self.actions += 1
        self.page.keyboard.press(name)

    def choose(self, name: str, value: str) -> None:
        """Chooses in the list of this name."""
        self.actions += 1
        self.page.locator(f".v-screen select[name={name}]").locator("visible=true").first.select_option(value)

    def write(self, name: str, text: str) -> None:
        """Writes into the field of this name."""
        self.actions += 1
        self.page.locator(f".v-screen input[name={name}]").locator("visible=true").first.fill(text)

    def see(self, where: str, text: str = "") -> Locator:
        """Waits until it is in view; is no action."""
        found = self.page.locator(where)
        found = found.filter(has_text=text) if text else found
        found.first.wait_for()
        return found

    def tab(self, name: str) -> None:
        self.click(self.page.locator(".v-tab", has_text=name))

    def asked(self, part: str) -> None:
        """Waits until the address says it and the list has followed."""
        self.page.wait_for_function("part => location.search.includes(part)", arg=part)
        self.see("#v-list .v-count")


def _open_run(hands: Hands) -> None:
    hands.click("#v-runs td.v-name a")
    hands.see("#v-list .v-row")


# --- now --------------------------------------------------------------------------------------------------------------


def stall(hands: Hands) -> None:
    """The page begins with what is wrong; the first line leads to its groups."""
    hands.click(hands.see("#v-wrong .v-finding", "equal rewards").get_by_role("link"))
    hands.asked("alike=yes")


def cheats(hands: Hands) -> None:
    """What is paid in full and is unusual, malformed or of unusual length."""
    _open_run(hands)
    hands.click(hands.page.get_by_role("link", name="full reward, but unusual"))
    hands.asked("odd=yes")


def before_after(hands: Hands) -> None:
    """A sample of Compare: both answers on their picture."""
    hands.tab("Compare")
    hands.see("#v-before-after .v-side .v-frame")


def no_variance(hands: Hands) -> None:
    """The preset."""
    _open_run(hands)
    hands.click(hands.page.get_by_role("link", name="zero variance"))
    hands.asked("alike=yes")


def flag_and_export(hands: Hands) -> None:
    """A key flags an answer, and the next one comes."""
    _open_run(hands)
    hands.click("#v-list .v-row")
    hands.see(".v-card .v-flags")
    for _ in range(5):
        hands.key("g")
    hands.see("#v-list .v-row", "5 good")  # of a group of six and more
    _export(hands)


def _export(hands: Hands) -> None:
    hands.tab("Notes")
    hands.see("#v-notes tbody tr:nth-child(5)")
    hands.click(hands.page.locator("#v-page-notes").get_by_role("button", name="Export"))
    hands.click(hands.page.get_by_label("A set for vlrl sft"))
    hands.click("#v-export-make")
    with hands.page.expect_download() as saved:
        hands.click(hands.page.get_by_role("button", name="Download sft.zip"))
    assert saved.value.path().stat().st_size


# --- before -----------------------------------------------------------------------------------------------------------


def old_stall(hands: Hands) -> None:
    """The plots, of which one is of the groups; then the filters that find them."""
    hands.actions += 1  # to scroll to the plot
    hands.see(".v-chart", "Share of groups without variance").first.scroll_into_view_if_needed()
    old_no_variance(hands)


def old_no_variance(hands: Hands) -> None:
    """Training alone, and a filter behind "More filters"."""
    _open_run(hands)
    hands.choose("kind", "train")
    hands.asked("kind=train")
    hands.click(hands.page.get_by_text("More filters"))
    hands.choose("alike", "yes")
    hands.asked("alike=yes")


def old_cheats(hands: Hands) -> None:
    """Answers of the highest reward, the longest and then the shortest of them: the form is read one by one."""
    _open_run(hands)
    for name, value in (("kind", "train"), ("view", "rollouts")):
        hands.choose(name, value)
        hands.asked(f"{name}={value}")
    hands.choose("sort", "reward")
    hands.asked("sort=reward")
    most = hands.see("#v-list .v-rollouts .v-row .v-value b").first.inner_text()
    hands.click(hands.page.get_by_text("More filters"))
    hands.write("rmin", str(float(most) - 0.01))
    hands.asked("rmin=")
    hands.choose("sort", "length")
    hands.asked("sort=length")
    hands.choose("dir", "up")
    hands.asked("dir=up")


def old_before_after(hands: Hands) -> None:
    """The picture stands in each visit's group: one after the other, of a sample whose id is known."""
    hands.tab("History")
    hands.see("#v-page-history .v-form")
    hands.write("sample", "heldout-000000")
    visits = "#v-page-history table tbody a.go"
    hands.click(hands.see(visits))
    hands.see("#v-group .v-frame")
    hands.page.go_back()
    hands.actions += 1
    hands.click(hands.see(visits).last)
    hands.see("#v-group .v-frame")


def old_flag_and_export(hands: Hands) -> None:
    """Training alone: its groups have several answers. A note is a page of its own: there, flagged, saved, and back."""
    _open_run(hands)
    hands.choose("kind", "train")
    hands.asked("kind=train")
    hands.click("#v-list .v-row")
    for number in range(5):
        hands.see(".v-card")
        here = hands.page.url
        hands.click("#v-group .v-bar a:has-text('note')")
        hands.click(hands.page.locator("#v-note-editor").get_by_label("good", exact=True))
        hands.click("#v-note-save")
        hands.see("#v-page-notes", "Saved.")
        if number < 4:
            hands.click(hands.page.locator("#v-page-notes").get_by_role("link", name="Back to the group"))
            hands.see(".v-chosen")
            hands.key("l")
            hands.page.wait_for_function("old => location.href !== old", arg=here)
            hands.see(f"#v-answer-{number + 1}.v-chosen")
    _export(hands)


JOBS: dict[str, tuple[Callable[[Hands], None], Callable[[Hands], None]]] = {
    "why does this run stall": (stall, old_stall), "answers that cheat": (cheats, old_cheats),
    "a prompt before and after, on the picture": (before_after, old_before_after),
    "all groups without variance": (no_variance, old_no_variance),
    "flag five answers and export the good ones for training": (flag_and_export, old_flag_and_export)}
"""Name -> the job now, and before."""


# --- running ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(checkout: Path, run: Path) -> Iterator[str]:
    """The address of a checkout's inspector over a copy of the run."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        shutil.copytree(run, Path(folder) / run.name, ignore=shutil.ignore_patterns("checkpoints"))
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = [sys.executable, "-m", "vlrl", "app", folder, "--port", str(port)]
        server = subprocess.Popen(command, cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout)},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            for _ in range(600):
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
                    break
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/"
        finally:
            server.terminate()
            server.wait(20)


def measure(checkout: Path, run: Path, old: bool, only: str = "") -> dict[str, Any]:
    """Returns {job: {"actions", "seconds"}} of the jobs whose name holds `only`."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    found: dict[str, Any] = {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=list(FLAGS))
        for name, jobs in JOBS.items():
            if only not in name:
                continue
            with served(checkout, run) as address:
                page = browser.new_page(viewport={"width": 1280, "height": 900})
                page.set_default_timeout(WAIT_MS)
                page.goto(address)
                hands = Hands(page)
                hands.see("#v-runs tbody tr")
                hands.see("#v-curves .v-chart")
                began = time.perf_counter()
                jobs[old](hands)
                found[name] = {"actions": hands.actions, "seconds": round(time.perf_counter() - began, 1)}
                print(f"{'before' if old else 'now'}: {name}: {found[name]}", flush=True)
                page.close()
        browser.close()
    return found


def main() -> None:
    """Does the jobs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--before", type=Path, help="checkout of commit 194ac16")
    parser.add_argument("--only", default="", help="a part of a job's name")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    found = {"now": measure(HERE, asked.run.resolve(), old=False, only=asked.only)}
    if asked.before:
        found["before"] = measure(asked.before.resolve(), asked.run.resolve(), old=True, only=asked.only)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
