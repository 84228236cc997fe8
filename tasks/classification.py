"""Classification: name what the image shows, with or without thinking first (CLS-RL, 2503.16188).

`task.thinking` chooses the template: `no_thinking` (the whole answer must be the label, exactly), `thinking` (the
<answer> tag must hold it) or `both` (one drawn per visit). Rows: `image`, `label`, and if wanted `labels` (the names to
choose from), `synonyms` (further right answers) and `question`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vlrl.data import sample_from_row
from vlrl.errors import DataError
from vlrl.rewards.text import clean_label, extract_tag, same_label, think_answer_format
from vlrl.task import Task
from vlrl.types import Answer, Parts, Sample


class Classification(Task):
    """One label per image. Parts: `accuracy` 0 or 1, `format` 0 or 1."""

    thinking: Literal["thinking", "no_thinking", "both"] = "no_thinking"
    question: str = "What does the image show?"
    """Asked where the row has no `question`; the row's `labels` are added."""
    direct: str = "{question}\nPlease directly output the answer."
    """Template without thinking."""
    reasoned: str = ("{question}\nPlease output the thinking process in <think> </think> and final answer in "
                     "<answer> </answer> tags.")
    """Template with thinking; a template that holds <think> is scored as thinking."""
    rewards = {"accuracy": 1.0, "format": 0.1}

    @property
    def templates(self) -> tuple[str, ...]:
        if self.prompts or self.prompt:
            return super().templates
        return {"thinking": (self.reasoned,), "no_thinking": (self.direct,), "both": (self.direct, self.reasoned)}[
            self.thinking]

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        label = row.get("label")
        if isinstance(label, bool) or not isinstance(label, (str, int)) or label == "":
            raise DataError(f"row {row.get('id')!r}: label={label!r} must be a text or a whole number (lists of labels "
                            "are not supported yet)")
        names = {key: _texts(row, key) for key in ("labels", "synonyms") if row.get(key) is not None}
        question = row.get("question") or self.question
        if names.get("labels") and not row.get("question"):
            question += f" Choose from: {', '.join(names['labels'])}."
        return sample_from_row({**row, **names, "label": str(label), "question": question}, root)

    def score(self, sample: Sample, answer: Answer) -> Parts:
        right = [sample["label"], *(sample.get("synonyms") or ())]
        if self.thinks(sample):
            given = extract_tag(answer.text, "answer", "last")
            accuracy = given is not None and any(same_label(given, name) for name in right)
            return {"accuracy": float(accuracy), "format": think_answer_format(answer.text)}
        return {"accuracy": float(answer.text in right), "format": float(self._is_plain(sample, answer.text))}

    def thinks(self, sample: Sample) -> bool:
        """Whether this visit's template asks for thinking."""
        return "<think>" in (sample.prompt or self.templates[0])

    def _is_plain(self, sample: Sample, text: str) -> bool:
        """One of the names to choose from; where the row lists none, one line without tags."""
        names = sample.get("labels")
        if names:
            return text in (*names, *(sample.get("synonyms") or ()))
        return bool(text.strip()) and not any(mark in text for mark in ("\n", "<think>", "<answer>"))

    def oracle(self, sample: Sample) -> str:
        label = sample["label"]
        return f"<think>It looks like {label}.</think><answer>{label}</answer>" if self.thinks(sample) else label

    def parse(self, sample: Sample, answer: Answer) -> str:
        return clean_label(answer.final)[:200]

    def target(self, sample: Sample) -> str:
        return sample["label"]


def _texts(row: Mapping[str, Any], key: str) -> list[str]:
    values = row[key]
    if not isinstance(values, list) or not all(isinstance(v, (str, int)) for v in values):
        raise DataError(f"row {row.get('id')!r}: {key}={values!r} must be a list of texts")
    return [str(v) for v in values]
