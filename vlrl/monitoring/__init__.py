"""Reports of a running run: metrics, progress, alerts, trackers, the watchdog, signals."""

LEAST_WIDTH = 20
"""Columns of the narrowest terminal that tables and panels support."""
