"""Training in several stages: supervised fine-tuning, RL, rounds of rejection sampling, merges of weights."""
