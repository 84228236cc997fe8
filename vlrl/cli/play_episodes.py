"""`vlrl play` for a task with an environment or tools: a person acts turn by turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vlrl.cli.play_display import files, read_answer, show_fields, show_media, show_parts, show_question
from vlrl.cli.terminal import formatted, show

if TYPE_CHECKING:
    from vlrl.tools.play.episodes import PlayedEpisode, PlayedTurn

_HELP = "Type an action; an empty line ends it. :oracle  :again (from the reset)  :next  :quit"
_AFTER = "Enter: next sample. Or :again, :oracle, :quit"
_ENDS = {"stop": "the environment ended the episode", "turns": "episode.max_turns", "media": "episode.max_media",
         "error": "the environment failed", "": "no more actions were given; the episode could go on"}


def split(text: str) -> list[str]:
    """Splits a text into actions at empty lines."""
    return [action for action in re.split(r"\n(?:[ \t\r]*\n)+", text) if action.strip()]


def session(start: Callable[[], PlayedEpisode], title: str) -> bool:
    """Lets a person play episodes of one sample. Returns True to go on to the next sample, or False to quit."""
    episode = _begin(start, title)
    try:
        while True:
            given = read_answer()
            command = ":next" if given is None and episode.ended else (given or ":help").strip()
            if command in (":quit", ":next"):
                return command == ":next"
            if command == ":oracle":
                actions = oracle_actions(episode)
                show_fields(9, {"oracle": None if actions else "the task knows no perfect actions for this sample "
                                "(oracle_actions)", **{f"oracle {n}": a for n, a in enumerate(actions or (), 1)}})
            elif command == ":again":
                episode.close()
                episode = _begin(start, title)
            elif episode.ended or (command.startswith(":") and "\n" not in command):
                show(_AFTER if episode.ended else _HELP, "dim")
            else:
                _show_turn(episode, episode.act(given or ""))
                if episode.ended:
                    _show_score(episode)
    finally:
        episode.close()


def oracle_actions(episode: PlayedEpisode) -> Sequence[str] | None:
    """The task's perfect actions for the sample of this episode; None if the task has none."""
    from vlrl.tools.play import episodes
    return episodes.oracle_actions(episode.task, episode.question.sample)


def _begin(start: Callable[[], PlayedEpisode], title: str) -> PlayedEpisode:
    episode = start()
    _show_start(episode, title)
    if episode.ended:
        _show_score(episode)
    else:
        show(_HELP, "dim")
    return episode


def run(episode: PlayedEpisode, actions: Sequence[str], title: str, quiet: bool = False) -> None:
    """Plays the given actions until one of them ends the episode. Unless `quiet`, prints each turn and the score."""
    try:
        if not quiet:
            _show_start(episode, title)
        for action in actions:
            if episode.ended:
                break
            turned = episode.act(action)
            if not quiet:
                _show_turn(episode, turned)
        if not quiet:
            _show_score(episode, len(actions))
    finally:
        episode.close()


def _show_start(episode: PlayedEpisode, title: str) -> None:
    from vlrl.tools.play.episodes import tool_lines
    show_question(episode.task, episode.question, title)
    for line in tool_lines(episode.task, episode.question.sample):
        show(f"tool {line}")
    show(f"at most {episode.limits.max_turns} turns and {episode.limits.max_media} pictures; tokens are not counted",
         "dim")


def _show_turn(episode: PlayedEpisode, turned: PlayedTurn) -> None:
    acted = turned.acted
    show_fields(0, {f"turn {len(episode.turns)} of {episode.limits.max_turns}  ": acted.action})
    show_media(turned.media)
    show_fields(9, {"shown": acted.observation or None,
                    "parts": "  ".join(f"{name} {value:g}" for name, value in acted.parts.items()) or None,
                    "state": acted.state, "info": json.dumps(turned.info, default=str) if turned.info else None,
                    "seconds": formatted(turned.seconds), "done": "yes" if acted.done else None, "error": acted.error})


def _show_score(episode: PlayedEpisode, given: int = 0) -> None:
    judged = episode.judged()
    show_parts(judged)
    left = given - len(episode.turns)
    show_fields(11, {"ended": _ENDS[episode.ended], "reward": formatted(judged.scored.reward),
                     "error": judged.scored.error, "left out": ", ".join(judged.skipped) or None,
                     "not played": f"{left} actions after its end" if left > 0 else None})
    if not given:
        show(_AFTER, "dim")


def as_dict(episode: PlayedEpisode, place: int, split: str) -> dict[str, Any]:
    """The episode as a JSON object, for --json."""
    judged = episode.judged()
    turns = [{"action": t.acted.action, "observation": t.acted.observation, "media": files(t.media),
              "parts": dict(t.acted.parts), "state": t.acted.state, "done": t.acted.done, "error": t.acted.error,
              "info": t.info} for t in episode.turns]
    question = episode.question
    return {"id": question.sample.id, "split": split, "index": place, "prompt": question.text,
            "media": files(question.media), "turns": turns, "ended": episode.ended or None,
            "parts": judged.scored.parts, "weights": judged.weights, "reward": judged.scored.reward,
            "correct": judged.scored.correct, "error": judged.scored.error, "skipped": judged.skipped}
