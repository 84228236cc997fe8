"""Recipes: the prompts, rewards and perfect answers of published systems. `task.recipe` selects one.

    class Grounding(RecipeTask):
        _recipes = {"vlm_r1_rec": Recipe(prompt=..., rewards={"accuracy": 1.0, "format": 1.0}, ...)}
        recipe: str = "vlm_r1_rec"

The first argument of a recipe's functions is the task, which has the settings and the coordinate conversion.
docs/write-a-task.md shows how to write a recipe of your own, `task.recipe=my_recipe.py:strict`."""

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
    """The prompt of a published system, with the functions that parse and score its answers. The first argument of the
    functions is the task."""

    prompt: str
    rewards: Mapping[str, Weight]
    """Reward part -> weight."""
    read: Callable[[Any, Sample, Answer], Any]
    """Parses an answer to JSON-able data in original pixels; None if it cannot be parsed."""
    score: Callable[[Any, Sample, Answer], Parts]
    """The raw values of the reward parts of one answer."""
    target: Callable[[Any, Sample], Any]
    """The ground truth, in the form that `read` returns."""
    oracle: Callable[[Any, Sample], str | None]
    """A perfect answer, or None if it is unknown."""
    write: Callable[[Any, Sample, Sequence[Box]], str] | None = None
    """Writes boxes in original pixels as a well-formed answer; used for cheats. None if answers are not boxes."""
    group: Callable[[Any, Sample, Sequence[Answer], Any], list[Parts]] | None = None
    """A function that returns further reward parts for each answer, which compare the answers of a group. Its last
    argument is the `services` of `Task.score_group`."""
    needs: Collection[str] = frozenset()
    """Services that `group` needs, as in `Task.needs`."""
    variants: Callable[[Any, Sample, int, int], Sequence[Variant]] | None = None
    """Variants of a sample with other media, as in `Task.variants`."""
    problem: Callable[[Any, Mapping[str, Any]], str | None] | None = None
    """A function (task, row) that says why a row is unusable with this recipe; None if the row is usable."""
    best_parts: Mapping[str, float] = field(default_factory=dict)
    """Reward part -> its maximum, for parts whose maximum is not 1."""
    asked: str = ""
    """Prompt template for rows with a `question`; `prompt` is the template for rows that name an object to find."""
    asks: bool = False
    """Whether rows may have a question and an answer instead of the boxes of a grounding row."""
    system: str = ""
    outcome: Mapping[str, float] = field(default_factory=dict)
    """Criterion for a correct answer, as in `Task.outcome`: reward part -> minimum raw value."""
    correct: Callable[[Any, Sample, Answer], bool | None] | None = None
    """Whether an answer is correct. Only for recipes in which this cannot be decided from the reward parts."""


class RecipeTask(Task):
    """A task that takes its prompt, reward parts and answer format from a recipe."""

    _recipes: ClassVar[Mapping[str, Recipe]] = {}
    recipe: str = ""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.used: Recipe = self._chosen(settings)
        """The selected recipe. A prompt or rewards that a subclass sets take precedence over the recipe's."""
        self.best_parts: Any = self.used.best_parts
        self.prompt = self.prompt or self.used.prompt
        self.system = self.system or self.used.system
        if self.used.variants:  # otherwise has_variants can tell that there are none
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
        """Returns the row with the task's `placeholders` added. Placeholders that occur in no prompt template are left
        out."""
        return {**row, **{name: text for name, text in self.placeholders(row).items()
                          if any(f"{{{name}}}" in template for template in self.templates)}}

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """Describes what makes a row unusable for any recipe; None if the row is usable."""
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
        """Answers with boxes that can be given without looking at the image: a tiny box, the whole image, a hundred
        boxes, and one box repeated a hundred times."""
        width, height, write = sample.get("width"), sample.get("height"), self.used.write
        if not width or not height or write is None:
            return {}
        return {name: write(self, sample, boxes) for name, boxes in blind_boxes(width, height).items()}


def blind_boxes(width: float, height: float) -> dict[str, list[list[float]]]:
    """Boxes that can be given without looking at an image of this size: name of the cheat -> boxes."""
    corner = [0.0, 0.0, max(2.0, width / 100), max(2.0, height / 100)]
    tiles = [[x * width / 10, y * height / 10, (x + 1) * width / 10, (y + 1) * height / 10]
             for y in range(10) for x in range(10)]
    quarter = [width / 4, height / 4, width * 3 / 4, height * 3 / 4]
    return {"tiny box": [corner], "whole image as written": [[0.0, 0.0, width, height]], "hundred boxes": tiles,
            "one box a hundred times": [quarter] * 100}


def in_model_units(task: Task, sample: Sample, coordinates: Box, whole: bool = False) -> list[float]:
    """Converts a box or point in original pixels to the coordinates in which the model writes. With `whole`, rounds to
    integers, unless the coordinate convention is 0..1."""
    written = task.coordinates.from_original(sample, coordinates)
    return [round(v) for v in written] if whole and whole_units(task, sample) else written


shown = in_model_units  # the former name, which recipes of users may import


def whole_units(task: Task, sample: Sample) -> bool:
    """Whether the coordinate convention for this row uses integers; the convention 0..1 does not."""
    edge = task.coordinates.from_original(sample, [sample["width"], sample["height"]])
    return edge[0] > 1 or edge[1] > 1


def pixels(task: Task, sample: Sample, coordinates: Box | None) -> list[float] | None:
    """Converts a box or point that the model wrote to original pixels; returns None for None."""
    return task.coordinates.to_original(sample, coordinates) if coordinates else None
