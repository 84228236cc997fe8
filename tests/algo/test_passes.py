"""What functions prepare of a whole optimizer step, of a real model's rollouts dealt out to processes."""

import pytest
import torch

from tests.algo.flat import side_by_side
from tests.helpers import credited_groups, load, settings
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import requires
from vlrl.algo.tables import WEIGHTS
from vlrl.training.minibatch import make_minibatch, no_grad_passes, prepare, split


@pytest.fixture(scope="module")
def scene(tiny_models):
    config = settings(tiny_models["qwen3_vl"])
    policy, encode = load(config)
    return policy, credited_groups(policy, encode, config, ("text", "text"))


class Seen:
    """Weights of 1 from a function that looks at statistics of the whole step."""

    def __init__(self):
        self.inputs = []

    def prepare(self, x):
        self.inputs.append(x)
        return {"most": x.stats["top:3"].sum(-1)}

    def __call__(self, x):
        return torch.ones_like(x.mask)


def prepared(scene, monkeypatch, ranks, algo, **rollout):
    """(algorithm, its prepared values) of each rank, which has those of the scene's groups."""
    policy, groups = scene
    config = settings(policy.base.config.name_or_path, algo=algo, rollout=rollout)

    def call(own):
        algorithm = Algorithm(config)
        part = make_minibatch(policy, split([groups[i] for i in own], 1)[0], config)
        no_grad_passes(policy, part, algorithm, config.rollout.updates > 1)
        prepare(policy, part, config, algorithm, 0)
        return algorithm, part.prepared
    return side_by_side(monkeypatch, [lambda own=own: call(own) for own in ranks])


def test_a_process_without_rollouts_takes_part_in_siren(scene, monkeypatch):
    ((one, _),) = prepared(scene, monkeypatch, [[0, 1]], {"entropy": "siren"})
    for algorithm, made in prepared(scene, monkeypatch, [[0, 1], []], {"entropy": "siren"}):
        assert algorithm.objective.entropy.state_dict() == pytest.approx(one.objective.entropy.state_dict())
        assert float(made["entropy"]["mean"]) == pytest.approx(one.objective.entropy.state_dict()["anchor"])
    assert len(made["entropy"]["selected"]) == 0


@pytest.mark.parametrize("algo", [{"weights": ["top_entropy"]}, *(
    {"loss": name} for name in ("pacs", "oreal", "stable_reinforce", "clip_cov", "kl_cov"))], ids=str)
def test_a_process_without_rollouts_changes_nothing_of_the_others(scene, monkeypatch, algo):
    ((_, alone),) = prepared(scene, monkeypatch, [[0, 1]], algo)
    (_, full), (_, empty) = prepared(scene, monkeypatch, [[0, 1], []], algo)
    for place, values in alone.items():
        assert all(torch.allclose(full[place][name], value) for name, value in values.items())
        assert empty[place].keys() == values.keys()


@pytest.mark.parametrize("needs", [["stat:top:3"], ["stat:top:3", "step"], ["stat:top:3", "old_stat:top:3", "step"]],
                         ids=len)
def test_own_functions_see_the_statistics_that_they_require(scene, monkeypatch, needs):
    own = Seen()
    monkeypatch.setitem(WEIGHTS, "seen", requires(*needs)(own))
    (_, full), (_, empty) = prepared(scene, monkeypatch, [[0], []], {"weights": ["seen"]}, updates=2, group_size=3)
    tokens = sum(len(r.completion.tokens) for r in scene[1][0].rollouts)
    assert full["weights.0"]["most"].shape == (tokens,) and empty["weights.0"]["most"].shape == (0,)
    assert bool(full["weights.0"]["most"].any()) == ("step" in needs)  # zeros where there is no pass
    seen = {len(x.mask): x for x in own.inputs}
    for x in seen.values():
        assert x.stats["top:3"].shape == (len(x.mask), 3)
    if "old_stat:top:3" in needs:
        assert torch.equal(seen[tokens].old_stats["top:3"], seen[tokens].stats["top:3"])


def test_what_is_prepared_of_a_step_is_in_the_order_of_its_rollouts(scene, monkeypatch):
    """In whatever order they are packed."""
    policy, groups = scene
    own = Seen()
    monkeypatch.setitem(WEIGHTS, "seen", requires("stat:top:3", "step")(own))
    config = settings(policy.base.config.name_or_path, algo={"weights": ["seen"]}, train={"tokens_per_batch": 64})
    part = make_minibatch(policy, split(groups, 1)[0], config)
    part.batches.reverse()
    prepare(policy, part, config, Algorithm(config), 0)
    (x,) = own.inputs
    assert len(part.batches) > 1
    assert float((x.logprobs - x.sampler_logprobs).abs().max()) < 2e-5
