"""Sharding of the model over ranks; models/shards.py imports it where train.sharding or the launcher asks for it."""
