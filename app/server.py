"""The web server of the inspector.

Every request first passes `Guard`. It checks the Host header (against DNS rebinding) and Origin (against cross-site
requests), asks for the password if one is set, and allows only the routes that the pages use. It also sets headers that
keep a page from running scripts in its content or contacting other servers.

Media come only from /vlrl/media, resolved by `vlrl.app.media`, with a type from a fixed table. /vlrl/film renders an
episode as GIF or MP4."""

import asyncio
import errno
import importlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gradio as gr
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, Response
from gradio.utils import get_upload_folder
from gradio_client.utils import is_file_obj_with_meta, traverse
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from vlrl.errors import ConfigError, RunError

from . import AppError, details, film
from .controls import key_dialog
from .guard import Address, Guard, exposing_option, parsed
from .html import STYLE, el, join, link
from .site import PAGES, Site

HERE = Path(__file__).parent
PORT = 7860
_PORTS = 50  # ports to try
_FONT = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "sans-serif"]
_MONO = ["ui-monospace", "SFMono-Regular", "Menlo", "Consolas", "monospace"]
TYPES = {".png": "image/png", ".jpg": "image/jpeg", ".jpeg": "image/jpeg", ".webp": "image/webp", ".gif": "image/gif",
         ".bmp": "image/bmp", ".tif": "image/tiff", ".tiff": "image/tiff", ".mp4": "video/mp4", ".m4v": "video/mp4",
         ".mkv": "video/x-matroska", ".webm": "video/webm", ".mov": "video/quicktime", ".avi": "video/x-msvideo"}
"""File name suffix -> media type; files with another suffix are not served."""
_STATIC = {"app.js": (("app.js", "plots.js", "pictures.js", "clips.js"), "text/javascript"),
           "app.css": ((STYLE, "app.css"), "text/css")}
"""Name in the URL -> the files to concatenate (in static/ unless they name a folder), and their media type."""
_HEAD = ('<link rel="icon" href="favicon.ico">'  # relative to the page, because of a proxy's path
         '<link rel="stylesheet" href="vlrl/static/app.css">'
         f'<script src="vlrl/static/app.js" data-pages="{" ".join(PAGES)}"></script>')
_MEDIA_HEADERS = {"Cache-Control": "private, max-age=3600", "Content-Security-Policy": "default-src 'none'; sandbox"}
_ABSENT = ('<svg xmlns="http://www.w3.org/2000/svg" width="320" height="200" viewBox="0 0 320 200"><rect width="320" '
           'height="200" fill="#8884"/><text x="160" y="105" text-anchor="middle" font-family="sans-serif" '
           'font-size="16" fill="#888">no picture stored</text></svg>')


def create(root: str | Path, *, address: Address | None = None, password: str | None = None,
           trust_tasks: bool = False) -> tuple[FastAPI, gr.Blocks]:
    """Builds the ASGI app for a folder of runs; returns the app and its Gradio part. `address` describes how browsers
    reach the app, by default only from this machine. If `password` is None, none is asked for. `trust_tasks` permits
    running code that the runs name. Raises RunError if the folder is missing."""
    from .index import Index
    from .library import Library
    from .media import MediaStore
    from .notes import Notes
    if not Path(root).is_dir():
        raise RunError(f"{str(root)!r} is not a folder: name a folder of runs, e.g. `vlrl app runs`")
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    library = Library(root)
    site = Site(library, Index(library), MediaStore(library), Notes(root), trust_tasks)
    address = address or Address()
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    _add_files(app, site)
    with ThreadPoolExecutor(1) as pool:  # this thread may have a running event loop already
        interface = pool.submit(asyncio.run, _mounted(app, site, address.root_path)).result()
    app.add_middleware(Guard, address=address, password=password, head=_HEAD + _in_view())
    app.add_middleware(_Compression)
    return app, interface


def serve(root: str | Path, *, host: str = "127.0.0.1", port: int | None = None, password: str | None = None,
          trust_tasks: bool = False, root_path: str = "", allow_hosts: Sequence[str] = (),
          allow_frames: Sequence[str] = (), started: Callable[[str, int], None] | None = None) -> None:
    """Serves the inspector until Ctrl-C, on `port` or by default on the first free port from 7860 on. Calls
    `started(url, port)` once the port is open. For `root_path`, `allow_hosts` and `allow_frames` see guard.Address.
    Raises ConfigError for an invalid address, for a `host` that is not an address of this machine, and for remote
    access without a password. Raises RunError if no port is free, and KeyboardInterrupt on Ctrl-C."""
    address = parsed(host, root_path, tuple(allow_hosts), tuple(allow_frames))
    if (option := exposing_option(address)) and not password:
        raise ConfigError(f"{option} allows remote access: set a password in the environment variable "
                          f"VLRL_APP_PASSWORD or with --password, or leave {option.split()[0]} out")
    with _uploads(), _listening(host, port) as listener:
        app, _ = create(root, address=address, password=password, trust_tasks=trust_tasks)
        taken = listener.getsockname()[1]
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False,
                                               timeout_graceful_shutdown=1))
        if started:
            name = "127.0.0.1" if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
            started(f"http://{name}:{taken}{address.root_path}/", taken)
        server.run(sockets=[listener])


class _Compression:
    """ASGI middleware that compresses pages, data and scripts. Event streams are not compressed, because they must not
    be buffered; nor are clips, which are requested by byte range."""

    def __init__(self, app: ASGIApp):
        self.app, self.zipped = app, GZipMiddleware(app, minimum_size=2000, compresslevel=6)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        wanted = scope["type"] == "http" and (path.endswith(("/", "/run/predict")) or "/vlrl/static/" in path)
        await (self.zipped if wanted else self.app)(scope, receive, send)


async def _mounted(app: FastAPI, site: Site, root_path: str) -> gr.Blocks:
    """Builds the Gradio part and mounts it in `app`. Must run in an event loop, because Gradio would otherwise open a
    loop and leave it open."""
    interface = blocks(site)
    interface.queue(max_size=32, default_concurrency_limit=4, api_open=False)
    gr.mount_gradio_app(app, interface, path="/", root_path=root_path or None, footer_links=[], run_history=False,
                        show_error=False, ssr_mode=False, pwa=False, mcp_server=False, max_file_size="500mb",
                        enable_monitoring=False, theme=gr.themes.Base(font=_FONT, font_mono=_MONO))
    return interface


def _add_files(app: FastAPI, site: Site) -> None:
    @app.get("/vlrl/media")
    def media(request: Request, run: str = "", name: str = "", size: int | None = None, at: float | None = None
              ) -> Response:
        try:
            if size is not None:
                most = min(max(size, 16), 2048)
                small = (site.media.thumbnail(run, name, most) if at is None else
                         site.media.frames(run, name, [at], most)[0])
                return Response(small, media_type="image/jpeg", headers=_MEDIA_HEADERS)
            path = site.media.resolve(run, name)
            return FileResponse(path, media_type=TYPES[path.suffix.lower()], headers=_MEDIA_HEADERS)
        except (AppError, KeyError, OSError):
            return _absent(request.headers.get("sec-fetch-dest", ""))

    @app.get("/vlrl/film")
    def episode(run: str = "", source: str = "train", split: str = "", step: int = 0, group: str = "", rollout: int = 0,
                kind: str = "gif") -> Response:
        try:
            view = details.group(site.library, run, source, step, group, split)
            one = next((r for r in view.rollouts if r.index == rollout), None)
            if one is None:
                raise AppError(f"group {group!r} has no answer {rollout}")
            data = film.rendered(site.media, view, one, kind)
            called = {"Content-Disposition": f'attachment; filename="{film.file_name(view, one, kind)}"'}
            return Response(data, media_type=film.KINDS[kind], headers=_MEDIA_HEADERS | called)
        except (AppError, KeyError, OSError) as error:
            return Response(f"no film: {error}", status_code=404, media_type="text/plain")

    @app.get("/vlrl/static/{name}")
    def own(name: str) -> Response:
        if name not in _STATIC:
            return Response("no such file", status_code=404, media_type="text/plain")
        files, kind = _STATIC[name]
        text = "\n".join((HERE / "static" / file).read_text() for file in files)
        return Response(text, media_type=kind, headers={"Cache-Control": "no-cache"})


def _absent(destination: str) -> Response:
    """The response for missing media. An <img> or <video> element (`destination` "image" or "video") gets an empty
    image or video, because browsers log every 404. Any other request gets a 404."""
    if destination == "image":
        return Response(_ABSENT, media_type="image/svg+xml", headers=_MEDIA_HEADERS | {"Cache-Control": "no-store"})
    if destination == "video":
        return Response(b"", media_type="video/mp4", headers={"Cache-Control": "no-store"})
    return Response("no such picture or video", status_code=404, media_type="text/plain")


def _in_view() -> str:
    shown = ", ".join(f'html[data-page="{page}"] #v-page-{page}' for page in PAGES)
    return f"<style>.v-screen, .v-hidden {{display: none !important}} {shown} {{display: flex !important}}</style>"


@contextmanager
def _listening(host: str, port: int | None) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener, error = None, None
    for number in range(PORT, PORT + _PORTS) if port is None else (port,):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(64)
            break
        except OSError as failed:
            listener.close()
            listener, error = None, failed
            if not isinstance(failed, socket.gaierror) and failed.errno in (errno.EADDRINUSE, errno.EACCES):
                continue
            raise ConfigError(f"--host {host} --port {number} cannot be used: {failed.strerror or failed}. Choose "
                              "an address of this machine and a port from 1024 on") from None
    if listener is None:
        raise RunError(f"no free port from {PORT} to {PORT + _PORTS - 1} ({error}): choose another port with --port"
                       if port is None else
                       f"--port {port} is taken ({error}): choose another port, or omit --port to use the first free "
                       "port")
    with listener:
        yield listener


@contextmanager
def _uploads() -> Iterator[None]:
    folder, before = tempfile.mkdtemp(prefix="vlrl-app-"), os.environ.get("GRADIO_TEMP_DIR")
    os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        yield
    finally:
        os.environ.pop("GRADIO_TEMP_DIR")
        if before is not None:
            os.environ["GRADIO_TEMP_DIR"] = before
        shutil.rmtree(folder, ignore_errors=True)


KEYS = (("j ↓", "next row of the list; j in a group: the next group"), ("k ↑", "the row or group before"),
        ("Enter", "open the row"), ("h ←", "the answer before"), ("l →", "the next answer"),
        ("u Esc", "back to the list"), ("g b s", "flag the answer: good, bad, unsure; then comes the next"),
        ("c", "comment on the answer"),
        ("a", "what the open answer says at its end"),
        ("r", "read: one answer as written and as Markdown; once more: all of them"),
        ("o", "order of the answers: as drawn, best first, worst first"), ("y", "while reading: copy the answer"),
        ("t", "the turns of an episode: ← → move"),
        ("n p", "next page of the list, the one before"), ("/", "search"),
        ("← → ↑ ↓", "in a plot: from point to point and curve to curve; Enter opens"),
        ("+ - 0", "in a plot: nearer, farther, all"), ("?", "these keys"))


class Pages(gr.Blocks):
    """Gradio blocks that reject file arguments which are not uploads. Gradio only checks file arguments in an app that
    Gradio launches itself. Without this check, a request could make Gradio copy any file of this machine, or of a
    web address, into its cache and serve the copy."""

    async def preprocess_data(self, block_fn: Any, inputs: list[Any], *args: Any, **options: Any) -> Any:
        traverse(inputs, _uploaded, is_file_obj_with_meta)
        return await super().preprocess_data(block_fn, inputs, *args, **options)


def _uploaded(file: dict[str, Any]) -> dict[str, Any]:
    """Returns the file argument unchanged. Raises AppError if the file is not in the upload folder."""
    try:
        inside = Path(file["path"]).resolve().is_relative_to(Path(get_upload_folder()).resolve())
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise AppError("A request named a file that was not uploaded: upload the file first.")
    return file


def blocks(site: Site) -> gr.Blocks:
    """Builds the whole Gradio app. static/app.js selects the page that is visible."""
    with Pages(title="vlrl", analytics_enabled=False, fill_width=True) as app:
        links = [el("li", link({"page": name}, name.title(), class_=f"v-tab v-tab-{name}")) for name in PAGES]
        title = el("div", el("h1", "vlrl"), el("h2", "", id="v-title"), class_="v-unseen")  # app.js names the page
        gr.HTML(join([title, el("nav", el("ul", *links), class_="v v-nav", aria_label="Pages")]), elem_id="v-top",
                apply_default_css=False)
        gr.HTML(key_dialog(KEYS), apply_default_css=False)
        site.begin_all()
        for name in PAGES:
            with gr.Column(elem_id=f"v-page-{name}", elem_classes="v-screen") as column:
                site.begin(name)
                importlib.import_module(f"{__package__}.pages.{name}").build(site)
            site.end(name, column)
    return app
