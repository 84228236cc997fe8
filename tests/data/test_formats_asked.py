"""Conversations, system prompts and marks of media of other people's records, up to the messages that a model sees."""

import json

import pytest

from tests.data.sets import save
from tests.data.test_formats import one
from tests.tables import each, refused
from vlrl.checks.fields import field_problems
from vlrl.data import FIELDS, sample_from_row
from vlrl.data.sources.reading import canonical_rows, rows_in
from vlrl.errors import DataError


def turns(*said: str, speakers=("human", "gpt")) -> list[dict]:
    return [{"from": speakers[n % 2], "value": words} for n, words in enumerate(said)]


def turns_of(*said: str) -> list[dict]:
    return [{"role": ("user", "assistant")[n % 2], "content": words} for n, words in enumerate(said)]


TOLD = {
    "a question after the answer": (turns("<image>Colour?", "white", "Why?"), "the question 'Why?' has no answer"),
    "questions in a row": (turns("a?", "b?", speakers=("human", "user")), "a turn of a user after one of a user"),
    "an answer first": (turns("white", "Colour?", speakers=("gpt", "human")), "a turn of the assistant at its beg"),
    "answers in a row": ([*turns("a?", "b"), {"from": "gpt", "value": "c"}],
                         "a turn of the assistant after one of the assistant"),
    "a late system": ([*turns("a?", "b"), {"from": "system", "value": "x"}], "a turn of the system after one of the"),
    "an empty turn of context": (turns("a?", "", "b?", "c"), "a turn of the assistant before the question is empty"),
    "an empty answer": (turns("a?", " "), "the question 'a?' has no answer"),
    "a tool": ([{"role": "user", "content": "a?"}, {"role": "tool", "content": "x"}], "a turn of a tool after one of"),
    "calls before the answer": ([{"role": "user", "content": "a?"}, {
        "role": "assistant", "content": None, "tool_calls": [{"name": "zoom", "arguments": "{}"}]},
        {"role": "tool", "content": "x"}, {"role": "assistant", "content": "b"}],
        "tool calls stand between the last question"),
    "a call without arguments": ([{"from": "human", "value": "a?"}, {"from": "function_call", "value": "zoom"}],
                                 "must have the name of a tool, and arguments"),
    "a stranger": ([{"role": "user", "content": "a?"}, {"role": "critic", "content": "x"}],
                   "a turn with the role 'critic'"),
    "no speaker": ([{"value": "a?"}], "a turn with the role None"),
    "a part of another kind": ([{"role": "user", "content": [{"type": "file", "file": "x"}]}], "is not text, image"),
    "a file of OpenAI's": ([{"role": "user", "content": [{"type": "input_image", "file_id": "x"}]}], "at OpenAI"),
    "a box that ms-swift fills in": (turns("<image>Find <ref-object>.", "<bbox>"), "holds <ref-object>, which"),
    "an image of the system": ([{"role": "system", "content": "<image>"}, *turns("a?", "b")], "only a turn can")}


@each("talk words", TOLD.values())
def test_a_conversation_that_no_row_holds_is_refused(talk, words):
    for field in ("conversations", "messages"):
        (row,) = canonical_rows({"id": 1, "image": "a.png", field: talk})
        assert isinstance(row, DataError) and words in str(row)


def test_all_before_the_last_question_is_context_and_the_system_is_kept():
    """Of formats beside those of test_row_shapes.py, where the prompts are compared."""
    hi = [{"role": "system", "content": "Be brief."}, *turns("<image>Hi", "hello")]
    rows = {
        "plan": {"conversations": [*hi, *turns("Plan. Speed is 3 m/s.", "KEEP, STRAIGHT")]},
        "boxes": {"conversations": [*hi, *turns("Find the cat.", "[1, 2, 30, 40]")]},
        "responses": {"prompt": [*hi, *turns("Who?")], "chosen": "a", "rejected": "b"},
        "answer": {"prompt": [*hi, *turns("Who?")], "answer": "a cat"},
        "question": {"conversations": [*hi[1:], *turns("Who?", "a cat")], "system": "Be brief."}}
    for name, record in rows.items():
        row = one({"image": "a.png", **record})
        assert row[name] and row["turns"] == turns_of("<image>Hi", "hello"), name
        assert row["system_prompt"] == "Be brief." and set(row) <= FIELDS, name
    prompt = one({"images": ["a.png"], "prompt": turns_of("Colour?", "white", "And now?"), "solution": "red"})
    assert prompt["turns"] == turns_of("<image>Colour?", "white")  # media without marks stand in the first turn
    with pytest.raises(DataError, match="system_prompt=3 must be a string"):
        sample_from_row({"id": 1, "system_prompt": 3})


def test_the_turn_of_a_tool_needs_the_tool():
    talk = [*turns("<image>Zoom."), {"from": "function_call", "value": '{"name": "zoom", "arguments": {"x": 2}}'},
            {"from": "observation", "value": "done"}, {"from": "gpt", "value": "Done."}, *turns("Who?", "a cat")]
    record = {"id": 1, "image": "a.png", "conversations": talk}
    row = one({**record, "tools": '[{"name": "zoom", "description": "near", "parameters": {}}]'})
    assert row["tools"] == [{"type": "function", "function": {"name": "zoom", "description": "near", "parameters": {}}}]
    assert row["turns"][1] == {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "zoom", "arguments": {"x": 2}}}]}
    assert row["turns"][2] == {"role": "tool", "content": "done"}
    sample_from_row(row)
    with pytest.raises(DataError, match=r"row '1': the conversation has a tool turn.*has no `tools`"):
        sample_from_row(one(record))
    assert "tools" not in one({**record, "conversations": turns("<image>Tool?", "saw"), "tools": ["saw", "hammer"]})
    with pytest.raises(DataError, match="has no name"):
        one({**record, "tools": [{"description": "x"}]})


def test_which_answer_counts_and_options_that_name_images():
    record = {"image": "a.png", "messages": turns_of("<image>Which?", "It is red, so <answer>B</answer>")}
    row = one({**record, "solution": "B"})
    assert row["answer"] == "B" and "solution" not in row
    long = one({**record, "messages": turns_of("<image>How many?", "I count one dog and then another one, which is a "
                                               "pair of dogs on the grass."), "answer": "2"})
    assert long["answer"] == "2" and long["solution"].startswith("I count")
    with pytest.raises(DataError, match="the assistant answers 'b', but a separate field"):
        one({**record, "solution": "C"})
    row = one({"question": "Which shows <image 1>?", "options": ["<image 2>", "none"], "answer": "A",
               "image_1": "a.png", "image_2": "b.png"})
    assert row["question"] == "Which shows image 1?" and row["options"] == ["image 2", "none"]
    talk = [{"role": "user", "content": [
        {"type": "text", "text": "Is"}, {"type": "image_url", "image_url": {"url": "file:///x/a.png"}},
        {"type": "text", "text": "red?"}]}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    row = one({"messages": json.dumps(talk)})
    assert row["image"] == "x/a.png" and row["question"] == "Is<image>red?" and row["answer"] == "yes"


MARKS = {
    # question, media -> the question of the row
    "before the text": ("<image>\n<image> Which?", {"images": ["a.png", "b.png"]}, "Which?"),
    "fewer before the text": ("<image>Which?", {"images": ["a.png", "b.png"]}, "Which?"),
    "inside": ("Is <image> like <image>?", {"images": ["a.png", "b.png"]}, "Is <image> like <image>?"),
    "before and inside": ("<image> and <image>: alike?", {"images": ["a.png", "b.png"]}, "<image> and <image>: alike?"),
    "after": ("Who?\n<image>", {"image": "a.png"}, "Who?\n<image>"),
    "a video": ("In <video>, who?", {"video": "a.mp4"}, "In <video>, who?"),
    "a video before an image": ("<video>Then <image>?", {"image": "b.png", "video": "a.mp4"}, "<video>Then <image>?"),
    "a video marked as an image": ("<image>\nWho?", {"video": "a.mp4"}, "Who?"),
    "numbered, in order": ("Is <image 1> like <image 2>?", {"image_1": "a.png", "image_2": "b.png"},
                           "Is <image> like <image>?"),
    "numbered, twice": ("Is <image 1> odd? <image 1>", {"image_1": "a.png"}, "Is image 1 odd? image 1"),
    "numbered, one of two": ("Look at <image 2>.", {"image_1": "a.png", "image_2": "b.png"}, "Look at image 2.")}


@each("question media wanted", MARKS.values())
def test_marks_keep_their_places(question, media, wanted):
    asks = [{**media, "question": question, "answer": "yes", "pid": 3}]
    if "image_1" not in media:
        asks += [{**media, "conversations": turns(question, "yes")},
                 {**media, "prompt": question, "chosen": "yes", "rejected": "no"}]
    for record in asks:
        row = one(record)
        assert row["question"] == wanted and not list(field_problems(row))


test_marks_that_do_not_fit_are_refused = refused(DataError, lambda record: one({"answer": "A", **record}), [
    ({"image": "a.png", "question": "Is <image> like <image>?"}, "for 2 images or videos, but the record has 1"),
    ({"question": "<image> What is it?"}, "for 1 images or videos, but the record has 0"),
    ({"images": ["a.png", "b.png"], "question": "Is <image> red?"}, "for 1 images or videos, but the record has 2"),
    ({"image": "a.png", "question": "Is <image 3> red?"}, "refers to image 3, but the record has only 1"),
    ({"image": "a.png", "question": "Hear <audio>"}, "is about audio"),
    ({"image": "a.png", "question": "Which?", "options": ["<image>", "none"]}, "'<image>' is an image"),
    ({"system": "Be loud.", "messages": [{"role": "system", "content": "Be brief."}, *turns_of("Who?", "A")]},
     "the system prompt is 'Be brief.' in the conversation, but 'Be loud.'")], plain=True)


@each("record words column wanted", [
    ({"question": "Who?", "problem": "Where?", "answer": "here"}, "'question' says 'Who?' and 'problem' says 'Where?'",
     {"question": "problem"}, {"question": "Where?"}),
    ({"question": "Who?", "answer": "a cat", "ground_truth": "a dog"}, "'answer' says 'a cat' and 'ground_truth' says",
     {"answer": "ground_truth"}, {"answer": "a dog"}),
    ({"question": "Who?", "answer": "x", "image": "a.png", "images": ["a.png", "b.png"]}, "'image' and 'images' (2 of",
     {"images": "images"}, {"images": ["a.png", "b.png"]}),
    ({"question": "Who?", "answer": "B", "options": ["x", "y"], "choices": ["A. a cat", "B. a dog"]},
     "'options' and 'choices' offer different options", {"options": "choices"}, {"options": ["a cat", "a dog"]}),
    ({"messages": turns_of("Who?", "x"), "prompt": turns_of("Where?"), "answer": "x"}, "each hold a conversation",
     {"messages": "prompt"}, {"question": "Where?"}),
    ({"prompt": turns_of("Who?"), "problem": "Where?", "answer": "here"}, "the field 'problem' asks",
     {"question": "problem"}, {"question": "Where?"}),
    ({"messages": turns_of("Who?", "x"), "problem": "Where?", "answer": "x"}, "'problem' asks 'Where?'",
     {"question": "problem"}, {"question": "Where?", "answer": "x"})])
def test_two_fields_that_differ_are_asked_about_and_columns_decide(record, words, column, wanted, tmp_path):
    (row,) = canonical_rows(record)
    ((name, other),) = column.items()
    assert isinstance(row, DataError) and words in str(row) and f"{name}={other}" in str(row)
    ((_, row),) = rows_in(save(tmp_path / "rows.jsonl", [record]), columns=column)
    assert not isinstance(row, DataError), row
    assert {k: row[k] for k in wanted} == wanted
    same = {"question": "Who?", "problem": "<image>Who?", "answer": "B", "correct_answer": "a dog", "image": "a.png",
            "options": ["a cat", "a dog"], "choices": ["A. a cat", "B. a dog"], "images": ["a.png"]}
    assert one(same)["answer"] == "B" and one(same)["question"] == "Who?"
