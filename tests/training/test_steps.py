"""Values of steps of an answer reach its tokens."""

import numpy as np
import pytest

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings
from vlrl.algo.algorithm import Algorithm
from vlrl.rollout.generate import make_group
from vlrl.training.advantages import Credit
from vlrl.types import Completion, StepValues

TEXTS = ("I see a c\u00e4t \U0001f600\n\nTwo of them.", "No\n\ncat")


class Stepwise(Vowels):
    def score_group(self, sample, answers, services):
        ends = [(answer.text.index("\n\n"), len(answer.text)) for answer in answers]
        return [{"vowels": StepValues((0.4 + i, 0.2), end)} for i, end in enumerate(ends)]


def test_each_token_has_the_value_of_its_step(tiny_models):
    """A token that holds the end of a step belongs to it; the last token, which ends the answer, to none."""
    config = settings(tiny_models["qwen3_vl"], algo={"advantage": {"name": "clip_delta", "eta": 1.0, "scale": 1.0,
                                                                   "normalize": False}})
    policy, encode = load(config)
    task, prompt = Stepwise(), encode(Vowels(), SAMPLES["text"])
    answers = []
    for text in TEXTS:
        ids = encode.answer_ids(text)
        answers.append(Completion(tokens=ids, logprobs=np.zeros(len(ids)), loss_mask=np.ones(len(ids), bool), text=text,
                                  finish_reason="stop"))
    group = make_group(task, SAMPLES["text"], prompt, answers, group_id="a", split="train", step=0)
    rewards = [r.reward for r in group.rollouts]
    assert rewards == pytest.approx([0.3, 0.8]) and [v for _, v in group.rollouts[0].steps] == [0.4, 0.2]
    (credited,) = Credit(Algorithm(config), config, policy, task)([group], 0)
    decode = encode.processor.tokenizer.decode
    for rollout, text, first, base in zip(credited.rollouts, TEXTS, (-0.6, 0.0), (-0.25, 0.25), strict=True):
        end = text.index("\n\n")
        for k, advantage in enumerate(rollout.advantage):
            before = len(decode(rollout.completion.tokens[:k]))
            step = 0.0 if before >= len(text) else first if before < end else -0.8
            assert advantage == pytest.approx(base + step), (k, before)
