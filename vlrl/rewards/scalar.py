"""Numbers and booleans from foreign code: Python's own, numpy's, Decimal, Fraction, and arrays and tensors without a
dimension, converted the same way everywhere."""

from __future__ import annotations

import math
from typing import Any


def finite_number(value: Any) -> tuple[float | None, str | None]:
    """(finite float, None); (None, None) for None; (None, description) for anything else."""
    if value is None:
        return None, None
    try:
        if isinstance(value, (str, bytes, bytearray)) or getattr(value, "ndim", 0):
            raise TypeError
        number = float(value)
    except Exception:  # TypeError, OverflowError of an int like 10**400, anything from a __float__
        return None, f"was {displayed(value)}, no number"
    return (number, None) if math.isfinite(number) else (None, f"was {number}")


def truth_value(value: Any) -> bool | None:
    """A boolean, which 0 and 1 count as; None for anything else, including a text such as "no"."""
    number, _ = finite_number(value)
    return bool(number) if number in (0.0, 1.0) else None


def displayed(value: Any) -> str:
    """A short text of a value for a message."""
    try:
        return f"{repr(value)[:60]} ({type(value).__name__})"
    except Exception:  # ValueError of an int with thousands of digits
        return f"a {type(value).__name__}"
