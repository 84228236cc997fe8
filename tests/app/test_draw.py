"""draw.py and marks.py: marks over pictures, and how well they meet the target."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.app.markup import Markup
from tests.app.views import Plain, clip, group, image, mark, rollout
from vlrl.app import draw, marks
from vlrl.app.marks import COLORS, TARGET, at_frame, shapes, track_iou


def drawn(*rollouts, **more):
    made = Markup(draw.media(group(*rollouts, **more), Plain()))
    assert not made.odd
    return made


def by_mark(made):
    """key -> its texts, in the order of drawing."""
    return [a["data-v-mark"] for a in made.all("g")]


BOX = [10, 10, 30, 30]


def test_boxes_by_hand():
    a = rollout(0, [mark("box", [10, 10, 30, 20]), mark("box", BOX, "target")])
    b = rollout(1, [mark("box", [30, 30, 10, 10]), mark("box", BOX, "target")])  # corners in another order
    made = drawn(a, b)
    assert by_mark(made) == ["t", "0", "1"]  # the target once, first
    assert "#0 IoU 0.50" in made.text and "#1 IoU 1.00" in made.text and "target cat" in made.text
    svg = next(s for s in made.all("svg"))
    assert svg["viewbox"] == "0 0 200 100"
    rects = [r for r in made.all("rect") if r["class"] == "v-line"]
    assert [(r["x"], r["y"], r["width"], r["height"]) for r in rects] == [
        ("10", "10", "20", "20"), ("10", "10", "20", "10"), ("10", "10", "20", "20")]
    assert [g["style"] for g in made.all("g")] == [f"--v-c:{c}" for c in (TARGET, COLORS[0], COLORS[1])]
    assert "v-target" in made.all("g")[0]["class"]
    assert made.all("img")[0]["src"] == "/picture?run/a.png/None"
    assert "200 × 100 px · processed 196 × 112 · 28 visual tokens" in made.text
    boxes = [i for i in made.all("input") if i["class"].startswith("v-on")]
    assert [i["class"] for i in boxes] == ["v-on-t", "v-on-0", "v-on-1"]


def test_the_chosen_answer_stands_out():
    view = group(*(rollout(i, [mark("box", BOX)]) for i in range(3)))
    classes = [g["class"] for g in Markup(draw.media(view, Plain(), chosen=1)).all("g")]
    assert classes == ["v-of-0 v-faint", "v-of-1", "v-of-2 v-faint"]


def test_too_many_answers_share_a_box_to_tick():
    answers = [rollout(i, [mark("box", [0, 0, 9, 9]), mark("box", [0, 0, 8, 8], "target")]) for i in range(70)]
    made = Markup(draw.media(group(*answers), Plain(), 3))
    boxes = [i["class"] for i in made.all("input") if i["class"].startswith("v-on-")]
    assert boxes == ["v-on-t", "v-on-3", "v-on-others"] and "69 other answers" in made.text
    assert "[class*=v-of-]:not(.v-of-t):not(.v-of-3){display:none}" in str(draw.media(group(*answers), Plain(), 3))


def test_points_and_paths():
    target = mark("box", BOX, "target")
    made = drawn(rollout(0, [mark("point", [20, 20]), target]), rollout(1, [mark("point", [40, 20]), target]))
    assert "#0 inside" in made.text and "#1 outside" in made.text
    made = drawn(rollout(0, [mark("point", [0, 3]), mark("point", [0, 0], "target"), mark("point", [9, 9], "target")]))
    assert "#0 3 px off" in made.text
    made = drawn(rollout(0, [mark("path", [[0, 0], [5, 5]])]))
    assert [p["points"] for p in made.all("polyline")] == ["0,0 5,5"] * 2


def test_marks_lie_on_their_picture():
    media = (image(), image(name=None, size=(50, 40)))
    made = drawn(rollout(0, [mark("box", BOX, media=1), mark("box", BOX, media=7)]), media=media)
    assert [s["viewbox"] for s in made.all("svg")] == ["0 0 200 100", "0 0 50 40"]
    assert "image 2" in made.text and "not stored" in made.text and "1 marks could not be drawn" in made.text
    assert len(made.all("img")) == 1


def test_large_pictures_are_shown_smaller():
    made = drawn(media=(image(size=(4000, 3000)),))
    assert made.all("img")[0]["src"] == "/picture?run/a.png/1280" and made.all("svg")[0]["viewbox"] == "0 0 4000 3000"


def test_labels_cover_neither_each_other_nor_boxes():
    found = [rollout(i, [mark("box", [80 + i, 40, 120 + i, 60])]) for i in range(6)]
    plates = [r for r in drawn(*found).all("rect") if r["class"] == "v-plate"]
    fields = [(float(r["x"]), float(r["y"]), float(r["x"]) + float(r["width"]), float(r["y"]) + float(r["height"]))
              for r in plates]
    pairs = [(a, b) for i, a in enumerate(fields) for b in [*fields[:i], (80, 40, 125, 60)]]
    assert len(fields) == 6
    assert not any(a[0] < b[2] - 1e-2 and b[0] < a[2] - 1e-2 and a[1] < b[3] - 1e-2 and b[1] < a[3] - 1e-2
                   for a, b in pairs)


def plates(made):
    return [(float(r["x"]), float(r["y"]), float(r["x"]) + float(r["width"]), float(r["y"]) + float(r["height"]))
            for r in made.all("rect") if r["class"] == "v-plate"]


@pytest.mark.parametrize("places", [
    [(100, 50), (100, 46), (104, 53), (94, 50)], [(i * 12, 5) for i in range(8)], [(198, 98), (190, 98), (198, 90)]])
@pytest.mark.parametrize("size", [(200, 100), (1000, 700)])
def test_a_label_covers_no_point_beside_its_own(places, size):
    scale = size[0] / 200
    points = [(x * scale, y * scale) for x, y in places]
    made = drawn(*(rollout(i, [mark("point", p)]) for i, p in enumerate(points)), media=(image(size=size),))
    assert len(plates(made)) == len(points)
    assert not [(p, f) for p in points for f in plates(made) if f[0] < p[0] < f[2] and f[1] < p[1] < f[3]]


def test_a_label_covers_no_path_and_no_small_box():
    path = [(x, 40) for x in range(60, 140, 5)]
    made = drawn(rollout(0, [mark("path", path)]), rollout(1, [mark("box", [2, 2, 198, 98])]),
                 rollout(2, [mark("box", [100, 42, 106, 48])]), rollout(3, [mark("point", (100, 52))]))
    assert len(plates(made)) == 4
    for x1, y1, x2, y2 in plates(made):
        assert not any(x1 < x < x2 and y1 < y < y2 for x, y in [*path, (103, 45), (100, 52)])


def test_where_no_label_has_room_it_is_left_out():
    crowd = [rollout(i, [mark("box", [1, 1, 19, 9])]) for i in range(50)]
    made = drawn(*crowd, media=(image(size=(20, 10)),))
    found = plates(made)
    assert 0 < len(found) < 50 == len(made.all("g"))
    assert not any(a[0] < b[2] - 1e-3 and b[0] < a[2] - 1e-3 and a[1] < b[3] - 1e-3 and b[1] < a[3] - 1e-3
                   for i, a in enumerate(found) for b in found[:i])


def test_spans_on_a_timeline():
    target = mark("span", [2, 4], "target")
    made = drawn(rollout(0, [mark("span", [3, 5]), target]), rollout(1, [mark("span", [6, 4]), target]),
                 rollout(2, [mark("span", [2, 90]), target]), media=(clip(0, 2, 4, 6, 8),), sample={"duration": 10})
    bars = [a for a in made.all("i") if "v-bar-span" in a.get("class", "")]
    assert [b["style"].split(";")[:2] for b in bars] == [
        ["left:20.000%", "width:20.000%"], ["left:30.000%", "width:20.000%"], ["left:40.000%", "width:20.000%"],
        ["left:20.000%", "width:80.000%"]]
    assert "v-target" in bars[0]["class"] and "v-inverted" in bars[2]["class"] and "v-beyond" in bars[3]["class"]
    assert "IoU 0.33" in made.text and "IoU 0.00" in made.text
    assert made.all("video")[0]["src"] == "/video?run/a.mp4"
    assert [i["src"] for i in made.all("img")] == [f"/frame?{s}" for s in (0, 2, 4, 6, 8)]


def test_tracks_over_the_frames():
    target = mark("track", [[0, [0, 0, 10, 10]], [1, [10, 0, 20, 10]]], "target")
    answer = mark("track", [[0, [0, 0, 10, 5]], [1, [10, 0, 20, 10]]])
    made = drawn(rollout(0, [answer, target]), media=(clip(0, 1, 2),))
    assert "#0 IoU 0.75" in made.text
    assert by_mark(made) == ["t", "0"] * 3  # over the clip, and two frames with boxes; none at 2 s
    moving = [json.loads(a["data-v-track"]) for a in made.all("g") if "data-v-track" in a]
    assert moving == [[[0, 0, 0, 10, 10], [1, 10, 0, 20, 10]], [[0, 0, 0, 10, 5], [1, 10, 0, 20, 10]]]
    assert [b["data-at"] for b in made.all("button")] == ["0", "1", "2"]
    still = drawn(rollout(0, [answer, target]), media=(clip(0, 1, 2, name="a.webp"),))
    assert by_mark(still) == ["t", "0"] * 2 and not still.all("button")
    assert "2.00 s" in made.text and "3 frames sampled" in made.text
    few = draw.media(group(media=(clip(*range(100)),)), Plain(), most_frames=4)
    assert [i["src"] for i in Markup(few).all("img")] == ["/frame?0", "/frame?25", "/frame?50", "/frame?75"]


def test_tracks_by_hand():
    one, two = (0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 10.0, 5.0)
    assert track_iou([(None, one), (None, two)], [(None, one), (None, one)]) == 0.75
    assert track_iou([(1.0, one)], [(0.0, one), (1.0, one)]) == 0.5 and track_iou([], []) == 0
    assert at_frame([(None, one), (None, two)], 3, [0, 1, 2, 3]) == two
    assert at_frame([(0.0, one), (1.1, two)], 1, [0, 1, 2]) == two and at_frame([(0.0, one)], 1, [0, 1, 2]) is None


def test_no_pictures():
    assert "no picture" in drawn(media=()).text
    spans = drawn(rollout(0, [mark("span", [1, 2]), mark("span", [1, 2], "target")]), media=())
    assert "IoU 1.00" in spans.text


NUMBERS = st.one_of(st.floats(), st.integers(-10, 300), st.just(10 ** 400), st.none(), st.booleans(), st.just("1"))
PLACES = st.recursive(NUMBERS, lambda inner: st.lists(inner, max_size=5), max_leaves=14)
MARKS = st.one_of(NUMBERS, st.fixed_dictionaries({}, optional={
    "kind": st.sampled_from(["box", "point", "path", "span", "track", "star", 3, None]), "at": PLACES,
    "label": st.sampled_from(["a", "</title><script>", None, 3]), "role": st.sampled_from(["answer", "target", None]),
    "media": st.sampled_from([0, 1, -1, True, None, "0", 10 ** 9])}))
EXACT = [mark(kind, at, role, media=place) for kind, at in [
    ("box", [1, 2, 3, 4]), ("box", [5, 5, 5, 5]), ("box", [-1e5, 0, 1e6, 9]), ("point", [-3, 1e6]),
    ("path", [[1, 1], [2, 2]]), ("span", [1, 2]), ("span", [2, 2]), ("span", [-1e6, 1e6]),
    ("track", [[0, [1, 2, 3, 4]], [None, [4, 3, 2, 1]]])]
    for role in ("answer", "target") for place in (0, 1)]


@settings(max_examples=40)
@given(st.lists(st.one_of(MARKS, st.sampled_from(EXACT)), max_size=6),
       st.sampled_from([(0.0,), (), (1.0, 1.0), (0.0, float("nan"), 2.0), (3.0, 1.0, 2.0)]),
       st.sampled_from([(64, 48), None, (0, 0), (1, 10 ** 6)]),
       st.sampled_from([{}, {"duration": float("nan")}, {"duration": "x", "width": -3}, {"duration": 1e-9}]))
def test_odd_marks_raise_nothing(found, times, size, row):
    media = (image(size=size), clip(*times, size=size))
    view = group(rollout(0, found), rollout(1, found[::-1]), rollout(2), media=media, sample=row)
    made = Markup(draw.media(view, Plain()))
    assert not made.odd and "script" not in made.tags
    for attributes in made.attributes:
        assert not any(word in str(value) for value in attributes.values() for word in ("nan", "inf"))
    known, bad = shapes(view)
    assert len(known) + bad <= 2 * len(found)


def test_the_number_of_shapes_is_bounded(monkeypatch):
    monkeypatch.setattr(marks, "_MOST", 5)
    found, bad = shapes(group(rollout(0, [mark("box", [i, 0, i + 1, 1]) for i in range(20)])))
    assert (len(found), bad) == (5, 15)


@pytest.mark.parametrize("name", ["a.webp", "a.GIF"])
def test_moving_pictures_need_no_player(name):
    made = drawn(media=(clip(0, 1, name=name),))
    assert not made.all("video") and made.all("img")[0]["class"] == "v-player"
