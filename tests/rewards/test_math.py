"""Mathematical answers by hand, and the verifier's process: hangs, deaths, threads, forks."""

import contextlib
import os
import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.errors import ConfigError
from vlrl.rewards import math

TOWER = "9^{9^{9^{9}}}"
HANGS = "\\binom{1000000000}{500000000}"


@pytest.fixture
def fresh(monkeypatch):
    """A verifier of its own, and nothing remembered."""
    verifier = math._Verifier()
    monkeypatch.setattr(math, "_VERIFIER", verifier)
    math._remembered.cache_clear()
    yield verifier
    verifier.worker.kill()
    math._remembered.cache_clear()


@each("piece", ["\\boxed{", "<|begin_of_box|>", "{", "}", "$", "\\text{", "1/", "1.", "1,", "1", " ",
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


@pytest.mark.slow
def test_a_hang_is_an_error_once_and_the_next_question_is_answered(monkeypatch):
    with pytest.raises(math.VerifierError, match=r"no verdict within 0\.3 s of CPU time on '.*binom"):
        math.equal(HANGS, "\\frac{1}{2}", 0.3)
    assert math.equal("2/4", "\\frac{1}{2}") is True
    monkeypatch.setattr(math._VERIFIER, "ask", lambda _question: pytest.fail("what hung is asked again"))
    with pytest.raises(math.VerifierError, match="no verdict"):
        math.equal(HANGS, "\\frac{1}{2}", 0.3)


@each("answer gold", [
    ("3*4+5", "17"), ("10!", "3628800"), ("3=2", "2"), ("x=3=2", "2"), ("x=3*4+5", "17"), ("24/2", "12"),
    ("17/1", "17"), ("\\frac{24}{2}", "12"), ("2^3", "8"), ("2^{10}", "1024"), ("\\sqrt{4}", "2"),
    ("\\binom{5}{2}", "10"), ("5 \\cdot 2\\sqrt{3}", "10\\sqrt{3}"), ("|-3|", "3"), ("\\sum_{i=1}^{3} i", "6"),
    ("\\gcd(4,6)", "2"), ("\\max(2,1)", "2"), ("34-17", "17"), ("17+0", "17"), ("\\sin(0)", "0"), ("0.5*34", "17"),
    ("5-3,3", "2,3")])
def test_arithmetic_that_is_left_to_do_is_no_answer(answer, gold):
    assert not math.equal(answer, gold) and math.equal(answer, gold, worked_out=False)


@each("answer gold", [
    ("3*4+5=17", "17"), ("x=3*4+5=17", "17"), ("7/2", "3.5"), ("3\\frac{1}{2}", "3.5"), ("\\sqrt{300}", "10\\sqrt{3}"),
    ("-3\\sqrt{2}", "-\\sqrt{18}"), ("\\frac{3\\sqrt{2}}{2}", "\\frac{3}{\\sqrt{2}}"), ("50\\%", "0.5"),
    ("3 \\times 10^{5}", "300000"), ("-2\\times 10^{3}", "-2000"), ("10^5", "100000"), ("2^{10}", "4^5"),
    ("(x+1)^2", "x^2+2x+1"), ("x^2+2x+1", "(x+1)^2"), ("\\frac{1+\\sqrt{5}}{2}", "\\frac{\\sqrt{5}+1}{2}"),
    ("y=2x+1", "y=1+2x"), ("x \\le 3", "x\\leq 3"), ("6:4", "3/2"), ("-3x+2", "2-3x"), ("\\frac{x}{2}", "0.5x")])
def test_other_ways_to_write_a_value_are_right(answer, gold):
    assert math.equal(answer, gold)


def test_powers_that_no_computer_holds_take_no_time(monkeypatch):
    assert math.equal("2/4", "1/2")  # the process has started
    start = time.monotonic()
    for text in (TOWER, "7^{7^{7^{7}}}", "9^9^9^9^9^9", "(10!)!!", "x^{9^{9^9}}", "\\exp(\\exp(\\exp(9)))"):
        assert math.equal(text, "17") is False
    assert time.monotonic() - start < 2


@given(st.text(alphabet="0123456789x+-*/^(){}=.$\\ ab\u221a\u00b2", max_size=30), st.text(max_size=40))
def test_no_text_makes_repeats_raise(answer, question):
    assert math.repeats(answer, answer, question + answer) is False
    assert math.repeats(answer, "z", question) in (True, False)


def test_plain_numbers_and_equal_texts_ask_nobody(monkeypatch):
    monkeypatch.setattr(math, "verified", pytest.fail)
    assert math.equal("12", "12.0") and math.equal("\\frac{1}{2}", "\\frac{1}{2}") and not math.equal("12", "13")
    assert math.readable("-1,200.5")


test_boxed = by_hand(math.boxed, [
    ("\\boxed{12}", ["12"]), ("so \\boxed{\\frac{1}{2}}.", ["\\frac{1}{2}"]), ("\\boxed{1} \\boxed{2}", ["1", "2"]),
    ("\\boxed{\\boxed{3}}", ["\\boxed{3}"]), ("\\boxed{ \\boxed{3}", ["3"]), ("\\boxed{3", []), ("}\\boxed{3}", ["3"]),
    ("{\\boxed{3}", ["3"]), ("<|begin_of_box|> 3 <|end_of_box|>", ["3"]), ("<|begin_of_box|>3", []),
    ("<|begin_of_box|>\\boxed{3}<|end_of_box|>", ["\\boxed{3}"]), ("<|end_of_box|>", []), ("\\boxed{}", [""]), ("", []),
])
test_expression = by_hand(math.expression, [
    ("12", "12"), (" 12. ", "12"), ("The answer is 12.", "12"), ("about 1,234 apples", "1234"), ("3 1/2", "7/2"),
    ("-3 1/2", "-7/2"), ("x = 3", "x = 3"), ("2\\pi \\text{ metres}", "2\\pi \\text{ metres}"), ("$x=3$", "x=3"),
    ("so $3$, that is $3$", "3"), ("\\boxed{3} and \\boxed{ 3 }", "3"), ("it costs $5 only", "5"), ("1/2 of it", "1/2"),
    ("between $3$ and $4$", None), ("\\boxed{3} or \\boxed{4}", None), ("3 of the 5 apples", None), ("12 13", None),
    ("it is 12", "12"), ("x = 1\ny = 2", None),
    ("three", None), ("words without any value", None), ("{1", None), ("1}{", None), ("", None),
    ("145\u00b0", "145^\\circ"), ("10\u221a3", "10\\sqrt{3}"), ("\u221a(x+1)", "\\sqrt{x+1}"), ("x\u00b2", "x^{2}"),
    ("10\u207b\u00b3", "10^{-3}"), ("it is \u22123", "-3"), ("\u03c0/2", "\\pi /2"),
    ("\\boxed{}", None), ("x" * 501, None), ("1+" * 251, None), ("a word " * 2000 + "12", None), ("٣", "٣")])
test_verdicts_by_hand = by_hand(math.equal, [
    ("12", "12", True), ("12.0", "12", True), ("112", "12", False), ("1,200", "1200", True),
    ("0.3333333", "0.3333334", True), ("1000001", "1000000", False), ("0.0000001", "0", False), ("0.5", "1/2", True),
    ("\\frac{1}{2}", "0.5", True), ("x=12", "12", True), ("12,13,14", "12", False), ("12 or 13", "12", False),
    ("\\{12,13\\}", "13,12", True), ("\\pm 12", "12", False), ("2\\pi", "\\pi + \\pi", True),
    ("2\\sqrt{2}", "\\sqrt{8}", True), ("(1,2)", "(2,1)", False), ("x+1", "1+x", True),
    ("30^\\circ", "30", True), ("7/2", "3.5", True), ("3+1/2", "3.5", False), ("\\text{12 cm}", "12", False),
    ("12\\text{ cm}", "12", True), (None, "12", False), ("1" * 501, "1" * 501, False)])
test_the_questions_own_expression = by_hand(math.repeats, [
    ("2x+3x", "5x", "Simplify $2x + 3x$.", True), ("x^2-1", "(x-1)(x+1)", "Factor $x^2-1$", True),
    ("30/8", "3.75", "What is 30/8?", True), ("10\u221a3", "\\sqrt{300}", "Write 10\u221a3 as one root", True),
    ("x+1", "1+x", "(x+1)^2", False), ("x-1", "-1+x", "what is 2x - 1", False), ("5x", "x+4x", "2x+5x", False),
    ("x-1", "x - 1", "x-1 or x+1?", False), ("12", "12.0", "Is it 12?", False), ("-3", "-3.0", "-3", False)])
test_readable = by_hand(math.readable, [("\\frac{1}{2}", True), ("x^2+1", True), ("", False), ("\\frac{1}{", False)])


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(fresh):
    assert math.equal("2/4", "1/2") is True
    first = fresh.worker.process
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert math.equal("3/6", "1/2") is True and fresh.worker.process is not first


@pytest.mark.slow
def test_one_that_says_nothing_is_stopped(fresh, monkeypatch):
    assert math.equal("2/4", "1/2") is True
    os.kill(fresh.worker.process.pid, signal.SIGSTOP)
    monkeypatch.setattr(math, "_PATIENCE", 0.1)
    with pytest.raises(math.VerifierError):
        math.equal("3/6", "1/2", 0.01)


def test_an_exception_of_the_library_is_an_error(fresh, monkeypatch):
    monkeypatch.setattr(fresh.worker, "ask", lambda _request, _patience: b'{"error": "TypeError: no"}')
    with pytest.raises(math.VerifierError, match="math-verify failed on '3/6': TypeError: no"):
        math.equal("3/6", "1/2")


@pytest.mark.slow
def test_interrupted_questions_leave_no_reply_behind(fresh, monkeypatch):
    assert math.equal("2/4", "1/2") is True
    before = fresh.worker.process

    def interrupted(_connection, _patience):
        raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr("vlrl.rewards.worker._await", interrupted)
        with pytest.raises(KeyboardInterrupt):
            math.equal("3/6", "1/2")
    assert fresh.worker.process is None and before.poll() is not None


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
    parent = fresh.worker.process
    with fresh.lock:  # as if a thread were asking
        child = os.fork()
        if child == 0:
            fine = False
            try:
                fresh.forget()  # the process's own worker is told by itself
                fine = math.equal("7/14", "1/2") is True
                fresh.worker.kill()
            finally:
                os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert fresh.worker.process is parent and math.equal("11/22", "1/2") is True


def test_without_the_library(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install 'math-verify"):
        math.require_library()


@pytest.mark.slow
@settings(max_examples=300)
@given(st.text(alphabet="0123456789x+-*/^(){}=.,\\ abcfrsqt", max_size=30),
       st.sampled_from(["12", "\\frac{1}{2}", "x+1"]))
def test_hostile_expressions_get_a_verdict_or_an_error(answer, gold):
    with contextlib.suppress(math.VerifierError):
        assert math.equal(math.expression(answer), gold, 1.0) in (True, False)
