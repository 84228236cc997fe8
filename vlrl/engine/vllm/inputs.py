"""Between vlrl's vocabulary and vLLM's: prompts, sampling parameters, and answers as they come back. No vLLM here.

An answer comes in parts: up to its thinking budget, from there on, and after whatever it had written before. What ends
it and what is forced on it are rules.py's, found out from its tokens, so that both engines mean the same by a setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.data.video.sampling import clock
from vlrl.engine.base import Request, Sampling
from vlrl.engine.stop_rules import CLOSING
from vlrl.engine.vllm.episode_check import describe_position
from vlrl.errors import ConfigError, TrainingError
from vlrl.models.policy import Policy
from vlrl.models.token_text import TokenTexts
from vlrl.types import Completion, LoadedMedia, Prompt, Turn

HOTTEST = 2.0
"""The highest temperature that vLLM samples at."""
API_BIAS = -100.0
"""The lowest logit bias that an API server of vLLM takes; in a process of one's own it may be -inf."""


@dataclass(frozen=True, eq=False)
class SamplingRules:
    """What holds for all answers of a policy: which ids are forbidden, which end an answer, which are kept."""

    banned: tuple[int, ...]
    eos: frozenset[int]
    texts: TokenTexts
    top_p: float = 1.0
    top_k: int = -1
    bias: float = API_BIAS
    """Added to the logits of banned ids."""
    _ending: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: Policy, top_p: float = 1.0, top_k: int = -1, bias: float = API_BIAS) -> SamplingRules:
        """Returns those of a policy."""
        return cls(tuple(policy.banned.tolist()), frozenset(policy.eos), TokenTexts(policy), top_p, top_k, bias)

    def ending(self, stops: tuple[str, ...]) -> np.ndarray:
        """Returns [V] bool: tokens that may complete a stop string."""
        if stops not in self._ending:
            self._ending[stops] = self.texts.ending(stops).cpu().numpy()
        return self._ending[stops]

    def closing(self, sampling: Sampling) -> list[int]:
        """Returns token ids of the end of thinking. Raises ConfigError where they cannot be written."""
        return self.texts.ids(sampling.thinking_end).tolist()


def prompt_input(prompt: Prompt, written: Sequence[int] | np.ndarray = ()) -> dict[str, Any]:
    """Returns the prompt, and what an answer to it has `written`, as vLLM takes them: unexpanded ids beside raw media.

    A video is its frames with their times; none of them is left out.
    """
    out: dict[str, Any] = {"prompt_token_ids": [*prompt.raw_ids.tolist(), *map(int, written)]}
    media = {kind: [_medium(m) for m in prompt.media if m.kind == kind] for kind in ("image", "video")}
    if prompt.media:
        out["multi_modal_data"] = {kind: items for kind, items in media.items() if items}
    if media["video"]:
        out["mm_processor_kwargs"] = {"do_sample_frames": False}
    return out


def _medium(loaded: LoadedMedia) -> Any:
    if loaded.kind == "image":
        return loaded.frames[0]
    frames = np.stack([np.asarray(frame) for frame in loaded.frames])  # [frames, height, width, 3] uint8
    return frames, {**clock(loaded), "do_sample_frames": False}


def check_prompt(prompt: Prompt, ids: Sequence[int], written: int = 0, turns: Sequence[Turn] = ()) -> None:
    """Raises TrainingError when the engine read other ids than Prompt.ids before the last `written` ones; it names the
    first of the `turns` (Request.turns) with such a token.
    """
    theirs = np.asarray(ids)[:len(ids) - written]
    if np.array_equal(theirs, prompt.ids):
        return
    at = next((i for i, (a, b) in enumerate(zip(theirs, prompt.ids, strict=False)) if a != b),
              min(len(theirs), len(prompt)))
    first = at - (len(prompt) - turns[-1].end if turns else 0)
    named = f" ({describe_position(turns, first)})" if turns and first >= 0 else ""
    raise TrainingError(
        f"sample '{prompt.sample_id}': vLLM's processor makes {len(theirs)} tokens of the prompt, transformers' makes "
        f"{len(prompt)}, and they differ from token {at}{named} on. The answers would be to another prompt. Install "
        "the versions that vlrl is tested with (requirements-vllm.txt), or set engine.name=hf.")


def sampling_options(sampling: Sampling, n: int, seed: int, rules: SamplingRules, room: int | None = None) -> dict[str,
                                                                                                                   Any]:
    """Keywords of vllm.SamplingParams, all of them also fields of a server's requests.

    The answers are drawn with `seed`, `seed + 1`, ... and have at most `room` tokens, by default max_new_tokens.
    Raises ConfigError for a temperature that vLLM refuses.
    """
    if sampling.temperature > HOTTEST:
        raise ConfigError(f"the answers' temperature is {sampling.temperature:g}, and vLLM samples at {HOTTEST:g} at "
                          "most: lower rollout.temperature, or set engine.name=hf")
    return {"n": n, "seed": seed, "temperature": float(sampling.temperature),
            "top_p": rules.top_p if sampling.top_p is None else sampling.top_p, "top_k": rules.top_k,
            "max_tokens": sampling.max_new_tokens if room is None else room, "logprobs": 0,
            "stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False,
            "spaces_between_special_tokens": False, "stop_token_ids": sorted(rules.eos), "ignore_eos": True,
            "logit_bias": dict.fromkeys(rules.banned, rules.bias)}


def measuring_options(sampling: Sampling, token: int, rules: SamplingRules) -> dict[str, Any]:
    """Keywords of vllm.SamplingParams that ask for the log-probability of a token that is forced: one is sampled in its
    place, to be dropped. It is among all tokens: with top_p or top_k a forced one may be none of those that are kept.
    """
    whole = replace(rules, top_p=1.0, top_k=-1)
    options = sampling_options(replace(sampling, top_p=None), 1, 0, whole, 1)
    return options | {"logprob_token_ids": [token], "logprobs": None, "stop": []}


def seed_of(seed: int, key: Sequence[int], place: int | None = None, start: int = 0) -> int:
    """Returns the seed of the random stream of a group, or of rollout `place` of it from token `start` on.

    A continuation has a stream of its own: it must not meet the numbers again that its first tokens were drawn with.
    """
    rest = (0, 0) if place is None else (place + 1, start + 1)
    state = np.random.SeedSequence([seed, *key, *rest]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(2))  # n is added to it, and it must stay a signed 64-bit number


class Draft:
    """One answer while it is written. `place` is its number in the group, `begun` what it wrote before."""

    def __init__(self, sampling: Sampling, rules: SamplingRules, place: int, begun: Completion | None = None):
        self.sampling, self.rules, self.place = sampling, rules, place
        self._before = begun.turns if begun else ()
        self.tokens: list[int] = begun.tokens.tolist() if begun else []
        self.logprobs: list[float] = begun.logprobs.tolist() if begun else []
        self.ended = len(self.tokens) >= sampling.max_new_tokens
        self.stopped = False
        """Whether an end token or a stop string ended it."""
        self._tail = max((len(stop.encode()) for stop in sampling.stop), default=0) + 4

    @classmethod
    def all_of(cls, request: Request, rules: SamplingRules) -> list[Draft]:
        """Returns the drafts of a request: of the answers that were begun, or else of new ones."""
        begun = [(b.index, b.written) for b in request.begun] or [(i, None) for i in range(request.n)]
        return [cls(request.sampling, rules, place, written) for place, written in begun]

    def room(self) -> int:
        """Returns tokens to sample next: up to the thinking budget, else up to the limit."""
        budget, n = self.sampling.thinking_budget, len(self.tokens)
        limit = self.sampling.max_new_tokens
        return (min(budget, limit) if budget is not None and n < budget else limit) - n

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], stopped: bool = False) -> None:
        """Takes over what was sampled, up to the token that ends the answer; `stopped` as the engine has it."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self._put(int(token), float(logprob)):
                return
        if stopped:
            self.ended = self.stopped = True

    def force(self) -> list[int]:
        """Writes the end of thinking where the budget is used up without one; the places of its tokens.

        Their log-probabilities are to be filled in: NaN until then.
        """
        start = len(self.tokens)
        for token in [] if self.ended else self._closing()[start - (self.sampling.thinking_budget or 0):]:
            if self._put(token, float("nan")):
                break
        return [*range(start, len(self.tokens))]

    def completion(self) -> Completion:
        """Returns the answer as the loop takes it."""
        tokens = np.asarray(self.tokens, dtype=np.int64)
        sampled = np.ones(len(tokens), dtype=bool)
        budget = self.sampling.thinking_budget
        if budget is not None:
            closing = self._closing()
            sampled[budget:budget + len(closing)] = False
        return completion(tokens, self.logprobs, sampled, self.sampling, self.rules, self.stopped, self._before)

    def _closing(self) -> list[int]:
        """Returns what is forced at the budget: nothing before it is reached, or where thinking ended in time."""
        budget = self.sampling.thinking_budget
        if budget is None or len(self.tokens) < budget:
            return []
        if CLOSING in self.rules.texts.decode(self.tokens[:budget]):
            return []
        return self.rules.closing(self.sampling)

    def _put(self, token: int, logprob: float) -> bool:
        """Appends a token; whether it ends the answer."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.stopped = token in self.rules.eos or self._completes(token)
        self.ended = self.stopped or len(self.tokens) >= self.sampling.max_new_tokens
        return self.ended

    def _completes(self, token: int) -> bool:
        stops = self.sampling.stop
        if not stops or not self.rules.ending(stops)[token]:
            return False
        text = self.rules.texts.decode(self.tokens[-self._tail:])
        return any(stop in text for stop in stops)


def completion(tokens: np.ndarray, logprobs: Sequence[float], sampled: np.ndarray, sampling: Sampling,
               rules: SamplingRules,
               stopped: bool, turns: tuple[Turn, ...] = ()) -> Completion:
    """Returns a completion of [T] token ids, their log-probabilities, and which of them were `sampled`, not forced.

    `stopped` says that the engine saw an end; `turns` are those of what was written before.
    """
    ended = len(tokens) > 0 and int(tokens[-1]) in rules.eos
    text = rules.texts.decode(tokens[:-1] if ended else tokens)
    stopped = stopped or ended or any(stop in text for stop in sampling.stop)
    return Completion(tokens=tokens, logprobs=np.asarray(logprobs, dtype=np.float32), loss_mask=sampled, text=text,
                      finish_reason="stop" if stopped else "length",
                      turns=(*turns, Turn(start=turns[-1].end if turns else 0, end=len(tokens))))


def checked_completions(drafts: Sequence[Draft], prompt: Prompt) -> list[Completion]:
    """Returns the completions of a request. Raises TrainingError when a log-probability is no number or a banned id
    came.
    """
    out = [draft.completion() for draft in drafts]
    for draft, completion in zip(drafts, out, strict=True):
        if not np.isfinite(completion.logprobs).all():
            raise TrainingError(f"sample '{prompt.sample_id}': vLLM gave a log-probability that is no finite number. "
                                "The weights or engine.dtype may overflow: try engine.dtype=bfloat16 or float32.")
        wrong = sorted({*draft.tokens} & {*draft.rules.banned})
        if wrong:
            raise TrainingError(f"sample '{prompt.sample_id}': vLLM sampled the forbidden token {wrong[0]}; its logit "
                                "exceeds all others by far. The policy has broken down: lower train.lr.")
    return out


def model_length(config: Config, model_config: Any, episodes: bool = False) -> int:
    """Returns the most tokens of a prompt and its answer, or of a whole episode: engine.max_model_len, or what the
    limits of the run add up to, as far as the model has positions.
    """
    answer = config.episode.max_tokens if episodes else config.rollout.max_new_tokens
    wanted = config.limits.prompt_tokens + answer
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or wanted
    return config.engine.max_model_len or min(wanted, positions)


def check_length(tokens: int, prompt: Prompt, sampling: Sampling, given: bool) -> None:
    """Raises ConfigError where a prompt and its answer may be longer than the engine's `tokens`.

    `given`: engine.max_model_len is set.
    """
    wanted = len(prompt) + sampling.max_new_tokens
    if wanted > tokens:
        now = f"engine.max_model_len={tokens}" if given else f"engine.max_model_len=null, which is {tokens} here,"
        raise ConfigError(f"{now} is too short for sample '{prompt.sample_id}': {len(prompt)} tokens of its prompt and "
                          f"{sampling.max_new_tokens} of an answer. Set it to {wanted} or more.")

