"""`vlrl serve --chat`: the model of a config as a plain OpenAI-compatible endpoint, for harnesses of others.

    POST /v1/chat/completions           one answer, at the temperature that is asked for
    GET  /v1/models                     the one model
    GET  /health

Nothing is recorded. Otherwise as record.py: 127.0.0.1 alone, and every path but /health needs the key.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers

from vlrl.config.schema import Config
from vlrl.data.media import MediaAccess
from vlrl.engine.base import Engine, Request, Sampling
from vlrl.errors import DataError
from vlrl.models import policy
from vlrl.models.processing import Encoder
from vlrl.rollout.generate import sampling_of
from vlrl.tools.evaluation.measure import choose_model
from vlrl.tools.servers.chat_messages import RequestError, read
from vlrl.training.build import make_accelerator, seed_everything
from vlrl.training.build_engine import check_engine, make_engine
from vlrl.types import Sample

_IGNORED = {"model", "user", "metadata", "store", "messages", "stream_options"}
_FIXED: dict[str, tuple[Any, ...]] = {
    "n": (1, None), "stream": (False, None), "logprobs": (False, None), "frequency_penalty": (0, None),
    "presence_penalty": (0, None), "logit_bias": (None, {}), "top_logprobs": (None, 0), "tools": (None, []),
    "response_format": (None, {"type": "text"})}
"""Fields with the values that they may have."""
_STREAM = 12
"""First number of the key of random streams."""


class Chat:
    """Answers chat completions, one at a time. Calls may come from any thread."""

    def __init__(self, engine: Engine, encode: Encoder, config: Config, name: str):
        self.engine, self.encode, self.config, self.name = engine, encode, config, name
        self._access, self._lock, self._number = MediaAccess.of(config.data), threading.Lock(), itertools.count()

    def models(self) -> dict[str, Any]:
        """Returns the list of models in OpenAI's form."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "vlrl"}]}

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the reply to a chat completion. Raises Refused for what would not be followed or read."""
        sampling, seed = self._sampling(body), body.get("seed")
        messages = read(body.get("messages"), self._access, Path(self.config.run.dir))
        with self._lock:
            number = next(self._number)
            sample = Sample(id=f"chat-{number}", media=tuple(m for one in messages for m in one.media))
            try:
                prompt = self.encode.prompt(sample, [{"role": m.role, "content": m.content} for m in messages])
            except DataError as error:
                raise RequestError(400, str(error)) from None
            key = (_STREAM, number if seed is None else seed)
            ((answer,),) = self.engine.generate([Request(prompt=prompt, n=1, sampling=sampling, key=key)])
        used, n = len(prompt), len(answer.tokens)
        return {"id": sample.id, "object": "chat.completion", "created": int(time.time()), "model": self.name,
                "choices": [{"index": 0, "finish_reason": answer.finish_reason, "logprobs": None,
                             "message": {"role": "assistant", "content": answer.text}}],
                "usage": {"prompt_tokens": used, "completion_tokens": n, "total_tokens": used + n}}

    def _sampling(self, body: Mapping[str, Any]) -> Sampling:
        rollout, given = self.config.rollout, {k: v for k, v in body.items() if k not in _IGNORED}
        limits = [given.pop(name, None) for name in ("max_completion_tokens", "max_tokens")]
        limit = next((n for n in limits if n is not None), rollout.max_new_tokens)
        temperature, top_p, seed = given.pop("temperature", None), given.pop("top_p", None), given.pop("seed", None)
        stop = given.pop("stop", None) or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(limit, int) or isinstance(limit, bool) or not 0 < limit <= rollout.max_new_tokens:
            raise RequestError(400, f"max_tokens={str(limit)[:40]}: from 1 to rollout.max_new_tokens="
                          f"{rollout.max_new_tokens}; raise that setting for longer answers")
        if not (temperature is None or _number(temperature, 0, 100)):
            raise RequestError(400, f"temperature={str(temperature)[:40]}: a number from 0 on; 0 = greedy")
        if not (top_p is None or (_number(top_p, 0, 1) and top_p > 0)):
            raise RequestError(400, f"top_p={str(top_p)[:40]}: above 0 and at most 1")
        if not (seed is None or (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63)):
            raise RequestError(400, f"seed={str(seed)[:40]}: a whole number from 0 on")
        if not isinstance(stop, list) or len(stop) > 4 or not all(isinstance(s, str) and s for s in stop):
            raise RequestError(400, "stop: a text, or a list of at most 4")
        for name, value in given.items():
            if value not in _FIXED.get(name, (None,)):
                raise RequestError(400, f"{name[:60]!r} is not followed here: leave it out")
        sampling = sampling_of(rollout, 1.0 if temperature is None else float(temperature), limit)
        return replace(sampling, stop=tuple(stop) or sampling.stop, top_p=top_p)


def _number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and (
        low <= value <= high)


@contextlib.contextmanager
def chat(config: Config) -> Iterator[Chat]:
    """Yields what answers with the model that `vlrl eval` of the config would measure: the newest checkpoint of its
    run, else model.name.
    """
    chosen = choose_model(config)
    settings = chosen.config
    check_engine(settings)
    transformers.logging.disable_progress_bar()
    seed_everything(settings.seed)
    model = policy.load(settings, make_accelerator(settings), chosen.checkpoint)
    encode = Encoder(model.processor, model.family, model.positions, settings)
    with (TemporaryDirectory(prefix="vlrl-engine-") as scratch,
          contextlib.closing(make_engine(settings, model, Path(scratch) / "files")) as engine):
        engine.sync(model, chosen.step)
        yield Chat(engine, encode, settings, chosen.name)
