"""`vlrl serve --chat`: the model of a config as an OpenAI-compatible endpoint, for external evaluation harnesses.

    POST /v1/chat/completions           one completion, at the requested temperature
    GET  /v1/models                     the model
    GET  /health

Nothing is recorded. As in record.py, the server listens on 127.0.0.1 only, and only /health needs no API key."""

from __future__ import annotations

import contextlib
import itertools
import threading
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
from vlrl.tools.evaluation.measure import choose_model
from vlrl.tools.servers.chat_messages import RequestError, chat_reply, read, read_sampling
from vlrl.training.build import make_accelerator, seed_everything
from vlrl.training.build_engine import check_engine, make_engine
from vlrl.types import Sample

_ALLOWED: dict[str, tuple[Any, ...]] = {
    "n": (1, None), "stream": (False, None), "logprobs": (False, None), "frequency_penalty": (0, None),
    "presence_penalty": (0, None), "logit_bias": (None, {}), "top_logprobs": (None, 0), "tools": (None, []),
    "response_format": (None, {"type": "text"})}
"""Request field -> values that are accepted because they have no effect."""
_OWN = ("temperature", "top_p", "seed", "stream_options")
_STREAM = 12  # first number in the keys of this module's random streams


class Chat:
    """Generates replies to chat completion requests, one at a time. Its methods may be called from any thread."""

    def __init__(self, engine: Engine, encode: Encoder, config: Config, name: str):
        self.engine, self.encode, self.config, self.name = engine, encode, config, name
        self._access, self._lock, self._number = MediaAccess.of(config.data), threading.Lock(), itertools.count()

    def models(self) -> dict[str, Any]:
        """The list of models in OpenAI's format."""
        return {"object": "list", "data": [{"id": self.name, "object": "model", "owned_by": "vlrl"}]}

    def chat(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Generates the reply to a chat completion request. Raises RequestError for unsupported or invalid requests."""
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
        return chat_reply(sample.id, self.name, answer, len(prompt))

    def _sampling(self, body: Mapping[str, Any]) -> Sampling:
        temperature, top_p, seed = (body.get(name) for name in ("temperature", "top_p", "seed"))
        if not (temperature is None or _number(temperature, 0, 100)):
            raise RequestError(400, f"temperature={str(temperature)[:40]}: give a number of at least 0 (0 = greedy)")
        if not (top_p is None or (_number(top_p, 0, 1) and top_p > 0)):
            raise RequestError(400, f"top_p={str(top_p)[:40]}: give a number above 0 and at most 1")
        if not (seed is None or (isinstance(seed, int) and not isinstance(seed, bool) and 0 <= seed < 2**63)):
            raise RequestError(400, f"seed={str(seed)[:40]}: give a whole number of at least 0")
        sampling = read_sampling({name: value for name, value in body.items() if name not in _OWN},
                                 self.config.rollout, 1.0 if temperature is None else float(temperature), _ALLOWED,
                                 null=True)
        return replace(sampling, top_p=top_p)


def _number(value: Any, low: float, high: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


@contextlib.contextmanager
def chat(config: Config) -> Iterator[Chat]:
    """Context manager that yields a Chat with the model that `vlrl eval` would evaluate: the newest checkpoint of the
    run, or model.name if there is no checkpoint."""
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
