"""The check of model.name against a Hub that answers with an error, and of an adapter's base model."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError
from vlrl.models.names import check_model

STATUS = {"/me/absent": 404, "/me/gated": 403, "/me/there": 200, "/me/adapter": 404}
CODE = """
import sys
from vlrl.config.schema import ModelSettings
from vlrl.errors import ConfigError
from vlrl.models.names import check_model
for name in sys.argv[1:]:
    try:
        check_model(ModelSettings(name=name))
        print(name, "passes")
    except ConfigError as error:
        print(error)
"""


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self):
        name, _, file = self.path.partition("/resolve/main/")
        found = name == "/me/adapter" and file == "adapter_config.json"
        self.send_response(200 if found else STATUS.get(name, 404))
        self.end_headers()

    def log_message(self, *args):
        pass


def asked(endpoint: str, *names: str) -> list[str]:
    environ = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "0", "no_proxy": "*"}
    return subprocess.run([sys.executable, "-c", CODE, *names], env=environ, capture_output=True, text=True,
                          check=True).stdout.splitlines()


def test_the_hub_is_asked_for_a_name(tmp_path):
    with HTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        said = asked(f"http://127.0.0.1:{server.server_port}", "me/absent", "me/gated", "me/there", "me/adapter",
                     "qwen/Qwen2.5-VL-3B-instruct2")
        server.shutdown()
    assert "me/absent': the Hub has no such model" in said[0] and "restricted" in said[1]
    assert said[2:4] == ["me/there passes", "me/adapter passes"]
    assert "Did you mean 'Qwen/Qwen2.5-VL-3B-Instruct'" in said[4]
    (said,) = asked("http://127.0.0.1:9", "me/there")
    assert "the Hub cannot be reached" in said


def test_an_adapter_leads_to_its_base_model(tmp_path):
    for base, says in (("embedded/tiny-qwen3-vl", ""), ("embedded/tiny", "no such embedded model"),
                       ("./gone", "is an adapter, but its base model './gone': this folder does not exist")):
        (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
        if says:
            with pytest.raises(ConfigError, match=says):
                check_model(ModelSettings(name=str(tmp_path)))
        else:
            check_model(ModelSettings(name=str(tmp_path)))
