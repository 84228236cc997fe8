"""Web in a real browser: perfect episodes, the same pictures, and pages that do harm."""

import contextlib
import os
import re
import shutil
import signal
import socket
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from tests.tasks.scaffold import assert_ok
from vlrl.config.schema import EnvironmentSettings
from vlrl.data import coordinates
from vlrl.environments.chromium import BROWSERS
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.task import load
from vlrl.tasks import _web_browser, _web_page  # pyright: ignore[reportMissingImports]
from vlrl.tasks._web_oracle import ORACLES  # pyright: ignore[reportMissingImports]
from vlrl.testing import texts

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason="no Chromium on the path")]
FOUND = """<div id=query>{asked}</div><div id=area><button id=b style="position:absolute;left:40px;top:80px;width:80px;
height:60px">{label}</button></div><script>
var WOB_DONE_GLOBAL = false, WOB_RAW_REWARD_GLOBAL = 0;
function finish(reward) {{ WOB_RAW_REWARD_GLOBAL = reward; WOB_DONE_GLOBAL = true; }}
function note(text) {{ document.querySelector('#area').insertAdjacentText('beforeend', text); }}
document.querySelector('#b').onclick = async () => {{ {script} }};</script>"""
CLICK, BESIDE = "click(80, 110)", "click(5, 200)"
"""In pixels of the screenshot at scale 1: on the button, and where nothing is."""


@pytest.fixture(scope="module", autouse=True)
def closed():
    yield
    _web_browser.close_all()


@contextlib.contextmanager
def hosting(task: Any, workers: int = 1):
    host = Environments(lambda _: task, EnvironmentSettings(workers=workers, step_s=200, reset_s=200))
    try:
        yield host
    finally:
        host.close()


def made(folder: Path, seconds: float = 60.0, **scripts: str) -> Any:
    """A task of planted pages, by what a click on their button does."""
    pages = folder / "pages"
    pages.mkdir()
    for name, script in {"good": "finish(1)", **scripts}.items():
        (pages / f"{name}.html").write_text(FOUND.format(asked=f"Do {name}.", label=name, script=script))
    task = load("web", {"html": str(pages), "pages": ("good", *scripts), "heldout_pages": (), "form": "call",
                        "scale": 1, "page_s": seconds})
    task.coordinates = coordinates.make("original")
    return task


def begun(host: Environments, sample: Any) -> Any:
    episode = host.open(sample, 0)
    (first,) = host.reset([episode])
    assert not isinstance(first, EnvironmentFailure), (sample["page"], first)
    return episode, first


def opened(host: Environments, task: Any, page: str) -> Any:
    return begun(host, next(s for s in task.samples("train") if s["page"] == page))


def played(host: Environments, episode: Any, *actions: str) -> list[Any]:
    """The steps of these actions, up to the one that ends the episode."""
    steps: list[Any] = []
    for action in actions:
        steps += host.step([episode], [action])
        if getattr(steps[-1], "done", False):
            break
    return steps


def acted(host: Environments, episode: Any, *actions: str) -> Any:
    return played(host, episode, *actions)[-1]


def state_after(host: Environments, episode: Any, action: str) -> str:
    step = acted(host, episode, action)
    assert not isinstance(step, EnvironmentFailure), step
    return step.state


def web(**settings) -> Any:
    task = load("web", {"page_s": 60.0, "heldout_pages": (), **settings})
    task.coordinates = coordinates.make("norm1000")
    return task


def test_perfect_episodes_succeed_and_show_the_same_again():
    """On every page whose way is known: played by its actions as a model would write them, on every third twice."""
    task = web(pages=tuple(ORACLES))
    assert len(ORACLES) >= 12
    with hosting(task) as host:
        for i, sample in enumerate(task.samples("train")[:len(ORACLES)]):
            actions = task.oracle_actions(sample)
            shown = []
            for _ in range(1 if i % 3 else 2):
                episode, first = begun(host, sample)
                assert first.text.startswith("Task: ") and len(first.text) > 10
                assert first.media[0].source.size == (sample["width"], sample["height"]) == (320, 420)
                steps = [host.step([episode], [action])[0] for action in actions]
                host.close_episodes([episode])
                last = steps[-1]
                assert last.done and last.parts["success"] == 1 and all(s.parts["format"] == 1 for s in steps), (
                    sample["page"], steps)
                shown.append([first.media[0].source.tobytes(), *(s.info["screenshot"] for s in steps)])
            assert shown[0] == shown[-1], sample["page"]


def test_it_keeps_the_contract():
    """With a fifth of the unusual actions, as each takes a step of the page; test_web.py reads any text."""
    with patch.object(texts, "_ODD", texts._ODD[::5]):
        assert_ok(web(pages=("enter-text",)), samples=1)


def test_a_killed_browser_ends_no_episode(tmp_path):
    """The pages of all its episodes are opened again and are where they were."""
    task = made(tmp_path, count="note(window.n = (window.n || 0) + 1); if (window.n == 3) finish(1)")
    with hosting(task) as host:
        (one, _), (other, _) = opened(host, task, "count"), opened(host, task, "count")
        before = [acted(host, episode, CLICK) for episode in (one, other)]
        assert before[0].state == before[1].state
        kill(host)
        two = [acted(host, episode, CLICK) for episode in (one, other)]
        assert two[0].state == two[1].state != before[0].state and not two[0].done
        third = acted(host, one, CLICK)
        assert third.done and third.parts["success"] == 1 and host.restarts == 0
        opened(host, task, "good")  # the browser is there again


def test_more_episodes_than_open_pages_go_on_all_the_same(tmp_path):
    script = "note(window.n = (window.n || 0) + 1); if (window.n == 3) finish(1)"
    task = made(tmp_path, count=script)
    task.open_pages = 2
    with hosting(task) as host:
        playing = [opened(host, task, "count")[0] for _ in range(3)]
        states = [[state_after(host, episode, CLICK) for episode in playing] for _ in range(2)]
        assert all(len(set(turn)) == 1 for turn in states) and states[0][0] != states[1][0]
        browser, end = psutil.Process(host.processes[0]), time.monotonic() + 60
        while sum(map(renders, browser.children(recursive=True))) > 4:  # two pages, a spare one, and Chromium's own
            assert time.monotonic() < end
            time.sleep(0.05)  # those of closed pages end a little later


def renders(process: psutil.Process) -> bool:
    return "--type=renderer" in words_of(process)


def words_of(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):  # one that has just ended
        return process.cmdline()
    return []


def test_chromium_has_disabled_what_playwright_disables_and_no_process_for_its_own_window(tmp_path):
    task = made(tmp_path, good="finish(1)")
    with hosting(task) as host:
        opened(host, task, "good")
        processes = [words_of(process) for process in psutil.Process(host.processes[0]).children(recursive=True)]
    assert any("--type=renderer" in words for words in processes)
    assert not [words for words in processes if "--top-chrome-webui" in words]
    prefix = "--disable-features="
    *others, last = [set(word.removeprefix(prefix).split(",")) for words in processes
                     if words and "chrom" in words[0] and not any(word.startswith("--type=") for word in words)
                     for word in words if word.startswith(prefix)]
    assert others and set().union(*others) <= last


def kill(host: Environments) -> None:
    kill_below(host.processes[0])


def kill_below(number: int | None) -> None:
    for process in psutil.Process(number).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # one that ended with the browser
            if "--remote-debugging-pipe" in process.cmdline():
                os.kill(process.pid, signal.SIGKILL)
                psutil.wait_procs([process], timeout=60)


FAULTS = {
    "endless": ("for (;;) {}", "did not answer within|was closed twice"),  # closed, on a busy machine
    "heavy": ("const all = []; for (;;) all.push(new Array(1e6).fill(Math.random()))", "the page has crashed"),
    "blank": ("location = 'about:blank'", "has navigated to another page|Execution context was destroyed")}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_ends_its_own_episode(tmp_path, name):
    script, why = FAULTS[name]
    task = made(tmp_path, 20.0, **{name: script})
    with hosting(task) as host:
        (bad, _), (good, _) = opened(host, task, name), opened(host, task, "good")
        failed = acted(host, bad, CLICK)
        assert isinstance(failed, EnvironmentFailure)
        assert re.search(why, failed.reason), failed
        assert isinstance(acted(host, bad, CLICK), EnvironmentFailure)
        ended = acted(host, good, BESIDE, CLICK)
        assert not isinstance(ended, EnvironmentFailure), ended
        assert ended.done and ended.parts["success"] == 1 and host.restarts == 0
        host.close_episodes([bad, good])


HARMLESS = {
    "dialog": "alert('one'); note(confirm('two') + ' ' + prompt('three')); finish(0.5)",
    "away": "location = 'http://127.0.0.1:9/x'; setTimeout(() => finish(0.5), 200)",
    "reload": "location = 'good.html'; setTimeout(() => finish(0.5), 200)",
    "popup": "window.open('good.html'); setTimeout(() => finish(0.5), 200)",
    "download": "const a = document.createElement('a'); a.href = 'data:text/plain,x'; a.download = 'x.txt'; "
                "document.body.append(a); a.click(); setTimeout(() => finish(0.5), 200)",
    "nameless": "Promise.allSettled([fetch('/%00'), fetch('/' + 'x'.repeat(5000))]).then(() => finish(0.5))"}


def test_what_a_page_may_not_do_changes_nothing(tmp_path):
    """Dialogs are dismissed, downloads and other pages refused: the page goes on."""
    task = made(tmp_path, **HARMLESS)
    with hosting(task) as host:
        for name in HARMLESS:
            episode, _ = opened(host, task, name)
            step = acted(host, episode, BESIDE, CLICK)
            assert not isinstance(step, EnvironmentFailure), (name, step)
            assert step.done and step.parts["success"] == 1 and step.parts["page"] == 0.5, name
            assert ("The page said: three" in step.observation.text) == (name == "dialog")
            host.close_episodes([episode])


REACH = """
const tried = {}, at = 'http://127.0.0.1:PORT/';
const trying = async (name, call) => { try { tried[name] = String(await call()).slice(0, 40); } catch (e) {
  tried[name] = 'refused'; } };
const timed = promise => Promise.race([promise, new Promise((_, no) => setTimeout(no, 300))]);
for (const [name, url] of Object.entries({host: at, secret: '/../secret.txt', coded: '/%2e%2e/secret.txt',
    slashed: '/..%2fsecret.txt', linked: '/link.txt', file: 'file:///etc/passwd', named: 'http://localhost:PORT/'}))
  await trying(name, async () => (await fetch(url)).text());
await trying('own', async () => (await fetch('/good.html')).status);
await trying('image', () => timed(new Promise((yes, no) => { const i = new Image(); i.onload = yes; i.onerror = no;
  i.src = at + 'i.png'; })));
await trying('socket', () => timed(new Promise((yes, no) => { const s = new WebSocket('ws://127.0.0.1:PORT/');
  s.onopen = yes; s.onerror = no; s.onclose = no; })));
await trying('events', () => timed(new Promise((yes, no) => { const s = new EventSource(at); s.onopen = yes;
  s.onerror = no; })));
await trying('worker', () => timed(new Promise((yes, no) => { const w = new Worker(URL.createObjectURL(new Blob([
  "fetch('" + at + "').then(() => postMessage(1), () => postMessage(0))"]))); w.onmessage = e => e.data ? yes(1) : no();
  })));
await trying('peer', () => new RTCPeerConnection({iceServers: [{urls: 'stun:127.0.0.1:PORT'}]}));
await trying('service', () => navigator.serviceWorker.register('/sw.js'));
navigator.sendBeacon(at, 'x');
for (const tag of ['iframe', 'embed', 'script']) {
  const e = document.createElement(tag); e.src = at; document.body.append(e); }
for (const rel of ['stylesheet', 'prefetch', 'preconnect', 'dns-prefetch', 'icon', 'preload', 'modulepreload']) {
  const e = document.createElement('link'); e.rel = rel; e.href = at; e.as = 'script'; document.head.append(e); }
const form = document.createElement('form'); form.action = at; form.method = 'post'; document.body.append(form);
form.submit();
const frame = document.createElement('iframe'); frame.src = 'file:///etc/passwd'; document.body.append(frame);
alert(Object.entries(tried).map(([k, v]) => k + '=' + v).join(' ').slice(0, 200));
"""


def test_a_page_reaches_no_address_but_its_folder(tmp_path):
    """By every way that a page has, against a listener that takes TCP and UDP on this machine."""
    seen: list[str] = []
    with socket.socket() as tcp, socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        tcp.bind(("127.0.0.1", 0))
        port = tcp.getsockname()[1]
        udp.bind(("127.0.0.1", port))
        tcp.listen(64)

        def listen(ready: socket.socket, take: Any, name: str) -> None:
            with contextlib.suppress(OSError):
                while True:
                    take(ready)
                    seen.append(name)
        for ready, take, name in ((tcp, lambda s: s.accept()[0].close(), "tcp"),
                                  (udp, lambda s: s.recvfrom(99), "udp")):
            threading.Thread(target=listen, args=(ready, take, name), daemon=True).start()
        task = made(tmp_path, reach="start = 1; " + REACH.replace("PORT", str(port)))
        (tmp_path / "secret.txt").write_text("secret")
        (tmp_path / "pages" / "link.txt").symlink_to(tmp_path / "secret.txt")
        with hosting(task) as host:
            episode, _ = opened(host, task, "reach")
            said = []
            for action in (CLICK, *["wait()"] * 4):
                step = acted(host, episode, action)
                assert not isinstance(step, EnvironmentFailure), step
                said.append(step.observation.text)
            told = " ".join(said)
            assert "own=200" in told and told.count("=refused") == told.count("=") - 1 > 8, said
        assert seen == []
        tcp.shutdown(socket.SHUT_RDWR)


def test_an_action_that_cannot_be_read_is_told_and_counted(tmp_path):
    task = made(tmp_path)
    with hosting(task) as host:
        episode, first = opened(host, task, "good")
        step = acted(host, episode, "what?")
        assert step.observation.text.startswith("This action cannot be read: ") and step.parts == {"format": 0.0}
        assert step.observation.media[0].source.tobytes() == first.media[0].source.tobytes() and not step.done
        step = acted(host, episode, 'answer("7")')
        assert step.done and step.parts == {"format": 1.0, "success": 0.0, "page": 0.0}


def test_the_browser_ends_with_its_process(tmp_path):
    task = made(tmp_path, endless="for (;;) {}")
    with hosting(task) as host:
        opened(host, task, "endless")
        started = psutil.Process(host.processes[0]).children(recursive=True)
        assert any(map(renders, started))
    assert psutil.wait_procs(started, timeout=60)[1] == []


def test_a_browser_that_is_not_there_is_named(tmp_path):
    task = made(tmp_path)
    task.browser = "/bin/false"
    with hosting(task) as host:
        (found,) = host.reset([host.open(task.samples("train")[0], 0)])
    assert isinstance(found, EnvironmentFailure) and "/bin/false cannot be started" in found.reason
    assert "task.browser" in found.reason


@contextlib.contextmanager
def paging(folder: Path, kind: Any = _web_browser.PagePool, **given: Any):
    """The pages of a folder, in this process."""
    pages = kind(_web_browser.BrowserSettings(folder, **given))
    try:
        yield pages
    finally:
        pages.close()


def test_a_browser_that_does_not_start_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(_web_browser, "_START_S", 3.0)
    program = tmp_path / "silent"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)
    with paging(tmp_path, program=str(program)) as pages:
        with pytest.raises(_web_browser.PageFailed, match="the browser did not start within 3 s"):
            pages.take()
        assert not [p for p in psutil.Process().children(recursive=True) if p.name() == "sleep"]


class Killed(_web_browser.PagePool):
    """Loses its first browser while a page is made in it."""

    async def _prepared(self, context: Any) -> Any:
        if self.starts == 1:
            kill_below(None)
        return await super()._prepared(context)


def test_a_browser_that_ends_while_a_page_is_made_is_lost(tmp_path):
    with paging(tmp_path, Killed) as pages:
        with pytest.raises(_web_browser.BrowserLost, match="the browser has ended"):
            pages.take()
        assert pages.take().page.url == "about:blank" and pages.starts == 2


class Broken(_web_browser.PagePool):
    """A page cannot be made ready."""

    async def _prepared(self, context: Any) -> Any:
        await (await context.new_page()).evaluate("() => { throw new Error('no way') }")


def test_a_page_that_cannot_be_made_leaves_nothing_open(tmp_path):
    with paging(tmp_path, Broken) as pages:
        for _ in range(3):
            with pytest.raises(_web_browser.PageFailed, match=r"no page can be opened: .*no way"):
                pages.take()
        assert pages._browser.contexts == [] and pages.starts == 1


def test_a_page_that_was_closed_is_opened_again_and_its_actions_are_repeated(tmp_path):
    task = made(tmp_path, count="note(window.n = (window.n || 0) + 1); if (window.n == 3) finish(1)")
    world = task.environment(next(s for s in task.samples("train") if s["page"] == "count"))
    world.reset(0)
    for _ in range(3):
        world._page._pages.run(world._page.tab.page.close())
        step = world.step(CLICK)
    assert step.done and step.parts["success"] == 1
    world.close()


LEAVES = """<body style="margin:0"><div id=query>Do it.</div><button id=b style="position:absolute;left:40px;top:80px;
width:80px;height:60px">press</button><style>#b:hover { background: red }</style><script>
var WOB_DONE_GLOBAL = false, WOB_RAW_REWARD_GLOBAL = 0, found = [window.name, document.cookie,
  history.length, Date.now(), performance.now(), sessionStorage.length, localStorage.length, scrollX];
const asked = indexedDB.open('kept', 1);
asked.onupgradeneeded = () => { found.push('new'); asked.result.createObjectStore('x'); };
asked.onsuccess = () => { found.push('opened'); document.querySelector('#query').textContent = JSON.stringify(found); };
document.querySelector('#b').onclick = () => {
  window.name = sessionStorage.x = localStorage.x = 'kept'; document.cookie = 'x=kept';
  history.pushState({}, '', '#kept'); setInterval(() => 0, 10); new Worker('data:text/javascript,for(;;){}');
};</script>"""


def test_a_page_that_serves_another_episode_is_as_new(tmp_path):
    """Stores, names, history, clock and what the pointer rests on; one that cannot be emptied serves no other."""
    (tmp_path / "leaves.html").write_text(LEAVES)
    (tmp_path / "asks.html").write_text(LEAVES + "<script>onbeforeunload = event => event.preventDefault()</script>")
    with paging(tmp_path) as pages:
        shown, tabs = [], []
        for name in ("leaves", "leaves", "asks", "leaves"):
            page = _web_page.Page(pages, f"{name}.html", 1, 500)
            first = page.begin()
            tabs.append(page.tab)
            seen = page.ask("() => document.querySelector('#query').textContent")
            shown.append((first.sha256, page.act(_web_page.Action("click", (80, 110))).sha256, seen))
            assert seen.endswith('"new","opened"]') and '"","",2,1700000001000,1000,0,0,0,' in seen, seen
            page.close()
        assert len(set(shown)) == 1
        assert len({*map(id, tabs)}) < len(tabs) and tabs[2] is not tabs[3] and tabs[2].page.is_closed()
