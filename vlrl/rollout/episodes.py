"""Episodes: the model acts, its environment answers with text and images, turn by turn.

    engine = EpisodeEngine(engine, encode, environments, config, clock)     # answers requests whose sample was opened

An episode is one list of ids that only grows: prompt, action as sampled, observation as the chat template writes it,
action ... Nothing that was written is tokenised again, and nothing sampled is rendered. With
environment.order=fixed all live episodes of a call act in turn: what is decoded side by side never depends on the
clock. With arrival those go on whose environments have answered. Action t of rollout i of a group draws from the stream
(seed, key of the group, i, t); all episodes of a group begin at the same reset.

An episode may go on from the first turns of another one (`Request.begun`): its environment is reset to the same seed
and answers the same actions again, and must show the same.

With `episode.history=last:k` the list still grows, and turn t >= k is asked under a window of it: the prompt, an end
token that closes the empty turn of the model behind it, and the last k observations with the actions between them.
"""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.curriculum import horizon
from vlrl.distributed import comm
from vlrl.engine.base import Continued, Done, Engine, Request
from vlrl.errors import ConfigError, DataError
from vlrl.models.packing import behind, joined
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import Clock
from vlrl.rewards.text import told
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.environment_checks import same
from vlrl.task.environment_host import Environments, Episode, Failed
from vlrl.task.tools import readable
from vlrl.types import Completion, LoadedMedia, Observation, Prompt, Sample, Step, Turn

_log = logging.getLogger(__name__)


_ACTION = 7
"""Begins the keys of all actions after the first."""


class EpisodeEngine:
    """An Engine that has environments answer, over one that draws single actions."""

    def __init__(self, engine: Engine, encode: Encoder, environments: Environments, config: Config, clock: Clock):
        self.engine, self.encode, self.environments, self.clock = engine, encode.copy(), environments, clock
        self.limits, self.seed = config.episode, config.seed
        if self.encode.strips_thinking and comm.is_main():
            _log.warning("the chat template of %s leaves out earlier thinking when another turn follows; episodes keep "
                         "all that was written, in training and evaluation alike", config.model.name)
        order = config.environment.order
        self.fixed = order == "fixed" or (order == "auto" and config.engine.name == "hf")

    def over(self, engine: Engine) -> EpisodeEngine:
        """Returns the same over another engine; its environments stay those of this one, which closes them."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def sync(self, policy: Any, step: int) -> None:
        self.engine.sync(policy, step)

    def close(self) -> None:
        self.environments.close()
        self.engine.close()

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns `request.n` completions for each request: whole episodes where its sample has an environment."""
        acting = [i for i, r in enumerate(requests) if r.sample is not None and r.sample.opening is not None]
        if not acting:
            return self.engine.generate(requests, done)
        single = [i for i in range(len(requests)) if i not in {*acting}]
        completions = dict(zip(single, self.engine.generate([requests[i] for i in single]),
                               strict=True)) if single else {}
        completions |= {i: [_never_begun(requests[i], place, error) for place, _ in _places(requests[i])]
                        for i in acting if (error := _lost(requests[i]))}
        playing = [i for i in acting if i not in completions]
        completions |= dict(zip(playing, self._episodes([requests[i] for i in playing], self.engine),
                                strict=True)) if playing else {}
        return [completions[i] for i in range(len(requests))]

    def replayed(self, requests: Sequence[Request], recorded: Sequence[list[Completion]]) -> list[list[Completion]]:
        """Returns recorded completions; episodes, of which the actions suffice, after their environments have answered
        again. One that went otherwise has an error.
        """
        acting = [i for i, r in enumerate(requests)
                  if r.sample is not None and r.sample.opening is not None and not _lost(r)]
        engine = _Recorded({requests[i].key: recorded[i] for i in acting})
        again = dict(zip(acting, self._episodes([requests[i] for i in acting], engine), strict=True))
        return [[*map(_unchanged, again[i], own)] if i in again else own for i, own in enumerate(recorded)]

    def abandon(self) -> None:
        """Ends what another thread generates."""
        getattr(self.engine, "abandon", lambda: None)()

    def _episodes(self, requests: Sequence[Request], engine: Engine) -> list[list[Completion]]:
        groups = [[_Playing(r, i, self.environments.open(*_start(r)), r.prompt, self.limits.last, self.encode.end,
                            again) for i, again in _places(r)] for r in requests]
        everyone = [p for group in groups for p in group]
        most = self.limits.max_tokens
        calls: dict[Future[Any], _Playing] = {self.environments.begin_reset(p.episode): p for p in everyone}
        try:
            opening = engine.generate([
                replace(r, sampling=_at_most(r, most),
                        continues=tuple(p.continued for p in group) if self.limits.last is None else ())
                for r, group in zip(requests, groups, strict=True) if not r.begun])
            new = [p for p in everyone if p.again is None]
            first = {p: action for p in everyone if (action := p.played)}
            first |= dict(zip(new, (c for answers in opening for c in answers), strict=True))
            while calls:
                live = []
                for playing, observation in self._arrived(calls):
                    if action := first.pop(playing, None):
                        if playing.begin(observation):
                            self._act(playing, action, calls)
                    elif self._goes_on(playing, observation) and playing.goes_as_before():
                        if action := playing.played:
                            self._act(playing, action, calls)
                        else:
                            live.append(playing)
                    else:
                        playing.goes_as_before()
                        playing.continued.cache = None
                actions = engine.generate([p.request(most) for p in live]) if live else []
                for playing, (action,) in zip(live, actions, strict=True):
                    self._act(playing, action, calls)
        finally:
            for call in calls:
                call.cancel()
            self.environments.close_episodes([p.episode for p in everyone])
        return [[p.completion() for p in group] for group in groups]

    def _act(self, playing: _Playing, action: Completion, calls: dict[Future[Any], _Playing]) -> None:
        """Adds an action, and has its environment answer it."""
        playing.act(action)
        if playing.error is None:
            words = told(action.text, playing.turns[-1].opened)
            calls[self.environments.begin_step(playing.episode, words)] = playing

    def _arrived(self, calls: dict[Future[Any], _Playing]) -> list[tuple[_Playing, Any]]:
        """Waits for environments; returns the episodes whose calls are done, which leave `calls`, and the results."""
        with self.clock("waiting"):
            done = wait(calls, return_when=ALL_COMPLETED if self.fixed else FIRST_COMPLETED).done
        arrived = [(calls.pop(call), call.result()) for call in [*calls] if call in done]
        spent = sum(playing.episode.seconds for playing, _ in arrived)
        self.clock.seconds["environment"] = self.clock.seconds.get("environment", 0.0) + spent
        return arrived

    def _goes_on(self, playing: _Playing, step: Step | Failed) -> bool:
        """Adds the environment's answer to an episode; returns whether the model acts again."""
        if isinstance(step, Failed):
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
        """Returns a step and its observation as the model sees it; an error in place of a tool's unreadable result."""
        try:
            return step, self.encode.observation(step.observation, name)
        except DataError:
            if not step.observation.results:
                raise
        step = readable(step, lambda result: self.encode.observation(result, name))
        return step, self.encode.observation(step.observation, name)

    def _limit(self, playing: _Playing, tokens: int, media: int) -> str:
        """Returns the limit that ends an episode before so much more; "" = none."""
        limits = self.limits
        most = limits.max_turns if playing.base_request.max_turns is None else playing.base_request.max_turns
        if sum(turn.role == "assistant" for turn in playing.turns) >= most:
            return "turns"
        if len(playing.observed_media) + media > limits.max_media:
            return "media"
        return "tokens" if len(playing.written) + tokens >= limits.max_tokens else ""


class _Recorded:
    """An engine that writes the actions of recorded episodes, by the keys of their requests."""

    def __init__(self, episodes: Mapping[tuple[int, ...], Sequence[Completion]]):
        self.episodes = episodes

    def sync(self, policy: Any, step: int) -> None:
        """There are no weights."""

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        return [[_action(c, 0) for c in self.episodes[r.key]] if r.key in self.episodes
                else [_action(self.episodes[r.key[1:-2]][r.key[-2]], r.key[-1])] for r in requests]

    def close(self) -> None:
        """Nothing is held."""


def _action(episode: Completion, turn: int) -> Completion:
    actions = [t for t in episode.turns if t.role == "assistant"]
    if not actions:  # it was never begun, and `_unchanged` leaves it so
        return episode
    at = actions[min(turn, len(actions) - 1)]  # one too many is found out by `_unchanged`
    own = slice(at.start, at.end)
    return Completion(tokens=episode.tokens[own], logprobs=episode.logprobs[own], loss_mask=episode.loss_mask[own],
                      text=at.text, finish_reason="stop")


def _unchanged(again: Completion, recorded: Completion) -> Completion:
    if not recorded.begun:
        return recorded
    if again.error is None and not np.array_equal(again.tokens, recorded.tokens):
        return replace(again, error="its environment answered the same actions otherwise than before the run stopped")
    return again


@dataclass(eq=False)
class _Playing:
    """One episode while it is played."""

    base_request: Request
    index: int
    episode: Episode
    whole: Prompt
    """The prompt, and all that followed it."""
    last: int | None
    """Observations in a window; None = the history is whole."""
    end: int
    """Id that ends a turn."""
    again: Completion | None = None
    """Its beginning, which another episode has played: these actions are taken again (Request.begun)."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    shown: list[Prompt] = field(default_factory=list)
    """The observations that the model saw."""
    observed_media: list[LoadedMedia] = field(default_factory=list)
    """Media of all observations, the last one included."""
    windows: list[Prompt] = field(default_factory=list)
    """Of each action what followed the prompt, where the history is cut."""
    ended: str = ""
    error: str | None = None
    continued: Continued = field(default_factory=Continued)

    @property
    def before(self) -> Prompt:
        """What the next action is asked under."""
        turn, last = len(self.shown), self.last
        if last is None or turn < last:
            return self.whole
        window, written = self.base_request.prompt.followed_by(np.array([self.end])), self.written
        ends = [slice(a.end, b.start) for a, b in itertools.pairwise(t for t in self.turns if t.role == "observation")]
        for place in range(turn - last, turn):
            window = joined(window, self.shown[place])
            if place < turn - 1:
                window = window.followed_by(written[ends[place]])
        return window

    @property
    def written(self) -> np.ndarray:
        """[T] all tokens after the prompt."""
        return self.whole.ids[len(self.base_request.prompt):]

    def begin(self, observation: Observation | Failed | None) -> bool:
        """Checks that it begins where its prompt says; returns whether it begins at all."""
        opening = self.episode.sample.opening
        if isinstance(observation, Failed):
            self.error, self.continued.cache = observation.reason, None
            return False
        if opening is None or observation is None or not same(observation, opening):
            self.error = f"reset({self.episode.seed}) showed something else than before: it must be the same for a seed"
        return True

    @property
    def played(self) -> Completion | None:
        """The next action of the beginning that it takes again; None where it goes on by itself."""
        turn = sum(t.role == "assistant" for t in self.turns)
        return _action(self.again, turn) if self.again is not None and turn < len(self.again.actions) else None

    def goes_as_before(self) -> bool:
        """Returns whether its environment has answered as it did before, as far as the beginning goes; else it has an
        error from now on."""
        if self.again is None or self.error:
            return not self.error
        known, written = self.again.tokens, self.written
        most = min(len(known), len(written))
        if not np.array_equal(known[:most], written[:most]) or (self.ended and len(written) < len(known)):
            way_out = self.base_request.way_out
            self.error = ("its environment answered the same actions otherwise than before, so no other episode can go "
                          f"on from its turns: it must be deterministic by its seed{way_out and f', or set {way_out}'}")
        return not self.error

    def request(self, most: int) -> Request:
        """Returns what is asked of the engine for its next action."""
        turn = sum(t.role == "assistant" for t in self.turns)
        key = (_ACTION, *self.base_request.key, self.index, turn)
        sampling = _at_most(self.base_request, most - len(self.written))
        whole = self.last is None
        return replace(self.base_request, prompt=self.before, n=1, key=key, sampling=sampling, begun=(),
                       continues=(self.continued,) if whole else (), turns=tuple(self.turns) if whole else ())

    def act(self, action: Completion) -> None:
        start, before = len(self.written), self.before
        self._append(self.whole.followed_by(action.tokens), action.logprobs, action.loss_mask)
        if self.last is not None:
            self.windows.append(behind(before.followed_by(action.tokens), self.base_request.prompt,
                                       self.shown[-self.last:]))
        self.turns.append(Turn(start=start, end=len(self.written), text=action.text, opened=before.opened,
                               error=self.error, prompt_ids=None if self.last is None else tuple(before.ids.tolist())))

    def answered(self, step: Step) -> None:
        """Notes on the action what the environment made of it."""
        self.turns[-1] = replace(self.turns[-1], parts=dict(step.parts), state=step.state, done=step.done,
                                 seconds=self.episode.seconds, info=dict(step.info))

    def fail(self, reason: str) -> None:
        self.error = reason
        self.turns[-1] = replace(self.turns[-1], error=reason, seconds=self.episode.seconds)

    def observe(self, text: str, shown: Prompt, closing: list[int], ended: str) -> None:
        """Adds an observation, which the model sees unless the episode has ended."""
        self.ended = ended
        if closing and not ended:  # an action that was cut: its turn is closed for it
            self._append(self.whole.followed_by(np.array(closing)), np.zeros(1, np.float32), np.zeros(1, bool))
        start = len(self.written)
        if not ended:
            n = len(shown)
            self._append(joined(self.whole, shown), np.zeros(n, np.float32), np.zeros(n, bool))
            self.shown.append(shown)
            self.continued.observed = shown
        self.observed_media += shown.media
        self.turns.append(Turn(start=start, end=len(self.written), role="observation", text=text,
                               media=tuple(m.sha256 for m in shown.media)))

    def completion(self) -> Completion:
        if not self.turns:
            assert self.error
            return _never_begun(self.base_request, self.index, self.error)
        texts = (t.text + "".join(f"\n<{m.kind}>" for m in self.observed_media if m.sha256 in t.media)
                 for t in self.turns)
        length = next(t for t in reversed(self.turns) if t.role == "assistant")
        cut = not self.ended and self.whole.ids[len(self.base_request.prompt) + length.end - 1] != self.end
        reason: Any = self.ended or ("length" if cut else "stop")
        return Completion(
            tokens=self.written, logprobs=np.concatenate(self.logprobs), loss_mask=np.concatenate(self.sampled),
            text="\n\n".join(texts), finish_reason=reason, turns=tuple(self.turns), error=self.error,
            episode_id=_episode_id(self.base_request, self.index),
            observed_media=tuple(self.observed_media),
            shown=behind(self.whole, self.base_request.prompt, self.shown) if self.shown and not self.windows else None,
            windows=tuple(self.windows))

    def _append(self, whole: Prompt, logprobs: np.ndarray, sampled: np.ndarray) -> None:
        self.whole = whole
        self.logprobs.append(logprobs)
        self.sampled.append(sampled)


def turn_of(request: Request) -> int:
    """Returns the number of the action that an EpisodeEngine asks for."""
    return request.key[-1] if request.key[0] == _ACTION else 0


def _places(request: Request) -> list[tuple[int, Completion | None]]:
    """Returns the place in its group of each episode, and the beginning that it takes again."""
    if request.begun:
        return [(b.index, b.written) for b in request.begun]
    return [(i, None) for i in range(request.n)]


def _lost(request: Request) -> str | None:
    """Returns why the environment of its sample could not be reset."""
    return request.sample.reset_error if request.sample is not None else None


def _never_begun(request: Request, index: int, error: str) -> Completion:
    """Returns an episode whose environment could not be reset."""
    return Completion(tokens=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32), loss_mask=np.zeros(0, bool),
                      text="", finish_reason="stop", episode_id=_episode_id(request, index), error=error)


def _episode_id(request: Request, index: int) -> str:
    return "-".join(map(str, (*request.key, index)))


def _start(request: Request) -> tuple[Any, int]:
    sample = request.sample
    assert sample is not None and sample.environment_seed is not None
    return sample, sample.environment_seed


def _at_most(request: Request, tokens: int) -> Any:
    return replace(request.sampling, max_new_tokens=max(1, min(request.sampling.max_new_tokens, tokens)))


def opened(engine: Engine, task: Task, sample: Sample, *key: int) -> Sample:
    """Returns the sample with what its environment shows at a reset whose seed is made of `key`, or why it cannot be
    reset; as it is where its task has no environment.
    """
    if not isinstance(engine, EpisodeEngine) or not has_environment(task.of(sample)):
        return sample
    seed = int(np.random.SeedSequence([engine.seed, 8, *key]).generate_state(1)[0])
    return engine.environments.opened(sample, seed)


def reopened(engine: Engine, sample: Sample) -> Sample:
    """Returns an opened sample whose media were changed with what its environment shows now, at the same seed."""
    if not isinstance(engine, EpisodeEngine) or sample.environment_seed is None:
        return sample
    as_it_was = replace(sample, opening=None, environment_seed=None, reset_error=None)
    return engine.environments.opened(as_it_was, sample.environment_seed)


def check(config: Config, task: Task) -> None:
    """Raises ConfigError where a task has environments and the settings cannot go with episodes."""
    horizon.check(config.episode, task)
    if not has_environment(task):
        return
    refused = {
        f"rollout.step_tokens={config.rollout.step_tokens}":
            "they cannot go on in a later step. Leave it out: episode.max_turns and episode.max_tokens limit them"
            if config.rollout.step_tokens is not None else "",
    }
    for setting, reason in refused.items():
        if reason:
            raise ConfigError(f"{setting}: task '{task.name}' has an environment or tools, and episodes cannot go with "
                              f"it: {reason} (docs/write-an-environment.md lists what episodes go with)")
