"""A run of several stages: supervised, RL, rounds of own answers, merges of weights."""
