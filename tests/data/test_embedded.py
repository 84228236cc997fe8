"""Media inside rows: bytes of a table, base64, frames and numbers are read in place, as files of the same bytes are."""

import base64
import hashlib
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.data.sets import bomb, encoded, read
from tests.data.test_video import CONSTANT, films
from tests.tables import each, refused
from vlrl.cli.main import app
from vlrl.config.schema import LimitsSettings
from vlrl.data import Samples, sample_from_row
from vlrl.data.clip_cache import ClipCache
from vlrl.data.embedded import EmbeddedMedia, media_item, without_bytes
from vlrl.data.media import VideoSampling, load
from vlrl.data.sources.lazy_dataset import LazySamples
from vlrl.errors import DataError
from vlrl.rollout import fingerprint
from vlrl.tools.datasets.check import check
from vlrl.tools.datasets.convert import convert

LIMITS = LimitsSettings()


def clip(path):
    return films.make(path, films.FILES[CONSTANT])


def url(data: bytes, kind="image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def loaded(row, **limits):
    sample = sample_from_row({"id": "r", **row})
    return [load(media, LimitsSettings(**limits), VideoSampling()) for media in sample.media]


@each("value", [
    encoded(), {"bytes": encoded(), "path": "x/not-there.png"}, url(encoded()), {"path": url(encoded())},
    {"bytes": base64.b64encode(encoded("red", (40, 40))).decode()}])
def test_an_image_in_a_row_is_that_of_a_file(tmp_path, value):
    data = encoded("red", (40, 40)) if isinstance(value, dict) and isinstance(value.get("bytes"), str) else encoded()
    (tmp_path / "a.png").write_bytes(data)
    (here,) = loaded({"image": value})
    file = load(sample_from_row({"id": "r", "image": "a.png"}, tmp_path).media[0], LIMITS)
    assert here.frames[0].tobytes() == file.frames[0].tobytes()
    assert here.sha256 == file.sha256 == hashlib.sha256(data).hexdigest() and here.data == data


def test_a_row_keeps_paths_and_hashes(tmp_path):
    (tmp_path / "a.png").write_bytes(encoded())
    sample = sample_from_row({"id": "r", "images": [{"bytes": None, "path": "a.png"}, {"bytes": b"", "path": "a.png"}]},
                             tmp_path)
    assert [m.source for m in sample.media] == [tmp_path / "a.png"] * 2 and sample.row["images"] == ["a.png", "a.png"]
    with pytest.raises(DataError, match=r"row 'r'.*lies outside"):
        sample_from_row({"id": "r", "image": {"bytes": None, "path": "../../etc/passwd"}}, tmp_path)
    data = encoded("blue")
    named = f"sha256:{hashlib.sha256(data).hexdigest()}"
    sample = sample_from_row({"id": "r", "image": {"bytes": data, "path": "x.png"}, "thumb": [data, b"\0" * 99],
                              "seen": url(data), "question": "what?"})
    assert sample.row["image"] == named and sample.row["thumb"] == [named, "<99 bytes>"] and sample.row["seen"] == named
    assert sample.row["meta"] == {"thumb": [named, "<99 bytes>"], "seen": named}
    assert len(json.dumps(sample.row)) < 600
    pixels = np.arange(36, dtype=np.uint8).reshape(3, 4, 3)
    (color,), (grey,) = loaded({"image": pixels.tolist()}), loaded({"image": pixels[..., 0].tolist()})
    assert np.array_equal(np.asarray(color.frames[0]), pixels)
    assert np.array_equal(np.asarray(grey.frames[0])[..., 1], pixels[..., 0])
    (several,) = [sample_from_row({"id": "r", "images": [pixels.tolist(), encoded()]}).media]
    assert len(several) == 2


@each("value words", [
    (b"no picture", "not an image of"), (encoded("red", (99, 99))[:-30], "cannot be read"), (bomb(), "pixels"),
    (url(b"no picture"), "not an image of"), (encoded("red", (900, 900), "BMP"), "limits.media_bytes=9999"),
    (b"%!PS-Adobe-3.0 EPSF-3.0", "not an image of a known format")])
def test_hostile_bytes_name_the_row(value, words):
    with pytest.raises(DataError, match=f"row 'r' .*{words}") as raised:
        loaded({"image": value}, media_bytes=9999)
    assert len(str(raised.value)) < 500


test_what_is_no_media = refused(DataError, lambda row: sample_from_row({"id": "r", **row}), [
    ({"image": {"bytes": None, "path": None}}, "needs 'bytes' or 'path'"), ({"image": {}}, "needs 'bytes'"),
    ({"image": "data:image/png;base64,###"}, "is not valid base64"), ({"image": "data:text/html,<b>"}, "is a URL"),
    ({"image": [[[1, 2, 300]]]}, "whole numbers from 0 to 255"), ({"image": [[1, 2], [3]]}, "whole numbers"),
    ({"image": [[[1, 2, 3, 4]]]}, r"1 or 3")], start="row 'r'.*")


def test_videos_as_bytes_and_as_frames(tmp_path):
    path = clip(tmp_path / "a.mp4")
    sampling, cache = VideoSampling(fps=2, max_frames=4), ClipCache(8)
    row = {"id": "r", "video": path.read_bytes(), "video_start": 1.0, "video_end": 2.5}
    ours, file = (load(sample_from_row(one, tmp_path).media[0], LIMITS, sampling, cache)
                  for one in (row, {**row, "video": "a.mp4"}))
    assert ours.sha256 == file.sha256 and ours.timestamps == file.timestamps and len(ours.frames) == len(file.frames)
    assert all(a is b for a, b in zip(ours.frames, file.frames, strict=True))  # one entry of the clip cache
    with pytest.raises(DataError, match=r"^media inside row 'r' .* cannot be read as a video"):
        loaded({"video": b"RIFF" + bytes(99)})
    frames = [encoded(c) for c in ("red", "green", "blue", "white")]
    for name, video in (("bytes", frames), ("structs", [{"bytes": f, "path": None} for f in frames]),
                        ("nested", [[{"bytes": f, "path": None} for f in frames]]), ("urls", list(map(url, frames)))):
        (found,) = loaded({"video": video, "fps": 2})
        assert [f.getpixel((0, 0)) for f in found.frames] == [(255, 0, 0), (0, 128, 0), (0, 0, 255),
                                                              (255, 255, 255)], name
    with pytest.raises(DataError, match="needs a frame rate"):
        loaded({"video": frames})
    (tmp_path / "0.png").write_bytes(frames[0])
    named = sample_from_row({"id": "r", "video": ["0.png", "0.png"], "fps": 1}, tmp_path)
    assert named.media[0].source == [tmp_path / "0.png"] * 2
    two = sample_from_row({"id": "r", "video": ["a.mp4", "a.mp4"]}, tmp_path)
    assert [m.kind for m in two.media] == ["video", "video"]


EASY = [{"images": [{"bytes": encoded(c), "path": None}], "problem": f"<image>Which colour is number {i}?",
         "answer": c} for i, c in enumerate(("red", "green", "blue"))]


def easy(path):
    pq.write_table(pa.Table.from_pylist(EASY), path)
    return path


@each("index", ["memory", "lazy"])
def test_an_easyr1_parquet_is_read_in_place(tmp_path, index):
    samples = read(easy(tmp_path / "rows.parquet"), index)
    assert isinstance(samples, LazySamples if index == "lazy" else Samples) and len(samples) == 3
    for sample, row in zip(samples, EASY, strict=True):
        assert sample["answer"] == row["answer"]
        assert load(sample.media[0], LIMITS).sha256 == hashlib.sha256(row["images"][0]["bytes"]).hexdigest()
        assert len(json.dumps(dict(sample.row))) < 1000
    assert len(fingerprint.fingerprint_of(samples).ids) == 3


def test_data_check_and_convert_open_what_rows_hold(tmp_path):
    found = check(easy(tmp_path / "rows.parquet"), None, LIMITS)
    assert found.bad == 0 and found.media == {"images": 3, "videos": 0, "unusable": 0}
    rows = [*EASY, {**EASY[0], "images": [{"bytes": b"junk" * 9, "path": "c.png"}]}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "bad.parquet")
    found = check(tmp_path / "bad.parquet", None, LIMITS)
    assert found.bad == 1 and found.problems[0].kind == "media" and found.problems[0].where.endswith("row 4")
    assert "not an image of a known format" in found.problems[0].message
    answer = CliRunner().invoke(app, ["data", "check", str(tmp_path / "bad.parquet")])
    assert answer.exit_code == 1 and "row 4" in answer.output
    video = clip(tmp_path / "a.mp4").read_bytes()
    rows = [{"id": "a", "image": url(encoded())}, {"id": "b", "video": {"bytes": video, "path": None}},
            {"id": "c", "video": [{"bytes": encoded("green"), "path": None}] * 2, "fps": 1}]
    for row in rows:
        pq.write_table(pa.Table.from_pylist([row]), tmp_path / "one.parquet")
        out = tmp_path / f"{row['id']}.jsonl"
        convert(tmp_path / "one.parquet", out)
        (written,) = [json.loads(line) for line in out.read_text().splitlines()]
        before, after = sample_from_row(row), sample_from_row(written, tmp_path)
        assert [load(m, LIMITS, VideoSampling()).sha256 for m in before.media] == [
            load(m, LIMITS, VideoSampling()).sha256 for m in after.media]


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=60),
                    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4)))
def test_any_value_of_a_row_becomes_plain(value):
    json.dumps(without_bytes(value))
    try:
        found = media_item(value)
    except DataError:
        return
    assert isinstance(found, EmbeddedMedia) or found is value or isinstance(found, str)


@each("index", ["memory", "lazy"])
@each("record", [
    {"prompt": "How many?"}, {"prompt": [{"role": "user", "content": [
        {"type": "image", "text": None}, {"type": "text", "text": "How many?"}]}]},
    {"prompt": [{"role": "user", "content": "<image>How many?"}], "reward_model": {"ground_truth": "3"}},
    {"conversations": [{"from": "human", "value": "<image>How many?"}, {"from": "gpt", "value": "3"}]}])
def test_rows_of_other_programs_are_read_as_they_are(tmp_path, record, index):
    """Lists and structs of a table, with nulls where a part has no such field; as JSON: test_row_shapes.py."""
    answer = {} if "reward_model" in record or "conversations" in record else {"solution": "3"}
    table = pa.Table.from_pylist([{**record, **answer, "images": [{"bytes": encoded(), "path": None}]}] * 3)
    pq.write_table(table, tmp_path / "rows.parquet")
    for sample in read(tmp_path / "rows.parquet", index):
        assert sample["question"] == "How many?" and str(sample["answer"]) == "3"
        assert [load(m, LIMITS).data for m in sample.media] == [encoded()]
