"""Episodes of `vlrl play`: a person chooses the actions, and sees the environment's observations and the score. No
model is needed.

    with environments(config, task) as host:
        episode = PlayedEpisode(config, task, host, after_reset(config, host, sample, 0), folder)
        episode.act("up")                           # until episode.ended
        episode.judged().scored.parts"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vlrl.config.registry import failure, prints_aside
from vlrl.config.schema import Config
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.environments.tools import task_tools
from vlrl.errors import TaskError, VlrlError
from vlrl.rewards.text import parse_answer
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.tools.play.questions import Question, QuestionMedia, ScoredAnswer, ask, judge_answer, media_files
from vlrl.types import PastAction, Sample


@contextmanager
def environments(config: Config, task: Task) -> Iterator[Environments | None]:
    """Context manager that yields the Environments (the host of the task's environments) and closes them at the end. It
    yields None if the task has no environment."""
    host = Environments(lambda convention: task, config.environment) if has_environment(task) else None
    try:
        yield host
    finally:
        if host:
            host.close()


@dataclass(frozen=True)
class PlayedTurn:
    """An action, and the observation that the environment returned."""

    acted: PastAction
    media: tuple[QuestionMedia, ...] = ()  # files of the images and videos in the observation
    seconds: float = 0.0
    info: Any = None


class PlayedEpisode:
    """One episode that a person plays, starting after the environment's reset."""

    def __init__(self, config: Config, task: Task, host: Environments, sample: Sample, folder: Path):
        assert sample.environment_seed is not None
        self.task, self.limits, self.host, self.folder = task, config.episode, host, folder
        self._media_limits = config.limits
        self.question: Question = ask(task, sample, config.limits, folder)
        self.turns: list[PlayedTurn] = []
        self.ended = ""
        """Why the episode has ended: "stop" (the environment ended it), "turns" or "media" (the episode reached this
        limit), or "error" (the environment failed). "" while the episode is in progress."""
        self._episode = host.open(sample, sample.environment_seed)
        error = sample.reset_error
        if error is None:
            (observation,) = host.reset([self._episode])
            error = observation.reason if isinstance(observation, EnvironmentFailure) else None
        if error is not None:
            self.ended = "error"
            self.turns.append(PlayedTurn(PastAction(action="", error=error)))

    @property
    def error(self) -> str | None:
        return self.turns[-1].acted.error if self.turns else None

    def act(self, action: str) -> PlayedTurn:
        """Plays one turn and returns it. The turn may end the episode."""
        (step,) = self.host.step([self._episode], [action])
        if isinstance(step, EnvironmentFailure):
            self.ended = "error"
            turned = PlayedTurn(PastAction(action=action, error=step.reason), seconds=self._episode.seconds)
        else:
            media = media_files(step.observation.media, self._media_limits, self.folder, f"turn-{len(self.turns) + 1}-")
            state = None if step.state is None else str(step.state)
            acted = PastAction(action=action, observation=step.observation.text, media=tuple(step.observation.media),
                          parts=dict(step.parts), state=state, done=step.done)
            turned = PlayedTurn(acted, media, self._episode.seconds, step.info)
        self.turns.append(turned)
        self.ended = self.ended or self._end(turned)
        return turned

    def _end(self, turned: PlayedTurn) -> str:
        if turned.acted.done:
            return "stop"
        if len(self.turns) >= self.limits.max_turns:
            return "turns"
        return "media" if sum(len(t.media) for t in self.turns) > self.limits.max_media else ""

    def judged(self) -> ScoredAnswer:
        """The score of the episode so far, computed as in training."""
        acted = tuple(t.acted for t in self.turns)
        text = acted[-1].action if acted else ""
        answer = replace(parse_answer(text, truncated=self.ended != "stop"), turns=acted)
        return judge_answer(self.task, self.question, answer, self.error)

    def close(self) -> None:
        """Closes the environment of the episode."""
        self.host.close_episodes([self._episode])


def after_reset(config: Config, host: Environments, sample: Sample, n: int) -> Sample:
    """Sample number `n` after the reset of its environment: the returned sample has the first observation, or the
    reason why the reset failed. A sample without an environment is returned unchanged."""
    return host.reset_sample(sample, int(np.random.SeedSequence([config.seed, 8, n]).generate_state(1)[0]))


@prints_aside()
def oracle_actions(task: Task, sample: Sample) -> list[str] | None:
    """The actions of a perfect episode of the sample; None if the task has none. Raises TaskError if the task's code
    fails or returns anything but a list of strings."""
    task = task.of(sample)
    try:
        actions = task.oracle_actions(sample)
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:  # a task's code may raise anything
        raise TaskError(f"task '{task.name}': oracle_actions of sample '{sample.id}' failed: {failure(error)}"
                        ) from error
    if actions is not None and (isinstance(actions, str) or not isinstance(actions, Sequence) or
                                not all(isinstance(text, str) for text in actions)):
        raise TaskError(f"task '{task.name}': oracle_actions of sample '{sample.id}' returned {str(actions)[:80]!r}, "
                        "expected a list of strings")
    return None if actions is None else list(actions)


@prints_aside()
def tool_lines(task: Task, sample: Sample) -> list[str]:
    """One line for each tool of a sample: name, arguments and description."""
    schemas = [tool.schema["function"] for tool in task_tools(task, sample)]
    return [f"{s['name']}({', '.join(s['parameters'].get('properties', {}))}): {s['description']}" for s in schemas]
