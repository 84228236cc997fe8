"""Bad input through train.py's own entry: one message that names the setting or row and the way out, exit code 1."""

import json
import logging
import re
from pathlib import Path

import pytest

from tests.conftest import noise
from tests.e2e.runs import TASK, metrics, write_config
from tests.tables import each
from vlrl.cli.main import train_script
from vlrl.store import RunFolder, checkpoint


@pytest.fixture
def config(tiny_models, tmp_path):
    return write_config(tmp_path, tiny_models["qwen3_vl"], "log: {samples_every: 0}")


SMALL = ("rollout.prompts_per_step=2", "rollout.group_size=2", "rollout.max_new_tokens=4")


def fails(capsys, says: str, *words) -> str:
    """Runs train.py with words, expects exit code 1 and one message; returns it."""
    capsys.readouterr()
    assert train_script([str(w) for w in words]) == 1
    message = capsys.readouterr().err
    assert message.startswith("error: ") and "Traceback" not in message
    assert re.search(says, message, re.DOTALL), message
    return message


def task_file(folder: Path, body: str) -> str:
    file = folder / f"task_{abs(hash(body))}.py"
    start, _ = TASK.split("    def score(")
    file.write_text(f"{start}    def score(self, sample, answer):\n        {body}\n")
    return f"{file}:Shades"


@each("word says", [
    ("trian.lr=1", "unknown setting 'trian'.*Did you mean 'train'"), ("train.lr=fast", "train.lr='fast'.*valid number"),
    ("train.lr=-1", "train.lr=-1.*greater than 0"),
    ("rollout.group_size=1", "rollout.group_size=1.*greater than or equal to 2"),
    ("task.rewards.vowel=1", "task.rewards.vowel.*Did you mean 'vowels'"),
    ("model.name=no/such-model", "model.name='no/such-model' cannot be loaded.*Give the folder"),
    ("model.name=embedded/tiny", "no such embedded model"),
    ("algo.loss=my.module:loss", "algo.loss='my.module:loss'.*No module named"),
    ("log.trackers=[trackio]", "trackio.*pip install trackio"),
])
def test_settings(config, tmp_path, capsys, word, says):
    fails(capsys, says, config, f"run.dir={tmp_path}/run", word)


def rows(folder: Path, *lines: dict | str) -> Path:
    file = folder / "rows.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return file


@pytest.mark.slow
def test_data_files(config, tmp_path, capsys):
    words = (config, f"run.dir={tmp_path}/run", "task={name: grounding}", "eval.samples=0", "steps=1")
    good = {"id": "a", "image": "a.png", "width": 64, "height": 64, "expression": "dot",
            "boxes": [{"box": [1, 1, 9, 9], "label": "dot"}]}
    noise(0, 64, 64).save(tmp_path / "a.png")
    (tmp_path / "broken.png").write_bytes((tmp_path / "a.png").read_bytes()[:200])
    fails(capsys, "data.train", *words)
    fails(capsys, "none.jsonl", *words, f"data.train={tmp_path}/none.jsonl")
    for row, says in (("{", "rows.jsonl.*1"), ({**good, "image": "gone.png"}, "gone.png"),
                      ({**good, "image": "../../etc/passwd"}, "passwd"),
                      ({**good, "image": "broken.png"}, "broken.png"),
                      ({**good, "image": "http://example.com/a.png"}, "http"), ({**good, "id": None}, "id"),
                      ({**good, "boxes": [{"box": [9, 9, 1, 1]}]}, "'a'.*box")):
        fails(capsys, says, *words, f"data.train={rows(tmp_path, row)}")
    (tmp_path / "rows.jsonl").write_text("")
    fails(capsys, "has no usable row", *words, f"data.train={tmp_path}/rows.jsonl")


def test_long_prompts_are_rejected_and_help_teaches(config, tmp_path, capsys):
    fails(capsys, r"drawn prompts were rejected.*sample 'train-\d+': the prompt has \d+ tokens, .*"
          r"limits.prompt_tokens=5", config, f"run.dir={tmp_path}/run", "limits.prompt_tokens=5", "eval.samples=0")
    assert train_script(["--help"]) == 0 and "resume=never" in capsys.readouterr().out
    assert train_script(["--settings"]) == 0
    listed = capsys.readouterr().out
    assert "rollout.group_size = 8" in listed and "train.lr" in listed
    assert train_script(["--help"]) == 0 and logging.lastResort
    record = logging.LogRecord("x", logging.WARNING, "", 0, "row '%s' left out", ("\x1b[31mred\u202e\né",), None)
    assert logging.lastResort.format(record) == "row '?[31mred?\né' left out"


@pytest.mark.slow
def test_scores(config, tmp_path, capsys):
    def words(body):
        return config, f"run.dir={tmp_path}/run", "resume=never", f"task={task_file(tmp_path, body)}", "steps=2"
    fails(capsys, "returned the part 'bonus'", *words("return {'vowels': 1.0, 'short': 0.0, 'bonus': 1.0}"))
    fails(capsys, "left out the part 'short'", *words("return {'vowels': 1.0}"))
    fails(capsys, "heldout at step 0: 8 of 8 rollouts failed.*limits.score_errors.*'vowels' was nan.*rollouts are in",
          *words("return {'vowels': float('nan'), 'short': 0.0}"))
    fails(capsys, "failed to score.*KeyError: 'shade'", *words("return {'vowels': sample['shade'], 'short': 0.0}"))
    body = "return {'vowels': 1 / (len(answer.text) % 3), 'short': 0.0}"
    assert train_script([str(w) for w in (*words(body), "steps=1", "limits.score_errors=1", "eval.samples=0")]) == 0
    table = RunFolder(tmp_path / "run").rollouts().to_pylist()
    errors = [r for r in table if r["error"]]
    assert errors and all(r["reward"] is None and "ZeroDivisionError" in r["error"] for r in errors)
    assert any((r["reward"] or 0) > 0 for r in table)
    assert metrics(tmp_path / "run")[0]["score_errors"] > 0


@pytest.mark.slow
def test_what_was_scored_is_kept_when_scoring_fails(config, tmp_path, capsys):
    words = (config, f"run.dir={tmp_path}/run", "steps=2")
    broken = task_file(tmp_path, "raise KeyError('shade')")
    for keep in ("all", "mixed"):
        message = fails(capsys, "step 0: (16 of 16|64 of 64) rollouts failed.*KeyError", *words, f"task={broken}",
                        "eval.samples=0", f"curriculum.keep={keep}")
        (file,) = (tmp_path / "run" / "failed" / "rollouts").iterdir()
        assert str(file) in message
    only_heldout = task_file(tmp_path, "return {'vowels': 1.0 if sample.id[0] == 't' else {}[0], 'short': 0.0}")
    fails(capsys, "8 of 8 rollouts failed.*KeyError", *words, f"task={only_heldout}")


@pytest.mark.slow
def test_an_evaluation_of_another_start_does_not_stay(config, tmp_path, capsys):
    """Of a start that ended before its first step: a run that has completed one is not begun anew."""
    words = [str(config), f"run.dir={tmp_path}/run", "steps=1", *SMALL]
    only_heldout = task_file(tmp_path, "return {'vowels': 0.0 if sample.id[0] == 'h' else {}[0], 'short': 0.0}")
    fails(capsys, "step 0: 4 of 4 rollouts failed.*KeyError", *words, f"task={only_heldout}")
    assert [line["vowels"] for line in metrics(tmp_path / "run", "eval.jsonl")] == [0]
    assert train_script(words) == 0
    first = metrics(tmp_path / "run", "eval.jsonl")[0]
    assert first["step"] == 0 and first["vowels"] > 0


@pytest.mark.slow
def test_steps_without_a_mixed_group_are_still_counted(config, tmp_path):
    task = task_file(tmp_path, "return {'vowels': 0.5, 'short': 0.0}")
    words = (config, f"run.dir={tmp_path}/run", f"task={task}", "steps=1", "eval.samples=0", "curriculum.keep=mixed",
             "curriculum.max_refills=1")
    assert train_script([str(w) for w in words]) == 0
    (line,) = metrics(tmp_path / "run")
    assert line["reward/mean"] == 0.5 and line["groups/zero_variance_frac"] == 1 and line["groups/wasted"] == 8
    assert RunFolder(tmp_path / "run").rollouts().num_rows == 32


@pytest.mark.slow
def test_rejected_prompts_are_named(config, tmp_path, capsys):
    file = tmp_path / "long.py"
    file.write_text(TASK.replace('f"picture {i}"', 'f"picture {i} " * (1 + 20 * (i % 8 == 0))'))
    assert train_script([str(config), f"run.dir={tmp_path}/run", f"task={file}:Shades", "limits.prompt_tokens=80",
                         "steps=3", "eval.samples=0"]) == 0
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert reasons and all("limits.prompt_tokens=80" in r for r in reasons)
    assert reasons[0] in capsys.readouterr().out.replace("\n", " ")
    assert metrics(tmp_path / "run")[-1]["prompts/rejected"] == len(reasons)


@pytest.mark.slow
def test_resume_with_other_settings(config, tmp_path, capsys, tiny_models):
    words = [str(config), f"run.dir={tmp_path}/run", "steps=1", "eval.samples=0", *SMALL]
    assert train_script(words) == 0
    fails(capsys, r"train.lr: 0.001 -> 0.002.*resume=never", *words, "train.lr=0.002")
    fails(capsys, r"model.name: '\S*qwen3_vl' -> '\S*qwen2_5_vl'", *words, f"model.name={tiny_models['qwen2_5_vl']}")
    assert train_script([*words, "save.keep=3", "eval.every=7", "steps=2"]) == 0  # these may change
    assert checkpoint.latest(tmp_path / "run" / "checkpoints").step == 2
    assert train_script([*words, "train.lr=0.002", "resume=never"]) == 0
    aside = RunFolder(tmp_path / "run.before-1")  # the old run is moved, not deleted
    assert checkpoint.latest(aside.checkpoints).step == 2 and len(aside.metrics()) == 2


@pytest.mark.slow
def test_other_rows_at_a_resume_are_refused_and_rows_left_out_are_kept(config, tmp_path, capsys):
    file, rows = tmp_path / "asked.py", tmp_path / "rows.jsonl"
    code = TASK.replace('"How bright is {id}?"', '"{question}"')
    file.write_text(code[:code.index("    def samples")] + code[code.index("    def score"):])
    entries = [{"id": i, "question": f"What is {i}?"} for i in range(8)] + [{"question": "no id"}]
    rows.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    words = [str(config), f"run.dir={tmp_path}/run", f"task={file}:Shades", f"data.train={rows}", "eval.samples=0",
             "data.quarantine=true", "rollout.prompts_per_step=1", "rollout.group_size=2", "run.checks=warn"]
    assert train_script([*words, "steps=1"]) == 0
    (left,) = [json.loads(line) for line in (tmp_path / "run" / "rejected.jsonl").read_text().splitlines()]
    assert left["step"] == 0 and "rows.jsonl:9: the row has id=None" in left["reason"]
    rows.write_text(rows.read_text().replace("What is 3?", "Who is 3?"))
    fails(capsys, r"data\.train=.*rows\.jsonl' differ from those of the checkpoint: 1 rows changed, '3' \(row 4\)",
          *words, "steps=2")
