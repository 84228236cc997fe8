"""Detects that memory has run out, and halves the micro-batch that did not fit.

An optimizer step trains on the same tokens however they are cut into micro-batches. So a micro-batch that does not fit
is halved and the run continues. If a backward pass fails, its partial gradients cannot be separated from those of
earlier micro-batches. Then the gradients are cleared and the optimizer step restarts."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from vlrl.errors import TrainingError
from vlrl.models.packing import Piece
from vlrl.models.policy import Policy

_log = logging.getLogger(__name__)


def short_of_memory(error: BaseException) -> bool:
    """Whether an error means that the GPU or the main memory is full."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and should_reduce_batch_size(error)


def release(device: torch.device) -> None:
    """Frees the memory of a failed pass. Call it outside the `except` block, which keeps the pass's tensors alive."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def each_batch(policy: Policy, batches: Sequence[Any], work: Callable[[int], None], halve: Callable[[int], int],
               restart: Callable[[], None] | None = None) -> int:
    """Calls `work(b)` for the index b of every micro-batch. Returns how many micro-batches were halved for lack of
    memory.

    `halve(b)` replaces micro-batch b in `batches` by its two halves. It returns the number of tokens of the larger
    half, which becomes policy.most_tokens. Then the loop continues with the first half or, if `restart` is given, calls
    `restart()` and begins again. Raises what `work` raises, and TrainingError for sharded ranks, which cannot restart
    alone."""
    b = cuts = 0
    while b < len(batches):
        reason = _run_or_reason(work, b)
        if reason is None:
            b += 1
            continue
        release(policy.device)
        if policy.idle is not None:
            raise TrainingError(f"out of memory in the update ({reason}). The processes hold shards of the weights and "
                                "run their micro-batches together, so no process can restart alone: lower "
                                "train.tokens_per_batch, or set model.gradient_checkpointing=true if it is off.")
        policy.most_tokens, cuts = halve(b), cuts + 1
        _log.warning("out of memory in the update (%s): from now on micro-batches have at most %d tokens", reason,
                     policy.most_tokens)
        if restart:
            restart()
            b = 0
    return cuts


def _run_or_reason(work: Callable[[int], None], b: int) -> str | None:
    try:
        work(b)
    except (RuntimeError, MemoryError) as error:
        if not short_of_memory(error):
            raise
        return str(error).strip().partition("\n")[0][:300] or type(error).__name__
    return None


def halves(pieces: Sequence[Piece]) -> list[list[Piece]]:
    """Splits the pieces of a micro-batch in two, in order. A single piece is split by completions; both halves get the
    prompt. Raises TrainingError for a single completion, and for the turns of a single episode."""
    if len(pieces) > 1:
        middle = len(pieces) // 2
        return [list(pieces[:middle]), list(pieces[middle:])]
    (piece,) = pieces
    units = piece.members
    middle = len(units) // 2
    if not middle:
        raise TrainingError(f"out of memory in the update on a single completion ({piece.tokens} tokens with its "
                            "prompt). Lower model.max_pixels or rollout.max_new_tokens, or set "
                            "model.gradient_checkpointing=true if it is off.")
    return [[piece.take([*itertools.chain(*part)])] for part in (units[:middle], units[middle:])]
