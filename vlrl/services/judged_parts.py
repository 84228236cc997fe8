"""Reward parts of `task.parts` in which a judge rates each answer by itself; see extra_parts.py.

    judge               1 if the judge finds the final answer correct, else 0
    cascade             1 if the rule of the task or else the judge finds the answer correct (TinyV, arXiv 2505.14625)
    general_verdict     the judge's verdict minus a length penalty (General-Reasoner, arXiv 2505.14652)
    rubric              weighted share of the criteria that the judge finds met (arXiv 2509.21500)
    reasoned            whether the reasoning of a correct answer leads to that answer (R1-Reward, arXiv 2505.02835)

If the judge gives no reply, the value is None, so the answer cannot be scored."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from vlrl.rewards.verdicts import read_fields
from vlrl.services import judge_prompts as prompts
from vlrl.task.base import Task
from vlrl.task.part import part
from vlrl.task.services import Question
from vlrl.types import Answer, Parts, Sample

_PIECE = re.compile(r"\w+|[^\w\s]")


def _verdicts(services: Any, questions: Sequence[Question]) -> list[bool | None]:
    """The judge's verdict on each question: True for yes, False for no, None without a reply."""
    replies = services.judge(questions) if questions else []
    parsed = [None if reply is None else read_fields(reply, prompts.VERDICT) for reply in replies]
    return [None if fields is None else fields["verdict"] == "yes" for fields in parsed]


def _rated(task: Task, sample: Sample, answers: Mapping[int, Answer], services: Any, media: bool,
           criterion: str = "") -> dict[int, float | None]:
    """Returns {index of the answer: 1, 0 or None}: the judge's verdicts on the final texts, None without a reply. An
    empty answer gets 0 without asking the judge. media: whether the judge sees images. criterion: further
    instructions."""
    right, nonempty = prompts.reference(task, sample), {i: a for i, a in answers.items() if a.final.strip()}
    questions = []
    for answer in nonempty.values():
        question, shown = prompts.judge_view(task, sample, [answer], media)
        text = prompts.verdict_prompt(question, right, answer.final, criterion=criterion)
        questions.append(Question(text, shown, prompts.VERDICT))
    known = {i: None if v is None else float(v) for i, v in zip(nonempty, _verdicts(services, questions), strict=True)}
    return {i: known.get(i, 0.0) for i in answers}


@part({"judge": 1.0}, needs=("judge",), replaces_outcome=True)
def judge(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *, media: bool = True,
          criterion: str = "") -> list[Parts]:
    """1 if the judge finds the final answer correct, else 0. The judge sees the question, the images (if `media`), the
    reference answer and the final answer (for an episode all turns), but not the reasoning. criterion: further
    instructions on what counts as correct."""
    verdicts = _rated(task, sample, dict(enumerate(answers)), services, media, criterion)
    return [{"judge": verdicts[i]} for i in range(len(answers))]


@part({"cascade": 1.0, "recovered": 0.0}, needs=("judge",), replaces_outcome=True)
def cascade(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
            media: bool = False) -> list[Parts]:
    """1 if the task's rule or the judge finds the answer correct, else 0 (TinyV, arXiv 2505.14625). The judge is only
    asked about answers that the rule rejects. `recovered` is 1 if the judge accepted such an answer. media: whether
    the judge sees images."""
    failed = {i: a for i, a in enumerate(answers) if not correct_by_rule(task, sample, a)}
    verdicts = _rated(task, sample, failed, services, media)
    return [{"cascade": verdicts.get(i, 1.0), "recovered": verdicts.get(i, 0.0)} for i in range(len(answers))]


def correct_by_rule(task: Task, sample: Sample, answer: Answer) -> bool:
    """Whether the task's own rule finds an answer correct, regardless of curriculum.part and curriculum.pass_at. False
    if the rule raises an exception (which is reported by scoring)."""
    try:
        rule = task.by_rule()
        return rule.correct(sample, answer, rule.score(sample, answer)) is True
    except Exception:  # a user's verifier may raise anything: the judge decides
        return False


@part({"general_verdict": 1.0}, needs=("judge",), replaces_outcome=True)
def general_verdict(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *, penalty: float = 0.05,
                    most: int = 10, missing: float = -0.5, media: bool = False) -> list[Parts]:
    """The judge's verdict with a length penalty (General-Reasoner, arXiv 2505.14652, which counts tokens). media:
    whether the judge sees images. The value is

    - `missing` if the task cannot parse an answer,
    - 0 if the judge finds the answer wrong,
    - 1 - penalty * min(most, d) if the judge finds it correct, where d is the difference in length between the answer
      and the reference answer, in words and punctuation marks."""
    said = {i: a for i, a in enumerate(answers) if task.parse(sample, a) not in (None, "") and a.final.strip()}
    verdicts, length = _rated(task, sample, said, services, media), len(_PIECE.findall(prompts.reference(task, sample)))
    off = {i: min(most, abs(len(_PIECE.findall(a.final)) - length)) for i, a in said.items()}
    paid = {i: None if v is None else v * (1 - penalty * off[i]) for i, v in verdicts.items()}
    return [{"general_verdict": paid.get(i, missing)} for i in range(len(answers))]


@part({"rubric": 1.0, "rubric_saturated": 0.0}, needs=("judge",))
def rubric(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *,
           criteria: tuple[str | dict[str, Any], ...] = (), media: bool = True, reasoning: bool = False) -> list[Parts]:
    """Share of the criteria that the judge finds met, weighted by w: sum of w over the met criteria / sum of w (arXiv
    2509.21500).

    The judge is asked about one criterion at a time. criteria: strings or {criterion, weight}; if a row has the field
    `rubric`, its criteria are used instead. media: whether the judge sees images. reasoning: whether it sees the whole
    completion, not only the final answer. `rubric_saturated` is 1 if every answer of the group meets all criteria."""
    given = sample.get("rubric") or criteria
    wanted = [_criterion(one) for one in ([given] if isinstance(given, (str, Mapping)) else given)]
    total = sum(weight for _, weight in wanted)
    if not wanted or total <= 0:
        raise ValueError(f"row '{sample.id}' has no rubric, and the part 'rubric' has no criteria with a weight "
                         "above 0. Add a rubric to the row, or criteria to the part")
    views = [(a, *prompts.judge_view(task, sample, [a], media)) for a in answers]
    verdicts = iter(_verdicts(services, [
        Question(prompts.criterion_prompt(question, text, a.text if reasoning else a.final), shown, prompts.VERDICT)
        for a, question, shown in views for text, _ in wanted]))
    met = [[next(verdicts) for _ in wanted] for _ in answers]
    paid = [None if None in own else sum(w for v, (_, w) in zip(own, wanted, strict=True) if v) / total for own in met]
    full = None if None in paid else float(all(value == 1 for value in paid))
    return [{"rubric": value, "rubric_saturated": 0.0 if full is None else full} for value in paid]


_AGREEMENT = {"same": 1.0, "other": -1.0, "unclear": 0.0}


@part({"reasoned": 0.5}, needs=("judge",))
def reasoned(task: Task, sample: Sample, answers: Sequence[Answer], services: Any, *, lines: int = 3) -> list[Parts]:
    """Whether the end of the reasoning leads to the final answer, according to the judge (R1-Reward, arXiv 2505.02835).
    The judge sees the last `lines` lines of the reasoning. 1 if they lead to the final answer, -1 if they lead to
    another answer, 0 if they lead to none. Only correct answers are judged; other answers get 0."""
    ends = {i: "\n".join(a.reasoning.strip().split("\n")[-lines:]) for i, a in enumerate(answers)
            if correct_by_rule(task, sample, a)}
    nonempty = {i: end for i, end in ends.items() if end}
    replies = services.judge([Question(prompts.reasoning_prompt(end, answers[i].final), (), prompts.AGREES)
                              for i, end in nonempty.items()]) if nonempty else []
    said = {i: None if reply is None else read_fields(reply, prompts.AGREES)
            for i, reply in zip(nonempty, replies, strict=True)}
    paid = {i: None if fields is None else _AGREEMENT[str(fields["agrees"])] for i, fields in said.items()}
    return [{"reasoned": paid.get(i, 0.0)} for i in range(len(answers))]


def _criterion(one: Any) -> tuple[str, float]:
    given = {"criterion": one} if isinstance(one, str) else one
    text, weight = (given.get("criterion"), given.get("weight", 1.0)) if isinstance(given, Mapping) else (None, 0)
    if not isinstance(text, str) or not text.strip() or isinstance(weight, bool) or not isinstance(
            weight, (int, float)) or weight < 0:
        raise ValueError(f"rubric entry {str(one)[:80]!r} must be a string or {{criterion: string, weight: number "
                         f">= 0}}")
    return text, float(weight)
