import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlrl.rewards.text import (
    choice_letter,
    clean_label,
    extract_tag,
    number,
    parse_answer,
    same_label,
    think_answer_format,
)

TAGGED = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "8"])).map("".join)


@pytest.mark.parametrize(("text", "first", "last"), [
    ("<answer>1</answer> <answer>2</answer>", "1", "2"),
    ("<answer>one\nline</answer>", "one\nline", "one\nline"),
    ("<answer>1</answer> <answer>2", "1", "1"),  # the second is not closed
    ("<answer>1<answer>2</answer></answer>", "1<answer>2", "1<answer>2"),
    ("<answer></answer>", "", ""),
    ("</answer>1<answer>", None, None),
    ("<answer>1", None, None),
    ("<ANSWER>1</ANSWER>", None, None),
    ("", None, None),
])
def test_extract_tag(text, first, last):
    assert extract_tag(text, "answer") == first
    assert extract_tag(text, "answer", "last") == last


@pytest.mark.parametrize(("text", "expected"), [
    ("<think>a loop</think><answer>8</answer>", 1),
    ("\n <think>a\nloop</think>\n\n<answer>8</answer> ", 1),
    ("<think></think><answer></answer>", 1),
    ("<answer>8</answer><think>a</think>", 0),
    ("<think>a</think>so<answer>8</answer>", 0),
    ("<think>a</think><answer>8</answer>!", 0),
    ("ok <think>a</think><answer>8</answer>", 0),
    ("<think>a</think><answer>8</answer><think>a</think><answer>8</answer>", 0),
    ("<think><think>a</think><answer>8</answer>", 0),  # a plain fullmatch of the pattern would accept it
    ("<think><answer>8</answer></think>", 0),
    ("<think>a</think><answer>8", 0),
    ("8", 0),
    ("", 0),
])
def test_think_answer_format(text, expected):
    assert think_answer_format(text) == expected


@pytest.mark.parametrize(("text", "reasoning", "final"), [
    ("<think>a loop</think><answer> 8 </answer>", "a loop", "8"),
    ("<think>a</think> 8 ", "a", "8"),
    ("a loop</think>8", "a loop", "8"),  # the prompt opened the tag
    (" 8 ", "", "8"),
    ("<think>never closed 8", "never closed 8", ""),
    ("<think>a</think><answer>1</answer><answer>2</answer>", "a", "2"),
    ("<think>a</think><answer>1</answer><answer>2", "a", "1"),
    ("<answer>1</answer> so it is 2", "", "1"),
    ("", "", ""),
])
def test_parse_answer(text, reasoning, final):
    answer = parse_answer(text, n_tokens=3, truncated=True, step=7)
    assert (answer.reasoning, answer.final) == (reasoning, final)
    assert (answer.text, answer.n_tokens, answer.truncated, answer.step) == (text, 3, True, 7)


@given(st.text() | TAGGED)
def test_never_raises(text):
    parse_answer(text)
    assert think_answer_format(text) in (0, 1)
    assert same_label(text, text)
    assert choice_letter(text) in (None, *"ABCDEFGH")
    assert number(text) is None or isinstance(number(text), float)
    for which in ("first", "last"):
        extract_tag(text, "answer", which)


@given(TAGGED)
def test_format_implies_one_answer(text):
    if think_answer_format(text):
        assert extract_tag(text, "answer", "first") == extract_tag(text, "answer", "last") is not None


@pytest.mark.parametrize(("a", "b", "same"), [
    ("Cat", "cat", True), (" 'cat'. ", "cat", True), ("**Golden  Retriever**", "golden retriever", True),
    ("\u201ccat\u201d", "cat", True),
    ("cat!", "cat", True), ("\uff23at", "cat", True), ("STRASSE", "stra\u00dfe", True),
    ("cat", "cats", False), ("C++", "C#", False), ("-5", "5", False), (".5", "5", False), ("!", "?", False),
    ("", "cat", False)])
def test_same_label(a, b, same):
    assert same_label(a, b) is same
    assert same_label(b, a) is same


@given(st.text())
def test_cleaning_keeps_no_spaces_around(text):
    assert clean_label(text) == clean_label(text).strip()


@pytest.mark.parametrize(("text", "letter"), [
    ("B", "B"), ("b", "B"), (" (C) ", "C"), ("C. a cat", "C"), ("Answer: D", "D"), ("A cat, so (B)", "B"),
    ("the answer is B because of A's shape", "B"), ("BAD", None), ("", None), ("none", None), ("Z", None),
    ("ends in a C ", "C"), ("It's A, not B", "A")])
def test_choice_letter(text, letter):
    assert choice_letter(text) == letter


@pytest.mark.parametrize(("text", "value"), [
    ("3", 3), ("there are 3 cats", 3), ("-2.5", -2.5), ("1,200 people", 1200), ("1,200,300.5", 1200300.5), ("3.", 3),
    ("7 or 8", 7), ("x2 3D", None), ("1.2.3", None), ("", None), ("three", None), ("9" * 400, None)])
def test_number(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["<answer>" * 12_000, "</answer>" * 11_000, "<think></think>" * 6_000, "1" * 100_000,
                                  "1," * 50_000, "1,111" * 20_000, "(" * 100_000, "A " * 50_000,
                                  "A" + " " * 100_000 + "x", "!" * 100_000 + "a", "\u0301" * 100_000])
def test_hostile_text_takes_linear_time(text):
    began = time.perf_counter()
    parse_answer(text)
    think_answer_format(text)
    clean_label(text)
    choice_letter(text)
    number(text)
    assert time.perf_counter() - began < 20  # not a timing: a quadratic scan takes minutes
