"""What a run needs, and what this machine can do."""
