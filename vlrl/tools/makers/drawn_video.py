"""Short clips of drawn shapes that move, flash, appear and disappear, with questions whose answers are exact by
construction.

Clips of each category are made by a function (rng, number, timing) -> LabelledClip. `number` counts the clips of the
category from 0. This number is used to cycle through directions, letters and counts. So all answers are equally
frequent, and no constant answer is correct more often than another."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"red": (230, 40, 40), "green": (40, 190, 70), "blue": (60, 110, 250), "yellow": (240, 220, 40)}
SHAPES = ("circle", "square", "triangle")
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1)}
SECONDS = (4, 6)  # Smallest and largest duration of a clip in seconds. Spans start and end at whole seconds.
BOXES = 8  # number of boxes in a track, evenly spaced over the frames
_DETAIL = 4  # supersampling factor
_FLASH = (255, 255, 255)
Point = tuple[float, float]


@dataclass(frozen=True)
class ClipTiming:
    """Frames per second of a clip, and its size: the side of the square image in pixels."""

    fps: int
    size: int


@dataclass(frozen=True)
class LabelledClip:
    """A clip with its question: the frames [n, height, width, 3] of dtype uint8, and the fields of the data row."""

    frames: np.ndarray
    row: Mapping[str, Any]


@dataclass(frozen=True)
class Actor:
    """A shape in a clip. `path` has the centre of the shape in every frame, as fractions of the image side; None in
    frames in which the shape is invisible."""

    colour: str
    shape: str
    radius: float
    path: tuple[Point | None, ...]
    flashes: frozenset[int] = field(default_factory=frozenset)
    """Indices of the frames in which the shape is drawn in white."""

    @property
    def name(self) -> str:
        return f"{self.colour} {self.shape}"

    def box(self, frame: int, size: int) -> list[float] | None:
        """The bounding box of the shape in pixels; None if it is invisible in this frame."""
        at = self.path[frame]
        return None if at is None else [round((v + s * self.radius) * size, 2) for s in (-1, 1) for v in at]


def draw(actors: Sequence[Actor], frame: int, size: int, ground: tuple[int, int, int]) -> np.ndarray:
    """Draws the shapes in one frame [size, size, 3] on a background of the colour `ground`, with antialiased edges."""
    image = Image.new("RGB", (size * _DETAIL, size * _DETAIL), ground)
    pen = ImageDraw.Draw(image)
    for actor in actors:
        box = actor.box(frame, size * _DETAIL)
        if box is None:
            continue
        colour = _FLASH if frame in actor.flashes else COLOURS[actor.colour]
        x1, y1, x2, y2 = box
        if actor.shape == "triangle":
            pen.polygon([(x1, y2), (x2, y2), ((x1 + x2) / 2, y1)], fill=colour)
        else:
            (pen.ellipse if actor.shape == "circle" else pen.rectangle)((x1, y1, x2 - 1, y2 - 1), fill=colour)
    return np.asarray(image.reduce(_DETAIL))


def clip(actors: Sequence[Actor], timing: ClipTiming, rng: random.Random, **row: Any) -> LabelledClip:
    """Draws these shapes on a dark background and returns the LabelledClip of all frames. The keyword arguments `row`
    become the fields of the data row."""
    ground = (shade := rng.randint(10, 50), shade, shade)
    frames = np.stack([draw(actors, i, timing.size, ground) for i in range(len(actors[0].path))])
    return LabelledClip(frames, row)


# --- actors -----------------------------------------------------------------------------------------------------------


def seconds(rng: random.Random) -> int:
    """A random duration of a clip in seconds."""
    return rng.randint(*SECONDS)


def span(rng: random.Random, length: int, shortest: int = 1) -> tuple[int, int]:
    """A random span (start, end) in whole seconds. It is at least `shortest` seconds long and at most half of a clip of
    `length` seconds; all such spans are equally likely."""
    return rng.choice([(a, b) for a, b in _spans(length) if b - a >= shortest])


def place_actors(rng: random.Random, count: int, frames: int) -> list[Actor]:
    """Returns `count` motionless shapes of different colours that do not touch, for a clip of `frames` frames."""
    actors: list[Actor] = []
    for colour in rng.sample(sorted(COLOURS), count):
        actor = Actor(colour, rng.choice(SHAPES), rng.uniform(0.1, 0.13), ())
        while not actor.path or _touches(actor, actors):
            at = (rng.uniform(0.15, 0.85), rng.uniform(0.15, 0.85))
            actor = replace(actor, path=(at,) * frames)
        actors.append(actor)
    return actors


def moving(rng: random.Random, actor: Actor, others: Sequence[Actor], direction: str, start: float, end: float
           ) -> Actor:
    """A copy of the shape `actor` that moves in a straight line from frame `start` to frame `end`. Its path does not
    touch the shapes in `others` unless there is too little room."""
    (dx, dy), frames = DIRECTIONS[direction], len(actor.path)
    moved = actor
    for _ in range(60):
        reach = rng.uniform(0.35, 0.55)
        x, y = (rng.uniform(0.15 + max(0, -reach * d), 0.85 - max(0, reach * d)) for d in (dx, dy))
        done = [min(1.0, max(0.0, (i - start) / (end - start))) * reach for i in range(frames)]
        moved = replace(actor, path=tuple((x + dx * d, y + dy * d) for d in done))
        if not _touches(moved, others):
            break
    return moved


def _touches(actor: Actor, others: Sequence[Actor]) -> bool:
    return any(a and b and max(abs(a[0] - b[0]), abs(a[1] - b[1])) < actor.radius + other.radius + 0.02
               for other in others for a, b in zip(actor.path, other.path, strict=True))


def visible_between(actor: Actor, start: int, end: int) -> Actor:
    """A copy of the shape that is only visible from frame `start` up to, but not including, frame `end`."""
    return replace(actor, path=tuple(at if start <= i < end else None for i, at in enumerate(actor.path)))


# --- kinds ------------------------------------------------------------------------------------------------------------


def direction(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks in which direction a shape moves. The other shapes stand still."""
    length, still = seconds(rng), rng.randint(0, 2)
    hero, *others = place_actors(rng, 1 + still, length * timing.fps)
    way = list(DIRECTIONS)[number % 4]
    start, end = span(rng, length, 2)
    hero = moving(rng, hero, others, way, start * timing.fps, end * timing.fps)
    return clip([*others, hero], timing, rng, **choice(f"Which way does the {hero.name} move?", list(DIRECTIONS), way),
                difficulty=0.2 * still)


def mover(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks which of three shapes moves."""
    hero, names, actors, times = _one_moves(rng, number, timing)
    return clip(actors, timing, rng, **choice("Which shape moves?", names, hero.name),
                difficulty=_short(times, len(hero.path) / timing.fps))


def mover_when(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks which of three shapes moves, and when."""
    hero, names, actors, times = _one_moves(rng, number, timing)
    return clip(actors, timing, rng, **{**choice("Which shape moves, and when?", names, hero.name),
                                       "answer_type": "span+choice"}, spans=[list(map(float, times))],
                difficulty=min(1.0, 0.3 + _short(times, len(hero.path) / timing.fps)))


def _one_moves(rng: random.Random, number: int, timing: ClipTiming
               ) -> tuple[Actor, list[str], list[Actor], tuple[int, int]]:
    length = seconds(rng)
    hero, *others = place_actors(rng, 3, length * timing.fps)
    start, end = span(rng, length)
    hero = moving(rng, hero, others, rng.choice(list(DIRECTIONS)), start * timing.fps, end * timing.fps)
    names = [other.name for other in others]
    names.insert(number % 3, hero.name)
    return hero, names, [*others, hero], (start, end)


def order(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks which of two shapes appears first."""
    length = seconds(rng)
    frames = length * timing.fps
    pair = place_actors(rng, 2, frames)
    first = rng.randint(1, frames - 3)
    second = rng.randint(first + 1, frames - 1)
    names = [actor.name for actor in pair]
    early = visible_between(pair[number % 2], first, frames)
    late = visible_between(pair[1 - number % 2], second, frames)
    return clip([early, late], timing, rng, **choice("Which shape appears first?", names, early.name),
                difficulty=round(1 - (second - first) / frames, 2))


def flashes(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks how many times a shape flashes white: 1 to 4 times, for one frame each."""
    frames = seconds(rng) * timing.fps
    hero, *others = place_actors(rng, rng.randint(1, 2), frames)
    count = 1 + number % 4
    free = rng.sample(range(frames - count), count)  # the first frame and one between two flashes are dark
    lit = frozenset(at + i for i, at in enumerate(sorted(free), start=1))
    question = f"How many times does the {hero.name} flash white?"
    return clip([*others, replace(hero, flashes=lit)], timing, rng, question=question, answer_type="number",
                answer=str(count), difficulty=0.2 * (count - 1))


def moves(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks when a shape moves. In every second clip, another shape moves at another time."""
    length = seconds(rng)
    hero, *others = place_actors(rng, 2, length * timing.fps)
    start, end = times = span(rng, length)
    if number % 2:
        a, b = rng.choice([s for s in _spans(length) if s != times])
        others = [moving(rng, others[0], [hero], rng.choice(list(DIRECTIONS)), a * timing.fps, b * timing.fps)]
    hero = moving(rng, hero, others, rng.choice(list(DIRECTIONS)), start * timing.fps, end * timing.fps)
    return clip([*others, hero], timing, rng, **when(f"the {hero.name} moves", *times),
                difficulty=round(0.5 * (number % 2) + 0.5 * _short(times, length), 2))


def visible(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks when a shape is visible. In every second clip, another shape appears and disappears as
    well."""
    length = seconds(rng)
    hero, *others = place_actors(rng, 2, length * timing.fps)
    start, end = times = span(rng, length)
    if number % 2:
        a, b = rng.choice([s for s in _spans(length) if s != times])
        others = [visible_between(others[0], a * timing.fps, b * timing.fps)]
    return clip([*others, visible_between(hero, start * timing.fps, end * timing.fps)], timing, rng,
                **when(f"the {hero.name} is visible", *times),
                difficulty=round(0.4 * (number % 2) + 0.4 * _short(times, length), 2))


def track(rng: random.Random, number: int, timing: ClipTiming) -> LabelledClip:
    """Makes a clip and asks where a shape is in each of eight frames. The shape moves along two line segments."""
    frames = max(seconds(rng) * timing.fps, BOXES)
    hero, *others = place_actors(rng, 1 + number % 2, frames)
    corners = [(rng.uniform(0.15, 0.85), rng.uniform(0.15, 0.85)) for _ in range(3)]
    knots = np.linspace(0, frames - 1, 3)
    path = zip(*(np.interp(range(frames), knots, [c[axis] for c in corners]) for axis in (0, 1)), strict=True)
    hero = replace(hero, path=tuple((float(x), float(y)) for x, y in path))
    indices = [round(v) for v in np.linspace(0, frames - 1, BOXES)]
    boxes = {"label": hero.name, "boxes": [hero.box(i, timing.size) for i in indices],
             "times": [i / timing.fps for i in indices]}
    return clip([*others, hero], timing, rng, question=f"the {hero.name}", answer_type="track", tracks=[boxes],
                difficulty=round(0.3 + 0.4 * (number % 2), 2))


def choice(question: str, options: Sequence[str], right: str) -> dict[str, Any]:
    """The row fields of a multiple-choice question. The answer is the letter of the option with the text `right`."""
    return {"question": question, "answer_type": "choice", "options": list(options),
            "answer": "ABCDEFGH"[list(options).index(right)]}


def when(what: str, start: int, end: int) -> dict[str, Any]:
    """The row fields of a question about the time span of the event `what`."""
    return {"question": what, "answer_type": "span", "answer": f"{start} to {end}",
            "spans": [[float(start), float(end)]]}


def _spans(length: int) -> list[tuple[int, int]]:
    """All spans in whole seconds that cover at most half of a clip of `length` seconds. Longer spans are not used,
    because a guessed long span would score well on several clips."""
    return [(a, b) for a in range(length) for b in range(a + 1, length + 1) if 2 * (b - a) <= length]


def _short(times: tuple[int, int], length: float) -> float:
    """The difficulty of an event at `times` (start, end) in a clip of `length` seconds: the share of the clip that the
    event does not cover. It is near 1 for a short event."""
    return round(1 - (times[1] - times[0]) / length, 2)


Kind = Callable[[random.Random, int, ClipTiming], LabelledClip]
KINDS: dict[str, tuple[Kind, float]] = {
    "direction": (direction, 3), "mover": (mover, 3), "order": (order, 2), "flashes": (flashes, 1.5),
    "moves": (moves, 4), "visible": (visible, 3), "mover_when": (mover_when, 0.75), "track": (track, 0.75),
}
"""Category -> (function that makes a clip, relative frequency of the category)."""
