"""The card of a model, and a whole push of a run: what is in it, what is not, and that its lines of code run."""

import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.data.hub_server import hub, use
from tests.e2e.runs import write_config
from tests.helpers import made_group
from vlrl.cli.main import main
from vlrl.config import dump, load, validate
from vlrl.errors import RunError
from vlrl.store import RunFolder
from vlrl.store.files import write_text
from vlrl.tools.hub.export import ExportedModel
from vlrl.tools.hub.model_card import PublishedModel, base_of, card, command
from vlrl.tools.hub.model_release import prepare
from vlrl.tools.hub.redaction import PrivateWords

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")  # the library
PRIVATE = PrivateWords({"/home/ann": "the home folder"})


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "cats")
    config = validate({"task": {"name": "classification", "labels": ["cat", "dog"]}, "steps": 4, "seed": 3,
                       "model": {"name": "Qwen/Qwen2.5-VL-3B-Instruct", "lora": {"rank": 8}},
                       "data": {"train": "/home/ann/rows.jsonl", "heldout": "org/cats@test", "seed": 5},
                       "services": {"judge": {"url": "http://10.1.2.3:80/v1", "model": "j", "key_env": "MY_KEY"}},
                       "run": {"dir": str(folder.path)}})
    folder.create(dump(config), 3)
    for step, weight in enumerate((0.5, 0.25, 0.0)):
        folder.write_rollouts(step, 0, [made_group(
            "s", "cat", (0.25 * step,), id=f"g{step}", split="train", task="classification",
            weights={"right": 1.0, "format": weight}, of={"parts": {"right": 0.25 * step}})])
        folder.append_metrics({"step": step, "reward/mean": 0.25 * step, "reward/right": 0.25 * step,
                               "time/total_s": 100.0})
    for step, mean in ((0, 0.1), (2, 0.4), (4, 0.5)):
        folder.append_eval({"step": step, "split": "heldout", "n": 50, "reward/mean": mean,
                            "reward/mean/ci95_low": mean - 0.05, "reward/mean/ci95_high": mean + 0.05})
    (folder.path / "data_sources.json").write_text(json.dumps({"org/cats@test": "c" * 40}))
    return folder


def subject(run, step, **more):
    done = ExportedModel(source=Path("x"), folder=Path("x"), adapter=False, dtype="bfloat16", parameters=1234567,
                         files=(), bytes=1)
    return PublishedModel(repo="org/name", exported=replace(done, **more), run=run, step=step)


def test_the_card_says_what_the_run_says(run):
    base = replace(base_of("Qwen/Qwen2.5-VL-3B-Instruct"), licence="other")
    text = card(subject(run, 2), PRIVATE, base)
    head = yaml.safe_load(text.split("---")[1])
    assert head["base_model"] == "Qwen/Qwen2.5-VL-3B-Instruct" and head["license"] == "other"
    assert head["datasets"] == ["org/cats"] and head["base_model_relation"] == "finetune"
    assert "1,234,567 bfloat16 parameters" in text and "| weights after step | 2 of 4 |" in text
    assert "| heldout | reward/mean | 50 | 0.100 [0.050, 0.150] | 0.400 [0.350, 0.450] | +0.300 |" in text
    assert "| `right` | 1 | 0.000 | 0.250 |" in text and "| `format` | 0.5 to 0.25 | – | – |" in text
    assert f"org/cats@test](https://huggingface.co/datasets/org/cats) at commit `{'c' * 40}`" in text
    assert "`rows.jsonl`, a file that is not published here" in text and "`seed=3`, `data.seed=5`" in text
    assert 'model = LLM("org/name")\ncontent = [{"type": "image_pil"' in text
    assert 'LLM("' not in card(subject(run, 2, adapter=True), PRIVATE, base)
    assert "0:03:20 on" in text and "model.lora.rank: 8" in text
    for hidden in ("/home/ann", "10.1.2.3", "MY_KEY", str(run.path)):
        assert hidden not in text


def test_the_card_says_what_is_not_known(run):
    text = card(subject(run, 3), PRIVATE, base_of("Qwen/Qwen2.5-VL-3B-Instruct"))
    assert "those after step 3, which was not evaluated" in text and "0.500 [0.450" not in text
    assert yaml.safe_load(text.split("---")[1])["license"] == "unknown" and "The licence of the base model" in text
    run.checkpoints.mkdir()
    (run.checkpoints / "best.json").write_text(json.dumps({"step": 2, "split": "heldout", "metric": "reward/mean"}))
    chosen = "chosen as the best of 2 by `reward/mean` on these same samples"
    assert chosen in card(subject(run, 2), PRIVATE, None) and chosen not in text
    alone = card(subject(None, None), PRIVATE, None)
    assert "| base model | unknown |" in alone and "its folder was not found with the weights" in alone
    for file in (run.path / "rollouts").iterdir():
        file.unlink()
    assert "the run stored no rollouts" in card(subject(run, 2), PRIVATE, None)


def test_commands_and_bases(run, tmp_path):
    for words, said in (
            (["/home/ann/bin/vlrl", "train", "/home/ann/c.yaml", "data.root=/mnt/a/b"],
            "vlrl train c.yaml data.root=b"),
            (["/x/vlrl/__main__.py", "train", "alerts.webhook=https://h/secret", "steps=2"], "vlrl train steps=2"),
            (["/x/ipykernel_launcher.py", "-f", "/root/.local/kernel.json"], "in a notebook"), (None, "unknown")):
        assert command(words, PRIVATE) == said, (words, said)
    assert base_of("embedded/tiny-qwen3-vl").licence == "apache-2.0"
    path = run.checkpoints / "step-000002"
    path.mkdir(parents=True)
    for name in (run.path, path):
        found = base_of(str(name))
        assert (found.name, found.on_hub, found.through) == ("Qwen/Qwen2.5-VL-3B-Instruct", True, ("cats",))
    local = tmp_path / "mine"
    local.mkdir()
    assert base_of(str(local)).licence is None
    (local / "README.md").write_text("---\nlicense: mit\n---\n# Mine")
    assert (base_of(str(local)).name, base_of(str(local)).licence) == ("mine", "mit")


def test_what_cannot_be_taken_out_is_refused(run, tmp_path):
    path = run.checkpoints / "step-000002"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"")
    folder = tmp_path / "out"
    folder.mkdir()
    write_text(folder / "config.json", json.dumps({"_name_or_path": "/home/ann/base", "layers": 2}))
    write_text(folder / "chat_template.jinja", "{# by /home/ann/x #}")
    done = replace(subject(run, 2).exported, folder=folder, files=("config.json", "chat_template.jinja"))
    with pytest.raises(RunError, match=r"chat_template\.jinja would reveal the home folder: nothing is sent"):
        prepare(path, "org/name", done, PRIVATE)
    write_text(folder / "chat_template.jinja", "{{ messages }}")
    files = prepare(path, "org/name", done, PRIVATE).files
    assert json.loads(files["config.json"]) == {"_name_or_path": "base", "layers": 2}
    assert files["chat_template.jinja"] == folder / "chat_template.jinja" and files["reward.png"][:4] == b"\x89PNG"
    assert json.loads((folder / "config.json").read_text())["_name_or_path"] == "/home/ann/base"


@pytest.fixture(scope="module")
def trained(tiny_models, tmp_path_factory):
    from vlrl.training.loop import train
    root = tmp_path_factory.mktemp("trained")
    config = write_config(root, tiny_models["qwen3_vl"], "log: {samples_every: 0}")
    train(load(config, [f"run.dir={root}/run", "steps=2", "model.lora.rank=4", "eval.every=0", "eval.samples=4"]))
    return root / "run"


@pytest.fixture
def served(monkeypatch):
    with hub() as served:
        use(monkeypatch, served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_averysecrettoken")
        monkeypatch.setenv("JUDGE_API_KEY", "k-1234567890")
        monkeypatch.setattr(socket, "gethostname", lambda: "node17.example")
        served.large = 100_000
        yield served


def run_code(text, **places):
    """Runs the first Python block of a card, without vLLM, with other names in it; returns what it prints."""
    code, *_ = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    for name, place in places.items():
        code = code.replace(name.replace("__", "/"), str(place))
    printed = []
    exec(code, {"print": printed.append})
    return printed


def put_down(files, folder):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("form", [[], ["--adapter"]], ids=["whole", "adapter"])
def test_a_pushed_run_loads_and_tells_nothing(trained, tiny_models, served, tmp_path, monkeypatch, capsys, form):
    words = ["export", str(trained), "--push", "org/name", "--rollouts", *form]
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert served.asked == [] and "dry run, nothing is sent: model org/name, private" in said and "# name" in said
    assert re.search(r"[\d,]+ bytes  (?:adapter_)?model.safetensors\n", said)
    assert main(words) == 0
    assert served.private == {"org/name": True, "org/name-rollouts": True}
    everything = b"\n".join([*served.received, *(c for name in served.private for c in served.head(name).values())])
    for hidden in ("/root/", trained, tmp_path, tiny_models["qwen3_vl"], "node17", "k-1234567890", Path.cwd()):
        assert str(hidden).encode() not in everything, hidden
    assert b"hf_averysecrettoken" not in everything.replace(b"Bearer hf_averysecrettoken", b"")
    assert not any(name.startswith("media") for name in served.head("org/name-rollouts"))
    folder = put_down(served.head("org/name"), tmp_path / "got")
    assert not {"trainer_state.json", "manifest.json", ".vlrl-export.json"} & set(served.head("org/name"))
    Image.new("RGB", (64, 64), "red").save(tmp_path / "picture.png")
    monkeypatch.chdir(tmp_path)
    base = Path(tiny_models["qwen3_vl"])
    (printed,) = run_code((folder / "README.md").read_text(), **{"org__name": folder, f'"{base.name}"': f'"{base}"'})
    assert isinstance(printed, str)


@pytest.mark.slow
def test_a_push_that_was_cut_off_goes_on(trained, served, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
    out, served.cuts = tmp_path / "model", 10**6
    words = ["export", str(trained), "-o", str(out), "--push", "org/name"]
    assert main(words) == 1 and "Repeat the command" in capsys.readouterr().err
    assert "org/name" not in served.commits
    served.cuts = 0
    assert main(words) == 0 and "holds this export already" in capsys.readouterr().err
    assert served.head("org/name")["model.safetensors"] == (out / "model.safetensors").read_bytes()
    assert main([*words, "--dtype", "float16"]) == 1
    assert "of another checkpoint, or one made with other options" in " ".join(capsys.readouterr().err.split())
