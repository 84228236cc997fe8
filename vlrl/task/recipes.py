"""Recipes: how a published system asks, what it rewards, and its perfect answers. `task.recipe` chooses one.

    class Grounding(RecipeTask):
        _recipes = {"vlm_r1_rec": Recipe(prompt=..., rewards={"accuracy": 1.0, "format": 1.0}, ...)}
        recipe: str = "vlm_r1_rec"

The functions of a recipe take the task first: it has the settings and the coordinates. docs/write-a-task.md shows how
to write your own, `task.recipe=my_recipe.py:strict`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from vlrl.config.registry import resolve
from vlrl.errors import ConfigError, DataError
from vlrl.task.base import Task, Weight
from vlrl.types import Answer, Parts, Sample, Variant

Box = Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A prompt with its reading and scoring of answers."""

    prompt: str
    rewards: Mapping[str, Weight]
    """Part -> weight."""
    read: Callable[[Any, Sample, Answer], Any]
    """The content of the answer, JSON-able and in original pixels; None if it cannot be read."""
    score: Callable[[Any, Sample, Answer], Parts]
    """Raw parts of one answer."""
    target: Callable[[Any, Sample], Any]
    """The value that `read` should return."""
    oracle: Callable[[Any, Sample], str | None]
    """A perfect answer, or None."""
    write: Callable[[Any, Sample, Sequence[Box]], str] | None = None
    """A well-formed answer with boxes in original pixels, for cheats; None if answers are not boxes."""
    group: Callable[[Any, Sample, Sequence[Answer], Any], list[Parts]] | None = None
    """Parts that compare the answers of a group; the last argument is the services of `Task.score_group`."""
    needs: Collection[str] = frozenset()
    """Services that `group` needs, as in `Task.needs`."""
    variants: Callable[[Any, Sample, int, int], Sequence[Variant]] | None = None
    """Further answers with other media, as `Task.variants` gives them."""
    problem: Callable[[Any, Mapping[str, Any]], str | None] | None = None
    """What this recipe lacks in a row, or None."""
    best_parts: Mapping[str, float] = field(default_factory=dict)
    """Part -> its maximum, where that is not 1."""
    asked: str = ""
    """The prompt of a row that has its own `question` instead of the name of something to find."""
    asks: bool = False
    """Whether rows may have a question and its answer instead of the boxes of a grounding row."""
    system: str = ""
    outcome: Mapping[str, float] = field(default_factory=dict)
    """What makes an answer correct, as `Task.outcome`: part -> minimum raw value."""
    correct: Callable[[Any, Sample, Answer], bool | None] | None = None
    """Whether an answer is correct, if the values of parts do not tell."""


class RecipeTask(Task):
    """A task whose prompt, parts and answer format come from a table of recipes."""

    _recipes: ClassVar[Mapping[str, Recipe]] = {}
    recipe: str = ""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.used: Recipe = self._chosen(settings)
        """The recipe in use; what a subclass sets itself (prompt, rewards) wins."""
        self.best_parts: Any = self.used.best_parts
        self.prompt = self.prompt or self.used.prompt
        self.system = self.system or self.used.system
        if self.used.variants:  # else it is known that there are none
            self.variants: Any = partial(self.used.variants, self)

    @property
    def needs(self) -> Collection[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.used.needs

    @classmethod
    def rewards_for(cls, settings: Mapping[str, Any]) -> Mapping[str, Weight]:
        return cls.rewards or cls._chosen(settings).rewards

    @classmethod
    def outcome_for(cls, settings: Mapping[str, Any]) -> Mapping[str, float]:
        return cls.outcome or cls._chosen(settings).outcome

    @classmethod
    def _chosen(cls, settings: Mapping[str, Any]) -> Recipe:
        name = settings.get("recipe", cls.recipe)
        choice: Any = resolve("task.recipe", name, cls._recipes) if isinstance(name, str) else None
        if callable(choice):  # one's own module:function that makes a recipe
            choice = choice()
        if not isinstance(choice, Recipe):
            raise ConfigError(f"task.recipe={name!r} must be one of {', '.join(cls._recipes)}, or "
                              "path/file.py:function or module:function that returns a vlrl.task.recipes.Recipe")
        return choice

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        sample = super().sample_from_row(row, root)
        problem = self.problem(sample.row) or (self.used.problem and self.used.problem(self, sample.row))
        if problem:
            raise DataError(f"row '{sample.id}': {problem}")
        return replace(sample, row=self.filled(sample.row))

    def filled(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with the `placeholders` that a template uses."""
        return {**row, **{name: text for name, text in self.placeholders(row).items()
                          if any(f"{{{name}}}" in template for template in self.templates)}}

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """What is wrong with a row under any recipe, or None."""
        return None

    def score(self, sample: Sample, answer: Answer) -> Parts:
        return self.used.score(self, sample, answer)

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        return self.used.group(self, sample, answers, services) if self.used.group else []

    def correct(self, sample: Sample, answer: Answer, parts: Parts) -> bool | None:
        own = self.used.correct
        return own(self, sample, answer) if own else super().correct(sample, answer, parts)

    def parse(self, sample: Sample, answer: Answer) -> Any:
        return self.used.read(self, sample, answer)

    def target(self, sample: Sample) -> Any:
        return self.used.target(self, sample)

    def oracle(self, sample: Sample) -> str | None:
        return self.used.oracle(self, sample)

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Boxes that need no look at the image: a tiny one, the whole image, a hundred, one a hundred times."""
        width, height, write = sample.get("width"), sample.get("height"), self.used.write
        if not width or not height or write is None:
            return {}
        return {name: write(self, sample, boxes) for name, boxes in blind_boxes(width, height).items()}


def blind_boxes(width: float, height: float) -> dict[str, list[list[float]]]:
    """Cheats of grounding by name, as boxes of an image of that size."""
    corner = [0.0, 0.0, max(2.0, width / 100), max(2.0, height / 100)]
    tiles = [[x * width / 10, y * height / 10, (x + 1) * width / 10, (y + 1) * height / 10]
             for y in range(10) for x in range(10)]
    quarter = [width / 4, height / 4, width * 3 / 4, height * 3 / 4]
    return {"tiny box": [corner], "whole image as written": [[0.0, 0.0, width, height]], "hundred boxes": tiles,
            "one box a hundred times": [quarter] * 100}


def in_model_units(task: Task, sample: Sample, place: Box, whole: bool = False) -> list[float]:
    """A box or point of the row as the model is to write it; `whole`: rounded, unless the convention is 0..1."""
    written = task.coordinates.from_original(sample, place)
    return [round(v) for v in written] if whole and whole_units(task, sample) else written


shown = in_model_units  # the former name, which recipes of users may import


def whole_units(task: Task, sample: Sample) -> bool:
    """Whether the row's coordinate convention counts in integers; 0..1 does not."""
    edge = task.coordinates.from_original(sample, [sample["width"], sample["height"]])
    return edge[0] > 1 or edge[1] > 1


def pixels(task: Task, sample: Sample, place: Box | None) -> list[float] | None:
    """A box or point as the model wrote it, in original pixels; None stays None."""
    return task.coordinates.to_original(sample, place) if place else None
