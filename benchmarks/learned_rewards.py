"""What happens under rewards of models: a reward model beside the true reward, ensembles, consistency (GRPO-CARE).

    python benchmarks/learned_rewards.py over --out over.md    # reward models from pairs, then RL on their scores
    python benchmarks/learned_rewards.py care --out care.md    # GRPO-CARE against GRPO

`over`: correct and wrong answers of the start model to training digits make pairs; `vlrl sft` trains reward models on
them from several seeds; RL is paid by one of them, by an ensemble, or by the true reward, and the accuracy and the
score of the answers to held-out digits are followed. Finished runs are not repeated.
"""

import argparse
import itertools
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import learning
import numpy as np
from scipy.stats import spearmanr

from vlrl import config
from vlrl.services.judge_prompts import question_text
from vlrl.store import RunFolder
from vlrl.tools.experiments.compare import Side, compare
from vlrl.training.build_task import make_task
from vlrl.types import Media, Sample

DIGITS, DIRECT = "configs/classification/digits.yaml", "task.thinking=no_thinking"
PLAIN = ["log.samples_every=0", "rollout.prompts_per_step=16"]
MEMBERS, STEPS, EVERY = 3, 40, 10


def go(runs: Path, name: str, seed: int, *words: str) -> Path:
    return learning.run([sys.executable, *words, *PLAIN, f"seed={seed}", f"run.dir={runs / f'{name}-{seed}'}"], 1)[0]


def pairs(runs: Path) -> tuple[Path, Path]:
    """Writes preference rows of the start model's answers, a correct one and each other wrong one to a prompt; every
    fifth prompt is held out."""
    drawn = go(runs, "drawn", 0, "train.py", DIGITS, DIRECT, "steps=87", "train.lr=1e-12", "eval.samples=0",
               "algo.kl_coef=0")
    task, stream = make_task(config.load(DIGITS, [DIRECT])), random.Random(0)
    rows: tuple[list[str], list[str]] = [], []
    table = RunFolder(drawn).rollouts(columns=["group_id", "sample", "media", "completion", "correct"]).to_pylist()
    for group, found in itertools.groupby(sorted(table, key=lambda row: row["group_id"]), lambda row: row["group_id"]):
        answers = list(found)
        image, row = str(drawn / answers[0]["media"][0]["path"]), json.loads(answers[0]["sample"])
        question = question_text(task, Sample(id=row["id"], media=(Media(source=image),), row=row))
        right, wrong = ({a["completion"] for a in answers if bool(a["correct"]) == kind and a["completion"]}
                        for kind in (True, False))
        for number, (better, worse) in enumerate(itertools.product(sorted(right)[:1], sorted(wrong))):
            place = stream.randrange(2)
            rows[int(group) % 5 == 0].append(json.dumps({
                "id": f"{group}-{number}", "question": question, "image": image, "answer": 1 + place,
                "responses": [worse, better] if place else [better, worse]}))
    files = runs / "pairs-train.jsonl", runs / "pairs-heldout.jsonl"
    for file, lines in zip(files, rows, strict=True):
        file.write_text("\n".join(lines) + "\n")
    return files


def reward_models(runs: Path, files: tuple[Path, Path]) -> list[Path]:
    start = config.load(DIGITS).model.name
    return [go(runs, "scores", seed, "-m", "vlrl", "sft", "configs/preference/reward_model.yaml",
               f"model.name={start}", "model.lora.rank=0", "model.train=[language,merger,vision]",
               "model.max_pixels=null", "model.min_pixels=null", "steps=160", "train.lr=3e-4", "eval.every=80",
               "eval.samples=160",
               f"data.train={files[0]}", f"data.heldout={files[1]}") for seed in range(MEMBERS)]


def over(runs: Path, seeds: int) -> str:
    models = reward_models(runs, pairs(runs))
    lines = ["## Reward models from pairs of the start model's answers", "", "| seed | pairs held out | accuracy |",
             "|---|---|---|"]
    lines += [f"| {seed} | {line['n']} | {line['accuracy']:.3f} |"
              for seed, line in enumerate(RunFolder(m).evals()[-1] for m in models)]
    arms: dict[str, Any] = {"true reward": None, "one": "mean", "mean of 3": "mean", "least of 3": "min",
                            "mean - variance": "less_variance"}
    done: dict[str, list[Path]] = {}
    for seed in range(seeds):
        for arm, how in arms.items():
            names = [models[seed % MEMBERS]] if arm == "one" else models
            part = [f"task.parts=[{{name: reward_model, combine: {how or 'mean'}}}]",
                    f"services.reward_model.name=[{','.join(map(str, names))}]",
                    f"task.rewards={{{'accuracy: 0, format: 0, reward_model: 1' if how else 'reward_model: 0'}}}"]
            done.setdefault(arm, []).append(go(runs, arm.replace(" ", "_"), seed, "train.py", DIGITS, DIRECT, *part,
                                               f"steps={STEPS}", f"eval.every={EVERY}"))
    lines += ["", "## RL on their scores", "", "| paid by | seed | " + " | ".join(
        f"accuracy at {step}" for step in range(0, STEPS + 1, EVERY)) + " | score, first to last | rank correlation |",
        "|---" * (5 + STEPS // EVERY) + "|"]
    lines += [f"| {arm} | {seed} | {curve(RunFolder(folder))} |" for arm, found in done.items()
              for seed, folder in enumerate(found)]
    lines += ["", "| paid by | accuracy at the end | against the start [95 %] | against one model [95 %] |",
              "|---|---|---|---|"]
    return "\n".join([*lines, *(against(done, arm) for arm in arms)])


def against(done: dict[str, list[Path]], arm: str) -> str:
    last = [Side(folder) for folder in done[arm]]
    found = [compare(other, last, metric="accuracy").metrics["accuracy"]
             for other in ([Side(folder, "first") for folder in done[arm]], [Side(f) for f in done["one"]])]
    texts = [f"{m.difference.mean:+.3f} [{m.difference.low:+.3f}, {m.difference.high:+.3f}]" for m in found]
    return f"| {arm} | {found[0].b.mean:.3f} | {texts[0]} | {'' if arm == 'one' else texts[1]} |"


def curve(run: RunFolder) -> str:
    """accuracy over the steps, the score at both ends, and how score and accuracy of the answers agree there."""
    lines = {line["step"]: line for line in run.evals()}
    score = [line["reward/reward_model"] if "reward/reward_model" in line else line["reward_model"]
             for line in (lines[0], lines[STEPS])]
    ranks = [agreement(run, step) for step in (0, STEPS)]
    return " | ".join([*(f"{lines[step]['accuracy']:.3f}" for step in range(0, STEPS + 1, EVERY)),
                       f"{score[0]:+.2f}, {score[1]:+.2f}", f"{ranks[0]:+.2f}, {ranks[1]:+.2f}"])


def agreement(run: RunFolder, step: int) -> float:
    """Spearman's rank correlation of score and accuracy over the held-out answers of an evaluation."""
    table = run.rollouts(step, split="heldout", columns=["parts"]).to_pylist()
    parts = [dict(row["parts"]) for row in table]
    both = [pair for p in parts if None not in (pair := (p.get("reward_model"), p.get("accuracy")))]
    found: Any = spearmanr([a for a, _ in both], [b for _, b in both])
    return float(found.statistic)


def care(runs: Path, seeds: int) -> str:
    """GRPO-CARE pays for the reference's likelihood of right answers behind their reasoning; GRPO only measures it."""
    watched = ["task.thinking=thinking", "task.parts=[consistency]", "steps=40", "eval.every=40"]
    arms = {"grpo": [*watched, "task.rewards={consistency: 0}", "services.reference=ema", "algo.reference.decay=0.995",
                     "algo.reference.every=10"],
            "grpo_care": [*watched, "extends=algorithms/grpo_care.yaml", "services.reference=ema"]}
    done = {arm: [go(runs, f"care-{arm}", seed, "train.py", DIGITS, *words) for seed in range(seeds)]
            for arm, words in arms.items()}
    lines = ["| run | seed | held-out accuracy before | after | consistency of correct answers, steps 1 to 10 | "
             "31 to 40 |", "|---|---|---|---|---|---|"]
    for arm, found in done.items():
        for seed, run in enumerate(map(RunFolder, found)):
            ends = [run.evals()[i]["accuracy"] for i in (0, -1)]
            lines.append(f"| {arm} | {seed} | {ends[0]:.3f} | {ends[1]:.3f} | {consistent(run, range(10)):.3f} | "
                         f"{consistent(run, range(30, 40)):.3f} |")
    a, b = ([Side(f) for f in done[arm]] for arm in arms)
    found = compare(a, b, metric="accuracy").metrics["accuracy"].difference
    return "\n".join([*lines, "", f"Accuracy, grpo_care - grpo: {found.mean:+.3f} [{found.low:+.3f}, "
                      f"{found.high:+.3f}]"])


def consistent(run: RunFolder, steps: Sequence[int]) -> float:
    """Share of the correct training answers of these steps whose part `consistency` is 1."""
    table = run.rollouts(columns=["step", "parts", "correct"]).to_pylist()
    return float(np.mean([dict(row["parts"]).get("consistency") == 1 for row in table
                          if row["step"] in steps and row["correct"]] or [np.nan]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=["over", "care"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--runs", type=Path, default=Path("runs/learned-rewards"))
    parser.add_argument("--out", type=Path, help="markdown file to write")
    args: SimpleNamespace | argparse.Namespace = parser.parse_args()
    text = {"over": over, "care": care}[args.experiment](args.runs.resolve(), args.seeds)
    text += f"\n\nVersions {json.dumps(learning._versions())}."
    print(text)
    if args.out:
        args.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
