"""What `vlrl data check` and `vlrl tasks check` know of rows and tasks, a run knows before its model is loaded: each
fault has one message, and what a row says and no prompt asks is named."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.test_formats import make_video
from vlrl import testing
from vlrl.checks import preflight
from vlrl.checks.preflight import check
from vlrl.cli.main import main
from vlrl.cli.terminal import delayed_lines
from vlrl.config import load, load_config, validate
from vlrl.config.schema import LimitsSettings
from vlrl.data import read_rows, read_samples
from vlrl.data.sources.reading import rows_in
from vlrl.errors import DataError, VlrlError
from vlrl.models.processing import PromptTooLong
from vlrl.task import load as load_task
from vlrl.task import task_samples
from vlrl.task.interface import task_messages
from vlrl.testing.findings import Findings
from vlrl.testing.samples import check_samples
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
        stops = rule in ("unreadable", "constant")
        assert says in said and ("run.checks" in said) == stops and (says or not said)
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


SPAN = {"video": "a.mp4", "question": "When?", "answer_type": "span", "duration": 20}
FAULTS = {
    # task, rows, what is said with {folder}, whether rows can be converted all the same: their media come later
    "an id twice": ("grounding", [box("r", "a.png"), box("r", "a.png", expression="the cup")],
                    "id 'r' is already used in {folder}/train.jsonl:1: ids must be unique", False),
    "no such file": ("grounding", [box("r", "none.png")],
                     "media file {folder}/none.png does not exist; check the path and data.root", True),
    "a box outside": ("grounding", [box("r", "a.png", boxes=[{"box": [10, 10, 140, 30]}])],
                      "box [10, 10, 140, 30] extends beyond the image of 96x64 pixels", False),
    "another column": ("qa", [{"id": "r", "photo": "a.png", "question": "How many?", "answer": 2,
                               "answer_type": "count"}], "the column 'photo' names media ('a.png'): media are read",
                       False),
    "a label of none": ("classification", [{"id": "r", "image": "a.png", "label": "dgo", "labels": ["Cat", "dog"]}],
                        "label='dgo' is not among labels=['Cat', 'dog']. Did you mean 'dog'?", False),
    "the third response": ("preference", [{"id": "r", "image": "a.png", "question": "Best?", "answer": 3,
                                           "responses": ["a", "b"]}],
                           "answer=3 must say which response is better: 1 or 2", False),
    "a span that ends first": ("video", [{"id": "r", **SPAN, "spans": [[9, 4]]}],
                               "span [9, 4] must start at 0 or later and end after its start", False),
    "tracks of no box": ("video", [{"id": "r", **SPAN, "answer_type": "track", "width": 9, "height": 9,
                                    "tracks": [{"boxes": [None]}]}],
                         "a track of 1 frames needs a box in at least one of them", False),
}


def plain(text):
    return "".join(text.split())  # whatever the width of the terminal


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_of_rows_is_said_alike_by_every_command(tmp_path, capsys, name):
    task, rows, says, moves = FAULTS[name]
    picture(tmp_path, "a.png")
    make_video(tmp_path / "a.mp4", 20)
    file = str(rows_file(tmp_path, "train.jsonl", rows))
    words = [f"data.train={file}", f"run.dir={tmp_path}/run", "eval.samples=0", "model.name=/nowhere"]
    for command in (["data", "check", file], ["tasks", "check", task, *words, "--processes", "0", "--samples", "2"],
                    ["data", "convert", file, "-o", str(tmp_path / "new.jsonl")],
                    ["train", "configs/tiny.yaml", f"task.name={task}", *words, "--dry-run"]):
        if command[1] == "convert" and moves:
            continue
        assert main(command) != 0
        out, err = capsys.readouterr()
        assert plain(says.format(folder=tmp_path)) in plain(out + err), (command[:2], out, err)


def test_what_is_held_out_is_said_alike_and_a_label_in_other_capitals_is_among_its_labels(tmp_path, capsys):
    picture(tmp_path, "a.png")
    picture(tmp_path, "b.png", seed=1)
    files = [str(rows_file(tmp_path, f"{split}.jsonl", [box(f"{split}{i}", name) for i, name in enumerate(names)]))
             for split, names in (("train", ["a.png"]), ("heldout", ["b.png", "a.png"]))]
    words = [f"data.train={files[0]}", f"data.heldout={files[1]}", f"run.dir={tmp_path}/run"]
    says = plain(f"what it asks is in train too, in {files[0]}:1; held-out data must not be trained on")
    for command in (["data", "check", *files], ["train", "configs/tiny.yaml", "task.name=grounding", *words,
                                               "--dry-run"],
                    ["tasks", "check", "grounding", *words, "--processes", "0", "--samples", "1"]):
        main(command)
        out, err = capsys.readouterr()
        assert says in plain(out + err) and "heldout1" in out + err, (command[:2], out, err)
        assert len([line for line in (out + err).splitlines() if "what it asks" in line]) == 1
    file = rows_file(tmp_path, "rows.jsonl", [{"id": "r", "image": "a.png", "label": "cat", "labels": ["Cat", "dog"]}])
    assert main(["data", "check", str(file)]) == 0


def test_a_label_of_one_row_is_named(tmp_path, capsys):
    rows = [{"id": str(i), "image": f"{i}.png", "label": ("cat", "dog")[i % 2] if i < 20 else "cqt"} for i in range(21)]
    for i in range(21):
        picture(tmp_path, f"{i}.png", seed=i)
    assert main(["data", "check", str(rows_file(tmp_path, "all.jsonl", rows))]) == 0
    assert "label='cqt' has one row, and every other label 10 or more" in " ".join(capsys.readouterr().out.split())
    assert main(["data", "check", str(rows_file(tmp_path, "all.jsonl", rows[:6]))]) == 0
    assert "has one row" not in capsys.readouterr().out


def test_ids_leaks_and_prompts_of_samples_that_code_makes(tmp_path):
    for n, (prompt, id, rules) in enumerate((
            ("{split} {n}: how many?", "{split}-{i}", set()), ("{split} {n}: how many?", "{i}", {"id"}),
            ("{n}: how many?", "{split}-{i}", {"leak"}), ("How many?", "{split}-{i}", {"leak/prompt"}))):
        own = tmp_path / f"own{n}.py"
        shift = 0 if "leak" in rules else "50 * (split == 'train')"
        own.write_text(
            f"from vlrl import Sample, Task\nclass Own(Task):\n    prompt = {prompt!r}\n    rewards = {{'n': 1.0}}\n"
            f"    def samples(self, split):\n        return [Sample(id=f'{id}', row={{'n': i + {shift}, "
            "'split': split}) for i in range(8)]\n    def oracle(self, sample):\n        return str(sample['n'])\n"
            "    def score(self, sample, answer):\n        return {'n': float(answer.text == str(sample['n']))}\n")
        findings = Findings()
        check_samples(load_task(str(own)), findings, 4, 0)
        said = started(tmp_path, "data.train=", "data.heldout=", task=own)
        assert findings.by_rule.keys() == rules, (prompt, findings)
        for rule in rules - {"leak/prompt"}:  # all prompts are made in a check alone
            message = findings.by_rule[rule][0].message
            assert message in said and "in samples('train')[0]" in message, said
        assert bool(said) == bool(rules - {"leak/prompt"}), said


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main([*map(str, words)])
    said = capsys.readouterr()
    return said.out + said.err


def blank(folder: Path, name: str = "a.png", size: tuple[int, int] = (200, 100)) -> str:
    Image.new("RGB", size, (200, 210, 220)).save(folder / name)
    return name


def prompts(path: Path, *settings: str) -> list[str]:
    config = load_config("configs/quickstart.yaml", f"data.train={path}", "task.drawn=false", *settings)
    task = make_task(config)
    return ["".join(part.get("text", "") for message in task_messages(task, sample) for part in message["content"])
            for sample in read_samples(task, "train")]


def test_a_passage_beside_a_question_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"id": n, "question": "Who came late?", "answer": "Ann", "passage": f"Ann came at {n}, Bo at noon."}
            for n in range(4)]
    said = run(capsys, "data", "check", rows_file(tmp_path, "rows.jsonl", rows), "--config", "configs/qa/tiny.yaml",
               "--no-show")
    assert "'passage'" in said and "Ann came at 0" in said
    rows = [{"id": n, "question": "Who came late?", "answer": "Ann", "answer_type": "text",
             "passage": f"At {n} Ann came."} for n in range(4)]
    path = rows_file(tmp_path, "rows.jsonl", rows)
    for prompt, told in (("{question}", True), ("{passage} {question}", False)):
        config = load_config("configs/qa/tiny.yaml", f"data.train={path}", f"task.prompt='{prompt}'")
        task = make_task(config)
        said = check(task, read_samples(task, "train"), config)
        assert any("'passage' (4 of 4 rows" in line for line in said) == told


def test_what_is_asked_is_the_description_or_question_as_it_stands(tmp_path: Path):
    blank(tmp_path)
    (tmp_path / "coco.json").write_text(json.dumps({
        "images": [{"id": 1, "file_name": "a.png", "width": 200, "height": 100}],
        "categories": [{"id": 1, "name": "cup"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 10, 20, 20], "description": "the cup with a handle"},
            {"id": 2, "image_id": 1, "category_id": 1, "bbox": [60, 10, 20, 20], "description": "the broken cup"}]}))
    assert [("the cup with a handle" in p, "the broken cup" in p) for p in prompts(tmp_path / "coco.json")] == [
        (True, False), (False, True)]
    rows = [{"prompt": [{"role": "user", "content": "Where does the path end? Give one box."}],
             "completion": [{"role": "assistant", "content": "[10, 20, 30, 40]"}], "image": blank(tmp_path)}]
    (prompt,) = prompts(rows_file(tmp_path, "rows.jsonl", rows))
    assert prompt.startswith("Where does the path end? Give one box.") and "Locate" not in prompt
    boxes = [{"box": [10, 10, 20, 20], "label": "cup"}, {"box": [40, 10, 60, 20], "label": "cup"}]
    rows = [{"id": "pair", "image": blank(tmp_path), "width": 200, "height": 100, "expression": "a", "boxes": boxes}]
    with pytest.raises(DataError, match=r"pair.*2 boxes.*task.recipe"):
        prompts(rows_file(tmp_path, "rows.jsonl", rows), "task.recipe=reasoning")


def test_places_of_swift_and_points_of_a_thousand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"messages": [{"role": "user", "content": "<image>Where is <ref-object>?"},
                          {"role": "assistant", "content": "<bbox>"}], "images": [blank(tmp_path)],
             "objects": {"ref": ["the kettle"], "bbox": [[0.1, 0.2, 0.3, 0.4]], "bbox_type": "norm1"}}]
    run(capsys, "data", "convert", rows_file(tmp_path, "rows.jsonl", rows), "-o", tmp_path / "new.jsonl")
    (row,) = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert row["boxes"][0]["box"] == [20, 20, 60, 40] and "the kettle" in json.dumps(row)
    name = blank(tmp_path, size=(1600, 1200))
    rows = [{"id": n, "image": name, "width": 1600, "height": 1200, "expression": "door", "boxes": [],
             "points": [[60 + 38 * n, 990 - 37 * n]]} for n in range(25)]
    assert "data.boxes=norm1000" in run(capsys, "data", "check", rows_file(tmp_path, "rows.jsonl", rows))


TABLE = {"question": "Who sold most?", "answer": "Ann", "table": "Name | Sold\nAnn | 9\nBo | 4",
         "ques_type": "free_text", "ans_type": "extractive_text", "unit": None}


def test_a_question_about_a_table_is_asked_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "problems.json").write_text(json.dumps({"3": TABLE, "4": {**TABLE, "question": "Who sold least?"}}))
    (tmp_path / "tables").mkdir()
    blank(tmp_path, "tables/3.png")
    config = load_config("configs/qa/tiny.yaml", f"data.train={tmp_path / 'problems.json'}")
    first, second = read_samples(make_task(config), "train")
    shown = task_messages(make_task(config), first)[-1]["content"]
    assert [part["type"] for part in shown] == ["image", "text"] and "Ann | 9" in shown[1]["text"]
    assert "Bo | 4" in task_messages(make_task(config), second)[-1]["content"][0]["text"]


def test_the_command_of_the_first_run_trains_the_question_of_each_annotation(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    blank(tmp_path)
    for field in ("caption", "expression", "sentence", "phrase", "text"):
        boxes = {"the green square": [10, 10, 20, 20], "the red circle": [60, 10, 20, 20]}
        (tmp_path / "annotations.json").write_text(json.dumps({
            "images": [{"id": 1, "file_name": "a.png", "width": 200, "height": 100}],
            "categories": [{"id": 1, "name": "circle"}, {"id": 2, "name": "square"}],
            "annotations": [{"id": n, "image_id": 1, "category_id": n, "bbox": box, field: name,
                             "note": "by Bo, at noon"} for n, (name, box) in enumerate(boxes.items(), 1)]}))
        said = run(capsys, "data", "convert", tmp_path / "annotations.json", "-o", tmp_path / "all.jsonl", "--force")
        assert "'annotations.note' (2 of 2 rows, e.g. 'by Bo, at noon')" in said
        asked = prompts(tmp_path / "all.jsonl")
        assert [name in prompt for prompt, name in zip(asked, boxes, strict=True)] == [True, True]
        rows = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
        assert [row["boxes"][0]["box"] for row in rows] == [[10, 10, 30, 30], [60, 10, 80, 30]]


def test_rows_of_easy_r1_trl_swift_and_aitz(tmp_path: Path):
    ask, name = "Please provide the bounding box of the green square.", blank(tmp_path)
    user = {"role": "user", "content": ask}
    for row in ({"problem": ask, "answer": "[10, 10, 30, 30]", "images": [name]},
                {"prompt": [user], "solution": "[10, 10, 30, 30]", "image": name},
                {"messages": [user, {"role": "assistant", "content": "[10, 10, 30, 30]"}], "images": [name]}):
        path = rows_file(tmp_path, "rows.jsonl", [row])
        assert prompts(path, "task.prompt='{question}'") == [ask]
        assert prompts(path)[0].startswith(f"{ask} Answer with the box")
        with pytest.raises(DataError, match=r"contains \{expression\}.*question="):
            prompts(path, "task.prompt='Find {expression}'")
        with pytest.raises(DataError, match="answered by boxes"):
            prompts(path, "task.recipe=curr_reft_binary")
    steps = [{"episode_id": "7", "step_id": n, "instruction": "mute it", "image_path": blank(tmp_path),
              "result_action_type": kind, "result_action_text": words, "result_touch_yx": "[0.5, 0.25]",
              "result_lift_yx": lift, "coat_action_desc": f"step {n}"} for n, (kind, words, lift) in enumerate(
                  [(4, "", "[0.5, 0.25]"), (4, "", "[0.1, 0.25]"), (3, "wifi", "[-1, -1]"), (10, "", "[-1, -1]")])]
    rows = [row for _, row in rows_in(rows_file(tmp_path, "steps.jsonl", steps))]
    assert [row["action"] for row in rows] == [
        {"type": "click", "point": [50, 50]}, {"type": "scroll", "direction": "up"}, {"type": "type", "text": "wifi"},
        {"type": "complete"}]
    assert rows[2]["history"] == ["step 0", "step 1"]
    with pytest.raises(DataError, match="seems to be the answer"):
        read_rows(rows_file(tmp_path, "x.jsonl", [{"image": "a.png", "instruction": "mute it", "next_action": "tap"}]))
