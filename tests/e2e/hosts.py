"""Two hosts on one machine: network namespaces joined by a cable that can be cut."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.e2e.runs import ENV, ROOT

TRAIN = str(ROOT / "train.py")


def ip(*words: str) -> str:
    """Runs `ip`; what it printed."""
    return subprocess.run(["ip", *words], check=True, text=True, capture_output=True).stdout


def works() -> bool:
    """Whether this process may make network namespaces and cables."""
    if os.geteuid():
        return False
    with contextlib.suppress(OSError, subprocess.CalledProcessError), Hosts("vlrl-probe"):
        return True
    return False


class Hosts:
    """Hosts a and b with one interface each; everything is removed at the end, the processes started here included."""

    def __init__(self, name: str = "vlrl"):
        self.names = [f"{name}-{os.getpid()}-{i}" for i in range(2)]
        self.interfaces = [f"v{os.getpid() % 10**6}x{i}" for i in range(2)]
        self.addresses = ["10.231.77.1", "10.231.77.2"]
        self.started: list[subprocess.Popen] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        with self._stack:
            for name in self.names:
                ip("netns", "add", name)
                self._stack.callback(ip, "netns", "del", name)
            first, second = self.interfaces
            ip("-n", self.names[0], "link", "add", first, "type", "veth", "peer", "name", second, "netns",
               self.names[1])
            for name, interface, address in zip(self.names, self.interfaces, self.addresses, strict=True):
                ip("-n", name, "addr", "add", f"{address}/24", "dev", interface)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", interface, "up")
            self._stack.callback(self._end_processes)
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def cut(self) -> None:
        """What is sent is lost from here on; nobody is told, as when a switch dies."""
        ip("-n", self.names[0], "link", "set", self.interfaces[0], "down")

    def start(self, host: int, command: Sequence[str], output: Path, **env: str) -> subprocess.Popen:
        """Starts a command on a host; stdout and stderr go to `output`."""
        with open(output, "w") as file:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.names[host], *command], stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True, cwd=output.parent,
                env={**ENV, "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": self.interfaces[host], **env})
        self.started.append(process)
        return process

    def torchrun(self, config: Path, folder: Path, *words: str) -> list[subprocess.Popen]:
        """train.py on both hosts; the output of each is in a file beside the run folder."""
        return [self.start(host, [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend",
            "c10d", "--rdzv_endpoint", f"{self.addresses[0]}:29400", "--rdzv_conf", f"is_host={int(host == 0)}",
            "--local_addr", address, TRAIN, str(config), f"run.dir={folder}", *words], output(folder, host))
            for host, address in enumerate(self.addresses)]

    def accelerate(self, config: Path, folder: Path, *words: str) -> list[subprocess.Popen]:
        """As `torchrun`, by accelerate launch."""
        return [self.start(host, [
            sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu",  # else it starts no process group
            "--num_machines", "2", "--num_processes", "2", "--machine_rank", str(host), "--main_process_ip",
            self.addresses[0], "--main_process_port", "29500", "--mixed_precision", "no", "--dynamo_backend", "no",
            TRAIN, str(config), f"run.dir={folder}", *words],
            output(folder, host)) for host in range(2)]

    def pids(self) -> list[int]:
        """The processes on both hosts."""
        return [int(pid) for name in self.names for pid in ip("netns", "pids", name).split()]

    def _end_processes(self) -> None:
        for process in self.started:  # also one that has not come to its host yet
            process.kill()
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.started:
            process.wait(60)


def output(folder: Path, host: int) -> Path:
    return folder.with_name(f"{folder.name}-host-{host}.txt")
