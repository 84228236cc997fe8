"""The sampling settings of an evaluation: temperatures, top_p, lengths, wordings and seeds, crossed."""

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
    """One way to sample answers."""

    name: str
    temperature: float = 0.0
    top_p: float | None = None
    """None = the default of the engine."""
    max_new_tokens: int | None = None
    """None = rollout.max_new_tokens."""
    wording: int | None = None
    """Index of the task's template that every sample is asked with; None = templates take turns, as in a run's
    evaluations.
    """
    probe: str = ""
    """How the samples are changed (evaluation/probes.py); "" = unchanged."""
    plain: str = ""
    """For a probe, the name of the setting that asks the unchanged samples."""
    seeds: tuple[int, ...] = (0,)
    answers: int = 1
    """Answers to each sample, at each seed."""

    def sampling(self, config: Config) -> Sampling:
        """The sampling parameters for the engine."""
        from vlrl.rollout.generate import sampling_of  # it imports torch

        return replace(sampling_of(config.rollout, self.temperature, self.max_new_tokens), top_p=self.top_p)


@dataclass(frozen=True, kw_only=True)
class Grid:
    """The values to combine; () and None stand for the value of the config."""

    answers: int = 1
    seeds: tuple[int, ...] = ()
    temperatures: tuple[float, ...] = ()
    top_ps: tuple[float, ...] = ()
    max_new_tokens: tuple[int, ...] = ()
    wordings: int = 1
    """Templates to ask every sample with, one after the other; 1 = they take turns, as in a run's evaluations."""
    probes: tuple[str, ...] = ()
    """Each is added to every setting."""
    repeats_differ: bool = False
    """Whether even greedy answers depend on the seed: environments reset with it, servers that are not deterministic.
    """

    @classmethod
    def of(cls, request: EvalRequest, seed: int) -> Grid:
        """The grid of a request; `seed` is the config's. Raises ConfigError for a value that is no seed, that is given
        twice or that is not known.
        """
        grid = cls(answers=request.answers, seeds=seeds_of(request.seeds, seed), probes=tuple(request.probes),
                   temperatures=tuple(request.temperatures), top_ps=tuple(request.top_ps),
                   max_new_tokens=tuple(request.max_new_tokens))
        grid.check()
        return grid

    def settings(self, config: Config) -> list[EvalSetting]:
        """Every combination, in order. Greedy answers are drawn only once.

        Without temperatures it is eval.temperature, or 1 where that is 0 and several answers, several seeds or a top_p
        are asked for. Raises ConfigError where these would have no effect, as all answers are greedy.
        """
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
                raise ConfigError(f"{option} with --temperature 0: greedy answers would all be the same. Add "
                                  "--temperature 1, or leave one of the two out")
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
        """Raises ConfigError for a value that is given twice, and for an unknown probe."""
        for name, values in (("--seeds", self.seeds), ("--temperature", self.temperatures), ("--top-p", self.top_ps),
                             ("--max-new-tokens", self.max_new_tokens), ("--probe", self.probes)):
            twice = next((v for i, v in enumerate(values) if v in values[:i]), None)
            if twice is not None:
                raise ConfigError(f"{name}: {twice} is given twice; give each once")
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
    """The seeds in a text: "3" = three from `first` on, "5,7,11" = these; () for none.

    Raises ConfigError for anything else.
    """
    if not text:
        return ()
    try:
        named = tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        named = ()
    if not named or min(named) < 0 or max(named) >= 2**32 or (len(named) == 1 and "," not in text
                                                               and not 1 <= named[0] <= 1000):
        raise ConfigError(f"--seeds {text!r}: give how many, e.g. 3, or which, e.g. 5,7,11 (a single one as 5,)")
    return tuple(range(first, first + named[0])) if "," not in text else named
