"""Reads the records of a run that `vlrl.app.diagnosis` needs: metrics, evaluations, alerts, and its last answers."""

import threading
from collections import OrderedDict
from typing import Any

import pyarrow.compute

from vlrl.store import comparable

from .diagnosis import Answer, Evidence
from .html import finite
from .library import Library

pc: Any = pyarrow.compute  # its functions are made when it is imported, where no type checker sees them
MOST_STEPS = 5
ENOUGH = 400
"""Once this many answers are read, no earlier step is read."""
MOST = 4_000
"""Largest number of answers used."""
_MOST_RUNS = 16
_COLUMNS = ["group_id", "reward", "parts", "loss_mask", "variant", "advantage"]


class Reader:
    """Reads the records that a diagnosis uses. Caches the answers of a run until its next step is done. Thread-safe."""

    def __init__(self, library: Library):
        self.library = library
        self._lock = threading.Lock()
        self._answers: OrderedDict[str, tuple[Any, tuple[Answer, ...]]] = OrderedDict()

    def of(self, run: str) -> Evidence:
        """Collects the Evidence on a run; damaged files are ignored. Raises AppError for an unknown run."""
        metrics = self.library.metrics(run)
        last = (len(metrics), metrics[-1]["step"] if metrics else None)
        with self._lock:
            known = self._answers.get(run)
            # rollouts are written in the background, later than the line of their step
            if known is None or known[0] != last or not any(answer.group[0] == last[1] for answer in known[1]):
                known = last, tuple(self._read(run, last[1]))
            self._answers[run] = known
            self._answers.move_to_end(run)
            while len(self._answers) > _MOST_RUNS:
                self._answers.popitem(last=False)
        return Evidence(run, metrics, comparable(self.library.evals(run)), self.library.alerts(run), known[1])

    def _read(self, run: str, last: int | None) -> list[Answer]:
        answers: list[Answer] = []
        for step in range(last, max(-1, last - MOST_STEPS), -1) if last is not None else ():
            try:
                table = self.library.folder(run).rollouts(step, columns=_COLUMNS)
                lengths = pc.fill_null(pc.list_value_length(table["loss_mask"]), 0).to_pylist()
                rows = table.drop_columns(["loss_mask"]).to_pylist()
            except Exception:  # pyarrow may raise anything on a hostile file; the list of rollouts says what is wrong
                continue
            answers += [answer for row, length in zip(rows, lengths, strict=True)
                        if (answer := _answer(step, row, length)) is not None]
            if len(answers) >= ENOUGH:
                break
        return answers[:MOST]


def _answer(step: int, row: dict[str, Any], length: int) -> Answer | None:
    reward = finite(row["reward"])
    if reward is None or (row["variant"] is not None and row["advantage"] is None):
        return None
    parts = {str(name): finite(value) for name, value in dict(row["parts"] or ()).items()}
    return Answer((step, row["group_id"]), reward, length, parts)
