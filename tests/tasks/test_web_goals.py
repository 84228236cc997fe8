"""Goals of the task web that pages do not have themselves, without a browser: checks, words, rows, growing goals."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.tables import each
from vlrl.data import coordinates, make_sample
from vlrl.errors import ConfigError, DataError
from vlrl.task import load
from vlrl.tasks import _web_explore as explore  # pyright: ignore[reportMissingImports]
from vlrl.tasks import _web_goals as goals  # pyright: ignore[reportMissingImports]
from vlrl.tasks._web_browser import PageFailed  # pyright: ignore[reportMissingImports]
from vlrl.tasks._web_elements import (  # pyright: ignore[reportMissingImports]
    Element,
    PageState,
    askable,
    nameable,
    page_state,
)
from vlrl.tasks._web_goals import Check  # pyright: ignore[reportMissingImports]
from vlrl.tasks._web_page import Action  # pyright: ignore[reportMissingImports]

ROW = {"id": "7", "page": "login-user", "seed": 12, "generator": "walk", "goals": [
    {"check": {"kind": "typed", "role": "field", "name": "Username", "value": "maria"},
     "actions": [{"verb": "click", "point": [80, 52.5]}, {"verb": "type", "text": "maria"}]},
    {"check": {"kind": "pressed", "role": "button", "name": "Login"},
     "actions": [{"verb": "click", "point": [16, 21]}]}]}


def web(**given) -> Any:
    task = load("web", {"form": "call", **given})
    task.coordinates = coordinates.make("norm1000")
    return task


def page(*elements: Element, pressed: Any = ()) -> PageState:
    return PageState(elements, frozenset(pressed))


def one(role: str, name: str, **state: Any) -> Element:
    return Element(role, name, (10.0, 10.0), True, **state)


@each("check words holds fails", [
    (Check("checked", "checkbox", "Cats"), 'Tick the box "Cats"',
     page(one("checkbox", "Cats", checked=True)), page(one("checkbox", "Cats", checked=False))),
    (Check("unchecked", "checkbox", "Cats"), 'Untick the box "Cats"',
     page(one("checkbox", "Cats", checked=False)), page()),
    (Check("checked", "radio", "Red"), 'Choose the option "Red"',
     page(one("radio", "Red", checked=True)), page(one("radio", "Blue", checked=True), one("radio", "Red"))),
    (Check("typed", "field", "Name", "ok"), 'Type "ok" into the field "Name"',
     page(one("field", "Name", value="ok")), page(one("field", "Name", value="OK"), one("field", "Other", value="ok"))),
    (Check("typed", "field", "", "ok"), 'Type "ok" into the field', page(one("field", "", value="ok")), page()),
    (Check("open", "tab", "Tab #2"), 'Open the tab "Tab #2"',
     page(one("tab", "Tab #2", open=True)), page(one("tab", "Tab #2", open=False), one("tab", "Tab #1", open=True))),
    (Check("focused", "field", "Name"), 'Put the cursor into the field "Name"',
     page(one("field", "Name", focused=True)), page(one("field", "Name"))),
    (Check("closed", "dialog", "News"), 'Close the dialog "News"', page(), page(one("dialog", "News"))),
    (Check("pressed", "button", "Go"), 'Click the button "Go"',
     page(pressed=[("button", "Go")]), page(one("button", "Go"), pressed=[("link", "Go")])),
    (Check("pressed", "text", "Ad"), 'Click "Ad"', page(pressed=[("text", "Ad")]), page(one("text", "Ad")))])
def test_what_a_check_says_and_when_it_holds(check, words, holds, fails):
    assert goals.request_text(check) == words and check.holds(holds) and not check.holds(fails)


def test_sub_goals_are_asked_for_in_order():
    checks = [goal.check for goal in goals.read_goals(ROW)]
    assert goals.instruction(checks) == 'Type "maria" into the field "Username". Then click the button "Login".'
    assert goals.instruction(checks[1:]) == 'Click the button "Login".'
    for parent in ({**ROW, "page": "click-dialog-2"}, {"id": "7", "question": "?"}):
        with pytest.raises(DataError, match=r"row '7': its page .* is not in task.pages"):
            web().propose(0, parent)
    twice, button = one("button", "Go"), one("button", "Größe 7!")
    assert askable(page(twice, twice, button, one("link", "Go"))) == [button, one("link", "Go")]
    field = one("field", "")
    assert askable(page(field)) == [field] and askable(page(field, field)) == []


def test_a_row_is_a_sample_of_the_task():
    """With its place, its size and its perfect actions, in thousandths of the page."""
    task = web()
    sample = make_sample(task, ROW, task._root()[0])
    assert (sample.id, sample["path"], sample["seed"]) == ("7", "miniwob/login-user.html", 12)
    assert (sample["width"], sample["height"], sample["heldout_page"]) == (320, 420, False)
    assert task.messages(sample)[0]["content"][0]["text"] == task._form.prompt
    assert task.oracle_actions(sample) == ["click(500, 250)", 'type("maria")', "click(100, 100)"]
    first = make_sample(task, {**ROW, "subgoals": 1}, task._root()[0])
    assert task.oracle_actions(first) == ["click(500, 250)", 'type("maria")']
    assert [goal.row() for goal in goals.read_goals(ROW)] == [
        {"instruction": f"{goals.request_text(goal.check)}.", **told} for goal, told in
        zip(goals.read_goals(ROW), ROW["goals"], strict=True)]
    environment = task.environment(first)
    assert [check.name for check in environment._page.checks] == ["Username"]


def changed(number: int, **more: Any) -> list[dict[str, Any]]:
    return [{**goal, **more} if i == number else goal for i, goal in enumerate(ROW["goals"])]


@each("more why", [
    ({"page": "login-usr"}, "no page 'login-usr'.*Did you mean 'login-user'"), ({"page": None}, "no page None"),
    ({"page": "click-dialog-2"}, "is one of task.heldout_pages"), ({"seed": "12"}, "seed='12' is not an integer"),
    ({"seed": True}, "seed=True is not an integer"), ({"goals": []}, "goals must be a list of 1 to 20"),
    ({"goals": ROW["goals"] * 11}, "goals must be a list of 1 to 20"), ({"goals": ["Click."]}, "row '7': sub-goal 1"),
    ({"goals": changed(1, check={"kind": "won", "role": "button", "name": "x"})}, "sub-goal 2.* no check 'won'"),
    ({"goals": changed(0, check={"kind": "typed", "role": "field", "name": "x"})}, "sub-goal 1: there is no check 't"),
    ({"goals": changed(0, check={"kind": "pressed", "role": "field"})}, "sub-goal 1.*a check has a kind"),
    ({"goals": changed(0, check={"kind": "pressed", "role": "x" * 201, "name": ""})}, "not a text of at most 200"),
    ({"goals": changed(1, actions=[{"verb": "fly"}])}, "sub-goal 2: there is no action 'fly'"),
    ({"goals": changed(1, actions=[{"verb": "click", "point": [1]}])}, "a point must have two numbers")])
def test_a_row_that_cannot_be_played_is_named(more, why):
    task = web()
    with pytest.raises(DataError, match=why):
        task.sample_from_row({**ROW, **more})
    assert task.sample_from_row({**ROW, "page": "click-dialog-2", "split": "heldout"})["heldout_page"]


@each("wrong", [0, -1, True, "2", 1.5])
def test_a_stage_asks_for_a_number_of_sub_goals(wrong):
    task = web()
    sample = task.sample_from_row({**ROW, "subgoals": wrong})
    with pytest.raises(ConfigError, match=r"fields.subgoals must be a whole number >= 1"):
        task.environment(sample)
    assert task.stage_fields == ("subgoals",)


WORDS = st.sampled_from(["check", "actions", "kind", "role", "name", "value", "verb", "point", "text"])


@pytest.mark.slow
@given(st.recursive(st.none() | st.booleans() | st.floats() | st.text(),
                    lambda inner: st.lists(inner) | st.dictionaries(WORDS, inner)))
def test_no_goals_raise_anything_else(told):
    try:
        assert goals.read_goals({"id": 1, "goals": told})
    except DataError as error:
        assert "row 1" in str(error)


@each("name", [
    "", " ", "...", 'say "yes"', "a\u202eb", "a\u200bb", "a\nb", "<image>", "<|im_end|>", "{instruction}", "x" * 61,
    "http://evil.example", "back\\slash", "\x1b[31mred"])
def test_a_text_of_a_page_that_cannot_be_quoted_is_not_asked_for(name):
    assert not nameable(name)
    assert askable(page(one("button", name))) == []


@given(st.text())
def test_a_quoted_text_ends_where_it_ends(name):
    if nameable(name):
        words = goals.request_text(Check("pressed", "button", name))
        assert words == f'Click the button "{name}"' and words.count('"') == 2 and words.isprintable()


@each("told", [
    None, {}, {"elements": 3, "pressed": []}, {"elements": [{}], "pressed": []}, {"elements": [], "pressed": [1]},
    {"elements": [{"role": "x", "name": 3, "at": [1, 2]}], "pressed": []}, {"elements": [], "pressed": [["a", {}]]}])
def test_a_page_that_hides_its_elements_ends_its_episode(told):
    with pytest.raises(PageFailed, match="elements of the page cannot be read"):
        page_state(told)


def test_what_has_changed_becomes_a_check():
    """The first of what holds after the actions and did not before."""
    box, field, tab = one("checkbox", "Cats"), one("field", "Name", value=""), one("tab", "Two", open=False)
    click, typed = (Action("click", (1, 1)),), (Action("click", (1, 1)), Action("type", text="ok"))
    after = page(one("checkbox", "Cats", checked=True), pressed=[("checkbox", "Cats")])
    before = page(one("checkbox", "Cats", checked=False))
    assert explore._changed(box, click, before, after) == Check("checked", "checkbox", "Cats")
    assert explore._changed(field, typed, page(field), page(one("field", "Name", value="ok"))) == Check(
        "typed", "field", "Name", "ok")
    assert explore._changed(field, typed, page(field), page(one("field", "Name", value="12"))) is None  # it refuses it
    opened = page(one("tab", "Two", open=True), pressed=[tab.key])
    assert explore._changed(tab, click, page(tab), opened) == Check("open", "tab", "Two")
    stands = page(one("tab", "Two", open=True))  # it was open before
    assert explore._changed(tab, click, stands, opened) == Check("pressed", "tab", "Two")
    go, dialog = one("button", "x"), one("dialog", "News")
    assert explore._changed(go, click, page(go, dialog), page(pressed=[go.key])) == Check("closed", "dialog", "News")
    assert explore._changed(go, click, page(go), page(go, pressed=[go.key])) == Check("pressed", "button", "x")
    assert explore._changed(go, click, page(go), page(go)) is None  # the click met something else
