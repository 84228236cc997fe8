"""How long 64 questions to a judge take, against the slowest reply: python benchmarks/judge_calls.py [--rounds 5].

A server of this machine answers each after a time of its own between half and the whole of --seconds; nothing else is
measured but vlrl's asking, beside the processor time that both together take. Writes benchmarks/results/judge_calls.md.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory

from vlrl.config.services import JudgeSettings
from vlrl.services.judge import Judge
from vlrl.task.services import Place

OUT = Path(__file__).parent / "results" / "judge_calls.md"


class Server(ThreadingHTTPServer):
    """Answers with a text after a while; `slowest` is the longest while of a round."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, seconds: float, text: str = "1.0"):
        super().__init__(("127.0.0.1", 0), Handler)
        self.text = text
        self.seconds, self.waits, self.lock = seconds, random.Random(0), threading.Lock()
        self.slowest = 0.0


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # its answers are written in two parts

    def do_GET(self) -> None:
        self._send({"data": [{"id": "m"}]})

    def do_POST(self) -> None:
        start = time.perf_counter()
        self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            wait = self.server.seconds * self.server.waits.uniform(0.5, 1.0)
        time.sleep(wait)
        reply: dict[str, object] = {"choices": [{"message": {"content": self.server.text}, "finish_reason": "stop"}]}
        self._send(reply)
        with self.server.lock:
            self.server.slowest = max(self.server.slowest, time.perf_counter() - start)

    def _send(self, reply: dict[str, object]) -> None:
        body = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def measure(questions: int, rounds: int, seconds: float) -> list[tuple[float, float, float]]:
    """Returns (seconds in all, seconds of the slowest reply on the server, processor seconds) of each round."""
    server = Server(seconds)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    out = []
    with TemporaryDirectory() as folder:
        url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        judge = Judge(JudgeSettings(url=url, model="m", concurrency=questions), Path(folder))
        for round in range(rounds):
            server.slowest = 0.0
            start, used = time.perf_counter(), time.process_time()
            replies, _ = judge.ask([f"{round}/{i}" for i in range(questions)], Place("train", round, round))
            out.append((time.perf_counter() - start, server.slowest, time.process_time() - used))
            assert replies == ["1.0"] * questions
        judge.close()
    server.shutdown()
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--questions", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    found = measure(given.questions, given.rounds, given.seconds)
    ratios = [whole / slowest for whole, slowest, _ in found]
    lines = ["# Questions to a judge at once", "",
             f"`python benchmarks/judge_calls.py --questions {given.questions} --rounds {given.rounds} --seconds "
             f"{given.seconds:g}`, Python {platform.python_version()}, {os.cpu_count()} CPU cores, load "
             f"{os.getloadavg()[0]:.0f} at the end. The server sleeps; the first round opens the connections.", "",
             "| round | all replies, s | slowest reply, s | ratio | processor, s |", "|---|---|---|---|---|",
             *(f"| {i} | {whole:.2f} | {slowest:.2f} | {ratio:.2f} | {used:.2f} |"
               for i, ((whole, slowest, used), ratio) in enumerate(zip(found, ratios, strict=True))), "",
             f"Ratio: least {min(ratios):.2f}, most {max(ratios):.2f}.", ""]
    OUT.write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
