"""Drawn scenes with details that cannot be seen until they are enlarged: each of a few shapes carries a plate, a small
square with a digit, colours or dots.

A scene is a pure function of its arguments. It is painted with sides of `size * DETAIL` pixels. The prompt shows an
overview with sides of `size` pixels, averaged blocks of BLUR x BLUR pixels and blank plates, so the overview reveals
nothing about the answer.

    full, row = scene(0, "train", 7, size=64, kind="digit")
    first = overview(scene(0, "train", 7, size=64, kind="digit", blank=True)[0])
    row["expression"], row["answer"]    # "red circle", "4"
    row["boxes"]                        # its box in pixels of the overview"""

import random
from collections.abc import Sequence
from typing import Any

from PIL import Image, ImageDraw

from ._scenes import COLOURS, Box, background, free_place, paint
from .digits import digit_arrays, digit_image, split_indices

DETAIL, BLUR = 4, 4
SIDES = (0.34, 0.4)
"""Smallest and largest side length of a shape, as shares of the image's side length."""
PLATE = 0.7
"""Side length of a plate, as a share of the side length of its shape."""
_BLANK = (48, 48, 48)


def scene(seed: int, split: str, index: int, size: int, kind: str,
          clear: bool = False, blank: bool = False) -> tuple[Image.Image, dict[str, Any]]:
    """Draws a scene. Returns the image in full detail, and the row: a question about the plate of one shape, the
    answer, and the box of the shape. `kind` says what the plates show: digit, colours or count (dots). With `clear`,
    a single plate fills the image, as in a frame of a clip. With `blank`, the plates are empty."""
    rng = random.Random(f"zoom/{seed}/{split}/{index}")
    full = size * DETAIL
    image = background(rng, full)
    colours = rng.sample(sorted(COLOURS), 1 if clear else rng.randint(2, 3))
    objects: list[tuple[str, str, Box]] = []
    for colour, answer in zip(colours, _answers(rng, kind, len(colours)), strict=True):
        side = (0.75, 0.75) if clear else SIDES
        place = free_place(rng, full, [box for *_, box in objects], sides=side)
        if place:
            shape = rng.choice(("circle", "square"))
            paint(image, shape, COLOURS[colour], place)
            _plate(rng, image, place, kind, split, answer, blank)
            objects.append((f"{colour} {shape}", answer, place))
    expression, answer, box = rng.choice(objects)
    return image, {"width": size, "height": size, "expression": expression,
                   "answer": answer, "boxes": [{"box": [v / DETAIL for v in box], "label": expression}],
                   "category": answer if kind != "colours" else "colours"}


def overview(image: Image.Image) -> Image.Image:
    """The image that the prompt shows: each block of BLUR x BLUR pixels is averaged."""
    side = image.width // DETAIL
    return image.reduce(DETAIL * BLUR).resize((side, side), Image.Resampling.NEAREST)


def crop(image: Image.Image, box: Sequence[float], size: int) -> Image.Image:
    """Enlarges the square around a box (in overview pixels) to an image with sides of `size` pixels. The square lies
    inside the image, and its side is at least 1/32 of the image's side."""
    full = image.width
    x1, y1, x2, y2 = (v * DETAIL for v in box)
    side = min(full, max(x2 - x1, y2 - y1, full / 32))
    left, top = (min(max((a + b - side) / 2, 0), full - side) for a, b in ((x1, x2), (y1, y2)))
    area = left, top, left + side, top + side
    return image.resize((size, size), Image.Resampling.BOX, box=area)


def _answers(rng: random.Random, kind: str, count: int) -> list[str]:
    if kind == "digit":
        return [str(n) for n in rng.sample(range(10), count)]
    if kind == "count":
        return [str(n) for n in rng.sample(range(1, 7), count)]
    names = sorted(COLOURS)
    return [" ".join(rng.choice(names) for _ in range(3)) for _ in range(count)]


def _plate(rng: random.Random, image: Image.Image, box: Box, kind: str, split: str, answer: str, blank: bool) -> None:
    side = round(PLATE * (box[2] - box[0]))
    place = (box[0] + box[2] - side) // 2, (box[1] + box[3] - side) // 2
    plate = Image.new("RGB", (60, 60), "black")
    draw = ImageDraw.Draw(plate)
    if kind == "digit":
        plate = _handwritten(rng, split, int(answer))
    elif kind == "count":
        for y, x in (divmod(cell, 3) for cell in rng.sample(range(9), int(answer))):
            draw.rectangle((20 * x + 4, 20 * y + 4, 20 * x + 15, 20 * y + 15), fill="white")
    else:
        for x, name in enumerate(answer.split()):
            draw.rectangle((20 + 7 * x, 20, 26 + 7 * x, 39), fill=COLOURS[name])
    if blank:
        plate = Image.new("RGB", plate.size, _BLANK)
    image.paste(plate.resize((side, side), Image.Resampling.BOX), place)


def _handwritten(rng: random.Random, split: str, digit: int) -> Image.Image:
    arrays, labels = digit_arrays()
    own = [i for i in split_indices()[split.startswith("heldout")] if labels[i] == digit]
    return digit_image(arrays[rng.choice(own)])
