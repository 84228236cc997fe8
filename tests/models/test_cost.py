"""Useful operations by hand and by PyTorch's counter, and work shared out by cost (over processes: tests/e2e)."""

import dataclasses
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForImageTextToText, Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from tests.conftest import FAMILIES, SAMPLES, kinds_of, noise
from tests.helpers import Vowels, credited_groups, load, settings
from vlrl.config import validate
from vlrl.distributed import comm
from vlrl.models import cost, flops
from vlrl.models.balance import EVEN, WORTH_MOVING, assign
from vlrl.models.cost import bins, group_cost, optimizer_steps, share_out
from vlrl.models.families import family_of
from vlrl.models.flops import Cost, Products
from vlrl.models.packing import pack, pieces_of
from vlrl.types import Media, Sample

HAND = Cost(language=Products(100), head=Products(10), merger=Products(6, trained=6), vision=Products(20, first=5),
            attention=8, sight=(3, 2), window=4, merge=4)
LEARNS = dataclasses.replace(HAND, language=Products(100, 100), head=Products(10, 10), vision=Products(20, 20, 5))


def counted(work):
    """Operations of the matrix products; those inside a fused attention are counted by some versions of torch alone."""
    with FlopCounterMode(display=False) as counter:
        work()
    return sum(n for name, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(name))


def test_by_hand():
    pairs = 3 * 4 / 2 + (2 * 3 + 3) + (1 * 3 + 1)  # prompt of 3, answers of 2 and 1
    sight = 3 * (8 * 8 + 4 * 4) + 2 * (8 * 4 + 4 * 4)  # pictures of 8 and 4 patches
    forward = 2 * (100 * 6 + 10 * 3 + 6 * 12 / 4 + 20 * 12) + 4 * (8 * pairs + sight)
    assert HAND.forward(3, [8, 4], [2, 1]) == forward
    assert HAND.of(3, [8, 4], [2, 1]) == forward + 2 * (100 * 6 + 10 * 3) + 8 * 8 * pairs + 4 * 6 * 12 / 4
    assert LEARNS.of(3, [8, 4], [2, 1]) == 3 * forward - 2 * 5 * 12  # pixels have no gradient
    assert HAND.tower([8, 4]) == 2 * (6 * 12 / 4 + 20 * 12) + 4 * sight
    assert HAND.decode(3, [2, 1]) == 2 * (100 + 10) * 3 + 4 * 8 * (pairs - 6)
    assert HAND.of(3, (), [2]) == HAND.forward(3, (), [2])  # the merger sees no picture
    frozen = dataclasses.replace(HAND, merger=Products(6))
    assert frozen.of(3, [8], [2]) == frozen.forward(3, [8], [2])
    language = dataclasses.replace(LEARNS, merger=Products(6), vision=Products(20, first=5))
    assert language.of(3, [8], [2]) == 3 * language.forward(3, (), [2]) + language.tower([8])
    assert LEARNS.of(9, [8], [4] * 8) == pytest.approx(8 * LEARNS.of(9, [8], [4]) - 7 * LEARNS.of(9, [8]))


MODELS = {"all": {"train": ["language", "merger", "vision"]}, "merger": {"train": ["merger"]},
          "lora": {"lora": {"rank": 4}}}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_matrix_products_are_those_that_torch_counts(tiny_models, family):
    for learns, chosen in MODELS.items() if family == "qwen3_vl" else [("all", MODELS["all"])]:
        policy, encode = load(validate({"task": "x", "model": {"name": str(tiny_models[family]), **chosen}}))
        cost = dataclasses.replace(flops.cost_model(policy.model, policy.family), attention=0, sight=(0, 0))
        for kind in kinds_of(policy.family, ("two images", "video")):
            prompt, answers = encode(Vowels(), SAMPLES[kind]), [np.full(7, 300), np.full(12, 301)]
            (batch,) = pack(pieces_of([prompt, prompt], answers, 10**6), 10**6, policy.layout("shared"))
            sums = []
            forward = counted(lambda batch=batch, policy=policy, sums=sums:
                              sums.append(policy.logprobs(batch, 1.0).logprobs.sum()))
            backward = counted(sums[0].backward)
            group = len(prompt), flops.patches_of(prompt.mm, policy.base.config), [7, 12]
            assert forward == pytest.approx(cost.forward(*group), rel=0.01)
            # under an adapter the input of the first of these four layers needs no gradient
            assert backward == pytest.approx(cost.of(*group) - cost.forward(*group), rel=0.06 if learns == "lora" else
                                             0.01)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "smolvlm"])
def test_attention_is_what_torch_counts(tiny_models, family):
    model = AutoModelForImageTextToText.from_pretrained(tiny_models[family], attn_implementation="eager")
    policy, encode = load(validate({"task": "x", "model": {"name": str(tiny_models[family])}}))
    cost = flops.cost_model(model, policy.family)
    prompt = encode(Vowels(), Sample(id="1", media=(Media(source=noise(1, 112, 112)),), row={"q": "Where?"}))
    ids, patches = torch.from_numpy(prompt.ids)[None], flops.patches_of(prompt.mm, model.config)
    with torch.no_grad():
        all_ = counted(lambda: model(input_ids=ids, position_ids=torch.arange(len(prompt))[None], logits_to_keep=1,
                                     **prompt.mm))
    n = len(prompt)  # every pair is computed by this implementation, half of them for nothing
    useful = cost.forward(n, patches) + 2 * cost.head.weights + 4 * cost.attention * (n * n - n * (n + 1) / 2)
    assert all_ == pytest.approx(useful, rel=0.005)


def test_a_model_without_weights_will_do_and_experts_count_as_met(tiny_models):
    config = AutoConfig.from_pretrained(tiny_models["qwen3_vl"])
    with torch.device("meta"):
        empty = AutoModelForImageTextToText.from_config(config)
    loaded = AutoModelForImageTextToText.from_pretrained(tiny_models["qwen3_vl"])
    assert flops.cost_model(empty, family_of(config)) == flops.cost_model(loaded, family_of(config))
    text = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4,
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 5, "vocab_size": 16,
            "intermediate_size": 5}
    vision = {"depth": 1, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8, "out_hidden_size": 8,
              "deepstack_visual_indexes": []}
    config = Qwen3VLMoeConfig(text_config=text, vision_config=vision)
    with torch.device("meta"):
        model = Qwen3VLMoeForConditionalGeneration(config)
    assert flops.cost_model(model, family_of(config)).language.weights == 4 * 64 + 2 * 3 * 8 * 5


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
