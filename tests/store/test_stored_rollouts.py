"""Stored rollouts: what is taken of a file and what is refused, the index, draws, and what a resumed run reads."""

import json
import random
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vlrl.errors import RunError
from vlrl.methods.replay.buffer import RolloutBuffer, SourceFolder
from vlrl.methods.replay.rows import RowLimits, UnreadableFile, problem, read_stored
from vlrl.store import SCHEMA

LIMITS = RowLimits(vocabulary=30, banned=frozenset({7}), most_tokens=6, most_gap=0.2,
                decode=lambda ids: "".join(chr(97 + i) for i in ids))


def row(group="g", index=0, ids=(1, 2), **more):
    n = len(ids)
    return {"schema": 1, "group_id": group, "sample_id": "s", "task": "t", "index": index, "step": 0, "policy_step": 0,
            "split": "train", "prompt": "p", "completion": LIMITS.decode(ids), "token_ids": list(ids),
            "loss_mask": [True] * n, "logprobs": [-0.5] * n, "trainer_logprobs": [-0.5] * n, "parts": [("a", 1.0)],
            "weights": [("a", 1.0)], "reward": float(index % 2), "correct": bool(index % 2), "finish_reason": "stop",
            "media": [{"hash": "h", "kind": "image"}], **more}


def group_of(name, size=2, **more):
    return [row(name, i, (1 + i % 5, 2, 3), **more) for i in range(size)]


def write(folder, step, rows, name=None):
    path = folder / "rollouts" / (name or f"step-{step:06d}-rank-00000.parquet")
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist([{**r, "step": step} for r in rows], SCHEMA), path)
    return path


def equal(weights):
    return lambda groups, ages: np.ones(len(groups)) * weights


def names(buffer, step, count=100, seed=0, **more):
    return [g.rows[0]["group_id"] for g in buffer.draw(count, step, np.random.default_rng(seed), equal(1), **more)]


BAD = {
    "lists of different lengths": [{"logprobs": [-0.5]}, {"loss_mask": [True, True, True]}, {"token_ids": [1, 2, 3]},
                       {"logprobs": []}],
    "a value is missing": [{"token_ids": None}, {"logprobs": None}, {"loss_mask": None}, {"prompt": None},
                           {"token_ids": [1, None]}, {"loss_mask": [None, True]}, {"loss_mask": [False, False]},
                           {"index": None}, {"policy_step": None}],
    "token ids that are never sampled": [{"token_ids": [1, 7]}, {"token_ids": [1, 30]}, {"token_ids": [-1, 2]}],
    "token ids that do not decode to the text": [{"token_ids": [1, 3]}, {"completion": "b"}],
    "no valid log-probabilities": [{"logprobs": [float("nan"), -1.0], "trainer_logprobs": None},
                             {"logprobs": [float("-inf"), -0.5]}, {"logprobs": [0.1, -0.5]}, {"logprobs": [None, -0.5],
                                                                                            "trainer_logprobs": None}],
    "log-probabilities from other weights": [{"logprobs": [-0.9, -0.9]}, {"logprobs": [-0.1, -0.1]},
                                           {"trainer_logprobs": [float("nan"), -0.5]}],
    "too long, empty or unfinished": [{"token_ids": [], "loss_mask": [], "logprobs": []},
                                     {"finish_reason": "turns"}, {"finish_reason": None},
                                     {"token_ids": [1] * 7, "loss_mask": [True] * 7, "logprobs": [-0.5] * 7}],
    "not scored": [{"reward": None}, {"reward": float("nan")}, {"reward": float("inf")}, {"error": "it failed"}],
    "not a single-turn answer to a training row": [{"split": "heldout"}, {"variant": "guided"}, {"episode_id": "e"},
                                          {"split": None}]}


def test_a_row_that_does_not_fit_together_is_counted(tmp_path):
    for why, change in ((why, change) for why, changes in BAD.items() for change in changes):
        rows = [*group_of("g", 3), {**row("g", 3), **change}]
        table, refused = read_stored(write(tmp_path, 0, rows), LIMITS, 100)
        assert refused == {why: 1} and len(table) == 3, (why, change)
        assert table["group_id"].to_pylist() == ["g"] * 3 and table["hashes"].to_pylist() == [["h"]] * 3


def test_groups_and_log_probabilities_that_the_engine_did_not_know(tmp_path):
    rows = [row("b", 1), row("a", 0), row("b", 0), row("alone", 0), row("a", 1), row("b", 1), row("two", 0),
            row("two", 1, prompt="another"), row("twice", 0), row("twice", 0)]
    table, refused = read_stored(write(tmp_path, 0, rows), LIMITS, 100)
    assert [*zip(table["group_id"].to_pylist(), table["index"].to_pylist(), strict=True)] == [
        ("b", 0), ("b", 1), ("a", 0), ("a", 1)]
    assert refused == {"only row of its group": 2, "repeated row": 2, "group with several prompts": 2}
    rows = [row("g", 0, logprobs=[float("nan"), -0.5]), row("g", 1)]
    table, refused = read_stored(write(tmp_path, 0, rows), LIMITS, 100)
    assert table["logprobs"].to_pylist()[0] == [-0.5, -0.5] and not refused


def test_files_that_cannot_be_taken(tmp_path):
    whole = write(tmp_path, 0, group_of("g", 4)).read_bytes()
    for name, content in (("half", whole[:len(whole) // 2]), ("text", b"no parquet"), ("empty", b""),
                          ("torn", whole[:40] + bytes(len(whole) - 80) + whole[-40:])):
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(UnreadableFile):
            read_stored(path, LIMITS, 100)
    with pytest.raises(UnreadableFile, match="more than a buffer of 3 rollouts"):
        read_stored(tmp_path / "rollouts" / "step-000000-rank-00000.parquet", LIMITS, 3)
    for table in (pa.table({"token_ids": ["a"], "schema": [1]}), pa.table({"schema": [9]})):
        pq.write_table(table, tmp_path / "other")
        with pytest.raises(UnreadableFile):
            read_stored(tmp_path / "other", LIMITS, 100)
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "other")
    assert read_stored(tmp_path / "other", LIMITS, 100)[0].num_rows == 0


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(["token_ids", "loss_mask", "logprobs", "trainer_logprobs"]),
                       st.lists(st.one_of(st.none(), st.floats(width=32), st.integers(-3, 40)), max_size=4)),
       st.dictionaries(st.sampled_from(["reward", "split", "finish_reason", "completion", "error"]),
                       st.one_of(st.none(), st.just("stop"), st.just("bc"))))
def test_no_row_is_an_error(lists, texts):
    kinds = {"token_ids": np.int32, "loss_mask": np.bool_}
    arrays = {}
    for name, values in lists.items():
        kind = kinds.get(name, np.float32)
        whole = [v for v in values if v is not None and not (kind == np.int32 and not isinstance(v, int))]
        arrays[name] = np.array(values, object) if len(whole) < len(values) else np.array(whole, kind)
    base = {name: np.array(v) for name, v in (("token_ids", [1, 2]), ("loss_mask", [True, True]),
                                               ("logprobs", [-0.5, -0.5]), ("trainer_logprobs", [-0.5, -0.5]))}
    told = {k: v for k, v in texts.items() if k != "reward" or v is None}
    why = problem({**row(), "variant": None, "episode_id": None, "error": None, **base, **arrays, **told}, LIMITS)
    assert isinstance(why, str)
    if not why:
        found = {**base, **arrays}
        assert len(found["token_ids"]) == len(found["loss_mask"]) == len(found["logprobs"]) > 0


def test_what_is_new_is_taken_once_and_drawn_with_its_age(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    sources = [SourceFolder(other), SourceFolder(own, own=True)]
    buffer = RolloutBuffer(own, sources, LIMITS, 100)
    buffer.take(0)
    assert names(buffer, 0) == [] and buffer.rollouts == 0
    write(own, 0, group_of("0"))
    write(other, 7, group_of("x", 3, policy_step=7))
    buffer.take(1)
    write(own, 1, group_of("1", policy_step=1))
    buffer.take(2)
    buffer.take(3)
    assert buffer.rollouts == 7 and not buffer.refused
    drawn = {g.rows[0]["group_id"]: g for g in buffer.draw(9, 5, np.random.default_rng(0), equal(1))}
    assert {n: (g.age, g.own, len(g.rows)) for n, g in drawn.items()} == {
        "0": (5, True, 2), "1": (4, True, 2), "x": (4, False, 3)}
    assert sorted(names(buffer, 5, max_age=4)) == ["1", "x"] and names(buffer, 5, max_age=3) == []
    second = drawn["x"].rows[1]
    assert second["token_ids"].tolist() == [2, 2, 3] and second["logprobs"].tolist() == [-0.5] * 3
    assert second["loss_mask"].dtype == bool and second["parts"] == [("a", 1.0)] and second["hashes"] == ["h"]
    assert len({g.name for g in drawn.values()}) == 3


def test_groups_without_a_preference_are_not_drawn_and_other_runs_rewards_are_not_believed(tmp_path):
    own, other = tmp_path / "own", tmp_path / "other"
    write(own, 0, [*group_of("good"), *group_of("flat", reward=1.0), *group_of("best", 4, correct=True)])
    write(other, 0, [*group_of("x", reward=9.0), *group_of("y", reward=None), *group_of("z", 2)])
    buffer = RolloutBuffer(own, [SourceFolder(other), SourceFolder(own, own=True)], LIMITS, 100)
    buffer.take(0)
    assert sorted(names(buffer, 0)) == ["best", "good", "x", "z"]
    seen = {}

    def weigh(groups, ages):
        seen.update(zip(groups["own"].tolist(), groups["best"].tolist(), strict=True))
        return np.where(groups["own"], groups["size"], np.nan)  # 2 and 4; the others count as 3

    counts = Counter(name for seed in range(400) for name in
                     [g.rows[0]["group_id"] for g in buffer.draw(1, 0, np.random.default_rng(seed), weigh)])
    assert np.isnan(seen[False]) and seen[True] == 0.5
    expected = {"good": 2, "best": 4, "x": 3, "z": 3}
    assert all(abs(counts[n] / 400 - w / 12) < 0.08 for n, w in expected.items())


def test_a_draw_does_not_depend_on_how_many_processes_wrote_a_step(tmp_path):
    def rows(numbers):
        return [row for i in numbers for row in group_of(str(i))]

    one, two = tmp_path / "one", tmp_path / "two"
    write(one, 0, rows(range(6)))
    write(two, 0, rows((0, 2, 4)))
    write(two, 0, rows((1, 3, 5)), "step-000000-rank-00001.parquet")
    found = []
    for folder in (one, two):
        buffer = RolloutBuffer(folder, [SourceFolder(folder, own=True)], LIMITS, 100)
        buffer.take(1)
        found.append([names(buffer, 1, 3, seed=seed) for seed in range(5)])
    assert found[0] == found[1]


def test_the_newest_are_kept(tmp_path):
    buffer = RolloutBuffer(tmp_path, [SourceFolder(tmp_path, own=True)], LIMITS, 5)
    for step in range(6):
        buffer.take(step)
        write(tmp_path, step, group_of(str(step), policy_step=step))
    assert sorted(names(buffer, 6)) == ["3", "4"] and buffer.rollouts == 4
    fresh = RolloutBuffer(tmp_path / "new", [SourceFolder(tmp_path)], LIMITS, 5)
    fresh.take(0)
    assert sorted(names(fresh, 0)) == ["4", "5"] and fresh.refused["older than the rows that fit"] == 3


def test_a_group_that_comes_again_under_another_name_of_file_is_taken_once(tmp_path):
    other = tmp_path / "other"
    buffer = RolloutBuffer(tmp_path / "own", [SourceFolder(other)], LIMITS, 100)
    write(other, 3, group_of("g"))
    buffer.take(0)
    write(other, 3, [*group_of("g"), *group_of("h")], "steps-000000-000009.parquet")
    buffer.take(1)
    assert sorted(names(buffer, 1)) == ["g", "h"] and buffer.refused == {"already taken": 2}


def test_a_half_written_file_is_looked_at_again(tmp_path, caplog):
    other = tmp_path / "other"
    path = write(other, 0, group_of("g"))
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    buffer = RolloutBuffer(tmp_path / "own", [SourceFolder(other)], LIMITS, 100)
    for step in range(3):
        buffer.take(step)
    assert buffer.refused == {"file": 1} and names(buffer, 2) == [] and len(caplog.records) == 1
    path.write_bytes(whole)
    buffer.take(3)
    assert names(buffer, 3) == ["g"]


def test_a_folder_of_another_tokenizer_gives_nothing(tmp_path):
    other = tmp_path / "other"
    write(other, 0, group_of("g"))
    (other / "tokenizer.json").write_text("{}")
    for text, found in (("{}", ["g"]), ("{ }", [])):
        buffer = RolloutBuffer(tmp_path / f"own{len(found)}", [SourceFolder(other)], LIMITS, 100, tokenizer=text)
        buffer.take(0)
        buffer.take(1)
        assert names(buffer, 1) == found and buffer.refused.total() == 1 - len(found)


def test_a_resumed_run_reads_what_it_read_before(tmp_path):
    """Another run's folder grows between the steps, and again before the resume; then it vanishes."""
    own, other, rng = tmp_path / "own", tmp_path / "other", random.Random(1)
    sources = [SourceFolder(other), SourceFolder(own, own=True)]

    def one_step(buffer, step):
        buffer.take(step)
        return names(buffer, step, 3, seed=step)

    buffer, whole = RolloutBuffer(own, sources, LIMITS, 40), []
    for step in range(12):
        if rng.random() < 0.7:
            write(other, step, group_of(f"x{step}", 3))
        whole.append(one_step(buffer, step))
        write(own, step, group_of(f"o{step}", policy_step=step))
    assert any("x" in name for found in whole for name in found)
    write(other, 99, group_of("late", 3))
    for step in range(8, 12):  # as truncate(8) does
        (own / "rollouts" / f"step-{step:06d}-rank-00000.parquet").unlink()
    again = RolloutBuffer(own, sources, LIMITS, 40)
    for step in range(8, 12):
        assert one_step(again, step) == whole[step]
        write(own, step, group_of(f"o{step}", policy_step=step))
    again.take(12)
    assert "late" in names(again, 12)
    for path in (other / "rollouts").iterdir():
        path.unlink()
    later = RolloutBuffer(own, sources, LIMITS, 40)
    assert [one_step(later, 12)] == [names(again, 12, 3, seed=12)]


def test_a_step_that_was_not_finished_is_looked_at_anew_and_a_copy_that_is_gone_ends_the_run(tmp_path):
    def begun():
        buffer = RolloutBuffer(tmp_path, [SourceFolder(tmp_path / "other")], LIMITS, 100)
        buffer.take(0)
        return buffer

    write(tmp_path / "other", 0, group_of("g"))
    begun()
    taken = tmp_path / "stored" / "taken.jsonl"
    line = taken.read_text()
    taken.write_text(line[:len(line) // 2])
    buffer = begun()
    assert names(buffer, 0) == ["g"] and [json.loads(x)["step"] for x in taken.read_text().splitlines()[-1:]] == [0]
    (copy,) = (tmp_path / "stored").glob("*.arrow")
    copy.write_bytes(copy.read_bytes()[:200])
    with pytest.raises(RunError, match=r"\.arrow is missing or damaged .* restore the file, or start over with resume"):
        names(buffer, 0)
    copy.unlink()
    with pytest.raises(RunError, match="is missing or damaged"):
        begun()
