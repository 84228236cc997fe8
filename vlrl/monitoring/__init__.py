"""What a run says of itself while it goes on: metrics, progress, alerts, trackers, the watchdog, signals."""

LEAST_WIDTH = 20
"""Columns of the narrowest terminal that tables and panels are drawn for."""
