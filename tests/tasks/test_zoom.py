"""Zoom: what is asked cannot be read in the overview, and can in a crop; looking pays nothing by itself."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tables import each
from vlrl.data import coordinates
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.task.scoring import score_all
from vlrl.task.services import Services
from vlrl.tasks import _zoom_scenes as scenes  # pyright: ignore[reportMissingImports]
from vlrl.types import Media, PastAction


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
