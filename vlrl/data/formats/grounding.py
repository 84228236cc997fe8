"""Converts records of grounding and detection data to canonical rows: VLM-R1, RefCOCO, LISA, COCO."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.data.formats import swift
from vlrl.data.formats.box_answers import boxes_of, has_box_tokens, is_plain_number
from vlrl.data.formats.choices import OPTIONS, answer_fields, answer_text, options_of
from vlrl.data.formats.conversations import FIELDS, Conversation, conversation_fields
from vlrl.data.formats.qa import ANSWER, ID_FIELDS, QUESTION, final_answer, reference_answer
from vlrl.data.formats.questions import (
    checked_conversation,
    context_turns,
    media_fields,
    question_fields,
    system_prompt,
    with_media,
    without_marks,
)
from vlrl.data.sources.answer_types import as_video_type
from vlrl.data.sources.fields import (
    IMAGE,
    VIDEO,
    RecordSource,
    base_fields,
    has,
    meta,
    numbers,
    pick,
    record_id,
    row_size,
    text,
)
from vlrl.data.values import are_shares, hull, scaled, short, unpacked
from vlrl.errors import DataError
from vlrl.types import Record, Row

MOST_LABELS = 100
"""If a file has at most this many categories, every row asks for all of them; otherwise a row asks only for the
categories of the row's own boxes."""
_DESCRIBES = re.compile(r"(?:sentence|expression|phrase) describes?:\s*(.+?)\s*\.?\s*$", re.DOTALL)
_ASKS = re.compile(
    r"[?？\n]|bound(?:ing)?[ -]?box|\bbbox|\bcoordinates?\b|[请框找]|定位|检测|^\W*(?:please|can|could|would|you|given|"
    r"locate|find|where|what|which|who|provide|output|detect|give|identify|point|mark|return|draw|click|show|report|"
    r"describe|look|tell|answer|segment|ground|highlight|select|search|predict|determine|list|locali[sz]e|spot|"
    r"pinpoint|let|help|box|in (?:the|this) (?:image|picture|photo))\b", re.IGNORECASE)
"""Matches words that occur in questions and requests, but not in names of objects."""
_PLACE = re.compile(r"\bbox|bbox|coordinate|locat|detect|\bfind\b|ground|region|\bpoint|\bwhere\b|框|坐标|定位",
                    re.IGNORECASE)
_OBJECTS = re.compile(r"(?:objects?|categor(?:y|ies)|targets?|labels?|following|detect)\b[^:\[]{0,80}[:\[]\s*"
                      r"([^\n\]]+)", re.IGNORECASE)
_QUOTED = re.compile(r"""\s*(["'])(.+?)\1\s*(?:[,;]|\W*$)""")
_NEXT_SENTENCE = re.compile(r"\.\s+(?=[A-Z])")
_NO_TARGET = re.compile(r"ignore|^flag$", re.IGNORECASE)  # labels of LISA's shapes that its loader leaves out
_ANSWER_TYPES = {"mcq": "choice", "yes_no": "yes_no", "math": "math", "numeric": "number"}


def is_vlm_r1(record: Record) -> bool:
    """Whether a record is a conversation with an answer. A record whose only conversation is the field `prompt` needs a
    field `completion`, or an image and an answer that consists of boxes."""
    if (fields := conversation_fields(record)) != ["prompt"]:
        return bool(fields)
    answer = pick(record, "solution", "answer", "ground_truth")
    return has(record, "completion") or (isinstance(answer, (str, list)) and has(record, *IMAGE) and bool(
        boxes_of(answer_text(json.dumps(answer) if isinstance(answer, list) else answer))))


def vlm_r1(record: Record, source: RecordSource) -> list[Row]:
    """Converts a conversation in VLM-R1's format (2504.07615) to a row: a referring expression, a detection, or a
    question.

    An answer with one box gives a referring expression; a list of boxes or "None" gives a detection; any other answer
    gives a question. Boxes are in original pixels, or fractions of the image size if no number is above 1."""
    record, places = swift.fill_marks(record)
    said = checked_conversation(record) or Conversation()
    record = with_media(record, said)
    question = without_marks(said.question)
    if not question:
        raise DataError("the conversation has no question: no turn of a human or user contains text")
    options = options_of(record)
    answer, worked = reference_answer(said, record, options, question)
    answer = json.dumps(answer) if isinstance(answer, list) and answer and not isinstance(answer[0], str) else answer
    method = str(record.get("accu_reward_method") or "").lower()
    rest = {**worked, **system_prompt(record, said), **meta(record, *FIELDS, *ANSWER, *QUESTION, *ID_FIELDS, *VIDEO,
                                                            *OPTIONS, "reward_model", "system",
                                                            *(("objects",) if places else ()))}
    points = places is not None and bool(places.points)
    boxes = [] if points else boxes_of(answer_text(answer), method, question) if isinstance(answer, str) else None
    id = record_id(record, source, *ID_FIELDS)
    if boxes is None:
        about = media_fields(record, source, needed=False) if has(record, *VIDEO) or not has(record, *IMAGE) else {
            k: v for k, v in base_fields(record, source).items() if k != "id"}
        answer, kind = final_answer(answer) if isinstance(answer, str) else answer, _ANSWER_TYPES.get(method)
        row = {"answer": answer, "answer_type": kind} if kind and not options else answer_fields(
            answer, options, question)
        row = as_video_type(row) if has(record, *VIDEO) else row
        return [{"id": id, **about, **row, **question_fields(said.question, about, options, said.turns), **rest}]
    row = {**base_fields(record, source), "id": id}
    row |= context_turns(said, row)
    if places and points:
        return [{**row, **target(question), **swift.points_in_pixels(places, row, source), "boxes": [], **rest}]
    _check_tokens(str(answer), source)
    return [{**_with_boxes(row, question, boxes, places.scale(source) if places else 1, source), **rest}]


def _check_tokens(answer: str, source: RecordSource) -> None:
    """Raises DataError for an answer with the box tokens of a model, unless data.boxes names the unit of the boxes."""
    if has_box_tokens(answer) and not source.form.unit:
        raise DataError(f"the answer {short(answer)} has box tokens, whose coordinates depend on the model: set "
                        "data.boxes=norm1000 (--boxes norm1000) if they go from 0 to 1000, as in Qwen-VL, Qwen2-VL and "
                        "InternVL, else pixels, norm1 or resized")


def _with_boxes(row: Row, question: str, boxes: Sequence[Row], full: float, source: RecordSource) -> Row:
    """Returns a row with the boxes of an answer to `question`. `full` is the coordinate of the image's right and lower
    edges (1 for pixels)."""
    boxes = [{**b, "box": _in_pixels(b["box"], row, full, source)} for b in boxes]
    if len({"label" in b for b in boxes}) > 1:
        raise DataError(f"some of the {len(boxes)} boxes have a label and some have none: label all "
                        "boxes, or remove the labels")
    labels = _listed_categories(question) if not boxes or "label" in boxes[0] else []
    if labels:
        labels = list(dict.fromkeys([*labels, *(b["label"] for b in boxes)]))
        return {**row, "labels": labels, "boxes": boxes}
    asked = target(question)
    named_ = [{"label": asked["expression"], **b} for b in boxes] if "expression" in asked else boxes
    return {**row, **asked, "boxes": named_}


def target(words: str) -> dict[str, str]:
    """Returns {"expression": text} for a text that names an object. Returns {"question": text} for a complete request,
    which prompt templates must not rephrase."""
    if described := _DESCRIBES.findall(words):
        return {"expression": described[-1]}
    return {"question": words} if _ASKS.search(words) else {"expression": words}


def _in_pixels(box: list[float], row: Record, full: float, source: RecordSource) -> list[float]:
    if source.scaled_later:
        return box
    return scaled(box, row_size(row), full, "box") if full != 1 or are_shares(box) else box


def _listed_categories(question: str) -> list[str]:
    match = _OBJECTS.search(question)
    if not match:
        return []
    named = _NEXT_SENTENCE.split(match[1])[0].lstrip(" [")
    quoted = [m[2].strip() for m in _QUOTED.finditer(named)] if named[:1] in "'\"" else []
    return quoted or [word for part in re.split(r"[,;]", named) if (word := part.strip(" '\"`.[]\n"))]


EXPRESSION = ("expression", "sentences", "sentence", "sent", "caption", "captions", "phrase", "refexp", "ref_sentence",
               "normal_caption", "referring_expression", "raw", "description", "query")


COCO_TEXTS = ("caption", "expression", "sentence", "phrase", "text", *EXPRESSION)
"""Fields of a COCO annotation that describe its box in words."""
_REF_NAME = re.compile(r"(COCO_\w+_\d{12})_\d+(?=\.\w+$)")


def is_problem_box(record: Record) -> bool:
    """Whether a record has an image, a question or expression in words, and an answer that consists of boxes."""
    asked = _problem(record)
    return bool(asked) and has(record, *IMAGE) and bool(_problem_boxes(record, asked))


def problem_box(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record whose `solution` or `answer` is a box [x1, y1, x2, y2] in original pixels, or a list of boxes
    (VLM-R1's rec_jsons_processed, refcoco*_val.json and lisa_test.json; EasyR1; TRL).

    `problem` is the referring expression, or a request that contains it."""
    problem = _problem(record)
    row = base_fields(record, source)
    boxes = _problem_boxes(record, problem) or []
    for name in _BOX_ANSWERS:
        _check_tokens(str(record.get(name)), source)
    return [{**_with_boxes(row, problem, boxes, 1, source), **meta(record, *_PROBLEMS, *_BOX_ANSWERS)}]


_PROBLEMS = ("problem", "prompt", "question", "query")
_BOX_ANSWERS = ("solution", "answer", "ground_truth")


def _problem(record: Record) -> str:
    return without_marks(next((v for name in _PROBLEMS if isinstance(v := record.get(name), str) and v.strip()), ""))


def _problem_boxes(record: Record, question: str) -> list[Row] | None:
    """Returns the boxes of the first answer field that consists of boxes. Four numbers are not a box if the question
    may ask for several numbers: a list in `answer`, or any answer to another field than `problem`."""
    numbers_asked = "question" in target(question) and not _PLACE.search(question)
    for name in _BOX_ANSWERS:
        value = unpacked(record.get(name))
        listed = isinstance(record.get(name), list) and all(map(is_plain_number, record[name]))
        if numbers_asked and (not has(record, "problem") or (listed and name != "solution")):
            continue
        words = json.dumps(value) if isinstance(value, (list, Mapping)) else value
        if isinstance(words, str) and (boxes := boxes_of(answer_text(words), "", question)):
            return boxes
    return None


def is_refcoco(record: Record) -> bool:
    region = has(record, "bbox") or (has(record, "ref_id") and has(record, "ann_id"))
    return region and has(record, *EXPRESSION, "answer") and (
        has(record, "ref_id", "ann_id", "sentences", "image_id") or "question_id" in record)


def refcoco(record: Record, source: RecordSource) -> list[Row]:
    """Converts a region in COCO's [x, y, width, height] in original pixels to one row per referring expression.

    If the record has the COCO annotation in `raw_anns`, the box is taken from this annotation, because the record's own
    `bbox` is then [x1, y1, x2, y2] (jxu124/refcoco). The annotation number at the end of `file_name` is removed, since
    the image's name does not contain it."""
    raw, image = pick(record, "raw_anns"), pick(record, "raw_image_info")
    bbox = raw.get("bbox") if isinstance(raw, Mapping) else record.get("bbox")
    if bbox is None:
        raise DataError(f"the region ann_id={short(record.get('ann_id'))} has no bbox, because files of "
                        "refs do not contain boxes. Copy the bbox of this id from COCO's instances file")
    values = source.pixels(numbers(bbox, (4,), "bbox"), "bbox")
    if isinstance(image, Mapping):
        record = {**{side: image[side] for side in ("width", "height") if has(image, side)}, **record}
    sentences = pick(record, *EXPRESSION, "answer")
    names = [_sentence(s) for s in (sentences if isinstance(sentences, list) else [sentences])]
    if not has(record, *IMAGE):
        key = record.get("image_id")
        if isinstance(key, bool) or not isinstance(key, int) or not 0 <= key < 10**12:
            raise DataError(f"no field holds the path of an image, and image_id={short(key)} is not the number of a "
                            "COCO image")
        record = {**record, "file_name": f"COCO_train2014_{key:012d}.jpg"}
    if isinstance(record.get("file_name"), str):
        record = {**record, "file_name": _REF_NAME.sub(r"\1", record["file_name"])}
    row = base_fields(record, source)
    box = source.corners(values)
    rest = meta(record, *EXPRESSION, *"bbox segmentation answer question question_id raw_anns raw_image_info "
                "raw_sentences".split())
    return [{**row, "id": row["id"] if len(names) == 1 else f"{row['id']}-{n}", "expression": name,
             "boxes": [{"box": box, "label": name}], **rest} for n, name in enumerate(names, 1)]


def _sentence(value: Any) -> str:
    words = value if isinstance(value, Mapping) else {"sentence": value}
    return text(words, "sent", "raw", "sentence", "caption")


def lisa(record: Record, source: RecordSource) -> list[Row]:
    """Converts a record of LISA / ReasonSeg (2308.00692), which is the file of one image, to one row per text. The box
    of each row encloses all polygons labelled `target`, in original pixels."""
    points: list[Any] = []
    for shape in record["shapes"]:
        if not isinstance(shape, Mapping):
            raise DataError(f"{short(shape)} in shapes must be an object with label and points")
        if not _NO_TARGET.search(str(shape.get("label", "target"))):
            points += [numbers(p, (2,), "points") for p in pick(shape, "points") or []]
    texts = record["text"] if isinstance(record["text"], list) else [record["text"]]
    row = base_fields(_with_image(record, source), source)
    boxes = [hull(points)] if points else []
    rest = meta(record, "shapes", "text", "imagePath", "imageData", "imageHeight", "imageWidth")
    names = [_sentence(value) for value in texts]
    return [{**row, "id": row["id"] if len(names) == 1 else f"{row['id']}-{n}", "expression": name,
             "boxes": [{"box": box, "label": name} for box in boxes], **rest} for n, name in enumerate(names, 1)]


def _with_image(record: Record, source: RecordSource) -> Record:
    sizes = {"width": record.get("imageWidth"), "height": record.get("imageHeight")}
    image = pick(record, *IMAGE, "imagePath") or f"{source.id}.jpg"
    return {**record, "image": image, **{k: v for k, v in sizes.items() if v is not None}}


def coco(record: Record, source: RecordSource) -> list[Row]:
    """Converts a COCO file to one row per image, with the file's categories as `labels` and the annotations as `boxes`.

    If annotations have a text (`caption`, `expression`, `sentence` ...), there is one row per text instead, with the
    text as its expression. Crowd regions (iscrowd=1) and empty boxes are not targets; they are stored in `meta`. With
    more than MOST_LABELS categories, a row asks for the categories of its boxes and for those that LVIS lists as absent
    (neg_category_ids)."""
    names = _categories(record.get("categories") or [])
    regions: dict[str, dict[str, list[Row]]] = {str(image.get("id")): {} for image in record["images"]}
    for entry in record["annotations"]:
        if not isinstance(entry, Mapping):
            raise DataError(f"{short(entry)} in annotations must be an object, an annotation in COCO's format")
        if str(entry.get("image_id")) not in regions:
            place = f"annotation {short(entry.get('id'))}: image_id={short(entry.get('image_id'))}"
            raise DataError(f"{place} is not the id of an entry of 'images'")
        region = _annotation(entry, names, record["images"], source)
        x1, y1, x2, y2 = region["box"]
        kind = "crowd" if entry.get("iscrowd") in (1, True) else "empty" if x2 == x1 or y2 == y1 else "boxes"
        regions[str(entry["image_id"])].setdefault(kind, []).append(region)
    return [row for image in record["images"]
            for row in _rows_by_text(_coco_row(image, source, names, **regions[str(image.get("id"))]))]


def _rows_by_text(row: dict[str, Any]) -> list[Row]:
    """Splits the row of an image into one row per text of its boxes. Without texts, returns the unchanged row."""
    texts = {name: [b for b in row["boxes"] if name in b.get("texts", ())]
            for b in row["boxes"] for name in b.get("texts", ())}
    if not texts:
        return [row]
    missing = sum("texts" not in b for b in row["boxes"])
    if missing:
        raise DataError(f"{missing} of the {len(row['boxes'])} annotations have no text ({', '.join(COCO_TEXTS[:5])}), "
                        "but other annotations have one: give every annotation a text, or move those without a text "
                        "to another file")
    rest = {k: v for k, v in row.items() if k not in ("labels", "boxes")}
    one = len(texts) == 1
    return [{**rest, "id": row["id"] if one else f"{row['id']}-{n}", "expression": name,
             "boxes": [{"box": b["box"], "label": name} for b in boxes]}
            for n, (name, boxes) in enumerate(texts.items(), 1)]


def _coco_row(image: Record, source: RecordSource, names: Mapping[Any, str], boxes: Sequence[Record] = (),
              **others: list[Row]) -> dict[str, Any]:
    url = str(image.get("coco_url") or "")
    named = {**image, "file_name": image.get("file_name") or url.rpartition("/")[2] or None}
    absent = [names[str(key)] for key in image.get("neg_category_ids") or [] if str(key) in names]
    few = list(dict.fromkeys([*(b["label"] for b in boxes), *absent]))
    labels = list(dict.fromkeys(names.values())) if len(names) <= MOST_LABELS else few
    more = {"meta": others} if others else {}
    return {**base_fields(named, source), "id": str(image.get("id", source.id)), "labels": labels, "boxes": list(boxes),
            **more}


def _categories(entries: Sequence[Any]) -> dict[str, str]:
    names: dict[str, str] = {}
    for entry in entries:
        if isinstance(entry, Mapping) and isinstance(entry.get("id"), (int, str)):
            name = text(entry, "name")
            if names.setdefault(str(entry["id"]), name) != name:
                raise DataError(f"two categories have the id {short(entry['id'])}, {short(names[str(entry['id'])])} "
                                f"and {short(name)}: give each category its own id")
    return names


def _annotation(entry: Record, names: Mapping[str, str], images: Sequence[Record], source: RecordSource
                ) -> dict[str, Any]:
    which = f"annotation {short(entry.get('id'))}"
    key = entry.get("category_id")
    if not isinstance(key, (int, str)) or str(key) not in names:
        raise DataError(f"{which}: category_id={short(key)} is not the id of an entry of 'categories'")
    if not has(entry, "bbox"):
        raise DataError(f"{which} has no bbox")
    bbox = source.pixels(numbers(entry["bbox"], (4,), f"{which}: bbox"), f"{which}: bbox")
    texts = _texts_of(entry, images)
    return {"box": source.corners(bbox), "label": names[str(key)], **({"texts": texts} if texts else {})}


def _texts_of(entry: Record, images: Sequence[Record]) -> list[str]:
    """Returns the texts that describe an annotation; [] if there are none. Without a text of its own, an annotation may
    have MDETR's `tokens_positive`: its text is then cut from the caption of the annotated image, which is one of
    `images`."""
    given = pick(entry, *COCO_TEXTS)
    if given is not None:
        return [_sentence(one) for one in (given if isinstance(given, list) else [given])]
    whole = next((image.get("caption") for image in images if image.get("id") == entry.get("image_id")), None)
    places = entry.get("tokens_positive")
    if not isinstance(whole, str) or not isinstance(places, list) or not places:
        return []
    return [" ".join(whole[begin:end].strip() for begin, end in places)]
