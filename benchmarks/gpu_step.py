"""A whole step of vlrl, or of TRL's GRPOTrainer, on one device, in a process of its own; for gpu_parts.py.

    python benchmarks/gpu_step.py SIDE MODE SIZE ROWS FOLDER RESULT.json

Equal on both sides: weights, image files, prompts, number and length of answers (the end token is banned), reward,
LoRA, bfloat16, gradient checkpointing, AdamW, no KL. TRL generates with transformers, as vlrl's engine `hf` does."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_update as bench
import numpy as np
import torch
import vs_trl
from PIL import Image

from vlrl.config.schema import Config
from vlrl.monitoring.metrics import watching
from vlrl.tools.machine.gpu_specs import Card, card_of
from vlrl.tools.machine.plan import Plan, plan
from vlrl.tools.machine.profiler import Recorder, device_name

TIMED = 2
"""Steps after the one that warms up."""


@dataclass(frozen=True)
class Step:
    """What a process runs. side: vlrl or trl; mode: of gpu_update.MODES; size: of gpu_update.SIZES; rows: answers in a
    micro-batch; folder: with the model, samples.json and the images."""

    side: str
    mode: str
    size: str
    rows: int
    folder: Path

    def measured(self, limit: float) -> dict[str, Any]:
        """Returns {"seconds" of each timed step, "generating", "gib", "tensors"}, or {"error"}, of a process that is
        ended after `limit` seconds."""
        result = self.folder / "result.json"
        result.unlink(missing_ok=True)
        words = [self.side, self.mode, self.size, str(self.rows), str(self.folder), str(result)]
        try:
            done = subprocess.run([sys.executable, __file__, *words], capture_output=True, text=True, timeout=limit,
                                  check=False)
        except subprocess.TimeoutExpired:
            return {"error": f"not done within {limit:.0f} s"}
        found = json.loads(result.read_text()) if result.exists() else {}
        return found or {"error": f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"}

    def config(self, prompt: int) -> Config:
        """Returns vlrl's settings; prompt: tokens of a prompt."""
        size = bench.SIZES[self.size]
        limit = self.rows // size.group * prompt + self.rows * size.answer
        return bench.settings(
            self.mode, size, self.folder,
            task={"name": f"{vs_trl.__file__}:Benchmark", "rows": str(self.folder / "samples.json")},
            engine={"batch_rollouts": size.prompts * size.group},
            train={"lr": 1e-6, "weight_decay": 0.0, "tokens_per_batch": limit})


def prepare(folder: Path, size: bench.Size) -> int:
    """Writes images and questions beside the model. Returns the tokens of a prompt."""
    from transformers import AutoProcessor

    processor, (width, height) = AutoProcessor.from_pretrained(folder), (n * bench.SIDE for n in size.grid)

    def tokens(question: str) -> int:
        message = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question}]}]
        text = processor.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return len(processor.tokenizer(text)["input_ids"]) - 1 + size.grid[0] * size.grid[1]

    words = ["red", "box", "car", "sign"] * size.words
    words = words[:max(1, 1 + size.words + size.grid[0] * size.grid[1] - tokens(words[0]))]
    samples, question = [], " ".join(words)
    for number in range((1 + TIMED) * size.prompts):
        pixels = np.random.default_rng(number).integers(0, 255, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        samples.append({"id": str(number), "image": str(folder / f"{number}.png"), "question": question,
                        "tokens": tokens(question)})
    (folder / "samples.json").write_text(json.dumps(samples))
    return samples[0]["tokens"]


def planned(config: Config, prompt: int, size: bench.Size) -> Plan:
    """Returns what `vlrl plan` says of a config on this machine's card."""
    return plan(config, 1, card(), prompt_tokens=prompt, visual_tokens=size.grid[0] * size.grid[1])


def card() -> Card:
    """This machine's card, or one of 80 GiB where it has no data sheet."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    known = card_of(device_name(device)) if device.type == "cuda" else None
    return known or Card(device_name(device), 1.0, 80)


def row(step: Step, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the row of a table."""
    head = {"side": f"{step.side}, {step.mode}", "answers per micro-batch": step.rows}
    if "error" in found:
        return {**head, "s a step": f"failed: {found['error']}"}
    middle = statistics.median(found["seconds"])
    return {**head, "s a step": middle, "least .. largest": f"{min(found['seconds']):.3g} .. "
            f"{max(found['seconds']):.3g}", "GiB": found["gib"], "of it tensors": found["tensors"]}


def beside(found: dict[str, Any], expected: Plan) -> dict[str, Any]:
    """The columns that hold the parts of a step, `vlrl plan`'s estimate of memory and measured / estimate."""
    gib = expected.peak / bench.GIB
    return {"generating: s": found["generating"],
            "the rest: s": statistics.median(found["seconds"]) - found["generating"],
            "plan: GiB": gib, "GiB / plan": found["gib"] / gib}


# --- in the process --------------------------------------------------------------------------------------------------


class Laps:
    """Times steps: called before the first and after each, it ends the process when enough are there."""

    def __init__(self, path: Path):
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.path, self.times, self.record = path, [], Recorder(self.device)
        self.before = used(self.device)

    def __call__(self) -> None:
        self.times.append(self.record._now())
        if len(self.times) == 2:  # the first step has warmed up
            self.record.seconds.clear()
        if len(self.times) < TIMED + 2:
            return
        seconds = [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]
        generating = sum(s for path, s in self.record.seconds.items() if path.endswith("generate")) / TIMED
        gib, tensors = memory(self.device, self.before)
        self.path.write_text(json.dumps({"seconds": seconds, "generating": generating, "gib": gib / bench.GIB,
                                         "tensors": tensors / bench.GIB}))
        raise SystemExit(0)


def memory(device: torch.device, before: int) -> tuple[int, int]:
    """Returns bytes of the device that the process has held at most, and those of tensors among them; on a CPU both
    are the process's. before: bytes that others held when it began."""
    if device.type == "cpu":
        most = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most, most
    free, total = torch.cuda.mem_get_info()
    outside = total - free - before - torch.cuda.memory_reserved()  # of CUDA and its libraries
    return outside + torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()


def used(device: torch.device) -> int:
    """Returns bytes of the device in use, without a CUDA context that would add to them."""
    if device.type == "cpu":
        return 0
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return 2**20 * int(subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0])


def vlrl_side(step: Step, turn: Callable[[], None]) -> None:
    from vlrl.training import build

    samples = json.loads((step.folder / "samples.json").read_text())
    config = step.config(samples[0]["tokens"])
    parts = build.assemble(config, build.make_accelerator(config))
    vs_trl.ban_the_end(parts.policy)
    vs_trl.vlrl_train(parts, turn)


def trl_side(step: Step, turn: Callable[[], None]) -> None:
    from peft import LoraConfig
    from transformers import AutoModelForImageTextToText

    from vlrl.models.adapters import adapted_layers
    from vlrl.models.families import family_of

    size, lora = bench.SIZES[step.size], step.config(1).model.lora
    model = AutoModelForImageTextToText.from_pretrained(step.folder, dtype=torch.bfloat16)
    targets = adapted_layers(model, family_of(model.config), lora.target)
    vs_trl.trl_train(
        step.folder, step.folder, model, turn, LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha),
                                                         target_modules=targets, bias="none"),
        use_cpu=not torch.cuda.is_available(), bf16=True, gradient_checkpointing=True, num_generations=size.group,
        per_device_train_batch_size=step.rows, max_completion_length=size.answer,
        gradient_accumulation_steps=size.prompts * size.group // step.rows)


def main(side: str, mode: str, size: str, rows: str, folder: str, result: str) -> int:
    step, laps = Step(side, mode, size, int(rows), Path(folder)), Laps(Path(result))
    try:
        with watching(laps.record):
            {"vlrl": vlrl_side, "trl": trl_side}[side](step, laps)
    except Exception as error:  # out of memory, or a library that does not fit; a row of the report
        Path(result).write_text(json.dumps({"error": f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]}))
        raise
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
