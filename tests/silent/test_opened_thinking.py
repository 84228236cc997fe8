"""Chat templates as models bring them: those whose generation prompt begins the answer, such as <think>, and those that
cannot show a role or a picture."""

import shutil
from dataclasses import replace

import pytest

from tests import others
from tests.conftest import SAMPLES, noise
from tests.environments.acting import Told, played
from tests.helpers import load, settings
from vlrl.config import validate
from vlrl.data.coordinates import Coordinates
from vlrl.engine.base import Request, Sampling
from vlrl.errors import VlrlError
from vlrl.rollout.demonstrations import Demonstrations
from vlrl.rollout.generate import make_group, sampling_of
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.tools.machine.dryrun import show
from vlrl.tools.tasks.rescore import rescore
from vlrl.tools.tasks.score_rows import score_row
from vlrl.training.build_task import make_task
from vlrl.types import Media, Observation, Sample

OPENS = ("{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
         "{% else %}{{ '<think>\\n' }}{% endif %}")
THOUGHT = "A tail and two ears.\n"


@pytest.fixture(scope="module")
def thinking(tiny_models, tmp_path_factory):
    """A tiny model whose template opens <think>, or writes an empty block where enable_thinking is false."""
    folder = shutil.copytree(tiny_models["qwen3_vl"], tmp_path_factory.mktemp("opened") / "model")
    template = folder / "chat_template.jinja"
    text = template.read_text().rstrip()
    assert text.endswith("{% endif %}")
    template.write_text(text.removesuffix("{% endif %}") + OPENS + "{% endif %}")
    return folder


@pytest.fixture(scope="module")
def encode(thinking):
    return load(settings(thinking))[1]


class Named(Task):
    prompt = "What is it? Think in <think></think>, then answer in <answer></answer>."
    rewards = {"right": 1.0, "framed": 0.5}

    def score(self, sample, answer):
        return {"right": float(answer.final == sample["label"]), "framed": float(answer.text.startswith("<think>"))}

    def oracle(self, sample):
        return f"<think>\n{THOUGHT}</think>\n<answer>{sample['label']}</answer>"


def scored(config, row, *texts, opened="<think>\n"):
    task = make_task(validate({**config, "model": {"name": "x"}}))
    task.coordinates = Coordinates()
    result = score_row(task, {"sample": row, "completions": list(texts), "opened": opened}, None)
    return [r["reward"] for r in result["rewards"]]


def test_thinking_that_the_prompt_opened_earns_all_and_what_was_cut_nothing():
    natural, doubled, cut = (f"{THOUGHT}</think>\n<answer>cat</answer>",
                             f"<think>\n{THOUGHT}</think>\n<answer>cat</answer>", "It is a cat, or")
    row = {"id": "a", "image": "a.png", "label": "cat", "labels": ["cat", "dog"]}
    rewards = scored({"task": {"name": "classification", "recipe": "cls_rl"}}, row, natural, doubled, cut)
    assert rewards[0] == 2.0 and rewards[1] <= rewards[0] and rewards[2] == 0.0
    row = {"id": "a", "image": "a.png", "expression": "the cat", "boxes": [{"box": [10, 10, 60, 60]}], "width": 100,
           "height": 100}
    config = {"task": {"name": "grounding", "coordinates": "original"}}
    assert scored(config, row, "perhaps [10, 10, 60, 60], or")[0] == 0.0
    assert scored(config, row, "perhaps [0, 0, 9, 9]\n</think>\n\n[10, 10, 60, 60]")[0] == pytest.approx(1.0)


def test_what_the_prompt_opened_is_stored_and_told_to_an_environment(encode, tmp_path, thinking):
    task, sample = Named(), Sample(id="a", row={"label": "cat"})
    prompt = encode(task, sample)
    given = Demonstrations(task, encode).generate([Request(prompt=prompt, n=1, sampling=Sampling(max_new_tokens=9),
                                                           sample=sample)])[0]
    group = make_group(task, sample, prompt, given, group_id="0", split="train", step=0)
    folder = RunFolder(tmp_path)
    folder.write_rollouts(0, 0, [group])
    (row,) = folder.rollouts().to_pylist()
    assert row["opened"] == "<think>\n" and row["completion"] == f"{THOUGHT}</think>\n<answer>cat</answer>"
    assert row["reward"] == 1.5
    row["n_tokens"] = len(row["token_ids"])
    assert rescore(task, [row]).new == [1.5]
    policy, encode = load(settings(thinking, rollout={"group_size": 2, "max_new_tokens": 4}))
    (group,) = played(policy, encode, encode.config, count=1, task=Told(rewards={"vowels": 1.0}))
    rollout, _ = group.rollouts
    actions = rollout.completion.actions
    assert len(actions) == 3 and all(t.opened == "<think>\n" and not t.text.startswith("<think>") for t in actions)
    for turn in actions:  # its own parts count the vowels of what it was told: the i of <think> too
        assert turn.parts["vowels"] == pytest.approx((1 + sum(c in "aeiou" for c in turn.text)) / 8)


def test_a_demonstration_goes_on_where_the_prompt_stops_and_the_dry_run_shows_it(encode):
    task = Named()
    written = []
    for solution in (None, "<think>Ears.</think><answer>cat</answer>", "Ears.</think><answer>cat</answer>", "cat"):
        sample = Sample(id="a", row={"label": "cat", "solution": solution})
        request = Request(prompt=encode(task, sample), n=1, sampling=Sampling(max_new_tokens=9), sample=sample)
        ((given,),) = Demonstrations(task, encode).generate([request])
        written.append((request.prompt.text + given.text).rpartition("assistant\n")[2])
        assert encode.processor.tokenizer.decode(given.tokens[:-1]) == given.text
    assert [text.count("<think>") for text in written] == [1, 1, 1, 1]
    assert [text.count("</think>") for text in written] == [1, 1, 1, 1] and written[3].endswith("</think>\n\ncat")
    oracle = show(encode.config, Named(), Sample(id="a", row={"label": "cat"}), encode).oracle
    assert oracle.answer == f"{THOUGHT}</think>\n<answer>cat</answer>" and oracle.opened == "<think>\n"
    assert oracle.is_best and oracle.reward == 1.5


def test_a_block_that_the_template_has_closed_is_no_thinking(thinking):
    config = settings(thinking, model={"name": str(thinking), "chat_template_kwargs": {"enable_thinking": False}},
                      rollout={"max_new_tokens": 8, "thinking_budget": 3})
    _, encode = load(config)
    task, sample = Named(), Sample(id="a", row={"label": "cat"})
    prompt = encode(task, sample)
    assert prompt.opened == encode.observation(Observation("Go on."), "a").opened == "<think>\n\n</think>\n\n"
    assert Request(prompt=prompt, n=1, sampling=sampling_of(config.rollout, 1.0)).sampling.thinking_budget is None
    row = {"id": "a", "image": "a.png", "label": "cat"}
    bare = {"task": {"name": "classification", "thinking": "no_thinking"}}
    assert scored(bare, row, "cat", opened=prompt.opened) == [1.1]


TURN = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'ROLE' %}OTHER{% else %}"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
VISION = "<|vision_start|><|image_pad|><|vision_end|>"


class Asked(Task):
    prompt = "{q}"
    before = ()

    def messages(self, sample):
        return [*self.before, *super().messages(sample)]


class Briefed(Asked):
    before = ({"role": "system", "content": "Be brief."},)


class GoesOn(Asked):
    before = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four."})


@pytest.fixture
def encoder(tiny_models, tmp_path):
    """Makes an encoder of the template of turns of which those of one role are written in another way."""
    def made(role, other):
        folder = shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model", dirs_exist_ok=True)
        (folder / "chat_template.jinja").write_text(TURN.replace("ROLE", role).replace("OTHER", other))
        return load(settings(folder))[1]

    return made


def test_what_a_system_the_model_and_an_environment_show_first_is_shown(encoder):
    encode = encoder("system", "{{ '# Rules\n' + message.content }}")
    assert "system\n# Rules\nBe brief.<|im_end|>" in encode(Briefed(), SAMPLES["image"]).text
    encode = encoder("assistant", "{{ message.content }}")
    assert "assistant\nFour.<|im_end|>" in encode(GoesOn(), SAMPLES["image"]).text
    encode = encoder("user", "{% for part in message.content if part.type == 'image' %}" + VISION + "{% endfor %}"
                     "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}")
    first = Observation("It lies there.", [Media(source=noise(3, 64, 64))])
    prompt = encode(Briefed(), replace(SAMPLES["image"], opening=first))
    assert len(prompt.visual_tokens) == 2
    assert f"user\n{2 * VISION}Where is the red circle?It lies there.<|im_end|>" in prompt.text


def test_a_template_that_leaves_out_a_system_or_a_picture_is_refused(encoder):
    with pytest.raises(VlrlError, match="system"):
        encoder("system", "")(Briefed(), SAMPLES["image"])
    texts = "{{ message.content if message.content is string else message.content | map(attribute='text') | join }}"
    with pytest.raises(VlrlError, match="template"):
        encoder("user", texts)(Asked(), SAMPLES["image"])
    encode = encoder("user", "{% for part in message.content %}{% if part.type == 'image' and loop.first %}" + VISION +
                     "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}")
    assert len(encode(Asked(), SAMPLES["image"]).visual_tokens) == 1
    with pytest.raises(VlrlError, match="template"):
        encode(Asked(), SAMPLES["two images"])


def test_the_pixel_limit_of_a_family_of_no_table(tmp_path):
    folder = others.build("glm4v", tmp_path)
    sample = Sample(id="large", media=(Media(source=noise(0, 400, 200)),), row={"q": "?"})
    _, encode = load(settings(folder, model={"name": str(folder), "max_pixels": 112 * 112}))
    ((width, height),) = encode(Asked(), sample).processed_sizes
    assert width * height <= 112 * 112
