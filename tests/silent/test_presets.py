"""A preset is its paper's method on the config that it lies on, or what it lacks there is said."""

from vlrl import config
from vlrl.errors import ConfigError
from vlrl.tools.machine import dryrun

DRAWN = "configs/quickstart.yaml"


def said(*words: str, path: str = DRAWN) -> str:
    """Everything that the dry run says beyond facts, in a text."""
    report = dryrun.check(config.load(path, ["eval.samples=0", "log.samples_every=0", *words]), samples=1)
    return "\n".join(str(line) for name in ("inert", "needs", "warnings", "problems")
                     for line in getattr(report, name, ()))


def stages(path: str, *words: str) -> list[config.Config]:
    return [own for _, own in config.stages_of(config.load(path, words))]


def test_gdpo_on_one_part_names_the_number_of_parts():
    text = said("extends=algorithms/gdpo.yaml", "task.rewards.format=0")
    assert "gdpo" in text and "part" in text


def test_ema_grpo_on_one_task_names_several_tasks():
    text = said("extends=algorithms/ema_grpo.yaml")
    assert "ema_grpo" in text and "tasks" in text


def test_hicra_names_what_the_answers_have_to_hold():
    assert "hicra" in said("extends=algorithms/hicra.yaml")


def test_drive_that_never_reaches_its_second_stage_is_named():
    assert "curriculum" in said("extends=curricula/drive.yaml", "steps=40")


def test_a_learning_rate_on_the_command_line_reaches_every_stage_or_is_refused():
    try:
        found = stages("configs/stages/vision_r1.yaml", "train.lr=3e-5")
    except ConfigError as error:
        assert "train.lr" in str(error)
        return
    assert [own.train.lr for own in found] == [3e-5, 3e-5]


def test_a_batch_on_the_command_line_reaches_every_stage_or_is_refused():
    try:
        found = stages("configs/stages/alphadrive.yaml", "rollout.prompts_per_step=4")
    except ConfigError as error:
        assert "rollout.prompts_per_step" in str(error)
        return
    assert [own.rollout.prompts_per_step for own in found] == [4, 4]
