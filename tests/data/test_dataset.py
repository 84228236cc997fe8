import json
import logging

import pytest
from PIL import Image

from tests.tables import each, refused
from vlrl.config.schema import DataSettings
from vlrl.data import Drawn, read_rows, read_samples, sample_from_row
from vlrl.errors import ConfigError, DataError, TaskError
from vlrl.task import Task
from vlrl.types import Sample


class Plain(Task):
    name = "plain"


def task(**settings) -> Task:
    found = Plain()
    found.data = DataSettings(**settings)
    return found


def write(path, rows):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in rows), encoding="utf-8")
    return path


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return tmp_path


def test_files_of_rows(tmp_path):
    rows = [{"id": "1", "label": "ü"}, {"id": "2"}]
    assert read_rows(write(tmp_path / "a.jsonl", [rows[0], "", rows[1], ""])) == rows
    assert read_rows(write(tmp_path / "a.json", [json.dumps(rows)])) == rows
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"id": "1", "t": "a\xe2\x80\xa8b"}\r\n')
    assert read_rows(tmp_path / "bom.jsonl") == [{"id": "1", "t": "a\u2028b"}]
    with pytest.raises(DataError, match=r"none\.jsonl cannot be read"):
        read_rows(tmp_path / "none.jsonl")
    (tmp_path / "a.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read"):
        read_rows(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"data\.format='coco_'"):
        read_rows(tmp_path / "a.jsonl", "coco_")


def test_sample_from_row(folder):
    sample = sample_from_row({"id": 7, "image": "a.png", "images": ["b.png"], "video": "c.mp4", "video_start": 1.5,
                              "difficulty": 0.25, "weight": 2, "shape": "round", "meta": {"x": 1}}, folder)
    assert sample.id == "7" and sample.row["id"] == "7"
    assert [(m.kind, m.source, m.start) for m in sample.media] == [
        ("image", folder / "a.png", None), ("image", folder / "b.png", None), ("video", folder / "c.mp4", 1.5)]
    assert sample.difficulty == 0.25 and sample.weight == 2
    assert sample["shape"] == "round" and sample["meta"] == {"shape": "round", "x": 1}
    assert json.loads(json.dumps(sample.row)) == sample.row
    assert "meta" not in sample_from_row({"id": "1"}, folder).row


test_bad_files_name_the_line = refused(
    DataError, lambda name, lines, tmp_path: read_rows(write(tmp_path / name, lines)), [
    ("a.jsonl", ['{"id": 1}', "{broken"], r"a\.jsonl:2: not JSON"),
    ("a.jsonl", ['{"id": 1}', "", "[1]"], r"a\.jsonl:3: a row must be a JSON object, not a list"),
    ("a.json", ['{"id": 1}'], r"a\.json must hold a list of rows, not a dict"),
    ("a.json", ["[" * 100_000], r"a\.json: not JSON"),
    ("a.json", ['[{"id": 1}, 2]'], r"a\.json, row 2: a row must be a JSON object"),
    ("a.txt", ["id"], r"\.jsonl .* \.json")])
test_a_bad_row_is_named = refused(DataError, lambda row, folder: sample_from_row(row, folder), [
    ({}, "id=None"), ({"id": ""}, "id=''"), ({"id": True}, "id=True"), ({"id": ["x"]}, "id="),
    ({"id": "r", "image": "http://x/a.png"}, "row 'r'.*URL"),
    ({"id": "r", "image": "../a.png"}, "row 'r'.*lies outside"), ({"id": "r", "images": [3]}, "row 'r'.*media path 3"),
    ({"id": "r", "difficulty": 50}, "row 'r': difficulty=50 must be a number from 0 to 1"),
    ({"id": "r", "difficulty": "hard"}, "row 'r': difficulty='hard'"),
    ({"id": "r", "weight": -1}, "row 'r': weight=-1"), ({"id": "r", "weight": float("nan")}, "row 'r': weight=nan"),
    ({"id": "r", "weight": float("inf")}, "row 'r': weight=inf must be a finite number of at least 0"),
    ({"id": "r", "weight": 10**400}, r"row 'r': weight=10{199}\.\.\. must be a finite number"),
    ({"id": "r", "weight": True}, "row 'r': weight=True"), ({"id": "r", "width": float("inf")}, "row 'r': width=inf"),
    ({"id": "r", "video_start": "soon"}, "row 'r': video_start='soon'"),
    ({"id": "r", "video_end": float("nan")}, "row 'r': video_end=nan"),
    ({"id": "r", "coordinates": "norm100"}, "row 'r': coordinates='norm100' is not a coordinate.*'norm1000'"),
    ({"id": "r", "coordinates": ["x"]}, "row 'r': coordinates="),
    ({"id": "r", "processed_size": [0, 0]}, r"row 'r': processed_size=\[0, 0\] must be \[w, h\]"),
    ({"id": "r", "processed_size": [10**400, 1]}, "row 'r': processed_size="),
    ({"id": "r", "processed_size": 64}, "row 'r': processed_size=64"),
    ({"id": "\ud800"}, r"row '\\ud800': 'id' holds text that is not Unicode: '\\ud800'"),
    ({"id": "r", "meta": {"note": ["a\udfff"]}}, "row 'r': 'meta' holds text that is not Unicode"),
    ({"id": "r", "\ud800": 1}, "row 'r': .*not Unicode")])


def test_weights_of_null_and_drawn_samples(folder):
    assert sample_from_row({"id": "1", "weight": None}).weight == 1.0 and sample_from_row({"id": "1"}).weight == 1.0
    assert "weight" not in sample_from_row({"id": "1"}).row

    class Own(Plain):
        def sample_from_row(self, row, root=None):
            return Sample(id=row["id"], row=row)
    own = Own()
    own.data = DataSettings(train=str(write(folder / "rows.jsonl", [{"id": "1", "weight": None}])))
    assert read_samples(own, "train")[0].weight == 1.0
    write(folder / "rows.jsonl", ['{"id": "1", "weight": Infinity}'])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: row '1': weight=inf"):
        read_samples(own, "train")
    drawn = Drawn(3, lambda i: Sample(id=str(i)))
    assert [s.id for s in drawn] == ["0", "1", "2"] and drawn[-1].id == "2" and [s.id for s in drawn[1:]] == ["1", "2"]
    with pytest.raises(IndexError):
        drawn[3]
    with pytest.raises(TaskError, match=r"sample 0 cannot be generated: .*test_dataset.py:\d+: IndexError"):
        list(Drawn(3, lambda i: [][i]))


def test_read_samples(folder):
    path = write(folder / "rows.jsonl", [{"id": "1", "image": "a.png"}, {"id": "2", "image": "b.png"}])
    samples = task(train=str(path)).samples("train")
    assert [s.id for s in samples] == ["1", "2"] and len(samples) == 2 and samples[-1].id == "2"
    assert samples[0].media[0].source == folder / "a.png"
    (folder / "sub").mkdir()
    path = write(folder / "sub" / "rows.jsonl", [{"id": "1", "image": "a.png"}])
    assert task(heldout=str(path), root=str(folder)).samples("heldout")[0].media[0].source == folder / "a.png"
    native = {"img_filename": "a.png", "bbox": [1, 1, 2, 2], "instruction": "close", "data_type": "icon"}
    write(folder / "rows.json", [json.dumps([native, {**native, "bbox": [1, 1, 20, 20]}])])
    found = read_samples(task(train=str(folder / "rows.json"), quarantine=True), "train")
    assert [(s.id, s["box"], s["width"]) for s in found] == [("rows-1", [1, 1, 3, 3], 4)]
    assert "extends beyond the image of 4x4 pixels" in found.quarantined[0].reason


def test_settings_that_are_missing(folder):
    with pytest.raises(ConfigError, match=r"data\.train is not set: task 'plain'"):
        task().samples("train")
    with pytest.raises(ConfigError, match=r"data\.train is not set"):
        Plain().samples("train")
    with pytest.raises(ConfigError, match=r"data\.heldout='none.jsonl': this file does not exist"):
        task(heldout="none.jsonl").samples("heldout")
    with pytest.raises(ConfigError, match="train and heldout"):
        task().samples("valid")
    path = write(folder / "rows.jsonl", [{"id": "1"}])
    with pytest.raises(ConfigError, match=r"data\.format='coco_'"):
        task(train=str(path), format="coco_").samples("train")
    with pytest.raises(ConfigError, match="does not exist"):
        task(train="x" * 5000 + ".jsonl").samples("train")


BAD = ["{broken", {"image": "a.png"}, {"id": "1"}, {"id": "3", "image": "none.png"}, {"id": "4", "image": "../x.png"},
       {"id": "5", "image": "a" * 5000}, {"id": "6", "image": "a\0.png"}, '{"id": "7", "weight": 1e999}',
       {"id": "8", "processed_size": [0, 0]}, '{"id": "\\ud800"}', {"id": "9", "coordinates": "pixels"},
       '{"id": "10", "weight": 1%s}' % ("0" * 400), '{"id": "11", "weight": 1%s}' % ("0" * 5000)]


@pytest.mark.parametrize("bad", BAD, ids=lambda b: ascii(b)[:30])
def test_the_first_bad_row_stops(folder, bad):
    path = write(folder / "rows.jsonl", [{"id": "1"}, bad])
    with pytest.raises(DataError, match=r"rows\.jsonl:2: .*data\.quarantine=true"):
        read_samples(task(train=str(path)), "train")


def test_bad_rows_are_left_out_and_listed(folder, caplog):
    path = write(folder / "rows.jsonl", [{"id": "1"}, *BAD, {"id": "2"}])
    with caplog.at_level(logging.WARNING):
        samples = read_samples(task(train=str(path), quarantine=True), "train")
    assert [s.id for s in samples] == ["1", "2"]
    assert [b.where.rpartition(":")[2] for b in samples.quarantined] == [str(2 + i) for i in range(len(BAD))]
    assert f"left out {len(BAD)} of {len(BAD) + 2} rows" in caplog.text and "ids must be unique" in caplog.text
    assert all(len(b.reason) < 500 for b in samples.quarantined)
    with pytest.raises(DataError, match="no usable row"):
        read_samples(task(train=str(write(path, BAD[:2])), quarantine=True), "train")
    sized = {"width": 100, "height": 50}
    rows = [{"id": "1", **sized, "boxes": [{"box": [0, 0, 100.9, 50]}]}, {"id": "2", **sized, "box": [5, 0, 5, 9]},
            {"id": "3", **sized, "boxes": [{"box": [0, 0, 102, 50]}]}, {"id": "4", **sized, "points": [[3, -4]]},
            {"id": "5", **sized, "action": {"type": "click", "point": [300, 4]}}, {"id": "6", "box": [0, 0, 999, 9]}]
    samples = read_samples(task(train=str(write(folder / "rows.jsonl", rows)), quarantine=True), "train")
    assert [s.id for s in samples] == ["1", "6"] and [b.reason.split(": ", 1)[1] for b in samples.quarantined] == [
        "box [5, 0, 5, 9] must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2",
        "box [0, 0, 102, 50] extends beyond the image of 100x50 pixels",
        "point [3, -4] lies outside the image of 100x50 pixels",
        "point [300, 4] lies outside the image of 100x50 pixels"]


def test_tasks_of_ones_own_that_fail_name_the_row(folder):
    class Strict(Plain):
        def sample_from_row(self, row, root=None):
            return Sample(id=row["key"])
    strict = Strict()
    strict.data = DataSettings(train=str(write(folder / "rows.jsonl", [{"id": "1"}])))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: row '1': KeyError: 'key'"):
        read_samples(strict, "train")
    class Lazy(Plain):
        def sample_from_row(self, row, root=None):
            if row["id"] == "1":
                raise RuntimeError("no")
    lazy = Lazy()
    lazy.data = DataSettings(train=str(write(folder / "rows.jsonl", [{"id": "1"}, {"id": "2"}])), quarantine=True)
    with pytest.raises(TaskError, match="task 'plain': sample_from_row returned NoneType, expected a Sample"):
        read_samples(lazy, "train")


@each("index", ["memory", "lazy"])
def test_columns_of_other_names(tmp_path, index):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    rows = [{"riddle": f"Which {i}?", "truth": str(i), "shot": "a.png", "n": i} for i in range(3)]
    file = write(tmp_path / "rows.jsonl", rows)
    columns = {"question": "riddle", "answer": "truth", "images": "shot"}
    found = read_samples(task(train=str(file), columns=columns, index=index, cache=str(tmp_path / "c")), "train")
    assert [(s["question"], s["answer"], len(s.media), s["n"]) for s in found] == [
        (f"Which {i}?", str(i), 1, i) for i in range(3)]
    with pytest.raises(DataError, match=r"has a column 'trut', which .*Did you mean 'truth'.*riddle, truth"):
        read_samples(task(train=str(file), columns={"answer": "trut"}, index=index, cache=str(tmp_path / "c")), "train")
