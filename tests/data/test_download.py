"""URLs of media, against real servers of this machine. A test's guard alone lets loopback addresses through."""

import asyncio
import gzip
import hashlib
import ipaddress
import json
import shutil
import socket
import ssl
import subprocess
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from tests.data.sets import encoded
from vlrl.config import validate
from vlrl.config.schema import DataSettings, LimitsSettings
from vlrl.config.url_entries import redacted
from vlrl.data import sample_from_row
from vlrl.data.media import MediaAccess, load
from vlrl.data.sources import download
from vlrl.data.sources.download import AddressGuard, Policy, checked_url, fetched_file, is_public
from vlrl.errors import ConfigError, DataError, RunError
from vlrl.types import Media

LOOPBACK = AddressGuard(permits=lambda address: address.is_loopback, any_port=True)
png = partial(encoded, "red", (6, 4))


class Handler(BaseHTTPRequestHandler):
    """Answers with what `server.pages` has for the path: (status, headers, body or function of the handler)."""

    disable_nagle_algorithm = True  # its answers are written in two parts

    def do_GET(self):
        self.server.asked.append((self.path, dict(self.headers)))
        page = self.server.pages[self.path]
        status, headers, body = page(self) if callable(page) else page
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        try:
            body(self) if callable(body) else self.wfile.write(body)
        except OSError:  # the other side has had enough
            self.server.left.set()

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, pages, context=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.pages, self.asked, self.left = pages, [], threading.Event()
        if context:
            self.socket = context.wrap_socket(self.socket, server_side=True)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, request, client_address):
        pass

    def url(self, path="/a.png", host="127.0.0.1", scheme="http"):
        return f"{scheme}://{host}:{self.server_address[1]}{path}"


@pytest.fixture
def serve():
    servers = []

    def start(pages, context=None):
        servers.append(Server(pages, context))
        return servers[-1]
    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def policy(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "_PAUSE_S", 0.05)
    return lambda *hosts, guard=LOOPBACK: Policy(hosts or ("http://127.0.0.1",), tmp_path / "cache", guard)


def get(url, policy, most=1_000_000, seconds=60):
    return fetched_file(checked_url(url, policy), most, seconds)


def loaded(url, policy, **limits):
    return load(Media(source=checked_url(url, policy)), LimitsSettings(**limits))


@contextmanager
def saying(*answers):
    """A port of this machine where each connection gets one of these answers."""
    with socket.create_server(("127.0.0.1", 0)) as ear:
        def talk():
            for answer in answers:
                connection, _ = ear.accept()
                connection.recv(1000)
                connection.sendall(answer)
                connection.close()
        threading.Thread(target=talk, daemon=True).start()
        yield ear.getsockname()[1]


def kept(policy):
    return sorted(p.name for p in (policy.cache / "media").glob("*")) if policy.cache.exists() else []


PRIVATE = """127.0.0.1 127.255.255.254 0.0.0.0 0.1.2.3 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1
    192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 192.88.99.1
    :: ::1 ::127.0.0.1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 64:ff9b::127.0.0.1 64:ff9b::169.254.169.254 64:ff9b:1::8.8.8.8
    2002:7f00:1:: 2002:a00:1::1 fe80::1 fec0::1 fc00::1 fd12::1 ff02::1 2001::1 2001:db8::1 100::1 4000::1""".split()
PUBLIC = "8.8.8.8 93.184.216.34 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::8.8.8.8 2002:808:808::1".split()


def test_addresses_and_entries_of_the_setting():
    assert [a for a in (*PRIVATE, *PUBLIC) if is_public(ipaddress.ip_address(a))] == PUBLIC
    for entry in ("", "https://a.org/path", "a.org:99999", "*", "u@a.org", "2130706433", "ftp://a.org"):
        with pytest.raises(ConfigError, match=r"data\.urls"):
            validate({"data": {"urls": [entry]}, "task": "digits", "model": {"name": "x"}})
    assert DataSettings.model_validate({"urls": "a.org"}).urls == ("a.org",)
    assert MediaAccess.of(DataSettings()).urls is None and MediaAccess.of(None).urls is None
    assert MediaAccess.of(DataSettings(urls=True)).urls.hosts is None


def test_the_default_asks_no_private_address(tmp_path, serve):
    for host in ("127.0.0.1 169.254.169.254 [::1] 0.0.0.0 [::ffff:127.0.0.1] localhost 10.0.0.1 100.64.0.1 "
                 "[64:ff9b::7f00:1] [::]").split():
        with pytest.raises(DataError, match="not a public internet address"):
            get(f"https://{host}/a.png", Policy(None, tmp_path))
    server = serve({"/a.png": (200, {}, png())})
    with pytest.raises(DataError, match="not a public internet address"):
        get(server.url(), Policy((f"http://127.0.0.1:{server.server_address[1]}",), tmp_path))
    assert not server.asked


def test_odd_hosts_and_private_answers_are_refused(tmp_path):
    def never(*_):
        raise AssertionError("looked up")
    for host in ("2130706433", "0177.0.0.1", "0x7f000001", "127.1", "0x7f.1", "127.0.0.0x1", "[fe80::1%25lo]", "",
                 "a..b", "-", "a b", "[::1", "example.org\\@127.0.0.1", "ex\u0430mple.org"):
        with pytest.raises(DataError, match="media URL"):
            get(f"https://{host}/a.png", Policy(None, tmp_path, AddressGuard(look_up=never)))
    for found in (["8.8.8.8", "10.0.0.5"], ["8.8.8.8", "::ffff:192.168.0.1"], ["fe80::1%eth0"], ["what"]):
        with pytest.raises(DataError, match=r"photos\.example has the address .*not a public internet address"):
            guard = AddressGuard(look_up=lambda host, port, f=found: f)
            get("https://photos.example/a.png", Policy(None, tmp_path, guard))
    for entry, url, right in HOSTS:
        own = Policy(None if entry is None else (entry,), tmp_path)
        if right:
            assert checked_url(url, own).url == url
        else:
            with pytest.raises(DataError, match="media URL"):
                checked_url(url, own)


def test_the_connection_goes_to_the_address_that_was_checked(serve, policy):
    """A name that means something else at the second look-up has nothing of it."""
    server, asked = serve({"/a.png": (200, {}, png())}), []

    def look_up(host, port):
        asked.append(host)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]
    own = policy("http://media.test", guard=AddressGuard(LOOPBACK.permits, look_up, any_port=True))
    assert get(server.url(host="media.test"), own).read_bytes() == png()
    assert asked == ["media.test"] and server.asked[0][1]["Host"].startswith("media.test:")


def test_a_proxy_of_the_environment_is_not_used(serve, policy, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    assert get(serve({"/a.png": (200, {}, png())}).url(), policy()).read_bytes() == png()


def test_a_url_is_asked_for_as_it_is_written(serve, policy):
    path = "/a%2Fb/./x|y.png?q={%7B}"
    server = serve({path: (200, {}, png())})
    assert get(server.url(path), policy()).read_bytes() == png()
    async def inside():
        return get(serve({"/a.png": (200, {}, png())}).url(), policy())
    assert asyncio.run(inside()).read_bytes() == png()
    server = serve({"/a.png": (302, {"Location": "b/c.png"}, b""), "/b/c.png": (200, {}, png())})
    assert get(server.url(), policy()).read_bytes() == png()
    assert [path for path, _ in server.asked] == ["/a.png", "/b/c.png"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if not shutil.which("openssl"):
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=media.test",
                    "-addext", "subjectAltName=DNS:media.test", "-keyout", folder / "key.pem", "-out",
                    folder / "cert.pem"], check=True, capture_output=True)
    return folder


def test_the_certificate_is_checked_against_the_name(serve, policy, certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    server = serve({"/a.png": (200, {}, png())}, context)
    here = partial(AddressGuard, LOOPBACK.permits, lambda host, port: ["127.0.0.1"], True)
    own = policy("media.test", "other.test", guard=here(str(certificate / "cert.pem")))
    assert get(server.url(host="media.test", scheme="https"), own).read_bytes() == png()
    for name, found in (("other.test", own), ("media.test", policy("media.test", guard=here()))):  # nobody signed it
        with pytest.raises(DataError, match="certificate is invalid"):
            get(server.url("/b.png", name, "https"), found)


HOSTS = [
    (None, "https://a.org/x", True), (None, "http://a.org/x", False), (None, "https://a.org:8443/x", False),
    ("a.org", "https://a.org/x", True), ("a.org", "https://A.org./x", True), ("a.org", "https://b.a.org/x", False),
    ("a.org", "http://a.org/x", False), ("a.org", "https://a.org:8443/x", False),
    ("*.a.org", "https://b.a.org/x", True), ("*.a.org", "https://a.org/x", False),
    ("*.a.org", "https://ba.org/x", False), ("a.org:8443", "https://a.org:8443/x", True),
    ("http://a.org", "http://a.org/x", True), ("http://a.org", "https://a.org/x", False),
    (None, "ftp://a.org/x", False), (None, "file:///etc/passwd", False), (None, "data:image/png;base64,AA", False),
    (None, "https://a.org/a b", False), (None, "https://a.org/\nHost:", False), (None, "https://a.org:99999/x", False),
    (None, "https://a.org/" + "x" * 5000, False)]


def test_secrets_are_refused_and_never_printed(tmp_path, serve, policy):
    with pytest.raises(DataError, match="has a user or a password") as error:
        checked_url("https://me:s3cret@a.org/x.png", Policy(None, tmp_path))
    assert "s3cret" not in str(error.value) and "me" not in str(error.value).split("a.org")[0].split()
    server = serve({"/x.png?token=s3cret": (404, {}, b"")})
    with pytest.raises(DataError, match=r"/x\.png\?\.\.\.': the server answers 404") as error:
        get(server.url("/x.png?token=s3cret"), policy())
    remote = checked_url(server.url("/x.png?token=s3cret"), policy())
    assert "s3cret" not in f"{error.value}{remote}{remote!r}{Media(source=remote)}"
    assert redacted("https://u:p@[bad/x?y") == "'[bad/x'"


@pytest.mark.parametrize(("place", "words"), [
    ("http://169.254.169.254/latest", "169.254.169.254' names|does not allow|not a public internet"),
    ("http://10.0.0.1/", "not a public internet address"), ("//[::ffff:10.0.0.1]/", "not a public internet address"),
    ("http://inner.test/", "inner.test has the address 192.168.0.7"), ("file:///etc/passwd", "must begin with https"),
    ("https://elsewhere.org/", "does not allow"), ("http://u:p@127.0.0.1/", "user or a password"),
    ("gopher://127.0.0.1/", "must begin with https"), ("http://2130706433/", "has no host")])
def test_a_redirect_leads_nowhere_else(serve, policy, place, words):
    server = serve({"/a.png": (301, {"Location": place}, b"")})
    guard = AddressGuard(LOOPBACK.permits, lambda host, port: ["192.168.0.7" if host == "inner.test" else host], True)
    hosts = ("127.0.0.1", "169.254.169.254", "10.0.0.1", "[::ffff:10.0.0.1]", "inner.test")
    with pytest.raises(DataError, match=words):
        get(server.url(), policy(*(f"http://{host}" for host in hosts), guard=guard))
    assert len(server.asked) == 1


def test_redirects_end(serve, policy):
    server = serve({"/a.png": (302, {"Location": "/a.png"}, b""), "/b": (302, {}, b"")})
    with pytest.raises(DataError, match="redirects more than 5 times"):
        get(server.url(), policy())
    assert len(server.asked) == 6
    with pytest.raises(DataError, match="without a location"):
        get(server.url("/b"), policy())


def test_an_endless_body_is_cut_off(serve, policy):
    def endless(handler):
        while True:
            handler.wfile.write(bytes(1 << 16))
    server, own = serve({"/a.png": (200, {}, endless)}), policy()
    with pytest.raises(DataError, match=r"more bytes than limits\.media_bytes=100000"):
        get(server.url(), own, most=100_000)
    assert server.left.wait(60) and kept(own) == []
    server.pages["/a.png"] = (200, {"Content-Length": "100001"}, endless)
    with pytest.raises(DataError, match=r"more bytes than limits\.media_bytes=100000"):
        get(server.url(), own, most=100_000)


@pytest.mark.parametrize("where", ["head", "body"])
def test_a_slow_answer_ends_in_time(serve, policy, where):
    """Each byte comes before any single wait would end."""
    def drip(handler):
        while True:
            handler.wfile.write(b"x" if where == "body" else b"X-Slow: 1\r\n")
            handler.wfile.flush()
            time.sleep(0.02)

    def page(handler):
        if where == "head":
            handler.wfile.write(b"HTTP/1.0 200 OK\r\n")
            drip(handler)
        return 200, {}, drip
    server, own = serve({"/a.png": page}), policy()
    with pytest.raises(DataError, match=r"timed out \(limits\.url_seconds\)"):
        get(server.url(), own, most=1 << 40, seconds=0.5)
    assert kept(own) == []


def test_a_resolver_that_hangs_ends_in_time(policy):
    hang = threading.Event()
    own = policy("http://slow.test", guard=AddressGuard(look_up=lambda host, port: [str(hang.wait())]))
    with pytest.raises(DataError, match="resolving its host timed out"):
        get("http://slow.test/a.png", own, seconds=0.2)
    hang.set()


def test_what_was_not_asked_for_is_not_unpacked(serve, policy):
    bomb = gzip.compress(bytes(20_000_000))
    server = serve({"/a.png": (200, {"Content-Encoding": "gzip"}, bomb), "/b.png": (200, {}, bomb)})
    with pytest.raises(DataError, match="content encoding"):
        get(server.url(), policy())
    assert server.asked[0][1]["Accept-Encoding"] == "identity"
    with pytest.raises(DataError, match="not an image of a known format"):
        loaded(server.url("/b.png"), policy())


def test_no_http_and_no_answer(serve, policy):
    with saying(b"SSH-2.0-thing\r\n\r\n") as port, pytest.raises(DataError, match="not HTTP"):
        get(f"http://127.0.0.1:{port}/", policy())
    with pytest.raises(DataError, match="cannot be fetched"):
        get(f"http://127.0.0.1:{port}/", policy())
    with saying(b"", b"HTTP/1.1 200 OK\r\n\r\n" + png()) as port:
        assert get(f"http://127.0.0.1:{port}/", policy()).read_bytes() == png()


@pytest.mark.slow
def test_a_moment_of_failure_is_waited_out(serve, policy):
    broken = (200, {"Content-Length": "9999"}, b"short")
    answers = iter([(503, {}, b""), broken, (200, {}, png()), *[broken] * 3])
    server = serve({path: lambda handler: next(answers) for path in ("/a.png", "/b.png")})
    own = policy()
    assert get(server.url(), own).read_bytes() == png()
    with pytest.raises(DataError, match=r"cannot be fetched: .*closed the connection"):
        get(server.url("/b.png"), own)
    assert len(kept(own)) == 1  # nothing of what broke off


def test_the_content_decides_not_what_the_server_says(serve, policy):
    server = serve({"/a.html": (200, {"Content-Type": "text/html"}, png()),
                    "/b.png": (200, {"Content-Type": "image/png"}, b"<html>not here</html>"), "/c.png": (200, {}, b"")})
    found = loaded(server.url("/a.html"), policy())
    assert found.size == (6, 4) and found.path.suffix == ".png"
    with pytest.raises(DataError, match=r"limits\.image_pixels=23"):
        loaded(server.url("/a.html"), policy(), image_pixels=23)
    with pytest.raises(DataError, match="not an image of a known format"):
        loaded(server.url("/b.png"), policy())
    with pytest.raises(DataError, match="is empty"):
        loaded(server.url("/c.png"), policy())


def test_what_is_kept_needs_no_network(serve, policy, tmp_path):
    server, own = serve({"/a.png": (200, {}, png()), "/same.png": (200, {}, png())}), policy()
    first = get(server.url(), own)
    assert get(server.url("/same.png"), own) == first and kept(own) == [first.name]
    server.pages["/a.png"] = (404, {}, b"")
    assert get(server.url(), own) == first and len(server.asked) == 2
    with pytest.raises(DataError, match=r"limits\.media_bytes=10"):
        get(server.url(), own, most=10)
    first.write_bytes(b"changed")
    with pytest.raises(DataError, match="404"):  # not what it was, so it is asked for again
        get(server.url(), own)
    server.pages["/a.png"] = (200, {}, png())
    assert get(server.url(), own).read_bytes() == png()
    (tmp_path / "file").write_text("")
    server = serve({"/a.png": (200, {}, png())})
    with pytest.raises(RunError, match=r"data\.cache"):
        get(server.url(), Policy(("http://127.0.0.1",), tmp_path / "file" / "cache", LOOPBACK))


def test_a_kept_name_leads_nowhere(serve, policy, tmp_path):
    server, own = serve({"/a.png": (200, {}, png())}), policy()
    get(server.url(), own)
    (entry,) = (own.cache / "urls").glob("*.json")
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    told = {"file": "../../secret", "sha256": hashlib.sha256(secret.read_bytes()).hexdigest()}
    entry.write_text(json.dumps(told))
    assert get(server.url(), own).read_bytes() == png()


def test_rows_name_urls_where_the_setting_allows_it(tmp_path):
    row = {"id": "r", "image": "https://images.example.org/a.png"}
    with pytest.raises(DataError, match=r"row 'r'.*is a URL.*data\.urls"):
        sample_from_row(row, tmp_path)
    access = MediaAccess.of(DataSettings(urls=("images.example.org",), cache=str(tmp_path)))
    (media,) = sample_from_row(row, tmp_path, access).media
    assert str(media.source) == "'https://images.example.org/a.png'"
    with pytest.raises(DataError, match=r"row 'r': media URL 'https://other\.org/a\.png' has a host that data\.urls"):
        sample_from_row({**row, "image": "https://other.org/a.png"}, tmp_path, access)
    with pytest.raises(DataError, match=r"row 'r': media URL 'file:/etc/passwd'|must begin with https"):
        sample_from_row({**row, "image": "file:///etc/passwd"}, tmp_path, access)
