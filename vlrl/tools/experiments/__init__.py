"""Reports of runs, comparisons between them, and commands that start many runs."""
