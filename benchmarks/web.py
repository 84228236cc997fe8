"""Pages in a real browser: steps a second by number of processes, memory of the pool, growth, and equal screenshots.

    python benchmarks/web.py --workers 1 2 4 8 --episodes 64 --growth 2000 --equal 200

Steps a second count clicks beside what a page asks for, on episodes that are all open at once; `alone` is one process
that opens and closes one episode after the other. Memory is the sum of the proportional shares (PSS) of a process of
environments and all that it has started. Prints markdown; the load of the machine stands beside the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import psutil

from vlrl.config.schema import EnvironmentSettings
from vlrl.data import coordinates
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.task import load

STEPS = 4
NOTHING = "click(10, 900)"


def task() -> Any:
    found = load("web", {"form": "call", "scale": 1, "page_s": 120.0})
    found.coordinates = coordinates.make("norm1000")
    return found


@contextlib.contextmanager
def hosting(web: Any, workers: int) -> Iterator[Environments]:
    host = Environments(lambda _: web, EnvironmentSettings(workers=workers, step_s=500, reset_s=500))
    try:
        yield host
    finally:
        host.close()


def memory(host: Environments) -> float:
    """Returns MB of all processes of a host, what they share counted once."""
    total = 0
    for number in host.processes:
        for process in (psutil.Process(number), *psutil.Process(number).children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                total += process.memory_full_info().pss
    return total / 1e6


def together(web: Any, workers: int, episodes: int) -> tuple[float, float, float]:
    """Returns resets a second, steps a second and MB, of episodes that are open at once."""
    samples = web.samples("train")
    with hosting(web, workers) as host:
        warm = [host.open(samples[i], 0) for i in range(workers)]
        host.reset(warm)
        host.close_episodes(warm)
        began = time.monotonic()
        playing = [host.open(samples[i], 0) for i in range(episodes)]
        assert not any(isinstance(found, EnvironmentFailure) for found in host.reset(playing))
        reset = time.monotonic() - began
        began = time.monotonic()
        for _ in range(STEPS):
            assert not any(isinstance(found, EnvironmentFailure) for found in host.step(playing, [NOTHING] * episodes))
        stepped = time.monotonic() - began
        return episodes / reset, STEPS * episodes / stepped, memory(host)


def alone(web: Any, episodes: int) -> tuple[float, float, float]:
    """Returns the same of episodes one after the other."""
    samples, reset, stepped = web.samples("train"), 0.0, 0.0
    with hosting(web, 1) as host:
        for i in range(episodes):
            playing = [host.open(samples[i], 0)]
            began = time.monotonic()
            host.reset(playing)
            reset += time.monotonic() - began if i else 0.0
            began = time.monotonic()
            for _ in range(STEPS):
                host.step(playing, [NOTHING])
            stepped += time.monotonic() - began
            host.close_episodes(playing)
        return (episodes - 1) / reset, STEPS * episodes / stepped, memory(host)


def growth(web: Any, episodes: int) -> None:
    """Prints memory and processes after so many episodes, one after the other in one process."""
    samples = web.samples("train")
    print("\n| episodes | MB | processes | open files of the process |\n|---|---|---|---|")
    with hosting(web, 1) as host:
        for i in range(episodes + 1):
            playing = [host.open(samples[i % len(samples)], 0)]
            found = [*host.reset(playing), *host.step(playing, [NOTHING])]
            assert not any(isinstance(f, EnvironmentFailure) for f in found), found
            host.close_episodes(playing)
            if i % max(1, episodes // 8) == 0:
                process = psutil.Process(host.processes[0])
                print(f"| {i} | {memory(host):.0f} | {len(process.children(recursive=True))} | {process.num_fds()} |",
                      flush=True)


def equal(web: Any, episodes: int) -> None:
    """Prints how many of so many episodes show the same again, the browser being killed between two steps."""
    samples, same = web.samples("train"), 0
    with hosting(web, 1) as host:
        for i in range(episodes):
            hashes = []
            for again in (False, True):
                (playing,) = [host.open(samples[i], 0)]
                shown = [*host.reset([playing]), *host.step([playing], [NOTHING])]
                if again and i % 10 == 0:
                    _kill(host)
                shown += host.step([playing], [NOTHING])
                hashes.append([hashlib.sha256(_picture(found)).hexdigest() for found in shown])
                host.close_episodes([playing])
            same += hashes[0] == hashes[1]
    print(f"\n{same} of {episodes} episodes showed the same bytes again; in every tenth Chromium was killed with -9 "
          "between two steps.")


def _picture(found: Any) -> bytes:
    assert not isinstance(found, EnvironmentFailure), found
    return (found.observation if hasattr(found, "observation") else found).media[0].source.tobytes()


def _kill(host: Environments) -> None:
    for process in psutil.Process(host.processes[0]).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "--remote-debugging-pipe" in process.cmdline():
                os.kill(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--episodes", type=int, default=32)
    parser.add_argument("--growth", type=int, default=0)
    parser.add_argument("--equal", type=int, default=0)
    given, web = parser.parse_args(), task()
    print("| processes | resets a second | steps a second | MB | load |\n|---|---|---|---|---|")
    for workers in (0, *given.workers):
        found = together(web, workers, given.episodes) if workers else alone(web, min(16, given.episodes))
        resets, steps, used = found
        load_now = os.getloadavg()[0]
        print(f"| {workers or 'alone'} | {resets:.2f} | {steps:.2f} | {used:.0f} | {load_now:.0f} |", flush=True)
    if given.growth:
        growth(web, given.growth)
    if given.equal:
        equal(web, given.equal)


if __name__ == "__main__":
    main()
