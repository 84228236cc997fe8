"""Mathematical answers by hand, and the verifier's process: hangs, deaths, threads, forks."""

import contextlib
import os
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.errors import ConfigError
from vlrl.rewards import math

TOWER = "9^{9^{9^{9}}}"


@pytest.fixture
def fresh(monkeypatch):
    """A verifier of its own, and nothing remembered."""
    worker = math._Worker()
    monkeypatch.setattr(math, "_WORKER", worker)
    math._remembered.cache_clear()
    yield worker
    worker.stop()
    math._remembered.cache_clear()


# --- texts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "expected"), [
    ("\\boxed{12}", ["12"]), ("so \\boxed{\\frac{1}{2}}.", ["\\frac{1}{2}"]), ("\\boxed{1} \\boxed{2}", ["1", "2"]),
    ("\\boxed{\\boxed{3}}", ["\\boxed{3}"]), ("\\boxed{ \\boxed{3}", ["3"]), ("\\boxed{3", []), ("}\\boxed{3}", ["3"]),
    ("{\\boxed{3}", ["3"]), ("<|begin_of_box|> 3 <|end_of_box|>", ["3"]), ("<|begin_of_box|>3", []),
    ("<|begin_of_box|>\\boxed{3}<|end_of_box|>", ["\\boxed{3}"]), ("<|end_of_box|>", []), ("\\boxed{}", [""]), ("", []),
])
def test_boxed(text, expected):
    assert math.boxed(text) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("12", "12"), (" 12. ", "12"), ("The answer is 12.", "12"), ("about 1,234 apples", "1234"), ("3 1/2", "(3+1/2)"),
    ("-3 1/2", "-(3+1/2)"), ("x = 3", "x = 3"), ("2\\pi \\text{ metres}", "2\\pi \\text{ metres}"), ("$x=3$", "x=3"),
    ("so $3$, that is $3$", "3"), ("\\boxed{3} and \\boxed{ 3 }", "3"), ("it costs $5 only", "5"), ("1/2 of it", "1/2"),
    ("between $3$ and $4$", None), ("\\boxed{3} or \\boxed{4}", None), ("3 of the 5 apples", None), ("12 13", None),
    ("it is 12", "12"), ("x = 1\ny = 2", None),
    ("three", None), ("words without any value", None), ("{1", None), ("1}{", None), ("", None),
    ("\\boxed{}", None), ("x" * 501, None), ("1+" * 251, None), ("a word " * 2000 + "12", None), ("٣", "٣"),
])
def test_expression(text, expected):
    assert math.expression(text) == expected


@pytest.mark.parametrize("piece", ["\\boxed{", "<|begin_of_box|>", "{", "}", "$", "\\text{", "1/", "1.", "1,", "1", " ",
                                   "\\", "a", "ab1 ", "\\boxed{<|begin_of_box|>}"])
def test_long_texts_take_little_time(piece):
    start = time.process_time()
    math.expression(piece * (100_000 // len(piece)))
    assert time.process_time() - start < 1


@given(st.text() | st.lists(st.sampled_from(["\\boxed{", "}", "{", "$", "1", "/", " ", "x", "=", "<|begin_of_box|>",
                                             "<|end_of_box|>", "the", ".", ",", "-", "\ud800"])).map("".join))
def test_no_text_raises(text):
    found = math.expression(text)
    assert found is None or 0 < len(found) <= math.LONGEST + 2


# --- verdicts ---------------------------------------------------------------------------------------------------------


def test_a_hang_is_an_error_once_and_the_next_question_is_answered(monkeypatch):
    with pytest.raises(math.VerifierError, match=r"no verdict within 0\.3 s of CPU time on '9\^"):
        math.equal(TOWER, "\\frac{1}{2}", 0.3)
    assert math.equal("2/4", "\\frac{1}{2}") is True
    monkeypatch.setattr(math._WORKER, "ask", lambda _question: pytest.fail("what hung is asked again"))
    with pytest.raises(math.VerifierError, match="no verdict"):
        math.equal(TOWER, "\\frac{1}{2}", 0.3)


@pytest.mark.parametrize(("answer", "gold", "expected"), [
    ("12", "12", True), ("12.0", "12", True), ("112", "12", False), ("1,200", "1200", True),
    ("0.3333333", "0.3333334", True), ("1000001", "1000000", False), ("0.0000001", "0", False), ("0.5", "1/2", True),
    ("\\frac{1}{2}", "0.5", True), ("x=12", "12", True), ("12,13,14", "12", False), ("12 or 13", "12", False),
    ("\\{12,13\\}", "13,12", True), ("\\pm 12", "12", False), ("2\\pi", "\\pi + \\pi", True),
    ("2\\sqrt{2}", "\\sqrt{8}", True), ("(1,2)", "(2,1)", False), ("x+1", "1+x", True),
    ("30^\\circ", "30", True), ("(3+1/2)", "3.5", True), ("\\text{12 cm}", "12", False),
    ("12\\text{ cm}", "12", True), (None, "12", False), ("1" * 501, "1" * 501, False),
])
def test_verdicts_by_hand(answer, gold, expected):
    assert math.equal(answer, gold) is expected


def test_plain_numbers_and_equal_texts_ask_nobody(monkeypatch):
    monkeypatch.setattr(math, "verified", pytest.fail)
    assert math.equal("12", "12.0") and math.equal("\\frac{1}{2}", "\\frac{1}{2}") and not math.equal("12", "13")
    assert math.readable("-1,200.5")


@pytest.mark.parametrize(("gold", "expected"), [
    ("\\frac{1}{2}", True), ("x^2+1", True), ("", False), ("\\frac{1}{", False)])
def test_readable(gold, expected):
    assert math.readable(gold) is expected


# --- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(fresh):
    assert math.equal("2/4", "1/2") is True
    first = fresh._process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert math.equal("3/6", "1/2") is True and fresh._process is not first


@pytest.mark.slow
def test_one_that_says_nothing_is_stopped(fresh, monkeypatch):
    assert math.equal("2/4", "1/2") is True
    os.kill(fresh._process.pid, signal.SIGSTOP)
    monkeypatch.setattr(math, "_PATIENCE", 0.1)
    with pytest.raises(math.VerifierError):
        math.equal("3/6", "1/2", 0.01)


def test_an_exception_of_the_library_is_an_error(fresh, monkeypatch):
    monkeypatch.setattr(fresh, "_reply", lambda _line, _patience: b'{"error": "TypeError: no"}')
    with pytest.raises(math.VerifierError, match="math-verify failed on '3/6': TypeError: no"):
        math.equal("3/6", "1/2")


@pytest.mark.slow
def test_interrupted_questions_leave_no_reply_behind(fresh, monkeypatch):
    assert math.equal("2/4", "1/2") is True
    before = fresh._process

    def interrupted(_line, _patience):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(fresh, "_reply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            math.equal("3/6", "1/2")
    assert fresh._process is None and before.poll() is not None


@pytest.mark.slow
def test_threads_and_a_fork(fresh):
    found = []
    threads = [threading.Thread(target=lambda i=i: found.append(math.equal(f"{i}/{2 * i}", "1/2")))
               for i in range(3, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 6
    parent = fresh._process
    with fresh._lock:  # as if a thread were asking
        child = os.fork()
        if child == 0:
            fine = False
            try:
                fresh.forget()  # the process's own worker is told by itself
                fine = math.equal("7/14", "1/2") is True
                fresh.stop()
            finally:
                os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert fresh._process is parent and math.equal("11/22", "1/2") is True


def test_without_the_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install 'math-verify"):
        math.require_library()


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123456789x+-*/^(){}=.,\\ abcfrsqt", max_size=30),
       st.sampled_from(["12", "\\frac{1}{2}", "x+1"]))
def test_hostile_expressions_get_a_verdict_or_an_error(answer, gold):
    with contextlib.suppress(math.VerifierError):
        assert math.equal(math.expression(answer), gold, 1.0) in (True, False)
