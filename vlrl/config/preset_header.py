"""The section `preset` of a preset's file: what the method does, and what it needs and costs.

    preset:
      for: recall.yaml                              # a shipped config that, with the preset, is the paper's method
      idea: compares turns from the same state      # what the method does, in at most 40 characters
      needs: {episodes: its credit is by turn}      # what a config must provide (NEEDS), and why
      sets_not: [a learned baseline]                # what of the paper the preset does not set
      cost: steps 4, reference                      # compared with a run without the preset (COSTS)
      paper: arXiv 2505.10978
      evidence: benchmarks/results/episodes.md      # a page with a run of the preset; "" without one

`needs: {unbuilt ...: why}` names a part of the paper that this version of vlrl lacks. A run reports it at its start."""

from pydantic import Field, field_validator

from vlrl.config.base import Settings
from vlrl.errors import did_you_mean

NEEDS = {
    "episodes": "a task with an environment",
    "answers": "a task of a single turn",
    "tasks": "several tasks",
    "parts": "this many reward parts with a weight",
    "part": "a reward part of this name",
    "prompt": "a prompt that holds this text",
    "gate": "task.combine=gate:...",
    "field": "rows with this field",
    "setting": "this setting",
    "reasoning": "given solutions that reason before their final answer",
    "mismatch": "an engine other than hf, 16 bits, or completions sampled by older weights",
    "reference_reward": "a reward that uses the reference policy",
    "knobs": "a task that generates samples by difficulty",
    "tokens": "rollout.max_new_tokens of at least this number",
    "writes": "completions with this, which no setting shows",
    "unbuilt": "a part of the paper that this version of vlrl does not have",
}
"""First word of a need (a key of `needs`) -> description of the requirement. A second word is the need's argument."""
_ALONE = {"episodes", "answers", "tasks", "gate", "mismatch", "reference_reward", "knobs", "reasoning"}
COSTS = {
    "none": ("", "nothing"),
    "reference": ("ref", "a forward pass of the reference"),
    "copy": ("copy", "a copy of the weights as the reference"),
    "steps": ("{} steps", "{} optimizer steps per batch, with old log-probabilities"),
    "passes": ("{} passes", "{} passes over each batch, with old log-probabilities"),
    "resampling": ("resample", "further groups in place of those that a filter drops"),
    "oversampling": ("oversample", "up to 4 times the groups"),
    "critic": ("critic", "a value head, and a pass for its values"),
    "replay": ("replay", "a pass on stored completions beside those of the step"),
    "retries": ("{} tries", "up to {} retries for each completion or group that failed"),
    "demonstrations": ("{} demos", "a backward pass on {} demonstrations"),
    "teacher": ("teacher", "a forward pass of a teacher and one of the policy, and the teacher's weights in memory"),
    "completions": ("{} each", "{} completions per prompt"),
    "tokens": ("{} tokens", "completions of up to {} tokens"),
    "probes": ("{} probes", "{} more completions per prompt, which are not trained on"),
    "greedy": ("greedy", "one more completion per prompt, decoded greedily"),
    "branches": ("branches", "groups that are sampled one branch after another"),
    "search": ("search", "a tree search for each hard prompt"),
    "forgetting": ("forget", "a forward and backward pass between the halves of a group"),
    "statistics": ("stats", "statistics of the whole distribution of each token"),
    "scan": ("scan", "a forward pass over all prompts before the first step"),
    "sft": ("{} SFT", "{} supervised steps"),
    "rl": ("{} RL", "{} steps of RL"),
    "rounds": ("{} rounds", "{} rounds of sampling and supervised learning"),
    "prompts": ("{} prompts", "{} prompts per round"),
}
"""First word of a cost -> a word for the table of `vlrl presets`, and the description; {} is the number behind the
word."""


class Header(Settings):
    """The section `preset` in the file of a preset, which describes the preset."""

    task: str = Field(alias="for", min_length=1)
    idea: str = ""
    needs: dict[str, str] = {}
    sets_not: list[str] = []
    cost: str = Field(min_length=1)
    paper: str = Field(min_length=1)
    evidence: str = ""

    @field_validator("needs")
    @classmethod
    def _known(cls, needs: dict[str, str]) -> dict[str, str]:
        for need in needs:
            word, _, which = need.partition(" ")
            if word not in NEEDS:
                raise ValueError(f"`needs` has the unknown entry {need!r}.{did_you_mean(word, NEEDS)} Known: "
                                 f"{', '.join(NEEDS)}")
            if bool(which) == (word in _ALONE):
                raise ValueError(f"`needs: {word}` takes {'no argument' if which else 'an argument'}: "
                                 f"{NEEDS[word]}")
            if word in ("parts", "tokens") and not which.isdecimal():
                raise ValueError(f"`needs: {need}` takes a number, e.g. '{word} 2'")
        return needs

    @field_validator("cost")
    @classmethod
    def _priced(cls, cost: str) -> str:
        for word, count in costs(cost):
            if word not in COSTS:
                raise ValueError(f"`cost` has the unknown entry {word!r}.{did_you_mean(word, COSTS)} Known: "
                                 f"{', '.join(COSTS)}")
            if ("{}" in COSTS[word][1]) != bool(count) and word != "rl":
                raise ValueError(f"`cost: {word}` takes {'no number' if count else 'a number'}: {COSTS[word][1]}")
        return cost


def costs(cost: str) -> list[tuple[str, str]]:
    """The entries of a `cost`, as (word of COSTS, number or ""): "steps 4, reference" -> [("steps", "4"), ...]."""
    return [(word, count) for word, _, count in (entry.strip().partition(" ") for entry in cost.split(","))]


def cost_in_words(cost: str) -> str:
    """The entries of a `cost` as one phrase, e.g. "4 optimizer steps per batch, with old log-probabilities"."""
    return "; ".join(COSTS[word][1].format(count or "the run's") for word, count in costs(cost))


def costs_in_short(cost: str) -> list[str]:
    """The entries of a `cost` in short, e.g. ["4 steps", "ref"]; [] for "none"."""
    return [COSTS[word][0].format(count).strip() for word, count in costs(cost) if word != "none"]
