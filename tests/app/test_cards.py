"""cards.py and forms.py: the answers of a group side by side, and what is wrong with their form."""

import dataclasses
import json

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.app.made_runs import made_group
from tests.app.test_prose import TEXTS
from tests.app.views import Markup, Plain, clip, group, image, mark, rollout
from tests.tables import each
from vlrl.app import cards, draw, forms, in_memory, marks
from vlrl.app.marks import COLORS, TARGET, at_frame, shapes, track_iou
from vlrl.rewards.text import parse_answer

GOOD = "<think>a</think>\n<answer>b</answer>"


@each("text prompt problems", [
    (GOOD, "", ()), ("[1, 2]", "", ()), ("", "", ()), (GOOD + "<glue>[(1, 2)]</glue>", "", ()),
    ("a</think><answer>b</answer>", "", ("<think> is missing",)),
    ("[1]", "Use <think></think>.", ("<think> is missing", "</think> is missing")),
    (GOOD + " bye", "", ("text after the answer",)), ("Hi " + GOOD, "", ("text before <think>",)),
    ("<think>a</think>x<answer>b</answer>", "", ("text between the tags",)),
    (GOOD + "<answer>c</answer>", "", ("<answer> 2 times", "</answer> 2 times")),
    ("<answer>b</answer><think>a</think>", "", ("<think> after <answer>",)),
    ("<think>a<answer>b</answer></think>", "", ("<answer> inside <think>", "</answer> inside <think>")),
    ("<think>a", "", ("</think> is missing",)),
    ("a</answer>", "", ("<answer> is missing", "</answer> without an opening tag", "text before </answer>")),
])
def test_forms_by_hand(text, prompt, problems):
    assert forms.read(text, prompt).problems == problems
    assert forms.read(text, prompt, truncated=True).problems == (*problems, "cut off before its end")


def test_cards_read_what_the_prompt_has_opened_and_tags_that_others_have():
    for opened, text, problems in (
            ("<think>\n", "a</think><answer>b</answer>", ()),
            ("<think>\n", "<answer>b</answer>", ("</think> is missing", "<answer> inside <think>")),
            ("<think>\n", "<think>a</think><answer>b</answer>", ("<think> 2 times", "<think> inside <think>")),
            ("<think>\n\n</think>\n\n", "<answer>b</answer>", ()), ("<think>\n\n</think>\n\n", GOOD, ())):
        found = forms.read(text, "Write <answer></answer>.<|assistant|>" + opened, opened=opened)
        assert {*problems} <= {*found.problems} and bool(problems) == bool(found.problems), (opened, text)
        made = Markup(cards.group(group(rollout(0, completion=text, opened=opened)), Plain()))
        assert made.text.count("<think>") >= 1
    assert forms.common_tags([GOOD, GOOD, "7"]) == {"think", "answer"} and forms.common_tags(["7", "8", GOOD]) == set()
    assert "<answer> is missing" in forms.read("7", others={"answer"}).problems
    made = Markup(cards.group(group(rollout(0), rollout(1), rollout(2, completion="7")), Plain()))
    assert made.text.count("<think> is missing") == 1


@settings(max_examples=60)
@example("</think><think>a")
@given(st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "<glue>", "</glue>", "a", " ", "\n"]),
                max_size=9).map("".join))
def test_pieces_make_the_text_again(text):
    form = forms.read(text)
    assert "".join(p.text for p in form.pieces) == text
    if not form.problems and "<think>" in text:
        assert form.reasoning == parse_answer(text).reasoning
    assert all(p.text in ("<think>", "</think>", "<answer>", "</answer>", "<glue>", "</glue>")
               for p in form.pieces if p.tag)


def one(**more):
    view = group(rollout(0, **more))
    return Markup(cards.card(view, view.rollouts[0]))


def test_a_card_by_hand_and_its_head_links_and_bounds():
    made = one(parts={"iou": 0.5, "format": 1.0, "safe": None, "length": -4.0}, error="TaskError: x", truncated=True,
               weights={"iou": 1.0, "format": 0.1, "length": 0.5}, finish_reason="length", variant="noisy")
    for words in ("#0", "0.6", "A +0.25", "3 tokens", "token limit", "policy 3", "variant noisy",
                  "cut off before its end", "iou0.5 × 1", "format1 × 0.1", "safenone", "length−4 × 0.5",
                  "Scorer: TaskError: x", "Reasoning"):
        assert words in made.text, words
    bars = [a for a in made.all("i") if "v-fill" in a.get("class", "")]
    assert [b["style"] for b in bars] == ["width:50.0%", "width:100.0%", "width:0.0%", "width:100.0%"]
    assert "v-minus" in bars[3]["class"] and "v-minus" not in bars[0]["class"]
    blocks = [a["class"] for a in made.all("details") + made.all("div") if "class" in a]
    assert "v-think" in blocks and "v-text v-final" in blocks
    assert made.all("a")[0]["href"] == "?page=rollouts&run=run&source=train&split=train&step=3&group=g&rollout=0"
    assert "Read same" in one().text and "Read same" not in one(parsed=[1]).text
    assert "nothing could be read" in one(parsed=None).text and "The answer is empty" in one(completion="").text
    made = Markup(cards.group(group(rollout(0)), Plain(), links={"from": "3", "run": "other"}))
    assert all("from=3" in a["href"] and "run=run" in a["href"] for a in made.all("a"))
    made = Markup(cards.head(group(rollout(0), rollout(1), zero_variance=True, notes=("one file skipped",))))
    for words in ("0.6 ± 0.1", "zero variance", "cats", "difficulty 0.5", "step 3", "one file skipped"):
        assert words in made.text, words
    assert made.all("a")[0]["href"] == "?page=history&run=run&sample=s-1"
    assert "zero variance" not in cards.head(group(rollout(0), zero_variance=True))
    aside = group(rollout(0), rollout(1, variant="noisy", advantage=None))
    assert "beside the group1" in Markup(cards.head(aside)).text
    assert "no answers" in cards.strip(dataclasses.replace(group(), rollouts=()))
    made = Markup(cards.strip(group(*(rollout(i) for i in range(80)))))
    assert len(made.all("article")) == 64 and "16 more answers" in made.text
    view = group(*(rollout(index=i) for i in range(150)))
    said = str(cards.strip(view, 70))
    assert 'id="v-answer-70"' in said and 'id="v-answer-64"' in said and 'id="v-answer-63"' not in said
    assert "86 more answers" in said and ">from #0 on<" in said and ">from #128 on<" in said
    assert "from #64 on" in cards.strip(view, None) and "from #" not in cards.strip(view, 70, links=False)


@each("kind number", [("boxes", 4), ("points", 2), ("clips", 2), ("paths", 3)])
def test_groups_of_every_task(kind, number):
    made = made_group(kind, number, 0)
    view = in_memory.group_view(made, "run")
    found = Markup(cards.group(view, in_memory.InlineImages(made.prompt.media), chosen=1))
    assert not found.odd and len(found.all("article")) == 4
    assert next(a for a in found.all("article") if "v-chosen" in a["class"])["id"] == "v-answer-1"
    assert all(i["src"].startswith("data:image/") for i in found.all("img")) and found.all("img")
    assert len([g for g in found.all("g") if "v-target" in g["class"]]) >= 1
    assert not Markup(cards.group(view, in_memory.InlineImages(()), links=False)).all("a")


VALUES = st.one_of(TEXTS, st.none(), st.floats(), st.lists(TEXTS, max_size=2),
                   st.dictionaries(TEXTS, TEXTS, max_size=2))
TAGS = set("section header article div span b i a p pre code h4 h5 details summary input label figure figcaption img "
           "h3 svg g title rect text style".split())


@settings(max_examples=20)
@given(TEXTS, VALUES, st.one_of(st.none(), st.floats()))
def test_hostile_groups_stay_text(text, value, number):
    answer = rollout(0, [mark("box", [1, 2, 3, 4], label=text), value], completion=text, parts={text: number},
                     error=text, weights={text: number}, parsed=value, reward=number, advantage=number,
                     finish_reason=text, variant=text, truncated=True)
    view = group(answer, rollout(1), sample_id=text, category=text, prompt=text, target=value, sample={text: value},
                 mean=number, difficulty=number, notes=(text,), task=text)
    made = Markup(cards.group(view, Plain()))
    assert not made.odd and set(made.tags) <= TAGS
    assert not any(name.startswith("on") for a in made.attributes for name in a)


def drawn(*rollouts, **more):
    made = Markup(draw.media(group(*rollouts, **more), Plain()))
    assert not made.odd
    return made


def by_mark(made):
    """key -> its texts, in the order of drawing."""
    return [a["data-v-mark"] for a in made.all("g")]


BOX = [10, 10, 30, 30]


def test_boxes_by_hand_and_the_chosen_answer_stands_out():
    a = rollout(0, [mark("box", [10, 10, 30, 20]), mark("box", BOX, "target")])
    b = rollout(1, [mark("box", [30, 30, 10, 10]), mark("box", BOX, "target")])  # corners in another order
    made = drawn(a, b)
    assert by_mark(made) == ["t", "0", "1"]  # the target once, first
    assert "#0 IoU 0.50" in made.text and "#1 IoU 1.00" in made.text and "target cat" in made.text
    assert next(s for s in made.all("svg"))["viewbox"] == "0 0 200 100"
    rects = [r for r in made.all("rect") if r["class"] == "v-line"]
    assert [(r["x"], r["y"], r["width"], r["height"]) for r in rects] == [
        ("10", "10", "20", "20"), ("10", "10", "20", "10"), ("10", "10", "20", "20")]
    assert [g["style"] for g in made.all("g")] == [f"--v-c:{c}" for c in (TARGET, COLORS[0], COLORS[1])]
    assert "v-target" in made.all("g")[0]["class"] and made.all("img")[0]["src"] == "/picture?run/a.png/None"
    assert "200 × 100 px · processed 196 × 112 · 28 visual tokens" in made.text
    boxes = [i for i in made.all("input") if i["class"].startswith("v-on")]
    assert [i["class"] for i in boxes] == ["v-on-t", "v-on-0", "v-on-1"]
    view = group(*(rollout(i, [mark("box", BOX)]) for i in range(3)))
    classes = [g["class"] for g in Markup(draw.media(view, Plain(), chosen=1)).all("g")]
    assert classes == ["v-of-0 v-faint", "v-of-1", "v-of-2 v-faint"]
    answers = [rollout(i, [mark("box", [0, 0, 9, 9]), mark("box", [0, 0, 8, 8], "target")]) for i in range(70)]
    made = Markup(draw.media(group(*answers), Plain(), 3))
    boxes = [i["class"] for i in made.all("input") if i["class"].startswith("v-on-")]
    assert boxes == ["v-on-t", "v-on-3", "v-on-others"] and "69 other answers" in made.text
    assert "[class*=v-of-]:not(.v-of-t):not(.v-of-3){display:none}" in str(draw.media(group(*answers), Plain(), 3))
    target = mark("box", BOX, "target")
    made = drawn(rollout(0, [mark("point", [20, 20]), target]), rollout(1, [mark("point", [40, 20]), target]))
    assert "#0 inside" in made.text and "#1 outside" in made.text
    made = drawn(rollout(0, [mark("point", [0, 3]), mark("point", [0, 0], "target"), mark("point", [9, 9], "target")]))
    assert "#0 3 px off" in made.text
    made = drawn(rollout(0, [mark("path", [[0, 0], [5, 5]])]))
    assert [p["points"] for p in made.all("polyline")] == ["0,0 5,5"] * 2
    media = (image(), image(name=None, size=(50, 40)))
    made = drawn(rollout(0, [mark("box", BOX, media=1), mark("box", BOX, media=7)]), media=media)
    assert [s["viewbox"] for s in made.all("svg")] == ["0 0 200 100", "0 0 50 40"]
    assert "image 2" in made.text and "not stored" in made.text and "1 marks could not be drawn" in made.text
    assert len(made.all("img")) == 1
    made = drawn(media=(image(size=(4000, 3000)),))
    assert made.all("img")[0]["src"] == "/picture?run/a.png/1280" and made.all("svg")[0]["viewbox"] == "0 0 4000 3000"


def overlap(a, b, by):
    return a[0] < b[2] - by and b[0] < a[2] - by and a[1] < b[3] - by and b[1] < a[3] - by


def test_labels_cover_neither_each_other_nor_what_they_name():
    fields = plates(drawn(*(rollout(i, [mark("box", [80 + i, 40, 120 + i, 60])]) for i in range(6))))
    assert len(fields) == 6
    assert not any(overlap(a, b, 1e-2) for i, a in enumerate(fields) for b in [*fields[:i], (80, 40, 125, 60)])
    made = drawn(*(rollout(i, [mark("box", [1, 1, 19, 9])]) for i in range(50)), media=(image(size=(20, 10)),))
    found = plates(made)
    assert 0 < len(found) < 50 == len(made.all("g"))
    assert not any(overlap(a, b, 1e-3) for i, a in enumerate(found) for b in found[:i])
    for width, height in ((200, 100), (1000, 700)):
        for places in ([(100, 50), (100, 46), (104, 53), (94, 50)], [(i * 12, 5) for i in range(8)],
                       [(198, 98), (190, 98), (198, 90)]):
            points = [(x * width / 200, y * width / 200) for x, y in places]
            found = plates(drawn(*(rollout(i, [mark("point", p)]) for i, p in enumerate(points)),
                                 media=(image(size=(width, height)),)))
            assert len(found) == len(points)
            assert not [(p, f) for p in points for f in found if f[0] < p[0] < f[2] and f[1] < p[1] < f[3]]
    path = [(x, 40) for x in range(60, 140, 5)]
    found = plates(drawn(rollout(0, [mark("path", path)]), rollout(1, [mark("box", [2, 2, 198, 98])]),
                         rollout(2, [mark("box", [100, 42, 106, 48])]), rollout(3, [mark("point", (100, 52))])))
    assert len(found) == 4
    for x1, y1, x2, y2 in found:
        assert not any(x1 < x < x2 and y1 < y < y2 for x, y in [*path, (103, 45), (100, 52)])


def plates(made):
    return [(float(r["x"]), float(r["y"]), float(r["x"]) + float(r["width"]), float(r["y"]) + float(r["height"]))
            for r in made.all("rect") if r["class"] == "v-plate"]


def test_spans_and_tracks():
    target = mark("span", [2, 4], "target")
    made = drawn(rollout(0, [mark("span", [3, 5]), target]), rollout(1, [mark("span", [6, 4]), target]),
                 rollout(2, [mark("span", [2, 90]), target]), media=(clip(0, 2, 4, 6, 8),), sample={"duration": 10})
    bars = [a for a in made.all("i") if "v-bar-span" in a.get("class", "")]
    assert [b["style"].split(";")[:2] for b in bars] == [
        ["left:20.000%", "width:20.000%"], ["left:30.000%", "width:20.000%"], ["left:40.000%", "width:20.000%"],
        ["left:20.000%", "width:80.000%"]]
    assert "v-target" in bars[0]["class"] and "v-inverted" in bars[2]["class"] and "v-beyond" in bars[3]["class"]
    assert "IoU 0.33" in made.text and "IoU 0.00" in made.text and made.all("video")[0]["src"] == "/video?run/a.mp4"
    assert [i["src"] for i in made.all("img")] == [f"/frame?{s}" for s in (0, 2, 4, 6, 8)]
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
    one, two = (0.0, 0.0, 10.0, 10.0), (0.0, 0.0, 10.0, 5.0)
    assert track_iou([(None, one), (None, two)], [(None, one), (None, one)]) == 0.75
    assert track_iou([(1.0, one)], [(0.0, one), (1.0, one)]) == 0.5 and track_iou([], []) == 0
    assert at_frame([(None, one), (None, two)], 3, [0, 1, 2, 3]) == two
    assert at_frame([(0.0, one), (1.1, two)], 1, [0, 1, 2]) == two and at_frame([(0.0, one)], 1, [0, 1, 2]) is None
    assert "no picture" in drawn(media=()).text
    assert "IoU 1.00" in drawn(rollout(0, [mark("span", [1, 2]), mark("span", [1, 2], "target")]), media=()).text


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


def test_the_number_of_shapes_is_bounded_and_moving_pictures_need_no_player(monkeypatch):
    for name in ("a.webp", "a.GIF"):
        made = drawn(media=(clip(0, 1, name=name),))
        assert not made.all("video") and made.all("img")[0]["class"] == "v-player"
    monkeypatch.setattr(marks, "_MOST", 5)
    found, bad = shapes(group(rollout(0, [mark("box", [i, 0, i + 1, 1]) for i in range(20)])))
    assert (len(found), bad) == (5, 15)
