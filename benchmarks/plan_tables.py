"""Writes the tables of memory in docs/, the estimates of `vlrl plan`: python benchmarks/plan_tables.py

A table stands between `<!-- plan: NAME -->` and `<!-- /plan -->`, where NAME is one of TABLES."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vlrl.cli.main import main as vlrl

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "scaling.md", ROOT / "docs" / "first-real-run.md")
BLOCK = re.compile(r"(?<=<!-- plan: )([\w-]+) -->\n[^<]*(?=<!-- /plan -->)")
PRESETS = sorted(path.name for path in (ROOT / "configs" / "models").glob("*.yaml"))
SIZES = [*((f"`{name}`", f"configs/models/{name}") for name in PRESETS),
         ("`qwen2_5_vl_7b.yaml` with the 32B",
          "configs/models/qwen2_5_vl_7b.yaml model.name=Qwen/Qwen2.5-VL-32B-Instruct")]
LEARNS = {"LoRA": "", "LoRA, 4-bit": "model.lora.quantize=nf4", "full": "model.lora.rank=0"}
WAYS = {"`engine=hf`": "", "`engine=vllm_server`": "engine=vllm_server",
        "8 GPUs, `fsdp2`": "--gpus 8 engine=vllm_server train.sharding=fsdp2"}
SEVEN = "configs/models/qwen2_5_vl_7b.yaml task=grounding model.lora.rank=0 --gpus 8"
MODELS = {"Qwen3-VL 2B": "configs/models/qwen3_vl_4b.yaml model.name=Qwen/Qwen3-VL-2B-Instruct",
          "Qwen2.5-VL 3B": "configs/models/qwen2_5_vl_3b.yaml", "Qwen2.5-VL 7B": "configs/models/qwen2_5_vl_7b.yaml"}
CARDS = {"RTX 4090": 24, "L40S": 48, "H100": 80, "H200": 141}
RUNS = {"LoRA, 4-bit weights": "model.lora.quantize=nf4", "LoRA": "", "full": "model.lora.rank=0",
        "full, 8 cards":
            "model.lora.rank=0 --gpus 8 engine=vllm_server engine.memory=0.9 train.sharding=fsdp2"}
ROOM = 0.95
"""Largest share of a card's memory that a run may take by its estimate."""
ZERO = {"`zero2`, servers generate": f"{SEVEN} train.sharding=zero2 engine=vllm_server",
        "`zero3`, `engine=hf`": f"{SEVEN} train.sharding=zero3",
        "`fsdp2`, `engine=hf`": f"{SEVEN} train.sharding=fsdp2"}
SMALL, LARGE = "qwen2_5_vl_3b_24gb.yaml", "qwen2_5_vl_7b_8x80gb.yaml"
FIRST = {"3B, `engine=hf`": f"{SMALL} --card 'RTX 4090'",
         "3B, 4-bit weights": f"{SMALL} --card 'RTX 4090' model.lora.quantize=nf4",
         "3B, vLLM on the same GPU": f"{SMALL} --card 'RTX 4090' engine=vllm engine.memory=0.4",
         "7B, eight GPUs with vLLM on each": f"{LARGE} --gpus 8"}


def told(command: str) -> dict[str, Any]:
    """The result of `vlrl plan` with these words; peak: GiB, as text."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        vlrl(["plan", *shlex.split(command), "--json"])
    plan = json.loads(out.getvalue())
    return {**plan, "peak": f"{plan['peak'] / 2**30:.1f}"}


def matrix() -> Iterator[Sequence[str]]:
    """Yields the rows of presets by what learns; GiB a process takes at its worst moment."""
    yield "", "what learns", *WAYS
    for name, size in SIZES:
        for learns, words in LEARNS.items():
            cells = ["-" if "sharding" in way and "nf4" in words else
                     told(f"{size} task=grounding {words} {way}")["peak"] for way in WAYS.values()]
            yield name, learns, *cells


def commands(rows: dict[str, str]) -> Iterator[Sequence[str]]:
    """Yields a row for each command."""
    yield "", "command", "peak GiB"
    for name, words in rows.items():
        plan = told(words)
        yield name, f"`vlrl plan {words}`", f"{plan['peak']} of {plan['gib']:g}"


def where() -> Iterator[Sequence[str]]:
    """Yields a row for each model: the peak in GiB and the smallest kind of card that it fits into."""
    yield "", *RUNS
    for name, size in MODELS.items():
        yield name, *(_smallest(f"{size} task=grounding {words}") for words in RUNS.values())


def _smallest(command: str) -> str:
    plans = {gib: told(f"{command} --card '{card}'") for card, gib in CARDS.items()}
    fitting = [gib for gib, plan in plans.items() if plan["fits"] and float(plan["peak"]) <= ROOM * gib]
    return f"{plans[80]['peak']} GiB: {f'{fitting[0]} GB' if fitting else 'several cards'}"


TABLES: dict[str, Callable[[], Iterator[Sequence[str]]]] = {
    "where": where, "presets": matrix, "deepspeed": lambda: commands(ZERO), "first-run": lambda: commands(FIRST)}


def page(text: str) -> str:
    """Returns a page with its tables written anew."""
    def table(name: str) -> str:
        head, *rows = TABLES[name]()
        lines = [head, ["---"] * len(head), *rows]
        return "".join(f"| {' | '.join(line)} |\n" for line in lines)

    return BLOCK.sub(lambda found: f"{found[1]} -->\n\n{table(found[1])}\n", text)


def main() -> None:
    for path in PAGES:
        path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
