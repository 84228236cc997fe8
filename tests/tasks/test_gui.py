"""Each gui recipe by hand: the parts of an answer as its paper defines them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import each, refused
from tests.tasks.scaffold import measured, scores, think
from vlrl.data.coordinates import make
from vlrl.errors import DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group

LONG = "x" * 100_000
ROW = {"id": "r1", "width": 200, "height": 100, "instruction": "open it", "box": [20, 10, 60, 50]}
BARE = {"id": "r1", "width": 200, "height": 100, "instruction": "open it"}
TYPE = {**BARE, "action": {"type": "type", "text": "hello there"}}
SCROLL = {**BARE, "action": {"type": "scroll", "direction": "down"}}
BACK = {**BARE, "action": {"type": "press_back"}}
CLICK = {**ROW, "action": {"type": "click"}}
POINT = {**BARE, "action": {"type": "click", "coordinate": [100, 50]}}


def scored(recipe, row, *texts, **settings):
    return [tuple(s.parts.values()) for s in scores(load("gui", {"recipe": recipe, **settings}), row, *texts)]


def fenced(*boxes):
    entries = ", ".join(f'{{"bbox_2d": {list(box)}, "label": "x"}}' for box in boxes)
    return f"```json\n[{entries}]\n```"


BOX = (20, 10, 60, 50)
INVERTED = 4 / (2 / 0.8 + 2 / 0.6)
G1 = [
    (ROW, fenced(BOX), 1, 1, 1), (ROW, fenced((20, 10, 60, 30)), 1, 0.5, 4 / (3 + 1 / 0.8)),
    (ROW, fenced((0, 0, 200, 100)), 0, 0.08, 4 / (2 / 0.9 + 1 / 0.3 + 2)),
    (ROW, fenced((60, 50, 20, 10)), 1, 0, INVERTED),  # inverted: the centre is inside
    (ROW, fenced((60, 30, 100, 70)), 0, 0, 4 / (2 / 0.8 + 2 / 0.8)),
    (ROW, fenced((40, 30, 80, 70)), 1, 400 / 2800, 4 / (2 / 0.9 + 2 / 0.8)),  # the centre on the corner counts
    (ROW, fenced((0, 0, 9, 9), BOX), 0, 0, 4 / (1 / 0.9 + 1 / 0.9 + 1 / 0.745 + 1 / 0.59)),  # the first entry
    (ROW, "[{'bbox_2d': [20, 10, 60, 50], 'label': 'x'}]", 1, 1, 1),
    (ROW, "Here: " + fenced(BOX) + " done 🙂", 1, 1, 1), (ROW, f"<think>{fenced(BOX)}</think>none", 0, 0, 0),
    (ROW, '```json\n[{"bbox_2d": [20, 10, 60', 0, 0, 0), (ROW, '[{"bbox_2d": [20, 10, 60]}]', 0, 0, 0),
    (ROW, LONG + fenced(BOX), 1, 1, 1), (ROW, "[]", 0, 0, 0), (ROW, "", 0, 0, 0)]
G2 = [
    (ROW, "[20, 10, 60, 50]", 1, 1, 1), (ROW, "[40, 10, 80, 50]", 0.607, 0.882, 1),  # exp(-.5), exp(-.125)
    (ROW, "[30, 20, 50, 40]", 1, 0.8, 1), (ROW, "[60, 50, 20, 10]", 1, 0, 1),  # inverted: no coverage
    (ROW, "[ 20 ,10,60, 50 ]", 1, 1, 1), (ROW, "[20.0, 10.0, 60.0, 50.0]", 1, 1, 0),  # whole numbers without a sign
    (ROW, "[+20, 10, 60, 50]", 1, 1, 0), (ROW, "[20, 10, 60, 50] there", 1, 1, 0),
    (ROW, "<answer>[20, 10, 60, 50]</answer>", 1, 1, 0),  # the bare box is asked for
    (ROW, "[0, 0, 5, 5] [20, 10, 60, 50]", round(math.exp(-0.5 * ((37.5 / 20) ** 2 + (27.5 / 20) ** 2)), 3),
     round(math.exp(-(37.5 ** 2 + 27.5 ** 2) / 203.125 / 8) * 50 / 203.125, 3), 0),  # the first box
    (ROW, "[20, 10, 60", 0, 0, 0), (ROW, "<think>[20, 10, 60, 50]</think>", 0, 0, 0),
    (ROW, "[٢٠, ١٠, ٦٠, ٥٠]", 0, 0, 0), (ROW, "", 0, 0, 0)]


def call(x, y):
    return f'<tool_call>{{"name": "computer_use", "arguments": {{"coordinate": [{x}, {y}]}}}}</tool_call>'


SE = [
    (ROW, call(40, 30), 2, 1), (ROW, call(60, 30), 2 - 0.01 / 1.13, 1), (ROW, call(100, 30), 1 - 0.09 / 1.13, 1),
    (ROW, think(call(40, 30)), 2, 1), (ROW, think('{"arguments": {"coordinate": [40, 30]}}') + " done", 2, 1),
    (ROW, '{"arguments": {"coordinate": [40, 30]}}', 2, 0), (ROW, call(40, 30) + call(40, 30), 2, 0),
    (ROW, f"<think>{call(40, 30)}</think>none", 0, 1),  # the form is that of a call, the place is not read
    (ROW, '<tool_call>{"arguments": {"coordinate": [40', 0, 0),
    (ROW, '<tool_call>{"arguments": [40, 30]}</tool_call>', 0, 1),
    (ROW, "<tool_call>{}</tool_call>", 0, 0),  # the form of a call holds a point
    (ROW, '<tool_call>{"arguments": {"coordinate": [40]}}</tool_call>', 0, 0),
    (ROW, "", 0, 0)]
UI_R1 = [
    (CLICK, think("[{'action': 'click', 'coordinate': [40, 30]}]"), 1, 1, 1),
    (ROW, think("[{'action': 'click', 'coordinate': [60, 50]}]"), 1, 1, 1),  # the edge counts
    (ROW, think("[{'action': 'click', 'coordinate': [60.9, 50.9]}]"), 1, 1, 1),  # scaled to whole pixels
    (ROW, think("[{'action': 'click', 'coordinate': [61, 50]}]"), 1, 0, 1),
    (ROW, think("[{'action': 'click'}]"), 1, 0, 1),
    (ROW, think("[{'action': 'scroll', 'coordinate': [40, 30]}]"), 0, 0, 1),
    (ROW, think("[{'action': 'CLICK', 'coordinate': [40, 30]}]"), 0, 0, 1),  # types are enumerated
    (BACK, think("[{'action': 'press_back', 'coordinate': [-100, -100]}]"), 1, 1, 1),
    (BACK, think("[{'action': 'click', 'coordinate': [40, 30]}]"), 0, 0, 1),
    (POINT, think('[{"action": "click", "coordinate": [190, 50]}]'), 1, 1, 1),  # within 140 pixels
    (ROW, "[{'action': 'click', 'coordinate': [40, 30]}]", 0, 0, 0),
    (ROW, think("[{'action': 'click', 'coordinate': [40"), 0, 0, 1),
    (ROW, think("[{'action': 'scroll'}]") + think("[{'action': 'click', 'coordinate': [40, 30]}]"), 0, 0, 0),
    (ROW, "<think><answer>[{'action': 'click', 'coordinate': [40, 30]}]</answer></think><answer>🙂</answer>", 0, 0, 0),
    (ROW, think("[{'action': 'click', 'coordinate': [40, 30]}]") + " done", 1, 1, 0), (ROW, "", 0, 0, 0)]


def act(action, point=(-100, -100), text="no input text"):
    return f"[{{'action': '{action}', 'point': {list(point)}, 'input_text': '{text}'}}]"


APP = {**BARE, "action": {"type": "open_app", "text": "Clock"}}
GUI_R1 = [
    (CLICK, think(act("click", (40, 30))), 1, 1), (CLICK, think(act("CLICK", (40, 30))), 1, 1),
    (CLICK, think(act("click", (60, 50))), 0, 1),  # strictly inside
    (POINT, think(act("click", (190, 50))), 1, 1),
    ({**POINT, "width": 2000}, think(act("click", (240, 50))), 0, 1),  # 140 pixels are too far
    (TYPE, think(act("type", text="hello there")), 1, 1), (TYPE, think(act("type", text="hello")), 1, 1),  # F1 2/3
    (TYPE, think(act("type", text="goodbye")), 0, 1), (TYPE, think(act("type")), 0, 0),
    (SCROLL, think(act("scroll", text="down")), 1, 1), (SCROLL, think(act("scroll", text="up")), 0, 1),
    (SCROLL, think(act("scroll", text="somewhere")), 0, 0), (BACK, think(act("press_back")), 1, 1),
    (APP, think(act("open_app", text="Maps")), 1, 1),  # which app is not compared
    (APP, think(act("open_app")), 1, 0), (APP, think(act("type", text="Clock")), 0, 1),
    (CLICK, think("[{'action': 'click', 'point': [40.5, 30], 'input_text': ''}]"), 1, 0),  # whole numbers
    (CLICK, think("[{'action': 'click', 'point': [40, 30]}]"), 1, 0),
    (CLICK, think("{'action': 'click', 'point': [40, 30], 'input_text': ''}"), 1, 0),
    (CLICK, think("__import__('os').system('x')"), 0, 0), (CLICK, act("click", (40, 30)), 0, 0),
    (CLICK, think(act("click", (40, 30))) + " done", 1, 0),
    (CLICK, f"<think>{act('click', (40, 30))}</think><answer>🙂</answer>", 0, 0),
    (CLICK, "", 0, 0)]
INFIGUI = [  # accuracy, format
    (CLICK, think('{"action": "click", "coordinate": [40, 30]}'), 1, 1),
    (CLICK, think('{"action": "click", "coordinate": [61, 30]}'), 0.2, 1), (CLICK, think('{"action": "scroll"}'), 0, 1),
    (TYPE, think('{"action": "type", "text": "Hello there"}'), 1, 1),
    (TYPE, think('{"action": "type", "text": "hello"}'), 0.2, 1),
    (BACK, "<think>so</think>{'action': 'press_back'}", 1, 1),
    (CLICK, '<think>a</think><tool_call>{"arguments": {"action": "click", "coordinate": [40, 30]}}</tool_call>', 1, 1),
    (ROW, think("[40, 30]"), 1, 1), (ROW, think("(61, 30)"), 0, 1), (ROW, think('[{"point_2d": [40, 30]}]'), 1, 1),
    (ROW, think('{"bbox_2d": [20, 10, 60, 24]}'), 0.5, 1),  # IoU .35 of .7
    (ROW, think('{"bbox_2d": [20, 10, 60, 40]}'), 1, 1), (ROW, think('{"bbox_2d": [60, 50, 20, 10]}'), 0, 1),
    (ROW, "[40, 30]", 0, 0),  # accuracy counts in the right format only
    (ROW, "<think>[40, 30]</think>", 0, 0), (ROW, "<think>a</think><think>b</think>[40, 30]", 0, 0),
    (ROW, think("[40, 30]") + " done", 0, 0), (ROW, "", 0, 0)]


def boxed(text):
    return think(f"<|begin_of_box|>{text}<|end_of_box|>")


OPEN_APP = {**BARE, "action": {"type": "open_app", "app_name": "Clock"}}
TAP = {**BARE, "width": 1000, "height": 800, "action": {"type": "click", "point": [400, 300]}}  # no box
TYPED = {**BARE, "action": {"type": "input_text", "text": "hello there"}}
GLM = [
    (TAP, boxed('{"action_type": "click"}'), 0),  # a click says where
    (TAP, boxed('{"action_type": "click", "box_2d": [[390, 290, 410, 310]]}'), 1),
    (TAP, boxed('{"action_type": "click", "box_2d": [[529, 290, 549, 310]]}'), 1),  # 139 pixels away
    (TAP, boxed('{"action_type": "click", "box_2d": [[530, 290, 550, 310]]}'), 0),
    (TAP, boxed('{"action_type": "click", "box_2d": [[0, 0, 1000, 800]]}'), 0),  # its centre is 141 pixels away
    (TAP, boxed('{"action_type": "click", "box_2d": [[410, 310, 390, 290]]}'), 0),
    (TAP, boxed('{"action_type": "click", "box_2d": [400, 300]}'), 0),
    ({**TAP, "action": {"type": "long_press", "point": [0, 0]}},
     boxed('{"action_type": "long_press", "box_2d": [[0, 0, 8, 8]]}'), 1),
    (APP, boxed('{"action_type": "open_app", "app_name": "Clock"}'), 1),  # the prompt's name, whatever the row's
    (APP, boxed('{"action_type": "open_app", "text": "Clock"}'), 0),
    ({**BARE, "action": {"type": "scroll", "text": "up"}}, boxed('{"action_type": "scroll", "direction": "up"}'), 1),
    (SCROLL, boxed('{"action_type": "scroll", "direction": "down"}'), 1),
    ({**BARE, "action": {"type": "type", "input_text": "hello there"}},
     boxed('{"action_type": "type", "text": "hello"}'), 5 / 11),
    (TYPED, boxed('{"action_type": "input_text", "text": "hello there"}'), 1),
    (CLICK, boxed('{"action_type": "click", "box_2d": [[20.5, 10, 60, 50]]}'), 0),  # whole numbers
    ({**ROW, "box": [0, 0, 20, 50]}, boxed('{"action_type": "click", "box_2d": [[0, 0, 201, 50]]}'), 0),  # off screen
    ({**ROW, "box": [160, -10, 210, 50]}, boxed('{"action_type": "click", "box_2d": [[160, 0, 200, 50]]}'), 1),
    (CLICK, boxed('{"action_type": "click", "box_2d": [[20, 10, 60, 50]]}'), 1),
    (ROW, boxed('{"action_type": "click", "box_2d": [20, 10, 60, 30]}'), 0.5),
    (ROW, boxed('{"action_type": "click", "box_2d": [[60, 50, 20, 10]]}'), 0),  # inverted
    (ROW, boxed('{"action_type": "long_press", "box_2d": [[20, 10, 60, 50]]}'), 0),
    (ROW, boxed('{"action_type": "click"}'), 0),  # the keys must be the same
    (ROW, boxed('{"action_type": "click", "box_2d": [[20, 10, 60, 50]], "text": ""}'), 0),
    (TYPE, boxed('{"action_type": "type", "text": "hello there"}'), 1),
    (TYPE, boxed('{"action_type": "type", "text": "hello"}'), 5 / 11),  # longest common subsequence
    (OPEN_APP, boxed('{"action_type": "open_app", "app_name": "Clock"}'), 1),
    (OPEN_APP, boxed('{"type": "open_app", "app_name": "Clock"}'), 1),
    (OPEN_APP, boxed('{"action_type": "open_app", "app_name": "Cloc"}'), 0),
    (BACK, boxed('{"action_type": "press_back"}'), 1),
    (BACK, "<THINK>so</THINK>\n<answer><|begin_of_box|>{\"action_type\": \"press_back\"}<|end_of_box|></answer>", 1),
    (BACK, think('{"action_type": "press_back"}'), 0),  # no box
    (BACK, boxed('{"action_type": "press_back"}') + " done", 0),
    (BACK, boxed('{"action_type": "press_back"}').replace("so", "<answer>"), 0),
    (BACK, boxed('{"action_type": "press_back"}<|begin_of_box|>'), 0),
    (BACK, think('\\boxed{x}<|begin_of_box|>{"action_type": "press_back"}<|end_of_box|>'), 0),
    (BACK, boxed('{"action_type": "press_ba'), 0), (BACK, boxed('{"action_type": NaN, "x": 1e999}'), 0),
    (TYPE, boxed('{"action_type": "type", "text": "' + LONG + '"}'), 0), (BACK, "", 0)]
ELEMENT = [(ROW, "[20, 10, 60, 50]", 1, 1, 1), (ROW, "[40, 30]", 1, 0, 0), (ROW, "(61, 30)", 0, 0, 0),
           (ROW, "", 0, 0, 0)]
POINTED = [(ROW, "[40, 30]", 1, 1), (ROW, "at (40, 30)", 1, 0), (ROW, "[20, 10, 60, 50]", 1, 0), (ROW, "", 0, 0)]
TABLES = {"gui_g1": G1, "gui_g2": G2, "se_gui": SE, "ui_r1": UI_R1, "gui_r1": GUI_R1, "infigui_r1": INFIGUI,
          "glm_v_androidworld": GLM, "element": ELEMENT, "click": POINTED}


@each("recipe case", [(name, case) for name, table in TABLES.items() for case in table])
def test_by_hand(recipe, case):
    row, text, *expected = case
    assert scored(recipe, row, text)[0] == pytest.approx(tuple(expected), abs=1e-9)


@each("texts expected", [
    (["[0, 0, 10, 10]", "[0, 0, 10, 10]", "[5, 0, 15, 10]"], [250 / 300, 250 / 300, 200 / 300]),
    (["[0, 0, 10, 10]", "", "[10, 10, 0, 0]", "junk", "[1, 2, 3]", "[1, 2, 3, 4, 5]"], [1, 0, 0, 0, 0, 0]),
    (["", "junk"], [0, 0]), (["[0, 0, 10, 10]", "[50, 50, 60, 60]"], [1, 1]),  # nothing shared
    (["[60, 50]", "[60, 50]"], [1, 1]),
    (["[60, 50]", "[10, 0, 110, 100]"], [1, 1]),  # a point grows by 50 pixels to each side
    (["<think>[0, 0, 9, 9]</think>[0, 0, 10, 10]", "```json\n[{\"bbox_2d\": [0, 0, 10, 10]}]\n```"], [1, 1]),
    (["[0, 0, 10, 10]🙂", LONG, "[-50, -50, 10, 10]", "[500, 500, 600, 600]"], [1, 0, 1, 0]),  # clipped to the image
])
def test_consensus_by_hand(texts, expected):
    found = [c for (c,) in scored("gui_rcpo", BARE, *texts)]
    assert found == pytest.approx(expected)
    assert [c for (c,) in scored("gui_rcpo", BARE, *texts[::-1])] == pytest.approx(expected[::-1])


def test_votes_totals_and_ranges():
    assert scored("gui_rcpo", BARE, "[60, 50]", "[10, 0, 110, 100]", point_reach=25.0) == [
        (1,), (pytest.approx((50 * 50 * 2 + 100 * 100 - 2500) / (2 * 100 * 100)),)]
    assert scored("region_vote", BARE, "[0, 0, 10, 10]", "[0, 0, 10, 10]", "[50, 50, 60, 60]", "") == [
        (1,), (1,), (0,), (0,)]
    for recipe, text, total in (("gui_g1", fenced(BOX), 1.375), ("gui_r1", think(act("click", (40, 30))), 1),
                                ("infigui_r1", think('{"action": "click", "coordinate": [61, 30]}'), 0.28),
                                ("ui_r1", think("[{'action': 'click', 'coordinate': [61, 50]}]"), 2)):
        task = load("gui", {"recipe": recipe})
        (found,) = score_group(task, task.sample_from_row(CLICK), [parse_answer(text)], 0)
        assert found.reward == pytest.approx(total)
    row = {**BARE, "action": {"type": "type", "text": "Settings"}}
    for said, *paid in (("Settings", 1, 1), ("Setting", 1, 1), ("e", 0, 1), ("Set", 1, 1), ("in", 0, 1), ("x", 0, 0)):
        answer = think(act("type", text=said))
        assert [scored("gui_r1", row, answer, word_rule=rule)[0][0] for rule in ("alike", "contained")] == paid
    task = load("gui", {"recipe": "glm_v_androidworld"})
    task.coordinates = make("norm999")
    sample = task.sample_from_row({**BARE, "width": 1000, "height": 1000, "box": [0, 0, 1000, 50]})
    paid = [task.score(sample, parse_answer(boxed(f'{{"action_type": "click", "box_2d": [[0, 0, {x}, 50]]}}')))
            for x in (999, 1000)]
    assert paid == [{"accuracy": pytest.approx(50 / 50.05, abs=1e-3)}, {"accuracy": 0}]


@settings(max_examples=50)
@given(st.integers(1, 4000), st.integers(1, 4000), st.floats(0, 1), st.floats(0, 1),
       st.sampled_from(["norm1000", "norm999", "norm1", "original"]))
def test_a_click_by_point_is_right_at_its_point(width, height, x, y, convention):
    task = load("gui", {"recipe": "glm_v_androidworld"})
    task.coordinates = make(convention)
    row = {**BARE, "width": 20 + width, "height": 20 + height}
    sample = task.sample_from_row({**row, "action": {"type": "click", "point": [x * (20 + width), y * (20 + height)]}})
    assert task.score(sample, parse_answer(task.oracle(sample))) == {"accuracy": 1}


@each("convention", ["norm1000", "norm999", "norm1", "processed"])
@each("recipe", [name for name in TABLES if name not in ("element", "click")])
def test_perfect_answers_in_every_convention(recipe, convention):
    task = load("gui", {"recipe": recipe})
    task.coordinates = make(convention)
    sample = task.sample_from_row({**CLICK, "processed_size": [588, 280]})
    (found,) = score_group(task, sample, [parse_answer(task.oracle(sample))], 0)
    best = sum(task.weights.values()) + (recipe == "se_gui")  # its point is worth up to 2
    assert found.error is None and found.reward == pytest.approx(best, rel=0.03)


test_rows_that_miss_what_a_recipe_needs = refused(
    DataError, lambda recipe, change: load("gui", {"recipe": recipe}).sample_from_row({**ROW, **change}), [
    ("gui_g1", {"box": None}, "the row has no box"), ("ui_r1", {"box": None}, "neither an action nor a box"),
    ("ui_r1", {"box": None, "action": {"type": "click"}}, "needs the row's box"),
    ("ui_r1", {"action": "click"}, "action=click must be an object"), ("ui_r1", {"action": {}}, "with a type"),
    ("ui_r1", {"action": {"type": "click", "point": [1]}}, r"point=\[1\] must be"),
    ("gui_g1", {"box": [60, 50, 20, 10]}, "x1 < x2"), ("gui_g1", {"width": 0}, "width=0"),
    ("gui_g1", {"instruction": None}, "instruction=None"), ("gui_r1", {"history": 5}, "history=5")], start="row 'r1'.*")


def test_history_and_marks():
    task = load("gui", {"recipe": "gui_r1"})
    for history, words in ((["tap", "scroll"], "'tap; scroll'"), ("tap", "'tap'"), (None, "'none'"), ([], "'none'")):
        sample = task.sample_from_row({**CLICK, "history": history})
        assert words in task.messages(sample)[0]["content"][-1]["text"]
    def marks(recipe, row, text):
        task = load("gui", {"recipe": recipe})
        sample = task.sample_from_row(row)
        return [(m["kind"], m["at"], m["label"], m["role"])
                for m in task.overlay(sample, task.parse(sample, parse_answer(text)))]
    assert marks("gui_g2", ROW, "[1, 2, 3, 4]") == [("box", [20, 10, 60, 50], "element", "target"),
                                                    ("box", [1, 2, 3, 4], "element", "answer")]
    assert marks("ui_r1", POINT, think("[{'action': 'click', 'coordinate': [1, 2]}]")) == [
        ("point", [100, 50], "click", "target"), ("point", [1, 2], "click", "answer")]
    assert marks("glm_v_androidworld", ROW, boxed('{"action_type": "click", "box_2d": [[1, 2, 3, 4]]}'))[1:] == [
        ("box", [1, 2, 3, 4], "click", "answer")]
    assert marks("gui_r1", TYPE, "") == []


def test_metrics():
    rows = [{**ROW, "platform": "web", "element_type": "icon"}, {**ROW, "platform": "web", "element_type": "text"},
            {**ROW, "platform": "mobile"}, BARE]
    single, split = measured(load("gui", {"recipe": "gui_rcpo"}), rows, ["[20, 10, 60, 50]", "[100, 50]", "", "[1, 1]"])
    assert single == [{"click_acc": 1}, {"click_acc": 0}, {"click_acc": 0}, {}]
    assert split == {"click_acc/icon": 1, "click_acc/mobile": 0, "click_acc/text": 0, "click_acc/web": 0.5,
                     "click_acc/web/icon": 1, "click_acc/web/text": 0, "click_acc/macro": 0.5}
    rows = [CLICK, CLICK, TYPE, BACK, TYPE]
    texts = [act("click", (40, 30)), act("click", (100, 90)), act("type", text="hello there"), act("enter"), ""]
    single, split = measured(load("gui", {"recipe": "gui_r1"}), rows, map(think, texts))
    assert [m["step_success"] for m in single] == [1, 0, 1, 0, 0] and [m["type_acc"] for m in single] == [1, 1, 1, 0, 0]
    assert split == {}
    glm, _ = measured(load("gui", {"recipe": "glm_v_androidworld"}), [CLICK, ROW, BACK], [
        boxed('{"action_type": "click", "box_2d": [[30, 20, 40, 30]]}')] * 3)
    assert glm == [{"type_acc": 1, "step_success": 1}, {"click_acc": 1}, {"type_acc": 0, "step_success": 0}]
    texts = [think("[40, 30]"), think("[20, 10, 60, 50]"), think("none")]
    infigui, _ = measured(load("gui", {"recipe": "infigui_r1"}), [ROW] * 3, texts)
    assert infigui == [{"click_acc": 1}, {"click_acc": 1}, {"click_acc": 0}]
