"""Creates new training data: synthesized prompts, and answers distilled from a teacher model."""
