"""Settings of `services.*`: models beside the policy that rewards ask; see vlrl/services."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from vlrl.config.base import Count, NonNegative, Positive, Rate, Settings

PLACES = ("services.clip.keep", "services.reward_model.keep", *(f"services.judge.{name}" for name in (
    "url", "key_env", "timeout_s", "retries", "concurrency", "per_minute", "cache", "price_in", "price_out")))
"""Settings of services that say where and how fast something is asked, and nothing of what is answered."""


class JudgeSettings(Settings):
    """A model behind an OpenAI-compatible server that rewards ask about answers."""

    url: str = Field(default="", description="Its address, e.g. http://127.0.0.1:8001/v1; empty = none. Nothing else "
                     "is asked, and an address with a user name, password or query is refused.")
    model: str = Field(default="", description="One of the server's models.")
    key_env: str = Field(default="", description="The environment variable that holds its key; empty = no key is sent.")
    timeout_s: Rate = Field(default=120.0, description="Most seconds of one try.")
    retries: Count = Field(default=4, description="Further tries of a request that failed, or whose reply cannot be "
                           "read; the waits between them double from one second on.")
    concurrency: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64, description="Requests at a time, of each process.")
    per_minute: Count = Field(default=0, description="Most requests a minute, of each process; 0 = no limit.")
    temperature: NonNegative = Field(default=0.0, description="At which it answers.")
    max_tokens: Positive = Field(default=1024, description="Most tokens of a reply.")
    votes: Positive = Field(default=1, description="Replies to each question, of which the most frequent verdict "
                            "counts; an odd number, and a temperature above 0, where it is more than 1.")
    json_schema: bool = Field(default=True, description="Whether a question that wants fields is sent with their "
                              "schema (response_format), which some servers do not know. Replies are checked anyway.")
    cache: str = Field(default="", description="Folder that keeps the replies, by what was asked; empty = services in "
                       "the run folder.")
    price_in: NonNegative = Field(default=0.0, description="Price of a million tokens of questions, for judge/cost.")
    price_out: NonNegative = Field(default=0.0, description="Price of a million tokens of replies.")

    @model_validator(mode="after")
    def _fits(self) -> JudgeSettings:
        if self.url and not self.model:
            raise ValueError(f"services.judge.url={self.url} needs services.judge.model: name one of the server's "
                             "models, with which replies are kept")
        if self.votes % 2 == 0:
            raise ValueError(f"services.judge.votes={self.votes} can be equally divided: set an odd number")
        if self.votes > 1 and not self.temperature:
            raise ValueError(f"services.judge.votes={self.votes} with services.judge.temperature=0 would be the same "
                             "reply so often: set a temperature, e.g. 0.7, or services.judge.votes=1")
        return self

    @property
    def given(self) -> bool:
        """Whether a run has it."""
        return bool(self.url)


class ClipSettings(Settings):
    """A model with one embedding space for pictures and texts, whose cosines rewards ask for."""

    name: str = Field(default="", description="Folder or hub name, e.g. openai/clip-vit-base-patch32 or "
                      "google/siglip-base-patch16-224; empty = none. It runs beside the policy, in float32.")
    batch: Count = Field(default=0, description="Pictures at a time; 0 = 32 on a GPU, and one by one on a CPU, where "
                         "the last bits of a cosine then depend on nothing else.")
    keep: Positive = Field(default=16384, description="Embeddings that are kept in memory, of pictures and texts.")

    @property
    def given(self) -> bool:
        """Whether a run has it."""
        return bool(self.name)


class RewardModelSettings(Settings):
    """A model that scores answers, beside the policy: made by `vlrl sft` with algo.loss=bradley_terry, or a sequence
    classifier of transformers."""

    name: tuple[str, ...] = Field(default=(), description="Run folder, checkpoint, model folder or hub name; several = "
                                  "an ensemble; [] = none.")
    batch: Count = Field(default=0, description="Texts at a time that a sequence classifier reads; 0 = 32 on a GPU, "
                         "and one by one on a CPU, where the last bits of a score then depend on nothing else.")
    keep: Positive = Field(default=16384, description="Scores of a sequence classifier that are kept in memory.")

    @field_validator("name", mode="before")
    @classmethod
    def _one(cls, value: Any) -> Any:
        return ((value,) if value else ()) if isinstance(value, str) else value

    @property
    def given(self) -> bool:
        """Whether a run has it."""
        return bool(self.name)


FOLLOWS = {"start": "frozen", "ema": "ema"}
"""services.reference -> algo.reference."""


class ServicesSettings(Settings):
    """Models beside the policy that rewards ask."""

    reference: Literal["", "start", "ema"] = Field(
        default="", description="Whose log-probabilities services.reference_logprobs gives: start = the model that the "
        "run began with, ema = one that follows the policy slowly. Short for algo.reference=frozen or ema; empty = as "
        "algo.reference says.")
    judge: JudgeSettings = JudgeSettings()
    clip: ClipSettings = ClipSettings()
    reward_model: RewardModelSettings = RewardModelSettings()

    @property
    def given(self) -> tuple[str, ...]:
        """The names of those that a run has."""
        return tuple(name for name in ("judge", "clip", "reward_model") if getattr(self, name).given)


def with_reference(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the settings with algo.reference as services.reference says. ValueError where both say something."""
    services, algo = values.get("services") or {}, values.get("algo") or {}
    requested = services.get("reference") if isinstance(services, Mapping) else None
    if not isinstance(requested, str) or requested not in FOLLOWS or not isinstance(algo, Mapping):
        return values
    given = algo.get("reference") or "auto"
    options = given if isinstance(given, Mapping) else {"name": given}
    if options.get("name", "auto") not in ("auto", FOLLOWS[requested]):
        raise ValueError(f"services.reference={requested} and algo.reference={options['name']}: a run has one "
                         "reference policy. Leave one of them out")
    return {**values, "algo": {**algo, "reference": {**options, "name": FOLLOWS[requested]}}}
