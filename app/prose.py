"""Renders Markdown and LaTeX written by a model as HTML. The input is untrusted, so the output has only known elements.

Markdown (CommonMark and tables) is parsed into tokens; only the elements in _TAGS are written, without attributes. Raw
HTML, links and images remain text, so nothing can be loaded or followed. Formulas become MathML, which browsers draw
without a script; only known MathML elements and attributes are kept. A formula that cannot be parsed remains text."""

import html
import re
from collections.abc import Sequence
from typing import Any
from xml.etree.ElementTree import Element

from latex2mathml.converter import Converter
from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

from .html import Html, el, join

MOST = 40_000
"""Largest number of characters rendered as Markdown; longer texts are shown raw."""
_MOST_FORMULA = 2_000
_MOST_FORMULAS = 300
_TAGS = {"p", "ul", "ol", "li", "blockquote", "em", "strong", "s", "table", "thead", "tbody", "tr", "th", "td"}
_SPANS = (("$$", "$$"), ("\\[", "\\]"), ("\\(", "\\)"), ("$", "$"))
"""Opening and closing delimiters of inline formulas; the first two pairs are for display style."""
_DEFINES = re.compile(r"\\(?:(?:re)?newcommand|g?def|let|DeclareMathOperator|newenvironment)(?![a-zA-Z])")
"""LaTeX commands that define macros. Formulas with them are not rendered, because expansion may be unbounded."""
_MATH_TAGS = set("math mrow mi mo mn ms mtext mspace mfrac msqrt mroot msub msup msubsup munder mover munderover "
                 "mtable mtr mtd mstyle mpadded mphantom menclose mmultiscripts mprescripts none".split())
_WORDS = set("display mathvariant stretchy fence form largeop movablelimits accent accentunder columnalign "
             "displaystyle scriptlevel separator symmetric columnlines rowlines notation".split())
_SIZES = {"linethickness", "width", "minsize", "maxsize", "lspace", "rspace", "rowspacing", "columnspacing"}
_WORD = re.compile(r"[a-z0-9 -]{1,60}")
_SIZE = re.compile(r"-?\d?\.?\d{1,3}(?:em|ex|pt|px|cm|mm)?")


def rendered(text: str) -> Html:
    """Returns the HTML of a model's Markdown text. A text of more than MOST characters is escaped and otherwise
    unchanged."""
    if len(text) > MOST:
        return el("div", text, class_="v-text")
    try:
        tokens = _PARSER.parse(text, {})
    except RecursionError:
        return el("div", text, class_="v-text")
    return el("div", _Drawing().nodes(tokens), class_="v-prose")


class _Drawing:
    def __init__(self) -> None:
        self.left = _MOST_FORMULAS

    def nodes(self, tokens: Sequence[Token]) -> Html:
        stack: list[list[Any]] = [[]]
        for token in tokens:
            if token.nesting == 1:
                stack.append([])
            elif token.nesting == -1:
                children = stack.pop()
                stack[-1].append(_element(token, children))
            else:
                stack[-1].append(self._leaf(token))
        return join(stack[0])

    def _leaf(self, token: Token) -> Html | str:
        if token.type == "inline":
            return self.nodes(token.children or ())
        if token.type in ("fence", "code_block"):
            return el("pre", el("code", token.content))
        if token.type == "code_inline":
            return el("code", token.content)
        if token.type in ("softbreak", "hardbreak"):
            return Html("\n") if token.type == "softbreak" else el("br")
        if token.type == "hr":
            return el("hr")
        if token.type == "formula":
            self.left -= 1
            return formula(token.content, token.markup, token.block) if self.left >= 0 else _raw(token)
        return token.content


def _element(token: Token, children: Sequence[Any]) -> Html:
    if token.hidden:  # a paragraph of a tight list
        return join(children)
    if token.type == "heading_close":  # not a heading of the page itself
        return el("p", el("strong", *children), class_=f"v-head-{token.tag}")
    return el(token.tag, *children) if token.tag in _TAGS else join(children)


def formula(latex: str, mark: str = "$", alone: bool = False) -> Html:
    """Converts LaTeX to MathML. If that fails, returns the source with its delimiters. `mark` is the opening delimiter,
    and `alone` selects display style."""
    close = dict(_SPANS).get(mark, mark)
    raw = el("code", f"{mark}{latex}{close}", class_="v-tag")
    if len(latex) > _MOST_FORMULA or _DEFINES.search(latex) or not latex.strip():
        return raw
    try:
        tree = Converter(display="block" if alone else "inline").convert_to_element(latex)
        drawn = _math(tree)
    except Exception:  # the converter may raise anything for unknown input
        return raw
    return el("span", drawn, class_=f"v-formula{' v-alone' if alone else ''}", title=latex)


def _raw(token: Token) -> Html:
    return el("code", token.content, class_="v-tag")


def _math(node: Element) -> Html:
    children = [_math(child) for child in node]
    if node.tag not in _MATH_TAGS:
        return join(children)
    attributes = {name: value for name, value in node.attrib.items()
                  if (name in _WORDS and _WORD.fullmatch(value)) or (name in _SIZES and _SIZE.fullmatch(value))}
    return el(node.tag, html.unescape(node.text or ""), *children, **attributes)


def _inline(state: StateInline, silent: bool) -> bool:
    opens, closes = next(((a, b) for a, b in _SPANS if state.src.startswith(a, state.pos)), ("", ""))
    if not opens:
        return False
    begin = state.pos + len(opens)
    end = state.src.find(closes, begin, min(state.posMax, begin + _MOST_FORMULA))
    content = state.src[begin:end]
    if end <= begin or (opens == "$" and (content[0].isspace() or content[-1].isspace()
                                         or state.src[end + 1:end + 2].isdigit())):
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content, token.markup, token.block = content, opens, opens in ("$$", "\\[")
    state.pos = end + len(closes)
    return True


def _block(state: StateBlock, first: int, last: int, silent: bool) -> bool:
    lines = [state.src[state.bMarks[i] + state.tShift[i]:state.eMarks[i]] for i in range(first, min(last, first + 60))]
    opens = next((mark for mark in ("$$", "\\[") if lines and lines[0].startswith(mark)), "")
    closes = dict(_SPANS).get(opens, "")
    ends = next((i for i, line in enumerate(lines)
                 if opens and line.rstrip().endswith(closes) and (i or len(line.rstrip()) > 3)), None)
    if ends is None or not opens:
        return False
    if not silent:
        token = state.push("formula", "", 0)
        token.content = "\n".join(lines[:ends + 1]).rstrip()[len(opens):-len(closes)]
        token.markup, token.block = opens, True
        state.line = first + ends + 1
    return True


def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"]).disable(
        ["html_block", "html_inline", "image", "link", "autolink", "reference"])
    parser.inline.ruler.before("escape", "formula", _inline)
    parser.block.ruler.before("fence", "formula", _block, {"alt": ["paragraph"]})
    return parser


_PARSER = _parser()
