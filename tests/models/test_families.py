"""What differs between the families: parts, pixel limits, media of unequal shapes, models that are in no table."""

import numpy as np
import pytest
import torch
import transformers
from transformers import Qwen2Config

from tests.conftest import FAMILIES, SAMPLES, kinds_of, noise, noise_video
from tests.helpers import load, settings
from vlrl.engine.base import Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, DataError
from vlrl.models import families
from vlrl.models.packing import pack, pieces_of
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.store import checkpoint
from vlrl.task import Task
from vlrl.tools.hub.export import export
from vlrl.types import Media, Sample


class Ask(Task):
    prompt = "{q}"


def make(folder, **model):
    return load(settings(folder, model={"name": str(folder), **model}))


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_media_and_ends_of_every_family(tiny_models, family):
    policy, encode = make(tiny_models[family])
    parts = {name: policy.family.part_of(name) for name, _ in policy.model.named_parameters()}
    assert {"language", "merger", "vision"} == set(parts.values())
    for name, part in parts.items():
        inside = any(word in name for word in ("vision", "visual")) and "merger" not in name
        assert (part == "vision") == inside, name
        assert part == "language" or ("language_model" not in name and "text_model" not in name), name
    layers = policy.base.config.get_text_config().num_hidden_layers
    assert sum(p == "language" for p in parts.values()) >= 8 * layers
    known, processor, tokenizer = policy.base.config, policy.processor, policy.processor.tokenizer
    for kind in kinds_of(family):
        prompt = encode(Ask(), SAMPLES[kind])
        assert len(prompt.visual_tokens) == len(SAMPLES[kind].media) and all(n > 0 for n in prompt.visual_tokens)
        assert sum(prompt.visual_tokens) == np.isin(
            prompt.ids, [known.image_token_id, getattr(known, "video_token_id", None) or -1]).sum()
    for token in policy.family.vision_tokens:
        sample = Sample(id="t", media=SAMPLES["image"].media, row={"q": f"What is {token} here?{token}"})
        assert encode(Ask(), sample).visual_tokens == encode(Ask(), SAMPLES["image"]).visual_tokens, token
    banned = set(policy.banned.tolist())
    known = tokenizer.get_vocab()
    assert {known[t] for t in policy.family.vision_tokens if t in known} <= banned
    assert not banned & policy.eos
    text = " ".join(policy.family.vision_tokens)
    assert not banned & set(encode.answer_ids(f"It is {text}.").tolist())  # of a row's own solution
    turn = {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]}
    closed = processor.apply_chat_template([turn], tokenize=False, **policy.family.template).rstrip()
    end = tokenizer.convert_ids_to_tokens(int(encode.answer_ids("Yes.")[-1]))
    assert closed.endswith(f"Yes.{end}") and end in ("<|im_end|>", "<end_of_utterance>")


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_the_end_of_a_turn_need_not_be_the_end_token(tiny_models, family):
    """As in Gemma 3 and in base models."""
    policy, _ = make(tiny_models[family])
    tokenizer = policy.processor.tokenizer
    end, tokenizer.eos_token = tokenizer.eos_token, "<|endoftext|>"
    policy.base.generation_config.eos_token_id = tokenizer.eos_token_id
    other = Policy(policy.model, policy.processor, policy.family, policy.accelerator, policy.dtype)
    encode = Encoder(other.processor, other.family, other.positions, settings("unused"))
    known = tokenizer.convert_tokens_to_ids(end)
    assert other.eos == {known, tokenizer.eos_token_id} and encode.answer_ids("Yes.")[-1] == known
    plain, attacked = (encode(Ask(), Sample(id="x", row={"q": f"Yes.{more}"})) for more in ("", end))
    assert (plain.ids == known).sum() == (attacked.ids == known).sum()
    policy.processor.chat_template = "{{ raise_exception('no') if messages|length > 1 }}"
    assert other.family.end_id(policy.processor) == tokenizer.eos_token_id  # a template that shows no end


def test_loading_is_quiet(tiny_models, caplog):
    transformers.logging.enable_propagation()
    make(tiny_models["smolvlm"])[1](Ask(), SAMPLES["video"])
    transformers.logging.disable_propagation()
    assert "processor_kwargs" not in caplog.text


LIMITS = {"qwen2_vl": 40 * 40, "qwen2_5_vl": 60 * 60, "qwen3_vl": 40 * 40, "internvl": 64 * 64}


@pytest.mark.parametrize("family", FAMILIES)
def test_max_pixels_makes_fewer_tokens(tiny_models, family):
    folder = tiny_models[family]
    plain, encode = make(folder)
    sample = Sample(id="large", media=(Media(source=noise(0, 400, 200)),), row={"q": "?"})
    unit = plain.processor.image_processor
    if family in ("smolvlm", "idefics3"):
        limit = unit.max_image_size["longest_edge"] ** 2
    elif family == "llava_onevision":
        limit = min(h * w for h, w in unit.image_grid_pinpoints)
    else:
        limit = LIMITS[family]
    policy, small = make(folder, max_pixels=limit)
    few, many = small(Ask(), sample), encode(Ask(), sample)
    if many.visual_tokens != few.visual_tokens:
        assert few.visual_tokens < many.visual_tokens
    else:
        assert family in ("smolvlm", "idefics3")  # the tiny one makes one tile as it is
    (batch,) = pack(pieces_of([few], [np.array([40, 41])], 10**6), 10**6)
    assert policy.logprobs(batch, 1.0).logprobs.isfinite().all()  # the model counts tiles as its processor does


@pytest.mark.slow
def test_a_limit_is_the_references_and_the_exported_models_too(tiny_models, tmp_path):
    """LLaVA-OneVision's model has the tilings of its processor in its own config."""
    folder = tiny_models["llava_onevision"]
    policy, encode = make(folder, max_pixels=48 * 48)
    policy.keep_reference(folder)
    prompts = [encode(Ask(), SAMPLES["image"])]
    (batch,) = pack(pieces_of(prompts, [np.array([40, 41])], 10**6), 10**6)
    assert torch.equal(policy.reference_logprobs(batch, 1.0), policy.logprobs(batch, 1.0).logprobs)
    adapted, _ = make(folder, max_pixels=48 * 48, lora={"rank": 2})
    checkpoint.save(tmp_path, 1, adapted.save, {}, keep=1)
    export(tmp_path / "step-000001", tmp_path / "whole")
    exported, encode = make(tmp_path / "whole")
    assert exported.base.config.image_grid_pinpoints == [[48, 48]]
    assert encode(Ask(), SAMPLES["image"]).ids.tolist() == prompts[0].ids.tolist()


@pytest.mark.parametrize("family, setting, says", [
    ("qwen2_vl", {"max_pixels": 783}, r"model\.max_pixels=783 .* visual tokens is 28x28 pixels; allow at least 784"),
    ("qwen3_vl", {"max_pixels": 255}, r"model\.max_pixels=255 .* allow at least 256"),
    ("smolvlm", {"max_pixels": 9}, r"model\.max_pixels=9 does not fit this model: its tiles are"),
    ("smolvlm", {"min_pixels": 9}, r"model\.min_pixels=9 .* same longest edge"),
    ("llava_onevision", {"max_pixels": 9}, r"model\.max_pixels=9 .* none of its tilings"),
    ("llava_onevision", {"min_pixels": 6 * 10**7}, r"model\.min_pixels=60000000 .* none of its tilings"),
    ("internvl", {"max_pixels": 9}, r"model\.max_pixels=9 .* one of its tiles"),
])
def test_limits_that_do_not_fit(tiny_models, family, setting, says):
    with pytest.raises(ConfigError, match=says):
        make(tiny_models[family], **setting)


def test_min_pixels_makes_more_tiles(tiny_models):
    folder = tiny_models["internvl"]
    _, encode = make(folder, min_pixels=10 * 64 * 64)
    assert encode(Ask(), SAMPLES["image"]).visual_tokens > make(folder)[1](Ask(), SAMPLES["image"]).visual_tokens


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_clips_of_unequal_length_and_images_of_unequal_size_share_a_batch(tiny_models, family):
    policy, encode = make(tiny_models[family], train=["language", "merger", "vision"])
    lengths = (2, 6, 4) if policy.family.videos else ()
    samples = [Sample(id=str(n), media=(noise_video(n, frames=n),), row={"q": "What?"}) for n in lengths]
    samples += [Sample(id="wide", media=(Media(source=noise(5, 200, 40)),), row={"q": "What?"}), SAMPLES["image"]]
    prompts = [encode(Ask(), s) for s in samples]
    answers = [np.array([40, 41, 42 + i]) for i in range(len(prompts))]
    def gradients(batches):
        policy.model.zero_grad()
        out = {}
        for batch in batches:
            logprobs = policy.logprobs(batch, 1.0).logprobs
            logprobs.sum().backward()
            out |= dict(zip(batch.rollout_id.tolist(), logprobs.detach().split(1), strict=True))
        return torch.cat([out[i] for i in sorted(out)]), {n: p.grad.clone() for n, p in policy.trainable()
                                                          if p.grad is not None}
    pieces = pieces_of(prompts, answers, 10**6)
    together, grads = gradients(pack(pieces, 10**6))
    alone, expected = gradients([b for piece in pieces for b in pack([piece], 10**6)])
    assert (together - alone).abs().max() <= 1e-5 * alone.abs().max()
    for name, gradient in grads.items():
        scale = expected[name.replace("k_proj.bias", "k_proj.weight")].abs().max()
        assert (gradient - expected[name]).abs().max() <= 2e-5 * scale + 1e-9, name
    greedy = Sampling(max_new_tokens=5, temperature=0)
    engine = HFEngine(policy, seed=0, batch_rollouts=64)
    side_by_side = engine.generate([Request(prompt=p, n=1, sampling=greedy) for p in prompts])
    for prompt, (answer,) in zip(prompts, side_by_side, strict=True):
        ((own,),) = engine.generate([Request(prompt=prompt, n=1, sampling=greedy)])
        assert own.tokens.tolist() == answer.tokens.tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_images_and_videos_in_one_prompt(tiny_models, family):
    both = Sample(id="both", media=(*SAMPLES["image"].media, *SAMPLES["video"].media), row={"q": "Same?"})
    policy, encode = make(tiny_models[family])
    if policy.family.exclusive_media:
        with pytest.raises(DataError, match=r"sample 'both'.*images or videos, not both|does not accept videos"):
            encode(Ask(), both)
    else:
        prompt = encode(Ask(), both)
        (batch,) = pack(pieces_of([prompt], [np.array([40, 41])], 10**6), 10**6)
        assert policy.logprobs(batch, 1.0).logprobs.isfinite().all() and len(prompt.visual_tokens) == 2


def test_a_text_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="a model of type 'qwen2' does not accept images"):
        families.family_of(Qwen2Config())


def test_text_behind_media_follows_their_last_position():
    """Two text tokens, a medium, two more: by hand, for a long video, a short one and an image."""
    def text_behind(kind: int, times: list[int], sides: list[int]) -> list[int]:
        side = max(sides) + 1  # where transformers goes on
        rows = [[0, 1, *row, side, side + 1] for row in (times, sides, sides)]
        types = torch.tensor([[0, 0, *[kind] * len(times), 0, 0]])
        found = families._text_after_media(np.array(rows), types)
        assert found[:, :-2].tolist() == [row[:-2] for row in rows] and (found[:, -2:] == found[0, -2:]).all()
        return found[0, -2:].tolist()
    assert text_behind(2, [2, 6, 10], [2, 2, 2]) == [11, 12]
    assert text_behind(2, [2, 3], [2, 4]) == [5, 6]
    assert text_behind(1, [2, 2, 2, 2], [2, 2, 3, 3]) == [4, 5]
