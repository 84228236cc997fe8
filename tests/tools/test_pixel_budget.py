"""Sizes of targets after resizing, and coordinates over sizes that real processors choose."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlrl.cli.main import main
from vlrl.config import validate
from vlrl.data.coordinates import CONVENTIONS, make
from vlrl.tools.datasets.pixel_budget import PixelBudget, pixel_budget, scale_of
from vlrl.types import Sample

EMBEDDED = "embedded/tiny-qwen3-vl"


def config(name=EMBEDDED, **model):
    return validate({"task": "grounding", "model": {"name": name, **model}})


def row(*boxes, width=1000, height=1000, **more):
    return {"width": width, "height": height, "boxes": [{"box": box} for box in boxes], **more}


def test_sizes_of_targets_by_hand():
    rows = [row([0, 0, 10, 99], [0, 0, 100, 40]), {"width": 500, "height": 500, "box": [1, 1, 31, 61]},
            {"box": [1, 1, 2, 2]}, row([5, 5, 5, 9]), row("x", None), {}]
    found = pixel_budget(rows, lambda size: 0.5 if size == (1000, 1000) else 1.0)
    assert found == PixelBudget(targets=3, smallest=5.0, median=20.0, few=1, needed=640_000)
    assert pixel_budget(rows, lambda size: None) is None and pixel_budget(rows, None) is None
    assert pixel_budget([{}], lambda size: 1.0) is None
    ask = scale_of(config())
    rows = [row([0, 0, 9, 9], width=w, height=h) for w, h in ((10**9, 10**9), (6000, 20), (0.01, 5))]
    assert pixel_budget(rows, ask) is None
    assert pixel_budget([*rows, row([0, 0, 90, 90])], ask).targets == 1
    ask = scale_of(config("no/such-model", max_pixels=250_000))
    assert ask((1000, 1000)) == 0.5 and ask((100, 100)) == 1.0
    assert scale_of(config("no/such-model", min_pixels=40_000))((100, 100)) == 2.0
    assert scale_of(config("no/such-model"))((100, 100)) is None


def processed(processor, image) -> tuple[int, int]:
    _, rows, columns = processor.image_processor(images=[image], return_tensors="np")["image_grid_thw"][0]
    side = processor.image_processor.patch_size
    return int(columns) * side, int(rows) * side


def test_the_processor_itself_is_asked():
    from vlrl.models.families import family_of
    from vlrl.models.loading import load_processor, skeleton

    settled = config(max_pixels=40_000)
    model, _ = skeleton(settled.model)
    processor, ask = load_processor(settled.model, family_of(model.config)), scale_of(settled)
    for size in ((640, 480), (1920, 1080), (90, 300)):
        width, height = processed(processor, Image.new("RGB", size))
        assert width * height <= 40_000
        assert ask(size) == pytest.approx((width * height / (size[0] * size[1])) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["smolvlm", "internvl", "llava_onevision"])
def test_processors_that_cut_tiles(tiny_models, family):
    ask = scale_of(config(str(tiny_models[family])))
    large, small = ask((1600, 1200)), ask((160, 120))
    assert large and small and large < small and large == pytest.approx(ask((1599, 1201)), rel=0.01)


def test_check_warns_of_small_targets(tmp_path, capsys):
    Image.new("RGB", (640, 480)).save(tmp_path / "a.png")
    made = [{"id": str(i), "image": "a.png", "width": 640, "height": 480, "expression": "x",
             "boxes": [{"box": [0, 0, side, 40]}]} for i, side in enumerate((8, 200))]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, made)))
    words = ["data", "check", str(tmp_path / "rows.jsonl"), "--config", "configs/quickstart.yaml",
             "model.max_pixels=30000", "model.min_pixels=null"]
    assert main(words) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "targets as the model sees them: 2, shorter side 2 pixels at least" in out
    assert "warning: 1 targets are less than 8 pixels wide or high" in out and "model.max_pixels=307200" in out
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["pixels"]["few"] == 1


@given(st.integers(28, 4000), st.integers(28, 4000), st.sampled_from(CONVENTIONS), st.data())
def test_points_make_the_round_trip_over_all_sizes_and_aspect_ratios(width, height, convention, data):
    """With the authors' own resizing, whose sides are rounded apart from one another."""
    from qwen_vl_utils.vision_process import smart_resize
    if max(width, height) / min(width, height) >= 200:
        return
    h, w = smart_resize(height, width, factor=28, min_pixels=3136, max_pixels=1_003_520)
    sample = Sample(id="r", row={"width": width, "height": height, "processed_size": [w, h]})
    point = [data.draw(st.floats(0, side)) for side in (width, height)]
    written = make(convention).from_original(sample, point)
    full = {"original": (width, height), "processed": (w, h), "norm1000": (1000, 1000), "norm999": (999, 999),
            "norm1": (1, 1)}[convention]
    assert all(0 <= v <= side for v, side in zip(written, full, strict=True))
    unit = 1e-4 if convention == "norm1" else 1
    back = make(convention).to_original(sample, written)
    units = [unit * own / side for own, side in zip((width, height), full, strict=True)]
    assert all(abs(a - b) <= most for a, b, most in zip(point, back, units, strict=True))


def test_real_photos_through_a_real_processor(tiny_models):
    from transformers import AutoProcessor
    photos = pytest.importorskip("sklearn.datasets").load_sample_images().images
    processor = AutoProcessor.from_pretrained(tiny_models["qwen2_5_vl"])
    for photo in photos:
        image = Image.fromarray(np.ascontiguousarray(photo[:400, :630]))  # 630 x 400
        width, height = processed(processor, image)
        sample = Sample(id="r", row={"width": 630, "height": 400, "processed_size": [width, height]})
        assert make("processed").from_original(sample, [0, 0, 630, 400]) == [0, 0, width, height]
        assert make("processed").to_original(sample, [width / 2, height / 2]) == [315, 200]
