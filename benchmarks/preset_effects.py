"""What does each preset do on the shipped config that it is for?

    python benchmarks/preset_effects.py --out benchmarks/results/preset_effects.md     # about ten minutes on one core

One number per preset, compared with the nearest configuration without the method. Objectives: the gradient on one batch
of answers of the embedded model (preset_gradient.py). Methods that sample or learn more: a metric of a run of two
steps, and the distance of its weights from those of a run without the method, relative to how far that run moved.
Samplers draw rows of the config and get scripted answers. Stages are runs of one step. The last column names needs
that the config does not meet; there the effect may be 0. (EGSR: the embedded model never uses a solution correctly.)"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from preset_gradient import Scene, gradient, scene

from vlrl import config as configs
from vlrl import curriculum
from vlrl.algo.algorithm import Algorithm
from vlrl.config import presets
from vlrl.config.presets import Preset
from vlrl.config.schema import Config
from vlrl.curriculum import Draw, Outcome, Prompts
from vlrl.curriculum.base import MeasuringSampler
from vlrl.curriculum.filters import Filters
from vlrl.errors import ConfigError
from vlrl.task import task_samples
from vlrl.tools.machine import needs
from vlrl.tools.stages import run as stages
from vlrl.training.build_task import make_task
from vlrl.training.loop import train

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {kind: folder for folder, kind in presets.KINDS.items()}
SMALL = ("rollout.prompts_per_step=4", "eval.samples=0", "log.samples_every=0",
         "curriculum.max_refills=1", "data.workers=0", "save.every=0", "limits.score_s=0")


@dataclass(frozen=True)
class Gradient:
    """|g - g'| / |g'|, where g' is the gradient with the settings `beside` on top of the preset."""

    beside: Sequence[str]
    off_policy: bool = False
    words: Sequence[str] = ()
    move: float = 0.05


@dataclass(frozen=True)
class Steered:
    """A value that the method adjusts over the steps: temperature, KL coefficient or reference weights."""


@dataclass(frozen=True)
class Metric:
    """A metric of the last step, and the distance of the weights from those of a run with the settings `beside`,
    relative to how far that run moved."""

    metric: str
    beside: Sequence[str]
    words: Sequence[str] = ()
    steps: int = 2


@dataclass(frozen=True)
class Drawn:
    """What a sampler draws from scripted answers."""

    says: str
    number: Callable[[Drive], float]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Staged:
    """What is on the disk after the stages, or what these are given."""

    says: str
    number: Callable[[Path, Config], float]
    runs: bool = True


Effect = Gradient | Steered | Metric | Drawn | Staged
LOSS, ADVANTAGE = "algo.loss=ppo_clip", "algo.advantage=grpo"
SHAPED = ("algo.shaping=[]",)
VARIED = ("rollout.temperature=1.5",)
"""At 1 the embedded model's answers are all of one length, and seldom score the same."""
STORED, SECOND, GIVEN = (["algo.stored=null"], ["algo.guided=null"], ["algo.demonstrations=null"])
BRANCHED = ["rollout.branch={roots: null, at: surprise}", "algo.advantage=grpo"]
EASIER = ("curriculum.pass_at=0.1", "rollout.group_size=2", "rollout.prompts_per_step=16")
"""Right from an IoU of .1 on: at .5 the embedded model has too few right answers for a small batch."""
MORE = ("curriculum.pass_at=0.3", "algo.guided.answers=16", *EASIER[1:])


def ratio(*beside: str, move: float = 0.05) -> Gradient:
    return Gradient(beside or (LOSS,), off_policy=True, move=move)


def credit(*beside: str, words: Sequence[str] = ()) -> Gradient:
    return Gradient(beside or (ADVANTAGE,), words=words)


ALGORITHMS: Mapping[str, Effect] = {
    **dict.fromkeys("adaptive_kl e3 grpo_care hold_entropy".split(), Steered()),
    **dict.fromkeys("cispo clip_cov gmpo gspo kimi kl_cov mdpo rover sapo vespo".split(), ratio()),
    **dict.fromkeys("cosine dast step_pruner".split(), credit(*SHAPED)),
    **dict.fromkeys("decoupled_ppo icepop mis tis".split(), ratio("algo.correction=none")),
    **dict.fromkeys("ema_grpo gdpo gigpo lite_ppo mobgrpo pass_at_k reinforce_pp tempo".split(), credit()),
    **dict.fromkeys("siren skywork_or1".split(), credit("algo.entropy=none")),
    **dict.fromkeys("gui_g1 hicra top_entropy".split(), credit("algo.weights=[]")),
    **dict.fromkeys("maxrl reinforce_pp_baseline remax rloo".split(), credit("algo.advantage=dr_grpo")),
    **dict.fromkeys("nft oreal pacs simko".split(), credit(LOSS)),
    "a_lol": Metric("stored/loss", STORED),
    "agent_rlvr": Metric("guided/groups_frac", SECOND, MORE),
    "apo": credit("algo.weights=[]", "algo.kl_weights=[]"),
    "archer": credit("extends=algorithms/loop.yaml", "algo.critic=null"),
    "brorl": Metric("rollouts/total", ["rollout.group_size=16"], steps=1),
    "chord": Metric("demonstrations/share", GIVEN),
    "chord_phi": Metric("demonstrations/factor", ["algo.demonstrations.mix={name: chord, peak: 0.1, valley: 0.1}"]),
    "copg": Metric("stored/loss", STORED),
    "critique_grpo": Metric("guided/groups_frac", SECOND, EASIER),
    "dapo": ratio("extends=algorithms/grpo.yaml"),
    "deepsearch": Metric("search/groups_frac", ["rollout.branch.search=null", "algo.advantage=grpo"],
                         ["rollout.branch.search.depth=2", "rollout.branch.search.width=2"]),
    "deepseek_v3_2": ratio("algo.weights=[]", move=0.3),
    "dppo": ratio("algo.loss={name: cispo, cap: 5}", move=0.3),
    "dr_grpo": credit("extends=algorithms/grpo.yaml"),
    "dual_clip": ratio("algo.loss.dual_clip=null", move=0.3),
    "eepo": Metric("correction/weight", ["rollout.forget={lr: 0, entropy: null}"], ["rollout.forget.entropy=5",
                   "rollout.forget.lr=0.01"]),
    "egsr": Metric("guided/groups_frac", SECOND, MORE),
    "expo": Metric("guided/kept", SECOND),
    "g_ra": credit("task.combine=sum", words=["task.combine=gate:accuracy>=0.5"]),
    "ghpo": Metric("guided/groups_frac", SECOND),
    "gkd": Metric("distillation/kl", ["algo.distillation=null"], ["algo.distillation.objective=1"], 4),
    "gpg": credit("algo.advantage=dr_grpo", words=VARIED),
    "grpo": credit("algo.kl_coef=0"),
    "grsp": credit(*SHAPED, words=[*VARIED, "curriculum.pass_at=0.2"]),
    "gspo_token": ratio("algo.loss=gspo"),
    "himac": credit("algo.advantage=turn_return"),
    "hiper": credit("algo.advantage={name: turn_return, gamma: 0.95}"),
    "kimi_length": credit(*SHAPED, words=[*VARIED, "curriculum.pass_at=0.2"]),
    "loop": ratio("algo.loss=reinforce"),
    "luspo": ratio("algo.aggregation=sequence_mean"),
    "ma_rlhf": credit("extends=algorithms/ppo.yaml"),
    "nsr": credit("algo.advantage=w_reinforce"),
    "opo": credit("algo.advantage=dr_grpo", words=VARIED),
    "pf_ppo": credit("algo.batch=all"),
    "ppo": credit("extends=algorithms/grpo.yaml", "algo.critic=null"),
    "prorl": ratio("algo.kl_coef=0", "algo.loss.clip_high=0.28"),
    "raft_pp": credit("algo.advantage=grpo", "algo.batch=all"),
    "relift": Metric("demonstrations/buffer", GIVEN, ["algo.demonstrations.mix.size=4"]),
    "rlpr": ratio("algo.loss=reinforce"),
    "rorecomp": credit("algo.batch=all", words=[*VARIED, "curriculum.pass_at=0.1"]),
    "rose": Metric("branch/reused_frac", BRANCHED),
    "sasr": Metric("demonstrations/share", GIVEN, ["algo.demonstrations.mix.warmup=1"]),
    "stable_reinforce": ratio(move=0.3),
    "steppo": ratio("algo.loss=gspo"),
    "swarm_sapo": Metric("stored/groups", STORED),
    "thor": credit(words=["task.rewards.tool_success=0"]),
    "treerl": Metric("branch/reused_frac", BRANCHED),
    "two_sided": ratio("algo.loss.delta=null", move=0.6),
    "vagen": credit("extends=algorithms/archer.yaml"),
    "w_reinforce": credit("algo.advantage=nsr"),
    "webrl": Metric("stored/loss", STORED, EASIER),
}


# --- gradients and metrics --------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Bench:
    """What is made once: scenes, and weights before the first step."""

    folder: str
    scenes: dict[tuple[str, float, tuple[str, ...]], Scene] = field(default_factory=dict)
    starts: dict[str, torch.Tensor] = field(default_factory=dict)

    def load(self, path: str, *words: str) -> Config:
        common = [f"run.dir={self.folder}/run", "data.workers=0", "limits.score_s=0", "eval.samples=0"]
        return configs.load(ROOT / "configs" / path, [*common, *words])

    def scene(self, path: str, move: float, words: Sequence[str]) -> Scene:
        key = (path, move, tuple(words))
        if key not in self.scenes:
            greedy = [] if path != "quickstart.yaml" else ["algo.advantage=remax"]
            self.scenes[key] = scene(self.load(path, *greedy, "rollout.group_size=8", *words), 4, move)
        return self.scenes[key]

    def gradient(self, path: str, effect: Gradient, words: Sequence[str]) -> torch.Tensor:
        decide = [w for w in words if w.startswith(("task.", "rollout.", "curriculum."))]  # answers and rewards
        found = self.load(path, "rollout.group_size=8", *words)
        return gradient(self.scene(path, effect.move, decide), found, effect.off_policy)

    def run(self, path: str, *words: str) -> tuple[dict[str, Any], torch.Tensor]:
        """The last line of metrics of a small run, and its weights."""
        with tempfile.TemporaryDirectory(dir=self.folder) as place:
            parts = train(configs.load(ROOT / "configs" / path, [*words, f"run.dir={place}/run"])).parts
            written = Path(place) / "run" / "metrics.jsonl"
            last = _lines(written)[-1] if written.exists() else {}
        return last, torch.cat([p.detach().flatten() for _, p in parts.policy.trainable()])


def of_algorithm(bench: Bench, preset: Preset) -> tuple[float, str]:
    """Returns the number of a preset of the objective, and what it is."""
    effect, extends = ALGORITHMS[preset.name], f"extends=algorithms/{preset.name}.yaml"
    if isinstance(effect, Steered):
        return _steered(Algorithm(bench.load(preset.task, extends)))
    if isinstance(effect, Metric):
        return _trained(bench, preset, effect, extends)
    assert isinstance(effect, Gradient)
    own = bench.gradient(preset.task, effect, [extends, *effect.words])
    other = bench.gradient(preset.task, effect, [extends, *effect.words, *effect.beside])
    where = "after a move" if effect.off_policy else "where it sampled"
    cosine = float(own @ other / (own.norm() * other.norm()))
    return float((own - other).norm() / other.norm()), (
        f"gradient beside {' '.join(effect.beside)}, {where}; cosine {cosine:.4f}")


def _trained(bench: Bench, preset: Preset, effect: Metric, extends: str) -> tuple[float, str]:
    words = [*SMALL, extends, *(["rollout.group_size=4"] if preset.name != "brorl" else []), *effect.words]
    last, own = bench.run(preset.task, *words, f"steps={effect.steps}")
    _, other = bench.run(preset.task, *words, f"steps={effect.steps}", *effect.beside)
    if preset.task not in bench.starts:
        bench.starts[preset.task] = bench.run(preset.task, *SMALL, "steps=0")[1]
    return float((own - other).norm() / (other - bench.starts[preset.task]).norm()), (
        f"weights after {effect.steps} steps beside {' '.join(effect.beside)}; "
        f"{effect.metric} {last.get(effect.metric, 0.0):.3g}")


def _steered(algorithm: Algorithm) -> tuple[float, str]:
    entropy: Any = algorithm._entropy
    if hasattr(entropy, "observe_step"):
        for value in (1.0, 0.5, 0.5):
            entropy.observe_step(value, algorithm.config.rollout.temperature, 600)
        return algorithm.temperature / algorithm.config.rollout.temperature, "temperature, times the first"
    if algorithm.moves_reference:
        moved, policy = torch.zeros(1), torch.ones(1)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        algorithm.reference.function.after_step({"w": moved}, {"w": policy}, optimizer, 0.0, 10)
        return float(moved), "of the way to the policy in ten steps"
    before = algorithm.kl.value
    for _ in range(100):
        algorithm.kl.observe(0.1, algorithm.config.rollout.prompts_per_step * algorithm.config.rollout.group_size)
    return algorithm.kl.value / before, "coefficient after 100 steps, times the first"


# --- samplers ---------------------------------------------------------------------------------------------------------


UNIFORM: dict[tuple[Any, ...], list[list[Draw]]] = {}
"""What `uniform` draws, by config, answers and words."""


class Drive:
    """The draws of a preset's sampler over some steps, and of `uniform`, on the rows of its config. Answers are
    scripted: right by chance, less often the harder the row, and always but in one category with `solved`."""

    def __init__(self, path: str, words: Sequence[str], solved: bool = False):
        small = ["rollout.prompts_per_step=16", "eval.samples=0"]
        self.config = configs.load(ROOT / "configs" / path, [*words, *small])
        self.task = make_task(self.config)
        self.samples = task_samples(self.task, "train")
        self.solved, self.steps = solved, 72 if solved else 24
        self.draws, self.outcomes = self._run(self.config)
        alike = [w for w in words if not w.startswith(("curriculum.", "extends="))]
        key = (path, solved, *alike)
        if key not in UNIFORM:
            UNIFORM[key], _ = self._run(configs.load(ROOT / "configs" / path, [*alike, *small]))
        self.plain = UNIFORM[key]

    def _run(self, config: Config) -> tuple[list[list[Draw]], list[list[Outcome]]]:
        prompts = Prompts.of(self.samples, config.seed, config.data.difficulty, config.rollout, self.task.knobs,
                             self.task.stage_fields)
        made = curriculum.make(config.curriculum, prompts, config.shares)
        sampler: Any = made
        if isinstance(made, MeasuringSampler):
            missing = made.missing()
            made.measured(missing, np.cos(missing).astype(np.float32))
        drawn, came = [], []
        for step in range(self.steps):
            self.step = step
            for draws in (getattr(sampler, "probes", lambda step: []), partial(sampler.next, 16)):
                some = draws(step)
                outcomes = [self.outcome(draw) for draw in some]
                prompts.history.note(outcomes, step)
                sampler.observe(outcomes, step)
            drawn.append(list(some))
            came.append(outcomes)
        return drawn, came

    def outcome(self, draw: Draw) -> Outcome:
        rate = 1 - float(self.samples[draw.index].row.get("difficulty") or 0.5)
        if draw.knobs:  # nothing is learned of small ones
            rate = self.step / self.steps if self.knob(draw) > 0.5 else 0.0
        if self.solved:
            rate = 0.5 if self.category(draw) == self.last else 1.0
        chance = np.random.default_rng([draw.index, draw.visit])
        size = min(draw.group_size or 8, 8)
        right = tuple(bool(x) for x in chance.random(size) < min(max(rate, 0.0), 1.0))
        return Outcome(draw, tuple(map(float, right)), right, surprise=1.0 + rate)

    def knob(self, draw: Draw) -> float:
        """A knob of the task, between 0 and 1."""
        (name, value), *_ = draw.knobs
        low, high = self.task.knobs[name]
        return (value - low) / (high - low)

    def category(self, draw: Draw) -> str:
        sample = self.samples[draw.index]
        return sample.task or str(sample.row.get("category"))

    @cached_property
    def last(self) -> str:
        """The rarest category."""
        return Counter(self.category(Draw(i, 0)) for i in range(min(len(self.samples), 90))).most_common()[-1][0]

    def share(self, meets: Callable[[Draw], bool], part: slice = slice(None)) -> float:
        """How much more often the sampler draws what meets something than uniform does, in some of its steps."""
        def of(steps: Sequence[Sequence[Draw]]) -> float:
            some = [draw for step in list(steps)[part] for draw in step]
            return sum(map(meets, some)) / max(len(some), 1)
        return of(self.draws) - of(self.plain)

    def near(self, difficulty: float, part: slice = slice(None)) -> float:
        """Like `share`, of the draws within 0.2 of a difficulty."""
        return self.share(lambda d: abs(float(self.samples[d.index].row["difficulty"]) - difficulty) < 0.2, part)

    def rarest(self) -> float:
        """Like `share`, of the draws of the rarest category, which stays unsolved."""
        return self.share(lambda d: self.category(d) == self.last)

    def hard(self, draw: Draw) -> bool:
        return float(self.samples[draw.index].row.get("difficulty") or 0) > 0.5

    def stages(self) -> list[Mapping[str, Any]]:
        return [dict(stage) for stage in self.config.curriculum.sampler.options["stages"]]


def _rest(drive: Drive) -> float:
    """Share of prompts with groups all right or all wrong that come back within the steps, beside uniform's."""
    again = Counter(draw.index for step in drive.draws for draw in step)
    plain = Counter(draw.index for step in drive.plain for draw in step)
    return float(np.mean([*again.values()]) - np.mean([*plain.values()]))


def _distinct(steps: Sequence[Sequence[Draw]]) -> int:
    """Number of different prompts in the last six steps."""
    return len({draw.index for step in steps[-6:] for draw in step})


def _sizes(drive: Drive) -> float:
    sizes = [draw.group_size or drive.config.rollout.group_size for step in drive.draws for draw in step]
    return max(sizes) / min(sizes)


def _order(drive: Drive) -> float:
    """Mean difficulty of the last third of the draws less that of the first."""
    mean = [np.mean([float(drive.samples[d.index].row["difficulty"]) for step in some for d in step])
            for some in (drive.draws[:8], drive.draws[-8:])]
    return float(mean[1] - mean[0])


def _knobs(drive: Drive, large: bool) -> float:
    """Share of the last draws in the half of a knob's range more than the half that it is of all."""
    some = [d for step in drive.draws[-8:] for d in step if d.knobs]
    return sum((drive.knob(d) > 0.5) == large for d in some) / len(some) - 0.5


def _kept(drive: Drive) -> float:
    """Share of groups that the filter drops."""
    keep = Filters(drive.config.curriculum).keep.function
    outcomes = [o for step in drive.outcomes for o in step]
    return 1 - sum(map(keep, outcomes)) / len(outcomes)


def _oversampled(drive: Drive) -> float:
    """Groups that are drawn for 16, after the steps."""
    filters = Filters(drive.config.curriculum)
    for outcomes in drive.outcomes:
        filters.observe(outcomes)
    return filters.oversampled(16)


RARE = ["task.count=512"]
CURRICULA: Mapping[str, Drawn] = {
    "adcl": Drawn("difficulty, last steps less first", _order, [*RARE, "curriculum.batches=4"]),
    "alp_gmm": Drawn("share of the half that changes more than uniform", lambda d: _knobs(d, True),
                     ["curriculum.fit_every=32"]),
    "curr_reft": Drawn("stages by answer_type", lambda d: len(d.stages())),
    "drive": Drawn("largest over smallest group", _sizes, [*RARE, "curriculum.after=8", "steps=200"]),
    "dump": Drawn("share of it more than uniform", Drive.rarest),
    "easy_to_hard": Drawn("difficulty, last steps less first", _order, RARE),
    "favchat": Drawn("share of middling ones more than uniform",
                     lambda d: d.near(0.5, slice(8, None)), ["task.count=64"]),
    "gain_rl": Drawn("share of them more than uniform", lambda d: d.share(lambda x: np.cos(x.index) > 0)),
    "gvm": Drawn("largest over smallest group", _sizes, RARE),
    "kimi_prioritised": Drawn("share of hard ones more than uniform", lambda d: d.share(d.hard, slice(16, None)),
                              ["task.count=128"]),
    "limr": Drawn("fewer prompts in the end than uniform",
                  lambda d: _distinct(d.plain) - _distinct(d.draws),
                  ["task.count=64", "curriculum.epochs=2"]),
    "online_filtering": Drawn("share of groups dropped", _kept),
    "ptst": Drawn("first over last group size", lambda d: d.stages()[0]["group_size"] / d.stages()[-1]["group_size"]),
    "qwenlong": Drawn("stages", lambda d: len(d.stages())),
    "recap": Drawn("share of one task more than uniform", Drive.rarest,
                   ["tasks.0.weight=null", "tasks.1.weight=null"]),
    "rlcs": Drawn("groups drawn for 16", _oversampled, ["curriculum.by=category"]),
    "rule_reasoner": Drawn("share of the unsolved one more than uniform",
                           Drive.rarest),
    "sec": Drawn("share of the unsolved one more than uniform", Drive.rarest),
    "sub_instructions": Drawn("stages", lambda d: len(d.stages())),
    "sws": Drawn("share of the unsolved one more than uniform", Drive.rarest),
    "time_r1": Drawn("share within .2 of it more than uniform",
                     lambda d: d.near(0.7), RARE),
    "vl_rethinker": Drawn("draws of a prompt more than uniform", _rest, RARE),
    "weakness": Drawn("share of the half that fails more than uniform", lambda d: _knobs(d, False)),
}
BY_CATEGORY = ("dump", "recap", "rule_reasoner", "sec", "sws")


def of_curriculum(bench: Bench, preset: Preset) -> tuple[float, str]:
    effect = CURRICULA[preset.name]
    if preset.name in ("curr_reft", "qwenlong", "sub_instructions", "ptst"):
        drive: Any = object.__new__(Drive)  # its rows are none of the config's own: what the stages are told
        drive.config = bench.load(preset.task, f"extends=curricula/{preset.name}.yaml")
    else:
        drive = Drive(preset.task, [f"extends=curricula/{preset.name}.yaml", *effect.words], preset.name in BY_CATEGORY)
    return float(effect.number(drive)), effect.says


# --- stages -----------------------------------------------------------------------------------------------------------


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _rows(folder: Path, stage: str, number: int = 1, file: str = "rows") -> list[dict[str, Any]]:
    return _lines(folder / stage / f"round-{number:02d}" / f"{file}.jsonl")


def _reward(rows: Sequence[Mapping[str, Any]]) -> float:
    return float(np.mean([row["reward"] for row in rows if "reward" in row]))


def _shortest(folder: Path, stage: str) -> float:
    """Mean tokens of right answers over those of the ones that were kept."""
    answers = [a for a in _rows(folder, stage, 1, "answers") if a.get("reward", 0) >= 0.01]
    return float(np.mean([a["tokens"] for a in answers]) / np.mean([r["tokens"] for r in _rows(folder, stage)]))


STAGES: Mapping[str, Staged] = {
    "alphadrive": Staged("stages", lambda f, c: len(c.stages), False),
    "cft": Staged("stages", lambda f, c: len(c.stages), False),
    "curr_reft": Staged("recipes",
                        lambda f, c: len({own.task.model_dump()["recipe"] for _, own in configs.stages_of(c)}), False),
    "expert_iteration": Staged("rows of round 2 beside its own",
                               lambda f, c: len(_rows(f, "experts", 2, "all-rows")) / len(_rows(f, "experts", 2))),
    "kimi_dpo": Staged("pairs", lambda f, c: len(_rows(f, "dpo"))),
    "kimi_long2short": Staged("length of the run over the last stage's",
                              lambda f, c: c.rollout.max_new_tokens
                              / configs.stages_of(c)[-1][1].rollout.max_new_tokens),
    "kimi_shortest": Staged("right answers' tokens over the kept ones'", lambda f, c: _shortest(f, "shortest")),
    "raft": Staged("mean reward kept over mean reward drawn",
                   lambda f, c: _reward(_rows(f, "raft")) / _reward(_rows(f, "raft", 1, "answers"))),
    "redistill": Staged("rows learned", lambda f, c: len(_rows(f, "base"))),
    "self_rehearsal": Staged("share of given answers",
                             lambda f, c: float(np.mean([bool(r.get("gold")) for r in _rows(f, "rehearsal")]))),
    "vision_r1": Staged("stages", lambda f, c: len(c.stages), False),
}


def of_stages(bench: Bench, preset: Preset) -> tuple[float, str]:
    effect, own = STAGES[preset.name], configs.shipped(f"stages/{preset.name}.yaml")
    assert own
    with tempfile.TemporaryDirectory(dir=bench.folder) as place:
        tiny = ["steps=1", "rollout.group_size=2", "rollout.prompts_per_step=4", "rounds.prompts=6", "rounds.answers=4",
                "rounds.count=2", "rounds.least=0.01", "eval.samples=0", "log.samples_every=0", f"run.dir={place}/run",
                "rollout.temperature=1.2"]
        one = ["rounds.answers=1"] if preset.name in ("self_rehearsal", "redistill") else []
        found = configs.load(own, [f"run.dir={place}/run"]) if not effect.runs else configs.load(
            ROOT / "configs" / preset.task, [f"extends=stages/{preset.name}.yaml", *tiny, *one])
        if effect.runs:
            stages.train_stages(found, lambda words: None)
        return float(effect.number(Path(place) / "run", found)), effect.says


# --- the table --------------------------------------------------------------------------------------------------------

EFFECTS = {"algorithm": (ALGORITHMS, of_algorithm), "curriculum": (CURRICULA, of_curriculum),
           "stages": (STAGES, of_stages)}


def line(bench: Bench, preset: Preset) -> str:
    """Returns a row of the table."""
    _, measure = EFFECTS[preset.kind]
    path = f"{FOLDERS[preset.kind]}/{preset.name}.yaml"
    try:
        number, says = measure(bench, preset)
        seen = f"{number:.3g} ({says})"
    except ConfigError as error:
        seen = f"refused: {str(error).partition(':')[0]}"
    return f"| {path.removesuffix('.yaml')} | {preset.task} | {preset.idea} | {seen} | {unmet(bench, preset)} |"


def unmet(bench: Bench, preset: Preset) -> str:
    """Returns what its config does not give of a preset's needs, in a cell."""
    path = f"{FOLDERS[preset.kind]}/{preset.name}.yaml"
    whole = preset.kind == "stages" and not STAGES[preset.name].runs
    own = configs.load(configs.shipped(path) or path) if whole else bench.load(preset.task, f"extends={path}")
    task = make_task(own)
    return "; ".join(one.need for one in (*needs.find(own, task), *needs.of_stages(own)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", metavar="NAME", help="all by default")
    parser.add_argument("--out", type=Path, help="markdown file to write; rows that it has of other presets stay")
    args = parser.parse_args()
    before = args.out.read_text(encoding="utf-8").splitlines() if args.out and args.out.is_file() else []
    rows = {row.split(" | ")[0]: row for row in before if row.startswith("| ") and "/" in row.split(" | ")[0]}
    every = presets.shipped()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(folder)
        for preset in every:
            if not args.presets or preset.name in args.presets:
                row = line(bench, preset)
                rows[row.split(" | ")[0]] = row
                print(row, flush=True)
        keys = [f"| {FOLDERS[p.kind]}/{p.name}" for p in every]
    if args.out:
        about = (__doc__ or "").partition("\n\n    python")[2]
        run = "all by one run" if not args.presets else f"by a run of {' '.join(args.presets)}, others as they were"
        args.out.write_text("\n".join([
            "# What each preset does on the shipped config that it is for", "", *about
            .partition("\n\n")[2].strip().split("\n"), "",
            f"Command: `python benchmarks/preset_effects.py --out {args.out}`, {run}, with one seed. "
            f"{platform.machine()}, {torch.get_num_threads()} thread(s), Python {platform.python_version()}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}.", "",
            "| preset | for | idea | effect | needs that the config does not give |",
            "|---|---|---|---|---|", *(rows[key] for key in keys if key in rows), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
