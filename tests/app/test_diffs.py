"""diffs.py: what two answers share."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.markup import Markup
from vlrl.app import diffs


class Sides(Markup):
    """The texts before and after, read back from a difference."""

    def __post_init__(self):
        self.before = self.after = ""
        super().__post_init__()

    def handle_data(self, data):
        if self.open[-1] != "ins":
            self.before += data
        if self.open[-1] != "del":
            self.after += data


def test_words_by_hand():
    found = diffs.words("The red box is left.", "The blue box is right!")
    assert "The <del>red</del><ins>blue</ins> box is <del>left.</del><ins>right!</ins>" in found
    assert "The same text" in diffs.words("a", "a")


WORDS = st.lists(st.sampled_from(["a", "b ", "<b>", "\n", "</div>", "&amp;", "12", "é "]), max_size=12).map("".join)


@settings(max_examples=60)
@given(WORDS, WORDS)
def test_both_sides_come_back(before, after):
    if before != after:
        found = Sides(diffs.words(before, after))
        assert (found.before, found.after) == (before, after)
        assert set(found.tags) <= {"div", "del", "ins"} and not found.odd


def test_long_texts_are_cut():
    found = diffs.words("a " * 30_000, "b " * 30_000)
    assert "are compared" in found and found.count("a ") < 20_000
