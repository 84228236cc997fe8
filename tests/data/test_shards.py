"""Shards and folders of other programs: WebDataset tars, `save_to_disk`, splits of a folder."""

import io
import json
import tarfile

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.sets import picture, read
from tests.tables import each
from vlrl.config.schema import LimitsSettings
from vlrl.data import Samples
from vlrl.data.media import load
from vlrl.data.sources.lazy_dataset import LazySamples
from vlrl.data.sources.reading import rows_in
from vlrl.data.sources.tar_shards import row_at, row_spans
from vlrl.errors import ConfigError, DataError


def tar(path, members, format=tarfile.GNU_FORMAT):
    """Writes members: (name, bytes), or a TarInfo."""
    with tarfile.open(path, "w", format=format) as file:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data) if info.isreg() else info.size
            file.addfile(info, io.BytesIO(data))
    return path


def asked(i, **more) -> bytes:
    return json.dumps({"question": f"What is {i}?", "answer": f"a{i}", **more}).encode()


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT, tarfile.USTAR_FORMAT])
@pytest.mark.parametrize("index", ["memory", "lazy"])
def test_members_of_one_name_are_a_row(tmp_path, index, format):
    long = "deep/" * 30 + "3"
    members = [("000.png", picture(1)), ("000.json", asked(0)), ("./001.json", asked(1)), ("./001.png", picture(2)),
               ("notes", b"no row"), ("sub/2.left.png", picture(3)), ("sub/2.right.png", picture(4)),
               ("sub/2.question.txt", b"Which?\n"), ("sub/2.answer.txt", "\u00fc".encode()),
               (f"{long}.json", asked(3)), (f"{long}.png", picture(5)), (f"{long}.npy", b"\x93NUMPY\xff")]
    samples = read(tar(tmp_path / "rows.tar", members, format), index)
    assert isinstance(samples, LazySamples if index == "lazy" else Samples)
    assert [s.id for s in samples] == ["000", "001", "sub/2", long]
    assert [s["answer"] for s in samples] == ["a0", "a1", "\u00fc", "a3"]
    shades = [[load(m, LimitsSettings()).frames[0].getpixel((0, 0))[0] for m in s.media] for s in samples]
    assert shades == [[1], [2], [3, 4], [5]]


def test_classes_and_shards_of_a_pattern(tmp_path):
    for n in range(3):
        tar(tmp_path / f"pets-{n}.tar", [(f"{n}{i}.{kind}", data) for i in range(4)
                                         for kind, data in (("jpg", picture(i)), ("cls", b"dog" if i % 2 else b"cat"))])
    samples = read(tmp_path / "pets-*.tar", "memory")
    assert len(samples) == 12 and {s["label"] for s in samples} == {"cat", "dog"}
    (tmp_path / "folder").mkdir()
    for side in ("train", "test"):
        tar(tmp_path / f"folder/{side}-0.tar", [(f"{side}{i}.json", asked(i)) for i in range(3)])
    for index in ("memory", "lazy"):
        assert [s.id for s in read(tmp_path / "folder", index)] == ["train0", "train1", "train2"]
        assert [s.id for s in read(tmp_path / "folder@test", index, "heldout")] == ["test0", "test1", "test2"]


def info(name, **more):
    found = tarfile.TarInfo(name)
    for key, value in more.items():
        setattr(found, key, value)
    return found


GOOD = [("0.json", asked(0))]


@each("members words", [
    ([*GOOD, (info("1.json", type=tarfile.SYMTYPE, linkname="/etc/passwd"), b"")], r"'1.json' is not a regular file"),
    ([*GOOD, (info("1.json", type=tarfile.LNKTYPE, linkname="0.json"), b"")], r"'1.json' is not a regular file"),
    ([*GOOD, (info("1.json", type=tarfile.CHRTYPE), b"")], r"'1.json' is not a regular file"),
    ([*GOOD, ("../1.json", asked(1))], "leads outside"), ([*GOOD, ("/tmp/1.json", asked(1))], "leads outside"),
    ([*GOOD, ("a/../../1.json", asked(1))], "leads outside")])
@each("index", ["memory", "lazy"])
def test_hostile_members_name_shard_and_member(tmp_path, members, words, index):
    with pytest.raises(DataError, match=rf"rows\.tar: the member .*{words}"):
        read(tar(tmp_path / "rows.tar", members), index)


def test_broken_shards(tmp_path):
    whole = tar(tmp_path / "w.tar", [("0.json", asked(0)), ("1.png", picture())]).read_bytes()
    huge = info("x", type=tarfile.XHDTYPE, size=1 << 33).tobuf(tarfile.GNU_FORMAT) + bytes(1024)
    for name, data, words in (("cut", whole[:1024 + 512 + 20], r"'1.png' has 69 bytes"),
                              ("junk", b"x" * 2048, "is not a header"), ("flip", b"1" + whole[1:], "is not a header"),
                              ("huge", huge, "has a header of 8589934592 bytes")):
        (tmp_path / f"{name}.tar").write_bytes(data)
        with pytest.raises(DataError, match=rf"{name}\.tar.*{words}"):
            read(tmp_path / f"{name}.tar")
    members = [("0.json", asked(0)), ("0.JSON", asked(0)), ("1.json", b"{"), ("2.json", asked(2))]
    first, second, third = (row for _, row in rows_in(tar(tmp_path / "rows.tar", members)))
    assert "occurs twice" in str(first) and "'1.json': not JSON" in str(second) and third["answer"] == "a2"


@given(st.binary(max_size=1500), st.integers(0, 4))
def test_any_bytes_are_a_shard_or_an_error(tmp_path_factory, data, blocks):
    path = tmp_path_factory.getbasetemp() / "any.tar"
    head = tarfile.TarInfo("0.json")
    head.size = 3
    path.write_bytes((head.tobuf() + data) if blocks else data)
    try:
        places = row_spans(path)
    except DataError as error:
        assert str(path) in str(error)
        return
    with path.open("rb") as file:
        for begin, end in places.tolist():
            row_at(path, file.fileno(), begin, end)


@pytest.mark.parametrize("index", ["memory", "lazy"])
def test_what_save_to_disk_writes(tmp_path, index):
    made = datasets.Dataset.from_list([{"image": {"bytes": picture(i), "path": None}, "question": f"What {i}?",
                                        "answer": f"a{i}"} for i in range(6)])
    made = made.cast_column("image", datasets.Image())
    made.save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert [s["answer"] for s in read(tmp_path / "one", index)] == [f"a{i}" for i in range(6)]
    both = datasets.DatasetDict({"train": made.select(range(4)), "odd": made.select([5, 1])})
    both.save_to_disk(str(tmp_path / "two"))
    assert [s["answer"] for s in read(tmp_path / "two@odd", index)] == ["a5", "a1"]
    samples = read(tmp_path / "two@train", index)
    assert len(samples) == 4 and load(samples[3].media[0], LimitsSettings()).frames[0].getpixel((0, 0)) == (3, 0, 0)
    with pytest.raises(ConfigError, match=r"data\.train=.*no split 'test'"):
        read(tmp_path / "two@test", index)


def test_a_split_of_a_folder(tmp_path):
    (tmp_path / "set/data").mkdir(parents=True)
    for side, n in (("train", 3), ("validation", 2)):
        rows = [{"question": f"What is {i}?", "answer": f"{side}{i}"} for i in range(n)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"set/data/{side}-00000-of-00001.parquet")
    assert len(read(tmp_path / "set@train")) == 3 and len(read(tmp_path / "set@val", "memory", "heldout")) == 2
    with pytest.raises(ConfigError, match=r"no split 'trai'\. Did you mean 'train'.*There are: train, validation"):
        read(tmp_path / "set@trai")
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / "pets" / folder).mkdir(parents=True)
        (tmp_path / "pets" / folder / "1.png").write_bytes(picture())
    samples = read(tmp_path / "pets@test", "memory")
    assert sorted(s["label"] for s in samples) == ["cat", "dog"]
    assert {s.media[0].source for s in samples} == {tmp_path / f"pets/test/{kind}/1.png" for kind in ("cat", "dog")}
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat/1.png").write_bytes(picture())
    (tmp_path / "flat/metadata.jsonl").write_text('{"file_name": "1.png", "question": "What?", "answer": "cat"}')
    (sample,) = read(tmp_path / "flat@train", "memory")
    assert sample.media[0].source == tmp_path / "flat/1.png"
