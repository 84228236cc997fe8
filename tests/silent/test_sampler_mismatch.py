"""Sampler against trainer: what is said when the two do not compute the same log-probabilities."""

import pytest

from vlrl import config as configs
from vlrl.config.alerts import AlertSettings
from vlrl.monitoring.alerts import Alerts

FINE = {"reward/mean": 0.5, "reward/std": 0.1, "mismatch/kl": 1e-9, "mismatch/gap_mean": 1e-6, "mismatch/gap_max": 1e-5}


def run_config(**more):
    return configs.validate({"task": {"name": "grounding"}, "model": {"name": "x"}, **more})


def told(tmp_path, line, config=None):
    from vlrl.monitoring.alerts import resolved_alerts

    said = []
    alerts = Alerts(resolved_alerts(config) if config else AlertSettings(), tmp_path, said.append)
    for step in range(3):
        alerts.check({"step": step, **FINE, "reward/mean": 0.1 * step})
    alerts.check({"step": 3, **FINE, **line})
    return " ".join(said)


def test_float32_in_one_process_is_held_to_float32(tmp_path):
    assert "mismatch" in told(tmp_path, {"mismatch/kl": 2e-3}, run_config(model={"name": "x", "dtype": "float32"}))


def test_rounding_of_bfloat16_is_no_alert(tmp_path):
    config = run_config(model={"name": "x", "dtype": "bfloat16"}, engine={"name": "vllm"})
    assert "mismatch" not in told(tmp_path, {"mismatch/kl": 1e-3, "mismatch/gap_mean": 0.02}, config)


def test_other_weights_or_pictures_are_an_alert_in_bfloat16(tmp_path):
    config = run_config(model={"name": "x", "dtype": "bfloat16"}, engine={"name": "vllm"})
    said = told(tmp_path, {"mismatch/kl": 0.8, "mismatch/gap_mean": 0.5}, config)
    assert "mismatch" in said and "alerts.mismatch_above" in said


def test_older_weights_are_expected_to_differ(tmp_path):
    """async.max_staleness samples with weights of earlier steps: its difference is no fault of the engine."""
    config = run_config(model={"name": "x", "dtype": "bfloat16"}, engine={"name": "vllm"},
                        algo={"correction": "token_truncate"}, **{"async": {"max_staleness": 2}})
    assert "mismatch" not in told(tmp_path, {"mismatch/kl": 0.02, "mismatch/gap_mean": 0.05}, config)


def test_a_run_can_be_made_to_stop(tmp_path):
    from vlrl.errors import TrainingError
    from vlrl.monitoring.mismatch import check_mismatch

    config = run_config(limits={"mismatch": 0.05})
    check_mismatch({**FINE, "mismatch/kl": 0.04}, config, 3)
    with pytest.raises(TrainingError, match=r"limits\.mismatch=0\.05.*engine"):
        check_mismatch({**FINE, "mismatch/kl": 0.06}, config, 3)


def test_null_turns_the_alert_off_and_nan_is_none(tmp_path):
    off = run_config(alerts={"mismatch_above": None})
    assert "mismatch" not in told(tmp_path, {"mismatch/kl": 5.0}, off)
    assert "mismatch" not in told(tmp_path, {"mismatch/kl": float("nan")}, run_config())
