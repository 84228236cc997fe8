"""What every engine offers the loop, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

from vlrl.task import Task
from vlrl.types import Completion, Prompt, Sample, Turn


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw answers. Example: `Sampling(max_new_tokens=512)`, greedy: `Sampling(..., temperature=0)`."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 = greedy; log-probabilities of a greedy answer are those at temperature 1."""
    top_p: float | None = None
    """Drawn from the most probable tokens that hold this much probability, 1 = from all; None = as the engine does."""
    stop: tuple[str, ...] = ()
    """An answer ends with the token that completes one of these texts; its finish_reason is then "stop"."""
    thinking_budget: int | None = None
    """When the first `thinking_budget` tokens hold no `</think>`, the tokens of `thinking_end` follow them, and the
    model goes on after these. Prompts may have opened a `<think>`; where one has closed it, its Request
    has no budget."""
    thinking_end: str = "\n</think>\n"
    """Its tokens are part of the answer and count towards `max_new_tokens`; loss_mask is False on them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerPrefix:
    """An answer that goes on from its own text, in its own random stream."""

    index: int
    """Its place in the group: rollout `index` of the stream."""
    written: Completion
    """All of it so far; without an end token or a stop string."""


@dataclass(eq=False)
class CacheSlot:
    """What an engine may keep of an answer, for a request whose prompt is the answered one, the answer and more."""

    cache: Any = None
    """The engine's own."""
    observed: Prompt | None = None
    """The end of that prompt, with the media that it adds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """`n` answers to one prompt. Group size may differ per prompt; a greedy baseline is one more request."""

    prompt: Prompt
    n: int
    sampling: Sampling
    """Its limits count over whole answers, what was written before included."""
    key: tuple[int, ...] = (0,)
    """Names the random stream: rollout i draws from (seed, *key, i), whatever batch or process it runs in."""
    begun: tuple[AnswerPrefix, ...] = ()
    """[n] answers to go on with, instead of n others: with the same weights they become what they would have become
    unbroken. Their completions hold all of them, and one turn more."""
    way_out: str = ""
    """For errors: the setting without which no answer would go on from another's text."""
    sample: Sample | None = None
    """Whose environment answers, where it was opened (`Sample.opening`)."""
    max_turns: int | None = None
    """Most actions of its episodes; None = episode.max_turns."""
    continues: tuple[CacheSlot, ...] = ()
    """[n] of the answers, where further requests will go on from them; an engine may ignore it."""
    turns: tuple[Turn, ...] = ()
    """Of an episode, those that the prompt ends with; they count from the end of the prompt that it began with."""

    def __post_init__(self) -> None:
        if self.sampling.thinking_budget is not None and "</think>" in self.prompt.opened:
            object.__setattr__(self, "sampling", replace(self.sampling, thinking_budget=None))


Done = Callable[[int, list[Completion]], None]
"""Takes the number of a request and all of its completions."""
PartialTexts = Callable[[], dict[tuple[int, int], str]]
"""Gives what the answers of a batch hold so far, by (number of the request, number of the answer)."""
Watch = Callable[[PartialTexts], None]
"""Called after every token of a batch; the texts are decoded only when it asks for them. What it raises ends the
generation."""


class Engine(Protocol):
    """Draws answers from the policy."""

    def sync(self, policy: Any, step: int) -> None:
        """Takes over the policy's weights; answers drawn from now on carry `step` as their policy_step."""
        ...

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns `request.n` completions for each request, in order.

        `done(i, completions)` is called from the caller's thread as soon as request `i` is whole and while others are
        still to be written, at most once each; not for those that are written last. It should return at once.
        """
        ...

    def close(self) -> None:
        """Frees what the engine holds."""
        ...


@runtime_checkable
class EpisodePlayer(Engine, Protocol):
    """An engine under which the environments of samples answer (vlrl/environments/episodes.py)."""

    restarts: int
    """How often a process of environments was started again."""

    def over(self, engine: Engine) -> Self:
        """Returns the same over another engine; its environments stay those of this one, which closes them."""
        ...

    def opened(self, task: Task, sample: Sample, key: Sequence[int]) -> Sample:
        """See the function of this name."""
        ...

    def reopened(self, sample: Sample) -> Sample:
        """See the function of this name."""
        ...

    def replayed(self, requests: Sequence[Request], recorded: Sequence[list[Completion]]) -> list[list[Completion]]:
        """Returns recorded completions; episodes, of which the actions suffice, after their environments have answered
        again. One that went otherwise has an error.
        """
        ...


ACTION = 7
"""Begins the keys of all actions of an episode after the first; they end with the number of the action."""


def turn_of(request: Request) -> int:
    """Returns the number of the action that an engine which plays episodes asks for."""
    return request.key[-1] if request.key[0] == ACTION else 0


def opened(engine: Engine, task: Task, sample: Sample, *key: int) -> Sample:
    """Returns the sample with what its environment shows at a reset whose seed is made of `key`, or why it cannot be
    reset; as it is where its task has no environment.
    """
    return engine.opened(task, sample, key) if isinstance(engine, EpisodePlayer) else sample


def reopened(engine: Engine, sample: Sample) -> Sample:
    """Returns an opened sample whose media were changed with what its environment shows now, at the same seed."""
    return engine.reopened(sample) if isinstance(engine, EpisodePlayer) else sample
