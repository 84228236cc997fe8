"""Draws by weight, what is known of prompts, which groups are kept, and prompts that are rejected."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.curriculum.drives import told
from tests.tables import each
from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum import SAMPLERS, Draw, Filters, Intake, Outcome, Prompts
from vlrl.curriculum.base import stream
from vlrl.curriculum.drawing import _BLOCK, Uniform, _found, weighted
from vlrl.curriculum.history import History

SIZES = (1, _BLOCK - 1, _BLOCK, _BLOCK + 1, 20 * _BLOCK + 7)


def some(size, dtype=np.float64):
    """Weights, a third of them 0."""
    found = stream(size).random(size)
    found[stream(size, 1).random(size) < 1 / 3] = 0
    found[-1] = 0.5
    return found.astype(dtype)


def test_a_place_is_where_the_running_sum_exceeds_the_number_and_none_comes_twice_while_others_are_left():
    for size in SIZES:
        weights = some(size)
        below = np.cumsum(np.add.reduceat(weights, np.arange(0, size, _BLOCK)))
        reach = stream(3).random(2000) * weights.sum()
        wanted = np.searchsorted(np.cumsum(weights), reach, side="right")
        assert _found(weights, below, reach).tolist() == wanted.tolist(), size
        positive = np.flatnonzero(weights)
        assert sorted(weighted(weights, len(positive), stream(6)).tolist()) == positive.tolist()
        counts = np.bincount(weighted(weights, 2 * len(positive) + 1, stream(7)), minlength=size)
        assert sorted({*counts[positive].tolist()}) == ([3] if len(positive) == 1 else [2, 3]) and counts.max() == 3


@each("dtype", [np.float32, np.float64])
def test_draws_follow_the_weights_over_several_blocks(dtype):
    weights, draw = some(5 * _BLOCK + 3, dtype), stream(5)
    found = np.bincount([int(weighted(weights, 1, draw)[0]) for _ in range(2000)], minlength=len(weights))
    parts = np.arange(len(weights)) // 20
    expected = np.bincount(parts, weights)
    assert chisquare(np.bincount(parts, found), expected / expected.sum() * 2000).pvalue > 1e-3
    assert not found[weights == 0].any()


def test_weights_that_cannot_be_are_refused():
    for weights in ([], [0.0, 0.0], [1.0, -1.0], [np.inf, 1.0], [np.nan, 1.0]):
        with pytest.raises(ValueError, match="the weights must be finite"):
            weighted(np.array(weights, dtype=np.float64), 2, stream(8))


def streamed(size, buffer, seed=0, epoch=0):
    prompts = Prompts(size, seed)
    prompts.buffer = buffer
    return Uniform(prompts).order(epoch)


@given(st.integers(1, 5000), st.integers(1, 6000), st.integers(0, 3))
def test_a_streamed_order_has_every_row_once(size, buffer, epoch):
    order = streamed(size, buffer, epoch=epoch)
    assert np.array_equal(np.sort(order), np.arange(size))
    assert np.array_equal(order, streamed(size, buffer, epoch=epoch))


def test_a_streamed_order_stays_near_the_disk_and_goes_on():
    size = 20_500
    assert np.count_nonzero(np.diff(streamed(size, 1)) != 1) <= 20  # runs, each as it lies there
    for buffer in (10, 1000, 3000):
        order = streamed(size, buffer)
        for begin in range(0, size, buffer):
            assert len(np.unique(order[begin:begin + buffer] // 1000)) <= -(-buffer // 1000) + 1
    assert [*streamed(50, 50, epoch=0)] != [*streamed(50, 50, epoch=1)] != sorted(streamed(50, 50, epoch=1))
    prompts = Prompts(2500, 7)
    prompts.buffer = 300
    whole = Uniform(prompts)
    every = [draw.index for _ in range(600) for draw in whole.next(7, 0)]
    begun = Uniform(prompts)
    first = [draw.index for draw in begun.next(1234, 0)]
    after = Uniform(prompts)
    after.load_state_dict(begun.state_dict())
    assert first + [d.index for d in after.next(2966, 0)] == every


def test_what_is_known_by_hand():
    history = History(4)
    assert history.visit([2, 0, 2, 2]) == [0, 0, 1, 2] and history.visit([2, 3]) == [3, 0]
    assert history.visits.tolist() == [1, 0, 4, 1]
    whole = History(5)
    whole.subset(np.array([3, 1])).visit([0, 0, 1])
    assert whole.visits.tolist() == [0, 1, 0, 2, 0]
    whole.note([Outcome(Draw(3, 0), (1.0, 0.0), (True, False))], 7)
    again = History(5)
    other = again.subset(np.array([3, 1]))
    again.load_state_dict(whole.state_dict())
    assert other.visits.tolist() == [2, 1] and other.last.tolist() == [7, -1] and other.reward[0] == 0.5


def group(number, passed, rewards=None):
    """Of a group: whether each answer is correct, and its rewards (those of `passed` where none are given)."""
    return Outcome(Draw(number, 0), tuple(map(float, passed)) if rewards is None else rewards, tuple(passed))


def filters(**settings):
    return Filters(CurriculumSettings(**settings))


GROUPS = [group(0, [1, 1, 1, 1]), group(1, [1, 1, 1, 0]), group(2, [1, 0, 0, 0]), group(3, [1, 1, 0, 0]),
          group(4, [0, 0, 0, 0])]


def test_what_is_unknown_counts_in_no_mean():
    outcome = Outcome(Draw(0, 0), (1.0, None, 0.5, 0.0), (True, None, None, False))
    assert (outcome.reward, outcome.pass_rate, outcome.mixed) == (0.5, 0.5, True)
    # |A| of 1, 0.5 and 0 over their deviation sqrt(1/6)
    assert outcome.advantage(scale=False) == pytest.approx(1 / 3)
    assert outcome.advantage() == pytest.approx(math.sqrt(6) / 3)
    none = Outcome(Draw(0, 0), (None, None), (None, None))
    assert math.isnan(none.reward) and math.isnan(none.pass_rate) and math.isnan(none.advantage())


def test_which_groups_are_kept_and_chosen():
    """Of equal ones (1 and 2) the first is chosen; in the order of their draws."""
    for keep, expected in (("all", [0, 1, 2, 3, 4]), ("mixed", [1, 2, 3]), ("pass_range", [1, 2, 3]),
                           ({"name": "pass_range", "low": 0.5, "high": 1.0}, [0, 1, 3])):
        intake = Intake(filters(keep=keep), 5)
        intake.take(dict(enumerate(GROUPS)))
        assert intake.selected == expected == intake.chosen(), keep
    for select, chosen in (("first", [0, 1]), ("nearest_half", [1, 3]), ("most_varied", [1, 3])):
        intake = Intake(filters(select=select), 2)
        intake.take(dict(enumerate(GROUPS)))
        assert intake.chosen() == chosen, select


def test_how_many_are_drawn():
    some = filters(keep="mixed", max_refills=2, oversample={"name": "fixed", "factor": 1.5})
    intake = Intake(some, 4)
    assert intake.wanted == 6  # the first round alone is oversampled
    intake.take({0: GROUPS[0], 1: GROUPS[1]}, underway=1)
    assert intake.wanted == 2  # of 4 one is kept and one goes on in the next step
    intake.take({2: Outcome(Draw(9, 0), ())}, underway=1)  # a rejected prompt makes no round
    intake.take({3: GROUPS[0]}, underway=0)
    assert (intake.wanted, intake.rounds, intake.refills) == (3, 2, 1)
    intake.take({4: GROUPS[4]})
    assert (intake.wanted, intake.refills) == (0, 2)  # two refills are all
    for count, factor, drawn in ((100, 1.1, 110), (10, 1.25, 13), (3, 4 / 3, 4), (50, 1.14, 57)):
        assert Intake(filters(oversample=factor), count).wanted == drawn  # no group more by rounding
    some = filters(oversample={"name": "ema", "decay": 0.75, "most": 4.0})
    some.oversample.observe(GROUPS[:2])  # one of two tells something: 0.25 * 2 + 0.75 * 1
    assert some.oversample.factor == pytest.approx(1.25) and some.oversampled(4) == 5
    some.oversample.observe(GROUPS[:1])  # none: as for the most
    assert some.oversample.factor == pytest.approx(0.25 * 4 + 0.75 * 1.25)


def test_groups_that_vary_little_beside_those_of_earlier_steps():
    """Standard deviations .5, .4 and .1; two steps are free, then half of the moving average of the steps' means is
    asked for: .45, then .75 * .45 + .25 * .25 = .4, then 0.34375 with a step of .1 and .2."""
    def spread(s):
        return Outcome(Draw(0, 0), (0.5 - s, 0.5 + s), (True, False))
    some = filters(keep={"name": "std_ema", "beta": 0.5, "decay": 0.75, "start": 2}, oversample={"name": "ema"})
    assert some.keep(spread(0.0)) and some.keep(spread(0.1))
    some.observe([spread(0.5), spread(0.4), Outcome(Draw(0, 0), (None,), (None,))])
    assert some.keep.function.mean == pytest.approx(0.45) and some.keep(spread(0.0))
    some.observe([spread(0.5), spread(0.0)])
    assert some.keep.function.mean == pytest.approx(0.4)
    assert [some.keep(spread(s)) for s in (0.0, 0.19, 0.2001, 0.5)] == [False, False, True, True]
    assert not some.keep(Outcome(Draw(0, 0), (None, None), (None, None)))
    again = filters(keep={"name": "std_ema", "beta": 0.5, "decay": 0.75, "start": 2}, oversample={"name": "ema"})
    again.load_state_dict(some.state_dict())
    again.observe([spread(0.1), spread(0.25)])
    assert again.keep.function.mean == pytest.approx(0.34375)
    assert again.oversample.factor == pytest.approx(some.oversample.factor * 0.9 + 0.1)
    assert [again.keep(spread(s)) for s in (0.171, 0.172)] == [False, True]
    plain = filters(keep="mixed")
    plain.observe(GROUPS)
    assert plain.state_dict() == {}


KINDS = ["good"] * 12 + ["long"] * 4
BAD = frozenset(range(12, 16))


def prompts():
    fields = {"category": KINDS, "angle": [i / 16 for i in range(16)]}
    return Prompts(16, 3, lambda name: fields.get(name, [None] * 16))


def run_of(name, steps, rate=1.0, **options):
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
        _, of, draws = run_of(name, 60, 1.0, **options)
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
