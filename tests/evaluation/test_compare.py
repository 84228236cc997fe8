"""tools/experiments/compare.py and `vlrl compare`: two evaluations, through the files of run folders."""

import json

import numpy as np
import pytest

from tests.evaluation.test_pairs import group
from vlrl.cli.main import main
from vlrl.errors import RunError
from vlrl.store import RunFolder
from vlrl.tools.experiments.compare import compare, parse_side


def write(folder, rewards, step=0, pictures=None, split="heldout"):
    """An evaluation whose sample i is of picture i, or of pictures[i]; a reward None is unscorable."""
    run = RunFolder(folder)
    run.write_rollouts(step, 0, [group(str(i), (pictures or "0123456789abcdef")[i] * 2, rewards=(r,), question="q")
                                 for i, r in enumerate(rewards)], split=split)
    return str(folder)


@pytest.fixture
def two(tmp_path):
    return write(tmp_path / "a", [0.0, 0.5, 1.0, 0.0, 0.5]), write(tmp_path / "b", [0.5, 0.5, 0.0, 1.0, 1.0])


def run(capsys, *words):
    code = main(["compare", *words])
    return code, capsys.readouterr()


def test_a_comparison_by_hand(two, capsys):
    found = compare([parse_side(two[0])], [parse_side(two[1])])
    assert (found.wins, found.losses, found.ties, found.unpaired) == (3, 1, 1, 0)
    assert [s.id for s in found.samples] == ["3", "0", "4", "1", "2"]
    apart = np.array([0.5, 0, -1, 1, 0.5])
    m = found.metrics["reward/mean"]
    assert (m.n, m.a.mean, m.b.mean) == (5, 0.4, pytest.approx(0.6, abs=1e-12))
    assert m.difference.mean == pytest.approx(0.2, abs=1e-12) and m.difference.low < 0 < m.difference.high
    assert m.effect == pytest.approx(apart.mean() / apart.std(ddof=1), abs=1e-9)
    assert found.metrics["iou"].difference == m.difference and "completion/length_mean" in found.metrics
    assert found.verdict.startswith("no difference shown: reward/mean on 5 samples of heldout, b - a is +0.200 [")
    code, out = run(capsys, *two, "--json", "--metric", "iou")
    found = json.loads(out.out)
    assert code == 0 and found["unpaired"] == 0 and found["metric"] == next(iter(found["metrics"])) == "iou"
    assert {"a", "b", "difference", "low", "high", "n"} <= found["metrics"]["reward/mean"].keys()
    assert found["samples"][0] == {"id": "3", "other": "3", "a": 0.0, "b": 1.0} and len(found["samples"]) == 5
    assert (found["wins"], found["losses"], found["ties"]) == (3, 1, 1)
    code, out = run(capsys, *two, "--show", "1")
    text = out.out
    assert code == 0 and "b wins 3, loses 1, ties 1" in text and "no difference shown" in text
    assert "win  3: 0.000 -> 1.000   'x' -> 'x'" in text and "loss 2: 1.000 -> 0.000" in text and "win  0" not in text


def test_a_real_gain_is_told_and_hostile_texts_do_not_steer_the_terminal(tmp_path, capsys):
    rng = np.random.default_rng(0)
    low = rng.random(16) * 0.1
    a, b = write(tmp_path / "a", low), write(tmp_path / "b", low + 0.5 + rng.random(16) * 0.1)
    assert "b is higher than a: reward/mean on 16 samples of heldout" in run(capsys, a, b)[1].out
    assert "b is lower than a" in run(capsys, b, a)[1].out
    a, b = RunFolder(tmp_path / "a\x1b[2J"), RunFolder(tmp_path / "c")
    for folder, reward in ((a, 0.0), (b, 1.0)):
        folder.write_rollouts(0, 0, [group("\x1b[31m[red]id", rewards=(reward,)), group("2", "bb", rewards=(0.0,))],
                              split="heldout")
    code, out = run(capsys, str(a.path), str(b.path))
    assert code == 0 and "\x1b" not in out.out and "[red]id" in out.out


def test_samples_that_are_left_out(tmp_path, capsys):
    a = write(tmp_path / "a", [0.0, 0.0, 1.0], pictures="abc")
    b = write(tmp_path / "b", [1.0, 1.0, 1.0], pictures="bad")
    found = compare([parse_side(a)], [parse_side(b)])
    assert [(s.id, s.other) for s in found.samples] == [("0", "1"), ("1", "0")] and found.unpaired == 2
    assert any("with the id of a sample on the other side, but different content (media 1)" in n for n in found.notes)
    other = write(tmp_path / "c", [1.0] * 3, pictures="def")
    code, out = run(capsys, a, other)
    assert code == 1 and "no sample of 'heldout' is in all of" in out.err and "data.seed" in out.err
    a, b, c = (write(tmp_path / name, [0.0] * n) for name, n in (("f", 4), ("g", 3), ("h", 4)))
    found = compare([parse_side(a), parse_side(b)], [parse_side(c)])
    assert found.metrics["iou"].n == 3 and found.unpaired == 2
    a, b = write(tmp_path / "d", [0.0, 0.5, None]), write(tmp_path / "e", [1.0, 0.5, 1.0])
    found = compare([parse_side(a)], [parse_side(b)])
    assert found.metrics["reward/mean"].n == 2 and len(found.samples) == 2
    assert found.metrics["completion/length_mean"].n == 3


def test_steps_of_a_run(tmp_path, capsys):
    a = write(tmp_path / "a", [0.0, 0.0])
    write(tmp_path / "a", [1.0, 1.0], step=20)
    write(tmp_path / "a", [0.5, 0.25], step=10)
    found = compare([parse_side(a + "@first")], [parse_side(a)])
    assert (found.a[0].step, found.b[0].step, found.metrics["iou"].difference.mean) == (0, 20, 1.0)
    assert compare([parse_side(a + "@10")], [parse_side(a + "@20")]).metrics["iou"].difference.mean == 0.625
    code, out = run(capsys, a + "@7", a)
    assert code == 1 and "there are answers at steps 0, 10, 20" in out.err
    assert "at step best" in run(capsys, a + "@best", a)[1].err
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "checkpoints" / "best.json").write_text('{"step": 10}')
    assert compare([parse_side(a + "@best")], [parse_side(a)]).a[0].step == 10


def test_several_seeds_a_side(tmp_path, capsys):
    rng = np.random.default_rng(0)
    ease = rng.random(16)
    runs = {name: [write(tmp_path / f"{name}{i}", ease + gain + rng.normal(0, 0.02) + rng.normal(0, 0.01, 16))
                   for i in range(3)] for name, gain in (("a", 0.0), ("b", 0.3))}
    code, out = run(capsys, *runs["a"], "vs", *runs["b"], "--json")
    found = json.loads(out.out)
    one = json.loads(run(capsys, runs["a"][0], runs["b"][0], "--json")[1].out)
    several = found["metrics"]["iou"]
    assert code == 0 and several["low"] > 0.2 and several["difference"] == pytest.approx(0.3, abs=0.06)
    width = [m["metrics"]["iou"]["high"] - m["metrics"]["iou"]["low"] for m in (one, found)]
    assert width[1] > 2 * width[0]  # how much seeds vary is in it
    assert found["unpaired"] == 0 and found["notes"] == []
    noted = json.loads(run(capsys, *runs["a"], "vs", runs["b"][0], "--json")[1].out)["notes"]
    assert noted == ["one side has a single run, so the intervals do not include the variation between seeds"]


def test_errors_name_the_way_out(two, capsys):
    for words, said in (
            (["A"], "name two runs"), (["A", "B", "A"], "name two runs"), (["A", "vs"], "name two runs"),
            (["A", "./nowhere"], "holds no evaluated answers"), (["A@7x", "B"], "@7x is not a step"),
            (["A", "B", "--split", "train"], "has no answers to 'train'"),
            (["A", "B", "--metric", "iuo"], "Did you mean 'iou'")):
        places = dict(zip("AB", two, strict=True))
        code, out = run(capsys, *(places.get(w[0], w[0]) + w[1:] for w in words))
        assert code in (1, 2) and said in " ".join(out.err.replace("│", " ").split())
    (file,) = (RunFolder(two[0]).path / "eval-rollouts").iterdir()
    file.write_bytes(b"PAR1 no")
    with pytest.raises(RunError, match="would cover fewer samples"):
        compare([parse_side(two[0])], [parse_side(two[1])])
