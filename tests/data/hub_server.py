"""A small Hub of data sets on this machine: the routes of the real one that `huggingface_hub` uses to read them."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

_INFO = re.compile(r"/api/datasets/([^/]+/[^/]+)(?:/revision/([^?]+))?")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """Data sets by name: commits, each a dictionary of files, and revisions that name them."""

    def __init__(self, url: str):
        self.url = url
        self.asked: list[str] = []
        self.commits: dict[str, dict[str, tuple[Mapping[str, bytes], Any]]] = {}
        self.revisions: dict[str, dict[str, str]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}
        """Name -> status and X-Error-Code."""
        self.private: dict[str, bool] = {}
        """Of those that were made here."""

    def put(self, name: str, files: Mapping[str, bytes], card: Any = None, revision: str = "main") -> str:
        """Commits files; returns the commit."""
        commit = hashlib.sha1(json.dumps([name, sorted(files), len(self.commits.get(name, ()))]).encode()).hexdigest()
        self.commits.setdefault(name, {})[commit] = (files, card)
        self.revisions.setdefault(name, {})[revision] = commit
        return commit

    def take(self, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
        """What the library sends to make a data set and to commit files; status and answer."""
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked['organization']}/{asked['name']}"
            self.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            if name in self.refusals:
                return self.refusals[name][0], {"error": "no"}
            return 200, {"url": f"{self.url}/datasets/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        found = re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/(preupload|commit)/main.*", path)
        if not found:
            return 404, {}
        if found[2] == "preupload":
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        lines = [json.loads(line) for line in body.splitlines()]
        files = {one["value"]["path"]: base64.b64decode(one["value"]["content"])
                 for one in lines if one["key"] == "file"}
        card = yaml.safe_load(files["README.md"].decode().split("---")[1]) if "README.md" in files else None
        commit = self.put(found[1], files, card)
        url = f"{self.url}/datasets/{found[1]}/commit/{commit}"
        return 200, {"commitOid": commit, "commitUrl": url, "success": True}

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        found = _INFO.fullmatch(path) or _FILE.fullmatch(path)
        if not found:
            return 404, {}, b""
        name, revision = found[1], (found[2] or "main").replace("%2F", "/")
        if name in self.refusals:
            status, code = self.refusals[name]
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        if name not in self.commits:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = self.revisions[name].get(revision, revision)
        if commit not in self.commits[name]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files, card = self.commits[name][commit]
        if found.re is _INFO:
            info = {"id": name, "sha": commit, "private": False, "tags": [], "downloads": 0, "likes": 0,
                    "siblings": [{"rfilename": file} for file in files], **({"cardData": card} if card else {})}
            return 200, {"Content-Type": "application/json"}, json.dumps(info).encode()
        if found[3] not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        etag = hashlib.sha256(files[found[3]]).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, files[found[3]]


@contextmanager
def hub() -> Iterator[Hub]:
    """Serves a Hub until the block ends."""
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.asked.append(f"{self.command} {self.path}")
            status, headers, body = served.answer(self.path)
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            served.asked.append(f"{self.command} {self.path}")
            status, found = served.take(self.path, self.rfile.read(int(self.headers.get("Content-Length") or 0)))
            body = json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()


def use(monkeypatch: pytest.MonkeyPatch, url: str, offline: bool = False) -> None:
    """Points the library of this process at a Hub, as HF_ENDPOINT and HF_HUB_OFFLINE do when it is imported."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
