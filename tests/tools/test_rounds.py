"""Rounds: what is learned and which weights learn it, which answers are kept; how runs of several stages are listed."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import TWO
from vlrl import config as configs
from vlrl.algo.named import bind
from vlrl.app.library import Library
from vlrl.cli.main import main
from vlrl.config.base import Named
from vlrl.errors import ConfigError
from vlrl.store.lock import this_process
from vlrl.tools.evaluation.measure import choose_model
from vlrl.tools.evaluation.rows import RowFile
from vlrl.tools.experiments import status
from vlrl.tools.stages import rounds, selection
from vlrl.tools.stages import run as stages
from vlrl.tools.stages.selection import CHOICES, Candidate, best, diverse, every, shortest
from vlrl.tools.stages.stage_list import StageList, read_stages

TASK = '''
from vlrl.task import Task
from vlrl.types import Sample


class Words(Task):
    """Sample 3 has no given answer; an answer of even length is right."""
    prompt = "Say something about {n}."
    rewards = outcome = {"right": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row={"n": n, **({"solution": f"about {n}"} if n < 3 else {})})
                for n in range(4)]

    def score(self, sample, answer):
        return {"right": float(len(answer.text) % 2 == 0)}

    def oracle(self, sample):
        return None
'''


def config_of(tmp_path, more="", model="embedded/tiny-qwen3-vl", words=()):
    (tmp_path / "words.py").write_text(TASK)
    file = tmp_path / "words.yaml"
    file.write_text(f"task: {tmp_path}/words.py:Words\nmodel: {{name: {model}}}\nsteps: 1\n{more}\n")
    return configs.load(file, [f"run.dir={tmp_path}/run", *words])


def answer(number, text, correct, truncated=False):
    return {"split": "train", "number": number, "sample": f"train-{number}", "setting": "round", "seed": 0, "index": 0,
            "answer": text, "correct": correct, "reward": float(correct), "tokens": len(text), "truncated": truncated}


def lines(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def kept(tmp_path, config):
    place = tmp_path / "round-01"
    file = RowFile(place / "answers.jsonl", {})
    file.add([answer(0, "ab", True), answer(1, "abc", False), answer(2, "ab", True, truncated=True),
              answer(3, "abc", False)])
    rounds._write(config, choose_model(config, "embedded/tiny-qwen3-vl"), 0, place, file)
    return lines(place / "rows.jsonl"), rounds._figures(config, place)


def test_the_own_answer_where_it_is_right_and_else_the_given_one(tmp_path):
    rows, figures = kept(tmp_path, config_of(tmp_path, "rounds: {gold: true, answers: 1}"))
    assert [(r["number"], r["id"], r["solution"], r.get("gold")) for r in rows] == [
        (0, "train-0", "ab", None), (1, "train-1", "about 1", True), (2, "train-2", "about 2", True)]
    assert (figures["right"], figures["kept"], figures["gold"]) == (2, 3, 2)
    (tmp_path / "own").mkdir()
    rows, figures = kept(tmp_path / "own", config_of(tmp_path / "own", "rounds: {answers: 1}"))
    assert [r["solution"] for r in rows] == ["ab"] and "gold" not in figures
    with pytest.raises(ConfigError, match=r"rounds\.temperature=0 is greedy"):
        rounds.check(config_of(tmp_path, "rounds: {answers: 2, temperature: 0.0}"))
    with pytest.raises(ConfigError, match=r"rounds.gold=true .* rounds.learn=dpo"):
        rounds.check(config_of(tmp_path, "rounds: {gold: true, learn: dpo}"))


@pytest.mark.slow
def test_a_round_trains_the_model_that_the_run_began_with(tiny_models, tmp_path):
    """The answers are those of the stage before, and the weights that learn them those of the start."""
    more = ("train: {lr: 1.0e-2, schedule: constant, warmup: 0}\neval: {samples: 0}\nlog: {samples_every: 0}\n"
            "rollout: {prompts_per_step: 2, group_size: 2, max_new_tokens: 4}\n"
            "stages:\n- {name: cold, kind: sft, data: {solutions: %s}}\n"
            "- {name: base, kind: rounds, rounds: {count: 1, prompts: 4, answers: 1, temperature: 0.0, gold: true, "
            "start: %s}}")
    given = tmp_path / "given.jsonl"
    given.write_text('{"number": 0, "id": "train-0", "solution": "ab"}\n')
    model = tiny_models[TWO[0]]
    for start in ("start", "stage"):
        own = config_of(tmp_path, more % (given, start), model, [f"run.dir={tmp_path}/{start}"])
        assert stages.train_stages(own).finished
        left = read_stages(tmp_path / start).done["cold"]["model"]
        rows = lines(tmp_path / start / "base/round-01/rows.jsonl")
        assert {row["model"] for row in rows} == {left}
        begun = configs.load(tmp_path / start / "base/round-01/config.yaml").model.name
        assert begun == (str(model) if start == "start" else left)


def test_a_dpo_round_without_a_pair_leaves_the_weights_and_the_run_goes_on(tmp_path, monkeypatch):
    config = config_of(tmp_path, "rounds: {count: 2, answers: 2, learn: dpo}")
    monkeypatch.setattr(rounds, "_draw", lambda config, one, number, file: file.add(
        [answer(n, "abcd", True) for n in range(4)]))  # all right, all of one length
    heard = []
    assert rounds.train_rounds(config, heard.append) is True
    assert sum("there is no pair to learn from" in words for words in heard) == 2
    known = read_stages(tmp_path / "run")
    assert [(left["steps"], left["kept"]) for left in known.done.values()] == [(0, 0), (0, 0)]
    assert rounds.last_model(config) == known.done["round-01"]["model"]
    assert (Path(rounds.last_model(config)) / "config.json").exists()


THREE = [Candidate("red car left", 0.5, 9), Candidate("red car", 0.9, 7), Candidate("blue bus", 0.9, 7),
         Candidate("red car on the left", 0.1, 5)]


def row(answer, reward=1.0, correct=True, tokens=3, **more):
    return {"answer": answer, "reward": reward, "correct": correct, "tokens": tokens, **more}


def test_answers_are_chosen_by_hand():
    assert best(THREE) == [1] and best(THREE, 3) == [1, 2, 0]
    assert shortest(THREE) == [3] and shortest(THREE, 2) == [3, 1]
    # beside "red car": blue bus shares 0 of 4 words, "red car on the left" 2 of 5, "red car left" 2 of 3
    assert diverse(THREE, 3) == [1, 2, 3] and diverse(THREE, 9) == [1, 2, 3, 0]
    assert every(THREE) == [0, 1, 2, 3]
    rows = [row("a", 0.2, False), row("b", 0.9, tokens=5), row("b", 1.0), row("c", 0.8, truncated=True), row(""),
            row("d", None, None), row("e", 0.9, tokens=4), row("f", float("nan"))]
    assert [r["answer"] for r in selection.select_answers(rows, every, None)] == ["b", "e"]
    assert selection.select_answers(rows, shortest, None) == [rows[6]]
    assert [r["answer"] for r in selection.select_answers(rows, every, 0.2)] == ["a", "b", "e"]
    assert selection.select_answers(rows[:1], best, None) == []
    with pytest.raises(ValueError, match="index 3, but there are 1 answers"):
        selection.select_answers([row("a")], lambda candidates: [3], None)


def test_what_a_short_answer_is_preferred_to():
    """Wrong ones that are longer, right ones of more than 1.5 times its tokens."""
    kept = row("k", tokens=4)
    rows = [row("w4", 0.0, False, 4), row("w5", 0.0, False, 5), row("r6", tokens=6), row("r7", tokens=7), kept,
            row("w5", 0.0, False, 9), row("x", None, None, 99), row("", 0.0, False, 9), row("cut", 0.0, False, 8,
                                                                                           truncated=True)]
    for least, ratio, found in ((None, 1.5, "w5 r7 cut"), (None, 1.0, "w5 r6 r7 cut"), (2.0, 1.5, "w5 r6 r7 cut")):
        assert " ".join(r["answer"] for r in selection.select_rejected(rows, kept, least, ratio)) == found


@given(st.lists(st.tuples(st.text("ab ", max_size=6), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), max_size=9),
       st.sampled_from([*CHOICES]))
def test_what_is_kept_is_right_and_different(answers, name):
    rows = [row(text, reward, correct) for text, reward, correct in answers]
    kept = selection.select_answers(rows, bind("rounds.choose", Named(name=name), CHOICES), None)
    assert all(r["correct"] and r["answer"] for r in kept)
    assert len({r["answer"] for r in kept}) == len(kept)
    assert bool(kept) == any(r["correct"] and r["answer"] for r in rows)


def stage(folder, state="finished", step=2, reward=0.5):
    folder.mkdir(parents=True)
    (folder / "heartbeat.json").write_text(json.dumps({"step": step, "steps": 4, "state": state, "time": 5.0}))
    (folder / "metrics.jsonl").write_text(json.dumps({"step": step - 1, "reward/mean": reward}) + "\n")
    return folder


@pytest.fixture
def staged(tmp_path):
    """A run whose first stage is finished, and whose rounds are in their first."""
    run = tmp_path / "runs" / "two"
    StageList(run, [("cold", "sft"), ("own", "rounds"), ("last", "rl")], {"cold": {"steps": 4, "model": "m"}}).write()
    StageList(run / "own", [("round-01", "sft"), ("round-02", "sft")]).write()
    stage(run / "cold", step=4)
    stage(run / "own" / "round-01", "interrupted", 3, 0.25)
    return run


def test_it_is_one_run_with_its_stages(staged, capsys):
    assert status.find_runs(staged.parent) == [staged]
    found = status.read_status(staged)
    assert (found.state, found.step, found.steps, found.reward) == ("interrupted", 7, 8, 0.25)
    assert [(os.path.basename(s.path), s.state, s.step) for s in found.stages] == [
        ("cold", "finished", 4), ("own", "interrupted", 3)]
    assert [os.path.basename(s.path) for s in found.stages[1].stages] == ["round-01"]
    assert main(["status", str(staged.parent)]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if "two" in line] == [
        "two", "two/cold", "two/own", "two/own/round-01"]
    assert main(["status", str(staged)]) == 0 and "own/round-01: interrupted, step 3/4" in capsys.readouterr().out
    assert main(["status", str(staged), "--json"]) == 0
    assert [s["step"] for s in json.loads(capsys.readouterr().out)["stages"]] == [4, 3]


def test_states_and_the_library_of_the_inspector(staged):
    stage(staged.parent / "other")
    runs = Library(staged.parent).runs()
    assert [(r.id, r.part_of) for r in runs] == [
        ("other", ""), ("two", ""), ("two/cold", "two"), ("two/own", "two"), ("two/own/round-01", "two/own")]
    assert (runs[1].step, runs[1].steps, runs[1].state) == (7, 8, "interrupted")
    (staged / "run.lock").write_text(json.dumps(this_process()))  # this process works on it, between two stages
    assert status.read_status(staged).state == "running"
    (staged / "run.lock").write_text(json.dumps({**this_process(), "pid": 2**22 - 1, "started": 1}))
    stage_beat = staged / "own" / "round-01" / "heartbeat.json"
    stage_beat.write_text(json.dumps({**json.loads(stage_beat.read_text()), "state": "running"}))
    assert status.read_status(staged).state == "dead"
    (staged / "run.lock").unlink()
    known = read_stages(staged)
    for name in ("own", "last"):
        known = known.finished(name, steps=4, model="m")
    assert status.read_status(staged).state == "finished"


def test_no_list_and_links_that_lead_elsewhere(staged, tmp_path):
    assert read_stages(tmp_path) is None
    for text in ("{", "[]", '{"stages": [{"name": "../x", "kind": "rl"}], "done": {}}', '{"stages": 3, "done": {}}'):
        (tmp_path / "stages.json").write_text(text)
        assert read_stages(tmp_path) is None
    os.symlink(stage(tmp_path / "elsewhere"), staged / "last")
    assert len(read_stages(staged).folders) == 2 and len(status.read_status(staged).stages) == 2
