"""`vlrl extrapolate`: weights beyond a checkpoint."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlrl.cli.main import main
from vlrl.errors import ConfigError, RunError
from vlrl.tools.stages.extrapolate import extrapolate


def folder(path, adapter=None, **weights):
    path.mkdir()
    for name, tensors in weights.items():
        save_file(tensors, path / f"{name}.safetensors")
    (path / "config.json").write_text(json.dumps({"of": path.name}))
    (path / "trainer_state.json").write_text("{}")
    save_file({"moment": torch.zeros(2)}, path / "trainer_state.safetensors")
    if adapter is not None:
        (path / "adapter_config.json").write_text(json.dumps(adapter))
    return path


@pytest.fixture
def two(tmp_path):
    a = folder(tmp_path / "a", model={"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([3])})
    b = folder(tmp_path / "b", one={"w": torch.tensor([2.0, 2.0])}, two={"n": torch.tensor([3])})
    return a, b


def test_by_hand(two, tmp_path):
    for k, expected in ((1.0, [3, 2]), (0.5, [2.5, 2]), (0, [2, 2]), (-1, [1, 2])):
        out = tmp_path / f"out{k}"
        done = extrapolate(*two, out, k)
        assert load_file(out / "one.safetensors")["w"].tolist() == expected, k
        assert load_file(out / "two.safetensors")["n"].tolist() == [3]
        assert (done.tensors, done.moved, done.distance) == (2, 1, 1.0)
        assert sorted(p.name for p in out.iterdir()) == ["config.json", "one.safetensors", "two.safetensors"]
        assert json.loads((out / "config.json").read_text()) == {"of": "b"}


def test_adapters_in_sixteen_bits(tmp_path, capsys):
    same = {"base_model_name_or_path": "x", "r": 4, "lora_alpha": 8}
    for name, value in (("a", 1.0), ("b", 1.5)):
        folder(tmp_path / name, same, adapter_model={"lora_A": torch.full((2, 2), value, dtype=torch.bfloat16)})
    words = ["extrapolate", tmp_path / "a", tmp_path / "b", "-k", 2, "-o", tmp_path / "out", "--json"]
    assert main([str(w) for w in words]) == 0
    assert json.loads(capsys.readouterr().out)["moved"] == 1
    made = load_file(tmp_path / "out" / "adapter_model.safetensors")["lora_A"]
    assert made.dtype == torch.bfloat16 and (made == 2.5).all()


def test_what_cannot_be(two, tmp_path):
    a, b = two
    c = folder(tmp_path / "c", model={"w": torch.zeros(3), "n": torch.tensor([3])})
    d = folder(tmp_path / "d", {"r": 4}, adapter_model={"v": torch.zeros(2)})
    e = folder(tmp_path / "e", {"r": 8}, adapter_model={"v": torch.zeros(2)})
    f = folder(tmp_path / "f", model={"v": torch.zeros(2)})
    out = tmp_path / "out"
    for left, right, says in ((a, c, r"'w' has shape \[2\]"), (a, d, "a complete model and .*an adapter"),
                              (d, e, "different values of r"), (a, f, "only one of them has the weight"),
                              (a, tmp_path / "g", "is not a folder")):
        with pytest.raises(RunError, match=says):
            extrapolate(left, right, out)
        assert not out.exists() and not list(tmp_path.glob(".tmp-*"))
    with pytest.raises(RunError, match="not an empty folder"):
        extrapolate(a, b, a)
    with pytest.raises(ConfigError, match="not a finite number"):
        extrapolate(a, b, out, float("inf"))
