"""Mistakes that the goldens must see: each is put into a copy of a module's source, and its tests have to fail.

    python -m tests.algo.mutants [MODULE ...]     tells which mutants live; exit code 1 when one does
    python -m tests.algo.mutants --write          also notes in killers.json which test saw each; it is the first to run

A row is (module of vlrl.algo, function or Class.method, text in it, what it becomes). The text stands there once,
docstring apart.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import io
import json
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import hypothesis
import pytest
import torch
from _pytest.runner import runtestprotocol

from tests.mutants import running

Row = tuple[str, str, str, str]
ROOT = running.ROOT
TESTS = {"clip": ["terms"], "terms": ["terms", "turn_advantage"], "turn_advantage": ["turn_advantage", "turn_levels"],
         "inputs": ["outcome", "terms", "group_terms", "aggregation", "weights", "correction"],
         "grouped": ["outcome", "advantage"], "token_advantage": ["advantage"], "tree_advantage": ["advantage"]}
"""Whose tests look at a module that has none of its own name."""
KILLERS = Path(__file__).with_name("killers.json")
"""By mutant the test that saw it. Where that one no longer does, the others of the module are tried."""

MUTANTS: list[Row] = [
    # objective, entropy, control, reference, statistics
    ("objective", "Objective.__call__", "per_token * factor", "per_token + factor"),
    ("objective", "Objective.__call__", "kl_coef * kl", "kl"),
    ("objective", "Objective.__call__", "kl * weight(", "kl + weight("),
    ("objective", "Objective.__call__", "(term * x.mask)", "(term)"),
    ("objective", "Objective.__call__", "max(x.total_tokens, 1.0)", "max(x.total_sequences, 1.0)"),
    ("objective", "Objective.__call__", "(kl.detach() * x.mask)", "(kl.detach())"),
    ("objective", "Objective.of", "algo.kl_coef > 0 and", "True and"),
    ("objective", "Objective.of", 'and algo.kl_in == "loss"', ""),
    ("objective", "Objective.of", "kl_weights if in_loss else ()", "kl_weights"),
    ("objective", "optional", "if named.name !=", "if named.name =="),
    ("objective", "_refuse_empty", "low > high", "low >= high"),
    ("objective", "_refuse_empty", "| {**correction.options}", ""),
    ("inputs", "LossInputs.per_sequence", "values = values * self.mask", "pass"),
    ("inputs", "LossInputs.sequence_mean", ".clamp(min=1)", ""),
    ("inputs", "LossInputs.sequence_mean", "(values) / self", "(values) * self"),
    ("inputs", "LossInputs.group_sum", "index_add(0, group, values)", "index_add(0, group, values / 2)"),
    ("inputs", "LossInputs.group_sum", "[group]", ""),
    ("inputs", "LossInputs.log_ratio", "self.logprobs - self.old_logprobs", "self.old_logprobs - self.logprobs"),
    ("inputs", "LossInputs.log_ratio", "-20, 20", "-90, 90"),
    ("inputs", "LossInputs.sampler_gap", "self.old_logprobs - self.sampler_logprobs",
     "self.sampler_logprobs - self.old_logprobs"),
    ("inputs", "LossInputs.sampler_gap", "(self.mask > 0) &", ""),
    ("inputs", "LossInputs.sampler_gap", "& ~gap.isnan()", ""),
    ("inputs", "LossInputs.sampler_gap", ".clamp(-20, 20)", ""),
    ("inputs", "LossInputs.correct", "self.rewards > (", "self.rewards >= ("),
    ("inputs", "LossInputs.correct", "if above is None and", "if"),
    ("inputs", "LossInputs.wrong", "& ~self.rewards.isnan()", ""),
    ("objective", "_of", "x.prepared.get(place, {})", "{}"),
    ("entropy", "bonus", "-coef", "coef"),
    ("entropy", "Adaptive.__call__", "-(self.coef", "(self.coef"),
    ("entropy", "Adaptive.observe", "entropy <= self.target", "entropy < self.target"),
    ("entropy", "Adaptive.observe", "else -self.delta", "else self.delta"),
    ("entropy", "Adaptive.observe", "self.most)", "9.0)"),
    ("entropy", "Siren.prepare", "1 - self.share", "self.share"),
    ("entropy", "Siren.prepare", "x.mask > 0", "x.mask >= 0"),
    ("entropy", "Siren.prepare", "math.isnan(self.anchor)", "True"),
    ("entropy", "Siren.__call__", "2 * self.coef", "self.coef"),
    ("entropy", "Siren.__call__", "- self.anchor", "+ self.anchor"),
    ("entropy", "Siren.__call__", '* p["selected"]', "* x.mask"),
    ("entropy", "Temperature.moved", "1 - entropy", "entropy - 1 + entropy"),
    ("entropy", "E3.moved", "target / entropy", "entropy / target"),
    ("entropy", "E3.moved", "math.log(choices) + ", ""),
    ("entropy", "E3.moved", "1 + temperature *", "1 +"),
    ("entropy", "Temperature.observe_step", "self.target or entropy", "entropy"),
    ("entropy", "Temperature.observe_step", "self.low), self.high", "self.low), 9.0"),
    ("control", "KLCoefficient.observe", "kl / self.target - 1", "1 - kl / self.target"),
    ("control", "KLCoefficient.observe", "-0.2), 0.2", "-0.2), 0.5"),
    ("control", "KLCoefficient.observe", "answers / self.horizon", "1 / self.horizon"),
    ("reference", "Ema.after_step", "1 - self.decay", "self.decay"),
    ("reference", "Ema.after_step", "done % self.every == 0", "True"),
    ("reference", "Reset.after_step", "kl <= self.kl", "kl < self.kl"),
    ("reference", "Reset.after_step", "if self.optimizer", "if not self.optimizer"),
    ("statistics", "nucleus_entropy", "- ordered >= p", ">= p"),
    ("statistics", "nucleus_entropy", "-torch.inf).log_softmax(-1)", "-torch.inf)"),
    ("statistics", "mean_logprob", "(~none).sum(-1)", "none.shape[-1]"),
    ("statistics", "_entropy", "-(logprobs", "(logprobs"),
    # advantage, token_advantage, grouped, shaping, recompose
    ("advantage", "grpo", "+ eps))", "- eps))"),
    ("advantage", "dr_grpo", "_zeroed(_", "-_zeroed(_"),
    ("advantage", "batch_std", "_std(s.rewards)", "grouped.std(s.rewards, s.group)"),
    ("advantage", "gdpo", "own * weight", "own"),
    ("advantage", "gdpo", "summed - summed.nanmean()", "summed"),
    ("advantage", "gdpo", "/ (_std(summed) + eps)", ""),
    ("advantage", "gdpo", "/ (grouped.std(part, s.group) + eps)", ""),
    ("advantage", "gdpo", "torch.where(unscorable, torch.nan, s.parts[name])", "s.parts[name]"),
    ("advantage", "gdpo", "torch.where(unscorable, torch.nan, summed)", "summed"),
    ("advantage", "rloo", "(n / (n - 1))", "n"),
    ("advantage", "rloo", "if normalize", "if not normalize"),
    ("advantage", "rloo", "_std(values) + eps", "1.0"),
    ("advantage", "reinforce_pp_baseline", "0.0, s.lengths)", "0.0, 1.0)"),
    ("advantage", "remax", "- s.greedy", "+ s.greedy"),
    ("advantage", "gpg", "valid.sum()", "(s.rewards != 0).sum()"),
    ("advantage", "gpg", "/ f_norm)", "* f_norm)"),
    ("advantage", "gpg", "scorable & ~", "~"),
    ("advantage", "opo", "s.rewards - baseline", "baseline - s.rewards"),
    ("advantage", "opo", "lengths, torch.ones_like(lengths))", "torch.ones_like(lengths), lengths)"),
    ("advantage", "pass_at_k", "best - second", "best"),
    ("advantage", "pass_at_k", "== 1)", ">= 1)"),
    ("advantage", "pass_at_k", "if normalize", "if not normalize"),
    ("advantage", "maxrl", "mean > 0", "mean != 0"),
    ("advantage", "maxrl", "_centred(s) / mean", "_centred(s)"),
    ("advantage", "w_reinforce", "right, positive, -torch", "~right, positive, -torch"),
    ("advantage", "w_reinforce", "-torch.ones_like", "torch.ones_like"),
    ("advantage", "w_reinforce", ".masked_fill(s.rewards.isnan(), 0.0)", ""),
    ("advantage", "nsr", "0.0", "0.1"),
    ("advantage", "EmaStd.__call__", "> self.limit", "> 1e9"),
    ("advantage", "EmaStd.__call__", "self.eps), values)", "self.eps), values * 2)"),
    ("advantage", "EmaStd.__call__", "[mine & ~s.rewards.isnan()]", "[~s.rewards.isnan()]"),
    ("advantage", "EmaStd._std", "self.decay * before[1]", "before[1]"),
    ("advantage", "EmaStd._std", "m2 - m1 ** 2", "m2"),
    ("advantage", "EmaStd.load_state_dict", "state[\"moments\"].items()", "{}.items()"),
    ("advantage", "_zeroed", "0.0, values", "1.0, values"),
    ("token_advantage", "reinforce_pp", "s.kl_coef * kl", "kl"),
    ("token_advantage", "reinforce_pp", "bool) & scorable", "bool)"),
    ("token_advantage", "_returns", "paid[-1] += reward", "paid[0] += reward"),
    ("token_advantage", "_returns", "(-penalty)", "(penalty)"),
    ("token_advantage", "_returns", "gamma * later", "later"),
    ("token_advantage", "_returns", "[::-1]", ""),
    ("token_advantage", "whitened", "(values - mean)", "values"),
    ("token_advantage", "whitened", "(total - 1)", "total"),
    ("token_advantage", "whitened", "mean) ** 2 * weights", "mean) ** 2"),
    ("token_advantage", "tempo", "+= node.value - node.before", "-= node.value - node.before"),
    ("token_advantage", "tempo", "values / scale[i]", "values"),
    ("token_advantage", "tempo", "torch.where(mask,", "torch.where(mask | True,"),
    ("demonstrations", "cross_entropy", "d.logprobs * d.mask", "d.logprobs"),
    ("demonstrations", "cross_entropy", "d.mask * d.weights", "d.mask"),
    ("demonstrations", "cross_entropy", "-(factor", "(factor"),
    ("demonstrations", "cross_entropy", "max(d.total_tokens", "max(len(d.mask)"),
    ("demonstrations", "Chord.shares", "self.peak * step", "self.peak * (step + 1)"),
    ("demonstrations", "Chord.shares", "(step - self.warmup)", "step"),
    ("demonstrations", "Chord.shares", "1 + math.cos", "1 - math.cos"),
    ("demonstrations", "Chord.shares", "return 1.0 - mu, mu", "return 1.0, mu"),
    ("demonstrations", "ChordPhi.shares", "1.0 - self.mu, self.mu", "1.0, self.mu"),
    ("demonstrations", "ChordPhi.factor", "d.logprobs.detach()", "d.logprobs"),
    ("demonstrations", "ChordPhi.factor", "p * (1 - p)", "p"),
    ("demonstrations", "Sasr.chance", "self.gamma * self.warm", "self.warm"),
    ("demonstrations", "Sasr.chance", " if self.latest else 0.0", " if self.latest else 1.0"),
    ("demonstrations", "Sasr.shares", "drawn < self.chance(step)", "drawn > self.chance(step)"),
    ("demonstrations", "Sasr.shares", "[seed, _STREAM, step]", "[_STREAM, step]"),
    ("demonstrations", "Sasr.observe", "norm if step < self.warmup else self.warm", "norm"),
    ("demonstrations", "Sasr.observe", "self.latest = norm", "self.latest = self.warm"),
    ("stored", "Truncated.loss", ".clamp(max=self.cap)", ""),
    ("stored", "Truncated.loss", "x.means(", "x.sums("),
    ("stored", "Truncated.loss", "x.ratio.detach()", "-x.ratio.detach()"),
    ("stored", "Truncated.loss", "* x.weights)", ")"),
    ("stored", "Truncated.loss", "* x.mask)", ")"),
    ("stored", "Truncated.loss", "max(x.total_tokens", "max(x.total_answers"),
    ("stored", "Truncated.clipped", "> self.cap", "< self.cap"),
    ("stored", "Clipped.loss", "torch.minimum", "torch.maximum"),
    ("stored", "Clipped.loss", "1 - self.clip_low, 1 + self.clip_high", "1 - self.clip_high, 1 + self.clip_low"),
    ("stored", "Clipped.loss", "* x.weights)", ")"),
    ("stored", "Clipped.loss", "worse * x.mask", "worse"),
    ("stored", "Clipped.clipped", "& (a < 0)", "& (a > 0)"),
    ("stored", "Stored.means", ".clamp(min=1)", ".clamp(min=2)"),
    ("stored", "Stored.sums", "values * self.mask", "values"),
    ("stored", "Stored.ratio", "self.logprobs - self.sampler", "self.sampler - self.logprobs"),
    ("stored", "ALol.keep", "> 0", ">= -9"),
    ("stored", "ALol.loss", "self.beta * away", "away"),
    ("stored", "ALol.loss", "1 - self.clip, 1 + self.clip", "0, 1 + self.clip"),
    ("stored", "ALol.loss", "x.above_reference.detach()", "x.above_reference"),
    ("stored", "ALol.loss", "* x.weights *", "*"),
    ("stored", "ALol.loss", "max(x.total_answers", "max(x.total_tokens"),
    ("stored", "CoPG.pull", "self.beta * x.gain", "x.gain"),
    ("stored", "CoPG.pull", "count * worth - total", "worth - total"),
    ("stored", "CoPG.pull", "x.rewards - self", "x.rewards + self"),
    ("stored", "CoPG.loss", "max(x.total_pairs", "max(x.total_answers"),
    ("stored", "CoPG.loss", "* x.weights *", "*"),
    ("stored", "WebRL.keep", "x.correct & ", ""),
    ("stored", "WebRL.keep", "sure >= math", "sure <= math"),
    ("stored", "WebRL.keep", "(sure <= math.log(max(self.high, 1e-300)))", "True"),
    ("stored", "WebRL.loss", "self.beta * x", "x"),
    ("stored", "WebRL.loss", "- x.advantages", "+ x.advantages"),
    ("stored", "WebRL.loss", "* x.weights", ""),
    ("stored", "WebRL.loss", " * _present(x)", ""),
    ("stored", "by_advantage", 'groups["best"]', 'groups["spread"]'),
    ("stored", "recent", "ages / half_life", "ages"),
    ("stored", "constant", "== k - 1", "== 0"),
    ("stored", "growing", "(steps - early) / last", "(steps - early) / first"),
    ("stored", "growing", "slope * early / first", "slope * early"),
    ("stored", "whole_step", "x.kept & rule.keep(x)", "rule.keep(x) | True"),
    ("stored", "whole_step", "x.mask * kept[x.answer]", "x.mask"),
    ("terms", "mdpo", "ratio * log_r - ratio + 1) / t", "ratio * log_r - ratio + 1) * t"),
    ("terms", "mdpo", "1 - x.step / decay", "1 - x.step"),
    ("terms", "mdpo", "ratio * log_r", "log_r"),
    ("terms", "mdpo", "-ratio * x", "-x"),
    ("recompose", "rorecomp", "not buffered and", ""),
    ("recompose", "rest", "& ~s.rewards.isnan()", ""),
    ("recompose", "right", "return", "return ~"),
    ("recompose", "pf_ppo", "best, others)", "others, best)"),
    ("recompose", "pf_ppo", "top | bottom", "top"),
    ("recompose", "pf_ppo", "s.rewards ** 2", "s.rewards"),
    ("recompose", "pf_ppo", "/ weights[places]", "* weights[places]"),
    ("recompose", "pf_ppo", "[s.seed, _STREAM, s.step, number]", "[_STREAM, s.step, number]"),
    ("recompose", "pf_ppo", "& (weights > 0)", ""),
    ("guided", "sft", "a.mask * a.second", "a.mask"),
    ("guided", "sft", "* a.mask * ", "* "),
    ("guided", "sft", "* a.weights[a.pair]", ""),
    ("guided", "sft", "-(a", "(a"),
    ("guided", "sft", "max(a.total_tokens", "max(a.total_attempts"),
    ("guided", "expo", "a.mask * a.second", "a.mask"),
    ("guided", "expo", "1 - a.step / decay", "1.0"),
    ("guided", "expo", "max(0.0, ", "("),
    ("guided", "expo", " * a.weights)", ")"),
    ("guided", "expo", "sums / lengths.clamp(min=1)", "sums"),
    ("guided", "expo", "max(a.total_attempts", "max(a.total_tokens"),
    ("terms", "critique_grpo", "p / (p + shape)", "p"),
    ("terms", "critique_grpo", "torch.where(guided, ", "torch.where(~guided, "),
    ("terms", "critique_grpo", "x.logprobs.exp()", "x.log_ratio.exp()"),
    ("terms", "critique_grpo", 'metrics["clipped"] & ~guided', 'metrics["clipped"]'),
    ("demonstrations", "Relift.collect", "dict.fromkeys(", "list("),
    ("demonstrations", "Relift.due", "self.buffer[self.size:]", "[]"),
    ("demonstrations", "Relift.due", "< self.size", "<= self.size"),
    ("demonstrations", "Relift.loss", "loss - self.entropy", "loss + self.entropy"),
    ("demonstrations", "Relift.loss", "d.entropy * d.mask", "d.entropy"),
    ("demonstrations", "Relift.optimizer", "self.made.load_state_dict(self._state)", "pass"),
    ("guided", "dpo", "- a.reference", ""),
    ("guided", "dpo", "1.0, -1.0)", "1.0, 0.0)"),
    ("guided", "dpo", "* a.mask * ", "* "),
    ("guided", "dpo", "beta * margin", "margin"),
    ("guided", "dpo", ") * a.weights)", "))"),
    ("guided", "dpo", "max(a.total_attempts", "max(a.total_tokens"),
    ("tree_advantage", "members", "if not s.rewards[i].isnan()", "if True"),
    ("tree_advantage", "nodes_of", "/ len(child)", ""),
    ("tree_advantage", "nodes_of", "/ len(through)", ""),
    ("tree_advantage", "nodes_of", "len(child) > 1", "len(child) > 2"),
    ("tree_advantage", "rose", "(lengths - low)", "lengths"),
    ("tree_advantage", "rose", "1 - shorter", "1 + shorter"),
    ("tree_advantage", "rose", "where(right, s.rewards", "where(~right, s.rewards"),
    ("tree_advantage", "rose", "- node.before", ""),
    ("tree_advantage", "treerl", "- root", ""),
    ("tree_advantage", "treerl", "- node.before", ""),
    ("tree_advantage", "treerl", "** 0.5", ""),
    ("tree_advantage", "deepsearch", "value - mean", "value"),
    ("tree_advantage", "deepsearch", "/ len(rollouts)", ""),
    ("tree_advantage", "deepsearch", "node.value / soft", "node.value"),
    ("tree_advantage", "deepsearch", "if node is not nodes[i][-1] else None", ""),
    ("tree_advantage", "deepsearch", "else -1.0", "else 0.0"),
    ("tree_advantage", "deepsearch", "~torch", "torch"),
    ("tree_advantage", "_on_nodes", "/ len(rollouts)", ""),
    ("tree_advantage", "_on_nodes", "~torch", "torch"),
    ("tree_advantage", "_on_nodes", "node.start)", "-node.start)"),
    ("turn_advantage", "gigpo", "weight * _zeroed", "_zeroed"),
    ("turn_advantage", "gigpo", "_zeroed(episode)[", "0 * _zeroed(episode)["),
    ("turn_advantage", "gigpo", "(int(s.group[i]), s.turns[i][t].anchor)", "(0, s.turns[i][t].anchor)"),
    ("turn_advantage", "gigpo", '("alone", i, t)', '("alone",)'),
    ("turn_advantage", "gigpo", "_returns(s, gamma)", "_returns(s, 1.0)"),
    ("turn_advantage", "turn_return", "(int(s.group[i]), t)", "int(s.group[i])"),
    ("turn_advantage", "turn_return", "_returns(s, gamma)", "_returns(s, 1.0)"),
    ("turn_advantage", "mobgrpo", "turns - fewest", "turns"),
    ("turn_advantage", "mobgrpo", "torch.where(truncated, 0.0, ", "torch.where(truncated, -penalty, "),
    ("turn_advantage", "mobgrpo", "decay ** torch", "1.0 ** torch"),
    ("turn_advantage", "_normalized", "if normalize else away", ""),
    ("turn_advantage", "rewards_of", "reward - sum(paid)", "reward"),
    ("turn_advantage", "_returns", "gamma * later", "later"),
    ("turn_advantage", "_paid", "[reward] * len(paid)", "[0.0] * len(paid)"),
    ("turn_advantage", "thor", "weight * called", "called"),
    ("turn_advantage", "thor", "_zeroed(_normalized(s.rewards", "0 * _zeroed(_normalized(s.rewards"),
    ("turn_advantage", "thor", "turn.parts.get(part, math.nan)", "turn.parts.get(part, 0.0)"),
    ("turn_advantage", "thor", "if reward == reward else math.nan", ""),
    ("turn_advantage", "thor", "_flat(steps), s.group[_episode_of(s)]", "_flat(steps), 0 * s.group[_episode_of(s)]"),
    ("turn_advantage", "hierarchical", "if place == 0", "if True"),
    ("turn_advantage", "hierarchical", "(int(g), number) if", "(int(g),) if"),
    ("turn_advantage", "hierarchical", "(int(g), number) if", "(0, number) if"),
    ("turn_advantage", "hierarchical", "_numbered([(int(g), number, place, plan", "_numbered([(0, number, place, plan"),
    ("turn_advantage", "hierarchical", "(int(g), number, place, plan", "(int(g), place, plan"),
    ("turn_advantage", "hierarchical", "(int(g), number, place, plan", "(int(g), number, plan"),
    ("turn_advantage", "hierarchical", "plan if same_plan else None", "None"),
    ("turn_advantage", "hierarchical", "plan if same_plan else None", "plan"),
    ("turn_advantage", "hierarchical", "_flat(_returns(s, gamma))", "_flat(_returns(s, 1.0))"),
    ("turn_advantage", "hierarchical", "_zeroed(_normalized(inside", "_zeroed(_normalized(returns"),
    ("turn_advantage", "hierarchical", ", _zeroed(macro))", ")"),
    ("turn_advantage", "plan_of", "bisect_right(ends, begin)", "bisect_left(ends, begin)"),
    ("turn_advantage", "plan_of", "bisect_left(ends, end + len", "bisect_right(ends, end + len"),
    ("turn_advantage", "plan_of", 'len("</plan>")', "0"),
    ("turn_advantage", "plan_of", "min(begin, end) < 0", "begin < 0"),
    ("turn_advantage", "plan_of", '"</plan>", begin)', '"</plan>")'),
    ("turn_advantage", "_subgoals", "place += 1", "pass"),
    ("turn_advantage", "_subgoals", "number + 1, 0,", "number + 1, place,"),
    ("turn_advantage", "_inside", "gamma * later", "later"),
    ("turn_advantage", "_inside", "later = float(after[i])", "later = 0.0"),
    ("turn_advantage", "_inside", "if places[i][1] == 0", "if True"),
    ("turn_advantage", "_inside", "out[::-1]", "out"),
    ("turn_advantage", "_on_tokens", "np.where(np.asarray(mask, bool), tokens, 0.0)", "tokens"),
    ("turn_advantage", "_on_tokens", "[turn.start:turn.end]", "[turn.start + 1:turn.end]"),
    ("turn_advantage", "_on_tokens", "tokens[slice(*turn.plan)] = planned", "pass"),
    ("gae", "gae", "d.paid - d.penalty", "d.paid"),
    ("gae", "gae", "s.gamma, s.lam", "s.lam, s.gamma"),
    ("gae", "gae", "found + d.values", "found"),
    ("gae", "turn_gae", "d.paid - d.penalty", "d.paid"),
    ("gae", "turn_gae", "values, targets = d.values[d.first]", "values, targets = d.values[d.last]"),
    ("gae", "turn_gae", "np.full(len(d.values), np.nan)", "d.values.copy()"),
    ("gae", "bilevel_gae", "d.values[d.last]", "d.values[d.first]"),
    ("gae", "bilevel_gae", "np.add.reduceat(d.paid, d.first)", "np.add.reduceat(d.paid - d.penalty, d.first)"),
    ("gae", "bilevel_gae", "rewards = -d.penalty", "rewards = 0 * d.penalty"),
    ("gae", "bilevel_gae", "turns + values ", "turns "),
    ("token_advantage", "clip_delta", "min(r - float(eta or 0.0), 0.0)", "(r - float(eta or 0.0))"),
    ("token_advantage", "clip_delta", "r - float(eta or 0.0)", "r"),
    ("token_advantage", "clip_delta", "strict=True) if r == r for", "strict=True) for"),
    ("token_advantage", "clip_delta", "scale * min", "min"),
    ("token_advantage", "clip_delta", "if normalize", "if not normalize"),
    ("token_advantage", "clip_delta", "torch.where(torch.from_numpy(np.asarray(mask, bool)), tokens, 0.0)", "tokens"),
    ("gae", "macro_gae", "d.paid - d.penalty", "d.paid"),
    ("gae", "macro_gae", "/ sizes", ""),
    ("gae", "macro_gae", "d.last + 1", "d.last"),
    ("gae", "macro_gae", "np.arange(a, b, tokens)", "np.arange(a, b, 2)"),
    ("gae", "macro_gae", "(found + values)", "found"),
    ("gae", "discounted", "np.append(values[1:], 0.0)", "np.append(values[1:], values[-1])"),
    ("gae", "discounted", "gamma * lam * later", "lam * later"),
    ("gae", "value_loss", "0.5 * (errors", "(errors"),
    ("gae", "value_loss", "* known * x.weights", "* x.weights"),
    ("gae", "value_loss", "errors * known * x.weights", "errors * known"),
    ("gae", "value_loss", "(x.mask > 0) & ", ""),
    ("gae", "value_loss", "torch.maximum(near, errors)", "torch.minimum(near, errors)"),
    ("gae", "value_loss", "max(x.total_values, 1.0)", "max(x.total_tokens, 1.0)"),
    ("gae", "_estimates", "if reward == reward else np.zeros(0, np.int64)", ""),
    ("gae", "_estimates", "whitened(flat, torch.ones_like(flat), eps) if normalize", "flat if normalize"),
    ("gae", "_decisions", ".clip(0)", ""),
    ("gae", "_decisions", 'side="right"', 'side="left"'),
    ("terms", "gspo_turn", "torch.stack([x.rollout_id, x.turns])", "torch.stack([x.rollout_id, 0 * x.turns])"),
    ("terms", "gspo_turn", "(x.log_ratio * x.mask, x.mask)", "(x.log_ratio, x.mask)"),
    ("terms", "gspo_turn", "clip_low: Reach = 3e-4", "clip_low: Reach = 4e-4"),
    ("terms", "ppo_macro", "torch.stack([x.rollout_id, x.turns])", "torch.stack([x.rollout_id, 0 * x.turns])"),
    ("terms", "ppo_macro", "torch.stack([x.rollout_id, x.turns])", "torch.stack([0 * x.rollout_id, x.turns])"),
    ("terms", "ppo_macro", "(x.mask > 0).long().cumsum(0)", "torch.ones_like(x.rollout_id).cumsum(0)"),
    ("terms", "ppo_macro", "x.log_ratio * x.mask", "x.log_ratio"),
    ("terms", "ppo_macro", "/ size.clamp(min=1)[macro]", ""),
    ("terms", "ppo_macro", "// tokens", "// 2"),
    ("terms", "ppo_macro", ".clamp(-20, 20)", ""),
    ("terms", "ppo_macro", "clip_low, clip_high)", "clip_high, clip_low)"),
    ("grouped", "count", "torch.where(values.isnan(), torch.nan, 1.0)", "torch.ones_like(values)"),
    ("grouped", "std", "- 1)", ")"),
    ("grouped", "smallest", "values.isnan(), torch.inf", "values.isnan(), 0.0"),
    ("grouped", "largest", "-smallest(-", "smallest("),
    ("grouped", "settled", ">=", ">"),
    ("grouped", "correct", "values > (", "values >= ("),
    ("grouped", "correct", "not part and above", "above"),
    ("shaping", "overlong", "- weight *", "+ weight *"),
    ("shaping", "overlong", "- (most - room)", "- most"),
    ("shaping", "overlong", ".clamp(0, 1)", ".clamp(0)"),
    ("shaping", "overlong", "most / 5", "most / 4"),
    ("shaping", "kimi_length", "least, 0.5 - ", "least, 1 - "),
    ("shaping", "kimi_length", ".clamp(max=0)", ""),
    ("shaping", "kimi_length", "s.step >= after", "s.step > after"),
    ("shaping", "kimi_length", "torch.where(s.rewards.isnan(), torch.nan, s.lengths)", "s.lengths"),
    ("shaping", "length_bonus", ">= 2", ">= 1"),
    ("shaping", "length_bonus", ">= low", "> low"),
    ("shaping", "length_bonus", "<= high", "< high"),
    ("shaping", "length_bonus", "= right &", "="),
    ("shaping", "cosine", "torch.cos(", "torch.sin("),
    ("shaping", "cosine", "(wrong_short - wrong_long)", "(wrong_long - wrong_short)"),
    ("shaping", "cosine", "exceed, values", "values, values"),
    ("shaping", "cosine", "is None else", "is not None else"),
    ("shaping", "_keep_unscorable", "torch.where(s.rewards.isnan(), torch.nan, values)", "values"),
    ("shaping", "dast", "(1 - share)", "share"),
    ("shaping", "dast", "clamp(min=0.1)", "clamp(min=0.0)"),
    ("shaping", "dast", "clamp(max=-0.1)", "clamp(max=0.1)"),
    ("shaping", "dast", "- 1\n", "\n"),
    ("shaping", "step_pruner", "weight * (1 - fewest / steps), s", "weight * (fewest / steps), s"),
    ("shaping", "step_pruner", "s.rewards.clamp(max=0)", "s.rewards"),
    ("shaping", "step_pruner", "torch.where(right, steps, torch.nan)", "steps"),
    ("shaping", "CallCost.__call__", "& ~s.rewards.isnan()", ""),
    ("shaping", "CallCost.__call__", "1 - self.quantile", "1.0"),
    ("shaping", "CallCost.__call__", ".clamp(0, 1)", ""),
    ("shaping", "CallCost.__call__", "(cost.sqrt() - low)", "(cost - low)"),
    ("shaping", "CallCost.__call__", "cheap = 1 - (", "cheap = ("),
    ("shaping", "CallCost.__call__", "(1 - self.alpha) * s.rewards", "s.rewards"),
    ("shaping", "CallCost.__call__", "(s.rewards >= 0) & ", ""),
    ("shaping", "CallCost.__call__", "torch.where(\n            cost.isnan(), cost, 0.5)", "torch.ones_like(cost)"),
    ("shaping", "CallCost.state_dict", "[*self._seen]", "[]"),
    ("shaping", "CallCost.load_state_dict", "self._seen.extend", "list"),
    ("shaping", "grsp", "s.rewards - weight", "s.rewards + weight"),
    ("shaping", "grsp", "ratio **", "1 **"),
    ("shaping", "grsp", "/ share.sum()", ""),
    ("shaping", "grsp", "torch.where(right,", "torch.where(~right,"),
    ("shaping", "grsp", "torch.where(s.rewards.isnan(), torch.nan, counts[k])", "counts[k]"),
    ("shaping", "_reasoning", '.partition("<answer>")[0]', ""),
    ("shaping", "_reasoning", '.partition("</think>")[0]', ""),
    ("recompose", "_priority", "-s.lengths", "s.lengths"),
    ("recompose", "_priority", "~good & ~s.rewards.isnan()", "~good"),
    ("recompose", "_compensates", "math.sin(", "math.cos("),
    ("recompose", "_compensates", "floor * steps", "steps"),
    ("recompose", "_compensates", "falling / 2", "falling"),
    ("recompose", "_first", "math.ceil", "math.floor"),
    ("recompose", "_first", "<= key[own]", "< key[own]"),
    ("recompose", "_first", "among & (", "("),
    # clip, terms, group_terms
    ("clip", "surrogate", "torch.minimum(", "torch.maximum("),
    ("clip", "surrogate", "ratio.clamp(1 - low, 1 + high)", "ratio"),
    ("clip", "surrogate", "clamp(1 - low, 1 + high)", "clamp(1 - high, 1 + low)"),
    ("clip", "surrogate", "ratio > 1 + high", "ratio > 1 + low"),
    ("clip", "surrogate", "ratio < 1 - low) & (a < 0)", "ratio < 1 - low) & (a > 0)"),
    ("clip", "surrogate", "ratio.clamp(max=delta)", "ratio.clamp(min=delta)"),
    ("clip", "surrogate", "ratio > delta", "ratio < delta"),
    ("clip", "surrogate", "torch.maximum(gain, dual_clip * a)", "torch.minimum(gain, dual_clip * a)"),
    ("clip", "surrogate", "torch.where(a < 0,", "torch.where(a > 0,"),
    ("clip", "surrogate", "ratio > dual_clip", "ratio < dual_clip"),
    ("clip", "surrogate", "return -gain", "return gain"),
    ("terms", "ppo_clip", "clip_low, clip_high, delta", "clip_high, clip_low, delta"),
    ("terms", "ppo_clip", "delta, dual_clip)", "dual_clip, delta)"),
    ("terms", "gspo", "sequence_mean(", "per_sequence("),
    ("terms", "gspo", "x.log_ratio)", "x.log_ratio.detach())"),
    ("terms", "gspo", "clip_high: Reach = 4e-4", "clip_high: Reach = 3e-4"),
    ("terms", "gspo_token", "x.log_ratio.detach()", "x.log_ratio"),
    ("terms", "gspo_token", "- x.logprobs.detach()", "- x.logprobs"),
    ("terms", "gspo_token", "clip_low: Reach = 3e-4", "clip_low: Reach = 4e-4"),
    ("terms", "cispo", "-ratio.clamp", "ratio.clamp"),
    ("terms", "cispo", "x.log_ratio.detach()", "x.log_ratio"),
    ("terms", "cispo", "else 1 + clip_high", "else clip_high"),
    ("terms", "cispo", "1 - clip_low", "clip_low"),
    ("terms", "cispo", "5.0 if", "1.2 if"),
    ("terms", "cispo", "min(math.inf", "max(math.inf"),
    ("terms", "sapo", "-4 / tau", "4 / tau"),
    ("terms", "sapo", "- 1)", ")"),
    ("terms", "sapo", "x.advantages > 0", "x.advantages < 0"),
    ("terms", "gmpo", "sequence_mean(", "per_sequence("),
    ("terms", "gmpo", "clamp(-clip_low, clip_high)", "clamp(-clip_high, clip_low)"),
    ("terms", "gmpo", "torch.minimum(free, clamped), torch.maximum(free, clamped)", "clamped, clamped"),
    ("terms", "gmpo", "-x.advantages * x", "x.advantages * x"),
    ("terms", "vespo", "per_sequence(", "sequence_mean("),
    ("terms", "vespo", "k_positive, k_negative)", "k_negative, k_positive)"),
    ("terms", "vespo", "- lam * log_w.exp()", "- log_w.exp()"),
    ("terms", "vespo", "(lam + k", "(k"),
    ("terms", "vespo", "-phi *", "phi *"),
    ("terms", "vespo", "+ x.sampler_gap", "- x.sampler_gap"),
    ("terms", "vespo", "with torch.no_grad():", "if True:"),
    ("terms", "reinforce", "-x.logprobs", "x.logprobs"),
    ("terms", "kimi", "tau / 2", "tau"),
    ("terms", "kimi", "-x.logprobs", "x.logprobs"),
    ("terms", "kimi", "/ x.lengths.clamp(min=1)", ""),
    ("terms", "kimi", ") ** 2", ").detach() ** 2"),
    ("terms", "dppo_tv", "moved <= delta_high", "moved <= delta_low"),
    ("terms", "dppo_tv", "moved >= -delta_low", "moved <= delta_low"),
    ("terms", "dppo_tv", ".clamp(max=cap)", ""),
    ("terms", "dppo_tv", "* keep", ""),
    ("terms", "dppo_tv", "with torch.no_grad():", "if True:"),
    ("terms", "dppo_tv", "-ratio", "ratio"),
    ("terms", "rover", ".detach()", ""),
    ("terms", "rover", "x.logprobs - x.old_logprobs", "x.logprobs"),
    ("terms", "rover", "- x.advantages - after", "- x.advantages + after"),
    ("terms", "rover", "(mean_q * x.mask)", "mean_q"),
    ("terms", "rover", "len(value) - 1)", "len(value))"),
    ("terms", "rover", "(x.rollout_id.roll(-1) == x.rollout_id) &", ""),
    ("terms", "rover", "scale * (value", "(value"),
    ("terms", "simko", "(1 - smooth) *", ""),
    ("terms", "simko", ".mean(-1)", ".sum(-1)"),
    ("terms", "simko", "x.entropy > x", "x.entropy < x"),
    ("terms", "simko", "& fork) *", ") *"),
    ("terms", "simko", "fork & first & (", "first & ("),
    ("terms", "simko", "& first &", "&"),
    ("terms", "simko", "x.advantages < 0", "x.advantages > 0"),
    ("terms", "supervised", "-x.logprobs", "x.logprobs"),
    ("terms", "_sequence_quantile", "& (x.mask > 0)", "& (x.mask < 9)"),
    ("group_terms", "nft", "clamp(0.02, 0.98)", "clamp(0.0, 1.0)"),
    ("group_terms", "nft", "1 - q, \"grpo\"", "q, \"grpo\""),
    ("group_terms", "nft", ".sqrt()", ""),
    ("group_terms", "nft", "& (hits < counts)", ""),
    ("group_terms", "nft", "clamp(max=10)", "clamp(max=20)"),
    ("group_terms", "nft", "/ (1 - q)\n", "\n"),
    ("group_terms", "nft", "1 - q * log_r.exp()", "1 - log_r.exp()"),
    ("group_terms", "nft", "rest + (rest.clamp(min=floor) - rest).detach()", "rest.clamp(min=floor)"),
    ("group_terms", "nft", "return -", "return "),
    ("group_terms", "nft", "torch.where(good, 1.0, negative)", "torch.where(good, negative, 1.0)"),
    ("group_terms", "Pacs.prepare", "- (x.group_sum(score) - score) / others", ""),
    ("group_terms", "Pacs.prepare", "- (x.group_sum(error) - error) / others", ""),
    ("group_terms", "Pacs.prepare", "(size - 1).clamp(min=1)", "size.clamp(min=1)"),
    ("group_terms", "Pacs.prepare", "(2 * same", "(same"),
    ("group_terms", "Pacs.prepare", "torch.sigmoid(z) - y", "y - torch.sigmoid(z)"),
    ("group_terms", "Pacs.prepare", "hits, size - hits", "size - hits, hits"),
    ("group_terms", "Pacs.prepare", "~x.rewards.isnan() & (x", "(x"),
    ("group_terms", "Pacs.prepare", "* (size > 1)", ""),
    ("group_terms", "Pacs.__call__", "self.beta *", ""),
    ("group_terms", "Pacs.__call__", "- x.logprobs.detach()", ""),
    ("group_terms", "Pacs.__call__", "/ x.spread(x.lengths).clamp(min=1)", ""),
    ("group_terms", "Oreal.prepare", "self.negative /", "1 /"),
    ("group_terms", "Oreal.prepare", "self.positive /", "1 /"),
    ("group_terms", "Oreal.prepare", "max(misses, 1.0)", "max(hits, 1.0)"),
    ("group_terms", "Oreal.prepare", "* x.total_tokens", ""),
    ("group_terms", "Oreal.prepare", "x.wrong(self.above)", "~good"),
    ("group_terms", "Oreal.__call__", "-x.logprobs", "x.logprobs"),
    ("group_terms", "Oreal.__call__", "if self.weighted", "if not self.weighted"),
    ("group_terms", "StableReinforce.prepare", "(a * mask).sum()", "a.sum()"),
    ("group_terms", "StableReinforce.prepare", "** 0.5", ""),
    ("group_terms", "StableReinforce.prepare", "self.sigma *", ""),
    ("group_terms", "StableReinforce.prepare", "<= reach", ">= reach"),
    ("group_terms", "StableReinforce.prepare", "((a - mean) ** 2 * mask)", "((a - mean) ** 2)"),
    ("group_terms", "StableReinforce.__call__", ".clamp(-bound, bound)", ""),
    ("group_terms", "StableReinforce.__call__", "per_token * keep", "per_token"),
    ("group_terms", "StableReinforce.__call__", "self.clip_low, self.clip_high", "self.clip_high, self.clip_low"),
    ("group_terms", "ClipCov.prepare", "cov > self.cov_low", "cov < self.cov_low"),
    ("group_terms", "ClipCov.prepare", "cov < self.cov_high", "cov > self.cov_high"),
    ("group_terms", "ClipCov.prepare", "& (x.mask > 0)", ""),
    ("group_terms", "ClipCov.prepare", "& ~clipped", ""),
    ("group_terms", "ClipCov.prepare", "ratio < 1 - self.clip_low", "ratio < 0"),
    ("group_terms", "ClipCov.prepare", "ratio > 1 + self.clip_high", "ratio > 99"),
    ("group_terms", "ClipCov.__call__", "per_token * keep", "per_token"),
    ("group_terms", "KlCov.prepare", "-_covariance(x)", "_covariance(x)"),
    ("group_terms", "KlCov.prepare", "x.mask > 0", "x.mask < 9"),
    ("group_terms", "KlCov.__call__", "-log_r.exp()", "log_r.exp()"),
    ("group_terms", "KlCov.__call__", "self.coef *", ""),
    ("group_terms", "KlCov.__call__", ".abs()", ""),
    ("group_terms", "_covariance", "a - sum_a", "a + sum_a"),
    ("group_terms", "_covariance", "(a * mask).sum()", "a.sum()"),
    ("group_terms", "_covariance", "logp - sum_l / max(n, 1.0)", "logp"),
    ("group_terms", "_portion", "max(int(share * x.total_tokens), 1)", "int(share * x.total_tokens)"),
    ("group_terms", "_first", "keys <= key", "keys < key"),
    ("group_terms", "_first", "values < value", "values > value"),
    ("group_terms", "token_keys", "place - (", "0 * place + ("),
    ("group_terms", "_mixed", "2**34 - 1", "2**64 - 1"),
    # kl, aggregation, correction, weights
    ("kl", "k1", "-_distance", "_distance"),
    ("kl", "k2", "/ 2", ""),
    ("kl", "k3", "- d - 1", "- d"),
    ("kl", "k3", "clamp(max=limit)", "clamp(min=limit)"),
    ("kl", "k1_plus", "k2(x, clamp)", "k1(x, clamp)"),
    ("kl", "k3_plus", "k2(x, clamp)", "k3(x, clamp)"),
    ("kl", "k3_unbiased", "if level == \"token\"", "if level != \"token\""),
    ("kl", "k3_unbiased", "log_r.exp()", "log_r.exp().detach()"),
    ("kl", "k3_score", "- x.logprobs.detach()", "- x.logprobs"),
    ("kl", "k3_score", "if from_sampler", "if not from_sampler"),
    ("kl", "_distance", "x.reference_logprobs - x.logprobs", "x.logprobs - x.reference_logprobs"),
    ("kl", "_distance", ".clamp(-clamp, clamp)", ""),
    ("kl", "_straight_through", ".detach()", ""),
    ("aggregation", "token_mean", "total_tokens", "total_sequences"),
    ("aggregation", "sequence_mean", "/ x.spread(x.lengths).clamp(min=1)", ""),
    ("aggregation", "sequence_mean", "max(x.total_sequences, 1.0)", "len(x.lengths)**2"),
    ("aggregation", "constant", "length or x.max_length", "x.max_length"),
    ("aggregation", "constant", "x.total_sequences *", ""),
    ("aggregation", "sequence_sum", "total_sequences", "total_tokens"),
    ("aggregation", "_sum", "* x.mask", ""),
    ("aggregation", "_sum", "* x.weights", ""),
    ("correction", "token_truncate", "x.sampler_gap", "_geometric(x)"),
    ("correction", "token_mask", "_masked(x, x.sampler_gap,", "_masked(x, _sequence(x),"),
    ("correction", "sequence_truncate", "_sequence(x)", "_geometric(x)"),
    ("correction", "sequence_mask", "_masked(x, _sequence(x),", "_masked(x, _geometric(x),"),
    ("correction", "geometric_truncate", "_geometric(x)", "_sequence(x)"),
    ("correction", "geometric_mask", "\"token\": x.sampler_gap", "\"token\": mean"),
    ("correction", "geometric_mask", "_masked(x, mean,", "_masked(x, x.sampler_gap,"),
    ("correction", "_masked", "torch.where(outside, 0,", "torch.where(outside, 1,"),
    ("correction", "_outside", "weight < (", "weight > ("),
    ("correction", "_outside", "weight > (", "weight < ("),
    ("correction", "_with_metrics", "(weight * x.mask)", "weight"),
    ("correction", "_with_metrics", "(outside * x.mask)", "outside"),
    ("weights", "TopEntropy.prepare", "1 - self.share", "self.share"),
    ("weights", "TopEntropy.prepare", ">= threshold", "> threshold"),
    ("weights", "TopEntropy.prepare", "& (x.mask > 0)", ""),
    ("weights", "TopEntropy.prepare", "x.entropy[x.mask > 0]", "x.entropy"),
    ("weights", "Hicra.__call__", "1 + self.alpha *", "1 - self.alpha *"),
    ("weights", "Hicra.__call__", "planning, 1", "~planning, 1"),
    ("weights", "Hicra.__call__", ".sign()", ""),
    ("weights", "_phrase", "(?!\\w)", ""),
    ("weights", "_phrase", "(?<!\\w)", ""),
    ("weights", "_phrase", "map(re.escape, text.split())", "text.split()"),
    ("weights", "_phrase", "\"WF\"", "\"\""),
    ("weights", "planning_tokens", "t.lower()", "t"),
    ("weights", "planning_tokens", "key=len, reverse=True", "key=len"),
    ("weights", "planning_tokens", "ends[i] >= match.end()", "ends[i] > match.end()"),
    ("weights", "difficulty", "(high - low) * d", "high * d"),
    ("weights", "difficulty", "d.isnan(), 1.0", "d.isnan(), 0.0"),
    ("weights", "dads", "-math.e * (1 - d)", "-math.e * d"),
    ("weights", "dads", "x.advantages > 0", "x.advantages < 0"),
    ("weights", "dads", "& (d < 1)", ""),
    ("weights", "dads", "~x.rewards.isnan()", "x.rewards.isnan() | True"),
    ("weights", "stcr", "2 - torch", "1 - torch"),
    ("weights", "stcr", "~good &", ""),
    ("weights", "stcr", "& ~x.rewards.isnan()", ""),
    ("weights", "stcr", "& (hits > 0)", ""),
    ("weights", "stcr", "& (excess > 0)", ""),
    ("weights", "stcr", "x.lengths * good", "x.lengths"),
    ("weights", "off_policy_sequence_mask", "sampled - x.logprobs", "x.logprobs - sampled"),
    ("weights", "off_policy_sequence_mask", "x.advantages < 0", "x.advantages > 0"),
    ("weights", "off_policy_sequence_mask", "away > delta", "away < delta"),
    ("weights", "off_policy_sequence_mask", "sequence_mean", "per_sequence"),
    ("weights", "off_policy_sequence_mask", ".nan_to_num(nan=0.0)", ""),
    ("weights", "off_policy_sequence_mask", "x.old_logprobs if", "x.old_logprobs if True or"),
]


def mutated(module: str, function: str, old: str, new: str) -> str:
    """The source of a module with one mistake in it. Raises ValueError when the text is not in the function once."""
    return running.mutated(_file(module), old, new, function)


def line_of(row: Row) -> str:
    """A mutant as a line."""
    return f"{row[0]}.{row[1]}: {row[2]!r} -> {row[3]!r}"


def read_killers() -> dict[str, str]:
    """By mutant the test that saw it, from `tests/algo` on."""
    return json.loads(KILLERS.read_text(encoding="utf-8")) if KILLERS.exists() else {}


def _file(module: str) -> Path:
    return ROOT / "vlrl" / "algo" / f"{module}.py"


def put(module: str, code: types.CodeType) -> None:
    """Gives the functions and classes of a loaded module the code of another source, wherever they are known."""
    loaded = importlib.import_module(f"vlrl.algo.{module}")
    made = types.ModuleType(loaded.__name__)
    exec(code, vars(made))
    for name, new in vars(made).items():
        old = getattr(loaded, name, None)
        if getattr(new, "__module__", None) != loaded.__name__:
            continue
        if isinstance(new, types.FunctionType):
            for part in ("__code__", "__defaults__", "__kwdefaults__"):
                setattr(old, part, getattr(new, part))
        elif isinstance(new, type):
            for part, value in vars(new).items():
                if part not in ("__dict__", "__weakref__"):
                    setattr(old, part, value)


class Trial:
    """A pytest plugin: collects once, then runs tests of a module again for each of its mutants.

    The first is the one that saw the mutant last time (`killers`), then all, those first that take the least time.
    """

    def __init__(self, modules: list[str], killers: Mapping[str, str]):
        self.modules, self.killers, self.alive = modules, killers, []
        self.killed_by: dict[str, str] = {}
        """By mutant the test that saw it."""
        self._seconds: dict[pytest.Item, float] = {}
        """Of the tests that passed without a mutant."""

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        gc.disable()  # it would make each process copy the memory that it shares with this one
        for module in self.modules:
            files = {f"test_{name}" for name in TESTS.get(module, [module])}
            tests = {_name(item): item for item in session.items if item.path.stem in files}
            rows = [row for row in MUTANTS if row[0] == module]
            known = dict.fromkeys(tests[name] for row in rows if (name := self.killers.get(line_of(row))) in tests)
            if self._sound(known):
                for row in rows:
                    self._try(row, tests)
        return True

    def _try(self, row: Row, tests: Mapping[str, pytest.Item]) -> None:
        code = compile(mutated(*row), f"{row[0]}.py", "exec")
        known = tests.get(self.killers.get(line_of(row), ""))
        by = _killer([known], row[0], code) if known else None
        if by is None and self._sound(tests.values()):
            by = _killer(sorted(tests.values(), key=self._seconds.__getitem__), row[0], code)
        if by is None:
            self.alive.append(line_of(row))
        else:
            self.killed_by[line_of(row)] = by

    def _sound(self, items: Iterable[pytest.Item]) -> bool:
        """Whether tests pass without a mutant."""
        new = [item for item in items if item not in self._seconds]
        self._seconds |= {item: sum(report.duration for report in reports) for item, reports in _run(new)}
        failed = next((_name(item) for item in new if item not in self._seconds), None)
        if failed:
            self.alive.append(f"{failed} fails without a mutant")
        return failed is None


def _name(item: pytest.Item) -> str:
    return item.nodeid.removeprefix("tests/algo/")


def _run(items: list[pytest.Item]) -> Iterator[tuple[pytest.Item, list[pytest.TestReport]]]:
    """Yields each test with its reports, up to the first that fails, which is left out."""
    for item, after in zip(items, [*items[1:], None], strict=False):
        reports = runtestprotocol(item, log=False, nextitem=after)
        if any(report.failed for report in reports):
            return
        yield item, reports


def _killer(items: list[pytest.Item], module: str, code: types.CodeType) -> str | None:
    """The first of the tests that fails with that code of the module, in a process of its own; None when all pass."""
    reader, writer = os.pipe()

    def passes() -> bool:
        put(module, code)
        passed = len(list(_run(items)))
        os.write(writer, b"." * passed)
        return passed == len(items)

    died = not running.forked(passes)
    os.close(writer)
    with open(reader, "rb") as output:
        passed = len(output.read())
    return _name(items[passed]) if died else None


def main(words: list[str]) -> int:
    """Tells which mutants of the modules (default: of all) live."""
    every = list(dict.fromkeys(row[0] for row in MUTANTS))
    parser = argparse.ArgumentParser(prog="python -m tests.algo.mutants", description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of vlrl.algo; all by default: {' '.join(every)}")
    parser.add_argument("--write", action="store_true", help=f"write to {KILLERS.name} which test saw each mutant")
    given = parser.parse_args(words)
    modules = given.modules or every
    trial = Trial(modules, read_killers())
    code, output = _pytest(trial, dict.fromkeys(name for module in modules for name in TESTS.get(module, [module])))
    if code:
        print(output)
    print("\n".join(trial.alive) or "every mutant died")
    others = sum(trial.killers.get(mutant) != test for mutant, test in trial.killed_by.items())
    if others and not given.write:
        print(f"{others} were seen by another test than {KILLERS.name} says, which takes long: --write notes it")
    if given.write:
        known = read_killers() | trial.killed_by
        ordered = {line: known[line] for line in map(line_of, MUTANTS) if line in known}
        KILLERS.write_text(json.dumps(ordered, indent=0) + "\n", encoding="utf-8")
    return 1 if code or trial.alive else 0


def _pytest(trial: Trial, names: Iterable[str]) -> tuple[int, str]:
    """Runs the trial on tests of these names; returns pytest's exit code and output."""
    torch.set_num_threads(1)  # a forked process waits for ever for the threads of the one that it is forked from
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=(
        hypothesis.Phase.explicit, hypothesis.Phase.generate))  # that a test fails is enough; no simpler case is asked
    hypothesis.settings.load_profile("mutants")
    with contextlib.redirect_stdout(io.StringIO()) as output:
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-m", "not slow", "--tb=native", "--assert=plain", "-W",
                            "ignore::pytest.PytestAssertRewriteWarning", f"--rootdir={ROOT}",
                            *(f"{ROOT}/tests/algo/test_{name}.py" for name in names)], plugins=[trial])
    return code, output.getvalue()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
