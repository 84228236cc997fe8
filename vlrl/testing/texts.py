"""Unusual texts that a model might write as an answer. Scoring must handle all of them."""

import json
from functools import cache
from pathlib import Path

_TOKENIZER = Path(__file__).parent.parent / "assets" / "tiny-qwen3-vl" / "tokenizer.json"
_LONG = 100_000


@cache
def special_tokens() -> tuple[str, ...]:
    """The special tokens of the tokenizer of the tiny model in vlrl/assets: the special tokens of Qwen, and the tags
    for thinking and answers."""
    return tuple(token["content"] for token in json.loads(_TOKENIZER.read_text(encoding="utf-8"))["added_tokens"])


def hostile_texts(prompt: str, long: bool = True) -> list[str]:
    """Answers that break careless scoring code, including a copy of the prompt. With `long`, also texts of 100,000
    characters."""
    return [*_ODD, *special_tokens(), "".join(special_tokens()), prompt, *(_LONG_TEXTS if long else ())]


def _in_answer(text: str) -> str:
    return f"<think></think><answer>{text}</answer>"


_NUMBERS = ("NaN", "nan", "Infinity", "-inf", "1e999", "-1e999", "9" * 400, "9" * 5000, "0x10", "1/0", "1_000", "-0",
            "٣", "²", "½", "Ⅷ", "１２", "一", "1\u00a0000", "3.", ".", "-", "+")
_STRUCTURES = ("[NaN, Infinity, -1, 1e999]", "[1, 2, 3, 4", "[1, 2, 3]", "[[1, 2], [3, 4]]", "[]", "{}", "null", "true",
               "[null, true, {}, []]", '["1", "2", "3", "4"]', "[٢٠, ١٠, ٦٠, ٥٠]", "[4, 3, 2, 1]", "[0, 0, 0, 0]",
               '{"a": 1, "a": 2}', '{"bbox_2d": [1, 2, 3]}', '```json\n[{"bbox_2d": "x", "label": 7}]\n```', "```json",
               "\\boxed{", "\\boxed{}", "\\boxed{{1}", "\\frac{1}{0}", "$$", "1,2;3|4", "()", "=")
_TAGS = ("<answer>", "</answer>", "<think>", "</think>", "<answer></answer>", "<think></think>", "</answer><answer>",
         "<think><answer></think></answer>", "<answer><answer>1</answer></answer>", "<answer>\n</answer>", "<ANSWER>1",
         "<think></think><answer></answer>", "<answer>1", "< answer >1< / answer >")
_TEXTS = ("", " ", "\n\t ", "junk", "None", "\0", "a\0b", "\ufffd", "\ufeff", "\u202e1", "\ud800", "\udfff\ud800",
          "e\u0301", "İ", "ß", "🙂", "\x1b[31m", "%s%n", "{0}", "{label}", "\\", "'", '"',
          "__import__('os').system('x')", "'; DROP TABLE", "../../etc/passwd", "I cannot answer that.")
_ODD = (*_TEXTS, *_TAGS, *_NUMBERS, *_STRUCTURES, *map(_in_answer, (*_NUMBERS, *_STRUCTURES, "\ud800", "\0")))

_UNITS = ("x", " ", "\n", "9", "1,", "1 ", "a ", "[", "]", "(", "{", "<", "\\", "-", ".", "١", "[1, 2, 3, 4] ",
          "[1, 2, ", '{"a":', '[{"a":[', "<answer>", "<think>", "</think>",
          "<think></think><answer>1</answer>", "\\boxed{", "\\boxed{1} ", "$", "A. ", "(A) ", "```json\n")
_RUNS = ("x", " ", "9", "a ", "1,", "[1, 2, 3, 4], ")  # match nested repetitions of a regex until the last character
_LONG_TEXTS = (*(unit * (_LONG // len(unit)) for unit in _UNITS),
               *(_in_answer(unit * (_LONG // len(unit))) for unit in _UNITS if "answer" not in unit),
               "<answer>" * 1000 + "1", "<answer>1</answer>" * 1000, "[" * 5000 + "]" * 5000,
               '{"a":' * 5000 + "1" + "}" * 5000, "[" + "[1, 2, 3, 4], " * 6000 + "[1, 2, 3, 4]]",
               *(unit * 3000 + end for unit in _RUNS for end in ("!", "\0")), "\t" * 50_000 + "!" + " " * 50_000 + "!")
