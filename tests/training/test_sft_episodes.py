"""Supervised episodes: the row of a demonstration is that of a rollout with the same actions."""

import numpy as np
import pytest

from tests.conftest import TWO
from tests.environments import acting
from vlrl import config as configs
from vlrl.errors import DataError
from vlrl.models.packing import join_prompts
from vlrl.models.shards import resolve_sharding
from vlrl.training.build import assemble, make_accelerator
from vlrl.training.sft import SupervisedSource, supervised_config, train


def settings(folder, model, **more):
    task = {"name": "tests/environments/acting.py:Told", **more.pop("task", {})}
    return configs.validate({
        "steps": 1, "task": task, "seed": 3, "curriculum": "sequential", "run": {"dir": str(folder), "checks": "warn"},
        "model": {"name": str(model), "train": ["language", "merger", "vision"]},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 6}, "train": {"lr": 1e-3, "tokens_per_batch": 2000},
        "eval": {"samples": 2}, **more})


@pytest.fixture(scope="module", params=[TWO[0], pytest.param(TWO[1], marks=pytest.mark.slow)])
def given(request, tiny_models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("given") / "run"
    config = resolve_sharding(supervised_config(settings(folder, tiny_models[request.param])))
    parts = assemble(config, make_accelerator(config), make_source=SupervisedSource)
    yield parts, parts.source.next_groups(2, 0)
    parts.engine.close()


def test_a_demonstration_is_what_a_rollout_would_be(given):
    parts, groups = given
    for group in groups:
        (rollout,) = group.rollouts
        world = acting.Lamps(group.sample, "")
        world.reset(group.sample.environment_seed)
        whole, sampled = group.prompt, np.zeros(0, bool)
        for action in ("a", "eio", "out"):
            tokens, step = parts.encode.answer_ids(action), world.step(action)
            whole, sampled = whole.followed_by(tokens), np.append(sampled, np.ones(len(tokens), bool))
            if not step.done:
                shown = parts.encode.observation(step.observation, "s")
                whole, sampled = join_prompts(whole, shown), np.append(sampled, np.zeros(len(shown), bool))
        completion, p = rollout.completion, len(group.prompt)
        assert np.array_equal(completion.tokens, whole.ids[p:]) and np.array_equal(completion.loss_mask, sampled)
        assert np.array_equal(completion.shown.positions, whole.positions[:, p:])
        assert all(np.array_equal(completion.shown.aligned[name], beside[p:]) for name, beside in whole.aligned.items())
        whole_media = [m.sha256 for m in whole.media]
        assert [m.sha256 for m in (*group.prompt.media, *completion.shown.media)] == whole_media
        assert completion.finish_reason == "stop" and rollout.train_prompt is group.prompt
        assert rollout.reward == pytest.approx((1 + 3 + 2) / 8)


@pytest.mark.slow
def test_actions_are_learned(tiny_models, tmp_path):
    session = train(settings(tmp_path / "run", tiny_models["qwen3_vl"], steps=3, eval={"samples": 0}))
    losses = [line["loss"] for line in session.folder.metrics()]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("more, message", [
    ({"task": {"actions": ("a",)}}, "has not ended after the 1 actions of oracle_actions"),
    ({"task": {"actions": ("a",) * 4}}, "after 3 of the 4 actions of oracle_actions: the environment ended it"),
    ({"episode": {"max_turns": 2}}, "after 2 of the 3 actions of oracle_actions: raise episode.max_turns"),
    ({"task": {"actions": ()}}, "define oracle_actions"),
    ({"task": {"fault": "raise"}}, "its environment failed at action 2 of oracle_actions: step: .*KeyError")])
def test_a_demonstration_that_cannot_be_played_says_why(tiny_models, tmp_path, more, message):
    config = resolve_sharding(supervised_config(settings(tmp_path / "run", tiny_models["qwen3_vl"], **more)))
    parts = assemble(config, make_accelerator(config), make_source=SupervisedSource)
    try:
        with pytest.raises(DataError, match=message):
            parts.source.next_groups(2, 0)
    finally:
        parts.engine.close()
