"""What docs/curriculum.md says is so: samplers and their options, metrics, settings, and the sampler of one's own."""

import inspect
import math
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.curriculum.drives import drive, resumed, steps
from vlrl import config, curriculum
from vlrl.algo.named import parameters
from vlrl.config.episodes import EpisodeSettings
from vlrl.config.registry import resolve
from vlrl.curriculum import SAMPLERS, Prompts
from vlrl.curriculum.horizon import HORIZONS, Horizon
from vlrl.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "curriculum.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NEEDED = {"staged": {"stages": [{"steps": 1}, {"carry": 0.5}]}, "adcl": {"by": None}, "recap": {"by": "level"},
          "alp_gmm": {"fit_every": 4, "components": 2}, "hard_focus": {"after": 1, "share": 0.5},
          "prioritised": {"by": "level"}}
GOAL, QUICK = "near.py:Near", "configs/quickstart.yaml"


def table(title: str) -> list[list[str]]:
    """The cells of the rows under the heads, of the section's first table."""
    lines = [line for line in PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0].splitlines()
             if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))] for line in lines[2:]]


def blocks(kind: str) -> list[str]:
    return [body for found, body in BLOCK.findall(PAGE) if found == kind]


def prompts() -> Prompts:
    levels = ["abc"[i % 3] for i in range(24)]
    numbers = np.linspace(0, 1, 24).tolist()
    fields = {"category": levels, "level": levels, "difficulty": numbers, "pass_at_k": numbers, "angle": numbers}
    return Prompts(24, 0, lambda name: fields.get(name, [None] * 24), knobs={"size": (0.0, 1.0)})


def test_every_sampler_is_there_with_its_options():
    rows = {row[0].strip("`"): re.findall(r"`([^`]+)`", row[2]) for row in table("Samplers")}
    assert rows.keys() == SAMPLERS.keys()
    for name, options in rows.items():
        given = dict(option.partition("=")[::2] for option in options)
        known = parameters(SAMPLERS[name], 1)
        assert given.keys() == known.keys(), name
        assert all(yaml.safe_load(value) == known[key][1] for key, value in given.items() if value), name


def test_every_metric_of_a_sampler_is_there():
    told = {re.sub("<.*>", "…", key): row[1] for row in table("Metrics") for key in re.findall(r"`([^`]+)`", row[0])}
    for name in SAMPLERS:
        of = prompts()
        sampler = SAMPLERS[name](of, **NEEDED.get(name, {}))
        steps(sampler, of, range(4), 6)
        said = {re.sub(r"/(weight|knob)/.*", r"/\1/…", key) for key in sampler.metrics()}
        mine = {key for key, of in told.items() if name in re.split(r"\W+", of)}
        assert mine <= said <= told.keys(), f"{name}: a key that this sampler does not have"
        assert {*said} - {"curriculum/epoch"} <= mine and all(map(math.isfinite, sampler.metrics().values())), name


def test_every_horizon_is_there_with_its_options():
    rows = table("How many turns")
    given = [yaml.safe_load(row[0].strip("`")) for row in rows]
    assert [one["name"] for one in given] == [*HORIZONS]
    for one, row in zip(given, rows, strict=True):
        known = parameters(HORIZONS[one["name"]], 0 if isinstance(HORIZONS[one["name"]], type) else 1)
        options = dict(option.partition("=")[::2] for option in re.findall(r"`([^`]+)`", row[2]))
        assert options.keys() == known.keys() >= one.keys() - {"name"}
        for option, value in options.items():
            default = known[option][1]
            assert yaml.safe_load(value) == default if value else default is inspect.Parameter.empty and option in one
        Horizon(EpisodeSettings(horizon=one))


def test_settings_and_commands_are_allowed(tmp_path, monkeypatch):
    (tmp_path / "near.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    for body in blocks("yaml"):
        (tmp_path / "a.yaml").write_text("extends: quickstart.yaml\n" + body.replace("extends: quickstart.yaml\n", ""))
        found = config.load("a.yaml")
        curriculum.make(found.curriculum, prompts())
        curriculum.Filters(found.curriculum)
    lines = [shlex.split(line, comments=True) for body in blocks("bash")
             for line in body.replace("\\\n", "").splitlines() if "recall.yaml" not in line]
    settings = [[word for word in line if "=" in word] for line in lines]
    filters = [[row[0].strip("`")] for row in table("Filters")]
    for words in [*settings, *filters]:
        curriculum.Filters(config.load(QUICK, words).curriculum)
    assert len(settings) >= 4 and len(filters) >= 7


def test_a_sampler_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "near.py").write_text(blocks("python")[0])
    monkeypatch.chdir(tmp_path)
    found = config.load(QUICK, [f"curriculum={GOAL}", "curriculum.width=0.1", "curriculum.decay=0.5"])
    of = prompts()
    sampler = curriculum.make(found.curriculum, of)
    of.history.pass_rate[:] = np.where(np.arange(24) < 8, 0.8, 0.0)
    assert {d.index for d in sampler.next(8, 0)} == {*range(8)}
    with pytest.raises(ConfigError, match=r"near.py:Near': start=0.2 is less than end=0.5"):
        curriculum.make(config.load(QUICK, [f"curriculum={GOAL}", "curriculum.start=0.2"]).curriculum, of)
    with pytest.raises(ConfigError, match=r"curriculum.wdith=1 is neither a setting.*Did you mean 'width'"):
        curriculum.make(config.load(QUICK, [f"curriculum={GOAL}", "curriculum.wdith=1"]).curriculum, of)
    own = resolve("curriculum.name", GOAL, {})
    whole = drive(own, prompts, {"decay": 0.9}, 6, 5)
    assert resumed(own, prompts, {"decay": 0.9}, 6, 5, tmp_path, at=3) == whole
