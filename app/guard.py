"""Who may ask the inspector for what: address, origin, password, routes and the headers of every answer.

The Content-Security-Policy names the page's own inline scripts by their hash, so a script that got into the page with a
rollout's text would not run. Gradio compiles its templates, which needs 'unsafe-eval'; no text of a run is in them.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import html
import ipaddress
import re
import secrets
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOGIN = "/vlrl/login"
_EVERYWHERE = ("0.0.0.0", "::")
_EXACT = {"/", "/config", "/theme.css", "/favicon.ico", "/manifest.json", "/robots.txt"}
_FOLDERS = ("/assets/", "/static/", "/vlrl/")
_GRADIO = re.compile(r"/gradio_api/(queue/(join|data)|run/predict|cancel|reset|component_server|startup-events|upload|"
                     r"upload_progress|heartbeat/\w+|app_id|theme\.css|stream/[\w./-]+|file=/[^:]*)/?")
_INLINE = re.compile(rb"<script(?:\s+[\w-]+)*\s*>(.*?)</script>", re.S)
_POLICY = ("default-src 'none'; script-src 'self' 'unsafe-eval'{hashes}; style-src 'self' 'unsafe-inline'; "
           "img-src 'self' data: blob:; media-src 'self' blob:; font-src 'self' data:; connect-src 'self'; "
           "worker-src 'self' blob:; manifest-src 'self'; base-uri 'self'; form-action 'self'; "
           "frame-ancestors 'none'; object-src 'none'")
_HEADERS = {"Referrer-Policy": "same-origin", "X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY",
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
    """ASGI middleware. `host` is the address the app is served under; `head` is HTML for the head of the page."""

    def __init__(self, app: ASGIApp, host: str, password: str | None, head: str):
        self.app = app
        self.password = password.encode() if password else None
        self.token = secrets.token_urlsafe(32)
        self._hosts = None if host in _EVERYWHERE else {"127.0.0.1", "localhost", "::1", host.lower()}
        self._head = f"{head}</head>".encode()
        self._trying = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # no page opens a websocket
            return await send({"type": "websocket.close", "code": 1000})
        refusal = await self._refusal(scope, receive)
        if refusal is not None:
            return await refusal(scope, receive, _with_headers(send))
        if scope["path"] == "/":  # to Gradio, `page` and `deep_link` would mean something else
            return await self.app({**scope, "query_string": b""}, receive, self._page(send))
        await self.app(scope, receive, _with_headers(send))

    async def _refusal(self, scope: Scope, receive: Receive) -> Response | None:
        """Returns what is answered instead of passing a request on; None lets it through."""
        headers, path = Headers(scope=scope), scope["path"]
        host = headers.get("host", "")
        if not self._known(host):
            return PlainTextResponse(f"This inspector is not served as {host[:200]!r}.", 421)
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            return PlainTextResponse("Requests of other sites are refused.", 403)
        if path == LOGIN:
            return await self._login(Request(scope, receive))
        if not (path in _EXACT or path.startswith(_FOLDERS) or _GRADIO.fullmatch(path)):
            return PlainTextResponse("Not found", 404)
        if self.password is None or self._let_in(scope, headers):
            return None
        query = scope["query_string"].decode("latin-1")
        return RedirectResponse(f"{LOGIN}?{query}", 303) if path == "/" else PlainTextResponse("Log in first.", 401)

    def _known(self, host: str) -> bool:
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        # served to everybody, a machine has many names; a rebound one comes without the cookie of the password
        return bool(name) and (self._hosts is None or name in self._hosts or _same_address(name, self._hosts))

    def _let_in(self, scope: Scope, headers: Headers) -> bool:
        try:
            morsel = SimpleCookie(headers.get("cookie", "")).get(_cookie(scope))
        except CookieError:
            return False
        return morsel is not None and hmac.compare_digest(morsel.value.encode(), self.token.encode())

    async def _login(self, request: Request) -> Response:
        query, wrong = request.scope["query_string"].decode("latin-1"), ""
        if self.password is None:
            return RedirectResponse("/", 303)
        if request.method == "POST":
            async with self._trying:  # one guess at a time
                password = parse_qs((await _body(request)).decode("utf-8", "replace")).get("password", [""])[0]
                if hmac.compare_digest(password.encode(), self.password):
                    answer = RedirectResponse(f"/?{query}" if query else "/", 303)
                    answer.set_cookie(_cookie(request.scope), self.token, httponly=True, samesite="lax", path="/")
                    return answer
                await asyncio.sleep(0.5)
            wrong = '<p role="alert">That is not the password.</p>'
        return HTMLResponse(_FORM.format(action=html.escape(f"{LOGIN}?{query}" if query else LOGIN), wrong=wrong))

    def _page(self, send: Send) -> Send:
        """Adds to the head of the page and, to its policy, the hashes of its inline scripts."""
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
            headers = MutableHeaders(scope=start[0])
            if "content-length" in headers and headers["content-length"] != "0":
                headers["content-length"] = str(len(body))
            headers["Cache-Control"] = "no-store"
            await _with_headers(send, _hashes(body))(start[0])
            await send({"type": "http.response.body", "body": body})

        return changed


def _hashes(body: bytes) -> str:
    digests = (base64.b64encode(hashlib.sha256(script).digest()).decode() for script in _INLINE.findall(body))
    return "".join(f" 'sha256-{digest}'" for digest in digests)


def _with_headers(send: Send, hashes: str = "") -> Send:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in _HEADERS.items():
                headers[name] = value
            headers.setdefault("Content-Security-Policy", _POLICY.format(hashes=hashes))
        await send(message)

    return sending


def _same_address(name: str, hosts: set[str]) -> bool:
    """Returns whether a name is one of the addresses, written otherwise."""
    try:
        return str(ipaddress.ip_address(name)) in hosts
    except ValueError:
        return False


def _cookie(scope: Scope) -> str:
    return f"vlrl-{(scope.get('server') or ('', 0))[1]}"


async def _body(request: Request, most: int = 10_000) -> bytes:
    body = b""
    async for chunk in request.stream():
        body += chunk
        if len(body) > most:
            return b""
    return body
