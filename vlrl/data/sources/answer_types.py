"""Determines the answer_type of rows of other projects: stated by a field, else guessed from answer and question,
taking all answers of the file into account.

If an answer could have several types, its characters alone never decide. Digits that name something, such as a phone
number or a version, are text. A formula is math if it contains LaTeX, or if the question or most answers of the file
suggest it. A letter is an option if most answers are letters. `data.answer_type` overrides all of this."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from vlrl.config.schema import AnswerType
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.rewards.answers import quantity
from vlrl.rewards.codes import is_code
from vlrl.rewards.numbers import read_number
from vlrl.rewards.scripts import western
from vlrl.types import Record

TYPES = {"multiple choice": "choice", "multiple-choice": "choice", "multi_choice": "choice", "mcq": "choice",
         "numerical": "number", "free-form": "text", "free_form": "text", "open": "text", "open-ended": "text",
         "ocr": "ocr", "regression": "regression", "yes_no": "yes_no", "yes/no": "yes_no", "counting": "count",
         "integer": "number", "float": "number", "math": "math"}
"""Maps the names of answer types in other projects to answer_type."""
_MORE = {"integer_number": "number", "decimal_number": "number", "numeric": "number", "number": "number",
         "count": "count", "extractive_text": "text", "boolean_text": "text", "other_text": "text", "text": "text",
         "string": "text", "list": "text", "date": "text", "time": "text", "expression": "math", "equation": "math",
         "interval": "math", "tuple": "math"}
"""Maps names of answer types in TabMWP, MathVista, OlympiadBench and VQAv2 to answer_type."""
_STATED_BY = ("answer_type", "ans_type", "problem_type", "question_type", "ques_type")
_OPEN = ("free-form", "free_form", "open", "open-ended", "free_text")
"""Words for "no options". They do not state an answer type, except in the field `problem_type` (Video-R1)."""
_OF_CLIP = {"count": "number", "yes_no": "text", "math": "text"}
_LONGEST_MATH = 200
_ASKS_COUNT = re.compile(r"\bhow many\b|\bcount\b|\bnumber of\b", re.IGNORECASE)
_ASKS_AMOUNT = re.compile(r"\bhow\b|\bages?\b|\bpercent|%|\b(?:total|average|mean|median|sum|difference|amount|value|"
                          r"price|cost|length|height|width|distance|weight|area|volume|temperature|speed)\b",
                          re.IGNORECASE)
_ASKS_WORDS = re.compile(r"\b(?:say|says|said|written|reads?|printed|texts?|words?|titles?|transcribe|names?|letters?|"
                         r"labell?ed)\b", re.IGNORECASE)
_ASKS_MATH = re.compile(
    r"\b(?:solve|simplif\w+|evaluate|calculate|compute|equations?|fractions?|ratio|probability|formula|integral|"
    r"derivative|expand|algebraic|in terms of|perimeter|volume|angles?|radius|diameter|degrees?|slope|polynomial|"
    r"square root|sum of|product of|measure of|coordinates?|function|express\b|factor|hypotenuse|arcs?|"
    r"(?:area|length|value) of|find (?:the value|the measure|the length|[a-z]\b))|\u2220|\\[a-z]+|\$[^$]+\$",
    re.IGNORECASE)
_ASKS_NAME = re.compile(
    r"\b(?:phone|telephone|fax|codes?|versions?|serial|isbn|zip|postal|postcode|plates?|licen[cs]e|flight|ip|id|account|"
    r"invoice|reference|tracking|registration|barcode|password|pin)\b", re.IGNORECASE)
"""Matches questions whose answer consists of digits but is not a number, such as a phone number, so that "007" and "7"
are different answers."""
_ASKS_CODE = re.compile(
    r"\b(?:phone|telephone|fax|call|dates?|time|times|hours|score|result|code|plates?|licen[cs]e|address|version|serial|"
    r"isbn|zip|postal|flight|seat|gate|model|page|room|street|bus|line|id|ip|when|open(?:s|ed|ing)?)\b", re.IGNORECASE)
_LETTER = re.compile(r"[A-H]")
_MARKED = re.compile(r"\([A-H]\)?\.?|[A-H][).]\.?")
_LATEX = re.compile(r"(?<![A-Za-z]:)(?<!\\)\\[A-Za-z]+|\$[^$]*[^$\d.,\s-][^$]*\$(?!\d)|\$-?\d+(?:\.\d+)?\$|"
                    r"[\w)}]\s?\^\s?[\w({-]|[\u221a\u03c0]")
_OPERATES = re.compile(r"\u00b0|\d\s*[-+*/=:]\s*\w|\w\s*[-+*/=]\s*\d|\w\s*[<>\u2264\u2265]\s*[-\w]|\w[\u00b2\u00b3]")
_WORDS = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{4,}")
_COIN = re.compile(r"(?:[$\u20ac\u00a3\u00a5]\s?)?(.*?)(?:\s?(?:[$\u20ac\u00a3\u00a5]|\\?%|percent|per cent|"
                   r"\u00b0\s?[CF]?))?", re.IGNORECASE)
_POWER = re.compile(r"\d+[eE]\d+")


class Guess(str):
    """A guessed answer_type, with the form of the answer (such as "code") and the reason. AnswerTrend.settle later
    confirms or changes the guess."""

    form: str
    why: str

    def __new__(cls, kind: str, form: str = "", why: str = "") -> Guess:
        guess = super().__new__(cls, kind)
        guess.form, guess.why = form, why
        return guess


def stated_type(record: Mapping[str, Any]) -> str | None:
    """Returns the answer_type that a field of the record states; None if no field does."""
    for name in _STATED_BY:
        said = str(record.get(name) or "").strip().lower()
        known = TYPES.get(said) or _MORE.get(said)
        if known and (name == "problem_type" or said not in _OPEN):
            return known
    return None


def answer_type_of(answers: Sequence[Any], question: str, stated: str | None) -> str:
    """Returns the answer_type of a list of accepted answers, the most frequent first: the type `stated` by a field,
    else a guess.

    A stated type number or count is ignored if none of the answers is a number."""
    if stated in ("number", "count") and not any(
            quantity(str(v), True) is not None or is_code(str(v)) for v in answers):
        return Guess("text", "text", f"a field says {stated}, but the answer is not one")
    if stated:
        return stated
    guesses = [guess_type(v, question) for v in answers]
    return next((guess for guess in guesses if guess.form == "code"), guesses[0])


def guess_type(answer: Any, question: str) -> Guess:
    """Guesses the answer_type of an answer without options, from its form and the question."""
    said = western(str(answer)).strip()
    if said.lower().rstrip(".") in ("yes", "no"):
        asks = _ASKS_WORDS.search(question) is not None
        return Guess("text" if asks else "yes_no", "yes_no", "yes or no" + ", but the question asks for words" * asks)
    if _MARKED.fullmatch(said):
        return Guess("choice", "letter", "the letter of an option")
    if _LETTER.fullmatch(said):
        return Guess("choice", "bare letter", "a letter, like most answers of the file")
    if _LATEX.search(said) and _short(said):
        return Guess("math", "math", "LaTeX or signs of mathematics")
    if (said := said.removesuffix(".")) and not isinstance(answer, (int, float)) and (
            is_code(said) or _POWER.fullmatch(said)):
        return Guess("text", "code", "digits that are not a number: leading zeros, hyphens, slashes, letters")
    if (value := read_number(_COIN.fullmatch(said)[1] if "\n" not in said else said)) is not None and "/" not in said:  # pyright: ignore
        asks = value >= 0 and value == int(value) and "%" not in said and _ASKS_COUNT.search(question)
        if asks:
            return Guess("count", "amount", "a number, and the question asks how many")
        if not isinstance(answer, (int, float)) and _ASKS_NAME.search(question) and not _ASKS_AMOUNT.search(question):
            return Guess("text", "code", "digits, and the question asks for a code, a version or the like")
        return Guess("number", "amount" if _ASKS_AMOUNT.search(question) else "number", "a number")
    if not (_OPERATES.search(said) and _short(said)):
        return Guess("text", "text", "words")
    asks = _ASKS_MATH.search(question) and not _ASKS_CODE.search(question)
    return Guess("math", "math", "the question asks for a formula") if asks else Guess(
        "text", "formula", "a sum or fraction, not known to be a formula")


def _short(answer: str) -> bool:
    return len(answer) <= _LONGEST_MATH and not _WORDS.search(answer)


@dataclass(frozen=True)
class AnswerTrend:
    """The forms (letter, code, formula, yes/no) that most of the guessed answers of a file have."""

    letters: bool = True
    codes: bool = False
    formulas: bool = False
    yes_no: bool = False

    @classmethod
    def of(cls, rows: Iterable[Any]) -> AnswerTrend:
        """Computes the trend of all rows whose answer_type is a Guess; ignores other rows."""
        forms = Counter(guess.form for row in rows if isinstance(row, Mapping)
                        and isinstance(guess := row.get("answer_type"), Guess))
        letters = forms["letter"] + forms["bare letter"]
        return cls(letters=2 * letters >= sum(forms.values()), codes=forms["code"] > forms["number"],
                   formulas=forms["math"] > forms["code"] + forms["formula"] + forms["text"],
                   yes_no=2 * forms["yes_no"] >= sum(forms.values()) > 1)

    def settle(self, guess: Guess) -> tuple[str, str]:
        """Returns (answer_type, reason) for a guess: the guessed type, unless most answers suggest another type."""
        if guess.form == "bare letter" and not self.letters:
            return "text", "a letter, but most answers of the file are not"
        if guess.form == "number" and self.codes:
            return "text", "a number, but most answers of the file are codes"
        if guess.form == "formula" and self.formulas:
            return "math", "a formula, like most answers of the file"
        if guess.form == "yes_no" and self.yes_no:
            return "yes_no", "yes or no, like most answers of the file"
        return str(guess), guess.why


_SURE = _BY_FIELD, _BY_SETTING, _BY_OPTIONS = "a field of the row or record", "data.answer_type", "its options"


@dataclass
class TypeLine:
    """A line of a TypeTable: the rows that have the same answer_type for the same reason."""

    type: str
    rows: int
    examples: list[str] = field(default_factory=list)
    """Up to three different answers of these rows."""
    why: str = ""


class TypeTable:
    """Counts rows by answer type and reason, with examples of their answers."""

    def __init__(self) -> None:
        self._lines: dict[tuple[str, str], TypeLine] = {}

    def add(self, row: Record, why: str) -> None:
        kind = str(row.get("answer_type"))
        line = self._lines.setdefault((kind, why), TypeLine(kind, 0, why=why))
        line.rows += 1
        example = repr(row.get("answer"))[:60]
        if len(line.examples) < 3 and example not in line.examples:
            line.examples.append(example)

    def guessed(self) -> str:
        """Returns the guessed types with their numbers of rows and reasons, as text; "" if no type was guessed."""
        return ", ".join(f"{line.type} {line.rows:,} ({line.why})" for line in self.lines() if line.why not in _SURE)

    def lines(self) -> list[TypeLine]:
        """Returns all lines, sorted by number of rows in descending order."""
        return sorted(self._lines.values(), key=lambda line: -line.rows)


def settle_type(row: Any, trend: AnswerTrend, setting: str | None = None, table: TypeTable | None = None) -> Any:
    """Returns the row with its final answer_type, and counts this type in `table`.

    If `setting` (data.answer_type) is set, it is the type; for rows with options, spans or tracks only the setting
    "choice" is used. Otherwise the type is the one that a field of the record states, or the guess, corrected by the
    trend of the file. Errors, and rows without question and answer, are returned unchanged."""
    if isinstance(row, DataError) or "question" not in row or row.get("answer") is None:
        return row
    given, why = row.get("answer_type"), _BY_FIELD
    if setting and (setting == "choice" or not any(row.get(name) for name in ("options", "spans", "tracks"))):
        kind, why = setting, _BY_SETTING
    elif isinstance(given, Guess):
        kind, why = trend.settle(given)
        kind = _OF_CLIP.get(kind, kind) if "video" in row else kind
    elif given is None:
        return row
    else:
        kind, why = given, _BY_OPTIONS if given == "choice" and row.get("options") else why
    row = row if kind is given else {**row, "answer_type": kind}
    if table is not None:
        table.add(row, why)
    return row


def check_answer_type(name: str | None, setting: str) -> None:
    """Raises ConfigError unless `name` is an answer type or None; `setting` starts the message."""
    known = get_args(AnswerType)
    if name is not None and name not in known:
        raise ConfigError(f"{setting}={name!r} is not known.{did_you_mean(name, known)} Known: {', '.join(known)}.")


def as_video_type(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row about a video with an answer type that video rows support: a count becomes a number, yes/no and
    math become text."""
    given: Any = row["answer_type"]
    kind = _OF_CLIP.get(given, given)
    return {**row, "answer_type": Guess(str(kind), given.form, given.why) if isinstance(given, Guess) else kind}
