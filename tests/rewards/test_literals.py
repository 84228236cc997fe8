import time

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tables import by_hand, each
from vlrl.rewards.literals import (
    decimals,
    first_object,
    json_block,
    numbers_of,
    read_detections,
    read_fenced,
    read_literal,
)


def test_fences_and_detections():
    assert json_block("a ```json\n[1]\n``` b ```json\n[2]\n```") == "\n[2]\n"
    assert json_block("```json [1]") is None and json_block("[1]") is None
    assert read_fenced("so ```json\n[1, 2]\n``` there") == [1, 2] and read_fenced("[3]") == [3]
    entries = [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}, {"bbox_2d": [1, 2]}, "x", {"label": "y"}]
    assert [(d["box"], d["label"]) for d in read_detections(entries)] == [([1, 2, 3, 4], "cat")]
    assert read_detections({"bbox_2d": [1, 2, 3, 4]}) == [] and read_detections(None) == []
    assert len(read_detections([{"bbox_2d": [1, 2, 3, 4]}] * 5000)) == 1000
    assert first_object([{"a": 1}, {"b": 2}]) == {"a": 1} and first_object([]) is None and first_object([1]) is None


test_read_literal = by_hand(read_literal, [
    ('[{"a": 1}]', [{"a": 1}]), ("[{'a': 1, 'b': 'x'}]", [{"a": 1, "b": "x"}]), (" (1, 2) ", [1, 2]),
    ("{'a': None, 'b': True, 'c': False}", {"a": None, "b": True, "c": False}),
    ("{'a': 'say \"hi\"'}", {"a": 'say "hi"'}),
    ('{"a": "it\'s"}', {"a": "it's"}), ("[1, 2", None), ("[1, x]", None), ("", None), ("5", None), ("None", None),
    ("[__import__('os').system('x')]", None), ("[1, 2] done", None), ("{'a': 'it\\'s'}", None), ("[" * 50_000, None),
    ("[" * 50_000 + "]" * 50_000, None), ("[" * 300 + "]" * 300, None),
    ('{"a": ' * 300 + "1" + "}" * 300, None), ("[[1], " * 2 + "[]" + "]" * 2, [[1], [[1], []]]),

    ("[" + "9" * 5000 + "]", None)])
test_numbers_of = by_hand(numbers_of, [
    ([1, 2.5], 2, [1, 2.5]), ([[1, 2]], 2, [1, 2]), ([1, 2, 3], 2, None), ([True, 2], 2, None), (["1", 2], 2, None),
    ([float("nan"), 2], 2, None), ([float("inf"), 2], 2, None), ([10**400, 2], 2, None), ([1e9, 2], 2, None),
    (None, 2, None), ({"a": 1}, 1, None)])


@each("text values", [
    ("[10, 20.5, -3, 4]", [10, 20.5, -3, 4]), ('{"bbox_2d": [1, 2]}', [1, 2]), ("x=10, y=20", [10, 20]), ("", []),
    ("1e5 v2.3 0x1", []), ("٣ 4", [4]), ("9" * 20, [])])
def test_decimals(text, values):
    assert decimals(text) == values
    assert decimals("1 " * 50, most=3) == [1, 1, 1]


@settings(max_examples=50)
@given(st.text() | st.text("[]{}()'\"0123456789.,:-` jsontrueNone\\", max_size=100))
def test_reading_never_raises(text):
    value = read_fenced(text)
    read_detections(value)
    first_object(value)
    assert all(abs(v) < 1e9 for v in decimals(text))
    for n in (2, 4):
        assert numbers_of(value, n) is None or len(numbers_of(value, n)) == n


@each("text", ["'" * 100_000, "('" * 50_000, "[" + "'a\"" * 30_000 + "]", "```json" * 15_000,
                                  "(" * 19_999 + ")", "1." * 50_000, "[" + "None" * 4_000 + "]"])
def test_hostile_text_takes_linear_time(text):
    began = time.perf_counter()
    read_fenced(text)
    decimals(text)
    assert time.perf_counter() - began < 20  # not a timing: a quadratic scan takes minutes
