"""Contrast rewards by hand, and against their definition over embeddings."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.contrast import contrast_goal, goal_baseline, linear_falloff, speed_term, vlm_rl_reward

UNIT = st.lists(st.floats(-1, 1), min_size=4, max_size=4).map(np.array).filter(
    lambda v: np.linalg.norm(v) > 0.1).map(lambda v: v / np.linalg.norm(v))


def test_spans_and_synthesis_by_hand():
    assert contrast_goal(0.3, 0.2, span=0.4) == pytest.approx(0.75)
    assert speed_term(10, 1, 20) == 0.5 and speed_term(10, 0.5, 20) == 1 and speed_term(0, 0, 20) == 1
    assert speed_term(60, 0, 20) == -2
    assert [linear_falloff(v, 2) for v in (0, -0.5, 2, 5)] == [1, 0.75, 0, 0]
    assert vlm_rl_reward(0.3, 10, 1, 20, 0.5, 0.8, 1) == pytest.approx(0.2)
    assert vlm_rl_reward(-10, 10, 1, 20, 0.5) == -10 and vlm_rl_reward(0, 10, 0.5, 20) == 1


test_contrasting_goal = by_hand(contrast_goal, [
    (0.20, 0.20, 1), (0.20, 0.25, 1), (0.215, 0.20, 0.5), (0.23, 0.20, 0), (0.30, 0.10, 0), (-0.1, -0.13, 0),
    (0.206, 0.20, 0.8), (1, -1, 0), (-1, 1, 1)])
test_goal_and_baseline = by_hand(goal_baseline, [
    (0.3, 0.9, 0.5, 0, 0.3),  # the cosine alone
    (1, 0, 0, 1, 1),  # at the goal
    (0, 1, 0, 1, 0), (0, 1, 0, 0.5, 0),  # at the baseline: the whole distance lies on the line
    (0, 0, 0, 1, 0.75),  # beside the line, between the two
    (0, 0, 0, 0.5, 1 - (0.5 + 0.25 * 1.5) / 2),
    (0.6, 0.6, 1, 1, 1), (0.6, 0.6, 1, 0, 0.6)])


@settings(max_examples=50)
@given(UNIT, UNIT, UNIT, st.floats(0, 1))
def test_goal_and_baseline_is_its_definition(state, goal, baseline, alpha):
    line = goal - baseline
    if line @ line < 1e-3:
        return
    on_line = baseline + (state - baseline) @ line / (line @ line) * line
    expected = 1 - np.sum((alpha * on_line + (1 - alpha) * state - goal) ** 2) / 2
    assert goal_baseline(state @ goal, state @ baseline, goal @ baseline, alpha) == pytest.approx(expected, abs=1e-6)
