"""Models and runs, measured and compared."""
