"""Pages of a browser for the episodes of the task `web`. A process has one browser, which a thread drives.

    pages = shared(BrowserSettings(root=folder))   # one per process, started on first use
    tab = pages.take()
    pages.use(tab, lambda: tab.page.goto(...)), pages.drop(tab)

Episodes are isolated from each other: each page has its own browser context, and a context is emptied before it is used
again. Pages cannot reach any network address: their files are served under a host name that does not exist, and the
context and the browser refuse every other request."""

import asyncio
import atexit
import contextlib
import logging
import mimetypes
import os
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

import psutil

from vlrl.environments.chromium import FLAGS, STEADY, browser_start_error, chromium_program

T = TypeVar("T")
_log = logging.getLogger(__name__)
HOST = "pages.invalid"
"""Host name under which the pages are served; RFC 2606 guarantees that it never exists."""
SIDES = (160, 210)
"""Width and height of the visible part of a page in CSS pixels, as in MiniWoB."""
_VIEW = (500, 320)  # CSS pixels of the window, also MiniWoB's, with room for what lies beside a page
_SPARES = 1  # empty pages kept ready for an episode
_START_S = 60.0
_CLOSE_S = 20.0
_EMPTY_S = 5.0
_USES = 32  # largest number of episodes per page, because its clock remembers every tick of all of them
_NEWS_S = 0.05  # seconds after which the event that came with an error is known
_IDLE_S = 60.0  # seconds without a page after which the browser is closed
_CLOCK = 1_700_000_000  # seconds since 1970 at which the clock of every page stands
_SHUT = ("--host-resolver-rules=MAP * ~NOTFOUND", "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
         "--webrtc-ip-handling-policy=disable_non_proxied_udp", "--disable-quic", "--dns-prefetch-disable",
         "--no-pings", "--disable-component-update", "--disable-sync", "--disable-default-apps",
         "--proxy-server=socks5://0.0.0.0:1", "--proxy-bypass-list=<-loopback>")
"""Browser flags that disable network access: no host name is resolved, and all other requests go to a proxy that does
not exist."""
_SMALL = ("--js-flags=--max-old-space-size=256", "--disable-gpu", "--disable-dev-shm-usage", "--mute-audio",
          "--disable-extensions", "--disable-smooth-scrolling")
QUIET = """
(() => {
  for (const name of ['RTCPeerConnection', 'webkitRTCPeerConnection', 'WebTransport'])
    try { Object.defineProperty(window, name, {value: undefined, writable: false}); } catch (e) {}
  const sheet = new CSSStyleSheet();
  sheet.replaceSync('*, *::before, *::after { transition: none !important; animation: none !important; ' +
                    'caret-color: transparent !important; scroll-behavior: auto !important; }');
  document.adoptedStyleSheets = [sheet];
  if (window === window.top)
    try { window.name = ''; sessionStorage.clear(); } catch (e) {}
})();
"""
"""A script that runs before the scripts of a page. It disables animations, the blinking of the text cursor, and WebRTC
and WebTransport, which could bypass the request filter. It also clears window.name and sessionStorage."""

_SINCE = f"""
(() => {{
  performance.now = () => Date.now() - {1000 * _CLOCK};
  const frame = window.requestAnimationFrame;
  window.requestAnimationFrame = then => frame(() => then(performance.now()));
}})();
"""
"""A script that runs after the page's clock is installed. Without this script, performance.now() would count the real
milliseconds until the clock was paused, and the milliseconds of earlier episodes."""
_ENDED = "the browser has ended"


class BrowserLost(Exception):
    """The browser has ended or has closed a page. The page can be opened again."""


class PageFailed(Exception):
    """The page of an episode cannot be used any more; the message is the reason."""


@dataclass(frozen=True)
class BrowserSettings:
    """Settings that apply to all pages of a process."""

    root: Path
    """Folder with the pages and all files that they load."""
    scale: int = 2
    """Screenshot pixels per CSS pixel."""
    program: str = ""
    seconds: float = 20.0
    """Time limit in seconds for one call to a page; after it, the call fails and the page is closed."""
    most: int = 32
    """Largest number of open pages. When one more is opened, the least recently used page is closed."""


@dataclass(eq=False)
class Tab:
    """An open page and its state."""

    context: Any
    page: Any
    session: Any
    entered: bool = False
    """Whether the page has loaded its document; from then on it cannot navigate to another document."""
    crashed: bool = False
    failed: str = ""
    """Why the page cannot be used any more; "" if it can."""
    dialog: str = ""
    """Text of the last dialog."""
    uses: int = 1


class PagePool:
    """Opens pages in one browser. A browser that has ended is started again. Public methods work in any thread."""

    def __init__(self, settings: BrowserSettings):
        self.settings, self.owner = settings, os.getpid()
        self.starts = 0
        """How often the browser was started."""
        self.tabs: dict[Tab, None] = {}
        """The pages that episodes are using, the most recently used one last."""
        self._files: dict[str, tuple[bytes, str]] = {}
        self._driver: Any = None
        self._browser: Any = None
        self._spares: deque[Tab] = deque()
        self._filling: asyncio.Task[None] | None = None
        self._idle: asyncio.TimerHandle | None = None
        self._loop = asyncio.new_event_loop()
        self._launching = asyncio.Lock()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pages", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine in the browser's thread; returns its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def take(self) -> Tab:
        """Returns a Tab with an empty page. Raises ConfigError if the browser cannot be started, BrowserLost if the
        browser ends in the meantime, and PageFailed if no page can be opened."""
        return self.run(self._take())

    def use(self, tab: Tab, work: Callable[[], Awaitable[T]]) -> T:
        """Calls `work` in the browser's thread for an open page; returns its result. Raises BrowserLost if the browser
        has ended or closed the page; raises PageFailed, and closes the page, if the call fails or exceeds the time
        limit."""
        return self.run(self._use(tab, work))

    def drop(self, tab: Tab) -> None:
        """Closes a page; does nothing if it is closed already."""
        self.run(self._drop(tab))

    def close(self) -> None:
        """Ends the browser and its thread."""
        if self._thread.is_alive() and self.owner == os.getpid():
            with contextlib.suppress(Exception):
                self.run(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSE_S)
            if not self._thread.is_alive():
                self._loop.close()

    async def _take(self) -> Tab:
        if self._idle:
            self._idle.cancel()
        tab = None
        while self._spares and tab is None:
            tab = self._spares.popleft()
            if tab.crashed or not tab.context.browser.is_connected():
                tab = None
        tab = tab or await self._new()
        while len(self.tabs) >= self.settings.most:
            await self._drop(next(iter(self.tabs)))
        self.tabs[tab] = None
        if self._filling is None or self._filling.done():
            self._filling = asyncio.ensure_future(self._fill())
        return tab

    async def _use(self, tab: Tab, work: Callable[[], Awaitable[T]]) -> T:
        from playwright.async_api import Error
        if tab.failed:
            raise PageFailed(tab.failed)
        if tab not in self.tabs:
            raise BrowserLost("the page was closed to make room for another page (task.open_pages)")
        self.tabs[tab] = self.tabs.pop(tab)
        end = self._loop.time() + self.settings.seconds
        late = f"the page did not answer within {self.settings.seconds:g} s"
        try:
            return await asyncio.wait_for(work(), self.settings.seconds)
        except TimeoutError:
            tab.failed = late
        except PageFailed as error:
            tab.failed = str(error)
        except Error as error:
            await asyncio.sleep(_NEWS_S)
            ended = not (self._browser and self._browser.is_connected() and tab.context.browser is self._browser)
            by_itself = self._loop.time() < end  # a call that was given up may also end with an error
            closed = by_itself and tab.page.is_closed()  # on a busy machine the browser closes pages
            if not tab.crashed and (ended or closed):
                await self._drop(tab)
                raise BrowserLost(_ENDED if ended else "the page was closed") from None
            tab.failed = "the page has crashed" if tab.crashed else _first_line(error) if by_itself else late
        await self._drop(tab)
        raise PageFailed(tab.failed)

    async def _drop(self, tab: Tab) -> None:
        if tab not in self.tabs:
            return
        del self.tabs[tab]
        if len(self._spares) + len(self.tabs) < self.settings.most and await self._emptied(tab):
            self._spares.append(tab)
        else:
            await self._shut(tab)
        if not self.tabs:
            self._idle = self._loop.call_later(_IDLE_S, lambda: asyncio.ensure_future(self._rest()))

    async def _shut(self, tab: Tab) -> None:
        try:
            await asyncio.wait_for(tab.context.close(), _CLOSE_S)
        except TimeoutError:  # it does not close either
            self._kill()
        except Exception:  # it was closed with its browser
            pass

    async def _emptied(self, tab: Tab) -> bool:
        """Resets a page so that another episode can use it. Returns False if that failed or was not tried, because the
        page has failed, has crashed or was used often."""
        if tab.failed or tab.crashed or tab.uses >= _USES or tab.context.browser is not self._browser:
            return False
        try:
            await asyncio.wait_for(_empty(tab), _EMPTY_S)
        except Exception as error:  # e.g. its document asks whether it may be left, or does not answer
            _log.debug("a page is not used again: %s", error)
            return False
        tab.entered, tab.dialog, tab.uses = False, "", tab.uses + 1
        return not tab.crashed and len(tab.context.pages) == 1

    async def _rest(self) -> None:
        if not self.tabs:
            await self._end()

    async def _fill(self) -> None:
        try:
            while len(self._spares) < _SPARES:
                self._spares.append(await self._new())
        except Exception as error:  # the next page is then opened on demand, which reports the error
            _log.debug("no spare page: %s", error)

    async def _new(self) -> Tab:
        """An empty page in a new context. Raises BrowserLost if the browser ends in the meantime, PageFailed for other
        failures."""
        from playwright.async_api import Error
        browser, context = await self._running(), None
        try:
            context = await browser.new_context(
                viewport={"width": _VIEW[0], "height": _VIEW[1]}, device_scale_factor=self.settings.scale, offline=True,
                service_workers="block", accept_downloads=False, locale="en-US", timezone_id="UTC",
                reduced_motion="reduce", permissions=[])
            return await self._prepared(context)
        except BaseException as error:  # also if the call is given up
            await asyncio.sleep(_NEWS_S)
            if context:
                with contextlib.suppress(Exception):  # it was closed with its browser
                    await asyncio.wait_for(context.close(), _CLOSE_S)
            if not isinstance(error, Error):
                raise
            if not browser.is_connected():
                raise BrowserLost(_ENDED) from None
            raise PageFailed(f"no page can be opened: {_first_line(error)}") from None

    async def _prepared(self, context: Any) -> Tab:
        page = await context.new_page()
        tab = Tab(context, page, await context.new_cdp_session(page))
        # a screenshot resets the window to the size that its session has set
        await tab.session.send("Emulation.setDeviceMetricsOverride", {
            "width": _VIEW[0], "height": _VIEW[1], "deviceScaleFactor": self.settings.scale, "mobile": False})
        await context.route("**/*", lambda route: self._serve(tab, route))
        await context.route_web_socket("**/*", lambda socket: socket.close())
        context.on("page", lambda other: asyncio.ensure_future(_closed(other)))
        page.on("dialog", lambda dialog: asyncio.ensure_future(_dismissed(tab, dialog)))
        page.on("crash", lambda _: setattr(tab, "crashed", True))
        await context.add_init_script(QUIET)
        await _pause_clock(context)
        await context.add_init_script(_SINCE)
        return tab

    async def _serve(self, tab: Tab, route: Any) -> None:
        from playwright.async_api import Error
        with contextlib.suppress(Error):  # of a page that was closed meanwhile
            request = route.request
            main = request.is_navigation_request() and request.frame.parent_frame is None
            if main and tab.entered:
                return await route.abort("aborted")  # the page stays as it is
            file = self._file_at(request.url) if request.method == "GET" else None
            if file is None:
                return await route.abort("blockedbyclient")
            tab.entered |= main
            await route.fulfill(body=file[0], content_type=file[1])

    def _file_at(self, url: str) -> tuple[bytes, str] | None:
        try:
            address = urlsplit(url)
            return self._file(address.path) if (address.scheme, address.netloc) == ("http", HOST) else None
        except (OSError, ValueError) as error:
            _log.debug("%r is not found: %s", url[:200], error)
            return None

    def _file(self, path: str) -> tuple[bytes, str] | None:
        if path not in self._files:
            root = self.settings.root.resolve()
            place = (root / unquote(path).lstrip("/")).resolve()
            if not place.is_relative_to(root) or not place.is_file():
                return None
            self._files[path] = place.read_bytes(), mimetypes.guess_type(place.name)[0] or "application/octet-stream"
        return self._files[path]

    async def _running(self) -> Any:
        """The browser, started if necessary. Raises PageFailed if the browser does not start in time."""
        async with self._launching:
            if self._browser is None or not self._browser.is_connected():
                await self._end()
                try:
                    self._browser = await asyncio.wait_for(self._started(), _START_S)
                except TimeoutError:
                    await self._end()
                    raise PageFailed(f"the browser did not start within {_START_S:g} s") from None
                self.starts += 1
            return self._browser

    async def _started(self) -> Any:
        from playwright.async_api import Error, async_playwright
        program = chromium_program(self.settings.program)
        self._driver = await async_playwright().start()
        try:
            return await self._driver.chromium.launch(
                executable_path=program, args=[*FLAGS, *_SHUT, *_SMALL, *STEADY], handle_sigint=False,
                handle_sigterm=False, handle_sighup=False)
        except Error as error:
            raise browser_start_error(program, error, "task.browser") from None

    async def _end(self) -> None:
        browser, driver, self._browser, self._driver = self._browser, self._driver, None, None
        self._spares.clear()
        for end in (browser and browser.close, driver and driver.stop):
            if end:
                try:
                    await asyncio.wait_for(end(), _CLOSE_S)
                except TimeoutError:
                    self._kill()
                except Exception:  # it has ended by itself
                    pass

    def _kill(self) -> None:
        self._browser = None  # its pages have ended with it, also before the driver reports that
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if {"--remote-debugging-pipe", "run-driver"} & {*process.cmdline()}:
                    process.kill()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]


async def _pause_clock(context: Any) -> None:
    await context.clock.install(time=_CLOCK)
    await context.clock.pause_at(_CLOCK + 1)


async def _empty(tab: Tab) -> None:
    await tab.page.mouse.move(-1, -1)  # otherwise the element under the pointer is drawn in its hover state
    await tab.page.goto("about:blank", wait_until="commit")
    await tab.session.send("Storage.clearDataForOrigin", {"origin": f"http://{HOST}", "storageTypes": "all"})
    await tab.session.send("Page.resetNavigationHistory")
    await _pause_clock(tab.context)


async def _closed(page: Any) -> None:
    with contextlib.suppress(Exception):
        await page.close()


async def _dismissed(tab: Tab, dialog: Any) -> None:
    tab.dialog = dialog.message[:200]
    with contextlib.suppress(Exception):
        await dialog.dismiss()


_shared: dict[BrowserSettings, PagePool] = {}


def shared(settings: BrowserSettings) -> PagePool:
    """The PagePool of this process for these settings, created on first use."""
    pages = _shared.get(settings)
    if pages is None or pages.owner != os.getpid():  # a forked process does not have its parent's thread
        pages = _shared[settings] = PagePool(settings)
    return pages


@atexit.register
def close_all() -> None:
    """Ends all browsers of this process."""
    for pages in _shared.values():
        pages.close()
    _shared.clear()
