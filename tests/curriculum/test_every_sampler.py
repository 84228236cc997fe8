"""Every sampler and preset alike: a resumed one draws the same, also in a group source; what is wrong is named."""

import json
import math
from pathlib import Path

import pytest

from tests.curriculum.drives import drive, resumed
from tests.curriculum.sourced import BROKEN, LONG, run, source
from tests.curriculum.sourced import CASES as UNDER
from tests.curriculum.test_staged import CARRYING, FORMS
from tests.e2e.runs import metrics, write_config
from vlrl import config, curriculum
from vlrl.config import loading
from vlrl.config.base import Named
from vlrl.config.schema import CurriculumSettings, RolloutSettings
from vlrl.curriculum import SAMPLERS, Prompts, make
from vlrl.errors import ConfigError, TrainingError
from vlrl.training import sft
from vlrl.training.build_task import make_task
from vlrl.training.loop import train

FIELDS = {"category": list("abc" * 20), "task": list("abc" * 20), "level": list("a" * 30 + "b" * 30),
          "difficulty": [None if i % 3 else i / 60 for i in range(60)],
          "angle": [i * 7 % 60 / 30 - 1 for i in range(60)], "form": ["yes_no", "choice", "text", "number"] * 15}
CASES = [("sec", {}), ("dump", {}), ("domain_weighted", {}), ("recap", {}), ("sws", {}),
         ("prioritised", {"by": "level"}), ("rlcs", {"by": "level"}), ("replay", {"buffer": 8}),
         ("lifecycle", {"rest": 2}), ("limr", {"epochs": 2}), ("gaussian", {"solved": 0.6}), ("easy_to_hard", {}),
         ("adcl", {"batches": 3}), ("adcl", {"batches": 2, "by": None}), ("hard_focus", {"after": 3, "share": 0.3}),
         ("staged", {"stages": FORMS}), ("staged", {"stages": CARRYING, "window": 3}),
         ("retrospective", {"carry": 0.4}),
         ("gain_rl", {"spread": 4.0}), ("gvm", {}), ("uniform", {}), ("alp_gmm", {"fit_every": 12, "components": 3}),
         ("weakness", {})]
DISTINCT = ("prioritised", "rlcs", "replay", "lifecycle", "limr")


def prompts():
    return Prompts(60, 5, lambda name: FIELDS.get(name, [None] * 60), RolloutSettings(prompts_per_step=4),
                   {"count": (1.0, 5.0), "size": (0.0, 1.0)})


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_resumed_sampler_goes_on_exactly(name, options, tmp_path):
    number, count = (8, 6) if name in ("alp_gmm", "weakness") else (10, 16)
    whole = drive(SAMPLERS[name], prompts, options, number, count)
    assert resumed(SAMPLERS[name], prompts, options, number, count, tmp_path, at=5) == whole
    for call in whole[::2] if name in DISTINCT else ():
        assert len({d.index for d in call[:count]}) == count


WRONG = [
    ("sec", "alpha", 1.5), ("sec", "tau", 0), ("sec", "bins", 1), ("sec", "by", ""), ("sec", "alhpa", 0.2),
    ("dump", "window", 0), ("dump", "window", 10**6), ("domain_weighted", "epsilon", -1), ("sws", "floor", 2),
    ("recap", "fast", 0.95), ("recap", "target", 0), ("prioritised", "prior", 2), ("prioritised", "strength", 1e7),
    ("replay", "share", -0.1), ("replay", "buffer", 0), ("rlcs", "tier_by", "level"), ("rlcs", "decay", 1),
    ("lifecycle", "patience", 0), ("limr", "epochs", 21), ("limr", "threshold", 1), ("gaussian", "std", 0.0),
    ("gaussian", "mean", "x"), ("gaussian", "solved", 1.5), ("gaussian", "by", 1.0), ("adcl", "probe_size", 0),
    ("hard_focus", "share", 0), ("hard_focus", "share", 1.1), ("hard_focus", "after", -1),
    ("hard_focus", "group_size", 1), ("retrospective", "carry", 2), ("alp_gmm", "fit_every", 3),
    ("alp_gmm", "components", 1), ("alp_gmm", "explore", 1.5), ("alp_gmm", "memory", 0), ("weakness", "rate", 0),
    ("weakness", "explore", -0.1), ("easy_to_hard", "descending", "x"), ("gain_rl", "spread", 0),
    ("gain_rl", "target", 1.1), ("gain_rl", "sensitivity", -1), ("gain_rl", "spread", True), ("gvm", "least", 0),
    ("gvm", "prior", 2), ("gvm", "probe", -1), ("gvm", "alpha", -1)]


def test_an_option_out_of_range_is_refused():
    for name, option, value in WRONG:
        more = ".*Did you mean 'alpha'" if option == "alhpa" else ""
        with pytest.raises(ConfigError, match=rf"curriculum\.{option}={value!r}{more}"):
            make(CurriculumSettings.model_validate({"name": name, option: value}), prompts())


def lines(found):
    return [json.loads(line) for line in found]


@pytest.mark.parametrize("case", [case if case == "partial" else pytest.param(case, marks=pytest.mark.slow)
                                  for case in UNDER if case != "plain"])
def test_a_run_resumed_at_every_step_is_the_unbroken_one(case, tmp_path):
    """partial: with filters, rejected prompts, and steps in which nothing is drawn."""
    for name in SAMPLERS:
        whole = lines(run(name, case, 5))
        assert lines(run(name, case, 5, tmp_path / name)) == whole, name
        assert sum(map(len, (line["trained"] for line in whole))) > 0
        assert all({"rollouts/total", "groups/wasted"} <= line["metrics"].keys() for line in whole)
        assert "partial" not in case or any(line["held"] for line in whole), name


def test_broken_and_long_prompts_are_left_out():
    found = [reason for line in lines(run("sequential", "filters", 4)) for reason in line["reasons"]]
    assert any(f"train-{BROKEN}:" in reason for reason in found) and any(f"train-{LONG}:" in r for r in found)


def test_supervised_steps_learn_whatever_the_filters_are(tiny_models, tmp_path):
    """A group of one given answer is neither mixed nor of a middle pass rate."""
    words = [f"run.dir={tmp_path / 'run'}", "steps=1", "eval.samples=0", "save.every=0", "rollout.prompts_per_step=2",
             "curriculum.keep=mixed", "curriculum.oversample=2"]
    sft.train(config.load(write_config(tmp_path, tiny_models["qwen3_vl"]), words))
    (line,) = metrics(tmp_path / "run")
    assert line["loss"] > 0 and line["groups/wasted"] == 0 and line["rollouts/total"] == 2


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


FOLDER = Path(__file__).resolve().parents[2] / "configs" / "curricula"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
COLUMNS = {"difficulty": [i / 100 for i in range(100)], "pass_at_k": [1 - i / 100 for i in range(100)],
          "answer_type": [("yes_no", "choice", "number")[i % 3] for i in range(100)],
          "context_tokens": [600 * i for i in range(100)]}
LEVELS = ["abc"[i % 3] for i in range(100)]
"""Any other field."""
OUTSIDE = {"rollout": {"group_size", "max_new_tokens", "thinking_budget", "step_tokens"}}
"""What a preset may set besides the curriculum."""
QUICKSTART = FOLDER.parent / "quickstart.yaml"
SMALL = ("rollout.prompts_per_step=3", "rollout.max_new_tokens=24", "eval.samples=0", "steps=2", "log.samples_every=0",
         "data.workers=0", "save.every=0", "task.count=96")
STAGES = {"ptst": [f"curriculum.stages.{i}.{key}" for i, size in ((0, 4), (1, 2))
                   for key in (f"max_new_tokens={8 * size}", f"group_size={size}", "steps=1")],
          "drive": ["curriculum.after=1", "curriculum.group_size=6"], "adcl": ["curriculum.batches=16"]}
"""What makes two steps of those small that ask for other groups; all draw in a group source above."""


def test_a_preset_is_a_few_lines_that_say_whose_it_is():
    for name in NAMES:
        text = (FOLDER / f"{name}.yaml").read_text()
        assert text.startswith("# ") and len(text.splitlines()) < 24, name
        tree = loading._parse(text)
        assert {*tree.pop("preset")} <= {"idea", "for", "needs", "cost", "paper"}, name
        tree.pop("extends", None)
        assert {k: {*v} - OUTSIDE[k] for k, v in tree.items() if k != "curriculum" and {*v} - OUTSIDE[k]} == {}, name
        found = config.load(QUICKSTART, [f"extends=curricula/{name}.yaml"])
        rows = Prompts(100, 0, lambda field: COLUMNS.get(field, LEVELS), found.rollout, {"size": (0, 1)}, ["subgoals"])
        assert len(curriculum.make(found.curriculum, rows).next(8, 0)) == 8, name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_preset_trains(name, tmp_path):
    train(config.load(QUICKSTART, [f"extends=curricula/{name}.yaml", *SMALL, "rollout.group_size=4", *STAGES[name],
                                   f"run.dir={tmp_path}"]))
    lines = metrics(tmp_path)
    expected = {"ptst": [12, 18], "drive": [12, 30], "adcl": [36, 48]}  # adcl probes a batch of 6 with 4 answers each
    assert [line["rollouts/total"] for line in lines] == expected[name]
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
