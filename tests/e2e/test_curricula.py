"""Runs with samplers that probe or measure, filters, shares, answers that go on in later steps or from each other:
killed and resumed they are the same run, two processes do what one does, and prompts.parquet says what the stored
rollouts say."""

import json
import math

import numpy as np
import pyarrow.parquet as pq
import pytest

from tests.curriculum import sourced
from tests.e2e import forked
from tests.e2e.curricula import CASES, Killed, go, prepare
from tests.e2e.runs import ENV, ROOT, metrics, weights
from vlrl.curriculum import SAMPLERS
from vlrl.store import RunFolder

pytestmark = pytest.mark.slow
PARTIAL = [case for case, words in CASES.items() if "step_tokens" in words]
KEPT = ("gain_rl", "adcl", "shares", "guided", "relift", "acted", "meaning", "search")
"""What is held from step to step: histories, partial answers, rows of later steps, trees; of cases that hold the same,
one."""


@pytest.fixture(scope="module")
def folder(tiny_models, tmp_path_factory):
    """With a whole run of each case."""
    folder = tmp_path_factory.mktemp("curricula")
    prepare(folder, tiny_models["qwen3_vl"])
    for case in CASES:
        go(folder, case, "whole")
    return folder


def timeless(path):
    """All rollouts without the seconds of their environments; NaN as a text, which is like itself."""
    rows = RunFolder(path).rollouts().to_pylist()
    return repr([{**r, "turns": [{**t, "seconds": None} for t in r["turns"] or ()]} for r in rows])


def rollouts(path, second=False):
    """Without second attempts, or these alone."""
    return [r for r in RunFolder(path).rollouts().to_pylist() if (r["variant"] == "guided") == second]


@pytest.mark.parametrize("case, at", [(case, 2 + i % 3) for i, case in enumerate(KEPT)])
def test_a_killed_run_goes_on_exactly(folder, case, at):
    with pytest.raises(Killed):
        go(folder, case, "broken", at)
    go(folder, case, "broken")
    whole, broken = folder / f"{case}-whole", folder / f"{case}-broken"
    assert weights(whole, 5) == weights(broken, 5) and metrics(whole) == metrics(broken)
    assert timeless(whole) == timeless(broken)
    assert pq.read_table(whole / "prompts.parquet").equals(pq.read_table(broken / "prompts.parquet"))


@pytest.mark.parametrize("case", PARTIAL)
def test_what_is_trained_is_what_the_last_step_wrote(folder, case):
    found = rollouts(folder / f"{case}-whole")
    assert {len(r["turns"]) for r in found} >= {1, 2}
    assert all(r["loss_mask"] == [k >= r["turns"][-1]["start"] for k in range(len(r["token_ids"]))] for r in found)
    assert {r["step"] - r["policy_step"] for r in found} >= {0, 1}
    assert any(m["partial/held"] for m in metrics(folder / f"{case}-whole"))


def test_answers_branch_until_the_budget_is_spent(folder):
    groups = {}
    for r in sorted(rollouts(folder / "branch-whole"), key=lambda r: r["index"]):
        groups.setdefault((r["step"], r["group_id"]), []).append(r)
    assert {len(group) for group in groups.values()} > {5} or len({len(group) for group in groups.values()}) > 1
    for group in groups.values():
        ids = [r["token_ids"] for r in group]
        assert all(any(own[0] == other[0] for other in ids[:k]) or len(ids[0]) == 1
                   for k, own in enumerate(ids) if k)
        assert all(all(r["loss_mask"]) for r in group)
    assert any(len({tuple(r["advantage"]) if isinstance(r["advantage"], list) else r["advantage"] for r in group}) > 1
               for group in groups.values())
    assert all(m["branch/reused_frac"] > 0 for m in metrics(folder / "branch-whole"))


def test_a_search_leaves_its_tree_and_begins_later_visits(folder):
    """Nodes stand in the files with their values; a prompt seen again begins with what was right before, or is answered
    without a search."""
    groups, seen, kept = {}, {}, 0
    for r in sorted(rollouts(folder / "search-whole"), key=lambda r: (r["step"], r["group_id"], r["index"])):
        groups.setdefault((r["step"], r["group_id"]), []).append(r)
    for group in groups.values():
        before = seen.get(group[0]["sample_id"], [])
        right = [r for r in before if r["correct"]]
        found = [r for r in group if r["variant"] == "kept"]
        kept += len(found)
        assert all(r["token_ids"] in [b["token_ids"] for b in right] and r["policy_step"] < r["step"] for r in found)
        for r in group:
            nodes = [(t["start"], t["end"], json.loads(t["info"])["value"]) for t in r["turns"]]
            assert not nodes or (nodes[-1][1:] == (len(r["token_ids"]), 1.0 if r["correct"] else -1.0)
                                 and [n[0] for n in nodes[1:]] == [n[1] for n in nodes[:-1]])
            assert bool(nodes) == (not found and (not before or not right))
        seen[group[0]["sample_id"]] = group
    lines = metrics(folder / "search-whole")
    assert kept and any(len(r["turns"]) > 1 for group in groups.values() for r in group)
    assert {0.0, 1.0} != {line["search/groups_frac"] for line in lines} and lines[0]["search/groups_frac"] == 1
    assert all(math.isfinite(line["loss"]) for line in lines)


def test_failed_groups_are_asked_again(folder):
    """Their second attempts stand beside the group, under other words, and some are learned from."""
    groups, second = {}, {}
    for found, into in ((False, groups), (True, second)):
        for r in rollouts(folder / "guided-whole", found):
            into.setdefault((r["step"], r["group_id"]), []).append(r)
    assert second.keys() == {key for key, group in groups.items() if not any(r["correct"] for r in group)}
    for key, group in second.items():
        first = groups[key][0]
        assert len(group) == 2 and all(r["advantage"] is None for r in group)
        assert all(f"Vowels, not 3 times {len(first['token_ids'])} tokens." in r["prompt"] for r in group)
        assert "Vowels" not in first["prompt"] and first["sample_id"] == group[0]["sample_id"]
    lines = metrics(folder / "guided-whole")
    right = [sum(r["correct"] for key, group in second.items() for r in group if key[0] == step) for step in range(5)]
    assert sum(right) and [line.get("guided/attempts", 0) for line in lines] == right
    assert all(0 < line["guided/loss"] < 5 for line, n in zip(lines, right, strict=True) if n)


@pytest.mark.parametrize("case", CASES)
def test_prompts_are_those_of_the_rollouts(folder, case):
    """Visits that are no rollouts: groups held over at the end, and rejected ones; probes of gvm are no visits."""
    path = folder / f"{case}-whole"
    groups = {}
    for r in rollouts(path):
        groups.setdefault(r["sample_id"], {}).setdefault((r["step"], r["group_id"]), []).append(r["reward"])
    rows = {r["sample_id"]: r for r in pq.read_table(path / "prompts.parquet").to_pylist()}
    assert groups.keys() <= rows.keys() and len(groups) > 6
    for name, row in rows.items():
        own = groups.get(name, {})
        assert case == "shares" or row["visits"] >= len(own)
        assert row["last_step"] == (max(own)[0] if own else None)
        if own:
            assert row["reward"] in [pytest.approx(np.mean(own[key]), abs=1e-5) for key in own
                                     if key[0] == row["last_step"]]
    last = metrics(path)[-1]
    if case == "gain_rl":
        assert sum(r["visits"] for r in rows.values()) == sum(map(len, groups.values())) + last["prompts/rejected"]
    assert sum(len(of) for own in groups.values() for of in own.values()) == last["rollouts/total"]


@pytest.fixture(scope="module")
def two(folder):
    """With a run of each case by two processes, and what every sampler does there with a scripted engine."""
    forked.run(["-m", "tests.e2e.curricula", folder], ENV, ROOT, 300, 2).check_returncode()
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_processes_do_what_one_does(two, case):
    """In the first step; in the next one but for a text or two, as after an update sums in another order can show."""
    def told(name):
        return sorted((r["step"], r["group_id"], r["sample_id"], r["index"], r["policy_step"], second, r["completion"],
                       tuple(r["loss_mask"])) for second in (False, True)
                      for r in rollouts(two / f"{case}-{name}", second) if r["step"] < 2)
    of_two, of_one = told("two"), told("whole")
    assert [row[:6] for row in of_two] == [row[:6] for row in of_one]
    others = [row for row, whole in zip(of_two, of_one, strict=True) if row != whole]
    assert len(others) <= 0.1 * len(of_one) and not [row for row in others if row[0] == 0]
    one, both = (metrics(two / f"{case}-{name}")[0] for name in ("whole", "two"))
    same = [k for k in one if k.startswith(("curriculum/", "groups/", "rollouts/", "partial/", "prompts/", "branch/",
                                            "search/", "guided/", "demonstrations/"))]
    assert [both[k] for k in same] == [pytest.approx(one[k], rel=1e-4, abs=1e-6) for k in same]


def test_every_sampler_draws_with_two_processes_what_it_draws_with_one(two):
    found = json.loads((two / "sourced.json").read_text())
    assert len(found) == len(SAMPLERS) * len(sourced.SHARED)
    for key, lines in found.items():
        assert lines == [*sourced.run(*key.split(", "), sourced.STEPS)], key
