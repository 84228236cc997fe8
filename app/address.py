"""Where an inspector is reached: the names it answers to, the path below which it lies, the pages that may frame it.

A reverse proxy has a host name and often a path of its own. Without being told of them the inspector answers its own
address alone: a foreign Host header is DNS rebinding, and a page of another origin that holds it in a frame could have
clicks fall into it.
"""

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
    """`host`: the address of this machine that is listened on; as `parsed` makes the others."""

    host: str = "127.0.0.1"
    root_path: str = ""
    """The path under which a proxy serves it, without a "/" at its end; empty = at the top of a host."""
    hosts: tuple[str, ...] = ()
    """Names it is reached under beside those of `host`, in lower case; "*.NAME" stands for all names below NAME."""
    frames: tuple[str, ...] = ()
    """Origins whose pages may hold it in a frame, such as "http://localhost:8888"."""

    def knows(self, host: str) -> bool:
        """Returns whether a Host header (NAME or NAME:PORT) names this inspector. Never raises."""
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
    """Returns the address of what a user wrote. Raises ConfigError for a path, name or origin that is none."""
    path = "/" + root_path.strip("/") if root_path.strip("/") else ""
    if path and (not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/"))):
        raise ConfigError(f"--root-path {root_path}: write the path alone under which the proxy serves the inspector, "
                          "such as /vlrl or /user/me/proxy/7860; --allow-host takes the proxy's name")
    if (first := path[1:].partition("/")[0]) in _TAKEN:
        raise ConfigError(f"--root-path {root_path}: a proxy that cuts it off would hide the inspector's own /{first}; "
                          "begin it with another word")
    return Address(host, path, tuple(map(_host, hosts)), tuple(map(_origin, frames)))


def lets_others_in(address: Address) -> str:
    """Returns the option that lets others than this machine's user in; empty when none does."""
    if address.host not in LOCAL:
        return f"--host {address.host}"
    return next((f"--allow-host {name}" for name in address.hosts if name not in LOCAL), "")


def _host(text: str) -> str:
    name = text.strip().lower()
    if not re.fullmatch(_NAME, name) or ".." in name:
        raise ConfigError(f"--allow-host {text}: write the name alone that the browser shows, such as box.example.org, "
                          "without https://, port or path; *.example.org allows all names below it")
    return name.strip("[]")


def _origin(text: str) -> str:
    """Returns SCHEME://HOST[:PORT]: it becomes a part of a header, so nothing else may be in it."""
    origin = text.strip().lower().rstrip("/")
    match = _ORIGIN.fullmatch(origin)
    if match is None or ".." in origin or not 0 < int(match[1] or 80) < 65536:
        raise ConfigError(f"--allow-frame {text}: write the origin of the page that holds the inspector, as "
                          "http://localhost:8888 or https://huggingface.co: http or https, host and port alone")
    return origin


def _written(name: str) -> str:
    """Returns an IP address in its usual form, so that one written otherwise is known too."""
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""
