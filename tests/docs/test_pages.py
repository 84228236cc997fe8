"""What the pages in docs/ say is so: settings, keys, messages, commands and files."""

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from vlrl import config
from vlrl import task as tasks
from vlrl.cli.main import main
from vlrl.config.descriptions import FIRST, summary, type_text
from vlrl.config.other_names import translation
from vlrl.config.schema import DataSettings
from vlrl.data import read_samples, sample_from_row
from vlrl.data.media import resolve
from vlrl.errors import VlrlError
from vlrl.tools import docs

ROOT = Path(__file__).resolve().parents[2]
PAGES = {name: (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
         for name in ("configuration", "coming-from", "troubleshooting", "quickstart", "reading-a-run", "long-runs")}
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SETTING = re.compile(r"([a-z_]+(?:\.[a-z_]+)*)(=.*)?")
NO_SETTINGS = (".yaml", ".jsonl", ".py")
QUICK = "configs/quickstart.yaml"
KNOWN = set(re.findall(r"^`([a-z_.]+)` \|", PAGES["configuration"], re.MULTILINE))
"""Every setting, the fields of the built-in tasks included."""


def table_rows(text: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip(" |") for cell in line] for line in lines if not set("".join(line)) <= set("-| ")]


def codes(text: str) -> list[str]:
    """What stands in backticks outside of blocks, on one line each."""
    return [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", BLOCK.sub("", text))]


def own_codes(name: str) -> list[str]:
    """What stands in backticks on a page, without names of other libraries, messages and written tables."""
    text = PAGES[name].partition(docs.MARK)[0]
    foreign = name in ("coming-from", "troubleshooting")
    return codes(re.sub(r"^\|[^|]*\|", "|", text, flags=re.MULTILINE) if foreign else text)


def commands() -> list[str]:
    lines = [line for text in PAGES.values() for kind, body in BLOCK.findall(text) if kind == "bash"
             for line in body.splitlines()]
    return [re.split(r"\s{2,}#", line)[0].strip() for line in lines if line.strip()]


def test_the_tables_of_settings_are_those_of_the_code():
    page = PAGES["configuration"]
    for name, below in docs.PAGES.items():
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert docs.page(text, below()) == text, f"docs/{name} is out of date; run: {docs.COMMAND}"
    assert {name for name, *_ in config.describe()} < KNOWN
    assert len(page.split()) <= 6000 and len(FIRST) == 15 and all(f"`{name}`" in page.partition("## Epochs")[0]
                                                                   for name in FIRST)
    first = [len(summary(text).split()) for *_, text in config.describe()]
    assert max(first) <= 15 and sum(first) / len(first) < 9, "the first sentence of a description says what it does"
    assert [*map(summary, ("One, e.g. this. Two.", "Ends at v1.2, not before. b", "no dot"))] == [
        "One, e.g. this.", "Ends at v1.2, not before.", "no dot"]
    assert all(docs._purpose(info.annotation) != docs._purpose(None) or not hasattr(info.annotation, "model_fields")
               for info in config.Config.model_fields.values()), "a section of vlrl/config/schema.py has no docstring"
    for kind, words in (
            (Annotated[int, Field(ge=1, lt=2**63)], "whole number >= 1"), (bool | None, "true or false or null"),
            (Annotated[float, Field(gt=0, le=1)], "number > 0 and <= 1"), (Literal["a"], "only a"), (Path, "Path"),
            (tuple[Literal["a", "b"], ...], "list of a, b"), (list[Any], "list of any value"),
            (dict[str, Annotated[float, Field(gt=0)]], "mapping of text to number > 0"),
            (tuple[float, float], "list of 2: number")):
        assert type_text(kind) == words
    listed = {name: kind for name, kind, *_ in config.describe()}
    assert listed["model.max_pixels"] == "whole number >= 1 or null" and listed["seed"] == "whole number >= 0"


def test_settings_in_the_text_exist_and_their_values_are_allowed():
    for name in PAGES:
        given = 0
        for code in own_codes(name):
            found = [m for m in map(SETTING.fullmatch, code.split()) if m and m[1] != "key"]
            values = [m[0] for m in found if m[2]]
            named = {m[1] for m in found if m[2] or ("." in m[1] and m[1].split(".")[0] in config.Config.model_fields)}
            unknown = {n for n in named - KNOWN - {"extends"}
                       if not n.startswith("task.rewards.") and not n.endswith(NO_SETTINGS)}
            assert not unknown, (name, code)
            if values:
                load(values)
            given += len(values)
        assert given >= 3, name


def load(settings: list[str], path: str = QUICK) -> config.Config:
    """The config with its task's fields checked as well."""
    found = config.load(ROOT / path if (ROOT / path).is_file() else path, settings)  # else one that vlrl carries
    tasks.load(found.task.name, {**(found.task.model_extra or {}), "rewards": found.task.rewards})
    return found


def test_the_example_config_means_what_it_says(tmp_path):
    (body,) = [body for kind, body in BLOCK.findall(PAGES["configuration"]) if kind == "yaml"]
    (tmp_path / "mine.yaml").write_text(body)
    found = config.load(tmp_path / "mine.yaml")
    task = tasks.load(found.task.name, {"drawn": True, "rewards": found.task.rewards})
    assert [task.weights_at(step)["format"] for step in (0, 20, 99)] == [0.5, 0.25, 0]
    assert found.train.part_lr == {"merger": 2e-4} and found.train.betas[1] == 0.98


def test_the_examples_mean_what_they_say_and_commands_exist():
    lines = [shlex.split(c)[2:] for c in commands() if re.match(r"vlrl train \S+\.yaml [^-]", c)]
    found = {word: load(line[1:], line[0]) for line in lines for word in line[1:]}
    lora = found["model={max_pixels: 802816, lora: {rank: 16}}"].model
    assert (lora.max_pixels, lora.lora.rank, lora.name) == (802816, 16, "embedded/tiny-qwen3-vl")
    assert found["data.root="].data.root == "" and found["model.max_pixels=null"].model.max_pixels is None
    assert found["train.betas=[0.9, 0.95]"].model.train == ("language", "merger")
    assert found["task.prompt=Find the {expression}."].task.rewards["format"] == [[0, 0.5], [80, 0]]
    # those of vlrl: tests/silent/test_documented_commands.py
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for program, *rest in map(shlex.split, commands()):
        assert program.endswith("vlrl") or (program == "make" and f"\n{rest[0]}:" in makefile), rest
        if path := next((word for word in rest if word.endswith(".yaml")), None):
            load([word for word in rest if "=" in word], path)


READING = PAGES["reading-a-run"]
DOCUMENTED = {key for row in table_rows(READING.partition("## Metrics")[2].partition("## Files")[0])
              for key in codes(row[0])} - KNOWN
"""Keys of metrics.jsonl, and families of keys such as `time/*`."""


PHASES = ("rollout", "score", "train", "sync", "store", "eval", "save")


def family(key: str) -> str:
    return key.split("/")[0] + "/*"


def test_metrics_and_paths_named_on_the_pages_exist():
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "vlrl").rglob("*.py"))
    rooms = "|".join({key.split("/")[0] for key in DOCUMENTED if "/" in key and "<" not in key})
    named = {c for text in PAGES.values() for c in codes(text) if re.fullmatch(rf"({rooms})/\w+", c)}
    assert len(named) > 10
    assert {key for key in named if key not in source} <= {f"time/{phase}_s" for phase in PHASES}
    assert {key for key in named if not {key, family(key)} & DOCUMENTED} == set()
    paths = {c for text in PAGES.values() for c in codes(text)
             if re.fullmatch(r"(configs|docs|tests|tasks|vlrl)/[\w./-]+", c)}
    assert all((ROOT / path).exists() for path in paths), paths


def foreign_names() -> list[list[list[str]]]:
    """The table of names on coming-from.md, a list of names per cell: vlrl's, then those of the other libraries."""
    table = PAGES["coming-from"].partition("## Names")[2].partition("\n## ")[0]
    return [[codes(cell) for cell in line.split(" | ")] for line in table.splitlines() if line.startswith("`")]


def test_every_name_is_mapped_once_and_those_of_trl_are_its_own():
    rows = foreign_names()
    assert len(rows) > 45 and all(len(row) == 4 and set(row[0]) <= KNOWN for row in rows)
    for column in range(4):
        names = [name for row in rows for name in row[column]]
        assert {name for name in names if names.count(name) > 1} <= {"loss_type"}  # two settings here
    for own, *others in rows:
        for name in (name for cell in others for name in cell):
            assert any(here in translation(name) for here in own), name
    spec = importlib.util.find_spec("trl")
    if spec is None:
        pytest.skip("TRL is not installed")
    trl = Path(spec.submodule_search_locations[0]) / "trainer"  # pyright: ignore[reportOptionalSubscript]
    transformers = Path(importlib.util.find_spec("transformers").origin).parent  # pyright: ignore
    sources = [trl / f"{name}_config.py" for name in ("grpo", "base", "model")] + [transformers / "training_args.py"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    fields = {n.target.id for path in sources for n in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
              if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
    assert {name for row in rows for name in row[1]} <= fields
    values = PAGES["coming-from"].partition("## Values")[2].partition("\n## ")[0]
    for line in (line for line in values.splitlines() if line.startswith("`loss_type")):
        assert all(f'"{value}"' in text for value in codes(line.split(" | ")[0].partition(";")[0])[1:]), line


MESSAGES = [codes(row[0])[0] for row in table_rows(PAGES["troubleshooting"]) if codes(row[0])]
FOREIGN = {"…: Input should be …"}
"""Messages of pydantic."""


def templates() -> set[str]:
    """Every text in the source, with NUL for what an f-string fills in."""
    found = set()
    for path in [*(ROOT / "vlrl").rglob("*.py"), *(ROOT / "tasks").glob("*.py"), *(ROOT / "app").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "\0" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return {text for text in found if len(text) > 12}  # as every message


def pattern(message: str) -> re.Pattern:
    return re.compile(".*".join(map(re.escape, message.split("…"))), re.DOTALL)


def test_every_message_is_in_the_source_and_can_be_provoked(tmp_path):
    source = templates()
    assert len(MESSAGES) >= 25 and len(set(MESSAGES)) == len(MESSAGES)
    for message in {*MESSAGES, *PROVOKED} - FOREIGN:
        assert len(message.replace("…", "")) > 12, message
        pieces = message.split("…")
        likely = (text for text in source if all(piece in text for piece in pieces))  # a pattern costs much more
        assert any(pattern(message).search(text) for text in likely), message
    for message, provoke in PROVOKED.items():
        with pytest.raises(VlrlError) as error:
            provoke(tmp_path)
        assert pattern(message).search(str(error.value)), error.value


def task(**data: Any) -> Any:
    found = tasks.load("grounding")
    found.data = DataSettings(**data)
    return found


def reads(*ids: int, **row: Any):
    def run(folder: Path) -> None:
        lines = [json.dumps({"id": i, "width": 9, "height": 9, "expression": "x", "boxes": [], **row}) for i in ids]
        (folder / "r.jsonl").write_text("\n".join(lines))
        read_samples(task(train=str(folder / "r.jsonl")), "train")
    return run


def loads(*settings: str, text: str = f"extends: {ROOT}/configs/quickstart.yaml"):
    def run(folder: Path) -> None:
        (folder / "a.yaml").write_text(text)
        config.load(folder / "a.yaml", settings)
    return run


PROVOKED = {
    "config file … does not exist.": lambda folder: config.load(folder / "none.yaml"),
    "cannot read config …: …": loads(text="steps: [1"), "…: 'extends' is circular": loads(text="extends: a.yaml"),
    "unknown setting '…' (value …).": loads("train.lrr=1"),
    "… is not a setting: write key=value, e.g. train.lr=1e-6": loads("steps"),
    "…: cannot read the value …": loads("seed=["), "give a number, not true or false": loads("steps=yes"),
    "…: Input should be …": loads("train.lr=fast"),
    "task.name is not set: name a built-in task or a file": loads(text="model: {name: m}"),
    "model.name is not set: give a hub name or a folder": loads(text="task: grounding"),
    "rollout.minibatches=… is more than rollout.prompts_per_step=…, so a minibatch would be empty":
        loads("rollout.minibatches=99"),
    "model.train=[] trains nothing: …": loads("model.train=[]"),
    "task.name=…: no built-in task of that name.": lambda _: tasks.load("groundin"),
    "the file … does not exist": lambda _: tasks.load("no.py:T"),
    "unknown setting 'task.…' (value …).": lambda _: tasks.load("grounding", {"colour": "red"}),
    "data.… is not set: task '…' reads its rows from a file": lambda _: read_samples(task(), "train"),
    "data.…: this file does not exist": lambda _: read_samples(task(train="none.jsonl"), "train"),
    "id … is already used in …: ids must be unique": reads(1, 1),
    "… (data.quarantine=true leaves bad rows out)": reads(1, 1),
    "…=… must be the image's … in pixels": reads(1, width=0),
    "media file …; check the path and data.root": reads(1, image="none.png"),
    "the row has id=…; every row needs an 'id'": lambda folder: sample_from_row({}, folder),
    "media path … lies outside …: …": lambda folder: resolve("../a.png", folder),
    "media path … is a URL, and nothing is downloaded unless data.urls allows it: …":
        lambda folder: resolve("http://a.b/c.png", folder),
}


SMALL = ("steps=2", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=2", "save.every=1",
         "log.samples_every=0")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    from vlrl.tools.experiments.report import print_summary
    from vlrl.training.loop import train
    folder = tmp_path_factory.mktemp("docs") / "quickstart"
    session = train(config.load(QUICK, [*SMALL, f"run.dir={folder}"]))
    print_summary(session.folder, session.done, print)
    return folder


def test_keys_files_and_second_starts_of_a_run_are_documented(run, capsys):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    written = {key for line in lines for key in line}
    said = DOCUMENTED | set(codes(READING.partition("## Metrics")[2].partition("## Files")[0]))
    assert {key for key in written - said if family(key) not in said} == {"reward/iou", "reward/format"}
    assert {f"time/{phase}_s" for phase in PHASES} <= written
    families = {family(key) for key in written}
    assert {key for key in DOCUMENTED - written - families if "*" in key} == {
        "<label>/*", "variants/*", "correction/*", "partial/*", "async/*", "balance/*", "feature_cache/*"}
    assert {key for key in DOCUMENTED - written if "*" not in key} == {
        "reward/<part>", "reward/shaped", "kl_coef", "entropy_coef", "entropy_anchor", "temperature", "loss_scale",
        "kl/clamped", "phi", "reference_reset"}
    text = READING.partition("`eval.jsonl` has")[2].partition("##")[0]
    line = json.loads((run / "eval.jsonl").read_text().splitlines()[0])
    named = {key for key in line if "/ci95_" not in key}
    assert named - set(codes(text)) == {"iou", "format", "acc@.5"}
    assert all(f"{key}/ci95_low" in line for key in ("iou", "acc@.5"))
    (table,) = re.findall(r"^## Files\n\n(\|.*?)\n\n", READING, re.MULTILINE | re.DOTALL)
    named = {name.rstrip("/") for row in table_rows(table)[1:] for name in codes(row[0])}
    assert named == {path.name for path in run.iterdir()} | {"source", "alerts.jsonl"}  # own code; alerts
    (body,) = [body for kind, body in BLOCK.findall(READING) if kind == "python"]
    exec(body.replace("runs/quickstart", str(run)).replace("step=79", "step=1"), {})
    assert "'iou'" in capsys.readouterr().out
    for command in (words for kind, body in BLOCK.findall(READING) if kind == "bash" for words in body.splitlines()):
        program, *words = shlex.split(command.split("  #")[0].replace("runs/quickstart", str(run)))
        assert program == "vlrl"
        if words[0] != "app":  # serves until Ctrl-C: tests/app/test_server.py
            assert main(words) == 0
    out = capsys.readouterr().out
    assert "finished" in out and "reward/mean" in out and "report.html" in out
    (run / "report.html").unlink()
    from vlrl.store import RunFolder
    from vlrl.training.loop import train

    def says(message: str, *settings: str, folder: Path = run) -> None:
        with pytest.raises(VlrlError) as error:
            train(config.load(QUICK, [*SMALL, f"run.dir={folder}", *settings]))
        assert pattern(message).search(str(error.value)), error.value

    says("… holds a run with other settings, so its checkpoint cannot be resumed:", "train.lr=1")
    says("resume=must, but … has no complete checkpoint.", "resume=must", folder=run.parent / "other")
    with RunFolder(run).lock():
        says("run folder … is in use by process … on … since …")
