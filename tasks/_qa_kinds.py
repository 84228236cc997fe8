"""Answer types of the qa task: how an answer is described in prompts, parsed, and compared with the right answer."""

import random
import re
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.errors import DataError
from vlrl.rewards import chart, math
from vlrl.rewards.answers import (
    close,
    closeness,
    contradicts,
    edit_similarity,
    free_text,
    option_letter,
    option_text,
    quantity,
)
from vlrl.rewards.boxes import is_number
from vlrl.rewards.codes import is_code, is_exact, same_code
from vlrl.rewards.numbers import read_number
from vlrl.rewards.scripts import western, words
from vlrl.rewards.text import choice_letters, clauses, clean_label, negates, retracted, same_label
from vlrl.types import Record, Sample

LETTERS = "ABCDEFGHIJ"
_SHORT = 60
_LONGEST_CHOICE = 2000
_NOT = re.compile(r"n['\u2019]t(?!\w)")
_TOKEN = re.compile(r"[-+]?\d+(?:[.,]\d+)*|[^\W\d_]+")
_RATIO = re.compile(r"(?<!\w)(?:ratio|scale|proportion)", re.IGNORECASE)
_PERCENT = re.compile(r"%|percent|per cent|(?<!\w)(?:rate|share|proportion|fraction|probability|likel\w+|chance|"
                      r"discount|tax|growth|interest|battery|humidity|margin)(?!\w)", re.IGNORECASE)


@dataclass(frozen=True)
class AnswerKind:
    """How answers of one `answer_type` are described, parsed and compared."""

    asks: str
    """Description of the expected answer, for prompts."""
    read: Callable[[str, Record], Any]
    """Parses the answer in a text to a JSON value; None if the text has no answer or more than one. The same function
    parses right answers."""
    same: Callable[[Any, Any, Any, Record], float]
    """(task, parsed answer, parsed right answer, row) -> score in [0, 1]."""
    names: bool = True
    """Whether answers name a single thing, so that a leading "not" negates the answer."""
    retracts: Callable[[str, Record], bool] = lambda text, _row: retracted(text)
    """Whether a text names an answer and later takes it back, as in "3 is wrong"."""


def right_answers(row: Record) -> list[str]:
    """The right answers of a row as strings, any one of which is enough. For a choice with several right options, these
    are joined to one string."""
    answer = row.get("answer")
    if isinstance(answer, list) and row.get("answer_type") == "choice":
        return [", ".join(map(str, answer))]
    return [_text(a) for a in (answer if isinstance(answer, list) else [answer])]


def read(text: str, row: Record, negations: bool = True) -> Any:
    """Parses the answer in a text to a JSON value; None if the text has no answer or more than one. With `negations`,
    also None if the text retracts its answer ("3 is wrong"). A text that equals a right answer counts as right even
    if it cannot be parsed: it gets the value of the first right answer that can be parsed."""
    kind = kind_of(row)
    if not any(same_label(text, right) for right in right_answers(row)):
        text = math.unwrapped(text)
    if negations and kind.names and kind.retracts(text, row):
        return None
    value = kind.read(text, row)
    several = right_answers(row)  # some may be unreadable: "thirty-six" next to "36"
    if value is None and len(several) > 1 and any(
            same_label(text, right) and kind.read(right, row) is None for right in several):
        return next(iter(target(row)), None)
    return value


def kind_of(row: Record) -> AnswerKind:
    """The AnswerKind by which a row's answers are parsed, usually that of its answer_type. If the type is a number or a
    formula but a right answer is neither (a phone number, a score of 3-2), answers are compared as written."""
    name = row["answer_type"]
    asked = row["question"] if name == "math" else ""
    if name in _WORKED_OUT and not _RATIO.search(asked) and any(
            not isinstance(a, float) and is_code(str(a)) for a in _answers(row)):
        return CODE
    return KINDS[name]


def _answers(row: Record) -> list[Any]:
    answer = row.get("answer")
    return answer if isinstance(answer, list) else [answer]


def target(row: Record) -> list[Any]:
    """The right answers of a row as parsed by `AnswerKind.read`. Answers that cannot be parsed are left out."""
    if row["answer_type"] == "choice" and isinstance(row["answer"], list):
        letters = [read_choice(_text(answer), row) for answer in row["answer"]]
        return [] if None in letters else [",".join(sorted({*map(str, letters)}))]
    return [value for text in right_answers(row) if (value := kind_of(row).read(text, row)) is not None]


def score(task: Any, row: Record, given: Any) -> float:
    """The score in [0, 1] of a parsed answer against the right answer that it matches best; 0 for None."""
    if given is None:
        return 0.0
    return max((kind_of(row).same(task, given, right, row) for right in target(row)), default=0.0)


def _text(answer: Any) -> str:
    return f"{answer:.15g}" if isinstance(answer, float) else str(answer)


def options_of(row: Record) -> list[str]:
    """The options of a row as strings, without leading letters such as "A."."""
    given = [str(option) for option in row.get("options") or ()]
    bare = [option_text(option) for option in given]
    lettered = all(re.match(rf"\s*\(?{letter}[).:]\s", option) for letter, option in zip(LETTERS, given, strict=False))
    return bare if lettered else given


def read_choice(text: str, row: Record) -> str | None:
    """The letter of the only option that a text names, or "A,C" if it lists several; None if it names none. A text
    names an option by its letter, by its text, or by containing the text of exactly one option (View-R1). A text of
    more than 2,000 characters names none."""
    if len(text) > _LONGEST_CHOICE:
        return None
    options = options_of(row)
    letter = option_letter(text, options)
    if letter and letter in LETTERS:
        return letter
    if contradicts(text, options):
        return None
    letters = LETTERS[:len(options)] or LETTERS[:8]
    text = western(text)
    named = choice_letters(text, letters)
    if named:
        return ",".join(sorted(named.split(",")))
    answer_words = _words(text)
    mentioned = [letter for letter, option in zip(letters, options, strict=False)
                 if (said := _words(option)).strip() and said in answer_words]
    return mentioned[0] if len(mentioned) == 1 else None


def _denies_option(text: str, row: Record) -> bool:
    """Whether a text names an option in a clause that negates it: "a dog is not there", "B is wrong"."""
    options, named = options_of(row), read_choice(text, row)
    if named is None or "," in named or option_letter(text, options):
        return False
    own = " " + _words(options[LETTERS.index(named)]).strip() + " " if options else ""
    for clause in clauses(_NOT.sub(" not", western(text))):
        said = _words(clause)
        if own.strip() and own in said:
            said = said.replace(own, " ")
        elif choice_letters(clause) != named:
            continue
        if negates(said):
            return True
    return False


def _words(text: str) -> str:
    """The lower-case words and numbers of a text, separated and surrounded by spaces. In scripts without spaces each
    character is a word."""
    tokens = _TOKEN.findall(western(text).casefold())
    return f" {' '.join(w for token in tokens for w in ([token] if token.isascii() else words(token)))} "


def _option_problem(row: Record) -> str | None:
    options = row.get("options")
    if options is not None and not (isinstance(options, list) and all(
            isinstance(o, (str, int, float)) and str(o).strip() for o in options)):
        return f"options={str(options)[:200]} must be a list of strings"
    if options and not 2 <= len(options) <= len(LETTERS):
        return f"{len(options)} options, but a choice needs 2 to {len(LETTERS)}"
    texts = [option.strip() for option in options_of(row)]
    twice = next((t for i, t in enumerate(texts) if t in texts[:i]), None)
    return f"two options have the text {twice[:_SHORT]!r}" if twice else None


def tolerance(row: Record) -> tuple[float, float]:
    """Returns (absolute tolerance, relative tolerance) for a row's number; one of the two is 0. The row's field
    `tolerance` is a number, or a percentage such as "5%"."""
    given = row.get("tolerance") or 0.0
    return (0.0, float(given[:-1]) / 100) if isinstance(given, str) else (float(given), 0.0)


def _equal(_task: Any, given: Any, right: Any, _row: Record) -> float:
    return float(given == right)


def _number(text: str, row: Record) -> float | None:
    """The number in a text that contains exactly one distinct number, else None. If the row asks for a percentage, "5%"
    is 5, else .05."""
    asks = any(_PERCENT.search(str(said)) for said in (row["question"], *_answers(row)))
    return quantity(text, percent=asks)


def _near(_task: Any, given: float, right: float, row: Record) -> float:
    """Returns 1 if the parsed number is within the row's tolerance of the right number, else 0. For a row with
    `precision` and without a tolerance, it is enough that both numbers are equal when rounded to `precision`
    decimals."""
    units, share = tolerance(row)
    same = close(given, right, max(units, share * abs(right)))
    return float(same or (row.get("precision") is not None and not row.get("tolerance")
                          and round(given, int(row["precision"])) == round(right, int(row["precision"]))))


def _math(task: Any, given: str, right: str, row: Record) -> float:
    worked_out = task.math_rule == "worked_out"
    if worked_out and math.repeats(given, right, row["question"]):
        return 0.0
    return float(math.equal(given, right, task.math_seconds, worked_out))


def _free_text(task: Any, given: str, right: str, _row: Record) -> float:
    if same_label(given, right) or is_exact(right):
        return float(same_label(given, right) or same_code(given, right))
    return TEXT_SCORES[task.text_score](given, right)


def _whole_text(text: str, _row: Record) -> str | None:
    return text.strip() or None


TEXT_SCORES: dict[str, Callable[[str, str], float]] = {
    "exact": lambda _given, _right: 0.0, "rouge": free_text,
    "edit": lambda given, right: edit_similarity(clean_label(given), clean_label(right))}
"""Value of `task.text_score` -> score of a text that differs from the right answer by more than case and punctuation.
If the right answer is a code, a number or a quantity, such a text scores 0 instead."""

KINDS: dict[str, AnswerKind] = {
    "choice": AnswerKind("the letter of the right option", read_choice, _equal, retracts=_denies_option),
    "number": AnswerKind("a number", _number, _near),
    "count": AnswerKind("a whole number", lambda text, _row: chart.count(text), _equal),
    "yes_no": AnswerKind("yes or no", lambda text, _row: chart.one_yes_no(text), _equal, names=False),
    "math": AnswerKind("one mathematical expression", lambda text, _row: math.expression(text), _math),
    "chart": AnswerKind("the value or the label that the chart shows", _whole_text,
                        lambda _task, given, right, row: float(chart.chart_equal(
                            given, right, tolerance(row)[1] or chart.CLOSE, tolerance(row)[0])), names=False),
    "ocr": AnswerKind("the text as it is written", _whole_text, lambda _t, a, b, _r: chart.transcript_similarity(a, b),
                names=False),
    "regression": AnswerKind("a number", _number, lambda _t, a, b, _r: closeness(f"{a:.15g}", f"{b:.15g}")),
    "text": AnswerKind("a short text", _whole_text, _free_text, names=False),
}
CODE = AnswerKind("the right text as it is written", _whole_text, lambda _t, a, b, _r: float(same_code(a, b)),
                  names=False)
"""The AnswerKind of rows with a number or formula type but a right answer that is neither (see kind_of): answers are
compared as written."""
_WORKED_OUT = ("number", "count", "math", "regression")


def problem(task: Any, row: Record) -> str | None:
    """Describes what is wrong with a qa row; None if the row is valid."""
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        return f"question={str(row.get('question'))[:80]} must be the text of the question"
    if isinstance(row.get("answer"), str) and not row["answer"].strip():
        return f"answer={row['answer']!r} is empty: give the right answer, or leave the row out"
    if not isinstance(row.get("answer_type"), str) or row["answer_type"] not in KINDS:
        hint = "" if row.get("answer_type") else "; or set data.format=qa, which infers it from the answer"
        return f"answer_type={str(row.get('answer_type'))[:_SHORT]} must be one of {', '.join(KINDS)}{hint}"
    return _option_problem(row) or _tolerance_problem(row.get("tolerance")) or _answer_problem(task, row)


def _tolerance_problem(given: Any) -> str | None:
    if given is None or (isinstance(given, str) and re.fullmatch(r"\d{1,3}(\.\d{1,9})?%", given, re.ASCII)):
        return None
    if not isinstance(given, str) and is_number(given) and given >= 0:
        return None
    return f"tolerance={given!r} must be a number of at least 0 in the answer's own units, or a share such as \"5%\""


def _answer_problem(task: Any, row: Record) -> str | None:
    answer, kind = row.get("answer"), row["answer_type"]
    given: Sequence[Any] = answer if isinstance(answer, list) else [answer]
    if not given or not all(isinstance(a, str) or (is_number(a)) for a in given):
        return f"answer={str(answer)[:_SHORT]} must be a string, a number, or a list of right answers"
    values = target(row)
    if not values or (kind_of(row) is KINDS["math"] and not any(_readable(task, value) for value in values)):
        among = f" of {', '.join(options_of(row))[:200]}" if kind == "choice" and row.get("options") else ""
        return (f"answer={' or '.join(right_answers(row))[:_SHORT]!r} cannot be read as {kind_of(row).asks}{among}, so "
                "no answer could be right")
    places = row.get("precision")
    if places is not None and not (is_number(places) and places == int(places) and 0 <= places <= 15):
        return f"precision={places!r} must be a whole number of places, 0 to 15"
    return None


def _readable(task: Any, value: str) -> bool:
    math.require_library()
    try:
        return math.readable(value, task.math_seconds)
    except math.VerifierError:
        return False


def perfect_answer(sample: Sample) -> str:
    """A right answer as a model would write it."""
    row = sample.row
    if row["answer_type"] == "choice":
        return target(row)[0]
    return next((text for text in right_answers(row) if kind_of(row).read(text, row) is not None), "")


def own(row: Record) -> Record:
    """Returns the row unchanged, for questions that are asked as in the row."""
    return row


def yes_no(row: Record) -> Record:
    """Rewrites a row as the question whether a proposed answer is right. With probability 1/2 the proposed answer is
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
    """Rewrites a row as a choice among options: the row's options, or generated options if the answer is a number."""
    if row["answer_type"] == "choice":
        return row
    right = _right(row)
    options = [right, *_wrong(row)]
    _rng(row).shuffle(options)
    return {**row, "answer": LETTERS[options.index(right)], "answer_type": "choice", "options": options}


def open_question(row: Record) -> Record:
    """Rewrites a row as a question without options. The answer is the text of the right option, of type number if this
    text is a number."""
    if row["answer_type"] != "choice":
        return row
    right = _right(row)
    kind = "number" if read_number(right) is not None and not is_code(right) else "text"
    return {**row, "answer": right, "answer_type": kind, "options": None}


FORMS: dict[str, Callable[[Record], Record]] = {"own": own, "yes_no": yes_no, "choice": choice, "open": open_question}
"""Value of `task.form` -> function that rewrites a row as a question of this form, as in Curr-ReFT (2503.07065).

From yes_no to choice to open, the answer becomes harder to guess. Random choices (the order of options, whether the
proposed answer is right) depend only on the row's id and question, so a question is the same every time it is asked."""


def _right(row: Record) -> str:
    if row["answer_type"] != "choice":
        return right_answers(row)[0]
    letter, options = target(row)[0], options_of(row)
    if not options or "," in letter:
        raise DataError(f"answer={row['answer']!r} is not exactly one of the row's options, but task.form needs one "
                        "right option. Correct the answer and options of the row, or set task.form=own")
    return options[LETTERS.index(letter)]


def _wrong(row: Record) -> list[str]:
    kind = row["answer_type"]
    if kind == "choice":
        return [option for option in options_of(row) if option != _right(row)]
    if kind == "yes_no":
        return ["no" if target(row)[0] == "yes" else "yes"]
    value = target(row)[0]
    if kind not in ("number", "count", "regression") or isinstance(value, str):
        raise DataError(f"a row of answer_type={kind} without options has no wrong answers to offer: leave out such "
                        "rows, give them options, or set task.form=own or open")
    if value == int(value):
        near = [int(value) + d for d in (-2, -1, 1, 2, 3) if kind != "count" or value + d >= 0]
        return [str(v) for v in _rng(row).sample(near, 3)]
    return [f"{value * share:.6g}" for share in (0.8, 0.9, 1.2)]


def _rng(row: Record) -> random.Random:
    return random.Random(zlib.crc32(f"{row.get('id')}/{row['question']}".encode("utf-8", "backslashreplace")))
