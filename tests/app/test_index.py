"""app/index.py: filters, orders and pages over rollout files that come, change, break and go."""

import contextlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app import made_runs
from vlrl import store
from vlrl.app import AppError, forms, table
from vlrl.app.index import ORDERS, SORTS, GroupKey, Index, Query, RolloutKey
from vlrl.app.library import Library
from vlrl.app.table import is_malformed
from vlrl.store import RunFolder


@pytest.fixture(scope="module")
def index(runs):
    index = Index(Library(runs), budget_s=60)
    yield index
    index.close()


@pytest.fixture(scope="module")
def everything(runs):
    rows = []
    for path in sorted(p.parent for p in runs.rglob("metrics.jsonl")):
        run, folder = path.relative_to(runs).as_posix(), RunFolder(path)
        for source, found in (("train", folder.rollouts()), ("eval", folder.rollouts(split="heldout"))):
            rows += [{**row, "run": run, "source": source} for row in found.to_pylist()]
    return rows


def small(path, groups=2, steps=(0,), **more):
    run = RunFolder(path)
    for step in steps:
        run.write_rollouts(step, 0, [made_runs.made_group("boxes", i, step, **more) for i in range(groups)])
    return run


@pytest.fixture
def opened(tmp_path):
    """Opens an index over tmp_path or another folder, and gives how many rollouts a query finds; closed at the end."""
    with contextlib.ExitStack() as stack:
        def opens(root=tmp_path, budget_s=60):
            index = stack.enter_context(contextlib.closing(Index(Library(root), budget_s=budget_s)))
            return index, lambda **query: index.rollouts(Query(**query)).total

        yield opens


def test_pages_hold_every_rollout_once_as_it_was_stored(index, everything):
    pages = [index.rollouts(Query(), page, 50) for page in range(-(-len(everything) // 50))]
    keys = [row.key for page in pages for row in page.rows]
    assert {page.total for page in pages} == {len(everything)} and pages[0].pages == len(pages)
    assert len(keys) == len(set(keys)) == len(everything) and pages[0].notes == () and pages[0].pending == 0
    assert set(keys) == {RolloutKey(r["run"], r["source"], r["split"], r["step"], r["group_id"], r["index"])
                         for r in everything}
    row = index.rollouts(Query(runs=("boxes",), source="train", sort="reward")).rows[0]
    stored = next(r for r in everything if row.key == (r["run"], r["source"], r["split"], r["step"], r["group_id"],
                                                       r["index"]))
    assert (row.reward, row.advantage, row.parts, row.length, row.truncated, row.error, row.category, row.task) == (
        stored["reward"], stored["advantage"], dict(stored["parts"]), len(stored["token_ids"]), stored["truncated"],
        stored["error"], stored["category"], "grounding")
    assert stored["completion"].startswith(row.text) and row.media == stored["media"][0]["path"]
    assert row.reward == max(r["reward"] or 0 for r in everything if r["run"] == "boxes" and r["source"] == "train")


FILTERS = [
    ({"runs": ("boxes", "sweep/paths")}, lambda r: r["run"] in ("boxes", "sweep/paths")),
    ({"source": "eval"}, lambda r: r["source"] == "eval"), ({"split": "heldout"}, lambda r: r["split"] == "heldout"),
    ({"steps": (1, 2)}, lambda r: 1 <= r["step"] <= 2), ({"steps": (None, 0)}, lambda r: r["step"] == 0),
    ({"reward": (0.5, None)}, lambda r: r["reward"] is not None and r["reward"] >= 0.5),
    ({"part": "iou", "part_range": (0.2, 0.6)}, lambda r: 0.2 <= dict(r["parts"]).get("iou", -1) <= 0.6),
    ({"advantage": (None, -0.01)}, lambda r: r["advantage"] <= -0.01),
    ({"length": (60, 80)}, lambda r: 60 <= len(r["token_ids"]) <= 80), ({"truncated": True}, lambda r: r["truncated"]),
    ({"truncated": False}, lambda r: not r["truncated"]), ({"error": True}, lambda r: r["error"]),
    ({"error": False}, lambda r: r["error"] is None), ({"category": "yellow"}, lambda r: r["category"] == "yellow"),
    ({"difficulty": (0.2, 0.4)}, lambda r: 0.2 <= r["difficulty"] <= 0.4),
    ({"sample_id": "boxes-3"}, lambda r: r["sample_id"] == "boxes-3"),
    ({"text": r"CLICK\(\d+"}, lambda r: "click(" in r["completion"]),
    ({"text": "three seconds"}, lambda r: "three seconds" in r["prompt"]),
    ({"text": "no number"}, lambda r: "no number" in (r["error"] or "")),
    ({"text": "boxes", "reward": (0, 1), "truncated": False, "runs": ("boxes",)}, lambda r: False)]


def test_filters(index, everything):
    for query, keep in FILTERS:
        expected = [r for r in everything if keep(r)]
        found = index.rollouts(Query(**query), size=500)
        assert {(row.key.run, row.key.group, row.key.index) for row in found.rows} == {
            (r["run"], r["group_id"], r["index"]) for r in expected} and found.total == len(expected), query
        groups = index.groups(Query(**query), size=500).rows
        assert sum(row.hits for row in groups) == len(expected), query
        assert len(groups) == len({(r["run"], r["source"], r["step"], r["group_id"]) for r in expected}), query


def test_flagged_rollouts_alone_and_groups_of_equal_rewards(index, everything):
    keys = [row.key for row in index.rollouts(Query(), size=7).rows[::3]]
    asked = Query(flagged=(*keys, RolloutKey("boxes", "train", "x", 0, "'; --", 0)))
    assert sorted(row.key for row in index.rollouts(asked).rows) == sorted(keys)
    assert index.rollouts(replace(asked, flagged=())).total == index.groups(replace(asked, flagged=())).total == 0
    rewards = {}
    for r in everything:
        rewards.setdefault((r["run"], r["source"], r["split"], r["step"], r["group_id"]), set()).add(r["reward"])
    for alike in (True, False):
        expected = {key for key, values in rewards.items() if (len(values - {None}) < 2) is alike}
        found = index.groups(Query(alike=alike), size=500)
        assert {tuple(row.key) for row in found.rows} == expected and 0 < len(expected) < len(rewards)
        assert {row.zero_variance for row in found.rows} == {alike}
        assert {row.group for row in index.rollouts(Query(alike=alike), size=500).rows} <= {r.key for r in found.rows}
        assert index.groups(Query(alike=alike, reward=(0.9, None)), size=500).total < found.total


def test_groups_are_ordered_and_neighbours_follow_the_list(index, everything):
    def all_rows(**query):
        return index.groups(Query(runs=("boxes",), source="train", **query), size=500).rows

    best, worst, mixed = (all_rows(order=order) for order in ("best", "worst", "mixed"))
    means = [row.mean for row in best]
    assert means == sorted(means, reverse=True) == [row.mean for row in worst][::-1] and len(best) == 16
    assert [row.std for row in mixed] == sorted((row.std for row in mixed), reverse=True)
    steps = [row.key.step for row in all_rows()]
    assert steps == sorted(steps, reverse=True) == [row.key.step for row in all_rows(descending=False)][::-1]
    row = next(row for row in all_rows(reward=(None, 0.5)) if row.hits < row.n)
    rewards = [r["reward"] for r in everything if (r["run"], r["group_id"]) == (row.key.run, row.key.group)]
    scored = [r for r in rewards if r is not None]
    assert row.rewards == tuple(rewards) and row.n == 4 and row.best == max(scored) and row.worst == min(scored)
    assert row.mean == pytest.approx(np.mean(scored)) and row.std == pytest.approx(np.std(scored, ddof=1))
    assert {row.zero_variance for row in mixed if row.std == 0} == {True} and not mixed[0].zero_variance
    query = Query(runs=("boxes", "sweep/points"), order="mixed", reward=(0.2, None))
    keys = [row.key for row in index.groups(query, size=500).rows]
    for i in (0, 1, len(keys) // 2, len(keys) - 1):
        expected = (keys[i - 1] if i else None, keys[i + 1] if i + 1 < len(keys) else None)
        assert index.neighbours(query, keys[i]) == expected
    assert index.neighbours(query, GroupKey("boxes", "train", "train", 99, "none")) == (None, None)


@pytest.mark.parametrize("descending", [True, False])
def test_sorting_puts_what_is_missing_last(index, descending):
    for sort in SORTS:
        rows = index.rollouts(Query(sort=sort, part="iou", descending=descending), size=500).rows
        if sort == "step":  # of the run that was started last first
            runs = [info.id for info in index.library.runs()]
            places = [(runs.index(r.key.run), -r.key.step if descending else r.key.step) for r in rows]
            assert len({run for run, _ in places}) > 1 and places == sorted(places)
            continue
        value = {"index": lambda r: r.key.index, "part": lambda r: r.parts.get("iou")}.get(sort)
        values = [value(row) if value else getattr(row, sort) for row in rows]
        held = [v for v in values if v is not None]
        assert held == sorted(held, reverse=descending) and values[:len(held)] == held, sort


def test_facets_and_the_last_page(index):
    facets = index.facets(("boxes", "sweep/paths"))
    assert facets.splits == ("heldout", "train") and facets.parts == ("format", "iou", "plan", "safe")
    assert facets.tasks == ("driving", "grounding") and facets.steps == (0, 4) and "merge" in facets.categories
    assert facets.rollouts == index.rollouts(Query(runs=("boxes", "sweep/paths"))).total
    total = index.rollouts(Query()).total
    page = index.rollouts(Query(), page=10**6, size=50)
    assert page.page == page.pages - 1 and len(page.rows) == (total - 1) % 50 + 1
    assert index.groups(Query(category="none"), page=7).page == 0
    assert len(index.rollouts(Query(), page=-3, size=10**9).rows) == min(500, total)


UNASKABLE = [
    ({"text": "a(b"}, r"at character 2: missing \)"), ({"text": "x*+["}, "at character"),
    ({"text": r"(a)\1"}, "not a valid regular expression"), ({"steps": (0, "x")}, "steps"),
    ({"text": "(?=x)"}, "at character 1"), ({"text": "a" * 2000}, "2000 characters"), ({"order": "bset"}, "'best'"),
    ({"sort": "x; DROP"}, "unknown"), ({"sort": "part"}, "select the part"), ({"reward": ("a", 1)}, "reward"),
    ({"length": (1, 2, 3)}, "length"), ({"difficulty": None}, "difficulty"), ({"runs": ("../x",)}, "no run")]


def test_what_cannot_be_asked_and_nothing_outside_the_table_can_be_read(index):
    for query, words in UNASKABLE:
        for ask in (index.rollouts,) * ("order" not in query) + (index.groups,) * ("sort" not in query):
            with pytest.raises(AppError, match=words):
                ask(Query(**query))
    import duckdb
    for sql in ("SELECT * FROM read_text('/etc/hostname')", "COPY rollouts TO '/tmp/vlrl-out.csv'",
                "SET enable_external_access = true", "INSTALL httpfs"):
        with pytest.raises(duckdb.Error):
            index.table.fetch(sql)


hostile_text = st.one_of(st.text(max_size=30), st.sampled_from([
    "'; DROP TABLE rollouts; --", '" OR 1=1 --', "?", "$1", "{}", "\x00", "\ud800", "read_text('/etc/passwd')", "%s"]))
bound = st.one_of(st.none(), st.floats(), st.integers(-10**30, 10**30))


@settings(max_examples=15)
@given(query=st.builds(
    Query, source=st.none() | hostile_text, split=st.none() | hostile_text, category=st.none() | hostile_text,
    sample_id=st.none() | hostile_text, part=st.none() | hostile_text, text=st.none() | hostile_text,
    reward=st.tuples(bound, bound), part_range=st.tuples(bound, bound), steps=st.tuples(bound, bound),
    truncated=st.none() | st.booleans(), error=st.none() | st.booleans(), order=st.sampled_from(ORDERS) | hostile_text,
    sort=st.sampled_from(SORTS) | hostile_text, descending=st.booleans()),
    key=st.builds(GroupKey, hostile_text, hostile_text, hostile_text, st.just(0), hostile_text))
def test_no_value_of_a_query_or_of_a_key_becomes_sql(index, everything, query, key):
    for ask in (index.rollouts, index.groups):
        with contextlib.suppress(AppError):
            assert ask(query).total <= len(everything)
    assert index.rollouts(Query()).total == len(everything)  # the table is whole
    assert index.neighbours(Query(), key) == (None, None)
    assert index.rollouts(Query(flagged=(RolloutKey(*key, 0),))).total == 0


def test_new_changed_and_vanished_files_show_at_once(tmp_path, opened):
    run = small(tmp_path / "a")
    _, total = opened()
    assert total() == 8
    file = run.write_rollouts(1, 0, [made_runs.made_group("boxes", 0, 1)])
    run.write_rollouts(1, 1, [made_runs.made_group("boxes", 1, 1)])  # of another rank
    assert total() == 16 and total(steps=(1, 1)) == 8
    run.write_rollouts(1, 0, [made_runs.made_group("boxes", 0, 1, size=2)])
    assert total() == 14
    file.unlink()
    assert total() == 12
    shutil.rmtree(run.path / "rollouts")
    assert total() == 0


def test_bad_files_are_skipped_with_a_note_and_read_when_they_are_whole(tmp_path, opened):
    folder = small(tmp_path / "a", steps=(0, 1, 2, 3, 4, 5)).path / "rollouts"
    files = sorted(folder.iterdir())
    whole = files[1].read_bytes()
    files[1].write_bytes(whole[:len(whole) // 2])
    files[2].write_bytes(b"")
    rows = pq.read_table(files[3])
    pq.write_table(rows.set_column(0, "schema", pa.array([99] * len(rows))), files[3])
    pq.write_table(rows.set_column(rows.column_names.index("reward"), "reward", pa.array(["x"] * len(rows))), files[4])
    (folder / "other.parquet").write_bytes(b"not ours")
    (folder / ".step-000009-rank-00000.parquet.1-1.tmp").write_bytes(b"half")
    (folder / "step-000008-rank-00000.parquet").mkdir()
    index, total = opened()
    page = index.rollouts(Query())
    assert page.total == 16 and len(page.notes) == 4 == len(index.facets().notes)
    assert all("skipped rollouts/step-00000" in note for note in page.notes)
    assert sum("newer vlrl (schema 99" in note for note in page.notes) == 1
    files[1].write_bytes(whole)
    assert total() == 24 and len(index.groups(Query()).notes) == 3


def test_files_put_together_do_not_count_twice(tmp_path, opened):
    run = small(tmp_path / "a", steps=(0, 1, 2))
    files = sorted((run.path / "rollouts").iterdir())
    index, total = opened()
    assert total() == 24
    pq.write_table(run.rollouts().slice(0, 16), run.path / "rollouts/steps-000000-000499.parquet")
    assert total() == 24  # both lie there for a moment
    files[0].unlink()
    files[1].unlink()
    assert total() == 24 and total(steps=(0, 0)) == 8
    assert index.groups(Query()).rows[-1].key == GroupKey("a", "train", "train", 0, "train-0-1") and opened()[1]() == 24


def test_values_that_are_missing_or_no_numbers(tmp_path, opened):
    run = RunFolder(tmp_path / "a")
    group = made_runs.made_group("boxes", 0, 0, size=6)
    rewards = [0.5, None, float("nan"), float("inf"), 0.25, 0.25]
    rollouts = [replace(r, reward=w, parts={"iou": w}, advantage=float("nan"), error=None)
                for r, w in zip(group.rollouts, rewards, strict=True)]
    aside = (replace(rollouts[0], index=6, reward=9.0, variant="shuffled"),)
    path = run.write_rollouts(0, 0, [replace(group, id="ö/<x>'\"\x00", rollouts=tuple(rollouts), aside=aside)])
    index, _ = opened()
    [row] = index.groups(Query()).rows
    assert row.rewards == (0.5, None, None, None, 0.25, 0.25) and row.n == 6 and row.hits == 7
    assert row.mean == pytest.approx(1 / 3) and row.best == 0.5 and row.key.group == "ö/<x>'\"\x00"
    assert index.rollouts(Query(reward=(0, None))).total == 4
    nulls = pa.Table.from_pylist([{"completion": "x"}] * 2, pq.read_schema(path))
    (run.path / "eval-rollouts").mkdir()
    pq.write_table(nulls, run.path / "eval-rollouts/step-000007-held-rank-00000.parquet")
    bare = index.rollouts(Query(source="eval", sort="index", descending=False)).rows
    assert [row.key for row in bare] == [RolloutKey("a", "eval", "held", 7, "", i) for i in (0, 1)]
    assert bare[0].reward is None and bare[0].parts == {} and bare[0].length == 0 and bare[0].task == ""


def test_texts_that_are_no_text_keep_only_their_file_out(tmp_path, opened):
    path = small(tmp_path / "a", steps=(0, 1)).path / "rollouts/step-000001-rank-00000.parquet"
    rows = pq.read_table(path)
    ends = pa.py_buffer(np.array([0, 2], np.int32))
    raw = pa.Array.from_buffers(pa.string(), 1, [None, ends, pa.py_buffer(b"\xff\xfe")])
    bad = pa.chunked_array([pa.concat_arrays([raw] * len(rows))])
    pq.write_table(rows.set_column(rows.column_names.index("completion"), "completion", bad), path)
    index, total = opened()
    assert total() == 8 and "UTF8" in index.facets().notes[0]


def test_a_file_that_the_table_refuses_keeps_no_other_out(tmp_path, opened, monkeypatch):
    small(tmp_path / "a", groups=1, steps=(0, 1, 2))

    def picky(batch):
        if any(place.step == 1 for place, _, _ in batch):
            raise ValueError("not this one")
        return light(batch)

    light = table._light
    monkeypatch.setattr(table, "_light", picky)
    index, total = opened()
    assert total() == 8
    assert index.facets().notes == ("a: skipped rollouts/step-000001-rank-00000.parquet: not this one",)


def test_long_texts_go_into_the_table_file_by_file(tmp_path, opened, monkeypatch):
    small(tmp_path / "a", steps=range(4))
    together, light = [], table._light
    monkeypatch.setattr(table, "_light", lambda batch: together.append(len(batch)) or light(batch))
    monkeypatch.setattr(table, "_BATCH_BYTES", 1)
    assert opened()[1]() == 32 and together == [1, 1, 1, 1]


def test_a_small_file_of_endless_text_takes_little_memory(tmp_path, opened, monkeypatch):
    small(tmp_path / "a")
    rows = pa.table({"group_id": ["g"] * 3000, "completion": pa.DictionaryArray.from_arrays(
        np.zeros(3000, np.int32), ["long " * 100])})
    pq.write_table(rows, tmp_path / "a" / "rollouts" / "step-000007-rank-00000.parquet")
    monkeypatch.setattr(table, "_LONG_FILE", 900_000)
    index, total = opened()
    assert total() == 3008 and index.rollouts(Query()).notes == ()
    assert total(text="^.{300}") == 2048  # of the rows beyond less is kept
    monkeypatch.setattr(table, "_LONG_FILE", 100_000)
    index, total = opened()
    assert total() == 8 and "step-000007" in index.rollouts(Query()).notes[0]


def test_links_that_lead_out_are_not_read(tmp_path, opened):
    other = small(tmp_path / "other")
    run = small(tmp_path / "runs/a")
    (run.path / "rollouts/step-000005-rank-00000.parquet").symlink_to(
        other.path / "rollouts/step-000000-rank-00000.parquet")
    (run.path / "eval-rollouts").symlink_to(other.path / "rollouts", target_is_directory=True)
    assert opened(tmp_path / "runs")[1]() == 8


def test_what_is_not_read_in_time_is_told_and_read_later(tmp_path, opened):
    small(tmp_path / "a", groups=1, steps=range(12))
    index, _ = opened(budget_s=0.0)
    first = index.groups(Query())
    assert 0 < first.pending < 12 and first.rows[0].key.step == 11  # the newest first
    while (page := index.groups(Query())).pending:
        assert page.total < 12
    assert page.total == 12


def test_runs_not_asked_for_leave_a_table_that_is_too_large(tmp_path, opened, monkeypatch):
    for name in "abc":
        small(tmp_path / name)
    monkeypatch.setattr("vlrl.app.table._MOST_ROWS", 20)
    index, total = opened()
    assert [total(runs=(name,)) for name in "abc"] == [8, 8, 8] and sorted(index.table._runs) == ["b", "c"]
    assert total(runs=("a",)) == 8 and total() == 24


@pytest.mark.slow
def test_many_threads_ask_while_a_run_writes(tmp_path, opened):
    run = small(tmp_path / "a")
    index, total = opened()

    def ask(_):
        for i in range(4):
            page = index.rollouts(Query(text="box", order="mixed"))
            assert page.total % 4 == 0 and len({row.key for row in page.rows}) == len(page.rows)
            index.groups(Query(order=ORDERS[i % 4]))

    with ThreadPoolExecutor(4) as pool:
        asked = pool.map(ask, range(4))
        for step in range(1, 5):
            run.write_rollouts(step, 0, [made_runs.made_group("boxes", 0, step)])
        list(asked)
    assert total() == 24


MALFORMED = [
    ("", "7", False), ("", "<answer>7</answer>", False), ("", "<think>a</think>\n<answer>7</answer>\n", False),
    ("", "<answer>7", True), ("", "7</answer>", True), ("", "<answer>7</answer><answer>8</answer>", True),
    ("", "so: <answer>7</answer>", True), ("", "<answer>7</answer> done", True),
    ("Write <answer>...</answer>", "7", True), ("<think>\n", "a</think><answer>7</answer>", False),
    ("<think>\n", "<answer>7</answer>", True), ("", "a</think><answer>7</answer>", True),
    ("<think>\n\n</think>\n", "7", False)]


def test_malformed_is_what_the_card_of_an_answer_finds():
    for prompt, answer, wrong in MALFORMED:
        opened = prompt if prompt.startswith("<think>") else None
        column = [pa.array([text], pa.string()) for text in (answer, prompt, None, opened)]
        assert is_malformed(*column).to_pylist() == [wrong], (prompt, answer)
        assert bool(forms.read(answer, prompt, opened=opened or "").problems) == wrong, (prompt, answer)
        assert is_malformed(*column[:2], pa.array(["an episode"]), column[3]).to_pylist() == [False]


def test_full_reward_but_unusual(tmp_path, opened):
    run = made_runs.RunFolder(tmp_path / "r")
    run.create("task: {name: grounding}\n", 0)
    rows = [{"schema": 1, "group_id": "g", "sample_id": "s", "task": "t", "index": i, "step": 0, "split": "train",
             "completion": "<answer>7</answer>" if i != 5 else "<answer>7", "loss_mask": [True] * (10 if i else 300),
             "reward": 1.0 if i < 40 else 0.0, "parts": [], "weights": []} for i in range(45)]
    rows += [{**row, "group_id": "h", "task": "u", "reward": 0.0} for row in rows]  # nothing was earned there
    file = run.path / "rollouts/step-000000-rank-00000.parquet"
    file.parent.mkdir()
    pq.write_table(pa.Table.from_pylist(rows, store.SCHEMA), file)
    index, _ = opened()
    found = {unusual: index.rollouts(Query(unusual=unusual), size=500) for unusual in (True, False)}
    assert sorted((row.key.group, row.key.index) for row in found[True].rows) == [("g", 0), ("g", 5)]
    assert found[False].total == 88 and index.groups(Query(unusual=True)).rows[0].hits == 2
    assert index.rollouts(Query(malformed=True)).total == 2


def test_a_small_file_of_large_texts_is_read_in_small_pieces(tmp_path, monkeypatch):
    """Compressed, a few kilobytes stand for any amount of text."""
    rows = [{"schema": 1, "step": 0, "index": i, "completion": "x" * 500_000, "loss_mask": [True]} for i in range(120)]
    pq.write_table(pa.Table.from_pylist(rows, store.SCHEMA), tmp_path / "a.parquet", compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 50_000
    sizes, cut = [], table._searchable
    monkeypatch.setattr(table, "_searchable", lambda t, most=None: sizes.append(t.nbytes) or cut(t, most))
    read = table._read_light(tmp_path / "a.parquet")
    assert len(read) == 120 and max(sizes) < 40 << 20 and read.nbytes < 10 << 20
