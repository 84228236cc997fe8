"""Runs reported, compared, and started by the dozen."""
