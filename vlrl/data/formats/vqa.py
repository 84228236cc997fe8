"""Converts VQA data sets with several questions per record, or with answers in a special notation, to rows."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.formats.gui import screenspot
from vlrl.data.formats.qa import question_answer
from vlrl.data.formats.video import time_r1
from vlrl.data.sources.fields import IMAGE, RecordSource, has, meta, numbers, pick, record_id, text
from vlrl.data.values import are_shares, number, short
from vlrl.errors import DataError
from vlrl.types import Record, Row

_TRUTH = {"1": "yes", "true": "yes", "yes": "yes", "0": "no", "false": "no", "no": "no"}


def _yes_or_no(record: Record, *names: str) -> str:
    given = pick(record, *names)
    if (said := _TRUTH.get(str(given).strip().lower())) is None:
        raise DataError(f"{names[0]}={short(given)} must be true or false, 1 or 0")
    return said


def _without(record: Record, *names: str) -> dict[str, Any]:
    return {k: v for k, v in record.items() if k not in names}


def _question_rows(record: Record, source: RecordSource, questions: Sequence[Mapping[str, Any]], **of_all: Any
                   ) -> list[Row]:
    """Converts several questions about the same image to one row each. `of_all` are the fields that every question
    gets. A question without an id gets the record's id followed by a number."""
    id = record_id(record, source)
    return [row for n, asks in enumerate(questions, 1)
            for row in question_answer({**of_all, **asks, "id": asks.get("id", f"{id}-{n}")}, source)]


def _listed(record: Record, name: str) -> list[Any]:
    items = pick(record, name)
    if not isinstance(items, list) or not items:
        raise DataError(f"{name}={short(items)} must be a list that is not empty")
    return items


def is_statement(record: Record) -> bool:
    spatial = has(record, "caption", "relation") and has(record, "vote_true_validator_id") and "label" in record
    return spatial or (has(record, "left_image") and has(record, "right_image") and has(record, "question", "sentence"))


def statement(record: Record, source: RecordSource) -> list[Row]:
    """Converts a statement that is true or false to a yes/no question.

    VSR (2205.00363) has a statement about one image (`caption`, `label` 1 or 0), NLVR2 (1811.00491) about two
    (`left_image`, `right_image`)."""
    two = has(record, "left_image")
    said = text(record, "sentence", "question") if two else text(record, "caption")
    asks = f'Is this statement about the {"two images" if two else "image"} true? "{said}"'
    media = {"images": [record["left_image"], record["right_image"]]} if two else {}
    rest = _without(record, *"caption label answer sentence question left_image right_image image_link".split())
    return question_answer({**rest, **media, "question": asks, "answer": _yes_or_no(record, "label", "answer")}, source)


def hallusion(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of HallusionBench (2310.14566) to a yes/no question; `gt_answer` is 1 for yes and 0 for no.

    The row's id joins the category, subcategory, set, figure and question, because none of these alone is unique."""
    parts = ("category", "subcategory", "set_id", "figure_id", "question_id")
    id = "-".join(str(record[name]) for name in parts if has(record, name))
    image = record.get("filename")
    image = {"filename": image.removeprefix("./")} if isinstance(image, str) else {}
    rest = _without(record, "gt_answer", "filename", *parts[2:])
    answer = _yes_or_no(record, "gt_answer")
    return question_answer({**rest, **image, "id": id, "answer": answer, "answer_type": "yes_no"}, source)


def natural_bench(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of NaturalBench (2410.14669) to four rows: two questions about each of two images.

    All four rows have the same `group_key`, which keeps them in one split."""
    id = pick(record, "Index")
    id = source.id if id is None else id
    return _question_rows(record, source, [
        {"id": f"{id}-{image}{asks}", "image": record[f"Image_{image}"], "question": text(record, f"Question_{asks}"),
         "answer": text(record, f"Image_{image}_Question_{asks}")} for asks in (0, 1) for image in (0, 1)],
        group_key=str(id))


def visual7w(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of Visual7W telling (1511.03416) to one row per question. `multiple_choices` are the wrong
    answers; the order of all four options is random but fixed by the question's id."""
    questions = []
    for pair in _listed(record, "qa_pairs"):
        right, wrong = text(pair, "answer"), [str(v).strip() for v in _listed(pair, "multiple_choices")]
        options = [right, *(v for v in wrong if v != right)]
        random.Random(f"vlrl/visual7w/{pair.get('qa_id')}").shuffle(options)
        questions.append({"id": pair.get("qa_id"), "question": text(pair, "question"), "options": options,
                          "answer": right})
    split = {"split": record["split"]} if isinstance(record.get("split"), str) else {}
    return _question_rows(record, source, questions, image=text(record, *IMAGE), **split)


def is_ocr_vqa(record: Record) -> bool:
    asks, says = pick(record, "questions"), pick(record, "answers")
    return isinstance(asks, list) and isinstance(says, list) and bool(asks) and all(isinstance(q, str) for q in asks)


def ocr_vqa(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of OCR-VQA (ICDAR 2019) to one row per question. The image is <id>.jpg if no field names it."""
    asks, says = _listed(record, "questions"), _listed(record, "answers")
    if len(asks) != len(says):
        raise DataError(f"the record has {len(asks)} questions and {len(says)} answers: give one answer for each "
                        "question")
    image = pick(record, *IMAGE) or source.image(record_id(record, source))
    questions = [{"question": q, "answer": a} for q, a in zip(asks, says, strict=True)]
    return _question_rows(record, source, questions, image=image)


def figure_qa(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of FigureQA (1710.07300) or PlotQA (1909.00997). FigureQA's answers 1 and 0 become yes and no.
    The image is <image_index>.png."""
    binary = has(record, "color1_name")
    answer = _yes_or_no(record, "answer") if binary else record["answer"]
    id = f"{record['image_index']}-{record_id(record, source, 'question_id')}"
    return question_answer({"id": id, "image": f"{record['image_index']}.png", "question": record["question_string"],
                            "answer": answer, **meta(record, "question_string", "answer", "question_id")}, source)


def visual_genome(record: Record, source: RecordSource) -> list[Row]:
    """Converts the regions of a Visual Genome image (1602.07332) to one row each, with the phrase as the expression.
    The image is <image_id>.jpg."""
    rows = []
    for region in _listed(record, "regions"):
        sides = [number(region.get(name)) for name in ("x", "y", "width", "height")]
        if None in sides:
            raise DataError(f"the region {short(region)} must have x, y, width and height")
        x, y, width, height = sides
        image = source.path(f"{pick(region, 'image_id') or record.get('id')}.jpg")
        phrase, size = text(region, "phrase"), source.size(image)
        rows.append({"id": str(pick(region, "region_id") or source.id), "image": image, "expression": phrase,
                     **({"width": size[0], "height": size[1]} if size else {}),
                     "boxes": [{"box": [x, y, x + width, y + height], "label": phrase}]})  # pyright: ignore
    return rows


def elements(record: Record, source: RecordSource) -> list[Row]:
    """Converts a screen with several elements to one row per element (OS-Atlas 2410.23218, SeeClick 2401.10935, ShowUI
    2411.17465). Each `bbox` is [left, top, right, bottom] as fractions of the image."""
    entries = pick(record, "elements", "element")
    image = pick(record, "img_filename", "img_url", *IMAGE)
    size = {"image_size": record["img_size"]} if has(record, "img_size") else {}
    rows: list[Row] = []
    for n, one in enumerate(entries, 1):
        box = pick(one, "bbox")
        if not are_shares(numbers(box, (4,), "bbox")):
            raise DataError(f"bbox={short(box)} of an element must be [left, top, right, bottom] as fractions of "
                            "the image")
        fields = {k: v for k, v in one.items() if k in ("instruction", "bbox", "data_type")}
        rows += screenspot({**fields, **size, "img_filename": image,
                            "id": f"{record_id(record, source)}-{n}"}, source)
    return rows


def ego4d_nlq(record: Record, source: RecordSource) -> list[Row]:
    """Converts a video of Ego4D NLQ (2110.07058) to one row per query, with the query's span in the clip, whose file is
    <clip_uid>.mp4. Queries without words, which the release contains, are left out."""
    rows: list[Row] = []
    for clip in _listed(record, "clips"):
        asks = [(note, n, query) for note in _listed(clip, "annotations")
                for n, query in enumerate(note.get("language_queries") or []) if has(query, "query")]
        rows += [{**row, "group_key": text(record, "video_uid")} for note, n, query in asks for row in time_r1({
            "id": f"{note.get('annotation_uid', text(clip, 'clip_uid'))}-{n}", "video": text(clip, "clip_uid"),
            "timestamp": [query["clip_start_sec"], query["clip_end_sec"]], "sentence": text(query, "query")}, source)]
    return rows
