"""A run as a static site: a folder with the group list, filters and groups, which works without a server of its own.

A bundle opens from disk, from any web server, or as a static Hugging Face Space. Each group has the same HTML as in the
app (cards.py). Filters run in the browser (static/bundle.js) on the index of groups. Data files are scripts
that contain JSON, because a page opened from disk cannot load other files. Every text passes the `Redactor`, since
bundles are meant to be published."""

import hashlib
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import vlrl
from vlrl.errors import ConfigError, RunError, VlrlError
from vlrl.store import plain
from vlrl.store.files import read_json, write_text

from . import bundle_page, cards, filters, notable, turns
from .details import GroupView, RolloutView, box_convention, decoded, group, with_marks
from .html import Html, el, visible
from .library import Library
from .media import MediaStore
from .queries import GroupKey
from .redaction import Redactor
from .report import RUN, attempted, run_folder

GROUPS = 300
"""Default number of groups in a bundle."""
MARK = "vlrl-bundle.json"
"""Name of the file that marks a folder as a bundle."""
_PIXELS, _FRAME_PIXELS, _THUMBNAIL = 768, 256, 96  # of the longest side
_FRAMES = 12  # per video
_ANSWERS = 64  # per group: as many as are shown side by side
_SHOWN = 160  # characters of a text in the list
_SEARCHED = 20_000  # characters of each text that can be searched
_PIECE = 1 << 20  # characters of texts in a file
_MOST_ROWS = 1_000_000
_STATIC = Path(__file__).parent / "static"


@dataclass(frozen=True)
class BundleSummary:
    """The result of `write`: the bundle's folder, its numbers of groups and bytes, and sentences on omitted content."""

    folder: Path
    groups: int
    total: int
    """Number of groups in the run."""
    bytes: int
    left_out: tuple[str, ...]


class BundleImages:
    """Implements draw.Addresses with URLs of downscaled images, relative to the bundle. An image is written to the
    bundle when its URL is first requested. If `wanted` is false, no image is written and no image has a URL."""

    def __init__(self, media: MediaStore, folder: Path, wanted: bool = True):
        self.media, self.folder, self.wanted = media, folder, wanted
        self.lost = self.videos = 0

    def picture(self, run: str, name: str, size: int | None) -> str | None:
        return next(self._written(lambda: [self.media.thumbnail(RUN, name, min(size or _PIXELS, _PIXELS))]), None)

    def video(self, run: str, name: str) -> str | None:
        self.videos += 1
        return None

    def frames(self, run: str, name: str, seconds: Sequence[float]) -> Sequence[str | None]:
        return list(self._written(lambda: self.media.frames(RUN, name, seconds, _FRAME_PIXELS)))

    def _written(self, read: Any) -> Iterator[str]:
        try:
            pictures = read() if self.wanted else []
        except VlrlError:
            self.lost += 1
            return
        for picture in pictures:
            name = f"{hashlib.sha256(picture).hexdigest()[:24]}.jpg"
            if not (self.folder / name).exists():
                (self.folder / name).write_bytes(picture)
            yield f"media/{name}"


def write(run: str | Path, folder: str | Path, groups: int = GROUPS, media: bool = True) -> BundleSummary:
    """Writes a run as a bundle to `folder`: at most `groups` groups, with images if `media`. The run may still be in
    progress. Raises RunError if `run` is not a run or `folder` contains files that do not belong to a bundle, and
    ConfigError if duckdb is not installed."""
    if importlib.util.find_spec("duckdb") is None:
        raise ConfigError("`vlrl report --bundle` needs duckdb, which is not installed: pip install 'vlrl[app]'")
    path = run_folder(Path(run))
    target = _emptied(Path(folder))
    bundle = _Bundle(path, target, _hidden(path), media)
    try:
        return bundle.write(groups)
    finally:
        bundle.index.close()


def _hidden(path: Path) -> Redactor:
    """Returns the Redactor for the run folder `path`. It removes the host names and folders that identify this machine,
    and those recorded in the run's files."""
    library = Library(path)
    said = [read_json(path / name) or {} for name in ("heartbeat.json", "env.json")] + library.alerts(RUN)
    folders = [library.settings(RUN).get("run.dir"), *(record.get("run") for record in said)]
    return Redactor(path, {host for record in said if isinstance(host := record.get("host"), str)},
                  {Path(folder) for folder in folders if isinstance(folder, str) and folder.startswith("/")})


def _emptied(folder: Path) -> Path:
    """Creates `folder`, or deletes the earlier bundle in it, and returns it. Raises RunError if `folder` is a file, or
    contains files but no earlier bundle; hidden files and README.md, which a new Space contains, do not count."""
    if folder.exists() and not folder.is_dir():
        raise RunError(f"--bundle {folder} is a file: name a folder for the bundle, e.g. {folder.with_suffix('')}-page")
    others = [p.name for p in folder.iterdir() if not p.name.startswith(".") and p.name not in ("README.md", MARK)
              ] if folder.exists() else []
    if others and not (folder / MARK).is_file():
        raise RunError(f"--bundle {folder} contains files that are not part of a bundle, such as "
                       f"{sorted(others)[0]!r}: name a new or empty folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_text(folder / MARK, json.dumps({"format": 1, "vlrl": vlrl.__version__}) + "\n")
        (folder / "index.html").unlink(missing_ok=True)  # written last, so a bundle with it is complete
        for name in ("data", "media"):
            if (folder / name).exists():
                shutil.rmtree(folder / name)
            (folder / name).mkdir()
    except OSError as error:
        raise RunError(f"--bundle {folder} cannot be written: {error.strerror or error}") from None
    return folder


class _Bundle:
    def __init__(self, path: Path, folder: Path, hide: Redactor, media: bool):
        from .index import Index
        self.path, self.folder, self.hide, self.with_media = path, folder, hide, media
        self.name = path.resolve().name
        self.library = Library(path)
        self.index = Index(self.library, budget_s=math.inf)
        self.pictures = BundleImages(MediaStore(self.library), folder / "media", media)
        self.thumbnails = BundleImages(self.pictures.media, self.pictures.folder, media)
        self.notes: list[str] = []
        self.cut = 0

    def write(self, most: int) -> BundleSummary:
        keys = self._keys()
        chosen = self._chosen(keys, most)
        columns, texts = self._columns(set(chosen)), _Texts(self)
        rows = []
        for key in chosen:
            view = attempted(lambda key=key: self._view(key), None, f"group {key.group} of step {key.step}", self.notes)
            if view is not None:
                name = f"g{len(rows):05d}"
                self.put(name, self._piece(view))
                texts.add(view)
                rows.append({"n": name, **self._row(view, columns.get(key, {}))})
        pieces = texts.end()
        left_out = self._left_out(len(rows), len(keys))
        facets = self.index.facets((RUN,))
        shown = {name: where for name, where in filters.PRESETS.items() if "flag" not in where}
        self.put("index", {"run": self.name, "total": len(keys), "texts": pieces, "presets": shown,
                           "ranges": filters.RANGES, "groups": rows})
        for name in ("app.js", "app.css", "bundle.js", "bundle.css"):
            shutil.copyfile(_STATIC / name, self.folder / name)
        shutil.copyfile(_STATIC.parent / "style.css", self.folder / "style.css")
        readme = self.folder / "README.md"
        if not readme.exists() or bundle_page.OURS in readme.read_text(encoding="utf-8", errors="replace"):
            write_text(readme, self.hide.text(bundle_page.readme(self.name)))
        page = bundle_page.page(self.name, self.library, self.hide, facets, self.notes, left_out)
        write_text(self.folder / "index.html", self.hide.text(page))
        size = sum(p.stat().st_size for p in self.folder.rglob("*") if p.is_file() and ".git" not in p.parts)
        return BundleSummary(self.folder, len(rows), len(keys), size, tuple(left_out))

    def put(self, name: str, value: Any) -> None:
        text = self.hide.text(json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False))
        text = json.dumps(json.loads(text), separators=(",", ":")).replace("<", "\\u003c")
        write_text(self.folder / "data" / f"{name}.js", f"vlrlBundle({json.dumps(name)},{text});\n")

    def _keys(self) -> list[GroupKey]:
        scope = self.index.refresh((RUN,))
        self.notes += [*self.library.notes(RUN), *scope.notes]
        rows = self.index.table.fetch("SELECT DISTINCT source, split, step, group_id FROM rollouts WHERE run = ? "
                                      "ORDER BY source, step, split, group_id", [RUN])
        return [GroupKey(RUN, *row.values()) for row in rows]

    def _chosen(self, keys: Sequence[GroupKey], most: int) -> list[GroupKey]:
        if len(keys) <= most:
            return list(keys)
        folder = self.library.folder(RUN)
        splits = list(dict.fromkeys(record["split"] for record in self.library.evals(RUN)))
        choices = attempted(lambda: notable.choose(folder, splits), [], "the rollouts", self.notes)
        wanted = [(t.source, t.split, step, name) for t in choices
                  for step, name in ((t.step, t.group), *([t.before] if t.before else []))]
        first = [key for key in keys if tuple(key[1:]) in set(wanted)][:most]
        others = [key for key in keys if key not in set(first)]
        left = most - len(first)
        spread = {others[len(others) - 1 - i * len(others) // left] for i in range(left)}  # includes the newest
        return [key for key in keys if key in spread or key in set(first)]

    def _columns(self, chosen: set[GroupKey]) -> dict[GroupKey, dict[int, dict[str, Any]]]:
        from .index import Query
        from .rows import every_rollout
        odd = {row.key for row in every_rollout(self.index, Query(runs=(RUN,), source=None, unusual=True), _MOST_ROWS)}
        columns: dict[GroupKey, dict[int, dict[str, Any]]] = {}
        for row in self.index.table.fetch(
                "SELECT source, split, step, group_id, idx, length, turns, tool_errors, malformed, finish_reason "
                "FROM rollouts WHERE run = ?", [RUN]):
            key = GroupKey(RUN, row["source"], row["split"], row["step"], row["group_id"])
            if key in chosen:
                columns.setdefault(key, {})[row["idx"]] = {
                    "len": row["length"], "turns": row["turns"], "tools": row["tool_errors"], "bad": row["malformed"],
                    "end": row["finish_reason"], "odd": (*key, row["idx"]) in odd}
        return columns

    def _view(self, key: GroupKey) -> GroupView:
        view = with_marks(self.library, group(self.library, RUN, key.source, key.step, key.group, key.split))
        self.cut += len(view.rollouts[_ANSWERS:])
        hide, named = self.hide, view.key._replace(run=self.name)
        rollouts = tuple(replace(
            r, key=r.key._replace(run=self.name), error=r.error and hide.words(r.error),
            extra=hide.value(r.extra), turns=tuple(map(self._turn, r.turns))) for r in view.rollouts[:_ANSWERS])
        return replace(view, key=named, rollouts=rollouts, sample=hide.value(view.sample),
                       notes=tuple(map(hide.words, view.notes)))

    def _turn(self, turn: Mapping[str, Any]) -> dict[str, Any]:
        info = turn["info"] and json.dumps(self.hide.value(decoded(turn["info"])))
        return {**turn, "error": turn["error"] and self.hide.words(turn["error"]), "info": info}

    def _piece(self, view: GroupView) -> dict[str, Any]:
        shown = cards.group(view, self.pictures, most_frames=_FRAMES)
        convention = box_convention(self.library, replace(view, key=view.key._replace(run=RUN)))
        strips = {r.index: self._turns(view, r, convention) for r in view.rollouts if turns.is_episode(r)}
        return {"html": shown, "turns": strips}

    def _turns(self, view: GroupView, rollout: RolloutView, convention: str) -> Html:
        shown = turns.read(view, rollout, convention)
        return el("section", el("h3", f"Turns of #{rollout.index}"),
                  turns.strip(view, rollout, shown, self.pictures), id="v-turns")

    def _row(self, view: GroupView, columns: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
        first = next((m.name for m in view.media if m.name), None)
        scored = [r for r in view.rollouts if not r.aside and r.reward is not None]
        return {**view.key._asdict(), "sample": view.sample_id, "category": view.category,
                "difficulty": view.difficulty, "prompt": _start(view.prompt), "mean": view.mean,
                "std": view.std if len(scored) > 1 else None, "alike": view.zero_variance,
                "thumb": first and self.thumbnails.picture(RUN, first, _THUMBNAIL),
                "answers": [{"i": r.index, "reward": r.reward, "advantage": r.advantage, "parts": r.parts,
                             "cut": r.truncated, "err": bool(r.error), "aside": r.aside, "text": _start(r.completion),
                             **columns.get(r.index, {})} for r in view.rollouts]}

    def _left_out(self, shown: int, total: int) -> list[str]:
        said = [f"{total - shown:,} of {total:,} groups: {shown:,} are here, the most informative ones and others "
                "spread evenly over the run. --groups sets their number."] if total > shown else []
        said += [f"{self.cut:,} answers of groups with more than {_ANSWERS}."] if self.cut else []
        if not self.with_media:
            said += ["Pictures and clips: the bundle was written with --no-media."]
        else:
            said += [f"Clips: of each, {_FRAMES} of its sampled frames are here."] if self.pictures.videos else []
            said += [f"Pictures that could not be read: {self.pictures.lost:,}."] if self.pictures.lost else []
            said += [f"Pictures of more than {_PIXELS} pixels are smaller here."]
        return [*said, "Tokens, notes, the history of prompts and comparisons: vlrl app shows them.",
                "Paths, addresses and names of the machine, and settings that hold keys."]


class _Texts:
    def __init__(self, bundle: _Bundle):
        self.bundle, self.waiting, self.size, self.pieces = bundle, list[Any](), 0, 0

    def add(self, view: GroupView) -> None:
        texts = [[r.completion[:_SEARCHED], (r.error or "")[:_SEARCHED]] for r in view.rollouts]
        self.waiting.append([view.prompt[:_SEARCHED], texts])
        self.size += len(view.prompt) + sum(len(a) + len(b) for a, b in texts)
        if self.size > _PIECE:
            self._put()

    def end(self) -> int:
        if self.waiting:
            self._put()
        return self.pieces

    def _put(self) -> None:
        self.bundle.put(f"t{self.pieces:03d}", self.waiting)
        self.waiting, self.size, self.pieces = [], 0, self.pieces + 1


def _start(text: str) -> str:
    return visible(" ".join(text[:4 * _SHOWN].split()))[:_SHOWN]
