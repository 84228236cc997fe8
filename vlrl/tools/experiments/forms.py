"""Reduces answers to their form (the text with words and numbers replaced by placeholders), and counts the forms in
each evaluation of a run. Does not import torch.

    for point in forms_over_steps(RunFolder("runs/quickstart")):
        print(point.step, point.entropy, point.forms.most_common(3))

If a policy collapses to one of the forms of its base model, the entropy over forms falls (Echo Chamber, arXiv
2504.07912). If a form becomes more frequent while the held-out metric does not rise, look at answers of this form."""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass

from vlrl.errors import RunError
from vlrl.store import RunFolder

_LONGEST = 20_000  # number of characters of an answer that are read
_SHOWN = 120
_TOKENS = re.compile(r"</?[A-Za-z_][\w-]{0,40}>|<\|[^|<>]{0,40}\|>|[-+]?\d+(?:\.\d+)?|[^\W\d_]\w*(?:['’-]\w+)*")
_SENTENCE = re.compile(r"a(?:[\s,.;!?]+[a0])+")
_SPACE = re.compile(r"\s+")


def form(text: str) -> str:
    """Returns the form of an answer: tags and punctuation are kept, a number becomes `0`, a sequence of words
    (including numbers between words) becomes `a`. Cut after 120 characters. Takes linear time and never raises.

    >>> form("<think>It is left of 2 cars.</think><answer>[190, 45.5]</answer>")
    '<think>a.</think><answer>[0, 0]</answer>'"""
    short = _TOKENS.sub(_kind, text[:_LONGEST])
    marked = re.split(r"(</?[A-Za-z_][\w-]{0,40}>)", short)
    marked[::2] = [_SENTENCE.sub("a", piece) for piece in marked[::2]]
    normalized = _SPACE.sub(" ", "".join(marked)).strip()
    return normalized if len(normalized) <= _SHOWN else normalized[:_SHOWN - 3] + "..."


def _kind(token: re.Match[str]) -> str:
    first = token[0][0]
    return token[0] if first == "<" else "0" if first in "+-" or first.isdecimal() else "a"


@dataclass(frozen=True)
class Forms:
    """The forms of the answers in one evaluation, with their counts."""

    step: int  # number of steps that the evaluated weights had completed
    forms: Counter[str]

    @property
    def answers(self) -> int:
        """Number of answers in the evaluation."""
        return self.forms.total()

    @property
    def entropy(self) -> float:
        """Entropy over forms in nats; 0 if all answers have the same form."""
        shares = [count / self.answers for count in self.forms.values()]
        return -sum(share * math.log(share) for share in shares) + 0.0

    def share(self, name: str) -> float:
        """The share of answers with the form `name`, in [0, 1]."""
        return self.forms[name] / self.answers


def forms_over_steps(run: RunFolder, split: str | None = None) -> list[Forms]:
    """Returns the forms of the answers in each evaluation of `split`, in the order of the steps. The default split is
    heldout or, if heldout was not evaluated, the alphabetically first evaluated split.

    Raises RunError if no answers of the split are stored, or if some of the answers cannot be read."""
    files = [(steps, name) for _, steps, name in run.rollout_files("eval-rollouts") if name]
    splits = sorted({name for _, name in files})
    split = split or next((name for name in ("heldout", *splits) if name in splits), "heldout")
    forms = []
    for step in sorted({step for steps, name in files if name == split for step in steps}):
        texts = run.rollouts(step, split=split, columns=["completion"]).column("completion").to_pylist()
        if texts:
            forms.append(Forms(step, Counter(form(text or "") for text in texts)))
    if run.notes:
        raise RunError(f"{run.path}: {run.notes[0]}. Without the answers that cannot be read, the share of "
                       "each answer form would be wrong")
    if not forms:
        raise RunError(f"{str(run.path)!r} holds no evaluated answers of split {split!r} (eval-rollouts/). "
                       f"Evaluated splits: {', '.join(splits) or 'none'}. Name a run folder such as runs/quickstart; a "
                       "run stores its answers if store.rollouts=true and eval.samples is above 0")
    return forms


def most_frequent(points: list[Forms], most: int = 6) -> list[str]:
    """The `most` most frequent forms, the most frequent first. Forms are compared by their largest share of the answers
    in any evaluation. `points` is the result of forms_over_steps."""
    best: Counter[str] = Counter()
    for point in points:
        for name in point.forms:
            best[name] = max(best[name], round(point.share(name) * 1_000_000))
    return [name for name, _ in best.most_common(most)]
