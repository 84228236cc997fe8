"""tools/evaluation/rows.py: what an item is, and a file of answers that goes on after a kill."""

import json

import pytest

from vlrl.errors import ConfigError
from vlrl.tools.evaluation.rows import RowFile, cluster_hash, content_hash, prompt_hash, read_rows

FACTS = {"model": {"name": "a"}, "samples": 2}


def row(number, index=0, seed=0, **more):
    return {"split": "heldout", "setting": "greedy", "seed": seed, "number": number, "index": index, "answer": "x",
            **more}


def test_the_same_item_under_another_id_and_path():
    base = {"id": "a", "question": "How many?", "answer": "3", "image": "x.png", "weight": 2.0, "width": 9}
    same = {"id": "b", "question": "How many?", "answer": "3", "image": "other/y.png", "difficulty": 0.3, "kind": "it"}
    assert content_hash(base, "3", ["p"]) == content_hash(same, "3", ["p"])
    for other in (content_hash(base, "3", ["q"]), content_hash(base, "4", ["p"]), content_hash(base, "3", []),
                  content_hash({**base, "question": "How many cats?"}, "3", ["p"])):
        assert other != content_hash(base, "3", ["p"])
    assert content_hash({"n": 1}, None, []) != content_hash({"n": 2}, None, [])  # of a task's own rows: every field
    assert prompt_hash("a", ["p"]) != prompt_hash("b", ["p"]) and cluster_hash([], "c") == "c"
    assert cluster_hash(["p"], "c") == cluster_hash(["p"], "d") != cluster_hash(["q"], "c")
    assert len(content_hash({"question": "\ud800"}, float("nan"), ["p"])) == 64


def test_a_file_goes_on_after_a_kill(tmp_path):
    path = tmp_path / "new" / "answers.jsonl"
    file = RowFile(path, FACTS)
    file.add([row(0), row(0, 1), row(1)])
    with open(path, "a") as half:
        half.write('{"split": "heldout", "setting": "gre')
    again = RowFile(path, FACTS)
    assert again.answered(2) == {("heldout", "greedy", 0, 0)} and len(again.rows()) == 3
    again.add([row(1, answer="later"), row(1, 1)])
    again.add([{**row(2), "left_out": "too long"}])
    again.add([{**row(3), "unanswered": True}, row(3, 1)])
    assert again.answered(2) == {("heldout", "greedy", 0, n) for n in (0, 1, 2)}
    again.close()
    rows = read_rows(path)
    assert [(r["number"], r["index"]) for r in rows] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert rows[2]["answer"] == "later" and json.loads(path.read_text().splitlines()[0]) == {"facts": FACTS}
    path = tmp_path / "answers.jsonl"
    file = RowFile(path, {"word": "\ud800"})  # a lone surrogate, as JSON may contain and UTF-8 may not
    file.add([row(0, answer="\ud83d half", sample="\udc00")])
    file.close()
    assert RowFile(path, {"word": "\ud800"}).rows() == read_rows(path) == [
        row(0, answer="\ud83d half", sample="\udc00")]
    path.write_bytes(b'[1]\n"x"\n\xff\n' + b"[" * 100_000 + b'\n{"split": {}, "setting": [], "seed": 0, "number": 0}\n'
                     + json.dumps(row(0)).encode())
    assert read_rows(path) == [row(0)]


def test_what_replaces_an_answer_and_which_file_is_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    file = RowFile(path, FACTS)
    file.add([row(0), {**row(0), "unanswered": True}, {**row(1), "unanswered": True}])
    with open(path, "a") as later:  # another process, or an older file that was appended
        later.write(json.dumps({**row(0), "unanswered": True, "answer": "late"}) + "\n")
    again = RowFile(path, FACTS)
    assert again.answered(1) == {("heldout", "greedy", 0, 0)} and again.rows()[0] == row(0)
    again.add([row(1, answer="now")])
    assert again.rows()[1] == row(1, answer="now") and len(again.rows()) == 2
    with pytest.raises(ConfigError, match=r"samples was 2, is 3\nRestore these settings"):
        RowFile(path, {**FACTS, "samples": 3})
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": 1}\n')
    with pytest.raises(ConfigError, match="is not a file of an evaluation"):
        RowFile(other, FACTS)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_rows(tmp_path / "none")
