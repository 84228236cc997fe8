"""`vlrl compare`: which answers of two evaluations are of the same sample, figures by hand, and forms of answers."""

import json
import math
import time
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.helpers import made_group
from vlrl.cli.main import main
from vlrl.errors import RunError
from vlrl.store import RunFolder
from vlrl.tools.experiments.compare import compare, parse_side
from vlrl.tools.experiments.forms import Forms, form, forms_over_steps, most_frequent
from vlrl.tools.experiments.pairs import COLUMNS, Item, items, pair
from vlrl.types import LoadedMedia, Turn


def picture(name):
    return LoadedMedia(kind="image", frames=(Image.new("RGB", (4, 4)),), sha256=name * 32)


def group(sample, shown="aa", prompt="Where?", target=1, rewards=(1.0,), later=(), **row):
    """A group of the evaluation, asked about the picture `shown`; an episode that showed the pictures `later`."""
    turns = tuple(Turn(start=1, end=2, role="observation", media=(name * 32,)) for name in later)
    done = {"turns": (Turn(start=0, end=1), *turns), "episode_id": "e", "observed_media": tuple(map(picture, later))}
    return made_group(sample, rewards=rewards, prompt=prompt, media=tuple(map(picture, [shown] if shown else [])),
                      row={"id": sample, **row}, target=target, done=done if later else None)


def stored(folder, *groups):
    run = RunFolder(folder)
    run.write_rollouts(0, 0, groups, split="heldout")
    return items(run.rollouts(0, split="heldout", columns=[*COLUMNS, "reward"]).to_pylist())


def paired(found):
    return [(one.id, other.id) for one, other in found.pairs]


def reasons(left):
    return {one.item.id: one.reason for one in left}


def test_which_samples_are_the_same(tmp_path):
    """Paths, sizes and columns of measurements do not count; words of texts and clips of a video do."""
    a = stored(tmp_path / "a", group("1", question="q", image="photos/a.png", processed_size=[28, 28]))
    b = stored(tmp_path / "b", group("9", question="q", image="other/b.png", processed_size=[56, 56], difficulty=0.2,
                                     difficulty_given=0.7, pass_at_k=0.8))
    assert paired(pair(a, b)) == [("1", "9")] and a[0].row == b[0].row == '{"question": "q"}'
    assert a[0].row != stored(tmp_path / "c", group("9", question="how many cats?"))[0].row
    a = stored(tmp_path / "d", group("1", "", "2+2?", target=4), group("2", "", "2+3?", target=5))
    b = stored(tmp_path / "e", group("1", "", "2+3?", target=5), group("2", "", "2+4?", target=6))
    assert paired(pair(a, b)) == [("2", "1")]
    cut = [{"video_start": 0, "video_end": 5}, {"video_start": 5, "video_end": 9}]
    a = stored(tmp_path / "f", *(group(str(i), **row) for i, row in enumerate(cut)))
    b = stored(tmp_path / "g", *(group(str(i), **row) for i, row in enumerate(reversed(cut))))
    assert paired(pair(a, b)) == [("0", "1"), ("1", "0")]


def test_equal_ids_of_other_pictures_are_never_paired(tmp_path):
    """A run of another data.seed has the same ids, and draws other pictures."""
    a = stored(tmp_path / "a", group("1", "aa"), group("2", "bb"), group("3", "cc"), group("only a", "dd"))
    b = stored(tmp_path / "b", group("1", "ee"), group("2", "bb"), group("3", "cc", target=2), group("4", "aa"))
    found = pair(a, b)
    assert paired(found) == [("1", "4"), ("2", "2")]
    assert reasons(found.first) == {"3": "changed", "only a": "missing"} and reasons(found.second) == {
        "1": "changed", "3": "changed"}
    assert found.first[0].differs == ("target",) and found.second[0].differs == ("media",)
    assert found.unpaired == 4 and found.reworded == 0
    said = "\n".join(found.notes("a", "b"))
    assert "1 of a left out: without a counterpart on the other side" in said
    assert "different content (media 1, target 1)" in said and "data.seed" in said


def test_copies_and_other_words_of_one_sample(tmp_path):
    (one,) = stored(tmp_path / "one", group("1", rewards=(0.0, 0.5, 1.0)))
    assert [row["reward"] for row in one.value] == [0, 0.5, 1]
    assert (one.id, one.media, one.prompt, one.target, one.episode) == ("1", ("aa" * 32,), "Where?", "1", False)
    a = stored(tmp_path / "a", group("copy"), group("1"), group("2", "bb"))
    b = stored(tmp_path / "b", group("1"), group("again"), group("2", "bb"), group("third"))
    found = pair(a, b)
    assert paired(found) == [("copy", "again"), ("2", "2")] or paired(found) == [("1", "1"), ("2", "2")]
    assert len(found.pairs) == 2 and set(reasons(found.first).values()) == {"duplicate"}
    assert [one.reason for one in found.second] == ["duplicate"] * 2
    a, b = (stored(tmp_path / words, group("1", prompt=f"{words} it", question="it"),
                   group("2", "", f"{words} 1?", question="1"), group("3", "bb", f"<image>{words}", question=words))
            for words in ("Find", "Seek"))
    found = pair(a, b)
    assert paired(found) == [("1", "1"), ("2", "2")] and found.reworded == 2
    assert found.first[0].differs == ("prompt", "row") and "2 pairs were worded differently" in found.notes()[-1]


def test_episodes_and_rows_that_cannot_be_read(tmp_path):
    a = stored(tmp_path / "a", group("1", later=("bb", "cc")), group("2", later=("dd",)))
    b = stored(tmp_path / "b", group("1", later=("ee",)), group("3", later=("dd",)))
    assert a[0].media == b[0].media == ("aa" * 32,) and a[0].episode
    found = pair(a, b)
    assert paired(found) == [("1", "1")] and reasons(found.second) == {"3": "missing"}
    row = {"sample_id": "1", "prompt": None, "target": None, "sample": "{" * 9, "media": None, "turns": None,
           "episode_id": None}
    other = {**row, "sample": "[1]", "media": ["aa"]}
    assert [i.row for i in items([row, other])] == ["{}", "{}"] and items([row])[0] == Item("1", value=[row])


_ITEMS = st.lists(st.builds(
    Item, id=st.sampled_from("abc"), media=st.sampled_from([(), ("1",), ("2",)]), prompt=st.sampled_from(["p", "q"]),
    target=st.sampled_from(["1", "2"]), row=st.sampled_from(["{}", '{"x": 1}', '{"x": 2}']), episode=st.booleans(),
    value=st.none()), max_size=8, unique=True)


@settings(max_examples=50)
@given(_ITEMS, _ITEMS)
def test_every_item_is_in_one_pair_or_left_out_once(first, second):
    first, second = ([i._replace(value=n) for n, i in enumerate(side)] for side in (first, second))
    found = pair(first, second)
    for place, side, left in ((0, first, found.first), (1, second, found.second)):
        placed = [p[place].value for p in found.pairs] + [one.item.value for one in left]
        assert sorted(placed) == list(range(len(side)))
    for one, other in found.pairs:
        assert (one.media, one.target, one.episode) == (other.media, other.target, other.episode)
        assert one.prompt == other.prompt or (one.id, one.row) == (other.id, other.row)
        assert "{}" in (one.row, other.row) or one.row == other.row
    keys = [(one.content, one.row) for one, _ in found.pairs]
    assert len(keys) == len(set(keys)) and found.reworded == sum(a.prompt != b.prompt for a, b in found.pairs)
    assert {n for n, _ in paired(found)} <= {i.id for i in first}
    both = pair(first, first)
    assert [one for one, _ in both.pairs] == [other for _, other in both.pairs] and both.reworded == 0


def test_each_piece_of_the_content_counts_and_the_order_of_the_other_side_does_not(tmp_path):
    a = stored(tmp_path / "a", group("1"))
    for field, value in (("shown", "ff"), ("prompt", "Other?"), ("target", 7)):
        assert pair(a, stored(tmp_path / field, group("2", **{field: value}))).pairs == (), field
    assert pair(a, [a[0]._replace(id="other")]).pairs
    rng = np.random.default_rng(0)
    first = [Item(str(i), (str(i // 2),), "p", row=json.dumps({"q": i % 2})) for i in range(20)]
    second = [first[i]._replace(id=str(i + 100 * (i % 3 == 0))) for i in rng.permutation(20)]
    assert {(a.id, b.row) for a, b in pair(first, second).pairs} == {(i.id, i.row) for i in first}


def write(folder, rewards, step=0, pictures=None, split="heldout"):
    """An evaluation whose sample i is of picture i, or of pictures[i]; a reward None is unscorable."""
    run = RunFolder(folder)
    run.write_rollouts(step, 0, [group(str(i), (pictures or "0123456789abcdef")[i] * 2, rewards=(r,), question="q")
                                 for i, r in enumerate(rewards)], split=split)
    return str(folder)


@pytest.fixture
def two(tmp_path):
    return write(tmp_path / "a", [0.0, 0.5, 1.0, 0.0, 0.5]), write(tmp_path / "b", [0.5, 0.5, 0.0, 1.0, 1.0])


def told(capsys, *words):
    return main(["compare", *words]), capsys.readouterr()


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
    code, out = told(capsys, *two, "--json", "--metric", "iou")
    found = json.loads(out.out)
    assert code == 0 and found["unpaired"] == 0 and found["metric"] == next(iter(found["metrics"])) == "iou"
    assert {"a", "b", "difference", "low", "high", "n"} <= found["metrics"]["reward/mean"].keys()
    assert found["samples"][0] == {"id": "3", "other": "3", "a": 0.0, "b": 1.0} and len(found["samples"]) == 5
    assert (found["wins"], found["losses"], found["ties"]) == (3, 1, 1)
    code, out = told(capsys, *two, "--show", "1")
    text = out.out
    assert code == 0 and "b wins 3, loses 1, ties 1" in text and "no difference shown" in text
    assert "win  3: 0.000 -> 1.000   'x' -> 'x'" in text and "loss 2: 1.000 -> 0.000" in text and "win  0" not in text


def test_a_real_gain_is_told_and_hostile_texts_do_not_steer_the_terminal(tmp_path, capsys):
    rng = np.random.default_rng(0)
    low = rng.random(16) * 0.1
    a, b = write(tmp_path / "a", low), write(tmp_path / "b", low + 0.5 + rng.random(16) * 0.1)
    assert "b is higher than a: reward/mean on 16 samples of heldout" in told(capsys, a, b)[1].out
    assert "b is lower than a" in told(capsys, b, a)[1].out
    a, b = RunFolder(tmp_path / "a\x1b[2J"), RunFolder(tmp_path / "c")
    for folder, reward in ((a, 0.0), (b, 1.0)):
        folder.write_rollouts(0, 0, [group("\x1b[31m[red]id", rewards=(reward,)), group("2", "bb", rewards=(0.0,))],
                              split="heldout")
    code, out = told(capsys, str(a.path), str(b.path))
    assert code == 0 and "\x1b" not in out.out and "[red]id" in out.out


def test_samples_that_are_left_out(tmp_path, capsys):
    a = write(tmp_path / "a", [0.0, 0.0, 1.0], pictures="abc")
    b = write(tmp_path / "b", [1.0, 1.0, 1.0], pictures="bad")
    found = compare([parse_side(a)], [parse_side(b)])
    assert [(s.id, s.other) for s in found.samples] == [("0", "1"), ("1", "0")] and found.unpaired == 2
    assert any("with the id of a sample on the other side, but different content (media 1)" in n for n in found.notes)
    code, out = told(capsys, a, write(tmp_path / "c", [1.0] * 3, pictures="def"))
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
    code, out = told(capsys, a + "@7", a)
    assert code == 1 and "there are answers at steps 0, 10, 20" in out.err
    assert "at step best" in told(capsys, a + "@best", a)[1].err
    (tmp_path / "a" / "checkpoints").mkdir()
    (tmp_path / "a" / "checkpoints" / "best.json").write_text('{"step": 10}')
    assert compare([parse_side(a + "@best")], [parse_side(a)]).a[0].step == 10


def test_several_seeds_a_side(tmp_path, capsys):
    rng = np.random.default_rng(0)
    ease = rng.random(16)
    runs = {name: [write(tmp_path / f"{name}{i}", ease + gain + rng.normal(0, 0.02) + rng.normal(0, 0.01, 16))
                   for i in range(3)] for name, gain in (("a", 0.0), ("b", 0.3))}
    code, out = told(capsys, *runs["a"], "vs", *runs["b"], "--json")
    found = json.loads(out.out)
    one = json.loads(told(capsys, runs["a"][0], runs["b"][0], "--json")[1].out)
    several = found["metrics"]["iou"]
    assert code == 0 and several["low"] > 0.2 and several["difference"] == pytest.approx(0.3, abs=0.06)
    width = [m["metrics"]["iou"]["high"] - m["metrics"]["iou"]["low"] for m in (one, found)]
    assert width[1] > 2 * width[0]  # how much seeds vary is in it
    assert found["unpaired"] == 0 and found["notes"] == []
    noted = json.loads(told(capsys, *runs["a"], "vs", runs["b"][0], "--json")[1].out)["notes"]
    assert noted == ["one side has a single run, so the intervals do not include the variation between seeds"]


def test_errors_name_the_way_out(two, capsys):
    for words, said in (
            (["A"], "name two runs"), (["A", "B", "A"], "name two runs"), (["A", "vs"], "name two runs"),
            (["A", "./nowhere"], "holds no evaluated answers"), (["A@7x", "B"], "@7x is not a step"),
            (["A", "B", "--split", "train"], "has no answers to 'train'"),
            (["A", "B", "--metric", "iuo"], "Did you mean 'iou'")):
        places = dict(zip("AB", two, strict=True))
        code, out = told(capsys, *(places.get(w[0], w[0]) + w[1:] for w in words))
        assert code in (1, 2) and said in " ".join(out.err.replace("│", " ").split())
    (file,) = (RunFolder(two[0]).path / "eval-rollouts").iterdir()
    file.write_bytes(b"PAR1 no")
    with pytest.raises(RunError, match="would cover fewer samples"):
        compare([parse_side(two[0])], [parse_side(two[1])])


def test_forms_of_answers():
    for text, expected in (
            ("<think>It is left of 2 cars.</think><answer>[190, 45.5]</answer>",
            "<think>a.</think><answer>[0, 0]</answer>"), ("[1,-2,+3,4.5]", "[0,0,0,0]"), ("click(3, 4)", "a(0, 0)"),
            ("", ""), ("The  answer\nis 4.", "a."),
            ('{"bbox_2d": [1, 2], "label": "red car"}', '{"a": [0, 0], "a": "a"}'), ("abc3", "a"),
            ("42<|im_end|>", "0<|im_end|>"), ("ACCELERATE, STRAIGHT", "a"), ("3 < 4", "0 < 0"), ("日本 3 語", "a"),
            ("(a" * 100, "(a" * 58 + "(...")):
        assert form(text) == expected, (text, expected)
    for piece in ("a ", "<", "a-", "1.", "<a", "a,", "<|", "a_", "+"):
        before = time.process_time()
        form(piece * 100_000)
        assert time.process_time() - before < 2, piece


@settings(max_examples=40)
@given(st.text(max_size=300))
def test_no_text_breaks_it(text):
    found = form(text)
    assert len(found) <= 120 and not any(c.isdecimal() and c != "0" for c in found.split("<")[0])


def test_shares_and_entropy():
    point = Forms(0, Counter({"[0]": 3, "a": 1}))
    assert point.answers == 4 and point.share("[0]") == 0.75 and point.share("none") == 0
    assert point.entropy == pytest.approx(-0.75 * math.log(0.75) - 0.25 * math.log(0.25), abs=1e-12)
    assert Forms(0, Counter({"a": 5})).entropy == 0
    later = Forms(9, Counter({"late": 9, "[0]": 1}))
    assert most_frequent([point, later]) == ["late", "[0]", "a"] and most_frequent([point, later], 1) == ["late"]


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "r")
    for step, texts in ((0, ["[1, 2]", "left", "right", "left of 3"]), (8, ["[5, 6]", "[7, 8]", "[9, 9]", "up"])):
        groups = []
        for i, text in enumerate(texts):
            made = group(str(i))
            (rollout,) = made.rollouts
            written = replace(rollout.completion, text=text)
            groups.append(replace(made, rollouts=(replace(rollout, completion=written),)))
        folder.write_rollouts(step, 0, groups, split="heldout")
    return folder


def test_over_the_evaluations_of_a_run(run, capsys, tmp_path):
    first, last = forms_over_steps(run)
    assert (first.step, last.step) == (0, 8)
    assert first.forms == {"[0, 0]": 1, "a": 3} and last.forms == {"[0, 0]": 3, "a": 1}
    assert main(["compare", "--forms", str(run.path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)[str(run.path)]
    assert [(p["step"], p["answers"], p["forms"]) for p in found] == [
        (0, 4, {"a": 3, "[0, 0]": 1}), (8, 4, {"[0, 0]": 3, "a": 1})]
    assert main(["compare", "--forms", str(run.path)]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["[0,", "0]", "25.0%", "75.0%"] in rows and ["different", "forms", "2", "2"] in rows
    with pytest.raises(RunError, match="no evaluated answers of split 'heldout'"):
        forms_over_steps(RunFolder(tmp_path))
    with pytest.raises(RunError, match=r"of split 'other'.* Evaluated splits: heldout"):
        forms_over_steps(run, "other")
    assert main(["compare", "--forms", str(run.path), "vs", str(run.path)]) == 2
    for words, said in (
            (["--weights"], "--forms"), (["--metric", "iou"], "--metric"), (["--seeds", "3"], "--seeds"),
            (["--sequential"], "--sequential")):
        assert main(["compare", "--forms", str(run.path), *words]) == 2, (words, said)
        assert said in capsys.readouterr().err, (words, said)
