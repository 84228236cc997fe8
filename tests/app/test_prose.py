"""Markdown and LaTeX that a model wrote: what becomes of it by hand, and that nothing of it loads, runs or hangs."""

from __future__ import annotations

import re

import gradio as gr
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.views import Markup, Plain, clip, group, image, rollout
from tests.tables import each
from vlrl.app import cards, diffs, html, prose
from vlrl.app.html import Html, as_json, el, esc, folded, join, link, number, table, visible
from vlrl.app.prose import formula, rendered
from vlrl.app.site import same

TAGS = set("div p ul ol li blockquote em strong s table thead tbody tr th td pre code br hr "
           "span".split()) | prose._MATH_TAGS
NAMES = {"class", "title", *prose._WORDS, *prose._SIZES}
PIECES = ["# h", "\n", "\n\n", "- a", "1. b", "> ", "*", "**", "_", "`", "```", "|a|b|\n|-|-|\n", "[x](http://e.com/)",
          "![i](javascript:x)", "<img src=x onerror=alert(1)>", "<script>", "</div>", "<!--", "&lt;", "&#106;", "$",
          "$$", "\\(", "\\)", "\\[", "\\]", "\\frac", "\\href{javascript:x}", "\\text{<b>}", "\\color{url(x)}", "{",
          "}", "^", "\\begin{matrix}", "\\end{matrix}", "&", "\\\\", "\\left(", "\u202e", "[r]: http://e.com", "x", " "]


@each("text html", [
    ("a *b* **c** `d`", "<p>a <em>b</em> <strong>c</strong> <code>d</code></p>"),
    ("# Way", '<p class="v-head-h1"><strong>Way</strong></p>'), ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("| a |\n|---|\n| 1 |", "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>"),
    ("```py\nx < 1\n```", "<pre><code>x &lt; 1\n</code></pre>"),
    ("[a](http://e.com) ![b](http://e.com/b.png)", "<p>[a](http://e.com) ![b](http://e.com/b.png)</p>"),
    ("<b>x</b> <http://e.com>", "<p>&lt;b&gt;x&lt;/b&gt; &lt;http://e.com&gt;</p>"),
    ("it costs $5, or $6", "<p>it costs $5, or $6</p>"), ("", "")])
def test_markdown_by_hand(text, html):
    assert rendered(text) == f'<div class="v-prose">{html}</div>'


def test_formulas_and_texts_made_to_last():
    squared = "<mrow><msup><mi>x</mi><mn>2</mn></msup></mrow>"
    for text in ("$x^2$", "\\(x^2\\)"):
        assert f'<math display="inline">{squared}</math>' in rendered(f"so {text}, yes")
    for text in ("$$x^2$$", "\\[x^2\\]", "$$\nx^2\n$$", "a\n\\[\nx^2\n\\]\nb"):
        assert f'<math display="block">{squared}</math>' in rendered(text), text
    for latex in ("\\newcommand{\\a}{\\a\\a}\\a", "\\frac", "x^2^3", "\\left(", "x" * 3000, "\\def\\a{b}", " "):
        assert formula(latex) == f'<code class="v-tag">${latex}$</code>'  # it stays text
    made = Markup(formula("\\href{javascript:x}{a} \\style{color:red}{b} \\class{c}{d} \\color{red}e \\text{<script>}"))
    assert {name for tag in made.attributes for name in tag} <= {"class", "title", "display"}
    assert "<script>" in made.text and not made.odd
    for text in ("*a **a " * 6000, "[" * 40_000, "`a``b" * 8000, "$a" * 20_000, ">" * 40_000, "$x$ " * 9000,
                 "$" + "{" * 1900 + "$", "$" + "\\sqrt{" * 250 + "}" * 250 + "$"):
        assert len(rendered(text[:prose.MOST])) < 500_000, text[:30]
    assert rendered("*a*" * prose.MOST).startswith('<div class="v-text">*a**a*')  # too long: as it is


@settings(max_examples=80)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60))
def test_any_text_becomes_known_elements_alone(text):
    made = Markup(rendered(text))
    assert not made.odd and set(made.tags) <= TAGS, made.tags
    assert {name for tag in made.attributes for name in tag} <= NAMES
    assert not any(re.search("javascript|url|:", value or "") for tag in made.attributes
                   for name, value in tag.items() if name != "title")


def test_answers_are_ordered_by_reward_and_many_pictures_stand_beside_them():
    view = group(*(rollout(i, reward=reward) for i, reward in enumerate((0.5, None, 0.9, 0.5))))
    for first, indices in (("", [0, 1, 2, 3]), ("best", [2, 0, 3, 1]), ("worst", [0, 3, 2, 1]), ("x", [0, 1, 2, 3])):
        assert [r.index for r in cards.ordered(view, first).rollouts] == indices
    beside = {number: cards.group(group(media=(image(),) * number), Plain()).split('"')[1] for number in (1, 3, 4, 12)}
    assert beside == {1: "v v-group v-beside", 3: "v v-group", 4: "v v-group v-many", 12: "v v-group v-many"}
    assert "v-many" not in cards.group(group(media=(image(),) * 4 + (clip(0.0, 1.0),)), Plain())


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


def test_elements_numbers_and_what_cannot_be_seen():
    assert el("a", "x & y", class_="v-b", data_at=0.5, hidden=True, title=None, draggable=False) == (
        '<a class="v-b" data-at="0.5" hidden>x &amp; y</a>')
    assert el("img", src='"') == '<img src="&quot;"/>' and el("p", Html("<i>a</i>"), None, "") == "<p><i>a</i></p>"
    assert join(["<", Html("<br/>"), None, ""], " ") == "&lt; <br/>"
    assert link({"page": "rollouts", "run": "a b&c", "step": 0, "group": ""}, "go") == (
        '<a class="go" href="?page=rollouts&amp;run=a%20b%26c&amp;step=0">go</a>')
    assert visible("a\x00b\rc\x7f\u202ed\u200be\ud800") == "a␀b␍c␡⟨U+202E⟩d⟨U+200B⟩e⟨U+D800⟩"
    kept = "tab\tline\n\U0001f468\u200d\U0001f469 \u0645\u200c\u062c"  # joiners belong to emoji and scripts
    assert visible(kept) == kept
    for value, shown in ((0.12345, "0.123"), (-0.5, "−0.5"), (1234.5, "1,234"), (-0.0, "0"), (None, "–"),
                         (float("nan"), "–"), (True, "–"), (float("-inf"), "−∞"), (10 ** 400, "∞"), ("1", "–"),
                         (1e-5, "1e−05"), (12, "12")):
        assert number(value) == shown
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


class Browser:
    """What a browser shows, and the digests that it sends with the next request."""

    def __init__(self, number):
        self.shown, self.digests = [""] * number, [""] * number

    def take(self, results):
        number = len(self.shown)
        for i, value in enumerate(results):
            if value != gr.skip():
                (self.shown if i < number else self.digests)[i % number] = value


def test_only_what_changed_is_sent_and_a_tick_loses_no_later_location():
    browser = Browser(2)
    browser.take(same(browser.digests, ("list", "group 0")))
    assert browser.shown == ["list", "group 0"]
    sent = same(browser.digests, ("list", "group 1"))
    assert [value == gr.skip() for value in sent] == [True, False, True, False]
    browser.take(sent)
    assert browser.shown == ["list", "group 1"] and same([""], [""])[0] == ""
    # a tick asks for the list, beside a location that asks for the list and the group
    browser = Browser(2)
    browser.take(same(browser.digests, ("list", "group 0")))
    tick = [same(browser.digests[:1], ["list"])[0], gr.skip(), same(browser.digests[:1], ["list"])[1], gr.skip()]
    browser.take(same(browser.digests, ("list", "group 1")))
    browser.take(tick)
    browser.take(same(browser.digests, ("list", "group 0")))  # back again
    assert browser.shown == ["list", "group 0"]


class Sides(Markup):
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
    found = diffs.words("a " * 30_000, "b " * 30_000)
    assert "are compared" in found and found.count("a ") < 20_000


WORDS = st.lists(st.sampled_from(["a", "b ", "<b>", "\n", "</div>", "&amp;", "12", "é "]), max_size=12).map("".join)


@settings(max_examples=60)
@given(WORDS, WORDS)
def test_both_sides_come_back(before, after):
    if before != after:
        found = Sides(diffs.words(before, after))
        assert (found.before, found.after) == (before, after)
        assert set(found.tags) <= {"div", "del", "ins"} and not found.odd
