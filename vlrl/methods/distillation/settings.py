"""Settings of the config section `algo.distillation`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, field_validator

from vlrl.config.base import Count, Fraction, MethodSettings, Named, Rate
from vlrl.config.engine import address_of

_OF_THE_OBJECTIVE = ("advantage", "shaping", "loss", "weights", "correction", "aggregation", "clip_low", "clip_high",
                     "kl_coef")
_SAMPLE = ("temperature", "e3")
"""Names of algo.entropy functions that change how completions are sampled."""


class DistillationSettings(MethodSettings):
    """A teacher model scores the policy's own completions token by token, under the same prompts (docs/objectives.md).
    """

    teacher: str | None = Field(default=None, min_length=1, description=(
        "The teacher model; null = the initial model. It must be of the policy's family and vocabulary: a model "
        "folder, a run folder (its newest checkpoint), a checkpoint, an adapter, or a hub name."))
    loss: Named = Field(default=Named(name="reverse_kl"), description=(
        "Loss per token: reverse_kl or sampled_kl. reverse_kl = KL(policy || teacher) over the vocabulary; "
        "sampled_kl = its estimate from the sampled token; or your own module:function."))
    server: str | None = Field(default=None, description=(
        "Address of a `vlrl serve` that runs the teacher. It runs there instead of in the trainer, e.g. "
        "http://127.0.0.1:8100; requires loss=sampled_kl. null = the teacher is loaded beside the policy."))
    key_file: str = Field(
        default="", description=(
        "File with the server's API key. Empty = the environment variable VLRL_ENGINE_KEY, or none."))
    timeout_s: Rate = Field(default=600.0, description=(
        "Timeout of requests to the teacher in seconds. It also limits loading the teacher's weights and waiting "
        "for the server to start."))
    retries: Count = Field(
        default=3, description="Retries of a failed request. They have growing delays; then the run stops.")
    coef: Rate = Field(default=1.0, description="Weight of the distillation loss in the objective.")
    objective: Fraction = Field(default=1.0, description="Weight of the RL objective; 0 = distillation only.")

    @field_validator("server")
    @classmethod
    def _address(cls, value: str | None) -> str | None:
        return None if value is None else address_of(value)

    @property
    def without_zero(self) -> tuple[str, str]:
        return "algo.distillation", "algo.distillation=null"

    def problem(self, config: Any) -> str:
        kept = config.model.feature_cache_mib
        if self.server and self.loss.name != "sampled_kl":
            return (f"algo.distillation.loss={self.loss.name} needs the teacher's probabilities of all tokens, but "
                    f"algo.distillation.server={self.server} returns that of the sampled token only: set "
                    "algo.distillation.loss=sampled_kl, or algo.distillation.server=null")
        engine = config.engine
        if engine.name == "vllm_server" and self.server in (engine.servers or ("http://127.0.0.1:8000",)):
            return (f"algo.distillation.server={self.server} is one of engine.servers, which hold the policy's "
                    "weights: start a separate server for the teacher, with another --port and another --folder")
        if kept and not self.server:
            return (f"model.feature_cache_mib={kept:g} caches image features of the policy's vision tower, "
                    "which the teacher (algo.distillation.teacher) cannot use: set model.feature_cache_mib=0, or "
                    "algo.distillation=null")
        if config.algo.critic is not None and not self.objective:
            return ("algo.distillation.objective=0 trains on no advantage, so algo.critic has no use: set "
                    "algo.critic=null and an advantage without a critic, or algo.distillation.objective above 0")
        return ""

    def inert(self, config: Any) -> Iterator[tuple[str, Any, str]]:
        if not self.server:
            for name in ("key_file", "timeout_s", "retries"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    yield f"algo.distillation.{name}", value, "algo.distillation.server=null: no server is used"
        if self.objective:
            return
        if self.teacher in (None, config.model.name):
            yield ("algo.distillation.teacher", self.teacher or "null", "the teacher is the initial model itself, and "
                   "with algo.distillation.objective=0 nothing changes the policy")
        algo, usual = config.algo, type(config.algo)()
        names = _OF_THE_OBJECTIVE if algo.entropy.name in _SAMPLE else (*_OF_THE_OBJECTIVE, "entropy")
        for name in names:
            value = getattr(algo, name)
            if value != getattr(usual, name):
                shown = ", ".join(one.name for one in value) if isinstance(value, tuple) else getattr(
                    value, "name", value)
                yield f"algo.{name}", shown, "algo.distillation.objective=0: the objective is measured, but not trained"
