"""Recipes of the classification task, matching of class names, and selection of training samples."""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from vlrl.data.row_fields import label_problem
from vlrl.data.values import short
from vlrl.errors import DataError, did_you_mean
from vlrl.rewards.confidence import brier, confidence_format, read_confidence
from vlrl.rewards.scripts import pieces
from vlrl.rewards.text import (
    answer_tag,
    answer_text,
    clauses,
    clean_label,
    denies,
    negates,
    said,
    same_label,
    think_answer_format,
)
from vlrl.task.recipes import Recipe
from vlrl.types import Answer, Parts, Record, Sample

from ._shared import think_answer

_LONGEST = 2000  # characters of an answer that may contain a class name among other words
_MOST = 200  # names in an answer that may have several; one with more scores 0
_BETWEEN = re.compile(r"[,;\n]")
_SPACES = re.compile(r"[\s_]+")
_AROUND = ".,;:!?\"'()[]{}<>*`"
_FILLER = frozenset("a an the this that these it is its it's was be in of on to for as and image picture photo "
                    "photograph shows shown showing show see seen contains depicts looks like appears seems answer "
                    "class label category species type kind name named called i think".split())
"""Words that may surround a class name in an answer if the row does not list the possible names."""


@dataclass(frozen=True, kw_only=True)
class AnswerFormat:
    """How an answer is written, and how the class name in an answer is recognized."""

    find: Callable[[Answer], str | None]
    """Returns the part of an answer that names the class; None if there is no such part."""
    same: Callable[[str, str, Sequence[str]], bool]
    """(text of the answer, class name, other class names of the row) -> whether the text names the class."""
    say: Callable[[str], str]
    """Writes a text as an answer in this format."""
    format: Callable[[Record, Answer], float] | None = None
    """Returns 1 for an answer in the right format, else 0; None if the recipe has no format reward."""


@dataclass(frozen=True, kw_only=True)
class ClassRecipe(Recipe):
    """A recipe whose completions name one or several classes."""

    forms: tuple[AnswerFormat, AnswerFormat]
    """Two answer formats: for prompt templates without thinking, and for prompt templates with thinking."""


def form_of(task: Any, sample: Sample) -> AnswerFormat:
    """The answer format that belongs to the prompt template chosen for the sample."""
    return task.used.forms[task.thinks(sample)]


def labels_of(row: Record) -> list[str]:
    """The right classes of a row, as a list."""
    label = row["label"]
    return label if isinstance(label, list) else [label]


def names_of(row: Record, label: str) -> list[str]:
    """Returns a list: the right class name `label`, followed by its synonyms in the row."""
    synonyms = row.get("synonyms") or ()
    return [label, *(synonyms.get(label, ()) if isinstance(synonyms, Mapping) else synonyms)]


def accuracy(task: Any, sample: Sample, given: str | None) -> float:
    """The accuracy, in [0, 1], of `given`, the part of an answer that names classes; 0 for None. For a row with one
    label, it is 1 if `given` names the right class, else 0. For a row with several labels, the set of named classes
    is compared with the set of right classes by the score that `task.multi_score` chooses."""
    if given is None:
        return 0.0
    form, row = form_of(task, sample), sample.row
    negations = task.negation == "read"
    if not isinstance(row["label"], list):
        return float(_names(form, row, given, row["label"], negations))
    wanted, items = labels_of(row), names_in(given)
    if len(items) > _MOST:
        return 0.0
    named = {next((label for label in wanted if _names(form, row, item, label, negations)), item) for item in items}
    return SET_SCORES[task.multi_score](named, set(wanted))


def names_in(text: str) -> list[str]:
    """The distinct names in a text, which are separated by commas, semicolons or line breaks."""
    texts = _BETWEEN.split(text) if len(text) <= 20 * _LONGEST else []
    return list({clean_label(text): text.strip(" \t\r[]\"'") for text in texts if clean_label(text)}.values())


def _names(form: AnswerFormat, row: Record, given: str, label: str, negations: bool) -> bool:
    """Whether `given`, a part of an answer, names the class `label`; the answer format `form` decides how texts are
    compared. With `negations`, two rules are added: a text that starts with a negation names only classes whose own
    names start with a negation, and a class that is negated in a clause of the text is not named."""
    own = names_of(row, label)
    others = [name for name in row.get("labels") or () if name not in own]
    own = [name for name in own if denies(name)] if negations and denies(given) else own
    parts = clauses(given) if negations and len(given) <= _LONGEST else []
    return any(form.same(given, name, others) and not any(
        negates(part) and not negates(name) and form.same(part, name, others) for part in parts) for name in own)


SET_SCORES: dict[str, Callable[[set[str], set[str]], float]] = {
    "jaccard": lambda a, b: len(a & b) / len(a | b), "f1": lambda a, b: 2 * len(a & b) / (len(a) + len(b)),
    "exact": lambda a, b: float(a == b)}
"""Value of `task.multi_score` -> score of the set of named classes against the set of right classes."""


def _exactly(given: str, name: str, _others: Sequence[str]) -> bool:
    return given == name


def _cleaned(given: str, name: str, _others: Sequence[str]) -> bool:
    return same_label(given, name)


def _lowered(given: str, name: str, _others: Sequence[str]) -> bool:
    return given.strip().lower().replace("_", " ") == name.strip().lower().replace("_", " ")


def names_class(text: str, name: str, others: Sequence[str] = ()) -> bool:
    """Whether a text names the class `name`: it equals the name, contains the name, or is a part of the name with at
    least half of the letters. Case is ignored, and underscores count as spaces. Only whole words count, and the text
    must not match any of the `others`. If `others` is empty, the class name may only be surrounded by words such as
    "it is a". Visual-RFT (2503.01785) is more lenient: it also accepts parts of words and an empty text, so that a
    single letter or a list of all names is right."""
    if len(text) > _LONGEST:
        return False
    words, wanted = _words(text), _words(name)
    compact, right = "".join(words), "".join(wanted)
    rivals = [rival for rival in map(_words, others) if rival]
    if not compact or not right or compact == right:
        return bool(compact) and compact == right
    if any("".join(rival) == compact for rival in rivals):
        return False
    if 2 * len(compact) >= len(right) and _around(wanted, compact) is not None:
        return all(_around(rival, compact) is None for rival in rivals)
    rest = _around(words, right)
    if rest is None:
        return False
    if not rivals:
        return _FILLER.issuperset(rest)
    rival_texts = ["".join(rival) for rival in rivals]
    return all(_around(words, rival) is None or _around(wanted, rival) is not None for rival in rival_texts)


def _words(text: str) -> list[str]:
    return [word for part in _SPACES.split(text.casefold()) for piece in pieces(part) if (word := piece.strip(_AROUND))]


def _around(words: Sequence[str], joined: str) -> list[str] | None:
    for start in range(len(words)):
        run = ""
        for end, word in enumerate(islice(words, start, None), start + 1):
            run += word
            if run == joined:
                return [*words[:start], *words[end:]]
            if len(run) >= len(joined):
                break
    return None


def _plain(row: Record, answer: Answer) -> float:
    """Returns 1 if the answer has the right format, else 0. If the row has `labels`, the answer must consist of names
    from them. Otherwise it must be a single line without tags."""
    text = said(answer)
    if row.get("labels"):
        known = {name for label in labels_of(row) for name in names_of(row, label)} | set(row["labels"])
        items = names_in(text) if isinstance(row["label"], list) else [text]
        return float(bool(items) and known.issuperset(items))
    return float(bool(text.strip()) and not any(mark in text for mark in ("\n", "<think>", "<answer>")))


def _read(task: Any, sample: Sample, answer: Answer) -> Any:
    given = form_of(task, sample).find(answer)
    if isinstance(sample["label"], list):
        return [clean_label(name)[:200] for name in names_in(given or "")][:_MOST]
    return clean_label(given)[:200] if given else None


def _score(task: Any, sample: Sample, answer: Answer) -> Parts:
    form = form_of(task, sample)
    parts: Parts = {"accuracy": accuracy(task, sample, form.find(answer))}
    return {**parts, "format": form.format(sample.row, answer)} if form.format else parts


def _recipe(prompt: str, rewards: Mapping[str, float], *forms: AnswerFormat, **other: Any) -> ClassRecipe:
    return ClassRecipe(
        prompt=prompt, rewards=rewards, forms=(forms[0], forms[-1]), target=lambda _task, sample: sample["label"],
        oracle=lambda task, sample: form_of(task, sample).say(", ".join(labels_of(sample.row))),
        **{"read": _read, "score": _score, **other})


def _thought(text: str) -> str:
    return think_answer(text, "I look at the image.")


DIRECT = AnswerFormat(find=said, same=_exactly, say=str, format=_plain)
TAGGED = AnswerFormat(find=lambda answer: answer_tag(answer.text, "last"), same=_cleaned, say=_thought,
              format=lambda _row, answer: think_answer_format(answer.text))
PLAIN = _recipe("", {"accuracy": 1.0, "format": 0.1}, DIRECT, TAGGED)


def _tag_or_all(answer: Answer) -> str:
    tagged = answer_tag(answer.text)
    return said(answer) if tagged is None else tagged


CLS_RL = _recipe(
    "{question}\nPlease output the thinking process in <think> </think> and final answer in <answer> </answer> tags.",
    {"accuracy": 1.0, "format": 1.0}, AnswerFormat(find=_tag_or_all, same=_lowered, say=_thought, format=TAGGED.format))
CLS_RL_NO_THINKING = _recipe(
    "{question}\nPlease directly output the answer.", {"accuracy": 1.0},
    AnswerFormat(find=said, same=_exactly, say=str))
VISUAL_RFT = _recipe(
    "{question}\nOutput the thinking process in <think> </think> and final answer in <answer> </answer> tags. The "
    "output answer format should be as follows:\n<think> ... </think> <answer>name of the class</answer>\nPlease "
    "strictly follow the format.", {"accuracy": 1.0, "format": 1.0},
    AnswerFormat(find=lambda answer: answer_text(answer.text), same=names_class, say=_thought, format=TAGGED.format))


# --- RLCR: how sure the answer is -------------------------------------------------------------------------------------


RLCR = _recipe(
    "{question}\nThink in <think> </think> first, then give the answer in <answer> </answer>, and in <confidence> "
    "</confidence> how likely it is to be right, a number from 0 to 1.",
    {"accuracy": 1.0, "brier": -1.0, "format": 0.0},
    AnswerFormat(find=TAGGED.find, same=_cleaned, say=lambda text: f"{_thought(text)}<confidence>1</confidence>",
         format=lambda _row, answer: confidence_format(answer.text)), 
    read=lambda task, sample, answer: {"label": _read(task, sample, answer),
                                       "confidence": read_confidence(answer.text)},
    score=lambda task, sample, answer: {**(parts := _score(task, sample, answer)), "brier": brier(
        read_confidence(answer.text), parts["accuracy"] or 0.0)})

RECIPES: dict[str, Recipe] = {"plain": PLAIN, "cls_rl": CLS_RL, "cls_rl_no_thinking": CLS_RL_NO_THINKING,
                              "visual_rft_classification": VISUAL_RFT, "rlcr": RLCR}


def few_shot_places(samples: Sequence[tuple[str, Sequence[str]]], shots: int, seed: int) -> list[int]:
    """Selects `shots` samples per class from `samples`, a list of (id, classes); returns the indices of the selected
    samples. A class with fewer samples is taken completely. The order of selection depends only on the ids and on
    `seed`. Smaller selections are therefore subsets of larger ones, and the order of the rows does not matter. A
    sample with several classes is taken if at least one of its classes still needs samples."""
    def drawn(place: int) -> bytes:
        return hashlib.blake2b(f"{seed}/{samples[place][0]}".encode("utf-8", "backslashreplace")).digest()
    taken: Counter[str] = Counter()
    places = []
    for place in sorted(range(len(samples)), key=drawn):
        if any(taken[label] < shots for label in samples[place][1]):
            places.append(place)
            taken.update(samples[place][1])
    return sorted(places)


def all_classes(rows: Iterable[Record], given: Sequence[str] = ()) -> list[str]:
    """All classes of the rows, in a fixed order. The order is `given`, if it is not empty. Else classes are ordered by
    the number (`class_id`) of the rows with a single label, as in CoOp (2109.01134); a name with several numbers
    appears once per number. If no row has a number, classes are ordered by name. Raises DataError for a class that is
    missing in `given`, or that has no number although other classes have one."""
    names: set[str] = set()
    numbers: set[tuple[Any, str]] = set()
    for row in rows:
        labels = labels_of(row)
        names.update(labels, row.get("labels") or ())
        numbers.update((row.get("class_id"), label) for label in labels if len(labels) == 1)
    if given:
        missing = next((name for name in sorted(names) if name not in given), None)
        if missing is not None:
            raise DataError(f"the class {missing!r} is not among the {len(given)} names of task.class_order."
                            f"{did_you_mean(missing, given)} Add the class to task.class_order")
        return [name for name in given if name in names]
    if {number for number, _ in numbers} <= {None}:
        return sorted(names)
    numbered = {name for number, name in numbers if type(number) is int}
    unknown = sorted((names - numbered) | {name for number, name in numbers if type(number) is not int})
    if unknown:
        raise DataError(f"the class {unknown[0]!r} lacks a whole number as class_id in some or all of its rows, but "
                        "other classes have one. Set task.class_order to all classes in the order of the data set")
    return [name for _, name in sorted(numbers)]


def halves(all_classes: Sequence[str]) -> dict[str, list[str]]:
    """Returns {"base": classes, "new": classes}, the two halves of the classes as in CoOp (2109.01134). If the number
    of classes is odd, `base` has one class more. Raises DataError for a name that occurs in both halves."""
    middle = math.ceil(len(all_classes) / 2)
    base, new = ([*dict.fromkeys(half)] for half in (all_classes[:middle], all_classes[middle:]))
    if both := next((name for name in new if name in base), None):
        raise DataError(f"the class {both!r} is in both halves, because two classes have this name. Rename one of them")
    return {"base": base, "new": new}


def validated(row: Record) -> dict[str, Any]:
    """The row with its label, class names and synonyms as strings. Raises DataError if one of these is unusable."""
    label = row.get("label")
    several = isinstance(label, list) or row.get("multi") is True
    given = label if isinstance(label, list) else [label]
    if not given or not all(_is_name(v) for v in given):
        raise DataError(f"label={short(label)} must be a string or a whole number, or a list of these")
    names = [str(v) for v in given]
    row = {**row, "label": names if several else names[0]}
    if row.get("labels") is not None:
        row["labels"] = _texts(row, "labels")
    if row.get("synonyms") is not None:
        row["synonyms"] = _synonyms(row, names)
    split = next((name for label in names for name in names_of(row, label) if several and _BETWEEN.search(name)), None)
    if split:
        raise DataError(f"label={short(split)} has a comma, a semicolon or a line break, but these separate the names "
                        "in an answer to a row with several labels. Remove them from the name")
    if problem := label_problem(names, row.get("labels")):
        raise DataError(problem)
    return row


def _synonyms(row: Record, names: Sequence[str]) -> Any:
    given = row["synonyms"]
    if isinstance(given, Mapping):
        return {str(label): _texts(given, label) for label in given}
    if len(names) > 1:
        raise DataError(f"synonyms={short(given)} of a row with several labels must be an object {{label: [names]}}")
    return _texts(row, "synonyms")


def _is_name(value: Any) -> bool:
    return isinstance(value, (str, int)) and not isinstance(value, bool) and bool(str(value).strip())


def _texts(row: Record, key: str) -> list[str]:
    values = row[key]
    if not isinstance(values, list) or not all(_is_name(v) for v in values):
        raise DataError(f"{key}={short(values)} must be a list of strings")
    return [str(v) for v in values]
