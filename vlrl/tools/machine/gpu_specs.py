"""Known GPU models, with memory and speed from their data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    """One GPU model, with its memory and speed."""

    name: str
    tflops: float  # Dense bfloat16 TFLOP/s
    gib: float  # memory in GiB; the largest size if the model is sold in several sizes


CARDS = tuple(Card(*values) for values in (
    ("H100 PCIe", 756, 80), ("H100 NVL", 835, 94), ("H100", 989, 80), ("GH200", 989, 96), ("H200", 989, 141),
    ("H800", 989, 80), ("H20", 148, 96), ("GB200", 2500, 186), ("B200", 2250, 180), ("A100", 312, 80),
    ("A800", 312, 80), ("A40", 150, 48), ("A30", 165, 24), ("A10G", 70, 24), ("A10", 125, 24), ("L40S", 362, 48),
    ("L40", 181, 48), ("L4", 121, 24), ("RTX 6000 Ada", 364, 48), ("RTX A6000", 155, 48), ("RTX 4090", 165, 24),
    ("RTX 3090", 71, 24)))
"""Known GPU models. If one name is part of another name, the longer name comes first."""


def card_of(name: str) -> Card | None:
    """The first GPU model in CARDS whose name occurs in `name` (such as "NVIDIA H100 80GB HBM3" or "rtx4090"); None if
    there is no such model."""
    def matches(card: Card) -> bool:
        words = r"[\s_-]*".join(map(re.escape, card.name.split()))
        return re.search(words + r"(?!\d)", name, re.IGNORECASE) is not None  # an RTX A4000 is not an A40

    return next(filter(matches, CARDS), None)
