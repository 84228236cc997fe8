"""app/analysis.py: by hand what a few rollouts tell together."""

import contextlib
from dataclasses import replace

import pytest

from tests.app import made_runs
from vlrl.app import AppError
from vlrl.app.analysis import Side, compare, curriculum, history
from vlrl.app.index import Index
from vlrl.app.library import Library
from vlrl.app.media import MediaStore
from vlrl.app.notes import Notes
from vlrl.app.pages import history as history_page
from vlrl.app.rows import Span, compare_spans, part_gains
from vlrl.app.site import Site
from vlrl.store import RunFolder


def group(sample, step, rewards, *, split="train", category=None, parts=None, number=1):
    """A group of a sample with these rewards; its target makes it another one than those of other ids."""
    made = made_runs.made_group("boxes", number, step, split=split, size=len(rewards))
    rollouts = tuple(replace(r, reward=reward, parts={"iou": part}, error=None) for r, reward, part
                     in zip(made.rollouts, rewards, parts or rewards, strict=True))
    row = {**made.sample.row, "category": category}
    sample_of = replace(made.sample, id=sample, row=row)
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
    site = Site(seeds.library, seeds, MediaStore(seeds.library), Notes(tmp_path))
    history_page.show(site, {"sample": "p"})
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
    assert found.judged and found.categories[0].pass_rate == 0.5
    assert history(index, "x").visits[0].pass_rate == 0.5
    asked = curriculum(index, library, "a", threshold=1.0)
    assert not asked.judged and asked.categories[0].pass_rate == 1
    index.close()
