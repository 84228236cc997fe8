"""Splits text of any script into words and letters for text metrics, and converts digits to ASCII. Linear time; no text
makes a function raise."""

import re
import unicodedata
from functools import lru_cache
from itertools import islice

_UNSPACED = frozenset(("CJK", "HIRAGANA", "KATAKANA", "KATAKANA-HIRAGANA", "BOPOMOFO", "IDEOGRAPHIC", "THAI", "LAO",
                       "KHMER", "MYANMAR", "TIBETAN"))
"""First words of the Unicode names of letters that belong to scripts without spaces between words."""
_SIGNS = {"\u2212": "-", "\u2010": "-", "\u2011": "-", "\ufe63": "-", "\u066b": ".", "\u066c": ",", "\u066a": "%"}
_WORD = re.compile(r"a[m]*|w[wm]*")
_PIECE = re.compile(r"a[m]*|[^a]+")
_LATIN = re.compile(r"[A-Za-z0-9]+")


def western(text: str) -> str:
    """Converts the decimal digits of all scripts, full-width characters and minus signs in a text to ASCII:
    "\uff11\uff12\uff0e\uff15" -> "12.5". Superscript digits are not converted, because "10\u00b2" is not 102."""
    return text if text.isascii() else "".join(map(_western, text))


def words(text: str, most: int | None = None) -> list[str]:
    """The first `most` words of a text: runs of letters, combining marks and digits of any script. In scripts without
    spaces between words (Chinese, Japanese, Thai, ...), every character is a word."""
    if text.isascii():
        return [match[0] for match in islice(_LATIN.finditer(text), most)]
    text = unicodedata.normalize("NFC", western(text))
    return [text[m.start():m.end()] for m in islice(_WORD.finditer("".join(map(_kind, text))), most)]


def pieces(text: str, most: int | None = None) -> list[str]:
    """The first `most` parts of a text between spaces, including punctuation. In scripts without spaces between words,
    every character is a part."""
    text = unicodedata.normalize("NFC", text)
    parts = islice(text.split(), most)
    if text.isascii():
        return list(parts)
    return list(islice((part[m.start():m.end()] for part in parts
                        for m in _PIECE.finditer("".join(map(_kind, part)))), most))


@lru_cache(maxsize=20_000)
def _western(c: str) -> str:
    if c in _SIGNS:
        return _SIGNS[c]
    if c.isdecimal():
        return str(unicodedata.decimal(c))
    return unicodedata.normalize("NFKC", c) if unicodedata.decomposition(c).startswith(("<wide>", "<narrow>")) else c


@lru_cache(maxsize=20_000)
def _kind(c: str) -> str:
    """The class of a character: "a" if it is a word by itself, "w" if it can be part of a longer word, "m" for a
    combining mark, "-" for anything else."""
    category = unicodedata.category(c)
    if category[0] == "M":
        return "m"
    if category[0] not in "LN":
        return "-"
    return "a" if category != "Nd" and unicodedata.name(c, "").partition(" ")[0] in _UNSPACED else "w"
