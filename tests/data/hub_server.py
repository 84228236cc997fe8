"""A small Hub on this machine: the routes of the real one by which `huggingface_hub` reads data sets, and makes and
fills repositories of data sets and models, large files by LFS."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import yaml

_INFO = re.compile(r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/([^?]+))?")
_TREE = re.compile(r"/api/(?:datasets|models)/([^/]+/[^/]+)/tree/main(?:\?.*)?")
_FILE = re.compile(r"/datasets/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


class Hub:
    """Repositories by name: commits, each a dictionary of files, and revisions that name them."""

    def __init__(self, url: str):
        self.url = url
        self.asked: list[str] = []
        self.commits: dict[str, dict[str, tuple[Mapping[str, bytes], Any]]] = {}
        self.revisions: dict[str, dict[str, str]] = {}
        self.refusals: dict[str, tuple[int, str]] = {}  # name -> status and X-Error-Code
        self.private: dict[str, bool] = {}  # of those that were made here
        self.tokens: set[str] | None = None  # those that may write; None = any
        self.large = 10**9  # files of so many bytes are sent by LFS
        self.objects: dict[str, bytes] = {}  # by their sha256
        self.cuts = 0  # uploads of objects that are cut off from now on
        self.received: list[bytes] = []  # every request line, header and body that came to write

    def head(self, name: str) -> Mapping[str, bytes]:
        """The files of the newest commit."""
        return self.commits[name][self.revisions[name]["main"]][0] if name in self.commits else {}

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
            if name in self.private:
                return 409, {"url": f"{self.url}/{name}", "name": name, "error": "exists"}
            self.private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            if name in self.refusals:
                return self.refusals[name][0], {"error": "no"}
            return 200, {"url": f"{self.url}/datasets/{name}", "name": name}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._object(one) for one in json.loads(body)["objects"]]}
        found = re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)/(preupload|commit)/main.*", path)
        if not found:
            return 404, {}
        if found[2] == "preupload":
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "shouldIgnore": False,
                                    "uploadMode": "lfs" if f["size"] >= self.large else "regular"} for f in files]}
        commit = self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        url = f"{self.url}/datasets/{found[1]}/commit/{commit}"
        return 200, {"commitOid": commit, "commitUrl": url, "success": True}

    def _object(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """What is said of an object before it is sent; one that is there needs no upload."""
        there = asked["oid"] in self.objects
        actions = {} if there else {"actions": {"upload": {"href": f"{self.url}/lfs/{asked['oid']}"}}}
        return {"oid": asked["oid"], "size": asked["size"], **actions}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> str:
        files = dict(self.head(name))
        for kind, value in ((line["key"], line["value"]) for line in lines):
            if kind == "deletedFile":
                del files[value["path"]]
            elif kind in ("file", "lfsFile"):
                files[value["path"]] = (base64.b64decode(value["content"]) if kind == "file"
                                        else self.objects[value["oid"]])
        card = yaml.safe_load(files["README.md"].decode().split("---")[1]) if "README.md" in files else None
        return self.put(name, files, card)

    def answer(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body."""
        if tree := _TREE.fullmatch(path):
            listed = [{"type": "file", "path": file, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                      for file, data in self.head(tree[1]).items()]
            return said(listed)
        found = _INFO.fullmatch(path) or _FILE.fullmatch(path)
        if not found:
            return 404, {}, b""
        name, revision = found[1], (found[2] or "main").replace("%2F", "/")
        if name in self.refusals:
            status, code = self.refusals[name]
            return status, {"X-Error-Code": code} if code else {}, b"{}"
        if name not in self.commits and name in self.private and found.re is _INFO:
            return said({"id": name, "private": self.private[name], "tags": [], "siblings": []})
        if name not in self.commits:
            return 404, {"X-Error-Code": "RepoNotFound"}, b"{}"
        commit = self.revisions[name].get(revision, revision)
        if commit not in self.commits[name]:
            return 404, {"X-Error-Code": "RevisionNotFound"}, b"{}"
        files, card = self.commits[name][commit]
        if found.re is _INFO:
            return said({"id": name, "sha": commit, "private": self.private.get(name, False), "tags": [],
                         "downloads": 0, "likes": 0, "siblings": [{"rfilename": file} for file in files],
                         **({"cardData": card} if card else {})})
        if found[3] not in files:
            return 404, {"X-Error-Code": "EntryNotFound"}, b""
        etag = hashlib.sha256(files[found[3]]).hexdigest()
        return 200, {"X-Repo-Commit": commit, "ETag": f'"{etag}"'}, files[found[3]]


def said(value: Any) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()


@contextmanager
def hub() -> Iterator[Hub]:
    """Serves a Hub until the block ends."""
    class Handler(BaseHTTPRequestHandler):
        disable_nagle_algorithm = True  # its answers are written in two parts

        def do_GET(self) -> None:
            served.asked.append(f"{self.command} {self.path}")
            status, headers, body = served.answer(self.path)
            self._say(status, body, headers)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            served.asked.append(f"{self.command} {self.path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            served.received += [f"{self.requestline}\n{self.headers}".encode(), body]
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            if served.tokens is not None and token not in served.tokens:
                status, found = 401, {"error": "Invalid credentials in Authorization header"}
            else:
                status, found = served.take(self.path, body)
            self._say(status, json.dumps(found).encode())

        def do_PUT(self) -> None:
            served.asked.append(f"{self.command} {self.path}")
            size = int(self.headers.get("Content-Length") or 0)
            if served.cuts:
                served.cuts -= 1
                self.rfile.read(size // 2)
                self.connection.shutdown(socket.SHUT_RDWR)
                self.close_connection = True
                return
            body = self.rfile.read(size)
            served.received += [f"{self.requestline}\n{self.headers}".encode(), body]
            served.objects[hashlib.sha256(body).hexdigest()] = body
            self._say(200, b"")

        def _say(self, status: int, body: bytes, headers: Mapping[str, str] = {}) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
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
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # else large files go to a storage of its own protocol
