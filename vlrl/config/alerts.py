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

    window: Positive = Field(
        default=20, description=(
        "Recent steps that reward_drop and skipped_above consider. reward_drop ignores steps without a reward."))
    reward_drop: Rate | None = Field(default=0.5, description=(
        "Alert when the mean reward falls by this share; null = never. It is the mean over alerts.window steps "
        "against its best value, as a share of that value (or of the spread of rewards, if that is larger)."))
    kl_above: NonNegative | None = Field(
        default=1.0, description="Alert above this KL to the reference; null = never. It is the KL per token.")
    constant_rewards: Positive | None = Field(default=2, description=(
        "Alert after this many steps of equal rewards; null = never. All rewards of the consecutive steps are the "
        "same value."))
    zero_variance_above: Fraction | None = Field(
        default=0.9, description=(
        "Alert above this share of groups with equal rewards. The share is over the last 5 steps; null = never."))
    heldout_drop: Rate | None = Field(default=0.1, description=(
        "Alert when an evaluation falls by this share; null = never. It is the metric save.best (reward/mean if "
        "that is empty) against its best value, and the two 95 % intervals must not overlap."))
    entropy_below: Rate | None = Field(default=None, description="Alert below this entropy per token; null = never.")
    entropy_drop: Fraction | None = Field(default=0.9, description=(
        "Alert when entropy has fallen by this share; null = never. It is the policy's entropy per token against "
        "its largest value so far."))
    truncated_above: Fraction | None = Field(
        default=None, description=(
        "Alert above this share of truncated completions; null = never. The share is of a step's completions."))
    skipped_above: Count | None = Field(default=3, description=(
        "Alert above this many skipped optimizer steps; null = never. They are counted in the last alerts.window "
        "steps."))
    service_errors_above: Fraction | None = Field(default=0.05, description=(
        "Alert above this share of missing service replies; null = never. A service is e.g. a judge; the share is "
        "of a step's rollouts."))
    mismatch_above: NonNegative | Literal["auto"] | None = Field(default="auto", description=(
        "Alert above this mismatch/kl; null = never. It is the KL per token between sampler and trainer. auto = "
        "1e-4 if both compute in float32, else 0.02, but never if they differ on purpose (older weights, dropout, "
        "engine.top_p)."))
    mismatch_gap_above: NonNegative | Literal["auto"] | None = Field(default="auto", description=(
        "Alert above this mismatch/gap_max; null = never. It is the largest difference between a token's "
        "log-probabilities of sampler and trainer. auto = 0.1 in float32, else 5."))
    unpaid_part: Positive | None = Field(default=20, description=(
        "Alert after this many steps of zeros in a reward part. The part could be positive and is 0 for all "
        "answers of these steps (at most alerts.window), e.g. because the task expects another format than the "
        "prompt asks for; null = never."))
    unreadable_above: Fraction | None = Field(
        default=0.2, description=(
        "Alert above this share of answers scored as None. The share is of a step's rollouts; null = never."))
    webhook: str = Field(default="", description=(
        "URL that alerts are posted to; empty = none. They are JSON with a `text`; https, or http on this "
        "machine. env:NAME = a secret URL in that environment variable."))
    webhook_timeout_s: Rate = Field(default=10.0, description="Timeout of sending an alert in seconds.")

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
