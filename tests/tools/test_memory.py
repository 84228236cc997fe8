"""The memory estimate: exact where it counts, inside its stated band where it estimates."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import Qwen3VLConfig

from tests.helpers import credited_groups, load, settings
from vlrl import config as configs
from vlrl.engine import capacity
from vlrl.engine import decoding as writing
from vlrl.engine.base import Request, Sampling
from vlrl.evaluation import evaluate
from vlrl.models.logprobs import Head, token_stats
from vlrl.tools.machine import memory
from vlrl.tools.machine.plan import architecture
from vlrl.training.build_engine import make_engine
from vlrl.training.update import make_optimizer, update

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
MODELS = sorted((CONFIGS / "models").glob("*.yaml"))


# the parameters of the published weights
PUBLISHED = {
    "HuggingFaceTB/SmolVLM-256M-Instruct": 256_484_928, "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656, "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
}


def published(path, *words):
    loaded = configs.load(path, ["task=digits", *words])
    return loaded, architecture(loaded.model.name)


def gib(path, words, device="cuda"):
    loaded, shape = published(path, *words)
    return math.ceil(memory.estimate(loaded, shape, device=device).total / memory.GIB)


def test_a_preset_has_the_published_number_of_parameters():
    for path in MODELS:
        loaded, shape = published(path, "model.lora.rank=0", "model.train=[language,merger,vision]")
        found = memory.estimate(loaded, shape, device="cuda")
        assert (found.trained, found.frozen) == (4 * PUBLISHED[loaded.model.name], 0), path


@pytest.mark.parametrize("words", [{"lora": {"rank": 4}}, {"lora": {"rank": 4, "target": "vision_language"}},
                                   {"train": ["merger"], "dtype": "bfloat16"}])
def test_weights_are_those_of_the_loaded_model(tiny_models, words):
    config = settings(tiny_models["qwen3_vl"], model={"name": str(tiny_models["qwen3_vl"]), **words})
    policy, _ = load(config)
    found = memory.estimate(config, policy.base.config)
    size = [(p.numel() * p.element_size(), p.requires_grad) for p in policy.model.parameters()]
    assert found.trained == sum(n for n, learns in size if learns) == found.gradients == found.optimizer // 2
    assert found.frozen == sum(n for n, learns in size if not learns)


def test_what_adds_to_the_estimate():
    path = CONFIGS / "models" / "qwen2_5_vl_3b.yaml"
    of = functools.partial(lambda *words: memory.estimate(*published(path, *words), device="cuda"))
    assert of("algo.kl_coef=0.1").reference == 0
    assert of("model.lora.rank=0").reference == 0
    full = of("model.lora.rank=0", "algo.kl_coef=0.1")
    assert full.reference == full.trained + full.frozen
    plain, nf4 = (memory.estimate(*published(path, f"model.lora.quantize={q}"), device="cuda") for q in ("none", "nf4"))
    layers = 36 * (2 * 2048**2 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    assert plain.frozen - nf4.frozen == pytest.approx(1.484 * layers, rel=1e-3)
    found = memory.estimate(*published(MODELS[0], "engine.prefill_tokens=1000000"), device="cuda")
    lines = "\n".join(memory.table(found))
    assert all(name in lines for name in ("trained", "frozen", "optimizer", "activations", "logits", "cache", "peak"))
    assert "reference" not in lines and f"(largest: {found.largest})" in lines
    assert found.largest == "prefill" and found.total == found.resident + found.generation
    assert memory.EVAL_ROWS == evaluate._CHUNK


def test_what_makes_a_run_smaller_lowers_its_estimate():
    of = functools.partial(lambda *words: memory.estimate(*published(MODELS[0], *words), device="cuda"))
    found = of()
    assert of("model.gradient_checkpointing=false").activations > 10 * found.activations
    assert of("model.gradient_checkpointing=auto") == found  # on with CUDA
    small, large = of("train.tokens_per_batch=2048"), of("train.tokens_per_batch=65536")
    assert small.activations < found.activations / 2 < large.activations / 4
    assert small.logits < found.logits == large.logits  # one chunk at a time
    assert of("engine.batch_rollouts=16").cache == found.cache / 4
    assert of("model.max_pixels=250880").prefill < found.prefill / 1.5
    assert of("engine.prefill_tokens=4096").prefill < found.prefill / 1.4 < of("engine.prefill_tokens=1000000").prefill
    assert of("engine.batch_rollouts=auto") == of("engine.batch_rollouts=256") != found
    one_prompt_a_step = of("rollout.minibatches=32", "train.tokens_per_batch=65536")
    assert one_prompt_a_step.activations == found.activations


def peak(work):
    """Most bytes that `work` has allocated at once, by PyTorch's profiler, which sees inside the operators."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        kept = work()
    profiler: Any = seen.profiler
    events = sorted((e.start_ns(), e.nbytes()) for e in profiler.kineto_results.events() if e.name() == "[memory]")
    live = most = 0
    for _, size in events:
        live += size
        most = max(most, live)
    del kept
    return most


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width, rows", [(8, 64), (64, 16)])
def test_copies_of_the_logits(dtype, width, rows, monkeypatch):
    """In one chunk; and in four where the gradients of the output layer are larger."""
    n, vocabulary = 64, 20_000
    hidden, layer = torch.ones(n, width, requires_grad=True), torch.nn.Linear(width, vocabulary, bias=False)
    targets, banned = torch.zeros(n, dtype=torch.long), torch.tensor([3])
    layer.weight.grad = torch.zeros_like(layer.weight)

    def work():
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            stats = token_stats(hidden, Head(vocabulary, layer), targets, banned, 0.9,
                                chunk_bytes=4 * vocabulary * rows)
        stats.logprobs.sum().backward()

    full = settings("x", model={"name": "x", "train": ["language"]})
    model = Qwen3VLConfig(text_config={"hidden_size": width, "vocab_size": vocabulary})
    monkeypatch.setattr(memory, "chunk_rows", lambda _: rows)
    found, casts = peak(work), dtype.itemsize % 4 * width * vocabulary
    assert found == pytest.approx(memory._logits(full, model, n, dtype.itemsize) + casts, rel=0.25)


def test_copies_of_the_sampled_logits():
    n, vocabulary = 64, 20_000
    heat, draw, banned = torch.ones(n), torch.full((n,), 0.5), torch.tensor([3])
    found = peak(lambda: writing.sample_tokens(torch.zeros(n, vocabulary, dtype=torch.bfloat16), heat, draw, banned))
    text = Qwen3VLConfig(text_config={"vocab_size": vocabulary}).get_text_config()
    assert 0.99 * found <= n * capacity.logit_bytes(text, 2) <= 1.3 * found


def measured(folder, model, **more):
    """(measured / estimated) of the training peak and of the generation peak, both above the loaded weights."""
    config = settings(folder, model={"name": str(folder), **model}, **more)
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config, ["image"] * config.rollout.prompts_per_step)
    prompt = groups[0].prompt
    longest = max(len(r.completion.tokens) for g in groups for r in g.rollouts)
    assert longest == config.rollout.max_new_tokens
    found = memory.estimate(config, policy.base.config, len(prompt), sum(prompt.visual_tokens), device="cpu")
    optimizer = make_optimizer(policy, config)
    training = peak(lambda: [update(policy, optimizer, groups, config, step) for step in range(2)])
    engine = make_engine(config, policy, folder / "engine")
    requests = [Request(prompt=prompt, n=config.rollout.group_size, key=(i,),
                        sampling=Sampling(max_new_tokens=config.rollout.max_new_tokens)) for i in range(len(groups))]
    generation = peak(lambda: engine.generate(requests))
    return (training / (found.optimizer + max(found.training, found.gradients + found.step)),
            generation / found.generation)


LENGTHS = {"rollout": {"group_size": 4, "prompts_per_step": 2, "max_new_tokens": 16}, "eval": {"samples": 0},
           "train": {"tokens_per_batch": 128}}


@pytest.mark.slow
@pytest.mark.parametrize("model", [
    {"lora": {"rank": 8}}, {"train": ["language", "merger", "vision"], "gradient_checkpointing": True}],
    ids=["lora", "full, checkpointing"])
def test_the_peak_lies_in_the_stated_band(tiny_models, model):
    parts = {"prefill_tokens": 1} if "train" in model else {}
    training, generation = measured(tiny_models["qwen3_vl"], model, engine=parts, **LENGTHS)
    low, high = memory.BAND
    assert low < 0.75 <= training <= 1.1 < high and low <= generation <= high, (training, generation)
