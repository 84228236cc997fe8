"""Converts records of driving decisions (AlphaDrive, 2503.07608) to canonical rows."""

from __future__ import annotations

import re
from collections.abc import Sequence

from vlrl.data.formats.choices import answer_text
from vlrl.data.formats.questions import checked_conversation, context_turns, system_prompt
from vlrl.data.sources.fields import IMAGE, RecordSource, base_fields, has, meta, pick
from vlrl.data.values import number, short
from vlrl.errors import DataError, did_you_mean
from vlrl.rewards.driving import HEADS
from vlrl.types import Record, Row

_ALSO = {"MAINTAIN": "KEEP", "MAINTAIN_SPEED": "KEEP", "KEEP_SPEED": "KEEP", "SPEED_UP": "ACCELERATE",
         "ACCELERATION": "ACCELERATE", "SLOW_DOWN": "DECELERATE", "DECELERATION": "DECELERATE",
         "GO_STRAIGHT": "STRAIGHT",
         "TURN_LEFT": "LEFT_TURN", "TURN_RIGHT": "RIGHT_TURN", "CHANGE_LEFT": "LEFT_CHANGE",
         "CHANGE_RIGHT": "RIGHT_CHANGE", "LEFT_LANE_CHANGE": "LEFT_CHANGE", "RIGHT_LANE_CHANGE": "RIGHT_CHANGE",
         "LANE_CHANGE_LEFT": "LEFT_CHANGE", "LANE_CHANGE_RIGHT": "RIGHT_CHANGE"}
_VOCABULARY = [word for known in HEADS.values() for word in known]
_LONGEST = 200
_LONGEST_TEXT = 5000
_SPEED = re.compile(r"(\d{1,3}(?:\.\d{1,6})?)\s*(m/s|mps|meters? per second|metres? per second|km/h|kph|kmh|mph)",
                    re.IGNORECASE)
_PER_SECOND = {"m": 1.0, "k": 1 / 3.6, "mph": 0.44704}
_ROUTE = re.compile(r"navigation\w{0,3}(?:\s+(?:command|instruction|information|info|text|prompt))*\s*"
                    r"(?:is|says|:|=)+\s*[\"'“<]?([^\n\"'”>;]{2,200}?)[\"'”>]?\s*(?:[.;]|$|\n)", re.IGNORECASE)
_PLANS = re.compile(r"\bplan|meta.?action|\bnavigation|\b(?:current|ego) speed|\bspeed (?:is|of)|\d\s?(?:m/s|km/h|mph)",
                    re.IGNORECASE)
_ANSWERS = ("solution", "answer", "meta_action", "action", "decision")


def is_alphadrive(record: Record) -> bool:
    """Whether a record's answer consists of driving meta-actions and its question asks for a plan.

    A question is taken to ask for a plan if it mentions planning, or if the answer is in capitals. A record without a
    question is accepted too. Other questions about driving that meta-actions answer are excluded ("What could lead to a
    collision?", DriveLM)."""
    given, text = _answer(record), _question(record)
    words = _meta_actions(given)
    planned = bool(words) and (_unknown(words) is None or "speed" in text.lower())
    return planned and (not text or given.isupper() or bool(_PLANS.search(text))) and has(record, *IMAGE, "images")


def alphadrive(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record to a row whose `plan` holds the meta-actions of the answer ("<answer>KEEP, STRAIGHT</answer>").

    Several meta-actions for speed, or for direction, become a list. `speed_mps` and `navigation` come from fields of
    the record, else from the text of the problem. That text is stored in `meta`."""
    words = _meta_actions(_answer(record))
    if unknown := _unknown(words):
        raise DataError(f"the answer {short(_answer(record))} has {unknown!r}, which is not a meta-action."
                        f"{did_you_mean(unknown, _VOCABULARY)}")
    heads = {head: [w for w in words if w in known] for head, known in HEADS.items()}
    if not all(heads.values()):
        missing = next(name for name, matched in heads.items() if not matched)
        raise DataError(f"the answer {short(_answer(record))} has no word for {missing}; it needs one of "
                        f"{', '.join(HEADS[missing])}")
    text, said = _question(record), checked_conversation(record)
    speed, route = _speed(record, text), pick(record, "navigation", "nav", "command", "navigation_text")
    route = route if isinstance(route, str) else next(iter(_ROUTE.findall(text[:_LONGEST_TEXT])), None)
    plan = {head: matched[0] if len(matched) == 1 else matched for head, matched in heads.items()}
    row = base_fields(record, source)
    return [{**row, "plan": plan, **({"speed_mps": speed} if speed is not None else {}),
             **({"navigation": route.strip()} if route else {}),
             **system_prompt(record, said), **context_turns(said, row),
             **meta(record, "conversations", "messages", "system", *_ANSWERS, *"speed_mps ego_speed speed navigation "
                    "nav command navigation_text".split())}]


def _question(record: Record) -> str:
    said = checked_conversation(record)
    return said.question if said else str(pick(record, "problem", "question", "prompt") or "")


def _unknown(words: Sequence[str]) -> str | None:
    return next((word for word in words if word not in _VOCABULARY), None)


def _answer(record: Record) -> str:
    said = checked_conversation(record)
    given = (said.answer if said else "") or pick(record, *_ANSWERS)
    return answer_text(given) if isinstance(given, str) and len(given) <= 100 * _LONGEST else ""


def _meta_actions(answer: str) -> list[str]:
    """The meta-actions in an answer, in capitals. [] if the answer has other words too, unless the whole answer is in
    capitals."""
    pieces = [re.sub(r"[\s-]+", "_", w.strip(" .[]()\"'").upper()) for w in re.split(r"[,;/+\n]|\band\b", answer)]
    words = [_ALSO.get(w, w) for w in pieces if w] if len(answer) <= _LONGEST else []
    matches = [w in _VOCABULARY for w in words]
    return words if any(matches) and (all(matches) or answer.isupper()) else []


def _speed(record: Record, question: str) -> float | None:
    given = pick(record, "speed_mps", "ego_speed", "speed")
    speed = number(given)
    if speed is not None and speed >= 0:
        return speed
    match = _SPEED.search(given if isinstance(given, str) else question[:_LONGEST_TEXT])
    if not match:
        return None
    unit = match[2].lower()
    return round(float(match[1]) * _PER_SECOND.get(unit, _PER_SECOND.get(unit[0], 1.0)), 3)
