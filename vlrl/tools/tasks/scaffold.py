"""`vlrl tasks new`: creates a working task, its config and its test from the files in templates/.

create("count", Path("."))                  # count.py, count.yaml, test_count.py; images drawn by code
create("signs", Path("."), "rows")          # the same with signs_rows/: 8 rows and their images
create("walk", Path("."), "environment")    # a task whose model acts over several turns"""

from __future__ import annotations

import importlib.util
import json
import keyword
import os
import random
import sys
from pathlib import Path
from string import Template
from typing import Literal

from PIL import Image, ImageDraw

from vlrl.config.registry import FOLDERS
from vlrl.errors import ConfigError
from vlrl.task import builtin_names

_TEMPLATES = Path(__file__).parent / "templates"
_USED = {"Task", "Sample", "Media", "Image", "ImageDraw", "Drawn", "DataError", "Environment", "Observation", "Step",
         "World"}
Kind = Literal["task", "rows", "environment"]
_SHAPES = ("circle", "square")
_COLOURS = ("red", "green", "blue", "black")


def create(name: str, folder: Path, kind: Kind = "task") -> list[Path]:
    """Writes the files of a new task and returns their paths, the task file first. `kind` selects the template: "task",
    "rows" or "environment".

    Raises ConfigError if the name cannot be a module or shadows another module, if a file exists, or if the folder
    cannot be written."""
    check_name(name)
    rows = kind == "rows"
    texts = {f"{name}.py": f"{kind}.py.txt", f"{name}.yaml": f"{kind}.yaml.txt",
             f"test_{name}.py": f"test_{kind}.py.txt"}
    there = [p for p in (*texts, *([f"{name}_rows"] if rows else [])) if os.path.lexists(folder / p)]
    if there:
        raise ConfigError(f"{folder / there[0]} exists already, so nothing was written. Choose another name, or "
                          "another folder with --dir")
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, template in texts.items():
            text = Template((_TEMPLATES / template).read_text(encoding="utf-8"))
            written.append(folder / path)
            written[-1].write_text(text.substitute(name=name, Class=class_name(name)), encoding="utf-8")
        return [*written, *(_write_rows(folder / f"{name}_rows") if rows else [])]
    except OSError as error:
        raise ConfigError(f"--dir {str(folder)!r} cannot be written: {error.strerror or error}") from None


def class_name(name: str) -> str:
    """The class name for a task name: `count_mugs` -> `CountMugs`. If the template already imports a class of this
    name, `Task` is appended."""
    camel = "".join(part[:1].upper() + part[1:] for part in name.split("_"))
    return f"{camel}Task" if camel in _USED else camel


def check_name(name: str) -> None:
    """Raises ConfigError if a task file cannot have this name. The message suggests another name."""
    problem = _name_problem(name)
    if problem:
        plain = "".join(c if c.isascii() and c.isalnum() else "_" for c in name.removesuffix(".py"))
        plain = plain.strip("_")[:40] or "task"
        better = f"my_{plain}" if plain[:1].isdigit() or _name_problem(plain) else plain
        raise ConfigError(f"{name!r} {problem}. Choose another name, e.g. {better}")


def _name_problem(name: str) -> str | None:
    if not (name.isascii() and name.isidentifier()) or keyword.iskeyword(name) or not class_name(name).isidentifier():
        return "cannot be the name of a Python file: use letters, digits and _, and begin with a letter"
    if len(name) > 60:
        return "is longer than 60 characters"
    if name in builtin_names():
        return "is the name of a built-in task, which `task.name` would select instead"
    if name.startswith("test_") or name == "conftest":
        return "would be read by pytest as a test"
    if name in sys.stdlib_module_names:
        return "is a module of Python's standard library, which the file would shadow"
    if _installed(name):
        return "is an installed package, which the file would shadow"
    return None


def _installed(name: str) -> bool:
    """Whether a package of this name is installed, not counting the working directory and folders of task files."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return name in sys.modules
    origin = spec and (spec.origin or next(iter(spec.submodule_search_locations or ()), None))
    return bool(origin) and Path(str(origin)).parent.resolve() not in {Path.cwd().resolve(), *FOLDERS}


def _write_rows(folder: Path) -> list[Path]:
    """Draws 8 images and writes one row for each: 6 for training, 2 held out."""
    (folder / "images").mkdir(parents=True)
    rows = [_draw(folder, number) for number in range(8)]
    written = []
    for split, part in (("train", rows[:6]), ("heldout", rows[6:])):
        written.append(folder / f"{split}.jsonl")
        written[-1].write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")
    return written


def _draw(folder: Path, number: int) -> dict[str, str]:
    rng, shape = random.Random(number), _SHAPES[number % 2]
    image = Image.new("RGB", (96, 96), "white")
    x, y, side = rng.randint(8, 40), rng.randint(8, 40), rng.randint(30, 46)
    paint = ImageDraw.Draw(image)
    (paint.ellipse if shape == "circle" else paint.rectangle)((x, y, x + side, y + side), fill=_COLOURS[number % 4])
    image.save(folder / "images" / f"{number}.png")
    return {"id": str(number), "image": f"images/{number}.png", "question": "Which shape is this?", "answer": shape}
