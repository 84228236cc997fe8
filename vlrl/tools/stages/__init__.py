"""Training in several stages: supervised, RL, rounds of rejection sampling, merges of weights."""
