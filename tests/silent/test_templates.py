"""Chat templates as models bring them: each text and each picture is in the prompt once and as itself, or the run says
which turn its template cannot show."""

import shutil
from dataclasses import replace

import pytest

from tests import others
from tests.conftest import SAMPLES, noise
from tests.helpers import load, settings
from vlrl.errors import VlrlError
from vlrl.task import Task
from vlrl.types import Media, Observation, Sample

TURN = ("{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.role == 'ROLE' %}OTHER{% else %}"
        "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
        "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
"""Turns of which those of one role are written in another way."""


VISION = "<|vision_start|><|image_pad|><|vision_end|>"


class Asked(Task):
    """A question, with what a system says and what was said before."""

    prompt = "{q}"
    before = ()

    def messages(self, sample):
        return [*self.before, *super().messages(sample)]


class Told(Asked):
    before = ({"role": "system", "content": "Be brief."},)


class GoesOn(Asked):
    before = ({"role": "user", "content": "How many?"}, {"role": "assistant", "content": "Four."})


def encoder(tiny_models, tmp_path, template):
    folder = shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    return load(settings(folder))[1]


def test_a_system_text_that_the_template_joins_to_its_own_is_shown(tiny_models, tmp_path):
    encode = encoder(tiny_models, tmp_path, TURN.replace("ROLE", "system").replace(
        "OTHER", "{{ '# Rules\n' + message.content }}"))
    assert "system\n# Rules\nBe brief.<|im_end|>" in encode(Told(), SAMPLES["image"]).text


def test_a_given_answer_is_shown_as_itself(tiny_models, tmp_path):
    encode = encoder(tiny_models, tmp_path, TURN.replace("ROLE", "assistant").replace("OTHER", "{{ message.content }}"))
    assert "assistant\nFour.<|im_end|>" in encode(GoesOn(), SAMPLES["image"]).text


def test_a_template_without_turns_of_a_system_is_refused(tiny_models, tmp_path):
    with pytest.raises(VlrlError, match="system"):
        encoder(tiny_models, tmp_path, TURN.replace("ROLE", "system").replace("OTHER", ""))(Told(), SAMPLES["image"])


def test_a_template_that_shows_texts_alone_is_refused_for_a_picture(tiny_models, tmp_path):
    texts = "{{ message.content if message.content is string else message.content | map(attribute='text') | join }}"
    with pytest.raises(VlrlError, match="template"):
        encoder(tiny_models, tmp_path, TURN.replace("ROLE", "user").replace("OTHER", texts))(Asked(), SAMPLES["image"])


def test_a_template_that_shows_one_picture_of_a_turn_is_refused_for_two(tiny_models, tmp_path):
    one = ("{% for part in message.content %}{% if part.type == 'image' and loop.first %}<|vision_start|><|image_pad|>"
           "<|vision_end|>{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}")
    encode = encoder(tiny_models, tmp_path, TURN.replace("ROLE", "user").replace("OTHER", one))
    assert len(encode(Asked(), SAMPLES["image"]).visual_tokens) == 1
    with pytest.raises(VlrlError, match="template"):
        encode(Asked(), SAMPLES["two images"])


def test_the_pixel_limit_of_a_family_of_no_table(tmp_path):
    folder = others.build("glm4v", tmp_path)
    sample = Sample(id="large", media=(Media(source=noise(0, 400, 200)),), row={"q": "?"})
    _, encode = load(settings(folder, model={"name": str(folder), "max_pixels": 112 * 112}))
    ((width, height),) = encode(Asked(), sample).processed_sizes
    assert width * height <= 112 * 112


class Opened(Asked):
    """Its environment shows a picture before the first turn."""

    before = ({"role": "system", "content": "Look."},)


def test_what_an_environment_shows_first_where_pictures_stand_before_the_text(tiny_models, tmp_path):
    before = ("{% for part in message.content if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
              "{% endfor %}{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}")
    encode = encoder(tiny_models, tmp_path, TURN.replace("ROLE", "user").replace("OTHER", before))
    first = Observation("It lies there.", [Media(source=noise(3, 64, 64))])
    prompt = encode(Opened(), replace(SAMPLES["image"], opening=first))
    assert len(prompt.visual_tokens) == 2
    assert f"user\n{2 * VISION}Where is the red circle?It lies there.<|im_end|>" in prompt.text
