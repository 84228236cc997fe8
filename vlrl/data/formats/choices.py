"""Reads the answers of other projects' records: the options, the letter of the correct option, and the answer type."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.sources.answer_types import answer_type_of
from vlrl.data.sources.fields import has, pick
from vlrl.data.values import number, short
from vlrl.errors import DataError
from vlrl.rewards.literals import read_literal
from vlrl.rewards.text import between
from vlrl.types import Record

OPTIONS = ("options", "choices", "candidates", "option", "choice")
_COLUMNS = (tuple("ABCDEFGH"), tuple(f"choice_{c}" for c in "abcdefgh"), tuple(f"option_{c}" for c in "abcdefgh"),
            tuple(f"option{c}" for c in "ABCDEFGH"), tuple(f"a{n}" for n in range(8)),
            *(tuple(f"{word}{n}" for n in range(first, first + 8)) for first in (0, 1)
              for word in ("option", "option_", "option ", "candidate_", "choice_")))
"""Names of fields that hold one option each."""
LETTERED = tuple(name for names in _COLUMNS for name in names)
INDICES = ("golden_choice_idx", "correct_choice_idx", "correct_choice", "correct_idx", "answer_idx", "answer_index",
           "answer_id", "correct_answer_idx")
"""Fields that hold the index of the correct option (counted from 0) or its letter."""
_BEFORE = re.compile(r"\s*[(\[]?([A-Z])(?:[)\].:、]|\s*[-–]\s)\s*(?=\S)")
_LETTER = re.compile(r"(?:option|choice|answer)?\s*[(\[]?([A-Za-z])[)\]]?[.:、]?", re.IGNORECASE)
_WITH_TEXT = re.compile(r"\s*[(\[]?([A-Z])[)\].:、]\s*(\S.*)", re.DOTALL)
_SEVERAL = re.compile(r"[A-H](?:\s*[,;&]\s*[A-H])+")
_ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_NO_OPTIONS = ("", "none", "null", "nan", "n/a", "[]", "{}")
_SINGLE = OPTIONS[3:]  # a field "option" or "choice" may be the chosen one
_PICTURE = re.compile(r"\S+\.(?:png|jpe?g|webp)", re.IGNORECASE)
_SPLIT = re.compile(r"\n|;\s*(?=[A-H][.):])")
"""Separators of options in a single string; a semicolon counts only before a letter (We-Math)."""
_CODE = re.compile(r"\"bbox(?:_2d)?\"\s*:|\bpyautogui\.|<box>|<\|box_start\||<point>|<click>|"
                   r"\b(?:left_|double_)?click\(|\bcomputer\.\w+\(")
_POINT = re.compile(r"[(\[]\s*\d+(?:\.\d+)?\s*,\s*\d+(?:\.\d+)?\s*[)\]]|\d+(?:\.\d+)?,\s+\d+(?:\.\d+)?")
_ASKS_PLACE = re.compile(r"^\W*where\b|\b(?:click|tap|press|screenshot|screen|button|icon|element|UI|GUI|webpage|"
                         r"point to|locate)\b", re.IGNORECASE)


def answer_text(value: Any) -> str:
    """Returns the text of an answer: the content of the last <answer> tag if there is one, else the text after
    </think>, else the whole answer."""
    said = str(value)
    inner = between(said, "<answer>", "</answer>", "last")
    return (said.rpartition("</think>")[2] if inner is None else inner).strip()


def options_of(record: Record) -> list[str]:
    """Returns the options of a record in order, without their letters; [] if it has none.

    Options may be a list, an object keyed by letters, a string with one option per line, or one field per option.
    Raises DataError for anything else."""
    given = pick(record, *OPTIONS)
    if given is None:
        given = _columns(record)
    if isinstance(given, str):
        lines = [line for line in _SPLIT.split(given) if line.strip()]
        said = given
        given = read_literal(given) or (lines if len(lines) > 1 else _by_commas(given, record))
        if given is None and said.strip().lower() not in _NO_OPTIONS and not has(record, *_SINGLE):
            raise DataError(f"options={short(said)} must be a list of strings, or a string with one option per line")
    if isinstance(given, Mapping):
        given = _options_by_key(given)
    if given is None or given == []:
        return []
    if not isinstance(given, list) or not all(isinstance(v, (str, int, float, Mapping)) for v in given):
        raise DataError(f"options={short(given)} must be a list of strings")
    if image := next((v for v in given if isinstance(v, str) and _PICTURE.fullmatch(v.strip())), None):
        raise DataError(f"the option {short(image)} is an image, but options must be strings")
    return _without_letters([_option(v) for v in given])


def _by_commas(text: str, record: Record) -> list[str] | None:
    parts = [part.strip() for part in text.split(",")]
    return parts if len(parts) > 1 and str(record.get("answer")).strip() in parts else None


def _columns(record: Record) -> list[Any] | None:
    """Returns the options of a record with one field per option; None if the record has no such fields. Raises
    DataError if an empty field precedes a filled one."""
    gap = None
    for names in _COLUMNS:
        own = [name for name in names if has(record, name)]
        if len(own) < 2 or (own[0] != names[0] and names[0].lower()[-1] != "a"):
            continue
        missing = next((name for name, filled in zip(names, own, strict=False) if name != filled), None)
        if missing is None:
            return [record[name] for name in own]
        gap = gap or (missing, own[-1])
    if gap:  # letters would refer to other options
        raise DataError(f"the option {gap[0]!r} is empty, but {gap[1]}={short(record[gap[1]])} comes after it: fill "
                        "in the empty option, or move the later options forward and change the answer accordingly")
    return None


def _options_by_key(keyed: Mapping[str, Any]) -> list[Any]:
    """Returns the options of an object in order: the list in its field `text` if there is one, else all values, sorted
    by their keys (A, B ... or 0, 1 ...). Raises DataError if a key is skipped, because the letter of the answer
    would then mean another option."""
    texts = keyed["text"] if isinstance(keyed.get("text"), list) else None
    keys = sorted(keyed) if texts is None else keyed.get("label")
    keys = [str(key).strip() for key in keys] if isinstance(keys, list) else []
    counted = all(key.isdecimal() for key in keys) and keys != [str(n) for n in range(len(keys))]
    lettered = all(len(key) == 1 and key.isalpha() for key in keys) and "".join(keys).upper() != _ALPHABET[:len(keys)]
    if keys and (counted or lettered):
        raise DataError(f"the options have the keys {short(keys)}: name the options A, B ... without a gap, and "
                        "change the answer accordingly")
    return [keyed[key] for key in sorted(keyed)] if texts is None else texts


def _option(value: Any) -> str:
    if isinstance(value, Mapping):
        value = pick(value, "text", "content", "value", "answer", "option", "choice")
    if value is None or str(value).strip() == "":
        raise DataError("one of the options is empty: fill in or remove this option")
    return str(value).strip()


def _without_letters(options: Sequence[str]) -> list[str]:
    """Removes the letters before options ("(A) ", "B. ") if every option has the letter of its position. Raises
    DataError if the letters do not match the positions."""
    matches = [_BEFORE.match(option) for option in options]
    if all(m and ord(m[1]) - ord("A") == n for n, m in enumerate(matches)):
        return [option[m.end():].strip() for option, m in zip(options, matches, strict=True) if m]
    letters = "".join(m[1] for m in matches if m)
    if len(letters) == len(options) > 1 and (letters[:2] == "AB" or sorted(letters) == list(_ALPHABET[:len(letters)])):
        raise DataError(f"the options begin with {', '.join(letters)}, which do not match their positions: put "
                        "the options in order, without a gap, or remove the letters")
    return list(options)


def option_letter(answer: Any, options: Sequence[str]) -> str:
    """Returns the letter of the correct option.

    `answer` may be a letter ("A", "(A)", "A. cat"), the text of an option, or the index of an option, counted from 0.
    Several letters ("A, C") are returned sorted. Raises DataError if the answer matches no option."""
    if isinstance(answer, list) and len(answer) == 1:
        answer = answer[0]
    said = answer_text(answer)
    texts = [" ".join(option.lower().rstrip(".").split()) for option in options]
    bare = " ".join(said.lower().rstrip(".").split())
    if texts.count(bare) == 1 and not _is_ambiguous(said, options):
        return chr(ord("A") + texts.index(bare))
    if _SEVERAL.fullmatch(said):
        places = [ord(c) - ord("A") for c in re.findall("[A-H]", said)]
        if max(places) < len(options):
            return ", ".join(chr(ord("A") + n) for n in sorted(set(places)))
    if texts.count(bare) > 1 and not _is_ambiguous(said, options):
        raise DataError(f"answer={short(answer)} is the text of {texts.count(bare)} options: give the letter of the "
                        "correct option, and remove the duplicates")
    with_text = _WITH_TEXT.fullmatch(said)
    single = _LETTER.fullmatch(said) or with_text
    place = ord(single[1].upper()) - ord("A") if single else number(answer)
    if not isinstance(place, int) or not 0 <= place < len(options):
        raise DataError(f"answer={short(answer)} matches none of the {len(options)} options: it is not the letter, the "
                        "text or the index (from 0) of any option")
    words = " ".join(with_text[2].lower().rstrip(".").split()) if with_text else ""
    if words in texts and texts.index(words) != place:
        raise DataError(f"answer={short(answer)} has the letter of one option and the text of another: give "
                        "the letter only")
    return chr(ord("A") + place)


def letter_at(value: Any, options: Sequence[str]) -> str:
    """Returns the letter of the correct option. `value` is the content of one of the fields in INDICES.

    An integer that is a valid index is read as an index counted from 0, even if the text of an option is this number.
    Any other value is read by `option_letter`."""
    index = number(value)
    return option_letter(value if index is None or index != int(index) or not 0 <= index < len(options)
                  else chr(ord("A") + int(index)), options)


def _is_ambiguous(answer: str, options: Sequence[str]) -> bool:
    """Whether `answer`, which equals the text of an option, is also a valid option letter."""
    return len(answer) == 1 and answer.isupper() and ord(answer) - ord("A") < len(options)


def _majority(answers: list[Any]) -> list[Any]:
    said = [str(v).lower().rstrip(".") for v in answers]
    yes, no = said.count("yes"), said.count("no")
    if not yes or not no or yes + no < len(said) / 2:
        return answers
    if yes == no:
        raise DataError(f"{yes} of the row's answers are yes and as many are no: give the correct answer only")
    return ["yes" if yes > no else "no"]


def answer_fields(answer: Any, options: Sequence[str], question: str, stated_type: str | None = None) -> dict[str, Any]:
    """Returns the fields of a row that describe its answer: `answer`, `answer_type` and, if there are any, `options`.

    `answer` is the answer or a list of accepted answers, the most frequent of which becomes the first. `stated_type` is
    the answer type that a field of the record states. Raises DataError if the answer is missing or not among the
    options."""
    several = list(answer) if isinstance(answer, list) else [answer]
    if not several or any(v is None or isinstance(v, (bool, Mapping, list)) or answer_text(v) == "" for v in several):
        raise DataError(f"answer={short(answer)} must be a string or a number")
    if options:
        right = several[0] if len(several) == 1 else ", ".join(option_letter(v, options) for v in several)
        return {"options": list(options), "answer": option_letter(right, options), "answer_type": "choice"}
    answers = [answer_text(v) if isinstance(v, str) else v for v in several]
    answers = _majority(answers)
    answers = sorted(dict.fromkeys(answers), key=answers.count, reverse=True)
    if isinstance(answers[0], str) and (_CODE.search(answers[0]) or (
            _POINT.fullmatch(answers[0].strip()) and _ASKS_PLACE.search(question))):  # not a point of geometry
        raise DataError(f"the answer {short(answers[0])} is a position or an action, which cannot be scored as an "
                        "answer: give boxes as [x1, y1, x2, y2] in pixels, or an `action`")
    kind = answer_type_of(answers, question, stated_type)
    if kind == "choice":
        named = _LETTER.fullmatch(str(answers[0])) or _WITH_TEXT.fullmatch(str(answers[0]))
        return {"answer": named[1].upper(), "answer_type": kind} if named else {
            "answer": answers[0], "answer_type": "text"}
    return {"answer": answers[0] if len(answers) == 1 else answers, "answer_type": kind}
