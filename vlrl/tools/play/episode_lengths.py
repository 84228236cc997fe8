"""Estimates how long the episodes of a task can be, from the limits in the settings and the observations of a few
episodes that are played.

    observed = measure(config, task, host, counted(encode))     # None: the task has no environment
    length = observed.length(config.episode, config.rollout.max_new_tokens)"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

from vlrl.config.episodes import EpisodeSettings
from vlrl.config.schema import Config
from vlrl.data import media
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.errors import DataError
from vlrl.models.processing import Encoder
from vlrl.task import Task, task_samples
from vlrl.tools.play.episodes import after_reset, oracle_actions
from vlrl.types import Observation, Sample, Step

PLAYED = 4
CHARACTERS = 3.0  # number of characters that count as one text token, if there is no tokenizer
TEMPLATE = 10  # number of chat template tokens that are assumed around an observation, if there is no processor

Count = Callable[[Observation], tuple[int, int]]
"""Function of an observation that returns (number of tokens, number of visual tokens)."""


@dataclass(frozen=True, kw_only=True)
class EpisodeLength:
    """Size of the longest episode that the settings allow, without the prompt."""

    turns: int
    tokens: int  # number of tokens in all actions and observations
    visual: int  # number of visual tokens in all observations
    written: int  # number of tokens in all actions, which the model generates
    pictures: int


@dataclass(frozen=True, kw_only=True)
class ObservationStats:
    """Sizes of the observations in a few episodes that were played: means over all observations, rounded up."""

    episodes: int
    observations: int
    oracle: bool  # True if the actions came from oracle_actions, False if they were empty texts
    tokens: int
    visual: int
    pictures: int
    failed: str = ""  # why an episode failed; "" if none failed

    def length(self, limits: EpisodeSettings, action: int) -> EpisodeLength:
        """Returns the size of the longest episode within `limits` if every action has `action` tokens and every
        observation has the mean size."""
        tokens = visual = written = pictures = turns = 0
        while True:
            own = max(1, min(action, limits.max_tokens - tokens))
            turns, tokens, written = turns + 1, tokens + own, written + own
            over = tokens + self.tokens >= limits.max_tokens or pictures + self.pictures > limits.max_media
            if turns >= limits.max_turns or over:
                return EpisodeLength(turns=turns, tokens=tokens, visual=visual, written=written, pictures=pictures)
            tokens, visual, pictures = tokens + self.tokens, visual + self.visual, pictures + self.pictures

    def words(self) -> str:
        """A sentence that describes the measurement."""
        played = "the perfect actions of oracle_actions" if self.oracle else "empty actions"
        failed = f"; an episode failed: {self.failed}" if self.failed else ""
        return (f"observations of {self.tokens:,} tokens ({self.visual:,} visual), the mean of {self.observations} in "
                f"{self.episodes} episodes played with {played}{failed}")


def measure(config: Config, task: Task, host: Environments, count: Count) -> ObservationStats:
    """Plays the first episodes of the training split and measures the sizes of their observations with `count`.

    Raises DataError if no environment returns an observation after an action."""
    shown: list[tuple[int, int, int]] = []
    oracle, failed, played = False, "", 0
    for n, sample in enumerate(islice(task_samples(task, "train"), PLAYED)):
        begun = after_reset(config, host, sample, n)
        if begun.opening is None:
            continue
        actions = oracle_actions(task, begun)
        oracle |= actions is not None
        steps, problem = _played(config, host, begun, actions)
        failed, played = failed or problem, played + 1
        shown += [(*count(step.observation), len(step.observation.media)) for step in steps]
    if not shown:
        raise DataError(f"task '{task.name}': in its first {PLAYED} samples, no environment returned an observation"
                        f" after an action{f': {failed}' if failed else ''}")
    tokens, visual, pictures = (math.ceil(sum(column) / len(shown)) for column in zip(*shown, strict=True))
    return ObservationStats(episodes=played, observations=len(shown), oracle=oracle, tokens=tokens, visual=visual,
                    pictures=pictures, failed=failed)


def _played(config: Config, host: Environments, sample: Sample, actions: Any) -> tuple[list[Step], str]:
    """Plays one episode with these actions (None = empty actions). Returns (the steps of the episode, the reason why it
    failed). The reason is "" if the episode did not fail."""
    assert sample.environment_seed is not None
    episode, steps = host.open(sample, sample.environment_seed), list[Step]()
    try:
        (observation,) = host.reset([episode])
        if isinstance(observation, EnvironmentFailure):
            return steps, observation.reason
        for action in islice(repeat("") if actions is None else actions, config.episode.max_turns):
            (step,) = host.step([episode], [action])
            if isinstance(step, EnvironmentFailure):
                return steps, step.reason
            steps.append(step)
            if step.done:
                break
    finally:
        host.close_episodes([episode])
    return steps, ""


def counted(encode: Encoder) -> Count:
    """Returns a function that counts the tokens of an observation with the model's processor."""
    def count(observation: Observation) -> tuple[int, int]:
        prompt = encode.observation(observation, "an observation")
        return len(prompt), sum(prompt.visual_tokens)

    return count


def estimated(config: Config, side: int) -> Count:
    """Returns a function that estimates the tokens of an observation without a processor: text tokens from the number
    of characters, visual tokens from the image size, with one token per `side` x `side` pixels."""
    def count(observation: Observation) -> tuple[int, int]:
        most = min(config.episode.max_pixels or math.inf, config.model.max_pixels or math.inf)
        visual = 0
        for one in observation.media:
            loaded = media.load(one, config.limits)
            pixels = min(loaded.size[0] * loaded.size[1], most) * len(loaded.frames)
            visual += max(1, math.ceil(pixels / side**2))
        return TEMPLATE + math.ceil(len(observation.text) / CHARACTERS) + visual, visual

    return count


def as_answers(config: Config, length: EpisodeLength) -> Config:
    """The config with rollout.max_new_tokens set to the tokens of an episode, so that sizes computed for an answer are
    those of an episode."""
    rollout = config.rollout.model_copy(update={"max_new_tokens": length.tokens})
    return config.model_copy(update={"rollout": rollout})
