"""Preferences on given pairs: what a group of a pair is, its loss, and a round of rejection sampling that learns it."""

import json
import math

import numpy as np
import pytest
import torch

from tests.conftest import TWO
from tests.helpers import load, settings
from tests.training.test_guided import assert_preferred
from tests.training.test_update import gradients
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.config.base import Named
from vlrl.curriculum import Draw
from vlrl.errors import ConfigError, DataError
from vlrl.methods.preferences import dpo as preferences
from vlrl.methods.preferences.dpo import PreferenceSource, preference_config
from vlrl.methods.second_attempts.members import second_attempts
from vlrl.rollout.draws import DrawBatch
from vlrl.rollout.generate import AcceptedDraw
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.tools.stages import rounds
from vlrl.training.advantages import Credit
from vlrl.types import Sample

ROWS = [("aa", "bb bb bb"), ("c", "d e f")]


class Pairs(Task):
    prompt = "Say {n}."

    def samples(self, split):
        return [Sample(id=str(n), row={"n": n, "solution": better, "rejected": worse})
                for n, (better, worse) in enumerate(ROWS)]


@pytest.fixture(scope="module")
def scene(tiny_models):
    config = preference_config(settings(tiny_models[TWO[0]], train={"max_grad_norm": 1e9, "tokens_per_batch": 10**6}),
                    Named(name="dpo", beta=0.3))
    policy, encode = load(config)
    policy.keep_reference()
    with torch.no_grad():  # the policy has moved on from its reference
        for i, (_, p) in enumerate(policy.trainable()):
            p.add_(0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i)))
    return policy, encode, config


def groups_of(scene, task):
    policy, encode, config = scene
    source = PreferenceSource.__new__(PreferenceSource)
    source.task, source.encode, source.engine, source.config, source.step = task, encode, None, config, 0
    asked = [AcceptedDraw(i, Draw(i, 0), s, encode(task, s)) for i, s in enumerate(task.samples("train"))]
    made = source._answer(DrawBatch({a.number: a.draw for a in asked}, len(asked), accepted=asked), None)
    return Credit(Algorithm(config), config, policy, task)([*made.values()], 0)


def test_a_group_holds_the_rejected_answer_and_the_preferred_one_beside_it(scene):
    groups = groups_of(scene, Pairs())
    assert [g.rollouts[0].completion.text for g in groups] == [worse for _, worse in ROWS]
    assert [[r.completion.text for r in second_attempts(g)] for g in groups] == [[better] for better, _ in ROWS]
    assert all(g.rollouts[0].advantage == 0 and g.rollouts[0].correct is False for g in groups)
    assert all(np.isnan(r.completion.logprobs).all() for g in groups for r in (*g.rollouts, *g.aside))
    class Half(Pairs):
        def samples(self, split):
            return [Sample(id="a", row={"n": 1, "solution": "x"})]
    with pytest.raises(DataError, match="sample 'a' has no rejected answer"):
        groups_of(scene, Half())


def test_the_gradient_is_that_of_the_preference_alone(scene):
    policy, _, config = scene
    groups = groups_of(scene, Pairs())
    (found,), stats, _ = gradients(policy, groups, config)
    pairs = [(g.prompt, g.aside[0].completion, g.rollouts[0].completion) for g in groups]
    assert_preferred(policy, pairs, found, stats)
    assert stats["guided/attempts"] == 2 and stats["mismatch/kl"] == 0 and stats["loss"] == pytest.approx(0.0, abs=1e-6)


def test_other_ways_to_learn_are_refused():
    config = configs.load("configs/quickstart.yaml", ["rounds.learn=ppo"])
    with pytest.raises(ConfigError, match=r"rounds\.learn='ppo' is not known"):
        rounds.check(config)
    with pytest.raises(ConfigError, match=r"rounds\.learn\.beta"):
        rounds.check(configs.load("configs/quickstart.yaml", ["rounds.learn=dpo", "rounds.learn.beta=-1"]))


TASK = '''
from vlrl.task import Task
from vlrl.types import Sample

class Words(Task):
    """Answers of even length are right."""
    prompt = "Letter {n}?"
    rewards = outcome = {"right": 1.0}

    def samples(self, split):
        return [Sample(id=f"{split}-{n}", row={"n": n}) for n in range(6)]

    def score(self, sample, answer):
        return {"right": float(len(answer.text) % 2 == 0)}
'''


@pytest.mark.slow
def test_a_round_learns_to_prefer_short_answers(tiny_models, tmp_path):
    (tmp_path / "words.py").write_text(TASK)
    file = tmp_path / "words.yaml"
    file.write_text(f"task: {tmp_path}/words.py:Words\nmodel: {{name: {tiny_models[TWO[0]]}, train: [language]}}\n"
                    "train: {lr: 1.0e-3, schedule: constant, warmup: 0}\neval: {samples: 0}\n"
                    "rollout: {prompts_per_step: 4, max_new_tokens: 12, stop: [e, a]}\n"
                    "rounds: {count: 1, prompts: 6, answers: 8, choose: shortest, learn: {name: dpo, beta: 0.5}, "
                    "longer: 1.0}\nsteps: 6\nlog: {samples_every: 0}\n")
    config = configs.load(file, [f"run.dir={tmp_path / 'run'}"])
    rounds.check(config)
    assert rounds.train_rounds(config)
    folder = tmp_path / "run" / "round-01"
    rows = [json.loads(line) for line in (folder / "rows.jsonl").read_bytes().splitlines()]
    assert rows and all(r["rejected_tokens"] > r["tokens"] and r["rejected"] != r["solution"] for r in rows)
    losses = [line["guided/loss"] for line in RunFolder(folder).metrics()]
    assert losses[0] == pytest.approx(math.log(2), rel=1e-4) and losses[-1] < losses[0]
    assert preferences.preference_config(config, Named(name="dpo")).algo.guided.loss.name == "dpo"
