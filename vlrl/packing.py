"""Groups of answers -> Batches of model inputs.

Two layouts of the same tokens, equal in every log-probability and gradient:

- **shared**: one row holds [prompt | answer 1 | ... | answer G | next prompt | ...]. Every answer attends to its prompt
  and to itself, and its positions restart at the prompt's end, so the prompt and its images are computed once per
  group. The attention (attention.py) is exact and no T x T mask exists.
- **padded**: one right-padded row per answer with its own copy of the prompt; the oracle.

Both read the hidden states [B, C, H] at `columns`; `select` picks those of the N answer tokens in rollout order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from vlrl.attention import Layout, Span
from vlrl.types import Prompt


@dataclass(frozen=True, eq=False)
class Piece:
    """One prompt with some or all of its answers. A large group may be cut into several pieces."""

    prompt: Prompt
    answers: tuple[np.ndarray, ...]
    """Token ids [T] of each answer."""
    rollouts: tuple[int, ...]
    """Number of each answer's rollout within the optimizer step."""

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.answers))


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch of model inputs and the answer tokens to read from it. N answer tokens."""

    inputs: dict[str, Any]
    """Keywords of the model's forward."""
    columns: torch.Tensor
    """[C] sequence positions whose hidden states are read."""
    select: torch.Tensor | None
    """[N] index into the flattened [B * C] positions; None when they are the N tokens."""
    targets: torch.Tensor
    """[N] the answer tokens."""
    rollout_id: torch.Tensor
    """[N] number of the rollout within the optimizer step."""
    tokens: int
    """Tokens computed by the language model, padding included."""

    def to(self, device: torch.device) -> Batch:
        return to_device(self, device)


def pieces_of(prompts: Sequence[Prompt], answers: Sequence[np.ndarray], limit: int) -> list[Piece]:
    """Answers with their prompts, consecutive answers of one prompt together, cut so that a piece has at most
    `limit` tokens where that is possible (a piece holds at least one answer). An empty answer is left out."""
    out: list[Piece] = []
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if len(answer) == 0:
            continue
        last = out[-1] if out else None
        if last and last.prompt is prompt and last.tokens + len(answer) <= limit:
            out[-1] = Piece(prompt, (*last.answers, answer), (*last.rollouts, i))
        else:
            out.append(Piece(prompt, (answer,), (i,)))
    return out


def pack(pieces: Sequence[Piece], limit: int, layout: str = "shared") -> list[Batch]:
    """Micro-batches of at most `limit` tokens each (a single larger piece gets one of its own).

    Pieces are placed largest first into the first micro-batch with room, so few are needed and their order does not
    depend on the data's.
    """
    if layout == "padded":
        return [_padded(rows) for rows in _padded_rows(pieces, limit)]
    return [_shared([pieces[i] for i in sorted(members)]) for members in _bins(pieces, limit)]


def sizes(pieces: Sequence[Piece], limit: int, layout: str = "shared") -> list[int]:
    """Tokens of each micro-batch that `pack` would make, padding included, without making it."""
    if layout == "padded":
        return [len(rows) * max(len(p) + len(a) for p, a, _ in rows) for rows in _padded_rows(pieces, limit)]
    return [sum(pieces[i].tokens for i in members) for members in _bins(pieces, limit)]


def _bins(pieces: Sequence[Piece], limit: int) -> list[list[int]]:
    """Numbers of the pieces in each shared micro-batch."""
    order = sorted(range(len(pieces)), key=lambda i: -pieces[i].tokens)
    bins: list[tuple[int, list[int]]] = []
    for i in order:
        size = pieces[i].tokens
        place = next((b for b, (used, _) in enumerate(bins) if used + size <= limit), None)
        if place is None:
            bins.append((size, [i]))
        else:
            bins[place] = (bins[place][0] + size, [*bins[place][1], i])
    return [members for _, members in bins]


# --- shared ----------------------------------------------------------------------------------------------------------


def _shared(pieces: Sequence[Piece]) -> Batch:
    ids, positions, columns, targets, owners = [], [], [], [], []
    spans: list[Span] = []
    offset = 0
    for piece in pieces:
        p, start = len(piece.prompt), piece.prompt.next_position
        ids += [piece.prompt.ids, *piece.answers]
        positions.append(piece.prompt.positions)
        at, places = offset + p, []
        for rollout, answer in zip(piece.rollouts, piece.answers, strict=True):
            n = len(answer)
            positions.append(np.broadcast_to(np.arange(start, start + n), (len(piece.prompt.positions), n)))
            # token t is predicted at t - 1; the first one at the prompt's last token
            columns += [np.array([offset + p - 1]), np.arange(at, at + n - 1)]
            targets.append(answer)
            owners.append(np.full(n, rollout))
            places.append((at, n))
            at += n
        spans.append((offset, p, places))
        offset = at
    keep = torch.from_numpy(np.concatenate(columns))
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate(ids))[None],
        "position_ids": _position_ids(np.concatenate(positions, axis=1)[:, None]),
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),  # 4-D: used as given, no mask is built
        "prefix_layout": Layout(spans, offset),
        **media_inputs([piece.prompt for piece in pieces]),
    }
    return Batch(inputs=inputs, columns=keep, select=None,
                 targets=torch.from_numpy(np.concatenate(targets)),
                 rollout_id=torch.from_numpy(np.concatenate(owners)), tokens=offset)


# --- padded ----------------------------------------------------------------------------------------------------------

_Row = tuple[Prompt, np.ndarray, int]


def _padded_rows(pieces: Sequence[Piece], limit: int) -> list[list[_Row]]:
    rows = [(p.prompt, a, r) for p in pieces for a, r in zip(p.answers, p.rollouts, strict=True)]
    batches: list[list[_Row]] = []
    longest = 0
    for row in rows:
        size = len(row[0]) + len(row[1])
        longest = max(longest, size)
        if batches and longest * (len(batches[-1]) + 1) <= limit:
            batches[-1].append(row)
        else:
            batches.append([row])
            longest = size
    return batches


def _padded(rows: Sequence[_Row]) -> Batch:
    lengths = [len(p) + len(a) for p, a, _ in rows]
    width, first = max(lengths), min(len(p) for p, _, _ in rows) - 1
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.ones((len(rows[0][0].positions), len(rows), width), dtype=np.int64)
    select = []
    for b, (prompt, answer, _) in enumerate(rows):
        p, n = len(prompt), len(answer)
        ids[b, :p], ids[b, p:p + n] = prompt.ids, answer
        mask[b, :p + n] = 1
        positions[:, b, :p] = prompt.positions
        positions[:, b, p:p + n] = np.arange(prompt.next_position, prompt.next_position + n)
        select.append(b * (width - 1 - first) + np.arange(p - 1 - first, p - 1 - first + n))
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask),
              "position_ids": _position_ids(positions), **aligned_inputs([p for p, _, _ in rows], width),
              **media_inputs([p for p, _, _ in rows])}
    return Batch(inputs=inputs, columns=torch.arange(first, width - 1), select=torch.from_numpy(np.concatenate(select)),
                 targets=torch.from_numpy(np.concatenate([a for _, a, _ in rows])),
                 rollout_id=torch.from_numpy(np.concatenate([np.full(len(a), r) for _, a, r in rows])),
                 tokens=width * len(rows))


def aligned_inputs(prompts: Sequence[Prompt], width: int, right: bool = False) -> dict[str, torch.Tensor]:
    """[B, width] tensors that go beside the ids. A prompt begins at the left or ends at the right; the rest has the
    value that tokens of an answer have."""
    out: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for p in prompts for name in p.aligned):
        rows = np.zeros((len(prompts), width), dtype=np.int64)
        for row, prompt in zip(rows, prompts, strict=True):
            row[:] = prompt.aligned_answer.get(name, 0)
            if name in prompt.aligned:
                start = width - len(prompt) if right else 0
                row[start:start + len(prompt)] = prompt.aligned[name]
        out[name] = torch.from_numpy(rows)
    return out


def _position_ids(positions: np.ndarray) -> torch.Tensor:
    """[R, B, T] as the model takes it: [3, B, T] with M-RoPE, else [B, T]."""
    return torch.from_numpy(positions if len(positions) > 1 else positions[0])


def media_inputs(prompts: Sequence[Prompt]) -> dict[str, torch.Tensor | tuple[torch.Tensor, ...]]:
    """The prompts' media tensors, concatenated by name in order; images of fewer tiles are filled up with zeros.

    Processors fill up the tiles of a batch in the same way. Clips that differ in their frames stay a tuple, which
    Family.encode takes care of.
    """
    names = dict.fromkeys(name for p in prompts for name in p.mm)
    return {name: _joined(name, [p.mm[name] for p in prompts if name in p.mm]) for name in names}


def _joined(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
    sides = [max(side) for side in zip(*(t.shape[1:] for t in tensors), strict=True)]
    if all(list(t.shape[1:]) == sides for t in tensors):
        return torch.cat(list(tensors))
    if name == "pixel_values_videos":
        return tuple(tensors)
    out = tensors[0].new_zeros(sum(len(t) for t in tensors), *sides)
    for rows, tensor in zip(out.split([len(t) for t in tensors]), tensors, strict=True):
        rows[(slice(None), *(slice(side) for side in tensor.shape[1:]))] = tensor
    return out


def to_device(value: Any, device: torch.device) -> Any:
    """Tensors in tuples, dictionaries and dataclasses, on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(to_device(v, device) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: to_device(getattr(value, f.name), device) for f in fields(value)})
    return value
