"""Functions of the objective by name: the values of each setting -> `module:name`, imported on first use.

A new function needs a line here; a user's own needs none (config.registry.resolve)."""

from __future__ import annotations

from vlrl.config.registry import Table
from vlrl.config.sections import PAIRS

ADVANTAGES = Table({
    "grpo": "vlrl.algo.advantage:grpo",
    "dr_grpo": "vlrl.algo.advantage:dr_grpo",
    "batch_std": "vlrl.methods.objectives.advantage:batch_std",
    "gdpo": "vlrl.methods.objectives.advantage:gdpo",
    "rloo": "vlrl.algo.advantage:rloo",
    "reinforce_pp": "vlrl.methods.objectives.token_advantage:reinforce_pp",
    "reinforce_pp_baseline": "vlrl.methods.objectives.advantage:reinforce_pp_baseline",
    "remax": "vlrl.methods.objectives.advantage:remax",
    "gpg": "vlrl.methods.objectives.advantage:gpg",
    "opo": "vlrl.methods.objectives.advantage:opo",
    "pass_at_k": "vlrl.methods.objectives.advantage:pass_at_k",
    "maxrl": "vlrl.methods.objectives.advantage:maxrl",
    "w_reinforce": "vlrl.methods.objectives.advantage:w_reinforce",
    "nsr": "vlrl.methods.objectives.advantage:nsr",
    "ema_std": "vlrl.methods.objectives.advantage:EmaStd",
    "clip_delta": "vlrl.methods.objectives.token_advantage:clip_delta",
    "tempo": "vlrl.methods.tree.advantage:tempo",
    "rose": "vlrl.methods.tree.advantage:rose",
    "treerl": "vlrl.methods.tree.advantage:treerl",
    "deepsearch": "vlrl.methods.tree.advantage:deepsearch",
    "gigpo": "vlrl.methods.objectives.turn_advantage:gigpo",
    "turn_return": "vlrl.methods.objectives.turn_advantage:turn_return",
    "mobgrpo": "vlrl.methods.objectives.turn_advantage:mobgrpo",
    "hierarchical": "vlrl.methods.objectives.turn_advantage:hierarchical",
    "thor": "vlrl.methods.objectives.turn_advantage:thor",
    "gae": "vlrl.methods.critic.gae:gae",
    "turn_gae": "vlrl.methods.critic.gae:turn_gae",
    "bilevel_gae": "vlrl.methods.critic.gae:bilevel_gae",
    "macro_gae": "vlrl.methods.critic.gae:macro_gae",
})
"""`algo.advantage`."""

SHAPINGS = Table({
    "overlong": "vlrl.methods.objectives.shaping:overlong",
    "kimi_length": "vlrl.methods.objectives.shaping:kimi_length",
    "length_bonus": "vlrl.methods.objectives.shaping:length_bonus",
    "cosine": "vlrl.methods.objectives.shaping:cosine",
    "dast": "vlrl.methods.objectives.shaping:dast",
    "step_pruner": "vlrl.methods.objectives.shaping:step_pruner",
    "grsp": "vlrl.methods.objectives.shaping:grsp",
    "call_cost": "vlrl.methods.objectives.shaping:CallCost",
})
"""`algo.shaping`."""

BATCHES = Table({
    "all": "vlrl.algo.grouped:every_rollout",
    "rorecomp": "vlrl.methods.objectives.recompose:rorecomp",
    "rest": "vlrl.methods.objectives.recompose:rest",
    "right": "vlrl.methods.objectives.recompose:right",
    "pf_ppo": "vlrl.methods.objectives.recompose:pf_ppo",
})
"""`algo.batch`."""

LOSSES = Table({
    "ppo_clip": "vlrl.algo.terms:ppo_clip",
    "critique_grpo": "vlrl.methods.objectives.terms:critique_grpo",
    "gspo": "vlrl.methods.objectives.terms:gspo",
    "gspo_token": "vlrl.methods.objectives.terms:gspo_token",
    "gspo_turn": "vlrl.methods.objectives.terms:gspo_turn",
    "ppo_macro": "vlrl.methods.objectives.terms:ppo_macro",
    "cispo": "vlrl.methods.objectives.terms:cispo",
    "sapo": "vlrl.methods.objectives.terms:sapo",
    "gmpo": "vlrl.methods.objectives.terms:gmpo",
    "vespo": "vlrl.methods.objectives.terms:vespo",
    "reinforce": "vlrl.algo.terms:reinforce",
    "gpg": "vlrl.algo.terms:reinforce",
    "kimi": "vlrl.methods.objectives.terms:kimi",
    "dppo_tv": "vlrl.methods.objectives.terms:dppo_tv",
    "mdpo": "vlrl.methods.objectives.terms:mdpo",
    "rover": "vlrl.methods.objectives.terms:rover",
    "simko": "vlrl.methods.objectives.terms:simko",
    "supervised": "vlrl.algo.terms:supervised",
    "nft": "vlrl.methods.objectives.group_terms:nft",
    "pacs": "vlrl.methods.objectives.group_terms:Pacs",
    "oreal": "vlrl.methods.objectives.group_terms:Oreal",
    "stable_reinforce": "vlrl.methods.objectives.group_terms:StableReinforce",
    "clip_cov": "vlrl.methods.objectives.group_terms:ClipCov",
    "kl_cov": "vlrl.methods.objectives.group_terms:KlCov",
})
"""`algo.loss`: policy terms."""

TERMS = LOSSES | {PAIRS: "vlrl.methods.preferences.loss:bradley_terry"}
"""`algo.loss`, with the loss of reward models."""

WEIGHTS = Table({
    "top_entropy": "vlrl.methods.objectives.weights:TopEntropy",
    "hicra": "vlrl.methods.objectives.weights:Hicra",
    "difficulty": "vlrl.methods.objectives.weights:difficulty",
    "dads": "vlrl.methods.objectives.weights:dads",
    "stcr": "vlrl.methods.objectives.weights:stcr",
    "off_policy_sequence_mask": "vlrl.methods.objectives.weights:off_policy_sequence_mask",
})
"""`algo.weights` and `algo.kl_weights`."""

ENTROPIES = Table({
    "bonus": "vlrl.methods.objectives.entropy:bonus",
    "adaptive": "vlrl.methods.objectives.entropy:Adaptive",
    "siren": "vlrl.methods.objectives.entropy:Siren",
    "temperature": "vlrl.methods.objectives.entropy:Temperature",
    "e3": "vlrl.methods.objectives.entropy:E3",
})
"""`algo.entropy`."""

CORRECTIONS = Table({
    "token_truncate": "vlrl.algo.correction:token_truncate",
    "token_mask": "vlrl.algo.correction:token_mask",
    "sequence_truncate": "vlrl.algo.correction:sequence_truncate",
    "sequence_mask": "vlrl.algo.correction:sequence_mask",
    "geometric_truncate": "vlrl.algo.correction:geometric_truncate",
    "geometric_mask": "vlrl.algo.correction:geometric_mask",
})
"""`algo.correction`."""

KLS = Table({
    "k1": "vlrl.algo.kl:k1",
    "k2": "vlrl.algo.kl:k2",
    "k3": "vlrl.algo.kl:k3",
    "k3_bounded": "vlrl.algo.kl:k3_bounded",
    "k1_plus": "vlrl.algo.kl:k1_plus",
    "k3_plus": "vlrl.algo.kl:k3_plus",
    "k3_unbiased": "vlrl.algo.kl:k3_unbiased",
    "k3_score": "vlrl.algo.kl:k3_score",
})
"""`algo.kl`."""
