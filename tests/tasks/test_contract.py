"""What every built-in task and recipe must keep: see vlrl/testing; and bounds of scores, whatever is written."""

import json
import subprocess
import sys
from functools import cache
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
from tests.tasks.scaffold import assert_ok
from vlrl import testing
from vlrl.config.base import Named
from vlrl.config.schema import DataSettings, EnvironmentSettings
from vlrl.environments.external import resolved
from vlrl.rewards.text import parse_answer
from vlrl.services.extra_parts import with_extra_parts
from vlrl.task import Task, builtin_names, load
from vlrl.task.scoring import score_group
from vlrl.task.services import Services
from vlrl.testing.cheats import with_template
from vlrl.testing.texts import special_tokens
from vlrl.types import Sample

VARIANTS = {
    "grounding": [{"drawn": True, "count": 40}, {}],
    "classification": [{"thinking": "no_thinking"}, {"thinking": "thinking"}], "digits": [{"thinking": "both"}],
    "gui": [{}], "driving": [{}], "drive": [{"scenarios": ("merge",), "seconds": 3, "width": 64, "traffic": 0}],
    "repair": [{"base": "grounding", "base_settings": {"drawn": True, "count": 40}}, {}]}
ROWS = {
    "grounding": [{"expression": "mug", "boxes": [{"box": [1, 2, 30.5, 40]}]}, {"expression": "cup", "boxes": []},
                  {"expression": "cat", "boxes": [{"box": [40, 20, 85, 50]}], "coordinates": "norm1"},
                  {"expression": "dog", "boxes": [{"box": [10, 30, 35, 55]}], "processed_size": [84, 56]}],
    "gui": [{"instruction": "open it", "box": [10, 20, 40, 35], "platform": "web", "element_type": "icon"},
            {"instruction": "go", "box": [5, 40, 30, 58.5], "coordinates": "norm1", "history": ["tap", "scroll"]},
            {"instruction": "close", "box": [60, 40, 85, 55], "processed_size": [84, 56]}],
    "qa": [{"question": "Well?", "answer": right, "answer_type": kind, "options": options} for right, kind, options in (
        (3, "count", None), (5, "count", None), ("no", "yes_no", None), ("yes", "yes_no", None),
        ("B", "choice", ["a cat", "a dog"]), ("A", "choice", ["a mug", "a cup"]))],
    "driving": [{"plan": {"speed": speed, "path": path}, "speed_mps": 8, "navigation": "Go on"} for speed, path in (
        ("KEEP", "STRAIGHT"), ("STOP", "STRAIGHT"), ("KEEP", "LEFT_TURN"), (["DECELERATE", "STOP"], "RIGHT_CHANGE"))],
    "video": [{"question": "What now?", "answer_type": "choice", "options": ["a cat", "a dog"], "answer": "B"},
              {"question": "What next?", "answer_type": "choice", "options": ["a mug", "a cup"], "answer": "A"},
              {"question": "How many?", "answer_type": "number", "answer": 3},
              {"question": "And before?", "answer_type": "number", "answer": 12}],
    "preference": [{"question": "What is it?", "responses": ["a cat", "a dog"], "answer": answer, "category": "x"}
                   for answer in (1, 2, 2, 1)],
    "classification": [{"label": "cat", "labels": ["cat", "dog"]}, {"label": "7"}, {"label": "C++", "question": "?"},
                       {"label": "tabby", "synonyms": ["tabby cat"], "question": "Which cat?"}],
    "rows": [{"question": "2 + 2?", "answer": "4"}, {"problem": "5 + 2?", "answer": "7"},
             {"prompt": [{"role": "user", "content": "1 + 2?"}], "answer": "3"}]}
PARTS = {"rows": (Named(name="tests/services/own.py:right"),)}  # a task without a reward of its own
IN_A_BROWSER = ("web",)  # what is checked in tests/tasks/test_web_pages.py instead, as it needs one
CASES = [(name, i) for name in builtin_names() if name not in IN_A_BROWSER
         for i in range(len(VARIANTS.get(name, [{}])))]
PIECES = [*special_tokens(), "[", "]", ",", "1", "23.5", "-", " ", "cat", "none", "\0", "\ufffd"]


@cache
def built(name: str, variant: int, folder: str) -> Task:
    """The task, with a data file when it reads one."""
    task = load(name, VARIANTS.get(name, [{}])[variant], lambda cls: with_extra_parts(cls, PARTS.get(name, ())))
    if task.lives_outside:
        task.outside = resolved(EnvironmentSettings(name=("gym:FrozenLake-v1",)))
    if name in ROWS and not getattr(task, "drawn", False):
        path = f"{folder}/{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"id": f"r{i}", "width": 90, "height": 60, **row}) + "\n"
                            for i, row in enumerate(ROWS[name]))
        task.data = DataSettings(train=path, format=task.row_format)
    return task


@cache
def first_sample(name: str, variant: int, folder: str) -> tuple[Task, Sample]:
    task = built(name, variant, folder)
    return task, task.samples("train")[0]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_contract(case, tmp_path_factory):
    assert_ok(built(*case, str(tmp_path_factory.getbasetemp())), samples=5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c[0]}-{c[1]}")
def test_the_contract_over_more_samples_and_another_process(case, tmp_path_factory):
    testing.assert_ok(built(*case, str(tmp_path_factory.getbasetemp())), samples=8, processes=1)


@pytest.mark.parametrize("name", builtin_names())
@settings(max_examples=40)
@given(st.text() | st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_raises(tmp_path_factory, name, text):
    for variant in range(len(VARIANTS.get(name, [{}]))):
        task, sample = first_sample(name, variant, str(tmp_path_factory.getbasetemp()))
        for template in task.templates:
            assert testing.try_text(task, with_template(sample, template), text) == []


def test_importing_every_task_loads_no_torch():
    code = ("import sys, vlrl.types, vlrl.data, vlrl.data.media, vlrl.data.video.sampling, vlrl.data.coordinates\n"
            "import vlrl.store.checkpoint, vlrl.rewards.boxes, vlrl.rewards.text, vlrl.rewards.detection\n"
            "import vlrl.rewards.literals, vlrl.rewards.points, vlrl.rewards.regions, vlrl.testing\n"
            "import vlrl.testing.labelled, vlrl.rewards.driving, vlrl.rewards.contrast, vlrl.rewards.math\n"
            "import vlrl.task.scoring, vlrl.training.build_task, vlrl.store, vlrl.tools.experiments.report\n"
            "import vlrl.monitoring.progress, vlrl.evaluation.stats, vlrl.cli.main, vlrl.tools.docs\n"
            "from vlrl.tools.datasets import check, convert, split\n"
            "from vlrl.tools.experiments import status\n"
            "from vlrl.tools.machine import doctor, machine_checks\n"
            "from vlrl.tools.play import questions\n"
            "from vlrl.tools.tasks import catalogue, rescore, scaffold, score_rows\n"
            "from vlrl.task import builtin_names, load\n"
            "for name in builtin_names(): load(name)\n"
            "assert 'torch' not in sys.modules and 'transformers' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


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


def recipes_of(family):
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
    tried = recipes_of(family)
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
