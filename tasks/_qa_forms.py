"""The three forms in which a question can be asked, increasingly hard to guess: yes or no, a choice, an open question
(Curr-ReFT, 2503.07065).

Each form function converts a row to the row that asks in this form. Random choices (the order of options, whether the
proposed answer is right) depend only on the row's id and question, so a question is the same every time it is asked."""

import random
import zlib
from collections.abc import Callable

from vlrl.errors import DataError
from vlrl.rewards.codes import is_code
from vlrl.rewards.numbers import read_number
from vlrl.types import Record

from . import _qa_kinds as kinds


def own(row: Record) -> Record:
    """Returns the row unchanged: the question is asked as in the row."""
    return row


def yes_no(row: Record) -> Record:
    """Converts a row to the question whether a proposed answer is right. With probability 1/2 the proposed answer is
    right, else wrong."""
    if row["answer_type"] == "yes_no":
        return row
    right, wrong = _right(row), _wrong(row)
    rng = _rng(row)
    is_right = rng.random() < 0.5
    proposed = right if is_right else rng.choice(wrong)
    return {**row, "question": f"{row['question']}\nProposed answer: {proposed}\nIs the proposed answer right?",
            "answer": "yes" if is_right else "no", "answer_type": "yes_no", "options": None}


def choice(row: Record) -> Record:
    """Converts a row to a choice among options: the row's own options, or generated options if the answer is a number.
    """
    if row["answer_type"] == "choice":
        return row
    right = _right(row)
    options = [right, *_wrong(row)]
    _rng(row).shuffle(options)
    return {**row, "answer": kinds.LETTERS[options.index(right)], "answer_type": "choice", "options": options}


def open_question(row: Record) -> Record:
    """Converts a row to a question without options. The answer is the text of the right option, or the number in that
    text."""
    if row["answer_type"] != "choice":
        return row
    right = _right(row)
    kind = "number" if read_number(right) is not None and not is_code(right) else "text"
    return {**row, "answer": right, "answer_type": kind, "options": None}


FORMS: dict[str, Callable[[Record], Record]] = {"own": own, "yes_no": yes_no, "choice": choice, "open": open_question}
"""Value of `task.form` -> function; from the easiest to the hardest."""


def _right(row: Record) -> str:
    if row["answer_type"] != "choice":
        return kinds.right_answers(row)[0]
    letter, options = kinds.target(row)[0], kinds.options_of(row)
    if not options or "," in letter:
        raise DataError(f"answer={row['answer']!r} is not one of the row's options, as task.form requires: give the "
                        "row its options, or set task.form=own")
    return options[kinds.LETTERS.index(letter)]


def _wrong(row: Record) -> list[str]:
    kind = row["answer_type"]
    if kind == "choice":
        return [option for option in kinds.options_of(row) if option != _right(row)]
    if kind == "yes_no":
        return ["no" if kinds.target(row)[0] == "yes" else "yes"]
    value = kinds.target(row)[0]
    if kind not in ("number", "count", "regression") or isinstance(value, str):
        raise DataError(f"a row of answer_type={kind} without options has no wrong answers to offer: leave out such "
                        "rows, give them options, or set task.form=own or open")
    if value == int(value):
        near = [int(value) + d for d in (-2, -1, 1, 2, 3) if kind != "count" or value + d >= 0]
        return [str(v) for v in _rng(row).sample(near, 3)]
    return [f"{value * share:.6g}" for share in (0.8, 0.9, 1.2)]


def _rng(row: Record) -> random.Random:
    return random.Random(zlib.crc32(f"{row.get('id')}/{row['question']}".encode("utf-8", "backslashreplace")))
