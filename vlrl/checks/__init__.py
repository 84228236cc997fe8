"""The rules of data and tasks, each written once. No torch.

`vlrl data check` and `vlrl tasks check` apply all of them, to all rows and to samples of a task; `vlrl train`,
`--dry-run` and `vlrl eval` apply the cheap ones, before a model is loaded, to the first rows and a seeded sample of the
others: training/preflight. What readers below this layer refuse too is one function of vlrl.data that the rule calls.

To add a rule, write a function and one line of `table.RULES` (`tasks.TASK_RULES`):

- **row**: `find(row: CheckedRow, context: Context)` yields a text for each thing that is wrong with one row. `row.row`
  has its canonical fields, `row.files` what is known of its media (headers at the start of a run, all of them in a
  check). Fields of a row go to fields.py, what concerns media to media.py.
- **file**: `find(rows: Sequence[CheckedRow], context)` yields `Found(message, row=n)` for what shows over many rows
  only. At the start of a run `rows` is the part that is looked at, so a rule counts shares and needs no neighbours.
- **task**: `find(seen: Seen)` yields `Found(message, id=sample's)`; function and line go to tasks.py.

A message says what is wrong, with the value, and the way out; it names neither row nor file, since findings of one rule
that differ in numbers, paths and quoted values only are printed as one line with a count. The name is `kind` or
`kind/more`; the kind is what is printed. A run that would train on nonsense is an `error`; what may be meant is a
`warning`; `start="warning"` makes a run warn of what a check calls bad. A rule that is wrong of one sound row is worse
than none.
"""

from vlrl.checks.finding import Finding, Level, grouped, lines
from vlrl.checks.rule import CheckedRow, Context, Found, MediaFile, Rule
from vlrl.checks.table import RULES, file_findings, row_findings

__all__ = ["RULES", "CheckedRow", "Context", "Finding", "Found", "Level", "MediaFile", "Rule", "file_findings",
           "grouped", "lines", "row_findings"]
