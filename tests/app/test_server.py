"""The inspector's server: what it gives to whom, and how the command starts and ends it."""

import re
import signal
import subprocess
import sys

import pytest

from vlrl.cli.main import main

pytestmark = pytest.mark.slow  # Gradio alone takes seconds to import


@pytest.fixture(scope="module")
def client(runs):
    from starlette.testclient import TestClient

    from vlrl.app import server
    app, _ = server.create(runs)
    with TestClient(app, base_url="http://127.0.0.1:7860") as client:
        yield client


def picture(runs):
    return next(path for path in sorted((runs / "boxes" / "media").iterdir()) if path.suffix == ".png")


def test_the_page_and_what_it_needs(client):
    answer = client.get("/?page=rollouts&deep_link=/etc/passwd")  # which Gradio would read otherwise
    assert answer.status_code == 200 and '"vlrl/static/app.js"' in answer.text
    assert client.get("/vlrl/static/x").status_code == client.get("/vlrl/static/..%2fserver.py").status_code == 404
    script = re.search(r"script-src ([^;]*);", answer.headers["content-security-policy"])[1].split()
    assert "'self'" in script and "'unsafe-inline'" not in script and not [s for s in script if s.startswith("http")]
    assert len(re.findall(r"<script[^>]*>[^<]", answer.text)) == sum(s.startswith("'sha256-") for s in script)
    assert "fonts.googleapis" not in answer.text + client.get("/theme.css").text


def test_no_file_of_the_machine_is_served(client, runs):
    for path in (runs / "boxes" / "config.yaml", runs / "notes.sqlite", "/etc/passwd", "pyproject.toml",
                 picture(runs)):
        assert client.get(f"/gradio_api/file={path}").status_code in (403, 404)
    for name in ("../config.yaml", "media/../config.yaml", "/etc/passwd", "config.yaml", "..%2fconfig.yaml", ""):
        assert client.get("/vlrl/media", params={"run": "boxes", "name": name}).status_code == 404
    for run in ("..", "../..", "/", "", "boxes/..", "sweep"):
        assert client.get("/vlrl/media", params={"run": run, "name": picture(runs).name}).status_code == 404


def test_a_request_names_no_file_but_uploads(client, runs, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))  # Gradio copies what a request names to here, and serves it
    call = next(call for call in client.get("/config").json()["dependencies"] if len(call["inputs"]) == 2)

    def status(path):
        body = {"data": [{"path": path, "meta": {"_type": "gradio.FileData"}}, None], "fn_index": call["id"],
                "session_hash": "a"}
        return client.post("/gradio_api/run/predict", json=body).status_code

    for path in ("/etc/hostname", str(runs / "boxes" / "config.yaml"), "http://127.0.0.1:9/x", "\0"):
        assert status(path) == 500 and not any(tmp_path.rglob("*")), path
    (tmp_path / "a.png").write_bytes(b"x")  # as the route for uploads does
    assert status(str(tmp_path / "a.png")) == 200


def test_media_have_fixed_types_and_parts_and_pages_are_compressed(client, runs):
    path = picture(runs)
    where = {"run": "boxes", "name": path.name}
    whole = client.get("/vlrl/media", params=where)
    assert whole.content == path.read_bytes() and whole.headers["content-type"] == "image/png"
    assert whole.headers["x-content-type-options"] == "nosniff"
    assert "sandbox" in whole.headers["content-security-policy"]
    part = client.get("/vlrl/media", params=where, headers={"Range": "bytes=1-4"})
    assert part.status_code == 206 and part.content == path.read_bytes()[1:5]
    small = client.get("/vlrl/media", params={**where, "size": 32})
    assert small.headers["content-type"] == "image/jpeg" and len(small.content) < 3000
    clip = next(p for p in (runs / "sweep" / "clips" / "media").iterdir() if p.suffix == ".webm")
    where = {"run": "sweep/clips", "name": clip.name}
    assert client.get("/vlrl/media", params=where).headers["content-type"] == "video/webm"
    assert client.get("/vlrl/media", params={**where, "size": 64, "at": 0.5}).headers["content-type"] == "image/jpeg"
    answer = client.get("/vlrl/media", params={"run": "boxes", "name": "0.png"}, headers={"Sec-Fetch-Dest": "image"})
    assert answer.status_code == 200 and "no picture stored" in answer.text
    answer = client.get("/vlrl/media", params={"run": "boxes", "name": "0.mp4"}, headers={"Sec-Fetch-Dest": "video"})
    assert answer.status_code == 200 and answer.content == b""
    # the client takes gzip unless told otherwise, and unpacks it
    for path in ("/", "/vlrl/static/app.js", "/vlrl/static/app.css"):
        packed, plain = client.get(path), client.get(path, headers={"Accept-Encoding": "identity"})
        assert packed.headers["content-encoding"] == "gzip" and "content-encoding" not in plain.headers
        assert packed.content == plain.content and int(packed.headers["content-length"]) < len(plain.content) / 2
    part = client.get("/vlrl/media", params={"run": "sweep/clips", "name": clip.name}, headers={"Range": "bytes=0-99"})
    assert part.status_code == 206 and part.content == clip.read_bytes()[:100]
    assert "content-encoding" not in part.headers


def test_others_need_a_password_and_what_is_missing_is_named(runs, capsys, monkeypatch, tmp_path):
    monkeypatch.delenv("VLRL_APP_PASSWORD", raising=False)
    for folder, words, wanted in (
            (runs, ["--host", "0.0.0.0"], ["--host 0.0.0.0", "--password", "VLRL_APP_PASSWORD"]),
            (runs, ["--allow-host", "box.example"], ["--allow-host box.example allows remote", "VLRL_APP_PASSWORD"]),
            (runs, ["--root-path", "https://b/x"], ["--root-path https://b/x is not a path: write only"]),
            (runs, ["--allow-frame", "box"], ["--allow-frame box"]), (runs / "no", ["--no-open"], ["is not a folder"]),
            (tmp_path, ["--host", "203.0.113.7", "--password", "x"], ["--host 203.0.113.7"]),
            (tmp_path, [], ["pip install 'vlrl[app]'"])):
        if not words:
            monkeypatch.setattr("vlrl.cli.inspector.importlib.util.find_spec", lambda name: None)
        assert main(["app", str(folder), *words]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert all(text in said for text in wanted), said


def test_the_command_takes_its_port_or_none_and_ends_with_ctrl_c(tmp_path):
    import urllib.request
    free = [sys.executable, "-m", "vlrl", "app", str(tmp_path), "--no-open"]
    command = [*free, "--port", "18651"]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    second = None
    try:
        said = first.stdout.readline()
        assert "http://127.0.0.1:18651/" in said
        refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert refused.returncode == 1 and "--port 18651 is taken" in refused.stderr and not refused.stdout
        second = subprocess.Popen(free, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        said = second.stdout.readline()
        said = second.stdout.readline() if "is taken, so" in said else said
        found = re.match(r"(http://127\.0\.0\.1:(\d+)/) ", said)
        assert 7860 <= int(found[2]) < 7910
        urllib.request.urlopen("http://127.0.0.1:18651/vlrl/static/app.js", timeout=60).close()
        first.send_signal(signal.SIGINT)
        assert first.wait(20) == 130 and "Traceback" not in first.communicate()[1]
        urllib.request.urlopen(f"{found[1]}vlrl/static/app.js", timeout=60).close()
        second.send_signal(signal.SIGTERM)
        assert second.wait(20) == 130 and "Traceback" not in second.communicate()[1]
    finally:
        for process in filter(None, (first, second)):
            process.kill()
            process.communicate()
