"""A run with a budget of answers instead of steps."""

from __future__ import annotations

import json

from vlrl.training.session import Session


def budgeted(budget: int, every: int) -> type[Session]:
    """A session that ends once `budget` answers are drawn and evaluates every `every` answers.

    The answers drawn before each evaluation are written beside it, in `race.jsonl`.
    """

    class Budgeted(Session):
        _next = 0

        @property
        def spent(self) -> int:
            return self.parts.source.tally.answers

        def evaluate_if_due(self, done: int) -> None:
            if self.spent >= self._next:
                self._next = (self.spent // every + 1) * every
                self._measure()

        def interrupted(self) -> bool:
            return self.spent >= budget or super().interrupted()

        def finish(self) -> None:
            self.parts.engine.sync(self.parts.policy, self.done)
            self._measure()
            self._state = "finished"

        def _measure(self) -> None:
            self._evaluate()
            record = self.folder.evals()[-1]
            kept = {k: v for k, v in record.items() if k in ("step", "correct") or k.startswith("level/")}
            with open(self.folder.path / "race.jsonl", "a") as file:
                file.write(json.dumps({"answers": self.spent, **kept}) + "\n")

    return Budgeted
