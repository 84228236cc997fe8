"""Evaluates a run on held-out samples: metrics with confidence intervals."""
