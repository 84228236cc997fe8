"""Weights on tokens and rollouts, corrections for the sampler, and aggregations, by hand."""

from dataclasses import replace
from math import e, nan
from math import exp as E

import numpy as np
import pytest
import torch

from tests.algo.flat import bound, flat, part, process, random_step, run, side_by_side, with_prepared
from tests.tables import each
from vlrl.algo.aggregation import AGGREGATIONS
from vlrl.algo.tables import CORRECTIONS, WEIGHTS
from vlrl.errors import ConfigError
from vlrl.methods.objectives.weights import planning_tokens


def test_top_entropy_by_hand():
    # of 1, 2, 3, 0.5, 4 the quantile 0.8 is 3.2; 0.5 is 2, where both 2 and above stay; the last token is not trained
    x = flat([-1.0] * 6, rollout=[0, 0, 0, 1, 1, 1], mask=[1, 1, 1, 1, 1, 0], entropy=[1.0, 2.0, 3.0, 0.5, 4.0, 9.0])
    for options, kept in (({}, [0, 0, 0, 0, 1, 0]), ({"share": 0.5}, [0, 1, 1, 0, 1, 0]),
                          ({"share": 0.6}, [0, 1, 1, 0, 1, 0]), ({"share": 1.0}, [1, 1, 1, 1, 1, 0])):
        assert run(bound(WEIGHTS, "top_entropy", **options), x).tolist() == kept, options
    none = flat([-1.0], mask=[0], entropy=[1.0])
    assert run(bound(WEIGHTS, "top_entropy"), none).tolist() == [0.0]


def test_top_entropy_is_numpys_quantile_of_the_whole_step_for_all_processes(monkeypatch):
    x = random_step(3, groups=6, longest=9)
    keep = run(bound(WEIGHTS, "top_entropy", share=0.3), x)
    trained = x.mask > 0
    threshold = np.quantile(x.entropy[trained].numpy(), 0.7)
    assert keep.tolist() == ((x.entropy >= threshold) & trained).double().tolist()
    x, weight = random_step(3), bound(WEIGHTS, "top_entropy", share=0.3)
    own = [process(x, [8, 9, 10, 11]), process(x, list(range(8)))]
    kept = side_by_side(monkeypatch, [lambda p=p: run(weight, p) for p in own])
    monkeypatch.undo()
    whole = run(weight, x)
    assert torch.equal(torch.cat([kept[1], kept[0]]), whole) and 0 < whole.sum() < len(whole)


@each("texts rollouts phrases found", [
    (["So", " Wa", "it", ", let", " me", "  TRY", " again", ".", " await", "", " wait", "let", " me"],
     [0] * 11 + [1] * 2, ("wait", "let me try"), [1, 2, 3, 4, 5, 10]),
    (["hold", " on"], [0, 1], ("hold on",), []),  # they stay inside a rollout
    (["wait", " a", " bit"], [0, 0, 0], ("wait", "wait a bit"), [0, 1, 2]),  # the longest phrase
    (["xay", " ", "wait", "ing"], [0] * 4, ("x.y", " ", "wait"), []), (["a", "(b", " c"], [0, 0, 0], ("a(b",), [0, 1]),
    ([], [], ("a",), []), (["我们", "等一", "下", "再看", " b"], [0] * 5, ("等一下", "b"), [1, 2, 4]),
    (["もう一度", "abc"], [0, 0], ("一度ab", "度a"), [])])
def test_planning_tokens_by_hand(texts, rollouts, phrases, found):
    assert [i for i, plans in enumerate(planning_tokens(texts, rollouts, phrases)) if plans] == found


def test_hicra_by_hand():
    x = flat([-1.0] * 4, adv=[2.0, -1.0, 0.0, 2.0], texts=[" wait", "wait ", "wait", " no"], rollout=[0, 1, 2, 2])
    assert run(bound(WEIGHTS, "hicra"), x).tolist() == pytest.approx([1.2, 0.8, 1, 1])  # A + 0.2 |A|: 2.4, -0.8
    assert run(bound(WEIGHTS, "hicra", phrases=["no"], alpha=0.5), x).tolist() == pytest.approx([1, 1, 1, 1.5])
    with pytest.raises(ConfigError, match="phrases is empty"):
        bound(WEIGHTS, "hicra", phrases=[" "])


def test_difficulty_and_dads_by_hand():
    x = flat([-1.0] * 4, rollout=[0, 1, 1, 2], difficulty=[1.0, 0.25, nan])
    assert run(bound(WEIGHTS, "difficulty"), x).tolist() == pytest.approx([1.5, 0.75, 0.75, 1])
    assert run(bound(WEIGHTS, "difficulty", low=1.0, high=3.0), x).tolist() == pytest.approx([3, 1.5, 1.5, 1])
    x = flat([-1.0] * 8, adv=[1.0, -1.0, 1.0, 0.0, 1.0, 1.0, 1.0, -1.0], rollout=list(range(8)), rewards=REWARDS,
             group=GROUP)
    shaped = 1 - E(-e / 3)
    assert run(bound(WEIGHTS, "dads"), x).tolist() == pytest.approx([shaped, 1, shaped, 1, 1, 1, 1, 1], abs=1e-5)
    assert run(bound(WEIGHTS, "dads", above=-1.0), x).tolist() == [1.0] * 8


# groups: one of three right (and one unscorable), all right, none right
REWARDS, GROUP = [1.0, 0.0, 0.0, nan, 1.0, 1.0, 0.0, 0.0], [0, 0, 0, 0, 1, 1, 2, 2]


def test_stcr_by_hand():
    # lengths 2 (right), 3 and 1 (wrong), 4 (unscorable), 2 and 2, 3 and 1 without a right one
    lengths = [2, 3, 1, 4, 2, 2, 3, 1]
    ids = [r for r, n in enumerate(lengths) for _ in range(n)]
    x = flat([-1.0] * sum(lengths), rollout=ids, rewards=REWARDS, group=GROUP)
    expected = [1 + (1 - 2.0 ** -1) if r == 1 else 1.0 for r in ids]
    assert run(bound(WEIGHTS, "stcr", base=2.0), x).tolist() == pytest.approx(expected, abs=1e-5)
    two_right = replace(x, rewards=torch.tensor([1.0, 0.0, 1.0, nan, 1.0, 1.0, 0.0, 0.0]).double())  # mean length 1.5
    assert run(bound(WEIGHTS, "stcr", base=2.0), two_right).tolist()[:6] == pytest.approx(
        [1, 1, *[2 - 2 ** -1.5] * 3, 1], abs=1e-5)
    long = replace(x, lengths=torch.tensor([1000.0, 3000, 1, 1, 1, 1, 1, 1]).double())
    assert run(bound(WEIGHTS, "stcr"), long).tolist()[2] == pytest.approx(2 - 1.00001 ** -2000, abs=1e-7)


def test_off_policy_sequence_mask_by_hand():
    # mean of sampled - current: 0.15 with A of both signs | 0.15, masked outlier | 0.05
    x = flat([-1.0] * 5, adv=[1.0, -1.0, -1.0, -1.0, -1.0], rollout=[0, 0, 1, 1, 2], mask=[1, 1, 1, 0, 1],
             old=[-0.9, -0.8, -0.85, -9.0, -0.95])
    mask = bound(WEIGHTS, "off_policy_sequence_mask")
    assert run(mask, x).tolist() == [1, 0, 0, 0, 1]
    assert run(bound(WEIGHTS, "off_policy_sequence_mask", delta=0.2), x).tolist() == [1] * 5
    sampled = replace(x, sampler_logprobs=torch.tensor([-1.0, -1.0, nan, -1.0, -0.5]).double())
    assert run(mask, sampled).tolist() == [1, 1, 1, 1, 0]
    partly = replace(x, sampler_logprobs=torch.tensor([nan, -0.5, -1.0, -1.0, -1.0]).double())  # mean 0.25
    assert run(mask, partly).tolist() == [1, 0, 1, 1, 1]
    assert run(mask, replace(x, advantages=-x.advantages)).tolist() == [0, 1, 1, 1, 1]


def test_of_no_token_and_in_low_precision():
    for name in WEIGHTS:
        weight, x = bound(WEIGHTS, name), random_step(8)
        ready = with_prepared(weight, x)
        assert not weight(ready).requires_grad and (weight(ready) >= 0).all() and weight(part(ready, [])).shape == (0,)
        low = replace(x, logprobs=x.logprobs.detach().bfloat16(), advantages=x.advantages.bfloat16())
        assert run(weight, low).isfinite().all(), name


# D = 0.4, 0.8 | -1.2, masked 0.9 | 0
OLD, SAMPLER = [-1.0, -1.0, -2.0, -1.0, -3.0], [-1.4, -1.8, -0.8, -1.9, -3.0]
IDS, MASK = [0, 0, 1, 1, 2], [1, 1, 1, 0, 1]


CORRECTED = [
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


def test_corrections_by_hand():
    for name, options, weight, outside in CORRECTED:
        x = flat(OLD, OLD, rollout=IDS, mask=MASK, sampler_logprobs=SAMPLER)
        got, metrics = run(bound(CORRECTIONS, name, **options), x)
        assert got.tolist() == pytest.approx(weight, abs=1e-5) and not got.requires_grad, (name, options)
        assert {k: v.item() for k, v in metrics.items()} == pytest.approx({
            "correction/weight": sum(w * m for w, m in zip(weight, MASK, strict=True)), "correction/outside": outside})


@each("name", CORRECTIONS)
def test_unknown_far_and_masked_tokens(name):
    x = flat([-1.0] * 4, [-1.0, 0.0, -900.0, -1.0], rollout=[0, 1, 2, 3], mask=[1, 1, 1, 0],
             sampler_logprobs=[nan, -900.0, 0.0, nan])
    weight, _ = run(bound(CORRECTIONS, name, low=None, high=None), x)
    assert weight.tolist() == pytest.approx([1, E(20), E(-20), 1])
    low = replace(x, old_logprobs=x.old_logprobs.bfloat16(), sampler_logprobs=x.sampler_logprobs.bfloat16())
    assert run(bound(CORRECTIONS, name), low)[0].isfinite().all()
    assert run(bound(CORRECTIONS, name), part(x, []))[0].shape == (0,)


# two rollouts, of two tokens and of one; max_length 4
PER_TOKEN, OF_TWO = [1.0, 3.0, -2.0], [0, 0, 1]


def test_aggregations_by_hand():
    for name, value, slope in (("token_mean", 2 / 3, [1 / 3] * 3),
                               ("sequence_mean", (4 / 2 - 2) / 2, [1 / 4, 1 / 4, 1 / 2]),
                               ("constant", 2 / (2 * 4), [1 / 8] * 3), ("sequence_sum", 2 / 2, [1 / 2] * 3)):
        per_token = torch.tensor(PER_TOKEN, dtype=torch.float64, requires_grad=True)
        loss = AGGREGATIONS[name](per_token, flat([0.0] * 3, rollout=OF_TWO))
        assert loss.item() == pytest.approx(value, abs=1e-9), name
        assert torch.autograd.grad(loss, per_token)[0].tolist() == pytest.approx(slope, abs=1e-9), name
    for name, value in (("token_mean", (1 - 6) / 2), ("sequence_mean", (1 - 6) / 2), ("constant", (1 - 6) / 8),
                        ("sequence_sum", -5 / 2)):  # masked tokens do not count, and samples have weights
        x = flat([0.0] * 3, rollout=OF_TWO, mask=[1, 0, 1], weights=[1.0, 1.0, 3.0])
        assert AGGREGATIONS[name](torch.tensor(PER_TOKEN).double(), x).item() == pytest.approx(value, abs=1e-9), name
        nothing = flat([0.0] * 3, rollout=OF_TWO, mask=[0, 0, 0])
        assert AGGREGATIONS[name](torch.tensor(PER_TOKEN).double(), nothing).item() == 0
        low = replace(flat([0.0] * 3, rollout=OF_TWO), mask=torch.ones(3))
        assert AGGREGATIONS[name](torch.tensor(PER_TOKEN).bfloat16(), low).isfinite()
    x = flat([0.0] * 3, rollout=OF_TWO)
    assert AGGREGATIONS["constant"](torch.tensor(PER_TOKEN).double(), x, length=64).item() == pytest.approx(2 / 128)
