"""Whole runs whose rewards ask a service: a judge over HTTP, log-probabilities, reward models; killed and resumed, and
on two processes."""

import json
from collections import Counter
from hashlib import sha256

import numpy as np
import pytest
from safetensors.torch import load_file

from tests.e2e import forked, runs
from tests.evaluation.http_stand_in import served
from tests.training.test_pairs import words as pair_words
from tests.training.test_pairs import write
from vlrl.models.heads import HEAD
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow

JUDGED = '''
    needs = {"judge": ("quality",)}

    def score_group(self, sample, answers, services):
        replies = services.judge([f"How good is {a.text!r}?" for a in answers])
        return [{"quality": None if r is None else float(r)} for r in replies]
'''


def verdict(body, number):
    """By what is asked alone, so that a run can be compared with another one."""
    return str(sha256(body["messages"][0]["content"].encode()).digest()[0] / 256)


def judged_config(tmp_path, tiny_models, extra=""):
    path = runs.write_config(tmp_path, tiny_models["qwen3_vl"], extra)
    task = (tmp_path / "shades.py").read_text().replace('"short": 0.1}', '"short": 0.1, "quality": 1.0}')
    (tmp_path / "shades.py").write_text(task + JUDGED)
    return path


def judge_words(server, *more):
    return (*runs.FEW, f"services.judge.url={server.url}", "services.judge.model=critic", *more)


def asked(server):
    return Counter(body["messages"][0]["content"] for *_, body in server.asked)


def test_a_killed_run_asks_nothing_twice(tmp_path, tiny_models):
    """The undisturbed run bit for bit, with its metrics of the judge; no question is asked a second time."""
    config = judged_config(tmp_path, tiny_models)
    with served(verdict, models=("critic",)) as server:
        runs.finished(config, tmp_path / "whole", *judge_words(server))
        whole = asked(server)
    with served(verdict, models=("critic",)) as server:
        runs.kill_after(config, tmp_path / "killed", 3, *judge_words(server))
        runs.finished(config, tmp_path / "killed", *judge_words(server))
        assert asked(server) == whole and max(whole.values()) == 1
    runs.assert_same_run(tmp_path / "killed", tmp_path / "whole")
    lines = runs.metrics(tmp_path / "whole")
    assert sum(line["judge/calls"] + line["judge/cached"] for line in lines) == 5 * 4
    evals = runs.metrics(tmp_path / "whole", "eval.jsonl")
    assert all(line["judge/calls"] + line["judge/cached"] == 2 for line in evals)
    table = RunFolder(tmp_path / "whole").rollouts()
    for text, parts in zip(table["completion"].to_pylist(), table["parts"].to_pylist(), strict=True):
        assert dict(parts)["quality"] == float(verdict({"messages": [{"content": f"How good is {text!r}?"}]}, 0))


def test_a_judge_that_is_away_for_a_step(tmp_path, tiny_models):
    """What it was to judge is unscorable, says why, is counted and told of; the run goes on."""
    config = judged_config(tmp_path, tiny_models)
    known = []
    def script(body, number):
        known.append(number)
        return 500 if 8 <= len(known) < 12 else verdict(body, number)
    with served(script, models=("critic",)) as server:
        done = runs.run(config, tmp_path / "run", *judge_words(server, "services.judge.retries=0", "eval.samples=0",
                                                        "limits.service_errors=1"))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = runs.metrics(tmp_path / "run")
    assert len(lines) == 5 and sum(line["judge/failed"] for line in lines) == 4
    assert any(line["service_errors"] > 0 for line in lines) and all(line["score_errors"] == 0 for line in lines)
    lost = [row for row in RunFolder(tmp_path / "run").rollouts().to_pylist() if row["error"]]
    assert lost and all(row["reward"] is None and row["error"].startswith("service: judge: 500") and
                        row["advantage"] == 0 and dict(row["parts"])["quality"] is None for row in lost)
    alerts = [json.loads(line)["alert"] for line in (tmp_path / "run/alerts.jsonl").read_text().splitlines()]
    assert "service_errors_above" in alerts


def test_too_many_failures_stop_a_run_that_then_goes_on(tmp_path, tiny_models):
    config = judged_config(tmp_path, tiny_models)
    with served(lambda body, number: 500, models=("critic",)) as server:
        failed = runs.run(config, tmp_path / "run", *judge_words(server, "services.judge.retries=0", "eval.samples=0"))
        assert failed.returncode == 1 and "limits.service_errors=0.5" in failed.stdout + failed.stderr
    with served(verdict, models=("critic",)) as server:
        done = runs.run(config, tmp_path / "run", *judge_words(server, "eval.samples=0"))
    assert done.returncode == 0 and len(runs.metrics(tmp_path / "run")) == 5, done.stdout + done.stderr


def test_two_processes_have_the_rewards_of_one(tmp_path, tiny_models):
    config = judged_config(tmp_path, tiny_models)
    for name, processes in (("one", 1), ("two", 2)):
        with served(verdict, models=("critic",)) as server:
            runs.finished(config, tmp_path / name, *judge_words(server, "steps=2"), processes=processes)
    one, two = (runs.metrics(tmp_path / name)[0] for name in ("one", "two"))
    assert one["reward/quality"] == pytest.approx(two["reward/quality"], abs=1e-6)
    assert len(list((tmp_path / "two/services").glob("judge-rank-*.jsonl"))) == 2


def test_a_judge_that_nobody_needs_is_inert(tmp_path, tiny_models):
    config = runs.write_config(tmp_path, tiny_models["qwen3_vl"])
    done = runs.run(config, tmp_path / "run", *runs.FEW, "steps=1", "eval.samples=0",
                    "services.judge.url=http://127.0.0.1:1/v1", "services.judge.model=critic")
    assert done.returncode == 0 and "inert: services.judge.url" in done.stdout + done.stderr


PARTS = """
    needs = {"policy_logprobs": ("likely",), "reference_logprobs": ("known",)}

    def readings(self, service, sample, answers):
        inside = [Reading(None, a.text[:3] or "x") for a in answers]
        return inside if service == "policy_logprobs" else inside[:1]

    def score_group(self, sample, answers, services):
        found = services.policy_logprobs(self.readings("policy_logprobs", sample, answers))
        known = services.reference_logprobs(self.readings("reference_logprobs", sample, answers))
        return [{"likely": float(v.mean()), "known": float(known[0].mean())} for v in found]
"""
LIKELY = (*runs.FEW, "services.reference=ema", "algo.reference.every=1", "algo.reference.decay=0.5")


def likely_config(tmp_path, tiny_models):
    path = runs.write_config(tmp_path, tiny_models["qwen3_vl"])
    task = (tmp_path / "shades.py").read_text().replace('"short": 0.1}', '"short": 0.1, "likely": 0.1, "known": 0.0}')
    task = "from vlrl.task.services import Reading\n" + task
    (tmp_path / "shades.py").write_text(task + PARTS)
    return path


def test_a_killed_run_and_one_of_two_processes_are_the_undisturbed_one(tmp_path, tiny_models):
    config = likely_config(tmp_path, tiny_models)
    runs.finished(config, tmp_path / "whole", *LIKELY)
    runs.kill_after(config, tmp_path / "killed", 3, *LIKELY)
    runs.finished(config, tmp_path / "killed", *LIKELY)
    runs.assert_same_run(tmp_path / "killed", tmp_path / "whole")
    lines = runs.metrics(tmp_path / "whole")
    assert [line["logprobs/policy_step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["logprobs/texts"] >= 2 for line in lines)
    table = RunFolder(tmp_path / "whole").rollouts()
    parts = [dict(p) for p in table["parts"].to_pylist()]
    assert all(np.isfinite([p["likely"], p["known"]]).all() and p["likely"] < 0 for p in parts)
    runs.finished(config, tmp_path / "two", *LIKELY, processes=2)
    (first,) = runs.metrics(tmp_path / "two")[:1]
    assert first["logprobs/texts"] == lines[0]["logprobs/texts"]
    assert first["reward/likely"] == pytest.approx(lines[0]["reward/likely"], abs=1e-5)
    assert first["reward/known"] == pytest.approx(lines[0]["reward/known"], abs=1e-5)


SFT = ("-m", "vlrl", "sft", str(runs.ROOT / "configs/preference/reward_model.yaml"))


@pytest.fixture(scope="module")
def trained(tiny_models, tmp_path_factory):
    """The run folders of a reward model by how many processes learned it, five pairs a step."""
    root, folders = tmp_path_factory.mktemp("pairs"), {}
    for processes in (1, 2):
        folder = write(root / str(processes))
        given = pair_words(folder, tiny_models["qwen3_vl"], "rollout.prompts_per_step=5", "log.samples_every=0")
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
