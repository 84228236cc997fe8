"""The sampling settings of an evaluation: all combinations of temperatures, top_p, lengths and prompt wordings, with
their seeds."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from vlrl.config.schema import Config
from vlrl.engine.base import Sampling
from vlrl.errors import ConfigError, did_you_mean
from vlrl.tools.evaluation.probes import PROBES
from vlrl.tools.evaluation.request import EvalRequest


@dataclass(frozen=True, kw_only=True)
class EvalSetting:
    """One combination of sampling parameters, prompt wording and probe (a change of the samples, see probes.py)."""

    name: str
    temperature: float = 0.0
    top_p: float | None = None  # None = the engine's default
    max_new_tokens: int | None = None  # None = rollout.max_new_tokens
    wording: int | None = None
    """Index of the task's prompt template that is used for every sample. None = the templates are used in turn, as in
    the evaluations during a run."""
    probe: str = ""  # the probe that changes the samples (evaluation/probes.py); "" = samples are unchanged
    plain: str = ""  # with a probe: the name of the setting that has the same parameters but no probe
    seeds: tuple[int, ...] = (0,)
    answers: int = 1  # number of answers to each sample at each seed

    def sampling(self, config: Config) -> Sampling:
        """The sampling parameters of this setting, as the engine takes them."""
        from vlrl.rollout.generate import sampling_of  # it imports torch

        return replace(sampling_of(config.rollout, self.temperature, self.max_new_tokens), top_p=self.top_p)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values of the options of `vlrl eval`, from which all combinations (settings) are made. () and None mean that
    the config decides."""

    answers: int = 1
    seeds: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()
    top_ps: tuple[float, ...] = ()
    max_new_tokens: tuple[int, ...] = ()
    wordings: int = 1
    """Number of prompt templates with which every sample is asked. 1 = each sample is asked with one template, and the
    templates are used in turn, as in the evaluations during a run."""
    probes: tuple[str, ...] = ()
    """Changes of the samples (probes.py). For each of them, every setting is evaluated once more on changed samples."""
    repeats_differ: bool = False
    """Whether even greedy answers depend on the seed: environments are reset with the seed, or the server is not
    deterministic."""

    @classmethod
    def from_request(cls, request: EvalRequest, seed: int) -> Grid:
        """The grid that the options of `vlrl eval` describe; `seed` is the seed of the config.

        Raises ConfigError for an invalid seed, a repeated value or an unknown name."""
        grid = cls(answers=request.answers, seeds=seeds_of(request.seeds, seed), probes=tuple(request.probes),
                   temperatures=tuple(request.temperatures), top_ps=tuple(request.top_ps),
                   max_new_tokens=tuple(request.max_new_tokens))
        grid.check()
        return grid

    def settings(self, config: Config) -> list[EvalSetting]:
        """An EvalSetting for each combination of the values, in order. With greedy decoding, only one answer at one
        seed is generated.

        Without --temperature, eval.temperature is used. If eval.temperature is 0 and several answers, several seeds or
        a top_p are requested, the temperature is 1 instead. Raises ConfigError if one of these options would have no
        effect because all answers are greedy."""
        seeds = self.seeds or (config.seed,)
        several = self.answers > 1 or len(seeds) > 1
        sampled = several or bool(self.top_ps)
        temperatures = self.temperatures or ((config.eval.temperature or float(sampled)),)
        self.check()
        useless = {f"--answers {self.answers}": self.answers > 1 and not self.repeats_differ,
                   f"--seeds {','.join(map(str, seeds))}": len(seeds) > 1 and not self.repeats_differ,
                   f"--top-p {' '.join(map(str, self.top_ps))}": bool(self.top_ps)}
        for option, given in useless.items():
            if given and not any(temperatures):
                raise ConfigError(f"{option} with --temperature 0: greedy answers would all be the same. Set "
                                  f"--temperature 1, or leave {option.partition(' ')[0]} out")
        wordings = tuple(range(self.wordings)) if self.wordings > 1 else (None,)
        out: dict[str, EvalSetting] = {}
        for temperature, top_p, most, wording in itertools.product(temperatures, self.top_ps or (None,),
                                                                   self.max_new_tokens or (None,), wordings):
            varies = bool(temperature) or self.repeats_differ
            top_p = top_p if temperature else None
            setting = EvalSetting(name=_name(temperature, top_p, most, wording), temperature=temperature, top_p=top_p,
                              max_new_tokens=most, wording=wording, seeds=seeds if varies else seeds[:1],
                              answers=self.answers if varies else 1)
            for one in (setting, *(replace(setting, name=f"{setting.name}, {probe}", probe=probe, plain=setting.name)
                                   for probe in self.probes)):
                out.setdefault(one.name, one)
        return list(out.values())

    def check(self) -> None:
        """Raises ConfigError for a repeated value or an unknown probe."""
        for name, values in (("--seeds", self.seeds), ("--temperature", self.temperatures), ("--top-p", self.top_ps),
                             ("--max-new-tokens", self.max_new_tokens), ("--probe", self.probes)):
            twice = next((v for i, v in enumerate(values) if v in values[:i]), None)
            if twice is not None:
                raise ConfigError(f"{name}: {twice} is given twice; give each value once")
        for name in self.probes:
            if name not in PROBES:
                raise ConfigError(f"--probe {name!r} is not known.{did_you_mean(name, PROBES)} Known: "
                                  f"{', '.join(PROBES)}")

def _name(temperature: float, top_p: float | None, most: int | None, wording: int | None) -> str:
    words = [f"temperature {temperature:g}" if temperature else "greedy"]
    words += [f"top_p {top_p:g}"] if top_p is not None else []
    words += [f"{most} tokens"] if most is not None else []
    words += [f"wording {wording + 1}"] if wording is not None else []
    return ", ".join(words)


def seeds_of(text: str | None, first: int) -> tuple[int, ...]:
    """The seeds that the text of an option stands for: "3" means three seeds counting from `first`, "5,7,11" means
    these three seeds, and no text gives ().

    Raises ConfigError for anything else."""
    if not text:
        return ()
    try:
        named = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        named = ()
    if not named or min(named) < 0 or max(named) >= 2**32 or (len(named) == 1 and "," not in text
                                                               and not 1 <= named[0] <= 1000):
        raise ConfigError(f"--seeds {text!r}: give a number of seeds, e.g. 3, or a list of seeds, e.g. 5,7,11 (a "
                          "single seed as 5,)")
    return tuple(range(first, first + named[0])) if "," not in text else named
