"""The run folder and its checkpoints on disk: written whole or not at all, read at any time. No torch."""

from vlrl.store.run_folder import PER_TOKEN, ROLLOUT_FILE, SCHEMA, RunFolder, as_schema, plain, read_rollouts

__all__ = ["PER_TOKEN", "ROLLOUT_FILE", "SCHEMA", "RunFolder", "as_schema", "plain", "read_rollouts"]
