"""Held-out metrics with confidence intervals, and the report of a run."""
