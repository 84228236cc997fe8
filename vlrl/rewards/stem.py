"""The Porter stemmer with the extensions of NLTK; ROUGE was published with this stemmer. Linear time for every word."""

import re
from functools import lru_cache

_IRREGULAR = {"skies": "sky", "sky": "sky", "dying": "die", "lying": "lie", "tying": "tie", "news": "news",
              "innings": "inning", "inning": "inning", "outings": "outing", "outing": "outing", "cannings": "canning",
              "canning": "canning", "howe": "howe", "proceed": "proceed", "exceed": "exceed", "succeed": "succeed"}
_STEP_2 = {"ational": "ate", "tional": "tion", "enci": "ence", "anci": "ance", "izer": "ize", "bli": "ble",
           "alli": "al", "entli": "ent", "eli": "e", "ousli": "ous", "ization": "ize", "ation": "ate", "ator": "ate",
           "alism": "al", "iveness": "ive", "fulness": "ful", "ousness": "ous", "aliti": "al", "iviti": "ive",
           "biliti": "ble", "fulli": "ful"}
_STEP_3 = {"icate": "ic", "ative": "", "alize": "al", "iciti": "ic", "ical": "ic", "ful": "", "ness": ""}
_STEP_4 = ("al", "ance", "ence", "er", "ic", "able", "ible", "ant", "ement", "ment", "ent", "ion", "ou", "ism", "ate",
           "iti", "ous", "ive", "ize")
_SYLLABLE = re.compile("v+c+")


@lru_cache(maxsize=20_000)
def stem(word: str) -> str:
    """The stem of a lower-case word of letters and digits: "running" -> "run" (Porter 1980, as in NLTK)."""
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if len(word) <= 2:
        return word
    word = _replaced(_step_2(_final_y(_past(_plural(word)))), _STEP_3)
    return _final_l(_final_e(_step_4(word)))


def _shape(word: str) -> str:
    """The word with every consonant replaced by "c" and every vowel by "v"; y is a vowel after a consonant."""
    shape = ""
    for letter in word:
        shape += "v" if letter in "aeiou" or (letter == "y" and shape[-1:] == "c") else "c"
    return shape


def _measure(word: str) -> int:
    return len(_SYLLABLE.findall(_shape(word)))


def _short_end(word: str) -> bool:
    """Whether a word ends in consonant, vowel, consonant (the last one not w, x or y), or consists of a vowel and a
    consonant."""
    shape = _shape(word)
    return (shape[-3:] == "cvc" and word[-1] not in "wxy") or shape == "vc"


def _plural(word: str) -> str:
    if word.endswith("ies"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("sses"):
        return word[:-2]
    return word[:-1] if word.endswith("s") and not word.endswith("ss") else word


def _past(word: str) -> str:
    if word.endswith("ied"):
        return word[:-1] if len(word) == 4 else word[:-2]
    if word.endswith("eed"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    cut = next((len(end) for end in ("ed", "ing") if word.endswith(end) and "v" in _shape(word[:-len(end)])), 0)
    if not cut:
        return word
    word = word[:-cut]
    if word.endswith(("at", "bl", "iz")):
        return word + "e"
    if len(word) > 1 and word[-1] == word[-2] and _shape(word)[-1] == "c":
        return word if word[-1] in "lsz" else word[:-1]
    return word + "e" if _measure(word) == 1 and _short_end(word) else word


def _final_y(word: str) -> str:
    return word[:-1] + "i" if len(word) > 2 and word[-1] == "y" and _shape(word)[-2] == "c" else word


def _replaced(word: str, table: dict[str, str]) -> str:
    """Returns the word with its ending replaced as in `table` (ending -> replacement). Only the first matching entry is
    used, and only if at least one syllable is left before the ending."""
    for suffix, replacement in table.items():
        if word.endswith(suffix):
            before = word[:-len(suffix)]
            return before + replacement if _measure(before) > 0 else word
    return word


def _step_2(word: str) -> str:
    if word.endswith("alli") and _measure(word[:-4]) > 0:
        return _step_2(word[:-2])
    if word.endswith("logi"):
        return word[:-1] if _measure(word[:-3]) > 0 else word
    return _replaced(word, _STEP_2)


def _step_4(word: str) -> str:
    for suffix in _STEP_4:
        if word.endswith(suffix):
            before = word[:-len(suffix)]
            return before if _measure(before) > 1 and (suffix != "ion" or before[-1] in "st") else word
    return word


def _final_e(word: str) -> str:
    before = word[:-1]
    if not word.endswith("e") or _measure(before) == 0 or (_measure(before) == 1 and _short_end(before)):
        return word
    return before


def _final_l(word: str) -> str:
    return word[:-1] if word.endswith("ll") and _measure(word[:-1]) > 1 else word
