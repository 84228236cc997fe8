"""An inspector that is really served, and a real browser that forgives nothing."""

import contextlib
import functools
import importlib.util
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.app import made_runs
from vlrl.environments.chromium import BROWSERS, FLAGS

UPLOADING = "warning: Method not implemented."
"""Gradio says so whenever a file was uploaded."""
WAIT_MS = 180_000
"""For an event in the page: a first page takes a minute where many tests share the cores."""
HAS_CHROMIUM = any(map(shutil.which, BROWSERS))
if not all(map(importlib.util.find_spec, ("gradio", "duckdb"))):
    collect_ignore_glob = ["test_*.py"]
elif not importlib.util.find_spec("playwright"):
    collect_ignore_glob = ["test_browser_*.py"]


def pytest_collection_modifyitems(items) -> None:
    skip = pytest.mark.skip(reason="no Chromium on the path")
    for item in items:
        if item.get_closest_marker("browser") and not HAS_CHROMIUM:
            item.add_marker(skip)


@contextlib.contextmanager
def serving(root: Path, **options) -> Iterator[str]:
    """The app over a folder of runs on a free port; its address, ending in "/"."""
    from vlrl.app import server
    with ThreadPoolExecutor(1) as aside:  # playwright's loop runs in this thread
        app, _ = aside.submit(server.create, root, **options).result()
    with listening(app) as port:
        yield f"http://127.0.0.1:{port}/"


@contextlib.contextmanager
def listening(app) -> Iterator[int]:
    import uvicorn
    running = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not running.started:
            assert thread.is_alive(), "the server ended"
            time.sleep(0.02)
        yield listener.getsockname()[1]
        running.should_exit = True
        thread.join(10)


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Path:
    """A folder of finished, running, failed and interrupted runs; only to be read."""
    root = tmp_path_factory.mktemp("app") / "runs"
    made_runs.make(root)
    return root


@pytest.fixture(scope="session")
def served(runs) -> Iterator[str]:
    with serving(runs) as address:
        yield address


@pytest.fixture(scope="package")
def chromium():
    """One browser for the tests of this folder alone: while it is open, this thread has a running event loop."""
    from playwright.sync_api import expect, sync_playwright
    expect.set_options(timeout=WAIT_MS)  # of every test: the machine may be busy
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=program, args=[*FLAGS, "--renderer-process-limit=1"])
        yield browser
        browser.close()
        _context.cache_clear()


@functools.cache
def _context(chromium, **options):
    """The window whose tabs are opened with these options. Its first tab stays, on an empty page of 127.0.0.1: the
    others then share its process, which saves a third of opening a page, with their scripts compiled once."""
    context = chromium.new_context(**options)
    context.set_default_timeout(WAIT_MS)
    first = context.new_page()
    first.route("http://127.0.0.1/", lambda route: route.fulfill(body=""))
    first.goto("http://127.0.0.1/")
    return context


@contextlib.contextmanager
def opened(chromium, host="127.0.0.1", width=1280, height=900, allowed=(UPLOADING,), **options):
    """A page in a new tab; at its end nothing but what is `allowed` stands in its console and nothing was asked of
    another host than `host`. Where a test fails, what the page saw is printed."""
    from playwright.sync_api import Error
    said, places, asked = [], [], []
    page = _context(chromium, **options).new_page()
    page.set_viewport_size({"width": width, "height": height})
    page.on("console", lambda message: (said.append(f"{message.type}: {message.text}"), places.append(message.location))
            if message.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: said.append(f"error: {error}"))
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: (said.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    try:
        yield page
        foreign = [url for url in asked if urlsplit(url).scheme not in ("data", "blob", "file")
                   and urlsplit(url).hostname != host]
        assert foreign == [] and [line for line in said if line not in allowed] == []
    except Exception:
        with contextlib.suppress(Error):  # a closed page has no text
            print(page.url, said, places, asked[-9:], page.locator("body").inner_text(timeout=9000)[:2000], sep="\n")
        raise
    finally:
        page.context.clear_cookies()
        page.close()


class Gate:
    """Stands between a page and the server's answers from before the page is loaded: Chromium lets a request by that
    comes just after a route was set. While it is closed, what it `holds` is neither answered nor refused."""

    def __init__(self, page):
        self.held, self._holds = [], None
        page.route("**/gradio_api/run/predict*", self._handle)

    def close(self, holds=lambda request: True):
        self._holds = holds

    def open(self):
        """What is held stays so; later requests are answered."""
        self._holds = None

    def release(self):
        self.open()
        for route in self.held:
            route.continue_()
        self.held = []

    def _handle(self, route):
        if self._holds and self._holds(route.request):
            self.held.append(route)
        else:
            route.continue_()


@pytest.fixture
def page(chromium):
    with opened(chromium) as page:
        yield page


@pytest.fixture
def phone(chromium):
    """A narrow page that prefers dark."""
    with opened(chromium, width=400, height=800, color_scheme="dark") as page:
        yield page
