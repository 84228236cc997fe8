"""The settings `rollout.*`, `async.*` and `curriculum.*`: how and when answers are drawn, to which prompts, and which
are learned from."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, SerializeAsAny, model_validator

from vlrl.config.algo import AlgoSettings
from vlrl.config.base import Count, Fraction, MethodSettings, Named, NonNegative, Positive, Settings
from vlrl.config.sections import default_of, section


def _factor(value: Any) -> Any:
    """Returns a number as the fixed factor of curriculum.oversample."""
    return {"name": "fixed", "factor": value} if isinstance(value, (int, float)) else value


class SearchSettings(Settings):
    """A tree of pieces of answers that is grown where it promises most (DeepSearch, 2509.25454)."""

    width: Annotated[int, Field(ge=2)] = Field(default=8, description="Pieces that are written from one node.")
    depth: Annotated[int, Field(ge=2)] = Field(
        default=64, description="Most pieces of an answer; one has rollout.max_new_tokens / depth tokens, rounded up: "
        "256 with the 16,384 of the paper. The text before a piece is read again for each node that grows: about 4 "
        "where answers are short.")
    explore: NonNegative = Field(
        default=2.0, description="Weight of sqrt(ln N(parent) / N) beside Q in the choice among the new pieces, where "
        "none of them has ended.")
    by_value: NonNegative = Field(
        default=0.4, description="Weight of tanh(Q(parent)) in the choice among all open nodes, once an answer has "
        "ended.")
    by_entropy: NonNegative = Field(
        default=0.0, description="Weight of the piece's entropy, its mean -log p in nats, in that choice.")
    by_depth: NonNegative = Field(default=0.01, description="Weight of sqrt(pieces so far / depth) in that choice.")
    least: Fraction = Field(
        default=0.1, description="Least share of an answer's worth that a node on its way is given; it grows from the "
        "prompt to 1 at the end.")
    hard: Fraction = Field(
        default=0.25, description="A prompt is searched while at most this share of its answers was right at its last "
        "visit; others are answered from the prompt.")
    cache: Count = Field(
        default=4096, description="Prompts of which that share is remembered, and the right answers where it is so "
        "low: the next visit begins with these, in place of a search. The longest unseen ones leave first. 0 = every "
        "visit is a search.")

    @model_validator(mode="after")
    def _applies(self) -> SearchSettings:
        if not self.cache and self.hard != type(self).model_fields["hard"].default:
            raise ValueError(f"rollout.branch.search.hard={self.hard:g} cannot act with rollout.branch.search.cache=0: "
                             "nothing is remembered of a visit. Give it room, or leave rollout.branch.search.hard out")
        return self


class BranchSettings(Settings):
    """Answers of a group that go on from each other's text instead of the prompt."""

    roots: Positive | None = Field(
        default=None, description="Answers of a group that are written from the prompt; each of the others goes on "
        "from a point in one that is there, and shares what comes before it. null = all from the prompt. Credit by "
        "node: algo.advantage=rose, treerl or tempo.")
    at: Named = Field(
        default=Named(name="surprise"), description="Where an answer parts from another: surprise = at the token with "
        "the lowest log-probability, then at the next one (TreeRL, 2506.11902); uniform = anywhere; meaning = where "
        "the meanings of short continuations differ most (ROSE; options: continuations, tokens, candidates, root, "
        "alike); or your own path/file.py:name. Episodes part between turns.")
    search: SearchSettings | None = Field(
        default=None, description="Answers are found by a tree search in place of rollout.branch.roots: "
        "rollout.group_size of its leaves, one for each node that grew. Credit: algo.advantage=deepsearch. {} = with "
        "the defaults below; null = none.")
    tokens: Positive | None = Field(
        default=None, description="New tokens of a group after which no further answer is begun, and no further node "
        "of a search grows: a budget in place of a number of answers, of which rollout.group_size is then the most.")

    @model_validator(mode="after")
    def _applies(self) -> BranchSettings:
        if self.search and self.roots is not None:
            raise ValueError(f"rollout.branch.roots={self.roots} and rollout.branch.search both say where answers "
                             "begin: set one of them to null")
        for name in self.model_fields_set - {"roots", "search"}:
            if name == "tokens" and self.search:
                continue
            if self.roots is None and getattr(self, name) != type(self).model_fields[name].default:
                value = self.at.name if name == "at" else getattr(self, name)
                said = f"rollout.branch.{name}={value} applies to answers that branch"
                if self.search:
                    raise ValueError(f"{said} from roots: leave it out, as rollout.branch.search says where they part")
                ways = "roots or search" if name == "tokens" else "roots"
                raise ValueError(f"{said}: set rollout.branch.{ways} too, or leave it out")
        return self

    def problem(self, rollout: RolloutSettings, staleness: int) -> str:
        """Returns why other settings forbid it, and the way out; "" where nothing does."""
        if self.roots is None and self.search is None:
            return ""
        name = "search" if self.search else "roots"
        named = "rollout.branch.search" if self.search else f"rollout.branch.roots={self.roots}"
        off = f"set rollout.branch.{name}=null"
        if self.roots is not None and self.roots >= rollout.group_size:
            return (f"{named} leaves none of rollout.group_size={rollout.group_size} answers to branch: lower it, or "
                    f"{off}")
        if rollout.step_tokens is not None:
            other = "rollout.step_tokens"
            return f"{named} and {other} both say how a group is written: {off}, or leave {other} out"
        if staleness:
            return f"{named} does not go with async.max_staleness={staleness}: set async.max_staleness=0, or {off}"
        return ""


class RolloutSettings(Settings):
    """How many answers a step draws, how they are sampled, and how often they are learned from."""

    prompts_per_step: Positive = Field(default=32, description="Prompts a step, over all processes.")
    group_size: Annotated[int, Field(ge=2)] = Field(default=8, description="Answers per prompt.")
    max_new_tokens: Positive = Field(default=512, description="Most tokens of one answer.")
    temperature: float = Field(default=1.0, gt=0, description="Sampling temperature; training uses the same.")
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = Field(
        default=(), description="Texts that end an answer; they stay part of it. Evaluations use them too.")
    thinking_budget: Positive | None = Field(
        default=None, description="Tokens after which an answer without </think> gets rollout.thinking_end, and goes "
        "on from there. Evaluations use it too.")
    thinking_end: str = Field(
        default="\n</think>\n", description="Text that ends thinking over budget; it is not learned from. "
        "</think><answer> forces an answer as GLM-4.1V-Thinking does (2507.01006).")
    step_tokens: Positive | None = Field(
        default=None, description="Most tokens of an answer that one step writes: a longer one goes on in the next "
        "step, and its group waits for it. Only what its last step wrote is learned from. Evaluations write whole "
        "answers.")
    score_ahead: bool = Field(
        default=True, description="Score finished groups in a thread while others are generated; false for a task that "
        "works in the main thread only.")
    forget: Annotated[SerializeAsAny[MethodSettings], section("rollout.forget")] = Field(
        default_factory=default_of("rollout.forget"))
    branch: BranchSettings = BranchSettings()
    updates: Positive = Field(default=1, description="Passes over one batch of rollouts.")
    minibatches: Positive = Field(default=1, description="Optimizer steps per pass.")


    @model_validator(mode="after")
    def _limits_apply(self) -> RolloutSettings:
        if self.thinking_budget is not None and self.thinking_budget >= self.max_new_tokens:
            raise ValueError(f"rollout.thinking_budget={self.thinking_budget} is not below rollout.max_new_tokens="
                             f"{self.max_new_tokens}, so it would never apply: lower it, or set it to null")
        if self.step_tokens is not None and self.step_tokens >= self.max_new_tokens:
            raise ValueError(f"rollout.step_tokens={self.step_tokens} is not below rollout.max_new_tokens="
                             f"{self.max_new_tokens}, so every answer ends in its first step: lower it, or set it to "
                             "null")
        if "</think>" not in self.thinking_end:
            raise ValueError(f"rollout.thinking_end={self.thinking_end!r} does not hold </think>, so thinking would "
                             "go on: add it")
        return self


class AsyncSettings(Settings):
    """Generation beside the update: answers of later steps are drawn while a step learns (docs/asynchronous.md)."""

    max_staleness: Count = Field(
        default=0, description="Most steps between the weights that sample an answer and those that learn from it. 0 = "
        "generate, then learn; 1 = the answers of a step are drawn while the step before it learns; more = so many "
        "steps are drawn ahead, and the engine takes new weights as rarely. Needs algo.correction; the hf engine keeps "
        "a copy of the model for it.")

    def problem(self, rollout: RolloutSettings, algo: AlgoSettings) -> str:
        """Returns why other settings forbid it, and the way out; "" where nothing does."""
        if not self.max_staleness:
            return ""
        most, off = self.max_staleness, "set async.max_staleness=0"
        if rollout.step_tokens is not None:
            return (f"async.max_staleness={most} draws a step's answers before it is known which of "
                    f"rollout.step_tokens={rollout.step_tokens} go on from the step before: leave "
                    f"rollout.step_tokens out, or {off}")
        if not algo.corrected:
            return (f"async.max_staleness={most} learns from answers of older weights, and with algo.correction=none "
                    f"algo.loss={algo.loss.name} takes them for answers of its own. Set algo.correction=token_truncate "
                    f"(extends=algorithms/decoupled_ppo.yaml is the decoupled objective), or {off}")
        return ""


class CurriculumSettings(Settings):
    """Which samples are drawn, and which groups are learned from. Further keys are options of the sampler."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    name: str = Field(default="uniform", min_length=1, description="What draws the prompts: uniform, sequential, sec, "
                      "... (docs/curriculum.md) or own module:Class. Its options stand beside: `curriculum.alpha=0.5`.")
    keep: Named = Field(
        default=Named(name="all"), description="Which groups are trained on; others are refilled. all; mixed: those "
        "that give some answer an advantage; some_right: those with right and wrong answers; pass_range: pass rates "
        "from low to high; std_ema: rewards that vary enough beside those of earlier steps; or own module:function.")
    max_refills: Count = Field(default=3, description="Most extra rounds of generation in a step to replace groups "
                               "that are not kept.")
    oversample: Annotated[Named, BeforeValidator(_factor)] = Field(
        default=Named(name="fixed"), description="Groups drawn for each one wanted: a number from 1 on, or ema: 1 / "
        "the share of groups that were neither all right nor all wrong, smoothed.")
    select: Named = Field(
        default=Named(name="first"), description="Which of more kept groups than are wanted are trained on: first, "
        "nearest_half (pass rate), most_varied (rewards), or own module:function.")
    part: str | None = Field(
        default=None, min_length=1, description="The reward part that says whether an answer is correct, to "
        "objectives, curricula, difficulty and evaluations alike; null = what the task names as its outcome.")
    pass_at: float | None = Field(default=None, description="An answer is correct when that part is at least this "
                                  "much; null = the task's threshold, 0.5 for another part than its own.")

    @property
    def sampler(self) -> Named:
        """The sampler with its options."""
        return Named(name=self.name, **(self.model_extra or {}))
