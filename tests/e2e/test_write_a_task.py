"""docs/write-a-task.md, followed to the letter in an empty folder: its files, edits and commands in their order."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.e2e import forked
from tests.e2e.runs import ENV, ROOT

pytestmark = pytest.mark.slow
PAGE = (ROOT / "docs" / "write-a-task.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def run(command: str, folder: Path) -> str:
    """What a command of the page prints; all start where torch is imported."""
    program, *words = shlex.split(command)
    assert program in ("vlrl", "python"), command
    done = forked.run(["-m", "vlrl", *words] if program == "vlrl" else words, ENV, folder, 600)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def edit(file: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, lambda _: new, file.read_text(), flags=re.MULTILINE)
    assert count == 1, f"{pattern!r} stands {count} times in {file.name}"
    file.write_text(text)


def correct(run_folder: Path) -> list[float]:
    return [json.loads(line)["correct"] for line in (run_folder / "eval.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_from_nothing_to_a_trained_model(tmp_path):
    sections = re.split(r"^## \d\. ", PAGE, flags=re.MULTILINE)[1:]
    said: dict[str, str] = {}
    assert len(sections) == 4
    for section in sections:
        for kind, body in re.findall(r"^```(\w+)\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
            if kind == "python" and (name := re.match(r"# (\w+\.py)\n", body)):
                (tmp_path / name[1]).write_text(body)
            elif kind == "yaml":
                for line in body.splitlines()[1:]:
                    edit(tmp_path / "parity.yaml", rf"^  {line.split(':')[0].strip()}: .*$", line)
            elif kind == "bash":
                said |= {command: run(command, tmp_path) for command in body.splitlines()}
    before, *_, after = correct(tmp_path / "runs" / "start")
    assert before == 0 and after > 0.5  # the supervised steps teach the words
    started, *_, ended = correct(tmp_path / "runs" / "parity")
    assert started == pytest.approx(after)
    assert ended > max(0.8, min(started + 0.02, 0.9))  # the rewards do the rest, as far as the CPU left some
    assert "keeps the contract" in next(text for command, text in said.items() if "tasks check" in command)
    assert said["python load.py"].split()[-1] in ("odd", "even")


def test_the_task_it_shows_is_the_one_that_is_written(tmp_path):
    run("vlrl tasks new parity --rows", tmp_path)
    written = " ".join((tmp_path / "parity.py").read_text().split())
    shown = next(body for kind, body in BLOCKS if kind == "python" and body.startswith("class Parity"))
    for line in shown.splitlines():
        code = line.partition("#")[0].strip()
        assert code == "..." or code in written, line
