"""What a row says and no prompt asks: columns nobody reads, questions inside other questions, boxes of other units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlrl.checks.preflight import check
from vlrl.cli.main import main
from vlrl.config import load_config
from vlrl.data import read_rows, read_samples
from vlrl.data.sources.reading import rows_in
from vlrl.errors import DataError
from vlrl.task.interface import task_messages
from vlrl.training.build_task import make_task


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    main([*map(str, words)])
    said = capsys.readouterr()
    return said.out + said.err


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def picture(folder: Path, name: str = "a.png", size: tuple[int, int] = (200, 100)) -> str:
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
    said = run(capsys, "data", "check", lines(tmp_path / "rows.jsonl", rows), "--config", "configs/qa/tiny.yaml",
               "--no-show")
    assert "'passage'" in said and "Ann came at 0" in said
    rows = [{"id": n, "question": "Who came late?", "answer": "Ann", "answer_type": "text",
             "passage": f"At {n} Ann came."} for n in range(4)]
    path = lines(tmp_path / "rows.jsonl", rows)
    for prompt, told in (("{question}", True), ("{passage} {question}", False)):
        config = load_config("configs/qa/tiny.yaml", f"data.train={path}", f"task.prompt='{prompt}'")
        task = make_task(config)
        said = check(task, read_samples(task, "train"), config)
        assert any("'passage' (4 of 4 rows" in line for line in said) == told


def test_what_is_asked_is_the_description_or_question_as_it_stands(tmp_path: Path):
    picture(tmp_path)
    (tmp_path / "coco.json").write_text(json.dumps({
        "images": [{"id": 1, "file_name": "a.png", "width": 200, "height": 100}],
        "categories": [{"id": 1, "name": "cup"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 10, 20, 20], "description": "the cup with a handle"},
            {"id": 2, "image_id": 1, "category_id": 1, "bbox": [60, 10, 20, 20], "description": "the broken cup"}]}))
    assert [("the cup with a handle" in p, "the broken cup" in p) for p in prompts(tmp_path / "coco.json")] == [
        (True, False), (False, True)]
    rows = [{"prompt": [{"role": "user", "content": "Where does the path end? Give one box."}],
             "completion": [{"role": "assistant", "content": "[10, 20, 30, 40]"}], "image": picture(tmp_path)}]
    (prompt,) = prompts(lines(tmp_path / "rows.jsonl", rows))
    assert prompt.startswith("Where does the path end? Give one box.") and "Locate" not in prompt
    boxes = [{"box": [10, 10, 20, 20], "label": "cup"}, {"box": [40, 10, 60, 20], "label": "cup"}]
    rows = [{"id": "pair", "image": picture(tmp_path), "width": 200, "height": 100, "expression": "a", "boxes": boxes}]
    with pytest.raises(DataError, match=r"pair.*2 boxes.*task.recipe"):
        prompts(lines(tmp_path / "rows.jsonl", rows), "task.recipe=reasoning")


def test_places_of_swift_and_points_of_a_thousand(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [{"messages": [{"role": "user", "content": "<image>Where is <ref-object>?"},
                          {"role": "assistant", "content": "<bbox>"}], "images": [picture(tmp_path)],
             "objects": {"ref": ["the kettle"], "bbox": [[0.1, 0.2, 0.3, 0.4]], "bbox_type": "norm1"}}]
    run(capsys, "data", "convert", lines(tmp_path / "rows.jsonl", rows), "-o", tmp_path / "new.jsonl")
    (row,) = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert row["boxes"][0]["box"] == [20, 20, 60, 40] and "the kettle" in json.dumps(row)
    name = picture(tmp_path, size=(1600, 1200))
    rows = [{"id": n, "image": name, "width": 1600, "height": 1200, "expression": "door", "boxes": [],
             "points": [[60 + 38 * n, 990 - 37 * n]]} for n in range(25)]
    assert "data.boxes=norm1000" in run(capsys, "data", "check", lines(tmp_path / "rows.jsonl", rows))


TABLE = {"question": "Who sold most?", "answer": "Ann", "table": "Name | Sold\nAnn | 9\nBo | 4",
         "ques_type": "free_text", "ans_type": "extractive_text", "unit": None}


def test_a_question_about_a_table_is_asked_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "problems.json").write_text(json.dumps({"3": TABLE, "4": {**TABLE, "question": "Who sold least?"}}))
    (tmp_path / "tables").mkdir()
    picture(tmp_path, "tables/3.png")
    config = load_config("configs/qa/tiny.yaml", f"data.train={tmp_path / 'problems.json'}")
    first, second = read_samples(make_task(config), "train")
    shown = task_messages(make_task(config), first)[-1]["content"]
    assert [part["type"] for part in shown] == ["image", "text"] and "Ann | 9" in shown[1]["text"]
    assert "Bo | 4" in task_messages(make_task(config), second)[-1]["content"][0]["text"]


def test_the_command_of_the_first_run_trains_the_question_of_each_annotation(
        tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture(tmp_path)
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
    ask, name = "Please provide the bounding box of the green square.", picture(tmp_path)
    user = {"role": "user", "content": ask}
    for row in ({"problem": ask, "answer": "[10, 10, 30, 30]", "images": [name]},
                {"prompt": [user], "solution": "[10, 10, 30, 30]", "image": name},
                {"messages": [user, {"role": "assistant", "content": "[10, 10, 30, 30]"}], "images": [name]}):
        path = lines(tmp_path / "rows.jsonl", [row])
        assert prompts(path, "task.prompt='{question}'") == [ask]
        assert prompts(path)[0].startswith(f"{ask} Answer with the box")
        with pytest.raises(DataError, match=r"contains \{expression\}.*question="):
            prompts(path, "task.prompt='Find {expression}'")
        with pytest.raises(DataError, match="answered by boxes"):
            prompts(path, "task.recipe=curr_reft_binary")
    steps = [{"episode_id": "7", "step_id": n, "instruction": "mute it", "image_path": picture(tmp_path),
              "result_action_type": kind, "result_action_text": words, "result_touch_yx": "[0.5, 0.25]",
              "result_lift_yx": lift, "coat_action_desc": f"step {n}"} for n, (kind, words, lift) in enumerate(
                  [(4, "", "[0.5, 0.25]"), (4, "", "[0.1, 0.25]"), (3, "wifi", "[-1, -1]"), (10, "", "[-1, -1]")])]
    rows = [row for _, row in rows_in(lines(tmp_path / "steps.jsonl", steps))]
    assert [row["action"] for row in rows] == [
        {"type": "click", "point": [50, 50]}, {"type": "scroll", "direction": "up"}, {"type": "type", "text": "wifi"},
        {"type": "complete"}]
    assert rows[2]["history"] == ["step 0", "step 1"]
    with pytest.raises(DataError, match="seems to be the answer"):
        read_rows(lines(tmp_path / "x.jsonl", [{"image": "a.png", "instruction": "mute it", "next_action": "tap"}]))
