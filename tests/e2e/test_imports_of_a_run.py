"""What a run of the quickstart loads: the trunk, and of the branches what it asks for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 30_000
"""Of vlrl's and the task's modules that a run imports; lower it when it falls."""
RUN = """
import json, sys
from pathlib import Path
from vlrl.cli.main import train
code = train(sys.argv[2:])
root = Path(sys.argv[1])
files = {Path(m.__file__) for m in list(sys.modules.values()) if getattr(m, "__file__", None)}
own = sorted(str(f.relative_to(root)) for f in files if f.is_relative_to(root) and ".venv" not in f.parts)
print("\\n" + json.dumps(own))
sys.exit(code)
"""


def test_a_run_imports_what_it_asks_for(tmp_path):
    done = subprocess.run([sys.executable, "-c", RUN, str(ROOT), "configs/quickstart.yaml", "steps=2",
                           f"run.dir={tmp_path}/run"], cwd=ROOT, capture_output=True, text=True, timeout=600,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    own = json.loads(done.stdout.splitlines()[-1])
    methods = [name for name in own if name.startswith("vlrl/methods/")]
    assert {Path(name).stem for name in methods} <= {"__init__", "settings"}  # of sections that are never null
    assert not [name for name in own if name.startswith(("vlrl/services/", "vlrl/environments/", "vlrl/engine/vllm/"))]
    assert [name for name in own if name.startswith("vlrl/cli/")] == [
        f"vlrl/cli/{name}.py" for name in ("__init__", "common", "interrupt", "main", "terminal", "training")]
    assert len(own) > 150 and sum(len((ROOT / name).read_text().splitlines()) for name in own) <= MOST_LINES
