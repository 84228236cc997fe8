"""Who may ask the inspector for what. The app behind the guard is a page that says who it is."""

import asyncio
import re
import time
from urllib.parse import urlencode

import pytest
from starlette.responses import HTMLResponse
from starlette.testclient import TestClient

from tests.tables import each
from vlrl.app import guard as guards
from vlrl.app.guard import Address, Guard, parsed
from vlrl.errors import ConfigError


async def app(scope, receive, send):
    """Answers everything; the page says the query it was asked with."""
    page = "<html><head><script>one()</script><script src='/a.js'></script></head><body>page</body></html>"
    await HTMLResponse(f"{page}<i>{scope['query_string'].decode()}</i>")(scope, receive, send)


def client_of(host="127.0.0.1", password=None, at="http://127.0.0.1:7860", **reach):
    guard = Guard(app, address=parsed(host, **reach), password=password,
                  head="<script src='vlrl/static/app.js'></script>")
    return TestClient(guard, base_url=at)


@pytest.fixture(scope="module")
def client():
    return client_of()


def test_the_page_allows_no_script_but_its_own(client):
    answer = client.get("/?page=rollouts&deep_link=/etc/passwd")  # both mean something else to Gradio
    assert "vlrl/static/app.js" in answer.text and "<i></i>" in answer.text
    policy = answer.headers["content-security-policy"]
    script = re.search(r"script-src ([^;]*);", policy)[1].split()
    # echo -n 'one()' | openssl dgst -sha256 -binary | base64
    assert script == ["'self'", "'unsafe-eval'", "'sha256-HR7iaask9daLMRRskMI++QeJtjWDOjyPA6lGzYGzKW4='"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    for name, value in (("referrer-policy", "same-origin"), ("x-content-type-options", "nosniff"),
                        ("cross-origin-resource-policy", "same-origin"), ("x-frame-options", "DENY")):
        assert answer.headers[name] == client.get("/theme.css").headers[name] == value


def test_what_pages_need_is_let_through_and_nothing_else(client):
    for status, paths in (
            (404, "/docs /openapi.json /gradio_api/info /gradio_api/openapi.json /gradio_api/runs /monitoring /api "
                  "/gradio_api/vibe-code /gradio_api/proxy=https://example.com /gradio_api/file=https://example.com "
                  "/gradio_api/deep_link /gradio_api/custom_component/a/b/c/d /gradio_api/queue/join/x"),
            (200, "/config /assets/index.js /gradio_api/queue/join /gradio_api/queue/data /gradio_api/run/predict "
                  "/gradio_api/heartbeat/abc /gradio_api/upload /gradio_api/file=/tmp/x.png /vlrl/media /vlrl/film")):
        assert {path: client.get(path).status_code for path in paths.split()} == dict.fromkeys(paths.split(), status)


def test_another_host_name_is_refused(client):
    for host, right in (("127.0.0.1:7860", True), ("localhost", True), ("LOCALHOST:1", True), ("evil.example", False),
                        ("127.0.0.1.evil.example", False), ("", False), ("[::1]:7860", True), ("[", False),
                        ("10.0.0.5", False)):
        assert (client.get("/vlrl/static/app.js", headers={"Host": host}).status_code == 200) is right, host


def test_another_sites_form_is_refused(client):
    assert client.get("/", headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post("/gradio_api/run/predict", json={}, headers={"Origin": "null"}).status_code == 403
    assert client.get("/", headers={"Origin": "http://127.0.0.1:7860"}).status_code == 200


@each("host hosts asked right", [
    ("127.0.0.1", ("box.example",), "box.example", True), ("127.0.0.1", ("box.example",), "BOX.example:443", True),
    ("127.0.0.1", ("box.example",), "127.0.0.1:7860", True), ("127.0.0.1", ("box.example",), "a.box.example", False),
    ("127.0.0.1", ("*.box.example",), "a.b.box.example", True), ("127.0.0.1", ("*.box.example",), "box.example", False),
    ("127.0.0.1", ("*.box.example",), "evilbox.example", False), ("127.0.0.1", ("Box.Example",), "box.example", True),
    ("0.0.0.0", (), "any.example", True), ("0.0.0.0", ("box.example",), "any.example", False),
    ("0.0.0.0", ("box.example",), "box.example", True), ("127.0.0.1", ("[::2]",), "[::2]:80", True)])
def test_names_of_proxies_are_answered_where_they_are_allowed(host, hosts, asked, right):
    answer = client_of(host, hosts=hosts).get("/config", headers={"Host": asked})
    assert answer.status_code == (200 if right else 421)
    assert right or "--allow-host NAME" in answer.text


def test_what_a_proxy_says_of_the_host_counts_and_is_checked():
    client = client_of(hosts=("box.example",))
    asked = {"X-Forwarded-Host": "box.example, inner", "Origin": "https://box.example"}
    assert client.get("/config", headers=asked).status_code == 200
    assert client.get("/config", headers=asked | {"Origin": "http://evil.example"}).status_code == 403
    assert client.get("/config", headers=asked | {"Origin": "http://["}).status_code == 403
    assert client.get("/config", headers=asked | {"X-Forwarded-Host": "evil.example"}).status_code == 421
    assert client.get("/config", headers=asked | {"Host": "evil.example"}).status_code == 421
    assert client_of().get("/config", headers={"X-Forwarded-Host": "box.example"}).status_code == 421


def test_the_path_of_a_proxy_may_come_or_be_cut_off():
    client = client_of(root_path="user/me/")
    for path in ("/user/me/config", "/config", "/user/me/", "/", "/user/me/vlrl/media"):
        assert client.get(path).status_code == 200
    for path in ("/user/me/user/me/config", "/user/meconfig", "/user/me/docs", "/user"):
        assert client.get(path).status_code == 404
    moved = client.get("/user/me?run=a", follow_redirects=False)
    assert (moved.status_code, moved.headers["location"]) == (303, "/user/me/?run=a")
    client = client_of(root_path="/vlrl", password="x")
    for path in ("/vlrl/login", "/vlrl/vlrl/login"):
        assert 'action="/vlrl/vlrl/login"' in client.get(path).text
    client = client_of(root_path="/vlrl")
    for path in ("/vlrl/static/app.js", "/vlrl/vlrl/static/app.js", "/vlrl/media", "/vlrl/vlrl/media",
                 "/vlrl/static/js/iframeResizer.js", "/vlrl/config", "/vlrl/gradio_api/queue/join", "/vlrl/"):
        assert client.get(path).status_code == 200


def test_a_password_below_a_path_and_behind_tls():
    client = client_of(password="x", root_path="/p", hosts=("box.example",), at="http://127.0.0.1:7860")
    assert client.get("/p/?run=a", follow_redirects=False).headers["location"] == "/p/vlrl/login?run=a"
    assert 'action="/p/vlrl/login?run=a"' in client.get("/p/vlrl/login?run=a").text
    right = client.post("/p/vlrl/login?run=a", data={"password": "x"}, follow_redirects=False)
    assert right.headers["location"] == "/p/?run=a"
    assert re.search(r"=[\w-]{43}; HttpOnly; Path=/p/; SameSite=Lax$", right.headers["set-cookie"])
    said = {"X-Forwarded-Proto": "https"}
    right = client.post("/p/vlrl/login", data={"password": "x"}, headers=said, follow_redirects=False)
    assert right.headers["set-cookie"].endswith("; SameSite=Lax; Secure")
    framed = client_of(password="x", frames=("https://huggingface.co",))
    right = framed.post("/vlrl/login", data={"password": "x"}, headers=said, follow_redirects=False)
    assert right.headers["set-cookie"].endswith("; Path=/; SameSite=None; Partitioned; Secure")
    right = framed.post("/vlrl/login", data={"password": "x"}, follow_redirects=False)
    assert right.headers["set-cookie"].endswith("; SameSite=Lax")


def test_pages_that_are_allowed_may_hold_it_in_a_frame():
    framed = client_of(frames=("http://localhost:8888", "https://*.hf.space/"))
    for path in ("/", "/config", "/vlrl/login", "/no"):
        answer = framed.get(path, follow_redirects=False)
        assert "frame-ancestors http://localhost:8888 https://*.hf.space;" in answer.headers["content-security-policy"]
        assert "x-frame-options" not in answer.headers
    assert framed.get("/config", headers={"Origin": "http://localhost:8888"}).status_code == 403  # it may hold, not ask


def test_what_is_no_path_name_or_origin_is_refused():
    for option, name, wrong in (
            ("--root-path", "root_path", ["https://box.example/x", "/a b", "/a/../b", "/a//b", '/"><b>', "/assets",
                                          "/a\r\nSet-Cookie: x"]),
            ("--allow-host", "hosts", ["https://box.example", "*", "box.example:80", "", "a..b"]),
            ("--allow-frame", "frames", ["*", "box", "https://box.example/x", "https://a; script-src *",
                                         "javascript://a", "https://a b", "https://a:99999", "https://a\n:1"])):
        for value in wrong:
            with pytest.raises(ConfigError, match=option):
                parsed("127.0.0.1", **{name: value if name == "root_path" else (value,)})
    found = parsed("127.0.0.1", "/a/b/", ("Box.Example",), ("HTTP://[::1]:8888/",))
    assert found == Address("127.0.0.1", "/a/b", ("box.example",), ("http://[::1]:8888",))
    assert parsed("127.0.0.1", "/") == Address()


def test_with_a_password_nothing_is_served_before_it():
    client, media = client_of("0.0.0.0", "open sésame", "http://box.example:7860"), "/vlrl/media?run=boxes&name=a.png"
    for path in (media, "/config", "/theme.css", "/vlrl/static/app.js", "/gradio_api/heartbeat/abc"):
        assert client.get(path).status_code == 401
    asked = client.get("/?page=rollouts&run=boxes")
    assert asked.status_code == 200 and 'type="password"' in asked.text and "boxes" in str(asked.url)
    assert '"><b>' not in client.get('/vlrl/login?"><b>').text
    wrong = client.post("/vlrl/login", data={"password": "<b>"})
    assert "not the password" in wrong.text and not client.cookies and client.get(media).status_code == 401
    right = client.post("/vlrl/login?page=rollouts&run=boxes", data={"password": "open sésame"}, follow_redirects=False)
    assert right.status_code == 303 and right.headers["location"] == "/?page=rollouts&run=boxes"
    cookie = right.headers["set-cookie"].lower()
    assert "httponly" in cookie and "samesite=lax" in cookie
    assert client.get(media).status_code == 200 and "page" in client.get("/").text
    assert client_of("0.0.0.0", "x", "http://box").get(media, headers={"Cookie": "vlrl-80=wrong"}).status_code == 401
    assert client.post("/vlrl/login", data={"password": "x" * 20_000}).status_code == 200


async def posting(guard, password, finished=True, address="10.0.0.1"):
    """The status that the login answers to a password; the body of one that is not finished never ends."""
    scope = {"type": "http", "method": "POST", "path": "/vlrl/login", "raw_path": b"/vlrl/login", "query_string": b"",
             "headers": [(b"host", b"127.0.0.1:7860")], "scheme": "http", "server": ("127.0.0.1", 7860),
             "client": (address, 5)}
    said, posted = [], []

    async def receive():
        if said or (posted and not finished):
            await asyncio.sleep(60)
        posted.append(1)
        return {"type": "http.request", "body": urlencode({"password": password}).encode(), "more_body": not finished}

    async def send(message):
        said.append(message)

    await guard(scope, receive, send)
    return said[0]["status"]


def test_unfinished_forms_and_wrong_guesses_of_others_hold_up_nobody(monkeypatch):
    monkeypatch.setattr(guards, "BODY_S", 0.2)
    guard = Guard(app, address=parsed("127.0.0.1"), password="x", head="")

    async def all_of_them():
        slow = [asyncio.create_task(posting(guard, "x", finished=False)) for _ in range(20)]
        await asyncio.sleep(0)
        begun = time.monotonic()
        assert await posting(guard, "x") == 303
        assert time.monotonic() - begun < 0.15  # before any of the others is given up
        assert await asyncio.gather(*slow) == [408] * 20
        guesses = [asyncio.create_task(posting(guard, "y", address="10.0.0.2")) for _ in range(20)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(posting(guard, "x"), 0.3) == 303
        assert sum(guess.done() for guess in guesses) == 0  # one at a time
        for guess in guesses:
            guess.cancel()
        await asyncio.gather(*guesses, return_exceptions=True)

    asyncio.run(all_of_them())
