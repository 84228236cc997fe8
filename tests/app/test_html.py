"""html.py: whatever a value is, it ends up as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.markup import Markup
from vlrl.app import html
from vlrl.app.html import Html, as_json, el, esc, folded, join, link, number, table, visible

HOSTILE = ["<script>alert(1)</script>", "</p><img src=x onerror=alert(1)>", '" onmouseover="x()', "' x='", "&lt;b&gt;",
           "<!-- ", "]]>", "<![CDATA[<b>]]>", "<?php ?>", "</style>", "javascript:alert(1)", "\x00\x1b[31m", "\ud800",
           "\u202eabc", "\ufeff", "&#x3c;script&#x3e;"]
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(HOSTILE), max_size=4).map("".join))


@settings(max_examples=60)
@given(TEXTS)
def test_no_tag_of_a_text_survives(text):
    made = Markup(el("p", text, el("b", [text, 1]), title=text, data_x=text))
    assert made.tags == ["p", "b"] and not made.odd
    assert made.attributes[0] == {"title": visible(text), "data-x": visible(text)}
    assert made.text == visible(text) + visible(str([text, 1]))
    for fragment, tags in ((folded(text, 10), {"div", "details", "summary", "span"}), (esc(text), set()),
                           (table((text,), [(text, 2)], (1,)), {"div", "table", "thead", "tbody", "tr", "th", "td"}),
                           (link({"page": text, "run": text}, text), {"a"}), (html.note(text), {"p"}),
                           (html.empty(text, text), {"div", "p"}), (html.chip(text, title=text), {"span"})):
        found = Markup(fragment)
        assert set(found.tags) <= tags and not found.odd
    assert Markup(link({"page": text, "run": text}, "x")).attributes[0]["href"].startswith("?")


def test_what_cannot_be_seen_is_written_out():
    assert visible("a\x00b\rc\x7f\u202ed\u200be\ud800") == "a␀b␍c␡⟨U+202E⟩d⟨U+200B⟩e⟨U+D800⟩"
    kept = "tab\tline\n\U0001f468\u200d\U0001f469 \u0645\u200c\u062c"  # joiners belong to emoji and scripts
    assert visible(kept) == kept


def test_elements():
    assert el("a", "x & y", class_="v-b", data_at=0.5, hidden=True, title=None, draggable=False) == (
        '<a class="v-b" data-at="0.5" hidden>x &amp; y</a>')
    assert el("img", src='"') == '<img src="&quot;"/>' and el("p", Html("<i>a</i>"), None, "") == "<p><i>a</i></p>"
    assert join(["<", Html("<br/>"), None, ""], " ") == "&lt; <br/>"
    assert link({"page": "rollouts", "run": "a b&c", "step": 0, "group": ""}, "go") == (
        '<a class="go" href="?page=rollouts&amp;run=a%20b%26c&amp;step=0">go</a>')


@pytest.mark.parametrize(("value", "shown"), [
    (0.12345, "0.123"), (-0.5, "−0.5"), (1234.5, "1,234"), (-0.0, "0"), (None, "–"), (float("nan"), "–"), (True, "–"),
    (float("-inf"), "−∞"), (10 ** 400, "∞"), ("1", "–"), (1e-5, "1e−05"), (12, "12")])
def test_numbers(value, shown):
    assert number(value) == shown


def test_numbers_with_a_form():
    assert number(0.5, ".2f", sign=True) == "+0.50" and number(0.0, ".2f", sign=True) == "+0.00"


def test_json_and_long_texts():
    assert as_json("text") == "text" and as_json({"a": [1, float("nan")]}) == '{"a": [1, null]}'
    assert as_json([[1, 2], [3, 4]], 8) == "[[1, 2],\n [3, 4]]" and as_json({"a": 1, "b": 2}, 8) == '{"a": 1,\n "b": 2}'
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    assert as_json(deep) and as_json([10 ** 5000]) and esc(10 ** 5000) == "a int"
    long = Markup(folded("word " * 2000, 100))
    assert long.tags[0] == "details" and "10,000 characters" in long.text and long.text.endswith("word ")
    assert len(folded("x" * 300_000)) < 210_000
