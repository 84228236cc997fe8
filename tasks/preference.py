"""Preference: which of two responses to a question is better.

`task.recipe` chooses the prompt and the reward, `task.order` the order of the two responses. The task trains two kinds
of judges: a model that writes which response is better, by `vlrl sft` or RL, and with recipe=respond a reward model
that scores one response. Rows have `question`, `responses` (two strings) and `answer` (1 or 2, the better response).
Optional fields: `image`, `images` or `video`, and `category`."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from vlrl.data import Drawn
from vlrl.data.row_fields import responses_problem
from vlrl.data.values import short
from vlrl.rewards.text import clean_label, extract_tag, said, think_answer_format
from vlrl.task.recipes import Recipe, RecipeTask
from vlrl.types import Answer, Parts, Sample

from ._shared import means

_CHOICE = re.compile(r"(?:response )?([12])")
_VERDICT = re.compile(r"(?<![\d.])-?[01]\.0(?!\d)")
_LINES, _LONGEST = 3, 2000
_INPUT = "[Question]: {question}\n\n[Response 1]: {first}\n\n[Response 2]: {second}\n\n"


@dataclass(frozen=True, kw_only=True)
class PairRecipe(Recipe):
    """A recipe whose completions state the number of the better response, 1 or 2."""

    find: Callable[[str], str]
    """Returns the part of an answer's text that has the number; "" if there is none."""
    say: Callable[[str], str]
    """Writes a text in the right format."""


def tagged(text: str) -> str:
    """The content of the only <answer> after the thinking. "" if there is no <answer> or more than one, or if the
    thinking never ends."""
    rest = text.partition("</think>")[2] if "<think>" in text or "</think>" in text else text
    return extract_tag(rest, "answer") or "" if rest.count("<answer>") == 1 else ""


def strict_format(text: str) -> float:
    """Returns 1 for <think>...</think><answer>...</answer> with each tag once and nothing before, between or after;
    else 0 (R1-Reward)."""
    whole = text.startswith("<think>") and "</think><answer>" in text and text.endswith("</answer>")
    return think_answer_format(text) if whole else 0.0


def _read(task: Any, _sample: Sample, answer: Answer) -> int | None:
    given = task.used.find(said(answer))
    match = _CHOICE.fullmatch(clean_label(given)) if len(given) <= _LONGEST else None
    return int(match[1]) if match else None


def _accuracy(task: Any, sample: Sample, answer: Answer) -> float:
    return float(_read(task, sample, answer) == sample["answer"])


def _recipe(prompt: str, rewards: Mapping[str, float], form: Callable[[Answer], float], say: Callable[[str], str],
            **other: Any) -> PairRecipe:
    def score(task: Any, sample: Sample, answer: Answer) -> Parts:
        return {"accuracy": _accuracy(task, sample, answer), "format": form(answer)}
    return PairRecipe(prompt=_INPUT + prompt, rewards=rewards, say=say, read=_read, score=score,
                      target=lambda _task, sample: sample["answer"],
                      oracle=lambda _task, sample: say(str(sample["answer"])), **other)


def _consistency(task: Any, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
    """The part `consistency` of each answer in a group. For a right answer, a judge tells which response the end of the
    thinking prefers: 1 for the same response as the answer, -1 for the other response, 0 if the judge cannot tell,
    None if the judge failed. For a wrong answer the part is 0, so that the judge cannot make wrong answers
    profitable."""
    judge = services.judge
    right = [i for i, answer in enumerate(answers) if _accuracy(task, sample, answer)]
    replies = judge([_choice_question(answers[i]) for i in right]) if right else ()
    verdicts = {i: None if reply is None else float((_VERDICT.findall(reply) or ["0.0"])[-1])
                for i, reply in zip(right, replies, strict=True)}
    return [{"consistency": verdicts.get(i, 0.0)} for i in range(len(answers))]


def _choice_question(answer: Answer) -> str:
    before = answer.text.rpartition("<answer>")[0].replace("</think>", "").strip()
    end = "\n".join(before.split("\n")[-_LINES:])[-_LONGEST:]
    return (f"Someone compared two responses. The end of the reasoning:\n{end}\n\nThe answer: response "
            f"{tagged(answer.text).strip()[:100]} is better.\nDoes the reasoning prefer the same response as the "
            "answer? Reply with 1.0 if it does, -1.0 if it prefers the other one, 0.0 if it does not say.")


DIRECT = _recipe(
    "Which response answers the question better? Answer with 1 or 2 only.", {"accuracy": 1.0, "format": 0.1},
    form=lambda answer: float(said(answer).strip() in ("1", "2")), find=lambda text: text, say=str)
R1_REWARD = _recipe(
    "Compare the two responses to the question side by side in <think> </think>. A tie is not permitted. Then give the "
    "number of the better response, 1 or 2, in <answer> </answer>: <think>...</think><answer>1</answer>",
    {"accuracy": 1.0, "format": 0.5, "consistency": 0.5}, form=lambda answer: strict_format(answer.text), find=tagged,
    say=lambda text: f"<think>Response {text} is better.</think><answer>{text}</answer>",
    group=_consistency, needs={"judge": ("consistency",)})


def _better(sample: Sample) -> str:
    return sample["responses"][sample["answer"] - 1]


RESPOND = PairRecipe(
    prompt="{question}", rewards={"accuracy": 1.0}, read=lambda _task, _sample, answer: said(answer),
    score=lambda _task, sample, answer: {"accuracy": float(said(answer).strip() == _better(sample).strip())},
    target=lambda _task, sample: _better(sample), oracle=lambda _task, sample: _better(sample),
    find=lambda text: text, say=lambda text: text)


class Preference(RecipeTask):
    """Tell which of two responses is better; see `task.recipe`. Reward parts of the default recipe: `accuracy`, 0 or 1,
    and `format`, 0 or 1."""

    _recipes = {"direct": DIRECT, "r1_reward": R1_REWARD, "respond": RESPOND}
    recipe: str = "direct"
    """Prompt and reward (docs/tasks.md). direct, r1_reward, respond (the prompt is only the question; the responses
    train a reward model), or your own module:function that returns a Recipe."""
    order: Literal["as_is", "swapped", "both"] = "as_is"
    """Order of the responses: as_is, swapped or both. as_is = as in the row; both = both orders as two consecutive
    samples."""

    def problem(self, row: Mapping[str, Any]) -> str | None:
        return _problem(row)

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        first, second = row["responses"]
        return {"first": first, "second": second}

    def samples(self, split: str) -> Sequence[Sample]:
        base = super().samples(split)
        orders = {"as_is": (False,), "swapped": (True,), "both": (False, True)}[self.order]

        def make(i: int) -> Sample:
            place, order = divmod(i, len(orders))
            return self.swapped(base[place]) if orders[order] else base[place]
        return base if orders == (False,) else Drawn(len(base) * len(orders), make)

    def pair(self, sample: Sample) -> tuple[str, str] | None:
        """Returns (better response, worse response), from which a reward model learns; None unless recipe=respond."""
        better = _better(sample)
        other = sample["responses"][2 - sample["answer"]]
        return (better, other) if self.used is RESPOND else None

    def swapped(self, sample: Sample) -> Sample:
        """The sample with its responses swapped; its field `pair` is the id of the original sample."""
        name = f"{sample.id}-swapped"
        row = {**sample.row, "id": name, "pair": sample.id, "responses": sample["responses"][::-1],
               "answer": 3 - sample["answer"]}
        return replace(sample, id=name, row=self.filled(row))

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split.
            `accuracy/<category>`: the mean accuracy by category;
            `position_bias`: the share of answers 1 minus the share of rows where 1 is right, in [-1, 1];
            with task.order=both, shares of rows: `pairs/agreement`, where both orders prefer the same response, and
            `pairs/accuracy`, where both orders prefer the right response."""
        values: list[tuple[str, float]] = []
        pairs: dict[str, list[tuple[int, float]]] = {}
        for record in records:
            row, choice, paid = record["sample"], record["parsed"], record["parts"].get("accuracy") or 0.0
            if row.get("category"):
                values.append((f"accuracy/{row['category']}", paid))
            if choice in (1, 2):
                values.append(("position_bias", float(choice == 1) - float(row["answer"] == 1)))
            first_choice = 0 if choice not in (1, 2) else 3 - choice if row.get("pair") else choice
            pairs.setdefault(str(row.get("pair") or row.get("id")), []).append((first_choice, paid))
        for first, second in (pair for pair in pairs.values() if len(pair) == 2):
            values += [("pairs/agreement", float(first[0] == second[0] != 0)),
                       ("pairs/accuracy", min(first[1], second[1]))]
        return means(values)

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Name -> an answer that names both responses, or neither."""
        say = getattr(self.used, "say", str)  # a Recipe of one's own may have none
        texts = ("1 2", "2 1", "1 and 2", "1 or 2", "12", "1/2", "both", "tie", "0", "3", "response")
        return {f"'{text}'": say(text) for text in texts}


def _problem(row: Mapping[str, Any]) -> str | None:
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        return f"question={short(row.get('question'))} must be the text of the question"
    return responses_problem(row.get("responses"), row.get("answer"))
