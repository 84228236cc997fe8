"""Tools: functions that a model calls by name, with JSON arguments, over several turns. Does not import torch.

    class Find(Task):
        def tools(self, sample): return [Scene(sample).zoom]       # plain functions or bound methods

    class Scene:
        def zoom(self, box: tuple[int, int, int, int]) -> Image.Image:
            '''An enlarged part of the image.

            box: left, top, right, bottom in pixels.
            '''

The types of the arguments define the schema that the model is shown, and the model's calls are checked against them. If
a call is invalid or a tool fails, the episode continues: the model gets an error text, and the error is counted."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.json_schema import GenerateJsonSchema

from vlrl.config.registry import failure
from vlrl.data.media import as_rgb
from vlrl.errors import DataError, TaskError, VlrlError
from vlrl.task.environment import SUCCESS, Environment
from vlrl.task.tool_calls import Call, calls_of
from vlrl.types import Media, Observation, Sample, Step

MOST_TEXT = 10_000  # maximum length in characters of a text shown to the model
_MOST_PIXELS = 2**26  # maximum number of pixels of an image that a tool returns
_MOST_STORED = 2_000  # maximum length of a call's arguments in Step.info, in characters of JSON
_MOST_ERROR = 500
NAME = re.compile(r"[A-Za-z_][\w.-]{0,63}", re.ASCII)  # A valid tool name: one that a model can write


class CallError(Exception):
    """Raised when a tool call fails; the message is shown to the model."""


class Tool:
    """A function that a model may call.

    The first paragraph of the function's docstring is the description of the tool, and lines `name: text` below
    describe the arguments. `name` and `description` override those of the function.

    Raises TaskError for a function without a docstring, or with an argument whose type cannot be expressed in JSON."""

    def __init__(self, function: Callable[..., Any], name: str = "", description: str = ""):
        self.function, self.name = function, name or getattr(function, "__name__", "")
        about, descriptions = _documentation(function)
        self.description = description or about
        if not NAME.fullmatch(self.name):
            raise TaskError(f"tool {self.name!r}: a model cannot write this name. Give the tool another name: "
                            "Tool(function, name='zoom')")
        if not self.description:
            raise TaskError(f"tool {self.name!r} has no docstring: write one that tells the model what the "
                            "tool does")
        self._names, self._arguments = self._model(descriptions)
        self.schema: dict[str, Any] = {"type": "function", "function": {
            "name": self.name, "description": self.description, "parameters": self._parameters()}}
        """The tool's schema for chat templates."""

    def __call__(self, arguments: Mapping[str, Any]) -> Observation:
        """Runs the tool and returns its result. Raises CallError for invalid arguments, if the tool fails, and if the
        result cannot be shown."""
        try:
            checked = self._arguments.model_validate_json(json.dumps(arguments), strict=True)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors(include_url=False)[:4]]
            raise CallError(f"{self.name}: {'; '.join(wrong)}") from None
        except ValueError as error:  # a number of thousands of digits
            raise CallError(f"{self.name}: {error}") from None
        try:
            return _result(self.function(**{name: getattr(checked, key) for name, key in self._names.items()}))
        except CallError as error:
            raise CallError(f"{self.name} {error}") from None
        except (Exception, SystemExit) as error:  # a task's code may raise anything
            raise CallError(f"{self.name}: {type(error).__name__}: {error}") from error

    def _model(self, descriptions: Mapping[str, str]) -> tuple[dict[str, str], type[BaseModel]]:
        """Returns {argument: name of its field} and a pydantic model of the arguments with these fields. The field
        names differ from the arguments, because an argument may have the name of a method of the model."""
        try:
            hints = get_type_hints(self.function, include_extras=True)
            names, fields = {}, {}
            for i, (name, given) in enumerate(inspect.signature(self.function).parameters.items()):
                if given.kind not in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY):
                    raise TypeError(f"the argument {name!r} cannot be passed by name")
                if name not in hints:
                    raise TypeError(f"the argument {name!r} has no type: write {name}: int, or another JSON type")
                default = ... if given.default is given.empty else given.default
                names[name] = f"field{i}"
                fields[names[name]] = (hints[name], Field(default, alias=name, description=descriptions.get(name)))
            config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
            return names, create_model(self.name, __config__=config, **fields)
        except Exception as error:  # types are anyone's code
            raise TaskError(f"tool {self.name!r}: {str(error).splitlines()[0]}") from error

    def _parameters(self) -> dict[str, Any]:
        try:
            schema = self._arguments.model_json_schema(schema_generator=_Untitled)
        except Exception as error:
            raise TaskError(f"tool {self.name!r}: {str(error).splitlines()[0]}") from error
        return {k: v for k, v in schema.items() if k != "title"}


class _Untitled(GenerateJsonSchema):
    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    text = inspect.getdoc(function) or ""
    descriptions = {m[1]: m[2].strip() for m in re.finditer(r"^\s*(\w+):[ \t]+(\S.*)$", text, re.MULTILINE)}
    return " ".join(text.partition("\n\n")[0].split()), descriptions


# --- what a tool returns ----------------------------------------------------------------------------------------------


def _result(value: Any) -> Observation:
    """Converts the return value of a tool to an Observation. Raises CallError if that is impossible. Text, images and
    Media are shown; other values are written as JSON."""
    shown = _shown(value)
    if shown is None and isinstance(value, (list, tuple)) and value:
        pieces = [_shown(piece) for piece in value]
        if None not in pieces:
            shown = Observation.of_results([piece for piece in pieces if piece])
            shown = Observation(shown.text, shown.media)
    if shown is None:
        try:
            shown = Observation(json.dumps(value, ensure_ascii=False, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            raise CallError(f"returned {type(value).__name__}, which is no text, no image and no JSON") from None
    return replace(shown, text=shorten(shown.text), media=tuple(map(_decoded, shown.media)))


def _decoded(media: Media) -> Media:
    image = media.source
    if not isinstance(image, Image.Image):
        return media
    if image.width * image.height > _MOST_PIXELS:
        raise CallError(f"returned an image of {image.width}x{image.height} pixels; at most {_MOST_PIXELS} can be "
                        "shown")
    try:
        return replace(media, source=as_rgb(image))
    except DataError as error:
        raise CallError(f"returned an image that cannot be shown: {error}") from None


def shorten(text: str, most: int = MOST_TEXT) -> str:
    """Cuts a text to at most `most` characters, and appends a note if it was cut."""
    if len(text) <= most:
        return text
    return f"{text[:most]}\n[cut: {most} of {len(text)} characters are shown]"


def _shown(value: Any) -> Observation | None:
    if isinstance(value, str):
        return Observation(value)
    if isinstance(value, Image.Image):
        return Observation(media=(Media(source=value),))
    if isinstance(value, Media):
        return Observation(media=(value,))
    if isinstance(value, Observation):
        if not isinstance(value.text, str) or not all(isinstance(m, Media) for m in value.media):
            raise CallError("returned an Observation that holds something other than text and Media")
        return Observation(value.text, tuple(value.media))
    return None


# --- the environment --------------------------------------------------------------------------------------------------


class ToolEnvironment(Environment):
    """An environment that executes the tool calls in an action, and shows their results. An action without a call ends
    the episode. `Step.info["calls"]` lists name, arguments and error (None for a successful call) of each call.
    success: whether turns with calls get the reward part SUCCESS: 1 if all calls succeed, else 0."""

    def __init__(self, tools: Sequence[Tool], success: bool = False):
        self.tools, self.success = {tool.name: tool for tool in tools}, success

    def step(self, action: str) -> Step:
        calls = calls_of(action)
        results, entries = [], []
        for call in calls:
            error = None
            try:
                results.append(self._run(call))
            except CallError as problem:
                error = str(problem)[:_MOST_ERROR]
                results.append(_error_observation(error))
            text = json.dumps(call.arguments)
            stored = call.arguments if len(text) <= _MOST_STORED else {"cut": text[:_MOST_STORED // 2]}
            entries.append({"name": call.name[:64], "arguments": stored, "error": error})
        parts = {SUCCESS: _succeeded(entries)} if self.success and calls else {}
        return Step(Observation.of_results(results), parts, done=not calls, info={"calls": entries})

    def _run(self, call: Call) -> Observation:
        if call.error:
            raise CallError(call.error)
        if call.name not in self.tools:
            raise CallError(f"no tool {call.name[:64]!r}; there are {', '.join(self.tools)}")
        return self.tools[call.name](call.arguments)


def _succeeded(calls: Sequence[Mapping[str, Any]]) -> float:
    return float(all(call["error"] is None for call in calls))


def _error_observation(error: str) -> Observation:
    return Observation(f"Error: {error}")


def with_readable_results(step: Step, read: Callable[[Observation], Any]) -> Step:
    """Returns the step with an error message in place of each tool result for which `read` raises DataError. A model
    must not be able to end an episode by making a tool return something unreadable."""
    results, calls = list(step.observation.results), list(step.info.get("calls", ()))
    for i, result in enumerate(results):
        try:
            read(Observation.of_results([result]))
        except DataError as error:
            problem = str(error)[:_MOST_ERROR]
            results[i] = _error_observation(problem)
            if len(calls) == len(results):
                calls[i] = {**calls[i], "error": problem}
    parts = {**step.parts, **({SUCCESS: _succeeded(calls)} if SUCCESS in step.parts else {})}
    return replace(step, observation=Observation.of_results(results), parts=parts, info={**step.info, "calls": calls})


# --- of a task --------------------------------------------------------------------------------------------------------


def task_tools(task: Any, sample: Sample) -> list[Tool]:
    """Returns the tools of a sample. Raises TaskError if the task's `tools` method fails, returns something that is not
    a tool, or returns two tools with the same name."""
    task = task.of(sample)
    try:
        tools = [given if isinstance(given, Tool) else Tool(given) for given in task.tools(sample)]
    except VlrlError as error:
        raise type(error)(f"task '{task.name}': {error}") from error
    except (Exception, SystemExit) as error:
        raise TaskError(f"task '{task.name}': tools of sample '{sample.id}' failed: {failure(error)}") from error
    names = [tool.name for tool in tools]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise TaskError(f"task '{task.name}': two tools of sample '{sample.id}' are named {twice!r}; rename one with "
                        "Tool(function, name=...)")
    return tools


def schemas(task: Any, sample: Sample) -> list[dict[str, Any]]:
    """The schemas of a sample's tools for chat templates. Raises TaskError as `task_tools` does."""
    return [tool.schema for tool in task_tools(task, sample)]


def environment_of(task: Any, sample: Sample) -> Environment | None:
    """Creates the environment of a sample: the task's own, else a ToolEnvironment with the task's tools; None if the
    task has neither."""
    task = task.of(sample)
    environment = task.environment(sample)
    if environment is None and (tools := task_tools(task, sample)):
        return ToolEnvironment(tools, SUCCESS in task.weights)
    return environment
