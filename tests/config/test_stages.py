"""`stages` in a config, the section `preset` of a preset's file, `vlrl presets`, and needs that are not met."""

import json
import re
from functools import reduce
from pathlib import Path

import pytest

from tests.tables import by_hand, each, refused
from vlrl import config
from vlrl.algo.algorithm import Algorithm
from vlrl.cli.main import main
from vlrl.config import load, presets, shipped, stages_of, validate
from vlrl.config.preset_header import NEEDS
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
               for path in (ROOT / "configs" / folder).rglob("*.yaml"))
QUICKSTART = ROOT / "configs" / "quickstart.yaml"


def unmet(path, *words: str) -> list[str]:
    found = config.load(ROOT / "configs" / path, words)
    return [one.need for one in needs.find(found, make_task(found))]


def test_every_file_and_need_is_known():
    assert len(FILES) == len({*FILES}) > 120  # names without a group are unique
    for name in FILES:
        found = presets.find_preset(name)
        assert found and found.extends == name and found.group in presets.GROUPS, name
        assert (ROOT / "configs" / found.task).is_file() and 0 < len(found.idea) <= 40, name
        assert {need.partition(" ")[0] for need in found.needs} <= {*NEEDS}
        assert presets.name_of(ROOT / "configs" / found.group / f"{found.name}.yaml") == name
    assert {p.group for p in presets.shipped()} == {*presets.GROUPS}
    laid = config.load(QUICKSTART, ["extends=[algorithms/gspo.yaml, algorithms/tis.yaml, curricula/sec.yaml]"])
    assert laid.presets == ("algorithms/gspo.yaml", "algorithms/tis.yaml", "curricula/sec.yaml")
    assert "preset" not in laid.model_dump() and config.validate(laid.model_dump(mode="json")) == laid
    assert resumable("presets")
    assert {*needs.CHECKS} == {*NEEDS}


def test_a_preset_is_found_by_its_name_in_whatever_group_it_lies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("algorithms/gspo.yaml", "gspo.yaml", "algorithms/ratio/gspo.yaml", "configs/algorithms/gspo.yaml",
                 "../algorithms/gspo.yaml", f"{ROOT}/configs/algorithms/gspo.yaml"):
        (tmp_path / "own.yaml").write_text(f"extends: [quickstart.yaml, {name}]\n")
        for found in (config.load("own.yaml"), config.load("quickstart.yaml", [f"extends={name}"])):
            assert (found.algo.loss.name, found.presets) == ("gspo", ("algorithms/gspo.yaml",)), name
    for name in ("mine/algorithms/gspo.yaml", "algorithms/gspoo.yaml"):
        with pytest.raises(ConfigError, match="does not exist"):
            config.load("quickstart.yaml", [f"extends={name}"])
    # a run of an earlier version keeps names of presets that are gone
    assert presets.find_preset("algorithms/reinforce.yaml") is None
    old = config.load("quickstart.yaml", ["presets=[algorithms/reinforce.yaml, algorithms/gdpo.yaml]"])
    assert [one.need for one in needs.find(old, make_task(old))] == ["parts 2"]


@each("old words", [
    ("reinforce", ["algo.advantage=dr_grpo", "algo.loss=reinforce", "algo.aggregation=token_mean",
                   "algo.kl_coef=0"]),
    ("entropy_bonus", ["algo.entropy=bonus"]), ("length_bonus", ["algo.shaping=[length_bonus]"])])
def test_a_preset_that_is_a_setting_now_names_the_setting(old, words):
    for name in (f"algorithms/{old}.yaml", f"{old}.yaml"):
        with pytest.raises(ConfigError, match="It is now the setting") as refused:
            config.load(QUICKSTART, [f"extends={name}"])
        assert " ".join(words) in str(refused.value)
    Algorithm(config.load(QUICKSTART, words))


def spent(preset) -> set[str]:
    """The cost that a preset has by its settings, in the words of its field `cost`."""
    found = config.load(ROOT / "configs" / preset.task, [f"extends={preset.extends}"])
    before = config.load(ROOT / "configs" / preset.task)
    algo, rollout, curriculum, algorithm = found.algo, found.rollout, found.curriculum, Algorithm(found)
    search, options = getattr(rollout.branch, "search", None), curriculum.sampler.options
    groups = [rollout.group_size, options.get("group_size", 0)]
    mix = algo.demonstrations and algo.demonstrations.mix
    shares = algo.guided and algo.guided.words.options.get("shares")
    costs = {
        "reference": algorithm.needs_reference, "copy": algorithm.moves_reference, "critic": algo.critic,
        f"steps {rollout.minibatches}": rollout.minibatches > 1, f"passes {rollout.updates}": rollout.updates > 1,
        "resampling": curriculum.keep.name != "all", "oversampling": curriculum.oversample.name != "fixed",
        "replay": algo.stored, "teacher": algo.distillation, "greedy": algo.advantage.name == "remax",
        f"retries {len(shares) if shares else algo.guided and algo.guided.answers}": algo.guided,
        f"demonstrations {mix and mix.options.get('size', algo.demonstrations.rows)}": mix, "search": search,
        "branches": rollout.branch.roots, "forgetting": rollout.forget.lr > 0, "scan": curriculum.name == "gain_rl",
        "statistics": algo.loss.name == "simko" or algo.entropy.name == "siren",
        f"completions {max(groups)}": max(groups) > before.rollout.group_size,
        f"tokens {rollout.max_new_tokens}": rollout.max_new_tokens > before.rollout.max_new_tokens,
        f"probes {options.get('probe', options.get('probe_size'))}": "probe" in options or "probe_size" in options}
    return {cost for cost, has in costs.items() if has} or {"none"}


def spent_by_stages(preset) -> set[str]:
    found = stages_of(config.load(shipped(preset.extends)) if preset.task != "quickstart.yaml" else
                      config.load(QUICKSTART, [f"extends={preset.extends}"]))
    costs, steps = set(), {kind: sum(own.steps for stage, own in found if stage.kind == kind) for kind in ("sft", "rl")}
    for stage, own in found:
        if stage.kind == "rounds":
            rounds = own.rounds
            costs |= {f"rounds {rounds.count}", f"completions {rounds.answers}"}
            costs |= {f"prompts {rounds.prompts}"} if rounds.prompts < 100_000 else set()
        elif stage.kind in steps:
            costs.add("rl" if preset.task == "quickstart.yaml" else f"{stage.kind} {steps[stage.kind]}")
    return costs


@each("kind", ["algorithm", "curriculum", "stages"])
def test_a_preset_costs_what_it_says(kind):
    measure = spent_by_stages if kind == "stages" else spent
    said = {p.extends: {*p.cost.split(", ")} for p in presets.shipped() if p.kind == kind}
    assert {p.extends: measure(p) for p in presets.shipped() if p.kind == kind} == said


def test_evidence_is_a_page_that_has_the_preset():
    for preset in presets.shipped():
        if preset.evidence:
            sampler = config.load(QUICKSTART, [f"extends={preset.extends}"]).curriculum
            names = (preset.name, sampler.name, sampler.keep.name) if preset.kind == "curriculum" else (preset.name,)
            text = (ROOT / preset.evidence).read_text(encoding="utf-8")
            assert preset.evidence.startswith("benchmarks/results/"), preset
            assert any(re.search(rf"\b{name}\b", text) for name in names if name not in ("uniform", "all")), preset
    assert {p.name for p in presets.shipped() if p.evidence} >= {"gspo", "ppo", "gkd", "sec", "decoupled_ppo"}


@each("section said", [
    ("{for: quickstart.yaml, cost: none}", "preset.paper"), ("{for: 3, cost: none, paper: x}", "preset.for=3"),
    ("{for: a, cost: none, paper: x, needs: {epsodes: why}}", "Did you mean 'episodes'?"),
    ("{for: a, cost: none, paper: x, needs: {part: why}}", "takes an argument"),
    ("{for: a, cost: none, paper: x, needs: {tokens many: why}}", "takes a number"),
    ("{for: a, cost: none, paper: x, price: 3}", "preset.price"),
    ("{for: a, cost: stepps 4, paper: x}", "Did you mean 'steps'?"),
    ("{for: a, cost: 'none, steps', paper: x}", "takes a number")])
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
    assert len(every) == len(FILES) and {*every[0]} == {
        "name", "kind", "for", "group", "idea", "needs", "sets_not", "cost", "paper", "evidence"}
    assert all(row["idea"] for row in every)
    assert {row["kind"] for row in every} == {"algorithm", "curriculum", "stages"}
    assert [row["name"] for row in rows("gspo")] == ["gspo", "gspo_token", "luspo"]
    assert {row["for"] for row in rows("--for", "recall")} == {"recall.yaml"}
    assert rows("--for", "recall") == rows("--for", "recall.yaml")
    assert main(["presets", "--for", "recal"]) == 1 and "Did you mean 'recall'?" in capsys.readouterr().err


@pytest.mark.slow
def test_the_table_has_a_line_each_and_a_name_shows_the_card(capsys):
    def said(*words: str) -> str:
        assert main(["presets", *words]) == 0
        return capsys.readouterr().out
    lines = said().splitlines()
    groups = [line.partition(":")[0] for line in lines if line.partition(":")[0] in presets.GROUPS]
    names = [line.split()[0] for line in lines[1:-1] if line and line.partition(":")[0] not in presets.GROUPS]
    assert groups == [*presets.GROUPS] and sorted(names) == sorted(p.name for p in presets.shipped())
    assert max(map(len, lines)) <= 100
    for word in ("hiper", "hiper.yaml", "algorithms/hiper.yaml"):
        card = said(word)
        assert all(part in card for part in ("configs/recall.yaml", "<plan>", "critics: the paper has", "2602.16165",
                                             "4 optimizer steps", "extends=algorithms/hiper.yaml")), word
    assert "does not set  16 optimizer steps" in said("cispo") and "objectives_cpu.md" in said("cispo")
    assert said("curr_reft").count("extends=") == 2 and said("curricula/curr_reft").count("extends=") == 1
    assert "algo.entropy=bonus" in said("entropy_bonus") and "Did you mean 'gspo'?" in said("gsppo")
