"""HTTP requests to the servers that `vlrl serve` starts. Errors tell whether a retry or another server may help."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import httpx

from vlrl.errors import ConfigError, TrainingError

CONNECT_S = 10.0  # time limit in seconds for connecting, and for the response to a health check
IDLE_S = 2.0
"""Idle connections are reused for this number of seconds. vLLM closes them after 5 seconds, and a request sent at that
moment would be lost."""


class Unavailable(Exception):
    """A request to a server failed, but another server or a later attempt may succeed. `status` is the HTTP status, or
    0 if there was no response."""

    def __init__(self, message: str, status: int = 0):
        super().__init__(message)
        self.status = status


class ServerClient:
    """An HTTP client for servers that share a key. timeout_s: time limit of one response. key_file: name of the setting
    with the path of the key file, for error messages."""

    def __init__(self, key: str, timeout_s: float, key_file: str = "engine.key_file"):
        self._key_file, self._http = key_file, http_client(key, timeout_s, 64, IDLE_S)

    def get(self, address: str, path: str) -> Any:
        """Returns the JSON response to a GET request that a server answers quickly. Raises the errors of `post`."""
        return self._ask("GET", address, path, timeout=CONNECT_S)

    def post(self, address: str, path: str, body: bytes) -> Any:
        """Returns the JSON response to a POST request. Raises Unavailable if another server or a later attempt may
        succeed, ConfigError for a wrong key, and TrainingError for a request that no server will accept."""
        return self._ask("POST", address, path, content=body)

    def _ask(self, method: str, address: str, path: str, **more: Any) -> Any:
        try:
            answer = self._http.request(method, address + path, **more)
            status = answer.status_code
            if status == HTTPStatus.OK:
                return answer.json() if answer.content else None
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise Unavailable(f"{type(error).__name__}: {error}".rstrip(": ")) from None
        try:
            body = answer.json()
            text = str(body.get("error", body) if isinstance(body, dict) else body)
        except ValueError:
            text = answer.text
        message = f"{status} {text[:2000]}"
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


def http_client(key: str, timeout_s: float, connections: int, idle_s: float = 5.0) -> httpx.Client:
    """Creates an HTTP client that sends `key` as bearer token, uses no proxy and follows no redirects. connections:
    number of idle connections that are kept open, each for at most `idle_s` seconds."""
    return httpx.Client(headers={"Authorization": f"Bearer {key}"} if key else {}, trust_env=False,
                        timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, CONNECT_S), pool=None),
                        limits=httpx.Limits(max_connections=None, max_keepalive_connections=connections,
                                            keepalive_expiry=idle_s))
