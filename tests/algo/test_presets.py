"""configs/algorithms: each preset says whose it is, is understood, and trains."""

import math
from pathlib import Path

import pytest

from tests.e2e.runs import metrics
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.config import loading
from vlrl.training.loop import train

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "algorithms"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.samples=0", "steps=2",
         "log.samples_every=0", "curriculum.max_refills=1", "data.workers=0", "save.every=0")
"""Answers of 24 tokens hold a box, so rewards differ; one step of most presets takes the embedded model .3 s."""
OUTSIDE = {"rollout": {"temperature", "group_size", "forget", "branch", "updates", "minibatches"},
           "curriculum": {"keep"}}
"""What a preset may set besides the objective."""
EXPLAINED = """from tasks.grounding import Grounding


class Explained(Grounding):
    def oracle(self, sample):
        return f"<think>I look at the picture.</think>{super().oracle(sample)}"
"""


def test_a_preset_is_a_few_lines_that_say_whose_it_is():
    for name in NAMES:
        text = (FOLDER / f"{name}.yaml").read_text()
        assert text.startswith("# ") and len(text.splitlines()) < 24, name
        tree = loading._parse(text)
        assert {*tree.pop("preset")} <= {"idea", "for", "needs", "cost", "paper"}, name
        tree.pop("extends", None)
        assert {k: {*v} - OUTSIDE[k] for k, v in tree.items() if k != "algo" and {*v} - OUTSIDE[k]} == {}, name
        Algorithm(config.load(FOLDER.parent / "quickstart.yaml", [f"extends=algorithms/{name}.yaml"]))


def test_what_is_the_default_is_said_by_one_name():
    found = config.load(FOLDER.parent / "quickstart.yaml", ["extends=[algorithms/gspo.yaml, algorithms/tis.yaml]"])
    assert (found.algo.loss.name, found.algo.correction.name) == ("gspo", "token_truncate")


def runs(name):
    """Whether a preset does more than choose functions of one pass, whose gradients test_preset_effects.py takes."""
    tree = loading._parse((FOLDER / f"{name}.yaml").read_text())
    plain = {"advantage", "loss", "aggregation", "weights", "shaping", "correction", "kl", "kl_coef", "kl_weights"}
    return bool({*tree.get("algo", {})} - plain or {*tree.get("rollout", {})} - {"minibatches"} or "curriculum" in tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if runs(name) or name in ("gspo", "remax", "siren")])
def test_a_preset_trains(name, tmp_path):
    (tmp_path / "explained.py").write_text(EXPLAINED)  # a hint is the beginning of a given reasoning
    more = {"ghpo": [f"task.name={tmp_path / 'explained.py'}:Explained"],
            "gkd": ["algo.distillation.objective=1"], "mdpo": ["rollout.updates=2"],
            "deepsearch": ["rollout.branch.search.width=3", "rollout.branch.search.depth=4"]}.get(name, [])
    train(config.load(FOLDER.parent / "quickstart.yaml", [f"extends=algorithms/{name}.yaml", *SMALL, *more,
                                                          f"run.dir={tmp_path / 'run'}"]))
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2 and all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    assert lines[0]["reward/mean"] > 0 and any(line["grad_norm"] > 1e-6 for line in lines)
