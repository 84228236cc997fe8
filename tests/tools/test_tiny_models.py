"""Tiny models: reproducible, real; and the embedded one that is shipped."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import kinds_of, noise
from vlrl.config import load
from vlrl.models.loading import resolve
from vlrl.task import load as load_task
from vlrl.tools.tiny import cold_start, episode_start
from vlrl.tools.tiny import models as tiny_models

SHIPPED = Path(resolve("embedded/tiny-qwen3-vl"))
MADE = json.loads((SHIPPED / "made_by.json").read_text())


@pytest.fixture(scope="module", params=tiny_models.FAMILIES)
def loaded(request, tmp_path_factory):
    from transformers import AutoModelForImageTextToText, AutoProcessor
    folder = tmp_path_factory.mktemp(request.param)
    tiny_models.build(request.param, folder)
    return AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)


def encode(processor, images=(), frames=0):
    kinds = ["image"] * len(images) + ["video"] * (frames > 0)
    content = [*({"type": kind} for kind in kinds), {"type": "text", "text": "Where is the red circle?"}]
    text = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True,
                                         tokenize=False, processor_kwargs={"num_frames": frames})
    kwargs = {"images": [list(images)]} if images else {}
    if frames:
        video = torch.stack([torch.from_numpy(np.array(noise(i, 64, 64))).permute(2, 0, 1) for i in range(frames)])
        meta = {"total_num_frames": frames, "fps": 2.0, "frames_indices": list(range(frames)), "duration": frames / 2}
        kwargs |= {"videos": [[video]], "video_metadata": [[meta]], "do_sample_frames": False}
    return processor(text=[text], return_tensors="pt", **kwargs)


def placeholders(model, batch):
    ids = {model.config.image_token_id, getattr(model.config, "video_token_id", None)}
    return sum(i in ids for i in batch["input_ids"][0].tolist())


def features(model, batch):
    text = ("input_ids", "attention_mask", "mm_token_type_ids", "second_per_grid_ts")
    media = {k: v for k, v in batch.items() if k not in text}
    if not media:
        return 0
    look = model.get_video_features if "pixel_values_videos" in media else model.get_image_features
    pooled = look(**media).pooler_output
    return sum(f.flatten(0, -2).shape[0] for f in (pooled if isinstance(pooled, (list, tuple)) else [pooled]))


@pytest.mark.parametrize("images, frames", [([(64, 64)], 0), ([(112, 84), (112, 56)], 0), ([], 4), ([], 0)],
                         ids=["image", "two images", "video", "text"])
@torch.no_grad()
def test_a_family_sees_what_its_prompt_says(loaded, images, frames):
    model, processor = loaded
    if frames and "video" not in kinds_of(model.config.model_type):
        assert getattr(processor, "video_processor", None) is None
        return
    batch = encode(processor, [noise(i, *size) for i, size in enumerate(images)], frames)
    count = placeholders(model, batch)
    assert count == features(model, batch) and (count > 0) == bool(images or frames)
    assert count <= 64
    logits = model(**batch).logits
    assert logits.isfinite().all() and logits.shape[:2] == batch["input_ids"].shape


@torch.no_grad()
def test_a_family_is_small_and_its_picture_matters(loaded):
    model, processor = loaded
    assert model.num_parameters() < 1_000_000
    assert model.generation_config.eos_token_id == processor.tokenizer.eos_token_id
    batches = [encode(processor, [noise(seed, 64, 64)]) for seed in (1, 2)]
    assert batches[0]["input_ids"].equal(batches[1]["input_ids"]) and 4 <= placeholders(model, batches[0]) <= 21
    a, b = (model(**batch).logits[0, -1] for batch in batches)
    assert (a - b).abs().max() > 1e-4


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_max_pixels_limits_the_visual_tokens(family):
    counts = []
    for limit in (64 * 64, 128 * 128):
        _, processor = tiny_models.FAMILIES[family](tiny_models.make_tokenizer(tiny_models.TOKENS[family]), limit)
        counts.append(encode(processor, [noise(0, 128, 128)])["input_ids"].shape[1])
    assert counts[1] > counts[0]


def test_what_is_shipped_is_what_made_by_says(tmp_path):
    assert tiny_models.weights_sha256(SHIPPED) == MADE["sha256"]
    assert sum(f.stat().st_size for f in SHIPPED.iterdir()) <= 4_000_000
    assert (SHIPPED / "log.jsonl").read_text().count("\n") == sum(s["steps"] for s in MADE["stages"])
    folder = Path(resolve("embedded/tiny-qwen3-vl-episodes"))
    made = json.loads((folder / "made_by.json").read_text())
    assert tiny_models.weights_sha256(folder) == made["sha256"] and made["from"] == episode_start.FROM
    assert made["stages"] == json.loads(json.dumps([asdict(stage) for stage in episode_start.STAGES]))
    assert sum(f.stat().st_size for f in folder.iterdir()) <= 2_000_000
    episode_start.base(tmp_path, 0)
    for name in ("chat_template.jinja", "tokenizer.json"):
        assert (folder / name).read_text() == (tmp_path / name).read_text()
    assert load_task("grounding").templates[0] == tiny_models.LOCATE
    assert load_task("digits").templates[0] == tiny_models.DIGIT
    assert load_task("digits", {"thinking": "thinking"}).templates[0] == tiny_models.DIGIT_THINK
    from transformers import AutoTokenizer
    assert tiny_models.make_tokenizer().get_vocab() == AutoTokenizer.from_pretrained(SHIPPED).get_vocab()
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):  # the same seed makes the same weights
        tiny_models.build("qwen3_vl", tmp_path / name, seed=seed)
    a, b, c = (tiny_models.weights_sha256(tmp_path / name) for name in "abc")
    assert a == b != c


@pytest.mark.slow
@pytest.mark.parametrize("config, metric", [("configs/quickstart.yaml", "iou"),
                                            ("configs/classification/digits.yaml", "accuracy")])
def test_shipped_checkpoint_scores_what_was_recorded(tmp_path, config, metric):
    """On the first 32 held-out samples, within what so few allow."""
    from vlrl.store import RunFolder
    from vlrl.training.loop import train
    train(load(config, [f"run.dir={tmp_path}", "steps=0", "eval.samples=32", "save.every=0"]))
    (line,) = RunFolder(tmp_path).evals()
    recorded = next(h for h in MADE["heldout"] if h["config"] == config)
    assert line["n"] == 32 and abs(line[metric] - recorded[metric]) < 0.25


def pixels(media):
    return [frame.tobytes() for frame in (media.source if media.kind == "video" else [media.source])]


@pytest.mark.slow
def test_cold_start_examples_are_a_function_of_their_place(monkeypatch):
    pytest.importorskip("highway_env")
    monkeypatch.setattr(cold_start, "PLANS", 2)
    stage = cold_start.STAGES[-1]
    seen = [[cold_start.example(stage, 0, i) for i in range(stage.batch)] for _ in range(2)]
    assert all(a.prompt == b.prompt and a.answer == b.answer and pixels(a.media) == pixels(b.media)
               for a, b in zip(*seen, strict=True))
    assert any(cold_start.example(stage, 1, i).answer != seen[0][i].answer for i in range(5))
    plan = seen[0][-1]
    assert plan.prompt.startswith("Speed ") and plan.answer.split(", ")[1] in plan.answer
    clips = [e for e in seen[0] if e.media.kind == "video"]
    assert len(clips) == stage.clips and len({e.prompt.split()[1] for e in clips}) == len(cold_start.CLIPS)


def test_hasty_answers_to_clips_and_heldout_digits():
    """With hasty=1 every choice is the first option and every span a second longer at each end."""
    hasty, slow = (replace(cold_start.STAGES[-1], hasty=share) for share in (1.0, 0.0))
    places = range(sum((hasty.boxes, hasty.digits, hasty.thoughts)), hasty.batch - hasty.plans)
    for place in places:
        wrong, right = cold_start.example(hasty, 0, place), cold_start.example(slow, 0, place)
        assert wrong.prompt == right.prompt
        if " to " in right.answer:
            (a, b), (start, end) = (map(float, e.answer.split(" to ")) for e in (wrong, right))
            assert a == max(0, start - 1) and b in (end, end + 1)
        else:
            assert wrong.answer == "A"
    from vlrl.tasks.digits import digit_arrays, digit_image, split_indices
    arrays, _ = digit_arrays()
    heldout = {digit_image(arrays[i]).tobytes() for i in split_indices()[1]}
    stage = cold_start.STAGES[0]
    slots = [i for i in range(6 * stage.batch) if i % stage.batch >= stage.boxes]
    assert not any(cold_start.example(stage, 0, i).media.source.tobytes() in heldout for i in slots)
