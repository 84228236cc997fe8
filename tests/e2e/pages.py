"""The commands of README.md, AGENTS.md and docs/, and what test_every_command.py does with each."""

import io
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from tests.e2e.runs import ROOT

PAGES = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
         for path in (ROOT / "README.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").glob("*.md")))}
BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"(?: {4})?((?:\w+=\S+ )*(?:vlrl|python3?|torchrun|accelerate|srun|sbatch|pip|apt-get) .*)")
FILE = re.compile(r"(?:^`([\w.-]+)`\n\n)?^```(?:python|yaml)\n(?:# ([\w.-]+\.(?:py|yaml))\n)?(.*?)^```$",
                  re.MULTILINE | re.DOTALL)
LAUNCHER = re.compile(r"\b(?:torchrun|accelerate launch) .*?(?:-m (vlrl)|(train\.py)) ")

MODEL = "embedded/tiny-qwen3-vl"
SMALL = ("steps=1 rollout.prompts_per_step=4 rollout.group_size=2 rollout.max_new_tokens=8 eval.samples=2 "
         "log.samples_every=0")
ON_CPU = f"model.name={MODEL} engine=hf task.coordinates=norm1000 model.max_pixels=50176"
"""Settings with which a config for a card runs here."""


EASY = "curriculum.pass_at=0.1"
"""With it the untrained model has right answers."""


class Rule(NamedTuple):
    """What is done with a command: the first rule whose `match` is found in `PAGE: COMMAND` counts.

    kind: `run` as it is; `dry` or `shrunk` by the words `add`; `elsewhere`, run by the test `why`; or `needs` what
    `why` names. says: what a command prints if something is missing. One that `needs` something is run only if it has
    such a message, and must fail with it; others may, where the thing is missing."""

    kind: str
    match: str
    why: str = ""
    add: str = ""
    says: str = ""


RULES = [
    # pages and commands that other tests run
    Rule("elsewhere", r"write-a-task\.md: ", "tests/e2e/test_write_a_task.py"),
    Rule("elsewhere", r"write-an-environment\.md: vlrl (train|tasks)", "tests/e2e/test_write_an_environment.py"),
    Rule("elsewhere", r"your-reward\.md: ", "tests/e2e/test_your_reward.py"),
    Rule("elsewhere", r"(coco|easyr1-trl|ms-swift|your-data)\.md: ", "tests/docs/test_community_pages.py"),
    Rule("elsewhere", r": (\w+=\S+ )?vlrl app ", "tests/app/test_server.py"),
    Rule("elsewhere", r": vlrl serve .*--(chat|record)", "tests/cli/test_serve.py"),
    Rule("elsewhere", r": vlrl serve ", "tests/vllm/test_server.py"),
    Rule("elsewhere", r": vlrl sweep ", "tests/tools/test_many_runs.py"),
    Rule("elsewhere", r": vlrl compare --sequential ", "tests/evaluation/test_sequential.py"),
    Rule("elsewhere", r"web\.md: python benchmarks/web_start\.py ", "tests/e2e/test_web_config.py"),
    Rule("elsewhere", r"web\.md: vlrl (data synthesize|train .*data\.train=goals)", "tests/tasks/test_web_explore.py"),
    Rule("elsewhere", r": vlrl doctor$", "tests/cli/test_looking.py"),
    Rule("elsewhere", r": (make|python -m vlrl\.tools\.docs|\S*python -m pytest .*(not slow|test_layout))",
         "tests/docs/test_readme.py"),
    # what is not there
    Rule("needs", r": (pip|apt-get|\S*python3? -m (venv|pip)) ", "a package registry"),
    Rule("needs", r": ssh ", "another host"),
    Rule("needs", r": hf ", "the Hub"),
    Rule("needs", r": cd page && python -m http\.server", "a port that stays open"),
    Rule("needs", r": sbatch ", "Slurm"),
    Rule("needs", r": python benchmarks/(equal_bytes|async_timeline)\.py ", "a clone, and minutes"),
    Rule("needs", r": (HF_TOKEN=\S+ )?vlrl (export|data push) (?!.*--dry-run).*org/", "the Hub", says="HF_HUB_OFFLINE"),
    Rule("needs", r": .*services\.clip\.name=openai/", "the Hub", SMALL, "cannot be loaded"),
    Rule("needs", r": .*=/shared/teacher ", "a teacher of one's own", says="/shared/teacher"),
    Rule("needs", r": .*--recipe sws", "a run of more steps", says="nothing to vary"),
    # several processes, vLLM and 7B models: as far as a dry run
    Rule("dry", r": vlrl train \S+ (engine=vllm|extends=engines/vllm)", add="--dry-run", says="vLLM is not installed"),
    Rule("dry", r"first-real-run\.md: torchrun", add=f"{ON_CPU} --dry-run"),
    Rule("dry", r"README\.md: (torchrun|accelerate launch) ", add=f"{SMALL} --dry-run"),
    Rule("dry", r": (torchrun|accelerate launch) ", add="--dry-run"),
    # less of it
    Rule("dry", r"web\.md: vlrl train .*runs/web-start", add=f"model.name={MODEL} --dry-run", says="hromium"),
    Rule("shrunk", r"web\.md: vlrl train ", says="hromium",
         add=f"{SMALL} eval.samples=1 rollout.prompts_per_step=1 episode.max_turns=2 environment.workers=1"),
    Rule("shrunk", r": vlrl data make gui", add="--samples 2", says="hromium"),
    Rule("shrunk", r"web\.md: vlrl tasks check web", add="--samples 2", says="hromium"),
    Rule("shrunk", r": vlrl data make", add="--samples 2"),
    Rule("shrunk", r": vlrl data difficulty", add="--limit 4"),
    Rule("shrunk", r": vlrl data synthesize", add=f"{EASY} --candidates 4 --least 0 --most 1"),
    Rule("shrunk", r"(README|quickstart)\.md: vlrl train \S*quickstart\.yaml --dry-run", add=SMALL),
    Rule("shrunk", r"first-real-run\.md: vlrl eval ", add=f"{ON_CPU} --samples 2"),
    Rule("shrunk", r"first-real-run\.md: vlrl (train .*--dry-run|data check)", add=ON_CPU),
    Rule("shrunk", r"first-real-run\.md: vlrl train .*models/best", add=f"{SMALL} engine=hf"),
    Rule("shrunk", r"first-real-run\.md: vlrl train ", add=f"{SMALL} {ON_CPU} save.every=1 eval.every=1"),
    Rule("shrunk", r": vlrl eval ", add="--samples 2"),
    Rule("run", r": vlrl train (.*--dry-run|--settings)"),
    Rule("shrunk", r": vlrl (train|sft) .*(gui_g1|stages/cft|reward_model\.yaml)",
         add=f"{SMALL} model.name={MODEL} engine=hf"),
    Rule("shrunk", r": vlrl train .*stages/raft",
         add=f"{SMALL} {EASY} rollout.max_new_tokens=24 rounds.count=1 rounds.prompts=8"),
    Rule("shrunk", r": (vlrl (train|sft)|\S*python train\.py) ", add=SMALL),
    Rule("run", r": (vlrl|python \w+\.py|python -m pytest) "),
]


def picture(seed: int) -> bytes:
    """A PNG of noise, 96 x 64 pixels."""
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (64, 96, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


RUN = "a run of the quickstart"
MINE = "extends: quickstart.yaml\nrun: {dir: runs/my}\n"
QA = "extends: qa/tiny.yaml\ndata: {format: qa, train: rows.jsonl, heldout: rows.jsonl}\n"
SUMS = [{"id": f"{i}", "question": f"What is {i} + 1?", "answer": f"{i + 1}"} for i in range(12)]
RIGHT = 'def right(completion, row):\n    return row["answer"] in completion\n'
ASKED = {"my.yaml": QA, "rows.jsonl": lines(SUMS)}
PAIRS = lines([{"id": f"{i}", "question": f"What is {i} + 1?", "responses": [f"It is {i + 1}.", "No."], "answer": 1}
               for i in range(8)])
CLICKS = lines([{"id": f"{i}", "image": f"{i}.png", "width": 96, "height": 64, "instruction": f"Click on {i}.",
                 "box": [8, 8, 40, 40], "platform": "web", "element_type": "text", "processed_size": [96, 64]}
                for i in range(8)])
PICTURES = {f"{i}.png": picture(i) for i in range(8)}
MUGS = json.dumps([{"id": f"{i}", "image": f"{i}.png", "width": 96, "height": 64, "expression": "mug",
                    "boxes": [{"box": [8, 8, 40, 40]}]} for i in range(20)])
GIVEN: dict[str, Mapping[str, str | bytes]] = {
    "README.md": {"rows.jsonl": lines(SUMS), "rewards.py": RIGHT},
    "docs/quickstart.md": {"rows.jsonl": lines(SUMS), "rewards.py": RIGHT},
    "docs/curriculum.md": ASKED,
    "docs/data.md": {"my.yaml": MINE, "runs/a": RUN},
    "docs/comparing.md": {"train.jsonl": lines(SUMS[:6]), "heldout.jsonl": lines(SUMS[6:]),
                          **dict.fromkeys((f"runs/{name}" for name in ("a", "b", "a-0", "a-1", "b-0", "b-1")), RUN)},
    "docs/evaluation.md": ASKED,
    "docs/stages.md": {**ASKED, "one.yaml": QA, "one.jsonl": lines([{**SUMS[0], "answer_type": "number"}]),
                       "proposed.jsonl": lines([
        {"id": f"a{i}", "question": f"Is it {i}?", "answer": "yes", "answer_type": "yes_no"} for i in range(4)])},
    "docs/services.md": {**ASKED, "pairs.jsonl": PAIRS, "unseen.jsonl": PAIRS, "judged.jsonl": lines(
        [{"id": f"{i}", "answer": f"{i + 1}", "correct": True} for i in range(4)])},
    "docs/engines.md": {"mine.yaml": MINE},
    "docs/several-hosts.md": {"mine.yaml": MINE},
    "docs/sharing.md": {"runs/quickstart": RUN},
    "docs/inspector.md": {"runs/quickstart": RUN},
    "docs/reading-a-run.md": {"runs/quickstart": RUN},
    "docs/long-runs.md": {"runs/quickstart": RUN},
    "docs/objectives.md": {**ASKED, "runs/other": RUN, "runs/teacher": RUN},
    "docs/tasks.md": {"rows.jsonl": CLICKS, "heldout.jsonl": CLICKS, **PICTURES, "answers.jsonl": lines(
        [{"sample": json.loads(row), "completions": ["[8, 8, 40, 40]"]} for row in CLICKS.splitlines()])},
    "docs/first-real-run.md": {"rows/annotations.json": MUGS, **{f"rows/{i}.png": picture(i) for i in range(20)}},
}
"""What a reader has when a page begins, by page: a file and its content, or a folder and RUN."""


def commands(page: str) -> Iterator[str]:
    """The lines of a page's bash blocks, and commands in blocks without a language and in indented lines."""
    text = re.sub(r"\\\n *", "", PAGES[page])
    blocks = [(kind, body.splitlines()) for _, kind, body in BLOCK.findall(text)]
    found = [line for kind, body in blocks if kind == "bash" for line in body]
    unnamed = [line for kind, body in blocks if not kind for line in body]
    indented = [line for line in BLOCK.sub("", text).splitlines() if line.startswith("    ")]
    found += [match[1] for match in map(LINE.fullmatch, unnamed + indented) if match]
    for line in found:
        if line := re.split(r"\s{2,}#", line)[0].strip():
            yield line


def rule_of(page: str, command: str) -> Rule | None:
    return next((rule for rule in RULES if re.search(rule.match, f"{page}: {command}")), None)


def files(page: str) -> dict[str, str]:
    """Name -> text of the files that a page shows: named in the first line, or in the line above the block."""
    return {above or first: body for above, first, body in FILE.findall(PAGES[page]) if above or first}


def step(command: str, rule: Rule, server: str) -> dict[str, Any]:
    """What page_driver.py runs for a command: without its launcher and with the rule's words. The embedded model stands
    in for one of the Hub, `server` for one on this host, and the checkpoint of the only step for a later one."""
    command = LAUNCHER.sub(lambda found: "vlrl " if found[1] else "python train.py ", command)
    command = re.sub(r"http://127\.0\.0\.1:8\d+/v1", server, command)
    command = re.sub(r"step-0000\d\d", "step-000001", command)
    command, _, stdin = re.sub(r"--model Qwen/\S+", f"--model {MODEL}", command).partition(" < ")
    words = shlex.split(command)
    env = dict(words.pop(0).split("=", 1) for _ in range(len(words)) if re.match(r"\w+=", words[0]))
    return {"words": [*words, *shlex.split(rule.add)], "env": env, "stdin": stdin}
