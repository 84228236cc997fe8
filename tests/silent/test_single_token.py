"""No single token owns an optimizer step: what a KL to the reference does with tokens far from it."""

from dataclasses import replace

import pytest
import torch
import yaml
from torch.nn.functional import cosine_similarity

from tests.algo.flat import F64, bound, flat, gradient, run
from vlrl import HOME
from vlrl import config as configs
from vlrl.algo.objective import Objective
from vlrl.algo.tables import KLS
from vlrl.errors import TrainingError
from vlrl.monitoring.alerts import Alerts, resolved_alerts
from vlrl.monitoring.mismatch import check_mismatch

TOKENS = 1000


def gradients(distance, **algo):
    """Of a step of 1,000 tokens with advantages of both signs: with one token at this distance, and without it."""
    generator = torch.Generator().manual_seed(0)
    logp = -torch.rand(TOKENS, generator=generator, dtype=F64) - 0.1
    away = 0.2 * torch.randn(TOKENS, generator=generator, dtype=F64)
    advantages = [1.0 if i % 2 else -1.0 for i in range(TOKENS)]
    tree = {"task": {"name": "grounding"}, "model": {"name": "x"}, "algo": {"kl_coef": 0.04, **algo}}
    config = configs.validate(tree)
    objective, out = Objective.of(config.algo), []
    for gap in (distance, 0.0):
        x = flat(logp, adv=advantages, reference_logprobs=logp + away)
        x.reference_logprobs[7] = logp[7] + gap
        loss, metrics = objective(replace(x, entropy=torch.zeros_like(logp)), config.algo.kl_coef)
        out.append((torch.autograd.grad(loss, x.logprobs)[0], metrics))
    return out


def test_default_and_presets_keep_the_direction_of_the_step():
    """Far below the reference, too: of a token that became certain where the reference finds it impossible."""
    for distance in (9.0, 30.0, 300.0, -200.0):
        (far, clamped), (near, none) = gradients(distance)
        assert cosine_similarity(far, near, 0) > 0.99 and far.isfinite().all(), distance
        assert none["kl/clamped"] == 0 and clamped["kl/clamped"] == (distance > 0)
    for preset in ("algorithms/grpo", "grounding/vlm_r1_rec", "algorithms/gigpo"):
        algo = yaml.safe_load((HOME / "configs" / f"{preset}.yaml").read_text())["algo"]
        (far, _), (near, _) = gradients(15.0, **{k: algo[k] for k in ("kl", "kl_coef") if k in algo})
        assert cosine_similarity(far, near, 0) > 0.99, preset


def test_what_has_collapsed_is_pulled_back_and_published_k3_is_what_its_name_says():
    for name in ("k2", "k3", "k3_bounded", "k1_plus", "k3_plus"):
        x = flat([-40.0], reference_logprobs=[-1.0])
        (slope,) = gradient(run(bound(KLS, name), x), x)
        assert slope < 0, name  # a step against it makes the token likelier
    x = flat([-9.0, -1.0], reference_logprobs=[-1.0, -3.0])
    values = run(bound(KLS, "k3"), x)
    assert values.tolist() == pytest.approx([2980.9579870 - 9, 0.1353353 + 2 - 1], rel=1e-6)


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
