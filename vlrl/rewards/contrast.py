"""Rewards of an image from text descriptions: cosines of its embedding with those of texts. Pure.

`services.clip(images, texts)` gives the cosines."""

from __future__ import annotations


def contrast_goal(negative: float, positive: float, span: float = 0.03) -> float:
    """VLM-RL's contrasting language goal, in [0, 1]: 1 if an image is closer to the positive text by any margin.

    1 - clip(negative - positive, 0, span) / span of the cosines with the negative and the positive text (2412.15544, as
    its code computes it); 0 if the negative text is closer by at least `span`."""
    return 1 - min(max(negative - positive, 0.0), span) / span


def goal_baseline(goal: float, baseline: float, between: float, alpha: float) -> float:
    """VLM-RM's regularised reward of an image, at most 1 (2310.12921, Definition 1).

    1 - |alpha p + (1 - alpha) s - g|^2 / 2 of the unit embeddings s of the image, g of the goal text and b of the
    baseline text, p the projection of s on the line through b and g. With alpha=0 it is the cosine s.g. It needs the
    three cosines only: `goal` s.g, `baseline` s.b, `between` b.g."""
    off = 2 - 2 * goal  # |s - g|^2
    width = 2 - 2 * between  # |g - b|^2
    along = (goal - baseline - 1 + between) ** 2 / width if width > 1e-12 else 0.0  # of |s - g|^2, on the line
    return 1 - (along + (1 - alpha) ** 2 * max(0.0, off - along)) / 2


def speed_term(speed: float, clear: float, target: float) -> float:
    """1 - |speed - clear * target| / target: how well a speed fits a road that is clear by `clear` in [0, 1].

    VLM-RL (2412.15544): the target speed falls with the language goal. Speeds in m/s, target > 0; the value is at most
    1, and negative beyond twice the target."""
    return 1 - abs(speed - clear * target) / target


def linear_falloff(value: float, most: float) -> float:
    """1 at 0, falling linearly to 0 at `most` > 0 and beyond: VLM-RL's terms of distance, angle and its spread."""
    return max(0.0, 1 - abs(value) / most)


def vlm_rl_reward(base: float, speed: float, clear: float, target: float, *terms: float) -> float:
    """VLM-RL's reward of a state: the product of the speed term and the other terms (`linear_falloff`).

    A negative `base`, the environment's penalty for a collision or leaving the road, is returned unchanged."""
    if base < 0:
        return base
    reward = speed_term(speed, clear, target)
    for term in terms:
        reward *= term
    return reward
