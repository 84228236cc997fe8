"""Whatever is written, every recipe scores it: parts within their bounds, finite metrics, JSON of what is read."""

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks import test_classification as classification
from tests.tasks import test_driving as driving
from tests.tasks import test_preference as preference
from tests.tasks import test_qa as qa
from tests.tasks import test_recipes as boxes
from tests.tasks import test_video as video
from vlrl.rewards.text import parse_answer
from vlrl.task.scoring import score_group
from vlrl.task.services import Services

GENERAL = ["<think>", "</think>", "<answer>", "</answer>", ",", " ", "\n", "[", "]", "{", "}", "0", "1", "0.5", "-5",
           "NaN", "1e999", "9" * 30, "\0", "🙂", "٣", "\ud800", "'", '"', "\\", ".", "```json\n", "\n```", "null",
           "(", ")"]
OWN = {  # family: examples of the fast suite, and what its answers are made of
    "classification": (15, [
        "<confidence>", "</confidence>", "Tabby cat", "dog", "water", "lily", "_", ";", "is a", "cat", "kitty",
        "<answer>dog</answer>", "<confidence>-7</confidence>"]),  # whole: of their parts few texts have one
    "driving": (40, ["KEEP", "STOP", "LEFT_TURN", "STRAIGHT", ", ", "[[", "]]", "[4, 0, 0.5]", "[8, 0, 1]",
                     "(1, 2, 3)"]),
    "preference": (40, ["1", "2", "response ", "and", "\uff12", "٢"]),
    "qa": (6, ["<|begin_of_box|>", "<|end_of_box|>", "\\boxed{", "$", "12", "3.14", "A", "B", "C", "a dog", "yes", "no",
               "not", "2019", "%", "-", "/", "<planning>", "</planning>", "<caption>", "half"]),
    "boxes": (8, [
        "<tool_call>", "</tool_call>", "[20, 10, 60, 50]", "[60, 50, 20, 10]", "[40, 30]", '"bbox_2d": [', "yes", "no",
        '{"bbox_2d": [20, 10, 60, 50], "label": "mug"}', "{'Position': [1, 2, 3, 4], ", "'Confidence': 0.5}", "none",
        "<|box_start|>", "<|box_end|>", "(20,10),(60,50)", "<|begin_of_box|>", "<|end_of_box|>", "A",
        '{"action_type": "click", "box_2d": [[20, 10, 60, 50]]}', "{'action': 'click', ", "'coordinate': [40, 30]}",
        "'point': [40, 30], 'input_text': ''}", '{"arguments": {"coordinate": [40, 30]}}']),
    "video": (25, ["<glue>", "</glue>", "A", "B.", "(C)", "3", "-2.5", "10 to 20", "20 to 10", "[(5, 10)]", " to ",
                   ", ", "[[0, 0, 1, 1]]", '{"start_time": "1"', "red car", "<timestep>", "</timestep>",
                   video.timed.RIGHT, video.timed.KEYED, video.timed.start_end(10, 20), '{"time": [12, 20]}'])}
BOUNDS = {"alphadrive_released": (-0.4, 1.4), "se_gui": (0, 2), "r1_reward": (-1, 1), "kimi_k1_5": (-0.5, 1)}
SERVICES = Services(given={"judge": lambda questions: ["1.0"] * len(questions),
                           "reference_logprobs": lambda answers: [np.zeros(1)] * len(answers)})


def cases(family):
    """(recipe, task, sample) of its recipes and rows."""
    if family == "boxes":
        return [(recipe, *boxes.built(name, recipe)) for name, recipe in boxes.RECIPES]
    kinds = (classification.ROW, classification.OPEN, classification.SEVERAL)
    made = {"classification": [(r, classification.built(recipe=r), row)
                               for r, row in product(classification.RECIPES, kinds)],
            "driving": [(r, driving.built(r), driving.WAY if r == "trajectory" else driving.ROW)
                        for r in driving.RECIPES],
            "preference": [(r, preference.built(recipe=r), preference.ROW) for r in preference.TABLES],
            "qa": [(r, qa.qa(recipe=r), {"id": "r1", **row}) for r, row in product(qa.RECIPES, qa.ROWS)],
            "video": [(r, video.built(r), row) for r, rows in video.ROWS.items() for row in rows]}[family]
    return [(recipe, task, task.sample_from_row(row)) for recipe, task, row in made]


@pytest.mark.parametrize(("family", "times"), [pytest.param(family, times, marks=[pytest.mark.slow] * (times > 1))
                                               for family in OWN for times in (1, 10)])
def test_whatever_is_written_is_scored_within_bounds(family, times):
    few, own = OWN[family]
    tried = cases(family)
    pieces = st.sampled_from(GENERAL) | st.sampled_from(own)

    @settings(max_examples=few * times)
    @given(st.lists(st.lists(pieces, max_size=12).map("".join) | st.text(max_size=80), min_size=1, max_size=2))
    def check(texts):
        answers = [parse_answer(text, n) for n, text in enumerate(texts, 1)]
        for recipe, task, sample in tried:
            low, high = BOUNDS.get(recipe, (0, 1))
            for answer, s in zip(answers, score_group(task, sample, answers, 0, SERVICES), strict=True):
                assert s.error is None, (recipe, s.error)
                assert all(low - 1e-9 <= v <= high + 1e-9 for v in s.parts.values()), (recipe, s.parts)
                json.dumps([s.parsed, task.metrics(sample, answer, s.parts)], allow_nan=False)
    check()
