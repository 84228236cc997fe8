"""Qa: a question about images, or about text alone, with one answer that a rule can check.

`task.recipe` chooses the prompt and the reward, `task.form` whether rows are asked as they are, as yes or no, as a
choice or openly. Rows: `question`, `answer` (a text or number, or a list of the right ones), `answer_type` (choice,
number, count, yes_no, math, chart, ocr, regression, text), and as they need `options`, `tolerance`, `precision`
(decimals that count), `image` or `images`; an `<image>` in the question is the position of that image. Answers of type
math need math-verify. A right answer of digits that is neither a number nor a formula, such as a phone number, is
compared as written, whatever its type."""

from __future__ import annotations

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
from ._qa_forms import FORMS
from ._shared import accuracy_by

IMAGE = "<image>"


class Qa(RecipeTask):
    """Questions with one checkable answer: see `task.recipe`. Parts of the default: `accuracy` in [0, 1] (0 or 1 except
    for text, ocr and regression), `format` 0 or 1."""

    _recipes = recipes.RECIPES
    recipe: str = "direct"
    """Prompt and reward: direct, thinking, easy_r1, vision_r1_ptst, apo_view_r1, mm_eureka, glm_v_rlcs, kimi_k1_5,
    noisy_rollout, sari_structured, or an own module:function that returns a Recipe."""
    form: Literal["own", "yes_no", "choice", "open"] = "own"
    """How an item is asked: as in its row, as whether a proposed answer is right, with options, or without."""
    text_score: Literal["exact", "rouge", "edit"] = "rouge"
    """Score of a text that is not equal to a right one: 0, mean ROUGE F, or its edit similarity."""
    math_seconds: Rate = 5.0
    """CPU seconds of math-verify per answer."""
    math_rule: Literal["worked_out", "math_verify"] = "worked_out"
    """When an answer of type math is right: equal by math-verify with its arithmetic done (not 3*4+5 for 17, nor the
    question's own expression, nor 3 = 2 for 2), or equal by math-verify alone, as in published systems."""
    negation: Literal["read", "ignored"] = "read"
    """Whether a choice, number, count or expression after a negation ("not C") is ignored, unless a right answer or an
    option starts so ("not enough data"), or counts, as in View-R1."""
    noise: Annotated[float, Field(ge=0, le=999)] = 500.0
    """noisy_rollout: diffusion steps of noise at the start, out of 1,000."""
    noise_steps: Positive = 60
    """noisy_rollout: training steps over which the noise falls; as many as the run has."""

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
        return kinds.problem(self, row) or (f"an option shows {IMAGE}, and options are texts" if marked else None)

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        options = zip(kinds.LETTERS, kinds.options_of(row), strict=False)
        return {"asked": "\n".join([row["question"], *(f"{letter}. {text}" for letter, text in options)]),
                "kind": kinds.kind_of(row).asks}

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """`mathvista_acc` of MathVista's rows, which have a `question_type`: right by its authors' rule."""
        if sample.get("question_type") not in ("multi_choice", "free_form"):
            return {}
        options = sample.get("choice_texts") or kinds.options_of(sample.row)
        places = sample.get("precision") if not options else None
        return {"mathvista_acc": mathvista(answer.final or "", str(sample["answer"]), options,
                                           None if places is None else int(places))}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """The accuracy by answer type and by category, e.g. `accuracy/math` and `accuracy/geometry`."""
        return accuracy_by(records, ("answer_type", "category"))

    def cheats(self, sample: Sample) -> Mapping[str, str | None]:
        """Answers that need no look at the image, or that contain the right one among others."""
        right = kinds.spoken(sample)
        texts = {"several numbers": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "yes and no": "yes, no", "no and yes": "no, yes",
                 "the question": sample["question"][:1000], "gibberish": "qz wv kx jj"}
        if kinds.options_of(sample.row):
            texts["every option"] = "; ".join(kinds.options_of(sample.row))
        if sample["answer_type"] in ("number", "count", "math", "chart"):
            texts |= {"a digit before": f"1{right}", "boxes": f"\\boxed{{{right}}} \\boxed{{7{right}}}",
                      "a list with it": f"{right}, 1{right}, 2{right}"}
        say = getattr(self.used, "say", str)  # a Recipe of one's own may have none
        return {name: say(text) for name, text in texts.items()}
