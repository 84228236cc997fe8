"""docs/coco.md, docs/easyr1-trl.md and docs/ms-swift.md: their scripts and commands run one after the other in an empty
folder. Long trainings are cut to one step; the slow test runs them as they are written."""

import json
import re
import runpy
import shlex

import pytest

from tests.docs.test_readme import BLOCK, DOCS
from vlrl.cli.main import main
from vlrl.config.box_forms import parse_box_form
from vlrl.data.formats.known import FORMATS

PAGES = {"coco": "coco", "easyr1-trl": "easyr1", "ms-swift": "swift"}
"""Page -> the run that it trains, in runs/."""
CARD = "Qwen/Qwen2.5-VL-3B-Instruct"
CUT = ["steps=1", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=2", "eval.every=0"]


def blocks(page):
    return BLOCK.findall((DOCS / f"{page}.md").read_text(encoding="utf-8"))


def written(page):
    for kind, body in blocks(page):
        if kind == "python":
            yield body.splitlines()[0].removeprefix("# "), body


def commands(page):
    return [shlex.split(line) for kind, body in blocks(page) if kind == "bash" for line in body.splitlines()]


def followed(page, capsys, change):
    """Runs the commands of a page in the working directory; yields each with what it printed."""
    for name, body in written(page):
        assert name.endswith(".py")
        with open(name, "w", encoding="utf-8") as file:
            file.write(body)
    for program, *words in commands(page):
        if program == "python":
            runpy.run_path(words[0])
            continue
        assert program == "vlrl"
        assert main(change(words)) == 0, (words, capsys.readouterr())
        told = capsys.readouterr()
        yield words, " ".join((told.out + told.err).split())


@pytest.mark.parametrize("page", PAGES)
def test_the_page_works_in_an_empty_folder(page, tmp_path, monkeypatch, capsys, tiny_models):
    monkeypatch.chdir(tmp_path)
    tiny = str(tiny_models["qwen2_5_vl"])

    def change(words):
        words = [tiny if word == CARD else word for word in words]
        return [*words, *CUT] if words[0] == "train" and "--dry-run" not in words else words

    checked = 0
    for words, said in followed(page, capsys, change):
        if words[:2] == ["data", "check"]:
            assert "240 rows" in said and " 0 bad rows" in said
            checked += 1
        if "--dry-run" in words:
            assert "Locate the" in said and ("--reward" in words or "reward 0.9" in said), words
    assert checked == (1 if page == "coco" else 2)
    lines = [json.loads(line) for line in (tmp_path / f"runs/{PAGES[page]}/eval.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1] and (tmp_path / f"runs/{PAGES[page]}/reward.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_the_curve_rises_as_the_page_says(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    figures = {"coco": (0.49, 0.69), "easyr1-trl": (0.47, 0.7), "ms-swift": (0.46, 0.74)}[page]
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    assert all(f"{figure:g}".lstrip("0") in text for figure in figures)
    steps = iter(followed(page, capsys, lambda words: words))
    for words, _ in steps:
        if words[0] == "train" and "--dry-run" not in words:
            break
    lines = [json.loads(line) for line in (tmp_path / f"runs/{PAGES[page]}/eval.jsonl").read_text().splitlines()]
    assert lines[0]["iou"] == pytest.approx(figures[0], abs=0.03) and lines[-1]["iou"] == pytest.approx(
        figures[1], abs=0.05)


def test_the_reference_names_every_format():
    table = (DOCS / "data.md").read_text(encoding="utf-8").partition("## Formats")[2].partition("###")[0]
    named = {name for line in table.splitlines() if line.startswith("| `") for name in re.findall(
        r"`(\w+)`", line.split("|")[1])}
    assert named == set(FORMATS)


def test_your_data_from_files_to_a_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    rows, *_ = [json.loads(line) for kind, body in blocks("your-data") if kind == "json" for line in body.splitlines()]
    assert {"image", "question", "answer"} < rows.keys()
    seen = [words[:2] for words, _ in followed("your-data", capsys, lambda words: words)]
    assert seen.count(["data", "check"]) == 3 and ["data", "split"] in seen and seen[-1][0] == "train"
    text = (DOCS / "your-data.md").read_text(encoding="utf-8")
    table = text.partition("## Boxes")[2].partition("## ")[0]
    forms = [line.split("|")[2].split("`")[1] for line in table.splitlines() if line.startswith("| ")][1:]
    assert len(forms) == 6 and all(parse_box_form(form) for form in forms)
    code = dict(written("your-data"))["colours.py"]
    assert "steps=1)" in code
    small = 'steps=1, rollout={"prompts_per_step": 2, "group_size": 2}, eval={"samples": 2})'
    (tmp_path / "colours.py").write_text(code.replace("steps=1)", small))
    runpy.run_path("colours.py")
    assert "Evaluation before and after" in capsys.readouterr().out or (tmp_path / "runs").is_dir()
