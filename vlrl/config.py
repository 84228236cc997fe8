"""Typed settings: YAML files with `extends:`, `key=value` overrides, and the errors that help.

A config file holds only what differs from the defaults below; `extends: other.yaml` (relative to the file, or else one
of those that come with vlrl) is read first. `load("configs/quickstart.yaml", ["steps=20", "train.lr=1e-4"])` returns a
frozen Config; an unknown key is an error with a suggestion. The resolved copy is saved in the run folder.
"""

from __future__ import annotations

import difflib
import os
import reprlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from yaml.composer import ComposerError

import vlrl
from vlrl.errors import ConfigError, did_you_mean

Positive = Annotated[int, Field(ge=1, lt=2**63)]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]
Rate = Annotated[float, Field(gt=0)]
Beta = Annotated[float, Field(ge=0, lt=1)]

RESUMABLE = ("steps", "eval", "save", "log", "store", "run", "resume")
"""Top-level settings that may differ between a checkpoint and the run that resumes it."""


_SHORT = reprlib.Repr()
_SHORT.maxlevel = 2
_SHORT.maxstring = _SHORT.maxother = 300  # of a value in a message; of a nested one the first items


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value: Any, info: pydantic.ValidationInfo) -> Any:
        return refuse_bool(cls.model_fields[info.field_name or ""].annotation, value)


class RunSettings(Settings):
    """Where the run lies."""

    dir: str = Field(default="", description="The run folder; empty = runs/<config stem>.")


class TaskSettings(BaseModel):
    """`task.name` and what every task understands; further keys are the task's own fields."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: str = Field(default="", description="A built-in name (grounding), module:Class or path/file.py:Class.")
    coordinates: Literal["auto", "original", "processed", "norm1000", "norm999", "norm1"] = Field(
        default="auto", description="How the model writes boxes and points; auto = the model family's convention.")
    rewards: dict[str, Any] = Field(
        default_factory=dict, description="Weight per part: a number, or [[step, weight], ...] joined by lines.")


class DataSettings(Settings):
    """The files of rows that a task reads."""

    train: str = Field(default="", description="Rows to train on (.jsonl or .json); empty when the task draws its own.")
    heldout: str = Field(default="", description="Rows to evaluate on.")
    root: str = Field(
        default="", description="Folder that media paths are relative to; empty = the data file's folder.")
    format: str = Field(default="auto", description="Format of the rows; auto recognises it by their fields.")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63,
                      description="Seed of drawn data and of fixed splits; apart from the training seed.")
    quarantine: bool = Field(default=False, description="Leave bad rows out, count and list them, instead of stopping.")


class LoraSettings(Settings):
    """A LoRA adapter instead of a full fine-tune."""

    rank: Count = Field(default=0, description="0 = full fine-tuning.")
    alpha: Positive = Field(default=32, description="Scale; the update is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target: Literal["language", "all_linear", "vision_language"] = Field(
        default="language", description="language: the language model's linear layers; all_linear: these and the "
        "merger's; vision_language: these and the vision tower's.")
    quantize: Literal["none", "nf4"] = Field(
        default="none", description="nf4: the frozen weights under the adapter are kept in 4 bits (QLoRA); needs "
        "bitsandbytes. Embeddings, lm_head and layers without an adapter stay in model.dtype.")

    @model_validator(mode="after")
    def _needs_adapter(self) -> LoraSettings:
        if self.quantize != "none" and self.rank == 0:
            raise ValueError(f"model.lora.quantize={self.quantize} keeps frozen weights in 4 bits, but with "
                             "model.lora.rank=0 they are to be trained: add an adapter (model.lora.rank=16), or set "
                             "model.lora.quantize=none")
        return self


class ModelSettings(Settings):
    """The model, what of it learns, and how large it sees images and videos."""

    name: str = Field(default="", description="Hub name or folder of the model.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute type and type of frozen weights; trained weights stay in float32. "
        "auto = bfloat16 on CUDA, else float32. float16, with loss scaling, is for GPUs without bfloat16.")
    train: tuple[Literal["language", "merger", "vision"], ...] = Field(
        default=("language",), description="Parts of a full fine-tune that learn.")
    lora: LoraSettings = LoraSettings()
    max_pixels: Positive | None = Field(default=None, description="Upper limit of an image after resizing, in pixels.")
    min_pixels: Positive | None = Field(default=None, description="Lower limit of an image after resizing, in pixels.")
    video_fps: float = Field(default=2.0, gt=0, description="Frames per second sampled from a video.")
    video_max_frames: Annotated[int, Field(ge=2)] = Field(default=64, description="Most frames sampled from a video.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")


class EngineSettings(Settings):
    """What generates the answers."""

    name: Literal["hf"] = Field(default="hf", description="What generates the answers.")
    batch_rollouts: Positive = Field(default=256, description="Answers generated side by side.")


class RolloutSettings(Settings):
    """How many answers a step draws, how they are sampled, and how often they are learned from."""

    prompts_per_step: Positive = Field(default=32, description="Prompts a step, over all processes.")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="Answers per prompt.")
    max_new_tokens: Positive = Field(default=512, description="Most tokens of one answer.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; training uses the same.")
    updates: Positive = Field(default=1, description="Passes over one batch of rollouts.")
    minibatches: Positive = Field(default=1, description="Optimizer steps per pass.")


class AlgoSettings(Settings):
    """From rewards to a loss."""

    advantage: str = Field(default="grpo", description="grpo, dr_grpo, or own module:function.")
    loss: str = Field(default="ppo_clip", description="ppo_clip, reinforce, or own module:function.")
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        default="token_mean", description="token_mean: sum / tokens of the optimizer step; sequence_mean: mean of "
        "per-answer means; constant: sum / (answers * rollout.max_new_tokens).")
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="The ratio is clipped below 1 - clip_low.")
    clip_high: float = Field(default=0.2, gt=0, description="The ratio is clipped above 1 + clip_high.")
    kl_coef: NonNegative = Field(
        default=0.0, description="Weight of the KL to the reference; 0 = no reference is kept.")
    mask_truncated: bool = Field(default=False, description="Leave answers that hit the length limit out of the loss.")


class CurriculumSettings(Settings):
    """Which samples are drawn, and which groups are learned from."""

    name: str = Field(default="uniform", description="uniform, sequential, or own module:Class.")
    keep: Literal["all", "mixed"] = Field(
        default="all", description="mixed: groups whose rewards are all equal are dropped and refilled.")
    max_refills: Count = Field(default=3, description="Most extra rounds of generation in a step when keep=mixed.")


class TrainSettings(Settings):
    """The optimizer, and how much it takes at a time."""

    lr: float = Field(default=1e-6, gt=0, description="Peak learning rate.")
    part_lr: dict[Literal["language", "merger", "vision"], Rate] = Field(
        default_factory=dict, description="Learning rate of a part, instead of train.lr.")
    schedule: Literal["constant", "linear", "cosine"] = Field(default="constant", description="After the warm-up.")
    warmup: Fraction = Field(default=0.0, description="Share of all steps over which the rate rises from 0.")
    min_lr_ratio: Fraction = Field(default=0.0, description="Where linear and cosine end, as a share of the peak.")
    betas: tuple[Beta, Beta] = Field(default=(0.9, 0.999), description="AdamW.")
    weight_decay: NonNegative = Field(default=0.0, description="AdamW, on matrices only.")
    max_grad_norm: float = Field(default=1.0, gt=0, description="Gradients are clipped to this norm.")
    tokens_per_batch: Positive = Field(default=8192, description="Packed tokens per process and micro-batch.")
    packing: Literal["shared", "padded"] = Field(
        default="shared", description="shared: a group's prompt is computed once; padded: one row per answer (the "
        "oracle).")


class EvalSettings(Settings):
    """Measuring on splits that are not trained on."""

    every: Count = Field(default=0, description="Steps between evaluations; 0 = before and after only.")
    samples: Count = Field(default=256, description="Samples per split; 0 = no evaluation.")
    splits: tuple[str, ...] = Field(default=("heldout",), description="Splits evaluated.")
    temperature: NonNegative = Field(default=0.0, description="0 = greedy.")


class SaveSettings(Settings):
    """Checkpoints."""

    every: Count = Field(default=50, description="Steps between checkpoints; the last step is always saved.")
    keep: Positive = Field(default=2, description="Most checkpoints kept.")


class StoreSettings(Settings):
    """What the run folder keeps of the rollouts."""

    media: Literal["copy", "link", "none"] = Field(default="copy", description="How media enters the run folder.")
    rollouts: bool = Field(default=True, description="Write every rollout.")


class LogSettings(Settings):
    """What is shown and sent while the run goes on."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = Field(
        default=(), description="Where metrics are sent besides metrics.jsonl.")
    project: str = Field(default="vlrl", description="Project name at the trackers.")
    samples_every: Count = Field(default=10, description="Steps between printed sample answers; 0 = never.")


class LimitsSettings(Settings):
    """Where a run stops, or leaves something out, instead of going wrong."""

    prompt_tokens: Positive = Field(default=16384, description="A longer prompt is rejected at load, never truncated.")
    rejected: Fraction = Field(
        default=0.5, description="Stop when more than this share of the drawn prompts is rejected.")
    score_errors: Fraction = Field(
        default=0.1, description="Stop when more than this share of a step's rollouts fails to score.")
    image_pixels: Positive = Field(default=64_000_000, description="An image with more pixels is refused unread.")
    media_bytes: Positive = Field(default=2_000_000_000, description="A larger media file is refused unread.")


class Config(Settings):
    """All settings of a run."""

    steps: Count = Field(default=100, description="Training steps in all, those before a resume included.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of sampling, data order and dropout.")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto", description="auto: go on from the newest checkpoint if there is one; never: start over; must: "
        "fail without one.")
    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    algo: AlgoSettings = AlgoSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    save: SaveSettings = SaveSettings()
    store: StoreSettings = StoreSettings()
    log: LogSettings = LogSettings()
    limits: LimitsSettings = LimitsSettings()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """`engine: hf` and `task: grounding` are short for their `name`."""
        if isinstance(values, Mapping):
            named = {k: {"name": values[k]} for k in ("engine", "task") if isinstance(values.get(k), str)}
            return {**values, **named}
        return values

    @model_validator(mode="after")
    def _required(self) -> Config:
        if not self.task.name:
            raise ValueError("task.name is not set: name a built-in task or a file, e.g. task.name=grounding")
        if not self.model.name:
            raise ValueError("model.name is not set: give a hub name or a folder, e.g. "
                             "model.name=Qwen/Qwen2.5-VL-3B-Instruct")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.rollout.minibatches > self.rollout.prompts_per_step:
            raise ValueError(f"rollout.minibatches={self.rollout.minibatches} is more than "
                             f"rollout.prompts_per_step={self.rollout.prompts_per_step}: a mini-batch would be empty")
        if not self.model.train and self.model.lora.rank == 0:
            raise ValueError("model.train=[]: nothing would learn; name at least one of language, merger and vision, "
                             "or train an adapter with model.lora.rank=16")
        low, high = self.model.min_pixels, self.model.max_pixels
        if low and high and low > high:
            raise ValueError(f"model.min_pixels={low} is more than model.max_pixels={high}: lower the one or raise the "
                             "other")
        if low and low > self.limits.image_pixels:
            raise ValueError(f"model.min_pixels={low} enlarges every image beyond limits.image_pixels="
                             f"{self.limits.image_pixels}: lower it")
        splits = self.eval.splits
        twice = [name for i, name in enumerate(splits) if name in splits[:i]]
        if twice:
            raise ValueError(f"eval.splits={list(splits)}: '{twice[0]}' stands there twice; name each split once")
        return self


def refuse_bool(kind: Any, value: Any) -> Any:
    """The value; ValueError when it is, or holds, true or false and the annotation `kind` wants numbers.

    Pydantic would take true as 1: `steps=true` or `betas: [true, false]` are slips of the pen.
    """
    kinds = _kinds(kind)
    held = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else [value]
    if kinds & {int, float} and bool not in kinds and any(isinstance(v, bool) for v in held):
        raise ValueError("give a number, not true or false")
    return value


def _kinds(kind: Any) -> set[Any]:
    """The plain types that an annotation names, at any depth."""
    if isinstance(kind, type) and not get_args(kind):
        return {kind}
    return {found for part in get_args(kind) for found in _kinds(part)}


def load(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a config file and applies `key=value` overrides in order.

    Raises ConfigError naming the setting, its value and the way out. `run.dir` is resolved to `runs/<stem>` when empty.
    """
    path = _find(Path(path))
    tree = _read(path)
    for word in overrides:
        _override(tree, word)
    tree.setdefault("run", {})
    if isinstance(tree["run"], dict) and not tree["run"].get("dir"):
        tree["run"]["dir"] = str(Path("runs") / path.stem)
    return validate(tree)


def validate(tree: Mapping[str, Any]) -> Config:
    """A Config from nested dictionaries; raises ConfigError for unknown keys, wrong types and values out of range."""
    try:
        return Config.model_validate(tree)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def differences(old: Config, new: Config) -> list[str]:
    """Lines `name: old -> new` for the settings whose change forbids a resume (contracts: all but RESUMABLE)."""
    a, b = (_flatten(c.model_dump(mode="json", exclude=set(RESUMABLE))) for c in (old, new))
    return [f"{k}: {a.get(k)!r} -> {b.get(k)!r}" for k in sorted({*a, *b}) if a.get(k) != b.get(k)]


def dump(config: Config) -> str:
    """The resolved config as YAML."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def describe() -> list[tuple[str, str, Any, str]]:
    """(name, type in words, default, description) of every setting, in order; for `--settings` and the docs."""
    from vlrl.tools import docs

    return list(docs.describe(Config))


def _find(path: Path) -> Path:
    for candidate in (path, *(Path(folder) / path for folder in vlrl.__path__)):
        if os.path.isfile(candidate):  # Path.is_file raises for a name that is too long
            return candidate
    if os.path.exists(path):
        kind = "a folder" if os.path.isdir(path) else "no regular file"
        raise ConfigError(f"config {str(path)!r} is {kind}: name a YAML file, e.g. configs/quickstart.yaml")
    known = {p.name: str(Path(*p.parts[p.parts.index("configs"):])) for p in shipped_configs()}
    if os.path.isdir(path.parent):
        known |= {p.name: p.name for p in path.parent.glob("*.yaml")}
    close = difflib.get_close_matches(path.name, known, n=1)
    near = f" Did you mean '{known[close[0]]}'?" if close else ""
    raise ConfigError(f"config file {str(path)!r} does not exist.{near}")


def shipped(name: str) -> Path | None:
    """The file of a config that comes with vlrl, named relative to its folder, e.g. "tiny.yaml"; None without one."""
    places = [Path(folder) / "configs" / name for folder in vlrl.__path__]
    return next((place for place in places if os.path.isfile(place)), None)


def shipped_configs() -> list[Path]:
    """Every config that comes with vlrl."""
    return [path for folder in vlrl.__path__ for path in sorted(Path(folder, "configs").rglob("*.yaml"))]


def _read(path: Path, seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path.resolve() in seen:
        raise ConfigError(f"{path}: 'extends' leads in a circle")
    try:
        tree = _parse(path.read_text(encoding="utf-8")) or {}
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read config {path}: it is no UTF-8 text. Save it as UTF-8.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read config {path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(tree, dict):
        kind = {"list": "a list", "str": "a text"}.get(type(tree).__name__, f"a {type(tree).__name__}")
        raise ConfigError(f"config {path} must hold settings as 'key: value', not {kind}")
    parent = tree.pop("extends", None)
    if parent is None:
        return tree
    base = path.parent / str(parent)
    if not os.path.isfile(base):
        base = shipped(str(parent))
    if base is None:
        near = did_you_mean(str(parent), [p.name for p in [*path.parent.glob("*.yaml"), *shipped_configs()]])
        raise ConfigError(f"{path}: extends: {parent!r} does not exist (it is relative to the file that names it, or "
                          f"names one of vlrl's).{near}")
    return merge(_read(base, (*seen, path.resolve())), tree)


class _Loader(yaml.SafeLoader):
    """YAML in which a mapping has each key once; YAML's own loader lets the last one win."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                raise ComposerError(None, None, f"line {line}: the key '{name}' stands in line {lines[name]} already; "
                                    "keep one of them", None)
            lines[name] = line
        return node


def _parse(text: str) -> Any:
    """The value of a YAML text. Raises ValueError that says what is wrong with it."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ValueError(f"{mark}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # its constructors raise ValueError, KeyError, ... on values like 2020-13-45
        raise ValueError(f"{type(error).__name__}: {error}") from None


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`over` laid on `base`; dictionaries are merged, everything else is replaced."""
    out = dict(base)
    for key, value in over.items():
        old = out.get(key)
        out[key] = merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return out


def _override(tree: dict[str, Any], word: str) -> None:
    key, equals, text = word.partition("=")
    if not equals or not key:
        raise ConfigError(f"{word!r} is not a setting: write key=value, e.g. train.lr=1e-6")
    try:
        value = _parse(text) if text else ""
    except ValueError as error:
        raise ConfigError(f"{key}: cannot read the value {text!r}: {error}") from None
    *path, last = key.split(".")
    for name in path:
        child = tree.get(name)
        if isinstance(child, str) and name in ("engine", "task"):
            child = {"name": child}
        tree[name] = child = dict(child) if isinstance(child, Mapping) else {}
        tree = child
    tree[last] = merge(tree[last], value) if isinstance(value, dict) and isinstance(tree.get(last), dict) else value


def _explain(error: Any) -> str:
    loc = [str(part) for part in error["loc"]]
    name, value = ".".join(loc), _SHORT.repr(error.get("input"))
    if error["type"] == "extra_forbidden":
        known = _names_at(loc[:-1])
        near = did_you_mean(loc[-1], known)
        return f"unknown setting '{name}' (value {value}).{near or ' Known here: ' + ', '.join(known) + '.'}"
    message = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "model_type" and loc:
        message = f"write its settings below it, as 'key: value', or leave it out. Known: {', '.join(_names_at(loc))}."
    if error["type"] == "invalid_key":
        return f"unknown setting '{name}': the name of a setting is a text"
    return f"{name}={value}: {message}" if loc else message


def _names_at(loc: Sequence[str]) -> list[str]:
    model: Any = Config
    for part in loc:
        info = model.model_fields.get(part)
        model = info.annotation if info else Settings
        if not isinstance(model, type):
            model = next((a for a in get_args(model) if isinstance(a, type) and issubclass(a, BaseModel)), Settings)
    return list(model.model_fields)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= _flatten(value, f"{prefix}{key}.")
        else:
            out[prefix + str(key)] = value
    return out
