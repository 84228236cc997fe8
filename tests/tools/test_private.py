"""What is taken out of texts that leave this machine."""

import json
import socket
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.tools.hub.redaction import PrivateWords

WORDS = PrivateWords({"/home/ann": "the home folder", "hf_secretvalue": "the value of HF_TOKEN",
                      "node17": "the name of the host", "ann@": "the name of the user"})


def test_messages_and_words_of_a_command():
    for text, clean in (
            ("cannot read /home/ann/pictures/3.png: gone", "cannot read 3.png: gone"),
            ("data.root=/mnt/a/b", "data.root=b"), ("~/x/rows.jsonl", "rows.jsonl"),
            (r"C:\Users\ann\rows.jsonl", "rows.jsonl"),
            ("see https://example.com/a/b.html", "see https://example.com/a/b.html"), ("1/2 and/or 3", "1/2 and/or 3"),
            ("<think>a</think>", "<think>a</think>"), ("key=hf_secretvalueX", "key=…X"), ("on node17.", "on …."),
            ("node171 and xnode17", "node171 and xnode17"), ("ann@host", "…host"),
            ("configs/quickstart.yaml", "configs/quickstart.yaml")):
        assert WORDS.text(text) == clean, (text, clean)
    for word, clean in (
            ("data.train=/mnt/a/rows.jsonl", "data.train=rows.jsonl"), ("--config=../../x/y.yaml", "--config=x/y.yaml"),
            ("services.judge.url=http://10.0.0.7:8001/v1", "services.judge.url=http://…"),
            ("train.lr=1e-4", "train.lr=1e-4")):
        assert WORDS.setting(word) == clean, (word, clean)
    assert WORDS.model_text("look at /usr/share/x and /home/ann/y") == "look at /usr/share/x and …/y"


def test_values_and_words_of_this_machine(tmp_path, monkeypatch):
    row = {"image": "/data/cats/1.png", "boxes": [[1, 2.5]], "deep": {"/home/ann/a": ["file:///a/b c.png"]},
           "none": None, "answer": "/no_think", "raw": "data:image/png;base64," + "iVBORw0KGgo" + "A" * 53}
    found = json.loads(WORDS.json(json.dumps(row)))
    assert found.pop("raw").startswith("sha256:")
    assert found == {"image": "1.png", "boxes": [[1, 2.5]], "deep": {"…/a": ["b c.png"]}, "none": None,
                     "answer": "/no_think"}
    assert WORDS.json(None) is None and WORDS.json("no json in /a/b") == "no json in b"
    kept = {"template": "{% if a/b %}x /x/y z", "layers": 3, "name": "org/model"}
    assert WORDS.config({**kept, "_name_or_path": "/data/models/x"}) == {**kept, "_name_or_path": "x"}
    assert WORDS.findings("in /home/ann with hf_secretvalue, /home/ann") == ["the home folder", "the value of HF_TOKEN"]
    assert WORDS.findings("node17 ann@", vocabulary=True) == [] and WORDS.findings("/home/anna, node18") == []
    monkeypatch.setenv("OTHER_API_KEY", "abcdefghij")
    monkeypatch.setenv("SOME_TOKEN", "on")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    words = PrivateWords.here(tmp_path).words
    assert words["abcdefghij"] == "the value of OTHER_API_KEY" and "on" not in words
    assert {str(tmp_path), str(Path.home()), "node17"} <= words.keys()


@settings(max_examples=50)
@given(st.text(), st.text())
def test_nothing_of_the_machine_is_left(before, after):
    for word in WORDS.words:
        text = f"{before} {word} {after}"
        assert not WORDS.findings(WORDS.model_text(text)) and not WORDS.findings(WORDS.text(text))
