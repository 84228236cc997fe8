"""Posts alerts to a server as JSON (`alerts.webhook`)."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import ssl
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from vlrl.config.alerts import AlertSettings, webhook_problem
from vlrl.errors import ConfigError
from vlrl.store import plain

_WAITING = 100  # maximum number of alerts that wait to be sent
_AT_THE_END_S = 10.0  # A run that ends waits this number of seconds for the webhook


def open_webhook(settings: AlertSettings, say: Callable[[str], None]) -> Webhook:
    """Returns the webhook of `alerts.webhook`, which reports failures by `say`. Raises ConfigError for an environment
    variable without a valid URL."""
    return Webhook(_address(settings.webhook), settings.webhook_timeout_s, say)


def _address(given: str) -> str:
    if not given.startswith("env:"):
        return given
    name = given.removeprefix("env:")
    url = os.environ.get(name, "").strip()  # secrets kept in files end with a newline
    if not url:
        raise ConfigError(f"alerts.webhook={given!r}: the environment variable {name} is not set. Set it to the URL of "
                          "the webhook")
    if problem := webhook_problem(url):
        raise ConfigError(f"alerts.webhook={given!r}: the URL in {name} {problem}")
    return url


class Webhook:
    """Posts alerts as JSON from a separate thread. The run neither waits for them nor fails because of them."""

    def __init__(self, url: str, timeout_s: float, say: Callable[[str], None]):
        self._url, self._timeout_s, self._say = url, timeout_s, say
        self._waiting: queue.Queue[dict[str, Any] | None] = queue.Queue(_WAITING)
        self._reported = False
        self._thread = threading.Thread(target=self._work, name="webhook", daemon=True)
        self._thread.start()

    def send(self, record: dict[str, Any]) -> None:
        """Queues the alert `record` for posting and returns at once."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(record)

    def close(self) -> None:
        """Waits a moment for pending alerts."""
        with contextlib.suppress(queue.Full):
            self._waiting.put_nowait(None)
        self._thread.join(min(_AT_THE_END_S, self._timeout_s))

    def _work(self) -> None:
        import httpx

        # plain http must stay on this machine, so no proxy; a redirect could lead to a host that nobody allowed
        with httpx.Client(verify=ssl.create_default_context(), trust_env=not self._url.startswith("http:"),
                          timeout=self._timeout_s, follow_redirects=False) as client:
            while (record := self._waiting.get()) is not None:
                try:
                    with client.stream("POST", self._url, content=json.dumps(plain(record)),
                                       headers={"Content-Type": "application/json"}) as answer:  # its body is not read
                        if not answer.is_success:
                            self._failed(f"HTTP {answer.status_code}")
                except Exception as error:  # whatever a server or a network does; other texts may repeat the URL
                    self._failed(str(error)[:200] if isinstance(error, httpx.TransportError) else type(error).__name__)

    def _failed(self, reason: str) -> None:
        if not self._reported:
            self._reported = True
            self._say(f"warning: alerts.webhook at {urlsplit(self._url).hostname} did not accept an alert ({reason}); "
                      "the run continues, and further failures are not reported")
