"""The figures of the README's results are those of benchmarks/results/."""

import re
from pathlib import Path

import pytest

from tests.tables import each

ROOT = Path(__file__).resolve().parents[2]
SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Results\n")[1].split("\n## ")[0]
HEADS = ["task", "before", "after", "gain [95 % interval]", "random rewards", "minutes"]
SOURCES = {
    "quickstart, IoU": ("learning_quickstart_cpu", "", "rl", "iou"),
    "digits, accuracy": ("learning_digits_cpu", "", "rl", "accuracy"),
    "plans of simulated drives": ("learning_tasks_cpu", "Plans of simulated drives", "rl", "joint_acc"),
    "questions about drawn clips": ("learning_tasks_cpu", "Questions about drawn clips", "rl", "accuracy"),
    "drive: closed loop, CaRL's reward": ("drive_cpu", "From 40 steps", "carl", "carl"),
    "zoom: a tool in episodes": ("episodes_learning", "zoom", "rl", "accuracy"),
}
"""Row of the README: the page, the beginning of its section, and which lines there."""


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(text):
    """The first table of a text, each row by its column."""
    table = re.search(r"^(?:\|.*\n)+", text, re.MULTILINE)
    assert table
    lines = [cells(line) for line in table[0].splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def short(text):
    return re.sub(r"(?<![\d.])0(?=\.\d)", "", text)


def measured(name, section, run, metric):
    """The lines of a run and metric on a page of results, from the lowest to the highest outcome."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    _, _, text = text.partition(f"\n## {section}") if section else ("", "", text)
    lines = [cells(line) for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head = next(line for line in lines if "seed" in line and "metric" in line)
    found = [dict(zip(head, line, strict=True)) for line in lines
             if len(line) == len(head) and line[0] == run and line[head.index("metric")] == metric]
    return sorted(found, key=lambda line: float(line["after"]))


def ends(figures):
    """`.534 – .544`, or the figure itself where all are one."""
    figures = sorted({short(figure) for figure in figures}, key=float)
    return " – ".join(dict.fromkeys([figures[0], figures[-1]]))


TABLE = {row["task"]: row for row in rows(SECTION)}


@each("task", SOURCES)
def test_the_table_has_the_measured_figures(task):
    row, (name, section, run, metric) = TABLE[task], SOURCES[task]
    found = measured(name, section, run, metric)
    assert [line["seed"] for line in sorted(found, key=lambda line: line["seed"])] == ["0", "1", "2"]
    assert row["before"] == ends(line["before"] for line in found)
    assert row["after"] == ends(line["after"] for line in found)
    gains = [{short(line["gain [95 %]"]) for line in found if line["after"] == found[end]["after"]} for end in (0, -1)]
    lowest, highest = row["gain [95 % interval]"].split(" to ")
    assert lowest in gains[0] and highest in gains[1], gains
    control = measured(name, section, "control", metric)
    assert row["random rewards"] == (ends(line["after"] for line in control) if control else "")
    minutes, said = sorted(float(line["wall s"]) / 60 for line in found), row["minutes"].split(" – ")
    if len(said) == 2:
        assert said == [f"{minutes[0]:.0f}", f"{minutes[-1]:.0f}"]
    else:
        assert float(said[0]) == pytest.approx(minutes[1], abs=0.051)  # the middle run


def test_supervised_learning_and_trl_have_the_measured_figures():
    said = re.search(r"exact labels reaches (\S+ – \S+) on the quickstart and (\S+ – \S+) on digits", SECTION)
    assert said
    for text, (name, section, _, metric) in zip(said.groups(), list(SOURCES.values())[:2], strict=True):
        assert text == ends(line["after"] for line in measured(name, section, "sft", metric))
    text = (ROOT / "benchmarks" / "results" / "vs_trl_cpu.md").read_text(encoding="utf-8")
    ratios = {row["whole step, TRL / vlrl"]: {head: round(float(row[head].split()[0]), 1)
                                             for head in ("image-heavy", "text-light")}
              for row in rows(text) if row["whole step, TRL / vlrl"].startswith("Qwen")}
    said = re.search(r"takes (\S+) times \(Qwen3-VL\) and (\S+) times \(Qwen2.5-VL\) as long on prompts with many "
                     r"visual tokens, (\S+) times on prompts\s+with few", SECTION)
    assert said
    assert [float(number) for number in said.groups()] == [
        ratios["Qwen3-VL"]["image-heavy"], ratios["Qwen2.5-VL"]["image-heavy"], ratios["Qwen3-VL"]["text-light"]]
    assert ratios["Qwen2.5-VL"]["text-light"] == ratios["Qwen3-VL"]["text-light"]
    assert list(TABLE) == list(SOURCES) and list(next(iter(TABLE.values()))) == HEADS
