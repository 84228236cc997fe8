"""environment.name: what it stands for, what it refuses, and the task that lives in it; what docs/environments.md says
of it is so."""

import inspect
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from vlrl import config
from vlrl.config.schema import EnvironmentSettings
from vlrl.environments import external as named
from vlrl.environments.external import KINDS, attach, resolved
from vlrl.environments.gym import GymEnvironment
from vlrl.environments.host import Environments
from vlrl.environments.mcp import McpEnvironment
from vlrl.environments.openenv import OpenEnv
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, load
from vlrl.task.environment import Environment, check_unattached, has_environment
from vlrl.task.mixture import Mixture
from vlrl.task.scoring import score_group
from vlrl.training.build_task import make_task
from vlrl.types import PastAction, Sample, Step

ICE = {"is_slippery": False, "actions": ["left", "down", "right", "up"]}
WAY = "down down right down right right".split()


class Plain(Task):
    prompt, rewards = "Go.", {"return": 1.0, "success": 0.0}


class Own(Plain):
    def tools(self, sample):
        return ()


def settings(name, **more):
    return EnvironmentSettings(name=name, **more)


def loaded(*words):
    return make_task(config.load(config.shipped("tiny.yaml"), list(words)))


def test_names_that_cannot_act_and_passwords_that_are_never_told():
    for name, options, why in (
            ("gym:", {}, "has no address after gym:"),
            ("gym:FrozenLake-v77", {}, "gym:FrozenLake-v77': VersionNotFound"),
            ("gym:no_package_of_anyone:X-v0", {}, "No module named 'no_package_of_anyone'"),
            ("FrozenLake-v1", {}, "is not known. Known: gym:, openenv:, mcp:"),
            ("jim:FrozenLake-v1", {}, "No module named 'jim'"), ("no/such/file.py:World", {}, "does not exist"),
            ("openenv:localhost:8000", {}, "must look like http://127.0.0.1:8000"), ("openenv:http://127.0.0.1:8000",
            {"feild": "x"}, "options.feild='x' is not known. Did you mean 'field'"),
            ("openenv:http://127.0.0.1:8000", {"step_s": 5}, "environment.options.step_s=5 is not known"),
            ("mcp:'open", {}, "No closing quotation"), ("mcp:a b", {"tool": []}, "Did you mean 'tools'"),
            (("mcp:a", "mcp:b"), {}, "must all be given as URLs"),
            ("gym:FrozenLake-v1", {"actions": "left"}, "environment.options.actions='left' must be a list: "),
            ("gym:FrozenLake-v1", {"actions": [False]}, "environment.options.actions: False is not a name"),
            ("gym:FrozenLake-v1", {"parts": ["return"]}, "options.parts=['return'] is not an option: the parts"),
            ("openenv:http://127.0.0.1:8000", {"images": "screen"},
            "environment.options.images='screen' must be a list"),
            ("mcp:a", {"tools": "look"}, "environment.options.tools='look' must be a list"),
            ("mcp:a", {"environment": "HOME"}, "environment.options.environment='HOME' must be a list"),
            ("mcp:a", {"environment": ["VLRL_NEVER_SET"]}, "names 'VLRL_NEVER_SET', which is not set"),
            (("gym:FrozenLake-v1", "gym:Taxi-v4"), {}, "must all be servers of one kind"),
            (("mcp:http://a/mcp", "openenv:http://b"), {}, "must all be servers of one kind"),
            (("a.py:B", "a.py:C"), {}, "only servers can have several addresses")):
        with pytest.raises(ConfigError) as error:
            resolved(settings(name, options=options))
        assert why in str(error.value), (name, options, why)
    for name in (
            "mcp:http://me:secret@a/mcp", "openenv:http://me:secret@a", "mcp:HTTP://secret@a",
            ("mcp:http://a", "openenv:http://me:secret@a"), "other:http://me:secret@a",
            ("mcp:a", "mcp:http://me:secret@a")):
        with pytest.raises(ConfigError) as error:
            resolved(settings(name))
        assert "secret" not in str(error.value), name


def test_what_it_does_not_go_with(monkeypatch):
    with pytest.raises(ConfigError, match=r"'gym:FrozenLake-v1': task '' has its own environment or tools"):
        attach(Own(), settings("gym:FrozenLake-v1"))
    with pytest.raises(ConfigError, match="several tasks"):
        attach(Mixture({"a": Plain(), "b": Plain()}), settings("gym:FrozenLake-v1"))
    with pytest.raises(ConfigError, match=r"without environment.name has no effect"):
        check_unattached(Plain(), settings("", options={"a": 1}))
    with pytest.raises(ConfigError, match="task 'recall' has its own environment"):
        loaded("task=recall", "environment.name=gym:FrozenLake-v1")
    with pytest.raises(ConfigError, match=r"environment.name is empty: set it"):
        loaded("task=world")
    with pytest.raises(ConfigError, match="one of the names is empty"):
        config.load(config.shipped("tiny.yaml"), ["environment.name=['gym:Taxi-v4', '']"])
    monkeypatch.setattr(named.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'mcp:a' needs the package mcp: pip install 'vlrl\[mcp\]'"):
        resolved(settings("mcp:a"))


FILE = '''
from vlrl import Environment, Step

class Count(Environment):
    def __init__(self, sample, until=3):
        self.n, self.until = sample["n"], until
    def reset(self, seed):
        from vlrl import Observation
        return Observation(f"{self.n} {seed}")
    def step(self, action):
        self.n += 1
        return Step(parts={"return": 1.0}, done=self.n >= self.until)
'''


def test_a_class_of_a_file(tmp_path):
    (tmp_path / "count.py").write_text(FILE)
    task = Plain()
    assert not has_environment(task)
    attach(task, settings(f"{tmp_path}/count.py:Count", options={"until": 2}))
    assert has_environment(task)
    environment = task.environment(Sample(id="a", row={"n": 0, "seed": 8}))
    assert isinstance(environment, Environment) and environment.reset(5).text == "0 8"
    assert [environment.step("").done for _ in range(2)] == [False, True]
    environment.close()
    assert task.environment(Sample(id="a", row={"n": 0})).reset(5).text == "0 5"


def test_the_perfect_way_earns_one_and_a_wrong_one_none():
    task = loaded("task=world", "environment.name=gym:FrozenLake-v1", f"environment.options={json.dumps(ICE)}")
    sample = task.samples("heldout")[0]
    host = Environments(lambda _: task, settings("", workers=1))
    try:
        for way, reward in ((WAY, 1.0), (["fly", *WAY], 1.0), (["down", "right"], 0.0)):
            episode = host.open(sample, 1)
            (first,) = host.reset([episode])
            assert first.media[0].source.size == (256, 256)
            turns = []
            for action in way:
                (step,) = host.step([episode], [action])
                assert isinstance(step, Step)
                turns.append(PastAction(action=action, parts=step.parts, state=step.state, done=step.done))
            (scored,) = score_group(task, sample, [replace(parse_answer(way[-1]), turns=tuple(turns))], 0)
            assert (scored.reward, scored.correct, turns[-1].done) == (reward, reward == 1, True)
            assert scored.parts["progress"] == reward
            host.close_episodes([episode])
    finally:
        host.close()


def test_seeds_of_the_splits_are_apart_and_rows_of_a_file(tmp_path):
    task = load("world", {"count": 50})
    seeds = {split: {sample["seed"] for sample in task.samples(split)} for split in ("train", "heldout")}
    assert all(len(found) == 50 for found in seeds.values()) and not seeds["train"] & seeds["heldout"]
    task.seed = 3
    assert not {sample["seed"] for sample in task.samples("train")} & seeds["train"]
    with pytest.raises(ConfigError, match="split 'other'"):
        task.samples("other")
    rows = [{"id": "a", "seed": 4, "instruction": "Climb."}, {"id": "b", "answer": "7"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = loaded("task=world", "environment.name=gym:FrozenLake-v1", f"data.train={tmp_path}/rows.jsonl",
                  "task.instruction=Go up.")
    one, two = task.samples("train")
    assert (one["instruction"], one["seed"], two["instruction"]) == ("Climb.", 4, "Go up.")
    turn = PastAction(action="7", parts={"return": 0.0})
    for text, success in (("<answer> 7 </answer>", 1.0), ("8", 0.0)):
        scored = score_group(task, two, [replace(parse_answer(text), turns=(turn,))], 0)
        assert scored[0].parts["success"] == success and scored[0].correct is bool(success)
    for wrong in (-1, "4", True, 2**31):
        with pytest.raises(DataError, match="must be a whole number from 0"):
            task.sample_from_row({"id": "c", "seed": wrong})


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text(encoding="utf-8")
SECTIONS = {"gymnasium": GymEnvironment, "OpenEnv": OpenEnv, "MCP": McpEnvironment}


def test_options_and_kinds_are_those_of_the_code():
    for name, cls in SECTIONS.items():
        section = PAGE.partition(f"\n## {name}\n")[2].partition("\n## ")[0]
        told = set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
        own = {n for n, p in inspect.signature(cls.__init__).parameters.items() if p.kind == p.KEYWORD_ONLY}
        assert told == own - {"parts", "step_s", "reset_s"}, name
    assert {*re.findall(r"^\| `(\w+):", PAGE, re.MULTILINE)} == {*KINDS}
    assert all(f"vlrl[{kind.extra}]" in PAGE for kind in KINDS.values())


def test_the_task_and_settings_of_the_page(tmp_path):
    (body,) = re.findall(r"^```python\n# ice.py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "ice.py").write_text(body)
    task = load(f"{tmp_path}/ice.py:Ice")
    environment = task.environment(task.samples("train")[0])
    environment.reset(1)
    steps = [environment.step(word) for word in WAY]
    assert steps[-1].parts == {"return": 1.0, "success": 1.0} and steps[-1].done
    environment.close()
    words = re.findall(r'environment.name=(\S+) "environment.options=(\{.*?\})"', PAGE)
    assert words
    for name, options in words:
        task = make_task(config.load(config.shipped("frozen_lake.yaml"), [
            f"environment.name={name}", f"environment.options={options}"]))
        task.environment(task.samples("train")[0]).close()
