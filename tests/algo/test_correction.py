"""Sampler/trainer corrections by hand."""

from dataclasses import replace
from math import exp as E
from math import nan

import pytest

from tests.algo.flat import bound, flat, part, run
from vlrl.algo.tables import CORRECTIONS

# D = 0.4, 0.8 | -1.2, masked 0.9 | 0
OLD, SAMPLER = [-1.0, -1.0, -2.0, -1.0, -3.0], [-1.4, -1.8, -0.8, -1.9, -3.0]
IDS, MASK = [0, 0, 1, 1, 2], [1, 1, 1, 0, 1]


CASES = [
    ("token_truncate", {}, [E(0.4), 2, E(-1.2), 1, 1], 1),
    ("token_truncate", {"low": 0.5, "high": 1.2}, [1.2, 1.2, 0.5, 1, 1], 3),
    ("token_truncate", {"high": None}, [E(0.4), E(0.8), E(-1.2), 1, 1], 0),
    ("token_mask", {}, [E(0.4), E(0.8), 0, 1, 1], 1),
    ("token_mask", {"low": None, "high": 2.0}, [E(0.4), 0, E(-1.2), 1, 1], 1),
    # sums 1.2 | -1.2 | 0
    ("sequence_truncate", {}, [3, 3, E(-1.2), E(-1.2), 1], 2),
    ("sequence_truncate", {"low": 0.5, "high": 4.0}, [E(1.2), E(1.2), 0.5, 0.5, 1], 1),
    ("sequence_mask", {}, [0, 0, E(-1.2), E(-1.2), 1], 2),
    ("sequence_mask", {"low": 0.5, "high": 4.0}, [E(1.2), E(1.2), 0, 0, 1], 1),
    # means 0.6 | -1.2 | 0
    ("geometric_truncate", {}, [E(0.6), E(0.6), E(-1.2), E(-1.2), 1], 0),
    ("geometric_truncate", {"low": 0.5, "high": 1.5}, [1.5, 1.5, 0.5, 0.5, 1], 3),
    ("geometric_mask", {}, [0, 0, 0, 0, 1], 3),
    ("geometric_mask", {"low": 0.5, "high": 2.0}, [E(0.4), E(0.8), 0, 0, 1], 1),
    ("geometric_mask", {"low": 0.2, "high": 1.5, "kept": "geometric"}, [0, 0, E(-1.2), E(-1.2), 1], 2),
    ("geometric_mask", {"low": 0.5, "high": 2.0, "kept": "one"}, [1, 1, 0, 0, 1], 1)]


def test_by_hand():
    for name, options, weight, outside in CASES:
        x = flat(OLD, OLD, rollout=IDS, mask=MASK, sampler_logprobs=SAMPLER)
        got, metrics = run(bound(CORRECTIONS, name, **options), x)
        assert got.tolist() == pytest.approx(weight, abs=1e-5) and not got.requires_grad, (name, options)
        assert {k: v.item() for k, v in metrics.items()} == pytest.approx({
            "correction/weight": sum(w * m for w, m in zip(weight, MASK, strict=True)), "correction/outside": outside})


@pytest.mark.parametrize("name", CORRECTIONS)
def test_unknown_far_and_masked_tokens(name):
    x = flat([-1.0] * 4, [-1.0, 0.0, -900.0, -1.0], rollout=[0, 1, 2, 3], mask=[1, 1, 1, 0],
             sampler_logprobs=[nan, -900.0, 0.0, nan])
    weight, _ = run(bound(CORRECTIONS, name, low=None, high=None), x)
    assert weight.tolist() == pytest.approx([1, E(20), E(-20), 1])
    low = replace(x, old_logprobs=x.old_logprobs.bfloat16(), sampler_logprobs=x.sampler_logprobs.bfloat16())
    assert run(bound(CORRECTIONS, name), low)[0].isfinite().all()
    assert run(bound(CORRECTIONS, name), part(x, []))[0].shape == (0,)
