"""Several processes give what one gives (torchrun, gloo)."""

import subprocess
import sys

import pytest
import torch

from tests.conftest import TWO
from tests.e2e.replay import main
from tests.e2e.runs import ENV, ROOT, metrics, run, write_config

pytestmark = pytest.mark.slow
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


@pytest.mark.parametrize("family", TWO)
def test_gradient_of_one_and_two_processes(tiny_models, tmp_path, family):
    main(str(tiny_models[family]), str(tmp_path / "one"))
    subprocess.run([*TORCHRUN, "2", "-m", "tests.e2e.replay", str(tiny_models[family]), str(tmp_path / "two")],
                   check=True, cwd=ROOT, env={**ENV, "ACCELERATE_USE_CPU": "true"}, timeout=300)
    one, two = (torch.load(tmp_path / name, weights_only=True) for name in ("one", "two"))
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-5, abs=1e-7)
    assert one["gradients"].keys() == two["gradients"].keys()
    for name, gradient in one["gradients"].items():
        assert (two["gradients"][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max() + 1e-9, name


def test_a_whole_run_with_two_processes(tiny_models, tmp_path):
    """Same groups, same rewards, nearly the same numbers; one run folder."""
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    words = ("steps=4", "eval.every=2", "save.every=2")
    done = run(config, tmp_path / "one", *words)
    assert done.returncode == 0, done.stderr
    done = run(config, tmp_path / "two", *words, launcher=[*TORCHRUN, "2", str(ROOT / "train.py")],
               ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    one, two = metrics(tmp_path / "one"), metrics(tmp_path / "two")
    assert [m["step"] for m in two] == list(range(4))
    for name in ("reward/mean", "loss", "grad_norm", "entropy", "completion/length_mean"):
        assert two[0][name] == pytest.approx(one[0][name], rel=1e-3, abs=1e-5), name
    assert len(list((tmp_path / "two" / "rollouts").glob("step-*-rank-*.parquet"))) == 8
    evals = metrics(tmp_path / "two", "eval.jsonl")
    assert [(e["step"], e["n"]) for e in evals] == [(0, 8), (2, 8), (4, 8)]


def test_an_error_on_one_process_ends_all_with_its_message(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    task = tmp_path / "shades.py"
    task.write_text(task.read_text().replace("Media(source=", "Media(source='gone.png' if i == 1 else "))
    done = run(config, tmp_path / "run", "curriculum.name=sequential", "eval.samples=0",
               launcher=[*TORCHRUN, "2", str(ROOT / "train.py")], ACCELERATE_USE_CPU="true")
    assert done.returncode != 0
    assert done.stderr.count("error: ") >= 2 and "gone.png" in done.stderr
    assert "closed by peer" not in done.stderr and "gloo" not in done.stderr


def test_fewer_prompts_than_processes_and_nothing_kept(tiny_models, tmp_path):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    done = run(config, tmp_path / "run", "steps=2", "rollout.prompts_per_step=1", "curriculum.keep=mixed",
               "curriculum.max_refills=1", "eval.samples=1", launcher=[*TORCHRUN, "2", str(ROOT / "train.py")],
               ACCELERATE_USE_CPU="true")
    assert done.returncode == 0, done.stderr
    assert [m["step"] for m in metrics(tmp_path / "run")] == [0, 1]
