"""The run folder and its checkpoints on disk. Files are written completely or not at all, and can be read at any time.
Imports no torch.

- All modules write with the functions of files.py. checkpoint.py needs no parquet, and imports torch only inside the
functions that save and load tensors.
- rollout_rows.py defines the columns of rollout files.
- tokenizer.json in the run folder converts token ids to text."""

from vlrl.store.files import plain, utf8
from vlrl.store.rollout_rows import PER_TOKEN, ROLLOUT_FILE, SCHEMA, as_schema, read_rollouts
from vlrl.store.run_folder import RunFolder, comparable

__all__ = ["PER_TOKEN", "ROLLOUT_FILE", "SCHEMA", "RunFolder", "as_schema", "comparable", "plain",
           "read_rollouts", "utf8"]
