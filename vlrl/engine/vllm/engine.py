# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
# vLLM is not installed where the rest is checked
"""Generation by vLLM inside the training process, on the same device.

Each prompt and its media go in once per group and are computed once (prefix caching); vLLM expands them itself, to the
same ids that the trainer has, which is checked. Tokens come back with the log-probabilities they were sampled with, at
the temperature and without the banned ids. Rollout i of a group draws from a seed of its own, named by (seed, request
key, i), whatever runs beside it. An answer that goes on (after its thinking budget, or from an earlier step) is a new
request from its own text, on a stream of its own.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
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
from vlrl.engine.vllm.sync_check import SyncCheck
from vlrl.errors import ConfigError, TrainingError, VlrlError
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.monitoring.metrics import phase
from vlrl.types import Completion

_ENVIRONMENT = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # weights are handed over in this process
                "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1"}
_ON_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # binding makes the whole process eight times slower
_BANNED = float("-inf")
_loaders = itertools.count()


class VLLMEngine:
    """Engine over an in-process vLLM.

    policy: whose weights it samples with, after `sync`. folder: of this process; the model's config and processor are
    written there for vLLM to read. `episodes`: its prompts grow by turns. Raises ConfigError when vLLM cannot be
    started with the settings.
    """

    def __init__(self, policy: Policy, config: Config, folder: Path, episodes: bool = False):
        self.policy, self.config, self.seed, self.step = policy, config, config.seed, 0
        settings = config.engine
        self.max_model_len = model_length(config, policy.base.config, episodes)
        overlaps = config.asynchronous.max_staleness > 0  # it is to be awake while the policy learns
        self.rules = SamplingRules.of(with_own_processor(policy) if overlaps else policy, settings.top_p,
                                      settings.top_k,
                                      _BANNED)
        self._numbers = itertools.count()
        self._distributed = torch.distributed.is_initialized()
        self.abandoned = threading.Event()
        """Whether what is being generated is to be given up."""
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
        """Brings the policy's weights into vLLM; every cache of the old ones is dropped.

        Raises TrainingError when vLLM then reads a fixed answer to an image otherwise than the trainer.
        """
        with _explained(self.config, "take over the weights"), _bystander():
            self._wake("weights")
            self.weights.push(policy)
            self._wake("weights", "kv_cache")
            self._proof.check(policy, self.weights.logprobs, lambda: self.weights.compare(policy))
        self.policy, self.step, self._synced = policy, step, True

    def generate(self, requests: Sequence[Request], done: Done | None = None) -> list[list[Completion]]:
        """Returns `request.n` completions per request; `done` is called as whole requests come in. Raises Abandoned
        after `abandon`.
        """
        if not self._synced:
            self.sync(self.policy, self.step)
        for request in requests:
            check_length(self.max_model_len, request.prompt, request.sampling,
                         self.config.engine.max_model_len is not None)
        with _explained(self.config, "generate"), _bystander(), phase("generate"):
            self._wake("weights", "kv_cache")
            out = Generation(self, requests).run(done)
        if self._sleeps:
            self.llm.sleep(level=1)
            self._asleep = {"weights", "kv_cache"}
        return out

    def abandon(self) -> None:
        """Ends what another thread generates after its next token."""
        self.abandoned.set()

    def close(self) -> None:
        """Frees vLLM's memory. The engine cannot be used any more."""
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
        """Takes back the memory of those parts that sleep."""
        sleeping = [part for part in parts if part in self._asleep]
        if sleeping:
            self.llm.wake_up(sleeping)
            self._asleep.difference_update(sleeping)


class Generation:
    """The requests of one call of `generate`, as vLLM works on them."""

    def __init__(self, engine: VLLMEngine, requests: Sequence[Request]):
        self.engine, self.requests, self.vllm = engine, requests, engine.llm.llm_engine
        self.drafts = [Draft.all_of(request, engine.rules) for request in requests]
        self._waiting: dict[str, Callable[[Any], None]] = {}
        """What takes the result of each part that vLLM works on."""
        self._parts = [0] * len(requests)
        """Parts of each request that are not in yet."""

    def run(self, done: Done | None) -> list[list[Completion]]:
        """Returns the completions of all requests, in order."""
        out: list[list[Completion]] = [[] for _ in self.requests]
        try:
            for i, request in enumerate(self.requests):
                self._begin(i, request)
            left = {*range(len(self.requests))}
            while left:
                whole = sorted(i for i in left if not self._parts[i])
                left.difference_update(whole)
                for i in whole:
                    out[i] = checked_completions(self.drafts[i], self.requests[i].prompt)
                    if done and left:
                        done(i, out[i])
                for output in self._step() if left else ():
                    if output.finished:
                        self._waiting.pop(output.request_id)(output)
        finally:
            if self._waiting:
                self.vllm.abort_request([*self._waiting])
        return out

    def _step(self) -> Sequence[Any]:
        """Returns what vLLM has of each request after its next token."""
        if self.engine.abandoned.is_set():
            raise Abandoned(GIVEN_UP)
        return self.vllm.step()

    def _begin(self, i: int, request: Request) -> None:
        """Asks for the first part of every answer: in one piece where they all begin with the prompt."""
        drafts = self.drafts[i]
        if request.begun or not drafts:
            for draft in drafts:
                self._go_on(i, draft)
            return
        options = self._options(i, len(drafts), seed_of(self.engine.seed, request.key), drafts[0].room())

        def take(output: Any) -> None:
            for draft, piece in zip(drafts, sorted(output.outputs, key=lambda o: o.index), strict=True):
                self._take(i, draft, piece)

        self._ask(i, (), options, take)

    def _take(self, i: int, draft: Draft, output: Any) -> None:
        """Takes in a part of an answer; asks for the next one where it goes on."""
        draft.add(output.token_ids, [ps[t].logprob for ps, t in zip(output.logprobs, output.token_ids, strict=True)],
                  output.finish_reason == "stop")
        self._go_on(i, draft)

    def _go_on(self, i: int, draft: Draft) -> None:
        """Asks for the rest of an answer from its own text, after what is forced on it."""
        for place in draft.force():
            self._measure(i, draft, place)
        if draft.ended:
            return
        seed = seed_of(self.engine.seed, self.requests[i].key, draft.place, len(draft.tokens))
        self._ask(i, draft.tokens, self._options(i, 1, seed, draft.room()),
                  lambda output: self._take(i, draft, output.outputs[0]))

    def _measure(self, i: int, draft: Draft, place: int) -> None:
        """Asks for the log-probability of a forced token: one token is sampled in its place and dropped."""
        token = draft.tokens[place]
        options = measuring_options(self.requests[i].sampling, token, self.engine.rules)

        def take(output: Any) -> None:
            draft.logprobs[place] = output.outputs[0].logprobs[0][token].logprob

        self._ask(i, draft.tokens[:place], options, take)

    def _options(self, i: int, n: int, seed: int, room: int) -> dict[str, Any]:
        return sampling_options(self.requests[i].sampling, n, seed, self.engine.rules, room)

    def _ask(self, i: int, written: Sequence[int], options: dict[str, Any], take: Callable[[Any], None]) -> None:
        """Hands a prompt and the tokens written after it to vLLM; `take` gets the result."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt, name = self.requests[i].prompt, f"{next(self.engine._numbers)}"
        written = tuple(written)
        parameters = SamplingParams(**options, detokenize=bool(options["stop"]),
                                    output_kind=RequestOutputKind.FINAL_ONLY)

        def finished(output: Any) -> None:
            check_prompt(prompt, output.prompt_token_ids, len(written), self.requests[i].turns)
            self._parts[i] -= 1
            take(output)

        self.vllm.add_request(name, prompt_input(prompt, written), parameters,
                              lora_request=self.engine.weights.lora_request)
        self._waiting[name] = finished
        self._parts[i] += 1


# --- starting ---------------------------------------------------------------------------------------------------------


def start(policy: Policy, config: Config, folder: Path, max_model_len: int) -> Any:
    """Returns a vLLM over the config and processor that are written to `folder`; the policy's weights are still to
    come.
    """
    on_gpu = policy.device.type == "cuda"
    for name, value in (_ENVIRONMENT | ({} if on_gpu else _ON_CPU)).items():
        os.environ.setdefault(name, value)
    _torchcodec.hide_broken()
    from vllm import LLM, ModelRegistry

    from vlrl.engine.vllm.cpu_patches import use_own_generator, widen_heads
    from vlrl.engine.vllm.sync import lora_options, transfer_options

    widen_heads()
    use_own_generator()
    inside = config.engine.tensor_parallel == 1
    adapter = lora_options(policy)
    if inside:
        write_config(policy, folder)
        loading = _policy_loader(policy, merge=not adapter)
    else:
        weights.write_model(policy, folder, merge=not adapter)
        loading = "auto"
    name = type(policy.base).__name__
    if name in ModelRegistry.models:  # else a process is started for a look at it, which takes half of the whole time
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
    return LLM(**options(policy, config, folder, max_model_len), **adapter, **transfer_options(policy, inside),
               load_format=loading)


def _policy_loader(policy: Policy, merge: bool) -> str:
    """Returns name of a way to load a model in which it has the policy's weights: no file is written or read.

    vLLM's "dummy" would also fill buffers that no checkpoint holds, such as the means that pixels are normalised by.
    """
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    name = f"vlrl_{next(_loaders)}"

    @register_model_loader(name)
    class _Loader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            pass

        def load_weights(self, model: Any, model_config: Any) -> None:
            model.load_weights(weights.saved_tensors(policy, merge))

    return name


def write_config(policy: Policy, folder: Path) -> None:
    """Writes the config of the model and the processor with the settings of the run; no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = copy.deepcopy(policy.base.config)
    config.architectures = config.architectures or [type(policy.base).__name__]
    if hasattr(config, "quantization_config"):  # the weights that come are not rounded
        del config.quantization_config
    config.save_pretrained(folder)
    policy.processor.save_pretrained(folder)


def options(policy: Policy, config: Config, folder: Path, max_model_len: int) -> dict[str, Any]:
    """Keywords of vllm.LLM for the settings `engine.*`; those of a GPU are left out on a CPU."""
    settings, on_gpu = config.engine, policy.device.type == "cuda"
    out: dict[str, Any] = {
        "model": str(folder), "dtype": settings.dtype or str(policy.dtype).rpartition(".")[2], "seed": config.seed,
        "max_model_len": max_model_len, "max_num_seqs": settings.max_seqs, "generation_config": "vllm",
        "enforce_eager": settings.eager or not on_gpu, "logprobs_mode": "processed_logprobs",
        "enable_prefix_caching": True, "tensor_parallel_size": settings.tensor_parallel,
        "gpu_memory_utilization": settings.memory}  # on a CPU too, where it is the share of main memory
    if on_gpu:
        out["enable_sleep_mode"] = settings.sleep
    else:  # a prompt in pieces turns back its answers' random streams, which vLLM can do on a GPU alone
        out |= {"enable_chunked_prefill": False, "max_num_batched_tokens": max(max_model_len, 8192)}
    if torch.distributed.is_initialized():  # vLLM joins the trainer's group, and each process is an engine of its own
        out["distributed_executor_backend"] = "external_launcher"
    return out


@contextlib.contextmanager
def _bystander() -> Iterator[None]:
    """Undoes what vLLM sets for its whole process: random states, the setter of torch's threads.

    Not in a thread beside the update (async.*), which draws from these states meanwhile: generation leaves them alone
    (vllm_cpu_patches).
    """
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
    """Turns what vLLM raises into one line that names the setting to change."""
    try:
        yield
    except VlrlError:
        raise
    except Exception as error:
        kind = ConfigError if what == "start" else TrainingError
        raise kind(f"{_blamed(config, error)}: vLLM cannot {what}: {_reason(error)}") from error


def _blamed(config: Config, error: Exception) -> str:
    """Returns the setting to change, and how, for what vLLM raised."""
    settings, text = config.engine, str(error).lower()
    if "max_model_len" in text or "max seq len" in text:
        return (f"engine.max_model_len={settings.max_model_len or 'null'} (lower it, or limits.prompt_tokens and "
                f"rollout.max_new_tokens; or raise engine.memory={settings.memory:g})")
    if isinstance(error, torch.OutOfMemoryError) or "memory" in text:
        return (f"engine.memory={settings.memory:g} (more than the device has left: lower it, engine.max_seqs or "
                "train.tokens_per_batch; or give vLLM more where it says that it has too little)")
    if "tensor_parallel" in text or "tensor parallel" in text:
        return f"engine.tensor_parallel={settings.tensor_parallel} (change it)"
    return f"engine.name={settings.name} (or set engine.name=hf)"


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
