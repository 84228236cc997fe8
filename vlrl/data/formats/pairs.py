"""Converts pairs of a better and a worse response to canonical rows: VL-RewardBench, R1-Reward, and similar formats."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

from vlrl.data.formats.choices import answer_text
from vlrl.data.formats.conversations import FIELDS, Conversation, conversation_of, read_reply
from vlrl.data.formats.questions import media_fields, question_fields, system_prompt, with_media
from vlrl.data.sources.fields import IMAGE, VIDEO, RecordSource, has, meta, pick, record_id, text
from vlrl.data.values import number, short
from vlrl.errors import DataError
from vlrl.types import Record, Row

Placed = list[tuple[int, str, dict[str, Any] | DataError]]
_QUESTION = ("question", "prompt", "query", "instruction", "text", "Text", "input", "problem")
_PAIRS = (("response_1", "response_2"), ("response1", "response2"), ("response_a", "response_b"),
          ("answer1", "answer2"),
          ("output1", "output2"), ("Output1", "Output2"), ("responses_a", "responses_b"), ("answer_a", "answer_b"),
          ("response_A", "response_B"))
_LISTS = ("responses", "response", "outputs", "answers")
_BETTER = ("answer", "preference", "better", "Better", "winner", "label", "choice", "preferred", "gt",
           "human_preference")
_PLACES = ("id", "sample_id", "question_id", "idx", "ID")
_SIDE = re.compile(r"(?:model|response|output|answer|assistant)?[\s_-]*[(\[]?(?:(1|a|first|left)|(2|b|second|right))"
                   r"[)\]]?\.?", re.IGNORECASE)
_MARKS = ("[question]", "[response 1]", "[response 2]")
_END = "**output format"


def chosen_rejected(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record with `chosen` and `rejected` (VL-RewardBench in R1-Reward's format, RLAIF-V, LLaMA-Factory).

    The order of the two responses is random but fixed by the row's id; `answer` is the position of the chosen response,
    1 or 2."""
    id = record_id(record, source, *_PLACES)
    better, worse = _response(record, "chosen"), _response(record, "rejected")
    if better == worse:
        raise DataError("chosen and rejected are the same text: change one of them, or remove the row")
    second = zlib.crc32(f"vlrl/pairs/{id}".encode("utf-8", "backslashreplace")) % 2
    pair = [worse, better] if second else [better, worse]
    return [{"id": id, **_question(record, source), "responses": pair, "answer": 1 + second,
             **_about(record, "chosen", "rejected")}]


def _response(record: Record, name: str) -> str:
    given = record[name]
    if isinstance(given, Mapping):
        given = [given]
    if isinstance(given, list):
        given = read_reply(given).answer
    if not isinstance(given, str) or not given.strip():
        raise DataError(f"{name}={short(record[name])} must be a non-empty string")
    return given.strip()


def _question(record: Record, source: RecordSource) -> dict[str, Any]:
    ends = [read_reply(record[name]) for name in ("chosen", "rejected") if isinstance(record.get(name), list)]
    ends = [said for said in ends if said.question]
    if len(ends) > 1 and (ends[0].question, ends[0].turns) != (ends[1].question, ends[1].turns):
        raise DataError("chosen and rejected answer different questions: correct or remove the row")
    said = (None if has(record, "question") else conversation_of(record)) or next(iter(ends), Conversation())
    record = with_media(record, said)
    media = media_fields(record, source, needed=False)
    return {**media, **question_fields(said.question or text(record, *_QUESTION), media, (), said.turns),
            **system_prompt(record, said)}


def _about(record: Record, *used: str) -> dict[str, Any]:
    kind = pick(record, "category", "Category", "task")
    return {**({"category": kind} if isinstance(kind, str) else {}),
            **meta(record, *used, *_QUESTION, *_PLACES, *VIDEO, *FIELDS, "system", "category",
                   "Category")}


def is_response_pair(record: Record) -> bool:
    return len(_pair(record)) == 2 and has(record, *_QUESTION) and has(record, "human_ranking", "ranking", *_BETTER)


def response_pair(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record with two responses, and a field that says which response is better. The order of the responses
    stays the same.

    The value of the field is 1 or 2, A or B, "Output1", or a list of two ranks (VL-RewardBench on the Hub), where the
    better response has the lower rank."""
    pair = [str(v).strip() for v in _pair(record)]
    rank = pick(record, "human_ranking", "ranking")
    if rank is not None:
        if not (isinstance(rank, list) and len(rank) == 2 and all(number(v) is not None for v in rank)
                and rank[0] != rank[1]):
            raise DataError(f"human_ranking={short(rank)} must be two different ranks; the better response has the "
                            "lower rank")
        better = 1 if rank[0] < rank[1] else 2
    else:
        better = _better(pick(record, *_BETTER), pair)
    used = {*_LISTS, *_BETTER, "human_ranking", "ranking", *(n for names in _PAIRS for n in names)}
    return [{"id": record_id(record, source, *_PLACES), **_question(record, source), "responses": pair,
             "answer": better, **_about(record, *used)}]


def one_or_two(rows: Placed) -> Placed:
    """Replaces all rows of a file by errors if any row has the answer 0. Such a file either counts responses from 0, or
    says whether the first response is better, so the answer 1 in other rows is ambiguous too."""
    if not any(isinstance(row, _FromZero) for _, _, row in rows):
        return rows
    return [(n, where, row if isinstance(row, DataError) else _FromZero(
        f"answer={row['answer']} is ambiguous: another row of the file has the answer 0, so answers count from 0, or "
        "say whether the first response is better. Write 1 or 2, or A or B")) for n, where, row in rows]


class _FromZero(DataError):
    """Error for a row whose answer is 0, and for all other rows of the same file."""


def _pair(record: Record) -> list[Any]:
    listed = next((texts for n in _LISTS if isinstance(texts := pick(record, n), list) and len(texts) == 2), None)
    if listed and all(isinstance(v, str) and v.strip() for v in listed):
        return listed
    names = next((names for names in _PAIRS if all(isinstance(record.get(n), str) for n in names)), ())
    return [record[n] for n in names]


def _better(verdict: Any, pair: list[str]) -> int:
    """Returns the number of the better response, 1 or 2. `verdict` is a number, a letter, a name such as "Output1", or
    the text of one of the two responses in `pair`."""
    if isinstance(verdict, list) and len(verdict) == 1:
        verdict = verdict[0]
    if number(verdict) in (1, 2):
        return int(number(verdict) or 0)
    words = answer_text(verdict)
    if words in pair and pair[0] != pair[1]:
        return pair.index(words) + 1
    side = _SIDE.fullmatch(words)
    if number(verdict) == 0:
        raise _FromZero(f"answer={short(verdict)} must say which response is better: 1 or 2")
    if not side:
        raise DataError(f"answer={short(verdict)} must say which response is better: 1 or 2")
    return 1 if side[1] else 2


def r1_reward(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of R1-Reward (2505.02835): its `message` asks which of [Response 1] and [Response 2] is better.
    `message` is a conversation as a JSON string; `answer` is, for example, ["<answer>2</answer>"]."""
    parts = [part for turn in pick(record, "message") if isinstance(turn, Mapping)
             for part in (turn["content"] if isinstance(turn.get("content"), list) else [{"text": turn.get("content")}])
             if isinstance(part, Mapping)]
    prompt = "\n".join(str(part["text"]) for part in parts if isinstance(part.get("text"), str))
    compared = _compared(prompt) or _compared(str(record.get("question") or ""))
    if compared is None:
        raise DataError("the message lacks one of the headings [Question], [Response 1] and [Response 2]")
    pictures = [part["image"] for part in parts if isinstance(part.get("image"), str)]
    clips = [part["video"] for part in parts if isinstance(part.get("video"), str)]
    named_ = {**({"images": pictures} if pictures else {}), **({"video": clips[0]} if clips else {})}
    media = media_fields(record if has(record, *IMAGE, *VIDEO) else named_, source, needed=False)
    question, *pair = compared
    return [{"id": record_id(record, source, *_PLACES), **media, "question": question, "responses": pair,
             "answer": _better(pick(record, "answer"), pair), **meta(record, "message", "question", "answer", *VIDEO,
                                                                     *_PLACES)}]


def _compared(prompt: str) -> list[str] | None:
    """[question, response 1, response 2] of a prompt with the headings in _MARKS; None if one of them is missing."""
    lowered, places = prompt.lower(), [0]
    for mark in _MARKS:
        places.append(lowered.find(mark, places[-1]))
        if places[-1] < 0:
            return None
    end = lowered.find(_END, places[-1])
    ends = [*places[2:], end if end >= 0 else len(prompt)]
    return [prompt[start + len(mark):stop].lstrip(":* \n").strip("#* \n")
            for mark, start, stop in zip(_MARKS, places[1:], ends, strict=True)]
