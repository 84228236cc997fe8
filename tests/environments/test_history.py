"""Windows of an episode (`episode.history=last:k`): what a turn is asked under, and what the update makes of it."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.conftest import TWO
from tests.environments.acting import engine_of, played
from tests.helpers import load
from tests.helpers import settings as made_settings
from tests.training.test_update import Recorder, assert_close, gradients
from vlrl.algo.algorithm import Algorithm
from vlrl.engine.base import Request, Sampling, reset_sample
from vlrl.errors import ConfigError
from vlrl.models.oom import halves
from vlrl.models.packing import make_batch, pieces_of, training_rows
from vlrl.models.reference import Reference
from vlrl.rollout.partial import completion_of, completion_state
from vlrl.store import RunFolder
from vlrl.store.checkpoint import load_state
from vlrl.training.advantages import Credit

LAST = {"episode": {"history": "last:1"}}


def settings(folder, **more):
    return made_settings(folder, **{"seed": 3, "rollout": {"group_size": 3, "max_new_tokens": 6},
                                    "limits": {"environment_errors": 1.0}, **more})


@pytest.fixture(scope="module", params=[TWO[0], pytest.param(TWO[1], marks=pytest.mark.slow)])
def scene(request, tiny_models):
    """A model, its encoder, groups of windowed episodes with an advantage of their own each, the folder."""
    folder = tiny_models[request.param]
    policy, encode = load(settings(folder))
    return policy, encode, [credited(g) for g in played(policy, encode, settings(folder, **LAST))], folder


def credited(group, values=(1.0, -0.5, 0.25)):
    rollouts = [dataclasses.replace(r, advantage=a) for r, a in zip(group.rollouts, values, strict=True)]
    return dataclasses.replace(group, rollouts=tuple(rollouts))


@pytest.mark.slow
def test_a_turn_is_asked_under_the_prompt_and_the_last_observations(scene):
    policy, encode, groups, folder = scene
    for last in (1, 2):
        config = settings(folder, episode={"history": f"last:{last}"})
        for group in groups if last == 1 else played(policy, encode, config):
            for c in (r.completion for r in group.rollouts):
                actions = [t for t in c.turns if t.role == "assistant"]
                shown = [t for t in c.turns if t.role == "observation"]
                assert len(actions) == len(c.windows) == 3 and c.shown is None
                for turn, (action, window) in enumerate(zip(actions, c.windows, strict=True)):
                    first = shown[turn - last].start if turn >= last else 0  # of the oldest observation in the window
                    ids = [*group.prompt.ids, *([encode.end] if turn >= last else []), *c.tokens[first:action.start]]
                    assert list(action.prompt_ids) == ids
                    assert [*group.prompt.ids, *window.ids] == [*ids, *c.tokens[action.start:action.end]]
                    assert [m.sha256 for m in window.media] == [name for t in shown[:turn][-last:] for name in t.media]
                    assert np.array_equal(window.positions, positions(policy, group.prompt, window))


def positions(policy, prompt, window):
    """By the model's own index over the whole window."""
    ids = torch.from_numpy(np.concatenate([prompt.ids, window.ids]))[None]
    image = policy.processor.tokenizer.convert_tokens_to_ids(policy.processor.image_token)
    mm = {name: torch.cat([p.mm[name] for p in (prompt, window) if name in p.mm]) for name in prompt.mm}
    return policy.positions(ids, (ids == image).long(), mm)[:, len(prompt):]


def test_the_trainer_reads_what_the_engine_wrote_in_every_turn(scene):
    policy, _, groups, folder = scene
    _, stats, per_token = gradients(policy, groups, settings(folder))
    assert stats["mismatch/gap_max"] < 1e-5
    rollouts = [r for g in groups for r in g.rollouts]
    reference = Reference(policy, settings(folder)).logprobs(
        [g.prompt for g in groups for _ in g.rollouts], [r.completion for r in rollouts], 1.0, own=True)
    for r, found, read in zip(rollouts, per_token["trainer_logprobs"], reference, strict=True):
        c, mask = r.completion, r.completion.loss_mask
        assert len(found) == len(read) == len(c.tokens) and (c.logprobs[mask] < 0).all()
        assert np.abs(found - c.logprobs)[mask].max() < 1e-5 and np.abs(read - c.logprobs)[mask].max() < 1e-5


@pytest.mark.parametrize("aggregation", ["sequence_mean", pytest.param("token_mean", marks=pytest.mark.slow)])
def test_the_gradient_is_that_of_rows_made_by_hand(scene, aggregation):
    """Each turn alone, without packing; an episode counts once, however many rows it has."""
    policy, _, groups, folder = scene
    lengths = [r.completion.loss_mask.sum() for g in groups for r in g.rollouts]
    policy.model.zero_grad()
    with policy.evaluating():
        for group in groups:
            for r in group.rollouts:
                share = 1 / (sum(lengths) if aggregation == "token_mean"
                             else len(lengths) * r.completion.loss_mask.sum())
                for turn, window in zip(r.completion.turns[::2], r.completion.windows, strict=True):
                    (piece,) = pieces_of([group.prompt], [window.ids], 10**6, [window])
                    logprobs = policy.logprobs(make_batch([piece], "padded"), 1.0).logprobs
                    own = torch.from_numpy(r.completion.loss_mask[turn.start:turn.end])
                    (-r.advantage * share * logprobs[len(logprobs) - len(own):][own].sum()).backward()
    by_hand = Recorder(policy)
    by_hand.step()
    policy.model.zero_grad()
    for packing, tokens in (("shared", 10**6), ("shared", 60), ("padded", 300)):
        config = settings(folder, train={"max_grad_norm": 1e9, "packing": packing, "tokens_per_batch": tokens},
                          algo={"aggregation": aggregation})
        (found,), _, _ = gradients(policy, groups, config)
        assert_close(found, by_hand.steps[0], 2e-5)


@pytest.mark.slow
def test_what_looks_at_a_whole_sequence_sees_the_whole_episode(scene):
    """GSPO has one ratio for each rollout: rows of an episode are never parted, wherever the micro-batches are cut."""
    policy, _, groups, folder = scene
    off = [dataclasses.replace(g, rollouts=tuple(dataclasses.replace(r, completion=dataclasses.replace(
        r.completion, logprobs=r.completion.logprobs - 0.1 * (1 + r.index))) for r in g.rollouts)) for g in groups]
    found = [gradients(policy, off, settings(folder, algo={"correction": "sequence_truncate"}, train=train))
             for train in ({"tokens_per_batch": 10**6}, {"tokens_per_batch": 40},
                           {"packing": "padded", "tokens_per_batch": 40})]
    for (steps, *_) in found[1:]:
        assert_close(steps[0], found[0][0][0])
    windows = groups[0].rollouts[0].completion.windows
    (piece,) = pieces_of([groups[0].prompt] * 4, [w.ids for w in windows] + [windows[0].ids], 10**6, [*windows] * 2,
                         [0, 0, 0, 1])
    assert [[p.rollouts for p in half] for half in halves([piece])] == [[(0, 1, 2)], [(3,)]]


@pytest.mark.parametrize("history", ["last:1", pytest.param("full", marks=pytest.mark.slow)])
def test_recorded_actions_are_enough_to_play_an_episode_again(tiny_models, history):
    """What a checkpoint of async holds; one whose environment answers otherwise has an error."""
    config = settings(tiny_models["qwen3_vl"], episode={"history": history})
    policy, encode = load(config)
    with engine_of(policy, encode, config) as (engine, task):
        sample = reset_sample(engine, task, task.samples("train")[1], 0)
        requests = [Request(prompt=encode(task, sample), n=3, sampling=Sampling(max_new_tokens=6), sample=sample)]
        (played_once,) = engine.generate(requests)
        recorded = [completion_of(**completion_state(c)) for c in played_once]
        recorded[2].tokens[recorded[2].turns[1].start - 1] += 1  # of an observation
        (again,) = engine.replayed(requests, [recorded])
    assert all(c.shown is None and not c.windows and not c.observed_media for c in recorded)
    for one, two in zip(played_once[:2], again, strict=False):
        assert np.array_equal(one.tokens, two.tokens) and np.array_equal(one.logprobs, two.logprobs)
        assert np.array_equal(one.loss_mask, two.loss_mask) and (one.text, one.episode_id) == (two.text, two.episode_id)
        for (_, a), (_, b) in zip(training_rows(one), training_rows(two), strict=True):
            assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.shown.positions, b.shown.positions)
            assert [m.sha256 for m in a.shown.media] == [m.sha256 for m in b.shown.media]
        assert [t.state for t in two.turns] == [t.state for t in one.turns] and two.error is None
    assert "answered the same actions differently" in again[2].error


@pytest.mark.slow
def test_a_run_stores_one_line_for_each_episode(tiny_models, tmp_path):
    from tests.environments.test_episodes import run
    folder = run(tmp_path / "run", tiny_models["qwen3_vl"], "episode.history=last:1")
    assert isinstance(folder, RunFolder)
    rows = folder.rollouts().to_pylist()
    assert len(rows) == len({r["episode_id"] for r in rows}) == 8
    for row in rows:
        assert all((t["prompt_ids"] is None) == (t["role"] == "observation") for t in row["turns"])
        mask, gaps = np.array(row["loss_mask"]), np.abs(np.subtract(row["logprobs"], row["trainer_logprobs"]))
        assert row["step"] or gaps[mask].max() < 1e-5
    line = folder.metrics()[-1]
    assert line["episode/turns_mean"] == 3 and line["groups/count"] == 2
    lengths = [len(r["token_ids"]) for r in rows if r["step"] == line["step"]]
    assert line["completion/length_mean"] == np.mean(lengths) and len(lengths) == 4
    state = load_state(folder.path / "checkpoints" / "step-000002")["source"]["history"]
    assert sum(state["visits"]) == 4 and all(e["n"] == 2 for e in folder.evals())


@pytest.fixture(scope="module", params=["last:1", pytest.param("full", marks=pytest.mark.slow)])
def moved(request, tiny_models):
    """A policy that has moved on from its reference since its episodes were played: policy, groups, folder."""
    folder = tiny_models["qwen3_vl"]
    policy, encode = load(settings(folder))
    policy.keep_reference()
    groups = [credited(g) for g in played(policy, encode, settings(folder, episode={"history": request.param}))]
    before = [p.detach().clone() for _, p in policy.trainable()]
    yield policy, groups, folder, before
    assert all(torch.equal(a, p) for a, (_, p) in zip(before, policy.trainable(), strict=True))


def test_the_reference_reads_episodes_as_they_were_played(moved):
    """At the weights of the reference the KL of the reward is 0, which takes the same pictures in the same places."""
    policy, groups, folder, _ = moved
    config = settings(folder, algo={"kl_coef": 0.5, "kl_in": "reward", "advantage": "rloo"})
    credit = Credit(Algorithm(config), config, policy)
    credit(groups, 0)
    assert abs(credit.metrics()["kl"]) < 1e-5
    for wrong in ("last:0", "last", "first:2", "last:-1"):
        with pytest.raises(ConfigError, match=f"episode.history='{wrong}'"):
            settings("x", episode={"history": wrong})
    assert settings("x").episode.last is None and settings("x", **LAST).episode.last == 1


@pytest.mark.slow
def test_corrections_kl_and_entropy_count_actions_alone(moved):
    policy, groups, folder, before = moved
    config = settings(folder, algo={"kl_coef": 0.1, "correction": "token_truncate"})
    masks = [r.completion.loss_mask for g in groups for r in g.rollouts]
    rng = np.random.default_rng(0)

    def noisy(where):
        """The groups, with other log-probabilities of the sampler at some tokens."""
        def other(c):
            places = c.loss_mask if where == "actions" else ~c.loss_mask
            return dataclasses.replace(c, logprobs=np.where(places, c.logprobs - 0.7, c.logprobs).astype(np.float32))
        return [dataclasses.replace(g, rollouts=tuple(
            dataclasses.replace(r, completion=other(r.completion)) for r in g.rollouts)) for g in groups]

    try:
        with torch.no_grad():
            for _, p in policy.trainable():
                p += 0.02 * torch.from_numpy(rng.standard_normal(tuple(p.shape), np.float32)) * p.abs().mean()
        (plain,), stats, tokens = gradients(policy, groups, config)
        (same,), _, _ = gradients(policy, noisy("observations"), config)
        (other,), _, _ = gradients(policy, noisy("actions"), config)
        reference = Reference(policy, config).logprobs([g.prompt for g in groups for _ in g.rollouts],
                                                       [r.completion for g in groups for r in g.rollouts], 1.0)
    finally:
        with torch.no_grad():
            for old, (_, p) in zip(before, policy.trainable(), strict=True):
                p.copy_(old)
    assert_close(same, plain, 0)
    assert any((other[n] - plain[n]).abs().max() > 1e-3 * plain[n].abs().max() for n in plain)
    gaps = np.concatenate([(r - t)[m] for r, t, m in zip(reference, tokens["trainer_logprobs"], masks, strict=True)])
    assert stats["kl"] == pytest.approx(float(np.mean(np.expm1(gaps) - gaps)), rel=1e-3)
    entropy = np.concatenate([e[m] for e, m in zip(tokens["entropies"], masks, strict=True)])
    assert stats["entropy"] == pytest.approx(float(entropy.mean()), rel=1e-5)
