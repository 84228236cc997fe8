"""Web without a browser: actions, samples, pay of an episode; goals that pages do not have themselves."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each, refused
from vlrl.data import coordinates, make_sample
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_all
from vlrl.task.services import Services
from vlrl.tasks import _web_actions as actions  # pyright: ignore[reportMissingImports]
from vlrl.tasks import _web_explore as explore  # pyright: ignore[reportMissingImports]
from vlrl.tasks import _web_goals as goals  # pyright: ignore[reportMissingImports]
from vlrl.tasks import web as web_module  # pyright: ignore[reportMissingImports]
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
from vlrl.types import PastAction, Sample


def web(convention: str = "norm1000", **given) -> Any:
    task = load("web", given)
    task.coordinates = coordinates.make(convention)
    return task


def read(form: str, text: str, convention: str = "norm1000") -> Any:
    task = web(convention, form=form)
    return actions.read(actions.FORMS[form], task, task.samples("train")[0], text)


def tagged(text: str) -> str:
    return f"<think>x</think><answer>{text}</answer>"


def test_pixels_of_the_processed_picture():
    """A model that writes pixels of the processed picture sees 320 x 420 as 308 x 420."""
    task = web("processed")
    placed = task.environment(task.samples("train")[0])._sample
    assert actions.read(actions.FORMS["call"], task, placed, "click(154, 105)") == Action("click", (80, 52.5))
    seen = replace(placed, row={**placed.row, "processed_size": [308, 420]})
    assert task.score(seen, parse_answer("x"))["success"] == 0
    seen = replace(placed, row={**placed.row, "processed_size": [224, 280]})
    with pytest.raises(DataError, match=r"at \[224, 280\] pixels.*max_pixels"):
        task.score(seen, parse_answer("x"))
    task.coordinates = coordinates.make("norm1000")
    assert task.score(seen, parse_answer("x"))["success"] == 0


POINTS = st.tuples(st.integers(0, 159), st.integers(0, 209))
ACTIONS = st.one_of(
    st.builds(Action, st.sampled_from(["click", "double_click"]), POINTS),
    st.builds(Action, st.just("drag"), POINTS, POINTS),
    st.builds(lambda t: Action("type", None, None, t), st.text(st.characters(min_codepoint=32, max_codepoint=126,
              exclude_characters='\\"'), min_size=1, max_size=20)),
    st.builds(lambda p, t: Action("scroll", p, None, t), POINTS, st.sampled_from(["up", "down"])),
    st.builds(lambda t: Action("key", None, None, t), st.sampled_from(["Enter", "Control+a"])))


@each("form", actions.FORMS)
@settings(max_examples=40)
@given(ACTIONS)
def test_what_is_written_is_read_again(form, action):
    """To a thousandth of the page, in every form; a written action is the form and nothing else."""
    task = load("web", {"form": form})
    task.coordinates = coordinates.make("norm1000")
    sample = Sample(id="x", row={"width": 320, "height": 420, "scale": 2})
    text = actions.FORMS[form].write(task, sample, action)
    found = actions.read(actions.FORMS[form], task, sample, text)
    assert (found.verb, found.text) == (action.verb, action.text) and actions.FORMS[form].strict(text)
    for point, again in ((action.point, found.point), (action.to, found.to)):
        if point:  # a place that the verb does not need may be written as 0
            assert again == pytest.approx(point, abs=0.11)


PIECES = ["click", "type", "(", ")", "[", "]", "{", "}", "'", '"', "\\", "Action:", "<answer>", "</answer>", "action",
          ":", "start_box=", "point", ",", "1", "1e400", "NaN", "-", "\0", "\ud800"]


@each("form", actions.FORMS)
@settings(max_examples=40)
@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_raises(form, text):
    task = load("web", {"form": form})
    task.coordinates = coordinates.make("norm1000")
    sample = Sample(id="x", row={"width": 320, "height": 420, "scale": 2})
    try:
        found = actions.read(actions.FORMS[form], task, sample, text)
    except actions.UnreadableAction as error:
        assert str(error)
    else:
        assert found.verb


def test_prompts_samples_and_summaries():
    names = {**{verb: verb for verb in actions.VERBS}, **{"double_click": "left_double", "key": "hotkey",
                                                          "answer": "finished"}}
    for form in ("gui_r1", "call"):
        assert all(verb in actions.FORMS[form].prompt for verb in actions.VERBS)
    assert all(name in actions.FORMS["ui_tars"].prompt for name in names.values())
    task = web(pages=("click-test", "click-tab"), heldout_pages=("click-link",), count=60)
    train, heldout = task.samples("train"), task.samples("heldout")
    assert {s["page"] for s in train} == {"click-test", "click-tab"}
    assert {s["page"] for s in heldout} == {"click-test", "click-tab", "click-link"}
    assert not {s["seed"] for s in train} & {s["seed"] for s in heldout}
    assert train[7].row == task.samples("train")[7].row and len({s["seed"] for s in train}) == 60
    assert train[0]["path"] == "miniwob/click-test.html" and (train[0]["width"], train[0]["height"]) == (320, 420)
    seed = train[7]["seed"]
    task.seed = 1
    assert task.samples("train")[7]["seed"] != seed
    # And none of which only the page speaks.
    task = web(pages=("click-test",))
    shown = [f"{web_module.UNREAD}: why.", "", f"The page said: {web_module.UNREAD}", ""]
    acted = tuple(PastAction(action="x", observation=text) for text in shown)
    found = task.metrics(task.samples("train")[0], replace(parse_answer("x"), turns=acted), {})
    assert found == {"unread": 0.25, "turns": 4.0}
    task = web(pages=("click-test",), heldout_pages=("click-tab",), count=4)
    records = [{"sample": s, "parts": {"success": float(i < 2)}} for i, s in enumerate(task.samples("heldout"))]
    assert task.summarize(records) == {
        "success/click-tab": 0.5, "success/click-test": 0.5, "success/heldout_pages": 0.5, "success/trained_pages": 0.5}


test_an_action_is_read = by_hand(read, [
    ("gui_r1", tagged("[{'action': 'click', 'point': [500, 250], 'input_text': 'no input text'}]"),
     Action("click", (80, 52.5))),
    ("gui_r1", tagged("[{'action': 'Left_Double', 'point': [500, 250]}]"), Action("double_click", (80, 52.5))),
    ("gui_r1", tagged('[{"action": "type", "point": [-100, -100], "input_text": "it\'s"}]'),
     Action("type", (-16, -21), None, "it's")),
    ("gui_r1", tagged("[{'action': 'drag', 'point': [0, 0], 'end_point': [1000, 1000]}]"),
     Action("drag", (0, 0), (160, 210))),
    ("gui_r1", tagged("[{'action': 'enter'}]"), Action("key", None, None, "Enter")),
    ("gui_r1", tagged("[{'action': 'scroll', 'point': [500, 500], 'input_text': 'DOWN'}]"),
     Action("scroll", (80, 105), None, "down")),
    ("gui_r1", tagged("[{'action': 'complete', 'input_text': 'done'}]"), Action("answer", None, None, "done")),
    ("ui_tars", "Thought: a\nAction: click(start_box='(500,250)')", Action("click", (80, 52.5))),
    ("ui_tars", "Action: click(start_box='<|box_start|>(500,250)<|box_end|>')", Action("click", (80, 52.5))),
    ("ui_tars", "Action: click(point='<point>500 250</point>')", Action("click", (80, 52.5))),
    ("ui_tars", "Action: left_double(start_box='[400, 200, 600, 300]')", Action("double_click", (80, 52.5))),
    ("ui_tars", "Action: drag(start_box='(0,0)', end_box='(1000,1000)')", Action("drag", (0, 0), (160, 210))),
    ("ui_tars", r"Action: type(content='it\'s\n')", Action("type", None, None, "it's\n")),
    ("ui_tars", "Action: hotkey(key='ctrl a')", Action("key", None, None, "Control+a")),
    ("ui_tars", "Action: scroll(start_box='(500,500)', direction='up')", Action("scroll", (80, 105), None, "up")),
    ("ui_tars", "Action: wait()", Action("wait")),
    ("ui_tars", "Action: finished(content='7')", Action("answer", None, None, "7")),
    ("call", "click(500, 250)", Action("click", (80, 52.5))),
    ("call", 'type("yes")', Action("type", None, None, "yes")),
    ("call", "drag(0, 0, 1000, 1000)", Action("drag", (0, 0), (160, 210))),
    ("call", 'key("ctrl+shift+ArrowLeft")', Action("key", None, None, "Control+Shift+ArrowLeft")),
    ("call", "wait()", Action("wait"))])
test_what_cannot_be_read_says_why = refused(actions.UnreadableAction, read, [
    ("gui_r1", "[{'action': 'click', 'point': [5, 5]}]", "no \\[{'action'"),
    ("gui_r1", "<think><answer>[{'action': 'wait'}]</answer></think>", "no \\[{'action'"),
    ("gui_r1", tagged("[{'action': 'click'}]"), "click needs a point"),
    ("gui_r1", tagged("[{'action': 'click', 'point': [1e99, 2]}]"), "click needs a point"),
    ("gui_r1", tagged("[{'action': 'fly'}]"), "there is no action 'fly'"),
    ("gui_r1", tagged("[{'action': 'type', 'input_text': 'no input text'}]"), "type needs a text"),
    ("ui_tars", "click(start_box='(1,2)')", "no line `Action"),
    ("ui_tars", "Action: drag(start_box='(1,2)')", "drag needs a second point"),
    ("ui_tars", "Action: hotkey(key='meta q')", "there is no key 'meta q'"),
    ("ui_tars", "Action: hotkey(key='')", "there is no key"), ("call", "click(500 250)", "it is no call"),
    ("call", "scroll(1, 2, \"away\")", "scroll needs a direction"),
    ("call", "click(True, False)", "click needs a point"), ("call", "wait()" + " " * 20_000, "longer than"),
    ("call", f'type("{"x" * 201}")', "type needs a text of at most 200")])
test_settings_that_cannot_act_are_refused = refused(ConfigError, lambda given: web(**given).samples("train"), [
    ({"pages": ("click-tset",)}, "task.pages: there is no page 'click-tset'.*Did you mean 'click-test'"),
    ({"heldout_pages": ("../core",)}, "task.heldout_pages: there is no page"), ({"pages": ()}, "task.pages=\\(\\)"),
    ({"pages": ("click-test",), "heldout_pages": ("click-test",)}, "'click-test' is one of task.pages too"),
    ({"html": "/nowhere"}, "task.html='/nowhere' is not a folder"), ({"form": "gui_r2"}, "task.form='gui_r2'.*gui_r1")])


def episode(*turns) -> Any:
    """An answer of turns, each a pair of success and format; the page's own reward is half of success."""
    ended = {None: {}, 0.0: {"success": 0.0, "page": 0.0}, 1.0: {"success": 1.0, "page": 0.5}}
    acted = tuple(PastAction(action="x", parts={"format": form, **ended[won]}) for won, form in turns)
    return replace(parse_answer("x"), turns=acted)


def test_what_episodes_earn():
    """By hand: 1 + 0.1 * 0.9 ** extra + 0.1 * format."""
    task = web(pages=("click-test",))
    answers = [episode((1.0, 1.0)), episode((None, 0.0), (None, 1.0), (1.0, 1.0)), episode((0.0, 1.0)),
               episode((None, 1.0), (None, 0.0)), parse_answer("nothing was done")]
    scored, _ = score_all(task, task.samples("train")[0], answers, [], 0, Services({}, {}))
    assert [s.reward for s, _ in scored] == pytest.approx(
        [1 + 0.1 + 0.1, 1 + 0.1 * 0.81 + 0.1 * 2 / 3, 0.1, 0.05, 0.0], abs=1e-5)
    assert [s.correct for s, _ in scored] == [True, True, False, False, False]
    assert scored[0][0].parts == {"success": 1.0, "efficiency": 1.0, "format": 1.0, "page": 0.5}


ROW = {"id": "7", "page": "login-user", "seed": 12, "generator": "walk", "goals": [
    {"check": {"kind": "typed", "role": "field", "name": "Username", "value": "maria"},
     "actions": [{"verb": "click", "point": [80, 52.5]}, {"verb": "type", "text": "maria"}]},
    {"check": {"kind": "pressed", "role": "button", "name": "Login"},
     "actions": [{"verb": "click", "point": [16, 21]}]}]}


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
            web(form="call").propose(0, parent)
    twice, button = one("button", "Go"), one("button", "Größe 7!")
    assert askable(page(twice, twice, button, one("link", "Go"))) == [button, one("link", "Go")]
    field = one("field", "")
    assert askable(page(field)) == [field] and askable(page(field, field)) == []


def test_a_row_is_a_sample_of_the_task():
    """With its place, its size and its perfect actions, in thousandths of the page."""
    task = web(form="call")
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
    task = web(form="call")
    with pytest.raises(DataError, match=why):
        task.sample_from_row({**ROW, **more})
    assert task.sample_from_row({**ROW, "page": "click-dialog-2", "split": "heldout"})["heldout_page"]


@each("wrong", [0, -1, True, "2", 1.5])
def test_a_stage_asks_for_a_number_of_sub_goals(wrong):
    task = web(form="call")
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
