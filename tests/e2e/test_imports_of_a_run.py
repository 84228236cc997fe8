"""What a run of the quickstart loads: the trunk, and of the branches what it asks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MOST_LINES, MOST_FILES = 30_000, 175
"""Of vlrl and the task: lines of the modules that a run imports, and files with a function that it calls; lower them
when they fall."""
RUN = """
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
    done = subprocess.run([sys.executable, "-c", RUN, str(ROOT), "configs/quickstart.yaml", "steps=2",
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
