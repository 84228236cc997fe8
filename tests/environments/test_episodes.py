"""Episodes: a real environment in its own process, the real engine, and what the trainer makes of it."""

import json
import os
import shutil
import time

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.conftest import TWO
from tests.e2e.runs import weights
from tests.environments.acting import Acting, Lamps
from tests.environments.test_history import positions
from vlrl import config as configs
from vlrl.cli.main import app
from vlrl.errors import ConfigError
from vlrl.models.packing import training_rows
from vlrl.rollout.partial import refuse_episodes
from vlrl.store import RunFolder
from vlrl.tools.datasets import difficulty
from vlrl.tools.evaluation import measure
from vlrl.tools.tasks.rescore import compare
from vlrl.training import loop
from vlrl.training.build_task import make_task
from vlrl.training.loop import train
from vlrl.training.update import update
from vlrl.types import Sample

TASK = "tests/environments/acting.py:Acting"


def run(folder, model, *words, **task):
    settings = {"steps": 2, "task": {"name": TASK, **task}, "seed": 3, "curriculum": "sequential",
                "model": {"name": str(model), "train": ["language", "merger", "vision"]},
                "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6},
                "train": {"lr": 1e-3, "tokens_per_batch": 2000}, "eval": {"every": 2, "samples": 2},
                "limits": {"environment_errors": 1.0}, "run": {"dir": str(folder), "checks": "warn"}}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(settings))
    loaded = configs.load(str(file.rename(folder.with_suffix(".yaml"))), list(words))
    return RunFolder(train(loaded).folder.path)


@pytest.fixture
def once(tiny_models, tmp_path):
    """Makes a run of one step without evaluations."""
    return lambda *words, name="run", **task: run(tmp_path / name, tiny_models["qwen3_vl"], "steps=1", "eval.samples=0",
                                                  *words, **task)


def gaps_of(row):
    """Of the log-probability of each sampled token, between engine and trainer."""
    return np.abs(np.subtract(row["logprobs"], row["trainer_logprobs"]))[np.array(row["loss_mask"])]


@pytest.fixture(scope="module", params=[TWO[0], pytest.param(TWO[1], marks=pytest.mark.slow)])
def ran(request, tiny_models, tmp_path_factory):
    return run(tmp_path_factory.mktemp(request.param) / "run", tiny_models[request.param])


def actions(row):
    return [t for t in row["turns"] if t["role"] == "assistant"]


def test_an_episode_is_stored_turn_by_turn(ran):
    rows = ran.rollouts().to_pylist()
    assert len(rows) == 8 and len({r["episode_id"] for r in rows}) == 8
    for row in rows:
        acted, shown = actions(row), row["turns"][1::2]
        assert [t["role"] for t in row["turns"]] == ["assistant", "observation"] * 3
        starts, ends = ([t[name] for t in row["turns"]] for name in ("start", "end"))
        gaps = np.array([*starts, len(row["token_ids"])]) - [0, *ends]  # an action that was cut is closed for it
        assert set(gaps[1::2]) <= {0, 1} and not gaps[0::2].any()
        assert [t["done"] for t in acted] == [False, False, True] and [t["state"] for t in acted] == ["1", "2", "3"]
        assert [t["text"] for t in shown] == ["Lamp 1.", "Lamp 2.", "Lamp 3."]
        assert shown[-1]["start"] == shown[-1]["end"]  # the model has not seen it
        sampled = np.zeros(len(row["token_ids"]), bool)
        for turn in acted:
            sampled[turn["start"]:turn["end"]] = True
        assert (np.array(row["loss_mask"]) <= sampled).all() and np.array(row["loss_mask"]).any()
        assert row["finish_reason"] == "stop" and json.loads(acted[0]["info"]) == {"turn": 1}
        (total,) = [v for k, v in row["parts"] if k == "vowels"]
        assert total == pytest.approx(sum(dict(t["parts"])["vowels"] for t in acted)) == row["reward"]
        pictures = [m["hash"] for m in row["media"]]
        assert pictures[1:] == [name for t in shown for name in t["media"]] and len(pictures) >= 3
        assert all((ran.path / m["path"]).is_file() for m in row["media"])


def test_the_trainer_reads_what_the_engine_wrote(ran):
    """In every turn, before the first update; with the same pictures in the same places, or these would differ."""
    rows = ran.rollouts(0).to_pylist()
    assert rows
    for row in rows:
        mask = np.array(row["loss_mask"])
        gaps = np.abs(np.array(row["logprobs"]) - np.array(row["trainer_logprobs"]))
        for turn in actions(row):
            own = slice(turn["start"], turn["end"])
            assert gaps[own][mask[own]].max() < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("words", [
    (), ("episode.horizon={name: success, start: 1, at: 1, window: 2}", "episode.max_turns=3", "curriculum.pass_at=0",
     "async.max_staleness=1", "algo.correction=token_truncate")], ids=str)
def test_a_resumed_run_is_the_undisturbed_one(tiny_models, tmp_path, words):
    """With async, the episodes that were played ahead are in the checkpoint by their actions alone."""
    words = ("eval.samples=0", "save.every=1", "save.keep=9", "steps=3", "episode.history=last:2", *words)
    model, whole, halves = tiny_models["qwen3_vl"], tmp_path / "whole", tmp_path / "halves"
    run(whole, model, *words)
    shutil.copytree(whole, halves)
    for step in (2, 3):
        shutil.rmtree(halves / "checkpoints" / f"step-{step:06d}")
    folder = run(halves, model, *words)
    assert weights(whole, 3) == weights(halves, 3) != weights(whole, 1)
    rows = [RunFolder(f).rollouts().to_pylist() for f in (whole, halves)]
    for row in (r for part in rows for r in part):
        for turn in row["turns"]:
            turn["seconds"] = None
    assert rows[0] == rows[1]
    assert {r["step"] - r["policy_step"] for r in rows[0]} == ({0, 1} if "async.max_staleness=1" in words else {0})
    assert not any(line["environment/errors"] for line in folder.metrics())


@pytest.mark.slow
def test_without_an_environment_nothing_is_changed(tiny_models, tmp_path):
    """A task that may have environments and has none for its samples trains as one that knows none, bit for bit."""
    found = []
    for name in ("Plain", "Silent"):
        folder = run(tmp_path / name, tiny_models["qwen3_vl"], f"task.name=tests/environments/acting.py:{name}")
        rows = [{**r, "task": "", "turns": []} for r in folder.rollouts().to_pylist()]
        assert rows and not any(r["episode_id"] for r in rows)
        evals = [{k: v for k, v in e.items() if not k.startswith("time")} for e in folder.evals()]
        found.append((weights(folder.path, 2), rows, evals))
    assert found[0] == found[1]


@pytest.mark.slow
def test_each_episode_is_compared_with_the_greedy_one(once):
    rows = once("algo.advantage=remax").rollouts().to_pylist()
    greedy = {r["group_id"]: r for r in rows if r["variant"] == "greedy"}
    assert len(greedy) == 2 and all(len(actions(r)) == 3 and r["episode_id"] for r in greedy.values())
    for row in (r for r in rows if r["variant"] != "greedy"):
        assert row["advantage"] == pytest.approx(row["reward"] - greedy[row["group_id"]]["reward"], abs=1e-6)
        assert row["token_ids"] != greedy[row["group_id"]]["token_ids"]


@pytest.mark.slow
def test_the_second_half_of_a_group_is_played_by_a_policy_that_forgot_the_first(once):
    gaps = [[], []]
    for row in once("rollout.forget.lr=0.002", "algo.correction=token_truncate").rollouts().to_pylist():
        gaps[row["index"]].append(gaps_of(row).max())
    assert max(gaps[0]) < 1e-5 and min(gaps[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("history", ["full", "last:1"])
def test_a_variant_has_an_environment_of_its_own(once, history, monkeypatch):
    """Its episodes begin with what its own media make the environment show, and are trained behind the plain prompt."""
    groups = []

    def watched(policy, optimizer, given, *more):
        groups.extend((policy, group) for group in given)
        return update(policy, optimizer, given, *more)

    monkeypatch.setattr(loop, "update", watched)
    folder = once(f"task.name={TASK.replace('Acting', 'Varied')}", f"episode.history={history}")
    rows = folder.rollouts().to_pylist()
    assert [r["variant"] for r in rows] == [None, "noisy"] * 2 and all(len(actions(r)) == 3 for r in rows)
    assert not any(r["error"] for r in rows) and folder.metrics()[0]["grad_norm"] > 0
    gaps = [gaps_of(r).max() for r in rows]
    assert max(gaps[::2]) < 1e-5 < min(gaps[1::2])
    for policy, group in groups:
        for rollout in group.rollouts:
            for _, row in training_rows(rollout.completion):
                assert np.array_equal(row.shown.positions, positions(policy, group.prompt, row.shown))


def measured(config, folder):
    """What `vlrl eval` and `vlrl data difficulty` find of two samples."""
    chosen, scope = measure.choose_model(config), difficulty.MeasurementScope(answers=2, limit=2)
    ((record, groups),) = measure.measure(config, chosen)
    with measure.open_runtime(config, chosen) as ready:
        found = difficulty.measure(ready, scope, folder, difficulty.facts(config, chosen, scope), lambda *told: None)
    return record, groups, found


@pytest.mark.slow
def test_commands_play_episodes_as_the_run_does(ran, tmp_path):
    record, groups, found = measured(configs.load(str(ran.path / "config.yaml")), tmp_path / "part")
    mean = {k: v for k, v in record.items() if k.startswith("vowels")}
    assert mean == {k: v for k, v in ran.evals()[-1].items() if k in mean} and mean
    assert [len(g.rollouts[0].completion.turns) for g in groups] == [6, 6]
    assert [len(m.rewards) for m in found] == [2, 2] and len({r for m in found for r in m.rewards}) > 1


def test_stored_episodes_are_scored_again_and_measured(ran):
    found = compare(make_task(configs.load(str(ran.path / "config.yaml"))), ran)
    assert found.rollouts == 8 and not found.changed and not found.errors, found
    line = ran.metrics()[-1]
    assert line["episode/turns_mean"] == 3 and line["episode/limit_frac"] == 0 and line["environment/errors"] == 0
    assert line["time/environment_s"] > 0 and line["grad_norm"] > 0
    assert all(e["vowels"] >= 0 for e in ran.evals()) and len(ran.evals()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("words, reason, turns", [
    (["episode.max_turns=2"], "turns", 2), (["episode.max_media=1"], "media", 2),
    (["episode.max_tokens=40"], "tokens", None)])
def test_limits_end_an_episode(once, words, reason, turns):
    rows = [r for r in once(*words).rollouts().to_pylist() if r["sample_id"] == "train-1"]  # a picture in each turn
    assert {r["finish_reason"] for r in rows} == {reason} and all(r["truncated"] for r in rows)
    assert turns is None or {len(actions(r)) for r in rows} == {turns}
    assert reason != "tokens" or all(len(r["token_ids"]) <= 40 for r in rows)


HORIZON = "episode.horizon={name: success, start: 1, at: 1, window: 2}"


@pytest.mark.slow
def test_episodes_of_training_grow_with_the_horizon_and_those_of_evaluations_are_whole(tiny_models, tmp_path):
    """Every episode counts as correct here, so each step has a turn more."""
    folder = run(tmp_path / "run", tiny_models["qwen3_vl"], HORIZON, "episode.max_turns=3", "curriculum.pass_at=0",
                 "steps=3", "eval.every=1")
    assert {(r["step"], len(actions(r)), r["finish_reason"]) for r in folder.rollouts().to_pylist()} == {
        (0, 1, "turns"), (1, 2, "turns"), (2, 3, "stop")}
    assert [line["episode/horizon"] for line in folder.metrics()] == [1, 2, 3]
    played = folder.rollouts(split="heldout").to_pylist()
    assert {r["step"] for r in played} >= {0, 3} and {len(actions(r)) for r in played} == {3}


class Helped(Acting):
    """An environment that says more where a stage has `told` set."""

    stage_fields = ("told",)

    def environment(self, sample):
        return Lamps(sample, self.fault, said=" Say a, e, i." if sample.get("told") else "")


@pytest.mark.slow
def test_an_environment_helps_in_a_stage_and_never_in_evaluations(tiny_models, tmp_path):
    stages = "[{steps: 1, fields: {told: true}}, {}]"
    folder = run(tmp_path / "run", tiny_models["qwen3_vl"], "task.name=tests/environments/test_episodes.py:Helped",
                 "curriculum={name: staged, stages: " + stages + "}", "eval.every=1")
    rows = folder.rollouts().to_pylist()
    assert {(r["step"], "Say a, e, i." in r["prompt"], json.loads(r["sample"]).get("told")) for r in rows} == {
        (0, True, True), (1, False, None)}
    assert [line["curriculum/stage"] for line in folder.metrics()] == [1, 2]
    assert not any("Say a" in r["prompt"] for r in folder.rollouts(split="heldout").to_pylist())


FAULTS = {"hang": "step: no result within 2 s", "die": "step: its process ended", "raise": "KeyError: 'lost'", "":
          None, "long": "has 200000 characters", "nan": "the part 'vowels' is 'nan'", "broken": "no/such.png"}


class Broken(Acting):
    """Each environment has another fault; one has none."""

    def samples(self, split):
        return [Sample(id=f"{split}-{i}", row={"id": i}) for i in range(len(FAULTS))]

    def environment(self, sample):
        lamps = Lamps(sample, [*FAULTS][sample["id"]])
        lamps.faulty = sample.id
        return lamps


@pytest.mark.slow
def test_a_broken_environment_is_counted_and_not_paid(once):
    folder = once("environment.step_s=2", "rollout.prompts_per_step=7", f"task.name={__file__}:Broken")
    for row, message in ((r, [*FAULTS.values()][json.loads(r["sample"])["id"]]) for r in folder.rollouts().to_pylist()):
        if message:
            assert row["reward"] is None and message in row["error"], row["error"]
        else:
            assert row["error"] is None and row["reward"] is not None and len(actions(row)) == 3
    assert folder.metrics()[-1]["environment/errors"] == 2 * 6
    unlike = once("environment.step_s=2", name="unlike", fault="unlike").rollouts().to_pylist()
    assert all(r["reward"] is None and "must be the same for the same seed" in r["error"] for r in unlike)


@pytest.mark.slow
@pytest.mark.parametrize("words", [("episode.history=last:1", "data.quarantine=true", "rollout.minibatches=2"),
                                   ("async.max_staleness=1", "algo.correction=token_truncate")])
def test_what_cannot_be_reset_is_counted_and_not_paid(tiny_models, tmp_path, words):
    """A group of it is stored without tokens, and not trained on; in an evaluation it is unscorable."""
    folder = run(tmp_path / "run", tiny_models["qwen3_vl"], *words, fault="away")
    rows, lines = folder.rollouts().to_pylist(), folder.metrics()
    lost = [r for r in rows if r["sample_id"] == "train-1"]
    assert len(rows) == 8 and len(lost) == 2
    for row in lost:
        assert row["error"].startswith("reset: ") and "no server answers" in row["error"]
        assert (row["reward"], row["completion"], row["token_ids"], row["turns"]) == (None, "", [], [])
    assert all(r["error"] is None and len(actions(r)) == 3 for r in rows if r not in lost)
    assert [(m["environment/errors"], m["groups/count"], m["prompts/rejected"], m["score_errors"]) for m in lines] == [
        (2, 2, 0, 0), (0, 2, 0, 0)]
    assert [(e["n"], e["unscorable"], e["rejected"], e["environment/errors"]) for e in folder.evals()] == [
        (2, 1, 0, 1)] * 2


@pytest.mark.slow
def test_commands_go_on_where_a_reset_fails(once, tmp_path):
    """vlrl eval, vlrl eval at length, vlrl data difficulty and vlrl play."""
    file = str(once(fault="away").path / "config.yaml")
    record, _, found = measured(configs.load(file, ["eval.samples=2"]), tmp_path / "part")
    assert (record["n"], record["unscorable"], record["environment/errors"]) == (2, 1, 1)
    assert [[r is None for r in m.rewards] for m in found] == [[False] * 2, [True] * 2]
    assert not any(m.left_out for m in found)
    for words in (["eval", file, "--answers", "2", "--json", "eval.samples=2"],
                  ["play", file, "--index", "1", "--answer", "a", "--json"]):
        said = CliRunner().invoke(app, words)
        assert said.exit_code == 0, said.output
        assert "splits" in said.stdout or json.loads(said.stdout)["error"].startswith("reset: ")


@pytest.mark.slow
def test_too_many_errors_stop_the_run_and_what_episodes_do_not_go_with_is_refused(once):
    with pytest.raises(Exception, match="2 of 4 episodes ended with an error of their environment, more than"):
        once("limits.environment_errors=0.2", fault="raise")
    config = configs.validate({"task": TASK, "model": {"name": "x"}, "rollout": {"step_tokens": 4}})
    with pytest.raises(ConfigError, match=r"has an environment.*docs/write-an-environment"):
        refuse_episodes(config, make_task(config))


@pytest.mark.slow
@pytest.mark.parametrize("history", ["full", "last:1"])
def test_turns_have_credit_of_their_own(once, history):
    """The advantage of a turn is its return to go against the same turn of the other episode, in the files and in the
    update; a turn is one ratio."""
    folder = once(f"episode.history={history}", "algo.advantage={name: turn_return, normalize: false}",
                  "algo.loss=gspo_turn", "rollout.minibatches=2")
    rows = folder.rollouts().to_pylist()
    for number in {r["group_id"] for r in rows}:
        group = [r for r in rows if r["group_id"] == number]
        paid = np.array([[dict(t["parts"])["vowels"] for t in actions(r)] for r in group])
        to_go = paid[:, ::-1].cumsum(1)[:, ::-1]
        found = np.array([r["turn_advantages"] for r in group])
        assert found == pytest.approx(to_go - to_go.mean(0), abs=1e-6)
    assert np.ptp([r["turn_advantages"] for r in rows], axis=1).max() > 1e-3
    assert folder.metrics()[-1]["grad_norm"] > 1e-6
    for row in rows:
        ratios = np.array(row["ratio"], float)
        for turn in actions(row):
            own = slice(turn["start"], turn["end"])
            assert np.ptp(ratios[own][np.array(row["loss_mask"])[own]]) < 1e-6


class Gated(Lamps):
    def step(self, action):
        made, own = super().step(action), self.sample.id == "train-0"
        while own and not os.path.exists(self.fault):
            time.sleep(0.05)
        if not own and made.done:
            open(self.fault, "w").close()
        return made


class Waiting(Acting):
    def environment(self, sample):
        return Gated(sample, self.fault)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["arrival", "fixed"])
def test_with_arrival_a_slow_environment_holds_up_no_other(once, tmp_path, order):
    limit = "60" if order == "arrival" else "3"
    folder = once(f"environment.order={order}", "environment.workers=4", f"environment.step_s={limit}",
                  f"task.name={__file__}:Waiting", fault=str(tmp_path / "open"))
    for row in folder.rollouts().to_pylist():
        if order == "fixed" and row["sample_id"] == "train-0":
            assert "step: no result within 3 s" in row["error"]
            continue
        assert row["error"] is None and len(actions(row)) == 3 and gaps_of(row).max() < 1e-5
    line = folder.metrics()[-1]
    assert line["time/environment_s"] > 0 and line["time/waiting_s"] > 0
