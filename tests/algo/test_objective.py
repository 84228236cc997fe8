"""How functions are put together, what each sees and prepares of a whole step, and statistics of distributions."""

import math
from dataclasses import replace

import pytest
import torch

from tests.algo.flat import flat, side_by_side
from tests.helpers import credited_groups, load, settings
from tests.tables import each
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.inputs import requires
from vlrl.algo.named import Bound
from vlrl.algo.objective import Objective
from vlrl.algo.statistics import alternatives, statistics
from vlrl.algo.tables import WEIGHTS
from vlrl.config.schema import AlgoSettings
from vlrl.errors import ConfigError
from vlrl.models.logprobs import Head, token_stats
from vlrl.training.minibatch import make_minibatch, no_grad_passes, prepare, split


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


@each("values says", [
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


P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.1, 0.8, 0.0]], dtype=torch.float64)


def statistic_of(name, probabilities=P):
    (statistic,) = statistics([f"stat:{name}", "reference", "old_stat:top:1"]).values()
    return statistic(probabilities.log(), torch.zeros(len(probabilities), dtype=torch.long))


def h(*p):
    return -sum(x * math.log(x) for x in p)


@each("name expected", [
    ("entropy", [h(0.5, 0.3, 0.2), h(0.1, 0.1, 0.8)]),
    ("nucleus_entropy:0.6", [h(5 / 8, 3 / 8), 0]),  # 0.5 does not suffice, 0.5 + 0.3 does; 0.8 does alone
    ("nucleus_entropy:0.5", [0, 0]),
    ("nucleus_entropy:1", [h(0.5, 0.3, 0.2), h(0.1, 0.1, 0.8)]),
    ("mean_logprob", [math.log(0.5 * 0.3 * 0.2) / 3, math.log(0.1 * 0.1 * 0.8) / 3]),
])
def test_statistics_by_hand(name, expected):
    assert statistic_of(name).tolist() == pytest.approx(expected, abs=1e-9)


def test_the_most_probable_ones():
    assert statistic_of("top:2").exp().tolist() == [pytest.approx([0.5, 0.3]), pytest.approx([0.8, 0.1])]
    assert statistic_of("top_ids:2")[0].tolist() == [0, 1] and statistic_of("top_ids:1").tolist() == [[0], [2]]
    assert statistic_of("top:9").shape == (2, 4)
    assert list(alternatives(2)) == ["top_ids", "top_logprobs"] and alternatives(0) == {}


@each("name", ["entropy", "nucleus_entropy:0.6", "mean_logprob", "top:2"])
def test_gradients_are_those_of_the_logits(name):
    (statistic,) = statistics([f"stat:{name}"]).values()
    logits = torch.tensor([[0.3, -0.2, 1.1, 0.4]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: statistic(z, torch.zeros(1, dtype=torch.long)), logits)
    banned = torch.tensor([[0.3, -0.2, 1.1, -torch.inf]], requires_grad=True)
    values = statistic(banned, torch.zeros(1, dtype=torch.long))
    values.sum().backward()
    assert values.isfinite().all() and banned.grad is not None and banned.grad.isfinite().all()


def test_chunks_give_the_same():
    torch.manual_seed(0)
    hidden, layer = torch.randn(7, 5), torch.nn.Linear(5, 11)
    wanted = statistics(["stat:entropy", "stat:top:3"])
    rest = (Head(11, layer), torch.arange(7), torch.tensor([10]), 0.7, wanted)
    whole, cut = token_stats(hidden, *rest), token_stats(hidden, *rest, chunk_bytes=4 * 11 * 2)
    for name in wanted:
        assert torch.allclose(whole.more[name], cut.more[name], atol=1e-6)
    assert torch.allclose(whole.more["entropy"], whole.entropy, atol=1e-5) and whole.more["entropy"].requires_grad


@each("name says", [("entropi", "Did you mean 'entropy'"), ("nucleus_entropy:7", "above 0"),
                                            ("top:x", "is invalid"), ("top", "is invalid")])
def test_what_there_is_not(name, says):
    with pytest.raises(ConfigError, match=says):
        statistics([f"stat:{name}"])
