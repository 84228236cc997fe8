"""The group source with a scripted engine: draws, rejections, refills, errors, rows that are others at a resume."""

import json
import os
import random
from dataclasses import replace

import numpy as np
import pytest

from tests.curriculum.sourced import source as every_sampler
from tests.engine.scripted import ScriptedEngine
from vlrl import curriculum
from vlrl.algo.advantage import dr_grpo
from vlrl.config import validate
from vlrl.config.schema import CurriculumSettings, DataSettings, LimitsSettings
from vlrl.curriculum import Prompts, Sequential, Uniform
from vlrl.data import read_samples
from vlrl.data.sources import lazy_dataset
from vlrl.errors import ConfigError, DataError, RunError, TrainingError
from vlrl.models.processing import PromptTooLong
from vlrl.monitoring.metrics import Clock, group_metrics
from vlrl.rollout import fingerprint
from vlrl.rollout.error_limits import check_errors
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.store import checkpoint
from vlrl.task import Task
from vlrl.task.interface import first_samples
from vlrl.task.mixture import Interleaved
from vlrl.training.advantages import credit
from vlrl.types import Prompt, Sample


class Number(Task):
    """Sample i asks for i; answers are numbers; a negative one crashes the scorer."""

    prompt = "{n}"
    rewards = {"right": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row={"n": n, "answer": str(n)}) for n in range(10)]

    def score(self, sample, answer):
        if answer.text.startswith("-"):
            raise ValueError("negative")
        return {"right": float(answer.text == sample["answer"])}


def encode(task, sample):
    n = sample["n"]
    if n in BAD:
        raise BAD[n]
    return Prompt(sample_id=sample.id, text=str(n), ids=np.arange(n + 3), raw_ids=np.arange(n + 3),
                  positions=np.arange(n + 3)[None])


BAD: dict[int, Exception] = {}


def source(script, **settings):
    BAD.clear()
    config = validate({"task": "x", "model": {"name": "x"}, "rollout": {"group_size": 3}, **settings})
    task = Number()
    task.name = "number"
    samples = task.samples("train")
    sampler = Sequential(Prompts(len(samples), 0))
    return GroupSource(RolloutGenerator(config, task, ScriptedEngine(script), Clock()), encode, sampler, samples)


def test_the_weight_of_a_draw_is_that_of_its_group_in_the_loss():
    class Weighted(Sequential):
        def next(self, count, step):
            return [replace(draw, weight=0.25 + draw.index) for draw in super().next(count, step)]
    s = source(lambda prompt, i: prompt.text)
    s.sampler = Weighted(s.prompts)
    assert [g.sample.weight for g in s.next_groups(2, 0)] == [0.25, 1.25]


class Asking(ScriptedEngine):
    """Keeps how many turns it was asked for."""

    def generate(self, requests, done=None):
        self.turns = [r.max_turns for r in requests]
        return super().generate(requests, done)


def test_a_step_asks_for_episodes_of_its_horizon_and_it_goes_on_where_it_was():
    s = source(lambda prompt, i: "x", episode={"max_turns": 4, "horizon": {"name": "add", "start": 2, "every": 2}})
    s.engine = s.generator.engine = Asking(lambda prompt, i: "x")
    asked = []
    for step in (0, 1, 2, 3, 4):
        s.next_groups(2, step)
        asked.append({*s.engine.turns})
    assert asked == [{2}, {2}, {3}, {3}, {None}]  # episode.max_turns
    assert "episode/horizon" not in s.metrics()  # these are no episodes
    words = {"episode": {"max_turns": 4, "horizon": {"name": "success", "start": 1, "window": 2}}}
    a, b = (source(lambda prompt, i: "x", **words) for _ in range(2))
    assert a.horizon.rule is not None
    a.horizon.rule.function.turns = 3
    b.load_state_dict(a.state_dict())
    assert b.horizon.at(0) == 3 and source(lambda prompt, i: "x", **words).horizon.at(0) == 1


def test_a_stage_sets_fields_that_the_task_lets_it_set():
    class Helped(Sequential):
        def next(self, count, step):
            return [replace(draw, fields=(("n", 7), ("answer", "help"))) for draw in super().next(count, step)]
    s = source(lambda prompt, i: "help")
    s.sampler = Helped(s.prompts)
    vars(s.task)["stage_fields"] = ("answer",)
    groups = s.next_groups(2, 0)
    assert [(g.sample["n"], g.sample["answer"], g.rewards) for g in groups] == [
        (0, "help", [1.0] * 3), (1, "help", [1.0] * 3)]
    assert [sample["answer"] for sample in s.samples[:2]] == ["0", "1"]  # the rows themselves stay


def test_groups_are_scored_and_credited():
    groups = credit(source(lambda prompt, i: prompt.text if i else "wrong").next_groups(4, step=2), dr_grpo)
    assert [g.sample["n"] for g in groups] == [0, 1, 2, 3] and len({g.id for g in groups}) == 4
    for g in groups:
        assert g.rewards == [0.0, 1.0, 1.0] and g.target == str(g.sample["n"])
        assert [r.advantage for r in g.rollouts] == pytest.approx([-2 / 3, 1 / 3, 1 / 3])
        assert all(r.policy_step == 2 for r in g.rollouts)
    facts = group_metrics(groups)
    assert facts["reward/mean"] == pytest.approx(2 / 3) and facts["groups/zero_variance_frac"] == 0
    assert facts["tokens/prompt"] == 3 + 4 + 5 + 6


def test_answers_without_a_score_by_the_task_s_own_word_are_counted():
    """A scorer that raises is an error; None as a part is the task's own word."""
    s = source(lambda prompt, i: ["-1", "none", prompt.text][i])
    score = s.task.score
    s.task.score = lambda sample, answer: {"right": None} if answer.text == "none" else score(sample, answer)
    groups = s.next_groups(4, 0)
    facts = group_metrics(groups)
    assert (facts["unreadable"], facts["unreadable_frac"]) == (4, pytest.approx(1 / 3))
    assert check_errors(groups, LimitsSettings(score_errors=1.0), "here")["score_errors"] == pytest.approx(1 / 3)


def test_too_long_prompts_are_replaced_and_bad_media_stop_unless_quarantined():
    s = source(lambda prompt, i: "x")
    BAD[1] = PromptTooLong("sample 'train-1': prompt of 99 tokens")
    assert [g.sample["n"] for g in s.next_groups(3, 0)] == [0, 2, 3]
    assert s.metrics()["prompts/rejected"] == 1
    assert "train-1" in s.rejected.take()[0] and s.rejected.take() == []
    s = source(lambda prompt, i: "x")
    BAD[1] = DataError("broken.png cannot be read")
    with pytest.raises(DataError, match=r"broken\.png"):
        s.next_groups(3, 0)
    s = source(lambda prompt, i: "x", data={"quarantine": True})
    BAD[1] = DataError("broken.png cannot be read")
    assert [g.sample["n"] for g in s.next_groups(3, 0)] == [0, 2, 3]
    for limit, says in ((0.5, r"limits.rejected=0.5.*sample \d is too long"), (1.0, "none accepted")):
        s = source(lambda prompt, i: "x", limits={"rejected": limit})
        BAD.update({n: PromptTooLong(f"sample {n} is too long") for n in range(10)})
        with pytest.raises(TrainingError, match=says):
            s.next_groups(4, 0)


def test_groups_without_variance_are_refilled():
    even = lambda prompt, i: prompt.text if int(prompt.text) % 2 or i else "wrong"  # noqa: E731
    s = source(even, curriculum={"keep": "mixed", "oversample": {"name": "ema", "decay": 0.5}})
    assert [g.sample["n"] for g in s.next_groups(4, 0)] == [0, 2, 4, 6] and s.metrics()["groups/wasted"] == 3
    assert s.filters.oversample.factor == pytest.approx(0.5 + 0.5 * 7 / 4)  # it saw those that were left out too
    s = source(lambda prompt, i: "same", curriculum={"keep": "mixed", "max_refills": 2})
    assert s.next_groups(4, 0) == [] and s.drawn == 12
    assert len(s.dropped) == 12 and all(g.zero_variance for g in s.dropped)


def test_a_resumed_source_knows_what_went_before():
    def fresh():
        return source(lambda prompt, i: prompt.text if int(prompt.text) % 2 and i else "wrong",
                      curriculum={"oversample": {"name": "ema", "decay": 0.5}})
    a, b = fresh(), fresh()
    BAD[3] = PromptTooLong("sample 3 is too long")
    a.next_groups(6, 0)
    b.load_state_dict(a.state_dict())
    # another one was drawn for 3; of the 6 answered ones 1 and 5 are neither all right nor all wrong: 0.5 + 0.5 * 6 / 2
    assert b.filters.oversample.factor == a.filters.oversample.factor == pytest.approx(2.0)
    assert (b.rejected.drawn, b.rejected.count, b.drawn) == (a.rejected.drawn, 1, a.drawn)
    history = b.prompts.history
    assert history.visits.tolist() == a.prompts.history.visits.tolist() and history.rejected.tolist()[3]
    assert history.last.tolist() == a.prompts.history.last.tolist()
    assert np.array_equal(history.reward, a.prompts.history.reward, equal_nan=True)
    assert [g.id for g in a.next_groups(5, 1)] == [g.id for g in b.next_groups(5, 1)]


def test_scoring_errors_stop_above_the_limit():
    groups = source(lambda prompt, i: "-1" if i == 0 else prompt.text).next_groups(3, 0)
    assert [g.rewards for g in groups] == [[None, 1.0, 1.0]] * 3
    assert check_errors(groups, LimitsSettings(score_errors=0.5), "step 4")["score_errors"] == pytest.approx(1 / 3)
    with pytest.raises(TrainingError, match=r"step 4: 3 of 9 .*limits\.score_errors=0\.1.*ValueError: negative"):
        check_errors(groups, LimitsSettings(score_errors=0.1), "step 4")
    task = Number()
    task.samples = lambda split: []
    with pytest.raises(ConfigError, match="no samples in split 'heldout'"):
        first_samples(task, "heldout", 3)


def test_uniform_visits_everything_once_an_epoch():
    sampler = Uniform(Prompts(7, 3))
    draws = sampler.next(10, 0) + sampler.next(11, 1)
    assert sorted(d.index for d in draws[:7]) == list(range(7))
    assert [d.visit for d in draws] == [0] * 7 + [1] * 7 + [2] * 7
    assert [d.index for d in draws[:7]] != [d.index for d in draws[7:14]]
    again = Uniform(Prompts(7, 3))
    again.load_state_dict({"drawn": 10})
    assert again.next(11, 1) == draws[10:]
    assert [d.index for d in Uniform(Prompts(7, 4)).next(7, 0)] != [d.index for d in draws[:7]]
    with pytest.raises(ConfigError, match="Did you mean 'uniform'"):
        curriculum.make(CurriculumSettings(name="unifrom"), Prompts(3, 0))


def read(path, entries, index="memory"):
    """The fingerprint of rows written to a file, and the state of a checkpoint."""
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    task = Task()
    task.data = DataSettings(train=str(path), index=index, cache=str(path.parent / "cache"))
    return fingerprint.fingerprint_of(read_samples(task, "train"))


def rows(count=30):
    return [{"id": f"r{i}", "question": f"{i} + 1 =", "answer": str(i + 1)} for i in range(count)]


def relabelled(entries):
    return [{**row, "answer": "7"} if row["id"] == "r3" else row for row in entries]


@pytest.mark.parametrize("index", ["memory", "lazy"])
@pytest.mark.parametrize("change, said", [
    (lambda entries: entries[:20], r"there were 30 rows and now there are 20\b"),
    (relabelled, r"1 rows changed, 'r3' \(row 4\)\."),
    (lambda entries: random.Random(1).sample(entries, 30),
     r"the same rows in another order: 'r\d+' \(row 1\), .* more"),
])
def test_other_rows_are_named(tmp_path, index, change, said):
    before = read(tmp_path / "rows.jsonl", rows(), index).state_dict()
    read(tmp_path / "rows.jsonl", rows(), index).check(before, "data.train='rows.jsonl'")
    with pytest.raises(RunError, match=rf"data\.train='rows\.jsonl' differ from those of.*{said}.*resume=never"):
        read(tmp_path / "rows.jsonl", change(rows()), index).check(before, "data.train='rows.jsonl'")


def test_of_a_large_file_some_rows_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(lazy_dataset, "SPREAD", 4)
    found = read(tmp_path / "rows.jsonl", rows(31), "lazy")
    assert found.places.tolist() == [0, 10, 20, 30] and found.ids == ("r0", "r10", "r20", "r30")
    with pytest.raises(RunError, match=r"3 rows of the 4 compared rows changed.*'r11' \(row 11\)"):
        read(tmp_path / "rows.jsonl", [*rows(33)[:5], *rows(33)[6:32]], "lazy").check(found.state_dict(), "x")


def test_the_tasks_of_a_mixture_are_compared_each_and_files_that_are_written_to_told(tmp_path):
    def both(entries):
        found = []
        for name, of in (("a", rows(5)), ("b", entries)):
            path, task = tmp_path / f"{name}.jsonl", Task()
            path.write_text("".join(json.dumps(entry) + "\n" for entry in of))
            task.data = DataSettings(train=str(path))
            found.append(read_samples(task, "train"))
        return fingerprint.fingerprint_of(Interleaved({"a": found[0], "b": found[1]}))
    before = both(rows(4))
    assert len(before.sums) == 9 and len(before.files) == 2
    with pytest.raises(RunError, match=r"1 rows changed, 'b/r3' \(row 8\)"):
        both(relabelled(rows(4))).check(before.state_dict(), "x")
    found = read(tmp_path / "rows.jsonl", rows())
    assert found.written_to() == []
    os.truncate(tmp_path / "rows.jsonl", 100)
    assert found.written_to() == [str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").unlink()
    assert found.written_to() == [str(tmp_path / "rows.jsonl")]


def test_a_source_refuses_the_state_of_other_samples(tmp_path):
    made = every_sampler("uniform", "plain")
    path = checkpoint.save(tmp_path, 1, lambda path: None, {"source": made.state_dict()}, 1)
    state = checkpoint.load_state(path)["source"]
    made.load_state_dict(state)
    del state["data"]  # as earlier checkpoints
    made.load_state_dict(state)
    state["history"]["visits"] = state["history"]["visits"][:-2]
    with pytest.raises(RunError, match=r"the samples of .*there were 12 rows and now there are 14"):
        made.load_state_dict(state)
