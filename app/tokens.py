"""Shows an answer token by token, coloured by per-token training values. Imports no torch.

texts = Texts.read(path)                   # of a tokenizer.json; None if unreadable, then ids are shown
html = answer(rollout, "entropy", texts)"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .details import RolloutView
from .html import Html, el, finite, join, note, number, visible

_MOST_BYTES = 128 << 20
"""Largest size of a tokenizer.json that is read; a tokenizer with a large vocabulary has about 35 MB."""
_MOST_TOKENS = 8_000
_MOST_TIPS = 10  # alternatives listed for a token


class Texts:
    """Converts token ids to text with the tokenizer.json of a run."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._byte_level = any("ByteLevel" in str(part) for part in (tokenizer.decoder, tokenizer.pre_tokenizer))
        self._special = {i for i, added in tokenizer.get_added_tokens_decoder().items() if added.special}

    @classmethod
    def of(cls, tokenizer: Any) -> Texts | None:
        """Builds the Texts of a loaded transformers tokenizer; None if it has no `tokenizers` backend."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return None if backend is None else cls(backend)

    @classmethod
    def read(cls, path: str | Path | None) -> Texts | None:
        """Builds the Texts of a tokenizer.json; None if the file is missing, too large or unreadable."""
        if path is None:
            return None
        try:
            state = Path(path).stat()
        except OSError:
            return None
        return _read(str(path), state.st_mtime_ns, state.st_size)

    def piece(self, token: int) -> str | None:
        """The vocabulary entry of a token; None for an unknown id."""
        try:
            return self._tokenizer.id_to_token(int(token))
        except (OverflowError, ValueError, TypeError):
            return None

    def special(self, token: int) -> bool:
        return int(token) in self._special

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes that a token contributes to the decoded text; None for an unknown id."""
        piece = self.piece(token)
        if piece is None:
            return None
        if self.special(token):
            return piece.encode("utf-8", "replace")
        if self._byte_level:
            table = _byte_table()
            return b"".join(bytes([table[c]]) if c in table else c.encode("utf-8", "replace") for c in piece)
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace("▁", " ").encode("utf-8", "replace")

    def show(self, tokens: Sequence[int] | np.ndarray) -> list[str]:
        """The display text of each token. A token that ends within a character is shown as its bytes, such as ⟨E2 96⟩,
        and the token that completes the character shows the character. An unknown id is shown as ⟨#id⟩."""
        out: list[str] = []
        pending = b""
        for token in tokens:
            content = self.bytes_of(token)
            if content is None:
                out.append(f"⟨#{token}⟩")
                pending = b""
                continue
            whole, rest = _whole(pending + content)
            out.append(whole if whole or not content else f"⟨{content.hex(' ').upper()}⟩")
            pending = rest
        return out

    def alone(self, token: Any) -> str:
        """The display text of a single token."""
        return self.show([token])[0]


@functools.lru_cache(maxsize=4)
def _read(path: str, _mtime: int, size: int) -> Texts | None:
    if size > _MOST_BYTES:
        return None
    from tokenizers import Tokenizer
    try:
        return Texts(Tokenizer.from_buffer(Path(path).read_bytes()))
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException:  # Exception for an invalid file; a panic of the Rust library is only a BaseException
        return None


@functools.cache
def _byte_table() -> dict[str, int]:
    """Returns {character: byte}, where the character stands for the byte in byte-level vocabularies (GPT-2's table)."""
    same = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in same]
    return {chr(b): b for b in same} | {chr(256 + i): b for i, b in enumerate(others)}


def _whole(data: bytes) -> tuple[str, bytes]:
    """Decodes UTF-8; returns the text, and the bytes of an incomplete last character. Invalid bytes become ⟨..⟩."""
    text = ""
    while data:
        try:
            return text + data.decode(), b""
        except UnicodeDecodeError as error:
            text += data[:error.start].decode()
            if error.end == len(data) and error.reason == "unexpected end of data":
                return text, data[error.start:]
            text += f"⟨{data[error.start:error.end].hex(' ').upper()}⟩"
            data = data[error.end:]
    return text, b""


@dataclass(frozen=True, eq=False)
class Numbers:
    """Per-token values of an answer. Each array is [T] float, with NaN for unknown values, unless stated otherwise."""

    ids: np.ndarray
    logprob: np.ndarray
    """Log-probability under the sampler, in nats. `trainer` is the log-probability under the trainer."""
    trainer: np.ndarray
    entropy: np.ndarray
    """Entropy of the policy at the token, in nats."""
    ratio: np.ndarray
    gap: np.ndarray
    """Log-probability under the trainer minus that under the sampler, in nats."""
    contribution: np.ndarray
    """advantage * ratio, the size and sign of the token's effect on the update; 0 if the token is masked or clipped."""
    masked: np.ndarray
    """[T] bool: whether the token was not sampled by the model, or is excluded from training."""
    clipped: np.ndarray
    """[T] bool: whether the token's ratio was clipped in the objective."""

    def __len__(self) -> int:
        return len(self.ids)


def numbers(rollout: RolloutView) -> Numbers:
    """Collects the per-token values of an answer. A column without exactly one value per token counts as unknown."""
    ids = np.asarray(rollout.token_ids).reshape(-1)
    count = len(ids)

    def column(values: Any) -> np.ndarray:
        try:
            column_values = np.asarray(values, np.float64)
        except (TypeError, ValueError):
            column_values = np.empty(0)
        return column_values if column_values.shape == (count,) else np.full(count, np.nan)

    sampler, trainer, ratio = column(rollout.logprobs), column(rollout.trainer_logprobs), column(rollout.ratio)
    masked, clipped = column(rollout.loss_mask) == 0, column(rollout.clipped) == 1
    advantage = finite(rollout.advantage)
    with np.errstate(all="ignore"):
        pull = np.where(np.isnan(ratio), 1.0, ratio) * (np.nan if advantage is None else advantage)
        return Numbers(ids, sampler, trainer, column(rollout.entropies), ratio, trainer - sampler,
                       np.where(masked | clipped, 0.0, pull), masked, clipped)


class View(NamedTuple):
    """One colouring of the tokens. `strengths` has a number in [-1, 1] for each token; with `two`, the sign of the
    number selects one of two hues. `title`, `low` and `high` are the texts of the legend."""

    title: str
    low: str
    high: str
    strengths: np.ndarray
    two: bool = False


def _logprob(n: Numbers) -> View:
    return View("log-probability of the sampler", "certain (0)", "unlikely (−6 nats or less)", -n.logprob / 6)


def _entropy(n: Numbers) -> View:
    return View("entropy", "0", "3 nats or more", n.entropy / 3)


def _gap(n: Numbers) -> View:
    most = _largest(n.gap, 0.01)
    return View("trainer minus sampler log-probability", f"−{number(most)}", f"+{number(most)}", n.gap / most, True)


def _contribution(n: Numbers) -> View:
    most = _largest(n.contribution, 1e-6)
    return View("contribution: advantage × ratio, where trained and not clipped", f"less likely, −{number(most)}",
                f"more likely, +{number(most)}", n.contribution / most, True)


def _state(n: Numbers) -> View:
    return View("what is trained on", "", "", 0.6 * n.clipped)


VIEWS: dict[str, tuple[str, Callable[[Numbers], View]]] = {
    "logprob": ("Log-probability", _logprob), "entropy": ("Entropy", _entropy), "gap": ("Trainer − sampler", _gap),
    "contribution": ("Contribution", _contribution), "state": ("Masked, clipped", _state),
}
"""Name of a colouring -> (button label, function that computes its View)."""


def _largest(values: np.ndarray, least: float) -> float:
    """The magnitude that gets the full colour: the 99th percentile of the absolute `values`, at least `least`."""
    known = np.abs(values[np.isfinite(values)])
    return max(float(np.percentile(known, 99)) if len(known) else 0.0, least)


def answer(rollout: RolloutView, by: str = "logprob", texts: Texts | None = None) -> Html:
    """The tokens of an answer, coloured by the key `by` of VIEWS, with a legend. Without `texts`, token ids are shown.
    Hovering or the arrow keys show a token's values and, if stored, its most likely alternatives."""
    n = numbers(rollout)
    if not len(n):
        return el("p", "The answer has no tokens.", class_="v-dim")
    view = VIEWS.get(by, VIEWS["logprob"])[1](n)
    known = by == "state" or bool(np.isfinite(view.strengths).any())
    words = texts.show(n.ids[:_MOST_TOKENS]) if texts else [str(i) for i in n.ids[:_MOST_TOKENS]]
    shown = [_token(rollout, n, i, words[i], view, texts) for i in range(min(len(n), _MOST_TOKENS))]
    more = note(f"{len(n) - _MOST_TOKENS:,} more tokens are not shown.") if len(n) > _MOST_TOKENS else ""
    missing = "" if known else note(f"Not stored for this answer: {view.title}.", kind="warn")
    ids = "" if texts else note("The run has no tokenizer.json, so ids stand for texts.")
    return el("div", legend(view, n), missing, ids,
              el("div", *shown, class_=f"v-tokens{'' if texts else ' v-ids'}", role="group",
                 aria_label="Tokens of the answer"), more, class_="v v-tokenview")


def legend(view: View, n: Numbers) -> Html:
    """The HTML that explains the colours, and counts the tokens that are trained, masked and clipped."""
    scale = join([el("span", view.low), el("i", class_=f"v-scale{' v-two' if view.two else ''}"),
                  el("span", view.high)]) if view.low else ""
    states = [el("span", el("i", "ab", class_=f"v-tok {kind}"), f" {int(mask.sum())} {name}")
              for name, kind, mask in (("trained", "", ~(n.masked | n.clipped)), ("masked", "v-masked", n.masked),
                                       ("clipped", "v-clipped", n.clipped))]
    return el("div", el("b", view.title), el("span", scale, class_="v-scaled") if view.low else "", *states,
              class_="v-legend")


def _token(rollout: RolloutView, n: Numbers, i: int, word: str, view: View, texts: Texts | None) -> Html:
    value = view.strengths[i]
    strength = min(abs(float(value)), 1.0) if math.isfinite(value) else 0.0
    kinds = ["v-tok", "v-neg" if view.two and value < 0 else "", "v-masked" if n.masked[i] else "",
             "v-clipped" if n.clipped[i] else "", "v-special" if texts and texts.special(n.ids[i]) else ""]
    tip = _tip(rollout, n, i, word, texts)
    feed = "\n" * word.count("\n")  # a line feed is shown as ↵ and still breaks the line
    text = visible(word).replace("\n", "↵").replace("\t", "⇥") if word else "∅"
    return el("span", text + feed, class_=" ".join(k for k in kinds if k), aria_label=tip,
              tabindex="0" if i == 0 else "-1", role="note",
              style=f"--v-s:{100 * strength:.0f}%" if strength >= 0.005 else None)


def _tip(rollout: RolloutView, n: Numbers, i: int, word: str, texts: Texts | None) -> str:
    lines = [f"token {i + 1} of {len(n)} · id {int(n.ids[i])} · {_quoted(word)}"]
    if math.isfinite(n.logprob[i]):
        lines.append(f"log p {number(float(n.logprob[i]), '.4f')} (p {number(_exp(n.logprob[i]), '.3g')})")
    for name, column, sign in (("trainer log p", n.trainer, False), ("trainer − sampler", n.gap, True),
                               ("entropy", n.entropy, False), ("ratio", n.ratio, False),
                               ("contribution", n.contribution, True)):
        if math.isfinite(column[i]):
            lines.append(f"{name} {number(float(column[i]), '.4f', sign)}")
    states = [name for name, mask in (("masked: not trained on", n.masked), ("clipped", n.clipped)) if mask[i]]
    return "\n".join([*lines, *states, *_alternatives(rollout, i, texts)])


def _alternatives(rollout: RolloutView, i: int, texts: Texts | None) -> list[str]:
    ids, values = rollout.top_ids, rollout.top_logprobs
    if ids is None or values is None or i >= len(ids) or i >= len(values) or ids[i] is None or values[i] is None:
        return []
    pairs = list(zip(np.ravel(ids[i])[:_MOST_TIPS], np.ravel(values[i])[:_MOST_TIPS], strict=False))
    known = [(t, float(v)) for t, v in pairs if finite(v) is not None]
    return ["likeliest:", *(f"  {_quoted(texts.alone(t) if texts else str(t))}  {number(v, '.3f')} "
                            f"(p {number(_exp(v), '.3g')})" for t, v in known)] if known else []


def _quoted(word: str) -> str:
    return f"“{visible(word[:40]).replace(chr(10), '↵')}”"


def _exp(value: Any) -> float:
    return math.exp(min(float(value), 50.0)) if not math.isnan(value) else math.nan
