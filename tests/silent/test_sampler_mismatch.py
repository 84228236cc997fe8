"""Sampler against trainer: what is said when the two do not compute the same log-probabilities."""

import pytest

from vlrl import config as configs
from vlrl.errors import TrainingError
from vlrl.monitoring.alerts import Alerts, resolved_alerts
from vlrl.monitoring.mismatch import check_mismatch

FINE = {"reward/mean": 0.5, "reward/std": 0.1, "mismatch/kl": 1e-9, "mismatch/gap_mean": 1e-6, "mismatch/gap_max": 1e-5}


def run_config(**more):
    return configs.validate({"task": {"name": "grounding"}, "model": {"name": "x"}, **more})


def told(folder, line, config):
    said = []
    alerts = Alerts(resolved_alerts(config), folder, said.append)
    for step in range(3):
        alerts.check({"step": step, **FINE, "reward/mean": 0.1 * step})
    alerts.check({"step": 3, **FINE, **line})
    return " ".join(said)


def test_a_mismatch_is_an_alert_or_stops_a_run(tmp_path):
    rounding = {"model": {"name": "x", "dtype": "bfloat16"}, "engine": {"name": "vllm"}}
    late = {**rounding, "algo": {"correction": "token_truncate"}, "async": {"max_staleness": 2}}
    for n, (settings, line, alert) in enumerate((
            ({"model": {"name": "x", "dtype": "float32"}}, {"mismatch/kl": 2e-3}, True),
            (rounding, {"mismatch/kl": 1e-3, "mismatch/gap_mean": 0.02}, False),
            (rounding, {"mismatch/kl": 0.8, "mismatch/gap_mean": 0.5}, True),  # other weights or pictures
            (late, {"mismatch/kl": 0.02, "mismatch/gap_mean": 0.05}, False),
            ({"alerts": {"mismatch_above": None}}, {"mismatch/kl": 5.0}, False),
            ({}, {"mismatch/kl": float("nan")}, False))):
        (tmp_path / str(n)).mkdir()
        said = told(tmp_path / str(n), line, run_config(**settings))
        assert ("mismatch" in said) == ("alerts.mismatch_above" in said) == alert, (settings, said)
    config = run_config(limits={"mismatch": 0.05})
    check_mismatch({**FINE, "mismatch/kl": 0.04}, config, 3)
    with pytest.raises(TrainingError, match=r"limits\.mismatch=0\.05.*engine"):
        check_mismatch({**FINE, "mismatch/kl": 0.06}, config, 3)
