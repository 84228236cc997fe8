r"""Estimates whether a config fits on a number of GPUs, by arithmetic and without loading weights.

    result = plan(config, gpus=8, card=card_of("H100"))
    print("\n".join(render(result)))

Memory is estimated by tools/machine/memory.py. A step is assumed to be as large as the settings allow: every answer and
image has the largest allowed size, and every episode has as many turns as its limits allow. The observations are
assumed to be as large as those of a few episodes that are played."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from vlrl.config.schema import Config, ModelSettings
from vlrl.engine.capacity import token_bytes
from vlrl.errors import ConfigError
from vlrl.models import loading
from vlrl.models.flops import merge_side, patch_side
from vlrl.models.loading import skeleton
from vlrl.models.sharding import fsdp, launch, zero
from vlrl.tools.machine import memory
from vlrl.tools.machine.gpu_specs import Card
from vlrl.tools.machine.memory import GIB, Memory
from vlrl.tools.play import episodes as played_episodes
from vlrl.tools.play.episode_lengths import CHARACTERS, EpisodeLength, ObservationStats, as_answers, estimated, measure
from vlrl.training.build_task import make_task

CONTEXT = 1.0  # GiB for the CUDA context, NCCL and the libraries' workspaces
WORKSPACE = 1.5  # GiB of vLLM's memory that are needed for neither weights nor KV cache
_NAMES = {"trained": "trainable parameters", "frozen": "frozen parameters", "optimizer": "AdamW's averages",
          "reference": "reference policy", "copy": "weights that generate"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The estimated memory of each training GPU, and the numbers that the estimate is based on."""

    card: Card
    gpus: int
    gib: float
    parameters: tuple[int, int]  # (number of trainable parameters, number of all parameters)
    prompt: int  # number of tokens in a prompt, visual tokens included
    visual: int  # number of visual tokens in a prompt
    answer: int  # number of tokens in an answer, or in an action of an episode
    episode: EpisodeLength | None = None
    """Size of the longest episode that the settings allow; None for a task without an environment."""
    memory: Memory
    engine: int  # bytes of the GPU's memory that vLLM takes
    peak: int  # peak memory of a GPU in bytes, with `CONTEXT` included
    side_by_side: int
    """Number of answers that one engine can generate at the same time; 0 if not even one fits into its memory."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the estimated peak is at most the memory of a GPU, and an engine has room for at least one answer."""
        return self.peak <= self.gib * GIB and self.side_by_side > 0

    @property
    def tight(self) -> bool:
        """True if the plan fits by the estimate, but would not fit if the estimate were too low by as much as in the
        worst measurement (memory.BAND)."""
        return self.fits and self.peak * memory.BAND[1] > self.gib * GIB


# --- what is known of models -----------------------------------------------------------------------------------------


def architecture(name: str) -> Any:
    """The transformers config of the model `name`. For models in assets/models/shapes.json, neither network nor files
    are needed; other models are looked up like `model.name`. Raises ConfigError if the model is not found."""
    from transformers import AutoConfig

    known = json.loads(resources.files("vlrl").joinpath("assets/models/shapes.json").read_text("utf-8"))
    if name in known:
        return AutoConfig.for_model(**known[name])
    try:
        return AutoConfig.from_pretrained(loading.resolve(name), trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.name={name!r}: its config.json is not found ({str(error).splitlines()[0]}). Give a "
                          f"folder with a config.json, or one of {', '.join(sorted(known))}") from None


def observe(config: Config) -> ObservationStats | None:
    """Plays a few episodes of the config's task; returns the sizes of their observations, or None if the task has no
    environment.

    Exceptions raised by the task's code are passed on."""
    task = make_task(config)
    with played_episodes.environments(config, task) as host:
        if host is None:
            return None
        shape = architecture(config.model.name)
        return measure(config, task, host, estimated(config, patch_side(shape.vision_config) * merge_side(shape)))


# --- the plan --------------------------------------------------------------------------------------------------------


def plan(config: Config, gpus: int, card: Card, gib: float | None = None, *, prompt_tokens: int | None = None,
         visual_tokens: int | None = None, observed: ObservationStats | None = None) -> Plan:
    """Estimates the memory of a config on `gpus` training GPUs with `gib` GiB each (None: the memory of the card).

    prompt_tokens, visual_tokens: see memory.estimate. observed: sizes of observations in the task's episodes; each
    action is assumed to have rollout.max_new_tokens tokens. Raises ConfigError for a model that is not found or takes
    no images, and for settings that a run on these GPUs would refuse."""
    gib = card.gib if gib is None else gib
    shape = architecture(config.model.name)
    sharded = config.train.sharding in ("fsdp2", "zero2", "zero3") and gpus > 1
    _check(config, shape, gpus, sharded)
    visual = memory.max_visual_tokens(config, shape) if visual_tokens is None else visual_tokens
    if prompt_tokens is None:
        prompt = visual + memory.TEXT_TOKENS
    elif visual_tokens is not None and visual > prompt_tokens:
        raise ConfigError(f"--visual-tokens {visual} cannot be more than --prompt-tokens {prompt_tokens}, which "
                          "includes the visual tokens")
    else:
        prompt, visual = prompt_tokens, min(visual, prompt_tokens)
    (trained, count), root, layer, notice = _parameters(config.model.model_dump_json())
    episode = observed.length(config.episode, config.rollout.max_new_tokens) if observed else None
    need = memory.estimate(config, shape, prompt, visual, "cuda", episode)
    if config.engine.name != "hf":  # the training model does not generate
        need = replace(need, cache=0, prefill=0, token=0, copy=0)
    if sharded:
        share = _fsdp if config.train.sharding == "fsdp2" else _deepspeed
        need = share(config, need, gpus, root + 2 * layer)
    engine, rows = _engine(as_answers(config, episode) if episode else config, shape, gib, prompt, count)
    return Plan(card=card, gpus=gpus, gib=gib, parameters=(trained, count), prompt=prompt, visual=visual,
                answer=config.rollout.max_new_tokens, episode=episode, memory=need, engine=engine,
                peak=_peak(config, need, engine) + int(CONTEXT * GIB), side_by_side=rows,
                notes=(*_notes(config, gpus, observed), *([notice] if notice else [])))


def _check(config: Config, shape: Any, gpus: int, sharded: bool) -> None:
    """Raises ConfigError for settings of sharding or vLLM that a run would refuse at its start. `shape` is the model's
    transformers config. `sharded` says whether the weights are sharded over the GPUs."""
    if sharded:
        launch.check(config)
    each, heads = config.engine.tensor_parallel, shape.get_text_config().num_attention_heads
    if config.engine.name == "vllm" and each > 1 and gpus > 1:
        raise ConfigError(f"engine.tensor_parallel={each} with {gpus} training GPUs: with engine.name=vllm each GPU "
                          "has its own engine. Set engine.tensor_parallel=1, or engine.name=vllm_server")
    if config.engine.name != "hf" and heads % each:
        raise ConfigError(f"engine.tensor_parallel={each}: the {heads} attention heads of {config.model.name} cannot "
                          f"be divided among {each} GPUs. Set engine.tensor_parallel to a divisor of {heads}")


@functools.lru_cache(maxsize=16)
def _parameters(settings: str) -> tuple[tuple[int, int], float, float, str]:
    """Describes the size of a model with the settings `settings` (JSON). Returns four values: (number of trainable
    parameters, number of all parameters); the share of the parameters outside the decoder layers; the share of the
    largest decoder layer; a notice about names in model.lora.target, or ""."""
    given = ModelSettings.model_validate_json(settings)
    model, family = skeleton(given, architecture(given.name))
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    trained, count = sum(n for n, learns in sizes if learns), sum(n for n, _ in sizes)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [sum(p.numel() for p in layer.parameters()) for layer in fsdp.decoder_layers(base)]
    learns = [name for name, p in model.named_parameters() if p.requires_grad]
    notice = loading.ADAPTERS["several_parts"](learns, family, given.lora.target) if given.lora.rank else ""
    return (trained, count), 1 - sum(layers) / count, max(layers) / count, notice


def _fsdp(config: Config, need: Memory, gpus: int, gathered: float) -> Memory:
    """The memory of one of `gpus` processes under FSDP (docs/scaling.md), where each process holds a shard of the
    model. `need` is the memory of a process without sharding.

    gathered: share of the weights that are unsharded at the same time in a forward pass. The hf engine holds all
    weights unsharded while it generates."""
    half = config.train.gather == "compute" and config.model.dtype != "float32"
    weights = need.trained // (2 if half else 1) + need.frozen
    shards = {name: math.ceil(getattr(need, name) / gpus)
              for name in ("trained", "frozen", "optimizer", "reference", "gradients")}
    if config.train.cpu_offload:
        shards |= dict.fromkeys(("trained", "frozen", "optimizer", "reference"), 0)
    whole = weights if config.engine.name == "hf" else 0
    return replace(need, **shards, casts=int(need.casts * gathered), block=need.block + int(weights * gathered),
                   prefill=need.prefill + whole, token=need.token + whole)


def _deepspeed(config: Config, need: Memory, gpus: int, gathered: float) -> Memory:
    """The memory of one of `gpus` processes under ZeRO. `need` and `gathered` are as in _fsdp. The optimizer holds a
    copy of its shard of the weights. Gradients are held three times: in a bucket, as shards, and again as shards for
    the optimizer step. A frozen reference model is not sharded.

    The memory after the start was measured with two CPU processes; the rest was derived from DeepSpeed's source."""
    def part(size: int) -> int:
        return math.ceil(size / gpus)

    copy, weights = part(need.trained), need.trained + need.frozen
    need = replace(need, trained=need.trained + copy, optimizer=part(need.optimizer),
                   gradients=2 * part(need.gradients) + zero.BUCKET * 4)
    if config.train.sharding == "zero2":
        return need
    return replace(need, trained=2 * copy, frozen=part(need.frozen), casts=int(need.casts * gathered),
                   block=need.block + int(weights * gathered), prefill=need.prefill + weights,
                   token=need.token + weights)


def _engine(config: Config, shape: Any, gib: float, prompt: int, parameters: int) -> tuple[int, int]:
    """Returns (bytes of a training GPU's memory that vLLM takes, number of answers that one engine generates at a
    time). shape: the model's transformers config. parameters: number of its parameters. gib: memory of a GPU.
    prompt: tokens of a prompt."""
    settings, rollout = config.engine, config.rollout
    if settings.name == "hf":
        return 0, memory.generation_rows(config)[0]
    size = 2 if config.model.dtype != "float32" else 4
    share = settings.memory * gib * GIB
    room = share - parameters * size / settings.tensor_parallel - WORKSPACE * GIB
    per_token = token_bytes(shape.get_text_config(), size, True) / settings.tensor_parallel
    each = per_token * (prompt / rollout.group_size + rollout.max_new_tokens)  # a group shares its prompt
    rows = min(settings.max_seqs, max(0, int(room // each)))
    return (int(share) if settings.name == "vllm" else 0), rows


def _peak(config: Config, need: Memory, engine: int) -> int:
    """Peak memory of a training GPU in bytes, without the CUDA context. `need` is the memory of training, and `engine`
    that of vLLM. vLLM's memory is in use during the update too, unless vLLM sleeps."""
    awake = config.engine.name == "vllm" and (not config.engine.sleep or config.asynchronous.max_staleness > 0)
    return need.total + engine if awake or not engine else max(need.total, need.resident + engine)


def _notes(config: Config, gpus: int, observed: ObservationStats | None) -> Iterator[str]:
    if observed:
        yield f"{observed.words()}; a token of text is assumed to have {CHARACTERS:g} characters"
    if config.engine.name == "vllm_server":
        yield "the servers' GPUs are needed in addition to --gpus, and are assumed to be of the same model"
    if config.epochs is not None:
        yield (f"epochs={config.epochs:g}: ceil({config.epochs:g} x rows / {config.rollout.prompts_per_step}) steps; "
               "`vlrl train CONFIG --dry-run` reads the rows and says how many")
    if config.rollout.prompts_per_step % gpus:
        yield (f"rollout.prompts_per_step={config.rollout.prompts_per_step} is not a multiple of {gpus} GPUs: some "
               "GPUs wait for those that have one more prompt")


# --- as text ---------------------------------------------------------------------------------------------------------


def render(result: Plan) -> list[str]:
    """The plan as lines of text."""
    trained, count = result.parameters
    one, need = result.episode, result.memory
    answers = f"answers of {result.answer:,}" if one is None else (
        f"episodes of {one.tokens:,} tokens in {one.turns} turns, {result.answer:,} an action and {one.visual:,} "
        f"visual in {one.pictures} images")
    lines = [f"{count / 1e9:.2f} billion parameters, {trained / 1e6:,.1f} million trainable; prompts of "
             f"{result.prompt:,} tokens ({result.visual:,} visual), {answers}",
             "", f"memory of each of {result.gpus} x {result.card.name}, GiB"]
    lines += [f"  {label:<24}{value / GIB:>8.2f}" for name, label in _NAMES.items() if (value := getattr(need, name))]
    lines += [f"  {'+ while it learns':<24}{need.training / GIB:>8.2f}   (activations "
              f"{(need.activations + need.block) / GIB:.2f}, gradients {need.gradients / GIB:.2f}, logits "
              f"{need.logits / GIB:.2f})"]
    if need.generation and not result.engine:
        lines.append(f"  {'+ while it generates':<24}{need.generation / GIB:>8.2f}   (KV cache {need.cache / GIB:.2f})")
    if result.engine:
        lines.append(f"  {'+ vLLM':<24}{result.engine / GIB:>8.2f}   (engine.memory)")
    lines += [f"  {'CUDA':<24}{CONTEXT:>8.2f}", f"  {'peak':<24}{result.peak / GIB:>8.2f}   of {result.gib:g}: "
              f"{_verdict(result)}", f"  answers side by side: {result.side_by_side:,}"]
    return [*lines, *(f"note: {note}" for note in result.notes)]


def _verdict(result: Plan) -> str:
    if not result.side_by_side:
        return "does not fit: no room for the KV cache next to vLLM's weights (engine.memory)"
    if not result.fits:
        return "does not fit"
    return f"fits, barely: estimates have been up to {memory.BAND[1] - 1:.0%} too low" if result.tight else "fits"
