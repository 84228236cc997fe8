"""What docs/install.md offers beside make: uv's lock, the container, SkyPilot's file, the Slurm script, `make docs`."""

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
EXTRAS = set(PROJECT["optional-dependencies"])


def test_the_lock_holds_the_versions_that_are_tested_and_is_of_this_pyproject():
    locked: dict[str, set[str]] = {}
    for package in LOCK["package"]:
        locked.setdefault(canonicalize_name(package["name"]), set()).add(package.get("version"))
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    assert len(pins) > 200
    assert {name: version for name, version in pins.items()
            if locked.get(canonicalize_name(name)) != {version}} == {}, "make lock"
    # the names and bounds that uv read when it wrote the lock; `uv lock --check` asks the index for more
    (own,) = [package for package in LOCK["package"] if package["name"] == "vlrl"]
    read = {(canonicalize_name(need["name"]), need.get("specifier", "")) for need in own["metadata"]["requires-dist"]}
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    asked = [Requirement(line) for line in lines]
    wanted = {(canonicalize_name(need.name), ",".join(sorted(str(s) for s in need.specifier))) for need in asked
              if need.name != "vlrl"}
    read = {(name, ",".join(sorted(bounds.split(",")))) for name, bounds in read if name != "vlrl"}
    assert read == wanted, "make lock"
    assert LOCK["requires-python"] == PROJECT["requires-python"]
    places = {key for package in LOCK["package"] for key in package["source"]}
    assert places == {"registry", "editable"}
    assert {p["source"]["registry"] for p in LOCK["package"] if "registry" in p["source"]} == {"https://pypi.org/simple"}


def test_the_container_and_skypilot_use_what_exists():
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    default = re.search(r"^ARG EXTRAS=(\S+)$", text, re.M)
    shown = re.findall(r"--build-arg EXTRAS=([\w,-]+)", text + PAGE)
    assert default and shown
    for extras in [default[1], *shown]:
        assert set(extras.split(",")) <= EXTRAS, extras
    for copied in re.findall(r"^COPY --chown=vlrl (\S+)", text, re.M):
        assert (ROOT / copied).exists(), copied
    settings = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    assert set(settings["build"]["args"]["EXTRAS"].split(",")) <= EXTRAS
    assert (ROOT / ".devcontainer" / settings["build"]["dockerfile"]).resolve() == ROOT / "Dockerfile"
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.M)) == sorted(EXTRAS)
    for file in (ROOT / "configs" / "skypilot").glob("*.yaml"):
        job = yaml.safe_load(file.read_text(encoding="utf-8"))
        words = " ".join((job["setup"], job["run"], job["envs"]["CONFIG"]))
        used = re.findall(r"(?:configs/\S+?\.yaml|train\.py|constraints\.txt)", words)
        assert len(used) >= 4 and all((ROOT / name).exists() for name in used), (file.name, used)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_every_page_is_there_with_what_is_documented_and_loads_nothing_from_elsewhere(site):
    pages = {path.stem for path in (ROOT / "docs").glob("*.md")} - {"README"} | {"index"}
    assert {path.stem for path in site.glob("*.html")} == pages | {"404"}
    measured = {path.stem for path in (ROOT / "benchmarks" / "results").glob("*.md")}
    assert {path.stem for path in (site / "results").glob("*.html")} == measured
    text = (site / "reference" / "vlrl.html").read_text()
    assert all(f'id="{name}"' in text for name in (
        "vlrl.task.base.Task", "vlrl.types.Sample", "vlrl.tools.train.train", "vlrl.tools.run.load_run"))
    assert 'id="vlrl.rewards.boxes.iou"' in (site / "reference" / "rewards.html").read_text()
    loaded = re.compile(r"""<(?:script|link|img)[^>]+(?:src|href)="?(https?:)?//""")
    for page in site.rglob("*.html"):
        found = loaded.search(page.read_text())
        assert not found, (page, found)


SCRIPT = ROOT / "configs" / "slurm" / "train.sbatch"
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
