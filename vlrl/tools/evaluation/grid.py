"""`vlrl eval` with several answers per sample, seeds, settings or prompt wordings, for a model or a server. The results
are written to a folder, and a killed evaluation resumes from it.

    answers.jsonl       one row per answer: rows.py
    evaluation.json     every metric of every split at every setting; model, task and settings; versions and hardware
    verdicts-*.jsonl    one row per verdict of a judge: reasoning_judge.py
    evaluation.png      the metrics with their intervals, pass@k and maj@k"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from vlrl.config.schema import Config
from vlrl.distributed import comm
from vlrl.errors import ConfigError
from vlrl.progress import Progress
from vlrl.rollout.prefetch import Prefetcher
from vlrl.services.chat import address_of, key_of
from vlrl.services.service_set import serving
from vlrl.store import plain
from vlrl.store.files import environment, replacing, write_text
from vlrl.task import Task, task_messages
from vlrl.task.environment import has_environment
from vlrl.task.interface import first_samples
from vlrl.tools.clients.chat_prompts import ChatEncoder
from vlrl.tools.clients.endpoint import Endpoint
from vlrl.tools.evaluation.answers import EvalRuntime, draw_answers, sample_for_setting
from vlrl.tools.evaluation.measure import ModelChoice, model_facts, open_runtime, task_facts
from vlrl.tools.evaluation.reasoning_judge import ReasoningJudge
from vlrl.tools.evaluation.request import EvalRequest
from vlrl.tools.evaluation.rows import RowFile
from vlrl.tools.evaluation.settings import EvalSetting, Grid
from vlrl.tools.evaluation.summary import Metric, Result, summarise
from vlrl.training.build_task import make_task
from vlrl.types import Row, Sample

ROWS, NUMBERS, PICTURE = "answers.jsonl", "evaluation.json", "evaluation.png"
_ROLLOUT = ("max_new_tokens", "stop", "thinking_budget", "thinking_end")
_VIDEO = ("video_fps", "video_min_frames", "video_max_frames")
_LIMITS = ("prompt_tokens", "image_pixels", "video_pixels", "media_bytes")


@dataclass(frozen=True, kw_only=True)
class Server:
    """An OpenAI-compatible server. It hosts the model to evaluate, a judge or a teacher."""

    url: str
    model: str | None = None  # the name of the model on the server; None if the server hosts only one
    key: str = field(default="", repr=False)
    concurrency: int = 8
    timeout_s: float = 300.0
    retries: int = 4
    option: str = "--endpoint"  # the command-line option that gave the address, for error messages

    @classmethod
    def from_request(cls, request: Any, url: str, model: str | None, key_env: str | None,
                     option: str = "--endpoint") -> Server:
        """The server at `url`, the value of the command-line option `option`. concurrency, timeout_s and retries are
        taken from the request if they are set.

        Raises ConfigError for a malformed address, or if the environment variable `key_env` holds no key."""
        key = key_of(key_env, "--key-env" if option == "--endpoint" else f"{option}-key-env")
        address_of(url, option)
        given = {name: getattr(request, name) for name in ("concurrency", "timeout_s", "retries")}
        return cls(url=url, model=model, key=key, option=option,
                   **{name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The judge model that decides whether the reasoning of correct answers is sound."""

    server: Server
    votes: int = 3
    text_only: bool = False

    @classmethod
    def from_request(cls, request: EvalRequest) -> Judge:
        """The judge that the options of `vlrl eval` describe. Raises the errors of Server.from_request."""
        server = Server.from_request(request, request.judge or "", request.judge_model, request.judge_key_env,
                                     "--judge")
        return cls(server=server, votes=request.judge_votes or 3, text_only=request.judge_text_only)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The results of a finished evaluation."""

    model: str
    step: int
    folder: Path
    results: list[Result]
    before: int = 0  # number of rows that the folder already held when this evaluation started
    judge: dict[str, Any] | None = None  # name of the judge model, and its cost; None without a judge


def facts(config: Config, chosen: ModelChoice | None, server: Server | None, settings: Sequence[EvalSetting]
          ) -> dict[str, Any]:
    """Everything that the answers depend on (model, task, settings), as JSON. An evaluation resumes only if its facts
    are equal to those stored in the folder."""
    dumped = config.model_dump(mode="json")
    model = model_facts(config, chosen) if chosen else {}
    if server:
        model = {"endpoint": address_of(server.url), "name": server.model, "coordinates": config.model.name,
                 **{name: dumped["model"][name] for name in _VIDEO}}
    return plain({**task_facts(config, _ROLLOUT), "model": model, "splits": list(config.eval.splits),
                  "samples": config.eval.samples,
                  "environment": {name: dumped["environment"][name] for name in ("name", "options")},
                  "limits": {name: dumped["limits"][name] for name in _LIMITS},
                  "settings": [asdict(d) for d in settings]})


def folder_of(config: Config, known: dict[str, Any]) -> Path:
    """The default folder of an evaluation. Its name contains a hash of the facts `known`, so that a repeated command
    continues in this folder."""
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()
    return Path(f"{config.run.dir or 'runs/model'}-eval") / digest[:10]


def grid_for(task: Task, grid: Grid, server: Server | None, each_wording: bool) -> Grid:
    """Returns the grid with two fields set that depend on the task: the number of prompt wordings, and whether greedy
    answers vary by seed.

    Raises ConfigError if --each-wording is used with a task that has a single wording. Also raises it for a task with
    episodes if a server is to be evaluated or a probe applied."""
    acts = any(map(has_environment, task.members))
    if server and acts:
        raise ConfigError(f"--endpoint with task '{task.name}': episodes need the tokens of each completion, "
                          "which a server does not return. Evaluate the model with engine=hf or engine=vllm")
    if acts and grid.probes:
        raise ConfigError(f"--probe {grid.probes[0]} with task '{task.name}': a probe cannot change what the task's "
                          "environment shows. Leave --probe out")
    wordings = max(len(t.templates) for t in task.members)
    if each_wording and wordings < 2:
        raise ConfigError(f"--each-wording: task '{task.name}' has only one prompt template. Set two or more, e.g. "
                          "'task.prompts=[\"Where is the {expression}?\", \"Find the {expression}.\"]'")
    return replace(grid, wordings=wordings if each_wording else 1, repeats_differ=bool(acts or server))


def evaluate_grid(config: Config, source: ModelChoice | Server, grid: Grid, folder: Path | None, progress: Progress, *,
                       each_wording: bool = False, judge: Judge | None = None) -> Report:
    """Evaluates `source` (a model or a server) from start to end: generates and scores the answers, computes the
    metrics, and writes the files listed in the module docstring to `folder` (None = folder_of). Returns the Report.
    With `each_wording`, every sample is asked with each of the task's prompt templates.

    Raises ConfigError for options that exclude each other, and for a folder that holds another evaluation."""
    if isinstance(source, Server) and source.model is None:  # the folder is that of the model that answers
        with contextlib.closing(endpoint_of(config, source)) as engine:
            source = replace(source, model=engine.model)
    server, chosen = (source, None) if isinstance(source, Server) else (None, source)
    settings = grid_for(make_task(config), grid, server, each_wording).settings(config)
    known = facts(config, chosen, server, settings)
    place = folder or folder_of(config, known)
    file: RowFile = comm.on_main(lambda: RowFile(place / ROWS, known))
    before = comm.on_main(lambda: len(file.rows()))
    longest = max((d.max_new_tokens or config.rollout.max_new_tokens) for d in settings)
    roomy = config.model_copy(update={"rollout": config.rollout.model_copy(update={"max_new_tokens": max(
        longest, config.rollout.max_new_tokens)})})
    with _prepared(roomy, source) as prepared:
        own = EvalRuntime(config=config, task=prepared.task, prefetch=prepared.prefetch, engine=prepared.engine,
                    likelihoods=prepared.likelihoods, services=prepared.services, remote=prepared.remote)
        draw_answers(own, config.eval.splits, settings, file, chosen.step if chosen else 0, progress)
        name = prepared.engine.model if isinstance(prepared.engine, Endpoint) else chosen.name if chosen else ""
        results, cost = comm.on_main(lambda: _results(own.task, config, settings, file, place, judge, progress))
    report = Report(model=name, step=chosen.step if chosen else 0, folder=place, results=results,
                    before=before, judge=cost)
    comm.on_main(lambda: write(report, file))
    return report


@contextmanager
def _prepared(config: Config, source: ModelChoice | Server) -> Iterator[EvalRuntime]:
    if isinstance(source, ModelChoice):
        chosen_config = source.config.model_copy(update={"eval": config.eval, "rollout": config.rollout})
        with open_runtime(chosen_config, source, evaluates=True) as prepared:
            yield prepared
        return
    task, encode = make_task(config), ChatEncoder(config)
    with (serving(config, task) as services, contextlib.closing(endpoint_of(config, source)) as engine,
          Prefetcher(encode, task, config.data.workers) as prefetch):  # pyright: ignore[reportArgumentType]
        yield EvalRuntime(config=config, task=task, prefetch=prefetch, engine=engine, services=services, remote=True)


def endpoint_of(config: Config, server: Server) -> Endpoint:
    """An Endpoint (an engine that queries the server) with the seed of the config."""
    return Endpoint(server.url, server.model, seed=config.seed, key=server.key, timeout_s=server.timeout_s,
                    retries=server.retries, concurrency=server.concurrency, option=server.option)


def _results(task: Task, config: Config, settings: Sequence[EvalSetting], file: RowFile, folder: Path,
             judge: Judge | None, progress: Progress) -> tuple[list[Result], dict[str, Any] | None]:
    """Returns (the metrics of each split and setting, the cost of the judge or None without a judge)."""
    rows, cost = file.rows(), None
    if judge:
        with contextlib.closing(endpoint_of(config, judge.server)) as engine:
            asks = ReasoningJudge(engine, ChatEncoder(config), folder, judge.votes, judge.text_only)
            by_name = {d.name: d for d in settings}
            rows = asks.judged(rows, lambda row: _question(task, config, by_name[row["setting"]], row), progress)
            cost = asks.plain()
    return [summarise(task, rows, setting, split, samples) for split in config.eval.splits
            for samples in [first_samples(task, split, config.eval.samples)] for setting in settings], cost


def _question(task: Task, config: Config, setting: EvalSetting, row: Row) -> tuple[Sample, str]:
    """Returns (the sample of an answers.jsonl row, the text of its prompt). The task builds sample and prompt again."""
    sample = sample_for_setting(task, setting, first_samples(task, row["split"], config.eval.samples), row["number"])
    contents = [message["content"] for message in task_messages(task, sample)]
    texts = [[c] if isinstance(c, str) else [p["text"] for p in c if p.get("type") == "text"] for c in contents]
    return sample, "\n".join(text for own in texts for text in own)


# --- what is written --------------------------------------------------------------------------------------------------


def write(report: Report, file: RowFile) -> None:
    """Writes evaluation.json, the plot and the sorted answers.jsonl, each file atomically."""
    file.close()
    numbers = {**as_json(report), "facts": file.facts, "environment": environment(file.facts["seed"])}
    write_text(report.folder / NUMBERS, json.dumps(numbers, indent=1) + "\n")
    plot_evaluation(report.results, report.folder / PICTURE, report.model)


def as_json(report: Report) -> dict[str, Any]:
    """The JSON value that `vlrl eval --json` prints. `splits` has the metrics at the first setting, `results` the
    metrics at all settings."""
    first = report.results[0].setting.name if report.results else ""
    return plain({"model": report.model, "step": report.step, "folder": str(report.folder),
                  **({"judge": report.judge} if report.judge else {}),
                  "splits": {r.split: {"n": r.n, "metrics": _metrics(r)} for r in report.results
                             if r.setting.name == first},
                  "results": [{"split": r.split, "setting": r.setting.name, **asdict(r.setting), "n": r.n,
                               "left_out": r.left_out, "unanswered": r.unanswered, "unscorable": r.unscorable,
                               "metrics": _metrics(r)} for r in report.results]})


def _metrics(result: Result) -> dict[str, Any]:
    return {name: asdict(metric) for name, metric in result.metrics.items()}


_COLORS = ("#1f5fa8", "#d1591b", "#3a7d44", "#7a4ea3", "#8a6d1d", "#b03060", "#2e8b8b", "#555555")
_AT = re.compile(r"(pass|maj)@(\d+)")
_MOST_BARS = 12


def plot_evaluation(results: Sequence[Result], path: Path, title: str) -> Path:
    """Plots the metrics whose values all lie in [0, 1] as a PNG at `path`. With several answers per sample, also plots
    pass@k (solid) and maj@k (dashed). Returns `path`."""
    from matplotlib.figure import Figure

    curves = any(_AT.fullmatch(name) for r in results for name in r.metrics)
    figure = Figure(figsize=(12 if curves else 7, 4.5), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2 if curves else 1, squeeze=False)[0]
    _points(panels[0], results)
    if curves:
        _curves(panels[1], results)
    panels[0].set_title(title[-80:], loc="left", fontsize=11, parse_math=False)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e6e6e6")
        axes.set_axisbelow(True)
    with replacing(path, sync=False) as temporary:
        figure.savefig(temporary, format="png")
    return path


def _points(axes: Any, results: Sequence[Result]) -> None:
    names = [n for n in dict.fromkeys(name for r in results for name in r.metrics)
             if not _AT.match(n) and "completion/length" not in n
             and all(0 <= r.metrics[n].mean <= 1 for r in results if n in r.metrics)][:_MOST_BARS]
    for i, result in enumerate(results):
        place = (i - (len(results) - 1) / 2) * 0.8 / max(len(results), 1)
        points = [(x + place, result.metrics[n]) for x, n in enumerate(names) if n in result.metrics]
        if points:
            _draw_line(axes, [x for x, _ in points], [m for _, m in points], "o", _label(result, results), i)
    axes.set_xticks(range(len(names)), names, rotation=30, ha="right", fontsize=8, parse_math=False)
    axes.set_ylim(-0.02, 1.02)
    if results:
        axes.legend(frameon=False, fontsize=8)


def _curves(axes: Any, results: Sequence[Result]) -> None:
    for i, result in enumerate(results):
        for kind, form in (("pass", "o-"), ("maj", "s--")):
            points = sorted((int(at[2]), m) for name, m in result.metrics.items()
                            if (at := _AT.fullmatch(name)) and at[1] == kind)
            if points:
                _draw_line(axes, [k for k, _ in points], [m for _, m in points], form,
                           f"{kind}@k, {_label(result, results)}", i)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="k answers", ylabel="share of samples that are right", ylim=(-0.02, 1.02))
    axes.legend(frameon=False, fontsize=8)


def _draw_line(axes: Any, xs: Sequence[float], metrics: Sequence[Metric], form: str, label: str, color: int) -> None:
    spread = [[max(0.0, m.mean - m.low) if m.low is not None else 0.0 for m in metrics],
              [max(0.0, m.high - m.mean) if m.high is not None else 0.0 for m in metrics]]
    axes.errorbar(xs, [m.mean for m in metrics], yerr=spread, fmt=form, markersize=4, capsize=3, linewidth=1,
                  color=_COLORS[color % len(_COLORS)], label=label.replace("$", r"\$"))


def _label(result: Result, results: Sequence[Result]) -> str:
    several = len({r.split for r in results}) > 1
    return f"{result.split}, {result.setting.name}" if several else result.setting.name
