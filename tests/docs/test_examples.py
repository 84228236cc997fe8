"""The notebooks of examples/ run from nothing, and show what they say."""

import json
import os
from pathlib import Path

import pytest

from tests.e2e import forked
from tests.e2e.runs import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


class Kernel(forked.Process):
    """A kernel as Jupyter would start it, forked: what is tested are the notebooks."""

    stdin = stdout = stderr = None

    def __init__(self, command, env, cwd, **_):
        with Path(cwd, "kernel.log").open("w") as log:
            own = {**env, "JPY_PARENT_PID": str(os.getpid())}  # it ends where that process is gone
            super().__init__(command[1:], own, Path(cwd), log, log, start_new_session=True)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path, tmp_path, monkeypatch):
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", Kernel)
    monkeypatch.setenv("STEPS", "2")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3",
                                     resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    shown = [kind for cell in notebook.cells for output in cell.get("outputs", ())
             for kind in output.get("data", ())]
    assert shown.count("image/png") >= 2  # the curve, and pictures
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ()))
    assert "Error" not in printed and "FAILED" not in printed, printed
