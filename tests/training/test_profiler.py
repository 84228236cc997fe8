"""`vlrl train --profile`: phases, their work, and a folder of its own."""

import gzip
import json
import threading
import time

import pytest
import torch
from rich.console import Console

from tests.cli.test_training import call, contents
from tests.conftest import SAMPLES
from tests.helpers import credited_groups, load, settings
from tests.training.test_loop import write_config
from vlrl.models.flops import cost_model, patches_of
from vlrl.monitoring import metrics
from vlrl.monitoring.metrics import Clock, phase, watching
from vlrl.tools.machine import profiler
from vlrl.tools.machine.profiler import Peak, Recorder, Row, Work

CPU = torch.device("cpu")


def test_phases_hold_what_is_inside_them():
    record = Recorder(CPU)
    with watching(record):
        with Clock()("train"):
            for _ in range(2):
                with phase("forward"):
                    time.sleep(0.002)
        with phase("forward"):
            pass
    assert set(record.seconds) == {"train", "train/forward", "forward"}
    assert record.seconds["train"] >= record.seconds["train/forward"] >= 0.004
    with phase("after"):
        pass
    assert "after" not in record.seconds
    record = Recorder(CPU)
    with watching(record):
        with pytest.raises(ValueError), phase("a"), phase("b"):
            raise ValueError
        with phase("c"):
            pass
    assert set(record.seconds) == {"a", "a/b", "c"} and metrics._watch is None


def test_phases_of_other_threads_are_not_seen_and_those_of_modules_are():
    record = Recorder(CPU)
    def work():
        with phase("other"):
            pass
    with watching(record), phase("own"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert set(record.seconds) == {"own"}
    record, layer = Recorder(CPU), torch.nn.Linear(2, 2)
    with record.modules([layer], "vision"):
        layer(torch.zeros(1, 2))
        with pytest.raises(RuntimeError):
            layer(torch.zeros(1, 3))
        with record("train"):
            layer(torch.zeros(1, 2))
    layer(torch.zeros(1, 2))
    assert set(record.seconds) == {"vision", "train", "train/vision"} and not record._open


def test_the_vision_towers_are_found_at_the_outside(tiny_models):
    names = {"qwen3_vl": ["visual"], "internvl": ["vision_tower", "multi_modal_projector"]}
    for family, expected in names.items():
        policy, _ = load(settings(tiny_models[family]))
        assert profiler.vision_towers(policy) == [getattr(policy.model.model, name) for name in expected]


def test_work_counts_the_passes_of_the_config(tiny_models):
    config = settings(tiny_models["qwen3_vl"])
    policy, encode = load(config)
    groups = credited_groups(policy, encode, config, ("image", "text"))
    cost = cost_model(policy.model, policy.family)
    shapes = [(len(g.prompt), patches_of(g.prompt.mm, policy.base.config),
               [len(r.completion.tokens) for r in g.rollouts]) for g in groups]
    assert SAMPLES["image"].media and shapes[0][1] and not shapes[1][1]
    once = sum(cost.of(*shape) for shape in shapes)
    forward = sum(cost.forward(*shape) for shape in shapes)
    plain = profiler.work_of(groups, groups, cost, config, policy.base.config)
    assert plain.operations["train"] == once and plain.operations["train/reference"] == 0
    drawn = plain.operations["rollout"] - 2 * 2 * cost.head.weights
    assert drawn == pytest.approx(forward)  # each answer token is written once, by one forward pass
    kl = config.model_copy(update={"algo": config.algo.model_copy(update={"kl_coef": 0.1}),
                                   "rollout": config.rollout.model_copy(update={"updates": 3})})
    several = profiler.work_of(groups, groups[:1], cost, kl, policy.base.config)
    assert several.operations["train"] == 3 * cost.of(*shapes[0]) + 2 * cost.forward(*shapes[0])
    assert several.tokens["train"] == 3 * (shapes[0][0] + sum(shapes[0][2]))
    assert several.tokens["rollout/generate"] == sum(sum(answers) for _, _, answers in shapes)


def test_rows_by_hand():
    seconds = {"train": 4.0, "rollout": 4.0, "rollout/generate": 3.0, "rollout/generate/prefill": 1.0, "save": 1.0}
    work = Work({"train": 3e12, "rollout/generate/decode": 1e12}, {"rollout/generate/decode": 500, "train": 80})
    rows = profiler.rows(seconds, [work, work], 10.0, Peak(10.0, ""))
    assert [r.phase for r in rows] == ["rollout", "rollout/generate", "rollout/generate/prefill",
                                      "rollout/generate/decode", "train", "save", "the rest"]
    assert rows[3] == Row("rollout/generate/decode", 1.0, 0.2, 1.0, 0.1, 500.0)
    assert rows[4] == Row("train", 2.0, 0.4, 3.0, 0.15, 40.0) and rows[6] == Row("the rest", 0.5, 0.1)


def test_the_peak_of_a_known_card(monkeypatch):
    for name, tflops in (("NVIDIA H100 80GB HBM3", 989), ("NVIDIA H100 PCIe", 756), ("NVIDIA H200", 989),
                         ("NVIDIA A10", 125), ("NVIDIA A100-SXM4-80GB", 312), ("NVIDIA L4", 121), ("NVIDIA L40S", 362)):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        found = profiler.peak_of(torch.device("cuda"), torch.bfloat16)
        assert found.tflops == tflops and name in found.source


@pytest.mark.slow
def test_profile_of_a_run(tiny_models, tmp_path, capsys):
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    words = ["train", config, f"run.dir={tmp_path}/run", "algo.kl_coef=0.1", "--profile", "--profile-steps", 1]
    for name, file, text in (("run", "kept", "x"), ("run-profile", "profile.json", "earlier")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    before = contents(tmp_path / "run")
    out, _ = call(capsys, *words, "--json")
    found, folder = json.loads(out), tmp_path / "run-profile"
    assert contents(tmp_path / "run") == before and found["folder"] == str(folder)
    assert found == json.loads((folder / "profile.json").read_text())
    assert (tmp_path / "run-profile.before-1" / "profile.json").read_text() == "earlier"
    assert "measured" in found["peak_source"] and found["peak_tflops"] > 0
    rows = {row["phase"]: row for row in found["phases"]}
    assert {"rollout/encode", "rollout/generate/prefill/vision", "rollout/generate/decode", "train/pack",
            "train/reference/vision", "train/forward/vision", "train/backward", "train/optimizer", "store",
            "the rest"} <= set(rows)
    top = [row for name, row in rows.items() if "/" not in name]
    assert sum(row["share"] for row in top) == pytest.approx(1)
    assert sum(row["seconds"] for row in top) == pytest.approx(found["seconds"])
    inside = sum(row["seconds"] for name, row in rows.items() if name.count("/") == 1 and name.startswith("train/"))
    assert 0.5 * rows["train"]["seconds"] < inside <= rows["train"]["seconds"]
    for name in ("train/forward", "train/backward", "rollout/generate/decode"):
        speed = rows[name]["tflop"] / rows[name]["seconds"]
        assert rows[name]["mfu"] == pytest.approx(speed / found["peak_tflops"]) and rows[name]["tokens_per_s"] > 0
    assert not list((folder / "checkpoints").glob("*")) and not (folder / "eval.jsonl").exists()
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2
    for name, operator in (("update", "ViewBackward"), ("generation", "aten::index_select")):
        assert operator in gzip.decompress((folder / f"trace-{name}.json.gz").read_bytes()).decode()
    assert "aten::mm" in (folder / "operators.txt").read_text()


def test_what_is_shown(capsys, tiny_models, tmp_path):
    row = {"phase": "train", "seconds": 1.5, "share": 0.75, "tflop": 2.0, "mfu": 0.4, "tokens_per_s": 1234.5}
    inner = {"phase": "train/backward", "seconds": 1.0, "share": 0.5, "tflop": None, "mfu": None, "tokens_per_s": None}
    found = {"folder": "runs/a-profile", "device": "card", "dtype": "bfloat16", "peak_tflops": 989.0, "steps": 3,
             "peak_source": "data sheet of card", "processes": 2, "memory_gib": 1.5, "seconds": 2.0,
             "phases": [row, inner]}
    Console(width=100).print(profiler.render(found))
    out = capsys.readouterr().out
    assert "1.5000" in out and "75.0%" in out and "1,234" in out and "  backward" in out and "40.0%" in out
    said = " ".join(profiler.notes(found))
    assert "989 TFLOP/s, data sheet of card; each of 2 processes" in said and "1.50 GiB" in said
    config = write_config(tmp_path, tiny_models["qwen3_vl"])
    _, err = call(capsys, "train", config, "--profile", "--dry-run", code=2)
    assert "give one of the two" in err
