"""Every preset on the shipped config that it is for: what its paper names is seen, or its needs say why not."""

import sys
from pathlib import Path

import pytest

from tests.algo.test_preset_gradients import ELSEWHERE
from vlrl.config import presets
from vlrl.tools.machine import needs
from vlrl.training.build_task import make_task

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import preset_effects as effects  # noqa: E402 - a script beside the package

ROUNDING = 1e-5
WITHOUT_EFFECT = {"apo", "grsp", "hicra", "himac", "hiper", "length_bonus", "rorecomp"}
"""Whose needs the shipped config, or the embedded model, does not meet."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return effects.Bench(str(tmp_path_factory.mktemp("effects")))


def test_every_preset_is_looked_at():
    every = {kind: {p.name for p in presets.shipped() if p.kind == kind} for kind in effects.EFFECTS}
    assert every == {kind: {*table} for kind, (table, _) in effects.EFFECTS.items()}


ALGORITHMS = sorted(name for name, effect in effects.ALGORITHMS.items() if not isinstance(effect, effects.Metric)
                    and name in {*WITHOUT_EFFECT, *ELSEWHERE, "gspo", "gdpo", "siren", "tis"})
"""Those whose gradient test_preset_gradients.py does not tell from the default's, and one of each kind."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_of_the_objective_is_its_method(bench, name):
    preset = presets.find_preset(f"algorithms/{name}.yaml")
    number, says = effects.of_algorithm(bench, preset)
    found = bench.load(preset.task, f"extends=algorithms/{name}.yaml")
    if name in WITHOUT_EFFECT:
        assert needs.find(found, make_task(found)) and number < ROUNDING, says
    else:
        assert number > ROUNDING and number != 1.0, says


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(effects.CURRICULA))
def test_a_curriculum_draws_what_its_paper_names(bench, name):
    number, says = effects.of_curriculum(bench, presets.find_preset(f"curricula/{name}.yaml"))
    assert number > 0.05, says


def test_the_table_has_every_preset():
    table = (ROOT / "benchmarks" / "results" / "preset_effects.md").read_text(encoding="utf-8")
    rows = [row.split(" | ")[:2] for row in table.splitlines() if row.startswith("| ") and "/" in row.split(" | ")[0]]
    assert rows == [[f"| {effects.FOLDERS[p.kind]}/{p.name}", p.task] for p in presets.shipped()]
