"""Recipes of the video task whose answers have a type: an option, a number, a transcript, or free text."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vlrl.rewards.answers import LETTERS, STRICT, bare_options, option_letter, rouge_tokens, tolerant
from vlrl.rewards.boxes import is_number
from vlrl.rewards.groups import consistency_bonus, length_bonus, temporal_bonus
from vlrl.rewards.numbers import read_number
from vlrl.rewards.text import answer_tag, same_label, think_answer_format
from vlrl.task import fill
from vlrl.task.recipes import Recipe
from vlrl.types import Answer, Parts, Sample, Variant

from . import _video_time as times
from . import _video_tracks as tracks
from ._shared import think_answer

TYPED = tuple(STRICT)
"""The answer types that the recipes of this module can score."""
_SHOWN = 1000
Accuracy = Callable[[Any, Sample, Answer], float]


def kind_of(row: Mapping[str, Any]) -> str:
    """The type of a row's answer. A choice with evidence (`span+choice`) is a choice."""
    return "choice" if row["answer_type"] == "span+choice" else row["answer_type"]


def truth(sample: Sample) -> str:
    """The right answer as a string: the letter of an option, an integer without a decimal point, or the text."""
    answer = sample["answer"]
    if isinstance(answer, float) and answer.is_integer():
        answer = int(answer)
    letter = option_letter(str(answer), options_of(sample.row)) if kind_of(sample.row) == "choice" else None
    return letter or str(answer).strip()


def options_of(row: Mapping[str, Any]) -> list[str]:
    """The texts of a row's options; for a choice without options, the row's labels."""
    return bare_options(row.get("options") or (row.get("labels") if kind_of(row) == "choice" else None) or ())


def placeholders(task: Any, row: Mapping[str, Any]) -> dict[str, str]:
    """The values of placeholders in prompt templates, in addition to those of tracks.placeholders:
        `choices`, `to_name`: the options or the names to choose from; "" if the question contains them;
        `plainly`: the full prompt of the plain recipe;
        `by_type`: the end of Video-R1's prompt for the row's answer type;
        `attribute`: the attribute of a face that the question is about."""
    options = [f"{letter}. {option}" for letter, option in zip(LETTERS, options_of(row), strict=False)]
    names = (row.get("labels") or []) if row["answer_type"] == "text" else []
    values = tracks.placeholders(task, row) | {
        "choices": "".join(f"\n{line}" for line in ("Options:", *options)
                           ) if any(line not in row["question"] for line in options) else "",
        "to_name": f" Choose from: {', '.join(names)}." if any(name not in row["question"] for name in names) else "",
        "by_type": BY_TYPE.get(kind_of(row), ""),
        "attribute": str(row.get("attribute") or row.get("category") or "its attributes and expression")}
    return values | {"plainly": fill(plain(row).prompt, {**row, **values})}


def typed_problem(_task: Any, row: Mapping[str, Any]) -> str | None:
    """Describes what a row lacks for a recipe with typed answers; None if it lacks nothing."""
    kind, answer, options = kind_of(row), row.get("answer"), options_of(row)
    if kind not in TYPED:
        return (f"answer_type={kind!r} is not scored by task.recipe={_task.recipe!r}, only {', '.join(TYPED)}; "
                "rows with spans are for task.recipe=span, rows with tracks for videochat_r1_track")
    if not (is_number(answer) or (isinstance(answer, str) and answer.strip())):
        return f"answer={str(answer)[:200]!r} must be a string or a number"
    if kind == "choice" and (len(options) > len(LETTERS) or option_letter(str(answer), options) is None):
        return (f"answer={str(answer)[:200]!r} must be the letter of one of the row's {len(options)} options (at most "
                f"{len(LETTERS)}), or its text")
    if kind in ("number", "regression") and read_number(str(answer)) is None:
        return f"answer={str(answer)[:200]!r} must be a number, as answer_type={kind!r} says"
    if kind == "text" and row.get("labels") and not any(same_label(str(answer), name) for name in row["labels"]):
        return f"answer={str(answer)[:200]!r} is not one of the row's labels"
    if kind == "text" and not row.get("labels") and not rouge_tokens(str(answer)):
        return f"answer={str(answer)[:200]!r} has no letter or digit, and ROUGE compares nothing else"
    return None


def _target(_task: Any, sample: Sample) -> str:
    return truth(sample)


def _tagged(answer: Answer) -> str:
    return (answer_tag(answer.text) or "").strip()


def strict(_task: Any, sample: Sample, answer: Answer) -> float:
    """Video-R1's accuracy of the text in the first answer tag, for the row's answer type."""
    return STRICT[kind_of(sample.row)](_tagged(answer), truth(sample))


def free(sample: Sample, given: str) -> float:
    """The accuracy, in [0, 1], of a parsed answer whose letter, number or label may be surrounded by other words."""
    score = tolerant(kind_of(sample.row), options_of(sample.row), sample.get("labels") or (),
                     sample.get("tolerance") or 0.0)
    return score(given, truth(sample))


def free_tagged(_task: Any, sample: Sample, answer: Answer) -> float:
    return free(sample, _tagged(answer))


def _thinking(prompt: str, accuracy: Accuracy, **more: Any) -> Recipe:
    given: dict[str, Any] = {"rewards": {"accuracy": 1.0, "format": 1.0}, "problem": typed_problem, **more}
    return Recipe(
        prompt=prompt, read=lambda _task, _sample, answer: _tagged(answer)[:_SHOWN] or None, target=_target,
        score=lambda task, sample, answer: {"accuracy": accuracy(task, sample, answer),
                                            "format": think_answer_format(answer.text)},
        oracle=lambda _task, sample: think_answer(truth(sample), "I look at each part in turn."), **given)


def _span(task: Any, sample: Sample, answer: Answer) -> Parts:
    parts = times.SPAN.score(task, sample, answer)
    return {"accuracy": parts["iou"], "format": parts["format"]}


def _tagged_like(answer: Answer) -> Answer:
    return replace(answer, text=f"<answer>{answer.final}</answer>")


def _track(task: Any, sample: Sample, answer: Answer) -> Parts:
    boxes = tracks.VIDEOCHAT_R1_TRACK.score(task, sample, _tagged_like(answer))
    return {"accuracy": boxes["iou"], "format": float(_read_track(task, sample, answer) is not None)}


def _read_track(task: Any, sample: Sample, answer: Answer) -> Any:
    return tracks.VIDEOCHAT_R1_TRACK.read(task, sample, _tagged_like(answer))


_LINE = times.TimeRecipe(
    prompt="{question}{choices}{to_name}\nAnswer directly.", rewards={}, 
    read=lambda _task, _sample, answer: answer.final[:_SHOWN] or None, target=_target,
    score=lambda _task, sample, answer: {"accuracy": free(sample, answer.final),
                                         "format": float(bool(answer.final) and "\n" not in answer.final)},
    say=lambda _task, _sample, value: value, oracle=times.say_oracle, problem=typed_problem)
PLAIN = {
    "span": replace(times.SPAN, prompt='{when}\nAnswer "start to end" in seconds.', score=_span),
    "track": replace(
        tracks.VIDEOCHAT_R1_TRACK, read=_read_track, score=_track, 
        say=lambda task, sample, track: answer_tag(tracks.VIDEOCHAT_R1_TRACK.say(task, sample, track)) or "",
        prompt="Where is {object} in each of {count} frames?\nAnswer [[x1, y1, x2, y2], ...].")}
"""Answer type -> its recipe for plain answers, i.e. answers without thinking and tags. Types whose plain answer is one
line of text are left out."""


def plain(row: Any) -> times.TimeRecipe:
    """The recipe for a plain answer (without thinking and tags) to a row or sample, according to its answer type."""
    return PLAIN.get(row["answer_type"], _LINE)


def _by_type(function: str) -> Callable[..., Any]:
    return lambda task, sample, *more: getattr(plain(sample), function)(task, sample, *more)


DIRECT = times.TimeRecipe(
    prompt="{plainly}", rewards={"accuracy": 1.0, "format": 0.1}, read=_by_type("read"), score=_by_type("score"),
    target=_by_type("target"), say=_by_type("say"), oracle=times.say_oracle, problem=_by_type("problem"))


# --- Video-R1 ---------------------------------------------------------------------------------------------------------

_PONDER = ("{question}{choices}\nPlease think about this question as if you were a human pondering deeply. Engage in "
           "an internal dialogue using expressions such as 'let me think', 'wait', 'Hmm', 'oh, I see', 'let's break it "
           "down', etc, or other natural language thought expressions It's encouraged to include self-reflection or "
           "verification in the reasoning process. Provide your detailed reasoning between the <think> </think> tags, "
           "and then give your final answer between the <answer> </answer> tags.{by_type}")
_NUMERIC = " Please provide the numerical value (e.g., 42 or 3.14) within the <answer> </answer> tags."
BY_TYPE = {
    "choice": " Please provide only the single option letter (e.g., A, B, C, D, etc.) within the <answer> </answer> "
              "tags.",
    "number": _NUMERIC, "regression": _NUMERIC,
    "ocr": " Please transcribe text from the image/video clearly and provide your text answer within the <answer> "
           "</answer> tags.",
    "text": " Please provide your text answer within the <answer> </answer> tags."}
"""Answer type -> the end of Video-R1's prompt."""


def _shuffled(task: Any, sample: Sample, n: int, step: int) -> Sequence[Variant]:
    """Returns one prompt variant: the same clip with its frames shuffled, for `n` // 2 completions, where `n` is the
    number of completions in the group. Returns () for a sample without a video."""
    if n < 2 or all(media.kind != "video" for media in sample.media):
        return ()
    seed = zlib.crc32(f"{task.seed}/{sample.id}/{step}".encode("utf-8", "backslashreplace"))
    media = tuple(replace(m, edits=(*m.edits, ("shuffle", seed))) if m.kind == "video" else m for m in sample.media)
    return (Variant(name="shuffled", media=media, n=n // 2),)


def _temporal(task: Any, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
    """Two reward parts of each answer that depend on the other answers of the group: `temporal` (of T-GRPO) and
    `length` (of Video-R1)."""
    still = bool(sample.media) and all(media.kind != "video" for media in sample.media)
    right = [strict(task, sample, answer) for answer in answers]
    shuffled = [strict(task, sample, answer) for answer in services.variants.get("shuffled", ()) if not still]
    temporal = temporal_bonus(right, shuffled, task.temporal_ratio)
    length = length_bonus(right, [answer.n_tokens for answer in answers], *task.length_range)
    return [{"temporal": t, "length": n} for t, n in zip(temporal, length, strict=True)]


VIDEO_R1 = _thinking(
    _PONDER, strict, rewards={"accuracy": 1.0, "format": 1.0, "temporal": 0.3, "length": 0.2}, group=_temporal,
    variants=_shuffled)


# --- SEED-Bench-R1, GRPO-CARE -----------------------------------------------------------------------------------------


def _consistency(task: Any, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
    """GRPO-CARE's part `consistency` of each answer in a group: the accuracy of a right answer whose likelihood is at
    least the mean likelihood of the right answers minus task.consistency_margin, else 0. The likelihood of an answer
    is the mean probability of its tokens after the thinking under the reference model."""
    right = [strict(task, sample, answer) for answer in answers]
    likely = [float(np.exp(logprobs).mean()) if len(logprobs) else None
              for logprobs in services.reference_logprobs(answers)]
    return [{"consistency": value} for value in consistency_bonus(right, likely, task.consistency_margin)]


GRPO_CARE = _thinking(
    _PONDER, strict, rewards={"accuracy": 1.0, "format": 1.0, "consistency": 0.5}, group=_consistency,
    needs=frozenset({"reference_logprobs"}))

SEED_BENCH_R1 = _thinking(
    "{question}{choices}\n Output the thinking process in <think> </think> and final answer in <answer> </answer> "
    "tags, i.e., <think> reasoning process here </think><answer> answer here </answer>.", free_tagged,
    rewards={"accuracy": 1.0, "format": 0.0})


# --- FaVChat ----------------------------------------------------------------------------------------------------------

FAVCHAT = _thinking(
    "{question}{choices}{to_name}\nLook closely at the face: {attribute}. Write what you see in <think> </think> tags "
    "and the answer alone in <answer> </answer> tags.", free_tagged)
