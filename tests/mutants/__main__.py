"""Runs the mutants and prints a line for each: area, place, fault, the test that saw it, seconds."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.mutants.lists import AREAS
from tests.mutants.running import ROOT, results


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--area", action="append", choices=[*AREAS], help="all by default; may be given several times")
    parser.add_argument("-j", "--jobs", type=int, choices=(1, 2), default=1, help="processes at a time")
    parser.add_argument("--only", default="", help="mutants of files or texts that contain this")
    parser.add_argument("--quick", action="store_true", help="without the run that shows that the tests pass otherwise")
    given = parser.parse_args(words)
    os.chdir(ROOT)
    begun = time.monotonic()
    rows = [(area, m) for area in given.area or AREAS for m in AREAS[area] if given.only in f"{m.file} {m.text}"]
    alive, broken = [], []
    tests = [*dict.fromkeys(test for _, m in rows for test in m.tests)]
    for _, sound in results([] if given.quick else [(tests, None)], 1, 900.0):
        if sound.killed_by or sound.error:
            print(f"without a mutant: {sound.error or sound.killed_by}")
            return 1
        print(f"without a mutant: {len(tests)} tests and files pass in {sound.seconds:.0f} s", flush=True)
    for number, result in results([(m.tests, m) for _, m in rows], given.jobs):
        area, m = rows[number]
        fault = f"{m.file.removeprefix('vlrl/')}: {m.text.strip()[:50]!r} -> {m.replacement.strip()[:50]!r}"
        if result.error:
            broken.append(m)
        elif not result.killed_by:
            alive.append(m)
        by = result.error or result.killed_by.removeprefix("tests/") or f"LIVES: {m.effect}"
        print(f"{area:<10} {result.seconds:5.1f} s  {fault:<120} {by}", flush=True)
    print(f"{len(rows)} mutants, {len(rows) - len(alive) - len(broken)} killed, {len(alive)} alive, {len(broken)} "
          f"without a result; {time.monotonic() - begun:.0f} s")
    return int(bool(alive or broken))


if __name__ == "__main__":
    sys.exit(main())
