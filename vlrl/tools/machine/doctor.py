"""`vlrl doctor`: tries out whether this machine can train, and lists the versions of the packages. Uses no network.

Heavy packages are imported only inside the checks, so that a broken installation can be examined."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import io
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vlrl.checks.finding import Finding, Level
from vlrl.progress import Progress, no_progress
from vlrl.tools.machine import machine_checks
from vlrl.tools.machine.machine_checks import Notice

_OPTIONAL = {"peft": "LoRA", "vllm": "fast generation on NVIDIA GPUs", "bitsandbytes": "QLoRA",
             "scikit-learn": "the digits task", "gradio": "vlrl app",
             "duckdb": "vlrl app", "tensorboard": "log.trackers", "wandb": "log.trackers",
             "trackio": "log.trackers", "mlflow": "log.trackers"}
"""Optional package -> the features that need it."""
_USED_BY = {"torch": "training", "transformers": "training", "accelerate": "training", "torchvision": "torchvision",
            "pillow": "training", "av": "video by PyAV", "decord": "video by decord", "vllm": "engine vllm"}
"""Package -> name of the check that imports it. All other packages are imported when their version is looked up."""
_MODULES = {"scikit-learn": "sklearn", "pyyaml": "yaml"}  # package -> name of its module, if the two differ


class Check(NamedTuple):
    """One check of the machine. Its `name` is "group/name", such as "devices/CUDA"."""

    name: str
    run: Callable[[], str]  # Performs the check. Returns a text that describes the result; raises if the check fails.
    otherwise: Level = "missing"  # level of the finding if the check raises an exception other than Notice
    fix: str = ""


def checks(runs: Path) -> Iterator[Check]:
    """Yields all checks, in the order in which they are performed. `runs` is the folder that contains the run folders;
    the free space of its disk is checked."""
    yield Check("versions/python", lambda: f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield from _version_checks()
    yield from (
        Check("devices/CUDA", machine_checks.cuda, "warning"),
        Check("devices/MPS", machine_checks.mps, "warning"),
        Check("devices/CPU", machine_checks.threads, "error", "pip install torch"),
        Check("devices/memory", machine_checks.memory, "warning", "pip install psutil"),
        Check("devices/disk", lambda: machine_checks.disk(runs), "warning"),
        Check("usable/training", machine_checks.training, "error",
              "pip install --force-reinstall vlrl, in a fresh environment"),
        Check("usable/bfloat16", machine_checks.bfloat16, "missing", "model.dtype=float32"),
        Check("usable/torchvision", machine_checks.torchvision, "warning"),
        Check("usable/video by decord", lambda: machine_checks.video("decord"), "missing",
              "pip install decord   (Linux and Windows on x86-64; elsewhere PyAV is used)"),
        Check("usable/video by PyAV", lambda: machine_checks.video("pyav"), "missing",
              "pip install --force-reinstall av"),
        Check("usable/engine vllm", machine_checks.vllm, "missing",
              "pip install 'vlrl[vllm]'   (NVIDIA GPU; fixes torch)"),
        Check("usable/model hub", machine_checks.hub, "warning"),
    )


def examine(runs: Path = Path("runs"), progress: Progress = no_progress) -> list[Finding]:
    """Performs all checks and returns one finding per check. The `rule` of a finding is the name of its check, and
    `fix` says how to solve a problem, if this is known. `runs` is the folder that contains the run folders."""
    todo, findings = list(checks(runs)), []
    for done, check in enumerate(todo):
        progress(check.name.partition("/")[2], done, len(todo))
        findings.append(run_check(check))
    failed = {f.rule.partition("/")[2]: f for f in findings if f.kind != "versions" and f.level not in ("ok", "info")}

    def revised(f: Finding) -> Finding:
        """Returns the finding `f`, changed to a warning if it reports a good version of a package, but the check that
        uses this package has failed."""
        name = _USED_BY.get(f.rule.removeprefix("versions/"), "")
        if f.kind != "versions" or f.level != "ok" or name not in failed:
            return f
        return replace(f, level="warning", message=f"{f.message}, but {name}: {failed[name].message}",
                       fix=failed[name].fix)

    return [revised(f) for f in findings]


def run_check(check: Check) -> Finding:
    """Performs one check and returns its finding. Output that packages print meanwhile is discarded."""
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return Finding(rule=check.name, level="ok", message=check.run())
    except Notice as notice:
        return Finding(rule=check.name, level=notice.level, message=str(notice), fix=notice.fix or check.fix)
    except importlib.metadata.PackageNotFoundError:
        message = "not installed"
    except ModuleNotFoundError as error:
        message = f"{error.name} is not installed"
    except (Exception, SystemExit) as error:  # a broken package may raise anything
        message = f"does not work: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return Finding(rule=check.name, level=check.otherwise, message=message, fix=check.fix)


# --- versions ---------------------------------------------------------------------------------------------------------


def requirements() -> dict[str, tuple[Any, bool]]:
    """Package -> (its requirement in vlrl's metadata, whether it is required without an extra), for this platform."""
    from packaging.requirements import Requirement

    needs: dict[str, tuple[Any, bool]] = {}
    for line in importlib.metadata.requires("vlrl") or ():
        need = Requirement(line)
        extra = "extra" in str(need.marker or "")
        if need.name != "vlrl" and (extra or not need.marker or need.marker.evaluate({"extra": ""})):
            needs.setdefault(need.name.lower(), (need, not extra))
    return needs


def _version_checks() -> Iterator[Check]:
    try:
        needs = requirements()
    except ImportError:
        needs = {}
        yield Check("versions/packaging", lambda: importlib.metadata.version("packaging"), "error",
                    "pip install packaging")
    required = [name for name, (_, always) in needs.items() if always]
    for name in dict.fromkeys((*required, *_OPTIONAL)):
        need, always = needs.get(name, (None, False))
        use = f"   ({_OPTIONAL[name]})" if name in _OPTIONAL else ""
        yield Check(f"versions/{name}", lambda name=name, need=need: version_of(name, need),
                    "error" if always else "missing",
                    f"pip install '{f'{need.name}{need.specifier}' if need else name}'{use}")


def version_of(name: str, need: Any) -> str:
    """The version of the installed package `name`. `need` is its requirement from `requirements`, or None. Raises
    Notice if the version does not meet the requirement. Errors that importing the package raises are passed on."""
    version = importlib.metadata.version(name)
    if need and not need.specifier.contains(version, prereleases=True):
        raise Notice("warning", f"{version} is outside the range that vlrl requires ({need.specifier})")
    if name not in _USED_BY:
        importlib.import_module(_MODULES.get(name, name.replace("-", "_")))
    return version
