"""What a value of the wrong kind was meant as: each message says what to write instead."""

import pytest

from tests.tables import each
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.errors import ConfigError
from vlrl.task import Task
from vlrl.training.build_task import make_task


class Own(Task):
    """Given as a class, where a name is asked for."""


BASE = {"task": {"name": "grounding"}, "model": {"name": "x"}}


@each("tree said", [
    ({"task": Own}, r"task=tests\.config\.test_slips:Own"), ({"model": "x"}, r"write model\.name=x"),
    ({"data": {"train": object()}}, r"dataset\.to_parquet"),
    ({"task": {"name": "grounding", "prompt": {"question": None}}}, r"quotes, 'task\.prompt=\"\{question\}\"'"),
    ({"algo": {"kl": 0.04}}, r"algo\.kl_coef=0\.04"),
    ({"task": {"name": "grounding", "part": "x"}}, "Did you mean 'parts'"),
    ({"task": {"name": "grounding", "rewards": {"short": 1}}}, r"task\.parts=\[path/file\.py:name\]"),
    ({"algo": {"loss": "grpo"}}, r"extends=algorithms/grpo\.yaml"), ({"algo": {"loss": "gsqo"}}, "Did you mean 'gspo'"),
    ({"reward_funcs": "f"}, r"Here it is task\.name \(docs/coming-from\.md\)")])
def test_the_message_says_what_to_write(tree, said):
    with pytest.raises(ConfigError, match=said):
        found = config.validate({**BASE, **tree})
        make_task(found)
        Algorithm(found)
