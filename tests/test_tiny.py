"""Tiny models: reproducible, real; and the embedded one that is shipped."""

import json
from pathlib import Path

import pytest

from vlrl import tiny
from vlrl.config import load
from vlrl.policy import resolve
from vlrl.task import load as load_task

SHIPPED = Path(resolve("embedded/tiny-qwen3-vl"))
MADE = json.loads((SHIPPED / "made_by.json").read_text())


def test_same_seed_same_weights(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        tiny.build("qwen3_vl", tmp_path / name, seed=seed)
    a, b, c = (tiny.weights_sha256(tmp_path / name) for name in "abc")
    assert a == b != c


def test_shipped_checkpoint_is_the_recorded_one():
    assert tiny.weights_sha256(SHIPPED) == MADE["sha256"]
    assert sum(f.stat().st_size for f in SHIPPED.iterdir()) <= 4_000_000
    assert (SHIPPED / "log.jsonl").read_text().count("\n") == sum(s["steps"] for s in MADE["stages"])


def test_the_tokenizer_was_trained_on_the_tasks_own_prompts():
    assert load_task("grounding").templates[0] == tiny.LOCATE
    assert load_task("digits").templates[0] == tiny.DIGIT
    assert load_task("digits", {"thinking": "thinking"}).templates[0] == tiny.DIGIT_THINK


@pytest.mark.parametrize("config, metric", [("configs/quickstart.yaml", "iou"),
                                            ("configs/classification/digits.yaml", "accuracy")])
def test_shipped_checkpoint_scores_what_was_recorded(tmp_path, config, metric):
    """On the first 32 held-out samples, within what so few allow."""
    from vlrl.loop import train
    from vlrl.store import RunFolder

    train(load(config, [f"run.dir={tmp_path}", "steps=0", "eval.samples=32", "save.every=0"]))
    (line,) = RunFolder(tmp_path).evals()
    recorded = next(h for h in MADE["heldout"] if h["config"] == config)
    assert line["n"] == 32 and abs(line[metric] - recorded[metric]) < 0.25


def test_cold_start_examples_are_a_function_of_their_place():
    stage = tiny.STAGES[1]
    a, b = (tiny.example(stage, 0, 77) for _ in range(2))
    assert a.prompt == b.prompt and a.answer == b.answer and a.image.tobytes() == b.image.tobytes()
    assert any(tiny.example(stage, 0, i).answer != tiny.example(stage, 1, i).answer for i in range(5))


def test_cold_start_never_sees_a_heldout_digit():
    from vlrl.tasks.digits import digit_arrays, digit_image, split_indices

    arrays, _ = digit_arrays()
    heldout = {digit_image(arrays[i]).tobytes() for i in split_indices()[1]}
    stage = tiny.STAGES[0]
    slots = [i for i in range(6 * stage.batch) if i % stage.batch >= stage.boxes]
    assert not any(tiny.example(stage, 0, i).image.tobytes() in heldout for i in slots)
