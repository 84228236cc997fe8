"""`task.benchmark` of the video task: scores an answer as the authors of a benchmark do, in addition to the task's own
metrics.

Each benchmark function takes (task, sample, answer) and returns metrics. It returns {} for rows that it does not apply
to, and for answers that the authors do not count."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlrl.rewards.answers import mvbench, option_letter, video_mme
from vlrl.rewards.spans import hull_iou, time_r1_span
from vlrl.types import Answer, Sample

from ._shared import means

Rule = Callable[[Any, Sample, Answer], dict[str, float]]
_QA_TYPES = ("motion", "spatial", "temporal", "yes_no", "color", "object", "location", "number", "other")
_FREE = 3  # the first of ActivityNet-QA's types that are free questions


def _letters(name: str, read: Callable[[str, str], float | None]) -> Rule:
    def rule(_task: Any, sample: Sample, answer: Answer) -> dict[str, float]:
        if sample.get("answer_type") != "choice":
            return {}
        truth = option_letter(str(sample["answer"]), sample.get("options") or ())
        right = read(answer.final or "", truth) if truth else None
        return {} if right is None else {f"{name}_acc": right}
    return rule


def _time_r1(_task: Any, sample: Sample, answer: Answer) -> dict[str, float]:
    """The metrics of Time-R1 on Charades-STA and ActivityNet (2503.13377, evaluate.py), where an answer's span is the
    last "a to b" of the full output."""
    spans = sample.get("spans") or []
    if len(spans) != 1:
        return {}
    said = time_r1_span(answer.text)
    overlap = hull_iou(said, spans[0]) if said else 0.0
    return {"time_r1_miou": overlap, **{f"time_r1_r1@{t}": float(overlap >= t) for t in (0.3, 0.5, 0.7)}}


RULES: Mapping[str, Rule] = {"mvbench": _letters("mvbench", mvbench), "video_mme": _letters("video_mme", video_mme),
                             "time_r1": _time_r1, # ActivityNet-QA (1906.02467, eval.py): exact match
                             "activitynet_qa": lambda _task, sample, answer: {"activitynet_qa_acc": float(
                                 answer.final == sample["answer"])} if isinstance(sample.get("answer"), str) else {}}


def summaries(records: Sequence[Mapping[str, Any]], benchmark: str) -> dict[str, float]:
    """The mean of each metric of a benchmark by category, e.g. `mvbench_acc/pose`. For ActivityNet-QA there are also
    the means by question type, e.g. `activitynet_qa_acc/motion`, and over the free questions (`/free`)."""
    names = sorted({name for record in records for name in record["metrics"] if name.startswith(f"{benchmark}_")})
    return means((f"{name}/{kind}", record["metrics"][name]) for record in records for name in names
                 if name in record["metrics"] for kind in _kinds(record["sample"], name))


def _kinds(row: Mapping[str, Any], metric: str) -> list[str]:
    kinds, number = [str(row["category"])] if row.get("category") else [], row.get("type")
    if metric == "activitynet_qa_acc" and type(number) is int and 0 <= number < len(_QA_TYPES):
        kinds += [_QA_TYPES[number], *(["free"] if number >= _FREE else [])]
    return kinds
