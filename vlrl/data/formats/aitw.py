"""Converts steps of Android in the Wild (AITW, arXiv 2307.10088) and of AITZ, which adds chains of thought (arXiv
2403.02713), to canonical rows.

Points are [y, x] as fractions of the screen. A gesture shorter than _TAP is a tap; any other gesture is a scroll in the
direction in which the finger moves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vlrl.data.sources.box_numbers import scaled
from vlrl.data.sources.fields import RecordSource, base_fields, has, meta, numbers, row_size, text
from vlrl.data.sources.reading import Placed
from vlrl.data.values import number, short
from vlrl.errors import DataError
from vlrl.types import Record, Row

_TAP = 0.04
_GESTURE = 4
_TYPES = {3: "type", 5: "press_back", 6: "press_home", 7: "press_enter", 10: "complete", 11: "impossible"}
"""Maps result_action_type to the type of the row's action. _GESTURE, a tap or a scroll, is handled separately."""
_NAMES = {"type": 3, "dual_point": 4, "press_back": 5, "press_home": 6, "press_enter": 7, "status_task_complete": 10,
          "status_task_impossible": 11}
"""Maps the names of action types in AITW to their numbers."""
_USED = ("instruction", "goal", "result_action_type", "result_action_text", "result_touch_yx", "result_lift_yx",
         "result_action", "episode_id")


def aitw(record: Record, source: RecordSource) -> list[Row]:
    """Converts the record of one step to a row with an instruction and an action. All steps of an episode stay in one
    split."""
    row = base_fields(record, source)
    episode = {"group_key": f"episode_{record['episode_id']}"} if has(record, "episode_id") else {}
    return [{**row, "instruction": text(record, "instruction", "goal"), "action": _action(record, row),
             "platform": "mobile", **episode, **meta(record, *_USED)}]


def steps_before(rows: Placed) -> Placed:
    """Adds `history` to each row: the descriptions (`coat_action_desc`) of the earlier steps of its episode.

    Rows of files without these descriptions stay unchanged."""
    episodes: dict[str, list[tuple[float, str]]] = {}
    for _, _, row in rows:
        done = None if isinstance(row, DataError) else row.get("meta", {}).get("coat_action_desc")
        if isinstance(row, dict) and isinstance(done, str) and "group_key" in row:
            episodes.setdefault(row["group_key"], []).append((_step(row), done))
    return [(n, where, row if isinstance(row, DataError) else _with_history(row, episodes)) for n, where, row in rows]


def _with_history(row: dict[str, Any], episodes: Mapping[str, list[tuple[float, str]]]) -> dict[str, Any]:
    meta = {k: v for k, v in row.get("meta", {}).items() if k != "coat_action_desc"}
    rest = {k: v for k, v in row.items() if k != "meta"}
    before = sorted(entry for entry in episodes.get(str(row.get("group_key")), ()) if entry[0] < _step(row))
    history = {"history": [done for _, done in before]} if before else {}
    return {**rest, **history, **({"meta": meta} if meta else {})}


def _step(row: Record) -> float:
    return number(row.get("meta", {}).get("step_id")) or 0.0


def _action(record: Record, row: Record) -> dict[str, Any]:
    given, words = record.get("result_action_type"), record.get("result_action_text")
    if given is None:  # [type, text]
        both = record["result_action"]
        given, words = (*both, None, None)[:2] if isinstance(both, list) else (both, None)
    kind = _NAMES.get(str(given).lower(), number(given))
    if kind == _GESTURE:
        return _gesture(record, row)
    if kind not in _TYPES:
        raise DataError(f"result_action_type={short(given)} is not an action of Android in the Wild; known: "
                        f"{', '.join(map(str, (_GESTURE, *_TYPES)))}")
    typed = {"text": str(words)} if kind == _NAMES["type"] else {}
    return {"type": _TYPES[int(kind)], **typed}


def _gesture(record: Record, row: Record) -> dict[str, Any]:
    touch, lift = (numbers(record.get(f"result_{name}_yx"), (2,), f"result_{name}_yx") for name in ("touch", "lift"))
    down, right = lift[0] - touch[0], lift[1] - touch[1]
    if math.hypot(down, right) <= _TAP:
        return {"type": "click", "point": scaled([touch[1], touch[0]], row_size(row), 1, "result_touch_yx")}
    along, names = (down, ("up", "down")) if abs(down) >= abs(right) else (right, ("left", "right"))
    return {"type": "scroll", "direction": names[along > 0]}
