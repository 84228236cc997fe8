"""An engine that plays a script, so that data, scoring and the loop are tested without weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from vlrl.engine.base import Done, Request
from vlrl.types import Completion, Prompt, Turn


class ScriptedEngine:
    """Answers with `script(prompt, index) -> text`; tokens are the text's UTF-8 bytes, log-probabilities are zero."""

    def __init__(self, script: Callable[[Prompt, int], str]):
        self.script, self.step = script, 0

    def sync(self, policy: Any, step: int) -> None:
        self.step = step

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        out = []
        for number, r in enumerate(requests):
            written = [(b.index, b.written.turns) for b in r.begun] or [(i, ()) for i in range(r.n)]
            out.append([self._completion(self.script(r.prompt, i), r.sampling.max_new_tokens, turns)
                        for i, turns in written])
            if done and number < len(requests) - 1:
                done(number, out[-1])
        return out

    def close(self) -> None:
        pass

    @staticmethod
    def _completion(text: str, most: int, turns: tuple[Turn, ...]) -> Completion:
        tokens = np.frombuffer(text.encode()[:most], dtype=np.uint8).astype(np.int64)
        return Completion(tokens=tokens, logprobs=np.zeros(len(tokens), np.float32),
                          loss_mask=np.ones(len(tokens), bool), text=text,
                          finish_reason="length" if len(text.encode()) > most else "stop",
                          turns=(*turns, Turn(start=turns[-1].end if turns else 0, end=len(tokens))))
