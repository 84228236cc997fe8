"""Training stages of kind `rounds`: in each round answers are sampled and scored, and the model is trained on selected
correct answers (the kept answers).

    round-01/answers.jsonl    every answer with its reward; an interrupted round resumes from it (evaluation/rows.py)
    round-01/rows.jsonl       the kept answers, with their origin (data/sources/solutions.py)
    round-01/                 the run folder of the supervised steps on the kept answers
    stages.json               the list of rounds, and the results of finished rounds

Such methods are RAFT (arXiv 2304.06767), expert iteration (2403.04642), shortest rejection sampling (Kimi k1.5,
2501.12599), selective self-rehearsal (2409.04787) and re-distillation (2505.17988)."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from vlrl.algo.named import bind
from vlrl.config.schema import Config
from vlrl.data import readable, write_rows
from vlrl.distributed import comm
from vlrl.errors import ConfigError, TrainingError
from vlrl.methods.preferences import dpo as preferences
from vlrl.methods.second_attempts import update as guided
from vlrl.models import loading
from vlrl.progress import no_progress
from vlrl.store import checkpoint
from vlrl.task import Task, task_samples
from vlrl.task.environment import has_environment
from vlrl.task.interface import given_answer
from vlrl.tools.evaluation.answers import EvalRuntime, draw_answers
from vlrl.tools.evaluation.measure import ModelChoice, choose_model, model_facts, open_runtime, task_facts
from vlrl.tools.evaluation.rows import RowFile, read_rows
from vlrl.tools.evaluation.settings import EvalSetting
from vlrl.tools.hub.export import merged
from vlrl.tools.stages.selection import CHOICES, is_right, select_answers, select_rejected
from vlrl.tools.stages.stage_list import StageList, read_stages
from vlrl.training import sft
from vlrl.training.build_task import make_task
from vlrl.types import Row, Sample

ANSWERS, ROWS, ALL_ROWS = "answers.jsonl", "rows.jsonl", "all-rows.jsonl"
_ROLLOUT = ("max_new_tokens", "temperature", "stop", "thinking_budget", "thinking_end")

LEARNS = {"sft": guided.sft, "dpo": guided.dpo}
"""Name in rounds.learn -> the loss whose parameters are the options that may be given with this name."""

Say = Callable[[str], None]


def check(config: Config) -> None:
    """Raises ConfigError for settings with which a stage of kind `rounds` cannot run."""
    bind("rounds.choose", config.rounds.choose, CHOICES)
    bind("rounds.learn", config.rounds.learn, LEARNS)
    if config.data.solutions:
        raise ConfigError(f"data.solutions={config.data.solutions!r}: a stage of kind rounds sets data.solutions "
                          "itself. Leave this setting out")
    if config.rounds.gold and config.rounds.learn.name == "dpo":
        raise ConfigError("rounds.gold=true adds answers that have no rejected counterpart, and rounds.learn=dpo "
                          "learns from pairs of a kept and a rejected answer: leave one of the two settings out")
    if config.rounds.temperature == 0 and config.rounds.answers > 1:
        raise ConfigError(f"rounds.temperature=0 is greedy, so rounds.answers={config.rounds.answers} answers to a "
                          "prompt would all be the same: raise rounds.temperature, or set rounds.answers=1")
    if any(map(has_environment, make_task(config).members)):
        raise ConfigError(f"kind=rounds stores an answer as a row's `solution`, but task {config.task_name!r} has "
                          "episodes instead of single answers: use kind=rl, or a task without an environment")


def train_rounds(config: Config, say: Say = print, first: str = "") -> bool:
    """Runs all unfinished rounds, and returns whether all rounds are finished now. Every process calls this function.

    `say` is called with lines for the user. `first` is the initial model of the whole run; with rounds.start=start each
    round trains this model."""
    folder, model = Path(config.run.dir), config.model.name

    def opened() -> StageList:
        before, names = read_stages(folder), [f"round-{r + 1:02d}" for r in range(config.rounds.count)]
        return StageList(folder, [(name, "sft") for name in names], before.done if before else {}).write()

    def finished(known: StageList, name: str, **result: Any) -> StageList:
        path = checkpoint.find(folder / name).path
        assert path
        return known.finished(name, model=str(merged(path, folder / name)), **result)

    known: StageList = comm.on_main(opened)
    for number, (name, _) in enumerate(known.stages):
        if name not in known.done:
            said = _draw_and_select(config, model, folder, number, say)
            start = {"before": model, "stage": config.model.name, "start": first}[config.rounds.start]
            if not said["kept"]:  # without pairs the weights do not change
                known = comm.on_main(partial(known.finished, name, steps=0, model=loading.resolve(start), **said))
                model = str(known.done[name]["model"])
                continue
            learning = _learning(config, start, folder / name)
            dpo = config.rounds.learn.name == "dpo"
            session = preferences.train_dpo(learning, config.rounds.learn) if dpo else sft.train(learning)
            if not session.complete:
                return False
            known = comm.on_main(partial(finished, known, name, steps=session.done, **said))
        model = str(known.done[name]["model"])
    return True


def last_model(config: Config) -> str:
    """The folder with the weights of the last finished round."""
    known = read_stages(Path(config.run.dir))
    assert known
    return str(known.done[known.stages[-1][0]]["model"])


# --- answers ----------------------------------------------------------------------------------------------------------


def _draw_and_select(config: Config, model: str, folder: Path, number: int, say: Say) -> dict[str, Any]:
    """Samples the answers of round `number` with `model` and writes the selected answers to rows.jsonl, unless
    rows.jsonl exists. Returns counts by name, such as prompts, answers, right (answers) and kept (answers)."""
    place = folder / f"round-{number + 1:02d}"
    if not comm.on_main(lambda: (place / ROWS).is_file()):
        one = choose_model(config, model)
        file: RowFile = comm.on_main(lambda: RowFile(place / ANSWERS, _facts(config, one, number)))
        _draw(config, one, number, file)
        comm.on_main(lambda: _write(config, one, number, place, file))
    said: dict[str, Any] = comm.on_main(lambda: _figures(config, place))
    if comm.is_main():
        say(f"{place.name}: {said['right']} of {said['answers']} answers are right ({said['solved']} of "
            f"{said['prompts']} prompts have a right answer); {said['kept']} are kept")
    if not said["kept"] and (config.rounds.learn.name == "sft" or not said["right"]):
        raise TrainingError(f"{place.name}: none of {said['answers']} answers to {said['prompts']} prompts is right, "
                            "so there is nothing to learn from: raise rounds.answers or rounds.prompts, lower "
                            "rounds.least, or begin with a stage of kind sft")
    if not said["kept"] and comm.is_main():
        say(f"{place.name}: no answer is longer than a correct answer to the same prompt "
            f"(rounds.longer={config.rounds.longer:g}), so there is no pair to learn from and the weights do not "
            "change")
    return said


def _facts(config: Config, one: ModelChoice, number: int) -> dict[str, Any]:
    return {**task_facts(config, _ROLLOUT), "model": model_facts(config, one), "round": number,
            **{name: getattr(config.rounds, name) for name in ("prompts", "answers", "temperature")}}


def _draw(config: Config, one: ModelChoice, number: int, file: RowFile) -> None:
    given = config.rounds.temperature
    setting = EvalSetting(name="round", temperature=config.rollout.temperature if given is None else given,
                      answers=config.rounds.answers, seeds=(config.seed + number,))
    with open_runtime(one.config, one) as prepared:
        own = EvalRuntime(config=config, task=prepared.task, prefetch=prepared.prefetch, engine=prepared.engine,
                    likelihoods=prepared.likelihoods, services=prepared.services)
        draw_answers(own, ("train",), [setting], file, one.step, no_progress,
            [sample for _, sample in _prompts(own.task, config, number)])


def _prompts(task: Task, config: Config, number: int) -> list[tuple[int, Sample]]:
    """(index in the training split, sample) for each prompt of a round. Each round uses the next prompt template."""
    samples, most = task_samples(task, "train"), config.rounds.prompts
    places = [(number * most + i) % len(samples) for i in range(min(most, len(samples)))]
    placed = [(place, readable(samples, place) if config.data.quarantine else samples[place]) for place in places]
    return [(place, replace(sample, prompt=task.of(sample).template(sample, number)))
            for place, sample in placed if sample is not None]


# --- what is kept -----------------------------------------------------------------------------------------------------


def _write(config: Config, one: ModelChoice, number: int, place: Path, file: RowFile) -> None:
    """Writes the selected answers of round `number` to rows.jsonl in the folder `place`. `file` holds all answers of
    the round, and `one` is the model that wrote them. With rounds.keep_rows, also writes a file that includes the
    rows of earlier rounds."""
    file.close()
    bound = bind("rounds.choose", config.rounds.choose, CHOICES)
    task = make_task(config)
    prompts = _prompts(task, config, number)
    manifest = Path(one.name) / checkpoint.MANIFEST
    came = {"round": number + 1, "model": one.name,
            "step": checkpoint.step_of(Path(one.name)) if manifest.exists() else 0}
    rows = []
    for answers in _by_prompt(file.rows()):
        at, sample = prompts[answers[0]["number"]]
        taken = select_answers(answers, bound, config.rounds.least)
        rows += [{"number": at, "id": row["sample"], "solution": row["answer"], "reward": row["reward"],
                  "correct": row["correct"], "tokens": row["tokens"], "answer": row["index"],
                  "of": config.rounds.answers, **lost, **came}
                 for row in taken for lost in _rejected(config, answers, row)]
        if config.rounds.gold and not taken and (text := given_answer(task, sample)):
            rows.append({"number": at, "id": sample.id, "solution": text, "gold": True, **came})
    if config.rounds.keep_rows:
        earlier = [row for r in range(number) for row in _lines(place.with_name(f"round-{r + 1:02d}") / ROWS)]
        last = {(row["number"], row["solution"], row.get("rejected")): row for row in reversed([*earlier, *rows])}
        write_rows(place / ALL_ROWS, [*last.values()][::-1])
    write_rows(place / ROWS, rows)


def _rejected(config: Config, answers: Sequence[Row], preferred: Row) -> list[dict[str, Any]]:
    """For DPO, the rejected answers to pair with the answer `preferred`: one dictionary of columns for each. `answers`
    are all answers to the prompt. For SFT, a single empty dictionary."""
    if config.rounds.learn.name == "sft":
        return [{}]
    return [{"rejected": row["answer"], "rejected_tokens": row["tokens"], "rejected_correct": row["correct"]}
            for row in select_rejected(answers, preferred, config.rounds.least, config.rounds.longer)]


def _by_prompt(rows: Sequence[Row]) -> list[list[Row]]:
    answers = [row for row in rows if "index" in row]
    return [list(group) for _, group in groupby(answers, key=lambda row: row["number"])]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]  # of a str it splits at U+2028 too


def _figures(config: Config, place: Path) -> dict[str, Any]:
    answers = _by_prompt(read_rows(place / ANSWERS))
    right = [[row for row in group if is_right(row, config.rounds.least)] for group in answers]
    retained = _lines(place / ROWS)
    gold = {"gold": sum(bool(row.get("gold")) for row in retained)} if config.rounds.gold else {}
    return {"prompts": len(answers), "answers": sum(map(len, answers)), "right": sum(map(len, right)),
            "solved": sum(map(bool, right)), "different": sum(len({row["answer"] for row in group}) for group in right),
            "kept": len(retained), **gold}


def _learning(config: Config, model: str, place: Path) -> Config:
    rows = place / (ALL_ROWS if config.rounds.keep_rows else ROWS)
    steps, epochs = config.steps, config.epochs
    if config.rounds.epochs is not None:
        epochs, steps = None, math.ceil(config.rounds.epochs * len(_lines(rows)) / config.rollout.prompts_per_step)
    return config.model_copy(update={
        "steps": steps, "epochs": epochs, "run": config.run.model_copy(update={"dir": str(place)}),
        "data": config.data.model_copy(update={"solutions": str(rows)}),
        "model": config.model.model_copy(update={"name": model})})
