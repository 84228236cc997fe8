"""The settings `episode.*` and `environment.*`: how long an episode may be, and where its environment runs."""

from __future__ import annotations

from pydantic import Field

from vlrl.config.base import Count, Positive, Settings


class EpisodeSettings(Settings):
    """How long an episode may be, for tasks with an environment. Its actions have rollout.max_new_tokens each."""

    max_turns: Positive = Field(default=8, description="Actions of an episode; one that has not ended then has the "
                                "finish_reason turns.")
    max_tokens: Positive = Field(default=4096, description="Tokens of all actions and observations of an episode; it "
                                 "ends (tokens) before an observation that would leave no room for an action.")
    max_media: Count = Field(default=32, description="Images and videos of all observations of an episode; it ends "
                             "(media) before an observation with more.")


class EnvironmentSettings(Settings):
    """Where environments run."""

    workers: Positive = Field(default=2, description="Processes of their own that environments run in (Linux; "
                              "elsewhere the training process, without time limits). Several episodes share each.")
    step_s: float = Field(default=60.0, gt=0, description="Seconds that one step of an environment may take. Its "
                          "process is ended then and started again; the episode is not scored.")
    reset_s: float = Field(default=120.0, gt=0, description="Seconds that a reset may take.")
