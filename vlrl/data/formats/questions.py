"""What a record asks and shows: marks that say where media stand in a text, and the media themselves."""

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


# --- what stands beside a conversation --------------------------------------------------------------------------------


def checked_conversation(record: Record) -> Conversation | None:
    """Returns the conversation of a record. Raises DataError where a field beside it asks something else."""
    said = conversation_of(record)
    for name in ("question", "problem", "query"):
        own = record.get(name)
        if said is None or not said.question:
            break
        if isinstance(own, str) and without_marks(own) not in without_marks(said.question):
            raise DataError(f"the field {name!r} asks {short(own)}, and its conversation {short(said.question)}: which "
                            f"one is meant? Say it with --columns (data.columns) question={name}, or leave it out")
    return said


def system_prompt(record: Record, said: Conversation | None) -> dict[str, str]:
    """Returns the row's `system_prompt`: that of the conversation, or of the field that stands beside it. Raises
    DataError where both speak and differ.
    """
    own, beside = said.system if said else "", record.get("system")
    beside = beside.strip() if isinstance(beside, str) else ""
    if own and beside and own != beside:
        raise DataError(f"the system says {short(own)} in its conversation and {short(beside)} in the field 'system': "
                        "leave one out")
    return {"system_prompt": own or beside} if own or beside else {}


def context_turns(said: Conversation | None, media: Record) -> dict[str, Any]:
    """Returns the row's `turns` before the question, where its own words are not the question's."""
    return {"turns": question_fields(said.question, media, (), said.turns)["turns"]} if said and said.turns else {}


def with_media(record: Record, said: Conversation) -> Record:
    """Returns the record with the media that its conversation names. Raises DataError where fields name others."""
    if not said.media:
        return record
    given = pick(record, *IMAGE) if has(record, *IMAGE) else pick(record, *VIDEO)
    several = list(given) if isinstance(given, (list, tuple)) else [given]
    named = [without_scheme(image_value(path)) for paths in said.media.values() for path in paths]
    if given is not None and [without_scheme(image_value(one)) for one in several] != named:
        raise DataError(f"its conversation names {short(named)} and a field beside it {short(given)}: which are shown? "
                        "Leave one out")
    for name, own in said.times.items():
        if (beside := pick(record, name)) is not None and beside != own:
            raise DataError(f"its conversation tells {name}={short(own)} of a video, and a field beside it "
                            f"{short(beside)}: leave one out")
    rest = {k: v for k, v in record.items() if k not in (*IMAGE, *VIDEO)}
    return {**rest, **said.media, **said.times}


def without_scheme(path: Any) -> Any:
    """Returns a path without the file:// in front that Qwen's messages have."""
    return path.removeprefix("file://") if isinstance(path, str) else path


# --- marks in a text --------------------------------------------------------------------------------------------------


def without_marks(text: str) -> str:
    """Returns a text without marks of media, for what is asked about one image whose place says nothing."""
    return re.sub(r"[ \t]{2,}", " ", _MARK.sub(" ", _LEADING.sub("", text, count=1))).strip()


def question_fields(question: str, media: Record, options: Sequence[str] = (),
                    turns: Sequence[Record] = ()) -> dict[str, Any]:
    """`question` of a row that shows `media`, its `options` and the `turns` before it, if any. Marks before the text of
    a question without turns are left out: media stand there anyway. Others stay, <image> or <video>, one for each of
    the media. Media that no turn marks stand before the first one.

    Numbered ones (MMMU's <image 2>) that do not name all images once and in order become words, "image 2".

    Raises DataError where the marks and the media do not fit together.
    """
    kinds = [*["image"] * len(_several(media)), *["video"] * (media.get("video") is not None)]
    texts = [*(str(turn["content"]) for turn in turns), question]
    marks = _MARK.findall("\n".join([*texts, *options]))
    choices = {"options": list(options)} if options else {}
    if any(kind == "audio" for kind, _ in marks):
        raise DataError(f"its question {short(question)} is about sound, which no row holds")
    numbers = [int(n) for _, n in marks if n]
    if not numbers and (shows := next((o for o in options if _MARK.search(o)), None)):
        raise DataError(f"its option {short(shows)} is an image, and options are texts")
    if numbers and max(numbers) > len(kinds):
        raise DataError(f"its text names the image {max(numbers)}, and the record has {len(kinds)}")
    in_order = numbers == list(range(1, len(kinds) + 1)) == list(range(1, len(marks) + 1))
    if numbers and (not in_order or _MARK.search("\n".join(options))):
        texts = [_in_words(text) for text in texts]
        choices = {k: [_in_words(v) for v in values] for k, values in choices.items()}
    *before, question = _placed(texts, kinds)
    said = {"turns": [{**turn, "content": text} for turn, text in zip(turns, before, strict=True)]} if turns else {}
    return {**said, "question": question, **choices}


def _placed(texts: Sequence[str], kinds: Sequence[str]) -> list[str]:
    """Returns the texts with a mark for each of the media; a single one without, where all stand before it."""
    marks = [mark[1] for text in texts for mark in _MARK.finditer(text)]
    first = _LEADING.match(texts[0])
    leading = [mark[1] for mark in _MARK.finditer(first[0])] if first else []
    if len(marks) < len(kinds) and marks == leading:  # fewer than there are stand for all
        marks = leading = list(kinds)
        texts = ["".join(f"<{kind}>" for kind in kinds) + _LEADING.sub("", texts[0], count=1), *texts[1:]]
    if len(marks) != len(kinds):
        raise DataError(f"its text marks the places of {len(marks)} images or videos, and the record has {len(kinds)}: "
                        f"{short(texts[-1])}")
    if sorted(marks) != sorted(kinds):
        if len(set(kinds)) > 1:
            raise DataError(f"its text marks {', '.join(marks)}, and the record has {', '.join(kinds)}")
        texts, marks = [_MARK.sub(f"<{kinds[0]}>", text) for text in texts], list(kinds)
    if len(texts) == 1 and len(leading) == len(kinds) and marks == list(kinds):
        return [_LEADING.sub("", texts[0], count=1).strip()]
    return [_trimmed(_MARK.sub(r"<\1>", text)) for text in texts]


def _trimmed(text: str) -> str:
    """Returns a text without space at its ends, and after its marks where all stand before it."""
    match = _LEADING.match(text)
    if not match or _MARK.search(text[match.end():]):
        return text.strip()
    return "".join(match[0].split()) + text[match.end():].strip()


def _in_words(text: str) -> str:
    return _MARK.sub(lambda mark: f"{mark[1]} {mark[2]}".strip(), text).strip()


def _several(media: Record) -> Sequence[Any]:
    return media["images"] if "images" in media else [media["image"]] if "image" in media else ()


# --- media ------------------------------------------------------------------------------------------------------------


def media_fields(record: Record, source: RecordSource, *, needed: bool = True) -> dict[str, Any]:
    """Returns what a question is about: `video` with the part of it that is shown, `image` or `images`; {} for a text
    alone, DataError where media are `needed`.

    Pictures may also be numbered fields, image_1, image_2 ..., or the id of an image (`image_id`).
    """
    shown_media: dict[str, Any] = {}
    video = pick(record, *VIDEO)
    if isinstance(video, (list, tuple)):
        clips = video_items(video) if len(video) > 1 else video
        if len(clips) > 1:
            raise DataError(f"it names {len(clips)} videos; a row shows one")
        video = clips[0] if clips else None
    if video is not None:
        path = source.video(image_value(video))
        shown_media = {"video": path, **clip(record, path, None, source.duration)}
        if isinstance(path, list):  # a file tells its own times
            shown_media |= _told_times(record)
    given = [v for v in (record.get(f"image_{n}") for n in range(1, 10)) if v is not None and v != ""]
    given = given if given and not has(record, *IMAGE) else pick(record, *IMAGE)
    if given in (None, [], ()) and not shown_media:
        given = source.image(id := pick(record, *_IDS))
        if given is None and id is not None:
            raise DataError(f"image_id={short(id)} must be the id of an image, a text or a whole number")
    if given not in (None, [], ()):
        shown_media |= media({"images": given}, source)
    if not shown_media and needed:
        raise DataError(f"no field with the path of an image or a video; known: {', '.join((*IMAGE, *VIDEO))}")
    return shown_media



def _told_times(record: Record) -> dict[str, Any]:
    """Returns the rate of the frames of a video, and the seconds of each, as far as they are told."""
    rate = {"fps": number(record["fps"])} if has(record, "fps") else {}
    times = pick(record, "frame_times")
    if isinstance(times, (list, tuple)):
        times = [value if number(value) is None else number(value) for value in times]
    return rate if times is None else {**rate, "frame_times": times}


_IDS = ("image_id", "imageId", "img_id")
"""Fields with the id of an image, which is the name of its file."""

