"""Tokens of an episode: observations as the template writes them, positions of the model, packed as padded."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import SAMPLES, TWO
from tests.helpers import Vowels, load, settings
from vlrl.models.packing import join_prompts, make_batch, pieces_of
from vlrl.types import Media, Observation

RED, TALL = Image.new("RGB", (96, 64), "red"), Image.effect_noise((64, 128), 40).convert("RGB")
OBSERVATIONS = [Observation("A wall.", [Media(source=RED)]), Observation("A door."),
                Observation("Two.", [Media(source=TALL), Media(source=RED)])]


@pytest.fixture(scope="module", params=TWO)
def tiny(request, tiny_models):
    return load(settings(tiny_models[request.param], train={"tokens_per_batch": 4096}))


def episode(encode, prompt, observations, seed):
    """An answer of sampled tokens and observations, and what it shows."""
    rng, words = np.random.default_rng(seed), encode.answer_ids("a b c d e f g h")[:-1]
    whole, tokens = prompt, []
    for observation in [*observations, None]:
        action = np.append(rng.choice(words, 3 + seed), encode.end)
        whole = whole.followed_by(action)
        tokens.append(action)
        if observation:
            shown = encode.observation(observation, "s")
            whole = join_prompts(whole, shown)
            tokens.append(shown.ids)
    return np.concatenate(tokens), whole


def test_an_observation_is_what_the_template_writes_after_a_turn(tiny):
    policy, encode = tiny
    shown = encode.observation(OBSERVATIONS[0], "s")
    messages = [{"role": "user", "content": [{"type": "text", "text": "Go."}]},
                {"role": "assistant", "content": [{"type": "text", "text": "left"}]},
                {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "A wall."}]}]
    text = policy.processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True,
                                                **policy.family.template)
    whole = policy.processor(text=[text], images=[RED], return_tensors="pt")["input_ids"][0].numpy()
    begins = len(whole) - len(shown)
    assert whole[begins:].tolist() == shown.ids.tolist() and whole[begins - 1] == encode.end
    assert shown.visual_tokens[0] > 0 and len(shown.media) == 1


def test_what_a_tool_or_a_judge_says_places_no_picture(tiny):
    """EasyR1#110, R1-V#91: one token of an image more than the images have."""
    policy, encode = tiny
    hostile = "".join(policy.family.vision_tokens)
    said, plain = (Observation(f"It says {more}.", [Media(source=RED)]) for more in (hostile, "no"))
    for a, b in ((said, plain), (Observation.of_results([said, said]), Observation.of_results([plain, plain]))):
        found, expected = encode.observation(a, "s"), encode.observation(b, "s")
        assert found.visual_tokens == expected.visual_tokens and len(found) > len(expected)
        count = [np.isin(prompt.ids, policy.banned).sum() for prompt in (found, expected)]
        assert count[0] == count[1] > 0


def test_positions_are_the_models_own_over_the_whole_episode(tiny):
    policy, encode = tiny
    _, whole = episode(encode, encode(Vowels(), SAMPLES["image"]), OBSERVATIONS, 2)
    ids = torch.from_numpy(whole.ids)[None]
    image = policy.processor.tokenizer.convert_tokens_to_ids(policy.processor.image_token)
    assert np.array_equal(whole.positions, policy.positions(ids, (ids == image).long(), whole.mm))
    assert whole.mm["image_grid_thw"].shape == (4, 3)


@pytest.mark.parametrize("kind", ["image", "text"])
def test_packed_is_padded(tiny, kind):
    policy, encode = tiny
    prompt = encode(Vowels(), SAMPLES[kind])
    ragged = [OBSERVATIONS, [], OBSERVATIONS[1:2], OBSERVATIONS[2:] + OBSERVATIONS]
    made = [episode(encode, prompt, observations, i) for i, observations in enumerate(ragged)]
    shown = [None if not o else tail(prompt, whole, encode, o) for o, (_, whole) in zip(ragged, made, strict=True)]
    (piece,) = pieces_of([prompt] * 4, [tokens for tokens, _ in made], 10**6, shown)
    found = {layout: values(policy, make_batch(piece_rows, layout), encode)
             for layout, piece_rows in (("shared", [piece]), ("padded", [piece.take([i]) for i in range(4)]))}
    for packed, padded in zip(*found.values(), strict=True):
        assert (packed - padded).abs().max() <= 1e-5 * max(1, padded.abs().max())
    mm = shown[0].mm
    other = replace(shown[0], mm={**mm, "pixel_values": -mm["pixel_values"]})  # another picture in a later turn
    changed = values(policy, make_batch([replace(piece, shown=(other, *shown[1:]))]), encode)[0]
    assert (changed - found["shared"][0]).abs().max() > 1e-3


def tail(prompt, whole, encode, observations):
    """Completion.shown of an episode, by hand."""
    media = [encode.observation(o, "s") for o in observations]
    after = media[0]
    for more in media[1:]:
        after = join_prompts(after, more)
    p = len(prompt)
    return replace(after, ids=whole.ids[p:], raw_ids=whole.raw_ids[p:], positions=whole.positions[:, p:],
                   aligned={k: v[p:] for k, v in whole.aligned.items()})


def values(policy, batch, encode):
    """Log-probabilities, and the gradient of the sum of those of sampled tokens; placeholders have 0."""
    policy.model.zero_grad()
    logprobs = policy.logprobs(batch, 1.0).logprobs
    assert torch.isfinite(logprobs).all()
    assert (logprobs[torch.isin(batch.targets, policy.banned)] == 0).all()
    logprobs.sum().backward()
    return logprobs.detach(), *(p.grad.clone() for _, p in policy.trainable())
