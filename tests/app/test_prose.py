"""Markdown and LaTeX that a model wrote: what becomes of it by hand, and that nothing of it loads, runs or hangs."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.markup import Markup
from tests.app.views import group, rollout
from vlrl.app import prose, reading
from vlrl.app.prose import formula, rendered

TAGS = set("div p ul ol li blockquote em strong s table thead tbody tr th td pre code br hr "
           "span".split()) | prose._MATH_TAGS
NAMES = {"class", "title", *prose._WORDS, *prose._SIZES}
PIECES = ["# h", "\n", "\n\n", "- a", "1. b", "> ", "*", "**", "_", "`", "```", "|a|b|\n|-|-|\n", "[x](http://e.com/)",
          "![i](javascript:x)", "<img src=x onerror=alert(1)>", "<script>", "</div>", "<!--", "&lt;", "&#106;", "$",
          "$$", "\\(", "\\)", "\\[", "\\]", "\\frac", "\\href{javascript:x}", "\\text{<b>}", "\\color{url(x)}", "{",
          "}", "^",
          "_", "\\begin{matrix}", "\\end{matrix}", "&", "\\\\", "\\left(", "\u202e", "[r]: http://e.com", "x", " "]


@pytest.mark.parametrize(("text", "html"), [
    ("a *b* **c** `d`", "<p>a <em>b</em> <strong>c</strong> <code>d</code></p>"),
    ("# Way", '<p class="v-head-h1"><strong>Way</strong></p>'),
    ("- a\n- b", "<ul><li>a</li><li>b</li></ul>"),
    ("| a |\n|---|\n| 1 |", "<table><thead><tr><th>a</th></tr></thead><tbody><tr><td>1</td></tr></tbody></table>"),
    ("```py\nx < 1\n```", "<pre><code>x &lt; 1\n</code></pre>"),
    ("[a](http://e.com) ![b](http://e.com/b.png)", "<p>[a](http://e.com) ![b](http://e.com/b.png)</p>"),
    ("<b>x</b> <http://e.com>", "<p>&lt;b&gt;x&lt;/b&gt; &lt;http://e.com&gt;</p>"),
    ("it costs $5, or $6", "<p>it costs $5, or $6</p>"), ("", "")])
def test_markdown_by_hand(text, html):
    assert rendered(text) == f'<div class="v-prose">{html}</div>'


X2 = "<mrow><msup><mi>x</mi><mn>2</mn></msup></mrow>"


@pytest.mark.parametrize("text", ["$x^2$", "\\(x^2\\)"])
def test_a_formula_in_a_line(text):
    assert f'<math display="inline">{X2}</math>' in rendered(f"so {text}, yes")


@pytest.mark.parametrize("text", ["$$x^2$$", "\\[x^2\\]", "$$\nx^2\n$$", "a\n\\[\nx^2\n\\]\nb"])
def test_a_formula_that_stands_alone(text):
    assert f'<math display="block">{X2}</math>' in rendered(text)


@pytest.mark.parametrize("latex", ["\\newcommand{\\a}{\\a\\a}\\a", "\\frac", "x^2^3", "\\left(", "x" * 3000,
                                   "\\def\\a{b}", " "])
def test_a_formula_that_cannot_be_read_stays_text(latex):
    assert formula(latex) == f'<code class="v-tag">${latex}$</code>'


def test_a_formula_brings_no_address_and_no_style():
    made = Markup(formula("\\href{javascript:x}{a} \\style{color:red}{b} \\class{c}{d} \\color{red}e \\text{<script>}"))
    assert {name for tag in made.attributes for name in tag} <= {"class", "title", "display"}
    assert "<script>" in made.text and not made.odd


@settings(max_examples=150)
@given(st.lists(st.sampled_from(PIECES), max_size=25).map("".join) | st.text(max_size=60))
def test_any_text_becomes_known_elements_alone(text):
    made = Markup(rendered(text))
    assert not made.odd and set(made.tags) <= TAGS, made.tags
    assert {name for tag in made.attributes for name in tag} <= NAMES
    assert not any(re.search("javascript|url|:", value or "") for tag in made.attributes
                   for name, value in tag.items() if name != "title")


@pytest.mark.parametrize("text", ["*a **a " * 6000, "[" * 40_000, "`a``b" * 8000, "$a" * 20_000, ">" * 40_000,
                                  "$" + "{" * 1900 + "$", "$" + "\\sqrt{" * 250 + "}" * 250 + "$", "$x$ " * 9000])
def test_texts_made_to_last_are_bounded(text):
    assert len(rendered(text[:prose.MOST])) < 500_000


def test_a_text_that_is_too_long_stays_as_it_is():
    assert rendered("*a*" * prose.MOST).startswith('<div class="v-text">*a**a*')


# --- order ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "indices"), [("", [0, 1, 2, 3]), ("best", [2, 0, 3, 1]), ("worst", [0, 3, 2, 1]),
                                                ("x", [0, 1, 2, 3])])
def test_answers_are_ordered_by_reward(first, indices):
    rewards = (0.5, None, 0.9, 0.5)
    view = group(*(rollout(i, reward=reward) for i, reward in enumerate(rewards)))
    assert [r.index for r in reading.ordered(view, first).rollouts] == indices


def test_many_pictures_stand_beside_the_answers():
    from tests.app.views import Plain, clip, image
    from vlrl.app import cards

    beside = {number: cards.group(group(media=(image(),) * number), Plain()).split('"')[1] for number in (1, 3, 4, 12)}
    assert beside == {1: "v v-group v-beside", 3: "v v-group", 4: "v v-group v-many", 12: "v v-group v-many"}
    assert "v-many" not in cards.group(group(media=(image(),) * 4 + (clip(0.0, 1.0),)), Plain())
