"""The parts of gpu_report.py, each run in a process of its own:

    python benchmarks/gpu_parts.py PART RESULT.json [--tiny]

A part writes each row as soon as it is measured. It raises Skipped where the machine lacks what the part needs."""

from __future__ import annotations

import functools
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
Add = Callable[..., None]
PEER = {"3b": "8.1 %", "7b": "16 to 23 %"}
"""The actor MFU that EasyR1 v0.3.2 publishes of Qwen2.5-VL."""
_TIMED = ("The first step is not timed; GiB is what a process holds of the card at most, CUDA's own included (on a "
          "CPU, of main memory).")


class Skipped(Exception):
    """The part cannot run here; its text is the reason."""


class Wrong(Exception):
    """A result is not what it must be."""


class Result:
    """The file that a part writes; `about` is a sentence over its table."""

    def __init__(self, path: Path):
        self.path, self.content = path, {"state": "running", "rows": []}

    def add(self, **row: Any) -> None:
        """Adds a row."""
        self.content["rows"].append(row)
        self.write()

    def write(self, **more: Any) -> None:
        self.content |= more
        self.path.write_text(json.dumps(self.content))


# --- does it work? ----------------------------------------------------------------------------------------------------


def doctor(result: Result, tiny: bool) -> None:
    """What `vlrl doctor` finds."""
    from vlrl.tools.machine.doctor import examine

    for finding in examine():
        result.add(check=finding.rule.replace("/", ": ", 1), verdict=finding.level, detail=finding.message,
                   fix=finding.fix)


def tests(result: Result, tiny: bool) -> None:
    """The tests that need a GPU."""
    _need_cuda()
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "gpu and not vllm", "-rA", "tests"], cwd=ROOT,
                          capture_output=True, text=True, check=False)
    for line in done.stdout.splitlines():
        verdict, _, test = line.partition(" ")
        if verdict in ("PASSED", "FAILED", "ERROR", "SKIPPED"):
            result.add(test=test, verdict=verdict.lower())
    if done.returncode:
        raise Wrong(done.stdout[-3000:] + done.stderr[-1000:])


# --- is it right? -----------------------------------------------------------------------------------------------------


def attention(result: Result, tiny: bool) -> None:
    """Every attention of shared rows against a mask over all positions, in float32: output and gradients."""
    import torch

    from vlrl.models.attention import DEVICES

    if not tiny:
        _need_cuda()
    device = _device()
    heads, kv_heads, width, groups = (4, 2, 16, [(40, (9, 20)), (25, (7,))]) if tiny else (
        16, 2, 128, [(1000, (400,) * 8)] * 4)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    bound = 0.03 if dtype == torch.bfloat16 else 1e-4
    layout = _layout(groups)
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(layout.length, n, width, generator=generator).to(device, dtype)
             for n in (heads, kv_heads, kv_heads, heads)]
    oracle = _oracle(given, layout)
    wrong = []
    for kind in [kind for kind, devices in DEVICES.items() if device.type in devices]:
        try:
            gaps, seconds, peak = _attended(kind, given, layout, oracle)
        except Exception as error:  # a kernel that this card or build does not have
            result.add(attention=kind, verdict=f"failed: {type(error).__name__}: {error}"[:300])
            wrong.append(kind)
            continue
        right = max(gaps) <= bound
        wrong += [] if right else [kind]
        result.add(attention=kind, verdict="right" if right else f"wrong: a difference above {bound:g}",
                   **dict(zip(("output", "dq", "dk", "dv"), gaps, strict=True)), ms=1000 * seconds,
                   **({"peak GiB": peak / GIB} if peak else {}))
    result.write(about=f"{len(groups)} prompts, {layout.length:,} tokens, {heads} heads of {width}, {kv_heads} of "
                       f"keys, {dtype}; differences are relative to the largest value; milliseconds of forward and "
                       "backward, median of 5.")
    if wrong:
        raise Wrong(f"{', '.join(wrong)}: see the table")


def _layout(groups: list[tuple[int, tuple[int, ...]]]) -> Any:
    from vlrl.models.attention import Layout

    runs, at = [], 0
    for prompt, answers in groups:
        runs.append((at, prompt, at + prompt + sum(answers)))
        at += prompt
        for n in answers:
            runs.append((at, n, at + n))
            at += n
    return Layout(runs, at)


def _oracle(given: list[Any], layout: Any) -> list[Any]:
    """Output and gradients of q, k, v by one answer after another, its prompt before it, in float32."""
    import torch
    import torch.nn.functional as F

    q, k, v = (x.float().requires_grad_() for x in given[:3])
    out = torch.zeros(layout.length, q.shape[1], v.shape[2], device=q.device)
    repeat = q.shape[1] // k.shape[1]
    for own, over in zip(layout.row, layout.ancestors, strict=True):
        rows = torch.cat([torch.arange(start, start + n) for start, n, _ in (*over, own)]).to(q.device)
        run = [x[rows].transpose(0, 1) for x in (q, k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1))]
        part = F.scaled_dot_product_attention(*run, is_causal=True).transpose(0, 1)
        out = out.index_copy(0, rows[-own[1]:], part[-own[1]:])
    out.backward(given[3].float())
    return [out.detach(), q.grad, k.grad, v.grad]


def _attended(kind: str, given: list[Any], layout: Any, oracle: list[Any]) -> tuple[list[float], float, int]:
    """Largest differences of output and gradients, median seconds, and peak bytes."""
    import torch

    from vlrl.models.attention import IMPLEMENTATIONS

    def once() -> list[Any]:
        q, k, v = (x.detach().requires_grad_() for x in given[:3])
        out = IMPLEMENTATIONS[kind](q, k, v, layout, None)
        out.backward(given[3])
        return [out.detach(), q.grad, k.grad, v.grad]

    values = once()
    gaps = [float((a.float() - b).abs().max() / b.abs().max()) for a, b in zip(values, oracle, strict=True)]
    cuda = given[0].device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    return gaps, statistics.median(_seconds(once) for _ in range(5)), torch.cuda.max_memory_allocated() if cuda else 0


# --- how fast, and how much memory? -----------------------------------------------------------------------------------


def updates(result: Result, tiny: bool, size: str, mode: str) -> None:
    """The update and the hf engine's generation, padded and packed, each at its fastest micro-batch."""
    if tiny and size != "3b":
        raise Skipped(f"with tiny models the same as update-3b-{mode}")
    import gpu_update as bench

    if not tiny:
        _need_cuda()
    if mode == "qlora" and importlib.util.find_spec("bitsandbytes") is None:
        raise Skipped("needs bitsandbytes: pip install vlrl[qlora]")
    shape = bench.SIZES["tiny" if tiny else size]
    with _model(shape) as folder:
        run = bench.Bench(bench.settings(mode, shape, folder), shape)
        sides = run.sides()
        for side in sides:
            run.choose(side)
        working = [side for side in sides if side.config]
        if not working:
            raise Wrong("; ".join(f"{side.name}: {side.error}" for side in sides))
        run.measure(working, 1 if tiny else 3)
        for side in sides:
            result.add(**_side(run, side, sides[0]))
        result.add(side="EasyR1, published: full, 8 H100, Geometry3K, its own count", MFU=PEER[size])
        result.write(about=f"{shape.prompts} prompts of {len(run.groups[0].prompt)} tokens x {shape.group} answers of "
                           f"{shape.answer}; random weights. MFU of useful operations, each prompt once per group. "
                           "plan: memory by `vlrl plan`, without CUDA's own.")
        for count in shape.decode if mode == "lora" else ():
            speed, limit = run.decode(count)
            result.add(side=f"hf engine, {count * shape.prompts} answers at once", **{
                "tokens/s": round(speed), "share of what memory bandwidth allows": f"{speed / limit:.1%}"})
        failed = [side.name for side in sides if not side.config]
        if failed:
            raise Wrong(f"{', '.join(failed)}: see the table")


def _side(run: Any, side: Any, padded: Any) -> dict[str, Any]:
    import gpu_step
    import numpy as np

    if not side.config:
        return {"side": side.name, "tokens per micro-batch": f"failed: {side.error}"}
    seconds = statistics.median(side.seconds)
    tokens = sum(len(g.prompt) + sum(len(r.completion.tokens) for r in g.rollouts) for g in run.groups)
    gap = float(np.abs(side.logprobs - padded.logprobs).max()) if padded.config else float("nan")
    plan = gpu_step.planned(side.config, len(run.groups[0].prompt), run.size)
    memory = {}
    if run.device.type == "cuda":
        peak, expected = run.resident + side.peak, plan.memory.resident + plan.memory.training
        memory = {"peak GiB": peak / GIB, "plan: GiB": expected / GIB, "GiB / plan": peak / expected}
    return {"side": side.name, "tokens per micro-batch": side.config.train.tokens_per_batch, "seconds": seconds,
            "tokens/s": round(tokens / seconds), "MFU": f"{run.useful() / seconds / run.peak.tflops / 1e12:.1%}",
            "log-probability against padded, at most": gap, **memory}


def vllm(result: Result, tiny: bool) -> None:
    """vLLM in the process: start, sync with its proof, decoding, and the gap to the trainer's log-probabilities."""
    if importlib.util.find_spec("vllm") is None:
        raise Skipped("vLLM is not installed: pip install vlrl[vllm]")
    import gpu_update as bench
    import numpy as np
    import torch

    from vlrl.engine.base import Request, Sampling
    from vlrl.engine.vllm.engine import VLLMEngine
    from vlrl.models.packing import pack, pieces_of

    if not tiny:
        _need_cuda()
    shape = bench.SIZES["tiny" if tiny else "3b"]
    result.write(about=f"LoRA, bfloat16, random weights, answers of {shape.answer}; the hf engine's rate is in "
                       "update-3b-lora.")
    with _model(shape) as folder:
        run = bench.Bench(bench.settings("lora", shape, folder), shape)
        policy = run.parts.policy
        config = run.config.model_copy(update={"engine": run.config.engine.model_copy(update={
            "name": "vllm", "max_model_len": 2 * len(run.groups[0].prompt) + shape.answer, "memory": 0.4})})
        begun = time.perf_counter()
        engine = VLLMEngine(policy, config, folder / "engine")
        result.add(what="start", seconds=time.perf_counter() - begun)
        result.add(what="sync of the adapter with its proof", seconds=_seconds(lambda: engine.sync(policy, 0)))
        for count in shape.decode:
            requests = [Request(prompt=g.prompt, n=count, sampling=Sampling(max_new_tokens=shape.answer), key=(0, i))
                        for i, g in enumerate(run.groups)]
            begun = time.perf_counter()
            answers = engine.generate(requests)
            seconds = time.perf_counter() - begun
            written = sum(len(c.tokens) for group in answers for c in group)
            result.add(what=f"{count * shape.prompts} answers", seconds=seconds,
                       **{"tokens/s": round(written / seconds)})
        prompt, completion = run.groups[0].prompt, answers[0][0]
        (batch,) = pack(pieces_of([prompt], [completion.tokens], 10**6), 10**6)
        with torch.no_grad(), policy.autocast():
            own = policy.logprobs(batch, 1.0).logprobs.float().cpu().numpy()
        gap = np.abs(own - completion.logprobs)
        result.add(what="log-probabilities against the trainer's", mean=float(gap.mean()), largest=float(gap.max()))
        engine.close()


def trl(result: Result, tiny: bool) -> None:
    """A whole step of TRL's GRPOTrainer against one of vlrl: LoRA, TRL at the faster of two micro-batches."""
    if importlib.util.find_spec("trl") is None:
        raise Skipped("TRL is not installed: pip install vlrl[bench]")
    import gpu_step
    import gpu_update as bench

    if not tiny:
        _need_cuda()
    size = "tiny" if tiny else "3b"
    shape = bench.SIZES[size]
    rows = shape.prompts * shape.group
    result.write(about="One step from images to new weights, one process after another on one device; LoRA, bfloat16, "
                       f"gradient checkpointing, {shape.prompts} prompts x {shape.group} answers of {shape.answer}, "
                       f"random weights; TRL generates with transformers, vlrl with engine hf. {_TIMED}")
    best: dict[str, tuple[float, float]] = {}
    wrong = []
    with _model(shape) as folder:
        gpu_step.prepare(folder, shape)
        runs = (("vlrl", rows, 75), ("trl", rows, 125), ("trl", shape.group, 125))
        for side, count, limit in runs[:2] if tiny else runs:
            step = gpu_step.Step(side, "lora", size, count, folder)
            found = step.measured(limit)
            result.add(**gpu_step.row(step, found))
            if "error" not in found:
                best[side] = min(best.get(side, (float("inf"), 0)), (statistics.median(found["seconds"]), found["gib"]))
            elif side == "vlrl" or "OutOfMemory" not in found["error"]:  # TRL may need more than there is
                wrong.append(f"{side}, {count} answers per micro-batch: {found['error']}")
    if len(best) == 2:
        result.add(side="TRL / vlrl", **{"s a step": best["trl"][0] / best["vlrl"][0],
                                         "GiB": best["trl"][1] / best["vlrl"][1]})
    if wrong:
        raise Wrong("; ".join(wrong))


def plan(result: Result, tiny: bool) -> None:
    """A whole step with engine hf, and its memory against the estimate of `vlrl plan`."""
    import gpu_step
    import gpu_update as bench

    if not tiny:
        _need_cuda()
    result.write(about=f"Engine hf, micro-batches of one group. {_TIMED} `the rest` is the update with media, "
                       "encoding and scores.")
    wrong = []
    for size, modes in (("tiny", ("lora",)),) if tiny else (("3b", ("lora", "full")), ("7b", ("lora",))):
        shape = bench.SIZES[size]
        with _model(shape) as folder:
            prompt = gpu_step.prepare(folder, shape)
            for mode in modes:
                step = gpu_step.Step("vlrl", mode, size, shape.group, folder)
                found, expected = step.measured(100), gpu_step.planned(step.config(prompt), prompt, shape)
                more = gpu_step.beside(found, expected) if "error" not in found else {
                    "plan: GiB": expected.peak / GIB}
                result.add(**{**gpu_step.row(step, found), "side": f"{size}, {mode}"}, **more)
                wrong += [f"{size}, {mode}: {found['error']}"] if "error" in found else []
    if wrong:
        raise Wrong("; ".join(wrong))


def quickstart(result: Result, tiny: bool) -> None:
    """configs/quickstart.yaml from the command line."""
    if not tiny:
        _need_cuda()
    with tempfile.TemporaryDirectory() as folder:
        words = ["steps=4", "eval.samples=16"] if tiny else []
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, "train.py", "configs/quickstart.yaml", f"run.dir={folder}/run", *words],
                              cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Wrong(done.stderr[-3000:])
        evals = [json.loads(line) for line in Path(folder, "run/eval.jsonl").read_text().splitlines()]
        steps = [json.loads(line) for line in Path(folder, "run/metrics.jsonl").read_text().splitlines()]
        result.add(steps=len(steps), seconds=time.perf_counter() - begun,
                   **{"held-out reward before": evals[0]["reward/mean"], "after": evals[-1]["reward/mean"]})


# --- what they share --------------------------------------------------------------------------------------------------


def _device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _need_cuda() -> None:
    if _device().type != "cuda":
        raise Skipped("no CUDA device is there; TINY=1 runs the same code with tiny models")


def _seconds(work: Callable[[], object]) -> float:
    import torch

    begun = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begun


@contextmanager
def _model(shape: Any) -> Iterator[Path]:
    """The folder of a model of this shape with random weights."""
    import gc

    import gpu_update as bench
    import torch

    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        bench.build(Path(folder), shape, _device())
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        yield Path(folder)


PARTS: dict[str, Callable[[Result, bool], None]] = {
    "doctor": doctor, "tests": tests, "attention": attention, "vllm": vllm, "trl": trl, "plan": plan,
    "quickstart": quickstart,
    **{f"update-{size}-{mode}": functools.partial(updates, size=size, mode=mode)
       for size, mode in (("3b", "lora"), ("3b", "full"), ("3b", "qlora"), ("7b", "lora"), ("7b", "qlora"))}}


def main(name: str, path: str, *more: str) -> int:
    result = Result(Path(path))
    result.write()
    try:
        PARTS[name](result, "--tiny" in more)
    except Skipped as reason:
        result.write(state="skipped", reason=str(reason))
    except BaseException:  # a report of a failure is what this is for
        result.write(state="failed", reason=traceback.format_exc()[-6000:])
        return 1
    else:
        result.write(state="ok")
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(*sys.argv[1:]))
