"""What is sent to the Hub, against a server with its routes over real HTTP."""

import pytest

from tests.data.hub_server import hub, use
from vlrl.errors import ConfigError, RunError
from vlrl.tools.hub.push import HubTarget, push, sizes, token

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")  # the library
MODEL = HubTarget("org/model")
TOKEN = "hf_averysecrettoken"


@pytest.fixture
def served(monkeypatch):
    with hub() as served:
        use(monkeypatch, served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        served.tokens, served.large = {TOKEN}, 1000
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield served


def weights(tmp_path, name="model.safetensors", byte=b"w"):
    (tmp_path / name).write_bytes(byte * 5000)
    return tmp_path / name


def test_files_arrive_in_one_commit_and_public_models_are_not_filled(served, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": weights(tmp_path)}
    assert push(MODEL, files, "first").endswith("org/model")
    assert served.head("org/model") == {"config.json": b"{}", "model.safetensors": b"w" * 5000}
    assert served.private == {"org/model": True} and len(served.commits["org/model"]) == 1
    assert sizes(files) == [("config.json", 2), ("model.safetensors", 5000)]
    push(HubTarget("org/open", public=True), {"config.json": b"{}"}, "open")
    assert served.private["org/open"] is False
    with pytest.raises(ConfigError, match=r"org/open exists and is public: nothing is sent\. Pass"):
        push(HubTarget("org/open"), {"secret.json": b"{}"}, "x")
    assert list(served.head("org/open")) == ["config.json"]
    parts = {f"model-0000{i}-of-00002.safetensors": weights(tmp_path, byte=bytes([i])) for i in (1, 2)}
    push(MODEL, {"notes.md": b"mine", "model.safetensors.index.json": b"{}", **parts}, "in parts")
    push(MODEL, {"config.json": b"{}", "model.safetensors": weights(tmp_path)}, "whole")
    assert sorted(served.head("org/model")) == ["config.json", "model.safetensors", "notes.md"]


def test_a_refused_token_is_not_repeated(served, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_anothersecrettoken")
    with pytest.raises(RunError, match=r"Hub refused the request with status 401\. HF_TOKEN is") as error:
        push(MODEL, {"config.json": b"{}"}, "x")
    assert "hf_" not in str(error.value) and error.value.__cause__ is None and error.value.__suppress_context__
    served.refusals["org/closed"] = 403, ""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(RunError, match=r"status 403\. Set HF_TOKEN to a token with write access"):
        push(HubTarget("org/closed"), {"config.json": b"{}"}, "x")
    assert served.commits == {}


def test_the_token_comes_from_the_environment_alone(served, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="HF_TOKEN is not set"):
        push(MODEL, {"config.json": b"{}"}, "x")
    assert served.asked == []
    use(monkeypatch, served.url, offline=True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, so nothing is sent"):
        token("org/model")


def test_a_cut_connection_leaves_nothing_and_the_next_push_sends_the_rest(served, tmp_path):
    first, second = weights(tmp_path, "a.safetensors", b"a"), weights(tmp_path, "b.safetensors", b"b")
    push(HubTarget("org/other"), {"a.safetensors": first}, "has the object already")
    served.cuts = 10**6
    with pytest.raises(RunError, match=r"the connection was lost: .* Repeat the command"):
        push(MODEL, {"a.safetensors": first, "b.safetensors": second}, "x")
    assert "org/model" not in served.commits
    served.cuts, before = 1, len(served.asked)  # once more it is cut, and the library tries again
    push(MODEL, {"a.safetensors": first, "b.safetensors": second}, "x")
    sent = [line for line in served.asked[before:] if line.startswith("PUT")]
    assert len(sent) == 2 and len(set(sent)) == 1  # b, twice; a was there
    assert served.head("org/model") == {"a.safetensors": b"a" * 5000, "b.safetensors": b"b" * 5000}


def test_names_that_are_none_and_no_hub(served, monkeypatch):
    for name in ("a b/c", "name", "a/b/c", "-x/y"):
        with pytest.raises(ConfigError, match="is not a valid model name"):
            push(HubTarget(name), {"config.json": b"{}"}, "x")
        assert served.asked == [], name
    use(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(RunError, match="the Hub cannot be reached, or the connection was lost: ConnectError"):
        push(MODEL, {"config.json": b"{}"}, "x")
