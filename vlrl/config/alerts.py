"""The settings `alerts.*`; see monitoring/alerts.py."""

from contextlib import suppress
from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from vlrl.config.base import Count, Fraction, NonNegative, Positive, Rate, Settings


class AlertSettings(Settings):
    """Conditions for alerts during a run. Alerts are printed, written to alerts.jsonl, and sent to trackers and a
    webhook."""

    window: Positive = Field(default=20, description="Number of most recent steps that reward_drop (which ignores "
                             "steps without a reward) and skipped_above consider.")
    reward_drop: Rate | None = Field(default=0.5, description="Alert when the mean reward over alerts.window steps is "
                                     "below its best value by more than this share of that value (or of the spread of "
                                     "rewards, if that is larger); null = never.")
    kl_above: NonNegative | None = Field(default=1.0, description="Alert when the KL per token to the reference policy "
                                         "is above this; null = never.")
    constant_rewards: Positive | None = Field(default=2, description="Alert when all rewards of this many consecutive "
                                              "steps are the same value; null = never.")
    zero_variance_above: Fraction | None = Field(default=0.9, description="Alert when more than this share of the "
                                                 "groups of the last 5 steps has equal rewards; null = never.")
    heldout_drop: Rate | None = Field(default=0.1, description="Alert when the metric save.best (reward/mean if that "
                                      "is empty) of an evaluation is below its best value by more than this share, and "
                                      "the two 95 % intervals do not overlap; null = never.")
    entropy_below: Rate | None = Field(default=None, description="Alert when policy entropy per token is below this; "
                                       "null = never.")
    entropy_drop: Fraction | None = Field(default=0.9, description="Alert when policy entropy per token is below its "
                                          "largest value so far by more than this share; null = never.")
    truncated_above: Fraction | None = Field(default=None, description="Alert when more than this share of a step's "
                                             "completions is truncated; null = never.")
    skipped_above: Count | None = Field(default=3, description="Alert when optimizer steps were skipped in more than "
                                        "this many of the last alerts.window steps; null = never.")
    service_errors_above: Fraction | None = Field(default=0.05, description="Alert when a service, such as a judge, "
                                                  "does not respond for more than this share of a step's rollouts; "
                                                  "null = never.")
    mismatch_above: NonNegative | Literal["auto"] | None = Field(
        default="auto", description="Alert when mismatch/kl, the KL per token between sampler and trainer, is above "
        "this; auto = 1e-4 if both compute in float32, else 0.02, but never if they differ on purpose (older weights, "
        "dropout, engine.top_p); null = never.")
    mismatch_gap_above: NonNegative | Literal["auto"] | None = Field(
        default="auto", description="Alert when mismatch/gap_max, the largest difference between a token's "
        "log-probabilities of sampler and trainer, is above this; auto = 0.1 in float32, else 5; null = never.")
    unpaid_part: Positive | None = Field(default=20, description="Alert when a reward part that could be positive is 0 "
                                         "for all answers of this many steps (at most alerts.window), e.g. because the "
                                         "task expects another format than the prompt asks for; null = never.")
    unreadable_above: Fraction | None = Field(default=0.2, description="Alert when the task scores more than this "
                                              "share of a step's rollouts as None; null = never.")
    webhook: str = Field(default="", description="URL that alerts are posted to, as JSON with a `text`; https, or http "
                         "on this machine. env:NAME = a secret URL in that environment variable. Empty = none.")
    webhook_timeout_s: Rate = Field(default=10.0, description="Timeout in seconds for sending one alert.")

    @field_validator("webhook")
    @classmethod
    def _allowed(cls, value: str) -> str:
        if value and not value.startswith("env:") and (problem := webhook_problem(value)):
            raise ValueError(f"the URL {problem}")
        return value


def webhook_problem(url: str) -> str:
    """Describes what is wrong with a webhook URL, without quoting the URL; "" if the URL is valid."""
    if not all("!" <= c <= "~" for c in url):
        return "is not valid: it contains spaces, or characters that must be written as %XX"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "is not valid: check its host and port"
    if "@" in parts.netloc:
        return "contains a user name or password, which is not supported; use a webhook without one"
    if not host or parts.scheme not in ("http", "https"):
        return "must begin with https:// and name a host"
    with suppress(ValueError):  # a name, not an address
        if parts.scheme == "https" or host == "localhost" or ip_address(host).is_loopback:
            return ""
    return "must begin with https://; http is only allowed for this machine (127.0.0.1, localhost)"
