"""A task without a model: begun, listed, scored."""
