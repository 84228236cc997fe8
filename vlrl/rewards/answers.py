"""Scores of typed answers: one option, a number, a transcript, free text. Each function takes the final text of the
answer and the ground truth as text and returns a score in [0, 1]. Linear time up to products with the length of the
truth; never raises."""

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
MOST_CHARACTERS = 20_000
"""Characters of an answer in which an option letter is searched."""
MOST_WORDS = 5000
"""Words of an answer that are compared; a longer one cannot be close to a shorter truth."""
_LEADING = re.compile(r"[(\[\s*_\"'`]*([A-Za-z])(?![\w'\u2019])([)\].:,;*_\"'`]*)(\s*)", re.ASCII)
_ALONE = re.compile(r"(?<![\w'\u2019])[A-Z](?![\w'\u2019])", re.ASCII)
_TINY = 1e-9
_SHORT = 3  # a truth of at most this many words must have its words with digits repeated in the answer


def exact(given: str, truth: str) -> float:
    """1 if both texts are equal apart from surrounding spaces ("B" is not "B.")."""
    return float(given.strip() == truth.strip())


# --- options ----------------------------------------------------------------------------------------------------------


def option_text(option: str) -> str:
    """An option without its leading letter: "B. a cat" -> "a cat"."""
    return re.sub(r"^\s*\(?[A-Z][).:]\s+", "", option).strip()


def bare_options(options: Sequence[str]) -> list[str]:
    """The option texts, without letters if every option starts with its own, else unchanged."""
    lettered = bool(options) and all(re.match(rf"\s*\(?{letter}[).:]\s", option)
                                     for letter, option in zip(LETTERS, options, strict=False))
    return [option_text(option) if lettered else option.strip() for option in options]


def option_letter(text: str, options: Sequence[str] = ()) -> str | None:
    """The single option a text names, as a capital letter; None if it names none or several.

    The letter comes first, alone or marked ("B", "b.", "(B)", "B: a cat"), or the text equals that of an option. "Both"
    names none, "A, B" names two, and so does "B. a cat" if that is the text of A. Without `options` any letter from A
    to Z counts."""
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
    """Whether a text gives the letter of one option and the words of another: "B. a cat" if "a cat" is A."""
    match = _LEADING.match(western(text))
    letter = match[1].upper() if match and match[2] else ""
    if not match or not letter or letter not in LETTERS[:len(options)]:
        return False
    texts, said = [clean_label(option) for option in bare_options(options)], clean_label(western(text)[match.end():])
    fits = [text for text in texts if text and (
        said == text or (len(text) > 1 and re.match(rf"{re.escape(text)}(?!\w)", said)))]
    return bool(fits) and max(fits, key=len) != texts[LETTERS.index(letter)]


def choice(given: str, truth: str, options: Sequence[str] = ()) -> float:
    """1 if both texts name the same option, by letter or by the option's text."""
    wanted = option_letter(truth, options)
    return float(wanted is not None and option_letter(given, options) == wanted)


# --- numbers ----------------------------------------------------------------------------------------------------------


def mathvista(given: str, truth: str, options: Sequence[str] = (), precision: int | None = None) -> float:
    """1 if an extracted answer counts on MathVista (2310.02255, evaluation/calculate_score.py), else 0.

    With options (as in the data set): a single letter, bare or in parentheses, selects an option, otherwise the option
    with the smallest edit distance; `truth` is a letter or an option text. With a precision: the value rounded to that
    many places must print as `truth`. An integer `truth`: equal after truncation. Numbers are Python's, so 1_200 is one
    and 1,200 is not. Otherwise the texts must match. An empty answer is wrong."""
    given = given.strip()[:MOST_WORDS]
    if not given:
        return 0.0
    if options:
        letters, marked = LETTERS[:len(options)], re.search(r"\(([a-zA-Z])\)", given)
        letter = marked[1].upper() if marked else given
        if len(letter) == 1 and letter in letters:
            chosen = letters.index(letter)
        else:
            chosen = min(range(len(options)), key=lambda i: Levenshtein.distance(letter, options[i]))
        right = option_letter(truth, options)
        return float(letters[chosen] == right)
    try:
        value = float(given)
    except ValueError:
        value = None
    if precision is not None:
        return float(value is not None and str(round(value, precision)) == truth.strip())
    if re.fullmatch(r"-?\d{1,30}", truth.strip()):
        return float(value is not None and math.isfinite(value) and str(int(value)) == truth.strip())
    return exact(given, truth)


def video_mme(given: str, truth: str) -> float | None:
    """1 if an answer counts on Video-MME (2405.21075, the eval_your_results.py linked from its page), else 0: its first
    capital letter from A to D, anywhere, is `truth`. None without such a letter, which is not counted there."""
    match = re.search("[ABCD]", given[:MOST_CHARACTERS].replace("Answer:", ""))
    return float(match[0] == truth) if match else None


def mvbench(given: str, truth: str) -> float:
    """1 if an answer counts on MVBench (2311.17005, video_chat2/mvbench.ipynb), else 0.

    There the prompt ends with an opening parenthesis. The first word of the first line, without full stops, must be
    part of the parenthesised letter `truth`, or contain it. So an empty answer counts, and "B or C" counts as B."""
    lines = given[:MOST_CHARACTERS].strip().split("\n")
    word, mark = f"({lines[0].lower()}".split(" ")[0], f"({truth.lower()})"
    return float(word.replace(".", "") in mark or mark in word)


def one_number(text: str) -> float | None:
    """The number in a text with exactly one ("3 cars", "about 2.5 m."); None otherwise."""
    values = islice(numbers(text), MOST_WORDS)
    first = next(values, math.inf)
    return first if math.isfinite(first) and all(value == first for value in values) else None


def quantity(text: str, percent: bool = False) -> float | None:
    """The only number in a text, with "3%" read as .03 unless a `percent` is asked for; None without exactly one
    number."""
    value = one_number(text)
    return value if value is None or percent or not is_percent(text) else value / 100


def close(a: float, b: float, within: float) -> bool:
    """Whether two numbers differ by at most `within`, plus rounding error unless both are integers and `within` is
    0."""
    whole = a == int(a) and b == int(b)
    return abs(a - b) <= within + (0.0 if whole and not within else _TINY * abs(b))


def same_number(given: str, truth: str) -> float:
    """1 if both are numbers, equal to two decimals, and both or neither have a decimal separator (Video-R1)."""
    a, b = read_number(given), read_number(truth)
    separated = [not {".", ","}.isdisjoint(western(text)) for text in (given, truth)]
    return float(a is not None and b is not None and separated[0] == separated[1] and round(a, 2) == round(b, 2))


def near_number(given: str, truth: str, tolerance: float = 0.0) -> float:
    """1 if the only number in `given` is within `tolerance` (in the number's own units) of the truth.

    0 for a text that starts with a negation ("not 3") or ends with one ("3 is wrong")."""
    a, b = None if denies(given) or retracted(given) else quantity(given), read_number(truth)
    return float(a is not None and b is not None and close(a, b, tolerance))


def closeness(given: str, truth: str) -> float:
    """1 minus the relative error, at least 0 (Video-R1's regression reward); if the truth is 0, only 0 scores."""
    a, b = read_number(given), read_number(truth)
    if a is None or b is None:
        return 0.0
    return 1 - min(1.0, (abs(a - b) + _TINY) / (abs(b) + _TINY)) if a != b else 1.0


# --- texts ------------------------------------------------------------------------------------------------------------


def word_error_rate(given: str, truth: str) -> float:
    """Word edits between the texts as a share of the words of the truth; above 1 for a far longer answer. Scripts
    without spaces count characters as words."""
    wanted = pieces(truth)
    return Levenshtein.distance(pieces(given, MOST_WORDS + 2 * len(wanted)), wanted) / max(1, len(wanted))


def ocr(given: str, truth: str) -> float:
    """1 minus the word error rate, at least 0 (Video-R1)."""
    return max(0.0, 1 - word_error_rate(given, truth))


def edit_similarity(given: str, truth: str) -> float:
    """1 minus the edit distance as a share of the longer text; 1 for two empty texts."""
    given, truth = (unicodedata.normalize("NFC", text) for text in (given[:20 * MOST_WORDS], truth))
    return Levenshtein.normalized_similarity(given, truth)


def rouge_tokens(text: str) -> list[str]:
    """The words of a text as ROUGE counts them: lower-case letters and digits, Latin words of four or more letters
    stemmed, single characters for scripts without spaces."""
    found = words(text[:20 * MOST_WORDS].lower(), MOST_WORDS)
    return [stem(word) if 3 < len(word) <= 100 and word.isascii() else word for word in found]


def rouge(given: str, truth: str) -> float:
    """Mean F of ROUGE-1, ROUGE-2 and ROUGE-L with stemming (Lin 2004; Video-R1's free-form score).

    Texts of one word share no bigram, so they score at most 2/3. Letters and digits of every script count."""
    a, b = rouge_tokens(given), rouge_tokens(truth)
    if not a or not b:
        return 0.0
    shared = [sum((_runs(a, n) & _runs(b, n)).values()) for n in (1, 2)]
    return (_f(shared[0], len(a), len(b)) + _f(shared[1], len(a) - 1, len(b) - 1)
            + _f(LCSseq.similarity(a, b), len(a), len(b))) / 3


def free_text(given: str, truth: str) -> float:
    """ROUGE, but 0 for a different code, number or quantity ("12 m" is not part of "13 m"), and, if the truth has at
    most three words, 0 if one of its words with digits is missing ("Highway 101")."""
    wanted = rouge_tokens(truth)
    named = {word for word in wanted if not word.isalpha() and any(map(str.isdigit, word))}
    other = len(wanted) <= _SHORT and not named.issubset(rouge_tokens(given))
    return 0.0 if other or (is_exact(truth) and not same_code(given, truth)) else rouge(given, truth)


def _runs(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i:i + n]) for i in range(len(words) - n + 1))


def _f(shared: float, given: int, wanted: int) -> float:
    return 2 * shared / (given + wanted) if shared else 0.0


# --- by type ----------------------------------------------------------------------------------------------------------

Scorer = Callable[[str, str], float]

STRICT: Mapping[str, Scorer] = {"choice": exact, "number": same_number, "ocr": ocr, "text": free_text,
                                  "regression": closeness}
"""The typed accuracy of Video-R1 (2503.21776), strict about the form of an answer."""


def tolerant(kind: str, options: Sequence[str] = (), labels: Sequence[str] = (), tolerance: float = 0.0) -> Scorer:
    """The scorer of an answer type for free-form answers: options by letter or text, one number among words, a label
    from a closed list regardless of case and punctuation. Other types as in `STRICT`."""
    if kind == "choice":
        return partial(choice, options=options)
    if kind == "number":
        return partial(near_number, tolerance=tolerance)
    if kind == "text" and labels:
        return lambda given, truth: float(same_label(given, truth))
    return STRICT[kind]
