"""Names record layouts and the projects that use them, for messages that say what was recognised."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from vlrl.data.sources.fields import IMAGE, has, pick
from vlrl.types import Record

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
    "table": "tables of boxes", "labelled": "ImageFolder, CoOp", "unlabelled": "GUI-RCPO",
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
"""(name, projects, test) of each record layout; the first whose test accepts a record applies."""
_GENERAL = ("vlm_r1", "qa", "problem_text", "problem_box")
"""Formats whose records have several layouts."""


def shape_of(record: Record, format: str) -> str:
    """Returns the name of a record's layout and the projects that use it, as in `messages (TRL, ms-swift)`."""
    name, projects = next(((name, projects) for name, projects, fits in SHAPES if format in _GENERAL and fits(record)),
                          (format, PROJECTS.get(format, "")))
    return f"{name} ({projects})"
