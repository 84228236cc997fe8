"""Two answers to one prompt side by side: the prompt, the image with the marks of each answer, and a word diff."""

import dataclasses
from collections.abc import Sequence

from .. import cards, controls, details, diffs, draw, flagging
from ..html import Html, chip, el, join, link, number
from ..queries import GroupKey, RolloutKey
from ..site import Site
from .rollouts import MediaUrls


def two_answers(site: Site, a: RolloutKey, b: RolloutKey, names: Sequence[str] = ("the first", "the second")) -> Html:
    """Prompt and target, the image with the marks of each answer (headed by `names`), and a word diff of the answers.
    Raises AppError if one of the answers does not exist."""
    sides = [_answer(site, key) for key in (a, b)]
    halves = [el("article", _head(name, view, rollout), draw.media(view, MediaUrls(), rollout.index),
                 el("div", *(chip(f"{part} {number(value)}") for part, value in rollout.parts.items()),
                    class_="v-chips"), class_="v-side")
              for name, (view, rollout) in zip(names, sides, strict=True)]
    texts = [rollout.whole for _, rollout in sides]
    legend = el("p", el("del", f"only in {names[0]}"), " ", el("ins", f"only in {names[1]}"), class_="v-dim")
    return el("div", cards.question(sides[1][0]), el("div", *halves, class_="v-halves"),
              legend if texts[0] != texts[1] else "", diffs.words(*texts))


def best(site: Site, key: GroupKey) -> RolloutKey:
    """The key of the answer with the highest reward in a group. Raises AppError if the group does not exist."""
    view = details.group(site.library, key.run, key.source, key.step, key.group, key.split)
    return max(view.rollouts, key=lambda r: (not r.aside, r.reward is not None, r.reward or 0.0)).key


def _answer(site: Site, key: RolloutKey) -> tuple[details.GroupView, details.RolloutView]:
    view, rollout = flagging.answer(site, key)
    view = details.with_marks(site.library, dataclasses.replace(view, rollouts=(rollout,)), site.trust_tasks)
    return view, view.rollouts[0]


def _head(name: str, view: details.GroupView, rollout: details.RolloutView) -> Html:
    key = view.key
    when = f"step {key.step}" if key.source == "train" else f"{key.split} after {key.step}"
    return el("p", el("span", f"{name}: "), link(controls.target(rollout.key), f"{key.run}, {when}, #{rollout.index}"),
              join([el("span", "reward ", el("b", number(rollout.reward))),
                    el("span", f"{len(rollout.token_ids):,} tokens")]), class_="v-facts")
