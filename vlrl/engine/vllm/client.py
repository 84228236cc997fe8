"""HTTP to the servers that `vlrl serve` starts, and what their answers mean: ask another one, or stop."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httpx

from vlrl.errors import ConfigError, TrainingError

CONNECT_S = 10.0
"""Seconds to wait for a connection, and for the answer to a health check."""
IDLE_S = 2.0
"""Seconds that an idle connection is used again. vLLM closes it after 5: a request at that moment would be lost."""


class Unavailable(Exception):
    """A server did not do what it was asked, and another one may. `status` is 0 when it said nothing."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class ServerClient:
    """HTTP to servers with one key. timeout_s: most seconds that an answer may take. key_file: the setting that names
    the key's file."""

    def __init__(self, key: str, timeout_s: float, key_file: str = "engine.key_file"):
        self._key_file = key_file
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, trust_env=False,  # a proxy has no business between these
                                  timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S), pool=None),
                                  limits=httpx.Limits(max_connections=None, max_keepalive_connections=64,
                                                      keepalive_expiry=IDLE_S))

    def get(self, address: str, path: str) -> Any:
        """Returns the JSON of a page that answers soon. Raises as `post`."""
        return self._ask("GET", address, path, timeout=CONNECT_S)

    def post(self, address: str, path: str, body: bytes) -> Any:
        """Returns the JSON that a server answers. Raises Unavailable where another server, or a later time, may do
        better; ConfigError for a wrong key and TrainingError for a request that no server will take.
        """
        return self._ask("POST", address, path, content=body)

    def _ask(self, method: str, address: str, path: str, **more: Any) -> Any:
        try:
            answer = self._http.request(method, address + path, **more)
            status = answer.status_code
            if status == HTTPStatus.OK:
                return answer.json() if answer.content else None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise Unavailable(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        message = f"{status} {_error_text(answer)}"
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.PROXY_AUTHENTICATION_REQUIRED):
            raise ConfigError(f"{address} refuses the key: set {self._key_file} to the file that `vlrl serve` "
                              "wrote, or VLRL_ENGINE_KEY to the key that the server was started with")
        if status < HTTPStatus.INTERNAL_SERVER_ERROR and status not in (HTTPStatus.CONFLICT,
                                                                        HTTPStatus.TOO_MANY_REQUESTS):
            raise TrainingError(f"the server {address} refuses {path}: {message}")
        raise Unavailable(message, status)

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()


def _error_text(answer: httpx.Response) -> str:
    try:
        body = answer.json()
        return str(body.get("error", body) if isinstance(body, dict) else body)[:2000]
    except ValueError:
        return answer.text[:2000]
