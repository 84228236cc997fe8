"""The settings `engine.*`: the inference engine, its share of the device, and the addresses of servers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from vlrl.config.base import Count, Positive, Rate, Settings

_HF = frozenset({"batch_rollouts", "prefill_tokens"})
_BOTH = frozenset({"max_model_len", "memory", "tensor_parallel", "dtype", "eager", "max_seqs", "top_p", "top_k",
                   "proof", "scratch"})
OWN: dict[str, frozenset[str]] = {
    "hf": _HF, "vllm": _BOTH | {"sleep"}, "vllm_server": _BOTH | {"servers", "key_file", "timeout_s", "retries"}}
"""Engine -> names of the settings that apply to this engine, in addition to `name`."""
PLACES = ("servers", "key_file", "timeout_s", "retries", "scratch", "sleep", "proof")
"""Settings that do not change any completion, such as addresses and time limits. They may change on resume."""


class EngineSettings(Settings):
    """The inference engine. Each engine has its own settings (docs/engines.md); other settings are errors."""

    name: Literal["hf", "vllm", "vllm_server"] = Field(default="hf", description=(
        "hf, vllm (in this process) or vllm_server. hf: the training model itself generates; vllm: vLLM inside "
        "the training process, on the same device; vllm_server: one or more vLLM servers, on this or other hosts."))
    batch_rollouts: Positive | Literal["auto"] = Field(default="auto", description=(
        "hf: completions generated at once; auto = by memory. auto takes as many as the memory of the device "
        "allows, at most 256."))
    prefill_tokens: Positive = Field(
        default=16384, description="hf: maximum prompt tokens of a prefill batch. A longer prompt is computed alone.")
    memory: float = Field(default=0.3, gt=0, le=0.95, description=(
        "vLLM: its share of a GPU's memory, weights included. Training must fit into the rest. On a CPU the share "
        "of main memory, unless the environment variable VLLM_CPU_KVCACHE_SPACE gives the GiB for the KV cache."))
    max_model_len: Positive | None = Field(default=None, description=(
        "vLLM: maximum tokens of a prompt and its completion. null = limits.prompt_tokens + "
        "rollout.max_new_tokens (episode.max_tokens for a task with an environment), at most the model's "
        "positions. A smaller value leaves memory for more sequences at once."))
    tensor_parallel: Positive = Field(default=1, description="vLLM: GPUs per engine (tensor parallelism).")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        default=None, description=(
        "vLLM: compute type; null = that of model.dtype. A type other than the trainer's increases mismatch/kl."))
    eager: bool = Field(
        default=False, description=(
        "vLLM: no compilation or CUDA graphs. It starts faster but generates slower. Always so on a CPU."))
    max_seqs: Positive = Field(default=256, description="vLLM: maximum sequences generated at once per engine.")
    sleep: bool = Field(default=True, description=(
        "vllm: free its GPU memory during the update. false keeps it allocated, which saves the time to wake up "
        "if generation and update fit together."))
    top_p: float = Field(default=1.0, gt=0, le=1, description=(
        "vLLM: nucleus sampling; 1 = all tokens. It samples from the most probable tokens with this total "
        "probability. Below 1 the sampler renormalises over the kept tokens but the trainer does not, which shows "
        "in mismatch/kl and algo.correction."))
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = Field(default=-1, description=(
        "vLLM: sample from the k likeliest tokens; -1 = all. The trainer's probabilities differ as with "
        "engine.top_p."))
    proof: Rate | None = Field(default=None, description=(
        "vLLM: largest accepted difference between its log-probabilities and the trainer's. They are compared on "
        "a probe after every sync; null = 1e-4 in float32, 0.05 in 16 bits."))
    servers: tuple[Annotated[str, Field(min_length=1)], ...] = Field(default=(), description=(
        "vllm_server: addresses, e.g. [http://10.0.0.2:8000]. Empty = http://127.0.0.1:8000, where `vlrl serve` "
        "listens."))
    key_file: str = Field(
        default="", description=(
        "vllm_server: file with the API key. Empty = the environment variable VLRL_ENGINE_KEY, or none."))
    timeout_s: Rate = Field(
        default=600.0, description=(
        "vllm_server: timeout of a request or sync in seconds. Afterwards another server is tried."))
    retries: Count = Field(default=3, description=(
        "vllm_server: retries of a failed request. They go to another server if there is one, with growing "
        "delays; then the run stops."))
    scratch: str = Field(default="", description=(
        "vLLM: folder through which weights are passed, e.g. /dev/shm. Servers must see it under the same path. "
        "Empty = the run folder."))

    @field_validator("batch_rollouts", mode="before")
    @classmethod
    def _number_or_auto(cls, value: Any) -> Any:
        if value != "auto" and not (isinstance(value, int) and 1 <= value < 2**63):
            raise ValueError("give a whole number of at least 1, or auto")
        return value

    @field_validator("top_k")
    @classmethod
    def _not_zero(cls, value: int) -> int:
        if value == 0:
            raise ValueError("no token would be left to sample from: give the number of tokens to keep, or -1 for all")
        return value

    @field_validator("servers", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) and value else value

    @field_validator("servers")
    @classmethod
    def _addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        out: list[str] = []
        for text in value:
            address = address_of(text)
            if address in out:
                raise ValueError(f"{address} is given twice; name each server once")
            out.append(address)
        return tuple(out)

    @model_validator(mode="after")
    def _own(self) -> EngineSettings:
        for name, info in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "name" and name not in OWN[self.name] and value != info.default:
                others = [engine for engine, own in OWN.items() if name in own]
                shown = f"[{', '.join(value)}]" if isinstance(value, tuple) else value
                raise ValueError(f"engine.{name}={shown} is a setting of engine.name={' or '.join(others)}, but here "
                                 f"engine.name={self.name}: remove engine.{name}, or set engine.name={others[0]}")
        return self

    @property
    def renormalises(self) -> bool:
        """Whether completions are sampled from a part of the vocabulary, because of top_p or top_k."""
        return self.top_p < 1 or self.top_k > 0


def address_of(text: str) -> str:
    """Returns a server address without its trailing slash. Raises ValueError if the text is not an address."""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port is not None
    except ValueError:
        good, parts = False, urlsplit("")
    if not good or parts.path.strip("/") or parts.query or parts.fragment or parts.username:
        raise ValueError(f"{text!r} is not the address of a server; write http://HOST:PORT, e.g. http://127.0.0.1:8000")
    return f"{parts.scheme}://{parts.netloc}"


def merge_engine(old: str | Mapping[str, Any], over: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine settings `old` overridden by `over`. Each argument is the name of an engine or a mapping of
    settings. If `over` names another engine, settings of `old` that this engine does not have are dropped."""
    before, after = ({"name": v} if isinstance(v, str) else dict(v) for v in (old, over))
    default = EngineSettings.model_fields["name"].default
    name = after.get("name", before.get("name", default))
    if name in OWN and name != before.get("name", default):
        others = frozenset().union(*OWN.values()) - OWN[name]
        before = {key: value for key, value in before.items() if key not in others}
    return {**before, **after}
