"""How far sampler and trainer disagree on one device, by dtype and attention: what alerts.mismatch_above is set by.

    python benchmarks/mismatch.py --out mismatch.md            # a card: shape of the 3B, random weights, 3 minutes
    python benchmarks/mismatch.py --tiny                       # the same code with a tiny model, on any device

engine=hf answers prompts of a picture each; the same tokens are then read by every layout of the update, in micro-
batches of another size than the sampler's. `ratio` is the largest |p / p(old) - 1| over two optimizer steps that change
nothing, where p(old) comes from a pass of its own (verl#2996 reports a ratio that is not 1)."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import gpu_update as gpu
import numpy as np
import transformers

import vlrl
from vlrl import config
from vlrl.engine.base import Request, Sampling
from vlrl.tools.machine.profiler import device_name

TOKENS = 64
"""Of an answer: a token of a 3B takes some 70 ms with engine=hf."""


def sampled(bench: gpu.Bench, count: int) -> None:
    """Puts answers that the engine draws in the place of the bench's given ones, which have no end token."""
    policy = bench.parts.policy
    policy.banned = policy.banned[~gpu.torch.isin(policy.banned, gpu.torch.tensor([*policy.eos]).to(policy.banned))]
    requests = [Request(prompt=g.prompt, n=bench.size.group, sampling=Sampling(max_new_tokens=count), key=(0, i))
                for i, g in enumerate(bench.groups)]
    bench.groups = [replace(group, rollouts=tuple(replace(r, completion=c) for r, c in zip(
        group.rollouts, completions, strict=True)))
        for group, completions in zip(bench.groups, bench.parts.engine.generate(requests), strict=True)]


def rows(size: gpu.Size, folder: Path, dtype: str) -> Iterator[str]:
    model = {"name": str(folder), "dtype": dtype, "lora": {"rank": 32, "target": "language"}}
    bench = gpu.Bench(gpu.settings("lora", size, folder, model=model), size)
    sampled(bench, min(TOKENS, size.answer))
    for side in bench.sides():
        tree = side.configs[0].model_dump(by_alias=True)
        tree["rollout"]["minibatches"] = 2
        tree["model"]["name"] = str(folder)
        try:
            _, stats, per_token = bench.update(config.validate(tree))
        except Exception as error:  # a kernel that this card or build does not have
            yield f"| {dtype} | {side.name} | {type(error).__name__}: {' '.join(str(error).split())[:160]} | | | |"
            continue
        ratio = max(float(np.abs(r - 1).max()) for r in per_token["ratio"] if r is not None)
        yield (f"| {dtype} | {side.name} | {stats['mismatch/kl']:.2e} | {stats['mismatch/gap_mean']:.2e} | "
               f"{stats['mismatch/gap_max']:.2e} | {ratio:.1e} |")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on any device")
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="also write the table to this file")
    args = parser.parse_args()
    size, lines = gpu.SIZES["tiny" if args.tiny else "3b"], []
    with tempfile.TemporaryDirectory() as folder:
        device = gpu.torch.device("cuda" if gpu.torch.cuda.is_available() else "cpu")
        gpu.build(Path(folder), size, device)
        lines += [f"# Sampler against trainer\n\n`python {' '.join(['benchmarks/mismatch.py', *sys.argv[1:]])}`\n\n"
                  f"{device_name(device)}; torch {gpu.torch.__version__} (CUDA {gpu.torch.version.cuda}), "
                  f"transformers {transformers.__version__}, vlrl {vlrl.__version__}", "",
                  "| dtype | layout | mismatch/kl | gap_mean | gap_max | ratio |", "|---|---|---|---|---|---|"]
        for dtype in ("bfloat16", "float16", "float32"):
            for line in rows(size, Path(folder), dtype):
                print(line, flush=True)
                lines.append(line)
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
