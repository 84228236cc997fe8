"""What this machine can do with vlrl, found out by trying it: a table of small checks. No network.

Imports nothing heavy before a check runs, so a broken installation can be looked at. A check returns what it found, or
raises: `trials.Found` with another verdict, or anything else, which gives the verdict in the table.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import io
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlrl.tools.machine import machine_checks as trials
from vlrl.tools.machine.machine_checks import Notice, Verdict


@dataclass(frozen=True)
class Finding:
    """What one check found, and how to fix it."""

    group: str
    name: str
    verdict: Verdict
    detail: str
    fix: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that is tried."""

    group: str
    name: str
    run: Callable[[], str]
    """Returns what it found; raises when it does not work."""
    otherwise: Verdict = "missing"
    """The verdict when it raises."""
    fix: str = ""


def examine(runs: Path = Path("runs"), tell: Callable[[str], None] | None = None) -> list[Finding]:
    """Runs every check; `runs` is where run folders go. `tell` is called with the name of each check before it runs."""
    findings = []
    for check in _checks(runs):
        if tell:
            tell(check.name)
        findings.append(_run(check))
    return _as_tried(findings)


def _as_tried(findings: list[Finding]) -> list[Finding]:
    """Withdraws the ok of a version whose package fails the check that uses it (`_TRIALS`)."""
    failed = {f.name: f for f in findings if f.group != "versions" and f.verdict not in ("ok", "info")}
    return [replace(f, verdict="warning", detail=f"{f.detail}, but {trial.name}: {trial.detail}", fix=trial.fix)
            if f.group == "versions" and f.verdict == "ok" and (trial := failed.get(_TRIALS.get(f.name, ""))) else f
            for f in findings]


def _run(check: Check) -> Finding:
    try:
        with _quiet():
            return Finding(check.group, check.name, "ok", check.run())
    except Notice as outcome:
        return Finding(check.group, check.name, outcome.verdict, str(outcome), outcome.fix or check.fix)
    except importlib.metadata.PackageNotFoundError:
        return Finding(check.group, check.name, check.otherwise, "not installed", check.fix)
    except ModuleNotFoundError as error:
        return Finding(check.group, check.name, check.otherwise, f"{error.name} is not installed", check.fix)
    except (Exception, SystemExit) as error:  # a broken package may raise anything
        detail = f"does not work: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        return Finding(check.group, check.name, check.otherwise, detail, check.fix)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides what packages print while they are tried."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


# --- versions ---------------------------------------------------------------------------------------------------------

_OPTIONAL = {"vllm": "fast generation on NVIDIA GPUs", "bitsandbytes": "QLoRA",
             "scikit-learn": "the digits task", "gradio": "vlrl app", "duckdb": "vlrl app",
             "tensorboard": "log.trackers", "wandb": "log.trackers", "trackio": "log.trackers",
             "mlflow": "log.trackers",
             "flash-attn": "not needed: attention is PyTorch's own",
             "liger-kernel": "not needed: logits are computed at answers only"}
_TRIALS = {"torch": "training", "transformers": "training", "accelerate": "training", "torchvision": "torchvision",
           "peft": "LoRA", "bitsandbytes": "QLoRA", "pillow": "images", "av": "video by PyAV",
           "decord": "video by decord", "vllm": "engine vllm", "tensorboard": "tensorboard"}
"""Package -> the check that uses it; every other package is imported when its version is looked up."""
_IMPORTS = {"scikit-learn": "sklearn", "pyyaml": "yaml"}
"""Modules that are named otherwise than their package."""


def _requirements() -> dict[str, Any]:
    """Package -> what vlrl asks of it, for this platform, extras included."""
    from packaging.requirements import Requirement

    needs: dict[str, Any] = {}
    for line in importlib.metadata.requires("vlrl") or ():
        need = Requirement(line)
        extra = "extra" in str(need.marker or "")
        if need.name != "vlrl" and (extra or not need.marker or need.marker.evaluate({"extra": ""})):
            needs.setdefault(need.name.lower(), (need, not extra))
    return needs


def _version_checks() -> Iterator[Check]:
    try:
        needs = _requirements()
    except ImportError:
        needs = {}
        yield Check("versions", "packaging", lambda: importlib.metadata.version("packaging"), "error",
                    "pip install packaging")
    required = [name for name, (_, always) in needs.items() if always]
    for name in (*required, *_OPTIONAL):
        need, always = needs.get(name, (None, False))
        wanted = f"{need.name}{need.specifier}" if need else name
        yield Check("versions", name, lambda name=name, need=need: _version(name, need),
                    "error" if always else "info" if "not needed" in _OPTIONAL.get(name, "") else "missing",
                    f"pip install '{wanted}'" + (f"   ({_OPTIONAL[name]})" if name in _OPTIONAL else ""))


def _version(name: str, need: Any) -> str:
    version = importlib.metadata.version(name)
    if need and not need.specifier.contains(version, prereleases=True):
        raise Notice("warning", f"{version} is outside what vlrl asks for ({need.specifier})")
    if name not in _TRIALS:
        importlib.import_module(_IMPORTS.get(name, name.replace("-", "_")))
    return version


def _python() -> str:
    return f"{platform.python_version()} on {platform.system()} {platform.machine()}"


def _tested() -> str:
    """Returns how far the installed versions are those of constraints.txt, which a checkout carries."""
    from packaging.requirements import Requirement

    file = Path(__file__).resolve().parents[2] / "constraints.txt"
    if not file.is_file():
        return "constraints.txt, the versions tested together, comes with a checkout"
    off = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if not (text := line.partition("#")[0].strip()):
            continue
        need = Requirement(text)
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            version = importlib.metadata.version(need.name)
            if not need.specifier.contains(version, prereleases=True):
                off.append(f"{need.name} {version} ({need.specifier})")
    if off:
        more = f" and {len(off) - 6} more" if len(off) > 6 else ""
        raise Notice("info", f"not as tested together: {', '.join(off[:6])}{more}",
                     f"pip install -c {file} -e '.[dev]'")
    return "all as tested together (constraints.txt)"


# --- the table --------------------------------------------------------------------------------------------------------


def _checks(runs: Path) -> Iterator[Check]:
    yield Check("versions", "python", _python, "error")
    yield from _version_checks()
    reinstall = "pip install --force-reinstall vlrl, in a fresh environment"
    yield from (
        Check("versions", "tested together", _tested, "info"),
        Check("devices", "CUDA", trials.cuda, "warning"),
        Check("devices", "MPS", trials.mps, "warning"),
        Check("devices", "CPU", trials.cpu, "error", "pip install torch"),
        Check("devices", "memory", trials.memory, "warning", "pip install psutil"),
        Check("devices", "disk", lambda: trials.disk(runs), "warning"),
        Check("usable", "images", trials.images, "error", "pip install --force-reinstall pillow"),
        Check("usable", "training", trials.training, "error", reinstall),
        Check("usable", "batch shapes", trials.batch_shapes, "warning", reinstall),
        Check("usable", "bfloat16", trials.bfloat16, "missing", "model.dtype=float32"),
        Check("usable", "LoRA", trials.lora, "missing", "pip install peft"),
        Check("usable", "QLoRA", trials.qlora, "missing", "pip install bitsandbytes"),
        Check("usable", "video by decord", lambda: trials.video("decord"), "missing",
              "pip install decord   (Linux and Windows on x86-64; elsewhere PyAV is used)"),
        Check("usable", "video by PyAV", lambda: trials.video("pyav"), "missing",
              "pip install --force-reinstall av"),
        Check("usable", "engine vllm", trials.vllm, "missing", "pip install 'vlrl[vllm]'   (NVIDIA GPU; fixes torch)"),
        Check("usable", "tensorboard", trials.tensorboard, "missing", "pip install tensorboard"),
        Check("usable", "wandb", lambda: trials.tracker("wandb"), "missing", "pip install wandb"),
        Check("usable", "trackio", lambda: trials.tracker("trackio"), "missing", "pip install trackio"),
        Check("usable", "mlflow", lambda: trials.tracker("mlflow"), "missing", "pip install mlflow"),
        Check("usable", "browser app", trials.browser_app, "missing", "pip install 'vlrl[app]'"),
        Check("traps", "torchvision", trials.torchvision, "warning"),
        Check("traps", "threads", trials.threads, "warning"),
        Check("traps", "model hub", trials.hub, "warning"),
    )
