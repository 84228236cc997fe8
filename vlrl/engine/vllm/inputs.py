"""Conversion between vlrl and vLLM: prompts, sampling parameters and completions. Does not import vLLM.

A completion with a prefix or a thinking budget is generated in several calls: up to the budget, and after it. Stop
strings and forced tokens follow stop_rules.py and are determined from the tokens, so that all engines interpret the
settings in the same way."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from vlrl.config.schema import Config
from vlrl.data.video.sampling import clock
from vlrl.engine.base import Request, Sampling, make_completion
from vlrl.engine.stop_rules import CLOSING
from vlrl.engine.vllm.episode_check import describe_position
from vlrl.errors import ConfigError, TrainingError
from vlrl.models.policy import Policy
from vlrl.models.token_text import TokenTexts
from vlrl.types import Completion, LoadedMedia, Prompt, Turn

HOTTEST = 2.0  # the highest sampling temperature that vLLM accepts
ONE_TOKEN = {"max_tokens": 1, "temperature": 1.0, "seed": 0, "detokenize": False}
"""Sampling options of a call that only asks for log-probabilities."""


@dataclass(frozen=True, eq=False)
class SamplingRules:
    """Sampling rules for all completions of a policy: banned ids, end tokens, and truncation by top_p and top_k."""

    banned: tuple[int, ...]
    eos: frozenset[int]
    texts: TokenTexts
    top_p: float = 1.0
    top_k: int = -1
    _ending: dict[tuple[str, ...], np.ndarray] = field(default_factory=dict)

    @classmethod
    def of(cls, policy: Policy, top_p: float = 1.0, top_k: int = -1) -> SamplingRules:
        """The rules with a policy's banned ids and end tokens."""
        return cls(tuple(policy.banned.tolist()), frozenset(policy.eos), TokenTexts(policy), top_p, top_k)

    def ending(self, stops: tuple[str, ...]) -> np.ndarray:
        """[V] bool, True for tokens that may complete one of the stop strings."""
        if stops not in self._ending:
            self._ending[stops] = self.texts.ending(stops).cpu().numpy()
        return self._ending[stops]


def prompt_input(prompt: Prompt, written: Sequence[int] | np.ndarray = ()) -> dict[str, Any]:
    """Converts a prompt and the tokens `written` after it to vLLM's input: ids with unexpanded image placeholders, and
    raw media. A video is passed as frames with timestamps, and vLLM must not drop any of them."""
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
    """Raises TrainingError unless the engine's prompt `ids`, without the last `written` ids, equal Prompt.ids. In an
    episode the message names the first of the `turns` (Request.turns) that differs."""
    theirs = np.asarray(ids)[:len(ids) - written]
    if np.array_equal(theirs, prompt.ids):
        return
    at = next((i for i, (a, b) in enumerate(zip(theirs, prompt.ids, strict=False)) if a != b),
              min(len(theirs), len(prompt)))
    first = at - (len(prompt) - turns[-1].end if turns else 0)
    named = f" ({describe_position(turns, first)})" if turns and first >= 0 else ""
    raise TrainingError(
        f"sample '{prompt.sample_id}': vLLM's processor converts the prompt to {len(theirs)} tokens and "
        f"transformers' to {len(prompt)}, which differ from token {at}{named} on. The completions would be for a "
        "different prompt. "
        "Install the versions that vlrl is tested with (requirements-vllm.txt), or set engine.name=hf.")


def sampling_options(sampling: Sampling, n: int, seed: int, rules: SamplingRules, room: int | None = None) -> dict[str,
                                                                                                                   Any]:
    """Keyword arguments of vllm.SamplingParams, which are also the options in a request to a server. The n completions
    are sampled with `seed`, `seed + 1`, ... and have at most `room` tokens (None = max_new_tokens). Raises ConfigError
    for a temperature that vLLM does not accept."""
    if sampling.temperature > HOTTEST:
        raise ConfigError(f"the sampling temperature is {sampling.temperature:g}, and vLLM's maximum is {HOTTEST:g}: "
                          "lower rollout.temperature, or set engine.name=hf")
    return {"n": n, "seed": seed, "temperature": float(sampling.temperature),
            "top_p": rules.top_p if sampling.top_p is None else sampling.top_p, "top_k": rules.top_k,
            "max_tokens": sampling.max_new_tokens if room is None else room, "logprobs": 0,
            "stop": list(sampling.stop), "include_stop_str_in_output": True, "skip_special_tokens": False,
            "spaces_between_special_tokens": False, "stop_token_ids": sorted(rules.eos), "ignore_eos": True,
            "logit_bias": dict.fromkeys(rules.banned, float("-inf")), "detokenize": bool(sampling.stop)}


def measuring_options(sampling: Sampling, token: int, rules: SamplingRules) -> dict[str, Any]:
    """Keyword arguments of vllm.SamplingParams for a call that returns the log-probability of the forced `token`. vLLM
    also samples a token in this call; the sampled token is dropped. The distribution is not truncated, because top_p
    or top_k may exclude the forced token."""
    whole = replace(rules, top_p=1.0, top_k=-1)
    options = sampling_options(replace(sampling, top_p=None), 1, 0, whole, 1)
    return options | {"logprob_token_ids": [token], "logprobs": None, "stop": [], "detokenize": False}


def seed_of(seed: int, key: Sequence[int], index: int | None = None, start: int = 0) -> int:
    """Derives a seed from the run's seed and a request's `key`: for all completions of the request or, with `index`,
    for the completion with this index. `start` is the number of tokens that the completion has already, so that a
    continuation does not reuse the random numbers of the first tokens."""
    rest = (0, 0) if index is None else (index + 1, start + 1)
    state = np.random.SeedSequence([seed, *key, *rest]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(2))  # n is added to it, and it must stay a signed 64-bit number


class Draft:
    """A completion while it is generated. index: index of the completion in its group. begun: the prefix that the
    completion continues, or None."""

    def __init__(self, sampling: Sampling, rules: SamplingRules, index: int, begun: Completion | None = None):
        self.sampling, self.rules, self.index = sampling, rules, index
        self._before = begun.turns if begun else ()
        self.tokens: list[int] = begun.tokens.tolist() if begun else []
        self.logprobs: list[float] = begun.logprobs.tolist() if begun else []
        self.ended = len(self.tokens) >= sampling.max_new_tokens
        self.stopped = False  # whether an end token or a stop string ended the completion
        self._tail = max((len(stop.encode()) for stop in sampling.stop), default=0) + 4

    @classmethod
    def all_of(cls, request: Request, rules: SamplingRules) -> list[Draft]:
        """Creates the drafts of a request: one per prefix, or `request.n` empty drafts if there are no prefixes."""
        begun = [(b.index, b.written) for b in request.begun] or [(i, None) for i in range(request.n)]
        return [cls(request.sampling, rules, index, written) for index, written in begun]

    def room(self) -> int:
        """How many tokens to sample in the next call: up to the thinking budget, or else up to the length limit."""
        budget, n = self.sampling.thinking_budget, len(self.tokens)
        limit = self.sampling.max_new_tokens
        return (min(budget, limit) if budget is not None and n < budget else limit) - n

    def add(self, tokens: Sequence[int], logprobs: Sequence[float], stopped: bool = False) -> None:
        """Appends sampled tokens up to the end of the completion. stopped: whether the engine reported an end token or
        a stop string."""
        for token, logprob in zip(tokens, logprobs, strict=True):
            if self._put(int(token), float(logprob)):
                return
        if stopped:
            self.ended = self.stopped = True

    def force(self) -> list[int]:
        """If the thinking budget is used up without `</think>`, appends the tokens that end thinking. Returns the
        positions of these tokens. The log-probabilities of these tokens are NaN until further calls of vLLM return
        them."""
        start = len(self.tokens)
        for token in [] if self.ended else self._closing()[start - (self.sampling.thinking_budget or 0):]:
            if self._put(token, float("nan")):
                break
        return [*range(start, len(self.tokens))]

    def completion(self) -> Completion:
        """Builds the finished completion."""
        sampled = np.ones(len(self.tokens), dtype=bool)
        if (budget := self.sampling.thinking_budget) is not None:
            sampled[budget:budget + len(self._closing())] = False
        return make_completion(np.asarray(self.tokens, dtype=np.int64), self.logprobs, sampled, self.sampling.stop,
                               self.rules.eos, self.rules.texts.decode, self._before, self.stopped)

    def _closing(self) -> list[int]:
        budget = self.sampling.thinking_budget
        if budget is None or len(self.tokens) < budget:
            return []
        if CLOSING in self.rules.texts.decode(self.tokens[:budget]):
            return []
        return self.rules.texts.ids(self.sampling.thinking_end).tolist()

    def _put(self, token: int, logprob: float) -> bool:
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


Part = tuple[tuple[int, ...], dict[str, Any]]
"""One call of vLLM: (the tokens generated so far after the prompt, the sampling options)."""


def completion_steps(request: Request, rules: SamplingRules,
                     seed: int) -> Generator[list[Part], list[dict[str, Any]], list[Completion]]:
    """A generator that processes one request in rounds, and finally returns the completions. It yields the calls of a
    round (Part). The caller sends the responses to these calls (wire.response_of) in the same order."""
    drafts, prompt, sampling = Draft.all_of(request, rules), request.prompt, request.sampling
    if drafts and not request.begun:
        options = sampling_options(sampling, len(drafts), seed_of(seed, request.key), rules, drafts[0].room())
        (response,) = yield [((), options)]
        check_prompt(prompt, response["prompt"], turns=request.turns)
        for draft, output in zip(drafts, response["outputs"], strict=True):
            draft.add(output["tokens"], output["logprobs"], output["finish"] == "stop")
    while True:
        calls: list[Part] = []
        owners: list[tuple[Draft, int | None]] = []
        for draft in drafts:
            for position in draft.force():
                options = measuring_options(sampling, draft.tokens[position], rules)
                calls.append((tuple(draft.tokens[:position]), options))
                owners.append((draft, position))
            if not draft.ended:
                part_seed = seed_of(seed, request.key, draft.index, len(draft.tokens))
                calls.append((tuple(draft.tokens), sampling_options(sampling, 1, part_seed, rules, draft.room())))
                owners.append((draft, None))
        if not calls:
            return checked_completions(drafts, prompt)
        responses = yield calls
        for (written, _), (draft, position), response in zip(calls, owners, responses, strict=True):
            check_prompt(prompt, response["prompt"], len(written), request.turns)
            output = response["outputs"][0]
            if position is None:
                draft.add(output["tokens"], output["logprobs"], output["finish"] == "stop")
            else:
                draft.logprobs[position] = output["logprobs"][0]


def checked_completions(drafts: Sequence[Draft], prompt: Prompt) -> list[Completion]:
    """Builds the completions of a request. Raises TrainingError for a non-finite log-probability or a banned id."""
    out = [draft.completion() for draft in drafts]
    for draft, completion in zip(drafts, out, strict=True):
        if not np.isfinite(completion.logprobs).all():
            raise TrainingError(f"sample '{prompt.sample_id}': vLLM returned a log-probability that is not finite. "
                                "Values may overflow in the model's type: set engine.dtype=bfloat16 or float32.")
        wrong = sorted({*draft.tokens} & {*draft.rules.banned})
        if wrong:
            raise TrainingError(f"sample '{prompt.sample_id}': vLLM sampled the banned token {wrong[0]}; its logit "
                                "exceeds all other logits by far. The policy has collapsed: lower train.lr.")
    return out


def model_length(config: Config, model_config: Any, episodes: bool = False) -> int:
    """Maximum number of tokens of a prompt and its completion; with `episodes`, of a prompt and its whole episode. The
    result is engine.max_model_len if set. Otherwise it is the sum of the run's limits, but at most the model's
    max_position_embeddings."""
    answer = config.episode.max_tokens if episodes else config.rollout.max_new_tokens
    wanted = config.limits.prompt_tokens + answer
    positions = getattr(model_config.get_text_config(), "max_position_embeddings", None) or wanted
    return config.engine.max_model_len or min(wanted, positions)


def check_lengths(requests: Sequence[Request], tokens: int, given: bool) -> None:
    """Raises ConfigError if a prompt with its completion may exceed `tokens`, the engine's maximum length. given:
    whether engine.max_model_len sets this length."""
    for request in requests:
        prompt, most = request.prompt, request.sampling.max_new_tokens
        if len(prompt) + most > tokens:
            now = f"engine.max_model_len={tokens}" if given else f"engine.max_model_len=null (here {tokens})"
            raise ConfigError(f"{now} is too small for sample '{prompt.sample_id}': its prompt has {len(prompt)} "
                              f"tokens and its completion up to {most}. Set it to {len(prompt) + most} or more.")

