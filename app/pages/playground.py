"""The Playground page: asks a model about a sample or an upload, and streams the answers."""

import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gradio as gr

from vlrl.config.registry import failure
from vlrl.errors import VlrlError

from .. import cards, draw, in_memory, models, tokens
from ..asking import IMAGES, MOST_ANSWERS, MOST_TOKENS, SPLITS, VIDEOS, Ask, tasks_of, title_of
from ..html import Html, el, folded, join, note
from ..marks import color
from ..playground import AnsweredGroup, Job, Playground, Progress
from ..site import Site

_PHASES = {"waiting": "Waiting", "loading": "Loading", "preparing": "Reading the question", "writing": "Writing",
           "scoring": "Scoring", "done": "Done", "stopped": "Stopped", "failed": "Failed"}
_MOST_TOKEN_VIEWS = 8
_SAMPLE, _UPLOAD = "A sample of the task", "An upload"


class Page:
    """The components of the Playground page and the handlers of their events."""

    def __init__(self, site: Site):
        self.site, self.play = site, Playground(site.library, site.trust_tasks)
        self.jobs: dict[str, Job] = {}
        """Running jobs by their ids. The browser sends the id of a job to stop the job."""

    def build(self) -> None:
        site = self.site
        with gr.Row(elem_classes="v-controls"):
            self.model = gr.Dropdown([], label="Model", allow_custom_value=True, elem_id="v-play-model", min_width=220,
                                     info="A checkpoint, a folder, or a hub name that is on this machine.")
            self.task = gr.Dropdown([], label="Task", allow_custom_value=True, elem_id="v-play-task", min_width=220,
                                    info="It asks the question and scores the answers.")
        self.source = gr.Radio([_SAMPLE, _UPLOAD], value=_SAMPLE, show_label=False, elem_id="v-play-source",
                               container=False)
        with gr.Column(elem_id="v-play-sample-part") as self.of_task:
            with gr.Row(elem_classes="v-controls v-which"):
                self.split = gr.Dropdown(list(SPLITS), value="heldout", label="Split", elem_id="v-play-split",
                                         min_width=110)
                self.sample = gr.Textbox("#0", label="Sample: an id, or # and its place", lines=1,
                                         elem_id="v-play-sample", min_width=110)
                before = gr.Button("Previous", elem_id="v-play-previous", min_width=90, scale=0, size="sm")
                after = gr.Button("Next", elem_id="v-play-next", min_width=90, scale=0, size="sm")
                other = gr.Button("Random", elem_id="v-play-random", min_width=90, scale=0, size="sm")
            self.preview = gr.HTML(elem_id="v-play-preview", apply_default_css=False)
        with gr.Column(visible=False, elem_id="v-play-upload-part") as self.of_upload:
            self.file = gr.File(label="Image or video", file_types=[*IMAGES, *VIDEOS], type="filepath",
                                elem_id="v-play-file")
            self.question = gr.Textbox(label="Question", lines=2, elem_id="v-play-question", placeholder="Locate the "
                                       "red circle. Answer with its box as [x1, y1, x2, y2].")
        with gr.Row(elem_classes="v-controls"):
            self.answers = gr.Slider(1, MOST_ANSWERS, 4, step=1, label="Answers", elem_id="v-play-answers",
                                     min_width=160)
            self.heat = gr.Slider(0, 2, 1, step=0.05, label="Temperature (0 = greedy)", min_width=160,
                                  elem_id="v-play-temperature")
            self.most = gr.Number(64, label="Most new tokens", precision=0, minimum=1, maximum=MOST_TOKENS,
                                  elem_id="v-play-most", min_width=110)
            self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, elem_id="v-play-seed", min_width=90)
        with gr.Row(elem_classes="v-controls"):
            ask = gr.Button("Ask", variant="primary", elem_id="v-play-ask", min_width=140, scale=0)
            stop = gr.Button("Stop", variant="stop", elem_id="v-play-stop", min_width=140, scale=0)
        status = gr.HTML(elem_id="v-play-status", apply_default_css=False)
        shown = gr.HTML(elem_id="v-play-answer", apply_default_css=False)
        current, place = gr.State(""), gr.State((0, 1))

        which = [self.model, self.task, self.split, self.sample]
        preview = [self.preview, place]
        quick: dict[str, Any] = {"show_progress": "hidden", "queue": False}
        site.on_location(self.arrive, [*which, self.most, self.heat, *preview], which)
        site.on(self.source.change, self.switch, [self.source], [self.of_task, self.of_upload], **quick)
        site.on(self.task.input, self.take_task, which, [self.most, self.heat, *preview], **quick)
        for event in (self.split.input, self.sample.submit):
            site.on(event, self.look, which, preview, **quick)
        for button, move in ((before, -1), (after, 1), (other, 0)):
            site.on(button.click, lambda *args, move=move: self.step(move, *args), [*which, place],
                    [self.sample, *preview], **quick)
        inputs = [*which, self.source, self.file, self.question, self.answers, self.heat, self.most, self.seed]
        site.on(ask.click, self.ask, inputs, [current, status, shown], show_progress="hidden", concurrency_limit=None)
        site.on(stop.click, self.stop, [current], [], queue=False)

    def arrive(self, where: Mapping[str, str], model: str | None, task: str | None, split: str, sample: str
               ) -> tuple[Any, ...]:
        """Returns new values for the drop-down lists of models and tasks, split, sample, answer length and temperature,
        and the results of `look`. The URL parameters may preselect a run, model, task, split and sample."""
        known, tasks = models.listed(self.site.library), self.play.tasks.listed()
        drawn = next((value for _, value in tasks if value == "grounding"), tasks[0][1])  # needs no data
        first = tasks[0][1] if tasks[0][1].startswith("run:") else drawn
        run = where.get("run", "")
        of_run = next((value for _, value in known if value.startswith(f"{run}/checkpoints/")), None) if run else None
        of_own = tasks_of(self.play.tasks.tree(run)) if run else []
        own = f"run:{run}" if of_own else None
        model, before = where.get("model") or of_run or model or known[0][1], task
        task = where.get("task") or own or task or first
        if own and task == own and own not in [value for _, value in tasks]:  # listed by another run of the same task
            tasks = [(f"{title_of(of_own)}, as in run {run}", own), *tasks]
        split = where.get("split") or where.get("set") or split or "heldout"
        sample = where.get("sample") or sample or "#0"
        most, heat = ((gr.skip(), gr.skip()) if task == before else  # the user's values are kept
                      self.play.tasks.usual(task, models.run_of(self.site.library, model)))
        return (gr.update(choices=known, value=model), gr.update(choices=tasks, value=task),
                split if split in SPLITS else "heldout", sample, most, heat, *self.look(model, task, split, sample))

    def switch(self, source: str) -> tuple[Any, Any]:
        return gr.update(visible=source == _SAMPLE), gr.update(visible=source == _UPLOAD)

    def take_task(self, model: str, task: str, split: str, sample: str) -> tuple[Any, ...]:
        """Returns the default answer length and temperature of a newly chosen task, and the results of `look`."""
        return (*self.play.tasks.usual(task or "", models.run_of(self.site.library, model or "")),
                *self.look(model, task, split, sample))

    def look(self, model: str, task: str, split: str, sample: str) -> tuple[Html, tuple[int, int]]:
        """Returns a preview of the sample, and (index of the sample, number of samples in the split). For an invalid
        sample, the preview is the error message."""
        try:
            shown = self.play.sample(Ask(model=model or "", task=task or "", split=split, sample=sample))
        except Exception as error:  # not fatal: an upload can be asked about
            return note(_words(error), kind="bad"), (0, 1)
        view = in_memory.sample_view(shown, task, split)
        facts = el("div", el("b", shown.sample.id), el("span", f"#{shown.place} of {shown.count:,}"), class_="v-facts")
        body = el("div", el("div", el("h4", "Question"), folded(shown.question, 1200), el("h4", "Target"),
                            folded(view.target, 600, "pre"), class_="v-half"),
                  el("div", draw.media(view, in_memory.InlineImages(shown.media)),
                     style="flex:0 1 15rem;max-width:100%"),
                  class_="v-question", style="display:flex;flex-wrap:wrap;align-items:start;gap:.75rem")
        return el("section", facts, body, class_="v"), (shown.place, shown.count)

    def step(self, move: int, model: str, task: str, split: str, sample: str, place: Sequence[int]) -> tuple[Any, ...]:
        """Moves from a sample to the next (`move` 1), the previous (-1) or a random sample (0) of the split. `place` is
        (sample index, number of samples). Returns "#" followed by the new index, and the results of `look`."""
        at, count = int(place[0]), max(1, int(place[1]))
        wanted = (at + move) % count if move else random.randrange(count)
        return f"#{wanted}", *self.look(model, task, split, f"#{wanted}")

    def ask(self, model: str, task: str, split: str, sample: str, source: str, file: str | None, question: str,
            answers: float, temperature: float, length: float | None, seed: float | None) -> Iterator[tuple[Any, ...]]:
        """Generates the answers. Yields (id of the job, status, answers so far) until all answers are complete."""
        upload = Path(file) if source == _UPLOAD and file else None
        if source == _UPLOAD and not upload:
            yield "", note("Choose an image or a video first.", kind="bad"), ""
            return
        job = self.play.answer(Ask(
            model=(model or "").strip(), task=(task or "").strip(), split=split, sample=sample or "#0", upload=upload,
            question=question or "", answers=int(answers), temperature=float(temperature),
            max_new_tokens=int(length or 0), seed=int(seed or 0)))
        name = secrets.token_urlsafe(8)
        self.jobs[name] = job
        try:
            for progress in job.follow():
                yield name, _status(progress), _shown(progress)
        finally:
            self.jobs.pop(name, None)

    def stop(self, name: str) -> None:
        job = self.jobs.get(name)
        if job:
            job.stop()


def build(site: Site) -> None:
    """Adds the page to the app."""
    Page(site).build()


def _status(progress: Progress) -> Html:
    if progress.phase == "failed":
        return note(progress.remark, kind="bad")
    words = join([_PHASES[progress.phase], progress.remark], ": ")
    share = progress.done if progress.phase in ("loading", "writing", "done") else 1.0 if progress.ended else None
    bar = "" if progress.ended else el("progress", max=1, value=share, aria_label="progress",
                                          style="display:block;width:min(100%,24rem)")
    percent = f" {100 * progress.done:.0f} %" if progress.phase in ("loading", "writing") else ""
    return el("div", el("span", words, percent), bar, class_="v v-status", role="status", data_phase=progress.phase)


def _shown(progress: Progress) -> Html:
    if isinstance(progress.result, AnsweredGroup):
        return _group_shown(progress.result)
    boxes = [el("article", el("div", el("i", class_="v-swatch", style=f"background:{color(i)}"), el("b", f"#{i}"),
                              class_="v-top"),
                el("div", text or "…", class_="v-text v-live"), class_="v-card", style=f"--v-c:{color(i)}")
             for i, text in enumerate(progress.texts)]
    return el("section", el("div", *boxes, class_="v-strip"), class_="v") if boxes else Html("")


def _group_shown(drawn: AnsweredGroup) -> Html:
    view = in_memory.group_view(drawn.group, drawn.chosen.label)
    texts = tokens.Texts.of(drawn.tokenizer)
    views = [el("details", el("summary", f"Tokens of answer #{r.index}"), tokens.answer(r, "logprob", texts))
             for r in view.rollouts[:_MOST_TOKEN_VIEWS]]
    notes = [note(words, kind="warn") for words in drawn.notes]
    written = sum(len(r.token_ids) for r in view.rollouts)
    facts = el("div", el("b", drawn.chosen.label), el("span", f"{len(view.rollouts)} answers, {written:,} tokens"),
               class_="v-facts")
    images = in_memory.InlineImages(drawn.group.prompt.media)
    return el("section", facts, *notes, cards.group(view, images, links=False), *views, class_="v")


def _words(error: Exception) -> str:
    return str(error) if isinstance(error, VlrlError) else failure(error)
