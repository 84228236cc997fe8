"""The quickstart: it learns, with a random reward it does not, and it imports what it asks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


MOST_LINES, MOST_FILES = 30_000, 175
"""Of vlrl and the task: lines of the modules that a run imports, and files with a function that it calls; lower them
when they fall."""
IMPORTS = """
import json, sys, threading
from pathlib import Path
from vlrl.cli.main import train_script as train

root, entered = sys.argv[1] + "/", set()

def note(frame, event, _):
    code = frame.f_code
    name = code.co_filename
    if event != "call" or name in entered or not name.startswith(root) or not code.co_flags & 1:
        return
    while (frame := frame.f_back) is not None and frame.f_code.co_name != "_find_and_load":
        pass
    if frame is None:  # else it is called by an import, and again later
        entered.add(name)

threading.setprofile(note)
sys.setprofile(note)
code = train(sys.argv[2:])
sys.setprofile(None)
files = {m.__file__ for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
own, called = ([n.removeprefix(root) for n in sorted(names) if n.startswith(root) and "/.venv/" not in n]
               for names in (files, entered))
print("\\n" + json.dumps([own, called]))
sys.exit(code)
"""


def test_a_run_imports_what_it_asks_for(tmp_path):
    done = subprocess.run([sys.executable, "-c", IMPORTS, str(ROOT), "configs/quickstart.yaml", "steps=2",
                           "rollout.prompts_per_step=4", "rollout.group_size=4", "eval.samples=8",
                           f"run.dir={tmp_path}/run"], cwd=ROOT, capture_output=True, text=True, timeout=600,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    own, called = json.loads(done.stdout.splitlines()[-1])
    methods = [name for name in own if name.startswith("vlrl/methods/")]
    assert {Path(name).stem for name in methods} <= {"__init__", "settings"}  # of sections that are never null
    assert not [name for name in own if name.startswith(("vlrl/services/", "vlrl/environments/", "vlrl/engine/vllm/"))]
    assert [name for name in own if name.startswith("vlrl/cli/")] == [
        f"vlrl/cli/{name}.py" for name in ("__init__", "common", "interrupt", "main", "terminal", "train")]
    assert len(own) > 150 and sum(len((ROOT / name).read_text().splitlines()) for name in own) <= MOST_LINES
    assert 100 < len(called) <= MOST_FILES
