"""The script of the process that runs math-verify. math.py starts it and exchanges JSON requests and replies with it
over the socket at its standard input.

A request that exceeds its limit of CPU seconds ends the process. The kernel enforces this limit, so neither C code nor
an exception handler in a library can get around it. The process also ends when its standard input is closed."""

import importlib.util
import json
import math
import os
import re
import signal
from multiprocessing.connection import Connection

MEMORY = 4 * 2**30  # maximum address space of the process in bytes; an expression that needs more memory fails
MOST_DIGITS = 5000
"""An answer whose value may have more digits than this and more digits than the gold answer counts as unequal, because
evaluating a tower of powers would take all the time."""
_DIVIDES = re.compile(r"\\[dt]?(?:frac|binom)|\\div|\\gcd|\\lcm|\d\s*[/:]\s*\d")


def expression(text, parse, config):
    r"""Parses all of `text` as one expression, by enclosing it in \boxed{}. `parse` and `config` are math-verify's
    function and its extraction settings. Returns a list that starts with the sympy expression; [] if parsing fails."""
    return parse(f"\\boxed{{{text}}}", extraction_config=config, fallback_mode="no_fallback", parsing_timeout=None)


def answer(question, parse, verify, config):
    """The reply to one request (`question`): {"value": bool}, or {"error": reason} if math-verify raises.

    Without an "answer" in the request, the value says whether the gold answer can be parsed. With an "answer", it says
    whether that answer equals the gold answer. `parse`, `verify` and `config` belong to math-verify."""
    try:
        gold = expression(question["gold"], parse, config)
        if "answer" not in question:
            return {"value": bool(gold)}
        given = expression(question["answer"], parse, config)
        if not gold or not given or digits(given[0]) > max(MOST_DIGITS, digits(gold[0])):
            return {"value": False}
        same = verify(gold, given, timeout_seconds=None, raise_on_error=True)
        if same and question["worked_out"]:
            same = all(map(holds, parts(given[0]))) and work_left(question["answer"], parse, config) <= work_left(
                question["gold"], parse, config)
        return {"value": bool(same)}
    except Exception as error:  # the library may raise anything on hostile text
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


def parts(expr):
    """Yields a sympy expression and, recursively, all its subexpressions."""
    yield expr
    for arg in getattr(expr, "args", ()):
        yield from parts(arg)


def digits(node):
    """An upper bound of log10(|value|) of an expression, with every symbol counted as 10. Infinite if the bound exceeds
    the range of floats."""
    if _is_number(node):
        return math.log10(int(abs(node)) + 1) if node.is_finite else 0.0
    known = [digits(arg) for arg in getattr(node, "args", ())] or [1.0]
    name = type(node).__name__
    if name in ("Pow", "exp", "factorial"):
        base = max(1.0, known[0]) if name != "exp" else 1.0
        return base * 10 ** known[-1] if known[-1] < 300 else math.inf
    return sum(known)


def holds(part):
    """False for an equation between two unequal numbers, such as "3 = 2"; True for every other subexpression."""
    return type(part).__name__ != "Equality" or bool(part.free_symbols) or abs((part.lhs - part.rhs).evalf()) < 1e-6


def work_left(text, parse, config):
    """The number of computations that a text leaves undone after its last equals sign. Counted are sums and products of
    several numbers, and single numbers in an unevaluated form such as 10!, 24/2 or sqrt(4). `parse` and `config` are
    those of `expression`."""
    text = last_side(text)
    (expr, *_) = expression(text, parse, config) or [None]
    if getattr(expr, "is_Integer", False) and _DIVIDES.search(text):
        return 1
    return sum(map(is_work, unwritten(expr)))


def last_side(text):
    """The text after the last equals sign that is not inside brackets; the whole text if there is none."""
    depth, start = 0, 0
    for at, sign in enumerate(text):
        depth += (sign in "{(") - (sign in ")}")
        start = at + 1 if sign == "=" and depth == 0 and text[at - 1:at] not in ("<", ">", "!", ":") else start
    return text[start:]


def unwritten(node):
    """Yields an expression and, recursively, its subexpressions, except numbers in plain notation (see is_written) and
    everything inside such a number."""
    if hasattr(node, "free_symbols") and hasattr(node, "func") and not is_written(node):
        yield node
        for arg in node.args:
            yield from unwritten(arg)


def is_written(node):
    """Whether a subexpression is a number in plain notation, such as 12, 1.5, 1/2, 50 % or 3 * 10^5."""
    if node.is_Mul:
        others = [arg for arg in node.args if not _is_number(arg)]
        return len(_numbers(node)) == len(others) == 1 and (is_percent(others[0]) or is_power_of_ten(others[0]))
    return _is_number(node) or is_power_of_ten(node) or (node.is_Pow and _is_number(node.args[0])
                                                         and node.args[1] == -1)


def is_percent(node):
    return type(node).__name__ == "UnevaluatedExpr" and node.args[0] * 100 == 1


def is_power_of_ten(node):
    return node.is_Pow and node.args[0] == 10 and node.args[1].is_Integer


def is_work(node):
    """Whether a subexpression still has to be computed: a sum or product of several numbers, or an unevaluated form of
    a single number."""
    if (node.is_Add or node.is_Mul) and len(_numbers(node)) > 1:
        return True
    return not node.free_symbols and _is_number(node.doit())


def _is_number(node):
    return bool(getattr(node, "is_Number", False))


def _numbers(node):
    """The numeric terms of a sum, or the numeric factors of a product. A factor of -1 is left out, because it only
    gives the sign."""
    return [arg for arg in node.args if _is_number(arg) and arg != -1]


def limited(seconds):
    """Ends this process once it has used this many CPU seconds from now on; 0 removes the limit."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF, which ends a process


def _sibling(name):
    """Imports a module from a file in this folder. The folder is not on sys.path, because its math.py would shadow the
    standard library's math module."""
    spec = importlib.util.spec_from_file_location(name, os.path.join(os.path.dirname(__file__), f"{name}.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main():
    """Answers requests on the connection at standard input until that connection closes."""
    connection = Connection(os.dup(0))
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    except (ImportError, ValueError, OSError):  # no such limit on this system
        pass
    from math_verify import LatexExtractionConfig, parse, verify

    config = (LatexExtractionConfig(boxed_match_priority=0),)

    def reply(request):
        question = json.loads(request)
        limited(question["seconds"])
        found = answer(question, parse, verify, config)
        limited(0)
        return json.dumps(found).encode()

    _sibling("_wire").serve(connection, reply)


if __name__ == "__main__":
    main()
