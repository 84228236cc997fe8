"""Settings that cannot change anything in a run, found from the resolved settings alone: `find(config, task)`.

A rule is a generator `Run -> Inert` in RULES. A policy term that is in use is named where its ratio is 1; everything
else only where it was chosen, that is where it is not the default. Of functions that a user brings nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.algo.algorithm import Algorithm
from vlrl.algo.named import options_of
from vlrl.algo.tables import LOSSES, SHAPINGS, WEIGHTS
from vlrl.config.algo import CLIPS, SUPERVISED, AlgoSettings
from vlrl.config.base import Named
from vlrl.config.rollout import CurriculumSettings
from vlrl.config.schema import Config, DataSettings
from vlrl.config.sections import active
from vlrl.monitoring.mismatch import computes_in_float32, samples_other_weights
from vlrl.task import Task
from vlrl.task.combine import weight_at
from vlrl.task.environment import SUCCESS, has_environment

RATIO_OPTIONS: Mapping[str, Sequence[str]] = {
    "ppo_clip": (*CLIPS, "dual_clip", "delta"), "critique_grpo": CLIPS, "gspo": CLIPS, "gspo_token": CLIPS,
    "gspo_turn": CLIPS, "ppo_macro": ("tokens", *CLIPS),
    "cispo": ("cap", *CLIPS),
    "sapo": ("tau_positive", "tau_negative"), "gmpo": CLIPS,
    "vespo": ("k_positive", "lambda_positive", "k_negative", "lambda_negative"), "kimi": ("tau",),
    "dppo_tv": ("delta_low", "delta_high", "cap"), "mdpo": ("decay", "floor"), "rover": (),
    "stable_reinforce": (*CLIPS, "pre_clip"),
    "clip_cov": CLIPS, "kl_cov": ("share", "coef"), "simko": CLIPS}
"""Policy term -> its options that act through the ratio alone."""
MORE_THAN_A_RATIO = ("stable_reinforce", "clip_cov", "simko", "critique_grpo")
"""Of these the terms that differ from REINFORCE at a ratio of 1 too."""
OWN_CREDIT = ("nft", "pacs")
"""Policy terms that read which answers are right, and no advantages."""
OF_OUTCOME = ("w_reinforce", "nsr", "mobgrpo", "deepsearch")
"""Advantages that read which answers are right, and no rewards, unless `correct` makes it a question of the reward."""
OF_TURNS = ("gigpo", "turn_return", "hierarchical", "thor")
"""Advantages that differ from those of grpo by the turns of an episode alone."""
OF_SIGN = ("hicra", "dads", "off_policy_sequence_mask")
"""Weights that read the sign of the advantage."""
JUDGED = {"loss": (*OWN_CREDIT, "oreal", "simko"), "advantage": OF_OUTCOME,
          "batch": ("rorecomp", "right", "rest"), "rule": ("webrl",),
          "weights": ("dads", "stcr"), "kl_weights": ("dads", "stcr"),
          "shaping": ("kimi_length", "length_bonus", "cosine", "dast", "step_pruner", "grsp")}
"""Setting of algo (`rule` is that of algo.stored) -> functions that read which answers are right."""
_LARGEST_LOG = 20.0
"""Log-ratios are kept within it; see LossInputs.log_ratio."""
_DEFAULT, _DEFAULT_CURRICULUM = AlgoSettings(), CurriculumSettings()


@dataclass(frozen=True)
class Inert:
    """A setting without any effect."""

    setting: str
    value: Any
    reason: str
    usual: bool = False
    """Whether it is a default, or meant so: the dry run names it, the start of a run does not."""

    def __str__(self) -> str:
        value = f"{self.value:g}" if isinstance(self.value, float) else self.value
        return f"inert: {self.setting}={value} ({self.reason})"


@dataclass(frozen=True, eq=False)
class Run:
    """What the rules look at."""

    config: Config
    task: Task | None = None

    @property
    def algo(self) -> AlgoSettings:
        return self.config.algo

    @property
    def one_update(self) -> bool:
        """Whether a batch of rollouts has one optimizer step, so that the policy is the one at its start."""
        return self.config.rollout.updates * self.config.rollout.minibatches == 1

    @property
    def samples_as_it_trains(self) -> bool:
        """Whether the engine's log-probabilities are those of the trainer at the start of the update, up to the
        rounding of float32."""
        return self.samples_as_it_is and not self.drops_out

    @property
    def samples_as_it_is(self) -> bool:
        """The same of the trainer without dropout."""
        config = self.config
        return computes_in_float32(config) and config.engine.name == "hf" and not samples_other_weights(config)

    @property
    def drops_out(self) -> bool:
        """Whether the update computes with dropout."""
        return bool(self.config.model.lora.rank and self.config.model.lora.dropout)

    def chosen(self, setting: str) -> bool:
        """Returns whether a setting of algo is not the default."""
        return getattr(self.algo, setting) != getattr(_DEFAULT, setting)

    def given(self, *options: str) -> Iterator[tuple[str, str, Any]]:
        """(setting, option, value) of those of the policy term's options that are set, under the name they were set
        by."""
        for option in options:
            if option in self.algo.loss.options:
                yield f"algo.loss.{option}", option, self.algo.loss.options[option]
            elif option in CLIPS and getattr(self.algo, option) is not None:
                yield f"algo.{option}", option, getattr(self.algo, option)


def find(config: Config, task: Task | None = None) -> list[Inert]:
    """Returns the settings that have no effect, each once; none for supervised fine-tuning. Without a task nothing is
    said of reward parts, nor of what a task's rewards may need.

    Raises ConfigError where the settings make no algorithm.
    """
    if config.algo.loss.name in SUPERVISED:
        return []
    run = Run(config, task)
    findings: dict[str, Inert] = {}
    for rule in RULES:
        for one in rule(run):
            findings.setdefault(one.setting, one)
    return list(findings.values())


# --- the policy term --------------------------------------------------------------------------------------------------


def ratio(run: Run) -> Iterator[Inert]:
    """Yields what acts through p / p(old) alone where a batch of rollouts has one optimizer step."""
    name = run.algo.loss.name
    if not run.one_update or name not in RATIO_OPTIONS:
        return
    if run.algo.loss.options.get("from_sampler") is True and not run.samples_as_it_trains:
        return
    why = "one optimizer step a batch, so p / p(old) is 1"
    more = "raise rollout.minibatches or rollout.updates"
    for setting, _, value in run.given(*RATIO_OPTIONS[name]):
        yield Inert(setting, value, f"{why}; {more}")
    if name not in MORE_THAN_A_RATIO:
        like = "a multiple of that" if name == "rover" else "that"
        yield Inert("algo.loss", name, f"{why} and its gradient is {like} of algo.loss=reinforce; {more}",
                    usual=not run.chosen("loss"))


def unreached_bound(run: Run) -> Iterator[Inert]:
    """Yields bounds of the policy term that no ratio reaches, or another bound comes before."""
    name, most = run.algo.loss.name, math.exp(_LARGEST_LOG)
    if name not in RATIO_OPTIONS:
        return
    values = {option: value for _, option, value in run.given(*options_of("algo.loss", name, LOSSES))}
    farthest = {"clip_low": 1.0, "clip_high": most - 1, "delta": most, "dual_clip": most, "cap": most, "pre_clip": most,
                "delta_low": 1.0, "delta_high": 1.0}
    if name == "gmpo":
        farthest |= {"clip_low": _LARGEST_LOG, "clip_high": _LARGEST_LOG}
    for setting, option, value in run.given(*RATIO_OPTIONS[name]):
        if option in farthest and value is not None and value >= farthest[option]:
            yield Inert(setting, value, "nothing is so far from 1" if "delta_" not in option else
                        "no two probabilities differ by more than 1")
    if name == "ppo_clip" and values.get("delta") and (values.get("dual_clip") or 0) >= values["delta"]:
        yield Inert("algo.loss.dual_clip", values["dual_clip"], f"algo.loss.delta={values['delta']:g} comes before it")
    if name == "cispo" and values.get("cap") and values.get("clip_high") is not None:
        if 1 + values["clip_high"] >= values["cap"]:
            setting = next(s for s, option, _ in run.given("clip_high") if option == "clip_high")
            yield Inert(setting, values["clip_high"], f"algo.loss.cap={values['cap']:g} comes before it")
        else:
            yield Inert("algo.loss.cap", values["cap"], "algo.clip_high comes before it")


def unread_credit(run: Run) -> Iterator[Inert]:
    """Yields what changes advantages alone where nothing reads these, and what changes rewards alone likewise."""
    algo = run.algo
    deaf = _unread_advantage(run)
    if deaf and run.chosen("advantage"):
        yield Inert("algo.advantage", algo.advantage.name, deaf)
    why = deaf or _unread_reward(algo.advantage)
    if why and algo.kl_in == "reward" and algo.kl_coef:
        yield Inert("algo.kl_coef", algo.kl_coef, f"{why}, and algo.kl_in=reward changes no more; set "
                    "algo.kl_in=loss")
    chosen_by_reward = ":" in algo.batch.name or (algo.batch.name == "rorecomp" and _by_reward(algo.batch))
    for i, shaping in enumerate(algo.shaping if why and not chosen_by_reward else ()):
        # one of a user's own may make a reward unscorable, which more functions read
        if ":" not in shaping.name or (deaf and algo.batch.name == "all"):
            yield Inert(f"algo.shaping.{i}", shaping.name, why)


def turns(run: Run) -> Iterator[Inert]:
    """Yields what tells turns apart where answers have one, or by a reward part that no turn has."""
    name, options = run.algo.advantage.name, run.algo.advantage.options
    if run.task is None:
        return
    if has_environment(run.task):
        part = _step_part(run.algo.advantage)
        if name == "thor" and not any(part in one.weights for one in run.task.members):
            yield Inert("algo.advantage", name, f"the rewards of task '{run.task.name}' have no part '{part}', and "
                        "without it this acts as grpo")
        return
    why = f"task '{run.task.name}' has no environment, so every answer is one turn and this acts as"
    if name in OF_TURNS and not options.get("same_plan"):
        yield Inert("algo.advantage", name, f"{why} grpo")
    if run.algo.loss.name == "gspo_turn":
        yield Inert("algo.loss", "gspo_turn", f"{why} gspo")


def refinements(run: Run) -> Iterator[Inert]:
    """Yields a policy term for members that were drawn with another prompt where no group has one."""
    if run.algo.loss.name == "critique_grpo" and not any(s.adds_members for _, s in active(run.config)):
        yield Inert("algo.loss", "critique_grpo", "no answer of a group is a second attempt, and on others it is "
                    "ppo_clip; set algo.guided.use=join or replace")


def of_methods(run: Run) -> Iterator[Inert]:
    """Yields what settings of methods say of themselves."""
    for _, settings in active(run.config):
        for setting, value, why in settings.inert(run.config):
            yield Inert(setting, _short(value), why)


def _step_part(thor: Named) -> str:
    """Returns the reward part of turns that algo.advantage=thor reads."""
    return thor.options.get("part", SUCCESS)


def _unread_advantage(run: Run) -> str:
    """Returns why no function of the objective reads the advantage; "" where one may."""
    algo, loss = run.algo, run.algo.loss
    if loss.name == "oreal" and loss.options.get("weighted") is False and loss.options.get("negative") == 0:
        why = "algo.loss=oreal with weighted=false and negative=0 reads which answers are right, not the advantage"
    elif loss.name in OWN_CREDIT:
        why = f"algo.loss={loss.name} reads which answers are right, not the advantage"
    else:
        return ""
    in_loss = algo.kl_coef > 0 and algo.kl_in == "loss"
    others = [*algo.weights, algo.correction, algo.aggregation, algo.entropy, *(
        (algo.kl, *algo.kl_weights) if in_loss else ())]
    return "" if any(":" in other.name or other.name in OF_SIGN for other in others) else why


def _unread_reward(advantage: Named) -> str:
    """Returns why the advantage reads no reward; "" where it does."""
    if advantage.name not in OF_OUTCOME or _by_reward(advantage):
        return ""
    return f"algo.advantage={advantage.name} reads which answers are right, not the reward"


def _by_reward(named: Named) -> bool:
    """Returns whether a function that asks which answers are correct is to judge by their reward."""
    return named.options.get("correct") is not None and not named.options.get("part")


# --- KL, reference, entropy -------------------------------------------------------------------------------------------


def kl(run: Run) -> Iterator[Inert]:
    """Yields what belongs to a KL that is not there, or is there in another form."""
    algo = run.algo
    if not algo.kl_coef:
        why = "algo.kl_coef=0: there is no KL" + (", and 0 times anything stays 0" if algo.kl_target else "")
        idle = [s for s in ("kl", "kl_in", "kl_target", "kl_weights") if run.chosen(s)]
    elif algo.kl_in == "reward":
        why = "algo.kl_in=reward takes log p - log p(reference) of each token off the reward, which is k1"
        idle = [s for s in ("kl", "kl_weights") if run.chosen(s) and not (s == "kl" and algo.kl.name == "k1")]
    else:
        why, idle = "", []
    for setting in idle:
        yield Inert(f"algo.{setting}", _short(getattr(algo, setting)), why)
    if run.chosen("kl_horizon") and algo.kl_target is None:
        yield Inert("algo.kl_horizon", algo.kl_horizon, "algo.kl_target=null: the coefficient stays as it is")


def kl_to_itself(run: Run) -> Iterator[Inert]:
    """Yields a KL to a reference that is the policy whenever it counts."""
    algo = run.algo
    same = (algo.reference.name == "reset" and algo.reference.options.get("every", 100) == 1) or (
        algo.reference.name == "ema" and algo.reference.options.get("every", 10) == 1
        and algo.reference.options.get("decay") == 0)
    flat = algo.kl.name != "k1" and ":" not in algo.kl.name and not run.drops_out
    if algo.kl_coef and same and algo.kl_in == "loss" and run.one_update and flat:
        yield Inert("algo.kl_coef", algo.kl_coef, "the reference is set to the policy after every step, which has one "
                    "optimizer step, and there the KL has no gradient; raise rollout.minibatches")
    if algo.kl_coef and same and algo.kl_in == "reward" and run.samples_as_it_is:
        yield Inert("algo.kl_coef", algo.kl_coef, "the reference is set to the policy after every step, and "
                    "algo.kl_in=reward compares it with the weights that sampled, which are the same; set "
                    "algo.kl_in=loss, or algo.reference.every")


def reference(run: Run) -> Iterator[Inert]:
    """Yields a moving reference that nothing reads."""
    named = run.algo.reference
    if named.name == "ema" or (named.name == "reset" and not named.options.get("optimizer", True)):
        if run.task is None or "reference_logprobs" in run.task.needs or Algorithm(run.config).needs_reference:
            return
        yield Inert("algo.reference", named.name, "algo.kl_coef=0, and no reward of the task reads the reference")


def entropy(run: Run) -> Iterator[Inert]:
    """Yields an entropy term of weight 0, or a temperature that cannot move."""
    named, options = run.algo.entropy, run.algo.entropy.options
    for option in {"bonus": ("coef",), "siren": ("coef",), "adaptive": ("most",)}.get(named.name, ()):
        if options.get(option) == 0:
            yield Inert("algo.entropy", named.name, f"algo.entropy.{option}=0")
    bounds = {options.get("low", 0.5), options.get("high", 1.5)}
    if named.name in ("temperature", "e3") and bounds == {run.config.rollout.temperature}:
        yield Inert("algo.entropy", named.name, "algo.entropy.low and high are rollout.temperature: it cannot move")


# --- weights and rewards ----------------------------------------------------------------------------------------------


def weights(run: Run) -> Iterator[Inert]:
    """Yields weights on tokens that are 1 on all of them."""
    for place in ("weights", "kl_weights"):
        for i, named in enumerate(getattr(run.algo, place)):
            values = _values(f"algo.{place}.{i}", named, WEIGHTS)
            why = ""
            if named.name == "hicra" and values.get("alpha") == 0:
                why = "alpha is 0"
            elif named.name == "top_entropy" and values.get("share") == 1:
                why = "a share of 1 keeps every token"
            elif named.name == "difficulty" and values.get("low") == values.get("high") == 1:
                why = "low and high are 1"
            elif named.name == "off_policy_sequence_mask" and run.one_update and run.samples_as_it_trains:
                why = ("one optimizer step a batch, of answers that the same weights have sampled: no answer becomes "
                       "unlikely; raise rollout.minibatches or rollout.updates")
            if why:
                yield Inert(f"algo.{place}.{i}", named.name, why)


def correction(run: Run) -> Iterator[Inert]:
    """Yields a correction where sampler and trainer are the same weights and the same code, and bounds that no weight
    is beyond."""
    named = run.algo.correction
    if named.name == "none" or ":" in named.name:
        return
    if run.samples_as_it_trains:
        yield Inert("algo.correction", named.name, "engine.name=hf samples with the weights that train, in float32: "
                    "the weights are 1")
    low, high = named.options.get("low"), named.options.get("high")
    if low is not None and low <= math.exp(-_LARGEST_LOG):
        yield Inert("algo.correction.low", low, "no weight is below")
    if high is not None and high >= math.exp(_LARGEST_LOG):
        yield Inert("algo.correction.high", high, "no weight is above")


def shaping(run: Run) -> Iterator[Inert]:
    """Yields shapings that add 0 to every reward."""
    longest = run.config.rollout.max_new_tokens
    for i, named in enumerate(run.algo.shaping):
        values = _values(f"algo.shaping.{i}", named, SHAPINGS)
        why = ""
        # without its weight, step_pruner still withholds what wrong answers earned
        if (values.get("weight") == 0 and named.name != "step_pruner") or values.get("bonus") == 0 or (
                values.get("alpha") == 0):
            why = "its weight is 0"
        elif named.name == "kimi_length" and values["after"] >= run.config.steps:
            why = f"it begins after {values['after']} steps, and steps={run.config.steps}"
        elif named.name == "length_bonus" and values["low"] > min(values["high"], longest):
            why = (f"no answer has {values['low']} to {values['high']} tokens with rollout.max_new_tokens={longest}; "
                   f"set algo.shaping.{i}.low and high")
        elif named.name == "overlong":
            limit = values["limit"] or longest
            if limit - (values["buffer"] or limit / 5) >= longest:
                why = f"no answer is longer than limit - buffer with rollout.max_new_tokens={longest}"
        if why:
            yield Inert(f"algo.shaping.{i}", named.name, why)


def replaced(run: Run) -> Iterator[Inert]:
    """Yields shapings of a reward that a later one does not look at."""
    last = ""
    for i, named in reversed([*enumerate(run.algo.shaping)]):
        if ":" in named.name:
            last = ""  # it may make a reward unscorable, which cosine keeps
        elif last:
            yield Inert(f"algo.shaping.{i}", named.name, f"{last} puts a reward of its own in the place of it")
        if named.name == "cosine" and not _by_reward(named):
            last = f"algo.shaping.{i}=cosine"


def batch(run: Run) -> Iterator[Inert]:
    """Yields a choice of rollouts that takes all."""
    named = run.algo.batch
    for option in ("keep", "floor"):
        unread = option == "floor" and named.options.get("buffered")
        if named.name == "rorecomp" and named.options.get(option) == 1 and not unread:
            yield Inert("algo.batch", named.name, f"algo.batch.{option}=1: every rollout is trained on in every step")


def reward_parts(run: Run) -> Iterator[Inert]:
    """Yields reward parts that the reward does not count in any step, and nothing else reads."""
    algo, judged = run.algo, _reads_outcome(run)
    named_parts = {named.options.get("part") for named in (algo.advantage, algo.batch, *algo.shaping)}
    if algo.advantage.name == "thor":
        named_parts.add(_step_part(algo.advantage))
    for i, one in enumerate(run.task.members if run.task else ()):
        if one.combination != "sum" or run.config.curriculum.part in one.weights:
            continue
        own_rule = type(one).correct is not Task.correct
        read = {*named_parts, *((one.weights if own_rule else one.criterion) if judged else ())}
        place = f"tasks.{i}" if run.config.tasks else "task"
        for part, weight in one.weights.items():
            steps = (0,) if isinstance(weight, (int, float)) else [step for step, _ in weight]
            if part not in read and all(weight_at(weight, int(step)) == 0 for step in steps):
                yield Inert(f"{place}.rewards.{part}", 0, "it is shown as a metric, and not paid", usual=True)


def services(run: Run) -> Iterator[Inert]:
    """Yields services that no part of the task needs."""
    needed = {name for one in (run.task.members if run.task else ()) for name in one.needs}
    settings = run.config.services
    for name, setting, value in (("judge", "url", settings.judge.url), ("clip", "name", settings.clip.name),
                                 ("reward_model", "name", ", ".join(settings.reward_model.name))):
        if run.task and value and name not in needed:
            yield Inert(f"services.{name}.{setting}", value, f"no part of the task's reward asks services.{name}")


def _reads_outcome(run: Run) -> bool:
    """Returns whether anything that acts on the training may read which answers are right."""
    curriculum = run.config.curriculum
    acting = {place: getattr(run.algo, place) for place in JUDGED if place != "rule"}
    each = [(place, named) for place, choices in acting.items() for named in (
        choices if isinstance(choices, tuple) else (choices,))]
    each += [entry for _, settings in active(run.config) for entry in settings.functions]
    return (any(":" in named.name or named.name in JUDGED[place] for place, named in each)
            or curriculum.name not in ("uniform", "sequential")
            or curriculum.keep.name not in ("all", "mixed", "std_ema")
            or curriculum.select.name not in ("first", "most_varied") or curriculum.oversample.name != "fixed")


# --- the curriculum ---------------------------------------------------------------------------------------------------


def filters(run: Run) -> Iterator[Inert]:
    """Yields filters that keep everything, and groups drawn for a choice that is not made."""
    curriculum = run.config.curriculum
    keep, oversample = curriculum.keep, curriculum.oversample
    if keep.name == "pass_range" and (keep.options.get("low"), keep.options.get("high")) == (0, 1):
        yield Inert("curriculum.keep", "pass_range", "every pass rate is from 0 to 1")
    alone = (oversample.name == "fixed" and oversample.options.get("factor", 1) == 1) or (
        oversample.name == "ema" and oversample.options.get("most", 4) == 1)
    if curriculum.select != _DEFAULT_CURRICULUM.select and alone:
        yield Inert("curriculum.select", curriculum.select.name, "curriculum.oversample=1 never draws more groups than "
                    "are wanted")
    unchosen = keep.name == "all" and curriculum.select.name == "first"
    if not alone and unchosen and curriculum.name in ("uniform", "sequential"):
        yield Inert("curriculum.oversample", _short(oversample), "curriculum.keep=all and curriculum.select=first "
                    "train on the first groups, and the others are thrown away")


_AS_UNIFORM = (("replay", "share", 0), ("prioritised", "floor", 1), ("rlcs", "floor", 1), ("alp_gmm", "explore", 1),
               ("weakness", "explore", 1), ("sws", "floor", 1), ("retrospective", "carry", 0))
"""Sampler, option and its value with which it draws as uniform does."""


def sampler(run: Run) -> Iterator[Inert]:
    """Yields samplers that draw as uniform does."""
    curriculum, size = run.config.curriculum, run.config.rollout.group_size
    options = curriculum.sampler.options
    why = next((f"curriculum.{option}={neutral}" for name, option, neutral in _AS_UNIFORM
                if curriculum.name == name and options.get(option) == neutral), "")
    if curriculum.name == "hard_focus":
        if options.get("after", 100) >= run.config.steps:
            why = f"curriculum.after={options.get('after', 100)} is not before steps={run.config.steps}"
        elif options.get("share") == 1 and options.get("group_size", 64) == size:
            why = f"curriculum.share=1 and curriculum.group_size={size} are those of the first stage"
    elif curriculum.name == "gvm" and options.get("least") == options.get("most") == size:
        why = f"curriculum.least and most are rollout.group_size={size}"
    if why:
        yield Inert("curriculum.name", curriculum.name, f"{why}: it draws as uniform does")


def streaming(run: Run) -> Iterator[Inert]:
    """Yields a buffer in which nothing is shuffled."""
    data, curriculum = run.config.data, run.config.curriculum
    if data.stream and curriculum.name != "uniform":
        yield Inert("data.shuffle_buffer", data.shuffle_buffer, f"curriculum.name={curriculum.name} draws the prompts "
                    "in its own order, and rows are read there")
    elif not data.stream and data.shuffle_buffer != DataSettings().shuffle_buffer:
        yield Inert("data.shuffle_buffer", data.shuffle_buffer, "data.stream=false shuffles all rows")


def _values(setting: str, named: Named, table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a function, defaults included; those that are given of a user's own."""
    known = {} if ":" in named.name else options_of(setting, named.name, table)
    return {option: default for option, (_, default) in known.items()} | named.options


def _short(value: Any) -> Any:
    """Returns a value as a config says it, without the options of a name."""
    if isinstance(value, tuple):
        return f"[{', '.join(str(_short(one)) for one in value)}]"
    return value.name if isinstance(value, Named) else value


def pictures(run: Run) -> Iterator[Inert]:
    """Yields pictures that no tracker gets."""
    if run.config.log.pictures and not run.config.log.trackers:
        yield Inert("log.pictures", run.config.log.pictures, "log.trackers=[]: no tracker gets them")


RULES: Sequence[Callable[[Run], Iterator[Inert]]] = (
    ratio, unreached_bound, unread_credit, turns, refinements, of_methods, kl, kl_to_itself,
    reference, entropy, weights, correction, shaping, replaced, batch, reward_parts, services, filters, sampler,
    streaming, pictures)
