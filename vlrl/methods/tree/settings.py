"""Settings of the config section `rollout.branch`."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, model_validator

from vlrl.config.base import Count, Fraction, MethodSettings, Named, NonNegative, Positive, Settings


class SearchSettings(Settings):
    """A search tree of pieces of completions, expanded at its most promising node (DeepSearch, 2509.25454)."""

    width: Annotated[int, Field(ge=2)] = Field(default=8, description="Pieces generated from one node.")
    depth: Annotated[int, Field(ge=2)] = Field(default=64, description=(
        "Maximum number of pieces of an answer. A piece has rollout.max_new_tokens / depth tokens, rounded up: "
        "256 with the paper's 16,384. Each expanded node computes the text before it again, so about 4 suits "
        "short answers."))
    explore: NonNegative = Field(default=2.0, description=(
        "Weight of the exploration bonus among new pieces. The bonus sqrt(ln N(parent) / N) is added to Q, if "
        "none of the pieces ends the answer."))
    by_value: NonNegative = Field(
        default=0.4, description=(
        "Weight of tanh(Q(parent)) among all open nodes. They are compared if a new piece ends an answer."))
    by_entropy: NonNegative = Field(
        default=0.0, description=(
        "Weight of a piece's entropy among open nodes. The entropy is the mean of -log p in nats."))
    by_depth: NonNegative = Field(default=0.01, description="Weight of sqrt(pieces so far / depth) among open nodes.")
    least: Fraction = Field(
        default=0.1, description=(
        "Smallest share of an answer's value backed up. The share grows from the prompt to 1 at the end."))
    hard: Fraction = Field(default=0.25, description=(
        "Search while at most this share was correct. The share is that of the prompt's last visit; other prompts "
        "are answered without search."))
    cache: Count = Field(default=4096, description=(
        "Prompts whose share of correct answers is remembered. For hard prompts the correct answers are stored "
        "too, and begin the group at the next visit in place of a search. The least recently visited prompts are "
        "dropped first. 0 = every visit is a search."))

    @model_validator(mode="after")
    def _applies(self) -> SearchSettings:
        if not self.cache and self.hard != type(self).model_fields["hard"].default:
            raise ValueError(f"rollout.branch.search.hard={self.hard:g} has no effect with "
                             "rollout.branch.search.cache=0, because no results are remembered: set "
                             "rollout.branch.search.cache above 0, or leave rollout.branch.search.hard out")
        return self


class BranchSettings(MethodSettings):
    """Completions of a group share text: they continue each other's prefixes instead of starting at the prompt."""

    roots: Positive | None = Field(default=None, description=(
        "Answers of a group generated from the prompt; others branch. Each other answer branches from an existing "
        "one and shares the text before the branch. null = all answers are generated from the prompt. Advantages "
        "by node of the tree: algo.advantage=rose, treerl or tempo."))
    at: Named = Field(default=Named(name="surprise"), description=(
        "Where an answer branches: surprise, uniform or meaning. surprise = at the token with the lowest "
        "log-probability, then the next lowest (TreeRL, 2506.11902); uniform = anywhere; meaning = where the "
        "meanings of short continuations differ most (ROSE; options: continuations, tokens, candidates, root, "
        "alike); or your own path/file.py:name. Episodes branch between turns."))
    search: SearchSettings | None = Field(default=None, description=(
        "Tree search in place of rollout.branch.roots; {} = defaults. It generates rollout.group_size leaves, one "
        "per expansion. Advantage: algo.advantage=deepsearch. null = none."))
    tokens: Positive | None = Field(default=None, description=(
        "Token budget of a group. Once it is spent no further answer is begun and no further node is expanded; "
        "rollout.group_size is then the maximum number of answers."))

    @model_validator(mode="after")
    def _applies(self) -> BranchSettings:
        if self.search and self.roots is not None:
            raise ValueError(f"rollout.branch.roots={self.roots} and rollout.branch.search both decide where answers "
                             "begin: set one of these two settings to null")
        for name in self.model_fields_set - {"roots", "search"}:
            if name == "tokens" and self.search:
                continue
            if self.roots is None and getattr(self, name) != type(self).model_fields[name].default:
                value = self.at.name if name == "at" else getattr(self, name)
                said = f"rollout.branch.{name}={value} applies to answers that branch"
                if self.search:
                    raise ValueError(f"{said} from roots, but rollout.branch.search is set: leave "
                                     f"rollout.branch.{name} out")
                ways = "roots or search" if name == "tokens" else "roots"
                raise ValueError(f"{said}: set rollout.branch.{ways} too, or leave rollout.branch.{name} out")
        return self

    @property
    def active(self) -> bool:
        return self.roots is not None or self.search is not None

    def problem(self, config: Any) -> str:
        rollout, staleness = config.rollout, config.asynchronous.max_staleness
        name = "search" if self.search else "roots"
        named = "rollout.branch.search" if self.search else f"rollout.branch.roots={self.roots}"
        off = f"set rollout.branch.{name}=null"
        if self.roots is not None and self.roots >= rollout.group_size:
            return (f"{named} leaves none of the rollout.group_size={rollout.group_size} answers to branch: lower "
                    f"rollout.branch.roots, or {off}")
        if rollout.step_tokens is not None or rollout.forget.active:
            other = "rollout.forget.lr" if rollout.forget.active else "rollout.step_tokens"
            return f"{named} and {other} both decide how a group is generated: {off}, or leave {other} out"
        if staleness:
            return f"{named} does not work with async.max_staleness={staleness}: set async.max_staleness=0, or {off}"
        return ""


def branch_of(config: Any) -> BranchSettings:
    return config.rollout.branch


def without_nodes(config: Any, advantage: str) -> str:
    """The error message for an advantage that reads search nodes while rollout.branch.search=null; "" if there is a
    search."""
    if branch_of(config).search is not None:
        return ""
    return (f"algo.advantage={advantage!r} reads the nodes of a tree search, but rollout.branch.search=null: set "
            "rollout.branch.search={} (docs/objectives.md), or choose an advantage without a search, such as "
            "algo.advantage=grpo")
