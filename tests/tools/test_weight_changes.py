"""Weights that differ between two models and beyond both: by hand, and against models in memory."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from vlrl.cli.main import main
from vlrl.errors import ConfigError, RunError
from vlrl.tools.experiments import weight_changes as module
from vlrl.tools.experiments.weight_changes import weight_changes
from vlrl.tools.stages.extrapolate import extrapolate


def folder(path, weights, **files):
    path.mkdir(parents=True)
    for i, (name, tensor) in enumerate(weights.items()):
        save_file({name: tensor}, path / f"model-{i}.safetensors")
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_counts_by_hand(tmp_path, monkeypatch):
    a = folder(tmp_path / "a", {"model.layers.0.up.weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
                                "model.layers.1.up.weight": torch.zeros(1, 2), "s": torch.tensor(1.0)})
    b = folder(tmp_path / "b", {"model.language_model.layers.0.up.weight": torch.tensor([[1.0, 2.5], [3.000001, 4.0]]),
                                "layers.1.up.weight": torch.tensor([[0.0, -2.0]]), "s": torch.tensor(1.0),
                                "extra": torch.zeros(3)})
    for block in (2**24, 2):
        monkeypatch.setattr(module, "_BLOCK", block)
        found = weight_changes(a, b)
        assert list(found.kinds) == ["layers.up.weight", "s"] and found.unmatched == ("extra",)
        kind, total = found.kinds["layers.up.weight"], found.total
        assert (kind.tensors, kind.weights, kind.changed, kind.equal, kind.lost) == (2, 6, 2, 3, 0), block
        assert total.share == pytest.approx(2 / 7) and total.distance == pytest.approx(4.25 ** 0.5, abs=1e-5)
        assert total.norm == pytest.approx(31 ** 0.5, abs=1e-9)
    a = folder(tmp_path / "c", {"w": torch.tensor([1.0, 1.0, 1.0, -3.0]).bfloat16()})
    b = folder(tmp_path / "d", {"w": torch.tensor([1.0, 1.001, 1.01, -3.0])})  # one step at 1 is 2 ** -7
    total = weight_changes(a, b).total
    assert (total.changed, total.equal, total.lost) == (1, 3, 1)


def adapter(path, base, rank=2, **settings):
    torch.manual_seed(rank)
    name = "base_model.model.model.language_model.layers.0.q.lora_{}.weight"
    weights = {name.format("A"): torch.randn(rank, 6), name.format("B"): torch.randn(4, rank)}
    folder(path, weights, adapter_config={"base_model_name_or_path": str(base), "lora_alpha": 8, "peft_type": "LORA",
                                          **settings})
    return weights[name.format("B")] @ weights[name.format("A")]


def test_adapters_count_as_what_they_add(tmp_path):
    base = folder(tmp_path / "base", {"model.layers.0.q.weight": torch.randn(4, 6), "model.x.weight": torch.randn(3)})
    other = adapter(tmp_path / "other", base, rank=3)
    for settings, scale in (({}, 4), ({"use_rslora": True}, 8 / 2 ** 0.5), ({"alpha_pattern": {"layers.0.q": 2}}, 1)):
        step = tmp_path / f"run{scale}" / "checkpoints" / "step-000001"
        added = adapter(step, base, **settings)
        found = weight_changes(step)
        assert found.total.distance == pytest.approx(float(added.norm()) * scale, rel=1e-5), settings
        assert found.total.changed == 24 and found.kinds["x.weight"].changed == 0 and found.a == str(base)
        apart = weight_changes(step, tmp_path / "other").total.distance
        assert apart == pytest.approx(float((added * scale - other * 8 / 3).norm()), rel=1e-5), settings


def test_what_cannot_be_compared(tmp_path):
    a = folder(tmp_path / "a", {"w": torch.zeros(2)})
    adapter(tmp_path / "e", folder(tmp_path / "other", {"z": torch.zeros(2)}))
    dora = folder(tmp_path / "f", {"q.lora_magnitude_vector": torch.zeros(2)},
                  adapter_config={"base_model_name_or_path": str(a)})
    unknown = folder(tmp_path / "run" / "checkpoints" / "x", {"w": torch.zeros(2)})
    (tmp_path / "run" / "config.yaml").write_text("model: 3")
    for left, right, error, says in (
            (a, None, RunError, "neither a run folder nor"), (a, {"w": (3,)}, RunError, r"shape \[2\] .* \[3\]"),
            (a, {"v": (2,)}, RunError, "no weight in common"), ("nobody/has-this", a, RunError, "cache of the Hub"),
            (tmp_path / "e", None, RunError, r"changes 'layers.0.q.weight', which its base"),
            (dora, a, ConfigError, "not a factor of a plain LoRA"), (unknown, None, RunError, "does not say which")):
        if isinstance(right, dict):
            right = folder(tmp_path / says[:2], {name: torch.zeros(shape) for name, shape in right.items()})
        with pytest.raises(error, match=says):
            weight_changes(*((left,) if right is None else (left, right)))
    with pytest.raises(ConfigError, match="quantized models"):
        weight_changes(a, folder(tmp_path / "d", {"w": torch.zeros(2, dtype=torch.uint8)}))


def test_the_command(tmp_path, capsys):
    a = folder(tmp_path / "a", {"w": torch.tensor([0.0, 0.0])})
    b = folder(tmp_path / "b", {"w": torch.tensor([0.0, 1.0]), "lm_head": torch.zeros(1)})
    assert main(["compare", "--weights", str(a), str(b), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["total"]["share"] == 0.5 and found["unmatched"] == ["lm_head"]
    assert main(["compare", "--weights", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert "50.00%" in out and "them: lm_head" in out
    for words, code in ((["--metric", "x"], 2), (["--sequential"], 2), ([str(a)], 2)):
        assert main(["compare", "--weights", str(a), str(b), *words]) == code
        capsys.readouterr()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [0, 2])
def test_a_run_changes_what_it_trains_alone(tiny_models, tmp_path, capsys, lora):
    """Against the two models in memory; of a LoRA run the layers with an adapter changed, and nothing else."""
    from tests.e2e.runs import FEW, write_config
    from vlrl.models.loading import load_model
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    words = [f"run.dir={tmp_path}/run", *FEW, "train.lr=1e-2", f"model.lora.rank={lora}"]
    assert main(["train", str(config), *words]) == 0
    capsys.readouterr()
    found = weight_changes(tmp_path / "run")
    step = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    first, second = (dict(load_model(str(path), torch.float32).named_parameters())
                     for path in (tiny_models["qwen3_vl"], step))
    square = sum(float((first[name] - second[name]).detach().double().square().sum()) for name in first)
    assert found.total.distance == pytest.approx(square ** 0.5, rel=1e-4) and found.total.distance > 0
    kinds = [kind for kind, change in found.kinds.items() if change.distance > 0]
    assert kinds and any("norm" in kind for kind in kinds) == (lora == 0)  # an adapter leaves them alone


def checkpoint(path, adapter=None, **weights):
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
    a = checkpoint(tmp_path / "a", model={"w": torch.tensor([1.0, 2.0]), "n": torch.tensor([3])})
    b = checkpoint(tmp_path / "b", one={"w": torch.tensor([2.0, 2.0])}, two={"n": torch.tensor([3])})
    return a, b


def test_beyond_a_checkpoint_by_hand(two, tmp_path):
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
        checkpoint(tmp_path / name, same, adapter_model={"lora_A": torch.full((2, 2), value, dtype=torch.bfloat16)})
    words = ["extrapolate", tmp_path / "a", tmp_path / "b", "-k", 2, "-o", tmp_path / "out", "--json"]
    assert main([str(w) for w in words]) == 0
    assert json.loads(capsys.readouterr().out)["moved"] == 1
    made = load_file(tmp_path / "out" / "adapter_model.safetensors")["lora_A"]
    assert made.dtype == torch.bfloat16 and (made == 2.5).all()


def test_weights_that_lie_on_no_line(two, tmp_path):
    a, b = two
    c = checkpoint(tmp_path / "c", model={"w": torch.zeros(3), "n": torch.tensor([3])})
    d = checkpoint(tmp_path / "d", {"r": 4}, adapter_model={"v": torch.zeros(2)})
    e = checkpoint(tmp_path / "e", {"r": 8}, adapter_model={"v": torch.zeros(2)})
    f = checkpoint(tmp_path / "f", model={"v": torch.zeros(2)})
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
