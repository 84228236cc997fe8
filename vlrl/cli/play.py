"""`vlrl play`: answer samples yourself and see the value of every reward part."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from vlrl.cli.common import AsJson, ConfigPath, Words, examples, load
from vlrl.cli.play_episodes import files, read_answer, show_fields, show_parts, show_question
from vlrl.cli.terminal import formatted, printable, show, standard_input
from vlrl.errors import ConfigError

if TYPE_CHECKING:
    from vlrl.config.schema import Config
    from vlrl.task import Task
    from vlrl.tools.play.episodes import PlayedEpisode
    from vlrl.tools.play.questions import Question, ScoredAnswer
    from vlrl.types import Sample

_HELP = "Type an answer; an empty line ends it. :next  :oracle  :again (this one)  :quit"
_AFTER = "Enter: next sample. Or another answer to this one, :oracle, :again, :quit"


@examples(
    "vlrl play configs/quickstart.yaml",
    "vlrl play configs/classification/digits.yaml --split heldout --random task.thinking=thinking",
    "vlrl play configs/quickstart.yaml --index 7 --answer '[100, 100, 500, 500]' --json",
    "cat answer.txt | vlrl play configs/quickstart.yaml --id train-000007")
def play(
    config: ConfigPath, settings: Words = None,
    split: Annotated[str, typer.Option(help="The split to take samples from, e.g. heldout.")] = "train",
    index: Annotated[int | None, typer.Option(help="Start at the sample with this index, e.g. 7; -1 is the "
                                                   "last.")] = None,
    sample_id: Annotated[str | None, typer.Option("--id", help="Start at the sample with this id, e.g. "
                                                  "train-000007.")] = None,
    shuffled: Annotated[bool, typer.Option("--random", help="Show the samples in random order.")] = False,
    answer: Annotated[str | None, typer.Option(help="Score this one answer and exit, e.g. '[1, 2, 3, 4]'. Text piped "
                                                    "into the command is treated the same way.")] = None,
    oracle: Annotated[bool, typer.Option("--oracle", help="Score the task's perfect answer, or play its perfect "
                                                          "actions, and exit.")] = False,
    as_json: AsJson = False,
) -> None:
    """Answer a sample yourself and see every reward part, the target and the task's perfect answer. No model is needed.

    An answer may have several lines and ends with an empty line; another empty line goes on to the next sample.
    Commands: :next, :oracle (shows the perfect answer), :again (shows this sample once more), :quit. If the task has an
    environment or tools, you act turn by turn and see the observation after each action; in --answer and in piped text,
    actions are separated by an empty line."""
    if (index is not None) + (sample_id is not None) + shuffled > 1:
        raise typer.BadParameter("give only one of --index, --id and --random")
    if oracle and answer is not None:
        raise typer.BadParameter("give only one of --answer and --oracle")
    if answer is None and not oracle and not standard_input().isatty():
        answer = standard_input().buffer.read().decode("utf-8", "replace").removesuffix("\n").removesuffix("\r")
    if as_json and answer is None and not oracle:
        raise typer.BadParameter("--json needs --answer, --oracle, or an answer from a pipe")
    loaded = load(config, settings)
    from vlrl.tools.play import episodes
    from vlrl.tools.play.questions import walk
    from vlrl.training.build_task import make_task

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 - gives input() its line editing
    task = make_task(loaded)
    folder = Path(tempfile.mkdtemp(prefix="vlrl-play-"))  # not removed, so that images can be opened afterwards
    given = _Given(split, answer, oracle, as_json)
    try:
        with episodes.environments(loaded, task) as host:
            for place, sample in walk(task, split, index, sample_id, shuffled):
                shown = episodes.after_reset(loaded, host, sample, place) if host else sample
                if host and shown.opening is not None:
                    more = _episode(partial(episodes.PlayedEpisode, loaded, task, host, shown, folder), place, given)
                else:
                    more = _answered(task, shown, loaded, folder, place, given)
                if not more:
                    return
        show("no more samples")
    except (KeyboardInterrupt, EOFError):
        show("")


class _Given(NamedTuple):
    split: str
    answer: str | None
    oracle: bool
    as_json: bool


def _answered(task: Task, sample: Sample, config: Config, folder: Path, place: int, given: _Given) -> bool:
    from vlrl.tools.play.questions import ask, judge, oracle
    from vlrl.tools.tasks.score_rows import to_json
    question, answer, title = ask(task, sample, config.limits, folder), given.answer, f"{given.split} {place}"
    if given.oracle:
        best = oracle(task, question)
        if best is None:
            raise ConfigError(f"--oracle: task '{task.name}' has no perfect answer to sample '{sample.id}'. Give an "
                              "answer with --answer")
        answer = best.text
    if answer is None:
        return _session(task, question, title)
    if given.as_json:
        typer.echo(to_json(_as_dict(task, question, judge(task, question, answer), place, given.split)))
    else:
        show_question(task, question, title)
        _show_judged(task, question, answer)
    return False


def _episode(start: Callable[[], PlayedEpisode], place: int, given: _Given) -> bool:
    from vlrl.cli import play_episodes
    from vlrl.tools.tasks.score_rows import to_json
    title = f"{given.split} {place}"
    if given.answer is None and not given.oracle:
        return play_episodes.session(start, title)
    episode = start()
    actions = play_episodes.oracle_actions(episode) if given.oracle else play_episodes.split(given.answer or "")
    if actions is None:
        raise ConfigError(f"--oracle: task '{episode.task.name}' has no perfect actions for sample "
                          f"'{episode.question.sample.id}' (oracle_actions). Give actions with --answer")
    play_episodes.run(episode, actions, title, given.as_json)
    if given.as_json:
        typer.echo(to_json(play_episodes.as_dict(episode, place, given.split)))
    return False


def _session(task: Task, question: Question, title: str) -> bool:
    """Lets a person answer one sample. Returns whether the person goes on to the next sample."""
    show_question(task, question, title)
    show(_HELP, "dim")
    judged = False
    while True:
        given = read_answer()
        command = ":next" if given is None and judged else (given or ":help").strip()
        if command in (":quit", ":next"):
            return command == ":next"
        if command == ":oracle":
            _show_oracle(task, question)
        elif command == ":again":
            show_question(task, question, title)
        elif command.startswith(":") and "\n" not in command:
            show(_HELP, "dim")
        else:
            _show_judged(task, question, given or "")
            show(_AFTER, "dim")
            judged = True


def _show_judged(task: Task, question: Question, text: str) -> None:
    from vlrl.tools.play.questions import judge, target
    judged = judge(task, question, text)
    show_parts(judged)
    show_fields(9, {"reward": formatted(judged.scored.reward), "parsed": printable(judged.scored.parsed),
                    "target": target(task, question), "error": judged.scored.error,
                    "left out": ", ".join(judged.skipped) or None, "format": "; ".join(judged.complaints) or None})
    _show_oracle(task, question)


def _show_oracle(task: Task, question: Question) -> None:
    from vlrl.tools.play.questions import oracle
    best = oracle(task, question)
    show_fields(9, {"oracle": best.text if best else "the task knows no perfect answer to this sample"})
    if best:
        parts = "  ".join(f"{name} {formatted(value)}" for name, value in best.scored.parts.items())
        show(f"         reward {formatted(best.scored.reward)}  ({parts})", "dim")


def _as_dict(task: Task, question: Question, judged: ScoredAnswer, place: int, split: str) -> dict[str, Any]:
    from vlrl.tools.play.questions import oracle, target
    best = oracle(task, question)
    return {
        "id": question.sample.id, "split": split, "index": place, "prompt": question.text,
        "media": files(question.media),
        "answer": judged.text, "parts": judged.scored.parts, "weights": judged.weights, "reward": judged.scored.reward,
        "parsed": judged.scored.parsed, "target": target(task, question), "error": judged.scored.error,
        "skipped": judged.skipped, "complaints": judged.complaints,
        "oracle": best and {"text": best.text, "parts": best.scored.parts, "reward": best.scored.reward}}
