"""Web: act on pages in a real browser, by coordinates on the screenshot; MiniWoB++ is included.

Each turn shows a screenshot of the page. Each action is one of those that the action format `task.form` defines: click,
double_click, drag, scroll, type, key, wait, answer. The page itself decides when the episode is over and whether it was
successful. Pages come from the package miniwob (Farama Foundation, MIT; "World of Bits", Shi et al. 2017;
"Reinforcement Learning on Web Interfaces using Workflow-Guided Exploration", arXiv 1802.08802), or from your own folder
(`task.html`).

Rows of `data.train` (with data.own_samples=false) ask for other goals on these pages. `vlrl data synthesize` finds such
goals by exploring pages, and makes variations of goals that a model fails."""

import importlib.util
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from vlrl.config.base import Positive
from vlrl.config.registry import resolve
from vlrl.data.coordinates import Convention
from vlrl.environments.chromium import chromium_program
from vlrl.errors import ConfigError, DataError, did_you_mean
from vlrl.task import Task
from vlrl.task.environment import Environment
from vlrl.types import Answer, Media, Observation, Parts, Sample, Step

from ._shared import drawn, means
from ._web_actions import FORMS, ActionFormat, UnreadableAction, read
from ._web_browser import SIDES, BrowserLost, BrowserSettings, PageFailed, PagePool, shared
from ._web_explore import ANY, explore, new_seed, vary
from ._web_goals import MOST_GOALS, Goal, episode_goals, instruction, page_of, read_goals
from ._web_oracle import ORACLES, perfect_actions
from ._web_page import Action, PageView

_STEP = 28
"""The side lengths in pixels of a processed image are multiples of this, for models that write points in pixels of the
processed image (models/families.py)."""


class Web(Task):
    """Do what a web page asks. Reward parts: `success`, 1 if the page's own reward is above 0, else 0; `efficiency`,
    `success` multiplied by `decay` for each turn beyond the fewest turns of a successful episode in the group;
    `format`, the share of actions in the right format; `page`, the page's own reward in [-1, 1], with weight 0 by
    default."""

    prompt = "{instruction}"
    stage_fields = ("subgoals",)
    rewards = {"success": 1.0, "efficiency": 0.1, "format": 0.1, "page": 0.0}
    outcome = {"success": 0.5}
    pages: tuple[str, ...] = ("click-test", "click-test-2", "click-button", "click-link", "click-dialog", "click-tab",
                              "click-checkboxes", "click-option", "focus-text-2", "enter-text", "login-user")
    """Names of the training pages, without .html."""
    heldout_pages: tuple[str, ...] = ("click-dialog-2", "click-button-sequence", "enter-password")
    """Names of pages that are never used for training. Evaluations use them in addition to the training pages."""
    html: str = ""
    """Folder with your own pages; empty = miniwob's. It holds all files that they load."""
    form: str = "gui_r1"
    """Action format: gui_r1, ui_tars, or call."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Factor of `efficiency` per superfluous turn. A turn is superfluous beyond the fewest turns of a successful
    episode in the group."""
    scale: Annotated[int, Field(ge=1, le=4)] = 2
    """Screenshot pixels per pixel of the page. The page has 160 x 210 pixels."""
    count: Positive = 4096
    """Number of samples per split. Each sample is a page and a seed."""
    settle_ms: Annotated[int, Field(ge=100, le=10_000)] = 500
    """Milliseconds of page time after each action. They pass on the page's own clock."""
    page_s: Annotated[float, Field(gt=0, le=600)] = 20.0
    """Timeout of a page for one action in seconds. After that, the episode ends with an error."""
    open_pages: Annotated[int, Field(ge=1, le=1000)] = 32
    """Largest number of open pages per process. The processes are those of `environment.workers`. With more episodes,
    some pages are closed. A closed page is opened again at the next action of its episode, and all earlier actions are
    repeated."""
    walk: Annotated[int, Field(ge=1, le=MOST_GOALS)] = 3
    """Maximum sub-goals that `vlrl data synthesize` explores. They are sub-goals of a goal."""
    browser: str = ""
    """Path of Chromium; empty = the one on the PATH."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self._form: Any = resolve("task.form", self.form, FORMS)

    def samples(self, split: str) -> Sequence[Sample]:
        chromium_program(self.browser)
        self._check_pages()
        return drawn(self, split, self._sample)

    def _check_pages(self) -> None:
        """Raises ConfigError if a page is missing, or is both a training page and a held-out page."""
        root, folder = self._root()
        known = self._known()
        for name, pages in (("pages", self.pages), ("heldout_pages", self.heldout_pages)):
            for page in pages:
                if page not in known:
                    raise ConfigError(f"task.{name}: there is no page {page!r} in {root / folder}."
                                      f"{did_you_mean(page, known)}")
        if not self.pages:
            raise ConfigError("task.pages=() leaves no page to train on. Add at least one page to task.pages")
        if both := set(self.pages) & set(self.heldout_pages):
            raise ConfigError(f"task.heldout_pages: {sorted(both)[0]!r} is one of task.pages too, but held-out pages "
                              "are never used for training. Remove the page from one of the two settings")

    def _known(self) -> list[str]:
        root, folder = self._root()
        return [path.stem for path in (root / folder).glob("*.html")]

    def path_of(self, page: str) -> str:
        """The path of a page, relative to the folder from which pages load files."""
        return f"{self._root()[1]}/{page}.html".removeprefix("./")

    def _root(self) -> tuple[Path, str]:
        if self.html:
            if not Path(self.html).is_dir():
                raise ConfigError(f"task.html={self.html!r} is not a folder. Name a folder with .html files")
            return Path(self.html), "."
        spec = importlib.util.find_spec("miniwob")
        if spec is None or not spec.submodule_search_locations:
            raise ConfigError("task.name=web takes its pages from the package miniwob, which is not installed: pip "
                              "install 'vlrl[gui]', or name a folder of .html files with task.html")
        return Path(spec.submodule_search_locations[0]) / "html", "miniwob"

    def _sample(self, split: str, index: int) -> Sample:
        pages = self.pages if split == "train" else (*self.pages, *self.heldout_pages)
        page = pages[index % len(pages)]
        # an even seed is trained on, an odd one is not
        seed = 2 * random.Random(f"web/{self.seed}/{split}/{index}").getrandbits(30) + (split != "train")
        return Sample(id=f"{split}-{index:06d}", row={"seed": seed, **self._shown(page)})

    def _shown(self, page: str) -> dict[str, Any]:
        width, height = (side * self.scale for side in SIDES)
        return {"page": page, "path": self.path_of(page), "category": page, "instruction": self._form.prompt,
                "width": width, "height": height, "scale": self.scale, "heldout_page": page in self.heldout_pages}

    def sample_from_row(self, row: Mapping[str, Any], root: Path | None = None) -> Sample:
        """The sample of a row with `page`, `seed` and `goals`, as `vlrl data synthesize` writes them. Raises DataError
        for a missing page, and for a held-out page in a row outside the split heldout."""
        page, seed, known = row.get("page"), row.get("seed"), self._known()
        if page not in known:
            raise DataError(f"row {row.get('id')!r}: there is no page {page!r}.{did_you_mean(str(page), known)} "
                            "task.html sets the folder of the pages")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise DataError(f"row {row.get('id')!r}: seed={seed!r} is not an integer")
        if page in self.heldout_pages and row.get("split") != "heldout":
            raise DataError(f"row {row.get('id')!r}: its page {page!r} is one of task.heldout_pages, which are never "
                            "used for training. Remove the row, or remove the page from task.heldout_pages")
        read_goals(row)
        sample = super().sample_from_row(row, root)
        return replace(sample, row={**sample.row, "asked": row.get("instruction", ""), **self._shown(page)})

    def propose(self, number: int, parent: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Proposes a new goal, as a row. The goal is found by exploring a page of `pages` or, if `parent` is given, as
        a variation of the goal of this row (see _web_explore.py). None if no goal was found. `number` selects the
        page and the random choices."""
        if parent and parent.get("page") not in self.pages:
            raise DataError(f"row {parent['id']!r}: its page {parent.get('page')!r} is not in task.pages. "
                            "Add the page to task.pages")
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
        """Checks the size of the processed screenshot, if the model writes points in its pixels. Raises DataError if
        this size differs from the size that was assumed when the actions were parsed."""
        known, taken = sample.get("processed_size"), _placed(sample)["processed_size"]
        if known and list(known) != taken and isinstance(self.coordinates, Convention) and \
                self.coordinates.used(sample) == "processed":
            raise DataError(f"sample '{sample.id}': the model sees the screenshot at {known} pixels, but its points "
                            f"were parsed as coordinates in an image of {taken} pixels. Set model.max_pixels, "
                            "model.min_pixels and episode.max_pixels before the task is built, and do not change "
                            "them later. Alternatively, set another task.scale")

    def score_group(self, sample: Sample, answers: Sequence[Answer], services: Any) -> list[Parts]:
        """The part `efficiency` of each episode in a group: MobGRPO's success * decay^(extra turns) (MobileGUI-RL,
        arXiv 2507.05720). Extra turns are those beyond the fewest turns of a successful episode."""
        won = [sum(turn.parts.get("success", 0.0) for turn in answer.turns) for answer in answers]
        fewest = min((len(a.turns) for a, right in zip(answers, won, strict=True) if right), default=0)
        return [{"efficiency": right * self.decay ** (len(a.turns) - fewest) if right else 0.0}
                for a, right in zip(answers, won, strict=True)]

    def metrics(self, sample: Sample, answer: Answer, parts: Parts) -> dict[str, float]:
        """Metrics of an episode: `unread`, the share of actions that could not be parsed, and `turns`, the number of
        turns."""
        read = [turn for turn in answer.turns if not turn.observation.startswith(UNREAD)]
        return {"unread": 1 - len(read) / max(1, len(answer.turns)), "turns": float(len(answer.turns))}

    def summarize(self, records: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Metrics of a split: the success rate by page, e.g. `success/click-test`, and over all training pages and all
        held-out pages."""
        return means((f"success/{name}", record["parts"].get("success") or 0.0)
                     for record in records for sample in [record["sample"]] for name in (
                         sample["page"], "heldout_pages" if sample["heldout_page"] else "trained_pages"))

    def oracle_actions(self, sample: Sample) -> Sequence[str] | None:
        """The actions of a perfect episode; None for a page without a known solution. A page's own goal is played in a
        browser of this process."""
        if "goals" in sample.row:
            actions = [action for goal in episode_goals(sample) for action in goal.actions]
        elif self.html or sample["page"] not in ORACLES:
            return None
        else:
            actions = perfect_actions(self, sample, self._pages())
        return [self._form.write(self, _placed(sample), action) for action in actions]


def _placed(sample: Sample) -> Sample:
    """Returns the sample with the field `processed_size`: the size in pixels that the screenshot is assumed to have
    after image processing. Points that a model writes in pixels of the processed image are converted with this size
    (models/families.py)."""
    size = [round(sample[side] / _STEP) * _STEP for side in ("width", "height")]
    return replace(sample, row={**sample.row, "processed_size": size})


def _proposed(page: str, seed: int, goals: Sequence[Goal], generator: str) -> dict[str, Any]:
    text = instruction([goal.check for goal in goals])
    return {"id": f"{page}-{seed}-{zlib.crc32(text.encode('utf-8', 'backslashreplace')):08x}", "page": page,
            "seed": seed, "category": page, "instruction": text, "goals": [goal.row() for goal in goals],
            "actions": sum(len(goal.actions) for goal in goals), "generator": generator, "verifier": "page state"}


T = TypeVar("T")
UNREAD = "This action cannot be read"
"""Start of the observation after an action that cannot be parsed."""


class WebEnvironment(Environment):
    """An episode on one page. The page's content depends only on the sample's seed, so it is the same in all episodes
    on this sample."""

    def __init__(self, task: Any, sample: Sample, form: ActionFormat, pages: PagePool):
        self._task, self._sample, self._form, self._pages = task, sample, form, pages
        self._page = page_of(pages, sample, task.settle_ms)
        self._done: list[Action] = []
        """The actions carried out on the page so far."""
        self._look: PageView | None = None

    def reset(self, seed: int) -> Observation:
        self._done, self._look = [], None
        self._look = self._retried(self._page.begin)
        return self._shown(self._look, f"Task: {self._page.instruction}")

    def step(self, action: str) -> Step:
        before = self._look
        if before is None:
            raise PageFailed("the first action came before the reset of the episode")
        try:
            parsed = read(self._form, self._task, self._sample, action)
        except UnreadableAction as error:
            return Step(self._shown(before, f"{UNREAD}: {error}."), {"format": 0.0},
                        state=before.sha256, info={"unread": str(error)})
        parts = {"format": float(self._form.strict(action))}
        if parsed.verb == "answer":
            return Step(Observation(), {**parts, "success": 0.0, "page": 0.0}, done=True, state="answered",
                        info=_info(parsed, before))
        now = self._retried(lambda: self._page.act(parsed))
        self._done.append(parsed)
        self._look = now
        if now.done:
            parts |= {"success": float(now.raw > 0), "page": now.raw}
        said = f"The page said: {now.dialog}" if now.dialog else ""
        return Step(self._shown(now, said), parts, done=now.done, state=now.sha256, info=_info(parsed, now))

    def close(self) -> None:
        self._page.close()

    def _retried(self, call: Callable[[], T]) -> T:
        try:
            return call()
        except BrowserLost:
            pass
        try:
            self._restore()
            return call()
        except BrowserLost as error:
            raise PageFailed(f"{error} twice") from None

    def _restore(self) -> None:
        """Opens the page again and repeats all actions. Raises PageFailed if the page looks different afterwards."""
        if self._look is None:
            return
        look = self._page.begin()
        for action in self._done:
            look = self._page.act(action)
        if look.sha256 != self._look.sha256:
            raise PageFailed("the page looks different after the same actions")

    @staticmethod
    def _shown(look: PageView, text: str) -> Observation:
        return Observation(text, [Media(source=look.picture)])


def _info(action: Action, look: PageView) -> dict[str, Any]:
    return {"action": action.verb, "point": action.point, "to": action.to, "text": action.text[:200],
            "raw": look.raw, "screenshot": look.sha256}
