"""The environment of the task `web`. Each episode has one page, which is opened again if the browser was lost; then all
actions are repeated."""

from collections.abc import Callable
from typing import Any, TypeVar

from vlrl.task.environment import Environment
from vlrl.types import Media, Observation, Sample, Step

from ._web_actions import ActionFormat, UnreadableAction, read
from ._web_browser import BrowserLost, PageFailed, PagePool
from ._web_goals import page_of
from ._web_page import Action, PageView

T = TypeVar("T")
UNREAD = "This action cannot be read"
"""Start of the observation after an action that cannot be parsed."""


class WebEnvironment(Environment):
    """An episode on one page. The page's content depends only on the sample's seed, so all completions of a group and
    all visits see the same page."""

    def __init__(self, task: Any, sample: Sample, form: ActionFormat, pages: PagePool):
        self._task, self._sample, self._form, self._pages = task, sample, form, pages
        self._page = page_of(pages, sample, task.settle_ms)
        self._done: list[Action] = []
        """The actions carried out on the page so far."""
        self._look: PageView | None = None

    def reset(self, seed: int) -> Observation:
        self._done, self._look = [], None
        self._look = self._retried(self._page.begin)
        return self._shown(self._look, f"Task: {self._page.instruction}")

    def step(self, action: str) -> Step:
        before = self._look
        if before is None:
            raise PageFailed("the first action came before the reset of the episode")
        try:
            parsed = read(self._form, self._task, self._sample, action)
        except UnreadableAction as error:
            return Step(self._shown(before, f"{UNREAD}: {error}."), {"format": 0.0},
                        state=before.sha256, info={"unread": str(error)})
        parts = {"format": float(self._form.strict(action))}
        if parsed.verb == "answer":
            return Step(Observation(), {**parts, "success": 0.0, "page": 0.0}, done=True, state="answered",
                        info=_info(parsed, before))
        now = self._retried(lambda: self._page.act(parsed))
        self._done.append(parsed)
        self._look = now
        if now.done:
            parts |= {"success": float(now.raw > 0), "page": now.raw}
        said = f"The page said: {now.dialog}" if now.dialog else ""
        return Step(self._shown(now, said), parts, done=now.done, state=now.sha256, info=_info(parsed, now))

    def close(self) -> None:
        self._page.close()

    def _retried(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BrowserLost:
            pass
        try:
            self._restore()
            return call()
        except BrowserLost as error:
            raise PageFailed(f"{error} twice") from None

    def _restore(self) -> None:
        """Opens the page again and repeats all actions. Raises PageFailed if the page looks different afterwards."""
        if self._look is None:
            return
        look = self._page.begin()
        for action in self._done:
            look = self._page.act(action)
        if look.sha256 != self._look.sha256:
            raise PageFailed("the page looks different after the same actions")

    @staticmethod
    def _shown(look: PageView, text: str) -> Observation:
        return Observation(text, [Media(source=look.picture)])


def _info(action: Action, look: PageView) -> dict[str, Any]:
    return {"action": action.verb, "point": action.point, "to": action.to, "text": action.text[:200],
            "raw": look.raw, "screenshot": look.sha256}
