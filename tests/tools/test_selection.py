"""Which right answers of a round are kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vlrl.algo.named import bind
from vlrl.config.base import Named
from vlrl.tools.stages.selection import (
    CHOICES,
    Candidate,
    best,
    diverse,
    every,
    select_answers,
    select_rejected,
    shortest,
)

THREE = [Candidate("red car left", 0.5, 9), Candidate("red car", 0.9, 7), Candidate("blue bus", 0.9, 7),
         Candidate("red car on the left", 0.1, 5)]


def row(answer, reward=1.0, correct=True, tokens=3, **more):
    return {"answer": answer, "reward": reward, "correct": correct, "tokens": tokens, **more}


def test_by_hand():
    assert best(THREE) == [1] and best(THREE, 3) == [1, 2, 0]
    assert shortest(THREE) == [3] and shortest(THREE, 2) == [3, 1]
    # beside "red car": blue bus shares 0 of 4 words, "red car on the left" 2 of 5, "red car left" 2 of 3
    assert diverse(THREE, 3) == [1, 2, 3] and diverse(THREE, 9) == [1, 2, 3, 0]
    assert every(THREE) == [0, 1, 2, 3]
    rows = [row("a", 0.2, False), row("b", 0.9, tokens=5), row("b", 1.0), row("c", 0.8, truncated=True), row(""),
            row("d", None, None), row("e", 0.9, tokens=4), row("f", float("nan"))]
    assert [r["answer"] for r in select_answers(rows, every, None)] == ["b", "e"]
    assert select_answers(rows, shortest, None) == [rows[6]]
    assert [r["answer"] for r in select_answers(rows, every, 0.2)] == ["a", "b", "e"]
    assert select_answers(rows[:1], best, None) == []
    with pytest.raises(ValueError, match="index 3 for 1 answers"):
        select_answers([row("a")], lambda candidates: [3], None)


def test_what_a_short_answer_is_preferred_to():
    """Wrong ones that are longer, right ones of more than 1.5 times its tokens."""
    kept = row("k", tokens=4)
    rows = [row("w4", 0.0, False, 4), row("w5", 0.0, False, 5), row("r6", tokens=6), row("r7", tokens=7), kept,
            row("w5", 0.0, False, 9), row("x", None, None, 99), row("", 0.0, False, 9), row("cut", 0.0, False, 8,
                                                                                           truncated=True)]
    assert [r["answer"] for r in select_rejected(rows, kept, None, 1.5)] == ["w5", "r7", "cut"]
    assert [r["answer"] for r in select_rejected(rows, kept, None, 1.0)] == ["w5", "r6", "r7", "cut"]
    assert [r["answer"] for r in select_rejected(rows, kept, 2.0, 1.5)] == ["w5", "r6", "r7", "cut"]  # none is right


@given(st.lists(st.tuples(st.text("ab ", max_size=6), st.sampled_from([0.0, 0.5, 1.0]), st.booleans()), max_size=9),
       st.sampled_from([*CHOICES]))
def test_what_is_kept_is_right_and_different(answers, name):
    rows = [row(text, reward, correct) for text, reward, correct in answers]
    kept = select_answers(rows, bind("rounds.choose", Named(name=name), CHOICES), None)
    assert all(r["correct"] and r["answer"] for r in kept)
    assert len({r["answer"] for r in kept}) == len(kept)
    assert bool(kept) == any(r["correct"] and r["answer"] for r in rows)
