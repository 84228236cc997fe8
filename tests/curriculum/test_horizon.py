"""How many turns an episode of training may have: the rules by hand, what is refused, and that they go on."""

from dataclasses import replace

import pytest

from tests.curriculum.drives import outcome
from tests.environments.acting import Acting, Plain
from vlrl.config.episodes import EpisodeSettings
from vlrl.curriculum import Draw
from vlrl.curriculum.horizon import Horizon, check
from vlrl.errors import ConfigError
from vlrl.methods.curricula.horizons import Success, add, multiply

OWN = """
def back(step, start: int = 9):
    return start - step

def half(step):
    return step / 2
"""


def settings(horizon, most=6):
    return EpisodeSettings(max_turns=most, horizon=horizon)


def told(horizon, turns, *rates):
    """Groups of episodes that might have so many turns, at these pass rates."""
    horizon.observe([replace(outcome(Draw(i, 0, max_turns=turns), rate), is_episode=True)
                     for i, rate in enumerate(rates)])


def turns(horizon, step):
    """How many turns the draws of a step may have."""
    draws = horizon.within([Draw(3, 1, group_size=4), Draw(5, 0)], step)
    assert [(d.index, d.visit, d.group_size) for d in draws] == [(3, 1, 4), (5, 0, None)]
    (found,) = {d.max_turns for d in draws}
    return found


def test_it_grows_by_the_step_and_never_beyond_all():
    assert [add(step, start=2, every=3) for step in range(8)] == [2, 2, 2, 3, 3, 3, 4, 4]
    assert [add(step, start=1, every=2, by=3) for step in range(6)] == [1, 1, 4, 4, 7, 7]
    assert [multiply(step, start=2, every=2) for step in range(7)] == [2, 2, 4, 4, 6, 6, 8]
    horizon = Horizon(settings({"name": "multiply", "start": 2, "every": 2}, most=5))
    assert [turns(horizon, step) for step in (0, 1, 2, 3)] == [2, 2, 4, 4]
    assert turns(horizon, 4) is turns(horizon, 99) is None  # episode.max_turns
    horizon = Horizon(settings(None))
    assert turns(horizon, 0) is None
    told(horizon, None, 1.0)
    assert horizon.metrics() == {} == horizon.state_dict()


def test_it_grows_with_the_success_of_episodes_of_that_length():
    horizon = Horizon(settings({"name": "success", "start": 2, "at": 0.5, "window": 3, "by": 3}))
    told(horizon, 2, 1.0, 1.0)
    assert turns(horizon, 9) == 2  # too few
    told(horizon, 2, 0.0, 0.4, 1.0)  # of the last three .4667
    assert turns(horizon, 0) == 2
    told(horizon, 2, 0.1)  # .4, 1, .1: exactly one half
    assert turns(horizon, 0) == 5
    told(horizon, 2, 1.0, 1.0, 1.0)  # begun before: says nothing of five turns
    assert turns(horizon, 0) == 5
    horizon.observe([outcome(Draw(i, 0, max_turns=5), 1.0) for i in range(3)])  # single answers of a mixture
    assert turns(horizon, 0) == 5
    told(horizon, 5, 0.5, None, 0.5, 0.5)  # a rejected prompt counts for nothing
    assert turns(horizon, 0) is None
    horizon = Horizon(settings({"name": "success", "start": 2, "window": 1}))
    assert horizon.metrics() == {}  # no episode so far
    told(horizon, 2, 1.0)
    assert horizon.metrics() == {"episode/horizon": 2} and turns(horizon, 1) == 3
    told(horizon, None, 1.0)
    assert horizon.metrics() == {"episode/horizon": 6}
    horizon.observe([outcome(Draw(0, 0, max_turns=3), 1.0)])
    assert horizon.metrics() == {"episode/horizon": 6}
    rule = Success(start=2)
    assert (rule.at, rule.by, rule.recent.maxlen) == (0.5, 1, 64)


def test_it_goes_on_exactly_and_another_rule_begins_anew():
    rule = {"name": "success", "start": 1, "window": 3, "at": 0.6}
    for cut in range(1, 7):
        whole, first = Horizon(settings(rule)), Horizon(settings(rule))
        for i, rate in enumerate([0.9, 0.3, 0.7, 0.8, 0.9, 0.5, 0.7, 0.9]):
            if i == cut:
                again = Horizon(settings(rule))
                again.load_state_dict(first.state_dict())
                first = again
            for horizon in (whole, first):
                told(horizon, turns(horizon, i), rate)
            assert turns(whole, i + 1) == turns(first, i + 1)
        assert whole.state_dict() == first.state_dict() != Horizon(settings(rule)).state_dict()
    before = Horizon(settings({"name": "success", "start": 2}))
    horizon = Horizon(settings({"name": "add", "start": 3, "every": 1}))
    horizon.load_state_dict(before.state_dict())
    assert turns(horizon, 1) == 4


def test_a_rule_of_your_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    horizon = Horizon(settings({"name": f"{tmp_path}/own.py:back", "start": 4}))
    assert [turns(horizon, step) for step in (0, 2, 3, 9)] == [4, 2, 1, 1]  # at least one
    with pytest.raises(ConfigError, match=r"own.py:half' returned 0.5 at step 1: it must return a whole number"):
        Horizon(settings(f"{tmp_path}/own.py:half")).at(1)


def test_what_cannot_be_is_refused():
    for rule, message in (
            ("addd", "episode.horizon='addd'.*Did you mean 'add'"), ("add", "needs a value for episode.horizon.start"),
            ({"name": "add", "start": 2, "evry": 3}, "evry=3: 'add' has no option 'evry'. Did you mean 'every'"),
            ({"name": "multiply", "start": 0, "every": 3}, "episode.horizon.start=0"),
            ({"name": "success", "start": 2, "at": 0}, "episode.horizon='success': at=0 must be a pass rate"),
            ({"name": "success", "start": 2, "at": 1.5}, "at=1.5 must be a pass rate"),
            ({"name": "add", "start": 6, "every": 3}, "begins with 6 turns, which is not below episode.max_turns=6.*"
             "lower episode.horizon.start"), ({"name": "success", "start": 9}, "begins with 9|begins with 6")):
        with pytest.raises(ConfigError, match=message):
            check(settings(rule), Acting())
    rule = {"name": "add", "start": 2, "every": 3}
    check(settings(rule), Acting())
    check(settings(None), Plain())
    with pytest.raises(ConfigError, match=r"horizon=.add.*has no environment and no tools.*set episode.horizon=null"):
        check(settings(rule), Plain())
