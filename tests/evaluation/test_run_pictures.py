"""Pictures of a run folder with marks, and following a run that goes on."""

import threading

import pytest
from PIL import Image

from tests.helpers import made_group
from vlrl.store import RunFolder
from vlrl.tools.run import load_run
from vlrl.types import LoadedMedia


def group(name, kind="image"):
    frames = (Image.new("RGB", (512, 256), "white"),) * (1 + (kind == "video"))
    media = LoadedMedia(kind=kind, frames=frames, sha256=f"{name:064x}")
    marks = [{"kind": "box", "at": [10, 10, 100, 100], "role": "target"}]
    return made_group(f"s{name}", media=(media,), of={"marks": marks})


@pytest.fixture
def folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    folder.create("task: {name: grounding}\n", 0)
    folder.write_rollouts(0, 0, [group(1)], split="heldout")
    folder.write_rollouts(5, 0, [group(2, "video"), group(3), group(4)], split="heldout")
    folder.heartbeat({"step": 0, "steps": 2, "state": "running"})
    return folder


def test_pictures_are_those_of_the_newest_evaluation_inside_the_run(folder, tmp_path):
    run = load_run(folder.path)
    first, _ = run.pictures()
    assert first.size == (512, 256) and first.getpixel((10, 50)) == (34, 197, 94)
    assert len(run.pictures(1)) == 1 and run.pictures(split="train") == []
    (folder.path / "media" / f"{3:064x}.png").unlink()
    (folder.path / "media" / f"{4:064x}.png").write_bytes(b"no picture")
    assert run.pictures() == []
    Image.new("RGB", (8, 8)).save(tmp_path / "other.png")
    (folder.path / "media" / f"{3:064x}.png").symlink_to(tmp_path / "other.png")
    assert load_run(folder.path).pictures() == []


def test_a_run_is_followed_to_its_end(folder, capsys):
    def goes_on():
        folder.append_metrics({"step": 0, "reward/mean": 0.25})
        folder.append_metrics({"step": 1, "reward/mean": 0.5})
        folder.heartbeat({"step": 2, "steps": 2, "state": "finished"})

    other = threading.Timer(0.2, goes_on)
    other.start()
    load_run(folder.path).show(follow=True, every_s=0.05)
    other.join()
    lines = capsys.readouterr().out.splitlines()
    assert "0 of 2 steps" in lines[0] and any("2 of 2 steps, reward 0.500" in line for line in lines)
