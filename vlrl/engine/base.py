"""The interface of engines, and of the requests that they process."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from vlrl.task import Task
from vlrl.types import Completion, Prompt, Sample, Turn


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The sampling parameters of a completion. Greedy: `Sampling(max_new_tokens=512, temperature=0)`."""

    max_new_tokens: int
    temperature: float = 1.0
    """0 = greedy decoding, whose log-probabilities are computed at temperature 1."""
    top_p: float | None = None
    """Nucleus sampling: sample from the smallest set of most probable tokens whose total probability reaches top_p. 1 =
    all tokens, None = the engine's default."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings; its finish_reason is then "stop"."""
    thinking_budget: int | None = None
    """If the first `thinking_budget` tokens contain no `</think>`, the tokens of `thinking_end` are forced after them,
    and the model continues. The prompt may already contain an open `<think>`. For a prompt that has already closed
    it, the budget is ignored."""
    thinking_end: str = "\n</think>\n"
    """The text that ends thinking when the budget is used up. Its tokens are part of the completion and count towards
    `max_new_tokens`; their loss_mask is False."""


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerPrefix:
    """The first tokens of a completion, to which the engine adds further tokens. The further tokens are sampled with a
    separate random stream."""

    index: int
    """The completion's index in its group, which selects the random stream."""
    written: Completion
    """The tokens generated so far, without an end token or a stop string."""


@dataclass(eq=False)
class CacheSlot:
    """A slot in which an engine may keep the KV cache of a request between two turns of an episode. The episode's next
    request starts with this request's prompt and completion, so it can reuse the cache."""

    cache: Any = None
    """The KV cache, in the format of the engine."""
    observed: Prompt | None = None
    """The observation, with its media, that follows this request's completion in the next request's prompt."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """A request for `n` completions of one prompt. Different prompts may have different n."""

    prompt: Prompt
    n: int
    sampling: Sampling
    """The sampling parameters. Token limits apply to whole completions, including their prefixes."""
    key: tuple[int, ...] = (0,)
    """Selects the random stream. Completion i is sampled with the seed (run seed, *key, i), in any batch or process."""
    begun: tuple[AnswerPrefix, ...] = ()
    """The prefixes that the n completions continue; () = n new completions. With unchanged weights the result is the
    same as without an interruption. The returned completions include their prefix and have one more entry in
    `turns`."""
    way_out: str = ""
    """For the message if an environment does not repeat the turns in `begun`: a setting, as SETTING=VALUE, with which
    no completion is continued."""
    sample: Sample | None = None
    """The sample of an episode. If its environment was already reset (`Sample.opening`), this environment is used."""
    max_turns: int | None = None
    """Maximum number of actions of an episode; None = episode.max_turns."""
    continues: tuple[CacheSlot, ...] = ()
    """One cache slot for each completion that later requests will extend; () if no later request extends these
    completions. An engine may ignore the slots."""
    turns: tuple[Turn, ...] = ()
    """The turns of the episode so far. Their tokens are at the end of the prompt. The token positions in these turns
    count from the end of the episode's first prompt."""

    def __post_init__(self) -> None:
        if self.sampling.thinking_budget is not None and "</think>" in self.prompt.opened:
            object.__setattr__(self, "sampling", replace(self.sampling, thinking_budget=None))


Done = Callable[[int, list[Completion]], None]
"""A function that an engine calls with the index of a finished request and all of the request's completions."""
PartialTexts = Callable[[], dict[tuple[int, int], str]]
"""A function that returns the texts decoded so far in a batch, by (index of the request, index of the completion)."""
Watch = Callable[[PartialTexts], None]
"""A function that an engine calls after every token of a batch. Its argument decodes the texts when it is called. An
exception in the function ends generation."""


class Engine(Protocol):
    """The interface of an engine, which samples completions from the policy."""

    def sync(self, policy: Any, step: int) -> None:
        """Loads the policy's weights. Completions sampled afterwards have `step` as their policy_step."""
        ...

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns the `request.n` completions of each request, in the order of the requests.

        `done(i, completions)` is called in the caller's thread as soon as request `i` is complete, at most once per
        request, and only while other requests are still being decoded. The caller gets the requests that finish last
        only by the return value. `done` should return at once."""
        ...

    def close(self) -> None:
        """Frees the engine's resources."""
        ...


@runtime_checkable
class EpisodePlayer(Engine, Protocol):
    """An engine that plays multi-turn episodes, in which the environment of a sample responds to the model's actions.
    See vlrl/environments/episodes.py."""

    restarts: int
    """How many times an environment process was restarted."""

    def over(self, engine: Engine) -> Self:
        """Returns a copy that samples from `engine` and has the same environments, which only the original closes."""
        ...

    def reset_sample(self, task: Task, sample: Sample, key: Sequence[int]) -> Sample:
        """Resets the sample's environment with a seed derived from `key`. Returns the sample with the first
        observation."""
        ...

    def reset_sample_again(self, sample: Sample) -> Sample:
        """Resets the sample's environment with the same seed. Returns the sample with the new first observation."""
        ...

    def replayed(self, requests: Sequence[Request], recorded: Sequence[list[Completion]]) -> list[list[Completion]]:
        """Replays the actions of recorded episodes in their environments, and returns the recorded completions of each
        request. A completion gets an error if its environment responds differently than before."""
        ...


ACTION = 7
"""First number of the `key` of a request for the second or a later action of an episode. The last number of such a key
is the index of the action."""


def make_completion(tokens: np.ndarray, logprobs: Any, sampled: np.ndarray, stop: Sequence[str], eos: Collection[int],
                    decode: Callable[[Any], str], turns: tuple[Turn, ...] = (), stopped: bool = False) -> Completion:
    """Builds a Completion from [T] token ids and log-probabilities. sampled: [T] bool, False for tokens that were
    forced. stop: the stop strings. eos: ids of the end tokens. decode: converts ids to text. turns: the turns of the
    completion's prefix. stopped: whether the engine reported an end token or a stop string."""
    ended = len(tokens) > 0 and int(tokens[-1]) in eos
    text = decode(tokens[:-1] if ended else tokens)
    stopped = stopped or ended or any(string in text for string in stop)
    return Completion(tokens=tokens, logprobs=np.asarray(logprobs, dtype=np.float32), loss_mask=sampled, text=text,
                      finish_reason="stop" if stopped else "length",
                      turns=(*turns, Turn(start=turns[-1].end if turns else 0, end=len(tokens))))


def unsampled_completion(tokens: np.ndarray, text: str = "") -> Completion:
    """The Completion of a text that no model sampled, such as a reference answer, with log-probabilities 0. tokens: [T]
    ids, including an end token if there is one. text: the text of the completion."""
    return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32), loss_mask=np.ones(len(tokens), bool),
                      text=text, finish_reason="stop", turns=(Turn(start=0, end=len(tokens)),))


def turn_of(request: Request) -> int:
    """The index of the requested action in its episode; 0 for a request that belongs to no episode."""
    return request.key[-1] if request.key[0] == ACTION else 0


def reset_sample(engine: Engine, task: Task, sample: Sample, *key: int) -> Sample:
    """Resets the sample's environment, and returns the sample with the first observation or with the error of the
    reset. The seed of the environment is derived from `key`. A sample without an environment is returned unchanged."""
    return engine.reset_sample(task, sample, key) if isinstance(engine, EpisodePlayer) else sample


def reset_sample_again(engine: Engine, sample: Sample) -> Sample:
    """Resets the sample's environment with the same seed, after the sample's media were changed. Returns the sample
    with the new first observation. A sample without an environment is returned unchanged."""
    return engine.reset_sample_again(sample) if isinstance(engine, EpisodePlayer) else sample
