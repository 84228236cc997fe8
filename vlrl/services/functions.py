"""Plain Python functions as reward parts: `task.parts=[rewards.py:f]`, `vlrl train --reward`, `train(reward=f)`.

    def f(completion: str, row: dict) -> float | bool | None | dict[str, float | None]

The names of a function's parameters say how it is called:

    completions              TRL: f(completions, prompts, **columns) -> one value per completion of a group
    reward_inputs            EasyR1: f(list of {response, response_length, ground_truth}) -> one value per completion
    reward_input             EasyR1, one completion at a time
    predicts, ground_truths  EasyR1, earlier versions
    sample, answer           one completion at a time, as vlrl.types.Sample and Answer
    anything else            one completion at a time: the text, and the row or the columns that the parameters name

A parameter `to_pixels` gets a function that converts a box or point of the model to pixels of the original picture, or
a list of such functions beside `completions`.

The value of a part is None if a completion cannot be judged. A function that returns a dict has one part per key, which
the option `returns` lists."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from vlrl.config.base import Named
from vlrl.data.coordinates import Coordinates
from vlrl.data.row_fields import ground_truth
from vlrl.errors import ConfigError, TaskError
from vlrl.task.part import PartSpec
from vlrl.types import Answer, Parts, Sample

OPTIONS = ("part", "returns")
"""Options of an entry of `task.parts` that are not arguments of its function. part: name of the reward part. returns:
names of the parts in the dict that the function returns."""
TEXTS = ("completion", "response", "predict", "predict_str", "solution_str")
"""Names of the parameter that gets the text of one completion. Without such a parameter, it is the first one."""
ROWS = ("row", "sample", "example")
_OVERALL = "overall"
_TO_PIXELS = "to_pixels"
PIXELS = Coordinates()
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class RewardFunction:
    """A plain function as an entry of `task.parts`. `offer` declares its reward parts; `together` says whether it is
    called once for all completions of a group, as in TRL, or once per completion."""

    def __init__(self, setting: str, named: Named, function: Callable[..., Any]):
        options = dict(named.options)
        self.name = str(options.pop("part", "") or named.name.rpartition(":")[2].rpartition(".")[2])
        returns = options.pop("returns", ())
        self.returns = (returns,) if isinstance(returns, str) else tuple(map(str, returns))
        self.source, self.options = named.name, options
        self.offer = PartSpec(part_weights(self.returns) if self.returns else {self.name: 1.0})
        self._function = function
        try:
            self._parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # of some functions written in C
            self._parameters = {}
        self._check(setting)
        batch = next((name for name in _BATCHES if name in self._parameters), "")
        self._arguments = _BATCHES.get(batch, _single)
        self.together, self.converts = bool(batch), _TO_PIXELS in self._parameters

    def _check(self, setting: str) -> None:
        takes_any = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())
        unknown = next((name for name in self.options if name not in self._parameters and not takes_any), None)
        if unknown:
            raise ConfigError(f"{setting}.{unknown}={self.options[unknown]!r}: the function {self.source} has no "
                              f"parameter {unknown!r}. Its parameters: {', '.join(self._parameters) or 'none'}")
        if next(iter(self._parameters), "") == "task":
            raise ConfigError(f"{setting}={self.source!r}: a function of (task, sample, answers, services) does not "
                              "declare its parts. Decorate it with `@part({\"name\": weight})` of vlrl.task.part, or "
                              "write a function of (completion, row)")
        if not self._parameters:
            raise ConfigError(f"{setting}={self.source!r}: the function takes no argument, but it is called with a "
                              "completion and its row: write def f(completion, row)")

    def parts(self, sample: Sample, answers: Sequence[Answer], coordinates: Coordinates = PIXELS) -> list[Parts]:
        """Returns {part: value} for each answer. `coordinates` converts from the model's convention. Raises TaskError
        if the function returns values of the wrong form, and any error that the function raises."""
        if not self.together:
            return [self._parts_of(self._call([answer], sample, coordinates)) for answer in answers]
        values = self._call(answers, sample, coordinates)
        if isinstance(values, (str, bytes, Mapping)) or not hasattr(values, "__len__") or len(values) != len(answers):
            raise TaskError(f"the reward function {self.source} is called with a list of completions, so it must "
                            f"return a list with one value each; for {len(answers)} completions it returned "
                            f"{str(values)[:80]!r} ({type(values).__name__})")
        return [self._parts_of(value) for value in values]

    def keys_of(self, sample: Sample, answer: Answer) -> list[str]:
        """The keys of the dict that the function returns for an answer; [] if it returns another value."""
        value = self._call([answer], sample, PIXELS)
        value = value[0] if self.together else value
        return list(map(str, value)) if isinstance(value, Mapping) else []

    def _call(self, answers: Sequence[Answer], sample: Sample, coordinates: Coordinates) -> Any:
        positional, named = self._arguments(self, self._parameters, answers, sample)
        if self.converts:
            convert = partial(coordinates.to_original, sample)
            named = {**named, _TO_PIXELS: [convert] * len(answers) if self.together else convert}
        value = self._function(*positional, **{**named, **self.options})
        return asyncio.run(value) if inspect.iscoroutine(value) else value

    def _parts_of(self, value: Any) -> Parts:
        if not isinstance(value, Mapping):
            if self.returns and value is not None:
                raise TaskError(f"the reward function {self.source} must return a dict with the keys "
                                f"{', '.join(self.returns)}, as its option `returns` says; it returned {value!r}")
            return dict.fromkeys(self.returns or (self.name,), value)
        if not self.returns and set(value) != {self.name}:
            raise TaskError(f"the reward function {self.source} returned a dict with the keys "
                            f"{', '.join(map(str, value))}: list them in its entry of task.parts, as "
                            f"{{name: {self.source}, returns: [{', '.join(map(str, value))}]}}")
        wrong = set(map(str, value)) ^ set(self.returns or (self.name,))
        if wrong:
            raise TaskError(f"the reward function {self.source} returned the keys {', '.join(map(str, value))}, but "
                            f"its entry of task.parts lists {', '.join(self.returns)}: every call must return the same "
                            "keys, with None for a part that cannot be judged")
        return dict(value)


def part_weights(returns: Sequence[str]) -> dict[str, float]:
    """The default weights of the parts that a function returns in a dict: 1 for each. If one of them is `overall`, as
    in EasyR1, it is the reward, and the others have weight 0."""
    return {name: float(_OVERALL not in returns or name == _OVERALL) for name in returns}


def _trl(function: RewardFunction, parameters: Mapping[str, inspect.Parameter], answers: Sequence[Answer],
         sample: Sample) -> tuple[Sequence[Any], Mapping[str, Any]]:
    row = row_of(sample)
    chat = isinstance(row.get("prompt"), (list, tuple))
    texts = [[{"role": "assistant", "content": answer.text}] if chat else answer.text for answer in answers]
    known = {**{name: [value] * len(answers) for name, value in row.items() if name not in ("prompt", "completion")},
             "completions": texts, "prompts": [row.get("prompt")] * len(answers)}
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return (), known
    return (), {name: known[name] for name in _wanted(function, parameters, known)}


def _reward_inputs(function: RewardFunction, parameters: Mapping[str, inspect.Parameter], answers: Sequence[Answer],
                   sample: Sample) -> tuple[Sequence[Any], Mapping[str, Any]]:
    row = row_of(sample)
    return (), {"reward_inputs": [_reward_input(answer, row) for answer in answers]}


def _reward_input(answer: Answer, row: Mapping[str, Any]) -> dict[str, Any]:
    return {"response": answer.text, "response_length": answer.n_tokens, "ground_truth": ground_truth(row)}


def _predicts(function: RewardFunction, parameters: Mapping[str, inspect.Parameter], answers: Sequence[Answer],
              sample: Sample) -> tuple[Sequence[Any], Mapping[str, Any]]:
    row = row_of(sample)
    known = {"predicts": [answer.text for answer in answers], "ground_truths": [ground_truth(row)] * len(answers)}
    return (), {name: known[name] for name in _wanted(function, parameters, known)}


_BATCHES: dict[str, Callable[..., tuple[Sequence[Any], Mapping[str, Any]]]] = {
    "completions": _trl, "reward_inputs": _reward_inputs, "predicts": _predicts}
"""Parameter that marks a function of a whole group -> function that returns its arguments."""


def _single(function: RewardFunction, parameters: Mapping[str, inspect.Parameter], answers: Sequence[Answer],
            sample: Sample) -> tuple[Sequence[Any], Mapping[str, Any]]:
    (answer,), row = answers, row_of(sample)
    if [*parameters][:2] == ["sample", "answer"]:
        return (sample, answer), {}
    first = next((name for name in TEXTS if name in parameters), next(iter(parameters)))
    known = {**row, "ground_truth": ground_truth(row), "reward_input": _reward_input(answer, row),
             **{name: dict(row) for name in ROWS}}
    if first != "reward_input":
        known[first] = answer.text
    second = next((p for p in list(parameters.values())[1:2] if p.kind in _POSITIONAL), None)
    if second and second.default is second.empty and second.name not in (*known, *function.options, _TO_PIXELS):
        known[second.name] = dict(row)
    wanted = _wanted(function, parameters, known)
    positional = [name for name in wanted if parameters[name].kind is inspect.Parameter.POSITIONAL_ONLY]
    return [known[name] for name in positional], {name: known[name] for name in wanted if name not in positional}


def _wanted(function: RewardFunction, parameters: Mapping[str, inspect.Parameter], known: Mapping[str, Any]
            ) -> list[str]:
    """The parameters of a function that get a value of `known`. Raises TaskError if a required one has no value."""
    lacking = [name for name, p in parameters.items() if name not in known and name not in function.options
               and name != _TO_PIXELS and p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    if lacking:
        columns = ", ".join(name for name in known if name not in (*ROWS, "reward_input", "completions", "prompts"))
        raise TaskError(f"the reward function {function.source} has the parameter {lacking[0]!r}, but the row has no "
                        f"such column: rename the parameter or the column, or give the parameter a default. Columns: "
                        f"{columns}")
    return [name for name in parameters if name in known and name not in function.options]


def row_of(sample: Sample) -> dict[str, Any]:
    """The row of a sample as its file has it: without a `meta` that only repeats other columns."""
    meta = sample.get("meta")
    copied = isinstance(meta, Mapping) and all(name in sample.row for name in meta)
    return {name: value for name, value in sample.row.items() if name != "meta" or not copied}
