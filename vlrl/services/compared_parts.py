"""Reward parts of `task.parts` in which a judge compares the answers of a group; see extra_parts.py.

    pairwise        +1 or -1 by comparison with a random answer of the group (BRPO, arXiv 2506.00103)
    tournament      1 - rank / (G - 1) in a seeded single-elimination tournament of G answers (ArenaRL)
    principles      grades by principles that the judge writes for the question (DeepSeek-GRM, arXiv 2504.02495)

If the judge does not reply to a comparison, the answer has no value (in a tournament: all answers of the group). In an
evaluation each prompt has one answer, so there is nothing to compare: `pairwise` is 0, and `tournament` is 1."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from statistics import fmean
from typing import Annotated, Any

from pydantic import Field

from vlrl.rewards.verdicts import read_fields
from vlrl.services import judge_prompts as prompts
from vlrl.task.base import Task
from vlrl.task.part import part
from vlrl.task.services import Question
from vlrl.types import Answer, Parts, Sample


@part({"pairwise": 1.0, "order_disagreement": 0.0}, needs=("judge",))
def pairwise(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *, most: float = 0.6,
             media: bool = True, reasoning: bool = False) -> list[Parts]:
    """Compares each answer with one randomly chosen answer of the group, the anchor (BRPO, arXiv 2506.00103).

    `pairwise` is +1 if the judge prefers the answer to the anchor in both orders, else -1. The anchor gets 0. If the
    absolute sum of `pairwise` over the G answers of the group exceeds `most` * G, no answer has a value, so the group
    is dropped. `order_disagreement` is 1 if the judge's preference depends on the order. media: whether the judge sees
    images. reasoning: whether the judge sees whole completions instead of final answers."""
    if len(answers) < 2:
        return [{"pairwise": 0.0, "order_disagreement": 0.0} for _ in answers]
    texts = [a.text if reasoning else a.final for a in answers]
    key = f"{task.seed}/{sample.id}/{answers[0].step}"
    base = zlib.crc32(key.encode("utf-8", "backslashreplace")) % len(answers)
    right, others = prompts.reference(task, sample), [i for i in range(len(answers)) if i != base]
    orders = [(i, base, "first") for i in others] + [(base, i, "second") for i in others]
    questions = []
    for a, b, _ in orders:
        question, shown = prompts.judge_view(task, sample, [answers[a], answers[b]], media)
        questions.append(Question(prompts.better_prompt(question, right, texts[a], texts[b]), shown, prompts.BETTER))
    replies = services.judge(questions)
    wins = [None if (said := _fields(reply, prompts.BETTER)) is None else said["better"] == own
            for reply, (*_, own) in zip(replies, orders, strict=True)]
    both = dict(zip(others, zip(wins[:len(others)], wins[len(others):], strict=True), strict=True))
    paid: dict[int, float | None] = {i: None if None in pair else 1.0 if all(pair) else -1.0
                                     for i, pair in both.items()} | {base: 0.0}
    if abs(sum(value or 0.0 for value in paid.values())) > most * len(answers):
        paid = dict.fromkeys(paid)
    apart = {i: float(pair[0] != pair[1] and None not in pair) for i, pair in both.items()}
    return [{"pairwise": paid[i], "order_disagreement": apart.get(i, 0.0)} for i in range(len(answers))]


@part({"tournament": 1.0}, needs=("judge",), replaces_outcome=True)
def tournament(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *, media: bool = True,
               reasoning: bool = False) -> list[Parts]:
    """1 - rank / (G - 1) of each of the G answers in a tournament with 2 G - 2 calls to the judge (ArenaRL).

    First the judge compares the first answer with each other answer; the scores determine the seeds. A single
    elimination follows, in which the best seed plays against the last. Answers eliminated in the same round are ranked
    by their mean score so far. Answers with equal scores share a rank. media: whether the judge sees images. reasoning:
    whether the judge sees whole completions instead of final answers."""
    count = len(answers)
    if count < 2:
        return [{"tournament": 1.0} for _ in answers]
    texts = [a.text if reasoning else a.final for a in answers]
    right = prompts.reference(task, sample)

    def question_for(a: int, b: int) -> Question:
        question, shown = prompts.judge_view(task, sample, [answers[a], answers[b]], media)
        return Question(prompts.scores_prompt(question, right, texts[a], texts[b]), shown, prompts.SCORES)

    def scored(pairs: Sequence[tuple[int, int]]) -> list[tuple[float, float] | None]:
        swapped = [zlib.crc32(f"{texts[i]}|{texts[j]}".encode("utf-8", "backslashreplace")) % 2 for i, j in pairs]
        shown_as = [(j, i) if swap else (i, j) for (i, j), swap in zip(pairs, swapped, strict=True)]
        replies = services.judge([question_for(a, b) for a, b in shown_as])
        out: list[tuple[float, float] | None] = []
        for reply, swap in zip(replies, swapped, strict=True):
            said = _fields(reply, prompts.SCORES)
            pair = None if said is None else (float(said["first"]), float(said["second"]))
            out.append((pair[1], pair[0]) if pair and swap else pair)
        return out

    ranks = _ranks(count, scored)
    return [{"tournament": None if ranks is None else 1 - ranks[i] / (count - 1)} for i in range(count)]


def _ranks(count: int, scored: Any) -> list[float] | None:
    history: list[list[float]] = [[] for _ in range(count)]

    def play(pairs: Sequence[tuple[int, int]]) -> bool:
        results = scored(pairs)
        for (i, j), result in zip(pairs, results, strict=True):
            if result is None:
                return False
            history[i].append(result[0])
            history[j].append(result[1])
        return True

    if not play([(0, i) for i in range(1, count)]):
        return None
    left, places = sorted(range(count), key=lambda i: (-fmean(history[i]), i)), [0.0] * count
    seed = {i: place for place, i in enumerate(left)}
    while len(left) > 1:
        byes = (1 << (len(left) - 1).bit_length()) - len(left)  # of the best seeds, up to the next power of two
        playing = left[byes:]
        pairs = [(playing[k], playing[-1 - k]) for k in range(len(playing) // 2)]
        if not play(pairs):
            return None
        lost = [j if (history[i][-1], fmean(history[i]), -seed[i]) > (history[j][-1], fmean(history[j]), -seed[j])
                else i for i, j in pairs]
        left = [i for i in left if i not in lost]
        _write_ranks(lost, len(left), history, places)
    return places


def _write_ranks(lost: Sequence[int], first: int, history: Sequence[Sequence[float]], ranks: list[float]) -> None:
    """Writes the ranks of the answers `lost`, which were eliminated in one round, into `ranks`, indexed by answer. The
    best of these answers gets the rank `first`. They are ordered by the mean of their scores in `history`; answers
    with equal means share the mean of their ranks."""
    for i in lost:
        better = sum(fmean(history[j]) > fmean(history[i]) for j in lost)
        equal = sum(fmean(history[j]) == fmean(history[i]) for j in lost)
        ranks[i] = first + better + (equal - 1) / 2


@part({"principles": 1.0}, needs=("judge",))
def principles(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
               samples: Annotated[int, Field(ge=1)] = 4, media: bool = True, reasoning: bool = False) -> list[Parts]:
    """The mean grade of an answer, from 1 to 10 (DeepSeek-GRM, arXiv 2504.02495, which sums the grades).

    A judge writes principles for the question, criticizes all answers of the group by these principles, and grades the
    answers. This is repeated for up to `samples` random orders of the answers. Orders without a reply are ignored. If
    no order has a reply, the answers have no value. With services.judge.json_schema=false the judge can write text
    first. media: whether the judge sees images. reasoning: whether it sees whole completions."""
    texts, count = [a.text if reasoning else a.final for a in answers], len(answers)
    right = prompts.reference(task, sample)

    def question_for(order: Sequence[int]) -> Question:
        question, shown = prompts.judge_view(task, sample, [answers[i] for i in order], media)
        text = prompts.principles_prompt(question, right, [texts[i] for i in order])
        return Question(text, shown, prompts.grades(count))

    orders = _orders(f"{task.seed}/{sample.id}/{answers[0].step}", count, samples)
    replies = services.judge([*map(question_for, orders)])
    given_grades: list[list[float]] = [[] for _ in answers]
    for order, reply in zip(orders, replies, strict=True):
        said = _fields(reply, prompts.grades(count))
        for place, i in enumerate(order if said else ()):
            given_grades[i].append(float((said or {})[f"answer_{place + 1}"]))
    return [{"principles": fmean(values) if values else None} for values in given_grades]


def _orders(key: str, count: int, most: int) -> list[list[int]]:
    draw, orders = random.Random(zlib.crc32(key.encode("utf-8", "backslashreplace"))), list[list[int]]()
    for _ in range(8 * most):  # few answers have few orders
        order = draw.sample(range(count), count)
        orders += [order] if order not in orders else []
        if len(orders) == most:
            break
    return orders


def _fields(reply: str | None, fields: Any) -> dict[str, Any] | None:
    return None if reply is None else read_fields(reply, fields)
