"""Reports of runs, comparisons between runs, and commands that start many runs."""
