"""gain_rl, which measures prompts, and gvm, which probes them: angles, the window, group sizes, resume."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from tests.conftest import SAMPLES
from tests.helpers import Vowels, load, settings
from tests.rollout.test_group_source import source
from tests.tables import each
from vlrl import config, curriculum
from vlrl.config.schema import CurriculumSettings, RolloutSettings
from vlrl.curriculum import Draw, ForeseeingSampler, MeasuringSampler, Outcome, ProbingSampler, Prompts
from vlrl.errors import ConfigError, DataError
from vlrl.methods.curricula.gvm import GVM, apportion
from vlrl.methods.gain_rl.angle import Angles, angle, question_span
from vlrl.methods.gain_rl.sampler import GainRL
from vlrl.rollout.prefetch import Prefetcher
from vlrl.store import checkpoint, trainer_state
from vlrl.types import Media, Sample


def prompts(angles, seed=0):
    return Prompts(len(angles), seed, lambda name: list(angles) if name == "angle" else [None] * len(angles))


def went(draws, *rates):
    """Outcomes with these pass rates, in quarters."""
    return [Outcome(d, (0.0, 1.0), tuple(k < 4 * rate for k in range(4))) for d, rate in zip(draws, rates, strict=True)]


def test_the_window_moves_by_accuracy_and_angle():
    sampler = GainRL(prompts([0.1, 0.9, 0.5, 0.3] * 25))
    assert not len(sampler.missing()) and sampler.order[:3].tolist() == [1, 5, 9]
    assert sampler.order[-1] == 96 and sampler.spread == 25
    sampler.observe(went([Draw(1, 0), Draw(0, 0)], 1.0, 0.5), 0)  # accuracy .75, angle .5
    first = 2 * (math.tanh(2 * 0.25) + math.tanh(2 * 0.5)) / 2
    assert sampler.mean == pytest.approx(first, abs=1e-6)
    sampler.observe([*went([Draw(3, 0)], 0.0), Outcome(Draw(2, 0), ()), Outcome(Draw(2, 0), (1.0,), (None,))], 1)
    assert sampler.mean == pytest.approx(first, abs=1e-6)  # tanh(-1) + tanh(.6) < 0 moves nothing back
    for _ in range(200):
        sampler.observe(went([Draw(1, 0)], 1.0), 2)
    assert sampler.mean == 99 and sampler.metrics() == {"curriculum/window": 0.99}
    sampler = GainRL(prompts(np.linspace(1, 0, 500)), spread=2.0)
    draws = sampler.next(500, 0)
    assert sorted(d.index for d in draws) == list(range(500)) and {d.visit for d in draws} == {0}
    assert len({d.index for d in sampler.next(40, 1)}) == 40
    again = sampler.next(600, 2)
    assert len(again) == 600 and set(np.bincount([d.index for d in again])) == {1, 2}


@pytest.mark.slow
def test_draws_follow_the_gaussian():
    sampler = GainRL(prompts(np.linspace(1, 0, 40)), spread=4.0)
    sampler.mean = 11.0
    counts = np.bincount([sampler.next(1, 0)[0].index for _ in range(4000)], minlength=40)
    weights = np.exp(-0.5 * ((np.arange(40) - 11) / 4) ** 2)
    likely = weights / weights.sum() * 4000 > 5
    expected = np.append(weights[likely], weights[~likely].sum()) / weights.sum() * 4000
    assert chisquare(np.append(counts[likely], counts[~likely].sum()), expected).pvalue > 1e-3


def test_what_was_measured_is_kept(tmp_path):
    sampler = GainRL(prompts([None, 0.5, None, 2.0]))
    assert isinstance(sampler, MeasuringSampler) and sampler.missing().tolist() == [0, 2]
    sampler.measured(np.array([0, 2]), np.array([np.nan, 0.7], np.float32))
    assert not len(sampler.missing()) and sampler.order.tolist() == [3, 2, 1, 0]
    sampler.observe(went(sampler.next(2, 0), 1.0, 0.0), 0)
    (tmp_path / "s").mkdir()
    trainer_state.write(tmp_path / "s", sampler.state_dict())
    other = GainRL(prompts([None] * 4))
    other.load_state_dict(checkpoint.load_state(tmp_path / "s", check=False))
    assert not len(other.missing()) and other.mean == sampler.mean
    other.history.load_state_dict(sampler.history.state_dict())
    assert other.next(3, 1) == sampler.next(3, 1)
    sampler = GainRL(prompts([None, None]))
    with pytest.raises(ConfigError, match=r"curriculum\.name='gain_rl'.*2 prompts.*data check"):
        sampler.measured(np.array([0, 1]), np.full(2, np.nan, np.float32))


def test_the_source_asks_once_before_the_first_draw():
    asked = []
    def measure(samples, places, progress):
        asked.append(places.tolist())
        progress("measuring", 1, 1)
        return np.array([samples[i]["n"] for i in places], np.float32)
    def made():
        s = source(lambda prompt, i: "x")
        s.sampler = GainRL(s.prompts, spread=0.1)
        s.measures = {"angle": measure}
        return s
    one, two = made(), made()
    assert one.next_groups(2, 0)[0].sample["n"] == 9 and asked == [list(range(10))]
    one.next_groups(2, 1)
    two.load_state_dict(one.state_dict())
    assert [g.id for g in two.next_groups(3, 2)] == [g.id for g in one.next_groups(3, 2)] and len(asked) == 1


def test_angles_by_hand():
    states = torch.tensor([[2.0, 0.0], [0.0, 3.0], [1.0, 1.0]])
    assert angle(states, 1, 3) == pytest.approx((1 + 1 + 2 ** 0.5) / 4 + (0 + 0.5 ** 0.5) / 2)
    assert angle(states, 0, 2) == pytest.approx(0.5)
    text = dict(enumerate(["<|im|>", "user ", "Wh", "ere?", "<|end|>", "<img>"]))
    decode = lambda ids: "".join(text[int(i)] for i in ids)  # noqa: E731
    visual = torch.tensor([5])
    assert question_span(np.array([0, 1, 5, 5, 2, 3, 4]), "Where?", visual, decode) == (4, 6)
    assert question_span(np.array([0, 1, 2, 3, 4]), "Where?", visual, decode) == (2, 4)
    assert question_span(np.array([0, 2, 3, 5, 4]), "Where?", visual, decode) == (4, 5)
    assert question_span(np.array([0, 1, 5]), "Where?", visual, decode) == (0, 3)


def independent(policy, prompt, question):
    """From all hidden states of a plain pass, token by token, the question found by the tokenizer's offsets."""
    tokenizer = policy.processor.tokenizer
    begin = prompt.text.rindex(question)
    offsets = tokenizer(prompt.text, return_offsets_mapping=True, add_special_tokens=False)["offset_mapping"]
    inside = [a < begin + len(question) and b > begin for a, b in offsets]
    behind = len(inside) - inside.index(True)  # from the end: the media stand before it
    first = len(prompt.ids) - behind
    inputs = {**prompt.mm, **{k: torch.from_numpy(v)[None] for k, v in prompt.aligned.items()}}
    if policy.family.mrope:
        inputs["position_ids"] = torch.from_numpy(prompt.positions)[:, None]
    with torch.no_grad():
        states = policy.base(input_ids=torch.from_numpy(prompt.ids)[None], **inputs,
                             output_hidden_states=True).hidden_states[-1][0].double().numpy()
    cosine = states @ states.T / np.outer(*[np.linalg.norm(states, axis=1)] * 2)
    own = range(first, first + sum(inside))
    return (np.mean([cosine[i, j] for i in own for j in own])
            + np.mean([cosine[i, j] for i in own for j in range(first)]))


@pytest.mark.parametrize(("family", "packing"), [("qwen3_vl", "shared"), ("qwen3_vl", "padded"), ("smolvlm", "shared")])
def test_angles_of_a_frozen_model(tiny_models, family, packing):
    given = settings(tiny_models[family], train={"packing": packing, "tokens_per_batch": 300})
    policy, encode = load(given)
    policy.model.eval()
    samples = [SAMPLES["image"], SAMPLES["two images"], SAMPLES["text"], Sample(id="t", row={"q": "Red or blue?"})]
    measure, told = Angles(policy, given, Vowels(), Prefetcher(encode, Vowels(), 0)), []
    found = measure(samples, np.array([3, 0, 1, 2]), lambda *words: told.append(words))
    expected = [independent(policy, encode(Vowels(), samples[i]), samples[i]["q"]) for i in (3, 0, 1, 2)]
    assert found == pytest.approx(expected, abs=1e-5) and found.dtype == np.float32 and np.ptp(expected) > 1e-3
    assert told == [("measuring angles of prompts", 4, 4)]
    assert policy.model.training is False and all(p.grad is None for p in policy.model.parameters())


def test_prompts_that_cannot_be_measured(tiny_models):
    given = settings(tiny_models["qwen3_vl"], limits={"prompt_tokens": 40})
    policy, encode = load(given)
    samples = [SAMPLES["text"], Sample(id="long", row={"q": "why " * 60}),
               Sample(id="gone", row={"q": "?"}, media=(Media(source="gone.png"),))]
    measure = Angles(policy, given, Vowels(), Prefetcher(encode, Vowels(), 2))
    with measure.prefetch:
        assert np.isnan(measure(samples, np.array([0, 1]), lambda *_: None)).tolist() == [False, True]
        with pytest.raises(DataError, match="gone"):
            measure(samples, np.array([2]), lambda *_: None)
        measure.config = settings(tiny_models["qwen3_vl"], data={"quarantine": True})
        assert np.isnan(measure(samples, np.array([2]), lambda *_: None)).all()


def sized_prompts(size, group_size=4, per_step=4):
    return Prompts(size, 0, rollout=RolloutSettings(group_size=group_size, prompts_per_step=per_step))


def tell(sampler, index, rights, answers, surprise, step=0):
    outcome = Outcome(Draw(index, 0), (1.0,) * answers, tuple(k < rights for k in range(answers)), surprise)
    sampler.prompts.history.note([outcome], step)
    sampler.observe([outcome], step)


def sizes_of(draws):
    return [d.group_size or 0 for d in draws]


def test_weights_by_hand():
    sampler = GVM(sized_prompts(4), alpha=0.01, beta=2.0)
    assert sampler.weights(np.arange(4)) == pytest.approx([1 / math.sqrt(0.5 + 0.02)] * 4, abs=1e-6)
    tell(sampler, 0, 1, 4, surprise=3.0)
    tell(sampler, 1, 4, 4, surprise=1.0)
    tell(sampler, 2, 0, 4, surprise=2.0)
    expected = [3 / math.sqrt(0.25 + 0.04), 1 / math.sqrt(1.01), 0.0, 2 / math.sqrt(0.52)]
    assert sampler.weights(np.arange(4)) == pytest.approx(expected, abs=1e-6)
    tell(sampler, 0, 2, 4, surprise=1.0, step=1)
    assert sampler.weights(np.arange(1)) == pytest.approx([1 / math.sqrt(0.52)], abs=1e-6)
    assert GVM(sized_prompts(1), alpha=0.0, beta=0.0).weights(np.arange(1)) == pytest.approx([1 / math.sqrt(0.5)])


APPORTIONED = [
    ([1, 1, 1], 12, 2, 16, [4, 4, 4]), ([3, 1, 2], 12, 1, 16, [6, 2, 4]), ([1, 1, 1], 13, 2, 16, [5, 4, 4]),
    ([5, 3, 2], 11, 1, 16, [6, 3, 2]),  # 5.5, 3.3, 2.2
    ([10, 1, 1], 12, 2, 16, [8, 2, 2]), ([10, 1, 1], 12, 2, 5, [5, 4, 3]),  # 5 at most: 3.5 each are left
    ([0, 0, 0], 9, 2, 8, [3, 3, 3]), ([1, 0, 0], 12, 2, 4, [4, 4, 4]), ([1, 0, 0], 10, 2, 16, [6, 2, 2]),
    ([], 0, 2, 4, [])]


def test_apportioning_by_hand():
    for weights, total, least, most, sizes in APPORTIONED:
        assert apportion(np.array(weights, dtype=float), total, least, most).tolist() == sizes


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.integers(0, 5), st.integers(0, 9), st.integers(0, 9))
def test_sizes_add_up_and_keep_the_bounds(weights, least, below, above):
    size, weights = least + below, np.array(weights)
    sizes = apportion(weights, len(weights) * size, least, size + above)
    assert sizes.sum() == len(weights) * size and least <= sizes.min() and sizes.max() <= size + above
    assert all(sizes[i] <= sizes[j] + 1 for i in range(len(weights)) for j in range(len(weights))
               if weights[i] <= weights[j])


def test_every_prompt_once_an_epoch_with_its_size():
    sampler = GVM(sized_prompts(6), probe=0)
    assert isinstance(sampler, ForeseeingSampler) and [d.group_size for d in sampler.upcoming(6, 0)] == [4] * 6
    for index in range(6):
        tell(sampler, index, 1 + index % 2 * 3, 4, surprise=2.0 + index)
    seen = sampler.upcoming(6, 0)
    first = sampler.next(6, 0)
    assert first == seen and sorted(d.index for d in first) == list(range(6)) and sampler.drawn == 6
    sizes = sizes_of(first)
    assert sum(sizes) == 24 and len({*sizes}) > 2
    by_weight = np.argsort(sampler.weights(np.array([d.index for d in first])))
    assert (np.diff(np.array(sizes)[by_weight]) >= 0).all()
    assert sampler.metrics() == {"curriculum/epoch": 1.0, "curriculum/group_size/min": min(sizes),
                                 "curriculum/group_size/max": max(sizes)}
    assert sum(sizes_of(sampler.next(5, 1))) == 20
    assert {d.visit for d in sampler.upcoming(1, 1)} == {1} and sampler.prompts.history.visits.sum() == 11


def test_probes_are_of_the_prompts_that_come_next():
    sampler = GVM(sized_prompts(9, per_step=3), probe=2)
    assert isinstance(sampler, ProbingSampler) and sampler.upcoming(3, 0) == []
    probes = sampler.probes(0)
    assert [d.group_size for d in probes] == [2] * 3 and sampler.drawn == 0 and not sampler.prompts.history.visits.any()
    assert [(d.index, d.visit) for d in sampler.next(3, 0)] == [(d.index, d.visit) for d in probes]
    assert {d.index for d in sampler.probes(1)}.isdisjoint({d.index for d in probes})
    assert GVM(sized_prompts(9), probe=0).probes(0) == []
    found = config.load("configs/quickstart.yaml", ["extends=curricula/gvm.yaml"]).curriculum
    sampler = curriculum.make(found, sized_prompts(8))
    assert isinstance(sampler, ProbingSampler)
    probes = sampler.probes(0)
    assert [d.group_size for d in probes] == [4] * 4
    for k, draw in enumerate(probes):
        tell(sampler, draw.index, 1 + k, 4, surprise=2.0)
    assert sizes_of(sampler.next(4, 0)) == [6, 4, 3, 3]  # proportional to 1 / sqrt(p + .001 / p)


def test_probed_answers_count_and_are_not_trained_on():
    s = source(lambda prompt, i: prompt.text if i % 2 else "no", rollout={"group_size": 3, "prompts_per_step": 4})
    s.prompts.per_step, s.prompts.group_size = 4, 3
    s.sampler = GVM(s.prompts, probe=2)
    groups = s.next_groups(4, 0)
    assert [len(g.rollouts) for g in groups] == [3] * 4 and [len(g.rollouts) for g in s.dropped] == [2] * 4
    assert {g.sample.id for g in s.dropped} == {g.sample.id for g in groups}
    assert s.metrics()["rollouts/total"] == 20 and s.prompts.history.visits.sum() == 4


@each("options words", [
    ({"least": 5}, "least=5 <= rollout.group_size=4"), ({"most": 3}, "rollout.group_size=4 <= most=3")])
def test_options_out_of_range(options, words):
    with pytest.raises(ConfigError, match=words):
        curriculum.make(CurriculumSettings(name="gvm", **options), sized_prompts(5))
