"""Generates groups whose completions branch from each other (rollout.branch.roots).

Some completions of a group, the roots, are generated from its prompt. Each other completion continues an existing
completion from a chosen token, with a separate random stream. The shared prefix is not generated again, and the update
computes it only once (models/prefix_tree.py). Episodes branch between turns: an action is generated again in a copy of
the environment, which is reset to the same seed and replays the same earlier actions (episodes.py). Advantages by node
of the tree: algo.advantage=rose, treerl or tempo."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from vlrl.algo.named import Bound, bind
from vlrl.config.base import Fraction, Positive
from vlrl.config.registry import failure, resolve
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import AnswerPrefix, Done, Engine, Request, Sampling
from vlrl.errors import ConfigError
from vlrl.methods.tree.settings import branch_of
from vlrl.rewards.text import clean_label, same_label, token_f1
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.variants import has_variants
from vlrl.types import Completion

Point = Callable[[Completion, np.ndarray, int, np.random.Generator], int]
"""A rule that chooses where a completion branches: (completion, positions [K] at which it may branch, number of
branches that it already has, random generator) -> one of the positions."""


def surprise(answer: Completion, positions: np.ndarray, branches: int, rng: np.random.Generator) -> int:
    """Chooses the token with the lowest log-probability for the first branch of a completion, the token with the second
    lowest for the second branch, and so on. In an episode, the branch starts at the beginning of the turn that
    contains the token. TreeRL (arXiv 2506.11902)."""
    known = np.nan_to_num(answer.logprobs, nan=0.0)
    lowest = {a.start: known[a.start:a.end].min(initial=0.0) for a in answer.actions}
    order = np.argsort([lowest.get(place, known[place]) for place in positions.tolist()], kind="stable")
    return int(positions[order[branches % len(order)]])


def uniform(answer: Completion, positions: np.ndarray, branches: int, rng: np.random.Generator) -> int:
    """Chooses a position at random; all positions have equal probability."""
    return int(rng.choice(positions))


_PROBED = 11
"""First number of the random-stream keys of continuations (see Meaning). The first numbers of other streams are in
generate.py, episodes.py and recording.py."""


@dataclass(eq=False)
class Leaf:
    """A completion of a group, and the branches that start from it."""

    completion: Completion
    first: int
    """First position at which the completion may branch: after the tokens that it shares with other completions, and
    after the first token of a root."""
    branches: int = 0
    """Number of completions that branch from this one."""
    entropies: dict[int, float] = field(default_factory=dict)
    """Semantic entropy by position, for a rule that uses continuations."""

    @property
    def places(self) -> np.ndarray:
        """[K] positions of tokens at which the completion may branch; forced tokens are left out. For an episode, the
        first tokens of its actions, or [] if its environment failed."""
        done = self.completion
        if done.episode_id:
            return np.array([a.start for a in done.actions if a.start >= self.first and not done.error], np.int64)
        return self.first + np.flatnonzero(self.completion.loss_mask[self.first:])


@dataclass(eq=False)
class BranchingGenerator:
    """Generates groups whose completions branch from each other, and counts generated and shared tokens."""

    config: Config
    read: Callable[[np.ndarray], str] = str
    """Decodes tokens to text, for a rule that uses continuations."""
    written: int = 0
    reused: int = 0
    probed: int = 0
    """Number of generated tokens of continuations that only serve to choose a branching point."""

    def __post_init__(self) -> None:
        self.point = point_of(self.config)
        self._unread = 0

    def generate(self, engine: Engine, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns the completions of each request: request.n, or fewer if rollout.branch.tokens are used up. `done` is
        called at the end with the index and the completions of each request. Called equally often on every process."""
        settings = branch_of(self.config)
        assert settings.roots
        trees = [[Leaf(c, 1) for c in answers] for answers in engine.generate(
            [replace(r, n=min(r.n, settings.roots)) for r in requests])]
        spent = [sum(len(leaf.completion.tokens) for leaf in tree) for tree in trees]
        most = math.inf if settings.tokens is None else settings.tokens
        while any(comm.gather(any(len(tree) < r.n and n < most for r, tree, n in zip(requests, trees, spent,
                                                                                     strict=True)))):
            wanted = [i for i, r in enumerate(requests) if len(trees[i]) < r.n and spent[i] < most]
            if isinstance(self.point.function, Meaning):
                self._probe(engine, self.point.function, requests, trees, wanted, spent)
            branch_requests = [self._round(requests[i], trees[i]) for i in wanted]
            for i, request, completions in zip(wanted, branch_requests, engine.generate(branch_requests), strict=True):
                starts = [len(b.written.tokens) + 1 for b in request.begun] or [1] * len(completions)
                trees[i] += [Leaf(c if c.episode_id else replace(c, turns=()), start)
                             for c, start in zip(completions, starts, strict=True)]
                begun = sum(len(b.written.tokens) for b in request.begun)
                spent[i] += sum(len(c.tokens) for c in completions) - begun
        out = [[leaf.completion for leaf in tree] for tree in trees]
        probed, self._unread = self._unread, 0
        self.written, self.probed = self.written + sum(spent), self.probed + probed
        self.reused += sum(len(c.tokens) for answers in out for c in answers) - (sum(spent) - probed)
        for i, completions in enumerate(out):
            if done:
                done(i, completions)
        return out

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call, over all processes: the share of completion tokens that are shared prefixes and
        so were not generated again, and the share of generated tokens that only served to choose branching points."""
        written, reused, probed = comm.total(self.written, self.reused, self.probed)
        self.written = self.reused = self.probed = 0
        shares = {"branch/reused_frac": reused / max(written - probed + reused, 1.0)}
        return shares | ({"branch/probed_frac": probed / max(written, 1.0)}
                         if isinstance(self.point.function, Meaning) else {})

    def _probe(self, engine: Engine, rule: Meaning, requests: Sequence[Request], trees: Sequence[list[Leaf]],
               wanted: Sequence[int], spent: list[int]) -> None:
        probes = [(i, leaf, place, self._probing(rule, requests[i], leaf, number, place)) for i in wanted
                  for number, leaf in enumerate(trees[i]) if not leaf.entropies
                  for place in rule.candidates(leaf.places)]
        for (i, leaf, place, _), completions in zip(probes, engine.generate([p for *_, p in probes]), strict=True):
            leaf.entropies[place] = rule.entropy([self.read(c.tokens[place:]) for c in completions])
            tokens = sum(len(c.tokens) - place for c in completions)
            spent[i], self._unread = spent[i] + tokens, self._unread + tokens

    @staticmethod
    def _probing(rule: Meaning, request: Request, leaf: Leaf, number: int, place: int) -> Request:
        begun = tuple(AnswerPrefix(index=i, written=_cut(leaf.completion, place)) for i in range(rule.continuations))
        return replace(request, n=rule.continuations, begun=begun, key=(_PROBED, *request.key[1:], number, place),
                       sampling=at_most(request.sampling, place + rule.tokens))

    def _round(self, request: Request, tree: list[Leaf]) -> Request:
        """The next request for a group: for all missing completions or, with a token budget, for at most as many as
        there are roots. Each new completion continues the completion in `tree` that has the fewest branches."""
        settings = branch_of(self.config)
        n, begun = request.n - len(tree), []
        n = n if settings.tokens is None else min(n, settings.roots or n)
        for index in range(len(tree), len(tree) + n):
            leaf = min((leaf for leaf in tree if len(leaf.places)), key=lambda leaf: leaf.branches, default=None)
            if leaf is None:  # no completion can be continued: start from the prompt, with a new random stream
                return replace(request, n=n, key=(*request.key, len(tree)))
            rng = np.random.default_rng([self.config.seed, *request.key, index])
            place = self._place(leaf, rng)
            begun.append(AnswerPrefix(index=index, written=_cut(leaf.completion, place)))
            leaf.branches += place > 0
        return replace(request, n=n, begun=tuple(begun), way_out="rollout.branch.roots=null")

    def _place(self, leaf: Leaf, rng: np.random.Generator) -> int:
        named, places = f"rollout.branch.at={branch_of(self.config).at.name!r}", leaf.places
        if isinstance(self.point.function, Meaning):
            return self.point(leaf.entropies, leaf.branches, rng)
        try:
            place = self.point(leaf.completion, places, leaf.branches, rng)
        except Exception as error:  # user code can raise anything
            raise ConfigError(f"{named}: {failure(error)}") from error
        if place not in places:
            raise ConfigError(f"{named} returned {place!r}: it must return one of the {len(places)} token positions "
                              f"that it was given, {places[0]} to {places[-1]}")
        return int(place)


def at_most(sampling: Sampling, tokens: int) -> Sampling:
    """The sampling settings with at most `tokens` new tokens. A thinking budget that is not lower than the new limit is
    dropped."""
    most, budget = min(tokens, sampling.max_new_tokens), sampling.thinking_budget
    return replace(sampling, max_new_tokens=most, thinking_budget=budget if (budget or most) < most else None)


def point_of(config: Config) -> Bound:
    """The rule that rollout.branch.at names, with the rule's options. Raises ConfigError for an unknown rule."""
    return bind("rollout.branch.at", branch_of(config).at, POINTS, skip=4)


def check(config: Config, task: Task, generates: bool) -> None:
    """Raises ConfigError if rollout.branch does not work with this run's task or kind of training."""
    settings, problem = branch_of(config), ""
    if not settings.active:
        return
    point_of(config)
    if not generates:
        problem = "supervised fine-tuning generates no answers"
    elif has_environment(task) and settings.search:
        problem = (f"task '{task.name}' has an environment or tools, but a search cuts single answers into pieces "
                   "(rollout.branch.roots supports episodes, which branch between turns)")
    elif has_environment(task) and settings.at.name == "meaning":
        raise ConfigError("rollout.branch.at=meaning reads continuations of single answers, but task "
                          f"'{task.name}' has an environment or tools, whose episodes branch between turns: set "
                          "rollout.branch.at=surprise or uniform")
    elif has_variants(task):
        problem = f"task '{task.name}' uses prompt variants, whose answers are generated with other media"
    if problem:
        name, value = ("search", "") if settings.search else ("roots", f"={settings.roots}")
        raise ConfigError(f"rollout.branch.{name}{value}: {problem}. Set rollout.branch.{name}=null")


def _cut(completion: Completion, length: int) -> Completion:
    """The first `length` tokens of a completion, as a prefix to continue; for an episode, with the turns that end
    within these tokens."""
    turns = tuple(t for t in completion.turns if t.end <= length) if completion.episode_id else ()
    return replace(completion, tokens=completion.tokens[:length], logprobs=completion.logprobs[:length],
                   loss_mask=completion.loss_mask[:length], text="", finish_reason="length", turns=turns, shown=None,
                   observed_media=(), windows=())


EMPTY = Completion(tokens=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32), loss_mask=np.zeros(0, bool), text="",
                   finish_reason="length")


Alike = Callable[[str, str], bool]
"""A function that returns whether two continuations mean the same."""


def words(a: str, b: str) -> bool:
    """Whether two texts mean the same: they share at least half of their words (F1 >= .5), or both have no words."""
    return token_f1(clean_label(a), clean_label(b)) >= 0.5


ALIKE: dict[str, Alike] = {"words": words, "exact": same_label}


def semantic_entropy(texts: Sequence[str], alike: Alike) -> float:
    """Clusters texts by meaning and returns the entropy of the cluster shares in nats; 0 = all texts mean the same. A
    text joins the first cluster whose first text means the same."""
    clusters: list[list[str]] = []
    for text in texts:
        own = next((cluster for cluster in clusters if alike(cluster[0], text)), None)
        if own is None:
            clusters.append([text])
        else:
            own.append(text)
    shares = [len(cluster) / len(texts) for cluster in clusters]
    return -sum(p * math.log(p) for p in shares) + 0.0


class Meaning:
    """Branches at the position with the largest semantic entropy. Each further branch of the same completion is at the
    position with the next largest. ROSE.

    In each completion, `candidates` evenly spread positions get `continuations` continuations of at most `tokens`
    tokens each, which are clustered by meaning. The entropy of the clusters, the semantic entropy (Semantic
    Uncertainty, arXiv 2302.09664; its discrete form, Nature 630, 625), is large where the continuations differ in
    meaning. `alike` names the function that decides whether two continuations mean the same: `words` if they share at
    least half of their words, `exact` if they are equal except for case and punctuation, or a user's function. With
    probability `root`, a new completion starts from the prompt instead of branching."""

    def __init__(self, continuations: Annotated[int, Field(ge=2)] = 4, tokens: Positive = 16,
                 candidates: Positive = 8, root: Fraction = 0.1, alike: str = "words"):
        self.continuations, self.tokens, self.most, self.root = continuations, tokens, candidates, root
        self.alike = resolve("rollout.branch.at.alike", alike, ALIKE)

    def candidates(self, positions: np.ndarray) -> list[int]:
        """The positions, out of `positions` [K], from which continuations are generated."""
        count = min(self.most, len(positions))
        return [int(positions[round(i * (len(positions) - 1) / max(count - 1, 1))]) for i in range(count)]

    def entropy(self, texts: Sequence[str]) -> float:
        return semantic_entropy(texts, self.alike)

    def __call__(self, entropies: Mapping[int, float], branches: int, rng: np.random.Generator) -> int:
        """Chooses the position at which a completion branches; 0 = start from the prompt. `entropies` holds the
        semantic entropy by position, and `branches` is the number of branches that the completion already has."""
        if rng.random() < self.root:
            return 0
        order = sorted(entropies, key=lambda place: (-entropies[place], place))
        return order[branches % len(order)]


POINTS: dict[str, Point | type[Meaning]] = {"surprise": surprise, "uniform": uniform, "meaning": Meaning}
