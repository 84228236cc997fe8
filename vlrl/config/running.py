"""The settings `run.*`, `eval.*`, `save.*`, `store.*`, `log.*` and `limits.*`: the run folder, evaluations,
checkpoints, stored rollouts, logging, and limits at which a run stops."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vlrl.config.base import Count, Fraction, NonNegative, Positive, Settings


class RunSettings(Settings):
    """The run folder, and the checks that are made before the run starts."""

    dir: str = Field(default="", description="The run folder; empty = runs/<config stem>.")
    steal_lock: bool = Field(default=False, description=(
        "Take over a run folder locked by a dead run on another host. Its last heartbeat must be over three "
        "minutes old, as after a crash of that host. The folder of a live run is never taken over."))
    checks: Literal["stop", "warn"] = Field(default="stop", description=(
        "Whether errors in the first samples stop the run or warn. Such errors are media that no prompt shows, a "
        "prompt without the tags that `score` reads, or a perfect answer below the maximum "
        "(docs/write-a-task.md). stop: before the model is loaded."))


class EvalSettings(Settings):
    """Evaluations during training."""

    every: Count = Field(default=0, description="Steps between evaluations; 0 = only before and after training.")
    samples: Count = Field(default=256, description="Samples per split; 0 = no evaluation.")
    splits: tuple[str, ...] = Field(default=("heldout",), description="Splits to evaluate on.")
    patience: Count = Field(
        default=0, description=(
        "End early after this many evaluations without a new best; 0 = never. The value is that of save.best. "
        "Needs eval.every."))
    temperature: NonNegative = Field(default=0.0, description="Sampling temperature; 0 = greedy.")

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, value, reason) for eval.patience if there is no evaluation during training, or no metric."""
        if self.patience and not (self.every and self.samples and self.splits and config.save.best):
            missing = "eval.every=0" if not self.every else "save.best is empty" if self.samples else "eval.samples=0"
            yield "eval.patience", self.patience, f"{missing}: there is nothing to compare during training"

    @field_validator("splits")
    @classmethod
    def _each_once(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for i, name in enumerate(splits) if name in splits[:i]]
        if twice:
            raise ValueError(f"eval.splits={list(splits)}: '{twice[0]}' is given twice; name each split once")
        return splits


class SaveSettings(Settings):
    """When checkpoints are written, and which are kept (docs/long-runs.md)."""

    every: Count = Field(default=50, description="Steps between checkpoints. The last step is always saved.")
    keep: Positive = Field(default=2, description="Number of newest checkpoints to keep.")
    best: str = Field(default="reward/mean", description=(
        "Metric whose best checkpoint is kept as checkpoints/best. A name in eval.jsonl, for the first of "
        "eval.splits: the checkpoint with its highest value (lowest for `loss`, in supervised runs) is kept in "
        "addition. Empty = none."))
    background: bool = Field(default=True, description=(
        "Write checkpoints while training continues. Weights and optimizer state are copied to host memory (12 "
        "bytes per trainable parameter) and written from there. Without that much free memory, or with false, "
        "training waits."))
    grace: NonNegative = Field(default=20.0, description=(
        "Seconds for the current step after SIGTERM, SIGUSR1 or SIGHUP. Then the step is abandoned. After Ctrl-C "
        "there is no limit."))


class StoreSettings(Settings):
    """Which data of each rollout the run stores."""

    media: Literal["copy", "link", "none"] = Field(
        default="copy", description="How media are stored: copy, link or none.")
    rollouts: bool = Field(default=True, description="Store every rollout.")
    alternatives: Annotated[int, Field(ge=0, le=100)] = Field(
        default=0, description="Most probable tokens to store per trained token; 0 = none. The inspector shows them.")


class LogSettings(Settings):
    """What is printed during the run, and sent to trackers."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = Field(
        default=(), description="Trackers that get the metrics. metrics.jsonl is written in any case.")
    project: str = Field(default="vlrl", description="Project name in the trackers.")
    pictures: Count = Field(default=0, description=(
        "Groups whose images and answers are sent to trackers; 0 = none. With boxes of target and answers, reward "
        "parts, and histograms over the step: at every evaluation, and in training every log.pictures_every "
        "steps. Anyone with access to the tracker sees the data."))
    pictures_every: Positive = Field(default=10, description="Training steps between the images of log.pictures.")
    samples_every: Count = Field(default=10, description="Steps between printed sample completions; 0 = never.")

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, value, reason) for log.pictures if no configured tracker accepts images."""
        if self.pictures and not self.trackers:
            yield "log.pictures", self.pictures, "log.trackers=[]: no tracker gets them"


class LimitsSettings(Settings):
    """Limits at which a run stops or skips an input, and timeouts."""

    prompt_tokens: Positive = Field(
        default=16384, description="Maximum tokens of a prompt. A longer prompt is rejected, never truncated.")
    rejected: Fraction = Field(
        default=0.5, description="Stop above this share of rejected prompts. The share is of the prompts drawn.")
    score_errors: Fraction = Field(
        default=0.1, description="Stop above this share of scoring errors. The share is of a step's rollouts.")
    environment_errors: Fraction = Field(default=0.1, description=(
        "Stop above this share of episodes with environment errors. The share is of a step's episodes. Such "
        "episodes are not scored and do not count in other limits."))
    service_errors: Fraction = Field(default=0.5, description=(
        "Stop above this share of rollouts without a service's reply. A service is e.g. a judge; the share is of "
        "a step's rollouts. Such rollouts are not scored and do not count in other limits."))
    mismatch: NonNegative | None = Field(default=None, description=(
        "Stop above this mismatch/kl; null = never. It is the KL per token between sampler and trainer of a step. "
        "alerts.mismatch_above only alerts."))
    nonfinite_steps: Count = Field(default=3, description=(
        "Stop after more consecutive NaN or infinite steps than this. An optimizer step with a NaN or infinite "
        "loss or gradient is skipped; 0 = stop at the first."))
    score_s: NonNegative = Field(default=60.0, description=(
        "Timeout for scoring one answer in seconds; 0 = none. On Linux the task's code runs in a separate "
        "process, which is killed and restarted after a timeout; the reward is then 0, and counts as a scoring "
        "error. With 0 the code runs in the training process."))
    stuck_s: NonNegative = Field(default=7200.0, description=(
        "Stop after this many seconds without progress; 0 = never. Progress is the beginning or end of a phase of "
        "a step. The stacks of all threads are written to disk."))
    image_pixels: Positive = Field(
        default=64_000_000, description=(
        "Maximum pixels of an image file. A larger image is an error and is not decoded."))
    video_pixels: Positive = Field(default=2_000_000_000, description=(
        "Maximum pixels of all sampled frames of a video. A larger video is an error and is not decoded. A pixel "
        "takes three bytes."))
    media_bytes: Positive = Field(
        default=2_000_000_000, description=(
        "Maximum size of a media file in bytes. A larger file is an error and is not read."))
    url_seconds: float = Field(
        default=60.0, gt=0, description=(
        "Timeout of a download in seconds (data.urls). Redirects and retries are included."))
    collective_s: Annotated[int, Field(ge=1, le=10**7)] = Field(default=1800, description=(
        "Timeout of waiting for other processes, in seconds. E.g. for the longest completions of a step; the "
        "error names the missing ranks and the collective."))
