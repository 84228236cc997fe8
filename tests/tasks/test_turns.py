"""Tasks of several turns: repair judges attempts by another task, recall shows colours, zoom what no overview shows."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each, refused
from tests.tasks.scaffold import played, scored_episode
from vlrl.data import coordinates
from vlrl.data.coordinates import make
from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_all, score_group
from vlrl.task.services import Services
from vlrl.tasks import _zoom_scenes as scenes  # pyright: ignore[reportMissingImports]
from vlrl.tasks.repair import WORDS, JudgedAttempt, level  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
from vlrl.types import Answer, Media, PastAction


def repair(**given) -> Any:
    task = load("repair", {"base": "grounding", "base_settings": {"drawn": True, "count": 40}, **given})
    task.coordinates = make("norm1000")
    return task


def half(task, sample):
    """A box with half of the target's area."""
    box = task.other.coordinates.from_original(sample, sample["boxes"][0]["box"])
    return f"[{box[0]}, {box[1]}, {box[2]}, {(box[1] + box[3]) / 2}]"


def test_a_second_attempt_after_a_message():
    task = repair()
    sample = task.samples("train")[0]
    right, wrong = task.oracle(sample), half(task, sample)
    shown, steps = played(task, sample, [wrong, right])
    assert not shown[0].text and [s.done for s in steps] == [False, True]
    assert steps[0].observation.text.startswith("That is not right. ") and "partly right" in steps[0].observation.text
    assert steps[1].observation.text == ""
    (first,), (second,) = ([task.judged(sample, parse_answer(a)).reward] for a in (wrong, right))
    result = scored_episode(task, sample, [wrong, right])
    assert result.parts == pytest.approx({"final": second, "first": first, "improvement": second - first,
                                          "solved": 1.0})
    assert result.correct and result.reward == pytest.approx(second) and second > first
    paid = scored_episode(repair(rewards={"improvement": 2.0}), sample, [wrong, right])
    assert paid.reward == pytest.approx(second + 2 * (second - first))
    turns = (PastAction(action=wrong), PastAction(action=right))
    metrics = task.metrics(sample, replace(parse_answer(right), turns=turns), result.parts)
    assert metrics == {"attempts": 2.0, "repaired": 1.0}


def test_the_reward_is_that_of_the_other_task():
    task, other = repair(), load("grounding", {"drawn": True, "count": 40})
    other.coordinates = make("norm1000")
    for sample, plain in zip(task.samples("heldout")[:5], other.samples("heldout")[:5], strict=True):
        assert sample.row == plain.row and task.messages(sample) == other.messages(plain)
        for text in (other.oracle(plain), half(task, sample), "no box", ""):
            single = score_group(other, plain, [parse_answer(text)], 0)[0]
            result = scored_episode(task, sample, [text, text])
            assert result.parts["final"] == result.parts["first"] == single.reward
            assert result.parts["improvement"] == 0 and result.correct == single.correct


def test_it_ends_when_right_or_after_the_last_attempt():
    task = repair(attempts=4)
    sample = task.samples("train")[1]
    assert len(played(task, sample, [task.oracle(sample), "more"])[1]) == 1
    assert [shown.text == "" for shown in played(task, sample, ["no"] * 9)[0][1:]] == [False, False, False, True]
    made_worse = scored_episode(repair(), sample, [half(task, sample), "no"])
    assert made_worse.parts["improvement"] < 0 and made_worse.reward == made_worse.parts["final"] == 0
    task = repair()
    task.other.score = lambda sample, answer: {"iou": None}  # pyright: ignore
    sample = task.other.samples("train")[0]
    (step,) = played(task, sample, ["[1, 2, 3, 4]"])[1]
    assert step.done and scored_episode(task, sample, ["[1, 2, 3, 4]"]).reward is None
    assert task.judged(sample, parse_answer("")) == JudgedAttempt({"iou": None}, None, None)
    rows = [{"id": "a", "plan": {"speed": "STOP", "path": "STRAIGHT"}}]
    task = load("repair", {"base": "driving", "base_settings": {"recipe": "alphadrive"}})
    task.other.samples = lambda split: [task.sample_from_row(row) for row in rows]  # pyright: ignore
    with pytest.raises(ConfigError, match=r"its part 'speed' compares the answers of a group.*rewards: {speed: 0}"):
        task.samples("train")
    task = repair(prompt="Where is {expression}?")
    sample = task.samples("train")[0]
    assert task.templates == ("Where is {expression}?",)
    assert task.messages(sample)[-1]["content"][-1]["text"] == f"Where is {sample['expression']}?"


@settings(max_examples=40)
@given(st.integers(0, 39), st.text() | st.lists(st.integers(0, 1000), max_size=5).map(str),
       st.sampled_from(["parts", "verdict"]))
def test_the_message_is_one_of_a_few_whatever_the_target(place, text, message):
    """So no target can be in it: all messages are known without any sample."""
    task = repair(message=message)
    parts = [name for name, weight in task.other.weights.items() if weight]
    known = {f"That is not right. {'; '.join(f'{n}: {w}' for n, w in zip(parts, words, strict=True))}. Answer again."
             for words in product(WORDS, repeat=len(parts))}
    if message == "verdict":
        known = {"That is not right. Answer again."}
    (step,) = played(task, task.samples("train")[place], [text])[1]
    assert step.observation.text in known | {""} and (step.observation.text == "") == step.done


test_how_right_a_part_is = by_hand(level, [
    (1.0, 1.0, 1.0, "right"), (0.99, 1.0, 1.0, "partly right"), (0.0, 1.0, 1.0, "wrong"), (-2.0, 1.0, 1.0, "wrong"),
    (1.0, 1.0, 2.0, "partly right"), (0.0, -1.0, 1.0, "right"), (0.5, -1.0, 1.0, "wrong")])
test_what_it_refuses = refused(ConfigError, lambda given: repair(**given), [
    ({"base": "recall", "base_settings": {}}, "task.base=recall: episodes of this task have several turns already"),
    ({"base": "repair", "base_settings": {}}, "repair takes a task with one answer"),
    ({"base": "nowhere"}, "no built-in task"), ({"base_settings": {"drawing": True}}, "unknown setting 'task.drawing'"),
    ({"attempts": 1}, "task.attempts")])


def test_each_turn_shows_the_next_colour():
    task = load("recall", {"length": 4})
    sample = task.samples("train")[3]
    actions = list(task.oracle_actions(sample) or ())
    shown, steps = played(task, sample, actions)
    assert [o.text for o in shown] == ["1 of 4.", "2 of 4.", "3 of 4.", "4 of 4.", ""]
    assert [s.done for s in steps] == [False, False, False, True]
    assert task.score(sample, Answer(text=actions[-1])) == {"accuracy": 1.0, "format": 1.0}
    names = {"red": 0, "green": 1, "blue": 2}
    for name, observation in zip(sample["colours"], shown, strict=False):
        pixel = observation.media[0].source.getpixel((0, 0))
        assert (name == "yellow" and min(pixel[:2]) > pixel[2]) or pixel.index(max(pixel)) == names.get(name)
    task = load("recall")
    sample = task.samples("heldout")[0]
    first, again, other = ([o.media[0].source.getpixel((0, 0)) for o in shown] for shown in (
        played(task, sample, ["", ""], seed)[0] for seed in (1, 1, 2)))
    assert first == again != other
    assert sample["colours"] == load("recall").samples("heldout")[0]["colours"]


@each("length", [2, 3])
def test_no_held_out_sequence_is_trained_on(length):
    task = load("recall", {"length": length, "count": 600})
    train, heldout = ({tuple(s["colours"]) for s in task.samples(split)} for split in ("train", "heldout"))
    assert not train & heldout and len(train | heldout) == 4 ** length


def test_sequences_of_several_lengths():
    task = load("recall", {"length": 4, "shortest": 2, "count": 600})
    for split in ("train", "heldout"):
        found = [s["length"] for s in task.samples(split)]
        assert {n: found.count(n) for n in (2, 3, 4)} == dict.fromkeys((2, 3, 4), 200)
    train, heldout = ({tuple(s["colours"]) for s in task.samples(split)} for split in ("train", "heldout"))
    assert not train & heldout
    sample = task.samples("train")[0]
    assert sample["length"] == 2 == len(sample["colours"]) and len(task.oracle_actions(sample) or ()) == 2
    assert task.score(sample, Answer(text=" ".join(sample["colours"]))) == {"accuracy": 1.0, "format": 1.0}
    assert task.score(sample, Answer(text="red red red red"))["format"] == 0
    with pytest.raises(ConfigError, match=r"task.shortest=4 is not below task.length=4"):
        load("recall", {"length": 4, "shortest": 4})


@each("answer accuracy form", [
    ("red green blue", 0.0, 1.0), ("", 0.0, 0.0), ("red", 0.0, 0.0), ("red green blue red", 0.0, 0.0),
    ("Red green blue", 0.0, 0.0), ("red red red", 0.0, 1.0)])
def test_other_answers(answer, accuracy, form):
    task = load("recall")
    sample = next(s for s in task.samples("heldout") if s["colours"] == ["blue", "green", "red"])
    assert task.score(sample, Answer(text=answer)) == {"accuracy": accuracy, "format": form}
    assert played(task, sample, ["next", "next", answer])[1][-1].done


def zoom(**settings) -> Any:
    task = load("zoom", settings)
    task.coordinates = coordinates.make("norm1000")
    return task


def tool(task, sample) -> Any:
    (function,) = task.tools(sample)
    return function


def test_scenes_and_random_crops_are_the_same_for_the_same_place():
    task = zoom()
    for split in ("train", "heldout"):
        first, again = (task.samples(split)[5] for _ in range(2))
        assert first.row == again.row and first.media[0].source.tobytes() == again.media[0].source.tobytes()
    assert task.samples("train")[5].row["boxes"] != first.row["boxes"]
    assert first.media[0].source.size == (64, 64)
    full, row = scenes.scene(0, "train", 0, 64, "digit")
    box = row["boxes"][0]["box"]
    assert full.size == (256, 256) and all(0 <= v <= 64 for v in box) and 21 <= box[2] - box[0] <= 26
    task = zoom(crops="random")
    sample = task.samples("train")[0]
    box = task.coordinates.from_original(sample, sample["boxes"][0]["box"])
    (shown, _), (again, _), (chosen, _) = (tool(t, sample)(box=box) for t in (task, task, zoom()))
    assert shown.tobytes() == again.tobytes() != chosen.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["digit", "count"])
def test_a_crop_can_be_read_and_the_whole_cannot(kind):
    """By a classifier that is even told where to look."""
    from scipy.ndimage import label
    from sklearn.linear_model import RidgeClassifier

    whole, crop, answers = [], [], []
    for i in range(400):
        full, row = scenes.scene(1, "train", i, 64, kind)
        box = row["boxes"][0]["box"]
        x, y = (round((a + b) / 8) for a, b in ((box[0], box[2]), (box[1], box[3])))
        blank, same = scenes.scene(1, "train", i, 64, kind, blank=True)
        assert same == row
        grey = np.asarray(scenes.overview(blank).reduce(4).convert("L"), float) / 255
        whole.append(grey[y - 2:y + 2, x - 2:x + 2].ravel())
        plate = scenes.PLATE * (box[2] - box[0])
        near = [v + (box[2] - box[0] - plate) / 2 * sign for v, sign in zip(box, (1, 1, -1, -1), strict=True)]
        crop.append(np.asarray(scenes.crop(full, near, 60).convert("L"), float) / 255)
        answers.append(row["answer"])

    def counted(pixels):
        _, found = label(pixels > 0.5)  # pyright: ignore[reportGeneralTypeIssues]
        return found

    def right(pixels):
        return RidgeClassifier().fit(pixels[:300], answers[:300]).score(pixels[300:], answers[300:])
    assert right(whole) <= 0.3
    if kind == "digit":
        assert right([c.ravel() for c in crop]) >= 0.85
    else:
        assert np.mean([counted(c) == int(a) for c, a in zip(crop, answers, strict=True)]) >= 0.85


def test_squares_around_a_box_and_frames_of_a_clip():
    task = zoom()
    sample = task.samples("train")[0]
    whole = task.coordinates.from_original(sample, sample["boxes"][0]["box"])
    shown, asked = tool(task, sample)(box=whole)
    assert asked in sample["question"]
    full, row = scenes.scene(0, "train", 0, 64, "digit")
    assert shown.size == (64, 64) and np.abs(
        np.asarray(shown, int) - np.asarray(scenes.crop(full, tuple(row["boxes"][0]["box"]), 64), int)).mean() < 8
    at_edge, _ = tool(task, sample)(box=[-500, -500, 40, 10])
    assert at_edge.size == (64, 64)
    task = zoom(media="clip", answer="count")
    sample = task.samples("train")[8]
    assert sample["second"] == 2 and len(sample.media[0].source) == 6 and sample.media[0].source[0].size == (16, 16)
    assert [tool(task, sample)(seconds=s)[0].size for s in (0, 2.9)] == [(64, 64)] * 2
    for seconds in (-1, 6, 1e9):
        with pytest.raises(ValueError, match="the clip has the seconds 0 to 5"):
            tool(task, sample)(seconds=seconds)
    assert task.oracle_actions(sample)[0] == \
        '<tool_call>{"name": "frame", "arguments": {"seconds": 2}}</tool_call>'


@each("box", [[0, 0, 1000, 1000], [-9, 0, 950, 3], [5, 5, 5, 9], [9, 9, 1, 1], [1, 2, 3], [], [0, 0, 1e300, 1e300]])
def test_a_box_that_shows_nothing_new_is_an_error(box):
    task = zoom()
    with pytest.raises(ValueError, match="the box"):
        tool(task, task.samples("train")[0])(box=box)


def rewarded(task, sample, *actions):
    """The reward of an episode; `+` before an action: the tool showed something."""
    picture = (Media(source=sample.media[0].source),)
    turns = tuple(PastAction(action=a.lstrip("+"), media=picture if a.startswith("+") else ()) for a in actions)
    answer = replace(parse_answer(turns[-1].action), turns=turns)
    ((scored, _),), _ = score_all(task, sample, [answer], [], 0, Services({}, {}))
    return scored.reward


def test_looking_pays_nothing_by_itself():
    task, paid = zoom(), zoom(rewards={"tool": 0.5})
    sample = task.samples("train")[0]
    right, wrong = task.oracle(sample), str((int(sample["answer"]) + 1) % 10)
    call = "+" + task.call(sample)
    whole = task.call(sample, (0, 0, 64, 64))
    for actions, plain, bonus in [
            ([right], 1.1, 1.1), ([call, right], 1.1, 1.6), ([call, call, call, right], 1.1, 1.6),
            ([whole, right], 1.1, 1.1), ([whole, whole, right], 1.1, 1.1), ([wrong], 0.1, 0.1),
            ([call, wrong], 0.1, 0.1), ([call, call], 0.0, 0.0), ([right + right], 0.0, 0.0),
            ([call, f"<answer>{right}</answer>"], 1.0, 1.5)]:
        assert rewarded(task, sample, *actions) == pytest.approx(plain), actions
        assert rewarded(paid, sample, *actions) == pytest.approx(bonus), actions
    task = zoom(tool=False)
    sample = task.samples("train")[0]
    assert task.tools(sample) == ()
    assert rewarded(task, sample, task.oracle(sample)) == pytest.approx(1.1)
