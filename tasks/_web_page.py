"""A page of the task `web`: it is opened with a seed, acted on by coordinates, and viewed as a screenshot.

Pages follow the conventions of MiniWoB: WOB_DONE_GLOBAL and WOB_RAW_REWARD_GLOBAL give the state of the episode, and
the element #query has the instruction. The object `core` is used if the page has one."""

import base64
import hashlib
import io
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from ._web_browser import HOST, SIDES, PageFailed, PagePool, Tab

_TICK_MS = 100  # step of the page's clock, in which a timer fires at most once
_WAIT_TICKS = 20
_BEGIN = """
seed => {
  window.__begun = true;
  if (Math.seedrandom) Math.seedrandom(seed);
  if (window.core) {
    core.EPISODE_MAX_TIME = 2e9;
    if (core.startEpisodeReal) core.startEpisodeReal();
  }
}
"""
"""A script that starts the episode. It sets the time limit to 2e9 ms, because above 2 ** 31 ms a timer fires
immediately."""
_STATE = """
async () => {
  if (!window.__begun) return null;
  await Promise.all([...document.images].map(image => image.decode().catch(() => 0)));
  const done = typeof WOB_DONE_GLOBAL === 'undefined' ? false : !!WOB_DONE_GLOBAL;
  const raw = typeof WOB_RAW_REWARD_GLOBAL === 'undefined' ? 0 : Number(WOB_RAW_REWARD_GLOBAL);
  return {done, raw: Number.isFinite(raw) ? raw : 0};
}
"""
_ASKED = """
() => {
  let asked = '';
  try { asked = core.getUtterance(); } catch (e) { }
  if (asked && typeof asked === 'object') asked = asked.utterance;
  if (!asked) { const query = document.querySelector('#query'); asked = query ? query.textContent : ''; }
  return String(asked).replace(/\\s+/g, ' ').trim().slice(0, 2000);
}
"""


@dataclass(frozen=True)
class Action:
    """An action on a page, with points in CSS pixels."""

    verb: str
    point: tuple[float, float] | None = None
    to: tuple[float, float] | None = None
    """The point at which a drag ends."""
    text: str = ""
    """The typed text, the key, the direction of a scroll, or the answer."""


@dataclass(frozen=True)
class PageView:
    """A screenshot of a page, and the state of the episode."""

    picture: Image.Image
    sha256: str
    """Hash of the screenshot's pixels."""
    done: bool
    raw: float
    """The page's own reward, without the discount that the page applies for time."""
    dialog: str
    """Text of a dialog that was dismissed since the last view."""


class Page:
    """The page of an episode. Its methods raise BrowserLost or PageFailed."""

    def __init__(self, pages: PagePool, path: str, seed: int, settle_ms: int):
        self._pages, self._path, self._seed, self._ticks = pages, path, seed, max(1, settle_ms // _TICK_MS)
        self.instruction = ""
        """The instruction that the page shows."""
        self.tab: Tab | None = None

    def begin(self) -> PageView:
        """Opens the page, starts the episode and returns the first view."""
        self.close()
        self.tab = tab = self._pages.take()

        async def begun() -> PageView:
            answer = await tab.page.goto(f"http://{HOST}/{self._path}")
            if answer is None or not answer.ok:
                raise PageFailed(f"there is no page {self._path}")
            await tab.page.evaluate(_BEGIN, str(self._seed))
            self.instruction = await tab.page.evaluate(_ASKED)
            return await self._settled(tab, self._ticks)

        return self._pages.use(tab, begun)

    def act(self, action: Action) -> PageView:
        """Carries out an action and returns the view after the page has settled."""
        tab = self._used()

        async def acted() -> PageView:
            await VERBS[action.verb](tab.page, action)
            return await self._settled(tab, _WAIT_TICKS if action.verb == "wait" else self._ticks)

        return self._pages.use(tab, acted)

    def ask(self, script: str, given: Any = None) -> Any:
        """Runs a script of this package on the page, with the argument `given`; returns the script's result."""
        tab = self._used()
        return self._pages.use(tab, lambda: tab.page.evaluate(script, given))

    def close(self) -> None:
        """Closes the page; does nothing if it is closed already."""
        if self.tab:
            self._pages.drop(self.tab)
            self.tab = None

    def _used(self) -> Tab:
        if self.tab is None:
            raise PageFailed("the page was closed")
        return self.tab

    async def _settled(self, tab: Tab, ticks: int) -> PageView:
        for _ in range(ticks):
            await tab.page.clock.fast_forward(_TICK_MS)
        state: Mapping[str, Any] | None = await tab.page.evaluate(_STATE)
        if state is None:
            raise PageFailed("the page has navigated to another page")
        shot = await tab.session.send("Page.captureScreenshot", {
            "format": "png", "optimizeForSpeed": True,
            "clip": {"x": 0, "y": 0, "width": SIDES[0], "height": SIDES[1], "scale": 1}})
        picture = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
        dialog, tab.dialog = tab.dialog, ""
        sha256 = hashlib.sha256(picture.tobytes()).hexdigest()
        return PageView(picture, sha256, state["done"], float(state["raw"]), dialog)


_SCROLL = 100  # CSS pixels of one scroll
_DIRECTIONS = {"up": (0, -_SCROLL), "down": (0, _SCROLL), "left": (-_SCROLL, 0), "right": (_SCROLL, 0)}


async def _scroll(page: Any, action: Action) -> None:
    await page.mouse.move(*_placed(action.point))
    await page.mouse.wheel(*_DIRECTIONS[action.text])


async def _drag(page: Any, action: Action) -> None:
    await page.mouse.move(*_placed(action.point))
    await page.mouse.down()
    await page.mouse.move(*_placed(action.to), steps=4)
    await page.mouse.up()


async def _nothing(page: Any, action: Action) -> None:
    pass


def _placed(point: tuple[float, float] | None) -> tuple[float, float]:
    x, y = point or (SIDES[0] / 2, SIDES[1] / 2)
    return min(max(x, 0.0), SIDES[0] - 1.0), min(max(y, 0.0), SIDES[1] - 1.0)


VERBS: Mapping[str, Callable[[Any, Action], Awaitable[None]]] = {
    "click": lambda page, action: page.mouse.click(*_placed(action.point)),
    "double_click": lambda page, action: page.mouse.dblclick(*_placed(action.point)),
    "type": lambda page, action: page.keyboard.type(action.text),
    "key": lambda page, action: page.keyboard.press(action.text),
    "scroll": _scroll, "drag": _drag, "wait": _nothing, "answer": _nothing,
}
POINTED = ("click", "double_click", "drag")
"""Verbs of actions that need a point."""
DIRECTIONS = tuple(_DIRECTIONS)
