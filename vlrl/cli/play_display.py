"""Terminal input and output for `vlrl play`, for single answers and episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vlrl.cli.terminal import formatted, printable, show, show_table
from vlrl.errors import TaskError

if TYPE_CHECKING:
    from vlrl.task import Task
    from vlrl.tools.play.questions import Question, QuestionMedia, ScoredAnswer

_LOCATED = {"box", "boxes", "points"}
"""Fields of a row that show that its answer is a location."""
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
    """Prints one line per value that is not None, after its name in bold, padded to `width` characters."""
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
    """The coordinate format of boxes in answers; None if it is unknown because the task has no boxes."""
    own = question.sample.get("coordinates")
    try:
        used = str(own or task.of(question.sample).coordinates.convention)
    except TaskError:
        return None
    return {"original": "pixels of the image", "processed": "pixels of the image", "norm1000": "0 to 1000 of width and "
            "height", "norm999": "0 to 999 of width and height", "norm1": "0 to 1 of width and height"}.get(used, used)


def files(media: Any) -> list[dict[str, Any]]:
    """Describes images and videos for JSON output: kind, path, size and problem."""
    return [{"kind": m.kind, "path": m.path, "size": m.size, "problem": m.problem or None} for m in media]
