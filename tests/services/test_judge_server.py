"""What `vlrl serve --judge` would start, and what it refuses; no vLLM is needed."""

import itertools
import socket

import pytest

from tests.cli.test_serve import free_port
from vlrl.config.services import JudgeSettings
from vlrl.errors import ConfigError
from vlrl.services.judge_server import prepare


def made(folder, further=(), host="127.0.0.1", port=None, **settings):
    return prepare(JudgeSettings(**{"model": "org/judge", **settings}), folder / "judge", host=host, port=port,
                   further=further)


def test_the_server_has_the_judge_s_model_address_and_key(tmp_path, monkeypatch):
    """The key is in its environment alone, where no list of processes shows it; one of others' does not get there."""
    monkeypatch.setenv("MINE", "secret-key")
    monkeypatch.setenv("VLLM_API_KEY", "another")
    port = free_port()
    servers = made(tmp_path, ["max_model_len=4096", "structured-outputs-config.disable_any_whitespace=true"],
                   url=f"http://127.0.0.1:{port}/v1", key_env="MINE")
    (server,) = servers.servers
    pairs = {*itertools.pairwise(server.command)}
    assert {("--model", "org/judge"), ("--served-model-name", "org/judge"), ("--port", str(port)),
            ("--host", "127.0.0.1"), ("--max-model-len", "4096"),
            ("--structured-outputs-config.disable_any_whitespace", "true")} <= pairs
    assert server.environment["VLLM_API_KEY"] == "secret-key" and "secret-key" not in " ".join(server.command)
    assert servers.addresses == [f"http://127.0.0.1:{port}"] and servers.key_file is None
    (server,) = made(tmp_path, port=port).servers
    assert "VLLM_API_KEY" not in server.environment and server.log.name == f"judge-{port}.log"
    assert ("--port", str(port)) in {*itertools.pairwise(server.command)}


def test_a_checkpoint_and_a_port_that_cannot_be_served(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "adapter_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"is an adapter, .*by a run with model\.name=.*model\.lora\.rank=0"):
        made(tmp_path, port=free_port(), model=str(tmp_path / "best"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{taken.getsockname()[1]}"):
            made(tmp_path, port=taken.getsockname()[1])


@pytest.mark.parametrize(("more", "says"), [
    ({"model": ""}, r"--judge needs services\.judge\.model"),
    ({"url": "http://elsewhere:9000/v1"}, r"names another host than 127\.0\.0\.1.*--host 0\.0\.0\.0"),
    ({"url": "http://127.0.0.1:9000/v1", "port": 9001}, r"--port 9001 differs from the port in services\.judge\.url"),
    ({"url": "https://127.0.0.1:9000/v1"}, r"vLLM answers only at http://HOST:PORT/v1"),
    ({"url": "http://127.0.0.1:9000/judge"}, r"vLLM answers only at http://HOST:PORT/v1"),
    ({"host": "0.0.0.0"}, r"--host 0\.0\.0\.0 without a key .*services\.judge\.key_env"),
    ({"key_env": "NOT_SET"}, r"services\.judge\.key_env NOT_SET: .*not set"),
    ({"further": ["model=x"]}, r"--vllm model=x: vlrl sets --model itself, by services\.judge\.model"),
    ({"further": ["api_key=x"]}, r"set services\.judge\.key_env")])
def test_what_is_refused(tmp_path, monkeypatch, more, says):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError, match=says):
        made(tmp_path, **more)
    assert not (tmp_path / "judge").exists()
