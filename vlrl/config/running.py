"""The settings `run.*`, `eval.*`, `save.*`, `store.*`, `log.*` and `limits.*`: where a run lies, what it measures and
keeps, what it shows, and where it stops."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vlrl.config.base import Count, Fraction, NonNegative, Positive, Settings


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


class EvalSettings(Settings):
    """Measuring on splits that are not trained on."""

    every: Count = Field(default=0, description="Steps between evaluations; 0 = before and after only.")
    samples: Count = Field(default=256, description="Samples per split; 0 = no evaluation.")
    splits: tuple[str, ...] = Field(default=("heldout",), description="Splits evaluated.")
    temperature: NonNegative = Field(default=0.0, description="0 = greedy.")

    @field_validator("splits")
    @classmethod
    def _each_once(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for i, name in enumerate(splits) if name in splits[:i]]
        if twice:
            raise ValueError(f"eval.splits={list(splits)}: '{twice[0]}' stands there twice; name each split once")
        return splits


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

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields pictures that no tracker gets."""
        if self.pictures and not self.trackers:
            yield "log.pictures", self.pictures, "log.trackers=[]: no tracker gets them"


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
