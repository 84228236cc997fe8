"""`vlrl data synthesize`: parents, candidates, near-duplicates, the gate by pass rate, going on after a kill."""

import json
import math
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.runs import ROOT
from tests.rollout.test_group_source import Number
from vlrl.cli.main import main
from vlrl.config import validate
from vlrl.curriculum.history import History
from vlrl.curriculum.visited import write_visited
from vlrl.data import read_rows, write_rows
from vlrl.errors import ConfigError, DataError, TaskError
from vlrl.store import SCHEMA
from vlrl.tools.datasets.prompt_table import MeasuredPrompt
from vlrl.tools.synthesis import parents, synthesize
from vlrl.tools.synthesis.near_duplicates import HeldOutRows, distinct
from vlrl.tools.synthesis.parents import GroupOutcome, by_solved, eva, informativeness, is_weak, sws, weaknesses
from vlrl.tools.synthesis.proposals import Candidate, Search, propose
from vlrl.tools.synthesis.row_export import MediaLocation
from vlrl.tools.synthesis.seed_rows import failed
from vlrl.tools.synthesis.synthesize import SynthesisFiles, filter_rows, propose_all

TELL = lambda *_: None  # noqa: E731
CONFIG = validate({"task": "x", "model": {"name": "x"}})


def where(folder):
    return MediaLocation(root=folder, folder=folder / "media")


class Proposing(Number):
    """Every third number is not found, the fifth goes wrong; a variation says whose it is."""

    name = "proposing"

    def propose(self, number, parent=None):
        if number == 5:
            raise DataError("page 'x' has crashed")
        if number % 3 == 2:
            return None
        of = f" like {parent['id']}" if parent else ""
        return {"id": f"n{number}", "question": f"What is {number}{of}?", "generator": "count", "verifier": "sum"}


def candidate(id, text, category=None, number=0):
    return Candidate(number=number, row={"id": id, "instruction": text, "category": category})


def measured(*passed):
    rewards = tuple(None if p is None else float(p) for p in passed)
    return MeasuredPrompt(number=0, id="x", passed=passed, rewards=rewards)


def test_what_a_task_proposes():
    task = Proposing()
    assert propose(task, 1).row == {"id": "n1", "question": "What is 1?", "generator": "count", "verifier": "sum",
                                    "parent": None}
    parents = ({"id": "a"}, {"id": "b"})
    assert [propose(task, n, parents).row["parent"] for n in (0, 1, 4)] == ["a", "b", "a"]
    assert propose(task, 2) == Candidate(number=2, reason="nothing found")
    assert propose(task, 5).reason == "page 'x' has crashed"
    for body, error, why in (
            (None, ConfigError, "'number' cannot propose prompts: implement Task.propose"),
            (lambda *_: 1 / 0, TaskError, r"propose\(0\) failed: .*ZeroDivisionError"),
            (lambda *_: {"id": "a", "generator": "g"}, TaskError, "without the string field 'verifier'"),
            (lambda *_: {"id": 1, "generator": "g", "verifier": "v"}, TaskError, "without the string field 'id'"),
            (lambda *_: {"id": "a", "generator": "g", "verifier": "v", "x": float("nan")}, DataError,
            "cannot be written")):
        task = Number()
        task.name = "number"
        if body:
            task.propose = body
        with pytest.raises(error, match=why):
            propose(task, 0)


def test_a_search_goes_on_where_it_was_killed(tmp_path):
    task, part, asked = Proposing(), tmp_path / "part", []

    def explore(numbers, dies=99):
        for number in numbers:
            if number == dies:
                raise KeyboardInterrupt
            asked.append(number)
            yield propose(task, number)

    known, search = synthesize.facts(CONFIG, Search()), Search(candidates=7)
    with pytest.raises(KeyboardInterrupt):
        propose_all(lambda numbers: explore(numbers, 3), search, part, known, TELL)
    with open(part, "a") as file:
        file.write('{"candidate": {"num')  # half a line
    told = []
    found = propose_all(explore, search, part, known, lambda *what: told.append(what))
    assert asked == [0, 1, 2, 3, 4, 5, 6] and found == [propose(task, n) for n in range(7)]
    assert told[0] == ("exploring", 3, 7) and told[-1] == ("exploring", 7, 7)
    assert propose_all(explore, Search(candidates=4), part, known, TELL) == found[:4] and len(asked) == 7
    other = synthesize.facts(CONFIG, Search(parents=({"id": "a"},)))
    with pytest.raises(ConfigError, match="a search with other settings:\n  parents was"):
        propose_all(explore, search, part, other, TELL)


LONG = "open the second tab then tick the box cats and then click the button submit at the end"


def test_near_duplicates_are_refused():
    for found, ids, counts in (
            ([("a", "Click Go."), ("b", "click  GO"), ("c", "Click Stop.")], ["a", "c"], {"near-duplicate": 1}),
            ([("a", LONG), ("b", LONG + " now"), ("c", LONG.replace("cats", "dogs"))], ["a", "c"],
            {"near-duplicate": 1}), ([("a", "Click Go."), ("a", "Click Stop.")], ["a"], {"near-duplicate": 1}),
            ([("a", "Click Held."), ("b", "Click Go."), ("held", "Click Else.")], ["b"],
            {"near a held-out row": 1, "near-duplicate": 1})):
        held = HeldOutRows((("click HELD", False),), (), frozenset({"held"}))
        rows, seen = distinct([candidate(*one, number=i) for i, one in enumerate(found)], held, Number())
        assert [row["id"] for row in rows.values()] == ids and seen == counts, (found, ids, counts)
    found = [candidate("a", "Click Go.", "one", 4), candidate("b", "Click Go.", "two", 7),
             Candidate(number=0, reason="nothing found"), Candidate(number=1, reason="page 'x': it crashed")]
    rows, counts = distinct(found, HeldOutRows(), Number())
    assert {n: row["id"] for n, row in rows.items()} == {4: "a", 7: "b"} and counts == {"nothing found": 1, "failed": 1}


def test_what_is_kept():
    for passed, search, verdict in (
            ((False,) * 4, Search(), "never right"), ((True,) * 4, Search(), "always right"),
            ((True, False, False, False), Search(), ""), ((True, False, False, False), Search(least=0.25), ""),
            ((True, False, False, False), Search(least=0.3), "outside the range"),
            ((True, True, True, False), Search(most=0.7), "outside the range"),
            ((True, None, None, False), Search(least=0.5, most=0.5), ""), ((True, None), Search(), "always right"),
            ((None, None), Search(), "not measured"), ((), Search(), "not measured")):
        assert synthesize.verdict(measured(*passed), search) == verdict, (passed, search, verdict)
    rows, counts = [{"id": str(i)} for i in range(4)], Counter()
    rates = [measured(True, True, False), measured(False), measured(True, False, False), measured(True, False)]
    kept, refused = filter_rows(rows, rates, Search(keep=2), counts)
    assert [row["id"] for row in kept] == ["2", "3"] and counts == {"kept": 2, "never right": 1, "beyond --keep": 1}
    assert [(row["id"], row["refused"]) for row in refused] == [("1", "never right"), ("0", "beyond --keep")]


def test_rows_say_how_they_were_made_and_how_often_they_were_solved(tmp_path):
    rows = [{"id": str(i), "generator": "walk", "verifier": "rule", "parent": None} for i in range(3)]
    places, counts = SynthesisFiles(out=tmp_path / "goals.jsonl"), Counter({"near-duplicate": 2})
    kept, refused = filter_rows(rows, [measured(True, False, False, False), measured(False, False), measured(None)],
                          Search(), counts)
    for part in (places.candidates, places.answers(rows), places.answers(rows[1:])):
        part.touch()
    synthesize.write(places, kept, refused, counts, {"seed": 0})
    assert read_rows(places.out, "canonical") == [
        {**rows[0], "pass_at_k": 0.25, "difficulty": 0.75, "reward_mean": 0.25, "answers_scored": 4}]
    assert [row["refused"] for row in read_rows(places.refused, "canonical")] == [
        "never right", "none of its answers could be scored"]
    about = json.loads(places.about.read_text())
    assert about["candidates"] == {"near-duplicate": 2, "kept": 1, "never right": 1, "not measured": 1}
    assert about["gates"] == {"candidates": 5, "found": 5, "distinct": 3, "verified": 3, "measured": 2, "kept": 1}
    assert about["kept_by_generator"] == {"walk": 1} and {*kept[0]} - {"id"} == {*about["columns"]}
    assert {path.name for path in tmp_path.iterdir()} == {"goals.about.json", "goals.jsonl", "goals.refused.jsonl"}
    other = SynthesisFiles(out=tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"no candidate is kept \(never right 1\).*--failed .*none.refused.jsonl"):
        synthesize.write(other, [], refused[:1], {"never right": 1}, {})
    again = failed(other.refused, CONFIG, Number(), where(tmp_path))
    assert not other.out.exists() and again == ({k: v for k, v in refused[0].items() if k in (*rows[0], "refused")},)


def test_failures_of_a_file_and_of_a_run(tmp_path):
    task = Number()
    lines = [{"id": "train-1", "pass_at_k": 0.0, "difficulty": 1.0}, {"id": "train-2", "pass_at_k": 0.5},
             {"id": "own", "question": "?", "pass_at_k": 0, "reward_mean": 0.1}, {"id": "none", "pass_at_k": None}]
    write_rows(tmp_path / "rows.jsonl", lines)
    assert failed(tmp_path / "rows.jsonl", CONFIG, task, where(tmp_path)) == (
        {"n": 1, "answer": "1", "id": "train-1"}, {"id": "own", "question": "?"})
    history = History(10)
    history.visit([3, 4, 5])
    history.pass_rate[[3, 4]], history.last[[3, 4]] = [0.0, 0.25], 0
    write_visited(tmp_path / "prompts.parquet", history, task.samples("train"))
    assert failed(tmp_path, CONFIG, task, where(tmp_path)) == ({"n": 3, "answer": "3", "id": "train-3"},)
    for lines, why in (
            ([{"id": "a", "pass_at_k": 0.5}], "none of its 1 prompts has a pass rate of 0"),
            ([{"id": "a", "question": "?"}], "no column pass_at_k"),
            ([{"id": "lost", "pass_at_k": 0}], "'lost' is not a training sample of task")):
        write_rows(tmp_path / "rows.jsonl", lines)
        with pytest.raises(ConfigError, match=why):
            failed(tmp_path / "rows.jsonl", CONFIG, Number(), where(tmp_path))
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"prompts.parquet cannot be read"):
        failed(tmp_path / "none", CONFIG, Number(), where(tmp_path))


def test_processes_that_explore_compare_and_play_load_no_torch():
    code = ("import sys, vlrl.tools.synthesis.proposals, vlrl.tools.experiments.pairs, vlrl.environments.openenv\n"
            "import vlrl.environments.mcp; from vlrl.environments.gym import GymEnvironment\n"
            "GymEnvironment('FrozenLake-v1').reset(1); sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


GUESS = '''
from vlrl import Sample, Task


class Guess(Task):
    prompt = "{question}"
    rewards = {"right": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"question": f"Say {i}."}) for i in range(4)]

    def score(self, sample, answer):
        return {"right": float(len(answer.text) % 2)}

    def propose(self, number, parent=None):
        text = f"Say {number} again." if parent is None else f"Not {parent['question']} but {number}."
        return {"id": f"p{number // 2}", "question": text, "generator": "say", "verifier": "length"}
'''


@pytest.mark.slow
def test_the_command_writes_rows_that_train(tmp_path, capsys):
    """Answers of random length are right at times; every second candidate has the id of the one before."""
    (tmp_path / "guess.py").write_text(GUESS)
    config = tmp_path / "guess.yaml"
    config.write_text("extends: quickstart.yaml\ntask: guess.py:Guess\n")
    words = [str(config), "rollout.max_new_tokens=4", f"run.dir={tmp_path}/run", "data.workers=0",
             "rollout.group_size=4", "rollout.prompts_per_step=2"]
    out = tmp_path / "run.goals.jsonl"
    command = ["data", "synthesize", *words, "--candidates", "6", "--answers", "8"]
    assert main(command) == 0
    said, rows = capsys.readouterr().out, read_rows(out)
    assert f"next: vlrl train {config} data.train={out} data.own_samples=false" in said
    assert rows and all(0 < row["pass_at_k"] < 1 and row["answers_scored"] == 8 for row in rows)
    about = json.loads((tmp_path / "run.goals.about.json").read_text())["candidates"]
    assert about["near-duplicate"] == 3 and about["kept"] == len(rows) and sum(about.values()) == 6
    assert main(command) == 1 and "exists already: replace it with --force" in capsys.readouterr().err
    assert main([*command, "--force", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kept"] == len(rows) and read_rows(out) == rows
    assert main([*command, "--force", "--least", "0.9", "--most", "0.1"]) == 1
    assert "no pass rate lies between" in capsys.readouterr().err
    assert main(["train", *words, "steps=1", f"data.train={out}", "data.own_samples=false", "eval.samples=0"]) == 0
    drawn = read_rows(out)[0]["id"]
    assert Path(tmp_path / "run" / "prompts.parquet").exists() and drawn.startswith("p")


def rng():
    return np.random.default_rng(0)


def visit(id, step, right, category="a", rewards=None):
    return GroupOutcome(id=id, step=step, category=category, right=tuple(map(bool, right)),
                 rewards=tuple(map(float, right if rewards is None else rewards)))


def test_a_weakness_stays_below_one_half_and_falls():
    for rates, weak in [
        ([0.25, 0.0], True), ([0.0, 0.25], False), ([0.25, 0.25, 0.25], False), ([0.1, 0.1, 0.1, 0.1], False),
        ([0.5, 0.0], False), ([0.49, 0.0], True), ([0.3], False), ([], False), ([math.nan, 0.3, math.nan, 0.1], True),
        ([0.4, 0.0, 0.3, 0.2], True),   # slope: -1.5 x .4 - .5 x 0 + .5 x .3 + 1.5 x .2 = -.15
        ([0.3, 0.0, 0.4, 0.2], False),  # -.45 + .2 + .3 = +.05
        ([0.2, 0.4, 0.0, 0.25], True)]:
        assert is_weak(rates) is weak, (rates, weak)


@given(st.lists(st.integers(0, 8), min_size=2, max_size=12))
def test_the_slope_is_that_of_a_line_through_the_rates(counts):
    rates = [c / 16 for c in counts]
    slope = np.polyfit(range(len(rates)), rates, 1)[0]
    if abs(slope) > 1e-9:
        assert is_weak(rates) is bool(max(rates) < 0.5 and slope < 0)


def test_weak_prompts_and_categories():
    """x falls and stays low, y rises, z was half right once; in b both fall."""
    visits = [visit("x", 0, [1, 0, 0, 0]), visit("y", 0, [0, 0, 0, 0]), visit("z", 0, [1, 1, 0, 0]),
              visit("x", 1, [0, 0, 0, 0]), visit("y", 1, [1, 0, 0, 0]), visit("z", 1, [0, 0, 0, 0]),
              visit("p", 1, [1, 0, 0, 0], "b"), visit("q", 1, [1, 0, 0, 0], "b"), visit("r", 1, [1, 1, 1, 1], "c"),
              visit("p", 2, [0, 0, 0, 0], "b"), visit("q", 2, [0, 0, 0, 0], "b"), visit("r", 2, [1, 1, 1, 1], "c")]
    assert weaknesses(visits) == {"a": (["x"], pytest.approx(1 / 3)), "b": (["p", "q"], 1.0)}
    chosen = sws(visits, 8, rng())  # 8 x (1/3, 1) / (4/3) = 2 and 6
    assert [p.id for p in chosen] == ["x", "x", "p", "q", "p", "q", "p", "q"]
    assert chosen[0] == parents.Parent(id="x", variation="similar")
    assert [(p.variation, p.other) for p in chosen[2:4]] == [("combined", "q"), ("combined", "p")]
    # where no prompt comes twice, eight steps make four quarters: a falls .25, .25, 0, 0; b ends at .5
    right = {0: [1, 0, 0, 0], 2: [1, 0, 0, 0], 4: [0, 0, 0, 0], 7: [0, 0, 0, 0]}
    visits = [visit(f"a{step}", step, own) for step, own in right.items()]
    visits += [visit(f"b{step}", step, own, "b") for step, own in {0: [0, 0], 7: [1, 0]}.items()]
    assert weaknesses(visits) == {"a": (["a0", "a2", "a4", "a7"], 1.0)}
    assert weaknesses([]) == {} and sws(visits[4:], 8, rng()) == []


@given(st.integers(0, 200), st.lists(st.floats(0.01, 1), min_size=1, max_size=9))
def test_candidates_are_shared_out_whole(count, shares):
    counts = parents.shared_out(count, shares)
    exact = count * np.array(shares) / sum(shares)
    assert sum(counts) == count and np.abs(counts - exact).max() < 1 + 1e-9


def test_informativeness_and_eva():
    visits = [visit("a", 0, [0, 0], rewards=[0.0, 1.0]), visit("b", 0, [0, 0], rewards=[0.2, 0.5, 0.3]),
              visit("a", 1, [0, 0], rewards=[0.4, 0.5]), visit("c", 1, [0, 0], rewards=[0.7, 0.7])]
    assert informativeness(visits) == pytest.approx({"a": 0.1, "b": 0.3, "c": 0.0})
    visits = [visit("a", 0, [0], rewards=[0.0, 0.1]), visit("b", 0, [0], rewards=[0.0, 0.3]),
              visit("c", 0, [0], rewards=[1.0, 1.0])]
    drawn = [eva(visits, 4, np.random.default_rng(seed))[0].id for seed in range(2000)]
    assert drawn.count("b") / 2000 == pytest.approx(0.75, abs=0.04) and "c" not in drawn
    assert {p.id for p in eva(visits, 400, rng())} == {"a", "b"} and len(eva(visits, 5, rng())) == 2
    many = [visit(str(i), 0, [0], rewards=[0.0, 1.0]) for i in range(40)]
    assert len(eva(many, 0, rng())) == 10  # a quarter
    assert eva(visits[2:], 4, rng()) == []


def test_solved_ones_and_pass_rates_of_a_file_and_recipes_by_name():
    visits = [visit("a", 0, [1, 1, 0]), visit("b", 0, [1, 0]), visit("a", 1, [1, 1, 1]), visit("c", 1, [0, 0]),
              GroupOutcome(id="d", rewards=(1.0,))]
    assert {p.id: p.variation for p in by_solved(visits, 3, rng())} == {"a": "harder", "b": "easier", "c": "easier"}
    rows = [{"id": 1, "pass_at_k": 0.25, "answers_scored": 8}, {"id": "b"}, {"id": "c", "pass_at_k": 1.0}]
    assert [(v.id, v.pass_rate) for v in parents.outcomes_of_rows(rows)] == [("1", 0.25), ("c", 1.0)]
    known = parents.RECIPES
    assert (known["sws"].least, known["sws"].most, known["synthetic_data_rl"].keep) == (0.25, 0.75, 500)
    with pytest.raises(ConfigError, match=r"--recipe 'sw' is not known\. Did you mean 'sws'"):
        parents.recipe("sw")


def rollout(step, group, index, reward, correct, **more):
    return {"schema": 1, "step": step, "group_id": group, "index": index, "sample_id": f"s-{group}", "split": "train",
            "category": "x", "reward": reward, "correct": correct, "sample": json.dumps({"n": 1}), **more}


def test_groups_of_a_run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    rows = [rollout(3, "g", 0, 1.0, True), rollout(3, "g", 1, 0.0, False), rollout(3, "g", 2, None, None),
            rollout(3, "g", 3, 1.0, True, variant="shuffled"), rollout(1, "h", 0, 0.5, None)]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "rollouts" / "step-000003-rank-00000.parquet")
    h, g = parents.outcomes_of_run(tmp_path)
    assert (g.id, g.step, g.rewards, g.right, g.category) == ("s-g", 3, (1.0, 0.0), (True, False), "x")
    assert h.rewards == (0.5,) and math.isnan(h.pass_rate)
    (tmp_path / "none" / "rollouts").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no scored rollouts"):
        parents.outcomes_of_run(tmp_path / "none")
