"""Rows of large files that are read one at a time: the same samples as those of a file read as a whole."""

import gzip
import json
import logging
import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.sets import read, save
from tests.tables import each
from vlrl.config.schema import DataSettings
from vlrl.curriculum import Prompts
from vlrl.curriculum.visited import write_visited
from vlrl.data import Samples
from vlrl.data.sources import derived_cache, lazy_dataset, row_index
from vlrl.data.sources.lazy_dataset import LazySamples
from vlrl.errors import ConfigError, DataError, RunError
from vlrl.task import Task
from vlrl.task.interface import first_samples


def rows(count=50):
    return [{"id": f"r{i}", "question": f"q {i} \u00fc\u2028", "answer": str(i), "answer_type": "text",
             "difficulty": i / count, "category": f"c{i % 3}"} for i in range(count)]


def lines(path, entries, end="\n"):
    path.write_bytes(end.join(e if isinstance(e, str) else json.dumps(e, ensure_ascii=False)
                              for e in entries).encode("utf-8", "surrogateescape"))
    return path


def table(path, entries, **options):
    found = pa.Table.from_pylist(entries)
    if path.suffix == ".parquet":
        pq.write_table(found, path, **options)
    else:
        with path.open("wb") as file, options["kind"](file, found.schema) as writer:
            writer.write_table(found, max_chunksize=7)
    return path


def same(lazy, whole):
    assert isinstance(lazy, LazySamples) and isinstance(whole, Samples) and len(lazy) == len(whole)
    order = list(range(len(whole)))
    random.Random(0).shuffle(order)
    for i in order:
        assert (lazy[i].id, lazy[i].row, [m.source for m in lazy[i].media]) == (
            whole[i].id, whole[i].row, [m.source for m in whole[i].media])


@pytest.mark.parametrize("form", [
    rows(), [*rows(), ""], ["  " + json.dumps(row) for row in rows()],
    ["", *rows()[:5], "", " \t", "\r", *rows()[5:], "", ""]], ids=["plain", "last line ended", "spaces", "blank lines"])
def test_lines_are_those_of_the_whole_file(tmp_path, monkeypatch, form):
    for end, start in (("\n", b""), ("\r\n", b""), ("\n", b"\xef\xbb\xbf")):
        path = lines(tmp_path / "a.jsonl", form, end)
        path.write_bytes(start + path.read_bytes())
        whole = read(path, "memory")
        for chunk in (7, 1 << 20):
            monkeypatch.setattr(row_index, "_CHUNK", chunk)
            found = read(path, cache=tmp_path / f"cache-{chunk}-{len(end)}-{len(start)}")
            assert isinstance(found, LazySamples) and [(s.id, s.row) for s in found] == [(s.id, s.row) for s in whole]
    same(read(path), whole)
    same(read(path), whole)  # by the cached index


@pytest.mark.parametrize("large", [False, True])
def test_parquet_by_small_and_large_row_groups(tmp_path, monkeypatch, large):
    monkeypatch.setattr(row_index, "_GROUP_BYTES", 0 if large else 1 << 20)
    monkeypatch.setattr(row_index, "_KEPT_BYTES", 1)
    path = table(tmp_path / "a.parquet", rows(), row_group_size=7)
    same(read(path), read(path, "memory"))
    assert len(list((tmp_path / "cache").rglob("*.arrow"))) == large


def test_packed_lines(tmp_path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines(tmp_path / "a.jsonl", rows()).read_bytes()))
    same(read(path), read(path, "memory"))
    assert read(path)[3].id == "r3"
    for index in ("lazy", "memory"):
        path.write_bytes(path.read_bytes()[:-9])
        with pytest.raises(DataError, match=r"a\.jsonl\.gz cannot be"):
            read(path, index)


def test_a_folder_of_shards_and_a_pattern(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for n, name in enumerate(("train-00000-of-00002", "train-00001-of-00002", "test-00000-of-00001")):
        table(folder / f"{name}.parquet", [{"question": f"{name} {i}", "answer": "x", "answer_type": "text"}
                                           for i in range(3 + n)])
    for split, count in (("train", 7), ("heldout", 5)):
        found = read(folder, split=split)
        same(found, read(folder, "memory", split=split))
        assert len(found) == count
    saved = tmp_path / "saved"
    saved.mkdir()
    table(saved / "data-00000-of-00001.arrow", rows(7), kind=pa.ipc.new_stream)
    table(saved / "cache-1b2c.arrow", rows(5), kind=pa.ipc.new_stream)  # `datasets` keeps results of filter there
    assert len(read(saved)) == len(read(saved, "memory")) == 7
    for n in range(3):
        lines(tmp_path / f"rows-{n}.jsonl", rows()[10 * n:10 * n + 10])
    same(read(tmp_path / "rows-*.jsonl"), read(tmp_path / "rows-*.jsonl", "memory"))
    assert [s.id for s in read(tmp_path / "rows-*.jsonl")] == [f"r{i}" for i in range(30)]
    with pytest.raises(ConfigError, match="does not exist"):
        read(tmp_path / "none-*.jsonl")
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        lines(tmp_path / name / "part.jsonl", rows())
    with pytest.raises(ConfigError, match=r"several folders: set data\.root"):
        read(tmp_path / "*" / "part.jsonl")


@each("kind", ["jsonl", "parquet", "arrow"])
def test_rows_that_name_both_sides(tmp_path, kind):
    given = [{**row, "split": ("train", "val", "other")[i % 3]} for i, row in enumerate(rows())]
    path = tmp_path / f"a.{kind}"
    lines(path, given) if kind == "jsonl" else table(path, given, **({"kind": pa.ipc.new_stream} if kind == "arrow"
                                                                     else {"row_group_size": 9}))
    for split in ("train", "heldout"):
        same(read(path, split=split), read(path, "memory", split=split))
    one = lines(tmp_path / "one.jsonl", [{**row, "split": "train"} for row in rows()])
    same(read(one, split="heldout"), read(one, "memory", split="heldout"))  # one side alone is no split


def test_which_files_are_lazy(tmp_path, monkeypatch):
    for path in (save(tmp_path / "a.json", rows()), lines(tmp_path / "list.jsonl", ["[", json.dumps(rows()[0]), "]"])):
        with pytest.raises(ConfigError, match=r"data\.index=lazy: .*read as a whole"):
            read(path)
    with pytest.raises(DataError, match="no usable row"):
        read(lines(tmp_path / "empty.jsonl", ["", " "]))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read"):
        read(tmp_path / "bad.parquet")
    path = lines(tmp_path / "a.jsonl", rows())
    assert isinstance(read(path, "auto"), Samples)
    monkeypatch.setattr(lazy_dataset, "LARGE", path.stat().st_size)
    assert isinstance(read(path, "auto"), LazySamples) and isinstance(read(path, "memory"), Samples)
    joined = lines(tmp_path / "b.jsonl", [{"image": "a.png", "bbox": [0, 0, 4, 4], "ann_id": i, "width": 8, "height": 8,
                                           "sentences": [{"sent": "a"}, {"sent": "b"}]} for i in range(50)])
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert len(read(joined, "auto")) == 100  # one record, several rows: read as a whole
    with pytest.raises(ConfigError, match=r"data\.index=lazy: .*b\.jsonl: format refcoco joins.*data convert"):
        read(joined)


BAD = ['{"id": 1', "[1]", '{"id": "b", "difficulty": 7}', '{"id": "m", "image": "none.png"}',
       '{"id": "u", "image": "https://example.org/a.png"}', '{"id": "o", "image": "/etc/passwd"}', "\udcff\udcfe",
       "[" * 100_000, '{"id": "t", "id": "t"}',
       json.dumps({"image": "a.png", "bbox": [0, 0, 1, 1], "ann_id": 3, "sentences": [{"sent": "a"}, {"sent": "b"}]})]


@pytest.fixture
def mixed(tmp_path):
    """Bad rows after each good one."""
    return lines(tmp_path / "a.jsonl", [entry for good, bad in zip(rows(), BAD, strict=False) for entry in (good, bad)])


@pytest.mark.parametrize("quarantine", [False, True])
def test_a_bad_row_says_what_and_where_when_it_is_drawn(mixed, quarantine):
    found = read(mixed, quarantine=quarantine)
    assert len(found) == 2 * len(BAD)
    for i in range(len(BAD)):
        assert found[2 * i].id == f"r{i}"
        with pytest.raises(DataError, match=rf"a\.jsonl:{2 * i + 2}: ") as error:
            found[2 * i + 1]
        assert ("data.quarantine=true" in str(error.value)) != quarantine


def test_samplers_and_evaluations_pass_by_bad_rows(mixed, tmp_path):
    found = read(mixed, quarantine=True)
    prompts = Prompts.of(found, 0)
    assert prompts.numbers("difficulty").tolist() == pytest.approx(
        [v for i in range(len(BAD)) for v in (i / 50, np.nan)], nan_ok=True)
    assert prompts.categories("category").names == ("c0", "c1", "c2", "none")
    prompts.history.visit([0, 1, 2, 3])
    write_visited(tmp_path / "prompts.parquet", prompts.history, found)
    assert pq.read_table(tmp_path / "prompts.parquet")["sample_id"].to_pylist() == ["r0", "", "r1", ""]
    task = Task()
    read(mixed, split="heldout", task=task, quarantine=True)
    assert [s.id for s in first_samples(task, "heldout", 4)] == ["r0", "r1", "r2", "r3"]
    task.data = task.data.model_copy(update={"quarantine": False})
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        first_samples(task, "heldout", 4)


def places(tmp_path):
    return sorted((tmp_path / "cache" / "index").iterdir())


def test_places_are_those_of_the_file_as_it_is(tmp_path):
    path = lines(tmp_path / "a.jsonl", rows())
    before = read(path)
    (kept,) = places(tmp_path)
    stamp = kept.stat().st_mtime_ns
    assert read(path)[49].id == "r49" and kept.stat().st_mtime_ns == stamp
    lines(tmp_path / "new", [{**row, "id": "x" + row["id"]} for row in rows(20)])
    os.replace(tmp_path / "new", path)
    assert [s.id for s in read(path)] == [f"xr{i}" for i in range(20)]
    assert len(places(tmp_path)) == 1 and kept not in places(tmp_path)
    assert [s.id for s in before] == [f"r{i}" for i in range(50)]  # a run goes on with the file that it opened
    found = read(lines(path, rows()))
    with path.open("a") as file:
        file.write("\n" + json.dumps(rows()[0]) + "\n")
    assert [s.id for s in found] == [f"r{i}" for i in range(50)] and len(read(path)) == 51


def test_spoiled_places_are_kept_anew(tmp_path, caplog):
    path = lines(tmp_path / "a.jsonl", rows())
    read(path)
    (place,) = places(tmp_path)
    good = place.read_bytes()
    np.save(tmp_path / "other.npy", np.zeros((5, 2)))
    pickled = b"\x93NUMPY\x01\x00v\x00{'descr': '|O', 'fortran_order': False, 'shape': (1,), }"
    for spoiled in (b"", b"nothing", pickled, (tmp_path / "other.npy").read_bytes(), good[:-400]):
        place.write_bytes(spoiled)
        assert [s.id for s in read(path)][-1] == "r49" and place.read_bytes() == good
    assert not caplog.text


@each("change", [
    lambda data: data[: len(data) // 2], lambda data: b'{"id": "new"}\n' + data,
    lambda data: data.replace(b"r3", b"row 3"),
    lambda data: data.replace(b"}\n{", b"} {"), lambda data: b""])
def test_a_file_that_is_written_to_ends_the_run(tmp_path, change):
    path = lines(tmp_path / "a.jsonl", rows(), end="\n")
    found = read(path, quarantine=True)  # which leaves no such row out
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(RunError, match=r"a\.jsonl has changed since the run began"):
        list(found)


def test_processes_that_share_a_cache_unpack_once(tmp_path):
    path, begun, both = lines(tmp_path / "a.jsonl", rows()), [], threading.Event()

    def write(source, target):
        begun.append(source)
        (both.set if len(begun) == 2 else lambda: both.wait(0.3))()
        target.touch()
    with ThreadPoolExecutor(2) as pool:
        for _ in "ab":
            pool.submit(derived_cache.derived_file, path, tmp_path / "cache", "rows", write)
    assert len(begun) == 1 and len(places(tmp_path)) == 1


@each("start", [b"\xef\xbb\xbf\n", b"\xef\xbb\xbf", b"\xc2\xa0\n", b"\x1c\n\n"])
def test_lines_of_nothing_but_spaces_of_any_kind(tmp_path, start):
    path = tmp_path / "a.jsonl"
    path.write_bytes(start + b"\n\xe2\x80\xa8\n".join(json.dumps(row).encode() for row in rows(5)))
    same(read(path), read(path, "memory"))


def test_without_a_place_to_keep_them(tmp_path, caplog):
    path = lines(tmp_path / "a.jsonl", rows())
    (tmp_path / "cache").write_text("")
    with caplog.at_level(logging.WARNING):
        assert [s.id for s in read(path)][-1] == "r49"
    assert "cannot be cached" in caplog.text


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_threads_read_side_by_side(tmp_path, monkeypatch, name):
    monkeypatch.setattr(row_index, "_KEPT_BYTES", 1)
    path = tmp_path / name
    lines(path, rows(200)) if name == "a.jsonl" else table(path, rows(200), row_group_size=10)
    found = read(path)

    def draw(seed):
        return [i for i in random.Random(seed).sample(range(200), 100) if found[i].id != f"r{i}"]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(draw, range(4))) == [[]] * 4


def test_slices_ends_and_streams(tmp_path):
    path = lines(tmp_path / "a.jsonl", rows())
    found = read(path)
    assert [s.id for s in found[2:5]] == ["r2", "r3", "r4"] and found[-1].id == "r49" and len(list(found)) == 50
    with pytest.raises(IndexError):
        found[50]
    assert isinstance(read(path, "auto", stream=True), LazySamples)
    with pytest.raises(ValueError, match=r"data\.stream=true .* data\.index=memory"):
        DataSettings(stream=True, index="memory")
    with pytest.raises(ConfigError, match=r"data\.stream=true: .*c\.json.*read as a whole"):
        read(save(tmp_path / "c.json", [{"id": "1"}]), "auto", stream=True)
    for kind in (pa.ipc.new_file, pa.ipc.new_stream):
        path = table(tmp_path / f"{kind.__name__}.arrow", rows(), kind=kind)
        same(read(path), read(path, "memory"))
    meta = {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    found = pa.table({"id": ["a", "b"], "answer_type": ["text"] * 2, "label": [1, 0]})
    pq.write_table(found.replace_schema_metadata({"huggingface": json.dumps(meta)}), tmp_path / "a.parquet")
    assert [s.row["label"] for s in read(tmp_path / "a.parquet")] == ["dog", "cat"]
    same(read(tmp_path / "a.parquet"), read(tmp_path / "a.parquet", "memory"))
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    path = lines(tmp_path / "a.jsonl", [{"image": "a.png", "problem": f"What is {i}?",
                                         "solution": f"<answer>{i}</answer>"} for i in range(5)])
    same(read(path), read(path, "memory"))
    assert read(path)[0].media[0].source == tmp_path / "a.png"
