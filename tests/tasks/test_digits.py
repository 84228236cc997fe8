import sys

import numpy as np
import pytest

from vlrl.errors import ConfigError
from vlrl.rewards.text import parse_answer
from vlrl.task import load


@pytest.fixture
def digits():
    pytest.importorskip("sklearn")
    import vlrl.tasks.digits as module

    return module


def test_the_split_is_fixed_and_covers_every_digit(digits):
    train, heldout = digits.split_indices()
    assert (len(train), len(heldout)) == (1400, 397)
    assert sorted(train + heldout) == list(range(1797))
    assert train[:3] == (296, 186, 1183) and heldout[:3] == (1132, 1035, 310)  # a change would leak held-out digits
    labels = digits.digit_arrays()[1]
    assert all(np.bincount(labels[list(places)]).min() >= 30 for places in (train, heldout))
    a, b = load("digits"), load("digits")
    b.seed = 5
    assert a.samples("train")[3].id == b.samples("train")[3].id


def test_digits_of_their_split_and_few_of_them(digits):
    task = load("digits")
    arrays, labels = digits.digit_arrays()
    for split, places in zip(("train", "heldout"), digits.split_indices(), strict=True):
        samples = task.samples(split)
        assert len(samples) == len(places)
        for i in (0, -1):
            assert samples[i].row["label"] == str(labels[places[i]])
            assert samples[i].media[0].source.tobytes() == digits.digit_image(arrays[places[i]]).tobytes()
    with pytest.raises(ConfigError, match="train and heldout"):
        task.samples("valid")
    task = load("digits", {"shots": 2, "classes": "new"})
    train, heldout = task.samples("train"), task.samples("heldout")
    assert sorted(s["label"] for s in train) == sorted("5566778899") and len(heldout) == 397
    assert {s["half"]: s["labels"] for s in heldout} == {"base": [*"01234"], "new": [*"56789"]}
    assert task.score(train[0], parse_answer(train[0]["label"])) == {"accuracy": 1, "format": 1}
    asked = load("digits", {"recipe": "cls_rl"}).samples("train")[0]
    assert task.messages(asked)[0]["content"][-1]["text"] == "Which digit is this? Answer with the digit only."
    assert asked["question"] == "Which digit is this? Choose from: 0, 1, 2, 3, 4, 5, 6, 7, 8, 9."
    array = np.zeros((8, 8))
    array[2:6, 2:6] = 16
    image = digits.digit_image(array)
    assert image.size == (64, 64) and image.mode == "RGB"
    assert image.getpixel((32, 32)) == (255, 255, 255) and image.getpixel((2, 2)) == (0, 0, 0)
    assert load("digits").templates == ("Which digit is this? Answer with the digit only.",)
    assert load("digits", {"thinking": "thinking"}).templates == (
        "Which digit is this? Think in <think> </think>, then answer in <answer> </answer>.",)


def test_missing_scikit_learn_names_the_command(digits, monkeypatch):
    digits.digit_arrays.cache_clear()
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="pip install scikit-learn"):
        load("digits").samples("train")
