"""Decides which prompts are trained on: samplers (base.py) draw prompts, and filters (filters.py) choose among groups.

- A sampler runs on the main process, which sends the draws to all ranks. The sampler observes the outcome of every draw
  of every rank in draw order, including rejected prompts and groups that are not trained on.
- Filters (keep, oversample, select) do not depend on the sampler, nor samplers on filters. All ranks see all outcomes,
  so filters decide the same on every rank.
- Probes are completions that are observed but not trained on. A sampler may have the policy measure every prompt before
  the first draw (MeasuringSampler). The sampler's checkpoint contains the measured values.
- For a task that generates samples, a draw is (index, knobs), which determine the sample and its id. Knobs are the
  task's difficulty settings.
- Where a sampler uses |A|, the absolute advantage, A is computed from raw rewards as in GRPO, whatever
  `algo.advantage` is.
- `curriculum.*` also holds the options of the sampler, validated by the sampler's parameters.
- `vlrl data difficulty` measures prompts in chunks fixed by their index in the split, because the other sequences of a
  batch change the last bits of logits. So neither an interruption nor the number of ranks changes a pass rate. Only
  samplers see the columns of the file `data.difficulty`; the samples do not change."""

from __future__ import annotations

from collections.abc import Mapping

from vlrl.algo.named import bind, parameters
from vlrl.config.registry import Table, failure, place, resolve
from vlrl.config.schema import CurriculumSettings
from vlrl.curriculum.base import Categories, ForeseeingSampler, MeasuringSampler, ProbingSampler, Prompts, Sampler
from vlrl.curriculum.drawing import Sequential, Uniform
from vlrl.curriculum.filters import Filters, Intake
from vlrl.curriculum.types import Draw, Outcome
from vlrl.errors import ConfigError, VlrlError, did_you_mean
from vlrl.task import Task

__all__ = ["SAMPLERS", "Categories", "Draw", "Filters", "ForeseeingSampler", "Intake", "MeasuringSampler",
           "Outcome", "ProbingSampler", "Prompts", "Sampler", "Sequential", "Uniform", "check", "make"]

SAMPLERS = Table({
    "uniform": "vlrl.curriculum.drawing:Uniform",
    "sequential": "vlrl.curriculum.drawing:Sequential",
    "adcl": "vlrl.methods.curricula.refocus:ADCL",
    "alp_gmm": "vlrl.methods.curricula.procedural:ALPGMM",
    "domain_weighted": "vlrl.methods.curricula.bandits:DomainWeighted",
    "dump": "vlrl.methods.curricula.bandits:Dump",
    "easy_to_hard": "vlrl.methods.curricula.ordered:EasyToHard",
    "gain_rl": "vlrl.methods.gain_rl.sampler:GainRL",
    "gaussian": "vlrl.methods.curricula.ordered:Gaussian",
    "gvm": "vlrl.methods.curricula.gvm:GVM",
    "hard_focus": "vlrl.methods.curricula.refocus:HardFocus",
    "lifecycle": "vlrl.methods.curricula.lifecycle:Lifecycle",
    "limr": "vlrl.methods.curricula.lifecycle:Limr",
    "prioritised": "vlrl.methods.curricula.online:Prioritised",
    "recap": "vlrl.methods.curricula.bandits:Recap",
    "replay": "vlrl.methods.curricula.online:SelectiveReplay",
    "retrospective": "vlrl.methods.curricula.staged:Retrospective",
    "rlcs": "vlrl.methods.curricula.online:Rlcs",
    "sec": "vlrl.methods.curricula.bandits:Sec",
    "staged": "vlrl.methods.curricula.staged:Staged",
    "sws": "vlrl.methods.curricula.bandits:Sws",
    "weakness": "vlrl.methods.curricula.procedural:Weakness",
})
_MIXTURE_SAMPLERS = Table({"shares": "vlrl.curriculum.shares:Shares"})
"""The sampler for mixtures of tasks with fixed shares, which combines one sampler per task."""
_METHODS = ("next", "observe", "state_dict", "load_state_dict", "metrics")


def check(settings: CurriculumSettings, task: Task) -> None:
    """Raises ConfigError for unknown filters or options, and for a `curriculum.part` that no task has."""
    Filters(settings)
    parts = [*dict.fromkeys(part for one in task.members for part in one.weights_at(0))]
    if settings.part is not None and settings.part not in parts:
        raise ConfigError(f"curriculum.part={settings.part!r} is not a reward part of "
                          f"{task.name}.{did_you_mean(settings.part, parts)} Its parts: {', '.join(parts)}")


def make(settings: CurriculumSettings, prompts: Prompts, shares: Mapping[str, float] | None = None) -> Sampler:
    """Creates the sampler `curriculum.name` with its options. If `shares` (task label -> weight) is given, creates one
    such sampler per task of a mixture and combines them by Shares. Raises ConfigError for an unknown name or option,
    and if the data lack a field that the sampler needs."""
    sampler = settings.sampler
    known = parameters(resolve("curriculum.name", sampler.name, SAMPLERS), 1)
    for option, value in sampler.options.items():
        if option not in known:
            raise ConfigError(f"curriculum.{option}={value!r} is neither a setting nor an option of the sampler "
                              f"'{sampler.name}'.{did_you_mean(option, [*known, *CurriculumSettings.model_fields])} "
                              f"Its options: {', '.join(known) or 'none'}.")

    def build(some: Prompts) -> Sampler:
        try:
            instance = bind("curriculum", sampler, SAMPLERS, arguments=(some,)).function
        except Exception as error:
            if isinstance(error, VlrlError) or not place(error):
                raise
            raise ConfigError(f"curriculum.name={sampler.name!r}: {failure(error)}") from error
        lacking = [name for name in _METHODS if not callable(getattr(instance, name, None))]
        if lacking:
            raise ConfigError(f"curriculum.name={sampler.name!r} is not a sampler: it lacks the methods "
                              f"{', '.join(lacking)}. docs/curriculum.md has an example")
        return instance

    return _MIXTURE_SAMPLERS["shares"](prompts, shares, build) if shares else build(prompts)
