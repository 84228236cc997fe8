"""What a record asks and shows: conversations, marks that say where media stand in a text, and the media themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.formats.fields import IMAGE, VIDEO, Source, has, media, pick, picture, short
from vlrl.data.formats.times import clip
from vlrl.errors import DataError

Record = Mapping[str, Any]
_SPEAKERS = {"human": "question", "user": "question", "gpt": "answer", "assistant": "answer", "model": "answer",
             "system": "system"}
_MARK = re.compile(r"<(image|video|audio)(?:[ _]?(\d{1,2}))?>")
_LEADING = re.compile(rf"(?:\s*{_MARK.pattern})+\s*")
_PARTS = ("image", "image_url", "video", "video_url")
"""Types of content parts that are media."""


# --- conversations ----------------------------------------------------------------------------------------------------


def spoken(turns: Any) -> dict[str, str]:
    """Returns the question, the answer and the system prompt of a conversation, as far as it has them.

    Raises DataError where a row cannot hold it: several questions or answers, an answer before the question, or turns
    of anyone else.
    """
    said: dict[str, list[str]] = {"question": [], "answer": [], "system": []}
    for turn in turns if isinstance(turns, (list, tuple)) else ():
        if not isinstance(turn, Mapping):
            raise DataError(f"the turn {short(turn)} of its conversation must be an object")
        who = turn.get("from") or turn.get("role")
        if str(who) not in _SPEAKERS:
            raise DataError(f"its conversation has a turn of {short(who)}, where rows hold those of a user, an "
                            "assistant and the system")
        role = _SPEAKERS[str(who)]
        if role == "question" and said["answer"] and not said["question"]:
            raise DataError("its conversation begins with an answer")
        said[role].append(_words(turn))
    questions, answers = len(said["question"]), len(said["answer"])
    if questions > 1 or answers > 1:
        raise DataError(f"its conversation has {questions} questions and {answers} answers, where a row holds one of "
                        "each: write a record for each question, with all of it that the question refers to")
    return {role: "\n\n".join(words) for role, words in said.items() if words}


def system_prompt(record: Record, said: Mapping[str, str]) -> dict[str, str]:
    """Returns the row's `system_prompt`: that of the conversation, or of the field that stands beside it."""
    told = said.get("system") or record.get("system") or ""
    return {"system_prompt": told.strip()} if isinstance(told, str) and told.strip() else {}


def media_said(turns: Any) -> dict[str, list[Any]]:
    """Returns paths of media that stand in the content parts of a conversation, under `images` and `videos`."""
    parts = [part for turn in turns if isinstance(turn, Mapping) and isinstance(turn.get("content"), list)
             for part in turn["content"] if isinstance(part, Mapping)] if isinstance(turns, list) else []
    found = {"images": [_path(part) for part in parts if part.get("type") in _PARTS[:2]],
             "videos": [_path(part) for part in parts if part.get("type") in _PARTS[2:]]}
    return {kind: paths for kind, paths in found.items() if paths and None not in paths}


def _path(part: Record) -> Any:
    found = pick(part, *_PARTS, "path")
    found = pick(found, "url", "path") if isinstance(found, Mapping) and "bytes" not in found else found
    return found.removeprefix("file://") if isinstance(found, str) else found


def _words(turn: Record) -> str:
    """Returns the text of a turn; of content parts those of media are marks."""
    words = turn.get("value") if turn.get("value") is not None else turn.get("content")
    if isinstance(words, list):
        words = "\n".join(_part(part) for part in words)
    return json.dumps(words) if isinstance(words, Mapping) else "" if words is None else str(words)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _PARTS:
        return f"<{kind.removesuffix('_url')}>"
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise DataError(f"the part {short(part)} of its conversation is no text, image or video")
    return part["text"]


# --- marks in a text --------------------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Returns a text without marks of media, for what is asked about one image whose place says nothing."""
    return re.sub(r"[ \t]{2,}", " ", _MARK.sub(" ", _LEADING.sub("", text, count=1))).strip()


def asked(question: str, media: Record, options: Sequence[str] = ()) -> dict[str, Any]:
    """`question` of a row that shows `media`, and its `options`, if any. Marks before the text are left out: media
    stand there anyway. Others stay, <image> or <video>, one for each of the media.

    Numbered ones (MMMU's <image 2>) that do not name all images once and in order become words, "image 2".

    Raises DataError where the marks and the media do not fit together.
    """
    kinds = [*["image"] * len(_several(media)), *["video"] * ("video" in media)]
    marks = _MARK.findall("\n".join([question, *options]))
    told = {"options": list(options)} if options else {}
    if any(kind == "audio" for kind, _ in marks):
        raise DataError(f"its question {short(question)} is about sound, which no row holds")
    numbers = [int(n) for _, n in marks if n]
    if not numbers and (shows := next((o for o in options if _MARK.search(o)), None)):
        raise DataError(f"its option {short(shows)} is an image, and options are texts")
    if numbers and max(numbers) > len(kinds):
        raise DataError(f"its text names the image {max(numbers)}, and the record has {len(kinds)}")
    in_order = numbers == list(range(1, len(kinds) + 1)) == list(range(1, len(marks) + 1))
    if numbers and (not in_order or _MARK.search("\n".join(options))):
        return {"question": _in_words(question), **{k: [_in_words(v) for v in texts] for k, texts in told.items()}}
    return {"question": _placed(question, kinds, len(marks)), **told}


def _placed(question: str, kinds: Sequence[str], marks: int) -> str:
    """Returns the question with a mark for each of the media, or none where all stand before the text."""
    bare = _LEADING.sub("", question, count=1) if _LEADING.match(question) else question
    if not _MARK.search(bare) and marks <= len(kinds):
        return bare.strip()
    if marks != len(kinds):
        raise DataError(f"its text marks the places of {marks} images or videos, and the record has {len(kinds)}: "
                        f"{short(question)}")
    left = iter(kinds)
    return _MARK.sub(lambda _: f"<{next(left)}>", question).strip()


def _in_words(text: str) -> str:
    return _MARK.sub(lambda mark: f"{mark[1]} {mark[2]}".strip(), text).strip()


def _several(media: Record) -> Sequence[Any]:
    return media["images"] if "images" in media else [media["image"]] if "image" in media else ()


# --- media ------------------------------------------------------------------------------------------------------------


def shown(record: Record, source: Source, *, needed: bool = True) -> dict[str, Any]:
    """Returns what a question is about: `video` with the part of it that is shown, `image` or `images`; {} for a text
    alone, DataError where media are `needed`.

    Pictures may also be numbered fields, image_1, image_2 ..., or the id of an image (`image_id`).
    """
    found: dict[str, Any] = {}
    video = pick(record, *VIDEO)
    if isinstance(video, (list, tuple)):
        if len(video) > 1:
            raise DataError(f"it names {len(video)} videos; a row shows one")
        video = video[0] if video else None
    if video is not None:
        path = source.video(picture(video))
        found = {"video": path, **clip(record, path, None, source.duration)}
    given = [v for v in (record.get(f"image_{n}") for n in range(1, 10)) if v is not None and v != ""]
    given = given if given and not has(record, *IMAGE) else pick(record, *IMAGE)
    if given in (None, [], ()) and not found:
        given = source.image(id := pick(record, *_IDS))
        if given is None and id is not None:
            raise DataError(f"image_id={short(id)} must be the id of an image, a text or a whole number")
    if given not in (None, [], ()):
        found |= media({"images": given}, source)
    if not found and needed:
        raise DataError(f"no field with the path of an image or a video; known: {', '.join((*IMAGE, *VIDEO))}")
    return found


_IDS = ("image_id", "imageId", "img_id")
"""Fields with the id of an image, which is the name of its file."""

