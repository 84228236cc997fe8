"""What the README shows is there and works: files, commands, settings, the example task, the figures of its results."""

import re
import runpy
import shlex
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import vlrl
from tests.tables import each
from vlrl import config
from vlrl.rewards.text import parse_answer
from vlrl.task import check_parts, load
from vlrl.task.scoring import score_group

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"```python.*?```", "", TEXT, flags=re.DOTALL)
COMMANDS = [line.split("  #")[0].strip() for kind, body in BLOCKS if kind == "bash" for line in body.splitlines()]
SETTING = re.compile(r"(?<![\w./])([a-z_]+(?:\.[a-z_]+)*)=(\[[^\]]*\]|[^\s`,;:]+)")


def block(kind, name=""):
    (body,) = [body for k, body in BLOCKS if k == kind and body.startswith(f"# {name}")]
    return body


@pytest.fixture
def files(tmp_path, monkeypatch):
    for kind, body in BLOCKS:
        if kind in ("python", "yaml"):
            (tmp_path / re.match(r"# (\S+)\n", body)[1]).write_text(body, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_first_commands_stand_early_and_make_runs_what_is_run_without_it():
    head = "\n".join(TEXT.splitlines()[:25])
    assert "make demo" in head and "make test" in head and head.index("make demo") < head.index("make test")
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    used = [word for c in COMMANDS if c.startswith("make") for word in shlex.split(c)[1:]]
    assert used and set(used) <= set(targets)
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for part in ("-c constraints.txt", "-e", "[dev]", "not slow and not vllm and not browser and not gpu",
                 "train.py configs/quickstart.yaml"):
        assert part in makefile and any(part in c for c in COMMANDS), part


def test_every_python_command_names_files_and_settings_that_exist(files):
    for command in (c for c in COMMANDS if "python" in c or "torchrun" in c or "accelerate" in c):
        words = shlex.split(command)
        places = [i for i, w in enumerate(words) if w == "train.py" or w.startswith("vlrl.")]
        if not places:
            assert re.search(r"-m (venv|pip|pytest) ", command), f"this test does not know what {command!r} is"
            continue
        entry, *rest = words[places[0]:]
        assert (ROOT / entry).is_file() or (ROOT / f"{entry.replace('.', '/')}.py").is_file()
        if rest != ["--settings"]:
            path, *settings = rest
            config.load(path if path.startswith("configs/") else files / path, settings)


def test_every_setting_exists_with_its_value():
    known = {name for name, *_ in config.describe()}
    used = {m[1] for m in SETTING.finditer(PROSE)}
    dotted = re.findall(r"`([a-z_]+\.[a-z_.]+)`", PROSE)
    named = {name for name in dotted if name.split(".")[0] in config.Config.model_fields} - {"config.yaml"}
    assert {"steps", "run.dir", "resume", "model.lora.rank"} <= used and "train.part_lr" in named
    assert used | named <= known | {"task", "engine", "extends"}, sorted((used | named) - known)
    for setting in SETTING.finditer(PROSE):
        config.load("configs/quickstart.yaml", [setting[0]])


def test_the_yaml_example_is_a_config_and_its_row_a_row(files, tmp_path):
    settings = config.load(files / "mugs.yaml")
    assert settings.model.lora.rank > 0 and yaml.safe_load(block("yaml"))["task"]["name"] == settings.task.name
    row = yaml.safe_load("".join(re.findall(r"#( *\{?\"\w+\".*)$", block("yaml"), re.MULTILINE)))
    sample = load("grounding").sample_from_row(row, tmp_path)
    assert sample.media[0].source == tmp_path / row["image"] and sample["boxes"]


def test_the_example_task_keeps_the_contract(files):
    assert len(block("python", "count.py").splitlines()) <= 31
    task = load("count.py:CountCircles", {"most": 9, "rewards": {"format": 0.2}})
    samples = task.samples("train")
    assert len({samples[i]["answer"] for i in range(60)}) == 9  # the setting counts
    best = sum(task.weights_at(0).values())
    for i in range(30):
        sample, again = samples[i], task.samples("train")[i]
        assert sample.row == again.row and sample.media[0].source.tobytes() == again.media[0].source.tobytes()
        answers = [parse_answer(text) for text in (task.oracle(sample), "<answer>x</answer>", "", "[" * 9999)]
        right, *others = score_group(task, sample, answers, step=0)
        assert right.reward == pytest.approx(best) and right.error is None
        assert all(o.reward < best and o.error is None for o in others)
        check_parts(task, right.parts)
        kinds = [part["type"] for part in task.messages(sample)[-1]["content"]]
        assert kinds == ["image", "text"] and task.target(sample) == sample["answer"]
    assert task.samples("heldout")[0].id != samples[0].id


DOCS = ROOT / "docs"
SHORT = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8")
         for name in ("README", "troubleshooting", "glossary", "python", "install")}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def first_cells(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")][1:]


def test_the_index_names_every_page_and_the_python_page_every_name():
    named = set(re.findall(r"\]\(([\w-]+\.md)\)", SHORT["README"]))
    assert named == {p.name for p in DOCS.glob("*.md")} - {"README.md"}
    for page in (ROOT / "README.md", ROOT / "AGENTS.md", *DOCS.glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[\w-]+)?\)", BLOCK.sub("", page.read_text(encoding="utf-8"))):
            assert (page.parent / target).exists(), (page.name, target)
    assert all(f"`vlrl.{name}`" in SHORT["python"] for name in vlrl.__all__)


def test_settings_exist_and_terms_are_in_order():
    known = {setting for setting, *_ in config.describe()} | {"eval.jsonl"}
    for name, text in SHORT.items():
        found = re.findall(r"`((?:model|train|algo|engine|eval|log|save|rollout)\.[a-z_.]+)(?:=[^`]*)?`",
                           BLOCK.sub("", text))
        assert {*found} <= known, name
    terms = [cell.strip().lower() for cell in first_cells(SHORT["glossary"])]
    assert len(terms) > 20 and terms == sorted(terms)


def test_the_api_and_what_agents_are_sent_to_exists():
    names = [name for cell in first_cells(SHORT["python"].split("## What you may import")[1])
             for name in re.findall(r"`([\w.]+)`", cell)]
    assert len(names) > 20
    for name in names:
        module, _, attribute = name.rpartition(".")
        assert hasattr(import_module(module), attribute), name
    found = re.findall(r"`((?:\w+/)+[\w.]*)`", (ROOT / "AGENTS.md").read_text(encoding="utf-8"))
    assert len(found) > 9 and [path for path in found if not (ROOT / path).exists()] == []
    status = re.findall(r"`((?:tests|configs)/[\w./]*)`", (DOCS / "status.md").read_text(encoding="utf-8"))
    assert len(status) > 30 and [path for path in status if not (ROOT / path).exists()] == []
    hooks = import_module("vlrl.config.base").MethodSettings
    assert all(hasattr(hooks, name) for name in ("active", "problem"))


SMALL = 'steps=2, rollout={"prompts_per_step": 2, "group_size": 2}, eval={"samples": 2}, log={"samples_every": 0}'


@pytest.mark.slow
def test_the_examples_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shrunk = 0
    ten_lines = block("python", "digits.py").replace("steps=40)", "steps=20, run={'dir': 'runs/ten'})")
    for body in (ten_lines, *(body for kind, body in BLOCK.findall(SHORT["python"]) if kind == "python")):
        name = re.match(r"# (\S+)\n", body)
        path = tmp_path / (name[1] if name else "block.py")  # a function needs a file, in which its source is found
        path.write_text(body.replace("steps=20", SMALL).replace('"samples": 256', '"samples": 3'))
        shrunk += "steps=20" in body
        runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr().out
    assert shrunk == 4 and "2 of 2 steps" in out and "Evaluation before and after" in out and "'mean'" in out
    assert {run.path.name: run.metrics.num_rows for run in map(vlrl.load_run, (tmp_path / "runs").iterdir())} == {
        "quickstart": 2, "bright": 2, "right": 2, "ten": 2}


SECTION = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## Results\n")[1].split("\n## ")[0]
HEADS = ["task", "before", "after", "gain [95 % interval]", "random rewards", "minutes"]
SOURCES = {
    "quickstart, IoU": ("learning_quickstart_cpu", "", "rl", "iou"),
    "digits, accuracy": ("learning_digits_cpu", "", "rl", "accuracy"),
    "plans of simulated drives": ("learning_tasks_cpu", "Plans of simulated drives", "rl", "joint_acc"),
    "questions about drawn clips": ("learning_tasks_cpu", "Questions about drawn clips", "rl", "accuracy"),
    "drive: closed loop, CaRL's reward": ("drive_cpu", "From 40 steps", "carl", "carl"),
    "zoom: a tool in episodes": ("episodes_learning", "zoom", "rl", "accuracy"),
}
"""Row of the README: the page, the beginning of its section, and which lines there."""


def cells(line):
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def rows(text):
    """The first table of a text, each row by its column."""
    table = re.search(r"^(?:\|.*\n)+", text, re.MULTILINE)
    assert table
    lines = [cells(line) for line in table[0].splitlines()]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[2:]]


def short(text):
    return re.sub(r"(?<![\d.])0(?=\.\d)", "", text)


def measured(name, section, run, metric):
    """The lines of a run and metric on a page of results, from the lowest to the highest outcome."""
    text = (ROOT / "benchmarks" / "results" / f"{name}.md").read_text(encoding="utf-8")
    _, _, text = text.partition(f"\n## {section}") if section else ("", "", text)
    lines = [cells(line) for line in text.partition("\n## ")[0].splitlines() if line.startswith("|")]
    head = next(line for line in lines if "seed" in line and "metric" in line)
    found = [dict(zip(head, line, strict=True)) for line in lines
             if len(line) == len(head) and line[0] == run and line[head.index("metric")] == metric]
    return sorted(found, key=lambda line: float(line["after"]))


def ends(figures):
    """`.534 – .544`, or the figure itself where all are one."""
    figures = sorted({short(figure) for figure in figures}, key=float)
    return " – ".join(dict.fromkeys([figures[0], figures[-1]]))


TABLE = {row["task"]: row for row in rows(SECTION)}


@each("task", SOURCES)
def test_the_table_has_the_measured_figures(task):
    row, (name, section, run, metric) = TABLE[task], SOURCES[task]
    found = measured(name, section, run, metric)
    assert [line["seed"] for line in sorted(found, key=lambda line: line["seed"])] == ["0", "1", "2"]
    assert row["before"] == ends(line["before"] for line in found)
    assert row["after"] == ends(line["after"] for line in found)
    gains = [{short(line["gain [95 %]"]) for line in found if line["after"] == found[end]["after"]} for end in (0, -1)]
    lowest, highest = row["gain [95 % interval]"].split(" to ")
    assert lowest in gains[0] and highest in gains[1], gains
    control = measured(name, section, "control", metric)
    assert row["random rewards"] == (ends(line["after"] for line in control) if control else "")
    minutes, said = sorted(float(line["wall s"]) / 60 for line in found), row["minutes"].split(" – ")
    if len(said) == 2:
        assert said == [f"{minutes[0]:.0f}", f"{minutes[-1]:.0f}"]
    else:
        assert float(said[0]) == pytest.approx(minutes[1], abs=0.051)  # the middle run


def test_supervised_learning_and_trl_have_the_measured_figures():
    said = re.search(r"exact labels reaches (\S+ – \S+) on the quickstart and (\S+ – \S+) on digits", SECTION)
    assert said
    for text, (name, section, _, metric) in zip(said.groups(), list(SOURCES.values())[:2], strict=True):
        assert text == ends(line["after"] for line in measured(name, section, "sft", metric))
    text = (ROOT / "benchmarks" / "results" / "vs_trl_cpu.md").read_text(encoding="utf-8")
    ratios = {row["whole step, TRL / vlrl"]: {head: round(float(row[head].split()[0]), 1)
                                             for head in ("image-heavy", "text-light")}
              for row in rows(text) if row["whole step, TRL / vlrl"].startswith("Qwen")}
    said = re.search(r"takes (\S+) times \(Qwen3-VL\) and (\S+) times \(Qwen2.5-VL\) as long on prompts with many "
                     r"visual tokens, (\S+) times on prompts\s+with few", SECTION)
    assert said
    assert [float(number) for number in said.groups()] == [
        ratios["Qwen3-VL"]["image-heavy"], ratios["Qwen2.5-VL"]["image-heavy"], ratios["Qwen3-VL"]["text-light"]]
    assert ratios["Qwen2.5-VL"]["text-light"] == ratios["Qwen3-VL"]["text-light"]
    assert list(TABLE) == list(SOURCES) and list(next(iter(TABLE.values()))) == HEADS
