"""What `from vlrl import ...` gives: names without torch, settings by keywords, a run as the command leaves it."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import vlrl
from tests.e2e.runs import write_config
from vlrl.cli.main import main
from vlrl.errors import ConfigError, RunError
from vlrl.store import SCHEMA
from vlrl.training.session import Session

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=2", "save.every=1",
         "log.samples_every=0")
MEASURED = ("time/", "memory/", "tokens_per_s")
"""Keys of what a clock or the machine says."""


@pytest.fixture(scope="module")
def made(tiny_models, tmp_path_factory):
    """A config file, and a run of it by `vlrl.train`."""
    root = tmp_path_factory.mktemp("public")
    path = write_config(root, tiny_models["qwen3_vl"])
    run = vlrl.train(path, steps=2, rollout={"prompts_per_step": 2, "group_size": 2}, eval={"samples": 2},
                     log={"samples_every": 0}, **{"run.dir": root / "python", "save.every": 1})
    return path, run


@pytest.mark.slow
def test_importing_and_reading_load_no_torch(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    code = ("import sys, vlrl\nassert not {'torch', 'pyarrow', 'pydantic'} & {*sys.modules}\n"
            "run = vlrl.load_run(sys.argv[1])\nprint(run, run.metrics, run.evaluations, run.checkpoints)\nrun.show()\n"
            "vlrl.Task, vlrl.Sample, vlrl.load_config\nassert 'torch' not in sys.modules")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False, capture_output=True, text=True)
    assert done.returncode == 0 and "1 steps, reward 0.500" in done.stdout, done.stderr


def test_every_public_name_resolves_and_no_other():
    assert set(vlrl.__all__) <= {*dir(vlrl)} and all(getattr(vlrl, name) is not None for name in vlrl.__all__)
    stub = ast.parse((ROOT / "vlrl" / "__init__.pyi").read_text(encoding="utf-8"))
    said = {a.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert {name: f"vlrl.{module}" for name, module in vlrl._PUBLIC.items()} == {
        name: module for name, module in said.items() if name != "Path"}
    assert set(vlrl.__all__) == set(vlrl._PUBLIC)
    with pytest.raises(AttributeError, match=r"no attribute 'trian'; its names are .*train"):
        vlrl.trian  # noqa: B018


def test_settings_by_keywords_are_those_of_words():
    quick = "configs/quickstart.yaml"
    words = vlrl.load_config(quick, "train.lr=1e-5", "rollout.group_size=4", "algo.loss=cispo", "algo.loss.cap=5",
                             "async.max_staleness=0", "train.betas=[0.9, 0.95]", "run.dir=/tmp/x")
    given = vlrl.load_config(quick, train={"lr": 1e-5, "betas": (0.9, 0.95)}, run={"dir": Path("/tmp/x")},
                             algo={"loss": {"name": "cispo", "cap": 5}},
                             **{"rollout.group_size": 4, "async": {"max_staleness": 0}})
    assert words == given and given.algo.loss.options == {"cap": 5}
    assert vlrl.load_config(quick).run.dir == "runs/quickstart"
    with pytest.raises(ConfigError, match=r"unknown setting 'train.lrr'.*Did you mean 'lr'"):
        vlrl.load_config(quick, train={"lrr": 1})
    with pytest.raises(ConfigError, match=r"run\.dir is empty.*run=\{'dir'"):
        vlrl.train({"extends": "tiny.yaml", "task": "grounding"})
    with pytest.raises(ConfigError, match="not int"):
        vlrl.train(3)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_train_is_the_command(made, tmp_path):
    path, run = made
    folder = tmp_path / "command"
    assert main(["train", str(path), f"run.dir={folder}", *SMALL]) == 0
    command = vlrl.load_run(folder)
    def lines(found):
        return [{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in found.metrics.to_pylist()]
    assert lines(command) == lines(run) and len(lines(run)) == 2
    assert command.evaluations == run.evaluations and (run.path / "reward.png").is_file()
    assert {p.name for p in run.path.iterdir()} == {p.name for p in folder.iterdir()}
    assert run.config == command.config.model_copy(update={"run": run.config.run})


def test_what_a_run_holds_and_its_evaluation(made, capsys):
    run = made[1]
    assert [p.name for p in run.checkpoints][-2:] == ["step-000001", "step-000002"] and run.last == run.checkpoints[-1]
    assert run.best is None or run.best in run.checkpoints
    assert run.rollouts().schema.names == SCHEMA.names and run.rollouts(1).num_rows == 4
    assert set(run.rollouts(split="heldout").column("split").to_pylist()) == {"heldout"}
    assert [tuple(row) for row in zip(*(run.evaluations.column(c).to_pylist() for c in ("step", "split", "n")),
                                      strict=True)] == [(0, "heldout", 2), (2, "heldout", 2)]
    run.show()
    assert "Evaluation before and after" in capsys.readouterr().out
    assert repr(run).startswith(f"Run('{run.path}', 2 of 2 steps, reward ")
    found = vlrl.evaluate(run)
    line = run.evaluations.to_pylist()[-1]
    assert set(found) == {"heldout"} and found["heldout"]["n"] == 2
    for name, value in found["heldout"]["metrics"].items():
        assert value == pytest.approx({"mean": line[name], "low": line[f"{name}/ci95_low"],
                                       "high": line[f"{name}/ci95_high"]}), name
    assert {"reward/mean", "vowels", "completion/length_mean"} <= set(found["heldout"]["metrics"])
    first = vlrl.evaluate(made[0], checkpoint=run.checkpoints[0], eval={"samples": 3})
    assert first["heldout"]["n"] == 3 and json.dumps(first)
    with pytest.raises(ConfigError, match=r"eval\.samples=0"):
        vlrl.evaluate(run.path, eval={"samples": 0})


@pytest.mark.slow
def test_a_stopped_run_is_an_interrupt(made, monkeypatch, tmp_path):
    monkeypatch.setattr(Session, "interrupted", lambda self: True)
    with pytest.raises(KeyboardInterrupt, match="stopped after 1 of 2 steps"):
        vlrl.train(made[1].config, **{"run.dir": tmp_path / "run"})


def test_lines_and_folders_that_lack_something(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "a": 1}\n{"step": 1, "a": 0.5, "b": 2}\n'
                                            '{"step": 2, "c": null, "d": "x"}\n{"step": 3, "d": 1}\n')
    table = vlrl.load_run(tmp_path).metrics
    assert table.to_pydict() == {"step": [0, 1, 2, 3], "a": [1, 0.5, None, None], "b": [None, 2, None, None],
                                 "c": [None] * 4, "d": [None, None, '"x"', "1"]}
    assert table.schema.field("c").type == pa.float64() and vlrl.load_run(tmp_path).evaluations.num_rows == 0


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(RunError, match=f"{tmp_path} is not a run folder"):
        vlrl.load_run(tmp_path)
    with pytest.raises(RunError, match=f"'{tmp_path}/none' is not a folder"):
        vlrl.load_run(tmp_path / "none")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "metrics.jsonl").touch()
    with pytest.raises(RunError, match="Runs below it: a"):
        vlrl.load_run(tmp_path)
    with pytest.raises(RunError, match=r"cannot be read from .*config\.yaml"):
        _ = vlrl.load_run(tmp_path / "a").config
