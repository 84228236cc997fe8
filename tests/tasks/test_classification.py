"""The classification task and its digits: recipes by hand, several labels, few-shot and base-to-new samples, cheats."""

import json
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from PIL import Image

from tests.tables import by_hand, each, refused
from tests.tasks import scaffold
from tests.tasks.scaffold import assert_contract, scores, think
from vlrl.config.schema import DataSettings
from vlrl.data import read_rows
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import load
from vlrl.tasks._classification import all_classes, few_shot_places, halves, names_class

RECIPES = list(load("classification")._recipes)
ROW = {"id": "r1", "label": "Tabby cat", "labels": ["Tabby cat", "dog"], "synonyms": ["tabby"]}
OPEN = {"id": "r1", "label": "water_lily"}
SEVERAL = {"id": "r1", "label": ["cat", "dog"], "labels": ["cat", "dog", "mug", "cup"], "synonyms": {"cat": ["kitty"]}}
built = partial(scaffold.built, "classification")


def scored(row, *texts, **options):
    return scores(built(**options), row, *texts)


def score(mode, text, **row):
    return scored({**ROW, **row}, text, thinking=mode)[0].parts


@each("text accuracy format", [
    ("Tabby cat", 1, 1), ("tabby", 1, 1),  # a synonym
    ("dog", 0, 1), ("tabby cat", 0, 0),  # exact, as CLS-RL compares
    ("Tabby cat.", 0, 0), ("<answer>Tabby cat</answer>", 0, 0), ("Tabby cat dog", 0, 0), ("", 0, 0)])
def test_without_thinking_the_whole_text_is_compared(text, accuracy, format):
    assert score("no_thinking", text) == {"accuracy": accuracy, "format": format}


@each("text accuracy format", [
    ("<think>stripes</think><answer>Tabby cat</answer>", 1, 1),
    ("<think>stripes</think>\n<answer> tabby CAT. </answer>", 1, 1),
    ("<think>stripes</think><answer>tabby</answer>", 1, 1), ("<think>stripes</think><answer>dog</answer>", 0, 1),
    ("<think>Tabby cat</think><answer>a pet</answer>", 0, 1),  # named in the thinking only
    ("<think><answer>Tabby cat</answer></think>Tabby cat", 0, 0), ("<answer>Tabby cat</answer>", 1, 0),
    ("<think>a</think><answer>dog</answer><answer>Tabby cat</answer>", 1, 0),
    ("<think>a</think><answer>Tabby cat, dog</answer>", 0, 1),  # all the names
    ("Tabby cat", 0, 0), ("<think>a</think>Tabby cat", 0, 0), ("", 0, 0)])
def test_with_thinking_the_answer_tag_is_compared(text, accuracy, format):
    assert score("thinking", text) == {"accuracy": accuracy, "format": format}


TABLES = {
    "cls_rl": {
        think("Tabby cat"): (1, 1), think("tabby cat"): (1, 1), think(" tabby_cat\n"): (1, 1), think("tabby"): (1, 1),
        think("Tabby cat."): (0, 1), think("dog"): (0, 1), think("Tabby cat, dog"): (0, 1), think(""): (0, 1),
        "tabby cat": (1, 0), "a tabby cat": (0, 0), "<think>tabby cat": (0, 0), "": (0, 0),
        "<think><answer>tabby cat</answer></think><answer>dog</answer>": (0, 0),
        "<answer>tabby cat</answer> <answer>dog</answer>": (1, 0), "<answer>dog</answer><answer>tabby cat</answer>":
        (0, 0)},
    "cls_rl_no_thinking": {
        "Tabby cat": 1, "tabby": 1, "Tabby cat ": 0, "tabby cat": 0, "Tabby cat\n": 0, think("Tabby cat"): 0,
        "Tabby cat, dog": 0, "": 0},
    "visual_rft_classification": {
        think("Tabby_Cat"): (1, 1), think("tabbycat"): (1, 1), think("a tabby cat."): (1, 1), think("tabby"): (1, 1),
        think("It is a small Tabby cat"): (1, 1), think("dog"): (0, 1), think(""): (0, 1), think(" _ "): (0, 1),
        think("a"): (0, 1), think("c"): (0, 1), think("Tabby cat, dog"): (0, 1), think("dog or tabby"): (0, 1),
        think("tabbycats"): (0, 1), "a tabby cat": (1, 0), "<think>tabby cat</think>dog": (0, 0),
        "<think>tabby cat": (0, 0), "<answer>tabby cat": (1, 0), "x " * 2000 + "tabby cat": (0, 0)},
    "rlcr": {  # accuracy, format, reward
        f"{think('tabby cat')}<confidence>0.9</confidence>": (1, 1, 0.99),
        f"{think('tabby cat')}<confidence>0.5</confidence>": (1, 1, 0.75),
        f"{think('dog')}<confidence>0.5</confidence>": (0, 1, -0.25),
        f"{think('dog')}<confidence>1</confidence>": (0, 1, -1), f"{think('dog')}<confidence>0</confidence>": (0, 1, 0),
        think("tabby cat"): (1, 0, 0), think("dog"): (0, 0, -1), "": (0, 0, -1),
        f"{think('tabby cat')}<confidence>sure</confidence>": (1, 0, 0)}}


@each("recipe", TABLES)
def test_recipes_by_hand(recipe):
    for text, expected in TABLES[recipe].items():
        (found,) = scored(ROW, text, recipe=recipe)
        got = [found.parts["accuracy"], *([found.parts["format"]] if "format" in found.parts else [])]
        if recipe == "rlcr":
            got.append(pytest.approx(found.reward))
        assert tuple(got) == (expected if isinstance(expected, tuple) else (expected,)), text
    assert scored(ROW, think("tabby"), recipe="cls_rl")[0].reward == 2


@each("row", [ROW, SEVERAL])
def test_what_it_is_not_is_no_class(row):
    name = row["label"] if isinstance(row["label"], str) else ", ".join(row["label"])
    for text in (f"not a {name}", f"It is not a {name}", f"no {name}", f"a {name} is not there"):
        paid = [scored(row, think(text), recipe="visual_rft_classification", negation=rule)[0].parts["accuracy"]
                for rule in ("read", "ignored")]
        assert paid[0] < paid[1]
    entry = {"id": "r1", "label": "no entry", "labels": ["no entry", "stop"]}
    assert scored(entry, think("a sign: no entry"), recipe="visual_rft_classification")[0].parts["accuracy"] == 1
    assert scored(entry, think("No entry sign"), recipe="visual_rft_classification")[0].parts["accuracy"] == 1


def test_prompts_and_what_is_read():
    for text, format in (("anything", 1), ("two\nlines", 0), ("<think>a", 0), (" ", 0)):
        assert score("no_thinking", text, labels=None, synonyms=None)["format"] == format
    task = load("classification", {"prompt": "Name it: {question}"})
    sample = task.sample_from_row({**ROW, "question": "What?"})
    assert task.messages(sample)[0]["content"][-1]["text"] == "Name it: What?"
    assert task.thinks(task.sample_from_row(ROW)) is False
    for recipe, row, text, parsed in (
            ("cls_rl", ROW, think(" Tabby CAT."), "tabby cat"), ("plain", ROW, "", None),
            ("plain", SEVERAL, "Cat, dog;cat", ["cat", "dog"]), ("plain", SEVERAL, "", []),
            ("rlcr", ROW, "no", {"label": None, "confidence": None}),
            ("rlcr", ROW, think("dog") + "<confidence>.5</confidence>", {"label": "dog", "confidence": 0.5})):
        assert scored(row, text, recipe=recipe)[0].parsed == parsed
    task = built(recipe="rlcr")
    sample = task.sample_from_row(ROW)
    assert task.metrics(sample, parse_answer(think("dog") + "<confidence>.5</confidence>"), {}) == {"confidence": 0.5}
    assert task.metrics(sample, parse_answer("dog"), {}) == {} and task.target(sample) == "Tabby cat"


def test_prompts_and_rows_of_several_labels():
    task = load("classification", {"thinking": "both"})
    sample = task.sample_from_row(ROW)
    assert len(task.templates) == 2
    for template in task.templates:
        visit = replace(sample, prompt=template)
        assert task.thinks(visit) is ("<think>" in template)
        assert task.score(visit, parse_answer(task.oracle(visit))) == {"accuracy": 1, "format": 1}
        text = task.messages(visit)[0]["content"][-1]["text"]
        assert text.startswith("What does the image show? Choose from: Tabby cat, dog.")
    task = built()
    sample = task.sample_from_row(SEVERAL)
    assert task.messages(sample)[0]["content"][-1]["text"].startswith(
        "What does the image show? Choose all that are there from: cat, dog, mug, cup. Separate names by commas.\n")
    assert task.oracle(sample) == "cat, dog" and scored(SEVERAL, "cat, dog")[0].reward == 1.1
    assert [s.parts["format"] for s in scored(SEVERAL, "kitty", "cat, cow", "", "cat")] == [1, 0, 0, 1]
    one = task.sample_from_row({"id": 1, "label": "cat", "multi": True})
    assert one["label"] == ["cat"] and task.sample_from_row({"id": 1, "label": 7})["label"] == "7"


SETS = {  # Jaccard, F1, the same set
    "cat, dog": (1, 1, 1), "dog\ncat": (1, 1, 1), "dog; kitty": (1, 1, 1), "cat, kitty, dog": (1, 1, 1),
    '["cat", "dog"]': (1, 1, 1), "cat": (1 / 2, 2 / 3, 0), "cat, mug": (1 / 3, 1 / 2, 0),
    "cat, dog, mug": (2 / 3, 4 / 5, 0), "cat, dog, mug, cup": (1 / 2, 2 / 3, 0), "cat dog": (0, 0, 0),
    "mug": (0, 0, 0), "": (0, 0, 0), ",;": (0, 0, 0), ", ".join(["cat", "dog", *map(str, range(300))]): (0, 0, 0)}


@each("recipe", ["plain", "cls_rl", "visual_rft_classification"])
def test_several_labels_by_hand(recipe):
    for place, name in enumerate(("jaccard", "f1", "exact")):
        texts = [*SETS] if recipe == "plain" else [*map(think, SETS)]
        found = scored(SEVERAL, *texts, recipe=recipe, multi_score=name)
        assert [s.parts["accuracy"] for s in found] == pytest.approx([v[place] for v in SETS.values()])


test_names_within_other_words = by_hand(names_class, [
    ("water lily", "water_lily", (), True), ("waterlily", "Water Lily", (), True),
    ("it is a water lily", "waterlily", (), True), ("lily", "water lily", (), False),  # less than half of it
    ("water", "water lily", (), True), ("water", "water lily", ("water iris",), False),  # several fit
    ("rose tulip water lily", "water lily", (), False), ("a pink water lily", "water lily", (), False),
    ("a pink water lily", "water lily", ("rose",), True), ("rose, water lily", "water lily", ("rose",), False),
    ("cat", "black cat", ("cat",), False), ("black cat", "cat", ("black cat",), False),
    ("a big black cat", "black cat", ("cat",), True), ("a big black cat", "cat", ("black cat",), False),
    ("concatenate", "cat", ("dog",), False), ("737", "737-200", ("737-300",), False),
    ("Boeing 737-200", "737-200", ("737-300",), True), ("of", "bird of paradise", (), False), ("", "", (), False),
    ("cat", "!", (), False), ("dog", "cat", ("!",), False),
    ("\u8fd9\u662f\u72d7", "\u72d7", ("\u732b",), True), ("\u8fd9\u662f\u72d7", "\u732b", ("\u72d7",), False)])
test_bad_rows_are_named = refused(DataError, lambda change: load("classification").sample_from_row({**ROW, **change}), [
    ({"label": None}, "label=None"), ({"label": []}, r"label=\[\]"), ({"label": ""}, "label=''"),
    ({"label": [True]}, r"label=\[True\]"), ({"labels": "a"}, "labels='a'"), ({"synonyms": [None]}, "synonyms"),
    ({"id": None}, "id=None"), ({"label": ["a", "b"]}, "must be an object {label"),
    ({"label": ["a, b", "c"], "synonyms": None}, "'a, b' has a comma"),
    ({"label": ["a", "b"], "synonyms": {"a": ["c;d"]}}, "'c;d' has a comma"), ({"synonyms": {"a": "b"}}, "a='b'")
], start="row .*")


@each("given", [{"thinking": "maybe"}, {"shots": -1}, {"classes": "old"}, {"multi_score": "mean"}])
def test_unknown_values(given):
    with pytest.raises(ConfigError, match=rf"task\.{next(iter(given))}="):
        load("classification", given)


def test_few_shots_are_nested_and_follow_ids_alone():
    samples = [(f"s{i}", ("cat", "dog", "mug")[i % 3:i % 3 + 1]) for i in range(60)] + [("rare", ("yak",))]
    sizes = {shots: few_shot_places(samples, shots, 0) for shots in (1, 2, 4, 8, 16, 100)}
    assert [len(places) for places in sizes.values()] == [4, 7, 13, 25, 49, 61]
    assert all({*sizes[a]} < {*sizes[b]} for a, b in ((1, 2), (2, 4), (4, 8), (8, 16), (16, 100)))
    for places in sizes.values():
        assert places == sorted(places) and 60 in places
    ids = {samples[p][0] for p in sizes[4]}
    backwards = samples[::-1]
    assert {backwards[p][0] for p in few_shot_places(backwards, 4, 0)} == ids
    assert {samples[p][0] for p in few_shot_places(samples, 4, 1)} != ids
    fixed = ["s0", "s29", "s42", "s43", "s46", "s53", "rare"]  # others would give the same config other samples
    assert [samples[p][0] for p in sizes[2]] == fixed
    both = [("a", ("x", "y")), ("b", ("x", "y")), ("c", ("x",)), ("d", ("z",))]
    for seed in range(5):
        chosen = {both[p][0] for p in few_shot_places(both, 1, seed)}
        assert "d" in chosen and len(chosen & {"a", "b"}) == 1


def test_halves_and_the_order_of_the_classes():
    assert halves(["d", "b", "a", "c", "e"]) == {"base": ["d", "b", "a"], "new": ["c", "e"]}
    assert halves(["b", "a"]) == {"base": ["b"], "new": ["a"]} and halves(["a"])["new"] == []
    assert halves(["a", "b", "c", "d", "d"]) == {"base": ["a", "b", "c"], "new": ["d"]}
    with pytest.raises(DataError, match="'b' is in both halves"):
        halves(["a", "b", "b", "c"])
    rows = [{"label": name, "class_id": number} for name, number in (
        ("tench", 0), ("Ant", 10), ("crane", 9), ("crane", 2), ("tench", 0))]
    assert all_classes(rows) == ["tench", "crane", "crane", "Ant"]  # 10 is after 9; two classes have one name
    assert all_classes(rows, ["crane", "Ant", "yak", "tench"]) == ["crane", "Ant", "tench"]
    assert all_classes([{**row, "class_id": None} for row in rows]) == ["Ant", "crane", "tench"]
    for other in ({"label": "yak"}, {"label": "tench"}, {"label": "tench", "labels": ["yak", "tench"], "class_id": 0}):
        with pytest.raises(DataError, match=r"(yak|tench)'.* class_id .* task\.class_order"):
            all_classes([*rows, other])
    with pytest.raises(DataError, match=r"'crane' is not among the 2 names of task\.class_order"):
        all_classes(rows, ["Ant", "tench"])


def test_the_halves_of_a_split_of_coop_are_those_of_its_numbers(tmp_path):
    """As in CoOp's code: the first half of the sorted numbers, of an odd number of classes one more."""
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    numbers = {"pink primrose": 0, "hard-leaved pocket orchid": 1, "canterbury bells": 2, "alpine thistle": 34,
               "Blanket": 10}
    entries = [["a.png", number, name] for name, number in numbers.items()]
    for split in ("train", "test"):
        (tmp_path / f"{split}.json").write_text(json.dumps({split: entries}))
    task = with_files(DataSettings(**{split: str(tmp_path / f"{file}.json") for split, file in (
        ("train", "train"), ("heldout", "test"))}), classes="base")
    base = {"pink primrose", "hard-leaved pocket orchid", "canterbury bells"}
    assert {s["label"] for s in task.samples("train")} == base
    assert {s["label"] for s in task.samples("heldout") if s["half"] == "new"} == {"Blanket", "alpine thistle"}


@pytest.fixture
def files(tmp_path):
    """Ten images of each of four classes to train on, one to hold out."""
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    names = ["ant", "bee", "cat", "dog"]
    for split, count in (("train", 10), ("heldout", 1)):
        (tmp_path / f"{split}.jsonl").write_text("".join(
            json.dumps({"id": f"{split}-{name}-{i}", "image": "a.png", "label": name, "labels": names}) + "\n"
            for i in range(count) for name in names))
    return DataSettings(train=str(tmp_path / "train.jsonl"), heldout=str(tmp_path / "heldout.jsonl"))


def with_files(data, **settings):
    task = load("classification", settings)
    task.data = data
    return task


def test_shots_and_base_classes_of_files(files, tmp_path):
    task = with_files(files, shots=2)
    train = task.samples("train")
    assert len(train) == 8 and len(task.samples("heldout")) == 4
    assert sorted(s["label"] for s in train) == sorted(2 * ["ant", "bee", "cat", "dog"])
    task.seed = 7
    assert [s.id for s in task.samples("train")] == [s.id for s in train]
    assert [s.id for s in with_files(files, shots=2, shots_seed=1).samples("train")] != [s.id for s in train]
    assert len(with_files(files).samples("train")) == 40
    task = with_files(files, classes="base", shots=1)
    assert sorted(s["label"] for s in task.samples("train")) == ["ant", "bee"]
    assert {s["label"] for s in with_files(files, classes="new").samples("train")} == {"cat", "dog"}
    found = {s["label"]: s for s in task.samples("heldout")}
    assert [found[label]["half"] for label in ("ant", "bee", "cat", "dog")] == ["base", "base", "new", "new"]
    assert found["bee"]["labels"] == ["ant", "bee"] and found["dog"]["labels"] == ["cat", "dog"]
    assert "Choose from: cat, dog.\n" in task.messages(found["cat"])[0]["content"][-1]["text"]
    assert task.score(found["cat"], parse_answer("cat")) == {"accuracy": 1, "format": 1}
    assert len(found["cat"].media) == 1
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(SEVERAL), encoding="utf-8")
    with pytest.raises(DataError, match=r"task\.classes=new .* task\.classes=all"):
        with_files(DataSettings(train=str(path)), classes="new").samples("train")


def test_summary_of_halves_and_of_confidence():
    records = [{"sample": {"half": half}, "parts": {"accuracy": paid}, "metrics": {}} for half, paid in (
        ("base", 1.0), ("base", 0.5), ("new", 0.5), ("new", 0.0), (None, 1.0), ("new", None))]
    assert built().summarize(records) == {"accuracy/base": 0.75, "accuracy/new": 0.25, "accuracy/h": 0.375}
    assert built().summarize(records[:2]) == {"accuracy/base": 0.75} and built().summarize([]) == {}
    none = [{"sample": {"half": half}, "parts": {"accuracy": 0.0}} for half in ("base", "new")]
    assert built().summarize(none)["accuracy/h"] == 0
    sure = [{"sample": {}, "parts": {"accuracy": a}, "metrics": {"confidence": q}} for a, q in ((1, 0.9), (0, 0.9))]
    assert built().summarize([*sure, {"sample": {}, "parts": {"accuracy": 1}, "metrics": {}}]) == {
        "ece": pytest.approx(0.4)}


def test_folders_and_tables_are_read(tmp_path):
    for split in ("train", "test"):
        for name in ("sea_lion", "C++"):
            (tmp_path / "images" / split / name).mkdir(parents=True)
            Image.new("RGB", (4, 4)).save(tmp_path / "images" / split / name / "1.png")
    folder = DataSettings(train=str(tmp_path / "images"), heldout=str(tmp_path / "images"))
    (tmp_path / "rows.csv").write_text("image,class\nimages/train/C++/1.png,cat\nimages/test/C++/1.png,dog\n")
    table = DataSettings(train=str(tmp_path / "rows.csv"))
    for data, names in ((folder, ["C++", "sea lion"]), (table, ["cat", "dog"])):
        samples = with_files(data).samples("train")
        assert sorted(s["label"] for s in samples) == names == samples[0]["labels"]
        assert all(s.media[0].source.is_file() for s in samples)
    assert len(read_rows(tmp_path / "images")) == 4


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["closed", "open", "several"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_contract(recipe, rows, tmp_path):
    names = ["tabby cat", "dog", "sea lion", "C++", "mug", "7"]
    made = {"closed": [{"label": name, "labels": names} for name in names], "open": [{"label": n} for n in names],
            "several": [{"label": names[i:i + 2], "labels": names} for i in range(5)]}[rows]
    assert_contract("classification", {"recipe": recipe}, made, tmp_path, samples=6)


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
