"""Prompts that are rejected (too long, media that cannot be read) do not take over the draws; outcomes that come late
count for the stage that drew them."""

import numpy as np
import pytest

from tests.curriculum.drives import told
from vlrl.curriculum import SAMPLERS, Draw, Outcome, Prompts
from vlrl.curriculum.history import History

KINDS = ["good"] * 12 + ["long"] * 4
BAD = frozenset(range(12, 16))


def prompts():
    fields = {"category": KINDS, "angle": [i / 16 for i in range(16)]}
    return Prompts(16, 3, lambda name: fields.get(name, [None] * 16))


def run(name, steps, rate=1.0, **options):
    """The sampler, its prompts, and the draws of `steps` steps of 4, in which all `BAD` ones are rejected."""
    of = prompts()
    sampler = SAMPLERS[name](of, **options)
    draws: list[Draw] = []
    for step in range(steps):
        new = sampler.next(4, step)
        told(sampler, of, {d: None if d.index in BAD else rate for d in new}, step)
        draws += new
    return sampler, of, draws


def test_the_history_knows_what_was_rejected():
    history = History(5)
    answered, refused, unscored = (Outcome(Draw(i, 0), r) for i, r in enumerate([(1.0,), (), (None, None)]))
    history.note([answered, refused, unscored], 3)
    assert history.rejected.tolist() == [i == 1 for i in range(5)] and history.visited.tolist() == [True, *[False] * 4]
    history.note([Outcome(Draw(0, 1), ()), Outcome(Draw(1, 1), (0.0,))], 4)
    assert not history.rejected.any() and history.last.tolist() == [3, 4, -1, -1, -1]


def test_rejected_prompts_do_not_take_over():
    for name, options in (("prioritised", {}), ("rlcs", {}), ("gaussian", {}),
                          ("hard_focus", {"after": 4, "share": 0.25}), ("dump", {}), ("domain_weighted", {"tau": 0.1}),
                          ("sws", {}), ("gain_rl", {})):
        _, of, draws = run(name, 60, 1.0, **options)
        assert {*np.flatnonzero(of.history.rejected).tolist()} <= BAD, name
        refused = [d.index in BAD for d in draws]
        assert np.mean(refused[40:]) <= 0.26, f"{name}: no more of them than uniform sampling draws"


def test_draws_go_on_when_all_were_rejected():
    for name in ("prioritised", "rlcs", "gaussian", "hard_focus", "dump", "sec"):
        of = prompts()
        sampler = SAMPLERS[name](of)
        for step in range(9):
            draws = sampler.next(10, step)
            assert len({d.index for d in draws}) == 10, name
            told(sampler, of, dict.fromkeys(draws), step)


def test_a_late_outcome_is_of_the_stage_that_drew_it():
    of = prompts()
    sampler = SAMPLERS["staged"](of, [{"steps": 1}, {"reward": 0.9}, {}], window=2)
    late = sampler.next(2, 0)
    told(sampler, of, dict.fromkeys(sampler.next(2, 1), 0.0), 1)
    told(sampler, of, dict.fromkeys(late, 1.0), 1)  # groups that went on in the next step
    assert sampler.metrics()["curriculum/stage_reward"] == 0
    sampler.next(2, 2)
    assert sampler.metrics()["curriculum/stage"] == 2


def test_an_item_that_stays_the_same_for_long_does_not_rise():
    sampler = SAMPLERS["sws"](prompts())
    for step in range(400):
        sampler.observe([Outcome(Draw(0, step), (1.0, 0.0, 0.0), (True, False, False))], step)
        assert sampler.failures()[0] == pytest.approx(2 / 3)
