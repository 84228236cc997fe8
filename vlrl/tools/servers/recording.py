"""Records the episodes of a user's own agent loop from the chat completions that it requests.

    recorder = Recorder(engine, encode, config, task, folder)       # folder: of a run, made by RunFolder.create
    recorder.chat("maze-1", {"messages": [...]})                     # the reply in OpenAI's format
    recorder.reward("maze-1", {"reward": 1.0, "parts": {}})          # closes the episode; its row is in rollouts/

The messages of an episode's first call are its prompt. Each later call repeats all messages so far, with the recorded
completions as the assistant's messages, and adds one user message. Earlier completions keep their token ids; they are
not tokenized again."""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vlrl.config.schema import Config
from vlrl.data.media import MediaAccess
from vlrl.engine.base import Engine, Request, Sampling
from vlrl.errors import DataError
from vlrl.models.packing import continuation, join_prompts
from vlrl.models.processing import Encoder
from vlrl.store import RunFolder
from vlrl.task import Task
from vlrl.tools.servers.chat_messages import (
    Message,
    RequestError,
    chat_reply,
    contradiction,
    read,
    read_sampling,
    same,
)
from vlrl.types import Completion, Group, LoadedMedia, Observation, Prompt, Rollout, Sample, Turn

_ALLOWED: dict[str, tuple[Any, ...]] = {"n": (1, None), "stream": (False, None), "top_p": (1, None),
                                        "logprobs": (False, None)}
"""Request field -> values that are accepted because they have no effect."""
_MOST_REWARD_PARTS = 100
_log = logging.getLogger(__name__)

Ended = Literal["", "turns", "tokens", "media"]


@dataclass(eq=False)
class RecordedEpisode:
    """The token ids and messages of an episode so far."""

    id: str
    number: int
    sample: Sample
    prompt: Prompt
    messages: list[Message]
    context: Prompt  # token ids and media of the prompt and of everything after it, as one Prompt
    logprobs: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    shown: list[Prompt] = field(default_factory=list)
    ended: Ended = ""
    reply: dict[str, Any] = field(default_factory=dict)
    used: float = 0.0  # time of the last call (time.monotonic())
    outcome: Mapping[str, Any] | None = None
    """Reward, parts and error of a closed episode; None while the episode is open."""

    @property
    def written(self) -> np.ndarray:
        """[T] token ids after the prompt: completions and later messages."""
        return self.context.ids[len(self.prompt):]

    @property
    def observed_media(self) -> tuple[LoadedMedia, ...]:
        return tuple(m for one in self.shown for m in one.media)

    def append(self, context: Prompt, logprobs: np.ndarray, sampled: np.ndarray) -> None:
        self.context = context
        self.logprobs.append(logprobs)
        self.sampled.append(sampled)

    def act(self, action: Completion) -> None:
        start, opened = len(self.written), self.context.opened
        self.append(self.context.followed_by(action.tokens), action.logprobs, action.loss_mask)
        self.turns.append(Turn(start=start, end=len(self.written), text=action.text, opened=opened))
        self.messages.append(Message("assistant", (("text", action.text),)))

    def observe(self, message: Message, shown: Prompt, closing: Sequence[int]) -> None:
        """Appends a user message; `shown` is the message as token ids and media. If the last completion was truncated,
        its missing end token (`closing`) is appended first."""
        n, c = len(shown), len(closing)
        start = len(self.written) + c
        context = self.context.followed_by(np.array(closing, np.int64))
        self.append(join_prompts(context, shown), np.zeros(n + c, np.float32), np.zeros(n + c, bool))
        self.turns.append(Turn(start=start, end=start + n, role="observation", text=message.text,
                               media=tuple(m.sha256 for m in shown.media)))
        self.shown.append(shown)
        self.messages.append(message)

    def completion(self, end: int) -> Completion:
        """The episode as the Completion that training would have sampled. `end` is the id of the end token."""
        last = self.written[-1:]
        shown = continuation(self.context, self.prompt, self.shown) if self.shown else None
        empty: list[np.ndarray] = [np.zeros(0, np.float32)]
        return Completion(
            tokens=self.written, logprobs=np.concatenate(self.logprobs or empty),
            loss_mask=np.concatenate(self.sampled or empty).astype(bool),
            text="\n\n".join(t.text + "\n<image>" * len(t.media) for t in self.turns), turns=tuple(self.turns),
            finish_reason=self.ended or ("stop" if last.tolist() == [end] else "length"), episode_id=self.id,
            shown=shown, observed_media=self.observed_media, error=(self.outcome or {}).get("error"))


class Recorder:
    """Generates replies to chat completion requests, each of which belongs to an episode. Stores an episode when it is
    closed.

    most_open: largest number of open episodes. idle_s: seconds without a call after which an episode is closed without
    a reward. Methods may be called from any thread; calls are processed one at a time."""

    def __init__(self, engine: Engine, encode: Encoder, config: Config, task: Task, folder: RunFolder,
                 most_open: int = 256, idle_s: float = 600.0):
        self.engine, self.encode, self.config, self.task, self.folder = engine, encode, config, task, folder
        self.most_open, self.idle_s = most_open, idle_s
        self._access = MediaAccess.of(config.data)
        self._open: dict[str, RecordedEpisode] = {}
        self._closed: OrderedDict[str, dict[str, Any]] = OrderedDict()
        """Name of an episode -> its report (see `get`), for the last `most_open` episodes that were closed."""
        numbers = (int(file.stem.rpartition("-")[2]) for file, *_ in folder.rollout_files("rollouts"))
        self._next = max(numbers, default=-1) + 1
        self._known = {row for row in folder.rollouts(columns=["episode_id"])["episode_id"].to_pylist() if row}
        self._lock = threading.Lock()

    # --- calls --------------------------------------------------------------------------------------------------------

    def chat(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Generates the reply to a chat completion request of the episode `name`. If RequestError is raised, the
        episode is unchanged."""
        sampling = self._sampling(body)
        messages = read(body.get("messages"), self._access, Path(self.config.run.dir))
        with self._lock:
            self._refuse_closed(name)
            episode = self._open.get(name)
            if episode and same(messages, episode.messages[:-1]):
                episode.used = time.monotonic()
                return episode.reply  # a retry of the client
            try:
                current = self._begun(name, messages) if episode is None else self._continued(episode, messages)
            except DataError as error:
                raise RequestError(400, str(error)) from None
            room = self.config.episode.max_tokens - len(current.written)
            sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
            turn = sum(t.role == "assistant" for t in current.turns)
            request = Request(prompt=current.context, n=1, sampling=sampling, turns=tuple(current.turns),
                              key=(9, zlib.crc32(name.encode()), turn))
            ((action,),) = self.engine.generate([request])
            before = len(current.context)
            current.act(action)
            current.reply = chat_reply(f"{name}-{turn}", self.config.model.name, action, before, episode_id=name)
            current.used = time.monotonic()
            self._open[name] = current
            return current.reply

    def reward(self, name: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Closes and stores the episode `name` with the reward in `body`, which is {"reward": number or null, "parts":
        {name: number}}. Returns the episode's report (see `get`)."""
        if unknown := sorted(body.keys() - {"reward", "parts"}):
            raise RequestError(400, f"unknown fields {', '.join(unknown)}: send only reward and parts")
        parts = body.get("parts") or {}
        if "reward" not in body or not isinstance(parts, dict) or len(parts) > _MOST_REWARD_PARTS:
            raise RequestError(400, 'the reward is missing or its parts are not valid: send {"reward": number or null, '
                          f'"parts": {{name: number}}}} with at most {_MOST_REWARD_PARTS} parts')
        for what, value in [("reward", body["reward"]), *((f"parts[{n!r}]", v) for n, v in parts.items())]:
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not number and not (what == "reward" and value is None):
                raise RequestError(400, f"{what} is {str(value)[:60]!r}, which is not a finite number")
        with self._lock:
            self._refuse_closed(name)
            episode = self._open_episode(name)
            return self._close(episode, {"reward": body["reward"], "parts": parts, "error": None})

    def get(self, name: str) -> dict[str, Any]:
        """The report of the episode `name`: outcome, token ids, log-probabilities, loss mask and turns. The episode
        must be open, or among the last episodes that were closed."""
        with self._lock:
            return self._closed.get(name) or self._report(self._open_episode(name))

    def expire(self) -> None:
        """Closes the episodes that had no call for `idle_s` seconds. Does nothing while a call is being processed."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            for episode in [*self._open.values()]:
                if time.monotonic() - episode.used > self.idle_s:
                    self._fail(episode, f"no call for {self.idle_s:g} s")
        finally:
            self._lock.release()

    def close(self) -> None:
        """Closes all open episodes without a reward."""
        with self._lock:
            for episode in [*self._open.values()]:
                self._fail(episode, "the server was stopped before the episode got its reward")

    # --- episodes -----------------------------------------------------------------------------------------------------

    def _begun(self, name: str, messages: list[Message]) -> RecordedEpisode:
        if len(self._open) >= self.most_open:
            raise RequestError(429,
                               f"{self.most_open} episodes are open, and no more are allowed. Close some of them (POST "
                               "/v1/episodes/{id}/reward), or start the server with a larger --most-open")
        sample = Sample(id=name, media=tuple(m for one in messages for m in one.media))
        prompt = self.encode.prompt(sample, [{"role": m.role, "content": m.content} for m in messages])
        number, self._next = self._next, self._next + 1
        return RecordedEpisode(id=name, number=number, sample=sample, prompt=prompt, messages=messages, context=prompt)

    def _continued(self, episode: RecordedEpisode, messages: list[Message]) -> RecordedEpisode:
        """A copy of the episode, continued with the last of these messages. Raises RequestError if the other messages
        differ from the recorded ones, or if the episode has reached a limit."""
        recorded = episode.messages
        for i, (given, own) in enumerate(zip(messages, recorded, strict=False)):
            if place := contradiction(given, own):
                raise RequestError(409, f"messages[{i}]{place} differs from the recorded episode {episode.id!r}. "
                                   "Repeat its recorded messages unchanged, or use a new id for another conversation")
        if len(messages) != len(recorded) + 1:
            raise RequestError(409,
                               f"episode {episode.id!r} has {len(recorded)} messages, and this call has {len(messages)}"
                               ". Repeat all messages of the episode, including the assistant's last, and add one user "
                               "message")
        if episode.ended:
            raise RequestError(400, f"episode {episode.id!r} ended at the limit episode.max_{episode.ended}. Send the "
                                "reward of the episode")
        last, at = messages[-1], len(recorded)
        kinds = [kind for kind, _ in last.parts]
        if last.role != "user":
            raise RequestError(400,
                               f"messages[{at}] has the role {last.role!r}. After a completion, send a user "
                               "message, also for the results of tools")
        if kinds != sorted(kinds):
            raise RequestError(400, f"messages[{at}] has an image after a text. Put the images of this message first")
        shown = self.encode.observation(Observation(last.text, last.media), episode.id)
        closing = [] if episode.written[-1] == self.encode.end else [self.encode.end]
        if ended := self._limit(episode, len(closing) + len(shown), len(shown.media)):
            episode.ended = ended
            raise RequestError(400, f"episode {episode.id!r} ends here, at the limit episode.max_{ended}="
                          f"{getattr(self.config.episode, f'max_{ended}')}. Send the reward of the episode")
        copied = replace(episode, messages=[*recorded], logprobs=[*episode.logprobs], sampled=[*episode.sampled],
                         turns=[*episode.turns], shown=[*episode.shown])
        copied.observe(last, shown, closing)
        return copied

    def _limit(self, episode: RecordedEpisode, tokens: int, media: int) -> Ended:
        limits = self.config.episode
        if sum(t.role == "assistant" for t in episode.turns) >= limits.max_turns:
            return "turns"
        if len(episode.observed_media) + media > limits.max_media:
            return "media"
        return "tokens" if len(episode.written) + tokens >= limits.max_tokens else ""

    def _open_episode(self, name: str) -> RecordedEpisode:
        episode = self._open.get(name)
        if episode is None:
            where = f"; its row is in {self.folder.path}" if name in self._known else ""
            raise RequestError(404, f"there is no open episode {name!r}{where}")
        return episode

    def _refuse_closed(self, name: str) -> None:
        if name in self._known:
            raise RequestError(409, f"episode {name!r} is closed: use another id")

    def _fail(self, episode: RecordedEpisode, error: str) -> None:
        _log.warning("episode %r: %s; it is stored without a reward", episode.id, error)
        self._close(episode, {"reward": None, "parts": {}, "error": error})

    def _close(self, episode: RecordedEpisode, outcome: Mapping[str, Any]) -> dict[str, Any]:
        episode.outcome = outcome
        rollout = Rollout(group_id=f"{episode.number:08d}", index=0, completion=episode.completion(self.encode.end),
                          policy_step=0, parts=outcome["parts"], reward=outcome["reward"], error=outcome["error"])
        group = Group(id=rollout.group_id, task=self.task.name, split="train", sample=episode.sample,
                      prompt=episode.prompt, rollouts=(rollout,))
        self.folder.write_rollouts(0, episode.number, [group])
        self._known.add(episode.id)
        del self._open[episode.id]
        report = self._closed[episode.id] = self._report(episode)
        while len(self._closed) > self.most_open:
            self._closed.popitem(last=False)
        return report

    # --- requests and reports -----------------------------------------------------------------------------------

    def _sampling(self, body: Mapping[str, Any]) -> Sampling:
        rollout, temperature = self.config.rollout, body.get("temperature")
        if temperature not in (None, rollout.temperature):
            raise RequestError(400, f"temperature={temperature!r}: completions are sampled at rollout.temperature="
                               f"{rollout.temperature:g}, as in training. Leave temperature out, or change the setting")
        fields = {name: value for name, value in body.items() if name != "temperature"}
        return read_sampling(fields, rollout, rollout.temperature, _ALLOWED)

    def _report(self, episode: RecordedEpisode) -> dict[str, Any]:
        done = episode.completion(self.encode.end)
        return {"id": episode.id, "closed": episode.outcome is not None, **(episode.outcome or {}),
                "finish_reason": done.finish_reason, "prompt_ids": episode.prompt.ids.tolist(),
                "token_ids": done.tokens.tolist(), "logprobs": done.logprobs.tolist(),
                "loss_mask": done.loss_mask.tolist(),
                "media": [m.sha256 for m in (*episode.prompt.media, *done.observed_media)],
                "turns": [{"role": t.role, "start": t.start, "end": t.end, "text": t.text, "media": list(t.media)}
                          for t in done.turns]}
