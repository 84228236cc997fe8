"""Checks that engine and trainer agree on every turn of an episode, and describes token positions by turn and media.

    difference = first_difference(policy, encode, prompt, completion, 1e-5)      # None, or the first difference

First the trainer's inputs for an episode (Completion.tokens, loss_mask, shown) are compared with the episode's turns:
each observation is encoded again from its text and media. Then the trainer's log-probabilities of every action are
compared with the log-probabilities from the engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from vlrl.models.packing import join_prompts, pack, pieces_of
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.types import Completion, Observation, Prompt, Turn


@dataclass(frozen=True)
class EpisodeMismatch:
    """The first position of an episode where engine and trainer compute different log-probabilities, or where the
    trainer's inputs differ from the turns of the episode."""

    turn: int  # index of the turn in Completion.turns
    token: int  # index of the token in Completion.tokens
    where: str
    what: str
    gap: float = float("inf")
    """Absolute difference of the log-probabilities; infinite if the inputs differ."""

    def __str__(self) -> str:
        return f"{self.where}: {self.what}"


def describe_position(turns: Sequence[Turn], token: int) -> str:
    """Returns a text that names the turn that contains a token, the token's position in the turn, and the media of the
    turn. If the turn has no media, the text names the media of the latest earlier turn with media."""
    number = turn_of(turns, token)
    turn = turns[number]
    media = next((t.media for t in reversed(turns[:number + 1]) if t.media), ())
    named = f", {'media' if turn.media else 'after media'} {' '.join(m[:12] for m in media)}" if media else ""
    inside = f"token {token - turn.start} of {turn.end - turn.start}" if token < turn.end else "the end forced on it"
    return f"turn {number} ({turn.role}), {inside}{named}"


def turn_of(turns: Sequence[Turn], token: int) -> int:
    """The index of the turn that contains a token. A forced end token after an action belongs to the action."""
    return max((i for i, turn in enumerate(turns) if turn.start <= token), default=0)


def turn_gaps(policy: Policy, prompt: Prompt, completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """[T] absolute differences between trainer and engine in the log-probability of each token of an episode; 0 for
    tokens that were not sampled."""
    if completion.windows:  # each action under what it was sampled under
        ours = np.zeros(len(completion.tokens))
        for turn, window in zip(completion.actions, completion.windows, strict=True):
            ours[turn.start:turn.end] = _read(policy, prompt, window.ids, window, temperature)[turn.start - turn.end:]
    else:
        ours = _read(policy, prompt, completion.tokens, completion.shown, temperature)
    gaps = np.abs(ours - completion.logprobs)
    return np.where(completion.loss_mask, np.where(np.isfinite(gaps), gaps, np.inf), 0.0)


def _read(policy: Policy, prompt: Prompt, tokens: np.ndarray, shown: Prompt | None, temperature: float) -> np.ndarray:
    (batch,) = pack(pieces_of([prompt], [tokens], 10**9, [shown]), 10**9, policy.layout("shared"))
    with torch.no_grad(), policy.evaluating():
        return policy.logprobs(batch.to(policy.device), temperature).logprobs.double().cpu().numpy()


def first_difference(policy: Policy, encode: Encoder, prompt: Prompt, completion: Completion, allowed: float,
                     temperature: float = 1.0) -> EpisodeMismatch | None:
    """Returns the first position in an episode at which engine and trainer disagree.

    Returns None if all log-probabilities differ by at most `allowed` and all inputs are equal. Some things are not
    compared: the pixels of videos; for observations with the results of several tool calls, everything except images;
    for episodes with windows (episode.history), everything except ids, loss mask and log-probabilities."""
    for token, what in _structure(encode, prompt, completion):
        return EpisodeMismatch(turn_of(completion.turns, token), token, describe_position(completion.turns, token),
                               what)
    gaps = turn_gaps(policy, prompt, completion, temperature)
    if not (gaps > allowed).any():
        return None
    token = int(np.argmax(gaps > allowed))
    return EpisodeMismatch(turn_of(completion.turns, token), token, describe_position(completion.turns, token),
                           f"log-probabilities of engine and trainer differ by {gaps[token]:.2g}, more than "
                           f"{allowed:g}", float(gaps[token]))


def _structure(encode: Encoder, prompt: Prompt, completion: Completion) -> Iterator[tuple[int, str]]:
    """Compares the trainer's inputs (ids, loss mask, positions, media) with the turns of an episode, turn by turn.
    Yields (token index, description) per difference."""
    shown, tokens, whole, at = completion.shown, completion.tokens, prompt, 0
    loaded = {m.sha256: m for m in completion.observed_media}
    shown_media = iter(shown.media if shown else ())
    rows: dict[str, int] = {}
    calls = None
    for turn in completion.turns:
        before, whole, piece = whole, whole.followed_by(tokens[at:turn.end]), None
        if turn.role == "observation" and turn.start < turn.end:
            media = [loaded[name].as_media() for name in turn.media if name in loaded]
            observation = Observation(turn.text, media)
            piece = encode.observation(Observation.of_results([observation]) if calls else observation,
                                       prompt.sample_id)
            if not calls or len(calls) == 1:
                whole = join_prompts(before.followed_by(tokens[at:turn.start]), piece)
            elif shown is not None:
                whole = replace(whole, positions=np.concatenate([before.positions, shown.positions[:, at:turn.end]], 1))
        calls = turn.calls
        span, sampled = slice(at, turn.end), np.zeros(turn.end - at, bool)
        sampled[turn.start - at:] = turn.role == "assistant"
        expected = whole.ids[len(prompt) + at:]
        yield from _differing(tokens[span], expected, at, "the ids are not those of the turn's text and media")
        yield from _differing(completion.loss_mask[span] & ~sampled, np.zeros_like(sampled), at,
                              "the loss mask is set where nothing was sampled")
        if shown is not None:
            yield from _differing(shown.ids[span], expected, at, "the trainer reads other ids")
            for ours, theirs in zip(shown.positions[:, span], whole.positions[:, len(prompt) + at:], strict=True):
                yield from _differing(ours, theirs, at, "the positions are not the model's")
        if piece is not None and shown is not None:
            if [getattr(next(shown_media, None), "sha256", None) for _ in turn.media] != [*turn.media]:
                yield turn.start, "the trainer reads other media"
            yield from ((turn.start, f"{name} that the trainer reads is not that of the turn's media")
                        for name in _other_rows(piece, shown, rows))
        at = turn.end


def _differing(actual: np.ndarray, expected: np.ndarray, start: int, what: str) -> Iterator[tuple[int, str]]:
    n = min(len(actual), len(expected))
    places = np.flatnonzero(actual[:n] != expected[:n])
    if len(places) or len(actual) != len(expected):
        yield start + int(places[0] if len(places) else n), what


def _other_rows(piece: Prompt, shown: Prompt, rows: dict[str, int]) -> Iterator[str]:
    for name, tensor in piece.mm.items():
        stored, start = shown.mm.get(name), rows.get(name, 0)
        if not isinstance(tensor, torch.Tensor) or isinstance(stored, tuple):  # clips that differ in length
            continue
        rows[name] = start + len(tensor)
        own = None if stored is None else stored[start:rows[name]][(slice(None), *map(slice, tensor.shape[1:]))]
        if own is None or not torch.equal(own, tensor):
            yield name
