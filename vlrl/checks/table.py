"""The table of all rules of rows and files, in the order in which findings are printed, and functions that apply them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vlrl.checks import answers, columns, fields, files, media
from vlrl.checks.finding import Finding
from vlrl.checks.rule import CheckedRow, Context, Rule

RULES: tuple[Rule, ...] = (
    Rule(name="row", scope="row", find=lambda row, context: [row.error] if row.error else []),
    Rule(name="id", scope="file", find=files.repeated_ids, start="warning"),
    *(Rule(name=f"field/{name}", scope="row", find=find, start="warning") for name, find in fields.RULES.items()),
    Rule(name="media/unshown", scope="row", find=media.not_shown),
    Rule(name="media", scope="row", find=media.unusable),
    Rule(name="size", scope="row", find=media.other_size),
    Rule(name="size/refused", scope="row", find=media.refused),
    Rule(name="size/turned", scope="row", find=media.turned, level="warning"),
    Rule(name="size/length", scope="row", find=media.other_length),
    Rule(name="box", scope="row", find=media.boxes),
    Rule(name="oracle", scope="row", find=answers.oracle_below_maximum, cost="expensive"),
    Rule(name="label/number", scope="file", find=files.number_labels, level="warning"),
    Rule(name="label/rare", scope="file", find=files.rare_labels, cost="expensive", level="warning"),
    Rule(name="leak", scope="file", find=files.leaks, start="warning"),
    Rule(name="leak/prompt", scope="file", find=files.same_prompts, cost="expensive"),
    Rule(name="leak/look", scope="file", find=files.look_alikes, cost="expensive", level="warning"),
    Rule(name="box/units", scope="file", find=columns.box_units, level="error"),
    Rule(name="unread", scope="file", find=columns.unread),
)


def row_findings(row: CheckedRow, context: Context, *, at_start: bool = False, expensive: bool = True) -> list[Finding]:
    """Applies the rules of single rows, adds the findings to row.findings and returns them.

    expensive=False leaves out the expensive rules. at_start=True also leaves them out, and uses the rules' levels for
    the start of a run."""
    before = len(row.findings)
    for rule in _rules("row", expensive and not at_start):
        row.findings += [rule.finding(message, at_start, row.where, row.id) for message in rule.find(row, context)]
    return row.findings[before:]


def file_findings(rows: Sequence[CheckedRow], context: Context, *, at_start: bool = False) -> list[Finding]:
    """Applies the rules of files, adds each finding to its row and returns all findings. at_start: see row_findings."""
    out = []
    for rule in _rules("file", not at_start):
        for n, message in rule.find(rows, context):
            out.append(rule.finding(message, at_start, rows[n].where, rows[n].id))
            rows[n].findings.append(out[-1])
    return out


def _rules(scope: str, expensive: bool) -> Iterator[Rule]:
    return (rule for rule in RULES if rule.scope == scope and (expensive or rule.cost == "cheap"))
