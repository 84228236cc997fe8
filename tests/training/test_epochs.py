"""epochs in place of steps: read from files and overrides, turned into steps by the rows, kept in config.yaml; and the
default of gradient checkpointing."""

import json

import pytest
import yaml
from PIL import Image

from tests.tables import each
from vlrl import config
from vlrl.errors import ConfigError
from vlrl.tools.machine import dryrun
from vlrl.training import epochs, loop

ROWS = 10


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with ROWS rows of counting and a config of 1.5 epochs over them."""
    Image.new("RGB", (64, 64), (200, 50, 90)).save(tmp_path / "a.png")
    rows = [{"id": f"r{i}", "image": "a.png", "question": "How many?", "answer": str(i), "answer_type": "count"}
            for i in range(ROWS)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "long.yaml").write_text("extends: tiny.yaml\ntask: qa\ndata: {train: rows.jsonl}\nepochs: 1.5\n"
                                        "rollout: {prompts_per_step: 4, group_size: 2, max_new_tokens: 2}\n"
                                        "eval: {samples: 0}\nsave: {best: ''}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@each("words steps found", [
    ([], 100, 1.5), (["epochs=3"], 100, 3), (["steps=7"], 7, None), (["epochs=null"], 100, None),
])
def test_a_later_length_replaces_an_earlier_one(place, words, steps, found):
    loaded = config.load("long.yaml", words)
    assert (loaded.steps, loaded.epochs) == (steps, found)  # steps wait for the rows


def test_both_in_one_place_are_an_error(place):
    (place / "both.yaml").write_text("extends: long.yaml\nsteps: 5\nepochs: 2\n")
    (place / "stage.yaml").write_text("extends: long.yaml\nstages:\n- {name: a, kind: rl, steps: 5, epochs: 2}\n")
    for load in (lambda: config.load("both.yaml"), lambda: config.load("stage.yaml"),
                 lambda: config.load("long.yaml", ["steps=5", "epochs=2"]),
                 lambda: config.load_config("long.yaml", steps=5, epochs=2)):
        with pytest.raises(ConfigError, match=r"steps=5 and epochs=2 both set the length of the run: remove one"):
            load()
    (place / "later.yaml").write_text("extends: long.yaml\nsteps: 5\n")
    assert config.load("later.yaml").epochs is None and config.load("later.yaml", ["epochs=1"]).epochs == 1
    own = dict(enumerate(config.stages_of(config.load("long.yaml", [
        "stages=[{name: a, kind: sft, epochs: 2}, {name: b, kind: rl, steps: 4}, {name: c, kind: rl}]"]))))
    assert [(own[i][1].epochs, own[i][1].steps) for i in (0, 1, 2)] == [(2, 100), (None, 4), (1.5, 100)]
    (place / "two.yaml").write_text("extends: long.yaml\nstages:\n- {name: a, kind: rl, steps: 5}\n"
                                    "- {name: b, kind: rl, epochs: 2, times: {epochs: 0.5}}\n")
    assert [one.epochs for _, one in config.stages_of(config.load("two.yaml", ["epochs=8"]))] == [8, 4]
    with pytest.raises(ConfigError, match=r"stages.0 \(a\): times.steps=2: the length is epochs=1.5. Use times="):
        config.load("long.yaml", ["stages=[{name: a, kind: rl, times: {steps: 2}}]"])


@each("passes per_step steps", [(1.5, 4, 4), (1, 10, 1), (0.01, 4, 1), (3, 7, 5)])
def test_steps_are_rounded_up(place, passes, per_step, steps):
    loaded = config.load("long.yaml", [f"epochs={passes}", f"rollout.prompts_per_step={per_step}"])
    assert epochs.length_of(loaded) == (steps, ROWS)
    found = dryrun.check(loaded)
    many = f"{steps} step{'s' * (steps > 1)}"
    assert found.length == [f"epochs={passes:g}: {many} of {per_step} prompts, for {ROWS} training rows"]


def test_what_an_epoch_means_for_other_samplers_is_said(place):
    loaded = config.load("long.yaml", [
        "task=null", "tasks=[{name: qa, label: a, weight: 2}, {name: qa, label: b}]", "curriculum=sec",
        "curriculum.keep=mixed", "epochs=1"])
    loaded = epochs.with_length(loaded, epochs.length_of(loaded))
    said = " ".join(epochs.length_lines(loaded))
    assert loaded.epoch_prompts == 2 * ROWS and loaded.steps == 5
    assert all(word in said for word in ("share the draws by their weights", "curriculum.name=sec", "keep=mixed"))
    assert list(epochs.length_lines(config.load("long.yaml", ["steps=2"]))) == []


def test_recomputation_depends_on_the_device_and_may_change_on_resume(place):
    loaded = config.load("long.yaml")
    assert [loaded.model.recomputes(device) for device in ("cuda", "cpu", "mps")] == [True, False, False]
    for given in ("true", "false"):
        other = config.load("long.yaml", [f"model.gradient_checkpointing={given}"])
        assert {other.model.recomputes(device) for device in ("cuda", "cpu")} == {given == "true"}
        assert config.differences(loaded, other) == []  # the gradients are the same


def test_generated_samples_have_no_epochs():
    loaded = config.load("quickstart.yaml", ["epochs=2"])
    with pytest.raises(ConfigError, match=r"epochs=2: task 'grounding' generates its samples.*Set steps instead"):
        epochs.length_of(loaded)


def test_each_row_is_drawn_that_often_and_a_resumed_run_keeps_or_changes_its_epochs(place):
    session = loop.train(config.load("long.yaml", ["epochs=2", "rollout.prompts_per_step=5", "save.every=1"]))
    assert session.done == session.config.steps == 4
    kept = yaml.safe_load((place / "runs/long/config.yaml").read_text())
    assert (kept["steps"], kept["epochs"], kept["epoch_prompts"]) == (4, 2, ROWS)
    assert session.folder.last_heartbeat()["steps"] == 4
    assert session.parts.source.sampler.prompts.history.visits.tolist() == [2] * ROWS
    again = config.load("runs/long/config.yaml")
    assert config.differences(again, config.load("long.yaml", ["epochs=3", "rollout.prompts_per_step=5",
                                                               "save.every=1"])) == []
    session = loop.train(config.load("runs/long/config.yaml", ["epochs=3"]))
    assert (session.start, session.done) == (4, 6)
    assert session.parts.source.sampler.prompts.history.visits.tolist() == [3] * ROWS
