"""Generation by vLLM servers on this or other hosts, which `vlrl serve` starts.

A group is one request: its prompt as unexpanded ids beside raw pixels (PNGs, so nothing is lost), n answers with their
token ids and log-probabilities back. Which server gets it, and what happens when one dies, is replicas.py's.

Of vLLM's own endpoints none would do. Chat completions render and tokenize the prompt again, and take videos as files
or JPEGs, with times of their own; /inference/v1/generate takes ids, but its media lose processor settings and a
video's times in the same way, or must come as tensors of vLLM's own processor; both leave the development endpoints,
which swap weights, open to anyone. So the servers have a small layer of vlrl's around vLLM's own application
(vllm_routes), which hands vLLM the very prompt and parameters that the in-process engine does.

Weights go through a folder that trainer and servers see (engine.scratch, else the run folder). Each sync has a version,
which every request names: a server that was restarted, or missed a sync, answers nothing until it has loaded the
current weights and has read the probe's answer as the trainer does.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Done, Request
from vlrl.engine.copied_engine import GIVEN_UP, Abandoned, with_own_processor
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.engine.vllm.inputs import (
    Draft,
    SamplingRules,
    check_length,
    check_prompt,
    checked_completions,
    measuring_options,
    model_length,
    prompt_input,
    sampling_options,
    seed_of,
)
from vlrl.engine.vllm.policy_weights import adapted_layers, gathered, saved_tensors, write_adapter, write_weights
from vlrl.engine.vllm.replicas import CallSteps, ReplicaPool, ServerCall
from vlrl.engine.vllm.sync_check import (
    ADVICE,
    TOLERATE,
    WHOLE,
    Pairs,
    SyncCheck,
    describe_differences,
    differing_weights,
    trainer_logprobs,
)
from vlrl.engine.vllm.weights import SIDES
from vlrl.engine.vllm.worker import read_weights
from vlrl.errors import ConfigError, TrainingError
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt

KEY = "VLRL_ENGINE_KEY"
"""Environment variable with the servers' key, where engine.key_file is empty."""
DEFAULT = ("http://127.0.0.1:8000",)
EXTENSION = "vlrl.engine.vllm.worker.Extension"
_BANNED = float("-inf")
_FAILED = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetWeights:
    """The weights that servers must have, and what the trainer reads of the probe with them."""

    version: str
    base: tuple[str, str]
    """Version and folder of whole weights."""
    adapter: str | None
    """Folder of the adapter on them."""
    probe: tuple[float, ...]
    """[T] log-probabilities of the probe's answer."""
    allowed: float


class PolicyMismatch(TrainingError):
    """A server computes with other weights than the policy's, or otherwise."""


class ServerEngine:
    """Engine over servers.

    folder: of this process; weights on their way to the servers lie there. `episodes`: its prompts grow by turns. Waits
    until a server is there, and raises ConfigError for one that was started with other settings.
    """

    def __init__(self, policy: Policy, config: Config, folder: Path, episodes: bool = False):
        self.policy, self.config, self.seed, self.step, self.folder = policy, config, config.seed, 0, folder.absolute()
        settings = config.engine
        self.max_model_len = model_length(config, policy.base.config, episodes)
        overlaps = config.asynchronous.max_staleness > 0
        self.rules = SamplingRules.of(with_own_processor(policy) if overlaps else policy, settings.top_p,
                                      settings.top_k,
                              _BANNED)
        self._dtype = settings.dtype or str(policy.dtype).removeprefix("torch.")
        self._proof = SyncCheck.of(Encoder(policy.processor, policy.family, policy.positions, config), settings.proof,
                               getattr(torch, self._dtype), episodes)
        self._target: TargetWeights | None = None
        self._run = comm.broadcast(secrets.token_hex(4))  # versions of two runs are never alike
        self._syncs = 0
        self._refusals: dict[str, int] = {}
        self._checks: dict[str, int] = {}
        """How often the weights of each server were proved since it was started."""
        self._client = ServerClient(read_key(settings.key_file), settings.timeout_s)
        addresses = settings.servers or DEFAULT
        turn = comm.rank() % len(addresses)  # each process begins with another one
        self.pool = ReplicaPool(addresses[turn:] + addresses[:turn], self._client, self._admit,
                                most=2 * settings.max_seqs,
                             retries=settings.retries, wait_s=settings.timeout_s)
        self.way = "full"
        self._slots = min(comm.gather(comm.together(self._meet)))
        self.way = self._way()

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns `request.n` completions per request; `done` is called as whole requests come in."""
        if self._target is None:
            self.sync(self.policy, self.step)
        for request in requests:
            check_length(self.max_model_len, request.prompt, request.sampling,
                         self.config.engine.max_model_len is not None)
        with phase("generate"):
            return self.pool.run([self._steps(request) for request in requests], done)

    def abandon(self) -> None:
        """Ends what another thread generates."""
        self.pool.abandon(Abandoned(GIVEN_UP))

    def close(self) -> None:
        """Leaves the servers, which go on running."""
        self._client.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _steps(self, request: Request) -> CallSteps[list[Completion]]:
        """Returns one request as calls of servers, each part of an answer after the one before."""
        drafts = Draft.all_of(request, self.rules)
        prompt, sampling = request.prompt, request.sampling
        if drafts and not request.begun:
            options = sampling_options(sampling, len(drafts), seed_of(self.seed, request.key), self.rules,
                                       drafts[0].room())
            (response,) = yield [self._call(prompt, (), options)]
            check_prompt(prompt, response["prompt"], turns=request.turns)
            for draft, output in zip(drafts, response["outputs"], strict=True):
                _add(draft, output)
        while True:
            calls, takes = [], []
            for draft in drafts:
                for place in draft.force():
                    options = measuring_options(sampling, draft.tokens[place], self.rules)
                    calls.append(self._call(prompt, draft.tokens[:place], options))
                    takes.append((place, functools.partial(_measure, draft, place)))
                if not draft.ended:
                    seed = seed_of(self.seed, request.key, draft.place, len(draft.tokens))
                    options = sampling_options(sampling, 1, seed, self.rules, draft.room())
                    calls.append(self._call(prompt, draft.tokens, options))
                    takes.append((len(draft.tokens), functools.partial(_add, draft)))
            if not calls:
                return checked_completions(drafts, prompt)
            for (written, take), response in zip(takes, (yield calls), strict=True):
                check_prompt(prompt, response["prompt"], written, request.turns)
                take(response["outputs"][0])

    def _call(self, prompt: Prompt, written: Sequence[int], options: dict[str, Any]) -> ServerCall:
        assert self._target is not None
        fields = {"version": self._target.version, "options": options | {"detokenize": bool(options["stop"])}}
        written = tuple(written)

        def body() -> bytes:  # made when it is sent: the pixels of all requests at once would fill the memory
            return vllm_wire.pack({**fields, "input": prompt_input(prompt, written)})
        return ServerCall("/vlrl/generate", body, weight=options["n"])

    # --- weights -----------------------------------------------------------------------------------------------------

    def sync(self, policy: Policy, step: int) -> None:
        """Brings the policy's weights to the servers, which then read the probe as the trainer does; a call of all
        processes, when none of them generates.

        The main process writes and pushes. A server that does not answer is left out until it does.
        """
        self.policy, self.step = policy, step
        comm.barrier()  # none generates with the weights before
        old, new = self._target, comm.broadcast(comm.together(lambda: self._write(policy)))
        self._target = new
        self._refusals.clear()
        self.pool.doubt()
        comm.on_main_alone(lambda: self._admit_all(policy))
        comm.together(lambda: comm.is_main() or self.pool.admit_all())
        if old is not None and comm.is_main():
            for path in {old.base[1], old.adapter} - {new.base[1], None}:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, policy: Policy) -> TargetWeights:
        """Writes the weights (the main process does; under FSDP the others help) and reads the probe.

        In the first syncs what was written is read again: TrainingError where it is not what the policy holds.
        """
        self._syncs += 1
        version = f"{self._run}-{self._syncs}"
        base, adapter = (version, str(self.folder / f"weights-{version}")), None
        if self.way == "adapter" and self._target is not None:
            base = self._target.base
        elif comm.is_main():
            write_weights(policy, Path(base[1]), merge=self.way != "adapter", dtype=getattr(torch, self._dtype))
        elif _sharded(policy):
            for _ in saved_tensors(policy, self.way != "adapter"):
                pass
        if self.way == "adapter" and (comm.is_main() or _sharded(policy)):
            adapter = str(self.folder / f"adapter-{version}")
            write_adapter(policy, Path(adapter))
        probe = trainer_logprobs(policy, self._proof.prompt, self._proof.answer)
        target = TargetWeights(version, base, adapter, tuple(map(float, probe)), self._proof.allowed(policy))
        if self._syncs <= WHOLE and (comm.is_main() or _sharded(policy)):
            stale = differing_weights(self._written(policy, target))
            if stale:
                raise TrainingError("the files for the servers do not hold the policy's weights: "
                                    f"{describe_differences(stale)}. "
                                    "Is the disk of engine.scratch (else run.dir) sound?")
        return target

    def _written(self, policy: Policy, target: TargetWeights) -> Pairs:
        """Yields (name, the policy's tensor, what its file holds, NaN without one); only the main process has pairs."""
        files = dict(read_weights(Path(target.base[1]))) if comm.is_main() else {}
        own = saved_tensors(policy, merge=self.way != "adapter")
        if target.adapter is not None:
            files |= read_weights(Path(target.adapter)) if comm.is_main() else {}
            own = itertools.chain(own, ((f"base_model.model.{path}.{side}.weight", gathered(part.weight))
                                        for path, layer in adapted_layers(policy).items() for side in SIDES
                                        for part in [getattr(layer, side)[policy.model.active_adapter]]))
        for name, tensor in own:
            if comm.is_main():
                yield name, tensor, files.get(name, torch.full(tensor.shape, torch.nan))

    def _admit_all(self, policy: Policy) -> None:
        """Brings all servers to the current weights, and says where those of one that is unlike the policy got lost."""
        try:
            self.pool.admit_all()
        except PolicyMismatch as error:
            assert self._target is not None
            stale = [] if _sharded(policy) else differing_weights(self._written(policy, self._target))
            lost = f" Already the files for the servers differ: {describe_differences(stale)}." if stale else ""
            raise TrainingError(f"{error}{lost}") from None

    def _admit(self, address: str) -> None:
        """Brings a server to the current weights and has it write; Unavailable while it does not. Runs in a thread of
        its own. One that was dropped writes the probe again: its page answers, too, while its engine stands still.
        """
        target, state = self._target, self._state(address)
        if target is None:
            return
        if not state["version"]:
            self._checks[address] = 0
        mine = comm.is_main() or state["version"] != target.version
        body = json.dumps({"version": target.version, "base": target.base, "adapter": target.adapter}).encode()
        try:
            self._client.post(address, "/vlrl/load", body)
            self._prove(address, target, whole=mine and self._checks.get(address, 0) < WHOLE)
        except Unavailable as error:
            refusals = self._refusals[address] = self._refusals.get(address, 0) + (error.status == _FAILED)
            if refusals > self.config.engine.retries:
                raise TrainingError(f"the server {address} does not take the weights of the policy: {error}") from None
            raise
        self._refusals[address] = 0
        self._checks[address] = self._checks.get(address, 0) + 1

    def _prove(self, address: str, target: TargetWeights, whole: bool) -> None:
        """Raises Unlike when a server reads the probe otherwise than the trainer, or, with `whole`, when a weight that
        it computes with is not the one in its file."""
        gap = self._gap(address, target)
        alike = gap <= target.allowed
        if alike and not whole:
            return
        body = json.dumps({"version": target.version, "base": target.base[1], "adapter": target.adapter}).encode()
        report = self._client.post(address, "/vlrl/compare", body)
        stale, compared = [(name, by, size) for name, by, size in report["differing"]], report["compared"]
        if alike and not stale:
            return
        if stale:
            named = f"{describe_differences(stale)}. {ADVICE}"
        elif compared:
            named = (f"all {compared} weights that could be compared are those of the files. Then they are computed "
                     f"with differently: another type (engine.dtype), attention or image size. {TOLERATE}")
        else:
            named = f"a server on several devices holds slices, which are not compared. {ADVICE}"
        raise PolicyMismatch(f"the server {address} and the trainer are not the same policy after a sync: "
                             "log-probabilities of "
                     f"a fixed answer differ by {gap:.2g}, where {target.allowed:g} is allowed; {named}")

    def _gap(self, address: str, target: TargetWeights) -> float:
        """Returns the largest difference of a log-probability of the probe's answer. Asked as answers are, a token at a
        time: vLLM's log-probabilities of prompts are wrong, or end its engine, beside other requests where adapters are
        used.
        """
        answer = tuple(map(int, self._proof.answer))
        measured = [self._measured(address, target, answer[:i], answer[i]) for i in range(len(answer))]
        gaps = np.abs(np.array(measured, dtype=np.float64) - np.array(target.probe))
        return float(gaps.max()) if np.isfinite(gaps).all() else float("inf")

    def _measured(self, address: str, target: TargetWeights, written: Sequence[int], token: int) -> float:
        """Returns a server's log-probability of a token after the probe and what is written."""
        options = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "logprob_token_ids": [token],
                   "detokenize": False}
        response = self._client.post(address, "/vlrl/generate", vllm_wire.pack(
            {"version": target.version, "options": options, "input": prompt_input(self._proof.prompt, written)}))
        check_prompt(self._proof.prompt, response["prompt"], len(written))
        return response["outputs"][0]["logprobs"][0]

    # --- what the servers are ----------------------------------------------------------------------------------------

    def _meet(self) -> int:
        """Waits for servers; the LoRA rank that all which are there have room for."""
        return min(self._state(replica.address)["lora_rank"] for replica in self.pool.admit_all())

    def _way(self) -> str:
        """Returns how weights travel: full, adapter or merged (see vllm_sync)."""
        if not self.policy.lora:
            return "full"
        from vlrl.engine.vllm.sync import why_merged

        reason = why_merged(self.policy, taken=self._slots > 0)  # a server with slots has a model that takes adapters
        if not reason and self._slots < self._rank():
            reason = f"the servers have room for adapters of rank {self._slots} at most"
        if reason and comm.is_main():
            _log.warning("every sync carries all weights, with the adapter added: %s", reason)
        return "merged" if reason else "adapter"

    def _rank(self) -> int:
        return self.policy.model.peft_config[self.policy.model.active_adapter].r

    def _state(self, address: str) -> dict[str, Any]:
        """Returns what a server says of itself. Raises ConfigError when it was started with other settings."""
        try:
            state = self._client.get(address, "/vlrl/state")
            if not isinstance(state, dict):
                raise TrainingError("no object")
        except TrainingError:
            raise ConfigError(f"engine.servers: {address} is a server, but none that `vlrl serve` started: stop it and "
                              "start `vlrl serve` with this config") from None
        mine = {"protocol": vllm_wire.PROTOCOL, "dtype": self._dtype, "logprobs_mode": "processed_logprobs",
                "extension": EXTENSION, "vocabulary": self.policy.base.config.get_text_config().vocab_size}
        wrong = [f"{name} is {state.get(name)} instead of {value}" for name, value in mine.items()
                 if state.get(name) != value]
        if state.get("max_model_len", 0) < self.max_model_len:
            wrong.append(f"engine.max_model_len is {state.get('max_model_len')}, less than {self.max_model_len}")
        if self.way == "adapter" and state.get("lora_rank", 0) < self._rank():
            wrong.append(f"model.lora.rank has to be at most {state.get('lora_rank', 0)}")
        if not any(self.folder.resolve().is_relative_to(root) for root in state.get("roots", ())):
            wrong.append(f"it takes weights from {', '.join(state.get('roots', ())) or 'nowhere'}, and not from "
                         f"{self.folder} (engine.scratch, else run.dir)")
        if wrong:
            raise ConfigError(f"the server {address} was started with other settings: {'; '.join(wrong)}. Start `vlrl "
                              "serve` with the config and settings of this run.")
        return state


def _add(draft: Draft, output: dict[str, Any]) -> None:
    draft.add(output["tokens"], output["logprobs"], output["finish"] == "stop")


def _measure(draft: Draft, place: int, output: dict[str, Any]) -> None:
    draft.logprobs[place] = output["logprobs"][0]


def _sharded(policy: Policy) -> bool:
    """Returns whether every process takes part in reading the policy's weights (FSDP)."""
    return any(hasattr(p, "full_tensor") for p in policy.model.parameters())


def read_key(file: str, setting: str = "engine.key_file") -> str:
    """Returns the servers' key: of the file that `setting` names, else of VLRL_ENGINE_KEY; "" for none. ConfigError for
    an unreadable file.
    """
    if not file:
        return os.environ.get(KEY, "")
    try:
        if (mode := os.stat(file).st_mode & 0o777) & 0o077:
            _log.warning("%s=%r can be read by others than its owner (mode %o), and whoever has the key commands the "
                         "servers: chmod 600 %s", setting, file, mode, file)
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{setting}={file!r} cannot be read: {error.strerror}. `vlrl serve` writes it; copy it "
                          "to this host where the servers run on another.") from None

