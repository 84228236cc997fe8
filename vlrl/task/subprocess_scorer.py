"""Runs task code in a separate process, which is killed if it hangs (limits.score_s).

    scorer = SubprocessScorer(make, seconds)      # before the model is loaded: starts the fork server
    scorer.set_convention("norm1000")             # make("norm1000") is the task, called in the process that scores
    scorer(task, sample, answers, others, step, services)       # as scoring.score_all

The fork server (fork_server.py) is a fork of the training process, with the task and samples as they were at that time.
Some groups are scored in the training process instead, without a time limit: those whose sample or results cannot be
pickled, and those that need a service."""

from __future__ import annotations

import logging
import mmap
import pickle
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection

from vlrl.rewards.worker import Worker, WorkerEnded, WorkerHung, serve
from vlrl.task.base import Task
from vlrl.task.fork_server import ForkServer, ForkServerLost
from vlrl.task.scoring import AnswerScore, MarkedScores, score_all, watching
from vlrl.task.services import Services
from vlrl.types import Answer, Sample

GroupScores = tuple[MarkedScores, dict[str, float]]
_PLACE = struct.Struct("qq")
"""Layout of the shared memory: the number of calls of task code started so far, and the number of answers that the
latest call scores."""
_START_S = 60.0  # seconds added to the limit before the first call
_log = logging.getLogger(__name__)


class GroupAbandoned(Exception):
    """Raised when a group cannot be scored because a call hangs repeatedly; the argument is the reason."""


class SubprocessScorer:
    """Scores groups in a separate process, which is killed if a call takes longer than `seconds` per answer.

    If a call hangs or ends the process, the answer that it scores gets an `error` and no reward. If the call is
    `score_group`, this applies to all answers of the group. All other answers are scored as usual."""

    def __init__(self, make: Callable[[str], Task], seconds: float):
        self.seconds, self._lock = seconds, threading.Lock()
        self._convention, self._reported = "", False
        self._place = mmap.mmap(-1, _PLACE.size)
        self.fork_server = ForkServer(lambda connection, convention: _work(connection, make(convention), self._place))
        self.worker = Worker(lambda: self.fork_server.start(self._convention))

    def set_convention(self, convention: str) -> None:
        """Sets the units in which the model writes coordinates, which are known once the model is loaded."""
        self._convention = convention

    def __call__(self, task: Task, sample: Sample, answers: Sequence[Answer], others: Sequence[Answer], step: int,
                 services: Services) -> GroupScores:
        """Scores a group and the answers to variants (`others`) like scoring.score_all. May be called from any thread;
        groups are scored one at a time."""
        outcome: GroupScores | str | None = None
        if not services.given:
            try:
                request = pickle.dumps((sample, answers, others, step, dict(services.variants)),
                                       pickle.HIGHEST_PROTOCOL)
                outcome = self._scored(request, sample)
            except GroupAbandoned as given:
                lost = AnswerScore(dict.fromkeys(task.of(sample).weights_at(step)), None, None, str(given))
                outcome = [(lost, None)] * (len(answers) + len(others)), task.of(sample).weights_at(step)
            except ForkServerLost as error:
                self._tell(str(error))
            except Exception as error:  # pickling of the task's objects may raise anything; fork may fail
                outcome = f"{type(error).__name__}: {error}"
        if isinstance(outcome, str):
            self._tell(f"they cannot be sent to a separate process ({outcome[:300]})")
        return outcome if isinstance(outcome, tuple) else score_all(task, sample, answers, others, step, services)

    def close(self) -> None:
        """Ends the scoring process and the fork server."""
        with self._lock:
            self.worker.kill()
            self.fork_server.close()

    def _tell(self, why: str) -> None:
        if not self._reported:
            self._reported = True
            _log.warning("answers of this task are scored in the training process, where limits.score_s has no effect: "
                         "%s", why)

    def _scored(self, request: bytes, sample: Sample) -> GroupScores | str | None:
        """Has the separate process score a pickled group. Returns the scores; None if scoring raised an exception; or
        the reason as a string if the scores cannot be pickled. In the last two cases the training process must score
        the group. Raises GroupAbandoned if the separate process hangs again at a call that it should already skip."""
        refused: dict[int, str] = {}
        with self._lock:
            while True:
                _PLACE.pack_into(self._place, 0, 0, 1)
                try:
                    # unpickling is safe: the data comes from a process of this run
                    return pickle.loads(self.worker.ask(pickle.dumps((refused, request)), self._patience))
                except WorkerEnded as error:
                    hung, place = isinstance(error, WorkerHung), self._patience()[0][0]
                why = (f"no result within limits.score_s={self.seconds:g} s for an answer" if hung else
                       "the scoring process ended")
                _log.warning("scoring sample %r: %s; the scoring process was started again", sample.id, why)
                if place in refused:
                    raise GroupAbandoned(f"{refused[place]}, twice")
                refused[place] = f"TimeoutError: {why}" if hung else f"ChildProcessError: {why}"

    def _patience(self) -> tuple[tuple[int, int], float]:
        """Returns ((number of calls of task code started so far, number of answers of the latest call), seconds that
        the latest call may take)."""
        begun, answers = _PLACE.unpack_from(self._place)
        return (begun, answers), self.seconds * max(answers, 1) + (0 if begun else _START_S)


def _work(connection: Connection, task: Task, place: mmap.mmap) -> None:
    def reply(sent: bytes) -> bytes:
        refused, request = pickle.loads(sent)  # of the training process
        return _reply(task, refused, request, place)

    serve(connection, reply)


def _reply(task: Task, refused: Mapping[int, str], request: bytes, place: mmap.mmap) -> bytes:
    """The scores, pickled. If scoring raises, the reply is a pickled None; scoring is then repeated in the training
    process, which reports the error. If the scores cannot be pickled, the reply is the reason, as a pickled string.
    `refused` maps the numbers of calls that must be skipped to the error of their answers. `place` is the shared
    memory (_PLACE)."""
    begun = 0

    def watch(answers: int) -> str | None:
        nonlocal begun
        begun += 1
        _PLACE.pack_into(place, 0, begun, answers)
        return refused.get(begun)

    try:
        sample, answers, others, step, variants = pickle.loads(request)  # of the training process
        with watching(watch):
            scores = score_all(task, sample, answers, others, step, Services(variants))
    except Exception:
        return pickle.dumps(None)
    try:
        return pickle.dumps(scores, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # of the task's own objects
        return pickle.dumps(f"{type(error).__name__}: {error}")
