"""Reports on a run while it runs: metrics, progress, alerts, trackers, the watchdog, signals."""

LEAST_WIDTH = 20  # number of columns of the narrowest terminal that tables and panels support
