"""Reads the question and media of a record, and matches media placeholders in texts with the media."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from vlrl.data.embedded import video_items
from vlrl.data.formats.conversations import Conversation, conversation_of
from vlrl.data.formats.times import clip
from vlrl.data.sources.fields import IMAGE, VIDEO, RecordSource, has, image_value, media, pick
from vlrl.data.values import number, short
from vlrl.errors import DataError
from vlrl.types import Record

_MARK = re.compile(r"<(image|video|audio)(?:[ _]?(\d{1,2}))?>")
_LEADING = re.compile(rf"(?:\s*{_MARK.pattern})+\s*")


def checked_conversation(record: Record) -> Conversation | None:
    """Returns the conversation of a record. Raises DataError if a separate field asks a different question."""
    conversation = conversation_of(record)
    for name in ("question", "problem", "query"):
        own = record.get(name)
        if conversation is None or not conversation.question:
            break
        if isinstance(own, str) and without_marks(own) not in without_marks(conversation.question):
            raise DataError(f"the field {name!r} asks {short(own)}, but the conversation asks "
                            f"{short(conversation.question)}: set --columns (data.columns) question={name}, or remove "
                            "one of the two questions")
    return conversation


def system_prompt(record: Record, conversation: Conversation | None) -> dict[str, str]:
    """Returns {"system_prompt": ...} from the conversation or from the field `system`; {} if there is no system prompt.
    Raises DataError if conversation and field have different system prompts."""
    turn_prompt, beside = conversation.system if conversation else "", record.get("system")
    beside = beside.strip() if isinstance(beside, str) else ""
    if turn_prompt and beside and turn_prompt != beside:
        raise DataError(f"the system prompt is {short(turn_prompt)} in the conversation, but {short(beside)} in the "
                        "field 'system': remove one of the two")
    return {"system_prompt": turn_prompt or beside} if turn_prompt or beside else {}


def context_turns(conversation: Conversation | None, media: Record) -> dict[str, Any]:
    """Returns {"turns": ...} with the conversation's turns before the question; {} if there are none. `media` are the
    media fields of the row. Only needed by formats that do not read the question with `question_fields`."""
    if not conversation or not conversation.turns:
        return {}
    return {"turns": question_fields(conversation.question, media, (), conversation.turns)["turns"]}


def with_media(record: Record, conversation: Conversation) -> Record:
    """Returns the record with the media that its conversation names. Raises DataError if fields of the record name
    other media."""
    if not conversation.media:
        return record
    given = pick(record, *IMAGE) if has(record, *IMAGE) else pick(record, *VIDEO)
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    named = [without_scheme(image_value(path)) for paths in conversation.media.values() for path in paths]
    if given is not None and [without_scheme(image_value(one)) for one in several] != named:
        raise DataError(f"the conversation names the media {short(named)}, but a separate field names {short(given)}: "
                        "remove one of the two")
    for name, own in conversation.times.items():
        if (beside := pick(record, name)) is not None and beside != own:
            raise DataError(f"the conversation says {name}={short(own)} for a video, but a separate field says "
                            f"{short(beside)}: remove one of the two")
    rest = {k: v for k, v in record.items() if k not in (*IMAGE, *VIDEO)}
    return {**rest, **conversation.media, **conversation.times}


def without_scheme(path: Any) -> Any:
    """Returns a path without the file:// prefix that Qwen's messages use."""
    return path.removeprefix("file://") if isinstance(path, str) else path


def without_marks(text: str) -> str:
    """Returns a text without media placeholders."""
    return re.sub(r"[ \t]{2,}", " ", _MARK.sub(" ", _LEADING.sub("", text, count=1))).strip()


def question_fields(question: str, media: Record, options: Sequence[str] = (),
                    turns: Sequence[Record] = ()) -> dict[str, Any]:
    """Returns the fields `question`, `options` and `turns` of a row, with media placeholders that match `media`.

    If there are no turns, placeholders at the beginning of the question are removed, because media are shown first
    anyway. All other placeholders become <image> or <video>, one per image or video. Media without a placeholder are
    shown before the first turn.

    Numbered placeholders (MMMU's <image 2>) that do not name all images once and in order become words ("image 2").
    Raises DataError if placeholders and media do not match."""
    images = media["images"] if "images" in media else [media["image"]] if "image" in media else ()
    kinds = [*["image"] * len(images), *["video"] * (media.get("video") is not None)]
    texts = [*(str(turn["content"]) for turn in turns), question]
    marks = _MARK.findall("\n".join([*texts, *options]))
    choices = {"options": list(options)} if options else {}
    if any(kind == "audio" for kind, _ in marks):
        raise DataError(f"the question {short(question)} is about audio, which rows do not support")
    numbers = [int(n) for _, n in marks if n]
    if not numbers and (shows := next((o for o in options if _MARK.search(o)), None)):
        raise DataError(f"the option {short(shows)} is an image, but options must be strings")
    if numbers and max(numbers) > len(kinds):
        raise DataError(f"the text refers to image {max(numbers)}, but the record has only {len(kinds)} "
                        "images and videos")
    in_order = numbers == list(range(1, len(kinds) + 1)) == list(range(1, len(marks) + 1))
    if numbers and (not in_order or _MARK.search("\n".join(options))):
        texts = [_in_words(text) for text in texts]
        choices = {k: [_in_words(v) for v in values] for k, values in choices.items()}
    *before, question = _placed(texts, kinds)
    said = {"turns": [{**turn, "content": text} for turn, text in zip(turns, before, strict=True)]} if turns else {}
    return {**said, "question": question, **choices}


def _placed(texts: Sequence[str], media_kinds: Sequence[str]) -> list[str]:
    """Returns the texts with exactly one placeholder for each entry of `media_kinds` ("image" or "video"). If there is
    only one text, and all its placeholders are at its beginning, the returned text has no placeholders. Raises
    DataError if placeholders and media do not match."""
    marks = [mark[1] for text in texts for mark in _MARK.finditer(text)]
    first = _LEADING.match(texts[0])
    leading = [mark[1] for mark in _MARK.finditer(first[0])] if first else []
    if len(marks) < len(media_kinds) and marks == leading:  # leading placeholders stand for all media
        marks = leading = list(media_kinds)
        texts = ["".join(f"<{kind}>" for kind in media_kinds) + _LEADING.sub("", texts[0], count=1), *texts[1:]]
    if len(marks) != len(media_kinds):
        raise DataError(f"the text has placeholders for {len(marks)} images or videos, but the record has "
                        f"{len(media_kinds)}: {short(texts[-1])}")
    if sorted(marks) != sorted(media_kinds):
        if len(set(media_kinds)) > 1:
            raise DataError(f"the text has placeholders for {', '.join(marks)}, but the record has "
                            f"{', '.join(media_kinds)}")
        texts, marks = [_MARK.sub(f"<{media_kinds[0]}>", text) for text in texts], list(media_kinds)
    if len(texts) == 1 and len(leading) == len(media_kinds) and marks == list(media_kinds):
        return [_LEADING.sub("", texts[0], count=1).strip()]
    return [_trimmed(_MARK.sub(r"<\1>", text)) for text in texts]


def _trimmed(text: str) -> str:
    """Strips a text, and the space after its placeholders if all placeholders are at the beginning."""
    match = _LEADING.match(text)
    if not match or _MARK.search(text[match.end():]):
        return text.strip()
    return "".join(match[0].split()) + text[match.end():].strip()


def _in_words(text: str) -> str:
    return _MARK.sub(lambda mark: f"{mark[1]} {mark[2]}".strip(), text).strip()


def media_fields(record: Record, source: RecordSource, *, needed: bool = True) -> dict[str, Any]:
    """Returns the media fields of a row: `video` with its start and end, `image` or `images`; {} if the record has no
    media.

    Images may also be in numbered fields (image_1, image_2 ...) or be named by `image_id`. With `needed`, raises
    DataError for a record without media."""
    shown_media: dict[str, Any] = {}
    video = pick(record, *VIDEO)
    if isinstance(video, (list, tuple)):
        clips = video_items(video) if len(video) > 1 else video
        if len(clips) > 1:
            raise DataError(f"the row names {len(clips)} videos, but a row can show only one")
        video = clips[0] if clips else None
    if video is not None:
        path = source.video(image_value(video))
        shown_media = {"video": path, **clip(record, path, None, source.duration)}
        if isinstance(path, list):  # a file has its own timestamps
            shown_media |= _frame_times(record)
    given = [v for v in (record.get(f"image_{n}") for n in range(1, 10)) if v is not None and v != ""]
    given = given if given and not has(record, *IMAGE) else pick(record, *IMAGE)
    if given in (None, [], ()) and not shown_media:
        given = source.image(id := pick(record, *_IDS))
        if given is None and id is not None:
            raise DataError(f"image_id={short(id)} must be a string or an integer: the id of an image")
    if given not in (None, [], ()):
        shown_media |= media({"images": given}, source)
    if not shown_media and needed:
        raise DataError(f"no field holds the path of an image or a video; known names: {', '.join((*IMAGE, *VIDEO))}")
    return shown_media



def _frame_times(record: Record) -> dict[str, Any]:
    rate = {"fps": number(record["fps"])} if has(record, "fps") else {}
    times = pick(record, "frame_times")
    if isinstance(times, (list, tuple)):
        times = [value if number(value) is None else number(value) for value in times]
    return rate if times is None else {**rate, "frame_times": times}


_IDS = ("image_id", "imageId", "img_id")
"""Fields with the id of an image, which is also its file name."""

