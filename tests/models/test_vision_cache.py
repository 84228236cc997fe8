"""The feature cache: what it gives equals the uncached path, and a picture is encoded once."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from tests.conftest import FAMILIES, SAMPLES, TWO, kinds_of, noise, noise_video
from tests.helpers import Vowels, credited_groups, load, settings
from tests.models.test_packing import run
from vlrl.config import validate
from vlrl.errors import ConfigError
from vlrl.models.packing import make_batch, pieces_of
from vlrl.models.vision_cache import FeatureCache, Features, VisualInput, make_cache, visuals_of
from vlrl.training.update import make_optimizer, update
from vlrl.types import LoadedMedia, Media, Sample

MIXED = ("image", "two images", "text", "video")


def cached(folder, mib=64, **model):
    config = settings(folder, model={"name": str(folder), "feature_cache_mib": mib, **model})
    policy, encode = load(config)
    return policy, encode, config


def rows(policy, encode, layout, samples):
    """One micro-batch of two answers to each sample."""
    prompts = [p for sample in samples for p in [encode(Vowels(), sample)] * 2]
    answers = [torch.arange(5 + i, 9 + 2 * i).numpy() for i in range(len(prompts))]
    return [make_batch(pieces_of(prompts, answers, 100_000), layout)], len(answers)


def tower_calls(policy):
    """Names of what passes the vision tower, filled in as it runs."""
    calls = []
    modules = dict(policy.base.named_modules())
    (tower,) = [m for n, m in modules.items() if n.endswith((".visual", ".vision_tower", ".vision_model"))
                and not n.count("vision_tower.")]
    tower.register_forward_hook(lambda *_: calls.append(1))
    return calls


@pytest.mark.parametrize("family, layout", [*((f, "shared") for f in FAMILIES), ("qwen3_vl", "padded")])
def test_equals_the_uncached_path(tiny_models, family, layout):
    policy, encode, _ = cached(tiny_models[family])
    samples = [SAMPLES[kind] for kind in kinds_of(family, MIXED)]
    if family == "llava_onevision":  # two lengths of clips cannot stand side by side in a tensor
        samples.append(Sample(id="long", media=(noise_video(30, frames=6),), row={"q": "What moves?"}))
    batches, count = rows(policy, encode, layout, samples)
    assert "pixel_values" not in batches[0].inputs
    plain, oracle = rows(policy, lambda *a: replace(encode(*a), visuals=()), layout, samples)[0], {}
    expected, oracle = run(policy, plain, count)
    for _ in range(2):  # what was computed, then what was kept
        logprobs, gradients = run(policy, batches, count)
        for a, b in zip(logprobs, expected, strict=True):
            assert (a - b).abs().max() <= 1e-6 * b.abs().max()
        for name, gradient in oracle.items():
            assert (gradients[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-9, name
    assert policy.features.metrics() == {"feature_cache/hit_frac": 0.5}


@pytest.mark.slow
@pytest.mark.parametrize("family", TWO)
def test_a_picture_is_encoded_once(tiny_models, family):
    policy, encode, config = cached(tiny_models[family], lora={"rank": 4})
    config = config.model_copy(update={"algo": config.algo.model_copy(update={"kl_coef": 0.1})})
    calls, optimizer = tower_calls(policy), make_optimizer(policy, config)
    for step in range(2):
        groups = credited_groups(policy, encode, config, ("image", "two images", "image", "video", "text"))
        update(policy, optimizer, groups, config, step)
    assert len(calls) == 4  # one image, two images, one video
    assert policy.features.metrics()["feature_cache/hit_frac"] == pytest.approx(1 - 4 / (2 * 3 * 5))
    assert policy.features.metrics()["feature_cache/hit_frac"] == 0


def test_features_are_bit_for_bit_the_same_in_any_company(tiny_models):
    policy, encode, _ = cached(tiny_models["qwen3_vl"])
    prompts = {kind: encode(Vowels(), SAMPLES[kind]) for kind in ("image", "two images")}
    first, second = FeatureCache(2**20), FeatureCache(2**20)
    together = first.outputs(policy.base, [*prompts["two images"].visuals, *prompts["image"].visuals])["image"]
    alone = second.outputs(policy.base, prompts["image"].visuals)["image"]
    assert torch.equal(together.pooler_output[-1], alone.pooler_output[0])
    assert torch.equal(together.deepstack_features[0][-1], alone.deepstack_features[0][0])


def test_the_least_recently_used_leave():
    def features(n):
        return Features(dict, (torch.zeros(n, 2),), False, ((torch.zeros(n, 2),),))
    cache = FeatureCache(limit=16 * 10)
    for key in (b"a", b"b"):
        cache._keep(key, features(4))
    cache._features(SimpleNamespace(device="cpu"), VisualInput("image", b"a", {}))
    cache._keep(b"c", features(3))
    assert list(cache._entries) == [b"a", b"c"] and cache.used == 16 * 7
    cache._keep(b"d", features(11))  # larger than the whole cache
    assert len(cache) == 0 and cache.used == 0


def test_a_small_cache_changes_nothing_but_the_work(tiny_models):
    policy, encode, _ = cached(tiny_models["qwen3_vl"], train=["language"])
    batches, count = rows(policy, encode, "shared", [SAMPLES[kind] for kind in MIXED])
    whole, _ = run(policy, batches, count)
    policy.features = FeatureCache(2000)
    small, _ = run(policy, batches, count)
    assert all(torch.equal(a, b) for a, b in zip(whole, small, strict=True)) and policy.features.used <= 2000


@cache
def encoder(folder, **model):
    return cached(folder, **model)[1]


def keys(folder, sample, **model):
    return [v.key for v in encoder(folder, **model)(Vowels(), sample).visuals]


def test_keys_name_what_the_tower_sees(tiny_models, tmp_path):
    folder = tiny_models["qwen2_5_vl"]
    noise(7, 112, 112).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_bytes((tmp_path / "a.png").read_bytes())
    image = {n: Sample(id=n, row={"q": n}, media=(Media(source=tmp_path / f"{n}.png"),)) for n in "ab"}
    assert keys(folder, image["a"]) == keys(folder, image["b"])  # other path and question, same picture
    assert keys(folder, image["a"]) != keys(folder, SAMPLES["image"])
    # 112 x 112 fits both limits, so only the settings differ; then the grid does too
    assert len({*keys(folder, image["a"], max_pixels=112 * 112), *keys(folder, image["a"], max_pixels=224 * 224),
                *keys(folder, image["a"], max_pixels=56 * 56)}) == 3
    assert len(set(keys(folder, SAMPLES["two images"]))) == 2
    long = Sample(id="v", row={"q": "v"}, media=(noise_video(10, frames=8),))
    assert len({*keys(folder, long), *keys(folder, long, video_fps=1.0)}) == 2
    policy, _, _ = cached(tiny_models["qwen2_5_vl"])
    mm = {"pixel_values_videos": torch.zeros(8, 3), "video_grid_thw": torch.tensor([[2, 2, 2]])}
    found = {visuals_of(policy.family, "", mm, [LoadedMedia(kind="video", frames=(), sha256="of the file", metadata={
        "frames_indices": frames})])[0].key for frames in ([0, 1, 2, 3], [4, 5, 6, 7])}
    assert len(found) == 2


@pytest.mark.parametrize("model, way_out", [
    ({"train": ["language", "merger"]}, r"train=\[language, merger\] trains one.*Set model\.train=\[language\]"),
    ({"lora": {"rank": 4, "target": "all_linear"}}, r"lora\.target=all_linear .*Set model\.lora\.target=language"),
])
def test_a_tower_that_learns_is_refused(model, way_out):
    with pytest.raises(ConfigError, match=rf"model\.feature_cache_mib=8 caches .*{way_out}.*feature_cache_mib=0"):
        validate({"task": "x", "model": {"name": "x", "feature_cache_mib": 8, **model}})


def test_a_model_that_takes_no_features_is_refused(tiny_models):
    policy, _, config = cached(tiny_models["qwen3_vl"])
    with pytest.raises(ConfigError, match=r"feature_cache_mib=64: .* type 'other'. Set model\.feature_cache_mib=0"):
        make_cache(config.model, policy.base, replace(policy.family, model_type="other"))


@pytest.mark.parametrize("family, model", [(TWO[0], {}), (TWO[1], {"lora": {"rank": 4}})])
def test_a_frozen_tower_builds_no_graph(tiny_models, family, model):
    policy, encode = load(settings(tiny_models[family], model={
        "name": str(tiny_models[family]), "gradient_checkpointing": True, **model}))
    seen = []
    for name, module in policy.base.named_modules():
        if policy.family.part_of(name) != "language":
            module.register_forward_hook(lambda _m, _a, out: seen.append(getattr(out, "requires_grad", False)))
    batches, count = rows(policy, encode, "shared", [SAMPLES["image"]])
    _, gradients = run(policy, batches, count)
    assert gradients and seen and not any(seen)
