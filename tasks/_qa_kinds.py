"""Answer types of the qa task: what is asked for, how an answer is read, and how it is compared with the right one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.rewards import chart, math
from vlrl.rewards.answers import closeness, edit_similarity, option_letter, option_text, rouge
from vlrl.rewards.boxes import is_number
from vlrl.rewards.text import choice_letters, clean_label, same_label
from vlrl.types import Sample

LETTERS = "ABCDEFGHIJ"
_SHORT = 60
_LONGEST_CHOICE = 2000
_TOKEN = re.compile(r"[-+]?\d+(?:[.,]\d+)*|[^\W\d_]+")
_ARTICLE_LIKE = re.compile(r"(?<!\w)A(?=\s(?:and|or)\s)")
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Kind:
    """One `answer_type`."""

    asks: str
    """What the answer is to be, for prompts."""
    read: Callable[[str, Row], Any]
    """What a text answers, JSON-able; None for nothing, or for more than one thing. Right answers are read by it too.
    """
    same: Callable[[Any, Any, Any, Row], float]
    """(task, given, right, row) -> score in [0, 1]."""
    names: bool = True
    """Whether an answer names one thing, so that "not" before it takes it back."""


def right_answers(row: Row) -> list[str]:
    """Returns the answers that count as right: one, or those of a list; a list of options is one answer that names
    several.
    """
    answer = row.get("answer")
    if isinstance(answer, list) and row.get("answer_type") == "choice":
        return [", ".join(map(str, answer))]
    return [_text(a) for a in (answer if isinstance(answer, list) else [answer])]


def target(row: Row) -> list[Any]:
    """Returns the right answers as `Kind.read` reads them; None for one that cannot be read."""
    if row["answer_type"] == "choice" and isinstance(row["answer"], list):
        letters = [read_choice(_text(answer), row) for answer in row["answer"]]
        return [None if None in letters else ",".join(sorted({*map(str, letters)}))]
    return [KINDS[row["answer_type"]].read(text, row) for text in right_answers(row)]


def score(task: Any, row: Row, given: Any) -> float:
    """Returns how right a read answer is, in [0, 1]: that of the right answer which it fits best; None is 0."""
    if given is None:
        return 0.0
    return max(KINDS[row["answer_type"]].same(task, given, right, row) for right in target(row))


def _text(answer: Any) -> str:
    """Returns an answer of a row as a text; whole numbers without a point."""
    return f"{answer:.15g}" if isinstance(answer, float) else str(answer)


# --- options ----------------------------------------------------------------------------------------------------------


def options_of(row: Row) -> list[str]:
    """Returns the texts of a row's options, without letters before them."""
    given = [str(option) for option in row.get("options") or ()]
    bare = [option_text(option) for option in given]
    lettered = all(re.match(rf"\s*\(?{letter}[).:]\s", option) for letter, option in zip(LETTERS, given, strict=False))
    return bare if lettered else given


def read_choice(text: str, row: Row) -> str | None:
    """Returns the letter of the one option that a text names, or "A,C" for several that it lists; None for none.

    By its letter, by its text, or by holding the text of one option and of no other (View-R1). A text of more than
    2,000 characters names none.
    """
    if len(text) > _LONGEST_CHOICE:
        return None
    options = options_of(row)
    letter = option_letter(text, options)
    if letter and letter in LETTERS:
        return letter
    letters = LETTERS[:len(options)] or LETTERS[:8]
    named = choice_letters(_ARTICLE_LIKE.sub("A,", text), letters)
    if named:
        return ",".join(sorted(named.split(",")))
    answer_words = _words(text)
    mentioned = [letter for letter, option in zip(letters, options, strict=False)
                 if (words := _words(option)).strip() and words in answer_words]
    return mentioned[0] if len(mentioned) == 1 else None


def _words(text: str) -> str:
    """Returns words in lower case and numbers, with a space before and after each."""
    return f" {' '.join(_TOKEN.findall(text.casefold()))} "


def _option_problem(row: Row) -> str | None:
    options = row.get("options")
    if options is not None and not (isinstance(options, list) and all(
            isinstance(o, (str, int, float)) and str(o).strip() for o in options)):
        return f"options={str(options)[:200]} must be a list of texts"
    if options and not 2 <= len(options) <= len(LETTERS):
        return f"{len(options)} options, where a choice needs 2 to {len(LETTERS)}"
    texts = [option.strip() for option in options_of(row)]
    twice = next((t for i, t in enumerate(texts) if t in texts[:i]), None)
    return f"two options say {twice[:_SHORT]!r}" if twice else None


# --- types ------------------------------------------------------------------------------------------------------------


def tolerance(row: Row) -> tuple[float, float]:
    """Returns how far a number may lie from the right one: in its own units, and as a share of it (`tolerance:
    "5%"`).
    """
    given = row.get("tolerance") or 0.0
    return (0.0, float(given[:-1]) / 100) if isinstance(given, str) else (float(given), 0.0)


def _equal(_task: Any, given: Any, right: Any, _row: Row) -> float:
    return float(given == right)


def _near(_task: Any, given: float, right: float, row: Row) -> float:
    """Returns 1 within the row's tolerance."""
    units, share = tolerance(row)
    return float(abs(given - right) <= max(units, share * abs(right)) + 1e-9 * abs(right))


def _math(task: Any, given: str, right: str, row: Row) -> float:
    worked_out = task.math_rule == "worked_out"
    if worked_out and math.repeats(given, right, row["question"]):
        return 0.0
    return float(math.equal(given, right, task.math_seconds, worked_out))


def _chart(_task: Any, given: str, right: str, row: Row) -> float:
    units, share = tolerance(row)
    return float(chart.chart_equal(given, right, share or chart.CLOSE, units))


def _free_text(task: Any, given: str, right: str, _row: Row) -> float:
    return 1.0 if same_label(given, right) else TEXT_SCORES[task.text_score](given, right)


def _whole_text(text: str, _row: Row) -> str | None:
    return text.strip() or None


TEXT_SCORES: dict[str, Callable[[str, str], float]] = {
    "exact": lambda _given, _right: 0.0, "rouge": rouge,
    "edit": lambda given, right: edit_similarity(clean_label(given), clean_label(right))}
"""What a text earns that is not the right one but for case and punctuation, by `task.text_score`."""

KINDS: dict[str, Kind] = {
    "choice": Kind("the letter of the right option", read_choice, _equal),
    "number": Kind("a number", lambda text, _row: chart.finite_number(text), _near),
    "count": Kind("a whole number", lambda text, _row: chart.count(text), _equal),
    "yes_no": Kind("yes or no", lambda text, _row: chart.one_yes_no(text), _equal, names=False),
    "math": Kind("one mathematical expression", lambda text, _row: math.expression(text), _math),
    "chart": Kind("the value or the label that the chart shows", _whole_text, _chart, names=False),
    "ocr": Kind("the text as it is written", _whole_text, lambda _t, a, b, _r: chart.transcript_similarity(a, b),
                names=False),
    "regression": Kind("a number", lambda text, _row: chart.finite_number(text),
                       lambda _t, a, b, _r: closeness(f"{a:.15g}", f"{b:.15g}")),
    "text": Kind("a short text", _whole_text, _free_text, names=False),
}


# --- rows -------------------------------------------------------------------------------------------------------------


def problem(task: Any, row: Row) -> str | None:
    """Returns what is wrong with a qa row, or None."""
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        return f"question={str(row.get('question'))[:80]} must be the text of the question"
    if not isinstance(row.get("answer_type"), str) or row["answer_type"] not in KINDS:
        hint = "" if row.get("answer_type") else "; or set data.format=qa, which finds it by the answer"
        return f"answer_type={str(row.get('answer_type'))[:_SHORT]} must be one of {', '.join(KINDS)}{hint}"
    return _option_problem(row) or _tolerance_problem(row.get("tolerance")) or _answer_problem(task, row)


def _tolerance_problem(given: Any) -> str | None:
    if given is None or (isinstance(given, str) and re.fullmatch(r"\d{1,3}(\.\d{1,9})?%", given, re.ASCII)):
        return None
    if not isinstance(given, str) and is_number(given) and given >= 0:
        return None
    return f"tolerance={given!r} must be a number of at least 0 in the answer's own units, or a share such as \"5%\""


def _answer_problem(task: Any, row: Row) -> str | None:
    answer, kind = row.get("answer"), row["answer_type"]
    given: Sequence[Any] = answer if isinstance(answer, list) else [answer]
    if not given or not all(isinstance(a, str) or (is_number(a)) for a in given):
        return f"answer={str(answer)[:_SHORT]} must be a text or a number, or a list of those that are right"
    for text, value in zip(right_answers(row), target(row), strict=True):
        if value is None or (kind == "math" and not _readable(task, value)):
            among = f" of {', '.join(options_of(row))[:200]}" if kind == "choice" and row.get("options") else ""
            return f"answer={text[:_SHORT]!r} cannot be read as {KINDS[kind].asks}{among}, so no answer could be right"
    return None


def _readable(task: Any, value: str) -> bool:
    math.require_library()
    try:
        return math.readable(value, task.math_seconds)
    except math.VerifierError:
        return False


def spoken(sample: Sample) -> str:
    """Returns the right answer as a model would write it."""
    kind = sample["answer_type"]
    return target(sample.row)[0] if kind == "choice" else right_answers(sample.row)[0]
