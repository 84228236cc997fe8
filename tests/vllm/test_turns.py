"""Every turn of an episode is the same for engine and trainer; a planted fault is named with its turn."""

import os
from dataclasses import replace
from functools import partial, reduce

import numpy as np
import pytest
import torch
from PIL import Image

from benchmarks.episodes_exact import FAMILIES, per_turn, playing, settings
from vlrl.engine.vllm.episode_check import describe_position, first_difference, turn_gaps
from vlrl.models.packing import join_prompts
from vlrl.types import Completion, Media, Observation, Sample, Turn

EXACT = 1e-5
TURN = 3
"""The observation that faults are planted in, the second one; turns 0 and 2 are the actions before it."""
CASES = [*((family, "full") for family in FAMILIES), ("qwen3_vl", "LoRA")]


@pytest.mark.slow
@pytest.mark.parametrize("family, mode", CASES)
def test_every_turn_agrees_after_each_sync(tiny_models, tmp_path, family, mode):
    with playing(settings(tiny_models[family], mode), tmp_path) as play:
        for _ in range(2):
            play.sync()
            for prompt, completion in play.episodes(1):
                assert [t.role for t in completion.turns] == ["assistant", "observation"] * 4
                assert len(completion.observed_media) == 4 and max(per_turn(play, prompt, completion)) < EXACT
                assert first_difference(play.policy, play.encode, prompt, completion, EXACT) is None


def windowed(play, monkeypatch):
    """Episodes of which each action is sampled under the last two observations."""
    monkeypatch.setattr(play.engine, "limits", play.engine.limits.model_copy(update={"history": "last:2"}))
    return play.episodes(1)


@pytest.fixture(scope="module")
def played(tiny_models, tmp_path_factory):
    with playing(settings(tiny_models["qwen2_5_vl"], "full"), tmp_path_factory.mktemp("played")) as play:
        play.sync()
        yield play, *play.episodes(1)[0]


def with_media(completion, encode, change):
    """The episode as a trainer would see it whose media were changed."""
    media = {m.sha256: Media(source=m.frames[0]) for m in completion.observed_media}
    shown = [encode.observation(Observation(t.text, [media[name] for name in t.media]), "s")
             for t in completion.turns if t.role == "observation" and t.start < t.end]
    after = reduce(join_prompts, change(*shown))
    return replace(completion, shown=replace(completion.shown, media=after.media, mm=after.mm))


def changed(array, turn, values):
    out = array.copy()
    out[..., turn.start:turn.start + len(values)] = values
    return out


def other_pixels(shown):
    return replace(shown, mm=shown.mm | {"pixel_values": -shown.mm["pixel_values"]})


def test_a_planted_fault_is_named_with_its_turn(played):
    """Tokenised again (sglang#12383): a random policy writes ids that its own text does not give back."""
    play, prompt, whole = played
    media, at, observed, acted = partial(with_media, whole, play.encode), whole.shown, whole.turns[TURN], whole.turns[2]
    place, again = at.positions[0, observed.start], play.encode.answer_ids(acted.text)[:acted.end - acted.start]
    for fault, turn, said in (
            (media(lambda a, b, d: (a, replace(b, media=(), mm={}), d)), TURN, "reads other media"),
            (media(lambda a, b, d: (a, replace(b, media=d.media, mm=d.mm), replace(d, media=b.media, mm=b.mm))), TURN,
             "reads other media"),
            (media(lambda a, b, d: (a, other_pixels(b), d)), TURN, "pixel_values that the trainer reads"),
            (media(lambda a, b, d: (a, replace(b, mm=b.mm | {"pixel_values": b.mm["pixel_values"][:-4]}), d)), TURN,
             "pixel_values that the trainer"),
            (replace(whole, loss_mask=np.roll(whole.loss_mask, 1)), None, "the loss mask is set where nothing was"),
            (replace(whole, shown=replace(at, positions=changed(  # that go on as if there were no image
                at.positions, observed, np.arange(place, place + 30)))), TURN, "the positions are not the model's"),
            (replace(whole, shown=replace(at, ids=changed(at.ids, acted, again))), 2, "the trainer reads other ids")):
        found = first_difference(play.policy, play.encode, prompt, fault, EXACT)
        assert found and said in str(found), found
        assert turn is None or found.turn == turn, said
        shown = whole.turns[found.turn]
        assert f"turn {found.turn} ({shown.role})" in str(found) and shown.start <= found.token, said
        assert turn is None or whole.turns[TURN if turn == TURN else 1].media[0][:12] in str(found), said


def test_other_pictures_and_a_stale_weight_show_in_their_turn(played):
    """prime-rl PR#2786, verifiers#1653: pictures were lost on the way from the process of the environment to the
    trainer, and rewards fell. The trainer agrees with the sampler, and not without the pictures."""
    play, prompt, completion = played
    assert os.getpid() not in play.engine.environments.processes and max(per_turn(play, prompt, completion)) < EXACT
    first, *later = per_turn(play, prompt, with_media(completion, play.encode, lambda *shown: [
        replace(o, mm=o.mm | {"pixel_values": torch.zeros_like(o.mm["pixel_values"])}) for o in shown]))
    assert first < EXACT and min(later) > 1e-3
    gaps = turn_gaps(play.policy, prompt, with_media(completion, play.encode, lambda a, b, d: (a, other_pixels(b), d)))
    before = completion.turns[TURN].start
    assert gaps[:before].max() < EXACT and gaps[before:].max() > 1e-3
    weight = next(p for name, p in play.policy.trainable() if "visual" in name and p.ndim > 1)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.mul_(1.5)
    found = first_difference(play.policy, play.encode, prompt, completion, EXACT)
    with torch.no_grad():
        weight.copy_(kept)
    assert found and found.turn == 0 and found.gap > EXACT and "log-probabilities" in found.what
    assert first_difference(play.policy, play.encode, prompt, completion, EXACT) is None


def test_the_prompt_of_each_turn_is_as_long_as_its_parts(tiny_models, tmp_path, monkeypatch):
    """prime-rl#1739: placeholders of earlier turns were expanded anew in each turn, and prompts grew exponentially.
    Four turns with a picture each; lengths and placeholders are counted from what the engine was asked."""
    with playing(settings(tiny_models["qwen2_5_vl"], "full"), tmp_path) as play:
        asked, inner = [], play.engine.engine
        monkeypatch.setattr(inner, "generate", lambda requests, done=None, draw=inner.generate: (
            asked.extend(requests), draw(requests, done))[1])
        play.sync()
        for prompt, completion in play.episodes(1):
            own = [r for r in asked if r.sample.id == prompt.sample_id]
            assert len(own) == 4
            places = [prompt.ids, *(completion.tokens[:t.start] for t in completion.turns if t.role == "assistant")]
            image = play.policy.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
            for turn, request in enumerate(own):
                grown = len(prompt) + (len(places[turn + 1]) if turn else 0)
                pictures = [*prompt.visual_tokens, *completion.shown.visual_tokens][:len(request.prompt.media)]
                assert len(request.prompt) == grown and len(request.prompt.media) == len(prompt.media) + turn
                assert (request.prompt.ids == image).sum() == sum(pictures) > 0
                assert (request.prompt.raw_ids == image).sum() == len(request.prompt.media)


@pytest.mark.slow
def test_windows_of_the_history_are_read_as_sampled(played, monkeypatch):
    play, *_ = played
    for prompt, completion in windowed(play, monkeypatch):
        assert len(completion.windows) == 4
        assert first_difference(play.policy, play.encode, prompt, completion, EXACT) is None
        found = first_difference(play.policy, play.encode, prompt, replace(
            completion, windows=(*completion.windows[:3], other_pixels(completion.windows[3]))), EXACT)
        assert found and found.turn == 6 and "log-probabilities" in found.what


def test_places_have_names():
    turns = [Turn(start=0, end=3), Turn(start=4, end=9, role="observation", media=("ab" * 32,)), Turn(start=9, end=12)]
    assert describe_position(turns, 2) == "turn 0 (assistant), token 2 of 3"
    assert describe_position(turns, 3) == "turn 0 (assistant), the end forced on it"
    assert describe_position(turns, 4) == "turn 1 (observation), token 0 of 5, media abababababab"
    assert describe_position(turns, 11) == "turn 2 (assistant), token 2 of 3, after media abababababab"


def test_a_clip_that_an_observation_shows_is_read_again_as_it_was(tiny_models):
    for times in ((0.5, 1.0, 4.0, 4.5), (0.0, 0.001, 0.002, 9.0)):
        from tests.models.test_packing import Ask, shared

        policy, encode = shared(tiny_models["qwen3_vl"])
        prompt = encode(Ask(), Sample(id="s", row={"q": "What?"}))
        frames = [Image.new("RGB", (64, 64), (60 * i, 0, 0)) for i in range(4)]
        piece = encode.observation(Observation("And now?", [Media(kind="video", source=frames, times=times)]), "s")
        action = np.array(encode.answer_ids("yes"))
        turns = (Turn(start=0, end=len(action), text="yes"),
                 Turn(start=len(action), end=len(action) + len(piece), role="observation", text="And now?",
                      media=tuple(m.sha256 for m in piece.media)))
        tokens, whole = np.concatenate([action, piece.ids]), join_prompts(prompt.followed_by(action), piece)
        shown = replace(whole, ids=tokens, positions=whole.positions[:, len(prompt):])
        episode = Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), turns=turns, text="yes",
                             loss_mask=np.arange(len(tokens)) < len(action), finish_reason="stop", episode_id="e",
                             shown=shown, observed_media=piece.media)
        assert first_difference(policy, encode, prompt, episode, np.inf) is None, times
