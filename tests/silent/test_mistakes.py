"""The mistakes of a first hour (mistakes.py): the start of a run names each, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.silent.mistakes import MISTAKES, Mistake, Project, missing, project, train
from vlrl.cli.main import main
from vlrl.cli.train import _loaded
from vlrl.config import Config, load
from vlrl.training.start import check_start

ONE_OF_A_KIND = (
    "column misspelt that the reward reads", "ids_twice", "train = held-out", "labels as numbers", "boxes xywh",
    "a picture missing", "pictures turned by EXIF", "reward: raises", "held-out overlaps in part", "function: a text",
    "a prompt without its tag", "a hub name misspelt")


def made(name: str, folder: Path) -> tuple[Mistake, Project]:
    case = MISTAKES[name]
    p = project(folder, case.kind)
    case.make(p)
    return case, p


def config_of(words: list[str]) -> Config:
    """The config that `vlrl train` makes of its arguments."""
    if words[0].endswith(".yaml"):
        return load(words[0], words[1:])
    named = {name.strip("-"): value for name, value in zip(words[:6:2], words[1:6:2], strict=True)}
    return _loaded(None, words[6:], {**named, "reward": [named["reward"]]}, None)


@pytest.mark.parametrize("name", MISTAKES)
def test_the_start_of_a_run_names_a_mistake(name, tmp_path, monkeypatch, capsys):
    case, p = made(name, tmp_path)
    monkeypatch.chdir(tmp_path)
    for variable, value in p.environ.items():
        monkeypatch.setenv(variable, value)
    words = p.write()
    if case.stops:
        assert main(words) == 1
        said = capsys.readouterr().err
    else:
        start = check_start(config_of(words[1:]))
        said = "\n".join(start.warnings) if start else ""
    assert not missing(case, said), said
    assert not (tmp_path / "run").exists()


def test_sound_rows_and_rewards_start_without_a_word(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for kind in ("grounding", "classification", "qa"):
        start = check_start(config_of(project(tmp_path, kind).write()[1:]))
        assert start and not start.warnings and len(start.samples) == 40, kind
    p = project(tmp_path, "qa")
    p.own_task('return {"right": float(answer.final == sample["answer"])}')
    start = check_start(config_of(p.write()[1:]))
    assert start and not start.warnings


def test_the_start_imports_no_torch():
    code = "import sys, vlrl.tools.train, vlrl.checks.preflight; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_OF_A_KIND)
def test_the_command_names_a_mistake(name, tmp_path):
    case, p = made(name, tmp_path)
    code, said, _ = train(p)
    assert code == int(case.stops) and not missing(case, said), said
    assert (tmp_path / "run").exists() is not case.stops
