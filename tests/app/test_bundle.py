"""bundle.py and redaction.py: a run as a folder to publish. How it looks and filters: test_browser_bundle.py."""

import html
import json
import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.app import made_runs
from tests.app.views import Markup
from tests.tables import each
from vlrl.app import bundle, bundle_page
from vlrl.app.redaction import Redactor
from vlrl.cli.main import main
from vlrl.errors import RunError

SECRET = "s3cret-of-the-judge-77"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that tells of its machine wherever a run can: settings, errors, data rows, tools, alerts, prompts."""
    folder = tmp_path_factory.mktemp("runs") / "boxes"
    run = made_runs.write(folder, steps=3, settings={
        "model": {"name": str(folder / "base-model")}, "data": {"train": "/data/jo/rows.jsonl"},
        "alerts": {"webhook": "https://hooks.example.org/services/T0/B0"}})
    beat = json.loads((folder / "heartbeat.json").read_text())
    (folder / "heartbeat.json").write_text(json.dumps({**beat, "host": "gpu-box-7"}))
    env = json.loads((folder / "env.json").read_text())
    (folder / "env.json").write_text(json.dumps({**env, "host": "gpu-box-8", "command": ["/data/jo/bin/vlrl"]}))
    group = made_runs.made_group("boxes", 1, 2)
    told = f"cannot read {folder}/a.png on gpu-box-7, gpu-box-8, gpu-box-9, nor /mnt/nas/b.png: {SECRET}"
    rollouts = tuple(replace(r, error=told) for r in group.rollouts)
    asked = f"Look into {folder}/a.png and /scratch/jo-7/runs"
    row = {**group.sample.row, "image": "/data/jo/images/a.png", "root": str(folder.parent), "api_key": "abc"}
    run.write_rollouts(2, 1, [replace(group, id="told", rollouts=rollouts, sample=replace(group.sample, row=row),
                                      prompt=replace(group.prompt, text=asked))])
    called = [{"name": "open", "arguments": {"path": str(folder)}, "error": f"{told}"}]
    run.write_rollouts(2, 2, [made_runs.zoomed(1, turns=3, calls=called)])
    for file in (folder / "media").glob("*.png"):
        with Image.open(file) as image:
            exif = image.getexif()
            exif[0x010E] = "taken at 52.1 N"
            image.save(file, exif=exif)
    with open(folder / "alerts.jsonl", "a") as file:
        file.write(json.dumps({"step": 1, "alert": "service_errors_above", "text": told,
                               "run": "/scratch/jo-7/runs/boxes", "host": "gpu-box-9"}) + "\n")
    return folder


@pytest.fixture(scope="module")
def written(run, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUDGE_API_KEY", SECRET)
        return bundle.write(run, tmp_path_factory.mktemp("b") / "page")


def data(folder, name):
    text = (folder / "data" / f"{name}.js").read_text(encoding="ascii")
    found = re.fullmatch(rf'vlrlBundle\("{name}",(.*)\);\n', text)
    assert found and "<" not in found[1]
    return json.loads(found[1])


def texts(folder):
    """Every text of the bundle but the scripts and styles of vlrl itself, by path; of data what their JSON holds."""
    return {str(p.relative_to(folder)): json.dumps(data(folder, p.stem), ensure_ascii=False) if p.parent.name == "data"
            else p.read_text(encoding="utf-8") for p in folder.rglob("*")
            if p.suffix in (".html", ".md", ".json") or p.parent.name == "data"}


def test_everything_of_a_small_run(run, written):
    assert (written.groups, written.total) == (26, 26)
    index = data(written.folder, "index")
    assert index["run"] == "boxes" and index["total"] == 26 and index["texts"] == 1
    assert sum(len(group["answers"]) for group in index["groups"]) == 12 * 4 + 2 * 6 + 4 + 2
    assert "to review" not in index["presets"] and "zero variance" in index["presets"]
    said = {name: data(written.folder, name) for name in (g["n"] for g in index["groups"])}
    assert all("v-card" in piece["html"] and not Markup(piece["html"]).odd for piece in said.values())
    (episodes,) = [g for g in index["groups"] if g["group"] == "zoomed-1"]
    assert set(said[episodes["n"]]["turns"]) == {"0", "1"} and [a["turns"] for a in episodes["answers"]] == [3, 3]
    assert [(a["tools"], a["end"]) for a in episodes["answers"]] == [(3, "stop"), (3, "turns")]
    page = Markup((written.folder / "index.html").read_text(encoding="utf-8"))
    assert page.odd == ["doctype html"]
    for words in ("boxes", "3 of 3", "What is wrong here?", "Before and after, steps 0 to 3", "Alert", "Reward last",
                  "What is left out here"):
        assert words in page.text, words
    assert 'name="flag"' not in page.html and 'name="form"' in page.html
    assert {p.name for p in written.folder.iterdir()} == {
        "index.html", "README.md", "style.css", "app.css", "bundle.css", "app.js", "bundle.js", "data", "media",
        bundle.MARK}


def test_nothing_tells_of_the_machine(run, written):
    every = texts(written.folder)
    assert len(every) > 26
    for secret in (str(run), str(run.parent), SECRET, "gpu-box-", "/data/jo", "jo-7", "/mnt/nas", "hooks.example.org",
                   "python3", *([socket.gethostname()] if len(socket.gethostname()) > 6 else [])):
        assert [name for name, text in every.items() if secret in text] == [], secret
    pictures = [*(written.folder / "media").iterdir()]
    assert len(pictures) > 10 and not any(b"52.1 N" in file.read_bytes() for file in pictures)
    absolute = re.compile(r"(?<![\w.:/<…\\])/(?:home|root|tmp|data|mnt|usr|var|opt|etc|work|private|Users)\b/?[\w.-]*")
    assert {name: found for name, text in every.items() if (found := absolute.findall(text))} == {}
    shown = "".join(every.values())
    for left in ("…/b.png", "Look into …/a.png and …", "…/base-model", "…/rows.jsonl"):
        assert left in shown, left


def test_the_page_runs_scripts_of_the_bundle_alone_and_links_are_relative(written):
    page = Markup((written.folder / "index.html").read_text(encoding="utf-8"))
    (policy,) = [m["content"] for m in page.all("meta") if m.get("http-equiv")]
    assert policy == bundle_page.POLICY and "script-src 'self';" in policy and "default-src 'none'" in policy
    assert [s["src"] for s in page.all("script")] == ["app.js", "bundle.js", "data/index.js"]
    pieces = [Markup(data(written.folder, f"g{i:05d}")["html"]) for i in range(written.groups)]
    own = re.compile(r"\?|data:,$|media/[0-9a-f]{24}\.jpg$|[a-z]+\.(css|js)$|data/index\.js$")
    for made in (page, *pieces):
        assert not {"iframe", "object", "embed", "base"} & set(made.tags)
        for attributes in made.attributes:
            assert not any(name.startswith("on") for name in attributes)
            for name in ("src", "href", "poster", "srcset", "action"):
                assert own.match(attributes.get(name) or "?"), attributes
    pictures = {i["src"] for made in pieces for i in made.all("img")}
    assert pictures and all((written.folder / src).is_file() for src in pictures)


@pytest.mark.slow
def test_a_limit_of_groups_says_what_is_missing_and_there_may_be_no_pictures(run, tmp_path):
    made = bundle.write(run, tmp_path / "b", groups=18)
    assert (made.groups, made.total) == (18, 26) and "8 of 26 groups: 18 are here" in made.left_out[0]
    groups = data(made.folder, "index")["groups"]
    assert {0, 1, 2} == {g["step"] for g in groups if g["source"] == "train"}
    assert "8 of 26 groups" in (made.folder / "index.html").read_text(encoding="utf-8")
    assert bundle.write(run, tmp_path / "b", groups=1).groups == 1
    assert len(list((tmp_path / "b" / "data").iterdir())) == 3  # nothing of the bundle before
    made = bundle.write(run, tmp_path / "b", media=False)
    assert list((made.folder / "media").iterdir()) == [] and "--no-media" in " ".join(made.left_out)
    piece = data(made.folder, "g00000")["html"]
    assert "<img" not in piece and "not stored" in piece and "v-marks" in piece


@pytest.mark.slow
def test_front_matter_of_a_space(run, written, tmp_path):
    import yaml
    front = yaml.safe_load((written.folder / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert front == {"title": "boxes", "sdk": "static", "app_file": "index.html", "pinned": False}
    assert yaml.safe_load(bundle_page.readme('a: "b"\n---\n# <x>').split("---\n")[1])["title"] == "a b --- x"
    space = tmp_path / "space"  # a clone of a new Space
    (space / ".git").mkdir(parents=True)
    (space / "README.md").write_text("---\ntitle: Mine\nsdk: static\n---\n")
    bundle.write(run, space)
    assert (space / "README.md").read_text() == "---\ntitle: Mine\nsdk: static\n---\n" and (space / ".git").is_dir()


def test_a_folder_of_somebody_else_is_left_alone(run, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    (tmp_path / "data/mine.txt").write_text("mine")
    with pytest.raises(RunError, match="contains files that are not part of a bundle, such as 'data'"):
        bundle.write(run, tmp_path)
    assert (tmp_path / "data/mine.txt").read_text() == "mine" and not (tmp_path / bundle.MARK).exists()
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(RunError, match="is a file: name a folder"):
        bundle.write(run, tmp_path / "file.txt")
    with pytest.raises(RunError, match="is not a run folder"):
        bundle.write(tmp_path / "nothing", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    assert main(["report", str(run), "--bundle", str(tmp_path / "b"), "--groups", "3", "--no-media"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"b \(\d\.\d MB, 3 of 26 groups\)\n  left out: 23 of 26 groups", said) and "--no-media" in said
    assert main(["report", str(run), "--groups", "3"]) == 1 and "--bundle FOLDER" in capsys.readouterr().err
    assert main(["report", str(run), "--bundle", str(tmp_path / "b"), "-o", str(tmp_path / "r.html")]) == 1
    assert "remove one of the two" in capsys.readouterr().err


def test_a_run_without_rollouts(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n')
    made = bundle.write(tmp_path / "run", tmp_path / "b")
    assert (made.groups, made.total) == (0, 0) and data(made.folder, "index")["groups"] == []
    assert "Reward last 0.5" in Markup((made.folder / "index.html").read_text()).text


RUN = Path("/data/jo smith/runs/it's \"a\" run")


@pytest.fixture(scope="module")
def hide():
    return Redactor(RUN, ["gpu-box-7", "ante", ""], [], {"HF_TOKEN": "t0psecret&<x>", "JUDGE_API_KEY": "k3y-of-judge",
                                                   "EDITOR": "emacs-nox", "SHORT_KEY": "abc"})


@each("text left", [
    ("cannot read /data/me/a.png: gone", "cannot read …/a.png: gone"),
    ("in '/home/jo/x.py', line 3", "in '…/x.py', line 3"),
    ("~/data/rows.jsonl and C:\\Users\\jo\\rows.jsonl", "…/rows.jsonl and …/rows.jsonl"),
    ("file:///home/jo/q.png", "…/q.png"),
    ("no answer of http://10.0.0.3:8000/v1 on gpu-box-7", "no answer of http://… on …"),
    ("ante up: hf_abcdefghijklmnopqrst", "… up: …"),
    ("3/4 of a/b, km/h, </answer>, tasks/mine.py:Count", "3/4 of a/b, km/h, </answer>, tasks/mine.py:Count"),
])
def test_messages_lose_paths_addresses_and_keys(hide, text, left):
    assert hide.words(text) == left


def test_content_and_data_rows_stay_but_for_what_only_this_machine_has(hide):
    said = "the ante is /etc/passwd, ls /usr/bin; emacs-nox, abc; http://example.org/a/b"
    assert hide.text(said) == said
    for secret in (str(RUN), "/data/jo smith/runs", "t0psecret&<x>", "k3y-of-judge", "gpu-box-7"):
        for form in (secret, html.escape(secret), json.dumps(secret)[1:-1], json.dumps(html.escape(secret))[1:-1]):
            assert hide.text(f"a {form} b") == "a … b"
    assert hide.text("not-gpu-box-7 gpu-box-70") == "not-gpu-box-7 gpu-box-70"
    row = {"image": "/data/me/a.png", "url": "https://jo:pw@example.org/a/b.png", "key": "B", "api_key": "x", "n": 3,
           "boxes": [[1, 2.5]], "more": {"file": ["/mnt/set one/b.png"], "none": None}}
    assert hide.value(row) == {"image": "…/a.png", "url": "https://example.org/a/b.png", "key": "B", "api_key": "…",
                               "n": 3, "boxes": [[1, 2.5]], "more": {"file": ["…/set one/b.png"], "none": None}}
    deep = None
    for _ in range(200):
        deep = [deep]
    assert "…" not in json.dumps(hide.value(deep))
    settings = {"run.dir": "/data/jo/runs/a", "x.api_key": "v", "log.webhook": "hook", "rollout.max_new_tokens": 64,
                "services.judge.url": "http://10.0.0.3:8000/v1", "task.name": "tasks/mine.py:Count",
                "data.rows": ["/data/a.jsonl", {"token": "t", "path": "/data/me/b.jsonl"}], "algo.kl_coef": 0.1}
    assert hide.settings(settings) == {
        "run.dir": "…/a", "x.api_key": "…", "log.webhook": "…", "rollout.max_new_tokens": 64,
        "services.judge.url": "http://…", "task.name": "tasks/mine.py:Count",
        "data.rows": ["…/a.jsonl", {"token": "…", "path": "…/b.jsonl"}], "algo.kl_coef": 0.1}


PIECES = ["/data/jo smith/runs", "t0psecret&<x>", "/", "a", " ", "\\", "'", "…", "file://", "é"]


@settings(max_examples=50)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_nothing_of_the_machine_survives(text):
    hide = Redactor(RUN, [], [], {"HF_TOKEN": "t0psecret&<x>"})
    for left in (hide.text(text), hide.words(text), hide.value(text), json.loads(hide.text(json.dumps(text)))):
        assert "/data/jo smith" not in left and "t0psecret" not in left
