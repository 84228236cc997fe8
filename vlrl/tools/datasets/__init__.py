"""Jobs on data files: check, convert, split, measure. Torch is imported only to query a model."""
