"""The installed wheel, not the checkout: what it needs is inside, and the working directory shadows nothing of it."""

import json
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

from tests.e2e.runs import ENV, ROOT, TASK
from tests.silent.test_documented_commands import VLRL, named_config, settings_of

pytestmark = pytest.mark.slow

LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")
SMALL = ("steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4", "eval.samples=2")


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """An environment with the wheel of this checkout. Its dependencies are those of the tests' own environment: a
    `.pth` file shows them, and not the editable install beside them."""
    root = tmp_path_factory.mktemp("wheel")
    source = shutil.copytree(ROOT, root / "source", ignore=LEFT_OUT)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(root), str(source)], check=True, cwd=root)
    (wheel,) = root.glob("*.whl")
    venv.create(root / "env", with_pip=False)
    python = root / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", str(wheel)], check=True, cwd=root)
    shutil.rmtree(source)
    (packages,) = (root / "env" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return root / "env" / "bin"


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
    """That the other configs are in it: the next test; that they train is tested with the checkout."""
    words = ("task=shades.py:Shades", "run.dir=run", *SMALL)
    run(elsewhere, str(installed / "vlrl"), "train", "configs/tiny.yaml", *words)
    lines = (elsewhere / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1]
    said = run(elsewhere, str(installed / "python"), "-c", COMMANDS)
    places = said.splitlines()[0].split()
    assert len(places) > 1 and all(Path(p).is_relative_to(installed.parent) for p in places)
    assert "grounding" in said and (elsewhere / "exported" / "model.safetensors").is_file()


LOADS = """
import json, sys
from vlrl import load_config
for name, settings in json.load(sys.stdin):
    load_config(name, *settings)
"""


def test_configs_of_documented_commands_are_in_it(installed, tmp_path):
    """In an empty folder, named as the pages name them."""
    words = [(name, settings_of(words)) for page, words in VLRL if words[0] not in ("sweep", "compare")
             and (name := named_config(page, words))]
    assert len(words) > 60 and {"quickstart.yaml", "configs/quickstart.yaml"} <= {name for name, _ in words}
    env = {k: v for k, v in ENV.items() if k != "PYTHONPATH"}
    done = subprocess.run([installed / "python", "-c", LOADS], input=json.dumps(words), cwd=tmp_path, env=env,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


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
