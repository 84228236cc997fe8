"""What vlrl does on this machine's GPU, in one report: does it work, is it right, how fast, how much memory.

    make gpu-report                          # everything, at most 40 minutes, no network
    make gpu-report PART=attention           # one part; its rows replace those of before
    make gpu-report TINY=1                   # the same code with tiny models, on any machine, in minutes

Each part of gpu_parts.py runs in its own process, within its limit; a failure or a hang is a row with its traceback.
Rows of several calls are merged into gpu-report/report.json, from which gpu-report/report.md is written."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"doctor": 120, "tests": 120, "attention": 90, "update-3b-lora": 210, "update-7b-lora": 240,
          "update-3b-full": 210, "update-3b-qlora": 150, "update-7b-qlora": 150, "vllm": 270, "trl": 360, "plan": 300,
          "quickstart": 180}
"""Seconds after which a part is ended, in the order in which they run: each below 9 minutes, together 40."""
_PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes", "vllm", "trl")
_TRACEBACK = 4000  # characters of it that a report shows


def run(name: str, tiny: bool, folder: Path, limit: float) -> dict[str, Any]:
    """Runs a part. Returns {"state": ok, skipped, failed or hung, "rows", "reason", "seconds"}."""
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    result.unlink(missing_ok=True)
    words = [sys.executable, str(Path(__file__).with_name("gpu_parts.py")), name, str(result), *["--tiny"] * tiny]
    begun = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill(process)
    part = json.loads(result.read_text()) if result.exists() else {"state": "failed", "rows": []}
    if code is None:
        part |= {"state": "hung", "reason": f"not done within {limit:.0f} s; its last words:\n{_end(log)}"}
    elif code and part["state"] in ("ok", "running"):  # killed, or ended by a library, beside what it had measured
        part |= {"state": "failed", "reason": f"exit code {code}; its last words:\n{_end(log)}"}
    elif part["state"] == "failed" and not part.get("reason"):
        part["reason"] = _end(log)
    return {**part, "seconds": round(time.monotonic() - begun, 1), "limit": limit, "tiny": tiny}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a part with all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-_TRACEBACK:].strip() if log.exists() else ""


def facts() -> dict[str, str]:
    """Returns card, driver and versions; what cannot be had is left out."""
    versions = {"python": platform.python_version(), "vlrl": _commit()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        versions["card"] = "; ".join(done.stdout.splitlines())
    except (OSError, subprocess.SubprocessError):
        versions["card"] = f"none ({platform.processor() or platform.machine()}, {os.cpu_count()} cores)"
    return versions


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT,
                          check=False)
    return f"{metadata.version('vlrl')} {done.stdout.strip()}".strip()


# --- the report ------------------------------------------------------------------------------------------------------


def render(report: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of report.md."""
    yield "# vlrl on a GPU\n"
    for name, value in report["facts"].items():
        yield f"- {name}: {value}"
    parts = {name: report["parts"][name] for name in LIMITS if name in report["parts"]}
    if tiny := [name for name, part in parts.items() if part["tiny"]]:
        yield f"\nWith tiny models, which show that it works and nothing about speed: {', '.join(tiny)}."
    yield f"\nA part is ended at its limit; all limits are {sum(LIMITS.values()) / 60:.0f} minutes."
    yield "\n| part | state | seconds | of at most | |\n|---|---|---|---|---|"
    for name, part in parts.items():
        reason = (part.get("reason") or "").strip().splitlines()
        yield (f"| {name} | {part['state']} | {part['seconds']:.0f} | {part['limit']:.0f} | "
               f"{_cell(reason[-1] if reason else '')} |")
    for name, part in parts.items():
        yield f"\n## {name}\n"
        if part.get("about"):
            yield f"{part['about']}\n"
        if part["rows"]:
            yield from table(part["rows"])
        if part["state"] in ("failed", "hung"):
            yield f"\n```\n{part['reason']}\n```"
        elif part["state"] == "skipped":
            yield f"Left out: {part['reason']}"


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yields rows as a table with all their columns."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    yield f"| {' | '.join(names)} |\n|{'---|' * len(names)}"
    for row in rows:
        yield f"| {' | '.join(_cell(row.get(name, '')) for name in names)} |"


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return " ".join(text.split()).replace("|", "\\|")[:300]


def merge(path: Path, parts: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the report with new parts in place of those of before; a report that cannot be read begins anew."""
    try:
        report = json.loads(path.read_text())
    except (OSError, ValueError):
        report = {"parts": {}}
    return {"facts": facts(), "parts": {**report.get("parts", {}), **parts}}


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Writes report.json and report.md."""
    (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    (folder / "report.md").write_text("\n".join(render(report)) + "\n")


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=list(LIMITS), action="append", help="only this one (default: all)")
    parser.add_argument("--tiny", action="store_true", help="tiny models, on any device")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"), help="folder of the report")
    parser.add_argument("--limit", type=float, help="seconds for each part, less than its own limit")
    args = parser.parse_args(words)
    args.out.mkdir(parents=True, exist_ok=True)
    wrong = False
    for name in args.part or LIMITS:
        print(f"{name} ...", end=" ", flush=True)
        part = run(name, args.tiny, args.out, min(LIMITS[name], args.limit or LIMITS[name]))
        write(args.out, merge(args.out / "report.json", {name: part}))
        wrong |= part["state"] in ("failed", "hung")
        print(f"{part['state']} in {part['seconds']:.0f} s", flush=True)
    print(args.out / "report.md")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
