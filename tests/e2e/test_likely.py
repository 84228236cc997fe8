"""Whole runs that are paid by log-probabilities: kill and resume, two processes, a reference that follows."""

import numpy as np
import pytest

from tests.e2e import runs
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow

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
WORDS = (*runs.FEW, "services.reference=ema", "algo.reference.every=1", "algo.reference.decay=0.5")


def config_of(tmp_path, tiny_models):
    path = runs.write_config(tmp_path, tiny_models["qwen3_vl"])
    task = (tmp_path / "shades.py").read_text().replace('"short": 0.1}', '"short": 0.1, "likely": 0.1, "known": 0.0}')
    task = "from vlrl.task.services import Reading\n" + task
    (tmp_path / "shades.py").write_text(task + PARTS)
    return path


def test_a_killed_run_and_one_of_two_processes_are_the_undisturbed_one(tmp_path, tiny_models):
    config = config_of(tmp_path, tiny_models)
    runs.finished(config, tmp_path / "whole", *WORDS)
    runs.kill_after(config, tmp_path / "killed", 3, *WORDS)
    runs.finished(config, tmp_path / "killed", *WORDS)
    runs.assert_same_run(tmp_path / "killed", tmp_path / "whole")
    lines = runs.metrics(tmp_path / "whole")
    assert [line["logprobs/policy_step"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(line["logprobs/texts"] >= 2 for line in lines)
    table = RunFolder(tmp_path / "whole").rollouts()
    parts = [dict(p) for p in table["parts"].to_pylist()]
    assert all(np.isfinite([p["likely"], p["known"]]).all() and p["likely"] < 0 for p in parts)
    runs.finished(config, tmp_path / "two", *WORDS, processes=2)
    (first,) = runs.metrics(tmp_path / "two")[:1]
    assert first["logprobs/texts"] == lines[0]["logprobs/texts"]
    assert first["reward/likely"] == pytest.approx(lines[0]["reward/likely"], abs=1e-5)
    assert first["reward/known"] == pytest.approx(lines[0]["reward/known"], abs=1e-5)
