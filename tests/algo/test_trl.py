"""Against TRL, for what both have: value and gradient of the loss (`GRPOTrainer._compute_loss`, with padded rows where
we have flat tokens), advantages of the same rewards; what differs on purpose is named."""

import ast
import inspect
import math
import random
import textwrap
from collections import defaultdict, deque
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.algo.flat import random_step
from tests.algo.made import scores
from vlrl.algo.advantage import dr_grpo, grpo, rloo
from vlrl.algo.objective import Objective
from vlrl.config.schema import AlgoSettings
from vlrl.methods.objectives.advantage import batch_std, gdpo

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

BOUNDS = {"epsilon_low": 0.2, "epsilon_high": 0.28}
CLIP = {"clip_low": 0.2, "clip_high": 0.28}


@pytest.fixture(scope="module")
def trainer_class():
    pytest.importorskip("trl")
    from trl import GRPOTrainer
    return GRPOTrainer


class Rows:
    """Padded rows [B, L] of flat tokens."""

    def __init__(self, x):
        self.ids = x.rollout_id
        self.place = torch.cat([torch.arange(int((self.ids == r).sum())) for r in range(len(x.lengths))])
        self.shape = (len(x.lengths), int(self.place.max()) + 1)

    def __call__(self, values, fill=0.0):
        return torch.full(self.shape, fill, dtype=values.dtype).index_put((self.ids, self.place), values)

    def back(self, values):
        return values.expand(self.shape)[self.ids, self.place]


def trl(trainer_class, x, loss_type="dapo", **own):
    """TRL's loss and its gradient [N]. `own` are attributes of the trainer, or of its arguments."""
    rows = Rows(x)
    logps = rows(x.logprobs.detach(), -1.0).requires_grad_()
    args = {"use_bias_correction_kl": False, "delta": None, "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05,
            "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0,
            "steps_per_generation": 1}
    args |= {k: own.pop(k) for k in list(own) if k in args}
    one = SimpleNamespace(num_processes=1, gather=lambda t: t, reduce=lambda t, reduction: t,
                          pad_across_processes=lambda t, **_: t)
    state = {"loss_type": loss_type, "beta": 0.0, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None,
             "importance_sampling_level": "token", "use_vllm": False, "vllm_importance_sampling_correction": False,
             "aux_loss_enabled": False, "_entropy_bonus_enabled": False, "current_gradient_accumulation_steps": 1,
             "max_completion_length": x.max_length, **BOUNDS, "model": SimpleNamespace(training=True),
             "accelerator": one, "args": SimpleNamespace(**args), "_metrics": defaultdict(lambda: defaultdict(list)),
             "_get_per_token_logps_and_entropies": lambda *_, **__: (logps, rows(x.entropy), None)}
    trainer = trainer_class.__new__(trainer_class)
    vars(trainer).update({**state, **own})
    mask, ids = rows(x.mask), torch.zeros(rows.shape, dtype=torch.int64)
    first = torch.stack([x.advantages[x.rollout_id == r][0] for r in range(rows.shape[0])])
    inputs = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids, "completion_mask": mask,
              "advantages": first, "old_per_token_logps": rows(x.old_logprobs),
              "ref_per_token_logps": rows(x.reference_logprobs), "num_items_in_batch": mask.sum()}
    inputs["sampling_per_token_logps"] = rows(x.sampler_logprobs)
    if trainer.use_vllm:
        inputs["importance_sampling_ratio"] = importance(trainer_class, trainer, x, rows)
    loss = trainer._compute_loss(None, inputs)
    return loss.item(), rows.back(torch.autograd.grad(loss, logps)[0])


def importance(trainer_class, trainer, x, rows):
    """TRL's weights of the sampler: the block of `_generate_and_score_completions` that computes them."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(trainer_class._generate_and_score_completions)))
    (block,) = [n for n in ast.walk(tree) if isinstance(n, ast.If) and any(
        isinstance(s, ast.Assign) and ast.unparse(s.targets[0]) == "per_token_logps_diff" for s in n.body)]
    names = {"self": trainer, "completion_mask": rows(x.mask), "tool_mask": None, "torch": torch, "math": math,
             "old_per_token_logps": rows(x.old_logprobs), "sampling_per_token_logps": rows(x.sampler_logprobs)}
    exec(compile(ast.Module([block], []), "trl", "exec"), names)
    return names["vllm_importance_sampling_ratio"]


def ours(x, **algo):
    """This project's loss and its gradient [N]."""
    settings = AlgoSettings(**algo)
    objective = Objective.of(settings)
    x = replace(x, prepared=objective.prepare(x))
    loss, _ = objective(x, settings.kl_coef)
    return loss.item(), torch.autograd.grad(loss, x.logprobs)[0]


def same(a, b):
    assert a[0] == pytest.approx(b[0], rel=1e-9, abs=1e-9)
    assert torch.allclose(a[1], b[1], rtol=1e-7, atol=1e-10)
    assert a[1].abs().max() > 1e-4


def vllm(mode, low, high):
    return {"use_vllm": True, "vllm_importance_sampling_correction": True, "vllm_importance_sampling_mode": mode,
            "vllm_importance_sampling_clip_min": low, "vllm_importance_sampling_clip_max": high}


def made(seed):
    """A ragged step in which every rollout has a trained token, as TRL counts rollouts without one too."""
    x = random_step(seed, groups=3, size=4, longest=9)
    mask = x.mask.index_fill(0, torch.unique_consecutive(x.rollout_id, return_counts=True)[1].cumsum(0) - 1, 1.0)
    lengths = torch.zeros_like(x.lengths).index_add(0, x.rollout_id, mask)
    return replace(x, mask=mask, lengths=lengths, total_tokens=float(mask.sum()), total_sequences=float(len(lengths)),
                   entropy=x.entropy.float().double())  # TRL's quantile is of float32


PPO = {"name": "ppo_clip", **CLIP}
GSPO = {"name": "gspo", **CLIP}

CASES = {
    "dapo": ({}, {"loss": PPO}),
    "bnpo": ({"loss_type": "bnpo"}, {"loss": PPO}),
    "grpo": ({"loss_type": "grpo"}, {"loss": PPO, "aggregation": "sequence_mean"}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {"loss": PPO, "aggregation": "constant"}),
    "two-sided": ({"delta": 1.4}, {"loss": {**PPO, "delta": 1.4}}),
    "gspo": ({"loss_type": "grpo", "importance_sampling_level": "sequence"},
             {"loss": GSPO, "aggregation": "sequence_mean"}),
    "luspo": ({"loss_type": "luspo", "importance_sampling_level": "sequence"},
              {"loss": GSPO, "aggregation": "sequence_sum"}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.2}, {"loss": {"name": "cispo", "cap": 1.2}}),
    "cispo, ScaleRL": ({"loss_type": "cispo", "epsilon_high": 5.0}, {"loss": "cispo"}),
    "sapo": ({"loss_type": "sapo"}, {"loss": "sapo", "aggregation": "sequence_mean"}),
    "sapo, temperatures": ({"loss_type": "sapo", "sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5},
                           {"loss": {"name": "sapo", "tau_positive": 2.0, "tau_negative": 0.5},
                            "aggregation": "sequence_mean"}),
    "vespo": ({"loss_type": "vespo"}, {"loss": "vespo"}),
    "vespo, constants": ({"loss_type": "vespo", "vespo_k_pos": 1.0, "vespo_lambda_neg": 1.5},
                         {"loss": {"name": "vespo", "k_positive": 1.0, "lambda_negative": 1.5}}),
    "vespo, sampler in the ratio": ({"loss_type": "vespo", **vllm("token_truncate", None, 1e9)},
                                    {"loss": {"name": "vespo", "from_sampler": True}}),
    "top entropy": ({"top_entropy_quantile": 0.3}, {"loss": PPO, "weights": [{"name": "top_entropy", "share": 0.3}]}),
    "off-policy mask": ({"off_policy_mask_threshold": 0.02},
                        {"loss": PPO, "weights": [{"name": "off_policy_sequence_mask", "delta": 0.02}]}),
    "kl": ({"beta": 0.3}, {"loss": PPO, "kl_coef": 0.3}),
    "kl, sequence mean": ({"beta": 0.3, "loss_type": "grpo"},
                          {"loss": PPO, "kl_coef": 0.3, "aggregation": "sequence_mean"}),
    "unbiased kl": ({"beta": 0.3, "use_bias_correction_kl": True},
                    {"loss": PPO, "kl_coef": 0.3, "kl": "k3_unbiased"}),
    "unbiased kl, sequence": ({"beta": 0.3, "use_bias_correction_kl": True, "loss_type": "grpo",
                               "importance_sampling_level": "sequence"},
                              {"loss": GSPO, "kl_coef": 0.3, "kl": {"name": "k3_unbiased", "level": "sequence"},
                               "aggregation": "sequence_mean"}),
    "TIS": (vllm("token_truncate", None, 1.2),
            {"loss": PPO, "correction": {"name": "token_truncate", "high": 1.2}}),
    "IcePop": (vllm("token_mask", 0.8, 1.2),
               {"loss": PPO, "correction": {"name": "token_mask", "low": 0.8, "high": 1.2}}),
    "sequence truncate": (vllm("sequence_truncate", 0.9, 1.3),
                          {"loss": PPO, "correction": {"name": "sequence_truncate", "low": 0.9, "high": 1.3}}),
    "MIS": (vllm("sequence_mask", None, 3.0), {"loss": PPO, "correction": "sequence_mask"}),
    "everything": ({"beta": 0.1, "top_entropy_quantile": 0.5, "off_policy_mask_threshold": 0.02, "delta": 1.5,
                    "loss_type": "dr_grpo", **vllm("sequence_mask", 0.5, 2.0)},
                   {"loss": {**PPO, "delta": 1.5}, "kl_coef": 0.1, "aggregation": "constant",
                    "weights": [{"name": "off_policy_sequence_mask", "delta": 0.02},
                                {"name": "top_entropy", "share": 0.5}],
                    "correction": {"name": "sequence_mask", "low": 0.5, "high": 2.0}}),
}


@pytest.mark.parametrize("name", CASES)
def test_the_same_loss_and_gradient(trainer_class, name):
    theirs, mine = CASES[name]
    x = made(0)
    same(ours(x, **mine), trl(trainer_class, x, **theirs))


def test_gmpo(trainer_class):
    from trl.experimental.gmpo import GMPOTrainer
    theirs = trl(GMPOTrainer, made(0), "grpo", epsilon_low=0.4, epsilon_high=0.4)
    same(ours(made(0), loss="gmpo", aggregation="sequence_mean"), theirs)


def test_clip_high_of_cispo_is_a_distance_from_1_and_what_is_far_is_bounded(trainer_class):
    x = made(0)
    x = replace(x, old_logprobs=x.logprobs.detach() - 30, advantages=-torch.ones_like(x.advantages))
    assert trl(trainer_class, x)[0] == pytest.approx(math.exp(30))
    assert ours(x, loss=PPO)[0] == pytest.approx(math.exp(20))
    same(ours(x, loss={"name": "cispo", "clip_high": 0.28}), trl(trainer_class, x, "cispo", epsilon_high=1.28))
    x = replace(x, reference_logprobs=x.logprobs.detach() + 30, advantages=torch.zeros_like(x.advantages))
    assert trl(trainer_class, x, beta=1.0)[0] == pytest.approx(math.exp(30), rel=1e-6)
    assert ours(x, loss=PPO, kl_coef=1.0)[0] == pytest.approx(28 * math.exp(3) - 31, rel=1e-6)  # the tangent from d = 3


def test_a_rollout_without_trained_tokens_is_not_counted(trainer_class):
    x = made(0)
    mask = torch.where(x.rollout_id == 2, 0, x.mask)
    x = replace(x, mask=mask, lengths=torch.zeros_like(x.lengths).index_add(0, x.rollout_id, mask),
                total_tokens=float(mask.sum()), total_sequences=11.0)
    theirs = trl(trainer_class, x, loss_type="grpo")
    same(ours(x, loss=PPO, aggregation="sequence_mean"), (theirs[0] * 12 / 11, theirs[1] * 12 / 11))


N, SIZE = 5, 4


def trl_advantages(kind, rewards, weights=(1.0,), logprobs=(0.0, 0.0), lengths=None, **own):
    """What the trainer's own `_generate_and_score_completions` makes of rewards [R, parts]; everything before and
    after it is given: answers of `lengths` ones, log-probabilities (policy, reference) of every token."""
    from accelerate import Accelerator
    from trl import GRPOTrainer, RLOOTrainer

    trainer = object.__new__({"grpo": GRPOTrainer, "rloo": RLOOTrainer}[kind])
    lengths = lengths or [2] * len(rewards)
    answers = [[1] * n for n in lengths]
    made = [[[1]] * len(rewards), answers, None, answers, None, {}, None, None]
    policy, reference = (SimpleNamespace(training=True, is_gradient_checkpointing=False) for _ in range(2))

    def read(model, ids, mask, keep, *args, **kwargs):
        return torch.full((len(rewards), keep), logprobs[model is reference]), None, None

    given = {
        "accelerator": Accelerator(cpu=True), "model": policy, "ref_model": reference, "environment_factories": None,
        "tools": None, "environments": None, "pad_to_multiple_of": None, "mask_truncated_completions": False,
        "_tokenizer": SimpleNamespace(pad_token_id=0), "num_generations": SIZE, "use_vllm": False, "num_iterations": 1,
        "beta": 0.0, "reward_clip_range": None, "normalize_advantages": False, "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize", "reward_weights": torch.tensor(weights),
        "reward_funcs": [None] * len(weights), "reward_func_names": [str(i) for i in range(len(weights))],
        "_metrics": {"train": defaultdict(list)}, "_pending_extra_logs": {}, "_pending_metrics": {},
        "_logs": defaultdict(deque, rewards=defaultdict(deque), extra=defaultdict(deque)), "log_multimodal": False,
        "args": SimpleNamespace(per_device_train_batch_size=1, steps_per_generation=1, gradient_accumulation_steps=1,
                                gradient_checkpointing_kwargs=None),
        "_get_per_token_logps_and_entropies": read,
        "_generate": lambda prompts: made if kind == "grpo" else (made[0], answers, answers),
        "_calculate_rewards": lambda *args: torch.tensor(rewards, dtype=torch.float32)}
    trainer.__dict__.update({**given, **own})
    return trainer._generate_and_score_completions([{"prompt": "x"}] * len(rewards))["advantages"].tolist()


def drawn(seed, parts=1, unscorable=0.15):
    """[R, parts] rewards; some rollouts unscorable (all parts NaN), one group of equal rewards."""
    rng = random.Random(seed)
    rows = [[rng.choice([0.0, 1.0, rng.gauss(0, 2)]) for _ in range(parts)] for _ in range(N * SIZE)]
    rows[:SIZE] = [[1.0] * parts] * SIZE
    return [[float("nan")] * parts if rng.random() < unscorable else row for row in rows]


def scores_of(rewards, weights=(1.0,), **more):
    """The Scores of the same rewards."""
    total = [None if r[0] != r[0] else sum(w * v for w, v in zip(weights, r, strict=True)) for r in rewards]
    parts = {str(k): [r[k] for r in rewards] for k in range(len(weights))}
    return scores([total[i:i + SIZE] for i in range(0, len(total), SIZE)], parts=parts,
                  part_weights={str(k): w for k, w in enumerate(weights)}, **more)


def test_advantages_are_the_same(trainer_class):
    for seed in range(3):
        rewards, three, weights = drawn(seed), drawn(seed, 3), (1.0, 0.5, 2.0)
        for scale, function in (("group", grpo), ("none", dr_grpo), ("batch", batch_std)):
            found = trl_advantages("grpo", rewards, scale_rewards=scale)
            assert found == pytest.approx(function(scores_of(rewards)).tolist(), abs=1e-5), scale
        found = trl_advantages("grpo", three, weights, multi_objective_aggregation="normalize_then_sum")
        assert found == pytest.approx(gdpo(scores_of(three, weights)).tolist(), abs=1e-5)
        for normalize in (False, True):
            found = trl_advantages("rloo", rewards, normalize_advantages=normalize)
            assert found == pytest.approx(rloo(scores_of(rewards), normalize=normalize).tolist(), abs=1e-5)


def test_rloo_with_the_kl_in_the_reward(trainer_class):
    """TRL takes off beta * the sum over tokens of log p - log p(reference), as training.advantages.Credit does."""
    rewards, lengths = drawn(7), [1 + i % 3 for i in range(N * SIZE)]
    found = trl_advantages("rloo", rewards, logprobs=(-1.0, -1.5), lengths=lengths, beta=0.1)
    paid = [[r[0] - 0.1 * 0.5 * n] for r, n in zip(rewards, lengths, strict=True)]
    assert found == pytest.approx(rloo(scores_of(paid)).tolist(), abs=1e-5)


def test_difference_equal_rewards_have_exactly_no_advantage(trainer_class):
    """0.1 in float32 is not the mean of seven 0.1; TRL has what rounding leaves, over 1e-4."""
    rewards = [[0.1]] * SIZE + [[0.7]] * SIZE
    assert grpo(scores_of(rewards)).tolist() == [0.0] * 2 * SIZE
    assert trl_advantages("grpo", rewards) == pytest.approx([0.0] * 2 * SIZE, abs=1e-2)


def test_difference_an_answer_with_a_part_that_cannot_be_scored_is_left_out(trainer_class):
    """TRL adds up the parts that it has, so a missing part counts as 0."""
    nan = float("nan")
    rewards = [[1.0, 1.0], [1.0, nan], [0.0, 1.0], [0.0, 0.0]]
    assert trl_advantages("grpo", rewards, (1.0, 1.0), scale_rewards="none") == pytest.approx([1.0, 0.0, 0.0, -1.0])
    s = scores([[2.0, None, 1.0, 0.0]])
    assert dr_grpo(s).tolist() == [1.0, 0.0, 0.0, -1.0]
    assert trl_advantages("grpo", [[2.0], [nan], [1.0], [0.0]], scale_rewards="none") == dr_grpo(s).tolist()
    assert gdpo(scores([[2.0, None, 1.0, 0.0]], parts={"a": [1, 1, 0, 0], "b": [1, None, 1, 0]},
                       part_weights={"a": 1.0, "b": 1.0})).tolist()[1] == 0.0
    assert trl_advantages("grpo", rewards, (1.0, 1.0), multi_objective_aggregation="normalize_then_sum")[1] > 0.1
