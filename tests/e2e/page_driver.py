"""Follows pages with the vlrl of this Python: `python page_driver.py PLAN RESULTS CLONE`.

PLAN is a JSON list of pages: their `folder`, `steps` (each `words`, `env` and `stdin`) and folders to copy the first
page's run to (`runs`). One process imports vlrl and forks for each page, two at a time. There the commands run one
after the other, by `vlrl.cli.main.main` or `runpy`. The folder RESULTS gets a file for each page with the exit code,
the output and the seconds of each command. CLONE has the package `tests`, which no command finds."""

import contextlib
import faulthandler
import json
import os
import resource
import runpy
import shutil
import sys
import time
import traceback
from pathlib import Path
from typing import Any

LONGEST = 300  # seconds of a page
TOGETHER = 2


def program(words: list[str]) -> int:
    """Runs a command line in this process and returns its exit code."""
    from vlrl.cli.main import main
    if words[0] == "vlrl":
        return main(words[1:])
    if words[1:3] == ["-m", "pytest"]:
        import pytest
        return int(pytest.main([*words[3:], "-p", "no:cacheprovider"]))
    sys.argv = words[1:]
    try:
        runpy.run_path(words[1], run_name="__main__")
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else error.code is not None
    return 0


def cpu() -> float:
    """Seconds of this process and its ended children."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def run(step: dict[str, Any], output: Path) -> dict[str, Any]:
    """Runs a command with its output in a file."""
    with output.open("w+", encoding="utf-8", errors="replace") as file, open(step["stdin"] or os.devnull) as stdin:
        for number, other in enumerate((stdin, file, file)):
            os.dup2(other.fileno(), number)
        start, before = time.monotonic(), cpu()
        try:
            code = program(step["words"])
        except BaseException:
            traceback.print_exc()
            code = -1
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError):
                stream.flush()
        file.seek(0)
        return {"code": code, "said": file.read(), "seconds": time.monotonic() - start, "cpu": cpu() - before}


def follow(page: dict[str, Any], results: Path) -> None:
    """Runs the commands of a page in its folder."""
    faulthandler.dump_traceback_later(LONGEST, exit=True)
    os.chdir(page["folder"])
    os.environ.update(HOME=page["folder"], XDG_CACHE_HOME=f"{page['folder']}/.cache")
    sys.path.insert(0, page["folder"])
    done = []
    for step in page["steps"]:
        os.environ.update(step["env"])
        done.append(run(step, results.with_suffix(".out")))
        results.write_text(json.dumps(done), encoding="utf-8")


def follow_all(pages: list[dict[str, Any]], results: Path) -> None:
    """Follows each page in a process of its own. What came of it is in `results` plus the name of its folder."""
    running = 0
    for page in pages:
        if running == TOGETHER:
            os.wait()
            running -= 1
        if os.fork() == 0:
            try:
                follow(page, results / f"{Path(page['folder']).name}.json")
            finally:
                os._exit(0)
        running += 1
    for _ in range(running):
        os.wait()


def main(plan: Path, results: Path, clone: Path) -> None:
    first, *pages = json.loads(plan.read_text(encoding="utf-8"))
    import vlrl.cli.evaluate
    import vlrl.cli.main
    import vlrl.cli.train
    import vlrl.engine.hf
    import vlrl.evaluation
    import vlrl.training.session  # noqa: F401
    sys.path.append(str(clone))
    import tests.e2e.preloaded
    import tests.once
    sys.path.remove(str(clone))
    tests.once.install()
    follow_all([first], results)
    for page in pages:
        for folder in page["runs"]:
            shutil.copytree(Path(first["folder"]) / "runs" / "quickstart", Path(page["folder"]) / folder)
    follow_all(pages, results)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
