"""Converts records of video data to canonical rows: Video-R1, SEED-Bench-R1, Time-R1, TVGBench, Charades-STA,
ActivityNet captions, NExT-GQA, VideoChat-R1, GOT-10k, video classification.

Times are seconds from the start of the displayed clip: from `video_start`, or else from the beginning of the file."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

from vlrl.data.formats.choices import (
    INDICES,
    LETTERED,
    OPTIONS,
    answer_fields,
    answer_text,
    letter_at,
    option_letter,
    options_of,
)
from vlrl.data.formats.questions import media_fields, question_fields
from vlrl.data.formats.times import clip, interval, intervals, seconds
from vlrl.data.sources.answer_types import TYPES, stated_type
from vlrl.data.sources.fields import VIDEO, RecordSource, has, image_value, meta, numbers, pick, record_id, text
from vlrl.data.values import are_shares, number, scaled, short, unpacked, xywh
from vlrl.errors import DataError
from vlrl.rewards.literals import read_literal
from vlrl.types import Record, Row

_NEGATIVES = 3
_MOMENTS = ("timestamp", "timestamps", "span", "relevant_windows")
_TRACKED = 8
"""Number of frames in a tracking row, as in VideoChat-R1."""
_SPAN = re.compile(r"\s*([\d.:]+)\s*(?:-|–|to)\s*([\d.:]+)\s*")
_CLEAR = re.compile(r"[.:]\d")  # "3.1-7.5" are times; "2-5" may be a score, unless the record has a duration
_ONE_OF = re.compile(r"(?:from|of|among|between|:)\s*(\[[^\[\]]{3,2000}\])")


def _video(record: Record, source: RecordSource, *names: str) -> Any:
    given = image_value(pick(record, *names))
    if isinstance(given, bytes):
        return given
    if not isinstance(given, str):
        raise DataError(f"the path of a video is missing: no field {' or '.join(repr(n) for n in names)}")
    path = source.video(given)
    return path[2:] if path.startswith("./") else path


def _length(record: Record) -> dict[str, float]:
    given = pick(record, "duration", "video_duration", "durations", "length")
    given = given[0] if isinstance(given, list) and given else given
    return {} if given is None else {"duration": seconds(given, "duration")}


def is_video_r1(record: Record) -> bool:
    kind = str(record.get("problem_type") or "").lower()
    return has(record, "problem") and has(record, "path", *VIDEO, "image", "images") and (
        has(record, "data_type") or kind in TYPES)


def video_r1(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of Video-R1 (2503.21776): a video or an image (`data_type`), a `problem`, and a `solution`
    whose type is in `problem_type`."""
    kind = str(record.get("data_type") or "video").lower()
    if kind not in ("video", "image"):
        raise DataError(f"data_type={short(record['data_type'])} must be 'video' or 'image'")
    question = text(record, "problem")
    path = pick(record, "path")
    times = {name: record[name] for name in ("fps", "frame_times") if name in record}
    media = media_fields(record if path is None else {kind: path, **times}, source)
    media = {k: v[2:] if isinstance(v, str) and v.startswith("./") else v for k, v in media.items()}
    problem_type = record.get("problem_type")
    if problem_type is not None and str(problem_type).strip().lower() not in TYPES:
        raise DataError(f"problem_type={short(problem_type)} is not one of: {', '.join(TYPES)}")
    options = options_of(record)
    row = {**answer_fields(pick(record, "solution", "answer"), options, question, stated_type(record)),
           **question_fields(question, media, options)}
    about = {"source": record["data_source"]} if isinstance(record.get("data_source"), str) else {}
    return [{"id": record_id(record, source, "problem_id"), **media, **row, **_length(record),
             **about, **meta(record, *"problem_id problem data_type problem_type options solution answer path "
                             "data_source duration".split(), *VIDEO)}]


def seed_bench_r1(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of SEED-Bench-R1 (2503.24376) to a row with the video of the task so far (if any), the current
    frame, and four options.

    For training rows, three of `negative_answers` are selected; selection and order are random but fixed by the row's
    id. Validation rows keep choice_a to choice_d in order. Media files are expected as in the release, in
    `videos/<video_source>/` and `images/<video_source>/`. The row's `category` is the record's `task_level` or `level`.
    """
    id = record_id(record, source, "sample_id")
    draw = random.Random(f"vlrl/seed_bench_r1/{id}")
    golden = pick(record, *INDICES)
    if has(record, "choice_a"):
        options = options_of(record)
        right = option_letter(record.get("answer"), options) if golden is None else letter_at(golden, options)
    else:
        answer, wrong = text(record, "answer"), pick(record, "negative_answers")
        if not isinstance(wrong, list) or not all(isinstance(v, str) and v.strip() for v in wrong):
            raise DataError(f"negative_answers={short(wrong)} must be a list of strings")
        wrong = sorted({v.strip() for v in wrong} - {answer})
        if not wrong:
            raise DataError("negative_answers must have an answer that differs from the correct one")
        options = [answer, *draw.sample(wrong, min(_NEGATIVES, len(wrong)))]
        draw.shuffle(options)
        right = chr(ord("A") + options.index(answer))
    where = str(record.get("video_source") or "")
    media = {}
    if record.get("task_progress_metadata") not in (None, [], "", "[]") and has(record, "video_basename"):
        media["video"] = source.video("/".join(filter(None, ("videos", where, text(record, "video_basename")))))
    if has(record, "current_observation_basename"):
        media["image"] = "/".join(filter(None, ("images", where, text(record, "current_observation_basename"))))
    if not media:
        raise DataError("the name of a media file is missing: no field 'video_basename' or "
                        "'current_observation_basename'")
    level = pick(record, "task_level", "level")
    group = {"group_key": str(record["video_id"])} if has(record, "video_id") else {}
    return [{"id": id, **media, "question": text(record, "question"), "options": options, "answer": right,
             "answer_type": "choice", **({"category": str(level)} if level else {}), **group,
             **({"source": where} if where else {}),
             **meta(record, *"sample_id question answer negative_answers video_basename current_observation_basename "
                    "task_level level video_source".split(), *INDICES, *LETTERED, *VIDEO)}]


def is_time_r1(record: Record) -> bool:
    return has(record, *VIDEO) and has(record, *_MOMENTS) and has(
        record, "sentence", "query", "caption", "description")


def time_r1(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of Time-R1 (2503.13377): `timestamp` is [start, end] in seconds from the start of the clip. The
    row's `difficulty` is 1 minus the tIoU (overlap) of the base model, which the record states as a percentage."""
    row = _grounded(record, source, _video(record, source, *VIDEO),
                    text(record, "sentence", "query", "caption", "description"),
                    pick(record, *_MOMENTS))
    percent = number(record.get("difficulty"))
    if percent is not None and not 0 <= percent <= 100:
        raise DataError(f"difficulty={short(record['difficulty'])} must be a tIoU in percent, 0 to 100")
    hard = {} if percent is None else {"difficulty": round(1 - percent / 100, 6)}
    own = re.fullmatch(r"[^|]*\|([^|]+)\|.*", str(record.get("qid") or ""), re.DOTALL)
    about = {"source": own[1]} if own else {}
    return [{"id": record_id(record, source, "qid"), **row, **hard, **about,
             **meta(record, *"qid sentence query caption description duration video_start video_end difficulty"
                    .split(), *_MOMENTS, *VIDEO)}]


def is_tvgbench(record: Record) -> bool:
    if not (has(record, "path", *VIDEO) and has(record, "question")) or has(record, *OPTIONS):
        return False
    span = _SPAN.fullmatch(record["answer"]) if isinstance(record.get("answer"), str) else None
    clear = span and (has(record, "duration") or all(map(_CLEAR.search, span.groups())))
    return "grounding" in str(record.get("question_type")) or bool(clear)


def tvgbench(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of TVGBench: `answer` is "start-end" in seconds from the start of the clip. The clip is the
    part of the file from `start` to `end`."""
    row = _grounded(record, source, _video(record, source, "path", *VIDEO), text(record, "question"),
                    record.get("answer"))
    about = {"source": record.get("dataset_name"), "category": pick(record, "qsemtype")}
    return [{"id": record_id(record, source, "qid"), **row, **{k: v for k, v in about.items() if isinstance(v, str)},
             **meta(record, *"qid path question answer start end duration question_type source dataset_name qsemtype "
                    "video_start video_end".split(), *VIDEO)}]


def _grounded(record: Record, source: RecordSource, video: str, question: str, when: Any) -> dict[str, Any]:
    length = _length(record)
    part = clip(record, video, length.get("duration"), source.duration)
    if not length and not part and (whole := source.duration(video)):
        length = {"duration": round(whole, 3)}
    return {"video": video, **part, "question": question, "answer_type": "span", "spans": intervals(when, "timestamp"),
            **length}


def captions(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of Charades-STA (1705.02101) or ActivityNet captions (1705.00754) with all sentences of a video
    to one row per sentence, with the sentence's span.

    A file is `{video id: {"duration", "timestamps", "sentences"}}`. A row's video is the existing file named after the
    video id, or `<video id>.mp4` if there is none."""
    video = _video(record, source, *VIDEO) if has(record, *VIDEO) else source.video(source.id)
    times, said = record["timestamps"], unpacked(record["sentences"])
    if not isinstance(said, list):
        raise DataError(f"sentences={short(said)} must be a list of strings, one for each of the {len(times)} "
                        "timestamps")
    if len(times) != len(said) or not said:
        raise DataError(f"the row has {len(times)} timestamps and {len(said)} sentences, but needs one timestamp "
                        "per sentence")
    id = record_id(record, source)
    return [{"id": f"{id}-{n}" if len(said) > 1 else id, "video": video,
             "question": text({"sentences": s}, "sentences"), "answer_type": "span",
             "spans": [interval(when, "timestamps")], **_length(record), "group_key": str(id),
             **meta(record, "timestamps", "sentences", "duration", *VIDEO)}
            for n, (when, s) in enumerate(zip(times, said, strict=True), 1)]


def is_next_gqa(record: Record) -> bool:
    return has(record, *VIDEO) and has(record, *OPTIONS, "a0") and (has(record, "glue") or _glued(record) is not None)


def next_gqa(record: Record, source: RecordSource) -> list[Row]:
    """Converts a question of NExT-GQA (2309.01327) with options and `glue`, the intervals of the video that show the
    answer. In VideoChat-R1 (2504.06958), `solution` holds the answer and `glue`."""
    solution = _glued(record) or {"answer": pick(record, "answer"), "glue": record.get("glue")}
    options, glue = options_of(record), pick(solution, "glue")
    question = text(record, "question", "problem")
    part = clip(record, video := _video(record, source, *VIDEO), _length(record).get("duration"), source.duration)
    kind = record.get("type")
    return [{"id": record_id(record, source, "qid"), "video": video, **part, "question": question, "options": options,
             "answer": option_letter(solution.get("answer"), options), "answer_type": "span+choice",
             "spans": intervals(glue, "glue") if glue else [], **_length(record),
             **({"category": kind} if isinstance(kind, str) else {}),
             **meta(record, *"question problem answer glue solution duration video_duration durations type qid a0 a1 "
                    "a2 a3 a4 video_start video_end".split(), *OPTIONS, *VIDEO)}]


def _glued(record: Record) -> Record | None:
    solution = pick(record, "solution")
    return solution if isinstance(solution, Mapping) and "glue" in solution else None


def is_videochat_span(record: Record) -> bool:
    """Whether a record has the fields of temporal grounding in VideoChat-R1: a video, a `problem`, and a `solution`
    [start, end]."""
    solution = pick(record, "solution")
    return has(record, *VIDEO) and has(record, "problem") and isinstance(solution, list) and len(solution) == 2 and all(
        number(v) is not None for v in solution)


def videochat_span(record: Record, source: RecordSource) -> list[Row]:
    row = _grounded(record, source, _video(record, source, *VIDEO), text(record, "problem"), pick(record, "solution"))
    return [{"id": record_id(record, source, "qid"), **row, **meta(
        record, *"problem solution duration durations video_duration video_start video_end".split(), *VIDEO)}]


def got10k(record: Record, source: RecordSource) -> list[Row]:
    """Converts a tracked object of GOT-10k (1810.11981). In one layout, `gt` has a box as fractions of the image for
    each of some frames, spread evenly over the sequence. In the layout of GOT-10k's own annotations, `boxes_xywh` has
    [x, y, width, height] in pixels for every frame, of which evenly spread ones are selected. If the folder of frames
    exists, the row shows these frames; else the row's `video` is the path of the folder. If no frame gives the image's
    size, the row keeps the fractions and states the size 1 x 1."""
    folder = source.path(text(record, "path", *VIDEO)).rstrip("/")
    frames, boxes = source.frames(folder), _boxes(record)
    several = len(frames) if frames else len(boxes)
    if len(boxes) == len(frames) > _TRACKED:
        boxes = [boxes[n] for n in _spread(_TRACKED, len(boxes))]
    chosen = [frames[n] for n in _spread(len(boxes), several)] if len(frames) >= len(boxes) else []
    size = source.size(chosen[0]) if chosen else None
    shares = all(are_shares(box) for box in boxes)
    full = size or ((1, 1) if shares else None)
    if full is None:
        raise DataError(f"the boxes are in pixels, but no frame in {short(folder)} gives the image size: "
                        "add the frames")
    boxes = [[min(max(v, 0), full[i % 2]) for i, v in enumerate(
        scaled(box, full, 1, "gt") if shares and size else box)] for box in boxes]
    object = text(record, "object", "label")
    media = {"images": chosen} if chosen else {"video": folder}
    return [{"id": record_id(record, RecordSource(folder.rpartition("/")[2] or source.id)), **media, "width": full[0],
             "height": full[1], "question": object, "answer_type": "track", **_length(record),
             "tracks": [{"label": object, "boxes": boxes}],
             **meta(record, "path", "object", "label", "gt", "boxes_xywh", "duration", *VIDEO)}]


def _boxes(record: Record) -> list[list[float]]:
    given = pick(record, "gt", "boxes_xywh")
    boxes = [numbers(box, (4,), "gt") for box in given]
    if not boxes:
        raise DataError("gt (or boxes_xywh) has no box")
    return boxes if has(record, "gt") else [xywh(box) for box in boxes]


def _spread(count: int, among: int) -> list[int]:
    return [round(n * (among - 1) / max(1, count - 1)) for n in range(count)]


def clip_class(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of VideoChat-R1's video quality data: the instruction lists classes, and the answer is one of
    the classes."""
    question, answer = text(record, "instruction"), answer_text(text(record, "answer"))
    classes = next((names for m in _ONE_OF.finditer(question) if isinstance(names := read_literal(m[1]), list)), [])
    answer = next((v for v in classes if isinstance(v, str) and v.strip().lower() == answer.lower()), answer)
    labels = {"labels": [str(v) for v in classes]} if answer in map(str, classes) else {}
    if not labels and len(classes) > 1 and all(isinstance(v, str) for v in classes):
        raise DataError(f"answer={short(answer)} is not one of the classes that the instruction lists: "
                        f"{short(classes)}")
    return [{"id": record_id(record, source, "qid"), "video": _video(record, source, *VIDEO), "question": question,
             "answer": answer, "answer_type": "text", **labels, **_length(record),
             **meta(record, "instruction", "answer", "duration", *VIDEO)}]
