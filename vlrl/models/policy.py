"""The model being trained, with its reference model, log-probabilities and saving. `load` makes it from a config."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from safetensors.torch import save_file

from vlrl.config.registry import Table
from vlrl.config.schema import Config, TrainSettings
from vlrl.config.sections import HEADS, WITHOUT_HEAD, head_of
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.models import attention, shards
from vlrl.models import cost as balance
from vlrl.models.families import Family, family_in, sync_tilings
from vlrl.models.flops import Cost, cost_model, patches_of
from vlrl.models.loading import ADAPTERS, Quantized, choose_trained, compute_dtype, load_model, load_processor
from vlrl.models.logprobs import Head, Statistic, TokenStats, answer_states, token_stats
from vlrl.models.packing import Batch, Piece, make_batch, pieces_of, plan, with_idle
from vlrl.models.saving import write_model
from vlrl.types import Prompt

if TYPE_CHECKING:  # few runs train a head
    from vlrl.models import heads

_CACHES = Table({"features": "vlrl.models.vision_cache:make_cache"})
"""Function that creates the cache for features of a frozen vision tower (model.feature_cache_mib)."""


class Policy:
    """A vision-language model, its processor, and its trainable parameters. `model` is the transformers model, wrapped
    by PEFT under LoRA. Trainable parameters are float32 and are computed in `dtype` under autocast. Frozen parameters
    are stored in `dtype`, or in 4 bits (`quantized`)."""

    def __init__(self, model: Any, processor: Any, family: Family, accelerator: Accelerator, dtype: torch.dtype,
                 quantized: Quantized | None = None, features: Any = None,
                 head: heads.Head | None = None):
        self.model, self.processor, self.family = model, processor, family
        self.accelerator, self.dtype, self.device = accelerator, dtype, accelerator.device
        base = self.base
        vocabulary, known = base.config.get_text_config().vocab_size, len(processor.tokenizer)
        banned = {*family.vision_ids(processor), *range(known, vocabulary)}
        self.banned = torch.tensor(sorted(banned), dtype=torch.long, device=self.device)
        """Token ids that are never sampled and get probability 0: vision tokens, and ids unknown to the tokenizer."""
        self.vocabulary = vocabulary  # number of rows of the output layer
        self.eos = _eos_ids(base, processor.tokenizer) | {family.end_id(processor)}
        self.quantized, self.features, self.head = quantized, features, head
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=dtype == torch.float16)
        self.scaler.scale(torch.zeros((), device=self.device))  # creates its tensors, even on ranks without loss
        self.idle: Prompt | None = None  # prompt of idle micro-batches under FSDP (packing.with_idle); else None
        self.most_tokens: int | None = None
        """Token limit of a micro-batch, lowered when memory runs out; None = train.tokens_per_batch."""
        self.shards: shards.Shards | None = None  # the sharded model; None if the model is not sharded over ranks
        self._reference: Any = None
        self.moving_reference: dict[str, torch.Tensor] = {}
        """Weights of the moving reference by parameter name; see `start_moving_reference`."""
        self.swapped = False  # whether the reference's weights temporarily replace the trained weights
        self.updating = False
        """Whether an update may have changed the weights of the policy or reference since the last completed step."""

    @property
    def choices(self) -> int:
        """How many token ids can be sampled."""
        return self.vocabulary - len(self.banned)

    @property
    def base(self) -> Any:
        """The transformers model without PEFT's wrapper."""
        return _unwrapped(self.model)

    @property
    def lora(self) -> bool:
        return hasattr(self.model, "disable_adapter")

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """(name, parameter) of each trainable parameter, in a fixed order."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def positions(self, ids: torch.Tensor, types: torch.Tensor | None, mm: Any) -> np.ndarray:
        """[R, T] rotary positions of one sequence; see Family.positions."""
        return self.family.positions(self.base, ids, types, mm)

    def layout(self, wanted: str) -> str:
        """The layout of training rows: `wanted` (train.packing), or "padded" if the family supports no shared rows."""
        return wanted if self.family.shared else "padded"

    def cost(self, prompt: Prompt, answers: Sequence[int]) -> float:
        """Cost of training on a prompt with completions of the lengths `answers`. The unit is FLOPs, or tokens if the
        model family is unknown."""
        if not self.family.known:
            return balance.tokens(prompt, answers)
        return self._operations.of(len(prompt), patches_of(prompt.mm, self.base.config), answers)

    def plan(self, prompts: Sequence[Prompt], answers: Sequence[np.ndarray], settings: TrainSettings,
             limit: int | None = None, shown: Sequence[Prompt | None] = (),
             units: Sequence[int] = ()) -> list[list[Piece]]:
        """Cuts completions into pieces and assigns them to micro-batches of at most `limit` tokens. Called on every
        rank. `limit` is train.tokens_per_batch by default. For `shown` and `units` see packing.pieces_of."""
        limit = limit or settings.tokens_per_batch
        pieces = pieces_of(prompts, answers, limit, shown, units)
        return self.fill(plan(pieces, limit, self.layout(settings.packing), self.cost))

    def fill(self, parts: list[list[Piece]]) -> list[list[Piece]]:
        """Returns `parts`, the pieces of each micro-batch, for training. Under FSDP, idle micro-batches are added so
        that all ranks have the same number of micro-batches (packing.with_idle)."""
        return parts if self.idle is None else with_idle(parts, max(comm.gather(len(parts))), self.idle)

    def pack(self, pieces: Sequence[Piece], settings: TrainSettings) -> Batch:
        """Makes the Batch of one micro-batch, in the layout of training."""
        return make_batch(pieces, self.layout(settings.packing), settings.attention)

    @functools.cached_property
    def _operations(self) -> Cost:
        return cost_model(self.model, self.family)

    def autocast(self) -> Any:
        """A context manager: autocast to the compute type, or nothing if the compute type is float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)  # accelerate's has no float16 on a CPU

    def inputs(self, packed: dict[str, Any], base: Any = None) -> dict[str, Any]:
        """Keyword arguments for a model's forward, from `packed`, the inputs of a Batch. `base`: the model without
        PEFT's wrapper; None = the policy's model. VisualInputs (key "visuals") are replaced by their features. A
        reference model gets the features from the policy's frozen vision tower."""
        if "visuals" not in packed:
            return self.family.encode(base or self.base, packed)
        assert self.features is not None
        rest = {k: v for k, v in packed.items() if k != "visuals"}
        return {**rest, "mm_encoder_outputs": self.features.outputs(self.base, packed["visuals"])}

    def logprobs(self, batch: Batch, temperature: float, model: Any = None,
                 more: Mapping[str, Statistic] | None = None, states: bool = False, second: Any = None) -> TokenStats:
        """TokenStats (log-probability, entropy, `more` statistics) of every completion token, under this policy or
        under `model`. `states`: whether to return the inputs of the output layer too. `second`: a second model, for
        statistics that compare two models."""
        engine = shards.engine_of(self.shards)
        if engine and model is None:
            return engine.run(lambda: self._logprobs(batch, temperature, self.model, more))
        return self._logprobs(batch, temperature, model or self.model, more, states, second)

    def _logprobs(self, batch: Batch, temperature: float, model: Any, more: Mapping[str, Statistic] | None,
                  states: bool = False, second: Any = None) -> TokenStats:
        batch = batch.to(self.device)
        with self.autocast():
            with torch.no_grad():
                other = None if second is None else self._states(batch, second)
            hidden, head = self._states(batch, model)
            targets = batch.targets if batch.shared is None else batch.shared.targets
            never = torch.isin(targets, self.banned) if batch.observed else None
            targets = targets if never is None else targets.masked_fill(never, min(self.eos))
            stats = token_stats(hidden, head, targets, self.banned, temperature, more, second=other)
        if never is not None:  # placeholders of media, which have no probability
            stats = replace(stats, logprobs=stats.logprobs.masked_fill(never, 0.0))
        stats = replace(stats, states=_hidden_states(hidden, head, self.base)) if states else stats
        return stats if batch.shared is None else stats.at(batch.shared.index)

    def states(self, batch: Batch) -> torch.Tensor:
        """[N, H] inputs of the output layer: the hidden state before each completion token."""
        batch = batch.to(self.device)
        with self.autocast():
            states = _hidden_states(*self._states(batch, self.model), self.base)
        return states if batch.shared is None else states.index_select(0, batch.shared.index)

    def _states(self, batch: Batch, model: Any) -> tuple[torch.Tensor, Head]:
        base = _unwrapped(model)
        inputs = self.inputs(batch.inputs, base)
        hidden, head = answer_states(model, base, {**inputs, "logits_to_keep": batch.columns, "use_cache": False})
        if hidden.shape[1] != len(batch.columns):  # a model without logits_to_keep
            hidden = hidden.index_select(1, batch.columns)
        hidden = hidden.flatten(0, 1)
        return hidden if batch.select is None else hidden.index_select(0, batch.select), head

    def backward(self, loss: torch.Tensor) -> None:
        """Runs the backward pass of a loss, scaled by the gradient scaler, and accumulates the gradients."""
        if engine := shards.engine_of(self.shards):
            engine.backward(loss)
        else:
            self.scaler.scale(loss).backward()

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[N] log-probabilities of the completion tokens under the reference model. The reference is the model with its
        adapter disabled, the frozen copy made by `keep_reference`, or the moving reference."""
        if self.lora and self.moving_reference:
            with self._as_reference():
                return self.logprobs(batch, temperature).logprobs
        if self.lora:
            with self._without_adapter():
                return self.logprobs(batch, temperature).logprobs
        return self.logprobs(batch, temperature, self._reference).logprobs

    def keep_reference(self, source: str | Path | None = None) -> None:
        """Makes the reference of the KL term: a frozen copy of the model at `source`, or of the policy if `source` is
        None. Each weight has the same type as in the policy, so that rounding is equal. Does nothing under LoRA."""
        if self.lora:
            return
        place = next(self.model.parameters()).device  # not on the device yet where it is to be sharded
        model = load_model(source, torch.float32, device=place) if source else copy.deepcopy(self.model)
        sync_tilings(model, self.processor)
        for theirs, own in zip(model.parameters(), self.model.parameters(), strict=True):
            theirs.data = theirs.data.to(own.dtype)
        self._reference = model.requires_grad_(False).eval().to(place)

    def start_moving_reference(self) -> None:
        """Creates the tensors of `moving_reference`, which may then be written to. Call it after `keep_reference`.
        Under LoRA the moving reference is a second adapter, initially equal to the trained one."""
        learning = dict(self.trainable())
        own = learning if self.lora else dict(self._reference.named_parameters())
        self.moving_reference = {n: own[n].detach().clone() if self.lora else own[n].data for n in learning}

    @contextlib.contextmanager
    def _without_adapter(self) -> Iterator[None]:
        """Context manager that disables the adapter. PEFT changes requires_grad of the tensors that the modules hold,
        which are either shards or gathered tensors. When the adapter is enabled again, the modules must hold the
        same tensors as when it was disabled. Otherwise some parameters would no longer be trained."""
        sharded = self.shards is not None and not self.shards.gathered
        if sharded:
            self.scatter()
        with self.model.disable_adapter():
            yield
            if sharded:
                self.scatter()

    @contextlib.contextmanager
    def _as_reference(self) -> Iterator[None]:
        def swap() -> None:
            self.scatter()
            for name, parameter in self.trainable():
                own = parameter.detach().clone()
                parameter.detach().copy_(self.moving_reference[name])
                self.moving_reference[name].copy_(own)

        gathered = self.shards is not None and self.shards.gathered
        self.swapped = True
        swap()
        try:
            yield
        finally:
            swap()
            self.swapped = False
            if gathered:
                self.gather()

    def gather(self) -> None:
        """If the model is sharded, gathers all its weights on each rank. Called on all ranks. See Shards.gather."""
        if self.shards:
            self.shards.gather()

    def scatter(self) -> None:
        """If the model is sharded, frees its gathered weights. This is needed before training and saving."""
        if self.shards:
            self.shards.scatter()

    def close(self) -> None:
        """Frees the weights that DeepSpeed gathered, which is no longer possible once the process group has ended."""
        if engine := shards.engine_of(self.shards):
            engine.scatter()

    def save(self, folder: Path, weights: Mapping[str, torch.Tensor] | None = None,
             head: Mapping[str, torch.Tensor] | None = None) -> None:
        """Writes the model (or adapter) as safetensors, and the processor. from_pretrained or PEFT can load the folder.

        `weights` come from shards.weights, or from `copied_weights` if training continues during the save. Without them
        the model must not be sharded. `head` comes from `copied_head`; None = a reward model's current head."""
        # embeddings are never trained; finding that out asks the hub
        more: dict[str, Any] = {"save_embedding_layers": False} if self.lora else {}
        if weights is not None:
            more["state_dict"] = dict(weights)
        write_model(self.model, self.processor, folder, **more)
        if self.quantized:
            self.quantized.write(folder)
        if head := head or self.copied_head():
            assert self.head
            save_file(dict(head), folder / self.head.file)

    def copied_head(self) -> dict[str, torch.Tensor]:
        """A copy of a reward model's head in host memory; {} for other models."""
        own = self.head.state_dict() if self.head and self.head.file else {}
        return {name: weight.detach().to("cpu", copy=True) for name, weight in own.items()}

    def copied_weights(self) -> dict[str, torch.Tensor]:
        """The weights that `save` writes: trainable parameters are copied to host memory, frozen ones are not copied.
        Tied weights stay tied. Under LoRA only the adapter's weights are included."""
        learning = {p.data_ptr() for _, p in self.trainable()}
        copies: dict[int, torch.Tensor] = {}
        weights: dict[str, torch.Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            place = tensor.data_ptr() if isinstance(tensor, torch.Tensor) else 0
            if place in learning:
                if place not in copies:
                    copies[place] = tensor.detach().to("cpu", copy=True)
                weights[name] = copies[place]
            elif not self.lora:
                weights[name] = tensor
        return weights

    @contextlib.contextmanager
    def sharing_features(self) -> Iterator[None]:
        """Context manager in which passes without gradient over one batch share the features of its images and videos.
        Has no effect if the vision tower or merger is trained. The model's methods that compute features are
        memoized, because FSDP needs them to be called inside the forward."""
        if any(self.family.part_of(name) != "language" for name, _ in self.trainable()):
            yield
            return
        outputs: dict[Any, Any] = {}
        models = [getattr(_unwrapped(m), "model", m) for m in (self.model, self._reference) if m is not None]
        calls = [(m, name) for m in models for name in _FEATURES if hasattr(m, name)]
        for model, name in calls:
            setattr(model, name, _memoized(name, getattr(model, name), outputs))
        try:
            yield
        finally:
            for model, name in calls:
                delattr(model, name)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager for evaluation mode: no dropout, and a KV cache even under gradient checkpointing."""
        was = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was)


_FEATURES = ("get_image_features", "get_video_features")
"""Methods of transformers models that run the vision tower and merger."""


def _memoized(name: str, call: Callable[..., Any], outputs: dict[Any, Any]) -> Callable[..., Any]:
    """Wraps the method `call`, whose name is `name`, so that a call with identical arguments returns the earlier
    result. Results are stored in `outputs`, which several models can share."""
    def remembered(*args: Any, **kwargs: Any) -> Any:
        values = [*args, *kwargs.values()]
        key = (name, *kwargs, *map(id, values))
        if key not in outputs:
            outputs[key] = values, call(*args, **kwargs)  # values keep their ids while they live
        return outputs[key][1]
    return remembered


def _hidden_states(hidden: torch.Tensor, head: Head, base: Any) -> torch.Tensor:
    if head.layer is None:
        raise ConfigError(f"vlrl does not know how to get the hidden states before the output layer of "
                          f"{type(base).__name__}, which the head trained by {' or '.join(HEADS)} needs. Train without "
                          f"the head (set {', or '.join(WITHOUT_HEAD.values())})")
    return hidden


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def load(config: Config, accelerator: Accelerator, checkpoint: Path | None = None) -> Policy:
    """Loads the policy of a config, with the weights of the folder `checkpoint` if it is given. `model.name` may also
    be a LoRA adapter. Then full fine-tuning starts from the adapter's base model with the adapter merged."""
    settings = config.model
    dtype = compute_dtype(settings)
    attention.check(config.train.attention, accelerator.device.type, dtype)
    full = settings.lora.rank == 0
    if not full:
        ADAPTERS["refuse_second"](settings)
        ADAPTERS["check_target"](settings)
    quantized = None if settings.lora.quantize == "none" else ADAPTERS["quantization"].of(settings.lora, dtype)
    model = load_model(checkpoint if full and checkpoint else settings.name, torch.float32 if full else dtype,
                       quantized=quantized, device=accelerator.device)
    family = family_in(model)
    processor = load_processor(settings, family)
    sync_tilings(model, processor)
    features = _CACHES["features"](settings, model, family) if settings.feature_cache_mib else None
    choose_trained(model, family, settings, dtype)
    if not full:
        model = ADAPTERS["add"](model, family, settings, checkpoint)
    if not shards.is_sharded(config):  # shards are moved one at a time
        model.to(accelerator.device)
    if settings.recomputes(accelerator.device.type):
        model.gradient_checkpointing_enable({"use_reentrant": False})
        # only reentrant checkpointing needs them, and with them a frozen vision tower would have a backward pass
        _unwrapped(model).disable_input_require_grads()
    model.train()
    head = make_head(config, _unwrapped(model), accelerator.device)
    return Policy(model, processor, family, accelerator, dtype, quantized, features, head)


def make_head(config: Config, base: Any, device: torch.device) -> heads.Head | None:
    """The additional head (see heads.py) that the settings ask for; None if they ask for none."""
    name = head_of(config)
    return HEADS[name](config, base.config.get_text_config().hidden_size, device) if name else None


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
