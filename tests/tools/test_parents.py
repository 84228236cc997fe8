"""Which prompts new ones are made from: weaknesses, informativeness, harder and easier, by hand and from runs."""

import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlrl.errors import ConfigError
from vlrl.store import SCHEMA
from vlrl.tools.synthesis import parents
from vlrl.tools.synthesis.parents import GroupOutcome, by_solved, eva, informativeness, is_weak, sws, weaknesses


def rng():
    return np.random.default_rng(0)


def visit(id, step, right, category="a", rewards=None):
    return GroupOutcome(id=id, step=step, category=category, right=tuple(map(bool, right)),
                 rewards=tuple(map(float, right if rewards is None else rewards)))


def test_a_weakness_stays_below_one_half_and_falls():
    for rates, weak in [
        ([0.25, 0.0], True), ([0.0, 0.25], False), ([0.25, 0.25, 0.25], False), ([0.1, 0.1, 0.1, 0.1], False),
        ([0.5, 0.0], False), ([0.49, 0.0], True), ([0.3], False), ([], False), ([math.nan, 0.3, math.nan, 0.1], True),
        ([0.4, 0.0, 0.3, 0.2], True),   # slope: -1.5 x .4 - .5 x 0 + .5 x .3 + 1.5 x .2 = -.15
        ([0.3, 0.0, 0.4, 0.2], False),  # -.45 + .2 + .3 = +.05
        ([0.2, 0.4, 0.0, 0.25], True)]:
        assert is_weak(rates) is weak, (rates, weak)


@given(st.lists(st.integers(0, 8), min_size=2, max_size=12))
def test_the_slope_is_that_of_a_line_through_the_rates(counts):
    rates = [c / 16 for c in counts]
    slope = np.polyfit(range(len(rates)), rates, 1)[0]
    if abs(slope) > 1e-9:
        assert is_weak(rates) is bool(max(rates) < 0.5 and slope < 0)


def test_weak_prompts_and_categories():
    """x falls and stays low, y rises, z was half right once; in b both fall."""
    visits = [visit("x", 0, [1, 0, 0, 0]), visit("y", 0, [0, 0, 0, 0]), visit("z", 0, [1, 1, 0, 0]),
              visit("x", 1, [0, 0, 0, 0]), visit("y", 1, [1, 0, 0, 0]), visit("z", 1, [0, 0, 0, 0]),
              visit("p", 1, [1, 0, 0, 0], "b"), visit("q", 1, [1, 0, 0, 0], "b"), visit("r", 1, [1, 1, 1, 1], "c"),
              visit("p", 2, [0, 0, 0, 0], "b"), visit("q", 2, [0, 0, 0, 0], "b"), visit("r", 2, [1, 1, 1, 1], "c")]
    assert weaknesses(visits) == {"a": (["x"], pytest.approx(1 / 3)), "b": (["p", "q"], 1.0)}
    chosen = sws(visits, 8, rng())  # 8 x (1/3, 1) / (4/3) = 2 and 6
    assert [p.id for p in chosen] == ["x", "x", "p", "q", "p", "q", "p", "q"]
    assert chosen[0] == parents.Parent(id="x", variation="similar")
    assert [(p.variation, p.other) for p in chosen[2:4]] == [("combined", "q"), ("combined", "p")]
    # where no prompt comes twice, eight steps make four quarters: a falls .25, .25, 0, 0; b ends at .5
    right = {0: [1, 0, 0, 0], 2: [1, 0, 0, 0], 4: [0, 0, 0, 0], 7: [0, 0, 0, 0]}
    visits = [visit(f"a{step}", step, own) for step, own in right.items()]
    visits += [visit(f"b{step}", step, own, "b") for step, own in {0: [0, 0], 7: [1, 0]}.items()]
    assert weaknesses(visits) == {"a": (["a0", "a2", "a4", "a7"], 1.0)}
    assert weaknesses([]) == {} and sws(visits[4:], 8, rng()) == []


@given(st.integers(0, 200), st.lists(st.floats(0.01, 1), min_size=1, max_size=9))
def test_candidates_are_shared_out_whole(count, shares):
    counts = parents.shared_out(count, shares)
    exact = count * np.array(shares) / sum(shares)
    assert sum(counts) == count and np.abs(counts - exact).max() < 1 + 1e-9


def test_informativeness_and_eva():
    visits = [visit("a", 0, [0, 0], rewards=[0.0, 1.0]), visit("b", 0, [0, 0], rewards=[0.2, 0.5, 0.3]),
              visit("a", 1, [0, 0], rewards=[0.4, 0.5]), visit("c", 1, [0, 0], rewards=[0.7, 0.7])]
    assert informativeness(visits) == pytest.approx({"a": 0.1, "b": 0.3, "c": 0.0})
    visits = [visit("a", 0, [0], rewards=[0.0, 0.1]), visit("b", 0, [0], rewards=[0.0, 0.3]),
              visit("c", 0, [0], rewards=[1.0, 1.0])]
    drawn = [eva(visits, 4, np.random.default_rng(seed))[0].id for seed in range(2000)]
    assert drawn.count("b") / 2000 == pytest.approx(0.75, abs=0.04) and "c" not in drawn
    assert {p.id for p in eva(visits, 400, rng())} == {"a", "b"} and len(eva(visits, 5, rng())) == 2
    many = [visit(str(i), 0, [0], rewards=[0.0, 1.0]) for i in range(40)]
    assert len(eva(many, 0, rng())) == 10  # a quarter
    assert eva(visits[2:], 4, rng()) == []


def test_solved_ones_and_pass_rates_of_a_file_and_recipes_by_name():
    visits = [visit("a", 0, [1, 1, 0]), visit("b", 0, [1, 0]), visit("a", 1, [1, 1, 1]), visit("c", 1, [0, 0]),
              GroupOutcome(id="d", rewards=(1.0,))]
    assert {p.id: p.variation for p in by_solved(visits, 3, rng())} == {"a": "harder", "b": "easier", "c": "easier"}
    rows = [{"id": 1, "pass_at_k": 0.25, "answers_scored": 8}, {"id": "b"}, {"id": "c", "pass_at_k": 1.0}]
    assert [(v.id, v.pass_rate) for v in parents.outcomes_of_rows(rows)] == [("1", 0.25), ("c", 1.0)]
    known = parents.RECIPES
    assert (known["sws"].least, known["sws"].most, known["synthetic_data_rl"].keep) == (0.25, 0.75, 500)
    with pytest.raises(ConfigError, match=r"--recipe 'sw' is not known\. Did you mean 'sws'"):
        parents.recipe("sw")


def rollout(step, group, index, reward, correct, **more):
    return {"schema": 1, "step": step, "group_id": group, "index": index, "sample_id": f"s-{group}", "split": "train",
            "category": "x", "reward": reward, "correct": correct, "sample": json.dumps({"n": 1}), **more}


def test_groups_of_a_run(tmp_path):
    (tmp_path / "rollouts").mkdir()
    rows = [rollout(3, "g", 0, 1.0, True), rollout(3, "g", 1, 0.0, False), rollout(3, "g", 2, None, None),
            rollout(3, "g", 3, 1.0, True, variant="shuffled"), rollout(1, "h", 0, 0.5, None)]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), tmp_path / "rollouts" / "step-000003-rank-00000.parquet")
    h, g = parents.outcomes_of_run(tmp_path)
    assert (g.id, g.step, g.rewards, g.right, g.category) == ("s-g", 3, (1.0, 0.0), (True, False), "x")
    assert h.rewards == (0.5,) and math.isnan(h.pass_rate)
    (tmp_path / "none" / "rollouts").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no scored rollouts"):
        parents.outcomes_of_run(tmp_path / "none")
