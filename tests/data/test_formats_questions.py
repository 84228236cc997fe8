"""Native formats of video, driving, preference, classification and question answering -> canonical rows, by hand."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.sets import save
from tests.data.test_formats import CASES as FORMS
from tests.data.test_formats import WRONG, one
from tests.data.test_formats_vqa import CASES as VQA
from tests.tables import each, refused
from vlrl.checks.fields import field_problems
from vlrl.data import FIELDS, read_rows, sample_from_row
from vlrl.data.formats.choices import option_letter, options_of
from vlrl.data.formats.known import FORMATS, PROJECTS
from vlrl.data.formats.times import interval, intervals, seconds
from vlrl.data.sources.answer_types import guess_type
from vlrl.data.sources.reading import canonical_rows, recognised_format
from vlrl.errors import DataError

ASK = {"image": "a.png", "question": "Which?"}
CLIP = {"video": "a.mp4", "question": "Which?"}
JUDGE = ("Compare.\n###### **Input:**\n###### [Question]:\nWhat is it?  \n\n###### [Response 1]:\nA cat.  \n\n"
         "###### [Response 2]:\nA dog,\nI think.  \n\n###### **Output Format (strictly follow):**  \n<think>x</think>")
SEED = {"sample_id": 7, "question": "Next?", "video_source": "Ego4D", "video_basename": "1.mp4", "task_level": "L2",
        "current_observation_basename": "1.png", "task_progress_metadata": [{"narration_text": "x"}], "video_id": "e1"}
TIMED = {"video": "./v/a.mp4", "duration": 93.29, "timestamp": [1.0, 4.0], "sentence": "A purple hanger."}

QUESTIONS = {
    "video-r1": ("video_r1", {
        "problem_id": 12, "problem": "What?", "data_type": "video", "problem_type": "multiple choice",
        "options": ["A. cat", "B. dog"], "solution": "<answer>B</answer>", "path": "./x/a.mp4", "data_source": "LLaVA",
        "reward": 1.0}, {"id": 12, "video": "x/a.mp4", "question": "What?", "options": ["cat", "dog"], "answer": "B",
        "answer_type": "choice", "source": "LLaVA", "meta": {"reward": 1.0}}),
    "video-r1, an image": ("video_r1", {
        "problem_id": 3, "problem": "How far?", "data_type": "image", "problem_type": "numerical", "options": [],
        "solution": "<answer>3.50</answer>", "path": "a.png"}, {
        "id": 3, "image": "a.png", "question": "How far?", "answer": "3.50", "answer_type": "number"}),
    "seed-bench-r1, validation": ("seed_bench_r1", {
        **SEED, "choice_a": "w", "choice_b": "x", "choice_c": "y", "choice_d": "z", "golden_choice_idx": "C",
        "answer": "y"}, {
        "id": 7, "video": "videos/Ego4D/1.mp4", "image": "images/Ego4D/1.png", "question": "Next?", "answer": "C",
        "options": ["w", "x", "y", "z"], "answer_type": "choice", "category": "L2", "group_key": "e1",
        "source": "Ego4D", "meta": {"task_progress_metadata": [{"narration_text": "x"}]}}),
    "time-r1": ("time_r1", {**TIMED, "qid": "my|cosmo|a|A purple hanger.", "video_start": None, "video_end": None,
                            "difficulty": 41.5, "pred": [0.0, 3.0]}, {
        "id": "my|cosmo|a|A purple hanger.", "video": "v/a.mp4", "question": "A purple hanger.", "answer_type": "span",
        "spans": [[1, 4]], "duration": 93.29, "difficulty": 0.585, "source": "cosmo", "meta": {"pred": [0.0, 3.0]}}),
    "tvgbench": ("tvgbench", {
        "path": "./v/a.mp4", "question": "sits down.", "answer": "13.4-28.1", "start": None, "end": None,
        "duration": 30.12, "question_type": "video temporal grounding", "source": "raw.json",
        "dataset_name": "charades", "qsemtype": "Human Pose", "bins": {"qlen": 1}}, {
        "video": "v/a.mp4", "question": "sits down.", "answer_type": "span", "spans": [[13.4, 28.1]],
        "duration": 30.12, "source": "charades", "category": "Human Pose", "meta": {"bins": {"qlen": 1}}}),
    "captions": ("captions", {"duration": 30.96, "timestamps": [[24.3, 30.4]], "sentences": [" turn it on."]}, {
        "video": "r-1.mp4", "question": "turn it on.", "answer_type": "span", "spans": [[24.3, 30.4]],
        "duration": 30.96, "group_key": "r-1"}),
    "next-gqa": ("next_gqa", {
        "id": "4_1", **CLIP, "options": ["(A) run", "(B) unwrap it"], "duration": 90, "glue": [[13.8, 29.8]],
        "type": "CW", "answer": "(B)"}, {
        "id": "4_1", **CLIP, "options": ["run", "unwrap it"], "answer": "B", "answer_type": "span+choice",
        "spans": [[13.8, 29.8]], "duration": 90, "category": "CW"}),
    "videochat-r1, a span": ("videochat_span", {
        "video_path": "a.mp4", "problem": "the man runs", "solution": [1.0, 4.0], "durations": 9}, {
        "video": "a.mp4", "question": "the man runs", "answer_type": "span", "spans": [[1, 4]],
        "duration": 9}),
    "got-10k": ("got10k", {"path": "/mnt/GOT/val/G_1", "object": "sloth", "gt": [[0.1, 0.0, 0.8, 1.001]]}, {
        "id": "G_1", "video": "mnt/GOT/val/G_1", "width": 1, "height": 1, "question": "sloth", "answer_type": "track",
        "tracks": [{"label": "sloth", "boxes": [[0.1, 0, 0.8, 1]]}]}),
    "video quality": ("clip_class", {
        "video": "1.mp4", "instruction": "Choice one answer from ['low quality', 'high quality'].",
        "answer": "low quality"}, {
        "video": "1.mp4", "question": "Choice one answer from ['low quality', 'high quality'].",
        "answer": "low quality", "answer_type": "text", "labels": ["low quality", "high quality"]}),
    "alphadrive": ("alphadrive", {
        "image": "a.png", "problem": "Your current speed is 36 km/h and the navigation command is 'turn left'. Plan.",
        "solution": "<answer>DECELERATE, STOP, LEFT_TURN</answer>"}, {
        "image": "a.png", "plan": {"speed": ["DECELERATE", "STOP"], "path": "LEFT_TURN"},
        "speed_mps": 10, "navigation": "turn left", "meta": {
            "problem": "Your current speed is 36 km/h and the navigation command is 'turn left'. Plan."}}),
    "vl-rewardbench": ("chosen_rejected", {
        "id": "h-1", "prompt": "How many?", "chosen": "Five.", "rejected": "Six.", "image": "a.png",
        "chosen_reason": "", "rejected_reason": ""}, {
        "id": "h-1", "image": "a.png", "question": "How many?", "responses": ["Five.", "Six."], "answer": 1,
        "meta": {"chosen_reason": "", "rejected_reason": ""}}),
    "vl-rewardbench, ranks": ("response_pair", {
        "id": "h-1", "query": "How many?", "response": ["Six.", "Five."], "human_ranking": [1, 0], "image": "a.png"}, {
        "id": "h-1", "image": "a.png", "question": "How many?", "responses": ["Six.", "Five."], "answer": 2}),
    "r1-reward": ("r1_reward", {
        "message": json.dumps([{"role": "user", "content": [{"type": "image", "image": "file:///mnt/a.jpg"},
                                                            {"type": "text", "text": JUDGE}]}]),
        "question": JUDGE, "answer": ["<answer>2</answer>"]}, {
        "image": "mnt/a.jpg", "question": "What is it?", "responses": ["A cat.", "A dog,\nI think."],
        "answer": 2}),
    "labelled": ("labelled", {"filename": "a.png", "class": "cat", "note": 1}, {
        "image": "a.png", "label": "cat", "meta": {"note": 1}}),
    "mathvista": ("mathvista", {
        "pid": "6", "question": "Which?", "image": "a.png", "choices": ["0", "8", "10"], "answer": "10",
        "answer_type": "text", "question_type": "multi_choice"}, {
        "id": "6", **ASK, "options": ["0", "8", "10"], "answer": "C", "answer_type": "choice",
        "question_type": "multi_choice"}),
    "tabmwp": ("table_question", {
        "question": "How many on Monday?", "choices": None, "answer": "1,200", "unit": "apples", "table_title": "Sold",
        "table": "Day | Apples\nMonday | 1,200", "ques_type": "free_text", "ans_type": "integer_number"}, {
        "question": "Sold\nDay | Apples\nMonday | 1,200\n\nHow many on Monday? (unit: apples)",
        "answer": "1,200", "answer_type": "number", "meta": {"ques_type": "free_text"}}),
    "a table of cells": ("table_question", {
        "question": "Which?", "answer": "b", "choices": ["a", "b"], "table": [["x", 1], ["y", None]]}, {
        "question": "x | 1\ny | \n\nWhich?", "answer": "B", "answer_type": "choice",
        "options": ["a", "b"]}),
    "aitz, a tap": ("aitw", {
        "episode_id": "9", "step_id": 2, "instruction": "Mute it", "image_path": "a.png", "image_width": 100,
        "image_height": 200, "result_action_type": 4, "result_touch_yx": "[0.5, 0.25]",
        "result_lift_yx": "[0.51, 0.25]", "coat_action_desc": "tap the bell"}, {
        "image": "a.png", "width": 100, "height": 200, "instruction": "Mute it", "platform": "mobile",
        "action": {"type": "click", "point": [25, 100]}, "group_key": "episode_9",
        "meta": {"step_id": 2, "coat_action_desc": "tap the bell"}}),
    "aitw, a scroll": ("aitw", {
        "goal": "Look on", "image": "a.png", "result_action_type": "dual_point", "result_touch_yx": [0.8, 0.5],
        "result_lift_yx": [0.2, 0.5]}, {"image": "a.png", "instruction": "Look on", "platform": "mobile",
        "action": {"type": "scroll", "direction": "up"}}),
    "qa": ("qa", {"images": ["a.png"], "problem": "<image>Find x.", "answer": "3"}, {
        "image": "a.png", "question": "Find x.", "answer": "3", "answer_type": "number"})}
"""Format, a record and its whole row; its id is r-1 unless another one is named."""


@each("format record row", (*FORMS.values(), *QUESTIONS.values()))
def test_each_format_by_hand(format, record, row):
    row = {"id": "r-1", **row}
    assert recognised_format(record) == format
    assert one(record) == row == one(record, format)
    assert format in ("mathvista", "canonical") or set(row) <= FIELDS
    assert sample_from_row(row).id == str(row["id"]) and (format == "unlabelled" or not list(field_problems(row)))
    json.dumps(row, allow_nan=False)


def test_every_format_has_a_case():
    assert {format for format, *_ in (*FORMS.values(), *QUESTIONS.values())} | {
        "android_episode"} | {recognised_format(record) for record, _ in VQA.values()} | {
        "natural_bench", "ocr_vqa", "visual7w", "ego4d_nlq", "plain"} == set(FORMATS) == set(PROJECTS)


OTHERS = {
    # the same things as others write them: record, and what counts of its row
    "times as text": ({**TIMED, "timestamp": ["1.0", "4.0"], "duration": "01:33"}, {"spans": [[1, 4]], "duration": 93}),
    "a span as text": ({"video_path": "a.mp4", "timestamp": "0:10 - 0:20", "query": "x"}, {"spans": [[10, 20]]}),
    "qvhighlights": ({"qid": 1, "query": "x", "duration": 150, "vid": "j_360.0_510.0", "relevant_windows": [[26, 36],
                      [40, 44]]}, {"video": "j_360.0_510.0.mp4", "spans": [[26, 36], [40, 44]]}),
    "next-qa": ({"video": "401", "question": "how", "answer": 1, "qid": 6, "a0": "x", "a1": "y", "a2": "z"},
                {"video": "401.mp4", "answer": "B", "options": ["x", "y", "z"], "id": 6}),
    "videochat-r1, a glue": ({"video_path": "a.mp4", "problem": "q", "options": ["(A) a", "(B) b"], "durations": 9,
                              "solution": {"answer": "B", "glue": [[1, 2], [3, 4]]}},
                             {"answer": "B", "spans": [[1, 2], [3, 4]], "answer_type": "span+choice"}),
    "video-mme": ({"video_id": "001", "duration": "short", "question": "q", "question_id": "001-1", "answer": "C",
                   "options": ["A. x", "B. y", "C. z"]}, {"id": "001-1", "video": "001.mp4", "answer": "C",
                                                         "meta": {"duration": "short"}}),
    "vsi": ({"scene_name": "s", "question": "How many chairs?", "ground_truth": "4", "options": None},
            {"answer": "4", "answer_type": "count"}),
    "a count in a video": ({**CLIP, "question": "How many?", "answer": "4"}, {"answer": "4", "answer_type": "number"}),
    "regression": ({"problem_id": 1, "problem": "size?", "data_type": "video", "problem_type": "regression",
                    "solution": "<answer>1.5</answer>", "videos": ["a.mp4"]}, {"answer_type": "regression"}),
    "a plan in a talk": ({"images": ["a.png", "b.png"], "conversations": [
        {"from": "human", "value": "speed 8.3 m/s, navigation: go straight."}, {"from": "gpt", "value": "keep,straight"}
    ]}, {"plan": {"speed": "KEEP", "path": "STRAIGHT"}, "speed_mps": 8.3, "navigation": "go straight"}),
    "words of others": ({"image": "a.png", "answer": "slow down and lane change left"},
                        {"plan": {"speed": "DECELERATE", "path": "LEFT_CHANGE"}}),
    "outputs": ({"ID": "3", "Image": "a.png", "Text": "q", "Output1": "a", "Output2": "b", "Better": "Output1",
                 "Category": "safety"}, {"id": "3", "image": "a.png", "question": "q", "answer": 1}),
    "model_b": ({"question": "q", "response_a": "a", "response_b": "b", "winner": "model_b"}, {"answer": 2}),
    "a pair as talks": ({"id": 1, "chosen": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}],
                         "rejected": [{"role": "assistant", "content": "b"}]}, {"question": "q", "image": None}),
    "a pair of a talk": ({"id": 1, "conversations": [{"from": "human", "value": "<image>q"}], "images": ["a.png"],
                          "chosen": {"from": "gpt", "value": "a"}, "rejected": {"from": "gpt", "value": "b"}},
                         {"question": "q", "image": "a.png"}),
    "boxed": ({"image": "a.png", "problem": "y?", "solution": "So \\boxed{\\frac{1}{2}}."},
              {"answer": "\\frac{1}{2}", "answer_type": "math"}),
    "hashes": ({"question": "q", "answer": "She has 3.\n#### 18"}, {"answer": "18", "answer_type": "number"}),
    "cls-rl": ({"image": "a.png", "problem": "What type of flower is it?", "solution": "<answer>tulip</answer>"},
               {"label": "tulip", "answer": "tulip", "answer_type": "text"}),
    "mmmu": ({"id": "v_1", "question": "q <image 1>", "options": "['a', 'b']", "answer": "B", "image_1": "a.png",
              "image_2": "b.png"}, {"options": ["a", "b"], "answer": "B", "images": ["a.png", "b.png"]}),
    "scienceqa": ({**ASK, "choices": ["x", "y"], "answer": 0}, {"answer": "A"}),
    "letters of an object": ({**ASK, "options": {"B": "y", "A": "x"}, "answer": "(B) y"}, {"options": ["x", "y"]}),
    "chartqa": ({"imgname": "a.png", "query": "What year?", "label": "2014"}, {"image": "a.png", "answer": "2014"}),
    "several annotators": ({**ASK, "answers": ["b", "a", "a"]}, {"answer": ["a", "b"], "answer_type": "text"}),
    "a talk about a video": ({"messages": [{"role": "user", "content": "<video>q\nA. x\nB. y"}, {
        "role": "assistant", "content": "<think>t</think><answer>B</answer>"}], "videos": ["a.mp4"]},
        {"video": "a.mp4", "answer": "B", "answer_type": "choice"}),
    "two labels": ({"image": "a.png", "labels": ["cat", "dog"]}, {"label": ["cat", "dog"], "multi": True}),
    "a level is no difficulty": ({**ASK, "answer": "x", "difficulty": 4}, {"meta": {"difficulty": 4}}),
    "pope": ({"question_id": 1, "image": "a.png", "text": "Is there a cat?", "label": "yes"},
             {"id": 1, "image": "a.png", "question": "Is there a cat?", "answer": "yes", "answer_type": "yes_no"}),
    "coco's image ids": ({"image_id": 299207, "question": "q", "choices": ["x", "y"], "correct_choice_idx": 1,
                          "direct_answers": ["z"]}, {"image": "000000299207.jpg", "answer": "B", "image_id": 299207}),
    "image ids of textvqa": ({"image_id": "0054c913", "question": "q", "answers": ["a"]}, {"image": "0054c913.jpg"}),
    "a part of a film": ({**CLIP, "candidates": ["x", "y"], "answer": "y", "start": 3.5, "end": 7.0, "duration": 90},
                         {"answer": "B", "video_start": 3.5, "video_end": 7, "start": None, "end": None,
                          "duration": None}),
    "video-mme's file": ({"video_id": "001", "videoID": "fFj", "question": "q", "answer": "x"}, {"video": "fFj.mp4"}),
    "curr-reft, a choice": ({"id": 1, **ASK, "width": 9, "height": 8, "options": ["x", "y"], "answer": "A"},
                            {"width": 9, "height": 8, "answer": "A"}),
    "counting": ({**ASK, "image_size": [9, 8], "answer": 3, "count": 3}, {"width": 9, "height": 8, "count": 3}),
    "a talk about actions": ({"image": "a.png", "conversations": [
        {"from": "human", "value": "<image>What actions can lead to a collision?"},
        {"from": "gpt", "value": "Accelerate and go straight."}]}, {"answer": "Accelerate and go straight."}),
    "words of a plan in capitals": ({"image": "a.png", "problem": "What next?", "solution": "KEEP, STRAIGHT"},
                                    {"plan": {"speed": "KEEP", "path": "STRAIGHT"}}),
    "a start before the clip": ({**TIMED, "timestamp": [-0.1, 4]}, {"spans": [[0, 4]]}),
    "places in a field of places": ({**ASK, "options": ["3", "2", "1"], "answer_index": "1"}, {"answer": "B"}),
    "times of subtitles": ({**TIMED, "timestamp": ["00:00:02,500", "00:00:04,900"]}, {"spans": [[2.5, 4.9]]}),
    "a class by its place": ({"image": "a.png", "label": 1, "labels": ["cat", "dog"]}, {"label": "dog"}),
    "no options as text": ({**ASK, "options": "None", "answer": "1,234"}, {"answer_type": "number", "options": None}),
    "options 0 and 1": ({**CLIP, "option 0": "x", "option 1": "y", "answer": 1},
                        {"options": ["x", "y"], "answer": "B"}),
    "options 0 and 1, glued": ({**CLIP, "option0": "x", "option1": "y", "correct_choice": 1}, {"answer": "B"}),
    "thinking before the answer": ({**ASK, "answer": "<think>two and five</think>\n7"}, {"answer": "7"}),
    "true or not": ({"image": "a.png", "pid": 1, "question": "Red?", "answer": True}, {"answer": "yes"}),
    "own words stay": ({"id": 1, **ASK, "answer": 5, "level": 3}, {"answer": 5, "level": 3}),
    "own answers stay": ({"id": 1, **ASK, "answer": {"x": 1}}, {"answer": {"x": 1}, "answer_type": None})}


@each("record row", OTHERS.values())
def test_other_ways_of_writing(record, row):
    found = one(record)
    assert {name: found.get(name) for name in row} == row and not list(field_problems(found))
    sample_from_row(found)


test_what_is_wrong_is_named = refused(DataError, one, [*WRONG.values(), *{
    "no option": ({**ASK, "choices": ["x", "y"], "answer": 7}, "answer=7 matches none of the 2 options"),
    "letter and text": ({**ASK, "choices": ["x", "y"], "answer": "A. y"}, "the letter of one option and the text of"),
    "no answer": ({"image": "a.png", "problem": "q", "solution": " "}, "answer='' must be a string or a number"),
    "an interval": ({**TIMED, "timestamp": [4, 1]}, "timestamp=[4, 1] must begin before it ends"),
    "three times": ({**TIMED, "timestamp": [1, 2, 3]}, "timestamp=[1, 2, 3] must be an interval [start, end]"),
    "percent": ({**TIMED, "difficulty": 140}, "difficulty=140 must be a tIoU in percent, 0 to 100"),
    "an unknown plan": ({"image": "a.png", "problem": "Your speed is 8 m/s.", "solution": "KEEP, UTURN"},
                        "has 'UTURN', which is not a meta-action"),
    "a missing head": ({"image": "a.png", "answer": "STOP"}, "the answer 'STOP' has no word for path"),
    "two videos": ({**CLIP, "video": ["a.mp4", "b.mp4"], "answer": "x"}, "the row names 2 videos, but a row can show"),
    "equal responses": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same text"),
    "neither": ({"question": "q", "response_a": "a", "response_b": "b", "winner": "tie"}, "answer='tie' must say"),
    "equal ranks": ({"query": "q", "response": ["a", "b"], "human_ranking": [0, 0]}, "must be two different ranks"),
    "no responses": ({"message": '[{"role": "user", "content": "x"}]', "answer": "1"}, "the headings [Question]"),
    "a place among nothing": ({**ASK, "answer_idx": 1}, "index 1 of the correct option, but no field"),
    "an id of an image": ({"image_id": {"x": 1}, "question": "q", "answer": "a"}, "a string or an integer: the id"),
    "two questions": ({"chosen": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
                       "rejected": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]},
                      "answer different questions"),
    "labels of some boxes": ({"image": "a.png", "conversations": [{"from": "human", "value": "Find cats."}, {
        "from": "gpt", "value": '[{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, {"bbox_2d": [5, 6, 7, 8]}]'}]},
        "some of the 2 boxes have a label"),
    "options in a line": ({**ASK, "options": "A) x B) y", "answer": "B"},
                          "must be a list of strings, or a string with one option"),
    "a clock": ({**TIMED, "timestamp": ["0:10", "0:75"]}, "timestamp='0:75' must be a time"),
    "code": ({"image": "a.png", "conversations": [{"from": "human", "value": "<image>Save it."}, {
        "from": "gpt", "value": "pyautogui.click(x=3, y=4)"}]}, "is a position or an action"),
    "a place": ({"image": "a.png", "conversations": [{"from": "human", "value": "<image>Click save."}, {
        "from": "gpt", "value": "(438, 88)"}]}, "is a position or an action"),
    "code in a table": ({**ASK, "answer": "pyautogui.click(x=3, y=4)"}, "is a position or an action"),
    "boxes in words": ({"image": "a.png", "problem": "Find the cup.",
                        "solution": "<ref>cup</ref><box>(1,2),(3,4)</box>"}, "has box tokens"),
    "a place asked for": ({"image": "a.png", "question": "Where is the cup?", "answer": "(438, 88)", "n": 1},
                          "is a position or an action"),
    "captions": ({"timestamps": [[1, 2]], "sentences": []}, "the row has 1 timestamps and 0 sentences"),
    "negatives": ({**SEED, "answer": "a", "negative_answers": ["a"]}, "must have an answer that differs"),
    "a data type": ({**QUESTIONS["video-r1"][1], "data_type": "audio"}, "data_type='audio' must be 'video' or 'image'"),
    "a type": ({**QUESTIONS["video-r1"][1], "problem_type": "essay"}, "problem_type='essay' is not one of")
}.values()], plain=True)


JSON = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8), st.binary(
    max_size=4), st.sampled_from(["[1, 2, 3, 4]", "<answer>[1,2,3,4]</answer>", "a.png", "{", "human", "none"])),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["x", "value", "points", "id"]), inner,
                                                                max_size=3), max_leaves=6)
RECORDS = {name: case[:2] for name, case in (FORMS | QUESTIONS).items()}
NAMES = sorted({name for _, record in RECORDS.values() for name in record} | {"annotations", "completions", "actions"}
               | {name for record, _ in OTHERS.values() for name in record})


@settings(max_examples=50)
@given(st.sampled_from(sorted(RECORDS)), st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3), st.data())
def test_no_record_raises_anything_but_what_is_wrong_with_it(case, changed, data):
    format, record = RECORDS[case]
    gone = data.draw(st.sets(st.sampled_from(sorted(record)), max_size=2))
    hostile = {k: v for k, v in {**record, **changed}.items() if k not in gone}
    for name in ("auto", format):
        for row in canonical_rows(hostile, name):
            wrong = isinstance(row, DataError)
            assert len(str(row)) < 2000 if wrong else not any(p is None for p in field_problems(row))


def test_what_goes_by_the_id_alone(tmp_path):
    def pairs(*ids):
        rows = [{"id": i, "prompt": "q", "chosen": "good", "rejected": "bad"} for i in ids]
        return {row["id"]: (row["responses"], row["answer"]) for row in read_rows(save(tmp_path / "p.json", rows))}
    found = pairs(*range(400))
    assert all(pair[answer - 1] == "good" for pair, answer in found.values())
    assert 160 < sum(answer == 1 for _, answer in found.values()) < 240
    assert pairs(7, 3) == {3: found[3], 7: found[7]}
    record = {**SEED, "answer": "wash", "negative_answers": list("abcdefg")}
    rows = [one({**record, "sample_id": n}) for n in range(200)]
    assert all(len(row["options"]) == 4 and row["options"]["ABCD".index(row["answer"])] == "wash" for row in rows)
    assert all(30 < sum(row["answer"] == place for row in rows) < 70 for place in "ABCD")
    assert one(record) == one({**record, "negative_answers": list("gfedcba")})
    first = one({**record, "task_progress_metadata": []})
    assert "video" not in first and first["image"] == "images/Ego4D/1.png"
    rows = read_rows(save(tmp_path / "t.json", [{**TIMED, "qid": "x"}, {**TIMED, "qid": "x", "timestamp": [5, 6]}]))
    assert [row["id"] for row in rows] == ["x", "x-2"]


@each("written wanted", [
    (12.5, 12.5), ("12.5s", 12.5), ("12.5 seconds", 12.5), ("1:02", 62), ("00:01:02.5", 62.5), ("00:00:39:040", 39.04),
    ("-1", None), (float("nan"), None), ("1:2:3:4:5", None), (True, None), ("9" * 500, None), ([1], None)])
def test_times(written, wanted):
    if wanted is None:
        with pytest.raises(DataError, match=r"t=.* must be a time in seconds"):
            seconds(written, "t")
    else:
        assert seconds(written, "t") == wanted


def test_intervals_letters_and_types():
    for written in ("3 to 7", "from 3 to 7 s", "3-7", "[3, 7]", "between 3 and 7", "0:03 - 0:07", (3, 7),
                    {"start_time": 3, "end_time": "7"}, "3 – 7", '{"start": 3, "end": 7}'):
        assert interval(written, "t") == [3, 7], written
    assert intervals(["3-7", [8, 9]], "t") == intervals("[[3, 7], [8, 9]]", "t") == [[3, 7], [8, 9]]
    for written in ("3", "7 to 3", [3, 3], "x to y", [], None, 5, [[1, 2], [3]]):
        with pytest.raises(DataError):
            intervals(written, "t")
    options = ["cat", "dog", "A", "10"]
    for answer, wanted in (("B", "B"), ("(B)", "B"), ("b.", "B"), ("B. dog", "B"), ("Dog.", "B"), ("Option D", "D"),
                           (1, "B"), (10, "D"), ("10", "D"), ("<answer> (A) </answer>", "A"), ("A, C", "A, C"),
                           ("C,A", "A, C"), (["D"], "D")):
        assert option_letter(answer, options) == wanted, answer
    for answer in ("E", 4, -1, "", "cow", None, True, ["A", "Z"], 1.5):
        with pytest.raises(DataError):
            option_letter(answer, options)
    assert options_of({"options": "A. x\nB. y"}) == options_of({"options": '["(A) x", "(B) y"]'}) == ["x", "y"]
    assert options_of({"options": ["A. x", "C. y"]}) == ["A. x", "C. y"]  # no letters of their places
    assert options_of({"choices": {"text": ["x", "y"], "label": ["A", "B"]}}) == ["x", "y"] and options_of({}) == []
    for answer, asked, kind in (("5", "How many?", "count"), ("5", "How far?", "number"), ("Yes.", "", "yes_no"),
                                ("(C)", "", "choice"), ("2\\pi", "", "math"), ("x = 3", "", "text"),
                                ("x = 3", "Find x.", "math"), ("3/4", "What fraction is left?", "math"),
                                ("3/4", "", "text"), ("24/7", "When is it open?", "text"), ("$5.99", "", "number"),
                                ("covid-19 virus", "", "text"), ("1/8/93", "", "text"), ("12.5%", "", "number"),
                                ("2019-2021", "", "text"), ("10-12", "Solve it.", "text"), ("a cat", "", "text"),
                                ("007", "How many?", "text"), (7, "", "number"), ("No", "What does it say?", "text"),
                                ("C:\\Users", "", "text"), ("12,5", "", "number"), ("1.2.3", "", "text"),
                                ("3.10", "Which version is it?", "text"), ("5550100199", "Phone number?", "text"),
                                ("12", "How many codes?", "count"), ("12 \u20ac", "", "number"), ("1 1/2", "", "text"),
                                ("$5 and $6", "", "text"), ("x>3", "Solve it.", "math"),
                                ("12:30", "", "text"), ("B-MW 12", "", "text"), ("-5°C", "", "number"),
                                ("45°", "Measure of angle A?", "number"),
                                ("", "", "text")):
        assert guess_type(answer, asked) == kind, answer
