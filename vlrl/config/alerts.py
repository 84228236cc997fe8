"""Settings of `alerts.*`; see monitoring/alerts.py."""

from __future__ import annotations

from ipaddress import ip_address
from typing import Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from vlrl.config.base import Count, Fraction, NonNegative, Positive, Rate, Settings


class AlertSettings(Settings):
    """What is told of while the run goes on: printed, in alerts.jsonl, at trackers and by webhook."""

    window: Positive = Field(default=20, description="Steps that reward_drop (which leaves out those "
                             "without a reward) and skipped_above look at.")
    reward_drop: Rate | None = Field(
        default=0.5, description="Tell when the mean reward of alerts.window steps is below the best such mean by more "
        "than this share of it (or of the spread of rewards, where that is larger); null = never.")
    kl_above: NonNegative | None = Field(
        default=1.0, description="Tell when the KL to the reference is larger, per token; null = never.")
    constant_rewards: Positive | None = Field(
        default=2, description="Tell when all rewards of so many steps in a row, the first ones too, are one value; "
        "null = never.")
    zero_variance_above: Fraction | None = Field(
        default=0.9, description="Tell when, over the last 5 steps, a larger share of the groups has equal rewards; "
        "null = never.")
    heldout_drop: Rate | None = Field(
        default=0.1, description="Tell when the metric save.best (reward/mean where that is empty) of an evaluation is "
        "below that of the best one by more than this share of it, and their 95 % intervals are apart; null = never.")
    entropy_below: Rate | None = Field(
        default=None, description="Tell when the entropy is smaller, per token; null = never.")
    entropy_drop: Fraction | None = Field(
        default=0.9, description="Tell when the entropy per token of a step is below the largest so far by more than "
        "this share; null = never.")
    truncated_above: Fraction | None = Field(
        default=None, description="Tell when a larger share of a step's answers is cut off; null = never.")
    skipped_above: Count | None = Field(
        default=3, description="Tell when an optimizer step was left out in more than so many of the last "
        "alerts.window steps; null = never.")
    service_errors_above: Fraction | None = Field(
        default=0.05, description="Tell when a service, such as a judge, did not answer for a larger share of a step's "
        "rollouts; null = never.")
    mismatch_above: NonNegative | Literal["auto"] | None = Field(
        default="auto", description="Tell when mismatch/kl, how far sampler and trainer disagree, is larger per token; "
        "auto = 1e-4 where both compute in float32, else 0.02, and never where they differ on purpose (older weights, "
        "dropout, engine.top_p); null = never.")
    mismatch_gap_above: NonNegative | Literal["auto"] | None = Field(
        default="auto", description="The same for mismatch/gap_max, the largest difference of a token's log-"
        "probability; auto = 0.1 in float32, else 5; null = never.")
    unpaid_part: Positive | None = Field(
        default=20, description="Tell when a part of the reward that could be above 0 is 0 in all answers of so many "
        "steps (at most alerts.window), as when the task reads answers otherwise than the prompt asks; null = never.")
    unreadable_above: Fraction | None = Field(
        default=0.2, description="Tell when the task itself gives a larger share of a step's rollouts no score (None); "
        "null = never.")
    webhook: str = Field(
        default="", description="URL that alerts are sent to as JSON with a `text` (POST), https or on this machine; "
        "env:NAME = the URL is in that environment variable, for one that is secret. Empty = none.")
    webhook_timeout_s: Rate = Field(default=10.0, description="Seconds for one alert to be sent.")

    @field_validator("webhook")
    @classmethod
    def _allowed(cls, value: str) -> str:
        if value and not value.startswith("env:") and (problem := webhook_problem(value)):
            raise ValueError(f"the URL {problem}")
        return value


def webhook_problem(url: str) -> str:
    """Returns what is wrong with a URL that alerts are to be sent to, without a word of it; "" when it may be used."""
    if not all("!" <= c <= "~" for c in url):
        return "cannot be read: it has spaces, or letters that a URL writes as %XX"
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        return "cannot be read: its host or its port is none"
    if "@" in parts.netloc:
        return "holds a user or a password, which cannot be sent; name a hook that needs none"
    if not host or parts.scheme not in ("http", "https"):
        return "must begin with https:// and name a host"
    if parts.scheme == "https" or _loopback(host):
        return ""
    return "must begin with https://; http is for this machine alone (127.0.0.1, localhost)"


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
