"""Files of rows -> samples; bad rows; answers to learn from (data.solutions)."""

import json
import logging

import pytest
from PIL import Image

from tests.data.sets import read, save
from tests.tables import each, refused
from vlrl.config.schema import DataSettings
from vlrl.data import Drawn, read_rows, sample_from_row, write_rows
from vlrl.data.sources.solutions import SolvedSamples, read_solutions
from vlrl.errors import ConfigError, DataError, RunError, TaskError
from vlrl.rollout import fingerprint
from vlrl.task import Task, task_samples
from vlrl.tools.stages import rounds
from vlrl.types import Sample


class Plain(Task):
    name = "plain"


def task(**settings) -> Task:
    found = Plain()
    found.data = DataSettings(**settings)
    return found


@pytest.fixture
def folder(tmp_path):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (4, 4)).save(tmp_path / name)
    return tmp_path


def test_files_of_rows(tmp_path):
    rows = [{"id": "1", "label": "ü"}, {"id": "2"}]
    assert read_rows(save(tmp_path / "a.jsonl", [rows[0], "", rows[1], ""])) == rows
    assert read_rows(save(tmp_path / "a.json", rows)) == rows
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

    class Own(Task):
        def sample_from_row(self, row, root=None):
            return Sample(id=row["id"], row=row)
    (sample,) = read(save(folder / "rows.jsonl", [{"id": "1", "weight": None}]), "auto", task=Own())
    assert sample.weight == 1.0
    with pytest.raises(DataError, match=r"rows\.jsonl:1: row '1': weight=inf"):
        read(save(folder / "rows.jsonl", ['{"id": "1", "weight": Infinity}']), "auto", task=Own())
    drawn = Drawn(3, lambda i: Sample(id=str(i)))
    assert [s.id for s in drawn] == ["0", "1", "2"] and drawn[-1].id == "2" and [s.id for s in drawn[1:]] == ["1", "2"]
    with pytest.raises(IndexError):
        drawn[3]
    with pytest.raises(TaskError, match=r"sample 0 cannot be generated: .*test_dataset.py:\d+: IndexError"):
        list(Drawn(3, lambda i: [][i]))


def test_read_samples(folder):
    path = save(folder / "rows.jsonl", [{"id": "1", "image": "a.png"}, {"id": "2", "image": "b.png"}])
    samples = task(train=str(path)).samples("train")
    assert [s.id for s in samples] == ["1", "2"] and len(samples) == 2 and samples[-1].id == "2"
    assert samples[0].media[0].source == folder / "a.png"
    (folder / "sub").mkdir()
    path = save(folder / "sub" / "rows.jsonl", [{"id": "1", "image": "a.png"}])
    assert task(heldout=str(path), root=str(folder)).samples("heldout")[0].media[0].source == folder / "a.png"
    native = {"img_filename": "a.png", "bbox": [1, 1, 2, 2], "instruction": "close", "data_type": "icon"}
    found = read(save(folder / "rows.json", [native, {**native, "bbox": [1, 1, 20, 20]}]), "auto", quarantine=True)
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
    path = save(folder / "rows.jsonl", [{"id": "1"}])
    with pytest.raises(ConfigError, match=r"data\.format='coco_'"):
        task(train=str(path), format="coco_").samples("train")
    with pytest.raises(ConfigError, match="does not exist"):
        task(train="x" * 5000 + ".jsonl").samples("train")


BAD = ["{broken", {"image": "a.png"}, {"id": "1"}, {"id": "3", "image": "none.png"}, {"id": "4", "image": "../x.png"},
       {"id": "5", "image": "a" * 5000}, {"id": "6", "image": "a\0.png"}, '{"id": "7", "weight": 1e999}',
       {"id": "8", "processed_size": [0, 0]}, '{"id": "\\ud800"}', {"id": "9", "coordinates": "pixels"},
       '{"id": "10", "weight": 1%s}' % ("0" * 400), '{"id": "11", "weight": 1%s}' % ("0" * 5000)]


def test_bad_rows_are_left_out_and_listed(folder, caplog):
    for bad in BAD:  # or the first one stops
        with pytest.raises(DataError, match=r"rows\.jsonl:2: .*data\.quarantine=true"):
            read(save(folder / "rows.jsonl", [{"id": "1"}, bad]), "auto")
    path = save(folder / "rows.jsonl", [{"id": "1"}, *BAD, {"id": "2"}])
    with caplog.at_level(logging.WARNING):
        samples = read(path, "auto", quarantine=True)
    assert [s.id for s in samples] == ["1", "2"]
    assert [b.where.rpartition(":")[2] for b in samples.quarantined] == [str(2 + i) for i in range(len(BAD))]
    assert f"left out {len(BAD)} of {len(BAD) + 2} rows" in caplog.text and "ids must be unique" in caplog.text
    assert all(len(b.reason) < 500 for b in samples.quarantined)
    with pytest.raises(DataError, match="no usable row"):
        read(save(path, BAD[:2]), "auto", quarantine=True)
    sized = {"width": 100, "height": 50}
    rows = [{"id": "1", **sized, "boxes": [{"box": [0, 0, 100.9, 50]}]}, {"id": "2", **sized, "box": [5, 0, 5, 9]},
            {"id": "3", **sized, "boxes": [{"box": [0, 0, 102, 50]}]}, {"id": "4", **sized, "points": [[3, -4]]},
            {"id": "5", **sized, "action": {"type": "click", "point": [300, 4]}}, {"id": "6", "box": [0, 0, 999, 9]}]
    samples = read(save(path, rows), "auto", quarantine=True)
    assert [s.id for s in samples] == ["1", "6"] and [b.reason.split(": ", 1)[1] for b in samples.quarantined] == [
        "box [5, 0, 5, 9] must be [x1, y1, x2, y2] with x1 < x2 and y1 < y2. If it is [x, y, width, height], set "
        "data.boxes=xywh",
        "box [0, 0, 102, 50] extends beyond the image of 100x50 pixels. If coordinates run from 0 to 1000, set "
        "data.boxes=norm1000",
        "point [3, -4] lies outside the image of 100x50 pixels",
        "point [300, 4] lies outside the image of 100x50 pixels"]


def test_tasks_of_ones_own_that_fail_name_the_row(folder):
    class Strict(Task):
        def sample_from_row(self, row, root=None):
            return Sample(id=row["key"])

    class Nothing(Plain):
        def sample_from_row(self, row, root=None):
            if row["id"] == "1":
                raise RuntimeError("no")
    path = save(folder / "rows.jsonl", [{"id": "1"}, {"id": "2"}])
    with pytest.raises(DataError, match=r"rows\.jsonl:1: row '1': KeyError: 'key'"):
        read(path, "auto", task=Strict())
    with pytest.raises(TaskError, match="task 'plain': sample_from_row returned NoneType, expected a Sample"):
        read(path, "auto", task=Nothing(), quarantine=True)


@each("index", ["memory", "lazy"])
def test_columns_of_other_names(tmp_path, index):
    Image.new("RGB", (8, 6)).save(tmp_path / "a.png")
    rows = [{"riddle": f"Which {i}?", "truth": str(i), "shot": "a.png", "n": i} for i in range(3)]
    file = save(tmp_path / "rows.jsonl", rows)
    found = read(file, index, columns={"question": "riddle", "answer": "truth", "images": "shot"})
    assert [(s["question"], s["answer"], len(s.media), s["n"]) for s in found] == [
        (f"Which {i}?", str(i), 1, i) for i in range(3)]
    with pytest.raises(DataError, match=r"has a column 'trut', which .*Did you mean 'truth'.*riddle, truth"):
        read(file, index, columns={"answer": "trut"})


class Letters(Task):
    """Rows a, b, c; the second weighs 2."""

    def samples(self, split):
        return [Sample(id=x, row={"id": x, "question": x, **({"weight": 2.0} if x == "b" else {})}) for x in "abc"]


LINES = [{"number": 1, "id": "b", "solution": "two", "weight": 0.25, "reward": 0.5},
         {"number": 1, "id": "b", "solution": "zwei"}, {"number": 0, "id": "a", "solution": "one"}]


def solved(path, lines):
    found = Letters()
    found.data = DataSettings(solutions=str(save(path, lines)))
    return found


def test_solutions_go_with_their_rows_or_fit_none(tmp_path):
    samples = task_samples(solved(tmp_path / "rows.jsonl", LINES), "train")
    assert [(s.id, s.get("solution"), s.weight) for s in samples] == [("b", "two", 0.5), ("b#2", "zwei", 2.0),
                                                                      ("a", "one", 1.0)]
    assert samples[0].get("question") == "b" and "reward" not in samples[0].row
    assert [s.id for s in task_samples(solved(tmp_path / "rows.jsonl", LINES), "heldout")] == ["a", "b", "c"]
    lines = [{**LINES[0], "rejected": "much longer"}, LINES[2]]
    assert [s.get("rejected") for s in task_samples(solved(tmp_path / "rows.jsonl", lines), "train")] == [
        "much longer", None]
    other = [{**LINES[0], "solution": "deux"}, *LINES[1:]]
    first, second = (fingerprint.fingerprint_of(task_samples(solved(tmp_path / name, lines), "train"))
                     for name, lines in (("1.jsonl", LINES), ("2.jsonl", other)))
    with pytest.raises(RunError, match=r"1 rows changed, 'b' \(row 1\)"):
        second.check(first.state_dict(), "task 'letters'")
    assert (tmp_path / "1.jsonl") in first.files
    with pytest.raises(ConfigError, match="does not exist"):
        read_solutions(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="contains no solution"):
        read_solutions(str(tmp_path / "empty.jsonl"))
    for line, found in (({**LINES[0], "id": "x"}, "row 1 is 'b'"), ({**LINES[0], "number": 9}, "there are 3 rows")):
        save(tmp_path / "rows.jsonl", [line])
        samples = SolvedSamples(Letters().samples("train"), read_solutions(str(tmp_path / "rows.jsonl")), "rows.jsonl")
        with pytest.raises(DataError, match=f"matches no training row .{found}"):
            samples[0]


@each("line", [
    {"number": 0, "id": "a"}, {"number": -1, "id": "a", "solution": "x"}, {"number": True, "id": "a", "solution": "x"},
    {"number": 0, "id": 1, "solution": "x"}, {"number": 0, "id": "a", "solution": ""}, [1],
    {"number": 0, "id": "a", "solution": "x", "weight": 0}, {"number": 0, "id": "a", "solution": "x", "rejected": 3}])
def test_a_line_that_is_none(tmp_path, line):
    save(tmp_path / "rows.jsonl", [LINES[0], line])
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: .* is not a line of data\.solutions\. A line needs"):
        read_solutions(str(tmp_path / "rows.jsonl"))


def test_answers_hold_any_text_and_other_bytes_are_named(tmp_path):
    """What Python takes for the end of a line of text is none in JSON."""
    path, texts = tmp_path / "rows.jsonl", ["a\u2028b", "c\x85d\x0ce", "f\r\ng"]
    write_rows(path, [{"number": 0, "id": "a", "solution": text} for text in texts])
    assert [one.text for one in read_solutions(str(path))] == texts == [row["solution"] for row in rounds._lines(path)]
    path.write_bytes(b'{"number": 0, "id": "a", "solution": "x"}\n\xff\xfe')
    with pytest.raises(DataError, match=r"line 2: .* is not a line of data\.solutions"):
        read_solutions(str(path))
