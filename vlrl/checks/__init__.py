"""The rules for data and tasks, each written once. No torch.

`vlrl data check` and `vlrl tasks check` apply every rule, to all rows and to samples of a task. `vlrl train`,
`--dry-run` and `vlrl eval` apply the cheap rules before a model is loaded, to the first rows and a seeded sample of the
others (preflight.py). A condition that the readers in vlrl.data refuse too is one function there, which the rule calls.

To add a rule, write a function and one line of `table.RULES` (`tasks.TASK_RULES`):

- **row**: `find(row: CheckedRow, context: Context)` yields a message for each fault of one row. `row.row` has its
  canonical fields, `row.files` what is known of its media (headers at the start of a run, everything in a check).
  Rules of fields go to fields.py, rules of media to media.py.
- **file**: `find(rows: Sequence[CheckedRow], context)` yields `(n, message)` for faults that show over many rows only;
  the finding belongs to rows[n]. At the start of a run `rows` is a part of the file, so a rule counts shares and does
  not look at neighbours.
- **task**: `find(samples: TaskSamples)` yields `Finding(message=..., id=sample's)`; function and line go to tasks.py.

A message says what is wrong, with the value, and the way out. It names neither row nor file: findings of one rule that
differ in numbers, paths and quoted values only are printed as one line with a count. A rule's name is `kind` or
`kind/more`; the kind is printed. Data that would make a run train on nonsense is an `error`, data that may be intended
a `warning`; `start="warning"` makes a run warn of what a check reports as an error. A rule that reports sound rows is
worse than none.
"""

from vlrl.checks.finding import Finding, Level, finding_lines, grouped
from vlrl.checks.rule import CheckedRow, Context, MediaFile, Rule
from vlrl.checks.table import RULES, file_findings, row_findings

__all__ = ["RULES", "CheckedRow", "Context", "Finding", "Level", "MediaFile", "Rule", "file_findings", "finding_lines",
           "grouped", "row_findings"]
