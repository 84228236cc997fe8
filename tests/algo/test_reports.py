"""Faults that users of other projects met, tried on every term that could have them."""

import numpy as np
import pytest
import torch

from tests.algo.made import scores
from tests.algo.test_preset_gradients import FOLDER
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.tables import ADVANTAGES, SHAPINGS

LENGTHS = [40.0, 90.0, 200.0, 400.0, 350.0, 120.0]
TEXTS = ["\n\n".join(["so then"] * n) + "<answer>1</answer>" for n in (1, 2, 3, 5, 4, 2)]
OF_ACCURACY = sorted({*SHAPINGS} - {"overlong", "call_cost"})
"""Shapings that pay right and wrong answers differently."""
ELSEWHERE = {"w_reinforce": "a right answer has a constant", "deepsearch": "reads right and wrong of a search alone"}
"""Advantages that do not compare rewards."""


def shaped(name, right):
    (shape,) = Algorithm(config.load(FOLDER / "quickstart.yaml", [f"algo.shaping=[{name}]"])).shaping
    s = scores([[float(r) for r in right]], lengths=LENGTHS, max_length=512, step=150, texts=TEXTS,
               outcome=torch.tensor(right), truncated=torch.zeros(6, dtype=torch.bool))
    return shape(s).tolist()


@pytest.mark.parametrize("name", OF_ACCURACY)
def test_a_reward_of_length_moves_with_the_accuracy(name):
    """VLM-R1#247: the length term was scaled by a constant in place of the accuracy."""
    earned = [shaped(name, [i < right for i in range(6)]) for right in range(7)]
    assert all(len({round(rewards[i], 6) for rewards in earned}) > 1 for i in range(6))
    for i in range(6):  # being right never pays less than being wrong among the same others
        assert earned[i + 1][i] > earned[i][i]


@pytest.mark.parametrize("name", sorted({*ADVANTAGES} - {*ELSEWHERE}))
def test_a_group_of_equal_fractions_has_advantage_zero(name):
    """slime, geo3k_vlm: nine tenths less the mean of nine tenths is not 0 where it is rounded."""
    critic = {"macro_gae": ["algo.critic={}", "algo.loss=ppo_macro"]}.get(name, ["algo.critic={}"])
    words = [f"algo.advantage={name}", *(critic if name.endswith("gae") else ())]
    algorithm = Algorithm(config.load(FOLDER / "quickstart.yaml", words))
    for size in (6, 7, 12, 24):
        lengths = [3 + (i % 4 if name != "rose" else 0) for i in range(size)]  # rose pays right answers by length
        given = algorithm.advantage(scores(
            [[0.9] * size], lengths=lengths, greedy=[0.9] * size, parts={"iou": [0.9] * size},
            part_weights={"iou": 1.0}, max_length=8, outcome=torch.ones(size, dtype=torch.bool),
            tokens=[np.arange(n) + 10 * i for i, n in enumerate(lengths)], masks=[np.ones(n, bool) for n in lengths],
            steps=[[(0, n, 0.9)] for n in lengths], per_token=[{"values": np.full(n, 0.9)} for n in lengths]))
        given = getattr(given, "advantages", given)
        flat = given if torch.is_tensor(given) else torch.cat([torch.as_tensor(a).flatten() for a in given])
        assert len(flat) >= size and bool((flat == 0).all()), size
