"""What a canonical row says beside its question: turns, tools, an environment, and where media stand."""

import json
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.sets import save
from tests.tables import each, refused
from vlrl.cli.main import main
from vlrl.data import sample_from_row
from vlrl.data import turns as row_turns
from vlrl.data.sources.reading import canonical_rows
from vlrl.errors import DataError
from vlrl.task import Task, builtin_names, load, task_messages
from vlrl.tools.play.preview import message_text
from vlrl.tools.tasks.score_rows import score_row
from vlrl.types import Media, Sample

BEFORE = [{"role": "user", "content": "<image>Colour?"}, {"role": "assistant", "content": "red"}]
ROW = {"id": 1, "images": ["a.png", "b.png"], "turns": BEFORE, "question": "And <image>?", "answer": "blue",
       "answer_type": "text", "system_prompt": "Be brief."}


def plain(prompt: str = "{question}") -> Task:
    task = Task()
    task.prompt = prompt
    return task


def texts(messages) -> list[tuple[str, str]]:
    return [(m["role"], "".join(c.get("text", f"[{c['type']}]") for c in m["content"])) for m in messages]


def shown(row: dict, prompt: str = "{question}") -> list[tuple[str, str]]:
    task = plain(prompt)
    return texts(task_messages(task, task.sample_from_row(row)))


def test_turns_come_between_the_system_and_the_question():
    assert shown(ROW) == [("system", "Be brief."), ("user", "[image]Colour?"), ("assistant", "red"),
                          ("user", "And [image]?")]
    assert shown({**ROW, "question": "And this?"})[-1] == ("user", "[image]And this?")  # what is left stands before it
    assert shown(ROW, "Plain.")[-1] == ("user", "[image]Plain.")
    film = {**ROW, "video": "c.mp4", "question": "<video>Then <image>?"}
    assert shown(film)[-1] == ("user", "[video]Then [image]?")
    sample = sample_from_row(film)
    assert [m.kind for m in sample.media] == ["image", "video", "image"]  # in the order of the texts
    assert [getattr(m.source, "name", "") for m in sample.media] == ["a.png", "c.mp4", "b.png"]
    task = plain()
    assert message_text(task_messages(task, task.sample_from_row(ROW))) == (
        "system: Be brief.\nuser: <image>Colour?\nassistant: red\nuser: And <image>?")
    assert message_text(task_messages(task, task.sample_from_row({"id": 1, "image": "a.png", "question": "Who?"}))) == (
        "<image>Who?")


@each("name", builtin_names())
def test_every_task_shows_the_system_the_turns_and_the_media(name):
    media = tuple(Media(source=Image.new("RGB", (8, 8))) for _ in range(2))
    task = load(name, {"system": "Think."})
    assert texts(task.messages(Sample(id="s", row=ROW, media=media, prompt="Say. {question}"))) == [
        ("system", "Think.\n\nBe brief."), ("user", "[image]Colour?"), ("assistant", "red"),
        ("user", "Say. And [image]?")]


test_a_row_that_cannot_be_meant_is_refused = refused(DataError, lambda change: sample_from_row({**ROW, **change}), [
    ({"turns": "hi"}, "turns='hi' must be a list"), ({"turns": ["hi"]}, "the turn 'hi' must be"),
    ({"turns": BEFORE[1:]}, "must be {\"role\": user, "), ({"turns": BEFORE[:1]}, "the last of `turns` must be"),
    ({"turns": [BEFORE[0], {"role": "critic", "content": "x"}]}, "the turn .*critic"),
    ({"turns": [BEFORE[0], {"role": "assistant", "content": " "}]}, "is empty"),
    ({"turns": [BEFORE[0], {"role": "assistant", "content": ["x"]}]}, "a string"),
    ({"question": "<image> <image>?"}, "have placeholders for 3 images or videos, but the row has 2"),
    ({"images": []}, "have placeholders for 2 images or videos, but the row has 0"),
    ({"turns": [{"role": "user", "content": "<image>" * 3}, BEFORE[1]]}, "placeholders for 4 .* the row has 2"),
    ({"images": ["a.png"], "video": "c.mp4", "question": "And <image>?"}, "for image, image, but the row has im"),
    ({"tools": "zoom"}, "tools='zoom' must be a list"), ({"tools": [{"function": {}}]}, "has no name"),
    ({"environment": "maze"}, "environment='maze' must be an object"),
    ({"turns": [BEFORE[0], {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "zoom"}}]},
                {"role": "tool", "content": "x"}, BEFORE[1]]}, "has no `tools`")], start="row '1': .*")


KEYS = "role content from value type text image name tool_calls function".split()
JSON = st.recursive(st.none() | st.text(max_size=9) | st.integers() | st.sampled_from(["user", "assistant", "tool"]),
                    lambda of: st.lists(of, max_size=3) | st.dictionaries(st.sampled_from(KEYS), of, max_size=4),
                    max_leaves=12)


@settings(max_examples=50)
@given(JSON)
def test_anything_as_turns_is_a_row_or_a_data_error(value):
    for record in ({"id": 1, "image": "a.png", "messages": value, "answer": "x"}, {"prompt": value, "answer": "x"},
                   {"id": 1, "question": "q", "answer": "x", "answer_type": "text", "turns": value, "tools": value},
                   {"query": "q", "response": "r", "history": value, "tools": value, "environment": value}):
        for row in canonical_rows(record):
            if not isinstance(row, DataError):
                try:
                    sample_from_row({"id": 1, **row})
                except DataError as error:
                    assert "row '" in str(error)


def test_an_environment_is_kept_and_said_once_to_be_unread(caplog):
    row_turns._warn_unread.cache_clear()
    with caplog.at_level(logging.WARNING, logger="vlrl"):
        for _ in range(3):
            sample = sample_from_row({**ROW, "environment": {"name": "maze", "size": 4}})
    assert sample["environment"] == {"name": "maze", "size": 4}
    assert [r.message for r in caplog.records if "no task reads it" in r.message] == [
        "rows have an `environment`: it is kept in the sample, but no task reads it, and each prompt is answered in a "
        "single turn"]
    verl = {"prompt": [{"role": "user", "content": "q"}], "answer": "x", "extra_info": {
        "index": 1, "interaction_kwargs": {"name": "maze"}}}
    (row,) = canonical_rows(verl)
    assert not isinstance(row, DataError) and row["environment"] == {"interaction_kwargs": {"name": "maze"}}
    (row,) = canonical_rows({"image": "a.png", "question": "q", "answer": "x", "environment": "outdoor"})
    assert not isinstance(row, DataError) and row["environment"] == "outdoor"


def test_turns_and_tools_outlive_conversion_and_are_scored(tmp_path, capsys):
    for name in "ab":
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    record = {"id": 1, "images": ["a.png", "b.png"], "messages": [
        {"role": "system", "content": "Be brief."}, *BEFORE, {"role": "user", "content": "And <image>?"},
        {"role": "assistant", "content": "blue"}], "tools": [{"name": "zoom", "parameters": {}}]}
    given = save(tmp_path / "given.jsonl", [record])
    assert main(["data", "convert", str(given), "-o", str(tmp_path / "rows.jsonl")]) == 0
    row = json.loads((tmp_path / "rows.jsonl").read_text())
    assert row == {**ROW, "width": 8, "height": 8, "tools": [{"type": "function", "function": record["tools"][0]}]}
    assert main(["data", "check", str(tmp_path / "rows.jsonl")]) == 0
    capsys.readouterr()
    scored = score_row(load("qa"), {"sample": row, "completions": ["blue", "red"]}, tmp_path)
    assert [one["parts"]["accuracy"] for one in scored["rewards"]] == [1.0, 0.0]


PIECES = st.lists(st.sampled_from(["<image>", "red ", "Is it", " two\n", "?"]), min_size=1, max_size=5).filter(
    lambda pieces: any(piece.strip() for piece in pieces if piece != "<image>"))


@pytest.mark.slow
@given(st.lists(PIECES, min_size=1, max_size=5).filter(lambda turns: len(turns) % 2 == 1), st.booleans())
def test_whatever_is_interleaved_keeps_its_order(turns, as_parts):
    """The messages hold the texts and images of all turns as they were given, but for space."""
    count = sum(pieces.count("<image>") for pieces in turns)
    paths = [f"{n}.png" for n in range(count)]
    left = iter(paths)

    def content(pieces):
        return "".join(pieces) if not as_parts else [
            {"type": "image", "image": next(left)} if p == "<image>" else {"type": "text", "text": p} for p in pieces]
    talk = [{"role": ("user", "assistant")[n % 2], "content": content(pieces)} for n, pieces in enumerate(turns)]
    media = {} if as_parts or not count else {"images": paths}
    (row,) = canonical_rows({"id": 1, "prompt": talk, "answer": "yes", **media})
    assert not isinstance(row, DataError), row
    task = plain()
    sample = task.sample_from_row(row)
    found = ["".join(c.get("text", "<image>") for c in m["content"]) for m in task_messages(task, sample)]
    assert ["".join(text.split()) for text in found] == ["".join("".join(pieces).split()) for pieces in turns]
    assert [m.source.name for m in sample.media] == paths
