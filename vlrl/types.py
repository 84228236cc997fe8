"""The core types, from a data row to a weight update.

    Sample -> Prompt -> Completion -> Rollout (+ reward, + advantage) -> Group -> packing.Batch

All are frozen; a later stage adds fields with `dataclasses.replace`. Shapes are in the field docs: P prompt tokens, T
tokens of one episode, G rollouts of a group. No torch: arrays are numpy, model inputs have type Any."""

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
"""A JSON object that was read, such as one entry of a data file; read-only."""
Row = dict[str, Any]
"""A JSON object that code creates or completes, such as a row with the canonical fields of vlrl.data."""
Parts = dict[str, float | None]
"""Raw values of reward parts by name, each in its natural range; None = the rollout cannot be scored."""


@dataclass(frozen=True)
class StepValues:
    """The value of a reward part that has one value per step of the answer. Converted to float, it is the mean of these
    values."""

    values: tuple[float, ...]
    ends: tuple[int, ...]
    """End of each step, as an offset in characters into the answer's text; ascending."""

    def __float__(self) -> float:
        return float(np.mean(self.values)) if self.values else 0.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Sample:
    """One data row and its media: everything a task needs to ask the question and to score the answer.

    Example: `Sample(id="train-7", media=(Media(source=image),), row={"label": "cat"})`."""

    id: str
    row: Mapping[str, Any] = field(default_factory=dict)
    """JSON-compatible fields of the row; coordinates in original pixels, times in seconds."""
    media: tuple[Media, ...] = ()
    prompt: str = ""
    """The prompt template chosen for this use of the sample, if the task has several; empty = the task's first."""
    task: str = ""
    """Label of the sample's task in a mixture (`tasks:`); empty without a mixture."""
    opening: Observation | None = None
    """For an episode: the environment's observation after its reset; shown after the task's own messages."""
    environment_seed: int | None = None
    """Seed with which the environment is reset, the same for all episodes of a group."""
    reset_error: str | None = None
    """Why the environment could not be reset ("reset: ..."). Then the episodes have no actions and no reward."""

    def __getitem__(self, key: str) -> Any:
        return self.row[key]

    def get(self, key: str, default: Any = None) -> Any:
        return self.row.get(key, default)

    @property
    def difficulty(self) -> float | None:
        """Difficulty of the row in [0, 1], where 1 is hardest; None if the row has no difficulty."""
        return self.row.get("difficulty")

    @property
    def category(self) -> str | None:
        return self.row.get("category")

    @property
    def weight(self) -> float:
        """Weight of the row in the loss."""
        weight = self.row.get("weight")
        return 1.0 if weight is None else float(weight)


@dataclass(frozen=True, kw_only=True, eq=False)
class Variant:
    """Additional completions of a sample's question with other media, such as shuffled frames or a noisy image.

    Example: `Variant(name="shuffled", media=(replace(sample.media[0], edits=(("shuffle", 17),)),), n=4)`."""

    name: str
    media: tuple[Media, ...]
    """As many images and videos as the sample has, of the same kinds and sizes."""
    n: int
    """Number of completions: a part of rollout.group_size if `trained`, else sampled in addition."""
    trained: bool = False
    """Whether the completions join the group and are trained on under the unchanged prompt. If not, they are scored and
    passed to `Task.score_group` as `services.variants[name]`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InsertedObservation:
    """An observation with media, at the tokens start..stop of a prompt. Its media data are entries of `Prompt.mm` and
    `Prompt.visuals`."""

    start: int
    stop: int
    rows: Mapping[str, int]
    """Number of rows of each tensor in `Prompt.mm` that belong to this observation."""
    visuals: int
    """Number of entries in `Prompt.visuals` that belong to this observation."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Prompt:
    """A sample as input of the model. It is made once by models/processing.py, and shared by engine and trainer."""

    sample_id: str
    text: str
    """Rendered chat text, with one placeholder per image or video."""
    ids: np.ndarray
    """[P] int64 token ids, in which a placeholder is expanded to one id per visual token."""
    raw_ids: np.ndarray
    """Token ids with unexpanded placeholders, for an engine that runs its own processor on `media`."""
    positions: np.ndarray
    """[R, P] int64 rotary positions by the model's own rope index; R = 3 with M-RoPE, else 1."""
    mm: Mapping[str, Any] = field(default_factory=dict)
    """Media tensors by keyword of the model's forward; in a batch concatenated over the prompts on dimension 0."""
    aligned: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Further inputs of the model by name, each an array [P] with one value per token id, such as token types."""
    aligned_answer: Mapping[str, int] = field(default_factory=dict)
    """Values of the `aligned` arrays on completion tokens, by name; default 0."""
    media: tuple[LoadedMedia, ...] = ()
    processed_sizes: tuple[tuple[int, int], ...] = ()
    """Width and height in pixels of each processed image or video frame; empty if the processor makes tiles."""
    visual_tokens: tuple[int, ...] = ()
    """Number of visual tokens of each image or video; empty if unknown."""
    visuals: tuple[Any, ...] = ()
    """The media as entries of the feature cache (models/vision_cache.py); empty without a cache."""
    opened: str = ""
    """End of the prompt's text that already belongs to the answer, as the chat template wrote it, such as "<think>"."""
    inserted: tuple[InsertedObservation, ...] = ()
    """Observations with media that were appended to the prompt, in order."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def next_position(self) -> int:
        """Position of the first token after the prompt, the same in all R rows."""
        return int(self.positions.max()) + 1 if self.positions.size else 0

    def followed_by(self, tokens: np.ndarray) -> Prompt:
        """The prompt extended by `tokens` [T], the first tokens of a completion."""
        places = np.arange(self.next_position, self.next_position + len(tokens))
        beside = {name: np.concatenate([ids, np.full(len(tokens), self.aligned_answer.get(name, 0), ids.dtype)])
                  for name, ids in self.aligned.items()}
        return replace(self, ids=np.concatenate([self.ids, tokens]), raw_ids=np.concatenate([self.raw_ids, tokens]),
                       positions=np.concatenate([self.positions, np.tile(places, (len(self.positions), 1))], axis=1),
                       aligned=beside)


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One turn of an episode, tokens start..end: an action of the model or an observation."""

    start: int
    end: int
    role: Literal["assistant", "observation"] = "assistant"
    media: tuple[str, ...] = ()
    """Hashes of the media that this turn adds."""
    text: str = ""
    opened: str = ""
    """For an action: text with which the prompt started the action, such as "<think>"; not part of `text`."""
    parts: Mapping[str, float] | None = None
    """For an action: raw values of reward parts. This field and the fields below, up to `info`, describe the
    environment's response, and are None while there is no response."""
    state: str | None = None
    done: bool | None = None
    seconds: float | None = None
    error: str | None = None
    info: Mapping[str, Any] | None = None
    prompt_ids: tuple[int, ...] | None = None
    """Ids of the prompt with which the action was sampled, if `episode.history` drops earlier turns."""

    @property
    def calls(self) -> list[Mapping[str, Any]] | None:
        """Name, arguments and error of each tool call, as recorded by the environment; None if the environment recorded
        no calls."""
        noted = (self.info or {}).get("calls")
        return noted if isinstance(noted, list) and all(isinstance(call, Mapping) for call in noted) else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """The tokens that follow a prompt: a sampled answer, or the actions and observations of an episode. `turns` are the
    turns of an episode; for an answer, they are the pieces that a partial rollout generated in different steps."""

    tokens: np.ndarray
    """[T] int64 token ids, including the end token if the model generated one."""
    logprobs: np.ndarray
    """[T] float32 log-probabilities under the sampler, at its temperature, without banned ids; forced tokens too."""
    loss_mask: np.ndarray
    """[T] bool; False for tokens that were not sampled (observations, a forced end of thinking) and, in a trained
    group, for tokens sampled in earlier steps."""
    text: str
    """The decoded tokens without the end token; includes a stop string."""
    finish_reason: Literal["stop", "length", "turns", "tokens", "media"]
    """stop: an end token or a stop string was generated. length: max_new_tokens was reached. For an episode, stop: the
    environment ended the episode; otherwise the limit in `episode.*` that ended the episode."""
    turns: tuple[Turn, ...] = ()
    episode_id: str = ""
    shown: Prompt | None = None
    """For an episode with observations: its tokens as model input after the prompt, with their positions in the episode
    and the media of all observations in order. None without observations."""
    error: str | None = None
    """Why the environment failed; such an episode is not scored."""
    observed_media: tuple[LoadedMedia, ...] = ()
    """Media of all observations in order, including those after the last action."""
    windows: tuple[Prompt, ...] = ()
    """With `episode.history=last:k`: for each action the tokens after the prompt that the model saw in that turn,
    ending with the action; `shown` is then None."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """JSON data of one method, under the name of that method; other methods do not read it.

    If it contains a list `turns` of {start, end, info}, these are stored as the turns of a completion without turns."""
    policy_step: int | None = None
    """For a completion kept from an earlier step: number of completed steps of the weights that sampled the completion.
    None: the current weights sampled the completion."""

    @property
    def truncated(self) -> bool:
        return self.finish_reason != "stop"

    @property
    def begun(self) -> bool:
        """False for an episode whose environment could not be reset. Such an episode has an error and no tokens."""
        return self.error is None or len(self.tokens) > 0

    @property
    def actions(self) -> tuple[Turn, ...]:
        """The actions of an episode; () for a plain completion, whose turns are the pieces of a partial rollout."""
        return tuple(t for t in self.turns if t.role == "assistant") if self.episode_id else ()

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each training row: of each of the `windows`, else of the whole completion."""
        return [*map(len, self.windows)] or [len(self.tokens)]

    def behind(self, prompt: Prompt, other: Prompt) -> Completion:
        """A copy of this completion of `prompt`, with positions shifted so that it follows the prompt `other`."""
        by = other.next_position - prompt.next_position
        shown, *windows = (p and replace(p, positions=p.positions + by) for p in (self.shown, *self.windows))
        return replace(self, shown=shown, windows=tuple(windows))


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What a task scores: the text of an answer and the parts marked by tags.

    Example: `<think>a loop</think><answer>8</answer>` has reasoning "a loop" and final "8"; without tags, all text is
    final."""

    text: str
    """The text with which the prompt started the completion, plus the completion."""
    reasoning: str = ""
    final: str = ""
    n_tokens: int = 0
    truncated: bool = False
    step: int = 0
    variant: str = ""
    """Name of the Variant with which the answer was sampled; empty for the unchanged sample."""
    turns: tuple[PastAction, ...] = ()
    """All actions of an episode; `text` is then the last action."""
    opened: str = ""
    """The beginning of `text` that was part of the prompt, such as "<think>"."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Rollout:
    """One scored completion of a group."""

    group_id: str
    index: int
    """Index in the group, 0..G-1."""
    completion: Completion
    policy_step: int
    """Number of completed training steps of the weights that sampled the rollout."""
    parts: Parts = field(default_factory=dict)
    reward: float | None = None
    """The combined reward. None means that the rollout cannot be scored: it is excluded from group statistics, and its
    advantage is 0."""
    steps: tuple[tuple[int, float], ...] = ()
    """For the first reward part with a value per step of the answer: (end of the step in characters of the completion,
    value) for each step."""
    correct: bool | None = None
    """Result of Task.correct; None if unknown."""
    parsed: Any = None
    """JSON-compatible form of the answer, for the viewer."""
    marks: list[Any] | None = None
    """Result of Task.overlay for the answer and the target; None if Task.overlay failed."""
    error: str | None = None
    """Why the completion could not be scored."""
    advantage: float | np.ndarray = 0.0
    """The advantage: one number for all tokens, or an array [T] with a value for each token."""
    per_token: Mapping[str, np.ndarray] = field(default_factory=dict)
    """[T] arrays of one method by name, stored until the update; other methods do not read them."""
    old_logprobs: np.ndarray | None = None
    """[T] log-probabilities under the trainer before the update, if a method has computed them."""
    train_prompt: Prompt | None = None
    """Prompt for training, if it differs from the prompt used for sampling."""
    sampled_prompt: str = ""
    """Text of the prompt used for sampling, if it differs from the group's prompt."""
    variant: str = ""
    """Name of the Variant with which the rollout was sampled; empty for the unchanged sample."""
    trained: bool = True
    """False if algo.batch leaves the rollout out of the update. In `Group.aside`, True if a method trains on the
    rollout."""
    moved: bool = False
    """Whether a method has moved the rollout into the group, or out of the group, after its reward was counted."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """In an evaluation, the result of Task.metrics for the answer."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """All rollouts sampled together for one prompt. Rollouts belong together by group id, never by prompt text."""

    id: str
    task: str
    split: str
    sample: Sample
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    weights: Mapping[str, float] = field(default_factory=dict)
    """The weights of the reward parts when the group was scored."""
    target: Any = None
    aside: tuple[Rollout, ...] = ()
    """Rollouts outside the group's statistics, with indices from G upwards: untrained variants, a greedy rollout,
    rollouts of methods."""

    @property
    def rewards(self) -> list[float | None]:
        return [r.reward for r in self.rollouts]

    @property
    def plain(self) -> list[Rollout]:
        """The rollouts that were originally sampled as the group, before a method moved any of them."""
        return [*(r for r in self.rollouts if not r.moved), *(r for r in self.aside if r.moved)]

    @property
    def beside(self) -> list[Rollout]:
        """The rollouts in `aside` that a method trains on."""
        return [r for r in self.aside if r.trained]

    @property
    def zero_variance(self) -> bool:
        """Whether all rollouts with a reward have the same reward, so that no advantage can be derived from the
        rewards."""
        return len({r for r in self.rewards if r is not None}) < 2
