"""Recipes of the video task for when something happens. Answers are spans in seconds from the start of the clip.

Rows have `spans` [[start, end], ...], and for some recipes the `duration` of the clip, or `options` and `answer`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rapidfuzz.distance import LCSseq

from vlrl.data.row_fields import positive_problem, spans_problem
from vlrl.rewards.answers import option_letter, option_text, rouge_tokens
from vlrl.rewards.boxes import is_number
from vlrl.rewards.literals import read_literal
from vlrl.rewards.spans import (
    best_grounding,
    boundary_iou,
    format_span,
    format_time,
    interval_precision,
    last_span,
    only_spans,
    read_spans,
    span_list,
    temporal_iou,
    union_iou,
)
from vlrl.rewards.text import answer_tag, clean_label, extract_tag, said, think_answer_format
from vlrl.task.recipes import Recipe
from vlrl.types import Answer, Parts, Sample

from ._shared import think_answer

Spans = Sequence[Sequence[float]]
_LETTERS = "ABCDEFG"


@dataclass(frozen=True, kw_only=True)
class TimeRecipe(Recipe):
    """A recipe with a function that writes an answer with given spans, for perfect and for cheating answers."""

    say: Callable[[Any, Sample, Any], str]
    """Writes an answer with the given spans (or track): (task, sample, spans) -> text."""


def spans_of(_task: Any, sample: Sample) -> list[list[float]]:
    return [list(span) for span in sample.get("spans") or []]


def say_oracle(task: Any, sample: Sample) -> str:
    return task.used.say(task, sample, task.used.target(task, sample))


def thinking(answer: str) -> str:
    return think_answer(answer, "I watch the video.")


def with_spans(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the row with `spans`. If a row of answer_type span has no `spans`, they are parsed from the row's
    `answer`: [3, 7], [[3, 7]] or "3 to 7". All other rows are returned unchanged."""
    answer = row.get("answer")
    if row.get("answer_type") != "span" or row.get("spans") is not None or not answer:
        return row
    if isinstance(answer, list):
        return {**row, "spans": [answer] if is_number(answer[0]) else answer}
    return {**row, "spans": read_spans(answer)} if isinstance(answer, str) else row


def needs_spans(_task: Any, row: Mapping[str, Any]) -> str | None:
    return None if row.get("spans") else "spans is missing: [[start, end], ...], the times of the event in seconds"


def needs_one_span(task: Any, row: Mapping[str, Any]) -> str | None:
    spans = row.get("spans")
    if spans and len(spans) > 1:
        return f"spans has {len(spans)} intervals, and task.recipe asks for one; task.recipe=span takes several"
    return needs_spans(task, row)


def _needs_one_span_and_duration(task: Any, row: Mapping[str, Any]) -> str | None:
    wrong = needs_one_span(task, row)
    if wrong or row.get("duration") is not None:
        return wrong
    return "duration is missing: the length of the clip in seconds, to which errors of start and end are relative"


def _read_first(_task: Any, sample: Sample, answer: Answer) -> list[list[float]] | None:
    return read_spans(answer.final, len(sample.get("spans") or [0])) or None


def _span(task: Any, sample: Sample, answer: Answer) -> Parts:
    truth = spans_of(task, sample)
    return {"iou": union_iou(_read_first(task, sample, answer) or [], truth),
            "format": float(only_spans(answer.final, len(truth)))}


SPAN = TimeRecipe(
    prompt='{when} Answer "start to end" in seconds.', rewards={"iou": 1.0, "format": 0.1}, read=_read_first,
    score=_span, target=spans_of, oracle=say_oracle, 
    say=lambda _task, _sample, spans: ", ".join(map(format_span, spans)), problem=needs_spans)


# --- Time-R1 and VideoChat-R1 -----------------------------------------------------------------------------------------

_PINPOINT = ('To accurately pinpoint the event "{event}" in the video, determine the precise time period of the event.'
             "\n\nOutput your thought process within the <think> </think> tags, including analysis with either ")
_IN_SECONDS = ("Then, provide the start and end times (in seconds, precise to two decimal places) in the format "
               '"start time to end time" within the <answer> </answer> tags. For example: "12.54 to 17.83".')


def _read_last(_task: Any, _sample: Sample, answer: Answer) -> list[list[float]] | None:
    span = last_span(answer_tag(answer.text, "last") or "")
    return [span] if span else None


def _time_r1(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of Time-R1: `span`, the temporal IoU reduced by the errors of both ends as shares of the clip's
    duration, and `format`."""
    spans = _read_last(task, sample, answer)
    paid = boundary_iou(spans[0], sample["spans"][0], sample["duration"]) if spans else 0.0
    return {"span": paid, "format": think_answer_format(answer.text)}


def _say_last(_task: Any, _sample: Sample, spans: Spans) -> str:
    return thinking(", ".join(map(format_span, spans)))


TIME_R1 = TimeRecipe(
    prompt=f"{_PINPOINT}specific time ranges (xx.xx to xx.xx) in <timestep> </timestep> tags.\n\n{_IN_SECONDS}",
    rewards={"span": 1.0, "format": 1.0}, read=_read_last, score=_time_r1, target=spans_of, oracle=say_oracle,
    say=_say_last, problem=_needs_one_span_and_duration, system="You are a video analysis expert.")

_STEP = re.compile(r"<timestep>\s{0,9}\d{1,9}(?:\.\d{0,20})?\s{1,9}to\s{1,9}\d{1,9}(?:\.\d{0,20})?\s{0,9}</timestep>",
                   re.ASCII | re.IGNORECASE)
_KEYWORDS = ("analyze", "compare", "deduce", "however", "therefore", "because", "step", "observe", "notice", "identify",
             "wait")
_LONG_THOUGHT = 500


def _reasoning(task: Any, sample: Sample, answer: Answer) -> Parts:
    """Time-R1's reward parts, and four optional parts for the thinking, each in [0, 1]. `timestep` is 1 if the thinking
    has a time range. The others grow to 1: `length` until the thinking has 500 characters, `keywords` until it has
    two of the keywords, and `paragraphs` until it has two lines."""
    thought = (extract_tag(answer.text, "think", "last") or "").strip()
    lowered = thought.lower()
    return {**_time_r1(task, sample, answer), "timestep": float(_STEP.search(thought) is not None),
            "length": min(len(thought), _LONG_THOUGHT) / _LONG_THOUGHT,
            "keywords": min(sum(word in lowered for word in _KEYWORDS), 2) / 2,
            "paragraphs": min(sum(bool(line.strip()) for line in thought.split("\n")), 2) / 2}


def _diversity(_task: Any, _sample: Sample, answers: Sequence[Answer], *_services: Any) -> list[Parts]:
    """The part `diversity` of each answer in a group: the mean of 1 - ROUGE-L to the other answers."""
    words = [rouge_tokens(answer.text[:20_000]) for answer in answers]
    apart = [[1 - (2 * LCSseq.similarity(a, b) / (len(a) + len(b)) if a and b else 0.0)
              for j, b in enumerate(words) if j != i] for i, a in enumerate(words)]
    return [{"diversity": sum(distances) / len(distances) if distances else 0.0} for distances in apart]


def _say_at_length(_task: Any, _sample: Sample, spans: Spans) -> str:
    span_text = ", ".join(map(format_span, spans))
    thought = (f"I observe the frames one after the other and compare them with the event.\nIt is seen in <timestep>"
               f"{span_text}</timestep>, because what is named happens there and nowhere else. ")
    return f"<think>{thought}{'I look once more. ' * 25}</think><answer>{span_text}</answer>"


TIME_R1_REASONING = TimeRecipe(
    prompt=TIME_R1.prompt, system=TIME_R1.system, read=_read_last, score=_reasoning, target=spans_of,
    rewards={**TIME_R1.rewards, "timestep": 0.2, "length": 0.5, "keywords": 0.2, "paragraphs": 0.1, "diversity": 0.0},
    group=_diversity, oracle=say_oracle, say=_say_at_length, problem=_needs_one_span_and_duration)


VIDEOCHAT_R1_SPAN = TimeRecipe(
    prompt=f"{_PINPOINT}specific timestamps (xx.xx) or time ranges (xx.xx to xx.xx) in <timestep> </timestep> tags.\n\n"
           f"{_IN_SECONDS}",
    rewards={"iou": 1.0, "format": 1.0}, read=_read_last, score=lambda _task, sample, answer: {
        "iou": temporal_iou(spans[0], sample["spans"][0]) if (spans := _read_last(_task, sample, answer)) else 0.0,
        "format": think_answer_format(answer.text)}, target=spans_of, oracle=say_oracle,
    say=_say_last, problem=needs_one_span)


# --- VideoChat-R1, grounded questions ---------------------------------------------------------------------------------


_CAPITAL = re.compile(r"(?<![\w'])[A-G](?![\w'])", re.ASCII)


def _first_letter(text: str, letters: str) -> str | None:
    candidates = [clean_label(text).upper(), *_CAPITAL.findall(text)]
    return next((letter for letter in candidates if letter in [*letters]), None)


def _needs_evidence(_task: Any, row: Mapping[str, Any]) -> str | None:
    options = row.get("options")
    if not isinstance(options, list) or not 2 <= len(options) <= len(_LETTERS):
        return f"options={str(options)[:200]} must be a list of 2 to {len(_LETTERS)} strings"
    if option_letter(str(row.get("answer", "")), list(map(str, options))) is None:
        return f"answer={str(row.get('answer'))[:200]!r} must be the letter or the text of one of the options"
    return None if isinstance(row.get("spans"), list) else "spans is missing: the intervals that show the answer, or []"


def _evidence(_task: Any, sample: Sample) -> dict[str, Any]:
    return {"answer": option_letter(str(sample["answer"]), list(map(str, sample["options"]))),
            "spans": spans_of(_task, sample)}


def _read_gqa(_task: Any, sample: Sample, answer: Answer) -> dict[str, Any] | None:
    shown = answer.text.partition("</think>")[2] if "</think>" in answer.text else said(answer)
    chosen, glue = answer_tag(answer.text), extract_tag(shown, "glue")
    if chosen is None and glue is None:
        return None
    return {"answer": _first_letter(chosen or "", _LETTERS[:len(sample.get("options") or _LETTERS)]),
            "spans": None if glue is None else span_list(glue)}


def _gqa(task: Any, sample: Sample, answer: Answer) -> Parts:
    parsed, truth = _read_gqa(task, sample, answer) or {"answer": None, "spans": None}, _evidence(task, sample)
    return {"accuracy": float(parsed["answer"] == truth["answer"]),
            "iou": 0.0 if parsed["spans"] is None else union_iou(parsed["spans"], truth["spans"]),
            "format": _gqa_format(answer.text)}


def _gqa_format(text: str) -> float:
    before, opened, glue = text.strip().partition("<glue>")
    if not opened or not glue.endswith("</glue>") or span_list(glue.removesuffix("</glue>")) is None:
        return 0.0
    return think_answer_format(before)


def _say_gqa(_task: Any, _sample: Sample, evidence: Mapping[str, Any]) -> str:
    glue = ", ".join(f"({format_time(s)}, {format_time(e)})" for s, e in evidence["spans"])
    return f"{thinking(evidence['answer'])}<glue>[{glue}]</glue>"


VIDEOCHAT_R1_GQA = TimeRecipe(
    prompt='Answer the question: "{question}" according to the content of the video. Select the answer from: '
           "{lettered}.\n\nOutput your thought process within the <think> </think> tags.\n\nThen, provide your answer "
           "within the <answer> </answer> tags, output the corresponding letter of the option. At the same time, in "
           "the <glue> </glue> tags, present the precise time period in seconds of the video clips on which you base "
           "your answer to this question in the format of [(s1, e1), (s2, e2), ...]. For example: "
           "<think>...</think><answer>A</answer><glue>[(5.2, 10.4)]</glue>.",
    rewards={"accuracy": 1.0, "iou": 1.0, "format": 1.0}, read=_read_gqa, score=_gqa, target=_evidence,
    oracle=say_oracle, say=_say_gqa, problem=_needs_evidence)


# --- Temporal-R1 ------------------------------------------------------------------------------------------------------

_SECONDS = r"(\d{1,9}(?:\.\d{0,20})?)"
_ONE_TIME = re.compile(_SECONDS, re.ASCII)
_START_END = re.compile(rf'\s*\{{\s*"start_time"\s*:\s*"{_SECONDS}"\s*,\s*"end_time"\s*:\s*"{_SECONDS}"\s*\}}\s*',
                        re.ASCII)


def _read_start_end(_task: Any, _sample: Sample, answer: Answer) -> list[list[float]] | None:
    record = read_literal(answer_tag(answer.text) or "")
    times = [str(record.get(key)) for key in ("start_time", "end_time")] if isinstance(record, dict) else []
    return [[float(t) for t in times]] if times and all(map(_ONE_TIME.fullmatch, times)) else None


def _temporal_r1(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of Temporal-R1: `accuracy`, the temporal IoU, and `format`, which requires quoted times. Times
    are in seconds; as shares of the clip's duration they would have the same IoU."""
    spans = _read_start_end(task, sample, answer)
    framed = think_answer_format(answer.text) and _START_END.fullmatch(answer_tag(answer.text) or "") is not None
    return {"accuracy": temporal_iou(spans[0], sample["spans"][0]) if spans else 0.0, "format": float(framed)}


TEMPORAL_R1 = TimeRecipe(
    prompt='Find when this happens in the video: "{event}". First output the thinking process in <think> </think> tags '
           "and then output the final answer in <answer> </answer> tags. Output the final answer in JSON format, with "
           'both times in seconds: {"start_time": "12.54", "end_time": "17.83"}.',
    rewards={"accuracy": 0.5, "format": 0.5}, read=_read_start_end, score=_temporal_r1, target=spans_of,
    oracle=say_oracle, problem=needs_one_span, say=lambda _task, _sample, spans: thinking(
        '{{"start_time": "{}", "end_time": "{}"}}'.format(*map(format_time, spans[0]))))


def span_problem(row: Mapping[str, Any]) -> str | None:
    """Describes what is wrong with the times of a row; None if they are valid."""
    duration, spans = row.get("duration"), row.get("spans")
    problem = positive_problem("duration", duration) if duration is not None else None
    return problem or (spans_problem(spans) if spans is not None else None)


def span_placeholders(row: Mapping[str, Any]) -> dict[str, str]:
    """Values for the placeholders of prompts: `event`, the question as a lower-case phrase; `when`, the question ending
    in a question mark; and `lettered`, the options with letters."""
    question = str(row.get("question", "")).strip()
    options = row.get("options") if isinstance(row.get("options"), list) else []
    return {"event": question.lower().removesuffix("."),
            "when": question if question.endswith("?") else f"When does this happen: {question.removesuffix('.')}?",
            "lettered": " ".join(f"({letter}) {option_text(str(option))}"
                                 for letter, option in zip(_LETTERS, options or [], strict=False))}


def span_measures(target: Any, parsed: Any) -> dict[str, float]:
    """The metrics of an answer for a row with spans:
        `miou`, `miop`: the temporal IoU, and the intersection over the predicted span (IoP);
        `r1@0.3`, `r1@0.5`, `r1@0.7`: whether the IoU is at least this value;
        `gqa_acc`, if the row has an answer: whether the answer is right and the IoP at least .5 (NExT-GQA, 2309.01327).

    For rows with an answer, a single predicted span is compared with the true span that fits best; in all other cases
    unions of spans are compared."""
    grounded = isinstance(target, dict)
    truth, spans = target["spans"] if grounded else target, parsed["spans"] if grounded and parsed else parsed
    overlap = 0.0 if spans is None else union_iou(spans, truth)
    precision = 0.0 if spans is None else interval_precision(spans, truth)
    if grounded and spans and len(spans) == 1:
        overlap, precision = best_grounding(spans[0], truth)
    measured = {"miou": overlap, "miop": precision, **{f"r1@{t}": float(overlap >= t) for t in (0.3, 0.5, 0.7)}}
    if grounded:
        measured["gqa_acc"] = float(bool(parsed) and parsed["answer"] == target["answer"] and precision >= 0.5)
    return measured


def span_cheats(task: Any, sample: Sample) -> dict[str, str]:
    """Name -> an answer that should not earn the full reward: it can be given without looking at the clip (the whole
    clip, every second), or its times are impossible (after the clip, end before start)."""
    end = float(sample.get("duration") or 2 * max([s[1] for s in sample.get("spans") or []], default=10.0))
    seconds = [[float(t), t + 1.0] for t in range(min(60, int(end)))]
    cases = {"whole clip as written": [[0.0, end]], "from the end to the start": [[end, 0.0]],
             "no time at all": [[end / 2, end / 2]], "after the clip": [[2 * end, 3 * end]], "every second": seconds}
    target = task.used.target(task, sample)
    return {name: task.used.say(task, sample, {"answer": "A", "spans": spans} if isinstance(target, dict) else spans)
            for name, spans in cases.items() if spans}
