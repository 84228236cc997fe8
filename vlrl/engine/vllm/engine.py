# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is not installed where the rest is checked
"""Generation by vLLM inside the training process, on the same device.

Each prompt and its media are sent once per group and computed once (prefix caching). vLLM expands the image
placeholders itself; the engine checks that the resulting ids equal the trainer's. Tokens are returned with the
log-probabilities of the distribution they were sampled from, i.e. after temperature and banned ids. Rollout i of a
group is sampled with its own seed, derived from (seed, request key, i), whatever else is in the batch. If a completion
is continued (after its thinking budget, or from an earlier training step), a new request is made with the existing
tokens as prefix and with a separate random stream."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vlrl import _torchcodec
from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.engine.base import Done, Request
from vlrl.engine.copied_engine import GIVEN_UP, Abandoned, with_own_processor
from vlrl.engine.vllm import policy_weights as weights
from vlrl.engine.vllm.inputs import SamplingRules, check_lengths, completion_steps, model_length, prompt_input
from vlrl.engine.vllm.sync_check import SyncCheck
from vlrl.engine.vllm.wire import response_of
from vlrl.errors import ConfigError, TrainingError, VlrlError
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over in this process
                "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # binding makes the whole process eight times slower
_loaders = itertools.count()


class VLLMEngine:
    """An engine that generates with vLLM in the training process.

    policy: the policy to sample from, once `sync` has transferred its weights. folder: a folder of this process, to
    which the model's config and processor are written for vLLM. episodes: whether prompts grow over the turns of
    episodes. Raises ConfigError if vLLM cannot be started with the settings."""

    def __init__(self, policy: Policy, config: Config, folder: Path, episodes: bool = False):
        self.policy, self.config, self.seed, self.step = policy, config, config.seed, 0
        settings = config.engine
        self.max_model_len = model_length(config, policy.base.config, episodes)
        overlaps = config.asynchronous.max_staleness > 0  # then it generates during the update
        self.rules = SamplingRules.of(with_own_processor(policy) if overlaps else policy, settings.top_p,
                                      settings.top_k)
        self._numbers = itertools.count()
        self._distributed = torch.distributed.is_initialized()
        self.abandoned = threading.Event()  # set to end the running generation
        self._sleeps = settings.sleep and policy.device.type == "cuda" and not overlaps
        self._asleep: set[str] = set()
        self._synced = False
        dtype = getattr(torch, settings.dtype) if settings.dtype else None
        encode = Encoder(policy.processor, policy.family, policy.positions, config)
        self._proof = SyncCheck.of(encode, settings.proof, dtype, episodes)
        with _explained(config, "start"), _bystander(), comm.transport_errors():
            self.llm: Any = start(policy, config, folder / "model", self.max_model_len)
        from vlrl.engine.vllm.sync import WeightSync

        self.weights: Any = WeightSync(self.llm, policy, folder)

    def sync(self, policy: Policy, step: int) -> None:
        """Loads the policy's weights into vLLM, and empties all caches that were computed with the old weights. Raises
        TrainingError if vLLM and the trainer then assign different log-probabilities to a fixed answer."""
        with _explained(self.config, "load the policy's weights"), _bystander():
            self._wake("weights")
            self.weights.push(policy)
            self._wake("weights", "kv_cache")
            self._proof.check(policy, self.weights.logprobs, lambda: self.weights.compare(policy))
        self.policy, self.step, self._synced = policy, step, True

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns the `request.n` completions of each request. Raises Abandoned once `abandon` was called. `done` is
        called when a request is complete; see Engine.generate."""
        if not self._synced:
            self.sync(self.policy, self.step)
        check_lengths(requests, self.max_model_len, self.config.engine.max_model_len is not None)
        with _explained(self.config, "generate"), _bystander(), phase("generate"):
            self._wake("weights", "kv_cache")
            out = Generation(self, requests).run(done)
        if self._sleeps:
            self.llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}
        return out

    def abandon(self) -> None:
        """Called from another thread: the running generation raises Abandoned after its next token."""
        self.abandoned.set()

    def close(self) -> None:
        """Frees vLLM's memory. The engine cannot be used afterwards."""
        llm, self.llm = self.llm, None
        if llm is None:
            return
        self.weights.close()
        self.weights = None
        client = llm.llm_engine.engine_core
        if self._distributed:  # its own way out would end the trainer's process group
            client._finalizer.detach()
            client.engine_core.model_executor.shutdown()
        else:
            client.shutdown()

    def _wake(self, *parts: str) -> None:
        sleeping = [part for part in parts if part in self._asleep]
        if sleeping:
            self.llm.wake_up(sleeping)
            self._asleep.difference_update(sleeping)


class Generation:
    """Runs the requests of one `generate` call in vLLM."""

    def __init__(self, engine: VLLMEngine, requests: Sequence[Request]):
        self.engine, self.requests, self.vllm = engine, requests, engine.llm.llm_engine
        self._steps = [completion_steps(request, engine.rules, engine.seed) for request in requests]
        self._calls: dict[str, tuple[int, int, dict[str, Any]]] = {}
        """The running calls by vLLM's id: (index of the request, index of the call in its round, sampling options of
        the call). A round is a list of calls that `completion_steps` yields."""
        self._responses: list[Any] = [None] * len(requests)
        self._out: list[list[Completion]] = [[] for _ in requests]

    def run(self, done: Done | None) -> list[list[Completion]]:
        """Runs all requests, and returns their completions in order."""
        try:
            left, whole = len(self.requests), [i for i in range(len(self.requests)) if self._advance(i)]
            while left := left - len(whole):
                if done:
                    for i in whole:
                        done(i, self._out[i])
                whole = sorted(self._step())
        finally:
            if self._calls:
                self.vllm.abort_request([*self._calls])
        return self._out

    def _step(self) -> list[int]:
        if self.engine.abandoned.is_set():
            raise Abandoned(GIVEN_UP)
        whole = []
        for output in self.vllm.step():
            if output.finished:
                i, position, options = self._calls.pop(output.request_id)
                self._responses[i][position] = response_of(output, options)
                if None not in self._responses[i] and self._advance(i):
                    whole.append(i)
        return whole

    def _advance(self, i: int) -> bool:
        """Sends the next round of calls of request `i` to vLLM. Returns True if the request is complete, so that no
        round remains."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        try:
            calls = self._steps[i].send(self._responses[i])
        except StopIteration as end:
            self._out[i] = end.value
            return True
        self._responses[i] = [None] * len(calls)
        for position, (written, options) in enumerate(calls):
            name = str(next(self.engine._numbers))
            self.vllm.add_request(name, prompt_input(self.requests[i].prompt, written),
                                  SamplingParams(**options, output_kind=RequestOutputKind.FINAL_ONLY),
                                  lora_request=self.engine.weights.lora_request)
            self._calls[name] = i, position, options
        return False


# --- starting ---------------------------------------------------------------------------------------------------------


def start(policy: Policy, config: Config, folder: Path, max_model_len: int) -> Any:
    """Starts vLLM and returns its vllm.LLM. The model's config and processor are written to `folder`. With tensor
    parallelism the weights are written too; otherwise vLLM reads the weights from the policy in memory."""
    on_gpu = policy.device.type == "cuda"
    for name, value in (_ENVIRONMENT | ({} if on_gpu else _ON_CPU)).items():
        os.environ.setdefault(name, value)
    _torchcodec.hide_broken()
    from vllm import LLM, ModelRegistry

    from vlrl.engine.vllm.cpu_patches import use_own_generator, widen_heads
    from vlrl.engine.vllm.sync import lora_options, transfer_options
    from vlrl.engine.vllm.worker import register_loader

    widen_heads()
    use_own_generator()
    inside = config.engine.tensor_parallel == 1
    adapter = lora_options(policy)
    if inside:
        weights.write_config(policy, folder)
        loading = f"vlrl_{next(_loaders)}"  # no file of weights is written or read
        register_loader(loading, lambda model: model.load_weights(weights.saved_tensors(policy, merge=not adapter)))
    else:
        weights.write_model(policy, folder, merge=not adapter)
        loading = "auto"
    name = type(policy.base).__name__
    if name in ModelRegistry.models:  # else vLLM starts a process to inspect it, half of the whole startup time
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    return LLM(**options(policy, config, folder, max_model_len), **adapter, **transfer_options(policy, inside),
               load_format=loading)


def options(policy: Policy, config: Config, folder: Path, max_model_len: int) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for the settings `engine.*`. On a CPU, arguments that need a GPU are left out."""
    settings, on_gpu = config.engine, policy.device.type == "cuda"
    out: dict[str, Any] = {
        "model": str(folder), "dtype": settings.dtype or str(policy.dtype).rpartition(".")[2], "seed": config.seed,
        "max_model_len": max_model_len, "max_num_seqs": settings.max_seqs, "generation_config": "vllm",
        "enforce_eager": settings.eager or not on_gpu, "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True, "tensor_parallel_size": settings.tensor_parallel,
        "gpu_memory_utilization": settings.memory}  # on a CPU: the share of main memory
    if on_gpu:
        out["enable_sleep_mode"] = settings.sleep
    else:  # a chunked prompt rewinds the random streams of its completions, which vLLM supports only on a GPU
        out |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_model_len, 8192)}
    if torch.distributed.is_initialized():  # vLLM joins the trainer's group, and each process is an engine of its own
        out["distributed_executor_backend"] = "external_launcher"
    return out


@contextlib.contextmanager
def _bystander() -> Iterator[None]:
    """Context manager that restores, on exit, what vLLM changes in this process: the random states and the function
    torch.set_num_threads. Does nothing in a thread that generates during the update (async.*), because restoring
    the random states would disturb the training thread, which uses them at the same time. In such a thread
    cpu_patches.py keeps generation from changing them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    states = random.getstate(), np.random.get_state()
    setter = torch.set_num_threads
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_num_threads = setter


@contextlib.contextmanager
def _explained(config: Config, what: str) -> Iterator[None]:
    try:
        yield
    except VlrlError:
        raise
    except Exception as error:
        kind = ConfigError if what == "start" else TrainingError
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}".removesuffix(": ")
        raise kind(f"{_blamed(config, error)}: vLLM cannot {what}: {reason}") from error


def _blamed(config: Config, error: Exception) -> str:
    settings, text = config.engine, str(error).lower()
    if "max_model_len" in text or "max seq len" in text:
        return (f"engine.max_model_len={settings.max_model_len or 'null'} (lower this setting, or limits.prompt_tokens "
                f"and rollout.max_new_tokens; or raise engine.memory={settings.memory:g})")
    if isinstance(error, torch.OutOfMemoryError) or "memory" in text:
        return (f"engine.memory={settings.memory:g} (more memory than the device has left: lower this setting, "
                "engine.max_seqs or train.tokens_per_batch. If vLLM reports too little memory, raise engine.memory)")
    if "tensor_parallel" in text or "tensor parallel" in text:
        return f"engine.tensor_parallel={settings.tensor_parallel} (set another value)"
    return f"engine.name={settings.name} (set engine.name=hf to generate without vLLM)"
