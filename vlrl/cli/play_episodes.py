"""`vlrl play` for a task with an environment or tools: a person acts turn by turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlrl.cli.terminal import formatted, printable, show, show_table
from vlrl.errors import TaskError

if TYPE_CHECKING:
    from vlrl.task import Task
    from vlrl.tools.play.questions import Question, QuestionMedia, ScoredAnswer

if TYPE_CHECKING:
    from vlrl.tools.play.episodes import PlayedEpisode, PlayedTurn

_HELP = "Type an action; an empty line ends it. :oracle  :again (from the reset)  :next  :quit"
_AFTER = "Enter: next sample. Or :again, :oracle, :quit"
_ENDS = {"stop": "the environment ended the episode", "turns": "episode.max_turns", "media": "episode.max_media",
         "error": "the environment failed", "": "no more actions were given; the episode could go on"}


def split(text: str) -> list[str]:
    """Splits a text at its empty lines into the actions of an episode."""
    return [action for action in re.split(r"\n(?:[ \t\r]*\n)+", text) if action.strip()]


def session(start: Callable[[], PlayedEpisode], title: str) -> bool:
    """Lets a person play episodes begun by `start`. Returns whether the person goes on to the next sample."""
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
    """Plays the actions in order until the episode ends. Unless `quiet`, prints each turn and the score."""
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
    """The episode as a JSON object, for --json; `place` is the index of its sample in the split."""
    judged = episode.judged()
    turns = [{"action": t.acted.action, "observation": t.acted.observation, "media": files(t.media),
              "parts": dict(t.acted.parts), "state": t.acted.state, "done": t.acted.done, "error": t.acted.error,
              "info": t.info} for t in episode.turns]
    question = episode.question
    return {"id": question.sample.id, "split": split, "index": place, "prompt": question.text,
            "media": files(question.media), "turns": turns, "ended": episode.ended or None,
            "parts": judged.scored.parts, "weights": judged.weights, "reward": judged.scored.reward,
            "correct": judged.scored.correct, "error": judged.scored.error, "skipped": judged.skipped}


_LOCATED = {"box", "boxes", "points"}
"""Fields of a row whose presence means that the answer is a location."""
_COMMANDS = (":next", ":oracle", ":again", ":quit", ":help")


def read_answer() -> str | None:
    """Reads one answer from the terminal: the lines up to an empty line or the end of input, or a command such as
    ":next". Returns None if the first line is empty. Raises EOFError at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input("| " if lines else "> ")
        except EOFError:
            if not lines:
                raise
            break
        if not line.strip():
            break
        lines.append(line)
        if len(lines) == 1 and line.strip() in _COMMANDS:
            break
    return "\n".join(lines) if lines else None


def show_fields(width: int, fields: Mapping[str, object]) -> None:
    """Prints one line per value that is not None: its name in bold, padded to `width` characters, and the value."""
    from rich.console import Console
    from rich.text import Text
    for name, value in fields.items():
        if value is not None:
            Console(highlight=False).print(Text.assemble((f"{name:<{width}}", "bold"), printable(value)),
                                           soft_wrap=True)


def show_question(task: Task, question: Question, title: str) -> None:
    """Prints the question, the paths of its images and videos, and the format in which boxes are expected."""
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text
    Console(highlight=False).print(Panel(Text(printable(question.text)), title_align="left",
                                         title=Text(f"{title}  {printable(question.sample.id, 80)}")))
    show_media(question.media)
    how = _convention(task, question) if _LOCATED & question.sample.row.keys() else None
    if how:
        show(f"boxes and points: {how}", "dim")


def show_media(media: Sequence[QuestionMedia]) -> None:
    """Prints the kind, size and path of each image and video."""
    for shown in media:
        size = f"{shown.size[0]}x{shown.size[1]}" if shown.size else "not readable"
        show(f"{shown.kind}  {size}  {printable(shown.path or shown.problem)}")
        if shown.problem and shown.path:
            show(shown.problem, "red")


def show_parts(judged: ScoredAnswer) -> None:
    """Prints the reward parts of a scored answer with their weights."""
    show_table(("part", "value", "weight"), ((name, formatted(value), f"{judged.weights[name]:g}")
                                             for name, value in judged.scored.parts.items()))


def _convention(task: Task, question: Question) -> str | None:
    """Describes the coordinate format in which answers to the question give boxes; None if the format is unknown."""
    own = question.sample.get("coordinates")
    try:
        used = str(own or task.of(question.sample).coordinates.convention)
    except TaskError:
        return None
    return {"original": "pixels of the image", "processed": "pixels of the image", "norm1000": "0 to 1000 of width and "
            "height", "norm999": "0 to 999 of width and height", "norm1": "0 to 1 of width and height"}.get(used, used)


def files(media: Any) -> list[dict[str, Any]]:
    """Describes images and videos for JSON output: one dictionary for each, with kind, path, size and problem."""
    return [{"kind": m.kind, "path": m.path, "size": m.size, "problem": m.problem or None} for m in media]
