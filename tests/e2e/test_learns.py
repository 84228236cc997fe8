"""The quickstart learns: held-out IoU rises, and a random reward does not make it rise."""

import pytest

from tests.e2e.runs import ROOT, finished, metrics
from vlrl.store import RunFolder
from vlrl.tools.experiments import report

pytestmark = pytest.mark.slow
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def gain(folder, metric):
    (row,) = [g for g in report.gains(RunFolder(folder)) if g.metric == metric]
    return row.gain


@pytest.mark.long
def test_held_out_iou_rises(tmp_path):
    done = finished(QUICKSTART, tmp_path / "run", "steps=18", "eval.samples=128", "eval.every=0", timeout=900)
    assert gain(tmp_path / "run", "iou").low > 0.02  # .044, of a gain of .073
    assert all(m["mismatch/kl"] < 1e-4 for m in metrics(tmp_path / "run"))
    assert (tmp_path / "run" / "reward.png").is_file() and "Evaluation before and after" in done.stdout


def test_random_rewards_do_not(tmp_path):
    control = f"task.name={ROOT}/benchmarks/random_reward.py:RandomGrounding"
    finished(QUICKSTART, tmp_path / "run", control, "steps=8", "eval.samples=64", "eval.every=0", timeout=900)
    assert gain(tmp_path / "run", "iou").mean <= 0.02
