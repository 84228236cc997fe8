"""Video: questions about a clip, about when something happens in the clip, and about where an object is in each frame.

`task.recipe` chooses the prompt and the reward. Rows have `video` (or `image`, `images`), `question`, and `answer_type`
(choice, number, text, ocr, regression, span, track, span+choice). Depending on the type they also have `answer`,
`options`, `spans` or `tracks`. Times are in seconds from the start of the clip."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vlrl.config.base import Rate
from vlrl.config.registry import resolve
from vlrl.errors import ConfigError
from vlrl.rewards.boxes import is_number
from vlrl.task.recipes import RecipeTask
from vlrl.types import Answer, Parts, Sample

from . import _video as typed
from . import _video_benchmarks as benchmarks
from . import _video_onethinker as onethinker
from . import _video_time as times
from . import _video_tracks as tracks
from ._shared import accuracy_by

RECIPES = {
    "direct": typed.DIRECT, "video_r1": typed.VIDEO_R1, "grpo_care": typed.GRPO_CARE,
    "seed_bench_r1": typed.SEED_BENCH_R1, "favchat": typed.FAVCHAT, "span": times.SPAN, "time_r1": times.TIME_R1,
    "time_r1_reasoning": times.TIME_R1_REASONING, "temporal_r1": times.TEMPORAL_R1,
    "videochat_r1_span": times.VIDEOCHAT_R1_SPAN, "videochat_r1_gqa": times.VIDEOCHAT_R1_GQA,
    "videochat_r1_track": tracks.VIDEOCHAT_R1_TRACK, "onethinker": onethinker.ONETHINKER,
}


class Video(RecipeTask):
    """Questions about clips; see `task.recipe`. Reward parts of the default recipe: `accuracy`, in [0, 1], computed by
    the row's answer_type, and `format`, 0 or 1 (whether the answer is one line)."""

    _recipes = RECIPES
    recipe: str = "direct"
    """Prompt and reward (docs/tasks.md). The name of a recipe, or your own module:function that returns a Recipe."""
    temporal_ratio: Rate = 0.8
    """video_r1: ratio of accuracies that earns `temporal`. The part is rewarded if the group's accuracy exceeds this
    ratio times the accuracy with shuffled frames."""
    length_range: tuple[int, int] = (320, 512)
    """video_r1: token range in which `length` earns 1. It counts for right answers."""
    consistency_margin: Annotated[float, Field(ge=0, le=1)] = 0.01
    """grpo_care: how far a consistent answer may be less likely. Its likelihood may lie so far below the mean
    likelihood of the group's right answers."""

    benchmark: str = ""
    """Benchmark for additional metrics (docs/evaluation.md). Its own scoring rules apply: video_mme, mvbench, time_r1
    (Charades-STA, ActivityNet), activitynet_qa, or your own module:function."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._rule = resolve("task.benchmark", self.benchmark, benchmarks.RULES) if self.benchmark else None
        least, most = self.length_range
        if not 0 <= least <= most:
            raise ConfigError(f"task.length_range=[{least}, {most}] must be two numbers of tokens, the "
                              "smaller one first")

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        """The sample of a row. A video comes before the images, as in SEED-Bench-R1, where the video shows the past."""
        sample = super().sample_from_row(times.with_spans(row), root)
        return replace(sample, media=tuple(sorted(sample.media, key=lambda media: media.kind != "video")))

    def problem(self, row: Mapping[str, Any]) -> str | None:
        return _problem(row) or tracks.problem(row)

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        return {**typed.placeholders(self, row), **onethinker.placeholders(row)}

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an answer, and the metrics of `benchmark`. For rows with spans: `miou`, `miop`, `r1@0.3`,
        `r1@0.5`, `r1@0.7` and, with options, `gqa_acc`. For rows with tracks: `overlap`, `sr@0.5`, `ao` and `sr`."""
        theirs = self._rule(self, sample, answer) if self._rule else {}
        return {**tracks.measures(self, sample, self.parse(sample, answer)), **theirs}

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        return tracks.cheats(self, sample)

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        """Marks for the inspector: the track or the spans of the target and of the answer."""
        return [*tracks.marks(sample, self.target(sample), "target"), *tracks.marks(sample, parsed, "answer")]

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split: the mean of `accuracy` by answer type, by category (such as the level L1, L2, L3) and by
        attribute, and the means of the metrics of spans and tracks by category."""
        theirs = benchmarks.summaries(records, self.benchmark.rpartition(":")[2]) if self.benchmark else {}
        return accuracy_by(records, ("answer_type", "category", "attribute")) | tracks.summaries(records) | theirs


def _problem(row: Mapping[str, Any]) -> str | None:
    question, kind = row.get("question"), row.get("answer_type")
    if not isinstance(question, str) or not question.strip():
        return f"question={str(question)[:200]!r} must be a string"
    if not isinstance(kind, str):
        return f"answer_type={kind!r} must be one of choice, number, text, ocr, regression, span, track, span+choice"
    for field in ("options", "labels"):
        given = row.get(field)
        if given is not None and not (isinstance(given, list) and all(isinstance(v, str) and v.strip() for v in given)):
            return f"{field}={str(given)[:200]} must be a list of strings"
    tolerance = row.get("tolerance")
    if tolerance is not None and not (is_number(tolerance) and tolerance >= 0):
        return f"tolerance={str(tolerance)[:200]} must be a number >= 0, the largest accepted error of an answer"
    return None
