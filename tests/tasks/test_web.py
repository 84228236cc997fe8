"""Web without a browser: how actions are read and written, which samples there are, and what an episode is paid."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each, refused
from vlrl.data import coordinates
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_all
from vlrl.task.services import Services
from vlrl.tasks import _web_actions as actions  # pyright: ignore[reportMissingImports]
from vlrl.tasks import web as web_module  # pyright: ignore[reportMissingImports]
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
