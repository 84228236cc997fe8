"""KV caches that stay alive between the turns of an episode, against prompts that are read anew."""

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from tests.conftest import SAMPLES, TWO, noise
from tests.helpers import Vowels, load, settings
from vlrl.engine.base import CacheSlot, Request, Sampling
from vlrl.engine.hf import HFEngine
from vlrl.models.packing import join_prompts
from vlrl.types import Media, Observation

TURNS, GROUP = 4, 3


@pytest.fixture(scope="module", params=[*TWO, pytest.param("smolvlm", marks=pytest.mark.slow),
                                        "internvl", "llava_onevision"])
def tiny(request, tiny_models):
    return load(settings(tiny_models[request.param]))


def observation(turn, i):
    """A picture in each turn, of other sizes; now and then two, or none."""
    pictures = [Media(source=noise(10 * turn + i, 56 + 28 * turn, 56 + 28 * (i % 2))) for _ in range((turn + i) % 3)]
    return Observation(f"Turn {turn}" + " of many" * i, pictures)


def play(policy, encode, alive, most=None, read=None):
    """Log-probabilities [turns][episodes] and tokens of a group of episodes, two prompts."""
    engine, kinds = HFEngine(policy, seed=5), ("image", "text")
    engine.turn_caches.most = engine.turn_caches.most if most is None else most
    sampling = Sampling(max_new_tokens=6)
    groups = [[CacheSlot() for _ in range(GROUP)] if alive else [] for _ in kinds]
    asked = [Request(prompt=encode(Vowels(), SAMPLES[kind]), n=GROUP, sampling=sampling, key=(0, i),
                     continues=tuple(groups[i])) for i, kind in enumerate(kinds)]
    out = []
    for turn in range(TURNS):
        made = [c for answers in engine.generate(asked) for c in answers]
        out.append(made)
        before = [r.prompt for r in asked for _ in range(r.n)]
        asked = []
        for i, (prompt, action) in enumerate(zip(before, made, strict=True)):
            whole = prompt.followed_by(action.tokens)
            shown = encode.observation(observation(turn, i), "s")
            if whole.ids[-1] != encode.end:
                whole = whole.followed_by(np.array([encode.end]))
            one = [c for group in groups for c in group][i:i + 1]
            for continued in one:
                continued.observed = shown
            asked.append(Request(prompt=join_prompts(whole, shown), n=1, sampling=sampling, key=(7, i, turn),
                                 continues=tuple(one)))
        if read is not None:
            read.append(sum(len(c.cache.ids) if c.cache else 0 for group in groups for c in group))
    return out, asked, engine


def prefills(policy, work):
    """Tokens of each prompt pass while `work` runs."""
    seen = []
    inner = policy.base.model
    hook = inner.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"].shape)
                                           if kwargs["input_ids"].shape[1] > 1 else None, with_kwargs=True)
    try:
        return work(), seen
    finally:
        hook.remove()


@pytest.mark.slow
def test_living_caches_give_the_log_probabilities_of_prompts_read_anew(tiny):
    policy, encode = tiny
    (anew, *_), all_read = prefills(policy, lambda: play(policy, encode, alive=False))
    (alive, *_), rest_read = prefills(policy, lambda: play(policy, encode, alive=True))
    for before, after in zip(anew, alive, strict=True):
        for a, b in zip(before, after, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and np.abs(a.logprobs - b.logprobs).max() < 1e-5
    assert all_read[0] == rest_read[0] and len(all_read) == len(rest_read) == TURNS
    longest = max(len(encode.observation(observation(turn, i), "s")) for turn in range(TURNS) for i in range(6))
    assert max(width for _, width in rest_read[1:]) <= longest + 2  # the action's last token, and one that closes it
    assert all_read[-1][1] > 2 * rest_read[-1][1]


@pytest.mark.slow
def test_bounded_caches_are_computed_again(tiny):
    policy, encode = tiny
    room, counted = [], []
    whole, *_ = play(policy, encode, alive=True, read=room)
    bounded, *_ = play(policy, encode, alive=True, most=room[0] // 2, read=counted)
    assert 0 < max(counted) <= room[0] // 2 < room[0]
    for before, after in zip(whole, bounded, strict=True):
        for a, b in zip(before, after, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist() and np.abs(a.logprobs - b.logprobs).max() < 1e-5


def test_a_cache_is_of_these_weights_and_this_prompt(tiny):
    policy, encode = tiny
    _, asked, engine = play(policy, encode, alive=True)
    one = next(r for r in asked if r.prompt.media)
    kept = one.continues[0].cache
    assert kept.rest(one.prompt, one.continues[0].observed) is not None
    assert kept.rest(one.prompt, encode.observation(Observation("x", [Media(source=Image.new("RGB", (56, 56)))]), "s")
                     ) is None
    other = replace(one.prompt, media=(replace(one.prompt.media[0], sha256="other"), *one.prompt.media[1:]))
    assert kept.rest(other, one.continues[0].observed) is None
    changed = one.prompt.ids.copy()
    changed[3] += 1
    assert kept.rest(replace(one.prompt, ids=changed), one.continues[0].observed) is None
    engine.sync(policy, 1)
    assert all(r.continues[0].cache is None for r in asked)
