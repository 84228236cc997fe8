"""Servers in processes of their own, for tests: started on a free port, ended with the test."""

import contextlib
import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).parent


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@contextlib.contextmanager
def http_server(handler):
    """A server of this process, in a thread; its address, and the server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{serving.server_address[1]}", serving
        finally:
            serving.shutdown()
            thread.join()


class Serving:
    """A server's process at a port; can be killed and started again at the same one."""

    def __init__(self, file, *words, path=""):
        self.command, self.port, self.path = [sys.executable, str(HERE / file)], free_port(), path
        self.words = words
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        paths = filter(None, [str(HERE.parents[1]), os.environ.get("PYTHONPATH")])
        self.process = subprocess.Popen([*self.command, str(self.port), *self.words], stdout=subprocess.DEVNULL,
                                        stderr=subprocess.DEVNULL,
                                        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        end = time.monotonic() + 300
        while not self.answers():
            assert self.process.poll() is None and time.monotonic() < end
            time.sleep(0.05)

    def answers(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), 5):
                pass
            if self.path:
                urllib.request.build_opener(urllib.request.ProxyHandler({})).open(self.url + self.path, timeout=30)
            return True
        except OSError:
            return False

    def send(self, number):
        self.process.send_signal(number)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def stop(self):
        with contextlib.suppress(OSError):
            self.process.send_signal(signal.SIGCONT)
        self.kill()
