"""The settings `run.*`, `eval.*`, `save.*`, `store.*`, `log.*` and `limits.*`: the run folder, evaluations,
checkpoints, stored rollouts, logging, and limits at which a run stops."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from vlrl.config.base import Count, Fraction, NonNegative, Positive, Settings


class RunSettings(Settings):
    """The run folder, and the checks that are made before the run starts."""

    dir: str = Field(default="", description="The run folder; empty = runs/<config stem>.")
    steal_lock: bool = Field(default=False, description="Take over a run folder that is locked by a run on another "
                             "host whose last heartbeat is over three minutes old, e.g. after a crash of that host. "
                             "The folder of a live run is never taken over.")
    checks: Literal["stop", "warn"] = Field(default="stop", description="What to do about errors found in the first "
                                            "samples (media that no prompt shows, a prompt without the tags that "
                                            "`score` reads, a perfect answer below the maximum; docs/write-a-task.md): "
                                            "stop the run before the model is loaded, or warn.")


class EvalSettings(Settings):
    """Evaluations during training."""

    every: Count = Field(default=0, description="Steps between evaluations; 0 = only before and after training.")
    samples: Count = Field(default=256, description="Samples per split; 0 = no evaluation.")
    splits: tuple[str, ...] = Field(default=("heldout",), description="Splits to evaluate on.")
    temperature: NonNegative = Field(default=0.0, description="Sampling temperature; 0 = greedy.")

    @field_validator("splits")
    @classmethod
    def _each_once(cls, splits: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for i, name in enumerate(splits) if name in splits[:i]]
        if twice:
            raise ValueError(f"eval.splits={list(splits)}: '{twice[0]}' is given twice; name each split once")
        return splits


class SaveSettings(Settings):
    """When checkpoints are written, and which are kept (docs/long-runs.md)."""

    every: Count = Field(default=50, description="Steps between checkpoints; the last step is always saved.")
    keep: Positive = Field(default=2, description="Number of checkpoints to keep; the newest are kept.")
    best: str = Field(default="reward/mean", description="Metric in eval.jsonl, for the first of eval.splits: the "
                      "checkpoint with its highest value (lowest for `loss`, in supervised runs) is kept in addition, "
                      "as checkpoints/best. Empty = none.")
    background: bool = Field(default=True, description="Copy weights and optimizer state to host memory (12 bytes per "
                             "trainable parameter) and write them while training continues. Without that much free "
                             "memory, or with false, training waits.")
    grace: NonNegative = Field(default=20.0, description="Seconds after SIGTERM, SIGUSR1 or SIGHUP within which the "
                               "current step may finish before it is abandoned. After Ctrl-C there is no limit.")


class StoreSettings(Settings):
    """Which data of each rollout the run stores."""

    media: Literal["copy", "link", "none"] = Field(default="copy", description="How media are stored in the run "
                                                   "folder: copy = as copies, link = as links, none = not at all.")
    rollouts: bool = Field(default=True, description="Store every rollout.")
    alternatives: Annotated[int, Field(ge=0, le=100)] = Field(default=0, description=(
        "Number of most probable tokens to store for each trained token, for the inspector; 0 = none."))


class LogSettings(Settings):
    """What is printed during the run, and sent to trackers."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = Field(
        default=(), description="Trackers that get the metrics, in addition to metrics.jsonl.")
    project: str = Field(default="vlrl", description="Project name in the trackers.")
    pictures: Count = Field(default=0, description="Number of groups whose images (with the boxes of target and "
                            "answers), answers and reward parts are sent to the trackers, with histograms over the "
                            "step: at every evaluation, and in training every log.pictures_every steps. 0 = none. "
                            "Anyone with access to the tracker sees the data.")
    pictures_every: Positive = Field(default=10, description="Training steps between the images of log.pictures.")
    samples_every: Count = Field(default=10, description="Steps between printed sample completions; 0 = never.")

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        """Yields (name, value, reason) for log.pictures if no configured tracker accepts images."""
        if self.pictures and not self.trackers:
            yield "log.pictures", self.pictures, "log.trackers=[]: no tracker gets them"


class LimitsSettings(Settings):
    """Limits at which a run stops or skips an input, and timeouts."""

    prompt_tokens: Positive = Field(default=16384, description="Maximum number of tokens of a prompt; a longer prompt "
                                    "is rejected, never truncated.")
    rejected: Fraction = Field(default=0.5, description="Stop if more than this share of the drawn prompts is "
                               "rejected.")
    score_errors: Fraction = Field(default=0.1, description="Stop if scoring fails for more than this share of a "
                                   "step's rollouts.")
    environment_errors: Fraction = Field(default=0.1, description="Stop if more than this share of a step's episodes "
                                         "ends with an error of the environment. Such episodes are not scored and do "
                                         "not count in other limits.")
    service_errors: Fraction = Field(default=0.5, description="Stop if a service, such as a judge, does not respond "
                                     "for more than this share of a step's rollouts. Such rollouts are not scored and "
                                     "do not count in other limits.")
    mismatch: NonNegative | None = Field(default=None, description="Stop if mismatch/kl of a step, the KL per token "
                                         "between sampler and trainer, is above this; null = never. "
                                         "alerts.mismatch_above only alerts.")
    nonfinite_steps: Count = Field(default=3, description="Optimizer steps with a NaN or infinite loss or gradient are "
                                   "skipped. Stop after more than this many consecutive steps with a skipped optimizer "
                                   "step; 0 = stop at the first.")
    score_s: NonNegative = Field(default=60.0, description="Timeout in seconds for scoring one answer. On Linux the "
                                 "task's code runs in a separate process, which is killed and restarted after a "
                                 "timeout; the reward is then 0, and counts as a scoring error. 0 = no limit, and the "
                                 "code runs in the training process.")
    stuck_s: NonNegative = Field(default=7200.0, description="Stop, and write the stacks of all threads to disk, if no "
                                 "phase of a step begins or ends for this many seconds; 0 = never.")
    image_pixels: Positive = Field(default=64_000_000, description="Maximum number of pixels of an image; a larger "
                                   "image is an error and is not decoded.")
    video_pixels: Positive = Field(default=2_000_000_000, description="Maximum total number of pixels of the sampled "
                                   "frames of a video; a larger video is an error and is not decoded. A pixel takes "
                                   "three bytes.")
    media_bytes: Positive = Field(default=2_000_000_000, description="Maximum size of a media file in bytes; a larger "
                                  "file is an error and is not read.")
    url_seconds: float = Field(default=60.0, gt=0, description="Timeout in seconds for a download (data.urls), "
                               "redirects and retries included.")
    collective_s: Annotated[int, Field(ge=1, le=10**7)] = Field(
        default=1800, description="With several processes: timeout in seconds for waiting for the others, e.g. for the "
        "longest completions of a step; the error names the missing ranks and the collective.")
