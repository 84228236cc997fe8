"""Every recipe in configs/: it trains a step, and `vlrl score` pays what was published."""

import io
import json
import re
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw

from tests.e2e.recipe_scores import CASES
from tests.e2e.runs import ROOT, metrics
from vlrl import config as configs
from vlrl.cli.main import main
from vlrl.rewards.text import completion_for
from vlrl.rollout.generate import make_group
from vlrl.task import load, task_oracle
from vlrl.tools.tasks.rescore import rescore
from vlrl.training.loop import train
from vlrl.training.session import Session
from vlrl.types import Completion, Turn

RECIPES = {
    "grounding": "vlm_r1_rec vlm_r1_ovd vision_r1_griffon visual_rft_detection perception_r1 curr_reft_binary "
                 "curr_reft_choice curr_reft_open",
    "gui": "gui_g1 gui_g2 gui_rcpo se_gui ui_r1 gui_r1 infigui_r1 glm_v_androidworld",
    "video": "video_r1 grpo_care seed_bench_r1 time_r1 videochat_r1_gqa videochat_r1_track favchat",
    "classification": "cls_rl cls_rl_no_thinking visual_rft_classification rlcr",
    "driving": "alphadrive alphadrive_released",
    "qa": "vision_r1_ptst apo_view_r1 glm_v_rlcs kimi_k1_5 mm_eureka noisy_rollout sari_structured",
    "preference": "r1_reward",
}
NAMES = [f"{folder}/{name}" for folder, names in RECIPES.items() for name in names.split()]
NO_RECIPES = {"tiny", "digits", "reward_model"}
SMALL = ("model.lora.dropout=0", "rollout.prompts_per_step=2", "rollout.minibatches=1",
         "rollout.max_new_tokens=8", "train.lr=1e-3", "steps=1", "eval.samples=0", "log.samples_every=0",
         "curriculum.keep=all")
"""A random model is never right, so it has no groups of mixed rewards to wait for."""
SERVED = {"video/grpo_care": {"consistency"}}
"""Parts that need a service which training has and `vlrl score` has not."""
VARIANTS = {"video/video_r1": {"shuffled"}, "qa/noisy_rollout": {"noisy"}}
"""Answers to other media; those to shuffled frames are aside of the group, and get the parts of one answer alone."""


def test_every_recipe_is_here():
    others = ("models", "algorithms", "curricula", "engines", "accelerate", "first_run", "stages", "skypilot")
    found = {f"{path.parent.name}/{path.stem}" for path in (ROOT / "configs").glob("*/*.yaml")
             if path.parent.name not in others and path.stem not in NO_RECIPES}
    assert found == set(NAMES) == set(CASES)


def test_the_page_says_what_every_recipe_pays():
    page, settings = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("tasks.md", "configuration.md")]
    for section in page.split("\n## ")[1:]:
        task = section.partition("\n")[0]
        rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in section.splitlines()]
        said = {row[0].strip("`"): {part: float(weight) for part, weight in re.findall(r"`(\w+)` (-?[\d.]+)", row[2])}
                for row in rows if len(row) > 3 and row[0].startswith("`")}
        if task in RECIPES:
            recipes = type(load(task))._recipes  # pyright: ignore[reportAttributeAccessIssue]
            assert said == {name: {part: weight if isinstance(weight, float) else weight[-1][1]
                                   for part, weight in recipe.rewards.items()} for name, recipe in recipes.items()}
    assert all(f"\n`{name}` |" in settings for name in re.findall(r"`(task\.\w+)=?\w*`", page))
    assert all((ROOT / "docs" / link).is_file() for link in re.findall(r"\]\(([^)#]+)", page))


def test_score_pays_what_was_published(monkeypatch, capsys):
    for name in NAMES:
        case = CASES[name]
        line = {"sample": case.sample, "completions": [text for text, *_ in case.scores], **case.line}
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(json.dumps(line).encode()), "utf-8"))
        code = main(["score", str(ROOT / "configs" / f"{name}.yaml")])
        out, err = capsys.readouterr()
        assert code == 0, (name, err)
        said = json.loads(out)
        assert said["skipped"] == list(case.skipped), name
        for found, (text, parts, reward) in zip(said["rewards"], case.scores, strict=True):
            assert found["error"] is None and found["parts"] == pytest.approx(parts), (name, text)
            assert found["reward"] == pytest.approx(reward), (name, text)


def picture(folder: Path, number: int) -> dict:
    """A drawn picture with a rectangle, and the box of that."""
    image, left = Image.new("RGB", (128, 96), (200, 200, 190)), 16 + 12 * number
    ImageDraw.Draw(image).rectangle((left, 24, left + 31, 63), fill=(190, 30, 40 * number))
    image.save(folder / f"{number}.png")
    return {"image": f"{number}.png", "width": 128, "height": 96, "box": [left, 24, left + 32, 64]}


def clip(folder: Path, number: int) -> str:
    """Four seconds of a rectangle that moves to the right."""
    with av.open(str(folder / f"{number}.mp4"), "w") as container:
        stream = container.add_stream("mpeg4", rate=4)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for i in range(16):
            image = Image.new("RGB", (128, 96), (40 * number, 90, 60))
            ImageDraw.Draw(image).rectangle((6 * i, 24, 6 * i + 31, 63), fill=(240, 240, 80))
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            frame.pts = i
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return f"{number}.mp4"


def grounding_row(folder: Path, number: int) -> dict:
    drawn = picture(folder, number)
    box = drawn.pop("box")
    return {**drawn, "expression": "red rectangle", "labels": ["red rectangle", "cat"],
            "boxes": [{"box": box, "label": "red rectangle"}]}


def gui_row(folder: Path, number: int) -> dict:
    return {**picture(folder, number), "instruction": "open the red item", "action": {"type": "click"}}


def video_row(folder: Path, number: int) -> dict:
    boxes = [[6 * i, 24, 6 * i + 32, 64] for i in (0, 8)]
    return {"video": clip(folder, number), "width": 128, "height": 96, "duration": 4, "spans": [[1, 2.5]],
            "question": "Where does it go?", "options": ["to the left", "to the right"], "answer": "B",
            "tracks": [{"label": "yellow box", "boxes": boxes}]}


def classification_row(folder: Path, number: int) -> dict:
    drawn = picture(folder, number)
    return {"image": drawn["image"], "label": ("cat", "dog")[number % 2], "labels": ["cat", "dog"]}


def driving_row(folder: Path, number: int) -> dict:
    views = [picture(folder, 2 * number + i)["image"] for i in range(2)]
    return {"images": views, "frames": [-1, 0], "speed_mps": 6.5, "navigation": "Turn left",
            "plan": {"speed": ("STOP", "KEEP")[number % 2], "path": "LEFT_TURN"}}


def qa_row(folder: Path, number: int) -> dict:
    return {"image": picture(folder, number)["image"], "question": "How many rectangles?", "answer": 1,
            "answer_type": "count"}


def preference_row(folder: Path, number: int) -> dict:
    return {"image": picture(folder, number)["image"], "question": "What is it?", "answer": 1 + number % 2,
            "responses": ["a rectangle", "a ring"]}


ROWS = {"grounding": grounding_row, "gui": gui_row, "video": video_row, "classification": classification_row,
        "driving": driving_row, "qa": qa_row, "preference": preference_row}
TYPES = {"time_r1": "span", "videochat_r1_gqa": "span+choice", "videochat_r1_track": "track"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The file of drawn rows for a recipe."""
    @cache
    def written(task: str, kind: str) -> Path:
        folder = tmp_path_factory.mktemp(task)
        rows = [{"id": str(i), "answer_type": kind, **ROWS[task](folder, i)} for i in range(4)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return folder / "rows.jsonl"
    return lambda name: written(name.split("/")[0], TYPES.get(name.split("/")[1], "choice"))


class OneRight:
    """The engine of a run, but the first answer to each sample as it is says what is right, so that rewards differ."""

    def __init__(self, parts):
        self.parts, self.generated = parts, parts.engine.generate
        self.samples = {sample.id: sample for sample in parts.source.samples}

    def generate(self, requests, done=None):
        return [[self.right(request.prompt), *answers[1:]] if request.key[0] == 0 else answers
                for request, answers in zip(requests, self.generated(requests), strict=True)]

    def right(self, prompt):
        task, sample = self.parts.task, self.samples[prompt.sample_id]
        sample = make_group(task, sample, prompt, [], group_id="", split="train", step=0).sample  # knows its size
        text = task_oracle(task, sample) or task.used.write(task, sample, [sample["box"]])
        text = completion_for(text, prompt.opened)
        tokens = self.parts.encode.answer_ids(text)
        return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), text=text, finish_reason="stop",
                          loss_mask=np.ones(len(tokens), bool), turns=(Turn(start=0, end=len(tokens)),))


class Watched(Session):
    """A run with OneRight; `before` are the weights it starts with."""

    def resume(self, parts):
        parts = super().resume(parts)
        self.before = {name: tensor.detach().clone() for name, tensor in parts.policy.trainable()}
        parts.engine.generate = OneRight(parts).generate
        return parts


def short(name: str, **found) -> configs.Config:
    """A recipe's config, with what a tiny model needs and `found`."""
    path = ROOT / "configs" / f"{name}.yaml"
    recipe = configs.load(path, [])
    sizes = [f"rollout.group_size={min(recipe.rollout.group_size, 4)}",
             f"model.lora.rank={min(recipe.model.lora.rank, 4)}",
             *(["rollout.thinking_budget=4"] if recipe.rollout.thinking_budget else [])]
    return configs.load(path, [*SMALL, *sizes, *(f"{key}={value}" for key, value in found.items())])


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_step(name, data, tiny_models, tmp_path):
    session: Any = train(short(name, **{"model.name": tiny_models["qwen3_vl"], "data.train": data(name),
                                        "run.dir": tmp_path / "run"}), make_session=Watched)
    parts = {*CASES[name].scores[0][1], *SERVED.get(name, ())}
    (line,) = metrics(session.folder.path)
    assert np.isfinite([line["loss"], line["reward/mean"], line["grad_norm"]]).all()
    assert line["groups/zero_variance_frac"] < 1 and line["score_errors"] == 0
    assert parts == {key.removeprefix("reward/") for key in line if key.startswith("reward/")} - {"mean", "std"}
    stored = session.folder.rollouts(columns=["parts", "error", "variant"]).to_pylist()
    assert stored and not any(row["error"] for row in stored)
    assert {row["variant"] for row in stored} - {None} == VARIANTS.get(name, set())
    assert all({part for part, _ in row["parts"]} == parts for row in stored if row["variant"] != "shuffled")
    after = dict(session.parts.policy.trainable())
    assert any(not torch.equal(after[key], tensor) for key, tensor in session.before.items())


OPENED = ("qa/mm_eureka", "gui/infigui_r1", "classification/cls_rl_no_thinking", "video/time_r1")


@pytest.mark.slow
@pytest.mark.parametrize("name", OPENED)
def test_a_step_behind_a_template_that_opens_the_thinking(name, data, tiny_models, tmp_path):
    """trl#6966: the natural answer earns all there is; where the recipe asks for thinking a second <think> earns less.
    """
    model = shutil.copytree(tiny_models["qwen3_vl"], tmp_path / "model")
    template = model / "chat_template.jinja"
    template.write_text(template.read_text().rstrip().removesuffix("{% endif %}") + "{{ '<think>\\n' }}{% endif %}")
    session: Any = train(short(name, **{"model.name": model, "data.train": data(name),
                                                 "run.dir": tmp_path / "run"}), make_session=Watched)
    rows = session.folder.rollouts().to_pylist()
    task = session.parts.task
    best = max(rows, key=lambda row: row["reward"])
    assert {row["opened"] for row in rows} == {"<think>\n"} and not best["completion"].startswith("<think>")
    weights = task.weights_at(0)
    assert best["reward"] == pytest.approx(task.combine(dict.fromkeys(weights, 1.0), weights), rel=0.05)
    best["n_tokens"] = len(best["token_ids"])
    again = rescore(task, [best, {**best, "completion": "<think>\n" + best["completion"]}]).new
    assert again[0] == pytest.approx(best["reward"]) and again[1] <= again[0]
    after = dict(session.parts.policy.trainable())
    assert any(not torch.equal(after[key], tensor) for key, tensor in session.before.items())
