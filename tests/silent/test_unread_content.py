"""What a row says and no prompt asks: columns nobody reads, questions inside other questions, boxes of other units."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from vlrl.cli.main import main
from vlrl.config import load_config
from vlrl.data import read_samples
from vlrl.errors import DataError
from vlrl.task.asked import task_messages
from vlrl.training.build_task import make_task


def run(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the command prints."""
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


def test_a_passage_beside_a_question_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"id": n, "question": "Who came late?", "answer": "Ann", "passage": f"Ann came at {n}, Bo at noon."}
            for n in range(4)]
    said = run(capsys, "data", "check", lines(tmp_path / "rows.jsonl", rows), "--config", "configs/qa/tiny.yaml",
               "--no-show")
    assert "'passage'" in said and "Ann came at 0" in said


def test_descriptions_of_annotations_are_what_is_asked(tmp_path: Path) -> None:
    picture(tmp_path)
    (tmp_path / "coco.json").write_text(json.dumps({
        "images": [{"id": 1, "file_name": "a.png", "width": 200, "height": 100}],
        "categories": [{"id": 1, "name": "cup"}],
        "annotations": [
            {"id": 1, "image_id": 1, "category_id": 1, "bbox": [5, 10, 20, 20], "description": "the cup with a handle"},
            {"id": 2, "image_id": 1, "category_id": 1, "bbox": [60, 10, 20, 20], "description": "the broken cup"}]}))
    assert [("the cup with a handle" in p, "the broken cup" in p) for p in prompts(tmp_path / "coco.json")] == [
        (True, False), (False, True)]


def test_a_question_is_asked_as_it_stands(tmp_path: Path) -> None:
    rows = [{"prompt": [{"role": "user", "content": "Where does the path end? Give one box."}],
             "completion": [{"role": "assistant", "content": "[10, 20, 30, 40]"}], "image": picture(tmp_path)}]
    (prompt,) = prompts(lines(tmp_path / "rows.jsonl", rows))
    assert prompt.startswith("Where does the path end? Give one box.") and "Locate" not in prompt


def test_a_recipe_of_one_box_refuses_two(tmp_path: Path) -> None:
    boxes = [{"box": [10, 10, 20, 20], "label": "cup"}, {"box": [40, 10, 60, 20], "label": "cup"}]
    rows = [{"id": "pair", "image": picture(tmp_path), "width": 200, "height": 100, "expression": "a", "boxes": boxes}]
    with pytest.raises(DataError, match=r"pair.*2 boxes.*task.recipe"):
        prompts(lines(tmp_path / "rows.jsonl", rows), "task.recipe=reasoning")


def test_points_of_a_thousand_are_doubted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = picture(tmp_path, size=(1600, 1200))
    rows = [{"id": n, "image": name, "width": 1600, "height": 1200, "expression": "door", "boxes": [],
             "points": [[60 + 38 * n, 990 - 37 * n]]} for n in range(25)]
    assert "data.boxes=norm1000" in run(capsys, "data", "check", lines(tmp_path / "rows.jsonl", rows))


def test_places_of_swift_are_filled_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"messages": [{"role": "user", "content": "<image>Where is <ref-object>?"},
                          {"role": "assistant", "content": "<bbox>"}], "images": [picture(tmp_path)],
             "objects": {"ref": ["the kettle"], "bbox": [[0.1, 0.2, 0.3, 0.4]], "bbox_type": "norm1"}}]
    run(capsys, "data", "convert", lines(tmp_path / "rows.jsonl", rows), "-o", tmp_path / "new.jsonl")
    (row,) = [json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines()]
    assert row["boxes"][0]["box"] == [20, 20, 60, 40] and "the kettle" in json.dumps(row)
