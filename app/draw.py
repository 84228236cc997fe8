"""HTML of a prompt's media with the marks of answers and target: images, clips and timelines. Pure functions.

Marks are SVG in pixels of the original image, so they scale with it. A click (or the space key) enlarges an image, and
check boxes hide the marks of single answers. Neither needs a script."""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from .details import GroupView, MediaView
from .html import Html, el, finite, join, note, number
from .marks import Shape, at_frame, color, shapes

_LARGE = 1280  # pixels; larger pictures are shown smaller
_COARSE = 160  # pixels; smaller pictures are shown so large that their pixels are seen
FRAMES = 64
"""Largest number of sampled frames shown of a video."""
_MOST_LABELS = 60
_ALONG = 4  # areas along each segment of a path that labels avoid
_MOST_TOGGLES = 64
_MOST_MOVING = 200
_MOVING = (".webp", ".gif")  # videos that a browser shows as pictures


Box = tuple[Any, ...]
"""x1, y1, x2, y2 in pixels."""


class Addresses(Protocol):
    """Interface that returns URLs of a run's media (`data:` or on a server), or None for an unavailable file."""

    def picture(self, run: str, name: str, size: int | None) -> str | None:
        """The URL of an image, reduced to at most `size` pixels (None: not reduced) on the longer side."""
        ...

    def video(self, run: str, name: str) -> str | None: ...

    def frames(self, run: str, name: str, seconds: Sequence[float]) -> Sequence[str | None]:
        """The URLs of the video frames at these times in seconds, one URL for each time."""
        ...


def media(view: GroupView, addresses: Addresses, chosen: int | None = None, most_frames: int = FRAMES) -> Html:
    """The HTML of every image and video of the prompt with the marks of all answers; those of answer `chosen` are
    highlighted. At most `most_frames` sampled frames of a video are shown, evenly spaced."""
    drawable, bad = shapes(view)
    drawn = [_one(view, place, [s for s in drawable if s.media == place], addresses, chosen, most_frames)
             for place in range(len(view.media))]
    lost = [s for s in drawable if s.media >= len(view.media)]
    spans = timeline([s for s in lost if s.kind == "span"], _duration(view, None)) if lost and not view.media else ""
    left = bad + (len(lost) if view.media else sum(s.kind != "span" for s in lost))
    words = note(f"{left} marks could not be drawn: their form is unknown, or their image is missing.",
                 kind="warn") if left else ""
    if not drawn and not spans:
        return join([el("p", "The prompt has no picture.", class_="v-dim"), words])
    return el("div", _toggles(drawable, chosen), el("div", *drawn, class_="v-media"), spans, words, class_="v-draw")


def _toggles(all_shapes: Sequence[Shape], chosen: int | None) -> Html:
    present = sorted({s.rollout for s in all_shapes if s.rollout is not None})
    if not all_shapes:
        return Html("")
    marks = [_toggle("t", "target", "v-key-target")] if any(s.rollout is None for s in all_shapes) else []
    single = present if len(present) <= _MOST_TOGGLES else [i for i in present if i == chosen]
    marks += [_toggle(str(i), f"#{i}", "", color(i)) for i in single]
    rules = "".join(f".v-draw:has(.v-on-{key}:not(:checked)) .v-of-{key}{{display:none}}" for key in ["t", *single])
    rules += "".join(f".v-group:has(#v-answer-{i}:hover) .v-marks g:not(.v-of-{i},.v-of-t){{opacity:.12}}"
                     for i in single)  # hovering over a card highlights its marks
    if len(single) < len(present):
        others = "".join(f":not(.v-of-{key})" for key in ["t", *single])
        marks.append(_toggle("others", f"{len(present) - len(single)} {'other ' if single else ''}answers", ""))
        rules += f".v-draw:has(.v-on-others:not(:checked)) [class*=v-of-]{others}{{display:none}}"
    return join([el("style", Html(rules)), el("div", *marks, class_="v-keys", role="group", aria_label="Marks shown")])


def _toggle(key: str, words: str, class_: str, paint: str = "") -> Html:
    box = el("input", type="checkbox", checked=True, class_=f"v-on-{key}")
    swatch = el("i", class_=f"v-swatch {class_}".strip(), style=f"background:{paint}" if paint else None)
    return el("label", box, swatch, words)


def _one(view: GroupView, place: int, all_shapes: Sequence[Shape], addresses: Addresses, chosen: int | None,
         most_frames: int) -> Html:
    item, many = view.media[place], len(view.media) > 1
    caption = join([f"{item.kind} {place + 1}" if many else "", *_facts(item)], " · ")
    if item.kind == "video":
        source = addresses.video(view.key.run, item.name) if item.name else None
        plays = bool(source and not str(item.name).lower().endswith(_MOVING))
        shown = frames(view, item, all_shapes, addresses, chosen, most_frames, plays)
        return _video(view, item, all_shapes, source, chosen, el("figcaption", caption), shown)
    return picture(view, item, all_shapes, addresses, f"image {place + 1} of the prompt", chosen, caption)


def picture(view: GroupView, item: MediaView, all_shapes: Sequence[Shape], addresses: Addresses, alt: str,
            chosen: int | None = None, caption: Any = "") -> Html:
    """An image (`item`) with its marks on top; a click enlarges the image."""
    size, source = _size(view, item, all_shapes), _source(view.key.run, item, addresses)
    return el("figure", _framed(source, size, all_shapes, chosen, alt), el("figcaption", caption) if caption else "",
              class_="v-pic")


def _facts(item: MediaView) -> list[str]:
    facts = [f"{item.size[0]} × {item.size[1]} px" if item.size else "size not stored"]
    if item.processed_size:
        facts.append(f"processed {item.processed_size[0]} × {item.processed_size[1]}")
    if item.visual_tokens is not None:
        facts.append(f"{item.visual_tokens} visual tokens")
    if item.kind == "video" and item.timestamps:
        facts.append(f"{len(item.timestamps)} frames sampled")
    return facts


def _source(run: str, item: MediaView, addresses: Addresses) -> str | None:
    if not item.name:
        return None
    small = item.size is not None and max(item.size) <= _LARGE
    return addresses.picture(run, item.name, None if small else _LARGE)


def _size(view: GroupView, item: MediaView, all_shapes: Sequence[Shape]) -> tuple[float, float]:
    """Width and height of an image in original pixels: as stored, else from the data row, else large enough for all
    marks."""
    sides = item.size or (finite(view.sample.get("width")), finite(view.sample.get("height")))
    if sides[0] and sides[1] and sides[0] > 0 and sides[1] > 0:
        return float(sides[0]), float(sides[1])
    points = [p for s in all_shapes for p in _corners(s)]
    return max([64.0, *(x for x, _ in points)]), max([64.0, *(y for _, y in points)])


def _corners(shape: Shape) -> list[tuple[float, float]]:
    boxes = {"box": [shape.at], "track": [box for _, box in shape.at] if shape.kind == "track" else []}
    if shape.kind in boxes:
        return [(box[2], box[3]) for box in boxes[shape.kind]]
    return [shape.at] if shape.kind == "point" else list(shape.at) if shape.kind == "path" else []


def _framed(source: str | None, size: tuple[float, float], all_shapes: Sequence[Shape], chosen: int | None,
            alt: str, small: bool = False) -> Html:
    picture: Any = el("span", "not stored", class_="v-blank")
    if source:
        lazy = None if source.startswith("data:") else "lazy"
        picture = el("img", src=source, alt=alt, loading=lazy, draggable="false",
                     class_="v-coarse" if max(size) <= _COARSE else None)
    frame = el("span", picture, overlay(all_shapes, size, chosen, small), class_="v-frame",
               style=f"aspect-ratio:{size[0]:.6g}/{size[1]:.6g};--v-w:{min(size[0], 8192):.6g}px")
    box = el("input", type="checkbox", class_="v-zoomed", aria_label=f"show {alt} large")
    return el("label", box, frame, class_="v-zoom", title=None if small else "click: large or small")


def overlay(all_shapes: Sequence[Shape], size: Box, chosen: int | None = None, small: bool = False) -> Html:
    """Boxes, points and paths as SVG in the pixel coordinates of an image of this `size` (width, height). Marks of
    answers other than `chosen` are faint, and marks of the target dashed. Labels do not overlap; `small` omits them."""
    unit = max(size) / (20 if small else 38)
    shown = [shape for shape in all_shapes if shape.kind in _DRAWN]
    marks, taken, drawn = [f for s in shown for f in ([] if small else _fields(s, unit))], list[Box](), []
    for i, shape in enumerate(shown):
        label = "" if small or i >= _MOST_LABELS else _label(_words(shape), shape, size, unit, taken, marks)
        drawn.append(_group(shape, unit, chosen, label))
    return el("svg", *drawn, class_="v-marks", viewBox=f"0 0 {size[0]:.6g} {size[1]:.6g}", preserveAspectRatio="none",
              aria_hidden="true", xmlns="http://www.w3.org/2000/svg")


def _words(shape: Shape) -> str:
    words = f"target {shape.label}" if shape.rollout is None else f"#{shape.rollout} {shape.score or shape.label}"
    return words.strip()


def _group(shape: Shape, unit: float, chosen: int | None, label: Any = "", **attributes: Any) -> Html:
    key = "t" if shape.rollout is None else str(shape.rollout)
    faint = chosen is not None and shape.rollout is not None and shape.rollout != chosen
    lines = [_DRAWN[shape.kind](shape, unit, kind) for kind in ("v-halo", "v-line")]
    classes = f"v-of-{key}{' v-target' if shape.rollout is None else ''}{' v-faint' if faint else ''}"
    return el("g", el("title", f"{_words(shape)} · {shape.label}"), *lines, label, data_v_mark=key, class_=classes,
              style=f"--v-c:{shape.color}", **attributes)


def _box(shape: Shape, unit: float, kind: str) -> Html:
    x1, y1, x2, y2 = shape.at
    return el("rect", x=x1, y=y1, width=max(x2 - x1, unit / 50), height=max(y2 - y1, unit / 50), class_=kind)


def _point(shape: Shape, unit: float, kind: str) -> Html:
    x, y = shape.at
    cross = f"M{x - unit:.6g} {y:.6g}H{x + unit:.6g}M{x:.6g} {y - unit:.6g}V{y + unit:.6g}"
    return join([el("circle", cx=x, cy=y, r=unit / 2, class_=kind), el("path", d=cross, class_=kind)])


def _path(shape: Shape, unit: float, kind: str) -> Html:
    points = " ".join(f"{x:.6g},{y:.6g}" for x, y in shape.at)
    line = el("polyline", points=points, class_=kind)
    dots = "" if kind == "v-halo" else join(el("circle", cx=x, cy=y, r=unit / 5, class_="v-dot") for x, y in shape.at)
    return join([line, dots])


_DRAWN = {"box": _box, "point": _point, "path": _path}


def _fields(shape: Shape, unit: float) -> list[Box]:
    if shape.kind == "box":
        return [shape.at]
    points = [shape.at] if shape.kind == "point" else [
        (a[0] + (b[0] - a[0]) * k / _ALONG, a[1] + (b[1] - a[1]) * k / _ALONG)
        for a, b in zip(shape.at, shape.at[1:], strict=False) for k in range(_ALONG + 1)]
    return [(x - unit / 2, y - unit / 2, x + unit / 2, y + unit / 2) for x, y in points]


def _label(words: str, shape: Shape, size: Box, unit: float, taken: list[Box], marks: Sequence[Box]) -> Html:
    """The SVG label of a mark, placed so that it overlaps none of the labels `taken` and as few marks as possible.
    `unit` is the font size. Empty if every candidate position overlaps another label; the mark's colour and title
    still identify it."""
    words = words if len(words) <= 40 else words[:39] + "…"
    width, height = 0.58 * unit * len(words) + 0.9 * unit, 1.3 * unit
    places = [(min(max(x, 0.0), max(size[0] - width, 0.0)), min(max(y, 0.0), max(size[1] - height, 0.0)))
              for x, y in _beside(shape, width, height)]
    fields = [(x, y, x + width, y + height) for x, y in places]
    free = [f for f in fields if not any(f[0] < t[2] and t[0] < f[2] and f[1] < t[3] and t[1] < f[3] for t in taken)]
    if not free:
        return Html("")
    field = free[int(_covered(free, marks).argmin())]
    taken.append(field)
    x, y = field[0], field[1]
    plate = el("rect", x=x, y=y, width=width, height=height, rx=unit / 5, class_="v-plate")
    stripe = el("rect", x=x, y=y, width=unit / 3, height=height, class_="v-dot")
    text = el("text", words, x=x + 0.6 * unit, y=y + 0.98 * unit, font_size=unit, class_="v-words")
    return join([plate, stripe, text])


def _beside(shape: Shape, width: float, height: float) -> list[tuple[float, float]]:
    if shape.kind == "box":
        x1, y1, x2, y2 = shape.at
    else:  # a point; a path's end
        x, y = shape.at[-1] if shape.kind == "path" else shape.at
        x1, y1, x2, y2 = x - height / 2, y - height / 2, x + height / 2, y + height / 2
    near = [(x1, y1 - height), (x1, y2), (x2, y1), (x1 - width, y1)]
    return near + [place for k in range(1, 12) for place in (
        (x1, y1 - (k + 1) * height), (x1, y2 + k * height), (x2, y1 + k * height), (x1 - width, y1 + k * height))]


def _covered(fields: Sequence[Box], marks: Sequence[Box]) -> np.ndarray:
    field, mark = np.asarray(fields, float)[:, None], np.asarray(marks, float)[None]
    sides = np.minimum(field[..., 2:], mark[..., 2:]) - np.maximum(field[..., :2], mark[..., :2])
    area = np.maximum((mark[..., 2:] - mark[..., :2]).prod(-1), 1e-9)
    return (np.where((sides > 0).all(-1), sides.prod(-1) / area, 0.0)).sum(-1).round(9)


def _video(view: GroupView, item: MediaView, all_shapes: Sequence[Shape], source: str | None, chosen: int | None,
           caption: Html, shown: Html) -> Html:
    size = _size(view, item, all_shapes)
    shape = f"--v-ratio:{size[0] / size[1]:.6g}"
    if source and item.name and item.name.lower().endswith(_MOVING):
        player = el("img", src=source, alt="the clip", loading="lazy", class_="v-player", style=shape)
    elif source:
        clip = el("video", src=source, controls=True, preload="metadata", muted=True, playsinline=True)
        player = el("div", clip, _moving(all_shapes, size, chosen, item.timestamps), class_="v-player", style=shape)
    else:
        player = ""
    spans = [s for s in all_shapes if s.kind == "span"]
    line = timeline(spans, _duration(view, item), item.timestamps) if spans else ""
    return el("figure", player, caption, line, shown, class_="v-pic v-clip")


def _moving(all_shapes: Sequence[Shape], size: Box, chosen: int | None, timestamps: Sequence[float]) -> Html:
    """SVG with the boxes of tracks, to lie on a playing clip of this `size`. At most 200 evenly spaced boxes per track
    are kept. During playback clips.js moves the box of each track. It hides the box at times that are more than half
    a frame interval from any box of the track."""
    times = [t for t in timestamps if finite(t) is not None]
    tracks = [s for s in all_shapes if s.kind == "track"]
    if not tracks or len(times) < 2:
        return Html("")
    gap, marks = (times[-1] - times[0]) / (len(times) - 1), []
    for shape in tracks[:_MOST_LABELS]:
        last = max(len(shape.at) - 1, 1)
        timed = [(times[0] + (times[-1] - times[0]) * i / last if t is None else t, box)
                 for i, (t, box) in enumerate(shape.at)][::-(-len(shape.at) // _MOST_MOVING)]
        places = json.dumps([[round(v, 3) for v in (t, *box)] for t, box in timed])
        first = Shape("box", timed[0][1], shape.label, shape.rollout, shape.media, shape.score)
        marks.append(_group(first, max(size) / 38, chosen, data_v_track=places))
    return el("svg", *marks, class_="v-marks", data_v_gap=gap, viewBox=f"0 0 {size[0]:.6g} {size[1]:.6g}",
              preserveAspectRatio="none", aria_hidden="true", xmlns="http://www.w3.org/2000/svg")


def frames(view: GroupView, item: MediaView, all_shapes: Sequence[Shape], addresses: Addresses,
           chosen: int | None = None, most: int = FRAMES, plays: bool = False) -> Html:
    """The sampled frames of a video next to each other, with their times and the boxes of tracks. Other marks are drawn
    on the first frame. If the page shows a player (`plays`), the times are buttons that make the player seek."""
    times = [t for t in item.timestamps if finite(t) is not None]
    if not times:
        return Html("")
    step = max(len(times) / most, 1.0)
    places = [int(i * step) for i in range(min(len(times), most))]
    sources = list(addresses.frames(view.key.run, item.name, [times[i] for i in places])) if item.name else []
    sources += [None] * (len(places) - len(sources))
    size = _size(view, item, all_shapes)
    shown = []
    for i, source in zip(places, sources, strict=False):
        here = [s for s in all_shapes if s.kind in _DRAWN] if i == 0 else []
        here += [Shape("box", box, s.label, s.rollout, s.media, s.score) for s in all_shapes
                 if s.kind == "track" and (box := at_frame(s.at, i, times))]
        time = f"{number(times[i], '.2f')} s"
        words = el("button", time, type="button", class_="v-seek", data_at=times[i],
                   title="show the clip there") if plays else time
        shown.append(el("figure", _framed(source, size, here, chosen, f"frame at {time}", small=True),
                        el("figcaption", words), class_="v-still"))
    scores = [el("span", el("i", class_="v-swatch", style=f"background:{s.color}"), f"#{s.rollout} {s.score}",
                 class_=f"v-of-{s.rollout}") for s in all_shapes if s.kind == "track" and s.rollout is not None]
    more = f"{len(places)} of {len(times)} frames" if len(places) < len(times) else ""
    return join([el("div", *shown, more, class_="v-stills v-scroll", tabindex="0"),
                 el("div", *scores, class_="v-keys") if scores else ""])


def _duration(view: GroupView, item: MediaView | None) -> float | None:
    """Duration of a clip in seconds, from the data row; else one frame interval after the last sampled frame."""
    given = finite(view.sample.get("duration"))
    if given and given > 0:
        return given
    times = [t for t in item.timestamps if finite(t) is not None] if item else []
    return times[-1] + (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


def timeline(all_shapes: Sequence[Shape], duration: float | None, ticks: Sequence[float] = ()) -> Html:
    """The time spans of the target and of each answer as rows of bars over the `duration` of a clip in seconds, with
    the IoU of each answer. `ticks` are the times of the sampled frames. Empty if `all_shapes` has no span."""
    ends = [max(s.at) for s in all_shapes if s.kind == "span"]
    if not ends:
        return Html("")
    truth = [max(s.at) for s in all_shapes if s.rollout is None]
    whole = duration or max([1.0, *(truth or ends)]) * 1.05
    rows = [_row(key, [s for s in all_shapes if s.rollout == key], whole)
            for key in sorted({s.rollout for s in all_shapes}, key=lambda k: -1 if k is None else k)]
    marks = [el("i", style=f"left:{_percent(t, whole):.3f}%") for t in ticks[:500] if finite(t) is not None]
    axis = [el("span", f"{number(whole * i / 4, '.3g')} s") for i in range(5)]
    return el("div", *rows, el("div", el("span"), el("div", *marks, class_="v-ticks"), el("span"), class_="v-span-row"),
              el("div", el("span"), el("div", *axis, class_="v-axis"), el("span"), class_="v-span-row"),
              class_="v-timeline", data_v_seconds=whole)


def _row(key: int | None, spans: Sequence[Shape], whole: float) -> Html:
    bars = []
    for shape in spans:
        start, end = _percent(shape.at[0], whole), _percent(shape.at[1], whole)
        kind = " v-target" if key is None else ""
        late = " v-beyond" if max(shape.at) > whole else ""
        wrong = " v-inverted" if shape.at[0] >= shape.at[1] else ""
        words = f"{number(shape.at[0], '.6g')} to {number(shape.at[1], '.6g')} s"
        bars.append(el("i", class_=f"v-bar-span{kind}{late}{wrong}", title=words, role="img", aria_label=words,
                       data_at=min(shape.at), style=f"left:{min(start, end):.3f}%;width:{abs(end - start):.3f}%;"
                                                    f"--v-c:{shape.color}"))
    name = "target" if key is None else f"#{key}"
    return el("div", el("span", name), el("div", *bars, class_="v-lane"), el("span", spans[0].score),
              class_=f"v-span-row v-of-{'t' if key is None else key}")


def _percent(seconds: Any, whole: float) -> float:
    return min(max(100 * seconds / whole, 0.0), 100.0)
