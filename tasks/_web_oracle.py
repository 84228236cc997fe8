"""Perfect episodes on pages of the task `web`, played as a person who reads the page would act.

Each function plays one kind of page through a `PageDriver`. The driver looks up positions in the document, acts by
coordinates like a model, and records the actions."""

import re
from collections.abc import Callable, Mapping
from typing import Any

from vlrl.errors import DataError
from vlrl.types import Sample

from ._web_browser import BrowserLost, PagePool
from ._web_page import Action, Page

Point = tuple[float, float]
_FIND = """
({selector, words}) => {
  const found = [];
  for (const e of document.querySelectorAll(selector)) {
    const box = e.getBoundingClientRect();
    const text = e.textContent.replace(/\\s+/g, ' ').trim();
    if (box.width < 1 || box.height < 1 || (words !== null && text !== words)) continue;
    found.push([box.left, box.top, box.right, box.bottom]);
  }
  return found;
}
"""
_LINE = """
words => {
  for (const e of document.querySelectorAll('#area .alink')) if (e.textContent === words) {
    const box = e.getClientRects()[0];
    return [box.left, box.top, box.right, box.bottom];
  }
}
"""
_LABELS = "() => [...document.querySelectorAll('#area label')].map(e => e.textContent)"


class PageDriver:
    """Acts on a page and records the actions."""

    def __init__(self, page: Page):
        self.page, self.look, self.actions = page, page.begin(), list[Action]()

    def do(self, verb: str, point: Point | None = None, text: str = "", to: Point | None = None) -> None:
        action = Action(verb, point, to, text)
        self.look = self.page.act(action)
        self.actions.append(action)

    def click(self, selector: str, words: str | None = None, number: int = 0) -> None:
        self.do("click", self.at(selector, words, number))

    def write(self, selector: str, text: str) -> None:
        self.click(selector)
        self.do("type", text=text)

    def at(self, selector: str, words: str | None = None, number: int = 0) -> Point:
        """The centre of an element: the one at index `number` among the elements that match the CSS selector. With
        `words`, only elements with exactly this text are counted."""
        x1, y1, x2, y2 = self.page.ask(_FIND, {"selector": selector, "words": words})[number]
        return (x1 + x2) / 2, (y1 + y2) / 2

    def quoted(self) -> list[str]:
        """The quoted strings in the page's instruction."""
        return re.findall('"([^"]*)"', self.page.instruction)


def _clicks(*selectors: str) -> Callable[[PageDriver], None]:
    def play(driver: PageDriver) -> None:
        for selector in selectors:
            driver.click(selector)
    return play


def _submitted(play: Callable[[PageDriver], Any]) -> Callable[[PageDriver], None]:
    def both(driver: PageDriver) -> None:
        play(driver)
        driver.click("#subbtn")
    return both


def _numbers(driver: PageDriver) -> list[int]:
    return [int(number) for number in re.findall(r"-?\d+", driver.page.instruction)]


def _link(driver: PageDriver) -> None:
    x1, y1, x2, y2 = driver.page.ask(_LINE, driver.quoted()[0])
    driver.do("click", ((x1 + x2) / 2, (y1 + y2) / 2))


def _dialog_2(driver: PageDriver) -> None:
    name = driver.quoted()[0]
    if name == "x":
        driver.click(".ui-dialog-titlebar button")
    else:
        driver.click(".ui-dialog-buttonset button", name)


def _choices(driver: PageDriver) -> None:
    named = driver.page.instruction.removeprefix("Select ").removesuffix(" and click Submit.").split(", ")
    for number, label in enumerate(driver.page.ask(_LABELS)):
        if label in named:
            driver.click("#area label input", number=number)


def _fields(*fields: str) -> Callable[[PageDriver], None]:
    def play(driver: PageDriver) -> None:
        texts = driver.quoted()
        for number, field in enumerate(fields):
            driver.write(field, texts[min(number, len(texts) - 1)])
    return _submitted(play)


def _one_of_two(driver: PageDriver) -> None:
    one, two = (driver.page.ask(_FIND, {"selector": f"#{name}", "words": None})[0] for name in ("subbtn", "subbtn2"))
    corners = [(x, y) for x in (one[0] + 2, one[2] - 2) for y in (one[1] + 2, one[3] - 2)]
    places = [driver.at("#subbtn"), *corners]
    free = [(x, y) for x, y in places if not (two[0] <= x <= two[2] and two[1] <= y <= two[3])]
    driver.do("click", (free or places)[0])


def _sequence(driver: PageDriver) -> None:
    _one_of_two(driver)
    driver.click("#subbtn2")


def _scroll(driver: PageDriver) -> None:
    direction = "down" if "bottom" in driver.page.instruction else "up"
    for _ in range(20):
        before = driver.page.ask("() => document.querySelector('#text-area').scrollTop")
        driver.do("scroll", driver.at("#text-area"), direction)
        if driver.page.ask("() => document.querySelector('#text-area').scrollTop") == before:
            driver.actions.pop()  # it was at its end before
            break


def _spinner(driver: PageDriver) -> None:
    wanted = _numbers(driver)[0]
    for _ in range(abs(wanted)):
        driver.click(f".ui-spinner-{'up' if wanted > 0 else 'down'}")


ORACLES: Mapping[str, Callable[[PageDriver], None]] = {
    "click-test": _clicks("#subbtn"), "click-test-2": _one_of_two,
    "click-button": lambda driver: driver.click("#area button", driver.quoted()[0]), "click-link": _link,
    "click-dialog": _clicks(".ui-dialog-titlebar button"), "click-dialog-2": _dialog_2,
    "click-tab": lambda driver: driver.click("#area ul a", f"Tab #{_numbers(driver)[0]}"),
    "click-checkboxes": _submitted(_choices), "click-option": _submitted(_choices),
    "click-widget": lambda driver: driver.click(f"#area [data-type={driver.quoted()[0]}]"), 
    "click-color": lambda driver: driver.click("#area [data-color='{}']".format(
        driver.page.instruction.removeprefix("Click on the ").removesuffix(" colored box."))),
    "click-button-sequence": _sequence, "click-collapsible": _clicks("#area h3", "#subbtn"),
    "grid-coordinate": lambda driver: driver.click("circle[id='({},{})']".format(*_numbers(driver))),
    "focus-text": _clicks("#tt"),
    "focus-text-2": lambda driver: driver.click("#area input", number=_numbers(driver)[0] - 1),
    "enter-text": _fields("#tt"), "enter-password": _fields("#password", "#verify"),
    "login-user": _fields("#username", "#password"),
    "drag-box": _submitted(lambda driver: driver.do(
        "drag", driver.at("#draggableSmall"), to=driver.at("#draggableLarge"))),
    "scroll-text-2": _submitted(_scroll), "use-spinner": _submitted(_spinner),
}


def perfect_actions(task: Any, sample: Sample, pages: PagePool) -> list[Action]:
    """Plays the page of a sample; returns the actions that solved the page. Raises DataError if the known actions do
    not solve the page."""
    for _ in range(3):
        page = Page(pages, sample["path"], sample["seed"], task.settle_ms)
        try:
            driver = PageDriver(page)
            ORACLES[sample["page"]](driver)
            if not driver.look.done or driver.look.raw <= 0:
                raise DataError(f"sample '{sample.id}': the known actions for {sample['page']} do not solve this page "
                                f"({driver.page.instruction!r}, reward {driver.look.raw:g})")
            return driver.actions
        except BrowserLost:
            continue
        finally:
            page.close()
    raise DataError(f"sample '{sample.id}': the page was lost three times, as the browser ended or closed it")
