"""What `vlrl eval` is asked for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vlrl.tools.request import option


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """The options of `vlrl eval`; None and () stand for the default of the config."""

    model: str | None = option(
        None, "A model or adapter instead of a checkpoint, e.g. Qwen/Qwen2.5-VL-3B-Instruct; with --endpoint one of "
        "the server's.", metavar="FOLDER|NAME")
    checkpoint: Path | None = option(
        None, "A checkpoint, or a run folder for its newest, e.g. runs/a/checkpoints/step-000050. Default: the newest "
        "of run.dir, or model.name where that has none.", metavar="FOLDER")
    splits: list[str] = option((), "A split, e.g. heldout; may be repeated. Default: eval.splits.", "--split",
                               metavar="NAME")
    samples: int | None = option(None, "Samples per split, e.g. 1000. Default: eval.samples.", metavar="N", min=1)
    answers: int = option(1, "Answers to each sample, for pass@k and votes, e.g. 8.", metavar="N", min=1, max=4096)
    seeds: str | None = option(None, "How many seeds, or which, e.g. 3 or 5,7,11. Default: seed.", metavar="N|A,B")
    temperatures: list[float] = option(
        (), "0 = greedy, e.g. 0.7; may be repeated. Default: eval.temperature; 1 where several answers are drawn and "
        "that is 0.", "--temperature", metavar="T", min=0)
    top_ps: list[float] = option(
        (), "Draw from the tokens that hold so much probability, e.g. 0.9; may be repeated.", "--top-p", metavar="P")
    max_new_tokens: list[int] = option(
        (), "Most tokens of an answer, e.g. 1024; may be repeated. Default: rollout.max_new_tokens.", metavar="N",
        min=1)
    each_wording: bool = option(False, "Ask every sample with each of task.prompts, instead of one in turn.")
    probes: list[str] = option(
        (), "Ask every sample again without what its answer needs, or in other words: blank_media, other_media, "
        "no_premise, reworded; may be repeated.", "--probe", metavar="NAME")
    endpoint: str | None = option(
        None, "Ask an OpenAI-compatible server instead, e.g. http://127.0.0.1:8000/v1.", metavar="URL")
    key_env: str | None = option(
        None, "With --endpoint: the environment variable that holds its key. Default: no key is sent.", metavar="NAME")
    concurrency: int | None = option(
        None, "With --endpoint or --judge: requests at a time. Default: 8.", metavar="N", min=1, max=1024)
    timeout_s: float | None = option(
        None, "With --endpoint or --judge: most seconds that an answer may take. Default: 300.", "--timeout",
        metavar="SECONDS", min=0.1)
    retries: int | None = option(
        None, "With --endpoint or --judge: how often a request is tried again. Default: 4.", metavar="N", min=0,
        max=100)
    judge: str | None = option(
        None, "Have the reasoning of right answers judged by an OpenAI-compatible server, e.g. "
        "http://127.0.0.1:8001/v1: CoT-pass@k.", metavar="URL")
    judge_model: str | None = option(
        None, "With --judge: one of the server's models. Default: its only one.", metavar="NAME")
    judge_key_env: str | None = option(
        None, "With --judge: the environment variable that holds its key. Default: no key is sent.", metavar="NAME")
    judge_votes: int | None = option(
        None, "With --judge: verdicts on each answer. Default: 3.", metavar="N", min=1, max=99)
    judge_text_only: bool = option(False, "With --judge: send it no pictures.")
    out: Path | None = option(
        None, "Folder of answers, numbers and plot, e.g. runs/mine; the same command goes on there. Of a plain "
        "evaluation also a new .jsonl file for one line a split, as in a run's eval.jsonl.", "-o", "--out",
        metavar="FOLDER|OUT.jsonl")
    rollouts: Path | None = option(
        None, "Of a plain evaluation: keep every answer as parquet, with its media, in a new folder, e.g. "
        "/tmp/answers.", metavar="FOLDER")

    @property
    def lines(self) -> Path | None:
        """The .jsonl file of a plain evaluation."""
        return self.out if self.out is not None and self.out.suffix == ".jsonl" else None

    @property
    def is_grid(self) -> bool:
        """Whether more is asked for than one answer to each sample by the own model at one setting."""
        return bool(self.answers > 1 or self.seeds or len(self.temperatures) > 1 or self.top_ps or self.max_new_tokens
                    or self.each_wording or self.probes or self.endpoint or self.judge or (self.out and not self.lines))

    def misplaced(self) -> dict[str, str]:
        """Option that was given without the one that it belongs to -> that one."""
        judge = {"--judge-model": self.judge_model, "--judge-key-env": self.judge_key_env,
                 "--judge-votes": self.judge_votes, "--judge-text-only": self.judge_text_only or None}
        http = {"--concurrency": self.concurrency, "--timeout": self.timeout_s, "--retries": self.retries}
        endpoint = {**({} if self.endpoint else {"--key-env": self.key_env}),
                    **({} if self.endpoint or self.judge else http)}
        return {name: owner for owner, own in (("--judge", {} if self.judge else judge), ("--endpoint", endpoint))
                for name, value in own.items() if value is not None}
