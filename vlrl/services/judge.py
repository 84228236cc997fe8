"""`services.judge`: sends questions to a model on an OpenAI-compatible server, many at a time, and caches the replies.

    judge = Judge(config.services.judge, Path(config.run.dir), config.limits)
    ask = judge.at(ServiceContext("train", step, policy_step))       # a task.services.Judge
    ask(["Is 2 = 3? Reply with 1.0 or 0.0.", Question("Is it a cat?", media, {"verdict": ("yes", "no")})])
    ask.failures                                            # why some questions have no reply

If the server is unavailable or its replies are unusable, the reply is None; no verdict is assumed. A wrong key, path or
model ends the run."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config, LimitsSettings
from vlrl.config.services import JudgeSettings
from vlrl.data import media as loader
from vlrl.data.media import VideoSampling
from vlrl.distributed import comm
from vlrl.errors import ConfigError, DataError, TrainingError
from vlrl.rewards.verdicts import canonical_verdict, read_fields, schema
from vlrl.services.chat import MOST_DETAIL, WAIT_S, ChatClient, ChatError, ChatReply, data_urls, key_of
from vlrl.services.reply_cache import ReplyCache, StoredReply
from vlrl.task.services import Question, ServiceContext

_FRAMES = VideoSampling(fps=1.0, max_frames=16)  # which frames of a video are shown to the judge
COUNTS = ("calls", "cached", "failed", "retries", "tokens_in", "tokens_out")
"""Counts in the metrics: requests, cached replies, missing replies, retries, tokens sent, tokens received."""


@dataclass
class JudgeCounts:
    """Number, tokens and duration of the judge's requests in one step in this process."""

    counts: Counter[str] = field(default_factory=Counter)  # counts by name (see COUNTS)
    seconds: list[float] = field(default_factory=list)  # duration of each request in seconds
    counted: set[str] = field(default_factory=set)  # keys of the requests that were counted

    def note(self, reply: StoredReply) -> None:
        self.counts.update(calls=1, failed=reply.text is None, retries=reply.tries - 1, tokens_in=reply.tokens_in,
                           tokens_out=reply.tokens_out)
        self.seconds.append(reply.seconds)
        self.counted.add(reply.key)


class GroupJudge:
    """The judge for one group of answers: a callable that returns for each question the reply, or None. `failures`
    collects the reasons for missing replies."""

    def __init__(self, judge: Judge, context: ServiceContext):
        self._judge, self._context = judge, context
        self.failures: list[str] = []

    def __call__(self, questions: Sequence[str | Question]) -> list[str | None]:
        replies, failures = self._judge.ask(questions, self._context)
        self.failures += failures
        return replies


def of_run(config: Config, folder: Path) -> Judge:
    """Creates the judge of a run in this process."""
    return Judge(config.services.judge, folder, config.limits, comm.rank())


class Judge:
    """Asks questions with the settings `services.judge`. Replies are cached in `folder`/services, or in
    services.judge.cache. rank: the rank of this process. Raises ConfigError for an invalid address or a missing key."""

    def __init__(self, settings: JudgeSettings, folder: Path, limits: LimitsSettings | None = None, rank: int = 0,
                 wait_s: float = WAIT_S):
        self.settings, self._limits = settings, limits or LimitsSettings()
        self._client = ChatClient(settings.url, settings.model, key=key_of(settings.key_env, "services.judge.key_env"),
                                  timeout_s=settings.timeout_s, retries=settings.retries,
                                  connections=settings.concurrency, wait_s=wait_s, option="services.judge.url")
        self.concurrency = settings.concurrency
        own = folder / "services"
        self.replies = ReplyCache(Path(settings.cache) if settings.cache else own, own, "judge", rank)
        self._pool = ThreadPoolExecutor(settings.concurrency, "judge")
        self._lock = threading.Lock()
        self._pending: dict[str, Future[StoredReply]] = {}
        self._tallies: dict[tuple[str, int], JudgeCounts] = {}
        self._next_s = 0.0

    def close(self) -> None:
        """Gives up pending questions, and closes the connections."""
        self._client.closed.set()
        self._pool.shutdown(cancel_futures=True)
        self._client.close()
        self.replies.sync()

    def at(self, context: ServiceContext) -> GroupJudge:
        """Returns the judge for one group of answers. Its questions are counted under split and step of `context`."""
        return GroupJudge(self, context)

    def problem(self) -> str:
        """Why the judge seems unusable now; "" if the server responds and serves services.judge.model."""
        names, problem = self._client.models()
        if problem:
            return f"the judge {self._client.address} cannot be reached ({self._client.without_key(problem)[:200]})"
        if names and self.settings.model not in names:
            return (f"the judge {self._client.address} does not name services.judge.model={self.settings.model!r} "
                    f"among its models: {', '.join(names[:8])}")
        return ""

    def take(self, split: str, step: int) -> JudgeCounts:
        """Returns the number, tokens and duration of a split's requests, summed over steps up to `step`, and deletes
        these counts. Called after the step is completed."""
        self.replies.settle(split, step)
        with self._lock:
            done = [key for key in self._tallies if key[0] == split and key[1] <= step]
            parts = [self._tallies.pop(key) for key in done]
        return JudgeCounts(sum((t.counts for t in parts), Counter()), [s for t in parts for s in t.seconds])

    def metrics(self, split: str, step: int, times: bool = True) -> dict[str, float]:
        """Returns counts and cost for a split since the last call, in steps up to `step`, over all processes. With
        `times`, also the duration of requests."""
        tally, s = self.take(split, step), self.settings
        counts = comm.total(*(tally.counts[name] for name in COUNTS))
        out = {f"judge/{name}": float(count) for name, count in zip(COUNTS, counts, strict=True)}
        if s.price_in or s.price_out:
            out["judge/cost"] = (out["judge/tokens_in"] * s.price_in + out["judge/tokens_out"] * s.price_out) / 1e6
        if times:
            seconds = [value for part in comm.gather(tally.seconds) for value in part]
            out |= {"time/judge_mean_s": sum(seconds) / max(len(seconds), 1),
                    "time/judge_max_s": max(seconds, default=0.0)}
        return out

    def ask(self, questions: Sequence[str | Question], context: ServiceContext) -> tuple[list[str | None], list[str]]:
        """Returns (replies, reasons): the reply to each question, or None, and the reasons for missing replies. Raises
        TrainingError if the server rejects the key, path or model."""
        votes, failures = self.settings.votes, []
        prepared = [self._prepared(q if isinstance(q, Question) else Question(q)) for q in questions]
        pending = [one if isinstance(one, str) else [self._requested(*one, vote, context) for vote in range(votes)]
                   for one in prepared]
        out: list[str | None] = []
        for question, one in zip(questions, pending, strict=True):
            fields = question.fields if isinstance(question, Question) else None
            text, problem = (None, one) if isinstance(one, str) else _chosen([_result(f) for f in one], fields)
            out.append(text)
            failures += [problem] if text is None else []
        self.replies.sync()
        return out, failures

    # --- one question ---------------------------------------------------------------------------------------------

    def _prepared(self, question: Question) -> tuple[str, Question, list[Any]] | str:
        """Returns (hash of everything that affects the reply, the question, the question's loaded media), or, as a
        string, the reason why media cannot be loaded."""
        try:
            loaded = [loader.load(m, self._limits, _FRAMES) for m in question.media]
        except DataError as error:
            return f"an image cannot be read: {error}"
        fields = None if question.fields is None else {k: list(v) for k, v in question.fields.items()}
        s = self.settings
        known = [s.model, s.temperature, s.max_tokens, s.json_schema, question.text, [m.sha256 for m in loaded], fields]
        text = json.dumps(known, sort_keys=True)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest(), question, loaded

    def _requested(self, digest: str, question: Question, loaded: Sequence[Any], vote: int,
                   context: ServiceContext) -> Future[StoredReply]:
        """Returns a future of the reply to a question. No request is sent if the reply is cached or the same question
        is being asked. digest: hash from `_prepared`. vote: index of this repetition of the question
        (services.judge.votes)."""
        key = f"{digest}-{vote}"
        with self._lock:
            tally = self._tallies.setdefault((context.split, context.step), JudgeCounts())
            cached = self.replies.get(key, context)
            if cached is not None and (cached.text is None or not self.replies.shared) and cached.of(context) and (
                    key not in tally.counted):
                tally.note(cached)  # the step is repeated
            elif cached is not None or key in self._pending:
                tally.counts["cached"] += 1
            if cached is not None:
                future: Future[StoredReply] = Future()
                future.set_result(cached)
                return future
            if key not in self._pending:
                self._pending[key] = self._pool.submit(self._reply, key, question, loaded, context, tally)
            return self._pending[key]

    def _reply(self, key: str, question: Question, loaded: Sequence[Any], context: ServiceContext,
               tally: JudgeCounts) -> StoredReply:
        start = time.monotonic()
        record = StoredReply(key=key, split=context.split, step=context.step, policy_step=context.policy_step)
        try:
            reply = self._client.complete(self._body(key, question, loaded), self.settings.max_tokens,
                                          _reader(question), self._in_turn)
            record = replace(record, text=reply.text, tokens_in=reply.tokens_in, tokens_out=reply.tokens_out,
                             tries=reply.tries)
        except ChatError as error:
            record = replace(record, failed=self._client.without_key(str(error))[:MOST_DETAIL], tries=error.tries)
        except ConfigError as error:
            raise TrainingError(str(error)) from None
        record = replace(record, seconds=round(time.monotonic() - start, 4))
        with self._lock:  # stored and counted together: an uncounted reply is taken for one of a repeated step
            if not self._client.closed.is_set() or record.text is not None:
                self.replies.add(record)
            tally.note(record)
            del self._pending[key]
        return record

    def _body(self, key: str, question: Question, loaded: Sequence[Any]) -> dict[str, Any]:
        pictures = [{"type": "image_url", "image_url": {"url": url}} for m in loaded for url in data_urls(m)]
        content = [*pictures, {"type": "text", "text": question.text}] if pictures else question.text
        wanted = {"name": "reply", "strict": True, "schema": schema(question.fields or {})}
        as_json = {"response_format": {"type": "json_schema", "json_schema": wanted}}
        seed = int(hashlib.sha256(key.encode()).hexdigest()[:8], 16) >> 1
        return {"model": self.settings.model, "messages": [{"role": "user", "content": content}],
                "temperature": self.settings.temperature, "seed": seed,
                **(as_json if question.fields and self.settings.json_schema else {})}

    def _in_turn(self) -> None:
        if not self.settings.per_minute:
            return
        with self._lock:
            now = time.monotonic()
            mine = max(now, self._next_s)
            self._next_s = mine + 60 / self.settings.per_minute
        self._client.closed.wait(max(0.0, mine - now))


def _reader(question: Question) -> Callable[[ChatReply], str | None] | None:
    fields = question.fields
    if fields is None:
        return None
    return lambda reply: (None if read_fields(reply.text, fields) is not None else
                          f"the reply does not say {', '.join(fields)}: {reply.text[-200:]!a}")


def _chosen(votes: Sequence[StoredReply], fields: Any) -> tuple[str | None, str]:
    """Returns (reply, "") with the first of the replies that have the most frequent verdict. Returns (None, reason) if
    all votes lack a reply, or if there is a tie. votes: the replies to repetitions of one question. fields: the
    question's reply fields."""
    texts = [vote.text for vote in votes if vote.text is not None]
    if not texts:
        return None, next((vote.failed for vote in votes if vote.failed), "no reply")
    said = [canonical_verdict(text, fields) for text in texts]
    (most, count), *others = Counter(said).most_common(2)
    if others and others[0][1] == count:
        return None, f"the {len(texts)} votes are tied"
    return texts[said.index(most)], ""


def _result(future: Future[StoredReply]) -> StoredReply:
    while not future.done():
        wait([future], timeout=0.5)
    return future.result()
