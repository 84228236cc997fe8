"""tools/evaluation: which combinations are drawn; what a scripted engine is asked, what is kept and asked again."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.engine.scripted import ScriptedEngine
from tests.rollout.test_group_source import BAD, Number, encode
from vlrl.config import validate
from vlrl.errors import ConfigError, DataError, TrainingError
from vlrl.evaluation.evaluate import evaluate
from vlrl.models.processing import PromptTooLong
from vlrl.rollout.prefetch import Prefetcher
from vlrl.task.interface import first_samples
from vlrl.tools.evaluation import answers as module
from vlrl.tools.evaluation.answers import EvalRuntime, draw_answers
from vlrl.tools.evaluation.rows import RowFile, cluster_hash, content_hash, prompt_hash, read_rows
from vlrl.tools.evaluation.settings import Grid, seeds_of
from vlrl.tools.evaluation.summary import summarise
from vlrl.types import Turn


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 4)
    BAD.clear()


class Noting(ScriptedEngine):
    def __init__(self, script):
        super().__init__(script)
        self.asked = []

    def generate(self, requests, done=None):
        self.asked += [(r.key, r.sampling.temperature, r.n) for r in requests]
        return super().generate(requests, done)


def ready(script=lambda prompt, i: prompt.text if i % 2 == 0 else "wrong", task=None, remote=False, **settings):
    config = validate({"task": "x", "model": {"name": "x"}, "seed": 3, "eval": {"samples": 10}, **settings})
    task = task or Number()
    task.name = "number"
    return EvalRuntime(config=config, task=task, prefetch=Prefetcher(encode, task, 0), engine=Noting(script),
                       remote=remote)


def asked(r, path, grid=None, splits=("heldout",)):
    settings = (grid or Grid()).settings(r.config)
    file = RowFile(path, {})
    told = []
    draw_answers(r, splits, settings, file, step=7, progress=lambda *words: told.append(words))
    return file, settings, told


def test_greedy_answers_are_those_of_a_run(tmp_path):
    r = ready()
    record, _ = evaluate(r.task, r.prefetch, r.engine, r.config, "heldout", 7)
    before, r.engine.asked = r.engine.asked, []
    file, (setting,), told = asked(r, tmp_path / "a.jsonl")
    assert r.engine.asked == before and told[-1] == ("answering", 10, 10)
    found = summarise(r.task, file.rows(), setting, "heldout", first_samples(r.task, "heldout", 10))
    for name, metric in found.metrics.items():
        assert (metric.mean, metric.low, metric.high) == tuple(
            record[key] for key in (name, f"{name}/ci95_low", f"{name}/ci95_high"))
    assert found.n == record["n"] == 10 and {"reward/mean", "correct_frac", "right"} < found.metrics.keys()
    class Words(Number):
        prompts = ("a {n}", "b {n}")

    seen = []
    r = ready(task=Words())
    r.prefetch.encode = lambda task, sample: seen.append(sample.prompt) or encode(task, sample)
    asked(r, tmp_path / "a.jsonl", Grid(wordings=2))
    assert seen == ["a {n}"] * 10 + ["b {n}"] * 10
    seen.clear()
    asked(r, tmp_path / "b.jsonl")
    assert seen == ["a {n}", "b {n}"] * 5


class Acting(Noting):
    """Answers by two actions, every other time by one."""

    def generate(self, requests, done=None):
        made = super().generate(requests, done)
        return [[replace(c, episode_id="e", turns=(Turn(start=0, end=1, text=c.text),) * (1 + i % 2)) for c in answers]
                for i, answers in enumerate(made)]


def test_turns_of_episodes_are_counted(tmp_path):
    r = replace(ready(), engine=Acting(lambda prompt, i: prompt.text))
    record, _ = evaluate(r.task, r.prefetch, r.engine, r.config, "heldout", 7)
    file, (setting,), _ = asked(r, tmp_path / "a.jsonl")
    found = summarise(r.task, file.rows(), setting, "heldout", first_samples(r.task, "heldout", 10))
    assert record["episode/turns_mean"] == found.metrics["episode/turns_mean"].mean == 1.5
    assert "episode/turns_mean" not in evaluate(r.task, r.prefetch, ready().engine, r.config, "heldout", 7)[0]


def test_rows_say_what_was_asked_and_how_it_went(tmp_path):
    r = ready()
    rows = asked(r, tmp_path / "a.jsonl", Grid(answers=2, seeds=(3, 4)))[0].rows()
    assert len(rows) == 10 * 2 * 2
    first, second = rows[:2]
    assert first["answer"] == first["parsed"] == first["target"] == "0" and second["answer"] == "wrong"
    assert (first["correct"], second["correct"]) == (True, False) and first["parts"] == {"right": 1.0}
    assert first["content"] == second["content"] != rows[2]["content"] and first["cluster"] == first["content"]
    assert first["prompt"] != rows[2]["prompt"] and first["sample"] == "heldout-0" and second["tokens"] == 5
    keys = [key for key, *_ in r.engine.asked]
    assert len(set(keys)) == 20 and all(len(key) == 3 for key in keys[:10]) and keys[10] == (*keys[0], 4)
    assert all(isinstance(row["tokens"], int) and np.isfinite(row["reward"]) for row in rows)
    assert {row["confidence"] for row in rows} == {None}
    file, *_ = asked(ready(lambda prompt, i: f"{prompt.text} <confidence>0.7</confidence>"), tmp_path / "b.jsonl")
    assert {row["confidence"] for row in file.rows()} == {0.7}


def test_what_is_there_is_not_asked_again(tmp_path):
    whole, *_ = asked(ready(), tmp_path / "whole.jsonl", Grid(answers=2))

    def dying(prompt, i):
        if prompt.text == "6":
            raise KeyboardInterrupt
        return prompt.text if i % 2 == 0 else "wrong"

    path = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        asked(ready(dying), path, Grid(answers=2))
    text = path.read_bytes()
    path.write_bytes(text[:-40])  # the last row of the first chunk is half there
    r = ready()
    file, _, told = asked(r, path, Grid(answers=2))
    assert len(r.engine.asked) == 10 and told[0] == ("answering heldout", 0, 20) and file.rows() == whole.rows()
    r = ready()
    asked(r, path, Grid(answers=2))
    assert r.engine.asked == []


def test_samples_that_cannot_be_asked_are_left_out(tmp_path):
    BAD[3] = PromptTooLong("too long")
    file, (setting,), _ = asked(ready(), tmp_path / "a.jsonl")
    (left,) = [row for row in file.rows() if row.get("left_out")]
    assert left["number"] == 3 and left["left_out"] == "too long"
    found = summarise(Number(), file.rows(), setting, "heldout", first_samples(Number(), "heldout", 10))
    assert found.n == 9 and found.left_out == 1
    BAD[4] = DataError("broken")
    with pytest.raises(DataError, match="broken"):
        asked(ready(), tmp_path / "b.jsonl")
    BAD.clear()
    with pytest.raises(TrainingError, match=r"limits\.score_errors"):
        asked(ready(lambda *_: "-1"), tmp_path / "c.jsonl")
    with pytest.raises(ConfigError, match="no samples in split"):
        empty = Number()
        empty.samples = lambda split: []
        asked(ready(task=empty), tmp_path / "d.jsonl")


class Failing(Noting):
    failing = ("1", "5")

    def generate(self, requests, done=None):
        return [[replace(c, tokens=c.tokens[:0], logprobs=c.logprobs[:0], loss_mask=c.loss_mask[:0], text="",
                         error="not answered: 500") if r.prompt.text in self.failing and i == 1 else c
                 for i, c in enumerate(row)] for r, row in zip(requests, super().generate(requests, done), strict=True)]


def test_answers_that_a_server_did_not_give_count_as_nothing_and_are_asked_again(tmp_path):
    r = ready(remote=True)
    engine = Failing(r.engine.script)
    r = replace(r, engine=engine)
    file, (setting,), _ = asked(r, tmp_path / "a.jsonl", Grid(answers=2))
    found = summarise(r.task, file.rows(), setting, "heldout", first_samples(r.task, "heldout", 10))
    assert found.unanswered == 2 and found.unscorable == 0 and found.n == 10
    assert found.metrics["correct_frac"].mean == pytest.approx((8 * 0.5 + 2) / 10)  # of the one that came
    assert found.metrics["pass@2"].mean == 1
    engine.asked, engine.failing = [], ()
    file, *_ = asked(r, tmp_path / "a.jsonl", Grid(answers=2))
    assert len(engine.asked) == 2 and not any(row.get("unanswered") for row in file.rows()) and len(file.rows()) == 20


CONFIG = validate({"task": "x", "model": {"name": "x"}, "seed": 3})


def names(**asked):
    return [(d.name, d.seeds, d.answers) for d in Grid(**asked).settings(CONFIG)]


def test_combinations_and_seeds():
    assert names() == [("greedy", (3,), 1)] and names(answers=4) == [("temperature 1", (3,), 4)]
    assert names(seeds=(1, 2)) == [("temperature 1", (1, 2), 1)]
    assert names(answers=4, temperatures=(0.0, 0.5), top_ps=(0.9, 1.0), max_new_tokens=(8,)) == [
        ("greedy, 8 tokens", (3,), 1), ("temperature 0.5, top_p 0.9, 8 tokens", (3,), 4),
        ("temperature 0.5, top_p 1, 8 tokens", (3,), 4)]
    assert names(wordings=2) == [("greedy, wording 1", (3,), 1), ("greedy, wording 2", (3,), 1)]
    assert names(temperatures=(0.0,), seeds=(1, 2), repeats_differ=True) == [("greedy", (1, 2), 1)]
    probed = Grid(probes=("reworded",), max_new_tokens=(8, 9)).settings(CONFIG)
    assert [(d.name, d.probe, d.plain) for d in probed] == [
        ("greedy, 8 tokens", "", ""), ("greedy, 8 tokens, reworded", "reworded", "greedy, 8 tokens"),
        ("greedy, 9 tokens", "", ""), ("greedy, 9 tokens, reworded", "reworded", "greedy, 9 tokens")]
    warm = CONFIG.model_copy(update={"eval": CONFIG.eval.model_copy(update={"temperature": 0.4})})
    assert Grid(answers=2).settings(warm)[0].temperature == 0.4
    sampling = Grid(temperatures=(0.7,), top_ps=(0.9,), max_new_tokens=(5,)).settings(CONFIG)[0].sampling(CONFIG)
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.7, 0.9, 5)
    for asked, said in (
            ({"answers": 4, "temperatures": (0.0,)}, "--answers 4 with --temperature 0"),
            ({"seeds": (1, 2), "temperatures": (0.0,)}, "--seeds 1,2 with --temperature 0"),
            ({"top_ps": (0.9,), "temperatures": (0.0,)}, "--top-p 0.9 with --temperature 0"),
            ({"temperatures": (1.0, 1.0)}, "--temperature: 1.0 is given twice"),
            ({"seeds": (1, 1)}, "--seeds: 1 is given twice"),
            ({"probes": ("blank",)}, "--probe 'blank' is not known. Did you mean 'blank_media'"),
            ({"probes": ("reworded", "reworded")}, "--probe: reworded is given twice")):
        with pytest.raises(ConfigError, match=said):
            names(**asked)
    assert seeds_of(None, 4) == () and seeds_of("3", 4) == (4, 5, 6) and seeds_of("9,2", 4) == (9, 2)
    assert seeds_of("9,", 4) == (9,)
    for wrong in ("x", "0", "1.5", "-1,2", ",", "9999"):
        with pytest.raises(ConfigError, match="--seeds"):
            seeds_of(wrong, 4)


FACTS = {"model": {"name": "a"}, "samples": 2}


def row(number, index=0, seed=0, **more):
    return {"split": "heldout", "setting": "greedy", "seed": seed, "number": number, "index": index, "answer": "x",
            **more}


def test_the_same_item_under_another_id_and_path():
    base = {"id": "a", "question": "How many?", "answer": "3", "image": "x.png", "weight": 2.0, "width": 9}
    same = {"id": "b", "question": "How many?", "answer": "3", "image": "other/y.png", "difficulty": 0.3, "kind": "it"}
    assert content_hash(base, "3", ["p"]) == content_hash(same, "3", ["p"])
    for other in (content_hash(base, "3", ["q"]), content_hash(base, "4", ["p"]), content_hash(base, "3", []),
                  content_hash({**base, "question": "How many cats?"}, "3", ["p"])):
        assert other != content_hash(base, "3", ["p"])
    assert content_hash({"n": 1}, None, []) != content_hash({"n": 2}, None, [])  # of a task's own rows: every field
    assert prompt_hash("a", ["p"]) != prompt_hash("b", ["p"]) and cluster_hash([], "c") == "c"
    assert cluster_hash(["p"], "c") == cluster_hash(["p"], "d") != cluster_hash(["q"], "c")
    assert len(content_hash({"question": "\ud800"}, float("nan"), ["p"])) == 64


def test_a_file_goes_on_after_a_kill(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    file = RowFile(path, FACTS)
    file.add([row(0), row(0, 1), row(1)])
    with open(path, "a") as half:
        half.write('{"split": "heldout", "setting": "gre')
    again = RowFile(path, FACTS)
    assert again.answered(2) == {("heldout", "greedy", 0, 0)} and len(again.rows()) == 3
    again.add([row(1, answer="later"), row(1, 1)])
    again.add([{**row(2), "left_out": "too long"}])
    again.add([{**row(3), "unanswered": True}, row(3, 1)])
    assert again.answered(2) == {("heldout", "greedy", 0, n) for n in (0, 1, 2)}
    again.close()
    rows = read_rows(path)
    assert [(r["number"], r["index"]) for r in rows] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert rows[2]["answer"] == "later" and json.loads(path.read_text().splitlines()[0]) == {"facts": FACTS}
    path = tmp_path / "answers.jsonl"
    file = RowFile(path, {"word": "\ud800"})  # a lone surrogate, as JSON may contain and UTF-8 may not
    file.add([row(0, answer="\ud83d half", sample="\udc00")])
    file.close()
    assert RowFile(path, {"word": "\ud800"}).rows() == read_rows(path) == [
        row(0, answer="\ud83d half", sample="\udc00")]
    path.write_bytes(b'[1]\n"x"\n\xff\n' + b"[" * 100_000 + b'\n{"split": {}, "setting": [], "seed": 0, "number": 0}\n'
                     + json.dumps(row(0)).encode())
    assert read_rows(path) == [row(0)]


def test_what_replaces_an_answer_and_which_file_is_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    RowFile(path, FACTS).add([row(0), {**row(0), "unanswered": True}, {**row(1), "unanswered": True}])
    with open(path, "a") as later:  # another process, or an older file that was appended
        later.write(json.dumps({**row(0), "unanswered": True, "answer": "late"}) + "\n")
    again = RowFile(path, FACTS)
    assert again.answered(1) == {("heldout", "greedy", 0, 0)} and again.rows()[0] == row(0)
    again.add([row(1, answer="now")])
    assert again.rows()[1] == row(1, answer="now") and len(again.rows()) == 2
    with pytest.raises(ConfigError, match=r"samples was 2, is 3\nRestore these settings"):
        RowFile(path, {**FACTS, "samples": 3})
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": 1}\n')
    with pytest.raises(ConfigError, match="is not a file of an evaluation"):
        RowFile(other, FACTS)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "none")
