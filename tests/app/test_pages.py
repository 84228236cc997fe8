"""History, Compare, Curriculum and Notes without a browser: what they say of runs whose numbers are known."""

import json
import re
from dataclasses import replace
from html import unescape
from urllib.parse import parse_qs

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.app import made_runs
from tests.app.views import words
from tests.tables import each
from vlrl import store
from vlrl.app import AppError, controls, filters, plots
from vlrl.app.analysis import Curriculum
from vlrl.app.evidence import Reader
from vlrl.app.index import Facets, Index, Query, RolloutKey
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.app.notes import Note, Notes
from vlrl.app.pages import compare, curriculum, history, notes, rollouts, runs
from vlrl.app.rows import Span, compare_spans, every_rollout, part_gains
from vlrl.app.site import Site
from vlrl.store import RunFolder

# (step, sample, category, rewards); run a draws s1 and s2 at step 0, s1 and s3 at step 1; run b s1, s2 at step 0
A = [(0, "s1", "cat", [0.0, 1.0]), (0, "s2", "dog", [0.5, 0.5]), (1, "s1", "cat", [1.0, 1.0]),
     (1, "s3", "dog", [0.25, None])]
B = [(0, "s1", "cat", [0.25, 0.25]), (0, "s2", "dog", [1.0, 0.0])]


def write(path, groups, evals=()):
    """A run of these training groups, and evaluations (step, {sample: reward})."""
    run = RunFolder(path)
    run.create("task: {name: grounding}\nmodel: {name: embedded/tiny-qwen3-vl}\n", 0)
    for step in sorted({step for step, *_ in groups}):
        rows = [_row(step, f"{step}-{sample}", sample, category, i, reward, "train")
                for at, sample, category, rewards in groups if at == step for i, reward in enumerate(rewards)]
        _table(path / f"rollouts/step-{step:06d}-rank-00000.parquet", rows)
        run.append_metrics({"step": step, "reward/mean": 0.5, "curriculum/epoch": step / 2, "groups/wasted": step})
    for step, rewards in evals:
        rows = [_row(step, f"heldout-{name}", name, "cat", 0, value, "heldout") for name, value in rewards.items()]
        _table(path / f"eval-rollouts/step-{step:06d}-heldout-rank-00000.parquet", rows)
        run.append_eval({"step": step, "split": "heldout", "reward/mean": 0.5})


def _row(step, group, sample, category, index, reward, split):
    text = f"the {'second' if step else 'first'} answer"
    return {"schema": 1, "group_id": group, "sample_id": sample, "task": "grounding", "index": index, "step": step,
            "split": split, "prompt": "Where?", "completion": text, "token_ids": [1, 2], "reward": reward,
            "parts": [("iou", reward), ("format", 1.0 if index else None)], "weights": [], "advantage": 0.0,
            "sample": json.dumps({"id": sample}), "target": json.dumps(sample), "category": category,
            "truncated": False}


def _table(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows, store.SCHEMA), path)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    root = tmp_path_factory.mktemp("pages")
    write(root / "a", A, [(0, {"h1": 0.0, "h2": 1.0}), (2, {"h1": 1.0, "h2": 1.0})])
    write(root / "b", B, [(0, {"h1": 0.5, "h9": 0.5})])
    library = Library(root)
    index = Index(library)
    yield Site(library, index, MediaStore(library), Notes(root))
    index.close()


def test_history_draws_and_compares_answers(site):
    above, plots, below = history.show(site, {"sample": "s1"})
    figures = {figure["id"]: figure for figure in json.loads(plots)}
    traces = {(t["name"], t["mode"]): (t["x"], t["y"]) for t in figures["history-reward"]["data"]}
    assert traces["a", "markers"] == ([0, 0, 1, 1], [0.0, 1.0, 1.0, 1.0])
    assert traces["a, mean", "lines+markers"] == ([0, 1], [0.5, 1.0])
    assert traces["b, mean", "lines+markers"] == ([0], [0.25])
    weight = figures["history-weight"]["data"][0]
    assert (weight["name"], weight["y"]) == ("a", [1.0, pytest.approx(2 / (4 / 3))])  # 4 groups of 3 samples by then
    assert "a : 2 visits in training, mean reward 0.5 → 1" in words(above)
    assert "<del>first</del>" in below and "<ins>second</ins>" in below  # the best of a's first visit and its last
    keys = [RolloutKey("a", "train", "train", 0, "0-s1", i) for i in (0, 1)]
    where = {"sample": "s1", "a": controls.packed(keys[0]), "b": controls.packed(keys[1])}
    assert "The same text." in words(history.show(site, where)[2])
    where["b"] = controls.packed(keys[0]._replace(group="none"))
    assert "none" in words(history.show(site, where)[0]) and controls.unpacked(controls.packed(keys[0])) == keys[0]
    assert [controls.unpacked(text) for text in (None, "", "[1]", "{}", '["a","b","c","1","d",2]')] == [None] * 5


def chosen(html):
    return [re.search(r'<option value="([^"]*)" selected', part)[1] for part in html.split("<select")[1:3]]


def test_history_offers_two_answers_and_begins_with_prompts_that_differ_most(site, monkeypatch):
    for where in ({"sample": "s1", "run": "b"}, {"sample": "s2", "run": "a"}, {"sample": "s3"}, {"sample": "s1"},
                  {"sample": "h1"}):
        below = history.show(site, where)[2]
        assert len(set(chosen(below))) == 2 and "Both are the same answer" not in below, where
        for name, key in zip("ab", chosen(below), strict=True):  # either of them alone in the address
            alone = history.show(site, {**where, "ab".replace(name, ""): unescape(key)})[2]
            assert len(set(chosen(alone))) == 2, (where, name)
    below = history.show(site, {"sample": "h9"})[2]
    assert "Second answer" not in below and "one answer" in words(below)
    assert words(history.show(site, {})[0]).index("s2") < words(history.show(site, {})[0]).index("s3")
    assert "No answer to the sample 'zz'" in words(history.show(site, {"sample": "zz"})[0])
    assert "no run" in words(history.show(site, {"sample": "s1", "run": "zz"})[0]).lower()
    monkeypatch.setattr(history, "answers_of", lambda *_: [])  # after the visits were counted
    assert "Two answers" not in words(history.show(site, {"sample": "s1"})[2])


def ticks(site, where):
    """run -> the runs in view after a click on its swatch."""
    listed = runs.shown(site, Reader(site.library), where)[1]
    found = re.findall(r'v-choose" href="\?([^"]*)"[^>]*aria-label="curves of (\w+)"', listed)
    return {run: parse_qs(unescape(to))["runs"] for to, run in found}


def test_ticked_runs_and_wrong_filters(site):
    usual = site.library.runs()[0].id  # the newest is in view where none was chosen
    (other,) = {"a", "b"} - {usual}
    assert ticks(site, {}) == {other: [other], usual: ["-"]}
    for where in ({"runs": usual}, {"run": usual}):
        assert ticks(site, where) == {other: [f"{usual},{other}"], usual: ["-"]}
    for where in ({"run": "gone"}, {"runs": "gone,a"}, {"runs": "gone"}):
        assert "there is no run 'gone'" in words(runs.shown(site, Reader(site.library), where)[3])
    assert "there is no run" not in words(runs.shown(site, Reader(site.library), {"runs": "-"})[3])
    key = site.index.groups(Query(runs=("a",))).rows[0].key
    for wrong in ({"rmin": "abc"}, {"text": "("}, {"text": "x" * 2000}):
        where = {k: str(v) for k, v in controls.target(key).items()} | wrong
        assert 'role="alert"' in rollouts.form_and_list(site, where)[1] and "v-card" in rollouts.group(site, where)


def test_what_is_usual_has_a_name_and_a_page_reads_files_for_one_budget(site, monkeypatch):
    made = str(filters.form(Facets()))
    found = {name: (usual, re.findall(r'value="([^"]*)"', inner)) for name, usual, inner in re.findall(
        r'<select name="(\w+)"[^>]* data-default="(\w+)">(.*?)</select>', made)}
    assert found["kind"] == ("train", ["train", "eval", "all"]) and found["dir"] == ("down", ["down", "up"])
    assert {name: values[0] for name, (_, values) in found.items()} == {name: usual for name, (usual, _) in
                                                                       found.items()} and len(found) == 5
    given, refresh = [], site.index.refresh
    monkeypatch.setattr(site.index, "refresh", lambda runs, budget=None: given.append(budget) or refresh(runs, budget))
    rollouts.form_and_list(site, {"run": "a"})
    assert given.count(None) == 1


def test_boxes_of_a_run_that_stored_no_marks_are_drawn_by_its_task(tmp_path):
    run = RunFolder(tmp_path / "older")
    made = made_runs.made_group("boxes", 1, 0)
    row = {**made.sample.row, "boxes": [{"box": made.sample["target"]["box"], "label": "shape"}]}
    file = run.write_rollouts(0, 0, [replace(made, sample=replace(made.sample, row=row))])
    pq.write_table(pq.read_table(file).drop_columns(["marks"]), file)
    (run.path / "config.yaml").write_text("task: {name: grounding}\n")
    library = Library(tmp_path)
    shown = rollouts.group(Site(library, Index(library), MediaStore(library), Notes(tmp_path)),
                           {"page": "rollouts", "run": "older", "step": "0", "group": made.id})
    assert shown.count("IoU 0.") > len(made.rollouts) / 2


def test_compare_over_common_samples(site):
    found = compare_spans(site.index, Span("b", "train"), Span("a", "train"))
    assert [(p.sample_id, p.a, p.b) for p in found.pairs] == [("s1", 0.25, 0.75), ("s2", 0.5, 0.5)]
    assert (found.n, found.wins, found.losses, found.ties, found.only_a, found.only_b) == (2, 1, 0, 1, 0, 1)
    assert found.gain.mean == 0.25 and found.categories == (("cat", 1, 1, 0, 0, 0.5), ("dog", 1, 0, 0, 1, 0.0))
    assert found.pairs[0].key_b == ("a", "train", "train", 1, "1-s1")
    with pytest.raises(AppError, match=r"^steps 1 to 1 of a \(2 samples\) and steps 5 to the last of b \(0 "):
        compare_spans(site.index, Span("a", "train", 1, 1), Span("b", "train", 5))
    found = {gain.part: gain for gain in part_gains(site.index, Span("b", "train"), Span("a", "train"))}
    assert (found["iou"].n, found["iou"].mean_a, found["iou"].mean_b) == (2, 0.375, 0.625)
    assert found["iou"].gain.mean == 0.25 and found["format"].gain == (0.0, 0.0, 0.0)
    above, plots, below = compare.show(site, {"a": "a"})
    assert "A: a, heldout after step 0 . B: a, heldout after step 2" in words(above)
    assert "B wins 1 B loses 0 ties 1" in words(above) and json.loads(plots)[0]["data"][0]["x"] == [0.0, 1.0]
    assert "Biggest gains sample category A B gain h1 cat 0 1 +1.000" in words(below)
    above = words(compare.show(site, {"a": "a", "b": "b"})[0])
    assert "B: b, heldout after step 0" in above and "1 of A left out: without a counterpart on the other side" in above


@each("where said", [
    ({"a": "a", "a_step": "7"}, "no evaluation of 'heldout' at step 7"),
    ({"a": "b"}, "Both sides are the same evaluation, of b"),
    ({"source": "train", "a": "a", "a_step": "1", "b": "b", "b_step": "5"}, "Widen both spans"),
    ({"a": "zz"}, "zz"), ({"a_step": "x"}, "must be a whole number")])
def test_compare_keeps_its_form_and_says_what_to_do(site, where, said):
    above, plots, _ = compare.show(site, where)
    assert said in words(above) and "<form" in above and plots == "[]"


def test_curriculum_figures_and_counts(site, tmp_path):
    found = Curriculum("r", 0.5, False, ((0, 3), (4, 7)), (0.0, 0.0, 0.5, 1.0), ((1, 2, 1), (0, 0, 0)), (0.25, None),
                       (0.0, None), (None, None), (2.0, None), (), {"curriculum/epoch": ((0, 0.1), (4, 0.9)),
                                                                    "curriculum/<b>": ((0, 3.0),)})
    made = {figure["id"]: figure for figure in curriculum.figures(found)}
    heat = made["curriculum-heat"]["data"][0]
    assert (heat["x"], heat["y"]) == (["0–3", "4–7"], ["0", "0–0.5", "1"])
    assert heat["z"] == [[0.25, 0.0], [0.5, 0.0], [0.25, 0.0]] and heat["text"] == [[1, 0], [2, 0], [1, 0]]
    assert heat["customdata"][2][1] == "?page=rollouts&run=r&kind=train&from=4&to=7"
    assert [t["name"] for t in made["curriculum-wasted"]["data"]] == [
        "in groups of equal rewards", "cut off", "groups dropped per step (right)"]
    assert made["curriculum-weights"]["data"][0]["name"] == "curriculum/<b>"
    assert made["curriculum-epoch"]["data"][0]["y"] == [0.1, 0.9]
    above, plots, below = curriculum.show(site, {"run": "a", "threshold": "1"})
    assert "groups drawn 4 rollouts 8 passes from reward 1" in words(above)
    assert "cat 2 4 0.75 75 %" in words(below) and len(json.loads(plots)) == 5
    assert "no run" in words(curriculum.show(site, {"run": "zz"})[0]).lower()
    new = RunFolder(tmp_path / "new")
    new.create("task: {name: grounding}\nmodel: {name: embedded/tiny-qwen3-vl}\n", 0)
    new.heartbeat({"step": 0, "steps": 3, "state": "running"})
    library = Library(tmp_path)
    fresh = Site(library, Index(library), MediaStore(library), Notes(tmp_path))
    assert "no training rollouts yet" in words(curriculum.show(fresh, {})[0])
    assert "No rollouts are stored yet" in words(history.show(fresh, {})[0])
    assert "There are no notes yet" in words(notes.form_and_list(fresh, {})[1])


def test_a_note_keeps_what_another_tab_wrote(site):
    where = {"run": "a", "step": "1", "group": "1-s1", "rollout": "1"}
    words_, held = notes.opened_note(site, where)
    assert held is None and "second answer" in words(words_)
    notes.saved_note(site, where, "bad", "", ("", ""))
    notes.saved_note(site, where, "", "mine", ("", ""))  # a tab that was opened before
    found = site.notes.all()[0]
    assert (found.flag, found.comment, found.sample, found.reward) == ("bad", "mine", "s1", 1.0)
    assert "bad mine s1" in words(notes.form_and_list(site, {"mark": "bad"})[1])
    assert "No note fits" in words(notes.form_and_list(site, {"find": "zz"})[1])
    with pytest.raises(AppError, match="has no answer 7"):
        notes.opened_note(site, {**where, "rollout": "7"})
    assert notes.opened_note(site, {"run": "a"}) is None


def test_a_curve_that_stays_is_drawn_as_one_value_with_the_axis_around_it(tmp_path):
    assert set(plots.smoothed([2e-4] * 700, 0.6)) == {2e-4}
    curve = plots._curve([{"step": i, "lr": 2e-4} for i in range(1801)], "lr")
    assert len(curve.steps) < 700 and set(curve.values) == {2e-4}
    rising = plots.smoothed([0.0, 1.0, 1.0], 0.5)  # means with the weights 1; 1, 2; 1, 2, 4
    assert rising == pytest.approx([0, 2 / 3, 6 / 7])
    run = RunFolder(tmp_path / "one")
    for step in range(5):
        run.append_metrics({"step": step, "lr": 1e-6, "loss": 0.0, "kl": 1e-6 * (step + 1), "grad_norm": -2.0})
    made = {figure["id"]: figure["layout"].get("yaxis") for figure in plots.over_steps(Library(tmp_path), ["one"])}
    assert made == {"lr": {"range": [0.5e-6, 1.5e-6]}, "loss": None, "kl": None, "grad_norm": {"range": [-3.0, -1.0]}}


def test_the_filters_of_the_rollouts_page_choose_what_is_exported(site, tmp_path, monkeypatch):
    monkeypatch.setenv("GRADIO_TEMP_DIR", str(tmp_path))
    path, said = notes.exported(site, {"run": "a", "kind": "train", "rmin": "0.9"}, "filter", "jsonl")
    assert path.is_relative_to(tmp_path) and "3 of 3 rollouts" in words(said)
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [1.0] * 3
    with pytest.raises(AppError, match="No rollout is selected"):
        notes.exported(site, {"run": "a", "rmin": "5"}, "filter", "jsonl")
    remark = Note(RolloutKey("a", "train", "train", 0, "g", 0), "unsure")
    monkeypatch.setattr(notes, "listed_notes", lambda *_: [remark])
    with pytest.raises(AppError, match="No answer is flagged good"):
        notes.exported(site, {}, "notes", "sft")


def test_every_rollout_goes_past_one_page(tmp_path):
    write(tmp_path / "r", [(0, "s", "c", [0.5] * 1000)])
    index = Index(Library(tmp_path))
    query = Query(sort="index", descending=False)
    assert [row.key.index for row in every_rollout(index, query, 5000)] == list(range(1000))
    assert len(every_rollout(index, query, 501)) == 501
    index.close()
