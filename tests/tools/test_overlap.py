"""`vlrl data overlap`: copies that were planted are found, and pictures drawn alike are not."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vlrl.checks.image_similarity import WINDOWS, image_signature, similar_images
from vlrl.cli.main import main
from vlrl.tools.datasets.overlap import shared_meanings, shared_texts, words


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
