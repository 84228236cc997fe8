"""How `vlrl serve` keeps its processes, its key and its folder."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest

from tests.helpers import settings
from vlrl.engine.vllm import launch as vllm_launch
from vlrl.engine.vllm.routes import KEY, Routes
from vlrl.errors import ConfigError

PATIENT = 60


def test_the_key_outlives_the_servers(tmp_path, monkeypatch):
    path = vllm_launch.write_key(tmp_path / "key")
    key = path.read_text()
    assert len(key) > 30 and path.stat().st_mode & 0o777 == 0o600
    assert vllm_launch.write_key(tmp_path / "key").read_text() == key  # a run goes on with servers that start again
    path.chmod(0o644)
    assert vllm_launch.write_key(tmp_path / "key").read_text() != key and path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "own").write_text("mine\n")
    assert vllm_launch.write_key(tmp_path / "key", str(tmp_path / "own")) == tmp_path / "own"
    assert (tmp_path / "own").read_text() == "mine\n"
    assert vllm_launch.write_key(tmp_path / "key", str(tmp_path / "deep" / "made")).stat().st_mode & 0o777 == 0o600
    (tmp_path / "own").write_text("\n")
    with pytest.raises(ConfigError, match=r"engine\.key_file.*is empty"):
        vllm_launch._key_of(tmp_path / "own")
    monkeypatch.delenv(KEY, raising=False)
    with pytest.raises(ValueError, match=KEY):
        Routes(None)


def test_a_folder_belongs_to_one_serve(tmp_path):
    (tmp_path / "servers.json").write_text("{}")  # of one that was killed
    code = ("import sys; from pathlib import Path; from vlrl.store import lock\n"
            "with lock.lock(Path(sys.argv[1]) / 'serve.lock'): print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as other:
        assert other.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"process {other.pid} on .*--folder"), vllm_launch.serve_lock(tmp_path):
            pass
        assert (tmp_path / "servers.json").exists()
        other.kill()
    with vllm_launch.serve_lock(tmp_path):
        assert not (tmp_path / "servers.json").exists()
    assert not (tmp_path / "serve.lock").exists()


def test_what_cannot_be_served_is_said_before_a_model_is_read(tmp_path, monkeypatch):
    config = settings("no such model", engine={"name": "vllm_server"})
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}.*--port"):
            vllm_launch.prepare(config, tmp_path / "a", replicas=2, port=port - 1)
    with pytest.raises(ConfigError, match="--port"):
        vllm_launch.prepare(config, tmp_path / "a", replicas=2, port=65535)
    with pytest.raises(ConfigError, match="--port"):
        vllm_launch.prepare(config, tmp_path / "a", host="no.such.host.invalid", port=port)
    assert not (tmp_path / "a").exists()
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    cpu = SimpleNamespace(device=SimpleNamespace(type="cpu"))
    assert len(vllm_launch._devices(cpu, config.engine, 3, {})) == 3
    with pytest.raises(ConfigError, match=r"--replicas 4 with engine\.memory=0\.3.*VLLM_CPU_KVCACHE_SPACE"):
        vllm_launch._devices(cpu, config.engine, 4, {})
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    assert len(vllm_launch._devices(cpu, config.engine, 4, {})) == 4
    monkeypatch.setattr(socket, "gethostname", lambda: "a-name-that-only-others-know")
    assert vllm_launch._reached("0.0.0.0") == "a-name-that-only-others-know"
    assert vllm_launch._reached("0.0.0.0", here=True) == "127.0.0.1"
    assert vllm_launch._reached("::", here=True) == "[::1]"
    assert vllm_launch._reached("10.0.0.2", here=True) == "10.0.0.2"


PAGE = ("import http.server, os, sys, time\n"
        "begun, again = time.monotonic(), sys.argv[2] + ' at the start'\n"
        "if os.path.exists(again): os.unlink(again); time.sleep(1000)\n"
        "class Page(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n"
        "        self.send_response(200); self.end_headers()\n"
        "        known = self.headers.get('Authorization') == 'Bearer secret'\n"
        "        if self.path == '/vlrl/alive' and known and os.path.exists(sys.argv[2]):\n"
        "            self.wfile.write(b'{\"silent_s\": %f}' % (time.monotonic() - begun))\n"
        "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])), Page).serve_forever()")


@pytest.mark.slow
@pytest.mark.parametrize("what", ["server", "engine", "start"])
def test_a_server_that_hangs_is_started_again(tmp_path, monkeypatch, what):
    monkeypatch.setattr(vllm_launch, "_HEALTH_S", 0.2)
    monkeypatch.setattr(vllm_launch, "_POLL_S", 0.05)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    at, said, stands_still = f"http://127.0.0.1:{port}", [], tmp_path / "stands still"
    one = vllm_launch.ServerProcess(at, at, [sys.executable, "-c", PAGE, str(port), str(stands_still)],
                                    {**os.environ, KEY: "secret"}, tmp_path / "log")

    def say(line):
        stands_still.unlink(missing_ok=True)
        servers._start_s = PATIENT if "has not responded" in line else servers._start_s
        said.append(line)

    servers = vllm_launch.ServerGroup([one], say, silent_s=1.0)
    assert servers.start(PATIENT)
    hung = one.process
    if what == "server":
        os.kill(hung.pid, signal.SIGSTOP)
    elif what == "engine":
        stands_still.touch()
    else:
        servers._start_s = 1.0
        (tmp_path / "stands still at the start").touch()
        os.kill(hung.pid, signal.SIGKILL)
    watching = threading.Thread(target=servers.watch, daemon=True)
    watching.start()
    try:
        end = time.monotonic() + PATIENT
        while not any("responds again" in line for line in said):
            assert time.monotonic() < end, said
            time.sleep(0.02)
        assert "has not responded for 1 s" in said[what == "start"] and hung.returncode == -signal.SIGKILL
        assert ("its engine" in said[0]) == (what == "engine") and one.process.pid != hung.pid
    finally:
        servers.stop()
        watching.join(PATIENT)
        servers.close()
    assert one.process.returncode == -signal.SIGTERM
