"""Steps of a reasoning, and what their scores make of an answer."""

from hypothesis import given
from hypothesis import strategies as st

from tests.tables import by_hand
from vlrl.rewards.process import step_spans, with_pair_scores

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
