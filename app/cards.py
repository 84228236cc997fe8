"""HTML of one group: prompt, media with all marks, and the answers side by side. All functions are pure."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

from . import draw, forms, turns
from .details import GroupView, RolloutView
from .html import Html, as_json, chip, el, finite, folded, join, link, note, number
from .marks import COLORS, color

__all__ = ["COLORS", "card", "color", "group", "head", "strip"]
MOST_CARDS = 64
"""Largest number of answers shown side by side."""
_MANY = 4
"""From this number of images on, the images form a grid beside the answers."""
_LONG_PROMPT = 1200  # characters; a longer one is folded
_MARKUP = re.compile(r"(<\|\w{1,40}\|>)")  # special tokens of the chat template
Links = bool | Mapping[str, Any]


def group(view: GroupView, addresses: draw.Addresses, chosen: int | None = None, links: Links = True,
          most_frames: int = draw.FRAMES, notes: Mapping[int, Html] | None = None, answers: Html | None = None) -> Html:
    """The HTML of a whole group: header, prompt, media and answers. `chosen` is the index of the highlighted answer.
    `links` is True for links to other pages of the app, a mapping of URL parameters that these links keep, or False
    for a page outside the app. `notes` maps an answer index to the HTML of the notes on its card. `answers` is HTML
    to show instead of the answer cards. For the other arguments see draw.media."""
    pictures = len(view.media) if all(one.kind != "video" for one in view.media) else 0
    beside = " v-beside" if pictures == 1 else " v-many" if pictures >= _MANY else ""
    return el("section", head(view, links), question(view), draw.media(view, addresses, chosen, most_frames),
              strip(view, chosen, links, notes) if answers is None else answers, class_=f"v v-group{beside}")


def where(view: GroupView, **more: Any) -> dict[str, Any]:
    """Returns the URL parameters of the page of this group, for links. The parameters in `more` are added."""
    key = view.key
    return {"page": "rollouts", "run": key.run, "source": key.source, "split": key.split, "step": key.step,
            "group": key.group, **more}


def _link(links: Links, query: Mapping[str, Any], words: str, title: str) -> Html:
    if links is False:
        return el("b", words)
    return link({**(links if isinstance(links, Mapping) else {}), **query}, words, title=title)


def head(view: GroupView, links: Links = True) -> Html:
    """The header of a group: task, sample, step, split and ids, followed by statistics of its rewards (mean, standard
    deviation, best, worst, and whether all are equal). For `links` see `group`."""
    key = view.key
    history = {"page": "history", "run": key.run, "sample": view.sample_id}
    sample = _link(links, history, view.sample_id, "this prompt over the steps")
    facts = [el("span", el("b", view.task)), el("span", "sample ", sample),
             el("span", f"{'evaluation' if key.source == 'eval' else 'step'} {key.step}"), el("span", key.split),
             el("span", f"group {key.group}")]
    facts += [el("span", view.category)] if view.category else []
    facts += [el("span", f"difficulty {number(view.difficulty)}")] if view.difficulty is not None else []
    notes = [note(words, kind="warn") for words in view.notes]
    title = el("h3", f"Group {key.group}", class_="v-unseen")
    return el("header", title, el("div", *facts, class_="v-facts"), el("div", *_tiles(view), class_="v-tiles"), *notes)


def _tiles(view: GroupView) -> list[Html]:
    members = [r for r in view.rollouts if not r.aside]
    if view.mean is None:
        return [_tile("answers", str(len(members)))]
    spread = f"{number(view.mean)} ± {number(view.std)}" if len(members) > 1 else number(view.mean)
    tiles = [_tile("reward, mean ± std" if len(members) > 1 else "reward", spread),
             _tile("best", number(view.best)), _tile("worst", number(view.worst)),
             _tile("answers", str(len(members)))]
    if len(view.rollouts) > len(members):
        tiles.append(_tile("beside the group", str(len(view.rollouts) - len(members))))
    if view.zero_variance and len(members) > 1:
        tiles.append(chip("zero variance", "warn", "every answer got the same reward: nothing to learn from"))
    return tiles


def _tile(name: str, value: Any) -> Html:
    return el("div", el("span", name), el("b", value), class_="v-tile")


def question(view: GroupView) -> Html:
    """The prompt, target and data row of a group."""
    row = {k: v for k, v in view.sample.items() if v is not None}
    return el("div", el("div", el("h4", "Prompt"), _prompt(view.prompt), class_="v-half"),
              el("div", el("h4", "Target"), folded(as_json(view.target), 1200, "pre"),
                 el("details", el("summary", "Data row"), folded(as_json(row, 0), 20_000, "pre")),
                 class_="v-half"), class_="v-question")


def _prompt(text: str) -> Html:
    if len(text) > _LONG_PROMPT:
        return folded(text, _LONG_PROMPT)
    pieces = [el("code", piece, class_="v-tag") if i % 2 else piece for i, piece in enumerate(_MARKUP.split(text))]
    return el("div", *pieces, class_="v-text")


def strip(view: GroupView, chosen: int | None = None, links: Links = True,
          notes: Mapping[int, Html] | None = None) -> Html:
    """The answers of a group as cards in a horizontally scrolling strip; on a narrow screen the cards are stacked. Of
    more than MOST_CARDS answers, a part that includes answer `chosen` is shown. For the arguments see `group`."""
    if not view.rollouts:
        return el("p", "The group has no answers.", class_="v-dim")
    most, place = _largest(view), next((i for i, r in enumerate(view.rollouts) if r.index == chosen), 0)
    first = place - place % MOST_CARDS  # the chosen answer is among those shown
    cards = [card(view, rollout, most, rollout.index == chosen, links, (notes or {}).get(rollout.index, ""))
             for rollout in view.rollouts[first:first + MOST_CARDS]]
    return el("div", *cards, _more(view, first, links), class_="v-strip", tabindex="0", role="group",
              aria_label="Answers of the group")


def _more(view: GroupView, first: int, links: Links) -> Html:
    left = len(view.rollouts) - len(view.rollouts[first:first + MOST_CARDS])
    if not left:
        return Html("")
    begins = [view.rollouts[at].index for at in (first - MOST_CARDS, first + MOST_CARDS)
              if 0 <= at < len(view.rollouts)] if links is not False else []
    ways = [_link(links, where(view, rollout=index), f"from #{index} on", "these answers") for index in begins]
    return el("p", join([f"{left} more answers, too many to show side by side.", *ways], " "), class_="v-dim")


def _largest(view: GroupView) -> dict[str, float]:
    most: dict[str, float] = {}
    for rollout in view.rollouts:
        for name, value in rollout.parts.items():
            most[name] = max(most.get(name, 1.0), abs(finite(value) or 0.0))
    return most


def card(view: GroupView, rollout: RolloutView, most: Mapping[str, float] | None = None, chosen: bool = False,
         links: Links = True, remark: Html | str = "", tools: Html | None = None) -> Html:
    """The card of one answer: notes (`remark`), reward and reward parts, advantage, format problems, reasoning, answer,
    parsed value, and scoring error. `most` maps a reward part to the value at which its bar has full length.
    `chosen` highlights the card, and for `links` see `group`. `tools` are controls above the text; with them the
    answer is not shortened, and is shown both raw and rendered."""
    form = None if turns.is_episode(rollout) else forms.read(
        rollout.completion, view.prompt, rollout.truncated, forms.common_tags([r.whole for r in view.rollouts]),
        rollout.opened)
    title = _link(links, where(view, rollout=rollout.index), f"#{rollout.index}", "its tokens")
    given = any(r.advantage is not None or r.aside for r in view.rollouts)  # not in evaluations and the playground
    advantage = _advantage(rollout) if given and view.key.source == "train" else ""
    top = el("div", el("i", class_="v-swatch", style=f"background:{color(rollout.index)}"), title,
             el("b", number(rollout.reward), class_="v-reward", title="reward"), _outcome(rollout), advantage,
             class_="v-top")
    broken = [chip(problem, "bad") for problem in form.problems] if form else []
    error = note("Scorer: ", rollout.error, kind="bad") if rollout.error else ""
    return el("article", top, remark, el("div", *_chips(rollout), class_="v-chips"),
              _parts(rollout, most or _largest(view)), el("div", *broken, class_="v-chips") if broken else "", error,
              _said(form, tools) if form else turns.lines(rollout), _parsed(view, rollout),
              class_=f"v-card{' v-chosen' if chosen else ''}",
              id=f"v-answer-{rollout.index}", style=f"--v-c:{color(rollout.index)}",
              aria_current="true" if chosen else None)


def _outcome(rollout: RolloutView) -> Html | str:
    if rollout.correct is None:
        return ""
    return chip("correct", "good", "by the task's outcome") if rollout.correct else chip("wrong", "bad")


def _advantage(rollout: RolloutView) -> Html:
    value = finite(rollout.advantage)
    if value is None:
        return el("span", "beside the group" if rollout.aside else "no advantage", class_="v-dim")
    kind = "good" if value > 0 else "bad" if value < 0 else ""
    return el("span", "A ", number(value, sign=True), class_=f"v-sign {kind}".strip(), title="advantage")


def _chips(rollout: RolloutView) -> list[Html]:
    ended = "ended by its environment" if rollout.episode_id else "ended by itself"
    reasons = {"stop": ended, "length": "token limit", **turns.ENDS}
    chips = [chip(f"{len(rollout.token_ids):,} tokens")]
    if rollout.finish_reason:
        chips.append(chip(reasons.get(rollout.finish_reason, rollout.finish_reason),
                          "" if rollout.finish_reason == "stop" else "bad", "why the answer ended"))
    if rollout.policy_step is not None:
        chips.append(chip(f"policy {rollout.policy_step}", title="steps completed by the weights that sampled it"))
    if rollout.variant:
        how = {"guided": "a second attempt, with guidance behind the question", "greedy": "drawn at temperature 0",
               "replaced": "a second attempt has its place in the group",
               "kept": "found by a search at an earlier visit to the prompt"}
        chips.append(chip(f"variant {rollout.variant}", "warn", how.get(rollout.variant, "drawn with other media")))
    count = sum(turn["role"] != "observation" for turn in rollout.turns)
    if count > 1:
        nodes = [value for turn in rollout.turns if (value := turns.node_value(turn)) is not None]
        chips.append(chip(f"{len(nodes)} nodes", title=f"their values: {', '.join(map(number, nodes))}") if nodes
                     else chip(f"{count} turns"))
    chips += [chip(f"{name} {number(value)}", title="a metric of the task") for name, value in rollout.metrics.items()]
    return chips


def _parts(rollout: RolloutView, most: Mapping[str, float]) -> Html:
    rows = []
    for name, raw in rollout.parts.items():
        value, weight = finite(raw), finite(rollout.weights.get(name))
        share = 0.0 if value is None else min(abs(value) / most.get(name, 1.0), 1.0)
        against = value is not None and value * (1.0 if weight is None else weight) < 0
        bar = el("i", class_=f"v-fill{' v-minus' if against else ''}{' v-off' if weight == 0 else ''}",
                 style=f"width:{100 * share:.1f}%")
        words = "none" if value is None else number(value)
        times = f" × {number(weight)}" if weight is not None else ""
        rows.append(el("div", el("span", name, class_="v-name", title=name), el("span", bar, class_="v-track"),
                       el("span", words, el("span", times, class_="v-dim"), class_="v-num"), class_="v-part"))
    return el("div", *rows, class_="v-parts") if rows else el("p", "no reward parts", class_="v-dim")


def _said(form: forms.Form, tools: Html | None) -> Html:
    if tools is None:
        return _text(form)
    from . import prose  # needs the extra `app`, which a report must do without
    halves = (("As written", lambda text: el("span", text)), ("As Markdown and LaTeX", prose.rendered))
    return el("div", tools, *(el("section", el("h4", name), _text(form, body), aria_label=name)
                              for name, body in halves), class_="v-both")


def _text(form: forms.Form, body: Callable[[str], Html] | None = None) -> Html:
    body = body or (lambda text: folded(text, tag="span"))
    if not form.pieces:
        return el("p", "The answer is empty.", class_="v-dim")
    shown = [p for p in form.pieces if p.tag or p.kind != "outside" or p.bad]  # omits white space between tags
    runs = groupby(shown, key=lambda p: p.kind)
    return el("div", *(_block(kind, list(run), body) for kind, run in runs), class_="v-said")


def _block(kind: str, run: Sequence[forms.Piece], render: Callable[[str], Html]) -> Html:
    body = [el("code", p.text, class_=f"v-tag{' bad' if p.bad else ''}") if p.tag else render(p.text) for p in run]
    if kind == "reasoning":
        return el("details", el("summary", "Reasoning"), el("div", *body, class_="v-text"), class_="v-think", open=True)
    outside = kind == "outside"
    return el("div", *body, class_=f"v-text {'v-stray' if outside else 'v-final'}",
              title="outside of all tags" if outside else None)


def _parsed(view: GroupView, rollout: RolloutView) -> Html:
    same = rollout.parsed is not None and rollout.parsed == view.target
    mark = chip("same", "good") if same else ""
    read = folded(as_json(rollout.parsed, 40), 600, "pre") if rollout.parsed is not None else el(
        "p", "nothing could be read", class_="v-dim")
    kept = () if rollout.extra is None else (
        el("div", el("h5", "Kept by its method"), folded(as_json(rollout.extra, 40), 600, "pre")),)
    return el("div", el("div", el("h5", "Read ", mark), read), el("div", el("h5", "Target"),
              folded(as_json(view.target, 40), 600, "pre")), *kept, class_="v-pair")


ORDERS = {"": "as drawn", "best": "best first", "worst": "worst first"}
"""URL parameter `first` -> label of this order of a group's answers."""


def ordered(view: GroupView, first: str) -> GroupView:
    """Returns the group with its answers sorted by reward, the best or the worst first. Answers without a reward come
    last. `first` is "best" or "worst"; for any other text the group is returned unchanged."""
    if first not in ("best", "worst"):
        return view
    sign = -1.0 if first == "best" else 1.0
    return dataclasses.replace(view, rollouts=tuple(sorted(
        view.rollouts, key=lambda r: (r.reward is None, sign * (r.reward or 0.0), r.index))))


def view_links(where: Mapping[str, Any]) -> list[Html]:
    """Two links: one to the next order of the answers, and one that switches between one answer and all answers."""
    first = where.get("first", "") if where.get("first", "") in ORDERS else ""
    after = list(ORDERS)[(list(ORDERS).index(first) + 1) % len(ORDERS)]
    reads = where.get("read") == "yes"
    return [link({**where, "first": after}, f"order: {ORDERS[first]}", data_key="o", data_replace=True,
                 title=f"order of the answers; then {ORDERS[after]} (o)"),
            link({**where, "read": "" if reads else "yes"}, "all answers" if reads else "read", data_key="r",
                 data_replace=True, title="all answers side by side (r)" if reads else
                 "one answer, as written and as Markdown (r)")]


def reading_view(view: GroupView, chosen: int | None, links: Mapping[str, Any], notes: Mapping[int, Html]) -> Html:
    """The answer `chosen` (else the first one) at full width, below links to all answers with their rewards."""
    one = next((r for r in view.rollouts if r.index == chosen), view.rollouts[0] if view.rollouts else None)
    if one is None:
        return strip(view)
    others = [link({**links, **where(view, rollout=r.index)},
                   el("i", class_="v-swatch", style=f"background:{color(r.index)}"), f" #{r.index} ",
                   el("b", number(r.reward)), class_="v-pick", data_replace=True,
                   aria_current="true" if r is one else None) for r in view.rollouts[:MOST_CARDS]]
    tools = el("div", el("button", "copy ", el("kbd", "y"), type="button", class_="v-tool v-copy",
                         data_copy=one.completion),
               el("button", "to the answer ", el("kbd", "a"), type="button", class_="v-tool v-jump"),
               el("span", "", role="status"), class_="v-tools")
    shown = card(view, one, None, True, links, notes.get(one.index, ""), tools=tools)
    return el("div", el("nav", *others, class_="v-picks", aria_label="Answers of the group"), shown,
              class_="v-reads")
