"""The options of `vlrl eval`. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlrl.tools.request import option


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """The options of `vlrl eval`. None and () mean that the config decides."""

    model: str | None = option(
        None, "Evaluate this model or adapter instead of a checkpoint, e.g. Qwen/Qwen2.5-VL-3B-Instruct. With "
              "--endpoint: one of the server's models.", metavar="FOLDER|NAME")
    checkpoint: Path | None = option(
        None, "A checkpoint, e.g. runs/a/checkpoints/step-000050, or a run folder (its newest checkpoint). Default: "
              "the newest checkpoint of run.dir, or model.name if it has none.", metavar="FOLDER")
    splits: list[str] = option((), "A split, e.g. heldout; may be repeated. Default: eval.splits.", "--split",
                               metavar="NAME")
    samples: int | None = option(None, "Samples per split, e.g. 1000. Default: eval.samples.", metavar="N", min=1)
    answers: int = option(1, "Number of answers to each sample, for pass@k and majority votes, e.g. "
                             "8.", metavar="N", min=1, max=4096)
    seeds: str | None = option(None, "A number of seeds, e.g. 3, or a list of seeds, e.g. 5,7,11. Default: seed of "
                                     "the config.", metavar="N|A,B")
    temperatures: list[float] = option(
        (), "Sampling temperature, e.g. 0.7; 0 = greedy; may be repeated. Default: eval.temperature, or 1 if that is "
            "0 and several answers are sampled.", "--temperature", metavar="T", min=0)
    top_ps: list[float] = option(
        (), "Top-p (nucleus) sampling, e.g. 0.9; may be repeated.", "--top-p", metavar="P")
    max_new_tokens: list[int] = option(
        (), "Maximum number of tokens per answer, e.g. 1024; may be repeated. "
            "Default: rollout.max_new_tokens.", metavar="N",
        min=1)
    each_wording: bool = option(False, "Ask every sample with each of the prompt templates in task.prompts, instead "
                                       "of cycling through them.")
    probes: list[str] = option(
        (), "Ask every sample again in a changed form, without the information that its answer needs or reworded: "
            "blank_media, other_media, no_premise or reworded; may be repeated.", "--probe", metavar="NAME")
    endpoint: str | None = option(
        None, "Evaluate the model of an OpenAI-compatible server instead, "
              "e.g. http://127.0.0.1:8000/v1.", metavar="URL")
    key_env: str | None = option(
        None, "With --endpoint: the environment variable that holds the server's "
              "key. Default: no key is sent.", metavar="NAME")
    concurrency: int | None = option(
        None, "With --endpoint or --judge: number of concurrent requests. Default: 8.", metavar="N", min=1, max=1024)
    timeout_s: float | None = option(
        None, "With --endpoint or --judge: timeout of a request in seconds. Default: 300.", "--timeout",
        metavar="SECONDS", min=0.1)
    retries: int | None = option(
        None, "With --endpoint or --judge: number of retries of a failed request. Default: 4.", metavar="N", min=0,
        max=100)
    judge: str | None = option(
        None, "Let a model behind an OpenAI-compatible server judge the reasoning of correct answers, for CoT-pass@k, "
              "e.g. http://127.0.0.1:8001/v1.", metavar="URL")
    judge_model: str | None = option(
        None, "With --judge: one of the server's models. Default: its only model.", metavar="NAME")
    judge_key_env: str | None = option(
        None, "With --judge: the environment variable that holds the judge server's "
              "key. Default: no key is sent.", metavar="NAME")
    judge_votes: int | None = option(
        None, "With --judge: number of verdicts on each answer. Default: 3.", metavar="N", min=1, max=99)
    judge_text_only: bool = option(False, "With --judge: do not send images to the judge.")
    out: Path | None = option(
        None, "Folder for answers, metrics and plot, e.g. runs/mine; the same command resumes in it. For an "
              "evaluation with one answer at one setting, a new .jsonl file is possible instead: it gets one line per "
              "split, as in a run's eval.jsonl.", "-o", "--out",
        metavar="FOLDER|OUT.jsonl")
    rollouts: Path | None = option(
        None, "For an evaluation with one answer at one setting: write every answer with its media as parquet to a "
              "new folder, e.g. /tmp/answers.", metavar="FOLDER")

    @property
    def lines(self) -> Path | None:
        """The value of --out if it names a .jsonl file (only possible with one answer at one setting); else None."""
        return self.out if self.out is not None and self.out.suffix == ".jsonl" else None

    @property
    def is_grid(self) -> bool:
        """Whether grid.py runs the evaluation. It does, unless the options ask for one answer per sample from a local
        model at one setting, without a folder as --out."""
        return bool(self.answers > 1 or self.seeds or len(self.temperatures) > 1 or self.top_ps or self.max_new_tokens
                    or self.each_wording or self.probes or self.endpoint or self.judge or (self.out and not self.lines))

    def misplaced(self) -> dict[str, str]:
        """Returns {given option: required option} for options that were given without the option that they require."""
        judge = {"--judge-model": self.judge_model, "--judge-key-env": self.judge_key_env,
                 "--judge-votes": self.judge_votes, "--judge-text-only": self.judge_text_only or None}
        http = {"--concurrency": self.concurrency, "--timeout": self.timeout_s, "--retries": self.retries}
        endpoint = {**({} if self.endpoint else {"--key-env": self.key_env}),
                    **({} if self.endpoint or self.judge else http)}
        return {name: owner for owner, own in (("--judge", {} if self.judge else judge), ("--endpoint", endpoint))
                for name, value in own.items() if value is not None}
