"""The interface of engines, and the requests they take."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from vlrl.task import Task
from vlrl.types import Completion, Prompt, Sample, Turn


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to sample completions. Example: `Sampling(max_new_tokens=512)`, greedy: `Sampling(..., temperature=0)`."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 = greedy; log-probabilities of a greedy completion are those at temperature 1."""
    top_p: float | None = None
    """Nucleus sampling: only the most probable tokens that hold this probability; 1 = all, None = the engine's default.
    """
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings; its finish_reason is then "stop"."""
    thinking_budget: int | None = None
    """If the first `thinking_budget` tokens hold no `</think>`, the tokens of `thinking_end` are forced after them, and
    the model continues. A prompt may already open `<think>`; a Request whose prompt has closed it has no budget."""
    thinking_end: str = "\n</think>\n"
    """Its tokens are part of the completion and count towards `max_new_tokens`; their loss_mask is False."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerPrefix:
    """The beginning of a completion that is to be continued, in its own random stream."""

    index: int
    """Its index in the group, which names its random stream."""
    written: Completion
    """All of it so far, without an end token or a stop string."""


@dataclass(eq=False)
class CacheSlot:
    """Where an engine may keep the KV cache of a completion, for a later request whose prompt extends prompt +
    completion."""

    cache: Any = None
    """In the engine's own format."""
    observed: Prompt | None = None
    """The last part of the next prompt, with the media that it adds."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """`n` completions of one prompt. Group size may differ per prompt; a greedy baseline is one more request."""

    prompt: Prompt
    n: int
    sampling: Sampling
    """Its limits count over whole completions, prefixes included."""
    key: tuple[int, ...] = (0,)
    """Names the random stream: rollout i draws from (seed, *key, i), whatever batch or process it runs in."""
    begun: tuple[AnswerPrefix, ...] = ()
    """[n] prefixes to continue, instead of n new completions. With unchanged weights the result is that of an
    uninterrupted generation. The returned completions include their prefix, and have one turn more."""
    way_out: str = ""
    """For errors: the setting without which no completion would continue another's text."""
    sample: Sample | None = None
    """Its environment answers, if it was reset (`Sample.opening`)."""
    max_turns: int | None = None
    """Most actions of its episodes; None = episode.max_turns."""
    continues: tuple[CacheSlot, ...] = ()
    """[n] cache slots of the completions, if later requests will extend them; an engine may ignore them."""
    turns: tuple[Turn, ...] = ()
    """Turns of the episode that the prompt ends with; token positions count from the end of the episode's first prompt.
    """

    def __post_init__(self) -> None:
        if self.sampling.thinking_budget is not None and "</think>" in self.prompt.opened:
            object.__setattr__(self, "sampling", replace(self.sampling, thinking_budget=None))


Done = Callable[[int, list[Completion]], None]
"""Takes the index of a request and all of its completions."""
PartialTexts = Callable[[], dict[tuple[int, int], str]]
"""Gives the texts of a batch so far, by (index of the request, index of the completion)."""
Watch = Callable[[PartialTexts], None]
"""Called after every token of a batch; texts are decoded only on demand. An exception in it ends the generation."""


class Engine(Protocol):
    """Samples completions from the policy."""

    def sync(self, policy: Any, step: int) -> None:
        """Takes over the policy's weights; completions sampled from now on carry `step` as their policy_step."""
        ...

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """The `request.n` completions of each request, in order.

        `done(i, completions)` is called in the caller's thread as soon as request `i` is complete while others are
        still being decoded, at most once each; not for the requests that finish last. It should return at once.
        """
        ...

    def close(self) -> None:
        """Frees the engine's resources."""
        ...


@runtime_checkable
class EpisodePlayer(Engine, Protocol):
    """An engine that plays episodes: the environments of samples answer the model (vlrl/environments/episodes.py)."""

    restarts: int
    """How often an environment process was restarted."""

    def over(self, engine: Engine) -> Self:
        """The same player over another engine. It shares the environments of this one, which closes them."""
        ...

    def opened(self, task: Task, sample: Sample, key: Sequence[int]) -> Sample:
        """See the function of this name."""
        ...

    def reopened(self, sample: Sample) -> Sample:
        """See the function of this name."""
        ...

    def replayed(self, requests: Sequence[Request], recorded: Sequence[list[Completion]]) -> list[list[Completion]]:
        """The recorded completions. Episodes, of which only the actions are needed, are played again in their
        environments; one that goes differently gets an error."""
        ...


ACTION = 7
"""First element of the key of every action of an episode after the first; the last element is the action's index."""


def make_completion(tokens: np.ndarray, logprobs: Any, sampled: np.ndarray, stop: Sequence[str], eos: Collection[int],
                    decode: Callable[[Any], str], turns: tuple[Turn, ...] = (), stopped: bool = False) -> Completion:
    """The completion of [T] token ids and log-probabilities; `sampled` is False where a token was forced.

    stop: the stop strings. turns: those of its prefix. stopped: the engine saw an end.
    """
    ended = len(tokens) > 0 and int(tokens[-1]) in eos
    text = decode(tokens[:-1] if ended else tokens)
    stopped = stopped or ended or any(string in text for string in stop)
    return Completion(tokens=tokens, logprobs=np.asarray(logprobs, dtype=np.float32), loss_mask=sampled, text=text,
                      finish_reason="stop" if stopped else "length",
                      turns=(*turns, Turn(start=turns[-1].end if turns else 0, end=len(tokens))))


def given_completion(tokens: np.ndarray, text: str = "") -> Completion:
    """A completion that was given, not sampled: [T] token ids with log-probabilities 0."""
    return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), loss_mask=np.ones(len(tokens), bool),
                      text=text, finish_reason="stop", turns=(Turn(start=0, end=len(tokens)),))


def turn_of(request: Request) -> int:
    """The index of the requested action in its episode; 0 outside of episodes."""
    return request.key[-1] if request.key[0] == ACTION else 0


def opened(engine: Engine, task: Task, sample: Sample, *key: int) -> Sample:
    """The sample with the first observation of its environment, reset with a seed derived from `key`, or with the error
    of the reset; unchanged if its task has no environment."""
    return engine.opened(task, sample, key) if isinstance(engine, EpisodePlayer) else sample


def reopened(engine: Engine, sample: Sample) -> Sample:
    """A reset sample whose media were changed, with the observation of its environment at the same seed."""
    return engine.reopened(sample) if isinstance(engine, EpisodePlayer) else sample
