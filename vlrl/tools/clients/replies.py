"""Stores the replies of a paid server. Each reply is written to disk when it arrives, so that no reply is requested or
paid for twice.

    replies = Replies.open(Path("answers.drawn.jsonl"), facts)       # with the replies of earlier processes
    failed = replies.fill(endpoint, [(7, 0), (7, 1)], requests, progress, "asking the teacher")"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vlrl.engine.base import Request
from vlrl.progress import Progress
from vlrl.services.chat import ChatReply
from vlrl.store.files import append_line, read_json
from vlrl.tools.clients.endpoint import Endpoint
from vlrl.tools.evaluation.rows import resume_lines

Place = tuple[int, int]  # (number of the row, index of the reply to this row)
_TOGETHER = 256
_MILLION = 1e6


def has_failed_requests(about: Path) -> bool:
    """Whether `about`, the record of an earlier command, says that some of its requests failed. If so, the command may
    be repeated to send these requests again."""
    return bool((read_json(about) or {}).get("unanswered"))


@dataclass(eq=False)
class Replies:
    """The replies received so far, in memory and in the file `path`. A reply is found by its place, the pair (number of
    the row, index of the reply to this row)."""

    path: Path
    replies: dict[Place, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: Path, facts: Mapping[str, Any]) -> Replies:
        """Opens a file of replies and reads the stored ones; a missing file is created. Raises ConfigError if the file
        was written with other `facts` (model, settings and data)."""
        stored = cls(path)
        for line in resume_lines(path, facts, "answers of a teacher", "file"):
            with contextlib.suppress(KeyError, TypeError):
                stored.replies.setdefault((line["number"], line["answer"]), line)  # each was paid for once
        return stored

    def add(self, number: int, answer: int, reply: ChatReply) -> None:
        """Stores a reply to row `number`; `answer` is the index of the reply among the replies to this row. May be
        called from any thread."""
        line = {"number": number, "answer": answer, "text": reply.text, "finish_reason": reply.finish_reason,
                "tokens_in": reply.tokens_in, "tokens_out": reply.tokens_out, "tries": reply.tries}
        with self._lock:
            append_line(self.path, json.dumps(line))
            self.replies[number, answer] = line

    def reply(self, place: Place) -> ChatReply | None:
        """The stored reply at a place (row, index of the reply); None if there is none yet."""
        line = self.replies.get(place)
        if line is None:
            return None
        return ChatReply(line["text"], line["finish_reason"], line["tokens_in"], line["tokens_out"])

    def fill(self, server: Endpoint, wanted: Sequence[Place],
             requests: Callable[[Sequence[Place]], Sequence[Request]], progress: Progress, what: str) -> int:
        """Requests and stores the replies at the places `wanted`, except for replies that are already stored. A place
        is (number of the row, index of the reply to this row). Returns the number of failed requests.

        `requests(places)` returns the requests for a list of places; it may leave out places. The last two numbers in
        the key of a request must be the place of its reply. `what` is the text shown with the progress."""
        missing = [place for place in wanted if place not in self.replies]
        total, failed, before = len(wanted), 0, len(self.replies) - (len(wanted) - len(missing))
        progress(what, total - len(missing), total)

        def keep(request: Request, index: int, reply: ChatReply) -> None:
            *_, number, answer = request.key
            self.add(number, answer, reply)
            progress(what, len(self.replies) - before, total)

        server.keep = keep
        for start in range(0, len(missing), _TOGETHER):
            completions = server.generate(requests(missing[start:start + _TOGETHER]))
            failed += sum(c.error is not None for (c,) in completions)
        progress(what, total, total)
        return failed

    def cost(self, price_in: float | None = None, price_out: float | None = None) -> dict[str, Any]:
        """A dictionary with the numbers of replies, retries and tokens. If prices per million input and output tokens
        are given, it also has the total `price`."""
        lines = self.replies.values()
        tokens = {name: sum(line[name] for line in lines) for name in ("tokens_in", "tokens_out")}
        untold = sum(not (line["tokens_in"] and line["tokens_out"]) for line in lines)
        out: dict[str, Any] = {"replies": len(lines), "retries": sum(line["tries"] - 1 for line in lines), **tokens,
                               **({"replies_without_tokens": untold} if untold else {})}
        if price_in is not None or price_out is not None:
            priced = tokens["tokens_in"] * (price_in or 0.0) + tokens["tokens_out"] * (price_out or 0.0)
            out["price"] = priced / _MILLION
        return out
