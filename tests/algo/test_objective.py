"""How the functions are put together: one loss by hand, what each of them sees, and what is not computed."""

from dataclasses import replace

import pytest
import torch

from tests.algo.flat import flat
from vlrl.algo.inputs import requires
from vlrl.algo.named import Bound
from vlrl.algo.objective import Objective
from vlrl.config.schema import AlgoSettings
from vlrl.errors import ConfigError


def bound(name, function, **options):
    return Bound(name, function, options, frozenset(getattr(function, "requires", ())))


def term(x):
    return x.logprobs * x.advantages, {"seen": (x.advantages * x.mask).sum()}


def twice(x):
    return torch.full_like(x.mask, 2.0)


def thrice(x):
    return torch.full_like(x.mask, 3.0), {"three": x.mask.sum() * 3}


def mean(per_token, x):
    return (per_token * x.mask).sum() / x.total_sequences


@requires("step")
def longest(x):
    return x.prepared["longest"] * x.mask


longest.prepare = lambda x: {"longest": x.lengths.max()}  # type: ignore[attr-defined]


@requires("stat:entropy")
def held(x):
    return -x.stats["entropy"], {"held": x.mask.sum()}


PARTS = {"term": bound("term", term), "aggregation": bound("mean", mean)}
X = flat([-1.0, -2.0, -3.0], adv=[1.0, 2.0, 5.0], rollout=[0, 0, 1], mask=[1, 1, 0], lengths=[2, 0],
         total_sequences=4.0, total_tokens=8.0, reference_logprobs=[-1.5, -2.5, -9.0],
         stats={"entropy": torch.tensor([0.5, 1.5, 9.0])})


def test_composed_by_hand():
    """(-1 * 1 + -2 * 2) * 2 * 3 and 0.1 * (0.5 + 0.5) * 2 over 4 rollouts, - (0.5 + 1.5) over 8 tokens."""
    whole = Objective(**PARTS, weights=[bound("twice", twice)], correction=bound("thrice", thrice),
                      kl=bound("distance", lambda x: x.logprobs - x.reference_logprobs),
                      kl_weights=[bound("twice", twice)], entropy=bound("held", held))
    loss, metrics = whole(X, 0.1)
    assert loss.item() == pytest.approx((-30 + 0.2) / 4 - 2 / 8)
    assert {k: v.item() for k, v in metrics.items()} == {"seen": 3, "three": 6, "kl": 1, "held": 2}
    assert whole(X, 0.0)[0].item() == pytest.approx(-30 / 4 - 2 / 8)
    assert whole.requires == {"reference", "stat:entropy"} and not whole.prepares


def test_each_function_sees_what_it_prepared():
    whole = Objective(**PARTS, weights=[bound("longest", longest), bound("longest", longest)])
    prepared = whole.prepare(X)
    assert set(prepared) == {"weights.0", "weights.1"} and whole.prepares and "step" in whole.requires
    assert whole(replace(X, prepared=prepared))[0].item() == pytest.approx(-5 * 2 * 2 / 4)


def test_of_settings_only_what_is_asked_for():
    plain = Objective.of(AlgoSettings())
    assert (plain.term.name, plain.aggregation.name, plain.requires) == ("ppo_clip", "token_mean", set())
    assert plain.kl is plain.correction is plain.entropy is None and not plain.weights and not plain.prepares
    unread = Objective.of(AlgoSettings.model_validate({"kl": "k2"}))  # named, and with kl_coef=0 not computed
    assert unread.kl is None and not unread.requires
    values = {"kl_coef": 0.1, "kl_in": "reward", "kl_weights": ["dads"]}
    assert {*Objective.of(AlgoSettings.model_validate(values)).functions} == {"loss", "aggregation"}
    values |= {"kl_in": "loss", "kl": "k2", "correction": "token_mask"}
    with_kl = Objective.of(AlgoSettings.model_validate(values))
    assert set(with_kl.functions) == {"loss", "aggregation", "correction", "kl", "kl_weights.0"}
    for options in ({"low": 5}, {"low": 6, "high": None}):
        assert Objective.of(AlgoSettings.model_validate({"correction": {"name": "token_mask", **options}})).correction


@pytest.mark.parametrize(("values", "says"), [
    ({"kl": "k9"}, "algo.kl='k9' is not known"),  # also where no KL is asked for
    ({"kl_weights": ["dad"]}, "algo.kl_weights.0='dad' is not known. Did you mean 'dads'"),
    ({"entropy": {"name": "none", "coef": 1}}, "algo.entropy.coef=1: 'none' has no options. Remove the option"),
    ({"loss": {"name": "ppo_clip", "dual_clip": 1}}, "algo.loss.dual_clip=1"),
    ({"loss": {"name": "ppo_clip", "delta": 0.4}}, "algo.loss.delta=0.4"),
    ({"loss": {"name": "gspo", "clip_low": -1}}, "algo.loss.clip_low=-1"),
    ({"correction": {"name": "token_mask", "low": 6}}, "algo.correction.low=6 is above algo.correction.high=5")])
def test_what_cannot_be_meant_is_refused(values, says):
    with pytest.raises(ConfigError) as error:
        Objective.of(AlgoSettings.model_validate(values))
    assert says in str(error.value)
