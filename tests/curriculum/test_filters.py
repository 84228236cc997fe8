"""What an outcome says, and which groups the filters keep, draw and choose, by hand."""

import math

import pytest

from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum import Draw, Filters, Intake, Outcome


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
