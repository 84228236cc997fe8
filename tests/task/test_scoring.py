"""What a task returns or raises, what the loop makes of it, and rows beside a task that makes its own samples."""

import itertools
import json
import math
import re
from decimal import Decimal

import numpy as np
import pytest

from tests.tables import each, refused
from vlrl.config import validate
from vlrl.data import Drawn, read_samples
from vlrl.errors import ConfigError, TaskError
from vlrl.task.base import Task, fill, weight_at
from vlrl.task.interface import task_samples
from vlrl.task.loading import load
from vlrl.task.scoring import overlay_marks, sample_metrics, score_group
from vlrl.training.build_task import make_task
from vlrl.types import Answer, Sample, StepValues

SAMPLE = Sample(id="s", row={"answer": "4"})


def task(score, group=None):
    class Odd(Task):
        rewards = {"a": 1.0, "b": 0.5}

        def score(self, sample, answer):
            return score(answer.text)

        def score_group(self, sample, answers, services):
            return group(answers) if group else []
    return Odd()


def scored(t, *texts):
    return score_group(t, SAMPLE, [Answer(text=x) for x in texts], step=0)


def test_sums_steps_and_failures():
    (one,) = scored(task(lambda x: {"a": 0.5, "b": 2}), "x")
    assert one.parts == {"a": 0.5, "b": 2.0} and one.reward == pytest.approx(1.5) and one.error is None
    steps = StepValues((0.5, 1.0), (9, 12))
    t = task(lambda x: {"a": steps, "b": 1.0})
    (alone,), (behind,) = (score_group(t, SAMPLE, [Answer(text="<think>\na\n\nbc", opened=opened)], 0)
                           for opened in ("", "<think>\n"))
    assert alone.steps == ((9, 0.5), (12, 1.0)) and behind.steps == ((1, 0.5), (4, 1.0))
    assert behind.reward == alone.reward
    def score(text):
        return {"a": 1 / len(text), "b": 1.0}
    bad, good = scored(task(score), "", "xx")
    assert bad.parts == {"a": None, "b": None} and bad.reward is None and "ZeroDivisionError" in bad.error
    assert good.reward == pytest.approx(1.0) and good.error is None
    (one,) = scored(task(lambda x: {"a": None, "b": 1.0}), "x")
    assert one.reward is None and one.parts == {"a": None, "b": 1.0} and one.error is None


def test_samples_and_group_parts_that_fail():
    t = task(lambda x: {"a": 1.0}, lambda answers: [{"b": float(i)} for i, _ in enumerate(answers)])
    assert [s.reward for s in scored(t, "x", "y", "z")] == [1.0, 1.5, 2.0]
    with pytest.raises(TaskError, match="1 results for 2 answers"):
        scored(task(lambda x: {"a": 1.0, "b": 0.0}, lambda answers: [{}]), "x", "y")
    def broken():
        yield SAMPLE
        raise KeyError("k")
    with pytest.raises(TaskError, match=r"task 'given': samples\('x'\) failed: .*test_scoring.py:\d+: KeyError: 'k'"):
        task_samples(Given(broken), "x")
    with pytest.raises(ConfigError, match="train and heldout"):
        task_samples(Given(lambda: load("grounding", {"drawn": True}).samples("x")), "x")


def shaped(given, of_group):
    scored(task(lambda x: {"a": 1.0, "b": 0.0}, lambda answers: given) if of_group else task(lambda x: given), "x")


test_scores_of_another_shape_stop = refused(TaskError, shaped, [
    (None, False, "task '': score returned NoneType, expected {part: number}"), (1.0, False, "score returned float"),
    ([("a", 1.0)], False, "score returned list"), ("a", False, "score returned str"),
    ({"a": 1.0, 3: 1.0}, False, "part name 3 (int)"), ({None: 1.0}, False, "part name None (NoneType)"),
    ([None], True, "score_group returned NoneType, expected {part: number}"),
    (None, True, "score_group returned NoneType"), ({"b": 1.0}, True, "score_group returned dict, expected a list"),
    ([[1.0]], True, "score_group returned list"), ([{0: 1.0}], True, "part name 0 (int)"),
    (3, True, "score_group returned int"), ("x", True, "score_group returned str")], plain=True)


@each("given", [math.nan, math.inf, -math.inf, "x", "1.0", b"1", [1.0], {}, 1j, 10**400, 10**5000, np.ones(1), object(),
                                   Decimal("nan"), np.float32("inf")])
def test_a_part_that_is_no_number_is_unscorable(given):
    (one,) = scored(task(lambda x: {"a": given, "b": 1.0}), "x")
    assert one.parts == {"a": None, "b": 1.0} and one.reward is None and one.error.startswith("part 'a' was ")
    assert len(one.error) < 120


@each("given", [1, True, np.True_, np.float32(1), np.int64(1), np.array(1.0), Decimal(1)])
def test_whatever_is_a_number_is_taken(given):
    (one,) = scored(task(lambda x: {"a": given, "b": 0}), "x")
    assert one.parts == {"a": 1.0, "b": 0.0} and type(one.parts["a"]) is float and one.error is None


def test_numbers_that_a_float_or_a_tensor_holds():
    import torch

    one, several = scored(task(lambda x: {"a": torch.ones(()) if x == "1" else torch.ones(2), "b": 0}), "1", "2")
    assert one.parts["a"] == 1.0 and one.error is None and several.parts["a"] is None and "'a'" in several.error
    (one,) = scored(task(lambda x: {"a": 1.7e308, "b": 1.7e308}), "x")
    assert one.reward is None and one.error == "combine: was inf"
    (one,) = scored(task(lambda x: {"a": 1e308, "b": 1.0}), "x")
    assert one.reward is None and one.parts == {"a": None, "b": 1.0}
    assert one.error.startswith("part 'a' was 1e+308, larger than the 1e+12 up to which means")
    (one,) = scored(task(lambda x: {"a": 1e12, "b": -1e12}), "x")
    assert one.error is None and one.reward is not None


@each("combine says", [
    (lambda parts, weights: 1 / 0, "combine: ZeroDivisionError"), (lambda parts, weights: math.nan, "combine: was nan"),
    (lambda parts, weights: math.inf, "combine: was inf"), (lambda parts, weights: None, "combine: returned None"),
    (lambda parts, weights: "1", "combine: was '1'"), (lambda parts, weights: 10**400, "combine: was 1")])
def test_a_combination_that_fails_is_unscorable(combine, says):
    t = task(lambda x: {"a": 1.0, "b": 1.0})
    t.combine = combine
    (one,) = scored(t, "x")
    assert one.reward is None and one.parts == {"a": 1.0, "b": 1.0} and one.error.startswith(says)


@each("given kept says", [
    ({"m": 1, "n": np.float32(0.5)}, {"m": 1.0, "n": 0.5}, None), ({"m": None, "n": True}, {"n": 1.0}, None),
    ({"m": math.nan, "n": 2}, {"n": 2.0}, "metrics: 'm' was nan"),
    ({"m": "1", "n": 2}, {"n": 2.0}, "metrics: 'm' was '1' (str), which is not a number"),
    ({3: 1.0, "n": 2}, {"n": 2.0}, "metrics: 3 is not a name"),
    (None, {}, "metrics: returned NoneType, expected {name: number}"), (KeyError("k"), {}, "metrics: KeyError: 'k'"),
    ({}, {}, None)])
def test_metrics_of_a_sample(given, kept, says):
    class T(Task):
        def metrics(self, sample, answer, parts):
            if isinstance(given, Exception):
                raise given
            return given
    found, error = sample_metrics(T(), SAMPLE, Answer(text="x"), {})
    assert found == kept and (error and re.sub(rf" \({re.escape(__file__)}:\d+\)$", "", error)) == says
    assert not isinstance(given, Exception) or (error and __file__ in error)  # where in the task's own code


def test_settings_of_a_task_are_checked():
    class T(Task):
        rewards = {"a": [[10, 1.0], [20, 0.0]]}
    assert [T().weights_at(s)["a"] for s in (0, 10, 15, 20, 99)] == [1.0, 1.0, 0.5, 0.0, 0.0]
    assert weight_at(2, 7) == 2.0
    class T(Task):
        most: int = 6
        rewards = {"a": 1.0}
    assert T(most=9).most == 9 and T(rewards={"a": 0.5}).weights == {"a": 0.5}
    with pytest.raises(ConfigError, match=r"task\.mots.*Did you mean 'most'"):
        T(mots=9)
    with pytest.raises(ConfigError, match=r"task\.most='many'"):
        T(most="many")
    with pytest.raises(ConfigError, match=r"task\.most=True: give a number"):
        T(most=True)
    with pytest.raises(ConfigError, match=r"task\.rewards\.aa.*Did you mean 'a'"):
        T(rewards={"aa": 1})
    assert T(rewards={"a": "1e-3"}).weights == {"a": 1e-3}  # as YAML reads 1e-3
    assert T(rewards={"a": [[0, 1], [5, 0]]}).weights_at(1) == {"a": 0.8}


@each("weight", [math.nan, math.inf, 10**400, True, None, "x", [], [[0, math.nan]], [[1, 0], [0, 1]],
                                    [[0, 1, 2]], {}, [[0]]])
def test_weights_are_finite_numbers_or_lines(weight):
    class T(Task):
        rewards = {"a": 1.0}
    with pytest.raises(ConfigError, match=r"task\.rewards\.a=.*give a finite number, or \[\[step, weight\]"):
        T(rewards={"a": weight})


def test_templates_are_filled_and_vary_by_visit():
    row = {"x": "{y}", "y": "no", "n": 3}
    assert fill("{n} {x} {z} {0} {{", row) == "3 {y} {z} {0} {{"
    row = {"boxes": [[1, 2]], "expression": "{boxes} {0.__class__}", "two words": 2}
    assert fill("Find {expression}, {{two words}}", row) == "Find {boxes} {0.__class__}, {2}"  # no field inside another
    class T(Task):
        prompts = ("one", "two", "three")
    t, s = T(), Sample(id="s")
    drawn = [t.template(s, visit) for visit in range(30)]
    assert set(drawn) == {"one", "two", "three"} and drawn == [t.template(s, visit) for visit in range(30)]
    assert t.template(Sample(id="\ud800"), 0) in t.prompts


class Given(Task):
    name = "given"

    def __init__(self, make):
        super().__init__()
        self.samples = lambda split: make()


@each("made", [[SAMPLE], (SAMPLE,), Drawn(1, lambda i: SAMPLE), np.array([SAMPLE])])
def test_sequences_of_samples_pass_as_they_are(made):
    assert task_samples(Given(lambda: made), "train") is made
    assert task_samples(Given(lambda: iter(made)), "train") == (SAMPLE,)


test_wrong_part_names_stop = refused(
    TaskError, lambda parts: scored(task(lambda x: parts), "x"), [({"a": 1.0}, "left out the part 'b'"),
                                         ({"a": 1.0, "b": 1.0, "bb": 0.0}, "'bb'.*Did you mean 'b'")])
test_samples_of_another_shape_stop = refused(TaskError, lambda made: task_samples(Given(lambda: made), "train"), [
    (None, r"samples\(\) returned NoneType, expected a sequence of Sample"), ({"a": SAMPLE}, "dict"), ({SAMPLE}, "set"),
    ("abc", "str"), (3, "int"), (list, "type"), ([{"id": 1}], "contains dict"), ((SAMPLE, None), "contains NoneType")
], start=r"task 'given': samples\('train'\).*")


def test_tasks_load_by_name_module_and_file(tmp_path, monkeypatch):
    file = tmp_path / "grounding.py"  # called like a built-in one
    file.write_text("from vlrl.task import Task\nclass Mine(Task):\n    rewards = {'a': 1.0}\n")
    assert type(load(f"{file}:Mine")).__name__ == "Mine" and type(load(str(file))).__name__ == "Mine"
    assert type(load("grounding")).__name__ == "Grounding"
    assert type(load("vlrl.tasks.grounding:Grounding")).__name__ == "Grounding"
    for name, says in (("groundin", "Did you mean 'grounding'"), (f"{file}:Nine", "no Task class 'Nine'"),
                       ("nowhere/x.py:T", "does not exist"),
                       ("no.such.module:T", "No module named.*A module must be importable"),
                       ("..:T", "task.name='..:T': TypeError"), (":T", "Empty module name"), ("", "no built-in task"),
                       (".py:T", "does not exist"), ("x" * 5000 + ".py", "does not exist"),
                       ("a\0.py", "does not exist"), ("\ud800:T", "task.name="),
                       ("vlrl.task:Task", "no Task class"), ("json:dumps", "no Task class")):
        with pytest.raises(ConfigError, match=says):
            load(name)
    (tmp_path / "blob").write_text("from vlrl.task import Task\nclass Mine(Task):\n    rewards = {'a': 1.0}\n")
    (tmp_path / "mine.py").symlink_to(tmp_path / "blob")
    assert type(load(f"{tmp_path / 'mine.py'}:Mine")).__name__ == "Mine"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_task_module.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ConfigError, match=r"own_task_module.py:1: ModuleNotFoundError: [^.]*'nowhere_at_all'$"):
        load("own_task_module:T")


@each("text says", [
    ("x = 1\ndef f(:\n", r"broken.py:2: SyntaxError: "),
    ("\nimport nowhere_at_all\n", r"broken.py:2: ModuleNotFoundError: No module named 'nowhere_at_all'$"),
    ("from vlrl.task import Nothing\n", r"broken.py:1: ImportError: "),
    ("import json\n\n\nx = json.loads('{')\n", r"broken.py:4: JSONDecodeError: "),
    ("raise SystemExit(3)\n", r"broken.py:1: SystemExit: 3"),
    ("x = '\0'\n", r"(Syntax|Value)Error: .*null bytes"),  # the latter before Python 3.11.4
    ("from vlrl.task import Task\nclass T(Task):\n    def __init__(self):\n        1 / 0\n",
     r"broken.py:4: ZeroDivisionError: division by zero")])
def test_a_task_file_that_cannot_be_imported(tmp_path, text, says):
    file = tmp_path / "broken.py"
    file.write_text(text)
    for _ in range(2):  # a failed import leaves nothing behind
        with pytest.raises(ConfigError, match=rf"task.name='{file}:T': .*{says}") as error:
            load(f"{file}:T")
        assert "Traceback" not in str(error.value)


@each("drawn kept", [
    (lambda: [{"kind": "box"}], [{"kind": "box"}]), (lambda: [], []), (lambda: iter("ab"), ["a", "b"]),
    (lambda: itertools.count(), list(range(1000))), (lambda: 1 / 0, None), (lambda: None, None), (lambda: 5, None)])
def test_marks_of_an_answer(drawn, kept):
    class T(Task):
        def overlay(self, sample, parsed):
            return drawn()
    assert overlay_marks(T(), SAMPLE, None) == kept


class Made(Task):
    """Makes its own samples."""

    rewards = {"right": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row={}) for n in range(3)]

    def score(self, sample, answer):
        return {"right": 1.0}

    def sample_from_row(self, row, root=None):
        return Sample(id=str(row["id"]), row=row)


class Opened(Made):
    """Reads its file in a way of its own."""

    def samples(self, split):
        with open(getattr(self.data, split)) as lines:
            return [Sample(id=f"own-{json.loads(line)['id']}", row={}) for line in lines]


class Read(Made):
    def samples(self, split):
        return read_samples(self, split)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "n": 3}\n')
    return str(path)


def ids(split, tasks=None, name="Made", **data):
    tree = {"tasks": tasks} if tasks else {"task": name_of(name)}
    task = make_task(validate({**tree, "model": {"name": "x"}, "data": data}))
    return [s.id for s in task_samples(task, split)]


def name_of(name):
    return f"tests.task.test_scoring:{name}"


@each("split", ["train", "heldout"])
def test_a_file_beside_own_samples_is_refused_or_put_in_their_place(split, rows):
    with pytest.raises(ConfigError, match=rf"data\.{split}='.*rows.jsonl' is not read: task .* makes its own samples"
                                          r".*data\.own_samples=false"):
        ids(split, **{split: rows})
    other = {"train": "heldout", "heldout": "train"}[split]
    assert ids(other, **{split: rows}) == [f"{other}-{n}" for n in range(3)]
    data = {"own_samples": False, split: rows}
    task = make_task(validate({"task": name_of("Made"), "model": {"name": "x"}, "data": data}))
    assert [[s.id for s in task_samples(task, split)] for _ in range(3)] == [["a"]] * 3  # however often they are asked


def test_rows_beside_own_samples_by_task(rows):
    assert ids("heldout", train=rows, own_samples=False) == [f"heldout-{n}" for n in range(3)]
    task = make_task(validate({"task": {"name": "grounding", "drawn": True}, "model": {"name": "x"},
                               "data": {"train": rows}}))
    with pytest.raises(ConfigError, match="task 'grounding' makes its own samples"):
        task_samples(task, "train")
    tasks = [{"name": name_of("Made"), "data": {"train": rows}}, {"name": name_of("Read"), "data": {"train": rows}}]
    with pytest.raises(ConfigError, match=r"tasks\.0 \(Made\): data\.train=.* is not read.*tasks\.0\.data"):
        ids("train", tasks)
    tasks = [name_of("Made"), name_of("Read")]
    assert ids("train", tasks, train=rows) == ["Made/train-0", "Read/a", "Made/train-1", "Made/train-2"]
    with pytest.raises(ConfigError, match=r"data\.train=.* is not read: every task of `tasks` makes its own samples"):
        ids("train", [name_of("Made"), {"name": name_of("Made"), "label": "other"}], train=rows)


@each("name found", [("Read", "a"), ("Opened", "own-a")])
def test_a_task_may_read_its_file_as_it_likes(name, found, rows):
    assert ids("train", name=name, train=rows) == [found]
