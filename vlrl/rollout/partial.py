"""Partial rollouts: a completion is generated over several steps, at most rollout.step_tokens tokens in each.

Kimi k1.5 (arXiv 2501.12599): long completions do not delay a step. An unfinished completion is continued in the next
step, from its own text, with the weights of that step. A group is carried over until all of its completions have ended,
and is then scored. The loss only includes the tokens that were generated in a completion's last step; earlier tokens
are masked. A completion that ended in an earlier step than the rest of its group is trained on unchanged.
Rollout.policy_step is the step whose weights sampled the trained tokens.

Every process knows all carried-over groups, so each step distributes them again, and one checkpoint contains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.curriculum import Draw
from vlrl.engine.base import AnswerPrefix, Request
from vlrl.errors import ConfigError
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.variants import has_variants
from vlrl.types import Completion, Group, Turn


@dataclass(frozen=True, eq=False)
class PartialGroup:
    """All completions of a group after a step; some of them may be unfinished."""

    number: int  # number of the group, which also selects its random streams
    draw: Draw
    answers: tuple[Completion, ...]
    steps: tuple[int, ...]  # for each completion, the step that generated its last part
    most: int  # token limit of a completion

    @property
    def unfinished(self) -> tuple[AnswerPrefix, ...]:
        """The completions that have neither ended nor reached `most` tokens, each with its index in the group."""
        return tuple(AnswerPrefix(index=i, written=c) for i, c in enumerate(self.answers)
                     if c.truncated and len(c.tokens) < self.most)

    def after(self, completions: Sequence[Completion], step: int) -> PartialGroup:
        """The group after `step`, which continued the `unfinished` completions. completions: the continued completions,
        each from its first token, in the order of `unfinished`."""
        longer = dict(zip([begun.index for begun in self.unfinished], completions, strict=True))
        return replace(self, answers=tuple(longer.get(i, c) for i, c in enumerate(self.answers)),
                       steps=tuple(step if i in longer else s for i, s in enumerate(self.steps)))

    def with_policy_steps(self, group: Group) -> Group:
        """Returns the scored group `group`, in which the policy_step of each rollout is the step that generated the
        last part of its completion."""
        return replace(group, rollouts=tuple(replace(r, policy_step=step)
                                             for r, step in zip(group.rollouts, self.steps, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "draw": draw_state(self.draw), "steps": list(self.steps), "most": self.most,
                "answers": [*map(completion_state, self.answers)]}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> PartialGroup:
        """Restores a PartialGroup from the result of `state_dict`."""
        return cls(state["number"], draw_of(state["draw"]), tuple(completion_of(**a) for a in state["answers"]),
                   tuple(state["steps"]), state["most"])


def draw_state(draw: Draw) -> dict[str, Any]:
    """Converts a Draw (a drawn prompt) to plain values for a checkpoint."""
    return {**vars(draw), **{name: [list(pair) for pair in getattr(draw, name)] for name in _PAIRS}}


def draw_of(state: Mapping[str, Any]) -> Draw:
    """Restores a draw from the result of `draw_state`."""
    return Draw(**{**state, **{name: tuple((key, value) for key, value in state.get(name, ())) for name in _PAIRS}})


_PAIRS = ("knobs", "fields")  # fields of a draw that are tuples of (name, value) pairs


def completion_state(c: Completion) -> dict[str, Any]:
    """Converts a completion to plain values for a checkpoint."""
    return {"tokens": c.tokens, "logprobs": c.logprobs, "loss_mask": c.loss_mask, "text": c.text,
            "finish_reason": c.finish_reason, "ends": [t.end for t in c.turns],
            **({"actions": [[t.start, t.end, t.text] for t in c.turns if t.role == "assistant"],
                "episode_id": c.episode_id} if c.episode_id else {})}


def completion_of(tokens: Any, logprobs: Any, loss_mask: Any, ends: Sequence[int], actions: Sequence[Any] = (),
                  **more: Any) -> Completion:
    """Inverse of `completion_state`. For an episode, only the actions are restored (see EpisodeEngine.replayed). ends:
    end of each turn; actions: (start, end, text) of each action."""
    turns = tuple(Turn(start=start, end=end, text=text) for start, end, text in actions) or tuple(
        Turn(start=start, end=end) for start, end in zip([0, *ends], ends, strict=False))
    return Completion(tokens=np.asarray(tokens), logprobs=np.asarray(logprobs), loss_mask=np.asarray(loss_mask),
                      turns=turns, **more)


def in_one_step(request: Request, carried_over: PartialGroup | None, tokens: int) -> Request:
    """Limits a group's request to one step. If a group is carried over, only its unfinished completions are requested.
    tokens: maximum number of new tokens per completion."""
    begun = carried_over.unfinished if carried_over else ()
    written = max((len(b.written.tokens) for b in begun), default=0)
    limited = replace(request.sampling, max_new_tokens=min(request.sampling.max_new_tokens, written + tokens))
    return replace(request, n=len(begun) if carried_over else request.n, begun=begun, sampling=limited)


def last_part(completion: Completion) -> Completion:
    """A copy of the completion in which only the last turn is trained on; older weights sampled earlier turns."""
    start = completion.turns[-1].start if completion.turns else 0
    if not start:
        return completion
    return replace(completion, loss_mask=completion.loss_mask & (np.arange(len(completion.tokens)) >= start))


def check(config: Config, task: Task, requires: frozenset[str], generates: bool) -> None:
    """Raises ConfigError if this run cannot use rollout.step_tokens. requires: the inputs that the algorithm needs.
    generates: whether the policy samples the completions."""
    tokens = config.rollout.step_tokens
    problem, remedy = "", "leave rollout.step_tokens out"
    if not generates:
        problem = "supervised fine-tuning samples no completions"
    elif has_variants(task):
        problem = f"task '{task.name}' has variants, whose completions cannot be continued in a later step"
    elif "greedy" in requires:
        problem = "the greedy completion that the advantage compares with cannot be continued in a later step"
        remedy = "choose another algo.advantage, or " + remedy
    if tokens is not None and problem:
        raise ConfigError(f"rollout.step_tokens={tokens}: {problem}: {remedy}")


def refuse_episodes(config: Config, task: Task) -> None:
    """Raises ConfigError for rollout.step_tokens if the task has environments."""
    tokens = config.rollout.step_tokens
    if tokens is not None and has_environment(task):
        raise ConfigError(f"rollout.step_tokens={tokens}: task '{task.name}' has an environment or tools, and an "
                          "episode cannot be continued in a later step. Leave rollout.step_tokens out: "
                          "episode.max_turns and episode.max_tokens limit episodes (docs/write-an-environment.md)")
