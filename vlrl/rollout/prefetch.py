"""Encodes prompts ahead: threads read and process the media of the next samples while the step computes.

    with Prefetcher(encode, task, workers=2) as prefetch:
        prefetch.begin({draw: partial(sample_of, draw) for draw in draws})
        ...                                                             # the step computes
        sample, prompt = prefetch.take(draw, partial(sample_of, draw))  # or raises the error of its encoding

Threads suffice, because decoders, image processors and tokenizers release the GIL, and nothing has to be copied between
processes. The task's own code (samples, templates, messages) only runs in the caller's thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Hashable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from vlrl.models.processing import Encoder
from vlrl.task import Task, task_messages, tool_schemas
from vlrl.types import Prompt, Sample


class Prefetcher:
    """Encodes samples of a task in `workers` threads. With 0 workers, `take` encodes each sample in the caller's
    thread, with the same result. Errors are raised by `take`, never earlier."""

    def __init__(self, encode: Encoder, task: Task, workers: int):
        self.encode, self.task, self.workers = encode, task, workers
        self._begun: dict[Hashable, tuple[Sample, Future[Prompt]]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def begin(self, wanted: Mapping[Any, Callable[[], Sample]]) -> None:
        """Starts encoding samples in order, skipping keys begun before. wanted: {key: function that makes a sample}."""
        for key, sample_of in wanted.items() if self.workers else ():
            if key not in self._begun:
                self._begin(key, sample_of)

    def take(self, key: Hashable, sample_of: Callable[[], Sample]) -> tuple[Sample, Prompt]:
        """Returns (sample, prompt). Waits for them if their encoding was begun under `key`; otherwise makes the sample
        with `sample_of` and encodes it now. Raises the error of making the sample or the prompt."""
        if key not in self._begun:
            sample = sample_of()
            return sample, self.encode(self.task, sample)
        sample, prompt = self._begun.pop(key)
        return sample, prompt.result()

    def keep(self, keys: Collection[Hashable]) -> None:
        """Drops all samples whose encoding was begun, except the samples begun under `keys`."""
        for key in [k for k in self._begun if k not in keys]:
            self._begun.pop(key)[1].cancel()

    def close(self) -> None:
        """Drops all samples, and waits until the threads have stopped."""
        self.keep(())
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, key: Hashable, sample_of: Callable[[], Sample]) -> None:
        try:
            sample = sample_of()
            shown = task_messages(self.task, sample), tool_schemas(self.task, sample)
        except Exception:  # raised again by `take`
            return
        self._pool = self._pool or self._started()
        self._begun[key] = sample, self._pool.submit(_encode, sample, *shown)

    def _started(self) -> ThreadPoolExecutor:
        """A thread pool in which every thread has its own encoder, because a tokenizer is not thread-safe."""
        encoders: queue.SimpleQueue[Encoder] = queue.SimpleQueue()
        for _ in range(self.workers):
            encoders.put(self.encode.copy())
        torch.get_num_threads()  # fixes the number for this thread, before the workers change it for later ones
        return ThreadPoolExecutor(self.workers, "prefetch", _settle, (encoders,))


_own = threading.local()


def _settle(encoders: queue.SimpleQueue[Encoder]) -> None:
    torch.set_num_threads(1)  # for this thread: the step needs the others
    _own.encode = encoders.get()


def _encode(sample: Sample, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Prompt:
    return _own.encode.prompt(sample, messages, tools)
