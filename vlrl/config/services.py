"""The settings `services.*`: models that rewards use, such as LLM judges; see vlrl/services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vlrl.config.base import Count, NonNegative, Positive, Rate, Settings

PLACES = ("services.clip.keep", "services.reward_model.keep", *(f"services.judge.{name}" for name in (
    "url", "key_env", "timeout_s", "retries", "concurrency", "per_minute", "cache", "price_in", "price_out")))
"""Settings of services that do not change their replies, such as addresses and limits. They may change on resume."""


class JudgeSettings(Settings):
    """An LLM judge behind an OpenAI-compatible server."""

    url: str = Field(default="", description=(
        "Server address, e.g. http://127.0.0.1:8001/v1; empty = none. An address with a user name, password or "
        "query is an error."))
    model: str = Field(default="", description="Name of the model at the server.")
    key_env: str = Field(default="", description="Environment variable with the API key. Empty = no key is sent.")
    timeout_s: Rate = Field(default=120.0, description="Timeout of a request in seconds.")
    retries: Count = Field(
        default=4, description=(
        "Retries of a failed request or unreadable reply. Their delays start at one second and double."))
    concurrency: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64, description="Concurrent requests per process.")
    per_minute: Count = Field(default=0, description="Maximum requests per minute and process; 0 = no limit.")
    temperature: NonNegative = Field(default=0.0, description="Sampling temperature of replies.")
    max_tokens: Positive = Field(default=1024, description="Maximum tokens of a reply.")
    votes: Positive = Field(default=1, description=(
        "Replies per question; the majority counts. The number must be odd; more than 1 requires a temperature "
        "above 0."))
    json_schema: bool = Field(default=True, description=(
        "Send the JSON schema of expected fields. It goes with the question as response_format; some servers do "
        "not support it. Replies are always checked."))
    cache: str = Field(default="", description="Folder for cached replies. Empty = services in the run folder.")
    price_in: NonNegative = Field(default=0.0, description="Price per million input tokens, for judge/cost.")
    price_out: NonNegative = Field(default=0.0, description="Price per million output tokens.")

    @model_validator(mode="after")
    def _fits(self) -> JudgeSettings:
        if self.url and not self.model:
            raise ValueError(f"services.judge.url={self.url} needs services.judge.model: name one of the server's "
                             "models")
        if self.votes % 2 == 0:
            raise ValueError(f"services.judge.votes={self.votes} can end in a tie: set an odd number")
        if self.votes > 1 and not self.temperature:
            raise ValueError(f"services.judge.votes={self.votes} with services.judge.temperature=0 gives the same "
                             "reply every time: set a temperature, e.g. 0.7, or services.judge.votes=1")
        return self


class ClipSettings(Settings):
    """A CLIP model, for rewards from cosine similarities of image and text embeddings."""

    name: str = Field(default="", description=(
        "CLIP or SigLIP model; empty = none. A folder or hub name, e.g. openai/clip-vit-base-patch32 or "
        "google/siglip-base-patch16-224. Runs on the policy's device, in float32."))
    batch: Count = Field(default=0, description=(
        "Images per batch; 0 = 32 on a GPU, else 1. With 1 on a CPU the last bits of a cosine do not depend on "
        "the batch."))
    keep: Positive = Field(default=16384, description="Embeddings of images and texts cached in memory.")


class RewardModelSettings(Settings):
    """A reward model: trained by `vlrl sft` with algo.loss=bradley_terry, or a sequence classifier of transformers."""

    name: tuple[str, ...] = Field(
        default=(), description=(
        "Reward models; several form an ensemble. A run folder, checkpoint, model folder or hub name; [] = none."))
    batch: Count = Field(default=0, description=(
        "Texts per batch; 0 = 32 on a GPU, else 1. For a sequence classifier. With 1 on a CPU the last bits of a "
        "score do not depend on the batch."))
    keep: Positive = Field(default=16384, description="Scores of a sequence classifier cached in memory.")

    @field_validator("name", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return ((value,) if value else ()) if isinstance(value, str) else value


FOLLOWS = {"start": "frozen", "ema": "ema"}
"""Value of services.reference -> the value of algo.reference that it implies."""


class ServicesSettings(Settings):
    """Models, other than the policy, that compute rewards."""

    reference: Literal["", "start", "ema"] = Field(default="", description=(
        "Model of services.reference_logprobs: start or ema. start = the initial model of the run, ema = a moving "
        "average of the policy. Short for algo.reference=frozen or ema; empty = as set by algo.reference."))
    judge: JudgeSettings = JudgeSettings()
    clip: ClipSettings = ClipSettings()
    reward_model: RewardModelSettings = RewardModelSettings()

    @property
    def given(self) -> tuple[str, ...]:
        """The names of the services that the config sets."""
        used = {"judge": self.judge.url, "clip": self.clip.name, "reward_model": self.reward_model.name}
        return tuple(name for name, address in used.items() if address)


def with_reference(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings `values` of a run with algo.reference set according to services.reference. Raises ValueError
    if the two settings contradict each other."""
    services, algo = values.get("services") or {}, values.get("algo") or {}
    requested = services.get("reference") if isinstance(services, Mapping) else None
    if not isinstance(requested, str) or requested not in FOLLOWS or not isinstance(algo, Mapping):
        return values
    given = algo.get("reference") or "auto"
    options = given if isinstance(given, Mapping) else {"name": given}
    if options.get("name", "auto") not in ("auto", FOLLOWS[requested]):
        raise ValueError(f"services.reference={requested} and algo.reference={options['name']}: a run has one "
                         "reference policy. Remove one of the two")
    return {**values, "algo": {**algo, "reference": {**options, "name": FOLLOWS[requested]}}}
