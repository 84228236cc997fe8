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
VISION = "<|vision_start|><|image_pad|><|vision_end|>"


class Asked(Task):
    prompt = "{q}"
    before = ()

    def messages(self, sample):
        return [*self.before, *super().messages(sample)]


class Told(Asked):
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
    assert "system\n# Rules\nBe brief.<|im_end|>" in encode(Told(), SAMPLES["image"]).text
    encode = encoder("assistant", "{{ message.content }}")
    assert "assistant\nFour.<|im_end|>" in encode(GoesOn(), SAMPLES["image"]).text
    encode = encoder("user", "{% for part in message.content if part.type == 'image' %}" + VISION + "{% endfor %}"
                     "{% for part in message.content if part.type == 'text' %}{{ part.text }}{% endfor %}")
    first = Observation("It lies there.", [Media(source=noise(3, 64, 64))])
    prompt = encode(Told(), replace(SAMPLES["image"], opening=first))
    assert len(prompt.visual_tokens) == 2
    assert f"user\n{2 * VISION}Where is the red circle?It lies there.<|im_end|>" in prompt.text


def test_a_template_that_leaves_out_a_system_or_a_picture_is_refused(encoder):
    with pytest.raises(VlrlError, match="system"):
        encoder("system", "")(Told(), SAMPLES["image"])
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
