"""Everything that is wrong with data files, and what they hold. Reads only; imports no torch.

    report = check(Path("rows.jsonl"), make_task(config), config.limits)
    report.bad, report.problems[0]      # 3, Problem(where="rows.jsonl:7", id="a", kind="box", reason="...")
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vlrl.config.registry import failure, prints_aside
from vlrl.config.schema import LimitsSettings
from vlrl.data import FIELDS, MEDIA_FIELDS, box_problems, make_sample, sample_from_row
from vlrl.data.embedded import Embedded
from vlrl.data.formats import rows_in
from vlrl.data.formats.fields import number
from vlrl.data.formats.files import READERS
from vlrl.data.media import load, missing
from vlrl.data.row_media import each_source, unshown_problem
from vlrl.data.video_sampling import VideoSampling
from vlrl.errors import DataError, TaskError
from vlrl.rewards.boxes import is_number
from vlrl.rewards.text import parse_answer
from vlrl.task import Task, task_oracle
from vlrl.tools.pixelbudget import PixelBudget, Scale, pixel_budget
from vlrl.tools.rowcheck import field_problems, leaks, length_problem, side, unseen_problem
from vlrl.tools.shown import Shown
from vlrl.types import Coordinates, Media, Sample

COUNTED = ("category", "split", "answer_type")
"""Fields whose values are counted."""
Tell = Callable[[str, int, int], None]
"""Called as (what, done, total) while the work proceeds."""
_FRAMES = VideoSampling(fps=1.0, max_frames=4)  # enough to see that a video decodes from its start to its end
_PLACES = ("boxes", "box", "points", "action", "point", "coordinate")  # fields with pixels in them
_CENTIMETRES = ("trajectory",)  # with metres, which answers give to two decimals
_TIMES = ("video_start", "video_end")
_ORDER = ("file", "row", "id", "field", "media", "size", "box", "oracle", "leak")
_NO_ROWS = ("metadata.jsonl", "metadata.csv", "dataset_info.json", "dataset_dict.json", "state.json")
_TEXT_SUFFIXES = tuple(suffix for suffix in READERS if suffix not in (".txt", ".parquet", ".arrow", ".feather"))


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one row."""

    where: str
    """File and line, or file and number of the row."""
    id: str
    kind: str
    """file (cannot be read as a whole), row (the task cannot read it), id, field, media, size, box, oracle or leak."""
    reason: str


@dataclass(frozen=True)
class Findings:
    """What data files hold, and their problems in the order of the files."""

    rows: int
    bad: int
    """Rows with at least one problem."""
    problems: tuple[Problem, ...]
    fields: Mapping[str, int]
    """Field -> rows that have it with a value other than null."""
    counts: Mapping[str, Mapping[str, int]]
    """A field of COUNTED -> value -> rows; only fields that occur."""
    media: Mapping[str, int]
    """Different images and videos that rows name, and how many of both cannot be used."""
    copies: tuple[tuple[str, ...], ...]
    """Files of the same content under several names."""
    unlabelled: int
    """Rows for which the task knows no perfect answer."""
    shapes: Mapping[str, int] = field(default_factory=dict)
    """What was recognised, with the projects that it comes from -> records."""
    example: Shown | None = None
    """The first sound row as the model sees it."""
    pixels: PixelBudget | None = None
    """How large targets are after the processor's resize; None when no row has one, or the resize is not known."""


@dataclass
class _Row:
    """A row under examination."""

    path: Path
    where: str
    row: Mapping[str, Any] | DataError
    sample: Sample | None = None
    media: tuple[Media, ...] = ()
    problems: list[Problem] = field(default_factory=list)

    @property
    def id(self) -> str:
        if self.sample:
            return self.sample.id
        value = None if isinstance(self.row, DataError) else self.row.get("id")
        return str(value) if isinstance(value, (str, int)) else ""

    def add(self, kind: str, reason: str) -> None:
        text = reason.removeprefix(f"row {self.id!r}: ")
        self.problems.append(Problem(self.where, printable(self.id), kind, printable(text)))


_Key = tuple[Path | Embedded, str, float | None, float | None]


@dataclass(frozen=True)
class _Opened:
    """What opening a media file showed."""

    size: tuple[int, int] | None = None
    sha256: str = ""
    problem: str = ""
    seconds: float | None = None
    """Of a video, the whole file."""


@prints_aside()
def check(path: Path | Sequence[Path], task: Task | None, limits: LimitsSettings, root: Path | None = None,
          format: str = "auto", *, media: bool = True, allow_missing: bool = False,
          columns: Mapping[str, str] | None = None, scale: Scale | None = None, tell: Tell | None = None,
          see: Callable[[Sample], Shown] | None = None) -> Findings:
    """Reads every row through `task.sample_from_row` (None: the canonical fields alone) and lists every problem.

    Of a folder every file of rows is read, see `files_of`. Rows of held-out files (named val, test, heldout ..., or by
    the rows' `split`) are looked for in those of train. A task of one's own says itself what its fields may hold.

    Media lie under `root` (default: each file's folder) and are opened under `limits`; with `media=False` they need
    only exist, and with `allow_missing` not even that. `columns` says which field stands for a canonical one, `scale`
    by how much the model's processor shrinks an image, `see` how a sample looks to the model. The oracle is scored in
    original pixels, so rounding to a model's convention does not count against a row.

    Raises DataError when the only file cannot be read, TaskError when the task breaks the Task contract.
    """
    tell = tell or (lambda what, done, total: None)
    reader = task or Task()
    reader.coordinates = Coordinates()
    known = type(reader).__module__.partition(".")[0] == "vlrl"
    shapes: Counter[str] = Counter()
    rows = _rows([path] if isinstance(path, Path) else path, format, root, columns, shapes)
    first: dict[tuple[Path, str], str] = {}
    unlabelled = 0
    for done, row in enumerate(rows):
        if done % 1000 == 0:
            tell("reading rows", done, len(rows))
        _read(row, reader, root or row.path.parent, first)
        if known and row.sample:
            _check_fields(row)
        if task and row.sample and not any(p.kind == "field" for p in row.problems):
            unlabelled += not _check_oracle(row, task)
    named = dict.fromkeys(key for row in rows for media in row.media for key in _keys(media))
    there = [key for key in named if not allow_missing or isinstance(key[0], Embedded) or os.path.isfile(key[0])]
    opened = _open_all(there, limits, tell) if media else _exist(there)
    for row in rows:
        _check_media(row, opened)
    _check_leaks(rows, opened)
    pixels = pixel_budget([row.row for row in rows if isinstance(row.row, dict)], scale)
    return replace(_summary(rows, opened, unlabelled, pixels), shapes=dict(shapes.most_common()),
                   example=_example(rows, see) if see else None)


def files_of(path: Path) -> list[Path]:
    """Returns the files of rows in a folder and below it, by name; the folder itself where it is one data set (a folder
    of images for each class, shards of parquet), and a file itself.
    """
    if not path.is_dir():
        return [path]
    files = [Path(folder, name) for folder, _, names in os.walk(path) for name in names
             if name.lower().endswith(_TEXT_SUFFIXES) and name not in _NO_ROWS]
    return sorted(files) or [path]


def printable(text: str) -> str:
    """Returns the text with a "?" for what could steer a terminal or cannot be encoded."""
    return "".join(c if c.isprintable() else "?" for c in text)


# --- one row ----------------------------------------------------------------------------------------------------------


def _example(rows: Sequence[_Row], see: Callable[[Sample], Shown]) -> Shown | None:
    """Returns the first row without a problem, as it is seen; a problem that seeing it shows is one of the row."""
    row = next((row for row in rows if row.sample and not row.problems), None)
    if row is None or row.sample is None:
        return None
    try:
        return see(row.sample)
    except (DataError, TaskError) as error:
        return Shown(id=row.sample.id, text=f"it cannot be shown: {error}", tokens=None, media=(), coordinates="")


def _rows(paths: Sequence[Path], format: str, root: Path | None, columns: Mapping[str, str] | None,
          shapes: Counter[str]) -> list[_Row]:
    """Returns the rows of all files; a file that cannot be read is a row of its own, unless it is the only one."""
    files, rows = [file for path in paths for file in files_of(path)], []
    for file in files:
        try:
            located = rows_in(file, format, root, columns, shapes=shapes)
            rows += [_Row(file, where, row) for where, row in located]
        except DataError as error:
            if len(files) == 1:
                raise
            broken = _Row(file, str(file), error)
            broken.add("file", str(error))
            rows.append(broken)
    return rows


def _check_fields(row: _Row) -> None:
    assert row.sample
    unseen = unseen_problem(row.sample.row)
    for problem in (*([unseen] if unseen else []), *field_problems(row.sample.row)):
        row.add("field", problem)


def _check_leaks(rows: Sequence[_Row], opened: Mapping[_Key, _Opened]) -> None:
    """Adds a problem to each held-out row that is in train too: by content where media were opened, else by path."""
    entries = []
    for row in rows:
        plain = {} if isinstance(row.row, DataError) else row.row
        keys = [key for media in row.media for key in _keys(media)]
        shown = [opened[key].sha256 if key in opened and opened[key].sha256 else str(key[0]) for key in keys]
        entries.append((side(row.path, plain), row.where, plain, shown))
    for n, problem in leaks(entries).items():
        rows[n].add("leak", problem)


def _read(row: _Row, task: Task, root: Path, first: dict[tuple[Path, str], str]) -> None:
    """Makes the sample; where that fails, the media are looked for all the same."""
    if row.problems:  # the file as a whole
        return
    try:
        row.sample = make_sample(task, _sized(row.row, root), root)
        row.media = row.sample.media
        if problem := unshown_problem(row.sample, FIELDS, MEDIA_FIELDS, root):
            row.add("media", problem)
    except DataError as error:
        row.add("row", str(error))
        if isinstance(row.row, DataError):
            return
        named = {k: row.row[k] for k in (*MEDIA_FIELDS, *_TIMES) if k in row.row}
        try:
            row.media = sample_from_row({**named, "id": row.id or "?"}, root).media
        except DataError as other:
            if str(other) != str(error) and row.id:
                row.add("media", str(other))
    key = (row.path, row.id)
    if row.id and first.setdefault(key, row.where) != row.where:
        row.add("id", f"id {row.id!r} occurs before, in {first[key]}; ids must be unique")


def _sized(row: Mapping[str, Any] | DataError, root: Path) -> Mapping[str, Any] | DataError:
    """Returns the row, with a size that holds all it names when it tells none and its image, which would, is missing.

    The missing image is a problem of its own; the rest of the row is checked as if it were there.
    """
    image = None if isinstance(row, DataError) else row.get("image")
    if isinstance(row, DataError) or row.get("width") is not None or not isinstance(image, str) or image[:5] == "data:":
        return row
    if os.path.isfile(root / image.replace("\0", "")):
        return row
    numbers = [v for v in _coordinates(row) if is_number(v)]
    side = max([1, *map(math.ceil, numbers)])
    return {**row, "width": side, "height": side}


def _coordinates(row: Mapping[str, Any]) -> list[Any]:
    """Returns every number of the boxes and points of a row."""
    action, boxes = row.get("action"), row.get("boxes")
    places = [row.get("box"), *(action.values() if isinstance(action, Mapping) else ())]
    for entry in boxes if isinstance(boxes, list) else ():
        places.append(entry.get("box") if isinstance(entry, Mapping) else None)
    return [value for place in places if isinstance(place, list) for value in place]


def _check_oracle(row: _Row, task: Task) -> bool:
    """Returns whether the task knows a perfect answer; adds a problem when that answer does not get the full reward."""
    sample = row.sample
    assert sample
    try:
        earned = _earned(task, sample)
        if earned is None:
            return False
        if earned[2] < earned[3] - 1e-6:  # a recipe whose answers are whole numbers cannot hit a box between them
            earned = _earned(task, replace(sample, row=_whole(sample.row))) or earned
        text, parts, reward, best = earned
    except (DataError, TaskError) as error:
        row.add("oracle", str(error))
        return True
    except (Exception, SystemExit) as error:  # a task's own code may trip over a row in any way
        row.add("oracle", f"the perfect answer cannot be scored: {failure(error)}")
        return True
    if not reward >= best - 1e-6:
        row.add("oracle", f"the perfect answer {text[:80]!r} gets the reward {reward:.4g}, the most is {best:.4g} "
                f"({', '.join(f'{k} {v:.4g}' for k, v in parts.items())})")
    return True


def _earned(task: Task, sample: Sample) -> tuple[str, dict[str, float], float, float] | None:
    """Returns the task's own answer, its parts, its reward and the most there is; None without an answer."""
    text = task_oracle(task, sample)
    if text is None:
        return None
    parts = {k: float(v) for k, v in task.score(sample, parse_answer(text)).items() if v is not None}
    weights = task.weights_at(0)
    best = float(task.combine({k: (weights.get(k, 0) > 0) * task.best_parts.get(k, 1.0) for k in parts}, weights))
    return text, parts, float(task.combine(parts, weights)), best


def _whole(value: Any, field: str = "") -> Any:
    """Returns a row with the numbers of its boxes and points rounded to whole pixels, of its way-points to
    centimetres.
    """
    if isinstance(value, Mapping):
        return {k: _whole(v, k) if k in (*_PLACES, *_CENTIMETRES) else v for k, v in value.items()}
    if isinstance(value, list):
        return [_whole(v, field) for v in value]
    return round(value, 2 if field in _CENTIMETRES else None) if is_number(value) else value


def _check_media(row: _Row, opened: Mapping[_Key, _Opened]) -> None:
    files = [opened[key] for media in row.media for key in _keys(media) if key in opened]
    for item in files:
        if item.problem and not any("video_end=" in p.reason for p in row.problems):  # a cut that holds no frame
            row.add("media", item.problem)
    if isinstance(row.row, DataError):
        return
    size = files[0].size if files else None
    stated = tuple(row.row.get(side) for side in ("width", "height"))
    if size and all(map(is_number, stated)) and stated != size:
        row.add("size", f"width and height say {stated[0]}x{stated[1]} pixels, {row.media[0].source.name} is "
                f"{size[0]}x{size[1]} (EXIF orientation applied)")
    _check_length(row, opened)
    for problem in box_problems(row.row, size or stated):
        if not any(problem.partition(" must ")[0] in p.reason for p in row.problems):  # the task may have said so
            row.add("box", problem)


def _check_length(row: _Row, opened: Mapping[_Key, _Opened]) -> None:
    assert not isinstance(row.row, DataError)
    for key in (key for media in row.media for key in _keys(media)):
        lasts = opened[key].seconds if key in opened else None
        if lasts and not any(p.kind in ("row", "field") for p in row.problems):
            problem = length_problem(row.row, lasts, key[0].name, *key[2:])
            if problem:
                row.add("size", problem)


# --- media ------------------------------------------------------------------------------------------------------------


def _keys(media: Media) -> list[_Key]:
    """Returns what is opened once: the file, or each frame of a video given as pictures; [] for what a task has
    drawn.
    """
    one = [(media.source, media.kind, media.start, media.end)]
    frames = [(frame, "image", None, None) for frame in each_source(media)]
    return [key for key in (frames if isinstance(media.source, (list, tuple)) else one)
            if isinstance(key[0], (Path, Embedded))]


def _open_all(keys: Sequence[_Key], limits: LimitsSettings, tell: Tell) -> dict[_Key, _Opened]:
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        opened: dict[_Key, _Opened] = {}
        try:
            for key, file in zip(keys, pool.map(lambda key: _open(key, limits), keys), strict=True):
                opened[key] = file
                tell("opening media", len(opened), len(keys))
        except BaseException:  # Ctrl-C: those in the queue are not waited for
            pool.shutdown(cancel_futures=True)
            raise
    return opened


def _open(key: _Key, limits: LimitsSettings) -> _Opened:
    path, kind, start, end = key
    try:
        loaded = load(Media(source=path, kind="video" if kind == "video" else "image", start=start, end=end), limits,
                      _FRAMES)
    except DataError as error:
        return _Opened(problem=str(error))
    return _Opened(loaded.size, loaded.sha256, seconds=number(loaded.metadata.get("duration")))


def _exist(keys: Sequence[_Key]) -> dict[_Key, _Opened]:
    return {key: _Opened(problem=f"media file {key[0]} {missing(key[0])}"
                         if isinstance(key[0], Path) and not os.path.isfile(key[0]) else "") for key in keys}


# --- all rows ---------------------------------------------------------------------------------------------------------


def _summary(rows: Sequence[_Row], opened: Mapping[_Key, _Opened], unlabelled: int, pixels: PixelBudget | None
             ) -> Findings:
    plain = [row.row for row in rows if not isinstance(row.row, DataError)]
    fields = Counter(printable(name) for row in plain for name, value in row.items() if value is not None)
    counts = {name: Counter(printable(str(row[name])) for row in plain if row.get(name) is not None)
              for name in COUNTED}
    kinds = Counter(kind for _, kind in {(path, kind) for path, kind, *_ in opened})
    unusable = {path for (path, *_), file in opened.items() if file.problem}
    contents: dict[str, set[str]] = {}
    for (path, *_), file in opened.items():
        if file.sha256:
            contents.setdefault(file.sha256, set()).add(str(path))
    return Findings(
        rows=len(rows), bad=sum(bool(row.problems) for row in rows),
        problems=tuple(p for row in rows for p in sorted(row.problems, key=lambda p: _ORDER.index(p.kind))),
        fields=dict(fields.most_common()), counts={k: dict(v.most_common()) for k, v in counts.items() if v},
        media={"images": kinds["image"], "videos": kinds["video"], "unusable": len(unusable)},
        copies=tuple(sorted(tuple(sorted(paths)) for paths in contents.values() if len(paths) > 1)),
        unlabelled=unlabelled, pixels=pixels)
