"""Every command of README.md, AGENTS.md and docs/ in an empty folder, with what an installed vlrl carries alone."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from vlrl import config
from vlrl.cli.main import app
from vlrl.errors import ConfigError
from vlrl.tools.machine import dryrun

ROOT = Path(__file__).resolve().parents[2]
PAGES = {path.name: path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", ROOT / "AGENTS.md", *(ROOT / "docs").glob("*.md"))}
PROGRAM = re.compile(r"(?: {4})?((?:\w+=\S+ )*(?:vlrl|python3?|torchrun|accelerate launch|srun|sbatch) .*)")
OWN = {"my.yaml", "mine.yaml", "a.yaml", "b.yaml", "one.yaml", "tempered.yaml", "CONFIG"}
"""Names for a reader's own config."""
FILE = re.compile(r"^```(?:python|yaml)\n# ([\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"[a-z_]+(\.\w+)*=.*", re.DOTALL)
LAUNCHERS = {"torchrun", "accelerate"}


def commands(text: str) -> list[list[str]]:
    lines = re.sub(r"\\\n *", "", text).splitlines()
    found = [re.split(r"\s{2,}(?:#|[a-zA-Z])", match[1])[0] for match in map(PROGRAM.fullmatch, lines) if match]
    return [shlex.split(line, comments=True) for line in found if " says " not in line and " fine-tunes " not in line]


COMMANDS = [(page, words) for page, text in PAGES.items() for words in commands(text)]
VLRL = [(page, words[words.index("vlrl") + 1:]) for page, words in COMMANDS if "vlrl" in words]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def named_config(page: str, words: list[str]) -> str | None:
    """The first config that a command names and a reader has not written."""
    written = {name for name, _ in FILE.findall(PAGES[page])}
    made = {"parity.yaml", "count.yaml", "stars.yaml"}  # by `vlrl tasks new`
    found = [word for word in words if word.endswith(".yaml") and "=" not in word]
    return next((word for word in found if word not in OWN | written | made and not word.startswith("runs/")), None)


def settings_of(words: list[str]) -> list[str]:
    """The settings of a command, without what a reader makes first."""
    return [w for w in words if SETTING.fullmatch(w) and w.removeprefix("extends=") not in OWN
            and not re.search(r"runs/|models/", w)]


def test_every_config_and_preset_of_a_command_is_found(empty):
    wrong = []
    for page, words in VLRL:
        name = named_config(page, words)
        if name is None or words[0] in ("sweep", "compare"):
            continue
        try:
            config.load(name, settings_of(words))
        except Exception as error:
            wrong.append(f"{page}: vlrl {' '.join(words)}: {error}")
    assert not wrong, "\n".join(wrong)
    for page, words in VLRL:
        for name in (word.removeprefix("extends=") for word in words if word.startswith("extends=")):
            if name not in OWN:
                assert config.loading.shipped(name), f"{page}: {name}"


def test_every_command_and_option_is_there_and_what_needs_a_clone_is_said_to():
    wrong = []
    for page, (*words,) in VLRL:
        group: Any = typer.main.get_command(app)
        while hasattr(group, "commands") and words and words[0] in group.commands:
            group = group.commands[words.pop(0)]
        known = {option for parameter in group.params for option in (*parameter.opts, *parameter.secondary_opts)}
        if (hasattr(group, "commands") and words) or {w for w in words if re.match(r"--?[a-z]", w)} - known - {"-h"}:
            wrong.append(f"{page}: vlrl {words}")
    assert not wrong, "\n".join(wrong)
    # train.py, benchmarks/, make and files that other programs read are in no wheel
    wrong = []
    for page, words in COMMANDS:
        needed = [w for w in words if w == "train.py" or w.startswith(("benchmarks/", "configs/slurm", "configs/acc"))]
        if needed and not re.search(r"\bclone\b", PAGES[page]):
            wrong.append(f"{page}: {' '.join(words)}")
    assert not wrong, "\n".join(wrong)
    assert len(VLRL) > 100 and len({page for page, _ in VLRL}) > 20
    assert yaml  # the pages' own files are YAML


def test_a_shipped_config_is_found_by_its_name_unless_several_have_it(empty):
    (empty / "own.yaml").write_text("extends: digits.yaml\nsteps: 3\n")
    assert config.load("own.yaml").task.name == "digits"
    assert config.load("own.yaml", ["extends=gspo.yaml"]).algo.loss.name == "gspo"
    # drive.yaml at the top goes before curricula/drive.yaml; of two below it none is taken
    assert config.load("drive.yaml").task.name == "drive"
    names = [path.name for path in config.loading.shipped_configs()]
    top = {path.name for path in (ROOT / "configs").glob("*.yaml")}
    twice = next(name for name in names if names.count(name) > 1 and name not in top)
    with pytest.raises(config.loading.ConfigError, match=f"(?s)/{twice}.*/{twice}"):
        config.load(twice)


DRAWN = "configs/quickstart.yaml"


def said(*words: str, path: str = DRAWN) -> str:
    report = dryrun.check(config.load(path, ["eval.samples=0", "log.samples_every=0", *words]), samples=1)
    return "\n".join(str(line) for name in ("inert", "needs", "warnings", "problems")
                     for line in getattr(report, name, ()))


def test_a_preset_names_what_it_lacks_and_settings_reach_every_stage():
    for words, named in ((("extends=algorithms/gdpo.yaml", "task.rewards.format=0"), ("gdpo", "part")),
                         (("extends=algorithms/ema_grpo.yaml",), ("ema_grpo", "tasks")),
                         (("extends=algorithms/hicra.yaml",), ("hicra",)),
                         (("extends=curricula/drive.yaml", "steps=40"), ("curriculum",))):
        text = said(*words)
        assert all(word in text for word in named), (words, text)
    for path, section, name, value in (("vision_r1", "train", "lr", 3e-5),
                                       ("alphadrive", "rollout", "prompts_per_step", 4)):
        try:
            found = config.stages_of(config.load(f"configs/stages/{path}.yaml", [f"{section}.{name}={value}"]))
        except ConfigError as error:
            assert f"{section}.{name}" in str(error)
        else:
            assert [getattr(getattr(own, section), name) for _, own in found] == [value] * 2
