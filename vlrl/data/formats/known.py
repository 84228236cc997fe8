"""The annotation formats of other projects, by name.

To add a format, add an entry to FORMATS: a function that recognises a record and a function that converts it to rows
(see vlrl.data.sources.reading)."""

from __future__ import annotations

from vlrl.data.formats import aitw, driving, gui, labelled, pairs, qa, tables, video, vqa
from vlrl.data.formats import annotated as a
from vlrl.data.formats import conversations as talk
from vlrl.data.formats import grounding as g
from vlrl.data.sources.reading import CANONICAL, Format

FIELD_COLUMNS = {**a.ROLES, "images": a.ROLES["image"], "question": (*qa.QUESTION, *talk.FIELDS), "answer": qa.ANSWER,
          "options": qa.OPTIONS[:3], **dict.fromkeys(talk.LISTS, talk.LISTS)}
"""Maps each canonical field to the columns from which it may be read. A record with values in several of them is
ambiguous."""


FORMATS: dict[str, Format] = {
    "mathvista": Format(qa.is_mathvista, qa.question_answer, refuse=qa.refuse_two_readings),
    "canonical": CANONICAL,
    "coco": Format(g.is_coco, g.coco, several=True),
    "label_studio": Format(a.is_label_studio, a.label_studio, a.ask_for_all),
    "lisa": Format(g.is_lisa, g.lisa, several=True),
    "table_question": Format(tables.is_table_question, tables.table_question),
    "statement": Format(vqa.is_statement, vqa.statement),
    "hallusion": Format(vqa.is_hallusion, vqa.hallusion),
    "natural_bench": Format(vqa.is_natural_bench, vqa.natural_bench, several=True),
    "visual7w": Format(vqa.is_visual7w, vqa.visual7w, several=True),
    "ocr_vqa": Format(vqa.is_ocr_vqa, vqa.ocr_vqa, several=True),
    "figure_qa": Format(vqa.is_figure_qa, vqa.figure_qa),
    "visual_genome": Format(vqa.is_visual_genome, vqa.visual_genome, several=True),
    "elements": Format(vqa.is_elements, vqa.elements, several=True),
    "ego4d_nlq": Format(vqa.is_ego4d_nlq, vqa.ego4d_nlq, several=True),
    "alphadrive": Format(driving.is_alphadrive, driving.alphadrive),
    "chosen_rejected": Format(pairs.is_chosen_rejected, pairs.chosen_rejected),
    "r1_reward": Format(pairs.is_r1_reward, pairs.r1_reward),
    "response_pair": Format(pairs.is_response_pair, pairs.response_pair, pairs.one_or_two),
    "captions": Format(video.is_captions, video.captions, several=True),
    "got10k": Format(video.is_got10k, video.got10k),
    "seed_bench_r1": Format(video.is_seed_bench_r1, video.seed_bench_r1),
    "next_gqa": Format(video.is_next_gqa, video.next_gqa),
    "videochat_span": Format(video.is_videochat_span, video.videochat_span),
    "video_r1": Format(video.is_video_r1, video.video_r1, refuse=qa.refuse_two_readings),
    "tvgbench": Format(video.is_tvgbench, video.tvgbench),
    "time_r1": Format(video.is_time_r1, video.time_r1),
    "clip_class": Format(video.is_clip_class, video.clip_class),
    "vlm_r1": Format(g.is_vlm_r1, g.vlm_r1, refuse=qa.refuse_two_readings),
    "aitw": Format(aitw.is_aitw, aitw.aitw, aitw.steps_before),
    "android_episode": Format(gui.is_android_episode, gui.android_episode, several=True),
    "android_step": Format(gui.is_android_step, gui.android_step),
    "gui_r1": Format(gui.is_gui_r1, gui.gui_r1),
    "gui_g2": Format(gui.is_gui_g2, gui.gui_g2),
    "gui_g1": Format(gui.is_gui_g1, gui.gui_g1),
    "screenspot_pro": Format(gui.is_screenspot_pro, gui.screenspot_pro),
    "screenspot": Format(gui.is_screenspot, gui.screenspot, gui.corners_or_sides),
    "problem_box": Format(g.is_problem_box, g.problem_box),
    "refcoco": Format(g.is_refcoco, g.refcoco, several=True),
    "problem_text": Format(qa.is_problem_text, qa.problem_text, refuse=qa.refuse_two_readings),
    "box_list": Format(a.is_box_list, a.box_list, a.ask_for_all),
    "qa": Format(qa.is_question_answer, qa.question_answer, refuse=qa.refuse_two_readings),
    "table": Format(a.is_table, a.table, a.one_row_per_image),
    "labelled": Format(labelled.is_labelled, labelled.labelled, labelled.choose_from_all),
    "unlabelled": Format(gui.is_unlabelled, gui.unlabelled),
}
"""Formats by name, the most specific first.

A record belongs to the first format that recognises it, else to `canonical`. With `auto`, the format of most records of
a file is used for the whole file."""
