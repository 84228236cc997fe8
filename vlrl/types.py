"""The core types, from a data row to a weight update.

    Sample -> Prompt -> Completion -> Rollout (+ reward, + advantage) -> Group -> packing.Batch

Everything is frozen; a later stage adds fields with `dataclasses.replace`. Shapes are in the field docs: P prompt
tokens, T tokens of one episode, G rollouts of a group. No torch: arrays are numpy, model inputs are Any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from vlrl.media import LoadedMedia as LoadedMedia
from vlrl.media import Media as Media
from vlrl.media import Observation as Observation
from vlrl.media import PastAction as PastAction
from vlrl.media import Step as Step

Record = Mapping[str, Any]
"""A JSON object as it was read, such as one entry of a data file."""
Row = dict[str, Any]
"""A JSON object that code makes or completes, such as a row with the canonical fields of vlrl.data."""
Parts = dict[str, float | None]
"""Raw reward parts by name, each in its natural range; None marks a rollout that cannot be scored."""


@dataclass(frozen=True)
class StepValues:
    """Value of a reward part at each step of an answer; float() is the mean."""

    values: tuple[float, ...]
    ends: tuple[int, ...]
    """End of each step, in characters of the answer's text; rising."""

    def __float__(self) -> float:
        return float(np.mean(self.values)) if self.values else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One data row and its media: everything a task needs to ask the question and to score the answer.

    Example: `Sample(id="train-7", media=(Media(source=image),), row={"label": "cat"})`."""

    id: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """JSON-able fields of the row, in original pixels and seconds."""
    media: tuple[Media, ...] = ()
    prompt: str = ""
    """The prompt template of this visit, when the task offers several; empty = the task's first."""
    task: str = ""
    """Label of its task in a mixture (`tasks:`); empty without a mixture."""
    opening: Observation | None = None
    """Of an episode, the environment's observation at the reset; it follows the task's own messages."""
    environment_seed: int | None = None
    """Seed of that reset, the same for all episodes of a group."""
    reset_error: str | None = None
    """Why its environment could not be reset, beginning with "reset: "; its episodes have no actions and no reward."""

    def __getitem__(self, key: str) -> Any:
        return self.row[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.row.get(key, default)

    @property
    def difficulty(self) -> float | None:
        """In [0, 1], 1 = hardest; None where the row has none."""
        return self.row.get("difficulty")

    @property
    def category(self) -> str | None:
        return self.row.get("category")

    @property
    def weight(self) -> float:
        """Factor of the row's loss."""
        weight = self.row.get("weight")
        return 1.0 if weight is None else float(weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """Further completions of a sample's question with other media: shuffled frames, a noisy image.

    Example: `Variant(name="shuffled", media=(replace(sample.media[0], edits=(("shuffle", 17),)),), n=4)`."""

    name: str
    media: tuple[Media, ...]
    """As many as the sample has, of the same kinds and sizes."""
    n: int
    """Number of completions; part of rollout.group_size when trained on, else sampled in addition."""
    trained: bool = False
    """Whether they join the group and are trained on under the unchanged prompt; else they are only scored, and passed
    to `Task.score_group` as `services.variants[name]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InsertedObservation:
    """An observation with media at tokens start..stop, and the size of its media."""

    start: int
    stop: int
    rows: Mapping[str, int]
    """Number of rows in each tensor of `Prompt.mm`."""
    visuals: int
    """Number of `Prompt.visuals`."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """A sample as the model sees it. Made once per sample by models/processing.py and shared by engine and trainer."""

    sample_id: str
    text: str
    """Rendered chat text with unexpanded media placeholders."""
    ids: np.ndarray
    """[P] int64, media placeholders expanded to one id per visual token."""
    raw_ids: np.ndarray
    """Unexpanded ids, for an engine that runs its own processor on `media`."""
    positions: np.ndarray
    """[R, P] int64 rotary positions by the model's own rope index; R = 3 with M-RoPE, else 1."""
    mm: Mapping[str, Any] = field(default_factory=dict)
    """Media tensors by their keyword of the model's forward; concatenated on dimension 0 over the prompts of a batch.
    """
    aligned: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[P] arrays aligned with the ids by name, such as token types."""
    aligned_answer: Mapping[str, int] = field(default_factory=dict)
    """Their values on completion tokens, by name; default 0."""
    media: tuple[LoadedMedia, ...] = ()
    processed_sizes: tuple[tuple[int, int], ...] = ()
    """Width and height of each image or video frame after the processor, in pixels; empty where it makes tiles."""
    visual_tokens: tuple[int, ...] = ()
    """Visual tokens of each media; empty where unknown."""
    visuals: tuple[Any, ...] = ()
    """The same media as units of the feature cache (models/vision_cache.py); empty without one."""
    opened: str = ""
    """The end of its text that starts the completion, written by the chat template, such as "<think>"."""
    inserted: tuple[InsertedObservation, ...] = ()
    """Observations with media that were appended to it, in order."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def next_position(self) -> int:
        """Position of the first token after the prompt, the same on every row."""
        return int(self.positions.max()) + 1 if self.positions.size else 0

    def followed_by(self, tokens: np.ndarray) -> Prompt:
        """The prompt followed by the first [T] tokens of a completion."""
        places = np.arange(self.next_position, self.next_position + len(tokens))
        beside = {name: np.concatenate([ids, np.full(len(tokens), self.aligned_answer.get(name, 0), ids.dtype)])
                  for name, ids in self.aligned.items()}
        return replace(self, ids=np.concatenate([self.ids, tokens]), raw_ids=np.concatenate([self.raw_ids, tokens]),
                       positions=np.concatenate([self.positions, np.tile(places, (len(self.positions), 1))], axis=1),
                       aligned=beside)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of an episode: tokens start..end; media shown with an observation."""

    start: int
    end: int
    role: Literal["assistant", "observation"] = "assistant"
    media: tuple[str, ...] = ()
    """Hashes of media added by this turn."""
    text: str = ""
    opened: str = ""
    """For an action, text that its prompt started it with, such as "<think>"; not in `text`."""
    parts: Mapping[str, float] | None = None
    """For an action, like all fields below: the environment's response; None before it has responded."""
    state: str | None = None
    done: bool | None = None
    seconds: float | None = None
    error: str | None = None
    info: Mapping[str, Any] | None = None
    prompt_ids: tuple[int, ...] | None = None
    """Ids of the prompt that it was sampled with, where `episode.history` drops earlier turns."""

    @property
    def calls(self) -> list[Mapping[str, Any]] | None:
        """Name, arguments and error of each tool call, as recorded by its environment; None without any."""
        noted = (self.info or {}).get("calls")
        return noted if isinstance(noted, list) and all(isinstance(call, Mapping) for call in noted) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One episode's tokens after the prompt. A plain completion is one turn, or one per piece of a partial rollout."""

    tokens: np.ndarray
    """[T] int64, including the end token if the model wrote one."""
    logprobs: np.ndarray
    """[T] float32 under the sampler, at the sampling temperature without banned ids; of forced tokens too."""
    loss_mask: np.ndarray
    """[T] bool; False on tokens that were not sampled (observations, a forced end of thinking) or, in a trained group,
    were sampled in earlier steps."""
    text: str
    """The decoded tokens without the end token; includes a stop string."""
    finish_reason: Literal["stop", "length", "turns", "tokens", "media"]
    """stop: an end token or a stop string was written; length: max_new_tokens were reached. For an episode, stop: its
    environment ended it; else the limit of `episode.*` that did."""
    turns: tuple[Turn, ...] = ()
    episode_id: str = ""
    shown: Prompt | None = None
    """The tokens as the model sees them after the prompt, if there are observations: positions in the episode, and the
    media of all observations in order."""
    error: str | None = None
    """Why its environment failed; such an episode is not scored."""
    observed_media: tuple[LoadedMedia, ...] = ()
    """Media of all its observations in order, including those after its last action."""
    windows: tuple[Prompt, ...] = ()
    """With `episode.history=last:k`: for each action the tokens after the prompt that the model saw in that turn, the
    action at the end; `shown` is None then."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON that one method keeps under its name, and only that method reads. `turns` in it, {start, end, info} each,
    are stored as the turns of a completion without turns."""
    policy_step: int | None = None
    """Completed steps of the weights that sampled it, if it was kept from an earlier visit; None = the current."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason != "stop"

    @property
    def begun(self) -> bool:
        """False for an episode whose environment could not be reset: it has no tokens, and an error."""
        return self.error is None or len(self.tokens) > 0

    @property
    def actions(self) -> tuple[Turn, ...]:
        """The actions of an episode; () for a plain completion, whose turns are pieces of a partial rollout."""
        return tuple(t for t in self.turns if t.role == "assistant") if self.episode_id else ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each training row."""
        return [*map(len, self.windows)] or [len(self.tokens)]

    def behind(self, prompt: Prompt, other: Prompt) -> Completion:
        """The completion of one prompt with its positions shifted to follow another one."""
        by = other.next_position - prompt.next_position
        shown, *windows = (p and replace(p, positions=p.positions + by) for p in (self.shown, *self.windows))
        return replace(self, shown=shown, windows=tuple(windows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a task scores: the text of an answer and the parts marked by tags.

    Example: `<think>a loop</think><answer>8</answer>` has reasoning "a loop" and final "8"; without tags all is final.
    """

    text: str
    """The text that the prompt opened, plus the completion."""
    reasoning: str = ""
    final: str = ""
    n_tokens: int = 0
    truncated: bool = False
    step: int = 0
    variant: str = ""
    """Name of the Variant that it was sampled with; empty for the unchanged sample."""
    turns: tuple[PastAction, ...] = ()
    """All actions of an episode; `text` is the last one."""
    opened: str = ""
    """The beginning of `text` that was in the prompt, such as "<think>"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One scored completion of a group."""

    group_id: str
    index: int
    """Index in the group, 0..G-1."""
    completion: Completion
    policy_step: int
    """Completed steps of the weights that sampled it."""
    parts: Parts = field(default_factory=dict)
    reward: float | None = None
    """None = cannot be scored: left out of the group's statistics, advantage 0."""
    steps: tuple[tuple[int, float], ...] = ()
    """(end in characters of the completion, value) of each step, for the first reward part given by steps."""
    correct: bool | None = None
    """Task.correct; None where unknown."""
    parsed: Any = None
    """JSON-able form of the answer, for the viewer."""
    marks: list[Any] | None = None
    """Task.overlay of the answer and of the target; None when it failed."""
    error: str | None = None
    """Why it could not be scored."""
    advantage: float | np.ndarray = 0.0
    """A scalar, or [T]."""
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[T] arrays by name that one method keeps until the update, and only that method reads."""
    old_logprobs: np.ndarray | None = None
    """[T] of the trainer before the update, if a method's pass has computed them."""
    train_prompt: Prompt | None = None
    """Prompt for training, if it differs from the sampled one."""
    sampled_prompt: str = ""
    """Text of the prompt that it was sampled with, if it differs from the group's."""
    variant: str = ""
    """Name of the Variant that it was sampled with; empty for the unchanged sample."""
    trained: bool = True
    """False = left out of the update, by algo.batch; in `Group.aside`, True = a method learns from it."""
    moved: bool = False
    """Whether a method has moved it into or out of the group after its rewards were counted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """In an evaluation, Task.metrics."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """All rollouts of one visit to one prompt. Grouped by id, never by prompt text."""

    id: str
    task: str
    split: str
    sample: Sample
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    weights: Mapping[str, float] = field(default_factory=dict)
    """The reward weights when it was scored."""
    target: Any = None
    aside: tuple[Rollout, ...] = ()
    """Rollouts numbered after the group and outside its statistics: untrained variants, a greedy one, methods' own."""

    @property
    def rewards(self) -> list[float | None]:
        return [r.reward for r in self.rollouts]

    @property
    def plain(self) -> list[Rollout]:
        """The rollouts that were sampled as the group, before a method moved any."""
        return [*(r for r in self.rollouts if not r.moved), *(r for r in self.aside if r.moved)]

    @property
    def beside(self) -> list[Rollout]:
        """The rollouts in `aside` that a method learns from."""
        return [r for r in self.aside if r.trained]

    @property
    def zero_variance(self) -> bool:
        """Every rollout with a reward has the same one, so the group carries no preference."""
        return len({r for r in self.rewards if r is not None}) < 2
