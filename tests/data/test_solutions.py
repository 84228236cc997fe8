"""data.solutions: answers to learn from, by place and id of the training rows."""

import json

import pytest

from tests.tables import each
from vlrl.config.schema import DataSettings
from vlrl.data import write_rows
from vlrl.data.sources.solutions import SolvedSamples, read_solutions
from vlrl.errors import ConfigError, DataError, RunError
from vlrl.rollout import fingerprint
from vlrl.task import Task, task_samples
from vlrl.tools.stages import rounds
from vlrl.types import Sample


class Letters(Task):
    """Rows a, b, c; the second weighs 2."""

    def samples(self, split):
        return [Sample(id=x, row={"id": x, "question": x, **({"weight": 2.0} if x == "b" else {})}) for x in "abc"]


LINES = [{"number": 1, "id": "b", "solution": "two", "weight": 0.25, "reward": 0.5},
         {"number": 1, "id": "b", "solution": "zwei"}, {"number": 0, "id": "a", "solution": "one"}]


def task(path, lines):
    write_rows(path, lines)
    found = Letters()
    found.data = DataSettings(solutions=str(path))
    return found


def test_solutions_go_with_their_rows_or_fit_none(tmp_path):
    samples = task_samples(task(tmp_path / "rows.jsonl", LINES), "train")
    assert [(s.id, s.get("solution"), s.weight) for s in samples] == [("b", "two", 0.5), ("b#2", "zwei", 2.0),
                                                                      ("a", "one", 1.0)]
    assert samples[0].get("question") == "b" and "reward" not in samples[0].row
    assert [s.id for s in task_samples(task(tmp_path / "rows.jsonl", LINES), "heldout")] == ["a", "b", "c"]
    lines = [{**LINES[0], "rejected": "much longer"}, LINES[2]]
    assert [s.get("rejected") for s in task_samples(task(tmp_path / "rows.jsonl", lines), "train")] == [
        "much longer", None]
    other = [{**LINES[0], "solution": "deux"}, *LINES[1:]]
    first, second = (fingerprint.fingerprint_of(task_samples(task(tmp_path / name, lines), "train"))
                     for name, lines in (("1.jsonl", LINES), ("2.jsonl", other)))
    with pytest.raises(RunError, match=r"1 rows changed, 'b' \(row 1\)"):
        second.check(first.state_dict(), "task 'letters'")
    assert (tmp_path / "1.jsonl") in first.files
    with pytest.raises(ConfigError, match="does not exist"):
        read_solutions(str(tmp_path / "none.jsonl"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ConfigError, match="contains no solution"):
        read_solutions(str(tmp_path / "empty.jsonl"))
    for line, found in (({**LINES[0], "id": "x"}, "row 1 is 'b'"), ({**LINES[0], "number": 9}, "there are 3 rows")):
        write_rows(tmp_path / "rows.jsonl", [line])
        samples = SolvedSamples(Letters().samples("train"), read_solutions(str(tmp_path / "rows.jsonl")), "rows.jsonl")
        with pytest.raises(DataError, match=f"matches no training row .{found}"):
            samples[0]


@each("line", [
    {"number": 0, "id": "a"}, {"number": -1, "id": "a", "solution": "x"}, {"number": True, "id": "a", "solution": "x"},
    {"number": 0, "id": 1, "solution": "x"}, {"number": 0, "id": "a", "solution": ""}, [1],
    {"number": 0, "id": "a", "solution": "x", "weight": 0}, {"number": 0, "id": "a", "solution": "x", "rejected": 3}])
def test_a_line_that_is_none(tmp_path, line):
    (tmp_path / "rows.jsonl").write_text(json.dumps(LINES[0]) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2: .* is not a line of data\.solutions\. A line needs"):
        read_solutions(str(tmp_path / "rows.jsonl"))


def test_answers_hold_any_text_and_other_bytes_are_named(tmp_path):
    """What Python takes for the end of a line of text is none in JSON."""
    path, texts = tmp_path / "rows.jsonl", ["a\u2028b", "c\x85d\x0ce", "f\r\ng"]
    write_rows(path, [{"number": 0, "id": "a", "solution": text} for text in texts])
    assert [one.text for one in read_solutions(str(path))] == texts == [row["solution"] for row in rounds._lines(path)]
    path.write_bytes(b'{"number": 0, "id": "a", "solution": "x"}\n\xff\xfe')
    with pytest.raises(DataError, match=r"line 2: .* is not a line of data\.solutions"):
        read_solutions(str(path))
