"""One optimizer step's gradient is the same however its rollouts are cut, ordered, packed or dealt out."""

import random
from dataclasses import replace

import pytest
import torch

from tests.algo.flat import part, random_step
from tests.e2e.replay import replayed
from tests.e2e.test_processes import assert_equal
from tests.helpers import credited_groups, load, settings
from tests.tables import each
from tests.training.test_update import assert_close, gradients
from vlrl.algo.aggregation import AGGREGATIONS
from vlrl.algo.objective import Objective
from vlrl.algo.tables import CORRECTIONS, ENTROPIES, KLS, LOSSES, WEIGHTS
from vlrl.config.schema import AlgoSettings

ALL = [*({"aggregation": name} for name in AGGREGATIONS), *({"loss": name} for name in LOSSES),
       *({"weights": [name]} for name in WEIGHTS), *({"correction": name} for name in CORRECTIONS),
       *({"kl": name, "kl_coef": 0.1} for name in KLS), *({"entropy": name} for name in ENTROPIES),
       {"kl_coef": 0.1, "kl_weights": ["dads", "top_entropy"], "weights": ["stcr", "top_entropy"], "loss": "gspo"}]
WIDE = {"clip_cov": {"share": 0.3, "cov_low": -1.0}, "kl_cov": {"share": 0.3},
        "geometric_mask": {"low": 0.5, "high": 2}}
"""Options with which a few tokens are enough."""

STATES = {"siren": {"anchor": 0.1}, "adaptive": {"coef": 0.1, "active": True}}


def ids(values):
    return ["+".join(str(v["name"] if isinstance(v, dict) else v) for v in value.values()) for value in values]


class Linear:
    """A policy over flat tokens: log-probabilities and statistics are linear in its weights."""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = random_step(seed)
        self.features = torch.randn(len(self.x.mask), 5, generator=g, dtype=torch.float64) * 0.1
        self.weights = torch.zeros(5, dtype=torch.float64, requires_grad=True)

    def inputs(self):
        """The whole step, with a gradient to the weights."""
        drift = self.features @ self.weights
        stats = {**self.x.stats, "entropy": self.x.entropy + drift, "nucleus_entropy:0.8": self.x.entropy ** 2 + drift}
        stats = {k: v + (drift if v.dim() == 1 else drift[:, None]) for k, v in stats.items()}
        return replace(self.x, logprobs=self.x.logprobs.detach() + drift, stats=stats)

    def gradient(self, objective, cuts):
        """d loss / d weights, micro-batch by micro-batch."""
        self.weights.grad = None
        with torch.no_grad():
            prepared = objective.prepare(self.inputs())
        for rollouts in cuts:
            x = self.inputs()
            own = {place: part(replace(x, prepared=values), rollouts).prepared for place, values in prepared.items()}
            loss, metrics = objective(replace(part(x, rollouts), prepared=own), 0.1)
            if loss.requires_grad:
                loss.backward()
            assert all(value.isfinite().all() for value in metrics.values())
        return torch.zeros(5) if self.weights.grad is None else self.weights.grad


def begun(settings):
    """The objective, its entropy term in the middle of a run."""
    found = Objective.of(settings)
    if found.entropy and found.entropy.name in STATES:
        found.entropy.load_state_dict(STATES[found.entropy.name])
    return found


@each("algo", ALL)
def test_however_it_is_cut(algo):
    named = {k: {"name": v, **WIDE[v]} if isinstance(v, str) and v in WIDE else v for k, v in algo.items()}
    policy, settings = Linear(3), AlgoSettings.model_validate(named)
    rollouts = list(range(len(policy.x.lengths)))
    whole = policy.gradient(begun(settings), [rollouts])
    shuffled = random.Random(1).sample(rollouts, len(rollouts))
    idle = [[r] for r in reversed(rollouts)] + [[]]
    for cuts in (idle, [rollouts[:5], rollouts[5:]], [shuffled[:3], shuffled[3:4], shuffled[4:]]):
        assert (policy.gradient(begun(settings), cuts) - whole).abs().max() <= 1e-9 * whole.abs().max() + 1e-12
    assert whole.abs().max() > 0


RIGHT = 0.28
"""A reward that the answers of the tiny model reach in most groups, and miss in most."""
MODEL = [
    {"aggregation": "constant"}, {"loss": "gspo", "aggregation": "sequence_mean"},
    *({"loss": {"name": name, "above": RIGHT}} for name in ("pacs", "simko")),
    {"loss": {"name": "clip_cov", "share": 0.2, "cov_low": -0.1}}, {"loss": {"name": "kl_cov", "share": 0.2}},
    {"loss": "stable_reinforce"}, {"loss": "rover"}, {"weights": ["top_entropy"]},
    {"weights": [{"name": "stcr", "above": RIGHT}], "kl_coef": 0.1, "kl_weights": [{"name": "dads", "above": RIGHT}]},
    {"correction": "geometric_mask"}, {"entropy": "siren"}]


@pytest.fixture(scope="module")
def scene(tiny_models):
    """A model with its reference, and what it answered."""
    config = settings(tiny_models["qwen3_vl"])
    policy, encode = load(config)
    policy.keep_reference(str(tiny_models["qwen3_vl"]))
    return policy, credited_groups(policy, encode, config)


@pytest.mark.slow
@pytest.mark.parametrize("algo", MODEL, ids=ids(MODEL))
def test_packing_and_order_on_the_tiny_model(tiny_models, scene, algo):
    policy, groups = scene
    def found(groups, **train):
        config = settings(tiny_models["qwen3_vl"], algo=algo, train={"max_grad_norm": 1e9, **train})
        return gradients(policy, groups, config)[0][0]
    whole = found(groups, tokens_per_batch=10**6)
    assert any(value.abs().max() > 0 for value in whole.values())
    assert_close(found(groups[::-1], tokens_per_batch=100), whole)
    assert_close(found(groups, packing="padded", tokens_per_batch=300), whole)


@pytest.fixture(scope="module")
def dealt(tiny_models, tmp_path_factory):
    """What one process finds under each objective, and what two find."""
    cases = {"all": (tiny_models["qwen3_vl"], "objectives", MODEL)}
    return list(zip(*replayed(tmp_path_factory.mktemp("dealt"), cases)["all"], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("case", range(len(MODEL)), ids=ids(MODEL))
def test_two_processes(dealt, case):
    assert len(dealt) == len(MODEL) and any(value.abs().max() > 0 for value in dealt[case][0]["gradients"][0].values())
    assert_equal(*dealt[case])
