"""Folders beside the root of the rows that media may lie in: data.media_roots."""

import json

import pytest
from PIL import Image

from vlrl.app.asking import _DATA
from vlrl.config.schema import DataSettings
from vlrl.data import read_samples
from vlrl.errors import DataError
from vlrl.task import Task, load

UNSAFE = {"media_roots", "urls", "cache"}


@pytest.fixture
def places(tmp_path):
    """rows/ with the file, shared/ that may be allowed, secret/ that is not."""
    for name in ("rows", "shared", "secret"):
        (tmp_path / name).mkdir()
        Image.new("RGB", (8, 8)).save(tmp_path / name / "a.png")
    (tmp_path / "shared" / "out.png").symlink_to(tmp_path / "secret" / "a.png")
    (tmp_path / "link").symlink_to(tmp_path / "shared")
    return tmp_path


def read(places, image, index, record=None, task=None, **more):
    (places / "rows" / "a.jsonl").write_text(json.dumps(record or {"id": "r", "image": str(image)}))
    task = task or Task()
    task.data = DataSettings(train=str(places / "rows" / "a.jsonl"), index=index, cache=str(places / "cache"), **more)
    return read_samples(task, "train")[0].media[0].source


@pytest.mark.parametrize("index", ["memory", "lazy"])
def test_further_roots_let_in_what_lies_in_them_alone(places, index):
    roots = (str(places / "link"),)
    right = places / "shared" / "a.png"
    for path in (right, places / "link" / "a.png", "../shared/a.png"):
        assert read(places, path, index, media_roots=roots) == right
        with pytest.raises(DataError, match=r"row 'r': media path .* lies outside .*data\.media_roots"):
            read(places, path, index)
    for path in (places / "secret" / "a.png", "../secret/a.png", "../shared/out.png", "../shared/../secret/a.png",
                 str(places / "shared") + "x/a.png", "/etc/passwd", places / "shared" / ".." / "secret" / "a.png"):
        with pytest.raises(DataError, match=r"lies outside .*media_roots"):
            read(places, path, index, media_roots=roots)


@pytest.mark.parametrize("index", ["memory", "lazy"])
def test_absolute_paths_of_other_formats(places, index):
    """They are looked for under the root, unless they lie in a further one."""
    there = places / "shared" / "b.png"
    Image.new("RGB", (20, 10)).save(there)
    record = {"image": str(there), "problem": "What?", "solution": "<answer>x</answer>"}
    assert read(places, there, index, record, load("qa"), media_roots=(str(places / "shared"),)) == there
    with pytest.raises(DataError, match="does not exist"):
        read(places, there, index, record, load("qa"))


def test_the_playground_takes_no_roots_of_a_run():
    """What it takes over from a run's config is listed, and these are not among it."""
    assert set(DataSettings.model_fields) >= UNSAFE and not UNSAFE & {*_DATA}
