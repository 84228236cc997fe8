"""What fresh cases are made of."""

import numpy as np

from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.training.advantages import Credit
from vlrl.types import Completion, Group, Prompt, Rollout, Sample


def preference(rewards, lengths=None, correct=None, parts=None, **settings):
    """Credit.has_signal of one group with these rewards, under these settings."""
    config = configs.validate({"task": {"name": "grounding"}, "model": {"name": "x"},
                               "rollout": {"max_new_tokens": 10}, **settings})
    def completion(n):
        ones = np.ones(n, dtype=np.int64)
        return Completion(tokens=ones, logprobs=-ones.astype(np.float32), loss_mask=ones.astype(bool), text="x" * n,
                          finish_reason="stop")
    ids = np.arange(3)
    prompt = Prompt(sample_id="1", text="?", ids=ids, raw_ids=ids, positions=ids[None])
    written = map(completion, lengths or [3] * len(rewards))
    rollouts = tuple(Rollout(group_id="g", index=i, policy_step=0, completion=done, reward=reward,
                             parts={"p": reward} if parts is None else parts[i],
                             correct=None if correct is None else correct[i])
                     for i, (done, reward) in enumerate(zip(written, rewards, strict=True)))
    group = Group(id="g", split="train", sample=Sample(id="1", row={}), prompt=prompt, rollouts=rollouts, task="t",
                  weights=dict.fromkeys(rollouts[0].parts, 1.0), target=None)
    return Credit(Algorithm(config), config).has_signal(group)
