"""Qa: a question about images, or about text alone, with one answer that a rule can check.

`task.recipe` chooses the prompt and the reward. `task.form` chooses whether a row is asked as it is, as a yes-or-no
question, as a choice, or as an open question.

Rows have `question`, `answer` (a text or number, or a list of right answers) and `answer_type` (choice, number, count,
yes_no, math, chart, ocr, regression, text). Optional fields: `options`, `tolerance`, `precision` (the number of
decimals that count), and `image` or `images`; an `<image>` in the question marks the position of the image. Answers of
type math need math-verify. If a right answer has digits but is neither a number nor a formula, such as a phone number,
answers are compared as written, whatever the answer_type."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vlrl.config.base import Positive, Rate
from vlrl.errors import DataError
from vlrl.rewards.answers import mathvista
from vlrl.task.recipes import RecipeTask
from vlrl.types import Answer, Parts, Sample

from . import _qa as recipes
from . import _qa_kinds as kinds
from ._qa_kinds import FORMS
from ._shared import accuracy_by

IMAGE = "<image>"


class Qa(RecipeTask):
    """Questions with one answer that a rule can check; see `task.recipe`. Reward parts of the default recipe:
    `accuracy`, in [0, 1] (0 or 1 except for the types text, ocr and regression), and `format`, 0 or 1."""

    _recipes = recipes.RECIPES
    recipe: str = "direct"
    """Prompt and reward (docs/tasks.md). direct, thinking, easy_r1, vision_r1_ptst, apo_view_r1, mm_eureka, glm_v_rlcs,
    kimi_k1_5, noisy_rollout, sari_structured, or your own module:function that returns a Recipe."""
    form: Literal["own", "yes_no", "choice", "open"] = "own"
    """How a question is asked: own, yes_no, choice, open. own = as in its row; yes_no = as whether a proposed answer is
    right; choice = with options; open = without options."""
    text_score: Literal["exact", "rouge", "edit"] = "rouge"
    """Score of a text that differs: exact, rouge, edit. It differs from all right answers: 0 (exact), the mean ROUGE F
    score (rouge), or the edit similarity (edit)."""
    math_seconds: Rate = 5.0
    """CPU seconds that math-verify may use per answer."""
    math_rule: Literal["worked_out", "math_verify"] = "worked_out"
    """When an answer of type math is right. worked_out: if math-verify finds it equal to a right answer and all
    arithmetic is done (not 3*4+5 for 17, nor an expression copied from the question, nor 3 = 2 for 2); math_verify:
    if math-verify finds it equal, as in published systems."""
    negation: Literal["read", "ignored"] = "read"
    """How an answer after a negation ("not C") is scored. The answer is a choice, number, count or expression. read: it
    is not an answer, unless a right answer or an option starts with a negation too ("not enough data"); ignored: it is
    an answer, as in View-R1."""
    noise: Annotated[float, Field(ge=0, le=999)] = 500.0
    """noisy_rollout: initial diffusion steps of noise, of 1,000."""
    noise_steps: Positive = 60
    """noisy_rollout: steps over which noise decreases. They are training steps; set them to the number of steps of the
    run."""

    @classmethod
    def combine_for(cls, settings: Mapping[str, Any]) -> str:
        return getattr(cls._chosen(settings), "combine", "sum")

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        if self.form != "own" and kinds.problem(self, row) is None:
            try:
                row = FORMS[self.form](row)
            except DataError as error:
                raise DataError(f"row '{row.get('id')}': {error}") from None
        return super().sample_from_row(row, root)

    def problem(self, row: Mapping[str, Any]) -> str | None:
        marked = IMAGE in "".join(map(str, row.get("options") or ()))
        return kinds.problem(self, row) or (f"an option shows {IMAGE}, but options must be texts" if marked else None)

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        options = zip(kinds.LETTERS, kinds.options_of(row), strict=False)
        return {"asked": "\n".join([row["question"], *(f"{letter}. {text}" for letter, text in options)]),
                "kind": kinds.kind_of(row).asks}

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an answer to a row of MathVista (a row with `question_type`): `mathvista_acc`, whether it is right
        by the rule of MathVista's authors."""
        if sample.get("question_type") not in ("multi_choice", "free_form"):
            return {}
        options = sample.get("choice_texts") or kinds.options_of(sample.row)
        places = sample.get("precision") if not options else None
        return {"mathvista_acc": mathvista(answer.final or "", str(sample["answer"]), options,
                                           None if places is None else int(places))}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split: the mean accuracy by answer type and by category, e.g. `accuracy/math` and
        `accuracy/geometry`."""
        return accuracy_by(records, ("answer_type", "category"))

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Name -> an answer given without looking at the image, or that lists the right answer among others."""
        right = kinds.perfect_answer(sample)
        texts = {"several numbers": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "yes and no": "yes, no", "no and yes": "no, yes",
                 "the question": sample["question"][:1000], "gibberish": "qz wv kx jj"}
        if kinds.options_of(sample.row):
            texts["every option"] = "; ".join(kinds.options_of(sample.row))
        if sample["answer_type"] in ("number", "count", "math", "chart"):
            texts |= {"a digit before": f"1{right}", "boxes": f"\\boxed{{{right}}} \\boxed{{7{right}}}",
                      "a list with it": f"{right}, 1{right}, 2{right}"}
        say = getattr(self.used, "say", str)  # a Recipe of one's own may have none
        return {name: say(text) for name, text in texts.items()}
