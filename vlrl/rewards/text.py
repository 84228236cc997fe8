"""Text of an answer: tags, format, labels, choices and numbers. Linear time, never raises, whatever the text."""

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
"""The position between a number and a superscript digit, which NFKC would put on the line: 10\u00b2 is not 102."""
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
    """The content of the first or last `<tag>...</tag>`, as written; None if no such pair is closed.

    Pairs are read from the left and do not overlap: a pair ends at the first closing tag after its opening tag."""
    return between(text, f"<{tag}>", f"</{tag}>", which)


def between(text: str, opening: str, closing: str, which: Literal["first", "last"] = "first") -> str | None:
    """The text between an opening and a closing mark, as `extract_tag` reads tags."""
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
    """The content of the first or last `<answer>` after the thinking; None without one.

    Nothing inside <think> is an answer, not even an <answer> tag."""
    return extract_tag(text.partition("</think>")[2] if "</think>" in text else text, "answer", which)


def think_answer_format(text: str) -> float:
    """1 if the text is `<think>...</think> <answer>...</answer>` and nothing else, else 0.

    Each of the four tags must occur exactly once (DeepSeek-R1's format, 2501.12948, with the tags counted: the bare
    regular expression also accepts several nested blocks)."""
    text = text.strip()
    if any(text.count(tag) != 1 for tag in _TAGS) or not (text.startswith(_TAGS[0]) and text.endswith(_TAGS[3])):
        return 0.0
    closed, answer = text.find(_TAGS[1]), text.find(_TAGS[2])
    return float(closed < answer and not text[closed + len(_TAGS[1]):answer].strip())


def think_answer_within(text: str, content: Callable[[str], bool] | None = None) -> float:
    """1 if `<think>...</think> <answer>...</answer>` occurs somewhere in the text, else 0.

    Text before and after is allowed; each of the four tags must occur exactly once. `content` may further test the
    content of the answer tag."""
    if any(text.count(tag) != 1 for tag in _TAGS):
        return 0.0
    at = [text.find(tag) for tag in _TAGS]
    if at != sorted(at) or text[at[1] + len(_TAGS[1]):at[2]].strip():
        return 0.0
    return float(content is None or content(text[at[2] + len(_TAGS[2]):at[3]]))


def closing_tag(opened: str) -> str:
    """The closing tag of the thinking that a prompt has opened: "</think>" for "<think>"; "" if none is open."""
    for match in reversed([*_OPENING.finditer(opened)]):
        closing = f"{match[1]}/{match[2]}{match[3]}"
        if closing not in opened[match.end():]:
            return closing
    return ""


def scored_text(text: str, opened: str = "") -> str:
    """The text that is scored: what the prompt `opened`, which the model continued, and the completion.

    A block that the prompt also closed, such as an empty <think>, is left out before a block of the same name, which
    replaces it, and before an answer that does not start with a tag or a box, which has no such format."""
    if not opened or closing_tag(opened):
        return opened + text
    blocks = [match[0] for match in _OPENING.finditer(opened)]
    replaced = blocks and (text.lstrip().startswith(tuple(blocks)) or not _MARKED.match(text))
    return text if replaced else opened + text


def completion_for(text: str, opened: str = "") -> str:
    """The completion that gives an answer, such as the perfect one, after what the prompt `opened`.

    A common beginning is dropped; if the answer has neither that nor the closing tag, the open block is closed
    first."""
    closing, given = closing_tag(opened), text.lstrip()
    for begun in filter(None, (opened.strip(), closing.replace("/", "", 1))):
        if given.startswith(begun):
            rest = given[len(begun):]
            return rest.lstrip() if opened[-1].isspace() else rest
    return f"\n{closing}\n\n{text}" if closing and closing not in text else text


def parse_answer(text: str, n_tokens: int = 0, truncated: bool = False, step: int = 0, opened: str = "") -> Answer:
    """An Answer with `reasoning` and `final`, both stripped. `text` is the completion; the text of the answer also has
    what the prompt `opened`, see `scored_text`.

    `reasoning` is the first closed <think>, or everything before a </think> that the prompt opened. `final` is the last
    closed <answer> after the thinking, else the text after the last </think>, else the full text; thinking that was
    opened and never closed is all reasoning, so that nothing in it can be rewarded."""
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
    """A completion as an environment receives it, see `scored_text`; `opened` is its part from the prompt."""

    opened: str

    def __new__(cls, text: str, opened: str = "") -> Self:
        whole = scored_text(text, opened)
        action = super().__new__(cls, whole)
        action.opened = whole.removesuffix(text)
        return action


def said(answer: Answer | str) -> str:
    """The text of an answer, or of an environment action, for formats without thinking: without the thinking that the
    prompt has opened, "" if that never ends. Thinking that the model opens itself stays."""
    opened: str = getattr(answer, "opened", "")
    closing, text = closing_tag(opened), str(answer.text if isinstance(answer, Answer) else answer).removeprefix(opened)
    return text.partition(closing)[2].lstrip() if closing else text


def clean_label(text: str) -> str:
    """A label without case, surrounding quotes, brackets and punctuation, and extra spaces.

    Signs that distinguish labels (`C++` and `C#`, `-5` and `5`) stay."""
    if not text.isascii():
        text = unicodedata.normalize("NFKC", _RAISED.sub("^", western(text))).translate(_DASHES)
    plain = text.lstrip(_AROUND).rstrip(_AROUND + ".") or text.strip(_SPACE)
    return " ".join(plain.casefold().split())


def same_label(a: str, b: str) -> bool:
    """Whether two labels are equal after `clean_label`."""
    return clean_label(a) == clean_label(b)


def number(text: str) -> float | None:
    """The first stand-alone number of a text ("3", "-2.5", "1,200"); None without one, or if it is part of an
    expression or a word ("x2", "3D", "3^2")."""
    value = next(numbers(text), math.nan)
    return value if math.isfinite(value) else None


def yes_no(text: str) -> str | None:
    """"yes" or "no": the first matching word, yes-like words (yes, true, correct) before no-like ones.

    Whole words only, so "unknown" says nothing; "not correct" and "not true" say no. Curr-ReFT (2503.07065), with these
    corrections."""
    text = _NOT.sub(" no ", text.casefold())
    return "yes" if _YES.search(text) else "no" if _NO.search(text) else None


def choice_letters(text: str, letters: str = "ABCDE") -> str:
    """The options a text names, in its order and each once, joined by commas: "B,D"; "" for none.

    A letter counts if it stands alone; a lower-case one only if the text has nothing else, so that an article is
    none."""
    named = [m[0] for m in _ALONE.finditer(text) if m[0] in letters]
    if not named and not _OTHER_WORDS.search(text):
        named = [m[0].upper() for m in _SMALL.finditer(text) if m[0].upper() in letters]
    return ",".join(dict.fromkeys(named))


def token_f1(a: str, b: str, contained: bool = False) -> float:
    """F1 of the word sets of two texts, in [0, 1], ignoring case; 1 for two empty texts.

    Of two single words one may contain the other. With `contained` that counts as equal, even for one letter (GUI-R1,
    2504.10458); otherwise it scores the F1 of their letters, and a single letter scores 0."""
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
    """The parts of a text between commas, full stops and words such as "but" and "so"."""
    return _CLAUSE.split(text)


def negates(clause: str) -> bool:
    """Whether a clause negates something: "is not there", "is wrong", "no"; "no doubt" does not."""
    return _NOT_SO.search(_CERTAIN.sub(" ", clause)) is not None


def retracted(text: str) -> bool:
    """Whether a text ends by retracting what it said: "3 is wrong"."""
    return _REVOKED.search(text[-100:]) is not None


def says_none(text: str) -> bool:
    """Whether a text says that nothing is there, without any number: "none", "No Objects", "[]", "the cat is absent".

    Other words, broken JSON, single signs and "I do not know" do not."""
    text = text.strip().casefold()
    if any(c.isdigit() for c in text) or _UNSURE.search(text):
        return False
    return text in _EMPTY or _NOTHING.search(text) is not None


def answer_text(text: str) -> str:
    """The answer without the thinking: the first <answer> tag, even an unclosed one, else the rest of the text. "" for
    thinking that never ends."""
    tagged = answer_tag(text)
    if tagged is not None:
        return tagged.strip()
    if "<think>" in text and "</think>" not in text:
        return ""
    rest = text.rpartition("</think>")[2]
    return (rest.partition("<answer>")[2] or rest).strip()


def answer_offset(text: str) -> int:
    """Where the final answer of a text starts, including its tag; 0 if the text is nothing else."""
    tag = text.rfind("<answer>")
    return tag if tag >= 0 else max(text.rfind(parse_answer(text).final), 0)
