"""Measures the time of a training step by phase: `vlrl train CONFIG --profile`.

    report = profile(config, steps=3)
    print(render(report))

The profile is a separate run, in a folder next to `run.dir`, which starts from the weights of `model.name`. It has one
step to warm up, then `steps` measured steps, without evaluations and checkpoints. Afterwards the update of the last
step, and the generation of 16 tokens for its prompts, are repeated under PyTorch's profiler."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.objective import Objective
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Request, Sampling
from vlrl.models.flops import Cost, cost_model, patches_of
from vlrl.monitoring.metrics import peak_gib, watching
from vlrl.store import files
from vlrl.tools.machine.gpu_specs import card_of
from vlrl.training.build import Parts
from vlrl.training.loop import train
from vlrl.training.session import Session
from vlrl.training.update import update
from vlrl.types import Group

WARM_UP = 1  # number of steps before the measured steps
TRACED_TOKENS = 16  # tokens per answer in the trace of generation; a trace of complete answers would take gigabytes
OPERATORS = 30  # number of operators that operators.txt lists for each trace


class Recorder:
    """Measures the seconds spent in nested phases. A phase is identified by its path, such as
    `rollout/generate/prefill`. Phases in other threads are not recorded.

    A CUDA device is synchronized whenever a phase begins or ends, so that no work is counted in a later phase."""

    def __init__(self, device: torch.device):
        self.seconds: dict[str, float] = {}  # path of a phase -> its seconds, including its nested phases
        self._device, self._thread = device, threading.get_ident()
        self._open: list[tuple[str, float]] = []

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self.enter(name)
        try:
            yield
        finally:
            self.leave()

    def enter(self, name: str) -> None:
        if threading.get_ident() == self._thread:
            self._open.append(("/".join([*(path for path, _ in self._open[-1:]), name]), self._now()))

    def leave(self) -> None:
        if threading.get_ident() == self._thread:
            path, start = self._open.pop()
            self.seconds[path] = self.seconds.get(path, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    @contextlib.contextmanager
    def modules(self, modules: Sequence[torch.nn.Module], name: str) -> Iterator[None]:
        """A context manager that records each forward pass of `modules` as a phase named `name`."""
        hooks = [h for m in modules for h in (
            m.register_forward_pre_hook(lambda *_: self.enter(name)),
            m.register_forward_hook(lambda *_: self.leave(), always_call=True))]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


# --- operations of a phase -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peak:
    """The floating-point operations per second that count as full utilization of the device (MFU = 1)."""

    tflops: float
    source: str


def peak_of(device: torch.device, dtype: torch.dtype) -> Peak:
    """Returns the peak of a device for a data type. For a known GPU and a 16-bit type it is taken from the data sheet.
    Otherwise it is the measured speed of a large matrix product."""
    kind = str(dtype).removeprefix("torch.")
    if device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        name = torch.cuda.get_device_name(device)
        known = card_of(name)
        if known:
            return Peak(known.tflops, f"data sheet of {name}, dense {kind}")
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device, dtype=dtype)
    record, rounds, rate = Recorder(device), 1, 0.0
    while record.seconds.get("product", 0.0) < 0.5:
        record.seconds, rounds = {}, 2 * rounds
        with record("product"):
            for _ in range(rounds):
                torch.mm(a, a)
        rate = 2 * size**3 * rounds / record.seconds["product"]
    return Peak(rate / 1e12, f"measured by a product of {size} x {size} matrices in {kind} on {device_name(device)}")


@dataclass(frozen=True)
class Work:
    """The amount of work in one step. `operations` maps the path of each phase to its useful floating-point operations,
    and `tokens` maps the path to its number of tokens."""

    operations: Mapping[str, float]
    tokens: Mapping[str, int]


def work_of(generated: Sequence[Group], trained: Sequence[Group], cost: Cost, config: Config,
            model_config: Any) -> Work:
    """The work of one step on this process: generating the completions of `generated`, and training on the completions
    of `trained`. Both are lists of groups; a group has the completions of one prompt. `cost` counts the operations."""
    def total(groups: Sequence[Group], each: Callable[..., float]) -> float:
        return sum(each(len(g.prompt), patches_of(g.prompt.mm, model_config),
                        [len(r.completion.tokens) for r in g.rollouts]) for g in groups)

    passes, steps = config.rollout.updates, config.rollout.updates * config.rollout.minibatches
    wanted = Objective.of(config.algo).requires
    judged = "values" in Algorithm(config).requires  # together with the old log-probabilities
    idle = (steps > 1 and not judged) + ("reference" in wanted) + steps * ("step" in wanted)
    forward, both = total(trained, cost.forward), total(trained, cost.of)
    prefill = total(generated, lambda prompt, patches, _: cost.forward(prompt, patches) + 2 * cost.head.weights)
    decode = total(generated, lambda prompt, _, answers: cost.decode(prompt, answers))
    sight = total(generated, lambda _, patches, __: cost.tower(patches))
    train_vision = total(trained, lambda _, patches, __: cost.tower(patches))
    written = sum(len(r.completion.tokens) for g in generated for r in g.rollouts)
    learned = sum(len(g.prompt) + sum(len(r.completion.tokens) for r in g.rollouts) for g in trained)
    return Work(
        {"rollout": prefill + decode + judged * forward, "rollout/values": judged * forward,
         "rollout/generate": prefill + decode, "rollout/generate/prefill": prefill,
         "rollout/generate/prefill/vision": sight, "rollout/generate/decode": decode,
         "train": idle * forward + passes * both, "train/reference": idle * forward,
         "train/reference/vision": idle * train_vision, "train/forward": passes * forward,
         "train/forward/vision": passes * train_vision, "train/backward": passes * (both - forward)},
        {"rollout/values": judged * learned, "rollout/generate": written, "rollout/generate/decode": written,
         "rollout/generate/prefill": sum(len(g.prompt) for g in generated), "train": passes * learned,
         "train/reference": idle * learned, "train/forward": passes * learned, "train/backward": passes * learned})


# --- the run ---------------------------------------------------------------------------------------------------------


class ProfiledSession(Session):
    """A training session that measures the time of its steps. It runs no evaluations and saves no checkpoints."""

    measured: dict[str, Any]

    def resume(self, parts: Parts) -> Parts:
        parts = super().resume(parts)
        self._rest = None
        policy = parts.policy
        self.record = Recorder(policy.device)
        self._cost = cost_model(policy.model, policy.family)
        self._work: list[Work] = []
        self._groups: list[Group] = []
        self._began = 0.0
        self._stack.enter_context(watching(self.record))
        self._stack.enter_context(self.record.modules(vision_towers(policy), "vision"))
        return parts

    def evaluate_if_due(self, done: int) -> None:
        if done == WARM_UP:
            self.record.seconds, self._began = {}, time.perf_counter()
            if torch.cuda.is_available():
                torch.cuda.reset_peak_memory_stats()

    def log(self, step: int, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        super().log(step, metrics, groups)
        if step >= WARM_UP:
            self._groups = list(groups[:len(groups) - len(self.parts.source.dropped)])
            self._work.append(work_of(groups, self._groups, self._cost, self.config,
                                      self.parts.policy.base.config))

    def save_if_due(self, done: int) -> None:
        """Does nothing: a profile saves no checkpoints."""

    def finish(self) -> None:
        if not self._work:  # stopped by Ctrl-C while warming up
            return
        spent, seconds, parts = time.perf_counter() - self._began, dict(self.record.seconds), self.parts
        memory, peak = peak_gib(), peak_of(parts.policy.device, parts.policy.dtype)
        count = len(self._work)
        self.measured = {
            "folder": str(self.folder.path), "device": device_name(parts.policy.device),
            "dtype": str(parts.policy.dtype).removeprefix("torch."), "peak_tflops": peak.tflops,
            "peak_source": peak.source, "processes": comm.world(), "steps": count, "memory_gib": memory,
            "seconds": spent / count, "phases": [asdict(row) for row in rows(seconds, self._work, spent, peak)]}
        self._trace()
        if comm.is_main():
            files.write_text(self.folder.path / "profile.json", json.dumps(self.measured, indent=1) + "\n")
        self._state = "finished" if self.done == self.config.steps else "interrupted"

    def _trace(self) -> None:
        parts, path = self.parts, self.folder.path
        sampling = Sampling(max_new_tokens=TRACED_TOKENS, temperature=self.config.rollout.temperature)
        requests = [Request(prompt=g.prompt, n=len(g.rollouts), sampling=sampling, key=(2, i), sample=g.sample)
                    for i, g in enumerate(self._groups)]
        works: dict[str, Callable[[], object]] = {
            "update": lambda: update(parts.policy, parts.optimizer, self._groups, self.config, self.done),
            "generation": lambda: parts.engine.generate(requests)}
        for name, work in works.items():
            text = traced(work, parts.policy.device, path / f"trace-{name}.json.gz" if comm.is_main() else None)
            if comm.is_main():
                with open(path / "operators.txt", "a", encoding="utf-8") as file:
                    file.write(f"{name}\n{text}\n")


def profile(config: Config, steps: int = 3) -> dict[str, Any] | None:
    """Profiles `steps` steps of a config. Returns the content of profile.json; None if the profile was stopped before
    the first measured step.

    All files are written to `<run.dir>-profile`; an earlier profile in this folder is renamed. `run.dir` is not
    touched."""
    run = config.run.model_copy(update={"dir": f"{config.run.dir}-profile"})
    alone = config.model_copy(update={
        "steps": WARM_UP + steps, "epochs": None, "resume": "never", "run": run,
        "eval": config.eval.model_copy(update={"samples": 0}),
        "log": config.log.model_copy(update={"trackers": (), "samples_every": 0})})
    return getattr(train(alone, make_session=ProfiledSession), "measured", None)


def vision_towers(policy: Any) -> list[torch.nn.Module]:
    """The modules of the vision tower and the merger, in the policy and in its reference copy. Only the outermost
    modules are listed."""
    def sees(name: str) -> bool:
        return policy.family.part_of(name) != "language"

    return [m for model in (policy.model, policy._reference) if model is not None
            for name, m in model.named_modules() if sees(name) and not sees(name.rpartition(".")[0])]


def traced(work: Callable[[], object], device: torch.device, path: Path | None = None) -> str:
    """Runs `work` under PyTorch's profiler and returns a table of the slowest operators as text. If `path` is given,
    writes a Chrome trace to this file."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=kinds) as profiler:
        work()
    if path:
        profiler.export_chrome_trace(str(path))
    return profiler.key_averages().table(sort_by=f"self_{device.type}_time_total", row_limit=OPERATORS,
                                         max_name_column_width=60)


def device_name(device: torch.device) -> str:
    """The name of a GPU; for any other device its type and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


# --- the table ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One phase in the table of a profile. All numbers are means per step."""

    phase: str  # Path of the phase. Its numbers include those of its nested phases.
    seconds: float
    share: float
    tflop: float | None = None
    mfu: float | None = None  # useful operations per second, divided by the peak
    tokens_per_s: float | None = None


def rows(seconds: Mapping[str, float], work: Sequence[Work], spent: float, peak: Peak) -> list[Row]:
    """The rows of the table of a profile. Each phase precedes its nested phases. `seconds` (path of a phase -> seconds)
    and `spent` (all seconds) are summed over the steps in `work`. The utilization (MFU) is relative to `peak`."""
    seconds, steps = dict(seconds), len(work)
    generate = "rollout/generate"
    if generate in seconds:
        seconds[f"{generate}/decode"] = seconds[generate] - seconds.get(f"{generate}/prefill", 0.0)
    top = sum(s for path, s in seconds.items() if "/" not in path)
    out = []
    order = {name: i for i, name in enumerate(_PHASES)}
    for path in sorted(seconds, key=lambda path: [(order.get(n, len(order)), n) for n in path.split("/")]):
        operations = sum(w.operations.get(path, 0.0) for w in work)
        tokens = sum(w.tokens.get(path, 0) for w in work)
        row = Row(path, seconds[path] / steps, seconds[path] / spent)
        if operations and seconds[path]:
            row = replace(row, tflop=operations / steps / 1e12,
                          mfu=operations / seconds[path] / (peak.tflops * 1e12))
        out.append(replace(row, tokens_per_s=tokens / seconds[path]) if tokens and seconds[path] else row)
    return [*out, Row("the rest", (spent - top) / steps, (spent - top) / spent)]


_PHASES = ("sync", "rollout", "encode", "generate", "prefill", "vision", "decode", "score", "values", "train", "pack",
          "reference", "forward", "backward", "optimizer", "store")
"""Names of phases in the order of a step; other phases follow, sorted by name."""


def render(report: Mapping[str, Any]) -> Any:
    """The table of a profile, as a rich Table."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(f"a step, mean of {report['steps']}: {report['seconds']:.3g} s on {report['device']}, "
                             f"{report['dtype']}"), box=SIMPLE_HEAD, pad_edge=False)
    for name in ("phase", "seconds", "share", "TFLOP", "MFU", "tokens/s"):
        table.add_column(name, justify="left" if name == "phase" else "right", no_wrap=True)
    for row in report["phases"]:
        depth, name = row["phase"].count("/"), row["phase"].rpartition("/")[2]
        cells = ("  " * depth + name, f"{row['seconds']:,.4f}", f"{row['share']:.1%}", _number(row["tflop"], "{:.3g}"),
                 _number(row["mfu"], "{:.1%}"), _number(row["tokens_per_s"], "{:,.0f}"))
        table.add_row(*map(Text, cells))
    return table


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def notes(report: Mapping[str, Any]) -> list[str]:
    """Lines to print below the table of a profile."""
    several = f"; each of {report['processes']} processes, this one is rank 0" if report["processes"] > 1 else ""
    return [f"MFU: useful operations (no recomputation, no padding) over {report['peak_tflops']:.4g} TFLOP/s, "
            f"{report['peak_source']}{several}",
            f"peak memory {report['memory_gib']:.2f} GiB",
            f"{report['folder']}: profile.json, operators.txt, trace-update.json.gz and trace-generation.json.gz "
            "(open in https://ui.perfetto.dev)"]
