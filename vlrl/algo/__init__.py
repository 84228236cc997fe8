"""The objective: advantage, per-token policy term, KL and aggregation, as pure torch functions.

Loss functions get flat tokens [N], the index of each token's rollout, and counts over the whole optimizer step. They
never get [B, L], so packed and padded batches give the same value.

- `algo.*` names functions with options (`algo.loss={name: cispo, cap: 5}`). A function declares its inputs
  (`requires`). An input that no function declares is not computed. With effect.py a function declares when it has no
  effect. named.py binds a setting to a function, objective.py composes the functions, and algorithm.py holds the
  state that changes from step to step (KL coefficient, reference policy). `algo.clip_low` and `algo.clip_high` are
  short names for options of the policy term; of the short and the full name, the one that is set last counts. Setting
  `algo.clip_low` or `algo.clip_high` for a term that has no such option is an error.
- A function that needs more than one rollout (a quantile, a sum over a group) computes it in `prepare`: for the whole
  optimizer step, without gradient, before the micro-batches."""
