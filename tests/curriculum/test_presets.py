"""configs/curricula: each preset says whose it is, is understood on any config, and trains."""

import math
from pathlib import Path

import pytest

from tests.e2e.runs import metrics
from vlrl import config, curriculum
from vlrl.config import loading
from vlrl.curriculum import Prompts
from vlrl.training.loop import train

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "curricula"
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))
FIELDS = {"difficulty": [i / 100 for i in range(100)], "pass_at_k": [1 - i / 100 for i in range(100)],
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
          "drive": ["curriculum.after=1", "curriculum.group_size=6"], "adcl": ["curriculum.batches=16"],
          "easy_to_hard": [], "time_r1": []}
"""What makes two steps small; the other presets need fields that the quickstart's rows have not."""


def test_a_preset_is_a_few_lines_that_say_whose_it_is():
    for name in NAMES:
        text = (FOLDER / f"{name}.yaml").read_text()
        assert text.startswith("# ") and len(text.splitlines()) < 24, name
        tree = loading._parse(text)
        assert {*tree.pop("preset")} <= {"idea", "for", "needs", "cost", "paper"}, name
        tree.pop("extends", None)
        assert {k: {*v} - OUTSIDE[k] for k, v in tree.items() if k != "curriculum" and {*v} - OUTSIDE[k]} == {}, name
        found = config.load(QUICKSTART, [f"extends=curricula/{name}.yaml"])
        rows = Prompts(100, 0, lambda field: FIELDS.get(field, LEVELS), found.rollout, {"size": (0, 1)}, ["subgoals"])
        assert len(curriculum.make(found.curriculum, rows).next(8, 0)) == 8, name


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STAGES))
def test_a_preset_trains(name, tmp_path):
    train(config.load(QUICKSTART, [f"extends=curricula/{name}.yaml", *SMALL, "rollout.group_size=4", *STAGES[name],
                                   f"run.dir={tmp_path}"]))
    lines = metrics(tmp_path)
    expected = {"ptst": [12, 18], "drive": [12, 30], "adcl": [36, 48]}  # adcl probes a batch of 6 with 4 answers each
    assert [line["rollouts/total"] for line in lines] == expected.get(name, [12, 24])
    assert all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
