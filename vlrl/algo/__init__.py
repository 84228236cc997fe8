"""The objective: advantage, per-token policy term, KL and aggregation, as pure torch functions.

Loss functions see flat tokens [N] with the number of each token's rollout and global counts, never [B, L], so packed
and padded batches give the same value.

- `algo.*` names functions with options (`algo.loss={name: cispo, cap: 5}`). A function says what it needs (`requires`),
  and nothing else is computed; effect.py is how it says when it changes nothing. named.py binds a setting to a
  function, objective.py composes them, algorithm.py holds what changes from step to step (control, reference).
  `algo.clip_low` and `clip_high` are options of the term by a shorter name: the later word holds, and a term without
  them refuses them.
- A function that needs more than one rollout (a quantile, a sum over a group) makes it of the whole optimizer step,
  without gradient, before the micro-batches (`prepare`).
"""
