"""One word, one meaning: the rule's outcome and the configured one, rewards and what the advantage reads of them."""

import numpy as np
import pytest

from tests.helpers import credited_groups, load, settings
from tests.services.stub import PLACE, count_of, judging, says
from tests.services.test_parts import ROW, number, task_of
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.curriculum import Draw, Outcome
from vlrl.curriculum.filters import KEEP
from vlrl.rewards.text import parse_answer
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.training.advantages import Credit
from vlrl.training.update import make_optimizer, update
from vlrl.types import Completion, Group, Prompt, Rollout, Sample

AGREES = says(lambda q, body: {"verdict": "yes" if number(q["answer"]) == number(q["reference"]) else "no"})


def preference(rewards, lengths=None, correct=None, parts=None, **settings):
    """Credit.has_signal of one group with these rewards, under these settings."""
    config = configs.validate({"task": {"name": "grounding"}, "model": {"name": "x"},
                               "rollout": {"max_new_tokens": 10}, **settings})
    def completion(n):
        ones = np.ones(n, dtype=np.int64)
        return Completion(tokens=ones, logprobs=-ones.astype(np.float32), loss_mask=ones.astype(bool), text="x" * n,
                          finish_reason="stop")
    ids = np.arange(3)
    prompt = Prompt(sample_id="1", text="?", ids=ids, raw_ids=ids, positions=ids[None])
    written = map(completion, lengths or [3] * len(rewards))
    rollouts = tuple(Rollout(group_id="g", index=i, policy_step=0, completion=done, reward=reward,
                             parts={"p": reward} if parts is None else parts[i],
                             correct=None if correct is None else correct[i])
                     for i, (done, reward) in enumerate(zip(written, rewards, strict=True)))
    group = Group(id="g", split="train", sample=Sample(id="1", row={}), prompt=prompt, rollouts=rollouts, task="t",
                  weights=dict.fromkeys(rollouts[0].parts, 1.0), target=None)
    return Credit(Algorithm(config), config).has_signal(group)


def rewards_of(judge, task, texts):
    sample = task.sample_from_row(ROW)
    return [s.reward for s in score_group(task, sample, [parse_answer(t) for t in texts], 2,
                                          Services(given={"judge": judge.at(PLACE)}))]


def test_outcomes_of_rule_judge_and_curriculum_are_told_apart(tmp_path):
    """curriculum.pass_at above every value: the cascade still has no question about an answer that the rule pays."""
    task = task_of("cascade", rewards={"format": 0})
    task.override_outcome(None, 7.0)
    with judging(says(lambda q, body: {"verdict": "no"}), tmp_path) as (server, judge):
        assert rewards_of(judge, task, ["<answer>4</answer>"]) == [pytest.approx(1.0)] and count_of(server) == 0
    task, plain = task_of("judge"), task_of()
    most = score_group(plain, plain.sample_from_row(ROW), [parse_answer("<answer>4</answer>")], 2)[0].reward
    with judging(AGREES, tmp_path) as (_, judge):
        right, by_judge, wrong = rewards_of(judge, task, ["<answer>4</answer>", "<answer>four</answer>",
                                                          "<answer>5</answer>"])
    assert right == pytest.approx(most) and by_judge == pytest.approx(most) and wrong < right


def test_groups_are_kept_by_shaped_rewards_the_outcome_or_right_answers():
    """nsr learns from wrong answers alone: a group of right ones that differ by the format teaches it nothing."""
    assert preference([1, 1], lengths=[2, 10], algo={"shaping": ["overlong"]}) is True
    assert preference([1, 1], lengths=[2, 3], algo={"shaping": ["overlong"]}) is False
    assert preference([1.0, 1.1], correct=[True, True], algo={"advantage": "nsr"}) is False
    assert preference([0.0, 1.1], correct=[False, True], algo={"advantage": "nsr"}) is True
    for rewards, passed, kept in (([0.1, 1.1, 0.0], [False, True, False], True), ([1.1, 1.0], [True, True], False),
                                  ([0.1, 0.0, 0.0], [False, False, False], False),  # the format alone differs
                                  ([None, 1.0], [None, True], False),
                                  ([0.3, 0.6], [None, None], True)):  # no outcome is known: by the rewards
        assert KEEP["some_right"](Outcome(Draw(0, 0), tuple(rewards), tuple(passed))) is kept, (rewards, passed)


def test_gradient_norm_is_the_mean_and_the_largest_of_all_passes(tiny_models):
    """Two passes over one batch are two optimizer steps: the first norm is not forgotten."""
    short = {"max_new_tokens": 8, "group_size": 4}
    config = settings(tiny_models["qwen3_vl"], rollout={"updates": 2, **short}, train={"lr": 0.05})
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config)
    once = settings(tiny_models["qwen3_vl"], rollout=short, train={"lr": 1e-12})
    first, _ = update(policy, make_optimizer(policy, once), groups, once, 0)
    both, _ = update(policy, make_optimizer(policy, config), groups, config, 0)
    second = 2 * both["grad_norm"] - first["grad_norm"]
    assert second != pytest.approx(first["grad_norm"], rel=1e-3)
    assert both["grad_norm/max"] == pytest.approx(max(first["grad_norm"], second), rel=1e-4)
