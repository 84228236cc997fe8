"""Action formats of the task `web`: the formats of GUI-R1 and UI-TARS, and plain calls such as click(300, 500).

Each format describes its actions to the model, parses an action from a text, checks that a text has nothing but an
action in this format, and writes actions for demonstrations. Points are in the coordinate convention of the model
family. No text of a model causes any exception other than UnreadableAction."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.rewards.literals import decimals, first_object, numbers_of, read_literal
from vlrl.rewards.text import answer_tag, said, think_answer_format
from vlrl.task.recipes import in_model_units, pixels, whole_units
from vlrl.types import Sample

from ._web_page import DIRECTIONS, POINTED, VERBS, Action

_LONGEST = 20_000
_MOST_TYPED = 200  # characters that one action types
_MODIFIERS = {"ctrl": "Control", "control": "Control", "shift": "Shift", "alt": "Alt"}
_KEYS = {name.lower(): name for name in (
    "Enter Tab Backspace Delete Escape Home End PageUp PageDown ArrowUp ArrowDown ArrowLeft ArrowRight Space").split()}
_KEYS |= {"return": "Enter", "esc": "Escape", "del": "Delete", "up": "ArrowUp", "down": "ArrowDown",
          "left": "ArrowLeft", "right": "ArrowRight", "pgup": "PageUp", "pgdn": "PageDown"}
_SAME = {"tap": "click", "left_click": "click", "left_single": "click", "left_double": "double_click",
         "doubleclick": "double_click", "dblclick": "double_click", "input_text": "type", "press": "key",
         "hotkey": "key", "enter": "key", "press_enter": "key", "complete": "answer", "finished": "answer",
         "left_click_drag": "drag"}
"""Names that other formats have for actions -> the corresponding verb in VERBS."""
_ENTERS = ("enter", "press_enter")


class UnreadableAction(Exception):
    """A text that cannot be parsed as an action. The message tells the model why."""


@dataclass(frozen=True)
class ActionFormat:
    """A format in which the model writes actions."""

    prompt: str
    """Description of the format in the prompt."""
    read: Callable[[Any, Sample, str], Action]
    """Parses an action; its points are converted to CSS pixels. Raises UnreadableAction."""
    strict: Callable[[str], bool]
    """Whether a text that can be parsed has nothing but the action in this format."""
    write: Callable[[Any, Sample, Action], str]


def read(form: ActionFormat, task: Any, sample: Sample, text: str) -> Action:
    """Parses the action in a text. If the prompt has opened a <think> tag, only the text after the thinking is parsed.
    Raises UnreadableAction."""
    text = said(text)
    if len(text) > _LONGEST:
        raise UnreadableAction(f"it is longer than {_LONGEST} characters")
    return form.read(task, sample, text)


def _checked(task: Any, sample: Sample, verb: str, points: Sequence[Sequence[float] | None], text: str) -> Action:
    """Builds the action `verb`, with its points converted from the model's coordinate convention to CSS pixels. Only a
    drag has a second point. Raises UnreadableAction for an unknown action or invalid arguments."""
    name = verb.strip().lower()
    text = "Enter" if name in _ENTERS else text
    name = _SAME.get(name, name)
    if name not in VERBS:
        raise UnreadableAction(f"there is no action {verb[:40]!r}; known are {', '.join(VERBS)}")
    scale = sample["scale"]
    placed = [(place[0] / scale, place[1] / scale) if place else None
              for place in (pixels(task, sample, point) for point in points)]
    first, second = (*placed, None, None)[:2]
    if name in POINTED and first is None:
        raise UnreadableAction(f"{name} needs a point")
    if name == "drag" and second is None:
        raise UnreadableAction("drag needs a second point")
    if name == "key":
        text = _key(text)
    if name == "scroll":
        text = text.strip().lower()
        if text not in DIRECTIONS:
            raise UnreadableAction(f"scroll needs a direction: {', '.join(DIRECTIONS)}")
    if name == "type" and not 0 < len(text) <= _MOST_TYPED:
        raise UnreadableAction(f"type needs a text of at most {_MOST_TYPED} characters")
    return Action(name, first, second, text)


def _written(task: Any, sample: Sample, point: Sequence[float] | None) -> list[Any]:
    place = in_model_units(task, sample, [v * sample["scale"] for v in point or (0, 0)])
    return [round(v) for v in place] if whole_units(task, sample) else place


def _key(text: str) -> str:
    """The name of a key as the browser writes it: "ctrl+a" becomes Control+a. Raises UnreadableAction for an unknown
    key."""
    *before, last = [part for part in re.split(r"[+ ]", text.strip()[:100]) if part] or [""]
    modifiers = [_MODIFIERS.get(part.lower(), "") for part in before]
    key = _KEYS.get(last.lower(), last if len(last) == 1 and last.isascii() and last.isprintable() else "")
    if not key or not all(modifiers):
        raise UnreadableAction(f"there is no key {text[:40]!r}; known are {', '.join(sorted(set(_KEYS.values())))}, "
                               "one character, and ctrl, shift or alt before it with +")
    return "+".join([*dict.fromkeys(modifiers), key])


# --- GUI-R1 -----------------------------------------------------------------------------------------------------------

_NO_TEXT = "no input text"


def _read_gui_r1(task: Any, sample: Sample, text: str) -> Action:
    entry = first_object(read_literal(answer_tag(text) or ""))
    if entry is None or not isinstance(entry.get("action"), str):
        raise UnreadableAction("there is no [{'action': ...}] in <answer> </answer> tags")
    typed = next((entry[k] for k in ("input_text", "text") if isinstance(entry.get(k), str)), "")
    points = [numbers_of(entry.get(k), 2) for k in ("point", "end_point")]
    return _checked(task, sample, entry["action"], points, "" if typed == _NO_TEXT else typed)


def _write_gui_r1(task: Any, sample: Sample, action: Action) -> str:
    entry: dict[str, Any] = {"action": action.verb, "point": _written(task, sample, action.point)}
    if action.to:
        entry["end_point"] = _written(task, sample, action.to)
    entry["input_text"] = action.text or _NO_TEXT
    return f"<think>I look at the page.</think><answer>{json.dumps([entry])}</answer>"


_GUI_R1 = ActionFormat(
    prompt="You are a GUI agent. The screenshot shows a web page; do the task that it is given with. Output the "
           "thinking process in <think> </think> tags, and one action in <answer> </answer> tags as follows:\n<think> "
           f"... </think> <answer>[{{'action': enum[{', '.join(map(repr, VERBS))}], 'point': [x, y], 'input_text': "
           "'no input text'}]</answer>\n'point' is where the action is done. 'input_text' is what is typed, the key "
           "('Enter', 'ctrl+a'), the direction of a scroll (up, down, left, right), or the answer, which ends the "
           "episode. A drag ends at 'end_point': [x, y].",
    read=_read_gui_r1, strict=lambda text: bool(think_answer_format(text)), write=_write_gui_r1)


# --- UI-TARS ----------------------------------------------------------------------------------------------------------

_CALL = re.compile(r"\s*(\w{1,40})\s*\((.*)\)\s*", re.DOTALL)
_ARGUMENT = re.compile(r"(\w{1,40})\s{0,9}=\s{0,9}(?:'((?:[^'\\]|\\.)*)'|\"((?:[^\"\\]|\\.)*)\")", re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_CONTROLS = {"n": "\n", "t": "\t"}


def _read_ui_tars(task: Any, sample: Sample, text: str) -> Action:
    match = _CALL.fullmatch(text.rpartition("Action:")[2])
    if "Action:" not in text or match is None:
        raise UnreadableAction("there is no line `Action: name(...)`")
    given = {name: _ESCAPE.sub(lambda escape: _CONTROLS.get(escape[1], escape[1]), one or other)
             for name, one, other in _ARGUMENT.findall(match[2])}
    points = [_place(given, *names) for names in (("start_box", "start_point", "point"), ("end_box", "end_point"))]
    words = next((given[k] for k in ("content", "key", "direction") if k in given), "")
    return _checked(task, sample, match[1], points, words)


def _place(given: Mapping[str, str], *names: str) -> list[float] | None:
    text = next((given[name] for name in names if name in given), "")
    numbers = decimals(text.replace("(", " ").replace(")", " "), most=5)
    if len(numbers) == 4:
        return [(numbers[0] + numbers[2]) / 2, (numbers[1] + numbers[3]) / 2]
    return numbers if len(numbers) == 2 else None


_TARS_NAMES = {"double_click": "left_double", "key": "hotkey", "answer": "finished"}
_TARS_TEXTS = {"key": "key", "scroll": "direction"}


def _write_ui_tars(task: Any, sample: Sample, action: Action) -> str:
    def box(point: Sequence[float]) -> str:
        x, y = _written(task, sample, point)
        return f"'({x},{y})'"

    places = {"start_box": action.point, "end_box": action.to}
    arguments = [f"{name}={box(point)}" for name, point in places.items() if point]
    if action.text:
        words = action.text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n")
        arguments.append(f"{_TARS_TEXTS.get(action.verb, 'content')}='{words}'")
    return f"Thought: I look at the page.\nAction: {_TARS_NAMES.get(action.verb, action.verb)}({', '.join(arguments)})"


_UI_TARS = ActionFormat(
    prompt="You are a GUI agent. You are given a task and the screenshot of a web page. Perform the next action to "
           "complete the task.\n## Output format\nThought: ...\nAction: ...\n## Action space\n"
           "click(start_box='(x,y)')\nleft_double(start_box='(x,y)')\ndrag(start_box='(x,y)', end_box='(x,y)')\n"
           "type(content='')\nhotkey(key='ctrl a')\n"
           "scroll(start_box='(x,y)', direction='down or up or right or left')\nwait()\n"
           "finished(content='')",
    read=_read_ui_tars,
    strict=lambda text: said(text).lstrip().startswith("Thought:") and said(text).count("Action:") == 1,
    write=_write_ui_tars)


# --- plain calls ------------------------------------------------------------------------------------------------------


def _read_call(task: Any, sample: Sample, text: str) -> Action:
    match = _CALL.fullmatch(text)
    given = read_literal(f"[{match[2]}]") if match else None
    if match is None or not isinstance(given, list):
        raise UnreadableAction("it is no call such as click(300, 500) or type(\"yes\")")
    numbers = numbers_of([v for v in given if not isinstance(v, str)][:4], 4) or numbers_of(
        [v for v in given if not isinstance(v, str)][:2], 2) or []
    words = next((v for v in given if isinstance(v, str)), "")
    return _checked(task, sample, match[1], [numbers[i:i + 2] or None for i in (0, 2)], words)


_PLAIN = ActionFormat(
    prompt="Do the task on the web page with one action a turn: click(x, y), double_click(x, y), drag(x1, y1, x2, y2), "
           "scroll(x, y, \"down\"), type(\"text\"), key(\"Enter\"), wait(), answer(\"text\").",
    read=_read_call, strict=lambda text: said(text) == said(text).strip(),
    write=lambda task, sample, action: "{}({})".format(action.verb, ", ".join(map(json.dumps, [
        *(v for point in (action.point, action.to) if point for v in _written(task, sample, point)),
        *([action.text] if action.text else [])]))))

FORMS: Mapping[str, ActionFormat] = {"gui_r1": _GUI_R1, "ui_tars": _UI_TARS, "call": _PLAIN}
