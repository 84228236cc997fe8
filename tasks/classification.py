"""Classification: name what the image shows, with or without thinking first.

`task.recipe` chooses the prompt and the reward. Rows: `image`, `label` (a name, or a list of names if several are
right), and optionally `labels` (the names to choose from), `synonyms` (further right names, or {label: [names]}),
`question`, and `class_id` (the number of the class in its data set). `task.shots` trains on few samples of each class,
`task.classes` on half of the classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vlrl.config.base import Count
from vlrl.data import SPLITS, Drawn
from vlrl.errors import DataError
from vlrl.rewards.confidence import calibration_error
from vlrl.task.recipes import RecipeTask
from vlrl.types import Answer, Parts, Sample

from . import _classification as recipes


class Classification(RecipeTask):
    """The class of an image: see `task.recipe`. Parts of the default: `accuracy` 0 or 1 (of several labels
    `task.multi_score`, in [0, 1]), `format` 0 or 1."""

    _recipes = recipes.RECIPES
    recipe: str = "plain"
    """Prompt and reward: plain (see task.thinking), cls_rl, cls_rl_no_thinking, visual_rft_classification, rlcr
    (answers with a confidence), or an own module:function that returns a Recipe."""
    thinking: Literal["thinking", "no_thinking", "both"] = "no_thinking"
    """plain: without thinking the whole answer must be exactly the label; with it, the <answer> tag must contain it;
    both draws one template per visit."""
    question: str = "What does the image show?"
    """Asked if the row has no `question`; the row's `labels` are appended."""
    direct: str = "{question}\nPlease directly output the answer."
    """plain: template without thinking."""
    reasoned: str = ("{question}\nPlease output the thinking process in <think> </think> and final answer in "
                     "<answer> </answer> tags.")
    """plain: template with thinking; a template that contains <think> is scored as thinking."""
    multi_score: Literal["jaccard", "f1", "exact"] = "jaccard"
    """Accuracy for rows with several labels: shared names over all names, F1 of the two sets, or whether they are
    equal."""
    negation: Literal["read", "ignored"] = "read"
    """visual_rft_classification: whether an answer that starts with a negation ("not a cat") names nothing, or, as in
    Visual-RFT, what it contains."""
    shots: Count = 0
    """Training samples per class, such as 1, 2, 4, 8 or 16; 0 = all."""
    shots_seed: Count = 0
    """Seed of their selection, independent of data.seed and the training seed."""
    classes: Literal["all", "base", "new"] = "all"
    """Classes used for training: all, or the first (base) or second half (new) of them in task.class_order (CoOp).
    Held-out rows then cover both halves, and every row offers the names of its own half. The classes are those of both
    files."""
    class_order: tuple[str, ...] = ()
    """task.classes: all classes in the order of the data set; by default they are ordered by the rows' `class_id`, or
    by name if rows have none."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._names: dict[tuple[str, ...], list[str]] = {}
        """All classes by the files of rows, once they were asked for."""

    @property
    def templates(self) -> tuple[str, ...]:
        if self.prompts or self.prompt:
            return super().templates
        return {"thinking": (self.reasoned,), "no_thinking": (self.direct,), "both": (self.direct, self.reasoned)}[
            self.thinking]

    def thinks(self, sample: Sample) -> bool:
        """Whether this visit's template asks for thinking."""
        return "<think>" in (sample.prompt or self.templates[0])

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        try:
            row = recipes.checked(row)
        except DataError as error:
            raise DataError(f"row {row.get('id')!r}: {error}") from None
        return super().sample_from_row(row, root)

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        names, several = row.get("labels"), isinstance(row["label"], list)
        if row.get("question"):
            return {"question": row["question"]}
        added = f" Choose {'all that are there ' if several else ''}from: {', '.join(names)}." if names else ""
        return {"question": f"{self.question}{added}{' Separate names by commas.' if several else ''}"}

    # --- which samples ------------------------------------------------------------------------------------------------

    def samples(self, split: str) -> Sequence[Sample]:
        base = super().samples(split)
        if not self.shots and self.classes == "all":
            return base
        files = tuple(getattr(self.data, s, "") for s in SPLITS)
        if self.classes != "all" and files not in self._names:  # evaluations come again and again
            parts = [base if s == split else super(Classification, self).samples(s)
                     for s, file in zip(SPLITS, files, strict=True) if file]
            self._names[files] = recipes.ordered((s.row for part in parts for s in part), self.class_order)
        return self.chosen(split, [(s.id, recipes.labels_of(s.row)) for s in base], self._names.get(files, ()), base)

    def chosen(self, split: str, entries: Sequence[tuple[str, Sequence[str]]], names: Sequence[str],
               samples: Sequence[Sample]) -> Sequence[Sample]:
        """The `samples` that `task.classes` and `task.shots` select; `entries` has their ids and classes, `names` are
        all classes in the order to be halved. Samples are made on access only."""
        places = list(range(len(entries)))
        half_of: dict[str, str] = {}
        halves = recipes.halves(names) if self.classes != "all" else {}
        for half, inside in halves.items():
            half_of |= dict.fromkeys(inside, half)
        if halves and any(len(classes) > 1 for _, classes in entries):
            raise DataError(f"task.classes={self.classes} halves the classes, but some rows have several; set "
                            "task.classes=all")
        if split == "train":
            places = [p for p in places if not halves or half_of[entries[p][1][0]] == self.classes]
            if self.shots:
                shots = recipes.few_shot_places([entries[p] for p in places], self.shots, self.shots_seed)
                places = [places[k] for k in shots]

        def make(i: int) -> Sample:
            sample = samples[places[i]]
            half = half_of.get(entries[places[i]][1][0])
            return self._offering(sample, half, halves[half]) if half else sample
        return Drawn(len(places), make)

    def _offering(self, sample: Sample, half: str, names: Sequence[str]) -> Sample:
        """The sample with the names of its half to choose from."""
        row = dict(sample.row)
        if row.get("question") == self.placeholders({**row, "question": None})["question"]:
            del row["question"]  # the task's own, with the names of both halves
        if row.get("labels"):
            row["labels"] = [name for name in row["labels"] if name in names]
        return replace(sample, row=self.filled({**row, "half": half}))

    # --- numbers of an evaluation -------------------------------------------------------------------------------------

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """rlcr: `confidence`, for answers that state one."""
        read = self.parse(sample, answer)
        sure = read.get("confidence") if isinstance(read, Mapping) else None
        return {} if sure is None else {"confidence": sure}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """With task.classes `accuracy/base`, `accuracy/new` and their harmonic mean `accuracy/h`; for answers with a
        confidence `ece`, the expected calibration error over ten bins."""
        paid = [(r, r["parts"]["accuracy"]) for r in records if r["parts"].get("accuracy") is not None]
        out: dict[str, float] = {}
        for half in ("base", "new"):
            values = [value for r, value in paid if r["sample"].get("half") == half]
            out |= {f"accuracy/{half}": sum(values) / len(values)} if values else {}
        if len(out) == 2:
            total = sum(out.values())
            out["accuracy/h"] = 2 * out["accuracy/base"] * out["accuracy/new"] / total if total else 0.0
        sure = [(r["metrics"]["confidence"], value) for r, value in paid if "confidence" in (r.get("metrics") or ())]
        return {**out, "ece": calibration_error([q for q, _ in sure], [value for _, value in sure])} if sure else out
