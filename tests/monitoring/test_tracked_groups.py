"""Groups at trackers: what is drawn and told of them, and that each tracker's own package reads back its files."""

import importlib.util
import io
import json
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers import made_group
from vlrl.monitoring import trackers
from vlrl.monitoring.tracked_groups import TARGET, group_view, markdown, send
from vlrl.types import LoadedMedia

GREEN, BLUE, ORANGE = (34, 197, 94), (76, 141, 255), (245, 133, 24)


JUNK = ["junk", {"kind": "box", "at": [1, float("nan"), 2, 3]}, {"kind": "path", "at": [[1, 2], [3]]}, {"kind": []}]


def group(number=0, marks=True, size=(256, 128)):
    media = LoadedMedia(kind="image", frames=(Image.new("RGB", size, "white"),), sha256="0" * 64)
    made = made_group(f"s{number}", rewards=(None, 0.75), prompt="Where?", media=(media,), target=[10, 10, 100, 100])
    target = {"kind": "box", "at": [10, 10, 100, 100], "role": "target"}
    rollouts = []
    for i, rollout in enumerate(made.rollouts):
        done = replace(rollout.completion, tokens=np.arange(3 + i), logprobs=np.zeros(3 + i, np.float32),
                       loss_mask=np.ones(3 + i, bool), text=f"box | {i}")
        own = {"kind": "box", "at": [150 + 50 * i, 20, 190 + 50 * i, 60], "role": "answer"}
        rollouts.append(replace(rollout, completion=done, parts={"iou": (None, 0.5)[i], "format": 1.0}, parsed=[1, 2],
                                advantage=2.0 * i - 1, marks=[target, own] if marks else JUNK))
    return replace(made, rollouts=tuple(rollouts))


def test_pictures_have_the_marks_at_their_places():
    ((picture, caption),) = group_view([group(), group(1)], 1, 7).pictures
    assert picture.size == (256, 128) and caption == "s0: rewards - 0.75"
    at = [picture.getpixel(place) for place in ((10, 50), (150, 40), (200, 40), (5, 5))]
    assert at == [GREEN, BLUE, ORANGE, (255, 255, 255)] and TARGET == "#22c55e"
    sizes = [group_view([group(size=size)], 1, 0).pictures[0][0].size for size in ((64, 32), (1024, 64))]
    assert sizes == [(256, 128), (512, 32)]
    ((picture, _),) = group_view([group(marks=False)], 1, 0).pictures
    assert picture.getcolors() == [(256 * 128, (255, 255, 255))]


def test_the_table_has_every_answer_and_part():
    view = group_view([group(), group(1)], 1, 7)
    assert view.columns == ["step", "sample", "answer", "prompt", "target", "completion", "parsed", "reward",
                            "advantage", "iou", "format"]
    assert view.rows == [[7, "s0", 0, "Where?", "[10, 10, 100, 100]", "box | 0", "[1, 2]", None, -1.0, None, 1.0],
                         [7, "s0", 1, "Where?", "[10, 10, 100, 100]", "box | 1", "[1, 2]", 0.75, 1.0, 0.5, 1.0]]
    values = {name: list(found) for name, found in view.values.items()}
    assert values == {"reward": [0.75, 0.75], "advantage": [-1, 1, -1, 1], "length": [3, 4, 3, 4],
                      "part/iou": [0.5, 0.5], "part/format": [1, 1, 1, 1]}


@settings(max_examples=50)
@given(st.lists(st.text("|<>`*&#[\\\n ab"), min_size=2, max_size=2))
@example(["a | b", "<b>`x`\n\n"])
def test_no_text_can_be_another_cell(texts):
    *_, last = lines = markdown(["a", "b"], [texts]).split("\n")
    assert len(lines) == 3 and last.count("|") == 3 and "<" not in last and "`" not in last


def sent(name, folder, start=0):
    """Two steps of a curve and one view, sent to one tracker as a run does; returns its own object."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=[name], project_dir=str(folder))
    accelerator.init_trackers("vlrl", {"train.lr": 0.1}, trackers.options(folder, start))
    run = accelerator.get_tracker(name, unwrap=True)
    if name == "mlflow":
        trackers.note_mlflow_run(folder, run.info.run_id)
    for step in (start, start + 1):
        accelerator.log({"reward/mean": 0.25 * step}, step=step)
    send(name, run, group_view([group()], 1, start + 1), "groups", start + 1)
    accelerator.end_training()
    return run


def needs(name):
    """For a test of that tracker's package, whose warnings do not count."""
    marks = [pytest.mark.slow, pytest.mark.filterwarnings("ignore"),
             pytest.mark.skipif(not importlib.util.find_spec(name), reason=f"{name} is not installed")]
    return pytest.mark.parametrize("name", [pytest.param(name, marks=marks)])


@pytest.fixture
def here(tmp_path, monkeypatch):
    for name in ("WANDB_RUN_ID", "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    return tmp_path


def picture_of(image):
    return image.size == (256, 128) and image.convert("RGB").getpixel((10, 50)) == GREEN


@needs("tensorboard")
def test_tensorboard(name, here):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sent(name, here / "run")
    found = EventAccumulator(str(here / "run" / "vlrl"), {"images": 0, "histograms": 0, "tensors": 0})
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("reward/mean")] == [(0, 0.0), (1, 0.25)]
    (image,) = found.Images("groups/picture-0")
    assert image.step == 1 and picture_of(Image.open(io.BytesIO(image.encoded_image_string)))
    (histogram,) = found.Histograms("groups/length")
    assert (histogram.histogram_value.num, histogram.histogram_value.sum) == (2, 7)
    (text,) = found.Tensors("groups/answers/text_summary")
    assert "| 1 | s0 | 1 |" in text.tensor_proto.string_val[0].decode()


@needs("mlflow")
def test_mlflow(name, here, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{here}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{here}/mlflow.db")
    first = sent(name, here / "run").info.run_id
    assert sent(name, here / "run", 2).info.run_id == first  # a run that goes on
    client = mlflow.MlflowClient()
    assert [(m.step, m.value) for m in client.get_metric_history(first, "reward/mean")] == [
        (0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    mlflow.set_experiment("vlrl")
    table = mlflow.load_table("groups/answers.json", run_ids=[first])
    assert list(table["step"]) == [1, 1, 3, 3] and list(table["completion"])[:2] == ["box | 0", "box | 1"]
    paths = [f.path for f in client.list_artifacts(first, "images")]
    picture = next(p for p in paths if p.endswith(".png") and "picture-0" in p.replace("%23", "/").replace("~", "/"))
    assert picture_of(Image.open(client.download_artifacts(first, picture)))
    assert [f.path for f in client.list_artifacts(first, "groups/histograms")] == [
        "groups/histograms/step-000001.png", "groups/histograms/step-000003.png"]


@needs("trackio")
def test_trackio(name, here):
    """In a process of its own, which reads TRACKIO_DIR when it imports the package."""
    code = ("import sys; sys.path[:0] = [sys.argv[1]]\nfrom pathlib import Path\n"
            "from tests.monitoring.test_tracked_groups import sent\nsent('trackio', Path(sys.argv[2]))\n")
    read = ("import json, sys, trackio\nfrom trackio.sqlite_storage import SQLiteStorage\n"
            "(run,) = trackio.Api().runs('vlrl')\nlogs = SQLiteStorage.get_logs('vlrl', run.name)\n"
            "print(json.dumps(logs, default=str))")
    root = next(p for p in map(str, sys.path) if os.path.isfile(f"{p}/tests/monitoring/test_tracked_groups.py"))
    env = {**os.environ, "TRACKIO_DIR": str(here / "trackio"), "HF_HUB_OFFLINE": "1"}

    def python(*words):
        done = subprocess.run([sys.executable, "-c", *words], env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout
    python(code, root, str(here / "run"))
    lines = json.loads(python(read).splitlines()[-1])
    assert [(x["step"], x["reward/mean"]) for x in lines if "reward/mean" in x] == [(0, 0.0), (1, 0.25)]
    (shown,) = (x for x in lines if "groups/answers" in x)
    assert [row["completion"] for row in shown["groups/answers"]["_value"]] == ["box | 0", "box | 1"]
    assert sum(shown["groups/length"]["values"]) == 2
    assert picture_of(Image.open(next((here / "trackio").rglob(shown["groups/picture-0"]["file_path"]))))


def records(path):
    """The records of a file of Weights & Biases: blocks of 32 KiB, in each pieces with checksum, length and kind."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, piece = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 32768 - place % 32768 < 7:
            place += 32768 - place % 32768
            continue
        _, size, kind = struct.unpack("<IHB", data[place:place + 7])
        piece += data[place + 7:place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield Record.FromString(piece)
            piece = b""


@needs("wandb")
def test_wandb(name, here, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(here))
    sent(name, here / "run")
    (file,) = here.rglob("run-*.wandb")
    until = time.monotonic() + 60
    while not any(r.HasField("exit") for r in records(file)) and time.monotonic() < until:
        time.sleep(0.2)  # its service writes in a process of its own
    lines = [{"step": r.history.step.num,
              **{".".join(i.nested_key) or i.key: json.loads(i.value_json) for i in r.history.item}}
             for r in records(file) if r.HasField("history")]
    assert [(x["step"], x["reward/mean"]) for x in lines if "reward/mean" in x] == [(0, 0.0), (1, 0.25)]
    media = file.parent / "files" / "media"
    table = json.loads(next(media.rglob("*.table.json")).read_text())
    assert [row[table["columns"].index("completion")] for row in table["data"]] == ["box | 0", "box | 1"]
    assert picture_of(Image.open(next(media.rglob("*.png")))) and sum(lines[-1]["groups/length.values"]) == 2
