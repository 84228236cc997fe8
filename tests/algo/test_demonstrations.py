"""Demonstrations beside RL: schedules by hand, losses by hand, and against an implementation row by row."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from vlrl.algo.named import bind
from vlrl.config.base import Named
from vlrl.errors import ConfigError
from vlrl.methods.demonstrations.mixes import MIXES, Chord, ChordPhi, DemonstrationBatch, Relift, Sasr

LN = math.log
ROWS = [([LN(0.5), LN(0.8), LN(0.1)], [1, 1, 0], 1.0), ([LN(0.9)], [1], 2.0)]


def given(rows, total):
    flat = [(x, m, w) for xs, ms, w in rows for x, m in zip(xs, ms, strict=True)]
    logprobs, mask, weights = (torch.tensor(v, dtype=torch.float64) for v in zip(*flat, strict=True))
    return DemonstrationBatch(logprobs=logprobs.requires_grad_(), mask=mask, weights=weights, total_tokens=total)


def test_mu_rises_and_falls():
    mu = [Chord(peak=0.8, valley=0.2, warmup=2, decay=4).shares(step, 0)[1] for step in range(9)]
    half = 0.2 + 0.6 * (1 + math.cos(math.pi / 4)) / 2
    assert mu == pytest.approx([0, 0.4, 0.8, half, 0.5, 1.0 - half, 0.2, 0.2, 0.2])
    assert Chord().shares(0, 0) == pytest.approx((0.1, 0.9)) and Chord().shares(200, 0)[1] == pytest.approx(0.05)
    assert all(sum(Chord().shares(step, 0)) == pytest.approx(1) for step in range(0, 220, 20))
    assert ChordPhi(0.25).shares(7, 3) == (0.75, 0.25)


def test_losses_by_hand():
    d = given(ROWS, 4.0)
    loss = Chord().loss(d)
    loss.backward()
    assert loss.item() == pytest.approx(-(LN(0.5) + LN(0.8) + 2 * LN(0.9)) / 4, abs=1e-5)
    assert d.logprobs.grad.tolist() == pytest.approx([-0.25, -0.25, 0, -0.5])
    d = given(ROWS, 4.0)
    loss = ChordPhi().loss(d)
    loss.backward()
    assert loss.item() == pytest.approx(-(0.25 * LN(0.5) + 0.16 * LN(0.8) + 2 * 0.09 * LN(0.9)) / 4, abs=1e-5)
    assert d.logprobs.grad.tolist() == pytest.approx([-0.25 / 4, -0.16 / 4, 0, -2 * 0.09 / 4])
    assert Sasr().loss(given(ROWS, 4.0)).item() == pytest.approx(Chord().loss(given(ROWS, 4.0)).item())
    d = replace(given(ROWS, 4.0), entropy=torch.tensor([1.0, 2.0, 7.0, 0.5], dtype=torch.float64))
    assert Relift(entropy=0.1).loss(d).item() == pytest.approx(
        -(LN(0.5) + LN(0.8) + 2 * LN(0.9)) / 4 - 0.1 * 3.5 / 4, abs=1e-5)


def test_sasr_by_hand():
    mix = Sasr(warmup=2, gamma=2.0)
    for step, norm in ((0, 9.0), (1, 4.0)):
        assert mix.shares(step, 0) == (0.0, 1.0)
        mix.observe(step, norm)
    assert mix.chance(2) == pytest.approx(4 / (4 + 2 * 4))  # the last of the warm-up, not the first
    mix.observe(2, 8.0)
    assert mix.chance(3) == mix.chance(9) == pytest.approx(8 / (8 + 2 * 4))
    supervised = sum(mix.shares(step, 5)[1] for step in range(2, 2002))
    assert supervised == pytest.approx(1000, abs=70)  # three standard errors
    assert [mix.shares(s, 5) for s in range(50)] == [mix.shares(s, 5) for s in range(50)]
    assert [mix.shares(s, 5) for s in range(50)] != [mix.shares(s, 6) for s in range(50)]
    again = Sasr(warmup=2, gamma=2.0)
    again.load_state_dict(mix.state_dict())
    assert again.chance(3) == mix.chance(3)
    mix.observe(3, 0.0)  # without a supervised gradient it is RL
    assert {mix.shares(step, 0) for step in range(4, 200)} == {(1.0, 0.0)}


def test_relift_collects_each_prompt_once_and_goes_on_with_its_optimizer():
    mix = Relift(size=3)
    mix.collect([5, 2, 5])
    mix.collect([2])
    assert mix.due() == [] and mix.metrics(0) == {"demonstrations/buffer": 2.0}
    mix.collect([9, 2, 4])
    assert mix.due() == [5, 2, 9] and mix.buffer == [4] and mix.due() == []
    mix.collect([5])  # once it is out it may fail again
    assert mix.buffer == [4, 5] and mix.shares(3, 0) == (1.0, 0.0)
    mix.collect([6])
    assert mix.due() == [4, 5, 6] and mix.buffer == []
    weight = torch.nn.Parameter(torch.ones(2))
    def stepped(mix, gradient):
        weight.grad = torch.tensor(gradient)
        mix.optimizer([weight]).step()
    mix = Relift(size=3, lr=0.1)
    assert mix.state_dict() == {"buffer": []}
    mix.collect([7])
    stepped(mix, [1.0, -2.0])
    state, before = copy.deepcopy(mix.state_dict()), weight.detach().clone()
    stepped(mix, [0.5, 0.5])
    wanted = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(before)
    again = Relift(size=3, lr=0.1)
    again.load_state_dict(state)
    assert again.buffer == [7] and again.state_dict()["optimizer"] == state["optimizer"]  # before it is used
    stepped(again, [0.5, 0.5])
    assert torch.equal(weight, wanted)


def test_options():
    assert {*MIXES} == {"chord", "chord_phi", "sasr", "relift"}
    for mix, message in (({"name": "chord", "valley": 0.95}, "above peak"), ({"name": "chord", "mu": 1}, "no option"),
                         ({"name": "sasr", "warmup": 0}, "greater than or equal to 1")):
        with pytest.raises(ConfigError, match=message):
            bind("algo.demonstrations.mix", Named(**mix), MIXES)
