"""The task `rows`: its prompts from templates, columns and chat messages, and where pictures are shown."""

import pytest
from PIL import Image

from vlrl.errors import DataError
from vlrl.task import load_class
from vlrl.types import Media, Sample

Rows = load_class("rows")
TWO = tuple(Media(source=Image.new("RGB", (8, 8))) for _ in range(2))


def shown(task, row, media=TWO):
    """The messages as `role: text`, with [image] for each placeholder."""
    return [f"{turn['role']}: " + "".join(part.get("text", f"[{part['type']}]") for part in turn["content"])
            for turn in task.messages(Sample(id="1", row=row, media=media))]


@pytest.mark.parametrize(("task", "row", "expected"), [
    (Rows(), {"problem": "A <image>, a <image>?"}, ["user: A [image], a [image]?"]),
    (Rows(), {"question": "A <image>, a <image>?"}, ["user: A [image], a [image]?"]),
    (Rows(), {"problem": "Both?", "answer": "x"}, ["user: [image][image]Both?"]),
    (Rows(prompt="{problem} Briefly."), {"problem": "A <image>, a <image>?"}, ["user: A [image], a [image]? Briefly."]),
    (Rows(prompt="{problem}"), {"problem": "Is it {answer}?", "answer": "x"}, ["user: [image][image]Is it {answer}?"]),
    (Rows(system="S."), {"prompt": "Both?"}, ["system: S.", "user: [image][image]Both?"]),
    (Rows(), {"prompt": [{"role": "user", "content": "<image><image>Both?"}]}, ["user: [image][image]Both?"]),
    (Rows(), {"prompt": [{"role": "system", "content": "S."}, {"role": "user", "content": "Both?"}]},
     ["system: S.", "user: [image][image]Both?"]),
    (Rows(system="T."), {"prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "and"},
                                                                {"type": "image"}]}]},
     ["system: T.", "user: [image]and[image]"])])
def test_where_text_and_pictures_come_from(task, row, expected):
    assert shown(task, row) == expected


@pytest.mark.parametrize(("row", "said"), [
    ({"answer": "x"}, r"there is no prompt: set task\.prompt .*Columns: id, answer"),
    ({"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "must be the user's"),
    ({"prompt": ["a"]}, "a text or a list of chat messages"), ({"prompt": [{"role": "tool", "content": "a"}]}, "role")])
def test_rows_without_a_prompt_are_named(row, said):
    with pytest.raises(DataError, match=said):
        Rows().sample_from_row({"id": "1", **row})
