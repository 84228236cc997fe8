"""`vlrl data overlap`: planted copies are found; sizes of targets after resizing, and coordinates over real sizes."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from vlrl.checks.image_similarity import WINDOWS, image_signature, similar_images
from vlrl.cli.main import main
from vlrl.config import validate
from vlrl.data.coordinates import CONVENTIONS, make
from vlrl.tools.datasets.overlap import shared_meanings, shared_texts, words
from vlrl.tools.datasets.pixel_budget import PixelBudget, pixel_budget, scale_of
from vlrl.types import Sample


def drawn(number, size=(200, 160)):
    rng, values = np.random.default_rng(number), np.zeros((size[1], size[0]))
    for grain in (4, 8, 16, 32):
        part = Image.fromarray(rng.normal(0, 1, (grain, grain)).astype(np.float32))
        values += np.asarray(part.resize(size, Image.Resampling.BICUBIC)) * 20 * (12 / grain) ** 0.5
    return Image.fromarray(np.clip(values + 128, 0, 255).astype(np.uint8)).convert("RGB")


def jpeg(image, quality):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return Image.open(io.BytesIO(file.getvalue()))


def cropped(image, share, rng):
    w, h = (round(share * side) for side in image.size)
    x, y = rng.integers(0, image.width - w + 1), rng.integers(0, image.height - h + 1)
    return image.crop((x, y, x + w, y + h)).resize((120, 96))


CHANGES = {"resized": ("look", lambda i, r: i.resize((75, 60))), "recompressed": ("look", lambda i, r: jpeg(i, 20)),
           "cropped a little": ("crop", lambda i, r: cropped(i, 0.9, r)),
           "cropped and recompressed": ("crop", lambda i, r: jpeg(cropped(i, 0.8, r), 60))}


@pytest.mark.slow
def test_copies_are_found_and_other_pictures_are_not():
    train = [image_signature(str(i), f"train {i}", drawn(i)) for i in range(12)]
    for change, (kind, apply) in CHANGES.items():
        rng = np.random.default_rng(3)
        heldout = [image_signature(str(i), f"held {i}", apply(drawn(i), rng)) for i in range(6)]
        found = similar_images(train, heldout)
        assert [(s.heldout, s.train) for s in found] == [(str(i), str(i)) for i in range(6)], change
        assert {s.kind for s in found} == {kind} and all(0.95 <= s.likeness <= 1 for s in found), change
        turned = similar_images(heldout, train)  # the crop in train, the whole picture held out
        assert {s.heldout for s in turned} == {str(i) for i in range(6)}, change
    assert similar_images(train, [image_signature(str(i), f"h{i}", drawn(100 + i)) for i in range(40)]) == []


def test_the_same_bytes_and_pictures_without_structure():
    flat, other = (image_signature(color, color, Image.new("RGB", (9, 9), color)) for color in ("red", "blue"))
    assert flat.hashes is None and similar_images([flat], [other]) == []
    (same,) = similar_images([flat], [image_signature("c", "red", Image.new("RGB", (9, 9)))])
    assert same == ("c", "red", "same", 1.0) and WINDOWS[0] == (0, 0, 1, 1)


LONG = ("a red van waits at the corner of the old market while two children in yellow coats cross the wet street "
        "towards the bakery with the green door")


def test_texts_by_words_and_ngrams():
    train = [("1", LONG, False), ("2", "What is two plus two?", False), ("3", "How many dogs are there?", True)]
    changed = LONG.replace("red van", "blue bus").replace("wet ", "")
    other = ("three surveyors measured the height of every bridge along the northern canal before winter came and the "
             "water froze over")
    heldout = [("a", LONG.upper() + "!", False), ("b", "WHAT is two, plus two", False),
               ("c", "How many dogs are there?", True), ("d", changed, False), ("e", other, False),
               ("f", f"Look: {LONG}", True), ("g", "", False)]
    found = {s.heldout: (s.train, s.kind) for s in shared_texts(train, heldout)}
    assert found == {"a": ("1", "text"), "b": ("2", "text"), "d": ("1", "words"), "f": ("1", "text")}
    assert words("Ça, l'été — ÉTÉ?") == ["ca", "l", "ete", "ete"]
    template = "please look at the picture and give the box of the thing that this sentence describes in pixels now "
    train = [(str(i), template + f"thing {i}", True) for i in range(20)]
    assert shared_texts(train, [("x", template + "another one", True)]) == []
    assert shared_texts(train[:2], [("x", template + "another one", True)])  # in two texts it is no template
    for column, found in ((1, 18), (2, 0)):
        train, heldout = ([(str(i), texts[k], False) for i, texts in enumerate(PARAPHRASES)] for k in (0, column))
        shared = shared_texts(train, heldout)
        assert len(shared) == found and all(one.heldout == one.train and one.kind == "words" for one in shared)


PARAPHRASES = json.loads((Path(__file__).parent / "paraphrases.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def embedder(tmp_path_factory):
    """A text model without layers, in which words of one meaning have one vector and punctuation has none."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("embedder")
    groups = [["count", "number"], ["crimson", "red"], ["spheres", "balls"], ["emerald", "green"], ["crate", "box"],
              ["the"], ["of"], ["in"], ["how"], ["dogs"], ["sleep"], ["on"], ["a"], ["cold"], ["stone"], ["and"]]
    names = ["[PAD]", "[UNK]", *(word for group in groups for word in group)]
    plain = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="[UNK]"))
    plain.normalizer, plain.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", unk_token="[UNK]",
                            model_max_length=16).save_pretrained(folder)
    model = BertModel(BertConfig(vocab_size=len(names), hidden_size=32, num_hidden_layers=0, num_attention_heads=2,
                                 intermediate_size=8, max_position_embeddings=16))
    with torch.no_grad():
        for part in model.embeddings.children():
            if isinstance(part, torch.nn.Embedding):
                part.weight.zero_()
        place = 2
        for i, group in enumerate(groups):
            model.embeddings.word_embeddings.weight[place:place + len(group), i] = 1.0
            place += len(group)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_an_embedder_finds_what_is_said_in_other_words(embedder, tmp_path, capsys):
    rows = {"train": ["count the crimson spheres in the emerald crate", "how dogs sleep on a cold stone and"],
            "heldout": ["number of red balls in the green box and", "how a cold stone and the dogs sleep in",
                        "red balls"]}
    for name, texts in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(
            json.dumps({"id": f"{name}{i}", "question": text, "answer": "a", "answer_type": "text"}) + "\n"
            for i, text in enumerate(texts)))
    said = [[(f"{name}{i}", text, False) for i, text in enumerate(texts)] for name, texts in rows.items()]
    near = {one.heldout: one for one in shared_meanings(*said, embedder, 0.5)}
    assert not any(one.heldout == "heldout0" for one in shared_texts(*said))
    assert (near["heldout0"].train, near["heldout0"].kind) == ("train0", "meaning") and "heldout2" not in near
    files = [str(tmp_path / f"{name}.jsonl") for name in rows]
    assert main(["data", "overlap", *files, "--embedder", str(embedder), "--alike", "0.5"]) == 1
    assert "heldout0: a text with a similar embedding as train0 of train" in capsys.readouterr().out
    assert main(["data", "overlap", *files, "--embedder", str(tmp_path)]) == 1
    assert "must be a model folder" in capsys.readouterr().err


def test_the_command(tmp_path, capsys):
    for name, rows in (("train", [0, 1, 2]), ("heldout", [1, 7])):
        lines = []
        for i in rows:
            drawn(i).resize((60, 48)).save(tmp_path / f"{name}-{i}.png")
            lines.append(json.dumps({"id": f"{name}{i}", "image": f"{name}-{i}.png", "question": "What is it?",
                                     "answer": "a", "answer_type": "text"}))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    files = [str(tmp_path / f"{name}.jsonl") for name in ("train", "heldout")]
    assert main(["data", "overlap", *files, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["shared"] == [{"heldout": "heldout1", "train": "train1", "kind": "same", "likeness": 1.0}]
    assert (found["train"], found["heldout"], found["share"]) == (3, 2, 0.5)
    assert main(["data", "overlap", *files]) == 1
    assert "heldout1: the same file as train1 of train" in capsys.readouterr().out
    (tmp_path / "train-2.png").unlink()
    assert main(["data", "overlap", *files]) == 1
    assert "train-2.png" in capsys.readouterr().err


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
