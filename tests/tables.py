"""Tests that go over a table of rows in one item: pytest takes 8 ms for each item, of which there were 11,000."""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each(names: str, rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As `pytest.mark.parametrize`, in one test: it is called with each row, whose values have these names."""
    keys = names.split()

    def over(test: Callable[..., None]) -> Callable[..., None]:
        fixtures = [name for name in inspect.signature(test).parameters if name not in keys]
        table = [row if len(keys) > 1 else (row,) for row in rows]
        return over_rows(
            lambda *row, **given: test(**given, **dict(zip(keys, row, strict=True))), table, fixtures, test)
    return over


def by_hand(function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], values: int = 1, turned: bool = False,
            **near: float) -> Callable[..., None]:
    """A test that `function` gives the last value of each row (the last `values`, as a tuple) for those before it;
    `turned`: for these in the other order too. Numbers may differ by rounding, or as `pytest.approx` is told. Further
    parameters of the function are fixtures."""
    def one(*row: Any, **fixtures: Any) -> None:
        given, wanted = row[:-values], row[-values:]
        for order in (given, given[::-1]) if turned else (given,):
            found = function(*order, **fixtures) if values > 1 else (function(*order, **fixtures),)
            same = len(found) == values and all(is_equal(a, b, near) for a, b in zip(found, wanted, strict=True))
            assert same, f"{found!r} instead of {wanted!r}"
    return over_rows(one, rows, fixtures_of(function, rows, values))


def refused(error: type[Exception], function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], start: str = "",
            plain: bool = False) -> Callable[..., None]:
    """A test that `function` raises this error for each row but its last value, with a message in which that is found
    (after `start`): a pattern, or plain text. Further parameters of the function are fixtures."""
    def one(*row: Any, **fixtures: Any) -> None:
        *given, words = row
        with pytest.raises(error, match=start + (re.escape(words) if plain else words)):
            function(*given, **fixtures)
    return over_rows(one, rows, fixtures_of(function, rows, 1))


def over_rows(one: Callable[..., None], rows: Sequence[Any], fixtures: Iterable[str], like: Any = None
              ) -> Callable[..., None]:
    """A test (with name and marks of `like`) that calls `one` with each row and with the fixtures of these names, which
    all rows share; an error names its row."""
    def whole(**given: Any) -> None:
        for number, row in enumerate(rows):
            try:
                one(*row, **given)
            except BaseException as error:
                error.add_note(f"row {number}: {ascii(row)[:2000]}")
                raise
    functools.update_wrapper(whole, like)
    whole.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in fixtures])
    return whole


def fixtures_of(function: Callable[..., Any], rows: Sequence[tuple[Any, ...]], values: int) -> tuple[str, ...]:
    """Names of the parameters of a function that come behind those which rows give."""
    code = getattr(function, "__code__", None)
    return code.co_varnames[len(rows[0]) - values:code.co_argcount] if code and not function.__defaults__ else ()


def is_equal(found: Any, wanted: Any, near: dict[str, float]) -> bool:
    if isinstance(wanted, bool):
        return found is wanted
    numbers = wanted if isinstance(wanted, (list, tuple)) else [wanted]
    return found == wanted or (all(isinstance(n, (int, float)) for n in numbers) and
                               found == pytest.approx(wanted, **near))
