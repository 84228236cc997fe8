"""Calls the methods of a task and validates their results.

A task is code of the user. If it raises, or returns something of the wrong format, this becomes a TaskError that names
the task, the method and the sample."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from vlrl.config.registry import Table, failure
from vlrl.data.samples import readable
from vlrl.errors import ConfigError, TaskError, VlrlError, did_you_mean
from vlrl.task.base import Task
from vlrl.task.row_files import refuse_unread_file, reset_reads, unread_file
from vlrl.types import Observation, Sample

_TOOLS = Table({"schemas": "vlrl.environments.tools:schemas"})


@contextmanager
def task_code(task: Task, call: str) -> Iterator[None]:
    """Context manager for calls of task code: turns an exception other than a VlrlError into a TaskError. `call`
    describes the call in the error, e.g. "samples('train')"."""
    try:
        yield
    except VlrlError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': {call} failed: {failure(error)}") from error


def task_samples(task: Task, split: str) -> Sequence[Sample]:
    """The samples of a split, as a sequence. With data.own_samples=false, they are the rows of `data.<split>` instead
    of the samples that the task makes. With data.solutions, the training samples are limited to those that have a
    solution in that file.

    Raises TaskError if `samples` fails or returns something of the wrong type, ConfigError if the task does not read
    the file of `data.<split>`."""
    replaced = task.data is not None and not task.data.own_samples and not task.labels
    if replaced:
        reset_reads(task, split)
    with task_code(task, f"samples({split!r})"):
        samples = _sequence(Task.samples(task, split) if replaced and split == "train" else task.samples(split))
        if replaced and unread_file(task, split):
            samples = _sequence(Task.samples(task, split))
        refuse_unread_file(task, split)
    made = samples if isinstance(samples, (list, tuple)) else ()  # others are made on access
    if wrong := next((type(s).__name__ for s in made if not isinstance(s, Sample)), ""):
        raise TaskError(f"task '{task.name}': samples({split!r}) contains {wrong}, expected a sequence of Sample")
    if split == "train" and task.data is not None and task.data.solutions:
        from vlrl.data import with_solutions

        return with_solutions(samples, task.data.solutions)
    return samples


def _sequence(samples: Any) -> Sequence[Sample]:
    if not isinstance(samples, (str, bytes, Mapping, type)):
        if hasattr(samples, "__len__") and hasattr(samples, "__getitem__"):
            return samples
        if isinstance(samples, Iterable) and not isinstance(samples, (set, frozenset)):  # a set has no fixed order
            return tuple(samples)
    raise TypeError(f"samples() returned {type(samples).__name__}, expected a sequence of Sample")


def generated(task: Task, index: int, knobs: Mapping[str, float]) -> Sample:
    """Returns the sample that the task's `generate` makes for `index` and `knobs`. The values of the knobs are added to
    the row of the sample as the field `knobs`. Raises TaskError if `generate` fails or returns something of the
    wrong type."""
    with task_code(task, f"generate({index}, {dict(knobs)})"):
        sample = task.generate(index, knobs)
    if not isinstance(sample, Sample):
        raise TaskError(f"task '{task.name}': generate returned {type(sample).__name__}, expected a Sample")
    return replace(sample, row={**sample.row, "knobs": dict(knobs)})


def task_messages(task: Task, sample: Sample) -> list[dict[str, Any]]:
    """The chat messages of a sample. If the sample has an environment, the first observation is appended to the last
    message. Raises TaskError if `messages` fails or returns something of the wrong format."""
    task = task.of(sample)
    messages = _call(task, "messages", sample)
    wrong = [m for m in messages if not _is_message(m)] if isinstance(messages, (list, tuple)) else [messages]
    if wrong:
        raise TaskError(f"task '{task.name}': messages of sample '{sample.id}' contains {str(wrong[0])[:80]!r}, "
                        'expected {"role": ..., "content": a string or a list of {"type": ..., "text": ...}}')
    return _opened(list(messages), sample.opening)


def tool_schemas(task: Task, sample: Sample) -> list[dict[str, Any]]:
    """The schemas of a sample's tools, in the format of chat templates; [] if the sample has no tools. Raises TaskError
    if `tools` fails, returns something of the wrong type, or repeats a name."""
    task = task.of(sample)
    none = task.outside is None and getattr(task.tools, "__func__", None) is Task.tools
    return [] if none else _TOOLS["schemas"](task, sample)


def with_guidance(messages: Sequence[dict[str, Any]], guidance: str) -> list[dict[str, Any]]:
    """A copy of the chat messages with the guidance text appended to the last message."""
    *before, last = messages
    content, text = _content(last), "\n\n" + guidance
    if content and content[-1].get("type") == "text":
        text = content.pop()["text"] + text
    return [*before, {**last, "content": [*content, {"type": "text", "text": text}]}]


def _opened(messages: list[dict[str, Any]], opening: Observation | None) -> list[dict[str, Any]]:
    if opening is None or not (opening.text or opening.media) or not messages:
        return messages
    *before, last = messages
    return [*before, {**last, "content": [*_content(last), *({"type": m.kind} for m in opening.media),
                                          {"type": "text", "text": opening.text}]}]


def _content(message: Mapping[str, Any]) -> list[Any]:
    content = message["content"]
    return [{"type": "text", "text": content}] if isinstance(content, str) else [*content]


def task_oracle(task: Task, sample: Sample) -> str | None:
    """The perfect answer to a sample, or None if it is unknown. Raises TaskError if `oracle` fails or returns something
    of the wrong type."""
    text = _call(task, "oracle", sample)
    if text is not None and not isinstance(text, str):
        raise TaskError(f"task '{task.name}': oracle of sample '{sample.id}' returned {type(text).__name__}, expected "
                        "an answer as a string, or None")
    return text


def given_answer(task: Task, sample: Sample) -> str | None:
    """The answer to a sample for supervised fine-tuning: the `solution` in its row, else the task's perfect answer;
    None if there is neither."""
    return sample.get("solution") or task_oracle(task, sample)


def task_oracle_actions(task: Task, sample: Sample) -> list[str]:
    """The actions of a perfect episode; [] if the task does not know them. Raises TaskError if `oracle_actions` fails
    or returns anything but a list of strings."""
    actions = _call(task, "oracle_actions", sample) or ()
    if not isinstance(actions, (list, tuple)) or not all(isinstance(text, str) for text in actions):
        raise TaskError(f"task '{task.name}': oracle_actions of sample '{sample.id}' returned {str(actions)[:80]!r}, "
                        "expected a list of strings")
    return list(actions)


def task_target(task: Task, sample: Sample) -> Any:
    """The ground truth that the parsed answer is compared with. Raises TaskError if `target` fails."""
    return _call(task, "target", sample)


def _call(task: Task, method: str, sample: Sample) -> Any:
    task = task.of(sample)
    with task_code(task, f"{method} of sample '{sample.id}'"):
        return getattr(task, method)(sample)


def _is_message(message: Any) -> bool:
    if not isinstance(message, Mapping) or "role" not in message:
        return False
    content = message.get("content")
    return isinstance(content, str) or (isinstance(content, (list, tuple)) and all(
        isinstance(part, Mapping) and isinstance(part.get("text", ""), str) and
        ("text" in part if part.get("type") == "text" else "type" in part) for part in content))


def check_shape(task: Task, parts: Any, method: str) -> None:
    """Raises TaskError unless `parts`, which `method` returned, is a mapping whose keys are strings."""
    if not isinstance(parts, Mapping):
        part = next(iter(task.weights), "right")
        raise TaskError(f"task '{task.name}': {method} returned {type(parts).__name__}, expected {{part: number}}, "
                        f"e.g. {{{part!r}: 1.0}}; the value was {ascii(parts)[:80]}")
    odd = [name for name in parts if not isinstance(name, str)]
    if odd:
        raise TaskError(f"task '{task.name}': {method} returned the part name {odd[0]!r} ({type(odd[0]).__name__}), "
                        "expected {part: number}")


def check_parts(task: Task, parts: Mapping[str, Any]) -> None:
    """Raises TaskError if the names of the parts that `score` returned differ from the names in `rewards`."""
    check_shape(task, parts, "score")
    unknown, missing = set(parts) - set(task.weights), set(task.weights) - set(parts)
    if unknown:
        part = sorted(unknown)[0]
        raise TaskError(f"task '{task.name}': score returned the part '{part}', which is missing in rewards."
                        f"{did_you_mean(part, task.weights)} Add it to rewards, or return it from metrics().")
    if missing:
        raise TaskError(f"task '{task.name}': score left out the part '{sorted(missing)[0]}' of rewards; "
                        "return every part, with None for a part that cannot be scored.")


def first_samples(task: Task, split: str, count: int) -> list[Sample]:
    """The first `count` samples of a split, each with a prompt template: the samples of a task use its templates in
    turn. Raises ConfigError if the split is empty."""
    samples = task_samples(task, split)
    if len(samples) == 0:
        raise ConfigError(f"task '{task.name}' has no samples in split '{split}'")
    leave_out = task.data is not None and task.data.quarantine
    candidates = (readable(samples, i) if leave_out else samples[i] for i in range(len(samples)))
    first = list(itertools.islice((sample for sample in candidates if sample is not None), count))
    out, last_turn = [], dict[str, int]()
    for sample in first:  # each task goes through its templates
        turn = last_turn[sample.task] = last_turn.get(sample.task, -1) + 1
        templates = task.of(sample).templates_for(sample)
        out.append(replace(sample, prompt=templates[turn % len(templates)]))
    return out
