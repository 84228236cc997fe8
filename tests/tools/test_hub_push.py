"""What is sent to the Hub, against a server with its routes over real HTTP; what is taken out of texts before."""

import dataclasses
import io
import json
import socket
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.data.hub_server import hub, use
from tests.helpers import made_group
from vlrl.cli.main import main
from vlrl.data.sources import hub as hubs
from vlrl.errors import ConfigError, RunError
from vlrl.store import RunFolder
from vlrl.tools.hub.push import HubTarget, push, sizes, token
from vlrl.tools.hub.redaction import PrivateWords
from vlrl.tools.hub.rollout_dataset import export
from vlrl.types import LoadedMedia, Sample

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw:DeprecationWarning")  # the library
MODEL = HubTarget("org/model")
TOKEN = "hf_averysecrettoken"


@pytest.fixture
def served(monkeypatch):
    with hub() as served:
        use(monkeypatch, served.url)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        served.tokens, served.large = {TOKEN}, 1000
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda seconds: None)
        yield served


def weights(tmp_path, name="model.safetensors", byte=b"w"):
    (tmp_path / name).write_bytes(byte * 5000)
    return tmp_path / name


def test_files_arrive_in_one_commit_and_public_models_are_not_filled(served, tmp_path):
    files = {"config.json": b"{}", "model.safetensors": weights(tmp_path)}
    assert push(MODEL, files, "first").endswith("org/model")
    assert served.head("org/model") == {"config.json": b"{}", "model.safetensors": b"w" * 5000}
    assert served.private == {"org/model": True} and len(served.commits["org/model"]) == 1
    assert sizes(files) == [("config.json", 2), ("model.safetensors", 5000)]
    push(HubTarget("org/open", public=True), {"config.json": b"{}"}, "open")
    assert served.private["org/open"] is False
    with pytest.raises(ConfigError, match=r"org/open exists and is public: nothing is sent\. Pass"):
        push(HubTarget("org/open"), {"secret.json": b"{}"}, "x")
    assert list(served.head("org/open")) == ["config.json"]
    parts = {f"model-0000{i}-of-00002.safetensors": weights(tmp_path, byte=bytes([i])) for i in (1, 2)}
    push(MODEL, {"notes.md": b"mine", "model.safetensors.index.json": b"{}", **parts}, "in parts")
    push(MODEL, {"config.json": b"{}", "model.safetensors": weights(tmp_path)}, "whole")
    assert sorted(served.head("org/model")) == ["config.json", "model.safetensors", "notes.md"]


def test_a_refused_token_is_not_repeated(served, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_anothersecrettoken")
    with pytest.raises(RunError, match=r"Hub refused the request with status 401\. HF_TOKEN is") as error:
        push(MODEL, {"config.json": b"{}"}, "x")
    assert "hf_" not in str(error.value) and error.value.__cause__ is None and error.value.__suppress_context__
    served.refusals["org/closed"] = 403, ""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with pytest.raises(RunError, match=r"status 403\. Set HF_TOKEN to a token with write access"):
        push(HubTarget("org/closed"), {"config.json": b"{}"}, "x")
    assert served.commits == {}


def test_the_token_comes_from_the_environment_alone(served, tmp_path, monkeypatch):
    (tmp_path / "token").write_text("hf_stored")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match="HF_TOKEN is not set"):
        push(MODEL, {"config.json": b"{}"}, "x")
    assert served.asked == []
    use(monkeypatch, served.url, offline=True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set, so nothing is sent"):
        token("org/model")


def test_a_cut_connection_leaves_nothing_and_the_next_push_sends_the_rest(served, tmp_path):
    first, second = weights(tmp_path, "a.safetensors", b"a"), weights(tmp_path, "b.safetensors", b"b")
    push(HubTarget("org/other"), {"a.safetensors": first}, "has the object already")
    served.cuts = 10**6
    with pytest.raises(RunError, match=r"the connection was lost: .* Repeat the command"):
        push(MODEL, {"a.safetensors": first, "b.safetensors": second}, "x")
    assert "org/model" not in served.commits
    served.cuts, before = 1, len(served.asked)  # once more it is cut, and the library tries again
    push(MODEL, {"a.safetensors": first, "b.safetensors": second}, "x")
    sent = [line for line in served.asked[before:] if line.startswith("PUT")]
    assert len(sent) == 2 and len(set(sent)) == 1  # b, twice; a was there
    assert served.head("org/model") == {"a.safetensors": b"a" * 5000, "b.safetensors": b"b" * 5000}


def test_names_that_are_none_and_no_hub(served, monkeypatch):
    for name in ("a b/c", "name", "a/b/c", "-x/y"):
        with pytest.raises(ConfigError, match="is not a valid model name"):
            push(HubTarget(name), {"config.json": b"{}"}, "x")
        assert served.asked == [], name
    use(monkeypatch, "http://127.0.0.1:9")
    with pytest.raises(RunError, match="the Hub cannot be reached, or the connection was lost: ConnectError"):
        push(MODEL, {"config.json": b"{}"}, "x")


def group(number, split="train"):
    picture = Image.new("RGB", (8, 6 + number), (0, number, 9))
    media = LoadedMedia(kind="image", frames=(picture,), sha256=f"{number:064x}")
    clip = LoadedMedia(kind="video", frames=(picture, picture), sha256=f"{number + 99:064x}", timestamps=(0.0, 1.0))
    return made_group(f"s{number}", f"answer {number} \u2028 ---", (0.0, 1.0), row={"label": "cat"}, split=split,
                      media=(media, clip) if number == 2 else (media,), id=f"{number:08d}")


@pytest.fixture
def run(tmp_path):
    folder = RunFolder(tmp_path / "runs" / "a")
    folder.create("model: {name: /secret/place/tiny}\ntask: {name: grounding}\n", 0)
    for step in range(3):
        folder.write_rollouts(step, 0, [group(step)])
    folder.write_rollouts(3, 0, [group(5, "heldout")], split="heldout")
    return folder


def noted(run):
    from vlrl.app.notes import Notes
    from vlrl.app.queries import RolloutKey
    Notes(run.path.parent).put(RolloutKey("a", "train", "train", 1, "00000001", 0), flag="good", comment="clear")


def test_datasets_reads_what_is_exported(run, tmp_path):
    datasets = pytest.importorskip("datasets")
    noted(run)
    assert main(["data", "export", str(run.path), "-o", str(tmp_path / "set")]) in (0, None)
    found = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"), split="train")
    assert len(found) == 6 and isinstance(found.features["images"].feature, datasets.Image)
    row = found[2]
    assert (row["sample_id"], row["flag"], row["comment"], row["step"]) == ("s1", "good", "clear", 1)
    assert row["images"][0].size == (8, 7) and json.loads(row["parts"]) == {"iou": 0.0}
    assert json.loads(row["sample"]) == {"label": "cat"} and row["completion"].startswith("answer 1")
    card = (tmp_path / "set" / "README.md").read_text()
    assert "| model | `tiny` |" in card and "/secret" not in card and "6 rollouts" in card
    assert "| notes | 1 |" in card and "2 videos left out" in card


def test_steps_evaluations_and_pictures_of_the_run_alone(run, tmp_path):
    made = export(run, tmp_path / "late", steps=range(1, 2))
    assert (made.rows, made.images, made.left_out) == (2, 2, {})
    made = export(run, tmp_path / "held", split="heldout")
    assert made.rows == 2 and pq.read_table(tmp_path / "held/data/heldout-00000-of-00001.parquet").num_rows == 2
    with pytest.raises(RunError, match="has no rollouts of the chosen steps"):
        export(run, tmp_path / "none", steps=range(7, 9))
    with pytest.raises(ConfigError, match="is not empty"):
        export(run, tmp_path / "late")
    for file in (run.path / "media").iterdir():
        file.unlink()
    made = export(run, tmp_path / "set", steps=range(1))
    assert (made.images, made.left_out) == (0, {"images whose file is missing": 2})
    outside = run.path / "media" / f"{1:064x}.png"
    outside.symlink_to("/etc/hostname")
    made = export(run, tmp_path / "linked", steps=range(1, 2))
    assert made.left_out == {"images that the run did not store (store.media)": 2}


def test_what_is_pushed_is_read_by_its_name(run, monkeypatch, capsys, tmp_path):
    with hub() as served:
        use(monkeypatch, served.url)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        assert main(["data", "push", str(run.path), "org/rollouts"]) == 1
        assert "HF_TOKEN is not set" in capsys.readouterr().err and served.asked == []
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        main(["data", "push", str(run.path), "org/rollouts", "--with-media"])
        assert served.private == {"org/rollouts": True}
        (file,), _ = hubs.fetch_split(hubs.parse_hub_name("org/rollouts@train"), tmp_path / "cache")
        rows = pq.read_table(file).to_pylist()
        assert len(rows) == 6 and Image.open(io.BytesIO(rows[0]["images"][0]["bytes"])).size == (8, 6)


def test_pictures_and_places_are_not_pushed_unless_asked_for(run, tmp_path, monkeypatch, capsys):
    told = group(7)
    sample = Sample(id="s7", row={"image": f"{tmp_path}/private/cat.png", "note": "read from /mnt/disk/x/rows.jsonl"})
    failed = dataclasses.replace(told.rollouts[0], error=f"OSError: {tmp_path}/private/cat.png is gone")
    run.write_rollouts(3, 0, [dataclasses.replace(told, sample=sample, rollouts=(failed,))])
    with hub() as served:
        use(monkeypatch, served.url)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        main(["data", "push", str(run.path), "org/rollouts", "--dry-run"])
        assert "dry run, nothing is sent: data set org/rollouts, private" in capsys.readouterr().out
        assert served.asked == []
        main(["data", "push", str(run.path), "org/rollouts"])
        (file,), _ = hubs.fetch_split(hubs.parse_hub_name("org/rollouts@train"), tmp_path / "cache")
        *_, row = rows = pq.read_table(file).to_pylist()
        assert not any(row["images"] for row in rows)
        assert json.loads(row["sample"]) == {"image": "cat.png", "note": "read from rows.jsonl"}
        assert row["error"] == "OSError: cat.png is gone"
        assert b"9 images and videos (--with-media) left out" in served.head("org/rollouts")["README.md"]


WORDS = PrivateWords({"/home/ann": "the home folder", "hf_secretvalue": "the value of HF_TOKEN",
                      "node17": "the name of the host", "ann@": "the name of the user"})


def test_messages_and_words_of_a_command():
    for text, clean in (
            ("cannot read /home/ann/pictures/3.png: gone", "cannot read 3.png: gone"),
            ("data.root=/mnt/a/b", "data.root=b"), ("~/x/rows.jsonl", "rows.jsonl"),
            (r"C:\Users\ann\rows.jsonl", "rows.jsonl"),
            ("see https://example.com/a/b.html", "see https://example.com/a/b.html"), ("1/2 and/or 3", "1/2 and/or 3"),
            ("<think>a</think>", "<think>a</think>"), ("key=hf_secretvalueX", "key=…X"), ("on node17.", "on …."),
            ("node171 and xnode17", "node171 and xnode17"), ("ann@host", "…host"),
            ("configs/quickstart.yaml", "configs/quickstart.yaml")):
        assert WORDS.text(text) == clean, (text, clean)
    for word, clean in (
            ("data.train=/mnt/a/rows.jsonl", "data.train=rows.jsonl"), ("--config=../../x/y.yaml", "--config=x/y.yaml"),
            ("services.judge.url=http://10.0.0.7:8001/v1", "services.judge.url=http://…"),
            ("train.lr=1e-4", "train.lr=1e-4")):
        assert WORDS.setting(word) == clean, (word, clean)
    assert WORDS.model_text("look at /usr/share/x and /home/ann/y") == "look at /usr/share/x and …/y"


def test_values_and_words_of_this_machine(tmp_path, monkeypatch):
    row = {"image": "/data/cats/1.png", "boxes": [[1, 2.5]], "deep": {"/home/ann/a": ["file:///a/b c.png"]},
           "none": None, "answer": "/no_think", "raw": "data:image/png;base64," + "iVBORw0KGgo" + "A" * 53}
    found = json.loads(WORDS.json(json.dumps(row)))
    assert found.pop("raw").startswith("sha256:")
    assert found == {"image": "1.png", "boxes": [[1, 2.5]], "deep": {"…/a": ["b c.png"]}, "none": None,
                     "answer": "/no_think"}
    assert WORDS.json(None) is None and WORDS.json("no json in /a/b") == "no json in b"
    kept = {"template": "{% if a/b %}x /x/y z", "layers": 3, "name": "org/model"}
    assert WORDS.config({**kept, "_name_or_path": "/data/models/x"}) == {**kept, "_name_or_path": "x"}
    assert WORDS.findings("in /home/ann with hf_secretvalue, /home/ann") == ["the home folder", "the value of HF_TOKEN"]
    assert WORDS.findings("node17 ann@", vocabulary=True) == [] and WORDS.findings("/home/anna, node18") == []
    monkeypatch.setenv("OTHER_API_KEY", "abcdefghij")
    monkeypatch.setenv("SOME_TOKEN", "on")
    monkeypatch.setattr(socket, "gethostname", lambda: "node17")
    words = PrivateWords.here(tmp_path).words
    assert words["abcdefghij"] == "the value of OTHER_API_KEY" and "on" not in words
    assert {str(tmp_path), str(Path.home()), "node17"} <= words.keys()


@settings(max_examples=50)
@given(st.text(), st.text())
def test_nothing_of_the_machine_is_left(before, after):
    for word in WORDS.words:
        text = f"{before} {word} {after}"
        assert not WORDS.findings(WORDS.model_text(text)) and not WORDS.findings(WORDS.text(text))
