"""Parses the entries of `data.urls`, the hosts for downloads of media; redacts URLs for messages. No torch."""

import contextlib
import ipaddress
import re
from functools import cache
from typing import Any
from urllib.parse import urlsplit, urlunsplit

from vlrl.errors import ConfigError

PORTS = {"https": 443, "http": 80}
"""Allowed URL scheme -> default port."""
_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\Z")
_ENTRY = re.compile(r"(?P<scheme>https?://)?(?P<any>\*\.)?(?P<host>[^/:@*?#\s]+|\[[0-9a-fA-F:.]+\])(:(?P<port>\d{1,5}))?\Z")


@cache
def parse_entry(entry: str) -> dict[str, Any]:
    """Parses an entry of data.urls to {"scheme", "host", "port", "any"}. "port" is 0 if the entry has none, and "any"
    says whether every subdomain of the host is allowed. Raises ConfigError for an invalid entry."""
    match = _ENTRY.match(entry)
    host = normalised_host(match["host"]) if match else None
    port = int(match["port"]) if match and match["port"] else 0
    if not match or host is None or port > 65535:
        raise ConfigError(f"data.urls: {entry[:100]!r} is not a host; write images.example.org, *.example.org, "
                          "example.org:8443, or http://example.org if the host has no https")
    return {"scheme": (match["scheme"] or "https://")[:-3], "any": bool(match["any"]), "host": host, "port": port}


def normalised_host(host: str) -> str | None:
    """The host in lower case; None if it is neither a valid name nor an address in canonical form."""
    host = host.lower().strip("[]").removesuffix(".")
    with contextlib.suppress(ValueError):
        return str(ipaddress.ip_address(host)) if "%" not in host else None
    last = host.rpartition(".")[2]
    numeric = last.isdigit() or re.fullmatch(r"0x[0-9a-f]*", last)  # 127.1, 0177.0.0.1, 2130706433, 0x7f000001
    return host if _HOST.match(host) and not numeric else None


def redacted(url: str) -> str:
    """The URL for a message, without the parts that may be secret: user, password, query and fragment."""
    try:
        split = urlsplit(url)
        host = split.netloc.rpartition("@")[2]
        text = urlunsplit((split.scheme, host, split.path, "", "")) + ("?..." if split.query else "")
    except ValueError:
        text = url.partition("?")[0].rpartition("@")[2]
    return repr("".join(c if c.isprintable() else "?" for c in text)[:200])
