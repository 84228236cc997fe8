"""Writes the page of `vlrl report RUN`: a self-contained HTML file about a run, without requests or scripts.

Curves are SVG images drawn by curves.py, with a total size of about 100 kB."""

import base64
import dataclasses
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlrl.errors import RunError, VlrlError
from vlrl.monitoring.progress import duration
from vlrl.store import RunFolder
from vlrl.store.files import read_json, read_small, write_text
from vlrl.tools.experiments.report import Gain, gains

from . import cards, curves, film, notable, turns
from .details import GroupView, RolloutView, box_convention, group, with_marks
from .html import STYLE, Html, as_json, el, folded, note, number, table
from .library import Library, RunInfo
from .media import MediaStore
from .textfiles import flat

_PIXELS, _FRAME_PIXELS = 512, 200  # on the longer side of a picture
_FRAMES = 10  # per video
_TURNS = 8  # per episode
_FILMS, _FILM_PIXELS, _FILM_FRAMES, _FILM_BYTES = 3, 240, 24, 1 << 20
_MOST_NOTES = 50
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
RUN = "."  # the id of a run in a Library of the run's own folder


class InlineMedia:
    """Implements draw.Addresses with `data:` URLs for a self-contained page; a video is represented by its frames."""

    def __init__(self, media: MediaStore):
        self.media, self.films = media, _FILMS

    def picture(self, run: str, name: str, size: int | None) -> str | None:
        try:
            return as_data(self.media.thumbnail(run, name, min(size or _PIXELS, _PIXELS)))
        except VlrlError:
            return None

    def video(self, run: str, name: str) -> str | None:
        return None

    def frames(self, run: str, name: str, seconds: Sequence[float]) -> Sequence[str | None]:
        try:
            return [as_data(frame) for frame in self.media.frames(run, name, seconds, _FRAME_PIXELS)]
        except VlrlError:
            return []

    def film(self, view: GroupView, rollout: RolloutView) -> dict[str, str]:
        """Renders an episode; returns {kind of film (see film.KINDS): `data:` URL}. {} if the episode has fewer than
        two images, if its film cannot be rendered, or if the page already has its largest number of films."""
        if not self.films or len(film.pictures(view, rollout)) < 2:
            return {}
        try:
            films = {kind: as_data(film.rendered(self.media, view, rollout, kind, _FILM_PIXELS, _FILM_FRAMES,
                                                 _FILM_BYTES), media_type) for kind, media_type in film.KINDS.items()}
        except VlrlError:
            return {}
        self.films -= 1
        return films


def as_data(picture: bytes, media_type: str = "") -> str:
    """A `data:` URL of the bytes of a file. Without `media_type`, the file must be a JPEG, PNG, WebP or GIF."""
    kind = ("png" if picture.startswith(b"\x89PNG") else "gif" if picture.startswith(b"GIF8") else
            "webp" if picture[8:12] == b"WEBP" else "jpeg")
    return f"data:{media_type or f'image/{kind}'};base64,{base64.b64encode(picture).decode()}"


def write(run: str | Path, to: str | Path | None = None) -> Path:
    """Writes the report of a run folder to the file `to`, by default RUN/report.html; returns its path. The run may
    still be in progress. Raises RunError if the folder is not a run, or the file cannot be written."""
    path = run_folder(Path(run))
    target = Path(to) if to else path / "report.html"
    if target.is_dir():
        raise RunError(f"{target} is a folder: name a file for the report, e.g. {target / 'report.html'}")
    write_text(target, page(path))
    return target


def run_folder(path: Path) -> Path:
    """Returns `path` if it is the folder of a run. Raises RunError if `path` contains several runs, or none."""
    from vlrl.tools.experiments.status import find_runs, is_run
    if is_run(path):
        return path
    below = find_runs(path)  # raises if the path is not a folder or contains no run
    raise RunError(f"{path} contains {len(below)} runs, but a report covers one run: name one of the runs, e.g. "
                   f"vlrl report {below[0]}")


def page(path: Path) -> str:
    """The report as HTML text."""
    library = Library(path)
    info, run, name = library.run(RUN), library.folder(RUN), path.resolve().name
    notes: list[str] = []
    drawn = section("Curves over the steps", curves.of_run(library.metrics(RUN), library.evals(RUN)), "v-curves",
                    "No step has been finished yet: curves appear with the first one.")
    sections = [header(name, info, library.settings(RUN)), before_after(run, notes), drawn,
                _groups(library, run, notes), _origin(path)]
    remarks = list(dict.fromkeys([*library.notes(RUN), *run.notes, *notes]))
    sections.append(unreadable_section(remarks))
    head = el("head", el("meta", charset="utf-8"), el("title", f"{name} · vlrl report"),
              el("meta", name="viewport", content="width=device-width, initial-scale=1"),
              el("meta", http_equiv="Content-Security-Policy", content=_POLICY),
              el("style", Html(STYLE.read_text(encoding="utf-8"))))
    body = el("body", el("main", *sections, class_="v v-page"))
    return f"<!doctype html>\n{el('html', head, body, lang='en', class_='v-report')}\n".encode(
        "utf-8", "replace").decode()


def section(title: str, pieces: Sequence[Html], class_: str, without: str) -> Html:
    """A section with a heading; `without` is the text shown if there are no pieces."""
    return el("section", el("h2", title), el("div", *pieces, class_=class_) if pieces else note(without))


def header(name: str, info: RunInfo, set_to: Mapping[str, Any]) -> Html:
    """The head of the report: model, task, state, and the settings in `set_to` that differ from their defaults."""
    steps = f"{'?' if info.step is None else info.step} of {'?' if info.steps is None else info.steps}"
    facts = {"state": info.state, "task": info.task or "?", "model": info.model or "?", "steps": steps,
             "last reward": number(info.reward), "duration": duration(info.duration_s) if info.duration_s else "–"}
    tiles = [el("div", el("span", key), el("b", value), class_="v-tile") for key, value in facts.items()]
    written = el("p", f"A report of a vlrl run, written {time.strftime('%Y-%m-%d %H:%M')}.", class_="v-dim")
    changed = _changed(set_to)
    settings = (table(("setting", "value", "default"), changed) if changed else
                note("Its settings are the defaults, or config.yaml cannot be read."))
    return el("header", el("h1", name), written, el("div", *tiles, class_="v-tiles"),
              el("details", el("summary", f"{len(changed)} settings that are not the defaults"), settings,
                 open=len(changed) <= 4))


def _changed(settings: Mapping[str, Any]) -> list[tuple[Any, Any, Any]]:
    from vlrl import config
    known = flat(config.validate({"task": {"name": "-"}, "model": {"name": "-"}}).model_dump(mode="json"))
    changes = []
    for name, value in settings.items():
        default = None if name in ("task.name", "model.name") else known.get(name)
        if name != "run.dir" and as_json(value, 0) != as_json(default, 0):
            changes.append((name, el("code", as_json(value)[:2000]), el("code", as_json(default)[:200])))
    return changes


def before_after(run: RunFolder, notes: list[str]) -> Html:
    """A table of the first and the last evaluation of each split, and the gain on the same samples. Problems with the
    files are added to `notes`."""
    changes = attempted(lambda: gains(run), [], "the evaluations", notes)
    rows = [_gain_row(gain) for gain in changes if "completion/" not in gain.metric]
    steps = f", steps {changes[0].steps[0]} to {changes[0].steps[1]}" if changes else ""
    head = ("split", "metric", "n", "before", "after", "gain, 95 % interval")
    shown = [table(head, rows, (2, 3, 4, 5))] if rows else []
    return section(f"Before and after{steps}", shown, "", "No evaluation yet: eval.every says when there is one.")


def _gain_row(row: Gain) -> tuple[Any, ...]:
    gain = row.gain
    known = gain.low == gain.low
    kind = "good" if known and gain.low > 0 else "bad" if known and gain.high < 0 else ""
    bounds = f" [{number(gain.low, '.3f', True)}, {number(gain.high, '.3f', True)}]" if known else ""
    words = f"{number(gain.mean, '.3f', True)}{bounds}" if row.steps[0] < row.steps[1] else "–"
    return (row.split, row.metric, row.n, str(row.before), str(row.after),
            el("span", words, class_=f"v-sign {kind}".strip()))


def _groups(library: Library, run: RunFolder, notes: list[str]) -> Html:
    splits = list(dict.fromkeys(record["split"] for record in library.evals(RUN)))
    chosen = attempted(lambda: notable.choose(run, splits), [], "the rollouts", notes)
    addresses = InlineMedia(MediaStore(library))
    shown = []
    for one in chosen:
        view = attempted(lambda one=one: _view(library, one), None, f"group {one.group} of step {one.step}", notes)
        if view:
            shown.append(el("article", el("h3", one.why, class_="v-why"),
                            cards.group(view, addresses, links=False, most_frames=_FRAMES),
                            _turns(library, view, addresses), class_="v-telling"))
    return section(f"{len(shown)} telling groups" if shown else "Telling groups", shown, "",
                    "No rollouts yet: they appear with the first step, unless store.rollouts is off.")


def _turns(library: Library, view: GroupView, addresses: InlineMedia) -> Html:
    episodes = [r for r in view.rollouts if turns.is_episode(r)]
    if not episodes:
        return Html("")
    best = max(episodes, key=lambda r: -math.inf if r.reward is None else r.reward)
    shown = turns.read(view, best, box_convention(library, view))[:_TURNS + 1]
    moving = addresses.film(view, best)
    words = f"what episode #{best.index} showed, turn by turn"
    saved = el("a", "as MP4", href=moving.get("mp4"), download=film.file_name(view, best, "mp4"))
    played = (el("figure", el("img", src=moving["gif"], alt=words), el("figcaption", words, " ", saved)) if moving
              else "")
    return el("section", el("h4", f"Turns of #{best.index}"), played, turns.strip(view, best, shown, addresses))


def _view(library: Library, one: notable.NotableGroup) -> GroupView:
    split = one.split if one.source == "eval" else ""
    view = with_marks(library, group(library, RUN, one.source, one.step, one.group, split))
    if one.before is None:
        return view
    step, name = one.before
    earlier = group(library, RUN, one.source, step, name, split)
    both = [dataclasses.replace(r, key=r.key._replace(index=i))
            for i, r in enumerate([*earlier.rollouts, *view.rollouts])]
    return dataclasses.replace(view, rollouts=tuple(both), mean=None, zero_variance=False)


def _origin(path: Path) -> Html:
    env = read_json(path / "env.json") or {}
    packages = env.get("packages")
    rows = [(name, as_json(env[name])[:2000]) for name in ("command", "started", "seed", "python", "platform", "git",
                                                          "hardware") if env.get(name) is not None]
    rows += [(name, as_json(value)[:200]) for name, value in packages.items()] if isinstance(packages, dict) else []
    try:
        config = read_small(path / "config.yaml").decode("utf-8", "replace")
    except OSError:
        config = ""
    pieces = [el("details", el("summary", "Versions and machine"), table(("", ""), rows))] if rows else []
    pieces += [el("details", el("summary", "config.yaml"), folded(config, 20_000, "pre"))] if config else []
    return section("How it was made", pieces, "", "The run has neither env.json nor config.yaml.")


def unreadable_section(remarks: Sequence[str]) -> Html:
    """The section that lists unreadable files; empty if there are none."""
    if not remarks:
        return Html("")
    left = len(remarks) - _MOST_NOTES
    lines = [el("li", words) for words in [*remarks[:_MOST_NOTES], *([f"and {left} more"] if left > 0 else [])]]
    return el("section", el("h2", "What could not be read"), el("ul", *lines))


def attempted(read: Callable[[], Any], otherwise: Any, what: str, notes: list[str]) -> Any:
    """Returns the result of `read`. If damaged files make it fail, adds a note on `what` and returns `otherwise`."""
    try:
        return read()
    except VlrlError as error:
        notes.append(str(error)[:2000])
    except Exception as error:  # files of a run may contain anything
        notes.append(f"{what} cannot be shown: {type(error).__name__}: {json.dumps(str(error)[:300])}")
    return otherwise
