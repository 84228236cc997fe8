"""Web: act on pages in a real browser, by coordinates on the screenshot; MiniWoB++ is included.

Each turn shows a screenshot of the page, and the action is one of its format (`task.form`): click, double_click, drag,
scroll, type, key, wait, answer. The page itself tells when the episode is over and whether it was right. Pages are
those of the package miniwob (Farama Foundation, MIT; "World of Bits", Shi et al. 2017; "Reinforcement Learning on Web
Interfaces using Workflow-Guided Exploration", arXiv 1802.08802), or of an own folder, `task.html`.

Rows of `data.train` (data.own_samples=false) ask for other goals on such pages: `vlrl data synthesize` finds them by
exploring, and makes variations of those that a model fails."""

from __future__ import annotations

import importlib.util
import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vlrl.config.base import Positive
from vlrl.config.registry import resolve
from vlrl.data.coordinates import Convention
from vlrl.environments.chromium import chromium_program
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.task import Task
from vlrl.task.environment import Environment
from vlrl.types import Answer, Parts, Sample

from ._shared import drawn, means
from ._web_actions import FORMS
from ._web_browser import SIDES, BrowserSettings, PageFailed, shared
from ._web_environment import UNREAD, WebEnvironment
from ._web_explore import ANY, explore, new_seed, vary
from ._web_goals import MOST_GOALS, Goal, episode_goals, instruction, read_goals
from ._web_oracle import ORACLES, perfect_actions

_STEP = 28
"""Pixels that divide the sides of a processed image, where a model writes pixels of it (models/families.py)."""


class Web(Task):
    """Do what a web page asks. Parts: `success` 1 if the page's own reward is above 0, `efficiency` the same times
    `decay` for each turn beyond the fewest that succeed in the group, `format` the share of actions in the right
    format, `page` the page's own reward in [-1, 1], which has no weight by default."""

    prompt = "{instruction}"
    stage_fields = ("subgoals",)
    rewards = {"success": 1.0, "efficiency": 0.1, "format": 0.1, "page": 0.0}
    outcome = {"success": 0.5}
    pages: tuple[str, ...] = ("click-test", "click-test-2", "click-button", "click-link", "click-dialog", "click-tab",
                              "click-checkboxes", "click-option", "focus-text-2", "enter-text", "login-user")
    """Names of training pages, without .html."""
    heldout_pages: tuple[str, ...] = ("click-dialog-2", "click-button-sequence", "enter-password")
    """Pages that are never trained on; evaluations use them in addition to the others."""
    html: str = ""
    """Folder of own pages and all that they load; empty = those of the package miniwob."""
    form: str = "gui_r1"
    """Action format: gui_r1, ui_tars, or call."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Factor of `efficiency` for each further turn."""
    scale: Annotated[int, Field(ge=1, le=4)] = 2
    """Pixels of the screenshot per pixel of the page, which has 160 x 210."""
    count: Positive = 4096
    """Samples per split: a page and a seed each."""
    settle_ms: Annotated[int, Field(ge=100, le=10_000)] = 500
    """Milliseconds of the page's own clock that pass after each action."""
    page_s: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Seconds that a page may take for one action, after which its episode ends with an error."""
    open_pages: Annotated[int, Field(ge=1, le=1000)] = 32
    """Pages that one process of `environment.workers` keeps open; those of further episodes are closed, and reopened
    with their actions when it is their turn."""
    walk: Annotated[int, Field(ge=1, le=MOST_GOALS)] = 3
    """Maximum number of sub-goals that `vlrl data synthesize` finds by exploring."""
    browser: str = ""
    """Chromium executable; empty = the one on the path."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._form: Any = resolve("task.form", self.form, FORMS)

    def samples(self, split: str) -> Sequence[Sample]:
        chromium_program(self.browser)
        self._check_pages()
        return drawn(self, split, self._sample)

    def _check_pages(self) -> None:
        """Raises ConfigError for missing pages, and for one that is both trained on and held out."""
        root, folder = self._root()
        known = self._known()
        for name, pages in (("pages", self.pages), ("heldout_pages", self.heldout_pages)):
            for page in pages:
                if page not in known:
                    raise ConfigError(f"task.{name}: there is no page {page!r} in {root / folder}."
                                      f"{did_you_mean(page, known)}")
        if not self.pages:
            raise ConfigError("task.pages=() leaves nothing to train on; name a page")
        if both := set(self.pages) & set(self.heldout_pages):
            raise ConfigError(f"task.heldout_pages: {sorted(both)[0]!r} is one of task.pages too; held-out pages are "
                              "never trained on")

    def _known(self) -> list[str]:
        root, folder = self._root()
        return [path.stem for path in (root / folder).glob("*.html")]

    def path_of(self, page: str) -> str:
        """The path of a page below the folder that pages load from."""
        return f"{self._root()[1]}/{page}.html".removeprefix("./")

    def _root(self) -> tuple[Path, str]:
        """The folder that pages load from, and the folder of the pages within it."""
        if self.html:
            if not Path(self.html).is_dir():
                raise ConfigError(f"task.html={self.html!r} is not a folder; name one with .html files")
            return Path(self.html), "."
        spec = importlib.util.find_spec("miniwob")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError("the pages are those of the package miniwob, which is not installed: pip install "
                              "'vlrl[gui]', or name a folder of .html files with task.html")
        return Path(spec.submodule_search_locations[0]) / "html", "miniwob"

    def _sample(self, split: str, index: int) -> Sample:
        pages = self.pages if split == "train" else (*self.pages, *self.heldout_pages)
        page = pages[index % len(pages)]
        # an even seed is trained on, an odd one is not
        seed = 2 * random.Random(f"web/{self.seed}/{split}/{index}").getrandbits(30) + (split != "train")
        return Sample(id=f"{split}-{index:06d}", row={"seed": seed, **self._shown(page)})

    def _shown(self, page: str) -> dict[str, Any]:
        """The fields of every sample on a page."""
        width, height = (side * self.scale for side in SIDES)
        return {"page": page, "path": self.path_of(page), "category": page, "instruction": self._form.prompt,
                "width": width, "height": height, "scale": self.scale, "heldout_page": page in self.heldout_pages}

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        """The sample of a goal that `vlrl data synthesize` found: `page`, `seed` and `goals` of the row. Raises
        DataError for a missing page, and for a held-out one in a row that is not of split heldout."""
        page, seed, known = row.get("page"), row.get("seed"), self._known()
        if page not in known:
            raise DataError(f"row {row.get('id')!r}: there is no page {page!r}.{did_you_mean(str(page), known)} "
                            "task.html says where pages lie")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise DataError(f"row {row.get('id')!r}: seed={seed!r} is not an integer")
        if page in self.heldout_pages and row.get("split") != "heldout":
            raise DataError(f"row {row.get('id')!r}: its page {page!r} is one of task.heldout_pages, which are never "
                            "trained on: leave the row out, or the page there")
        read_goals(row)
        sample = super().sample_from_row(row, root)
        return replace(sample, row={**sample.row, "asked": row.get("instruction", ""), **self._shown(page)})

    def propose(self, number: int, parent: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Explores a page of `pages` by a walk, or varies a goal on one; see _web_explore.py."""
        if parent and parent.get("page") not in self.pages:
            raise DataError(f"{parent['id']!r} is not a prompt on a page of task.pages")
        rng = random.Random(f"web/{self.seed}/propose/{number}/{parent['id'] if parent else ''}")
        try:
            if parent is None:
                way, page, seed = "walk", self.pages[number % len(self.pages)], new_seed(rng)
                goals = explore(self, page, seed, [ANY] * rng.randint(1, self.walk), rng)
                return _proposed(page, seed, goals, way) if goals else None
            variant = vary(self, parent, rng)
            return _proposed(parent["page"], variant[1], variant[2], f"vary-{variant[0]}") if variant else None
        except PageFailed as error:
            raise DataError(f"page {parent['page'] if parent else page!r}: {error}") from None

    def _pages(self) -> Any:
        return shared(BrowserSettings(self._root()[0], self.scale, self.browser, self.page_s, self.open_pages))

    def environment(self, sample: Sample) -> Environment:
        return WebEnvironment(self, _placed(sample), self._form, self._pages())

    def score(self, sample: Sample, answer: Answer) -> Parts:
        self._check_size(sample)
        turns = [turn.parts for turn in answer.turns]
        success, page = (sum(parts.get(name, 0.0) for parts in turns) for name in ("success", "page"))
        formed = sum(parts.get("format", 0.0) for parts in turns) / max(1, len(turns))
        return {"success": success, "efficiency": success, "format": formed, "page": page}

    def _check_size(self, sample: Sample) -> None:
        """Raises DataError if the model writes pixels of what it sees, and sees another size than assumed."""
        known, taken = sample.get("processed_size"), _placed(sample)["processed_size"]
        if known and list(known) != taken and isinstance(self.coordinates, Convention) and \
                self.coordinates.used(sample) == "processed":
            raise DataError(f"sample '{sample.id}': the model sees the screenshot as {known} pixels, and its points "
                            f"were read as pixels of {taken}: leave model.max_pixels, model.min_pixels and "
                            "episode.max_pixels as they are, or change task.scale")

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        """MobGRPO's success * decay^(extra steps) (MobileGUI-RL, arXiv 2507.05720), counting the steps beyond the
        fewest turns that succeed."""
        won = [sum(turn.parts.get("success", 0.0) for turn in answer.turns) for answer in answers]
        fewest = min((len(a.turns) for a, right in zip(answers, won, strict=True) if right), default=0)
        return [{"efficiency": right * self.decay ** (len(a.turns) - fewest) if right else 0.0}
                for a, right in zip(answers, won, strict=True)]

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """`unread`, the share of unreadable actions, and `turns`."""
        read = [turn for turn in answer.turns if not turn.observation.startswith(UNREAD)]
        return {"unread": 1 - len(read) / max(1, len(answer.turns)), "turns": float(len(answer.turns))}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Success by page (`success/click-test`), and over training pages and held-out pages."""
        return means((f"success/{name}", record["parts"].get("success") or 0.0)
                     for record in records for sample in [record["sample"]] for name in (
                         sample["page"], "heldout_pages" if sample["heldout_page"] else "trained_pages"))

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        """Plays the page in a browser of this process; None for a page without a known solution."""
        if "goals" in sample.row:
            actions = [action for goal in episode_goals(sample) for action in goal.actions]
        elif self.html or sample["page"] not in ORACLES:
            return None
        else:
            actions = perfect_actions(self, sample, self._pages())
        return [self._form.write(self, _placed(sample), action) for action in actions]


def _placed(sample: Sample) -> Sample:
    """The sample with the size in which a model that writes pixels of the processed image (models/families.py) sees its
    screenshots."""
    size = [round(sample[side] / _STEP) * _STEP for side in ("width", "height")]
    return replace(sample, row={**sample.row, "processed_size": size})


def _proposed(page: str, seed: int, goals: Sequence[Goal], generator: str) -> dict[str, Any]:
    """The row of a goal. Its id says what it holds, so that rows of several calls can be put together."""
    text = instruction([goal.check for goal in goals])
    return {"id": f"{page}-{seed}-{zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}", "page": page,
            "seed": seed, "category": page, "instruction": text, "goals": [goal.row() for goal in goals],
            "actions": sum(len(goal.actions) for goal in goals), "generator": generator, "verifier": "page state"}
