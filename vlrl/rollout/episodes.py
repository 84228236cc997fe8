"""Episodes: the model acts, its environment answers with text and images, turn by turn.

    engine = EpisodeEngine(engine, encode, environments, config, clock)     # answers requests whose sample was opened

An episode is one list of ids that only grows: prompt, action as sampled, observation as the chat template writes it,
action ... Nothing that was written is tokenised again, and nothing sampled is rendered. All live episodes of a call act
in turn, in fixed order: what is decoded side by side never depends on the clock. Action t of rollout i of a group draws
from the stream (seed, key of the group, i, t); all episodes of a group begin at the same reset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.engine.base import Done, Engine
from vlrl.errors import ConfigError, DataError
from vlrl.models.packing import joined
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import Clock
from vlrl.task import Task
from vlrl.task.environment import has_environment
from vlrl.task.environment_host import Environments, Episode, Failed
from vlrl.task.variants import has_variants
from vlrl.types import Completion, LoadedMedia, Media, Observation, Prompt, Request, Sample, Step, Turn


class EpisodeEngine:
    """An Engine that has environments answer, over one that draws single actions."""

    def __init__(self, engine: Engine, encode: Encoder, environments: Environments, config: Config, clock: Clock):
        self.engine, self.encode, self.environments, self.clock = engine, encode.copy(), environments, clock
        self.limits, self.seed = config.episode, config.seed

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
        made = dict(zip(single, self.engine.generate([requests[i] for i in single]), strict=True)) if single else {}
        made |= dict(zip(acting, self._episodes([requests[i] for i in acting]), strict=True))
        return [made[i] for i in range(len(requests))]

    def _episodes(self, requests: Sequence[Request]) -> list[list[Completion]]:
        groups = [[_Playing(r, i, self.environments.open(*_start(r)), r.prompt) for i in range(r.n)] for r in requests]
        everyone = [p for group in groups for p in group]
        try:
            with self.clock("environment"):
                shown = self.environments.reset([p.episode for p in everyone])
            for playing, found in zip(everyone, shown, strict=True):
                playing.begin(found)
            most = self.limits.max_tokens
            first = self.engine.generate([replace(r, sampling=_at_most(r, most)) for r in requests])
            live = self._acted(everyone, [c for made in first for c in made])
            while live:
                made = self.engine.generate([p.request(most) for p in live])
                live = self._acted(live, [c for (c,) in made])
        finally:
            self.environments.close_episodes([p.episode for p in everyone])
        return [[p.completion(self.encode.end) for p in group] for group in groups]

    def _acted(self, playing: Sequence[_Playing], actions: Sequence[Completion]) -> list[_Playing]:
        """Has environments answer actions; returns the episodes that go on."""
        for one, action in zip(playing, actions, strict=True):
            one.act(action)
        able = [p for p in playing if p.error is None]
        with self.clock("environment"):
            steps = self.environments.step([p.episode for p in able], [p.turns[-1].text for p in able])
        return [p for p, step in zip(able, steps, strict=True) if self._goes_on(p, step)]

    def _goes_on(self, playing: _Playing, step: Step | Failed) -> bool:
        """Adds the environment's answer to an episode; returns whether the model acts again."""
        if isinstance(step, Failed):
            playing.fail(step.reason)
            return False
        try:
            shown = self.encode.observation(step.observation, playing.episode.sample.id)
        except DataError as error:
            playing.fail(f"its observation: {error}")
            return False
        playing.answered(step)
        closing = [] if playing.written[-1] == self.encode.end else [self.encode.end]
        ended = "stop" if step.done else self._limit(playing, len(closing) + len(shown), len(shown.media))
        playing.observe(step.observation.text, shown, closing, ended)
        return not ended

    def _limit(self, playing: _Playing, tokens: int, media: int) -> str:
        """Returns the limit that ends an episode before so much more; "" = none."""
        limits = self.limits
        if sum(turn.role == "assistant" for turn in playing.turns) >= limits.max_turns:
            return "turns"
        if len(playing.seen) + media > limits.max_media:
            return "media"
        return "tokens" if len(playing.written) + tokens >= limits.max_tokens else ""


@dataclass(eq=False)
class _Playing:
    """One episode while it is played."""

    asked: Request
    index: int
    episode: Episode
    whole: Prompt
    """The prompt, and all that followed it."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    shown: list[Prompt] = field(default_factory=list)
    """The observations that the model saw."""
    seen: list[LoadedMedia] = field(default_factory=list)
    """Media of all observations, the last one included."""
    ended: str = ""
    error: str | None = None

    @property
    def written(self) -> np.ndarray:
        """[T] all tokens after the prompt."""
        return self.whole.ids[len(self.asked.prompt):]

    def begin(self, found: Observation | Failed | None) -> None:
        """Checks that it begins where its prompt says."""
        opening = self.episode.sample.opening
        if isinstance(found, Failed):
            self.error = found.reason
        elif opening is None or found is None or not _same(found, opening):
            self.error = f"reset({self.episode.seed}) showed something else than before: it must be the same for a seed"

    def request(self, most: int) -> Request:
        """Returns what is asked of the engine for its next action."""
        turn = sum(t.role == "assistant" for t in self.turns)
        key = (7, *self.asked.key, self.index, turn)
        sampling = _at_most(self.asked, most - len(self.written))
        return replace(self.asked, prompt=self.whole, n=1, key=key, sampling=sampling)

    def act(self, action: Completion) -> None:
        start = len(self.written)
        self._append(self.whole.followed_by(action.tokens), action.logprobs, action.loss_mask)
        self.turns.append(Turn(start=start, end=len(self.written), text=action.text, error=self.error))

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
        self.seen += shown.media
        self.turns.append(Turn(start=start, end=len(self.written), role="observation", text=text,
                               media=tuple(m.sha256 for m in shown.media)))

    def completion(self, end: int) -> Completion:
        texts = (t.text + "".join(f"\n<{m.kind}>" for m in self.seen if m.sha256 in t.media) for t in self.turns)
        length = next(t for t in reversed(self.turns) if t.role == "assistant")
        cut = not self.ended and self.whole.ids[len(self.asked.prompt) + length.end - 1] != end
        reason: Any = self.ended or ("length" if cut else "stop")
        return Completion(
            tokens=self.written, logprobs=np.concatenate(self.logprobs), loss_mask=np.concatenate(self.sampled),
            text="\n\n".join(texts), finish_reason=reason, turns=tuple(self.turns), error=self.error,
            episode_id="-".join(map(str, (*self.asked.key, self.index))), shown=self._tail(), seen=tuple(self.seen))

    def _append(self, whole: Prompt, logprobs: np.ndarray, sampled: np.ndarray) -> None:
        self.whole = whole
        self.logprobs.append(logprobs)
        self.sampled.append(sampled)

    def _tail(self) -> Prompt | None:
        """Returns the tokens after the prompt as the model sees them."""
        if not self.shown:
            return None
        media, p = self.shown[0], len(self.asked.prompt)
        for more in self.shown[1:]:
            media = joined(media, more)
        return replace(media, ids=self.whole.ids[p:], raw_ids=self.whole.ids[p:], positions=self.whole.positions[:, p:],
                       aligned={name: values[p:] for name, values in self.whole.aligned.items()})


def _start(request: Request) -> tuple[Any, int]:
    sample = request.sample
    assert sample is not None and sample.environment_seed is not None
    return sample, sample.environment_seed


def _at_most(request: Request, tokens: int) -> Any:
    return replace(request.sampling, max_new_tokens=max(1, min(request.sampling.max_new_tokens, tokens)))


def _same(found: Observation, opening: Observation) -> bool:
    return found.text == opening.text and [*map(_pixels, found.media)] == [*map(_pixels, opening.media)]


def _pixels(media: Media) -> Any:
    source = media.source
    frames = source if isinstance(source, (list, tuple)) else [source]
    return media.kind, [(f.size, f.tobytes()) if hasattr(f, "tobytes") else str(f) for f in frames]


def opened(engine: Engine, task: Task, sample: Sample, *key: int) -> Sample:
    """Returns the sample with what its environment shows at a reset whose seed is made of `key`; as it is where its
    task has no environment. Raises DataError when the reset fails.
    """
    if not isinstance(engine, EpisodeEngine) or not has_environment(task.of(sample)):
        return sample
    seed = int(np.random.SeedSequence([engine.seed, 8, *key]).generate_state(1)[0])
    return engine.environments.opened(sample, seed)


def check(config: Config, task: Task, requires: frozenset[str], generates: bool) -> None:
    """Raises ConfigError where a task has environments and the settings cannot go with episodes."""
    if not has_environment(task) or not generates:
        return
    refused = {
        f"engine.name={config.engine.name}": config.engine.name != "hf",
        f"async.max_staleness={config.asynchronous.max_staleness}": config.asynchronous.max_staleness > 0,
        f"rollout.step_tokens={config.rollout.step_tokens}": config.rollout.step_tokens is not None,
        f"rollout.forget.lr={config.rollout.forget.lr:g}": config.rollout.forget.lr > 0,
        f"algo.advantage={config.algo.advantage.name}": "greedy" in requires,
        f"train.sharding={config.train.sharding}": config.train.sharding != "none",
    }
    problem = next((setting for setting, wrong in refused.items() if wrong), None)
    if problem is None and has_variants(task):
        raise ConfigError(f"task '{task.name}' has both variants and an environment: an episode has no variants")
    if problem:
        raise ConfigError(f"{problem}: task '{task.name}' has an environment, and episodes cannot go with it. Leave it "
                          "out (docs/write-an-environment.md lists what episodes go with)")
