"""Checks after a sync that an engine samples from the policy: trainer and engine must assign equal log-probabilities to
a fixed answer.

The check is cheap: one prompt with an image and a few answer tokens (the probe). If it fails, the weights of trainer
and engine are compared by name, and the error names the parameter that differs. In the first two checks all weights are
compared in any case, because a parameter that the sync omits may change too little to affect a log-probability."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from PIL import Image, ImageDraw

from vlrl.errors import TrainingError
from vlrl.models import packing
from vlrl.models.policy import Policy
from vlrl.models.processing import Encoder
from vlrl.task import Task
from vlrl.types import Media, Observation, Prompt, Sample

Read = Callable[[Prompt, np.ndarray], Sequence[float] | np.ndarray]
"""(prompt, token ids of an answer) -> the engine's [T] log-probabilities at temperature 1 without banned tokens."""
Pairs = Iterable[tuple[str, torch.Tensor, torch.Tensor]]
"""Weights to compare: (name, the policy's tensor, the engine's tensor)."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
_ANSWER = "The circle is red."
WHOLE = 2  # all weights are compared in this number of first checks
_ULPS = 4  # allowed difference of a weight, in units in the last place of the tensor's largest absolute value
_SLICE = 2**22  # number of elements that are compared at once, because an engine leaves little memory on its device


class ProbeTask(Task):
    """The task with which the prompt of the probe is rendered."""

    prompt = "What is in this image?"


class SyncCheck:
    """Compares the log-probabilities of a fixed answer (the probe) in trainer and engine.

    prompt: a prompt with an image. answer: token ids [T]. tolerance: largest allowed difference of a log-probability
    (engine.proof); None = the default for the compute dtype (`dtype`, or else the policy's). text: the same prompt
    without the image. If weights cannot be compared, the answer's log-probabilities after `text` show whether the error
    is in the vision tower or in the language model."""

    def __init__(self, prompt: Prompt, answer: np.ndarray, tolerance: float | None = None, text: Prompt | None = None,
                 dtype: torch.dtype | None = None):
        self.prompt, self.answer, self.tolerance, self.text, self.dtype = prompt, answer, tolerance, text, dtype
        self.checks = 0

    @classmethod
    def of(cls, encode: Encoder, tolerance: float | None = None, dtype: torch.dtype | None = None,
           episodes: bool = False) -> SyncCheck:
        """Creates a check with a generated image and a fixed answer, both encoded by `encode`. With `episodes` the
        prompt has a second turn with another image. For `tolerance` and `dtype` see SyncCheck."""
        image = Image.new("RGB", (160, 120), "white")
        ImageDraw.Draw(image).ellipse((40, 20, 100, 80), fill="red")
        task = ProbeTask()
        prompt, answer = encode(task, Sample(id="proof", media=(Media(source=image),))), encode.answer_ids(_ANSWER)
        if episodes:
            later = encode.observation(Observation("And in this one?", [Media(source=image.rotate(90, expand=True))]),
                                       "proof")
            prompt = packing.join_prompts(prompt.followed_by(answer), later)
        return cls(prompt, answer, tolerance, encode(task, Sample(id="proof text")), dtype)

    def allowed(self, policy: Policy) -> float:
        """The largest allowed difference of a log-probability."""
        return TOLERANCE[self.dtype or policy.dtype] if self.tolerance is None else self.tolerance

    def check(self, policy: Policy, read: Read, parameters: Callable[[], Pairs] | None = None) -> float:
        """Compares the log-probabilities of the fixed answer in the trainer and in the engine (`read`), and returns the
        largest difference. `parameters()` yields the weights of both; without `parameters` the error cannot name a
        weight. Raises TrainingError if a log-probability differs too much or, in the first checks, if any weight
        differs. A collective call under FSDP."""
        self.checks += 1
        difference = self._difference(policy, read, self.prompt)
        if not difference <= self.allowed(policy):  # nan too
            raise TrainingError(self._explained(policy, read, parameters, difference))
        if parameters is not None and self.checks <= WHOLE:
            _, differences = counted_differences(parameters())
            if differences:
                raise TrainingError("the engine does not hold the policy's weights: "
                                    f"{describe_differences(differences)}. The log-probabilities of the probe differ "
                                    f"by only {difference:.1e} so far. {ADVICE}")
        return difference

    def _difference(self, policy: Policy, read: Read, prompt: Prompt) -> float:
        theirs = np.asarray(read(prompt, self.answer), dtype=np.float64)
        gaps = np.abs(trainer_logprobs(policy, prompt, self.answer) - theirs)
        return float(gaps.max()) if np.isfinite(gaps).all() else math.inf

    def _explained(self, policy: Policy, read: Read, parameters: Callable[[], Pairs] | None, difference: float) -> str:
        allowed = self.allowed(policy)
        message = (f"the engine does not compute the trainer's log-probabilities after a sync: for a fixed answer "
                   f"they differ by {difference:.2g}, more than {allowed:g}")
        compared, differences = counted_differences(parameters() if parameters else ())
        if compared:
            return f"{message}. {cause_of_mismatch(compared, differences)}"
        if self.text is not None:
            alike = self._difference(policy, read, self.text) <= allowed
            message += ("; without the image they agree, so the cause is in the vision tower or the merger" if alike
                        else "; without the image they differ too, so the cause is in the language model")
        return f"{message}. The engine is in another process, so its weights are not compared by name. {ADVICE}"


TOLERATE = "If such a difference is expected, raise engine.proof."
ADVICE = (f"The sync omitted a weight or transferred it incorrectly. Set engine.name=hf to continue without this "
          f"engine. {TOLERATE}")


def cause_of_mismatch(compared: int, differences: Sequence[tuple[str, float, float]]) -> str:
    """Returns the second part of an error message about unequal log-probabilities. It names the weights that differ, or
    says that all `compared` weights are equal; the remedy follows. differences: (name, largest absolute difference,
    largest absolute value) of each tensor that differs."""
    if differences:
        return f"{describe_differences(differences)}. {ADVICE}"
    return (f"All {compared} weights that could be compared are equal. So the engine computes differently with these "
            "weights (in engine.dtype, attention or image size), or a weight that could not be compared differs. "
            f"{TOLERATE}")


@torch.no_grad()
def trainer_logprobs(policy: Policy, prompt: Prompt, answer: np.ndarray) -> np.ndarray:
    """[T] log-probabilities of an answer, computed by the trainer at temperature 1 without banned tokens."""
    free = copy.copy(policy)
    free.banned = policy.banned[:0]
    (batch,) = packing.pack(packing.pieces_of([prompt], [answer], 10**9), 10**9, policy.layout("shared"))
    with policy.evaluating():
        return free.logprobs(batch, 1.0).logprobs.double().cpu().numpy()


def counted_differences(pairs: Pairs) -> tuple[int, list[tuple[str, float, float]]]:
    """Compares pairs of tensors. Returns the number of pairs, and (name, largest absolute difference, largest absolute
    value) of each tensor that differs, worst first. Tensors are compared in the engine's dtype and may differ by a
    few units in the last place, because merging an adapter rounds."""
    out: list[tuple[str, float, float]] = []
    count = 0
    for name, ours, theirs in pairs:
        size = gap = 0.0
        slices = zip(ours.detach().flatten().split(_SLICE), theirs.detach().flatten().split(_SLICE), strict=True)
        for own, other in slices if ours.numel() else ():
            own = own.to(device=theirs.device, dtype=theirs.dtype)
            away = (own.double() - other.double()).abs()
            size = max(size, float(own.abs().max()))
            gap = max(gap, float(away.max()) if away.isfinite().all() else math.inf)
        if gap > _ULPS * torch.finfo(theirs.dtype).eps * size:
            out.append((name, gap, size))
        count += 1
    return count, sorted(out, key=lambda entry: entry[1] / entry[2] if entry[2] else math.inf, reverse=True)


def describe_differences(differences: Sequence[tuple[str, float, float]]) -> str:
    """Returns a text for an error message about the first of `differences`, a result of `counted_differences`."""
    shown = ", ".join(f"{name} differs by {gap:.2g} (its largest number is {size:.2g})"
                      for name, gap, size in differences[:3])
    more = len(differences) - 3
    return f"{shown} and {more} more" if more > 0 else shown
