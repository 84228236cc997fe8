"""app/library.py: which runs there are, how they stand, and that nothing outside the folder is read."""

import json
import os
import shutil
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app import made_runs
from vlrl.app import AppError, textfiles
from vlrl.app.library import Library


@pytest.fixture(scope="module")
def library(runs):
    return Library(runs)


def bare(folder, **beat):
    folder.mkdir(parents=True)
    beat = {"step": 1, "steps": 2, "state": "finished", "time": 5.0, **beat}
    (folder / "heartbeat.json").write_text(json.dumps(beat))
    return folder


def test_the_list_metrics_and_settings_of_runs(library, runs):
    made_runs.beat(library.root / "sweep/clips")
    infos = {info.id: info for info in library.runs()}
    assert {id: info.state for id, info in infos.items()} == {
        "boxes": "finished", "boxes-slow": "finished", "sweep/points": "interrupted", "sweep/clips": "running",
        "sweep/paths": "failed"}
    boxes = infos["boxes"]
    assert (boxes.task, boxes.model, boxes.step, boxes.steps) == ("grounding", "embedded/tiny-qwen3-vl", 4, 4)
    assert boxes.reward == library.metrics("boxes")[-1]["reward/mean"] and boxes.notes == ()
    assert time.time() - 3600 < boxes.started < time.time() and 0 <= boxes.duration_s < 3600
    assert infos["sweep/clips"].steps == 8 and library.run("sweep/clips").path == library.root / "sweep/clips"
    assert [line["step"] for line in library.metrics("boxes")] == [0, 1, 2, 3]
    assert [(line["step"], line["split"]) for line in library.evals("boxes")] == [(0, "heldout"), (4, "heldout")]
    assert library.settings("boxes")["train.lr"] != library.settings("boxes-slow")["train.lr"] == 3e-5
    changed = library.diff("boxes", "boxes-slow")
    assert [name for name, _, _ in changed] == ["seed", "train.lr"] and changed[0][1:] == (0, 1)
    assert library.diff("boxes", "boxes") == []
    assert library.file("boxes", "tokenizer.json").name == "tokenizer.json" and not library.file("boxes", "none")
    assert library.folder("boxes").rollouts(0).num_rows == 16
    library = Library(runs / "boxes")
    assert [info.id for info in library.runs()] == ["."] and len(library.metrics(".")) == 4


def test_metrics_grow_and_half_a_line_waits(tmp_path):
    run = bare(tmp_path / "a")
    lines, library = run / "metrics.jsonl", Library(tmp_path)
    assert library.metrics("a") == []
    lines.write_text('{"step": 0, "x": NaN}\n{"step": 1, "x": 1')
    assert library.metrics("a") == [{"step": 0, "x": None}] and library.notes("a") == ()
    with open(lines, "a") as file:
        file.write('}\n{"step": 2}')
    assert library.metrics("a")[1:] == [{"step": 1, "x": 1}, {"step": 2}]
    with open(lines, "a") as file:
        file.write('\nbroken\n{"step": 3}\n')
    assert [m["step"] for m in library.metrics("a")] == [0, 1, 2, 3]
    assert library.notes("a") == ("skipped line 4 of metrics.jsonl: it is not a JSON object with an integer step",)
    lines.unlink()
    lines.write_text('{"step": 7}\n')  # the run was started over
    assert library.metrics("a") == [{"step": 7}] and library.notes("a") == ()


def test_lines_and_configs_that_cannot_be_read_are_told(tmp_path):
    for i, line in enumerate(("[" * 200_000, '{"step": 1e400}', '{"step": -1}', '{"step": true}', '"step"', "\x00",
                              '{"step": 1' + "0" * 6000 + "}", "x" * 3_000_000)):
        (bare(tmp_path / f"{i}") / "metrics.jsonl").write_text(
            f'{line}\n{{"step": 5, "y": [1], "big": 1{"0" * 400}}}\n')
        library = Library(tmp_path)
        assert library.metrics(f"{i}") == [{"step": 5, "big": None}], line[:30]
        assert "skipped line 1 of metrics.jsonl" in library.notes(f"{i}")[0]
    path = bare(tmp_path / "a") / "config.yaml"
    for text, why in (
            ("steps: [1, 2\n task: {", "invalid YAML"), ("- 1", "no settings"), (b"\xff\xfe\x00", "UTF-8"),
            ("a: &a [1]\nb: *a", "aliases"), ("[" * 5000, ""), ("a: " + "[" * 30 + "]" * 30, "too many"),
            ("a: !!python/object/apply:os.system ['true']", "invalid YAML"), ("# " + "x" * (1 << 20), "bytes")):
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        library = Library(tmp_path)
        [note] = library.run("a").notes
        assert library.settings("a") == {} and note.startswith("config.yaml cannot be read: ") and why in note


def test_broken_heartbeats_and_locks_do_no_harm(tmp_path):
    (tmp_path / "a").mkdir()
    for beat in ('{"step": 3, "sta', "[1]", '{"time": "x", "step": NaN, "steps": 1' + "0" * 5000 + "}",
                 '{"state": "running", "time": 1e400, "reward": Infinity}'):
        for lock in (None, "{}", "[]", '{"pid": "x/../.."}', '{"pid": -1}', '{"pid": [1], "host": {}}', "[" * 100_000):
            (tmp_path / "a/heartbeat.json").write_text(beat)
            (tmp_path / "a/run.lock").unlink(missing_ok=True)
            if lock is not None:
                (tmp_path / "a/run.lock").write_text(lock)
            info = Library(tmp_path).run("a")
            assert info.state in ("unknown", "running", "stale") and info.step is None and info.reward is None
            assert info.steps is None and isinstance(info.notes, tuple)


def test_runs_are_looked_for_in_folders_but_not_in_runs_media_or_links(tmp_path):
    for name in ("one", "deep/er/two", "one/inner", "media/three", "checkpoints/four", ".hidden/five"):
        bare(tmp_path / name)
    outside = bare(tmp_path.parent / f"{tmp_path.name}-outside")
    (tmp_path / "link").symlink_to(outside, target_is_directory=True)
    (tmp_path / "deep/loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "too/d/e/e/e/e").mkdir(parents=True)
    bare(tmp_path / "too/d/e/e/e/e/p")
    (tmp_path / "only/rollouts").mkdir(parents=True)
    (tmp_path / "only/rollouts/step-000000-rank-00000.parquet").write_bytes(b"")
    os.mkdir(os.fsencode(tmp_path) + b"/no-\xff-text")
    library = Library(tmp_path)
    assert sorted(info.id for info in library.runs()) == ["deep/er/two", "one", "only"]
    assert "not valid UTF-8" in library.skipped[0]


def test_runs_come_and_go(tmp_path):
    library = Library(tmp_path)
    assert library.runs() == []
    bare(tmp_path / "a")
    assert library.run("a").state == "finished"  # a new one is found at once
    (tmp_path / "a/heartbeat.json").write_text('{"state": "failed", "step": 9}')
    assert (library.run("a").state, library.run("a").step) == ("failed", 9)
    shutil.rmtree(tmp_path / "a")
    library._scanned = -1e9
    assert library.runs() == []
    with pytest.raises(AppError, match="no run 'a'"):
        library.metrics("a")


def test_a_run_whose_process_is_gone_is_stale_and_no_folder_is_an_error(tmp_path):
    bare(tmp_path / "a", state="running", time=time.time())
    assert Library(tmp_path).run("a").state == "stale"
    with pytest.raises(AppError, match="is not a folder"):
        Library(tmp_path / "none")


@settings(max_examples=40)
@given(st.one_of(st.text(), st.sampled_from([
    "..", "../boxes", "/etc", "boxes/", "./boxes", "sweep", "boxes/../boxes", "boxes/media", "\0", "a" * 5000, "~",
    "%2e"]), st.integers(), st.none(), st.lists(st.text())))
def test_only_listed_ids_are_runs(library, id):
    if id in [info.id for info in library.runs()]:
        return
    with pytest.raises(AppError, match="there is no run"):
        library.run(id)


@settings(max_examples=40)
@given(st.one_of(st.text(), st.sampled_from([
    "../boxes-slow/config.yaml", "../../../../../../../etc/passwd", "/etc/passwd", "media", "..", "\0", "a" * 5000])))
def test_files_lie_inside(library, name):
    found = library.file("boxes", name)
    assert found is None or (found.is_relative_to(library.root) and found.is_file())


def test_a_line_without_an_end_is_read_once(tmp_path, monkeypatch):
    path, lines = tmp_path / "metrics.jsonl", textfiles.JsonLines("metrics.jsonl")
    path.write_bytes(b'{"step": 0}\n' + b"x" * (5 << 19))
    assert lines.read(path) == [{"step": 0}]
    with monkeypatch.context() as patch:
        patch.setattr(textfiles, "read_lines", lambda *_: pytest.fail("it is read again"))
        assert lines.read(path) == [{"step": 0}]
    with open(path, "ab") as file:
        file.write(b'{"step": 1}\n{"step": 2}\n{"step": 3}')  # the first of them is the end of that line
    assert lines.read(path) == [{"step": 0}, {"step": 2}, {"step": 3}]
    with open(path, "ab") as file:
        file.write(b'\n{"step": 4}\n')
    assert [record["step"] for record in lines.read(path)] == [0, 2, 3, 4]
    assert lines.notes == ["skipped line 2 of metrics.jsonl: it is not a JSON object with an integer step"]


@pytest.mark.parametrize("name", ["metrics.jsonl", "eval.jsonl", "config.yaml", "env.json", "heartbeat.json",
                                  "run.lock"])
def test_links_that_lead_out_are_not_read(tmp_path, name):
    secret = tmp_path / "secret"
    secret.write_text('{"step": 777, "split": "s", "secret": 777, "started": "2001-01-01T00:00:00+0000"}\n')
    run = bare(tmp_path / "runs/a")
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    (run / "rollouts").symlink_to(tmp_path)
    library = Library(tmp_path / "runs")
    info = library.run("a")
    assert any(name in note for note in info.notes)
    run = library.folder("a")
    read = (info.step, info.started, library.metrics("a"), library.evals("a"), library.settings("a"), run.metrics(),
            run.last_heartbeat(), run.rollouts().to_pylist())
    assert "777" not in str(read) and (name != "env.json" or info.started != 978307200.0)


def test_a_pipe_is_no_file(tmp_path):
    run = tmp_path / "a"
    run.mkdir()
    os.mkfifo(run / "heartbeat.json")
    os.mkfifo(run / "metrics.jsonl")
    (run / "run.lock").write_text("{}")
    library = Library(tmp_path)
    assert library.run("a").state == "unknown" and library.metrics("a") == [] and library.folder("a").metrics() == []


def test_two_hundred_runs_are_listed_again_at_once(tmp_path):
    for i in range(200):
        bare(tmp_path / f"sweep-{i % 7}/{i:03d}")
    library = Library(tmp_path)
    first = library.runs()
    assert len(first) == 200 and library.runs() == first
    assert all(a is b for a, b in zip(library.runs(), first, strict=True))  # nothing was read again
