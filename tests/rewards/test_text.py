import time

from hypothesis import given
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards import text as read

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


@given(st.text(alphabet="abc ", max_size=8), st.text(alphabet="abc ", max_size=8))
def test_containment_pays_at_least_as_much(a, b):
    assert 0 <= read.token_f1(a, b) <= read.token_f1(a, b, contained=True) <= 1
    assert read.token_f1(a, b) == read.token_f1(b, a) and read.token_f1(a, a) == 1


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
    ("\u201ccat\u201d", "cat", True),
    ("10\u00b2", "102", False), ("m\u00b2", "m2", True), ("\u00bfperro?", "perro", True), ("3\u20132", "3-2", True),
    ("cat!", "cat", True), ("\uff23at", "cat", True), ("STRASSE", "stra\u00dfe", True),
    ("cat", "cats", False), ("C++", "C#", False), ("-5", "5", False), (".5", "5", False), ("!", "?", False),
    ("", "cat", False)], turned=True)
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


@each("text", ["<answer>" * 12_000, "</answer>" * 11_000, "<think></think>" * 6_000, "1" * 100_000,
                                  "1," * 50_000, "1,111" * 20_000, "(" * 100_000, "A " * 50_000,
                                  "A" + " " * 100_000 + "x", "!" * 100_000 + "a", "\u0301" * 100_000,
                                  "not " * 25_000, "not" + " " * 100_000])
def test_hostile_text_takes_linear_time(text):
    began = time.perf_counter()
    read.parse_answer(text)
    read.think_answer_format(text)
    read.clean_label(text)
    read.number(text)
    read.yes_no(text)
    read.choice_letters(text)
    read.answer_text(text)
    read.think_answer_within(text)
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
