"""Stages (staged, retrospective) and horizons of episodes: what each has, when it ends, and what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.curriculum.drives import outcome, told
from tests.environments.acting import Acting, Plain
from tests.tables import each
from vlrl import curriculum
from vlrl.config.episodes import EpisodeSettings
from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum import Draw, ForeseeingSampler, Prompts
from vlrl.curriculum.horizon import Horizon, check
from vlrl.errors import ConfigError
from vlrl.methods.curricula.horizons import Success, add, multiply
from vlrl.methods.curricula.staged import Retrospective, Staged

ROWS = {"form": ["yes_no", "choice", "text", "yes_no", "choice", "number"], "length": [10, 20.5, 30, None, 50, 60],
        "deep": [True, 1, 0, False, None, "1"], "task": ["qa", "qa", "qa", "video", "video", "video"]}
FORMS = [{"where": {"form": "yes_no"}, "steps": 2}, {"where": {"form": "choice"}, "steps": 1},
         {"where": {"form": ["text", "number"]}}]
CARRYING = [{"where": {"form": ["yes_no", "choice"]}, "pass_rate": 0.4, "steps": 5, "group_size": 4},
            {"where": {"form": ["text", "number", "choice"]}, "carry": 0.5, "max_new_tokens": 9}]


def prompts(seed=0):
    return Prompts(6, seed, lambda name: ROWS.get(name, [None] * 6), stage_fields=("told", "level"))


def made(stages, seed=0, **options) -> Any:
    return curriculum.make(CurriculumSettings(name="staged", stages=stages, **options), prompts(seed))  # pyright: ignore


def drawn(sampler, count, step):
    return sorted(draw.index for draw in sampler.next(count, step))


def test_a_stage_sets_fields_and_sizes():
    sampler = made([{"fields": {"told": True, "level": 2}, "steps": 1}, {}])
    assert isinstance(sampler, ForeseeingSampler)
    assert {d.fields for d in sampler.upcoming(3, 0)} == {d.fields for d in sampler.next(3, 0)} == {
        (("level", 2), ("told", True))}
    assert {d.fields for d in sampler.upcoming(3, 1)} == {d.fields for d in sampler.next(3, 1)} == {()}
    sampler = made([{"max_new_tokens": 64, "group_size": 16, "steps": 1}, {"group_size": 4, "steps": 1}, {}])
    found = [sampler.next(1, step)[0] for step in range(3)]
    assert [(d.max_new_tokens, d.group_size) for d in found] == [(64, 16), (None, 4), (None, None)]


def test_a_stage_has_the_prompts_that_meet_its_conditions():
    for where, expected in (
            ({"form": "choice"}, [1, 4]), ({"form": ["text", "number"]}, [2, 5]),
            ({"task": "video", "form": "choice"}, [4]), ({"length": {"min": 20.5, "max": 50}}, [1, 2, 4]),
            ({"length": {"max": 20}}, [0]), ({"deep": True}, [0]), ({"deep": 1}, [1]), ({"deep": [0, "1"]}, [2, 5]),
            ({}, [0, 1, 2, 3, 4, 5])):
        sampler = made([{"where": where}])
        assert drawn(sampler, len(expected), 0) == expected and sampler.metrics()["curriculum/stage"] == 1, where


WRONG = [
    ([], r"curriculum.stages=\[\] is empty"),
    ([{"steps": 0}, {}], "stage 1: steps=0: Input should be greater"),
    ([{"steps": True}, {}], "stage 1: steps=True: give a number"),
    ([{"steps": 1}, {"stpes": 2}], "stage 2: stpes=2: not a key of a stage. Did you mean 'steps'"),
    ([{"steps": 1}, {"group_size": 1}], "stage 2: group_size=1"),
    ([{"where": {"length": {"least": 3}}}], "stage 1: where=.*length=.*a range needs min or max"),
    ([{"where": {"length": {"min": "3"}}}], "stage 1: where=.*a range needs min or max"),
    ([{"where": {"length": None}}], "stage 1: where=.*give a string"),
    ([{"fields": {"tld": True}}], r"stage 1: fields=.*cannot set the field 'tld' .*Did you mean 'told'.*told, level"),
    ([{"fields": {"told": [1]}}], "stage 1: fields.told"),
    ([{}, {}], "stage 1 never ends: give it steps, reward or pass_rate"),
    ([{"steps": 3}], "stage 1 is the last stage"),
    ([{"carry": 0.5}], "stage 1: carry=0.5: there is no earlier stage"),
    ([{"where": {"form": "yes"}}], "stage 1: where={'form': 'yes'} selects none of the 6 training rows. Change"),
    ([{"steps": 1}, {"where": {"kind": "yes"}}], "stage 2: where=.* selects none .*no row has the field 'kind'"),
    ("open", "curriculum.stages='open': Input should be a valid list")]


def test_a_stage_that_is_not_understood_is_refused():
    for stages, said in WRONG:
        with pytest.raises(ConfigError, match=said):
            made(stages)
    for option in ("window", "lowest"):
        with pytest.raises(ConfigError, match=f"curriculum.{option}=0"):
            made([{}], **{option: 0})
    with pytest.raises(ConfigError, match=r"needs a value for curriculum.stages"):
        curriculum.make(CurriculumSettings(name="staged"), prompts())


def test_a_stage_ends_after_its_steps():
    sampler = made(FORMS)
    assert [drawn(sampler, 2, step) for step in (5, 6, 7, 8, 9)] == [[0, 3], [0, 3], [1, 4], [2, 5], [2, 5]]
    assert sampler.metrics()["curriculum/stage"] == 3
    sampler, again = (made([{"where": {"form": "yes_no"}, "reward": 0.5}, {}], window=2) for _ in range(2))
    draws = sampler.next(2, 0)
    again.load_state_dict(sampler.state_dict())
    told(again, again.prompts, dict.fromkeys(draws, 1.0), 0)
    assert list(again.rewards) == [1.0, 1.0]
    sampler = made([{"where": {"form": "yes_no"}, "steps": 1}, {"where": {"form": "choice"}}])
    assert [drawn(sampler, 2, step) for step in (0, 0, 1)] == [[0, 3], [0, 3], [1, 4]]
    sampler = made([{"where": {"form": "yes_no"}, "reward": 0.5}, {"where": {"form": "choice"}}], window=2)
    told(sampler, sampler.prompts, dict.fromkeys(sampler.next(2, 0), 1.0), 0)
    assert [drawn(sampler, 2, step) for step in (0, 1)] == [[0, 3], [1, 4]]


@each("key value", [("reward", 0.5), ("pass_rate", 0.5)])
def test_a_stage_ends_when_its_running_mean_is_reached(key, value):
    sampler = made([{"where": {"form": "yes_no"}, key: value}, {"where": {"form": "choice"}}], window=4)
    def step(number, *rates):
        draws = sampler.next(2, number)
        told(sampler, sampler.prompts, dict(zip(draws, rates, strict=True)), number)
        return sorted(d.index for d in draws)
    assert step(0, 1.0, 1.0) == [0, 3]  # only two groups: the window is not full
    assert step(1, 0.0, None) == [0, 3] and sampler.metrics()[f"curriculum/stage_{key}"] == pytest.approx(2 / 3)
    assert step(2, 0.0, 0.0) == [0, 3]  # 1, 0, 0, 0
    assert sampler.metrics()[f"curriculum/stage_{key}"] == pytest.approx(0.25)
    assert step(3, 1.0, 0.95) == [0, 3]  # 0, 0, 1, .95
    assert step(4, 0.05, 1.0) == [0, 3]  # 1, .95, .05, 1
    assert step(5, 0.0, 0.0) == [1, 4] and sampler.metrics()[f"curriculum/stage_{key}"] == 0


def test_carried_prompts_come_by_one_over_their_reward():
    rows = prompts(3)
    sampler = Staged(rows, [{"where": {"form": ["yes_no", "choice"]}, "steps": 1},
                            {"where": {"form": "text"}, "carry": 0.25}], lowest=0.1)
    draws = {d.index: d for d in sampler.next(4, 0)}
    rewards = {0: 1.0, 1: 0.5, 3: -2.0}  # 4 was rejected
    outcomes = [outcome(draws[i], 0.5, r) for i, r in rewards.items()]
    rows.history.note(outcomes, 0)
    sampler.observe(outcomes, 0)
    assert sampler._pool(1).weights() == pytest.approx([1, 2, 0, 10, 0, 0], abs=1e-5)
    found = np.bincount([d.index for step in range(1, 1501) for d in sampler.next(1, step)], minlength=6)
    shares = np.array([1, 2, 10]) / 13 * 0.25
    assert chisquare(found[[0, 1, 3, 2]], 1500 * np.array([*shares, 0.75])).pvalue > 1e-3
    assert found[[4, 5]].sum() == 0
    rows = prompts()
    sampler = Staged(rows, [{"where": {"form": "yes_no"}, "steps": 1}, {"where": {"form": "choice"}, "carry": 0.5}])
    told(sampler, rows, dict.fromkeys(sampler.next(2, 0), 0.5), 0)
    draws = sampler.next(4, 1)
    assert sorted(d.index for d in draws) == [0, 1, 3, 4]
    told(sampler, rows, {d: 0.25 if d.index in (0, 3) else 1.0 for d in draws}, 1)
    assert sampler.metrics()["curriculum/stage_reward"] == 1 and not sampler.state_dict()["own"]
    assert sampler.pool.weights() == pytest.approx([4, 0, 0, 4, 0, 0], abs=1e-5)


def test_retrospective_mixes_seen_prompts_with_the_passes():
    rows = prompts(1)
    sampler = Retrospective(rows, carry=0.5, lowest=0.2)
    draws = sampler.next(4, 0)
    assert len({d.index for d in draws}) == 4  # nothing is seen yet
    told(sampler, rows, dict(zip(draws, [0.1, 0.5, 1.0, None], strict=True)), 0)
    weights = np.zeros(6)
    weights[[d.index for d in draws[:3]]] = [5, 2, 1]
    assert sampler.pool.weights() == pytest.approx(weights, abs=1e-5)
    second = sampler.next(4, 1)
    assert len({d.index for d in second}) == 4
    assert {d.index for d in second[2:]} <= {d.index for d in draws[:3]}  # the carried ones come last
    assert {0, 1, 2, 3, 4, 5} - {d.index for d in draws} <= {d.index for d in second[:2]} | {d.index for d in draws}
    assert sampler.metrics()["curriculum/epoch"] >= 1
    sampler = Retrospective(prompts(), carry=0)
    assert [sorted(d.index for d in sampler.next(3, 0) + sampler.next(3, 0)) for _ in range(3)] == [[*range(6)]] * 3


@given(st.lists(st.integers(1, 8), max_size=6), st.integers(0, 3), st.sampled_from([
    lambda rows: Staged(rows, FORMS), lambda rows: Staged(rows, CARRYING), Retrospective]))
def test_upcoming_is_what_next_gives_and_none_twice(counts, seed, make):
    rows = prompts(seed)
    sampler: Any = make(rows)
    assert isinstance(make(rows), ForeseeingSampler)
    for step, count in enumerate(counts):
        state, expected = sampler.state_dict(), sampler.upcoming(count, step)
        assert sampler.state_dict() == state
        draws = sampler.next(count, step)
        assert draws == expected
        told(sampler, rows, dict.fromkeys(draws, 0.5), step)
        pool = {*sampler.pool.cycle.members.tolist()}
        fresh = [d.index for d in draws if d.index in pool]
        assert len({*fresh}) == min(len(fresh), len(pool))


OWN = """
def back(step, start: int = 9):
    return start - step

def half(step):
    return step / 2
"""


def episode_settings(horizon, most=6):
    return EpisodeSettings(max_turns=most, horizon=horizon)


def happened(horizon, turns, *rates):
    """Groups of episodes that might have so many turns, at these pass rates."""
    horizon.observe([replace(outcome(Draw(i, 0, max_turns=turns), rate), is_episode=True)
                     for i, rate in enumerate(rates)])


def turns_of(horizon, step):
    """How many turns the draws of a step may have."""
    draws = horizon.within([Draw(3, 1, group_size=4), Draw(5, 0)], step)
    assert [(d.index, d.visit, d.group_size) for d in draws] == [(3, 1, 4), (5, 0, None)]
    (found,) = {d.max_turns for d in draws}
    return found


def test_it_grows_by_the_step_and_never_beyond_all():
    assert [add(step, start=2, every=3) for step in range(8)] == [2, 2, 2, 3, 3, 3, 4, 4]
    assert [add(step, start=1, every=2, by=3) for step in range(6)] == [1, 1, 4, 4, 7, 7]
    assert [multiply(step, start=2, every=2) for step in range(7)] == [2, 2, 4, 4, 6, 6, 8]
    horizon = Horizon(episode_settings({"name": "multiply", "start": 2, "every": 2}, most=5))
    assert [turns_of(horizon, step) for step in (0, 1, 2, 3)] == [2, 2, 4, 4]
    assert turns_of(horizon, 4) is turns_of(horizon, 99) is None  # episode.max_turns
    horizon = Horizon(episode_settings(None))
    assert turns_of(horizon, 0) is None
    happened(horizon, None, 1.0)
    assert horizon.metrics() == {} == horizon.state_dict()


def test_it_grows_with_the_success_of_episodes_of_that_length():
    horizon = Horizon(episode_settings({"name": "success", "start": 2, "at": 0.5, "window": 3, "by": 3}))
    happened(horizon, 2, 1.0, 1.0)
    assert turns_of(horizon, 9) == 2  # too few
    happened(horizon, 2, 0.0, 0.4, 1.0)  # of the last three .4667
    assert turns_of(horizon, 0) == 2
    happened(horizon, 2, 0.1)  # .4, 1, .1: exactly one half
    assert turns_of(horizon, 0) == 5
    happened(horizon, 2, 1.0, 1.0, 1.0)  # begun before: says nothing of five turns
    assert turns_of(horizon, 0) == 5
    horizon.observe([outcome(Draw(i, 0, max_turns=5), 1.0) for i in range(3)])  # single answers of a mixture
    assert turns_of(horizon, 0) == 5
    happened(horizon, 5, 0.5, None, 0.5, 0.5)  # a rejected prompt counts for nothing
    assert turns_of(horizon, 0) is None
    horizon = Horizon(episode_settings({"name": "success", "start": 2, "window": 1}))
    assert horizon.metrics() == {}  # no episode so far
    happened(horizon, 2, 1.0)
    assert horizon.metrics() == {"episode/horizon": 2} and turns_of(horizon, 1) == 3
    happened(horizon, None, 1.0)
    assert horizon.metrics() == {"episode/horizon": 6}
    horizon.observe([outcome(Draw(0, 0, max_turns=3), 1.0)])
    assert horizon.metrics() == {"episode/horizon": 6}
    rule = Success(start=2)
    assert (rule.at, rule.by, rule.recent.maxlen) == (0.5, 1, 64)


def test_it_goes_on_exactly_and_another_rule_begins_anew():
    rule = {"name": "success", "start": 1, "window": 3, "at": 0.6}
    for cut in range(1, 7):
        whole, first = Horizon(episode_settings(rule)), Horizon(episode_settings(rule))
        for i, rate in enumerate([0.9, 0.3, 0.7, 0.8, 0.9, 0.5, 0.7, 0.9]):
            if i == cut:
                again = Horizon(episode_settings(rule))
                again.load_state_dict(first.state_dict())
                first = again
            for horizon in (whole, first):
                happened(horizon, turns_of(horizon, i), rate)
            assert turns_of(whole, i + 1) == turns_of(first, i + 1)
        assert whole.state_dict() == first.state_dict() != Horizon(episode_settings(rule)).state_dict()
    before = Horizon(episode_settings({"name": "success", "start": 2}))
    horizon = Horizon(episode_settings({"name": "add", "start": 3, "every": 1}))
    horizon.load_state_dict(before.state_dict())
    assert turns_of(horizon, 1) == 4


def test_a_rule_of_your_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    horizon = Horizon(episode_settings({"name": f"{tmp_path}/own.py:back", "start": 4}))
    assert [turns_of(horizon, step) for step in (0, 2, 3, 9)] == [4, 2, 1, 1]  # at least one
    with pytest.raises(ConfigError, match=r"own.py:half' returned 0.5 at step 1: it must return a whole number"):
        Horizon(episode_settings(f"{tmp_path}/own.py:half")).at(1)


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
            check(episode_settings(rule), Acting())
    rule = {"name": "add", "start": 2, "every": 3}
    check(episode_settings(rule), Acting())
    check(episode_settings(None), Plain())
    with pytest.raises(ConfigError, match=r"horizon=.add.*has no environment and no tools.*set episode.horizon=null"):
        check(episode_settings(rule), Plain())
