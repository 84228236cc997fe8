"""What a run says of itself while it goes on: metrics, progress, alerts, trackers, the watchdog, signals."""
