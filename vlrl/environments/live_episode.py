"""A running episode: its tokens, the shortened contexts (windows) in which actions are sampled, and its completion."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vlrl.engine.base import ACTION, CacheSlot, Request
from vlrl.environments.host import EnvironmentFailure, HostedEpisode
from vlrl.environments.validation import same
from vlrl.models.packing import continuation, join_prompts
from vlrl.types import Completion, LoadedMedia, Observation, Prompt, Step, Turn


@dataclass(eq=False)
class LiveEpisode:
    """The state of an episode that is being played: its tokens, observations and turns so far, and why it ended."""

    base_request: Request
    index: int
    episode: HostedEpisode
    whole: Prompt  # the prompt, followed by all tokens and media of the episode so far
    last: int | None  # how many of the last observations the model sees (`episode.history=last:k`); None = all
    end: int  # id of the token that ends a turn
    replay_of: Completion | None = None
    """Another episode whose actions are replayed first (Request.begun); None = start with a new action."""
    logprobs: list[np.ndarray] = field(default_factory=list)
    sampled: list[np.ndarray] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    shown: list[Prompt] = field(default_factory=list)  # the observations that were shown to the model so far
    observed_media: list[LoadedMedia] = field(default_factory=list)
    """The media of all observations, including a final one that is not shown to the model."""
    windows: list[Prompt] = field(default_factory=list)
    """The context in which each action was sampled, without the prompt, followed by the action. Empty if the history is
    not limited."""
    ended: str = ""
    error: str | None = None
    continued: CacheSlot = field(default_factory=CacheSlot)

    @property
    def before(self) -> Prompt:
        """The prompt for the next action: the whole episode so far, or a window of it."""
        turn, last = len(self.shown), self.last
        if last is None or turn < last:
            return self.whole
        window, written = self.base_request.prompt.followed_by(np.array([self.end])), self.written
        ends = [slice(a.end, b.start) for a, b in itertools.pairwise(t for t in self.turns if t.role == "observation")]
        for place in range(turn - last, turn):
            window = join_prompts(window, self.shown[place])
            if place < turn - 1:
                window = window.followed_by(written[ends[place]])
        return window

    @property
    def written(self) -> np.ndarray:
        """[T] token ids of the episode after the prompt."""
        return self.whole.ids[len(self.base_request.prompt):]

    def begin(self, observation: Observation | EnvironmentFailure | None) -> bool:
        """Checks `observation`, the result of the reset. Returns False if the reset failed, else True. A failed reset,
        or an observation that differs from the one in the prompt, becomes the error of the episode."""
        opening = self.episode.sample.opening
        if isinstance(observation, EnvironmentFailure):
            self.error, self.continued.cache = observation.reason, None
            return False
        if opening is None or observation is None or not same(observation, opening):
            self.error = (f"reset({self.episode.seed}) returned another observation than before: it must be the same "
                          "for the same seed")
        return True

    @property
    def next_replayed(self) -> Completion | None:
        """Returns the next action to replay; None if there is no action left to replay."""
        turn = sum(t.role == "assistant" for t in self.turns)
        known = self.replay_of
        return action_of(known, turn) if known is not None and turn < len(known.actions) else None

    def matches_replay(self) -> bool:
        """Checks that the environment has responded to the replayed actions in the same way as before. Returns False if
        the episode has an error, from this check or an earlier one."""
        if self.replay_of is None or self.error:
            return not self.error
        known, written = self.replay_of.tokens, self.written
        most = min(len(known), len(written))
        if not np.array_equal(known[:most], written[:most]) or (self.ended and len(written) < len(known)):
            way_out = self.base_request.way_out
            self.error = ("its environment answered the same actions differently than before, so no other episode can "
                          "continue from its turns: it must be deterministic given its seed"
                          f"{way_out and f', or set {way_out}'}")
        return not self.error

    def request(self, most: int) -> Request:
        """The request for the next action. `most`: token limit of the episode."""
        turn = sum(t.role == "assistant" for t in self.turns)
        key = (ACTION, *self.base_request.key, self.index, turn)
        sampling = sampling_up_to(self.base_request, most - len(self.written))
        whole = self.last is None
        return replace(self.base_request, prompt=self.before, n=1, key=key, sampling=sampling, begun=(),
                       continues=(self.continued,) if whole else (), turns=tuple(self.turns) if whole else ())

    def act(self, action: Completion) -> None:
        start, before = len(self.written), self.before
        self._append(self.whole.followed_by(action.tokens), action.logprobs, action.loss_mask)
        if self.last is not None:
            self.windows.append(continuation(before.followed_by(action.tokens), self.base_request.prompt,
                                       self.shown[-self.last:]))
        self.turns.append(Turn(start=start, end=len(self.written), text=action.text, opened=before.opened,
                               error=self.error, prompt_ids=None if self.last is None else tuple(before.ids.tolist())))

    def answered(self, step: Step) -> None:
        """Stores the environment's response `step` in the turn of the last action."""
        self.turns[-1] = replace(self.turns[-1], parts=dict(step.parts), state=step.state, done=step.done,
                                 seconds=self.episode.seconds, info=dict(step.info))

    def fail(self, reason: str) -> None:
        self.error = reason
        self.turns[-1] = replace(self.turns[-1], error=reason, seconds=self.episode.seconds)

    def observe(self, text: str, shown: Prompt, closing: list[int], ended: str) -> None:
        """Appends an observation with this text as a turn. The tokens of the observation (`shown`) are added only if
        the episode continues. closing: the tokens that end the action's turn if the action was truncated. ended: the
        reason why the episode has ended; "" if the episode continues."""
        self.ended = ended
        if closing and not ended:  # the action was truncated: close its turn
            self._append(self.whole.followed_by(np.array(closing)), np.zeros(1, np.float32), np.zeros(1, bool))
        start = len(self.written)
        if not ended:
            n = len(shown)
            self._append(join_prompts(self.whole, shown), np.zeros(n, np.float32), np.zeros(n, bool))
            self.shown.append(shown)
            self.continued.observed = shown
        self.observed_media += shown.media
        self.turns.append(Turn(start=start, end=len(self.written), role="observation", text=text,
                               media=tuple(m.sha256 for m in shown.media)))

    def completion(self) -> Completion:
        if not self.turns:
            assert self.error
            return never_begun(self.base_request, self.index, self.error)
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
            shown=(continuation(self.whole, self.base_request.prompt, self.shown)
                   if self.shown and not self.windows else None),
            windows=tuple(self.windows))

    def _append(self, whole: Prompt, logprobs: np.ndarray, sampled: np.ndarray) -> None:
        self.whole = whole
        self.logprobs.append(logprobs)
        self.sampled.append(sampled)




def action_of(episode: Completion, turn: int) -> Completion:
    actions = [t for t in episode.turns if t.role == "assistant"]
    if not actions:  # it never began, and `_unchanged` returns it as it is
        return episode
    at = actions[min(turn, len(actions) - 1)]  # `_unchanged` detects one too many
    own = slice(at.start, at.end)
    return Completion(tokens=episode.tokens[own], logprobs=episode.logprobs[own], loss_mask=episode.loss_mask[own],
                      text=at.text, finish_reason="stop")


def group_members(request: Request) -> list[tuple[int, Completion | None]]:
    """Returns (index in the group, recorded episode) for each episode of a request. The actions of the recorded episode
    are replayed first; it is None if there are no actions to replay."""
    if request.begun:
        return [(b.index, b.written) for b in request.begun]
    return [(i, None) for i in range(request.n)]


def never_begun(request: Request, index: int, error: str) -> Completion:
    """Returns the completion of an episode whose environment could not be reset: no tokens, and the `error` of the
    reset. `index`: index of the episode in the request."""
    return Completion(tokens=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32), loss_mask=np.zeros(0, bool),
                      text="", finish_reason="stop", episode_id=_episode_id(request, index), error=error)


def _episode_id(request: Request, index: int) -> str:
    return "-".join(map(str, (*request.key, index)))


def sampling_up_to(request: Request, tokens: int) -> Any:
    return replace(request.sampling, max_new_tokens=max(1, min(request.sampling.max_new_tokens, tokens)))
