"""Typed settings of a run: names, types, defaults, limits, and what each is for; loading.py reads them from files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from vlrl.config.alerts import AlertSettings
from vlrl.config.algo import AlgoSettings
from vlrl.config.base import Beta, Count, Fraction, NonNegative, Positive, Rate, Settings
from vlrl.config.engine import PLACES, EngineSettings
from vlrl.config.episodes import EnvironmentSettings, EpisodeSettings
from vlrl.config.rollout import AsyncSettings, CurriculumSettings, RolloutSettings
from vlrl.config.sections import active
from vlrl.config.services import FOLLOWS, ServicesSettings
from vlrl.config.services import PLACES as SERVICE_PLACES
from vlrl.config.stages import MergeSettings, RoundsSettings, StageEntry
from vlrl.config.tasks import TaskEntry, TaskSettings, label_of
from vlrl.config.url_entries import parts

__all__ = ["RESUMABLE", "SHORT", "AlgoSettings", "AsyncSettings", "Config", "CurriculumSettings", "DataSettings",
           "EngineSettings", "EnvironmentSettings", "EpisodeSettings", "LimitsSettings", "LoraSettings",
           "MergeSettings", "ModelSettings", "RolloutSettings", "RoundsSettings", "StageEntry", "TaskSettings",
           "TrainSettings", "label_of", "resumable"]

RESUMABLE = ("steps", "eval", "save", "log", "store", "run", "resume", "alerts", "presets", "data.cache",
             "train.sharding", "train.cpu_offload", "limits.collective_s", "limits.environment_errors",
             "limits.nonfinite_steps", "limits.score_s", "limits.service_errors", "limits.stuck_s", "environment.name",
             *SERVICE_PLACES, *(f"engine.{name}" for name in PLACES))
"""Settings, and sections of them, that may differ between a checkpoint and the run that resumes it."""
SHORT = ("engine", "task", "curriculum")
"""Top-level settings of which a text alone is the `name`."""


def resumable(name: str) -> bool:
    """Returns whether the setting `name`, e.g. engine.servers, may differ between a checkpoint and the run that resumes
    it.
    """
    return any(name == one or name.startswith(f"{one}.") for one in RESUMABLE)


class RunSettings(Settings):
    """Where the run lies."""

    dir: str = Field(default="", description="The run folder; empty = runs/<config stem>.")
    steal_lock: bool = Field(
        default=False, description="Take a run folder whose run on another host gives no sign of life for three "
        "minutes, as after a crash of that host. A run that lives keeps its folder.")
    checks: Literal["stop", "warn"] = Field(
        default="stop", description="What the checks of the first samples do (media that no prompt shows, a prompt "
        "without what `score` reads, a perfect answer below the maximum; docs/write-a-task.md): stop the run before "
        "the model is loaded, or warn.")


AnswerType = Literal["choice", "number", "count", "yes_no", "math", "chart", "ocr", "regression", "text"]


class DataSettings(Settings):
    """The files of rows that a task reads."""

    train: str = Field(default="", description="Rows to train on: a file, a folder, a pattern (rows-*.parquet), a "
                       "split of a folder (folder@train), or a data set of the Hugging Face Hub (org/name@train, "
                       "org/name/config@train, org/name@train#revision); empty when the task draws its own.")
    heldout: str = Field(default="", description="Rows to evaluate on.")
    own_samples: bool = Field(
        default=True, description="false: the rows of data.train, and of data.heldout where it is given, are used in "
        "place of what a task with samples of its own draws, e.g. the answers that the inspector exports. true: such "
        "a task refuses these files.")
    solutions: str = Field(
        default="", description="A file of answers to learn from (.jsonl; number, id, solution): the training rows are "
        "those that it names, with these answers as their `solution`. A stage of kind rounds writes one.")
    root: str = Field(
        default="", description="Folder that media paths are relative to; empty = the data file's folder.")
    format: str = Field(default="auto", description="Format of the rows; auto recognises it by their fields.")
    columns: Mapping[str, str] = Field(
        default_factory=dict, description="Which column of the files stands for a field of the rows: "
        "{question: problem, answer: solution, images: image}. Known shapes need none.")
    boxes: Literal["auto", "pixels", "norm1000", "norm1", "xywh", "xywh-norm1000", "xywh-norm1"] = Field(
        default="auto", description="What boxes and points of the files are, where their format does not say: pixels "
        "of the original image, 0 to 1000 (norm1000) or shares (norm1); [x, y, width, height] in place of corners "
        "(xywh). auto = corners in pixels, and a warning where the file as a whole speaks against it.")
    answer_type: AnswerType | None = Field(
        default=None, description="answer_type of all rows that ask without options, before what their fields say; "
        "null = by the fields, else settled over the file by its answers and questions, as `vlrl data check` shows.")
    index: Literal["auto", "memory", "lazy"] = Field(
        default="auto", description="memory: all rows are read and checked at the start. lazy: a row is read when it "
        "is drawn, and a bad one is left out then (data.quarantine) or stops the run; for files larger than memory. "
        "auto = lazy for a large file (from 64 MiB) of a format that has one row per record.")
    stream: bool = Field(
        default=False, description="Read rows nearly in the order in which they lie on the disk, as slow disks and "
        "network file systems need: rows are read when they are drawn (data.index=lazy), and curriculum.name=uniform "
        "draws runs of 1000 neighbours in a shuffled order, mixed by data.shuffle_buffer.")
    shuffle_buffer: Positive = Field(
        default=1000, description="With data.stream: so many rows that follow one another are shuffled; 1 = none, more "
        "than 1000 mix rows from several places of the disk. What is shuffled are places: no row is held in memory."
    )
    media_roots: tuple[str, ...] = Field(
        default=(), description="Further folders that media paths may lead into, absolute or by '..' and links. A row "
        "whose media lie elsewhere is a bad row.")
    urls: bool | tuple[str, ...] = Field(
        default=False, description="Whether media may be URLs: false, true (every public host, by https), or hosts, as "
        "in [images.example.org, '*.example.org', 'example.org:8443', 'http://example.org']. Private addresses are "
        "never asked. See docs/security.md.")
    cache: str = Field(
        default="", description="Folder that keeps what was fetched from URLs and the Hub, and the places of rows in "
        "large files; empty = vlrl in the user's cache folder.")
    seed: int = Field(default=0, ge=-(2**63), lt=2**63,
                      description="Seed of drawn data and of fixed splits; apart from the training seed.")
    quarantine: bool = Field(default=False, description="Leave bad rows out, count and list them, instead of stopping.")
    clip_cache_mib: Count = Field(
        default=256, description="Host memory per process for decoded frames of video files, in MiB: a clip that "
        "several prompts or steps show is decoded once, and the least recently used leave first; 0 = off.")
    difficulty: str = Field(
        default="", description="Columns for samplers (pass_at_k, difficulty ...) by id (.jsonl, .json), as "
        "`vlrl data difficulty` writes them; they come before fields of the rows. Empty = those fields alone.")
    workers: Annotated[int, Field(ge=0, le=64)] = Field(
        default=2, description="Threads per process that read and process the media of the next prompts while a step "
        "computes; 0 = none.")

    @model_validator(mode="after")
    def _streams(self) -> DataSettings:
        if self.stream and self.index == "memory":
            raise ValueError("data.stream=true reads rows when they are drawn, and data.index=memory all of them at "
                             "the start: leave one of them out")
        return self

    @field_validator("media_roots", "urls", mode="before")
    @classmethod
    def _one_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @field_validator("urls")
    @classmethod
    def _hosts(cls, value: bool | tuple[str, ...]) -> bool | tuple[str, ...]:
        for entry in value if isinstance(value, tuple) else ():
            parts(entry)
        return value


class LoraSettings(Settings):
    """A LoRA adapter instead of a full fine-tune."""

    rank: Count = Field(default=0, description="0 = full fine-tuning.")
    alpha: Positive = Field(default=32, description="Scale; the update is multiplied by alpha / rank.")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    target: str | tuple[str, ...] = Field(
        default="language", description="language: the language model's linear layers; all_linear: these and the "
        "merger's; vision_language: these and the vision tower's. Or names of linear layers, as in [q_proj, v_proj], "
        "and regular expressions of whole names; those that are of no layer are refused.")
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

    name: str = Field(default="", description="Hub name or folder of the model; of a run folder, its newest "
                      "checkpoint.")
    chat_template_kwargs: Mapping[str, bool | int | float | str] = Field(
        default_factory=dict, description="Options that the model's chat template reads, e.g. {enable_thinking: "
        "false}; one that it does not read is refused.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Compute type and type of frozen weights; trained weights stay in float32. "
        "auto = bfloat16 on CUDA, else float32. float16, with loss scaling, is for GPUs without bfloat16.")
    train: tuple[Literal["language", "merger", "vision"], ...] = Field(
        default=("language",), description="Parts of a full fine-tune that learn.")
    lora: LoraSettings = LoraSettings()
    max_pixels: Positive | None = Field(default=None, description="Upper limit of an image after resizing, in pixels.")
    min_pixels: Positive | None = Field(default=None, description="Lower limit of an image after resizing, in pixels.")
    video_fps: float = Field(default=2.0, gt=0, description="Frames per second sampled from a video.")
    video_min_frames: Annotated[int, Field(ge=2)] = Field(
        default=4, description="Fewest frames sampled from a video that has so many.")
    video_max_frames: Annotated[int, Field(ge=2)] = Field(default=64, description="Most frames sampled from a video.")
    video_max_pixels: Positive | None = Field(
        default=None, description="Upper limit of a video frame after resizing, in pixels; null = model.max_pixels.")
    video_min_pixels: Positive | None = Field(
        default=None, description="Lower limit of a video frame after resizing, in pixels; null = model.min_pixels.")
    video_total_pixels: Positive | None = Field(
        default=None, description="Upper limit of all frames of a video together, in pixels, two merged frames counted "
        "as one: the more frames, the smaller each. Lower limits of a frame come first, as in qwen-vl-utils.")
    gradient_checkpointing: bool = Field(default=False, description="Recompute activations in the backward pass.")
    feature_cache_mib: Count = Field(
        default=0, description="Host memory for the features of images and videos, in MiB: each is encoded once, and "
        "the least recently used leave first. Needs a vision tower and merger that do not learn; 0 = off.")

    @property
    def frame_pixels(self) -> tuple[int | None, int | None]:
        """Lower and upper limit of a video frame in pixels."""
        low, high = self.video_min_pixels, self.video_max_pixels
        return self.min_pixels if low is None else low, self.max_pixels if high is None else high

    @model_validator(mode="after")
    def _limits_leave_room(self) -> ModelSettings:
        if self.video_min_frames > self.video_max_frames:
            raise ValueError(f"model.video_min_frames={self.video_min_frames} is more than model.video_max_frames="
                             f"{self.video_max_frames}: lower the one or raise the other")
        low, high = self.frame_pixels
        if low and high and low > high and (self.video_min_pixels or self.video_max_pixels):
            raise ValueError(f"a video frame has at least {low} and at most {high} pixels: change "
                             f"model.video_min_pixels={self.video_min_pixels} or model.video_max_pixels="
                             f"{self.video_max_pixels}")
        return self

    @model_validator(mode="after")
    def _cached_features_stay_true(self) -> ModelSettings:
        adapter = self.lora.rank > 0
        given = f"model.lora.target={self.lora.target}" if adapter else f"model.train=[{', '.join(self.train)}]"
        fits = self.lora.target == "language" if adapter else not {"merger", "vision"} & {*self.train}
        if self.feature_cache_mib and not fits:
            raise ValueError(f"model.feature_cache_mib={self.feature_cache_mib} keeps what the vision tower and the "
                             f"merger make of an image, but with {given} they learn. Set "
                             f"{'model.lora.target=language' if adapter else 'model.train=[language]'}, or "
                             "model.feature_cache_mib=0")
        return self


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
        default="shared", description="shared: a group's prompt is computed once, and what its answers begin with in "
        "common, from 32 tokens on; padded: one row per answer (the oracle).")
    attention: Literal["auto", "merged", "masked", "varlen", "flex"] = Field(
        default="auto", description="Attention of shared rows, all equal up to rounding: merged (CPU), varlen (CUDA, "
        "flash attention, 16 bits), flex (CUDA, FlexAttention) or masked (anywhere). auto = merged on a CPU, else "
        "masked.")
    sharding: Literal["auto", "none", "fsdp2", "zero2", "zero3"] = Field(
        default="auto", description="With several processes: none = each holds the whole model; fsdp2 = weights, "
        "gradients and optimizer state are sharded over them (docs/scaling.md); zero3 = the same by DeepSpeed, "
        "zero2 without the weights. auto = what accelerate launch asks for by --use_fsdp or --use_deepspeed, else "
        "none.")
    cpu_offload: bool = Field(default=False, description="Shards and what the optimizer keeps of them stay in main "
                              "memory, where it steps; with train.sharding=fsdp2.")
    gather: Literal["stored", "compute"] = Field(
        default="stored", description="Type in which sharded weights are gathered. stored: as they are kept, with the "
        "numbers of a run without sharding; compute: model.dtype, half the traffic and memory of float32.")
    balance: bool = Field(
        default=True, description="With several processes: after scoring, groups move between them until each has as "
        "much to compute.")


class EvalSettings(Settings):
    """Measuring on splits that are not trained on."""

    every: Count = Field(default=0, description="Steps between evaluations; 0 = before and after only.")
    samples: Count = Field(default=256, description="Samples per split; 0 = no evaluation.")
    splits: tuple[str, ...] = Field(default=("heldout",), description="Splits evaluated.")
    temperature: NonNegative = Field(default=0.0, description="0 = greedy.")


class SaveSettings(Settings):
    """Checkpoints (docs/long-runs.md)."""

    every: Count = Field(default=50, description="Steps between checkpoints; the last step is always saved.")
    keep: Positive = Field(default=2, description="Most checkpoints kept.")
    best: str = Field(
        default="reward/mean", description="Metric of eval.jsonl of the first of eval.splits: the checkpoint with its "
        "highest value (of `loss`, which supervised runs have, the lowest) is kept besides, as checkpoints/best. Empty "
        "= none.")
    background: bool = Field(
        default=True, description="Weights and optimizer are copied to host memory (12 bytes per trained parameter) "
        "and written while training goes on. Where that much memory is not free, or with false, training waits.")
    grace: NonNegative = Field(
        default=20.0, description="Seconds that the step in flight may take after SIGTERM, SIGUSR1 or SIGHUP before it "
        "is given up. After Ctrl-C it may take as long as it likes.")


class StoreSettings(Settings):
    """What the run folder keeps of the rollouts."""

    media: Literal["copy", "link", "none"] = Field(default="copy", description="How media enters the run folder.")
    rollouts: bool = Field(default=True, description="Write every rollout.")
    alternatives: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0, description="Most probable tokens kept beside each trained one, for the viewer; 0 = none.")


class LogSettings(Settings):
    """What is shown and sent while the run goes on."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = Field(
        default=(), description="Where metrics are sent besides metrics.jsonl.")
    project: str = Field(default="vlrl", description="Project name at the trackers.")
    pictures: Count = Field(
        default=0, description="Groups of which trackers get the pictures with the boxes of target and answers and a "
        "table of answers and reward parts, and with them histograms over the step; at every evaluation, and in "
        "training every log.pictures_every steps. 0 = none. Whoever may look at the tracker sees the data.")
    pictures_every: Positive = Field(default=10, description="Steps of training between pictures of log.pictures.")
    samples_every: Count = Field(default=10, description="Steps between printed sample answers; 0 = never.")


class LimitsSettings(Settings):
    """Where a run stops, or leaves something out, instead of going wrong."""

    prompt_tokens: Positive = Field(default=16384, description="A longer prompt is rejected at load, never truncated.")
    rejected: Fraction = Field(
        default=0.5, description="Stop when more than this share of the drawn prompts is rejected.")
    score_errors: Fraction = Field(
        default=0.1, description="Stop when more than this share of a step's rollouts fails to score.")
    environment_errors: Fraction = Field(
        default=0.1, description="Stop when more than this share of a step's episodes ended with an error of their "
        "environment. Such an episode is not scored, and counts nowhere else.")
    service_errors: Fraction = Field(
        default=0.5, description="Stop when a service, such as a judge, did not answer for more than this share of a "
        "step's rollouts. Such a rollout is unscorable, and counts nowhere else.")
    mismatch: NonNegative | None = Field(
        default=None, description="Stop when mismatch/kl of a step, how far sampler and trainer disagree, is larger "
        "per token; null = never. alerts.mismatch_above tells of it.")
    nonfinite_steps: Count = Field(
        default=3, description="An optimizer step whose loss or gradient is NaN or infinite is left out, and the run "
        "stops when that happens in more than so many steps in a row; 0 = at the first one.")
    score_s: NonNegative = Field(
        default=60.0, description="Seconds that a task's code may take for one answer. It runs in a process of its own "
        "(Linux), which is ended then and started again; the answer's reward is 0, and it counts as a scoring error. "
        "0 = no limit, in the training process.")
    stuck_s: NonNegative = Field(
        default=7200.0, description="Stop, with the stacks of all threads on disk, when no phase of a step begins or "
        "ends for so many seconds; 0 = never.")
    image_pixels: Positive = Field(default=64_000_000, description="An image with more pixels is refused unread.")
    video_pixels: Positive = Field(
        default=2_000_000_000, description="A video whose sampled frames have more pixels together is refused unread; "
        "they take three bytes each.")
    media_bytes: Positive = Field(default=2_000_000_000, description="A larger media file is refused unread.")
    url_seconds: float = Field(
        default=60.0, gt=0, description="A URL of data.urls that is not there after so long, redirects and further "
        "tries included, is refused.")
    collective_s: Annotated[int, Field(ge=1, le=10**7)] = Field(
        default=1800, description="With several processes: seconds that one waits for the others, e.g. for the longest "
        "answers of a step, before the run ends with an error that names who was missing where.")


def _with_reference(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings with algo.reference as services.reference says. ValueError where both say something."""
    services, algo = values.get("services") or {}, values.get("algo") or {}
    requested = services.get("reference") if isinstance(services, Mapping) else None
    if not isinstance(requested, str) or requested not in FOLLOWS or not isinstance(algo, Mapping):
        return values
    given = algo.get("reference") or "auto"
    options = given if isinstance(given, Mapping) else {"name": given}
    if options.get("name", "auto") not in ("auto", FOLLOWS[requested]):
        raise ValueError(f"services.reference={requested} and algo.reference={options['name']}: a run has one "
                         "reference policy. Leave one of them out")
    return {**values, "algo": {**algo, "reference": {**options, "name": FOLLOWS[requested]}}}


class Config(Settings):
    """All settings of a run."""

    model_config = ConfigDict(serialize_by_alias=True)
    steps: Count = Field(default=100, description="Training steps in all, those before a resume included.")
    seed: int = Field(default=0, ge=0, lt=2**63, description="Seed of sampling, data order and dropout.")
    resume: Literal["auto", "never", "must"] = Field(
        default="auto", description="auto: go on from the newest checkpoint if there is one; never: start over; must: "
        "fail without one.")
    tasks: tuple[TaskEntry, ...] = Field(
        default=(), description="Several tasks instead of `task`, each with name, weight, label, data and what `task` "
        "has (docs/tasks.md).")
    stages: tuple[StageEntry, ...] = Field(
        default=(), description="Parts that follow one another, each from the weights of the one before: a list of "
        "name, kind (sft, rl, rounds, merge), begin, hand_over, and settings that override those beside it "
        "(docs/stages.md).")
    presets: tuple[str, ...] = Field(
        default=(), description="The presets that these settings were made of, noted by the loader: what they need is "
        "compared with the rest (`vlrl presets`).")
    run: RunSettings = RunSettings()
    task: TaskSettings = TaskSettings()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    engine: EngineSettings = EngineSettings()
    rollout: RolloutSettings = RolloutSettings()
    asynchronous: AsyncSettings = Field(default=AsyncSettings(), alias="async")
    algo: AlgoSettings = AlgoSettings()
    episode: EpisodeSettings = EpisodeSettings()
    environment: EnvironmentSettings = EnvironmentSettings()
    services: ServicesSettings = ServicesSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    train: TrainSettings = TrainSettings()
    eval: EvalSettings = EvalSettings()
    save: SaveSettings = SaveSettings()
    store: StoreSettings = StoreSettings()
    log: LogSettings = LogSettings()
    limits: LimitsSettings = LimitsSettings()
    alerts: AlertSettings = AlertSettings()
    rounds: RoundsSettings = RoundsSettings()
    merge: MergeSettings = MergeSettings()

    @model_validator(mode="before")
    @classmethod
    def _short_forms(cls, values: Any) -> Any:
        """Returns `engine: hf`, `task: grounding` and `curriculum: sec` are short for their `name`; `task: null` takes
        away what a base says.
        """
        if isinstance(values, Mapping):
            values = {k: v for k, v in values.items() if v is not None or k not in ("task", "tasks")}
            named = {k: {"name": values[k]} for k in SHORT if isinstance(values.get(k), str)}
            return _with_reference({**values, **named})
        return values

    @model_validator(mode="after")
    def _required(self) -> Config:
        if self.tasks and self.task != TaskSettings():
            if not self.task.name:
                given = next(iter(self.task.model_dump(exclude_defaults=True)))
                raise ValueError(f"task.{given} is set, but this config has several tasks ({self.task_name}): set it "
                                 f"of one of them, e.g. tasks.0.{given}")
            raise ValueError(f"task.name={self.task.name!r} and tasks ({self.task_name}) are both set, and a run has "
                             "one task or several: remove task (task=null), or tasks (tasks=null)")
        if not self.tasks and not self.task.name:
            raise ValueError("task.name is not set: name a built-in task or a file, e.g. task.name=grounding")
        if not self.model.name:
            raise ValueError("model.name is not set: give a hub name or a folder, e.g. "
                             "model.name=Qwen/Qwen2.5-VL-3B-Instruct")
        return self

    @model_validator(mode="after")
    def _tasks_apart(self) -> Config:
        labels = [entry.label for entry in self.tasks]
        for i, label in enumerate(labels):
            if label in labels[:i]:
                first = labels.index(label)
                raise ValueError(f"tasks.{first}.name={self.tasks[first].name!r} and tasks.{i}.name="
                                 f"{self.tasks[i].name!r} are both called {label!r}: give one another label, e.g. "
                                 f"tasks.{i}.label={label}-{i}")
        if self.tasks and all(entry.weight == 0 for entry in self.tasks):
            raise ValueError("tasks: every weight is 0, so nothing would be drawn; give one a weight above 0")
        return self

    @model_validator(mode="after")
    def _solutions_of_one_task(self) -> Config:
        if self.data.solutions and self.tasks:
            raise ValueError(f"data.solutions={self.data.solutions!r} names rows by their place in the training split "
                             "of one task, and this config has several: leave one of them (task=LABEL), or leave it "
                             "out")
        return self

    @model_validator(mode="after")
    def _stages_apart(self) -> Config:
        names = [stage.name for stage in self.stages]
        for i, stage in enumerate(self.stages):
            if stage.name in names[:i]:
                raise ValueError(f"stages.{names.index(stage.name)} and stages.{i} are both called {stage.name!r}: "
                                 "give one another name")
        return self

    @model_validator(mode="after")
    def _stale_answers_fit(self) -> Config:
        if problem := (self.asynchronous.problem(self.rollout, self.algo)
                       or next(filter(None, (settings.problem(self) for _, settings in active(self))), "")):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _best_is_measured(self) -> Config:
        usual = SaveSettings.model_fields["best"].default  # set by nobody, so nothing is promised
        if self.save.best not in ("", usual) and not (self.eval.samples and self.eval.splits):
            raise ValueError(f"save.best={self.save.best!r} keeps the checkpoint of the best evaluation, but nothing "
                             "is evaluated: set eval.samples (and eval.every), or take save.best away")
        return self

    @property
    def each_task(self) -> Sequence[TaskSettings]:
        """The settings of every task: one, or those of `tasks`."""
        return self.tasks or (self.task,)

    @property
    def task_name(self) -> str:
        """What is trained on, in a word: the task's name, or the labels of several."""
        return " + ".join(entry.label for entry in self.tasks) or self.task.name

    @property
    def shares(self) -> dict[str, float]:
        """label -> weight of each task of several; {} where none has a weight, so that one sampler draws of all."""
        if all(entry.weight is None for entry in self.tasks):
            return {}
        return {entry.label: 1.0 if entry.weight is None else entry.weight for entry in self.tasks}

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.rollout.minibatches > self.rollout.prompts_per_step:
            raise ValueError(f"rollout.minibatches={self.rollout.minibatches} is more than "
                             f"rollout.prompts_per_step={self.rollout.prompts_per_step}: a mini-batch would be empty; "
                             "lower the one (a preset may set it) or raise the other")
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
        most = self.engine.max_model_len
        if most is not None and most <= self.rollout.max_new_tokens:
            raise ValueError(f"engine.max_model_len={most} leaves no room for a prompt beside rollout.max_new_tokens="
                             f"{self.rollout.max_new_tokens}: raise the one, or lower the other")
        splits = self.eval.splits
        twice = [name for i, name in enumerate(splits) if name in splits[:i]]
        if twice:
            raise ValueError(f"eval.splits={list(splits)}: '{twice[0]}' stands there twice; name each split once")
        return self
