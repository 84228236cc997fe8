"""Rewards for agreement among the boxes of a group on one image; no label is needed (GUI-RC and GUI-RCPO, 2508.05615).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Box = Sequence[float]


@dataclass(frozen=True)
class VoteGrid:
    """The image divided by the edges of the boxes of a group's answers, with the number of boxes that cover each cell.
    It is exact for any image size."""

    counts: np.ndarray  # [rows, columns] Number of boxes that cover each cell
    xs: np.ndarray  # [columns + 1] x coordinates of the grid lines in pixels
    ys: np.ndarray  # [rows + 1] y coordinates of the grid lines in pixels

    @property
    def areas(self) -> np.ndarray:
        """[rows, columns] The area of each cell in square pixels."""
        return np.outer(np.diff(self.ys), np.diff(self.xs))


def clip_to_image(box: Box, width: float, height: float) -> tuple[int, int, int, int] | None:
    """The box clipped to the image, in integer pixels (rounded down); None if nothing of the box is left."""
    x1, x2 = (int(min(max(v, 0), width)) for v in (box[0], box[2]))
    y1, y2 = (int(min(max(v, 0), height)) for v in (box[1], box[3]))
    return (x1, y1, x2, y2) if x1 < x2 and y1 < y2 else None


def count_votes(boxes: Sequence[Box]) -> VoteGrid:
    """Builds the VoteGrid of one or more boxes `[x1, y1, x2, y2]` with positive area, in integer pixels."""
    given = np.asarray(boxes, dtype=np.int64)
    xs, ys = np.unique(given[:, [0, 2]]), np.unique(given[:, [1, 3]])
    left, right = np.searchsorted(xs, given[:, 0]), np.searchsorted(xs, given[:, 2])
    top, bottom = np.searchsorted(ys, given[:, 1]), np.searchsorted(ys, given[:, 3])
    change = np.zeros((len(ys), len(xs)), dtype=np.int64)
    for rows, columns, sign in ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1)):
        np.add.at(change, (rows, columns), sign)
    return VoteGrid(change.cumsum(0).cumsum(1)[:-1, :-1], xs, ys)


def region_consistency(boxes: Sequence[Box | None]) -> list[float]:
    """GUI-RCPO's reward for each box of a group, in [0, 1]: the mean number of boxes that cover a pixel of this box,
    divided by the largest number of boxes that cover the same pixel of the image.

    Boxes are in integer pixels. None stands for an answer without a readable box: its reward is 0, and it is not
    counted. If no two boxes overlap, every box gets 1."""
    known = [box for box in boxes if box is not None]
    if not known:
        return [0.0] * len(boxes)
    votes = count_votes(known)
    weight = np.zeros((len(votes.ys), len(votes.xs)))
    weight[1:, 1:] = (votes.counts * votes.areas).cumsum(0).cumsum(1)
    given = np.asarray(known, dtype=np.int64)
    (left, right), (top, bottom) = (np.searchsorted(votes.xs, given[:, [0, 2]]).T,
                                    np.searchsorted(votes.ys, given[:, [1, 3]]).T)
    total = weight[bottom, right] - weight[top, right] - weight[bottom, left] + weight[top, left]
    area = (given[:, 2] - given[:, 0]) * (given[:, 3] - given[:, 1])
    rewards = iter((total / (votes.counts.max() * area)).tolist())
    return [0.0 if box is None else min(1.0, next(rewards)) for box in boxes]


def region_vote(boxes: Sequence[Box]) -> list[float] | None:
    """GUI-RC's consensus answer of a group, as a box: the bounding box of the largest connected region of pixels that
    are covered by the largest number of boxes. None if there are no boxes."""
    if not boxes:
        return None
    from scipy import ndimage

    votes = count_votes(boxes)
    regions, count = ndimage.label(votes.counts == votes.counts.max())  # pyright: ignore[reportGeneralTypeIssues]
    sizes = ndimage.sum_labels(votes.areas, regions, range(1, count + 1))
    rows, columns = ndimage.find_objects(regions)[int(np.argmax(sizes))]
    return [float(votes.xs[columns.start]), float(votes.ys[rows.start]), float(votes.xs[columns.stop]),
            float(votes.ys[rows.stop])]
