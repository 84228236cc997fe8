"""`vlrl play`: answer samples yourself and see every reward part."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, examples, load
from vlrl.cli.terminal import figure, printable, standard_input, table
from vlrl.errors import TaskError

if TYPE_CHECKING:
    from rich.console import Console

    from vlrl.task import Task
    from vlrl.tools.play import Judged, Question

PLAY_EXAMPLES = examples(
    "vlrl play configs/quickstart.yaml",
    "vlrl play configs/classification/digits.yaml --split heldout --random task.thinking=thinking",
    "vlrl play configs/quickstart.yaml --index 7 --answer '[100, 100, 500, 500]' --json",
    "cat answer.txt | vlrl play configs/quickstart.yaml --id train-000007")
_HELP = "Type an answer; an empty line ends it. :next  :oracle  :again (this one)  :quit"
_AFTER = "Enter: next sample. Or another answer to this one, :oracle, :again, :quit"
_LOCATED = {"box", "boxes", "points"}
"""Fields of a row that a task asks to locate."""
_COMMANDS = (":next", ":oracle", ":again", ":quit", ":help")


def play(
    config: ConfigPath, settings: Words = None,
    split: Annotated[str, typer.Option(help="The split to take samples from, e.g. heldout.")] = "train",
    index: Annotated[int | None, typer.Option(help="Start at this place, e.g. 7; -1 is the last.")] = None,
    sample_id: Annotated[str | None, typer.Option("--id", help="Start at the sample with this id, e.g. "
                                                  "train-000007.")] = None,
    shuffled: Annotated[bool, typer.Option("--random", help="Samples in random order.")] = False,
    answer: Annotated[str | None, typer.Option(help="Judge this one answer and leave, e.g. '[1, 2, 3, 4]'. Text piped "
                                               "into the command does the same.")] = None,
    as_json: AsJson = False,
) -> None:
    """Answer a sample yourself and see every reward part, the target and the task's perfect answer. Needs no model.

    An answer may have several lines; an empty line ends it, and one more goes to the next sample. Commands: :next,
    :oracle, :again (shows this sample once more), :quit.
    """
    if (index is not None) + (sample_id is not None) + shuffled > 1:
        raise typer.BadParameter("give one of --index, --id and --random")
    if answer is None and not standard_input().isatty():
        answer = standard_input().buffer.read().decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
    if as_json and answer is None:
        raise typer.BadParameter("--json goes with --answer, or an answer from a pipe")
    loaded = load(config, settings)
    from rich.console import Console

    from vlrl.tools.play import ask, judge, walk
    from vlrl.tools.score_rows import to_json
    from vlrl.training.build_task import make_task

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing
    task, console = make_task(loaded), Console(highlight=False)
    folder = Path(tempfile.mkdtemp(prefix="vlrl-play-"))  # stays, so that a picture can be opened afterwards
    try:
        for place, sample in walk(task, split, index, sample_id, shuffled):
            question = ask(task, sample, loaded.limits, folder)
            if answer is not None and as_json:
                typer.echo(to_json(_as_dict(task, question, judge(task, question, answer), place, split)))
            elif answer is not None:
                _show_question(console, task, question, f"{split} {place}")
                _show_judged(console, task, question, answer)
            elif _session(console, task, question, f"{split} {place}"):
                continue
            return
        console.print("no more samples")
    except (KeyboardInterrupt, EOFError):
        console.print()


def _session(console: Console, task: Task, question: Question, title: str) -> bool:
    """Plays one sample until the person goes on (True) or leaves (False)."""
    _show_question(console, task, question, title)
    console.print(_HELP, style="dim", markup=False)
    judged = False
    while True:
        given = _read_answer()
        command = ":next" if given is None and judged else (given or ":help").strip()
        if command == ":quit":
            return False
        if command == ":next":
            return True
        if command == ":oracle":
            _show_oracle(console, task, question)
        elif command == ":again":
            _show_question(console, task, question, title)
        elif command.startswith(":") and "\n" not in command:
            console.print(_HELP, style="dim", markup=False)
        else:
            _show_judged(console, task, question, given or "")
            console.print(_AFTER, style="dim", markup=False)
            judged = True


def _read_answer() -> str | None:
    """Returns lines up to an empty one or to the end of input, or one command; None for an empty line alone.

    Raises EOFError when the input has ended.
    """
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


def _show_question(console: Console, task: Task, question: Question, title: str) -> None:
    from rich.panel import Panel
    from rich.text import Text

    console.print(Panel(Text(printable(question.text)), title_align="left",
                        title=Text(f"{title}  {printable(question.sample.id, 80)}")))
    for shown in question.media:
        size = f"{shown.size[0]}x{shown.size[1]}" if shown.size else "not readable"
        console.print(Text(f"{shown.kind}  {size}  {printable(shown.path or shown.problem)}"), soft_wrap=True)
        if shown.problem and shown.path:
            console.print(Text(printable(shown.problem), "red"), soft_wrap=True)
        if shown.frame is not None and console.is_terminal and console.color_system in ("256", "truecolor"):
            _preview(console, shown.frame)
    how = _convention(task, question) if _LOCATED & question.sample.row.keys() else None
    if how:
        console.print(Text(f"boxes and points: {how}", "dim"), soft_wrap=True)


def _preview(console: Console, frame: Any) -> None:
    from rich.text import Text

    from vlrl.tools.play import half_blocks

    for line in half_blocks(frame, min(64, console.width), 20):
        text = Text()
        for above, below in line:
            text.append("▀", f"rgb({','.join(map(str, above))}) on rgb({','.join(map(str, below))})")
        console.print(text)


def _show_judged(console: Console, task: Task, question: Question, text: str) -> None:
    """Prints an answer, its parts beside those of the oracle, and what is wrong with its form."""
    from rich.text import Text

    from vlrl.tools.play import judge, target

    judged = judge(task, question, text)
    _print_parts(console, judged)
    lines = {"reward": figure(judged.scored.reward), "parsed": judged.scored.parsed,
             "target": target(task, question), "error": judged.scored.error,
             "left out": ", ".join(judged.skipped) or None, "format": "; ".join(judged.complaints) or None}
    for name, value in lines.items():
        if value is not None or name == "parsed":
            console.print(Text.assemble((f"{name:<9}", "bold"), printable(value)), soft_wrap=True)
    _show_oracle(console, task, question)


def _show_oracle(console: Console, task: Task, question: Question) -> None:
    from rich.text import Text

    from vlrl.tools.play import oracle

    best = oracle(task, question)
    if best is None:
        console.print("oracle   the task knows no perfect answer to this sample")
        return
    parts = "  ".join(f"{name} {figure(value)}" for name, value in best.scored.parts.items())
    console.print(Text.assemble(("oracle   ", "bold"), printable(best.text)), soft_wrap=True)
    console.print(Text(f"         reward {figure(best.scored.reward)}  ({parts})", "dim"), soft_wrap=True)


def _print_parts(console: Console, judged: Judged) -> None:
    from rich.text import Text

    shown = table("part", "value", "weight")
    for name, value in judged.scored.parts.items():
        shown.add_row(*(Text(cell) for cell in (printable(name), figure(value), f"{judged.weights[name]:g}")))
    console.print(shown)


def _convention(task: Task, question: Question) -> str | None:
    """Returns how boxes are to be written; None where the model's family is not known, which a task without boxes needs
    not.
    """
    own = question.sample.get("coordinates")
    try:
        used = str(own or task.of(question.sample).coordinates.convention)
    except TaskError:
        return None
    return {"original": "pixels of the image", "processed": "pixels of the image", "norm1000": "0 to 1000 of width and "
            "height", "norm999": "0 to 999 of width and height", "norm1": "0 to 1 of width and height"}.get(used, used)


def _as_dict(task: Task, question: Question, judged: Judged, place: int, split: str) -> dict[str, Any]:
    from vlrl.tools.play import oracle, target

    best = oracle(task, question)
    media = [{"kind": m.kind, "path": m.path, "size": m.size, "problem": m.problem or None} for m in question.media]
    return {
        "id": question.sample.id, "split": split, "index": place, "prompt": question.text, "media": media,
        "answer": judged.text, "parts": judged.scored.parts, "weights": judged.weights, "reward": judged.scored.reward,
        "parsed": judged.scored.parsed, "target": target(task, question), "error": judged.scored.error,
        "skipped": judged.skipped, "complaints": judged.complaints,
        "oracle": best and {"text": best.text, "parts": best.scored.parts, "reward": best.scored.reward}}
