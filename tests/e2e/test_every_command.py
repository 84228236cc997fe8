"""Every command of README.md, AGENTS.md and docs/, in an empty folder for each page, with the wheel.

pages.py says which are run as they are, which are made smaller, which another test runs, and which cannot run here."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.pages import GIVEN, PAGES, RULES, RUN, SMALL, Rule, commands, files, rule_of, step
from tests.e2e.runs import ENV, ROOT
from tests.evaluation.http_stand_in import served
from tests.services.stub import text_of
from tests.tables import each

ALL = [(page, command, rule_of(page, command)) for page in PAGES for command in commands(page)]


def runs(rule: Rule) -> bool:
    return rule.kind in ("run", "dry", "shrunk") or bool(rule.says)


TODO = {page: [(command, rule) for at, command, rule in ALL if at == page and rule and runs(rule)] for page in PAGES}
TODO = {page: todo for page, todo in TODO.items() if todo}


def reply(body: dict[str, Any], number: int) -> str:
    """A teacher that can add, and a judge that finds everything right."""
    found = re.search(r"What is (\d+) \+ 1", text_of(body))
    answer = int(found[1]) + 1 if found else "yes"
    judged = "reply" in text_of(body).lower() and "{" in text_of(body)
    return json.dumps({"correct": "yes", "sound": "yes"}) if judged else f"<answer>{answer}</answer>"


def prepare(folder: Path, page: str, server: str) -> dict[str, Any]:
    """Writes what a reader of the page has, and returns what page_driver.py does there."""
    given = GIVEN.get(page, {})
    for name, content in {**given, **files(page)}.items():
        if content != RUN:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)
    shutil.copy(ROOT / "train.py", folder)  # of a clone
    return {"folder": str(folder), "runs": [name for name, content in given.items() if content == RUN],
            "steps": [step(command, rule, server) for command, rule in TODO[page]]}


@pytest.fixture(scope="module")
def outcomes(installed, tmp_path_factory) -> dict[str, list[dict[str, Any]]]:
    """What came of the commands of each page, in their order."""
    root = tmp_path_factory.mktemp("pages")
    folders = {page: root / "pages" / page.replace("/", "-") for page in TODO}
    first = {"folder": str(root / "pages" / "first"), "runs": [], "steps": [
        {"words": ["vlrl", "train", "quickstart.yaml", *SMALL.split()], "env": {}, "stdin": ""}]}
    for folder in (Path(first["folder"]), *folders.values(), root / "results"):
        folder.mkdir(parents=True)
    env = {name: value for name, value in ENV.items() if name != "PYTHONPATH"}
    env |= {"HOME": str(root), "XDG_CACHE_HOME": str(root / "cache"), "MY_KEY": "secret"}
    with served(reply) as server:
        plan = [first, *(prepare(folder, page, server.url) for page, folder in folders.items())]
        (root / "plan.json").write_text(json.dumps(plan))
        words = [installed / "python", Path(__file__).with_name("page_driver.py"), root / "plan.json", root / "results"]
        done = subprocess.run([*words, ROOT], cwd=root, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    found = {page: root / "results" / f"{folder.name}.json" for page, folder in folders.items()}
    return {page: json.loads(file.read_text()) if file.exists() else [] for page, file in found.items()}


@pytest.mark.slow
@each("page", TODO)
def test_the_commands_of_a_page(page, outcomes):
    wrong = []
    for i, (command, rule) in enumerate(TODO[page]):
        outcome = outcomes[page][i] if i < len(outcomes[page]) else {"code": None, "said": "not ended"}
        failed = rule.says and outcome["code"] == 1 and rule.says in " ".join(outcome["said"].split())
        if not (failed or (outcome["code"] == 0 and rule.kind != "needs")):
            wrong.append(f"{command}: {outcome['code']}\n{outcome['said'][-2000:]}")
    assert not wrong, "\n\n".join(wrong)


def test_every_command_has_a_rule_and_every_rule_a_command():
    assert [f"{page}: {command}" for page, command, rule in ALL if rule is None] == []
    assert [rule.match for rule in RULES if rule not in [rule for *_, rule in ALL]] == []
    assert all((ROOT / rule.why).is_file() for rule in RULES if rule.kind == "elsewhere")
    assert all(rule.why for rule in RULES if rule.kind == "needs") and set(GIVEN) <= set(TODO)
    assert len(TODO) > 20 and len(ALL) > 150
