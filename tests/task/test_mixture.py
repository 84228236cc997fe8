"""Several tasks at once: their samples in turn, each scored by its own task, fixed shares, metrics by task, errors."""

import copy
import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.scripted import ScriptedEngine
from tests.tables import each, refused
from vlrl import config as configs
from vlrl import curriculum
from vlrl.algo.advantage import dr_grpo
from vlrl.config import dump, load, validate
from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum import Draw, ForeseeingSampler, Outcome, ProbingSampler, Prompts, Uniform
from vlrl.curriculum.history import History
from vlrl.curriculum.shares import Shares
from vlrl.errors import ConfigError, DataError
from vlrl.evaluation.evaluate import evaluate, evaluation_line
from vlrl.evaluation.stats import mean_ci
from vlrl.monitoring.metrics import Clock, group_metrics
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.rollout.prefetch import Prefetcher
from vlrl.store import RunFolder
from vlrl.task.base import Task
from vlrl.task.interface import first_samples, task_messages, task_oracle, task_samples
from vlrl.task.mixture import Interleaved, Mixture, require_one_task
from vlrl.task.services import drop_unserved_parts
from vlrl.task.variants import has_variants
from vlrl.tools.experiments.report import gains, summary_table
from vlrl.tools.tasks.rescore import compare
from vlrl.tools.tasks.score_rows import score_lines
from vlrl.training.advantages import _check_parts, credit
from vlrl.training.build import OFFERED
from vlrl.training.build_task import make_task, settle_coordinates
from vlrl.types import Prompt, Sample


class Number(Task):
    """Sample i asks for i."""

    prompt = "{n}"
    rewards = {"right": 1.0, "short": 0.5}
    size: int = 6

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row={"n": n, "answer": str(n)}) for n in range(self.size)]

    def score(self, sample, answer):
        return {"right": float(answer.text == sample["answer"]), "short": float(len(answer.text) < 2)}

    def oracle(self, sample):
        return sample["answer"]

    def sample_from_row(self, row, root=None):
        return Sample(id=str(row["id"]), row=row)


class Letter(Number):
    """Pays twice for a letter, whichever it is; its samples have the ids of Number's."""

    prompts = ("letter {n}", "a letter, {n}")
    rewards = {"letter": 2.0}
    size: int = 3

    def score(self, sample, answer):
        return {"letter": float(answer.text.isalpha())}

    def metrics(self, sample, answer, parts):
        return {"long": float(len(answer.text) > 1)}

    def summarize(self, records):
        return {"answers": float(len({r["answer"] for r in records}))}


def mixture(numbers=6, letters=3):
    return Mixture({"number": Number(size=numbers), "letter": Letter(size=letters)})


def encode(task, sample):
    text = task.messages(sample)[0]["content"][0]["text"]
    ids = np.arange(len(text))
    return Prompt(sample_id=sample.id, text=text, ids=ids, raw_ids=ids, positions=ids[None])


def settings(*weights, **more):
    entries = [{"name": "number", **({} if w is None else {"weight": w})} for w in weights]
    return validate({"tasks": [{**e, "label": label} for e, label in zip(entries, ("number", "letter"), strict=True)],
                     "model": {"name": "x"}, "rollout": {"group_size": 2}, **more})


def source(script, config, task=None):
    task = task or mixture()
    samples = task.samples("train")
    prompts = Prompts.of(samples, 0)
    sampler = curriculum.make(config.curriculum, prompts, config.shares)
    return GroupSource(RolloutGenerator(config, task, ScriptedEngine(script), Clock()), encode, sampler, samples,
                       prompts=prompts)


def test_samples_go_through_the_tasks_in_turn():
    found = mixture(5, 2).samples("train")
    assert [s.id for s in found] == ["number/train-0", "letter/train-0", "number/train-1", "letter/train-1",
                                     "number/train-2", "number/train-3", "number/train-4"]
    assert [s.task for s in found] == found.tasks and found[1].row["n"] == 0 and len(found) == 7
    assert [s.id for s in found[1:4]] == ["letter/train-0", "number/train-1", "letter/train-1"]
    assert found[-1].id == "number/train-4"
    with pytest.raises(IndexError):
        found[7]
    made = []

    class Endless(list):
        def __len__(self):
            return 500_000

        def __getitem__(self, index):
            made.append(index)
            return Sample(id=str(index))
    found = Interleaved({"a": Endless(), "b": Endless()})
    assert len(found) == 1_000_000 and found[999_999].id == "b/499999" and made == [499_999]
    assert Counter(found.tasks) == {"a": 500_000, "b": 500_000} and made == [499_999]


@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_every_sample_of_every_task_comes_once(sizes):
    found = Interleaved({f"t{k}": [Sample(id=str(i)) for i in range(n)] for k, n in enumerate(sizes)})
    assert len(found) == sum(sizes) and {s.id for s in found} == {f"t{k}/{i}" for k, n in enumerate(sizes)
                                                                  for i in range(n)}
    assert found.tasks == [s.task for s in found]
    rounds = [found.locate(i)[1] for i in range(len(found))]
    assert rounds == sorted(rounds)
    assert [s.task for s in found[:len(sizes)]] == list(found.labels)


def test_each_task_asks_its_own_samples():
    task = mixture()
    number, letter = task.samples("train")[:2]
    assert task_messages(task, letter)[0]["content"][0]["text"] == "letter 0"
    assert task_oracle(task, number) == "0" and task.of(letter).name == "letter"
    assert [s.prompt for s in first_samples(task, "heldout", 5)] == ["{n}", "letter {n}", "{n}", "a letter, {n}", "{n}"]
    with pytest.raises(DataError, match=r"'lettre' is not a task of this config\. Did you mean 'letter'"):
        task.of(Sample(id="x", task="lettre"))
    assert not has_variants(task) and task.labels == ("number", "letter") and task.name == "number + letter"
    with pytest.raises(ConfigError, match=r"vlrl data check takes one task, .*number, letter\. Add task=number"):
        require_one_task(task, "vlrl data check")
    task = mixture(5, 0)
    with pytest.raises(ConfigError, match=r"tasks\.1 \(letter\) has no samples in split 'heldout'.*tasks\.1\.data\."):
        first_samples(task, "heldout", 4)


def test_services_are_asked_for_and_rows_scored_by_task(tmp_path):
    class Judged(Letter):
        rewards = {"letter": 1.0, "liked": 0.0}
        needs = {"judge": ["liked"]}
    task = Mixture({"number": Number(), "judged": Judged()})
    found = drop_unserved_parts(task, OFFERED, task.samples("train"))
    assert [list(t.weights) for t in found.members] == [["right", "short"], ["letter"]]
    task = Mixture({"number": Number(), "judged": Judged(rewards={"liked": 1})})
    with pytest.raises(ConfigError, match="task 'judged': the part 'liked' needs the service 'judge'"):
        drop_unserved_parts(task, OFFERED, task.samples("train"))
    def score(**row):
        (found,) = score_lines(mixture(), [json.dumps({"completions": ["a", "1"], **row}).encode()], tmp_path)
        return found
    row = {"id": "r1", "n": 1, "answer": "1"}
    letter, number = (json.loads(score(sample=row, task=label)[0]) for label in ("letter", "number"))
    assert [r["reward"] for r in letter["rewards"]] == [2.0, 0.0] and letter["weights"] == {"letter": 2.0}
    assert [r["reward"] for r in number["rewards"]] == [0.5, 1.5]
    assert "the row has no 'task'" in str(score(sample=row)[1])
    assert "Did you mean 'letter'" in str(score(sample=row, task="leter")[1])


def labels_of(prompts, draws):
    return [prompts.field("task")[d.index] for d in draws]


def test_shares_are_exact_and_weights_of_0_never_drawn():
    prompts = Prompts.of(mixture(40, 10).samples("train"), 0)
    sampler = Shares(prompts, {"number": 3, "letter": 1}, Uniform)
    found = labels_of(prompts, sampler.next(4, 0))
    assert found == ["number", "number", "letter", "number"]  # behind by .75, .5 (as letter), .25, 1
    for count in (1, 5, 7, 3):
        found += labels_of(prompts, sampler.next(count, 1))
        assert abs(found.count("letter") - len(found) / 4) < 1
    prompts = Prompts.of(mixture(40, 10).samples("train"), 0)
    draws = Shares(prompts, {"number": 3, "letter": 1}, Uniform).next(160, 0)
    visits = np.bincount([d.index for d in draws], minlength=50)
    assert visits.tolist() == [{"number": 3, "letter": 4}[label] for label in prompts.field("task")]
    assert prompts.history.visits.tolist() == visits.tolist()
    assert settings(2, None).shares == {"number": 2.0, "letter": 1.0} and settings(None, None).shares == {}
    prompts = Prompts.of(mixture().samples("train"), 0)
    for weights in ({"number": 1, "letter": 0}, {"number": 0, "letter": 1}):
        drawn = labels_of(prompts, Shares(prompts, weights, Uniform).next(12, 0))
        assert set(drawn) == {label for label, w in weights.items() if w}
    prompts = Prompts.of(mixture().samples("train"), 0)
    sampler = curriculum.make(CurriculumSettings(), prompts, settings(None, None).shares)
    assert isinstance(sampler, Uniform) and sampler.prompts.size == 9
    assert prompts.categories("task").names == ("letter", "number")


class Told:
    """Keeps what it is told; probes its first prompt."""

    def __init__(self, prompts):
        self.prompts, self.seen, self.calls = prompts, [], 0

    def next(self, count, step):
        self.calls += 1
        return [Draw(i % self.prompts.size, v) for i, v in
                enumerate(self.prompts.history.visit(np.arange(count) % self.prompts.size))]

    def observe(self, outcomes, step):
        self.seen += [(o.draw.index, o.reward) for o in outcomes]

    def probes(self, step):
        return [Draw(0, 0)]

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]

    def metrics(self):
        return {"curriculum/calls": float(self.calls)}


def test_each_sampler_knows_its_own_prompts_alone():
    prompts = Prompts.of(mixture(3, 2).samples("train"), 0)  # number: 0, 2, 4; letter: 1, 3
    sampler = Shares(prompts, {"number": 1, "letter": 1}, Told)
    draws = sampler.next(4, 0)
    assert [d.index for d in draws] == [0, 1, 2, 3]
    outcomes = [Outcome(d, (float(d.index), 1.0)) for d in draws]
    prompts.history.note(outcomes, 0)
    sampler.observe(outcomes, 0)
    numbers, letters = sampler.samplers
    assert numbers.seen == [(0, 0.5), (1, 1.5)] and letters.seen == [(0, 1.0), (1, 2.0)]
    assert numbers.prompts.history.reward.tolist()[:2] == [0.5, 1.5] and math.isnan(numbers.prompts.history.reward[2])
    assert numbers.prompts.field("n") == [0, 1, 2] and letters.prompts.size == 2
    assert numbers.prompts.seed != letters.prompts.seed
    assert isinstance(sampler, ProbingSampler) and [d.index for d in sampler.probes(0)] == [0, 1]
    assert not isinstance(sampler, ForeseeingSampler)
    assert sampler.metrics() == {"curriculum/number/calls": 1.0, "curriculum/letter/calls": 1.0}


def test_shares_go_on_where_they_were():
    config = settings(2, 1)
    a, b = (source(lambda prompt, i: "x" * i, config) for _ in range(2))
    sampler = a.sampler
    assert isinstance(sampler, ForeseeingSampler)
    soon = sampler.upcoming(5, 0)
    assert sampler.upcoming(5, 0) == soon
    assert [g.sample.id for g in a.next_groups(5, 0)] == [a.samples[d.index].id for d in soon]
    a.next_groups(2, 1)
    b.load_state_dict(json.loads(json.dumps(a.state_dict(), default=lambda v: v.tolist())))
    (whole, other) = (s.sampler.prompts[0].history for s in (a, b))
    assert whole.visits.tolist() == other.visits.tolist() and whole.last.tolist() == other.last.tolist()
    assert whole.visits.sum() == 5  # of 7 draws, shares of 2 and 1
    for step in (2, 3):
        one, two = a.next_groups(7, step), b.next_groups(7, step)
        assert [(g.id, g.sample.id) for g in one] == [(g.id, g.sample.id) for g in two]


class Made(Number):
    """Makes samples at any difficulty."""

    knobs = {"hard": (0.0, 1.0)}

    def generate(self, index, knobs):
        return Sample(id=f"made-{index}", row={"n": knobs["hard"]})


@each("name", ["rlcs", "replay", "gain_rl", "prioritised", "alp_gmm"])
def test_any_sampler_draws_within_shares(name):
    def made():
        task = Mixture({"a": Made(size=8), "b": Made(size=8)})
        prompts = Prompts.of(task.samples("train"), 0, knobs=task.knobs)
        sampler = curriculum.make(CurriculumSettings(name=name), prompts, {"a": 2, "b": 1})
        return task, prompts, sampler

    def played(prompts, sampler, steps):
        out = []
        for step in steps:
            out.append(sampler.next(6, step))
            outcomes = [Outcome(d, (float(d.index % 3), 1.0), (True, d.index % 3 > 1)) for d in out[-1]]
            prompts.history.note(outcomes, step)
            sampler.observe(outcomes, step)
        return out
    (task, prompts, sampler), (_, other, resumed) = made(), made()
    for one in (sampler, resumed) if hasattr(sampler, "missing") else ():
        places = one.missing()
        one.measured(places, places.astype(np.float32) / 16)
        assert [s.angles.tolist() for s in one.samplers] == [(own / 16).tolist() for own in one.members]
    (first, *_) = played(prompts, sampler, range(4))
    assert Counter(labels_of(prompts, first)) == {"a": 4, "b": 2}
    if first[0].knobs:
        made_by = task.generate(first[0].index, dict(first[0].knobs))
        assert made_by.task == "a" and made_by["n"] == first[0].knobs[0][1] and first[0].knobs[0][0] == "a/hard"
    resumed.load_state_dict(copy.deepcopy(sampler.state_dict()))
    other.history.load_state_dict(copy.deepcopy(prompts.history.state_dict()))
    assert played(prompts, sampler, range(4, 7)) == played(other, resumed, range(4, 7))


def test_a_part_of_a_history_counts_in_the_whole():
    whole = History(4)
    part = whole.subset(np.array([1, 3]))
    assert part.visit([0, 0, 1]) == [0, 1, 0] and whole.visits.tolist() == [0, 2, 0, 1]
    state = {k: v.copy() for k, v in whole.state_dict().items()}
    state["visits"][3] = 9
    whole.load_state_dict(state)
    assert part.visits.tolist() == [2, 9]
    task = Mixture({"a": Made(), "b": Number()})
    with pytest.raises(ConfigError, match=r"task 'b' of the mixture: .*no knobs"):
        curriculum.make(CurriculumSettings(name="alp_gmm"), Prompts.of(task.samples("train"), 0, knobs=task.knobs),
                        {"a": 1, "b": 1})
    assert task.generate(1, {"a/hard": 0.5}).id == "b/train-0"


def test_training_metrics_by_task():
    s = source(lambda prompt, i: "5" if i else "ab", settings(2, 1))
    groups = credit(s.next_groups(6, 0), dr_grpo)
    assert Counter(g.task for g in groups) == {"number": 4, "letter": 2}
    by = {g.sample.id: g for g in groups}
    assert all(g.task == g.sample.task and g.weights == ({"letter": 2.0} if g.task == "letter" else
                                                         {"right": 1.0, "short": 0.5}) for g in groups)
    right = sum(g.sample["n"] == 5 for g in groups if g.task == "number")
    found = group_metrics(groups, s.task.labels)
    assert {k: found[k] for k in found if k.startswith(("number", "letter"))} == pytest.approx({
        "number/reward/mean": (4 * 0.5 + right) / 8, "number/reward/right": right / 8, "number/reward/short": 0.5,
        "number/groups/zero_variance_frac": 0.0, "number/share": 2 / 3, "letter/reward/mean": 1.0,
        "letter/reward/letter": 0.5, "letter/groups/zero_variance_frac": 0.0, "letter/share": 1 / 3})
    assert found["reward/mean"] == pytest.approx((4 * 0.5 + right + 4) / 12) and len(by) == 6
    only = group_metrics([g for g in groups if g.task == "number"], s.task.labels)
    assert only["letter/share"] == 0.0 and only["number/share"] == 1.0 and "letter/reward/mean" not in only
    assert not any("/share" in name for name in group_metrics(groups))


def evaluated(script, task, samples=9):
    config = validate({"task": "x", "model": {"name": "x"}, "eval": {"samples": samples}})
    return evaluate(task, Prefetcher(encode, task, 0), ScriptedEngine(script), config, "heldout", 0)


def test_evaluations_by_task():
    record, groups = evaluated(lambda prompt, i: "1" if prompt.text[0].isdigit() else "abc", mixture(4, 2))
    assert record["n"] == 6 and record["number/n"] == 4 and record["letter/n"] == 2
    assert record["number/right"] == 0.25 and record["letter/letter"] == 1.0 and record["letter/long"] == 1.0
    assert record["number/reward/mean"] == 0.75 and record["letter/reward/mean"] == 2.0
    assert record["reward/mean"] == pytest.approx((4 * 0.75 + 2 * 2) / 6)  # every sample weighs the same
    low, high = mean_ci([0.5, 1.5, 0.5, 0.5])[1:]
    assert (record["number/reward/mean/ci95_low"], record["number/reward/mean/ci95_high"]) == (low, high)
    assert record["letter/answers"] == 1.0 and "number/answers" not in record and "answers" not in record
    assert [g.sample.id for g in groups][:3] == ["number/heldout-0", "letter/heldout-0", "number/heldout-1"]
    line = evaluation_line(record)
    assert "letter/reward/mean 2.000" in line and "letter/long" not in line and "right 0.250" in line
    alone, _ = evaluated(lambda prompt, i: "1", Number())
    assert not any("number" in name for name in alone)


def test_the_table_pairs_samples_of_equal_ids_by_task(tmp_path):
    task, run = mixture(3, 3), RunFolder(tmp_path)
    for step, script in ((0, lambda prompt, i: "0"), (4, lambda prompt, i: prompt.text)):
        record, groups = evaluated(script, task)
        run.append_eval({**record, "step": step})
        run.write_rollouts(step, 0, groups, split="heldout")
    found = {g.metric: g for g in gains(run)}
    assert "letter/n" not in found and found["letter/reward/mean"].n == 3 and found["reward/mean"].n == 6
    assert found["number/right"].gain.mean == pytest.approx(2 / 3) and math.isfinite(found["number/right"].gain.low)
    assert found["letter/letter"].gain == pytest.approx((0.0, 0.0, 0.0))
    shown = list(summary_table(run).columns[1].cells)
    assert [str(c) for c in shown][:2] == ["reward/mean", "number/reward/mean"] and "right" not in map(str, shown)
    assert compare(task, run, split="heldout").changed == 0  # each is scored by its own task again


BASE = {"model": {"name": "x"}}


def test_entries_have_labels_shares_and_files_of_their_own(tmp_path):
    config = validate({**BASE, "data": {"train": "all.jsonl", "seed": 3}, "tasks": [
        "digits", {"name": "grounding", "drawn": True, "weight": 2, "coordinates": "norm1", "rewards": {"iou": 3}},
        {"name": "classification", "label": "birds", "data": {"train": "birds.jsonl", "root": "pictures"}}]})
    assert config.task_name == "digits + grounding + birds"
    assert config.shares == {"digits": 1, "grounding": 2, "birds": 1}
    task = make_task(config)
    assert isinstance(task, Mixture) and [t.name for t in task.members] == ["digits", "grounding", "birds"]
    assert [(t.data.train, t.data.root, t.seed) for t in task.members] == [
        ("all.jsonl", "", 3), ("all.jsonl", "", 3), ("birds.jsonl", "pictures", 3)]
    assert task.members[1].weights["iou"] == 3 and task.members[1].drawn
    settle_coordinates(task, config, "norm1000")
    assert [t.coordinates.convention for t in task.members] == ["norm1000", "norm1", "norm1000"]
    assert validate(yaml.safe_load(dump(config))) == config
    assert configs.differences(config, validate({**yaml.safe_load(dump(config)), "tasks": [
        "digits", {"name": "grounding", "drawn": True, "weight": 5, "coordinates": "norm1", "rewards": {"iou": 3}},
        {"name": "classification", "label": "birds", "data": {"train": "birds.jsonl", "root": "pictures"}}]})) == [
            "tasks.1.weight: 2.0 -> 5.0"]


test_what_is_wrong_with_tasks_is_said = refused(ConfigError, lambda more: validate({**BASE, **more}), [
    ({"tasks": ["digits", "own/digits.py"]},
     r"tasks\.0\.name='digits' and tasks\.1\.name='own/digits\.py' are both labelled 'digits'.*tasks\.1\.label="),
    ({"task": "digits", "tasks": ["grounding"]}, r"task\.name='digits' and tasks \(grounding\) are both set.*remove"),
    ({"tasks": [{"name": "digits", "label": "time"}]}, r"tasks\.0\.label='time': a label must have"),
    ({"tasks": [{"name": "digits", "label": "a/b"}]}, r"tasks\.0\.label='a/b'"),
    ({"tasks": [{"name": "digits", "weight": -1}]}, r"tasks\.0\.weight=-1"),
    ({"tasks": [{"name": "digits", "weight": True}]}, r"tasks\.0\.weight=True: give a number"),
    ({"tasks": [{"name": "digits", "weight": 0}]}, "every weight is 0"),
    ({"tasks": [{"name": "digits", "weight": float("inf")}]}, r"tasks\.0\.weight=inf: .*less than or equal"),
    ({"tasks": [{"name": "digits", "label": ".."}]}, r"tasks\.0\.label='\.\.'"),
    ({"tasks": ["digits"], "task": {"drawn": True}}, r"task\.drawn is set, but.*\(digits\).*tasks\.0\.drawn"),
    ({"tasks": 3}, "tasks=3: Input should be a list"),
    ({"tasks": [{"name": "digits", "data": {"trian": "x"}}]}, r"tasks\.0\.data\.trian.*Did you mean 'train'"),
    ({"tasks": [{"label": "x"}]}, "needs a name")])


def test_errors_and_outcomes_are_each_tasks_own(tmp_path):
    with pytest.raises(ConfigError, match=r"tasks\.1 \(grounding\): unknown setting 'task\.draw'.*'drawn'"):
        make_task(validate({**BASE, "tasks": ["digits", {"name": "grounding", "draw": True}]}))
    task = make_task(validate({**BASE, "tasks": [{"name": "classification", "label": "birds"}, "digits"]}))
    with pytest.raises(ConfigError, match=r"tasks\.0 \(birds\): data\.train is not set.*tasks\.0\.data"):
        task.samples("train")
    algorithm = SimpleNamespace(advantage=SimpleNamespace(options={"part": "right"}), shaping=(),
                                batch=SimpleNamespace(options={}))
    with pytest.raises(ConfigError, match=r"algo\.advantage\.part='right': task 'letter' has no such reward part"):
        _check_parts(algorithm, mixture())  # pyright: ignore
    (tmp_path / "rows.jsonl").write_text('{"id": "own", "n": 3}\n')
    rows = {"train": str(tmp_path / "rows.jsonl")}
    config = validate({"tasks": [{"name": "tests.rollout.test_group_source:Number", "data": rows},
                                 {"name": "tests.rollout.test_group_source:Number", "label": "other", "data": rows}],
                       "model": {"name": "x"}, "data": {"own_samples": False}})
    assert [s.id for s in task_samples(make_task(config), "train")] == ["Number/own", "other/own"]
    # curriculum.part is asked of the tasks that have it.
    config = validate({"tasks": [{"name": "tests.rollout.test_group_source:Number"}, {"name": "tests.helpers:Vowels"}],
                       "model": {"name": "x"}, "curriculum": {"part": "right"}})
    number, vowels = make_task(config).members
    assert (number.criterion, number.overridden) == ({"right": 0.5}, True)
    assert (vowels.criterion, vowels.overridden) == ({"vowels": 0.5}, False)


def test_words_change_single_tasks(tmp_path):
    file = tmp_path / "mix.yaml"
    file.write_text("model: {name: x}\ntasks: [digits, {name: grounding, label: scenes, drawn: true, "
                    "data: {train: a.jsonl}}]\n")
    found = load(file, ["tasks.0.weight=2", "tasks.1.data.root=b"])
    assert found.shares == {"digits": 2, "scenes": 1} and found.tasks[1].data.root == "b"
    with pytest.raises(ConfigError, match=r"tasks\.2: tasks has 2 items, counted from 0"):
        load(file, ["tasks.2.weight=1"])
    alone = load(file, ["task=scenes", "task.rewards.iou=2"])
    assert (alone.task.name, alone.tasks, alone.data.train) == ("grounding", (), "a.jsonl")
    assert alone.task.model_extra == {"drawn": True} and alone.task.rewards == {"iou": 2}
    with pytest.raises(ConfigError, match=r"task='scene'.*Did you mean 'scenes'.*Its labels: digits, scenes"):
        load(file, ["task=scene"])
    assert load(file, ["tasks=null", "task=qa"]).task.name == "qa"
    child = tmp_path / "child.yaml"
    child.write_text("extends: mix.yaml\ntasks: [qa]\n")
    assert load(child).task_name == "qa"  # a list replaces a list
    child.write_text("extends: mix.yaml\ntask: qa\n")
    with pytest.raises(ConfigError, match="are both set"):
        load(child)
