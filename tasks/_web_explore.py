"""New goals for the task `web`, found by exploring pages: every change of a page that an action causes can become a
goal.

    goals = explore(task, page="click-tab", seed=12, plan=[ANY, ANY], rng=rng)      # None if no goal was found

Each step of a walk clicks or types, and each change of the page becomes a sub-goal with a check. MobileGUI-RL (arXiv
2507.05720) walks at random and lets a model write the instruction; here a rule writes it, so that a rule can check it.
`vary` makes new goals from a goal that a model fails; WebRL (arXiv 2411.02337) lets a model write such goals."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._web_browser import BrowserLost, PageFailed
from ._web_elements import Element, PageState, askable
from ._web_goals import MOST_GOALS, Check, Goal, GoalPage, read_goals
from ._web_page import Action

_LOST = 3  # browser crashes tolerated during one walk
_TYPES = 0.75  # share of fields that are typed in; the others are focused
_TYPED = ("apple", "river", "seven", "cloud", "north", "maria", "oscar", "blue", "paper", "2024", "42", "ok")


@dataclass(frozen=True)
class StepPattern:
    """Constraints on one step of a walk over a page: the kind of check that must hold after the step, the role and name
    of the element that is acted on, and the text that is typed (`value`). "" = no constraint."""

    kind: str = ""
    role: str = ""
    name: str = ""
    avoid: str = ""
    """A name that the element of the step must not have."""
    value: str = ""


ANY = StepPattern()


def explore(task: Any, page: str, seed: int, plan: Sequence[StepPattern], rng: random.Random) -> list[Goal] | None:
    """Takes a walk over a page, one step per entry of `plan`; returns the sub-goals that the walk reached. They are
    tested by repeating the walk's actions on a fresh page. Returns None if the page has no elements that fit the
    plan, or if the second walk does not reach the same sub-goals. Raises PageFailed if the page cannot be used."""
    state = rng.getstate()
    for _ in range(_LOST):
        rng.setstate(state)
        try:
            goals = _walk(task, page, seed, plan, rng)
            return goals if goals and solved(task, page, seed, goals) else None
        except BrowserLost:
            continue
    raise PageFailed(f"the page was lost {_LOST} times, as the browser ended or closed it")


def solved(task: Any, page: str, seed: int, goals: Sequence[Goal]) -> bool:
    """Whether the sub-goals are reached one by one: on a fresh page, the actions of each sub-goal must reach this
    sub-goal and no later one."""
    opened = _opened(task, page, seed, [goal.check for goal in goals])
    try:
        look = opened.begin()
        for number, goal in enumerate(goals):
            if opened.reached != number:
                return False
            for action in goal.actions:
                look = opened.act(action)
        return look.done and look.raw > 0
    finally:
        opened.close()


def _opened(task: Any, page: str, seed: int, checks: Sequence[Check] = ()) -> GoalPage:
    return GoalPage(task._pages(), task.path_of(page), seed, task.settle_ms, checks)


def _walk(task: Any, page: str, seed: int, plan: Sequence[StepPattern], rng: random.Random) -> list[Goal] | None:
    opened = _opened(task, page, seed)
    try:
        look, goals = opened.begin(), list[Goal]()
        for wanted in plan:
            chosen = None if look.done else _chosen(opened.state, wanted, rng, [goal.check for goal in goals])
            if chosen is None and wanted == ANY and goals:
                break  # there is no more to do
            if chosen is None:
                return None
            before, (one, actions) = opened.state, chosen
            for action in actions:
                look = opened.act(action)
            check = _changed(one, actions, before, opened.state)
            if check is None or (wanted.kind and check.kind != wanted.kind):
                return None
            goals.append(Goal(check, actions))
        return goals
    finally:
        opened.close()


def _chosen(page: PageState, wanted: StepPattern, rng: random.Random, done: Sequence[Check]
            ) -> tuple[Element, tuple[Action, ...]] | None:
    used = {(check.role, check.name) for check in done}
    fitting = [one for one in askable(page) if one.hit and one.key not in used and _fits(one, wanted)]
    if not fitting:
        return None
    one = rng.choice(fitting)
    click = Action("click", one.at)
    typed = wanted.kind == "typed" or (wanted.kind == "" and rng.random() < _TYPES)
    if not typed or not _OF_CONTROLS["typed"](one):
        return one, (click,)
    words = [word for word in _TYPED if word != wanted.avoid]
    return one, (click, Action("type", text=wanted.value or rng.choice(words)))


_OF_CONTROLS = {"checked": lambda one: one.checked is False, "unchecked": lambda one: one.checked is True,
                "typed": lambda one: one.role == "field" and not one.value and not one.fixed,
                "focused": lambda one: one.role == "field" and not one.focused}
"""Kind of check that applies only to controls such as check boxes and fields -> whether an action on the element can
make the check hold."""


def _fits(one: Element, wanted: StepPattern) -> bool:
    if wanted.kind in _OF_CONTROLS:
        able = _OF_CONTROLS[wanted.kind](one)
    else:
        able = not (one.role == "radio" and one.checked) and (not wanted.kind or one.role != "field")
    # a field may be asked for again, with another text
    return (able and wanted.role in ("", one.role) and wanted.name in ("", one.name)
            and (one.role == "field" or one.name != wanted.avoid))


def _changed(one: Element, actions: Sequence[Action], before: PageState, after: PageState) -> Check | None:
    closed = [d for d in askable(before) if d.role == "dialog"]
    candidates = [Check("typed", *one.key, actions[-1].text)] if actions[-1].verb == "type" else [
        Check("checked", *one.key), Check("unchecked", *one.key), Check("open", *one.key),
        *(Check("closed", *dialog.key) for dialog in closed),
        *([Check("focused", *one.key)] if one.role == "field" else [Check("pressed", *one.key)])]
    return next((check for check in candidates if check.holds(after) and not check.holds(before)), None)


def new_seed(rng: random.Random) -> int:
    """A random seed for the content of a page in training: an even number."""
    return 2 * rng.getrandbits(30)


VARIATIONS = {"seed": 0, "element": 0, "fewer": -1, "more": 1}
"""Kind of variation of a goal -> by how much it changes the number of sub-goals. "seed" changes the content of the
page. "element" exchanges the element of one sub-goal or, if this element is a field, the typed text."""


def _varied(way: str, plan: list[StepPattern], seed: int, rng: random.Random) -> tuple[list[StepPattern], int]:
    if way == "seed":
        return [StepPattern(one.kind, one.role) for one in plan], new_seed(rng)
    if way == "more":
        place = rng.randint(0, len(plan))
        return [*plan[:place], ANY, *plan[place:]], seed
    place = rng.randrange(len(plan))
    old = plan[place]
    other = [] if way == "fewer" else [
        StepPattern(old.kind, old.role, old.name if old.kind == "typed" else "", old.value or old.name)]
    return [*plan[:place], *other, *plan[place + 1:]], seed


def vary(task: Any, parent: Mapping[str, Any], rng: random.Random) -> tuple[str, int, list[Goal]] | None:
    """Returns (kind of variation, page seed, sub-goals) of a new goal derived from the row `parent`; None if no
    variation leads to a different goal. If the row has no sub-goals, they are found by a walk over its page; the
    kind is then "page"."""
    page, seed = parent["page"], parent["seed"]
    if "goals" not in parent:
        goals = explore(task, page, seed, [ANY] * rng.randint(1, task.walk), rng)
        return ("page", seed, goals) if goals else None
    own = read_goals(parent)
    plan = [StepPattern(check.kind, check.role, check.name, "", check.value) for check in (goal.check for goal in own)]
    for name in rng.sample(sorted(VARIATIONS), len(VARIATIONS)):
        if len(plan) + VARIATIONS[name] not in range(1, MOST_GOALS + 1):
            continue
        other, at = _varied(name, plan, seed, rng)
        goals = explore(task, page, at, other, rng)
        if goals and (at, [goal.check for goal in goals]) != (seed, [goal.check for goal in own]):
            return name, at, goals
    return None
