"""The options of `vlrl data synthesize` and `vlrl data distill`. This module imports no torch."""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from vlrl.tools.request import option


@dataclass(frozen=True, kw_only=True)
class DistillRequest:
    """The options of `vlrl data distill`, as parsed from the command line."""

    endpoint: str = option(MISSING, "The teacher: an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1.",
                           metavar="URL")
    out: Path = option(MISSING, "The new file of answers, .jsonl, for data.solutions, e.g. answers.jsonl.", "-o",
                       "--out", metavar="FILE")
    model: str | None = option(None, "One of the server's models. Default: its only one.", metavar="NAME")
    key_env: str | None = option(
        None, "The environment variable that holds the server's key. Default: no key is sent.", metavar="NAME")
    rows: int | None = option(None, "Number of rows, from the start of the training split, e.g. 500. Default: all.",
                              min=1)
    answers: int = option(1, "Answers per row, e.g. 4.", min=1)
    temperature: float = option(1.0, "Sampling temperature, e.g. 0.7.", metavar="T", min=0)
    choose: str = option("shortest", "Which of several right answers are kept: shortest, best, diverse, all.")
    least: float | None = option(
        None, "Smallest reward of a right answer, e.g. 0.8. Default: the task decides which answers are right.")
    price_in: float | None = option(None, "Price per million input tokens, e.g. 0.15.", min=0)
    price_out: float | None = option(None, "Price per million output tokens, e.g. 0.6.", min=0)
    concurrency: int = option(8, "Concurrent requests.", metavar="N", min=1, max=1024)
    timeout_s: float = option(300.0, "Timeout of a request in seconds.", "--timeout", metavar="SECONDS", min=0.1)
    retries: int = option(4, "Number of retries of a failed request.", metavar="N", min=0, max=100)
    force: bool = option(False, "Replace the answers kept before; replies on disk are reused.")


@dataclass(frozen=True, kw_only=True)
class SynthesisRequest:
    """The options of `vlrl data synthesize`, as parsed from the command line."""

    out: Path | None = option(None, "The new file of rows, .jsonl or .json, e.g. goals.jsonl. Default: "
                              "runs/name.goals.jsonl.", "-o", "--out", metavar="FILE")
    candidates: int | None = option(
        None, "Number of candidates, e.g. 500. Default: 64; eva: four per sampled parent.", min=1)
    answers: int = option(8, "Answers (episodes) per candidate, k, e.g. 16.", min=2)
    failed: Path | None = option(
        None, "Vary the prompts with a pass rate of 0 in this file (column pass_at_k, as `vlrl data difficulty` and "
        "this command write it) or in this run folder, e.g. runs/web. Default: the task explores.", metavar="FILE|RUN")
    recipe: str | None = option(
        None, "Vary the prompts that a published recipe selects from --from: sws (weaknesses, combined), eva (the most "
              "informative prompts), synthetic_data_rl (harder and easier ones).")
    source: Path | None = option(
        None, "The run folder, or for synthetic_data_rl a file with pass_at_k, that --recipe reads, e.g. runs/a.",
        "--from", metavar="FILE|RUN")
    least: float | None = option(
        None, "Smallest pass rate of a kept candidate, e.g. 0.25; candidates that are never right are not kept. "
              "Default: "
        "above 0; sws: 0.25.", min=0, max=1)
    most: float | None = option(
        None, "Largest pass rate of a kept candidate, e.g. 0.75; candidates that are always right are not kept. "
              "Default: "
        "below 1; sws: 0.75.", min=0, max=1)
    keep: int | None = option(
        None, "Number of rows to keep, those with the lowest pass rates, e.g. 500. Default: all; synthetic_data_rl: "
              "500.",
        min=1)
    endpoint: str | None = option(
        None, "A generator that writes the candidates: an OpenAI-compatible server, e.g. http://127.0.0.1:8000/v1. "
        "Default: the task proposes them.", metavar="URL")
    model: str | None = option(None, "One of that server's models. Default: its only one.", metavar="NAME")
    key_env: str | None = option(
        None, "The environment variable that holds that server's key. Default: no key is sent.", metavar="NAME")
    teacher: str | None = option(
        None, "The server whose answers must agree. Default: the generator's.", metavar="URL")
    teacher_model: str | None = option(
        None, "One of the teacher's models. Default: its only one.", metavar="NAME")
    teacher_key_env: str | None = option(
        None, "The environment variable that holds the teacher's key. Default: no key is sent.", metavar="NAME")
    votes: int = option(
        8, "Answers of the teacher per candidate, more than half of which must agree, e.g. 16.", min=1)
    written_at: float = option(
        1.0, "Sampling temperature of generator and teacher, e.g. 0.7.", metavar="T", min=0)
    price_in: float | None = option(
        None, "Price per million input tokens of generator and teacher, e.g. 0.15.", min=0)
    price_out: float | None = option(None, "Price per million output tokens, e.g. 0.6.", min=0)
    concurrency: int = option(8, "Number of concurrent requests to a server.", metavar="N", min=1, max=1024)
    timeout_s: float = option(300.0, "Timeout of a request in seconds.", "--timeout", metavar="SECONDS", min=0.1)
    retries: int = option(4, "Number of retries of a failed request.", metavar="N", min=0, max=100)
    checkpoint: Path | None = option(
        None, "Checkpoint whose weights are used instead of model.name, or a run folder (its newest checkpoint), e.g. "
              "runs/a.",
        metavar="FOLDER")
    temperature: float | None = option(
        None, "Sampling temperature, e.g. 0.7. Default: rollout.temperature.", metavar="T")
    force: bool = option(False, "Replace the files of an earlier synthesis.")
