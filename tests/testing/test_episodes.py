"""`vlrl tasks check` on tasks with environments or tools: sound ones pass, each broken one is found."""

import itertools
import subprocess

import pytest
from PIL import Image

from tests.tables import each
from vlrl import Environment, Media, Observation, Sample, Step, Task, testing
from vlrl.testing import episodes

FRESH = itertools.count()


class Walk(Environment):
    """A dot on a line; each broken one below differs in one thing."""

    def __init__(self, sample):
        self.place, self.goal = 0, sample["goal"]

    def shown(self):
        return Observation(f"At {self.place}.", [Media(source=Image.new("RGB", (32, 32), (self.place, 0, 0)))])

    def reset(self, seed):
        return self.shown()

    def step(self, action):
        self.place += action == "right"
        return Step(self.shown(), {"arrived": float(self.place == self.goal)}, done=self.place == self.goal)


def refuses(self, action):
    if action == "null":
        raise ValueError("no such way")
    return Walk.step(self, action)


def pays(self, action):
    self.place = self.goal
    return Walk.step(self, "")


def leaves(self, seed):
    self.other = subprocess.Popen(["sleep", "60"])
    return Walk.reset(self, seed)


class Walking(Task):
    prompt = "Go to {goal}."
    rewards = {"arrived": 1.0}
    world = Walk

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"goal": 2 + i + 10 * (split == "heldout")}) for i in range(3)]

    def environment(self, sample):
        return self.world(sample)

    def oracle_actions(self, sample):
        return ["right"] * sample["goal"]


def found(world=Walk, base=Walking, **changes):
    report = testing.examine(type("Walking", (base,), {"world": world, **changes})(), processes=0)
    return {finding.kind: str(finding) for finding in report.findings}, report.notes


def test_a_sound_one_passes():
    findings, notes = found()
    assert not findings and "perfect episodes earn 1 on average over 3 samples, hostile actions at most 0" in notes


@each("changes check says", [
    ({"shown": lambda self: Observation("", [Media(source=Image.new("RGB", (32, 32), (next(FRESH) % 256, 0, 0)))])},
     "deterministic", "gave another observation or reward the second time"),
    ({"step": refuses}, "environment", "step: "), ({"close": lambda self: 1 / 0}, "close", "close: "),
    ({"step": pays}, "hostile", "hostile actions earn 1, not less than the perfect episode (1)"),
    ({"reset": leaves}, "close", "the process 'sleep' keeps running"),
    ({"shown": lambda self: Observation("", [Media(source="no/such.png")] if self.place else [])}, "media",
     "an observation has media that cannot be read")])
def test_broken_environments_are_found(changes, check, says, monkeypatch):
    monkeypatch.setattr(episodes, "_LEAVE_S", 0.2)
    findings, _ = found(type("Broken", (Walk,), changes))
    assert says in findings[check], findings


def test_wrong_perfect_episodes_are_found():
    for actions, says in ((["left"], "the perfect episode earns 0"), (["right"] * 9, "of its 9 actions"),
                          ("right", "expected a list of strings"), ([], "expected a list of strings")):
        findings, _ = found(oracle_actions=lambda self, sample, actions=actions: actions)
        assert says in findings["oracle_actions"], findings


def test_a_score_that_raises_is_found_also_without_perfect_episodes():
    findings, _ = found(score=lambda self, sample, answer: {"arrived": float(len(answer.turns[0].action) / 0)})
    assert "ZeroDivisionError" in findings["score"]
    findings, notes = found(type("Raises", (Walk,), {"step": refuses}), oracle_actions=lambda self, sample: None)
    assert "environment" in findings and any("oracle_actions returned None" in note for note in notes)


class Looking(Task):
    """Where the model must look before it answers."""

    prompt = "Which number is behind door {id}?"
    rewards = {"correct": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"id": f"{split}-{i}", "number": 400 + i}) for i in range(3)]

    def tools(self, sample):
        def look(times: int):
            """Looks behind the door."""
            return [Image.new("RGB", (32, 32)), f"There is {sample['number']}, seen {10 // times} times."]

        return [look]

    def score(self, sample, answer):
        return {"correct": float(answer.text == str(sample["number"]) and len(answer.turns) > 1)}

    def oracle_actions(self, sample):
        return ['<tool_call>{"name": "look", "arguments": {"times": 1}}</tool_call>', str(sample["number"])]


@pytest.mark.slow
def test_tools_are_played():
    findings, notes = found(base=Looking)
    assert not findings and "perfect episodes earn 1 on average over 3 samples, hostile actions at most 0" in notes
