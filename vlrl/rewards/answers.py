"""Scores of answers by answer type: multiple choice, number, transcript, free text.

Each function takes the final text of the answer and the ground truth as strings and returns a score in [0, 1]. The time
is linear in the length of the answer, or proportional to the product of the lengths of answer and ground truth. No text
makes a function raise."""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice

from rapidfuzz.distance import LCSseq, Levenshtein

from vlrl.rewards.codes import is_exact, same_code
from vlrl.rewards.numbers import is_percent, numbers, read_number
from vlrl.rewards.scripts import pieces, western, words
from vlrl.rewards.stem import stem
from vlrl.rewards.text import clean_label, denies, retracted, same_label

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MOST_CHARACTERS = 20_000  # an option letter is only searched for in this many characters at the start of an answer
MOST_WORDS = 5000
"""Only this many words of an answer are compared with the ground truth. An answer with more words cannot be close to a
shorter ground truth."""
_LEADING = re.compile(r"[(\[\s*_\"'`]*([A-Za-z])(?![\w'\u2019])([)\].:,;*_\"'`]*)(\s*)", re.ASCII)
_ALONE = re.compile(r"(?<![\w'\u2019])[A-Z](?![\w'\u2019])", re.ASCII)
_TINY = 1e-9
_SHORT = 3  # a truth of at most this many words must have its words with digits repeated in the answer


def exact(answer: str, truth: str) -> float:
    """1 if both texts are equal apart from leading and trailing whitespace, else 0 ("B" does not equal "B.")."""
    return float(answer.strip() == truth.strip())


# --- options ----------------------------------------------------------------------------------------------------------


def option_text(option: str) -> str:
    """The text of an option without its leading letter: "B. a cat" -> "a cat"."""
    return re.sub(r"^\s*\(?[A-Z][).:]\s+", "", option).strip()


def bare_options(options: Sequence[str]) -> list[str]:
    """The texts of the options. The leading letters are removed if every option starts with its letter; otherwise the
    options are returned unchanged."""
    lettered = bool(options) and all(re.match(rf"\s*\(?{letter}[).:]\s", option)
                                     for letter, option in zip(LETTERS, options, strict=False))
    return [option_text(option) if lettered else option.strip() for option in options]


def option_letter(text: str, options: Sequence[str] = ()) -> str | None:
    """The option that a text names, as a capital letter; None if the text names no option or several.

    A text names an option if it starts with the letter, alone or marked ("B", "b.", "(B)", "B: a cat"), or if it equals
    the option's text. "Both" names no option. "A, B" names two options, and so does "B. a cat" if "a cat" is the text
    of option A. Without `options`, any letter from A to Z is accepted."""
    text = western(text)
    letters = LETTERS[:len(options)] if options else LETTERS
    texts = [clean_label(option) for option in bare_options(options)]
    match = _LEADING.match(text)
    letter = match[1].upper() if match else ""
    if match and letter in letters:
        rest, own = text[match.end():], texts[letters.index(letter)] if texts else ""
        if not clean_label(rest) or clean_label(rest) == own:
            return letter
        if contradicts(text, options) or retracted(rest):
            return None
        if (match[2] or "\n" in match[3]) and not {m[0] for m in _ALONE.finditer(rest)} & (set(letters) - {letter}):
            return letter  # "A. so" is marked, "A cat" begins a sentence
    same = [at for at, option in enumerate(texts) if option == clean_label(text)]
    return letters[same[0]] if len(same) == 1 else None


def contradicts(text: str, options: Sequence[str]) -> bool:
    """Whether a text gives the letter of one option with another option's text: "B. a cat" if "a cat" is option A."""
    match = _LEADING.match(western(text))
    letter = match[1].upper() if match and match[2] else ""
    if not match or not letter or letter not in LETTERS[:len(options)]:
        return False
    texts, said = [clean_label(option) for option in bare_options(options)], clean_label(western(text)[match.end():])
    fits = [text for text in texts if text and (
        said == text or (len(text) > 1 and re.match(rf"{re.escape(text)}(?!\w)", said)))]
    return bool(fits) and max(fits, key=len) != texts[LETTERS.index(letter)]


def choice(answer: str, truth: str, options: Sequence[str] = ()) -> float:
    """1 if the answer and the ground truth name the same option, by its letter or its text, else 0."""
    wanted = option_letter(truth, options)
    return float(wanted is not None and option_letter(answer, options) == wanted)


# --- numbers ----------------------------------------------------------------------------------------------------------


def mathvista(answer: str, truth: str, options: Sequence[str] = (), precision: int | None = None) -> float:
    """1 if an extracted answer is correct under MathVista's rules (2310.02255, evaluation/calculate_score.py), else 0.

    - With `options` (the question's options): a single letter, bare or in parentheses, selects an option; any other
    answer selects the option with the smallest edit distance. `truth` is a letter or an option's text.
    - With a `precision`: the answer, rounded to that many decimal places and printed, must equal `truth` as a text.
    - With an integer `truth`: the answer must be equal to it after truncation.
    - Otherwise the two texts must be equal.

    Numbers are parsed as Python does: "1_200" is a number, "1,200" is not. An empty answer is wrong."""
    answer = answer.strip()[:MOST_WORDS]
    if not answer:
        return 0.0
    if options:
        letters, marked = LETTERS[:len(options)], re.search(r"\(([a-zA-Z])\)", answer)
        letter = marked[1].upper() if marked else answer
        if len(letter) == 1 and letter in letters:
            chosen = letters.index(letter)
        else:
            chosen = min(range(len(options)), key=lambda i: Levenshtein.distance(letter, options[i]))
        right = option_letter(truth, options)
        return float(letters[chosen] == right)
    try:
        value = float(answer)
    except ValueError:
        value = None
    if precision is not None:
        return float(value is not None and str(round(value, precision)) == truth.strip())
    if re.fullmatch(r"-?\d{1,30}", truth.strip()):
        return float(value is not None and math.isfinite(value) and str(int(value)) == truth.strip())
    return exact(answer, truth)


def video_mme(answer: str, truth: str) -> float | None:
    """1 if the first capital letter from A to D anywhere in an answer is `truth`, else 0. None if the answer contains
    no such letter; Video-MME leaves these answers out of its accuracy.

    This is the rule of Video-MME (2405.21075), in the script eval_your_results.py that its web page links to."""
    match = re.search("[ABCD]", answer[:MOST_CHARACTERS].replace("Answer:", ""))
    return float(match[0] == truth) if match else None


def mvbench(answer: str, truth: str) -> float:
    """1 if an answer is correct under MVBench's rule (2311.17005, video_chat2/mvbench.ipynb), else 0.

    MVBench ends the prompt with "(", and also puts a "(" before the answer. With the truth A, the first word of this
    text, without full stops, must be a substring of "(A)", or the word must contain "(A)". So an empty answer is
    correct, and "B or C" is read as B."""
    lines = answer[:MOST_CHARACTERS].strip().split("\n")
    word, mark = f"({lines[0].lower()}".split(" ")[0], f"({truth.lower()})"
    return float(word.replace(".", "") in mark or mark in word)


def one_number(text: str) -> float | None:
    """The number in a text with exactly one distinct number ("3 cars", "about 2.5 m."); None for any other text."""
    values = islice(numbers(text), MOST_WORDS)
    first = next(values, math.inf)
    return first if math.isfinite(first) and all(value == first for value in values) else None


def quantity(text: str, percent: bool = False) -> float | None:
    """The number in a text that contains exactly one distinct number; None for any other text. "3%" is read as 0.03, or
    as 3 if `percent` is set because the question asks for a percentage."""
    value = one_number(text)
    return value if value is None or percent or not is_percent(text) else value / 100


def close(a: float, b: float, within: float) -> bool:
    """Whether two numbers differ by at most `within`. Rounding errors of floats are tolerated, except between two
    integers with `within=0`."""
    whole = a == int(a) and b == int(b)
    return abs(a - b) <= within + (0.0 if whole and not within else _TINY * abs(b))


def same_number(answer: str, truth: str) -> float:
    """1 if both texts are numbers that are equal to two decimals, else 0 (Video-R1). Also 0 if only one of the texts
    contains a decimal separator."""
    a, b = read_number(answer), read_number(truth)
    separated = [not {".", ","}.isdisjoint(western(text)) for text in (answer, truth)]
    return float(a is not None and b is not None and separated[0] == separated[1] and round(a, 2) == round(b, 2))


def near_number(answer: str, truth: str, tolerance: float = 0.0) -> float:
    """1 if `answer` contains exactly one number and this number differs from the ground truth by at most `tolerance`
    (an absolute difference), else 0.

    A text that starts or ends with a negation ("not 3", "3 is wrong") scores 0."""
    a, b = None if denies(answer) or retracted(answer) else quantity(answer), read_number(truth)
    return float(a is not None and b is not None and close(a, b, tolerance))


def closeness(answer: str, truth: str) -> float:
    """1 minus the relative error of the answered number, but at least 0 (Video-R1's reward for regression). 0 if the
    answer is not a number. If the ground truth is 0, only an answer of 0 scores 1."""
    a, b = read_number(answer), read_number(truth)
    if a is None or b is None:
        return 0.0
    return 1 - min(1.0, (abs(a - b) + _TINY) / (abs(b) + _TINY)) if a != b else 1.0


# --- texts ------------------------------------------------------------------------------------------------------------


def word_error_rate(answer: str, truth: str) -> float:
    """The number of word edits that turn the answer into the ground truth, divided by the number of words in the ground
    truth. It exceeds 1 if the answer is much longer. In scripts without spaces, every character counts as a word."""
    wanted = pieces(truth)
    return Levenshtein.distance(pieces(answer, MOST_WORDS + 2 * len(wanted)), wanted) / max(1, len(wanted))


def ocr(answer: str, truth: str) -> float:
    """1 minus the word error rate, but at least 0 (Video-R1)."""
    return max(0.0, 1 - word_error_rate(answer, truth))


def edit_similarity(answer: str, truth: str) -> float:
    """1 minus the edit distance divided by the length of the longer text; 1 if both texts are empty."""
    answer, truth = (unicodedata.normalize("NFC", text) for text in (answer[:20 * MOST_WORDS], truth))
    return Levenshtein.normalized_similarity(answer, truth)


def rouge_tokens(text: str) -> list[str]:
    """The tokens of a text for ROUGE: lower-case words of letters and digits. Latin words of four or more letters are
    stemmed; in scripts without spaces, every character is a token."""
    found = words(text[:20 * MOST_WORDS].lower(), MOST_WORDS)
    return [stem(word) if 3 < len(word) <= 100 and word.isascii() else word for word in found]


def rouge(answer: str, truth: str) -> float:
    """The mean F-score of ROUGE-1, ROUGE-2 and ROUGE-L with stemming (Lin 2004), which is Video-R1's score for
    free-form answers.

    A text of one word has no bigram, so it scores at most 2/3. Letters and digits of every script are compared."""
    a, b = rouge_tokens(answer), rouge_tokens(truth)
    if not a or not b:
        return 0.0
    shared = [sum((_runs(a, n) & _runs(b, n)).values()) for n in (1, 2)]
    return (_f(shared[0], len(a), len(b)) + _f(shared[1], len(a) - 1, len(b) - 1)
            + _f(LCSseq.similarity(a, b), len(a), len(b))) / 3


def free_text(answer: str, truth: str) -> float:
    """The ROUGE score of an answer. It is 0 in two cases:
    - The ground truth is a code, number or quantity, and the answer differs from it ("12 m" does not match "13 m").
    - The ground truth has at most three words, and one with a digit is missing in the answer (101 in "Highway 101")."""
    wanted = rouge_tokens(truth)
    named = {word for word in wanted if not word.isalpha() and any(map(str.isdigit, word))}
    other = len(wanted) <= _SHORT and not named.issubset(rouge_tokens(answer))
    return 0.0 if other or (is_exact(truth) and not same_code(answer, truth)) else rouge(answer, truth)


def _runs(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i:i + n]) for i in range(len(words) - n + 1))


def _f(shared: float, answer: int, wanted: int) -> float:
    return 2 * shared / (answer + wanted) if shared else 0.0


# --- by type ----------------------------------------------------------------------------------------------------------

Scorer = Callable[[str, str], float]

STRICT: Mapping[str, Scorer] = {"choice": exact, "number": same_number, "ocr": ocr, "text": free_text,
                                  "regression": closeness}
"""Answer type -> its scoring function, as in Video-R1 (2503.21776). These functions are strict about how an answer is
written; `tolerant` returns more lenient functions."""


def tolerant(kind: str, options: Sequence[str] = (), labels: Sequence[str] = (), tolerance: float = 0.0) -> Scorer:
    """Returns the scoring function of the answer type `kind`, for answers in free wording.

    For a choice it accepts an option's letter or text. For a number it accepts a text with one number that differs from
    the truth by at most `tolerance`. For a text with a closed list of answers (`labels`) it ignores case and
    punctuation. All other types are scored as in `STRICT`."""
    if kind == "choice":
        return partial(choice, options=options)
    if kind == "number":
        return partial(near_number, tolerance=tolerance)
    if kind == "text" and labels:
        return lambda answer, truth: float(same_label(answer, truth))
    return STRICT[kind]
