"""Where a run goes on: a folder that lost something is told from one that never had it."""

import json
import shutil

import numpy as np
import pytest

from vlrl import config
from vlrl.errors import ConfigError, RunError
from vlrl.store import RunFolder, checkpoint
from vlrl.task.loading import load_class, notebook_warning
from vlrl.training import resume
from vlrl.training.build import check_launcher

WORDS = ("save.every=2", "eval.every=2", "steps=4")


def settings(path, *words):
    return config.load("configs/quickstart.yaml", [*WORDS, f"run.dir={path}", *words])


@pytest.fixture
def made(tmp_path):
    """A folder of four completed steps, with checkpoints of two and of four."""
    folder, own = RunFolder(tmp_path / "run"), settings(tmp_path / "run")
    folder.create(config.dump(own), own.seed)
    for step in range(4):
        folder.append_metrics({"step": step})
        folder.write_rollouts(step, 0, [])
    for step in (0, 2, 4):
        folder.append_eval({"step": step, "split": "heldout"})
    for step in (2, 4):
        checkpoint.save(folder.checkpoints, step, lambda path: (path / "model.safetensors").write_bytes(b"w" * 9),
                        {"done": step}, 9, config.fixed_settings(own))
    folder.heartbeat({"step": 4, "saved": 4, "state": "finished"})
    return folder


def tree(folder):
    return {str(p.relative_to(folder.path)): (p.stat().st_mtime_ns, p.read_bytes())
            for p in folder.path.rglob("*") if p.is_file()}


def cut(folder):
    for path in folder.checkpoints.glob("*/model.safetensors"):
        path.write_bytes(b"w")


def gone(folder):
    shutil.rmtree(folder.checkpoints)


def renamed(folder):
    shutil.rmtree(folder.checkpoints / "step-000002")
    (folder.checkpoints / "step-000004").rename(folder.checkpoints / "step-000003")


def only_rollouts(folder):
    gone(folder)
    for name in ("metrics.jsonl", "eval.jsonl", "heartbeat.json"):
        (folder.path / name).unlink()


def only_metrics(folder):
    gone(folder)
    shutil.rmtree(folder.path / "rollouts")
    for name in ("eval.jsonl", "heartbeat.json", "config.yaml"):
        (folder.path / name).unlink()


@pytest.mark.parametrize("damage", [cut, gone, renamed, only_rollouts, only_metrics])
def test_completed_steps_without_a_checkpoint_are_not_started_over(made, damage):
    damage(made)
    before = tree(made)
    for words in ((), ("resume=must",), ("seed=5", "train.lr=1e-3")):
        with pytest.raises(RunError, match=r"no complete checkpoint.*Nothing was changed.*resume=never"):
            resume.find_checkpoint(made, settings(made.path, *words))
        assert tree(made) == before, words


def test_what_was_never_saved_is_begun_again_and_an_empty_folder_is_a_new_run(tmp_path):
    folder, own = RunFolder(tmp_path), settings(tmp_path)
    folder.heartbeat({"step": 1, "saved": 0, "state": "running"})
    folder.append_metrics({"step": 0})
    (tmp_path / "checkpoints" / ".tmp-step-000002-77").mkdir(parents=True)  # killed while the first was written
    latest = resume.find_checkpoint(folder, own)
    assert latest.path is None and "step 0 of" in latest.warnings[0] and "had not been saved" in latest.warnings[0]
    with pytest.raises(RunError, match="resume=never"):
        resume.find_checkpoint(folder, settings(tmp_path, "resume=must"))


def test_an_empty_folder_is_a_new_run(tmp_path):
    assert resume.find_checkpoint(RunFolder(tmp_path), settings(tmp_path)) == (None, ())
    RunFolder(tmp_path).heartbeat({"step": 0, "state": "running"})  # of a start that ended before its first step
    RunFolder(tmp_path).append_eval({"step": 0, "split": "heldout"})
    assert resume.find_checkpoint(RunFolder(tmp_path), settings(tmp_path)) == (None, ())
    with pytest.raises(RunError, match=r"has no complete checkpoint\. Start with resume=auto"):
        resume.find_checkpoint(RunFolder(tmp_path), settings(tmp_path, "resume=must"))


def lines(name, keep):
    def damage(folder):
        path = folder.path / name
        path.write_text("".join(line for line in path.read_text().splitlines(True) if keep(json.loads(line))))
    return damage


@pytest.mark.parametrize("damage, said", [
    (lines("metrics.jsonl", lambda line: line["step"] < 2), "metrics.jsonl has no line of 2 completed steps (2 to 3)"),
    (lines("metrics.jsonl", lambda line: line["step"] != 1), "metrics.jsonl has no line of step 1,"),
    (lambda folder: (folder.path / "metrics.jsonl").unlink(), "metrics.jsonl has no line of 4 completed steps"),
    (lambda folder: shutil.rmtree(folder.path / "rollouts"), "rollouts/ has no file of 4 completed steps"),
    (lambda folder: (folder.path / "eval.jsonl").unlink(), "eval.jsonl has no evaluation of heldout before"),
    (lambda folder: shutil.rmtree(folder.checkpoints / "step-000004"), ""),  # what came later is done again
    (lambda folder: folder.append_metrics({"step": 9}), ""),
], ids=lambda value: value or "-" if isinstance(value, str) else "")
def test_what_is_missing_at_a_resume_is_said(made, damage, said):
    damage(made)
    latest = resume.find_checkpoint(made, settings(made.path))
    assert latest.path and (not latest.warnings if not said else said in " ".join(latest.warnings))


def test_a_checkpoint_of_another_run_is_refused(made, tmp_path):
    other = settings(tmp_path / "other", "seed=9")
    checkpoint.save(made.checkpoints, 4, lambda path: (path / "model.safetensors").write_bytes(b"o"), {}, 9,
                    config.fixed_settings(other))
    with pytest.raises(RunError, match=r"step-000004 belongs to another run:\n  seed: 9 -> 0\n.*resume=never"):
        resume.find_checkpoint(made, settings(made.path))


def test_settings_that_a_checkpoint_lacks_are_no_difference(made):
    """Of one of an earlier version some are unknown, or all."""
    kept, own = checkpoint.settings_of(made.checkpoints / "step-000004"), made.path / "own"
    assert kept["seed"] == 0 and "steps" not in kept and np.isclose(kept["train.lr"], 2e-4)
    checkpoint.save(own, 4, lambda path: None, {}, 1, {k: v for k, v in kept.items() if k != "train.lr"})
    resume.refuse_other_run(own / "step-000004", settings(made.path))
    path = made.checkpoints / "step-000004" / "manifest.json"
    path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != "settings"}))
    assert resume.find_checkpoint(made, settings(made.path)).step == 4


def test_half_of_what_a_launcher_sets():
    whole = {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "1", "MASTER_ADDR": "h"}
    for environ in ({}, {"WORLD_SIZE": "1"}, whole):
        check_launcher(environ)
    for keys, missing in ((1, "RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT are"), (4, "MASTER_ADDR is")):
        with pytest.raises(ConfigError, match=f"WORLD_SIZE=2 .*{missing} not set.*torchrun"):
            check_launcher(dict([*whole.items()][:keys]))


def test_a_task_of_a_notebook_is_told_and_its_error_says_what_to_do():
    assert notebook_warning("grounding") == notebook_warning("a.py:Shades") == ""
    assert "cannot load it: write it to a file" in notebook_warning("__main__:Shades")
    with pytest.raises(ConfigError, match=r"has no Task class 'Shades'.*task=path/file.py:Shades"):
        load_class("__main__:Shades")
