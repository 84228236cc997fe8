"""The annotation formats of other projects, by name.

To add a format, add an entry to FORMATS: a function that recognises a record and a function that converts it to rows
(see vlrl.data.sources.reading)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vlrl.data.formats import annotated as a
from vlrl.data.formats import conversations as talk
from vlrl.data.formats import driving, gui, pairs, qa, video, vqa
from vlrl.data.formats import grounding as g
from vlrl.data.sources.fields import IMAGE, VIDEO, RecordSource, has, pick
from vlrl.data.sources.reading import CANONICAL, Format
from vlrl.types import Record, Row

FIELD_COLUMNS = {**a.ROLES, "images": a.ROLES["image"], "question": (*qa.QUESTION, *talk.FIELDS), "answer": qa.ANSWER,
                 "options": qa.OPTIONS[:3], **dict.fromkeys(talk.LISTS, talk.LISTS)}
"""Maps each canonical field to the columns from which it may be read. A record with values in several of them is
ambiguous."""


def plain_row(record: Record, source: RecordSource) -> list[Row]:
    """The record itself, with a default id if it has none. If it has neither `image`, `images` nor `video`, a column
    with another usual name of a picture or video is copied there."""
    own = record.get("id")
    known = own not in (None, "") and isinstance(own, (str, int)) and not isinstance(own, bool)
    row = {**record, "id": own if known else source.id}
    if not has(record, "image", "images", "video"):
        for field, names in (("image", IMAGE), ("video", VIDEO)):
            if has(record, *names):
                row[field] = pick(record, *names)
                break
    return [row]


def _has_all(record: Record, *names: str) -> bool:
    return all(has(record, name) for name in names)


def _is_list(record: Record, *names: str) -> bool:
    return all(isinstance(record.get(name), list) for name in names)


def _lists(record: Record, name: str, *keys: str) -> bool:
    """Whether the field `name` holds a list of objects whose first object has all of `keys`."""
    entries = pick(record, name)
    first = entries[0] if isinstance(entries, list) and entries else None
    return isinstance(first, Mapping) and {*keys} <= first.keys()


FORMATS: dict[str, Format] = {
    "mathvista": Format(qa.is_mathvista, qa.question_answer, refuse=qa.refuse_two_readings),
    "canonical": CANONICAL,
    "coco": Format(lambda r: _is_list(r, "images", "annotations"), g.coco, several=True),
    "label_studio": Format(a.is_label_studio, a.label_studio, a.ask_for_all),
    "lisa": Format(lambda r: _is_list(r, "shapes") and has(r, "text"), g.lisa, several=True),
    "table_question": Format(lambda r: _has_all(r, "table", "question", "answer"), qa.table_question),
    "statement": Format(vqa.is_statement, vqa.statement),
    "hallusion": Format(lambda r: _has_all(r, "gt_answer_details", "visual_input", "question"), vqa.hallusion),
    "natural_bench": Format(lambda r: _has_all(
        r, "Image_0", "Image_1", "Question_0", "Question_1", "Image_0_Question_0"), vqa.natural_bench, several=True),
    "visual7w": Format(lambda r: _lists(r, "qa_pairs", "multiple_choices"), vqa.visual7w, several=True),
    "ocr_vqa": Format(vqa.is_ocr_vqa, vqa.ocr_vqa, several=True),
    "figure_qa": Format(lambda r: _has_all(r, "question_string", "image_index") and "answer" in r, vqa.figure_qa),
    "visual_genome": Format(lambda r: _lists(r, "regions", "phrase"), vqa.visual_genome, several=True),
    "elements": Format(
        lambda r: _lists(r, "elements", "instruction", "bbox") or _lists(r, "element", "instruction", "bbox"),
        vqa.elements, several=True),
    "ego4d_nlq": Format(lambda r: has(r, "video_uid") and isinstance(pick(r, "clips"), list),
                        vqa.ego4d_nlq, several=True),
    "alphadrive": Format(driving.is_alphadrive, driving.alphadrive),
    "chosen_rejected": Format(lambda r: _has_all(r, "chosen", "rejected"), pairs.chosen_rejected),
    "r1_reward": Format(lambda r: has(r, "answer") and isinstance(pick(r, "message"), list), pairs.r1_reward),
    "response_pair": Format(pairs.is_response_pair, pairs.response_pair, pairs.one_or_two),
    "captions": Format(lambda r: _is_list(r, "timestamps") and has(r, "sentences"), video.captions, several=True),
    "got10k": Format(lambda r: has(r, "path", *VIDEO) and has(r, "object", "label") and isinstance(
        pick(r, "gt", "boxes_xywh"), list), video.got10k),
    "seed_bench_r1": Format(lambda r: has(r, "question") and has(r, "negative_answers", "choice_a") and has(
        r, "current_observation_basename", "task_progress_metadata"), video.seed_bench_r1),
    "next_gqa": Format(video.is_next_gqa, video.next_gqa),
    "videochat_span": Format(video.is_videochat_span, video.videochat_span),
    "video_r1": Format(video.is_video_r1, video.video_r1, refuse=qa.refuse_two_readings),
    "tvgbench": Format(video.is_tvgbench, video.tvgbench),
    "time_r1": Format(video.is_time_r1, video.time_r1),
    "clip_class": Format(lambda r: has(r, *VIDEO) and has(r, "instruction") and isinstance(r.get("answer"), str),
                         video.clip_class),
    "vlm_r1": Format(g.is_vlm_r1, g.vlm_r1, refuse=qa.refuse_two_readings),
    "aitw": Format(lambda r: has(r, "result_action_type", "result_action") and has(r, "instruction", "goal"),
                   gui.aitw, gui.steps_before),
    "android_episode": Format(lambda r: _is_list(r, "actions") and has(r, "episode_id", "goal", "step_instructions"),
                              gui.android_episode, several=True),
    "android_step": Format(gui.is_android_step, gui.android_step),
    "gui_r1": Format(lambda r: _has_all(r, "gt_action", "instruction") and isinstance(r["gt_action"], str), gui.gui_r1),
    "gui_g2": Format(lambda r: has(r, "abs_box", "rela_box") and has(r, "instruction"), gui.gui_g2),
    "gui_g1": Format(lambda r: has(r, "rate") and g.is_problem_box(r), gui.gui_g1),
    "screenspot_pro": Format(lambda r: _has_all(r, "bbox", "instruction") and has(r, "ui_type", "img_size"),
                             gui.screenspot_pro),
    "screenspot": Format(
        lambda r: _has_all(r, "bbox", "instruction") and has(r, "data_type", "data_source", "img_filename"),
        gui.screenspot, gui.corners_or_sides),
    "problem_box": Format(g.is_problem_box, g.problem_box),
    "refcoco": Format(g.is_refcoco, g.refcoco, several=True),
    "problem_text": Format(lambda r: isinstance(r.get("problem"), str) and has(r, *IMAGE) and "solution" in r,
                           qa.problem_text, refuse=qa.refuse_two_readings),
    "box_list": Format(a.is_box_list, a.box_list, a.ask_for_all),
    "qa": Format(qa.is_question_answer, qa.question_answer, refuse=qa.refuse_two_readings),
    "table": Format(a.is_table, a.table, a.one_row_per_image),
    "labelled": Format(a.is_labelled, a.labelled, a.choose_from_all),
    "unlabelled": Format(gui.is_unlabelled, gui.unlabelled),
    "plain": Format(lambda record: False, plain_row),
}
"""Formats by name, the most specific first.

A record belongs to the first format that recognises it, else to `canonical`. With data.format=auto, a file is read in
the format to which most of its records belong. The format `plain` keeps the columns of a record as they are; it is
never recognised, but chosen by data.format or by a task."""
OWN_UNITS = frozenset(("label_studio", "elements", "got10k", "visual_genome", "aitw"))
"""Formats whose boxes and points have one form, which data.boxes cannot change."""
PROJECTS = {
    "canonical": "vlrl", "coco": "COCO, LVIS, Objects365", "label_studio": "Label Studio", "lisa": "LISA, ReasonSeg",
    "statement": "VSR, NLVR2", "hallusion": "HallusionBench", "natural_bench": "NaturalBench", "visual7w": "Visual7W",
    "ocr_vqa": "OCR-VQA", "figure_qa": "FigureQA, PlotQA", "visual_genome": "Visual Genome",
    "elements": "OS-Atlas, SeeClick, ShowUI", "ego4d_nlq": "Ego4D NLQ", "alphadrive": "AlphaDrive",
    "chosen_rejected": "RLAIF-V, LLaMA-Factory, TRL", "r1_reward": "R1-Reward",
    "response_pair": "VL-RewardBench", "captions": "ActivityNet Captions, Charades-STA", "got10k": "GOT-10k",
    "seed_bench_r1": "SEED-Bench-R1", "next_gqa": "NExT-GQA, VideoChat-R1", "videochat_span": "VideoChat-R1",
    "video_r1": "Video-R1", "tvgbench": "TVGBench", "time_r1": "Time-R1, QVHighlights", "clip_class": "VideoChat-R1",
    "vlm_r1": "VLM-R1", "table_question": "TabMWP", "aitw": "AITZ (CoAT), Android in the Wild",
    "android_episode": "AndroidControl", "android_step": "AndroidControl", "gui_r1": "GUI-R1",
    "gui_g2": "GUI-G2", "gui_g1": "GUI-G1", "screenspot_pro": "ScreenSpot-Pro",
    "screenspot": "ScreenSpot, ScreenSpot-v2",
    "problem_box": "VLM-R1", "refcoco": "RefCOCO, RefCOCO+, RefCOCOg", "problem_text": "R1-V, Open-R1-Multimodal",
    "box_list": "datasets of detection", "qa": "VQA sets of many projects", "mathvista": "MathVista, OlympiadBench",
    "table": "tables of boxes", "labelled": "ImageFolder, CoOp", "unlabelled": "GUI-RCPO", "plain": "rows of your own",
}
"""Maps each format to the projects that use it."""


def _messages(record: Record, name: str, key: str) -> bool:
    turns = pick(record, name)
    return isinstance(turns, list) and bool(turns) and isinstance(turns[0], Mapping) and key in turns[0]


def _parts(record: Record, name: str) -> bool:
    turns = pick(record, name)
    return isinstance(turns, list) and any(isinstance(t, Mapping) and isinstance(t.get("content"), list) for t in turns)


def _texts(record: Record, *names: str) -> bool:
    return all(isinstance(record.get(name), str) for name in names)


SHAPES: tuple[tuple[str, str, Callable[[Record], bool]], ...] = (
    ("prompt as messages, with reward_model", "verl",
     lambda r: _messages(r, "prompt", "role") and isinstance(pick(r, "reward_model"), Mapping)),
    ("prompt and completion as messages", "TRL", lambda r: _messages(r, "prompt", "role") and has(r, "completion")),
    ("prompt as messages", "TRL, R1-V", lambda r: _messages(r, "prompt", "role")),
    ("input as messages", "OpenAI responses", lambda r: _messages(r, "input", "role")),
    ("texts of user and assistant", "The Cauldron", lambda r: _messages(r, "texts", "user")),
    ("conversations with image_urls", "MM-Eureka",
     lambda r: _messages(r, "conversations", "role") and has(r, "image_urls")),
    ("conversations with <img> in the text", "Qwen-VL",
     lambda r: "</img>" in str(pick(r, "conversations") or "")),
    ("conversations (from, value) with images", "LLaMA-Factory sharegpt",
     lambda r: _messages(r, "conversations", "from") and has(r, "images")),
    ("conversations (from, value)", "LLaVA, VLM-R1", lambda r: _messages(r, "conversations", "from")),
    ("messages of content parts", "OpenAI chat, TRL", lambda r: _parts(r, "messages")),
    ("messages", "TRL, ms-swift, LLaMA-Factory", lambda r: _messages(r, "messages", "role")),
    ("query and response", "ms-swift", lambda r: _texts(r, "query", "response")),
    ("instruction, inputs and outputs", "M3IT", lambda r: _texts(r, "instruction", "outputs")),
    ("instruction and output", "LLaMA-Factory alpaca", lambda r: _texts(r, "instruction", "output")),
    ("problem and solution, with the original question", "LMMs-Lab multimodal-open-r1-8k",
     lambda r: _texts(r, "problem", "original_question") and has(r, "solution")),
    ("problem and answer", "EasyR1", lambda r: _texts(r, "problem") and has(r, "answer") and has(r, *IMAGE)),
)
"""The layouts of records as (name, projects, test). A record has the first layout whose test accepts it."""
_GENERAL = ("vlm_r1", "qa", "problem_text", "problem_box")
"""Formats whose records can have one of several layouts (SHAPES)."""


def shape_of(record: Record, format: str) -> str:
    """Returns the layout of a record, with the projects that use this layout, as in `messages (TRL, ms-swift)`. For
    formats with a single layout, this is the name of the format."""
    name, projects = next(((name, projects) for name, projects, fits in SHAPES if format in _GENERAL and fits(record)),
                          (format, PROJECTS.get(format, "")))
    return f"{name} ({projects})"
