"""Numbers and truth values as others' code gives them: Python's own, numpy's, Decimal, Fraction, arrays and tensors
without a dimension. What is a reward part in one place is one in all."""

from __future__ import annotations

import math
from typing import Any


def finite_number(value: Any) -> tuple[float | None, str | None]:
    """Returns a finite float, or None for None; else None and what the value was."""
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
    """Returns a truth value, which 0 and 1 are too; None for anything else, a text such as "no" among it."""
    number, _ = finite_number(value)
    return bool(number) if number in (0.0, 1.0) else None


def displayed(value: Any) -> str:
    """Returns a value as it may stand in a message."""
    try:
        return f"{repr(value)[:60]} ({type(value).__name__})"
    except Exception:  # ValueError of an int with thousands of digits
        return f"a {type(value).__name__}"
