"""Files and folders -> records: JSON, tables, parquet, classes of images; what is hostile or broken is refused."""

import base64
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.sets import encoded, read, save
from tests.data.test_formats import BASE, CASES, make_video, one
from tests.tables import each, refused
from vlrl.cli.main import main
from vlrl.data import read_rows, sample_from_row
from vlrl.data.sources import json_rows
from vlrl.data.sources.fields import RecordSource
from vlrl.data.sources.reading import canonical_rows, rows_in
from vlrl.errors import DataError
from vlrl.tools.datasets.convert import convert


def test_pictures_of_rows_become_files(tmp_path):
    Image.new("RGB", (9, 8)).save(tmp_path / "a.png")
    text = base64.b64encode((tmp_path / "a.png").read_bytes()).decode()
    table = save(tmp_path / "m.tsv", f"index\timage\tquestion\tA\tB\tanswer\n1\t{text}\tWhich?\tx\ty\tB\n")
    line = save(tmp_path / "m.jsonl", json.dumps({
        "image": f"data:image/png;base64,{text}", "question": "Which?", "answer": "x"}))
    for file in (table, line):
        assert main(["data", "convert", str(file), "-o", str(tmp_path / f"{file.suffix[1:]}_rows.jsonl")]) == 0
        (row,) = read_rows(tmp_path / f"{file.suffix[1:]}_rows.jsonl")
        with Image.open(tmp_path / row["image"]) as image:
            assert image.size == (9, 8)
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    rows = [{"image": {"bytes": (tmp_path / "a.png").read_bytes()}, "instruction": "x", "abs_box": [1, 2, 3, 4]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "root").mkdir()
    with pytest.raises(DataError, match="omit --root"):
        convert(tmp_path / "t.parquet", tmp_path / "o.jsonl", root=tmp_path / "root")


def test_files_of_coco_screenspot_and_label_studio(tmp_path):
    images = [{"id": n, "file_name": "a.png", "width": 9, "height": 9} for n in (7, 8, 7)] + [{"file_name": "c.png"}]
    file = save(tmp_path / "instances.json", {
        "info": {}, "categories": [{"id": 1, "name": "cat"}], "images": images, "annotations": [
            {"id": 1, "image_id": 7, "category_id": 1, "bbox": [0, 0, 5, 5]}, {"id": 2, "image_id": 99, "bbox": []},
            {"id": 3, "image_id": 8, "category_id": 4, "bbox": [0, 0, 5, 5]}]})
    found = rows_in(file)
    assert [(where.removeprefix(str(file)), isinstance(row, DataError)) for where, row in found] == [
        (", image 7", False), (", image 8", True), (", image 7", False), (", image number 4", True),
        (", annotation 2", True)]
    assert found[0][1]["boxes"] == [{"box": [0, 0, 5, 5], "label": "cat"}]
    assert "category_id=4" in str(found[1][1]) and "image_id=99 of 1 annotations" in str(found[4][1])
    names = [{"id": i, "name": f"c{i}"} for i in range(101)]
    image = {"id": 1, "file_name": "a.png", "neg_category_ids": [5]}
    row = one({"images": [image], "annotations": [{"image_id": 1, "category_id": 3, "bbox": [1, 1, 2, 2]}],
               "categories": names})
    assert row["labels"] == ["c3", "c5"]
    def boxes(*given, size=(200, 100)):
        sized = {"image_size": list(size)} if size else {}
        file = save(tmp_path / "spot.json", [{"img_filename": f"{n}.png", "instruction": "x", "data_type": "icon",
                                              "bbox": b, **sized} for n, b in enumerate(given)])
        return [row["box"] for _, row in rows_in(file)]
    assert boxes([10, 20, 30, 40]) == [[10, 20, 40, 60]]  # both are possible: sides, as in the paper's data
    assert boxes([150, 20, 190, 40]) == [[150, 20, 190, 40]]  # as sides it would reach out of the image
    assert boxes([150, 20, 190, 40], [150, 20, 40, 20])[1] == [150, 20, 190, 40]  # the second can only be sides
    assert boxes(*[[i, 2, 30, 40] for i in range(1, 6)], size=None) == [[i, 2, 30, 40] for i in range(1, 6)]
    assert boxes(*[[i, 2, 30, 40] for i in range(1, 5)], size=None)[0] == [1, 2, 31, 42]
    assert boxes(*[[0.1, 0.1, 0.8, 0.9]] * 9)[0] == [20, 10, 160, 90]
    def task(id, *labels):
        return {"id": id, "data": {"image": f"{id}.png"}, "annotations": [{"result": [
            {"type": "rectanglelabels", "original_width": 10, "original_height": 10,
             "value": {"x": 0, "y": 0, "width": 50, "height": 50, "rectanglelabels": [label]}} for label in labels]}]}
    rows = rows_in(save(tmp_path / "export.json", [task(1, "mug"), task(2), task(3, "cup", "mug")]))
    assert [row["labels"] for _, row in rows] == [["mug", "cup"]] * 3
    assert [len(row["boxes"]) for _, row in rows] == [1, 0, 2]
    for annotations, words in (  # none of these says that an object is absent
            ([], "has no valid annotation"), ([{"was_cancelled": True, "result": []}], "has no valid annotation"),
            ([{"result": [{"id": "r6", "value": {"rle": [1], "brushlabels": ["fog"]}}]}], "'r6' is a brush mask")):
        with pytest.raises(DataError, match=words):
            one({**task(1), "annotations": annotations, "predictions": [{"result": []}]})


def test_tables_join_the_boxes_of_an_image(tmp_path):
    file = save(tmp_path / "t.csv", "filename,xmin,ymin,xmax,ymax,class,width,height\na.png,1,2,3,4,mug,9,9\n"
                "b.png,1,2,3,4,jug,9,9\na.png,5,6,7,8,cup,9,9\nc.png,,,,,,9,9\n")
    rows = rows_in(file)
    assert [row["image"] for _, row in rows[:2]] == ["a.png", "b.png"] and [w.rpartition(":")[2] for w, _ in rows] == [
        "2", "3", "5"]
    assert rows[0][1] == {"id": "t-2", "image": "a.png", "width": 9, "height": 9, "labels": ["mug", "cup", "jug"],
                          "boxes": [{"box": [1, 2, 3, 4], "label": "mug"}, {"box": [5, 6, 7, 8], "label": "cup"}]}
    bare = save(tmp_path / "bare.csv", "a.png;1;2;3;4;mug\na.png;5;6;7;8;mug\n")
    assert [len(row["boxes"]) for _, row in rows_in(bare)] == [2]
    said = save(tmp_path / "said.tsv", "image\tbox\tcaption\na.png\t[1, 2, 3, 4]\tleft, one\na.png\t[1,2,3,5]\tright\n")
    assert [row["expression"] for _, row in rows_in(said)] == ["left, one", "right"]
    assert [r["id"] for r in read_rows(save(tmp_path / "q.csv", "image,question,answer\na.png,Why?,so\n"))] == ["q-2"]
    (tmp_path / "t.csv").write_text("filename,x,y,w,h,class\na.png,1,2,3,4,x\nb.png,,,,,\n")
    assert [row["boxes"] for _, row in rows_in(tmp_path / "t.csv")] == [[{"box": [1, 2, 4, 6], "label": "x"}], []]
    (tmp_path / "t.csv").write_text("file,xmin,ymin,xmax,ymax\na.png,1,2,3,4\n")
    with pytest.raises(DataError, match=r"has a column 'fil'.*Did you mean 'file'.*There are: 'file, xmin"):
        rows_in(tmp_path / "t.csv", columns={"image": "fil"})
    (tmp_path / "r.jsonl").write_text('{"id": 1, "boxes": [{"box": [1, 2, 3, 4], "box": [5, 6, 7, 8]}]}\n')
    ((_, row),) = rows_in(tmp_path / "r.jsonl")
    assert "the key 'box' occurs twice" in str(row)
    row = one({**BASE, "label": "x", "x": 0.500001, "y": 0.25, "w": 0.5, "h": 0.5})
    assert row["boxes"][0]["box"] == [100, 25, 200, 75]


@each("name content", [
    ("a.json", [CASES["gui-g2"][1]]), ("a.json", {"data": [CASES["gui-g2"][1]], "info": "x"}),
    ("a.json", CASES["gui-g2"][1]), ("a.json", {"r": CASES["gui-g2"][1]}),
    ("a.json", "\n".join([json.dumps(CASES["gui-g2"][1])] * 2)),
    ("a.jsonl", json.dumps([CASES["gui-g2"][1]], indent=1)),
    ("a.ndjson", json.dumps(CASES["gui-g2"][1]))])
def test_shapes_of_json_files(tmp_path, name, content):
    rows = rows_in(save(tmp_path / name, content))
    assert rows and all(row["instruction"] == "Wish List" for _, row in rows)


def test_parquet_and_arrow(tmp_path):
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    record = {**CASES["gui-r1"][1], "image": {"bytes": data, "path": None}, "width": None, "height": None}
    table = pa.Table.from_pylist([record, {**record, "image": {"bytes": b"no image", "path": None}}])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.OSFile(str(tmp_path / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    for name in ("rows.parquet", "rows.arrow"):
        (_, row), (where, broken) = rows_in(tmp_path / name)
        assert row["box"] == [20, 20, 40, 40] and row["image"] == data and where.endswith(", row 2")
        assert isinstance(broken, DataError)  # shares of a picture that says no size
    assert sample_from_row(row).media[0].source.data == data
    out = tmp_path / "new" / "rows.jsonl"
    count, bad = convert(tmp_path / "rows.parquet", out, keep_going=True)
    (row,) = read_rows(out)
    assert (count, len(bad)) == (1, 1) and (out.parent / row["image"]).read_bytes() == data
    assert row["image"].startswith("rows_media/") and row["image"].endswith(".png")
    (tmp_path / "x.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"x\.parquet cannot be read"):
        rows_in(tmp_path / "x.parquet")


@each("line words", {
    "deep": ('{"id": 1, "meta": ' + "[" * 300 + "]" * 300 + "}", "more than 64 deep"),
    "deeper": ('{"id": 1, "meta": ' + "[" * 10**5, "not JSON"),
    "long": ('{"id": "' + "x" * (json_rows.MOST_LINE + 1) + '"}', "characters, more than the 16777216 that one row"),
    "digits": ('{"id": 1, "width": 1' + "0" * 5000 + "}", "not JSON")}.values())
def test_hostile_lines_are_refused_alone(tmp_path, line, words):
    (_, first), (where, row) = rows_in(save(tmp_path / "a.jsonl", f'{{"id": 1}}\n{line}\n'))
    assert first == {"id": 1} and where.endswith(":2") and isinstance(row, DataError) and words in str(row)


TABLE = "filename,xmin,ymin,xmax,ymax"
test_files_that_hold_no_rows = refused(DataError, lambda name, text, tmp_path: read_rows(save(tmp_path / name, text)), [
    ("a.jsonl", ['{"id": 1}', "{broken"], r"a\.jsonl:2: not JSON"),
    ("a.jsonl", ['{"id": 1}', "", "[1]"], r"a\.jsonl:3: a row must be a JSON object, not a list"),
    ("a.json", "[" * 100_000, r"a\.json: not JSON"),
    ("a.json", [{"id": 1}, 2], r"a\.json, row 2: a row must be a JSON object"),
    ("a.txt", "id", r"\.jsonl .* \.json"),
    ("a.json", '{"id": 1}', r"a\.json must hold a list of rows, not a dict"),
    ("a.json", '"x"', "must hold a list of rows, not a str"),
    ("a.csv", "image,label\na.png,b,c\n", r"a\.csv:2: the line has more values"),
    ("a.csv", "1,2,3,4\n", "the first line has no column names"),
    ("a.csv", 'image,label\n"a.png,b\n', r"a\.csv:\d: not CSV"),
    ("a.xml", "<a/>", r"\.csv, \.tsv, \.parquet, \.arrow or \.tar"),
    ("a.csv", f"{TABLE},class,class\na.png,1,2,3,4,x,y\n", "csv:1: the column 'class' occurs twice"),
    ("a.csv", "Photo,XMin\na.png,1\n", "the columns match no known format: 'Photo, XMin'"),
    ("a.csv", "filename;xmin;ymin;xmax;ymax\na.png;1,5;2;3;4\n", "with a decimal point instead of a comma"),
    ("a.csv", f"{TABLE}\na.png,1,2,3\n", r"xmin, ymin, xmax, ymax=\['1', '2', '3', None\] must be 4"),
    ("a.csv", f"filename,{'x' * 200_000}\na.png,1\n", "csv:1: not CSV: field larger than field limit"),
    ("a.csv", f'{TABLE}\na.png,1,2,3,"4\n', "csv:2: not CSV: unexpected end of data")])


def test_refs_of_refcoco_and_shapes_of_lisa():
    ref = {"ref_id": 0, "ann_id": 7, "file_name": "COCO_train2014_000000000007_16.jpg", "sentences": [{"sent": "mug"}]}
    row = one({**ref, "bbox": [10, 20, 30, 40]})
    assert (row["image"], row["boxes"][0]["box"]) == ("COCO_train2014_000000000007.jpg", [10, 20, 40, 60])
    with pytest.raises(DataError, match="ann_id=7 has no bbox"):
        one(ref)
    raw = {"raw_anns": json.dumps({"bbox": [10, 20, 30, 40]}), "raw_image_info": {"width": 200, "height": 100}}
    row = one({**ref, **raw, "bbox": [10, 20, 40, 60]})  # the copy with corners
    assert (row["width"], row["boxes"][0]["box"]) == (200, [10, 20, 40, 60])
    corners = [[0, 0], [50, 0], [50, 50]]
    shapes = [{"label": name, "points": corners} for name in ("flag", "ignore", "Ignore_2")]
    assert one({**BASE, "text": "the mug", "shapes": shapes})["boxes"] == []
    shapes.append({"label": "target", "points": [[1, 2], [3, 4]]})
    assert one({**BASE, "text": "the mug", "shapes": shapes})["boxes"][0]["box"] == [1, 2, 3, 4]
    (row,) = canonical_rows({"episode_id": 7, "goal": "share", "actions": ['{"action_type": "click", "x": 1, "y": 2}']})
    assert row["action"] == {"type": "click", "point": [1, 2]}


def picture(path: Path, size=(20, 10)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(encoded(size=size))
    return path


def test_folders_of_classes_and_metadata(tmp_path):
    for name in ("train/cat/1.png", "train/dog/1.png", "test/cat/2.png", "test/great dane/3.png"):
        picture(tmp_path / "pets" / name)
    rows = [row for _, row in rows_in(tmp_path / "pets")]
    assert rows[0] == {"id": "test/cat/2.png", "image": "pets/test/cat/2.png", "label": "cat", "split": "test",
                       "labels": ["cat", "dog", "great dane"]}
    for split, labels in (("train", ["cat", "dog"]), ("heldout", ["cat", "great dane"])):
        assert [s["label"] for s in read(tmp_path / "pets", "auto", split)] == labels
    assert convert(tmp_path / "pets", tmp_path / "rows.jsonl")[0] == 4
    picture(tmp_path / "m" / "train" / "a.png")
    (tmp_path / "m" / "train" / "metadata.csv").write_text("file_name,label\na.png,cat\nb.png,dog\n")
    (_, row), _ = rows_in(tmp_path / "m")
    assert (row["image"], row["label"], row["split"]) == ("m/train/a.png", "cat", "train")
    data = picture(tmp_path / "b.png").read_bytes()
    features = {"image": {"_type": "Image"}, "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
                "marks": {"feature": {"names": ["x", "y"]}, "_type": "Sequence"}}
    rows = [{"image": {"bytes": data, "path": None}, "label": n, "marks": [n]} for n in (1, 0, 7)]
    table = pa.Table.from_pylist(rows).replace_schema_metadata(
        {"huggingface": json.dumps({"info": {"features": features}})})
    (tmp_path / "h" / "data").mkdir(parents=True)
    pq.write_table(table, tmp_path / "h" / "data" / "validation-00000-of-00001.parquet")
    found = [row for _, row in rows_in(tmp_path / "h")]
    assert [row["label"] for row in found] == ["dog", "cat", "7"] and found[0]["split"] == "validation"
    assert found[0]["image"] == data and found[0]["meta"] == {"marks": ["y"]}
    assert [row["class_id"] for row in found] == [1, 0, 7]  # the order of the data set, by which CoOp halves classes
    assert convert(tmp_path / "h", tmp_path / "out" / "rows.jsonl")[0] == 3  # pictures become files beside the rows
    assert len(list((tmp_path / "out" / "rows_media").iterdir())) == 1


def test_sequences_of_got10k(tmp_path):
    folder = tmp_path / "got" / "G_1"
    for n in range(20):
        picture(folder / f"{n:08d}.jpg", (200, 100))
    (folder / "groundtruth.txt").write_text("".join(f"{n}.0,10.0,20.0,30.5\n" for n in range(20)))
    (folder / "meta_info.ini").write_text("[METAINFO]\nobject_class: sloth\n")
    ((_, row),) = rows_in(tmp_path / "got")
    assert [row["images"][n] for n in (0, 1, 7)] == [f"got/G_1/{n:08d}.jpg" for n in (0, 3, 19)]
    assert row["tracks"][0]["boxes"][1] == [3, 10, 23, 40.5] and len(row["tracks"][0]["boxes"]) == 8
    assert (row["id"], row["question"], row["width"], row["height"]) == ("G_1", "sloth", 200, 100)
    shares = {"path": "/mnt/x/got/G_1", "object": "sloth", "gt": [[0.1, 0, 0.5, 1]] * 8}
    row = one(shares, root=tmp_path)
    assert row["images"][7] == "got/G_1/00000019.jpg" and row["tracks"][0]["boxes"][0] == [20, 0, 100, 100]
    with pytest.raises(DataError, match="no frame in 'G_1' gives the image size"):
        one({"path": "G_1", "object": "x", "boxes_xywh": [[1, 2, 30, 40]]})


def test_videos_that_are_named_by_an_id(tmp_path):
    (tmp_path / "v_1.mkv").touch()
    source = RecordSource(root=tmp_path)
    assert source.video("v_1") == "v_1.mkv" and source.video("v_2") == "v_2.mp4"
    assert source.video("j7_360.0_510.0") == "j7_360.0_510.0.mp4"
    assert source.video("x.webm") == "x.webm" and source.video(None) is None
    assert RecordSource("r", tmp_path).path("/" + "a/" * 60_000 + "x.png").endswith("a/x.png")
    file = save(tmp_path / "split.json", {"train": [["a/1.jpg", 0, "cat"]], "val": [["a/2.jpg", 1, "dog"]], "test": []})
    assert [tuple(row[k] for k in ("id", "image", "label", "split", "class_id")) for _, row in rows_in(file)] == [
        ("train-1", "a/1.jpg", "cat", "train", 0), ("val-1", "a/2.jpg", "dog", "val", 1)]
    with pytest.raises(DataError, match="'test' must be a list of"):
        rows_in(save(file, {"train": [["a/1.jpg", 0, "cat"]], "test": [["a/1.jpg"]]}))
    ((where, row),) = rows_in(save(tmp_path / "sta.txt", "AB1 24.3 30.4##person sits down.\n\n"))
    assert where.endswith("sta.txt:1") and (row["video"], row["spans"]) == ("AB1.mp4", [[24.3, 30.4]])
    with pytest.raises(DataError, match=r"sta\.txt:1 is not a line of Charades-STA"):
        rows_in(save(tmp_path / "sta.txt", "some words\n"))


def test_a_clip_is_cut_from_its_file_unless_the_file_is_the_clip(tmp_path):
    make_video(tmp_path / "whole.mp4")  # 2 seconds
    make_video(tmp_path / "cut.mp4")
    record = {"duration": 1.0, "timestamp": [0.1, 0.5], "sentence": "x", "video_start": 0.5, "video_end": 1.5}
    cut = {"video_start": 0.5, "video_end": 1.5}
    for video, told, wanted in (
            ("whole.mp4", {"video_end": 0.6, "duration": 0.1}, {**cut, "video_end": 0.6}),
            ("cut.mp4", {"duration": 2.0, "video_end": 2.5}, {}),  # as long as the clip: cut already
            ("gone_00:00:00:500_00:00:01:500.mp4", {}, {}), ("gone.mp4", {}, cut)):
        row = one({**record, **told, "video": video}, root=tmp_path)
        assert {k: v for k, v in row.items() if k in cut} == wanted and row["spans"] == [[0.1, 0.5]], video
    whole = one({"video": "whole.mp4", "timestamp": [0.1, 0.5], "sentence": "x"}, root=tmp_path)
    assert whole["duration"] == 2  # told by the file where the record does not
    with pytest.raises(DataError, match=r"video_start=2 must be before video_end=1\.5"):
        one({**record, "video": "a.mp4", "video_start": 2})
