"""The objective: advantage, per-token policy term, KL and aggregation, as pure torch functions.

Loss functions see flat tokens [N] with the number of each token's rollout and global counts, never [B, L], so packed
and padded batches give the same value.

- `algo.*` names functions with options (`algo.loss={name: cispo, cap: 5}`). A function declares what it needs
  (`requires`), and nothing else is computed; effect.py lets it declare when it has no effect. named.py binds a setting
  to a function, objective.py composes them, algorithm.py holds what changes from step to step (KL coefficient,
  reference). `algo.clip_low` and `clip_high` are short names for options of the policy term: a later setting wins, and
  a term without these options refuses them.
- A function that needs more than one rollout (a quantile, a sum over a group) computes it for the whole optimizer step,
  without gradient, before the micro-batches (`prepare`).
"""
