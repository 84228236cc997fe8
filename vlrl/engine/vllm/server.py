"""Generation by vLLM servers, which `vlrl serve` starts on this host or on others.

A group is one request: the prompt as ids with unexpanded image placeholders, and the raw pixels as lossless PNGs. The
response contains n completions with token ids and log-probabilities. replicas.py chooses the server for a request, and
retries when a server fails.

vLLM's own endpoints cannot be used. The chat endpoint renders and tokenizes the prompt again, and accepts videos only
as files or JPEGs, with different frame times. /inference/v1/generate accepts ids, but its media either lose processor
settings and video times too, or must be tensors of vLLM's own processor. Both endpoints leave the development
endpoints, which replace weights, open to anyone. So the servers have a small middleware (routes.py), which passes the
same prompt and parameters to vLLM as the in-process engine does.

Weights are transferred through a folder that both trainer and servers can access (engine.scratch, or else the run
folder). Each sync creates a new version of the weights, which every request names. A server that was restarted, or
missed a sync, generates nothing until it has loaded the current weights and reproduces the trainer's log-probabilities
of a probe (a fixed prompt and answer)."""

from __future__ import annotations

import itertools
import json
import logging
import os
import secrets
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Done, Request
from vlrl.engine.copied_engine import GIVEN_UP, Abandoned, with_own_processor
from vlrl.engine.vllm import inputs, sync_check
from vlrl.engine.vllm import wire as vllm_wire
from vlrl.engine.vllm.client import ServerClient, Unavailable
from vlrl.engine.vllm.policy_weights import adapted_layers, gathered, saved_tensors, write_adapter, write_weights
from vlrl.engine.vllm.replicas import CallSteps, ReplicaPool, ServerCall
from vlrl.engine.vllm.weights import SIDES
from vlrl.engine.vllm.worker import read_weights
from vlrl.errors import ConfigError, TrainingError
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion, Prompt

KEY = "VLRL_ENGINE_KEY"  # environment variable with the servers' key, used if engine.key_file is empty
DEFAULT = ("http://127.0.0.1:8000",)
EXTENSION = "vlrl.engine.vllm.worker.Extension"
_FAILED = 500
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetWeights:
    """The weights that the servers must load, and the trainer's log-probabilities of a fixed answer (the probe)."""

    version: str
    base: tuple[str, str]  # version and folder of the full weights; with an adapter, of the base model's weights
    adapter: str | None  # folder of the adapter, which is loaded after the full weights; None if there is none
    probe: tuple[float, ...]  # [T] log-probabilities of the probe's answer
    allowed: float


class PolicyMismatch(TrainingError):
    """A server's weights or log-probabilities differ from the policy's."""


class ServerEngine:
    """An engine that generates on vLLM servers. folder: a folder of this process, from which the servers load weights.
    episodes: whether prompts grow over the turns of episodes. The constructor waits until a server responds, and
    raises ConfigError if a server was started with other settings."""

    def __init__(self, policy: Policy, config: Config, folder: Path, episodes: bool = False):
        self.policy, self.config, self.seed, self.step, self.folder = policy, config, config.seed, 0, folder.absolute()
        settings = config.engine
        self.max_model_len = inputs.model_length(config, policy.base.config, episodes)
        overlaps = config.asynchronous.max_staleness > 0
        self.rules = inputs.SamplingRules.of(with_own_processor(policy) if overlaps else policy, settings.top_p,
                                             settings.top_k)
        self._dtype = settings.dtype or str(policy.dtype).removeprefix("torch.")
        encode = Encoder(policy.processor, policy.family, policy.positions, config)
        self._proof = sync_check.SyncCheck.of(encode, settings.proof, getattr(torch, self._dtype), episodes)
        self._target: TargetWeights | None = None
        self._run = comm.broadcast(secrets.token_hex(4))  # versions of two runs differ
        self._syncs = 0
        self._refusals: dict[str, int] = {}
        self._checks: dict[str, int] = {}
        """How often the weights of each server have been checked since the server was started."""
        self._client = ServerClient(read_key(settings.key_file), settings.timeout_s)
        addresses = settings.servers or DEFAULT
        turn = comm.rank() % len(addresses)  # each process starts with another server
        self.pool = ReplicaPool(addresses[turn:] + addresses[:turn], self._client, self._admit,
                                most=2 * settings.max_seqs, retries=settings.retries, wait_s=settings.timeout_s)
        self.way = "full"
        self._slots = min(comm.gather(comm.together(
            lambda: min(self._state(replica.address)["lora_rank"] for replica in self.pool.admit_all()))))
        """The largest LoRA rank that all responding servers support."""
        self.way = self._way()

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns the `request.n` completions of each request. For `done` see Engine.generate."""
        if self._target is None:
            self.sync(self.policy, self.step)
        inputs.check_lengths(requests, self.max_model_len, self.config.engine.max_model_len is not None)
        with phase("generate"):
            return self.pool.run([self._steps(request) for request in requests], done)

    def abandon(self) -> None:
        """Called from another thread: the running generation raises Abandoned."""
        self.pool.abandon(Abandoned(GIVEN_UP))

    def close(self) -> None:
        """Closes the connections to the servers, which keep running, and removes the engine's files."""
        self._client.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _steps(self, request: Request) -> CallSteps[list[Completion]]:
        steps, responses = inputs.completion_steps(request, self.rules, self.seed), None
        while True:
            try:
                parts = steps.send(responses)  # pyright: ignore[reportArgumentType] - None starts a generator
            except StopIteration as end:
                return end.value
            responses = yield [self._call(request.prompt, written, options) for written, options in parts]

    def _call(self, prompt: Prompt, written: tuple[int, ...], options: dict[str, Any]) -> ServerCall:
        assert self._target is not None
        fields = {"version": self._target.version, "options": options}

        def body() -> bytes:  # built when it is sent: the pixels of all requests together may exceed the memory
            return vllm_wire.pack({**fields, "input": inputs.prompt_input(prompt, written)})
        return ServerCall("/vlrl/generate", body, weight=options["n"])

    # --- weights -----------------------------------------------------------------------------------------------------

    def sync(self, policy: Policy, step: int) -> None:
        """Makes the servers load the policy's weights, and checks that they reproduce the trainer's log-probabilities.
        A collective call; no process may generate at the same time. The main process writes the weights and notifies
        the servers. A server that does not respond gets no requests until it has loaded the weights."""
        self.policy, self.step = policy, step
        comm.barrier()  # no process still generates with the old weights
        old, new = self._target, comm.broadcast(comm.together(lambda: self._write(policy)))
        self._target = new
        self._refusals.clear()
        self.pool.invalidate()
        comm.on_main_alone(lambda: self._admit_all(policy))
        comm.together(lambda: comm.is_main() or self.pool.admit_all())
        if old is not None and comm.is_main():
            for path in {old.base[1], old.adapter} - {new.base[1], None}:
                shutil.rmtree(path, ignore_errors=True)

    def _write(self, policy: Policy) -> TargetWeights:
        """Writes the weights on the main process, and computes the log-probabilities of the probe. Under FSDP the other
        processes take part in gathering the weights. In the first syncs the files are read back. Raises TrainingError
        if they differ from the policy."""
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
        probe = sync_check.trainer_logprobs(policy, self._proof.prompt, self._proof.answer)
        target = TargetWeights(version, base, adapter, tuple(map(float, probe)), self._proof.allowed(policy))
        if self._syncs <= sync_check.WHOLE and (comm.is_main() or _sharded(policy)):
            _, differences = sync_check.counted_differences(self._written(policy, target))
            if differences:
                raise TrainingError("the weight files for the servers differ from the policy: "
                                    f"{sync_check.describe_differences(differences)}. Check the disk of "
                                    "engine.scratch (of run.dir if engine.scratch is empty).")
        return target

    def _written(self, policy: Policy, target: TargetWeights) -> sync_check.Pairs:
        """Yields (name, the policy's tensor, the tensor in the weight files of `target`). The file's tensor is NaN if
        the file lacks this weight. Yields nothing on processes other than the main process."""
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
        try:
            self.pool.admit_all()
        except PolicyMismatch as error:
            assert self._target is not None
            written = () if _sharded(policy) else self._written(policy, self._target)
            _, differences = sync_check.counted_differences(written)
            named = sync_check.describe_differences(differences)
            lost = f" The weight files for the servers already differ from the policy: {named}." if named else ""
            raise TrainingError(f"{error}{lost}") from None

    def _admit(self, address: str) -> None:
        """Makes a server load the current weights, and checks the server, in a separate thread. Raises Unavailable if
        the server cannot be used yet. A server that was dropped before must also compute the probe again, since its
        HTTP routes respond even while its engine hangs."""
        target, state = self._target, self._state(address)
        if target is None:
            return
        if not state["version"]:
            self._checks[address] = 0
        mine = comm.is_main() or state["version"] != target.version
        body = json.dumps({"version": target.version, "base": target.base, "adapter": target.adapter}).encode()
        try:
            self._client.post(address, "/vlrl/load", body)
            self._prove(address, target, whole=mine and self._checks.get(address, 0) < sync_check.WHOLE)
        except Unavailable as error:
            refusals = self._refusals[address] = self._refusals.get(address, 0) + (error.status == _FAILED)
            if refusals > self.config.engine.retries:
                raise TrainingError(f"the server {address} cannot load the policy's weights: {error}") from None
            raise
        self._refusals[address] = 0
        self._checks[address] = self._checks.get(address, 0) + 1

    def _prove(self, address: str, target: TargetWeights, whole: bool) -> None:
        """Raises PolicyMismatch if the log-probabilities of the probe differ between server and trainer. With `whole`,
        all weights that the server has loaded are also compared with their files."""
        gap = self._gap(address, target)
        alike = gap <= target.allowed
        if alike and not whole:
            return
        body = json.dumps({"version": target.version, "base": target.base[1], "adapter": target.adapter}).encode()
        report = self._client.post(address, "/vlrl/compare", body)
        differences, compared = [(name, by, size) for name, by, size in report["differing"]], report["compared"]
        if alike and not differences:
            return
        cause = sync_check.cause_of_mismatch(compared, differences) if compared else (
            f"Its weights are sharded over several devices, so they are not compared. {sync_check.ADVICE}")
        raise PolicyMismatch(f"the server {address} does not compute the trainer's log-probabilities after a sync: "
                             f"for a fixed answer they differ by {gap:.2g}, more than {target.allowed:g}. {cause}")

    def _gap(self, address: str, target: TargetWeights) -> float:
        """The largest difference between server and trainer in a log-probability of the probe's answer. The
        log-probabilities are requested token by token, like completions: with adapters, vLLM's log-probabilities of
        prompt tokens can be wrong or crash the engine when other requests run at the same time."""
        prompt, answer, measured = self._proof.prompt, tuple(map(int, self._proof.answer)), []
        for i, token in enumerate(answer):
            options = {**inputs.ONE_TOKEN, "logprob_token_ids": [token]}
            response = self._client.post(address, "/vlrl/generate", vllm_wire.pack(
                {"version": target.version, "options": options, "input": inputs.prompt_input(prompt, answer[:i])}))
            inputs.check_prompt(prompt, response["prompt"], i)
            measured.append(response["outputs"][0]["logprobs"][0])
        gaps = np.abs(np.array(measured, dtype=np.float64) - np.array(target.probe))
        return float(gaps.max()) if np.isfinite(gaps).all() else float("inf")

    # --- what the servers are ----------------------------------------------------------------------------------------

    def _way(self) -> str:
        if not self.policy.lora:
            return "full"
        from vlrl.engine.vllm.sync import why_merged

        reason = why_merged(self.policy, taken=self._slots > 0)  # a server with slots has a model that supports LoRA
        if not reason and self._slots < self._rank():
            reason = f"the servers have room for adapters of rank {self._slots} at most"
        if reason and comm.is_main():
            _log.warning("every sync transfers all weights with the adapter merged, because vLLM cannot load the "
                         "adapter itself: %s", reason)
        return "merged" if reason else "adapter"

    def _rank(self) -> int:
        return self.policy.model.peft_config[self.policy.model.active_adapter].r

    def _state(self, address: str) -> dict[str, Any]:
        state, wrong = state_and_mismatches(self._client, address, "engine.servers", self.folder.resolve(), {
            "dtype": self._dtype, "vocabulary": self.policy.base.config.get_text_config().vocab_size})
        if state.get("max_model_len", 0) < self.max_model_len:
            wrong.append(f"engine.max_model_len is {state.get('max_model_len')}, less than {self.max_model_len}")
        if self.way == "adapter" and state.get("lora_rank", 0) < self._rank():
            wrong.append(f"model.lora.rank is {self._rank()}, and it supports at most {state.get('lora_rank', 0)}")
        if wrong:
            raise ConfigError(f"the server {address} was started with other settings: {'; '.join(wrong)}. Start `vlrl "
                              "serve` with the config and settings of this run.")
        return state


def _sharded(policy: Policy) -> bool:
    return any(hasattr(p, "full_tensor") for p in policy.model.parameters())


def state_and_mismatches(client: ServerClient, address: str, setting: str, folder: Path,
                         expected: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Returns the state that a server reports, and a list of texts, one for each entry of `expected` that differs in
    this state. Another text is added if the server does not load weights from `folder`. `setting` is the setting
    that contains the address. Raises ConfigError for a server that was not started by `vlrl serve`."""
    try:
        state = client.get(address, "/vlrl/state")
    except TrainingError:
        state = None
    if not isinstance(state, dict) or "protocol" not in state:
        raise ConfigError(f"{setting}={address} is a server that `vlrl serve` did not start. Stop this server, and "
                          "start `vlrl serve` with this config")
    expected = {**expected, "protocol": vllm_wire.PROTOCOL, "logprobs_mode": "processed_logprobs",
                "extension": EXTENSION}
    wrong = [f"{name} is {state.get(name)} instead of {value}" for name, value in expected.items()
             if state.get(name) != value]
    if not any(folder.is_relative_to(root) for root in state.get("roots", ())):
        wrong.append(f"it loads weights from {', '.join(state.get('roots', ())) or 'no folder'}, not from {folder}")
    return state, wrong


def read_key(file: str, setting: str = "engine.key_file") -> str:
    """The servers' key, from the file `file` or, if that is "", from the environment variable VLRL_ENGINE_KEY ("" if
    not set). `setting` is the setting that names the file. Raises ConfigError for an unreadable file."""
    if not file:
        return os.environ.get(KEY, "")
    try:
        if (mode := os.stat(file).st_mode & 0o777) & 0o077:
            _log.warning("%s=%r can be read by users other than its owner (mode %o), and anyone with the key controls "
                         "the servers. Run chmod 600 %s", setting, file, mode, file)
        return Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{setting}={file!r} cannot be read: {error.strerror}. `vlrl serve` writes this "
                          "file. If the servers run on another host, copy the file to this host.") from None
