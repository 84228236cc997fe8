r"""Goals of the task `web` in addition to those that pages define: ordered sub-goals, each with a rule that checks the
state of the page.

    {"page": "click-tab", "seed": 12, "goals": [{"instruction": "Open the tab \"Tab #2\".",
     "check": {"kind": "open", "role": "tab", "name": "Tab #2"}, "actions": [{"verb": "click", "point": [58, 90]}]}]}

A sub-goal is reached as soon as its check holds after an action, and stays reached; from then on the next sub-goal is
tested. The last sub-goal completes the episode. If the sample has a number in the field `subgoals`, the prompt asks
only for so many sub-goals, the first ones. Learning to Navigate the Web (arXiv 1812.09195) increases this number during
training."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlrl.errors import ConfigError, DataError
from vlrl.types import Sample

from ._web_browser import PagePool
from ._web_elements import SEEN, WATCH, Element, PageState, page_state
from ._web_page import VERBS, Action, Page, PageView


@dataclass(frozen=True)
class Check:
    """A condition on the elements of a page that have this role and name. It holds if at least one of these elements
    satisfies it; the kind `closed` requires that there is no such element."""

    kind: str
    """The kind of condition, one of KINDS."""
    role: str
    name: str
    value: str = ""
    """For kind `typed`: the text that the field must contain."""

    def holds(self, page: PageState) -> bool:
        return KINDS[self.kind](self, page)


def _of_element(test: Callable[[Element, Check], bool]) -> Callable[[Check, PageState], bool]:
    return lambda check, page: any(test(one, check) for one in page.of(check.role, check.name))


KINDS: Mapping[str, Callable[[Check, PageState], bool]] = {
    "checked": _of_element(lambda one, _: one.checked is True),
    "unchecked": _of_element(lambda one, _: one.checked is False),
    "typed": _of_element(lambda one, check: one.value == check.value),
    "open": _of_element(lambda one, _: one.open is True),
    "focused": _of_element(lambda one, _: one.focused),
    "closed": lambda check, page: not page.of(check.role, check.name),
    "pressed": lambda check, page: (check.role, check.name) in page.pressed,
}
"""Kind of check -> function of (check, state of the page) that tells whether the check holds."""
_WORDS = {"button": "the button", "link": "the link", "tab": "the tab", "checkbox": "the box", "radio": "the option",
          "field": "the field", "dialog": "the dialog", "menuitem": "the menu item", "option": "the list item",
          "treeitem": "the list item", "switch": "the switch"}
_ASKED = {"checked": "Tick {}", "unchecked": "Untick {}", "typed": 'Type "{value}" into {}', "open": "Open {}",
          "focused": "Put the cursor into {}", "closed": "Close {}", "pressed": "Click {}"}
MOST_GOALS = 20


def request_text(check: Check) -> str:
    """The instruction for a single check, without a full stop, such as: Tick the box "Cats"."""
    what = _WORDS.get(check.role, "")
    wording = "Choose {}" if (check.kind, check.role) == ("checked", "radio") else _ASKED[check.kind]
    return wording.replace("{}", f'{what} "{check.name}"'.strip() if check.name else what).replace(
        "{value}", check.value)


def instruction(checks: Sequence[Check]) -> str:
    """The instruction for sub-goals in order, one sentence per sub-goal."""
    first, *rest = map(request_text, checks)
    return " ".join([f"{first}.", *(f"Then {one[0].lower()}{one[1:]}." for one in rest)])


@dataclass(frozen=True)
class Goal:
    """One sub-goal, and the actions that reached it."""

    check: Check
    actions: tuple[Action, ...]

    def row(self) -> dict[str, Any]:
        """The sub-goal as JSON, in the format that `read_goals` parses."""
        check = {name: value for name, value in vars(self.check).items() if value != ""}
        return {"instruction": f"{request_text(self.check)}.", "check": check, "actions": [
            {name: list(value) if isinstance(value, tuple) else value for name, value in vars(action).items() if value}
            for action in self.actions]}


def read_goals(row: Mapping[str, Any]) -> tuple[Goal, ...]:
    """Parses the sub-goals of a row. Raises DataError naming the row and what is wrong with it."""
    entries = row.get("goals")
    if not isinstance(entries, list) or not 0 < len(entries) <= MOST_GOALS:
        raise DataError(f"row {row.get('id')!r}: goals must be a list of 1 to {MOST_GOALS} sub-goals, as `vlrl data "
                        "synthesize` writes them")
    goals = []
    for number, one in enumerate(entries, 1):
        try:
            check = Check(**{str(k): _text(v) for k, v in one["check"].items()})
            if check.kind not in KINDS or (check.kind == "typed") != bool(check.value):
                raise ValueError(f"there is no check {check.kind!r} with value {check.value!r}")
            goals.append(Goal(check, tuple(map(_action, one.get("actions", ())))))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise DataError(f"row {row.get('id')!r}: sub-goal {number}: {error}; a check has a kind ("
                            f"{', '.join(KINDS)}), a role, a name and, for kind typed, a value") from None
    return tuple(goals)


def _action(entry: Mapping[str, Any]) -> Action:
    if entry["verb"] not in VERBS:
        raise ValueError(f"there is no action {entry['verb']!r}")
    point, to = (tuple(float(v) for v in entry[name]) if entry.get(name) else None for name in ("point", "to"))
    if any(place is not None and len(place) != 2 for place in (point, to)):
        raise ValueError(f"a point must have two numbers: {entry!r}")
    return Action(entry["verb"], point, to, _text(entry.get("text", "")))  # pyright: ignore[reportArgumentType]


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 200:
        raise ValueError(f"{str(value)[:40]!r} is not a text of at most 200 characters")
    return value


def episode_goals(sample: Sample) -> tuple[Goal, ...]:
    """The sub-goals that an episode asks for: all sub-goals of the row or, if the sample has the field `subgoals`, the
    first `subgoals` of them. Raises ConfigError if `subgoals` is not a positive integer."""
    goals, most = read_goals(sample.row), sample.get("subgoals")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ConfigError(f"curriculum.stages: fields.subgoals must be a whole number >= 1 (the number of sub-goals to "
                          f"ask for), got {most!r}")
    return goals[:most]


class GoalPage(Page):
    """A page whose own goal is replaced by sub-goals, given by their `checks`. Each PageView says whether all of them
    are reached."""

    def __init__(self, pages: PagePool, path: str, seed: int, settle_ms: int, checks: Sequence[Check] = ()):
        super().__init__(pages, path, seed, settle_ms)
        self.checks, self.reached = tuple(checks), 0
        self.state = PageState((), frozenset())
        """The state of the page's elements after the last action."""

    def begin(self) -> PageView:
        super().begin()
        self.reached = 0
        self.instruction = instruction(self.checks) if self.checks else ""
        self.ask(WATCH)
        tab = self._used()
        return self._judged(self._pages.use(tab, lambda: self._settled(tab, 0)))

    def act(self, action: Action) -> PageView:
        return self._judged(super().act(action))

    def _judged(self, look: PageView) -> PageView:
        """Returns the PageView `look` with `done` and `raw` set according to the sub-goals. Without sub-goals, only the
        page ends the episode, and `raw` is 0."""
        self.state = page_state(self.ask(SEEN))
        while self.reached < len(self.checks) and self.checks[self.reached].holds(self.state):
            self.reached += 1
        won = 0 < len(self.checks) == self.reached
        # the same screenshot with more sub-goals reached is a different state
        return replace(look, done=look.done or won, raw=float(won), sha256=f"{look.sha256}-{self.reached}")


def page_of(pages: PagePool, sample: Sample, settle_ms: int) -> Page:
    """The page of a sample: a GoalPage if its row has sub-goals, else a Page."""
    if "goals" not in sample.row:
        return Page(pages, sample["path"], sample["seed"], settle_ms)
    checks = [goal.check for goal in episode_goals(sample)]
    return GoalPage(pages, sample["path"], sample["seed"], settle_ms, checks)
