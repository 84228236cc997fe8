"""What docs/environments.md says of options is so, and its task works."""

import inspect
import re
from pathlib import Path

from vlrl import config
from vlrl.environments.external import KINDS
from vlrl.environments.gym import GymEnvironment
from vlrl.environments.mcp import McpEnvironment
from vlrl.environments.openenv import OpenEnv
from vlrl.task import load
from vlrl.training.build_task import make_task

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
    steps = [environment.step(word) for word in "down down right down right right".split()]
    assert steps[-1].parts == {"return": 1.0, "success": 1.0} and steps[-1].done
    environment.close()
    words = re.findall(r'environment.name=(\S+) "environment.options=(\{.*?\})"', PAGE)
    assert words
    for name, options in words:
        task = make_task(config.load(config.shipped("frozen_lake.yaml"), [
            f"environment.name={name}", f"environment.options={options}"]))
        task.environment(task.samples("train")[0]).close()
