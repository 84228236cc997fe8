"""app/library.py and details.py: which runs there are, how they stand, a group with all that was stored of it; and
that nothing outside the folder is read."""

import json
import os
import shutil
import time
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.app import made_runs
from vlrl.app import AppError, cards, details, textfiles
from vlrl.app.details import MediaView, decoded, group, with_marks
from vlrl.app.library import Library
from vlrl.store import SCHEMA, RunFolder


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
    lines, library = bare(tmp_path / "a") / "metrics.jsonl", Library(tmp_path)
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
    (tmp_path / "link").symlink_to(bare(tmp_path.parent / f"{tmp_path.name}-outside"), target_is_directory=True)
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


def test_a_run_whose_process_is_gone_is_stale_and_a_pipe_is_no_file(tmp_path):
    bare(tmp_path / "a", state="running", time=time.time())
    assert Library(tmp_path).run("a").state == "stale"
    run = tmp_path / "b"
    run.mkdir()
    os.mkfifo(run / "heartbeat.json")
    os.mkfifo(run / "metrics.jsonl")
    (run / "run.lock").write_text("{}")
    library = Library(tmp_path)
    assert library.run("b").state == "unknown" and library.metrics("b") == [] == library.folder("b").metrics()
    with pytest.raises(AppError, match="is not a folder"):
        Library(tmp_path / "none")


@settings(max_examples=40)
@given(st.one_of(st.text(), st.sampled_from([
    "..", "../boxes", "/etc", "boxes/", "./boxes", "sweep", "boxes/../boxes", "boxes/media", "\0", "a" * 5000, "~",
    "%2e"]), st.integers(), st.none(), st.lists(st.text())), st.one_of(st.text(), st.sampled_from([
        "../boxes-slow/config.yaml", "../../../../../../etc/passwd", "/etc/passwd", "media", "..", "\0", "a" * 5000])))
def test_only_listed_ids_are_runs_and_files_lie_inside(library, id, name):
    if id not in [info.id for info in library.runs()]:
        with pytest.raises(AppError, match="there is no run"):
            library.run(id)
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


def test_two_hundred_runs_are_listed_again_at_once(tmp_path):
    for i in range(200):
        bare(tmp_path / f"sweep-{i % 7}/{i:03d}")
    library = Library(tmp_path)
    first = library.runs()
    assert len(first) == 200 and library.runs() == first
    assert all(a is b for a, b in zip(library.runs(), first, strict=True))  # nothing was read again


def one(tmp_path, made=None, per_token=None, name="a"):
    run = RunFolder(tmp_path / name)
    run.write_rollouts(0, 0, [made or made_runs.made_group("boxes", 1, 0)], per_token)
    return Library(tmp_path), run


def test_every_column_of_the_store_is_there(library):
    view = group(library, "boxes", "train", 2, "train-2-8")
    stored = [r for r in RunFolder(library.root / "boxes").rollouts(2).to_pylist() if r["group_id"] == "train-2-8"]
    assert [r.index for r in view.rollouts] == [0, 1, 2, 3] and len(stored) == 4
    per_token = ("token_ids", "loss_mask", "logprobs", "trainer_logprobs", "entropies", "ratio", "clipped")
    for rollout, row in zip(view.rollouts, stored, strict=True):
        for name in per_token:
            assert np.array_equal(getattr(rollout, name), np.asarray(row[name], getattr(rollout, name).dtype)), name
        for name in ("top_ids", "top_logprobs"):
            assert np.array_equal(np.stack(getattr(rollout, name)), np.asarray(row[name], np.float32)), name
        for name in ("schema", "policy_step", "completion", "reward", "correct", "advantage", "error", "finish_reason",
                     "truncated", "variant"):
            assert getattr(rollout, name) == row[name], name
        assert (rollout.parts, rollout.weights, rollout.metrics) == tuple(
                dict(row[name] or {}) for name in ("parts", "weights", "metrics"))
        assert rollout.extra is row["extra"] is None
        assert rollout.parsed == json.loads(row["parsed"]) and list(rollout.marks) == json.loads(row["marks"])
        assert list(rollout.turns) == row["turns"] and rollout.token_ids.dtype == np.int32
    first = stored[0]
    assert (view.task, view.sample_id, view.category, view.difficulty, view.prompt) == tuple(
        first[name] for name in ("task", "sample_id", "category", "difficulty", "prompt"))
    assert view.target == json.loads(first["target"]) and view.sample == json.loads(first["sample"])
    assert view.weights == dict(first["weights"]) and view.key.split == "train" and view.notes == ()
    of_group = {"schema", "group_id", "sample_id", "task", "step", "split", "prompt", "target", "sample", "category",
                "difficulty", "media", "index"}
    assert set(SCHEMA.names) - of_group <= {*per_token, *vars(view.rollouts[0])}


def test_statistics_leave_out_what_is_not_scored_or_set_aside_and_what_a_method_kept_is_shown(tmp_path):
    made = made_runs.made_group("boxes", 0, 0, size=4)
    first, *others = (replace(r, reward=w) for r, w in zip(made.rollouts, (1.0, None, 0.0, 0.5), strict=True))
    first = replace(first, completion=replace(first.completion, extra={"hint": "<b>look"}))
    aside = (replace(made.rollouts[0], index=4, reward=100.0, variant="noise"),)
    library, _ = one(tmp_path, replace(made, rollouts=(first, *others), aside=aside))
    view = group(library, "a", "train", 0, made.id)
    assert (view.mean, view.std, view.best, view.worst, view.zero_variance) == (0.5, 0.5, 1.0, 0.0, False)
    assert [r.aside for r in view.rollouts] == [False] * 4 + [True] and view.rollouts[4].advantage is None
    assert [r.extra for r in view.rollouts][:2] == [{"hint": "<b>look"}, None]
    shown = [str(cards._parsed(view, r)) for r in view.rollouts]
    assert "Kept by its method" in shown[0] and "&lt;b&gt;look" in shown[0] and "Kept by" not in shown[1]


def test_what_is_not_there_is_said_and_media_have_sizes(library):
    for asked, words in (
            (("boxes", "train", 0, "none"), "no group 'none'"), (("boxes", "train", 99, "train-0-0"), "step 99"),
            (("boxes", "eval", 0, "heldout-0-100", "other"), "split 'other'"), (("boxes", "x", 0, "y"), "one of train"),
            (("../boxes", "train", 0, "train-0-0"), "no run"), (("boxes", "train", "x", "train-0-0"), "no group"),
            (("boxes", "train", None, None), "no group"), (("boxes", "train", 0, "\ud800"), "no group")):
        with pytest.raises(AppError, match=words):
            group(library, *asked)
    [clip] = group(library, "sweep/clips", "train", 1, "train-1-5").media
    assert (clip.kind, clip.size, clip.processed_size, clip.visual_tokens) == ("video", (160, 120), (168, 112), 24)
    assert clip.timestamps == tuple(i / 2 for i in range(8)) and (library.root / "sweep/clips" / clip.name).is_file()
    two = group(library, "boxes", "train", 1, "train-1-4").media
    assert len(two) == 2 and all(isinstance(m, MediaView) and m.kind == "image" for m in two)


@settings(max_examples=8)
@example("\ud800")
@given(st.text(alphabet=st.characters(exclude_categories=[]), max_size=40))
def test_group_and_sample_ids_may_hold_any_character(tmp_path_factory, text):
    made = made_runs.made_group("boxes", 1, 0)
    library, _ = one(tmp_path_factory.mktemp("ids"), replace(made, id=text, sample=replace(made.sample, id=text)))
    view = group(library, "a", "train", 0, text)
    assert view.sample_id == view.key.group == text.encode("utf-8", "backslashreplace").decode()


def test_a_group_in_a_file_of_many_steps(tmp_path):
    run = RunFolder(tmp_path / "a")
    for step in range(6):
        run.write_rollouts(step, 0, [made_runs.made_group("boxes", i, step) for i in range(2)])
    table = run.rollouts()
    for file in (run.path / "rollouts").iterdir():
        file.unlink()
    pq.write_table(table, run.path / "rollouts/steps-000000-000499.parquet", row_group_size=10)
    library = Library(tmp_path)
    for step in (0, 3, 5):
        view = group(library, "a", "train", step, f"train-{step}-1")
        assert [r.index for r in view.rollouts] == [0, 1, 2, 3] and view.key.step == step
    with pytest.raises(AppError):
        group(library, "a", "train", 6, "train-5-1")


def test_groups_of_one_name_are_told_apart_by_split_and_source(tmp_path):
    run = RunFolder(tmp_path / "a")
    for split in ("easy", "hard"):
        run.write_rollouts(3, 0, [replace(made_runs.made_group("boxes", 1, 3, split=split), id="g")], split=split)
    library = Library(tmp_path)
    assert [group(library, "a", "eval", 3, "g", split).key.split for split in ("", "easy", "hard")] == [
        "easy", "easy", "hard"]
    with pytest.raises(AppError, match="train rollouts"):
        group(library, "a", "train", 3, "g")


def rewritten(run, **columns):
    path = run.path / "rollouts/step-000000-rank-00000.parquet"
    rows = [{**row, **columns} for row in pq.read_table(path).to_pylist()]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path)
    return rows[0]["group_id"]


def test_columns_that_do_not_fit_are_left_out_with_a_note(tmp_path, monkeypatch):
    library, run = one(tmp_path)
    name = rewritten(run, entropies=[0.5], ratio=None, clipped=[None] * 3, weights=None, parts=None, media=[None],
                     turns=[None], parsed="{broken", sample="[1]", target="[" * 100_000, difficulty=float("nan"))
    view = group(library, "a", "train", 0, name)
    first = view.rollouts[0]
    assert first.entropies is None and first.ratio is None and first.clipped is None and len(view.notes) == 8
    assert "answer 0: entropies has 1 values for" in view.notes[0] and view.media == () and first.turns == ()
    assert (first.parsed, view.sample, view.difficulty, first.parts) == ("{broken", {"sample": [1]}, None, {})
    assert view.target == "[" * 100_000
    rewritten(run, token_ids=[None, 5], logprobs=[None, -1.0], loss_mask=[None, True], trainer_logprobs=None,
              entropies=None, ratio=None, clipped=None, top_ids=[None, [1, None]], top_logprobs=[[], [-0.5]])
    first = group(library, "a", "train", 0, name).rollouts[0]
    assert first.token_ids.tolist() == [0, 5] and first.loss_mask.tolist() == [False, True]
    assert np.isnan(first.logprobs[0])
    assert [len(ids) for ids in first.top_ids] == [0, 2] and first.top_logprobs[1].tolist() == [-0.5]
    monkeypatch.setattr(details, "MOST_ANSWERS", 3)  # a huge group is read in part
    view = group(library, "a", "train", 0, name)
    assert len(view.rollouts) == 3 and "only the first 3 answers" in view.notes[-1]


def test_marks_and_json_are_decoded_safely():
    for text, kept in (
            ("null", ()), ("{}", ()), ("[1, null, {}]", ({},)), ("broken", ()), ("[" * 50_000, ()),
            ('[{"kind": "box", "at": [1, NaN, 1e999, 4]}]', ({"kind": "box", "at": [1, None, None, 4]},)),
            ('[{"at": [[[[[[[1]]]]]]]}]', ({"at": [[[[[[None]]]]]]},)),
            (json.dumps([{"at": list(range(9000))}]), ({"at": list(range(4000))},)),
            (json.dumps([{"n": i} for i in range(3000)]), tuple({"n": i} for i in range(1000)))):
        assert details._marks(text) == kept, text[:50]
    deep = decoded("[" * 900 + "]" * 900)
    for _ in range(50):
        deep = deep[0]
    assert deep == "…" and decoded(None) is None and decoded("x" * 5_000_000) == "x" * 1000 + "…"


def test_code_named_in_a_config_runs_only_when_trusted(tmp_path):
    made = made_runs.made_group("boxes", 1, 0)
    library, run = one(tmp_path, replace(made, rollouts=tuple(replace(r, marks=None) for r in made.rollouts)))
    code = tmp_path / "own.py"
    code.write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nfrom vlrl.task import Task\nclass Own(Task):\n"
                    "    def overlay(self, sample, parsed): return [{'kind': 'point', 'at': [1, float('nan')]}]\n")
    (run.path / "config.yaml").write_text(f"task: {{name: '{code}:Own'}}\n")
    view = group(library, "a", "train", 0, made.id)
    assert with_marks(library, view) is view and not (tmp_path / "ran").exists()
    assert with_marks(library, view, trust=True).rollouts[0].marks == ({"kind": "point", "at": [1, None]},)
    (run.path / "config.yaml").write_text("task: {name: 'no.such.module:Own'}\n")
    assert "draws no marks" in with_marks(Library(tmp_path), view, trust=True).notes[-1]
