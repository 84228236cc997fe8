"""Generates the tables in docs/configuration.md from the settings classes, and those in docs/commands.md from the help
of the commands. Does not import torch.

`python -m vlrl.tools.docs` rewrites everything below the line MARK in these pages. The text above it is written by
hand."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from vlrl.config.descriptions import format_value, summary
from vlrl.config.registry import Table

DOCS = Path(__file__).resolve().parents[2] / "docs"
COMMAND = "python -m vlrl.tools.docs"
_LONGEST = 32
"""Characters of a default that a table shows."""
MARK = f"<!-- Below this line the page is written by `{COMMAND}`; edit vlrl/config or the task instead. -->\n"

_CLI = Table({"app": "vlrl.cli.main:app", "groups": "vlrl.cli.main:GROUPS"})


def page(text: str, below: str) -> str:
    """Returns the page `text` with everything below the line MARK replaced by the text `below`."""
    head, mark, _ = text.partition(MARK)
    return f"{head}{mark or MARK}\n{below}"


def commands() -> str:
    """Markdown tables of every command by the groups of `vlrl --help`: the first clause of its help."""
    from typer.main import get_command

    known, out = getattr(get_command(_CLI["app"]), "commands"), []  # noqa: B009 - click's types do not know it
    for heading, names in _CLI["groups"].items():
        rows = []
        for name in names:
            below = getattr(known[name], "commands", None)
            each = {f"{name} {sub}": one for sub, one in below.items()} if below else {name: known[name]}
            rows += [(f"`vlrl {words}`", re.split(r"[:;,.]\s|\s\(|\.$", one.help)[0]) for words, one in each.items()]
        out += [f"## {heading}", _table(rows, ("command", "purpose"))]
    return "\n\n".join(out) + "\n"


def tables() -> str:
    """Markdown tables of every setting by section, followed by the fields of the built-in tasks: name, default, and the
    first sentence of the description."""
    from vlrl.config import describe
    from vlrl.config.schema import Config

    rows = [(f"`{name}`", _code(default), summary(text)) for name, _, default, text in describe()]
    sections = {info.alias or name: info.annotation for name, info in Config.model_fields.items()}
    out = []
    for section, group in groupby(rows, key=lambda row: row[0].strip("`").rpartition(".")[0].split(".")[0]):
        model = sections[section] if section else None
        out += [f"## {section or 'The run as a whole'}", _purpose(model), _table(list(group))]
    return "\n\n".join([*out, "## Fields of the built-in tasks", *_tasks()]) + "\n"


def _tasks() -> Iterator[str]:
    """Yields Markdown: a table of the settings that every task has, and then, for each built-in task, a heading and a
    table of its own settings."""
    from vlrl.task import Task, builtin_names, load_class

    yield _wrap("A task's own fields are settings, too: `task.<field>`, the annotated class attributes of the task. "
                "`vlrl tasks list` shows the weights of each task. Every task has:")
    yield _table([(*row[:2], summary(row[2])) for row in _fields(Task)])
    for name in builtin_names():
        if fields := _fields(load_class(name)):
            yield f"### {name}"
            yield _table([(*row[:2], summary(row[2])) for row in fields])


def _fields(cls: type) -> list[tuple[str, str, str]]:
    """(name, default, description) of each setting that the class of a task defines itself."""
    (body,) = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(cls))).body
               if isinstance(node, ast.ClassDef)]
    rows = []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            name = node.target.id
            if not name.startswith("_") and "ClassVar" not in ast.unparse(node.annotation):
                rows.append((f"`task.{name}`", _code(getattr(cls, name)), _text_of(after)))
    return rows


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _purpose(model: Any) -> str:
    own = getattr(model, "__dict__", {}).get("__doc__")
    return summary(" ".join((own or "Number of steps, random seed, and whether to resume.").split()))


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _code(value: Any) -> str:
    text = format_value(value).replace("\n", "\\n")
    return f"`{text if len(text) <= _LONGEST else text[:_LONGEST - 2] + ' …'}`"


def _table(rows: Sequence[Sequence[str]], head: Sequence[str] = ("setting", "default", "meaning")) -> str:
    """A Markdown table without outer bars."""
    lines = [" | ".join(map(_cell, line)) for line in rows]
    return "\n".join([" | ".join(head), "|".join(["---"] * len(head)), *lines])


def _cell(text: str) -> str:
    """Escapes a text for a cell of a Markdown table. HTML tags outside of code are escaped too."""
    text = text.replace("|", "\\|")
    return text if text.startswith("`") else re.sub(r"<(?=[/A-Za-z])", "&lt;", text)


PAGES = {"configuration.md": tables, "commands.md": commands}
"""Name of a page -> function that makes the text below the line MARK."""


def main() -> None:
    """Rewrites the pages."""
    for name, below in PAGES.items():
        path = DOCS / name
        path.write_text(page(path.read_text(encoding="utf-8"), below()), encoding="utf-8")


if __name__ == "__main__":
    main()
