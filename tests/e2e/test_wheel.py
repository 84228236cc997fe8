"""The installed wheel, not the checkout: what it needs is inside, and the working directory shadows nothing of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.runs import ENV, ROOT, TASK

pytestmark = pytest.mark.slow

SMALL = ("steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.samples=2")


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A user's folder with a task file, and files named like what vlrl carries."""
    (tmp_path / "shades.py").write_text(TASK)
    (tmp_path / "tasks.py").write_text("raise RuntimeError('the tasks.py of the working directory was imported')")
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "grounding.py").write_text("raise RuntimeError('shadowed')")
    (tmp_path / "grounding.py").write_text("raise RuntimeError('shadowed')")
    return tmp_path


def run(folder: Path, *words: str) -> str:
    env = {k: v for k, v in ENV.items() if k != "PYTHONPATH"}
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


COMMANDS = """
import sys, vlrl, vlrl.tasks, vlrl.configs
from vlrl.cli.main import main
print(vlrl.__file__, *vlrl.__path__)
for words in ("export run -o exported", "tasks list --json", "tasks new stars",
              "tasks check stars.py --samples 4 --config stars.yaml"):
    assert main(words.split()) == 0, words
"""


def test_vlrl_is_the_wheel_and_its_tasks_are_not_shadowed(installed, elsewhere):
    """That the configs are in it, and the commands of the pages run: test_every_command.py."""
    words = ("task=shades.py:Shades", "run.dir=run", *SMALL)
    run(elsewhere, str(installed / "vlrl"), "train", "configs/tiny.yaml", *words)
    lines = (elsewhere / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    said = run(elsewhere, str(installed / "python"), "-c", COMMANDS)
    places = said.splitlines()[0].split()
    assert len(places) > 1 and all(Path(p).is_relative_to(installed.parent) for p in places)
    assert "grounding" in said and (elsewhere / "exported" / "model.safetensors").is_file()


def test_an_editable_install_is_found_above_a_clone_called_vlrl(tmp_path):
    """There a folder `vlrl` without __init__.py stands before the package, which a path behind it still wins over, and
    an import hook (setuptools' choice for other layouts) does not: `import vlrl` would be an empty namespace."""
    clone, site = tmp_path / "vlrl", tmp_path / "site"
    (clone / "vlrl").mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    (clone / "vlrl" / "__init__.py").write_text('__version__ = "0.1.0"')
    build = f"from setuptools import build_meta; print(build_meta.build_editable({str(tmp_path)!r}))"
    run(clone, sys.executable, "-c", build)
    (wheel,) = tmp_path.glob("*.whl")
    shutil.unpack_archive(wheel, site, "zip")
    paths = f"import sys, site; sys.path.insert(0, ''); site.addsitedir({str(site)!r})"
    found = run(tmp_path, sys.executable, "-S", "-c", f"{paths}; import vlrl; print(vlrl.__file__)")
    assert found.strip() == str(clone / "vlrl" / "__init__.py")
