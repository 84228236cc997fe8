"""What a run writes as its config.yaml is read as the settings that it ran with: of every config, and of what is
derived of one."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.tables import each
from vlrl.config import Config, config_of, derived, differences, dump, load, shipped_configs, stages_of, validate
from vlrl.config.base import Named
from vlrl.config.plain import plain
from vlrl.config.presets import KINDS, shipped
from vlrl.errors import ConfigError
from vlrl.methods.preferences.dpo import preference_config
from vlrl.store import RunFolder
from vlrl.training.resume import refuse_other_settings
from vlrl.training.sft import supervised_config

CONFIGS = Path(__file__).parents[2] / "configs"


def runs_of(found: Config) -> Iterator[tuple[str, Config]]:
    """Yields what may run with some settings."""
    for name, own in [("", found), *((stage.name, own) for stage, own in stages_of(found))]:
        yield name, own
        yield f"{name} sft", supervised_config(own)
        yield f"{name} dpo", preference_config(own, Named(name="dpo"))


def assert_read_back(found: Config) -> None:
    for name, own in runs_of(found):
        read = validate(plain(own))
        assert read == own and not differences(read, own), name
    written = dump(found)
    read = validate(yaml.load(written, yaml.CSafeLoader))
    assert read == found and dump(read) == written


@each("name word", [*product(
    ["quickstart.yaml", "preference/reward_model.yaml"],
    ["eval.samples=0", "eval.splits=[]", "save.best=", "save.best=accuracy", "services.reference=start",
     "services.reference=ema", "algo.critic={}", "engine=vllm", "algo.guided={}", "task.extra=null"]),
    ("mixture.yaml", "eval.samples=0"), ("quickstart.yaml", "extends=stages/kimi_long2short.yaml")])
def test_settings_of_every_kind_of_run(name, word):
    assert_read_back(load(CONFIGS / name, ["model.name=m", word]))


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted({path.parent.relative_to(CONFIGS) for path in shipped_configs()}), ids=str)
def test_settings_of_every_shipped_config(folder):
    tasks = {p.name: p.task for p in shipped() if p.kind == KINDS.get(str(folder))}
    for path in sorted((CONFIGS / folder).glob("*.yaml")):
        bare = path.parent.name in ("models", "engines") or path == CONFIGS / "tiny.yaml"
        base = CONFIGS / tasks.get(path.stem, "quickstart.yaml" if bare else path)
        assert_read_back(load(base, ["model.name=m", *([f"extends={path}"] if base != path else [])]))


@each("value", [
    "2024-01-01", "2024-01-01 10:00:00", "{1: a, true: {1.5: b}}", ".inf", ".nan", "1e-7", "!!set {a, b}",
    "!!binary aGVsbG8=", "'1e3'", "'2024-01-01'", "'a: b # c'", "null", "[[1], {}]", '"\\x85\\u2028\\0"'])
def test_values_of_every_kind(value):
    for word in ("task.extra={}", "algo.loss={{name: cispo, x: {}}}", "environment.options={{x: [{}]}}"):
        found = load(CONFIGS / "quickstart.yaml", [word.format(value)])
        assert repr(validate(yaml.safe_load(dump(found)))) == repr(found)


def test_values_of_python_and_derived_settings():
    found = config_of(CONFIGS / "quickstart.yaml", task={"cap": np.float32(0.5), "most": np.int64(3), "at": Path("a")})
    assert repr(found.task.model_extra) == "{'drawn': True, 'cap': 0.5, 'most': 3, 'at': 'a'}"
    assert validate(yaml.safe_load(dump(found))) == found
    with pytest.raises(ConfigError, match=r"task\.f=<built-in.*: a setting must be a string, .* a builtin_function"):
        config_of(CONFIGS / "quickstart.yaml", task={"f": print})
    found = load(CONFIGS / "quickstart.yaml", ["eval.samples=0"])
    with pytest.raises(ConfigError, match=r"save\.best='accuracy' keeps the checkpoint of the best evaluation"):
        derived(found, save=found.save.model_copy(update={"best": "accuracy"}))


def test_a_supervised_run_without_evaluations_goes_on(tmp_path):
    words = [f"run.dir={tmp_path}", "model.name=m", "eval.samples=0", "services.reference=start"]
    own = supervised_config(load(CONFIGS / "preference/reward_model.yaml", words))
    RunFolder(tmp_path).create(dump(own), own.seed)
    assert refuse_other_settings(RunFolder(tmp_path), own) == own
