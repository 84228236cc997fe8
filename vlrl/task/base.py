"""The Task contract: one file with a prompt, data and rewards; no torch, no model name.

    class CountCircles(Task):
        most: int = 6                                           # a setting: `task.most=9`
        prompt = "How many circles? Put the number in <answer></answer>."
        rewards = {"correct": 1.0, "format": 0.1}               # part -> weight; `task.rewards.format=0`
        def samples(self, split): ...                           # a sequence of Sample
        def score(self, sample, answer): ...                    # raw parts
        def oracle(self, sample): ...                           # a perfect answer

`vlrl.task.load` makes an instance; the functions of `task/interface.py` call it and validate its results."""

from __future__ import annotations

import copy
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Self, get_type_hints

import pydantic

from vlrl.config.base import refuse_bool
from vlrl.data.coordinates import Coordinates
from vlrl.errors import ConfigError, did_you_mean
from vlrl.task.combine import Weight, checked_weights, make_combine, make_gate, weight_at
from vlrl.task.environment import SUCCESS, Environment
from vlrl.types import Answer, Parts, Sample, Variant

_OUTCOMES = ("accuracy", "correct")
"""Reward parts that are the task's outcome by their name, unless the task defines one."""
_OF_EVERY_TASK = ("rewards", "coordinates", "parts", "combine")
"""Settings below `task` that are not attributes of a task."""
_MEDIA_MARK = re.compile(r"<(?:image|video)>")


class Task:
    """Base of every task. Annotated class attributes are settings (`task.<name>=value`), validated against their
    type."""

    name: ClassVar[str] = ""
    prompt: str = ""
    """May contain {field} placeholders, replaced by the text of the row's field."""
    prompts: tuple[str, ...] = ()
    """Several templates instead of one; one is drawn at each visit to a sample."""
    system: str = ""
    """System prompt; empty = the model's default."""
    rewards: ClassVar[Mapping[str, Weight]] = {}
    """Part -> weight in the reward."""
    outcome: ClassVar[Mapping[str, float]] = {}
    """What makes an answer correct: reward part -> minimum raw value; all of them must be reached. {} = 0.5 of the part
    named accuracy or correct, else of the part with the largest default weight (the first of equals). `curriculum.part`
    and `curriculum.pass_at` override it."""
    lives_outside: ClassVar[bool] = False
    """Whether it needs an environment from `environment.name`."""
    needs: ClassVar[Collection[str]] = frozenset()
    """Services that score_group needs, of services.SERVICES: a set, or {service: the parts that need it}."""

    def __init__(self, **settings: Any):
        cls = type(self)
        self.seed: int = 0
        self.coordinates: Coordinates = Coordinates()
        self.data: Any = None
        """The `data.*` settings, for tasks that read files."""
        self.outside: Any = None
        """What `environment.name` stands for, a vlrl.environments.Outside; None = the task's own environment."""
        self.weights: dict[str, Weight] = self._weights(settings)
        self.combination = self._combination(settings.pop("combine", "auto"), settings)
        """How parts become the reward: a value of `task.combine`, or "own"."""
        self._combine = make_combine("sum" if self.combination == "own" else self.combination, self.weights)
        self._gate = make_gate(self.combination)
        self.criterion = self._own_criterion = self._criterion(settings)
        """What makes an answer correct in this run: part -> the least raw value."""
        self.overridden = False
        """Whether the criterion is that of `curriculum.part` or `curriculum.pass_at`, and `correct` is not asked."""
        for key, value in settings.items():
            setattr(self, key, _checked(cls, key, value))

    @classmethod
    def _weights(cls, settings: dict[str, Any]) -> dict[str, Weight]:
        """Takes `rewards` out of the settings. A task whose tools are called on its behalf also has the part
        `tool_success` if its settings name it."""
        given, known = settings.pop("rewards", {}), cls.rewards_for(settings)
        called = cls.tools is not Task.tools and cls.environment is Task.environment
        return checked_weights({**known, SUCCESS: 0.0} if called and SUCCESS in given else known, given)

    # --- what a task author writes -------------------------------------------------------------------------------

    def samples(self, split: str) -> Sequence[Sample]:
        """The samples of a split ("train", "heldout", ...); the same for the same (split, self.seed).

        The default reads the file of `data.<split>`."""
        from vlrl.data import read_samples

        return read_samples(self, split)

    def score(self, sample: Sample, answer: Answer) -> Parts:
        """Raw reward parts of one answer. Must not raise on any model text."""
        return {}

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        """Parts that compare the answers of a group, merged over those of `score`; [] = none."""
        return []

    def readings(self, service: str, sample: Sample, answers: Sequence[Answer]) -> Sequence[Any]:
        """What the service "policy_logprobs" or "reference_logprobs" evaluates for a group before it is scored:
        answers, or a services.Reading with a text in place of an answer's own."""
        return answers

    def oracle(self, sample: Sample) -> str | None:
        """A perfect answer, or None if the sample has no label."""
        return None

    def pair(self, sample: Sample) -> tuple[str, str] | None:
        """A better and a worse answer to a sample, to train a reward model (docs/services.md), or None. The default is
        the row's `chosen` and `rejected`."""
        better, worse = sample.get("chosen"), sample.get("rejected")
        return (better, worse) if isinstance(better, str) and isinstance(worse, str) else None

    def variants(self, sample: Sample, n: int, step: int) -> Sequence[Variant]:
        """Further answers drawn with other media (shuffled frames, a noisy image), beside or among the `n` of the
        group; () = none. The same for the same arguments. Evaluations draw none."""
        return ()

    def guidance(self, sample: Sample, answers: Sequence[Answer]) -> str | None:
        """A text appended to the question for a second attempt (algo.guided), if all first `answers` were wrong: a
        plan, a hint, the mistake; None = no second attempt. The default is the first of the row's `hints`. The same for
        the same arguments; evaluations never ask."""
        hints = sample.get("hints")
        return hints[0] if isinstance(hints, (list, tuple)) and hints else None

    def environment(self, sample: Sample) -> Environment | None:
        """A new environment in which the model acts over several turns; None = one answer. The default is that of
        `environment.name`.

        Without an own `score` the parts of an episode are the sums of its turns' parts."""
        return self.outside.environment(self, sample) if self.outside else None

    def tools(self, sample: Sample) -> Sequence[Callable[..., Any]]:
        """Functions with typed arguments and a docstring, or a `vlrl.Tool` each, which the model may call over several
        turns; () = none. Called anew for each episode; an answer without a call ends it.

        With an own `environment` they are only shown to the model, and its `step` gets the calls as text."""
        return self.outside.tools() if self.outside else ()

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        """The actions of a perfect episode, which `vlrl sft` and `vlrl tasks check` play; None if unknown."""
        return None

    best_parts: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Part -> its maximum, where that is not 1."""

    knobs: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """For a task that can generate training samples at any difficulty: name -> (lowest, highest)."""

    def generate(self, index: int, knobs: Mapping[str, float]) -> Sample:
        """A training sample with these knobs; the same for the same (index, knobs, self.seed)."""
        raise NotImplementedError(f"task '{self.name}' has knobs, but no generate()")

    def propose(self, number: int, parent: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """The row of a new training prompt for `vlrl data synthesize`, in the format of `sample_from_row`: found by
        exploring, or a variation of `parent`, the row of a prompt that the model fails. None if this attempt found
        nothing, DataError if it failed. The same for the same arguments and self.seed.

        The row has `generator` and `verifier`, texts that say how it was made and what checks it, and what is asked in
        a descriptive field (`instruction`, `question` ...)."""
        raise NotImplementedError(f"task '{self.name}' proposes no prompts")

    written_fields: ClassVar[Collection[str]] = ("question", "instruction", "expression", "caption", "text", "problem",
                                                 "options", "answer")
    """Fields of a row that a generator behind a server may write for a new prompt (`vlrl data synthesize --endpoint`);
    of an answer it writes only the type is used."""

    def solved(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """A generated row with the answer that the task itself computes from the question; None if it cannot, so that
        answers of a teacher have to agree. DataError for a row whose question has no answer."""
        return None

    def answered(self, row: Mapping[str, Any], parsed: Any) -> Mapping[str, Any] | None:
        """The row with a teacher's answer, as `parse` reads it, as the right one; None if it is unusable."""
        usable = isinstance(parsed, (str, int, float)) and not isinstance(parsed, bool) and parsed != ""
        return {**row, "answer": parsed} if "answer" in row and usable else None

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Texts for templates that are made from other fields of the row."""
        return {}

    stage_fields: ClassVar[Collection[str]] = ()
    """Fields of training samples that a stage of curriculum.name=staged may set, for the help that the environment or
    the prompt gives. Evaluations use the sample unchanged."""

    # --- what a task may change ----------------------------------------------------------------------------------

    @classmethod
    def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, Weight]:
        """Part -> default weight under these settings, for a task whose settings choose its parts."""
        return cls.rewards

    @classmethod
    def outcome_for(cls, settings: Mapping[str, Any]) -> Mapping[str, float]:
        """`outcome` under these settings, for a task whose settings choose its parts."""
        return cls.outcome

    @classmethod
    def combine_for(cls, settings: Mapping[str, Any]) -> str:
        """The meaning of `task.combine=auto` under these settings."""
        return "sum"

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """Chat messages; `{"type": "image"}` and `{"type": "video"}` stand for the sample's media in order, before the
        text, or where the row's `question` has `<image>` or `<video>` for each.

        A `system_prompt` of the row follows the task's own; its `turns` come before the question."""
        text = fill(sample.prompt or self.templates[0], sample.row)
        instructions = "\n\n".join(filter(None, (self.system, sample.get("system_prompt"))))
        system = [{"role": "system", "content": [{"type": "text", "text": instructions}]}] if instructions else []
        kinds = [media.kind for media in sample.media]
        turns = [{**turn, "content": _marked(turn["content"], kinds)} for turn in sample.get("turns") or ()]
        return [*system, *turns, {"role": "user", "content": content_of(sample, text, kinds)}]

    def parse(self, sample: Sample, answer: Answer) -> Any:
        """The answer as JSON-able data, for the viewer and the logs; None if there is none."""
        return answer.final

    def target(self, sample: Sample) -> Any:
        """The JSON-able value that `parse` is compared with."""
        return sample.get("target", sample.get("answer"))

    def correct(self, sample: Sample, answer: Answer, parts: Parts) -> bool | None:
        """Whether an answer with these raw parts is correct, by `outcome`; None if unknown.

        This, and no reward, is what objectives, curricula, difficulty, evaluations and the app mean by correct."""
        return reaches(self.criterion, parts)

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Further numbers per evaluated sample, averaged over the split."""
        return {}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Numbers that need all samples of a split. A record has sample, answer, parsed, target, parts, reward."""
        return {}

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        """Marks for the viewer, of the parsed answer and of the target: {"kind", "at", "label", "role"} each.

        Kinds, in original pixels and in seconds from the start of the clip: "box" at [x1, y1, x2, y2], "point" at [x,
        y], "path" at [[x, y], ...], "span" at [start, end], "track" at [[seconds, box], ...]; null seconds if the boxes
        of a track correspond to the frames one by one. The role is "answer" or "target". "media", if given, is the
        index of the image or video that a mark lies on; 0 = the first."""
        return []

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Name -> an answer that must not be rewarded, beside those that `vlrl tasks check` tries on every task.

        None under the name of one of those drops it, for a task in which it is an honest answer."""
        return {}

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        """A Sample from one row in the task's data format; media paths are resolved under `root`."""
        from vlrl.data import sample_from_row
        from vlrl.data.media import MediaAccess

        return sample_from_row(row, root, MediaAccess.of(self.data))

    # --- what the loop calls -------------------------------------------------------------------------------------

    def of(self, sample: Sample) -> Task:
        """The task that asks and scores a sample: this one, or in a mixture that of the sample."""
        return self

    @property
    def members(self) -> tuple[Task, ...]:
        """This task, or the tasks of a mixture."""
        return (self,)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a mixture's tasks; () for a single task."""
        return ()

    @property
    def templates(self) -> tuple[str, ...]:
        return tuple(self.prompts) or (self.prompt,)

    def template(self, sample: Sample, visit: int) -> str:
        """The template of this visit: the first on visit 0 of an evaluation, else drawn by sample and visit."""
        key = f"{self.seed}/{sample.id}/{visit}".encode("utf-8", "backslashreplace")
        return self.templates[zlib.crc32(key) % len(self.templates)]

    def weights_at(self, step: int) -> dict[str, float]:
        """The weight of every part at a step."""
        return {part: weight_at(w, step) for part, w in self.weights.items()}

    def combine(self, parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
        """The reward of one answer, by `task.combine`. A task that overrides it is combined in no other way."""
        return self._combine(parts, weights)

    def turns_count(self, parts: Mapping[str, float]) -> bool:
        """Whether the turns of an episode with these raw parts are rewarded; not if the gate of `task.combine` is
        closed."""
        return self._gate(parts)

    def override_outcome(self, part: str | None, least: float | None) -> None:
        """Makes an answer correct from `least` of a part on. None stands for the task's own part, and for its own
        threshold, which is 0.5 for other parts.

        A task without that part keeps its own, with `least`."""
        if part in self.weights:
            self.criterion, self.overridden = {part: self.criterion.get(part, 0.5) if least is None else least}, True
        elif least is not None:
            self.criterion, self.overridden = dict.fromkeys(self.criterion, least), True

    def by_rule(self) -> Self:
        """A copy whose correctness follows the task's own rule, whatever `override_outcome` has set."""
        rule = copy.copy(self)
        rule.criterion, rule.overridden = self._own_criterion, False
        return rule

    def _criterion(self, settings: Mapping[str, Any]) -> dict[str, float]:
        criterion = dict(self.outcome_for(settings))
        for part in criterion:
            if part not in self.weights:
                raise ConfigError(f"task {self.name or type(self).__name__!r}: outcome names the part {part!r}, which "
                                  f"rewards does not.{did_you_mean(part, self.weights)}")
        return criterion or usual_outcome(self.rewards_for(settings))

    @classmethod
    def _combination(cls, given: Any, settings: Mapping[str, Any]) -> str:
        own = cls.combine is not Task.combine
        if not isinstance(given, str) or (own and given not in ("auto", "own")):
            raise ConfigError(f"task.combine={given!r}: this task combines its parts itself; leave it at auto" if own
                              else f"task.combine={given!r}: give a text, such as sum or gate:format")
        return ("own" if own else cls.combine_for(settings)) if given == "auto" else given


def usual_outcome(rewards: Mapping[str, Weight]) -> dict[str, float]:
    """The default outcome of a task with these parts; see Task.outcome."""
    weights = {part: weight_at(w, 0) for part, w in rewards.items()}
    named = next((part for part in _OUTCOMES if part in weights), None)
    return {named or max(weights, key=lambda part: weights[part]): 0.5} if weights else {}


def reaches(criterion: Mapping[str, float], parts: Parts) -> bool | None:
    """Whether raw parts reach every threshold of a criterion; None if one of these parts has no value."""
    values = [(parts.get(part), least) for part, least in criterion.items()]
    if not values or any(value is None for value, _ in values):
        return None
    return all(value >= least for value, least in values if value is not None)


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Replaces each {field} that the row or its `meta` has by its text; other braces stay, including those in the
    texts."""
    meta = row.get("meta")
    beside = meta if isinstance(meta, Mapping) else {}
    return re.sub(r"\{([^{}]*)\}", lambda match: str(row.get(match[1], beside.get(match[1], match[0]))), template)


def content_of(sample: Sample, text: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The content parts of a prompt: its text, with media of these kinds where the row's question marks them, else
    first."""
    marks = len(_MEDIA_MARK.findall(str(sample.get("question") or "")))
    if marks and len(_MEDIA_MARK.findall(text)) == marks == len(kinds):
        return _marked(text, list(kinds))
    return [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]


def _marked(text: str, kinds: list[str]) -> list[dict[str, Any]]:
    """The content parts of a text; each mark takes the next medium from `kinds`."""
    first, *rest = _MEDIA_MARK.split(text)
    content: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for piece in rest:
        content += [{"type": kinds.pop(0)}, {"type": "text", "text": piece}]
    return [part for part in content if part.get("text") != ""]


def setting_names(cls: type[Task]) -> list[str]:
    """The settings of a task class and of every task: the names allowed after `task.`, except rewards."""
    names = {n for c in cls.__mro__ if issubclass(c, Task) for n, v in vars(c).items()
             if not n.startswith("_") and not callable(v) and not isinstance(v, (property, classmethod, staticmethod))}
    return sorted(names - {"name", "rewards", "outcome", "lives_outside", "needs", "knobs", "best_parts",
                           "stage_fields", "written_fields"})


def _checked(cls: type[Task], key: str, value: Any) -> Any:
    known = setting_names(cls)
    if key not in known:
        near = did_you_mean(key, [*known, *_OF_EVERY_TASK])
        raise ConfigError(f"unknown setting 'task.{key}' (value {value!r}).{near} "
                          f"This task knows: {', '.join([*known, *_OF_EVERY_TASK])}.")
    hint = get_type_hints(cls, include_extras=True).get(key, type(getattr(cls, key)))
    try:
        return pydantic.TypeAdapter(hint).validate_python(refuse_bool(hint, value))
    except pydantic.ValidationError as error:
        from vlrl.config.value_hints import value_hint

        reason = value_hint(f"task.{key}", value) or error.errors()[0]["msg"]
        raise ConfigError(f"task.{key}={value!r}: {reason}") from None
    except ValueError as error:
        raise ConfigError(f"task.{key}={value!r}: {error}") from None
