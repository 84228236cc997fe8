"""By hand: what `vlrl score` says of a row under the config of every recipe.

Pictures are 200 x 100 pixels; models that answer in processed pixels see them at twice the size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Case:
    """A line for `vlrl score`, and what it must say of each completion."""

    sample: Mapping[str, Any]
    scores: Sequence[tuple[Any, Mapping[str, float], float]]
    """(completion, raw parts, reward)."""
    line: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of the line: step, variants."""
    skipped: tuple[str, ...] = ()
    """Parts that need a service which the command does not have."""


def think(answer: str) -> str:
    return f"<think>so</think><answer>{answer}</answer>"


def fenced(*boxes: tuple[Any, ...]) -> str:
    entries = ", ".join(f'{{"bbox_2d": {list(box)}, "label": "{label}"}}' for *box, label in boxes)
    return f"```json\n[{entries}]\n```"


def named(names: str, *rows: tuple[Any, ...]) -> list[tuple[Any, dict[str, float], float]]:
    """Scores of parts that are the same for each completion: (completion, *parts, reward)."""
    keys = names.split()
    return [(text, dict(zip(keys, parts, strict=True)), reward) for text, *parts, reward in rows]


SIZE = {"id": "1", "width": 200, "height": 100, "processed_size": [400, 200]}
MUG = {**SIZE, "expression": "mug", "boxes": [{"box": [20, 10, 60, 50], "label": "mug"}]}
TWO = {**SIZE, "labels": ["mug", "cat"], "boxes": [*MUG["boxes"], {"box": [100, 20, 140, 60], "label": "cat"}]}
TWINS = {**MUG, "boxes": [*MUG["boxes"], {"box": [100, 20, 140, 60], "label": "mug"}]}
ASKED = {**SIZE, "question": "Is it red?", "answer": "No"}
DETECTED = fenced((40, 20, 120, 68, "mug"), (200, 40, 280, 120, "cat"))
GROUNDING = {
    "vlm_r1_rec": Case(MUG, named(
        "accuracy format",
        (think('{"bbox_2d": [40, 20, 120, 60]}'), 0.5, 1, 1.5),
        (think("[40, 20, 120, 60]"), 0.5, 0, 0.5),
        ("a mug", 0, 0, 0))),
    "vlm_r1_ovd": Case(TWO, named(
        "accuracy format",
        (think(fenced((40, 20, 120, 100, "mug"))), 0.5, 1, 1.5),
        # every object, and one box too many: mAP 1 times 2 / 3
        (think(fenced(*[(40, 20, 120, 100, "mug")] * 2, (200, 40, 280, 120, "cat"))), 2 / 3, 1, 5 / 3))),
    # at step 1500 the bars are .75 and .9: the mug's GIoU of .6 is below both, and half of the objects are recalled
    "vision_r1_griffon": Case(TWO, named("precision recall format", (DETECTED, 0.5, 0.5, 1, 2)), {"step": 1500}),
    "visual_rft_detection": Case(TWINS, named(
        "iou confidence format",
        (think("[{'Position': [100, 100, 300, 500], 'Confidence': 0.9}, "
               "{'Position': [0, 600, 100, 900], 'Confidence': 0.4}]"), 0.5, 0.75, 1, 2.25),
        (think("No Objects"), 0, 0, 1, 1))),
    "perception_r1": Case(MUG, named(
        "accuracy format",
        ("<|box_start|>(100,100),(300,300)<|box_end|>", 0.25, 1, 1.25),
        ("(100,100),(300,500)", 0, 0, 0))),
    "curr_reft_binary": Case(ASKED, named(
        "accuracy format", (think("That is not correct."), 1, 1, 2), (think("yes"), 0, 1, 1), ("no", 1, 0, 1))),
    "curr_reft_choice": Case(TWO, named(
        "accuracy format", (think("A, B"), 1, 1, 2), (think("B, A"), 0, 1, 1), (think("A"), 0, 1, 1))),
    "curr_reft_open": Case(MUG, named(
        "accuracy format",
        (think('{"bbox_2d": [40, 20, 120, 62]}'), 1, 1, 2),  # IoU .525
        (think('{"bbox_2d": [40, 20, 120, 60]}'), 0, 1, 1))),  # .5 is not above .5
}

TARGET = {**SIZE, "instruction": "open it", "box": [20, 10, 60, 50]}
CLICK = {**TARGET, "action": {"type": "click"}}
TYPE = {**SIZE, "instruction": "greet", "action": {"type": "type", "text": "hello there"}}


def boxed(text: str) -> str:
    return think(f"<|begin_of_box|>{text}<|end_of_box|>")


def called(x: float, y: float) -> str:
    return f'<tool_call>{{"name": "computer_use", "arguments": {{"coordinate": [{x}, {y}]}}}}</tool_call>'


SIDES = 4 / (3 + 1 / 0.8)  # one of four sides is off by a fifth of the picture
GUI = {
    "gui_g1": Case(TARGET, named(
        "hit iou box",
        (fenced((40, 20, 120, 100, "it")), 1, 1, 1, 1.375),
        (fenced((40, 20, 120, 60, "it")), 1, 0.5, SIDES, 1.125 + 0.125 * SIDES))),
    "gui_g2": Case(TARGET, named(  # exp(-.5), exp(-.125)
        "point coverage format", ("[80, 20, 160, 100]", 0.607, 0.882, 1, 2.489), ("[80, 20", 0, 0, 0, 0))),
    "gui_rcpo": Case({**SIZE, "instruction": "open it"}, named(  # 50 pixels get 3 votes, 50 get 2, 50 get 1
        "consensus", ("[0, 0, 20, 20]", 250 / 300, 250 / 300), ("[0, 0, 20, 20]", 250 / 300, 250 / 300),
        ("[10, 0, 30, 20]", 200 / 300, 200 / 300), ("junk", 0, 0))),
    "se_gui": Case(TARGET, named(
        "point format", (called(80, 60), 2, 1, 3), (called(200, 60), 1 - 0.09 / 1.13, 1, 2 - 0.09 / 1.13))),
    "ui_r1": Case(CLICK, named(
        "type coordinate format",
        (think("[{'action': 'click', 'coordinate': [120, 100]}]"), 1, 1, 1, 3),  # the edge counts
        (think("[{'action': 'click', 'coordinate': [124, 100]}]"), 1, 0, 1, 2),
        (think("[{'action': 'scroll'}]"), 0, 0, 1, 1))),
    "gui_r1": Case(CLICK, named(
        "accuracy format",
        (think("[{'action': 'click', 'point': [80, 60], 'input_text': 'no input text'}]"), 1, 1, 1),
        (think("[{'action': 'click', 'point': [120, 100], 'input_text': 'no input text'}]"), 0, 1, 0.2),  # the edge
        (think("[{'action': 'click', 'point': [80, 60]}]"), 1, 0, 0.8))),
    "infigui_r1": Case(CLICK, named(
        "accuracy format",
        (think('{"action": "click", "coordinate": [80, 60]}'), 1, 1, 1),
        (think('{"action": "click", "coordinate": [124, 60]}'), 0.2, 1, 0.28),
        ('{"action": "click", "coordinate": [80, 60]}', 0, 0, 0))),
    "glm_v_androidworld": Case(TYPE, named(
        "accuracy",
        (boxed('{"action_type": "type", "text": "hello there"}'), 1, 1),
        (boxed('{"action_type": "type", "text": "hello"}'), 5 / 11, 5 / 11),
        (boxed('{"action_type": "type"}'), 0, 0),
        (think('{"action_type": "type", "text": "hello there"}'), 0, 0))),
}

CLIP = {"id": "1", "video": "gone.mp4", "question": "What is it?", "answer_type": "choice",
        "options": ["a cat", "a dog", "a hen"], "answer": "B"}
SPAN = {**CLIP, "answer_type": "span", "duration": 20, "spans": [[5, 10]]}
FACE = {**CLIP, "answer_type": "text", "labels": ["angry", "happy"], "answer": "happy", "attribute": "expression"}
TRACK = {**SIZE, "video": "gone.mp4", "question": "the ball", "answer_type": "track",
         "tracks": [{"label": "ball", "boxes": [[20, 10, 60, 50], [100, 20, 140, 60]]}]}
VIDEO = {
    # half are right, and with shuffled frames half: .5 > .8 * .5. Two right answers: the one of 400 tokens is paid.
    "video_r1": Case(CLIP, named(
        "accuracy format temporal length",
        ({"text": think("B"), "n_tokens": 400}, 1, 1, 1, 1, 2.5),
        ({"text": think("B"), "n_tokens": 100}, 1, 1, 1, 0, 2.3),
        ({"text": think("B."), "n_tokens": 400}, 0, 1, 0, 0, 1), ("B", 0, 0, 0, 0, 0)),
        {"variants": {"shuffled": [think("B"), think("A")]}}),
    "grpo_care": Case(CLIP, named("accuracy format", (think("B"), 1, 1, 2), (think("C"), 0, 1, 1)),
                      skipped=("consistency",)),
    "seed_bench_r1": Case(CLIP, named(
        "accuracy format", (think("B. a dog"), 1, 1, 1), (think("Both"), 0, 1, 0), ("<answer>B</answer>", 1, 0, 1))),
    # tIoU .8, the start is off by a twentieth of the clip
    "time_r1": Case(SPAN, named("span format", (think("6.00 to 10.00"), 0.76, 1, 1.76), (think("10 to 5"), 0, 1, 1))),
    "videochat_r1_gqa": Case({**CLIP, "answer_type": "span+choice", "spans": [[2, 4], [6, 8]]}, named(
        "accuracy iou format",
        (think("B") + "<glue>[(2, 4), (6, 7)]</glue>", 1, 0.75, 1, 2.75),
        (think("A") + "<glue>[(2, 4), (6, 8)]</glue>", 0, 1, 1, 2), (think("B"), 1, 0, 0, 1))),
    "videochat_r1_track": Case(TRACK, named(
        "iou format",
        (think("[[0.1, 0.1, 0.3, 0.3], [0.5, 0.2, 0.7, 0.6]]"), 0.75, 1, 1.75),  # .5 and 1
        (think("[[0.1, 0.1, 0.3, 0.5]]"), 0, 0, 0))),  # one box for two frames
    "favchat": Case(FACE, named(
        "accuracy format", (think("Happy."), 1, 1, 2), (think("angry"), 0, 1, 1), ("happy", 0, 0, 0))),
}

DOG = {"id": "1", "image": "gone.png", "label": "golden retriever", "labels": ["golden retriever", "tabby cat"]}
CLASSIFICATION = {
    "cls_rl": Case(DOG, named(
        "accuracy format", (think("Golden_Retriever"), 1, 1, 2), ("golden retriever", 1, 0, 1),
        (think("tabby cat"), 0, 1, 1))),
    "cls_rl_no_thinking": Case(DOG, named(
        "accuracy", ("golden retriever", 1, 1), ("Golden retriever", 0, 0), (think("golden retriever"), 0, 0))),
    "visual_rft_classification": Case(DOG, named(
        "accuracy format", (think("a golden retriever"), 1, 1, 2), (think("retriever"), 1, 1, 2), (think(""), 0, 1, 1),
        (think("golden retriever, tabby cat"), 0, 1, 1))),
    "rlcr": Case(DOG, named(  # accuracy - (confidence - accuracy)^2
        "accuracy brier format",
        (think("golden retriever") + "<confidence>0.8</confidence>", 1, 0.04, 1, 0.96),
        (think("tabby cat") + "<confidence>0.8</confidence>", 0, 0.64, 1, -0.64))),
}

STOP = {"id": "1", "image": "gone.png", "plan": {"speed": "STOP", "path": "STRAIGHT"}}
PLANS = (think("STOP, STRAIGHT"), think("KEEP, STRAIGHT"))
DRIVING = {
    # half of the group say each speed and all the same path, so each diversity is .8; STRAIGHT weighs .8
    "alphadrive": Case(STOP, named(
        "speed path format", (PLANS[0], 0.8, 0.64, 1, 2.44), (PLANS[1], 0, 0.64, 1, 1.64))),
    # each speed is said once: +.4. Of two equal paths one is the first in each order: 0 in the mean.
    "alphadrive_released": Case(STOP, named(
        "speed path format", (PLANS[0], 1.4, 0.8, 1, 3.2), (PLANS[1], 0.4, 0.8, 1, 2.2))),
}

SUM = {"id": "1", "image": "gone.png", "question": "What is the sum?", "answer": 12, "answer_type": "number"}
STRUCTURED = ("<think><planning>p</planning><caption>c</caption><reasoning>r</reasoning><summary>s</summary></think>"
              "<answer>12</answer>")
QA = {
    "vision_r1_ptst": Case(SUM, named(  # the product of both
        "accuracy format", (think("12"), 1, 1, 1), ("12", 1, 0, 0), (think("13"), 0, 1, 0))),
    "apo_view_r1": Case(SUM, named(
        "accuracy format", (think("12"), 1, 1, 1.5), ("12", 1, 0, 1), (think("13"), 0, 1, 0.5))),
    "mm_eureka": Case({**SUM, "options": ["11", "12"], "answer": "B", "answer_type": "choice"}, named(
        "accuracy format", (think("B"), 1, 1, 1.5), (think("A"), 0, 1, 0.5), ("nothing", 0, 0, 0))),
    "glm_v_rlcs": Case(SUM, named(  # without the box the gate is shut
        "accuracy format", (boxed("12"), 1, 1, 1), (boxed("13"), 0, 1, 0), (think("12"), 0, 0, 0)), skipped=("judge",)),
    # .5, 0 and -.5 for the shortest, the middle and the longest of the group
    "kimi_k1_5": Case(SUM, named(
        "accuracy format length",
        ({"text": think("12"), "n_tokens": 10}, 1, 1, 0.5, 1.5), ({"text": think("12"), "n_tokens": 20}, 1, 1, 0, 1),
        ({"text": think("13"), "n_tokens": 30}, 0, 1, -0.5, -0.5)), {"step": 100}),
    "noisy_rollout": Case(SUM, named(
        "accuracy format", (think("12"), 1, 1, 1), ("12", 1, 0, 0.5), (think("13"), 0, 1, 0.5))),
    "sari_structured": Case(SUM, named("accuracy format", (STRUCTURED, 1, 1, 2), (think("12"), 1, 0, 1))),
}

PAIR = {"id": "1", "question": "What is it?", "responses": ["a dog", "a cat"], "answer": 2}
PREFERENCE = {
    "r1_reward": Case(PAIR, named(
        "accuracy format", (think("2"), 1, 1, 1.5), (think("1"), 0, 1, 0.5), ("2", 0, 0, 0)), skipped=("consistency",)),
}

CASES = {f"{folder}/{name}": case for folder, table in (
    ("grounding", GROUNDING), ("gui", GUI), ("video", VIDEO), ("classification", CLASSIFICATION), ("driving", DRIVING),
    ("qa", QA), ("preference", PREFERENCE)) for name, case in table.items()}
"""By config: folder and name."""
