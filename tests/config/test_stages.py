"""`stages` in a config, the section `preset` of a preset's file, `vlrl presets`, and needs that are not met."""

import json
from functools import reduce
from pathlib import Path

import pytest

from tests.tables import by_hand, each, refused
from vlrl import config
from vlrl.cli.main import main
from vlrl.config import load, presets, shipped, stages_of, validate
from vlrl.config.schema import resumable
from vlrl.errors import ConfigError
from vlrl.tools.machine import needs
from vlrl.training.build_task import make_task

BASE = """
steps: 8
task: grounding
model: {name: embedded/tiny-qwen3-vl}
rollout: {group_size: 4}
algo: {loss: {name: cispo, cap: 5}}
"""


def written(folder, stages, base=BASE):
    (folder / "two.yaml").write_text(f"{base}\nstages:\n{stages}")
    return folder / "two.yaml"


def test_settings_and_files_of_a_stage(tmp_path):
    file = written(tmp_path, "  - {name: cold, kind: sft, steps: 3, train: {lr: 1e-3}}\n"
                             "  - {name: rl, kind: rl, algo: {loss: gspo}, rollout: {group_size: 2}}\n")
    (one, cold), (two, rl) = stages_of(load(file, ["train.lr=0.5", "run.dir=here", "stages.1.seed=7"]))
    assert (one.kind, cold.steps, cold.train.lr, cold.algo.loss.options) == ("sft", 3, 0.5, {"cap": 5})
    assert (two.name, rl.steps, rl.train.lr, rl.rollout.group_size, rl.seed) == ("rl", 8, 0.5, 2, 7)
    assert (rl.algo.loss.name, rl.algo.loss.options) == ("gspo", {})  # another name drops the options
    assert (cold.run.dir, rl.run.dir, rl.stages, cold.resume) == ("here/cold", "here/rl", (), "auto")
    (tmp_path / "slow.yaml").write_text("train: {lr: 1e-9}\nsteps: 4\n")
    (tmp_path / "rows.jsonl").write_text("")
    file = written(tmp_path, "  - {name: a, kind: rl, extends: [slow.yaml, algorithms/dapo.yaml], steps: 5}\n"
                             "  - {name: b, kind: sft, data: {train: rows.jsonl}}\n")
    (_, a), (_, b) = stages_of(load(file))
    assert (a.train.lr, a.steps, a.curriculum.keep.name) == (1e-9, 5, "some_right")
    assert b.data.train == str(tmp_path / "rows.jsonl")
    with pytest.raises(ConfigError, match=r"stages\.0\.extends: 'none\.yaml' does not exist"):
        load(written(tmp_path, "  - {name: a, kind: rl, extends: none.yaml}\n"))


test_mistakes_are_found_at_load = refused(
    ConfigError, lambda stages, tmp_path: load(written(tmp_path, f"  {stages}\n")), [
    ("- {name: a, kind: sfd}", "stages.0.kind='sfd'"), ("- {name: a/b, kind: rl}", "a stage's name becomes a folder"),
    ("- {name: a, kind: rl}\n  - {name: a, kind: rl}", "stages.0 and stages.1 are both called 'a'"),
    ("- {name: a, kind: rl, stepz: 3}", r"stages.0 \(a\): unknown setting 'stepz'.* Did you mean 'steps'"),
    ("- {name: a, kind: rl}\n  - {name: b, kind: sft, train: {lr: -1}}", r"stages.1 \(b\): train.lr=-1"),
    ("- {name: a, kind: rl, run: {dir: x}}", "run.dir is a setting of the run"),
    ("- {name: a, kind: rl, resume: never}", "resume is a setting of the run"),
    ("- {name: a, kind: merge}", "there is no previous stage"),
    ("- {name: a, kind: rl}\n  - {name: b, kind: merge, merge: {other: stat}}", "other='stat' is neither .*'start'"),
    ("- {name: a, kind: rl}\n  - {name: b, kind: merge, merge: {other: a}}", "is the previous stage"),
    ("- {name: a, kind: merge, hand_over: best}", "kind=merge has none"),
    ("- {name: a, kind: rl, model: {name: other}}", "model.name='other' differs from the run's model"),
    ("- {name: a, kind: rl}\n  - {name: b, kind: rl, begin: c}", "begin='c' is not an earlier.*: before, start, a"),
    ("- {name: a, kind: rl, hand_over: best, eval: {samples: 0}}", "hand_over=best needs evaluations"),
    ("- {name: a, kind: rounds, rounds: {answers: 0}}", r"stages.0 \(a\): rounds.answers=0")])


def test_rounds_and_presets_are_known(tmp_path):
    base = BASE.replace("task: grounding", "tasks: [{name: grounding}, {name: digits}]")
    with pytest.raises(ConfigError, match=r"kind=rounds supports a single task.*\(grounding, digits\)"):
        load(written(tmp_path, "  - {name: a, kind: rounds}\n", base))
    with pytest.raises(ConfigError, match=r"data\.solutions='x\.jsonl' refers to rows by their number"):
        validate({"tasks": ["grounding", "digits"], "model": {"name": "m"}, "data": {"solutions": "x.jsonl"}})
    assert {path.stem for path in (shipped("stages/raft.yaml").parent).glob("*.yaml")} == {*ROUNDS, *RECIPES}


ROUNDS = {"self_rehearsal": ("best", 1, "before", False), "raft": ("best", 8, "before", False),
          "expert_iteration": ("best", 96, "stage", True), "kimi_shortest": ("shortest", 8, "before", False),
          "kimi_dpo": ("shortest", 8, "before", False)}
RECIPES = {"cft": "sft", "redistill": "rl rounds", "vision_r1": "sft rl", "alphadrive": "sft rl",
           "curr_reft": "rl rl rl rounds", "kimi_long2short": "rounds merge rl"}


@each("name", ROUNDS)
def test_rounds_lie_on_any_config(name):
    ((stage, found),) = stages_of(load("configs/quickstart.yaml", [f"extends=stages/{name}.yaml", "steps=3"]))
    rounds = found.rounds
    assert (rounds.choose.name, rounds.answers, rounds.start, rounds.keep_rows) == ROUNDS[name]
    assert stage.kind == "rounds" and found.task.name == "grounding" and found.steps == 3


@each("name", RECIPES)
def test_recipes_of_several_stages(name):
    file = f"configs/stages/{name}.yaml"
    anywhere = name in ("kimi_long2short", "redistill")
    whole = load("configs/quickstart.yaml", [f"extends=stages/{name}.yaml"]) if anywhere else load(file)
    stages = dict(zip([stage.name for stage, _ in stages_of(whole)], stages_of(whole), strict=True))
    assert " ".join(stage.kind for stage, _ in stages.values()) == RECIPES[name]
    assert {found.model.name for _, found in stages.values()} == {whole.model.name}
    if name == "vision_r1":
        assert stages["cold"][1].train.lr == 5e-6 and stages["rl"][1].train.lr == 1e-6
        assert [s["group_size"] for s in stages["rl"][1].curriculum.model_extra["stages"]] == [16, 8, 4]
        assert stages["cold"][1].curriculum.name == "uniform"
    if name == "curr_reft":
        recipes = [found.task.model_extra["recipe"] for _, found in stages.values()]
        assert recipes == [f"curr_reft_{what}" for what in ("binary", "choice", "open", "open")]
    if name == "kimi_long2short":
        assert [s.name for s in stages["short"][1].algo.shaping] == ["kimi_length"]
        assert stages["short"][1].rollout.max_new_tokens == whole.rollout.max_new_tokens / 2


def test_what_a_stage_has_of_the_run(tmp_path):
    file = written(tmp_path, "  - {name: a, kind: sft, steps: 3, train: {lr: 1e-3}}\n"
                             "  - {name: b, kind: rl, algo: {loss: {name: gspo, clip_low: 0.1}}}\n")
    (_, a), (_, b) = stages_of(load(file, ["stages.0.steps=4", "steps=2", "train.lr=0.5", "algo.loss.clip_low=0.3"]))
    assert (a.steps, a.train.lr, b.steps, b.train.lr) == (4, 0.5, 2, 0.5)  # that of one stage says more
    assert b.algo.loss.options == {"clip_low": 0.3} and b.algo.loss.name == "gspo"
    (_, a), (_, b) = stages_of(load(file, ["extends=algorithms/dr_grpo.yaml"]))
    assert (b.algo.loss.name, b.algo.advantage.name) == ("ppo_clip", "dr_grpo")
    file = written(tmp_path, "  - {name: a, kind: rl}\n"
                             "  - {name: b, kind: rl, times: {rollout.max_new_tokens: 0.5, train.lr: 3}}\n")
    (_, a), (_, b) = stages_of(load(file, ["rollout.max_new_tokens=25", "train.lr=1e-4"]))
    assert (a.rollout.max_new_tokens, b.rollout.max_new_tokens) == (25, 13) and b.train.lr == pytest.approx(3e-4)
    with pytest.raises(ConfigError, match=r"stages\.1 \(b\): times\.model\.name=2: .* not a number"):
        load(file, ["stages.1.times={model.name: 2}"])


@each("word", ["model.lora.rank=16", "model.name=Qwen/Qwen3-VL-4B-Instruct", "train.lr=2e-05", "rollout.group_size=4"])
def test_curr_reft_is_one_run_of_one_model(word):
    key, _, value = word.partition("=")
    found = stages_of(load("configs/stages/curr_reft.yaml", [word]))
    assert [str(reduce(getattr, key.split("."), own)) for _, own in found] == [value] * 4


ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(f"{folder}/{path.name}" for folder in presets.KINDS
               for path in (ROOT / "configs" / folder).glob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def unmet(path, *words: str) -> list[str]:
    found = config.load(ROOT / "configs" / path, words)
    return [one.need for one in needs.find(found, make_task(found))]


def test_every_file_and_need_is_known():
    assert [presets.name_of(ROOT / "configs" / name) for name in FILES] == FILES
    for name in FILES:
        found = presets.find_preset(name)
        assert found and (ROOT / "configs" / found.task).is_file(), name
        assert {need.partition(" ")[0] for need in found.needs} <= {*presets.NEEDS}
    laid = config.load(QUICKSTART, ["extends=[algorithms/gspo.yaml, algorithms/tis.yaml, curricula/sec.yaml]"])
    assert laid.presets == ("algorithms/gspo.yaml", "algorithms/tis.yaml", "curricula/sec.yaml")
    assert "preset" not in laid.model_dump() and config.validate(laid.model_dump(mode="json")) == laid
    assert resumable("presets")
    assert {*needs.CHECKS} == {*presets.NEEDS}


@each("section said", [
    ("{for: quickstart.yaml, cost: none}", "preset.paper"), ("{for: 3, cost: none, paper: x}", "preset.for=3"),
    ("{for: a, cost: none, paper: x, needs: {epsodes: why}}", "Did you mean 'episodes'?"),
    ("{for: a, cost: none, paper: x, needs: {part: why}}", "takes an argument"),
    ("{for: a, cost: none, paper: x, needs: {tokens many: why}}", "takes a number"),
    ("{for: a, cost: none, paper: x, price: 3}", "preset.price")])
def test_a_section_that_says_something_else_is_refused(tmp_path, section, said):
    (tmp_path / "own.yaml").write_text(f"preset: {section}\nalgo: {{loss: gspo}}\n")
    with pytest.raises(ConfigError, match=r"own\.yaml") as refused:
        config.load(QUICKSTART, [f"extends={tmp_path / 'own.yaml'}"])
    assert said in str(refused.value)


test_what_is_not_given_is_named = by_hand(lambda path, words: unmet(path, *words), [
    ("recall.yaml", ["extends=algorithms/gigpo.yaml"], []),
    ("quickstart.yaml", ["extends=algorithms/gigpo.yaml"], ["episodes"]),
    ("recall.yaml", ["extends=algorithms/webrl.yaml"], ["answers", "unbuilt replay of episodes"]),
    ("recall.yaml", ["extends=algorithms/g_ra.yaml"], ["gate"]),
    ("recall.yaml", ["extends=algorithms/g_ra.yaml", "task.combine=gate:accuracy>=0.5"], []),
    ("recall.yaml", ["extends=algorithms/himac.yaml"], ["prompt <plan>"]),
    ("recall.yaml", ["extends=algorithms/himac.yaml", "task.system=Write a <plan>."], []),
    ("zoom.yaml", ["extends=algorithms/thor.yaml"], ["part tool_success"]),
    ("zoom.yaml", ["extends=algorithms/thor.yaml", "task.rewards.tool_success=0"], []),
    ("quickstart.yaml", ["extends=algorithms/gdpo.yaml"], ["parts 2"]),
    ("quickstart.yaml", ["extends=algorithms/gdpo.yaml", "task.rewards.format=0.1"], []),
    ("quickstart.yaml", ["extends=algorithms/ema_grpo.yaml"], ["tasks"]),
    ("mixture.yaml", ["extends=algorithms/ema_grpo.yaml"], []),
    ("quickstart.yaml", ["extends=algorithms/tis.yaml"], ["mismatch"]),
    ("quickstart.yaml", ["extends=algorithms/tis.yaml", "model.dtype=bfloat16"], []),
    ("quickstart.yaml", ["extends=algorithms/decoupled_ppo.yaml"], ["setting async.max_staleness"]),
    ("quickstart.yaml", ["extends=algorithms/decoupled_ppo.yaml", "async.max_staleness=1"], []),
    ("quickstart.yaml", ["extends=algorithms/expo.yaml"], ["writes <answer>"])])


def test_needs_of_stages_and_a_preset_of_before(tmp_path):
    path = ROOT / "configs" / "stages" / "vision_r1.yaml"
    assert [one.need for one in needs.of_stages(config.load(path))] == ["setting stages.0.data.train"]
    assert needs.of_stages(config.load(path, ["stages.0.data.train=cold.jsonl"])) == []
    with pytest.raises(ConfigError, match=r"It is now algorithms/rorecomp\.yaml, which has the buffer"):
        config.load(QUICKSTART, ["extends=algorithms/rorecomp_buffer.yaml"])


@pytest.mark.slow
def test_the_command_lists_and_filters_them(capsys):
    def rows(*words: str):
        assert main(["presets", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)
    every = rows()
    assert len(every) == len(FILES) and {*every[0]} == {"name", "kind", "for", "idea", "needs", "cost", "paper"}
    assert all(row["idea"] for row in every)
    assert {row["kind"] for row in every} == {"algorithm", "curriculum", "stages"}
    assert [row["name"] for row in rows("gspo")] == ["gspo", "gspo_token", "luspo"]
    assert {row["for"] for row in rows("--for", "recall")} == {"recall.yaml"}
    assert rows("--for", "recall") == rows("--for", "recall.yaml")
    assert main(["presets", "--for", "recal"]) == 1 and "Did you mean 'recall'?" in capsys.readouterr().err
