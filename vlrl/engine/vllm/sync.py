# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Transfers the trainer's weights to an in-process `vllm.LLM` after every update.

The method of transfer (`way`) depends on what is trained:

- **full**: every weight, under the name in saved checkpoints, by vLLM's own in-place reload;
- **adapter**: only the LoRA matrices, as an adapter with a new id that replaces the previous adapter. vLLM is started
  with the arguments of `lora_options`, and with the weights of the base model;
- **merged**: every weight with the adapter merged, if vLLM cannot load the adapter itself.

If vLLM's worker is this process, it reads the weights from an iterator. If the workers are other processes and vLLM was
started with the arguments of `transfer_options`, CUDA IPC is used (not tested here, because it needs GPUs). Otherwise
the weights are written to files in shared memory. Afterwards all caches are emptied, because keys, values and image
features of old weights must not be used. vLLM would even crash on images that it has cached. On CPUs the packed copy of
the output layer's weight is rebuilt."""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from vlrl.engine.vllm.policy_weights import adapted_layers, gathered, saved_tensors, write_adapter, write_weights
from vlrl.engine.vllm.weights import EngineWeights, Pairs
from vlrl.engine.vllm.worker import repack_heads
from vlrl.errors import TrainingError
from vlrl.models.policy import Policy
from vlrl.types import Prompt

Way = Literal["full", "adapter", "merged"]
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # the LoRA ranks for which vLLM can reserve memory
_SHARED = Path("/dev/shm")
_PLAIN = ("use_dora", "lora_bias", "modules_to_save", "trainable_token_indices", "target_parameters", "use_qalora",
          "layer_replication", "alora_invocation_tokens", "rank_pattern", "alpha_pattern")
"""Fields of a LoraConfig that vLLM does not support."""


def why_merged(policy: Policy, taken: bool | None = None) -> str:
    """The reason why vLLM cannot load the policy's adapter, so that it must be merged; "" if vLLM can load it. taken:
    whether vLLM supports adapters for this model; None = ask the installed vLLM."""
    config = policy.model.peft_config[policy.model.active_adapter]
    used = [name for name in _PLAIN if getattr(config, name, None)]
    if used:
        return f"the adapter uses {', '.join(used)}"
    if config.r > _RANKS[-1]:
        return f"the adapter's rank {config.r} is above {_RANKS[-1]}"
    parts = {policy.family.part_of(name) for name in adapted_layers(policy)} - {"language"}
    if parts:
        return f"the adapter changes the {' and the '.join(sorted(parts))}"
    taken = _takes_adapters(policy) if taken is None else taken
    return "" if taken else "vLLM does not support adapters for this model"


def way(policy: Policy) -> Way:
    """The method by which the weights of a policy are transferred: "full", "adapter" or "merged"."""
    if not policy.lora:
        return "full"
    return "merged" if why_merged(policy) else "adapter"


def lora_options(policy: Policy) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM that enable LoRA; {} unless only the policy's adapter is transferred."""
    if way(policy) != "adapter":
        return {}
    rank = policy.model.peft_config[policy.model.active_adapter].r
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": next(r for r in _RANKS if r >= rank)}


def transfer_options(policy: Policy, inside: bool) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for a transfer by CUDA IPC; {} if CUDA IPC is not used. `inside`: whether vLLM's
    worker is this process. CUDA IPC also needs VLLM_ALLOW_INSECURE_SERIALIZATION=1."""
    if inside or policy.device.type != "cuda" or way(policy) == "adapter":
        return {}
    return {"weight_transfer_config": {"backend": "ipc"}}


class WeightSync:
    """Transfers the policy's weights to an in-process vLLM. `seconds` is the duration of the last transfer. folder: a
    scratch folder of this process."""

    def __init__(self, llm: Any, policy: Policy, folder: Path):
        self.llm, self.folder, self.pushes, self.seconds = llm, folder, 0, 0.0
        self.way: Way = way(policy)
        has_slots = llm.llm_engine.vllm_config.lora_config is not None
        if self.way == "adapter" and not has_slots:
            self.way = "merged"
        self._request: Any = None
        self._sender: Any = None

    @property
    def lora_request(self) -> Any:
        """The `lora_request` argument of `llm.generate`; None without an adapter or before the first transfer."""
        return self._request

    @property
    def inside(self) -> bool:
        """Whether vLLM's only worker is this process."""
        engine = self.llm.llm_engine
        return hasattr(engine, "model_executor") and engine.vllm_config.parallel_config.world_size == 1

    @torch.no_grad()
    def push(self, policy: Policy) -> None:
        """Transfers the weights to vLLM and empties all caches. Raises TrainingError if vLLM cannot load the weights. A
        collective call under FSDP. Nothing may be generated at the same time."""
        begun = time.perf_counter()
        try:
            with _quiet("vllm.model_executor.model_loader.reload.layerwise"):  # layers without weights of their own
                (self._swap if self.way == "adapter" else self._reload)(policy)
        except (ValueError, RuntimeError, KeyError, OSError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise TrainingError(f"vLLM cannot load the policy's weights: {first.rstrip('.')}. Set engine.name=hf, or "
                                "check whether vLLM supports the model.") from error
        if not self.llm.reset_prefix_cache():
            raise TrainingError("vLLM keeps the KV cache of the old weights, as completions are still being generated. "
                                "Sync an engine only when it has finished or aborted all requests.")
        self.llm.reset_mm_cache()
        self.llm.llm_engine.reset_encoder_cache()
        self.pushes += 1
        self.seconds = time.perf_counter() - begun

    def close(self) -> None:
        """Removes the adapter files of the last transfer."""
        shutil.rmtree(self.folder / "adapters", ignore_errors=True)

    def _reload(self, policy: Policy) -> None:
        if self.inside:
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": saved_tensors(policy)})
        elif self.llm.llm_engine.vllm_config.weight_transfer_config is not None:
            self._sender = self._sender or _ipc_sender(self.llm, policy)
            self._sender.send_weights()
        else:
            config = self.llm.llm_engine.vllm_config.model_config
            own = config.model  # a reload sets it to the temporary folder
            in_memory = _SHARED.is_dir() and shutil.disk_usage(_SHARED).free > 2**30
            with tempfile.TemporaryDirectory(prefix="vlrl-weights-", dir=_SHARED if in_memory else self.folder) as name:
                write_weights(policy, Path(name), dtype=config.dtype)
                self.llm.collective_rpc("reload_weights", kwargs={"weights_path": name})
            config.model = own
        from vllm.platforms import current_platform

        if current_platform.is_cpu():
            self.llm.apply_model(repack_heads)

    def _swap(self, policy: Policy) -> None:
        from vllm.lora.request import LoRARequest

        number = self.pushes + 1
        folder = self.folder / "adapters" / str(number)
        write_adapter(policy, folder)
        engine, before = self.llm.llm_engine, self._request
        if before is not None:
            engine.remove_lora(before.lora_int_id)
        self._request = LoRARequest(f"step-{number}", number, str(folder))
        if not engine.add_lora(self._request):
            raise RuntimeError(f"vLLM did not load the adapter in {folder}")
        if before is not None:
            shutil.rmtree(before.lora_path, ignore_errors=True)

    def logprobs(self, prompt: Prompt, answer: Sequence[int] | np.ndarray) -> np.ndarray:
        """[T] log-probabilities of an answer's tokens, computed by vLLM at temperature 1 without banned tokens.

        Each token is requested separately, as for completions: with adapters, vLLM's log-probabilities of prompt tokens
        can be wrong or crash the engine, if other requests run at the same time or there are more tokens than
        engine.max_seqs."""
        from vllm import SamplingParams

        from vlrl.engine.vllm.inputs import ONE_TOKEN, prompt_input

        tokens = [int(i) for i in answer]
        inputs = [prompt_input(prompt, tokens[:i]) for i in range(len(tokens))]
        wanted = [SamplingParams(**ONE_TOKEN, logprob_token_ids=[token]) for token in tokens]
        outputs = self.llm.generate(inputs, wanted, use_tqdm=False, lora_request=self._request)
        return np.array([out.outputs[0].logprobs[0][token].logprob for out, token in zip(outputs, tokens, strict=True)],
                        dtype=np.float64)

    def compare(self, policy: Policy) -> Pairs:
        """Yields (name, the policy's tensor, vLLM's tensor) for all weights that can be found in vLLM. The tensors of
        vLLM are those with which it computes: slices of fused layers, and the unpacked contents of packed copies.
        With several workers nothing is yielded."""
        if not self.inside:
            return
        engine = EngineWeights(self.llm.apply_model(lambda model: model)[0])
        for name, tensor in saved_tensors(policy, merge=self.way == "merged"):
            theirs = engine.of(name, tensor.shape)
            if theirs is not None:
                yield name, tensor, theirs
        embedding = policy.base.get_input_embeddings().weight
        head = policy.base.get_output_embeddings()
        if head is not None and head.weight is embedding:
            yield from engine.tied_head(gathered(embedding))
        if self.way == "adapter":
            for path, layer in adapted_layers(policy).items():
                for name in layer.active_adapters:
                    yield from engine.adapter(path, layer, name)


def _ipc_sender(llm: Any, policy: Policy) -> Any:
    """Creates vLLM's engine that transfers weights between processes on the same GPU. Not tested: it needs GPUs."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo, IPCTrainerWeightTransferEngine

    class Source(WeightSource):
        def metadata(self) -> list[Any]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            dtype = llm.llm_engine.vllm_config.model_config.dtype
            return ((name, tensor.to(dtype)) for name, tensor in saved_tensors(policy))

    class Client:
        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
            llm.init_weight_transfer_engine({"init_info": init_info})

        def start_weight_update(self) -> None:
            llm.start_weight_update()

        def update_weights(self, update_info: Any) -> None:
            llm.update_weights({"update_info": update_info})

        def finish_weight_update(self, weight_version: str | None = None) -> None:
            llm.finish_weight_update(weight_version)

    info = IPCTrainerInitInfo(rank=policy.accelerator.process_index, packed=True)
    return IPCTrainerWeightTransferEngine.trainer_init(info, client=Client(), source=Source())


def _takes_adapters(policy: Policy) -> bool:
    from vllm.model_executor.models import ModelRegistry, supports_lora

    names = policy.base.config.architectures or [type(policy.base).__name__]
    known = [ModelRegistry.models[name] for name in names if name in ModelRegistry.models]
    return bool(known) and supports_lora(known[0].load_model_cls())


@contextlib.contextmanager
def _quiet(name: str) -> Iterator[None]:
    log = logging.getLogger(name)
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
