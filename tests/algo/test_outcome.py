"""Which rollouts count as correct: what their task says, in advantages, shaping, losses and token weights alike."""

from dataclasses import replace

import pytest
import torch

from tests.algo.flat import bound, flat, gradient, run
from tests.algo.made import scores
from tests.helpers import credited_groups, load, settings
from tests.training.test_update import Recorder
from vlrl.algo import grouped
from vlrl.algo.tables import LOSSES, WEIGHTS
from vlrl.methods.objectives.advantage import w_reinforce
from vlrl.methods.objectives.group_terms import Oreal, nft
from vlrl.methods.objectives.recompose import rorecomp
from vlrl.methods.objectives.shaping import cosine, dast, grsp, kimi_length, length_bonus, step_pruner
from vlrl.training.advantages import credit
from vlrl.training.update import update

REWARDS = [1.0, 1.0, 1.3, 1.9]
"""Format and a little, format and a little, a fair answer, a good one."""
OUTCOME = torch.tensor([False, False, True, True])


def step(**more):
    """A group of four rollouts of two tokens each."""
    return flat([-0.5, -1.0, -0.7, -0.2, -0.4, -0.9, -0.3, -0.6], rollout=[0, 0, 1, 1, 2, 2, 3, 3],
                rewards=REWARDS, group=[0, 0, 0, 0], **more)


def test_the_outcome_decides_not_the_reward():
    s = scores([REWARDS], outcome=OUTCOME)
    assert grouped.correct(s).tolist() == [False, False, True, True]
    assert w_reinforce(s).tolist() == [-1, -1, 0.1, 0.1]
    assert grouped.correct(s, above=1.5).tolist() == [False, False, False, True]  # an option overrides it
    assert grouped.correct(scores([REWARDS])).tolist() == [True] * 4  # nothing but rewards is known
    assert grouped.correct(scores([[0.5, 0.6]])).tolist() == [False, True]
    assert step(outcome=OUTCOME).correct(1.5).tolist() == [False, False, False, True]
    s = scores([[None, 1.0]], outcome=torch.tensor([True, True]))
    assert grouped.correct(s).tolist() == [False, True] and w_reinforce(s).tolist() == [0, 0.1]
    x = flat([-1.0, -1.0], rollout=[0, 1], rewards=[float("nan"), 0.0], group=[0, 0], outcome=[True, False])
    assert x.correct().tolist() == [False, False] and x.wrong().tolist() == [False, True]
    s = scores([REWARDS], outcome=OUTCOME, parts={"iou": [0.9, 0.1, 0.6, 0.2]})
    assert grouped.correct(s, "iou").tolist() == [True, False, True, False]


def test_nft_and_oreal_learn_by_the_outcome():
    blind, seeing = step(), step(outcome=OUTCOME)
    assert gradient(nft(blind)[0], blind) == [0.0] * 8
    # half are correct, so q = .5 and the group weighs 1 - q: -.5 on the right tokens, +.5 on the wrong ones
    assert gradient(nft(seeing)[0], seeing) == pytest.approx([0.5] * 4 + [-0.5] * 4, abs=1e-9)
    x = flat([-1.0, -1.0, -1.0], adv=[1.0, 1, 1], rollout=[0, 1, 2], rewards=[1.0, 1.0, float("nan")], group=[0, 0, 0],
             outcome=[True, False, False])
    assert gradient(run(bound({"oreal": Oreal}, "oreal"), x)[0], x) == pytest.approx([-3.0, -1.5, 0.0])


def test_terms_weights_shaping_and_batches_see_the_outcome():
    for name in ("pacs", "oreal", "simko"):
        more = {"adv": [-1.0, -1, -1, -1, 1, 1, 1, 1], "entropy": [1.0, 2] * 4, "stats": {
            "top:3": torch.tensor([[-0.1, -2, -3]] * 8, dtype=torch.float64)} if name == "simko" else {}}
        blind, seeing, term = step(**more), step(**more, outcome=OUTCOME), bound(LOSSES, name)
        assert gradient(run(term, blind)[0], blind) != gradient(run(term, seeing)[0], seeing), name
    for name in ("dads", "stcr"):
        mask = [1.0, 1, 1, 1, 1, 0, 1, 0]  # the right ones are shorter
        blind, seeing = (step(adv=[1.0] * 8, mask=mask, **more) for more in ({}, {"outcome": OUTCOME}))
        assert run(bound(WEIGHTS, name), blind).tolist() != run(bound(WEIGHTS, name), seeing).tolist(), name
    more = {"lengths": [2, 8, 4, 6], "texts": ["a", "a\n\nb", "a\n\nb\n\nc", "a"], "step": 5}
    blind, seeing = scores([REWARDS], **more), scores([REWARDS], **more, outcome=OUTCOME)
    for shape in (kimi_length, lambda s: length_bonus(s, low=1), cosine, dast, step_pruner, grsp,
                  lambda s: rorecomp(s, decay=1)):
        assert shape(blind).tolist() != shape(seeing).tolist()


SEEN = []


def recording(x):
    """A loss that notes what it sees."""
    SEEN.extend(x.outcome.tolist())
    return -x.logprobs * x.advantages, {}


def test_rollouts_bring_it_along(tiny_models):
    """From the task's verdict to the advantage and the loss."""
    config = settings(tiny_models["qwen2_5_vl"], algo={"loss": "tests.algo.test_outcome:recording"})
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config)
    assert all(r.correct is False for g in groups for r in g.rollouts)  # none is half vowels
    groups = [replace(g, rollouts=tuple(replace(r, correct=r.index == 1) for r in g.rollouts)) for g in groups]
    noted = []
    credit(groups, lambda s: noted.append(s.outcome) or s.rewards)
    update(policy, Recorder(policy), groups, config, step=0)
    expected = [r.correct for g in groups for r in g.rollouts]
    assert noted[0].tolist() == expected and sum(SEEN) > 0 and len(SEEN) >= len(expected)
