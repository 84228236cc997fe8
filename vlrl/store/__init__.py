"""The run folder and its checkpoints on disk: written completely or not at all, readable at any time. No torch.

- files.py is the base of the others: both write atomically, and a checkpoint needs no parquet. checkpoint.py imports
  torch only inside the functions that save and load tensors.
- Rollout files have `variant` (null for completions of the unchanged sample), `timestamps` in the media column (display
  time of each frame), `marks` (drawn by Task.overlay, as JSON, so that a viewer runs no task code; null where it
  failed), `metrics` (Task.metrics of an evaluated answer), and `top_ids` and `top_logprobs` with `store.alternatives`.
- tokenizer.json turns token ids into text."""

from vlrl.store.plain_json import plain, utf8
from vlrl.store.rollout_rows import PER_TOKEN, ROLLOUT_FILE, SCHEMA, as_schema, read_rollouts
from vlrl.store.run_folder import RunFolder, comparable

__all__ = ["PER_TOKEN", "ROLLOUT_FILE", "SCHEMA", "RunFolder", "as_schema", "comparable", "plain",
           "read_rollouts", "utf8"]
