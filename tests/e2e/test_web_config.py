"""The config of the web task runs: episodes in a real browser are sampled, paid and learned from."""

import shutil

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT
from vlrl import config as configs
from vlrl.environments.chromium import BROWSERS
from vlrl.store import RunFolder
from vlrl.training import sft
from vlrl.training.loop import train

pytestmark = [pytest.mark.browser, pytest.mark.slow, pytest.mark.skipif(
    not any(map(shutil.which, BROWSERS)), reason="no Chromium on the path")]
SMALL = ("steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=2", "task.page_s=120",
         "environment.step_s=300", "environment.reset_s=300")


def test_it_acts_on_pages(tmp_path):
    config = configs.load(ROOT / "configs" / "web.yaml", [*SMALL, f"run.dir={tmp_path}/run"])
    run = RunFolder(train(config).folder.path)
    rows = run.rollouts().to_pylist()
    assert len(rows) == 4 and all(row["error"] is None and row["reward"] is not None for row in rows)
    shown = [turn for row in rows for turn in row["turns"] if turn["role"] != "assistant"]
    assert shown and all(turn["media"] for turn in shown if turn["text"])
    assert "success/trained_pages" in run.evals()[-1]


def test_its_demonstrations_are_learned_from(tmp_path):
    """The actions of perfect episodes, played in the environment."""
    config = configs.load(ROOT / "configs" / "web.yaml", [*SMALL, "eval.samples=0",
                                                          f"run.dir={tmp_path}/run"])
    (line,) = RunFolder(sft.train(config).folder.path).metrics()
    assert line["episode/success"] == 1 and 0 < line["loss"] < 20


def test_the_cold_start_is_asked_as_an_episode_is(tmp_path):
    """benchmarks/web_start.py: single answers to first screenshots, of which the prompt is that of a first turn."""
    words = [str(ROOT / "benchmarks" / "web_start.py"), "--out", str(tmp_path / "start"), "--screenshots", "2",
             "--processes", "1", "--steps", "1", "1"]
    done = forked.run(words, ENV, ROOT, 900)
    assert done.returncode == 0, done.stderr
    start = {row["prompt"] for row in RunFolder(tmp_path / "start").rollouts().to_pylist()}
    config = configs.load(ROOT / "configs" / "web.yaml", [
        *SMALL, "eval.samples=0", f"model.name={tmp_path}/start", "task.pages=[click-test]", f"run.dir={tmp_path}/run"])
    assert {row["prompt"] for row in RunFolder(train(config).folder.path).rollouts().to_pylist()} & start
