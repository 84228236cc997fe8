"""Shows the episode of a rollout turn by turn, as HTML: each action next to the observation that followed it.

    shown = read(view, rollout, convention)
    html = strip(view, rollout, shown, addresses)

Everything comes from files: texts, JSON and numbers may have any content."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from vlrl.data.coordinates import Convention
from vlrl.errors import VlrlError
from vlrl.types import Sample

from . import draw
from .details import GroupView, MediaView, RolloutView, decoded
from .html import MOST, Html, as_json, chip, el, finite, folded, join, note, number
from .marks import Shape, color, coordinates_of

MOST_TURNS = 256
"""Largest number of turns shown."""
_MOST_CALLS = 32  # per turn
_MOST_PICTURES = 8
_FRAMES = 4  # per video
_LEAST_TEXT = 600  # characters shown of each text, however many texts there are
_LINES = 8  # per card
ENDS = {"turns": "limit of turns", "tokens": "limit of the episode's tokens", "media": "limit of the episode's media"}
"""Finish reasons of episodes ended by a limit -> their description."""


@dataclass(frozen=True)
class Call:
    """A tool call in an action. `error` is empty unless the call failed."""

    name: str
    arguments: Any
    error: str


@dataclass(frozen=True, eq=False)
class TurnView:
    """An action of an episode and its result. The first TurnView of an episode is the prompt, which has no action."""

    action: str | None
    observation: str = ""
    media: tuple[MediaView | None, ...] = ()
    """Images and videos of the observation. None stands for a file that is missing from the rollout's media."""
    parts: Mapping[str, float | None] | None = None
    state: str | None = None
    done: bool = False
    seconds: float | None = None
    error: str | None = None
    calls: tuple[Call, ...] = ()
    info: Any = None
    """Further information that the environment returned."""
    advantage: float | None = None
    marks: tuple[Shape, ...] = ()
    """Boxes from later tool calls that refer to the last image of this turn."""


def is_episode(rollout: RolloutView) -> bool:
    return bool(rollout.episode_id and rollout.turns)


def read(view: GroupView, rollout: RolloutView, convention: str = "original") -> list[TurnView]:
    """Reads the turns of an episode; the first one is the prompt. `convention` is the coordinate convention in which
    the model writes boxes."""
    known = {m.hash: m for m in rollout.media}
    out = [TurnView(None, media=view.media)]
    actions = 0
    for turn in rollout.turns[:2 * MOST_TURNS]:
        if turn["role"] == "observation":
            shown = tuple(known.get(name) for name in turn["media"] or ())
            out[-1] = replace(out[-1], observation=turn["text"] or "", media=(*out[-1].media, *shown))
            continue
        acted = _acted(turn, _advantage(rollout, actions))
        actions += 1
        place = next((i for i in reversed(range(len(out))) if _last_image(out[i])), None)
        if place is not None:
            boxes = _boxes(acted.calls, _last_image(out[place]), view, rollout, convention)
            out[place] = replace(out[place], marks=(*out[place].marks, *boxes))
        out.append(acted)
    return out


def _acted(turn: Mapping[str, Any], advantage: float | None) -> TurnView:
    info = decoded(turn["info"])
    calls = calls_of(info)
    rest = {k: v for k, v in info.items() if k != "calls" or not calls} if isinstance(info, dict) else info
    parts = None if turn["parts"] is None else {str(k): finite(v) for k, v in turn["parts"]}
    return TurnView(turn["text"] or "", parts=parts, state=turn["state"], done=bool(turn["done"]),
                    seconds=finite(turn["seconds"]), error=turn["error"], calls=calls, info=rest, advantage=advantage)


def node_value(turn: Mapping[str, Any]) -> float | None:
    """The value of a tree search node; None for a turn that is not such a node."""
    info = decoded(turn["info"])
    return finite(info["value"]) if isinstance(info, dict) and info.keys() == {"value", "visits"} else None


def calls_of(info: Any) -> tuple[Call, ...]:
    """The tool calls in the `info` of a turn; () if `info` holds no list of calls."""
    calls = info.get("calls") if isinstance(info, dict) else None
    return tuple(Call(as_json(c.get("name"), 0)[:80], c.get("arguments"), as_json(c["error"]) if c.get("error") else "")
                 for c in calls[:_MOST_CALLS] if isinstance(c, dict)) if isinstance(calls, list) else ()


def _advantage(rollout: RolloutView, action: int) -> float | None:
    values = rollout.turn_advantages
    return finite(float(values[action])) if values is not None and action < len(values) else None


def _last_image(turn: TurnView) -> MediaView | None:
    return next((m for m in reversed(turn.media) if m and m.kind == "image"), None)


def _boxes(calls: Sequence[Call], picture: MediaView | None, view: GroupView, rollout: RolloutView,
           convention: str) -> list[Shape]:
    if picture is None or picture.size is None:
        return []
    own = {"coordinates": view.sample["coordinates"]} if isinstance(view.sample.get("coordinates"), str) else {}
    row = {"width": picture.size[0], "height": picture.size[1], **own}
    if picture.processed_size:
        row["processed_size"] = list(picture.processed_size)
    shapes = []
    for call in calls:
        for name, value in call.arguments.items() if isinstance(call.arguments, dict) else ():
            if "box" not in str(name) or coordinates_of("box", value) is None:
                continue
            try:
                at = Convention(convention).to_original(Sample(id=view.sample_id, row=row), value)
            except VlrlError:  # its size is not stored
                continue
            if place := coordinates_of("box", at):
                words = f"{call.name}{' failed' if call.error else ''}"
                shapes.append(Shape("box", place, words, rollout.index))
    return shapes


def strip(view: GroupView, rollout: RolloutView, turns: Sequence[TurnView], addresses: draw.Addresses) -> Html:
    """The HTML of the turns side by side. In the app, the arrow keys move between the turns."""
    texts = sum(1 + (t.action is not None) + len(t.calls) for t in turns)
    most = max(_LEAST_TEXT, MOST // texts)
    shown = [_turn(view, place, turn, addresses, most) for place, turn in enumerate(turns[:MOST_TURNS + 1])]
    left = sum(t["role"] != "observation" for t in rollout.turns) - (len(shown) - 1)
    more = el("p", f"{left} more turns, too many to show.", class_="v-dim") if left > 0 else ""
    return el("div", *shown, more, class_="v-turns v-scroll", role="group", aria_label="Turns of the episode",
              style=f"--v-c:{color(rollout.index)}")


def _turn(view: GroupView, place: int, turn: TurnView, addresses: draw.Addresses, most: int) -> Html:
    chips, error = _chips(turn), note("Environment: ", turn.error, kind="bad") if turn.error else ""
    head = el("div", el("b", f"Turn {place}" if place else "Prompt"), *chips, class_="v-chips")
    action = "" if turn.action is None else _said("Action", turn.action or "(empty)", most)
    calls = [_call(call, most) for call in turn.calls]
    words = _said("Observation", turn.observation, most) if turn.observation else ""
    info = el("details", el("summary", "info"), folded(as_json(turn.info, 40), most, "pre", most=most)) \
        if turn.info else ""
    return el("article", head, action, *calls, error, _pictures(view, place, turn, addresses), words, info,
              class_="v-turn", tabindex="0" if place == 0 else "-1", aria_label=f"turn {place}")


def _said(title: str, words: str, most: int) -> Html:
    return el("div", el("h4", title), folded(words, _LEAST_TEXT, most=most))


def _call(call: Call, most: int) -> Html:
    head = el("div", el("code", call.name, class_="v-tag"), chip("error", "bad") if call.error else "")
    error = el("div", folded(call.error, _LEAST_TEXT, most=most), class_="v-note bad") if call.error else ""
    return el("div", head, folded(as_json(call.arguments, 60), _LEAST_TEXT, "pre", most=most), error, class_="v-call")


def _chips(turn: TurnView) -> list[Html]:
    chips = [chip(f"{name} {number(value)}", "good" if value and value > 0 else "bad" if value else "", "a reward part")
             for name, value in (turn.parts or {}).items()]
    if turn.advantage is not None:
        kind = "good" if turn.advantage > 0 else "bad" if turn.advantage < 0 else ""
        chips.append(chip(f"A {number(turn.advantage, sign=True)}", kind, "advantage of the turn"))
    if turn.state is not None:
        chips.append(chip(f"state {turn.state[:80]}", title=turn.state[:1000]))
    if turn.seconds is not None:
        chips.append(chip(f"{number(turn.seconds)} s", title="of the environment"))
    return [*chips, *([chip("done", "good")] if turn.done else [])]


def _pictures(view: GroupView, place: int, turn: TurnView, addresses: draw.Addresses) -> Html:
    last, figures = _last_image(turn), []
    for i, one in enumerate(turn.media[:_MOST_PICTURES]):
        if one is None:
            figures.append(el("p", "a picture that is not among the rollout's media", class_="v-dim"))
        elif one.kind == "video":
            figures.append(draw.frames(view, one, (), addresses, most=_FRAMES))
        else:
            marks = turn.marks if one is last else ()
            figures.append(draw.picture(view, one, marks, addresses, f"picture {i + 1} of turn {place}"))
    left = len(turn.media) - len(figures)
    return join([*figures, el("p", f"{left} more pictures", class_="v-dim") if left > 0 else ""])


def lines(rollout: RolloutView) -> Html:
    """The HTML list of an episode's first actions for its card, with one line for each action."""
    acted = [t for t in rollout.turns if t["role"] != "observation"]
    rows = []
    for place, turn in enumerate(acted[:_LINES], 1):
        parts = [f"{name} {number(value)}" for name, value in turn["parts"] or () if finite(value)]
        said = " ".join((turn["text"] or "").split())[:160]
        rows.append(el("li", el("span", str(place), class_="v-dim"), el("span", said or "(empty)"),
                       chip("error", "bad", turn["error"][:300]) if turn["error"] else "",
                       el("span", ", ".join(parts[:4]), class_="v-dim")))
    left = len(acted) - len(rows)
    more = el("li", el("span"), el("span", f"{left} more turns", class_="v-dim")) if left > 0 else ""
    return el("ol", *rows, more, class_="v-turn-lines")
