"""Conversations, system prompts and marks of media of other people's records, up to the messages that a model sees."""

import json

import pytest

from tests.data.test_formats import one
from vlrl.data import FIELDS, sample_from_row
from vlrl.data.formats import canonical
from vlrl.errors import DataError
from vlrl.task import Task, load
from vlrl.tools.rowcheck import field_problems


def turns(*said: str, speakers=("human", "gpt")) -> list[dict]:
    return [{"from": speakers[n % 2], "value": words} for n, words in enumerate(said)]


def messages(row: dict, name: str = "qa", **settings) -> list[tuple[str, list[str]]]:
    """Role and content of each message, media as their kind in brackets."""
    task = load(name, settings)
    found = task.messages(task.sample_from_row(row))
    return [(m["role"], [c.get("text", f"[{c['type']}]") for c in m["content"]]) for m in found]


TOLD = {
    "several turns": (turns("<image>Colour?", "white", "What is behind?", "an advert"), "2 questions and 2 answers"),
    "a question after the answer": (turns("<image>Colour?", "white", "Why?"), "2 questions and 1 answers"),
    "questions in a row": (turns("a?", "b?", speakers=("human", "user")), "2 questions and 0 answers"),
    "an answer first": (turns("white", "Colour?", speakers=("gpt", "human")), "begins with an answer"),
    "a tool": ([{"role": "user", "content": "a?"}, {"role": "tool", "content": "x"}], "a turn of 'tool'"),
    "no speaker": ([{"value": "a?"}], "a turn of None"),
    "a part of another kind": ([{"role": "user", "content": [{"type": "file", "file": "x"}]}], "is no text, image"),
}


@pytest.mark.parametrize(("talk", "words"), TOLD.values(), ids=TOLD)
def test_a_conversation_that_no_row_holds_is_refused(talk, words):
    for field in ("conversations", "messages"):
        (row,) = canonical({"id": 1, "image": "a.png", field: talk})
        assert isinstance(row, DataError) and words in str(row)
    for record in ({"chosen": [*talk, *talk], "rejected": "x", "prompt": "q"},
                   {"prompt": talk, "answer": "a", "image": "a.png"}):
        (row,) = canonical(record)
        assert isinstance(row, DataError)


def test_what_the_system_says_reaches_the_model():
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
    with pytest.raises(DataError, match="system_prompt=3 must be a text"):
        sample_from_row({"id": 1, "system_prompt": 3})


MARKS = {
    # question, media -> the question of the row
    "before the text": ("<image>\n<image> Which?", {"images": ["a.png", "b.png"]}, "Which?"),
    "fewer before the text": ("<image>Which?", {"images": ["a.png", "b.png"]}, "Which?"),
    "inside": ("Is <image> like <image>?", {"images": ["a.png", "b.png"]}, "Is <image> like <image>?"),
    "before and inside": ("<image> and <image>: alike?", {"images": ["a.png", "b.png"]}, "<image> and <image>: alike?"),
    "after": ("Who?\n<image>", {"image": "a.png"}, "Who?\n<image>"),
    "a video": ("In <video>, who?", {"video": "a.mp4"}, "In <video>, who?"),
    "a video marked as an image": ("<image>\nWho?", {"video": "a.mp4"}, "Who?"),
    "numbered, in order": ("Is <image 1> like <image 2>?", {"image_1": "a.png", "image_2": "b.png"},
                           "Is <image> like <image>?"),
    "numbered, twice": ("Is <image 1> odd? <image 1>", {"image_1": "a.png"}, "Is image 1 odd? image 1"),
    "numbered, one of two": ("Look at <image 2>.", {"image_1": "a.png", "image_2": "b.png"}, "Look at image 2."),
}


@pytest.mark.parametrize(("question", "media", "wanted"), MARKS.values(), ids=MARKS)
def test_marks_keep_their_places(question, media, wanted):
    asks = [{**media, "question": question, "answer": "yes", "pid": 3}]
    if "image_1" not in media:
        asks += [{**media, "conversations": turns(question, "yes")},
                 {**media, "prompt": question, "chosen": "yes", "rejected": "no"}]
    for record in asks:
        row = one(record)
        assert row["question"] == wanted and not list(field_problems(row))


@pytest.mark.parametrize(("record", "words"), [
    ({"image": "a.png", "question": "Is <image> like <image>?"}, "of 2 images or videos, and the record has 1"),
    ({"question": "<image> What is it?"}, "of 1 images or videos, and the record has 0"),
    ({"images": ["a.png", "b.png"], "question": "Is <image> red?"}, "of 1 images or videos, and the record has 2"),
    ({"image": "a.png", "question": "Is <image 3> red?"}, "names the image 3, and the record has 1"),
    ({"image": "a.png", "question": "Hear <audio>"}, "is about sound"),
    ({"image": "a.png", "question": "Which?", "options": ["<image>", "none"]}, "'<image>' is an image"),
], ids=lambda v: v if isinstance(v, str) else "")
def test_marks_that_do_not_fit_are_refused(record, words):
    (row,) = canonical({"answer": "A" if "options" in record else "no", **record})
    assert isinstance(row, DataError) and words in str(row)


def test_options_that_name_images_say_so_in_words():
    row = one({"question": "Which shows <image 1>?", "options": ["<image 2>", "none"], "answer": "A",
               "image_1": "a.png", "image_2": "b.png"})
    assert row["question"] == "Which shows image 1?" and row["options"] == ["image 2", "none"]


def test_every_task_shows_media_where_the_question_marks_them():
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


def test_content_parts_may_hold_the_media():
    talk = [{"role": "user", "content": [
        {"type": "text", "text": "Is"}, {"type": "image_url", "image_url": {"url": "file:///x/a.png"}},
        {"type": "text", "text": "red?"}]}, {"role": "assistant", "content": [{"type": "text", "text": "yes"}]}]
    row = one({"messages": json.dumps(talk)})
    assert row["image"] == "x/a.png" and row["question"] == "Is\n<image>\nred?" and row["answer"] == "yes"
