"""Models: loading and saving, families, processing, packing, attention, log-probabilities, sharding."""
