"""Model folders and configs that would not end: a message in bounded time."""

import json
import shutil

import pytest

from tests.helpers import load, settings
from vlrl.config.loading import load as load_config
from vlrl.errors import ConfigError
from vlrl.models import loading
from vlrl.models.loading import skeleton


@pytest.fixture
def folder(tiny_models, tmp_path):
    return shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model")


@pytest.mark.parametrize("part, name", [("text_config", "num_hidden_layers"), ("vision_config", "depth")])
def test_a_model_of_too_many_layers(folder, part, name):
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config[part][name] = 100_000
    path.write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=rf"{part}.{name}=100000, but no model has more than 1,000"):
        skeleton(settings(folder).model)


@pytest.mark.parametrize("template", [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{% for i in range(99999) %}{{ m() if i }}{% endfor %}{% endmacro %}"
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ m() }}",
    "{% if 1 %}" * 3000 + "{% endif %}" * 3000, "{{ (" + "(" * 5000 + "1" + ")" * 5000 + ") }}"],
    ids=["loops", "macros", "blocks", "brackets"])
def test_a_template_that_does_not_end_or_is_nested_too_deeply(folder, monkeypatch, template):
    monkeypatch.setattr(loading, "_TEMPLATE_S", 0.2)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=r"no usable chat template: (it has not terminated|RecursionError)"):
        load(settings(folder))


def bomb(width: int, depth: int) -> str:
    lines = [f"x{i}: &x{i} [{', '.join([f'*x{i - 1}' if i else 'a'] * width)}]" for i in range(depth)]
    return "\n".join([*lines, f"task: *x{depth - 1}"])


@pytest.mark.parametrize("text, says", [(bomb(10, 8), "line .*its aliases .* more than 100,000 values"),
                                        (bomb(2, 40), "more than 100,000"), ("task: &t [*t]", "an alias .* contains"),
                                        ("task: &t {a: *t}", "an alias .* contains")])
def test_aliases_that_stand_for_billions(tmp_path, text, says):
    (tmp_path / "bomb.yaml").write_text(text)
    with pytest.raises(ConfigError, match=says):
        load_config(tmp_path / "bomb.yaml")


def test_aliases_in_measure_are_read(tmp_path):
    (tmp_path / "a.yaml").write_text("extends: quickstart.yaml\neval: {samples: &n 3}\nsteps: *n\n")
    assert load_config(tmp_path / "a.yaml").steps == 3
