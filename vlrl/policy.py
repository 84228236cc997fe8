"""The model being trained: loading, LoRA or full, the reference, log-probabilities, saving."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator

from vlrl import packing
from vlrl.config import Config, ModelSettings
from vlrl.errors import ConfigError, VlrlError, did_you_mean
from vlrl.families import Family, agree, family_of, set_pixel_limits
from vlrl.files import read_json
from vlrl.packing import Batch
from vlrl.quantize import Quantization, adapted_layers, dequantized, keep_layout


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
    `dtype` under autocast; frozen ones are kept in `dtype`, or in 4 bits (`quantized`).
    """

    def __init__(self, model: Any, processor: Any, family: Family, accelerator: Accelerator, dtype: torch.dtype,
                 quantized: Quantization | None = None):
        self.model, self.processor, self.family = model, processor, family
        self.accelerator, self.dtype, self.device = accelerator, dtype, accelerator.device
        base = self.base
        vocabulary, known = base.config.get_text_config().vocab_size, len(processor.tokenizer)
        banned = {*family.vision_ids(processor), *range(known, vocabulary)}
        self.banned = torch.tensor(sorted(banned), dtype=torch.long, device=self.device)
        """Ids that can be neither sampled nor given probability: vision tokens and rows without a token."""
        self.eos = _eos_ids(base, processor.tokenizer)
        self.quantized = quantized
        self.scaler = _loss_scaler(self.device, dtype)
        self._reference: Any = None

    @property
    def base(self) -> Any:
        """The transformers model without PEFT's wrapper."""
        return _unwrapped(self.model)

    @property
    def lora(self) -> bool:
        return hasattr(self.model, "disable_adapter")

    def trainable(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Names and parameters that learn, in a fixed order."""
        return [(n, p) for n, p in self.model.named_parameters() if p.requires_grad]

    def positions(self, ids: torch.Tensor, types: torch.Tensor | None, mm: Any) -> np.ndarray:
        """[R, T] rotary positions of one sequence; see Family.positions."""
        return self.family.positions(self.base, ids, types, mm)

    def layout(self, wanted: str) -> str:
        """The layout of training rows: train.packing where the family's attention allows it, else padded."""
        return wanted if self.family.shared else "padded"

    def autocast(self) -> Any:
        """The compute type; nothing on float32."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)  # accelerate's knows no float16 on a CPU

    def logprobs(self, batch: Batch, temperature: float, model: Any = None) -> TokenStats:
        """Log-probability and entropy of every answer token of a batch under this policy (or another model)."""
        batch = batch.to(self.device)
        with self.autocast():
            model = model or self.model
            inputs = self.family.encode(_unwrapped(model), batch.inputs)
            out = model(**inputs, logits_to_keep=batch.columns, use_cache=False)
        logits = out.logits
        if logits.shape[1] != len(batch.columns):  # a model that knows no logits_to_keep
            logits = logits.index_select(1, batch.columns)
        logits = logits.flatten(0, 1).index_select(0, batch.select).float() / temperature
        return token_stats(logits, batch.targets, self.banned)

    @torch.no_grad()
    def reference_logprobs(self, batch: Batch, temperature: float) -> torch.Tensor:
        """[N] log-probabilities under the reference: the disabled adapter, or the frozen copy of `keep_reference`."""
        if self.lora:
            with self.model.disable_adapter():
                return self.logprobs(batch, temperature).logprobs
        return self.logprobs(batch, temperature, self._reference).logprobs

    def keep_reference(self, source: str | Path | None = None) -> None:
        """Keeps a frozen copy for KL: of the model at `source`, else of the weights as they are now.

        Each weight has the type that it has in the policy, so that both compute alike.
        """
        if self.lora:
            return
        model = load_model(source, torch.float32) if source else copy.deepcopy(self.model)
        for kept, own in zip(model.parameters(), self.model.parameters(), strict=True):
            kept.data = kept.data.to(own.dtype)
        self._reference = model.requires_grad_(False).eval().to(self.device)

    def save(self, folder: Path) -> None:
        """Writes the model (or adapter) as safetensors and the processor, loadable with from_pretrained / PEFT."""
        more = {"save_embedding_layers": False} if self.lora else {}  # never trained; finding that out asks the hub
        self.model.save_pretrained(folder, safe_serialization=True, **more)
        if self.quantized:
            self.quantized.write(folder)
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


def _unwrapped(model: Any) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


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
    """The policy of a config, with the weights of a checkpoint folder where one is given.

    `model.name` may also be a LoRA adapter: full fine-tuning starts from its base model with the adapter merged in.
    """
    settings = config.model
    dtype = compute_dtype(settings)
    full = settings.lora.rank == 0
    if not full:
        _refuse_second_adapter(settings)
    quantized = Quantization.of(settings.lora, dtype)
    model = load_model(checkpoint if full and checkpoint else settings.name, torch.float32 if full else dtype,
                       quantized=quantized, device=accelerator.device)
    family = family_of(model.config)
    processor = load_processor(settings, family)
    agree(model, processor)
    _choose_trained(model, family, settings, dtype)
    if not full:
        model = _add_lora(model, family, settings, checkpoint)
    model.to(accelerator.device)
    if settings.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    return Policy(model, processor, family, accelerator, dtype, quantized)


def skeleton(settings: ModelSettings) -> tuple[Any, Family]:
    """The model of the settings without weights, on the meta device, and its family; ConfigError when not found.

    What would learn is marked as in `load`: for counting parameters and for positions.
    """
    from transformers import AutoConfig, AutoModelForImageTextToText

    name = settings.name
    if settings.lora.rank:
        _refuse_second_adapter(settings)
    with _explained(f"model.name={name!r}"):
        while base := adapter_base(name):
            name = base
        config = AutoConfig.from_pretrained(resolve(name), trust_remote_code=False)
        family = family_of(config)
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(config)
            _choose_trained(model, family, settings, torch.float32)
            return (_add_lora(model, family, settings, None) if settings.lora.rank else model), family


def load_processor(settings: ModelSettings, family: Family) -> Any:
    """The HF processor of a model with the pixel limits of the settings."""
    from transformers import AutoProcessor

    with _explained(f"model.name={settings.name!r}"):
        processor = AutoProcessor.from_pretrained(resolve(settings.name), trust_remote_code=False)
    _check_processor(processor, settings.name)
    set_pixel_limits(processor, family, settings)
    return processor


def _check_processor(processor: Any, name: str) -> None:
    """Refuses what cannot turn a message with an image into a prompt."""
    lacks = [p for p in ("tokenizer", "image_processor") if getattr(processor, p, None) is None]
    if lacks:
        raise ConfigError(f"model.name={name!r}: its processor has no {' and no '.join(lacks)}. Save the processor of "
                          "the original model beside the weights (AutoProcessor...save_pretrained).")
    asked = "Where is it?"
    message = {"role": "user", "content": [{"type": "text", "text": asked}]}
    try:
        text = processor.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        problem = "" if asked in text else f"it renders {asked!r} as {text!r}"
    except Exception as error:  # whatever a template's code raises
        problem = _first_line(error)
    if problem:
        raise ConfigError(f"model.name={name!r}: no chat template that can be used: {problem.rstrip('.')}. Copy "
                          "chat_template.jinja of the original instruction-tuned model into the folder.")


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


def adapter_base(name: str) -> str | None:
    """The base model that the adapter `name` was trained on; None when `name` is a model of its own."""
    from transformers.utils import find_adapter_config_file

    path = find_adapter_config_file(resolve(name))
    if path is None:
        return None
    base = (read_json(Path(path)) or {}).get("base_model_name_or_path")
    if not base:
        raise ConfigError(f"model.name={name!r} is an adapter, but {path} names no base model. Set its "
                          "base_model_name_or_path.")
    return base


def _refuse_second_adapter(settings: ModelSettings) -> None:
    with _explained(f"model.name={settings.name!r}"):
        base = adapter_base(settings.name)
    if base:
        raise ConfigError(
            f"model.lora.rank={settings.lora.rank}, but model.name={settings.name!r} is itself a LoRA adapter, and a "
            "second one cannot be saved on top of it. Go on with the run that wrote it (its run.dir, resume=must), "
            f"start from its base model (model.name={base}), or merge first: the same command with model.lora.rank=0 "
            "steps=0 and another run.dir saves the whole model there.")


def load_model(source: str | Path, dtype: torch.dtype, what: str = "", quantized: Quantization | None = None,
               device: torch.device | None = None, merge: bool = True) -> Any:
    """A whole model; an adapter is merged into its base model, or with merge=False laid on it as a PEFT model.

    `what` says for errors where the source is named. Raises ConfigError when it cannot be loaded.
    """
    name = str(source)
    what = what or f"model.name={name!r}"
    with _explained(what):
        base = adapter_base(name)
        if base is None:
            return _load_whole(name, dtype, what, quantized, device)
        from peft import PeftModel

        what = f"{base!r}, the base model of the adapter {what},"
        rounded = Quantization.read(resolve(name))
        if rounded:  # what it learned belongs to the rounded weights
            model = dequantized(load_model(base, rounded.compute_dtype, what, rounded, device), dtype)
        else:
            model = load_model(base, dtype, what)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Found missing adapter keys")
            adapted = PeftModel.from_pretrained(model, resolve(name))
        return adapted.merge_and_unload() if merge else adapted


def _load_whole(name: str, dtype: torch.dtype, what: str, quantized: Quantization | None,
                device: torch.device | None) -> Any:
    from transformers import AutoModelForImageTextToText

    more = quantized.keywords(resolve(name), device or torch.device("cpu")) if quantized else {}
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        resolve(name), dtype=dtype, attn_implementation=_attention(name), trust_remote_code=False,
        use_safetensors=True, output_loading_info=True, ignore_mismatched_sizes=True,  # refused below, by name
        **more)
    model, found = loaded
    tied = getattr(model, "all_tied_weights_keys", {})
    wrong = [f"{key} is missing" for key in sorted(found["missing_keys"]) if key not in tied]
    wrong += [f"{key} is {list(has)} instead of {list(wants)}" for key, has, wants in sorted(found["mismatched_keys"])]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise ConfigError(f"{what} lacks weights that its config asks for: {', '.join(wrong[:3])}{more}. They would be "
                          "random; give a folder that holds the whole model.")
    keep_layout(model)
    model.name_or_path = model.config.name_or_path = name  # what an adapter names as its base; not a path in a package
    return model


def _attention(name: str) -> str | None:
    """The attention of vlrl/packing.py where the family may use it, else transformers' own choice."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(resolve(name), trust_remote_code=False)
    return packing.ATTENTION if family_of(config).shared else None


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turns whatever the libraries raise for a model that is absent or broken into one line."""
    try:
        yield
    except VlrlError:
        raise
    except Exception as error:
        raise ConfigError(f"{what} cannot be loaded: {_first_line(error).rstrip('.')}. Give a folder with a saved "
                          "model, or a hub name while the hub can be reached.") from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    kind = "" if lines and isinstance(error, (OSError, ValueError)) else type(error).__name__
    return ": ".join(w for w in (kind, *lines[:1]) if w)


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
        if not parameter.requires_grad and parameter.is_floating_point():  # 4-bit weights are packed bytes
            parameter.data = parameter.data.to(dtype)


def _add_lora(model: Any, family: Family, settings: ModelSettings, checkpoint: Path | None) -> Any:
    from peft import LoraConfig, PeftModel, get_peft_model

    if checkpoint:
        peft = PeftModel.from_pretrained(model, str(checkpoint), is_trainable=True)
    else:
        lora = settings.lora
        targets = adapted_layers(model, family, lora.target)
        peft = get_peft_model(model, LoraConfig(
            r=lora.rank, lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  # PEFT only divides it by r
            lora_dropout=lora.dropout, target_modules=targets, bias="none"))
    for _, parameter in peft.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return peft


def _loss_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Keeps small gradients above float16's least number; does nothing for other types."""
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    scaler.scale(torch.zeros((), device=device))  # makes its tensors: a process may find nothing to train on in a step
    return scaler


def _eos_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: the generation config's and the tokenizer's."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, (list, tuple)) else [configured]
    return frozenset(i for i in [*ids, tokenizer.eos_token_id] if i is not None)
