"""A run's rollouts as a data set: what `datasets` reads of it, and what the Hub gets."""

import dataclasses
import io
import json

import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.data.hub_server import hub, use
from tests.helpers import made_group
from vlrl.cli.main import main
from vlrl.data.sources import hub as hubs
from vlrl.errors import ConfigError, RunError
from vlrl.store import RunFolder
from vlrl.tools.hub.rollout_dataset import export
from vlrl.types import LoadedMedia, Sample


def group(number, split="train"):
    picture = Image.new("RGB", (8, 6 + number), (0, number, 9))
    media = LoadedMedia(kind="image", frames=(picture,), sha256=f"{number:064x}")
    clip = LoadedMedia(kind="video", frames=(picture, picture), sha256=f"{number + 99:064x}", timestamps=(0.0, 1.0))
    return made_group(f"s{number}", f"answer {number} \u2028 ---", (0.0, 1.0), row={"label": "cat"}, split=split,
                      media=(media, clip) if number == 2 else (media,), id=f"{number:08d}")


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.create("model: {name: /secret/place/tiny}\ntask: {name: grounding}\n", 0)
    for step in range(3):
        folder.write_rollouts(step, 0, [group(step)])
    folder.write_rollouts(3, 0, [group(5, "heldout")], split="heldout")
    return folder


def noted(run):
    from vlrl.app.notes import Notes
    from vlrl.app.queries import RolloutKey
    Notes(run.path.parent).put(RolloutKey("a", "train", "train", 1, "00000001", 0), flag="good", comment="clear")


def test_datasets_reads_what_is_exported(run, tmp_path):
    datasets = pytest.importorskip("datasets")
    noted(run)
    assert main(["data", "export", str(run.path), "-o", str(tmp_path / "set")]) in (0, None)
    found = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"), split="train")
    assert len(found) == 6 and isinstance(found.features["images"].feature, datasets.Image)
    row = found[2]
    assert (row["sample_id"], row["flag"], row["comment"], row["step"]) == ("s1", "good", "clear", 1)
    assert row["images"][0].size == (8, 7) and json.loads(row["parts"]) == {"iou": 0.0}
    assert json.loads(row["sample"]) == {"label": "cat"} and row["completion"].startswith("answer 1")
    card = (tmp_path / "set" / "README.md").read_text()
    assert "| model | `tiny` |" in card and "/secret" not in card and "6 rollouts" in card
    assert "| notes | 1 |" in card and "2 videos left out" in card


def test_steps_evaluations_and_pictures_of_the_run_alone(run, tmp_path):
    made = export(run, tmp_path / "late", steps=range(1, 2))
    assert (made.rows, made.images, made.left_out) == (2, 2, {})
    made = export(run, tmp_path / "held", split="heldout")
    assert made.rows == 2 and pq.read_table(tmp_path / "held/data/heldout-00000-of-00001.parquet").num_rows == 2
    with pytest.raises(RunError, match="has no rollouts of the chosen steps"):
        export(run, tmp_path / "none", steps=range(7, 9))
    with pytest.raises(ConfigError, match="is not empty"):
        export(run, tmp_path / "late")
    for file in (run.path / "media").iterdir():
        file.unlink()
    made = export(run, tmp_path / "set", steps=range(1))
    assert (made.images, made.left_out) == (0, {"images whose file is missing": 2})
    outside = run.path / "media" / f"{1:064x}.png"
    outside.symlink_to("/etc/hostname")
    made = export(run, tmp_path / "linked", steps=range(1, 2))
    assert made.left_out == {"images that the run did not store (store.media)": 2}


def test_what_is_pushed_is_read_by_its_name(run, monkeypatch, capsys, tmp_path):
    with hub() as served:
        use(monkeypatch, served.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        assert main(["data", "push", str(run.path), "org/rollouts"]) == 1
        assert "HF_TOKEN is not set" in capsys.readouterr().err and served.asked == []
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        main(["data", "push", str(run.path), "org/rollouts", "--with-media"])
        assert served.private == {"org/rollouts": True}
        (file,), _ = hubs.fetch_split(hubs.parse_hub_name("org/rollouts@train"), tmp_path / "cache")
        rows = pq.read_table(file).to_pylist()
        assert len(rows) == 6 and Image.open(io.BytesIO(rows[0]["images"][0]["bytes"])).size == (8, 6)


def test_pictures_and_places_are_not_pushed_unless_asked_for(run, tmp_path, monkeypatch, capsys):
    told = group(7)
    sample = Sample(id="s7", row={"image": f"{tmp_path}/private/cat.png", "note": "read from /mnt/disk/x/rows.jsonl"})
    failed = dataclasses.replace(told.rollouts[0], error=f"OSError: {tmp_path}/private/cat.png is gone")
    run.write_rollouts(3, 0, [dataclasses.replace(told, sample=sample, rollouts=(failed,))])
    with hub() as served:
        use(monkeypatch, served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        main(["data", "push", str(run.path), "org/rollouts", "--dry-run"])
        assert "dry run, nothing is sent: data set org/rollouts, private" in capsys.readouterr().out
        assert served.asked == []
        main(["data", "push", str(run.path), "org/rollouts"])
        (file,), _ = hubs.fetch_split(hubs.parse_hub_name("org/rollouts@train"), tmp_path / "cache")
        *_, row = rows = pq.read_table(file).to_pylist()
        assert not any(row["images"] for row in rows)
        assert json.loads(row["sample"]) == {"image": "cat.png", "note": "read from rows.jsonl"}
        assert row["error"] == "OSError: cat.png is gone"
        assert b"9 images and videos (--with-media) left out" in served.head("org/rollouts")["README.md"]
