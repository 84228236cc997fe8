"""Scores of a single GUI action under the rules of published benchmarks: positions, texts and action types, with one
function for each benchmark.

Points are [x, y] and boxes [x1, y1, x2, y2], in thousandths of the screen width and height unless stated otherwise. An
action is {"type": str, "point": point or None, "text": str}. Finite input never makes a function raise. The time is
linear in the length of the answered text, or proportional to the product of the lengths of this text and the true text.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from rapidfuzz.distance import Levenshtein

from vlrl.rewards.boxes import iou

Action = Mapping[str, Any]
Place = Sequence[float]
CLICKS = ("click", "tap", "left_click", "long_press")
_TYPED = ("type", "input_text")
_REACH = 0.14  # share of the screen sides by which a click may miss its target (Android in the Wild, 2307.10088)
_NUMBERS = re.compile(r"-?\d+\.?\d*")
_QWEN_BOX = re.compile(r"<box>\((\d+),(\d+)\),\((\d+),(\d+)\)</box>")
_KIND = re.compile(r"'action':\s*'(\w+)'")
_TEXT = re.compile(r"'input_text':\s*'(.*?)'")
_POINT = re.compile(r"\[(\d{1,18}),\s*(\d{1,18})\]")
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LONGEST = 20_000  # characters of an answer that are read


# --- ScreenSpot -------------------------------------------------------------------------------------------------------


def screenspot_point(text: str) -> list[float] | None:
    """The point in an answer, as fractions of the screen size, as SeeClick parses it for ScreenSpot (2401.10935,
    process_utils.py). None if there is none.

    - If the text contains "box": the centre of Qwen-VL's box in thousandths.
    - If it contains exactly two numbers: these numbers.
    - If it contains exactly four numbers: the centre of this box."""
    text = text[:_LONGEST]
    if "box" in text:
        match = _QWEN_BOX.search(text)
        x1, y1, x2, y2 = map(int, match.groups()) if match else (0, 0, 0, 0)
        return [(x1 + x2) / 2 / 1000, (y1 + y2) / 2 / 1000] if match else None
    given = [float(number) for number in _NUMBERS.findall(text)]
    if len(given) == 4:
        return [(given[0] + given[2]) / 2, (given[1] + given[3]) / 2]
    return given if len(given) == 2 else None


# --- AndroidControl as OS-Atlas scores it -----------------------------------------------------------------------------


def os_atlas_step(truth: Action, answer: Action | None) -> dict[str, float]:
    """Scores one action as OS-Atlas evaluates AndroidControl (2410.23218, evaluation_unify.py). Returns 0 or 1 for
    `type` and for `step`. Points are integer thousandths; their signs are ignored.

    Texts and app names are compared by their first word, in square brackets as in the authors' answers: "milk" becomes
    `[milk]` and does not match "milk bread", whose first word is `[milk`. Any other argument must be equal."""
    if answer is None or _first(answer["type"]) != _first(truth["type"]):
        return {"type": 0.0, "step": 0.0}
    wanted, said = (str(action.get("text") or "") for action in (truth, answer))
    if truth["type"] in CLICKS:
        x, y = (int(abs(v)) for v in answer["point"]) if answer.get("point") else (-100, -100)
        step = math.sqrt((x - truth["point"][0]) ** 2 + (y - truth["point"][1]) ** 2) <= _REACH * 1000
    elif truth["type"] in (*_TYPED, "open_app"):
        step = said == wanted or _first(f"[{said}]").lower() == _first(f"[{wanted}]").lower()
    else:
        step = said == wanted and str(answer["type"]) == str(truth["type"])
    return {"type": 1.0, "step": float(step)}


def _first(text: Any) -> str:
    return next(iter(str(text).split()), "")


# --- GUI-R1 -----------------------------------------------------------------------------------------------------------


def gui_r1_action(text: str) -> dict[str, Any]:
    """Parses an action as GUI-R1's inference script does (2504.10458). Only the first <answer> is read:
    - "type": the first `'action': 'word'`; None if there is none.
    - "text": the first `'input_text': '...'`; "no input text" if there is none.
    - "point": the last `[x, y]` of integers on the first line that has one between braces; [0, 0] if there is none."""
    body, closed, _ = text[:_LONGEST].partition("<answer>")[2].partition("</answer>")
    body = body.strip() if closed else ""
    kind, said = _KIND.search(body), _TEXT.search(body)
    return {"type": kind[1] if kind else None, "text": said[1] if said else "no input text", "point": _braced(body)}


def _braced(body: str) -> list[int]:
    start = 0
    for line in body.split("\n"):
        opened, end = line.find("{"), start + len(line)
        points = _POINT.finditer(body, start + opened) if opened >= 0 else ()
        matches = [m for m in takewhile(lambda m, end=end: m.start() < end, points) if _closes(body, m.end())]
        if matches:
            return [int(matches[-1][1]), int(matches[-1][2])]
        start = end + 1
    return [0, 0]


def _closes(body: str, at: int) -> bool:
    """Whether a closing brace follows position `at` of `body` on the same line or, if the rest of this line is blank,
    on the next non-blank line."""
    end = body.find("\n", at)
    rest = body[at:] if end < 0 else body[at:end]
    if "}" in rest:
        return True
    return not rest.strip() and "}" in next((line for line in body[at:].split("\n") if line.strip()), "")


def gui_r1_step(truth: Action, answer: Action, size: Sequence[float]) -> dict[str, float]:
    """Scores one action as GUI-R1 evaluates AndroidControl, GUI-Act and GUI-Odyssey (2504.10458, eval_omni.py). Returns
    0 or 1 for `type` and, if the correct action has a position or a text, for `step`. Points are in pixels of a
    screen of `size` (width, height).

    `step` is 1 for a position within 14 % of the screen size or a text with a word F1 of at least .5, even if the type
    is wrong. If both texts are single words, it is enough that one contains the other."""
    scores = {"type": float(answer["type"] == truth["type"])}
    if truth["type"] in (*CLICKS, "moveto", "doubleclick", "rightclick"):
        dx, dy = ((t - g) / side for t, g, side in zip(truth["point"], answer["point"], size, strict=True))
        return {**scores, "step": float(dx ** 2 + dy ** 2 < _REACH ** 2)}
    if truth["type"] in (*_TYPED, "open_app", "scroll", "select"):
        return {**scores, "step": float(_word_f1(str(truth.get("text") or ""), answer["text"]) >= 0.5)}
    return scores


def _word_f1(a: str, b: str) -> float:
    first, second = ({*re.sub(r"[\[\]]", "", text.lower()).split()} for text in (a, b))
    if len(first) == len(second) == 1 and (min(first) in max(second) or min(second) in max(first)):
        return 1.0
    shared = len(first & second)
    return 2 * shared / (len(first) + len(second)) if shared else 0.0


# --- GUI-Odyssey ------------------------------------------------------------------------------------------------------


def odyssey_step(truth: Action, answer: Action | None, box: Place | None = None) -> dict[str, float]:
    """Scores one action as GUI-Odyssey's own evaluation does (2406.08451, GUIOdyssey_action_matching.py). Returns 0 or
    1 for `type` and for `step` (the action matching score), and for `text` if the correct action types a text.

    - A click is correct inside the `box` of the target element or within 14 % of the true point.
    - A text is correct if one text contains the other (an empty one is always contained) or if their edit similarity is
    at least 0.5. Texts are cut at the first colon.
    - An answer with an unreadable position gets a `type` of 1, whatever its type is."""
    if answer is None:
        return {"type": 0.0, "step": 0.0}
    kind, wanted = str(answer["type"]).strip(), str(truth["type"]).strip()
    if kind in CLICKS and not answer.get("point"):
        return {"type": 1.0, "step": 0.0}
    if kind != wanted:
        return {"type": 0.0, "step": 0.0}
    text, said = (str(action.get("text") or "").partition(":")[0].strip() for action in (truth, answer))
    if wanted in CLICKS:
        return {"type": 1.0, "step": float(_near(answer["point"], truth["point"], box))}
    if wanted in _TYPED:
        alike = said in text or text in said or Levenshtein.normalized_similarity(text, said[:_LONGEST]) >= 0.5
        return {"type": 1.0, "step": float(alike), "text": float(alike)}
    return {"type": 1.0, "step": float(wanted != "scroll" or text.lower() == said.lower())}


def _near(point: Place, truth: Place, box: Place | None) -> bool:
    if box is not None and box[0] <= point[0] <= box[2] and box[1] <= point[1] <= box[3]:
        return True
    dx, dy = point[0] / 1000 - truth[0] / 1000, point[1] / 1000 - truth[1] / 1000
    return math.sqrt(dx * dx + dy * dy) <= _REACH


# --- GUI-Act ----------------------------------------------------------------------------------------------------------


def squad_f1(answer: str, truth: str) -> float:
    """The F1 score of the words of two texts, in [0, 1], as in SQuAD (1606.05250): lower case, without punctuation and
    articles, repeated words counted. 1 if neither text has words, 0 if only one has."""
    a, b = (Counter(_ARTICLES.sub(" ", text[:_LONGEST].lower().translate(_PUNCTUATION)).split())
            for text in (answer, truth))
    if not a or not b:
        return float(a == b)
    return 2 * (a & b).total() / (a.total() + b.total())


def gui_act_step(truth: Action, answer: Action | None, elements: Sequence[Place] = ()) -> dict[str, float]:
    """Scores one action as GUI-Act's own evaluation does (GUICourse, 2406.11317, eval_single_action.py). Returns `type`
    and `step` (the step success rate), each 0 or 1, and `score` in [0, 1], which also rewards a partly correct
    argument. Taps are fractions of the screen size with three digits; boxes are in pixels.

    A click is correct if `element_of` maps the answered box to the element with the index `truth["element"]`. A text is
    correct with an F1 above .5, a scroll or swipe with the correct direction. Action types that GUI-Act does not know
    are always wrong."""
    if answer is None or answer["type"] != truth["type"]:
        return {"type": 0.0, "step": 0.0, "score": 0.0}
    step, score = _act(truth, answer, elements)
    return {"type": 1.0, "step": float(step), "score": score}


def _act(truth: Action, answer: Action, elements: Sequence[Place]) -> tuple[bool, float]:
    kind, said = truth["type"], answer.get("text")
    text = squad_f1(str(said), str(truth.get("text") or "")) if said is not None else 0.0
    if kind == "tap":
        if not answer.get("point"):
            return False, 0.0
        away = math.sqrt(sum((a - b) ** 2 for a, b in zip(answer["point"], truth["point"], strict=True)))
        return away <= _REACH, 1 - away / _REACH if away <= _REACH else 0.0
    if kind in ("input", "answer"):
        return text > 0.5, text
    if kind in ("click", "hover", "select"):
        if not answer.get("box"):
            return False, 0.0
        same, overlap = element_of(answer["box"], elements) == truth["element"], iou(answer["box"], truth["box"])
        return (same, overlap) if kind != "select" else (same and text > 0.5, (text + overlap) / 2)
    if kind in ("scroll", "swipe"):
        same = str(said or "") == str(truth.get("text") or "")
        return same, float(same)
    known = kind in ("enter", "copy", "task_complete")
    return known, float(known)


def element_of(box: Place, elements: Sequence[Place]) -> int:
    """The index of the element that GUI-Act assigns to a box: the element with the highest IoU if that is above .1,
    else the element nearest to the centre of the box. Of equally good elements it is the first. -1 if there are no
    elements."""
    overlaps = [iou(box, element) for element in elements]
    if max(overlaps, default=0.0) > 0.1:
        return overlaps.index(max(overlaps))
    middle = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    away = [_distance(middle, element) for element in elements]
    return away.index(min(away)) if away else -1


def _distance(point: Place, box: Place) -> float:
    dx, dy = (max(low - v, 0.0, v - high) for v, low, high in zip(point, box[:2], box[2:], strict=True))
    return math.sqrt(dx ** 2 + dy ** 2)
