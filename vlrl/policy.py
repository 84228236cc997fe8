"""The model being trained: loading, LoRA or full, the reference, log-probabilities, saving."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from vlrl import packing
from vlrl.config import Config, ModelSettings
from vlrl.errors import ConfigError, did_you_mean
from vlrl.families import Family, family_of, set_pixel_limits
from vlrl.packing import Batch


@dataclass(frozen=True, eq=False)
class TokenStats:
    """Per answer token of a Batch."""

    logprobs: torch.Tensor
    """[N] float32 at the sampled temperature, banned ids removed."""
    entropy: torch.Tensor
    """[N] float32 nats, without gradient."""


class Policy:
    """A vision-language model, its processor, and what may be trained of it.

    `model` is the transformers model, wrapped by PEFT under LoRA. Trained weights are float32 and computed in
    `dtype` under autocast; frozen ones are kept in `dtype`.
    """

    def __init__(self, model: Any, processor: Any, family: Family, accelerator: Accelerator, dtype: torch.dtype):
        self.model, self.processor, self.family = model, processor, family
        self.accelerator, self.dtype, self.device = accelerator, dtype, accelerator.device
        base = self.base
        vocabulary, known = base.config.get_text_config().vocab_size, len(processor.tokenizer)
        banned = {*family.vision_ids(processor.tokenizer), *range(known, vocabulary)}
        self.banned = torch.tensor(sorted(banned), dtype=torch.long, device=self.device)
        """Ids that can be neither sampled nor given probability: vision tokens and rows without a token."""
        self.eos = _eos_ids(base, processor.tokenizer)
        self._reference: Any = None

    @property
    def base(self) -> Any:
        """The transformers model without PEFT's wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model

    @property
    def lora(self) -> bool:
        return hasattr(self.model, "disable_adapter")

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that learn, in a fixed order."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def positions(self, ids: torch.Tensor, types: torch.Tensor | None, mm: Any) -> np.ndarray:
        """[R, T] rotary positions of one sequence; see Family.positions."""
        return self.family.positions(self.base, ids, types, mm)

    def autocast(self) -> Any:
        """The compute type; nothing on float32."""
        return contextlib.nullcontext() if self.dtype == torch.float32 else self.accelerator.autocast()

    def logprobs(self, batch: Batch, temperature: float, model: Any = None) -> TokenStats:
        """Log-probability and entropy of every answer token of a batch under this policy (or another model)."""
        batch = batch.to(self.device)
        with self.autocast():
            out = (model or self.model)(**batch.inputs, logits_to_keep=batch.columns, use_cache=False)
        logits = out.logits.flatten(0, 1).index_select(0, batch.select).float() / temperature
        return token_stats(logits, batch.targets, self.banned)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[N] log-probabilities under the reference: the disabled adapter, or the frozen copy of `keep_reference`."""
        if self.lora:
            with self.model.disable_adapter():
                return self.logprobs(batch, temperature).logprobs
        return self.logprobs(batch, temperature, self._reference).logprobs

    def keep_reference(self, source: str | Path | None = None) -> None:
        """Keeps a frozen copy for KL: of the model at `source`, else of the weights as they are now."""
        if self.lora:
            return
        model = _load_model(source, self.dtype) if source else copy.deepcopy(self.model)
        self._reference = model.requires_grad_(False).eval().to(self.device)

    def save(self, folder: Path) -> None:
        """Writes the model (or adapter) as safetensors and the processor, loadable with from_pretrained / PEFT."""
        self.model.save_pretrained(folder, safe_serialization=True)
        self.processor.save_pretrained(folder)

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode: no dropout, and the cache on under gradient checkpointing."""
        was = self.model.training
        self.model.eval()
        try:
            yield
        finally:
            self.model.train(was)


def token_stats(logits: torch.Tensor, targets: torch.Tensor, banned: torch.Tensor) -> TokenStats:
    """TokenStats from float32 logits [N, V] already divided by the temperature; targets [N]; banned ids."""
    if banned.numel():
        logits = logits.index_fill(1, banned, -torch.inf)
    norm = torch.logsumexp(logits, -1)
    logprobs = logits.gather(1, targets[:, None])[:, 0] - norm
    with torch.no_grad():
        probs = (logits - norm[:, None]).exp()
        entropy = norm - (probs * logits.masked_fill(probs == 0, 0)).sum(-1)
    return TokenStats(logprobs, entropy)


def load(config: Config, accelerator: Accelerator, checkpoint: Path | None = None) -> Policy:
    """The policy of a config, with the weights of a checkpoint folder where one is given."""
    settings = config.model
    dtype = compute_dtype(settings)
    full = settings.lora.rank == 0
    model = _load_model(checkpoint if full and checkpoint else settings.name, torch.float32 if full else dtype)
    family = family_of(model.config)
    processor = load_processor(settings)
    _choose_trained(model, family, settings, dtype)
    if not full:
        model = _add_lora(model, family, settings, checkpoint)
    model.to(accelerator.device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return Policy(model, processor, family, accelerator, dtype)


def load_processor(settings: ModelSettings) -> Any:
    """The HF processor of a model with the pixel limits of the settings."""
    from transformers import AutoProcessor

    with _explained(settings.name):
        processor = AutoProcessor.from_pretrained(resolve(settings.name), trust_remote_code=False)
    set_pixel_limits(processor, settings.min_pixels, settings.max_pixels)
    return processor


def resolve(name: str) -> str:
    """A model's folder or hub name; `embedded/...` is a model shipped with the package."""
    if not name.startswith("embedded/"):
        return name
    folder = Path(__file__).parent / "assets" / name.removeprefix("embedded/")
    if not folder.is_dir():
        shipped = sorted(f"embedded/{p.name}" for p in folder.parent.glob("*/"))
        raise ConfigError(f"model.name={name!r}: no such embedded model.{did_you_mean(name, shipped)} "
                          f"Shipped: {shipped}")
    return str(folder)


def _load_model(source: str | Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForImageTextToText

    with _explained(str(source)):
        return AutoModelForImageTextToText.from_pretrained(
            resolve(str(source)), dtype=dtype, attn_implementation=packing.ATTENTION, trust_remote_code=False,
            use_safetensors=True)


@contextlib.contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"model.name={name!r} cannot be loaded: {first} Give a folder with a saved model, or a hub "
                          "name while the hub can be reached.") from error


def compute_dtype(settings: ModelSettings) -> torch.dtype:
    """The type that the model computes in: `model.dtype`, or by device when that is auto."""
    if settings.dtype == "auto":
        return torch.bfloat16 if torch.cuda.is_available() else torch.float32
    return getattr(torch, settings.dtype)


def _choose_trained(model: Any, family: Family, settings: ModelSettings, dtype: torch.dtype) -> None:
    """Marks what learns. Learned weights stay float32 (small updates vanish in bfloat16), the rest is kept in dtype."""
    parts = () if settings.lora.rank else settings.train
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(family.part_of(name) in parts)
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(dtype)


_LORA_PARTS = {"language": ("language",), "all_linear": ("language", "merger"),
               "vision_language": ("language", "merger", "vision")}


def _add_lora(model: Any, family: Family, settings: ModelSettings, checkpoint: Path | None) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if checkpoint:
        peft = PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
    else:
        lora, parts = settings.lora, _LORA_PARTS[settings.lora.target]
        targets = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)
                   and n != "lm_head" and family.part_of(n) in parts]
        peft = get_peft_model(model, LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT only divides it by r
            lora_dropout=lora.dropout, target_modules=targets, bias="none"))
    for _, parameter in peft.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return peft


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the generation config's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
