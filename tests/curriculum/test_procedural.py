"""Samplers over knobs: learning progress and failures by hand, draws, resume; scenes made with knobs; whole runs."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import chisquare, kstest

from tests.e2e.runs import metrics
from vlrl import config, curriculum
from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum import Draw, Outcome, Prompts
from vlrl.errors import ConfigError
from vlrl.methods.curricula.procedural import ALPGMM, Weakness, fit_mixture
from vlrl.store import RunFolder
from vlrl.task import generated, load
from vlrl.testing.findings import Findings
from vlrl.testing.samples import check_samples
from vlrl.training.loop import train

KNOBS = {"count": (1.0, 5.0), "size": (0.0, 1.0)}


def prompts(knobs=KNOBS, size=50):
    return Prompts(size, 3, knobs=knobs)


def at(reward, passed=None, **knobs):
    """The outcome of a draw with these knobs."""
    return Outcome(Draw(0, 0, knobs=tuple(knobs.items())), (reward,), (passed,))


@pytest.mark.parametrize("kind", [ALPGMM, Weakness])
def test_draws_are_within_the_bounds_and_all_different(kind):
    sampler = kind(prompts())
    draws = [*sampler.next(60, 0), *sampler.next(60, 1)]
    assert [(d.index, d.visit) for d in draws] == [(i % 50, i // 50) for i in range(120)] and len(set(draws)) == 120
    for draw in draws:
        assert [*dict(draw.knobs)] == [*KNOBS] and all(low <= dict(draw.knobs)[k] <= high
                                                       for k, (low, high) in KNOBS.items())
    means = sampler.metrics()
    assert means["curriculum/knob/count"] == pytest.approx(np.mean([dict(d.knobs)["count"] for d in draws[60:]]))


def test_a_task_without_knobs_and_cells_out_of_range():
    for name in ("alp_gmm", "weakness"):
        with pytest.raises(ConfigError, match=r"task has no knobs.*task\.drawn=true"):
            curriculum.make(CurriculumSettings(name=name), Prompts(5, 0))
        with pytest.raises(ConfigError, match=r"knob 'a'.*\(1, 1\)"):
            curriculum.make(CurriculumSettings(name=name), Prompts(5, 0, knobs={"a": (1, 1)}))
    for cells in (0, 200):
        with pytest.raises(ConfigError, match=f"cells={cells}"):
            curriculum.make(CurriculumSettings(name="weakness", cells=cells), prompts())


def test_learning_progress_by_hand():
    sampler = ALPGMM(prompts(), fit_every=100, memory=3)
    sampler.observe([at(0.5, count=1.0, size=0.0), at(0.9, count=2.0, size=0.0), at(0.2, count=5.0, size=1.0)], 0)
    assert sampler.past[:, -1] == pytest.approx([0, 0.4, 0.7], abs=1e-6)
    sampler.observe([Outcome(Draw(0, 0, knobs=(("count", 1.0), ("size", 0.0))), ()),
                     at(1.0, count=1.1, size=0.1)], 1)  # (.025, .1) is nearest to (0, 0)
    sampler.observe([at(0.0, count=1.0, size=0.0)], 2)  # (0, 0) itself is no longer among the last 3
    assert sampler.past[3:, -1] == pytest.approx([0.5, 1.0], abs=1e-6)
    assert sampler.past[:, :2].tolist()[1] == [0.25, 0] and sampler.metrics()["curriculum/progress"] == pytest.approx(
        np.mean([0, 0.4, 0.7, 0.5, 1.0]))
    sampler, random = ALPGMM(prompts(), fit_every=150, components=4), np.random.default_rng(1)
    for step in range(4):
        draws = sampler.next(75, step)  # rewards are noise for small sizes, and always 1 elsewhere
        sampler.observe([Outcome(d, (float(random.random()) if dict(d.knobs)["size"] < 0.3 else 1.0,))
                         for d in draws], step)
        assert sampler.fits == (step + 1) // 2
    assert np.mean(np.array([dict(d.knobs)["size"] for d in sampler.next(300, 9)]) < 0.35) > 0.6
    assert fit_mixture(np.ones((5, 3)), 10, 0)["means"][0] == pytest.approx(np.ones(3))


def test_gaussians_are_drawn_by_their_progress():
    sampler = ALPGMM(prompts(), explore=0.25)
    spread = np.eye(3) * 1e-6
    sampler.mixture = {"means": np.array([[0.1, 0.1, 0.6], [0.9, 0.9, 0.2], [0.5, 0.5, -1e-9]]),
                       "covariances": np.array([spread] * 3)}
    found = sampler.points(8000, np.random.default_rng(0))
    near = [np.abs(found - place).max(1) < 0.01 for place in (0.1, 0.9, 0.5)]
    counts = [int(n.sum()) for n in near]
    inside = 0.02 ** 2 * 0.25
    expected = np.array([0.75 * 0.75 + inside, 0.75 * 0.25 + inside, inside, 0.25 - 3 * inside]) * 8000
    assert chisquare([*counts, 8000 - sum(counts)], expected).pvalue > 1e-3
    assert kstest(found[~np.any(near, axis=0), 0], "uniform").pvalue > 1e-3
    sampler.mixture["means"][:, :2] = 1.5
    assert sampler.points(50, np.random.default_rng(0)).max() == 1
    sampler.mixture["means"][:, 2] = 0
    assert kstest(sampler.points(2000, np.random.default_rng(0))[:, 1], "uniform").pvalue > 1e-3


def test_failures_by_hand_and_cells_by_their_shares():
    sampler = Weakness(prompts(), cells=2, rate=0.5, explore=0.2)
    assert sampler.shares == pytest.approx([0.25] * 4)
    low, high = {"count": 1.0, "size": 0.2}, {"count": 5.0, "size": 1.0}
    sampler.observe([at(0, True, **low), at(0, True, **low), at(0, False, **low), at(0, None, **high)], 0)
    assert sampler.failure.tolist() == pytest.approx([1 / 3, math.nan, math.nan, math.nan], nan_ok=True)
    sampler.observe([at(1, False, **low), at(1, True, **high)], 1)
    assert sampler.failure == pytest.approx([2 / 3, math.nan, math.nan, 0.0], nan_ok=True)
    weights = np.array([2 / 3, 1, 1, 0])
    assert sampler.shares == pytest.approx(0.8 * weights / weights.sum() + 0.05, abs=1e-6)
    shown = sampler.metrics()
    assert shown["curriculum/weight/count=1-3"] == pytest.approx(0.8 * (5 / 3) / (8 / 3) + 0.1)
    assert shown["curriculum/weight/size=0.5-1"] == pytest.approx(0.8 * 1 / (8 / 3) + 0.1) and len(shown) == 4
    sampler.failure[:] = 0
    assert sampler.shares == pytest.approx([0.25] * 4)
    sampler = Weakness(prompts(), cells=2, explore=0.0)
    sampler.failure[:] = [0.1, 0.2, 0.3, 0.4]
    found = sampler.points(4000, np.random.default_rng(0))
    cells = (found * 2).astype(int) @ [2, 1]
    assert chisquare(np.bincount(cells, minlength=4), np.array([0.1, 0.2, 0.3, 0.4]) * 4000).pvalue > 1e-3
    assert kstest(found[cells == 3, 0], "uniform", (0.5, 0.5)).pvalue > 1e-3


def test_scenes_are_as_their_knobs_say():
    task = load("grounding", {"drawn": True})
    for objects in (1.0, 2.4, 4.0):
        for size in (0.08, 0.2, 0.44):
            sample = generated(task, 7, {"objects": objects, "size": size})
            x1, y1, x2, y2 = sample["boxes"][0]["box"]
            assert max(x2 - x1, y2 - y1) == pytest.approx(128 * size, abs=1.5)
            pixels = np.asarray(sample.media[0].source).reshape(-1, 3).astype(int)
            vivid = pixels[pixels.min(1) < 100]
            assert len(np.unique(vivid, axis=0)) == round(objects) and 0 <= sample["difficulty"] <= 1
    one, two = (generated(task, i, {"objects": 2.0, "size": 0.3}) for i in (1, 2))
    assert one.id != two.id and one["boxes"] != two["boxes"]
    assert one.id == "made-000001-objects=2.0-size=0.3" != generated(task, 1, {"objects": 2.0, "size": 0.31}).id
    assert not load("grounding").knobs and [*task.knobs] == ["objects", "size"]


def checked(change=lambda made, index, knobs: made(index, knobs), **other):
    """The samples of the grounding task that are scored, and what is found, with another `generate`."""
    task, found = load("grounding", {"drawn": True, "count": 40}), Findings()
    made = task.generate
    task.generate = lambda index, knobs: change(made, index, knobs)
    vars(task).update(other)
    return [s.id for s in check_samples(task, found, 2, 0)], [str(f) for f in found.all()]


@pytest.mark.slow
def test_the_contract_of_tasks_with_knobs():
    ids, found = checked()
    assert not found and ids[:2] == ["train-000000", "train-000039"] and len(ids) == 12
    assert ids[-1] == "made-000001-objects=1.0-size=0.44"
    calls = iter(range(1000))
    broken = {
        "the sample differs when asked for again": lambda made, index, knobs: replace(
            made(index, knobs), row={**made(index, knobs).row, "n": next(calls)}),
        "is already used in generate(": lambda made, index, knobs: made(0, knobs),
        "generate(0, .*KeyError": lambda made, index, knobs: made(index, {"size": 0.2}),
        "when it is written as JSON": lambda made, index, knobs: replace(made(index, knobs), row={"n": (1, 2)})}
    for words, change in broken.items():
        assert re.search(words.replace("(", r"\("), "\n".join(checked(change)[1])), words
    for bounds in ((4.0, 1.0), (0.0, math.inf), (1.0,)):
        assert "give two finite numbers" in checked(knobs={"objects": bounds})[1][0]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "more"), [("alp_gmm", ["curriculum.fit_every=4"]), ("weakness", [])])
def test_runs_over_knobs(preset, more, tmp_path):
    train(config.load("configs/quickstart.yaml", [
        f"extends=curricula/{preset}.yaml", *more, "steps=2", "rollout.prompts_per_step=3", "rollout.group_size=3",
        "rollout.max_new_tokens=24", "eval.samples=0", "log.samples_every=0", "save.every=0", f"run.dir={tmp_path}"]))
    rows = RunFolder(tmp_path).rollouts().to_pylist()
    assert len({row["sample_id"] for row in rows}) == 6 and all(row["sample_id"].startswith("made-") for row in rows)
    assert all(math.isfinite(m["loss"]) and 1 <= m["curriculum/knob/objects"] <= 4 for m in metrics(tmp_path))
