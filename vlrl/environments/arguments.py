"""Checks the arguments of external environments. A ConfigError names the wrong argument."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from vlrl.config.url_entries import redacted
from vlrl.errors import ConfigError


def checked_names(value: Any, what: str) -> tuple[str, ...]:
    """Returns a list of names as strings. `what` is the argument's name for the message. Raises ConfigError if `value`
    is a string (whose characters would become the names), or if an element is neither a string nor an integer, e.g.
    because YAML reads `on` as true."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Collection):
        raise ConfigError(f"{what}={value!r} must be a list: {what}=[{value}]")
    wrong = next((name for name in value if isinstance(name, bool) or not isinstance(name, (str, int))), None)
    if wrong is not None:
        raise ConfigError(f"{what}: {wrong!r} is not a name; put it in quotes")
    return tuple(map(str, value))


def checked_variables(value: Any, what: str) -> tuple[str, ...]:
    """Returns names of environment variables. Raises ConfigError for a variable that is not set."""
    variable_names = checked_names(value, what)
    missing = next((name for name in variable_names if name not in os.environ), None)
    if missing is not None:
        raise ConfigError(f"{what} names {missing!r}, which is not set here: export it, or leave it out")
    return variable_names


def checked_server_url(url: str, like: str) -> str:
    """Returns the URL of a server, with the scheme in lower case. Raises ConfigError for an invalid URL. A URL with a
    user name or password is invalid too, because addresses are printed and stored with runs; the message omits them.
    like: an example of a valid URL."""
    try:
        parts = urlsplit(url)
        secret, right = "@" in parts.netloc, parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        parts, secret, right = None, "@" in url, False
    if secret:
        raise ConfigError(f"the address {redacted(url)} has a user name or password: remove it, as addresses are "
                          "printed and stored")
    if not right or parts is None:
        raise ConfigError(f"the environment's address {url!r} must look like {like}")
    return urlunsplit(parts)
