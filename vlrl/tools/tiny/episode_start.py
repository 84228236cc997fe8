"""Trains the tiny model that comes with vlrl on demonstrations of tool calls, some of which are wrong on purpose.

`run(out, seed)` adds tokens for tool calls to the model, trains it through STAGES with `vlrl sft`'s own code and writes
model, processor and `made_by.json` to `out`. The model learns to call the zoom tool with a box that often misses,
sometimes to answer without calling it, and to recall colours with errors: RL can still improve all of these."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from vlrl.config import validate
from vlrl.config.schema import Config
from vlrl.data import Drawn
from vlrl.models.model_config import embedded
from vlrl.task import Task, load_class
from vlrl.tools.tiny import models as tiny_models
from vlrl.training import sft
from vlrl.types import Media, Sample

FROM = "embedded/tiny-qwen3-vl"


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage of supervised training on a mixture of tasks. `tasks` maps the class of each task to its settings."""

    name: str
    steps: int
    lr: float
    batch: int
    tasks: Mapping[str, Mapping[str, Any]]


STAGES = (
    Stage(name="read", steps=80, lr=1e-3, batch=48, tasks={
        "Read": {"jitter": 0.1, "weight": 3.0}, "Look": {"jitter": 0.1}}),
    Stage(name="learn", steps=160, lr=1e-3, batch=40, tasks={
        "Look": {"jitter": 0.1, "weight": 3.0}, "Read": {"jitter": 0.1, "weight": 2.0}, "Mistaken": {}}),
    Stage(name="careless", steps=16, lr=5e-4, batch=40, tasks={
        "Look": {"jitter": 0.3, "hasty": 0.2, "weight": 4.0}, "Read": {"jitter": 0.1},
        "Mistaken": {"mistaken": 0.7, "weight": 2.0}}),
)

_Zoom: Any = load_class("zoom")
_Recall: Any = load_class("recall")


class _Start(Task):
    """Base class of the tasks that the tiny model is trained on. Their scenes occur in no split of the tasks zoom and
    recall."""

    def samples(self, split: str) -> Sequence[Sample]:
        task: Any = self
        return Drawn(task.count, lambda i: task._sample(f"start-{split}", i))


class Look(_Start, _Zoom):
    """A zoom task whose demonstrated boxes miss the shape by up to `jitter` times the shape's side. `hasty` is the
    share of episodes whose demonstration guesses the answer without calling the zoom tool."""

    jitter: float = 0.0
    hasty: float = 0.0
    name = "look"

    def oracle_actions(self, sample: Sample) -> Sequence[str]:
        rng = random.Random(f"look/{sample.id}")
        if rng.random() < self.hasty:
            sample = super()._sample("guess", rng.randrange(self.count))
            return [sample["answer"]]
        box = misplaced(rng, sample["boxes"][0]["box"], self.jitter)
        # in hundredths of the picture: a last digit finer than a pixel is noise that slows learning
        call = self.call(sample, [round(100 * side / self.size) * self.size / 100 for side in box])
        return [call, sample["answer"]]


class Read(_Start, _Zoom):
    """A zoom task without tool calls: the model sees the enlarged image and reads its plate.

    In an episode only one token in thirty is about the plate, so reading it is also trained separately."""

    jitter: float = 0.0
    tool: bool = False
    name = "read"

    def _sample(self, split: str, index: int) -> Sample:
        from vlrl.tasks import _zoom_scenes  # pyright: ignore[reportMissingImports]  # on vlrl.__path__
        from vlrl.tasks.zoom import ASKED  # pyright: ignore[reportMissingImports]  # likewise

        sample = super()._sample(split, index)
        box = misplaced(random.Random(f"read/{sample.id}"), sample["boxes"][0]["box"], self.jitter)
        shown = Media(source=_zoom_scenes.crop(self._drawn(split, index)[0], box, self.size))
        return replace(sample, media=(shown,), row={**sample.row, "question": ASKED[self.answer]})


class Mistaken(_Start, _Recall):
    """A recall task whose demonstrations contain errors: each colour is random with probability `mistaken`."""

    mistaken: float = 0.0
    name = "mistaken"

    def oracle_actions(self, sample: Sample) -> Sequence[str]:
        from vlrl.tasks._scenes import COLOURS  # pyright: ignore[reportMissingImports]  # likewise

        rng = random.Random(f"mistaken/{sample.id}")
        named = [rng.choice(sorted(COLOURS)) if rng.random() < self.mistaken else name for name in sample["colours"]]
        return ["next"] * (self.length - 1) + [" ".join(named)]


def misplaced(rng: random.Random, box: Sequence[float], share: float) -> tuple[float, float, float, float]:
    """A box shifted in x and in y by up to `share` of its width, then enlarged on each side by up to `share` as well.
    """
    side = box[2] - box[0]
    x, y = (rng.uniform(-share, share) * side for _ in range(2))
    more = rng.uniform(0, share) * side
    return box[0] + x - more, box[1] + y - more, box[2] + x + more, box[3] + y + more


# --- the model --------------------------------------------------------------------------------------------------------

TOKENS = ("<tool_call>", "</tool_call>", '{"name": "', '", "arguments": {"', '": ', "}}", "zoom", "box")
"""Tokens added for tool calls. The brackets of a box stay separate tokens, so boxes are predicted as before."""
_TEMPLATE = """{% if tools %}<|im_start|>system
Tools:{% for tool in tools %} {{ tool['function']['name'] }}({{ tool['function']['parameters']['properties'] | \
join(', ') }}){% endfor %}<|im_end|>
{% endif %}"""
_CALLS = """{% for call in message['tool_calls'] or () %}<tool_call>{"name": "{{ call['function']['name'] }}", \
"arguments": {{ call['function']['arguments'] | tojson }}}</tool_call>{% endfor %}"""


def base(out: Path, seed: int) -> None:
    """Writes the tiny model that comes with vlrl, with TOKENS added, to `out`. The chat template lists the name and
    arguments of each tool."""
    import torch
    from tokenizers import AddedToken
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(embedded(FROM))
    model: Any = AutoModelForImageTextToText.from_pretrained(embedded(FROM), dtype=torch.float32)
    processor.tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in TOKENS])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.resize_token_embeddings(8 * -(-len(processor.tokenizer) // 8))
    end = "<|im_end|>\n{% endfor %}"
    processor.chat_template = _TEMPLATE + processor.chat_template.replace(end, _CALLS + end)
    processor.tokenizer.chat_template = None
    model.save_pretrained(out)
    processor.save_pretrained(out)


def run(out: Path, seed: int) -> None:
    """Adds the tokens for tool calls to the tiny model that comes with vlrl, trains it, and writes it to `out`. All
    data is drawn by code."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        model = Path(scratch) / "base"
        base(model, seed)
        for stage in STAGES:
            session = sft.train(_settings(stage, model, Path(scratch) / stage.name, seed))
            model = session.folder.checkpoints / f"step-{stage.steps:06d}"
        tiny_models.save_bf16(model, out)
    record = {"command": f"vlrl tiny --episodes --seed {seed}", "from": FROM, "stages": [asdict(s) for s in STAGES],
              "sha256": tiny_models.weights_sha256(out), "seconds": round(time.perf_counter() - started),
              "versions": {name: version(name) for name in ("torch", "transformers")}}
    (out / "made_by.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def _settings(stage: Stage, model: Path, folder: Path, seed: int) -> Config:
    tasks = [{"name": f"{__name__}:{name}", "label": name.lower(), **own} for name, own in stage.tasks.items()]
    return validate({
        "steps": stage.steps, "seed": seed, "run": {"dir": str(folder)}, "data": {"seed": seed}, "tasks": tasks,
        "model": {"name": str(model), "train": ["language", "merger", "vision"]},
        "rollout": {"prompts_per_step": stage.batch},
        "train": {"lr": stage.lr, "schedule": "linear", "warmup": 0.05, "min_lr_ratio": 0.1, "betas": [0.9, 0.98],
                  "weight_decay": 0.01, "max_grad_norm": 1.0, "tokens_per_batch": 8192},
        "eval": {"samples": 0}, "save": {"every": 0}, "store": {"rollouts": False, "media": "none"},
        "log": {"samples_every": 0}})
