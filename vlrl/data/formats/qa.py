"""Converts records of question and answer to canonical rows: SuperCLEVR, R1-V, CLS-RL, Geometry3K, MathVista,
ScienceQA, MMMU, Video-MME, verl's rows, questions about a table in text form, and similar formats."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.formats.choices import (
    INDICES,
    LETTERED,
    OPTIONS,
    answer_fields,
    answer_text,
    letter_at,
    option_letter,
    options_of,
)
from vlrl.data.formats.conversations import FIELDS, Conversation, conversation_fields, conversation_of
from vlrl.data.formats.questions import (
    checked_conversation,
    media_fields,
    question_fields,
    system_prompt,
    with_media,
    without_marks,
)
from vlrl.data.sources.answer_types import as_video_type, stated_type
from vlrl.data.sources.fields import IMAGE, VIDEO, RecordSource, base_fields, has, meta, pick, record_id, size_of, text
from vlrl.data.values import number, short
from vlrl.errors import DataError
from vlrl.types import Record, Row

QUESTION = ("question", "problem", "query", "Question", "prompt", "text", "q")
ANSWER = ("answer", "final_answer", "solution", "ground_truth", "gt_answer", "gt", "correct_answer", "Answer",
          "direct_answers", "answers", "multiple_choice_answer", *INDICES)
_DIRECT = tuple(name for name in ANSWER if name not in INDICES)
ID_FIELDS = ("question_id", "sample_id", "pid", "problem_id", "qid", "uid", "ID")
_OTHERS = ("boxes", "box", "plan", "responses", "instruction")
_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*)\}")
_HASHES = re.compile(r"####\s*(.+?)\s*$")
_ASKS_CLASS = re.compile(r"\b(?:what|which)\b[^.?]{0,40}\b(?:type|kind|species|breed|variety|class|category|model|"
                         r"action|texture|flower|pet|food|dish|bird|car|aircraft|object|animal|scene)\b|\bclassif|"
                         r"\bidentify the (?:category|class|object|name|type)", re.IGNORECASE)
_KEPT = ("id", "question", "answer", "answer_type", "options", "tolerance", "difficulty", "category", "source", "split",
         "weight", "hints", "group_key", "meta", "processed_size", "coordinates", "duration", "fps", "frames", "labels",
         "frame_times", "synonyms", "width", "height", "video_start", "video_end", "label", "system_prompt", "turns",
         "tools", "environment")


_PLAIN_ANSWERS = ("answer", "final_answer", "ground_truth", "gt_answer", "gt", "correct_answer")
"""Fields that hold only an answer. (`solution` may contain reasoning as well.)"""
_SHORT = 60
"""Maximum length of an assistant turn that is taken as an answer; a longer turn is a worked solution."""
_NUMBERS = {"duration": 1e6, "fps": 1e4, "difficulty": 1, "weight": 1e9, "precision": 15}
"""Maps each numeric field of rows to its maximum. Larger values have another meaning, because other projects use the
same field names."""
_YES_NO = ("yes", "no")
_FILM = re.compile(r"\.(?:mp4|mkv|webm|avi|mov)$")


def problem_text(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record with `problem` and `solution` (Curr-ReFT's SuperCLEVR, R1-V, CLS-RL).

    The solution is a count, number, letter, formula or text. A text that answers a question about a class also becomes
    the row's `label`."""
    solution = record["solution"]
    if isinstance(solution, bool) or not isinstance(solution, (str, int, float)):
        raise DataError(f"solution={short(solution)} must be a string, a number or a box [x1, y1, x2, y2]")
    question = text(record, "problem")
    if has(record, "answer") and "<answer>" not in str(solution):  # the solution contains the reasoning
        return question_answer(record, source)
    options = options_of(record)
    row = answer_fields(final_answer(solution), options, question, stated_type(record))
    value = number(row["answer"]) if row["answer_type"] in ("count", "number") else None
    counted = {"count": value} if row["answer_type"] == "count" else {}
    named_ = {"label": row["answer"]} if row["answer_type"] == "text" and _ASKS_CLASS.search(question) else {}
    row = {**row, "answer": value} if str(value) == str(row["answer"]) else row  # 3.50 stays as written
    about = base_fields(record, source)
    return [{**about, **row, **question_fields(question, about, options), **counted, **named_,
             **meta(record, "problem", "solution", "problem_type", *OPTIONS)}]


def is_mathvista(record: Record) -> bool:
    """Whether a record has a `question_type`, a question, and an answer as in MathVista (in `answer`, with a field
    `pid`) or OlympiadBench (in `final_answer`)."""
    known = has(record, "question_type") and has(record, "question")
    return known and (("pid" in record and has(record, "answer")) or has(record, "final_answer"))


def is_question_answer(record: Record) -> bool:
    """Whether a record has a question and an answer. Canonical rows, and records whose answer only a custom task can
    read, are excluded."""
    asks = has(record, *QUESTION) and (has(record, *_answers(record)) or _ground_truth(record) is not None)
    plain = {"id", "question", "answer"} <= record.keys() and not has(record, *OPTIONS) and record.keys() <= {
        *_KEPT, *IMAGE, *VIDEO, "image_size"}
    own = {"id", "question", "answer"} <= record.keys() and isinstance(record["answer"], (bool, Mapping))
    return asks and not plain and not own and not has(record, *_OTHERS)


def question_answer(record: Record, source: RecordSource) -> list[Row]:
    r"""Converts a record with a question, an answer, and possibly options and media, to a row. Reads them from any of
    the fields that many projects use.

    From a worked solution, the answer is the content of \boxed{} or the text after ####. Several answers are all
    accepted; the most frequent comes first. verl's `reward_model.ground_truth` is read as the answer. Other fields are
    copied to the row."""
    said = checked_conversation(record) or Conversation(pick(record, *QUESTION))
    record, question = with_media(record, said), said.question
    if not isinstance(question, str) or not without_marks(question):
        raise DataError(f"question={short(question)} must be a non-empty string")
    options = options_of(record)
    given, worked = reference_answer(said, record, options, question)
    texts: dict[str, Any] = {}
    if record.get("question_type") == "multi_choice" and "pid" in record:
        if options.count(given) == 1:  # MathVista's answer is a text, even if it is a letter: C, A, B
            given = chr(ord("A") + options.index(given))
        raw = record.get("choices")
        if isinstance(raw, list) and raw != options and all(isinstance(v, str) for v in raw):
            texts = {"choice_texts": raw}  # with letters, which its scoring compares too
    given = final_answer(given) if isinstance(given, str) else given
    row = answer_fields(given, options, question, stated_type(record))
    if has(record, "sample_token") and not has(record, *IMAGE, *VIDEO):
        raise DataError("the row names a sample of nuScenes, but no image: add `images` with the cameras' files")
    media = media_fields(record, source, needed=False) or ({"video": source.id} if _FILM.search(source.id) else {})
    used = {*QUESTION, *_answers(record), *ID_FIELDS, *OPTIONS, *IMAGE, *VIDEO, *LETTERED, *FIELDS, "reward_model",
            "answer_type", "image_size", "system", *(f"image_{n}" for n in range(1, 10)),
            *(("start", "end") if "video" in media else ())}
    rest = {k: v for k, v in record.items() if k not in used and v is not None and meta({k: v})}
    row = as_video_type(row) if "video" in media else row
    return [{**_without_file_duration(_numeric(rest), media), "id": record_id(record, source, *ID_FIELDS), **media,
             **_recorded_size(record), **row, **texts,
             **question_fields(question, media, options, said.turns), **worked, **system_prompt(record, said)}]


def missing_answer(record: Record) -> DataError | None:
    """Returns the error for a record with a question and an empty answer field; None for other records."""
    empty = next((name for name in ANSWER if name in record and record[name] in (None, "", [])), None)
    if empty is None or not has(record, *QUESTION) or has(record, *ANSWER, *_OTHERS):
        return None
    return DataError(f"{empty}={short(record[empty])} is empty, so there is no answer to the question "
                     f"{short(pick(record, *QUESTION))}: fill it in, or leave the row out (--keep-going, "
                     "data.quarantine)")


def said_answer(record: Record, kept: Record) -> dict[str, str]:
    """Returns {"answer": the assistant's last turn} of a conversation in `record` that is not in `kept`; {} if there is
    none, or if `kept` has a field with the answer. Raises DataError if turns before the question would be lost."""
    if has(kept, *ANSWER) or _ground_truth(kept) is not None or set(conversation_fields(record)) & kept.keys():
        return {}
    said = conversation_of(record)
    if said and (said.turns or said.system):
        raise DataError("data.columns (--columns) replaces the question of a conversation that also has a system "
                        "prompt or earlier turns: map the answer as well (answer=COLUMN), or leave out question=")
    return {"answer": said.answer} if said and said.answer else {}


def refuse_two_readings(record: Record) -> None:
    """Raises DataError if a record has two fields with different values for its question, answer, options or images.
    The error tells the user to select one of the fields with --columns."""
    asks = {n: without_marks(record[n]) for n in ("question", "problem", "query") if isinstance(record.get(n), str)}
    says = {n: str(record[n]).strip() for n in _PLAIN_ANSWERS if isinstance(record.get(n), (str, int, float))
            and not isinstance(record[n], bool) and 0 < len(str(record[n]).strip()) <= _SHORT}
    options = options_of(record) if len(says) > 1 else []
    if options:
        says = {name: option_letter(text, options) for name, text in says.items()}
    for role, readings in (("question", asks), ("answer", says)):
        (first, *others), texts = list(readings) or [""], [text.lower() for text in readings.values()]
        other = next((n for n, text in zip(others, texts[1:], strict=True)
                      if text not in texts[0] and texts[0] not in text), None)
        if other:
            raise DataError(f"{first!r} says {short(readings[first])} and {other!r} says {short(readings[other])}: "
                            f"which is the {role}? Choose with --columns (data.columns) {role}={first} or "
                            f"{role}={other}")
    offers = {n: options_of({n: record[n]}) for n in OPTIONS[:3] if isinstance(pick(record, n), list)}
    first = next(iter(offers), "")
    if other := next((n for n, given in offers.items() if given != offers[first]), None):
        raise DataError(f"{first!r} and {other!r} offer different options: choose with --columns (data.columns) "
                        f"options={first} or options={other}")
    one, several = pick(record, "image"), pick(record, "images")
    if one is not None and isinstance(several, list) and several and several != [one]:
        raise DataError(f"the record has both 'image' and 'images' ({len(several)} of them): choose which to show with "
                        "--columns (data.columns) images=image or images=images")


def reference_answer(conversation: Conversation, record: Record, options: Sequence[str], question: str
                     ) -> tuple[Any, dict[str, str]]:
    """Returns (answer that completions are compared with, {"solution": worked solution}). The dict is empty if there is
    no worked solution.

    If the record has an answer field besides the conversation, as in TRL, ms-swift and verl, this field is the answer,
    and the last turn of the assistant is the worked solution. Without an answer field, the last turn is the answer.
    Raises DataError if field and turn contradict each other, or if both are missing."""
    beside = _correct_answer(record, options)
    if beside is None or not conversation.answer:
        if beside is None and not conversation.answer:
            raise DataError(f"the question {short(question)} has no answer: the conversation ends with the question or "
                            f"an empty turn, and no field holds the answer; known names: {', '.join(ANSWER[:6])} ...")
        return conversation.answer if beside is None else beside, {}
    reference = beside[0] if isinstance(beside, list) and beside else beside
    own, other = (" ".join(final_answer(v).lower().split()) for v in (conversation.answer, reference))
    marked = own != " ".join(conversation.answer.lower().split()) or len(own) <= _SHORT
    if own != other and (marked or not other) and not re.search(rf"(?<!\w){re.escape(other)}(?!\w)", own):
        raise DataError(f"the assistant answers {short(own)}, but a separate field holds the answer "
                        f"{short(reference)}: remove the wrong answer")
    return beside, {"solution": conversation.answer} if own != other else {}


def _correct_answer(record: Record, options: Sequence[str]) -> Any:
    given = _ground_truth(record)
    place = pick(record, *INDICES) if given is None else None
    if place is not None and options:
        given = letter_at(place, options)
    elif place is not None and not has(record, *_DIRECT):
        raise DataError(f"the row has the index {short(place)} of the correct option, but no field holds the options. "
                        f"Put the options into a field named {' or '.join(OPTIONS)}, or each option into a field of "
                        "its own, named A, B ... or option_0, option_1 ...")
    given = _stated_answer(record) if given is None else given
    if isinstance(given, list) and all(isinstance(v, Mapping) for v in given):
        given = [v.get("answer") for v in given]
    return ("yes" if given else "no") if isinstance(given, bool) else given


def _stated_answer(record: Record) -> Any:
    """The value of a record's answer field. A string of numbers in brackets is one answer, not a list of answers."""
    given = pick(record, *_answers(record))
    raw = next((v for n in _answers(record) if (v := record.get(n)) is not None and v != ""), None)
    alone = isinstance(raw, str) and isinstance(given, list) and all(isinstance(v, (int, float)) for v in given)
    return raw if alone else given


def _without_file_duration(fields: dict[str, Any], media: Record) -> dict[str, Any]:
    part = media["video_end"] - media["video_start"] if {"video_start", "video_end"} <= media.keys() else 0
    return {k: v for k, v in fields.items() if not (k == "duration" and part and abs(v - part) > 1)}


def _recorded_size(record: Record) -> dict[str, float]:
    try:
        size = size_of(record, {}, RecordSource())
    except DataError:  # other projects use the names differently
        return {}
    return {"width": size[0], "height": size[1]} if size else {}


def _answers(record: Record) -> tuple[str, ...]:
    asks = isinstance(text := record.get("text"), str) and ("?" in text or str(record.get("label")).lower() in _YES_NO)
    return (*ANSWER, "label") if has(record, "query") or asks else ANSWER


def _numeric(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a row, with invalid values of numeric fields (`duration`, `difficulty` ...), such as
    "short", moved to the field `meta`."""
    given = {k: fields.pop(k) for k in _NUMBERS if k in fields}
    values = {k: number(v) for k, v in given.items()}
    sound = {k: v for k, v in values.items() if v is not None and 0 <= v <= _NUMBERS[k]
             and (k != "precision" or isinstance(v, int))}  # elsewhere it is a metric
    others = {k: v for k, v in given.items() if k not in sound}
    return {**fields, **sound, **({"meta": {**others, **(fields.get("meta") or {})}} if others else {})}


def _ground_truth(record: Record) -> Any:
    rule = pick(record, "reward_model")
    return pick(rule, "ground_truth") if isinstance(rule, Mapping) else None


def final_answer(answer: Any) -> str:
    """Returns the final answer of a worked solution. For an answer without a worked solution, returns its text without
    the <answer> tags."""
    said = str(answer)
    if "<answer>" not in said.lower():
        matches = _BOXED.findall(said[-5000:]) or _HASHES.findall(said[-1000:])
        said = matches[-1] if matches else said
    return answer_text(said)


_TABLE_TYPES = {"integer_number": "number", "decimal_number": "number", "boolean_text": "text",
                "extractive_text": "text", "other_text": "text"}
"""Maps TabMWP's ans_type to the row's answer_type."""
_TABLE_IMAGES = ("tables/{}.png", "{}.png")
"""Possible file names of a table's image; {} is the id of the record."""


def table_question(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of TabMWP (2209.14610) to a row that shows the table as text before the question, and also the
    image of the table if the file exists."""
    question, table = text(record, "question"), _table_text(pick(record, "table"))
    title, unit = (str(record.get(name) or "").strip() for name in ("table_title", "unit"))
    asked = "\n".join(filter(None, (title, f"{table}\n", question))) + (f" (unit: {unit})" if unit else "")
    options, id = options_of(record), record_id(record, source)
    row = answer_fields(record["answer"], options, question, _TABLE_TYPES.get(str(record.get("ans_type"))))
    drawn = (name.format(id) for name in _TABLE_IMAGES)
    image = pick(record, *IMAGE) or next((name for name in drawn if source.size(name)), None)
    shown: dict[str, Any] = {"image": source.path(image)} if isinstance(image, str) else {}
    size = size_of(record, shown, source) if shown else None
    shown |= {"width": size[0], "height": size[1]} if size else {}
    split = {"split": record["split"]} if has(record, "split") else {}
    return [{"id": id, **shown, "question": asked, **row, **split,
             **meta(record, "question", "table", "table_title", "table_for_pd", "unit", "answer", "ans_type", "split",
                    *OPTIONS)}]


def _table_text(table: Any) -> str:
    if isinstance(table, str):
        return table.strip()
    if isinstance(table, Mapping):  # WikiTableQuestions, TAT-QA
        rows = pick(table, "rows", "table", "data")
        head = pick(table, "header", "columns")
        table = [*([head] if head else []), *rows] if isinstance(rows, list) else None
    if not isinstance(table, list) or not table or not all(isinstance(line, list) for line in table):
        raise DataError(f"table={short(table)} must be a string, or a list of rows, each a list of cells")
    return "\n".join(" | ".join("" if cell is None else str(cell) for cell in line) for line in table)
