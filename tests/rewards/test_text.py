"""What is read in a text, by hand and whatever the text: tags, labels, literals, numbers, words and codes."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards import answers, boxes, chart, codes, literals, scripts
from vlrl.rewards import text as read
from vlrl.rewards.numbers import is_percent, numbers, read_number

TAGGED = st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "a", " ", "\n", "8"])).map("".join)


@each("text reasoning final", [
    ("<think>a loop</think><answer> 8 </answer>", "a loop", "8"), ("<think>a</think> 8 ", "a", "8"),
    ("a loop</think>8", "a loop", "8"),  # the prompt opened the tag
    (" 8 ", "", "8"), ("<think>never closed 8", "never closed 8", ""),
    ("<think>a</think><answer>1</answer><answer>2</answer>", "a", "2"),
    ("<think>a</think><answer>1</answer><answer>2", "a", "1"), ("<answer>1</answer> so it is 2", "", "1"),
    ("<think><answer>1</answer></think>2", "<answer>1</answer>", "2"),  # no answer stands in the thinking
    ("", "", "")])
def test_parse_answer(text, reasoning, final):
    answer = read.parse_answer(text, n_tokens=3, truncated=True, step=7)
    assert (answer.reasoning, answer.final) == (reasoning, final)
    assert (answer.text, answer.n_tokens, answer.truncated, answer.step) == (text, 3, True, 7)


@given(st.text() | TAGGED)
def test_never_raises(text):
    read.parse_answer(text)
    assert read.think_answer_format(text) in (0, 1)
    assert read.same_label(text, text)
    assert read.number(text) is None or isinstance(read.number(text), float)
    assert read.think_answer_within(text) in (0, 1) and read.yes_no(text) in (None, "yes", "no")
    assert set(read.choice_letters(text)) <= set("ABCDE,") and 0 <= read.token_f1(text, "down the road") <= 1
    read.says_none(text)
    assert read.clean_label(text) == read.clean_label(text).strip()
    assert read.answer_tag(text) is None or read.answer_tag(text).strip() == read.answer_text(text)
    for which in ("first", "last"):
        read.extract_tag(text, "answer", which)
    if read.think_answer_format(text):
        assert read.extract_tag(text, "answer", "first") == read.extract_tag(text, "answer", "last") is not None


def test_numbers_and_none():
    assert not any(map(read.says_none, ("I do not know", "I'm not sure", "I can't tell.", "It cannot tell")))
    assert all(map(read.says_none, ("none", "None.", "No Objects", "[]", "```json\n[]\n```", "There is no mug.", "null",
                               "I don't see it", "没有")))
    assert not any(map(read.says_none, ("", " ", "[1, 2]", "none 3", "mug", "x" * 1000, "{bad", "```json\n{bad\n```",
                                        "[[[", "a note", "😀", "NaN", "Ａ")))
    assert list(read.numbers("3 cars, -2.5 m, 1,200; x2 3D 1.5.2 and 7.")) == [3, -2.5, 1200, 7]
    assert list(read.numbers("9" * 400)) == [float("inf")] and list(read.numbers("")) == []


test_denials = by_hand(lambda text: int(read.denies(text)), [
    ("not a cat", 1), ("It is not C.", 1), ("It isn't C", 1), ("**Not** C", 1), ("do not STOP", 1),
    ("Don\u2019t stop", 1), ("no cat", 1), ("never", 1), ("the answer is not 3", 1), ("it's not 3", 1),
    ("I would not stop", 1), ("anything but C", 1),
    ("C, not D", 0), ("no", 0), ("No, C", 0), ("No 5", 0), ("notebook", 0), ("a knot", 0), ("nothing", 0), ("none", 0),
    ("", 0), ("it " * 50_000, 0), (" " * 100_000, 0), ("the " + "a" * 100_000, 0)])
test_extract_tag = by_hand(lambda text: (read.extract_tag(text, "answer"), read.extract_tag(text, "answer", "last")), [
    ("<answer>1</answer> <answer>2</answer>", "1", "2"), ("<answer>one\nline</answer>", "one\nline", "one\nline"),
    ("<answer>1</answer> <answer>2", "1", "1"),  # the second is not closed
    ("<answer>1<answer>2</answer></answer>", "1<answer>2", "1<answer>2"), ("<answer></answer>", "", ""),
    ("</answer>1<answer>", None, None), ("<answer>1", None, None), ("<ANSWER>1</ANSWER>", None, None), ("", None, None),
], values=2)
test_think_answer_format = by_hand(read.think_answer_format, [
    ("<think>a loop</think><answer>8</answer>", 1), ("\n <think>a\nloop</think>\n\n<answer>8</answer> ", 1),
    ("<think></think><answer></answer>", 1), ("<answer>8</answer><think>a</think>", 0),
    ("<think>a</think>so<answer>8</answer>", 0), ("<think>a</think><answer>8</answer>!", 0),
    ("ok <think>a</think><answer>8</answer>", 0),
    ("<think>a</think><answer>8</answer><think>a</think><answer>8</answer>", 0),
    ("<think><think>a</think><answer>8</answer>", 0),  # a plain fullmatch of the pattern would accept it
    ("<think><answer>8</answer></think>", 0), ("<think>a</think><answer>8", 0), ("8", 0), ("", 0)])
test_think_answer_within = by_hand(lambda text: read.think_answer_within(text, lambda content: "8" in content), [
    ("<think>a</think><answer>8</answer>", 1), ("So: <think>a</think>\n<answer>8</answer> That is all.", 1),
    ("<think>a</think>so<answer>8</answer>", 0), ("<answer>8</answer><think>a</think>", 0),
    ("<think><answer>8</answer></think>", 0), ("<think>a</think><answer>8</answer><answer>8</answer>", 0),
    ("<think>a</think><answer>9</answer>", 0),  # the content asked for is not there
    ("", 0)])
test_answers_after_the_thinking = by_hand(
    lambda text: (read.answer_tag(text), read.answer_tag(text, "last"), read.answer_text(text)), [
    ("<answer>1</answer><answer>2</answer>", "1", "2", "1"),
    ("<think><answer>1</answer></think><answer>2</answer>", "2", "2", "2"),  # no answer stands in the thinking
    ("<think><answer>1</answer></think>2", None, None, "2"), ("<think>a</think><answer>3", None, None, "3"),
    ("<think>1", None, None, ""), ("4", None, None, "4"), ("", None, None, "")], values=3)
test_same_label = by_hand(read.same_label, [
    ("Cat", "cat", True), (" 'cat'. ", "cat", True), ("**Golden  Retriever**", "golden retriever", True),
    ("\u201ccat\u201d", "cat", True), ("10\u00b2", "102", False), ("m\u00b2", "m2", True),
    ("\u00bfperro?", "perro", True), ("3\u20132", "3-2", True), ("cat!", "cat", True), ("\uff23at", "cat", True),
    ("STRASSE", "stra\u00dfe", True), ("cat", "cats", False), ("C++", "C#", False), ("-5", "5", False),
    (".5", "5", False), ("!", "?", False), ("", "cat", False)], turned=True)
test_yes_no = by_hand(read.yes_no, [
    ("Yes.", "yes"), ("NO", "no"), ("true", "yes"), ("False!", "no"), ("that is correct", "yes"), ("incorrect", "no"),
    ("not correct", "no"), ("not true", "no"), ("unknown", None), ("eyes", None), ("nothing", None), ("", None),
    ("no, yes", "yes"), ("Yes, no doubt", "yes")])
test_choice_letters = by_hand(read.choice_letters, [
    ("B", "B"), ("b", "B"), ("A, C", "A,C"), ("C A C", "C,A"), ("(D)", "D"), ("a, c", "A,C"), ("a cat", ""),
    ("A cat is in B", "B"), ("BAD", ""), ("Z", ""), ("", ""), ("B and D", "B,D"), ("A and C", "A,C"),
    ("A or B", "A,B"), ("A android", "")])
test_token_f1 = by_hand(read.token_f1, [
    ("hello there", "hello there", 1), ("Hello", "hello", 1), ("hello there", "hello", 2 / 3), ("a b c", "d e", 0),
    ("downwards", "down", 8 / 13), ("a", "at", 0), ("a", "A", 1), ("cat", "at", 0.8), ("", "", 1),
    ("", "down", 0), ("down", " ", 0), ("\u6253\u5f00\u8bbe\u7f6e", "\u6253\u5f00\u76f8\u673a", 1 / 2)], turned=True)
test_token_f1_by_containment = by_hand(lambda a, b: read.token_f1(a, b, contained=True), [
    ("downwards", "down", 1), ("a", "cat", 1), ("a", "dog", 0), ("a b", "a", 2 / 3), ("", "a", 0)], turned=True)
test_number = by_hand(read.number, [
    ("3", 3), ("there are 3 cats", 3), ("-2.5", -2.5), ("1,200 people", 1200), ("1,200,300.5", 1200300.5), ("3.", 3),
    (".5", 0.5), ("1e6", 1e6), ("about \u22123", -3), ("-2.5e-3 m", -0.0025), ("v.5", None), ("3e", None),
    ("7 or 8", 7), ("x2 3D", None), ("1.2.3", None), ("", None), ("three", None), ("9" * 400, None)])


HOSTILE = [
    "<answer>" * 12_000, "</answer>" * 11_000, "<think></think>" * 6_000, "1" * 100_000, "1," * 50_000,
    "1,111" * 20_000, "(" * 100_000, "A " * 50_000, "A" + " " * 100_000 + "x", "!" * 100_000 + "a", "\u0301" * 100_000,
    "not " * 25_000, "not" + " " * 100_000, "'" * 100_000, "('" * 50_000, "[" + "'a\"" * 30_000 + "]",
    "```json" * 15_000, "(" * 19_999 + ")", "1." * 50_000, "[" + "None" * 4_000 + "]", "[" * 100_000, "[1" * 50_000,
    "[" + "1" * 100_000, "[" + " " * 100_000, "[1," * 33_000, "[1, 2, 3, " * 10_000, "[" + "1." * 50_000,
    "[1" + " " * 100_000 + ", x", "[1, 2, 3, 4] " * 8_000]
READERS = (read.parse_answer, read.think_answer_format, read.clean_label, read.number, read.yes_no, read.choice_letters,
           read.answer_text, read.think_answer_within, literals.read_fenced, literals.decimals, boxes.parse_box,
           boxes.parse_boxes, boxes.box_format)


@each("text", HOSTILE)
def test_hostile_text_takes_linear_time(text):
    began = time.perf_counter()
    for reader in READERS:
        reader(text)
    assert time.perf_counter() - began < 20  # not a timing: a quadratic scan takes minutes


OPENED = ("<think>\n", "<think>", "Sure.\n<think>\n", "<think>\n\n</think>\n\n", "<think></think>\n", "Answer: ")


@each("opened text whole reasoning final", [
    ("<think>\n", "a\n</think>\n8", "<think>\na\n</think>\n8", "a", "8"),
    ("<think>\n", "perhaps 8, or", "<think>\nperhaps 8, or", "perhaps 8, or", ""),  # cut: no answer
    ("<think>\n", "<think>a</think>8", "<think>\n<think>a</think>8", "<think>a", "8"),
    ("<think>\n\n</think>\n\n", "8", "8", "", "8"),
    ("<think>\n\n</think>\n\n", "<think>a</think>8", "<think>a</think>8", "a", "8"),
    ("<think></think>", "<answer>8</answer>", "<think></think><answer>8</answer>", "", "8"),
    ("<answer>", "8</answer>", "<answer>8</answer>", "", "8"), ("", "8", "8", "", "8")])
def test_what_the_prompt_opened_is_scored_with_the_answer(opened, text, whole, reasoning, final):
    answer = read.parse_answer(text, 3, True, 5, opened)
    assert (answer.text, answer.reasoning, answer.final) == (whole, reasoning, final)
    assert answer.opened == whole.removesuffix(text) and read.scored_text(text, opened) == whole
    assert (answer.n_tokens, answer.truncated, answer.step) == (3, True, 5)


@each("opened text written", [
    ("<think>\n", "<think>a</think>8", "a</think>8"), ("<think>", " <think>\na</think>8", "\na</think>8"),
    ("Sure.\n<think>\n", "<think>a</think>8", "a</think>8"),
    ("Sure.\n<think>\n", "Sure.\n<think>\na</think>8", "a</think>8"), ("<answer>", "<answer>8</answer>", "8</answer>"),
    ("<think>\n", "8", "\n</think>\n\n8"), ("<think>\n", "a</think>8", "a</think>8"),
    ("[THINK]", "8", "\n[/THINK]\n\n8"), ("<answer>", "8</answer>", "8</answer>"), ("<think></think>\n", "8", "8"),
    ("<think></think>\n", "<think>a</think>8", "<think>a</think>8"), ("Answer: ", "Answer: 8", "8"), ("", "8", "8")])
def test_what_is_written_behind_what_the_prompt_opened(opened, text, written):
    assert read.completion_for(text, opened) == written and read.completion_for(written, opened) in (written, text)


@given(TAGGED, st.sampled_from(OPENED))
def test_an_answer_behind_its_prompt_says_what_it_says_alone(text, opened):
    alone, behind = read.parse_answer(text), read.parse_answer(read.completion_for(text, opened), opened=opened)
    if "<think>" in text and "</think>" in text.partition("<think>")[2] and text.startswith("<think>"):
        assert (behind.final, read.think_answer_format(behind.text)) == (alone.final, read.think_answer_format(text))
    assert read.said(read.parse_answer(text)) == text
    assert not read.said(read.parse_answer(text.replace("</think>", ""), opened="<think>"))
    assert read.closing_tag(opened) in ("", "</think>")


def test_fences_and_detections():
    assert literals.json_block("a ```json\n[1]\n``` b ```json\n[2]\n```") == "\n[2]\n"
    assert literals.json_block("```json [1]") is None and literals.json_block("[1]") is None
    assert literals.read_fenced("so ```json\n[1, 2]\n``` there") == [1, 2] and literals.read_fenced("[3]") == [3]
    entries = [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, {"bbox_2d": [1, 2]}, "x", {"label": "y"}]
    assert [(d["box"], d["label"]) for d in literals.read_detections(entries)] == [([1, 2, 3, 4], "cat")]
    assert literals.read_detections({"bbox_2d": [1, 2, 3, 4]}) == [] and literals.read_detections(None) == []
    assert len(literals.read_detections([{"bbox_2d": [1, 2, 3, 4]}] * 5000)) == 1000
    assert [literals.first_object(of) for of in ([{"a": 1}, {"b": 2}], [], [1])] == [{"a": 1}, None, None]


test_read_literal = by_hand(literals.read_literal, [
    ('[{"a": 1}]', [{"a": 1}]), ("[{'a': 1, 'b': 'x'}]", [{"a": 1, "b": "x"}]), (" (1, 2) ", [1, 2]),
    ("{'a': None, 'b': True, 'c': False}", {"a": None, "b": True, "c": False}),
    ("{'a': 'say \"hi\"'}", {"a": 'say "hi"'}), ('{"a": "it\'s"}', {"a": "it's"}), ("[1, 2", None), ("[1, x]", None),
    ("", None), ("5", None), ("None", None), ("[__import__('os').system('x')]", None), ("[1, 2] done", None),
    ("{'a': 'it\\'s'}", None), ("[" * 50_000, None), ("[" * 50_000 + "]" * 50_000, None), ("[" * 300 + "]" * 300, None),
    ('{"a": ' * 300 + "1" + "}" * 300, None), ("[[1], " * 2 + "[]" + "]" * 2, [[1], [[1], []]]),
    ("[" + "9" * 5000 + "]", None)])
test_numbers_of = by_hand(literals.numbers_of, [
    ([1, 2.5], 2, [1, 2.5]), ([[1, 2]], 2, [1, 2]), ([1, 2, 3], 2, None), ([True, 2], 2, None), (["1", 2], 2, None),
    ([float("nan"), 2], 2, None), ([float("inf"), 2], 2, None), ([10**400, 2], 2, None), ([1e9, 2], 2, None),
    (None, 2, None), ({"a": 1}, 1, None)])


@each("text values", [
    ("[10, 20.5, -3, 4]", [10, 20.5, -3, 4]), ('{"bbox_2d": [1, 2]}', [1, 2]), ("x=10, y=20", [10, 20]), ("", []),
    ("1e5 v2.3 0x1", []), ("٣ 4", [4]), ("9" * 20, [])])
def test_decimals(text, values):
    assert literals.decimals(text) == values
    assert literals.decimals("1 " * 50, most=3) == [1, 1, 1]


@settings(max_examples=50)
@given(st.text() | st.text("[]{}()'\"0123456789.,:-` jsontrueNone\\", max_size=100))
def test_reading_never_raises(text):
    value = literals.read_fenced(text)
    literals.read_detections(value)
    literals.first_object(value)
    assert all(abs(v) < 1e9 for v in literals.decimals(text))
    for n in (2, 4):
        assert literals.numbers_of(value, n) is None or len(literals.numbers_of(value, n)) == n


ONE = {  # text -> the number that it is
    "12": 12, "-2.5": -2.5, "+4": 4, "5.": 5, ".5": 0.5, "1,200": 1200, "1,234,567.5": 1234567.5, "1,00,000": 100000,
    "12,5": 12.5, "0,125": 0.125, "1234,5": 1234.5, "1.234,5": 1234.5, "1\u202f234,5": 1234.5, "1/2": 0.5,
    "-3/4": -0.75, "12 1/2": 12.5, "\\frac{25}{2}": 12.5, "-\\dfrac12": -0.5, "12\\frac{1}{2}": 12.5, "2e3": 2000,
    "\u22125": -5, "\uff11\uff12\uff0e\uff15": 12.5, "\u0663": 3, "\u0664\u0662\u066b\u0665": 42.5, "\u0967\u0968": 12}
NONE = ["", "x2", "3D", "3^2", "3\u00b2", "3*4", "3 * 4", "34/2", "1,2,3", "1.2.3", "1/8/93", "12 cm", "2\u03c0",
        "12\\pi", "\\sqrt{2}", "\u221a2", "x^2", "1_2", "nan", "inf", "1e999", "9" * 400, "\u2460", "\u00b9"]
AMONG = {  # text -> all numbers in it
    "**12** cats": [12], "3 or 4": [3, 4], "$5.99": [5.99], "\\boxed{12}": [12], "60 km/h": [60], "(10, 20)": [10, 20],
    "\\frac{1}{2} or 3": [0.5, 3], "3\u4e2a": [3], "it is 3/4": [0.75], "3^2 = 9": [9], "2019-2021": [2019, 2021]}


def test_numbers_and_counts_by_hand():
    assert {text: read_number(text) for text in ONE} == ONE
    assert [text for text in NONE if read_number(text) is not None] == []
    assert {text: list(numbers(text)) for text in AMONG} == AMONG
    assert answers.one_number("\\frac{24}{2}") is None and answers.read_number("12,5") == 12.5
    assert [is_percent(text) for text in ("3%", "3 percent", "3\\%", "\uff13\uff05", "3", "% 3")] == [1, 1, 1, 1, 0, 0]
    assert [chart.count(text) for text in ("\u4e09", "\u5341\u4e8c", "\u4e8c\u5341", "3\u4e2a", "twenty", "3%")] == [
        3, 12, 20, 3, 20, None]
    said = {"\u662f": "yes", "\u4e0d\u662f": "no", "\u043d\u0435\u0442": "no", "\u662f\uff0c\u4e0d\u662f": None}
    assert {text: chart.one_yes_no(text) for text in said} == said


WORDS = {"Hello, w\u00f6rld_1": ["Hello", "w\u00f6rld", "1"],
         "\u7ea2\u706f12\u53f7": ["\u7ea2", "\u706f", "12", "\u53f7"],
         "\u0939\u093f\u0928\u094d\u0926\u0940 12": ["\u0939\u093f\u0928\u094d\u0926\u0940", "12"],
         "cafe\u0301": ["caf\u00e9"], "\u6771\u4eac\u99c5A1": ["\u6771", "\u4eac", "\u99c5", "A1"], "\U0001f642 !": []}


def test_words_by_hand():
    assert {text: scripts.words(text) for text in WORDS} == WORDS
    assert scripts.pieces("\u6771\u4eac A1, x") == ["\u6771", "\u4eac", "A1,", "x"]
    assert scripts.western("10\u00b2") == "10\u00b2"


@each("given_ right rouge", [
    ("\u7ea2\u706f12\u53f7", "\u7eff\u706f12\u53f7", (3 / 4 + 2 / 3 + 3 / 4) / 3),
    ("\u0442\u043e\u0442 \u0434\u043e\u043c", "\u044d\u0442\u043e\u0442 \u0434\u043e\u043c", 1 / 3)])
def test_rouge_of_other_scripts_by_hand(given_, right, rouge):
    assert answers.rouge(given_, right) == pytest.approx(rouge) and answers.rouge(right, right) == 1


CODES = ["555-010-0199", "(555) 010-0199", "+1 888 867 2757", "3-2", "3\u20132", "1/8/93", "007", "012590", "J-062",
         "12:30", "12:30 PM", "1.2.3", "192.168.0.1", "978-3-16-148410-0", "9" * 16, "10 - 12"]
NO_CODES = ["0.5", "0", "10", "1/2", "-5", "1,200", "3.14", "2x+3", "x=3", "2019", "a cat", "", "36 years old", "0,5",
            "\\frac{01}{2}", "24/7", "1 1/2"]


def test_codes_by_hand():
    assert [text for text in CODES if not codes.is_code(text)] == []
    assert [text for text in NO_CODES if codes.is_code(text)] == []
    assert codes.same_code("j-062.", "J-062") and codes.same_code("3 \u2013 2", "3-2")
    assert codes.same_code("12km", "12 km") and codes.same_code("(3,4)", "(3, 4)")
    assert not codes.same_code("62", "062") and not codes.same_code("12 3", "1 23")
    assert answers.free_text("012591", "012590") == answers.free_text("12 m", "13 m") == 0
    assert answers.free_text("Highway 102", "Highway 101") == answers.free_text("37 years old", "36 years old") == 0
    assert answers.free_text("years old: 36", "36 years old") > 0
    assert answers.free_text("3 red cars on a road", "2 red cars on a road") > 0.5  # a sentence


@given(st.text(max_size=60), st.text(max_size=20))
def test_whatever_the_text(text, other):
    assert all(isinstance(v, float) for v in numbers(text))
    value = read_number(text)
    assert value is None or math.isfinite(value)
    assert scripts.western(scripts.western(text)) == scripts.western(text)
    assert "".join(scripts.words(text)).split() == ["".join(scripts.words(text))] * bool(scripts.words(text))
    assert codes.same_code(text, text) and codes.is_code(text) in (True, False)
    assert 0 <= answers.free_text(text, other) <= 1


@given(st.integers(-10**9, 10**9), st.sampled_from([0x30, 0xff10, 0x660, 0x6f0, 0x966, 0x9e6, 0xe50]))
def test_whole_numbers_in_any_digits(value, zero):
    assert read_number(str(value).translate({ord("0") + n: chr(zero + n) for n in range(10)})) == value
    assert read_number(f"{value:,}") == value
