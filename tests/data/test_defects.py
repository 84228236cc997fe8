"""`vlrl data check` on a folder of several data sets: every planted defect is found, once, and nothing else is."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.data.films import sound_only
from tests.data.sets import bomb, save
from tests.data.test_formats import make_video
from tests.tables import each
from vlrl.checks import CheckedRow, Context, MediaFile
from vlrl.checks.fields import field_problems
from vlrl.checks.files import leaks
from vlrl.cli.main import main
from vlrl.config.schema import LimitsSettings
from vlrl.task import load
from vlrl.tools.datasets.check import check, files_of

BOX = {"box": [1, 2, 30, 20], "label": "mug"}
SOUND = {
    "grounding": {"id": "g", "image": "a.png", "width": 64, "height": 32, "expression": "the mug", "boxes": [BOX]},
    "video": {"id": "v", "video": "a.mp4", "question": "when?", "answer_type": "span", "spans": [[0.5, 1.5]],
              "duration": 2.0},
    "qa": {"id": "q", "image": "b.png", "question": "which?", "options": ["cat", "dog"], "answer": "B",
           "answer_type": "choice"},
    "preference": {"id": "p", "image": "b.png", "question": "best?", "responses": ["one", "two"], "answer": 2},
    "driving": {"id": "d", "images": ["b.png"], "plan": {"speed": "KEEP", "path": ["STRAIGHT", "LEFT_TURN"]},
                "trajectory": [[1, 0, 0.5]]},
    "classification": {"id": "c", "image": "b.png", "label": "cat", "labels": ["cat", "dog"]}}
"""A row without fault by family."""
DEFECTS = {
    # file: (family, changes, kind, words of the reason); a change to None takes the field away
    "a missing file": ("grounding", {"image": "none.png"}, "media", "none.png"),
    "an unreadable image": ("grounding", {"image": "text.png"}, "media", "text.png"),
    "half an image": ("classification", {"image": "half.png"}, "media", "half.png"),
    "a bomb": ("qa", {"image": "bomb.png"}, "media", "bomb.png"),
    "a zero-byte video": ("video", {"video": "empty.mp4"}, "media", "empty.mp4"),
    "only sound": ("video", {"video": "sound.mp4"}, "media", "sound.mp4"),
    "out of the folder": ("qa", {"image": "../../secret.png"}, "row", "lies outside"),
    "a box outside": ("grounding", {"boxes": [{**BOX, "box": [1, 2, 90, 20]}]}, "box", "beyond the image"),
    "corners swapped": ("grounding", {"boxes": [{**BOX, "box": [30, 2, 1, 20]}]}, "box", "x1 < x2"),
    "a wrong size": ("grounding", {"width": 640, "height": 320}, "size", "640x320"),
    "no id": ("grounding", {"id": None}, "row", "every row needs an 'id'"),
    "difficulty": ("qa", {"difficulty": 40}, "row", "difficulty=40"),
    "NaN weight": ("qa", {"weight": float("nan")}, "row", "weight=nan"),
    "no such option": ("qa", {"answer": "D"}, "field", "answer='D' matches none of the 2 options"),
    "an empty question": ("qa", {"question": "  "}, "field", "question='  '"),
    "an unknown type": ("qa", {"answer_type": "chioce"}, "field", "Did you mean 'choice'"),
    "beyond the clip": ("video", {"spans": [[1.0, 9.0]]}, "field", "beyond the clip of 2 seconds"),
    "beyond the file": ("video", {"spans": [[1.0, 9.0]], "duration": None}, "size", "beyond the clip of 2 seconds"),
    "end before start": ("video", {"spans": [[1.5, 0.5]]}, "field", "end after its start"),
    "a wrong duration": ("video", {"duration": 93.0}, "size", "duration is 93 seconds, but a.mp4 lasts 2"),
    "a cut the wrong way": ("video", {"video_start": 1.5, "video_end": 0.5}, "field", "before video_end"),
    "three responses": ("preference", {"responses": ["a", "b", "c"]}, "field", "must be two non-empty strings"),
    "the third response": ("preference", {"answer": 3}, "field", "1 or 2"),
    "an unknown plan": ("driving", {"plan": {"speed": "KEEP", "path": "LEFT_TRUN"}}, "field", "mean 'LEFT_TURN'"),
    "time runs back": ("driving", {"trajectory": [[1, 0, 1.0], [2, 0, 0.5]]}, "field", "t must rise"),
    "a plan of no image": ("driving", {"images": None, "trajectory": None}, "field", "add the field 'image'"),
    "a class of no image": ("classification", {"image": None}, "field", "label='cat' refers to media"),
    "spans of no video": ("video", {"video": None}, "field", "add the field 'video'"),
    "a label of none": ("classification", {"label": "dgo"}, "field", "Did you mean 'dog'")}


@pytest.fixture(scope="module")
def media(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("media")
    for n, name in enumerate(("a.png", "b.png", "train.png", "new.png")):
        Image.new("RGB", (64, 32), (50 * n, 9, 9)).save(folder / name)
    (folder / "text.png").write_text("no picture")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 64, 3), np.uint8)
    Image.fromarray(pixels).save(folder / "half.png")
    (folder / "half.png").write_bytes((folder / "half.png").read_bytes()[:3000])
    (folder / "bomb.png").write_bytes(bomb())
    make_video(folder / "a.mp4")
    (folder / "empty.mp4").touch()
    sound_only(folder / "sound.mp4")
    return folder


def test_every_planted_defect_is_found_and_nothing_else(media, tmp_path, capsys):
    folder = tmp_path / "data"
    folder.mkdir()
    for file in media.iterdir():
        (folder / file.name).hardlink_to(file)
    rows: dict[str, list[dict]] = {family: [dict(row)] for family, row in SOUND.items()}
    for name, (family, changes, *_) in DEFECTS.items():
        row = {**SOUND[family], "id": name, **changes}
        rows[family].append({k: v for k, v in row.items() if v is not None})
    rows["qa"].append({**SOUND["qa"], "question": "again?"})  # an id that is there already
    for family, found in rows.items():
        save(folder / f"{family}.jsonl", found)
    plain = {"image": "train.png", "expression": "x", "boxes": []}
    save(folder / "train.jsonl", [{"id": 1, **plain, "group_key": "scene 1"}])
    save(folder / "heldout.jsonl", [{"id": 1, **plain}, {"id": 2, **plain, "image": "new.png", "group_key": "scene 1"}])
    (folder / "broken.json").write_text("{")
    wanted = {**{name: (kind, words) for name, (_, _, kind, words) in DEFECTS.items()},
              "q": ("id", "is already used in"), "1": ("leak", "is in train too"), "2": ("leak", "group_key='scene 1'"),
              "": ("file", "not JSON")}
    wanted[" "] = wanted.pop("no id")  # beside the broken file, the other one without an id
    assert main(["data", "check", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    problems = {p["id"] or (" " if p["kind"] == "row" else ""): p for p in found["problems"]}
    assert len(found["problems"]) == len(problems) == len(wanted) == found["bad"] == 33
    for name, (kind, words) in wanted.items():
        assert problems[name]["kind"] == kind and words in problems[name]["reason"], (name, problems[name])


def test_sound_rows_and_files_of_a_folder(media, tmp_path):
    file = save(media / "sound.jsonl", list(SOUND.values()))
    found = check([file], None, LimitsSettings())
    assert (found.rows, found.bad, found.media["videos"]) == (len(SOUND), 0, 1), found.problems
    for name in ("b/x.jsonl", "a.csv", "img/metadata.jsonl", "dataset_info.json", "note.txt", "cat/1.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert files_of(tmp_path) == [tmp_path / "a.csv", tmp_path / "b" / "x.jsonl"]
    assert files_of(tmp_path / "img") == [tmp_path / "img"] and files_of(tmp_path / "a.csv") == [tmp_path / "a.csv"]


def test_several_files_with_settings_between_them(media, capsys):
    row = {**SOUND["classification"], "image": "train.png"}
    files = [save(media / name, [row]) for name in ("a.jsonl", "val.jsonl")]
    words = ["data", "check", str(files[0]), "limits.image_pixels=100", str(files[1]), "--config", "configs/tiny.yaml"]
    assert main([*words, "task.name=classification"]) == 1
    assert "more than limits.image_pixels=100" in capsys.readouterr().out
    files[0].rename(media / "train.jsonl")
    assert main(["data", "check", str(media / "train.jsonl"), str(files[1]), "--no-media"]) == 1  # by path
    out = capsys.readouterr().out
    assert "val.jsonl:1: c: leak: what it asks is in train too" in out and "2 rows, 1 images; 1 bad rows" in out


def test_leaks_go_by_split_of_the_row_before_the_name_of_the_file():
    rows = [("train", "t:1", {"group_key": 1}, ["x"]), ("heldout", "h:1", {"group_key": "1"}, []),
            ("heldout", "h:2", {}, ["y", "x"]), ("heldout", "h:3", {}, ["y"]), (None, "n", {"group_key": 1}, ["x"])]
    rows = [CheckedRow(where=where, row=row, side=side, files=[MediaFile(name=name, path=name) for name in names])
            for side, where, row, names in rows]
    assert {n: message.partition(" in t")[0] for n, message in leaks(rows, Context())} == {
        1: "group_key='1' is", 2: "its image or video is"}


TRACK = {"width": 64, "height": 32, "answer_type": "track",
         "tracks": [{"boxes": [[1, 2, 3, 4], None], "times": [0, 1]}]}


@each("row words", [
    (TRACK, None), ({**TRACK, "tracks": []}, "tracks=[]"),
    ({**TRACK, "tracks": [{"boxes": [None]}]}, "needs a box in at least one of them"),
    ({**TRACK, "tracks": [{"boxes": [[1, 2, 300, 4]]}]}, "extends beyond the image"),
    ({**TRACK, "tracks": [{"boxes": [[1, 2, 3, 4]] * 2, "times": [1, 1]}]}, "ascending times in seconds"),
    ({"answer_type": "span", "spans": [[13.0, 19.0]], "duration": 17.58}, None),  # as published annotations are
    ({"answer_type": "span"}, "needs the field 'spans'"), ({"answer_type": "number", "answer": "five"}, "be a number"),
    ({"answer_type": "number", "answer": "1,200"}, None), ({"options": ["a"]}, "at least two"),
    ({"options": ["(A) a", "(B) b"], "answer": "(B)", "answer_type": "choice"}, None),
    ({"label": ["a", "b"], "labels": ["a", "b"], "multi": True}, None), ({"label": []}, "label=[]"),
    ({"plan": "KEEP"}, "plan='KEEP'"), ({"plan": {"speed": "KEEP"}}, "plan.path=None"), ({"fps": -1}, "fps=-1"),
    ({"plan": {"speed": [], "path": "STRAIGHT"}}, "plan.speed=[]"), ({"question": None}, None),
    ({"boxes": [[60, 70, 10, 20]]}, "boxes=[[60, 70, 10, 20]] must be a list of"), ({"boxes": {"box": [1]}}, "boxes={"),
    ({"boxes": [{"box": ["1", 2, 3, 4]}]}, "boxes=[{"), ({"boxes": []}, None), ({"boxes": None}, None),
    ({"box": [1, 2, 3]}, "box=[1, 2, 3] must be"), ({"box": [1, 2, 3, 4]}, None),
    ({"label": "cat", "labels": "cat"}, "labels='cat' must be a list"), ({"labels": ["a", 1]}, None),
    ({"answer_type": "regression", "answer": "n/a"}, "as answer_type=regression says"),
    ({"answer_type": "count", "answer": 3}, None)])
def test_fields_by_hand(row, words):
    found = list(field_problems(row))
    assert [words in problem for problem in found] == [True] if words else found == []


@each("name recipe row", [
    ("video", "time_r1", {"video": "a.mp4", "question": "When?", "answer_type": "span", "duration": 40.1,
                          "spans": [[13.333333333333334, 24.777777777]]}),
    ("video", "onethinker", {"video": "a.mp4", "question": "When?", "answer_type": "span", "spans": [[1 / 3, 2.5]]}),
    ("driving", "trajectory", {"image": "a.png", "trajectory": [[3.14159265, 0.1234567, 0.5], [6.28, 1 / 3, 1.0]]})])
def test_labels_of_many_decimals_are_no_problem(tmp_path, name, recipe, row):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"id": "1", "width": 90, "height": 60, **row}))
    task = load(name, {"recipe": recipe})
    assert check(tmp_path / "rows.jsonl", task, LimitsSettings(), allow_missing=True).problems == ()
