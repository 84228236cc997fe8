"""Variants of a sample with other media, which the model answers as well; see `Task.variants`. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from vlrl.config.sections import VARIANTS
from vlrl.errors import TaskError
from vlrl.task.base import Task
from vlrl.task.interface import task_code
from vlrl.types import Media, Prompt, Sample, Variant

GREEDY = "greedy"
"""Name of the variant for the answer at temperature 0, which some advantage estimators use as a baseline. The answer is
stored but does not belong to the group."""

KEPT = "kept"
"""Name of the variant for an answer that was sampled at an earlier use of the prompt and kept; see
Completion.policy_step."""

_TAKEN = (GREEDY, *VARIANTS)


def has_variants(task: Task) -> bool:
    """Whether the task, or a task of a mixture, overrides `variants`."""
    return any(getattr(one.variants, "__func__", None) is not Task.variants for one in task.members)


def variants_of(task: Task, sample: Sample, n: int, step: int) -> list[Variant]:
    """The variants of a sample whose group has `n` answers, except variants that ask for 0 answers.

    Raises TaskError if `variants` fails, returns something of the wrong type, repeats a name, or leaves no answer of
    the group to the original sample."""
    with task_code(task, f"variants of sample '{sample.id}'"):
        variants = list(task.variants(sample, n, step))
    problem = next((p for v in variants if (p := _problem(v, sample))), None) or _together(variants, n)
    if problem:
        raise TaskError(f"task '{task.name}': variants of sample '{sample.id}' {problem}")
    return [v for v in variants if v.n]


def with_media_of(sample: Sample, variant: Variant) -> Sample:
    return replace(sample, media=tuple(variant.media))


def same_pixels(variant: Prompt, original: Prompt) -> bool:
    """Whether the prompt of a variant shows exactly the same pixels as the original, e.g. a clip of one frame in
    another order. Answers to such a variant would add nothing, so they are not generated."""
    pixels = [[[frame.tobytes() for frame in media.frames] for media in prompt.media] for prompt in (variant, original)]
    return bool(original.media) and pixels[0] == pixels[1]


def trained_count(variants: Sequence[Variant]) -> int:
    """How many answers of a group belong to variants that are used for training."""
    return sum(v.n for v in variants if v.trained)


def _problem(variant: Any, sample: Sample) -> str | None:
    if not isinstance(variant, Variant):
        return f"returned {type(variant).__name__}, expected Variant(name=..., media=..., n=...)"
    if not isinstance(variant.name, str) or variant.name in ("", *_TAKEN):
        return f"have the name {variant.name!r}, expected a string other than {', '.join(map(repr, _TAKEN))}"
    if isinstance(variant.n, bool) or not isinstance(variant.n, int) or variant.n < 0:
        return f"ask for n={variant.n!r} answers to '{variant.name}', expected a whole number >= 0"
    media = variant.media
    if not isinstance(media, (list, tuple)) or not all(isinstance(m, Media) for m in media):
        return f"give '{variant.name}' media of type {type(media).__name__}, expected a tuple of Media"
    if [m.kind for m in media] != [m.kind for m in sample.media]:
        return (f"give '{variant.name}' media of the kinds {[m.kind for m in media]}, but the prompt of the sample "
                f"refers to {[m.kind for m in sample.media]}: return media of the same kinds")
    return None


def _together(variants: Sequence[Variant], n: int) -> str | None:
    names = [v.name for v in variants]
    if twice := next((name for i, name in enumerate(names) if name in names[:i]), None):
        return f"use the name '{twice}' more than once"
    if trained_count(variants) >= n:
        return (f"ask for {trained_count(variants)} answers to trained variants, which leaves none of "
                f"rollout.group_size={n} for the original sample: raise rollout.group_size, or ask for fewer")
    return None
