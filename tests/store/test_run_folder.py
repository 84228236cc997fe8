"""store/run_folder.py: what is written comes back exactly, and what a kill leaves behind does no harm."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlrl.errors import RunError
from vlrl.store import SCHEMA, RunFolder, as_schema, files
from vlrl.types import Completion, Group, LoadedMedia, Prompt, Rollout, Sample, Turn

# contracts.md, "Files of a run", word for word, then the columns that came later
COLUMNS = """schema, group_id, sample_id, task, index, step, policy_step, split, prompt, completion, token_ids,
loss_mask, logprobs, trainer_logprobs, entropies, ratio, clipped, parts, weights, reward, advantage, parsed, target,
sample, category, difficulty, error, finish_reason, truncated, turns, media, variant, marks,
top_ids, top_logprobs, metrics, correct, episode_id, turn_advantages, opened, extra""".replace("\n", " ").split(", ")


def picture(color="red", size=(6, 4)):
    return Image.new("RGB", size, color)


def rollout(index, length, text="answer", **more):
    completion = Completion(tokens=np.arange(length, dtype=np.int64) + 10 * index, text=text, finish_reason="stop",
                            logprobs=-np.arange(length, dtype=np.float32) / 8, loss_mask=np.ones(length, bool),
                            turns=(Turn(start=0, end=length, media=("aa",)),))
    return Rollout(group_id="g", index=index, completion=completion, policy_step=11,
                   **{"parts": {"iou": 0.1 * index, "judge": None}, "reward": float(index), "advantage": -0.5, **more})


def group(*rollouts, media=(), sample=None, **more):
    sample = sample or Sample(id="s-1", row={"difficulty": 0.25, "category": "animals", "box": [1, 2.5]})
    prompt = Prompt(sample_id=sample.id, text="<|image_pad|>What is it?", ids=np.arange(5), raw_ids=np.arange(3),
                    positions=np.arange(5)[None], media=media, processed_sizes=((28, 56),) * len(media),
                    visual_tokens=(2,) * len(media))
    fields = {"id": "g", "task": "grounding", "split": "train", "sample": sample, "prompt": prompt,
              "rollouts": rollouts, "weights": {"iou": 1.0, "judge": 0.5}, "target": {"box": [1, 2, 3, 4]}}
    return Group(**(fields | more))


def test_schema_and_rollouts_come_back_as_written(tmp_path):
    run = RunFolder(tmp_path)
    image = LoadedMedia(kind="image", frames=(picture(),), sha256="ab12")
    mark = {"kind": "box", "at": [1, 2, float("inf"), 4], "label": "\ud800", "role": "answer"}
    groups = [group(rollout(0, 3, parsed=[1, 2], marks=[mark]), rollout(1, 0, error="boom"), media=(image,)),
              group(rollout(0, 2))]
    per_token = {"entropies": [np.full(3, 0.5), np.zeros(0), np.ones(2)], "clipped": [np.array([1, 0, 1], bool), None,
                                                                                     np.zeros(2, bool)]}
    path = run.write_rollouts(12, 3, groups, per_token)
    assert path == tmp_path / "rollouts/step-000012-rank-00003.parquet"
    assert pq.read_schema(path).names == COLUMNS
    table = run.rollouts(12)
    assert table.schema == SCHEMA and len(table) == 3
    first, second, third = table.to_pylist()
    assert first["token_ids"] == [0, 1, 2] and first["logprobs"] == [0.0, -0.125, -0.25]
    assert first["entropies"] == [0.5] * 3 and first["clipped"] == [True, False, True]
    assert first["ratio"] is None and first["trainer_logprobs"] is None
    assert dict(first["parts"]) == {"iou": 0.0, "judge": None} and dict(first["weights"]) == {"iou": 1.0, "judge": 0.5}
    assert (first["step"], first["policy_step"], first["index"], first["reward"], first["advantage"]) == (
        12, 11, 0, 0.0, -0.5)
    assert json.loads(first["parsed"]) == [1, 2] and json.loads(first["target"]) == {"box": [1, 2, 3, 4]}
    assert json.loads(first["sample"])["box"] == [1, 2.5]
    assert json.loads(first["marks"]) == [{**mark, "at": [1, 2, None, 4]}] and second["marks"] is None
    assert (first["category"], first["difficulty"]) == ("animals", 0.25)
    assert first["turns"] == [{"start": 0, "end": 3, "role": "assistant", "media": ["aa"], **dict.fromkeys(
        ("text", "parts", "state", "done", "seconds", "error", "info", "prompt_ids"))}]
    assert first["media"] == [{"hash": "ab12", "kind": "image", "width": 6, "height": 4, "processed_width": 28,
                               "processed_height": 56, "visual_tokens": 2, "path": "media/ab12.png",
                               "timestamps": None}]
    assert second["token_ids"] == [] and second["error"] == "boom" and second["clipped"] is None
    assert third["entropies"] == [1.0, 1.0] and third["media"] == []
    assert SCHEMA.names == COLUMNS


def test_what_a_method_keeps_of_an_answer_is_stored(tmp_path):
    kept = {"turns": [{"start": 0, "end": 2, "info": {"value": 0.5}}, {"start": 2, "end": 3}], "seed": 7}
    plain = rollout(0, 3, advantage=np.array([1.0, 2.0, -1.0]))
    one, other = (replace(plain, index=i, completion=replace(plain.completion, turns=turns, extra=kept))
                  for i, turns in enumerate([(), plain.completion.turns]))
    run = RunFolder(tmp_path)
    run.write_rollouts(0, 0, [group(one, other, replace(plain, index=2))])
    first, second, third = run.rollouts().to_pylist()
    assert [(t["start"], t["end"], t["info"]) for t in first["turns"]] == [(0, 2, '{"value": 0.5}'), (2, 3, None)]
    assert first["turn_advantages"] == [1.5, -1.0] and json.loads(first["extra"]) == {"seed": 7}
    assert second["turns"] == third["turns"] and second["turn_advantages"] is None
    assert second["extra"] == first["extra"] and third["extra"] is None


def test_training_and_each_split_are_kept_apart(tmp_path):
    run = RunFolder(tmp_path)
    run.write_rollouts(50, 0, [group(rollout(0, 1))])
    path = run.write_rollouts(50, 0, [group(rollout(1, 1))], split="heldout")
    run.write_rollouts(50, 1, [group(rollout(2, 1))], split="heldout")
    run.write_rollouts(50, 0, [group(rollout(3, 1))], split="hard/2024")
    assert path == tmp_path / "eval-rollouts/step-000050-heldout-rank-00000.parquet"
    index = {split: run.rollouts(split=split)["index"].to_pylist() for split in (None, "heldout", "hard/2024", "other")}
    assert index == {None: [0], "heldout": [1, 2], "hard/2024": [3], "other": []}
    assert run.rollouts(49).num_rows == 0 and run.rollouts(columns=["reward"]).column_names == ["reward"]


def test_hostile_text_survives(tmp_path):
    bad = "a\ud800b\x00c\u202e<script>\x1b[31m"
    sample = Sample(id=bad, row={"q": bad, "category": bad, "difficulty": "hard", bad: 1})
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    one = rollout(0, 1, text=bad, parsed={"x": float("nan"), 3: bad, "deep": deep, "set": {1}, "np": np.float32(2)},
                  error=bad, parts={bad: 1.0})
    run = RunFolder(tmp_path)
    run.write_rollouts(0, 0, [group(one, sample=sample, id=bad, target=bad, weights={bad: 1.0})])
    row = run.rollouts().to_pylist()[0]
    shown = bad.replace("\ud800", "\\ud800")
    assert row["completion"] == row["sample_id"] == row["error"] == row["group_id"] == row["category"] == shown
    assert row["difficulty"] is None and row["parts"] == [(shown, 1.0)]
    assert json.loads(row["target"]) == bad and json.loads(row["sample"])["q"] == bad  # JSON gives the surrogate back
    parsed = json.loads(row["parsed"])
    assert parsed["x"] is None and parsed["3"] == bad and parsed["np"] == 2.0


def test_per_token_arrays_that_do_not_fit_are_refused_and_advantages_averaged(tmp_path):
    for per_token, message in (({"entropy": [np.ones(3)]}, "entropy"), ({"entropies": []}, "0 arrays for 1 rollouts"),
                               ({"entropies": [np.ones(2)]}, r"shape \(2,\) for 3 tokens")):
        with pytest.raises(ValueError, match=message):
            RunFolder(tmp_path).write_rollouts(0, 0, [group(rollout(0, 3))], per_token)
    assert not list(tmp_path.rglob("*.parquet"))
    one = rollout(0, 4, reward=None, advantage=np.array([1.0, 2.0, 3.0, 100.0]))
    one.completion.loss_mask[3] = False
    turns = (Turn(start=0, end=1), Turn(start=1, end=4))
    two = replace(one, index=1, completion=replace(one.completion, turns=turns, episode_id="e"))
    run = RunFolder(tmp_path)
    run.write_rollouts(0, 0, [group(one, two)])
    row, episode = run.rollouts().to_pylist()
    assert row["turn_advantages"] is None and episode["turn_advantages"] == [1.0, 2.5]
    assert row["reward"] is None and row["advantage"] == 2.0 and row["loss_mask"] == [True, True, True, False]


def test_unreadable_and_newer_files_are_skipped_with_a_note(tmp_path):
    run = RunFolder(tmp_path)
    run.write_rollouts(0, 0, [group(rollout(0, 2))])
    good = run.write_rollouts(1, 0, [group(rollout(0, 2))])
    folder = tmp_path / "rollouts"
    (folder / "step-000002-rank-00000.parquet").write_bytes(good.read_bytes()[:200])
    (folder / "step-000003-rank-00000.parquet").write_bytes(b"")
    newer = run.rollouts(1).set_column(0, "schema", pa.array([99], pa.int32()))
    pq.write_table(newer, folder / "step-000004-rank-00000.parquet")
    (folder / ".step-000005-rank-00000.parquet.1-1.tmp").write_bytes(b"half")
    (folder / "notes.parquet").write_bytes(b"somebody else's")
    assert run.rollouts()["step"].to_pylist() == [0, 1]
    assert len(run.notes) == 3 and "newer" in run.notes[2] and "step-000002" in run.notes[0]


def test_older_and_compacted_files_are_read_with_turns_of_an_older_run(tmp_path):
    run = RunFolder(tmp_path)
    for step in (3, 4):
        run.write_rollouts(step, 0, [group(rollout(step, 2))])
    both = run.rollouts().drop_columns(["entropies"])
    for file in (tmp_path / "rollouts").iterdir():
        file.unlink()
    pq.write_table(both, tmp_path / "rollouts/steps-000000-000499.parquet")
    assert [run.rollouts(step)["index"].to_pylist() for step in (3, 4)] == [[3], [4]]
    assert run.rollouts()["entropies"].to_pylist() == [None, None]
    names = ("start", "end", "role", "media")
    turn = SCHEMA.field("turns").type.value_type
    fields = {f.name: f for f in (turn.field(i) for i in range(turn.num_fields))}
    old = pa.schema([pa.field("turns", pa.list_(pa.struct([fields[name] for name in names])))])
    row = {"turns": [{"start": 0, "end": 3, "role": "assistant", "media": ["aa"]}]}
    read = as_schema(pa.Table.from_pylist([row], old), [SCHEMA.field("turns"), SCHEMA.field("episode_id")])
    (found,) = read.to_pylist()
    assert found["turns"][0]["media"] == ["aa"] and found["turns"][0]["state"] is found["episode_id"] is None


def test_metrics_lines_of_which_a_half_written_one_is_left_out(tmp_path):
    run = RunFolder(tmp_path)
    run.append_metrics({"step": 0, "loss": float("nan"), "x": np.float32(0.5), "inf": float("inf"), "n": np.int64(3)})
    first = {"step": 0, "loss": None, "x": 0.5, "inf": None, "n": 3}
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    assert run.metrics() == [first] and run.evals() == [] and run.notes == []
    run.append_metrics({"step": 1, "loss": 0.1})
    assert run.metrics() == [first, {"step": 1, "loss": 0.1}] and "line 2" in run.notes[0]


@pytest.mark.parametrize("evaluated, evals", [(True, [0, 2]), (False, [0])])
def test_truncate_goes_back_to_a_checkpoint(tmp_path, evaluated, evals):
    run = RunFolder(tmp_path)
    for step in range(4):
        run.append_metrics({"step": step})
        run.write_rollouts(step, 0, [group(rollout(0, 1))])
    for step in (0, 2, 4):
        run.append_eval({"step": step, "split": "heldout"})
        run.write_rollouts(step, 0, [group(rollout(0, 1))], split="heldout")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 4')
    (tmp_path / "rollouts/.step-000004-rank-00000.parquet.7-7.tmp").write_text("half")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints/.best.json.7-7.tmp").write_text("half")
    run.truncate(2, evaluated=evaluated)
    assert [r["step"] for r in run.metrics()] == [0, 1] == run.rollouts()["step"].to_pylist()
    assert [r["step"] for r in run.evals()] == evals == run.rollouts(split="heldout")["step"].to_pylist()
    assert not list(tmp_path.rglob("*.tmp")) and (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")


def test_truncate_keeps_numbers_exactly(tmp_path):
    run, loss = RunFolder(tmp_path), 0.1 + 0.2
    run.append_metrics({"step": 0, "loss": loss})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    run.truncate(1)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    run.truncate(0, evaluated=False)
    assert run.metrics() == []


def loaded(path):
    return LoadedMedia(kind="image", frames=(Image.open(path).convert("RGB"),), path=path,
                       sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_files_are_copied_byte_for_byte_linked_or_left_out(tmp_path):
    source = tmp_path / "Photo.JPG"
    picture().save(source)
    run, media = RunFolder(tmp_path / "run"), loaded(source)
    name = run.write_media(media)
    assert name == f"media/{media.sha256}.jpg" and (run.path / name).read_bytes() == source.read_bytes()
    before = (run.path / name).stat().st_mtime_ns
    assert RunFolder(run.path).write_media(media) == name and (run.path / name).stat().st_mtime_ns == before
    source = tmp_path / "photo.html"
    picture("lime").save(source, format="PNG")
    run = RunFolder(tmp_path / "other")
    assert run.write_media(loaded(source)).endswith(".png")
    assert len(list((run.path / "media").iterdir())) == 1


def test_link_none_and_a_changed_file(tmp_path):
    source = tmp_path / "photo.png"
    picture("blue").save(source)
    media = loaded(source)
    linked = RunFolder(tmp_path / "linked", media="link")
    assert (linked.path / str(linked.write_media(media))).readlink() == source
    assert RunFolder(tmp_path / "none", media="none").write_media(media) is None
    assert not (tmp_path / "none").exists()
    source.write_bytes(b"<script>not the picture any more</script>")
    copied = RunFolder(tmp_path / "copied")
    with Image.open(copied.path / str(copied.write_media(media))) as stored:
        assert stored.format == "PNG" and stored.getpixel((0, 0)) == (0, 0, 255)


def test_video_of_frames_is_stored_lossless(tmp_path):
    rng = np.random.default_rng(0)
    frames = tuple(Image.fromarray(rng.integers(0, 256, (8, 10, 3), np.uint8)) for _ in range(3))
    media = LoadedMedia(kind="video", frames=frames, sha256="cd", timestamps=(0.0, 0.5, 2.0))
    run = RunFolder(tmp_path)
    with Image.open(tmp_path / str(run.write_media(media))) as stored:
        assert stored.format == "WEBP" and stored.n_frames == 3
        for i, frame in enumerate(frames):
            stored.seek(i)
            assert np.array_equal(np.asarray(stored.convert("RGB")), np.asarray(frame))
            assert stored.info["duration"] == (500, 1500, 1500)[i]  # milliseconds


def test_config_environment_tokenizer_and_heartbeat(tmp_path):
    run = RunFolder(tmp_path / "runs/a")
    assert run.last_heartbeat() == {}
    run.create("steps: 3\n", seed=7)
    assert (run.path / "config.yaml").read_text() == "steps: 3\n"
    env = json.loads((run.path / "env.json").read_text())
    assert env["seed"] == 7 and env["python"] == sys.version.split()[0] and "torch" in env["packages"]
    assert env["hardware"]["cpus"] == os.cpu_count()
    path = run.path / "tokenizer.json"
    run.write_tokenizer('{"ä": 1}')
    before = path.stat().st_mtime_ns
    run.write_tokenizer('{"ä": 1}')
    assert path.stat().st_mtime_ns == before and path.read_text() == '{"ä": 1}'
    run.write_tokenizer("{}")
    assert path.read_text() == "{}"
    run.heartbeat({"step": 3, "steps": 10, "state": "running", "reward": float("nan")})
    beat = run.last_heartbeat()
    assert (beat["step"], beat["pid"], beat["reward"]) == (3, os.getpid(), None) and beat["time"] > 1.7e9


def test_full_disk_is_told_and_leaves_no_half_line(tmp_path):
    code = f"""
import resource
from vlrl.store import RunFolder
from vlrl.errors import RunError
run = RunFolder({str(tmp_path)!r})
run.append_metrics({{"step": 0}})
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
for write in (lambda: run.append_metrics({{"step": 1, "x": "y" * 200}}), lambda: run.heartbeat({{"x": "y" * 200}})):
    try:
        write()
    except RunError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "metrics.jsonl" in done.stdout and "heartbeat.json" in done.stdout and "Free space" in done.stdout
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 0}\n'
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


@pytest.mark.slow
def test_a_folder_that_hosts_do_not_share_is_found_out_and_no_torch_is_loaded(tmp_path):
    found = {"started": "now", "host": "a"}
    writer = threading.Timer(0.1, files.write_text, (tmp_path / "env.json", json.dumps(found)))
    writer.start()
    files.await_shared(tmp_path / "env.json", found)  # shows after a while
    with pytest.raises(RunError, match="is not the folder in which rank 0 wrote"):
        files.await_shared(tmp_path / "env.json", {**found, "host": "b"}, seconds=0.3)
    writer.join()
    code = ("import sys, vlrl.store, vlrl.tools.experiments.report, vlrl.evaluation.stats, vlrl.monitoring.progress; "
            "sys.exit('torch' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
