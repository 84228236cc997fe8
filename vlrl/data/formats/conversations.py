"""Reads conversations in records of other projects: earlier turns, the question, and its answer.

    conversation_of({"messages": [{"role": "user", "content": "<image>Who?"},
                                  {"role": "assistant", "content": "a cat"}]})
    # Conversation(question="<image>Who?", answer="a cat")

A conversation may be in `conversations`, `messages`, `prompt` (with or without `completion`), `input` (OpenAI's
responses) or `texts` (The Cauldron), or consist of `query` with `response` or `instruction` with `output`, and
optionally `history`."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from vlrl.data.sources.fields import has, pick
from vlrl.data.values import short, unpacked
from vlrl.errors import DataError
from vlrl.types import Record, Row

log = logging.getLogger(__name__)

LISTS = ("conversations", "messages", "conversation", "prompt", "input", "texts")
"""Fields that may hold a list of turns."""
_REPLIES = {"prompt": "completion", "input": "output"}
"""Maps each field that holds only a prompt to the field with the reply."""
_TURN_KEYS = {"prompt": {"role", "from"}, "input": {"role", "from"}, "texts": {"user", "assistant"}}
"""Fields that hold turns in some formats and something else in others. Maps each to keys of turns: the field holds
turns if every entry of its list is an object with one of these keys."""
_PAIRS = (("query", "response"), ("instruction", "output"), ("instruction", "outputs"))
FIELDS = (*LISTS, *_REPLIES.values(), *(name for pair in _PAIRS for name in pair), "inputs", "history")
"""Every field from which a conversation may be read."""
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant",
          "system": "system", "developer": "system", "tool": "tool", "observation": "tool", "function_call": "call"}
_MEDIA = {"image": "image", "image_url": "image", "input_image": "image", "video": "video", "video_url": "video",
          "input_video": "video"}
"""Maps the type of a content part to "image" or "video"."""
_TEXTS = ("text", "input_text", "output_text")
_FOLLOWS = {None: ("user",), "user": ("assistant", "call"), "assistant": ("user",), "call": ("tool",),
            "tool": ("tool", "assistant", "call"), "system": ()}
"""Maps the role of a turn to the allowed roles of the next turn."""
_NAMES = {"user": "a user", "assistant": "the assistant", "call": "the assistant, a call,",
          "tool": "a tool", "system": "the system"}
_OPTIONS = ("detail", "fps", "max_pixels", "min_pixels", "nframes", "resized_height", "resized_width")
_TIMES = {"fps": "fps", "sample_fps": "fps", "times": "frame_times", "timestamps": "frame_times",
          "frame_times": "frame_times"}
"""Maps keys of a content part that give frame times to fields of the row. If several keys of a part stand for the same
field, the last one is used."""
_MARK = re.compile(r"<(?:image|video)>")
_QWEN = re.compile(r"<img>([^<>\n]{1,1000})</img>")
"""Matches an image named inside a text in Qwen-VL's notation."""
_SWIFT = re.compile(r"<(?:bbox|ref-object)>")


@dataclass(frozen=True)
class Conversation:
    """A conversation up to the answer that is trained on. Its texts contain <image> and <video> placeholders."""

    question: str = ""
    answer: str = ""
    """The assistant's answer to the question; empty if there is none."""
    system: str = ""
    turns: tuple[dict[str, Any], ...] = ()
    """Turns before the question: {"role", "content"} each, and `tool_calls` for a tool call."""
    media: Mapping[str, list[Any]] = field(default_factory=dict)
    """Paths or bytes of the media in turns, under the keys `images` and `videos`."""
    times: Mapping[str, Any] = field(default_factory=dict)
    """`fps` or `frame_times` of a video given as frames."""


def conversation_of(record: Record) -> Conversation | None:
    """Returns the conversation of a record; None if it has none. Raises DataError if two fields hold different
    conversations, and for the reasons given in `read_turns`."""
    conversations = {name: turns for name in conversation_fields(record)
                     if (turns := _list_under(record, name)) is not None}
    if len(conversations) > 1 and any(turns != next(iter(conversations.values())) for turns in conversations.values()):
        first, other = list(conversations)[:2]
        raise DataError(f"{first!r} and {other!r} each hold a conversation, and they differ: choose one "
                        f"with --columns (data.columns) {first}={first} or {first}={other}")
    if conversations:
        name, turns = next(iter(conversations.items()))
        return read_turns(turns, prompt=name in _REPLIES and not has(record, _REPLIES[name]))
    return read_turns(_turns_of_fields(record)) if conversation_fields(record) else None


def conversation_fields(record: Record) -> list[str]:
    """Returns the names of the fields that hold a conversation as a list of turns.

    If the record has no such field, returns the name of the field with the question, if its answer is in the field that
    belongs to it: `query` with `response` (ms-swift) or `instruction` with `output` (LLaMA-Factory)."""
    lists = [name for name in LISTS if _list_under(record, name) is not None]
    return lists or [question for question, _ in _pairs(record)]


def _pairs(record: Record) -> list[tuple[str, str]]:
    return [pair for pair in _PAIRS if all(isinstance(record.get(name), str) for name in pair)][:1]


def _list_under(record: Record, name: str) -> list[Any] | None:
    turns = pick(record, name)
    if not isinstance(turns, list) or not turns:
        return None
    keys = _TURN_KEYS.get(name)
    if keys and not all(isinstance(turn, Mapping) and turn.keys() & keys for turn in turns):
        return None
    if name == "texts":
        return [{"role": role, "content": turn.get(role)} for turn in turns for role in ("user", "assistant")]
    reply = pick(record, _REPLIES[name]) if name in _REPLIES else None
    reply = [{"role": "assistant", "content": reply}] if isinstance(reply, str) else reply
    return [*turns, *(reply or ())]


def _turns_of_fields(record: Record) -> list[Row]:
    ((question, answer),) = _pairs(record)
    asks = [record[question], *(record[name] for name in ("input", "inputs") if isinstance(record.get(name), str))]
    said = pick(record, "history") or []
    if not isinstance(said, list) or not all(isinstance(pair, (list, tuple)) and len(pair) == 2 for pair in said):
        raise DataError(f"history={short(said)} must be a list of [question, answer] pairs")
    pairs = [*said, ("\n".join(filter(None, asks)), record[answer])]
    return [{"role": role, "content": words} for pair in pairs
            for role, words in zip(("user", "assistant"), pair, strict=True)]


def read_reply(turns: Any) -> Conversation:
    """Reads a response that is written as a list of turns, and returns it as a Conversation. The list may contain the
    entire conversation or only the assistant's turns."""
    first = turns[0] if isinstance(turns, list) and turns else None
    who = first.get("from") or first.get("role") if isinstance(first, Mapping) else None
    return read_turns(turns, before="user" if _ROLES.get(str(who)) == "assistant" else None)


def read_turns(turns: Any, *, prompt: bool = False, before: str | None = None) -> Conversation:
    """Returns a list of turns as a Conversation. The last turn of the assistant is the answer, and the user's turn
    before it is the question.

    The turns before the question become `Conversation.turns`. With prompt=True, the list must end with the question,
    and there is no answer. `before` is the role of the turn that precedes the list, if any.

    Raises DataError for unknown roles, turns that are empty or out of order, and content that is not text, image or
    video."""
    named: dict[str, list[Any]] = {"images": [], "videos": [], "times": []}
    said = [_turn(turn, named) for turn in turns] if isinstance(turns, (list, tuple)) else []
    heads = next((n for n, turn in enumerate(said) if turn["role"] != "system"), len(said))
    system = "\n\n".join(filter(None, (turn["content"] for turn in said[:heads])))
    if _MARK.search(system):
        raise DataError(f"the system prompt {short(system)} has a placeholder for media, but only a turn can show "
                        "media: move the placeholder to the question")
    said = said[heads:]
    for turn in said:
        if turn["role"] not in _FOLLOWS[before]:
            after = f"after one of {_NAMES[before]}" if before else "at its beginning"
            raise DataError(f"the conversation has a turn of {_NAMES[turn['role']]} {after}: "
                            f"{short(turn['content'])}. After the system prompt, turns of the user and of the "
                            "assistant must alternate, the user first")
        before = turn["role"]
    if before == "assistant" and prompt:
        raise DataError("the prompt ends with a turn of the assistant, but must end with the question")
    answer = said.pop()["content"] if before == "assistant" else ""
    if said and said[-1]["role"] != "user":
        raise DataError("tool calls stand between the last question and the answer, but are only allowed before the "
                        "question")
    question = said.pop()["content"] if said else ""
    for empty in (turn for turn in said if not turn["content"] and turn["role"] in ("user", "assistant")):
        raise DataError(f"a turn of {_NAMES[empty['role']]} before the question is empty: remove this turn, or add "
                        "its text")
    times = {name: value for video in named.pop("times") for name, value in video.items()}
    return Conversation(question, answer, system, tuple(
        {**turn, "role": "assistant"} if turn["role"] == "call" else turn for turn in said), _named_media(named), times)


def _named_media(named: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Returns the media paths that `_turn` has collected in `named`, under the keys "images" and "videos". Returns {}
    if the content parts have no paths, because other fields of the record then name the media."""
    given = [path for paths in named.values() for path in paths]
    if any(path is None for path in given) and any(path is not None for path in given):
        raise DataError("some images or videos of the conversation have a path and some have none: give each "
                        "of them a path")
    return {} if None in given else {kind: paths for kind, paths in named.items() if paths}


def _turn(turn: Any, named: dict[str, list[Any]]) -> dict[str, Any]:
    """Returns role, content and tool calls of a turn; appends the paths of its media to the lists in `named`."""
    if not isinstance(turn, Mapping):
        raise DataError(f"the turn {short(turn)} of the conversation must be an object")
    who = turn.get("from") or turn.get("role")
    role = _ROLES.get(str(who))
    if role is None:
        raise DataError(f"the conversation has a turn with the role {short(who)}; known roles: "
                        f"{', '.join(dict.fromkeys(_ROLES))}")
    content = _text_of(turn, named).strip()
    if unfilled := _SWIFT.search(content):
        raise DataError(f"the turn {short(content)} holds {unfilled[0]}, which ms-swift fills in from `objects`: write "
                        "the name, or the box in pixels, instead")
    calls = unpacked(content) if role == "call" else pick(turn, "tool_calls")
    if not calls:
        return {"role": role, "content": content}
    several = calls if isinstance(calls, list) else [calls]
    return {"role": "call", "content": "" if role == "call" else content, "tool_calls": [_call(c) for c in several]}


def _call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    arguments = unpacked(function.get("arguments")) if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not isinstance(
            arguments, Mapping):
        raise DataError(f"the tool call {short(call)} must have the name of a tool, and arguments that are an object")
    return {"type": "function", "function": {"name": function["name"], "arguments": dict(arguments)}}


def _text_of(turn: Record, named: dict[str, list[Any]]) -> str:
    """Returns the text of a turn, with a placeholder for each image or video in its content; appends their paths to the
    lists in `named`."""
    words = turn.get("value") if turn.get("value") is not None else turn.get("content")
    if isinstance(words, list):
        return "".join(_part(part, named) for part in words)
    if isinstance(words, str):
        return _QWEN.sub(lambda mark: _named_in_text(mark[1], named), words)
    return json.dumps(words) if isinstance(words, Mapping) else "" if words is None else str(words)


def _named_in_text(path: str, named: dict[str, list[Any]]) -> str:
    named["images"].append(path.strip())
    return "<image>"


def _part(part: Any, named: dict[str, list[Any]]) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _MEDIA:
        path = _path(part)
        times = _TIMES if isinstance(path, list) else {}  # a list of frames
        named["times"].append({field: part[name] for name, field in times.items() if part.get(name) is not None})
        _warn_unread(tuple(sorted(name for name in _OPTIONS if part.get(name) is not None and name not in times)))
        named[f"{_MEDIA[kind]}s"].append(path)
        return f"<{_MEDIA[kind]}>"
    if kind not in (*_TEXTS, None) or not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise DataError(f"the part {short(part)} of the conversation is not text, image or video")
    return part["text"]


def _path(part: Record) -> Any:
    location = pick(part, *_MEDIA, "path", "url")
    if isinstance(location, Mapping) and not location.get("bytes"):
        location = pick(location, "url", "path")
    if location is None and part.get("file_id"):
        raise DataError(f"the part {short(part)} names a file stored at OpenAI: give the path of a local file")
    return location


@cache
def _warn_unread(names: tuple[str, ...]) -> None:
    if names:
        log.warning("%s of images and videos in conversations are ignored: model.max_pixels, model.min_pixels and "
                    "model.video_* apply to all media", ", ".join(names))
