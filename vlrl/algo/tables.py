"""Functions of the objective by name: what each setting may say -> where the function is, imported when asked
for.

A new one is a function anywhere and a line here; anyone's own needs no line (config.registry.resolve).
"""

from __future__ import annotations

from vlrl.config.algo import PAIRS
from vlrl.config.registry import Table

ADVANTAGES = Table({
    "grpo": "vlrl.algo.advantage:grpo",
    "dr_grpo": "vlrl.algo.advantage:dr_grpo",
    "batch_std": "vlrl.algo.advantage:batch_std",
    "gdpo": "vlrl.algo.advantage:gdpo",
    "rloo": "vlrl.algo.advantage:rloo",
    "reinforce_pp": "vlrl.algo.token_advantage:reinforce_pp",
    "reinforce_pp_baseline": "vlrl.algo.advantage:reinforce_pp_baseline",
    "remax": "vlrl.algo.advantage:remax",
    "gpg": "vlrl.algo.advantage:gpg",
    "opo": "vlrl.algo.advantage:opo",
    "pass_at_k": "vlrl.algo.advantage:pass_at_k",
    "maxrl": "vlrl.algo.advantage:maxrl",
    "w_reinforce": "vlrl.algo.advantage:w_reinforce",
    "nsr": "vlrl.algo.advantage:nsr",
    "ema_std": "vlrl.algo.advantage:EmaStd",
    "clip_delta": "vlrl.algo.token_advantage:clip_delta",
    "tempo": "vlrl.methods.tree.advantage:tempo",
    "rose": "vlrl.methods.tree.advantage:rose",
    "treerl": "vlrl.methods.tree.advantage:treerl",
    "deepsearch": "vlrl.methods.tree.advantage:deepsearch",
    "gigpo": "vlrl.algo.turn_advantage:gigpo",
    "turn_return": "vlrl.algo.turn_advantage:turn_return",
    "mobgrpo": "vlrl.algo.turn_advantage:mobgrpo",
    "hierarchical": "vlrl.algo.turn_advantage:hierarchical",
    "thor": "vlrl.algo.turn_advantage:thor",
    "gae": "vlrl.methods.critic.gae:gae",
    "turn_gae": "vlrl.methods.critic.gae:turn_gae",
    "bilevel_gae": "vlrl.methods.critic.gae:bilevel_gae",
    "macro_gae": "vlrl.methods.critic.gae:macro_gae",
})
"""`algo.advantage`."""

SHAPINGS = Table({
    "overlong": "vlrl.algo.shaping:overlong",
    "kimi_length": "vlrl.algo.shaping:kimi_length",
    "length_bonus": "vlrl.algo.shaping:length_bonus",
    "cosine": "vlrl.algo.shaping:cosine",
    "dast": "vlrl.algo.shaping:dast",
    "step_pruner": "vlrl.algo.shaping:step_pruner",
    "grsp": "vlrl.algo.shaping:grsp",
    "call_cost": "vlrl.algo.shaping:CallCost",
})
"""`algo.shaping`."""

BATCHES = Table({
    "all": "vlrl.algo.recompose:whole",
    "rorecomp": "vlrl.algo.recompose:rorecomp",
    "rest": "vlrl.algo.recompose:rest",
    "right": "vlrl.algo.recompose:right",
    "pf_ppo": "vlrl.algo.recompose:pf_ppo",
})
"""`algo.batch`."""

LOSSES = Table({
    "ppo_clip": "vlrl.algo.terms:ppo_clip",
    "critique_grpo": "vlrl.algo.terms:critique_grpo",
    "gspo": "vlrl.algo.terms:gspo",
    "gspo_token": "vlrl.algo.terms:gspo_token",
    "gspo_turn": "vlrl.algo.terms:gspo_turn",
    "ppo_macro": "vlrl.algo.terms:ppo_macro",
    "cispo": "vlrl.algo.terms:cispo",
    "sapo": "vlrl.algo.terms:sapo",
    "gmpo": "vlrl.algo.terms:gmpo",
    "vespo": "vlrl.algo.terms:vespo",
    "reinforce": "vlrl.algo.terms:reinforce",
    "gpg": "vlrl.algo.terms:reinforce",
    "kimi": "vlrl.algo.terms:kimi",
    "dppo_tv": "vlrl.algo.terms:dppo_tv",
    "mdpo": "vlrl.algo.terms:mdpo",
    "rover": "vlrl.algo.terms:rover",
    "simko": "vlrl.algo.terms:simko",
    "supervised": "vlrl.algo.terms:supervised",
    "nft": "vlrl.algo.group_terms:nft",
    "pacs": "vlrl.algo.group_terms:Pacs",
    "oreal": "vlrl.algo.group_terms:Oreal",
    "stable_reinforce": "vlrl.algo.group_terms:StableReinforce",
    "clip_cov": "vlrl.algo.group_terms:ClipCov",
    "kl_cov": "vlrl.algo.group_terms:KlCov",
})
"""`algo.loss`: policy terms."""

TERMS = LOSSES | {PAIRS: "vlrl.methods.preferences.loss:bradley_terry"}
"""`algo.loss` with what a reward model learns from."""

WEIGHTS = Table({
    "top_entropy": "vlrl.algo.weights:TopEntropy",
    "hicra": "vlrl.algo.weights:Hicra",
    "difficulty": "vlrl.algo.weights:difficulty",
    "dads": "vlrl.algo.weights:dads",
    "stcr": "vlrl.algo.weights:stcr",
    "off_policy_sequence_mask": "vlrl.algo.weights:off_policy_sequence_mask",
})
"""`algo.weights` and `algo.kl_weights`."""

ENTROPIES = Table({
    "bonus": "vlrl.algo.entropy:bonus",
    "adaptive": "vlrl.algo.entropy:Adaptive",
    "siren": "vlrl.algo.entropy:Siren",
    "temperature": "vlrl.algo.entropy:Temperature",
    "e3": "vlrl.algo.entropy:E3",
})
"""`algo.entropy`."""
