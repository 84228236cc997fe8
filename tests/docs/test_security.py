"""No code of ours runs what it reads, and every line of docs/security.md names the test that covers it."""

import ast
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from vlrl import config
from vlrl.app.textfiles import read_yaml
from vlrl.config import yaml_text
from vlrl.errors import ConfigError
from vlrl.models.loading import load_model

ROOT = Path(__file__).resolve().parents[2]
CODE = [ROOT / "train.py", *sorted(p for folder in ("vlrl", "app", "tasks", "benchmarks")
                                   for p in (ROOT / folder).rglob("*.py"))]
PAGE = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
UNSAFE = ("pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve")
ALLOWED = {("vlrl/models/balance.py", "imports pickle"), ("vlrl/task/subprocess_scorer.py", "imports pickle"),
           ("vlrl/environments/host.py", "imports pickle"),
           ("vlrl/data/sources/download.py", "verify=_context(remote.policy.guard.trusted)"),
           ("vlrl/monitoring/webhook.py", "verify=ssl.create_default_context()")}
"""What moves between the processes of one run, and between a run and the process of its own code that scores; what
torch.distributed gathers goes the same way. And contexts that check certificates, against those of the system, where
httpx's own has those of a package; tests/data/test_download.py has certificates that are refused."""
NAMES = ("eval", "exec", "compile", "__import__")
CALLS = {"os.system": "starts a shell", "os.popen": "starts a shell", "torch.load": "unpickles", "yaml.unsafe_load": "",
         "yaml.full_load": "", "tempfile.mktemp": "guessable", "ssl._create_unverified_context": ""}

TOLD = {"weights_only", "Loader", "allow_pickle", "shell", "trust_remote_code", "verify"}


def findings(path: Path) -> set[tuple[str, str]]:
    return {(path.relative_to(ROOT).as_posix(), what) for what in unsafe(ast.parse(path.read_text(encoding="utf-8")))}


def dotted(node):
    """`a.b.c` as it is written; "" for what is called without a name."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join([node.id, *names[::-1]]) if isinstance(node, ast.Name) else ""


def unsafe(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {m}" for m in modules if m.split(".")[0] in UNSAFE)
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            given = {k.arg: ast.unparse(k.value) for k in node.keywords if k.arg in TOLD}
            if name in NAMES or (name in CALLS and not (name == "torch.load" and given.get("weights_only") == "True")):
                yield f"calls {name}"
            if name == "yaml.load" and "loader" not in given.get("Loader", "").lower():
                yield "calls yaml.load without a loader of its own"
            if name in ("np.load", "numpy.load") and given.get("allow_pickle") != "False":
                yield "calls np.load that may unpickle"
            yield from (f"{key}={given[key]}" for key, right in (
                ("shell", "False"), ("trust_remote_code", "False"), ("verify", "True"), ("weights_only", "True"))
                if given.get(key, right) != right)


def test_no_code_runs_what_it_reads():
    found = set().union(*map(findings, CODE))
    assert found - ALLOWED == set()
    assert ALLOWED - found == set(), "an exception that is not needed"
    for line in ("import pickle", "from pickle import loads", "import joblib.numpy_pickle", "eval('1')", "exec(text)",
                 "os.system(x)", "torch.load(path)", "torch.load(path, weights_only=False)", "yaml.load(text)",
                 "subprocess.run(x, shell=True)", "yaml.load(text, Loader=yaml.X)", "np.load(path)",
                 "AutoModel.from_pretrained(n, trust_remote_code=True)", "np.load(path, allow_pickle=True)",
                 "httpx.get(url, verify=False)", "load(n, trust_remote_code=flag)"):
        assert list(unsafe(ast.parse(line))), line


def test_the_loaders_of_yaml_are_safe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert issubclass(yaml_text._Loader, yaml.SafeLoader)
    hostile = tmp_path / "a.yaml"
    hostile.write_text("a: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path [ran]]")
    with pytest.raises(ConfigError, match="python/object"):
        config.load(hostile)
    with pytest.raises((ValueError, yaml.YAMLError)):
        read_yaml(hostile, 10_000)
    assert not (tmp_path / "ran").exists()


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("unpickled"),)


def test_pickled_weights_are_not_loaded(tmp_path, tiny_models, monkeypatch):
    """Neither of a model nor of an adapter: safetensors or nothing."""
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    shutil.copytree(tiny_models["qwen2_5_vl"], model)
    for weights in model.glob("*.safetensors*"):
        weights.unlink()
    torch.save({"a": Bomb()}, model / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="safetensors"):
        load_model(model, torch.float32)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "base_model_name_or_path": str(tiny_models["qwen2_5_vl"]), "target_modules": "q_proj"}))
    torch.save({"a": Bomb()}, adapter / "adapter_model.bin")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors"):
        load_model(adapter, torch.float32)
    assert not (tmp_path / "unpickled").exists()


LINES = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith(("| threat", "|--"))]
TESTS = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def test_every_threat_names_a_test_that_exists():
    assert len(LINES) > 30
    assert [line for line in LINES if not TESTS.search(line)] == []
    named = set(TESTS.findall(PAGE))
    assert len(named) > 30
    found = {(file, node.name) for file in {file for file, _ in named}
             for node in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
             if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}
    assert named <= found, named - found
