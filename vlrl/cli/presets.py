"""`vlrl presets`: lists the presets that `extends=` can add to a config, or shows one of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from vlrl.config.presets import Preset

WIDTH = 100
COLUMNS = {"name": 21, "idea": 40, "needs": 14, "cost": 11, "paper": 10}
"""Column of the table -> its width. Longer texts are cut."""
SHORT = {"answers": "single turn", "writes": "certain text", "reference_reward": "slow reference",
         "parts": "several parts"}
"""First word of a need -> what the table calls it. Others are called by their argument, or by the word itself."""
TEXTS = ("name", "idea", "group", "needs", "sets_not", "paper")
"""Fields of a row that WORD is looked for in."""


@examples(
    "vlrl presets                              all presets, by what they change",
    "vlrl presets length                       those with this text in name, idea, group, needs or paper",
    "vlrl presets gspo                         all about one preset",
    "vlrl presets --for recall                 those that act on configs/recall.yaml",
    "vlrl presets --json | jq -r '.[] | select(.kind == \"curriculum\") | .name'")
def presets(
    word: Annotated[str | None, typer.Argument(metavar="WORD", show_default=False, help=(
        "The name of a preset, to see all about it; or a text, to list presets with this text in their name, idea, "
        "group, requirements or paper, e.g. retries."))] = None,
    task: Annotated[str | None, typer.Option("--for", metavar="TASK", show_default=False, help=(
        "Only list presets for this task or shipped config, e.g. recall."))] = None,
    json: AsJson = False,
) -> None:
    """List presets of published methods: objectives, curricula and stages, which extends= adds to any config.

    The table has a line for each preset: its idea, what it needs in a config, what it costs beside a run without it,
    and its paper (a number is one of arXiv); +1 stands for one more need or cost. With the name of a preset the whole
    description follows, with what of the paper the preset does not set."""
    from vlrl.config.presets import shipped
    every = shipped()
    found = every if task is None else _of_task(every, task)
    if word is not None:
        found = [one for one in found if _has(one, word)]
    if json:
        return emit([{**row, "needs": [f"{need}: {why}" for need, why in row["needs"].items()]}
                     for row in (one.row() for one in found)])
    if word is not None and (named := _named(found, word)):
        typer.echo("\n\n".join(_card(one) for one in named))
        more = ", ".join(one.name for one in found if one not in named)
        return typer.echo(f"\nmore presets with this text: {more}") if more else None
    for line in _table(found):
        typer.echo(line)
    if not found:
        _say_nothing_found(word or "", every)


def _has(preset: Preset, word: str) -> bool:
    row = preset.row()
    return bool(_named([preset], word)) or any(word.lower() in str(row[field]).lower() for field in TEXTS)


def _named(found: list[Preset], word: str) -> list[Preset]:
    """The presets with exactly this name, which may have the form of extends=: gspo, gspo.yaml, algorithms/gspo.yaml.
    """
    path = PurePosixPath(word)
    return [one for one in found if one.name == path.name.removesuffix(".yaml")
            and (len(path.parts) == 1 or one.extends.startswith(f"{path.parts[0]}/"))]


def _say_nothing_found(word: str, every: list[Preset]) -> None:
    from vlrl.config.presets import moved_hint
    file = f"{PurePosixPath(word).name.removesuffix('.yaml')}.yaml"
    hint = moved_hint(file) or did_you_mean(word, [one.name for one in every])
    typer.echo(f"no preset has {word!r} in its name, idea, group, needs or paper.{hint}")


def _of_task(every: list[Preset], task: str) -> list[Preset]:
    found = [one for one in every if task in _names_of(one.task)]
    if not found:
        known = sorted({one.task.removesuffix(".yaml") for one in every})
        raise ConfigError(f"--for {task}: there is no preset for this task or config.{did_you_mean(task, known)} "
                          f"Name one of the configs {', '.join(known)}, or the task of one of them")
    return found


def _table(found: list[Preset]) -> list[str]:
    """The lines of the table: for each group a heading, and a line for each of its presets."""
    from vlrl.config.presets import GROUPS
    out = [_line(COLUMNS)] if found else []
    for group, about in GROUPS.items():
        members = [one for one in found if one.group == group]
        out += ["", f"{group}: {about}", *map(_line, map(_cells, members))] if members else []
    return [*out, "", "vlrl presets NAME shows all about one, and the extends= that adds it"] if found else []


def _line(cells: Iterable[str]) -> str:
    texts = zip(cells, COLUMNS.values(), strict=True)
    return " ".join(text[:width].ljust(width) for text, width in texts).rstrip()


def _cells(preset: Preset) -> list[str]:
    from vlrl.config.preset_header import costs_in_short
    return [preset.name, preset.idea, _first([_short(need) for need in preset.row()["needs"]], COLUMNS["needs"]),
            _first(costs_in_short(preset.cost), COLUMNS["cost"]),
            preset.paper.removeprefix("arXiv ").replace("of this project", "vlrl")]


def _short(need: str) -> str:
    word, _, which = need.partition(" ")
    return SHORT.get(word) or which.rpartition(".")[2] or word


def _first(entries: list[str], width: int) -> str:
    """The first entry, cut to a width together with the number of further ones: "episodes +1"."""
    more = f" +{len(entries) - 1}" if len(entries) > 1 else ""
    return entries[0][:width - len(more)] + more if entries else ""


def _card(preset: Preset) -> str:
    """All about one preset."""
    from vlrl.config.preset_header import NEEDS
    from vlrl.config.presets import GROUPS
    row = preset.row()
    needs = []
    for need, why in row["needs"].items():
        first, _, which = need.partition(" ")
        needs.append(f"{NEEDS[first]}{f': {which}' if which else ''} ({why})")
    evidence = preset.evidence or ("no recorded run; benchmarks/results/preset_effects.md has its effect on one batch "
                                   "or on the draws")
    paper = [] if preset.kind == "stages" else ["learning rate, batch size and data of the paper: no preset sets them"]
    fields = {"idea": [preset.idea], "group": [f"{preset.group}: {GROUPS[preset.group]}"],
              "made for": [f"configs/{preset.task}"], "needs": needs or ["nothing"],
              "does not set": [*row["sets_not"], *paper] or ["nothing that is known"],
              "costs": [row["cost"]], "paper": [preset.paper], "evidence": [evidence],
              "add it": [f"extends={preset.extends}"]}
    return "\n".join([preset.name, *(_field(name, text) for name, texts in fields.items() for name, text in zip(
        [name, *[""] * (len(texts) - 1)], texts, strict=True))])


def _field(name: str, text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent=f"  {name:<14}", subsequent_indent=" " * 16,
                         break_long_words=False, break_on_hyphens=False)


def _names_of(shipped: str) -> set[str]:
    from vlrl import config
    path = PurePosixPath(shipped)
    names = {shipped, f"configs/{shipped}", path.stem, str(path.with_suffix("")), *path.parts[:-1]}
    return names | {entry.name for entry in config.load(f"configs/{shipped}").each_task}
