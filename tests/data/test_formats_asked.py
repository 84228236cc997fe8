"""Conversations, system prompts and marks of media of other people's records, up to the messages that a model sees."""

import json

import pytest

from tests.data.test_formats import one
from tests.tables import each
from vlrl.checks.fields import field_problems
from vlrl.data import FIELDS, sample_from_row
from vlrl.data.sources.reading import canonical_rows, rows_in
from vlrl.errors import DataError
from vlrl.task import Task, load


def turns(*said: str, speakers=("human", "gpt")) -> list[dict]:
    return [{"from": speakers[n % 2], "value": words} for n, words in enumerate(said)]


def messages(row: dict, name: str = "qa", **settings) -> list[tuple[str, list[str]]]:
    """Role and content of each message, media as their kind in brackets."""
    task = load(name, settings)
    found = task.messages(task.sample_from_row(row))
    return [(m["role"], [c.get("text", f"[{c['type']}]") for c in m["content"]]) for m in found]


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


def test_all_before_the_last_question_is_context():
    talk = turns("<image>Colour?", "white", "<image>\nAnd this?", "red", "Which is <image> like?", "the second")
    row = one({"images": ["a.png", "b.png", "c.png"], "conversations": talk})
    assert row["turns"] == [{"role": "user", "content": "<image>Colour?"}, {"role": "assistant", "content": "white"},
                            {"role": "user", "content": "<image>And this?"}, {"role": "assistant", "content": "red"}]
    assert row["question"] == "Which is <image> like?" and row["answer"] == "the second" and set(row) <= FIELDS
    found = messages(row, prompt="{question}")
    assert [role for role, _ in found] == ["user", "assistant"] * 2 + ["user"]
    assert [content for _, content in found] == [
        ["[image]", "Colour?"], ["white"], ["[image]", "And this?"], ["red"], ["Which is ", "[image]", " like?"]]
    prompt = one({"images": ["a.png"], "prompt": turns("Colour?", "white", "And now?", speakers=("user", "assistant")),
                  "solution": "red"})
    assert prompt["turns"][0]["content"] == "<image>Colour?" and prompt["answer"] == "red"  # media unmarked: first turn
    history = {"query": "And now?", "response": "red", "history": [["<image>Colour?", "white"]], "images": ["a.png"]}
    alpaca = {"instruction": "And", "input": "now?", "output": "red", "history": history["history"], "image": "a.png"}
    assert one(history)["turns"] == one(alpaca)["turns"] == prompt["turns"]
    assert one(alpaca)["question"] == "And\nnow?"
    plan = one({"image": "a.png", "conversations": turns("<image>Hi", "hello", "Plan. Speed is 3 m/s.",
                                                         "KEEP, STRAIGHT")})
    box = one({"image": "a.png", "conversations": turns("<image>Hi", "hello", "Find the cat.", "[1, 2, 30, 40]")})
    pair = one({"image": "a.png", "prompt": turns("<image>Hi", "hello", "Who?"), "chosen": "a", "rejected": "b"})
    assert plan["plan"] and box["boxes"] and pair["responses"]
    assert plan["turns"] == box["turns"] == pair["turns"] == turns_of("<image>Hi", "hello")


def turns_of(*said: str) -> list[dict]:
    return [{"role": ("user", "assistant")[n % 2], "content": words} for n, words in enumerate(said)]


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
    (nameless,) = canonical_rows({**record, "tools": [{"description": "x"}]})
    assert isinstance(nameless, DataError) and "has no name" in str(nameless)


def test_which_answer_counts_and_options_that_name_images():
    record = {"image": "a.png", "messages": turns_of("<image>Which?", "It is red, so <answer>B</answer>")}
    row = one({**record, "solution": "B"})
    assert row["answer"] == "B" and "solution" not in row
    long = one({**record, "messages": turns_of("<image>How many?", "I count one dog and then another one, which is a "
                                               "pair of dogs on the grass."), "answer": "2"})
    assert long["answer"] == "2" and long["solution"].startswith("I count")
    (row,) = canonical_rows({**record, "solution": "C"})
    assert isinstance(row, DataError) and "the assistant answers 'b', but a separate field" in str(row)
    row = one({"question": "Which shows <image 1>?", "options": ["<image 2>", "none"], "answer": "A",
               "image_1": "a.png", "image_2": "b.png"})
    assert row["question"] == "Which shows image 1?" and row["options"] == ["image 2", "none"]
    talk = [{"role": "user", "content": [
        {"type": "text", "text": "Is"}, {"type": "image_url", "image_url": {"url": "file:///x/a.png"}},
        {"type": "text", "text": "red?"}]}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    row = one({"messages": json.dumps(talk)})
    assert row["image"] == "x/a.png" and row["question"] == "Is<image>red?" and row["answer"] == "yes"


@each("beside words", [
    ({"prompt": turns_of("Who else?")}, "'messages' and 'prompt' each hold a conv.*data.columns. messages=messages"),
    ({"problem": "What else?"}, "the field 'problem' asks 'What else\\?'.*--columns .data.columns. question=problem"),
    ({"system": "Be loud."}, "the system prompt is 'Be brief.' in the conversation, but 'Be loud.'"),
    ({"image": None, "images": ["a.png", "b.png"]}, "has placeholders for 1 images or videos, but the record has 2")])
def test_two_readings_of_a_record_are_asked_about(beside, words):
    talk = [{"role": "system", "content": "Be brief."}, *turns_of("Is <image> old?", "yes")]
    (row,) = canonical_rows({"image": "a.png", "messages": talk, **beside})
    assert isinstance(row, DataError)
    with pytest.raises(DataError, match=words):
        raise row


def test_the_system_and_the_marks_reach_the_model():
    talk = [{"role": "system", "content": "Be brief."}, *turns("<image>Who?", "a cat")]
    row = one({"image": "a.png", "conversations": talk})
    assert row["system_prompt"] == "Be brief." == one({
        "image": "a.png", "conversations": talk[1:], "system": "Be brief."})["system_prompt"]
    assert set(row) <= FIELDS
    assert messages(row)[0] == ("system", ["Be brief."])
    assert messages(row, system="Think.")[0] == ("system", ["Think.\n\nBe brief."])
    pair = one({"image": "a.png", "conversations": talk[:2], "chosen": "a cat", "rejected": "a dog"})
    verl = one({"prompt": talk[:2], "images": ["a.png"], "answer": "a cat"})
    plan = one({"image": "a.png", "conversations": [
        talk[0], *turns("<image>Plan. Your speed is 3 m/s.", "KEEP, STRAIGHT")]})
    assert pair["system_prompt"] == verl["system_prompt"] == plan["system_prompt"] == "Be brief." and plan["plan"]
    with pytest.raises(DataError, match="system_prompt=3 must be a string"):
        sample_from_row({"id": 1, "system_prompt": 3})
    row = {"id": 1, "images": ["a.png", "b.png"], "question": "Is <image> like <image>?", "answer_type": "text"}
    assert messages({**row, "answer": "no"})[0][1][:4] == ["Is ", "[image]", " like ", "[image]"]
    film = {"id": 1, "video": "a.mp4", "question": "In <video>, who?", "answer": "a cat", "answer_type": "text"}
    assert messages(film, "video")[0][1][:2] == ["In ", "[video]"]
    pair = {**row, "responses": ["yes", "no"], "answer": 2}
    assert messages(pair, "preference")[0][1][1:4] == ["[image]", " like ", "[image]"]
    task = Task()
    task.prompt = "Plain."  # a prompt without the question: media come first
    found = task.messages(task.sample_from_row(row))
    assert [c["type"] for c in found[0]["content"]] == ["image", "image", "text"]


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


@each("record words", [
    ({"image": "a.png", "question": "Is <image> like <image>?"}, "for 2 images or videos, but the record has 1"),
    ({"question": "<image> What is it?"}, "for 1 images or videos, but the record has 0"),
    ({"images": ["a.png", "b.png"], "question": "Is <image> red?"}, "for 1 images or videos, but the record has 2"),
    ({"image": "a.png", "question": "Is <image 3> red?"}, "refers to image 3, but the record has only 1"),
    ({"image": "a.png", "question": "Hear <audio>"}, "is about audio"),
    ({"image": "a.png", "question": "Which?", "options": ["<image>", "none"]}, "'<image>' is an image")])
def test_marks_that_do_not_fit_are_refused(record, words):
    (row,) = canonical_rows({"answer": "A" if "options" in record else "no", **record})
    assert isinstance(row, DataError) and words in str(row)


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
     {"question": "problem"}, {"question": "Where?"})])
def test_two_fields_that_differ_are_asked_about_and_columns_decide(record, words, column, wanted, tmp_path):
    (row,) = canonical_rows(record)
    assert isinstance(row, DataError) and words in str(row)
    (tmp_path / "rows.jsonl").write_text(json.dumps(record))
    ((_, row),) = rows_in(tmp_path / "rows.jsonl", columns=column)
    assert not isinstance(row, DataError), row
    assert {k: row[k] for k in wanted} == wanted
    same = {"question": "Who?", "problem": "<image>Who?", "answer": "B", "correct_answer": "a dog", "image": "a.png",
            "options": ["a cat", "a dog"], "choices": ["A. a cat", "B. a dog"], "images": ["a.png"]}
    assert one(same)["answer"] == "B" and one(same)["question"] == "Who?"
