"""The rules for data and tasks, each defined in a single place. No torch.

`vlrl data check` and `vlrl tasks check` apply every rule, to all rows and to samples of a task. `vlrl train`,
`--dry-run` and `vlrl eval` apply the cheap rules before a model is loaded, to the first rows and a seeded sample of the
others (preflight.py). If the readers in vlrl.data also enforce a condition, the condition is a function in vlrl.data,
and the rule calls that function.

To add a rule, write a function and one line of `table.RULES` (`tasks.TASK_RULES` for a rule of tasks):

- **row**: `find(row: CheckedRow, context: Context)` yields a message for each fault of one row. `row.row` holds the
canonical fields of the row, and `row.files` describes its media files (at the start of a run only from their headers).
Rules of fields go to fields.py, rules of media to media.py.
- **file**: `find(rows: Sequence[CheckedRow], context)` yields `(n, message)` for faults that only show over many rows;
the finding belongs to rows[n]. At the start of a run, `rows` is only a part of the file. So a rule must count
proportions instead of rows, and must not compare neighbouring rows.
- **task**: `find(samples: TaskSamples)` yields `Finding(message=..., id=id of the sample)`; function and line go to
tasks.py.

A message says what is wrong, with the value, and how to fix it. It names neither row nor file: findings of one rule
whose messages only differ in numbers, paths and quoted values are printed as one line with a count. A rule's name is
`kind` or `kind/more`; the kind is printed. A fault that would make a run train on nonsense is an `error`; a value that
may be intended is a `warning`. With `start="warning"`, the start of a run only warns of a fault that a check reports as
an error. A rule with false alarms is worse than no rule."""

from vlrl.checks.finding import Finding, Level, finding_lines, grouped
from vlrl.checks.rule import CheckedRow, Context, MediaFile, Rule
from vlrl.checks.table import RULES, file_findings, row_findings

__all__ = ["RULES", "CheckedRow", "Context", "Finding", "Level", "MediaFile", "Rule", "file_findings", "finding_lines",
           "grouped", "row_findings"]
