"""All rules of rows and files, in the order in which they are printed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vlrl.checks import answers, columns, fields, files, media
from vlrl.checks.finding import Finding
from vlrl.checks.rule import CheckedRow, Context, Found, Rule

RULES: tuple[Rule, ...] = (
    Rule(name="row", scope="row", find=lambda row, context: [row.error] if row.error else []),
    Rule(name="id", scope="file", find=files.ids_twice, start="warning"),
    *(Rule(name=f"field/{name}", scope="row", find=find, start="warning") for name, find in fields.RULES.items()),
    Rule(name="media/unshown", scope="row", find=media.not_shown),
    Rule(name="media", scope="row", find=media.unusable),
    Rule(name="size", scope="row", find=media.other_size),
    Rule(name="size/refused", scope="row", find=media.refused),
    Rule(name="size/turned", scope="row", find=media.turned, level="warning"),
    Rule(name="size/length", scope="row", find=media.other_length),
    Rule(name="box", scope="row", find=media.boxes),
    Rule(name="oracle", scope="row", find=answers.earned_in_full, cost="whole"),
    Rule(name="leak", scope="file", find=files.leaks, start="warning"),
    Rule(name="leak/prompt", scope="file", find=files.same_prompts, cost="whole"),
    Rule(name="leak/look", scope="file", find=files.look_alikes, cost="whole", level="warning"),
    Rule(name="box/units", scope="file", find=columns.box_units, level="warning"),
    Rule(name="unread", scope="file", find=columns.unread, level="warning"),
)


def row_findings(row: CheckedRow, context: Context, *, at_start: bool = False, whole: bool = True) -> list[Finding]:
    """Adds what the row rules say of a row to its findings, and returns it; without `whole` by the cheap rules alone,
    `at_start` these at their level there.
    """
    begun = len(row.findings)
    for rule in _rules("row", whole and not at_start):
        row.findings += [_finding(rule, row, found, at_start) for found in rule.find(row, context)]
    return row.findings[begun:]


def file_findings(rows: Sequence[CheckedRow], context: Context, *, at_start: bool = False) -> list[Finding]:
    """Adds what the file rules say to the findings of the rows, and returns it."""
    out = []
    for rule in _rules("file", not at_start):
        for found in rule.find(rows, context):
            out.append(_finding(rule, rows[found.row], found, at_start))
            rows[found.row].findings.append(out[-1])
    return out


def _rules(scope: str, whole: bool) -> Iterator[Rule]:
    return (rule for rule in RULES if rule.scope == scope and (whole or rule.cost == "cheap"))


def _finding(rule: Rule, row: CheckedRow, found: str | Found, at_start: bool) -> Finding:
    message, level = (found, None) if isinstance(found, str) else (found.message, found.level)
    level = level or (at_start and rule.start) or rule.level
    return Finding(rule=rule.name, level=level, id=row.id, where=row.where,
                   message=message.removeprefix(f"row {row.id!r}: "))
