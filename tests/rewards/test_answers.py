"""Typed answers, rewards beside a group, and what several values make together, by hand; ROUGE and its stemmer as their
libraries give them."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards import answers, groups
from vlrl.rewards.confidence import brier, calibration_error, confidence_format, read_confidence
from vlrl.rewards.constraints import gained, levels
from vlrl.rewards.ensembles import ENSEMBLES, combined, spread
from vlrl.rewards.process import step_spans, with_pair_scores
from vlrl.rewards.stem import stem

OPTIONS = ["A. a cat", "B. a dog", "C. vitamin D", "D. A"]
@each("text letter", [
    ("B", "B"), ("b", "B"), (" B.", "B"), ("(B)", "B"), ("[b]", "B"), ("B)", "B"), ("**B**", "B"),
    ("**B.** a dog", "B"), ("B: a dog", "B"), ("B a dog", "B"), ("a dog", "B"), ("A Dog.", "B"),
    ("B. because it barks", "B"), ("B \nbecause it barks", "B"), ("C. vitamin D", "C"), ("B. a cat", None),
    ("B: a cat, I think", None), ("A. a cattle", "A"), ("\uff22", "B"), ("\uff08B\uff09", "B"), ("(B) is wrong", None),
    ("B: this is not correct.", None), ("Both", None), ("A cat sat", None), ("B because", None), ("A, B", None),
    ("A or B", None), ("A. B. C. D.", None), ("ABCD", None), ("E", None), ("the answer is B", None), ("", None),
    ("B's", None), ("\u0392", None), ("\U0001f642", None), ("B" * 100_000, None), ("A " * 100_000, None),
    ("(" * 100_000, None)])
def test_the_option_that_a_text_names(text, letter):
    assert answers.option_letter(text, OPTIONS) == letter
    assert answers.choice(text, "B", OPTIONS) == float(letter == "B")


def test_options_and_types():
    assert answers.bare_options(OPTIONS) == ["a cat", "a dog", "vitamin D", "A"]
    assert answers.bare_options(["U. S. army", "a dog"]) == ["U. S. army", "a dog"]
    assert answers.choice("b", "A dog", OPTIONS) == 1
    assert answers.choice("Z", "Z") == 1
    assert answers.choice("what", "nothing like it", OPTIONS) == 0
    assert answers.option_letter("same", ["same", "same"]) is None
    assert set(answers.STRICT) == {"choice", "number", "ocr", "text", "regression"}
    assert [answers.STRICT[kind]("5.", "5") for kind in answers.STRICT] == [0, 0, 0, pytest.approx(2 / 3), 1]
    assert answers.tolerant("choice", OPTIONS)("(b) a dog", "B") == 1
    assert answers.tolerant("number", tolerance=1)("4 cars", "5") == 1
    assert answers.tolerant("text", labels=["Left turn"])("left turn.", "Left turn") == 1
    assert answers.tolerant("text")("left turn", "Left turn") == 1


def table(function, rows):
    for *texts, expected in rows:
        assert function(*texts) == pytest.approx(expected, abs=1e-9), (function.__name__, [str(t)[:60] for t in texts])


def test_numbers_and_texts():
    table(answers.exact, [("B", "B", 1), (" B\n", "B", 1), ("B.", "B", 0), ("(B)", "B", 0), ("b", "B", 0), ("", "", 1)])
    table(answers.same_number, [
        ("12", "12", 1), ("12.0", "12", 0), ("12.0", "12.00", 1), ("1,200", "1,200", 1), ("1200", "1,200", 0),
        ("3.141", "3.14", 1), ("3.149", "3.14", 0), ("-3", "3", 0), ("112", "12", 0), ("12 cm", "12", 0), ("", "0", 0),
        ("nan", "nan", 0), ("inf", "inf", 0), ("1e999", "5", 0), ("1_2", "12", 0), ("\u0663", "3", 1),
        ("9" * 100_000, "9", 0), ("+4", "4", 1), (".5", "0.5", 1)])
    table(answers.near_number, [
        ("3 cars", "3", 1), ("about 2.5 m.", "2.5", 1), ("3, yes 3", "3", 1), ("3 or 4", "3", 0),
        ("0123456789", "3", 0), ("1 2 3 4", "3", 0), ("13", "3", 0), ("x3", "3", 0), ("three", "3", 0), ("-3", "3", 0),
        ("3.0", "3", 1), ("not 3", "3", 0), ("It is not 3", "3", 0), ("9" * 100_000, "9", 0), ("3 " * 100_000, "3", 1)])
    assert [answers.near_number(text, "10", 0.5) for text in ("10.5", "9.5", "10.51")] == [1, 1, 0]
    table(answers.closeness, [("5", "5", 1), ("4", "5", 0.8), ("6", "5", 0.8), ("10", "5", 0), ("-5", "5", 0),
                              ("0", "0", 1), ("0.1", "0", 0), ("5 m", "5", 0), ("1e999", "5", 0), ("", "5", 0),
                              ("-4", "-5", 0.8)])
    table(answers.word_error_rate, [("a b c", "a b c", 0), ("a x c", "a b c", 1 / 3), ("a c", "a b c", 1 / 3),
                                    ("", "a b", 1), ("a b c d", "a b", 1), ("x y z", "a", 3), ("", "", 0)])
    table(answers.ocr, [("a b c", "a b c", 1), ("a x c d", "a b c", 1 / 3), ("x " * 100_000, "a b", 0),
                        ("A b", "a b", 0.5)])
    table(answers.edit_similarity, [("abc", "abc", 1), ("abd", "abc", 2 / 3), ("", "abc", 0), ("", "", 1),
                                    ("a" * 300_000, "a", 1e-5)])
    table(answers.rouge, ROUGE)
    assert {word: stem(word) for word in STEMS} == STEMS
    assert answers.rouge_tokens("It was Running! 3rd--days") == ["it", "was", "run", "3rd", "day"]  # short words stay
    assert stem("y" * 100_000 + "ing")


ROUGE = [
    ("the cats were running", "The cat was running!", (0.75 + 1 / 3 + 0.75) / 3),
    ("a dog runs in the park", "the dog is running in a park", (12 / 13 + 2 / 11 + 8 / 13) / 3),
    ("red", "red", 2 / 3), ("red car", "red car", 1), ("car red", "red car", (1 + 0 + 0.5) / 3),
    ("word word word word", "word", (0.4 + 0 + 0.4) / 3), ("", "red", 0), ("\u4e2d\u6587", "red", 0), ("!!!", "red", 0),
    ("red " * 100_000, "red car", (2 / 5002 + 0 + 2 / 5002) / 3)]
STEMS = {"running": "run", "days": "day", "says": "say", "relational": "relat", "hopping": "hop", "falling": "fall",
         "fizzed": "fizz", "agreed": "agre", "dying": "die", "skies": "sky", "flies": "fli", "ties": "tie",
         "happily": "happili", "generalizations": "gener", "controlling": "control", "formally": "formal",
         "hopefully": "hope", "archaeology": "archaeolog", "enjoy": "enjoy", "spied": "spi", "died": "die",
         "filing": "file", "adoption": "adopt", "probate": "probat", "rate": "rate", "is": "is", "x1": "x1",
         "yyy": "yyy"}


test_temporal_bonus = by_hand(groups.temporal_bonus, [
    ([1, 1, 0, 0], [1, 0], [1, 1, 0, 0]),  # .5 > .8 * .5
    ([1, 0, 0, 0, 0], [0.25, 0.25], [0, 0, 0, 0, 0]),  # .2 is not above .8 * .25
    ([1, 1, 1, 1, 0], [1, 1], [0, 0, 0, 0, 0]),  # .8 is not above .8 * 1
    ([1, 1, 1, 1], [1, 1], [1, 1, 1, 1]), ([0.1, 0.11], [0, 0], [0, 1]), ([0, 0], [0, 0], [0, 0]), ([1, 1], [], [0, 0]),
    ([], [1], [])])


def test_lengths_and_consistency_without_a_margin():
    assert groups.length_bonus([1, 1, 0, 1, 1], [320, 512, 400, 319, 513]) == [1, 1, 0, 0, 0]
    assert groups.length_bonus([1, 0, 0.1], [400, 400, 400]) == [0, 0, 0]  # one right answer is not enough
    assert groups.length_bonus([0.2, 0.9], [5, 9], 5, 8) == [1, 0]
    assert groups.consistency_bonus([1, 1], [0.8, 0.79], margin=0) == [1, 0]
    assert groups.consistency_bonus([1, 1, 1], [0.3, 0.3, 0.3], margin=0) == [1, 1, 1]


@each("right likely paid", [
    ([1, 1, 1, 0], [0.8, 0.7, 0.6, 0.99], [1, 1, 0, 0]),  # mean .7, from .69
    ([1, 1], [0.8, 0.78], [1, 1]),  # on the margin
    ([1, 1], [0.8, 0.7799], [1, 0]), ([1, 1, 1], [1.0, 0.95, 0.99], [1, 1, 1]),  # all at the cap
    ([1, 1, 1], [1.0, 1.0, 0.9], [1, 1, 0]),  # capped: mean .9333, from .9233
    ([0.9, 0.5, 0.7], [0.5, 0.9, 0.5], [0.9, 0, 0.7]),  # below the mean accuracy of .7
    ([1, 0], [0.2, 0.9], [1, 0]),  # alone it is its own mean
    ([0.1, 0.05], [0.9, 0.9], [0, 0]),  # nothing right
    ([1, 1], [None, 0.2], [0, 1]), ([1, 1], [None, None], [0, 0]),
    ([0.1 + 0.2, 0.3, 0.3], [0.5, 0.5, 0.5], [0.1 + 0.2, 0.3, 0.3]),  # equal up to rounding
    ([], [], [])])
def test_consistency_bonus(right, likely, paid):
    assert groups.consistency_bonus(right, likely) == pytest.approx(paid)
    assert groups.consistency_bonus(right[::-1], likely[::-1]) == pytest.approx(paid[::-1])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1) | st.none()), max_size=8), st.randoms())
def test_consistency_is_order_free(pairs, random):
    right, likely = [a for a, _ in pairs], [p for _, p in pairs]
    paid = groups.consistency_bonus(right, likely)
    assert all(0 <= value <= accuracy for value, accuracy in zip(paid, right, strict=True))
    places = list(range(len(pairs)))
    random.shuffle(places)
    moved = groups.consistency_bonus([right[i] for i in places], [likely[i] for i in places])
    assert moved == [paid[i] for i in places]


ANSWER = "<think>so</think><answer>cat</answer>"


test_confidence_is_read = by_hand(lambda text: (read_confidence(text), confidence_format(text)), [
    (f"{ANSWER}<confidence>0.8</confidence>", 0.8, 1), (f" {ANSWER}\n<confidence> 1 </confidence>\n", 1, 1),
    (f"{ANSWER}<analysis>It may be a dog.</analysis>\n<confidence>.5</confidence>", 0.5, 1),
    (f"{ANSWER}<analysis>a</analysis> b<confidence>.5</confidence>", 0.5, 0),
    (f"{ANSWER}<analysis>a</analysis><analysis>b</analysis><confidence>.5</confidence>", 0.5, 0),
    (f"{ANSWER}<confidence>0.8</confidence> sure", 0.8, 0), (f"{ANSWER} so <confidence>0.8</confidence>", 0.8, 0),
    (f"<confidence>0.8</confidence>{ANSWER}", None, 0),  # before the end of the thinking
    ("<think><confidence>0.8</confidence></think><answer>cat</answer>", None, 0),
    ("<think><answer>cat</answer><confidence>0.8</confidence>", None, 0),
    ("<answer>cat</answer><confidence>0.8</confidence>", 0.8, 0),
    (f"{ANSWER}<confidence>1</confidence><confidence>0</confidence>", None, 0),
    *((f"{ANSWER}<confidence>{q}</confidence>", None, 0) for q in (
        "", "85", "85%", "-0.1", "1.01", "nan", "inf", "high", "0.8 or 0.2", "1e400", "\u00b9")),
    (f"{ANSWER}<confidence>\u0661</confidence>", 1.0, 1), (f"{ANSWER}<confidence>0.8", None, 0), (ANSWER, None, 0),
    ("", None, 0)], values=2)


def test_brier_and_calibration_by_hand():
    assert brier(0.75, 1) == 0.0625 and brier(0.75, 0) == 0.5625 and brier(1, 1) == brier(0, 0) == 0
    assert brier(1, 0) == brier(0, 1) == brier(None, 1) == brier(None, 0) == 1 and brier(0.5, 0.25) == 0.0625
    assert calibration_error([], []) == 0 and calibration_error([1, 1], [1, 1]) == 0
    assert calibration_error([0.9] * 4, [1, 1, 0, 0]) == pytest.approx(0.4)
    assert calibration_error([0.95, 0.95, 0.25, 0.25], [1, 1, 0, 1]) == pytest.approx((0.1 + 0.5) / 4)
    assert calibration_error([0.05, 0.15], [0.15, 0.05]) == pytest.approx(0.1)  # in two bins they do not cancel out
    assert calibration_error([0.05, 0.15], [0.15, 0.05], bins=1) == pytest.approx(0)
    assert calibration_error([0.85, 1], [1, 0.85]) == pytest.approx(0.15)  # 1 is in the last bin


SCORES = (1.0, 2.0, 6.0)  # mean 3, variance (4 + 1 + 9) / 3


test_each_by_hand = by_hand(lambda name, lam: ENSEMBLES[name](SCORES, lam), [
    ("mean", 0.5, 3), ("min", 0.5, 1), ("less_variance", 0.5, 3 - 7 / 3), ("less_variance", 0.0, 3),
    ("less_deviation", 1.0, 3 - math.sqrt(14 / 3))], abs=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=6), st.floats(0, 10), st.integers(1, 5))
def test_caution_never_pays_more_and_equal_members_change_nothing(scores, lam, count):
    assert all(ENSEMBLES[name](scores, lam) <= ENSEMBLES["mean"](scores, lam) + 1e-6 for name in ENSEMBLES)
    same = [scores[0]] * count
    assert all(function(same, lam) == pytest.approx(scores[0], rel=1e-9, abs=1e-6) for function in ENSEMBLES.values())


def test_without_lam_each_has_that_of_its_paper():
    assert spread(SCORES) == pytest.approx(math.sqrt(14 / 3), abs=1e-9)
    assert combined("less_deviation", SCORES) == pytest.approx(3 - math.sqrt(14 / 3))
    assert combined("less_variance", SCORES) == pytest.approx(3 - 0.1 * 14 / 3)
    assert combined("less_deviation", SCORES, 0.5) == pytest.approx(3 - 0.5 * math.sqrt(14 / 3))


def test_constraints_by_hand():
    assert levels({"common": [True, False, True, True], "hard": [True, True]}) == {
        "common_micro": 0.75, "common_macro": 0.0, "hard_micro": 1.0, "hard_macro": 1.0, "pass": 0.0}
    assert levels({"hard": [True], "soft": []}) == {
        "hard_micro": 1.0, "hard_macro": 1.0, "soft_micro": 1.0, "soft_macro": 1.0, "pass": 1.0}
    assert levels({}) == {"pass": 1.0}
    assert gained({"a": 0.5, "b": 1.0}, {"a": 0.75, "b": 0.0}) == {"a": 0.25, "b": -1.0}
    assert gained({}, levels({"x": [True, False]})) == {"x_micro": 0.5, "x_macro": 0.0, "pass": 0.0}


test_steps_are_paragraphs = by_hand(lambda text: [text[a:b].strip("\n") for a, b in step_spans(text)], [
    ("", []), (" \n\n ", []), ("one", ["one"]), ("one\ntwo\n \n\nthree", ["one\ntwo", "three"]),
    ("\n\n a\n\n\nb\n", [" a", "b"])])


@given(st.lists(st.sampled_from(["a", "b ", "\n", "\n\n", " ", "\t", "\u2028"]), max_size=30).map("".join))
def test_steps_of_any_text(text):
    """They rise, hold all that is written, and no empty line."""
    spans = step_spans(text)
    places = [place for span in spans for place in span]
    assert places == sorted(places) and all(text[a:b].strip() for a, b in spans)
    assert sum(len("".join(text[a:b].split())) for a, b in spans) == len("".join(text.split()))
    assert all("\n\n" not in text[a:b].strip("\n") for a, b in spans)


def test_pairs_by_hand():
    assert with_pair_scores([1.0, 2.0, 3.0], [5.0, 0.0]) == [3.0, 1.0, 3.0]
    assert with_pair_scores([4.0], []) == [4.0] and with_pair_scores([], []) == []
