"""A run at rest, with parts made by hand: what an emergency checkpoint holds, and when there must be none."""

import json
from types import SimpleNamespace

import pytest
import torch

from vlrl.config.schema import SaveSettings
from vlrl.errors import RunError
from vlrl.store import checkpoint
from vlrl.store.lock import NoLock
from vlrl.training import emergency_checkpoint
from vlrl.training.checkpointing import Saver
from vlrl.training.emergency_checkpoint import EmergencyCheckpoint


class Scene:
    """Two steps are completed, the rollouts of the second are on disk, and three prompts were drawn."""

    def __init__(self, path):
        self.path, self.drawn, self.lock = path, 3, NoLock()
        self.weight = torch.nn.Parameter(torch.tensor([2.0]))
        self.optimizer = torch.optim.SGD([self.weight], lr=1.0, momentum=0.5)
        policy = SimpleNamespace(shards=None, swapped=False, updating=False, save=self.save,
                                 trainable=lambda: [("w", self.weight)],
                                 copied_weights=lambda: {"w": self.weight.detach().clone()}, copied_head=dict,
                                 scaler=SimpleNamespace(state_dict=lambda: {"scale": 8.0}))
        algorithm = SimpleNamespace(moves_reference=False, state_dict=lambda policy: {"kl_coef": {"value": 0.25}})
        config = SimpleNamespace(save=SaveSettings(), store=SimpleNamespace(rollouts=True))
        parts = SimpleNamespace(config=config, policy=policy, algorithm=algorithm, optimizer=self.optimizer,
                                source=SimpleNamespace(at_rest=lambda: ({"drawn": self.drawn}, None)))
        self.saver = Saver(path / "checkpoints", config.save)
        self.saver.start()
        self.rest = EmergencyCheckpoint(parts, path, self.lock, self.saver, 2)
        self.wrote(1)

    def save(self, path, weights=None, head=None):
        values = weights or {"w": self.weight.detach()}
        (path / "weights.json").write_text(json.dumps({name: w.tolist() for name, w in values.items()}))

    def wrote(self, step, rank=0):
        file = self.path / "rollouts" / f"step-{step:06d}-rank-{rank:05d}.parquet"
        file.parent.mkdir(exist_ok=True)
        file.touch()

    def learn(self):
        self.weight.grad = torch.ones(1)
        self.optimizer.step()

    def end(self, error=None):
        """The notes of the error by which the run ends."""
        error = error or ValueError("the scorer is broken")
        self.rest.end(error)
        return getattr(error, "__notes__", [])

    def steps(self):
        return [checkpoint.step_of(path) for path in checkpoint.complete_checkpoints(self.saver.folder)]


@pytest.fixture
def scene(tmp_path, monkeypatch):
    monkeypatch.setattr(emergency_checkpoint, "_ROLLOUTS_S", 0.0)
    scene = Scene(tmp_path)
    yield scene
    scene.saver.settle()
    scene.saver.close()


def test_the_completed_steps_are_saved_as_they_were_before_the_next_one_drew(scene):
    scene.rest.keep()
    scene.drawn = 5  # the step that fails has drawn
    (note,) = scene.end()
    assert note.startswith("The 2 completed steps are saved in") and scene.steps() == [2]
    path = scene.saver.folder / "step-000002"
    state = checkpoint.load_state(path)
    assert state["source"] == {"drawn": 3} and state["scaler"] == {"scale": 8.0}
    assert state["algorithm"] == {"kl_coef": {"value": 0.25}} and state["optimizer"]["param_groups"][0]["lr"] == 1.0
    assert json.loads((path / "weights.json").read_text()) == {"w": [2.0]}


def test_a_copy_of_an_earlier_step_is_forgotten(scene):
    scene.rest.keep()
    scene.drawn = 5
    scene.learn()
    scene.wrote(2)
    scene.rest.completed(3)  # and fails before the next copy
    assert scene.end()[0].startswith("The 3 completed steps are saved in") and scene.steps() == [3]
    assert checkpoint.load_state(scene.saver.folder / "step-000003")["source"] == {"drawn": 5}
    assert json.loads((scene.saver.folder / "step-000003/weights.json").read_text()) == {"w": [1.0]}


def test_what_cannot_be_saved_whole_is_not_saved(scene):
    scene.rest.keep()
    scene.learn()
    (note,) = scene.end()
    assert note.startswith("2 of the 2 completed steps are lost, since the next update had already")
    assert not scene.rest.begin() and scene.steps() == []


def test_weights_that_are_others_for_the_time_being_are_not_saved(scene):
    scene.rest.parts.policy.swapped = True
    assert "could not be swapped back" in scene.end()[0] and scene.steps() == []


def test_a_folder_that_was_taken_over_gets_no_checkpoint(scene, monkeypatch):
    def check():
        raise RunError("the folder was taken over")
    monkeypatch.setattr(scene.lock, "check", check)
    assert "the folder was taken over" in scene.end()[0] and scene.steps() == []


@pytest.mark.parametrize("ranks, written, saved", [
    (1, (0,), True), (1, (), False), (2, (0,), False), (2, (0, 1), True)])
def test_a_checkpoint_has_the_rollouts_of_every_rank(scene, monkeypatch, ranks, written, saved):
    monkeypatch.setattr(emergency_checkpoint.comm, "world", lambda: ranks)
    for file in (scene.path / "rollouts").iterdir():
        file.unlink()
    for rank in written:
        scene.wrote(1, rank)
    assert ("the rollouts of step 1 are not on disk" in scene.end()[0]) != saved
    assert scene.steps() == [2] * saved


def test_what_failed_to_be_saved_is_not_saved_again(scene, monkeypatch):
    def full(path, weights=None, head=None):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(scene.rest.parts.policy, "save", full)
    scene.saver.begin(2, scene.rest.parts.policy, {})
    with pytest.raises(RunError, match="No space left") as raised:
        scene.saver.wait()
    monkeypatch.undo()
    assert not scene.saver.has(2) and scene.end(raised.value) == [] and scene.steps() == []


def test_a_signal_finds_the_completed_steps(scene):
    assert not scene.rest.begin()  # nothing is kept of them yet
    scene.rest.keep()
    scene.drawn = 5
    assert scene.rest.begin()
    scene.learn()
    scene.saver.wait()
    assert scene.steps() == [2] and not scene.rest.begin()
    assert checkpoint.load_state(scene.saver.folder / "step-000002")["source"] == {"drawn": 3}
    assert json.loads((scene.saver.folder / "step-000002/weights.json").read_text()) == {"w": [2.0]}
