"""Answers that go on from each other's text: `rollout.branch`.

Some answers of a group are written from its prompt, the roots. Each of the others takes a point in an answer that is
there, and goes on from the text before it in its own random stream. What was there is not written again, and the update
computes it once (models/prefix_tree.py). Credit by node: algo.advantage=rose, treerl or tempo.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from vlrl.config.registry import failure, resolve
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Done, Engine
from vlrl.errors import ConfigError
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.variants import has_variants
from vlrl.types import Begun, Completion, Request

Point = Callable[[Completion, np.ndarray, int, np.random.Generator], int]
"""(answer, places [K] of the tokens that may be sampled again, how often others have gone on from it, random numbers)
-> one of the places."""


def surprise(answer: Completion, places: np.ndarray, before: int, rng: np.random.Generator) -> int:
    """The token with the lowest log-probability; the next time that of the next lowest. TreeRL (arXiv 2506.11902)."""
    order = np.argsort(np.nan_to_num(answer.logprobs[places], nan=0.0), kind="stable")
    return int(places[order[before % len(order)]])


def uniform(answer: Completion, places: np.ndarray, before: int, rng: np.random.Generator) -> int:
    """Any of them alike."""
    return int(rng.choice(places))


POINTS: dict[str, Point] = {"surprise": surprise, "uniform": uniform}


@dataclass(eq=False)
class Leaf:
    """An answer of a group."""

    completion: Completion
    first: int
    """The first token that may be sampled again: not those that it shares, nor the first one of a root."""
    parted: int = 0
    """How often others have gone on from it."""

    @property
    def places(self) -> np.ndarray:
        """[K] of its tokens that may be sampled again; not those that were forced."""
        return self.first + np.flatnonzero(self.completion.loss_mask[self.first:])


@dataclass(eq=False)
class Branching:
    """Draws groups whose answers branch, and counts tokens that were written, and that answers share."""

    config: Config
    written: int = 0
    reused: int = 0

    def __post_init__(self) -> None:
        self.point: Point = resolve("rollout.branch.at", self.config.rollout.branch.at, POINTS)

    def generate(self, engine: Engine, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns the answers to each request: up to request.n, fewer where rollout.branch.tokens are written. Called
        on every process, as often as on the others.
        """
        settings = self.config.rollout.branch
        assert settings.roots
        trees = [[Leaf(c, 1) for c in made] for made in engine.generate(
            [replace(r, n=min(r.n, settings.roots)) for r in requests])]
        spent = [sum(len(leaf.completion.tokens) for leaf in tree) for tree in trees]
        most = math.inf if settings.tokens is None else settings.tokens
        while any(comm.gather(any(len(tree) < r.n and n < most for r, tree, n in zip(requests, trees, spent,
                                                                                     strict=True)))):
            wanted = [i for i, r in enumerate(requests) if len(trees[i]) < r.n and spent[i] < most]
            asked = [self._round(requests[i], trees[i]) for i in wanted]
            for i, request, made in zip(wanted, asked, engine.generate(asked), strict=True):
                self._add(trees[i], request, made)
                spent[i] += sum(len(c.tokens) - len(b.written.tokens)
                                for c, b in zip(made, request.begun or (_NONE,) * len(made), strict=True))
        out = [[leaf.completion for leaf in tree] for tree in trees]
        self.written += sum(spent)
        self.reused += sum(len(c.tokens) for made in out for c in made) - sum(spent)
        for i, made in enumerate(out):
            if done:
                done(i, made)
        return out

    def metrics(self) -> dict[str, float]:
        """Returns the share of answer tokens that were not written again, since the last call and over all processes.
        """
        written, reused = comm.total(self.written, self.reused)
        self.written = self.reused = 0
        return {"branch/reused_frac": reused / max(written + reused, 1.0)}

    def _round(self, request: Request, tree: list[Leaf]) -> Request:
        """Returns what is asked for next: all that are missing, with a budget as many as there are roots; each goes on
        from the answer that fewest have gone on from.
        """
        budget = self.config.rollout.branch.tokens
        n, begun = request.n - len(tree), []
        n = n if budget is None else min(n, self.config.rollout.branch.roots or n)
        for index in range(len(tree), len(tree) + n):
            leaf = min((leaf for leaf in tree if len(leaf.places)), key=lambda leaf: leaf.parted, default=None)
            if leaf is None:  # nothing can be gone on from: from the prompt, in a stream of its own
                return replace(request, n=n, key=(*request.key, len(tree)))
            rng = np.random.default_rng([self.config.seed, *request.key, index])
            begun.append(Begun(index=index, written=_cut(leaf.completion, self._place(leaf, rng))))
            leaf.parted += 1
        return replace(request, n=n, begun=tuple(begun))

    def _place(self, leaf: Leaf, rng: np.random.Generator) -> int:
        """Raises ConfigError where a function of one's own fails, or gives none of the places."""
        named, places = f"rollout.branch.at={self.config.rollout.branch.at!r}", leaf.places
        try:
            found = self.point(leaf.completion, places, leaf.parted, rng)
        except Exception as error:  # anyone's code
            raise ConfigError(f"{named}: {failure(error)}") from error
        if found not in places:
            raise ConfigError(f"{named} gave {found!r}: it must return one of the {len(places)} places of tokens that "
                              f"it was given, {places[0]} to {places[-1]}")
        return int(found)

    @staticmethod
    def _add(tree: list[Leaf], request: Request, made: Sequence[Completion]) -> None:
        starts = [len(b.written.tokens) + 1 for b in request.begun] or [1] * len(made)
        tree += [Leaf(replace(c, turns=()), start) for c, start in zip(made, starts, strict=True)]


def check(config: Config, task: Task, generates: bool) -> None:
    """Raises ConfigError where rollout.branch cannot be."""
    roots, problem = config.rollout.branch.roots, ""
    if not roots:
        return
    resolve("rollout.branch.at", config.rollout.branch.at, POINTS)
    if not generates:
        problem = "supervised fine-tuning draws no answers"
    elif has_environment(task):
        problem = f"task '{task.name}' has an environment or tools, and episodes cannot go on from each other's turns"
    elif has_variants(task):
        problem = f"task '{task.name}' draws variants, whose answers are written under other media"
    if problem:
        raise ConfigError(f"rollout.branch.roots={roots}: {problem}: set rollout.branch.roots=null")


def _cut(completion: Completion, place: int) -> Completion:
    """Returns the first `place` tokens, to be gone on from."""
    return replace(completion, tokens=completion.tokens[:place], logprobs=completion.logprobs[:place],
                   loss_mask=completion.loss_mask[:place], text="", finish_reason="length", turns=())


_NONE = Begun(index=0, written=Completion(tokens=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32),
                                          loss_mask=np.zeros(0, bool), text="", finish_reason="length"))
