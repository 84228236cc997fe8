"""The objective: advantage, per-token policy term, KL and aggregation, as pure torch functions.

Loss functions see flat tokens [N] with the number of each token's rollout and global counts, never [B, L], so packed
and padded batches give the same value.
"""
