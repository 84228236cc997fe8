"""Generates completions by tree search (rollout.branch.search).

From one node of the tree, `width` pieces are generated. Completions that end are scored. One of them is backed up, that
is, its result is added to the values of the nodes on its path. Then the next node is chosen and expanded
(search_tree.py), for all prompts of a step at the same time. The group consists of rollout.group_size backed-up
completions, with the values of their nodes (Completion.extra) for algo.advantage=deepsearch.

A prompt is searched if it is new, or if few completions of its last group were correct and none is cached. Correct
completions of such hard prompts are cached. The next group of the prompt begins with the cached completions, and the
rest of this group is generated without search, which measures the prompt's difficulty. DeepSearch (arXiv 2509.25454),
section 3.4. In the paper the cache is filled between rounds of training, here during training."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import AnswerPrefix, Done, Engine, Request
from vlrl.methods.tree.branching import EMPTY, at_most
from vlrl.methods.tree.search_tree import Tree
from vlrl.methods.tree.settings import SearchSettings, branch_of
from vlrl.types import Completion, Prompt

Judge = Callable[[Request, Sequence[Completion]], Sequence[bool | None]]
"""A function (request, ended completions) -> whether each is correct; None = unknown."""



@dataclass(frozen=True, eq=False)
class PromptMemory:
    """The results of a prompt's earlier groups, which are used when the prompt is drawn again."""

    right: float
    """Share of correct completions among those that were generated for the prompt's last group and could be judged."""
    cached: tuple[Completion, ...] = ()
    """Correct completions from the prompt's groups, with which its next group begins. Empty if `right` is above
    rollout.branch.search.hard."""

    def state_dict(self) -> dict[str, Any]:
        return {"right": self.right, "kept": [
            {"tokens": c.tokens.astype(np.int32), "loss_mask": c.loss_mask, "text": c.text,
             "finish_reason": c.finish_reason, "kept_at": c.policy_step} for c in self.cached]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> PromptMemory:
        return cls(state["right"], tuple(_cached_answer(**{**c, "tokens": np.asarray(c["tokens"], np.int64),
                                                           "loss_mask": np.asarray(c["loss_mask"], bool)})
                                         for c in state["kept"]))


class _Writing:
    """A group that is generated without search: cached completions first, then completions from the prompt."""

    def __init__(self, request: Request, cached: Sequence[Completion] = ()):
        self.request, self.cached = request, tuple(cached[:request.n - 1])
        self.wants = True
        self.completions: list[Completion] = []
        self.right: list[bool | None] = []

    def asks(self) -> Request:
        return replace(self.request, n=self.request.n - len(self.cached))

    def take(self, completions: Sequence[Completion], judge: Judge) -> None:
        self.wants = False
        self.completions += [replace(c, turns=()) for c in completions]
        self.right += judge(self.request, completions)

    @property
    def tokens(self) -> tuple[int, int, int]:
        total = sum(len(c.tokens) for c in self.completions)
        return total, total, 0


class _Searching:
    cached: tuple[Completion, ...] = ()

    def __init__(self, request: Request, settings: SearchSettings, budget: float):
        self.request, self.settings, self.budget = request, settings, budget
        self.tree = Tree(settings, EMPTY)
        self.piece = math.ceil(request.sampling.max_new_tokens / settings.depth)
        self.spent, self._children = 0, 0

    @property
    def wants(self) -> bool:
        count = len(self.tree.ends)
        return count < self.request.n and (self.spent < self.budget or not count)

    def asks(self) -> Request:
        """The request for new pieces that continue the current node. Each piece has a different number within the
        group, and so a different random stream."""
        node = self.tree.current
        assert node is not None
        sampling = at_most(self.request.sampling, len(node.written.tokens) + self.piece)
        first, self._children = self._children, self._children + self.settings.width
        begun = tuple(AnswerPrefix(index=i, written=node.written)
                      for i in range(first, self._children)) if first else ()
        return replace(self.request, n=self.settings.width, begun=begun, sampling=sampling)

    def take(self, completions: Sequence[Completion], judge: Judge) -> None:
        tree = self.tree
        assert tree.current is not None
        self.spent += sum(len(c.tokens) - len(tree.current.written.tokens) for c in completions)
        ends = tree.grow(completions, self.request.sampling.max_new_tokens)
        tree.judge(ends, judge(self.request, [node.written for node in ends]) if ends else ())
        while len(tree.ends) < self.request.n and (tree.current is None or not self.wants) and tree.back_up_waiting():
            pass
        tree.restart()

    @property
    def completions(self) -> list[Completion]:
        return [node.completion() for node in self.tree.ends]

    @property
    def right(self) -> list[bool | None]:
        return [node.right for node in self.tree.ends]

    @property
    def tokens(self) -> tuple[int, int, int]:
        nodes = [node for end in self.tree.ends for node in end.path_to_root()]
        once = {id(node): len(node.written.tokens) - node.start for node in nodes}
        total = sum(len(end.written.tokens) for end in self.tree.ends)
        return self.spent, total, total - sum(once.values())


class SearchGenerator:
    """Generates the groups of a step by tree search. Remembers the results of each prompt until the prompt is drawn
    again, identically on all processes."""

    def __init__(self, config: Config):
        settings = branch_of(config)
        assert settings.search
        self.settings, self.budget = settings.search, math.inf if settings.tokens is None else settings.tokens
        self.visits: dict[str, PromptMemory] = {}
        """Results by the key of the prompt, the least recently drawn prompt first."""
        self._counts = Counter[str]()

    def generate(self, engine: Engine, requests: Sequence[Request], judge: Judge, step: int,
                 done: Done | None = None) -> list[list[Completion]]:
        """Returns the completions of each request: request.n, or fewer if rollout.branch.tokens are used up. `judge`
        receives completions that have ended. `done` is called at the end with the index and the completions of each
        request. Called equally often on every process."""
        keys = [_key(r.prompt) for r in requests]
        groups = [self._begin(r, key) for r, key in zip(requests, keys, strict=True)]
        while any(comm.gather(any(group.wants for group in groups))):
            live = [group for group in groups if group.wants]
            completions = engine.generate([group.asks() for group in live])
            comm.together(lambda live=live, completions=completions: [group.take(pieces, judge) for group, pieces in
                                                                      zip(live, completions, strict=True)])
        self._remember([(r.key, key, group) for r, key, group in zip(requests, keys, groups, strict=True)], step)
        for group in groups:
            written, total, shared = group.tokens
            search = isinstance(group, _Searching)
            self._counts.update(groups=1, searched=search, begun=bool(group.cached), written=written, total=total,
                                shared=shared, grown=group.tree.grown if search else 0)
        out = [[*group.cached, *group.completions] for group in groups]
        for i, answers in enumerate(out):
            if done:
                done(i, answers)
        return out

    def _begin(self, request: Request, key: str) -> _Writing | _Searching:
        before = self.visits.get(key)
        if before and (before.cached or before.right > self.settings.hard):
            return _Writing(request, before.cached)
        return _Searching(request, self.settings, self.budget)

    def _remember(self, groups: Sequence[tuple[tuple[int, ...], str, _Writing | _Searching]], step: int) -> None:
        if not self.settings.cache:
            return
        own = [(number, key, visit) for number, key, group in groups if (visit := self._visit(group, step))]
        everyone = [entry for part in comm.gather(own) for entry in part]
        for _, key, visit in sorted(everyone, key=lambda entry: entry[0]):
            self.visits.pop(key, None)
            self.visits[key] = visit
        for key in [*self.visits][:max(0, len(self.visits) - self.settings.cache)]:
            del self.visits[key]

    def _visit(self, group: _Writing | _Searching, step: int) -> PromptMemory | None:
        judged = [(c, right) for c, right in zip(group.completions, group.right, strict=True) if right is not None]
        if not judged:
            return None
        share = sum(right for _, right in judged) / len(judged)
        if share > self.settings.hard:
            return PromptMemory(share)
        right_answers = [_cached_answer(c.tokens, c.loss_mask, c.text, c.finish_reason, step)
                         for c, right in judged if right]
        return PromptMemory(share, (*group.cached, *right_answers)[:group.request.n - 1])

    def metrics(self) -> dict[str, float]:
        """Metrics since the last call, over all processes. Shares of groups: those that were searched, and those that
        began with cached completions. Mean number of expanded nodes per search. Share of generated tokens that are
        in no completion. Share of completion tokens that are shared prefixes and so were not generated again."""
        names = ("groups", "searched", "begun", "grown", "written", "total", "shared")
        groups, searched, begun, grown, written, total, shared = comm.total(*(self._counts[name] for name in names))
        self._counts.clear()
        return {"search/groups_frac": searched / max(groups, 1.0), "search/kept_frac": begun / max(groups, 1.0),
                "search/unused_frac": 1 - (total - shared) / written if written else 0.0,
                "branch/reused_frac": shared / max(total, 1.0),
                **({"search/nodes_mean": grown / searched} if searched else {})}

    def state_dict(self) -> dict[str, Any]:
        return {"visits": [[key, visit.state_dict()] for key, visit in self.visits.items()]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.visits = {key: PromptMemory.of(visit) for key, visit in state["visits"]}


def _cached_answer(tokens: np.ndarray, loss_mask: np.ndarray, text: str, finish_reason: Any,
                   kept_at: int) -> Completion:
    """Creates a completion that a later group of the prompt begins with. `kept_at` is the number of the training step
    in which the completion was cached. The log-probabilities are set to NaN (unknown), because the weights will have
    changed when the completion is trained on."""
    return Completion(tokens=tokens, logprobs=np.full(len(tokens), np.nan, np.float32), loss_mask=loss_mask, text=text,
                      finish_reason=finish_reason, policy_step=kept_at)


def _key(prompt: Prompt) -> str:
    shown = sha256(prompt.ids.tobytes())
    for media in prompt.media:
        shown.update(media.sha256.encode())
    return shown.hexdigest()[:32]
