"""Rounds whose prompts without a right answer are learned by the given one, and rounds that train the first weights."""

import json
from pathlib import Path

import pytest

from tests.conftest import TWO
from vlrl import config as configs
from vlrl.errors import ConfigError
from vlrl.tools.evaluation.measure import choose_model
from vlrl.tools.evaluation.rows import RowFile
from vlrl.tools.stages import rounds
from vlrl.tools.stages import run as stages
from vlrl.tools.stages.stage_list import read_stages

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
