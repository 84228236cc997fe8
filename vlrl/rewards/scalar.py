"""Converts numbers and booleans that task code returns to float and bool, by the same rules everywhere. Such values may
be of the types of Python and numpy, Decimal, Fraction, or arrays and tensors without a dimension."""

from __future__ import annotations

import math
from typing import Any


def finite_number(value: Any) -> tuple[float | None, str | None]:
    """Returns (float, None) for a finite number, (None, None) for None, and (None, a description of the value) for
    anything else."""
    if value is None:
        return None, None
    try:
        if isinstance(value, (str, bytes, bytearray)) or getattr(value, "ndim", 0):
            raise TypeError
        number = float(value)
    except Exception:  # TypeError, OverflowError of an int like 10**400, anything from a __float__
        return None, f"was {displayed(value)}, which is not a number"
    return (number, None) if math.isfinite(number) else (None, f"was {number}")


def truth_value(value: Any) -> bool | None:
    """Converts a boolean, or a number that equals 0 or 1, to bool; None for anything else, including a string such as
    "no"."""
    number, _ = finite_number(value)
    return bool(number) if number in (0.0, 1.0) else None


def displayed(value: Any) -> str:
    """A short form of a value for error messages: its repr, cut to 60 characters, and its type."""
    try:
        return f"{repr(value)[:60]} ({type(value).__name__})"
    except Exception:  # ValueError of an int with thousands of digits
        return f"a {type(value).__name__}"
