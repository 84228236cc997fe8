"""What docs/install.md offers beside make: uv's lock, the container, SkyPilot's file."""

import json
import re
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


def test_the_lock_holds_the_versions_that_are_tested():
    locked: dict[str, set[str]] = {}
    for package in LOCK["package"]:
        locked.setdefault(canonicalize_name(package["name"]), set()).add(package.get("version"))
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;#]+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M))
    assert len(pins) > 200
    assert {name: version for name, version in pins.items()
            if locked.get(canonicalize_name(name)) != {version}} == {}, "make lock"


def test_the_lock_is_of_this_pyproject():
    """The names and bounds that uv read when it wrote the lock; `uv lock --check` asks the index for more."""
    (own,) = [package for package in LOCK["package"] if package["name"] == "vlrl"]
    read = {(canonicalize_name(need["name"]), need.get("specifier", "")) for need in own["metadata"]["requires-dist"]}
    lines = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
    asked = [Requirement(line) for line in lines]
    wanted = {(canonicalize_name(need.name), ",".join(sorted(str(s) for s in need.specifier))) for need in asked
              if need.name != "vlrl"}
    read = {(name, ",".join(sorted(bounds.split(",")))) for name, bounds in read if name != "vlrl"}
    assert read == wanted, "make lock"
    assert LOCK["requires-python"] == PROJECT["requires-python"]


def test_nothing_of_the_lock_lies_on_a_disk():
    places = {key for package in LOCK["package"] for key in package["source"]}
    assert places == {"registry", "editable"}
    assert {p["source"]["registry"] for p in LOCK["package"] if "registry" in p["source"]} == {"https://pypi.org/simple"}


def test_every_extra_is_named_once():
    assert sorted(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.M)) == sorted(EXTRAS)


def test_the_container_installs_extras_and_files_that_exist():
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


@pytest.mark.parametrize("file", sorted((ROOT / "configs" / "skypilot").glob("*.yaml")), ids=lambda p: p.name)
def test_skypilot_starts_files_that_exist(file):
    job = yaml.safe_load(file.read_text(encoding="utf-8"))
    words = " ".join((job["setup"], job["run"], job["envs"]["CONFIG"]))
    used = re.findall(r"(?:configs/\S+?\.yaml|train\.py|constraints\.txt)", words)
    assert len(used) >= 4
    for name in used:
        assert (ROOT / name).exists(), name
