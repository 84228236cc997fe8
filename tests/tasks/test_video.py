"""The video recipes of typed answers by hand; and every video recipe's config, cheats, bounds and contract."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from tests.tables import each
from tests.tasks import scaffold
from tests.tasks.scaffold import assert_contract
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.types import Media, Sample

from . import test_video_time as timed

LONG = "the red car " * 10_000
CHOICE = {"id": "r1", "question": "What is it?", "answer_type": "choice", "options": ["a cat", "a dog", "a hen"],
          "answer": "B"}
NUMBER = {"id": "r1", "question": "How many?", "answer_type": "number", "answer": "3"}
OCR = {"id": "r1", "question": "What is written?", "answer_type": "ocr", "answer": "EXIT only left"}
TEXT = {"id": "r1", "question": "What happens?", "answer_type": "text", "answer": "a red car stops"}
LABEL = {"id": "r1", "question": "How is it?", "answer_type": "text", "labels": ["Sharp", "Out of focus"],
         "answer": "Out of focus"}
SIZE = {"id": "r1", "question": "How far?", "answer_type": "regression", "answer": 4.0}
FACE = {**CHOICE, "question": "Which are the eyebrows?", "attribute": "eyebrows"}
think = timed.think

VIDEO_R1 = [  # accuracy, format
    (CHOICE, think("B"), 1, 1), (CHOICE, think(" B\n"), 1, 1), (CHOICE, think("B."), 0, 1),  # the letter alone
    (CHOICE, think("(B)"), 0, 1), (CHOICE, think("b"), 0, 1), (CHOICE, think("a dog"), 0, 1),
    (CHOICE, think("Both"), 0, 1), (CHOICE, think("A, B, C"), 0, 1),
    (CHOICE, "<think>so</think>\n<answer>B</answer>", 1, 1), (CHOICE, think("B") + " done", 1, 0),
    (CHOICE, "<think>so</think><answer>A</answer><answer>B</answer>", 0, 0),  # the first
    (CHOICE, "<think><answer>B</answer></think><answer>A</answer>", 0, 0), (CHOICE, "<think>B</think>", 0, 0),
    (CHOICE, "B", 0, 0), ({**CHOICE, "answer": "a dog"}, think("B"), 1, 1),
    ({**CHOICE, "answer": "B. a dog", "options": ["A. a cat", "B. a dog"]}, think("B"), 1, 1),
    ({**CHOICE, "options": None, "answer": "E"}, think("E"), 1, 1), (NUMBER, think("3"), 1, 1),
    (NUMBER, think("3.0"), 0, 1), (NUMBER, think("3 cars"), 0, 1), (NUMBER, think("13"), 0, 1),
    (NUMBER, think("0123456789"), 0, 1), ({**NUMBER, "answer": 3}, think("3"), 1, 1),
    ({**NUMBER, "answer": 3.0}, think("3"), 1, 1),  # a JSON number has no point to agree on
    ({**NUMBER, "answer": "3.14"}, think("3.142"), 1, 1), ({**NUMBER, "answer": "1,200"}, think("1,200"), 1, 1),
    (OCR, think("EXIT only left"), 1, 1), (OCR, think("exit only left"), 2 / 3, 1), (OCR, think("EXIT left"), 2 / 3, 1),
    (OCR, think(LONG), 0, 1), (TEXT, think("A red car stops."), 1, 1),
    (TEXT, think("the red cars stopped"), (6 / 8 + 4 / 6 + 6 / 8) / 3, 1),
    (TEXT, think("stops"), (0.4 + 0 + 0.4) / 3, 1), (TEXT, think("nothing"), 0, 1), (SIZE, think("5"), 0.75, 1),
    (SIZE, think("8.5"), 0, 1), (SIZE, think("4"), 1, 1), (SIZE, think("4 m"), 0, 1), (SIZE, think("1e999"), 0, 1),
    (SIZE, "", 0, 0)]
SEED = [
    (CHOICE, think("B"), 1, 1), (CHOICE, think("B."), 1, 1), (CHOICE, think("B. a dog"), 1, 1),
    (CHOICE, think("a dog"), 1, 1), (CHOICE, think("Both"), 0, 1), (CHOICE, think("B, C"), 0, 1),
    (CHOICE, think("A cat"), 0, 1), (CHOICE, "<answer>B</answer>", 1, 0), (CHOICE, "B", 0, 0)]
FAVCHAT = [
    (FACE, think("(b)"), 1, 1), (FACE, think("A"), 0, 1), (LABEL, think("out of focus."), 1, 1),
    (LABEL, think("Sharp, Out of focus"), 0, 1), (TEXT, think("a red car stops"), 1, 1), (FACE, "(B)", 0, 0)]
DIRECT = [
    (CHOICE, "B", 1, 1), (CHOICE, "(b) a dog", 1, 1), (CHOICE, "A dog.", 1, 1), (CHOICE, "A", 0, 1),
    (CHOICE, "A, B, C", 0, 1), (CHOICE, "A or B", 0, 1), (CHOICE, "B\nbecause it barks", 1, 0),
    (CHOICE, think("B"), 1, 1), (CHOICE, "<think>B</think>A", 0, 1), (CHOICE, "<think>B", 0, 0),
    ({**CHOICE, "answer_type": "span+choice", "spans": [[1, 2]]}, "B", 1, 1),
    ({**CHOICE, "options": None, "labels": ["a cat", "a dog"]}, "a dog", 1, 1), (NUMBER, "3 cars", 1, 1),
    (NUMBER, "3.0", 1, 1), (NUMBER, "3 or 4", 0, 1), ({**NUMBER, "tolerance": 1}, "4", 1, 1),
    (LABEL, "OUT OF FOCUS", 1, 1), (LABEL, "Sharp", 0, 1), (OCR, "EXIT only", 2 / 3, 1), (SIZE, "5", 0.75, 1),
    (timed.SPAN, "10 to 20", 1, 1), (timed.SPAN, "10 to 15", 0.5, 1), (timed.SPAN, "20 to 10", 0, 0),
    (timed.TRACK, "[[0, 0, 100, 50], [20, 0, 120, 50], null, [100, 50, 200, 100]]", 1, 1),
    (timed.TRACK, "[[0, 0, 100, 50], null, null, null]", 1 / 3, 1), (timed.TRACK, "[[0, 0, 100, 50]]", 0, 0),
    (CHOICE, "", 0, 0)]
TABLES = {"video_r1": VIDEO_R1, "grpo_care": VIDEO_R1, "seed_bench_r1": SEED, "favchat": FAVCHAT, "direct": DIRECT}
ROWS = {**{name: [row] for name, row in timed.ROWS.items()},
        **{name: [CHOICE, NUMBER, OCR, TEXT, SIZE] for name in TABLES}, "seed_bench_r1": [CHOICE]}


def reference(values):
    """A service that gives each answer the next of the log-probabilities."""
    return Services(given={"reference_logprobs": lambda answers: [np.log(values[i]) for i in range(len(answers))]})


SURE = reference([np.array([1.0])] * 1000)
built = partial(scaffold.built, "video")


def scored(recipe, row, *texts, services=SURE, tokens=0, **settings):
    task = load("video", {"recipe": recipe, **settings}) if settings else built(recipe)
    answers = [replace(parse_answer(text), n_tokens=tokens) for text in texts]
    found = score_group(task, task.sample_from_row(row), answers, 0, services)
    assert all(s.error is None for s in found), [s.error for s in found]
    return [s.parts for s in found]


@each("recipe", TABLES)
def test_by_hand(recipe):
    for row, text, *expected in TABLES[recipe]:
        (parts,) = scored(recipe, row, text)
        assert [parts["accuracy"], parts["format"]] == pytest.approx(expected, abs=1e-6), (row, text[:80])


CLIP = {**CHOICE, "video": "clip.mp4"}
STILL = {**CHOICE, "image": "still.png"}
RIGHT, WRONG, BARE = think("B"), think("A"), "<answer>B</answer>"


@each("row texts shuffled paid", [
    (CLIP, (RIGHT, WRONG, BARE), (WRONG, WRONG), (1, 0, 1)),
    (CLIP, (RIGHT, WRONG), (RIGHT, WRONG), (1, 0)),  # .5 > .8 * .5
    (CLIP, (RIGHT, WRONG), (RIGHT, RIGHT), (0, 0)), (CLIP, (WRONG, WRONG), (WRONG,), (0, 0)),
    (CLIP, (RIGHT, RIGHT), (), (0, 0)), (STILL, (RIGHT, RIGHT), (WRONG,), (0, 0)),  # images are left alone
    ({**CLIP, **TEXT}, (think("a red car stops"), think("a car")), (think("car"),), (1, 1))])
def test_temporal(row, texts, shuffled, paid):
    services = Services(variants={"shuffled": [parse_answer(text) for text in shuffled]} if shuffled else {})
    assert [parts["temporal"] for parts in scored("video_r1", row, *texts, services=services)] == list(paid)


def test_shuffled_clips_and_bonuses():
    def paid(tokens, *texts, **settings):
        return [parts["length"] for parts in scored("video_r1", CLIP, *texts, tokens=tokens, **settings)]
    assert [paid(n, RIGHT, WRONG, RIGHT) for n in (319, 320, 512, 513)] == [[0] * 3, [1, 0, 1], [1, 0, 1], [0] * 3]
    assert paid(400, RIGHT, WRONG) == [0, 0]
    assert paid(9, RIGHT, RIGHT, length_range=(8, 9)) == [1, 1]
    with pytest.raises(ConfigError, match=r"task.length_range=\[512, 320\]"):
        paid(400, RIGHT, length_range=(512, 320))
    task = built("video_r1")
    services = Services(variants={"shuffled": [parse_answer(WRONG)]})
    answers = [replace(parse_answer(text), n_tokens=400) for text in (RIGHT, RIGHT, WRONG)]
    found = score_group(task, task.sample_from_row(CLIP), answers, 0, services)
    assert [s.reward for s in found] == pytest.approx([2.5, 2.5, 1])
    services = reference([np.array([0.8]), np.array([0.79])])
    assert [p["consistency"] for p in scored("grpo_care", CLIP, RIGHT, RIGHT, services=services)] == [1, 1]
    strict = scored("grpo_care", CLIP, RIGHT, RIGHT, services=services, consistency_margin=0)
    assert [p["consistency"] for p in strict] == [1, 0]
    assert set(built("grpo_care").needs) == {"reference_logprobs"} and not built("video_r1").needs
    task = built("video_r1")
    sample = task.sample_from_row({**CLIP, "image": "now.png", "video_start": 2})
    assert [m.kind for m in sample.media] == ["video", "image"]  # the past before the present
    (found,) = task.variants(sample, 8, 3)
    assert (found.name, found.n, found.trained) == ("shuffled", 4, False)
    ((kind, seed),) = found.media[0].edits
    assert kind == "shuffle" and found.media[0].start == 2 and found.media[1].edits == ()
    again, later = (task.variants(sample, 8, step)[0].media[0].edits[0][1] for step in (3, 4))
    assert seed == again != later
    assert task.variants(Sample(id="x", media=(Media(source="a.png"),)), 8, 0) == ()
    assert task.variants(sample, 1, 0) == ()
    assert built("grpo_care").variants(sample, 8, 0) == ()


@each("recipe row words", [
    ("direct", {**CHOICE, "question": ""}, "question="),
    ("direct", {**CHOICE, "answer_type": None}, "answer_type=None must be one of"),
    ("direct", {**CHOICE, "answer_type": "poem"}, "answer_type='poem' is not scored by task.recipe='direct'"),
    ("video_r1", {**CHOICE, "answer_type": "span", "spans": [[1, 2]]}, "task.recipe=span"),
    ("direct", {**CHOICE, "answer": "D"}, "'D' must be the letter of one of the row's 3 options"),
    ("direct", {**CHOICE, "options": "a, b"}, "options=a, b must be a list of strings"),
    ("direct", {**CHOICE, "answer": None}, "must be a string or a number"),
    ("direct", {**CHOICE, "answer": True}, "must be a string or a number"),
    ("direct", {**NUMBER, "answer": "three"}, "must be a number"),
    ("direct", {**NUMBER, "tolerance": -1}, "tolerance=-1"),
    ("favchat", {**LABEL, "answer": "blurred"}, "is not one of the row's labels"),
    ("video_r1", {**TEXT, "answer": "\u2026\uff01"}, "no letter or digit"),
    ("direct", {**timed.SPAN, "spans": []}, "spans is missing")])
def test_rows_that_cannot_be_scored(recipe, row, words):
    with pytest.raises(DataError, match="row 'r1'") as caught:
        built(recipe).sample_from_row(row)
    assert words in str(caught.value)


def asked(recipe, row):
    task = built(recipe)
    return task.messages(task.sample_from_row(row))[-1]["content"][-1]["text"]


def test_prompts_and_summaries():
    assert asked("direct", CHOICE) == "What is it?\nOptions:\nA. a cat\nB. a dog\nC. a hen\nAnswer directly."
    listed = {**CHOICE, "question": "What is it?\nA. a cat\nB. a dog\nC. a hen"}
    assert asked("direct", listed) == listed["question"] + "\nAnswer directly."
    assert asked("direct", LABEL) == "How is it? Choose from: Sharp, Out of focus.\nAnswer directly."
    assert asked("direct", timed.SPAN).endswith('\nAnswer "start to end" in seconds.')
    assert asked("direct", timed.TRACK).startswith("Where is sloth in each of 4 frames?")
    assert asked("video_r1", CHOICE).endswith("only the single option letter (e.g., A, B, C, D, etc.) within the "
                                              "<answer> </answer> tags.")
    assert asked("video_r1", OCR).endswith("clearly and provide your text answer within the <answer> </answer> tags.")
    assert "at the face: eyebrows." in asked("favchat", FACE)
    assert asked("seed_bench_r1", CHOICE).startswith("What is it?\nOptions:\nA. a cat\n")
    assert "{" not in "".join(asked(recipe, row) for recipe in TABLES for row in ROWS[recipe])
    rows = [({**CHOICE, "category": "L1"}, 1), ({**CHOICE, "category": "L3"}, 0), ({**NUMBER, "category": "L3"}, 1),
            ({**FACE, "category": "L1"}, 0)]
    records = [{"sample": row, "parts": {"accuracy": float(right)}, "metrics": {}} for row, right in rows]
    assert built("direct").summarize(records) == pytest.approx({
        "accuracy/L1": 0.5, "accuracy/L3": 0.5, "accuracy/choice": 1 / 3, "accuracy/eyebrows": 0, "accuracy/number": 1})
    task = built("direct")
    sample = task.sample_from_row(timed.SPAN)
    assert task.metrics(sample, parse_answer("10 to 15"), {})["miou"] == 0.5
    assert task.metrics(task.sample_from_row(CHOICE), parse_answer("B"), {}) == {}


SPANS = [[[10, 20]], [[0, 5]], [[25, 38]], [[12, 14]], [[30, 33]]]
CORNERS = [[0, 0], [60, 10], [100, 50], [20, 30]]
CONTRACT = {
    "choice": [{**CHOICE, "answer": letter, "question": f"Which is {n}?"} for n, letter in enumerate("ABCCBA")],
    "number": [{**NUMBER, "answer": n} for n in (3, 12, 7, "2.5", 40)],
    "text": [{**TEXT, "answer": text} for text in ("a red car stops", "two dogs sleep there", "the boy drops his hat")],
    "span": [{**timed.SPAN, "spans": spans} for spans in SPANS],
    "span+choice": [{**timed.GQA, "spans": span, "answer": right} for span, right in zip(SPANS, "ABCBA", strict=True)],
    "track": [{**timed.TRACK, "tracks": [{"boxes": [[x + d, y, x + d + 60, y + 40] for d in (0, 10, 20)]}]}
              for x, y in CORNERS]}
EXAMINED = [*((recipe, kind) for recipe in ("video_r1", "favchat") for kind in ("choice", "number", "text")),
            ("seed_bench_r1", "choice"), ("grpo_care", "choice"), *(("direct", kind) for kind in CONTRACT),
            *((recipe, "span") for recipe in ("span", "time_r1", "time_r1_reasoning", "temporal_r1", "onethinker",
                                              "videochat_r1_span")),
            ("videochat_r1_gqa", "span+choice"), ("videochat_r1_track", "track"), ("onethinker", "track")]


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kind"), EXAMINED)
def test_the_contract(recipe, kind, tmp_path):
    assert_contract("video", {"recipe": recipe}, CONTRACT[kind], tmp_path)
