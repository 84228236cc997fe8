"""The network address of the inspector: accepted host names, the path below a reverse proxy, and the origins that may
frame its pages.

A reverse proxy has its own host name and often adds a path. By default the inspector accepts only requests to its own
host name: a foreign Host header is a sign of DNS rebinding, and a foreign page that embeds the inspector in a frame
could hijack clicks."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from vlrl.errors import ConfigError

LOCAL = ("127.0.0.1", "localhost", "::1")
_EVERYWHERE = ("0.0.0.0", "::")
_TAKEN = ("assets", "static", "gradio_api", "config")
_PATH = re.compile(r"(/[\w.~@:+-]+)+", re.ASCII)
_NAME = r"(?:(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]{0,250}[a-z0-9])?|\[[0-9a-f:.]+\])"
_ORIGIN = re.compile(rf"https?://{_NAME}(?::([0-9]{{1,5}}))?")


@dataclass(frozen=True)
class Address:
    """Where the inspector listens (`host`) and how browsers may reach it. Create it with `parsed`, which validates the
    fields."""

    host: str = "127.0.0.1"
    root_path: str = ""
    """Path under which a reverse proxy serves the inspector, without a trailing "/"; empty at the root of a host."""
    hosts: tuple[str, ...] = ()
    """Accepted host names in addition to `host`, in lower case; "*.NAME" accepts every subdomain of NAME."""
    frames: tuple[str, ...] = ()
    """Origins whose pages may embed the inspector in a frame, such as "http://localhost:8888"."""

    def knows(self, host: str) -> bool:
        """Whether a Host header (NAME or NAME:PORT) names this inspector. Never raises."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if not name:
            return False
        if self.host in _EVERYWHERE and not self.hosts:
            return True  # a machine has many names; a rebound one comes without the cookie of the password
        known = {*LOCAL, *self.hosts, self.host.lower()}
        return name in known or _written(name) in known or any(
            name.endswith(entry[1:]) for entry in self.hosts if entry.startswith("*."))


def parsed(host: str, root_path: str = "", hosts: tuple[str, ...] = (), frames: tuple[str, ...] = ()) -> Address:
    """Validates these command line values and returns the Address. Raises ConfigError for an invalid path, host name or
    origin."""
    path = "/" + root_path.strip("/") if root_path.strip("/") else ""
    if path and (not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/"))):
        raise ConfigError(f"--root-path {root_path}: write only the path under which the proxy serves the "
                          "inspector, such as /vlrl or /user/me/proxy/7860; --allow-host takes the proxy's name")
    if (first := path[1:].partition("/")[0]) in _TAKEN:
        raise ConfigError(f"--root-path {root_path}: a proxy that strips the path would hide the inspector's own "
                          f"/{first}; start the path with another word")
    return Address(host, path, tuple(map(_host, hosts)), tuple(map(_origin, frames)))


def exposing_option(address: Address) -> str:
    """The command line option (with its value) that makes the inspector reachable from other machines; "" if no option
    does."""
    if address.host not in LOCAL:
        return f"--host {address.host}"
    return next((f"--allow-host {name}" for name in address.hosts if name not in LOCAL), "")


def _host(text: str) -> str:
    name = text.strip().lower()
    if not re.fullmatch(_NAME, name) or ".." in name:
        raise ConfigError(f"--allow-host {text}: write only the host name that the browser shows, such as "
                          "box.example.org, without https://, port or path; *.example.org allows all its subdomains")
    return name.strip("[]")


def _origin(text: str) -> str:
    """Validates an origin SCHEME://HOST[:PORT] and returns it in lower case.

    The result becomes part of a response header, so any other text raises ConfigError."""
    origin = text.strip().lower().rstrip("/")
    match = _ORIGIN.fullmatch(origin)
    if match is None or ".." in origin or not 0 < int(match[1] or 80) < 65536:
        raise ConfigError(f"--allow-frame {text}: write the origin of the page that embeds the inspector, such as "
                          "http://localhost:8888 or https://huggingface.co: scheme, host and port only")
    return origin


def _written(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""
