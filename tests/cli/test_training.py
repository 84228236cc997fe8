"""`vlrl train --dry-run`, `eval`, `export` and `tiny` through the command line's own entry."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForImageTextToText, AutoProcessor

from tests.conftest import SAMPLES
from tests.e2e.runs import TASK, metrics, write_config
from tests.helpers import Vowels
from tests.tables import each
from vlrl.cli.evaluate import evaluate
from vlrl.cli.export import export
from vlrl.cli.main import main
from vlrl.cli.models import tiny
from vlrl.cli.train import sft
from vlrl.cli.train import train as train_command
from vlrl.config import load
from vlrl.models import families, packing, policy
from vlrl.models.processing import Encoder
from vlrl.store import RunFolder
from vlrl.tools.experiments.status import read_status
from vlrl.training.loop import train

QUICKSTART = "configs/quickstart.yaml"


@pytest.fixture(scope="module")
def lora(tiny_models, tmp_path_factory):
    """A finished LoRA run of two steps: its words, folder and newest checkpoint."""
    root = tmp_path_factory.mktemp("lora")
    config = write_config(root, tiny_models["qwen3_vl"], "log: {samples_every: 0}")
    words = [str(config), f"run.dir={root}/run", "steps=2", "model.lora.rank=4", "train.lr=0.01", "eval.every=0"]
    train(load(words[0], words[1:]))
    return SimpleNamespace(words=words, run=root / "run", newest=root / "run" / "checkpoints" / "step-000002")


def call(capsys, *words, code=0):
    """Runs `vlrl` with words; returns stdout and stderr, spaces folded."""
    capsys.readouterr()
    assert main([str(w) for w in words]) == code
    out, err = capsys.readouterr()
    assert "Traceback" not in err
    return out, " ".join(err.split())


def contents(folder: Path):
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_size) for f in folder.rglob("*")}


def test_dry_run_of_the_quickstart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(policy, "load_model", lambda *a, **k: pytest.fail("weights were loaded"))
    out, _ = call(capsys, "train", QUICKSTART, f"run.dir={tmp_path}/run", "--dry-run", "--json")
    found = json.loads(out)
    assert found["ok"] and not (tmp_path / "run").exists()
    sample, oracle = found["sample"], found["sample"]["oracle"]
    assert sample["coordinates"] == "norm1000" and sample["target"] == [81.0, 84.0, 111.0, 114.0]
    assert sample["tokens"] == sample["text_tokens"] + 16 and sample["media"][0]["processed"] == [64, 64]
    assert oracle["answer"] == "[633, 656, 867, 891]" and oracle["reward"] == oracle["parts"]["iou"] > 0.99
    assert found["splits"][1] == {"name": "heldout", "samples": 4096, "first": "heldout-000000"}
    assert found["parameters"] == [825120, 825120] and found["memory"]["total"] > 12 * 825120
    assert [line.split(" (")[0] for line in found["inert"]] == ["inert: algo.loss=ppo_clip",
                                                                "inert: task.rewards.format=0"]
    assert found["step"]["answers"] == 256 and found["step"]["tokens"] == 32 * 49 + 256 * 24


@pytest.mark.slow
def test_dry_run_counts_what_the_run_trains_and_packs(lora, tiny_models, capsys):
    found = json.loads(call(capsys, "train", *lora.words, "--dry-run", "--json")[0])
    adapter = policy.load(load(lora.words[0], lora.words[1:]), Accelerator(cpu=True))
    assert found["parameters"] == [sum(p.numel() for _, p in adapter.trainable()),
                                   sum(p.numel() for p in adapter.model.parameters())]
    assert found["run"].endswith("resumes from step-000002")
    oracle = found["sample"]["oracle"]
    assert oracle["is_best"] and oracle["parts"] == {"vowels": 1, "short": 1} and oracle["reward"] == 1.1
    lengths, limit = found["lengths"], 400  # train.tokens_per_batch of write_config; prompts differ by a digit or two
    group = lengths["mean"] + 4 * 8
    assert found["step"]["micro_batches"] == -(-4 // (limit // group))
    assert found["step"]["largest"] <= limit and found["step"]["prompts"] == 4
    out, _ = call(capsys, "train", *lora.words, "--dry-run")
    assert "How bright is picture 0?" in " ".join(out.split()) and "the maximum" in out and "peak" in out


@each("word says", [
    ("algo.loss=ppo", "algo.loss='ppo' is not known"), ("resume=must", "has no complete checkpoint"),
    ("limits.prompt_tokens=5", "maximum is limits.prompt_tokens=5"),
    ("eval.splits=[other]", "no samples in split 'other'"), ("curriculum.name=unifrom", "Did you mean 'uniform'"),
    ("algo.guided.answers=1", "define guidance(sample, answers)"),
])
def test_dry_run_names_every_problem(lora, tmp_path, capsys, word, says):
    task = tmp_path / "shades.py"
    task.write_text(TASK.replace("start = 0 if", "if split == 'other':\n            return []\n        start = 0 if"))
    words = [lora.words[0], f"run.dir={tmp_path}/run", f"task={task}", word, "algo.advantage=grop"]
    found = json.loads(call(capsys, "train", *words, "--dry-run", "--json", code=1)[0])
    assert "Did you mean 'grpo'" in found["problems"][0] and says in " ".join(found["problems"][1:])


def test_dry_run_of_a_broken_task_or_without_the_model(lora, tmp_path, capsys):
    task = tmp_path / "broken.py"
    task.write_text(TASK.replace('return "a"', 'return sample["label"]'))
    out, _ = call(capsys, "train", lora.words[0], f"run.dir={tmp_path}/run", f"task={task}", "--dry-run", code=1)
    assert "broken.py" in out and "KeyError: 'label'" in out and "peak" in out
    _, err = call(capsys, "train", *lora.words, "--json", code=2)
    assert "needs --dry-run" in err
    words = ["train", *lora.words[:1], f"run.dir={tmp_path}/run", "model.name=no/such-model", "--dry-run"]
    out, _ = call(capsys, *words, code=1)
    for text in ("train-0", "How bright is picture 0?", "64 x 64 pixels", "1.100, the maximum",
                 "problem: model.name='no/such-model' cannot be loaded"):
        assert text in out
    assert "not known without the model" in out and "tokens a" not in out and not (tmp_path / "run").exists()


def test_eval_gives_the_numbers_of_the_run(lora, tmp_path, capsys):
    first, last = metrics(lora.run, "eval.jsonl")
    now = read_status(lora.run)
    assert (now.state, now.step, now.steps, now.evals["heldout"]["step"], now.trend) == ("finished", 2, 2, 2, None)
    assert first["vowels"] != last["vowels"] and now.reward is not None and now.tokens_per_s and now.steps_per_minute
    before = contents(lora.run)
    with RunFolder(lora.run).lock():
        out, _ = call(capsys, "eval", *lora.words, "--json", "-o", tmp_path / "a.jsonl", "--rollouts", tmp_path / "a")
    del last["measured"]  # a run alone compares its evaluations
    assert json.loads(out)["evaluations"] == [json.loads((tmp_path / "a.jsonl").read_text())] == [last]
    answers = RunFolder(tmp_path / "a").rollouts(2, split="heldout")
    assert answers.equals(RunFolder(lora.run).rollouts(2, split="heldout"))
    assert contents(lora.run).keys() == before.keys()
    assert {k: v for k, v in contents(lora.run).items() if "lock" not in k} == {
        k: v for k, v in before.items() if "lock" not in k}


@pytest.mark.slow
def test_eval_of_the_model_and_of_an_adapter_under_other_settings(lora, tiny_models, capsys):
    first, last = metrics(lora.run, "eval.jsonl")
    out, _ = call(capsys, "eval", *lora.words, "--model", tiny_models["qwen3_vl"], "--json")
    assert json.loads(out)["evaluations"] == [{k: v for k, v in first.items() if k != "measured"}]
    full = [w for w in lora.words if not w.startswith(("model.lora", "run.dir"))]
    merged = json.loads(call(capsys, "eval", *full, "--checkpoint", lora.run, "--json")[0])
    assert merged["model"] == str(lora.newest) and merged["step"] == 2
    assert merged["evaluations"][0]["vowels"] == pytest.approx(last["vowels"], abs=1e-3)
    out, _ = call(capsys, "eval", *full, "--checkpoint", lora.newest, "--samples", 5, "--temperature", 1,
                  "--split", "heldout", "--split", "train")
    assert "after 2 steps" in " ".join(out.split())
    rows = [line.split() for line in out.splitlines() if " vowels " in line]
    assert [row[:3] for row in rows] == [["heldout", "vowels", "5"], ["train", "vowels", "5"]]


def stats(model, folder, words):
    config = load(words[0], [*words[1:], f"model.name={folder}"])
    processor = AutoProcessor.from_pretrained(folder)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    own = policy.Policy(model.eval(), processor, families.family_of(base.config), Accelerator(cpu=True), torch.float32)
    encode = Encoder(processor, own.family, own.positions, config)
    prompt = encode(Vowels(), SAMPLES["image"])
    (batch,) = packing.pack(packing.pieces_of([prompt], [encode.answer_ids("a red box")], 999), 999, "padded")
    with torch.no_grad():
        return own.logprobs(batch, 1.0).logprobs, prompt.ids.tolist()


@pytest.mark.slow
def test_an_exported_lora_run_is_base_and_adapter(lora, tmp_path, capsys):
    out, _ = call(capsys, "export", lora.run, "-o", tmp_path / "model", "--dtype", "float32")
    assert "step-000002" in out and "largest difference" in out
    plain = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, text=True)
    assert ("import vlrl first" in out) == ("torchvision::nms does not exist" in plain.stderr)
    names = {f.name for f in (tmp_path / "model").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "chat_template.jinja",
            "tokenizer.json"} <= names
    assert not any(n.startswith(("trainer_state", "manifest", "adapter")) for n in names)
    assert str(lora.run.parent) not in (tmp_path / "model" / "config.json").read_text()
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
    apart = policy.load_model(lora.newest, torch.float32, merge=False)
    expected, ids = stats(apart, lora.newest, lora.words)
    found, same = stats(merged, tmp_path / "model", lora.words)
    assert same == ids and (found - expected).abs().max() < 1e-5
    with apart.disable_adapter():
        assert (stats(apart, lora.newest, lora.words)[0] - expected).abs().max() > 1e-2  # it did learn something
    _, err = call(capsys, "export", lora.run, "-o", tmp_path / "model", code=1)
    assert "is not empty" in err


@pytest.mark.slow
def test_export_of_an_adapter_and_in_another_type(lora, tmp_path, capsys):
    call(capsys, "export", lora.newest, "-o", tmp_path / "a", "--adapter")
    assert (tmp_path / "a/adapter_model.safetensors").read_bytes() == (
        lora.newest / "adapter_model.safetensors").read_bytes()
    assert not (tmp_path / "a" / "manifest.json").exists()
    again = json.loads(call(capsys, "export", tmp_path / "a", "-o", tmp_path / "b", "--dtype", "bfloat16", "--json")[0])
    assert again["dtype"] == "bfloat16" and 0 < again["difference"] < 0.5
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "b").dtype == torch.bfloat16
    whole = json.loads(call(capsys, "export", tmp_path / "b", "-o", tmp_path / "c", "--json")[0])  # a whole model
    assert whole["dtype"] == "bfloat16" and whole["difference"] == pytest.approx(0, abs=0.5)
    assert (tmp_path / "b/model.safetensors").read_bytes() == (tmp_path / "c/model.safetensors").read_bytes()
    _, err = call(capsys, "export", tmp_path / "b", "-o", tmp_path / "d", "--adapter", code=1)
    assert "not an adapter" in err


def test_export_and_eval_refuse(lora, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for words, says in (
            ((tmp_path / "none", "-o", tmp_path / "x"), "none' is not a folder"),
            ((lora.run, "-o", tmp_path / "file"), "is a file"),
            ((lora.run, "-o", tmp_path / "file" / "x"), "cannot write"),
            ((lora.run, "-o", tmp_path / "x", "--dtype", "int8"), "dtype='int8' is not known")):
        _, err = call(capsys, "export", *words, code=1)
        assert says in err, err
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("")
    damaged = shutil.copytree(lora.newest, tmp_path / "step-000002")
    (damaged / "adapter_model.safetensors").write_bytes(b"x")
    for words, says in (
            (("--checkpoint", tmp_path / "none"), "none' is not a folder"),
            (("--checkpoint", tmp_path / "full"), "neither a run folder nor a checkpoint"),
            (("--checkpoint", damaged), "is damaged: adapter_model.safetensors"),
            (("--model", "no/such"), "model.name='no/such' cannot be loaded"),
            (("--split", "other", "task=grounding", "task.drawn=true"), "split 'other'"),
            (("--rollouts", tmp_path / "full"), "not an empty folder"),
            (("-o", tmp_path / "full" / "file"), "exists already"), (("eval.samples=0",), "nothing to measure")):
        _, err = call(capsys, "eval", *lora.words, *words, code=1)
        assert says in err, err
    for words in (("--samples", 0), ("--temperature", -1), ("--model", "a", "--checkpoint", "b")):
        call(capsys, "eval", *lora.words, *words, code=2)


def test_tiny_help_and_settings(tmp_path, capsys):
    out, _ = call(capsys, "tiny", "--random", "--out", tmp_path / "m", "--seed", 3, "--max-pixels", 1024)
    assert "sha256" in out and AutoProcessor.from_pretrained(tmp_path / "m").image_processor.size.longest_edge == 1024
    for words, says in ((("--random",), "is not an empty folder"), (("--family", "qwen3vl"), "mean 'qwen3_vl'")):
        _, err = call(capsys, "tiny", "--out", tmp_path / "m", *words, code=1)
        assert says in err
    for words in ("train", "sft", "eval", "export", "tiny"):
        out, _ = call(capsys, words, "--help")
        assert "Examples:" in out
    for command in (train_command, sft, evaluate, export, tiny):
        assert all(len(line) < 80 for line in command.epilog.splitlines() if line.startswith(("vlrl", "torchrun")))
    out, _ = call(capsys, "train", "--settings")
    assert out.index("train.lr = ") < out.index("\nrollout\n") and "--settings WORD" in out
    out, _ = call(capsys, "train", "--settings", "schedule")
    assert "train.schedule = constant   (one of constant, linear, cosine)" in out and "can be lengthened" in out
    assert "model.name" not in out and "\n  algo.critic.lr" in out  # its description names train.schedule
    out, _ = call(capsys, "train", "quickstart.yaml", "--settings", "lora", "rank=8")
    assert re.findall(r"^  (\S+) = ", out, re.MULTILINE) == ["model.lora.rank", "model.lora.alpha"]  # it names rank
    _, err = call(capsys, "train", "--settings", "grup_size", code=1)
    assert "no setting has this" in err and "'group_size'" in err
    out, _ = call(capsys, "--help")
    places = [out.index(f"─ {heading} ─") for heading in ("Train", "Data and tasks", "Measure and look",
                                                         "Models and serving", "Machine")]
    assert places == sorted(places) and "─ Commands ─" not in out
    assert out.index("vlrl train --data FILE --reward file.py:f --model NAME") > places[-1]
