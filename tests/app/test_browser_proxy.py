"""The inspector behind a real reverse proxy and in a frame, in a real browser."""

import contextlib
import html
import re
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import expect
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from tests.app.conftest import UPLOADING, WAIT_MS, listening, opened, serving
from vlrl.app.guard import parsed

DOCS = Path(__file__).resolve().parents[2] / "docs"
NGINX = """daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log;
events {{}}
http {{
    access_log off; client_body_buffer_size 9m; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
    server {{
        listen 127.0.0.1:{port} ssl; ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
{location} }}
}}"""
RETRIED = "error: Failed to load resource: net::ERR_TOO_MANY_RETRIES"
"""nginx may close a connection that Chromium is about to use again; what the page needs is looked for all the same."""
pytestmark = [pytest.mark.browser, pytest.mark.slow]


def look_around(page, address):
    """Curves, a list, a group with its picture, and a file that is made: whatever has an address of its own."""
    page.goto(f"{address}?page=runs&runs=boxes")
    expect(page.locator("#v-curves .v-plot .v-drawn").first).to_be_visible()
    page.locator(".v-tab-rollouts").click()
    page.goto(f"{address}?page=rollouts&run=boxes&order=best")
    expect(page.locator("#v-list .v-count")).to_contain_text("16 groups")
    page.wait_for_function("document.querySelector('.v-row img')?.naturalWidth > 0")
    page.locator(".v-row").first.click()
    expect(page.locator(".v-group").first).to_be_visible()
    page.goto(f"{address}?page=notes&pick=filter&run=boxes")
    page.locator("#v-export-make").click()
    expect(page.locator("#v-export")).to_contain_text("rollouts, ")
    with page.expect_download() as download:
        page.locator("#v-export-file").click()
    assert download.value.path().read_text().startswith("{") and page.url.startswith(address)


@pytest.mark.parametrize("cut", [True, False])
def test_below_a_path(chromium, runs, cut):
    with (serving(runs, address=parsed("127.0.0.1", "/user/me/proxy/7860")) as inner,
          listening(proxy(inner, "/user/me/proxy/7860", cut)) as port, opened(chromium) as page):
        look_around(page, f"http://127.0.0.1:{port}/user/me/proxy/7860/")


@pytest.mark.parametrize("names_host", ["", "x-forwarded-host"])
def test_under_a_name_of_its_own_with_a_password(chromium, runs, names_host):
    name = "box.localhost"  # which a browser looks up on this machine
    with (serving(runs, address=parsed("127.0.0.1", "/vlrl", (name,)), password="sesame") as inner,
          listening(proxy(inner, "/vlrl", names_host=names_host)) as port, opened(chromium, name) as page):
        page.goto(f"http://{name}:{port}/vlrl?page=rollouts&run=boxes")
        page.get_by_label("Password").fill("sesame")
        page.get_by_role("button").click()
        expect(page.locator("#v-list .v-count")).to_contain_text("16 groups")
        if not names_host:  # what else has an address does not depend on who names the host
            look_around(page, f"http://{name}:{port}/vlrl/")


def test_a_frame_shows_it_to_a_page_that_may_hold_it(chromium, runs):
    with listening(framing()) as port:
        holder = f"http://127.0.0.1:{port}"
        with serving(runs, address=parsed("127.0.0.1", frames=(holder,))) as inner, opened(chromium) as page:
            page.goto(f"{holder}/?at={inner}?page=rollouts%26run=boxes")
            expect(page.frame_locator("iframe").locator("#v-list .v-count")).to_contain_text("16 groups")
        other = holder.replace("127.0.0.1", "localhost")  # the same page by another origin
        for frames, at in (((), holder), ((holder,), other)):
            with serving(runs, address=parsed("127.0.0.1", frames=frames)) as inner, chromium.new_page() as page:
                said = []
                page.on("console", lambda message, said=said: said.append(message.text))
                page.goto(f"{at}/?at={inner}", wait_until="load")
                page.wait_for_timeout(200)
                assert [text for text in said if "frame-ancestors" in text], said
                assert not page.frame_locator("iframe").locator("#v-top").count()


@contextlib.contextmanager
def nginx(folder, location):
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=box",
                    "-keyout", folder / "key.pem", "-out", folder / "cert.pem"], check=True, capture_output=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=port, location=location))
    process = subprocess.Popen(["nginx", "-p", folder, "-c", folder / "nginx.conf"])
    try:
        end = time.monotonic() + WAIT_MS / 1000
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            assert process.poll() is None and time.monotonic() < end, (folder / "error.log").read_text()
            time.sleep(0.05)
        yield port
    finally:
        process.terminate()
        process.wait(30)


@pytest.mark.skipif(not (shutil.which("nginx") and shutil.which("openssl")), reason="no nginx, or no openssl")
def test_behind_nginx_with_tls_as_the_page_in_docs_says(chromium, runs, tmp_path):
    [location] = re.findall(r"```nginx\n(.*?)```", (DOCS / "inspector.md").read_text(encoding="utf-8"), re.S)
    name = "box.localhost"
    with (serving(runs, address=parsed("127.0.0.1", "/vlrl", (name,)), password="sesame") as inner,
          nginx(tmp_path, location.replace("http://127.0.0.1:7860/", inner)) as port,
          opened(chromium, name, allowed=(UPLOADING, RETRIED), ignore_https_errors=True) as page):
        address = f"https://{name}:{port}/vlrl/"
        page.goto(f"{address}?page=rollouts&run=boxes")
        page.get_by_label("Password").fill("sesame")
        page.get_by_role("button").click()
        expect(page.locator("#v-list .v-count")).to_contain_text("16 groups")
        assert page.context.cookies()[0]["secure"] and page.context.cookies()[0]["path"] == "/vlrl/"
        look_around(page, address)


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
