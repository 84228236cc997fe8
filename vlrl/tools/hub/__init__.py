"""Models and rollouts, exported and published."""
