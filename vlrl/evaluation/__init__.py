"""Held-out metrics of a run, with confidence intervals."""
