"""Rewards of an image based on text descriptions, computed from cosine similarities of embeddings.

`services.clip(images, texts)` returns the cosine similarities."""

from __future__ import annotations


def contrast_goal(negative: float, positive: float, span: float = 0.03) -> float:
    """How well an image fits a positive text compared with a negative text, in [0, 1]: the contrasting language goal of
    VLM-RL (2412.15544), as computed by the authors' code.

    It is 1 - clip(negative - positive, 0, span) / span, where `negative` and `positive` are the cosine similarities of
    the image and the two texts. So it is 1 if the image is closer to the positive text by any margin, and 0 if the
    image is closer to the negative text by at least `span`."""
    return 1 - min(max(negative - positive, 0.0), span) / span


def goal_baseline(goal: float, baseline: float, between: float, alpha: float) -> float:
    """VLM-RM's goal-baseline regularised reward of an image, at most 1 (2310.12921, Definition 1).

    1 - |alpha p + (1 - alpha) s - g|^2 / 2, where s, g and b are the unit embeddings of the image, the goal text and
    the baseline text, and p is the projection of s on the line through b and g. With alpha=0 it is the cosine
    similarity s.g. It is computed from three cosine similarities: `goal` s.g, `baseline` s.b and `between` b.g."""
    off = 2 - 2 * goal  # |s - g|^2
    width = 2 - 2 * between  # |g - b|^2
    along = (goal - baseline - 1 + between) ** 2 / width if width > 1e-12 else 0.0  # of |s - g|^2, on the line
    return 1 - (along + (1 - alpha) ** 2 * max(0.0, off - along)) / 2


def speed_term(speed: float, clear: float, target: float) -> float:
    """How well a speed fits the road ahead: 1 - |speed - clear * target| / target, where `clear` in [0, 1] says how
    clear the road is.

    In VLM-RL (2412.15544), `clear` is the language goal, which lowers the target speed. Speeds are in m/s, and target >
    0. The result is at most 1; it is negative if the speed exceeds twice the target."""
    return 1 - abs(speed - clear * target) / target


def linear_falloff(value: float, most: float) -> float:
    """1 at a value of 0, falling linearly to 0 at `most` > 0 and beyond. VLM-RL uses it for the distance from the lane
    centre, the angle to the lane, and the standard deviation of the distance."""
    return max(0.0, 1 - abs(value) / most)


def vlm_rl_reward(base: float, speed: float, clear: float, target: float, *terms: float) -> float:
    """VLM-RL's reward of a state: the product of `speed_term(speed, clear, target)` and all `terms`, which are values
    of `linear_falloff`.

    `base` is the environment's own reward. A negative `base`, which is a penalty for a collision or for leaving the
    road, is returned instead."""
    if base < 0:
        return base
    reward = speed_term(speed, clear, target)
    for term in terms:
        reward *= term
    return reward
