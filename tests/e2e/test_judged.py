"""Whole runs whose reward asks a judge over HTTP: kill and resume, a judge that is away for some steps, two
processes."""

import json
from collections import Counter
from hashlib import sha256

import pytest

from tests.e2e import runs
from tests.evaluation.http_stand_in import served
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


def config_of(tmp_path, tiny_models, extra=""):
    path = runs.write_config(tmp_path, tiny_models["qwen3_vl"], extra)
    task = (tmp_path / "shades.py").read_text().replace('"short": 0.1}', '"short": 0.1, "quality": 1.0}')
    (tmp_path / "shades.py").write_text(task + JUDGED)
    return path


def words(server, *more):
    return (*runs.FEW, f"services.judge.url={server.url}", "services.judge.model=critic", *more)


def asked(server):
    return Counter(body["messages"][0]["content"] for *_, body in server.asked)


def test_a_killed_run_asks_nothing_twice(tmp_path, tiny_models):
    """The undisturbed run bit for bit, with its metrics of the judge; no question is asked a second time."""
    config = config_of(tmp_path, tiny_models)
    with served(verdict, models=("critic",)) as server:
        runs.finished(config, tmp_path / "whole", *words(server))
        whole = asked(server)
    with served(verdict, models=("critic",)) as server:
        runs.kill_after(config, tmp_path / "killed", 3, *words(server))
        runs.finished(config, tmp_path / "killed", *words(server))
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
    config = config_of(tmp_path, tiny_models)
    known = []
    def script(body, number):
        known.append(number)
        return 500 if 8 <= len(known) < 12 else verdict(body, number)
    with served(script, models=("critic",)) as server:
        done = runs.run(config, tmp_path / "run", *words(server, "services.judge.retries=0", "eval.samples=0",
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
    config = config_of(tmp_path, tiny_models)
    with served(lambda body, number: 500, models=("critic",)) as server:
        failed = runs.run(config, tmp_path / "run", *words(server, "services.judge.retries=0", "eval.samples=0"))
        assert failed.returncode == 1 and "limits.service_errors=0.5" in failed.stdout + failed.stderr
    with served(verdict, models=("critic",)) as server:
        done = runs.run(config, tmp_path / "run", *words(server, "eval.samples=0"))
    assert done.returncode == 0 and len(runs.metrics(tmp_path / "run")) == 5, done.stdout + done.stderr


def test_two_processes_have_the_rewards_of_one(tmp_path, tiny_models):
    config = config_of(tmp_path, tiny_models)
    for name, processes in (("one", 1), ("two", 2)):
        with served(verdict, models=("critic",)) as server:
            runs.finished(config, tmp_path / name, *words(server, "steps=2"), processes=processes)
    one, two = (runs.metrics(tmp_path / name)[0] for name in ("one", "two"))
    assert one["reward/quality"] == pytest.approx(two["reward/quality"], abs=1e-6)
    assert len(list((tmp_path / "two/services").glob("judge-rank-*.jsonl"))) == 2


def test_a_judge_that_nobody_needs_is_inert(tmp_path, tiny_models):
    config = runs.write_config(tmp_path, tiny_models["qwen3_vl"])
    done = runs.run(config, tmp_path / "run", *runs.FEW, "steps=1", "eval.samples=0",
                    "services.judge.url=http://127.0.0.1:1/v1", "services.judge.model=critic")
    assert done.returncode == 0 and "inert: services.judge.url" in done.stdout + done.stderr
