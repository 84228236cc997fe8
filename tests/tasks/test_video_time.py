"""The video recipes of times and tracks by hand: the parts of an answer as their papers define them."""

import math

import pytest

from tests.tables import each, refused
from tests.tasks.scaffold import measured, scores, think
from vlrl.data.coordinates import make
from vlrl.errors import DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group

LONG = "1 to " * 20_000
SPAN = {"id": "r1", "question": "A Person opens the door.", "answer_type": "span", "spans": [[10, 20]], "duration": 40}
TWO = {**SPAN, "spans": [[1, 2], [4, 6]]}
GQA = {"id": "r1", "question": "why did he sit down", "answer_type": "span+choice", "answer": "B", "duration": 40,
       "options": ["(A) to rest", "(B) to eat", "(C) to read"], "spans": [[5, 10], [20, 25]]}
NO_EVIDENCE = {**GQA, "spans": []}
BOXES = [[0, 0, 100, 50], [20, 0, 120, 50], None, [100, 50, 200, 100]]
TRACK = {"id": "r1", "question": "sloth", "answer_type": "track", "width": 200, "height": 100,
         "tracks": [{"label": "sloth", "boxes": BOXES, "times": [0, 0.5, 1, 2]}]}
EIGHT = {**TRACK, "tracks": [{"boxes": BOXES * 2}]}
GQA_CHOICE = {**GQA, "answer_type": "choice"}
TYPED = {"id": "r1", "question": "How far?", "answer_type": "regression", "answer": 10}


def loaded(recipe, convention="norm1"):
    task = load("video", {"recipe": recipe})
    task.coordinates = make(convention)
    return task


def scored(recipe, row, *texts):
    return [tuple(s.parts.values()) for s in scores(loaded(recipe), row, *texts)]


TIME_R1 = [  # span, format
    (SPAN, think("10 to 20"), 1, 1), (SPAN, think("12.00 to 20.00"), 0.8 * 0.95, 1),
    (SPAN, think("The event is from 5 and 15."), 1 / 3 * 0.875 * 0.875, 1),
    (SPAN, think("0 to 40"), 0.25 * 0.75 * 0.5, 1),  # the whole clip
    (SPAN, think("0 to 70"), 0, 1),  # one end off by more than the clip
    (SPAN, think("20 to 10"), 0, 1), (SPAN, think("15 to 15"), 0, 1), (SPAN, think("50 to 60"), 0, 1),
    (SPAN, think("10  to\n20"), 1, 1), (SPAN, think("1 to 2, no: 10 to 20"), 1, 1),  # the last
    (SPAN, think("10 to 20, or 1 to 2"), 0, 1), (SPAN, think("10s to 20s"), 0, 1),  # bare seconds
    (SPAN, think("10 - 20"), 0, 1), (SPAN, think("-10 to 20"), 0, 1), (SPAN, think("nan to 1e999"), 0, 1),
    (SPAN, "<think>so</think><answer>1 to 2</answer><answer>10 to 20</answer>", 1, 0),  # the last tag
    (SPAN, think("10 to 20") + " done", 1, 0), (SPAN, "<answer>10 to 20</answer>", 1, 0),
    (SPAN, "<think>10 to 20</think><answer>30 to 31</answer>", 0, 1),
    (SPAN, "<think><answer>10 to 20</answer></think><answer>30 to 31</answer>", 0, 0), (SPAN, "<think>10 to 20", 0, 0),
    (SPAN, "10 to 20", 0, 0), (SPAN, "", 0, 0)]
VIDEOCHAT_SPAN = [(SPAN, think("12 to 20"), 0.8, 1), (SPAN, think("0 to 40"), 0.25, 1), (SPAN, think("20 to 10"), 0, 1),
                  (SPAN, think("10 and 20") + ".", 1, 0), (SPAN, think("soon"), 0, 1), (SPAN, "", 0, 0)]
PLAIN = [  # iou, format
    (SPAN, "10 to 20", 1, 1), (SPAN, "10s - 0:20", 1, 1), (SPAN, "It is between 10 and 20 seconds.", 1, 0),
    (SPAN, '{"start_time": "12", "end_time": "20"}', 0.8, 0), (SPAN, "0 to 40", 0.25, 1), (SPAN, "20 to 10", 0, 0),
    (SPAN, "1 to 2, 10 to 20", 0, 0), (SPAN, "10 to 20, 1 to 2", 1, 0),  # the first: the row has one
    (SPAN, think("10 to 20"), 1, 1), (SPAN, "<think>10 to 20</think>1 to 2", 0, 1), (SPAN, "ten to twenty", 0, 0),
    (TWO, "1 to 2, 4 to 6", 1, 1), (TWO, "1 to 2", 1 / 3, 0), (TWO, "0 to 6, 1 to 2, 4 to 6", 0.5, 0), (SPAN, "", 0, 0)]


def glue(letter, spans):
    return f"{think(letter)}\n<glue>{spans}</glue>"


ONE = {"answer": "B", "spans": [[5, 10]]}
VIDEOCHAT_GQA = [  # accuracy, iou, format
    (GQA, glue("B", "[(5, 10), (20, 25)]"), 1, 1, 1),
    (GQA, glue("(B) to eat", "[(5.0,10.0),(7, 10),(20, 25),]"), 1, 1, 1),
    (GQA, glue("The best answer is B", "[(5, 10)]"), 1, 0.5, 1), (GQA, glue("A", "[(5, 10), (30, 35)]"), 0, 1 / 3, 1),
    (GQA, glue("b", "[(0, 40)]"), 1, 0.25, 1),  # the whole clip
    (GQA, glue("Because", "[]"), 0, 0, 1), (GQA, glue("A and B", "[]"), 0, 0, 1),
    (GQA, glue("B, not A", "[]"), 1, 0, 1),  # the first letter
    (GQA, glue("Because of B", "[]"), 1, 0, 1), (GQA, glue("D, so B", "[]"), 1, 0, 1),  # there are A to C
    (GQA, glue("B", "[(10, 5), (20, 25)]"), 1, 0, 0),  # one from end to start
    (GQA, glue("B", "[[5, 10], [20, 25]]"), 1, 0, 0), (GQA, glue("B", "[(5, 5)]"), 1, 0, 1),
    (GQA, glue("B", "5 to 10"), 1, 0, 0), (GQA, think("B"), 1, 0, 0),
    (GQA, "<glue>[(5, 10), (20, 25)]</glue>" + think("B"), 1, 0, 0),  # evidence before the thinking ends
    (GQA, "<think><glue>[(5, 10), (20, 25)]</glue></think><answer>B</answer><glue>[]</glue>", 1, 0, 0),
    (GQA, glue("B", "[]") + "<glue>[(5, 10), (20, 25)]</glue>", 1, 0, 0),  # the first <glue>
    (GQA, glue("B", "[(5, 10), (20, 25)]") + " done", 1, 1, 0), (NO_EVIDENCE, glue("B", "[]"), 1, 1, 1),
    (NO_EVIDENCE, glue("B", "[(5, 5)]"), 1, 0, 1), (GQA, "", 0, 0, 0)]


def start_end(start, end):
    return f'{{"start_time": "{start}", "end_time": "{end}"}}'


TEMPORAL = [  # accuracy, format
    (SPAN, think(start_end("10", "20.0")), 1, 1), (SPAN, think(start_end(12, 20)), 0.8, 1),
    (SPAN, think('{"start_time": 10, "end_time": 20}'), 1, 0),  # quoted in the format, anyhow for the times
    (SPAN, think(start_end(20, 10)), 0, 1), (SPAN, think(start_end(0, 40)), 0.25, 1),
    (SPAN, think(start_end("nan", "inf")), 0, 0), (SPAN, think(start_end("1.2.3", "20")), 0, 0),
    (SPAN, think('{"end_time": "20"}'), 0, 0), (SPAN, think("10 to 20"), 0, 0), (SPAN, start_end(10, 20), 0, 0),
    (SPAN, think(start_end(10, 20)) + ".", 1, 0), (SPAN, "", 0, 0)]
RIGHT = "[[0, 0, 0.5, 0.5], [0.1, 0, 0.6, 0.5], null, [0.5, 0.5, 1, 1]]"
VIDEOCHAT_TRACK = [  # iou, format
    (TRACK, think(RIGHT), 1, 1),
    (TRACK, think("[[0, 0, 0.5, 0.5], [0, 0, 0.5, 0.5], [0, 0, 1, 1], [0.5, 0.5, 1, 1]]"), (2 + 2 / 3) / 3, 1),
    (TRACK, think("[[0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1], [0, 0, 1, 1]]"), 0.25, 1),  # the whole picture
    (TRACK, think("[[0.5, 0.5, 0, 0], [0.6, 0.5, 0.1, 0], null, [1, 1, 0.5, 0.5]]"), 0, 1),  # inverted
    (TRACK, think("[[0, 0, 0.5, 0.5], [0.1, 0, 0.6, 0.5], [0.5, 0.5, 1, 1]]"), 0, 0),  # three of four
    (TRACK, think(RIGHT + RIGHT), 0, 0), (TRACK, RIGHT, 0, 0), (TRACK, think(RIGHT) + ".", 1, 0),
    (TRACK, think(RIGHT.replace("null", "[NaN, 0, 1, 1]")), 0, 0), (TRACK, f"<think>{RIGHT}</think>", 0, 0),
    (TRACK, "", 0, 0)]
KEYED = '{"boxes": {"0": [0, 0, 0.5, 0.5], "0.5": [0.1, 0, 0.6, 0.5], "2": [0.5, 0.5, 1, 1]}}'
ONETHINKER = [  # accuracy, format, structure
    (SPAN, think('{"time": [12, 20]}'), 0.8, 1, 0.5), (SPAN, think('{"time": [20, 10]}'), 0, 1, 0.5),
    (SPAN, think("12 to 20"), 0, 1, 0), (SPAN, '{"time": [12, 20]}', 0.8, 0, 0),
    (SPAN, think('{"time": [NaN, 1e999]}'), 0, 1, 0),
    (TRACK, think(KEYED), 1, 1, 0.5), (TRACK, think(KEYED.replace('"2"', '"3"')), 2 / 3, 1, 0.25 + 0.25 * 2 / 3),
    (TRACK, think('{"boxes": {}}'), 0, 1, 0.25), (TRACK, think('{"boxes": {"0": [1, 2]}}'), 0, 1, 0),
    (TRACK, think(RIGHT), 0, 1, 0),
    (TYPED, think("10"), 1, 1, 0.5), (TYPED, think("10.2"), 0.9 + 0.1 * (0.02 < 0.05), 1, 0.5),
    (TYPED, think("12"), 0.6, 1, 0.5),  # off by .2: the thresholds .5 to .75 hold
    (TYPED, think("15.1"), 0, 1, 0.5), (TYPED, think("far"), 0, 1, 0.5), (TYPED, "10", 1, 0, 0),
    ({**TYPED, "answer_type": "number"}, think("10.001"), 1, 1, 0.5),
    ({**TYPED, "answer_type": "ocr", "answer": "go left"}, think("go right"), 0.5, 1, 0.5),
    (GQA_CHOICE, think("B"), 1, 1, 0.5),
    (GQA_CHOICE, think("C"), 0, 1, 0.5)]
TABLES = {"time_r1": TIME_R1, "videochat_r1_span": VIDEOCHAT_SPAN, "videochat_r1_gqa": VIDEOCHAT_GQA, "span": PLAIN,
          "videochat_r1_track": VIDEOCHAT_TRACK, "temporal_r1": TEMPORAL, "onethinker": ONETHINKER}
ROWS = {"time_r1": SPAN, "videochat_r1_span": SPAN, "videochat_r1_gqa": GQA, "span": TWO, "videochat_r1_track": TRACK,
        "temporal_r1": SPAN, "onethinker": TRACK, "time_r1_reasoning": SPAN}


@each("recipe case", [(name, case) for name, table in TABLES.items() for case in table])
def test_by_hand(recipe, case):
    row, text, *expected = case
    assert scored(recipe, row, text)[0] == pytest.approx(tuple(expected), abs=1e-5)


def test_what_time_r1_can_pay_the_thinking_for():
    thought = "Wait, I observe\n\na door. <timestep> 1.5 to 2 </timestep>"
    texts = [f"<think>{thought}</think><answer>12 to 20</answer>", think("12 to 20").replace("so", "because"),
             "<think>step <timestep>1 to 2"]
    found = scored("time_r1_reasoning", SPAN, *texts)
    assert [f[:6] for f in found] == [
        pytest.approx((0.76, 1, 1, len(thought) / 500, 1, 1)), pytest.approx((0.76, 1, 0, 7 / 500, 0.5, 0.5)), (0,) * 6]
    assert scored("time_r1_reasoning", SPAN, "a b c d", "a b x y", "q") == [
        (0,) * 6 + (pytest.approx(d),) for d in ((0.5 + 1) / 2, (0.5 + 1) / 2, 1)]  # 1 - 2 * 2 / 8
    assert [f[6] for f in scored("time_r1_reasoning", SPAN, "same", "same")] == [0, 0]
    assert scored("time_r1_reasoning", SPAN, "alone")[0][6] == 0


@each("recipe", ROWS)
def test_perfect_answers_and_cheats(recipe):
    task = loaded(recipe)
    sample = task.sample_from_row(ROWS[recipe])
    texts = [task.oracle(sample), *task.cheats(sample).values()]
    (best, *rest) = score_group(task, sample, [parse_answer(text) for text in texts], 0)
    weights = sum(w for part, w in task.weights.items() if part not in ("diversity", "structure"))
    assert best.reward == pytest.approx(weights + 0.5 * (recipe == "onethinker")) and best.error is None
    assert best.parsed == task.target(sample) and len(rest) >= 2
    for name, cheat in zip(task.cheats(sample), rest, strict=True):
        assert cheat.reward < 0.8 * best.reward, name


@each("convention", ["norm1000", "norm999", "processed"])
@each("recipe", ["videochat_r1_track", "onethinker"])
def test_tracks_in_every_convention(recipe, convention):
    task = loaded(recipe, convention)
    sample = task.sample_from_row({**TRACK, "processed_size": [588, 280]})
    (found,) = score_group(task, sample, [parse_answer(task.oracle(sample))], 0)
    assert found.parts["iou" if recipe != "onethinker" else "accuracy"] > 0.98


def test_prompts_are_filled():
    for recipe, row, words in (
            ("time_r1", SPAN, 'the event "a person opens the door" in'), ("span", SPAN, "opens the door? Answer"),
            ("span", {**SPAN, "question": "When is it dark?"}, "When is it dark? Answer"),
            ("videochat_r1_gqa", GQA, "(A) to rest (B) to eat (C) to read"),
            ("onethinker", TRACK, "within the <answer>...</answer> tags: 0, 0.5, 1, 2.\n"),
            ("onethinker", GQA_CHOICE, "\nB. to eat\n"),
            ("videochat_r1_track", TRACK, 'Track the "sloth" in the video based on'),
            ("videochat_r1_track", TRACK, 'coordinates "[0, 0, 0.5, 0.5]". The'),
            ("videochat_r1_track", EIGHT, "eight sublists."),
            ("temporal_r1", SPAN, '{"start_time": "12.54"'), ("onethinker", TYPED, "the numerical value within")):
        task = loaded(recipe)
        text = task.messages(task.sample_from_row(row))[0 if not task.system else 1]["content"][-1]["text"]
        assert words in text and not any(f"{{{name}}}" in text for name in ("event", "count", "as_type", "lettered"))


test_rows_that_miss_what_a_recipe_needs = refused(DataError, lambda recipe, row: loaded(recipe).sample_from_row(row), [
    ("span", {**SPAN, "spans": None}, "spans is missing"), ("span", {**SPAN, "spans": []}, "spans is missing"),
    ("time_r1", TWO, "spans has 2 intervals"), ("time_r1", {**SPAN, "duration": None}, "duration is missing"),
    ("span", {**SPAN, "spans": [[20, 10]]}, r"span \[20, 10\] must start"),
    ("span", {**SPAN, "spans": "10 to 20"}, "spans='10 to 20' must be a list"),
    ("span", {**SPAN, "spans": [[-1, 10]]}, "start at 0 or later"),
    ("span", {**SPAN, "spans": [[1]]}, "must be a list of .start, end"),
    ("span", {**SPAN, "spans": [[1, math.nan]]}, "must be a list of .start, end"),
    ("span", {**SPAN, "duration": 0}, "duration=0"), ("videochat_r1_gqa", {**GQA, "options": ["(A) one"]}, "options="),
    ("videochat_r1_gqa", {**GQA, "answer": "Q"}, "answer='Q' must be"),
    ("videochat_r1_gqa", {**GQA, "spans": None}, "spans is missing"),
    ("videochat_r1_track", {**TRACK, "tracks": []}, "tracks is missing"),
    ("videochat_r1_track", SPAN, "tracks is missing"),
    ("videochat_r1_track", {**TRACK, "width": None}, "width=None"), ("onethinker", {**TRACK, "tracks": 5}, "tracks=5"),
    ("onethinker", {**TRACK, "tracks": [{"boxes": [None]}]}, "1 frames needs a box"),
    ("onethinker", {**TRACK, "tracks": [{"boxes": [[1, 2, 3]]}]}, r"box \[1, 2, 3\]"),
    ("onethinker", {**TRACK, "tracks": [{"boxes": BOXES, "times": [0, 1, 1, 2]}]}, "times="),
    ("onethinker", {**TRACK, "tracks": [{"boxes": BOXES, "times": [0]}]}, "times="),
    ("onethinker", {**TYPED, "answer": None}, "answer="),
    ("onethinker", {**TYPED, "answer_type": "x"}, "answer_type='x'")], start="row 'r1'.*")


@each("answer", [[10, 20], [[10, 20]], "10 to 20"])
def test_an_answer_gives_the_spans(answer):
    row = {**SPAN, "spans": None, "answer": answer}
    assert loaded("time_r1").sample_from_row(row)["spans"] == [[10, 20]]
    assert scored("time_r1", row, think("10 to 20")) == [(1, 1)]


@each("answer", [["10", "20"], [20, 10], [{}], "soon", 5, "", []])
def test_an_answer_that_is_no_span(answer):
    with pytest.raises(DataError, match="row 'r1': span"):
        loaded("time_r1").sample_from_row({**SPAN, "spans": None, "answer": answer})


def test_metrics_and_marks():
    rows = [SPAN, {**SPAN, "category": "indoor"}, {**SPAN, "category": "indoor"}]
    single, split = measured(loaded("videochat_r1_span"), rows, [think("15 to 20"), think("0 to 40"), think("soon")])
    assert single == [{"miou": 0.5, "miop": 1, "r1@0.3": 1, "r1@0.5": 1, "r1@0.7": 0},
                      {"miou": 0.25, "miop": 0.25, "r1@0.3": 0, "r1@0.5": 0, "r1@0.7": 0},
                      {"miou": 0, "miop": 0, "r1@0.3": 0, "r1@0.5": 0, "r1@0.7": 0}]
    assert split["miou/indoor"] == 0.125 and split["r1@0.3/indoor"] == 0
    single, _ = measured(loaded("videochat_r1_gqa"), [GQA] * 4, [
        glue("B", "[(5, 10)]"), glue("B", "[(0, 40)]"), glue("A", "[(5, 10)]"), ""])
    assert [m["gqa_acc"] for m in single] == [1, 0, 0, 0] and [m["miop"] for m in single] == [1, 0.125, 1, 0]
    single, _ = measured(loaded("videochat_r1_track"), [TRACK] * 2, [VIDEOCHAT_TRACK[1][1], "none"])
    assert single == [{"overlap": pytest.approx(8 / 9), "sr@0.5": 1, "ao": pytest.approx(5 / 6), "sr": 1},
                      {"overlap": 0, "sr@0.5": 0, "ao": 0, "sr": 0}]
    single, _ = measured(loaded("onethinker"), [TYPED, TRACK], [think("10"), think(KEYED)])
    assert "miou" not in single[0] and single[1]["overlap"] == 1
    task = loaded("videochat_r1_track")
    sample = task.sample_from_row(TRACK)
    target, answer = task.overlay(sample, task.parse(sample, parse_answer(think(RIGHT))))
    assert target["at"][:2] == [[0, [0, 0, 100, 50]], [0.5, [20, 0, 120, 50]]] and target["role"] == "target"
    assert [t for t, _ in answer["at"]] == [0, 0.5, 2] and (answer["kind"], answer["role"]) == ("track", "answer")
    assert task.overlay(sample, None) == [target]
    untimed = task.sample_from_row({**TRACK, "tracks": [{"boxes": TRACK["tracks"][0]["boxes"]}]})
    assert [t for t, _ in task.overlay(untimed, None)[0]["at"]] == [None] * 3
    for recipe, text in (("span", "12 to 20"), ("videochat_r1_gqa", glue("B", "[(12, 20)]"))):
        task = loaded(recipe)
        sample = task.sample_from_row(ROWS[recipe])
        found = task.overlay(sample, task.parse(sample, parse_answer(text)))
        assert {"kind": "span", "at": [12, 20], "label": "span", "role": "answer"} in found, recipe
        assert [m["at"] for m in found if m["role"] == "target"] == [[*s] for s in ROWS[recipe]["spans"]], recipe
    task = loaded("onethinker")
    typed = task.sample_from_row(TYPED)
    assert all(m["kind"] == "span" for m in task.overlay(typed, task.parse(typed, parse_answer(think("B")))))
