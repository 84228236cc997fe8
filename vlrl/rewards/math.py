"""Mathematical answers: extracts the expression from a text and asks math-verify whether it equals the gold answer.

math-verify (github.com/huggingface/Math-Verify) runs in a separate process for two reasons: its time limits use
signals, which only work in the main thread, and sympy can hang in C code, for example on a tower of powers. The process
is reused for all comparisons, replaced if it hangs or dies, and ended with this process. math-verify compares only qa
answers of type `math`, never boxes, points or labels, some of which it treats as equal although they differ."""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vlrl.errors import ConfigError
from vlrl.rewards.worker import Worker, WorkerEnded

LONGEST = 500  # maximum number of characters of an expression; a longer text is not read as an expression
SECONDS = 5.0
_PATIENCE = 60.0  # seconds added to ten times the CPU limit, within which the process must start and reply
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d{1,15})(?:\.\d{1,15})?", re.ASCII)
_LONE_NUMBER = re.compile(r"(?<![\w.^])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?(?!\w|\.\d)", re.ASCII)
_COMMAND = re.compile(r"\\(?:text|mathrm|mbox|textbf)\s*\{[^{}]*\}|\\[A-Za-z]+")
_FUNCTION = "sin|cos|tan|cot|sec|csc|log|exp|sqrt|arcsin|arccos|arctan|and|max|min"
_WORD = re.compile(r"(?<![A-Za-z])(?:(?:[Ii]s|[Ii]t|of|to|[Ii]n|at|by|as|[Ss]o|an|on|be)(?![A-Za-z])"
                   rf"|(?!(?:{_FUNCTION})(?![A-Za-z]))[A-Za-z]{{3,}})")
_TWO_NUMBERS = re.compile(r"\d\s+[-+]?\s?\d|\d\s*\n", re.ASCII)
_MIXED = re.compile(r"(-?)(\d{1,9})\s+(\d{1,9})/([1-9]\d{0,8})", re.ASCII)
_OPERATOR = re.compile(r"[+*/^!]|(?<=.)-|\\(?:[dt]?frac|sqrt|cdot|times|div)")
_SPACING = re.compile(r"\$|\\(?:left|right|,|;)")
_ROOT = re.compile(r"\u221a\s?(\d{1,30}(?:\.\d{1,30})?|[A-Za-z]|\([^()]{1,200}\)|\{[^{}]{1,200}\})", re.ASCII)
_RAISED = re.compile(r"[\u2070\u00b9\u00b2\u00b3\u2074-\u2079\u207b]{1,30}")
_DIGITS_RAISED = str.maketrans("\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079\u207b", "0123456789-")
_AS_LATEX = str.maketrans({
    "\u2212": "-", "\u00b0": "^\\circ ", "\u00d7": "\\times ", "\u00b7": "\\cdot ", "\u00f7": "\\div ",
    "\u03c0": "\\pi ", "\u221e": "\\infty ", "\u2264": "\\le ", "\u2265": "\\ge ", "\u00bd": "\\frac{1}{2}"})
_WRAPPED = re.compile(r"\\(?:boxed|text|textbf|mathrm|mathbf)\s?\{(.*)\}|\$(.*)\$|\\\((.*)\\\)|\\\[(.*)\\\]",
                      re.DOTALL)
_MARK = re.compile(r"\\boxed\{|[{}]|<\|(?:begin|end)_of_box\|>")


class VerifierError(RuntimeError):
    """math-verify returned no verdict: it raised, timed out, or its process died."""


def boxed(text: str) -> list[str]:
    r"""The stripped contents of every `\boxed{...}` (with balanced braces) and every
    `<|begin_of_box|>...<|end_of_box|>` in a text, in order of appearance. Of nested boxes, only the outermost is
    returned. Unclosed boxes are ignored."""
    spans: list[tuple[int, int]] = []
    opened: list[tuple[int, int]] = []  # how deep, and where each open \\boxed{ begins
    depth, token = 0, -1
    for mark in _MARK.finditer(text):
        start = -1
        if mark[0] == "}":
            depth = max(0, depth - 1)
            start = opened.pop()[1] if opened and opened[-1][0] == depth else -1
        elif mark[0] == "<|end_of_box|>":
            start, token = token, -1
        elif mark[0] == "<|begin_of_box|>":
            token = mark.end()
        else:
            opened += [(depth, mark.end())] if mark[0] != "{" else []
            depth += 1
        if start >= 0:
            while spans and spans[-1][0] > start:
                spans.pop()
            spans.append((start, mark.start()))
    return [text[start:end].strip() for start, end in spans]


def expression(text: str) -> str | None:
    """The mathematical expression in a text, as LaTeX; None if there is none or more than one.

    It is the first of these that applies: the content of the box; the content of the only `$...$`; the whole text if it
    contains no words; the only number in it. "The answer is 12" gives 12, "12 or 13 apples" gives None. An expression
    has at most 500 characters. Unicode characters as in 10\u221a3, 145\u00b0 and x\u00b2 are converted to LaTeX."""
    text = _latex(text)
    for marked in (boxed(text), _dollars(text)):
        if marked:
            return _usable(marked[0]) if len({"".join(m.split()) for m in marked}) == 1 else None
    text = text.strip().rstrip(".")
    if len(text) > 20 * LONGEST:
        return None
    if not _WORD.search(_COMMAND.sub(" ", text)):
        return _usable(text)
    numbers = {n.replace(",", "") for n in _LONE_NUMBER.findall(text)}
    return numbers.pop() if len(numbers) == 1 else None


def repeats(answer: str, gold: str, question: str) -> bool:
    """Whether an answer merely copies an unevaluated expression from the question: "2x+3x" as an answer to "Simplify
    2x+3x". False if the copied text contains no operator or is identical to the gold answer."""
    said, right = ("".join(_SPACING.sub("", _latex(text)).split()) for text in (answer, gold))
    if said == right or not _OPERATOR.search(said) or len(said) > LONGEST:
        return False
    posed = _SPACING.sub(" ", _latex(question))
    for match in re.finditer(r"\s*".join(map(re.escape, said)), posed):
        before, after = posed[:match.start()].rstrip(" ")[-1:], posed[match.end():].lstrip(" ")[:1]
        joined = posed[match.start() - 1:match.start()].isalnum() or posed[match.end():match.end() + 1].isalnum()
        if not joined and not (before and before in "^*/+(-") and not (after and after in "^*/+!(-"):
            return True
    return False


def equal(answer: str | None, gold: str, seconds: float = SECONDS, worked_out: bool = True) -> bool:
    """Whether math-verify finds two expressions equal. An answer of None equals nothing. Two plain numbers are compared
    without math-verify: integers must be equal, other numbers may have a relative error of up to 1e-6.

    With `worked_out`, the answer must not leave more arithmetic undone than the gold answer: "3*4+5" does not equal
    "17", and "10!" does not equal "3628800". The numeric equations in the answer must also be true: "3 = 2" does not
    equal "2". Without `worked_out`, only math-verify decides.

    `seconds` limits the CPU time of math-verify, not the wall-clock time, so that other load on the machine does not
    change the verdict. Raises VerifierError if math-verify fails or exceeds the limit, ConfigError if math-verify is
    not installed."""
    if answer is None or len(answer) > LONGEST or len(gold) > LONGEST:
        return False
    if _NUMBER.fullmatch(answer) and _NUMBER.fullmatch(gold):
        a, b = (float(number.replace(",", "")) for number in (answer, gold))
        return abs(a - b) <= 1e-6 * abs(b) if "." in answer + gold else a == b
    return answer == gold or verified(answer, gold, seconds, worked_out)


def readable(gold: str, seconds: float = SECONDS) -> bool:
    """Whether math-verify can parse a gold answer. Raises the same errors as `equal`."""
    return bool(_NUMBER.fullmatch(gold)) or _verdict(gold, None, seconds)


def verified(answer: str, gold: str, seconds: float = SECONDS, worked_out: bool = True) -> bool:
    """Whether math-verify finds two expressions equal. Unlike `equal`, it also asks math-verify about plain numbers and
    identical texts. The parameters and the errors raised are those of `equal`."""
    return _verdict(gold, answer, seconds, worked_out)


def _verdict(gold: str, answer: str | None, seconds: float, worked_out: bool = True) -> bool:
    verdict = _remembered(gold, answer, seconds, worked_out)
    if isinstance(verdict, str):
        raise VerifierError(verdict)
    return verdict


@functools.lru_cache(maxsize=50_000)
def _remembered(gold: str, answer: str | None, seconds: float, worked_out: bool) -> bool | str:
    """The verdict of math-verify whether an answer equals the gold answer or, with answer=None, whether the gold answer
    can be parsed. If there is no verdict, the reason as a string. Both are cached, so that a comparison hangs only
    once."""
    question = {"gold": gold, "seconds": seconds, "worked_out": worked_out}
    try:
        return _VERIFIER.ask(question | ({} if answer is None else {"answer": answer}))
    except VerifierError as error:
        return str(error)


def require_library() -> None:
    """Raises ConfigError if math-verify is not installed."""
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("answers of rows with answer_type=math are checked by math-verify, which is not installed: "
                          "pip install 'math-verify[antlr4_13_2]', or set answer_type=number or text in these rows")


def _latex(text: str) -> str:
    if text.isascii():
        return text
    text = _ROOT.sub(lambda match: f"\\sqrt{{{match[1].strip('{}()')}}}", text)
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_DIGITS_RAISED)}}}", text)
    return text.translate(_AS_LATEX)


def _paired(text: str) -> bool:
    depth = 0
    for sign in text:
        depth += (sign == "{") - (sign == "}")
        if depth < 0:
            return False
    return depth == 0


def unwrapped(text: str) -> str:
    r"""Removes LaTeX wrappers around an answer: "\boxed{\text{red}}" -> "red"."""
    for _ in range(4):
        match = _WRAPPED.fullmatch(text.strip()) if len(text) <= 2 * LONGEST else None
        inner = next(part for part in match.groups() if part is not None) if match else "$"
        if "$" in inner or not _paired(inner):
            break
        text = inner
    return text


def _dollars(text: str) -> list[str]:
    """The texts between pairs of dollar signs; [] if the number of dollar signs is odd ("costs $5")."""
    parts = text.replace("$$", "$").split("$")
    return [part.strip() for part in parts[1::2]] if len(parts) % 2 else []


def _usable(text: str) -> str | None:
    """The text as an expression for math-verify, with a mixed number as one fraction. None if the text is empty, is too
    long, has unbalanced braces, or contains two adjacent numbers, which math-verify would add."""
    if mixed := _MIXED.fullmatch(text):
        sign, whole, above, below = mixed.groups()
        return f"{sign}{int(whole) * int(below) + int(above)}/{below}"
    if not text or len(text) > LONGEST or _TWO_NUMBERS.search(text) or not _paired(text):
        return None
    return text


class _Verifier:
    """Starts the process that runs math-verify, and sends requests to it."""

    def __init__(self) -> None:
        self.lock, self.worker = threading.Lock(), Worker(_started)

    def ask(self, question: Mapping[str, Any]) -> bool:
        """Sends one request to the process and returns its verdict. May be called from any thread; requests are sent
        one at a time. Raises VerifierError if there is no verdict."""
        patience, text = 10 * question["seconds"] + _PATIENCE, question.get("answer", question["gold"])[:80]
        try:
            with self.lock:
                reply = json.loads(self.worker.ask(json.dumps(question).encode(), lambda: (None, patience)))
        except WorkerEnded:
            raise VerifierError(f"math-verify returned no verdict within {question['seconds']:g} s of CPU time on "
                                f"{text!r}") from None
        if "error" in reply:
            raise VerifierError(f"math-verify failed on {text!r}: {reply['error']}")
        return reply["value"]

    def forget(self) -> None:
        """To be called in a forked child process. Drops the worker process, which belongs to the parent, and replaces
        the lock, which another thread of the parent may have held."""
        self.worker.forget()
        self.__init__()


def _started() -> tuple[Connection, subprocess.Popen[bytes]]:
    """Starts a process that runs math-verify; returns the connection to it and the process. It is not forked, so that
    it shares no threads, locks or devices with this process. Its hash seed is fixed, because sympy's results depend
    on the seed. It runs in a session of its own, so that Ctrl-C does not reach it."""
    require_library()
    mine, other = socket.socketpair()
    with other:
        process = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("_math_worker.py"))], stdin=other.fileno(),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            env={**os.environ, "PYTHONHASHSEED": "0"})
    return Connection(mine.detach()), process


_VERIFIER = _Verifier()
atexit.register(lambda: _VERIFIER.worker.kill())
os.register_at_fork(after_in_child=lambda: _VERIFIER.forget())
