"""The training loop and what surrounds it: building a run, updates, credit, checkpoints, supervised fine-tuning."""
