"""A server of HTTP that does what a test plants: it waits, fails, is killed, and comes back at its port."""

import contextlib
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

KEY_OF_ALL = "a key"
PATIENT = 60
"""Seconds that a test waits for what comes at once on a quiet machine."""


class Stub:
    """A server whose `answer(body)` gives (status, value); it may wait."""

    def __init__(self, answer=None, port=0):
        self.answer = answer or (lambda body: (200, {"echo": body, "by": self.address}))
        self.seen, self.healthy, self.state, self._sockets = [], True, {}, set()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # its answers are written in two parts

            def setup(self):
                super().setup()
                stub._sockets.add(self.connection)

            def do_GET(self):
                self.reply(200 if stub.healthy else 503, stub.state)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                if self.headers["Authorization"] != f"Bearer {KEY_OF_ALL}":
                    return self.reply(401, {"error": "who are you"})
                stub.seen.append(body)
                self.reply(*stub.answer(body))

            def reply(self, status, value):
                data = json.dumps(value).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True

            def handle_error(self, *_):
                pass  # a connection that was cut

        self.http = Server(("127.0.0.1", port), Handler)
        self.port = self.http.server_address[1]
        self.address = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def kill(self):
        """As kill -9: nothing listens any more, and every connection is cut."""
        self.http.shutdown()
        self.http.server_close()
        for connection in self._sockets:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
