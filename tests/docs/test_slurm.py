"""configs/slurm/train.sbatch with stand-ins for Slurm: the environment of a process, and when it requeues."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "configs" / "slurm" / "train.sbatch"
STUBS = {
    "srun": 'shift\nSLURM_PROCID=1 SLURM_LOCALID=1 SLURM_NTASKS=2 exec "$@"\n',
    "scontrol": 'if [ "$1" = show ]; then echo node7; echo node8; else echo "$@" >> requeued; fi\n',
    "python": 'echo "$RANK $LOCAL_RANK $WORLD_SIZE $MASTER_ADDR $MASTER_PORT $*"; exit $CODE\n'}


@pytest.mark.parametrize("code, requeued", [(0, False), (1, False), (130, True)])
def test_it_is_requeued_when_it_was_stopped(tmp_path, code, requeued):
    for name, body in STUBS.items():
        (tmp_path / name).write_text("#!/bin/bash\n" + body)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "CODE": str(code), "SLURM_JOB_ID": "41",
           "SLURM_JOB_NODELIST": "node[7-8]"}
    env.pop("MASTER_ADDR", None)
    done = subprocess.run(["bash", str(SCRIPT), "my.yaml", "run.dir=a b"], cwd=tmp_path, env=env, text=True,
                          capture_output=True, check=False)
    assert done.returncode == code and not done.stderr
    assert done.stdout == "1 1 2 node7 20041 train.py my.yaml run.dir=a b save.grace=60\n"
    found = tmp_path / "requeued"
    assert found.exists() == requeued and (not requeued or found.read_text() == "requeue 41\n")
