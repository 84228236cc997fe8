"""Runs that several files of tests compare with, and the installed wheel."""

import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import NamedTuple

import pytest
from filelock import FileLock

from tests.e2e.runs import FEW, ROOT, finished, write_config

TWO = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(ROOT / "train.py")]


class Pair(NamedTuple):
    """A run of two processes on one host with the words FEW: its config, torchrun's words, and folder."""

    config: Path
    launcher: list[str]
    whole: Path


@pytest.fixture(scope="session")
def pair(tiny_models, tmp_path_factory) -> Pair:
    config = write_config(tmp_path_factory.mktemp("pair"), tiny_models["qwen3_vl"])
    finished(config, config.parent / "whole", *FEW, processes=2)
    return Pair(config, TWO, config.parent / "whole")


LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "runs", "build", "dist", "*.egg-info", "__pycache__", ".*_cache")


def install_wheel(root: Path) -> None:
    """Makes root/env with the wheel of this checkout. Its dependencies are those of the tests' own environment: a
    `.pth` file shows them, and not the editable install beside them."""
    source = shutil.copytree(ROOT, root / "source", ignore=LEFT_OUT)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", str(root), str(source)], check=True, cwd=root)
    (wheel,) = root.glob("*.whl")
    venv.create(root / "env", with_pip=False)
    python = root / "env" / "bin" / "python"
    subprocess.run([*pip, "--python", str(python), "install", "-q", "--no-deps", str(wheel)], check=True, cwd=root)
    shutil.rmtree(source)
    (packages,) = (root / "env" / "lib").glob("python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others) + "\n")


@pytest.fixture(scope="session")
def installed(tmp_path_factory, worker_id) -> Path:
    """The programs of an environment with the wheel, made once for all workers."""
    base = tmp_path_factory.getbasetemp()
    root = (base if worker_id == "master" else base.parent) / "wheel"
    with FileLock(f"{root}.lock"):
        if not root.exists():
            root.mkdir()
            install_wheel(root)
    return root / "env" / "bin"
