"""Finds settings that have no effect in a run, from the resolved settings alone: `find(config, task)`.

Functions (algo/effect.py) and sections (Settings.inert) report their own settings. This module collects the reports and
finds settings that cancel each other. The policy term is reported if its ratio is always 1; any other setting only if
it differs from its default. Nothing is known about functions that a user supplies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vlrl.algo import ratio
from vlrl.algo.algorithm import Algorithm
from vlrl.algo.effect import FunctionUse, Inert, short
from vlrl.algo.tables import ADVANTAGES, BATCHES, ENTROPIES, LOSSES, SHAPINGS, WEIGHTS
from vlrl.config.algo import SUPERVISED
from vlrl.config.base import Named, Settings
from vlrl.config.schema import Config
from vlrl.config.sections import active
from vlrl.curriculum import SAMPLERS
from vlrl.curriculum.filters import KEEP
from vlrl.monitoring.mismatch import same_logprobs_without_dropout, samples_as_it_trains, uses_dropout
from vlrl.task import Task
from vlrl.task.combine import weight_at

TABLES: Mapping[str, Mapping[str, Any]] = {
    "advantage": ADVANTAGES, "loss": LOSSES, "weights": WEIGHTS, "kl_weights": WEIGHTS, "shaping": SHAPINGS,
    "batch": BATCHES}
"""For each setting of `algo` that names functions: {name: function}, all functions that the setting can name."""


@dataclass(frozen=True, eq=False)
class Run:
    """The config and the task of the run that the rules in this module inspect."""

    config: Config
    task: Task | None = None

    def uses(self, name: str) -> tuple[FunctionUse, ...]:
        """The functions that the setting algo.<name> names, each as a FunctionUse with config, task and arguments."""
        named = getattr(self.config.algo, name)
        if isinstance(named, Named):
            return (self.use(f"algo.{name}", named, TABLES[name]),)
        return tuple(self.use(f"algo.{name}.{i}", one, TABLES[name]) for i, one in enumerate(named))

    def use(self, setting: str, named: Named, table: Mapping[str, Any]) -> FunctionUse:
        return FunctionUse(self.config, self.task, setting, named, table)


def find(config: Config, task: Task | None = None) -> list[Inert]:
    """Finds settings without effect. The list has each setting once, and is empty for supervised fine-tuning. Without a
    task, reward parts are not inspected. Raises ConfigError if no algorithm can be made from the settings."""
    if config.algo.loss.name in SUPERVISED:
        return []
    run = Run(config, task)
    findings: dict[str, Inert] = {}
    for rule in RULES:
        for one in rule(run):
            findings.setdefault(one.setting, one)
    return list(findings.values())


def policy_term(run: Run) -> Iterator[Inert]:
    """Yields the policy term if its ratio p / p(old) is always 1, and bounds that the ratio never reaches."""
    yield from (one for use in run.uses("loss") for one in ratio.inert(use))


def unread_credit(run: Run) -> Iterator[Inert]:
    """Yields advantages, shapings and a KL in the reward if no other function uses their values."""
    algo, (loss,), (advantage,), (batch,) = run.config.algo, *map(run.uses, ("loss", "advantage", "batch"))
    in_loss = algo.kl_coef > 0 and algo.kl_in == "loss"
    own = any(":" in f.name for f in (algo.correction, algo.aggregation, algo.entropy, *(algo.kl,) * in_loss))
    weighed = (*run.uses("weights"), *(run.uses("kl_weights") if in_loss else ()))
    deaf = "" if own or any(use.reads("sign") for use in weighed) else loss.in_place_of("advantage")
    if deaf and algo.chosen("advantage"):
        yield Inert("algo.advantage", algo.advantage.name, deaf)
    why = deaf or advantage.in_place_of("reward")
    if why and algo.kl_in == "reward" and algo.kl_coef:
        yield Inert("algo.kl_coef", algo.kl_coef, f"{why}, and algo.kl_in=reward has no other effect; set "
                    "algo.kl_in=loss")
    for shaping in run.uses("shaping") if why and not batch.reads("reward") and not batch.by_reward else ():
        # a user's shaping may make a reward unscorable (NaN), which further functions read
        if not shaping.own or (deaf and algo.batch.name == "all"):
            yield Inert(shaping.setting, shaping.named.name, why)


def functions(run: Run) -> Iterator[Inert]:
    """Yields functions that themselves report that they have no effect in this run (FunctionUse.idle)."""
    curriculum = run.config.curriculum
    uses = [use for name in TABLES for use in run.uses(name)]
    uses += [run.use("algo.entropy", run.config.algo.entropy, ENTROPIES),
             run.use("curriculum.keep", curriculum.keep, KEEP),
             run.use("curriculum.name", curriculum.sampler, SAMPLERS)]
    yield from (Inert(use.setting, use.named.name, use.idle) for use in uses if use.idle)


def sections(run: Run) -> Iterator[Inert]:
    """Yields settings without effect, as reported by the sections of the config and of the methods (Settings.inert)."""
    config = run.config
    plain = [value for name in type(config).model_fields if isinstance(value := getattr(config, name), Settings)]
    for settings in (*plain, *(settings for _, settings in active(config))):
        yield from (Inert(setting, short(value), why) for setting, value, why in settings.inert(config))


def reference(run: Run) -> Iterator[Inert]:
    """Yields a KL whose reference always equals the policy, and a moving reference that is not used."""
    algo, config, named = run.config.algo, run.config, run.config.algo.reference
    same = (named.name == "reset" and named.options.get("every", 100) == 1) or (
        named.name == "ema" and named.options.get("every", 10) == 1 and named.options.get("decay") == 0)
    flat = algo.kl.name != "k1" and ":" not in algo.kl.name and not uses_dropout(config)
    if algo.kl_coef and same and algo.kl_in == "loss" and config.rollout.one_update and flat:
        yield Inert("algo.kl_coef", algo.kl_coef, "the reference is set to the policy after every step, and a step "
                    "has a single optimizer step, in which the KL has no gradient; raise rollout.minibatches")
    if algo.kl_coef and same and algo.kl_in == "reward" and same_logprobs_without_dropout(config):
        yield Inert("algo.kl_coef", algo.kl_coef, "the reference is set to the policy after every step, and "
                    "algo.kl_in=reward compares the reference with the sampling weights, which are the same; set "
                    "algo.kl_in=loss, or algo.reference.every")
    moves = named.name == "ema" or (named.name == "reset" and not named.options.get("optimizer", True))
    if moves and run.task and "reference_logprobs" not in run.task.needs and not Algorithm(config).needs_reference:
        yield Inert("algo.reference", named.name, "algo.kl_coef=0, and no reward of the task reads the reference")


def correction(run: Run) -> Iterator[Inert]:
    """Yields an off-policy correction if sampler and trainer agree exactly, and bounds that none of its weights
    exceeds."""
    named = run.config.algo.correction
    if named.name == "none" or ":" in named.name:
        return
    if samples_as_it_trains(run.config):
        yield Inert("algo.correction", named.name, "engine.name=hf samples with the weights being trained, in "
                    "float32, so all weights of the correction are 1")
    low, high = named.options.get("low"), named.options.get("high")
    if low is not None and low <= 1 / ratio.MOST:
        yield Inert("algo.correction.low", low, "no weight is below this bound")
    if high is not None and high >= ratio.MOST:
        yield Inert("algo.correction.high", high, "no weight is above this bound")


def replaced(run: Run) -> Iterator[Inert]:
    """Yields shapings whose result is discarded by a later shaping."""
    last = ""
    for use in reversed(run.uses("shaping")):
        if use.own:
            last = ""  # it may make a reward unscorable, which is kept
        elif last:
            yield Inert(use.setting, use.named.name, f"{last} replaces that reward")
        if use.in_place_of("reward"):
            last = f"{use.setting}={use.named.name}"


def reward_parts(run: Run) -> Iterator[Inert]:
    """Yields reward parts that have weight 0 in every step and that nothing else uses."""
    judged = _reads_outcome(run)
    named_parts = {use.values.get("part") for name in ("advantage", "batch", "shaping") for use in run.uses(name)}
    for i, one in enumerate(run.task.members if run.task else ()):
        if one.combination != "sum" or run.config.curriculum.part in one.weights:
            continue
        own_rule = type(one).correct is not Task.correct
        read = {*named_parts, *((one.weights if own_rule else one.criterion) if judged else ())}
        place = f"tasks.{i}" if run.config.tasks else "task"
        for part, weight in one.weights.items():
            steps = (0,) if isinstance(weight, (int, float)) else [step for step, _ in weight]
            if part not in read and all(weight_at(weight, int(step)) == 0 for step in steps):
                yield Inert(f"{place}.rewards.{part}", 0, "the part is only a metric and adds nothing to the reward",
                            usual=True)


def services(run: Run) -> Iterator[Inert]:
    """Yields services that are configured, but needed by no reward part of the task."""
    needed = {name for one in (run.task.members if run.task else ()) for name in one.needs}
    settings = run.config.services
    for name, setting, value in (("judge", "url", settings.judge.url), ("clip", "name", settings.clip.name),
                                 ("reward_model", "name", ", ".join(settings.reward_model.name))):
        if run.task and value and name not in needed:
            yield Inert(f"services.{name}.{setting}", value, f"no part of the task's reward uses services.{name}")


def _reads_outcome(run: Run) -> bool:
    curriculum = run.config.curriculum
    uses = [use for name in TABLES for use in run.uses(name)]
    uses += [run.use(*one) for _, settings in active(run.config) for one in settings.functions]
    return (any(use.reads("outcome") for use in uses)
            or curriculum.name not in ("uniform", "sequential")
            or curriculum.keep.name not in ("all", "mixed", "std_ema")
            or curriculum.select.name not in ("first", "most_varied") or curriculum.oversample.name != "fixed")


RULES: Sequence[Callable[[Run], Iterator[Inert]]] = (
    policy_term, unread_credit, functions, sections, reference, correction, replaced, reward_parts, services)
