"""Probes of an evaluation: the same questions without the input that the answer needs, or reworded. No torch.

    probe("blank_media", samples, 3)         # sample 3 with images and frames in their mean colour

A model that answers the same without the image did not look at it; one that answers although a premise is missing
("Missing Premise exacerbates Overthinking", 2504.06514) does not admit that it cannot know; one that changes its answer
when the question is only reworded (reWordBench, 2503.11751) is not robust.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from vlrl.errors import DataError
from vlrl.rewards.boxes import iou
from vlrl.tools.evaluation import votes
from vlrl.types import Sample

PREMISE, PARAPHRASES = "without_premise", "paraphrases"
"""Fields of a row that may hold the question without a premise, and a list of paraphrases."""
_QUESTIONS = ("question", "expression", "instruction")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_REACH = 0.05
"""Two points are the same answer within this share of the image's diagonal."""
_ABSTAINS = re.compile(
    r"\b(can ?not|can't|unable to|impossible to|not possible to) (be )?(answer|tell|say|determine|see|know|solve|find|"
    r"identify|locate)|\b(not|n't) (be )?(determined|enough|given|provided|specified|visible|shown|known)\b|"
    r"\b(insufficient|missing|lacks?|lacking|no) (the )?(information|premise|image|picture|video|data|context)\b|"
    r"\b(image|picture|video|premise|information) (is|seems|appears) (to be )?(missing|blank|empty)\b|"
    r"\bunanswerable\b|^\W*(unknown|unclear|none)\W*$", re.IGNORECASE)


class NotApplicable(DataError):
    """A probe cannot be applied to this sample."""


def probe(name: str, samples: Sequence[Sample], number: int) -> Sample:
    """A sample as a probe of PROBES asks it, with its target unchanged. Raises NotApplicable."""
    return PROBES[name](samples, number)


def blank_media(samples: Sequence[Sample], number: int) -> Sample:
    """The sample with every image and frame in its mean colour, of the same size."""
    sample = _with_media(samples[number])
    return replace(sample, media=tuple(replace(m, edits=(*m.edits, ("blank",))) for m in sample.media))


def other_media(samples: Sequence[Sample], number: int) -> Sample:
    """The sample with the media of the next sample that has as many of the same kinds, but different ones."""
    sample = _with_media(samples[number])
    for step in range(1, len(samples)):
        other = samples[(number + step) % len(samples)]
        if [m.kind for m in other.media] == [m.kind for m in sample.media] and all(
                a.source is not b.source and not (isinstance(a.source, type(b.source)) and a.source == b.source)
                for a, b in zip(sample.media, other.media, strict=True)):
            return replace(sample, media=other.media)
    raise NotApplicable(f"sample '{sample.id}': no other sample has other media of the same kinds")


def _with_media(sample: Sample) -> Sample:
    if not sample.media:
        raise NotApplicable(f"sample '{sample.id}' has no picture or video")
    return sample


def no_premise(samples: Sequence[Sample], number: int) -> Sample:
    """The sample without one fact that it states: its field `without_premise`; else without the first sentence before
    the last that has a number (or the first sentence); for a single sentence its first number as "some".
    """
    sample = samples[number]
    field, text = _question(sample)
    given = sample.get(PREMISE)
    if isinstance(given, str) and given:
        return _asking(sample, field, given)
    sentences = _SENTENCE.split(text.strip())
    if len(sentences) > 1:
        gone = next((i for i, s in enumerate(sentences[:-1]) if _NUMBER.search(s)), 0)
        return _asking(sample, field, " ".join(s for i, s in enumerate(sentences) if i != gone))
    if not _NUMBER.search(text):
        raise NotApplicable(f"sample '{sample.id}': its {field} states no fact that could be left out")
    return _asking(sample, field, _NUMBER.sub("some", text, count=1))


def reworded(samples: Sequence[Sample], number: int) -> Sample:
    """The sample reworded: the first of its field `paraphrases`, else its question in lower case and without its final
    punctuation, after a polite request.
    """
    sample = samples[number]
    field, text = _question(sample)
    given = sample.get(PARAPHRASES)
    if isinstance(given, (list, tuple)) and given:
        return _asking(sample, field, str(given[0]))
    first, rest = text.strip()[:1], text.strip()[1:].rstrip(".?! ")
    initial = first if rest[:1].isupper() or rest[:1].isdigit() else first.lower()  # an abbreviation
    return _asking(sample, field, f"I would like to know this, please: {initial}{rest}")


def _question(sample: Sample) -> tuple[str, str]:
    for field in _QUESTIONS:
        text = sample.get(field)
        if isinstance(text, str) and text.strip():
            return field, text
    raise NotApplicable(f"sample '{sample.id}' has none of the fields {', '.join(_QUESTIONS)}")


def _asking(sample: Sample, field: str, text: str) -> Sample:
    return replace(sample, row={**sample.row, field: text})


PROBES: Mapping[str, Callable[[Sequence[Sample], int], Sample]] = {
    "blank_media": blank_media, "other_media": other_media, "no_premise": no_premise, "reworded": reworded}


# --- what is read in the answers --------------------------------------------------------------------------------------


def abstains(answer: str, parsed: Any) -> bool:
    """Whether an answer declines to answer, or nothing can be parsed from it."""
    return votes.ballot(parsed) is None or bool(_ABSTAINS.search(answer.rpartition("</think>")[2][-1000:]))


def same_answer(one: Any, other: Any, size: Sequence[float] | None = None) -> bool:
    """Whether two parsed answers are equal: as votes (votes.ballot), boxes with an IoU of at least 0.5, points within 5
    % of the diagonal of an image of this `size`. An answer that could not be parsed equals none.
    """
    first, second = votes.location_of(one), votes.location_of(other)
    if first and second and len(first) == len(second):
        if len(first) == 4:
            return iou(first, second) >= 0.5
        if size:
            (x, y), (u, v) = first, second
            return ((x - u) ** 2 + (y - v) ** 2) ** 0.5 <= _REACH * (size[0] ** 2 + size[1] ** 2) ** 0.5
    ballots = votes.ballot(one), votes.ballot(other)
    return ballots[0] is not None and ballots[0] == ballots[1]
