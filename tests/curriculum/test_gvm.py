"""gvm: group sizes by hand, their sum, probes, resume, and ragged groups that train."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rollout.test_group_source import source
from vlrl import config, curriculum
from vlrl.config.schema import CurriculumSettings, RolloutSettings
from vlrl.curriculum import Draw, ForeseeingSampler, Outcome, ProbingSampler, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.gvm import GVM, apportion


def prompts(size, group_size=4, per_step=4):
    return Prompts(size, 0, rollout=RolloutSettings(group_size=group_size, prompts_per_step=per_step))


def tell(sampler, index, rights, answers, surprise, step=0):
    outcome = Outcome(Draw(index, 0), (1.0,) * answers, tuple(k < rights for k in range(answers)), surprise)
    sampler.prompts.history.note([outcome], step)
    sampler.observe([outcome], step)


def sizes_of(draws):
    return [d.group_size or 0 for d in draws]


def test_weights_by_hand():
    sampler = GVM(prompts(4), alpha=0.01, beta=2.0)
    assert sampler.weights(np.arange(4)) == pytest.approx([1 / math.sqrt(0.5 + 0.02)] * 4, abs=1e-6)
    tell(sampler, 0, 1, 4, surprise=3.0)
    tell(sampler, 1, 4, 4, surprise=1.0)
    tell(sampler, 2, 0, 4, surprise=2.0)
    expected = [3 / math.sqrt(0.25 + 0.04), 1 / math.sqrt(1.01), 0.0, 2 / math.sqrt(0.52)]
    assert sampler.weights(np.arange(4)) == pytest.approx(expected, abs=1e-6)
    tell(sampler, 0, 2, 4, surprise=1.0, step=1)
    assert sampler.weights(np.arange(1)) == pytest.approx([1 / math.sqrt(0.52)], abs=1e-6)
    assert GVM(prompts(1), alpha=0.0, beta=0.0).weights(np.arange(1)) == pytest.approx([1 / math.sqrt(0.5)])


APPORTIONED = [
    ([1, 1, 1], 12, 2, 16, [4, 4, 4]), ([3, 1, 2], 12, 1, 16, [6, 2, 4]), ([1, 1, 1], 13, 2, 16, [5, 4, 4]),
    ([5, 3, 2], 11, 1, 16, [6, 3, 2]),  # 5.5, 3.3, 2.2
    ([10, 1, 1], 12, 2, 16, [8, 2, 2]), ([10, 1, 1], 12, 2, 5, [5, 4, 3]),  # 5 at most: 3.5 each are left
    ([0, 0, 0], 9, 2, 8, [3, 3, 3]), ([1, 0, 0], 12, 2, 4, [4, 4, 4]), ([1, 0, 0], 10, 2, 16, [6, 2, 2]),
    ([], 0, 2, 4, [])]


def test_apportioning_by_hand():
    for weights, total, least, most, sizes in APPORTIONED:
        assert apportion(np.array(weights, dtype=float), total, least, most).tolist() == sizes


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9))
def test_sizes_add_up_and_keep_the_bounds(weights, least, below, above):
    size, weights = least + below, np.array(weights)
    sizes = apportion(weights, len(weights) * size, least, size + above)
    assert sizes.sum() == len(weights) * size and least <= sizes.min() and sizes.max() <= size + above
    assert all(sizes[i] <= sizes[j] + 1 for i in range(len(weights)) for j in range(len(weights))
               if weights[i] <= weights[j])


def test_every_prompt_once_an_epoch_with_its_size():
    sampler = GVM(prompts(6), probe=0)
    assert isinstance(sampler, ForeseeingSampler) and [d.group_size for d in sampler.upcoming(6, 0)] == [4] * 6
    for index in range(6):
        tell(sampler, index, 1 + index % 2 * 3, 4, surprise=2.0 + index)
    seen = sampler.upcoming(6, 0)
    first = sampler.next(6, 0)
    assert first == seen and sorted(d.index for d in first) == list(range(6)) and sampler.drawn == 6
    sizes = sizes_of(first)
    assert sum(sizes) == 24 and len({*sizes}) > 2
    by_weight = np.argsort(sampler.weights(np.array([d.index for d in first])))
    assert (np.diff(np.array(sizes)[by_weight]) >= 0).all()
    assert sampler.metrics() == {"curriculum/epoch": 1.0, "curriculum/group_size/min": min(sizes),
                                 "curriculum/group_size/max": max(sizes)}
    assert sum(sizes_of(sampler.next(5, 1))) == 20
    assert {d.visit for d in sampler.upcoming(1, 1)} == {1} and sampler.prompts.history.visits.sum() == 11


def test_probes_are_of_the_prompts_that_come_next():
    sampler = GVM(prompts(9, per_step=3), probe=2)
    assert isinstance(sampler, ProbingSampler) and sampler.upcoming(3, 0) == []
    probes = sampler.probes(0)
    assert [d.group_size for d in probes] == [2] * 3 and sampler.drawn == 0 and not sampler.prompts.history.visits.any()
    assert [(d.index, d.visit) for d in sampler.next(3, 0)] == [(d.index, d.visit) for d in probes]
    assert {d.index for d in sampler.probes(1)}.isdisjoint({d.index for d in probes})
    assert GVM(prompts(9), probe=0).probes(0) == []
    found = config.load("configs/quickstart.yaml", ["extends=curricula/gvm.yaml"]).curriculum
    sampler = curriculum.make(found, prompts(8))
    assert isinstance(sampler, ProbingSampler)
    probes = sampler.probes(0)
    assert [d.group_size for d in probes] == [4] * 4
    for k, draw in enumerate(probes):
        tell(sampler, draw.index, 1 + k, 4, surprise=2.0)
    assert sizes_of(sampler.next(4, 0)) == [6, 4, 3, 3]  # proportional to 1 / sqrt(p + .001 / p)


def test_probed_answers_count_and_are_not_trained_on():
    s = source(lambda prompt, i: prompt.text if i % 2 else "no", rollout={"group_size": 3, "prompts_per_step": 4})
    s.prompts.per_step, s.prompts.group_size = 4, 3
    s.sampler = GVM(s.prompts, probe=2)
    groups = s.next_groups(4, 0)
    assert [len(g.rollouts) for g in groups] == [3] * 4 and [len(g.rollouts) for g in s.dropped] == [2] * 4
    assert {g.sample.id for g in s.dropped} == {g.sample.id for g in groups}
    assert s.metrics()["rollouts/total"] == 20 and s.prompts.history.visits.sum() == 4


@pytest.mark.parametrize(("options", "words"), [
    ({"least": 5}, "least=5 <= rollout.group_size=4"), ({"most": 3}, "rollout.group_size=4 <= most=3")])
def test_options_out_of_range(options, words):
    with pytest.raises(ConfigError, match=words):
        curriculum.make(CurriculumSettings(name="gvm", **options), prompts(5))
