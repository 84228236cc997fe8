"""Reward models on two processes: what `vlrl sft` makes of pairs, and the scores of a run that is paid by one, are
those of one process."""

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.e2e import forked, runs
from tests.training.test_pairs import words, write
from vlrl.models.heads import HEAD
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow

SFT = ("-m", "vlrl", "sft", str(runs.ROOT / "configs/preference/reward_model.yaml"))


@pytest.fixture(scope="module")
def trained(tiny_models, tmp_path_factory):
    """The run folders of a reward model by how many processes learned it, five pairs a step."""
    root, folders = tmp_path_factory.mktemp("pairs"), {}
    for processes in (1, 2):
        folder = write(root / str(processes))
        given = words(folder, tiny_models["qwen3_vl"], "rollout.prompts_per_step=5", "log.samples_every=0")
        done = forked.run([*SFT, *given], runs.ENV, folder, 300, processes)
        assert done.returncode == 0, done.stdout + done.stderr
        folders[processes] = folder / "run"
    return folders


def test_two_processes_learn_the_reward_model_of_one(trained):
    """Though five pairs are shared out unequally: loss, accuracy, gradient, head, weights, and held-out pairs."""
    one, two = (runs.metrics(trained[n]) for n in (1, 2))
    assert len(one) == len(two) == 4 and len({line["pairs/loss"] for line in one}) == 4
    for a, b in zip(one, two, strict=True):
        for name in ("pairs/loss", "pairs/margin", "grad_norm"):
            assert b[name] == pytest.approx(a[name], rel=1e-3, abs=1e-5), (a["step"], name)
        assert b["pairs/accuracy"] == pytest.approx(a["pairs/accuracy"], abs=1e-6)
    evals = [runs.metrics(trained[n], "eval.jsonl") for n in (1, 2)]
    for a, b in zip(*evals, strict=True):
        assert (b["n"], b["step"]) == (a["n"], a["step"]) and b["accuracy"] == a["accuracy"]
        assert b["loss"] == pytest.approx(a["loss"], abs=1e-4)
    places = [trained[n] / "checkpoints/step-000004" for n in (1, 2)]
    start = trained[1] / "checkpoints/step-000002"
    for name in (HEAD, "model.safetensors"):
        a, b = (load_file(place / name) for place in places)
        assert a.keys() == b.keys()
        assert all((a[key] - b[key]).abs().max() < 2e-4 for key in a), name
        assert any((a[key] - old).abs().max() > 5e-4 for key, old in load_file(start / name).items()), name


def test_a_run_on_two_processes_is_paid_as_one_is(trained, tiny_models, tmp_path):
    """The scores of step 0, answer by answer, and their count over both processes, also of evaluations."""
    config = runs.write_config(tmp_path, tiny_models["qwen3_vl"])
    given = (*runs.FEW, "rollout.prompts_per_step=3", "steps=2", "task.parts=[reward_model]",
             f"services.reward_model.name=[{trained[1]},{trained[2]}]")
    lines, scores = {}, {}
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        runs.finished(config, folder, *given, processes=processes)
        lines[processes] = runs.metrics(folder)
        scores[processes] = {(r["group_id"], r["index"]): dict(r["parts"])["reward_model"]
                             for r in RunFolder(folder).rollouts(0).to_pylist()}
        assert [line["reward_model/scored"] for line in lines[processes]] == [6, 6]
        assert all(line["reward_model/failed"] == 0 for line in lines[processes])
        assert all(e["reward_model/scored"] == 2 for e in runs.metrics(folder, "eval.jsonl"))
    assert scores[1].keys() == scores[2].keys() and len(scores[1]) == 6 and np.std([*scores[1].values()]) > 1e-3
    assert all(scores[2][key] == pytest.approx(value, abs=1e-5) for key, value in scores[1].items())
    for name in ("reward/reward_model", "reward/mean", "grad_norm"):
        assert lines[2][0][name] == pytest.approx(lines[1][0][name], rel=1e-3, abs=1e-5), name
