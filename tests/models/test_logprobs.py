"""Log-probabilities in chunks equal those of all logits at once, and take memory for a chunk only."""

import contextlib
import itertools

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import FAMILIES, SAMPLES, kinds_of, random_answers
from tests.helpers import Vowels, load, settings
from tests.tables import each
from vlrl.models import logprobs
from vlrl.models.logprobs import Head, answer_states, token_stats
from vlrl.models.packing import pack, pieces_of
from vlrl.models.policy import Policy

N, H, V = 23, 12, 57
BANNED = torch.tensor([3, 56])


def plain(hidden, head, targets, banned, temperature):
    """(log-probabilities, entropy) from all logits, in float64 after the output layer."""
    logits = head(hidden).double() / temperature
    logits = torch.log_softmax(logits.index_fill(1, banned, -torch.inf), -1)
    return logits.gather(1, targets[:, None])[:, 0], torch.special.entr(logits.exp()).sum(-1)


def inputs(n=N, width=H, vocabulary=V, bias=False, learns=True, seed=0, banned=BANNED):
    generator = torch.Generator().manual_seed(seed)
    layer = torch.nn.Linear(width, vocabulary, bias=bias).requires_grad_(learns)
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=generator)
    allowed = [i for i in range(vocabulary) if i not in banned.tolist()]
    targets = torch.tensor(allowed)[torch.randint(len(allowed), (n,), generator=generator)]
    return torch.randn(n, width, generator=generator, requires_grad=True), Head(vocabulary, layer), targets


def gradients(values, hidden, head):
    weights = torch.cos(torch.arange(len(values)))
    kept = [hidden, *(p for p in head.layer.parameters() if p.requires_grad)]
    return torch.autograd.grad((values * weights).sum(), kept, retain_graph=True)


def assert_equal(hidden, head, targets, banned, temperature, rows, tolerance=1e-5):
    stats = token_stats(hidden, head, targets, banned, temperature, chunk_bytes=4 * head.vocabulary * rows)
    expected, entropy = plain(hidden, head, targets, banned, temperature)
    assert stats.logprobs.dtype == stats.entropy.dtype == torch.float32 and not stats.entropy.requires_grad
    for ours, theirs in ((stats.logprobs, expected), (stats.entropy, entropy)):
        assert (ours - theirs).abs().max() <= 1e-6 * expected.detach().abs().max().clamp(min=1)
    for ours, theirs in zip(gradients(stats.logprobs, hidden, head), gradients(expected, hidden, head), strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max() + 1e-6 / temperature


def test_chunks_equal_the_whole():
    for learns, bias, rows, temperature in itertools.product((True, False), (True, False), (1, 7, 22, N, 100),
                                                             (0.3, 1.0, 2.0)):
        assert_equal(*inputs(bias=bias, learns=learns), BANNED, temperature, rows)
    for n, width, vocabulary, banned in itertools.product((1, 40), (1, 20), (2, 90), (BANNED[:0], torch.arange(1))):
        assert_equal(*inputs(n, width, vocabulary, banned=banned), banned, 0.1, 9)


def test_autocast():
    """Logits are rounded alike on both sides, gradients by chunk; a weight's are added up in float32."""
    for learns, (dtype, tolerance) in itertools.product((True, False), ((torch.bfloat16, 2e-2), (torch.float16, 3e-3))):
        with torch.autocast("cpu", dtype):
            assert_equal(*inputs(learns=learns), BANNED, 0.8, 5, tolerance)


def test_many_chunks_do_not_lose_a_weights_small_gradients():
    """In bfloat16 a sum stops growing at 256 times its terms."""
    hidden, head, targets = inputs(n=300)
    hidden, targets = torch.ones_like(hidden, requires_grad=True), torch.full_like(targets, 5)
    (whole,) = torch.autograd.grad(plain(hidden, head, targets, BANNED, 1.0)[0].sum(), head.layer.weight)
    with torch.autocast("cpu", torch.bfloat16):
        found = token_stats(hidden, head, targets, BANNED, 1.0, chunk_bytes=4 * V)
    (grad,) = torch.autograd.grad(found.logprobs.sum(), head.layer.weight)
    assert grad.dtype == torch.float32 and (grad - whole).abs().max() <= 1e-2 * whole.abs().max()


def test_lora_on_the_output_layer_and_its_dropout():
    hidden, head, targets = inputs(learns=False)
    model = torch.nn.Sequential()
    model.lm_head = head.layer
    lora = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False, lora_dropout=0.5)
    layer = get_peft_model(model, lora).base_model.model.lm_head
    head = Head(V, layer)
    assert head.learns
    torch.manual_seed(0)
    stats = token_stats(hidden, head, targets, BANNED, 1.0, chunk_bytes=4 * V * 9)
    torch.manual_seed(0)
    parts = [plain(h, head, t, BANNED, 1.0)[0] for h, t in zip(hidden.split(8), targets.split(8), strict=True)]
    expected = torch.cat(parts)  # the same chunks draw the same dropout, and draw it again when recomputed
    assert (stats.logprobs - expected).abs().max() < 1e-5
    for ours, theirs in zip(gradients(stats.logprobs, hidden, head), gradients(expected, hidden, head), strict=True):
        assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    layer.eval()
    assert_equal(hidden, head, targets, BANNED, 1.0, 9)


@each("learns rows", itertools.product((True, False), (4, 100)))
def test_further_statistics_have_gradients(learns, rows):
    hidden, head, targets = inputs(learns=learns)
    more = {"top": lambda logits, _: logits.softmax(-1).topk(3).values,
            "odds": lambda logits, chosen: logits.gather(1, chosen[:, None])[:, 0] - logits.amax(-1)}
    stats = token_stats(hidden, head, targets, BANNED, 0.7, more, chunk_bytes=4 * V * rows)
    logits = (head(hidden) / 0.7).index_fill(1, BANNED, -torch.inf)
    for name, statistic in more.items():
        ours, theirs = stats.more[name], statistic(logits, targets)
        assert ours.shape == theirs.shape and (ours - theirs).abs().max() < 1e-5
        for a, b in zip(gradients(ours.reshape(-1), hidden, head), gradients(theirs.reshape(-1), hidden, head),
                        strict=True):
            assert (a - b).abs().max() <= 1e-5 * b.abs().max()
    assert (token_stats(hidden, head, targets, BANNED, 0.7).logprobs - stats.logprobs).abs().max() < 1e-5


def test_a_banned_target_has_no_probability():
    hidden, head, targets = inputs()
    targets[4] = 3
    found = token_stats(hidden, head, targets, BANNED, 1.0, chunk_bytes=4 * V * 5)
    assert found.logprobs[4] == -torch.inf and found.entropy.isfinite().all()
    assert len(token_stats(hidden[:0], head, targets[:0], BANNED, 1.0).logprobs) == 0


class Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operator returned."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for t in out if isinstance(out, (tuple, list)) else [out]:
            self.size = max(self.size, t.numel() if isinstance(t, torch.Tensor) else 0)
        return out


@each("learns grad", itertools.product((True, False), (True, False)))
def test_no_tensor_is_larger_than_a_chunk(learns, grad):
    n, vocabulary, rows = 96, 3000, 8
    hidden, head, targets = inputs(n, H, vocabulary, learns=learns)
    with Largest() as largest, contextlib.nullcontext() if grad else torch.no_grad():
        stats = token_stats(hidden, head, targets, BANNED, 1.0, chunk_bytes=4 * vocabulary * rows)
        if grad:
            stats.logprobs.sum().backward()
    assert largest.size <= max(rows, H) * vocabulary
    with Largest() as largest:
        token_stats(hidden, head, targets, BANNED, 1.0)
    assert largest.size == n * vocabulary


def batch_of(policy, encode, layout="shared"):
    prompts, answers = [], []
    for i, kind in enumerate(kinds_of(policy.family, ("image", "text"))):
        made = random_answers(i, 3, len(policy.processor.tokenizer), set(policy.banned.tolist()))
        prompts += [encode(Vowels(), SAMPLES[kind])] * len(made)
        answers += made
    (batch,) = pack(pieces_of(prompts, answers, 10**6), 10**6, policy.layout(layout))
    return batch


def whole(policy: Policy, batch, temperature):
    """(log-probabilities, entropy) from the model's own logits."""
    with policy.autocast():
        logits = policy.model(**batch.inputs, logits_to_keep=batch.columns, use_cache=False).logits
        logits = logits.flatten(0, 1)
        logits = logits if batch.select is None else logits.index_select(0, batch.select)
        return plain(logits, Head(logits.shape[-1]), batch.targets, policy.banned, temperature)


def assert_like_the_model(policy, batch, monkeypatch, tolerance=1e-6):
    """Values and gradients with a chunk of a few tokens are those of the model's logits."""
    vocabulary, rows = policy.base.config.get_text_config().vocab_size, []
    monkeypatch.setattr(logprobs, "_RUN_WHOLE", set())
    monkeypatch.setattr(token_stats, "__defaults__", (None, 4 * vocabulary * 5))
    layer = policy.base.get_output_embeddings()
    with layer.register_forward_hook(lambda _, __, out: rows.append(out.shape[:-1].numel())):
        found = policy.logprobs(batch, 0.8)
    expected, entropy = whole(policy, batch, 0.8)
    assert (found.logprobs - expected).abs().max() <= tolerance * expected.abs().max()
    assert (found.entropy - entropy).abs().max() <= tolerance * entropy.abs().max()
    weights, parameters = torch.cos(batch.targets.float()), [p for _, p in policy.trainable()]
    ours, theirs = (torch.autograd.grad((v * weights).sum(), parameters, allow_unused=True)
                    for v in (found.logprobs, expected))
    top = max(float(g.abs().max()) for g in theirs if g is not None)
    for a, b in zip(ours, theirs, strict=True):
        assert (a is None) == (b is None) and (a is None or (a - b).abs().max() <= 10 * tolerance * top)
    return rows


@pytest.mark.parametrize("family, model", [
    pytest.param(family, model, id=f"{family}, {'LoRA' if model else 'full'}",
                 marks=() if family == ("internvl" if model else "qwen3_vl") else pytest.mark.slow)
    for family in FAMILIES for model in ({}, {"lora": {"rank": 4}}) if not model or family == "internvl"])
def test_every_family(tiny_models, monkeypatch, family, model):
    policy, encode = load(settings(tiny_models[family], model={"name": str(tiny_models[family]), **model}))
    rows = assert_like_the_model(policy, batch_of(policy, encode), monkeypatch)
    assert rows[0] == 1 and len(rows) > 2 and max(rows) <= 5  # the model's own layer saw one row


@pytest.mark.slow
def test_adapted_output_layer_and_autocast(tiny_models, monkeypatch):
    folder = tiny_models["qwen3_vl"]
    policy, encode = load(settings(folder, model={"name": str(folder), "dtype": "bfloat16"}))
    batch = batch_of(policy, encode, "padded")
    assert_like_the_model(policy, batch, monkeypatch, 2e-2)
    policy, _ = load(settings(folder))
    policy.base.config.tie_word_embeddings = False  # for PEFT, which warns of merging
    peft = get_peft_model(policy.model, LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False))
    adapted = Policy(peft, policy.processor, policy.family, Accelerator(cpu=True), torch.float32)
    rows = assert_like_the_model(adapted, batch, monkeypatch)
    assert rows[0] == 1 and max(rows) <= 5
    with torch.no_grad():
        before = adapted.logprobs(batch, 1.0).logprobs
        assert (adapted.reference_logprobs(batch, 1.0) - before).abs().max() > 1e-3


CAP = 0.05


def changed(policy, change):
    """The policy's model with something done to its logits, in a class of its own."""
    kind = type(policy.base)

    class Changed(kind):
        def forward(self, *args, **kwargs):
            out = super().forward(*args, **kwargs)
            out.logits = change(out.logits)
            return out
    policy.base.__class__ = Changed


def written_into(logits):
    logits[..., 5] = -9.0
    return logits


@pytest.mark.parametrize("change, known", [
    (lambda x: torch.tanh(x / CAP) * CAP, True), (lambda x: x * 0.9, False), (written_into, False)],
    ids=["capped", "scaled", "written into"])
def test_what_a_model_does_with_its_logits(tiny_models, monkeypatch, change, known):
    """Capped ones are known from the config; anything else is noticed, and the model's own logits are taken."""
    policy, encode = load(settings(tiny_models["qwen3_vl"]))
    batch = batch_of(policy, encode)
    policy.base.config.get_text_config().final_logit_softcapping = CAP
    unused = assert_like_the_model(policy, batch, monkeypatch)
    assert max(unused) <= 5  # a config may name a cap that the model does not use
    changed(policy, change)
    assert (max(assert_like_the_model(policy, batch, monkeypatch)) <= 5) == known
    assert (type(policy.base) in logprobs._RUN_WHOLE) != known


def test_a_model_without_a_known_output_layer(tiny_models, monkeypatch):
    policy, encode = load(settings(tiny_models["qwen3_vl"]))
    batch = batch_of(policy, encode)
    expected = policy.logprobs(batch, 1.0).logprobs.detach().numpy()
    monkeypatch.setattr(type(policy.base), "get_output_embeddings", lambda self: None)
    with torch.no_grad():
        logits, head = answer_states(policy.model, policy.base, {**batch.inputs, "logits_to_keep": batch.columns})
        assert head.layer is None and logits.shape[-1] == head.vocabulary
        assert np.abs(policy.logprobs(batch, 1.0).logprobs.numpy() - expected).max() < 1e-6
