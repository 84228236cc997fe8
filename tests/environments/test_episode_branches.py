"""Episodes that go on from each other's turns: the same tokens, the same world, and an error where the world is not."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.environments.acting import Acting, Lamps, engine_of
from tests.helpers import load, settings, started
from tests.rollout.test_branching import common
from vlrl.curriculum import Draw
from vlrl.engine.base import reset_sample
from vlrl.methods.tree.branching import Leaf, _cut, surprise
from vlrl.models import prefix_tree
from vlrl.models.packing import make_batch, pieces_of
from vlrl.monitoring.metrics import Clock
from vlrl.rollout.generate import AcceptedDraw, RolloutGenerator
from vlrl.types import Completion, Turn


@pytest.fixture(scope="module")
def tiny(tiny_models):
    return *load(settings(tiny_models["qwen3_vl"])), tiny_models["qwen3_vl"]


def config_of(tiny, group_size=5, branch=None, **more):
    return settings(tiny[2], rollout={"group_size": group_size, "prompts_per_step": 2, "max_new_tokens": 6,
                                      "branch": branch or {"roots": 2}}, **more)


def answering_of(policy, encode, config, engine, task):
    algorithm = started(config, policy, encode)
    return RolloutGenerator(config, task, engine, Clock(), algorithm, methods=algorithm.methods)


def drawn(tiny, task=None, **more):
    policy, encode, _ = tiny
    config = config_of(tiny, **more)
    with engine_of(policy, encode, config, task) as (engine, task):
        samples = [reset_sample(engine, task, sample, i) for i, sample in enumerate(task.samples("train")[1:3])]
        asked = [AcceptedDraw(i, Draw(i, 0), sample, encode(task, sample)) for i, sample in enumerate(samples)]
        generator = answering_of(policy, encode, config, engine, task)
        groups = generator.groups(asked, 0)
    return groups, generator.methods[0].metrics()


def parents(group, roots=2):
    """(place where it parts, the earlier episode that it shares most with) of each branch."""
    done = [r.completion for r in group.rollouts]
    for i, c in enumerate(done[roots:], roots):
        yield c, *max(((common(c.tokens, other.tokens), other) for other in done[:i]), key=lambda found: found[0])


@pytest.mark.parametrize("history", ["full", "last:1"])
def test_branches_share_turns_and_their_world(tiny, history):
    groups, told = drawn(tiny, episode={"history": history})
    for group in groups:
        assert len({r.completion.episode_id for r in group.rollouts}) == 5
        for c, place, other in parents(group):
            assert c.error is None and len(c.actions) == 3
            starts = [a.start for a in c.actions]
            turn = max(t for t, start in enumerate(starts) if start <= place)
            assert turn >= 1 and starts[turn] == [a.start for a in other.actions][turn]
            # all that came before is the same, what the environment made of it too
            for mine, theirs in zip(c.turns[:2 * turn], other.turns[:2 * turn], strict=True):
                same = {"start", "end", "role", "media", "text", "parts", "state", "done", "info"}
                assert all(getattr(mine, name) == getattr(theirs, name) for name in same)
            assert c.logprobs[:starts[turn]].tolist() == other.logprobs[:starts[turn]].tolist()
            assert [m.sha256 for m in c.observed_media[:turn]] == [m.sha256 for m in other.observed_media[:turn]]
            assert c.loss_mask.sum() == sum(a.end - a.start for a in c.actions)
            assert len(c.windows) == (3 if history == "last:1" else 0)
        assert len({r.completion.tokens.tobytes() for r in group.rollouts}) > 3
    assert 0.1 < told["branch/reused_frac"] < 1


def test_log_probabilities_are_those_of_the_trainer_and_drawn_again_alike(tiny, monkeypatch):
    monkeypatch.setattr(prefix_tree, "SHORTEST", 1)
    groups, again = drawn(tiny)[0], drawn(tiny)[0]
    for group, other in zip(groups, again, strict=True):
        done = [r.completion for r in group.rollouts]
        assert [c.tokens.tolist() for c in done] == [r.completion.tokens.tolist() for r in other.rollouts]
        batch = make_batch(pieces_of([group.prompt] * 5, [c.tokens for c in done], 10**6, [c.shown for c in done]))
        with torch.no_grad():
            found = tiny[0].logprobs(batch, 1.0).logprobs.numpy()
        mask = np.concatenate([c.loss_mask for c in done])
        assert np.abs(found - np.concatenate([c.logprobs for c in done]))[mask].max() < 1e-5
        assert batch.tokens < len(group.prompt) + sum(len(c.tokens) for c in done)


class Moody(Lamps):
    plays = 0

    def reset(self, seed):
        Moody.plays += 1
        self.mood = Moody.plays
        return super().reset(seed)

    def step(self, action):
        step = super().step(action)
        return replace(step, observation=replace(step.observation, text=f"Mood {self.mood}."))


class Short(Lamps):
    plays = 0

    def reset(self, seed):
        Short.plays += 1
        self.over = Short.plays > 3  # the reset that shows the prompt, and two roots
        return super().reset(seed)

    def step(self, action):
        step = super().step(action)
        return replace(step, done=step.done or self.over)


@pytest.mark.parametrize("world", [Moody, Short])
def test_a_world_that_answers_otherwise_is_an_error_and_not_paid(tiny, world):
    class Odd(Acting):
        def environment(self, sample):
            return world(sample, "")

    world.plays = 0
    policy, encode, _ = tiny
    config = config_of(tiny, environment={"workers": 1})
    with engine_of(policy, encode, config, Odd(rewards={"vowels": 1.0})) as (engine, task):
        sample = reset_sample(engine, task, task.samples("train")[1], 0)
        asked = [AcceptedDraw(0, Draw(0, 0), sample, encode(task, sample))]
        (group,) = answering_of(policy, encode, config, engine, task).groups(asked, 0)
    first, rest = group.rollouts[:2], group.rollouts[2:]
    assert all(r.completion.error is None and r.reward is not None for r in first)
    assert all("answered the same actions differently than before" in r.completion.error and
               r.completion.error.endswith("or set rollout.branch.roots=null") for r in rest)
    assert all(r.reward is None for r in rest)


def episode(*lowest, error=None):
    """Of actions of two tokens with an observation of one between them."""
    turns, logprobs, mask = [], [], []
    for i, low in enumerate(lowest):
        if i:
            turns.append(Turn(start=len(mask), end=len(mask) + 1, role="observation"))
            logprobs, mask = [*logprobs, 0.0], [*mask, False]
        turns.append(Turn(start=len(mask), end=len(mask) + 2, text=str(i)))
        logprobs, mask = [*logprobs, -1.0, low], [*mask, True, True]
    return Completion(tokens=np.arange(len(mask)), logprobs=np.array(logprobs, np.float32), loss_mask=np.array(mask),
                      text="", finish_reason="stop", turns=tuple(turns), episode_id="e", error=error)


def test_places_and_beginnings_of_an_episode():
    done = episode(-2.0, -3.0, -9.0, -5.0)
    assert Leaf(done, 1).places.tolist() == [3, 6, 9] and Leaf(done, 4).places.tolist() == [6, 9]
    assert Leaf(episode(-1.0, -2.0, error="lost"), 1).places.tolist() == []
    rng = np.random.default_rng(0)
    assert [surprise(done, np.array([3, 6, 9]), k, rng) for k in range(4)] == [6, 9, 3, 6]
    cut = _cut(episode(-2.0, -3.0, -9.0), 6)
    assert cut.tokens.tolist() == [0, 1, 2, 3, 4, 5] and [t.text for t in cut.actions] == ["0", "1"]
    assert len(cut.turns) == 4 and cut.episode_id
