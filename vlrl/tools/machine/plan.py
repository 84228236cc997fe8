"""Does a config fit on so many GPUs, how long is a step, and what would make it fit? Arithmetic alone, no weights.

    needs = plan(config, gpus=8, card=card_of("H100"))
    print("\\n".join(render(needs)))

Bytes are those of tools/machine/memory.py. Seconds are operations (models/flops.py) and bytes over what the data sheet
promises, times the shares below, which are assumptions and not measurements. A step is taken to be as large as the
settings allow: every answer as long as asked, every image as large as `model.max_pixels`, every episode with as many
turns as its limits leave room for, with observations as large as those of a few that were played.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from vlrl.algo.algorithm import Algorithm
from vlrl.config.schema import Config, ModelSettings
from vlrl.engine.capacity import token_bytes
from vlrl.errors import ConfigError
from vlrl.models import loading
from vlrl.models.flops import Cost, cost_model, merge_side, patch_side
from vlrl.models.sharding import fsdp, launch, zero
from vlrl.models.skeleton import skeleton
from vlrl.tools.machine import memory
from vlrl.tools.machine.gpu_specs import Card
from vlrl.tools.machine.memory import GIB, Memory
from vlrl.tools.play import episodes as acting
from vlrl.tools.play.episode_lengths import CHARACTERS, EpisodeLength, ObservationStats, as_answers, estimated, measure
from vlrl.training.build_task import make_task

LEARNING, READING, WRITING = 0.35, 0.5, 0.6
"""Assumed shares of a card's promise: of its operations in the update and over prompts, of its bandwidth in writing."""
CONTEXT = 1.0
"""GiB that CUDA, NCCL and the libraries' workspaces take."""
WORKSPACE = 1.5
"""GiB of vLLM's share that are neither weights nor KV cache."""
LINK = 25.0
"""GB/s at which weights travel to another GPU or through shared memory."""
_NAMES = {"trained": "trainable parameters", "frozen": "frozen parameters", "optimizer": "AdamW's averages",
          "reference": "reference", "copy": "weights that generate"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The estimate, for one GPU of those that train."""

    card: Card
    gpus: int
    gib: float
    """Memory of each."""
    parameters: tuple[int, int]
    """Trained, all."""
    prompt: int
    """Tokens of a prompt, visual ones included, ..."""
    visual: int
    """... and those alone."""
    answer: int
    """Those of an answer, or of an action of an episode."""
    episode: EpisodeLength | None = None
    """The longest episode that the settings allow; None for a task without an environment."""
    memory: Memory
    engine: int
    """Bytes that vLLM takes of it."""
    peak: int
    """Bytes at the worst moment, `CONTEXT` included."""
    side_by_side: int
    """Answers that one engine writes at once; 0 where not even one fits."""
    seconds: dict[str, float]
    """Of the phases of a step; without generation where nothing can be written."""
    notes: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the estimate lies below what a GPU has, and an engine can write."""
        return self.peak <= self.gib * GIB and self.side_by_side > 0

    @property
    def tight(self) -> bool:
        """Whether it fits, but would not if the estimate is as far off as it has been measured to be (BAND)."""
        return self.fits and self.peak * memory.BAND[1] > self.gib * GIB

    @property
    def step(self) -> float:
        """Seconds of a step; generation beside the update counts where it is longer."""
        return sum(self.seconds.values())


# --- what is known of models -----------------------------------------------------------------------------------------


def architecture(name: str) -> Any:
    """Returns the transformers config of a model: of those in assets/models/shapes.json without any network or file,
    else as `model.name` is found. Raises ConfigError when it is not.
    """
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
    """Plays a few episodes of the config's task, and returns what they show; None where it has no environment.

    Raises what making the task and playing it raise.
    """
    task = make_task(config)
    with acting.environments(config, task) as host:
        if host is None:
            return None
        shape = architecture(config.model.name)
        return measure(config, task, host, estimated(config, patch_side(shape.vision_config) * merge_side(shape)))


# --- the plan --------------------------------------------------------------------------------------------------------


def plan(config: Config, gpus: int, card: Card, gib: float | None = None, *, prompt_tokens: int | None = None,
         visual_tokens: int | None = None, answer_tokens: int | None = None,
         observed: ObservationStats | None = None) -> Plan:
    """Returns the plan of a config on `gpus` cards of `gib` GiB (None: the card's) that learn.

    prompt_tokens, visual_tokens: see memory.estimate. answer_tokens: mean length of an answer, for the seconds; None =
    rollout.max_new_tokens. observed: what observations of the task's episodes hold; then an answer is an action, and
    memory is counted for actions of rollout.max_new_tokens. Raises ConfigError for a model that is not found or takes
    no images, and for settings that a run on so many GPUs would refuse.
    """
    gib = card.gib if gib is None else gib
    shape = architecture(config.model.name)
    _check(config, shape, gpus)
    if prompt_tokens is not None:
        visual = memory.max_visual_tokens(config, shape) if visual_tokens is None else visual_tokens
        if visual_tokens is not None and visual > prompt_tokens:
            raise ConfigError(f"--visual-tokens {visual} are part of --prompt-tokens {prompt_tokens}, so they cannot "
                              "be more")
        visual_tokens = min(visual, prompt_tokens)
    (trained, count), cost, shared, root, layer = _model(config.model.model_dump_json())
    longest = observed.length(config.episode, config.rollout.max_new_tokens) if observed else None
    need = _of_training(config, memory.estimate(config, shape, prompt_tokens, visual_tokens, "cuda", longest))
    if _sharded(config, gpus):
        share = _shared_out if config.train.sharding == "fsdp2" else _by_deepspeed
        need = share(config, need, gpus, root + 2 * layer)
    side = merge_side(shape)
    visual = memory.max_visual_tokens(config, shape) if visual_tokens is None else visual_tokens
    prompt = visual + memory.TEXT_TOKENS if prompt_tokens is None else prompt_tokens
    answer = min(answer_tokens or config.rollout.max_new_tokens, config.rollout.max_new_tokens)
    engine, rows = _engine(as_answers(config, longest) if longest else config, shape, gib, prompt, count)
    episode = observed.length(config.episode, answer) if observed else None
    group = _Group(prompt, (visual * side**2,) if visual else (),
                   (episode.tokens if episode else answer,) * config.rollout.group_size,
                   shared=shared and config.train.packing == "shared", episode=episode, side=side)
    seconds = _seconds(config, cost, group, card, gpus, rows, _Bytes.of(config, shape, count))
    peak = _peak(config, need, engine) + int(CONTEXT * GIB)
    return Plan(card=card, gpus=gpus, gib=gib, parameters=(trained, count), prompt=prompt, visual=visual,
                answer=answer, episode=episode, memory=need, engine=engine, peak=peak, side_by_side=rows,
                seconds=seconds, notes=tuple(_notes(config, gpus, observed)))


def _sharded(config: Config, gpus: int) -> bool:
    return config.train.sharding in ("fsdp2", "zero2", "zero3") and gpus > 1


def _check(config: Config, shape: Any, gpus: int) -> None:
    """Raises ConfigError for what sharding, assemble or vLLM would refuse."""
    if _sharded(config, gpus):
        launch.check(config)
    each, heads = config.engine.tensor_parallel, shape.get_text_config().num_attention_heads
    if config.engine.name == "vllm" and each > 1 and gpus > 1:
        raise ConfigError(f"engine.tensor_parallel={each} with {gpus} GPUs that learn: with engine.name=vllm each has "
                          "an engine of its own. Leave it at 1, or set engine.name=vllm_server")
    if config.engine.name != "hf" and heads % each:
        raise ConfigError(f"engine.tensor_parallel={each}: the {heads} attention heads of {config.model.name} cannot "
                          "be shared out over so many GPUs")


@functools.lru_cache(maxsize=16)
def _model(settings: str) -> tuple[tuple[int, int], Cost, bool, float, float]:
    """Returns ((trained parameters, all), what passes cost, whether rows are prefix-shared, shares of the parameters
    outside the decoder layers and in one of them) of model settings in JSON."""
    given = ModelSettings.model_validate_json(settings)
    model, family = skeleton(given, architecture(given.name))
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    counts = sum(n for n, learns in sizes if learns), sum(n for n, _ in sizes)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = [sum(p.numel() for p in layer.parameters()) for layer in fsdp.decoder_layers(base)]
    return (counts, cost_model(model, family), family.shared, 1 - sum(layers) / counts[1], max(layers) / counts[1])


def _shared_out(config: Config, need: Memory, gpus: int, gathered: float) -> Memory:
    """Of one of `gpus` processes that hold shards (docs/scaling.md); `gathered`: the share of the weights that a pass
    holds whole at once. The hf engine holds all of them while it generates."""
    half = config.train.gather == "compute" and config.model.dtype != "float32"
    weights = need.trained // (2 if half else 1) + need.frozen
    shards = {name: math.ceil(getattr(need, name) / gpus)
              for name in ("trained", "frozen", "optimizer", "reference", "gradients")}
    if config.train.cpu_offload:
        shards |= dict.fromkeys(("trained", "frozen", "optimizer", "reference"), 0)
    whole = weights if config.engine.name == "hf" else 0
    return replace(need, **shards, casts=int(need.casts * gathered), block=need.block + int(weights * gathered),
                   prefill=need.prefill + whole, token=need.token + whole)


def _by_deepspeed(config: Config, need: Memory, gpus: int, gathered: float) -> Memory:
    """As `_shared_out`, under ZeRO: the optimizer has a copy of its share of the weights, gradients are in a bucket, in
    shares, and once more in shares for the step; a frozen reference stays whole. What is there at the start was counted
    in runs of two processes on a CPU, the rest is read from DeepSpeed's source."""
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


def _of_training(config: Config, need: Memory) -> Memory:
    """Of an engine with weights of its own, what the training model generates with is not needed."""
    return need if config.engine.name == "hf" else replace(need, cache=0, prefill=0, token=0, copy=0)


def _engine(config: Config, shape: Any, gib: float, prompt: int, parameters: int) -> tuple[int, int]:
    """Returns (bytes that vLLM takes of a GPU that learns, answers that an engine writes side by side)."""
    settings, rollout = config.engine, config.rollout
    if settings.name == "hf":
        return 0, memory._generation_rows(config)[0]
    size = 2 if config.model.dtype != "float32" else 4
    share = settings.memory * gib * GIB
    room = share - parameters * size / settings.tensor_parallel - WORKSPACE * GIB
    per_token = token_bytes(shape.get_text_config(), size, True) / settings.tensor_parallel
    each = per_token * (prompt / rollout.group_size + rollout.max_new_tokens)  # a group has one copy of its prompt
    rows = min(settings.max_seqs, max(0, int(room // each)))
    return (int(share) if settings.name == "vllm" else 0), rows


def _peak(config: Config, need: Memory, engine: int) -> int:
    """Returns bytes at the worst moment, where vLLM's share is free during the update or not."""
    beside = config.engine.name == "vllm" and (not config.engine.sleep or config.asynchronous.max_staleness > 0)
    if beside or not engine:
        return need.total + engine
    return max(need.total, need.resident + engine)


# --- seconds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    prompt: int
    patches: tuple[int, ...]
    answers: tuple[int, ...]
    shared: bool
    """Its prompt is computed once in the update."""
    episode: EpisodeLength | None = None
    """Of each answer."""
    side: int = 1
    """Patches of a visual token are its square."""

    @property
    def shown(self) -> tuple[int, ...]:
        """Patches of each picture of an episode."""
        one = self.episode
        return (one.visual * self.side**2 // one.pictures,) * one.pictures if one and one.pictures else ()

    def passes(self, work: Any) -> float:
        """Returns operations of `work(prompt, patches, answers)` over the group as it is packed."""
        if self.shared:
            return work(self.prompt, (*self.patches, *self.shown * len(self.answers)), self.answers)
        return sum(work(self.prompt, (*self.patches, *self.shown), (answer,)) for answer in self.answers)

    def read(self, cost: Cost) -> float:
        """Returns operations of reading the prompt, and before each further turn all of every episode so far."""
        operations, one = cost.forward(self.prompt, self.patches), self.episode
        for turn in range(1, one.turns if one else 1):
            share = turn / max(1, one.turns - 1) if one else 0.0
            before = one.tokens - one.written // one.turns if one else 0
            pictures = self.shown[:round(len(self.shown) * share)]
            operations += len(self.answers) * cost.forward(self.prompt + round(before * share),
                                                           (*self.patches, *pictures))
        return operations


@dataclass(frozen=True)
class _Bytes:
    weights: float
    """All weights in the type that is computed in."""
    token: float
    """KV cache of a token."""
    moved: float
    """What a sync carries."""

    @classmethod
    def of(cls, config: Config, shape: Any, parameters: int) -> _Bytes:
        size = 2 if config.model.dtype != "float32" else 4
        token = token_bytes(shape.get_text_config(), size, config.model.lora.rank > 0 or config.engine.name != "hf")
        adapter = config.model.lora.rank > 0 and config.model.lora.target == "language"
        carried = 0.0 if config.engine.name == "hf" or adapter else parameters * size
        return cls(parameters * size, token, carried)


def _seconds(config: Config, cost: Cost, group: _Group, card: Card, gpus: int, rows: int,
             sizes: _Bytes) -> dict[str, float]:
    """Returns seconds of the phases of a step, on the process with most groups."""
    rollout, operations = config.rollout, card.tflops * 1e12
    groups = math.ceil(rollout.prompts_per_step / gpus)
    engines = len(config.engine.servers) or 1 if config.engine.name == "vllm_server" else gpus
    out: dict[str, float] = {}
    if rows:
        prompts = math.ceil(rollout.prompts_per_step / engines)
        out["reading prompts"] = prompts * group.read(cost) / (operations * READING)
        out["writing answers"] = _written(prompts * rollout.group_size, rows, group, card, sizes,
                                          config.engine.tensor_parallel if config.engine.name != "hf" else 1)
    algorithm = Algorithm(config)
    passes = group.passes(cost.of) * rollout.updates
    if config.model.gradient_checkpointing:
        passes += group.passes(cost.forward) * rollout.updates
    before = not rollout.one_update or "values" in algorithm.requires
    extra = before + algorithm.needs_reference
    out["updating"] = groups * (passes + extra * group.passes(cost.forward)) / (operations * LEARNING)
    if sizes.moved:
        out["carrying weights"] = sizes.moved / (LINK * 1e9)
    return out


def _written(answers: int, rows: int, group: _Group, card: Card, sizes: _Bytes, parallel: int) -> float:
    """Returns seconds of writing, in which each token of a round reads all weights and the KV cache before it."""
    total = 0.0
    length = group.episode.written if group.episode else group.answers[0]
    for start in range(0, answers, rows):
        count = min(rows, answers - start)
        before = group.prompt + group.answers[0] / 2
        total += length * (sizes.weights + count * before * sizes.token)
    return total / (card.bandwidth * 1e9 * WRITING * parallel)


def _notes(config: Config, gpus: int, observed: ObservationStats | None) -> Iterator[str]:
    if observed:
        yield (f"{observed.words()}; a token of text is taken to be {CHARACTERS:g} characters, and every turn to read "
               "all before it anew, which engines that keep their cache do not; the environment's own seconds are not "
               "counted")
    if config.engine.name == "hf":
        yield ("engine.name=hf: transformers writes slower than the card's bandwidth allows, so these seconds are the "
               "least; engine=vllm comes nearer to them")
    if config.engine.name == "vllm_server":
        yield "the servers' GPUs come on top of --gpus, and are of the same card"
    if config.rollout.prompts_per_step % gpus:
        yield (f"rollout.prompts_per_step={config.rollout.prompts_per_step} is no multiple of {gpus} GPUs: some wait "
               "for those that have a prompt more")


# --- as text ---------------------------------------------------------------------------------------------------------


def render(result: Plan) -> list[str]:
    """Returns the plan in lines."""
    trained, count = result.parameters
    resident = {name: getattr(result.memory, name) for name in _NAMES}
    lines = [f"{count / 1e9:.2f} billion parameters, {trained / 1e6:,.1f} million learn; prompts of {result.prompt:,} "
             f"tokens ({result.visual:,} visual), {_answers(result)}",
             "", f"memory of each of {result.gpus} x {result.card.name}, GiB"]
    lines += [f"  {_NAMES[name]:<24}{value / GIB:>8.2f}" for name, value in resident.items() if value]
    lines += [f"  {'+ while it learns':<24}{result.memory.training / GIB:>8.2f}   (activations "
              f"{(result.memory.activations + result.memory.block) / GIB:.2f}, gradients "
              f"{result.memory.gradients / GIB:.2f}, logits {result.memory.logits / GIB:.2f})"]
    if result.memory.generation and not result.engine:
        lines.append(f"  {'+ while it generates':<24}{result.memory.generation / GIB:>8.2f}   (KV cache "
                     f"{result.memory.cache / GIB:.2f})")
    if result.engine:
        lines.append(f"  {'+ vLLM':<24}{result.engine / GIB:>8.2f}   (engine.memory)")
    lines += [f"  {'CUDA':<24}{CONTEXT:>8.2f}", f"  {'at the worst moment':<24}{result.peak / GIB:>8.2f}   of "
              f"{result.gib:g}: {_verdict(result)}", f"  answers side by side: {result.side_by_side:,}"]
    lines += ["", "seconds of a step: arithmetic, at assumed "
              f"{LEARNING:.0%} of the card's operations in the update, {READING:.0%} over prompts, and {WRITING:.0%} "
              "of its bandwidth in writing"]
    lines += [f"  {name:<24}{value:>8.1f}" for name, value in result.seconds.items()]
    lines.append(f"  {'together':<24}{result.step:>8.1f}")
    return [*lines, *(f"note: {note}" for note in result.notes)]


def _answers(result: Plan) -> str:
    one = result.episode
    if one is None:
        return f"answers of {result.answer:,}"
    return (f"episodes of {one.tokens:,} tokens in {one.turns} turns, {result.answer:,} an action and {one.visual:,} "
            f"visual in {one.pictures} pictures")


def _verdict(result: Plan) -> str:
    if not result.side_by_side:
        return "does not fit: no room for the KV cache beside vLLM's weights (engine.memory)"
    if not result.fits:
        return "does not fit"
    if result.tight:
        return f"fits, barely: estimates have been up to {memory.BAND[1] - 1:.0%} too low"
    return "fits"
