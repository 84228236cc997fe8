"""The Task contract: one class with a prompt, data and rewards. A task imports no torch and knows no model name.

    class CountCircles(Task):
        most: int = 6                                           # a setting: `task.most=9`
        prompt = "How many circles? Put the number in <answer></answer>."
        rewards = {"correct": 1.0, "format": 0.1}               # part -> weight; `task.rewards.format=0`
        def samples(self, split): ...                           # a sequence of Sample
        def score(self, sample, answer): ...                    # raw parts
        def oracle(self, sample): ...                           # a perfect answer

`vlrl.task.load` creates an instance. The functions in `task/interface.py` call its methods and validate the results."""

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
"""Names of reward parts that decide whether an answer is correct, unless the task defines `outcome`."""
_OF_EVERY_TASK = ("rewards", "coordinates", "parts", "combine")
"""Settings under `task.` that every task accepts, although they are not attributes of its class."""
_MEDIA_MARK = re.compile(r"<(?:image|video)>")


class Task:
    """Base class of all tasks. An annotated class attribute is a setting (`task.<name>=value`); its value is validated
    against the annotation."""

    name: ClassVar[str] = ""
    prompt: str = ""
    """Prompt template. A {field} placeholder is replaced by the text of this field in the sample's row."""
    prompts: tuple[str, ...] = ()
    """Several prompt templates instead of one. Each time a sample is used, one of the templates is chosen at random."""
    system: str = ""
    """System prompt; empty = the default of the model's chat template."""
    rewards: ClassVar[Mapping[str, Weight]] = {}
    """Reward part -> its weight in the reward."""
    outcome: ClassVar[Mapping[str, float]] = {}
    """Criterion for a correct answer: reward part -> minimum raw value. All minimums must be reached. With {}, the part
    named accuracy or correct must reach 0.5. If the task has neither, the part with the largest default weight must
    reach 0.5 (of several with the same weight, the first). `curriculum.part` and `curriculum.pass_at` override this
    criterion."""
    lives_outside: ClassVar[bool] = False
    """Whether the task needs an environment set by `environment.name`."""
    row_format: ClassVar[str] = "auto"
    """The value that data.format=auto stands for: the format in which the task's files of rows are read."""
    needs: ClassVar[Collection[str]] = frozenset()
    """Names of the services (see services.SERVICES) that score_group needs: a set, or a mapping from each service to
    the reward parts that need this service."""

    def __init__(self, **settings: Any):
        cls = type(self)
        self.seed: int = 0
        self.coordinates: Coordinates = Coordinates()
        self.data: Any = None
        """The `data.*` settings, for tasks that read files."""
        self.outside: Any = None
        """The environment set by `environment.name`, as a vlrl.environments.Outside; None = the task uses the
        environment that its class defines, if any."""
        self.weights: dict[str, Weight] = self._weights(settings)
        self.combination = self._combination(settings.pop("combine", "auto"), settings)
        """How the reward parts are combined into the reward: a value of `task.combine`, or "own" if the class overrides
        `combine`."""
        self._combine = make_combine("sum" if self.combination == "own" else self.combination, self.weights)
        self._gate = make_gate(self.combination)
        self.criterion = self._own_criterion = self._criterion(settings)
        """Criterion for a correct answer in this run: reward part -> minimum raw value."""
        self.overridden = False
        """Whether `curriculum.part` or `curriculum.pass_at` replaced the task's criterion. If so, the method `correct`
        is not called."""
        for key, value in settings.items():
            setattr(self, key, _checked(cls, key, value))

    @classmethod
    def _weights(cls, settings: dict[str, Any]) -> dict[str, Weight]:
        """Removes `rewards` from the settings and returns the weight of every reward part. The part `tool_success` is
        only included if the model calls the task's tools during the rollout and the settings give this part a
        weight."""
        given, known = settings.pop("rewards", {}), cls.rewards_for(settings)
        called = cls.tools is not Task.tools and cls.environment is Task.environment
        return checked_weights({**known, SUCCESS: 0.0} if called and SUCCESS in given else known, given)

    # --- what a task author writes -------------------------------------------------------------------------------

    def samples(self, split: str) -> Sequence[Sample]:
        """The samples of a split ("train", "heldout", ...). The result must depend only on the split and self.seed.

        By default, reads the file set by `data.<split>`."""
        from vlrl.data import read_samples

        return read_samples(self, split)

    def score(self, sample: Sample, answer: Answer) -> Parts:
        """The raw values of the reward parts of one answer. Must not raise, whatever text the model wrote."""
        return {}

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        """Further reward parts for each answer of a group, for rewards that compare the answers or need a service.
        These parts are merged with the parts from `score` and override parts of the same name. [] = no further
        parts."""
        return []

    def readings(self, service: str, sample: Sample, answers: Sequence[Answer]) -> Sequence[Any]:
        """Returns the texts whose log-probabilities a service ("policy_logprobs" or "reference_logprobs") computes
        before a group is scored. An Answer in the result stands for the text of its last turn, a services.Reading for
        another text to use instead. By default, returns all answers of the group."""
        return answers

    def oracle(self, sample: Sample) -> str | None:
        """A perfect answer to the sample, or None if the sample has no label."""
        return None

    def pair(self, sample: Sample) -> tuple[str, str] | None:
        """(better answer, worse answer) to a sample, to train a reward model (docs/services.md). None if the sample has
        no such pair. By default, the fields `chosen` and `rejected` of the row."""
        better, worse = sample.get("chosen"), sample.get("rejected")
        return (better, worse) if isinstance(better, str) and isinstance(worse, str) else None

    def variants(self, sample: Sample, n: int, step: int) -> Sequence[Variant]:
        """Variants of the sample with other media, e.g. shuffled frames or a noisy image, which the model answers as
        well. `Variant.trained` says whether these answers count among the group's `n` answers or are additional. ()
        = no variants. The result must depend only on the arguments. Evaluations do not use variants."""
        return ()

    def guidance(self, sample: Sample, answers: Sequence[Answer]) -> str | None:
        """A text that is appended to the question for a second attempt (algo.guided), if all first `answers` were
        wrong: a plan, a hint, an explanation of the mistake. None = no second attempt. The result must depend only
        on the arguments. Evaluations do not call this method.

        By default, the first of the row's `hints`."""
        hints = sample.get("hints")
        return hints[0] if isinstance(hints, (list, tuple)) and hints else None

    def environment(self, sample: Sample) -> Environment | None:
        """A new environment, in which the model acts over several turns; None = the model gives a single answer. By
        default, the environment set by `environment.name`.

        If the task does not define `score`, each reward part of an episode is the sum of this part over the turns of
        the episode."""
        return self.outside.environment(self, sample) if self.outside else None

    def tools(self, sample: Sample) -> Sequence[Callable[..., Any]]:
        """The tools that the model may call over several turns: functions with type annotations and a docstring, or
        `vlrl.Tool` objects. () = no tools. This method is called once for each episode. The episode ends with an
        answer that contains no tool call.

        If the task also defines `environment`, the tools are only described to the model; the calls are passed as text
        to the environment's `step`."""
        return self.outside.tools() if self.outside else ()

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        """The actions of a perfect episode, or None if they are unknown. `vlrl sft` trains on them, and `vlrl tasks
        check` plays them."""
        return None

    best_parts: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Reward part -> its maximum, for parts whose maximum is not 1."""

    added_parts: ClassVar[Collection[str]] = ()
    """Reward parts that functions in `task.parts` add to those of `score`. Their maximum is unknown, so a perfect
    answer need not reach it."""

    unconverted: ClassVar[Sequence[str]] = ()
    """Functions of `task.parts` that get boxes of the model in the model's units, not in pixels."""
    plain_group: ClassVar[bool] = False
    """Whether `score_group` only calls plain functions of `task.parts`, which mostly score each answer by itself."""

    knobs: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """Difficulty knobs of a task that can generate training samples of any difficulty: name -> (lowest, highest)."""

    def generate(self, index: int, knobs: Mapping[str, float]) -> Sample:
        """Generates the training sample number `index` with these values of the difficulty knobs (name -> value). The
        result must depend only on the arguments and self.seed."""
        raise NotImplementedError(f"task '{self.name}' defines knobs, but no method generate()")

    def propose(self, number: int, parent: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Returns a new training prompt for `vlrl data synthesize`, as a row in the format of `sample_from_row`; None
        if this attempt found no prompt. The task finds the prompt by exploring or, if `parent` is given, derives it
        from `parent`, the row of a prompt that the model fails. `number` is the index of the attempt.

        The row has the fields `generator` and `verifier`, which say how the row was made and how its answer is checked,
        and a field with the request (`instruction`, `question` ...). Raises DataError if the attempt failed. The result
        must depend only on the arguments and self.seed."""
        raise NotImplementedError(f"task '{self.name}' does not define propose()")

    written_fields: ClassVar[Collection[str]] = ("question", "instruction", "expression", "caption", "text", "problem",
                                                 "options", "answer")
    """Fields of a row that an LLM on a server may write for a new prompt (`vlrl data synthesize --endpoint`). If the
    LLM also writes an answer, only the type of this answer is used."""

    def solved(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns the row of a newly written prompt with the right answer added. The task computes this answer from the
        question. None if the task cannot compute it; the row is then kept only if the answers of a teacher model
        agree. Raises DataError if the question has no answer."""
        return None

    def answered(self, row: Mapping[str, Any], parsed: Any) -> Mapping[str, Any] | None:
        """Returns the row with `parsed` as the ground truth; None if this answer is unusable. `parsed` is a teacher
        model's answer, as returned by `parse`."""
        usable = isinstance(parsed, (str, int, float)) and not isinstance(parsed, bool) and parsed != ""
        return {**row, "answer": parsed} if "answer" in row and usable else None

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Additional placeholders for the prompt templates, as name -> text, computed from the fields of the row."""
        return {}

    stage_fields: ClassVar[Collection[str]] = ()
    """Fields of a training sample that a stage of curriculum.name=staged may set, to vary the help that the environment
    or the prompt gives. Evaluations use the sample unchanged."""

    # --- what a task may change ----------------------------------------------------------------------------------

    @classmethod
    def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, Weight]:
        """Reward part -> default weight under these settings. Override this method if the settings determine which
        reward parts there are."""
        return cls.rewards

    @classmethod
    def outcome_for(cls, settings: Mapping[str, Any]) -> Mapping[str, float]:
        """The `outcome` criterion under these settings. Override this method if the settings determine which reward
        parts there are."""
        return cls.outcome

    @classmethod
    def combine_for(cls, settings: Mapping[str, Any]) -> str:
        """The value of `task.combine` that "auto" stands for under these settings."""
        return "sum"

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """The chat messages of a sample. `{"type": "image"}` and `{"type": "video"}` are placeholders for the sample's
        media, in order. The placeholders come before the text. If the row's `question` contains a mark `<image>` or
        `<video>` for each medium, they take the place of these marks.

        A `system_prompt` in the row is appended to the task's system prompt. The messages in the row's `turns` come
        before the question."""
        text = fill(sample.prompt or self.templates_for(sample)[0], sample.row)
        instructions = "\n\n".join(filter(None, (self.system, sample.get("system_prompt"))))
        system = [{"role": "system", "content": [{"type": "text", "text": instructions}]}] if instructions else []
        kinds = [media.kind for media in sample.media]
        turns = [{**turn, "content": marked_content(turn["content"], kinds)} for turn in sample.get("turns") or ()]
        return [*system, *turns, {"role": "user", "content": content_of(sample, text, kinds)}]

    def parse(self, sample: Sample, answer: Answer) -> Any:
        """The content of an answer as JSON-able data, for the viewer and the logs; None if it cannot be parsed."""
        return answer.final

    def target(self, sample: Sample) -> Any:
        """The JSON-able ground truth, in the form in which `parse` returns an answer."""
        return sample.get("target", sample.get("answer"))

    def correct(self, sample: Sample, answer: Answer, parts: Parts) -> bool | None:
        """Whether an answer with these raw parts is correct according to `outcome`; None if this cannot be decided.

        Objectives, curricula, difficulty estimates, evaluations and the app use this result, and not the reward, to
        decide whether an answer is correct."""
        return reaches(self.criterion, parts)

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Additional metrics of one evaluated answer (name -> value); they are averaged over the split."""
        return {}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics (name -> value) that can only be computed from all samples of a split. Each record is a mapping with
        the keys sample, answer, parsed, target, parts and reward."""
        return {}

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        """Marks that the viewer draws on the image or video, for the parsed answer and for the target. A mark is
        {"kind", "at", "label", "role"}; its role is "answer" or "target".

        Kinds: "box" at [x1, y1, x2, y2], "point" at [x, y], "path" at [[x, y], ...], "span" at [start, end], "track" at
        [[seconds, box], ...]. Coordinates are in original pixels, times in seconds from the start of the clip. In a
        track, null instead of seconds means one box per frame. An optional "media" is the index of the image or video
        on which the mark is drawn (default 0)."""
        return []

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Answers that must not be rewarded, as name -> answer. `vlrl tasks check` tries them in addition to the common
        cheats, which are tried on every task.

        If a common cheat is an honest answer in this task, return the name of the cheat with None: the cheat is then
        not tried."""
        return {}

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        """Converts one row in the task's data format to a Sample. Relative media paths are resolved under `root`."""
        from vlrl.data import sample_from_row
        from vlrl.data.media import MediaAccess

        return sample_from_row(row, root, MediaAccess.of(self.data))

    # --- what the loop calls -------------------------------------------------------------------------------------

    def of(self, sample: Sample) -> Task:
        """The task that builds the prompt of a sample and scores its answers: this task, or in a mixture the task the
        sample belongs to."""
        return self

    @property
    def members(self) -> tuple[Task, ...]:
        """The tasks of a mixture; a tuple with only this task if it is a single task."""
        return (self,)

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of a mixture's tasks; () for a single task."""
        return ()

    @property
    def templates(self) -> tuple[str, ...]:
        return tuple(self.prompts) or (self.prompt,)

    def templates_for(self, sample: Sample) -> tuple[str, ...]:
        """The prompt templates of one sample; those of the task unless the task asks some rows in other words."""
        return self.templates

    def template(self, sample: Sample, visit: int) -> str:
        """The prompt template for one use of a sample, chosen pseudo-randomly from the seed, the sample's id and
        `visit`, the index of this use."""
        key = f"{self.seed}/{sample.id}/{visit}".encode("utf-8", "backslashreplace")
        templates = self.templates_for(sample)
        return templates[zlib.crc32(key) % len(templates)]

    def weights_at(self, step: int) -> dict[str, float]:
        """The weight of every reward part at a training step."""
        return {part: weight_at(w, step) for part, w in self.weights.items()}

    def combine(self, parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
        """Combines the reward parts of one answer into its reward, as set by `task.combine`. If a task overrides this
        method, `task.combine` cannot be set for it."""
        return self._combine(parts, weights)

    def turns_count(self, parts: Mapping[str, float]) -> bool:
        """Whether the per-turn rewards of an episode with these raw parts count. They do not count if the gate in
        `task.combine` is closed."""
        return self._gate(parts)

    def override_outcome(self, part: str | None, least: float | None) -> None:
        """Replaces the criterion for a correct answer: the reward part `part` must reach `least`. If `part` is None or
        is not a part of the task, all parts in the task's own criterion must reach `least`. If `least` is None, the
        minimum in the task's own criterion is kept, or is 0.5 for a part that this criterion does not contain."""
        if part in self.weights:
            self.criterion, self.overridden = {part: self.criterion.get(part, 0.5) if least is None else least}, True
        elif least is not None:
            self.criterion, self.overridden = dict.fromkeys(self.criterion, least), True

    def by_rule(self) -> Self:
        """A copy of the task that decides by its own criterion whether an answer is correct, and ignores
        `override_outcome`."""
        rule = copy.copy(self)
        rule.criterion, rule.overridden = self._own_criterion, False
        return rule

    def _criterion(self, settings: Mapping[str, Any]) -> dict[str, float]:
        criterion = dict(self.outcome_for(settings))
        for part in criterion:
            if part not in self.weights:
                raise ConfigError(f"task {self.name or type(self).__name__!r}: its outcome has the part "
                                  f"{part!r}, which is missing from its rewards.{did_you_mean(part, self.weights)}")
        return criterion or usual_outcome(self.rewards_for(settings))

    @classmethod
    def _combination(cls, given: Any, settings: Mapping[str, Any]) -> str:
        own = cls.combine is not Task.combine
        if not isinstance(given, str) or (own and given not in ("auto", "own")):
            raise ConfigError(f"task.combine={given!r}: this task combines its parts itself. Remove this setting" if own
                              else f"task.combine={given!r}: give a string, such as sum or gate:format")
        return ("own" if own else cls.combine_for(settings)) if given == "auto" else given


def usual_outcome(rewards: Mapping[str, Weight]) -> dict[str, float]:
    """The criterion for a correct answer (reward part -> minimum) of a task with these `rewards` that defines no
    `outcome`; see Task.outcome."""
    weights = {part: weight_at(w, 0) for part, w in rewards.items()}
    named = next((part for part in _OUTCOMES if part in weights), None)
    return {named or max(weights, key=lambda part: weights[part]): 0.5} if weights else {}


def reaches(criterion: Mapping[str, float], parts: Parts) -> bool | None:
    """Whether the raw parts reach all minimums of a criterion; None if one of the required parts has no value."""
    values = [(parts.get(part), least) for part, least in criterion.items()]
    if not values or any(value is None for value, _ in values):
        return None
    return all(value >= least for value, least in values if value is not None)


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Replaces each {field} in a template by the text of this field of the row or of its `meta`. Braces around other
    names, and braces in the inserted texts, are left unchanged."""
    meta = row.get("meta")
    beside = meta if isinstance(meta, Mapping) else {}
    return re.sub(r"\{([^{}]*)\}", lambda match: str(row.get(match[1], beside.get(match[1], match[0]))), template)


def content_of(sample: Sample, text: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """The content parts of a user message: the text, and placeholders for media of these `kinds` ("image" or "video").
    Placeholders are at the marks in the row's question if it has any, else before the text."""
    marks = len(_MEDIA_MARK.findall(str(sample.get("question") or "")))
    if marks and len(_MEDIA_MARK.findall(text)) == marks == len(kinds):
        return marked_content(text, list(kinds))
    return [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]


def marked_content(text: str, kinds: list[str]) -> list[dict[str, Any]]:
    """Splits a text at its media marks into content parts. Each mark becomes a placeholder for the next medium, whose
    kind is taken from `kinds`, or for a medium of its own kind if none is left."""
    pieces, marks = _MEDIA_MARK.split(text), _MEDIA_MARK.findall(text)
    content: list[dict[str, Any]] = [{"type": "text", "text": pieces[0]}]
    for mark, piece in zip(marks, pieces[1:], strict=True):
        content += [{"type": kinds.pop(0) if kinds else mark.strip("<>")}, {"type": "text", "text": piece}]
    return [part for part in content if part.get("text") != ""]


def setting_names(cls: type[Task]) -> list[str]:
    """The settings of a task class: names of its own and inherited class attributes that `task.<name>` can set. The
    names in _OF_EVERY_TASK are not included."""
    names = {n for c in cls.__mro__ if issubclass(c, Task) for n, v in vars(c).items()
             if not n.startswith("_") and not callable(v) and not isinstance(v, (property, classmethod, staticmethod))}
    return sorted(names - {"name", "rewards", "outcome", "lives_outside", "row_format", "plain_group", "unconverted",
                           "needs", "knobs", "best_parts", "stage_fields", "written_fields"})


def _checked(cls: type[Task], key: str, value: Any) -> Any:
    known = setting_names(cls)
    if key not in known:
        near = did_you_mean(key, [*known, *_OF_EVERY_TASK])
        raise ConfigError(f"unknown setting 'task.{key}' (value {value!r}).{near} "
                          f"Settings of this task: {', '.join([*known, *_OF_EVERY_TASK])}.")
    hint = get_type_hints(cls, include_extras=True).get(key, type(getattr(cls, key)))
    try:
        return pydantic.TypeAdapter(hint).validate_python(refuse_bool(hint, value))
    except pydantic.ValidationError as error:
        from vlrl.config.value_hints import value_hint

        reason = value_hint(f"task.{key}", value) or error.errors()[0]["msg"]
        raise ConfigError(f"task.{key}={value!r}: {reason}") from None
    except ValueError as error:
        raise ConfigError(f"task.{key}={value!r}: {error}") from None
