"""What does each preset do on the shipped config that it is for?

    python benchmarks/preset_effects.py --out benchmarks/results/preset_effects.md     # about ten minutes on one core

One number per preset for what its paper names, beside the nearest configuration without it. Gradients come from one
batch of answers of the embedded model on that config (preset_gradient.py). Metrics come from a run of two steps, with
the distance of its weights from those of the same run without the method, relative to how far that run moved. Samplers
draw real rows of the config and get scripted answers. Stages are runs of one step. The last column names what a preset
needs and the config lacks; where the effect is 0, that is why. For EGSR: the embedded model is never right after it has
seen a solution."""

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
    """Another gradient than that of the words `beside` laid on the preset, |g - g'| / |g'|."""

    names: str
    beside: Sequence[str]
    off_policy: bool = False
    words: Sequence[str] = ()
    """What the preset needs set."""
    move: float = 0.05


@dataclass(frozen=True)
class Steered:
    """What is moved after steps: the temperature when the entropy halves, the coefficient at a KL of .1, a reference of
    weight 0 beside a policy of weight 1 after ten steps."""

    names: str


@dataclass(frozen=True)
class Metric:
    """A metric of the last of a few steps, and how far the weights then are from those of the same run with the words
    `beside` laid on it, as a share of the way that these went."""

    names: str
    metric: str
    beside: Sequence[str]
    words: Sequence[str] = ()
    steps: int = 2


@dataclass(frozen=True)
class Drawn:
    """What a sampler draws from scripted answers."""

    names: str
    says: str
    number: Callable[[Drive], float]
    words: Sequence[str] = ()


@dataclass(frozen=True)
class Staged:
    """What is on the disk after the stages, or what these are given."""

    names: str
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


def ratio(names: str, *beside: str, move: float = 0.05) -> Gradient:
    return Gradient(names, beside or (LOSS,), off_policy=True, move=move)


def credit(names: str, *beside: str, words: Sequence[str] = ()) -> Gradient:
    return Gradient(names, beside or (ADVANTAGE,), words=words)


ALGORITHMS: Mapping[str, Effect] = {
    "a_lol": Metric("answers above their group's mean, weighted by a clipped ratio to the reference", "stored/loss",
                    STORED),
    "adaptive_kl": Steered("the KL's coefficient is steered to a target"),
    "agent_rlvr": Metric("correct second attempts are preferred to first failures", "guided/groups_frac", SECOND, MORE),
    "apo": credit("long wrong answers are pushed away harder, hard prompts have less KL",
                  "algo.weights=[]", "algo.kl_weights=[]"),
    "archer": credit("a critic of turns", "extends=algorithms/loop.yaml", "algo.critic=null"),
    "brorl": Metric("512 answers to a prompt", "rollouts/total", ["rollout.group_size=16"], steps=1),
    "chord": Metric("(1 - mu) RL + mu demonstrations, mu falls", "demonstrations/share", GIVEN),
    "chord_phi": Metric("each demonstrated token counts p (1 - p)", "demonstrations/factor",
                        ["algo.demonstrations.mix={name: chord, peak: 0.1, valley: 0.1}"]),
    "cispo": ratio("capped weights instead of a clip"),
    "clip_cov": ratio("a few tokens of high covariance have no gradient"),
    "copg": Metric("pairs of stored answers without a ratio", "stored/loss", STORED),
    "cosine": credit("a cosine of the length replaces the reward", *SHAPED),
    "critique_grpo": Metric("a refinement joins the group", "guided/groups_frac", SECOND, EASIER),
    "dapo": ratio("clip-higher, token mean, groups drawn anew", "extends=algorithms/grpo.yaml"),
    "dast": credit("length beside a budget by difficulty", *SHAPED),
    "decoupled_ppo": ratio("the gap to the sampler is weighed apart from the clip", "algo.correction=none"),
    "deepsearch": Metric("hard prompts are searched by a tree", "search/groups_frac",
                         ["rollout.branch.search=null", "algo.advantage=grpo"],
                         ["rollout.branch.search.depth=2", "rollout.branch.search.width=2"]),
    "deepseek_v3_2": ratio("off-policy answers with a negative advantage are left out", "algo.weights=[]", move=0.3),
    "dppo": ratio("a bound on the probability, not on the ratio", "algo.loss={name: cispo, cap: 5}", move=0.3),
    "dr_grpo": credit("no deviation, a constant length", "extends=algorithms/grpo.yaml"),
    "dual_clip": ratio("the loss of a negative advantage is bounded", "algo.loss.dual_clip=null", move=0.3),
    "e3": Steered("the temperature follows the entropy"),
    "eepo": Metric("the second half is sampled by a policy that forgets the first", "correction/weight",
                   ["rollout.forget={lr: 0, entropy: null}"],
                   ["rollout.forget.entropy=5", "rollout.forget.lr=0.01"]),
    "egsr": Metric("a right own attempt replaces a wrong answer", "guided/groups_frac", SECOND, MORE),
    "ema_grpo": credit("each task's own deviation"),
    "entropy_bonus": credit("an entropy bonus", "algo.entropy=none"),
    "expo": Metric("own explanations that make the answer likelier are kept", "guided/kept", SECOND),
    "g_ra": credit("turns are paid where the outcome is", "task.combine=sum",
                   words=["task.combine=gate:accuracy>=0.5"]),
    "gdpo": credit("parts are normalised each by itself"),
    "ghpo": Metric("groups that failed are asked again with a hint", "guided/groups_frac", SECOND),
    "gigpo": credit("turns that began in one state are compared"),
    "gkd": Metric("each token is drawn to the distribution of a teacher, here the start", "distillation/kl",
                  ["algo.distillation=null"], ["algo.distillation.objective=1"], 4),
    "gmpo": ratio("a geometric mean of clipped ratios"),
    "gpg": credit("scaled up by the share of groups with a preference", "algo.advantage=dr_grpo", words=VARIED),
    "grpo": credit("a KL of .04 to the start", "algo.kl_coef=0"),
    "grpo_care": Steered("a reference that follows the policy slowly"),
    "grsp": credit("right answers pay for segments by clusters of length", *SHAPED),
    "gspo": ratio("one ratio an answer"),
    "gspo_token": ratio("GSPO's ratio, advantages by turn", "algo.loss=gspo"),
    "gui_g1": credit("hard rows weigh more", "algo.weights=[]"),
    "hicra": credit("planning tokens count more", "algo.weights=[]"),
    "himac": credit("plans and turns under one plan in groups", "algo.advantage=turn_return"),
    "hiper": credit("plans have the advantage of subgoals", "algo.advantage={name: turn_return, gamma: 0.95}"),
    "hold_entropy": Steered("the temperature holds the first entropy"),
    "icepop": ratio("tokens whose sampler/trainer ratio is out of bounds are masked", "algo.correction=none"),
    "kimi": ratio("mirror descent to the policy that sampled"),
    "kimi_length": credit("short right answers earn more", *SHAPED, words=[*VARIED, "curriculum.pass_at=0.2"]),
    "kl_cov": ratio("tokens of high covariance are held back"),
    "length_bonus": credit("right answers of 320 to 512 tokens earn more", *SHAPED),
    "lite_ppo": credit("the deviation of the whole step"),
    "loop": ratio("leave-one-out with PPO's clip", "algo.loss=reinforce"),
    "luspo": ratio("GSPO weighted by length", "algo.aggregation=sequence_mean"),
    "ma_rlhf": credit("macro actions of five tokens", "extends=algorithms/ppo.yaml"),
    "maxrl": credit("(R - mean) / mean", "algo.advantage=dr_grpo"),
    "mdpo": ratio("a KL to the policy that sampled in place of a clip"),
    "mis": ratio("whole answers far from the sampler are masked", "algo.correction=none"),
    "mobgrpo": credit("success in more turns is paid less, giving up costs"),
    "nft": credit("wrong answers train an implicit negative policy", LOSS),
    "nsr": credit("wrong answers alone", "algo.advantage=w_reinforce"),
    "opo": credit("a length-weighted baseline", "algo.advantage=dr_grpo", words=VARIED),
    "oreal": credit("right answers are cloned, wrong ones pushed away", LOSS),
    "pacs": credit("cross-entropy of a score against the outcome", LOSS),
    "pass_at_k": credit("the best answer alone learns"),
    "pf_ppo": credit("the best and the worst answers alone", "algo.batch=all"),
    "ppo": credit("token advantages over a value head", "extends=algorithms/grpo.yaml", "algo.critic=null"),
    "prorl": ratio("DAPO's clip, wider, with a KL to a reference that is reset", "algo.kl_coef=0",
                   "algo.loss.clip_high=0.28"),
    "raft_pp": credit("right answers alone, with weight 1", "algo.advantage=grpo", "algo.batch=all"),
    "reinforce": ratio("no ratio at all"),
    "reinforce_pp": credit("returns whitened over the tokens of the step"),
    "reinforce_pp_baseline": credit("R - mean, whitened over the tokens of the step", "algo.advantage=dr_grpo"),
    "relift": Metric("failed prompts are collected for a supervised step", "demonstrations/buffer",
                     GIVEN, ["algo.demonstrations.mix.size=4"]),
    "remax": credit("the baseline is a greedy answer's reward", "algo.advantage=dr_grpo"),
    "rloo": credit("the baseline is the mean of the others", "algo.advantage=dr_grpo"),
    "rlpr": ratio("a clip of its own, groups of little spread drawn anew", "algo.loss=reinforce"),
    "rorecomp": credit("short right and long wrong answers, the others later", "algo.batch=all",
                       words=["rollout.temperature=1.2", "curriculum.pass_at=0.2"]),
    "rose": Metric("answers branch where meanings differ", "branch/reused_frac", BRANCHED),
    "rover": ratio("values of the uniform policy"),
    "sapo": ratio("a soft gate in place of the clip"),
    "sasr": Metric("supervised or RL by gradient norms", "demonstrations/share",
                   GIVEN, ["algo.demonstrations.mix.warmup=1"]),
    "simko": credit("top-k lifted, top-1 pressed at tokens of high entropy", LOSS),
    "siren": credit("the entropy of peak tokens within the nucleus is held", "algo.entropy=none"),
    "skywork_or1": credit("an entropy bonus while below its target", "algo.entropy=none"),
    "stable_reinforce": ratio("ratios bounded before the exponential, outliers left out", move=0.3),
    "step_pruner": credit("right answers pay for steps beyond the fewest", *SHAPED),
    "steppo": ratio("one ratio a turn", "algo.loss=gspo"),
    "swarm_sapo": Metric("stored groups under this run's own policy", "stored/groups", STORED),
    "tempo": credit("values of common beginnings"),
    "thor": credit("turns that call tools are compared by their success", words=["task.rewards.tool_success=0"]),
    "tis": ratio("the gap to the sampler is weighed, up to 2", "algo.correction=none"),
    "top_entropy": credit("the 20 % of tokens with the highest entropy", "algo.weights=[]"),
    "treerl": Metric("answers branch at surprising tokens", "branch/reused_frac", BRANCHED),
    "two_sided": ratio("ratios of negative advantages are bounded", "algo.loss.delta=null", move=0.6),
    "vagen": credit("advantages of turns, then of their tokens", "extends=algorithms/archer.yaml"),
    "vespo": ratio("smooth weights of whole answers"),
    "w_reinforce": credit("right answers weigh .1", "algo.advantage=nsr"),
    "webrl": Metric("stored successes fitted to their advantage", "stored/loss", STORED, EASIER),
}
"""Preset -> what is looked at."""


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

    def hard(self, draw: Draw) -> bool:
        return float(self.samples[draw.index].row.get("difficulty") or 0) > 0.5

    def stages(self) -> list[Mapping[str, Any]]:
        return [dict(stage) for stage in self.config.curriculum.sampler.options["stages"]]


def _rest(drive: Drive) -> float:
    """Share of prompts with groups all right or all wrong that come back within the steps, beside uniform's."""
    again = Counter(draw.index for step in drive.draws for draw in step)
    plain = Counter(draw.index for step in drive.plain for draw in step)
    return float(np.mean([*again.values()]) - np.mean([*plain.values()]))


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
    "adcl": Drawn("batches from easy to hard", "difficulty, last steps less first", _order,
                  [*RARE, "curriculum.batches=4"]),
    "alp_gmm": Drawn("difficulty where rewards change", "share of the half that changes more than uniform",
                     lambda d: _knobs(d, True), ["curriculum.fit_every=32"]),
    "curr_reft": Drawn("yes or no, then choices, then open", "stages by answer_type", lambda d: len(d.stages())),
    "drive": Drawn("8 answers to each, then 64 to the hardest", "largest over smallest group", _sizes,
                   [*RARE, "curriculum.after=8", "steps=200"]),
    "dump": Drawn("the distribution with an advantage", "share of it more than uniform",
                  lambda d: d.share(lambda x: d.category(x) == d.last)),
    "easy_to_hard": Drawn("easy first", "difficulty, last steps less first", _order, RARE),
    "favchat": Drawn("useless prompts rest", "share of middling ones more than uniform", lambda d: d.share(
        lambda x: abs(float(d.samples[x.index].row["difficulty"]) - 0.5) < 0.2, slice(8, None)), ["task.count=64"]),
    "gain_rl": Drawn("prompts of large angle first", "share of them more than uniform",
                     lambda d: d.share(lambda x: np.cos(x.index) > 0)),
    "gvm": Drawn("more answers where they are right seldom", "largest over smallest group", _sizes, RARE),
    "kimi_prioritised": Drawn("in proportion to 1 - success", "share of hard ones more than uniform",
                              lambda d: d.share(d.hard, slice(16, None)), ["task.count=128"]),
    "limr": Drawn("prompts that follow the mean learning curve", "fewer prompts in the end than uniform",
                  lambda d: len({x.index for s in d.plain[-6:] for x in s}) - len(
                      {x.index for s in d.draws[-6:] for x in s}), ["task.count=64", "curriculum.epochs=2"]),
    "online_filtering": Drawn("pass rates about a half are kept", "share of groups dropped", _kept),
    "ptst": Drawn("answers grow, groups shrink", "first over last group size",
                  lambda d: d.stages()[0]["group_size"] / d.stages()[-1]["group_size"]),
    "qwenlong": Drawn("contexts grow, hard prompts are carried over", "stages", lambda d: len(d.stages())),
    "recap": Drawn("draws move to what stalls", "share of one task more than uniform",
                   lambda d: d.share(lambda x: d.category(x) == d.last),
                   ["tasks.0.weight=null", "tasks.1.weight=null"]),
    "rlcs": Drawn("more groups than wanted, middle difficulty", "groups drawn for 16",
                  _oversampled, ["curriculum.by=category"]),
    "rule_reasoner": Drawn("domains far from the target", "share of the unsolved one more than uniform",
                           lambda d: d.share(lambda x: d.category(x) == d.last)),
    "sec": Drawn("categories by their mean absolute advantage", "share of the unsolved one more than uniform",
                 lambda d: d.share(lambda x: d.category(x) == d.last)),
    "sub_instructions": Drawn("an instruction by its first sub-goals", "stages", lambda d: len(d.stages())),
    "sws": Drawn("categories that keep failing", "share of the unsolved one more than uniform",
                 lambda d: d.share(lambda x: d.category(x) == d.last)),
    "time_r1": Drawn("about a difficulty of .7", "share within .2 of it more than uniform", lambda d: d.share(
        lambda x: abs(float(d.samples[x.index].row["difficulty"]) - 0.7) < 0.2), RARE),
    "vl_rethinker": Drawn("half are prompts whose answers differed", "draws of a prompt more than uniform", _rest,
                          RARE),
    "weakness": Drawn("new samples where answers fail", "share of the half that fails more than uniform",
                      lambda d: _knobs(d, False)),
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


def _rows(folder: Path, stage: str, number: int = 1) -> list[dict[str, Any]]:
    return _lines(folder / stage / f"round-{number:02d}" / "rows.jsonl")


def _shortest(folder: Path, stage: str) -> float:
    """Mean tokens of right answers over those of the ones that were kept."""
    answers = [a for a in _lines(folder / stage / "round-01" / "answers.jsonl") if a.get("reward", 0) >= 0.01]
    return float(np.mean([a["tokens"] for a in answers]) / np.mean([r["tokens"] for r in _rows(folder, stage)]))


STAGES: Mapping[str, Staged] = {
    "alphadrive": Staged("a cold start on reasoned plans, then GRPO", "stages", lambda f, c: len(c.stages), False),
    "cft": Staged("critiques of answers to one problem are learned", "stages", lambda f, c: len(c.stages), False),
    "curr_reft": Staged("yes or no, choices, boxes, then own best answers", "recipes", lambda f, c: len(
        {(own.task.model_extra or {})["recipe"] for _, own in configs.stages_of(c)}), False),
    "expert_iteration": Staged("each round begins anew with all rounds' answers", "rows of round 2 beside its own",
                               lambda f, c: len(_lines(f / "experts/round-02/all-rows.jsonl")) / len(
                                   _rows(f, "experts", 2))),
    "kimi_dpo": Staged("the shortest right answer before longer ones", "pairs", lambda f, c: len(_rows(f, "dpo"))),
    "kimi_long2short": Staged("shortest answers, a merge, RL with half the length",
                              "length of the run over the last stage's", lambda f, c: c.rollout.max_new_tokens
                              / configs.stages_of(c)[-1][1].rollout.max_new_tokens),
    "kimi_shortest": Staged("the shortest right answer", "right answers' tokens over the kept ones'",
                            lambda f, c: _shortest(f, "shortest")),
    "raft": Staged("the best right answer, in rounds", "mean reward kept over mean reward drawn", lambda f, c: float(
        np.mean([r["reward"] for r in _rows(f, "raft")]) / np.mean(
            [a["reward"] for a in _lines(f / "raft/round-01/answers.jsonl") if "reward" in a]))),
    "redistill": Staged("the first model learns the RL policy's answers", "rows learned", lambda f, c: len(
        _rows(f, "base"))),
    "self_rehearsal": Staged("own greedy answers where right, else the given", "share of given answers",
                             lambda f, c: float(np.mean([bool(r.get("gold")) for r in _rows(f, "rehearsal")]))),
    "vision_r1": Staged("a cold start, then thinking suppression", "stages", lambda f, c: len(c.stages), False),
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
    table, measure = EFFECTS[preset.kind]
    path = f"{FOLDERS[preset.kind]}/{preset.name}.yaml"
    try:
        number, says = measure(bench, preset)
        seen = f"{number:.3g} ({says})"
    except ConfigError as error:
        seen = f"refused: {str(error).partition(':')[0]}"
    names = table[preset.name].names
    return f"| {path.removesuffix('.yaml')} | {preset.task} | {names} | {seen} | {unmet(bench, preset)} |"


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
        named = {f"| {FOLDERS[p.kind]}/{p.name}": p for p in every}
        rows = {key: f"{rows[key].rsplit(' | ', 1)[0]} | {unmet(bench, p)} |"
                for key, p in named.items() if key in rows}
    if args.out:
        about = (__doc__ or "").partition("\n\n    python")[2]
        run = "all by one run" if not args.presets else f"by a run of {' '.join(args.presets)}, others as they were"
        args.out.write_text("\n".join([
            "# What each preset does on the shipped config that it is for", "", *about
            .partition("\n\n")[2].strip().split("\n"), "",
            f"Command: `python benchmarks/preset_effects.py --out {args.out}`, {run}, with one seed. "
            f"{platform.machine()}, {torch.get_num_threads()} thread(s), Python {platform.python_version()}, torch "
            f"{torch.__version__}, transformers {transformers.__version__}.", "",
            "| preset | for | what its paper names | effect | needs that the config does not give |",
            "|---|---|---|---|---|", *rows.values(), ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
