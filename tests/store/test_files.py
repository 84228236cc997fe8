"""Files that are whole or absent, also after a power cut."""

import io
import threading

import pytest

from vlrl.errors import RunError
from vlrl.store import files
from vlrl.store.files import append_line, replacing, set_aside, write_text


def test_a_file_is_on_the_disk_before_it_gets_its_name_and_the_name_after(tmp_path, disk):
    path = tmp_path / "config.yaml"
    write_text(path, "steps: 1")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert disk == [("sync", file), ("rename", file), ("sync", folder)]
    disk.clear()
    write_text(path, "steps: 2", sync=False)
    assert disk == [("rename", path.stat().st_ino)] and path.read_text() == "steps: 2"


def test_a_line_is_on_the_disk_when_it_is_added(tmp_path, disk):
    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 0}')
    append_line(path, '{"step": 1}')
    assert disk == [("sync", path.stat().st_ino)] * 2 and path.read_text() == '{"step": 0}\n{"step": 1}\n'


def test_a_disk_that_fills_up_gets_no_part_of_a_line(tmp_path, monkeypatch):
    class Full(io.FileIO):
        """Has room for seven bytes more."""

        def write(self, data):
            return super().write(data[:7])

    path = tmp_path / "metrics.jsonl"
    append_line(path, '{"step": 0}')
    monkeypatch.setattr(files, "open", lambda path, mode, buffering: Full(path, "a+"), raising=False)
    with pytest.raises(RunError, match="only 7 of 12 bytes fit"):
        append_line(path, '{"step": 1}')
    assert path.read_bytes() == b'{"step": 0}\n'


def test_two_threads_that_replace_a_file_write_two(tmp_path):
    path, others = tmp_path / "reward.png", []

    def write():
        with replacing(path) as temporary:
            others.append(temporary)
            temporary.write_text("other")

    with replacing(path) as temporary:
        temporary.write_text("own")
        thread = threading.Thread(target=write)
        thread.start()
        thread.join(10)
        assert others != [temporary] and path.read_text() == "other" and temporary.read_text() == "own"
    assert path.read_text() == "own" and [p.name for p in tmp_path.iterdir()] == ["reward.png"]


def test_what_is_set_aside_lies_beside_and_the_lock_stays(tmp_path):
    folder = tmp_path / "run"
    for name in ("run.lock", "config.yaml"):
        write_text(folder / name, name)
    (tmp_path / "run.before-1").mkdir()  # of an earlier start
    set_aside(folder)
    assert [p.name for p in folder.iterdir()] == ["run.lock"]
    assert [p.name for p in (tmp_path / "run.before-2").iterdir()] == ["config.yaml"]
    set_aside(folder)
    assert not (tmp_path / "run.before-3").exists()
