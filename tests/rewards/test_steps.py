"""Steps on a screen as the authors of benchmarks score them: the values that their functions give for these cases."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards import steps

CLICK = {"type": "click", "point": [500, 500]}


def typed(text, kind="type"):
    return {"type": kind, "text": text}


ELEMENTS = [[0, 0, 100, 50], [0, 50, 100, 100], [10, 10, 20, 20], [0, 0, 100, 50]]


test_a_place_of_screenspot_is_any_two_or_four_numbers = by_hand(steps.screenspot_point, [
    ("(0.5, 0.25)", [0.5, 0.25]), ("x=0.5 y=0.25", [0.5, 0.25]), ("[0.25, 0.5, 0.75, 1]", [0.5, 0.75]),
    ("(0.5, 0.25) at 100%", None), ("", None), ("0.5", None), ("-0.5, 1.", [-0.5, 1]),
    ("<box>(100,200),(300,401)</box>", [0.2, 0.3005]), ("the box is (0.5, 0.25)", None)], abs=1e-12)
test_what_gui_r1_reads = by_hand(lambda text: tuple(map(steps.gui_r1_action(text).get, ("type", "text", "point"))), [
    ("<answer>[{'action': 'click', 'point': [5, 6], 'input_text': 'a b'}]</answer>", ("click", "a b", [5, 6])),
    ("<answer>[{'action': 'click', 'point': [5, 6]}, {'point': [7, 8]}]</answer>", ("click", "no input text", [7, 8])),
    ("[{'action': 'click', 'point': [5, 6]}]", (None, "no input text", [0, 0])),
    ("<answer>[{\"action\": \"click\", 'point': [5.5, 6]}]</answer>", (None, "no input text", [0, 0])),
    ("<answer>[5, 6] {'action': 'wait'}</answer>", ("wait", "no input text", [0, 0])),
    ("<answer>{'point': [5, 6]\n}</answer>", (None, "no input text", [5, 6])),
    ("<answer>{'point': [5, 6],\n}</answer>", (None, "no input text", [0, 0])),
    ("<answer>{[5,\n6]} {[7, 8]</answer>", (None, "no input text", [5, 6])), ("", (None, "no input text", [0, 0]))])
test_os_atlas = by_hand(lambda right, given: tuple(steps.os_atlas_step(right, given).values()), [
    (CLICK, {"type": "click", "point": [584, 612]}, (1, 1)),  # 140 of 1,000 away
    (CLICK, {"type": "click", "point": [584, 613]}, (1, 0)), (CLICK, {"type": "click"}, (1, 0)), (CLICK, None, (0, 0)),
    (CLICK, {"type": "tap", "point": [500, 500]}, (0, 0)), (CLICK, {"type": "click", "point": [-500, 500]}, (1, 1)),
    (typed("milk bread"), typed("Milk soup"), (1, 1)), (typed("milk bread"), typed("milk"), (1, 0)),
    (typed("milk"), typed("MILK"), (1, 1)), (typed("Clock", "open_app"), typed("clock", "open_app"), (1, 1)),
    (typed("up", "scroll"), typed("Up", "scroll"), (1, 0)), (typed("up", "scroll"), typed("up", "scroll"), (1, 1)),
    ({"type": "wait"}, {"type": "wait"}, (1, 1)), ({"type": "wait"}, {"type": "Wait"}, (0, 0))])
test_gui_r1 = by_hand(lambda right, given: tuple(steps.gui_r1_step(right, given, (800, 600)).values()), [
    ({"type": "click", "point": [100, 100]}, {"type": "wait", "text": "", "point": [211, 100]}, (0, 1)),  # of 800: 112
    ({"type": "click", "point": [100, 100]}, {"type": "click", "text": "", "point": [212, 100]}, (1, 0)),
    ({"type": "type", "text": "concatenate"}, {"type": "type", "text": "cat", "point": [0, 0]}, (1, 1)),
    ({"type": "open_app", "text": "a b c d"}, {"type": "type", "text": "[a] x", "point": [0, 0]}, (0, 0)),
    ({"type": "type", "text": "milk [bread]"}, {"type": "type", "text": "Bread", "point": [0, 0]}, (1, 1)),
    ({"type": "type"}, {"type": "type", "text": "", "point": [0, 0]}, (1, 0)),
    ({"type": "press_back"}, {"type": "press_back", "text": "x", "point": [0, 0]}, (1,))])
test_gui_odyssey = by_hand(lambda right, given, box: tuple(steps.odyssey_step(right, given, box).values()), [
    (CLICK, {"type": "click", "point": [584, 612]}, None, (1, 1)),
    (CLICK, {"type": "click", "point": [585, 612]}, None, (1, 0)),
    (CLICK, {"type": "click", "point": [900, 450]}, [400, 450, 900, 500], (1, 1)),
    (CLICK, {"type": "click"}, None, (1, 0)), ({"type": "wait"}, {"type": "click"}, None, (1, 0)),
    (CLICK, None, None, (0, 0)), (typed("milk"), typed("MILK"), None, (1, 0, 0)),
    (typed("milk"), typed(" oat milk "), None, (1, 1, 1)), (typed("milk"), typed(""), None, (1, 1, 1)),
    (typed("http://a"), typed("http://b"), None, (1, 1, 1)), (typed("abcd"), typed("abxy"), None, (1, 1, 1)),
    (typed("abcd"), typed("axyz"), None, (1, 0, 0)), (typed("up", "scroll"), typed("UP", "scroll"), None, (1, 1)),
    (typed("up", "scroll"), typed("down", "scroll"), None, (1, 0)),
    ({"type": "press_home"}, {"type": "press_home", "text": "x"}, None, (1, 1))])
test_gui_act = by_hand(lambda right, given: tuple(steps.gui_act_step(right, given, ELEMENTS).values()), [
    ({"type": "click", "box": ELEMENTS[0], "element": 0}, {"type": "click", "box": [0, 0, 100, 50]}, (1, 1, 1)),
    ({"type": "click", "box": ELEMENTS[3], "element": 3}, {"type": "click", "box": [0, 0, 100, 50]}, (1, 0, 1)),
    ({"type": "click", "box": ELEMENTS[1], "element": 1}, {"type": "click", "box": [50, 60, 50, 60]}, (1, 1, 0)),
    ({"type": "click", "box": ELEMENTS[0], "element": 0}, {"type": "click", "box": [0, 0, 100, 25]}, (1, 1, 0.5)),
    ({"type": "click", "box": ELEMENTS[2], "element": 2}, {"type": "click", "box": [8, 8, 24, 24]}, (1, 1, 100 / 256)),
    ({"type": "click", "box": ELEMENTS[0], "element": 0}, {"type": "hover", "box": [0, 0, 100, 50]}, (0, 0, 0)),
    ({"type": "click", "box": ELEMENTS[0], "element": 0}, {"type": "click"}, (1, 0, 0)),
    ({"type": "tap", "point": [0.5, 0.5]}, {"type": "tap", "point": [0.5, 0.57]}, (1, 1, 0.5)),
    ({"type": "tap", "point": [0.5, 0.5]}, {"type": "tap", "point": [0.5, 0.65]}, (1, 0, 0)),
    (typed("the milk, bread", "input"), typed("Milk!", "input"), (1, 1, 2 / 3)),
    (typed("milk bread eggs", "input"), typed("milk", "input"), (1, 0, 0.5)),  # .5 is not above .5
    (typed("the", "answer"), typed("a", "answer"), (1, 1, 1)),
    (typed("up", "scroll"), typed("up", "scroll"), (1, 1, 1)),
    (typed("up", "swipe"), typed("down", "swipe"), (1, 0, 0)), ({"type": "enter"}, {"type": "enter"}, (1, 1, 1)),
    (typed("the", "answer"), {"type": "answer"}, (1, 0, 0)),
    ({"type": "wait"}, {"type": "wait"}, (1, 0, 0)), ({"type": "wait"}, None, (0, 0, 0)),
    ({"type": "select", "box": ELEMENTS[1], "element": 1, "text": "a yes"},
     {"type": "select", "box": [0, 50, 100, 100], "text": "yes"}, (1, 1, 1))], abs=1e-09)


@settings(max_examples=60)
@given(st.text("<answer>'click': [{}]1,2\n \u0664", max_size=80), st.text(max_size=20), st.sampled_from(
    ["click", "type", "scroll", "tap", "input", "wait"]))
def test_any_text_is_read_and_scored(text, other, kind):
    steps.screenspot_point(text)
    action = steps.gui_r1_action(text)
    right, said = {"type": kind, "text": other, "point": [5, 6]}, {"type": kind, "text": text}
    for scores in (steps.gui_r1_step(right, action, (10, 10)), steps.os_atlas_step(right, {**action, "type": kind}),
                   steps.odyssey_step(right, said), steps.gui_act_step(right, said)):
        assert all(0 <= value <= 1 for value in scores.values())
