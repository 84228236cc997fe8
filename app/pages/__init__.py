"""The pages of the inspector: one module each, with `build(site)`."""

from . import compare, curriculum, history, notes, playground, rollouts, runs

__all__ = ["compare", "curriculum", "history", "notes", "playground", "rollouts", "runs"]
