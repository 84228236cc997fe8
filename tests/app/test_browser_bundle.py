"""A bundle in a real browser: from a plain web server below a path, and from disk."""

import contextlib
import functools
import http.server
import shutil
import threading
import time
from dataclasses import replace
from urllib.parse import parse_qsl, urlsplit

import pytest
from playwright.sync_api import expect

from tests.app import made_runs
from tests.app.conftest import WAIT_MS, opened
from vlrl.app import bundle, filters
from vlrl.app.index import Index
from vlrl.app.library import Library

pytestmark = [pytest.mark.browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with answers for every filter: episodes, limits, tool errors, cut and malformed answers, scoring errors."""
    run = made_runs.write(tmp_path_factory.mktemp("runs") / "boxes", steps=4, prompts=6)
    run.write_rollouts(2, 1, [made_runs.zoomed(1, turns=6), made_runs.zoomed(2, turns=2)])
    group = made_runs.made_group("boxes", 3, 1)
    run.write_rollouts(1, 1, [replace(group, id="with-a-variant", rollouts=group.rollouts[:3],
                                      aside=(replace(group.rollouts[3], variant="noisy"),))])
    return run.path


@pytest.fixture(scope="module")
def folder(run, tmp_path_factory):
    return bundle.write(run, tmp_path_factory.mktemp("site") / "a path" / "boxes").folder


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_):
        """Says nothing of what is asked."""


@contextlib.contextmanager
def web(root):
    handler = functools.partial(Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/"
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def address(folder):
    with web(folder.parent.parent) as root:
        yield f"{root}a%20path/boxes/"


def until(page, expression):
    """Waits until it is true; page.wait_for_function evaluates a text in the page, which its policy forbids."""
    end = time.monotonic() + WAIT_MS / 1000
    while not page.evaluate(expression):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(50)


def counted(page, words):
    expect(page.locator("#v-list .v-count")).to_contain_text(words)


def look_around(page, address):
    """Overview, list, filter, group with its picture, keys, back; wherever the files lie."""
    page.goto(address)
    expect(page.locator("#v-page-runs h1")).to_have_text("boxes")
    expect(page.locator(".v-curve svg").first).to_be_visible()
    page.locator(".v-finding a").first.click()
    expect(page.locator("#v-list .v-rows")).to_be_visible()
    page.locator(".v-tab-rollouts").click()
    page.locator(".v-presets a").first.click()
    counted(page, "Rewards of a group: all equal ×")
    page.locator(".v-away").first.click()
    counted(page, "27 groups")
    until(page, "document.querySelector('.v-row img')?.naturalWidth > 0")
    page.locator(".v-row").first.click()
    expect(page.locator(".v-group")).to_be_visible()
    until(page, "document.querySelector('.v-frame img')?.naturalWidth > 0")
    page.keyboard.press("l")
    page.keyboard.press("l")
    expect(page.locator(".v-chosen")).to_have_id("v-answer-1")
    assert page.locator("g.v-of-0.v-faint").count() and not page.locator("g.v-of-1.v-faint, g.v-of-t.v-faint").count()
    first = page.url
    page.keyboard.press("j")
    expect(page).not_to_have_url(first)
    page.go_back()
    expect(page.locator(".v-chosen")).to_have_id("v-answer-1")
    page.reload()
    expect(page.locator(".v-chosen")).to_have_id("v-answer-1")
    page.keyboard.press("u")
    counted(page, "27 groups")


def test_below_a_path_of_a_plain_server_and_from_disk(page, address, folder):
    for root in (address, (folder / "index.html").as_uri()):
        look_around(page, root)


QUERIES = """
kind=all | kind=eval | kind=eval&set=heldout&from=4 | kind=all&order=best | kind=all&order=worst | order=mixed | dir=up
cut=yes | cut=no&view=rollouts | form=no | form=yes&view=rollouts | odd=yes&view=rollouts&kind=all | odd=no
alike=yes | alike=no&kind=all | err=yes | err=no&view=rollouts | tool=yes&view=rollouts | tool=no&view=rollouts
end=limit | end=turns&view=rollouts | end=length | tmin=3 | tmax=4&view=rollouts | cat=green | sample=boxes-3&kind=all
part=iou&pmin=0.5&view=rollouts&sort=part | part=format&pmax=0.5 | part=iou&sort=part&view=rollouts&dir=up
rmin=0.5&rmax=0.9&view=rollouts&sort=reward&dir=up | view=rollouts&sort=advantage&amin=0
lmin=30&view=rollouts&sort=length | view=rollouts&sort=sample_id&dir=up
view=rollouts&sort=category | view=rollouts&sort=index&at=2
from=1&to=2 | text=green%7Cblue | text=GUESS%2C%20try%201&view=rollouts | text=%5EUnable | text=scor&kind=all | dmin=0.2
view=rollouts&kind=all&at=3 | view=rollouts&sort=difficulty | step=2 | set=train | cut=yes&alike=no&order=worst | rmin=9
"""


VISIT = "search => { document.getElementById('v-list').replaceChildren(); vlrl.visit(search); }"
"""Goes where a link of the page to this query goes, without loading it again; what was listed is away at once."""


def test_every_filter_and_order_shows_what_the_app_shows(page, address, run):
    """The same locations asked of the app's index and of the bundle: the same number, the same rows in one order."""
    index, some = Index(Library(run.parent), budget_s=1e9), 0
    page.goto(f"{address}?page=rollouts&run=boxes")
    counted(page, "27 groups")
    for location in [q.strip() for line in QUERIES.strip().splitlines() for q in line.split("|")]:
        where = {**dict(parse_qsl(location)), "run": "boxes"}
        alone = where.get("view") == "rollouts"
        found = (index.rollouts if alone else index.groups)(filters.query_of(where), int(where.get("at", 1)) - 1, 50)
        page.evaluate(VISIT, f"?page=rollouts&run=boxes&{location}")
        counted(page, f"{found.total} {'rollout' if alone else 'group'}{'' if found.total == 1 else 's'}")
        expect(page.locator(".v-row")).to_have_count(len(found.rows))
        links = page.locator(".v-row").evaluate_all("rows => rows.map(row => row.href)")
        shown = [dict(parse_qsl(urlsplit(link).query)) for link in links]
        keys = [(s["source"], s["split"], int(s["step"]), s["group"], *([int(s["rollout"])] if alone else []))
                for s in shown]
        assert keys == [tuple(row.key[1:]) for row in found.rows], location
        some += bool(keys)
    index.close()
    assert some > 35


def test_an_episode_a_search_and_wrong_filters(page, address):
    page.goto(f"{address}?page=rollouts&text=(")
    expect(page.locator("#v-list .v-note")).to_contain_text("not a valid regular expression")
    page.goto(f"{address}?page=rollouts&rmin=x")
    expect(page.locator("#v-list .v-note")).to_contain_text("must be numbers")
    page.goto(f"{address}?page=rollouts&rmin=99")
    expect(page.locator("#v-list .v-empty")).to_contain_text("Nothing passes")
    page.goto(f"{address}?run=boxes&step=1&group=none")
    expect(page.locator("#v-group .v-note")).to_contain_text("not in the bundle")
    page.goto(f"{address}?page=rollouts")
    page.get_by_label("Text, as a regular expression").fill("guess, try 2")
    counted(page, "guess, try 2 ×")
    page.locator(".v-row").first.click()
    until(page, "CSS.highlights.get('v-found')?.size > 0")
    page.goto(f"{address}?page=rollouts&tmin=6")
    page.locator(".v-row").first.click()
    expect(page.locator("#v-turns .v-turn")).to_have_count(7)
    page.keyboard.press("l")
    page.keyboard.press("l")
    expect(page.locator("#v-turns h3")).to_contain_text("#1")
    page.keyboard.press("t")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.previousElementSibling.matches('.v-turn')")


def test_on_a_phone(chromium, address):
    with opened(chromium, width=390, height=844, color_scheme="dark") as page:
        for query in ("", "?page=rollouts", "?page=rollouts&view=rollouts&cut=yes", "?page=rollouts&tmin=6"):
            page.goto(f"{address}{query}")
            expect(page.locator("#v-list .v-row").first if query else page.locator("h1")).to_be_visible()
            assert page.evaluate("document.documentElement.scrollWidth") == 390
        page.locator(".v-row").first.click()
        expect(page.locator("#v-turns")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(21, 25, 31)"


def test_hostile_texts_run_nowhere(chromium, tmp_path):
    made = bundle.write(made_runs.hostile(tmp_path), tmp_path / "b").folder
    with web(tmp_path / "b") as served, opened(chromium) as page:
        for address in (served, (made / "index.html").as_uri()):
            page.goto(f"{address}?page=rollouts&kind=all&view=rollouts")
            expect(page.locator(".v-row").first).to_be_visible()
            page.goto(f"{address}?page=rollouts&kind=all&text=hacked")
            page.locator(".v-row").first.click()
            expect(page.locator(".v-group")).to_contain_text("window.hacked=1")
            for _ in range(4):
                page.keyboard.press("l")
            expect(page.locator(".v-chosen")).to_be_visible()
            page.wait_for_timeout(200)
            assert page.evaluate("window.hacked") is None
    every = [path.read_text(encoding="utf-8") for path in made.rglob("*") if path.suffix in (".js", ".html", ".md")]
    assert not any("TOP-SECRET" in text for text in every)


def test_the_policy_stops_what_got_into_the_data(chromium, folder, tmp_path):
    """Even HTML that cards.py would never write: neither its script runs nor its picture is asked for."""
    again = tmp_path / "b"
    shutil.copytree(folder, again)
    for file in (again / "data").glob("g*.js"):
        text = file.read_text()
        file.write_text(text.replace('{"html":"', '{"html":"\\u003cimg src=x onerror=window.hacked=1>\\u003cimg '
                                     'src=http://127.0.0.2:9/x>\\u003ciframe srcdoc=\'\\u003cscript>parent.hacked=1'
                                     '\\u003c/script>\'>\\u003c/iframe>', 1))
    with chromium.new_page() as page, web(again) as served:
        said, asked = [], []
        page.on("console", lambda message: said.append(message.text))
        page.on("requestfinished", lambda request: asked.append(request.url))
        page.goto(f"{served}?page=rollouts")
        page.locator(".v-row").first.click()
        expect(page.locator(".v-group")).to_be_visible()
        page.wait_for_timeout(300)
        assert page.evaluate("window.hacked") is None and any("Content Security Policy" in text for text in said)
        assert [url for url in asked if not url.startswith(served)] == []
        for file in (again / "data").glob("g*.js"):
            file.unlink()
        page.goto(f"{served}?page=rollouts&kind=train")  # a piece that is missing is named
        page.locator(".v-row").first.click()
        expect(page.locator("#v-list .v-note")).to_contain_text("cannot be read")
