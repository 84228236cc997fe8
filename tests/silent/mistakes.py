"""Mistakes of a first hour: what a user writes wrong in rows, pictures, a reward, a prompt or a setting, and what the
start of `vlrl train` says of it.

`python -m tests.silent.mistakes [NAME ...]` makes each of them in a folder of its own, starts `vlrl train` there in a
process of its own and prints the seconds until the message."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from PIL import Image, ImageDraw

SIZE = (96, 64)
COLOURS = ("red", "green", "blue", "white")
TRAIN, HELDOUT = 40, 8

OWN = '''
from vlrl import Task

class Own(Task):
    prompt = {prompt!r}
    rewards = {{"right": 1.0}}

    def score(self, sample, answer):
        {score}
'''


@dataclass
class Project:
    """What a user has: rows, pictures and a config, not yet written."""

    folder: Path
    config: dict[str, Any]
    train: list[dict[str, Any]]
    heldout: list[dict[str, Any]]
    files: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)  # in place of the config file

    def own_task(self, score: str, prompt: str = "What colour is the square? {question}") -> None:
        self.files["own.py"] = OWN.format(score=score, prompt=prompt)
        self.config["task"] = {"name": "own.py"}

    def write(self) -> list[str]:
        for split in ("train", "heldout"):
            rows = getattr(self, split)
            (self.folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        for name, text in self.files.items():
            (self.folder / name).write_text(text)
        (self.folder / "mine.yaml").write_text(yaml.safe_dump(self.config, sort_keys=False))
        return ["train", *(self.words or ["mine.yaml"])]


def project(folder: Path, kind: str) -> Project:
    """Rows of the task `kind` with pictures of one coloured square each."""
    rng, splits = random.Random(0), {}
    for split, count in (("train", TRAIN), ("heldout", HELDOUT)):
        splits[split] = [_row(folder, kind, f"{split}-{i}", rng) for i in range(count)]
    config: dict[str, Any] = {
        "extends": "tiny.yaml", "steps": 1, "task": {"name": kind},
        "data": {"train": "train.jsonl", "heldout": "heldout.jsonl"}, "run": {"dir": "run"},
        "rollout": {"prompts_per_step": 2, "group_size": 2, "max_new_tokens": 4}, "eval": {"samples": 2}}
    return Project(folder, config, splits["train"], splits["heldout"])


def _row(folder: Path, kind: str, name: str, rng: random.Random) -> dict[str, Any]:
    x, y = rng.randrange(4, 44), rng.randrange(4, 28)
    box, colour = [x, y, x + rng.randrange(20, 50), y + rng.randrange(12, 34)], rng.choice(COLOURS)
    image = Image.new("RGB", SIZE, tuple(rng.randrange(60, 90) for _ in range(3)))  # no two pictures alike
    ImageDraw.Draw(image).rectangle(box, fill=colour)
    image.save(folder / f"{name}.png")
    row = {"id": name, "image": f"{name}.png"}
    more = {"grounding": {"expression": f"the {colour} square", "boxes": [{"box": box}]},
            "classification": {"label": colour, "labels": list(COLOURS)},
            "qa": {"question": "Which colour has the square?", "answer": colour, "answer_type": "text"}}
    return {**row, **more[kind]}


@dataclass(frozen=True)
class Mistake:
    """`make` puts the mistake into a project of the task `kind`. `says`: patterns of the message: what is wrong with
    its row or setting and value, and the way out. `stops`: whether the run must not start; else it warns."""

    kind: str
    make: Callable[[Project], Any]
    says: tuple[str, ...]
    stops: bool = True


MISTAKES: dict[str, Mistake] = {}


def mistake(kind: str, *says: str, stops: bool = True, name: str = ""):
    def add(make: Callable[[Project], Any]):
        MISTAKES[name or make.__name__] = Mistake(kind, make, says, stops)
        return make
    return add


def renamed(rows: list[dict[str, Any]], old: str, new: str) -> None:
    rows[:] = [{new if key == old else key: value for key, value in row.items()} for row in rows]


def each(p: Project, change: Callable[[dict[str, Any]], Any], first: int = 0) -> None:
    for rows in (p.train, p.heldout):
        for row in rows[first:]:
            change(row)


# --- rows -------------------------------------------------------------------------------------------------------------


@mistake("qa", "train.jsonl", "anwser", "answer")
def column_misspelt(p):
    for rows in (p.train, p.heldout):
        renamed(rows, "answer", "anwser")


@mistake("grounding", "train.jsonl", "expresion", "expression")
def column_misspelt_grounding(p):
    for rows in (p.train, p.heldout):
        renamed(rows, "expression", "expresion")


def _easyr1(p, old, new):
    for rows in (p.train, p.heldout):
        rows[:] = [{"images": [row["image"]], "problem": f"<image>Find the bounding box of {row['expression']}.",
                    "answer": json.dumps(row["boxes"][0]["box"])} for row in rows]
        renamed(rows, old, new)


for old_, new_ in (("answer", "anwser"), ("problem", "problm"), ("images", "imges")):
    mistake("grounding", "train.jsonl:1", f"'{new_}'", rf"data\.columns={{{old_}: {new_}}}", f"--columns {old_}={new_}",
            name=f"EasyR1 {new_}")(lambda p, old=old_, new=new_: _easyr1(p, old, new))


@mistake("classification", "train.jsonl", "'lable'", "'label'", "rename")
def column_misspelt_label(p):
    for rows in (p.train, p.heldout):
        renamed(rows, "label", "lable")


@mistake("grounding", "train.jsonl", "'imgae'", "image")
def column_misspelt_image(p):
    for rows in (p.train, p.heldout):
        renamed(rows, "image", "imgae")


@mistake("qa", "'own'", "quesion", "task.prompt", "question", name="column misspelt, own task")
def column_misspelt_own(p):
    p.own_task('return {"right": float(answer.final == sample["answer"])}')
    for rows in (p.train, p.heldout):
        renamed(rows, "question", "quesion")


@mistake("qa", "own.py:9", "'answer'", "anwser", name="column misspelt that the reward reads")
def column_of_reward(p):
    p.own_task('return {"right": float(answer.final == sample["answer"])}')
    for rows in (p.train, p.heldout):
        renamed(rows, "answer", "anwser")


@mistake("grounding", "id 'train-0' is already used in .*train.jsonl:1", "unique")
def ids_twice(p):
    p.train[7]["id"] = "train-0"


@mistake("grounding", "id '0' ", "unique", name="ids twice, as numbers")
def ids_twice_numbers(p):
    for i, row in enumerate(p.train):
        row["id"] = i // 2


@mistake("grounding", "data.train", "data.heldout='train.jsonl'", "vlrl data split", stops=False,
         name="train = held-out")
def train_is_heldout(p):
    p.config["data"]["heldout"] = "train.jsonl"


@mistake("grounding", "heldout.jsonl:1", "train.jsonl:1", "remove", "39 rows more", stops=False,
         name="a copy of train is held out")
def heldout_copy(p):
    p.heldout = [{**row, "id": f"h{i}"} for i, row in enumerate(p.train)]


@mistake("qa", "heldout.jsonl:1", "train.jsonl:1", "remove", stops=False, name="held-out overlaps in part")
def heldout_part(p):
    p.heldout[:2] = [{**row, "id": f"h{i}"} for i, row in enumerate(p.train[:2])]


@mistake("classification", "train.jsonl:1", "label=", "labels", name="labels as numbers")
def labels_numbers(p):
    each(p, lambda row: row.update(label=COLOURS.index(row["label"])))


@mistake("classification", "train.jsonl", "label=", "number", "labels", stops=False,
         name="labels as numbers, and no list")
def labels_numbers_alone(p):
    each(p, lambda row: row.update(label=COLOURS.index(row["label"])) or row.pop("labels"))


@mistake("classification", "label='3.0'|label='[0-3].0'", "labels", name="labels '3.0'")
def labels_float_text(p):
    each(p, lambda row: row.update(label=f"{COLOURS.index(row['label'])}.0"))


@mistake("classification", "label=[0-3].0", name="labels 3.0")
def labels_float(p):
    each(p, lambda row: row.update(label=float(COLOURS.index(row["label"])), labels=["0", "1", "2", "3"]))


@mistake("classification", "label=(True|False)", "string", name="labels True or False")
def labels_bool(p):
    each(p, lambda row: row.update(label=row["label"] == "red", labels=["yes", "no"]))


@mistake("qa", "train.jsonl", "answer=(True|False)", name="answers True or False")
def answers_bool(p):
    each(p, lambda row: row.update(answer=row["answer"] == "red"))


@mistake("grounding", "train.jsonl:1", r"box \[", "data.boxes=xywh|data.boxes.*xywh", name="boxes xywh")
def boxes_xywh(p):
    each(p, lambda row: row.update(boxes=[{"box": [b[0], b[1], b[2] - b[0], b[3] - b[1]]}
                                          for b in [row["boxes"][0]["box"]]]))


@mistake("grounding", "train.jsonl:", "1000", "data.boxes", name="boxes 0..1000")
def boxes_1000(p):
    each(p, lambda row: row.update(boxes=[{"box": [round(v / s * 1000) for v, s in
                                                   zip(row["boxes"][0]["box"], SIZE * 2, strict=True)]}]))


@mistake("grounding", "train.jsonl:", "at most 1", "data.boxes=norm1", name="boxes 0..1")
def boxes_1(p):
    each(p, lambda row: row.update(boxes=[{"box": [round(v / s, 4) for v, s in
                                                   zip(row["boxes"][0]["box"], SIZE * 2, strict=True)]}]))


@mistake("grounding", "train.jsonl:6", r"box \[", "x1", name="a box with x2 < x1")
def box_swapped(p):
    p.train[5]["boxes"] = [{"box": [60, 10, 20, 40]}]


@mistake("grounding", "train.jsonl:6", r"box \[-5", name="a negative box")
def box_negative(p):
    p.train[5]["boxes"] = [{"box": [-5, 10, 20, 40]}]


@mistake("grounding", "train.jsonl:1", r"boxes=", "box", name="a box as text")
def box_text(p):
    each(p, lambda row: row.update(boxes=str(row["boxes"][0]["box"])))


# --- pictures ---------------------------------------------------------------------------------------------------------


@mistake("grounding", "train.jsonl:4", "train-3.png does not exist", "data.root", name="a picture missing")
def picture_missing(p):
    (p.folder / "train-3.png").unlink()


@mistake("qa", "train.jsonl:1", "does not exist", "data.root", name="all pictures missing")
def pictures_missing(p):
    for path in p.folder.glob("train*.png"):
        path.unlink()


@mistake("grounding", "train.jsonl:1", "EXIF", stops=False, name="pictures turned by EXIF")
def picture_turned(p):
    exif = Image.Exif()
    exif[0x0112] = 6
    for rows in (p.train, p.heldout):
        for row in rows:
            Image.open(p.folder / row["image"]).save(p.folder / row["image"].replace(".png", ".jpg"), exif=exif)
            row["image"] = row["image"].replace(".png", ".jpg")
            row["boxes"] = [{"box": [5, 8, 30, 40]}]


@mistake("grounding", "train.jsonl:1", "EXIF", "96x64", name="pictures turned by EXIF, with their stored size")
def picture_turned_size(p):
    picture_turned(p)
    each(p, lambda row: row.update(width=SIZE[0], height=SIZE[1]))


@mistake("qa", "train.jsonl:4", "train-3.png", "not an image", name="a picture that is a text")
def picture_text(p):
    (p.folder / "train-3.png").write_text("<html>404 Not Found</html>")


@mistake("qa", "train.jsonl:4", "train-3.png", "empty|0 bytes", name="a picture of 0 bytes")
def picture_empty(p):
    (p.folder / "train-3.png").write_bytes(b"")


@mistake("qa", "train-3'", "train-3.png", "truncated", name="a picture that is cut")
def picture_cut(p):
    Image.effect_noise((640, 480), 90).save(p.folder / "train-3.png")
    whole = (p.folder / "train-3.png").read_bytes()
    (p.folder / "train-3.png").write_bytes(whole[:len(whole) // 3])


@mistake("qa", "'train-0'", "'image_2'", "images", stops=False, name="two pictures, the prompt shows one")
def pictures_two(p):
    each(p, lambda row: row.update(image_2=p.heldout[-1]["image"]))


@mistake("qa", "<image>", "2|two", "1|one", name="two pictures, one <image> in the prompt")
def pictures_two_marks(p):
    each(p, lambda row: row.update(images=[row.pop("image")] * 2, question=f"<image>{row['question']}"))


# --- rewards ----------------------------------------------------------------------------------------------------------

REWARDS = {
    # name: (body of score, what is said, whether it stops)
    "a reward that returns None": ("return None", ("own.py|'own'", "score", "None"), True),
    "a part that is None": ('return {"right": None}', ("'own'", "None", r"0\.0"), True),
    "a constant": ('return {"right": 0.5}', ("'own'", "0.5", "constant"), True),
    "always the maximum": ('return {"right": 1.0}', ("'own'", "earns 1", "constant"), True),
    "always 0": ('return {"right": 0.0}', ("'own'", "earns 0", "oracle"), False),
    "a text": ('return {"right": "good"}', ("'own'", "'right'", "'good'", "number"), True),
    "a text alone": ('return "good"', ("'own'", "score", "'good'", "number"), True),
    "a number alone": ('return float(answer.final == sample["answer"])', ("'own'", "score", "float", "'right'"), True),
    "a list": ("return [1.0]", ("'own'", "score", "list", "part"), True),
    "NaN": ('return {"right": float("nan")}', ("'own'", "'right'", "nan", "number"), True),
    "another part": ('return {"wrong": 1.0}', ("'own'", "'wrong'", "rewards"), True),
    "raises": ('raise KeyError("anser")', ("'own'", "own.py:9", "KeyError", "anser"), True),
    "a field misspelt": ('return {"right": float(answer.final == sample["anser"])}',
                         ("'own'", "own.py:9", "anser", "answer"), True),
    "raises for some rows": (
        'return {"right": float(answer.final == sample["answer"]) / (sample.id != "train-6")}',
        ("train.jsonl:7", "own.py:9", "ZeroDivisionError", "train-6"), False),
    "raises for some answers": ('return {"right": float(int(answer.text) == 3)}',
                                ("'own'", "own.py:9", "ValueError"), True),
    "too large": ('return {"right": 100.0 * (answer.final == sample["answer"])}', ("'own'", "100", "best_parts"),
                  False),
    "drawn": ('import random; return {"right": random.random()}', ("'own'", "the same answer", "random"), False),
}


def _reward(score: str) -> Callable[[Project], None]:
    return lambda p: p.own_task(score)


for _name, (_score, _says, _stops) in REWARDS.items():
    MISTAKES[f"reward: {_name.removeprefix('a reward that ')}"] = Mistake("qa", _reward(_score), _says, _stops)


FUNCTIONS = {
    # name: (body of `def right(completion, row)`, what is said, whether it stops)
    "returns None": ("return None", ("right", "None", r"0\.0"), True),
    "a constant": ("return 0.5", ("right|rows", "0.5", "constant"), True),
    "always the maximum": ("return 1", ("earns 1", "constant"), True),
    "a text": ('return "good"', ("right", "'good'", "number"), True),
    "raises": ('raise KeyError("anser")', ("rewards.py:2", "KeyError", "anser"), True),
    "a field misspelt": ('return completion == row["anser"]', ("rewards.py:2", "anser", "Did you mean 'answer'"), True),
    "NaN": ('return float("nan")', ("right", "nan"), True),
    "a list": ("return [1.0]", ("right", r"\[1.0\]", "number"), True),
    "a dict of texts": ('return {"right": "yes"}', ("right", "'yes'", "number"), True),
    "a dict of changing keys": ('return {"iou": 1.0} if row["answer"] in completion else {"format": 0.0}',
                                ("rewards.py:right", "iou", "format", "keys"), True),
    "raises for some rows": ('return (row["answer"] in completion) / (row["id"] != "train-6")',
                             ("train-6", "rewards.py:2", "ZeroDivisionError"), False),
}


def _function(body: str, *words: str) -> Callable[[Project], None]:
    def make(p: Project) -> None:
        p.files["rewards.py"] = f"def right(completion, row):\n    {body}\n"
        p.words = ["--data", "train.jsonl", "--reward", *(words or ("rewards.py:right",)), "--prompt", "{question}",
                   "steps=1", "run.dir=run", "rollout.prompts_per_step=2", "rollout.group_size=2", "eval.samples=2",
                   "rollout.max_new_tokens=4"]
    return make


for _name, (_body, _says, _stops) in FUNCTIONS.items():
    MISTAKES[f"function: {_name}"] = Mistake("qa", _function(_body), _says, _stops)
for _name, _word, _says in (("its name misspelt", "rewards.py:rigth", ("rewards.py:rigth", "'right'")),
                            ("its file misspelt", "reward.py:right", ("reward.py", "does not exist", "rewards.py")),
                            ("no name", "rewards.py", ("rewards.py", "right|rewards.py:name"))):
    MISTAKES[f"function: {_name}"] = Mistake("qa", _function("return 1.0 * (row['answer'] in completion)", _word),
                                             _says)


# --- prompts ----------------------------------------------------------------------------------------------------------


@mistake("qa", "<answer>", "never mentions", "Ask for <answer>", name="a prompt without its tag")
def prompt_without_tag(p):
    score = 'return {"right": float("<answer>" in answer.text and answer.final == sample["answer"])}'
    p.own_task(score)
    p.files["own.py"] += '\n    def oracle(self, sample):\n        return f"<answer>{sample[\'answer\']}</answer>"\n'


@mistake("qa", "<answer>", "Ask for <answer>", stops=False, name="a prompt without its tag, no oracle")
def prompt_without_tag_alone(p):
    p.own_task('return {"right": float(f"<answer>{sample[\'answer\']}</answer>" in answer.text)}')


@mistake("qa", "<answer>", "prompt", name="a prompt without its tag, built-in task")
def prompt_without_tag_builtin(p):
    p.config["task"] = {"name": "qa", "recipe": "thinking", "prompt": "{question} Think first.",
                        "rewards": {"accuracy": 0.1, "format": 1.0}}


@mistake("qa", "questoin", "'question'", "task.prompt", name="a placeholder misspelt")
def placeholder(p):
    p.own_task('return {"right": float(answer.final == sample["answer"])}', prompt="Look. {questoin}")


@mistake("qa", "questoin", "question", name="a placeholder misspelt, built-in task")
def placeholder_builtin(p):
    p.config["task"]["prompt"] = "Look: {questoin}"


@mistake("qa", "'own'", "'question'", "task.prompt", stops=False, name="a prompt without placeholder")
def no_placeholder(p):
    p.own_task('return {"right": float(answer.final == sample["answer"])}', prompt="What is it?")


# --- models and settings ----------------------------------------------------------------------------------------------


def _model(name: str) -> Callable[[Project], None]:
    return lambda p: p.config.update(model={"name": name}) or p.environ.update(HF_HUB_OFFLINE="1")


for _name, _value, _says in (
        ("an embedded model misspelt", "embedded/tiny-qwen3vl", ("model.name='embedded/tiny-qwen3vl'",
                                                                 "embedded/tiny-qwen3-vl")),
        ("a hub name misspelt", "Qwen/Qwen2.5-VL-3B-Instrct", ("model.name='Qwen/Qwen2.5-VL-3B-Instrct'",
                                                               "Did you mean 'Qwen/Qwen2.5-VL-3B-Instruct'")),
        ("a hub name without its owner", "Qwen2.5-VL-3B-Instruct", ("model.name='Qwen2.5-VL-3B-Instruct'",
                                                                    "Did you mean 'Qwen/Qwen2.5-VL-3B-Instruct'")),
        ("a hub name that is not here", "Qwen/Qwen2.5-VL-3B-Instruct", ("model.name='Qwen/Qwen2.5-VL-3B-Instruct'",
                                                                        "HF_HUB_OFFLINE", "cache", "folder")),
        ("a model folder that is missing", "./models/qwen", ("model.name='./models/qwen'", "does not exist")),
        ("a model that is a file", "train.jsonl", ("model.name='train.jsonl'", "is a file", "folder")),
        ("a model of text", "Qwen/Qwen2.5-3B-Instruct", ("model.name='Qwen/Qwen2.5-3B-Instruct'",))):
    MISTAKES[_name] = Mistake("qa", _model(_value), _says)


@mistake("qa", "model.name='model'", "config.json", "folder", name="a model folder without config.json")
def model_without_config(p):
    (p.folder / "model").mkdir()
    (p.folder / "model" / "model.safetensors").write_bytes(b"")
    p.config["model"] = {"name": "model"}


@mistake("qa", "model.name='adapter'", "adapter", "base", name="an adapter as model, its base misspelt")
def model_adapter(p):
    (p.folder / "adapter").mkdir()
    (p.folder / "adapter" / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "base_model_name_or_path": "embedded/tiny-qwen3vl"}))
    p.config["model"] = {"name": "adapter", "lora": {"rank": 4}}


@mistake("qa", "model.name='adapter'", "adapter", "merge", name="an adapter as model, with a second one")
def model_adapter_second(p):
    model_adapter(p)
    (p.folder / "adapter" / "adapter_config.json").write_text(json.dumps(
        {"peft_type": "LORA", "base_model_name_or_path": "embedded/tiny-qwen3-vl"}))


def _setting(path: str, value: Any) -> Callable[[Project], None]:
    def change(p: Project) -> None:
        place = p.config
        *sections, last = path.split(".")
        for section in sections:
            place = place.setdefault(section, {})
        place[last] = value
    return change


for _name, _path, _value, _says in (
        ("a setting misspelt", "train.learning_rat", 1e-4, ("train.learning_rat", "lr")),
        ("a setting misspelt by a letter", "rollout.groupsize", 8, ("rollout.groupsize", "group_size")),
        ("a section misspelt", "rolout.group_size", 8, ("rolout", "rollout")),
        ("a setting of the task misspelt", "task.promt", "{question}", ("task.promt", "task.prompt|'prompt'")),
        ("a reward part misspelt", "task.rewards.acuracy", 1.0, ("task.rewards.acuracy", "accuracy")),
        ("a data file misspelt", "data.train", "trian.jsonl", ("data.train='trian.jsonl'", "train.jsonl")),
        ("a task misspelt", "task.name", "groundig", ("task.name='groundig'", "grounding"))):
    MISTAKES[_name] = Mistake("qa", _setting(_path, _value), _says)


# --- how they are tried -----------------------------------------------------------------------------------------------


def train(p: Project) -> tuple[int, str, float]:
    """Starts `vlrl train` in the project's folder: its exit code, what it prints, and the seconds until its first error
    or warning."""
    words, begun, lines, seconds = p.write(), time.monotonic(), [], None
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **p.environ}
    with subprocess.Popen([sys.executable, "-m", "vlrl", *words], cwd=p.folder, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, env=environ) as run:
        for line in run.stdout or ():
            lines.append(line)
            if seconds is None and line.startswith(("error:", "warning:")):
                seconds = time.monotonic() - begun
    return run.returncode, "".join(lines), seconds or time.monotonic() - begun


def missing(case: Mistake, said: str) -> list[str]:
    """What the message should say and does not."""
    text = " ".join(said.split())
    return [one for one in case.says if not re.search(one, text)]


def _table(names: list[str]) -> None:
    for name, case in MISTAKES.items():
        if names and not any(one in name for one in names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            p = project(Path(folder), case.kind)
            case.make(p)
            code, said, seconds = train(p)
            lacks = missing(case, said)
            good = not lacks and (code == 1 or not case.stops)  # a warned run may fail later
            print(f"{'ok ' if good else 'BAD'} {seconds:5.1f} s  exit {code}  {name}"
                  + (f"   lacks {lacks}" if lacks else ""), flush=True)
            lines = [line.replace(folder, "") for line in said.splitlines()
                     if names or not good or re.match("error|warning", line)]
            print(*(f"        {line[:600]}" for line in lines[:14]), sep="\n", flush=True)


if __name__ == "__main__":
    _table(sys.argv[1:])
