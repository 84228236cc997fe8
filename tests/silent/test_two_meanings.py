"""One word, one meaning: the rule's outcome and the configured one, rewards and what the advantage reads of them."""

import pytest

from tests.helpers import credited_groups, load, settings
from tests.services.stub import PLACE, count_of, judging, says
from tests.services.test_parts import ROW, number, task_of
from vlrl.rewards.text import parse_answer
from vlrl.task.scoring import score_group
from vlrl.task.services import Services

AGREES = says(lambda q, body: {"verdict": "yes" if number(q["answer"]) == number(q["reference"]) else "no"})


def rewards_of(judge, task, texts):
    sample = task.sample_from_row(ROW)
    return [s.reward for s in score_group(task, sample, [parse_answer(t) for t in texts], 2,
                                          Services(given={"judge": judge.at(PLACE)}))]


def test_threshold_of_the_curriculum_does_not_change_what_the_rule_calls_right(tmp_path):
    """curriculum.pass_at above every value: the cascade still has no question about an answer that the rule pays."""
    task = task_of("cascade", rewards={"format": 0})
    task.override_outcome(None, 7.0)
    with judging(says(lambda q, body: {"verdict": "no"}), tmp_path) as (server, judge):
        assert rewards_of(judge, task, ["<answer>4</answer>"]) == [pytest.approx(1.0)] and count_of(server) == 0


def test_a_verdict_beside_the_rule_does_not_pay_a_right_answer_twice(tmp_path):
    task, plain = task_of("judge"), task_of()
    most = score_group(plain, plain.sample_from_row(ROW), [parse_answer("<answer>4</answer>")], 2)[0].reward
    with judging(AGREES, tmp_path) as (_, judge):
        right, by_judge, wrong = rewards_of(judge, task, ["<answer>4</answer>", "<answer>four</answer>",
                                                          "<answer>5</answer>"])
    assert right == pytest.approx(most) and by_judge == pytest.approx(most) and wrong < right


def test_shaped_rewards_are_what_mixed_compares():
    """Equal raw rewards with a punishment of length are told apart; rewards that shaping makes equal are not."""
    from tests.silent.making import preference

    assert preference([1, 1], lengths=[2, 10], algo={"shaping": ["overlong"]}) is True
    assert preference([1, 1], lengths=[2, 3], algo={"shaping": ["overlong"]}) is False


def test_an_advantage_that_reads_the_outcome_is_asked_by_the_outcome():
    """nsr learns from wrong answers alone: a group of right ones that differ by the format teaches it nothing."""
    from tests.silent.making import preference

    assert preference([1.0, 1.1], correct=[True, True], algo={"advantage": "nsr"}) is False
    assert preference([0.0, 1.1], correct=[False, True], algo={"advantage": "nsr"}) is True


def test_groups_can_be_kept_by_right_answers_alone():
    from vlrl.curriculum import Draw, Outcome
    from vlrl.curriculum.filters import KEEP

    some = KEEP["some_right"]
    def group(rewards, passed):
        return Outcome(Draw(0, 0), tuple(rewards), tuple(passed))
    assert some(group([0.1, 1.1, 0.0], [False, True, False]))
    assert not some(group([0.1, 0.0, 0.0], [False, False, False]))  # the format alone differs
    assert not some(group([1.1, 1.0], [True, True]))
    assert not some(group([None, 1.0], [None, True]))
    assert some(group([0.3, 0.6], [None, None]))  # no outcome is known: by the rewards


def test_gradient_norm_is_the_mean_and_the_largest_of_all_passes(tiny_models):
    """Two passes over one batch are two optimizer steps: the first norm is not forgotten."""
    from vlrl.training.update import make_optimizer, update

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
