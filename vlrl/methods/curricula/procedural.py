"""Samplers for tasks that generate their samples (Task.knobs, Task.generate): they choose the difficulty.

Every draw is a new sample, generated with knobs that the sampler chooses; the index in the training split is a running
number. Internally knobs are scaled to [0, 1], from lowest to highest."""

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
"""Decimal digits of a knob."""
_MOST_CELLS = 10_000

Components = Annotated[int, Field(ge=2, le=50)]


class ProceduralSampler(Adaptive):
    """Base: `points` chooses knobs, `learn` gets their outcomes. Raises ConfigError for a task without knobs."""

    saved = ("drawn", "means")

    def __init__(self, prompts: Prompts):
        if not prompts.knobs:
            raise ConfigError("curriculum.name: this sampler chooses the difficulty of samples that a task makes, but "
                              "the task has no knobs. Give it Task.knobs and Task.generate (docs/tasks.md), use a task "
                              "that has them, such as task.name=grounding with task.drawn=true, or choose another "
                              "sampler.")
        wrong = [(k, v) for k, v in prompts.knobs.items() if len(v) != 2 or not -np.inf < v[0] < v[1] < np.inf]
        if wrong:
            raise ConfigError(f"knob '{wrong[0][0]}' of the task goes from (lowest, highest) = {wrong[0][1]}: give two "
                              "finite numbers, the lower one first")
        super().__init__(prompts)
        self.drawn = 0
        self.names = tuple(prompts.knobs)
        self.low, high = np.array(list(prompts.knobs.values()), dtype=np.float64).T
        self.width = high - self.low
        self.means: list[float] = []
        """Mean of each knob in the last draws."""

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
        """[n, K] knobs at points [n, K]."""
        return np.clip(np.round(self.low + points * self.width, _DIGITS), self.low, self.low + self.width)

    def points_of(self, outcomes: Sequence[Outcome]) -> np.ndarray:
        """[n, K] points of the draws' knobs."""
        values = np.array([[v for _, v in o.draw.knobs] for o in outcomes], dtype=np.float64)
        return (values.reshape(len(outcomes), len(self.names)) - self.low) / self.width

    def points(self, count: int, draw: np.random.Generator) -> np.ndarray:
        """Chooses [count, K] points in [0, 1]."""
        raise NotImplementedError

    def observe(self, outcomes: Sequence[Outcome], step: int) -> None:
        usable = [o for o in outcomes if len(o.scored) and o.draw.knobs]
        if usable:
            self.learn(usable, step)

    def metrics(self) -> dict[str, float]:
        return {f"curriculum/knob/{name}": mean for name, mean in zip(self.names, self.means, strict=False)}


@as_uniform(explore=1)
class ALPGMM(ProceduralSampler):
    """Draws where rewards change most (ALP-GMM, 1910.07224, algorithm 1). The absolute learning progress of a draw is

        ALP = |mean reward of its group - that of the nearest earlier draw|,   0 for the first

    by the distance of their knobs in [0, 1]. Every `fit_every` draws, mixtures of 2 to `components` Gaussians are
    fitted over (knobs, ALP) of the last `fit_every` draws, and the one with the best AIC is kept. A draw chooses a
    Gaussian proportional to its mean ALP and samples knobs from it, clipped at the bounds; a share `explore` is
    uniform, and so are all draws before the first fit, and where nothing changes. Constants are the paper's, apart from
    `memory`: the nearest draw is sought among this many latest ones, there among all. A fit takes about .3 s of one
    core."""

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
        """[n, K + 2] the latest draws: knobs, reward, ALP."""
        self.fits, self.since = 0, 0
        self.mixture: dict[str, np.ndarray] = {}
        """Of the last fit: `means` [C, K + 1], `covariances` [C, K + 1, K + 1]."""

    def points(self, count: int, draw: np.random.Generator) -> np.ndarray:
        drawn = draw.random((count, len(self.names)))
        if not self.mixture or self.mixture["means"][:, -1].max() <= 0:
            return drawn
        means, covariances = self.mixture["means"], self.mixture["covariances"]
        progress = np.maximum(means[:, -1], 0)
        chosen = draw.choice(len(means), size=count, p=progress / progress.sum())
        chosen[draw.random(count) < self.explore] = -1
        for c in np.unique(chosen[chosen >= 0]).tolist():
            here = chosen == c
            drawn[here] = draw.multivariate_normal(means[c, :-1], covariances[c, :-1, :-1], size=int(here.sum()),
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
        """[n] ALP of each draw [n, K], compared with earlier draws of the same call too; among equally near ones with
        the earliest."""
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
    """`means` [C, D] and `covariances` [C, D, D] of the mixture of 2 to `components` Gaussians with the lowest AIC over
    rows [n, D]; among equals the one with the fewest."""
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture
    from threadpoolctl import threadpool_limits

    fits = []
    with warnings.catch_warnings(), threadpool_limits(1):  # matrices this small are slower in many threads
        warnings.simplefilter("ignore", ConvergenceWarning)  # few different rows
        for count in range(2, min(components, len(rows)) + 1):
            model = GaussianMixture(count, random_state=seed).fit(rows)
            fits.append((float(model.aic(rows)), count, model))
    best = min(fits, key=lambda f: f[:2])[2]
    return {"means": np.array(best.means_), "covariances": np.array(best.covariances_)}


@as_uniform(explore=1)
class Weakness(ProceduralSampler):
    """More of what fails: samples are generated where the policy is weak (SwS, 2506.08989, section 3, for a task that
    generates them itself). Each knob is cut into `cells` equal ranges, and the share of a cell of the grid is

        (1 - explore) F_c / sum F + explore / cells,   F_c <- F_c + rate (1 - mean pass rate of its draws - F_c)

    where F starts with the first failure rate of the cell, and is 1 for an untried cell. Knobs are uniform inside a
    cell. The paper names weak categories once, by items failed throughout a first run, and distributes problems written
    by another model; the moving average, `explore` and the constants are ours."""

    saved = (*ProceduralSampler.saved, "failure")

    def __init__(self, prompts: Prompts, cells: Positive = 4, rate: Annotated[Rate, Field(le=1)] = 0.2,
                 explore: Fraction = 0.1):
        super().__init__(prompts)
        self.cells, self.rate, self.explore = cells, rate, explore
        if cells ** len(self.names) > _MOST_CELLS:
            raise ValueError(f"cells={cells} of each of {len(self.names)} knobs make more than {_MOST_CELLS} cells")
        self.failure = np.full(cells ** len(self.names), np.nan)
        """[cells ** K] F of each cell, the last knob fastest; nan = never tried."""

    @property
    def shares(self) -> np.ndarray:
        """[cells ** K] probability of each cell."""
        failure = np.where(np.isnan(self.failure), 1.0, self.failure)
        even = np.full(len(failure), 1 / len(failure))
        return (1 - self.explore) * failure / failure.sum() + self.explore * even if failure.sum() > 0 else even

    def points(self, count: int, draw: np.random.Generator) -> np.ndarray:
        chosen = draw.choice(len(self.failure), size=count, p=self.shares)
        corner = np.array(np.unravel_index(chosen, (self.cells,) * len(self.names))).T
        return (corner + draw.random(corner.shape)) / self.cells

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
        """The share of each range of each knob."""
        grid, out = self.shares.reshape((self.cells,) * len(self.names)), super().metrics()
        edges = self.low + np.linspace(0, 1, self.cells + 1)[:, None] * self.width
        for k, name in enumerate(self.names):
            shares = grid.sum(tuple(d for d in range(len(self.names)) if d != k))
            out |= {f"curriculum/weight/{name}={low:.3g}-{high:.3g}": float(share)
                    for (low, high), share in zip(itertools.pairwise(edges[:, k].tolist()), shares, strict=True)}
        return out
