"""`vlrl play` for a task with an environment or tools: a person acts, turn by turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vlrl.cli.play_display import files, print_parts, read_answer, show_media, show_question
from vlrl.cli.terminal import formatted, printable

if TYPE_CHECKING:
    from rich.console import Console

    from vlrl.tools.play.episodes import PlayedEpisode, PlayedTurn

_HELP = "Type an action; an empty line ends it. :oracle  :again (from the reset)  :next  :quit"
_AFTER = "Enter: next sample. Or :again, :oracle, :quit"
_ENDS = {"stop": "its environment ended it", "turns": "episode.max_turns", "media": "episode.max_media",
         "error": "its environment failed", "": "no more actions; it could go on"}


def split(text: str) -> list[str]:
    """The actions in a text, separated by empty lines."""
    return [action for action in re.split(r"\n(?:[ \t\r]*\n)+", text) if action.strip()]


def session(console: Console, start: Callable[[], PlayedEpisode], title: str) -> bool:
    """Plays episodes of one sample until the person continues (True) or quits (False)."""
    episode = _begun(console, start, title)
    try:
        while True:
            given = read_answer()
            command = ":next" if given is None and episode.ended else (given or ":help").strip()
            if command in (":quit", ":next"):
                return command == ":next"
            if command == ":oracle":
                _show_oracle(console, episode)
            elif command == ":again":
                episode.close()
                episode = _begun(console, start, title)
            elif episode.ended or (command.startswith(":") and "\n" not in command):
                console.print(_AFTER if episode.ended else _HELP, style="dim", markup=False)
            else:
                _show_turn(console, episode, episode.act(given or ""))
                if episode.ended:
                    _show_score(console, episode)
    finally:
        episode.close()


def _begun(console: Console, start: Callable[[], PlayedEpisode], title: str) -> PlayedEpisode:
    episode = start()
    _show_start(console, episode, title)
    if episode.ended:
        _show_score(console, episode)
    else:
        console.print(_HELP, style="dim", markup=False)
    return episode


def run(console: Console, episode: PlayedEpisode, actions: Sequence[str], title: str, quiet: bool = False) -> None:
    """Plays given actions until one ends the episode, and shows turns and score, unless `quiet`."""
    try:
        if not quiet:
            _show_start(console, episode, title)
        for action in actions:
            if episode.ended:
                break
            turned = episode.act(action)
            if not quiet:
                _show_turn(console, episode, turned)
        if not quiet:
            _show_score(console, episode, len(actions))
    finally:
        episode.close()


def _show_start(console: Console, episode: PlayedEpisode, title: str) -> None:
    from rich.text import Text

    from vlrl.tools.play.episodes import tool_lines

    show_question(console, episode.task, episode.question, title)
    for line in tool_lines(episode.task, episode.question.sample):
        console.print(Text(f"tool {printable(line)}"), soft_wrap=True)
    limits = f"at most {episode.limits.max_turns} turns and {episode.limits.max_media} pictures; tokens are not counted"
    console.print(limits, style="dim", highlight=False)


def _show_turn(console: Console, episode: PlayedEpisode, turned: PlayedTurn) -> None:
    from rich.text import Text

    acted = turned.acted
    head = f"turn {len(episode.turns)} of {episode.limits.max_turns}"
    console.print(Text.assemble((f"{head}  ", "bold"), printable(acted.action)), soft_wrap=True)
    show_media(console, turned.media)
    parts = "  ".join(f"{name} {value:g}" for name, value in acted.parts.items())
    lines = {"shown": acted.observation or None, "parts": parts or None,
             "state": acted.state, "info": json.dumps(turned.info, default=str) if turned.info else None,
             "seconds": formatted(turned.seconds), "done": "yes" if acted.done else None, "error": acted.error}
    for name, value in lines.items():
        if value is not None:
            console.print(Text.assemble((f"{name:<9}", "bold"), printable(value)), soft_wrap=True)


def _show_score(console: Console, episode: PlayedEpisode, given: int = 0) -> None:
    from rich.text import Text

    judged = episode.judged()
    print_parts(console, judged)
    left = given - len(episode.turns)
    lines = {"ended": _ENDS[episode.ended], "reward": formatted(judged.scored.reward), "error": judged.scored.error,
             "left out": ", ".join(judged.skipped) or None,
             "not played": f"{left} actions after its end" if left > 0 else None}
    for name, value in lines.items():
        if value is not None:
            console.print(Text.assemble((f"{name:<11}", "bold"), printable(value)), soft_wrap=True)
    if not given:
        console.print(_AFTER, style="dim", markup=False)


def _show_oracle(console: Console, episode: PlayedEpisode) -> None:
    from rich.text import Text

    from vlrl.tools.play.episodes import oracle_actions

    actions = oracle_actions(episode.task, episode.question.sample)
    if actions is None:
        console.print("oracle   the task knows no perfect actions for this sample (oracle_actions)")
    for place, action in enumerate(actions or (), 1):
        console.print(Text.assemble((f"oracle {place}  ", "bold"), printable(action)), soft_wrap=True)


def as_dict(episode: PlayedEpisode, place: int, split: str) -> dict[str, Any]:
    """The episode for --json."""
    judged = episode.judged()
    turns = [{"action": t.acted.action, "observation": t.acted.observation, "media": files(t.media),
              "parts": dict(t.acted.parts), "state": t.acted.state, "done": t.acted.done, "error": t.acted.error,
              "info": t.info} for t in episode.turns]
    question = episode.question
    return {"id": question.sample.id, "split": split, "index": place, "prompt": question.text,
            "media": files(question.media), "turns": turns, "ended": episode.ended or None,
            "parts": judged.scored.parts, "weights": judged.weights, "reward": judged.scored.reward,
            "correct": judged.scored.correct, "error": judged.scored.error, "skipped": judged.skipped}
