"""Tokens of an episode and of tools: as the chat template writes them, positions of the model, packed as padded."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import SAMPLES, TWO
from tests.helpers import Vowels, load, settings
from vlrl.environments.tools import Tool
from vlrl.errors import DataError
from vlrl.models.packing import join_prompts, make_batch, pieces_of
from vlrl.models.processing import Encoder
from vlrl.types import Media, Observation, Sample

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


SHOWN = Observation.of_results([Observation("wide", [Media(source=RED)]), Observation("Error: no </tool_response>"),
                                Observation("", [Media(source=TALL)])])
VISION = "<|vision_start|><|image_pad|><|vision_end|>"
HEAD = ("# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided with "
        "function signatures within <tools></tools> XML tags:\n<tools>")
TAIL = ("\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
        "<tool_call></tool_call> XML tags:\n<tool_call>\n{\"name\": <function-name>, \"arguments\": "
        "<args-json-object>}\n</tool_call>")
CONTENT = ("{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
           "{% if part.type == 'image' %}" + VISION + "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}")
NATIVE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content[0].text }}\n\n"
    "{% endif %}" + HEAD + "{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}" + TAIL + "<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "{% if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n<tool_response>\n" + CONTENT +
    "\n</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% elif message.role != 'system' %}<|im_start|>{{ message.role }}\n" + CONTENT +
    "{% for call in message.tool_calls %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
NATIVE = NATIVE.replace("%}\n", "%}{{ '\n' }}")  # a newline after a block is not written
"""As that of Qwen3-VL."""


def look(near: bool, times: int = 2):
    """Looks."""


class Looking(Vowels):
    system = "Be brief."

    def tools(self, sample):
        return [look]


@pytest.fixture(scope="module", params=TWO)
def model_of(request, tiny_models):
    policy, encode = load(settings(tiny_models[request.param], train={"tokens_per_batch": 4096}))
    return policy, encode, tiny_models[request.param]


def native(folder, into, template=NATIVE):
    """An encoder of a copy of a tiny model with another chat template."""
    into = shutil.copytree(folder, into / "model")
    (into / "chat_template.jinja").write_text(template)
    return load(settings(into))[1]


def ids(policy, text, images=()):
    return policy.processor(text=[text], images=list(images) or None)["input_ids"][0]


def test_tools_stand_in_the_text_of_the_system_where_the_template_has_no_place(model_of, tmp_path):
    policy, encode, folder = model_of
    sample = Sample(id="s", row={"q": "Who?"})
    text = (f"<|im_start|>system\nBe brief.\n\n{HEAD}\n{json.dumps(Tool(look).schema)}{TAIL}<|im_end|>\n"
            "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n")
    assert encode(Looking(), sample).text == text
    assert encode(Looking(), sample).ids.tolist() == ids(policy, text)
    assert native(folder, tmp_path)(Looking(), sample).text == text  # by the template: the same
    Looking.system, told = "", Looking.system
    try:
        assert encode(Looking(), sample).text == text.replace("Be brief.\n\n", "")
    finally:
        Looking.system = told


def test_results_follow_the_end_of_the_action_together(model_of, tmp_path):
    policy, encode, folder = model_of
    text = (f"\n<|im_start|>user\n<tool_response>\n{VISION}wide\n</tool_response>\n<tool_response>\nError: no < "
            f"/tool_response>\n</tool_response>\n<tool_response>\n{VISION}\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n")
    shown = encode.observation(SHOWN, "s")
    assert shown.ids.tolist() == ids(policy, text, [RED, TALL]) and len(shown.visual_tokens) == 2
    by_role = native(folder, tmp_path)
    assert by_role._keeps_results and not encode._keeps_results
    assert by_role.observation(SHOWN, "s").ids.tolist() == shown.ids.tolist()
    assert all(torch.equal(by_role.observation(SHOWN, "s").mm[k], v) for k, v in shown.mm.items())


@pytest.mark.parametrize("change", [
    ("{% if part.type == 'image' %}" + VISION + "{% else %}{{ part.text }}{% endif %}", "{{ part.text }}"),
    ("{{ call.function | tojson }}", "[{{ call.function.name }}]")], ids=["drops images", "calls in another form"])
def test_a_template_that_loses_images_or_has_other_calls_is_not_asked(tiny_models, tmp_path, change):
    before, role, after = NATIVE.partition("{% elif message.role != 'system' %}")
    lossy = before.replace(*change) + role + after.replace(*(change if "call" in change[0] else ("", "")))
    encode = native(tiny_models["qwen3_vl"], tmp_path, lossy)
    assert lossy != NATIVE and not encode._keeps_results
    assert encode.observation(SHOWN, "s").text.count(VISION) == 2


@pytest.mark.parametrize("family", ["smolvlm", "llava_onevision", "internvl"])
def test_every_family_is_shown_the_images_of_results(tiny_models, family):
    _, encode = load(tiny_models[family] and settings(tiny_models[family]))
    shown = encode.observation(SHOWN, "s")
    assert len(shown.visual_tokens) == 2 and min(shown.visual_tokens) > 0
    assert shown.text.count("<tool_response>") == 3 and "wide" in shown.text


def test_another_picture_in_a_result_changes_log_probabilities(model_of):
    policy, encode, _ = model_of
    prompt = encode(Looking(), Sample(id="s", row={"q": "Who?"}))
    words = encode.answer_ids("a b c d")
    found = []
    for picture in (RED, Image.new("RGB", (96, 64), "blue")):
        after = encode.observation(Observation.of_results([Observation("See.", [Media(source=picture)])]), "s")
        whole = join_prompts(prompt.followed_by(words), after).followed_by(words)
        tail = whole.ids[len(prompt):]
        shown = after.__class__(**{**vars(after), "ids": tail, "raw_ids": tail,
                                   "positions": whole.positions[:, len(prompt):],
                                   "aligned": {k: v[len(prompt):] for k, v in whole.aligned.items()}})
        (piece,) = pieces_of([prompt], [tail], 10**6, [shown])
        found.append(values(policy, make_batch([piece]), encode)[0])
    last = np.s_[-len(words):]
    assert torch.equal(found[0][:len(words)], found[1][:len(words)])
    assert (found[0][last] - found[1][last]).abs().max() > 1e-4


def test_templates_that_strip_thinking_are_known(tiny_models, tmp_path):
    kept = native(tiny_models["qwen3_vl"], tmp_path / "kept")
    cut = NATIVE.replace("{{ part.text }}{% endif %}", "{{ part.text.split('</think>')[-1] }}{% endif %}")
    assert not kept.strips_thinking and native(tiny_models["qwen3_vl"], tmp_path / "cut", cut).strips_thinking


def test_pictures_of_observations_are_made_smaller(tiny_models):
    config = settings(tiny_models["qwen3_vl"], episode={"max_pixels": 64 * 64})
    policy, whole = load(settings(tiny_models["qwen3_vl"]))
    encode = Encoder(policy.processor, policy.family, policy.positions, config)
    pictures = [Media(source=RED), Media(source=Image.new("RGB", (256, 128)))]
    assert [m.size for m in encode.observation(Observation("", pictures), "s").media] == [(78, 52), (90, 45)]
    own = encode.observation(Observation("", [Media(source=Image.new("RGB", (64, 64)))]), "s").media[0]
    assert own.sha256 == whole.observation(Observation("", [Media(source=Image.new("RGB", (64, 64)))]), "s"
                                           ).media[0].sha256  # untouched
    with pytest.raises(DataError):
        encode.observation(Observation("", [Media(source="no/such.png")]), "s")
