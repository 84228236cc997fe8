"""Probes of an evaluation: each sample is asked again, either reworded or without some information that the answer
needs. Does not import torch.

    probe("blank_media", samples, 3)         # sample 3 with images and frames in their mean colour

A model that gives the same answer without the image did not use the image. A model that answers although a premise is
missing does not admit that it cannot know the answer ("Missing Premise exacerbates Overthinking", 2504.06514). A model
that changes its answer when the question is only reworded is not robust (reWordBench, 2503.11751)."""

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
"""Names of two fields of a row: the question without one of its premises, and a list of paraphrases of the question."""
_QUESTIONS = ("question", "expression", "instruction")
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_REACH = 0.05  # two points count as the same answer if their distance is at most this share of the image's diagonal
_ABSTAINS = re.compile(
    r"\b(can ?not|can't|unable to|impossible to|not possible to) (be )?(answer|tell|say|determine|see|know|solve|find|"
    r"identify|locate)|\b(not|n't) (be )?(determined|enough|given|provided|specified|visible|shown|known)\b|"
    r"\b(insufficient|missing|lacks?|lacking|no) (the )?(information|premise|image|picture|video|data|context)\b|"
    r"\b(image|picture|video|premise|information) (is|seems|appears) (to be )?(missing|blank|empty)\b|"
    r"\bunanswerable\b|^\W*(unknown|unclear|none)\W*$", re.IGNORECASE)


class NotApplicable(DataError):
    """Raised if a probe cannot be applied to a sample."""


def probe(name: str, samples: Sequence[Sample], number: int) -> Sample:
    """Sample number `number` changed by the probe `name`. The target stays the same. Raises NotApplicable if the probe
    cannot be applied to the sample."""
    return PROBES[name](samples, number)


def blank_media(samples: Sequence[Sample], number: int) -> Sample:
    """The sample with every image and video frame replaced by its mean colour, at the same size."""
    sample = _with_media(samples[number])
    return replace(sample, media=tuple(replace(m, edits=(*m.edits, ("blank",))) for m in sample.media))


def other_media(samples: Sequence[Sample], number: int) -> Sample:
    """The sample with other media, taken from the next sample in the split that has as many images and videos in the
    same order. Each of them must differ from the sample's own image or video at the same position."""
    sample = _with_media(samples[number])
    for step in range(1, len(samples)):
        other = samples[(number + step) % len(samples)]
        if [m.kind for m in other.media] == [m.kind for m in sample.media] and all(
                a.source is not b.source and not (isinstance(a.source, type(b.source)) and a.source == b.source)
                for a, b in zip(sample.media, other.media, strict=True)):
            return replace(sample, media=other.media)
    raise NotApplicable(f"sample '{sample.id}': no other sample has different media of the same kinds, which the "
                        "probe other_media needs")


def _with_media(sample: Sample) -> Sample:
    if not sample.media:
        raise NotApplicable(f"sample '{sample.id}' has no image or video to replace")
    return sample


def no_premise(samples: Sequence[Sample], number: int) -> Sample:
    """The sample with one fact removed from its question.

    If the row has the field `without_premise`, this field is the new question. Otherwise the first sentence that
    contains a number is removed, or the first sentence if none contains a number. The last sentence is never removed.
    If there is only one sentence, its first number is replaced by "some"."""
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
        raise NotApplicable(f"sample '{sample.id}': its field {field} states no fact that could be left out")
    return _asking(sample, field, _NUMBER.sub("some", text, count=1))


def reworded(samples: Sequence[Sample], number: int) -> Sample:
    """The sample with its question reworded. The new question is the first entry of the row's field `paraphrases`.

    Without this field, a polite phrase is put before the old question, which then usually begins with a lower-case
    letter, and ends without punctuation."""
    sample = samples[number]
    field, text = _question(sample)
    given = sample.get(PARAPHRASES)
    if isinstance(given, (list, tuple)) and given:
        return _asking(sample, field, str(given[0]))
    first, rest = text.strip()[:1], text.strip()[1:].rstrip(".?! ")
    initial = first if rest[:1].isupper() or rest[:1].isdigit() else first.lower()  # keeps the case of abbreviations
    return _asking(sample, field, f"I would like to know this, please: {initial}{rest}")


def _question(sample: Sample) -> tuple[str, str]:
    for field in _QUESTIONS:
        text = sample.get(field)
        if isinstance(text, str) and text.strip():
            return field, text
    raise NotApplicable(f"sample '{sample.id}' has no question to change: it has none of the fields "
                        f"{', '.join(_QUESTIONS)}")


def _asking(sample: Sample, field: str, text: str) -> Sample:
    return replace(sample, row={**sample.row, field: text})


PROBES: Mapping[str, Callable[[Sequence[Sample], int], Sample]] = {
    "blank_media": blank_media, "other_media": other_media, "no_premise": no_premise, "reworded": reworded}


# --- what is read in the answers --------------------------------------------------------------------------------------


def abstains(answer: str, parsed: Any) -> bool:
    """Whether the model declines to answer, or nothing can be parsed from its answer."""
    return votes.ballot(parsed) is None or bool(_ABSTAINS.search(answer.rpartition("</think>")[2][-1000:]))


def same_answer(one: Any, other: Any, size: Sequence[float] | None = None) -> bool:
    """Whether two parsed answers count as equal. An answer that could not be parsed is not equal to any other.

    Boxes are equal if their IoU is at least 0.5. Points are equal if their distance is at most 5 % of the diagonal of
    an image of this `size`. All other answers are equal if votes.ballot gives the same value for both."""
    first, second = votes.location_of(one), votes.location_of(other)
    if first and second and len(first) == len(second):
        if len(first) == 4:
            return iou(first, second) >= 0.5
        if size:
            (x, y), (u, v) = first, second
            return ((x - u) ** 2 + (y - v) ** 2) ** 0.5 <= _REACH * (size[0] ** 2 + size[1] ** 2) ** 0.5
    ballots = votes.ballot(one), votes.ballot(other)
    return ballots[0] is not None and ballots[0] == ballots[1]
