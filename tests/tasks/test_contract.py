"""What every built-in task must keep; see vlrl/testing."""

import json
import subprocess
import sys
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tasks.scaffold import assert_ok
from vlrl import testing
from vlrl.config.schema import DataSettings, EnvironmentSettings
from vlrl.environments.external import resolved
from vlrl.task import Task, builtin_names, load
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
                       {"label": "tabby", "synonyms": ["tabby cat"], "question": "Which cat?"}]}
IN_A_BROWSER = ("web",)  # what is checked in tests/tasks/test_web_pages.py instead, as it needs one
CASES = [(name, i) for name in builtin_names() if name not in IN_A_BROWSER
         for i in range(len(VARIANTS.get(name, [{}])))]
PIECES = [*special_tokens(), "[", "]", ",", "1", "23.5", "-", " ", "cat", "none", "\0", "\ufffd"]


@cache
def built(name: str, variant: int, folder: str) -> Task:
    """The task, with a data file when it reads one."""
    task = load(name, VARIANTS.get(name, [{}])[variant])
    if task.lives_outside:
        task.outside = resolved(EnvironmentSettings(name=("gym:FrozenLake-v1",)))
    if name in ROWS and not getattr(task, "drawn", False):
        path = f"{folder}/{name}.jsonl"
        with open(path, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"id": f"r{i}", "width": 90, "height": 60, **row}) + "\n"
                            for i, row in enumerate(ROWS[name]))
        task.data = DataSettings(train=path)
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
    testing.assert_ok(built(*case, str(tmp_path_factory.getbasetemp())), samples=16, processes=1)


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
