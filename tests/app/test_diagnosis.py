"""diagnosis.py: what is said of a run, from lines that are written here by hand; and how it is read from a run."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.app import made_runs
from vlrl.app import diagnosis
from vlrl.app.diagnosis import ADVICE, Answer, Evidence, diagnose, within_groups
from vlrl.app.evidence import Reader
from vlrl.app.filters import query_of
from vlrl.app.library import Library
from vlrl.config.alerts import AlertSettings
from vlrl.config.schema import Config
from vlrl.monitoring.alerts import RULES, Alerts


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
        query = query_of({"run": "r", **filters})
        assert not filters or query != query_of({"run": "r"}), filters


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
    single = [Answer(g, float(g), 5) for g in range(9)]
    assert said(diagnosis.zero_variance, metrics=metrics, answers=single) == []
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
    alerts = Alerts(AlertSettings(kl_above=0.1), run.path, lambda _: None)
    alerts.check({"step": 2, "kl": 0.5})
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
