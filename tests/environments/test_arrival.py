"""Episodes whose environments keep others waiting, in both orders; this file is their task too."""

import os
import time

import numpy as np
import pytest

from tests.environments.acting import Acting, Lamps


class Gated(Lamps):
    def step(self, action):
        made, own = super().step(action), self.sample.id == "train-0"
        while own and not os.path.exists(self.fault):
            time.sleep(0.05)
        if not own and made.done:
            open(self.fault, "w").close()
        return made


class Waiting(Acting):
    def environment(self, sample):
        return Gated(sample, self.fault)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["arrival", "fixed"])
def test_with_arrival_a_slow_environment_holds_up_no_other(tiny_models, tmp_path, order):
    from tests.environments.test_episodes import actions, run
    limit = "60" if order == "arrival" else "3"
    folder = run(tmp_path / "run", tiny_models["qwen3_vl"], "steps=1", "eval.samples=0", f"environment.order={order}",
                 "environment.workers=4", f"environment.step_s={limit}", name=f"{__file__}:Waiting",
                 fault=str(tmp_path / "open"))
    for row in folder.rollouts().to_pylist():
        waited = row["sample_id"] == "train-0"
        if order == "fixed" and waited:
            assert "step: no result within 3 s" in row["error"]
            continue
        assert row["error"] is None and len(actions(row)) == 3
        mask, gaps = np.array(row["loss_mask"]), np.array(row["logprobs"]) - np.array(row["trainer_logprobs"])
        assert np.abs(gaps[mask]).max() < 1e-5
    line = folder.metrics()[-1]
    assert line["time/environment_s"] > 0 and line["time/waiting_s"] > 0
