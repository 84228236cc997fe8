"""A run that ends by an error saves the completed steps, and goes on as if nothing had been."""

import json
import os
import signal
import subprocess
import threading
import time

import pytest
import torch

from tests import huge
from tests.e2e.faulty import STEPS, small_disk, write
from tests.e2e.runs import metrics
from vlrl import config
from vlrl.errors import DataError, RunError, TaskError, TrainingError
from vlrl.models.sharding.fsdp import decoder_layers
from vlrl.monitoring.watchdog import Stuck
from vlrl.store import RunFolder, checkpoint, trainer_state
from vlrl.training import loop, update

pytestmark = pytest.mark.slow


class Scene:
    """A config, and runs of it."""

    def __init__(self, folder, model):
        self.config, self.folder, self._whole = write(folder, model), folder, {}

    def start(self, path, *words):
        return loop.train(config.load(self.config, [f"run.dir={path}", *words]))

    def whole(self, *words):
        """The folder of a run that nothing disturbs, which saves after every step."""
        if words not in self._whole:
            path = self.folder / f"whole-{len(self._whole)}"
            self._whole[words] = self.start(path, "save.every=1", *words).folder.path
        return self._whole[words]

    def same(self, path, *words):
        """The same command ends as the undisturbed run did; what was saved is what that one saved."""
        whole, saved = self.whole(*words), files(path)
        assert {name: files(self.whole(*words))[name] for name in saved} == saved
        self.start(path, *words)
        assert files(path)[f"step-{STEPS:06d}"] == files(whole)[f"step-{STEPS:06d}"]
        assert metrics(path) == metrics(whole)
        assert RunFolder(path).rollouts().equals(RunFolder(whole).rollouts())


def files(run):
    """By checkpoint: the sha256 of the weights, and the trainer's state."""
    found = {}
    for path in sorted(run.glob("checkpoints/step-*")):
        tree, tensors = trainer_state.view(checkpoint.load_state(path))
        manifest = json.loads((path / "manifest.json").read_text())["files"]
        found[path.name] = ({name: entry for name, entry in manifest.items() if not name.startswith("trainer_state")},
                            tree, {name: (t.dtype, t.shape, t.numpy().tobytes()) for name, t in tensors.items()})
    return found


@pytest.fixture(scope="module")
def scene(tiny_models, tmp_path_factory):
    return Scene(tmp_path_factory.mktemp("rest") / "scene", tiny_models["qwen3_vl"])


@pytest.fixture
def fault(monkeypatch):
    monkeypatch.setenv("FAULT", "")
    return lambda name: monkeypatch.setenv("FAULT", name)


def saved(error, path, done=2):
    """The error says what was saved, and that is what there is."""
    (note,) = error.value.__notes__
    assert note == (f"The {done} completed steps are saved in {path}/checkpoints/step-{done:06d}; the same command "
                    "resumes from there.")
    assert [*files(path)] == [f"step-{done:06d}"]


def lost(error, path, why):
    (note,) = error.value.__notes__
    assert note.startswith(f"2 of the 2 completed steps are lost, since {why}"), note
    assert not files(path)


AHEAD = ("extends=algorithms/decoupled_ppo.yaml", "rollout.minibatches=1")
ALONE = ("limits.score_s=0", "rollout.score_ahead=false")
FAULTS = {
    "too many answers fail to score": ("raises", TrainingError, ()),
    "a task that breaks its contract, without a copy": ("part", TaskError, ("save.background=false",)),
    "code in an evaluation": ("summary", MemoryError, ("eval.samples=2", "eval.every=2")),
    "nothing happens": ("sleeps", Stuck, (*ALONE, "limits.stuck_s=20")),
    "NaN": ("huge", TrainingError, (huge.ADVANTAGE, "limits.nonfinite_steps=0")),
    "drawn ahead": ("raises", TrainingError, (*AHEAD, "async.max_staleness=1")),
    "two steps drawn ahead, the thread fails": ("part", TaskError, (*AHEAD, "async.max_staleness=2")),
    "weights that forget": ("raises", TrainingError, ("rollout.forget.lr=0.01", "algo.correction=token_truncate",
                                                           "rollout.group_size=4")),
    "two optimizer steps, a reference that moves": ("raises", TrainingError, (
        "algo.reference={name: ema, decay: 0.5, every: 1}", "algo.kl_coef=0.1", "rollout.minibatches=2")),
    "a reference that moves under an adapter": ("raises", TrainingError, (
        "algo.reference={name: ema, decay: 0.5, every: 1}", "algo.kl_coef=0.1", "model.lora.rank=2")),
    "answers that go on": ("raises", TrainingError, ("rollout.step_tokens=4",)),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_before_the_update_loses_nothing(scene, tmp_path, fault, name):
    how, kind, words = FAULTS[name]
    fault(f"{how}:{tmp_path}/run/metrics.jsonl" if how == "summary" else how)
    with pytest.raises(kind) as error:
        scene.start(tmp_path / "run", *words)
    saved(error, tmp_path / "run", 3 if name == "answers that go on" else 2)  # every second step has whole groups
    fault("")
    scene.same(tmp_path / "run", *words)


def test_after_the_first_optimizer_step_the_message_says_what_is_lost(scene, tmp_path, fault):
    """NaN in one of two mini-batches: in the first one nothing is lost, in the second one two steps are."""
    words = (huge.ADVANTAGE, "limits.nonfinite_steps=0", "rollout.minibatches=2")
    asked = dict.fromkeys(row["sample_id"] for row in RunFolder(scene.whole(*words)).rollouts(2).to_pylist())
    ends = []
    for i, sample in enumerate(asked):
        fault(f"huge:{sample}")
        with pytest.raises(TrainingError, match="the loss is not finite") as error:
            scene.start(tmp_path / f"{i}", *words)
        ends.append((error, tmp_path / f"{i}"))
    (intact, folder), (begun, other) = sorted(ends, key=lambda end: not files(end[1]))
    saved(intact, folder)
    lost(begun, other, "the next update had already changed the weights. The same command starts again "
                       "with the first step.")
    fault("")
    for path in (folder, other):
        scene.same(path, *words)


def test_memory_that_does_not_suffice_for_one_answer(scene, tmp_path, monkeypatch):
    """A real refusal of the allocator in every backward pass of the third step."""
    def updates(policy, optimizer, groups, config, step, algorithm, *more):
        if step == 2:
            decoder_layers(policy.base)[0].register_full_backward_pre_hook(lambda *_: torch.empty(2**50))
        return update.update(policy, optimizer, groups, config, step, algorithm, *more)
    monkeypatch.setattr(loop, "update", updates)
    with pytest.raises(TrainingError, match="out of memory in the update on a single completion") as error:
        scene.start(tmp_path / "run")
    saved(error, tmp_path / "run")
    monkeypatch.undo()
    scene.same(tmp_path / "run")


def test_the_media_vanish(scene, tmp_path, fault):
    pictures = scene.folder / "pictures"
    scene.whole()
    fault(f"media:{pictures}")  # when the third step is scored
    with pytest.raises(DataError, match="does not exist") as error:
        scene.start(tmp_path / "run")
    fault("")
    for path in pictures.glob("*.gone"):
        path.rename(path.with_suffix(".png"))
    saved(error, tmp_path / "run", 3)
    scene.same(tmp_path / "run")


def test_a_step_that_is_given_up(scene, tmp_path, fault):
    """By a signal, in a step that is too short for what was completed to be saved when it came."""
    fault(f"wait:{tmp_path}")
    def press():
        end = time.monotonic() + 300
        while not (tmp_path / "waiting").exists() and time.monotonic() < end:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)  # given up after save.grace
    thread = threading.Thread(target=press)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as error:
        scene.start(tmp_path / "run", *ALONE, "save.grace=1")
    thread.join()
    saved(error, tmp_path / "run")
    fault("")
    scene.same(tmp_path / "run", *ALONE)


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "20m") as path:
        yield path


def test_a_full_disk_does_not_hide_the_error(scene, disk, fault):
    fault("raises")
    subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
    with pytest.raises(TrainingError, match="rollouts failed to score") as error:
        scene.start(disk / "run")
    lost(error, disk / "run", "saving them failed: cannot save checkpoint")
    subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
    fault("")
    scene.same(disk / "run")


def test_an_error_of_the_saving_is_told_once(scene, disk):
    subprocess.run(["mount", "-o", "remount,size=1m", str(disk)], check=True)
    with pytest.raises(RunError, match="cannot save checkpoint") as error:
        scene.start(disk / "run", "save.every=1")
    assert not hasattr(error.value, "__notes__")


def test_before_the_first_step_is_completed_nothing_is_said(scene, tmp_path):
    with pytest.raises(TrainingError, match="drawn prompts were rejected") as error:
        scene.start(tmp_path / "run", "limits.prompt_tokens=9")
    assert not hasattr(error.value, "__notes__") and not files(tmp_path / "run")
