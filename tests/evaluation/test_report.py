"""evaluation/stats.py, tools/experiments/report.py and monitoring/progress.py: what a user is shown of a run."""

import io
import re
from dataclasses import dataclass

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tests.helpers import made_group
from vlrl.evaluation import stats
from vlrl.monitoring.progress import Progress, describe, duration
from vlrl.store import RunFolder
from vlrl.tools.experiments import report


def scored(sample_id, reward, text="answer", **more):
    return made_group(sample_id, text, (reward,), prompt="[red]Where?[/red]", target=[1, 2], task="grounding", of=more)


def test_mean_ci(monkeypatch):
    values = np.random.default_rng(0).normal(2.0, 3.0, 4000)
    mean, low, high = stats.mean_ci(values)
    half = 1.96 * values.std() / np.sqrt(4000)
    assert mean == pytest.approx(values.mean(), abs=1e-12)
    assert low == pytest.approx(mean - half, abs=0.1 * half) and high == pytest.approx(mean + half, abs=0.1 * half)
    for values, expected in (([0.1], 0.1), ([0.1] * 7, 0.1), ([None, 3], 3.0)):
        assert stats.mean_ci(values) == (expected, expected, expected), (values, expected)
    assert np.isnan(stats.mean_ci([])).all() and np.isnan(stats.mean_ci([None])).all()
    values = np.arange(10.0)
    whole = stats.mean_ci(values, seed=5)
    assert whole == stats.mean_ci(values, seed=5) != stats.mean_ci(values, seed=6)
    monkeypatch.setattr(stats, "_BLOCK", 1)
    assert stats.mean_ci(values, seed=5) == whole
    before = np.random.default_rng(0).random(50) * 100
    gain = stats.paired_gain(before, before + np.tile([0.1, 0.2], 25))
    assert gain.mean == pytest.approx(0.15) and 0.13 < gain.low < 0.15 < gain.high < 0.17
    with pytest.raises(ValueError, match="2 before, 3 after"):
        stats.paired_gain([1, 2], [1, 2, 3])


def write_evaluation(run, step, rewards, **more):
    interval = stats.mean_ci(list(rewards.values()))
    names = ("", "/ci95_low", "/ci95_high")
    record = {"step": step, "split": "heldout", "n": len(rewards), "rejected": 0}
    record |= {f"{m}{n}": v for m in ("reward/mean", "iou") for n, v in zip(names, interval, strict=True)}
    run.append_eval(record | more)
    run.write_rollouts(step, 0, [scored(sample, r) for sample, r in rewards.items()], split="heldout")


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run")
    for step in range(20):
        run.append_metrics({"step": step, "reward/mean": 0.3 + 0.02 * step + 0.05 * (-1) ** step})
    write_evaluation(run, 0, {"a": 0.1, "b": 0.5, "c": 0.9, "only before": 0.0}, mAP=0.2)
    write_evaluation(run, 10, {"a": 0.0, "b": 0.0, "c": 0.0})
    write_evaluation(run, 20, {"c": 1.0, "a": 0.2, "b": 0.7, "only after": 1.0}, mAP=0.5)
    return run


def test_gains_pair_by_sample_and_the_summary_shows_them(run):
    rows = {row.metric: row for row in report.gains(run)}
    assert list(rows) == ["reward/mean", "iou", "mAP"]
    iou = rows["iou"]
    assert iou.steps == (0, 20) and iou.n == 4
    assert iou.before.mean == pytest.approx(0.375) and iou.after.mean == pytest.approx(0.725)
    assert iou.gain == stats.paired_gain([0.1, 0.5, 0.9], [0.2, 0.7, 1.0])  # a, b, c: what both evaluations have
    assert rows["mAP"].gain.mean == pytest.approx(0.3) and np.isnan(rows["mAP"].gain.low)
    shown = text_of(report.summary_table(run))
    line = next(words for words in shown.splitlines() if " iou " in words)
    for words in ("heldout", "0.375 [", "0.725 [", "+0.133 [+0.100, +0.200]"):
        assert words in line
    assert "steps 0 to 20" in shown and "[low, high]" in shown and "nan" not in shown  # mAP has no interval
    assert "best reward/mean of heldout: 0.725 at step 20\n" in re.sub(" +\n", "\n", text_of(report.summary_table(run)))
    run.checkpoints.mkdir()
    (run.checkpoints / "best.json").write_text('{"step": 10, "metric": "acc", "value": 0.3, "split": "heldout"}')
    write_evaluation(run, 30, {"a": 0.0}, acc=0.1)
    write_evaluation(run, 10, {"a": 0.0}, acc=0.3)
    assert "best acc of heldout: 0.300 at step 10 (checkpoints/best)" in text_of(report.summary_table(run))
    write_evaluation(run, 0, {"a": 0.0}, acc=0.4)
    assert "best acc of heldout: 0.400 before the first step" in text_of(report.summary_table(run))


def text_of(renderable, width=200):
    console = Console(width=width, file=io.StringIO())
    console.print(renderable)
    return console.file.getvalue()


def test_an_empty_run_and_one_evaluation(tmp_path):
    run = RunFolder(tmp_path)
    assert "no evaluation yet" in text_of(report.summary_table(run)) and report.plot_reward(run).stat().st_size > 1000
    write_evaluation(run, 0, {"a": 0.5})
    assert "+0.000" not in text_of(report.summary_table(run))
    assert report.smooth(np.array([0.0, 3.0, 6.0, 0.0, 9.0]), 3).tolist() == [1.5, 3.0, 3.0, 5.0, 4.5]


def test_plot_reward_draws_training_and_evaluations(run, monkeypatch):
    from matplotlib.figure import Figure
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (figures.append(self), save(self, *a, **k)))
    path = report.plot_reward(run)
    assert path == run.path / "reward.png"
    with Image.open(path) as image:
        assert image.format == "PNG" and image.size[0] >= 1000 and len(image.convert("RGB").getcolors(2**20)) > 50
    axes = figures[0].axes[0]
    raw, smoothed = (axes.lines[i].get_ydata() for i in (0, 1))
    assert len(raw) == 20 and np.ptp(np.diff(smoothed)) < np.ptp(np.diff(raw)) / 2
    bars = axes.containers[0]
    assert list(bars.lines[0].get_xdata()) == [0, 10, 20] and len(bars.lines[2]) == 1
    assert axes.get_xlabel() and axes.get_ylabel()


METRICS = {"step": 1, "reward/mean": 0.25, "reward/std": 0.1, "reward/iou": 0.5, "reward/[bold]x": 1.0, "loss": 3.0,
           "tokens_per_s": 1234.4}


@dataclass
class Screen:
    progress: Progress
    console: Console

    @property
    def text(self) -> str:
        return self.console.file.getvalue()


def screen(terminal=False, encoding="utf-8", **more):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding) if encoding != "utf-8" else io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=160, highlight=False, color_system=None)
    return Screen(Progress(**{"total": 10, "console": console} | more), console)


def test_describe_and_plain_lines_without_a_terminal():
    assert describe(METRICS) == "reward 0.250  iou 0.500  [bold]x 1.000  1,234 tokens/s"
    assert describe({"loss": 3.0}) == "loss 3.000"  # supervised: no reward
    assert describe({}) == "" and describe({"reward/mean": None}) == "reward none"
    assert [duration(s) for s in (None, 59.6, 3725)] == ["?", "0:01:00", "1:02:05"]
    shown = screen(start=3, every=4)
    with shown.progress as progress:
        assert progress.eta_s is None
        for done in range(4, 11):
            progress.update(done, METRICS)
        assert progress.eta_s == 0
    lines = shown.text.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["step 4/10", "step 8/10", "step 10/10"]
    assert "reward 0.250  iou 0.500  [bold]x 1.000  1,234 tokens/s  ETA 0:00:00" in lines[-1]


def test_a_bar_on_a_terminal_and_nothing_on_other_ranks():
    shown = screen(terminal=True)
    with shown.progress as progress:
        progress.update(10, METRICS)
    assert "10/10" in shown.text and "reward 0.250  iou 0.500  [bold]x 1.000" in shown.text
    for terminal in (False, True):
        shown = screen(terminal=terminal, enabled=False)
        with shown.progress as progress:
            progress.update(10, METRICS)
            progress.sample_answer(scored("s", 0.5))
            progress.print("hello")
        assert shown.text == ""


def test_sample_answer_shows_hostile_text_as_text():
    shown = screen()
    hostile = "[bold red]loud[/] [/nothing] \x1b[2J\x07 \ud800 \u202e [link=file:///etc/passwd]x[/link]" + "y" * 5000
    shown.progress.sample_answer(scored("s[/]1", 0.5, text=hostile, parsed=[1, 3], error="[/] broke"))
    text = shown.text
    for words in ("[bold red]loud[/] [/nothing]", "s[/]1", "[red]Where?[/red]", "[1, 3]", "[1, 2]", "iou 0.500",
                  "[/] broke", "[link=file:///etc/passwd]x[/link]"):
        assert words in text
    assert not set(text) & set("\x1b\x07\ud800\u202e") and text.count("y") < 2500
    shown = screen(encoding="ascii")
    shown.progress.sample_answer(scored("s", None, text="日本 ok"))
    shown.console.file.flush()
    assert b"?? ok" in shown.console.file.buffer.getvalue()


def test_the_gain_of_a_metric_that_no_part_holds_has_its_interval(tmp_path):
    for metric in ("acc@.5", "correct_frac"):
        run = RunFolder(tmp_path / metric)
        run.create("", 0)
        for step, hits in ((0, 2), (10, 6)):
            own = [{"correct": i < hits} if metric == "correct_frac" else {"metrics": {metric: float(i < hits)}}
                   for i in range(8)]
            run.write_rollouts(step, 0, [scored(f"s{i}", 0.1, **more) for i, more in enumerate(own)], split="heldout")
            run.append_eval({"step": step, "split": "heldout", "n": 8, metric: hits / 8})
        row = report.gains(run)[0]
        assert row.gain == stats.paired_gain([1.0] * 2 + [0.0] * 6, [1.0] * 6 + [0.0] * 2) and row.gain.low > 0, metric
