"""Cheats: answers that must not be rewarded. Every task is tried with them, and their rewards are compared with the
rewards of perfect answers and of constant answers."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from vlrl.checks.answers import answer_of
from vlrl.checks.tasks import prompt_text
from vlrl.config.registry import failure
from vlrl.task import Task
from vlrl.testing.answers import quick_reward
from vlrl.testing.findings import Findings
from vlrl.types import Sample

CLEAR = 0.8
"""Maximum mean reward of a cheat, on a scale where wrong well-formed answers earn 0 and perfect answers earn 1."""
MARGIN = 0.15
"""How much a cheat that ignores the image may earn above the best constant answer, on the same scale as CLEAR."""
_CANDIDATES = 40

Text = str | tuple[str, ...]
"""A text that a cheat gives as its answer. If it is a tuple of texts, the lowest of their rewards counts."""


@dataclass(frozen=True)
class CheatRow:
    """The rewards of one cheat over the samples. If the cheat writes several answers to each sample, these are the
    rewards of the answer whose mean reward over the samples is highest."""

    name: str
    mean: float
    most: float
    at_full: float
    """Share of the samples on which the cheat earns as much as the perfect answer."""
    text: str
    """The cheat's answer to the first sample."""
    template: str = ""
    """The prompt template, if the task has several; otherwise ""."""


@dataclass(frozen=True)
class CheatCase:
    """The sample for which a cheat writes an answer, and the material that the cheat may use."""

    task: Task
    sample: Sample
    right: str
    """The final part of the perfect answer to this sample."""
    wrong: str
    """The final part of the perfect answer to another sample, which is wrong for this sample. An answer that differs
    from `right` only in its numbers and words is preferred."""
    candidates: Sequence[str]
    """The final parts of the perfect answers to all samples, without repetitions."""


def _forms(text: str) -> list[Text]:
    return [text, f"<answer>{text}</answer>", f"<think></think><answer>{text}</answer>", f"\\boxed{{{text}}}"]


def _each(*texts: str) -> Callable[[CheatCase], list[Text]]:
    return lambda case: [form for text in texts for form in _forms(text)]


def _joined(names: Sequence[str], *marks: str) -> list[Text]:
    return [form for mark in marks for form in _forms(mark.join(names))]


def _all_options(case: CheatCase) -> list[Text]:
    options = next((case.sample.get(key) for key in ("options", "labels") if case.sample.get(key)), None)
    return _joined([str(option) for option in options], ", ", "\n", " ") if isinstance(options, (list, tuple)) else []


def _everything(case: CheatCase) -> list[Text]:
    many = list(case.candidates)
    if len(many) < 2:
        return []
    each = ["".join(f"<answer>{c}</answer>" for c in many), " ".join(f"\\boxed{{{c}}}" for c in many),
            f"<think></think>{''.join(f'<answer>{c}</answer>' for c in many)}"]
    return [*each, *_joined(many, ", ", "\n", " ", " or ")]


def _written_boxes(case: CheatCase, width: float, height: float) -> tuple[str, str]:
    cells = [[x * width / 8, y * height / 8, (x + 2) * width / 8, (y + 2) * height / 8]
             for x in range(7) for y in range(7)]
    write = case.task.coordinates.from_original
    whole, *boxes = (str(write(case.sample, box)) for box in ([0.0, 0.0, width, height], *cells))
    return whole, ", ".join(boxes)


def _whole_image(case: CheatCase) -> list[Text]:
    if not (size := _size(case)):
        return []
    box, _ = _written_boxes(case, *size)
    return [form for text in (box, f'[{{"bbox_2d": {box}, "label": "object"}}]') for form in _forms(text)]


def _many_boxes(case: CheatCase) -> list[Text]:
    size = _size(case)
    return _forms(_written_boxes(case, *size)[1]) if size else []


def _size(case: CheatCase) -> tuple[float, float] | None:
    width, height = case.sample.get("width"), case.sample.get("height")
    return (width, height) if width and height else None


def _hidden(case: CheatCase) -> list[Text]:
    """Answers that give the right answer in the reasoning, and a wrong, empty or missing final answer."""
    right, wrong = case.right, case.wrong
    return [f"<think>{right}</think><answer>{wrong}</answer>", f"<think>{right}</think>{wrong}",
            f"<think><answer>{right}</answer></think><answer>{wrong}</answer>",
            f"<think>\\boxed{{{right}}}</think><answer>{wrong}</answer>",
            f"<think>\\boxed{{{right}}}</think>\\boxed{{{wrong}}}", f"<think>{right}",
            f"<think>{right}</think><answer></answer>"]


def _two_answers(case: CheatCase) -> list[Text]:
    """Pairs of texts that give both the right and a wrong answer, in either order. At most one text of each pair may be
    rewarded."""
    pairs = [(case.right, case.wrong), (case.wrong, case.right)]
    joins: list[Callable[[str, str], str]] = [
        "{}, {}".format, "{} or {}".format, "<answer>{}, {}</answer>".format, "<answer>{}</answer><answer>{}</answer>"
        .format, "<think></think><answer>{}</answer><answer>{}</answer>".format,
        "<think></think><answer>{} or {}</answer>".format, "\\boxed{{{}}} \\boxed{{{}}}".format]
    return [tuple(join(a, b) for a, b in pairs) for join in joins]


CONSTANT: dict[str, Callable[[CheatCase], list[Text]]] = {
    "silence": lambda case: ["", " ", "<think></think>", "<think></think><answer></answer>", "<answer> </answer>",
                             "\\boxed{}"],
    "refusing": _each("I cannot answer that.", "unknown", "N/A", "The answer is above."),
    "copied prompt": lambda case: _forms(prompt_text(case.task.messages(case.sample))), "all options": _all_options,
    "all answers in one": _everything, "every digit": lambda case: _joined("0123456789", " ", ", ", ""),
    "every letter": _each("A, B, C, D, E", "A B C D", "ABCD", "yes, no", "yes no", "no yes"),
    "whole image": _whole_image, "many boxes": _many_boxes}
"""{name of a cheat: function that writes its answers}, for cheats that ignore the image. They must not earn clearly
more than the best constant answer."""
KNOWING: dict[str, Callable[[CheatCase], list[Text]]] = {
    "hidden in the reasoning": _hidden, "two answers": _two_answers}
"""{name of a cheat: function that writes its answers}, for cheats that contain the right answer without committing to
it."""
NAMES = (*CONSTANT, *KNOWING, "best constant answer")
"""Names of the cheats that are tried on every task."""


def check_cheats(task: Task, samples: Sequence[Sample], oracles: Sequence[tuple[str, float]], findings: Findings,
                 template: str = "") -> list[CheatRow]:
    """Tries every cheat on samples with the same prompt template. Returns a CheatRow for the perfect answers, then one
    for each cheat; [] if perfect answers earn no more than wrong answers. `oracles`: (perfect answer, its reward)
    for each sample."""
    finals = [answer_of(text).final for text, _ in oracles]
    candidates = list(dict.fromkeys(finals))[:_CANDIDATES]
    cases = [CheatCase(task, sample, right, _wrong(right, candidates), candidates)
             for sample, right in zip(samples, finals, strict=True)]
    best = [reward for _, reward in oracles]
    texts = list(dict.fromkeys(text for text, _ in oracles))[:_CANDIDATES]
    foreign = [[quick_reward(task, s, t, findings) for s in samples] for t in texts]
    low = [min([column[i] for text, column in zip(texts, foreign, strict=True) if text != own] or [0.0])
           for i, (own, _) in enumerate(oracles)]
    scale = _mean(best) - _mean(low)
    if scale <= 0:
        findings.add("oracle", f"perfect answers earn {_mean(best):.3g} on average, not more than the perfect answers "
                     f"to other samples earn here ({_mean(low):.3g})", samples[0].id, oracles[0][0])
        return []
    limits = {"clear": _mean(low) + CLEAR * scale, "chance": float("inf")}
    rows = []
    if len(texts) > 1:
        rewards = max(foreign, key=_mean)
        rows.append(_row("best constant answer", rewards, best, texts[foreign.index(rewards)], template))
        limits["chance"] = rows[0].mean + MARGIN * scale
    else:
        findings.note("constant answers were not checked: all checked samples have the same perfect answer")
    named = {**KNOWING, **(CONSTANT if len(texts) > 1 else {})}
    for name, make in named.items():
        rows += _best_form(task, cases, name, make, best, findings, template)
    own, honest = _own(task, cases, best, findings, template)
    rows = [row for row in (*rows, *own) if row.name not in honest]
    for row in rows:
        _judge(row, _mean(best), limits, findings, samples[0].id)
    return [_row("perfect answer", best, best, oracles[0][0], template), *rows]


def _wrong(right: str, candidates: Sequence[str]) -> str:
    """Returns one of `candidates` that differs from `right`; "unknown" if there is none. A candidate that differs only
    in its numbers and words is preferred."""
    def form(text: str) -> str:
        return re.sub(r"[^\W\d_]+", "a", re.sub(r"\d+(\.\d+)?", "0", text))

    others = [c for c in candidates if c != right]
    return next((c for c in others if form(c) == form(right)), others[0] if others else "unknown")


def _best_form(task: Task, cases: Sequence[CheatCase], name: str, make: Callable[[CheatCase], list[Text]],
               best: Sequence[float], findings: Findings, template: str) -> list[CheatRow]:
    """Returns [the CheatRow of the cheat `name`], or [] if the cheat applies to none of the samples. `make` may write
    several answers to each case; of these, the answer with the highest mean reward is used. best: reward of the
    perfect answer to each sample."""
    try:
        variants = [(i, make(case)) for i, case in enumerate(cases)]
    except Exception as error:  # coordinates of a row without sizes
        findings.note(f"cheat '{name}' was not tried: {failure(error)}")
        return []
    variants = [(i, forms) for i, forms in variants if forms]
    if not variants:
        return []
    rows = []
    for number in range(min(len(forms) for _, forms in variants)):
        given = [(i, (form,) if isinstance(form := forms[number], str) else form) for i, forms in variants]
        rewards = [min(quick_reward(task, cases[i].sample, text, findings) for text in texts) for i, texts in given]
        rows.append(_row(name, rewards, [best[i] for i, _ in variants], given[0][1][0], template))
    return [max(rows, key=lambda row: row.mean)]


def _own(task: Task, cases: Sequence[CheatCase], best: Sequence[float], findings: Findings,
         template: str) -> tuple[list[CheatRow], set[str]]:
    texts: dict[str, dict[int, str]] = {}
    honest: set[str] = set()
    for i, case in enumerate(cases):
        with findings.guard("cheats", "cheats", case.sample.id):
            for name, text in task.cheats(case.sample).items():
                if text is not None:
                    texts.setdefault(name, {})[i] = text
                elif i == 0:
                    honest.add(name)
    rows = [_row(name, [quick_reward(task, cases[i].sample, text, findings) for i, text in given.items()],
                 [best[i] for i in given], next(iter(given.values())), template) for name, given in texts.items()]
    return rows, honest


def _judge(row: CheatRow, best: float, limits: Mapping[str, float], findings: Findings, sample: str) -> None:
    what = f"the cheat '{row.name}' earns {row.mean:.3g} on average"
    if row.mean > limits["clear"] + 1e-9:
        findings.add("cheat", f"{what}; the perfect answer earns {best:.3g}", sample, row.text,
                     most=len(NAMES))
    elif row.name in CONSTANT and row.mean > limits["chance"] + 1e-9:
        findings.add("cheat", f"{what}, more than the best constant answer and a margin ({limits['chance']:.3g})",
                     sample, row.text, most=len(NAMES))


def _row(name: str, rewards: Sequence[float], best: Sequence[float], text: str, template: str) -> CheatRow:
    full = [r >= b - 1e-6 for r, b in zip(rewards, best, strict=True)]
    return CheatRow(name, _mean(rewards), max(rewards), _mean(full), text, template)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def with_template(sample: Sample, template: str) -> Sample:
    """A copy of the sample that uses this prompt template."""
    return replace(sample, prompt=template)
