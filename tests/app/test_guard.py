"""Who may ask the inspector for what. The app behind the guard is a page that says who it is."""

import re

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from starlette.responses import HTMLResponse
from starlette.testclient import TestClient

from vlrl.app.guard import Guard

PAGE = "<html><head><script>one()</script><script src='/a.js'></script></head><body>page</body></html>"


async def app(scope, receive, send):
    """Answers everything; the page says the query it was asked with."""
    await HTMLResponse(f"{PAGE}<i>{scope['query_string'].decode()}</i>")(scope, receive, send)


def client_of(host="127.0.0.1", password=None, at="http://127.0.0.1:7860"):
    return TestClient(Guard(app, host=host, password=password, head="<script src='/vlrl/static/app.js'></script>"),
                      base_url=at)


@pytest.fixture(scope="module")
def client():
    return client_of()


def test_the_page_allows_no_script_but_its_own(client):
    answer = client.get("/?page=rollouts&deep_link=/etc/passwd")  # both mean something else to Gradio
    assert "/vlrl/static/app.js" in answer.text and "<i></i>" in answer.text
    policy = answer.headers["content-security-policy"]
    script = re.search(r"script-src ([^;]*);", policy)[1].split()
    # echo -n 'one()' | openssl dgst -sha256 -binary | base64
    assert script == ["'self'", "'unsafe-eval'", "'sha256-HR7iaask9daLMRRskMI++QeJtjWDOjyPA6lGzYGzKW4='"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
    for name, value in (("referrer-policy", "same-origin"), ("x-content-type-options", "nosniff"),
                        ("cross-origin-resource-policy", "same-origin")):
        assert answer.headers[name] == client.get("/theme.css").headers[name] == value


@pytest.mark.parametrize("path", ["/docs", "/openapi.json", "/gradio_api/info", "/gradio_api/openapi.json",
                                  "/gradio_api/runs", "/gradio_api/proxy=https://example.com", "/monitoring",
                                  "/gradio_api/file=https://example.com", "/gradio_api/vibe-code",
                                  "/gradio_api/deep_link", "/gradio_api/custom_component/a/b/c/d", "/api",
                                  "/gradio_api/queue/join/x"])
def test_what_no_page_needs_is_not_there(client, path):
    assert client.get(path).status_code == 404


@pytest.mark.parametrize("path", ["/config", "/assets/index.js", "/gradio_api/queue/join", "/gradio_api/queue/data",
                                  "/gradio_api/run/predict", "/gradio_api/heartbeat/abc", "/gradio_api/upload",
                                  "/gradio_api/file=/tmp/x.png", "/vlrl/media"])
def test_what_pages_need_is_let_through(client, path):
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(("host", "right"), [("127.0.0.1:7860", True), ("localhost", True), ("LOCALHOST:1", True),
                                             ("evil.example", False), ("127.0.0.1.evil.example", False), ("", False),
                                             ("[::1]:7860", True), ("[", False), ("10.0.0.5", False)])
def test_another_host_name_is_refused(client, host, right):
    assert (client.get("/vlrl/static/app.js", headers={"Host": host}).status_code == 200) is right


def test_another_sites_form_is_refused(client):
    assert client.get("/", headers={"Origin": "http://evil.example"}).status_code == 403
    assert client.post("/gradio_api/run/predict", json={}, headers={"Origin": "null"}).status_code == 403
    assert client.get("/", headers={"Origin": "http://127.0.0.1:7860"}).status_code == 200


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
