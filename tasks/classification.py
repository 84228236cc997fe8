"""Classification: name what the image shows, with or without thinking first.

`task.recipe` chooses the prompt and the reward. Rows have an `image` and a `label`, which is a name, or a list of names
if several are right. Optional fields are `labels` (the names to choose from), `synonyms` (further right names, or
{label: [names]}), `question`, and `class_id` (the number of the class in its data set). `task.shots` selects a few
training samples per class, `task.classes` the samples of half of the classes."""

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
    """Name the class of an image; see `task.recipe`. Reward parts of the default recipe: `accuracy`, 0 or 1 (for rows
    with several labels in [0, 1], see `task.multi_score`), and `format`, 0 or 1."""

    _recipes = recipes.RECIPES
    recipe: str = "plain"
    """Prompt and reward (docs/tasks.md). plain (see task.thinking), cls_rl, cls_rl_no_thinking,
    visual_rft_classification, rlcr (answers with a confidence), or your own module:function that returns a Recipe."""
    thinking: Literal["thinking", "no_thinking", "both"] = "no_thinking"
    """Recipe plain: whether the prompt asks for thinking. With no_thinking the whole answer must be exactly the label;
    with thinking the <answer> tag must contain it. With both, one of the two templates is drawn each time a sample
    is used."""
    question: str = "What does the image show?"
    """Question of the prompt if the row has no `question`. The names in the row's `labels` are appended."""
    direct: str = "{question}\nPlease directly output the answer."
    """Recipe plain: the prompt template without thinking."""
    reasoned: str = ("{question}\nPlease output the thinking process in <think> </think> and final answer in "
                     "<answer> </answer> tags.")
    """Recipe plain: the prompt template with thinking. Every template that contains <think> is scored as a template
    with thinking."""
    multi_score: Literal["jaccard", "f1", "exact"] = "jaccard"
    """Accuracy for rows with several labels. It compares the sets of named and right classes: jaccard (size of the
    intersection divided by size of the union), f1, or exact (1 if the sets are equal)."""
    negation: Literal["read", "ignored"] = "read"
    """How a negated answer ("not a cat") is scored. Recipe visual_rft_classification. read: it names no class; ignored:
    it names the classes that it contains, as in Visual-RFT."""
    shots: Count = 0
    """Training samples per class, such as 4; 0 = all."""
    shots_seed: Count = 0
    """Seed for the selection of task.shots. It is independent of data.seed and of the training seed."""
    classes: Literal["all", "base", "new"] = "all"
    """Classes used for training: all, base or new. base = the first half, new = the second half in the order of
    task.class_order, as in CoOp. With base or new, held-out rows still cover both halves, and each row offers the names
    of the half that its class belongs to. The classes are collected from data.train and data.heldout."""
    class_order: tuple[str, ...] = ()
    """Order of all classes for task.classes. Usually the order of the data set. By default classes are ordered by the
    rows' `class_id`, or by name if rows have no class_id."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._names: dict[tuple[str, ...], list[str]] = {}
        """Data files -> names of all classes in these files; a cache."""

    @property
    def templates(self) -> tuple[str, ...]:
        if self.prompts or self.prompt:
            return super().templates
        return {"thinking": (self.reasoned,), "no_thinking": (self.direct,), "both": (self.direct, self.reasoned)}[
            self.thinking]

    def thinks(self, sample: Sample) -> bool:
        """Whether the prompt template chosen for the sample asks for thinking."""
        return "<think>" in (sample.prompt or self.templates[0])

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        try:
            row = recipes.validated(row)
        except DataError as error:
            raise DataError(f"row {row.get('id')!r}: {error}") from None
        return super().sample_from_row(row, root)

    def placeholders(self, row: Mapping[str, Any]) -> Mapping[str, str]:
        names, several = row.get("labels"), isinstance(row["label"], list)
        if row.get("question"):
            return {"question": row["question"]}
        added = f" Choose {'all that are there ' if several else ''}from: {', '.join(names)}." if names else ""
        return {"question": f"{self.question}{added}{' Separate names by commas.' if several else ''}"}

    def samples(self, split: str) -> Sequence[Sample]:
        base = super().samples(split)
        if not self.shots and self.classes == "all":
            return base
        files = tuple(getattr(self.data, s, "") for s in SPLITS)
        if self.classes != "all" and files not in self._names:  # computed once, because evaluations repeat
            parts = [base if s == split else super(Classification, self).samples(s)
                     for s, file in zip(SPLITS, files, strict=True) if file]
            self._names[files] = recipes.all_classes((s.row for part in parts for s in part), self.class_order)
        return self.chosen(split, [(s.id, recipes.labels_of(s.row)) for s in base], self._names.get(files, ()), base)

    def chosen(self, split: str, entries: Sequence[tuple[str, Sequence[str]]], names: Sequence[str],
               samples: Sequence[Sample]) -> Sequence[Sample]:
        """The `samples` that `task.classes` and `task.shots` select. `entries` has the (id, classes) of each sample.
        `names` has all classes, in the order in which `task.classes` splits them into halves. A sample is made only
        when it is accessed."""
        places = list(range(len(entries)))
        half_of: dict[str, str] = {}
        halves = recipes.halves(names) if self.classes != "all" else {}
        for half, inside in halves.items():
            half_of |= dict.fromkeys(inside, half)
        if halves and any(len(classes) > 1 for _, classes in entries):
            raise DataError(f"task.classes={self.classes} selects half of the classes, but some rows have several "
                            "labels; set task.classes=all")
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
        row = dict(sample.row)
        if row.get("question") == self.placeholders({**row, "question": None})["question"]:
            del row["question"]  # the task's own, with the names of both halves
        if row.get("labels"):
            row["labels"] = [name for name in row["labels"] if name in names]
        return replace(sample, row=self.filled({**row, "half": half}))

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an answer with recipe rlcr: `confidence`, if the answer states one. {} for other recipes."""
        read = self.parse(sample, answer)
        sure = read.get("confidence") if isinstance(read, Mapping) else None
        return {} if sure is None else {"confidence": sure}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split. With task.classes: `accuracy/base`, `accuracy/new` and their harmonic mean `accuracy/h`.
        For answers with a confidence: `ece`, the expected calibration error over ten bins."""
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
