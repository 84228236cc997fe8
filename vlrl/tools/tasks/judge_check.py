"""`vlrl judge check`: compares the verdicts of a judge model, and of the task's own rule, with labels that people gave
to answers.

    {"id": "train-3", "answer": "<answer>4</answer>", "correct": true}
    {"sample": {"id": "7", "question": "2 + 2?", "answer": "4"}, "answer": "four", "correct": true}
    {"id": "train-3", "responses": ["<answer>4</answer>", "<answer>5</answer>"], "better": 1}

For labelled answers it measures the agreement with the labels, the false positives and negatives, the verdicts that
change when the question is reworded (reWordBench, 2503.11751), and the wrong answers that are accepted once text
addressed to the judge is inserted into them. For pairs it measures the agreement and the effect of the order. The rule
is the task's `correct`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vlrl.config.registry import prints_aside
from vlrl.config.schema import Config
from vlrl.data import read_rows
from vlrl.errors import ConfigError, DataError
from vlrl.rewards.text import parse_answer
from vlrl.rewards.verdicts import read_fields
from vlrl.services.judge import COUNTS, Judge
from vlrl.services.judge_prompts import (
    BETTER,
    VERDICT,
    WORDINGS,
    better_prompt,
    question_text,
    reference,
    verdict_prompt,
)
from vlrl.task import Task
from vlrl.task.scoring import score_group
from vlrl.task.services import Question, ServiceContext
from vlrl.testing.injections import injected, injections
from vlrl.testing.labelled import sample_of, samples_by_id
from vlrl.training.build_task import make_task
from vlrl.types import Sample

_PLACE = ServiceContext("check", 0, 0)


@dataclass(frozen=True)
class LabelledAnswer:
    """An answer to a sample with the label that people gave it."""

    sample: Sample
    text: str
    correct: bool


@dataclass(frozen=True)
class Pair:
    """Two answers to a sample, and the number (1 or 2) of the better one."""

    sample: Sample
    texts: tuple[str, str]
    better: int


@dataclass(kw_only=True)
class Agreement:
    """Counts and rates that compare verdicts with labels. A rate is None if its denominator is 0."""

    answers: int = 0
    unanswered: int = 0  # number of answers without a verdict; they are excluded from all other figures
    agreement: float | None = None
    false_positives: int = 0
    false_positive_rate: float | None = None  # False positives as a share of the wrong answers
    false_negatives: int = 0
    false_negative_rate: float | None = None  # False negatives as a share of the correct answers


@dataclass(kw_only=True)
class Audit:
    """The result of `vlrl judge check`: how the judge and the task's rule agree with the labels, and the judge's
    biases."""

    judge: Agreement | None = None
    rule: Agreement | None = None
    reworded: float | None = None  # share of verdicts that change when the question is reworded
    injected_accepted: float | None = None
    """Share of wrong answers that are accepted once text addressed to the judge is inserted into them."""
    pairs: dict[str, Any] = field(default_factory=dict)
    cost: dict[str, float] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """The audit as a JSON object."""
        return asdict(self)


@prints_aside()
def audit(config: Config, file: Path, judge: Judge | None) -> Audit:
    """Compares the verdicts of the judge and of the task's rule with the labels in `file`. Without a judge, only the
    rule's verdicts are compared.

    Raises DataError naming file and row for a malformed row, and ConfigError if the file has no rows."""
    task = make_task(config)
    answers, pairs = read(task, file)
    by_rule = [score_group(task, one.sample, [parse_answer(one.text)], 0)[0].correct for one in answers]
    out = Audit(rule=agreement([one.correct for one in answers], by_rule))
    if judge is None:
        return out
    wordings = [_verdicts(judge, task, answers, w) for w in range(WORDINGS)]
    out.judge = agreement([one.correct for one in answers], wordings[0])
    changed = [other != first for others in wordings[1:] for first, other in zip(wordings[0], others, strict=True)
               if first is not None and other is not None]
    out.reworded = _share(changed)
    wrong = [one for one in answers if not one.correct]
    texts = injections(max(1, len(wrong)))
    talking = [LabelledAnswer(one.sample, injected(parse_answer(one.text).final, text), False)
               for one, text in zip(wrong, texts, strict=False)]
    out.injected_accepted = _share([v for v in _verdicts(judge, task, talking) if v is not None])
    out.pairs = _of_pairs(judge, task, pairs)
    out.cost = _cost(judge)
    return out


def read(task: Task, file: Path) -> tuple[list[LabelledAnswer], list[Pair]]:
    """Returns (the labelled answers in a file, the pairs of answers in it). Raises DataError naming file and row for a
    malformed row, ConfigError if the file has no rows."""
    rows = read_rows(file)
    if not rows:
        raise ConfigError(f'{file} has no rows; each row is {{"id" or "sample", "answer": text, "correct": true}}, or '
                          'has "responses": [text, text] and "better": 1 or 2')
    samples = samples_by_id(task, {str(row.get("id")) for row in rows if "sample" not in row})
    answers: list[LabelledAnswer] = []
    pairs: list[Pair] = []
    for number, row in enumerate(rows, 1):
        try:
            sample = sample_of(task, row, samples, file.parent)
            entry = _row(sample, row)
        except DataError as error:
            raise DataError(f"{file}, row {number}: {error}") from None
        (answers if isinstance(entry, LabelledAnswer) else pairs).append(entry)  # pyright: ignore[reportArgumentType]
    return answers, pairs


def _row(sample: Sample, row: Mapping[str, Any]) -> LabelledAnswer | Pair:
    if "responses" in row:
        texts, better = row["responses"], row.get("better")
        if not isinstance(texts, list) or len(texts) != 2 or not all(isinstance(t, str) for t in texts):
            raise DataError("responses must be two strings")
        if isinstance(better, bool) or better not in (1, 2):
            raise DataError(f"better={better!r} must be 1 or 2, the number of the better response")
        return Pair(sample, (texts[0], texts[1]), better)
    if not isinstance(row.get("answer"), str):
        raise DataError(f"answer={str(row.get('answer'))[:80]!r} must be a string")
    if not isinstance(row.get("correct"), bool):
        raise DataError(f"correct={row.get('correct')!r} must be true or false")
    return LabelledAnswer(sample, row["answer"], row["correct"])


def agreement(labels: Sequence[bool], verdicts: Sequence[bool | None]) -> Agreement:
    """Returns the agreement of verdicts with labels (True = correct). A verdict of None means that the judge gave none
    for this answer."""
    known = [(label, v) for label, v in zip(labels, verdicts, strict=True) if v is not None]
    wrong, right = [v for label, v in known if not label], [v for label, v in known if label]
    missed = [not v for v in right]
    return Agreement(answers=len(labels), unanswered=len(labels) - len(known),
                     agreement=_share([label == v for label, v in known]), false_positives=sum(wrong),
                     false_positive_rate=_share(wrong), false_negatives=sum(missed), false_negative_rate=_share(missed))


def _verdicts(judge: Judge, task: Task, answers: Sequence[LabelledAnswer], wording: int = 0) -> list[bool | None]:
    questions = [Question(verdict_prompt(question_text(task, one.sample), reference(task, one.sample),
                                         parse_answer(one.text).final, wording), tuple(one.sample.media), VERDICT)
                 for one in answers]
    return [None if said is None else said["verdict"] == "yes"
            for said in _parsed_replies(judge, questions, lambda reply: read_fields(reply, VERDICT))]


def _of_pairs(judge: Judge, task: Task, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Compares the judge's choices with the labels of the pairs. `agreement` is how often the judge prefers the better
    answer, `order_decides` how often its choice changes with the order of the two answers. `position_bias` is the
    share of choices of the answer shown first, minus one half. {} without pairs."""
    if not pairs:
        return {}
    questions = []
    for one in pairs:
        a, b = (parse_answer(text).final for text in one.texts)
        questions += [Question(better_prompt(question_text(task, one.sample), reference(task, one.sample), *order),
                               tuple(one.sample.media), BETTER) for order in ((a, b), (b, a))]
    said = [None if s is None else s["better"] == "first"
            for s in _parsed_replies(judge, questions, lambda reply: read_fields(reply, BETTER))]
    both = [(one, x, not y) for one, x, y in zip(pairs, said[::2], said[1::2], strict=True)
            if x is not None and y is not None]  # whether each order prefers response 1
    firsts = _share([s for s in said if s is not None])
    right = [preferred == (one.better == 1) for one, *orders in both for preferred in orders]
    return {"pairs": len(pairs), "unanswered": len(pairs) - len(both), "agreement": _share(right),
            "order_decides": _share([x != y for _, x, y in both]),
            "position_bias": None if firsts is None else firsts - 0.5}


def _parsed_replies(judge: Judge, questions: Sequence[Question], read: Callable[[str], Any]) -> list[Any]:
    replies, _ = judge.ask(questions, _PLACE) if questions else ([], [])
    return [None if reply is None else read(reply) for reply in replies]


def _cost(judge: Judge) -> dict[str, float]:
    tally, s = judge.take(_PLACE.split, _PLACE.step), judge.settings
    out = {name: float(tally.counts[name]) for name in COUNTS}
    out["seconds_mean"] = sum(tally.seconds) / max(len(tally.seconds), 1)
    if s.price_in or s.price_out:
        out["price"] = (tally.counts["tokens_in"] * s.price_in + tally.counts["tokens_out"] * s.price_out) / 1e6
    return out


def _share(values: Sequence[bool]) -> float | None:
    return sum(values) / len(values) if values else None
