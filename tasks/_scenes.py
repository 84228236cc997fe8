"""Drawn scenes for grounding: a few coloured shapes on a light background, each with its exact box.

Everything is a pure function of ``(seed, split, index)``. No file is needed, no two splits share a random stream, and
any scene can be drawn again without the others:

    image, row = scene(0, "train", 7)
    row["expression"]  # "red circle"
    row["boxes"]       # [{"box": [31.0, 40.0, 75.0, 84.0], "label": "red circle"}], pixels of the image

`generated_scene` draws a scene with a chosen number of objects and a chosen size of the object to find."""

import random
from collections.abc import Mapping

from PIL import Image, ImageDraw

COLOURS = {"red": (220, 30, 30), "green": (30, 180, 30), "blue": (40, 60, 220), "yellow": (230, 210, 40)}
SHAPES = ("circle", "square", "triangle")
COUNT_WEIGHTS = (0.5, 0.35, 0.15)  # of one, two and three objects
# In shares of the picture's side. The margin keeps every coordinate at three digits in the 0..1000 convention.
MARGIN, SMALLEST, LARGEST = 0.102, 0.19, 0.44

KNOBS = {"objects": (1.0, 4.0), "size": (0.08, LARGEST)}
"""Ranges of the values that `generated_scene` takes: the number of objects (which is rounded), and the side length of
the object to find as a share of the image's side length."""

Box = tuple[int, int, int, int]  # x1, y1, x2, y2 in pixels; x2 and y2 lie just outside


def scene(seed: int, split: str, index: int, size: int = 128) -> tuple[Image.Image, dict]:
    """Draws one scene. Returns the image, and a canonical grounding row that asks for one of the objects."""
    rng = random.Random(f"scene/{seed}/{split}/{index}")
    image = background(rng, size)
    objects: list[tuple[str, str, Box]] = []
    (count,) = rng.choices(range(1, len(COUNT_WEIGHTS) + 1), COUNT_WEIGHTS)
    for colour in rng.sample(sorted(COLOURS), count):
        place = free_place(rng, size, [box for _, _, box in objects])
        if place is not None:
            shape = rng.choice(SHAPES)
            objects.append((colour, shape, paint(image, shape, COLOURS[colour], place)))
    return image, _row(f"{split}-{index:06d}", size, rng.choice(objects), len(objects))


def background(rng: random.Random, side: int) -> Image.Image:
    """A square image in a light colour, with sides of `side` pixels."""
    return Image.new("RGB", (side, side), tuple(rng.randint(236, 255) for _ in range(3)))


def generated_scene(seed: int, index: int, knobs: Mapping[str, float], size: int = 128) -> tuple[Image.Image, dict]:
    """Draws a scene like `scene`, but with a given difficulty: `knobs` has the number of objects and the size of the
    object to find, under the names in KNOBS."""
    count, share = (float(knobs[name]) for name in KNOBS)
    rng = random.Random(f"made/{seed}/{index}/{count!r}/{share!r}")
    image = background(rng, size)
    objects: list[tuple[str, str, Box]] = []
    places = _places(rng, size, round(count), share)
    for colour, place in zip(rng.sample(sorted(COLOURS), len(places)), places, strict=True):
        shape = rng.choice(SHAPES)
        objects.append((colour, shape, paint(image, shape, COLOURS[colour], place)))
    return image, _row(f"made-{index:06d}-objects={count!r}-size={share!r}", size, objects[0], len(objects))


def _places(rng: random.Random, size: int, count: int, share: float, tries: int = 100) -> list[Box]:
    """Chooses up to `count` disjoint squares at random. The side of the first is `share` times the image's side.
    Returns the first of `tries` attempts that has room for all squares, else the attempt with the most squares."""
    best: list[Box] = []
    for _ in range(tries):
        places: list[Box] = []
        while len(places) < count:
            sides = (SMALLEST, LARGEST) if places else (share, share)
            place = free_place(rng, size, places, sides=sides)
            if place is None:
                break
            places.append(place)
        best = max(best, places, key=len)
        if len(best) == count:
            break
    return best


def _row(name: str, size: int, target: tuple[str, str, Box], objects: int) -> dict:
    colour, shape, box = target
    expression = f"{colour} {shape}"
    return {"id": name, "width": size, "height": size, "expression": expression,
            "boxes": [{"box": [float(v) for v in box], "label": expression}], "category": shape,
            "difficulty": _difficulty(box, size, objects)}


def free_place(rng: random.Random, size: int, taken: list[Box], tries: int = 30,
                sides: tuple[float, float] = (SMALLEST, LARGEST)) -> Box | None:
    """A random square that overlaps none of the boxes in `taken`. None if `tries` attempts find no such square, which
    cannot happen if `taken` is empty. `sides` are the smallest and largest side length as shares of the image's
    side."""
    margin = -int(-size * MARGIN // 1)  # rounded up
    for _ in range(tries):
        side = rng.randint(*(max(1, round(size * share)) for share in sides))
        x, y = (rng.randint(margin, size - margin - side) for _ in range(2))
        if all(x + side < left or right < x or y + side < top or bottom < y for left, top, right, bottom in taken):
            return x, y, x + side, y + side
    return None


def paint(image: Image.Image, shape: str, colour: tuple[int, int, int], place: Box) -> Box:
    """Paints ``shape`` inside ``place``; returns the exact box of the painted pixels."""
    mask = Image.new("L", image.size, 0)
    draw = ImageDraw.Draw(mask)
    x1, y1, x2, y2 = place[0], place[1], place[2] - 1, place[3] - 1  # Pillow paints both ends
    if shape == "circle":
        draw.ellipse((x1, y1, x2, y2), fill=255)
    elif shape == "square":
        draw.rectangle((x1, y1, x2, y2), fill=255)
    else:
        draw.polygon([((x1 + x2) / 2, y1), (x1, y2), (x2, y2)], fill=255)
    image.paste(colour, (0, 0), mask)
    box = mask.getbbox()
    assert box is not None, "a placed shape always has pixels"
    return box


def _difficulty(box: Box, size: int, objects: int) -> float:
    side = (box[2] - box[0]) / size
    smallness = min(1.0, max(0.0, (LARGEST - side) / (LARGEST - SMALLEST)))
    return round(min(1.0, 0.5 * smallness + 0.5 * (objects - 1) / (len(COUNT_WEIGHTS) - 1)), 3)
