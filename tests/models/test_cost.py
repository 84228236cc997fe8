"""Work shared out by cost: over micro-batches, and over processes (those that really run are in tests/e2e)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import credited_groups, load, settings
from vlrl.distributed import comm
from vlrl.models import cost
from vlrl.models.balance import EVEN, WORTH_MOVING, assign
from vlrl.models.cost import bins, group_cost, optimizer_steps, share_out


def loads(costs, places):
    return [sum(c for c, p in zip(costs, places, strict=True) if p == n) for n in range(max(places) + 1)]


def test_bins_are_few_and_of_similar_cost():
    sizes, costs = [6, 5, 4, 3, 2], [1, 9, 1, 9, 2]
    assert bins(sizes, costs, 12) == [[1, 4, 2], [3, 0]]  # costs 12 and 10; by size alone 3 and 19
    assert bins([4, 4, 4], [1, 1, 1], 8) == [[0, 2], [1]]
    assert bins([20, 3], [20, 3], 8) == [[0], [1]]  # larger than the limit: alone
    assert bins([], [], 8) == []
    sizes = [5, 4, 3, 3, 3]  # by falling cost the small ones fill both bins first
    assert bins(sizes, [1, 1, 9, 9, 9], 9) == [[0, 1], [2, 3, 4]]


@given(st.lists(st.tuples(st.integers(1, 40), st.floats(0, 1e15)), max_size=30), st.integers(1, 60))
def test_bins_hold_every_item_once_within_the_limit(items, limit):
    sizes, costs = [n for n, _ in items], [c for _, c in items]
    found = bins(sizes, costs, limit)
    assert sorted(i for b in found for i in b) == list(range(len(items)))
    assert all(len(b) == 1 or sum(sizes[i] for i in b) <= limit for b in found)
    first_fit = cost._first_fit(sizes, limit)
    assert len(found) <= len(first_fit)
    assert max((sum(costs[i] for i in b) for b in found), default=0) <= \
        max((sum(costs[i] for i in b) for b in first_fit), default=0)


def test_few_groups_move():
    costs, owners = [4, 4, 1, 1], [0, 0, 1, 1]
    found = assign(costs, owners, 2)
    assert loads(costs, found) == [5, 5]
    assert sum(a != b for a, b in zip(owners, found, strict=True)) == 2  # 4 against 1
    assert assign([3, 3, 3, 3], [0, 0, 0, 1], 2) == [1, 0, 0, 1]
    assert loads([5, 5, 3, 3], assign([5, 5, 3, 3], [0, 0, 1, 1], 2)) == [8, 8]  # two change places
    assert assign([5, 5], [0, 0], 4)[1] == 0  # one of the two moves
    assert assign([1.0, 1.0 / WORTH_MOVING], [0, 1], 2) == [0, 1]  # even enough
    assert assign([7], [0], 3) == [0] and assign([], [], 3) == [] and assign([0, 0], [0, 0], 2) == [0, 0]


@given(st.lists(st.tuples(st.floats(0, 1e15), st.integers(0, 4)), max_size=25))
def test_the_largest_load_never_grows(items):
    costs, owners = [c for c, _ in items], [o for _, o in items]
    found = assign(costs, owners, 5)
    before, after = ([sum(c for c, p in zip(costs, places, strict=True) if p == n) for n in range(5)]
                     for places in (owners, found))
    assert set(found) <= set(range(5)) and max(after) <= max(before)
    if sum(costs) and max(before) <= WORTH_MOVING * sum(costs) / 5:
        assert found == owners
    if items and max(costs) * 100 < sum(costs) / 5:  # of many small ones all loads can be made even
        assert max(after) <= (EVEN + 0.05) * sum(costs) / 5


def test_optimizer_steps_do_not_depend_on_who_has_a_group(monkeypatch):
    everyone = [f"{i:08d}" for i in range(7)]
    whole = optimizer_steps(everyone, 3)
    assert whole == [0, 0, 1, 1, 1, 2, 2] and optimizer_steps(everyone, 1) == [0] * 7
    shares = [everyone[:5], everyone[5:]]
    monkeypatch.setattr(comm, "gather", lambda value: shares)
    for share in shares:
        assert optimizer_steps(share, 3) == [whole[everyone.index(i)] for i in share]


@pytest.fixture(scope="module")
def scene(tiny_models):
    config = settings(tiny_models["qwen3_vl"])
    policy, encode = load(config)
    return policy, config, credited_groups(policy, encode, config, ("image", "text"))


def test_cost_of_a_group(scene):
    policy, _, (image, text) = scene
    lengths = [len(r.completion.tokens) for r in image.rollouts]
    assert group_cost(image, cost.tokens) == len(image.prompt) + sum(lengths)
    other = replace(image, rollouts=(image.rollouts[0], replace(image.rollouts[1], train_prompt=text.prompt)))
    assert group_cost(other, cost.tokens) == len(image.prompt) + len(text.prompt) + sum(lengths[:2])
    twice = replace(image, rollouts=image.rollouts * 2)
    assert group_cost(image, policy.cost) < group_cost(twice, policy.cost) < 2 * group_cost(image, policy.cost)
    blind = replace(image.prompt, mm={})
    assert policy.cost(image.prompt, lengths) > 1.05 * policy.cost(blind, lengths)  # the vision tower counts


class Two:
    """Two processes in one: what the other one would answer is given."""

    def __init__(self, monkeypatch, own, other):
        self.sent, replies = {}, iter(other)
        monkeypatch.setattr(comm, "world", lambda: 2)
        monkeypatch.setattr(comm, "rank", lambda: own)
        monkeypatch.setattr(comm, "gather", lambda value: [value, next(replies)][::1 if own == 0 else -1])
        monkeypatch.setattr(comm, "exchange", lambda routes: self.sent.update(routes) or [])


def test_only_groups_that_move_are_sent(scene, monkeypatch):
    _, config, (image, _) = scene
    groups = [replace(image, id=str(i)) for i in range(4)]
    two = Two(monkeypatch, 0, [[], []])
    kept, metrics = share_out(groups, cost.tokens, config)
    assert len(kept) == 2 and metrics["balance/imbalance"] == pytest.approx(1)
    assert [(route, len(data)) for route, data in two.sent.items()] == [((0, 1), 2)]


def test_a_group_that_cannot_travel_stays(scene, monkeypatch):
    _, config, (image, _) = scene
    odd = replace(image, sample=replace(image.sample, row={**image.sample.row, "made by": lambda: None}))
    two = Two(monkeypatch, 0, [[], []])
    groups = [replace(odd, id=str(i)) for i in range(4)]
    kept, metrics = share_out(groups, cost.tokens, config)
    assert kept == groups and not two.sent and metrics["balance/imbalance"] == pytest.approx(2)


def test_nothing_moves_for_one_process_or_when_it_is_off(scene, monkeypatch):
    _, config, groups = scene
    assert share_out(groups, cost.tokens, config) == (groups, {})
    monkeypatch.setattr(comm, "world", lambda: 2)
    off = config.model_copy(update={"train": config.train.model_copy(update={"balance": False})})
    assert share_out(groups, cost.tokens, off) == (groups, {})
