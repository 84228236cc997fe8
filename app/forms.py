"""The format of an answer: its sections, and its misuse of the expected tags (<think>, <answer>, <glue>)."""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from vlrl.rewards.text import scored_text

TAGS = ("think", "answer", "glue")
_TAG = re.compile(r"<(/?)(think|answer|glue)>")
_KINDS = {"think": "reasoning", "answer": "answer", "glue": "answer"}


@dataclass(frozen=True)
class Piece:
    """A span of an answer. `kind` is "reasoning", "answer", or "outside" (of all tags, although tags are expected)."""

    kind: str
    text: str
    tag: bool = False
    """Whether the span is a tag. The `kind` of a tag is the kind of the section that it opens or closes."""
    bad: bool = False
    """Whether the span is a misplaced tag or misplaced text."""


@dataclass(frozen=True)
class Form:
    """The spans of an answer in order, and descriptions of its format violations."""

    pieces: tuple[Piece, ...]
    problems: tuple[str, ...]

    @property
    def reasoning(self) -> str:
        return "".join(p.text for p in self.pieces if p.kind == "reasoning" and not p.tag).strip()


def common_tags(texts: Sequence[str]) -> set[str]:
    """The names in TAGS whose closing tags occur in at least half of the texts."""
    return {name for name in TAGS if texts and 2 * sum(f"</{name}>" in text for text in texts) >= len(texts)}


def read(text: str, prompt: str = "", truncated: bool = False, others: Collection[str] = (), opened: str = "") -> Form:
    """Divides an answer into sections and lists its format violations; being `truncated` counts as one. `opened` is
    text at the end of the prompt that counts as the beginning of the answer. Tags are expected if they occur in the
    answer or the prompt, or if `others` (e.g. the result of `common_tags`) contains them. If the first thinking tag
    of the answer is </think>, the answer begins with reasoning, as in rewards.text.parse_answer."""
    text, prompt = scored_text(text, opened), prompt.removesuffix(opened)
    closed = {name for name in TAGS if re.search(f"</?{name}>", text)}
    requested = {name for name in TAGS if f"<{name}>" in prompt or name in others}
    expected = [name for name in TAGS if name in closed | requested]
    if not expected:
        pieces = (Piece("answer", text),) if text else ()
        return Form(pieces, ("cut off before its end",) if truncated else ())
    pieces, wrong = _pieces(text, expected)
    problems = [*_counts(text, expected), *wrong, *_outside(pieces)]
    return Form(tuple(pieces), (*dict.fromkeys(problems), *(("cut off before its end",) if truncated else ())))


def _pieces(text: str, expected: list[str]) -> tuple[list[Piece], list[str]]:
    first = re.search("</?think>", text)
    inside = "think" if first and first[0] == "</think>" else ""
    before = -1 if not inside else expected.index(inside) if inside in expected else -1
    pieces: list[Piece] = []
    wrong: list[str] = []
    at = 0
    for match in _TAG.finditer(text):
        _add(pieces, text[at:match.start()], inside)
        at, name, closing = match.end(), match[2], bool(match[1])
        fits = inside == name if closing else not inside
        late = not closing and expected.index(name) < before
        if late:
            wrong.append(f"{match[0]} after <{expected[before]}>")
        elif not fits:
            wrong.append(f"{match[0]} inside <{inside}>" if inside else f"{match[0]} without an opening tag")
        pieces.append(Piece(_KINDS[inside or name], match[0], tag=True, bad=late or not fits))
        if fits:
            inside, before = ("" if closing else name), max(before, expected.index(name))
    _add(pieces, text[at:], inside)
    if inside and 0 < text.count(f"<{inside}>") <= text.count(f"</{inside}>"):  # not reported by _counts
        wrong.append(f"<{inside}> is not closed")
    return pieces, wrong


def _add(pieces: list[Piece], text: str, inside: str) -> None:
    if text:
        pieces.append(Piece(_KINDS.get(inside, "outside"), text, bad=not inside and bool(text.strip())))


def _counts(text: str, expected: list[str]) -> list[str]:
    problems = []
    for name in expected:
        for tag in (f"<{name}>", f"</{name}>"):
            count = text.count(tag)
            if count == 0:
                problems.append(f"{tag} is missing")
            elif count > 1:
                problems.append(f"{tag} {count} times")
    return problems


def _outside(pieces: list[Piece]) -> list[str]:
    tags = [i for i, piece in enumerate(pieces) if piece.tag]
    if not tags:
        return []
    problems = []
    for i, piece in enumerate(pieces):
        if piece.kind == "outside" and piece.bad:
            if i < tags[0]:
                problems.append(f"text before {pieces[tags[0]].text}")
            elif i > tags[-1]:
                last = pieces[tags[-1]].text
                problems.append("text after the answer" if last in ("</answer>", "</glue>") else f"text after {last}")
            else:
                problems.append("text between the tags")
    return problems
