"""Parses the text of an answer: tags, output format, labels, choices and numbers. Linear time; no text makes a function
raise."""

import math
import re
import unicodedata
from collections.abc import Callable
from typing import Literal, Self

from vlrl.rewards.numbers import numbers
from vlrl.rewards.scripts import pieces, western
from vlrl.types import Answer

_TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_OPENING = re.compile(r"([<\[\u25c1])(?!answer\b)([A-Za-z][\w:-]*+)([>\]\u25b7])")
_MARKED = re.compile(r"\s*+(?:<\w|\\boxed\{)")
_SPACE = " \t\r\n\f\v\u00a0"
_AROUND = (_SPACE + "\"'`()[]{}<>*_,;:!?\u2018\u2019\u201c\u201d\u201e\u00ab\u00bb\u00bf\u00a1\u2026\u060c\u061b\u061f"
           "\u0964\u3001\u3002\u300c\u300d\u300e\u300f\u3010\u3011\uff0c\uff01\uff1f\uff1a\uff1b")
_DASHES = dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-")
_RAISED = re.compile(r"(?<=\d)(?=[\u00b2\u00b3\u00b9\u2070\u2074-\u2079])")
"""Matches the position between a digit and a superscript digit. NFKC normalisation would turn the superscript into an
ordinary digit, but 10² is not 102."""
_YES = re.compile(r"(?<![a-z])(?:yes|true|correct)(?![a-z])")
_NO = re.compile(r"(?<![a-z])(?:no|false|incorrect)(?![a-z])")
_NOT = re.compile(r"(?<![a-z])(?:not|isn't|n't)\s{1,9}(?:yes|true|correct)(?![a-z])")
_ALONE = re.compile(r"(?<![A-Za-z0-9'])[A-Z](?![A-Za-z0-9'])(?!(?<=A)\s(?!(?:and|or)\s)[a-z])",
                    re.ASCII)  # "A cat" has an article, "A and B" none
_SMALL = re.compile(r"(?<![a-z0-9])[a-z](?![a-z0-9])", re.ASCII)
_OTHER_WORDS = re.compile(r"\w\w")
_EMPTY = ("[]", "{}", "```json\n[]\n```", "```json\n{}\n```")
_NOTHING = re.compile(r"(?<!\w)(?:no|none|not|nothing|nowhere|neither|null|empty|absent|missing|without|cannot)(?!\w)"
                      r"|n['\u2019]t(?!\w)|没有|不存在|无")
_DENIES = re.compile(
    r"\W{0,9}(?:(?:it|this|that|these|there|i|we|you|the\s{1,9}\w{1,20})(?:\s{1,9}|['\u2019]s\s{1,9}))?"
    r"(?:(?:is|are|am|was|were|be|do|does|did|should|would|will|can|could|must)\s{1,9}){0,2}"
    r"(?:not|never|neither|cannot|anything\s{1,9}but|no(?=\s{1,9}[^\W\d])"
    r"|(?:is|are|was|were|do|does|did|should|would|wo|ca|could|must)n['\u2019]t)(?!\w)"
    r"|\W{0,9}(?:答案|它|这|那)?(?:不是|并非|不选)", re.IGNORECASE)
_CLAUSE = re.compile(r"[.,;:!?\n、。，；：！？]|(?<!\w)(?:but|so|because|since|hence|therefore|thus)(?!\w)"
                     r"|但|所以|因为", re.IGNORECASE)
_CERTAIN = re.compile(r"(?:no|without(?:\sa)?)\s(?:doubt|question)|not\s(?:only|just)|没错", re.IGNORECASE)
_NOT_SO = re.compile(r"(?<!\w)(?:not|no|never|neither|nor|none|cannot|without|wrong|incorrect|false|absent|missing)"
                     r"(?!\w)|n['\u2019]t(?!\w)|不|没|并非|错", re.IGNORECASE)
_REVOKED = re.compile(
    r"(?:(?:is|are|was|were)(?:\s{1,9}not|n['\u2019]t)\s{1,9}(?:right|correct|true|it|so|there|(?:the|an)\s(?:right\s|"
    r"correct\s)?answer)|(?:is|are|was|were)\s{1,9}(?:wrong|incorrect|false)|不对|错误|不正确)\W{0,9}$", re.IGNORECASE)
_UNSURE = re.compile(r"(?:(?<!\w)(?:not|cannot)|n['\u2019]t)\s{1,9}(?:know|sure|certain|tell|say|decide)(?!\w)")


def extract_tag(text: str, tag: str, which: Literal["first", "last"] = "first") -> str | None:
    """The content of the first or last `<tag>...</tag>` in a text, without stripping; None if no tag is closed.

    Pairs of tags are matched from the left and do not overlap: each ends at the first closing tag after its opening
    tag."""
    return between(text, f"<{tag}>", f"</{tag}>", which)


def between(text: str, opening: str, closing: str, which: Literal["first", "last"] = "first") -> str | None:
    """The text between the first or last pair of delimiters, matched as in `extract_tag`; None if there is no pair."""
    content, at = None, 0
    while (start := text.find(opening, at)) >= 0:
        start += len(opening)
        end = text.find(closing, start)
        if end < 0:
            break
        content, at = text[start:end], end + len(closing)
        if which == "first":
            break
    return content


def answer_tag(text: str, which: Literal["first", "last"] = "first") -> str | None:
    """The content of the first or last `<answer>` tag after the thinking; None if there is none.

    An <answer> tag inside <think> does not count."""
    return extract_tag(text.partition("</think>")[2] if "</think>" in text else text, "answer", which)


def think_answer_format(text: str) -> float:
    """1 if the text is `<think>...</think> <answer>...</answer>` and nothing else, else 0.

    This is DeepSeek-R1's format (2501.12948), but each of the four tags must occur exactly once. A regular expression
    alone would also accept nested or repeated blocks."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS) or not (text.startswith(_TAGS[0]) and text.endswith(_TAGS[3])):
        return 0.0
    closed, answer = text.find(_TAGS[1]), text.find(_TAGS[2])
    return float(closed < answer and not text[closed + len(_TAGS[1]):answer].strip())


def think_answer_within(text: str, content: Callable[[str], bool] | None = None) -> float:
    """1 if the text contains `<think>...</think> <answer>...</answer>`, else 0.

    Text before and after it is allowed, but each of the four tags must occur exactly once. `content` is an optional
    predicate, which must also hold for the content of the answer tag."""
    if any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    at = [text.find(tag) for tag in _TAGS]
    if at != sorted(at) or text[at[1] + len(_TAGS[1]):at[2]].strip():
        return 0.0
    return float(content is None or content(text[at[2] + len(_TAGS[2]):at[3]]))


def closing_tag(opened: str) -> str:
    """The closing tag for the thinking block that a prompt has left open: "</think>" if the prompt opened "<think>". ""
    if no block is open."""
    for match in reversed([*_OPENING.finditer(opened)]):
        closing = f"{match[1]}/{match[2]}{match[3]}"
        if closing not in opened[match.end():]:
            return closing
    return ""


def scored_text(text: str, opened: str = "") -> str:
    """The text that is scored: `opened`, which is the end of the prompt that the model continued (such as "<think>"),
    followed by the completion `text`.

    If the prompt both opened and closed a block, such as an empty <think></think>, `opened` is left out in two cases.
    Either the completion starts with a block of the same name, which replaces the prompt's block. Or it starts with
    neither a tag nor a box, so its format has no blocks."""
    if not opened or closing_tag(opened):
        return opened + text
    blocks = [match[0] for match in _OPENING.finditer(opened)]
    replaced = blocks and (text.lstrip().startswith(tuple(blocks)) or not _MARKED.match(text))
    return text if replaced else opened + text


def completion_for(text: str, opened: str = "") -> str:
    """The completion that makes the scored text equal to `text` (for example the perfect answer) if the prompt ends in
    `opened`.

    If `text` starts with the opened tags, they are removed. If it contains neither the opened tags nor the closing tag,
    the open block is closed first."""
    closing, given = closing_tag(opened), text.lstrip()
    for begun in filter(None, (opened.strip(), closing.replace("/", "", 1))):
        if given.startswith(begun):
            rest = given[len(begun):]
            return rest.lstrip() if opened[-1].isspace() else rest
    return f"\n{closing}\n\n{text}" if closing and closing not in text else text


def parse_answer(text: str, n_tokens: int = 0, truncated: bool = False, step: int = 0, opened: str = "") -> Answer:
    """Builds an Answer from the completion `text`, with `reasoning` and `final` stripped. The Answer's `text` also
    includes what the prompt `opened`; see `scored_text`. The other arguments are stored in the Answer unchanged.

    - `reasoning` is the content of the first closed <think>, or everything before a </think> whose block the prompt
    opened.
    - `final` is the content of the last closed <answer> after the thinking; if there is none, the text after the last
    </think>; if there is no thinking either, the full text.
    - If the thinking is never closed, all of it is reasoning and `final` is empty, so that nothing in it can be
    rewarded."""
    written, text = text, scored_text(text, opened)
    before, closed, after = text.rpartition("</think>")
    reasoning = extract_tag(text, "think")
    unfinished = not closed and "<think>" in text
    if reasoning is None:
        reasoning = text.partition("<think>")[2] if unfinished else before if closed else ""
    final = answer_tag(text, "last")
    if final is None:
        final = "" if unfinished else after if closed else text
    return Answer(text=text, reasoning=reasoning.strip(), final=final.strip(), n_tokens=n_tokens, truncated=truncated,
                  step=step, opened=text.removesuffix(written))


class EnvironmentAction(str):
    """The text that an environment receives as an action: what the prompt `opened`, followed by the completion (see
    `scored_text`). `opened` is the part that comes from the prompt."""

    opened: str

    def __new__(cls, text: str, opened: str = "") -> Self:
        whole = scored_text(text, opened)
        action = super().__new__(cls, whole)
        action.opened = whole.removesuffix(text)
        return action


def said(answer: Answer | str) -> str:
    """The text of an answer or an environment action, for formats without thinking: if the prompt opened a thinking
    block, everything up to its end is removed ("" if it is never closed). A thinking block that the model itself
    opens is not removed."""
    opened: str = getattr(answer, "opened", "")
    closing, text = closing_tag(opened), str(answer.text if isinstance(answer, Answer) else answer).removeprefix(opened)
    return text.partition(closing)[2].lstrip() if closing else text


def clean_label(text: str) -> str:
    """Normalises a label: lower case, single spaces, without surrounding quotes, brackets and punctuation.

    Characters that distinguish labels are not removed (`C++` and `C#`, `-5` and `5`)."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _RAISED.sub("^", western(text))).translate(_DASHES)
    plain = text.lstrip(_AROUND).rstrip(_AROUND + ".") or text.strip(_SPACE)
    return " ".join(plain.casefold().split())


def same_label(a: str, b: str) -> bool:
    """Whether two labels are equal after `clean_label`."""
    return clean_label(a) == clean_label(b)


def number(text: str) -> float | None:
    """The first stand-alone number in a text ("3", "-2.5", "1,200"); None if there is none. Digits in an expression or
    a word ("x2", "3D", "3^2") are not a number."""
    value = next(numbers(text), math.nan)
    return value if math.isfinite(value) else None


def yes_no(text: str) -> str | None:
    """Reads "yes" or "no" from a text: "yes" if it contains a positive word (yes, true, correct), else "no" if it
    contains a negative word, else None.

    Only whole words count, so "unknown" gives None. "not correct" and "not true" give "no". This is the rule of
    Curr-ReFT (2503.07065) with these two corrections."""
    text = _NOT.sub(" no ", text.casefold())
    return "yes" if _YES.search(text) else "no" if _NO.search(text) else None


def choice_letters(text: str, letters: str = "ABCDE") -> str:
    """Which of the option letters `letters` a text names, in order of appearance and without repetition, joined by
    commas: "B,D". "" if the text names none.

    A letter must stand alone. Lower-case letters only count if the text contains no other words, so that the article
    "a" is not read as an option."""
    named = [m[0] for m in _ALONE.finditer(text) if m[0] in letters]
    if not named and not _OTHER_WORDS.search(text):
        named = [m[0].upper() for m in _SMALL.finditer(text) if m[0].upper() in letters]
    return ",".join(dict.fromkeys(named))


def token_f1(a: str, b: str, contained: bool = False) -> float:
    """The F1 score of the sets of words of two texts, in [0, 1], ignoring case; 1 if both texts are empty.

    Two single words of which one contains the other are a special case. With `contained` they score 1, even if one is
    a single letter (GUI-R1, 2504.10458). Without `contained` they score the F1 of their letters, or 0 if one is a
    single letter."""
    first, second = set(a.casefold().split()), set(b.casefold().split())
    if not first or not second:
        return float(first == second)
    if len(first) == len(second) == 1:
        short, long = sorted((*first, *second), key=len)
        if short in long:
            if contained or short == long:
                return 1.0
            return 2 * len(short) / (len(short) + len(long)) if len(short) > 1 else 0.0
    first, second = set(pieces(a.casefold())), set(pieces(b.casefold()))
    return 2 * len(first & second) / (len(first) + len(second))


def denies(text: str) -> bool:
    """Whether a text starts with a negation: "not a cat", "It isn't C", "do not STOP", "no cat"."""
    return _DENIES.match(text) is not None


def clauses(text: str) -> list[str]:
    """Splits a text into clauses at commas, full stops and words such as "but" and "so"."""
    return _CLAUSE.split(text)


def negates(clause: str) -> bool:
    """Whether a clause contains a negation: "is not there", "is wrong", "no"; but not "no doubt"."""
    return _NOT_SO.search(_CERTAIN.sub(" ", clause)) is not None


def retracted(text: str) -> bool:
    """Whether a text ends by taking its statement back: "3 is wrong"."""
    return _REVOKED.search(text[-100:]) is not None


def says_none(text: str) -> bool:
    """Whether a text says that nothing is there, without containing a number: "none", "No Objects", "[]", "the cat is
    absent".

    False for any other text, including broken JSON, single characters and "I do not know"."""
    text = text.strip().casefold()
    if any(c.isdigit() for c in text) or _UNSURE.search(text):
        return False
    return text in _EMPTY or _NOTHING.search(text) is not None


def answer_text(text: str) -> str:
    """The answer in a text, without the thinking: the content of the first <answer> tag, even if it is not closed;
    without such a tag, the text after the thinking. "" if the thinking is never closed."""
    tagged = answer_tag(text)
    if tagged is not None:
        return tagged.strip()
    if "<think>" in text and "</think>" not in text:
        return ""
    rest = text.rpartition("</think>")[2]
    return (rest.partition("<answer>")[2] or rest).strip()


def answer_offset(text: str) -> int:
    """The character offset at which the final answer starts, including its <answer> tag; 0 if the whole text is the
    answer."""
    tag = text.rfind("<answer>")
    return tag if tag >= 0 else max(text.rfind(parse_answer(text).final), 0)
