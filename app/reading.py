"""The reading view of one answer: the raw text next to its rendered Markdown and LaTeX."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from . import cards
from .details import GroupView, RolloutView
from .html import Html, el, link, number
from .marks import color

ORDERS = {"": "as drawn", "best": "best first", "worst": "worst first"}
"""Order of a group's answers -> its label."""


def ordered(view: GroupView, first: str) -> GroupView:
    """The group with its answers sorted by `first`, one of ORDERS; answers without a reward come last."""
    if first not in ("best", "worst"):
        return view
    sign = -1.0 if first == "best" else 1.0
    return dataclasses.replace(view, rollouts=tuple(sorted(
        view.rollouts, key=lambda r: (r.reward is None, sign * (r.reward or 0.0), r.index))))


def view_links(where: Mapping[str, Any]) -> list[Html]:
    """Links that change the view: one answer or all answers, and the order of the answers."""
    first = where.get("first", "") if where.get("first", "") in ORDERS else ""
    after = list(ORDERS)[(list(ORDERS).index(first) + 1) % len(ORDERS)]
    reads = where.get("read") == "yes"
    return [link({**where, "first": after}, f"order: {ORDERS[first]}", data_key="o", data_replace=True,
                 title=f"order of the answers; then {ORDERS[after]} (o)"),
            link({**where, "read": "" if reads else "yes"}, "all answers" if reads else "read", data_key="r",
                 data_replace=True, title="all answers side by side (r)" if reads else
                 "one answer, as written and as Markdown (r)")]


def answer(view: GroupView, chosen: int | None, links: Mapping[str, Any], notes: Mapping[int, Html]) -> Html:
    """The chosen answer (else the first one) at full width, below links to the other answers with their rewards."""
    one = next((r for r in view.rollouts if r.index == chosen), view.rollouts[0] if view.rollouts else None)
    if one is None:
        return cards.strip(view)
    others = [link({**links, **cards.where(view, rollout=r.index)}, _swatch(r), f" #{r.index} ",
                   el("b", number(r.reward)), class_="v-pick", data_replace=True,
                   aria_current="true" if r is one else None)
              for r in view.rollouts[:cards.MOST_CARDS]]
    tools = el("div", el("button", "copy ", el("kbd", "y"), type="button", class_="v-tool v-copy",
                         data_copy=one.completion),
               el("button", "to the answer ", el("kbd", "a"), type="button", class_="v-tool v-jump"),
               el("span", "", role="status"), class_="v-tools")
    shown = cards.card(view, one, None, True, links, notes.get(one.index, ""), tools=tools)
    return el("div", el("nav", *others, class_="v-picks", aria_label="Answers of the group"), shown,
              class_="v-reads")


def _swatch(rollout: RolloutView) -> Html:
    return el("i", class_="v-swatch", style=f"background:{color(rollout.index)}")
