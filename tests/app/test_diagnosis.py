"""diagnosis.py and analysis.py: what is said of a run, and by hand what a few rollouts tell together."""

import contextlib
import json
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app import made_runs
from vlrl.app import AppError, diagnosis
from vlrl.app.analysis import Side, compare, curriculum, history
from vlrl.app.diagnosis import ADVICE, Answer, Evidence, diagnose, within_groups
from vlrl.app.evidence import Reader
from vlrl.app.filters import query_of
from vlrl.app.index import Index
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.app.notes import Notes
from vlrl.app.pages import history as history_page
from vlrl.app.rows import Span, compare_spans, part_gains
from vlrl.app.site import Site
from vlrl.config.alerts import AlertSettings
from vlrl.config.schema import Config
from vlrl.monitoring.alerts import RULES, Alerts
from vlrl.store import RunFolder


def lines(**columns):
    """Lines of metrics.jsonl from step 0 on: metric -> its values."""
    steps = range(len(next(iter(columns.values()))))
    return [{"step": step, **{name: values[step] for name, values in columns.items()}} for step in steps]


def said(*finders, **evidence):
    return [(f.kind, f.words) for look in finders for f in look(Evidence("r", **evidence))]


def test_alerts_come_first_and_the_last_of_them(tmp_path):
    told = [{"alert": "kl_above", "step": 3, "text": "at step 3: the KL is 2 (alerts.kl_above)"},
            {"alert": "zero_variance_above", "step": 9, "text": "at step 9: 95% (alerts.zero_variance_above)"},
            {"alert": "of a plugin", "step": 10}, {"step": 11}, {"alert": 7, "step": 12}]
    found = diagnose(Evidence("r", lines(**{"completion/truncated_frac": [1.0]}), alerts=told))
    assert [f.words for f in found] == [
        "Alert at step 10: of a plugin", "Alert at step 9: 95% (alerts.zero_variance_above)",
        "Alert at step 3: the KL is 2 (alerts.kl_above)", "100% of the answers of the last step were truncated."]
    assert "curriculum.keep=mixed" in found[1].do and "algo.kl_coef" in found[2].do
    assert found[1].where == {"page": "rollouts", "run": "r", "kind": "train", "from": 9, "to": 9, "alike": "yes"}
    many = [{"alert": "kl_above", "step": i, "text": f"n{i}"} for i in range(30)]
    words = [f.words for f in diagnose(Evidence("r", alerts=many))]
    assert words[0] == "Alert n29" and len(words) == 21 and words[-1].startswith("10 earlier alerts are in")


def test_every_rule_has_advice_that_names_settings_and_filters_that_are_there():
    assert set(ADVICE) == {*RULES, "heldout_drop"}
    known = Config.model_json_schema()["$defs"]
    for do, filters in ADVICE.values():
        for word in (w.strip(".,;:").split("=")[0] for w in do.split()):
            section, dot, name = word.partition(".")
            if dot and section in ("train", "algo", "rollout", "curriculum", "model"):
                assert any(name in part.get("properties", {}) for part in known.values()), word
        assert not filters or query_of({"run": "r", **filters}) != query_of({"run": "r"}), filters


def test_rewards_without_variance_or_without_the_held_out_answers():
    metrics = lines(**{"groups/zero_variance_frac": [0.1, *[0.9] * 10]})
    wrong = [Answer(g, 0.0, 5) for g in range(4) for _ in range(2)] + [Answer(9, 1.0, 5), Answer(9, 0.0, 5)]
    [(kind, words)] = said(diagnosis.zero_variance, metrics=metrics, answers=wrong)
    assert kind == "bad" and words.startswith("90% of the groups of the last 10 steps have equal rewards")
    assert "100% of them got the lowest reward: the task is too hard" in words
    right = [Answer(a.group, 1.0 - a.reward, 5) for a in wrong]
    assert "100% of them got more than the lowest: the task is too easy" in said(
        diagnosis.zero_variance, metrics=metrics, answers=right)[0][1]
    assert said(diagnosis.zero_variance, metrics=lines(**{"groups/zero_variance_frac": [0.5] * 5})) == []
    solved = [Answer(g, 1.1, 5) for g in range(4) for _ in range(2)]  # or never: one value alone does not tell
    [(_, words)] = said(diagnosis.zero_variance, metrics=metrics, answers=solved)
    assert "too hard" not in words and "too easy" not in words
    assert said(diagnosis.zero_variance, metrics=metrics, answers=[Answer(g, float(g), 5) for g in range(9)]) == []
    rising, down = [0.2, 0.3] * 3 + [0.6, 0.7] * 3, (0.3, 0.2, 0.39)
    for rewards, last, kind in (
            (rising, down, "bad"), (rising, (0.45, 0.35, 0.55), "warn"), (rising, (0.5, 0.4, 0.6), None),
            ([0.2, 0.6] * 3 + [0.25, 0.65] * 3, down, None),  # within two standard errors
            ([0.6, 0.7] * 3 + [0.2, 0.3] * 3, down, None)):
        evals = [{"step": step, "split": "heldout", "correct_frac": mean, "correct_frac/ci95_low": low,
                  "correct_frac/ci95_high": high} for step, (mean, low, high) in ((0, (0.5, 0.4, 0.6)), (12, last))]
        found = said(diagnosis.reward_without_accuracy, metrics=lines(**{"reward/mean": rewards}), evals=evals)
        assert [k for k, _ in found] == ([kind] if kind else []), (rewards, last)
        words = "The training reward went from 0.250 to 0.650, and the share of correct answers in heldout"
        assert not kind or words in found[0][1]


def test_parts_and_lengths_that_are_paid():
    answers = [Answer(i // 4, 1.0, 5, {"format": 1.0, "iou": i % 2, "never": 0.0, "flat": -0.5, "few": None})
               for i in range(40)]
    found = said(diagnosis.saturated_parts, answers=answers)
    assert [(kind, words.split(" in ")[0]) for kind, words in found] == [
        ("", "The reward part format has its largest value"), ("warn", "The reward part never is never earned"),
        ("warn", "The reward part flat is -0.5".replace("-", "−"))]
    assert said(diagnosis.saturated_parts, answers=answers[:19]) == []
    # over all answers the two go together, for easy groups have more of both; within each they do not
    answers = [Answer(g, 1.0, 5, {"a": g + i, "b": g - i}) for g in range(10) for i in range(4)]
    [(kind, words)] = said(diagnosis.conflicting_parts, answers=answers)
    assert kind == "warn" and words.startswith("The reward parts a and b work against each other") and "−1.00" in words
    assert said(diagnosis.conflicting_parts, answers=[a._replace(parts={"a": 1.0, "b": 2.0}) for a in answers]) == []
    answers = [Answer(g, float(i), 10 * i + g) for g in range(10) for i in range(4)]
    [(_, words)] = said(diagnosis.length_against_reward, answers=answers)
    assert words == "Longer answers of a group get a higher reward: the correlation of length and reward is 1.00."
    metrics = lines(**{"completion/length_mean": [100.0] * 6 + [300.0] * 6})
    [(_, words)] = said(diagnosis.length_against_reward, metrics=metrics, answers=answers)
    assert words.endswith("the mean length went from 100 to 300.")
    values = [(g, *pair) for g in range(10) for pair in ((1.0, 2.0), (2.0, 1.0), (3.0, 3.0))]
    assert within_groups(values) == pytest.approx(0.5, abs=1e-12)
    assert within_groups(values[:18]) is None and within_groups([(g, 1.0, y) for g, _, y in values]) is None


def test_what_is_held_out_and_trends():
    def line(step, mean, split="heldout", low=None, high=None):
        return {"step": step, "split": split, "reward/mean": mean, "reward/mean/ci95_low": low,
                "reward/mean/ci95_high": high}

    evals = [line(0, 0.3, low=0.2, high=0.4), line(0, 0.5, "far", 0.4, 0.6), line(0, 0.5, "one"),
             line(9, 0.6, low=0.5, high=0.7), line(9, 0.3, "far", 0.2, 0.35)]
    better, worse = diagnosis.held_out(Evidence("r", evals=evals))
    assert (better.kind, better.words) == ("good", "Held-out reward (heldout): 0.300 [0.200, 0.400] after 0 steps → "
                                           "0.600 [0.500, 0.700] after 9: better.")
    assert (worse.kind, worse.do) == ("bad", ADVICE["heldout_drop"][0])
    assert better.where == {"page": "compare", "a": "r", "a_step": 0, "b": "r", "b_step": 9, "split": "heldout"}
    assert [kind for kind, _ in said(diagnosis.held_out, evals=[line(0, 0.3), line(9, 0.9)])] == [""]
    for look, metric, values, kind in (
            (diagnosis.truncation, "completion/truncated_frac", [0.05] * 4, None),
            (diagnosis.truncation, "completion/truncated_frac", [0.06] * 4, "warn"),
            (diagnosis.truncation, "completion/truncated_frac", [0.3] * 4, "bad"),
            (diagnosis.entropy, "entropy", [1.0] * 30, None), (diagnosis.entropy, "entropy", [1.0, 0.0], None),
            (diagnosis.entropy, "entropy", [1.0] * 20 + [0.4] * 10, "warn"),
            (diagnosis.entropy, "entropy", [1.0] * 20 + [0.05] * 10, "bad"),
            (diagnosis.entropy, "entropy", [1.0] * 20 + [4.0] * 10, "warn"),
            (diagnosis.entropy, "entropy", [0.0] * 30, None),
            (diagnosis.kl, "kl", [0.01] * 12, None), (diagnosis.kl, "kl", [0.05] * 6 + [0.2] * 6, "warn"),
            (diagnosis.kl, "kl", [0.2] * 12, None), (diagnosis.kl, "kl", [0.1] * 6 + [1.5] * 6, "bad")):
        found = said(look, metrics=lines(**{metric: values}))
        assert [k for k, _ in found] == ([kind] if kind else []), (metric, values)
        assert not kind or metric != "entropy" or f"went from 1 to {values[-1]:g} nats" in found[0][1]


_any = st.one_of(st.none(), st.booleans(), st.text(max_size=5), st.floats(), st.integers())


_names = st.sampled_from(["kl", "entropy", "groups/zero_variance_frac", "reward/mean", "alert", "text", "split",
                          "completion/truncated_frac", "completion/length_mean", "reward/mean/ci95_low"])


@pytest.mark.slow
@given(st.lists(st.dictionaries(_names, _any), max_size=12),
       st.lists(st.tuples(st.integers(0, 2), st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 99)),
                max_size=40))
def test_nothing_in_the_files_breaks_it(records, answers):
    records = [{**record, "step": step} for step, record in enumerate(records)]
    answers = [Answer(group, reward, length, {"a": reward, "b": None}) for group, reward, length in answers]
    found = diagnose(Evidence("r", records, records, records, answers))
    assert all(finding.words for finding in found)


def test_a_run_is_read_and_read_again_when_it_goes_on(tmp_path):
    run = made_runs.write(tmp_path / "one", steps=2)
    reader = Reader(Library(tmp_path))
    first = reader.of("one")
    assert len(first.metrics) == 2 and len(first.evals) > 0 and first.alerts == []
    rows = [row for step in (1, 0) for row in run.rollouts(step).to_pylist() if row["reward"] is not None]
    assert sorted(a.reward for a in first.answers) == sorted(row["reward"] for row in rows)
    assert {a.length for a in first.answers} == {len(row["loss_mask"]) for row in rows}
    assert first.answers[0].parts.keys() == {name for name, _ in rows[0]["parts"]}
    made_runs.write_step(run, "boxes", 2)
    Alerts(AlertSettings(kl_above=0.1), run.path, lambda _: None).check({"step": 2, "kl": 0.5})
    again = reader.of("one")
    assert len(again.metrics) == 3 and len(again.answers) > len(first.answers)
    assert diagnose(again)[0].words.startswith("Alert at step 2: the KL to the reference is 0.5")


def test_a_damaged_file_of_rollouts_is_passed_over(tmp_path):
    run = made_runs.write(tmp_path / "one", steps=2)
    whole = Reader(Library(tmp_path)).of("one").answers
    file = sorted(run.path.glob("rollouts/*.parquet"))[-1]
    table = pq.read_table(file)
    for damaged in (table.drop_columns(["step"]), table.drop_columns(["reward"]),
                    table.set_column(0, "step", pa.array(["x"] * len(table)))):
        pq.write_table(damaged, file)
        left = Reader(Library(tmp_path)).of("one")
        assert 0 < len(left.answers) < len(whole) and len(left.metrics) == 2


def test_alerts_that_are_damaged_or_lead_out_are_told(tmp_path):
    run = made_runs.write(tmp_path / "runs/one", steps=1)
    (run.path / "alerts.jsonl").write_text('{"alert": "x", "step": 1, "text": "t"}\n[1]\n{"step": "no"}\n')
    library = Library(tmp_path / "runs")
    assert [line["text"] for line in library.alerts("one")] == ["t"]
    assert any("line 2 of alerts.jsonl" in words for words in library.notes("one"))
    (run.path / "alerts.jsonl").unlink()
    (tmp_path / "elsewhere").write_text(json.dumps({"alert": "x", "step": 1}) + "\n")
    (run.path / "alerts.jsonl").symlink_to(tmp_path / "elsewhere")
    assert library.alerts("one") == []


def group(sample, step, rewards, *, split="train", category=None, parts=None, number=1):
    """A group of a sample with these rewards; its target makes it another one than those of other ids."""
    made = made_runs.made_group("boxes", number, step, split=split, size=len(rewards))
    rollouts = tuple(replace(r, reward=reward, parts={"iou": part}, error=None) for r, reward, part
                     in zip(made.rollouts, rewards, parts or rewards, strict=True))
    sample_of = replace(made.sample, id=sample, row={**made.sample.row, "category": category})
    return replace(made, id=f"{split}-{step}-{sample}", rollouts=rollouts, sample=sample_of, target=sample)


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Two runs: "a" trains samples x, y, z over four steps; both evaluate samples p, q, r."""
    root = tmp_path_factory.mktemp("insight")
    a, b = RunFolder(root / "a"), RunFolder(root / "b")
    a.write_rollouts(0, 0, [group("x", 0, [0, 0, 0, 2], category="c1"), group("y", 0, [1, 1, 1, 1], category="c2")])
    a.write_rollouts(1, 0, [group("z", 1, [0, 0, 0, 0], category="c1", parts=[0, 3, 3, None])])
    a.write_rollouts(2, 0, [group("x", 2, [1, 2, None, 0], category="c1")])
    a.write_rollouts(3, 0, [group("x", 3, [None, None, None, None], category="c1")])
    for step in range(4):
        a.append_metrics({"step": step, "groups/wasted": float(step), "curriculum/weight/c1": 0.5})
    a.write_rollouts(0, 0, [group(s, 0, [w], split="held", category=c) for s, w, c in
                            (("p", 0.0, "c1"), ("q", 0.5, "c2"), ("r", 1.0, "c2"))], split="held")
    a.write_rollouts(4, 0, [group(s, 4, [w], split="held", category=c) for s, w, c in
                            (("p", 1.0, "c1"), ("q", 0.5, "c2"), ("r", 0.5, "c2"), ("s", 1.0, None))], split="held")
    b.write_rollouts(2, 0, [group("p", 2, [0.25, 0.75], split="held"), group("q", 2, [None], split="held")],
                     split="held")
    b.write_rollouts(2, 0, [group("p", 2, [1.0], split="other")], split="other")
    return Library(root)


@pytest.fixture(scope="module")
def index(library):
    index = Index(library, budget_s=60)
    yield index
    index.close()


def test_history_of_a_sample_over_runs_and_with_other_thresholds(index):
    found = history(index, "x", ("a",))
    assert found.thresholds == {"a": 1.0}  # half of 2
    assert [(v.key.step, v.n, v.mean, v.best, v.worst, v.pass_rate, v.visits) for v in found.visits] == [
        (0, 4, 0.5, 2, 0, 0.25, 1), (2, 4, 1.0, 2, 0, 2 / 3, 2), (3, 4, None, None, None, None, 3)]
    assert [v.std for v in found.visits[:2]] == [1.0, 1.0] and found.visits[2].std is None
    # groups per drawn sample: 2 of 2 at step 0, 4 of 3 at step 2, 5 of 3 at step 3
    assert [v.weight for v in found.visits] == pytest.approx([1.0, 2 * 3 / 4, 3 * 3 / 5])
    visits = history(index, "p").visits
    assert [(v.key.run, v.key.source, v.key.step, v.mean) for v in visits] == [
        ("a", "eval", 0, 0.0), ("a", "eval", 4, 1.0), ("b", "eval", 2, 0.5), ("b", "eval", 2, 1.0)]
    assert {v.weight for v in visits} == {None} and {v.visits for v in visits} == {0}
    assert [v.pass_rate for v in history(index, "x", ("a",), threshold=0.0).visits] == [1.0, 1.0, None]
    assert history(index, "z", ("a",), part="iou").thresholds == {"a": 1.5}
    assert [v.pass_rate for v in history(index, "z", ("a",), part="iou").visits] == [2 / 3]
    assert history(index, "'; --").visits == () and history(index, "x", part="none").thresholds == {}
    with pytest.raises(AppError, match="no run"):
        history(index, "x", ("none",))


def test_compare_two_evaluations(index):
    found = compare(index, Side("a", 0), Side("a"))
    assert (found.b.step, found.split, found.n, found.wins, found.losses, found.ties) == (4, "held", 3, 1, 1, 1)
    assert [(p.sample_id, p.gain) for p in found.pairs] == [("p", 1.0), ("q", 0.0), ("r", -0.5)]
    assert (found.gain.mean, found.mean_a.mean, found.mean_b.mean) == pytest.approx((1 / 6, 0.5, 2 / 3))
    assert found.gain.low <= found.gain.mean <= found.gain.high and (found.only_a, found.only_b) == (0, 1)
    assert found.categories == (("c1", 1, 1, 0, 0, 1.0), ("c2", 2, 0, 1, 1, -0.25))
    assert found.pairs[0].key_b.group == "held-4-p" and found.pairs[0].key_b.step == 4
    found = compare(index, Side("a"), Side("b"), "held")
    assert (found.n, found.losses, found.pairs[0].b, found.only_a, found.only_b) == (1, 1, 0.5, 3, 0)
    for a, b, split, words in (
            (Side("a", 3), Side("a"), "held", "at step 3: it was evaluated at steps 0, 4"),
            (Side("a"), Side("b"), "other", "run 'a' has no evaluation of 'other': no such split is"),
            (Side("a"), Side("none"), None, "no run"), (Side("a", 0), Side("a"), "';", "no such split")):
        with pytest.raises(AppError, match=words):
            compare(index, a, b, split)


def test_curriculum(index, library):
    found = curriculum(index, library, "a")
    assert found.threshold == 1.0 and found.bins == ((0, 0), (1, 1), (2, 2), (3, 3))
    #                        0   <1/4 <1/2 <3/4 <1  1
    assert found.counts == ((0, 0, 1, 0, 0, 1), (1, 0, 0, 0, 0, 0), (0, 0, 0, 1, 0, 0), (0, 0, 0, 0, 0, 0))
    assert found.wasted == (0.5, 1.0, 0.0, 1.0) and found.dropped == (0.0, 1.0, 2.0, 3.0)
    assert found.errors == (0.0,) * 4 and len(found.edges) == 7
    c1, c2 = found.categories
    assert (c1.name, c1.groups, c1.rollouts, c1.share) == ("c1", 4, 16, (0.5, 1.0, 1.0, 1.0))
    assert c1.mean == pytest.approx(5 / 11) and c1.pass_rate == pytest.approx(3 / 11)
    assert c1.pass_rates == pytest.approx((0.25, 0.0, 2 / 3, None)) and c1.zero_variance == 0.5
    assert (c2.pass_rate, c2.share) == (1.0, (0.5, 0.0, 0.0, 0.0))
    assert found.weights == {"curriculum/weight/c1": tuple((i, 0.5) for i in range(4))}
    found = curriculum(index, library, "a", bins=2, threshold=5)
    assert found.bins == ((0, 1), (2, 3)) and found.counts == ((3, 0, 0, 0, 0, 0), (1, 0, 0, 0, 0, 0))
    assert found.wasted == (2 / 3, 0.5) and found.dropped == (0.5, 2.5)
    of_part = curriculum(index, library, "a", part="iou")
    assert of_part.threshold == 1.5 and of_part.counts[1] == (0, 0, 0, 1, 0, 0)
    empty = curriculum(index, library, "b")
    assert empty.bins == empty.counts == empty.categories == () and empty.threshold == 0.5
    with pytest.raises(AppError, match="no run"):
        curriculum(index, library, "none")


def content(group, picture, target, prompt="Where?"):
    media = replace(group.prompt.media[0], sha256=picture * 32) if group.prompt.media else None
    prompt = replace(group.prompt, text=prompt, media=(media,) if media else ())
    return replace(group, prompt=prompt, target=target)


@pytest.fixture
def seeds(tmp_path):
    """Two runs of another data.seed: sample p is another picture, q the same one, r the same one under the id t, and s
    the same one asked in other words."""
    runs = {"a": {"p": ("aa", 1), "q": ("bb", 2), "r": ("cc", 3), "s": ("dd", 4, "Where is it?")},
            "b": {"p": ("ee", 9), "q": ("bb", 2), "t": ("cc", 3), "s": ("dd", 4)}}
    for run, samples in runs.items():
        folder = RunFolder(tmp_path / run)
        folder.write_rollouts(0, 0, [content(group(sample, 0, [float(run == "b")], split="held"), *about)
                                     for sample, about in samples.items()], split="held")
    index = Index(Library(tmp_path), budget_s=60)
    yield index
    index.close()


def test_only_the_same_pictures_are_compared(seeds):
    sides = Span("a", "eval"), Span("b", "eval")
    of_steps, of_spans = compare(seeds, Side("a"), Side("b")), compare_spans(seeds, *sides)
    for found in (of_steps, of_spans):
        assert [(p.sample_id, p.key_b.group) for p in found.pairs] == [
            ("q", "held-0-q"), ("r", "held-0-t"), ("s", "held-0-s")]
        assert (found.only_a, found.only_b, found.gain.mean) == (1, 1, 1)
    [said] = of_steps.notes
    assert "1 of A left out: with the id of a sample on the other side, but different content (media 1" in said
    assert "because data.seed or" in said and "1 pairs were worded differently" in said
    assert "1 of B left out: with the id of" in of_spans.notes[0]
    assert {gain.part: gain.n for gain in part_gains(seeds, *sides)} == {"iou": 3}


def test_a_history_is_of_one_picture(seeds, monkeypatch, tmp_path):
    assert [v.key.run for v in history(seeds, "q").visits] == ["a", "b"] and history(seeds, "q").notes == ()
    found = history(seeds, "p")
    assert len(found.visits) == 1 and "1 groups with this id are left out" in found.notes[0]
    assert "of another sample (other media, target" in found.notes[0]
    found = history(seeds, "s")
    assert [v.key.run for v in found.visits] == ["a", "b"] and "asked in other words" in found.notes[0]
    drawn = []
    monkeypatch.setattr(history_page, "figures", lambda found, rows: drawn.extend(rows) or [])
    history_page.show(Site(seeds.library, seeds, MediaStore(seeds.library), Notes(tmp_path)), {"sample": "p"})
    assert [row.key.run for row in drawn] == ["a"]


def asked(root, **prompts):
    """An index over runs that held out sample p with these changes of its prompt."""
    for run, change in prompts.items():
        made = group("p", 0, [1.0], split="held")
        made = replace(made, prompt=replace(made.prompt, **change), target=4)
        RunFolder(root / run).write_rollouts(0, 0, [made], split="held")
    return contextlib.closing(Index(Library(root), budget_s=60))


def test_text_alone_is_one_sample_where_it_asks_the_same_and_a_second_picture_makes_another(tmp_path):
    texts = {run: {"media": (), "text": text} for run, text in (("a", "2 + 2?"), ("b", "3 + 1?"), ("c", "2 + 2?"))}
    with asked(tmp_path / "texts", **texts) as index:
        assert compare(index, Side("a"), Side("c")).n == 1
        with pytest.raises(AppError, match=r"no sample in common.*prompt 1\)"):
            compare(index, Side("a"), Side("b"))
        assert [v.key.run for v in history(index, "p").visits] == ["a", "c"]
    media = group("p", 0, [1.0]).prompt.media[0]
    pictures = {run: {"media": tuple(replace(media, sha256=name * 32) for name in ("bb", second))}
                for run, second in (("a", "cc"), ("b", "dd"))}  # the first one alone would be the same
    with (asked(tmp_path / "pictures", **pictures) as index,
          pytest.raises(AppError, match=r"no sample in common.*media 1\)")):
        compare(index, Side("a"), Side("b"))


def test_an_answer_passes_when_the_run_says_that_it_is_correct(tmp_path):
    """Rewards alone would say that all do."""
    made = group("x", 0, [1.0, 1.0, 1.3, 1.9], category="c1")
    rollouts = tuple(replace(r, correct=r.index >= 2) for r in made.rollouts)
    RunFolder(tmp_path / "a").write_rollouts(0, 0, [replace(made, rollouts=rollouts)])
    library = Library(tmp_path)
    index = Index(library, budget_s=60)
    found = curriculum(index, library, "a")
    assert found.judged and found.categories[0].pass_rate == 0.5 and history(index, "x").visits[0].pass_rate == 0.5
    asked = curriculum(index, library, "a", threshold=1.0)
    assert not asked.judged and asked.categories[0].pass_rate == 1
    index.close()
