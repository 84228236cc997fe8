"""Samplers that choose the difficulty of samples, for tasks that generate their samples (Task.knobs, Task.generate).

A knob is a number, such as a size or a count, that makes a generated sample easier or harder. Every draw is a new
sample, generated with knobs that the sampler chooses. The sample's index in the training split is a running number.
Internally each knob is scaled to [0, 1], from its lowest to its highest value."""

from __future__ import annotations

import importlib.util
import itertools
import warnings
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from vlrl.config.base import Fraction, Positive, Rate
from vlrl.curriculum.base import Prompts, as_uniform, stream
from vlrl.curriculum.drawing import Adaptive
from vlrl.curriculum.types import Draw, Outcome
from vlrl.errors import ConfigError

_DIGITS = 6
"""Number of decimal digits to which a knob is rounded."""
_MOST_CELLS = 10_000

Components = Annotated[int, Field(ge=2, le=50)]


class ProceduralSampler(Adaptive):
    """Base class of samplers that choose the knobs of generated samples. A subclass chooses knobs in `points` and
    receives the results in `learn`. Raises ConfigError for a task without knobs."""

    saved = ("drawn", "means")

    def __init__(self, prompts: Prompts):
        if not prompts.knobs:
            raise ConfigError("curriculum.name: this sampler chooses the difficulty of generated samples, but the task "
                              "has no knobs. Define knobs and generate() in the task (docs/write-a-task.md), use a "
                              "task that has them, such as task.name=grounding with task.drawn=true, or choose "
                              "another sampler.")
        wrong = [(k, v) for k, v in prompts.knobs.items() if len(v) != 2 or not -np.inf < v[0] < v[1] < np.inf]
        if wrong:
            raise ConfigError(f"knob '{wrong[0][0]}' of the task has (lowest, highest) = {wrong[0][1]}: Task.knobs "
                              "must give two finite numbers, the first below the second")
        super().__init__(prompts)
        self.drawn = 0
        self.names = tuple(prompts.knobs)
        self.low, high = np.array(list(prompts.knobs.values()), dtype=np.float64).T
        self.width = high - self.low
        self.means: list[float] = []
        """Mean value of each knob in the last draws."""

    def next(self, count: int, step: int) -> list[Draw]:
        self.calls += 1
        points = self.points(count, stream(self.prompts.seed, 5, self.calls))
        settings = self.settings(points)
        self.means = settings.mean(0).tolist() if count else self.means
        visits, places = np.divmod(np.arange(self.drawn, self.drawn + count), self.prompts.size)
        self.drawn += count
        self.prompts.history.visit(places)
        return [Draw(i, v, knobs=tuple(zip(self.names, values, strict=True))) for i, v, values in
                zip(places.tolist(), visits.tolist(), settings.tolist(), strict=True)]

    def settings(self, points: np.ndarray) -> np.ndarray:
        """Converts points [n, K] in [0, 1] to values of the K knobs [n, K]."""
        return np.clip(np.round(self.low + points * self.width, _DIGITS), self.low, self.low + self.width)

    def points_of(self, outcomes: Sequence[Outcome]) -> np.ndarray:
        """[n, K] the knobs of each outcome's draw, scaled to [0, 1]."""
        values = np.array([[v for _, v in o.draw.knobs] for o in outcomes], dtype=np.float64)
        return (values.reshape(len(outcomes), len(self.names)) - self.low) / self.width

    def points(self, count: int, rng: np.random.Generator) -> np.ndarray:
        """Chooses the knobs of `count` draws: [count, K] points in [0, 1]."""
        raise NotImplementedError

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        usable = [o for o in outcomes if len(o.scored) and o.draw.knobs]
        if usable:
            self.learn(usable, step)

    def metrics(self) -> dict[str, float]:
        return {f"curriculum/knob/{name}": mean for name, mean in zip(self.names, self.means, strict=False)}


@as_uniform(explore=1)
class ALPGMM(ProceduralSampler):
    """Draws knobs where the reward changes most (ALP-GMM, 1910.07224, algorithm 1). The absolute learning progress of a
    draw is

        ALP = |mean reward of its group - mean reward of the nearest earlier draw|,   0 for the first draw

    where distances are between knobs in [0, 1]. After every `fit_every` draws, mixtures of 2 to `components` Gaussians
    are fitted to (knobs, ALP) of the last `fit_every` draws, and the mixture with the best AIC is kept. A draw chooses
    a Gaussian with probability proportional to its mean ALP and samples knobs from it, clipped at the bounds. Knobs are
    uniform instead for the fraction `explore` of the draws, for all draws before the first fit, and if all ALP are 0.
    Constants are the paper's, except for `memory`: the nearest earlier draw is sought among the last `memory` draws, in
    the paper among all draws. A fit takes about .3 s of one core."""

    saved = (*ProceduralSampler.saved, "past", "fits", "since", "mixture")

    def __init__(self, prompts: Prompts, fit_every: Annotated[int, Field(ge=4, le=10_000)] = 250,
                 components: Components = 10, explore: Fraction = 0.2,
                 memory: Annotated[int, Field(ge=1, le=100_000)] = 5000):
        super().__init__(prompts)
        if importlib.util.find_spec("sklearn") is None:
            raise ConfigError("curriculum.name=alp_gmm fits its mixtures with scikit-learn, which is not installed: "
                              "pip install scikit-learn")
        self.fit_every, self.components, self.explore, self.memory = fit_every, components, explore, memory
        self.most = max(memory, fit_every)
        self.past = np.zeros((0, len(self.names) + 2))
        """[n, K + 2] the latest draws, one row per draw: its knobs, reward and ALP."""
        self.fits, self.since = 0, 0
        self.mixture: dict[str, np.ndarray] = {}
        """The last fitted mixture: `means` [C, K + 1], `covariances` [C, K + 1, K + 1]; empty before the first fit."""

    def points(self, count: int, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.random((count, len(self.names)))
        if not self.mixture or self.mixture["means"][:, -1].max() <= 0:
            return drawn
        means, covariances = self.mixture["means"], self.mixture["covariances"]
        progress = np.maximum(means[:, -1], 0)
        chosen = rng.choice(len(means), size=count, p=progress / progress.sum())
        chosen[rng.random(count) < self.explore] = -1
        for c in np.unique(chosen[chosen >= 0]).tolist():
            here = chosen == c
            drawn[here] = rng.multivariate_normal(means[c, :-1], covariances[c, :-1, :-1], size=int(here.sum()),
                                                   method="eigh")
        return np.clip(drawn, 0, 1)

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        points, rewards = self.points_of(outcomes), np.array([o.reward for o in outcomes])
        progress = self._progress(points, rewards)
        self.past = np.concatenate([self.past, np.column_stack([points, rewards, progress])])[-self.most:]
        self.since += len(outcomes)
        if self.since >= self.fit_every:
            self.since, self.fits = 0, self.fits + 1
            recent = np.delete(self.past[-self.fit_every:], -2, axis=1)
            seed = int(stream(self.prompts.seed, 6, self.fits).integers(2**31))
            self.mixture = fit_mixture(recent, self.components, seed)

    def _progress(self, points: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        """[n] ALP of new draws with knobs `points` [n, K]. A draw is also compared with the earlier draws of the same
        call; among equally near draws the earliest counts."""
        from scipy.spatial.distance import cdist

        size, before = len(self.names), self.past[-self.memory:]
        known = np.concatenate([before[:, size], rewards])
        away = cdist(points, np.concatenate([before[:, :size], points]))
        away[:, len(before):][np.triu_indices(len(points))] = np.inf
        nearest = away.argmin(1)
        change = np.abs(rewards - known[nearest])
        return np.where(np.isfinite(away[np.arange(len(points)), nearest]), change, 0.0)

    def metrics(self) -> dict[str, float]:
        recent = self.past[-self.fit_every:, -1]
        return {**super().metrics(), **({"curriculum/progress": float(recent.mean())} if len(recent) else {})}


def fit_mixture(rows: np.ndarray, components: int, seed: int) -> dict[str, np.ndarray]:
    """Fits mixtures of 2 to `components` Gaussians to the rows [n, D] and chooses the mixture with the lowest AIC; on
    ties, the one with the fewest Gaussians. Returns its `means` [C, D] and `covariances` [C, D, D] as a dict."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits

    fits = []
    with warnings.catch_warnings(), threadpool_limits(1):  # matrices this small are slower in many threads
        warnings.simplefilter("ignore", ConvergenceWarning)  # expected when there are few distinct rows
        for count in range(2, min(components, len(rows)) + 1):
            model = GaussianMixture(count, random_state=seed).fit(rows)
            fits.append((float(model.aic(rows)), count, model))
    best = min(fits, key=lambda f: f[:2])[2]
    return {"means": np.array(best.means_), "covariances": np.array(best.covariances_)}


@as_uniform(explore=1)
class Weakness(ProceduralSampler):
    """Generates more samples where the policy fails (SwS, 2506.08989, section 3, applied to a task that generates its
    samples). Each knob is cut into `cells` equal ranges, which gives a grid. The share of cell c of the grid is

        share(c) = (1 - explore) F_c / sum F + explore / number of cells
        F_c <- F_c + rate (1 - mean pass rate of its draws - F_c)

    where F_c starts at the first failure rate (1 - pass rate) of the cell, and counts as 1 while the cell is untried.
    Within a cell knobs are uniform. The paper determines weak categories once, from items that fail throughout a first
    run, and adds problems written by another model; the moving average, `explore` and the constants are ours."""

    saved = (*ProceduralSampler.saved, "failure")

    def __init__(self, prompts: Prompts, cells: Positive = 4, rate: Annotated[Rate, Field(le=1)] = 0.2,
                 explore: Fraction = 0.1):
        super().__init__(prompts)
        self.cells, self.rate, self.explore = cells, rate, explore
        if cells ** len(self.names) > _MOST_CELLS:
            raise ValueError(f"cells={cells} for each of {len(self.names)} knobs gives more than {_MOST_CELLS} "
                             "cells: lower curriculum.cells")
        self.failure = np.full(cells ** len(self.names), np.nan)
        """[cells ** K] F of each cell, where the last knob varies fastest; NaN = never tried."""

    @property
    def shares(self) -> np.ndarray:
        """[cells ** K] probability that a draw falls into each cell."""
        failure = np.where(np.isnan(self.failure), 1.0, self.failure)
        even = np.full(len(failure), 1 / len(failure))
        return (1 - self.explore) * failure / failure.sum() + self.explore * even if failure.sum() > 0 else even

    def points(self, count: int, rng: np.random.Generator) -> np.ndarray:
        chosen = rng.choice(len(self.failure), size=count, p=self.shares)
        corner = np.array(np.unravel_index(chosen, (self.cells,) * len(self.names))).T
        return (corner + rng.random(corner.shape)) / self.cells

    def learn(self, outcomes: Sequence[Outcome], step: int) -> None:
        known = [o for o in outcomes if o.pass_rate == o.pass_rate]
        corner = np.clip((self.points_of(known) * self.cells).astype(int), 0, self.cells - 1)
        cell = np.ravel_multi_index(tuple(corner.T), (self.cells,) * len(self.names))
        tries = np.bincount(cell, minlength=len(self.failure))
        failed = np.bincount(cell, [1 - o.pass_rate for o in known], minlength=len(self.failure))
        at = tries > 0
        mean, before = failed[at] / tries[at], self.failure[at]
        self.failure[at] = np.where(np.isnan(before), mean, before + self.rate * (mean - before))

    def metrics(self) -> dict[str, float]:
        """For each knob, the share of the draws that falls into each of its ranges."""
        grid, out = self.shares.reshape((self.cells,) * len(self.names)), super().metrics()
        edges = self.low + np.linspace(0, 1, self.cells + 1)[:, None] * self.width
        for k, name in enumerate(self.names):
            shares = grid.sum(tuple(d for d in range(len(self.names)) if d != k))
            out |= {f"curriculum/weight/{name}={low:.3g}-{high:.3g}": float(share)
                    for (low, high), share in zip(itertools.pairwise(edges[:, k].tolist()), shares, strict=True)}
        return out
