"""BroRL's groups (arXiv 2510.01180): 512 answers to one prompt are cut into pieces that repeat it."""

import numpy as np
import pytest

from tests.conftest import SAMPLES, random_answers
from tests.helpers import Vowels, load, settings
from tests.training.test_update import assert_close, gradients
from vlrl.algo.advantage import grpo
from vlrl.models.packing import pieces_of
from vlrl.rollout.generate import make_group
from vlrl.training.advantages import credit
from vlrl.types import Completion

pytestmark = pytest.mark.slow


def test_a_group_of_512_learns_the_same_in_pieces(tiny_models):
    folder = tiny_models["qwen3_vl"]
    policy, encode = load(settings(folder))
    vocabulary = len(policy.processor.tokenizer)
    answers = random_answers(3, 512, vocabulary, set(policy.banned.tolist()) | policy.eos, longest=4)
    made = [Completion(tokens=t, logprobs=np.zeros(len(t), np.float32), loss_mask=np.ones(len(t), bool),
                       text=policy.processor.tokenizer.decode(t), finish_reason="stop") for t in answers]
    prompt = encode(Vowels(), SAMPLES["image"])
    group = make_group(Vowels(), SAMPLES["image"], prompt, made, group_id="0", split="train", step=0)
    (group,) = credit([group], grpo)
    assert abs(sum(r.advantage for r in group.rollouts)) < 1e-6 < max(r.advantage for r in group.rollouts)
    assert len(pieces_of([prompt] * 512, answers, 200)) > 4

    def config(tokens):
        return settings(folder, rollout={"group_size": 512, "max_new_tokens": 8},
                        train={"max_grad_norm": 1e9, "tokens_per_batch": tokens})
    (whole,), _, _ = gradients(policy, [group], config(10**6))
    (pieces,), _, _ = gradients(policy, [group], config(200))
    assert_close(pieces, whole)
