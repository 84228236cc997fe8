"""Multi-turn episodes: the model acts, and the environment responds with text and images, turn by turn.

    engine = EpisodeEngine(engine, encode, environments, config, clock)     # plays requests whose sample was reset

An episode is one growing list of token ids: prompt, action as sampled, observation as rendered by the chat template,
action ... No part is tokenized twice, and sampled tokens are never rendered again. With environment.order=fixed all
live episodes of a call act in the same batch, so batches never depend on timing. With environment.order=arrival,
episodes continue as soon as their environment has responded. Action t of rollout i of a group is sampled with the
random stream (seed, key of the group, i, t). All episodes of a group start from the same reset.

An episode may continue from the first turns of another episode (`Request.begun`). Its environment is then reset with
the same seed, gets the same actions, and must respond in the same way.

With `episode.history=last:k` the list of ids grows in the same way, but turn t >= k is sampled with a shortened context
(a window): the prompt, an end token that closes an empty turn of the model, and the last k observations with the
actions between them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, cast

import numpy as np

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Done, Engine, Request
from vlrl.environments.host import EnvironmentFailure, Environments
from vlrl.environments.live_episode import LiveEpisode, action_of, group_members, never_begun, sampling_up_to
from vlrl.environments.tools import with_readable_results
from vlrl.errors import DataError
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import Clock
from vlrl.rewards.text import EnvironmentAction
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.types import Completion, Prompt, Sample, Step

_log = logging.getLogger(__name__)


class EpisodeEngine:
    """An engine that plays episodes, using another engine that samples single actions."""

    def __init__(self, engine: Engine, encode: Encoder, environments: Environments, config: Config, clock: Clock):
        self.engine, self.encode, self.environments, self.clock = engine, encode.copy(), environments, clock
        self.limits, self.seed = config.episode, config.seed
        if self.encode.strips_thinking and comm.is_main():
            _log.warning("the chat template of %s drops the thinking of earlier turns; in episodes, the "
                         "thinking of all turns is kept, in training and in evaluation", config.model.name)
        order = config.environment.order
        self.fixed = order == "fixed" or (order == "auto" and config.engine.name == "hf")

    def over(self, engine: Engine) -> EpisodeEngine:
        """Returns a copy that samples from `engine` and has the same environments, which only the original closes."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def sync(self, policy: Any, step: int) -> None:
        self.engine.sync(policy, step)

    def close(self) -> None:
        self.environments.close()
        self.engine.close()

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns the `request.n` completions of each request; they are whole episodes if the sample has an
        environment. done: see Engine.generate; it is only called if no sample has an environment."""
        acting = {i: r.sample for i, r in enumerate(requests) if r.sample is not None and r.sample.opening is not None}
        if not acting:
            return self.engine.generate(requests, done)
        out = {i: [never_begun(requests[i], place, sample.reset_error) for place, _ in group_members(requests[i])]
               for i, sample in acting.items() if sample.reset_error}
        single = [i for i in range(len(requests)) if i not in acting]
        playing = [i for i in acting if i not in out]
        if single:
            out |= zip(single, self.engine.generate([requests[i] for i in single]), strict=True)
        if playing:
            out |= zip(playing, self._episodes([requests[i] for i in playing], self.engine), strict=True)
        return [out[i] for i in range(len(requests))]

    def replayed(self, requests: Sequence[Request], recorded: Sequence[list[Completion]]) -> list[list[Completion]]:
        """Returns the recorded completions of each request, after replaying the actions of recorded episodes in their
        environments. If an environment responds differently than in the recorded episode, the episode gets an error."""
        acting = [i for i, r in enumerate(requests)
                  if r.sample is not None and r.sample.opening is not None and not r.sample.reset_error]
        engine = _Recorded({requests[i].key: recorded[i] for i in acting})
        again = dict(zip(acting, self._episodes([requests[i] for i in acting], engine), strict=True))
        return [[*map(_unchanged, again[i], own)] if i in again else own for i, own in enumerate(recorded)]

    @property
    def restarts(self) -> int:
        """How many times an environment process was restarted."""
        return self.environments.restarts

    def reset_sample(self, task: Task, sample: Sample, key: Sequence[int]) -> Sample:
        """Resets the sample's environment, and returns the sample with the first observation or with the error of the
        reset. The seed of the environment is derived from `key`. A sample whose task has no environment is returned
        unchanged."""
        if not has_environment(task.of(sample)):
            return sample
        seed = int(np.random.SeedSequence([self.seed, 8, *key]).generate_state(1)[0])
        return self.environments.reset_sample(sample, seed)

    def reset_sample_again(self, sample: Sample) -> Sample:
        """Resets the environment with the same seed after the sample's media were changed. Returns the sample with the
        new first observation."""
        if sample.environment_seed is None:
            return sample
        as_it_was = replace(sample, opening=None, environment_seed=None, reset_error=None)
        return self.environments.reset_sample(as_it_was, sample.environment_seed)

    def abandon(self) -> None:
        """Called from another thread: stops the running generation."""
        getattr(self.engine, "abandon", lambda: None)()

    def _episodes(self, requests: Sequence[Request], engine: Engine) -> list[list[Completion]]:
        groups = [[LiveEpisode(r, i, self.environments.open(cast(Sample, r.sample)), r.prompt, self.limits.last,
                               self.encode.end, again) for i, again in group_members(r)] for r in requests]
        everyone = [p for group in groups for p in group]
        most = self.limits.max_tokens
        calls: dict[Future[Any], LiveEpisode] = {self.environments.begin_reset(p.episode): p for p in everyone}
        try:
            opening = engine.generate([
                replace(r, sampling=sampling_up_to(r, most),
                        continues=tuple(p.continued for p in group) if self.limits.last is None else ())
                for r, group in zip(requests, groups, strict=True) if not r.begun])
            new = [p for p in everyone if p.replay_of is None]
            first = {p: action for p in everyone if (action := p.next_replayed)}
            first |= dict(zip(new, (c for answers in opening for c in answers), strict=True))
            while calls:
                live = []
                for playing, observation in self._arrived(calls):
                    if action := first.pop(playing, None):
                        if playing.begin(observation):
                            self._act(playing, action, calls)
                    elif self._goes_on(playing, observation) and playing.matches_replay():
                        if action := playing.next_replayed:
                            self._act(playing, action, calls)
                        else:
                            live.append(playing)
                    else:
                        playing.matches_replay()
                        playing.continued.cache = None
                actions = engine.generate([p.request(most) for p in live]) if live else []
                for playing, (action,) in zip(live, actions, strict=True):
                    self._act(playing, action, calls)
        finally:
            for call in calls:
                call.cancel()
            self.environments.close_episodes([p.episode for p in everyone])
        return [[p.completion() for p in group] for group in groups]

    def _act(self, playing: LiveEpisode, action: Completion, calls: dict[Future[Any], LiveEpisode]) -> None:
        playing.act(action)
        if playing.error is None:
            words = EnvironmentAction(action.text, playing.turns[-1].opened)
            calls[self.environments.begin_step(playing.episode, words)] = playing

    def _arrived(self, calls: dict[Future[Any], LiveEpisode]) -> list[tuple[LiveEpisode, Any]]:
        with self.clock("waiting"):
            done = wait(calls, return_when=ALL_COMPLETED if self.fixed else FIRST_COMPLETED).done
        arrived = [(calls.pop(call), call.result()) for call in [*calls] if call in done]
        spent = sum(playing.episode.seconds for playing, _ in arrived)
        self.clock.seconds["environment"] = self.clock.seconds.get("environment", 0.0) + spent
        return arrived

    def _goes_on(self, playing: LiveEpisode, step: Step | EnvironmentFailure) -> bool:
        if isinstance(step, EnvironmentFailure):
            playing.fail(step.reason)
            return False
        try:
            step, shown = self._shown(step, playing.episode.sample.id)
        except DataError as error:
            playing.fail(f"its observation: {error}")
            return False
        playing.answered(step)
        closing = [] if playing.written[-1] == self.encode.end else [self.encode.end]
        ended = "stop" if step.done else self._limit(playing, len(closing) + len(shown), len(shown.media))
        playing.observe(step.observation.text, shown, closing, ended)
        return not ended

    def _shown(self, step: Step, name: str) -> tuple[Step, Prompt]:
        """Returns a step and its encoded observation. A tool result that cannot be encoded becomes an error message.
        `name` names the sample in errors."""
        try:
            return step, self.encode.observation(step.observation, name)
        except DataError:
            if not step.observation.results:
                raise
        step = with_readable_results(step, lambda result: self.encode.observation(result, name))
        return step, self.encode.observation(step.observation, name)

    def _limit(self, playing: LiveEpisode, tokens: int, media: int) -> str:
        limits = self.limits
        most = limits.max_turns if playing.base_request.max_turns is None else playing.base_request.max_turns
        if sum(turn.role == "assistant" for turn in playing.turns) >= most:
            return "turns"
        if len(playing.observed_media) + media > limits.max_media:
            return "media"
        return "tokens" if len(playing.written) + tokens >= limits.max_tokens else ""


class _Recorded:
    """An engine that does not sample, but returns the actions of recorded episodes. episodes: the episodes of each
    group, by the key of the group's request."""

    def __init__(self, episodes: Mapping[tuple[int, ...], Sequence[Completion]]):
        self.episodes = episodes

    def sync(self, policy: Any, step: int) -> None:
        pass

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        return [[action_of(c, 0) for c in self.episodes[r.key]] if r.key in self.episodes
                else [action_of(self.episodes[r.key[1:-2]][r.key[-2]], r.key[-1])] for r in requests]

    def close(self) -> None:
        pass


def _unchanged(again: Completion, recorded: Completion) -> Completion:
    if not recorded.begun:
        return recorded
    if again.error is None and not np.array_equal(again.tokens, recorded.tokens):
        return replace(again, error="its environment answered the same actions differently than before the run stopped")
    return again
