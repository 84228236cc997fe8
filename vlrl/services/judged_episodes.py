"""What a judge is shown of answers: the question and its pictures, and of episodes their turns, within bounds.

    question, pictures = to_judge(task, sample, [answer])
    Question(verdict_prompt(question, reference(task, sample), answer.final), pictures, VERDICT)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vlrl.rewards.verdicts import MOST_SHOWN, sanitized
from vlrl.services.judge_prompts import question_text
from vlrl.task.base import Task
from vlrl.types import Answer, Media, Sample

MOST_PICTURES, MOST_PIXELS = 16, 2**20
"""Pictures of an episode, a video counting as all of them, and pixels of each that its environment has shown."""
_LEAST = 60
"""Characters of each text of a turn, however many there are."""
_Entry = tuple[str, str, Sequence[Media]]
"""What it is, its text and its media."""


def judge_view(task: Task, sample: Sample, answers: Sequence[Answer],
          media: bool = True) -> tuple[str, tuple[Media, ...]]:
    """Returns the question that these answers are to, and the pictures that it is shown with.

    Of episodes it says what was done, turn by turn, in MOST_SHOWN characters: of each text the beginning and the end.
    Where there are more than MOST_PICTURES pictures, with those of the reset, the last ones are shown.
    """
    question, own = question_text(task, sample), tuple(sample.media) if media else ()
    entries = _entries(sample, answers) if any(answer.turns for answer in answers) else []
    if not entries:
        return question, own
    most = max(_LEAST, (MOST_SHOWN - len(question)) // len(entries) - _LEAST)
    kept = _last([m for *_, observed in entries for m in observed] if media else [], MOST_PICTURES - len(own))
    names = {id(m): f" [picture {len(own) + i + 1}]" for i, m in enumerate(kept)}
    lines = [f"{what}: {sanitized(text, most)}".rstrip() + "".join(names.get(id(m), " [a picture that is not shown]")
                                                      for m in observed) for what, text, observed in entries]
    pictures = [replace(m, edits=(*m.edits, ("shrink", MOST_PIXELS))) for m in kept]
    return "\n\n".join([question, *lines]), (*own, *pictures)


def _entries(sample: Sample, answers: Sequence[Answer]) -> list[_Entry]:
    """Returns what is told of episodes, in order."""
    first = sample.opening.media if sample.opening else ()  # its text is in the question
    entries: list[_Entry] = [("Shown at the beginning", "", first)] if first else []
    for number, answer in enumerate(answers):
        whose = f" of answer {number + 1}" if len(answers) > 1 else ""
        for i, turn in enumerate(answer.turns):
            entries += [(f"Action {i + 1}{whose}", turn.action, ()), ("Observation", turn.observation, turn.media)]
    return entries


def _last(media: Sequence[Media], room: int) -> list[Media]:
    """Returns the last ones for which there is room."""
    kept: list[Media] = []
    for one in reversed(media):
        room -= MOST_PICTURES if one.kind == "video" else 1
        if room < 0:
            break
        kept.insert(0, one)
    return kept
