"""Presets of the objective and docs/objectives.md: whose each is, that it trains and has another gradient where its
paper says so, that the page has every variant; and which shapings and advantages act on a gradient."""

import importlib
import math
import re
import sys
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from tests.algo.flat import random_step
from tests.algo.made import scores
from tests.e2e.runs import ROOT, metrics
from vlrl import config
from vlrl.algo import aggregation, reference, tables
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.named import parameters
from vlrl.algo.tables import ADVANTAGES, LOSSES
from vlrl.config import loading, presets
from vlrl.config.schema import Config
from vlrl.methods.demonstrations import mixes as demonstrations
from vlrl.methods.distillation import method as distillation
from vlrl.methods.replay import rules as stored
from vlrl.tools.machine import needs
from vlrl.training import inert
from vlrl.training.build_task import make_task
from vlrl.training.loop import train

sys.path.append(str(ROOT / "benchmarks"))
import preset_effects as effects  # a script beside the package

FOLDER = ROOT / "configs"
FILES = {path.stem: path for path in sorted((FOLDER / "algorithms").rglob("*.yaml"))}
NAMES = sorted(FILES)
ELSEWHERE = {"hold_entropy": "the temperature that samples", "e3": "the temperature that samples",
             "grpo_care": "the reference that a reward reads", "rlpr": "which groups are kept",
             "agent_rlvr": "second attempts, which have a loss of their own",
             "gkd": "the answers beside their teacher's",
             **dict.fromkeys(("ghpo", "egsr", "expo", "critique_grpo"), "second attempts"),
             **dict.fromkeys(("chord", "chord_phi", "sasr", "relift"),
                             "demonstrations, which have a loss of their own"),
             **dict.fromkeys(("swarm_sapo", "a_lol"), "stored answers, which have one too")}
"""Presets that change what the gradient is taken of."""
BEGUN = {"siren": {"anchor": 0.1}, "adaptive": {"coef": 0.1, "active": True}}
"""Entropy terms that have no gradient in the first optimizer step, in the middle of a run."""
GROUPS, SIZE, STEP = 6, 4, 150


@cache
def loaded(*words):
    return config.load(FOLDER / "quickstart.yaml", words)


@cache
def batch():
    """LossInputs of 24 answers whose ratios to the policy that sampled spread by 1, and features of each token."""
    x = random_step(7, GROUPS, SIZE, longest=8, gap=1.0)
    features = torch.randn(len(x.mask), 40, generator=torch.Generator().manual_seed(8), dtype=torch.float64) * 0.1
    return replace(x, texts=[" wait " if i % 5 == 0 else "a" for i in range(len(x.mask))], max_length=8,
                   outcome=x.rewards > 0.5), features


@cache
def paid():
    """The Scores of the same answers: graded rewards of two parts, a greedy answer, texts of several paragraphs."""
    x, _ = batch()
    draw, count = np.random.default_rng(9), GROUPS * SIZE
    runs = [x.rollout_id == r for r in range(count)]
    parts = {"iou": (0.8 * x.rewards + 0.1 * torch.rand(count, generator=torch.Generator().manual_seed(1))).tolist(),
             "format": draw.integers(0, 2, count).tolist()}
    rewards = [a + 0.1 * b for a, b in zip(*parts.values(), strict=True)]
    return scores([rewards[i:i + SIZE] for i in range(0, count, SIZE)], lengths=x.lengths.tolist(), step=STEP,
                  outcome=x.outcome,
                  greedy=draw.random(count).tolist(), parts=parts, part_weights={"iou": 1.0, "format": 0.1},
                  tokens=[draw.integers(0, 3, int(own.sum())) for own in runs], max_length=8,
                  masks=[(x.mask[own] > 0).numpy() for own in runs],
                  kl=[draw.normal(size=int(own.sum())) for own in runs], kl_coef=0.1,
                  steps=[[(0, int(own.sum()), v)] for own, v in zip(runs, draw.random(count), strict=True)],
                  per_token=[{"values": np.full(int(own.sum()), 0.3)} for own in runs],
                  texts=["\n\n".join(["so then"] * int(n)) + "<answer>1</answer>" for n in draw.integers(1, 6, count)])


def credited(found: Config, algorithm: Algorithm):
    """The batch with what the preset makes of the rewards: an advantage, and which answers are trained on."""
    x, features = batch()
    s = replace(paid(), kl=paid().kl if found.algo.kl_in == "reward" and found.algo.kl_coef else ())
    for shape in algorithm.shaping:
        s = replace(s, rewards=shape(s))
    given = algorithm.advantage(s)
    given = getattr(given, "advantages", given)  # with a critic there are targets too
    advantages = given[x.rollout_id] if torch.is_tensor(given) else torch.cat(
        [x.mask.new_zeros(0), *(torch.as_tensor(a, dtype=torch.float64) for a in given)])
    mask = x.mask * algorithm.batch(s)[x.rollout_id]
    lengths = torch.zeros_like(x.lengths).index_add(0, x.rollout_id, mask)
    return replace(x, advantages=advantages, mask=mask, lengths=lengths, rewards=paid().rewards,
                   total_tokens=float(mask.sum()), total_sequences=float((lengths > 0).sum())), features


@cache
def slope(words: tuple[str, ...], on_policy: bool) -> torch.Tensor:
    """d loss / d weights [40] of a policy whose log-probabilities and statistics are linear in them."""
    found = loaded(*words)
    algorithm = Algorithm(found)
    if algorithm.objective.entropy and algorithm.objective.entropy.name in BEGUN:
        algorithm.objective.entropy.load_state_dict(BEGUN[algorithm.objective.entropy.name])
    x, features = credited(found, algorithm)
    weights = torch.zeros(features.shape[1], dtype=torch.float64, requires_grad=True)
    drift = features @ weights
    others = features.roll(1, 0) @ weights  # of statistics
    moved = {"entropy": x.entropy + others, "nucleus_entropy:0.8": x.entropy ** 2 + others,
             **{k: v + (others if v.dim() == 1 else others[:, None]) for k, v in x.stats.items()}}
    x = replace(x, logprobs=x.logprobs.detach() + drift, stats=moved)
    if on_policy:
        x = replace(x, old_logprobs=x.logprobs.detach(), sampler_logprobs=x.logprobs.detach(), old_stats={})
    loss, _ = algorithm.objective(replace(x, prepared=algorithm.objective.prepare(x)), found.algo.kl_coef)
    (gradient,) = torch.autograd.grad(loss, weights)
    return gradient


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """|a - b| / |b|."""
    return float((a - b).norm() / b.norm())


def of(name: str, on_policy: bool, *more: str) -> torch.Tensor:
    return slope((f"extends=algorithms/{name}.yaml", *more), on_policy)


def test_a_preset_has_another_gradient_than_the_default():
    assert {name for name in NAMES if apart(of(name, False), slope((), False)) < 1e-9} == {*ELSEWHERE}


def test_a_preset_of_the_ratio_acts_off_policy_and_is_given_several_optimizer_steps():
    plain, losses = ["algo.loss=reinforce", "algo.weights=[]"], set()
    for name in NAMES:
        found = loaded(f"extends=algorithms/{name}.yaml")
        if name in ("clip_cov", "simko") or found.rollout.minibatches * found.rollout.updates == 1:
            continue
        losses.add(found.algo.loss.name)
        towards = [torch.cosine_similarity(of(name, on_policy), of(name, on_policy, *plain), dim=0)
                   for on_policy in (True, False)]
        assert towards[0] > 1 - 1e-6 or name in ("top_entropy", "siren", "stable_reinforce", "deepseek_v3_2"), name
        assert towards[1] < 1 - 1e-4, name
    assert {name for name in LOSSES if hasattr(LOSSES[name], "ratio")} - {"clip_cov", "simko"} <= losses


SMALL = ("rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=24", "eval.samples=0", "steps=2",
         "log.samples_every=0", "curriculum.max_refills=1", "data.workers=0", "save.every=0")
"""Answers of 24 tokens hold a box, so rewards differ; one step of most presets takes the embedded model .3 s."""
OUTSIDE = {"rollout": {"temperature", "group_size", "forget", "branch", "updates", "minibatches"},
           "curriculum": {"keep"}}
"""What a preset may set besides the objective."""
EXPLAINED = """from tasks.grounding import Grounding


class Explained(Grounding):
    def oracle(self, sample):
        return f"<think>I look at the picture.</think>{super().oracle(sample)}"
"""


def test_a_preset_is_a_few_lines_that_say_whose_it_is():
    for name in NAMES:
        text = FILES[name].read_text()
        assert text.startswith("# ") and len(text.splitlines()) < 28, name
        tree = loading._parse(text)
        assert {*tree.pop("preset")} <= {"idea", "for", "needs", "sets_not", "cost", "paper", "evidence"}, name
        tree.pop("extends", None)
        assert {k: {*v} - OUTSIDE[k] for k, v in tree.items() if k != "algo" and {*v} - OUTSIDE[k]} == {}, name
        Algorithm(loaded(f"extends=algorithms/{name}.yaml"))


def test_what_is_the_default_is_said_by_one_name():
    found = loaded("extends=[algorithms/gspo.yaml, algorithms/tis.yaml]")
    assert (found.algo.loss.name, found.algo.correction.name) == ("gspo", "token_truncate")


def runs(name):
    """Whether a preset does more than choose functions of one pass, whose gradients are taken above."""
    tree = loading._parse(FILES[name].read_text())
    plain = {"advantage", "loss", "aggregation", "weights", "shaping", "correction", "kl", "kl_coef", "kl_weights"}
    return bool({*tree.get("algo", {})} - plain or {*tree.get("rollout", {})} - {"minibatches"} or "curriculum" in tree)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if runs(name) or name in ("gspo", "remax", "siren")])
def test_a_preset_trains(name, tmp_path):
    (tmp_path / "explained.py").write_text(EXPLAINED)  # a hint is the beginning of a given reasoning
    more = {"ghpo": [f"task.name={tmp_path / 'explained.py'}:Explained"],
            "gkd": ["algo.distillation.objective=1"], "mdpo": ["rollout.updates=2"],
            "deepsearch": ["rollout.branch.search.width=3", "rollout.branch.search.depth=4"]}.get(name, [])
    train(loaded(f"extends=algorithms/{name}.yaml", *SMALL, *more, f"run.dir={tmp_path / 'run'}"))
    lines = metrics(tmp_path / "run")
    assert len(lines) == 2 and all(math.isfinite(line["loss"]) and math.isfinite(line["grad_norm"]) for line in lines)
    assert lines[0]["reward/mean"] > 0 and any(line["grad_norm"] > 1e-6 for line in lines)


ROUNDING = 1e-5
WITHOUT_EFFECT = {"apo", "hicra", "himac", "hiper"}
"""Whose needs the shipped config, or the embedded model, does not meet."""


ONE_SETTING = {"adaptive_kl", "cosine", "dast", "e3", "grsp", "gspo_token", "kimi_length", "rorecomp", "step_pruner"}
"""Presets that differ from another one, or from the default, by a setting: it is the method of their paper."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    return effects.Bench(str(tmp_path_factory.mktemp("effects")))


def test_every_preset_is_looked_at():
    every = {kind: {p.name for p in presets.shipped() if p.kind == kind} for kind in effects.EFFECTS}
    assert every == {kind: {*table} for kind, (table, _) in effects.EFFECTS.items()}


ALGORITHMS = sorted(name for name, effect in effects.ALGORITHMS.items() if not isinstance(effect, effects.Metric)
                    and name in {*WITHOUT_EFFECT, *ELSEWHERE, *ONE_SETTING, "gspo", "gdpo", "siren", "tis"})
"""Those whose gradient does not differ from the default's, one of each kind, and those of one setting."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_preset_of_the_objective_is_its_method(bench, name):
    preset = presets.find_preset(f"algorithms/{name}.yaml")
    number, says = effects.of_algorithm(bench, preset)
    found = bench.load(preset.task, f"extends=algorithms/{name}.yaml")
    if name in WITHOUT_EFFECT:
        assert needs.find(found, make_task(found)) and number < ROUNDING, says
    else:
        assert number > ROUNDING and number != 1.0, says


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(effects.CURRICULA))
def test_a_curriculum_draws_what_its_paper_names(bench, name):
    number, says = effects.of_curriculum(bench, presets.find_preset(f"curricula/{name}.yaml"))
    assert number > 0.05, says


def test_the_table_has_every_preset():
    table = (ROOT / "benchmarks" / "results" / "preset_effects.md").read_text(encoding="utf-8")
    rows = [row.split(" | ")[:2] for row in table.splitlines() if row.startswith("| ") and "/" in row.split(" | ")[0]]
    assert rows == [[f"| {effects.FOLDERS[p.kind]}/{p.name}", p.task] for p in presets.shipped()]


@pytest.mark.slow
def test_the_table_has_the_needs_that_the_config_of_a_preset_does_not_meet(bench):
    table = (ROOT / "benchmarks" / "results" / "preset_effects.md").read_text(encoding="utf-8")
    cells = [row.strip("| ").split(" | ") for row in table.splitlines() if row.startswith("| ")]
    said = {row[0]: {*row[4].split("; ")} if len(row) > 4 else set() for row in cells if "/" in row[0]}
    assert {f"{effects.FOLDERS[p.kind]}/{p.name}": {*effects.unmet(bench, p).split("; ")} - {""}
            for p in presets.shipped()} == {name: needs - {""} for name, needs in said.items()}


SHAPES = ["{name: overlong, limit: 8, buffer: 4}", "cosine"]
"""Two that change some reward, and take some across 0.4 and across the mean of its group."""
SOLVED = "{name: oreal, weighted: false, negative: 0}"
NEEDS = {**{name: ["algo.critic={}"] for name in ("gae", "turn_gae", "bilevel_gae", "macro_gae")},
         "deepsearch": ["rollout.branch.search={}"]}
COMBINATIONS = [
    *[([f"algo.advantage={name}", *NEEDS.get(name, ())], getattr(ADVANTAGES[name], "alone", None) is None)
      for name in ADVANTAGES if name != "gdpo"],
    *[([f"algo.loss={name}"], name not in ("nft", "pacs")) for name in LOSSES if name != "supervised"],
    (["algo.advantage={name: nsr, part: iou}"], False), (["algo.advantage={name: w_reinforce, correct: 0.4}"], True),
    (["algo.advantage=nsr", "algo.batch=rorecomp"], False),
    (["algo.advantage=nsr", "algo.batch={name: rorecomp, correct: 0.4}"], True),
    (["algo.loss=oreal", "algo.advantage=nsr"], False), ([f"algo.loss={SOLVED}"], False),
    (["algo.loss={name: oreal, weighted: false}"], True), (["algo.loss={name: oreal, negative: 0}"], True),
    (["algo.loss=nft", "algo.weights=[stcr, difficulty, top_entropy]"], False),
    *[([f"algo.loss={loss}", f"algo.weights=[{name}]"], True) for loss in ("nft", "pacs")
      for name in ("hicra", "dads", "off_policy_sequence_mask")],
    (["algo.loss=pacs", "algo.kl_coef=0.1", "algo.kl_weights=[dads]"], True),
    (["algo.loss=nft", "algo.advantage=nsr", "algo.weights=[hicra]"], False),
    (["algo.loss=nft", "algo.batch=rorecomp"], False), (["algo.loss=nft", "algo.batch=pf_ppo"], True),
    (["algo.loss=nft", "algo.batch={name: rorecomp, correct: 0.4}"], True)]


def unused(*words):
    return {one.setting for one in inert.find(loaded(*words))}


@pytest.mark.slow
def test_a_shaping_acts_or_is_named():
    for words, acts in COMBINATIONS:
        for shape in SHAPES:
            shaped = (*words, f"algo.shaping=[{shape}]")
            assert (apart(slope(shaped, False), slope((*words,), False)) > 1e-12) == acts, shaped
            assert ("algo.shaping.0" not in unused(*shaped)) == acts, shaped


def test_an_advantage_that_nothing_reads_and_a_reward_that_another_replaces_are_named():
    for loss in ("nft", "pacs", SOLVED):
        words = f"algo.loss={loss}", "algo.advantage=maxrl"
        assert apart(slope(words, False), slope(words[:1], False)) == 0 and "algo.advantage" in unused(*words), loss
    for last, replaces in (("cosine", True), ("{name: cosine, part: iou}", True),
                           ("{name: cosine, correct: 0.4}", False), ("dast", False)):
        both = f"algo.shaping=[{SHAPES[0]}, {last}]"
        assert (apart(slope((both,), False), slope((f"algo.shaping=[{last}]",), False)) < 1e-12) == replaces, last
        assert ("algo.shaping.0" in unused(both)) == replaces, last


PAGE = (ROOT / "docs" / "objectives.md").read_text(encoding="utf-8")
TABLES = (tables.ADVANTAGES, tables.SHAPINGS, tables.BATCHES, tables.LOSSES, tables.WEIGHTS, tables.ENTROPIES,
          tables.CORRECTIONS, tables.KLS, reference.REFERENCES, demonstrations.MIXES, distillation.LOSSES, stored.RULES,
          stored.DRAWS, stored.SCHEDULES)


def test_every_name_and_option_stands_there():
    words = set(re.findall(r"`([\w-]+)`", PAGE))
    assert [name for table in (*TABLES, aggregation.AGGREGATIONS) for name in table if name not in words] == []
    options = {name: parameters(f, 2 if table is stored.DRAWS else 1) for table in TABLES for name, f in table.items()}
    assert [(name, o) for name, known in options.items() for o in known if o not in words] == []


def test_the_example_is_short_and_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    found = re.findall(r"`(\w+\.(?:py|yaml))`\n\n```\w+\n(.*?)```", PAGE, re.S)
    assert [name for name, _ in found] == ["tempered.py", "tempered.yaml", "test_tempered.py"]
    assert sum(len(text.splitlines()) for _, text in found) < 40
    for name, text in found:
        (tmp_path / name).write_text(text)
    try:
        importlib.import_module("test_tempered").test_by_hand()
    finally:
        for name in ("tempered", "test_tempered"):
            sys.modules.pop(name, None)
    bound = Algorithm(loaded("extends=tempered.yaml")).objective.term
    assert bound.options == {"power": pytest.approx(0.25)} and bound.name == "tempered.py:tempered"
