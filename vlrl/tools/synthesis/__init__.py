"""New training rows: synthesized prompts, and distilled answers of a teacher."""
