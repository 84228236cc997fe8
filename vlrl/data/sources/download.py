"""Downloads media from URLs that `data.urls` allows, each once, and caches them by content hash. Imports no torch.

    remote = checked_url("https://images.example.org/7.jpg", Policy(hosts=("images.example.org",), cache=Path("cache")))
    path = fetched_file(remote, most_bytes=10_000_000, seconds=60)

A host name is resolved once, all of its addresses must be public, and the connection goes to one of these checked
addresses. The request still contains the host name, and the certificate must be valid for it. Each redirect is checked
like the first URL. Proxies from the environment are not used, since they would resolve the name again. The server's
content type is ignored: the decoder decides whether the file is an image or a video. Every failure is a DataError that
names the URL."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import socket
import ssl
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit, urlunsplit

from vlrl.config.schema import LimitsSettings
from vlrl.config.url_entries import PORTS, normalised_host, parse_entry, redacted
from vlrl.data.media import RemoteMedia
from vlrl.errors import DataError, RunError
from vlrl.store.files import file_sha256, read_json, suffix_of, write_text

if TYPE_CHECKING:
    import httpx

_T = TypeVar("_T")
MOST_HOPS = 5
"""Maximum number of redirects."""
MOST_URL = 4096
"""Maximum length of a URL."""
TRIES = 3
"""Number of attempts in case of temporary failures: a broken connection, status 429 or 5xx."""
_PAUSE_S = 0.5
"""Seconds before the second attempt; doubled before the third."""
_REDIRECTS = (301, 302, 303, 307, 308)
_AGAIN = (429, 500, 502, 503, 504)
_BROKEN = re.compile(r"closed connection|disconnected")  # what h11 and httpcore say then
_EMBEDDED = (("64:ff9b::/96", 0), ("2002::/16", 80))  # IPv6 networks with an embedded IPv4 address, and its bit offset

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def is_public(address: Address) -> bool:
    """Whether an IP address belongs to the public internet. If an IPv4 address is embedded in an IPv6 address, the
    embedded address decides.

    Not public: private, loopback, link-local, shared (100.64/10), multicast, reserved, documentation addresses."""
    if isinstance(address, ipaddress.IPv6Address):
        for network, shift in _EMBEDDED:
            if address in ipaddress.ip_network(network):
                return is_public(ipaddress.IPv4Address(int(address) >> shift & 0xFFFFFFFF))
        if address.ipv4_mapped is not None:
            return is_public(address.ipv4_mapped)
        if address not in ipaddress.ip_network("2000::/3") or address.teredo is not None:
            return False
    elif address in ipaddress.ip_network("192.88.99.0/24"):  # relays of 6to4
        return False
    return address.is_global and not (address.is_multicast or address.is_reserved)


def look_up_host(host: str, port: int) -> list[str]:
    """Returns all IP addresses of a host name as strings. Raises OSError."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in entries))


@dataclass(frozen=True)
class AddressGuard:
    """Which IP addresses may be connected to, and how host names are looked up. A run always uses the default values;
    only tests pass other values."""

    permits: Callable[[Address], bool] = is_public
    look_up: Callable[[str, int], Sequence[str]] = look_up_host
    any_port: bool = False
    """Whether ports other than 443 and 80 are allowed without an entry in data.urls."""
    trusted: str | None = None
    """File with trusted certificates; None = the certificates of the system."""


@dataclass(frozen=True)
class Policy:
    """Which URLs may be downloaded (the setting `data.urls`), and the cache folder for the downloads."""

    hosts: tuple[str, ...] | None
    """The entries of data.urls; None = every public host, by https only."""
    cache: Path
    guard: AddressGuard = AddressGuard()

    def checked(self, url: str) -> RemoteUrl:
        return checked_url(url, self)

    def allows(self, scheme: str, host: str, port: int) -> bool:
        """Whether the entries of data.urls allow contacting a host. An entry has the form `host`, `*.host`, `host:port`
        or `http://host`."""
        if self.hosts is None:
            return scheme == "https" and (port == 443 or self.guard.any_port)
        return any(self._matches(parse_entry(entry), scheme, host, port) for entry in self.hosts)

    def _matches(self, entry: dict[str, Any], scheme: str, host: str, port: int) -> bool:
        wanted = entry["port"] or PORTS[entry["scheme"]]
        named = host.endswith(f".{entry['host']}") if entry["any"] else host == entry["host"]
        return scheme == entry["scheme"] and named and (port == wanted or self.guard.any_port)


@dataclass(frozen=True)
class RemoteUrl(RemoteMedia):
    """An allowed URL that a row names; the source of a Media that is downloaded when it is loaded."""

    url: str = field(repr=False)
    policy: Policy = field(repr=False)

    def __str__(self) -> str:
        return redacted(self.url)

    def fetched(self, limits: LimitsSettings) -> Path:
        return fetched_file(self, limits.media_bytes, limits.url_seconds)


class _Retry(Exception):
    """Raised for a failure that may be temporary, so that the download is tried again."""


def checked_url(url: str, policy: Policy) -> RemoteUrl:
    """Returns the URL as a RemoteUrl if it is allowed; else raises a DataError whose message omits user, password and
    query."""
    _target(url, policy)
    return RemoteUrl(url, policy)


def fetched_file(remote: RemoteUrl, most_bytes: int, seconds: float) -> Path:
    """Returns the local file with the content of a URL. If the file is not cached, or its hash has changed, downloads
    at most `most_bytes` within `seconds`.

    Raises DataError naming the URL, and RunError if the cache cannot be written."""
    cache = remote.policy.cache
    entry = cache / "urls" / f"{hashlib.sha256(remote.url.encode('utf-8', 'surrogatepass')).hexdigest()}.json"
    known = read_json(entry) or {}
    cached = cache / "media" / Path(str(known.get("file", "none"))).name
    with contextlib.suppress(OSError):
        if file_sha256(cached) == known.get("sha256"):
            if cached.stat().st_size > most_bytes:
                raise _too_large(remote.url, most_bytes)
            return cached
    deadline, pause = time.monotonic() + seconds, _PAUSE_S
    for left in reversed(range(TRIES)):
        try:
            return _fetch(remote, most_bytes, deadline, entry)
        except _Retry as error:
            if not left or time.monotonic() + pause >= deadline:
                raise DataError(f"media URL {redacted(remote.url)} cannot be fetched: {error}") from None
        time.sleep(pause)
        pause *= 2
    raise AssertionError


@dataclass(frozen=True)
class _Target:
    scheme: str
    host: str
    port: int
    path: str


def _target(url: str, policy: Policy) -> _Target:
    def refuse(why: str) -> DataError:
        return DataError(f"media URL {redacted(url)} {why}")

    if len(url) > MOST_URL or not url.isascii() or not all("!" <= c <= "~" and c != "\\" for c in url):
        raise refuse(f"must be at most {MOST_URL} ASCII characters without spaces; encode other "
                     "characters as %XX or xn--")
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError:
        raise refuse("is not a URL") from None
    if split.scheme not in PORTS:
        raise refuse("must begin with https://")
    if split.username is not None or split.password is not None or "@" in split.netloc:
        raise refuse("has a user or a password, which would be stored in the run folder; remove them")
    host = normalised_host(split.hostname or "")
    if host is None:
        raise refuse("has no host")
    port = port if port is not None else PORTS[split.scheme]
    if not policy.allows(split.scheme, host, port):
        allowed = "https hosts on port 443" if policy.hosts is None else ", ".join(policy.hosts) or "none"
        raise refuse(f"has a host that data.urls does not allow (it allows: {allowed})")
    return _Target(split.scheme, host, port, urlunsplit(("", "", split.path or "/", split.query, "")))


def _addresses(target: _Target, url: str, guard: AddressGuard, deadline: float) -> list[str]:
    result: list[Any] = []

    def ask() -> None:
        try:
            result.append(list(guard.look_up(target.host, target.port)))
        except (OSError, UnicodeError) as error:
            result.append(error)

    asking = threading.Thread(target=ask, daemon=True)  # the system's resolver has no timeout
    asking.start()
    asking.join(max(0.0, deadline - time.monotonic()))
    if not result:
        raise DataError(f"media URL {redacted(url)}: resolving its host timed out (limits.url_seconds)")
    if isinstance(result[0], Exception) or not result[0]:
        raise _Retry(f"the host {target.host} is not found")
    for text in result[0]:
        try:
            permitted = "%" not in text and guard.permits(ipaddress.ip_address(text))
        except ValueError:
            permitted = False
        if not permitted:
            raise DataError(f"media URL {redacted(url)}: {target.host} has the address {text[:60]}, which is not a "
                            "public internet address; it is not contacted")
    return result[0]


def _fetch(remote: RemoteUrl, most: int, deadline: float, entry: Path) -> Path:
    url = remote.url
    for _ in range(MOST_HOPS + 1):
        target = _target(url, remote.policy)
        addresses = _addresses(target, url, remote.policy.guard, deadline)
        with _failures(url):
            answer = _run(_get(target, addresses, remote, most, deadline, entry))
        if isinstance(answer, Path):
            return answer
        if not answer:
            raise DataError(f"media URL {redacted(url)} redirects without a location")
        url = urljoin(url, answer)
    raise DataError(f"media URL {redacted(remote.url)} redirects more than {MOST_HOPS} times")


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Runs a coroutine to completion, in another thread if this thread already has an event loop, as in a notebook."""
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _get(target: _Target, addresses: Sequence[str], remote: RemoteUrl, most: int, deadline: float,
               entry: Path) -> Path | str:
    """Sends a GET request to the first of `addresses` that answers. Returns the file with the body, or the location of
    a redirect ("" if the server sends none).

    target: the host, port and path of the request. remote: the URL that the row names. most: maximum size of the body
    in bytes. deadline: when the whole request must have ended, since httpx's own timeouts apply to single waits. entry:
    the cache entry of the URL."""
    import asyncio

    import httpx

    host = f"[{target.host}]" if ":" in target.host else target.host
    headers = {"Host": host if target.port == PORTS[target.scheme] else f"{host}:{target.port}", "User-Agent": "vlrl",
               "Accept": "image/*, video/*, */*;q=0.1", "Accept-Encoding": "identity", "Connection": "close"}
    # the host name for the certificate; the path as written, which httpx would normalise
    extensions = {"sni_hostname": target.host, "target": target.path.encode()}
    async with (asyncio.timeout(deadline - time.monotonic()),
                httpx.AsyncClient(verify=_context(remote.policy.guard.trusted), trust_env=False) as client):
        for left, address in zip(range(len(addresses), 0, -1), addresses, strict=True):
            where = httpx.URL(scheme=target.scheme, host=address, port=target.port)
            patience = httpx.Timeout(None, connect=max(0.0, deadline - time.monotonic()) / left)
            try:
                async with client.stream("GET", where, headers=headers, extensions=extensions,
                                         timeout=patience) as response:
                    if response.status_code in _REDIRECTS:
                        return response.headers.get("location", "")
                    return await _stored(remote, response, most, entry)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if left == 1:
                    raise
    raise AssertionError


@contextlib.contextmanager
def _failures(url: str) -> Iterator[None]:
    import httpx

    try:
        yield
    except (TimeoutError, httpx.TimeoutException):
        raise DataError(f"media URL {redacted(url)} timed out (limits.url_seconds)") from None
    except (httpx.ProtocolError, httpx.UnsupportedProtocol) as error:
        if isinstance(error, httpx.RemoteProtocolError) and _BROKEN.search(str(error)):
            raise _Retry("the server closed the connection") from None
        raise DataError(f"media URL {redacted(url)}: the answer is not HTTP: {str(error)[:100]}") from None
    except httpx.NetworkError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise DataError(f"media URL {redacted(url)}: the certificate is invalid: {str(error)[:200]}") from None
        raise _Retry(f"{type(error).__name__}: {str(error)[:100]}") from None


@cache
def _context(trusted: str | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=trusted)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


async def _stored(remote: RemoteUrl, response: httpx.Response, most: int, entry: Path) -> Path:
    if response.status_code != 200:
        if response.status_code in _AGAIN:
            raise _Retry(f"the server answers {response.status_code}")
        raise DataError(f"media URL {redacted(remote.url)}: the server answers {response.status_code}")
    if (packing := response.headers.get("content-encoding", "").strip().lower()) not in ("identity", ""):
        raise DataError(f"media URL {redacted(remote.url)} answers with a content encoding that was not requested "
                        f"({packing[:40]})")
    length = response.headers.get("content-length", "0")
    if length.isdecimal() and int(length[:20]) > most:
        raise _too_large(remote.url, most)
    folder, digest, size, head = remote.policy.cache / "media", hashlib.sha256(), 0, b""
    with _on_disk(remote.policy.cache), contextlib.ExitStack() as stack:
        folder.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False))
        stack.callback(Path(file.name).unlink, missing_ok=True)
        async for chunk in response.aiter_raw():  # never decompressed
            size, head = size + len(chunk), head or chunk[:16]
            if size > most:
                raise _too_large(remote.url, most)
            digest.update(chunk)
            file.write(chunk)
        if not size:
            raise DataError(f"media URL {redacted(remote.url)} is empty")
        file.flush()
        path = folder / (digest.hexdigest() + suffix_of(head))
        os.replace(file.name, path)
        write_text(entry, json.dumps({"sha256": digest.hexdigest(), "file": path.name}), sync=False)
    return path


@contextlib.contextmanager
def _on_disk(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunError(f"cannot store downloads of data.urls in {cache}: {error.strerror or error}. Free space, or set "
                       "data.cache to another folder.") from None


def _too_large(url: str, most: int) -> DataError:
    return DataError(f"media URL {redacted(url)} has more bytes than limits.media_bytes={most}")
