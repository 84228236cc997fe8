"""tools/experiments/pairs.py: which answers of two evaluations are of the same sample."""

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.helpers import made_group
from vlrl.store import RunFolder
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
    other = stored(tmp_path / "c", group("9", question="how many cats?"))
    assert a[0].row != other[0].row
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
    assert "different content (media 1, target 1)" in said
    assert "data.seed" in said


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
    assert [i.row for i in items([row, other])] == ["{}", "{}"]
    assert items([row])[0] == Item("1", value=[row])


_ITEMS = st.lists(st.builds(
    Item, id=st.sampled_from("abc"), media=st.sampled_from([(), ("1",), ("2",)]), prompt=st.sampled_from(["p", "q"]),
    target=st.sampled_from(["1", "2"]), row=st.sampled_from(["{}", '{"x": 1}', '{"x": 2}']), episode=st.booleans(),
    value=st.none()), max_size=8, unique=True)


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
