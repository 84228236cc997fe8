"""Episodes: a real environment in its own process, the real engine, and what the trainer makes of it."""

import json

import numpy as np
import pytest

from tests.conftest import TWO
from tests.e2e.runs import weights
from vlrl import config as configs
from vlrl.algo.algorithm import Algorithm
from vlrl.errors import ConfigError
from vlrl.rollout.episodes import check
from vlrl.store import RunFolder
from vlrl.tools.rescore import compare
from vlrl.training.build_task import make_task
from vlrl.training.loop import train

TASK = "tests/rollout/acting.py:Acting"


def run(folder, model, *words, **task):
    """A short run of episodes in this process."""
    settings = {"steps": 2, "task": {"name": TASK, **task}, "seed": 3, "curriculum": "sequential",
                "model": {"name": str(model), "train": ["language", "merger", "vision"]},
                "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 6},
                "train": {"lr": 1e-3, "tokens_per_batch": 2000}, "eval": {"every": 2, "samples": 2},
                "limits": {"environment_errors": 1.0}, "run": {"dir": str(folder), "checks": "warn"}}
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(settings))
    loaded = configs.load(str(file.rename(folder.with_suffix(".yaml"))), list(words))
    return RunFolder(train(loaded).folder.path)


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
def test_a_resumed_run_is_the_undisturbed_one(tiny_models, tmp_path):
    model, words = tiny_models["qwen3_vl"], ("eval.samples=0", "save.every=1")
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    run(whole, model, *words)
    for steps in (1, 2):
        run(halves, model, *words, f"steps={steps}")
    assert weights(whole, 2) == weights(halves, 2) != weights(whole, 1)
    tokens = [[r["token_ids"] for r in RunFolder(f).rollouts().to_pylist()] for f in (whole, halves)]
    assert tokens[0] == tokens[1]


def test_stored_episodes_are_scored_again(ran):
    found = compare(make_task(configs.load(str(ran.path / "config.yaml"))), ran)
    assert found.rollouts == 8 and not found.changed and not found.errors, found


def test_metrics_and_evaluation(ran):
    line = ran.metrics()[-1]
    assert line["episode/turns_mean"] == 3 and line["episode/limit_frac"] == 0 and line["environment/errors"] == 0
    assert line["time/environment_s"] > 0 and line["grad_norm"] > 0
    assert all(e["vowels"] >= 0 for e in ran.evals()) and len(ran.evals()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("words, reason, turns", [
    (["episode.max_turns=2"], "turns", 2), (["episode.max_media=1"], "media", 2),
    (["episode.max_tokens=40"], "tokens", None)])
def test_limits_end_an_episode(tiny_models, tmp_path, words, reason, turns):
    folder = run(tmp_path / "run", tiny_models["qwen3_vl"], "steps=1", "eval.samples=0", *words)
    rows = [r for r in folder.rollouts().to_pylist() if r["sample_id"] == "train-1"]  # a picture in each turn
    assert {r["finish_reason"] for r in rows} == {reason} and all(r["truncated"] for r in rows)
    assert turns is None or {len(actions(r)) for r in rows} == {turns}
    assert reason != "tokens" or all(len(r["token_ids"]) <= 40 for r in rows)


@pytest.mark.slow
@pytest.mark.parametrize("fault, message", [
    ("hang", "step: no result within 2 s"), ("die", "step: its process ended"), ("raise", "KeyError: 'lost'"),
    ("long", "a text of 200000 characters"), ("nan", "the part 'vowels' is 'nan'"), ("broken", "no/such.png"),
    ("unlike", "must be the same for a seed")])
def test_a_broken_environment_is_counted_and_not_paid(tiny_models, tmp_path, fault, message):
    folder = run(tmp_path / "run", tiny_models["qwen3_vl"], "steps=1", "eval.samples=0", "environment.step_s=2",
                 fault=fault)
    rows = folder.rollouts().to_pylist()
    broken = [r for r in rows if fault == "unlike" or r["sample_id"] == "train-1"]
    for row in broken:
        assert row["reward"] is None and message in row["error"], row["error"]
    assert all(r["error"] is None and r["reward"] is not None and len(actions(r)) == 3 for r in rows if r not in broken)
    assert folder.metrics()[-1]["environment/errors"] == len(broken) >= 2


@pytest.mark.slow
def test_too_many_errors_stop_the_run(tiny_models, tmp_path):
    with pytest.raises(Exception, match="2 of 4 episodes ended with an error of their environment, more than"):
        run(tmp_path / "run", tiny_models["qwen3_vl"], "limits.environment_errors=0.2", "eval.samples=0", fault="raise")


@pytest.mark.parametrize("settings", [
    {"rollout": {"step_tokens": 4}}, {"algo": {"advantage": "remax"}}, {"engine": "vllm"},
    {"async": {"max_staleness": 1}, "algo": {"correction": "token_truncate"}},
    {"train": {"sharding": "fsdp2"}}, {"rollout": {"forget": {"lr": 1}}, "algo": {"correction": "none"}}], ids=str)
def test_what_episodes_do_not_go_with_is_refused(settings):
    config = configs.validate({"task": TASK, "model": {"name": "x"}, **settings})
    with pytest.raises(ConfigError, match=r"has an environment.*docs/write-an-environment"):
        check(config, make_task(config), Algorithm(config).requires, True)
