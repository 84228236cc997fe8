"""Tiny models of real architectures, and their training."""
