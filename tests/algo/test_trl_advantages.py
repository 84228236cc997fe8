"""Advantages equal to those that TRL's trainers compute of the same rewards, and each deliberate difference."""

import random
from collections import defaultdict, deque
from types import SimpleNamespace

import pytest
import torch

from tests.algo.made import scores
from vlrl.algo.advantage import dr_grpo, grpo, rloo
from vlrl.methods.objectives.advantage import batch_std, gdpo

pytestmark = pytest.mark.slow
N, SIZE = 5, 4


@pytest.fixture(scope="module", autouse=True)
def _has_trl():
    pytest.importorskip("trl")


def trl(kind, rewards, weights=(1.0,), logprobs=(0.0, 0.0), lengths=None, **own):
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


def ours(rewards, weights=(1.0,), **more):
    """The Scores of the same rewards."""
    total = [None if r[0] != r[0] else sum(w * v for w, v in zip(weights, r, strict=True)) for r in rewards]
    parts = {str(k): [r[k] for r in rewards] for k in range(len(weights))}
    return scores([total[i:i + SIZE] for i in range(0, len(total), SIZE)], parts=parts,
                  part_weights={str(k): w for k, w in enumerate(weights)}, **more)


def test_advantages_are_the_same():
    for seed in range(3):
        rewards, three, weights = drawn(seed), drawn(seed, 3), (1.0, 0.5, 2.0)
        for scale, function in (("group", grpo), ("none", dr_grpo), ("batch", batch_std)):
            assert trl("grpo", rewards, scale_rewards=scale) == pytest.approx(function(ours(rewards)).tolist(),
                                                                              abs=1e-5), scale
        found = trl("grpo", three, weights, multi_objective_aggregation="normalize_then_sum")
        assert found == pytest.approx(gdpo(ours(three, weights)).tolist(), abs=1e-5)
        for normalize in (False, True):
            found = trl("rloo", rewards, normalize_advantages=normalize)
            assert found == pytest.approx(rloo(ours(rewards), normalize=normalize).tolist(), abs=1e-5)


def test_rloo_with_the_kl_in_the_reward():
    """TRL takes off beta * the sum over tokens of log p - log p(reference), as training.advantages.Credit does."""
    rewards, lengths = drawn(7), [1 + i % 3 for i in range(N * SIZE)]
    found = trl("rloo", rewards, logprobs=(-1.0, -1.5), lengths=lengths, beta=0.1)
    paid = [[r[0] - 0.1 * 0.5 * n] for r, n in zip(rewards, lengths, strict=True)]
    assert found == pytest.approx(rloo(ours(paid)).tolist(), abs=1e-5)


def test_difference_equal_rewards_have_exactly_no_advantage():
    """0.1 in float32 is not the mean of seven 0.1; TRL has what rounding leaves, over 1e-4."""
    rewards = [[0.1]] * SIZE + [[0.7]] * SIZE
    assert grpo(ours(rewards)).tolist() == [0.0] * 2 * SIZE
    assert trl("grpo", rewards) == pytest.approx([0.0] * 2 * SIZE, abs=1e-2)


def test_difference_an_answer_with_a_part_that_cannot_be_scored_is_left_out():
    """TRL adds up the parts that it has, so a missing part counts as 0."""
    nan = float("nan")
    rewards = [[1.0, 1.0], [1.0, nan], [0.0, 1.0], [0.0, 0.0]]
    assert trl("grpo", rewards, (1.0, 1.0), scale_rewards="none") == pytest.approx([1.0, 0.0, 0.0, -1.0])
    s = scores([[2.0, None, 1.0, 0.0]])
    assert dr_grpo(s).tolist() == [1.0, 0.0, 0.0, -1.0]
    assert trl("grpo", [[2.0], [nan], [1.0], [0.0]], scale_rewards="none") == dr_grpo(s).tolist()
    assert gdpo(scores([[2.0, None, 1.0, 0.0]], parts={"a": [1, 1, 0, 0], "b": [1, None, 1, 0]},
                       part_weights={"a": 1.0, "b": 1.0})).tolist()[1] == 0.0
    assert trl("grpo", rewards, (1.0, 1.0), multi_objective_aggregation="normalize_then_sum")[1] > 0.1
