"""`vlrl presets`: lists the presets that `extends=` can add to a config."""

from pathlib import PurePosixPath
from typing import Annotated

import typer

from vlrl.cli.common import AsJson, emit, examples
from vlrl.errors import ConfigError, did_you_mean

FOLDERS = {"algorithm": "algorithms", "curriculum": "curricula", "stages": "stages"}


@examples(
    "vlrl presets                              all presets",
    "vlrl presets grpo                         presets with this text in name, idea, needs or paper",
    "vlrl presets --for recall                 those whose method acts on configs/recall.yaml",
    "vlrl presets --json | jq -r '.[] | select(.kind == \"curriculum\") | .name'")
def presets(
    word: Annotated[str | None, typer.Argument(metavar="WORD", show_default=False, help=(
        "Only list presets with this text in their name, idea, requirements or paper, e.g. gspo or retries."))] = None,
    task: Annotated[str | None, typer.Option("--for", metavar="TASK", show_default=False, help=(
        "Only list presets for this task or shipped config, e.g. recall."))] = None,
    json: AsJson = False,
) -> None:
    """List the presets: objectives, curricula and stages from published methods, which extends= adds to any config.

    Each preset is listed with its idea, the shipped config that it was made for, what it needs in that config, its cost
    relative to a run without the preset, and its paper."""
    from vlrl.config.presets import NEEDS, shipped
    rows = [preset.row() for preset in shipped()]
    if task is not None:
        known = sorted({str(row["for"]).removesuffix(".yaml") for row in rows})
        rows = [row for row in rows if task in _names_of(str(row["for"]))]
        if not rows:
            raise ConfigError(f"--for {task}: there is no preset for this task or config.{did_you_mean(task, known)} "
                              f"Name one of the configs {', '.join(known)}, or the task of one of them")
    if word is not None:
        fields = ("name", "idea", "needs", "paper")
        rows = [row for row in rows if any(word.lower() in str(row[field]).lower() for field in fields)]
    if json:
        return emit([{**row, "needs": [f"{need}: {why}" for need, why in row["needs"].items()]} for row in rows])
    for row in rows:
        typer.echo(f"{FOLDERS[row['kind']]}/{row['name']}.yaml: {row['idea']}")
        typer.echo(f"  {row['paper']}; for {row['for']}; costs {row['cost']}")
        for need, why in row["needs"].items():
            first, _, which = need.partition(" ")
            typer.echo(f"  needs {NEEDS[first]}{f': {which}' if which else ''} ({why})")
    if not rows:
        typer.echo(f"no preset has {word!r} in its name, idea, needs or paper")


def _names_of(shipped: str) -> set[str]:
    from vlrl import config
    path = PurePosixPath(shipped)
    names = {shipped, f"configs/{shipped}", path.stem, str(path.with_suffix("")), *path.parts[:-1]}
    return names | {entry.name for entry in config.load(f"configs/{shipped}").each_task}
