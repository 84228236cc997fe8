"""The notebooks of examples/ run from nothing and show what they say; the update of minimal_grpo.py is that of vlrl."""

import json
import math
import os
import re
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator

from tests.e2e import forked
from tests.e2e.runs import ROOT
from vlrl import load_config
from vlrl.algo.advantage import grpo
from vlrl.config.registry import file_module
from vlrl.rollout.generate import make_group
from vlrl.training.advantages import credit
from vlrl.training.update import update

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_are_kept_without_outputs(path):
    cells = json.loads(path.read_text())["cells"]
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in cells)


class Kernel(forked.Process):
    """A kernel as Jupyter would start it, forked: what is tested are the notebooks."""

    stdin = stdout = stderr = None

    def __init__(self, command, env, cwd, **_):
        with Path(cwd, "kernel.log").open("w") as log:
            own = {**env, "JPY_PARENT_PID": str(os.getpid())}  # it ends where that process is gone
            super().__init__(command[1:], own, Path(cwd), log, log, start_new_session=True)


def executed(path, folder, monkeypatch, steps):
    """The outputs of a notebook that was run in `folder` with `steps` training steps, and the text that it printed."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    monkeypatch.setattr("jupyter_client.provisioning.local_provisioner.launch_kernel", Kernel)
    monkeypatch.setenv("STEPS", str(steps))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=900, kernel_name="python3",
                                     resources={"metadata": {"path": str(folder)}})
    client.execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    return outputs, "".join(output.get("text", "") for output in outputs)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_run(path, tmp_path, monkeypatch):
    outputs, printed = executed(path, tmp_path, monkeypatch, steps=20 if path.stem == "own_task" else 2)
    shown = [kind for output in outputs for kind in output.get("data", ())]
    assert shown.count("image/png") >= 2  # the curve, and pictures
    assert "Error" not in printed and "FAILED" not in printed, printed
    if path.stem == "own_task":  # a function as reward is learned from
        ((before, after),) = re.findall(r"held-out reward (\S+) -> (\S+)", printed)
        assert float(after) > float(before) + 0.05, printed
        assert "1.0 0.0" in printed


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "minimal_grpo.py"
minimal = file_module(EXAMPLE)


class Recorder(torch.optim.SGD):
    """Keeps the gradients of each step, as they come out of clipping, and takes it."""

    def __init__(self, policy, lr):
        self.weights, self.steps = dict(policy.trainable()), []
        super().__init__([{"params": [*self.weights.values()], "ratio": 1.0}], lr=lr)

    def step(self, closure=None):
        self.steps.append({name: p.grad.clone() for name, p in self.weights.items()})
        super().step()


@pytest.fixture(scope="module")
def parts():
    lr = 0.2  # so far that the second pass is clipped
    config = load_config("configs/tiny.yaml", task=f"{EXAMPLE}:FindShape", steps=1,
                         algo={"loss": "ppo_clip", "advantage": "grpo", "aggregation": "sequence_mean"},
                         rollout={"updates": 2, "group_size": 4}, train={"lr": lr, "tokens_per_batch": 200})
    policy = minimal.policies.load(config, Accelerator(cpu=True))
    encode = minimal.Encoder(policy.processor, policy.family, policy.positions, config)
    task, engine = minimal.FindShape(), minimal.HFEngine(policy, seed=0)
    samples = task.samples("train")[:4]
    groups = minimal.sample_groups(task, samples, encode, engine, step=0, size=4, temperature=1.5)
    assert len({len(c.tokens) for g in groups for c in g.completions}) > 1  # else all means are one
    return config, policy, task, samples, groups


def stepped(policy, lr, work):
    """Gradients and weights of the optimizer steps of `work(optimizer)`; the weights are put back."""
    before = {name: p.detach().clone() for name, p in policy.trainable()}
    optimizer = Recorder(policy, lr)
    result = work(optimizer)
    after = {name: p.detach().clone() for name, p in policy.trainable()}
    with torch.no_grad():
        for name, p in policy.trainable():
            p.copy_(before[name])
    return optimizer.steps, after, result


def test_its_update_is_that_of_vlrl(parts):
    config, policy, task, samples, groups = parts
    scored = credit([make_group(task, sample, g.prompt, g.completions, group_id=str(i), split="train", step=0)
                     for i, (sample, g) in enumerate(zip(samples, groups, strict=True))], grpo)
    ours, ended, metrics = stepped(policy, config.train.lr, lambda o: minimal.update(policy, o, groups, config))
    theirs, also, (stats, _) = stepped(policy, config.train.lr, lambda o: update(policy, o, scored, config, step=0))
    assert stats["clip_frac"] > 0 and metrics["beyond_clip"] > 0
    assert metrics["loss"] == pytest.approx(stats["loss"], abs=1e-5)
    assert len(ours) == len(theirs) == 2
    for mine, other in [*zip(ours, theirs, strict=True), (ended, also)]:
        for name in mine:
            assert (mine[name] - other[name]).abs().max() <= 1e-5 * other[name].abs().max() + 1e-9, name


def test_advantages_of_a_group_by_hand_and_two_steps_that_move_every_weight(parts, monkeypatch):
    group = parts[-1][0]
    values = [0.0, 0.5, 1.0, 0.5]
    some = minimal.Group(group.prompt, group.completions, minimal.np.array(values))
    spread = math.sqrt(sum((v - 0.5) ** 2 for v in values) / 3)
    assert some.advantages.tolist() == pytest.approx([(v - 0.5) / (spread + 1e-4) for v in values])
    alike = minimal.Group(group.prompt, group.completions, minimal.np.full(4, 0.3))
    assert not alike.advantages.any()
    policy = parts[1]
    start = {name: p.detach().clone() for name, p in policy.trainable()}
    monkeypatch.setattr(minimal, "PROMPTS", 4)
    monkeypatch.setattr(minimal.policies, "load", lambda *_: policy)
    minimal.train(steps=2, count=4)
    assert all((p != start[name]).any() for name, p in policy.trainable())


@pytest.mark.slow
def test_the_heldout_reward_rises():
    before, after = minimal.train(steps=12, count=64)
    assert after > before + 0.05
