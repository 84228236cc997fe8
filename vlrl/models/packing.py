"""Packs groups of completions into micro-batches of model inputs (Batch).

There are two layouts of the same tokens. All log-probabilities and gradients are equal in both:

- **shared**: one row holds [prompt | completion 1 | ... | completion G | next prompt | ...]. Every completion attends
  to its prompt and to itself, and its positions start at the prompt's end. So the prompt and its images are computed
  once per group. Common prefixes of completions, including observations and images, are in the row once, which makes
  the row a tree (prefix_tree.py). The attention (attention.py) is exact and builds no T x T mask.
- **padded**: one right-padded row per completion, each with a copy of the prompt; the reference for tests.

In both layouts, the hidden states [B, C, H] at `columns` are read. `select` picks those of the N completion tokens in
rollout order."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from vlrl.models import cost as balance
from vlrl.models.attention import Layout, Run
from vlrl.models.cost import Cost
from vlrl.models.prefix_tree import Tree, slice_prompt, tree_of
from vlrl.types import Completion, InsertedObservation, Prompt


@dataclass(frozen=True, eq=False)
class Piece:
    """One prompt with some or all of its completions. A group that is too large is cut into several pieces. A piece
    without completions is computed, but its outputs are not used (`with_idle`)."""

    prompt: Prompt
    answers: tuple[np.ndarray, ...]  # token ids [T] of each completion
    rollouts: tuple[int, ...]  # for each completion, the index of its rollout in the optimizer step
    shown: tuple[Prompt | None, ...] = ()
    """For each completion, its tokens with their media (Completion.shown); () if no completion has observations."""
    units: tuple[int, ...] = ()
    """For each completion, the number of the unit to which it belongs, such as an episode. All completions of a unit
    stay in one piece. () = every completion is a unit of its own."""

    @functools.cached_property
    def tree(self) -> Tree:
        """The prefix tree of the completions, which places their tokens after the prompt in a shared row."""
        return tree_of(self.answers, self.shown)

    @property
    def tokens(self) -> int:
        """Number of tokens of the piece in a shared row, and for a single completion also in a padded row."""
        return len(self.prompt) + self.tree.tokens

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each node of the prefix tree. Without shared prefixes, each completion is a node."""
        return [node.stop - node.start for node in self.tree.nodes]

    @property
    def parts(self) -> list[Prompt]:
        """The segments of a shared row that may have media, in order: the prompt, and each node with observations."""
        pairs = [(self.shown[node.answer], node) for node in self.tree.nodes] if self.shown else []
        return [self.prompt, *(slice_prompt(one, node.start, node.stop) for one, node in pairs if one is not None)]

    def take(self, places: Sequence[int]) -> Piece:
        """A piece with only the completions at the indices `places`."""
        return Piece(self.prompt, tuple(self.answers[i] for i in places), tuple(self.rollouts[i] for i in places),
                     tuple(self.shown[i] for i in places) if self.shown else (),
                     tuple(self.units[i] for i in places) if self.units else ())

    @property
    def members(self) -> list[list[int]]:
        """The indices of the completions of each unit."""
        by_unit: dict[int, list[int]] = {}
        for place, unit in enumerate(self.units or range(len(self.answers))):
            by_unit.setdefault(unit, []).append(place)
        return [*by_unit.values()]

    def positions(self, place: int) -> np.ndarray:
        """[R, T] rotary positions of the completion at index `place`."""
        return _placed(self.prompt, len(self.answers[place]), self.shown[place] if self.shown else None)


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """Maps the N completion tokens to the U tokens that are computed. U is less than N if completions share prefixes,
    because a shared token is computed once."""

    targets: torch.Tensor  # [U] ids of the computed tokens
    index: torch.Tensor  # [N] for each completion token, the index of its computed token


@dataclass(frozen=True, eq=False)
class Batch:
    """The model inputs of one micro-batch, and the positions at which outputs for its N completion tokens are read."""

    inputs: dict[str, Any]  # keyword arguments for the model's forward
    columns: torch.Tensor  # [C] positions within the rows at which hidden states are read
    select: torch.Tensor | None
    """[N] indices of the completion tokens in the flattened [B * C] hidden states; None if all are used in order."""
    targets: torch.Tensor  # [N] ids of the completion tokens
    rollout_id: torch.Tensor  # [N] for each completion token, the index of its rollout in the optimizer step
    tokens: int  # number of tokens that the language model computes, padding included
    observed: bool = False
    """Whether the completion tokens include observations, which may contain ids that cannot be sampled."""
    shared: SharedTokens | None = None
    """For completions that share prefixes, the map to the U tokens that are computed. `columns` and `select` then refer
    to these U tokens instead of the N completion tokens. None if no tokens are shared."""

    def to(self, device: torch.device) -> Batch:
        return to_device(self, device)


def training_rows(done: Completion) -> list[tuple[slice, Completion]]:
    """The rows in which the completion `done` is trained, each as (slice of the completion's tokens, row). Without
    windows, the only row is the completion itself. Otherwise there is one row per window (the part of an episode
    that the model saw when it wrote an action), in which only the action is trained."""
    if not done.windows:
        return [(slice(0, len(done.tokens)), done)]
    actions = [slice(t.start, t.end) for t in done.turns if t.role == "assistant"]
    return [(place, _row(done, place, window)) for place, window in zip(actions, done.windows, strict=True)]


def _row(done: Completion, place: slice, window: Prompt) -> Completion:
    before = len(window) - (place.stop - place.start)
    return replace(done, tokens=window.ids, logprobs=np.pad(done.logprobs[place], (before, 0)),
                   loss_mask=np.pad(done.loss_mask[place], (before, 0)), shown=window, windows=(), turns=())


def pieces_of(prompts: Sequence[Prompt], answers: Sequence[np.ndarray], limit: int,
              shown: Sequence[Prompt | None] = (), units: Sequence[int] = ()) -> list[Piece]:
    """Cuts the completions `answers` of each prompt into pieces of consecutive completions and similar size. `prompts`
    has the prompt of each completion. A piece has at most `limit` tokens, unless a single unit has more. Empty
    completions are left out. For `shown` and `units` see Piece."""
    rollouts = [i for i, answer in enumerate(answers) if len(answer)]
    out: list[Piece] = []
    for _, run in itertools.groupby(rollouts, key=lambda i: id(prompts[i])):
        own = list(run)
        prompt = prompts[own[0]]
        observed = any(shown[i] is not None for i in own) if shown else False
        whole = Piece(prompt, tuple(answers[i] for i in own), tuple(own),
                      tuple(shown[i] for i in own) if observed else (), tuple(units[i] for i in own) if units else ())
        members = whole.members
        lengths = [sum(len(whole.answers[place]) for place in places) for places in members]
        if whole.tokens <= limit:
            out.append(whole)
            continue
        out += [whole.take(sorted(place for unit in part for place in members[unit]))
                for part in balance.bins(lengths, lengths, limit - len(prompt))]
    return out


def pack(pieces: Sequence[Piece], limit: int, layout: str = "shared", cost: Cost = balance.tokens) -> list[Batch]:
    """Packs the pieces into micro-batches of at most `limit` tokens and similar `cost`, in the layout "shared" or
    "padded". A larger piece gets its own micro-batch."""
    return [make_batch(part, layout) for part in plan(pieces, limit, layout, cost)]


def plan(pieces: Sequence[Piece], limit: int, layout: str = "shared", cost: Cost = balance.tokens) -> list[list[Piece]]:
    """Assigns the pieces to as few micro-batches as possible, of similar cost. Returns the pieces of each micro-batch.
    With padded rows a piece is one completion, and padding counts towards `limit`."""
    if layout == "padded":
        return _padded_rows(pieces, limit)
    costs = [cost(piece.prompt, piece.lengths) for piece in pieces]
    members = balance.bins([piece.tokens for piece in pieces], costs, limit)
    return [[pieces[i] for i in sorted(part)] for part in members]


def sizes(pieces: Sequence[Piece], limit: int, layout: str = "shared", cost: Cost = balance.tokens) -> list[int]:
    """The number of tokens, padding included, of each micro-batch that `pack` would return."""
    tokens = [[piece.tokens for piece in part] for part in plan(pieces, limit, layout, cost)]
    return [len(part) * max(part) if layout == "padded" else sum(part) for part in tokens]


def with_idle(parts: Sequence[Sequence[Piece]], count: int, idle: Prompt) -> list[list[Piece]]:
    """Adds idle micro-batches until there are `count` micro-batches. An idle micro-batch holds only the prompt `idle`,
    without completions. If `idle` has media, it is also added to micro-batches without media. `parts` are the pieces
    of each micro-batch.

    Sharded ranks (FSDP) gather and reduce together in every pass. So all ranks need the same number of micro-batches,
    and no rank may skip the vision tower while another rank uses it. Every weight gets a gradient of zero from the idle
    prompt, and no loss, count, metric or stored value changes."""
    filled = [*map(list, parts), *([] for _ in range(count - len(parts)))]
    return [part if part and (not idle.mm or any(one.mm for piece in part for one in piece.parts))
            else [*part, Piece(idle, (), ())]
            for part in filled]


def make_batch(part: Sequence[Piece], layout: str = "shared", attention: str = "auto") -> Batch:
    """Makes the Batch of one micro-batch from its pieces. `attention` names the implementation for shared rows
    (attention.IMPLEMENTATIONS)."""
    return _padded(part) if layout == "padded" else _shared(part, attention)


# --- shared ----------------------------------------------------------------------------------------------------------


def _shared(pieces: Sequence[Piece], attention: str) -> Batch:
    ids, positions, before, own = [], [], [], []
    runs: list[Run] = []
    offset = 0
    for piece in pieces:
        p, tree = len(piece.prompt), piece.tree
        behind = offset + p
        ids.append(piece.prompt.ids)
        positions.append(piece.prompt.positions)
        runs.append((offset, p, behind + tree.tokens))
        for node in tree.nodes:
            ids.append(piece.answers[node.answer][node.start:node.stop])
            positions.append(piece.positions(node.answer)[:, node.start:node.stop])
            runs.append((behind + node.place, node.stop - node.start, behind + node.end))
        for places in tree.positions:  # token t is predicted at t - 1; the first one at the prompt's last token
            before += [np.array([behind - 1]), behind + places[:-1]]
            own.append(behind + places)
        offset = behind + tree.tokens
    inputs = {
        "input_ids": torch.from_numpy(np.concatenate(ids))[None],
        "position_ids": _position_ids(np.concatenate(positions, axis=1)[:, None]),
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool),  # 4-D: used as given, no mask is built
        "prefix_layout": Layout(runs, offset, attention),
        **media_inputs([part for piece in pieces for part in piece.parts]),
    }
    answers, columns, shared = _answers(pieces), _joined_ids(before), None
    if any(piece.tree.shared for piece in pieces):
        first, index = np.unique(_joined_ids(own).numpy(), return_index=True, return_inverse=True)[1:]
        columns, shared = columns[first], SharedTokens(answers["targets"][first], torch.from_numpy(index))
    return Batch(inputs=inputs, columns=columns, select=None, **answers, tokens=offset, shared=shared)


# --- padded ----------------------------------------------------------------------------------------------------------

def _padded_rows(pieces: Sequence[Piece], limit: int) -> list[list[Piece]]:
    units = [[piece.take([place]) for place in places] for piece in pieces for places in piece.members]
    batches: list[list[Piece]] = []
    longest = 0
    for rows in units:
        own = max(row.tokens for row in rows)
        longest = max(longest, own)
        if batches and longest * (len(batches[-1]) + len(rows)) <= limit:
            batches[-1] += rows
        else:
            batches.append(rows)
            longest = own
    return batches


def _padded(rows: Sequence[Piece]) -> Batch:
    width, first = max(row.tokens for row in rows), min(len(row.prompt) for row in rows) - 1
    ids = np.zeros((len(rows), width), dtype=np.int64)
    mask = np.zeros((len(rows), width), dtype=np.int64)
    positions = np.ones((len(rows[0].prompt.positions), len(rows), width), dtype=np.int64)
    select = []
    for b, row in enumerate(rows):
        prompt, p, n = row.prompt, len(row.prompt), row.tokens - len(row.prompt)
        ids[b, :p + n] = np.concatenate([prompt.ids, *row.answers])
        mask[b, :p + n] = 1
        positions[:, b, :p] = prompt.positions
        if n:
            positions[:, b, p:p + n] = _placed(prompt, n, row.shown[0] if row.shown else None)
        select.append(b * (width - 1 - first) + np.arange(p - 1 - first, p - 1 - first + n))
    inputs = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask),
              "position_ids": _position_ids(positions), **aligned_inputs([row.parts for row in rows], width),
              **media_inputs([part for row in rows for part in row.parts])}
    return Batch(inputs=inputs, columns=torch.arange(first, width - 1), select=_joined_ids(select), **_answers(rows),
                 tokens=width * len(rows))


def aligned_inputs(lines: Sequence[Sequence[Prompt]], width: int, right: bool = False) -> dict[str, torch.Tensor]:
    """Returns {name: [B, width] tensor} of the prompts' `aligned` arrays, which have one value per token. `lines` has
    for each row the prompts that follow one another in the row. The prompts start at the left edge of the row or,
    with `right`, end at the right edge. All other entries get the value for completion tokens."""
    out: dict[str, torch.Tensor] = {}
    for name in dict.fromkeys(name for line in lines for p in line for name in p.aligned):
        rows = np.zeros((len(lines), width), dtype=np.int64)
        for row, line in zip(rows, lines, strict=True):
            row[:] = line[0].aligned_answer.get(name, 0)
            start = width - sum(map(len, line)) if right else 0
            for part in line:
                if name in part.aligned:
                    row[start:start + len(part)] = part.aligned[name]
                start += len(part)
        out[name] = torch.from_numpy(rows)
    return out


def _answers(pieces: Sequence[Piece]) -> dict[str, Any]:
    pairs = [pair for piece in pieces for pair in zip(piece.answers, piece.rollouts, strict=True)]
    return {"targets": _joined_ids([answer for answer, _ in pairs]),
            "observed": any(one is not None for piece in pieces for one in piece.shown),
            "rollout_id": _joined_ids([np.full(len(answer), rollout) for answer, rollout in pairs])}


def _joined_ids(arrays: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.int64), *arrays]))


def _placed(prompt: Prompt, n: int, shown: Prompt | None) -> np.ndarray:
    """[R, n] rotary positions of the n completion tokens after a prompt: the positions of `shown` if given (a
    completion with observations), else consecutive positions."""
    if shown is not None:
        return shown.positions
    start = prompt.next_position
    return np.broadcast_to(np.arange(start, start + n), (len(prompt.positions), n))


def _position_ids(positions: np.ndarray) -> torch.Tensor:
    """Converts positions [R, B, T] to the form of the model's input: [3, B, T] with M-RoPE, else [B, T]."""
    return torch.from_numpy(positions if len(positions) > 1 else positions[0])


def media_inputs(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The media tensors of all prompts, concatenated in order, by name. Images with fewer tiles are padded with zeros,
    as processors do. Videos with different numbers of frames stay a tuple, which Family.encode handles. With a
    feature cache the result holds the prompts' `visuals` instead; see Policy.inputs."""
    if visuals := tuple(v for p in prompts for v in p.visuals):
        return {"visuals": visuals}
    names = dict.fromkeys(name for p in prompts for name in p.mm)
    return {name: _concatenated(name, [t for p in prompts if name in p.mm for t in _each(p.mm[name])])
            for name in names}


def join_prompts(first: Prompt, more: Prompt) -> Prompt:
    """Appends the prompt `more`, whose positions start from 0, to the prompt `first`."""
    names = dict.fromkeys([*first.aligned, *more.aligned])
    beside = {name: np.concatenate([p.aligned.get(name, np.full(len(p), p.aligned_answer.get(name, 0)))
                                    for p in (first, more)]) for name in names}
    media = ("media", "processed_sizes", "visual_tokens", "visuals")
    return replace(first, text=first.text + more.text, opened=more.opened, ids=np.concatenate([first.ids, more.ids]),
                   raw_ids=np.concatenate([first.raw_ids, more.raw_ids]), aligned=beside,
                   positions=np.concatenate([first.positions, more.positions + first.next_position], axis=1),
                   mm=media_inputs([replace(p, visuals=()) for p in (first, more)]),
                   inserted=first.inserted + _inserted(more, len(first)),
                   **{name: getattr(first, name) + getattr(more, name) for name in media})


def continuation(whole: Prompt, prompt: Prompt, observations: Sequence[Prompt]) -> Prompt:
    """The part of the prompt `whole` that follows the prompt `prompt`, with which `whole` begins. observations: the
    observations in this part, in order, with their media."""
    p = len(prompt)
    media = functools.reduce(join_prompts, observations) if observations else replace(
        prompt, mm={}, media=(), processed_sizes=(), visual_tokens=(), visuals=())
    return replace(media, ids=whole.ids[p:], raw_ids=whole.ids[p:], positions=whole.positions[:, p:],
                   aligned={name: values[p:] for name, values in whole.aligned.items()},
                   inserted=tuple(replace(part, start=part.start - p, stop=part.stop - p) for part in whole.inserted
                                  if part.start >= p))


def _inserted(observation: Prompt, start: int) -> tuple[InsertedObservation, ...]:
    if not observation.mm:
        return ()
    rows = {name: len(tensor) for name, tensor in observation.mm.items() if isinstance(tensor, torch.Tensor)}
    stop = start + len(observation)
    return (InsertedObservation(start=start, stop=stop, rows=rows, visuals=len(observation.visuals)),)


def _each(tensor: torch.Tensor | tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tensor if isinstance(tensor, tuple) else (tensor,)


def _concatenated(name: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor | tuple[torch.Tensor, ...]:
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
    """Moves all tensors in nested tuples, dictionaries and dataclasses to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, dict):
        return {k: to_device(v, device) for k, v in value.items()}
    if isinstance(value, tuple):
        return tuple(to_device(v, device) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: to_device(getattr(value, f.name), device) for f in fields(value)})
    return value
