"""The playground without its page: what can be chosen, what is refused, answers as they are written, shortages."""

import base64
import dataclasses
import io
import itertools
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from vlrl import config
from vlrl.app import AppError, in_memory, models, playground
from vlrl.app.asking import Ask, own_code
from vlrl.app.library import Library
from vlrl.app.playground import Job, Playground
from vlrl.engine.hf import HFEngine
from vlrl.errors import ConfigError
from vlrl.models.model_config import embedded
from vlrl.rewards.boxes import iou
from vlrl.store import checkpoint
from vlrl.tools.play.preview import message_text

TINY = "embedded/tiny-qwen3-vl"
EMBEDDED = [TINY, f"{TINY}-episodes"]


def write_run(root: Path, name: str, *overrides: str) -> Path:
    """A run folder as far as the playground reads it, of the quickstart's settings."""
    folder = root / name
    folder.mkdir(parents=True)
    settings = config.load("configs/quickstart.yaml", [f"run.dir={folder}", *overrides])
    (folder / "config.yaml").write_text(config.dump(settings))
    (folder / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    return folder


def save_checkpoint(run: Path, step: int) -> Path:
    def copy(path: Path) -> None:
        shutil.copytree(embedded(TINY), path, dirs_exist_ok=True)

    return checkpoint.save(run / "checkpoints", step, copy, {}, keep=9)


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    run = write_run(root, "quickstart", "task.count=64")
    save_checkpoint(run, 9)
    save_checkpoint(run, 12)
    write_run(root, "again/same", "task.count=64")
    write_run(root, "digits", "task={name: digits}")
    return root


@pytest.fixture(scope="module")
def play(root) -> Playground:
    return Playground(Library(root))


def ask(**changes) -> Ask:
    return dataclasses.replace(Ask(model=TINY, task="run:quickstart", sample="#3", max_new_tokens=24), **changes)


def end(play: Playground, asked: Ask) -> playground.Progress:
    return list(play.answer(asked).follow())[-1]


def test_models_and_tasks_that_can_be_chosen(play, root, tmp_path):
    values = [value for _, value in models.listed(play.library)]
    assert values == [*EMBEDDED, "quickstart/checkpoints/step-000012", "quickstart/checkpoints/step-000009"]
    tasks = [value for _, value in play.tasks.listed()]
    assert len([t for t in tasks if t.startswith("run:")]) == 2  # two runs ask the same
    assert {"run:digits", "grounding", "digits", "qa"} <= {*tasks}
    assert play.tasks.usual("run:quickstart", None) == (24, 1.0) == play.tasks.usual("digits", "quickstart")
    assert play.tasks.usual("digits", None) == (64, 1.0)
    chosen = models.choose(play.library, "quickstart/checkpoints/step-000012")
    assert (chosen.run, chosen.step) == ("quickstart", 12) and Path(chosen.name).is_dir()
    assert models.choose(play.library, str(root / "quickstart")).step == 12  # a run folder: its newest
    assert models.choose(play.library, str(embedded(TINY))).run is None
    for text, message in ((TINY + "x", "no such embedded model"), ("some/model", "not on this machine"),
                          ("", "not on this machine"), ("../" * 40 + "etc", r"no \*\.safetensors"),
                          (str(tmp_path), r"no \*\.safetensors"), ("x" * 9000, "not on this machine"),
                          ("a\0b", "not on this machine"),
                          ("quickstart/checkpoints/step-000099", r"step-000099' was deleted.*save\.keep")):
        with pytest.raises((AppError, ConfigError), match=message):
            models.choose(play.library, text)


def test_a_checkpoint_of_another_folder_is_not_read_and_an_adapter_needs_its_base_model(tmp_path):
    save_checkpoint(tmp_path / "elsewhere", 3)
    write_run(tmp_path / "runs", "a")
    (tmp_path / "runs/a/checkpoints").symlink_to(tmp_path / "elsewhere/checkpoints")
    library = Library(tmp_path / "runs")
    assert [value for _, value in models.listed(library)] == EMBEDDED
    with pytest.raises(AppError, match="outside"):
        models.choose(library, "a/checkpoints/step-000003")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "no/such-model"}))
    with pytest.raises(AppError, match=r"trained on 'no/such-model'.*downloads nothing"):
        models.disable_downloads(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    with pytest.raises(AppError, match="eight"):
        models.disable_downloads(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": TINY}))
    models.disable_downloads(str(tmp_path))


def test_code_of_a_run_is_not_run(tmp_path):
    run = write_run(tmp_path, "a")
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    for task in ({"name": "evil.py:Task"}, {"name": "os:system"}, {"name": "grounding", "combine": "evil.py:f"},
                 {"name": "grounding", "combine": "os:system"}, {"name": "grounding", "recipe": "my folder/evil.py:f"},
                 {"name": "qa", "anything": {"deep": ["evil:f"]}}):
        (run / "config.yaml").write_text(json.dumps({"task": task}))
        play = Playground(Library(tmp_path))
        with pytest.raises(AppError, match=r"refers to code of its user.*--trust-tasks"):
            play.sample(ask(task="run:a"))
        said = end(play, ask(task="run:a")).remark
        assert "refers to code of its user" in said and "--trust-tasks" in said


def test_settings_that_only_look_like_code_and_a_task_from_a_file(play):
    for task in ({"name": "grounding", "combine": "gate:format"}, {"name": "qa", "prompt": "Answer: {question}"},
                 {"name": "digits", "rewards": {"accuracy": [[0, 1], [5, 2]]}}):
        assert own_code(task) == ""
    with pytest.raises(AppError, match="--trust-tasks"):
        play.sample(ask(task="tests/helpers.py:Vowels"))


def test_data_is_read_where_it_may_be(tmp_path, monkeypatch):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "question": "1 + 1?", "answer": "2", "answer_type": "number"}\n')
    run = write_run(tmp_path / "runs", "a")
    (run / "config.yaml").write_text(json.dumps({"task": {"name": "qa"}, "data": {"heldout": str(rows)}}))
    asked, library = ask(task="run:a", sample="a"), Library(tmp_path / "runs")
    with pytest.raises(AppError, match=r"data\.heldout=.*outside the folder of runs and the current folder"):
        Playground(library).sample(asked)
    assert Playground(library, trust_tasks=True).sample(asked).target == 2
    monkeypatch.chdir(tmp_path)
    assert Playground(library).sample(asked).target == 2


def test_samples_by_place_and_by_id(play):
    shown = play.sample(ask())
    assert (shown.place, shown.count, shown.sample.id) == (3, 64, "heldout-000003")
    assert shown.question.startswith("Locate the ") and len(shown.target) == 4 and len(shown.media) == 1
    assert play.sample(ask(sample="heldout-000005")).place == 5
    assert play.sample(ask(sample="#1", split="train")).sample.id == "train-000001"
    for changes, message in (({"sample": "#64"}, "#0 to #63"), ({"sample": "nope"}, "no.*'nope'.*heldout-000000"),
                             ({"split": "test"}, "no split 'test'.*train and heldout"), ({"task": "run:gone"}, "gone"),
                             ({"task": "qa"}, "data.heldout is not set")):
        with pytest.raises((AppError, ConfigError), match=f"(?i){message}"):
            play.sample(ask(**changes))


def test_a_sample_is_shown_with_its_target_on_the_picture(root):
    from vlrl.app.pages.playground import Page
    page = Page(SimpleNamespace(library=Library(root), trust_tasks=False))
    shown, place = page.look(TINY, "run:quickstart", "heldout", "#3")
    assert place == (3, 64) and "image&gt;" not in shown
    assert shown.count('data-v-mark="t"') == 1 and 'class="v-keys"' in shown
    assert "data-v-mark" not in page.look(TINY, "run:digits", "heldout", "#0")[0]  # a number is at no place
    images = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "before, "}, {"type": "video"},
                                           {"type": "text", "text": "after"}]}]
    assert message_text(images) == "<image>before, <video>after"
    assert message_text(images, "[{kind} {number}] ") == "[image 1] before, [video 2] after"


@pytest.mark.slow
def test_answers_stream_in_and_are_scored_and_a_checkpoint_replaces_the_model(play, monkeypatch):
    job, told = play.answer(ask()), []
    tell = job.tell
    monkeypatch.setattr(job, "tell", lambda *args, **more: (tell(*args, **more), told.append(job._now)))
    last = [*job.follow()][-1]  # who follows may miss some of what is told
    assert {"loading", "writing", "done"} <= {p.phase for p in told} and last is told[-1] and last.phase == "done"
    texts = [p.texts for p in told if p.texts]
    assert all(b.startswith(a) for before, after in itertools.pairwise(texts)
               for a, b in zip(before, after, strict=True))
    group = told[-1].result.group
    assert texts[-1] == tuple(r.completion.text for r in group.rollouts) and len(group.rollouts) == 4
    for r in group.rollouts:
        assert r.parts["iou"] == r.reward == pytest.approx(iou(r.parsed, group.target) if r.parsed else 0)
        assert [m["role"] for m in r.marks] == ["target", "answer"][:1 + bool(r.parsed)]
    again = list(play.answer(ask()).follow())
    assert "loading" not in {p.phase for p in again}  # it is in memory
    same, other = again[-1].result.group, end(play, ask(seed=1)).result.group
    tokens = [[r.completion.tokens.tolist() for r in g.rollouts] for g in (group, same, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    view = in_memory.group_view(group, "tiny")
    rewards = [r.reward for r in group.rollouts]
    assert view.mean == pytest.approx(np.mean(rewards)) and view.std == pytest.approx(np.std(rewards, ddof=1))
    assert end(play, ask()).phase == "done"
    first = play._loaded
    done = end(play, ask(model="quickstart/checkpoints/step-000012", temperature=0))
    assert len(done.result.group.rollouts) == 1 and "only one was generated" in " ".join(done.result.notes)
    assert done.result.group.rollouts[0].policy_step == 12
    assert play._loaded is not first and play._loaded.key[0].endswith("step-000012")


def test_a_job_stops_and_another_waits_for_it(play):
    """With a length that the model fills: no token ends an answer."""
    job, other = play.answer(ask(max_new_tokens=4000, temperature=10.0)), play.answer(ask(answers=1))
    telling, waiting = job.follow(), other.follow()
    assert next(p for p in telling if p.phase == "writing" and any(p.texts)).texts
    said = next(p for p in waiting if p.remark)
    assert said.phase == "waiting" and "another tab" in said.remark
    job.stop()
    last = list(telling)[-1]
    assert last.phase == "stopped" and last.result is None and any(last.texts) and list(waiting)[-1].phase == "done"


def test_a_page_that_leaves_stops_its_job(monkeypatch):
    monkeypatch.setattr(playground, "PATIENCE_S", 0.2)
    ended = []

    def work(job):
        try:
            while True:
                job.check()
                time.sleep(0.01)
        finally:
            ended.append(1)

    telling, forgotten = Job(work).follow(), Job(work).follow()
    next(telling)
    next(forgotten)
    telling.close()
    until = time.monotonic() + 5
    while len(ended) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_whatever_goes_wrong_is_told(play, caplog):
    for changes, message in (({"model": "no/model"}, "not on this machine"), ({"sample": "nope"}, "nope"),
                             ({"task": "run:gone"}, "gone")):
        last = end(play, ask(**changes))
        assert last.phase == "failed" and message in last.remark

    def work(job):
        raise KeyError("x")

    assert list(Job(work).follow())[-1].remark.endswith("KeyError: 'x'") and "the playground failed" in caplog.text
    for changes in ({"answers": 0}, {"answers": 65}, {"temperature": -0.1}, {"temperature": float("nan")},
                    {"max_new_tokens": 0}, {"seed": -1}):
        with pytest.raises(AppError, match="give a number from"):
            ask(**changes)


def test_a_model_that_does_not_fit_is_not_loaded(root, monkeypatch):
    play = Playground(Library(root))
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=10**6, total=10**12))
    last = end(play, ask())
    assert last.phase == "failed" and "GiB of main memory" in last.remark and "smaller model" in last.remark
    assert play._loaded is None


@pytest.mark.slow
@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("CUDA out of memory."), MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:1] . DefaultCPUAllocator: can't allocate memory: you tried")])
def test_a_shortage_while_writing_frees_the_model(play, monkeypatch, error):
    def short(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "_next", short)
        last = end(play, ask(answers=1))
    assert last.phase == "failed" and "Out of memory" in last.remark and play._loaded is None
    assert end(play, ask(answers=1)).phase == "done"


def test_a_checkpoint_that_is_removed_meanwhile(tmp_path):
    kept = save_checkpoint(write_run(tmp_path, "a"), 5)
    play, asked = Playground(Library(tmp_path)), ask(model="a/checkpoints/step-000005", task="run:a", answers=1)
    (kept / "model.safetensors").write_bytes(b"x")
    assert "damaged" in end(play, asked).remark
    shutil.rmtree(kept)
    last = end(play, asked)
    assert last.phase == "failed" and "was deleted: a run keeps only its newest" in last.remark


def test_an_upload_is_answered_and_not_scored(play, tmp_path):
    circle = Image.new("RGB", (128, 96), "white")
    ImageDraw.Draw(circle).ellipse((30, 20, 70, 60), fill="red")
    circle.save(tmp_path / "circle.png")
    words = "Locate the red circle. Answer with its box as [x1, y1, x2, y2]."
    result = end(play, ask(upload=tmp_path / "circle.png", question=words)).result
    group = result.group
    assert group.rewards == [None] * 4 and group.target is None and words in group.prompt.text
    assert "No rewards: an upload has no target" in result.notes[0]
    boxed = [r for r in group.rollouts if r.parsed]
    assert boxed and all([m["role"] for m in r.marks] == ["answer"] for r in boxed)
    view = in_memory.group_view(group, "tiny")
    assert view.mean is None and not view.zero_variance and view.key.split == "upload"
    src = in_memory.InlineImages(group.prompt.media).picture("", view.media[0].name or "", None) or ""
    image = Image.open(io.BytesIO(base64.b64decode(src.partition(",")[2])))
    assert image.size == (128, 96) and image.convert("RGB").getpixel((50, 40)) == (255, 0, 0)


def test_uploads_that_are_refused(play, tmp_path):
    text = tmp_path / "text.png"
    text.write_text("<script>alert(1)</script>")
    (tmp_path / "a.py").write_text("1")
    Image.new("1", (9_000, 9_000)).save(tmp_path / "huge.png", compress_level=1)
    for path, message in ((text, "not an image of a known"), (tmp_path / "huge.png", "limits.image_pixels"),
                          (tmp_path / "a.py", "not an image or video with"), (tmp_path / "gone.png", "does not exist"),
                          (Path(shutil.copy(text, tmp_path / "clip.mp4")), "clip.mp4")):
        last = end(play, ask(upload=path, question="What is it?"))
        assert last.phase == "failed" and message in last.remark
    with pytest.raises(AppError, match="needs a question"):
        ask(upload=text, question="  ")


@pytest.mark.slow
def test_the_playground_chooses_without_torch_and_the_app_is_built_without_it(root):
    code = ("import sys\nfrom vlrl.app.library import Library\nfrom vlrl.app.playground import Playground\n"
            "from vlrl.app import in_memory, models\nfrom vlrl.app.asking import Ask\n"
            f"play = Playground(Library({str(root)!r}))\nmodels.listed(play.library), play.tasks.listed()\n"
            f"play.sample(Ask(model={TINY!r}, task='run:quickstart'))\nassert 'gradio' not in sys.modules\n"
            f"from vlrl.app.server import create\ncreate({str(root)!r})\n"
            "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0
