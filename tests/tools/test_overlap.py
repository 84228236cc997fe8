"""`vlrl data overlap`: copies that were planted are found, and pictures drawn alike are not."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from vlrl.cli.main import main
from vlrl.tools.overlap import WINDOWS, of_pictures, of_texts, picture, words


def drawn(number, size=(200, 160)):
    """A picture of smooth and fine structure."""
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


@pytest.fixture(scope="module")
def train():
    return [picture(str(i), f"train {i}", drawn(i)) for i in range(12)]


CHANGES = {"resized": ("look", lambda i, r: i.resize((75, 60))), "recompressed": ("look", lambda i, r: jpeg(i, 20)),
           "cropped a little": ("crop", lambda i, r: cropped(i, 0.9, r)),
           "cropped and recompressed": ("crop", lambda i, r: jpeg(cropped(i, 0.8, r), 60))}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_planted_copies_are_found(train, change):
    kind, apply = CHANGES[change]
    rng = np.random.default_rng(3)
    heldout = [picture(str(i), f"held {i}", apply(drawn(i), rng)) for i in range(6)]
    found = of_pictures(train, heldout)
    assert [(s.heldout, s.train) for s in found] == [(str(i), str(i)) for i in range(6)]
    assert {s.kind for s in found} == {kind} and all(0.95 <= s.likeness <= 1 for s in found)
    turned = of_pictures(heldout, train)  # the crop in train, the whole picture held out
    assert {s.heldout for s in turned} == {str(i) for i in range(6)}


@pytest.mark.slow
def test_other_pictures_are_not_taken_for_copies(train):
    assert of_pictures(train, [picture(str(i), f"h{i}", drawn(100 + i)) for i in range(40)]) == []


def test_the_same_bytes_and_pictures_without_structure():
    flat, other = (picture(color, color, Image.new("RGB", (9, 9), color)) for color in ("red", "blue"))
    assert flat.hashes is None and of_pictures([flat], [other]) == []
    (same,) = of_pictures([flat], [picture("c", "red", Image.new("RGB", (9, 9)))])
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
    found = {s.heldout: (s.train, s.kind) for s in of_texts(train, heldout)}
    assert found == {"a": ("1", "text"), "b": ("2", "text"), "d": ("1", "words"), "f": ("1", "text")}
    assert words("Ça, l'été — ÉTÉ?") == ["ca", "l", "ete", "ete"]


def test_words_of_a_template_give_nothing_away():
    template = "please look at the picture and give the box of the thing that this sentence describes in pixels now "
    train = [(str(i), template + f"thing {i}", True) for i in range(20)]
    assert of_texts(train, [("x", template + "another one", True)]) == []
    assert of_texts(train[:2], [("x", template + "another one", True)])  # in two texts it is no template


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
