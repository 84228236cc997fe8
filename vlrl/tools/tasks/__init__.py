"""Tasks without a model: scaffolded, listed, scored."""
