"""Export of models and rollouts, and their publication on the Hugging Face Hub."""
