"""The Task contract: one file with a prompt, data and rewards; no torch, no model name.

    class CountCircles(Task):
        most: int = 6                                           # a knob: `task.most=9`
        prompt = "How many circles? Put the number in <answer></answer>."
        rewards = {"correct": 1.0, "format": 0.1}               # part -> weight; `task.rewards.format=0`
        def samples(self, split): ...                           # a sequence of Sample
        def score(self, sample, answer): ...                    # raw parts
        def oracle(self, sample): ...                           # a perfect answer

`load("grounding")`, `load("my_pkg.my_file:MyTask")` and `load("path/file.py:MyTask")` give an instance.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, get_type_hints

import pydantic

from vlrl.config.base import refuse_bool
from vlrl.config.registry import MissingFile, failure, file_module
from vlrl.errors import ConfigError, TaskError, VlrlError, did_you_mean
from vlrl.task.combine import Weight, checked_weights, make_combine, make_gate, weight_at
from vlrl.task.environment import Environment
from vlrl.task.row_files import forget, refuse_unread, unread
from vlrl.task.tools import Tool
from vlrl.types import Answer, Coordinates, Observation, Parts, Sample, Variant

_OUTCOMES = ("accuracy", "correct")
"""Reward parts that are a task's outcome by their name, where it says nothing else."""
_MEDIA_MARK = re.compile(r"<(?:image|video)>")


class Task:
    """Base of every task. Annotated class attributes are settings (`task.<name>=value`), checked against their type."""

    name: ClassVar[str] = ""
    prompt: str = ""
    """May hold {field} placeholders, filled from the row by plain substitution."""
    prompts: tuple[str, ...] = ()
    """Several templates instead of one; each visit to a sample draws one."""
    system: str = ""
    """System prompt; empty = the model's default."""
    rewards: ClassVar[Mapping[str, Weight]] = {}
    """Part -> weight in the reward."""
    outcome: ClassVar[Mapping[str, float]] = {}
    """What makes an answer correct: reward part -> the least raw value; with several, all of them. {} = the part
    named accuracy or correct, else that of the largest default weight (the first of equal ones), from 0.5 on.
    `curriculum.part` and `curriculum.pass_at` override it."""
    lives_outside: ClassVar[bool] = False
    """Whether it is nothing without `environment.name`."""
    needs: ClassVar[Collection[str]] = frozenset()
    """Services that score_group is to be given, of services.SERVICES: a set, or {service: the parts that need it}."""

    def __init__(self, **settings: Any):
        cls = type(self)
        self.seed: int = 0
        self.coordinates: Coordinates = Coordinates()
        self.data: Any = None
        """The `data.*` settings, for tasks that read files."""
        self.outside: Any = None
        """What `environment.name` stands for, a vlrl.environments.Outside; None = the task's own environment."""
        self.weights: dict[str, Weight] = checked_weights(cls.rewards_for(settings), settings.pop("rewards", {}))
        self.combination = self._combination(settings.pop("combine", "auto"), settings)
        """How parts become the reward: a value of `task.combine`, or "own"."""
        self._combine = make_combine("sum" if self.combination == "own" else self.combination, self.weights)
        self._gate = make_gate(self.combination)
        self.criterion = self._criterion(settings)
        """What makes an answer correct in this run: part -> the least raw value."""
        self.overridden = False
        """Whether the criterion is that of `curriculum.part` or `curriculum.pass_at`, and `correct` is not asked."""
        for key, value in settings.items():
            setattr(self, key, _checked(cls, key, value))

    # --- what a task author writes -------------------------------------------------------------------------------

    def samples(self, split: str) -> Sequence[Sample]:
        """Returns the samples of a split ("train", "heldout", ...); the same for the same (split, self.seed).

        The default reads the file of `data.<split>`.
        """
        from vlrl.data import read_samples

        return read_samples(self, split)

    def score(self, sample: Sample, answer: Answer) -> Parts:
        """Raw reward parts of one answer. Model text must never make it raise."""
        return {}

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        """Parts that compare the answers of a group, merged over those of `score`; [] = none."""
        return []

    def readings(self, service: str, sample: Sample, answers: Sequence[Answer]) -> Sequence[Any]:
        """Returns what the service "policy_logprobs" or "reference_logprobs" is to read of a group before it is scored,
        where the task needs it: answers, or a services.Reading of a text in place of what one says."""
        return answers

    def oracle(self, sample: Sample) -> str | None:
        """Returns a perfect answer, or None when the sample has no label."""
        return None

    def pair(self, sample: Sample) -> tuple[str, str] | None:
        """Returns a better and a worse answer to a sample, of which a reward model learns (docs/services.md); None
        where there are none. The default is the row's `chosen` and `rejected`."""
        better, worse = sample.get("chosen"), sample.get("rejected")
        return (better, worse) if isinstance(better, str) and isinstance(worse, str) else None

    def variants(self, sample: Sample, n: int, step: int) -> Sequence[Variant]:
        """Further answers drawn with other media (shuffled frames, a noisy image), beside or among the `n` of the
        group; () = none. The same for the same arguments. Evaluations draw none."""
        return ()

    def guidance(self, sample: Sample, answers: Sequence[Answer]) -> str | None:
        """Returns what a second attempt is told behind the question (algo.guided), where all first `answers` were
        wrong: a plan, a hint, what was wrong; None = there is no second attempt. The default is the first of the row's
        `hints`. The same for the same arguments; evaluations never ask."""
        hints = sample.get("hints")
        return hints[0] if isinstance(hints, (list, tuple)) and hints else None

    def environment(self, sample: Sample) -> Environment | None:
        """Returns a new environment in which the model acts over several turns; None = one answer. The default is that
        of `environment.name`.

        Without an own `score` the parts of an episode are the sums of its turns' parts."""
        return self.outside.environment(self, sample) if self.outside else None

    def tools(self, sample: Sample) -> Sequence[Tool | Callable[..., Any]]:
        """Functions with typed arguments and a docstring, which the model may call over several turns, see
        task/tools.py; () = none. They are made anew for each episode, and an answer without a call ends it.

        With an own `environment` they are only shown to the model: its `step` gets the calls as text."""
        return self.outside.tools() if self.outside else ()

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        """Returns the actions of a perfect episode, as `vlrl sft` and `vlrl tasks check` play them; None where they are
        not known."""
        return None

    best_parts: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Part -> the most that it can be, where that is not 1."""

    knobs: Mapping[str, tuple[float, float]] = MappingProxyType({})
    """Of a task that can make training samples at any difficulty: name -> (lowest, highest)."""

    def generate(self, index: int, knobs: Mapping[str, float]) -> Sample:
        """Returns a training sample made with these knobs; the same for the same (index, knobs, self.seed)."""
        raise NotImplementedError(f"task '{self.name}' has knobs, but no generate()")

    def propose(self, number: int, parent: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Returns the row of a new training prompt, as `sample_from_row` reads it, for `vlrl data synthesize`: found by
        exploring, or a variation of `parent`, the row of a prompt at which a model fails. None where this try found
        nothing, DataError where it went wrong. The same for the same arguments and self.seed.

        The row has `generator` and `verifier`, texts that say how it was made and what checks it, and what is asked in
        a field that says so (`instruction`, `question` ...)."""
        raise NotImplementedError(f"task '{self.name}' proposes no prompts")

    written_fields: ClassVar[Collection[str]] = ("question", "instruction", "expression", "caption", "text", "problem",
                                                 "options", "answer")
    """Fields of a row that a generator behind a server may write for a new prompt (`vlrl data synthesize --endpoint`);
    what it writes as the answer only says of which kind the answer is."""

    def solved(self, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Returns a row that a generator wrote with the answer that the task works out itself from what is asked; None
        where it cannot, and answers of a teacher have to agree. DataError for a row that asks nothing that has one."""
        return None

    def answered(self, row: Mapping[str, Any], parsed: Any) -> Mapping[str, Any] | None:
        """Returns the row with a teacher's answer, as `parse` reads it, for the right one; None where it is none."""
        usable = isinstance(parsed, (str, int, float)) and not isinstance(parsed, bool) and parsed != ""
        return {**row, "answer": parsed} if "answer" in row and usable else None

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        """Returns texts that templates may hold and that are made from other fields of the row."""
        return {}

    stage_fields: ClassVar[Collection[str]] = ()
    """Fields of samples that a stage of curriculum.name=staged may set in training, for what help the environment or
    the prompt gives. Evaluations see the sample as it is."""

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
        """Returns what `task.combine=auto` stands for under these settings."""
        return "sum"

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """Chat messages; `{"type": "image"}` and `{"type": "video"}` stand for the sample's media in order, before the
        text, or where the row's `question` has `<image>` or `<video>` for each.

        A `system_prompt` of the row follows the task's own; its `turns` come before the question."""
        text = fill(sample.prompt or self.templates[0], sample.row)
        told = "\n\n".join(filter(None, (self.system, sample.get("system_prompt"))))
        system = [{"role": "system", "content": [{"type": "text", "text": told}]}] if told else []
        kinds = [media.kind for media in sample.media]
        turns = [{**turn, "content": _marked(turn["content"], kinds)} for turn in sample.get("turns") or ()]
        return [*system, *turns, {"role": "user", "content": content_of(sample, text, kinds)}]

    def parse(self, sample: Sample, answer: Answer) -> Any:
        """Returns the answer as JSON-able data, for the viewer and the logs; None when there is none."""
        return answer.final

    def target(self, sample: Sample) -> Any:
        """Returns what `parse` is compared with, JSON-able."""
        return sample.get("target", sample.get("answer"))

    def correct(self, sample: Sample, answer: Answer, parts: Parts) -> bool | None:
        """Returns whether an answer with these raw parts is correct, by `outcome`; None where that is not known.

        This, and no reward, is what objectives, curricula, difficulty, evaluations and the app mean by correct."""
        return reaches(self.criterion, parts)

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Further numbers per evaluated sample, averaged over the split."""
        return {}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Numbers that need a whole split. A record has sample, answer, parsed, target, parts, reward."""
        return {}

    def overlay(self, sample: Sample, parsed: Any) -> list[dict[str, Any]]:
        """Marks for the viewer, of the parsed answer and of the target: {"kind", "at", "label", "role"} each.

        Kinds, in original pixels and in seconds from the start of the clip: "box" at [x1, y1, x2, y2], "point" at
        [x, y], "path" at [[x, y], ...], "span" at [start, end], "track" at [[seconds, box], ...]; null seconds where
        the boxes of a track go one by one with the frames. The role is "answer" or "target". "media", if given, is
        the number of the image or video that a mark lies on; 0 = the first.
        """
        return []

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Returns name -> an answer that must not pay, beside those that `vlrl tasks check` tries on every task.

        None under the name of one of those drops it: there it is an honest answer.
        """
        return {}

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        """Returns a Sample from one row in the task's data format; media paths are resolved under `root`."""
        from vlrl.data import sample_from_row
        from vlrl.data.media import Access

        return sample_from_row(row, root, Access.of(self.data))

    # --- what the loop calls -------------------------------------------------------------------------------------

    def of(self, sample: Sample) -> Task:
        """Returns the task that asks and scores a sample: this one; in a mixture, that of the sample."""
        return self

    @property
    def members(self) -> tuple[Task, ...]:
        """This task; of a mixture, its tasks."""
        return (self,)

    @property
    def labels(self) -> tuple[str, ...]:
        """Of a mixture, what its tasks are called; else ()."""
        return ()

    @property
    def templates(self) -> tuple[str, ...]:
        return tuple(self.prompts) or (self.prompt,)

    def template(self, sample: Sample, visit: int) -> str:
        """Returns the template of this visit: the first on visit 0 of an evaluation, else drawn by sample and visit."""
        key = f"{self.seed}/{sample.id}/{visit}".encode("utf-8", "backslashreplace")
        return self.templates[zlib.crc32(key) % len(self.templates)]

    def weights_at(self, step: int) -> dict[str, float]:
        """Returns the weight of every part at a step."""
        return {part: weight_at(w, step) for part, w in self.weights.items()}

    def combine(self, parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
        """Returns the reward of one answer, by `task.combine`. A task may override it, and is then combined in no other
        way.
        """
        return self._combine(parts, weights)

    def turns_count(self, parts: Mapping[str, float]) -> bool:
        """Returns whether the turns of an episode with these raw parts are paid for their own: not where the gate of
        `task.combine` is shut."""
        return self._gate(parts)

    def override_outcome(self, part: str | None, least: float | None) -> None:
        """Has an answer count as correct from `least` of a part on. None stands for the task's own part, and for its
        own threshold, which is 0.5 for other parts.

        A task without that part keeps its own, with `least`."""
        if part in self.weights:
            self.criterion, self.overridden = {part: self.criterion.get(part, 0.5) if least is None else least}, True
        elif least is not None:
            self.criterion, self.overridden = dict.fromkeys(self.criterion, least), True

    def _criterion(self, settings: Mapping[str, Any]) -> dict[str, float]:
        found = dict(self.outcome_for(settings))
        for part in found:
            if part not in self.weights:
                raise ConfigError(f"task {self.name or type(self).__name__!r}: outcome names the part {part!r}, which "
                                  f"rewards does not.{did_you_mean(part, self.weights)}")
        return found or usual_outcome(self.rewards_for(settings))

    @classmethod
    def _combination(cls, given: Any, settings: Mapping[str, Any]) -> str:
        own = cls.combine is not Task.combine
        if not isinstance(given, str) or (own and given not in ("auto", "own")):
            raise ConfigError(f"task.combine={given!r}: this task combines its parts itself; leave it at auto" if own
                              else f"task.combine={given!r}: give a text, such as sum or gate:format")
        return ("own" if own else cls.combine_for(settings)) if given == "auto" else given


def usual_outcome(rewards: Mapping[str, Weight]) -> dict[str, float]:
    """Returns what makes an answer correct where a task with these parts does not say it; see Task.outcome."""
    weights = {part: weight_at(w, 0) for part, w in rewards.items()}
    named = next((part for part in _OUTCOMES if part in weights), None)
    return {named or max(weights, key=lambda part: weights[part]): 0.5} if weights else {}


def reaches(criterion: Mapping[str, float], parts: Parts) -> bool | None:
    """Returns whether raw parts reach every threshold of a criterion; None where one of these parts has no value."""
    values = [(parts.get(part), least) for part, least in criterion.items()]
    if not values or any(value is None for value, _ in values):
        return None
    return all(value >= least for value, least in values if value is not None)


def fill(template: str, row: Mapping[str, Any]) -> str:
    """Replaces each {field} that the row has by its text; other braces, those of the texts too, stay as they are."""
    return re.sub(r"\{([^{}]*)\}", lambda found: str(row.get(found[1], found[0])), template)


def content_of(sample: Sample, text: str, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the content parts of a prompt: its text, and media of these kinds where the row's question marks them,
    else before.
    """
    marks = len(_MEDIA_MARK.findall(str(sample.get("question") or "")))
    if marks and len(_MEDIA_MARK.findall(text)) == marks == len(kinds):
        return _marked(text, list(kinds))
    return [*({"type": kind} for kind in kinds), {"type": "text", "text": text}]


def _marked(text: str, kinds: list[str]) -> list[dict[str, Any]]:
    """Returns the content parts of a text; media, of which it takes the first from `kinds`, stand where it marks
    them.
    """
    first, *rest = _MEDIA_MARK.split(text)
    content: list[dict[str, Any]] = [{"type": "text", "text": first}]
    for piece in rest:
        content += [{"type": kinds.pop(0)}, {"type": "text", "text": piece}]
    return [part for part in content if part.get("text") != ""]


def task_samples(task: Task, split: str) -> Sequence[Sample]:
    """Returns the samples of a split, as a sequence; with data.own_samples=false the rows of `data.<split>` where a
    task would make its own, and of the training split with data.solutions those that it names.

    Raises TaskError when `samples` fails or gives anything else, ConfigError when it leaves a file of rows unread.
    """
    replaced = task.data is not None and not task.data.own_samples and not task.labels
    if replaced:
        forget(task, split)
    try:
        found = _sequence(Task.samples(task, split) if replaced and split == "train" else task.samples(split))
        if replaced and unread(task, split):
            found = _sequence(Task.samples(task, split))
        refuse_unread(task, split)
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': samples({split!r}) failed: {failure(error)}") from error
    drawn = not isinstance(found, (list, tuple))  # made when asked for, so not looked at here
    wrong = "" if drawn else next((type(s).__name__ for s in found if not isinstance(s, Sample)), "")
    if wrong:
        raise TaskError(f"task '{task.name}': samples({split!r}) holds {wrong}, expected a sequence of Sample")
    if split == "train" and task.data is not None and task.data.solutions:
        from vlrl.data.solutions import with_solutions

        return with_solutions(found, task.data.solutions)
    return found


def _sequence(found: Any) -> Sequence[Sample]:
    """Returns what has a length and places as it is, a generator as a tuple."""
    if not isinstance(found, (str, bytes, Mapping, type)):
        if hasattr(found, "__len__") and hasattr(found, "__getitem__"):
            return found
        if isinstance(found, Iterable) and not isinstance(found, (set, frozenset)):  # a set has no fixed order
            return tuple(found)
    raise TypeError(f"it returned {type(found).__name__}, expected a sequence of Sample")


def generated(task: Task, index: int, knobs: Mapping[str, float]) -> Sample:
    """Returns the sample that a task makes, with its `knobs` in the row. Raises TaskError when `generate` fails or
    gives anything else."""
    try:
        found = task.generate(index, knobs)
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': generate({index}, {dict(knobs)}) failed: {failure(error)}") from error
    if not isinstance(found, Sample):
        raise TaskError(f"task '{task.name}': generate returned {type(found).__name__}, expected a Sample")
    return replace(found, row={**found.row, "knobs": dict(knobs)})


def task_messages(task: Task, sample: Sample) -> list[dict[str, Any]]:
    """Returns the chat messages of a sample, and in the last one what its environment showed first.

    Raises TaskError when `messages` fails or gives anything else.
    """
    task = task.of(sample)
    found = _asked(task, "messages", sample)
    wrong = [m for m in found if not _is_message(m)] if isinstance(found, (list, tuple)) else [found]
    if wrong:
        raise TaskError(f"task '{task.name}': messages of sample '{sample.id}' holds {str(wrong[0])[:80]!r}, expected "
                        '{"role": ..., "content": a text or a list of {"type": ..., "text": ...}}')
    return _opened(list(found), sample.opening)


def guided_messages(messages: Sequence[dict[str, Any]], guidance: str) -> list[dict[str, Any]]:
    """Returns chat messages with a text behind what the last one says."""
    *before, last = messages
    content = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else [*last["content"]]
    text = "\n\n" + guidance
    if content and content[-1].get("type") == "text":
        text = content.pop()["text"] + text
    return [*before, {**last, "content": [*content, {"type": "text", "text": text}]}]


def _opened(messages: list[dict[str, Any]], opening: Observation | None) -> list[dict[str, Any]]:
    if opening is None or not (opening.text or opening.media) or not messages:
        return messages
    *before, last = messages
    content = [{"type": "text", "text": last["content"]}] if isinstance(last["content"], str) else last["content"]
    return [*before, {**last, "content": [*content, *({"type": m.kind} for m in opening.media),
                                          {"type": "text", "text": opening.text}]}]


def task_oracle(task: Task, sample: Sample) -> str | None:
    """Returns the perfect answer to a sample. Raises TaskError when `oracle` fails or gives anything but a text or
    None.
    """
    text = _asked(task, "oracle", sample)
    if text is not None and not isinstance(text, str):
        raise TaskError(f"task '{task.name}': oracle of sample '{sample.id}' gave {type(text).__name__}, expected the "
                        "text of an answer, or None")
    return text


def task_oracle_actions(task: Task, sample: Sample) -> list[str]:
    """Returns the actions of a perfect episode; [] = not known. Raises TaskError when `oracle_actions` fails or gives
    no texts.
    """
    actions = _asked(task, "oracle_actions", sample) or ()
    if not isinstance(actions, (list, tuple)) or not all(isinstance(text, str) for text in actions):
        raise TaskError(f"task '{task.name}': oracle_actions of sample '{sample.id}' gave {str(actions)[:80]!r}, "
                        "expected a list of texts")
    return list(actions)


def task_target(task: Task, sample: Sample) -> Any:
    """Returns what the parsed answer is compared with. Raises TaskError when `target` fails."""
    return _asked(task, "target", sample)


def _asked(task: Task, method: str, sample: Sample) -> Any:
    task = task.of(sample)
    try:
        return getattr(task, method)(sample)
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': {method} of sample '{sample.id}' failed: {failure(error)}") from error


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or "role" not in message:
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and isinstance(part.get("text", ""), str) and
        ("text" in part if part.get("type") == "text" else "type" in part) for part in content))


def load(name: str, settings: Mapping[str, Any] | None = None,
         change: Callable[[type[Task]], type[Task]] = lambda cls: cls) -> Task:
    """Returns a task by built-in name, `module:Class` or `path/file.py:Class`, with its own settings applied; `change`
    makes another class of the one that was found.

    Raises ConfigError when there is no such task or setting.
    """
    cls = change(load_class(name))
    try:
        return cls(**dict(settings or {}))
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:  # its __init__ is anyone's code
        raise ConfigError(f"task.name={name!r}: {failure(error)}") from error


def load_class(name: str) -> type[Task]:
    """Returns the class behind a task name; see `load`."""
    location, _, attribute = name.partition(":")
    if location.endswith(".py"):
        module = _imported(lambda: file_module(Path(location)), name)
    elif attribute or "." in location:
        module = _import(location, name)
    else:
        module = _builtin(location)
    found = getattr(module, attribute, None) if attribute else _only_task(module, name)
    if not (inspect.isclass(found) and issubclass(found, Task) and found is not Task):
        near = did_you_mean(attribute, [n for n, v in vars(module).items()
                                        if inspect.isclass(v) and issubclass(v, Task) and v is not Task])
        raise ConfigError(f"task.name={name!r}: {location} has no Task class '{attribute}'.{near}")
    if not found.__dict__.get("name"):
        found.name = location.rpartition(".")[2] if not location.endswith(".py") else Path(location).stem
    return found


def builtin_names() -> list[str]:
    """Returns names of the tasks that come with vlrl."""
    folder = importlib.import_module("vlrl.tasks").__path__
    return sorted(m.name for m in pkgutil.iter_modules(folder) if not m.name.startswith("_"))


def _builtin(name: str):
    if name not in builtin_names():
        near = did_you_mean(name, builtin_names())
        raise ConfigError(f"task.name={name!r}: no built-in task of that name.{near} Built in: "
                          f"{', '.join(builtin_names())}; your own: path/file.py:Class or module:Class.")
    return _imported(lambda: importlib.import_module(f"vlrl.tasks.{name}"), name)


def _import(location: str, name: str):
    return _imported(lambda: importlib.import_module(location), name)


def _imported(run: Callable[[], Any], name: str) -> Any:
    """Returns the result of `run`, which imports anyone's code; ConfigError with file and line when that fails."""
    try:
        return run()
    except MissingFile as error:
        raise ConfigError(f"task.name={name!r}: {error}") from None
    except (VlrlError, KeyboardInterrupt):
        raise
    except BaseException as error:  # sys.exit, and what a test framework raises
        what = failure(error)
        if what.startswith("ModuleNotFoundError"):  # the module itself, not one that it imports
            what += ". A module must be importable; for a file write path/file.py:Class."
        raise ConfigError(f"task.name={name!r}: {what}") from error


def _only_task(module: Any, name: str) -> type[Task] | None:
    own = [v for v in vars(module).values()
           if inspect.isclass(v) and issubclass(v, Task) and v is not Task and v.__module__ == module.__name__]
    if not own:
        raise ConfigError(f"task.name={name!r}: no class there is a Task: write `class Mine(Task)`, or begin with "
                          "`vlrl tasks new`")
    if len(own) > 1:
        raise ConfigError(f"task.name={name!r}: {len(own)} tasks are there, {' and '.join(c.__name__ for c in own)}; "
                          f"name one, as {name}:{own[0].__name__}")
    return own[0]


def setting_names(cls: type[Task]) -> list[str]:
    """Returns the task's own settings and those of every task: what may stand after `task.`, apart from rewards."""
    names = {n for c in cls.__mro__ if issubclass(c, Task) for n, v in vars(c).items()
             if not n.startswith("_") and not callable(v) and not isinstance(v, (property, classmethod, staticmethod))}
    return sorted(names - {"name", "rewards", "outcome", "lives_outside", "needs", "knobs", "best_parts",
                           "stage_fields", "written_fields"})


def _checked(cls: type[Task], key: str, value: Any) -> Any:
    known = setting_names(cls)
    if key not in known:
        raise ConfigError(f"unknown setting 'task.{key}' (value {value!r}).{did_you_mean(key, known)} "
                          f"This task knows: {', '.join([*known, 'rewards', 'coordinates'])}.")
    hint = get_type_hints(cls, include_extras=True).get(key, type(getattr(cls, key)))
    try:
        return pydantic.TypeAdapter(hint).validate_python(refuse_bool(hint, value))
    except pydantic.ValidationError as error:
        raise ConfigError(f"task.{key}={value!r}: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise ConfigError(f"task.{key}={value!r}: {error}") from None


def check_shape(task: Task, parts: Any, method: str) -> None:
    """Raises TaskError when what `method` returned is not a mapping with names as keys."""
    if not isinstance(parts, Mapping):
        raise TaskError(f"task '{task.name}': {method} returned {type(parts).__name__}, expected {{part: number}}")
    odd = [name for name in parts if not isinstance(name, str)]
    if odd:
        raise TaskError(f"task '{task.name}': {method} returned the part name {odd[0]!r} ({type(odd[0]).__name__}), "
                        "expected {part: number}")


def check_parts(task: Task, parts: Mapping[str, Any]) -> None:
    """Raises TaskError when `score` returned other parts than `rewards` names."""
    check_shape(task, parts, "score")
    unknown, missing = set(parts) - set(task.weights), set(task.weights) - set(parts)
    if unknown:
        part = sorted(unknown)[0]
        raise TaskError(f"task '{task.name}': score returned the part '{part}', which rewards does not name."
                        f"{did_you_mean(part, task.weights)} Add it to rewards, or put it in metrics().")
    if missing:
        raise TaskError(f"task '{task.name}': score left out the part '{sorted(missing)[0]}' that rewards names; "
                        "return every part, None when it cannot be scored.")
