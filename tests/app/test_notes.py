"""notes.py and exports.py: remarks survive what others do to the file, and what is exported can be used."""

import json
import sqlite3
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from PIL import Image

from tests.app import made_runs
from tests.helpers import made_group
from vlrl import store
from vlrl.app import AppError, notes
from vlrl.app.exports import export
from vlrl.app.index import RolloutKey
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.app.notes import Note, Notes
from vlrl.cli.main import main
from vlrl.config.schema import LimitsSettings
from vlrl.data import read_rows
from vlrl.data.media import VideoSampling, load
from vlrl.store import RunFolder
from vlrl.task import load as load_task
from vlrl.types import LoadedMedia, Media

KEY = RolloutKey("quickstart", "train", "train", 12, "00000384", 3)
OTHER = KEY._replace(run="sweep/a1", source="eval", split="heldout", group="heldout-000007")


def test_a_note_keeps_what_is_not_given_and_goes_when_it_is_empty(tmp_path):
    kept = Notes(tmp_path)
    assert kept.get(KEY) is None and kept.all() == [] and kept.flagged() == ()
    assert not kept.path.exists()  # looking makes no file
    kept.put(KEY, flag="good", sample="train-7", reward=0.5)
    found = kept.put(KEY, comment=" counts aloud ")
    assert found == Note(KEY, "good", "counts aloud", "train-7", 0.5, found.changed) and found.changed > 1.6e9
    kept.put(OTHER, comment="only words")
    assert [note.key for note in kept.all()] == [OTHER, KEY]  # the last changed first
    assert set(kept.flagged()) == {KEY, OTHER}
    assert [n.key for n in kept.all(run="sweep/a1")] == [OTHER] == [n.key for n in kept.all(text="WORDS")]
    assert [n.key for n in kept.all(flag="good", text="train-7")] == [KEY] and kept.all(flag="bad") == []
    assert kept.put(KEY, flag="") == Note(KEY, "", "counts aloud", "train-7", 0.5, kept.get(KEY).changed)
    assert kept.put(KEY, comment="") is None and [n.key for n in kept.all()] == [OTHER]


def test_many_tabs_write_at_once_and_nobody_is_told_of_a_lock(tmp_path):
    def write(i):
        Notes(tmp_path).all()
        Notes(tmp_path).put(KEY._replace(index=i % 8), **({"flag": "good"} if i % 16 < 8 else {"comment": f"c{i % 8}"}))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(32)))
    assert {(n.key.index, n.flag, n.comment) for n in Notes(tmp_path).all()} == {(i, "good", f"c{i}") for i in range(8)}
    with sqlite3.connect(tmp_path / notes.FILE) as base:
        assert base.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    base.close()


def test_what_cannot_be_kept_is_refused_and_a_lock_that_stays_is_said(tmp_path, monkeypatch):
    for put, words in (({"flag": "<b>"}, "unknown flag '<b>'"),
                       ({"comment": "x" * 10_001}, "10001 characters; the limit is 10000")):
        with pytest.raises(AppError, match=words):
            Notes(tmp_path).put(KEY, **put)
    assert not (tmp_path / notes.FILE).exists()
    monkeypatch.setattr(notes, "_WAIT_S", 0.05)
    Notes(tmp_path).put(KEY, flag="good")
    base = sqlite3.connect(tmp_path / notes.FILE, isolation_level=None)
    base.execute("BEGIN EXCLUSIVE")
    try:
        assert Notes(tmp_path).flagged() == (KEY,)  # readers do not wait for writers
        with pytest.raises(AppError, match=r"another program has locked notes\.sqlite for 0\.05 s; try again"):
            Notes(tmp_path).put(KEY, flag="bad")
    finally:
        base.close()


@hypothesis_settings(max_examples=10)
@given(words=st.text(st.characters(), max_size=40), number=st.integers(-2**63, 2**63 - 1))
def test_any_text_comes_back(words, number):
    with tempfile.TemporaryDirectory() as folder:
        kept = Notes(folder)
        key = KEY._replace(run=words, group=words, step=number)
        found = kept.put(key, flag="unsure", comment=words, sample=words)
        plain = words.encode("utf-8", "backslashreplace").decode()
        assert (found.key.run, found.key.group, found.sample, found.comment) == (plain, plain, plain, plain.strip())
        assert kept.get(key) == found and kept.all(text=words) is not None


def _sql(path, *lines):
    base = sqlite3.connect(path)
    for line in lines:
        base.execute(line)
    base.commit()
    base.close()


def test_a_file_of_the_first_version_is_read_and_grows_with_the_next_note(tmp_path):
    _sql(tmp_path / notes.FILE, notes._TABLE, "PRAGMA user_version = 1",
         "INSERT INTO notes VALUES ('a', 'train', 'train', 1, 'g', 0, 'look', '', 's', 0.5, 1.0)",
         "INSERT INTO notes VALUES ('a', 'train', 'train', 1, 'g', 1, '', 'words', 's', 0.5, 1.0)")
    kept, old = Notes(tmp_path), RolloutKey("a", "train", "train", 1, "g", 0)
    assert kept.get(old) == Note(old, "unsure", "", "s", 0.5, 1.0) and kept.verdicts() == {} == kept.labels()
    kept.put(KEY, flag="good", by="anna")
    assert kept.verdicts() == {old: {"": "unsure"}, KEY: {"anna": "good"}} and len(kept.all()) == 3


def test_a_file_of_anyone_is_refused_in_words(tmp_path):
    trap = "CREATE TRIGGER t AFTER INSERT ON notes BEGIN DELETE FROM notes; END"
    for n, (spoil, words) in enumerate((
            (lambda path: path.write_bytes(b"no database" * 500), "file is not a database"),
            (lambda path: _sql(path, "CREATE TABLE notes (run TEXT)"), "is not a notes file: move the file away"),
            ("PRAGMA user_version = 3", r"newer vlrl \(format version 3; this vlrl reads up to 2\)"),
            (trap, "is not a notes file"),
            (lambda path: path.symlink_to(path.with_name("elsewhere")), "is a link or a folder"),
            (lambda path: path.mkdir(), "is a link or a folder"))):
        folder = tmp_path / str(n)
        folder.mkdir()
        kept = Notes(folder)
        if isinstance(spoil, str):
            kept.put(KEY, flag="good")
            _sql(kept.path, spoil)
        else:
            spoil(folder / notes.FILE)
        for call in (Notes(folder).all, lambda folder=folder: Notes(folder).put(KEY, flag="bad")):
            with pytest.raises(AppError, match=words):
                call()
        assert Notes(folder).problem() and not (folder / "elsewhere").exists()
    kept = Notes(tmp_path)  # rows of odd types are texts, or left out
    kept.put(KEY, flag="good")
    _sql(kept.path, "INSERT INTO notes VALUES (x'00', 1, 2, 'three', 'g', 0, '', '', '', NULL, 0)",
         "INSERT INTO notes VALUES (x'ff', 1, 2, 3, 'g', 0, '<b>', x'61', '', 'high', 'late')")
    assert kept.all(flag="<b>") == [Note(RolloutKey("b'\\xff'", "1", "2", 3, "g", 0), "<b>", "b'a'", "", None, 0.0)]
    assert len(kept.all()) == 2


def test_notes_of_a_read_only_folder_are_shown_and_said_to_be_fixed(tmp_path):
    """By a user without the right to write: root may write anywhere."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        Notes(folder).put(KEY, flag="good")
        for path, mode in ((folder / notes.FILE, 0o444), (folder, 0o555)):
            path.chmod(mode)
        code = ("import os; from vlrl.app.notes import *\n"
                "os.geteuid() or os.setuid(65534)\n"
                f"kept = Notes({name!r}); print([n.flag for n in kept.all()], kept.problem())\n"
                "try: kept.put(kept.all()[0].key, flag='bad')\n"
                "except AppError as error: print(error)")
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        folder.chmod(0o755)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("['good'] Notes cannot be written") and ran.stdout.count("read-only") == 2


def answered(folder: Path, texts: dict[str, list[str]], split: str | None = None) -> RunFolder:
    """A run of the grounding task on its drawn scenes: sample -> its answers, all in step 0."""
    run, task = RunFolder(folder), load_task("grounding", {"drawn": True, "count": 8})
    run.create("task: {name: grounding, drawn: true}\nmodel: {name: embedded/tiny-qwen3-vl}\n", 0)
    samples = {sample.id: sample for sample in task.samples("train")}
    groups = []
    for n, (name, answers) in enumerate(texts.items()):
        shown = LoadedMedia(kind="image", frames=(samples[name].media[0].source,), sha256=f"{n:064x}")
        made = made_group(name, rewards=(0.5,) * len(answers), prompt="Where?", media=(shown,), id=f"g{n}",
                          task="grounding", split=split or "train")
        rollouts = tuple(replace(r, completion=made_runs.completion(text, np.random.default_rng(r.index)))
                         for r, text in zip(made.rollouts, answers, strict=True))
        groups.append(replace(made, sample=samples[name], rollouts=rollouts))
    run.write_rollouts(0, 0, groups, split=split)
    return run


def chosen(*places: tuple[int, int], flag="good", run="a", source="train", split="train") -> list[Note]:
    return [Note(RolloutKey(run, source, split, 0, f"g{group}", index), flag, "<script>") for group, index in places]


ANSWERS = {"train-000000": ["[1, 2, 3, 4]", "=cmd|' /C calc'!A0"], "train-000001": ["</script>\u2028é", ""]}


def exported(root: Path, form: str, wanted: list[Note], **more):
    """Of the runs in a folder, into its folder out."""
    library = Library(root)
    (root / "out").mkdir(exist_ok=True)
    return export(form, library, MediaStore(library), wanted, root / "out", **more)


@pytest.fixture
def runs(tmp_path):
    answered(tmp_path / "a", ANSWERS)
    return tmp_path


def test_jsonl_has_a_line_each_and_parquet_every_column(runs):
    made = exported(runs, "jsonl", chosen((1, 0), (0, 1), (0, 0)))
    lines = [json.loads(line) for line in made.path.read_text().split("\n")[:-1]]
    assert (made.rows, made.left_out, made.path.name) == (3, (), "rollouts.jsonl")
    assert [line["completion"] for line in lines] == [ANSWERS["train-000001"][0], *ANSWERS["train-000000"][::-1]]
    first = lines[0]
    assert (first["run"], first["source"], first["flag"], first["comment"]) == ("a", "train", "good", "<script>")
    assert first["parts"] == {"iou": 0.5} and first["sample"]["id"] == "train-000001" and "token_ids" not in first
    made = exported(runs, "parquet", chosen((0, 1), (1, 0)))
    table = pq.read_table(made.path)
    assert made.rows == 2 and table.schema.names == [*store.SCHEMA.names, "run", "source", "flag", "comment"]
    assert table.select(store.SCHEMA.names).equals(RunFolder(runs / "a").rollouts(0).take([1, 2]))
    assert table["comment"].to_pylist() == ["<script>"] * 2


def test_what_is_gone_is_named_and_what_is_flagged_bad_is_no_lesson(runs):
    wanted = [*chosen((0, 0), (7, 0)), *chosen((0, 0), run="../a"), *chosen((0, 0), run="b", source="eval", split="x")]
    made = exported(runs, "jsonl", wanted)
    assert made.rows == 1 and len(made.left_out) == 3
    assert made.left_out[0] == "1 rollouts of run 'a', step 0, are no longer stored"
    assert "'../a'" in made.left_out[1] and "'b'" in made.left_out[2]
    with pytest.raises(AppError, match="no rollout can be written: 1 rollouts of run 'a', step 0, are"):
        exported(runs, "parquet", chosen((7, 0)))
    assert not (runs / "out/rollouts.parquet").exists()
    with pytest.raises(AppError, match="export format 'csv' is unknown"):
        exported(runs, "csv", wanted)
    wanted = [*chosen((0, 0)), *chosen((0, 1), flag="bad")]
    made = exported(runs, "sft", wanted)
    assert made.rows == 1 and made.left_out[0].startswith("1 answers flagged bad are left out: no model")
    assert exported(runs, "sft", wanted, bad=True).rows == 2
    assert exported(runs, "jsonl", wanted).rows == 2  # for whoever wants to look at them
    with pytest.raises(AppError, match="no rollout can be written: 1 answers flagged bad"):
        exported(runs, "sft", wanted[1:])


def test_a_set_for_sft_names_its_media_and_leaves_out_what_teaches_nothing(runs):
    made = exported(runs, "sft", chosen((0, 0), (0, 1), (1, 0), (1, 1)))
    assert made.rows == 3
    assert made.left_out == ("run 'a', step 0, group 'g1', answer 1: the answer is empty or truncated: training on "
                             "it would teach the model to stop there",)
    with zipfile.ZipFile(made.path) as archive:
        assert archive.namelist() == [f"media/{0:064x}.png", f"media/{1:064x}.png", "rows.jsonl", "README.txt"]
        archive.extractall(runs / "set")
    rows = read_rows(runs / "set/rows.jsonl", "canonical")
    assert [(row["id"], row["solution"], row["image"]) for row in rows] == [
        ("train-000000", "[1, 2, 3, 4]", f"media/{0:064x}.png"),
        ("train-000000-2", "=cmd|' /C calc'!A0", f"media/{0:064x}.png"),
        ("train-000001", "</script>\u2028é", f"media/{1:064x}.png")]
    assert rows[0]["meta"]["rollout"] == {"run": "a", "step": 0, "group": "g0", "rollout": 0, "reward": 0.5}
    assert rows[0]["boxes"] and rows[0]["width"] == 128


def test_answers_to_several_tasks_and_of_an_evaluation_come_with_a_warning(tmp_path):
    for name, task in (("a", "grounding"), ("b", "digits")):
        file = next((answered(tmp_path / name, ANSWERS).path / "rollouts").iterdir())
        table = pq.read_table(file)
        pq.write_table(table.set_column(table.column_names.index("task"), "task", pa.array([task] * len(table))), file)
    wanted = [*chosen((0, 0)), *chosen((1, 0), run="b")]
    made = exported(tmp_path, "sft", wanted)
    assert made.rows == 2 and made.left_out == ("Beware: these are answers to several tasks (digits, grounding), but "
                                                "`vlrl sft` uses the prompt of one task: export a data set for each",)
    assert exported(tmp_path, "sft", wanted[:1]).left_out == ()
    answered(tmp_path / "c", {"train-000002": ["[1, 2, 3, 4]"]}, split="heldout")
    made = exported(tmp_path, "sft", chosen((0, 0), run="c", source="eval", split="heldout"))
    assert made.rows == 1 and made.left_out[0].startswith("Beware: some answers come from evaluations of heldout")


@pytest.mark.slow
def test_the_commands_of_a_set_run_where_the_task_draws_its_samples(runs, monkeypatch):
    with zipfile.ZipFile(exported(runs, "sft", chosen((0, 0), (1, 0))).path) as archive:
        archive.extractall(runs / "set")
    monkeypatch.chdir(runs / "set")
    check, sft = (line.replace("CONFIG", str(runs / "a/config.yaml")).split()[1:]
                  for line in (runs / "set/README.txt").read_text().splitlines() if line.startswith("    vlrl "))
    assert main(check) == 0 and main([*sft, "steps=1", "rollout.prompts_per_step=2", "eval.samples=2"]) == 0
    trained = RunFolder(runs / "set/runs/sft")
    assert {r["completion"] for r in trained.rollouts(0).to_pylist()} == {"[1, 2, 3, 4]", "</script>\u2028é"}
    assert trained.metrics()[0]["loss"] > 0


def test_media_outside_of_the_run_are_not_packed(tmp_path):
    made_runs.hostile(tmp_path / "runs")
    library = Library(tmp_path / "runs")
    rows = library.folder(library.runs()[0].id).rollouts(3, columns=["group_id", "split", "index"]).to_pylist()
    wanted = [Note(RolloutKey(library.runs()[0].id, "train", r["split"], 3, r["group_id"], r["index"])) for r in rows]
    assert len(wanted) == 14
    try:
        made = exported(tmp_path / "runs", "sft", wanted)
    except AppError:
        return  # nothing of it could be packed
    with zipfile.ZipFile(made.path) as archive:
        *media, rows, readme = archive.namelist()
        assert (rows, readme) == ("rows.jsonl", "README.txt") and media
        archive.extractall(tmp_path / "set")
    for name in media:
        assert Path(name).parent == Path("media")
        load(Media(source=tmp_path / "set" / name), LimitsSettings())


def test_frames_that_were_kept_alone_come_back_as_the_same_video(tmp_path):
    frames = [Image.new("RGB", (32, 24), (40 * i, 10, 255 - 40 * i)) for i in range(6)]
    clip = LoadedMedia(kind="video", frames=tuple(frames), sha256="ab" * 32, timestamps=tuple(i / 2 for i in range(6)))
    run = answered(tmp_path / "a", {"train-000000": ["[1, 2, 3, 4]"]})
    row = run.rollouts(0).to_pylist()[0]
    name = run.write_media(clip)
    sample = {**json.loads(row["sample"]), "video": "clips/7.mp4", "video_start": 3.0, "video_end": 6.0}
    entry = {**row["media"][0], "kind": "video", "path": name, "hash": clip.sha256}
    table = pa.Table.from_pylist([{**row, "sample": json.dumps(sample), "media": [entry]}], store.SCHEMA)
    pq.write_table(table, tmp_path / "a/rollouts/step-000000-rank-00000.parquet")
    made = exported(tmp_path, "sft", chosen((0, 0)))
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(tmp_path / "set")
    found = read_rows(tmp_path / "set/rows.jsonl", "canonical")[0]
    assert found["video"] == f"media/{clip.sha256}.png" and "video_start" not in found and "image" not in found
    back = load(Media(kind="video", source=tmp_path / "set" / found["video"]), LimitsSettings(),
                VideoSampling(fps=2.0, max_frames=16))
    assert back.timestamps == clip.timestamps
    assert all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in zip(back.frames, frames, strict=True))
