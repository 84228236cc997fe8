"""Curriculum settings that cannot work are refused by name, before anything is loaded."""

import pytest

from tests.curriculum.sourced import source
from vlrl import config, curriculum
from vlrl.config.base import Named
from vlrl.curriculum import Prompts
from vlrl.errors import ConfigError, TrainingError
from vlrl.training.build_task import make_task

OWN = """
class Raises:
    def __init__(self, prompts):
        raise KeyError("x")
class Half:
    def __init__(self, prompts): pass
    def next(self, count, step): return []
def function(prompts): return prompts
def same(outcomes, count): return [0, 0]
"""


@pytest.mark.parametrize(("words", "says"), [
    (["curriculum.keep=mixd"], r"curriculum.keep='mixd' is not known. Did you mean 'mixed'"),
    (["curriculum.keep={name: pass_range, low: 0.8, high: 0.2}"], r"low=0.8 is more than high=0.2"),
    (["curriculum.keep={name: pass_range, lo: 1}"], r"curriculum.keep.lo=1: .* Did you mean 'low'"),
    (["curriculum.oversample=0.5"], r"curriculum.oversample.factor=0.5: .*greater than or equal to 1"),
    (["curriculum.oversample=.nan"], r"curriculum.oversample.factor=nan: .*finite"),
    (["curriculum.part=iuo"], r"part='iuo' is not a reward part of grounding. Did you mean 'iou'.* iou, format"),
    (["curriculum=OWN:Raises"], r"curriculum.name='.*own.py:Raises': .*own.py:4: KeyError: 'x'"),
    (["curriculum=OWN:Half"], r"Half' is not a sampler: it lacks the methods observe, state_dict.*docs/curriculum.md"),
    (["curriculum=OWN:function"], r"function' is not a sampler: it lacks the methods next, observe"),
])
def test_what_is_wrong_is_said(words, says, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    words = [word.replace("OWN", str(tmp_path / "own.py")) for word in words]
    found = config.load("configs/quickstart.yaml", ["task.drawn=true", *words])
    with pytest.raises(ConfigError, match=says):
        curriculum.check(found.curriculum, make_task(found))
        curriculum.make(found.curriculum, Prompts(8, 0))


def test_draws_and_choices_that_cannot_be_are_refused(tmp_path):
    for draws, says in (
            (lambda count: [], "returned 0 draws, of which 0 are valid draws of the 14 samples, but 4 were requested"),
            (lambda count: [curriculum.Draw(99, 0)] * count, "returned 4 draws, of which 0"),
            (lambda count: [3] * count, "returned 4 draws, of which 0"),
            (lambda count: [curriculum.Draw(0, 0)], "returned 1 draws, of which 1")):
        run = source("uniform", "plain")
        run.sampler.next = lambda count, step, draws=draws: draws(count)
        with pytest.raises(TrainingError, match=f"curriculum.name='uniform' {says}"):
            run.next_groups(4, 0)
    (tmp_path / "own.py").write_text(OWN)
    run = source("uniform", "plain")
    run.filters.select = curriculum.Filters(run.config.curriculum.model_copy(
        update={"select": Named(name=f"{tmp_path / 'own.py'}:same")})).select
    with pytest.raises(ConfigError, match=r"own.py:same' returned \[0, 0\] for 4 groups: return distinct.* at most 4"):
        run.next_groups(4, 0)
