"""vlrl/testing: tasks broken on purpose, each one found; sound ones pass."""

import contextlib
import itertools
import json
import random
import re
import subprocess

import pytest
from PIL import Image

from tests.tables import each
from tests.tasks.scaffold import SHORTER
from vlrl import Environment, Media, Observation, Sample, Step, Task, testing
from vlrl.checks.finding import Finding, shorten
from vlrl.data import Drawn, coordinates
from vlrl.errors import ConfigError
from vlrl.rewards.boxes import format_box, iou, parse_box
from vlrl.rewards.text import extract_tag
from vlrl.task import load
from vlrl.testing import episodes, texts
from vlrl.testing.answers import check_groups, check_texts, try_answer
from vlrl.testing.findings import Findings, TooSlow, timed
from vlrl.testing.samples import check_samples, places

WORDS = ("north", "east", "south", "west")


class Sound(Task):
    """Says the word of a text; every broken task below differs in one thing."""

    prompt = "Sample {number} of {split}: which way? Answer in <answer></answer>."
    rewards = {"correct": 1.0, "format": 0.1}

    def samples(self, split):
        return Drawn(12, lambda i: self.make(split, i))

    def make(self, split, i):
        return Sample(id=f"{split}-{i}", row={"split": split, "number": i, "answer": WORDS[i % 4]})

    def score(self, sample, answer):
        given = extract_tag(answer.text, "answer", "last")
        return {"correct": float(given == sample["answer"]), "format": float(given is not None)}

    def oracle(self, sample):
        return f"<answer>{sample['answer']}</answer>"


class Boxes(Sound):
    """A box in a picture, in the model's convention."""

    prompt = "{split} {number}: where?"
    rewards = {"iou": 1.0}

    def make(self, split, i):
        row = {"split": split, "number": i, "width": 400, "height": 200,
               "box": [10 + 20 * (i % 12), 10 + 15 * (i % 5), 100 + 20 * (i % 12), 80 + 15 * (i % 5)]}
        return Sample(id=f"{split}-{i}", row=row)

    def parse(self, sample, answer):
        box = parse_box(answer.final)
        return self.coordinates.to_original(sample, box) if box else None

    def score(self, sample, answer):
        box = self.parse(sample, answer)
        return {"iou": iou(box, sample["box"]) if box else 0.0}

    def oracle(self, sample):
        return format_box(self.coordinates.from_original(sample, sample["box"]))

    def overlay(self, sample, parsed):
        return [{"kind": "box", "at": parsed, "label": "answer", "role": "answer"}] if parsed else []


def by_rule(task, samples=12, processes=0):
    return {f.kind: f for f in reversed(testing.check(task, samples, processes))}


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Slow scorers are found sooner, with shorter long answers; the limit is of CPU time."""
    monkeypatch.setattr("vlrl.testing.answers.SLOW", 0.15)
    monkeypatch.setattr(texts, "_LONG_TEXTS", SHORTER)


@each("task", [Sound(), Boxes()])
def test_sound_tasks_pass(task):
    report = testing.examine(task, processes=0)
    assert report.findings == () and report.notes == ()
    assert {"perfect answer", "best constant answer", "two answers", "silence"} <= {row.name for row in report.cheats}
    assert report.samples == 12 and all(row.mean < 0.6 for row in report.cheats[1:])


def sample_task(**changes):
    return type("Broken", (Sound,), changes)()


def made(*media, **row):
    return lambda self, split, i: Sample(id=f"{split}-{i}", media=media, row={
        "split": split, "number": i, "answer": WORDS[i % 4], **row})


def one_generator():
    rng = random.Random(0)
    return lambda self, split, i: Sample(id=f"{split}-{i}", row={
        "split": split, "number": i, "answer": rng.choice(WORDS)})


TWICE = r"is already used in samples\('train'\)\[0\]: ids must be unique"
BROKEN_SAMPLES = {
    "one id twice": ("id", TWICE, {"make": lambda self, split, i: Sample(
        id=f"{split}-{i // 2}", row={"split": split, "number": i, "answer": "north"})}),
    "one generator for all samples": ("deterministic", "in another order", {"make": one_generator()}),
    "a generator that starts anew": ("deterministic", "differs when asked for again", {
        "samples": lambda self, split: [Sample(id=f"{split}-{i}", row={"split": split, "number": i, "answer": str(
            random.random())}) for i in range(4)]}),
    "a row that JSON cannot hold": ("row", "not JSON serializable", {"make": made(seen={1, 2})}),
    "a row with NaN": ("row", "not JSON compliant", {"make": made(size=float("nan"))}),
    "a row that JSON changes": ("row", r"the field 'size' is \(3, 4\), but becomes \[3, 4\]", {
        "make": made(size=(3, 4))}),
    "no samples": ("samples", "is empty", {"samples": lambda self, split: []}),
    "samples that raise": ("samples", "KeyError: 'no'", {"make": lambda self, split, i: {}["no"]}),
    "samples of another type": ("samples", "contains dict", {"samples": lambda self, split: [{}]}),
    "a number as id": ("samples", "id=7", {"make": lambda self, split, i: Sample(id=7)}),
    "media that is not there": ("media", "nowhere.png does not exist", {
        "make": made(Media(source="/nowhere/nowhere.png"))}),
    "media that the messages forget": ("media", r"show \[\], but the sample has \['image'\]", {
        "make": made(Media(source=Image.new("RGB", (8, 8)))),
        "messages": lambda self, sample: [{"role": "user", "content": [{"type": "text", "text": str(sample.row)}]}]}),
    "a placeholder that no row fills": ("prompt", r"asks for \{name\}", {
        "prompt": "{name}, sample {number} of {split}? \\boxed{answer}"}),
}


def test_broken_samples_oracles_and_coordinates_are_found():
    for name, (check, says, changes) in BROKEN_SAMPLES.items():
        findings = Findings()
        check_samples(sample_task(**changes), findings, 12, 0)
        assert check in findings.by_rule and re.search(says, findings.by_rule[check][0].message), (name, findings)
    for name, (says, changes) in BROKEN_ORACLES.items():
        findings = [f for f in testing.check(sample_task(**changes), 8, processes=0) if f.kind == "oracle"]
        assert any(re.search(says, f.message) for f in findings), (name, findings)
    for changes in ({"oracle": lambda self, s: format_box(s["box"])}, {"parse": lambda self, s, a: parse_box(a.final)}):
        message = by_rule(type("OneWay", (Boxes,), changes)(), samples=3)["coordinates"].message
        assert re.search(r"task.coordinates=\w+ perfect .*from_original in oracle and to_original", message), changes


HASHED = '''
from tests.testing.test_contract import Sound
from vlrl.types import Sample

class Hashed(Sound):
    def samples(self, split):
        words = list({"north", "east", "south", "west", "up", "down", "in", "out"})
        return [Sample(id=f"{split}-{i}", row={"split": split, "number": i, "answer": w}) for i, w in enumerate(words)]
'''


@pytest.mark.slow
def test_samples_that_depend_on_the_hash_seed_are_found(tmp_path):
    (tmp_path / "hashed.py").write_text(HASHED)
    task = load(f"{tmp_path}/hashed.py:Hashed")
    assert by_rule(task) == {}
    assert "in another process" in by_rule(task, processes=1)["deterministic"].message


def test_what_cannot_be_checked_or_is_wrong_is_told():
    class Inside(Sound):
        def samples(self, split):
            if split != "train":
                raise ConfigError("split 'heldout': only train")
            return super().samples(split)

        def oracle(self, sample):
            return None

    report = testing.examine(Inside(), processes=2)
    assert report.findings == () and report.cheats == ()
    assert [bool(re.search(says, note)) for says, note in zip(
        ("held-out.*only train", "not at a module's top level", "no perfect answer"), report.notes, strict=True)] == [
            True] * 3
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        testing.check(type("Rows", (Sound,), {"samples": Task.samples, "data": None})())
    with pytest.raises(AssertionError, match=r"task '' breaks the contract:\nsamples: samples\('train'\) is empty"):
        testing.assert_ok(sample_task(samples=lambda self, split: []))


def scoring(given):
    """A `score` whose part `correct` is what `given` makes of the answer's text and the right word."""
    def score(self, sample, answer):
        return {"correct": given(answer, sample["answer"]), "format": float("<answer>" in answer.text)}
    return {"score": score}


def say(answer):
    return extract_tag(answer.text, "answer", "last") or ""


def backtracks(answer, right):
    return float(bool(re.search(r"^(\w+\s?)*$", answer.text)) and answer.text == right)


def deep(answer, right):
    try:
        return float(json.loads(say(answer)) == right)
    except ValueError:
        return float(say(answer) == right)


def counted():
    calls = itertools.count()
    return lambda answer, right: float(say(answer) == right) - 0.1 * (next(calls) % 2)


def changed(self, sample, answer):
    sample.row["seen"] = len(answer.text)
    return Sound.score(self, sample, answer)


BROKEN_SCORES = {
    "raises on an empty answer": ("raises", "IndexError", scoring(lambda a, r: float(say(a).split()[0] == r))),
    "raises on unicode digits": ("raises", "ValueError", scoring(
        lambda a, r: float(int(say(a)) == 3) if say(a).isdigit() else float(say(a) == r))),
    "raises on deep brackets": ("raises", "RecursionError", scoring(deep)),
    "raises on surrogates": ("raises", "UnicodeEncodeError", scoring(
        lambda a, r: float(say(a).encode() == r.encode()))),
    "is not finite": ("parts", "part 'correct' was (nan|inf)", scoring(
        lambda a, r: float(say(a)) if say(a).lower() in ("nan", "infinity", "1e999") else float(say(a) == r))),
    "is no number": ("parts", "'yes'.*not a number", scoring(lambda a, r: "yes" if say(a) == r else 0.0)),
    "grows with the length": ("parts", "must stay within", scoring(lambda a, r: len(a.text) / 1000)),
    "backtracks": ("slow", "regular expression", scoring(backtracks)),
    "is not the same twice": ("deterministic", "the same answer was scored", scoring(counted())),
    "changes the row": ("pure", "changed the sample's row", {"score": changed}),
    "leaves out a part": ("raises", "left out the part 'format'", {
        "score": lambda self, sample, answer: {"correct": 1.0}}),
    "returns another part": ("raises", "'corect'.*Did you mean", {
        "score": lambda self, sample, answer: {"corect": 1.0, "correct": 0.0, "format": 0.0}}),
    "returns a number": ("raises", "score returned float", {"score": lambda self, sample, answer: 1.0}),
    "parses to a set": ("parse", "parse returned a value that cannot be written as JSON", {
        "parse": lambda self, s, a: {a.final}}),
    "draws a box of three": ("overlay", "must be 4 finite numbers", {
        "overlay": lambda self, s, parsed: [{"kind": "box", "at": [1, 2, 3], "label": "", "role": "answer"}]}),
    "draws a track of boxes alone": ("overlay", "seconds or null", {
        "overlay": lambda self, s, parsed: [{"kind": "track", "at": [[1, 2, 3, 4]], "label": "", "role": "answer"}]}),
    "draws a star": ("overlay", "'box', 'point', 'path'", {"overlay": lambda self, s, parsed: [{"kind": "star"}]}),
    "measures NaN": ("metrics", "'x' is nan", {"metrics": lambda self, s, a, p: {"x": float("nan")}}),
    "orders matter in a group": ("group", "order of the answers", {
        "score_group": lambda self, s, answers, services: [{"format": float(i == 0)} for i, _ in enumerate(answers)]}),
    "a group of the wrong length": ("group", "1 results for", {
        "score_group": lambda self, s, answers, services: [{"format": 0.0}]}),
}


@each("name", BROKEN_SCORES)
def test_broken_scores_are_found(name):
    check, says, changes = BROKEN_SCORES[name]
    task, findings = sample_task(**changes), Findings()
    sample = task.samples("train")[0]
    check_texts(task, [sample], findings)
    if check != "raises":
        try_answer(task, sample, task.oracle(sample), findings)
        check_groups(task, sample, ["", "junk", task.oracle(sample)], findings)
    first = findings.by_rule[check][0]
    assert re.search(says, first.message), first
    assert first.id == "train-0" and (first.text or check == "group")


BROKEN_ORACLES = {
    "forgets the tags": ("earns (0|nothing)", {"oracle": lambda self, s: s["answer"]}),
    "is wrong": ("earns", {"oracle": lambda self, s: f"<answer>{WORDS[(WORDS.index(s['answer']) + 1) % 4]}</answer>"}),
    "is always the same": ("earns", {"oracle": lambda self, s: "<answer>north</answer>"}),
    "is not the best": ("but another answer earns", {
        "score": lambda self, s, a: {"correct": 0.5 * (s["answer"] in a.final) + 0.5 * (a.final == s["answer"]),
                                     "format": 1.0}, "oracle": lambda self, s: f"It is {s['answer']}!"}),
    "raises": ("oracle of sample 'train-0' failed: .*KeyError", {"oracle": lambda self, s: s["lable"]}),
    "is no text": ("returned int", {"oracle": lambda self, s: 3}),
    "never earns a part": (r"the maximum is 1.1 \(correct 1, format 0\)", {
        "score": lambda self, s, a: {**Sound.score(self, s, a), "format": 0.0}}),
}


CHEATED = {
    "hidden in the reasoning": {"score": lambda self, s, a: {"correct": float(s["answer"] in a.text), "format": 1.0}},
    "two answers": {"score": lambda self, s, a: {"correct": float(s["answer"] in a.final), "format": 1.0}},
    "all answers in one": {"score": lambda self, s, a: {
        "correct": float(s["answer"] in re.findall("<answer>(.*?)</answer>", a.text)), "format": 1.0}},
    "silence": {"score": lambda self, s, a: {"correct": float(a.final in s["answer"]), "format": 1.0}},
    "refusing": {"score": lambda self, s, a: {
        "correct": 1.0 if say(a) == s["answer"] else 0.9 * (say(a) not in WORDS), "format": 1.0}},
    "copied prompt": {"prompt": "{split} {number}: choose from north, east, south, west.", "score": lambda self, s, a: {
        "correct": float(s["answer"] in re.findall(r"\w+", a.final)), "format": 1.0}},
    "best constant answer": {"make": made(answer="north"), "samples": lambda self, split: [
        *(self.make(split, i) for i in range(11)),
        Sample(id=f"{split}-11", row={"split": split, "number": 11, "answer": "east"})]},
}


def judged(task):
    """The names of the cheats that pay too much, and the rows of all by name."""
    findings = Findings()
    rows = testing.judge_cheats(task, list(task.samples("train")), findings)
    listed = findings.by_rule.get("cheat", [])
    assert set(findings.by_rule) <= {"cheat"}
    return [f.message.split("'")[1] for f in listed], {row.name: row for row in rows}


def test_cheats_that_pay_are_found():
    for cheat, changes in CHEATED.items():
        names, rows = judged(sample_task(**changes))
        assert cheat in names and rows[cheat].text is not None, (names, rows)

    def score(self, sample, answer):
        boxes = [self.coordinates.to_original(sample, [float(v) for v in b]) for b in re.findall(
            r"\[([\d.]+), ([\d.]+), ([\d.]+), ([\d.]+)\]", answer.final)]
        return {"iou": max((iou(box, sample["box"]) for box in boxes), default=0.0)}

    names, rows = judged(type("Best", (Boxes,), {"score": score})())
    assert {"two answers", "all answers in one"} <= set(names) and rows["all answers in one"].at_full == 1


def test_a_task_names_further_cheats_and_honest_answers():
    class Own(Sound):
        def cheats(self, sample):
            return {"first letter": f"<answer>{sample['answer'][0]}</answer>", "refusing": None}

        def score(self, sample, answer):
            given = say(answer)
            right = given[:1] == sample["answer"][:1] or given not in WORDS  # both wrong: that is the test
            return {"correct": float(right), "format": 1.0}

    _, rows = judged(Own())
    assert "refusing" not in rows and rows["first letter"].mean == pytest.approx(1.1)


def test_rows_without_a_size_get_that_of_the_picture():
    class Unsized(Boxes):
        def make(self, split, i):
            sample = super().make(split, i)
            row = {k: v for k, v in sample.row.items() if k not in ("width", "height")}
            image = Image.new("RGB", (400, 200), (i, 0, len(split)))
            return Sample(id=sample.id, row=row, media=(Media(source=image),))
    task = Unsized()
    task.coordinates = coordinates.make("norm1000")
    assert not by_rule(task)


def test_findings_are_counted_beyond_three_and_shortened_and_places_are_spread():
    findings = Findings()
    for i in range(7):
        findings.add("oracle", f"problem {i}", f"train-{i}", "x" * 500)
    listed = findings.all()
    assert [f.more for f in listed] == [0, 0, 4] and len(listed[0].text) < 130
    findings.add("oracle", "problem 0", "train-0", "x" * 500)  # the same under another template
    assert findings.all() == listed
    assert str(listed[0]).startswith("oracle: sample 'train-0': problem 0  answer: 'xxx")
    assert str(Finding(rule="ids", message="m")) == "ids: m"
    assert shorten("\ud800\0é") == r"'\ud800\x00\xe9'"
    assert places(3, 20) == [0, 1, 2] and places(1000, 4) == [0, 333, 666, 999] and places(5, 1) == [0]


def test_a_stop_is_not_swallowed_by_the_scorer():
    def stubborn():
        for _ in range(100_000):  # a second or two
            with contextlib.suppress(Exception):
                sum(range(1000))
    with pytest.raises(TooSlow):
        timed(stubborn, 0.05)
    assert timed(lambda: 3, 1.0)[0] == 3


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
    count: int = 1

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"goal": 2 + i + 10 * (split == "heldout")}) for i in range(self.count)]

    def environment(self, sample):
        return self.world(sample)

    def oracle_actions(self, sample):
        return ["right"] * sample["goal"]


def found(world=Walk, base=Walking, **changes):
    report = testing.examine(type("Walking", (base,), {"world": world, **changes})(), processes=0)
    return {finding.kind: str(finding) for finding in report.findings}, report.notes


@pytest.mark.slow
def test_a_sound_environment_passes_and_wrong_perfect_episodes_are_found():
    findings, notes = found(count=3)
    assert not findings and "perfect episodes earn 1 on average over 3 samples, hostile actions at most 0" in notes
    for actions, says in ((["left"], "the perfect episode earns 0"), (["right"] * 9, "of its 9 actions"),
                          ("right", "expected a list of strings"), ([], "expected a list of strings")):
        findings, _ = found(oracle_actions=lambda self, sample, actions=actions: actions)
        assert says in findings["oracle_actions"], findings
    findings, _ = found(score=lambda self, sample, answer: {"arrived": float(len(answer.turns[0].action) / 0)})
    assert "ZeroDivisionError" in findings["score"]
    findings, notes = found(type("Raises", (Walk,), {"step": refuses}), oracle_actions=lambda self, sample: None)
    assert "environment" in findings and any("oracle_actions returned None" in note for note in notes)


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
