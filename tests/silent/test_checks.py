"""What `vlrl data check` and `vlrl tasks check` know of rows and tasks, a run knows before its model is loaded."""

import json
import random
import time
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from vlrl import testing
from vlrl.checks import preflight
from vlrl.cli.main import main
from vlrl.cli.terminal import delayed_lines
from vlrl.config import load, validate
from vlrl.config.schema import LimitsSettings
from vlrl.errors import VlrlError
from vlrl.models.processing import PromptTooLong
from vlrl.task import load as load_task
from vlrl.task import task_samples
from vlrl.tools.machine.dryrun import open_model
from vlrl.training.build_task import make_task
from vlrl.types import Media


def rows_file(folder, name, rows):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def picture(folder, name, size=(96, 64), orientation=None, seed=0):
    pixels = np.random.default_rng(seed).integers(0, 255, (*size[::-1], 3), dtype=np.uint8)
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    Image.fromarray(pixels).save(folder / name, exif=exif)


def started(folder, *words, task="grounding", heldout=None):
    """What a run says of its task and rows before the model is loaded: the warnings, or the error that ends it."""
    try:
        made = load("configs/tiny.yaml", [
            f"task.name={task}", f"run.dir={folder}/run", f"data.train={folder}/train.jsonl",
            f"data.heldout={heldout or folder / 'heldout.jsonl'}", *words])
        own = make_task(made)
        return "\n".join(preflight.check(own, task_samples(own, "train"), made))
    except VlrlError as error:
        return str(error)


def box(id, image, **more):
    row = {"id": id, "image": image, "width": 96, "height": 64, "expression": "the mug",
           "boxes": [{"box": [10, 10, 40, 30]}]}
    return {**row, **more}


def test_pictures_that_are_upside_down_or_too_thin_are_found_at_the_start(tmp_path, capsys):
    picture(tmp_path, "photo.jpg", orientation=3)
    file = rows_file(tmp_path, "train.jsonl", [box("r1", "photo.jpg")])
    assert "EXIF" in (said := started(tmp_path)) and "r1" in said
    main(["data", "check", str(file)])
    assert "EXIF" in capsys.readouterr().out
    picture(tmp_path, "usual.png")
    picture(tmp_path, "thin.png", size=(3, 900))
    rows_file(tmp_path, "train.jsonl", [box(f"r{i}", "usual.png") for i in range(150)]
              + [box("thin-one", "thin.png", width=3, height=900, boxes=[{"box": [0, 10, 2, 30]}])])
    assert "thin-one" in (said := started(tmp_path)) and "200" in said


def test_rows_that_are_held_out_and_trained_on_under_other_names(tmp_path):
    picture(tmp_path, "a.png")
    picture(tmp_path, "b.png", seed=1)
    rows_file(tmp_path, "train.jsonl", [box(f"t{i}", "a.png", expression=f"mug {i}") for i in range(20)])
    held = rows_file(tmp_path, "other.jsonl", [box(f"h{i}", "a.png", expression=f"mug {i}") for i in range(10)])
    said = started(tmp_path, heldout=held)
    assert "h0" in said and "train.jsonl:1" in said and "9 rows more" in said
    held = rows_file(tmp_path, "sound.jsonl", [box(f"h{i}", "b.png", expression=f"cup {i}") for i in range(10)])
    assert started(tmp_path, heldout=held) == ""


def test_a_task_with_ids_twice_and_a_score_that_is_drawn(tmp_path):
    (tmp_path / "own.py").write_text(
        "import random\nfrom vlrl import Sample, Task\nclass Own(Task):\n    prompt = 'How many?'\n"
        "    rewards = {'luck': 1.0}\n    def samples(self, split):\n"
        "        return [Sample(id=f'{split}-{i // 2}', row={'n': i}) for i in range(8)]\n"
        "    def score(self, sample, answer):\n        return {'luck': random.random()}\n")
    said = started(tmp_path, "data.train=", "data.heldout=", task=tmp_path / "own.py")
    assert "train-0" in said and "unique" in said
    assert "the same answer was scored" in said


def test_what_a_score_gives_is_looked_at_by_a_run_and_by_tasks_check(tmp_path):
    for n, (given, says, rule) in enumerate((
            ("None", "returns None", "unreadable"), ("1.0", "a constant reward", "constant"),
            ("50.0 * (answer.text == str(sample['n']))", "'n' is 50", "parts"),
            ("float(answer.text == str(sample['n']))", "", ""))):
        own = tmp_path / f"own{n}.py"
        own.write_text(
            "from vlrl import Sample, Task\nclass Own(Task):\n    prompt = 'How many?'\n    rewards = {'n': 1.0}\n"
            "    def samples(self, split):\n"
            "        return [Sample(id=f'{split}-{i}', row={'n': i + 50 * (split == 'train')}) for i in range(8)]\n"
            "    def oracle(self, sample):\n        return str(sample['n'])\n"
            f"    def score(self, sample, answer):\n        return {{'n': {given}}}\n")
        said = started(tmp_path, "data.train=", "data.heldout=", task=own)
        assert says in said and "run.checks" not in said and (says or not said)
        found = {f.rule for f in testing.check(load_task(str(own)), 4, processes=0)}
        assert found & {"unreadable", "constant", "parts"} == ({rule} if rule else set()), given


def test_rows_that_check_refuses_are_not_converted_in_silence_and_fill_few_lines(tmp_path, capsys):
    rng = random.Random(3)
    rows = [{"id": f"s{i}", "video": f"clip {i}.mp4", "question": "When?", "answer_type": "span",
             "spans": [[rng.uniform(5, 9), rng.uniform(0, 4)]]} for i in range(300)]
    rows += [{"id": "fine", "video": "b.mp4", "question": "When?", "answer_type": "span", "spans": [[1, 2]]}]
    file, out = rows_file(tmp_path, "train.jsonl", rows), tmp_path / "new.jsonl"
    assert main(["data", "check", str(file), "--no-media"]) == 1
    assert len([line for line in capsys.readouterr().out.splitlines() if "span [" in line]) == 1
    assert main(["data", "convert", str(file), "-o", str(out)]) == 1 and not out.exists()
    capsys.readouterr()
    assert main(["data", "convert", str(file), "-o", str(out), "--keep-going"]) == 0
    printed = capsys.readouterr().out
    assert "299 rows more" in printed and len(printed.splitlines()) < 6 and len(out.read_text().splitlines()) == 1


def test_a_held_out_picture_that_is_one_of_train_saved_anew_is_a_leak(tmp_path, capsys):
    """Vision-R1#6: the same picture with another JPEG quality."""
    names = {}
    for seed, side in ((1, "train"), (1, "heldout"), (2, "train"), (3, "heldout")):
        pixels = np.random.default_rng(seed).integers(0, 255, (6, 8, 3), dtype=np.uint8)
        image = Image.fromarray(pixels).resize((320, 240), Image.Resampling.BICUBIC)
        names[side, seed] = f"{side}{seed}.jpg"
        image.save(tmp_path / names[side, seed], quality=95 if side == "train" else 40)
    asked = {"question": "What colour is it?", "answer": "red", "answer_type": "text"}
    files = [rows_file(tmp_path, f"{side}.jsonl", [{"id": f"{side}{seed}", "image": name, **asked}
                                                   for (own, seed), name in names.items() if own == side])
             for side in ("train", "heldout")]
    main(["data", "check", *map(str, files)])
    leaks = [line for line in capsys.readouterr().out.splitlines() if ": leak: " in line]
    assert len(leaks) == 1 and "heldout1" in leaks[0] and "train.jsonl:1" in leaks[0]


def test_a_prompt_is_refused_by_its_length_with_its_picture(tiny_models):
    """verl#4999: an overlong prompt was measured without its picture. Megabytes are refused without being tokenized."""
    folder = tiny_models["qwen3_vl"]
    config = validate({"task": "x", "model": {"name": str(folder)}})
    task = load_task("qa")
    _, encode = open_model(config, task)
    row = {"id": "p", "question": "What is it?", "answer": "red", "answer_type": "text"}
    plain, long = task.sample_from_row(row), task.sample_from_row({**row, "question": "word " * 800_000})
    shown = replace(plain, media=(Media(source=Image.new("RGB", (448, 448))),))
    tokens = len(encode(task, shown))
    assert tokens > len(encode(task, plain)) + 10
    encode.config = config.model_copy(update={"limits": LimitsSettings(prompt_tokens=tokens - 1)})
    with pytest.raises(PromptTooLong, match=f"'p': the prompt has {tokens} tokens, .*limits.prompt_tokens="):
        encode(task, shown)
    begun = time.process_time()
    with pytest.raises(PromptTooLong, match="the prompt has more than"):
        encode(task, long)
    assert time.process_time() - begun < 10


def test_a_check_that_takes_long_says_what_it_does(tmp_path, capsys):
    doing = []
    (tmp_path / "own.py").write_text(
        "from vlrl import Sample, Task\nclass Own(Task):\n    rewards = {'n': 1.0}\n    def samples(self, split):\n"
        "        return [Sample(id=split, row={'n': 1})]\n"
        "    def score(self, sample, answer):\n        return {'n': float(answer.text == '1')}\n")
    testing.examine(load_task(f"{tmp_path}/own.py"), 1, 0, doing.append)
    assert "train sample 1 of 1" in doing and "answer 20" in doing
    delayed_lines("checking own.py", every=0.0)("answer 20")
    assert capsys.readouterr().err == "checking own.py: answer 20, 0 s\n"
