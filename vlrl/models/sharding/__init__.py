"""What shards the model over processes; models/shards.py imports it where train.sharding or the launcher asks."""
