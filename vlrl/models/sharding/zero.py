# pyright: reportMissingImports=false
"""DeepSpeed's ZeRO (train.sharding=zero2 or zero3); imported only if one of them is used.

zero2 shards gradients and AdamW's moments over the ranks, zero3 also the weights. DeepSpeed sums gradients in each
micro-batch, clips them and runs the optimizer step. Losses, learning rates and checkpoints are the same as without
sharding: for a checkpoint tensors are gathered one at a time, and only the main process keeps them."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.models.logprobs import TokenStats
from vlrl.models.policy import Policy
from vlrl.models.shards import Shards

_MOMENTS = ("exp_avg", "exp_avg_sq")
BUCKET = 2**26  # number of gradient values that are reduced in one collective


class _PassModule(torch.nn.Module):
    """Wraps the model for DeepSpeed, which needs a complete pass to happen within one call of forward."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


class Zero(Shards):
    """A policy's model and optimizer in a DeepSpeed engine."""

    steps = True

    def __init__(self, engine: Any, stage: int):
        self.engine, self.stage = engine, stage
        self._open = contextlib.ExitStack()
        self.gathered = False

    def run(self, work: Callable[[], TokenStats]) -> TokenStats:
        if self.gathered:
            return work()

        def plain() -> tuple[Any, ...]:
            stats = work()
            return stats.logprobs, stats.entropy, dict(stats.more)

        return TokenStats(*self.engine(plain))

    def backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass and adds the gradients of all ranks. A loss that is not finite gives NaN gradients."""
        factor = torch.where(loss.detach().isfinite(), float(comm.world()), math.nan)  # DeepSpeed averages over ranks
        self.engine.backward(loss * factor, scale_wrt_gas=False)

    def step(self) -> float:
        self.engine.step()
        return math.inf if self.engine.optimizer.overflow else float(self.engine.get_global_grad_norm())

    def gather(self) -> None:
        self.scatter()
        if self.stage == 3:
            from deepspeed.runtime.zero.stage3 import unwrap_model_for_generation

            self._open.enter_context(unwrap_model_for_generation(self.engine))
            self.gathered = True

    def scatter(self) -> None:
        self._open.close()
        self.gathered = False

    def whole(self, weight: torch.Tensor) -> torch.Tensor | None:
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight], enabled=hasattr(weight, "ds_id")):
            return weight.detach().to("cpu", copy=True) if comm.is_main() else None

    def leaf(self, value: Any) -> Any:
        return value.whole() if isinstance(value, ShardedMoment) else value

    def load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        optimizer.load_state_dict(state)

    def fragment(self, parameter: Any) -> tuple[torch.Tensor, slice, slice] | None:
        """This rank's part of a weight, as (flat tensor of several weights, slice of the flat tensor, slice of the
        flattened weight); None if this rank has no part of the weight."""
        inner = self.engine.optimizer
        if self.stage == 3:
            group, start, size = inner.grad_position[inner.get_param_id(parameter)]
            first = size * comm.rank()
            size = min(size, parameter.ds_numel - first)
            flat = inner.fp32_partitioned_groups_flat[group]
        elif (link := parameter._hp_mapping) is not None:
            start, size = link.hp_fragment_address.start, link.hp_fragment_address.numel
            first, flat = link.lp_fragment_address.start, inner.single_partition_of_fp32_groups[link.param_group_index]
        else:
            return None
        return (flat, slice(start, start + size), slice(first, first + size)) if size > 0 else None

    def flats(self) -> list[torch.Tensor]:
        """This rank's parts of all trainable parameters, as the flat tensors that DeepSpeed's AdamW updates."""
        inner = self.engine.optimizer
        return list(inner.fp32_partitioned_groups_flat if self.stage == 3 else inner.single_partition_of_fp32_groups)


@dataclass(frozen=True, eq=False)
class ShardedMoment:
    """One of the two AdamW moments of one weight, sharded over the ranks."""

    optimizer: ZeroOptimizer
    parameter: Any
    name: str

    def whole(self) -> torch.Tensor | None:
        """The gathered moment, in main memory, on the main process; None on other processes. Called on all ranks."""
        shape = _shape(self.parameter)
        total = torch.zeros(shape.numel(), device=self.parameter.device)
        if part := self.optimizer.zero.fragment(self.parameter):
            flat, there, here = part
            total[here] = self.optimizer.inner.state[flat][self.name][there]
        torch.distributed.all_reduce(total)
        return total.view(shape).cpu() if comm.is_main() else None


class ZeroOptimizer:
    """Gives AdamW inside a DeepSpeed engine the interface of an optimizer. `Zero.step` runs the steps of AdamW."""

    def __init__(self, zero: Zero, inner: torch.optim.Optimizer, groups: list[list[Any]]):
        self.zero, self.inner, self.groups = zero, inner, groups

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> Any:
        """Registers a hook that is called before each step of AdamW."""
        return self.inner.register_step_pre_hook(hook)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Does nothing: `Zero.step` clears the gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The state of an unsharded AdamW, with a ShardedMoment in place of each tensor (see Zero.leaf)."""
        numbers = iter(range(sum(map(len, self.groups))))
        groups = [{**{k: v for k, v in inner_group.items() if k != "params"}, "params": [next(numbers) for _ in own]}
                  for inner_group, own in zip(self.inner.param_groups, self.groups, strict=True)]
        flats = [flat for flat in self.zero.flats() if flat in self.inner.state]
        parameters = [p for group in self.groups for p in group] if flats else []
        return {"state": {i: {"step": self.inner.state[flats[0]]["step"].clone(),
                              **{name: ShardedMoment(self, p, name) for name in _MOMENTS}}
                          for i, p in enumerate(parameters)}, "param_groups": groups}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the state of an unsharded AdamW. Each rank keeps its part."""
        for inner_group, given in zip(self.inner.param_groups, state["param_groups"], strict=True):
            inner_group.update({k: copy.deepcopy(v) for k, v in given.items() if k != "params"})
        if not state["state"]:
            return
        step = next(iter(state["state"].values()))["step"]
        for flat in self.zero.flats():
            self.inner.state[flat] = {"step": step.clone().to(flat.device),
                                      **{name: torch.zeros_like(flat) for name in _MOMENTS}}
        for i, parameter in enumerate(p for group in self.groups for p in group):
            part = self.zero.fragment(parameter)
            for name in _MOMENTS if part and i in state["state"] else ():
                flat, there, here = part  # type: ignore[misc]
                self.inner.state[flat][name][there] = state["state"][i][name].flatten()[here].to(flat.device)


def _shape(parameter: Any) -> torch.Size:
    return parameter.ds_shape if hasattr(parameter, "ds_shape") else parameter.shape


def start(policy: Policy, optimizer: torch.optim.Optimizer, config: Config) -> Any:
    """Shards the policy over all ranks with DeepSpeed. Returns the optimizer that replaces `optimizer`. A frozen copy
    of the model as reference is not sharded."""
    if policy.device.type == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)
    if policy.device.type == "cpu":  # else it compiles collectives of its own, for minutes
        ops: Any = deepspeed.ops
        ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    stage = int(config.train.sharding[-1])
    groups = [list(group["params"]) for group in optimizer.param_groups]
    if policy._reference is not None:
        policy._reference.to(policy.device)
    engine = deepspeed.initialize(model=_PassModule(policy.model), optimizer=optimizer, config={
        "train_micro_batch_size_per_gpu": 1, "managed_gradient_accumulation": False, "steps_per_print": None,
        "gradient_clipping": config.train.max_grad_norm, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # prefetching by the order of earlier passes would differ between ranks with different numbers of passes
        "zero_optimization": {"stage": stage, "overlap_comm": False, "reduce_bucket_size": BUCKET,
                              "stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0}})[0]
    zero = Zero(engine, stage)
    if stage == 3:
        _keep(engine.optimizer, policy.base.get_output_embeddings())
    policy.shards = zero
    return ZeroOptimizer(zero, optimizer, groups)


def _keep(optimizer: Any, layer: Any) -> None:
    """Keeps the output layer's weights complete on each rank. The layer is called once per chunk of tokens, and ranks
    have different numbers of chunks."""
    for parameter in layer.parameters() if layer is not None else ():
        if not parameter.ds_persist:
            parameter.ds_persist = True
            optimizer.persistent_parameters.append(parameter)
