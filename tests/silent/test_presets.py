"""A preset is its paper's method on the config that it lies on, or what it lacks there is said."""

from vlrl import config
from vlrl.errors import ConfigError
from vlrl.tools.machine import dryrun

DRAWN = "configs/quickstart.yaml"


def said(*words: str, path: str = DRAWN) -> str:
    report = dryrun.check(config.load(path, ["eval.samples=0", "log.samples_every=0", *words]), samples=1)
    return "\n".join(str(line) for name in ("inert", "needs", "warnings", "problems")
                     for line in getattr(report, name, ()))


def test_a_preset_names_what_it_lacks_and_settings_reach_every_stage():
    for words, named in ((("extends=algorithms/gdpo.yaml", "task.rewards.format=0"), ("gdpo", "part")),
                         (("extends=algorithms/ema_grpo.yaml",), ("ema_grpo", "tasks")),
                         (("extends=algorithms/hicra.yaml",), ("hicra",)),
                         (("extends=curricula/drive.yaml", "steps=40"), ("curriculum",))):
        text = said(*words)
        assert all(word in text for word in named), (words, text)
    for path, section, name, value in (("vision_r1", "train", "lr", 3e-5),
                                       ("alphadrive", "rollout", "prompts_per_step", 4)):
        try:
            found = config.stages_of(config.load(f"configs/stages/{path}.yaml", [f"{section}.{name}={value}"]))
        except ConfigError as error:
            assert f"{section}.{name}" in str(error)
        else:
            assert [getattr(getattr(own, section), name) for _, own in found] == [value] * 2
