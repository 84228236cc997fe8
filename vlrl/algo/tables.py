"""Tables of the objective's functions: the values of each setting -> "module:name", imported on first use.

A new function of vlrl needs a line in its table; user code needs none (config.registry.resolve)."""

from __future__ import annotations

from vlrl.config.registry import Table
from vlrl.config.sections import PAIRS


def _of(module: str, names: str) -> dict[str, str]:
    """Returns {name: "module:attribute"} for names separated by spaces. A name is written as `name=attribute` if the
    attribute has a different name."""
    return {name.partition("=")[0]: f"{module}:{name.rpartition('=')[2]}" for name in names.split()}


ADVANTAGES = Table({
    **_of("vlrl.algo.advantage", "grpo dr_grpo rloo"),
    **_of("vlrl.methods.objectives.advantage",
          "batch_std gdpo reinforce_pp_baseline remax gpg opo pass_at_k maxrl w_reinforce nsr ema_std=EmaStd"),
    **_of("vlrl.methods.objectives.advantage", "reinforce_pp clip_delta"),
    **_of("vlrl.methods.tree.advantage", "tempo rose treerl deepsearch"),
    **_of("vlrl.methods.objectives.turn_advantage", "gigpo turn_return mobgrpo hierarchical thor"),
    **_of("vlrl.methods.critic.gae", "gae turn_gae bilevel_gae macro_gae"),
})
"""Values of `algo.advantage`."""

SHAPINGS = Table({
    **_of("vlrl.methods.objectives.shaping",
          "overlong kimi_length length_bonus cosine dast step_pruner grsp call_cost=CallCost"),
})
"""Values of `algo.shaping`."""

BATCHES = Table({
    **_of("vlrl.algo.grouped", "all=every_rollout"),
    **_of("vlrl.methods.objectives.recompose", "rorecomp rest right pf_ppo"),
})
"""Values of `algo.batch`."""

LOSSES = Table({
    **_of("vlrl.algo.terms", "ppo_clip reinforce gpg=reinforce supervised"),
    **_of("vlrl.methods.objectives.terms",
          "critique_grpo gspo gspo_token gspo_turn ppo_macro cispo sapo gmpo vespo kimi dppo_tv mdpo rover simko"),
    **_of("vlrl.methods.objectives.group_terms",
          "nft pacs=Pacs oreal=Oreal stable_reinforce=StableReinforce clip_cov=ClipCov kl_cov=KlCov"),
})
"""Values of `algo.loss` that are policy terms."""

TERMS = LOSSES | {PAIRS: "vlrl.methods.preferences.loss:bradley_terry"}
"""Values of `algo.loss`: the policy terms, and the loss of reward models."""

WEIGHTS = Table({
    **_of("vlrl.methods.objectives.weights",
          "top_entropy=TopEntropy hicra=Hicra difficulty dads stcr off_policy_sequence_mask"),
})
"""Values of `algo.weights` and `algo.kl_weights`."""

ENTROPIES = Table({
    **_of("vlrl.methods.objectives.entropy", "bonus adaptive=Adaptive siren=Siren temperature=Temperature e3=E3"),
})
"""Values of `algo.entropy`."""

CORRECTIONS = Table({
    **_of("vlrl.algo.correction",
          "token_truncate token_mask sequence_truncate sequence_mask geometric_truncate geometric_mask"),
})
"""Values of `algo.correction`."""

KLS = Table({**_of("vlrl.algo.kl", "k1 k2 k3 k3_bounded k1_plus k3_plus k3_unbiased k3_score")})
"""Values of `algo.kl`."""
