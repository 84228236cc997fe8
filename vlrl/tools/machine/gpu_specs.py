"""GPUs by name: what their makers' data sheets promise."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Card:
    """One model of GPU."""

    name: str
    tflops: float
    """Dense bfloat16 TFLOP/s."""
    bandwidth: float
    """Memory bandwidth in GB/s."""
    gib: float
    """Memory; of cards that come in several sizes the largest."""


CARDS = tuple(Card(*values) for values in (
    ("H100 PCIe", 756, 2000, 80), ("H100 NVL", 835, 3900, 94), ("H100", 989, 3350, 80), ("GH200", 989, 4000, 96),
    ("H200", 989, 4800, 141), ("H800", 989, 3350, 80), ("H20", 148, 4000, 96), ("GB200", 2500, 8000, 186),
    ("B200", 2250, 8000, 180), ("A100", 312, 2039, 80), ("A800", 312, 2039, 80), ("A40", 150, 696, 48),
    ("A30", 165, 933, 24), ("A10G", 70, 600, 24), ("A10", 125, 600, 24), ("L40S", 362, 864, 48), ("L40", 181, 864, 48),
    ("L4", 121, 300, 24), ("RTX 6000 Ada", 364, 960, 48), ("RTX A6000", 155, 768, 48), ("RTX 4090", 165, 1008, 24),
    ("RTX 3090", 71, 936, 24)))
"""Longer names first where one is part of another."""


def card_of(name: str) -> Card | None:
    """Returns the card whose name is part of `name`, e.g. of "NVIDIA H100 80GB HBM3" or "rtx4090"; None for others."""
    return next((card for card in CARDS if _pattern(card.name).search(name)), None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    """Returns the words of a name, with or without spaces, and no longer number: an RTX A4000 is no A40."""
    return re.compile(r"[\s_-]*".join(map(re.escape, name.split())) + r"(?!\d)", re.IGNORECASE)
