"""Access control of the inspector: host name, origin, password, routes, and the headers of every response.

Behind a reverse proxy the relevant host name is the one that the browser used (X-Forwarded-Host, if the proxy sets it).
A web page cannot set that header without passing the origin check first. The proxy may keep its path
(`Address.root_path`) in requests or strip it.

The Content-Security-Policy lists the page's own inline scripts by hash, so a script injected through the text of a
rollout would not run. Gradio compiles its templates, which needs 'unsafe-eval'; they contain no text of a run."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import html
import ipaddress
import re
import secrets
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit
from weakref import WeakValueDictionary

from starlette.datastructures import Address as Client
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vlrl.errors import ConfigError

LOGIN = "/vlrl/login"
BODY_S = 10.0
"""Time limit in seconds for receiving the login form."""
_NOBODY = Client("", 0)
_EXACT = {"/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt"}
_FOLDERS = ("/assets/", "/static/", "/vlrl/")
_OWN = re.compile(r"/vlrl/(login|media|film|static/[\w-]+\.\w+)")
_GRADIO = re.compile(r"/gradio_api/(queue/(join|data)|run/predict|cancel|reset|component_server|startup-events|upload|"
                     r"upload_progress|heartbeat/\w+|app_id|theme\.css|stream/[\w./-]+|file=/[^:]*)/?")
_INLINE = re.compile(rb"<script(?:\s+[\w-]+)*\s*>(.*?)</script>", re.S)
_POLICY = ("default-src 'none'; script-src 'self' 'unsafe-eval'{hashes}; style-src 'self' 'unsafe-inline'; "
           "img-src 'self' data: blob:; media-src 'self' blob:; font-src 'self' data:; connect-src 'self'; "
           "worker-src 'self' blob:; manifest-src 'self'; base-uri 'self'; form-action 'self'; "
           "frame-ancestors {frames}; object-src 'none'")
_HEADERS = {"Referrer-Policy": "same-origin", "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin", "Cross-Origin-Opener-Policy": "same-origin"}
_FORM = """<!doctype html><html lang="en"><meta charset="utf-8"><title>vlrl</title>
<link rel="icon" href="data:,">
<meta name="viewport" content="width=device-width, initial-scale=1"><style>:root {{color-scheme: light dark}}
body {{font: 16px system-ui, sans-serif; display: grid; place-items: center; min-height: 90vh; margin: 0}}
form {{display: grid; gap: .7em; width: 18em}} input, button {{font: inherit; padding: .5em}}
p {{color: #c33; margin: 0}}</style>
<form method="post" action="{action}"><label for="p">Password of this inspector</label>
<input id="p" name="password" type="password" autocomplete="current-password" autofocus required>{wrong}
<button>Open</button></form></html>"""


class Guard:
    """ASGI middleware that checks every request. `address` describes how browsers reach the app, `password` is asked
    for unless it is None, and `head` is HTML to insert into the <head> of the page."""

    def __init__(self, app: ASGIApp, address: Address, password: str | None, head: str):
        self.app, self.address = app, address
        self.password = password.encode() if password else None
        self.token = secrets.token_urlsafe(32)
        self._head = f"{head}</head>".encode()
        self._trying: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        """Client IP address -> lock, held while a password from this address is checked."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # no page opens a websocket
            return await send({"type": "websocket.close", "code": 1000})
        scope = self._below_root(scope)
        refusal = await self._refusal(scope, receive)
        if refusal is not None:
            return await refusal(scope, receive, self._with_headers(send))
        if scope["path"] == "/":  # Gradio would interpret `page` and `deep_link`
            return await self.app({**scope, "query_string": b""}, receive, self._page(send))
        await self.app(scope, receive, self._with_headers(send))

    def _below_root(self, scope: Scope) -> Scope:
        """Removes the proxy's path from the request's path, if the proxy kept it. The inspector's own paths below /vlrl
        stay unchanged, even if the proxy's path is /vlrl."""
        root, path = self.address.root_path, scope["path"]
        if not root or not path.startswith(f"{root}/") or _OWN.fullmatch(path):
            return scope
        raw = scope.get("raw_path") or b""
        return {**scope, "path": path[len(root):],
                "raw_path": raw[len(root):] if raw.startswith(f"{root}/".encode()) else raw}

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        headers, path = Headers(scope=scope), scope["path"]
        host, forwarded = headers.get("host", ""), headers.get("x-forwarded-host")
        named = host if forwarded is None else forwarded.partition(",")[0].strip()
        for name in (host, named):
            if not self.address.knows(name):
                return PlainTextResponse(f"This inspector is not served as {name[:200]!r}. If this is the name of "
                                         "your proxy, start the inspector with `vlrl app --allow-host NAME`.", 421)
        origin = headers.get("origin")
        if origin is not None and _netloc(origin) != named.lower():
            return PlainTextResponse("Requests from other sites are refused. A proxy must pass on the Host header of "
                                     "the browser, or send it as X-Forwarded-Host.", 403)
        if self.address.root_path and path == self.address.root_path:
            return self._redirect("/", scope)
        if path == LOGIN:
            return await self._login(Request(scope, receive))
        if not (path in _EXACT or path.startswith(_FOLDERS) or _GRADIO.fullmatch(path)):
            return PlainTextResponse("Not found", 404)
        if self.password is None or self._let_in(scope, headers):
            return None
        return self._redirect(LOGIN, scope) if path == "/" else PlainTextResponse("Log in first.", 401)

    def _redirect(self, path: str, scope: Scope) -> RedirectResponse:
        query = scope["query_string"].decode("latin-1")
        return RedirectResponse(f"{self.address.root_path}{path}{f'?{query}' if query else ''}", 303)

    def _let_in(self, scope: Scope, headers: Headers) -> bool:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(_cookie(scope))
        except CookieError:
            return False
        return morsel is not None and hmac.compare_digest(morsel.value.encode(), self.token.encode())

    async def _login(self, request: Request) -> Response:
        query, wrong = request.scope["query_string"].decode("latin-1"), ""
        if self.password is None:
            return RedirectResponse(f"{self.address.root_path}/", 303)
        if request.method == "POST":
            body = await _body(request)  # read before the lock is taken
            if body is None:
                return PlainTextResponse("The password did not arrive in time.", 408, {"Connection": "close"})
            password = parse_qs(body.decode("utf-8", "replace")).get("password", [""])[0]
            async with self._trying.setdefault((request.client or _NOBODY).host, asyncio.Lock()):  # one at a time
                if hmac.compare_digest(password.encode(), self.password):
                    answer = self._redirect("/", request.scope)
                    answer.headers["Set-Cookie"] = self._cookie_text(request)
                    return answer
                await asyncio.sleep(0.5)
            wrong = '<p role="alert">That is not the password.</p>'
        action = f"{self.address.root_path}{LOGIN}{f'?{query}' if query else ''}"
        return HTMLResponse(_FORM.format(action=html.escape(action), wrong=wrong))

    def _cookie_text(self, request: Request) -> str:
        """The Set-Cookie header of the login cookie. Browsers do not send a SameSite=Lax cookie from a frame on another
        site, so framing needs SameSite=None, which requires TLS. Partitioned limits the cookie to frames of that site.
        The origin is checked in any case."""
        said = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip() or request.url.scheme
        secure = "; Secure" if said == "https" else ""
        site = "None; Partitioned" if secure and self.address.frames else "Lax"
        return (f"{_cookie(request.scope)}={self.token}; HttpOnly; Path={self.address.root_path}/; "
                f"SameSite={site}{secure}")

    def _page(self, send: Send) -> Send:
        """Wraps `send`: inserts the guard's HTML into the <head> of the page, and adds the hashes of the page's inline
        scripts to the Content-Security-Policy."""
        start: list[Message] = []
        parts: list[bytes] = []

        async def changed(message: Message) -> None:
            if message["type"] == "http.response.start":
                start.append(message)
                return
            if message["type"] != "http.response.body":
                return
            parts.append(message.get("body", b""))
            if message.get("more_body"):
                return
            body = b"".join(parts).replace(b"</head>", self._head, 1)
            body = body.replace(b'href="/manifest.json"', b'href="./manifest.json"', 1)  # below the proxy's path
            headers = MutableHeaders(scope=start[0])
            if "content-length" in headers and headers["content-length"] != "0":
                headers["content-length"] = str(len(body))
            headers["Cache-Control"] = "no-store"
            await self._with_headers(send, _hashes(body))(start[0])
            await send({"type": "http.response.body", "body": body})

        return changed

    def _with_headers(self, send: Send, hashes: str = "") -> Send:
        frames = " ".join(self.address.frames)
        fixed = _HEADERS if frames else _HEADERS | {"X-Frame-Options": "DENY"}  # it cannot allow single origins

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in fixed.items():
                    headers[name] = value
                headers.setdefault("Content-Security-Policy",
                                   _POLICY.format(hashes=hashes, frames=frames or "'none'"))
            await send(message)

        return sending


def _hashes(body: bytes) -> str:
    digests = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _INLINE.findall(body))
    return "".join(f" 'sha256-{digest}'" for digest in digests)


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _cookie(scope: Scope) -> str:
    return f"vlrl-{(scope.get('server') or ('', 0))[1]}"


async def _body(request: Request, most: int = 10_000) -> bytes | None:
    body = b""
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(BODY_S):
            async for chunk in request.stream():
                body += chunk
                if len(body) > most:
                    return b""
            return body
    return None


LOCAL = ("127.0.0.1", "localhost", "::1")
_EVERYWHERE = ("0.0.0.0", "::")
_TAKEN = ("assets", "static", "gradio_api", "config")
_PATH = re.compile(r"(/[\w.~@:+-]+)+", re.ASCII)
_NAME = r"(?:(?:\*\.)?[a-z0-9_](?:[a-z0-9_.-]{0,250}[a-z0-9])?|\[[0-9a-f:.]+\])"
_ORIGIN = re.compile(rf"https?://{_NAME}(?::([0-9]{{1,5}}))?")


@dataclass(frozen=True)
class Address:
    """Where the inspector listens (`host`) and how browsers may reach it. `parsed` makes one from unvalidated texts."""

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
    """Validates the values of --host, --root-path, --allow-host and --allow-frame, and returns the Address. Raises
    ConfigError for an invalid value."""
    path = "/" + root_path.strip("/") if root_path.strip("/") else ""
    if path and (not _PATH.fullmatch(path) or {".", ".."} & set(path.split("/"))):
        raise ConfigError(f"--root-path {root_path} is not a path: write only the path under which the proxy serves "
                          "the inspector, such as /vlrl or /user/me/proxy/7860, and the proxy's name with --allow-host")
    if (first := path[1:].partition("/")[0]) in _TAKEN:
        raise ConfigError(f"--root-path {root_path}: /{first} is also a path of the inspector itself, which could not "
                          "be reached behind a proxy that strips the root path. Choose a root path that begins "
                          "with another word")
    return Address(host, path, tuple(map(_host, hosts)), tuple(map(_origin, frames)))


def exposing_option(address: Address) -> str:
    """The command line option (with its value) that makes the inspector reachable from other machines; "" if none."""
    if address.host not in LOCAL:
        return f"--host {address.host}"
    return next((f"--allow-host {name}" for name in address.hosts if name not in LOCAL), "")


def _host(text: str) -> str:
    name = text.strip().lower()
    if not re.fullmatch(_NAME, name) or ".." in name:
        raise ConfigError(f"--allow-host {text} is not a host name: write only the name that the browser shows, such "
                          "as box.example.org, without https://, port or path. *.example.org allows all subdomains")
    return name.strip("[]")


def _origin(text: str) -> str:
    """Validates an origin SCHEME://HOST[:PORT] and returns it in lower case. The result becomes part of a response
    header, so any other text raises ConfigError."""
    origin = text.strip().lower().rstrip("/")
    match = _ORIGIN.fullmatch(origin)
    if match is None or ".." in origin or not 0 < int(match[1] or 80) < 65536:
        raise ConfigError(f"--allow-frame {text} is not an origin: write only scheme, host and port of the page that "
                          "embeds the inspector, such as http://localhost:8888 or https://huggingface.co")
    return origin


def _written(name: str) -> str:
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        return ""
