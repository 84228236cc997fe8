"""Generates the tables in docs/configuration.md from the settings classes. Does not import torch.

`python -m vlrl.tools.docs` rewrites everything below the line MARK in that page. The text above is written by hand."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, get_type_hints

from vlrl.config.descriptions import format_value, type_text

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration.md"
COMMAND = "python -m vlrl.tools.docs"
MARK = f"<!-- Below this line the page is written by `{COMMAND}`; edit vlrl/config or the task instead. -->\n"



def page(text: str) -> str:
    """Returns the page `text` (docs/configuration.md) with everything below the line MARK replaced by new tables."""
    head, mark, _ = text.partition(MARK)
    return f"{head}{mark or MARK}\n{tables()}"


def tables() -> str:
    """Markdown tables of every setting by section, followed by the fields of the built-in tasks."""
    from vlrl.config import describe
    from vlrl.config.schema import Config, resumable

    rows = [(f"`{name}`", kind, _code(default), "may change" if resumable(name) else "", text)
            for name, kind, default, text in describe()]
    sections = {info.alias or name: info.annotation for name, info in Config.model_fields.items()}
    out = []
    for section, group in groupby(rows, key=lambda row: row[0].strip("`").rpartition(".")[0].split(".")[0]):
        model = sections[section] if section else None
        out += [f"## {section or 'The run as a whole'}", _purpose(model), _table(
            ("setting", "value", "default", "on resume", "meaning"), list(group))]
    return "\n\n".join([*out, "## Fields of the built-in tasks", *_tasks()]) + "\n"


def _tasks() -> Iterator[str]:
    """Yields Markdown: a paragraph and a table for the settings that every task has, and then, for each built-in task,
    a heading, a paragraph and a table of its own settings."""
    from vlrl.task import Task, builtin_names, load_class

    yield _wrap("A task's own fields are settings too, checked against their types: `task.<field>`. Those of your "
                "own task are its annotated class attributes. Every task has:")
    yield _table(("setting", "value", "default", "meaning"), _fields(Task))
    for name in builtin_names():
        cls = load_class(name)
        weights = ", ".join(f"`task.rewards.{part}={format_value(w)}`" for part, w in cls.rewards_for({}).items())
        yield f"### {name}"
        first = inspect.cleandoc(cls.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        yield _wrap(f"{first} Weights: {weights or 'none'}.")
        fields = _fields(cls)
        if fields:
            yield _table(("setting", "value", "default", "meaning"), fields)


def _fields(cls: type) -> list[tuple[str, str, str, str]]:
    (body,) = [node.body for node in ast.parse(textwrap.dedent(inspect.getsource(cls))).body
               if isinstance(node, ast.ClassDef)]
    hints, rows = get_type_hints(cls, include_extras=True), []
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            name = node.target.id
            if not name.startswith("_") and "ClassVar" not in ast.unparse(node.annotation):
                rows.append((f"`task.{name}`", type_text(hints[name]), _code(getattr(cls, name)), _text_of(after)))
    return rows


def _text_of(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return " ".join(node.value.value.split())
    return ""


def _purpose(model: Any) -> str:
    own = getattr(model, "__dict__", {}).get("__doc__")
    return " ".join((own or "Number of steps, random seed, and whether to resume.").split())


def _wrap(text: str) -> str:
    return textwrap.fill(text, 120, break_on_hyphens=False)


def _code(value: Any) -> str:
    return f"`{format_value(value)}`".replace("\n", "\\n")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(text: str) -> str:
    """Escapes a text for a cell of a Markdown table. HTML tags outside of code are escaped too."""
    text = text.replace("|", "\\|")
    return text if text.startswith("`") else re.sub(r"<(?=[/A-Za-z])", "&lt;", text)


def main() -> None:
    """Rewrites docs/configuration.md."""
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
