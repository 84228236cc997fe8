"""A reverse proxy as people put before an inspector: it passes on every request and streams every answer."""

import html
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

METHODS = ["GET", "POST", "HEAD", "OPTIONS"]
_OF_THE_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "content-length"}


def proxy(target: str, prefix: str = "", cut: bool = True, names_host: str = "") -> Starlette:
    """Returns an ASGI app that serves `target` below `prefix`, and nothing elsewhere.

    `cut` takes the prefix off, as nginx does with a "/" at the end of proxy_pass; else it is passed on. With
    `names_host` it asks under its own name, the target's, and says the browser's in that header."""
    @asynccontextmanager
    async def living(app: Starlette) -> AsyncIterator[None]:
        async with httpx.AsyncClient(base_url=target, timeout=None, trust_env=False) as app.state.client:
            yield

    async def passed_on(request: Request) -> Response:
        headers = [(k, v) for k, v in request.headers.raw if k.decode() not in _OF_THE_HOP]
        if names_host:
            headers = [(k, v) for k, v in headers if k != b"host"]
            headers += [(names_host.encode(), request.headers["host"].encode())]
        path = request.url.path[len(prefix) if cut else 0:] or "/"
        asked = request.app.state.client.build_request(
            request.method, f"{path}?{request.url.query}" if request.url.query else path, headers=headers,
            content=await request.body() if request.method == "POST" else None)
        answer = await request.app.state.client.send(asked, stream=True)
        passed = StreamingResponse(answer.aiter_raw(), answer.status_code)
        passed.raw_headers = [(k.lower(), v) for k, v in answer.headers.raw if k.decode().lower() not in _OF_THE_HOP]
        return passed

    paths = [f"{prefix}/{{path:path}}", *([prefix] if prefix else [])]
    return Starlette(routes=[Route(path, passed_on, methods=METHODS) for path in paths], lifespan=living)


def framing() -> Starlette:
    """Returns an ASGI app whose only page holds the address in its query in a frame."""
    async def page(request: Request) -> Response:
        return HTMLResponse('<!doctype html><link rel="icon" href="data:,">'
                            f'<iframe src="{html.escape(request.query_params["at"])}" width="1200" height="800">'
                            '</iframe>')

    return Starlette(routes=[Route("/", page)])
