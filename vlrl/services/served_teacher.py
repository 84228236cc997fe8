"""Log-probabilities of completions under the teacher of algo.distillation, on a server that `vlrl serve` started.

The server loads the teacher's weights like those of a policy: from a folder, with a version. The version is a hash of
the weight files, the temperature and the banned ids. So all processes, and all runs with this teacher, use the same
version, and a restarted server loads the weights again. vLLM returns log-probabilities only for the prompt's tokens. So
the completion without its last token is appended to the prompt, and the log-probability of the last token is requested
for the next position."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from vlrl.distributed import comm
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.engine.vllm.inputs import ONE_TOKEN, check_prompt, prompt_input
from vlrl.engine.vllm.replicas import CallSteps, ReplicaPool, ServerCall
from vlrl.engine.vllm.server import read_key, state_and_mismatches
from vlrl.errors import ConfigError, TrainingError
from vlrl.models.policy import Policy

T = TypeVar("T")
_SETTING = "algo.distillation.server"
_KEY = "algo.distillation.key_file"
_MOST = 64  # maximum number of outstanding requests; each is a separate forward pass over prompt and completion


def connect(settings: Any, folder: Path, vocabulary: int, policy: Policy, temperature: float) -> ServedTeacher:
    """Connects to the server `settings.server`, which loads the teacher's weights from `folder`. A collective call.
    Raises ConfigError for a server that cannot serve this teacher. vocabulary: the teacher's number of token ids.
    temperature: that of the log-probabilities. Ids that `policy` lacks or bans get probability 0."""
    banned = (*(i for i in policy.banned.tolist() if i < vocabulary), *range(policy.vocabulary, vocabulary))
    found = ServedTeacher(settings, folder, vocabulary, banned, temperature)
    found.ask(lambda pool: pool.admit_all())
    return found


class ServedTeacher:
    """A teacher model on a server. Its weights are those in `folder`, `vocabulary` is its number of token ids, and the
    token ids `banned` have probability 0."""

    def __init__(self, settings: Any, folder: Path, vocabulary: int, banned: tuple[int, ...], temperature: float):
        self.settings, self.folder, self.vocabulary, self.banned = settings, folder.resolve(), vocabulary, banned
        self.temperature, self._refusals = temperature, 0
        names = [(path.name, path.stat().st_size, path.stat().st_mtime_ns)
                 for path in sorted(self.folder.glob("*model*.safetensors"))]
        self._base = _digest([str(self.folder), names])
        self._key = read_key(settings.key_file, _KEY)

    @property
    def version(self) -> str:
        """Identifies the weights on the server: a hash of the weight files, the temperature and the banned ids."""
        return f"{_digest([self._base, self.temperature, self.banned])}-1"

    def __call__(self, rows: Sequence[Any], temperature: float) -> list[np.ndarray]:
        """Returns for each row (minibatch.TrainingRow) the [T] float32 log-probabilities of its tokens; 0 for tokens
        that are not trained on. All rows are requested at once. Raises TrainingError if no server responds. A
        collective call."""
        self.temperature = temperature
        return self.ask(lambda pool: pool.run([self._steps(row) for row in rows]))

    def ask(self, work: Callable[[ReplicaPool], T]) -> T:
        """Makes the server load the weights, and returns `work(pool)`, where `pool` is a ReplicaPool with only this
        server. A collective call."""
        settings = self.settings
        client = ServerClient(self._key, settings.timeout_s, _KEY)
        pool = ReplicaPool([settings.server], client, partial(self._admit, client), most=_MOST,
                           retries=settings.retries,
                           wait_s=settings.timeout_s, setting=_SETTING)
        try:
            return comm.together(lambda: work(pool))
        except TrainingError as error:
            raise TrainingError(f"{_SETTING}={settings.server}, the teacher ({self.folder}): {error}") from None
        finally:
            client.close()

    def _steps(self, row: Any) -> CallSteps[np.ndarray]:
        tokens, prompt = row.row.tokens, row.rollout.train_prompt or row.group.prompt
        if not row.mask.any():
            return np.zeros(len(tokens), np.float32)
        if row.row.shown is not None and row.row.shown.media:
            raise ConfigError(f"{row.name}: an observation has images, but completions are sent to the teacher's "
                              f"server as tokens: set {_SETTING}=null to load the teacher in the training process")
        options = {**ONE_TOKEN, "logprob_token_ids": [int(tokens[-1])],
                   **({"prompt_logprobs": 0} if len(tokens) > 1 else {})}
        (response,) = yield [ServerCall("/vlrl/generate", lambda: vllm_wire.pack(
            {"version": self.version, "options": options, "input": prompt_input(prompt, tokens[:-1])}))]
        check_prompt(prompt, response["prompt"], len(tokens) - 1)
        found = [*response.get("prompt_logprobs", ())[len(prompt):], response["outputs"][0]["logprobs"][0]]
        values = np.where(row.mask, np.array(found, np.float32), np.float32(0))
        if not np.isfinite(values).all():
            raise TrainingError(f"{row.name}: a log-probability is not finite. The teacher's weights or its server's "
                                "compute type may overflow: serve the teacher with engine.dtype=bfloat16 or "
                                "float32.")
        return values

    def _admit(self, client: ServerClient, address: str) -> None:
        _, wrong = state_and_mismatches(client, address, _SETTING, self.folder,
                                        {"vocabulary": self.vocabulary, "lora_rank": 0})
        if wrong:
            raise ConfigError(f"{_SETTING}={address} is not a server of this teacher: {'; '.join(wrong)}. Start it by "
                              f"`vlrl serve CONFIG model.name={self.folder} model.lora.rank=0 --weights {self.folder}`")
        try:
            client.post(address, "/vlrl/load", json.dumps({
                "version": self.version, "base": [self._base, str(self.folder)], "adapter": None,
                "choices": [self.temperature, self.banned]}).encode())
        except Unavailable as error:
            self._refusals += error.status == HTTPStatus.INTERNAL_SERVER_ERROR
            if self._refusals > self.settings.retries:
                raise TrainingError(f"the server cannot load the weights: {error}. Check that the server was started "
                                    "for this teacher's model.") from None
            raise
        self._refusals = 0


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]
