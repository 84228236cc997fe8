"""Sharding of the model over ranks. models/shards.py imports these modules if train.sharding requires them."""
