"""Advantages of real groups: what is gathered, greedy baselines, KL in the reward, halves that forget."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.e2e.runs import ROOT, finished, metrics, write_config
from tests.engine.scripted import ScriptedEngine
from tests.helpers import credited_groups, load
from tests.helpers import settings as made_settings
from tests.rollout.test_group_source import Number, encode
from tests.tables import each
from vlrl import curriculum
from vlrl.algo.algorithm import Algorithm
from vlrl.config import load as load_config
from vlrl.config import validate
from vlrl.errors import ConfigError
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.generate import RolloutGenerator
from vlrl.rollout.group_source import GroupSource
from vlrl.store import RunFolder
from vlrl.training.advantages import Credit


def credited(script, steps=1, prompts=2, **settings):
    """The groups of the last step, and the Credit that made them."""
    config = validate({"task": "x", "model": {"name": "x"}, "rollout": {"group_size": 3}, **settings})
    task = Number()
    task.name = "number"
    samples = task.samples("train")
    algorithm = Algorithm(config)
    sampler = curriculum.Sequential(curriculum.Prompts(len(samples), 0))
    generator = RolloutGenerator(config, task, ScriptedEngine(script), Clock(), algorithm)
    source, credit = GroupSource(generator, encode, sampler, samples), Credit(algorithm, config, task=task)
    groups = []
    for step in range(steps):
        groups = credit(source.next_groups(prompts, step), step)
    return groups, credit


def right_after(first):
    """Answers: the first `first` ones wrong, of rising length."""
    return lambda prompt, i: "wrong" + "!" * i if i < first else prompt.text


def advantages(groups):
    return [[r.advantage for r in g.rollouts] for g in groups]


def test_the_stored_reward_is_what_the_task_paid():
    groups, credit = credited(right_after(1), algo={"advantage": "dr_grpo", "shaping": [
        {"name": "overlong", "limit": 5, "buffer": 4}]})
    # "wrong" has 5 tokens and loses 1, a digit none
    assert [g.rewards for g in groups] == [[0.0, 1.0, 1.0]] * 2
    assert advantages(groups) == [pytest.approx([-4 / 3, 2 / 3, 2 / 3])] * 2
    assert credit.metrics() == {"reward/shaped": pytest.approx(1 / 3)}


def test_the_greedy_answer_is_the_baseline_and_in_no_group():
    asked = []
    def script(prompt, i):
        asked.append(i)
        return "wrong" if i else prompt.text
    groups, _ = credited(script, algo={"advantage": "remax"})
    assert asked == [0, 1, 2] * 2 + [0] * 2
    for g in groups:
        assert g.rewards == [1.0, 0.0, 0.0] and [r.advantage for r in g.rollouts] == [0.0, -1.0, -1.0]
        (greedy,) = g.aside
        assert greedy.variant == "greedy" and greedy.reward == 1.0 and greedy.index == 3
    groups, _ = credited(script)
    assert not any(g.aside for g in groups)


def test_advantages_per_token_and_left_out_rollouts():
    groups, _ = credited(right_after(2), algo={"advantage": "tempo"})
    for g in groups:
        first, second, _ = (r.advantage for r in g.rollouts)
        assert isinstance(first, np.ndarray) and first.shape == (5,) and second.shape == (6,)
        assert first[0] == second[0] and np.allclose(first[:5], second[:5])
    groups, _ = credited(right_after(2), algo={"batch": {"name": "rorecomp", "decay": 1}}, steps=3)
    assert [[r.trained for r in g.rollouts] for g in groups] == [[False, True, True]] * 2


def test_a_state_goes_into_the_checkpoint(tmp_path):
    settings = {"algo": {"advantage": {"name": "ema_std", "decay": 0.5}}}
    _, credit = credited(right_after(1), steps=3, **settings)
    state = credit.algorithm.advantage.state_dict()
    m = 2 / 3  # the mean of 0 1 1, in every step
    assert state == {"moments": {"number": [pytest.approx(m), pytest.approx(m)]}}


def test_an_own_function_sees_all_of_the_step(tmp_path):
    """What a function requires is there; its rewards are in the order of the groups."""
    (tmp_path / "own.py").write_text('''
from vlrl.algo.inputs import requires

@requires("tokens", "texts")
def seen(s, scale: float = 1.0):
    assert [len(t) for t in s.tokens] == s.lengths.tolist() == [len(t) for t in s.texts]
    assert s.task_names == ["number"] and s.max_length == 512 and s.step == 0
    assert s.part_weights["right"].tolist() == [1.0] * 6 and not s.truncated.any()
    return scale * s.group.double() + s.parts["right"]
''')
    groups, _ = credited(right_after(1), algo={"advantage": {"name": f"{tmp_path}/own.py:seen", "scale": 10}})
    assert advantages(groups) == [[0, 1, 1], [10, 11, 11]]


def test_an_own_function_that_fails_is_named(tmp_path):
    for number, (body, says) in enumerate((("s.rewards[:2]", "returned 2 values for 6 rollouts"),
                                           ("s.reward", "own2.py:1: AttributeError"), ("1.0", "TypeError")), 1):
        (tmp_path / f"own{number}.py").write_text(f"def seen(s): return {body}\n")
        with pytest.raises(ConfigError, match=f"algo.advantage='{tmp_path}/own{number}.py:seen'.*{says}"):
            credited(right_after(1), algo={"advantage": f"{tmp_path}/own{number}.py:seen"})


@each("algorithm says", [
    ({"advantage": "gdpo", "shaping": ["overlong"]}, "algo.advantage='gdpo' reads the reward parts.*'overlong'"),
    ({"advantage": "gdpo", "kl_coef": 0.1, "kl_in": "reward"}, "algo.kl_in=reward would have no effect"),
    ({"advantage": {"name": "w_reinforce", "part": "rihgt"}}, "algo.advantage.part='rihgt'.*Did you mean 'right'"),
    ({"shaping": [{"name": "dast", "part": "iou"}]}, "algo.shaping.0.part='iou': task 'number'"),
    ({"advantage": {"name": "ema_std", "decay": 1.0}}, "algo.advantage.decay=1.0"),
    ({"batch": "rorecmp"}, "algo.batch='rorecmp' is not known.*Did you mean 'rorecomp'"),
    ({"shaping": [{"name": "overlong", "bufer": 4}]}, "Did you mean 'buffer'"),
])
def test_wrong_settings_are_named(algorithm, says):
    with pytest.raises(ConfigError, match=says):
        credited(right_after(1), algo=algorithm)


def test_forgetting_needs_a_correction_and_a_size():
    def found(algo):
        return validate({"task": "x", "model": {"name": "x"}, "algo": algo, "rollout": {"forget": {"lr": 1e-3}}})
    with pytest.raises(ConfigError, match=r"rollout\.forget\.lr=0\.001 .*Set algo\.correction=token_truncate"):
        found({})
    for algo in ({"correction": "token_truncate"}, {"correction": "none"},
                 {"loss": {"name": "vespo", "from_sampler": True}}, {"loss": "mine.py:loss"}):
        assert validate(found(algo).model_dump(mode="json")).rollout.forget.lr == 1e-3
    found = load_config(ROOT / "configs" / "quickstart.yaml", ["extends=algorithms/eepo.yaml"])
    assert found.algo.correction.name == "token_truncate" and 0 < found.rollout.forget.entropy < 1
    with pytest.raises(ConfigError, match=r"rollout\.forget\.entropy=0\.3 has no effect"):
        validate({"task": "x", "model": {"name": "x"}, "rollout": {"forget": {"entropy": 0.3}}})


@each("advantage", ["rloo", "reinforce_pp"])
def test_a_log_probability_that_the_engine_does_not_know_has_no_kl_in_the_reward(tiny_models, advantage):
    config = made_settings(tiny_models["qwen3_vl"], algo={"advantage": advantage, "kl_coef": 0.5, "kl_in": "reward"})
    policy, encode = load(config)
    policy.keep_reference()
    groups = credited_groups(policy, encode, config, ("text",))
    def known(c, first):
        return replace(c, logprobs=np.array([first, *c.logprobs[1:]], np.float32))
    credit, first = Credit(Algorithm(config), config, policy), groups[0].rollouts[0]
    reference = credit.reference.logprobs([groups[0].prompt], [first.completion], 1.0)[0][0]
    found = []
    for value in (math.nan, reference):
        changed = replace(first, completion=known(first.completion, value))
        done = credit([replace(groups[0], rollouts=(changed, *groups[0].rollouts[1:]))], 0)
        found.append(np.concatenate([np.atleast_1d(r.advantage) for r in done[0].rollouts]))
        assert math.isfinite(credit.metrics()["kl"])
    assert np.isfinite(found[0]).all() and found[0] == pytest.approx(found[1])


@pytest.mark.slow
def test_kl_in_the_reward_is_that_of_rloo(tiny_models):
    """R - coef * sum over trained tokens of log p - log p(reference), whatever prompt an answer was drawn under."""
    config = made_settings(tiny_models["qwen3_vl"], algo={"advantage": "rloo", "kl_coef": 0.5, "kl_in": "reward"},
                           rollout={"group_size": 3, "max_new_tokens": 8, "temperature": 0.7})
    policy, encode = load(config)
    policy.keep_reference()
    with torch.no_grad():
        for _, p in policy.trainable():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    groups = [replace(g, rollouts=tuple(  # their first tokens are those of an earlier step, which are not trained
        replace(r, completion=replace(r.completion, loss_mask=np.arange(len(r.completion.tokens)) > 1))
        for r in g.rollouts)) for g in credited_groups(policy, encode, config, ("text", "image"))]
    elsewhere = [replace(groups[0], rollouts=tuple(  # said to be drawn under another prompt: its logprobs do not count
        replace(r, train_prompt=groups[0].prompt, completion=replace(r.completion, logprobs=r.completion.logprobs - 9))
        for r in groups[0].rollouts)), groups[1]]
    credit = Credit(Algorithm(config), config, policy)
    found = [credit(groups, 0), credit(elsewhere, 0)]
    assert credit.metrics()["kl"] > 1e-3
    for i, (g, mine, moved) in enumerate(zip(groups, *found, strict=True)):
        prompts, answers = [g.prompt] * 3, [r.completion for r in g.rollouts]
        own, reference = (credit.reference.logprobs(prompts, answers, 0.7, own=o) for o in (True, False))
        sampled = [r.completion.logprobs for r in g.rollouts]
        for group, values in ((mine, sampled), (moved, sampled if i else own)):
            paid = np.array([r.reward - 0.5 * float((a - b)[r.completion.loss_mask].sum())
                             for r, a, b in zip(g.rollouts, values, reference, strict=True)])
            expected = paid - (paid.sum() - paid) / 2
            assert [r.advantage for r in group.rollouts] == pytest.approx(expected.tolist(), abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["remax", "reinforce_pp"])
def test_two_processes_give_the_same_advantages(tiny_models, tmp_path, algorithm):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    words = ["steps=1", "eval.samples=0", f"algo.advantage={algorithm}", "algo.batch=rorecomp",
             "rollout.forget.lr=1e-3", "algo.correction=token_truncate"]
    if algorithm == "reinforce_pp":
        words += ["algo.kl_in=reward", "algo.kl_coef=0.1"]
    for processes, name in ((1, "one"), (2, "two")):
        finished(config, tmp_path / name, *words, processes=processes)
    one, two = ({(r["group_id"], r["index"]): r for r in RunFolder(tmp_path / name).rollouts(0).to_pylist()}
                for name in ("one", "two"))
    assert one.keys() == two.keys() and len(one) == 16 + 4 * (algorithm == "remax")
    for key, row in one.items():
        assert two[key]["completion"] == row["completion"] and two[key]["reward"] == row["reward"]
        assert two[key]["advantage"] == pytest.approx(row["advantage"], abs=1e-5)
    first, second = metrics(tmp_path / "one")[0], metrics(tmp_path / "two")[0]
    assert second["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
