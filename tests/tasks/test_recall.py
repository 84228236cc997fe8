"""Recall: colours one a turn; the answer is their names in order."""

import pytest

from tests.tables import each
from vlrl.errors import ConfigError
from vlrl.task import load
from vlrl.types import Answer


def played(task, sample, actions, seed=0):
    world = task.environment(sample)
    shown = [world.reset(seed)]
    steps = [world.step(action) for action in actions]
    return [*shown, *(s.observation for s in steps)], steps


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
    first, again, other = ([o.media[0].source.getpixel((0, 0)) for o in played(task, sample, ["", ""], seed)[0]]
                           for seed in (1, 1, 2))
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
