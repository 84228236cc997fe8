"""Recipes of the grounding task whose answers are yes or no, option letters, a number or points."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vlrl.rewards.boxes import format_box, is_number
from vlrl.rewards.detection import mean_matched
from vlrl.rewards.literals import decimals, numbers_of, read_fenced
from vlrl.rewards.numbers import is_percent
from vlrl.rewards.points import inside
from vlrl.rewards.text import answer_text, choice_letters, denies, number, retracted, think_answer_format, yes_no
from vlrl.task.recipes import Recipe, in_model_units, pixels
from vlrl.types import Answer, Parts, Sample

from ._shared import think_answer

LETTERS = "ABCDE"
_PARTS = {"accuracy": 1.0, "format": 1.0}
_TAGS = ("Output the thinking process in <think> </think> and the final answer ({kind}) in <answer> </answer> tags.")


def _equal(task: Any, sample: Sample, answer: Answer) -> Parts:
    recipe = task.used
    given = recipe.read(task, sample, answer)
    return {"accuracy": float(given is not None and given == recipe.target(task, sample)),
            "format": think_answer_format(answer.text)}


def _unless_read(read: Callable[[str], Any], wanted: str) -> Callable[[Any, Mapping[str, Any]], str | None]:
    """Returns a row check: a function that returns a problem if `read` cannot parse the row's answer, else None.
    `wanted` describes a valid answer for the message."""
    def problem(_task: Any, row: Mapping[str, Any]) -> str | None:
        unread = row.get("answer") is not None and read(str(row["answer"])) is None
        return f"answer={str(row['answer'])[:80]!r} must be {wanted}" if unread else None
    return problem


# --- yes or no --------------------------------------------------------------------------------------------------------


def _is_there(_task: Any, sample: Sample) -> str:
    if sample.get("answer") is not None:
        return yes_no(str(sample["answer"])) or ""
    return "yes" if sample.get("boxes") else "no"


CURR_REFT_BINARY = Recipe(
    prompt="{question} Answer yes or no. " + _TAGS.format(kind="yes or no"), rewards=_PARTS,
    read=lambda _task, _sample, answer: yes_no(answer_text(answer.text)), score=_equal, target=_is_there,
    oracle=lambda task, sample: think_answer(_is_there(task, sample)), asks=True,
    problem=_unless_read(yes_no, "yes or no"))


# --- choice -----------------------------------------------------------------------------------------------------------


def options_of(row: Mapping[str, Any]) -> list[str]:
    """The options of a row, else its labels."""
    return [str(option) for option in row.get("options") or row.get("labels") or ()]


def _right_letters(_task: Any, sample: Sample) -> str:
    if sample.get("answer") is not None:
        return choice_letters(str(sample["answer"]), LETTERS)
    there = {entry.get("label") for entry in sample.get("boxes") or ()}
    return ",".join(letter for letter, name in zip(LETTERS, options_of(sample.row), strict=False) if name in there)


def _choice_problem(task: Any, row: Mapping[str, Any]) -> str | None:
    count = len(options_of(row))
    if not 2 <= count <= len(LETTERS):
        return f"the row has {count} options (or labels), but a choice needs 2 to {len(LETTERS)}"
    if not _right_letters(task, Sample(id="", row={"boxes": [], **row})):
        return f"answer={row.get('answer')!r} names none of the options; give its letter, or a box with its label"
    return None


def choice_question(row: Mapping[str, Any]) -> str:
    lines = "\n".join(f"{letter}. {name}" for letter, name in zip(LETTERS, options_of(row), strict=False))
    return f"{row.get('question') or 'Which of these are in the image?'}\n{lines}"


def _named(task: Any, answer: Answer) -> str:
    text = answer_text(answer.text)
    return "" if task.negation == "read" and (denies(text) or retracted(text)) else text


CURR_REFT_CHOICE = Recipe(
    prompt="{choices}\n" + _TAGS.format(kind="the letters, in order"), rewards=_PARTS,
    read=lambda task, _sample, answer: choice_letters(_named(task, answer), LETTERS) or None,
    score=_equal, target=_right_letters, problem=_choice_problem, asks=True,
    oracle=lambda task, sample: think_answer(_right_letters(task, sample)))


# --- counting and pointing --------------------------------------------------------------------------------------------


def _count(_task: Any, sample: Sample) -> int:
    if sample.get("count") is not None:
        return int(sample["count"])
    if sample.get("answer") is not None:
        return int(number(str(sample["answer"])) or 0)
    return len(sample.get("points") or sample["boxes"])


COUNTING = Recipe(
    prompt="{how_many} " + _TAGS.format(kind="a number"), rewards=_PARTS, score=_equal,
    read=lambda task, _sample, answer: None if is_percent(text := _named(task, answer)) else number(text),
    target=_count, asks=True, problem=_unless_read(number, "a number"),
    oracle=lambda task, sample: think_answer(str(_count(task, sample))))


def _places(_task: Any, sample: Sample) -> list[list[float]]:
    return [list(p) for p in sample.get("points") or [entry["box"] for entry in sample["boxes"]]]


def _read_points(task: Any, sample: Sample, answer: Answer) -> list[list[float]]:
    text = answer_text(answer.text)
    given = read_fenced(text)
    if isinstance(given, list) and given:
        points = [numbers_of(p.get("point_2d") if isinstance(p, dict) else p, 2) for p in given]
        if numbers_of(given, 2):
            points = [numbers_of(given, 2)]
    else:
        values = decimals(text, most=2 * 64)
        points = [values[i:i + 2] for i in range(0, len(values) - 1, 2)]
    return [p for point in points if (p := pixels(task, sample, point))]


def _pointing(task: Any, sample: Sample, answer: Answer) -> Parts:
    """The reward parts of an answer with points: `accuracy` and `format`. `accuracy` is the number of targets that have
    a matching point, each point counting once, divided by the larger of the numbers of targets and points."""
    places, points = _places(task, sample), _read_points(task, sample, answer)
    reach = task.reach * max(sample["width"], sample["height"])
    hits = [[_near(p, place, reach) for place in places] for p in points]
    text = answer_text(answer.text)
    wellformed = isinstance(read_fenced(text), list) or (not points and text.casefold().strip(" .") == "none")
    score = mean_matched(hits, len(points), len(places)) if places or points else float(wellformed)
    return {"accuracy": score, "format": float(wellformed)}


def _near(point: Sequence[float], place: Sequence[float], reach: float) -> float:
    if len(place) == 4:
        return float(inside(point, place))
    return float((point[0] - place[0]) ** 2 + (point[1] - place[1]) ** 2 <= reach ** 2)


def _oracle_points(task: Any, sample: Sample) -> str:
    middles = [[(p[0] + p[2]) / 2, (p[1] + p[3]) / 2] if len(p) == 4 else p for p in _places(task, sample)]
    return f"[{', '.join(format_box(in_model_units(task, sample, p)) for p in middles)}]" if middles else "none"


POINTING = Recipe(
    prompt="Point at every {categories} in the image. Answer with a list of points [[x, y], ...], or none.",
    asked="{question} Answer with a list of points [[x, y], ...], or none.",
    rewards={"accuracy": 1.0, "format": 0.1}, read=_read_points, score=_pointing, target=_places,
    oracle=_oracle_points)


_OWN_KIND = {"curr_reft_binary": (r"^\W*(?:is|are|was|were|do|does|did|can|could|has|have|will)\b", "yes or no"),
             "curr_reft_choice": (r"\b(?:which|what|who|select|choose)\b", "options"),
             "counting": (r"\bhow many\b|\bcount\b|\bnumber of\b", "a number")}
"""Recipe -> (pattern of the questions that the recipe can score by the row's boxes alone, what the recipe asks for)."""


def other_question(recipe: str, row: Mapping[str, Any]) -> str | None:
    """Returns why a recipe cannot ask the question of a row that has boxes but no `answer`; None if it can."""
    question, known = row.get("question"), _OWN_KIND.get(recipe)
    if not known or not isinstance(question, str) or row.get("answer") is not None or re.search(
            known[0], question, re.IGNORECASE):
        return None
    return (f"question={question[:120]!r} is answered by boxes, but task.recipe={recipe} asks for {known[1]}: choose a "
            "recipe whose answers are boxes, or give the row an `answer`")


def count_problem(row: Mapping[str, Any]) -> str | None:
    """Describes what is wrong with the fields `count` and `points` of a row; None if they are valid."""
    count, points = row.get("count"), row.get("points")
    if count is not None and not (is_number(count) and count == int(count) and count >= 0):
        return f"count={count!r} must be a whole number of at least 0"
    if points is not None and not (isinstance(points, list) and all(
            isinstance(p, list) and len(p) == 2 and all(map(is_number, p)) for p in points)):
        return f"points={str(points)[:200]} must be a list of [x, y]"
    return None
